"""A pool of gloo workers, kept for the whole test session: starting processes costs seconds, a
layout costs tenths.

    results = pool(4).run(function, arg, ...)     # one result per rank; the function runs on every rank

The function must be importable (top level of a test module). A failure on any rank kills the pool,
because gloo cannot be used after a mismatch; the next call starts a new one. A function whose worker
has died without an error runs again, once: crashes.py reports it, and fails a session that has more
than two.
"""

import atexit
import os
import queue
import tempfile
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.distributed_c10d import ProcessGroupGloo

# A server that has imported torch forks the workers, and the processes that tests kill: each starts
# seconds earlier. (This process cannot be forked, because its autograd threads would be missing in
# the copy.)
forkserver = mp.get_context("forkserver")
forkserver.set_forkserver_preload(
    [
        f"torch.distributed.{name}"
        for name in ("checkpoint", "fsdp", "tensor.parallel", "pipelining")
    ]
    + ["pytest", "layouts", "grpo", "transformers.models.llama.modeling_llama"]
)

CRASHED = []  # names of functions that ran again; crashes.py takes them out after each test
TIMEOUT_S = 600  # a deadlock ends; a machine that is busy with other things does not fail a test


class SharedLoop(ProcessGroupGloo):
    """Gloo groups that share one device. Each device has a thread that wakes every 10 ms; a pool
    that kept those of all the layouts it ran had hundreds, and they took the CPU."""

    device = None

    def __init__(self, store, rank, world_size, timeout):
        SharedLoop.device = SharedLoop.device or ProcessGroupGloo.create_default_device()
        options = ProcessGroupGloo._Options()
        options._devices = [SharedLoop.device]
        options._timeout = timeout
        super().__init__(store, rank, world_size, options)


def worker(rank, world_size, store_file, tasks, results):
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world_size),
    )
    # of a test that called connect(); groups on a shared device would hang
    os.environ.pop("TORCH_GLOO_LAZY_INIT", None)
    torch.set_num_threads(1)
    dist.distributed_c10d.ProcessGroupGloo = SharedLoop
    store = dist.FileStore(store_file, world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=300)
    )
    while (task := tasks.get()) is not None:
        function, args = task
        try:
            results.put((rank, None, function(*args)))
        except BaseException:
            results.put((rank, traceback.format_exc(), None))


class Pool:
    def __init__(self, world_size: int):
        self.world_size, self.results = world_size, forkserver.Queue()
        self.tasks = [forkserver.Queue() for _ in range(world_size)]
        store = tempfile.mktemp()
        self.workers = [
            forkserver.Process(
                target=worker, args=(rank, world_size, store, tasks, self.results), daemon=True
            )
            for rank, tasks in enumerate(self.tasks)
        ]
        for w in self.workers:
            w.start()

    def run(self, function, *args, tries: int = 2) -> list:
        for tasks in self.tasks:
            tasks.put((function, args))
        out = {}
        deadline = time.monotonic() + TIMEOUT_S
        while len(out) < self.world_size:
            error = None
            rank = "?"
            try:
                rank, error, out[rank] = self.results.get(timeout=1)
            except queue.Empty:
                if time.monotonic() > deadline:
                    error = f"no answer within {TIMEOUT_S} s"
            # after an error a little patience: a rank hears of a peer's end before the system has
            # told us
            wait([w.sentinel for w in self.workers], timeout=0.5 if error else 0)
            died = [w.exitcode for w in self.workers if not w.is_alive()]
            if error or died:
                self.close()
                # a thread of gloo's crashes once in thousands of runs, in the middle of anything
                if died and tries > 1:
                    CRASHED.append(f"{function.__name__} ({died})")
                    return pool(self.world_size).run(function, *args, tries=tries - 1)
                raise RuntimeError(
                    f"{function.__name__}{args} failed on rank {rank} of "
                    f"{self.world_size}:\n{error or died}"
                )
        return [out[rank] for rank in range(self.world_size)]

    def close(self):
        if POOLS.get(self.world_size) is self:
            del POOLS[self.world_size]
        for w in self.workers:
            w.kill()


POOLS = {}  # number of workers -> the pool; those of other sizes go on when one is closed


def pool(world_size: int) -> Pool:
    if world_size not in POOLS:
        POOLS[world_size] = Pool(world_size)
        atexit.register(POOLS[world_size].close)
    return POOLS[world_size]
