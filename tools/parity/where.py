"""--check_parity --where: find the first operation of a layout's step with another result than one
process.

Every rank of both halves records its tensors (tools/parity/operations.py). This file compares the ranks'
parts with the tensors of the single process, in the order of execution, and names the first seam
further away than rounding, with the function that computes the seam on the layout.
"""

import math
from collections import defaultdict
from functools import partial
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from distributed.layout import AXES, pattern_of
from parallel import sequence_index
from tools.parity import compare as parity
from tools.parity.halves import run_both_halves

# Relative to the norm of the tensor, in fp32; 0: must be equal. Rounding grows with depth and in
# the backward.
TOLERANCES = dict(
    initial=0.0,
    sequences=0.0,
    count=0.0,
    inputs=0.0,
    forward=2e-5,
    loss=parity.LOSS_TOLERANCE,
    backward=parity.GRADIENT_TOLERANCE,
    gradient=parity.GRADIENT_TOLERANCE,
    norm=parity.NORM_TOLERANCE,
    clipped=parity.GRADIENT_TOLERANCE + parity.NORM_TOLERANCE,
    after=parity.WEIGHT_TOLERANCE,
)
PHASES = tuple(TOLERANCES)  # in the order of execution
PARTS = {"q": "queries", "k": "keys", "v": "values"}


class Piece(NamedTuple):
    """A rank's part of a seam: some rows of a micro-batch, or a parameter's part that begins at
    `offset`."""

    rank: int
    rows: list[str] | None
    offset: tuple[int, ...] | None
    tensor: Tensor


class Seam(NamedTuple):
    """A comparison; error nan: shapes do not allow a comparison. where: the differing ranks, in
    words, "" = all holders.
    factor: layout = factor x one process, if such a factor exists."""

    phase: str
    name: str
    call: int
    error: float
    tolerance: float
    where: str = ""
    factor: float | None = None
    note: str = ""

    @property
    def differs(self) -> bool:
        return not self.error <= self.tolerance

    @property
    def size(self) -> str:
        return self.note or f"{self.error:.1e}"

    @property
    def label(self) -> str:
        return describe_seam(self.phase, self.name, self.call)


def describe_seam(phase: str, name: str, call: int) -> str:
    """The seam in words: "finished gradient of head.weight"."""
    if phase == "sequences":
        return "the sequences of the global batch"
    if phase == "count":
        return "count_tokens, the tokens of the global batch"
    if phase == "loss":
        return "loss"
    if phase == "norm":
        return "gradient norm"
    if phase == "forward" and " " in name:
        return describe_part(*name.split(" "))
    if phase == "backward" and " " in name:
        return describe_gradient_of_part(*name.split(" "))
    if call > 0:
        name = f"{name} (call {call + 1})"
    if phase == "initial":
        return f"initial value of {name}"
    if phase == "inputs":
        return f"input {name}"
    if phase in ("forward", "logits"):
        return f"forward of {name}"
    if phase == "backward":
        return f"backward, gradient of the output of {name}"
    if phase == "gradient":
        return f"finished gradient of {name}"
    if phase == "clipped":
        return f"clipped gradient of {name}"
    return f"{name} after the step"


def describe_part(module: str, part: str) -> str:
    if part == "input":
        return f"forward of {module_around(module)} (what it gives to {module})"
    if part == "attention":
        return f"forward of {module} (attention)"
    return f"forward of {module} (the {PARTS[part]})"


def describe_gradient_of_part(module: str, part: str) -> str:
    if part == "attention":
        return f"backward of {module} (gradient of attention)"
    return f"backward of {module} (gradient of the {PARTS[part]})"


def module_around(module: str) -> str:
    """blocks.0.attn -> blocks.0 -> the model"""
    return module.rpartition(".")[0].removesuffix("blocks").removesuffix(".") or "the model"


# ---------------------------------------------------------------- the ranks' parts, side by side


def pieces_of(parts: list[dict]) -> dict[tuple, list[Piece]]:
    """{(phase, name, call): pieces of all ranks}, in the order of execution."""
    # {name: {stage: calls}}, to count on over the stages
    calls = defaultdict(lambda: defaultdict(int))
    records = [(part["rank"], *record) for part in parts for record in part["records"]]
    for _, phase, name, stage, call, *_ in records:
        if phase == "forward":
            calls[name][stage] = max(calls[name][stage], call + 1)
    found = defaultdict(list)
    for rank, phase, name, stage, call, *piece in records:
        earlier = sum(n for other, n in calls[name].items() if other < stage)
        found[phase, name, call + earlier if phase in ("forward", "backward") else 0].append(
            Piece(rank, *piece)
        )
    # stable: recorded order within a phase
    return dict(sorted(found.items(), key=lambda item: PHASES.index(item[0][0])))


def as_rows(piece: Piece) -> Tensor | None:
    """The tensor as (rows, ...), from (B, T, ...) or (B * T, ...); None for a tensor without rows."""
    x = piece.tensor
    n = len(piece.rows)
    if x.dim() == 0 or x.shape[0] % n:
        return None
    return x if x.shape[0] == n else x.unflatten(0, (n, -1))


def coordinates(rank: int, degrees: dict[str, int]) -> dict[str, int]:
    return dict(zip(AXES, np.unravel_index(rank, [degrees[axis] for axis in AXES]), strict=True))


def placements(whole, local, cp: int, tp: int, T: int) -> list[tuple]:
    """All (dim cut by cp or None, dim cut by tp or None) that cut the shape `whole` down to the
    shape `local`."""
    dims = range(1, len(whole))
    options = product(
        [None, *(d for d in dims if cp > 1 and whole[d] == T)], [None, *(dims if tp > 1 else ())]
    )

    def cut(cp_dim, tp_dim):
        return [whole[d] / (cp if d == cp_dim else 1) / (tp if d == tp_dim else 1) for d in dims]

    return [option for option in options if cut(*option) == list(local[1:])]


def part_of(whole: Tensor, place: tuple, at: dict, degrees: dict) -> Tensor:
    """The part of the rank with coordinates `at`: cp cuts head-tail chunks, tp then cuts contiguous
    pieces."""
    cp_dim, tp_dim = place
    if cp_dim is not None:
        whole = whole.index_select(
            cp_dim, sequence_index(whole.shape[cp_dim], degrees["cp"], at["cp"])
        )
    return whole if tp_dim is None else whole.chunk(degrees["tp"], tp_dim)[at["tp"]]


def factor_of(pairs: list[tuple[Tensor, Tensor]]) -> float | None:
    """c with got = c * want in all pairs, or None."""
    got, want = (torch.cat([x.flatten().double() for x in xs]) for xs in zip(*pairs, strict=True))
    square = (want @ want).item()
    if not square or not got.isfinite().all():
        return None
    c = (got @ want).item() / square
    return c if (got - c * want).norm() <= 1e-3 * want.norm() * max(abs(c), 1e-3) else None


def compare_parts(one: list[Piece], layout: list[Piece]):
    """(error of each rank, pairs of parts) of pieces with an offset, such as parameters; None if
    shapes differ."""
    whole = one[0].tensor
    pairs = []
    for piece in layout:
        part = tuple(
            slice(o, o + n) for o, n in zip(piece.offset or (), piece.tensor.shape, strict=False)
        )
        pairs.append((piece.tensor, whole[part]))
        if piece.tensor.shape != whole[part].shape:
            return None
    return errors_by_rank(pairs, layout, whole), pairs


def compare_rows(one: list[Piece], layout: list[Piece], degrees: dict, T: int, is_gradient: bool):
    """(error of each rank, pairs of parts) of activations under the best placement; None if no
    placement fits the shapes."""
    parts = [as_rows(p) for p in one]
    locals_ = [as_rows(p) for p in layout]
    if any(
        x is None or x.shape[1:] != side[0].shape[1:] for side in (parts, locals_) for x in side
    ):
        return None
    whole = torch.cat(parts)
    index = {key: i for i, key in enumerate(key for p in one for key in p.rows)}
    candidates = []
    for place in placements(whole.shape, locals_[0].shape, degrees["cp"], degrees["tp"], T):
        pairs = []
        for piece, got in zip(layout, locals_, strict=True):
            rows = whole[[index[key] for key in piece.rows]]
            pairs.append((got, part_of(rows, place, coordinates(piece.rank, degrees), degrees)))
        candidates.append(pairs)
        if is_gradient and place[1] is None and degrees["tp"] > 1:
            candidates.append(sum_over_tp(pairs, layout, degrees["tp"]))
    found = [(errors_by_rank(pairs, layout, whole), pairs) for pairs in candidates]
    return min(found, key=lambda errors_and_pairs: max(errors_and_pairs[0].values()), default=None)


def sum_over_tp(pairs, layout: list[Piece], tp: int):
    """If tp ranks hold a tensor whole, each rank's gradient may be an addend: replace them by the
    sum over tp."""
    sums = defaultdict(int)
    for (got, _), piece in zip(pairs, layout, strict=True):
        sums[piece.rank // tp, tuple(piece.rows)] += got
    return [
        (sums[piece.rank // tp, tuple(piece.rows)], want)
        for (_, want), piece in zip(pairs, layout, strict=True)
    ]


def errors_by_rank(pairs, layout: list[Piece], whole: Tensor) -> dict[int, float]:
    errors = defaultdict(float)
    for (got, want), piece in zip(pairs, layout, strict=True):
        errors[piece.rank] = max(errors[piece.rank], parity.distance(got, want, whole))
    return dict(errors)


def compare_seams(one: list[dict], layout: list[dict]) -> list[Seam]:
    """All seams in the order of execution."""
    degrees = layout[0]["degrees"]
    T = one[0]["seq_len"]
    ours = pieces_of(one)
    theirs = pieces_of(layout)
    first_of_data = [
        p
        for p in layout
        if all(coordinates(p["rank"], degrees)[axis] == 0 for axis in ("pp", "cp", "tp"))
    ]
    sequences, expected = (
        sorted(key for part in parts for key in part["rows"]) for parts in (first_of_data, one)
    )
    seams = [Seam("sequences", "", 0, float(sequences != expected), TOLERANCES["sequences"])]
    if {key for part in layout for key in part["rows"]} - set(expected):
        return seams
    for (phase, name, call), pieces in ours.items():
        others = theirs.get((phase, name, call), [])
        note = ""
        tolerance = TOLERANCES[phase]
        if phase == "backward":
            forward = theirs.get(("forward", name, call), [])
            have = {(p.rank, tuple(p.rows)) for p in others}  # a missing gradient counts as zero
            lost = [
                p._replace(tensor=torch.zeros_like(p.tensor))
                for p in forward
                if (p.rank, tuple(p.rows)) not in have
            ]
            others = others + lost
            note = "no gradient arrives" if lost else ""
        if phase == "loss":  # the sum over ranks, as in reduce_loss
            pieces, others = (
                [Piece(0, None, None, sum(p.tensor for p in ps))] for ps in (pieces, others)
            )
        compare = compare_parts
        if phase in ("forward", "backward", "inputs"):
            compare = partial(compare_rows, degrees=degrees, T=T, is_gradient=phase == "backward")
        found = compare(pieces, others) if others else None
        if found is None:
            missing = (
                "held by no rank"
                if not others and phase in ("initial", "gradient", "after")
                else ""
            )
            seams.append(
                Seam(phase, name, call, math.inf if missing else math.nan, tolerance, note=missing)
            )
            continue
        errors, pairs = found
        ranks = sorted(rank for rank, error in errors.items() if not error <= tolerance)
        where, factor = (
            (which_ranks(ranks, sorted(errors), degrees), factor_of(pairs)) if ranks else ("", None)
        )
        seams.append(Seam(phase, name, call, max(errors.values()), tolerance, where, factor, note))
    return sorted(seams, key=lambda seam: PHASES.index(seam.phase))


# ---------------------------------------------------------------- the report


def which_ranks(ranks: list[int], holders: list[int], degrees: dict[str, int]) -> str:
    """ " (rank 1 of tp)" if exactly the holders with tp coordinate 1 differ; "" if all holders
    differ."""
    if len(ranks) == len(holders):
        return ""
    for axis, at in coordinates(ranks[0], degrees).items():
        if ranks == [rank for rank in holders if coordinates(rank, degrees)[axis] == at]:
            return f" (rank {at} of {axis})"
    return f" (rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))})"


def report_seams(found: list[Seam], than: str, look) -> tuple[str, int]:
    """(text, exit status): the first difference with its neighbours, or the largest error if there
    is no difference.

    than: words after "no difference"; look: function from a seam to a hint.
    """
    seams = [s for s in found if not math.isnan(s.error)]
    # of one half only, or with another shape
    others = sorted({pattern_of(s.name) for s in found if math.isnan(s.error)})
    rest = [f"not compared: {', '.join(others)}"] * bool(others)
    first = next((s for s in seams if s.differs), None)
    if first is None:
        worst = max(seams, key=lambda s: s.error / (s.tolerance or 1))
        largest = (
            f"the largest is {worst.error:.1e}, {worst.label}"
            if worst.error
            else "all are equal to the last bit"
        )
        return "\n".join([f"no difference{than} at {len(seams)} seams; {largest}", *rest]), 0
    before = seams[: seams.index(first)]
    after = seams[seams.index(first) + 1 :]
    factor = (
        f", {first.factor:.4g} times what it should be"
        if first.factor and abs(first.factor - 1) > 1e-3
        else ""
    )
    agreement = f"everything before agrees to {max((s.error for s in before), default=0):.0e} ({len(before)} seams)"
    lines = [f"first difference: {first.label}{first.where}: {first.size}{factor}; {agreement}"]
    lines += [f"  agrees   {s.error:.1e}  {s.label}" for s in before[-2:]]
    lines += [
        f"  differs  {s.size}  {s.label}" for s in [first, *[s for s in after if s.differs][:2]]
    ]
    return "\n".join([*lines, f"look at: {look(first)}", *rest]), 1


def first_difference_of(one: list[dict], layout: list[dict]) -> tuple[str, int]:
    """(report, 0 equal | 1 different) from Seams.found() of each rank of the two runs."""
    from tools.parity.advice import look_at

    seams = compare_seams(one, layout)
    return report_seams(seams, "", partial(look_at, seams=seams, layout=layout))


# ---------------------------------------------------------------- the command


def check_where(main, cfg, advice: bool) -> int:
    """--check_parity --where of the running recipe: compare a step on one process with the layout;
    return the exit status.
    advice: print which functions to look at. Two steps run, because only the beginning of the
    second proves that all updates of
    weights and biases are done."""
    if cfg.compile:
        raise ValueError(
            "--where sees no operations inside of compiled blocks; leave --compile out, or --where"
        )
    read = partial(parity.read_parts, beginning="seams", function="forward_backward")
    status, halves = run_both_halves(main, cfg, read, where=True, steps=2)
    if not status:
        text, status = first_difference_of(*halves)
        print(
            "\n".join(
                line for line in text.splitlines() if advice or not line.startswith("look at: ")
            ),
            flush=True,
        )
    return status
