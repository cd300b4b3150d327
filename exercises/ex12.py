"""The check of exercise 12: rows marked with a number and an expert, on two ranks, then training
steps with experts."""

from types import SimpleNamespace

import torch
import torch.distributed as dist
from feedback import Wrong, check_groups, compare, on_ranks

from distributed import experts as module

MOE = dict(model="qwen3", n_experts=8, top_k=2, moe_ffn_dim=32)
CASES = [  # rows for each of four experts on rank 0, the same on rank 1; the case in words
    ([[2, 1, 1, 1], [1, 1, 2, 2]], "the example of TASK.md"),
    ([[0, 3, 0, 0], [2, 1, 0, 0]], "nobody chooses the experts of rank 1"),
    ([[1, 0, 2, 3], [0, 0, 0, 0]], "rank 1 has no row"),
]


def exchanged(table: list[list[int]], group=None) -> dict:
    """Rows (number, expert, weight) go through four experts, two on each rank; expert e multiplies
    by e + 1, and by the weight."""
    rank = dist.get_rank()
    group = group or dist.group.WORLD
    ep = dist.get_world_size(group)
    counts = torch.tensor(table[rank])
    wanted = torch.arange(4).repeat_interleave(counts)
    number = 10.0 * rank + torch.arange(len(wanted))
    weight = 1 + number % 3
    x = torch.stack([number, wanted.float(), weight], 1).requires_grad_()
    mine = torch.arange(4).chunk(ep)[rank if ep > 1 else 0]  # the experts of this rank
    seen = []

    def compute(x, weight, counts, w1, w2, w3):
        is_theirs = torch.equal(weight, x[:, 2])
        seen.append((x[:, 1].int().tolist(), counts.tolist(), is_theirs))
        if int(counts.sum()) != len(x) or len(counts) != len(mine):
            return x * 0
        return x * (1 + mine.repeat_interleave(counts))[:, None] * x[:, 2:].detach()

    w = torch.zeros(len(mine), 1, 1)
    given = SimpleNamespace(w1=w, w2=w, w3=w, parameters=lambda: [w, w, w], compute=compute)
    y = module.exchange_tokens(given, group, x, weight, counts)
    if not isinstance(y, list):
        raise Wrong("exchange_tokens returns a list of results, here [y]")
    y = torch.cat(y)
    if y.requires_grad and y.shape == x.shape:
        (y * torch.arange(1.0, 1 + len(y))[:, None]).sum().backward()
    return dict(y=y.detach(), grad=x.grad, x=x.detach(), seen=seen, mine=mine.tolist())


def alone(table):
    """exchanged() on a single rank with all experts."""
    groups = [dist.new_group([0]), dist.new_group([1])]
    return exchanged(table, groups[dist.get_rank()])


NAMES = "ABCD"


def letters(numbers) -> str:
    return " ".join(NAMES[n] for n in numbers)


def check_compute(rank: int, got: dict, table, said: str):
    """Check the rows and counts that reach the experts of a rank."""
    mine = got["mine"]
    want = [sum(senders[e] for senders in table) for e in mine] if len(mine) == 2 else table[rank]
    if not got["seen"] and sum(want):
        raise Wrong(
            f"{said}: experts.compute is not called on rank {rank}, whose experts {letters(mine)} "
            f"have {want} rows"
        )
    for rows, counts, is_theirs in got["seen"]:
        where = f"{said}: on rank {rank}, which has the experts {letters(mine)}, compute is given the rows {letters(rows)}"
        order = [e for e, n in zip(mine, counts) for _ in range(n)]
        if len(order) != len(rows) or len(counts) != len(mine):
            raise Wrong(
                f"{where} with the counts {counts}. Of all senders together its experts have "
                f"{want} rows"
            )
        if rows != order:
            guess = "rows of other experts are among them: are the sizes those of the ranks, in their order?"
            if sorted(rows) == order:
                guess = "they are in the order of arrival, rank by rank: sort them by expert first"
            raise Wrong(f"{where} with the counts {counts}: {guess}")
        if not is_theirs:
            raise Wrong(f"{where}, but the weights of other rows: weights travel as their rows do")


def check_exchange(function, table, said: str):
    try:
        ranks = on_ranks(2, function, table)
    except RuntimeError as e:
        last = next((line for line in str(e).splitlines() if "plit sizes" in line), "")
        if not last:
            raise
        raise Wrong(
            f"{said}: {last.strip()[:160]}. An all-to-all has other sizes than the tensor has "
            "rows. On the way back "
            "a rank sends what it had received, and receives what it had sent"
        ) from e
    for rank, got in enumerate(ranks):
        check_compute(rank, got, table, said)
    for rank, got in enumerate(ranks):
        want = got["x"] * (1 + got["x"][:, 1:2]) * got["x"][:, 2:]
        if got["y"].shape != want.shape:
            raise Wrong(
                f"{said}: rank {rank} gets {len(got['y'])} rows back, and has sent {len(want)}"
            )
        if not torch.equal(got["y"], want):
            i = next(i for i in range(len(want)) if not torch.equal(got["y"][i], want[i]))
            other = [j for j in range(len(want)) if torch.equal(got["y"][i], want[j])]
            guess = (
                f"it is that of row {other[0]}" if other else "it is that of no row of this rank"
            )
            raise Wrong(
                f"{said}: the experts were given the right rows, but row {i} of the result on "
                f"rank {rank} is not "
                f"that of row {i}: {guess}. Rows travel home in the order in which they arrived: "
                "undo the sort first"
            )
    for rank, got in enumerate(ranks):
        factor = (1 + got["x"][:, 1]) * got["x"][:, 2]
        want = (torch.arange(1.0, 1 + len(got["x"])) * factor)[:, None].expand(-1, 3)
        if len(want) and (got["grad"] is None or not torch.allclose(got["grad"], want)):
            raise Wrong(
                f"{said}: the result is right, but x has "
                f"{'no gradient' if got['grad'] is None else 'a wrong gradient'} on rank {rank}: "
                "what travels must "
                f"have a backward, as AllToAll.apply has and dist.all_to_all_single has not"
            )


def check():
    for table, said in CASES:
        check_exchange(exchanged, table, said)
    check_exchange(alone, CASES[0][0], "one rank with all experts, as with --etp alone")
    if difference := compare(2, dict(ep=2), dict(n=4, b=1, **MOE)):
        raise Wrong(f"training a model with experts on ep 2: {difference}")
    check_groups(dict(ep=2), dict(n=4, b=1, **MOE))
