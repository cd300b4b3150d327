"""The check of exercise 18: three steps on 2, 4 and 2 x 2 ranks against Adam on one, the moments'
size, and the traffic."""

import hand18
import torch
from feedback import ABOUT_GROUPS, FOUR, ONE_GROUP, TWO_GROUPS, Traffic, Wrong, in_groups, own_group

CASES = [(ONE_GROUP, 6), (FOUR, 16), (TWO_GROUPS, 10)]  # groups, N
STEPS = 3
LR = 0.1
# of gradients, near Adam's 1e-8: with larger ones a mean moves the weights as far as a sum
SMALL = 1e-7


def numbers(N: int, *key: int):
    g = torch.Generator().manual_seed(sum(k * 100**i for i, k in enumerate(key)))
    return torch.randn(N, generator=g, dtype=torch.float64)


def trained(groups, N: int):
    """(weight after each step, sizes of the moments, numbers in all collectives, grad unchanged?)."""
    group, number = own_group(groups)
    weight = numbers(N, number)
    rank = torch.distributed.get_rank()
    weights = []
    untouched = True
    first, second = hand18.moments(weight, group.rank(), group.size())
    sizes = [x.untyped_storage().nbytes() // x.element_size() for x in (first, second)]
    with Traffic() as traffic:
        for step in range(1, STEPS + 1):
            grad = SMALL * numbers(N, rank + 1, step)
            hand18.zero1_step(weight, grad, first, second, step, LR, group)
            untouched = untouched and torch.equal(grad, SMALL * numbers(N, rank + 1, step))
            weights.append(weight.clone())
    return weights, sizes, traffic.moved, untouched, traffic.calls


def expected(N: int, number: int, ranks: list[int], share=lambda grads: sum(grads)) -> list:
    """The weight after each step of Adam on a single process. share: what is made of the ranks'
    gradients."""
    weight = numbers(N, number)
    first = torch.zeros_like(weight)
    second = torch.zeros_like(weight)
    weights = []
    for step in range(1, STEPS + 1):
        hand18.adam(
            weight,
            share([SMALL * numbers(N, rank + 1, step) for rank in ranks]),
            first,
            second,
            step,
            LR,
        )
        weights.append(weight.clone())
    return weights


def check():
    for groups, N in CASES:
        n = len(groups[0])
        for number, (ranks, got) in enumerate(zip(groups, in_groups(groups, trained, N))):
            about = f" {ABOUT_GROUPS}" if len(groups) > 1 else ""
            want = expected(N, number, ranks)
            for place, (weights, sizes, moved, untouched, calls) in enumerate(got):
                where = f"rank {ranks[place]} of {ranks}, {N} weights"
                if max(sizes) > N // n:
                    raise Wrong(
                        f"{where}: a moment has memory for {max(sizes)} numbers, and this rank's "
                        f"part has {N // n}: "
                        "the moments are what ZeRO-1 does not hold n times"
                    )
                if not untouched:
                    raise Wrong(f"{where}: grad was changed; add up into a tensor of your own")
                for step, (mine, right) in enumerate(zip(weights, want), 1):
                    if not torch.allclose(mine, right):
                        raise Wrong(
                            f"{where}: after step {step} the weight is not that of Adam on the "
                            "sum of the gradients: "
                            f"{why(weights, N, number, ranks, place)}{about}"
                        )
                if any("allreduce" in call for call in calls):
                    raise Wrong(
                        f"{where}: right, but by an all-reduce: it brings every rank the sums of "
                        "the others' parts, "
                        "for which the rank has no use; half of the traffic is for nothing"
                    )
                if moved > (most := STEPS * 2 * (N + N // n)):
                    raise Wrong(
                        f"{where}: right, but {moved} numbers go through the collectives in "
                        f"{STEPS} steps "
                        f"({', '.join(dict.fromkeys(calls))}), and a reduce-scatter and an "
                        f"all-gather need {most}"
                    )


def why(weights: list, N: int, number: int, ranks: list[int], place: int) -> str:
    chunk = N // len(ranks)
    own = slice(place * chunk, (place + 1) * chunk)
    own_grads = expected(N, number, ranks, lambda grads: grads[place])
    start = numbers(N, number)
    if torch.allclose(weights[0][own], own_grads[0][own]) and torch.allclose(
        weights[-1][own], own_grads[-1][own]
    ):
        return "this rank's part has seen its own gradient only: who adds up?"
    if all(
        torch.equal(weights[0][i * chunk : (i + 1) * chunk], start[i * chunk : (i + 1) * chunk])
        for i in range(len(ranks))
        if i != place
    ):
        return "only this rank's part has moved: the other ranks' new parts must come here"
    mean = expected(N, number, ranks, lambda grads: sum(grads) / len(grads))
    if all(torch.allclose(a, b) for a, b in zip(weights, mean)):
        return "it is that of the mean. The loss is divided by all tokens already, so gradients are summed"
    return "does adam() see this rank's part of weight, sum and moments, and do the new parts come together in order?"
