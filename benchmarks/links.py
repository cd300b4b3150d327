"""Bandwidth between the devices of one machine, by what axes send: all-gather, reduce-scatter,
all-reduce, all-to-all, send.

    torchrun --standalone --nproc_per_node 8 benchmarks/links.py
    torchrun --standalone --nproc_per_node 2 benchmarks/links.py --mib 1 --device cpu       # gloo: shows that it runs

For each way to put tp neighbours together, and dp across them: one row per axis. All groups of an
axis talk at once, as in a training step. GB/s: bytes x (n - 1) / n, twice that for an all-reduce,
over the time of the slowest rank.
"""

import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

# in benchmarks/ are files of the same names as the modules imported here
sys.path[0] = str(Path(__file__).parent.parent)

import torch
import torch.distributed as dist

from distributed.layout import all_gather_single, reduce_scatter_single
from flags.config import check_range
from tools.run import run


@dataclass(kw_only=True)
class Config:
    mib: int = 256  # size of the tensor that a group shares, in bfloat16
    repeats: int = 10  # timed calls, after three that are not
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto = a GPU if there is one

    def __post_init__(self):
        check_range(self, 1, float("inf"), "mib", "repeats")


def calls(group, cfg: Config, device) -> dict:
    """name -> (call, bytes that a link carries). The whole tensor has cfg.mib, each rank of the
    group 1/n of it."""
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    share = torch.zeros(cfg.mib * 2**19 // n, dtype=torch.bfloat16, device=device)
    whole = torch.zeros(share.numel() * n, dtype=torch.bfloat16, device=device)
    other, size = torch.zeros_like(whole), 2 * whole.numel()

    def send():
        ops = [
            dist.P2POp(dist.isend, share, group=group, group_peer=(rank + 1) % n),
            dist.P2POp(dist.irecv, whole[: share.numel()], group=group, group_peer=(rank - 1) % n),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()

    return {
        "all-gather": (lambda: all_gather_single(whole, share, group=group), size * (n - 1) / n),
        "reduce-scatter": (
            lambda: reduce_scatter_single(share, whole, group=group),
            size * (n - 1) / n,
        ),
        "all-reduce": (lambda: dist.all_reduce(whole, group=group), 2 * size * (n - 1) / n),
        "all-to-all": (
            lambda: dist.all_to_all_single(other, whole, group=group),
            size * (n - 1) / n,
        ),
        "send to the next": (send, size / n),
    }


def gigabytes_per_second(call, size: float, cfg: Config, device) -> float:
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = torch.zeros(3 + cfg.repeats, dtype=torch.float64)
    for i in range(len(times)):
        wait()
        dist.barrier()
        began = time.perf_counter()
        call()
        wait()
        times[i] = time.perf_counter() - began
    dist.all_reduce(times, op=dist.ReduceOp.MAX)  # on the host
    return size / statistics.median(times[3:].tolist()) / 1e9


def main(cfg: Config):
    if int(os.environ.get("WORLD_SIZE", 1)) < 2:
        raise ValueError(
            "links need two processes or more: torchrun --standalone --nproc_per_node 2 "
            "benchmarks/links.py"
        )
    device = torch.device("cpu")
    if cfg.device == "cuda" or cfg.device == "auto" and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    world = dist.get_world_size()
    rank = dist.get_rank()
    if rank == 0:
        print(
            f"{cfg.mib} MiB in bfloat16 over {world} x {device.type}, median of {cfg.repeats}, GB/s"
        )
        print(
            "| axis | " + " | ".join(calls(dist.group.WORLD, cfg, device)) + " |\n|" + " --- |" * 6
        )
    for tp in (n for n in range(2, world + 1) if world % n == 0 and n & (n - 1) == 0 or n == world):
        mesh = dist.init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("dp", "tp"))
        for axis, n in (("tp", tp), ("dp", world // tp)):
            if n > 1:
                work = calls(mesh[axis].get_group(), cfg, device).values()
                timed = [gigabytes_per_second(call, size, cfg, device) for call, size in work]
                if rank == 0:
                    where = "neighbours" if axis == "tp" else f"every {tp}th"
                    print(
                        f"| {n} {where} | " + " | ".join(f"{speed:,.3g}" for speed in timed) + " |",
                        flush=True,
                    )
    dist.destroy_process_group()


if __name__ == "__main__":
    run(main, Config)
