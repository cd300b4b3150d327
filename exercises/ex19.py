"""The check of exercise 19: blocks of several sizes, masks and scores, against softmax over all
keys at once."""

import hand19
import torch
from feedback import Traffic, Wrong, alone

T = 5
K = 4
V = 3
CASES = {  # sizes of the blocks, factor of the scores, which keys are seen
    "one block, all keys seen": ((6,), 1.0, "all"),
    "three blocks, all keys seen": ((3, 4, 2), 1.0, "all"),
    "scores around 500": ((3, 4, 2), 500.0, "all"),
    "scores around -500, growing": ((3, 4, 2), -500.0, "all"),
    "causal, blocks of 4": ((4, 4), 1.0, "causal"),
    "the first block is seen by nobody": ((3, 4, 2), 1.0, "not first"),
    "the last block is seen by nobody": ((3, 4, 2), 1.0, "not last"),
    "sixteen blocks of one key": ((1,) * 16, 3.0, "all"),
}


def problem(case: str):
    sizes, factor, seen = CASES[case]
    g = torch.Generator().manual_seed(0)
    S = sum(sizes)
    q, k, v = (
        torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((T, K), (S, K), (S, V))
    )
    if abs(factor) > 100:
        q = q.abs()
        k = k.abs() * torch.linspace(0.5, 1.5, S, dtype=torch.float64)[:, None].flip(
            0 if factor > 0 else 1
        )
    mask = torch.ones(T, S, dtype=torch.bool)
    if seen == "causal":
        mask = torch.arange(S)[None] <= torch.arange(T)[:, None] + 1
    if seen == "not first":
        mask[:, : sizes[0]] = False
    if seen == "not last":
        mask[:, -sizes[-1] :] = False
    return (q * factor).float(), k.float(), v.float(), mask, sizes


def attended(case: str):
    """(result, numbers of the largest tensor made, blocks read)."""
    q, k, v, mask, sizes = problem(case)
    pieces = list(zip(k.split(sizes), v.split(sizes), mask.split(sizes, 1)))
    read = []

    def blocks():
        for i, (a, b, m) in enumerate(pieces):
            read.append(i)
            yield a.clone(), b.clone(), m.clone()

    with Traffic() as traffic:
        out = hand19.attend_blocks(q, blocks())
    return out.detach().clone(), traffic.largest, read


def softmax(q, k, v, mask):
    return (q @ k.T / K**0.5).masked_fill(~mask, -torch.inf).softmax(1) @ v


def why(out, q, k, v, mask, sizes) -> str:
    if out.isnan().any():
        return (
            "it holds nan: -inf - (-inf) is nan where a query has seen no key yet, and inf / inf "
            "is where exp() was taken "
            "of a score without the largest one subtracted"
        )
    if out.isinf().any():
        return "it is infinite: subtract the largest score before exp()"
    parts = list(zip(k.split(sizes), v.split(sizes), mask.split(sizes, 1)))
    each = [softmax(q, *part).nan_to_num() for part in parts]
    for value, text in [
        (each[-1], "it is attention over the last block alone"),
        (each[0], "it is attention over the first block alone"),
        (
            sum(each) / len(each),
            "it is the mean of the blocks' results: a block counts by the sum of its "
            "exponentials, not "
            "once",
        ),
        (sum(each), "it is the sum of the blocks' results: divide once, at the end"),
        (softmax(q, k, v, torch.ones_like(mask)), "the mask is ignored"),
        (softmax(q * K**0.5, k, v, mask), "the scores are not divided by sqrt(K)"),
    ]:
        if torch.allclose(out, value, atol=1e-4, rtol=1e-4):
            return text
    return (
        "when a larger score comes, what was added up before is in the old unit: both the sum of "
        "the exponentials and "
        "that of the values must be multiplied by exp(old largest - new largest)"
    )


def check():
    for case, (sizes, *_) in CASES.items():
        q, k, v, mask, _ = problem(case)
        out, largest, read = alone(attended, case)
        if out.shape != (T, V):
            raise Wrong(
                f"{case}: the result is {tuple(out.shape)}, and should be (T, V) = {(T, V)}"
            )
        if not torch.allclose(out, softmax(q, k, v, mask), atol=1e-4, rtol=1e-4):
            raise Wrong(
                f"{case}: the result differs from softmax over all {sum(sizes)} keys: "
                f"{why(out, q, k, v, mask, sizes)}"
            )
        if read != list(range(len(sizes))):
            raise Wrong(f"{case}: of {len(sizes)} blocks {len(read)} were read")
        if largest > (most := max(T * max(sizes), T * V, max(sizes) * K, T * K)):
            raise Wrong(
                f"{case}: right, but a tensor of {largest} numbers was made, and {most} are "
                "enough: keep the largest "
                "score, the sum and the result so far, and forget the block. With all blocks at "
                "hand there is no need "
                "for this function"
            )
