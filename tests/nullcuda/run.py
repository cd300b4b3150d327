"""Runs a recipe on the null device: torch's CUDA build without a GPU. With the python of an
environment that has that build:

    python tests/nullcuda/run.py train_llama3.py --compile --steps 2 --out runs/null
    python tests/nullcuda/run.py --nproc 2 --log runs/log train_llama3.py --tp 2 --steps 2 --out runs/null   # two processes
    python tests/nullcuda/run.py --world 64 --gib 80 --memory train_llama3.py --flavor 70B --tp 8 ...        # rank 0 of 64

Losses are 0, times mean nothing. Real are dispatch, shapes, dtypes, the compiler, the allocator,
streams, the order of calls.
"""

import argparse
import importlib
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).parent.parent.parent
sys.path[:0] = [str(REPO), str(REPO / "tests/nullcuda"), str(REPO / "tests")]

from build import environment  # noqa: E402
from programs import fork_ranks, serve, wait_for  # noqa: E402

NOT_OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--serve", default="", help="run the cases that come in at this socket, see run_case()"
    )
    p.add_argument("--nproc", type=int, default=1, help="processes")
    p.add_argument(
        "--world",
        type=int,
        default=0,
        help="be rank 0 of so many fake processes, with weights that are not drawn",
    )
    p.add_argument("--empty_weights", action="store_true", help="do not draw the initial weights")
    p.add_argument(
        "--memory",
        action="store_true",
        help="print the allocator's state after each part of a step",
    )
    p.add_argument(
        "--no_waiting",
        action="store_true",
        help="fail where the host waits for the device, from step 2 on",
    )
    p.add_argument(
        "--compiles", action="store_true", help="print after each step how much has been compiled"
    )
    p.add_argument("--log", default="", help="each process writes what happens to LOG.RANK")
    p.add_argument("--gib", type=float, default=80, help="memory of a device")
    p.add_argument(
        "--major", type=int, default=9, help="compute capability: 9 Hopper, 10 Blackwell"
    )
    p.add_argument("--devices", type=int, default=8, help="number of devices")
    p.add_argument(
        "--timeout", type=float, default=600, help="seconds after which the processes are killed"
    )
    p.add_argument("argv", nargs=argparse.REMAINDER, help="the recipe and its flags")
    return p


def variables(options: dict) -> dict[str, str]:
    """Environment of a case."""
    kinds = {
        "NULLCUDA_GIB": "gib",
        "NULLCUDA_MAJOR": "major",
        "NULLCUDA_DEVICES": "devices",
        "NULLCUDA_LOG": "log",
    }
    return {
        name: str(options[key]) for name, key in kinds.items() if options.get(key)
    } | options.get("env", {})


def fork_case(options: dict, output) -> list[int]:
    """Starts the processes of a case; output(rank): the file for what it prints, None: as this
    process. Returns their ids."""

    def run_rank(rank, variables_of_rank) -> int:
        if file := output(rank):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 1)
            os.dup2(1, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for name in NOT_OURS:
            os.environ.pop(name, None)
        os.environ.update(variables(options) | variables_of_rank)
        from answers import program

        program(options["argv"], options)
        return 1  # it ends the process

    return fork_ranks(options.get("nproc", 1), run_rank)


def preload() -> None:
    """Import once what every case needs. Nothing may touch the device here: a process that has
    cannot be forked."""
    import faulthandler

    import torch
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.pipelining
    import torch.distributed.tensor.parallel

    for name in (
        "checkpoint",
        "data",
        "generate",
        "parallel",
        "training.optim",
        "tools.reports.options",
    ):
        importlib.import_module(name)

    faulthandler.enable()
    assert not torch.cuda.is_initialized()


def run_case(**options):
    """Answer to a request {"argv": [...], "nproc": 1, ... as the options above, "env": {...}}:
    {"statuses": [per rank], "texts": [what each rank printed], "seconds": ...}."""
    # a TemporaryDirectory would be removed at the end of each fork
    began = time.monotonic()
    folder = tempfile.mkdtemp()
    pids = fork_case(options, lambda rank: f"{folder}/{rank}")
    statuses = wait_for(pids, options.get("timeout", 600))
    texts = [Path(folder, str(rank)).read_text(errors="replace") for rank in range(len(pids))]
    shutil.rmtree(folder)
    yield dict(statuses=statuses, texts=texts, seconds=time.monotonic() - began)


def main():
    args = parser().parse_args()
    needed = environment()
    if os.environ.get("LD_PRELOAD") != needed["LD_PRELOAD"]:
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | needed)
    if args.serve:
        preload()
        return serve(args.serve, run_case)
    if not args.argv:
        parser().error("which recipe?")
    preload()
    sys.exit(max(map(abs, wait_for(fork_case(vars(args), lambda rank: None), args.timeout))))


if __name__ == "__main__":
    main()
