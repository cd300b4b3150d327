"""Answers to exercise 17."""

RING = """
def ring_all_reduce(x, group):
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    sums = x.clone().view(n, -1)
    part = sums[rank].clone()
    for step in range(1, n):
        part = shift(part, group) + sums[(rank - step) % n]
    for step in range(n):
        sums[(rank + 1 - step) % n] = part
        part = shift(part, group) if step < n - 1 else part
    return sums.flatten()
"""
RIGHT = [RING]
WRONG = [  # answer, what the feedback must say
    (
        RING.replace(
            "    sums =", "    for _ in range(n - 1):\n        shift(x, group)\n    sums ="
        ),
        "send a piece at a time",
    ),
    (
        RING.replace("    sums =", "    dist.all_reduce(x.clone(), group=group)\n    sums ="),
        "but by allreduce",
    ),
    (RING.replace("    sums =", "    return x.clone()\n    sums ="), "nothing was added"),
    (RING.replace("x.clone().view", "x.view"), "x was changed"),
    (
        RING.replace("sums[(rank + 1 - step) % n] = part", "sums[(rank + 1) % n] = part"),
        "no piece is a whole sum",
    ),
    (
        RING.replace("dist.get_rank(group)", "dist.get_rank()"),
        "Does every collective get its group",
    ),
    (RING.replace("range(1, n)", "range(1, 2)"), "no piece is a whole sum"),
]
