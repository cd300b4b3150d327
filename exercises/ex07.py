"""The check of exercise 7: each rank's tokens, the causal work per rank, and the way back with its
gradient."""

import torch
from feedback import Wrong, alone

import parallel


def work(index) -> int:
    """Number of keys that the queries at `index` attend to."""
    return sum(int(t) + 1 for t in index)


def indices(T: int, cp: int) -> list:
    return [parallel.sequence_index(T, cp, rank) for rank in range(cp)]


def ordered(gathered, dim: int, cp: int):
    """(natural_order of `gathered`, the gradient of `gathered` if each element of the result counts
    by its number)."""
    x = gathered.double().requires_grad_()
    got = parallel.natural_order(x, dim, cp)
    if got.requires_grad and got.shape == x.shape:
        (got * torch.arange(float(got.numel())).view(got.shape)).sum().backward()
    return got.detach(), x.grad


def device_of_index() -> str:
    return parallel.sequence_index(8, 2, 0, torch.device("meta")).device.type


def check_index(T: int, cp: int):
    mine = alone(indices, T, cp)
    head = f"sequence_index with T {T}, cp {cp}"
    said = "; ".join(f"rank {rank} has tokens {index.tolist()}" for rank, index in enumerate(mine))
    if any(index.shape != (T // cp,) for index in mine):
        raise Wrong(
            f"{head} gives {[tuple(index.shape) for index in mine]}; each rank has T/cp = "
            f"{T // cp} tokens"
        )
    if any(index.is_floating_point() for index in mine):
        raise Wrong(
            f"{head} gives {mine[0].dtype}: an index is of whole numbers, and torch refuses any "
            "other (index_select)"
        )
    if sorted(torch.cat(mine).tolist()) != list(range(T)):
        raise Wrong(
            f"{head}: {said}. Every token must be on exactly one rank: chunks rank and 2 cp - 1 - "
            "rank of 2 cp"
        )
    if len({work(index) for index in mine}) > 1:
        works = ", ".join(f"{work(index)} on rank {rank}" for rank, index in enumerate(mine))
        slowest = max(map(work, mine)) * cp / sum(map(work, mine))
        raise Wrong(
            f"{head}: {said}. The causal work, keys that its queries look at, is {works}: all "
            "wait for the slowest, "
            f"{slowest:.2f} times the mean. A late token costs more than an early one, so each "
            "rank needs some of both"
        )
    chunk = T // (2 * cp)
    for rank, index in enumerate(mine):
        want = [
            *range(rank * chunk, (rank + 1) * chunk),
            *range(T - (rank + 1) * chunk, T - rank * chunk),
        ]
        if index.tolist() != want:
            guess = "all_gather_attention counts on these two chunks"
            if sorted(index.tolist()) == want:
                guess = "chunk `rank` comes first"
            raise Wrong(
                f"{head}: the work is balanced, but rank {rank} has tokens {index.tolist()}, and "
                f"should have {want}: "
                f"two runs of neighbours, chunks {rank} and {2 * cp - 1 - rank} of {2 * cp}. "
                f"{guess}"
            )


def check_order(T: int, cp: int, dim: int):
    whole = torch.arange(3 * T).view(3, T).unsqueeze(-1).expand(3, T, 2)  # tokens along dim 1
    x = whole.movedim(1, dim).double()
    gathered = torch.cat([x.index_select(dim, right_index(T, cp, rank)) for rank in range(cp)], dim)
    got, grad = alone(ordered, gathered, dim, cp)
    head = f"natural_order with T {T}, cp {cp}, dim {dim} of {tuple(x.shape)}"
    if got.shape != x.shape:
        raise Wrong(f"{head} gives {tuple(got.shape)}: only the order along dim changes")
    if not torch.equal(got, x):
        chunk = T // (2 * cp)
        order = got.movedim(dim, 1)[0, ::chunk, 0].long() // chunk
        came = gathered.movedim(dim, 1)[0, ::chunk, 0].long() // chunk
        guess = (
            "nothing has moved"
            if torch.equal(got, gathered)
            else "is it the permutation that split the sequence, and not its inverse? They are the same only for some cp"
            if torch.equal(got, gathered.index_select(dim, split_order(T, cp)))
            else "the late chunks come from rank 0 last"
            if order.tolist()[:cp] == list(range(cp))
            else "of each rank comes first its early chunk and then its late one"
        )
        raise Wrong(
            f"{head}: chunks come in as {came.tolist()} and go out as {order.tolist()}, and "
            "should be in order: "
            f"{guess}"
        )
    weights = torch.arange(float(x.numel())).view(x.shape)
    want = torch.cat(
        [weights.index_select(dim, right_index(T, cp, rank)) for rank in range(cp)], dim
    )
    if grad is None or not torch.equal(grad, want.double()):
        raise Wrong(
            f"{head} puts the chunks in order, and the gradient of x is "
            f"{'missing' if grad is None else 'wrong'}: keys "
            "and values go through this function, so gradients must come back (no detach, no "
            ".data, no new tensor of "
            "numbers)"
        )


def right_index(T: int, cp: int, rank: int):
    chunks = torch.arange(T).view(2 * cp, -1)
    return chunks[[rank, -1 - rank]].flatten()


def split_order(T: int, cp: int):
    return torch.cat([right_index(T, cp, rank) for rank in range(cp)])


def check():
    for T, cp in ((8, 2), (8, 1), (24, 3), (64, 4)):
        check_index(T, cp)
    if alone(device_of_index) != "meta":
        raise Wrong(
            "sequence_index gives a tensor on the CPU whatever its device is: on a GPU, each step "
            "would wait for the "
            "copy"
        )
    for T, cp, dim in ((8, 2, 1), (24, 3, 0), (24, 3, 2), (8, 1, 1), (64, 4, 1)):
        check_order(T, cp, dim)
