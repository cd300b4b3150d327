"""When one rank fails, all fail with the same reason; what rank 0 finds out, all know."""
from datetime import timedelta

import torch.distributed as dist


class Failed(ValueError):
    """Something failed on some rank: raised on every rank, with the first reason."""


def reason(error: BaseException) -> str:
    """An error as one line. DCP's CheckpointException holds one error per rank: then it is the first of those."""
    for rank, (inner, _) in getattr(error, "failures", {}).items():
        return (f"rank {rank}: " if rank else "") + reason(inner)
    text = " ".join(str(error).split())
    if "unexpected pos" in text:  # how torch.save reports a write that came up short
        return "a file could not be written to its end: the disk is full, or a quota or file size limit is reached"
    return text if text and isinstance(error, ValueError | OSError) else f"{type(error).__name__}: {text}"


def some(names: list[str]) -> str:
    """The first three, and how many more there are."""
    return ", ".join(names[:3]) + f" and {len(names) - 3} more" * (len(names) > 3)


def rank_in(group) -> int:
    return dist.get_rank(group) if group else 0


def gather(value, group) -> list:
    """The values of all ranks of the group; group None: this process is alone."""
    values = [value] * (dist.get_world_size(group) if group else 1)
    if group:
        dist.all_gather_object(values, value, group=group)
    return values


def everywhere(work, group):
    """What work() returns on this rank; raises Failed on all ranks if it fails on any. Without this, a rank that fails would
    leave, and its peers would wait for it in the next collective."""
    result, error = None, None
    try:
        result = work()
    except BaseException as caught:
        if not isinstance(caught, Exception) and type(caught).__name__ != "CheckpointException":
            raise  # Ctrl-C. DCP's CheckpointException is no Exception either, but it is an error like any other
        error = reason(caught)
    for rank, failed in enumerate(gather(error, group)):
        if failed is not None:
            raise Failed(f"rank {rank}: {failed}" if rank else failed)
    return result


def on_rank_0(work, group):
    """What work() returns on rank 0, on all ranks; Failed on all when it fails."""
    return gather(everywhere(lambda: work() if rank_in(group) == 0 else None, group), group)[0]


def new_gloo_group(name: str):
    """A process group of all ranks, for what they tell each other about files."""
    # 30 minutes, because ranks wait here for the slowest disk. A rank that has died is noticed at once all the same.
    return dist.new_group(backend="gloo", timeout=timedelta(minutes=30), group_desc=name)
