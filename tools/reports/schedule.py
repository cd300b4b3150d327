"""The pipeline's schedule: the order of each rank's work, the duration, and the time spent waiting."""

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Any

from distributed.stages import ONE_STAGE_PER_RANK, csv_rows

LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
DOES = {
    "F": "forward",
    "B": "backward",
    "I": "backward of the inputs",
    "W": "backward of the weights",
}


def rows_of(cfg: Any, pp: int, n: int, n_stages: int) -> list[list[tuple[str, int, int]]]:
    """Per pipeline rank the actions in order: (F forward | B backward | I, W halves of a backward,
    stage, micro-batch)."""
    if pp == 1:
        return [[(kind, 0, m) for m in range(n) for kind in "FB"]]
    if cfg.pp_schedule_csv:
        return csv_rows(cfg.pp_schedule_csv)
    # by hand: torch's order of 1F1B is one off on the last rank
    if cfg.pp_schedule in ONE_STAGE_PER_RANK:
        rows = []
        for rank in range(pp):
            ahead = min(n, pp - rank)
            if cfg.pp_schedule == "GPipe":
                ahead = n
            row = [("F", rank, m) for m in range(ahead)]
            for m in range(n):
                row.append(("B", rank, m))
                if ahead + m < n:
                    row.append(("F", rank, ahead + m))
            rows.append(row)
        return rows
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    rows = []
    for ops in get_schedule_ops(cfg.pp_schedule, pp, n, n_stages // pp):
        row = []
        for op in filter(None, ops):
            for action in op.sub_actions or (op,):
                kind = LETTERS.get(action.computation_type.name)
                if kind:  # not REDUCE_GRAD
                    row.append((kind, action.stage_index, action.microbatch_index))
        rows.append(row)
    return rows


def usual_cost(kind: str, stage: int) -> int:
    """A whole backward takes twice as long as a forward or half of a backward."""
    if kind == "B":
        return 2
    return 1


def inputs_of(action: tuple[str, int, int], last: int) -> list[tuple[str, int, int]]:
    """What must be done before a forward, a backward or half of one. last: the last stage."""
    kind, stage, m = action
    if kind == "F":
        if stage == 0:
            return []
        return [("F", stage - 1, m)]
    if kind == "W":
        return [("B", stage, m)]
    if stage == last:
        return [("F", stage, m)]
    return [("F", stage, m), ("B", stage + 1, m)]


def simulate(rows: list[list[tuple]], cost: Callable = usual_cost) -> list[list[tuple]]:
    """Per rank (start, end, kind, stage, micro-batch): an action starts after the previous action
    of the row and after its inputs."""
    last = max(stage for _, stage, _ in chain(*rows))
    done = {}
    times = [[] for _ in rows]
    waiting = [list(row) for row in rows]
    clock = [0] * len(rows)
    while any(waiting):
        moved = False
        for rank, row in enumerate(waiting):
            while row:
                kind, stage, m = row[0]
                needs = inputs_of(row[0], last)
                if any(need not in done for need in needs):
                    break
                start = max([clock[rank], *(done[need] for need in needs)])
                clock[rank] = start + cost(kind, stage)
                times[rank].append((start, clock[rank], *row.pop(0)))
                if kind == "I":  # the stage before can go on
                    kind = "B"
                done[kind, stage, m] = clock[rank]
                moved = True
        assert moved, f"the schedule waits for itself: {[row[:1] for row in waiting]}"
    return times


def duration(times: list[list[tuple]]) -> float:
    return max(row[-1][1] for row in times)


def bubble(times: list[list[tuple]]) -> float:
    """Share of the ranks' time spent waiting."""
    busy = sum(end - start for start, end, *_ in chain(*times))
    return 1 - busy / (len(times) * duration(times))


def in_flight(row: list[tuple], ids: list[int], step: Counter) -> int:
    """Most bytes of activations on a rank with the stages `ids`, which keeps them from forward to
    the end of backward."""
    now = most = 0
    for kind, stage, _ in row:
        now += {"F": 1, "I": 0}.get(kind, -1) * step["activations", ids.index(stage)]
        most = max(most, now)
    return most
