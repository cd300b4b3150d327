"""Answers to exercise 8."""

MASK = """
def all_gather_attention(positions, doc_ids=None, *, group):
    # one mask for both chunks and all keys: more work than needed, the same numbers
    cp, rank, n = dist.get_world_size(group), dist.get_rank(group), positions.shape[1]
    rows = sequence_index(cp * n, cp, rank, positions.device)
    keys = torch.arange(cp * n, device=positions.device)
    mask = keys <= rows[:, None]
    if doc_ids is not None:
        mask = (mask & (doc_ids[:, rows, None] == doc_ids[:, None, :]))[:, None]

    def attend(q, k, v, scale=None):
        k, v = {gather}
        return sdpa(q, k, v, mask, scale=scale)

    return attend
"""
TWO_GATHERS = "(natural_order(AllGather.apply(x, 2, group), 2, cp) for x in (k, v))"
CHUNKS = """
def all_gather_attention(positions, doc_ids=None, *, group):
    cp, rank, chunk = dist.get_world_size(group), dist.get_rank(group), positions.shape[1] // 2
    index = sequence_index(2 * cp * chunk, cp, rank, positions.device)
    ends = {ends}
    docs = None if doc_ids is None else causal_attention(positions, doc_ids, index)

    def attend(q, k, v, scale=None):
        k, v = (natural_order(AllGather.apply(x, 2, group), 2, cp) for x in (k, v))
        if docs is not None:
            return docs(q, k, v, scale=scale)
        parts = []
        for part, end in zip(q.chunk(2, 2), ends):
            parts.append(sdpa(part, k[:, :, :end], v[:, :, :end], {mask}, scale=scale))
        return torch.cat(parts, 2)

    return attend
"""
RIGHT = [
    MASK.replace("{gather}", TWO_GATHERS),
    """
def all_gather_attention(positions, doc_ids=None, *, group):
    # keys stay in the order in which they are gathered, and the mask asks each for its place in the sequence
    cp, rank, n = dist.get_world_size(group), dist.get_rank(group), positions.shape[1]
    places = torch.cat([sequence_index(cp * n, cp, r, positions.device) for r in range(cp)])
    mine = places[rank * n : (rank + 1) * n]
    mask = places <= mine[:, None]
    if doc_ids is not None:
        mask = (mask & (doc_ids[:, mine, None] == doc_ids[:, None, places]))[:, None]

    def attend(q, k, v, scale=None):
        return sdpa(q, AllGather.apply(k, 2, group), AllGather.apply(v, 2, group), mask, scale=scale)

    return attend
""",
]
LOST = """
    def attend(q, k, v, scale=None):
        def gather(x):
            parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(cp)]
            dist.all_gather(parts, x.detach().contiguous(), group=group)
            parts[rank] = x
            return natural_order(torch.cat(parts, 2), 2, cp)
        k, v = gather(k), gather(v)
"""
ENDS = "[(rank + 1) * chunk, (2 * cp - rank) * chunk]"
LOWER_RIGHT = "lower_right_mask(chunk, end, q.device)"
SISTER = (
    "def all_gather_attention(positions, doc_ids=None, *, group):\n"
    "    return all_to_all_attention(positions, doc_ids, group=group)\n"
)
WRONG = [  # answer, what the feedback must say
    (SISTER, "all_to_all_attention was called: that is exercise 9's way"),
    (
        MASK.replace("{gather}", TWO_GATHERS).replace(
            "        k, v = (",
            """
        AllGather.apply(q, 2, group)
        k, v = (""",
        ),
        "Queries and results stay where they are",
    ),
    (
        MASK.replace("{gather}", TWO_GATHERS).replace("get_rank(group)", "get_rank() % 2"),
        "right on cp 2, and on cp 4",
    ),
    (
        MASK.replace("{gather}", TWO_GATHERS).replace(
            "keys <= rows[:, None]", "keys <= torch.arange(n)[:, None]"
        ),
        "the mask is that of the first tokens of the sequence",
    ),
    (
        MASK.replace("    def attend(q, k, v, scale=None):\n        k, v = {gather}\n", LOST),
        "The queries of other ranks used them as well",
    ),
    (
        CHUNKS.format(ends="[(2 * cp - rank) * chunk] * 2", mask=LOWER_RIGHT),
        "both chunks see the same number of keys",
    ),
    (CHUNKS.format(ends=ENDS, mask="None, True"), "belongs into the lower right one"),
    (CHUNKS.format(ends=ENDS, mask="None"), "without a triangle"),
    (
        MASK.replace("{gather}", "(AllGather.apply(x, 2, group) for x in (k, v))"),
        "stand in the order of the ranks",
    ),
    (
        CHUNKS.format(ends=ENDS, mask=LOWER_RIGHT).replace("scale=scale", "scale=None"),
        "the scale is ignored",
    ),
]
