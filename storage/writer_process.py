"""The process that writes checkpoints while training goes on. Only runs with --checkpoint_async
process load this file."""

import os
import signal
import threading
from concurrent.futures import ProcessPoolExecutor

import torch

from storage.dcp import import_dcp


def writer_process() -> ProcessPoolExecutor:
    """A process for write_apart(), so that serialising does not take Python's lock from the
    training loop. The process has no process group. Tensors arrive through shared memory."""
    # spawn, because a fork would copy CUDA and locks held by other threads
    pool = ProcessPoolExecutor(1, torch.multiprocessing.get_context("spawn"), begin_writing)
    pool.submit(int)  # starts the process now
    return pool


def begin_writing() -> None:
    """The start of the writer process: it completes a save when launchers signal all processes, and
    ends with its parent."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()
    import_dcp()


def end_with_parent() -> None:
    parent = torch.multiprocessing.parent_process()
    assert parent is not None  # this is the writer process
    parent.join()
    os._exit(1)
