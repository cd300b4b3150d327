"""The check of exercise 3: two and four processes, each with its rows and its tokens, against plain
torch with all. Also counts the bytes that a rank keeps between forward and backward."""

import hand03
import torch
from feedback import (
    ABOUT_GROUPS,
    FOUR,
    ONE_GROUP,
    TWO_GROUPS,
    Traffic,
    Wrong,
    alone,
    in_groups,
    own_group,
)

# groups, tokens per rank, columns, rows of the weight
CASES = [(ONE_GROUP, 3, 6, 8), (FOUR, 2, 16, 32), (TWO_GROUPS, 2, 4, 6)]


def problem(n: int, tokens: int, columns: int, rows: int, seed: int):
    """x of all n ranks (n * tokens, columns), weight (rows, columns), gradient of the result (n *
    tokens, rows)."""
    g = torch.Generator().manual_seed(seed)
    shapes = (n * tokens, columns), (rows, columns), (n * tokens, rows)
    return [torch.randn(shape, generator=g) for shape in shapes]


def same(a, b) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-5)


def on_a_rank(groups, *sizes):
    """(result, gradient of x, gradient of the shard, bytes kept after the forward, after the
    backward)."""
    group, number = own_group(groups)
    rank = group.rank()
    n = group.size()
    x, weight, grad = problem(n, *sizes, number)
    shard = weight.chunk(n)[rank].clone().requires_grad_()
    x = x.chunk(n)[rank].clone().requires_grad_()
    grad = grad.chunk(n)[rank].clone()
    may_keep = shard.nbytes + x.nbytes  # copies of both
    with Traffic() as traffic:
        y = hand03.ShardedLinear.apply(x, shard, group)
        between = traffic.alive(may_keep + y.nbytes) - y.nbytes
        y.backward(grad)
        after = (
            traffic.alive(may_keep + y.nbytes + x.nbytes + shard.nbytes)
            - y.nbytes
            - x.nbytes
            - shard.nbytes
        )
    return y.detach(), x.grad, shard.grad, between, after, may_keep


def shards(weight, n: int) -> list:
    """[(shape, whether the rows are right, bytes of memory that they keep)] of shard_of for each of n ranks."""
    made = []
    for rank, want in enumerate(weight.chunk(n)):
        mine = hand03.shard_of(weight, rank, n)
        right = mine.shape == want.shape and torch.equal(mine, want)
        made.append((tuple(mine.shape), right, mine.untyped_storage().nbytes()))
    return made


def check_shards(rows: int, columns: int, n: int):
    weight = torch.randn(rows, columns)
    for rank, (shape, right, n_bytes) in enumerate(alone(shards, weight, n)):
        if not right:
            raise Wrong(
                f"shard_of gives rank {rank} of {n} {shape} of a weight {(rows, columns)}, and "
                "should give rows "
                f"{rank * rows // n} .. {(rank + 1) * rows // n - 1}, {(rows // n, columns)}"
            )
        if n_bytes > weight.nbytes // n:
            raise Wrong(
                f"shard_of gives rank {rank} the right rows, but as a view: the memory of the "
                f"whole weight, {n_bytes} "
                f"bytes in place of {weight.nbytes // n}, lives as long as they do"
            )


def check_case(groups, *sizes):
    n, (_, columns, rows) = len(groups[0]), sizes
    check_shards(rows, columns, n)
    try:
        parts = in_groups(groups, on_a_rank, *sizes)
    except RuntimeError as e:
        last = str(e).strip().splitlines()[-1]
        if "invalid gradient" in str(e) and groups == ONE_GROUP:
            raise Wrong(
                f"ShardedLinear.backward: {last}. forward has the arguments x, shard and group, "
                "and the gradient of "
                "the shard has its rows only: which collective adds up, and leaves each rank its "
                "part?"
            ) from None
        if groups == ONE_GROUP or "still a blank" in str(e):
            raise
        raise Wrong(
            f"ShardedLinear, right on 2 ranks with a weight (8, 6), ends on {n} with a weight "
            f"{(rows, columns)} with "
            f"{last}: are the sizes those of the group and of the tensors?"
        ) from None
    for number, (ranks, got) in enumerate(zip(groups, parts)):
        where = (
            f" of {n}" if len(groups) == 1 else f" of the group {ranks}. {ABOUT_GROUPS} The result"
        )
        for rank, result in enumerate(got):
            check_rank(result, problem(n, *sizes, number), rank, n, f"on rank {ranks[rank]}{where}")


def check_rank(result, given, rank: int, n: int, where: str):
    (y, dx, d_shard, between, after, may_keep), (x, weight, grad) = result, given
    dw = grad.T @ x
    dws = [g.T @ x_ for g, x_ in zip(grad.chunk(n), x.chunk(n))]
    right_y = (x @ weight.T).chunk(n)[rank]
    right_dx = (grad @ weight).chunk(n)[rank]
    if y.shape != right_y.shape or not same(y, right_y):
        raise Wrong(
            f"ShardedLinear.forward {where}: the result {tuple(y.shape)} is not x @ weight.T "
            f"{tuple(right_y.shape)} "
            "with the whole weight and this rank's tokens"
        )
    if dx is None or not same(dx, right_dx):
        raise Wrong(
            f"ShardedLinear.backward {where}: the gradient of x is not grad @ weight, with the "
            "whole weight. It is not "
            "summed over ranks: each has tokens of its own"
        )
    if d_shard is None:
        raise Wrong(f"ShardedLinear.backward {where}: the shard has no gradient")
    right = dw.chunk(n)[rank]
    if not same(d_shard, right):
        guess = next(
            (
                text
                for value, text in (
                    (
                        dws[rank].chunk(n)[rank],
                        "it saw this rank's tokens only; who adds up those of the others?",
                    ),
                    (
                        right / n,
                        f"it is the mean over the ranks, 1/{n} of it. The loss is divided by the "
                        "tokens of all ranks already, "
                        "so the ranks' gradients are summed",
                    ),
                    (dw.chunk(n)[rank - 1], "it has rows of another rank"),
                )
                if same(d_shard, value)
            ),
            "rows of the sum of all ranks' grad.T @ x are wanted",
        )
        raise Wrong(f"ShardedLinear.backward {where}: the gradient of the shard is wrong: {guess}")
    kept, when = (
        (between, "between forward and backward")
        if between > may_keep
        else (after, "after the backward")
    )
    if kept > may_keep:
        rows, columns = weight.shape
        raise Wrong(
            f"all numbers are right, but {when} {kept} bytes are still in memory {where}, and x "
            "and the shard have "
            f"{may_keep}; the whole weight ({rows} x {columns}) has {weight.nbytes}: every layer "
            "would keep its own, "
            f"whole or in parts, and nothing is saved. Between uses only the shard ({rows // n} x "
            f"{columns}) stays: "
            "what does ctx keep? The backward can gather again"
        )


def check():
    for case in CASES:
        check_case(*case)
