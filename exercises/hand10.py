"""Exercise 10, by hand: the layers of each pipeline stage, and the order of a rank's forwards and
backwards."""


def split_layers(n_layers: int, n_stages: int) -> list[list[int]]:
    """Layer numbers of each stage; together 0 .. n_layers - 1 in order. A layer costs 1, the
    embedding (on the first stage) 1, the head (on the last stage) 1. The most expensive stage must
    cost as little as possible."""
    sizes = [(n_layers + 2) // n_stages + (i < (n_layers + 2) % n_stages) for i in range(n_stages)]
    sizes[0] -= 1
    sizes[-1] -= 1
    return [list(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(n_stages)]


def order_of_rank(rank: int, pp: int, n: int) -> list[tuple[str, int]]:
    """1F1B: the actions of a rank of pp ranks, in order. ("F", m) is the forward of micro-batch m,
    ("B", m) the backward; each
    m of 0 .. n - 1 comes once as F and once as B. Rank 0 has the first stage. Keep as few
    micro-batches in flight as possible without making any rank wait longer."""
    ahead = min(n, pp - rank)
    order = [("F", m) for m in range(ahead)]
    for m in range(n):
        order.append(("B", m))
        if ahead + m < n:
            order.append(("F", ahead + m))
    return order
