"""Exercise 10, by hand: which layers a pipeline stage has, and in which order a rank works."""


def split_layers(n_layers: int, n_stages: int) -> list[list[int]]:
    """The numbers of the layers of each stage, all of 0 .. n_layers - 1 in order. A layer costs 1; the embedding, on
    the first stage, costs 1 as well, and so does the head, on the last. The dearest stage costs as little as possible."""
    sizes = [(n_layers + 2) // n_stages + (i < (n_layers + 2) % n_stages) for i in range(n_stages)]
    sizes[0] -= 1
    sizes[-1] -= 1
    return [list(range(sum(sizes[:i]), sum(sizes[: i + 1]))) for i in range(n_stages)]


def order_of_rank(rank: int, pp: int, n: int) -> list[tuple[str, int]]:
    """1F1B: what this rank of pp ranks does, in order: ("F", m) is the forward of micro-batch m, ("B", m) its backward,
    each m of 0 .. n - 1 once. Rank 0 has the first stage. As few micro-batches in flight as can be without waiting more."""
    ahead = min(n, pp - rank)
    order = [("F", m) for m in range(ahead)]
    for m in range(n):
        order.append(("B", m))
        if ahead + m < n:
            order.append(("F", ahead + m))
    return order
