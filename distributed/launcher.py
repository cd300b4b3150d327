"""What a process checks and watches that torchrun, srun or another launcher started. A plain
`python` does not load this file."""

import os
import socket
import subprocess
import threading
import time
import uuid

import torch.distributed as dist

from distributed.layout import Layout


def check_launcher() -> None:
    """Raises ValueError for a launcher's environment variables that are incomplete or wrong: such a
    process would wait for others without end, or train alone."""
    env = os.environ
    if "RANK" not in env:
        if "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS") or 1) > 1:
            raise ValueError(
                f"srun started {env['SLURM_NTASKS']} tasks, and each would train alone; set "
                "RANK=$SLURM_PROCID "
                "WORLD_SIZE=$SLURM_NTASKS LOCAL_RANK=$SLURM_LOCALID, MASTER_ADDR and MASTER_PORT "
                "in each task, or "
                "let srun start one torchrun per machine: docs/cluster.md; SLURM_NTASKS=1 trains "
                "alone"
            )
        if int(env.get("WORLD_SIZE") or 1) > 1:
            raise ValueError(
                f"WORLD_SIZE={env['WORLD_SIZE']}, but RANK is not set; start with torchrun, or "
                "set RANK, too"
            )
        return
    for name in (
        "RANK",
        "WORLD_SIZE",
        "MASTER_PORT",
        *sorted({"LOCAL_RANK", "LOCAL_WORLD_SIZE"} & env.keys()),
    ):
        if not env.get(name, "").isdigit():
            raise ValueError(
                f"{name}={env.get(name, '')!r} is no number; start with torchrun, or set RANK, "
                "WORLD_SIZE, "
                "MASTER_ADDR and MASTER_PORT"
            )
    if not env.get("MASTER_ADDR"):
        raise ValueError(
            "MASTER_ADDR is not set, and RANK is; set the address of rank 0's machine, or start "
            "with torchrun"
        )
    if int(env["RANK"]) >= int(env["WORLD_SIZE"]):
        raise ValueError(f"RANK={env['RANK']} must be below WORLD_SIZE={env['WORLD_SIZE']}")


def record_collectives(trace: str) -> None:
    """Let NCCL's flight recorder keep each rank's last 20,000 collectives. When a collective times
    out, every rank writes its own to the folder `trace`."""
    os.makedirs(trace, exist_ok=True)
    os.environ |= {
        "TORCH_FR_BUFFER_SIZE": "20000",
        "TORCH_FR_DUMP_TEMP_FILE": f"{trace}/rank_",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    }


def watch_launcher() -> None:
    """End the process when its launcher dies: workers of a torchrun killed by SIGKILL would go on
    writing checkpoints."""
    launcher = os.getppid()
    env = os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and env.get("GROUP_RANK") == "0":
        try:  # torchrun may have died during the import of torch: then its store does not answer
            socket.create_connection(
                (env["MASTER_ADDR"], int(env["MASTER_PORT"])), timeout=60
            ).close()
        except OSError as error:
            raise RuntimeError(f"torchrun, which started this process, is gone: {error}") from None

    def watch():
        while os.getppid() == launcher:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def agree_on_attempt(store: dist.Store, layout: Layout, timeout_s: int) -> str:
    """Agree on a new name for the attempt, as a prefix of all its keys in the store.

    torchrun keeps one store for all restarts, with the addresses of dead processes. Its restart
    count cannot be the name,
    because each node counts alone. So rank 0 makes up a name, every other rank makes up a key and
    stores the key, and rank 0 stores the name under each key found, until all ranks have read the
    name. A living process soon overwrites a dead one's key.
    """
    key = uuid.uuid4().hex  # rank 0: the name; others: the key to wait at
    if layout.rank > 0:
        store.set(f"rank {layout.rank}", key)
        name = store.get(key).decode()  # waits for rank 0
        store.add(f"{name} joined", 1)
        return name
    deadline = time.monotonic() + timeout_s
    while missing := layout.world_size - 1 - store.add(f"{key} joined", 0):
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"{missing} of {layout.world_size} processes did not come in {timeout_s} s"
            )
        for rank in range(1, layout.world_size):
            if store.check([f"rank {rank}"]):
                store.set(store.get(f"rank {rank}").decode(), key)
        time.sleep(0.02)
    return key


def repeat_after_torchrun(line: str) -> None:
    """Print a line once more when torchrun has ended: its own traceback, of many lines, comes after
    those of its processes. A small process waits for torchrun, a minute at most."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:  # another launcher, without a traceback
        return
    lives = 'grep -qs ") [^ZX]" /proc/$0/stat'  # torchrun's state: not a zombie
    wait = f"for i in $(seq 600); do {lives} || break; sleep 0.1; done"
    tell = f'{lives} || printf "%s\\n" "$1" >&2'
    subprocess.Popen(
        ["/bin/sh", "-c", f"{wait}; {tell}", str(os.getppid()), line],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # torchrun's signals do not reach it
    )
