"""The check of exercise 10: the slowest stage of the split, the simulated bubble and memory of the
order, then training."""

import itertools
import tempfile
from pathlib import Path

import hand10
from feedback import Wrong, alone, alone_until, compare

from tools.reports.schedule import bubble, duration, simulate

SPLITS = [(6, 2), (6, 4), (4, 2), (7, 3), (32, 8), (80, 16), (61, 8)]  # layers, stages
SCHEDULES = [(2, 4), (4, 8), (4, 16), (8, 8), (4, 2), (3, 1), (2, 1)]  # ranks, micro-batches
LIMIT_S = 10  # of an answer, for one of these rows


def split(n_layers: int, n_stages: int) -> list[list[int]]:
    return [list(stage) for stage in hand10.split_layers(n_layers, n_stages)]


def orders(pp: int, n: int) -> list[list[tuple[str, int]]]:
    return [[tuple(x) for x in hand10.order_of_rank(rank, pp, n)] for rank in range(pp)]


def check_split():
    for n_layers, n_stages in SPLITS:
        said = f"{n_layers} layers on {n_stages} stages"
        stages = alone_until(LIMIT_S, "split_layers", said, split, n_layers, n_stages)
        if len(stages) != n_stages:
            raise Wrong(f"split_layers: {said}: {len(stages)} lists")
        if (given := list(itertools.chain(*stages))) != list(range(n_layers)):
            missing = sorted(set(range(n_layers)) - set(given))
            what = (
                f"{missing} are in no stage"
                if missing
                else "each layer must be in one stage, in order"
            )
            raise Wrong(f"split_layers: {said}: {what}; yours: {stages}")
        costs = [len(stage) + (i == 0) + (i == n_stages - 1) for i, stage in enumerate(stages)]
        best = -(-(n_layers + 2) // n_stages)
        if max(costs) > best:
            slower = step_time(costs) / step_time([best] * n_stages) - 1
            guess = ""
            if max(costs) - 1 == costs[0] - 1 == len(stages[0]) and len(stages[0]) == -(
                -n_layers // n_stages
            ):
                guess = ". The first stage has the embedding as well, and the last one the head: did you count them?"
            raise Wrong(
                f"split_layers: {said}: yours cost {costs}, with the embedding and the head, and "
                "the slowest stage "
                f"could cost {best}. With {4 * n_stages} micro-batches a step takes {slower:.0%} "
                f"longer{guess}"
            )


def step_time(costs: list[int]) -> float:
    """Time of a 1F1B step with 4 micro-batches per stage. costs: time of a forward on each stage."""
    ranks = range(len(costs))
    rows = [
        [(kind, rank, m) for kind, m in order(rank, len(costs), 4 * len(costs))] for rank in ranks
    ]
    return duration(simulate(rows, lambda kind, stage: (2 if kind == "B" else 1) * costs[stage]))


def order(rank: int, pp: int, n: int) -> list[tuple[str, int]]:
    """The 1F1B order of a rank, as [("F" or "B", micro-batch)]."""
    ahead = min(n, pp - rank)
    pairs = [x for m in range(n - ahead) for x in (("B", m), ("F", ahead + m))]
    return [("F", m) for m in range(ahead)] + pairs + [("B", m) for m in range(n - ahead, n)]


def check_row(row, rank: int, n: int, said: str):
    """Each forward and backward must come once, the backward after the forward."""
    for kind in "FB":
        given = sorted(m for k, m in row if k == kind)
        if given != list(range(n)):
            raise Wrong(
                f"order_of_rank: {said}, rank {rank} has {kind} of the micro-batches {given}, and "
                "must have each of "
                f"0 .. {n - 1} once"
            )
    for m in range(n):
        if row.index(("B", m)) < row.index(("F", m)):
            raise Wrong(
                f"order_of_rank: {said}, rank {rank} has the backward of micro-batch {m} before "
                "its forward: there "
                "is nothing yet to go back through"
            )


def peak(row) -> int:
    """Most micro-batches in flight: forward done, backward not yet."""
    return max(itertools.accumulate(1 if kind == "F" else -1 for kind, _ in row))


def show(row) -> str:
    return " ".join(f"{kind}{m}" for kind, m in row[:12]) + " ..." * (len(row) > 12)


def check_order():
    for pp, n in SCHEDULES:
        said = f"{pp} ranks, {n} micro-batches"
        rows = alone_until(LIMIT_S, "order_of_rank", said, orders, pp, n)
        for rank, row in enumerate(rows):
            check_row(row, rank, n, said)
        try:
            waits = bubble(
                simulate([[(kind, rank, m) for kind, m in row] for rank, row in enumerate(rows)])
            )
        except AssertionError as e:
            raise Wrong(
                f"order_of_rank: {said}: the ranks wait for each other forever. {stuck(rows)}"
            ) from e
        best = (pp - 1) / (n + pp - 1)
        peaks = [peak(row) for row in rows]
        wanted = [min(n, pp - rank) for rank in range(pp)]
        numbers = (
            f"bubble {waits:.1%}, most micro-batches in flight {peaks} on ranks 0 to {pp - 1}; "
            f"1F1B: {best:.1%} and "
            f"{wanted}. Rank 0 of yours: {show(rows[0])}"
        )
        if waits > best + 1e-9:
            raise Wrong(
                f"order_of_rank: {said}: {numbers}. Ranks wait more than they must: how many "
                "forwards can a rank do "
                "before the first backward reaches it?"
            )
        if any(a > b for a, b in zip(peaks, wanted)):
            guess = "This is GPipe's order, all forwards first. " if peaks == [n] * pp else ""
            raise Wrong(
                f"order_of_rank: {said}: {numbers}. {guess}The time is right, and the memory is "
                "not: take a backward "
                "as soon as there is one"
            )


def stuck(rows) -> str:
    """Name the action that each rank waits for in a deadlock."""
    done = set()
    left = [list(row) for row in rows]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(left):
            while row and (
                row[0][0] == "F"
                and (rank == 0 or ("F", rank - 1, row[0][1]) in done)
                or row[0][0] == "B"
                and (rank == len(rows) - 1 or ("B", rank + 1, row[0][1]) in done)
            ):
                kind, m = row.pop(0)
                done.add((kind, rank, m))
                moved = True
    next_ones = [(rank, *row[0]) for rank, row in enumerate(left) if row]
    return "; ".join(
        f"rank {r} waits for {k}{m} of rank {r - 1 if k == 'F' else r + 1}"
        for r, k, m in next_ones[:3]
    )


def check_training():
    """Train with torch's pipeline under the student's split and orders; compare loss, gradients and
    weights with 1 process."""
    stages = [[f"blocks.{i}" for i in stage] for stage in alone(split, 4, 2)]
    fqns = ";".join(
        ",".join(names) for names in (["tok_embeddings", *stages[0]], [*stages[1], "norm", "head"])
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "order.csv")
        rows = [
            ",".join(f"{rank}{kind}{m}" for kind, m in row)
            for rank, row in enumerate(alone(orders, 2, 8))
        ]
        path.write_text("\n".join(rows) + "\n")
        if difference := compare(
            2, dict(pp=2, pp_schedule_csv=str(path), pp_stage_fqns=fqns), dict(n=8, b=8)
        ):
            raise Wrong(f"trained with your split and your orders on 2 processes: {difference}")


def check():
    check_split()
    check_order()
    check_training()
