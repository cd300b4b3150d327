"""Errors and answers that all ranks share: if one rank fails, all ranks fail with the same reason."""
from datetime import timedelta

import torch.distributed as dist


class Failed(ValueError):
    """Raised on every rank when a rank has failed, with the first reason."""


def reason(error: BaseException) -> str:
    """An error as one line. Of DCP's CheckpointException, with an error per rank: the first error."""
    for rank, (inner, _) in getattr(error, "failures", {}).items():
        return (f"rank {rank}: " if rank else "") + reason(inner)
    text = " ".join(str(error).split())
    if "unexpected pos" in text:  # how torch.save reports a write that came up short
        return "a file could not be written to its end: the disk is full, or a quota or file size limit is reached"
    return text if text and isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"


def brief(names: list[str]) -> str:
    """The first three names, and the number of the others."""
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)


def rank_in(group) -> int:
    return dist.get_rank(group) if group else 0


def gather(value, group) -> list:
    """The values of all ranks of the group. group: None if the process is alone."""
    values = [value] * (dist.get_world_size(group) if group else 1)
    if group:
        dist.all_gather_object(values, value, group=group)
    return values


def fail_together(work, group):
    """Return work() on each rank; raise Failed on all ranks if work fails on any rank. Otherwise a failing rank would leave,
    and its peers would wait in the next collective."""
    result, error = None, None
    try:
        result = work()
    except BaseException as caught:
        if not isinstance(caught, Exception) and type(caught).__name__ != "CheckpointException":
            raise  # Ctrl-C. DCP's CheckpointException is no Exception either, but counts as an error
        error = reason(caught)
    for rank, failed in enumerate(gather(error, group)):
        if failed is not None:
            raise Failed(f"rank {rank}: {failed}" if rank else failed)
    return result


def on_rank_0(work, group):
    """Run work() on rank 0 and return its result on all ranks; raise Failed on all ranks if work fails."""
    result = [fail_together(lambda: work() if rank_in(group) == 0 else None, group)]
    if group:
        dist.broadcast_object_list(result, group=group, group_src=0)
    return result[0]


def new_gloo_group(name: str):
    """A process group of all ranks, for messages about files."""
    # 30 minutes, because ranks wait for the slowest disk. The death of a rank is noticed at once all the same.
    return dist.new_group(backend="gloo", timeout=timedelta(minutes=30), group_desc=name)
