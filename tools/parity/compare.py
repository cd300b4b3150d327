"""What --check_parity compares: the records of two runs, step by step, and the limits of rounding."""

import glob
import math
import os
from dataclasses import dataclass, field
from typing import Any

import torch

from training.metrics import read_lines

# appended to --out: the folder of a half's records
RECORD = "_record"
# In fp32, from the first step on. Every mistake of tests/test_mutants.py is far above these
# tolerances. Updates get more room than gradients because AdamW divides a gradient by its own size:
# the rounding of a tiny gradient moves a weight as far as a large gradient does. Differences of
# updates are relative to the update, not to the weight, or a small learning rate would hide the
# optimizer.
LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 2e-5
GRADIENT_TOLERANCE = 1e-4
WEIGHT_TOLERANCE = 5e-4
UPDATE_TOLERANCE = 0.01
# After the first update the weights differ by rounding, and the gradients by more: multiply the
# tolerances of step 1 by LATER. Muon makes small directions as large as the others; how other
# optimizers (OTHERS) answer to rounding is unknown.
LATER = {"adamw": 10, "adamw_bf16_moments": 10, "muon": 100}
OTHERS = 1000
# Once rounding has sent a token to another expert, a few rows of a gradient differ altogether.
MOVED = {"loss": 1e-3, "norm": 0.02, "gradient": 0.1, "update": 0.2}
# Rounding to bfloat16, 2^-9, when a rank rounds its own part of a sum
BF16 = {"loss": 1e-3, "norm": 5e-3, "gradient": 0.01}


def room_after_update(cfg: Any) -> float:
    """The factor of the tolerances after the first update of a run, see LATER."""
    if not hasattr(cfg, "optimizer"):  # a fork with AdamW and no choice
        return LATER["adamw"]
    return LATER.get(cfg.optimizer, OTHERS)


@dataclass
class Step:
    """A step of one run, of all its ranks together. Dicts have an entry per fqn."""

    loss: float
    norm: float
    tokens_hash: str
    gradient: dict = field(default_factory=dict)
    weight: dict = field(default_factory=dict)
    buffer: dict = field(default_factory=dict)
    update: dict = field(default_factory=dict)  # by the step before, from the second step on
    trained: set = field(default_factory=set)
    uneven: list = field(default_factory=list)  # sentences on copies that are not equal
    ranks: list = field(default_factory=list)  # of each rank: choices of experts, state of the loop


@dataclass
class Run:
    """A half of --check_parity. steps: {number: Step}, from the first recorded."""

    steps: dict[int, Step]
    val_loss: float | None = None
    last: Step | None = None  # the weights after the last step, and its update


def read_parts(out: str, beginning: str, function: str) -> list[dict]:
    """The files with this beginning, in which the ranks of a half have recorded the calls of a
    function of parallel.py."""
    files = sorted(glob.glob(f"{glob.escape(out + RECORD)}/{beginning}-*"))
    if not files:
        raise RuntimeError(
            f"this recipe calls parallel.{function} nowhere, so there is nothing to compare"
        )
    return [torch.load(file, weights_only=True, mmap=True) for file in files]


def read_run(out: str) -> Run:
    """The records and metrics of a half."""
    lines = list(read_lines(os.path.join(out, "metrics.jsonl")))
    losses = [line for line in lines if "loss" in line]
    steps = {}
    for n, line in enumerate(losses):
        parts = read_parts(out, str(n), "clip_grad_norm")
        step = Step(line["loss"], line["grad_norm"], line["tokens_hash"])
        join_ranks(step, parts)
        if line["step"] - 1 in steps:
            step.update = update_between(steps[line["step"] - 1], step)
        steps[line["step"]] = step
    run = Run(steps)
    for line in lines:
        if "val_loss" in line:
            # null: not a number
            run.val_loss = math.nan if line["val_loss"] is None else line["val_loss"]
    if steps and glob.glob(f"{glob.escape(out + RECORD)}/after-*"):
        run.last = Step(0.0, 0.0, "")
        join_ranks(run.last, read_parts(out, "after", "clip_grad_norm"))
        run.last.update = update_between(steps[max(steps)], run.last)
    return run


def update_between(before: Step, after: Step) -> dict:
    found = {}
    for fqn, weight in after.weight.items():
        found[fqn] = weight.float() - before.weight[fqn].float()
    return found


def join_ranks(step: Step, parts: list[dict]) -> None:
    """Fill a step with the records of all ranks."""
    sums = {}
    uneven = set()
    for part in parts:
        for fqn, buffer in part.get("buffer", {}).items():
            if not torch.equal(buffer, step.buffer.setdefault(fqn, buffer)):
                uneven.add(f"the buffer {fqn}, which is not equal on all ranks")
        for key, total in part["sums"].items():
            if sums.setdefault(key, total) != total:
                uneven.add(f"the weight {key[0]}, whose copies on the ranks are not equal")
        step.gradient |= part.get("gradient", {})
        step.weight |= part.get("weight", {})
        step.trained |= set(part.get("trained", ()))
        step.ranks.append(part.get("about", {}))
    step.uneven = sorted(uneven)


def distance(got: torch.Tensor, want: torch.Tensor, whole: torch.Tensor) -> float:
    """|got - want|, relative to the norm of the whole tensor, scaled to the size of the part."""
    if not got.is_floating_point():
        return (got != want).double().mean().item() if got.numel() else 0.0
    share = math.sqrt(got.numel() / max(whole.numel(), 1))
    error = (got.double() - want.double()).norm() / max(whole.double().norm().item() * share, 1e-12)
    return math.inf if error.isnan() else error.item()


def middle_distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """The median of |got - want|, relative to the root mean square."""
    return ((got - want).abs().median() / want.square().mean().sqrt().clamp(min=1e-30)).item()


def compare_tensors(
    what: str, a: dict, b: dict, tolerance: float, most: float = 0.0
) -> tuple[dict, list[str]]:
    """({fqn: relative error} of the tensors that a and b have, [] or a sentence on the first error
    above the tolerance).
    most: weight of middle_distance, for mistakes that are small beside the whole, but in most
    elements."""
    errors = {}
    for fqn in a:
        if fqn not in b:
            continue
        error = distance(b[fqn].float(), a[fqn].float(), a[fqn])
        if most:
            error = max(error, most * middle_distance(b[fqn].float(), a[fqn].float()))
        errors[fqn] = error
    for fqn, error in errors.items():
        # a gradient in bf16 is the rounded fp32 gradient, and rounding may go up on one side and
        # down on the other
        room = tolerance * 10 if a[fqn].dtype == torch.bfloat16 else tolerance
        if not error <= room:
            return errors, [f"{what} {fqn} by {error:.1e} (relative)"]
    return errors, []


@dataclass
class Limits:
    """The largest differences that rounding explains, of one step; relative, but for `most`, see
    compare_tensors."""

    loss: float = LOSS_TOLERANCE
    norm: float = NORM_TOLERANCE
    gradient: float = GRADIENT_TOLERANCE
    weight: float = WEIGHT_TOLERANCE
    update: float = UPDATE_TOLERANCE
    buffer: float | None = 1e-4  # None: not compared
    most: float = 0.0


# A run that is continued on its own layout computes the same bits, on a CPU. There is room for
# numbers that a checkpoint holds in fp32 and the loop in fp64.
SAME_LAYOUT = Limits(loss=1e-6, norm=1e-5, gradient=1e-5, weight=1e-6, update=1e-4, buffer=1e-5)


def limits_of(n: int, later: float) -> Limits:
    """Limits of the nth compared step. later: see LATER."""
    if n == 1:
        return Limits()
    grown = max(1, n - 2)  # the difference grows from step to step
    room = UPDATE_TOLERANCE if later <= LATER["adamw"] else UPDATE_TOLERANCE * 10
    limits = Limits(
        loss=later * LOSS_TOLERANCE * grown,
        norm=later * NORM_TOLERANCE * grown,
        gradient=later * GRADIENT_TOLERANCE * grown,
        update=room,
        buffer=1e-4 * min(later, 10) * grown,
    )
    if n > 2:  # from the gradients of step 2
        limits.update = room * min(later, 3) * grown
    elif later in (LATER["adamw"], OTHERS):
        # The first update comes from weights of equal bits, so rounding changes few elements. Not
        # of Muon's matmuls.
        limits.most = 1000.0
    return limits


def widen(limits: Limits, least: dict) -> None:
    """Let no limit be below those in `least`, which rounding of another kind explains."""
    for name, value in least.items():
        setattr(limits, name, max(getattr(limits, name), value))
    limits.most = 0.0


def compare_step(a: Step, b: Step, limits: Limits) -> tuple[list[str], dict[str, tuple]]:
    """(sentences on what differs, {kind: (fqn, error) of the worst tensor}) of one step of two runs."""
    problems = []
    worst = {}
    if a.tokens_hash != b.tokens_hash:
        problems.append("the tokens of the global batch")
    problems += b.uneven[:1]
    if limits.buffer is not None:
        problems += compare_tensors("the buffer", a.buffer, b.buffer, limits.buffer)[1]
    kinds = {"gradient": limits.gradient}
    if a.update and b.update:
        kinds["update"] = limits.update
    else:
        kinds["weight"] = limits.weight
    for kind, tolerance in kinds.items():
        ours = getattr(a, kind)
        theirs = getattr(b, kind)
        missing = sorted(ours.keys() ^ theirs.keys())
        if missing:
            problems.append(f"the {kind} of {missing[0]}, which only one of the two has")
        most = limits.most if kind == "update" else 0.0
        errors, wrong = compare_tensors(f"the {kind} of", ours, theirs, tolerance, most)
        if errors:
            worst[kind] = max(errors.items(), key=lambda item: item[1])
        problems += wrong
    if not abs(a.loss - b.loss) <= limits.loss * max(1.0, abs(a.loss)):
        problems.append(f"the loss, {b.loss} instead of {a.loss}")
    if not abs(a.norm - b.norm) <= limits.norm * abs(a.norm):
        problems.append(f"the gradient norm, {b.norm} instead of {a.norm}")
    return problems, worst


def compare_end(a: Run, b: Run, limits: Limits) -> list[str]:
    """[] or sentences on the weights after the last step, and on the validation."""
    problems = []
    if a.last and b.last:
        problems += b.last.uneven[:1]
        problems += compare_tensors("the update of", a.last.update, b.last.update, limits.update)[1]
    return problems + compare_validation(a, b, limits.loss)


def compare_validation(a: Run, b: Run, limit: float) -> list[str]:
    """[] or a sentence on the losses of the validation at the end."""
    if not has_validation(a) and not has_validation(b):
        return []
    if has_validation(a) and has_validation(b):
        if abs(a.val_loss - b.val_loss) <= limit * max(1.0, abs(a.val_loss)):
            return []
    return [f"the validation loss, {b.val_loss} instead of {a.val_loss}"]


def has_validation(run: Run) -> bool:
    """Whether the run has a loss of validation that is a number: none is where no token has a
    loss."""
    return run.val_loss is not None and not math.isnan(run.val_loss)


def compared_fqns(a: Step, b: Step) -> set[str]:
    """Parameters with a gradient that is not 0 on one of the two sides, at least."""
    both = a.gradient.keys() & b.gradient.keys()
    return {fqn for fqn in both if a.gradient[fqn].any() or b.gradient[fqn].any()}
