"""The check of exercise 8: two processes with two chunks of each sequence, against attention over
whole sequences; then training."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from feedback import Traffic, Wrong, check_groups, compare, on_ranks, without

import parallel

B = 2
H = 4
G = 2
K = 8
T = 16
CP = 2
CHUNK = T // (2 * CP)
# of each rank
ROWS = [
    [*range(r * CHUNK, (r + 1) * CHUNK), *range(T - (r + 1) * CHUNK, T - r * CHUNK)]
    for r in range(CP)
]
CASES = {
    "causal": {},
    "with a scale, and values narrower than keys": dict(scale=0.7, width=5),
    "with documents": dict(docs=True),
    "with documents and a scale": dict(docs=True, scale=0.7),
}
SISTER = "that is exercise 9's way; here keys and values are gathered, and each rank attends with its own queries"
DOCS = torch.tensor([[0] * 6 + [1] * 5 + [2] * 5, [0] * 13 + [1] * 3])


def problem(scale=None, width=K, docs=False):
    """q, k, v of the whole sequences, the gradient of the result, scale, doc_ids."""
    g = torch.Generator().manual_seed(0)
    shapes = (B, H, T, K), (B, G, T, K), (B, G, T, width), (B, H, T, width)
    return [torch.randn(shape, generator=g) for shape in shapes], scale, DOCS if docs else None


def attention(q, k, v, mask, scale):
    k, v = (x.repeat_interleave(H // G, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)


def on_a_rank(case: str):
    """(result, gradients of q, k, v, traffic of the forward) of this rank's tokens."""
    with without(parallel, "all_to_all_attention", SISTER):
        return attended(case)


def attended(case: str):
    (q, k, v, grad), scale, docs = problem(**CASES[case])
    rows = torch.tensor(ROWS[dist.get_rank()])
    mine = [x[:, :, rows].clone().requires_grad_() for x in (q, k, v)]
    attend = parallel.all_gather_attention(rows.repeat(B, 1), docs, group=dist.group.WORLD)
    with Traffic() as traffic:
        out = attend(*mine, scale=scale)
    if out.requires_grad and out.shape == grad[:, :, rows].shape:
        (out * grad[:, :, rows]).sum().backward()
    return out.detach(), [x.grad for x in mine], traffic.moved


def may_look(docs):
    """(B or 1, 1, T, T): True for each key that a query may attend to."""
    mask = torch.ones(T, T, dtype=torch.bool).tril()[None, None]
    return mask if docs is None else mask & (docs[:, None, :, None] == docs[:, None, None, :])


def usual_mistakes(q, k, v, scale, docs) -> list:
    """[(result of each rank, the mistake in words)]."""

    def with_masks(make, keys=slice(None)):
        masks = [
            make(rank, torch.tensor(rows)[:, None], torch.arange(T)[None])
            for rank, rows in enumerate(ROWS)
        ]
        return [
            attention(q[:, :, rows], k[:, :, keys], v[:, :, keys], m, scale)
            for rows, m in zip(ROWS, masks)
        ]

    number, order = torch.arange(2 * CHUNK)[:, None], sum(ROWS, [])
    place = torch.tensor(ROWS)[:, CHUNK:].amax(1)  # of each rank's last token
    return [
        (
            with_masks(lambda rank, row, key: torch.ones(len(row), T, dtype=torch.bool)),
            "every query sees all keys, later ones too",
        ),
        (
            with_masks(lambda rank, row, key: key <= number),
            "the mask is that of the first tokens of the sequence: query "
            "number i of this rank sees keys 0 .. i, in natural order. Its queries are two "
            "chunks, which stand elsewhere: each "
            "has its triangle in the lower right corner of its own block (is_causal=True puts it "
            "into the upper left one)",
        ),
        (
            with_masks(lambda rank, row, key: key <= number % CHUNK),
            "query number i of a chunk sees keys 0 .. i: the triangle "
            "is in the upper left corner of the chunk's block, and belongs into the lower right "
            "one",
        ),
        (
            with_masks(
                lambda rank, row, key: (key <= row) & torch.isin(key, torch.tensor(ROWS[rank]))
            ),
            "queries see the keys of this rank only: the earlier tokens of other ranks are missing",
        ),
        (
            with_masks(lambda rank, row, key: key <= place[rank] - CHUNK + 1 + number % CHUNK),
            "both chunks see the same number of keys, and the early one looks into its future: "
            "each chunk has its own end",
        ),
        (
            with_masks(lambda rank, row, key: key < (row // CHUNK + 1) * CHUNK),
            "each chunk sees the keys up to its end without "
            "a triangle: inside of its own chunk a query looks into its future",
        ),
        (
            with_masks(lambda rank, row, key: key <= row, order),
            "keys and values stand in the order of the ranks, and the mask "
            "is that of the natural order",
        ),
        (
            with_masks(lambda rank, row, key: key <= row) if docs is not None else [],
            "a query looks into other documents (doc_ids)",
        ),
        (
            [attention(q, k, v, may_look(docs), None)[:, :, rows] for rows in ROWS],
            "the scale is ignored",
        ),
    ]


def close(a, b) -> bool:
    return a is not None and a.shape == b.shape and torch.allclose(a, b, atol=1e-4, rtol=1e-4)


def check_result(case: str, got: list, whole, mistakes: list):
    for rank, rows in enumerate(ROWS):
        mine = got[rank]
        want = whole[:, :, rows]
        if mine.shape != want.shape:
            raise Wrong(
                f"{case}: attend returns {tuple(mine.shape)} on rank {rank} of {CP} and should "
                "return "
                f"{tuple(want.shape)}"
            )
        if close(mine, want):
            continue
        guess = next(
            (
                text
                for values, text in mistakes
                if values and all(close(a, b) for a, b in zip(got, values))
            ),
            "compare the keys that each of its queries sees with the drawing in TASK.md",
        )
        off = [t for i, t in enumerate(rows) if not close(mine[:, :, i], want[:, :, i])]
        raise Wrong(
            f"{case}: rank {rank} of {CP} has tokens {rows}, and the results of {off} differ from "
            "attention over the "
            f"whole sequence: {guess}"
        )


def check_gradients(case: str, got: list, want: list, own: list):
    """own: the gradients of k and v from the loss of each rank alone."""
    for rank, rows in enumerate(ROWS):
        for i, name in enumerate(("q", "k", "v")):
            mine = got[rank][i]
            right = want[i][:, :, rows]
            if close(mine, right):
                continue
            guess = (
                "there is none: a collective without a backward is in the way"
                if mine is None
                else "it is what this rank's own queries say about them. The queries of other ranks used them as well: whose "
                "backward adds that up (exercise 2)?"
                if i and close(mine, own[rank][i - 1][:, :, rows])
                else "does every collective on the way have the right backward?"
            )
            raise Wrong(
                f"{case}: the results are right, and the gradient of {name} on rank {rank} of "
                f"{CP} is not: {guess}"
            )


def check_case(case: str):
    (q, k, v, grad), scale, docs = problem(**CASES[case])
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    whole = attention(*leaves, may_look(docs), scale)
    own = [
        torch.autograd.grad((whole * grad)[:, :, rows].sum(), leaves[1:], retain_graph=True)
        for rows in ROWS
    ]
    want = torch.autograd.grad((whole * grad).sum(), leaves)
    try:
        got = on_ranks(CP, on_a_rank, case)
    except RuntimeError as e:
        if SISTER not in str(e):
            raise
        raise Wrong(str(e).strip().splitlines()[-1]) from None
    check_result(
        case, [out for out, *_ in got], whole.detach(), usual_mistakes(q, k, v, scale, docs)
    )
    check_gradients(case, [grads for _, grads, _ in got], want, own)
    if (moved := got[0][2]) > (most := (CP + 1) * (k.numel() + v.numel()) // CP):
        raise Wrong(
            f"{case}: right, but {moved} numbers go through the collectives of a rank, and "
            "gathering keys and values "
            f"needs {most}: only they travel. Queries and results stay where they are"
        )


def check():
    for case in CASES:
        check_case(case)
    if difference := compare(2, dict(cp=2), dict(n=2, b=2, n_layers=2, doc=True)):
        raise Wrong(f"on cp 2, with documents: {difference}")
    if difference := compare(4, dict(cp=4), dict(n=2, b=2, n_layers=2)):
        raise Wrong(
            f"right on cp 2, and on cp 4: {difference}. Are ends and chunks those of the group's "
            "size?"
        )
    check_groups(dict(cp=2), dict(n=4, b=2, n_layers=2))
