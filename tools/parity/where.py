"""--check_parity --where: find the first operation of a layout's step with another result than one
process.

Every rank of both halves records its tensors (tools/parity/operations.py). This file compares the ranks'
parts with the tensors of the single process, in the order of execution, and names the first seam
further away than rounding, with the function that computes the seam on the layout.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable
from functools import partial
from itertools import product
from types import FunctionType
from typing import Any, NamedTuple

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
PARTS = {"q": "queries after rotation", "k": "keys after rotation", "v": "values"}


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
    calls = defaultdict(Counter)
    for part in parts:
        for phase, name, stage, call, *_ in part["records"]:
            if phase == "forward":
                calls[name][stage] = max(calls[name][stage], call + 1)
    found = {phase: defaultdict(list) for phase in PHASES}
    for part in parts:
        for phase, name, stage, call, *piece in part["records"]:
            number = 0
            if phase in ("forward", "backward"):
                number = call + calls_before(calls[name], stage)
            found[phase][phase, name, number].append(Piece(part["rank"], *piece))
    in_order = {}
    for pieces in found.values():
        in_order |= pieces
    return in_order


def calls_before(calls: Counter, stage: int) -> int:
    """How often the stages before this one call the module. calls: {stage: calls}."""
    return sum(n for other, n in calls.items() if other < stage)


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
    cp_dims = [None]
    if cp > 1:
        cp_dims += [d for d in dims if whole[d] == T]
    tp_dims = [None]
    if tp > 1:
        tp_dims += dims
    found = []
    for cp_dim, tp_dim in product(cp_dims, tp_dims):
        cut = list(whole)
        if cp_dim is not None:
            cut[cp_dim] /= cp
        if tp_dim is not None:
            cut[tp_dim] /= tp
        if cut[1:] == list(local[1:]):
            found.append((cp_dim, tp_dim))
    return found


def part_of(whole: Tensor, place: tuple, at: dict, degrees: dict) -> Tensor:
    """The part of the rank with coordinates `at`: cp cuts head-tail chunks, tp then cuts contiguous
    pieces."""
    cp_dim, tp_dim = place
    if cp_dim is not None:
        index = sequence_index(whole.shape[cp_dim], degrees["cp"], at["cp"])
        whole = whole.index_select(cp_dim, index)
    if tp_dim is not None:
        whole = whole.chunk(degrees["tp"], tp_dim)[at["tp"]]
    return whole


def factor_of(pairs: list[tuple[Tensor, Tensor]]) -> float | None:
    """c with got = c * want in all pairs, or None."""
    got = torch.cat([x.flatten().double() for x, _ in pairs])
    want = torch.cat([x.flatten().double() for _, x in pairs])
    square = (want @ want).item()
    if not square or not got.isfinite().all():
        return None
    c = (got @ want).item() / square
    if (got - c * want).norm() <= 1e-3 * want.norm() * max(abs(c), 1e-3):
        return c
    return None


def compare_parts(
    one: list[Piece], layout: list[Piece]
) -> tuple[dict[int, float], list[tuple]] | None:
    """(error of each rank, pairs of parts) of pieces with an offset, such as parameters; None if
    shapes differ."""
    whole = one[0].tensor
    pairs = []
    for piece in layout:
        sizes = zip(piece.offset or (), piece.tensor.shape, strict=False)
        part = whole[tuple(slice(first, first + size) for first, size in sizes)]
        if piece.tensor.shape != part.shape:
            return None
        pairs.append((piece.tensor, part))
    return errors_by_rank(pairs, layout, whole), pairs


def compare_rows(
    one: list[Piece], layout: list[Piece], degrees: dict, T: int, is_gradient: bool
) -> tuple[dict[int, float], list[tuple]] | None:
    """(error of each rank, pairs of parts) of activations under the best placement; None if no
    placement fits the shapes."""
    parts = [as_rows(p) for p in one]
    locals_ = [as_rows(p) for p in layout]
    if not same_rows(parts) or not same_rows(locals_):
        return None
    whole = torch.cat(parts)
    index = {}
    for piece in one:
        for key in piece.rows:
            index[key] = len(index)
    candidates = []
    for place in placements(whole.shape, locals_[0].shape, degrees["cp"], degrees["tp"], T):
        pairs = []
        for piece, got in zip(layout, locals_, strict=True):
            rows = whole[[index[key] for key in piece.rows]]
            pairs.append((got, part_of(rows, place, coordinates(piece.rank, degrees), degrees)))
        candidates.append(pairs)
        if is_gradient and place[1] is None and degrees["tp"] > 1:
            candidates.append(sum_over_tp(pairs, layout, degrees["tp"]))
    best = None
    for pairs in candidates:
        errors = errors_by_rank(pairs, layout, whole)
        if best is None or max(errors.values()) < max(best[0].values()):
            best = errors, pairs
    return best


def same_rows(tensors: list[Tensor | None]) -> bool:
    """Whether all tensors have rows, of one shape."""
    for x in tensors:
        if x is None or x.shape[1:] != tensors[0].shape[1:]:
            return False
    return True


def sum_over_tp(pairs: list[tuple], layout: list[Piece], tp: int) -> list[tuple]:
    """If tp ranks hold a tensor whole, each rank's gradient may be an addend: replace them by the
    sum over tp."""
    sums = defaultdict(int)
    for (got, _), piece in zip(pairs, layout, strict=True):
        sums[piece.rank // tp, tuple(piece.rows)] += got
    return [
        (sums[piece.rank // tp, tuple(piece.rows)], want)
        for (_, want), piece in zip(pairs, layout, strict=True)
    ]


def errors_by_rank(pairs: list[tuple], layout: list[Piece], whole: Tensor) -> dict[int, float]:
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
    expected = sequences_of(one)
    first_of_data = []  # of the ranks with the same sequences
    for part in layout:
        at = coordinates(part["rank"], degrees)
        if at["pp"] == at["cp"] == at["tp"] == 0:
            first_of_data.append(part)
    seams = []
    error = float(sequences_of(first_of_data) != expected)
    seams.append(Seam("sequences", "", 0, error, TOLERANCES["sequences"]))
    if not set(sequences_of(layout)) <= set(expected):
        return seams
    for (phase, name, call), pieces in ours.items():
        others = theirs.get((phase, name, call), [])
        note = ""
        if phase == "backward":
            lost = lost_gradients(others, theirs.get(("forward", name, call), []))
            if lost:
                others = others + lost
                note = "no gradient arrives"
        if phase == "loss":  # the sum over ranks, as in reduce_loss
            pieces = [sum_of(pieces)]
            others = [sum_of(others)]
        found = None
        if others and phase in ("forward", "backward", "inputs"):
            found = compare_rows(pieces, others, degrees, T, is_gradient=phase == "backward")
        elif others:
            found = compare_parts(pieces, others)
        if found is not None:
            seams.append(seam_of(phase, name, call, *found, degrees, note))
        elif not others and phase in ("initial", "gradient", "after"):
            held_by_none = Seam(phase, name, call, math.inf, TOLERANCES[phase])
            seams.append(held_by_none._replace(note="held by no rank"))
        else:
            seams.append(Seam(phase, name, call, math.nan, TOLERANCES[phase]))
    return sorted(seams, key=lambda seam: PHASES.index(seam.phase))


def sequences_of(parts: list[dict]) -> list[str]:
    """Keys of the sequences of some ranks, sorted."""
    keys = []
    for part in parts:
        keys += part["rows"]
    return sorted(keys)


def lost_gradients(backward: list[Piece], forward: list[Piece]) -> list[Piece]:
    """Zeros for each piece of the forward without a gradient."""
    have = {(p.rank, tuple(p.rows)) for p in backward}
    lost = []
    for piece in forward:
        if (piece.rank, tuple(piece.rows)) not in have:
            lost.append(piece._replace(tensor=torch.zeros_like(piece.tensor)))
    return lost


def sum_of(pieces: list[Piece]) -> Piece:
    return Piece(0, None, None, sum(p.tensor for p in pieces))


def seam_of(
    phase: str,
    name: str,
    call: int,
    errors: dict[int, float],
    pairs: list[tuple],
    degrees: dict,
    note: str = "",
) -> Seam:
    """The comparison in one Seam. errors: of each rank; pairs: of parts."""
    tolerance = TOLERANCES[phase]
    seam = Seam(phase, name, call, max(errors.values()), tolerance, note=note)
    ranks = sorted(rank for rank, error in errors.items() if not error <= tolerance)
    if ranks:
        where = which_ranks(ranks, sorted(errors), degrees)
        seam = seam._replace(where=where, factor=factor_of(pairs))
    return seam


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


def report_seams(found: list[Seam], than: str, look: Callable[[Seam], str]) -> tuple[str, int]:
    """(text, exit status): the first difference with its neighbours, or the largest error if there
    is no difference.

    than: words after "no difference"; look: function from a seam to a hint.
    """
    seams = []
    not_compared = set()  # of one half only, or with another shape
    for seam in found:
        if math.isnan(seam.error):
            not_compared.add(pattern_of(seam.name))
        else:
            seams.append(seam)
    rest = []
    if not_compared:
        rest.append(f"not compared: {', '.join(sorted(not_compared))}")
    differing = [s for s in seams if s.differs]
    if not differing:
        worst = max(seams, key=lambda s: s.error / (s.tolerance or 1))
        largest = "all are equal to the last bit"
        if worst.error:
            largest = f"the largest is {worst.error:.1e}, {worst.label}"
        return "\n".join([f"no difference{than} at {len(seams)} seams; {largest}", *rest]), 0
    first = differing[0]
    before = seams[: seams.index(first)]
    factor = ""
    if first.factor and abs(first.factor - 1) > 1e-3:
        factor = f", {first.factor:.4g} times what it should be"
    error_before = max((s.error for s in before), default=0)
    agreement = f"everything before agrees to {error_before:.0e} ({len(before)} seams)"
    lines = [f"first difference: {first.label}{first.where}: {first.size}{factor}; {agreement}"]
    for seam in before[-2:]:
        lines.append(f"  agrees   {seam.error:.1e}  {seam.label}")
    for seam in differing[:3]:
        lines.append(f"  differs  {seam.size}  {seam.label}")
    return "\n".join([*lines, f"look at: {look(first)}", *rest]), 1


def without_advice(text: str) -> str:
    return "\n".join(line for line in text.splitlines() if not line.startswith("look at: "))


def first_difference_of(one: list[dict], layout: list[dict]) -> tuple[str, int]:
    """(report, 0 equal | 1 different) from Seams.found() of each rank of the two runs."""
    from tools.parity.advice import look_at

    seams = compare_seams(one, layout)
    return report_seams(seams, "", partial(look_at, seams=seams, layout=layout))


# ---------------------------------------------------------------- the command


def check_where(main: FunctionType, cfg: Any, advice: bool) -> int:
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
        print(text if advice else without_advice(text), flush=True)
    return status
