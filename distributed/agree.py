"""Errors and answers that all ranks share: if one rank fails, all ranks fail with the same reason."""

import math
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flags.files import printable


class Failed(ValueError):
    """Raised on every rank when a rank has failed, with the first reason."""


def reason(error: BaseException) -> str:
    """An error as one line. Of DCP's CheckpointException, with an error per rank: the first error."""
    if type(error).__name__ == "CheckpointException":  # by its name: the import takes a while
        rank, (inner, _) = next(iter(error.failures.items()))
        if rank:
            return f"rank {rank}: {reason(inner)}"
        return reason(inner)
    text = printable(" ".join(str(error).split()))
    if "unexpected pos" in text:  # how torch.save reports a write that came up short
        return "a file could not be written to its end: the disk is full, or a quota or file size limit is reached"
    if text and isinstance(error, ValueError | OSError):
        return text
    if isinstance(error, MemoryError):  # Python says no more
        return "no memory is left"
    return f"{type(error).__name__}: {text}"


def divisors(*numbers: int) -> str:
    """ "1, 2 or 4": the common divisors of the numbers (up to 4,096), for error messages."""
    g = math.gcd(*numbers)
    found = [str(d) for d in range(1, min(g, 4096) + 1) if g % d == 0]
    return " or ".join(", ".join(found).rsplit(", ", 1))


def brief(names: list[str]) -> str:
    """The first three names, and the number of the others."""
    return printable(", ".join(names[:3])) + f" and {len(names) - 3} more" * (len(names) > 3)


def rank_in(group: dist.ProcessGroup | None) -> int:
    if group:
        return dist.get_rank(group)
    return 0


def gather(value: Any, group: dist.ProcessGroup | None) -> list:
    """The values of all ranks of the group, on all ranks. Costs every rank time and memory for all
    values: for starts, not for steps or saves. group: None if the process is alone."""
    if not group:
        return [value]
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def attempt(work: Callable[..., Any], *args: Any) -> tuple:
    """(result of work(*args), None), or (None, the reason why work failed)."""
    try:
        return work(*args), None
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "CheckpointException":
            # Ctrl-C. DCP's CheckpointException is no Exception either, but counts as an error
            raise
        return None, reason(error)


def fail_together(work: Callable[[], Any], group: dist.ProcessGroup | None) -> Any:
    """Return work() on each rank; raise Failed on all ranks if work fails on any rank. Otherwise a
    failing rank would leave, and its peers would wait in the next collective. The ranks exchange
    one number, and texts only after a failure."""
    result, error = attempt(work)
    if holds_on_any_rank(error is not None, group):
        for rank, text in enumerate(gather(error, group)):
            if text is not None and rank > 0:
                raise Failed(f"rank {rank}: {text}")
            if text is not None:
                raise Failed(text)
    return result


def holds_on_any_rank(condition: bool, group: dist.ProcessGroup | None) -> bool:
    """Whether the condition holds on any rank."""
    flag = torch.tensor(int(condition))
    if group:
        dist.all_reduce(flag, dist.ReduceOp.MAX, group)
    return bool(flag)


def scatter(values: list, group: dist.ProcessGroup | None) -> Any:
    """Entry r of rank 0's list, on rank r."""
    if not group:
        return values[0]
    box = [None]
    dist.scatter_object_list(box, values or None, group=group, group_src=0)
    return box[0]


def gather_on_rank_0(value: Any, group: dist.ProcessGroup | None) -> list | None:
    """The values of all ranks, on rank 0; None on the others."""
    if not group:
        return [value]
    values = None
    if rank_in(group) == 0:
        values = [None] * dist.get_world_size(group)
    dist.gather_object(value, values, group=group, group_dst=0)
    return values


def on_rank_0(work: Callable[..., Any], group: dist.ProcessGroup | None, value: Any = None) -> Any:
    """Run work() on rank 0 and return the result on all ranks; raise Failed on all ranks if work
    fails.

    value: of each rank; work then takes the list of all ranks' values, and no other rank holds the
    list.
    """
    arguments = ()
    if value is not None:
        arguments = (gather_on_rank_0(value, group),)
    box = [None]
    if rank_in(group) == 0:
        box = [attempt(work, *arguments)]
    if group:
        dist.broadcast_object_list(box, group_src=0, group=group)  # along a tree
    result, error = box[0]
    if error is not None:
        raise Failed(error)
    return result


def new_gloo_group(name: str) -> dist.ProcessGroup:
    """A process group of all ranks, for messages about files."""
    start = dist.group.WORLD._get_backend(torch.device("cpu")).options._timeout  # --init_timeout_s
    group = dist.new_group(backend="gloo", timeout=start, group_desc=name)
    gather(None, group)  # a rank that died during the start is noticed now
    # 30 minutes, because ranks wait for the slowest disk. The death of a rank is noticed at once
    # all the same.
    dist.distributed_c10d._set_pg_timeout(timedelta(minutes=30), group)
    return group
