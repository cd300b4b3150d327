"""The check of exercise 2: both functions on two processes, along each dimension, then attention and loss on top."""
import torch
import torch.distributed as dist
from feedback import Wrong, check_groups, compare, on_ranks

import distributed.layout as functions

N, SHAPE = 2, (2, 4, 6)


def values(rank: int, shape, seed: int):
    return torch.randn(shape, generator=torch.Generator().manual_seed(10 * seed + rank), dtype=torch.float64)


def shapes(name: str, dim: int):
    """(shape of a rank's x, shape of the result)."""
    part = tuple(n // N if i == dim else n for i, n in enumerate(SHAPE))
    return (part, SHAPE) if name == "AllGather" else (SHAPE, part)


def results(name: str, dim: int):
    """(result, gradient of x) on this rank. The rank's loss is the sum of result * values(rank, ..., 2)."""
    rank, (given, made) = dist.get_rank(), shapes(name, dim)
    x = values(rank, given, 1).requires_grad_()
    y = getattr(functions, name).apply(x, dim, dist.group.WORLD)
    if y.requires_grad and y.shape == made:
        (y * values(rank, made, 2)).sum().backward()
    return y.detach().clone(), x.grad


def expected(name: str, dim: int):
    """((results, gradients), wrong results, wrong gradients), each per rank. Wrong: [(explanation, values per rank)]."""
    given, made = shapes(name, dim)
    x, g = ([values(r, shape, seed) for r in range(N)] for shape, seed in ((given, 1), (made, 2)))
    own = lambda t, r: t.chunk(N, dim)[r]  # noqa: E731
    if name == "AllGather":
        y, total = [torch.cat(x, dim)] * N, sum(g)
        wrong_y = [("in the wrong order: rank 0's part comes first", [torch.cat(x[::-1], dim)] * N)]
        wrong_g = [("each rank returns its own gradient's part. The part went into the losses of all ranks: who adds up their "
                    "gradients?", [own(g[r], r) for r in range(N)]),
                   ("it is the mean over the ranks. The loss is the sum of the ranks' losses, so gradients are summed",
                    [own(total, r) / N for r in range(N)]),
                   ("it is the sum's part of another rank", [own(total, N - 1 - r) for r in range(N)])]
        return (y, [own(total, r) for r in range(N)]), wrong_y, wrong_g
    total = sum(x)
    wrong_y = [("nothing is added up: it is this rank's part of its own x", [own(x[r], r) for r in range(N)]),
               ("it is the mean of the ranks, and should be their sum", [own(total, r) / N for r in range(N)]),
               ("it is the sum's part of another rank", [own(total, N - 1 - r) for r in range(N)])]
    padded = [torch.cat([g[r] if i == r else torch.zeros_like(g[r]) for i in range(N)], dim) for r in range(N)]
    wrong_g = [("it is 0 outside of this rank's own part. The other parts of x went into the other ranks' results: their "
                "gradients have to come from there", padded),
               ("it repeats this rank's gradient for each part. Part i of x went into the result of rank i, and the gradient "
                "of that one has to come from there", [torch.cat([g[r]] * N, dim) for r in range(N)]),
               ("it is too large by the number of ranks. Each summand goes into one rank's result, with weight 1",
                [torch.cat(g, dim) * N] * N),
               ("it is the mean. Each summand goes into one rank's result, with weight 1", [torch.cat(g, dim) / N] * N)]
    return ([own(total, r) for r in range(N)], [torch.cat(g, dim)] * N), wrong_y, wrong_g


def equal(a: list, b: list) -> bool:
    return all(x is not None and x.shape == y.shape and torch.allclose(x, y) for x, y in zip(a, b, strict=True))


def check_along(name: str, dim: int):
    got = on_ranks(N, results, name, dim)
    (want_y, want_g), wrong_y, wrong_g = expected(name, dim)
    for kind, method, mine, want, wrong in (("result", "forward", [y for y, _ in got], want_y, wrong_y),
                                            ("gradient of x", "backward", [g for _, g in got], want_g, wrong_g)):
        if equal(mine, want):
            continue
        given, _ = shapes(name, dim)
        head = f"{name}.{method}, {N} ranks with x {given}, dim {dim}: the {kind}"
        if None in mine:
            raise Wrong(f"{head} does not exist: no backward reaches x. Does forward give its result through apply, from x?")
        if mine[0].shape != want[0].shape:
            raise Wrong(f"{head} is {tuple(mine[0].shape)} and should be {tuple(want[0].shape)}. The collectives of torch put "
                        "together and cut along dimension 0: where does dim come to the front, and go back?")
        guess = next((text for text, values in wrong if equal(mine, values)), "are its parts along dim, in the order of the "
                                                                              "ranks?")
        raise Wrong(f"{head} is wrong on rank {next(r for r in range(N) if not equal([mine[r]], [want[r]]))}: {guess}")


def check():
    for name in ("AllGather", "ReduceScatter"):
        for dim in (0, 1, 2):
            check_along(name, dim)
    for flags in (dict(cp=2), dict(tp=2)):
        if difference := compare(2, flags, dict(n=2, b=2, n_layers=2)):
            raise Wrong(f"on {flags}, where attention (cp) or the loss (tp) is between two all-gathers: {difference}")
    check_groups(dict(cp=2), dict(n=4, b=2, n_layers=2))
