"""Answers to exercise 9."""


def wrong(
    way_in="natural_order({}, 2, cp)",
    way_back="[x.index_select(2, sequence_index(T, cp, r)) for r in range(cp)]",
    heads="x.transpose(0, 1).flatten(1, 2)",
    copies="x.repeat_interleave(cp // x.shape[1], dim=1)",
    few="k.shape[1] % cp",
):
    """The usual answer with one thing wrong."""
    arrived = "x.permute(1, 2, 0, 3, 4).reshape(B, H // cp, cp * T, K)"
    return f"""
def all_to_all_attention(positions, doc_ids=None, *, group):
    cp = dist.get_world_size(group)
    whole = causal_attention(positions, doc_ids)
    def there(x):
        B, H, T, K = x.shape
        x = AllToAll.apply(x.unflatten(1, (cp, H // cp)).transpose(0, 1), group)
        return {way_in.format(arrived)}
    def back(x):
        T = x.shape[2]
        x = AllToAll.apply(torch.stack({way_back}), group)
        return {heads}
    def attend(q, k, v, scale=None):
        if {few}:
            k, v = ({copies} for x in (k, v))
        return back(whole(there(q), there(k), there(v), scale=scale))
    return attend
"""


# q, k and v in one exchange
ONE = """
def all_to_all_attention(positions, doc_ids=None, *, group):
    cp = dist.get_world_size(group)
    attend_whole = causal_attention(positions, doc_ids)
    index = [sequence_index(cp * positions.shape[1], cp, r) for r in range(cp)]
    natural = torch.cat(index).argsort()

    def attend(q, k, v, scale=None):
        B, H, t, K = q.shape
        own = lambda x, r: x[:, r * x.shape[1] // cp : max((r + 1) * x.shape[1] // cp, r * x.shape[1] // cp + 1)]
        pieces = [torch.cat([own(x, r).transpose(0, 1) for x in (q, k, v)]) for r in range(cp)]  # (heads, B, t, K)
        n = len(pieces[0])
        got = AllToAll.apply(torch.cat(pieces), group).view(cp, n, B, t, K)
        got = got.permute(2, 1, 0, 3, 4).reshape(B, n, cp * t, K)[:, :, natural]
        h = H // cp
        g = (n - h) // 2
        out = attend_whole(got[:, :h], got[:, h : h + g], got[:, h + g :], scale=scale)
        out = AllToAll.apply(torch.cat([out[:, :, i].transpose(0, 1) for i in index]), group)  # (H, B, t, K)
        return out.transpose(0, 1)

    return attend
"""
RIGHT = [ONE]
WRONG = [
    (
        ONE.replace("        n =", "        AllGather.apply(q, 2, group)\n        n ="),
        "all-to-alls, and no all-gather",
    ),
    (
        "def all_to_all_attention(positions, doc_ids=None, *, group):\n"
        "    return all_gather_attention(positions, doc_ids, group=group)\n",
        "was called: that is exercise 8's way",
    ),
    (wrong(way_in="{}", way_back="x.chunk(cp, 2)"), "So they arrive, rank by rank: natural_order"),
    (wrong(way_back="x.chunk(cp, 2)"), "On the way back a rank must get its own tokens"),
    (
        wrong(heads="x.permute(1, 2, 0, 3, 4).flatten(1, 2)"),
        "head 1 of the result on rank 0 is head 2",
    ),
    (
        wrong(copies="x.repeat(1, cp // x.shape[1], 1, 1)"),
        "[0, 0, 1, 1]: repeat_interleave, not repeat",
    ),
    (wrong(few="False"), "There are fewer key/value heads than ranks"),
]
