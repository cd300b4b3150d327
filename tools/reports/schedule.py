"""The pipeline's schedule: the order of each rank's work, the duration, and the time spent waiting."""

from collections import Counter

from distributed.pipeline import ONE_STAGE_PER_RANK, csv_rows

LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
DOES = {
    "F": "forward",
    "B": "backward",
    "I": "backward of the inputs",
    "W": "backward of the weights",
}


def rows_of(cfg, pp: int, n: int, n_stages: int) -> list[list[tuple[str, int, int]]]:
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
            ahead = n if cfg.pp_schedule == "GPipe" else min(n, pp - rank)
            row = [("F", rank, m) for m in range(ahead)]
            for m in range(n):
                row += [("B", rank, m)] + [("F", rank, ahead + m)] * (ahead + m < n)
            rows.append(row)
        return rows
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    rows = []
    for ops in get_schedule_ops(cfg.pp_schedule, pp, n, n_stages // pp):
        flat = [a for op in ops if op is not None for a in (op.sub_actions or (op,))]
        rows.append(
            [
                (LETTERS.get(a.computation_type.name), a.stage_index, a.microbatch_index)
                for a in flat
            ]
        )
        rows[-1] = [a for a in rows[-1] if a[0]]  # not REDUCE_GRAD
    return rows


def simulate(rows, cost=lambda kind, stage: 2 if kind == "B" else 1) -> list[list[tuple]]:
    """Per rank (start, end, kind, stage, micro-batch): an action starts after the previous action
    of the row and after its inputs."""
    last = max(stage for row in rows for _, stage, _ in row)
    done = {}
    times = [[] for _ in rows]
    waiting = [list(row) for row in rows]
    clock = [0] * len(rows)
    while any(waiting):
        moved = False
        for rank, row in enumerate(waiting):
            while row:
                kind, stage, m = row[0]
                backward = [("F", stage, m)] + [("B", stage + 1, m)] * (stage < last)
                needs = {"F": [("F", stage - 1, m)] if stage else [], "W": [("B", stage, m)]}.get(
                    kind, backward
                )
                if any(need not in done for need in needs):
                    break
                start = max([clock[rank], *(done[need] for need in needs)])
                clock[rank] = start + cost(kind, stage)
                times[rank].append((start, clock[rank], *row.pop(0)))
                done["B" if kind == "I" else kind, stage, m] = clock[rank]
                moved = True
        assert moved, f"the schedule waits for itself: {[row[:1] for row in waiting]}"
    return times


def duration(times) -> float:
    return max(row[-1][1] for row in times)


def bubble(times) -> float:
    """Share of the ranks' time spent waiting."""
    return 1 - sum(e - s for row in times for s, e, *_ in row) / (len(times) * duration(times))


def in_flight(row, ids: list[int], step: Counter) -> int:
    """Most bytes of activations on a rank with the stages `ids`, which keeps them from forward to
    the end of backward."""
    now = most = 0
    for kind, stage, _ in row:
        now += {"F": 1, "I": 0}.get(kind, -1) * step["activations", ids.index(stage)]
        most = max(most, now)
    return most
