"""The check of exercise 11: known gradients at both ends of several pipelines, then training steps
against 1 process."""

import layouts
import torch
from feedback import Wrong, compare, on_ranks

from distributed import schedule
from distributed.layout import local_tensor
from distributed.pipeline import tied_copy

TIED = dict(tie_embeddings=True)
LAYOUTS = [  # processes, flags, the layout in words
    (2, dict(pp=2), "pp 2"),
    (
        2,
        dict(pp=2, pp_schedule="ZBVZeroBubble"),
        "pp 2 with a V schedule: rank 0 has the first and the last stage",
    ),
    (4, dict(pp=2, dp_shard=2), "pp 2, dp_shard 2: two pipelines, {0, 2} and {1, 3}"),
]


def ends_after(flags: dict) -> list[tuple[str, float, float]]:
    """(end, gradient before, gradient after the sum), for each end on this rank. Every element of a
    gradient is equal."""
    stages, layout = layouts.build(layouts.config(vocab_size=100, **TIED), flags, 8, 4)
    pipe = layout.rank % (layout.world_size // layout.pp)
    ends = []
    for s in stages:
        weights = {"first": s.tok_embeddings.weight} if s.index == 0 else {}
        if (copy := tied_copy(s)) is not None:
            weights["last"] = copy
        for end, weight in weights.items():
            weight.grad = torch.zeros_like(weight)
            value = {"first": 3.0, "last": 5.0}[end] + 100 * pipe  # other numbers in each pipeline
            local_tensor(weight.grad).fill_(value)
            ends.append((end, value, weight))
    schedule.sum_tied_gradients(stages, layout)
    return [(end, value, spread(local_tensor(weight.grad))) for end, value, weight in ends]


def spread(x) -> float:
    return x.flatten()[0].item() if (x == x.flatten()[0]).all() else float("nan")


def why(first: float, last: float, got: tuple, others: float) -> str:
    """The likely mistake behind two wrong gradients. others: the sum over all pipelines."""
    total = first + last
    for values, text in [
        ((first, last), "nothing has changed: each end has its own part"),
        (
            (total, last),
            "only the first stage has the sum; the last one keeps its own part, and the two "
            "weights drift apart",
        ),
        (
            (first, total),
            "only the last stage has the sum; the first one keeps its own part, and the two "
            "weights drift apart",
        ),
        ((last, first), "they were swapped: what arrives must be added"),
        (
            (total, total + last),
            "the last stage has received a sum to which its own part had been added already: send "
            "parts, "
            "not sums",
        ),
        (
            (total + first, total),
            "the first stage has received a sum to which its own part had been added already: send "
            "parts, not sums",
        ),
        ((2 * total, 2 * total), "it is the sum twice"),
        ((total + last, total + first), "what arrives is added twice"),
        (
            (total / 2, total / 2),
            "it is the mean. The loss is divided by the tokens already: gradients are summed",
        ),
        (
            (others, others),
            "the gradients of all pipelines are added up, which are different rows of the matrix: "
            "trade inside "
            "layout.group('pp')",
        ),
    ]:
        if all(abs(a - b) < 1e-4 for a, b in zip(got, values)):
            return text
    return "add to each end what the other one had"


def check_ends(processes: int, flags: dict, said: str):
    ranks = on_ranks(processes, ends_after, flags)
    pipes = processes // flags["pp"]
    by_pipe = [
        {end: (before, after) for rank in ranks[pipe::pipes] for end, before, after in rank}
        for pipe in range(pipes)
    ]
    others = sum(before for ends in by_pipe for before, _ in ends.values())
    for pipe, ends in enumerate(by_pipe):
        (first, got_first), (last, got_last) = ends["first"], ends["last"]
        if max(abs(got_first - first - last), abs(got_last - first - last)) < 1e-4:
            continue
        where = f"{said}, pipeline {pipe}" if pipes > 1 else said
        raise Wrong(
            f"{where}: the gradient was {first:g} in the first stage and {last:g} in the last, "
            "and should be "
            f"{first + last:g} in both; it is {got_first:g} and {got_last:g}: "
            f"{why(first, last, (got_first, got_last), others)}"
        )


def check():
    for row in LAYOUTS:
        check_ends(*row)
    if difference := compare(4, dict(pp=4), dict(n=4, b=4, **TIED)):
        raise Wrong(
            f"on pp 4, where the two ranks in the middle have nothing to send: {difference}"
        )
