"""Exercise 15, by hand: a part of a tensor, put together from pieces saved under another layout."""

import torch


def load_part(pieces, read, offset: tuple, shape: tuple):
    """The part of a tensor that begins at `offset` in the whole tensor and has shape `shape`.

    pieces: list of (file, offset, shape), the region saved in each file; in any order, and regions
    may overlap. read(file):
    returns the file's tensor. Reading is slow: read only files that you need, and each at most
    once. The whole tensor does not fit into memory. Raises ValueError if the pieces do not cover
    the part.
    """
    part = None
    there = torch.zeros(shape, dtype=torch.bool)
    for file, start, size in pieces:
        both = [
            (max(o, s), min(o + n, s + m))
            for o, n, s, m in zip(offset, shape, start, size, strict=True)
        ]
        if any(begin >= end for begin, end in both):
            continue
        into = tuple(slice(begin - o, end - o) for (begin, end), o in zip(both, offset))
        if there[into].all():
            continue
        piece = read(file)
        part = piece.new_empty(shape) if part is None else part
        part[into] = piece[tuple(slice(begin - s, end - s) for (begin, end), s in zip(both, start))]
        there[into] = True
    if not there.all():
        raise ValueError(
            f"the pieces do not cover {(~there).sum()} elements of the part at {offset}; is a "
            "file missing?"
        )
    return part
