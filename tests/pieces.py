"""A model that reads its tokens in pieces, with the cache of rl/decoding.py."""

import torch

from rl.decoding import RowCache


@torch.no_grad()
def in_pieces(model, rows: list[list[int]], sizes=(), filler=0):
    """([logits (T_i, V) of each row of T_i tokens], the cache). The first forward reads all but the
    last sum(sizes) tokens of each row, padded on the right with `filler`; every further one reads
    the next `size` tokens of all rows."""
    cache = RowCache(len(rows), max(map(len, rows)))
    done = [0] * len(rows)
    logits = [[] for _ in rows]
    for n, size in enumerate([None, *sizes]):
        parts = [
            row[begin : len(row) - sum(sizes) if n == 0 else begin + size]
            for row, begin in zip(rows, done)
        ]
        T = max(map(len, parts))
        at = torch.tensor([[*range(begin, begin + T)] for begin in done])
        cache.place(at, (at.amax(1) + 1).tolist())
        found = model(
            torch.tensor([part + [filler] * (T - len(part)) for part in parts]),
            positions=at,
            cache=cache,
        )
        for i, part in enumerate(parts):
            logits[i].append(found[i, : len(part)])
            done[i] += len(part)
    return [torch.cat(x) for x in logits], cache
