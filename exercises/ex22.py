"""The check of exercise 22: capacities, rows and results against loops over tokens and choices."""

import math

import hand22
import torch
from feedback import Wrong, alone

# tokens, experts, top_k, factor
SIZES = [(8, 4, 1, 1.0), (10, 4, 2, 1.25), (6, 8, 2, 1.0), (5, 3, 3, 2.0), (1, 8, 1, 1.0)]
# tokens, experts, top_k, capacity, what is added to the scores of expert 0 before the softmax
CASES = {
    "room for all": (6, 4, 2, 6, 0.0),
    "one choice each, little room": (12, 4, 1, 2, 1.0),
    "two choices each, little room": (12, 4, 2, 3, 1.0),
    "all want the same expert": (7, 3, 2, 2, 50.0),
    "three of five": (9, 5, 3, 4, 0.5),
}


def problem(case: str):
    """x (T, D), scores (T, E), top_k, capacity, a factor per expert (E, 1, 1)."""
    T, E, top_k, capacity, more = CASES[case]
    g = torch.Generator().manual_seed(T)
    x, logits = (torch.randn(T, n, generator=g, dtype=torch.float64) for n in (3, E))
    logits[:, 0] += more
    factors = torch.arange(1, E + 1, dtype=torch.float64)[:, None, None]
    return x, logits.softmax(1), top_k, capacity, factors


def given_rows(scores, top_k: int, capacity: int, token_first=False):
    """(experts, rows) by loops. token_first: the common mistake, all choices of a token before
    those of the next."""
    experts = scores.topk(top_k, dim=1).indices
    taken = [0] * scores.shape[1]
    rows = torch.full_like(experts, -1)
    order = [(t, k) for k in range(top_k) for t in range(len(scores))]
    for t, k in sorted(order) if token_first else order:
        e = int(experts[t, k])
        if taken[e] < capacity:
            rows[t, k], taken[e] = taken[e], taken[e] + 1
    return experts, rows


def mixed(x, scores, experts, rows, factors, shares=None):
    """The result by loops, with an expert that doubles, trebles ... the sine of a row."""
    out = []
    for t in range(len(x)):
        kept = [int(e) for e, row in zip(experts[t], rows[t]) if row >= 0]
        weights = shares(scores[t], kept) if shares else {e: scores[t, e] for e in kept}
        out.append(
            sum((weights[e] * factors[e, 0, 0] * x[t].sin() for e in kept), torch.zeros_like(x[t]))
        )
    return torch.stack(out)


def students_capacity(*sizes):
    return hand22.capacity_of(*sizes)


def students_places(case: str):
    _, scores, top_k, capacity, _ = problem(case)
    return hand22.places(scores, top_k, capacity)


def students_moe(case: str):
    """(result, gradient of x, gradient of scores, the buffers that the experts got)."""
    x, scores, top_k, capacity, factors = problem(case)
    x.requires_grad_(), scores.requires_grad_()
    seen = []

    def compute(buffers):
        seen.append(buffers.detach().clone())
        return factors * buffers.sin()

    out = hand22.moe(x, scores, top_k, capacity, compute)
    if out.requires_grad:
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
    return out.detach(), x.grad, scores.grad, seen


def check_capacity():
    for T, E, top_k, factor in SIZES:
        got = alone(students_capacity, T, E, top_k, factor)
        want = math.ceil(factor * T * top_k / E)
        if got != want:
            guess = next(
                (
                    text
                    for value, text in (
                        (
                            math.floor(factor * T * top_k / E),
                            "round up: a share of 2.5 rows needs 3",
                        ),
                        (math.ceil(factor * T / E), "each token makes top_k choices"),
                        (math.ceil(factor * T * top_k), "this is what all experts get together"),
                    )
                    if value == got
                ),
                "the tokens' choices, shared out equally, times factor, rounded up",
            )
            raise Wrong(
                f"capacity_of({T}, {E}, {top_k}, {factor}) is {got}, and should be {want}: {guess}"
            )


def check_places(case: str):
    _, scores, top_k, capacity, _ = problem(case)
    experts, rows = alone(students_places, case)
    right = given_rows(scores, top_k, capacity)
    if experts.shape != right[0].shape or not torch.equal(experts, right[0]):
        raise Wrong(
            f"places, {case}: experts {tuple(experts.shape)} are not each token's {top_k} best, "
            "the best first"
        )
    if rows.shape == right[1].shape and torch.equal(rows, right[1]):
        return
    said = f"places, {case}, of {len(scores)} tokens with {top_k} choices and capacity {capacity}"
    if int(rows.max()) >= capacity:
        raise Wrong(
            f"{said}: a choice got row {int(rows.max())}, and a buffer has rows 0 .. "
            f"{capacity - 1}: -1 says dropped"
        )
    if torch.equal(rows, given_rows(scores, top_k, capacity, token_first=True)[1]):
        raise Wrong(
            f"{said}: the second choice of token 0 took a row before the first choice of token 1. "
            "First choices of all "
            "tokens come first"
        )
    for e in range(scores.shape[1]):
        taken = sorted(rows[(experts == e) & (rows >= 0)].tolist())
        if len(set(taken)) < len(taken):
            raise Wrong(
                f"{said}: two tokens have the same row of expert {e}, so one of them overwrites "
                "the other"
            )
    t, k = (rows != right[1]).nonzero()[0].tolist()
    raise Wrong(
        f"{said}: choice {k} of token {t} is expert {int(experts[t, k])} and has row "
        f"{int(rows[t, k])} there, and "
        f"should have {int(right[1][t, k])}: count who has chosen this expert before, among first "
        "choices first"
    )


def check_moe(case: str):
    x, scores, top_k, capacity, factors = problem(case)
    x.requires_grad_(), scores.requires_grad_()
    experts, rows = given_rows(scores, top_k, capacity)
    want = mixed(x, scores, experts, rows, factors)
    (want * torch.arange(want.numel()).view(want.shape)).sum().backward()
    out, dx, dscores, seen = alone(students_moe, case)
    if len(seen) != 1 or seen[0].shape != (scores.shape[1], capacity, x.shape[1]):
        shapes = ", ".join(str(tuple(buffers.shape)) for buffers in seen) or "never"
        raise Wrong(
            f"moe, {case}: compute is to be called once with (E, capacity, D) = "
            f"{(scores.shape[1], capacity, 3)}, and "
            f"was called with {shapes}"
        )
    if out.shape != want.shape or not torch.allclose(out, want):

        def of_kept(score, kept):
            return {e: score[e] / score[kept].sum() for e in kept}

        guess = next(
            (
                text
                for value, text in (
                    (
                        mixed(x, scores, experts, rows, factors, of_kept),
                        "the scores of what is left were made to add up to 1 again. A "
                        "token whose choices are dropped must get less, or its result jumps when "
                        "another token takes its row",
                    ),
                    (
                        mixed(x, scores, experts, torch.zeros_like(rows), factors),
                        "it is the result without any dropped choice",
                    ),
                    (
                        mixed(x, torch.ones_like(scores), experts, rows, factors),
                        "the results are not multiplied by the scores",
                    ),
                    (x + want, "x was added: the residual connection does that, outside"),
                )
                if out.shape == value.shape and torch.allclose(out, value)
            ),
            "score times result, summed over the kept choices",
        )
        raise Wrong(f"moe, {case}: the result {tuple(out.shape)} is wrong: {guess}")
    for name, got, right in (("x", dx, x.grad), ("scores", dscores, scores.grad)):
        if got is None or not torch.allclose(got, right):
            how = "missing" if got is None else "wrong"
            raise Wrong(
                f"moe, {case}: the result is right, and the gradient of {name} is {how}: the "
                "router learns through the "
                "scores, the layers below through x. Does each step have a gradient?"
            )


def check():
    check_capacity()
    for case in CASES:
        check_places(case)
    for case in CASES:
        check_moe(case)
