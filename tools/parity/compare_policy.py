"""--check_parity of grpo.py and its forks: compare the cuts of an update (tools/parity/policy.py has
the word), name the differences, and guess their reason."""

import glob
import math
import os
from typing import NamedTuple

import torch

from distributed.agree import brief
from tools.parity.compare import GRADIENT_TOLERANCE, LATER, LOSS_TOLERANCE, UPDATE_TOLERANCE
from training.metrics import read_lines

Tensors = dict[str, torch.Tensor]


class Record(NamedTuple):
    """Numbers of one cut."""

    losses: list[float]  # of each step
    gradients: list[Tensors]  # of each update, by fqn
    weights: list[Tensors]  # before each update
    denominators: list[float]  # of each update
    trained: set[str]
    uneven: list[str]  # weights that are not equal on all ranks before a later update
    longest: int  # input tokens of the longest sample

    @property
    def has_experts(self) -> bool:
        return any(".experts." in fqn for fqn in self.trained)


class Difference(NamedTuple):
    """A cut compared with one forward of everything."""

    name: str
    loss: float
    norm: float  # of the whole gradient
    worst: tuple[float, str]  # the largest relative difference of a gradient, and its fqn
    # every gradient is the base's times this factor; None if no single factor fits
    factor: float | None
    # the largest relative difference of a weight's first update, and its fqn
    later: tuple[float, str] | None
    problems: list[str]


def read_cut(out: str) -> Record:
    """Read the files that the ranks of a cut have written. Raises ValueError without any file."""
    lines = read_lines(os.path.join(out, "metrics.jsonl"))
    losses = [line["loss"] for line in lines if "loss" in line]
    record = Record(losses, [], [], [], set(), [], 0)
    longest = 0
    while True:
        files = sorted(glob.glob(f"{glob.escape(out)}_record/{len(record.gradients)}-*.pt"))
        if not files:
            break
        gradient = {}
        weight = {}
        sums = {}
        for file in files:
            part = torch.load(file, weights_only=True, mmap=True)
            gradient |= part["gradient"]
            weight |= part["weight"]
            longest = max([longest, *part["lengths"]])
            for fqn, number in part["sums"].items():
                record.trained.add(fqn)
                if sums.setdefault(fqn, number) != number and record.gradients:
                    record.uneven.append(fqn)
        record.gradients.append(gradient)
        record.weights.append(weight)
        record.denominators.append(part["denominator"])
    if not record.gradients:
        raise ValueError(
            "this recipe calls parallel.clip_grad_norm nowhere, so there is nothing to compare"
        )
    return record._replace(longest=longest)


def norm_of(tensors: Tensors) -> float:
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors.values()))


def added_up(record: Record) -> Tensors:
    """The gradient of a whole step. Each update has divided its gradient by a denominator of its
    own, so a gradient counts with its share of all denominators."""
    total = {}
    z = sum(record.denominators)
    for gradient, denominator in zip(record.gradients, record.denominators):
        for fqn, g in gradient.items():
            part = g.double() * (denominator / z)
            if fqn in total:
                part = total[fqn] + part
            total[fqn] = part
    return total


def relative(got: Tensors, want: Tensors) -> tuple[dict[str, float], float]:
    """({fqn: relative difference}, relative difference of all tensors together). A missing tensor
    counts as zeros. The difference of a tiny tensor is relative to 1e-4 of the norm of all."""
    floor = 1e-4 * norm_of(want)
    errors = {}
    square = 0.0
    for fqn in sorted(got.keys() | want.keys()):
        some = want.get(fqn, got.get(fqn))
        a = want.get(fqn, torch.zeros_like(some)).double()
        b = got.get(fqn, torch.zeros_like(some)).double()
        error = (b - a).norm().item()
        errors[fqn] = error / max(a.norm().item(), floor, 1e-30)
        if math.isnan(error):
            errors[fqn] = math.inf
        square += error**2
    whole = math.sqrt(square) / max(norm_of(want), 1e-30)
    if math.isnan(whole):
        whole = math.inf
    return errors, whole


def one_factor(got: Tensors, want: Tensors) -> float | None:
    """The factor f with got = f * want, up to a thousandth; None if no factor fits."""
    product = 0.0
    for fqn in got.keys() & want.keys():
        product += (got[fqn].double() * want[fqn].double()).sum().item()
    factor = product / max(norm_of(want) ** 2, 1e-30)
    if not math.isfinite(factor) or not factor:
        return None
    scaled = {fqn: g.double() * factor for fqn, g in want.items()}
    if relative(got, scaled)[1] < 1e-3:
        return factor
    return None


def updates_of(record: Record) -> Tensors:
    """The change of each weight by the first update. Weights are recorded before an update, so a
    record of a single update gives nothing: {}."""
    if len(record.weights) < 2:
        return {}
    before, after = record.weights[:2]
    return {fqn: after[fqn].double() - w.double() for fqn, w in before.items()}


def worst_of(errors: dict[str, float]) -> tuple[float, str]:
    fqn = max(errors, key=errors.get)
    return errors[fqn], fqn


def compare_cut(name: str, base: Record, cut: Record, adds_up: bool) -> Difference:
    """base: one forward of everything. adds_up: the updates of the cut are --minibatches of one
    update of the base, so their gradients add up to the base's."""
    want = base.gradients[0]
    got = cut.gradients[0]
    if adds_up:
        got = added_up(cut)
    worst = worst_of(relative(got, want)[0])
    problems = []
    if not worst[0] <= GRADIENT_TOLERANCE:
        problems.append(f"the gradient of {worst[1]} by {worst[0]:.1e}")
    if not close(cut.losses[0], base.losses[0], 1):
        problems.append(f"the loss, {cut.losses[0]:.8f} instead of {base.losses[0]:.8f}")
    later = None
    if not adds_up and len(cut.gradients) != len(base.gradients):
        problems.append(f"{len(cut.gradients)} updates in place of {len(base.gradients)}")
    elif not adds_up and len(base.gradients) > 1:
        later = worst_of(relative(updates_of(cut), updates_of(base))[0])
        if not later[0] <= UPDATE_TOLERANCE:
            problems.append(f"the first update of {later[1]} by {later[0]:.1e}")
        if cut.uneven:
            problems.append(f"{cut.uneven[0]}, not equal on all ranks after the update")
        second = worst_of(relative(cut.gradients[1], base.gradients[1])[0])
        if not second[0] <= LATER["adamw"] * GRADIENT_TOLERANCE:
            problems.append(f"the gradient of {second[1]} in step 2 by {second[0]:.1e}")
        if not close(cut.losses[1], base.losses[1], LATER["adamw"]):
            problems.append(f"the loss of step 2, {cut.losses[1]:.8f} not {base.losses[1]:.8f}")
    factor = None
    if worst[0] > GRADIENT_TOLERANCE:
        factor = one_factor(got, want)
    return Difference(name, cut.losses[0], norm_of(got), worst, factor, later, problems)


def close(a: float, b: float, slack: float) -> bool:
    return abs(a - b) <= slack * LOSS_TOLERANCE * max(1.0, abs(b))


def unseen(base: Record) -> list[str]:
    """Trained weights without a gradient to compare."""
    seen = {fqn for fqn, g in base.gradients[0].items() if g.any()}
    return sorted(base.trained - seen)


# ---------------------------------------------------------------- what is printed
def describe_difference(found: Difference) -> str:
    later = ""
    if found.later is not None:
        later = f"{found.later[0]:.1e}"
    line = f"{found.name:<32} {found.loss:>14.8f} {found.norm:>14.8f}  {later:>8}"
    line += f"  {found.worst[0]:.1e} {found.worst[1]}"
    if found.factor is not None:
        line += f" (all by one factor, {found.factor:.4g})"
    return line


def kinds_of(differs: list[Difference]) -> set[str]:
    """The kinds of the cuts, by their flags: batch, pack, minibatches, dp, tp, cp, pp, ep."""
    kinds = set()
    for found in differs:
        words = found.name.replace(",", "").split()
        for word, kind in (
            ("--local_batch_size", "batch"),
            ("--pack_tokens", "pack"),
            ("--minibatches", "minibatches"),
            ("--dp_shard", "dp"),
            ("--dp_replicate", "dp"),
            ("--tp", "tp"),
            ("--cp", "cp"),
            ("--pp", "pp"),
            ("--ep", "ep"),
        ):
            if word in words:
                kinds.add(kind)
    return kinds


def likely_reason(differs: list[Difference]) -> str:
    """A question to the author of an edit. The pattern of differing cuts hints at the reason: a
    mean over a forward differs in --local_batch_size, a count of a rank's samples on ranks."""
    kinds = kinds_of(differs)
    ranks = kinds & {"dp", "tp", "cp", "pp", "ep"}
    forwards = kinds & {"batch", "pack"}
    gradient = [found for found in differs if found.worst[0] > GRADIENT_TOLERANCE]
    factor = bool(gradient) and all(found.factor is not None for found in gradient)
    problems = [text for found in differs for text in found.problems]
    if all(text.startswith("the loss") for text in problems):
        return "gradients are equal: is only the printed loss a mean of a part?"
    if not gradient:
        return (
            "the first gradient is equal: does the optimizer's step, or a state kept between two "
            "steps, depend on the rank or on the forward?"
        )
    if ranks and not forwards and factor:
        return (
            "every gradient by one factor, and only on ranks: is Z (loss_denominator) of one rank's "
            "samples, or divided by the number of ranks?"
        )
    if kinds == {"minibatches"}:
        return "is a mean, or a count, taken over the samples of one of --minibatches?"
    if forwards and factor and not ranks:
        return "every gradient by one factor, and only in other forwards: is the number of forwards in it?"
    if "cp" in kinds and not forwards and ranks == {"cp"}:
        return "only where ranks share a sample: is a neighbour's token, or a shift, of one rank's part?"
    if "pack" in kinds and "batch" not in kinds:
        return (
            "where a row holds several samples (--pack_tokens) or a part of one (--cp): is a sum, a "
            "position or a neighbour of the row, in place of the sample's (sequence_sum, positions, n)?"
        )
    if {"batch", "pack"} <= kinds and "dp" in kinds:
        return (
            "where a forward holds other samples: is a mean, a std, a largest or a rank taken over "
            "the tokens of one forward, or is the padded length in it? Take it over the group, or over "
            "the step, before train_on"
        )
    if {"batch", "pack"} <= kinds:
        return (
            "where rows have another length: does the loss count the padded length, or the padding "
            "itself?"
        )
    if ranks and not forwards:
        return (
            "only on ranks: is a number of one rank's part, such as Z (loss_denominator), used as the "
            "number of all ranks?"
        )
    return "does a number of the loss depend on how the samples are cut into forwards?"


def shapes_of(record: Record) -> dict[str, torch.Size]:
    return {fqn: weight.shape for fqn, weight in record.weights[0].items()}


def effect_of_edit(base: Record, first: Record) -> str:
    """A sentence on the difference between the edited recipe and the original, on the same samples
    in one forward."""
    if shapes_of(base) != shapes_of(first):
        return "changes the trained parameters, so the gradients are not compared"
    if len(base.gradients) != len(first.gradients):
        return f"makes {len(base.gradients)} updates in place of {len(first.gradients)}"
    _, whole = relative(base.gradients[0], first.gradients[0])
    _, second = relative(base.gradients[-1], first.gradients[-1])
    _, update = relative(updates_of(base), updates_of(first))
    loss = abs(base.losses[0] - first.losses[0])
    if whole:
        text = f"changes the gradient by {whole:.2g} (relative to the original's)"
        factor = one_factor(base.gradients[0], first.gradients[0])
        if factor is not None and abs(factor - 1) > 1e-6:
            text += f", all of it by one factor, {factor:.4g}"
        return text
    if update or second:
        return (
            f"does not change the first gradient; it changes the update by {update:.2g} and the "
            f"gradient of step 2 by {second:.2g}"
        )
    if loss:
        return (
            f"has NO EFFECT on gradient and update; it changes the loss by {loss:.2g}: the addend "
            "has no gradient, with these flags"
        )
    return (
        "has NO EFFECT, with these flags: gradient, update and loss are the original's to the bit"
    )


def say_verdict(base: Record, differs: list[Difference], cuts: int, failed: list[str]) -> int:
    """Print the verdict, and return the exit status. failed: one line for each failed cut."""
    missing = unseen(base)
    if differs:
        names = ", ".join(found.name for found in differs)
        most = max(differs, key=lambda found: found.worst[0])
        print(f"check_parity: NOT EQUAL: {names}: {most.problems[0]}; {likely_reason(differs)}")
    elif failed:
        print(f"check_parity: NOT EQUAL: {failed[0]}")
    elif missing:
        print(
            f"check_parity: NOT COMPARED: {brief(missing)}, whose gradient is 0 or missing; the rest "
            "is equal"
        )
    else:
        n = len(base.gradients)
        seen = "loss and gradients"
        if n > 1:
            seen = "loss, gradients and weights"
        print(
            f"check_parity: equal: {seen} of {n} updates in {cuts} cuts, with these flags; sampling, "
            "rewards, evaluation, checkpoints and later steps were not looked at"
        )
    return int(bool(differs or failed or missing))
