"""The check of exercise 17: the sum on 2, 4 and 2 x 2 ranks, and the numbers that travel."""

import hand17
import torch
from feedback import ABOUT_GROUPS, FOUR, ONE_GROUP, TWO_GROUPS, Traffic, Wrong, in_groups, own_group

CASES = [(ONE_GROUP, 6), (FOUR, 8), (FOUR, 4), (TWO_GROUPS, 10)]  # groups, N


def values(rank: int, N: int):
    return torch.randn(N, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def reduced(groups, N: int):
    """(result, x after the call, numbers sent by this rank, names of the collectives)."""
    group, _ = own_group(groups)
    x = values(torch.distributed.get_rank(), N)
    with Traffic() as traffic:
        out = hand17.ring_all_reduce(x, group)
    return out.clone(), x, traffic.moved / 2, traffic.calls


def why(out, xs: list, place: int) -> str:
    n = len(xs)
    chunk = len(xs[0]) // len(xs)
    if torch.allclose(out, xs[place]):
        return "it is this rank's own x: nothing was added"
    whole = sum(xs)
    right = [torch.allclose(a, b) for a, b in zip(out.split(chunk), whole.split(chunk))]
    if any(right):
        missing = [i for i, is_right in enumerate(right) if not is_right]
        return (
            f"of its {n} pieces {missing} are not whole sums. Follow one piece round the ring, on "
            "paper: after n - 1 "
            "shifts one rank has all of its summands; n - 1 more bring it to the others"
        )
    if torch.allclose(out, torch.cat(xs[0].split(chunk)) * n):
        return "it is the x of rank 0, n times"
    return "no piece is a whole sum. Which piece does a rank send in step s, and to which piece does it add what arrives?"


def check():
    for groups, N in CASES:
        n = len(groups[0])
        for ranks, got in zip(groups, in_groups(groups, reduced, N)):
            xs = [values(rank, N) for rank in ranks]
            about = f" {ABOUT_GROUPS}" if len(groups) > 1 else ""
            for place, (out, x, sent, calls) in enumerate(got):
                where = f"rank {ranks[place]} of the ring {ranks}, N {N}"
                if not torch.equal(x, xs[place]):
                    raise Wrong(
                        f"{where}: x was changed, and its owner still needs it: begin with a copy"
                    )
                if out.shape != x.shape or not torch.allclose(out, sum(xs)):
                    raise Wrong(
                        f"{where}: the result {tuple(out.shape)} is not the sum of the ranks' x "
                        f"{tuple(x.shape)}: "
                        f"{why(out, xs, place) if out.shape == x.shape else 'put the pieces together'}.{about}"
                    )
                if other := [call for call in calls if "send" not in call and "recv" not in call]:
                    raise Wrong(
                        f"{where}: right, but by {other[0]}: the ring is to be made of shift() "
                        "alone"
                    )
                if sent > (most := 2 * (n - 1) * N // n):
                    raise Wrong(
                        f"{where}: right, but this rank sends {sent:g} numbers, and 2 (n - 1) "
                        "pieces of N/n are "
                        f"{most}: send a piece at a time, and nothing twice"
                    )
