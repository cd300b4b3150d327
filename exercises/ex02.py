"""The check of exercise 2: both functions on 2 and 4 processes and in two groups, along each
dimension; then training."""

import torch
import torch.distributed as dist
from feedback import (
    ABOUT_GROUPS,
    FOUR,
    ONE_GROUP,
    TWO_GROUPS,
    Wrong,
    check_groups,
    compare,
    in_groups,
    own_group,
)

import distributed.layout as functions

CASES = [  # groups, shape of the whole, in words
    (ONE_GROUP, (2, 4, 6), "2 ranks"),
    (FOUR, (8, 4, 12), "4 ranks"),
    (TWO_GROUPS, (4, 6, 2), "4 ranks in the groups [0, 2] and [1, 3]"),
]


def values(rank: int, shape, seed: int):
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(10 * seed + rank), dtype=torch.float64
    )


def shapes(name: str, dim: int, n: int, shape: tuple):
    """(shape of a rank's x, shape of the result)."""
    part = tuple(size // n if i == dim else size for i, size in enumerate(shape))
    return (part, shape) if name == "AllGather" else (shape, part)


def results(groups, name: str, dim: int, shape: tuple):
    """(result, gradient of x) on this rank. The rank's loss is the sum of result * values(rank,
    ..., 2)."""
    rank, (given, made) = dist.get_rank(), shapes(name, dim, len(groups[0]), shape)
    x = values(rank, given, 1).requires_grad_()
    y = getattr(functions, name).apply(x, dim, own_group(groups)[0])
    if y.requires_grad and y.shape == made:
        (y * values(rank, made, 2)).sum().backward()
    return y.detach().clone(), x.grad


def expected(name: str, dim: int, ranks: list[int], shape: tuple):
    """((results, gradients), wrong results, wrong gradients), each per rank. Wrong: [(explanation,
    values per rank)]."""
    N = len(ranks)
    given, made = shapes(name, dim, N, shape)
    x, g = ([values(r, size, seed) for r in ranks] for size, seed in ((given, 1), (made, 2)))
    own = lambda t, r: t.chunk(N, dim)[r]  # noqa: E731
    if name == "AllGather":
        y = [torch.cat(x, dim)] * N
        total = sum(g)
        wrong_y = [("in the wrong order: rank 0's part comes first", [torch.cat(x[::-1], dim)] * N)]
        wrong_g = [
            (
                "each rank returns its own gradient's part. The part went into the losses of all "
                "ranks: who adds up their "
                "gradients?",
                [own(g[r], r) for r in range(N)],
            ),
            (
                "it is the mean over the ranks. The loss is the sum of the ranks' losses, so "
                "gradients are summed",
                [own(total, r) / N for r in range(N)],
            ),
            ("it is the sum's part of another rank", [own(total, N - 1 - r) for r in range(N)]),
        ]
        return (y, [own(total, r) for r in range(N)]), wrong_y, wrong_g
    total = sum(x)
    wrong_y = [
        (
            "nothing is added up: it is this rank's part of its own x",
            [own(x[r], r) for r in range(N)],
        ),
        (
            "it is the mean of the ranks, and should be their sum",
            [own(total, r) / N for r in range(N)],
        ),
        ("it is the sum's part of another rank", [own(total, N - 1 - r) for r in range(N)]),
    ]
    padded = [
        torch.cat([g[r] if i == r else torch.zeros_like(g[r]) for i in range(N)], dim)
        for r in range(N)
    ]
    wrong_g = [
        (
            "it is 0 outside of this rank's own part. The other parts of x went into the other "
            "ranks' results: their "
            "gradients have to come from there",
            padded,
        ),
        (
            "it repeats this rank's gradient for each part. Part i of x went into the result of "
            "rank i, and the gradient "
            "of that one has to come from there",
            [torch.cat([g[r]] * N, dim) for r in range(N)],
        ),
        (
            "it is too large by the number of ranks. Each summand goes into one rank's result, "
            "with weight 1",
            [torch.cat(g, dim) * N] * N,
        ),
        (
            "it is the mean. Each summand goes into one rank's result, with weight 1",
            [torch.cat(g, dim) / N] * N,
        ),
    ]
    return ([own(total, r) for r in range(N)], [torch.cat(g, dim)] * N), wrong_y, wrong_g


def equal(a: list, b: list) -> bool:
    return all(
        x is not None and x.shape == y.shape and torch.allclose(x, y)
        for x, y in zip(a, b, strict=True)
    )


def check_along(name: str, dim: int, groups, shape: tuple, said: str):
    try:
        parts = in_groups(groups, results, name, dim, shape)
    except RuntimeError as e:
        if "still a blank" in str(e) or groups == ONE_GROUP:
            raise
        raise Wrong(
            f"{name}, right on 2 ranks, ends on {said} with {str(e).strip().splitlines()[-1]}: "
            "are the sizes those of "
            "the group and of x?"
        ) from None
    for ranks, got in zip(groups, parts):
        check_group(name, dim, ranks, got, shape, said)


def check_group(name: str, dim: int, ranks: list[int], got: list, shape: tuple, said: str):
    N = len(ranks)
    about = "" if len(ranks) == dist_size(said) else f" {ABOUT_GROUPS}"
    (want_y, want_g), wrong_y, wrong_g = expected(name, dim, ranks, shape)
    for kind, method, mine, want, wrong in (
        ("result", "forward", [y for y, _ in got], want_y, wrong_y),
        ("gradient of x", "backward", [g for _, g in got], want_g, wrong_g),
    ):
        if equal(mine, want):
            continue
        given, _ = shapes(name, dim, N, shape)
        head = f"{name}.{method}, {said} with x {given}, dim {dim}: the {kind}"
        if any(x is None for x in mine):
            raise Wrong(
                f"{head} does not exist: no backward reaches x. Does forward give its result "
                "through apply, from x?"
            )
        if mine[0].shape != want[0].shape:
            raise Wrong(
                f"{head} is {tuple(mine[0].shape)} and should be {tuple(want[0].shape)}. The "
                "collectives of torch put "
                "together and cut along dimension 0: where does dim come to the front, and go "
                f"back?{about}"
            )
        guess = next(
            (text for text, values in wrong if equal(mine, values)),
            "are its parts along dim, in the order of the ranks?",
        )
        place = next(r for r in range(N) if not equal([mine[r]], [want[r]]))
        raise Wrong(f"{head} is wrong on rank {ranks[place]}: {guess}{about}")


def dist_size(said: str) -> int:
    return int(said.split()[0])


def check():
    for groups, shape, said in CASES:
        for name in ("AllGather", "ReduceScatter"):
            for dim in (0, 1, 2):
                check_along(name, dim, groups, shape, said)
    for flags in (dict(cp=2), dict(tp=2)):
        if difference := compare(2, flags, dict(n=2, b=2, n_layers=2)):
            raise Wrong(
                f"on {flags}, where attention (cp) or the loss (tp) is between two all-gathers: "
                f"{difference}"
            )
    check_groups(dict(cp=2), dict(n=4, b=2, n_layers=2))
