"""Answers to exercise 15."""


def answer(body: str):
    return f"\ndef load_part(pieces, read, offset, shape):\n{body}"


RIGHT = [
    # one dimension after the other, by narrow; elements are counted
    answer("""
    part, missing = None, torch.ones(shape)
    for file, start, size in dict(((s, z), (f, s, z)) for f, s, z in pieces).values():
        low = [max(a, b) for a, b in zip(offset, start)]
        n = [min(a + b, c + d) - e for a, b, c, d, e in zip(offset, shape, start, size, low)]
        if min(n) <= 0:
            continue
        source = read(file)
        if part is None:
            part = torch.full(shape, float("nan"), dtype=source.dtype)
        into, left = part, missing
        for dim in range(len(shape)):
            source = source.narrow(dim, low[dim] - start[dim], n[dim])
            into = into.narrow(dim, low[dim] - offset[dim], n[dim])
            left = left.narrow(dim, low[dim] - offset[dim], n[dim])
        into.copy_(source)
        left.zero_()
    if missing.any():
        raise ValueError(f"{int(missing.sum())} elements are in no piece")
    return part
"""),
    # by indices of rows and columns that both have
    answer("""
    wanted = [range(o, o + n) for o, n in zip(offset, shape)]
    out, counted, seen = [], torch.zeros(shape, dtype=torch.int8), set()
    for file, start, size in pieces:
        common = [[i for i in r if s <= i < s + m] for r, s, m in zip(wanted, start, size)]
        if all(common) and (start, size) not in seen:
            seen.add((start, size))
            out.append((common, start, read(file)))
    part = torch.zeros(shape, dtype=out[0][2].dtype) if out else torch.zeros(shape)
    for common, start, piece in out:
        grid = torch.meshgrid(*(torch.tensor(c) for c in common), indexing="ij")
        into = tuple(g - o for g, o in zip(grid, offset))
        part[into] = piece[tuple(g - s for g, s in zip(grid, start))]
        counted[into] = 1
    if not counted.all():
        raise ValueError("not covered")
    return part
"""),
]
OVERLAP = """
    part = torch.zeros(shape)
    for file, start, size in pieces:
        both = [(max(o, s), min(o + n, s + m)) for o, n, s, m in zip(offset, shape, start, size)]
        if any(a >= b for a, b in both):
            continue
        part[tuple(slice(a - o, b - o) for (a, b), o in zip(both, offset))] PUT read(file)[
            tuple(slice(a - s, b - s) for (a, b), s in zip(both, start))]
    return part
"""
CUT = "    return whole[tuple(slice(o, o + n) for o, n in zip(offset, shape))]\n"
WRONG = [
    (
        answer("    whole = torch.cat([read(file) for file, _, _ in sorted(pieces)])\n" + CUT),
        "were read, and",
    ),
    (answer(OVERLAP.replace("PUT", "=").replace("return part", "return part[1:]")), "its shape is"),
    (
        answer(
            "    whole = torch.cat([torch.empty(0, *pieces[0][2][1:])] + [read(f) for f, s, z in "
            "sorted(pieces)\n"
            "        if all(max(o, a) < min(o + n, a + m) for o, n, a, m in zip(offset, shape, s, "
            "z))])\n"
            "    return whole[: shape[0]]\n"
        ),
        "Only a piece's offset says where it belongs",
    ),
    (answer(OVERLAP.replace("PUT", "+=")), "nothing is to be added up"),
    (
        answer(
            """
    ends = [tuple(s + m for s, m in zip(start, size)) for _, start, size in pieces]
    whole = torch.empty([max(e) for e in zip(*ends)])
    for file, start, size in pieces:
        if all(max(o, s) < min(o + n, s + m) for o, n, s, m in zip(offset, shape, start, size)):
            whole[tuple(slice(s, s + m) for s, m in zip(start, size))] = read(file)
"""
            + CUT
        ),
        "copy each overlap directly into the part",
    ),
    (answer(OVERLAP.replace("PUT", "=")), "Keep account of what was written"),
]
