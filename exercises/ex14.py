"""The check of exercise 14: parts of a parameter against the whole, drawn here and in other
processes, cut in several ways."""

import math

import layouts
import torch
from feedback import Wrong, alone, elsewhere, on_ranks

import parallel
from distributed import initial
from distributed.layout import Layout
from models.llama3 import Llama3

ROWS = 4
PARTS = [  # shape of the whole, offset and shape of a rank's part, the part in words
    ((10, 6), (0, 0), (5, 6), "FSDP's first of two ranks: rows 0 to 4"),
    ((10, 6), (5, 0), (5, 6), "FSDP's second of two ranks: rows 5 to 9"),
    ((10, 6), (6, 0), (2, 6), "two rows in the middle of one block"),
    ((10, 6), (0, 3), (10, 3), "tp's second of two ranks: columns 3 to 5 of all rows"),
    ((10, 6), (5, 3), (3, 3), "FSDP and tp: rows 5 to 7, columns 3 to 5"),
    ((7,), (3,), (3,), "a vector, elements 3 to 5"),
    (
        (9, 3, 4),
        (2, 0, 2),
        (4, 3, 2),
        "a stack of experts: 2 to 5, and the last two of their columns",
    ),
]


def draw(whole, offset, shape, name="7/blocks.0.wq", std=0.02):
    """Draw a rank's part like parallel.init_weights. Elements that stay unwritten are NaN."""
    local = torch.full(shape, math.nan)
    for b in range(offset[0] // ROWS, math.ceil((offset[0] + shape[0]) / ROWS)):
        initial.draw_block(local, torch.Size(whole), offset, ROWS, b, std, f"{name}/{b}")
    return local


def whole_drawn() -> dict:
    """A parameter drawn whole on this process, twice, and another one; whether torch's own
    generator was left alone."""
    shape = (1000, 40)
    zeros = (0, 0)
    state = torch.get_rng_state()
    w = draw(shape, zeros, shape)
    return dict(
        w=w,
        again=draw(shape, zeros, shape),
        other=draw(shape, zeros, shape, "7/blocks.1.wq"),
        quiet=torch.equal(state, torch.get_rng_state()),
    )


def parts_drawn() -> list:
    """[(whole, part)] of each row of PARTS on this process."""
    return [
        (draw(whole, (0,) * len(whole), whole), draw(whole, offset, shape))
        for whole, offset, shape, _ in PARTS
    ]


def check_whole():
    """Check a parameter held whole."""
    got = alone(whole_drawn)
    shape = (1000, 40)
    w = got["w"]
    if w.isnan().any():
        row = w.isnan().any(1).nonzero()[0].item()
        raise Wrong(
            f"of a parameter {shape} in blocks of {ROWS} rows, row {row} is never written: block "
            f"{row // ROWS} has it"
        )
    if not torch.equal(w, got["again"]):
        raise Wrong(
            "the same parameter drawn twice is not the same: name must decide the numbers, alone. "
            "Which generator does "
            "torch.randn take? One that others have drawn from goes on where they stopped"
        )
    if torch.equal(w, got["other"]):
        raise Wrong(
            "blocks.0.wq and blocks.1.wq start equal: the generator's seed must depend on name"
        )
    if torch.equal(w[:ROWS], w[ROWS : 2 * ROWS]):
        raise Wrong(
            "blocks 0 and 1 of a parameter are equal: the generator's seed must depend on all of "
            "name, the block's "
            "number at its end too"
        )
    if torch.equal(w[ROWS : 2 * ROWS], got["other"][:ROWS]):
        raise Wrong(
            "block 1 of blocks.0.wq and block 0 of blocks.1.wq are equal: their names have the "
            "same letters in another "
            "order, and a sum over letters does not see that. A hash does"
        )
    mean = w.mean().item()
    std = w.std().item()
    if not (abs(mean) < 1e-3 and abs(std - 0.02) < 1e-3):
        raise Wrong(
            f"40,000 numbers have mean {mean:.4f} and standard deviation {std:.4f}, and should "
            "have 0 and std = 0.02"
        )
    if w.abs().max() < 3 * 0.02:
        raise Wrong(
            f"of 40,000 numbers the largest is {w.abs().max() / 0.02:.2f} standard deviations "
            "away from 0: they are "
            "not normally distributed, as those of torch.randn are"
        )
    if not got["quiet"]:
        raise Wrong(
            "torch's global generator has moved or was seeded. Other threads draw from it at the "
            "same time: make a "
            "torch.Generator() of your own"
        )


def check_parts():
    for (whole, offset, shape, who), (drawn, got) in zip(PARTS, alone(parts_drawn)):
        want = drawn[tuple(slice(o, o + n) for o, n in zip(offset, shape))]
        if torch.equal(got, want):
            continue
        here = f"{who}, of a parameter {whole} in blocks of {ROWS} rows"
        if got.isnan().any():
            raise Wrong(
                f"{here}: {got.isnan().sum()} of {got.numel()} numbers are not written, the first "
                "at "
                f"{tuple(got.isnan().nonzero()[0].tolist())} of local"
            )
        row = next(i for i in range(shape[0]) if not torch.equal(got[i], want[i]))
        raise Wrong(
            f"{here}: row {row} of local, row {row + offset[0]} of the parameter, is not what a "
            "rank that holds the "
            f"whole parameter has there: {numbers(got[row])} in place of {numbers(want[row])}. "
            "Does a number depend "
            "on who draws it: on offset, or on the shape of local? Draw the whole block, then "
            "take what is yours"
        )


def numbers(x) -> str:
    return "[" + ", ".join(f"{n:.4f}" for n in x.flatten()[:3].tolist()) + " ...]"


def weights_on(flags: dict) -> dict:
    stages, _ = layouts.build(layouts.config(), flags, 4, 2, seed=5)
    return {fqn: layouts.full(p) for fqn, p in stages[0].named_parameters()}


def weights_alone() -> dict:
    model = Llama3(layouts.config())
    parallel.init_weights(model, Layout(), 5)
    return {fqn: p.detach() for fqn, p in model.named_parameters()}


def ranks_part() -> torch.Tensor:
    return draw((10, 6), (0, 0), (10, 6))


def check_ranks():
    """The same block, drawn by two ranks of a group, and by a process that shares no start with
    them."""
    first, second = on_ranks(2, ranks_part)
    if not torch.equal(first, second):
        raise Wrong(
            "two ranks that draw the same block have other numbers, although all parts are right "
            "inside one process. "
            "Does the rank go into the seed? Numbers must not depend on who draws them: name says "
            "all"
        )
    if not torch.equal(first, elsewhere(ranks_part)):
        raise Wrong(
            "another process that draws the same block has other numbers: Python's hash(name) "
            "differs from process to "
            "process, and so does anything made of it; hashlib's does not"
        )


def check_layouts():
    whole = alone(weights_alone)
    for flags, said in (({}, "FSDP on 2 processes"), (dict(tp=2), "tp 2")):
        ranks = on_ranks(2, weights_on, flags)
        for fqn, p in whole.items():
            for rank, weights in enumerate(ranks):
                if not torch.equal(weights[fqn], p):
                    share = (weights[fqn] != p).float().mean().item()
                    raise Wrong(
                        f"{said}: {fqn} on rank {rank} is not what one process has, {share:.0%} "
                        "of its numbers differ, "
                        "although all parts are right inside one process. Does the rank go into "
                        "the seed?"
                    )


def check():
    check_whole()
    check_parts()
    check_ranks()
    check_layouts()
