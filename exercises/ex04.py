"""The check of exercise 4: 2 and 4 processes with their parts of each matrix, against the whole
matrices in plain torch."""

import hand04
import torch
import torch.nn.functional as F
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

# groups, tokens N, width D, channels F
CASES = [(ONE_GROUP, 5, 6, 32), (FOUR, 3, 4, 64), (TWO_GROUPS, 3, 6, 24)]
NAMES = ("x", "w1", "w3", "w2")
CUT = (("w1", 0), ("w3", 0), ("w2", 1))


def problem(N: int, D: int, channels: int, seed: int) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    shapes = {
        "x": (N, D),
        "w1": (channels, D),
        "w3": (channels, D),
        "w2": (D, channels),
        "out": (N, D),
    }
    return {
        name: torch.randn(shape, generator=g, dtype=torch.float64) for name, shape in shapes.items()
    }


def swiglu(x, w1, w3, w2):
    return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)


def on_a_rank(groups, *sizes) -> dict[str, torch.Tensor]:
    """The result of ffn, the gradient of each argument on this rank, x after the call (ffn must not
    change x), and the traffic."""
    group, number = own_group(groups)
    p = problem(*sizes, number)
    tp = group.size()
    rank = group.rank()
    parts = [p[name].chunk(tp, dim)[rank].contiguous() for name, dim in CUT]
    leaves = [t.clone().requires_grad_() for t in (p["x"], *parts)]
    x, *weights = leaves
    before = x * 1  # not a leaf, like the output of a layer before
    with Traffic() as traffic:
        y = hand04.ffn(before, *weights, group)
        (y * p["out"]).sum().backward()
    grads = dict(zip(NAMES[1:], [w.grad for w in weights]))
    return {
        "y": y.detach(),
        "x": x.grad,
        "x itself": before.detach(),
        "moved": traffic.moved,
        "calls": traffic.calls,
    } | grads


def split_on_ranks(p, tp: int) -> list:
    return [
        [part.clone() for part in hand04.split_weights(p["w1"], p["w3"], p["w2"], rank, tp)]
        for rank in range(tp)
    ]


def check_split(p, tp: int):
    for rank, parts in enumerate(alone(split_on_ranks, p, tp)):
        for (name, dim), part in zip(CUT, parts, strict=True):
            want = p[name].chunk(tp, dim)[rank]
            shape = tuple(part.shape)
            right = tuple(want.shape)
            if shape != right:
                raise Wrong(
                    f"split_weights gives rank {rank} of {tp} a {name} of {shape}, and should "
                    f"give {right}: the "
                    f"channels of h are the rows of w1 and w3 and the columns of w2; {name} is "
                    f"{tuple(p[name].shape)}"
                )
            if not torch.equal(part, want):
                raise Wrong(
                    f"split_weights gives rank {rank} of {tp} other rows or columns of {name} "
                    f"than number {rank}: w1, "
                    "w3 and w2 of a rank must be about the same channels, and the ranks' channels "
                    "stand in order"
                )


def factor(mine, want) -> float:
    """c with mine = c * want; NaN if no c fits."""
    by = ((mine * want).sum() / (want * want).sum()).item()
    return by if torch.allclose(mine, by * want) else float("nan")


def check_gradients(got, leaves, parts, where):
    """parts: name -> the right gradient per rank; leaves: gradient of x through each rank's own
    channels only."""
    for name in NAMES:
        for rank, result in enumerate(got):
            mine = result[name]
            want = parts[name][rank]
            if mine is None:
                raise Wrong(
                    f"{name} has no gradient on rank {rank}: is there a way from the result back "
                    "to it? A collective "
                    "that is called outside of a torch.autograd.Function ends it"
                )
            if torch.allclose(mine, want):
                continue
            head = f"the gradient of {name} on rank {rank}{where} is"
            if name == "x" and torch.allclose(mine, leaves[rank]):
                raise Wrong(
                    f"{head} missing an all-reduce: it is what this rank's channels say about x, "
                    "and the other ranks' "
                    "channels saw x as well. Who adds them up? (The weights' gradients are right, "
                    "and all layers "
                    "before are wrong.)"
                )
            by = factor(mine, want)
            if by == by and abs(by - 1) > 1e-6:
                raise Wrong(
                    f"{head} {by:.3g} times what it should be. All ranks compute the same loss, "
                    "and it counts once: "
                    "does a backward add up equal things? The gradient goes through the forward's "
                    "sum as it is"
                )
            raise Wrong(
                f"{head} wrong by {((mine - want).norm() / want.norm()).item():.2f} (relative). A "
                "rank's own part of "
                "w2, and only that, decides what comes back to its channels; what has each "
                "collective's backward to "
                "do?"
            )


def check_case(groups, *sizes):
    tp = len(groups[0])
    check_split(problem(*sizes, 0), tp)
    try:
        results = in_groups(groups, on_a_rank, *sizes)
    except RuntimeError as e:
        if groups == ONE_GROUP or "still a blank" in str(e):
            raise
        raise Wrong(
            f"ffn, right on 2 ranks, ends on {tp} with N, D, F = {sizes} with "
            f"{str(e).strip().splitlines()[-1]}: are "
            "the sizes those of the group and of the tensors?"
        ) from None
    for number, (ranks, got) in enumerate(zip(groups, results)):
        where = (
            f" of {tp}" if len(groups) == 1 else f" of {tp} of the group {ranks} ({ABOUT_GROUPS})"
        )
        check_ranks(got, problem(*sizes, number), tp, where)


def check_ranks(got, p, tp: int, where: str):
    leaves = {name: p[name].clone().requires_grad_() for name in NAMES}
    y = swiglu(**leaves)
    (y * p["out"]).sum().backward()
    parts = {name: leaves[name].grad.chunk(tp, dim) for name, dim in CUT} | {
        "x": [leaves["x"].grad] * tp
    }
    # through a rank's own channels only: gradient of x, summand of y
    through = []
    summands = []
    for rank in range(tp):
        x = p["x"].clone().requires_grad_()
        own = swiglu(x, *(p[name].chunk(tp, dim)[rank] for name, dim in CUT))
        (own * p["out"]).sum().backward()
        through.append(x.grad)
        summands.append(own.detach())
    for rank, result in enumerate(got):
        if not torch.equal(result["x itself"], p["x"]):
            raise Wrong(
                "ffn changes x, which the layer before still needs: all_reduce works in place, so "
                "clone what you give "
                "it"
            )
        if torch.allclose(result["y"], summands[rank]):
            raise Wrong(
                f"the result on rank {rank}{where} is its own summand: w2 has only this rank's "
                "channels. Who adds up "
                "the ranks'?"
            )
        if not result["y"].shape == y.shape or not torch.allclose(result["y"], y.detach()):
            raise Wrong(
                f"the result on rank {rank}{where} differs from silu(x w1') * (x w3') times w2' "
                "with whole matrices. "
                "Is it summed over the ranks once, at the end, and nowhere else in the forward?"
            )
    check_gradients(got, through, parts, where)
    for rank, result in enumerate(got):
        if result["moved"] > (most := 2 * (tp + 1) * p["x"].numel()):
            raise Wrong(
                f"all numbers are right, but {result['moved']} numbers go through the collectives "
                "of rank "
                f"{rank}{where} ({', '.join(result['calls'])}), and two sums of x's size need "
                f"{most} at the very most: "
                "a matrix was gathered. Weights stay where they are; only summands of y and of "
                "the gradient of x "
                "travel"
            )


def check():
    for case in CASES:
        check_case(*case)
