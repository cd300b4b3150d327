"""Answers to exercise 10."""


def split(body: str):
    return f"\ndef split_layers(n_layers, n_stages):\n{body}"


def order(body: str):
    return f"\ndef order_of_rank(rank, pp, n):\n{body}"


RIGHT = [
    # the rest goes to the last stages; three phases
    split("""
    cost = (n_layers + 2) / n_stages
    bounds = [int(i * cost + 1e-9) - 1 for i in range(n_stages + 1)]
    bounds[0], bounds[-1] = 0, n_layers
    return [list(range(a, b)) for a, b in zip(bounds, bounds[1:])]
""")
    + order("""
    warm = min(n, pp - rank - 1)
    out = [("F", m) for m in range(warm)]
    for i in range(n - warm):
        out += [("F", warm + i), ("B", i)]
    return out + [("B", m) for m in range(n - warm, n)]
"""),
    # fill up to the largest cost that is needed; a backward as soon as the limit is reached
    split("""
    most, stages, next_layer = -(-(n_layers + 2) // n_stages), [], 0
    for i in range(n_stages):
        left = n_stages - 1 - i
        room = most - (i == 0) - (i == n_stages - 1)
        fair = -(-(n_layers - next_layer + 1 + (i == 0)) // (left + 1)) - (i == 0) - (i == n_stages - 1)
        size = min(room, fair) if left else n_layers - next_layer
        stages.append([*range(next_layer, next_layer + size)])
        next_layer += size
    return stages
""")
    + order("""
    limit, forwards, backwards, out = pp - rank, 0, 0, []
    while backwards < n:
        if forwards < n and forwards - backwards < limit:
            out.append(("F", forwards))
            forwards += 1
        else:
            out.append(("B", backwards))
            backwards += 1
    return out
"""),
]
WRONG = [
    # right, and it tries every split
    (
        split("""
    from itertools import combinations

    def slowest(bounds):
        sizes = [b - a for a, b in zip(bounds, bounds[1:])]
        sizes[0] += 1
        sizes[-1] += 1
        return max(sizes)

    cuts = combinations(range(1, n_layers), n_stages - 1)
    best = min(([0, *cut, n_layers] for cut in cuts), key=slowest)
    return [list(range(a, b)) for a, b in zip(best, best[1:])]
"""),
        "It may well be right, and it is too slow",
    ),
    (
        split("""
    sizes = [n_layers // n_stages + (i < n_layers % n_stages) for i in range(n_stages)]
    return [list(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(n_stages)]
"""),
        "The first stage has the embedding as well",
    ),
    (
        split(
            "    k = n_layers // n_stages\n    return [list(range(i * k, (i + 1) * k)) for i in "
            "range(n_stages)]\n"
        ),
        "[4, 5] are in no stage",
    ),
    (order("    return [(kind, m) for kind in 'FB' for m in range(n)]\n"), "This is GPipe's order"),
    (
        order("    return [(kind, m) for m in range(n) for kind in 'FB']\n"),
        "Ranks wait more than they must",
    ),
    (
        order("    return [(kind, m) for m in range(n) for kind in 'BF']\n"),
        "backward of micro-batch 0 before its forward",
    ),
    (
        order(
            "    F, B = [('F', m) for m in range(n)], [('B', m) for m in range(n)]\n"
            "    return F[:1] + [x for pair in zip(B, F[1:]) for x in pair] + B[n - 1:] if rank < "
            "pp - 1 else F + B\n"
        ),
        "the ranks wait for each other forever. rank 0 waits for B0 of rank 1",
    ),
]
