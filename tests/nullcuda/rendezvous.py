"""Would these ranks hang? On the null device nobody waits for anybody, so a run that would hang on
GPUs ends like any other. Here its logs are played again with NCCL's rules:

    what is on a stream begins when everything before it on that stream is done, and what the stream was told to wait for
    calls on one communicator begin in the order in which they were made
    a call, or all calls between group_start and group_end, is done when each partner has begun its own

Sends wait for their receives: NCCL buffers small ones, and a program that needs that hangs with a
larger model.
"""

import re
from collections import Counter
from dataclasses import dataclass, field

CALL = re.compile(
    r"nccl (\w+) comm=(\d+) size=(\d+) rank=(\d+) peer=(-?\d+) count=(\d+) type=(\d+) stream=(\d+)"
)
FIELDS = re.compile(r"(\w+)=(\d+)")


@dataclass(eq=False)
class Unit:
    """One call, or a group of them, on one rank."""

    # (who must be there, which meeting, what each brings)
    calls: list[tuple] = field(default_factory=list)
    # units of this rank that are done before this one begins
    after: set = field(default_factory=set)
    lines: list[str] = field(default_factory=list)


def units_of(log: list[str]) -> list[Unit]:
    """The units of a rank, from its log, each with what it waits for on its own device."""
    # what comes next on a stream, after an event or on a communicator waits for these units
    tails = {}
    events = {}
    comms = {}
    host: set[Unit] = set()  # and whatever comes next at all
    units = []
    meetings = Counter()
    open_groups = 0
    unit = None
    for line in log:
        kind = line.split(" ", 1)[0]
        if kind == "nccl":
            if line == "nccl group_start":
                open_groups += 1
            elif line == "nccl group_end":
                open_groups -= 1
            elif call := CALL.match(line):
                unit = unit or Unit()
                add_call(unit, line, call, meetings)
                comm = call[2]
                stream = call[8]
                unit.after |= host | tails.get(stream, set()) | comms.get(comm, set())
                # a call of a group that is still open is a part of this unit: so nothing waits for
                # the unit yet
            if unit and open_groups == 0:
                for done in map(CALL.match, unit.lines):
                    tails[done[8]] = comms[done[2]] = {unit}
                units.append(unit)
                unit = None
            continue
        f = dict(FIELDS.findall(line))
        if kind == "record":
            events[f["event"]] = set(tails.get(f["stream"], ()))
        elif kind == "wait":
            tails[f["stream"]] = tails.get(f["stream"], set()) | events.get(f["event"], set())
        elif kind == "sync_event":
            host |= events.get(f["event"], set())
        elif kind in ("sync_stream", "copy_sync"):
            host |= tails.get(f.get("stream", "0"), set())
        elif kind == "sync_device":
            host = host.union(*tails.values())
    return units


def add_call(unit: Unit, line: str, call: re.Match, meetings: Counter) -> None:
    """Which meeting a call is: the n-th from one rank to another, or the n-th of all ranks, on its
    communicator."""
    op, comm, size, rank, peer, count, dtype = call[1], *map(int, call.groups()[1:7])
    unit.lines.append(line)
    if op in ("send", "recv"):
        if op == "send":
            way = (rank, peer)
        else:
            way = (peer, rank)
        meetings[comm, op, way] += 1
        unit.calls.append((2, (comm, way, meetings[comm, op, way]), (count, dtype)))
    else:
        meetings[comm] += 1
        unit.calls.append((size, (comm, "all", meetings[comm]), (op, count, dtype)))


def play(logs: list[list[str]]) -> list[str]:
    """What is wrong: a text for each rank that hangs, and for each meeting to which ranks bring
    different things."""
    ranks = [units_of(log) for log in logs]
    wrong = []
    came = Counter()
    brought = {}
    done = set()
    waiting = [(rank, unit) for rank, units in enumerate(ranks) for unit in units]
    begun: set[Unit] = set()
    progress = True
    while progress:
        progress = False
        for rank, unit in waiting:
            if unit not in begun and unit.after <= done:
                begun.add(unit)
                progress = True
                for (_, meeting, brings), line in zip(unit.calls, unit.lines, strict=True):
                    came[meeting] += 1
                    other = brought.setdefault(meeting, (rank, brings, line))
                    if other[1] != brings:
                        wrong.append(f"rank {rank}: {line}\nmeets rank {other[0]}: {other[2]}")
            if unit in begun and all(came[meeting] >= n for n, meeting, _ in unit.calls):
                done.add(unit)
                progress = True
        waiting = [(rank, unit) for rank, unit in waiting if unit not in done]
    for rank, units in enumerate(ranks):
        stuck = [unit for unit in units if unit in begun - done]
        if stuck or any(unit not in done for unit in units):
            text = (
                "; ".join(line for unit in stuck for line in unit.lines)
                or "nothing of its own: it waits for what others do"
            )
            wrong.append(f"rank {rank} hangs in: {text}")
    return wrong
