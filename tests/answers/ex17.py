"""Answers to exercise 17."""


def answer(*change) -> dict:
    return {"hand17.py": {"ring_all_reduce": RING.replace(*change) if change else RING}}


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
RIGHT = [answer()]
WRONG = [  # answer, what the feedback must say
    (answer("    sums =", "    for _ in range(n - 1):\n        shift(x, group)\n    sums ="), "send a piece at a time"),
    (answer("    sums =", "    dist.all_reduce(x.clone(), group=group)\n    sums ="), "but by allreduce"),
    (answer("    sums =", "    return x.clone()\n    sums ="), "nothing was added"),
    (answer("x.clone().view", "x.view"), "x was changed"),
    (answer("sums[(rank + 1 - step) % n] = part", "sums[(rank + 1) % n] = part"), "no piece is a whole sum"),
    (answer("dist.get_rank(group)", "dist.get_rank()"), "Does every collective get its group"),
    (answer("range(1, n)", "range(1, 2)"), "no piece is a whole sum"),
]
