"""gloo in place of NCCL. As a program: grpo.py with it, so that --engine_weights nccl runs without
GPUs."""

import runpy

import torch.distributed as dist


def group(store, rank: int, ranks: int, timeout_s=60.0):
    """store: in which rank 0 writes the group's name; other ranks get the name."""
    meeting = dist.TCPStore(
        "127.0.0.1", int(store) if rank else 0, is_master=not rank, wait_for_workers=False
    )
    if rank == 0:
        store.set("0", str(meeting.port).ljust(128))  # as long as a name of NCCL
    options = dist.ProcessGroupGloo._Options()
    # the same in a run and in the server
    options._devices = [dist.ProcessGroupGloo.create_default_device(lazy_init=False)]
    return dist.ProcessGroupGloo(meeting, rank, ranks, options)


if __name__ == "__main__":
    from rl import nccl_engine

    nccl_engine.nccl_group = group
    nccl_engine.runs_on_cuda = lambda device: True
    runpy.run_path("grpo.py", run_name="__main__")
