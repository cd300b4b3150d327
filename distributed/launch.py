"""Start and end of processes: connect, stop together, report the exit status."""

import datetime
import os
import resource
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist

from distributed.layout import Layout, dtype_of_compute
from distributed.refusals import runs_on_cuda
from flags.config import own_rank
from flags.files import step_folders

# exit status of a run that a signal stopped before its last step (EX_TEMPFAIL: start again)
UNFINISHED = 75


@dataclass(kw_only=True)
class LaunchConfig:
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto = a GPU, else the CPU
    deterministic: bool = False  # bitwise reproducible kernels, slower on GPUs
    # a collective that waits longer before or in the first step ends the run
    init_timeout_s: int = 300
    # the same after the first step: everything is compiled and connected
    train_timeout_s: int = 100


def keep_freed_memory() -> None:
    """Let the C library keep the memory of freed tensors for the next ones. glibc returns each
    block above a limit to the system at once, and the system hands out zeroed pages anew: 36,000
    page faults and 15 % of a training step. The limit grows to the size of the largest freed block,
    32 MiB at most."""
    torch.empty(31 * 2**20, dtype=torch.uint8)  # never touched, so it costs no memory


def connect(
    layout: Layout, cfg: Any, device: str = "auto", seed: int = 0, trace: str = ""
) -> Layout:
    """Join the other processes: device, threads and the process group of all. Plain `python` is a
    world of one. Returns the layout with its device, the dtype of the computation there, and the
    memory of the smallest device.

    trace: folder for NCCL's last collectives, if one times out; torch's `torchfrtrace` reads the
    folder.
    """
    env = os.environ
    if cfg.deterministic:
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when CUDA starts
        torch.use_deterministic_algorithms(True)
    if runs_on_cuda(device):
        layout = replace(layout, device=own_gpu())
        if trace:
            from distributed.launcher import record_collectives  # only GPUs need the file

            record_collectives(trace)
    else:
        keep_freed_memory()
        if "OMP_NUM_THREADS" not in env:  # more threads than cores made a small run 15 times slower
            torch.set_num_threads(max(1, usable_cores() // int(env.get("LOCAL_WORLD_SIZE", 1))))
    layout = replace(layout, compute_dtype=dtype_of_compute(cfg, layout.device.type == "cuda"))
    torch.manual_seed(seed)

    # Before a connection a wait for other ranks, inside of C++, has no timeout
    patience = threading.Timer(cfg.init_timeout_s + 5, give_up, [cfg.init_timeout_s])
    patience.daemon = True
    patience.start()
    store = dist.HashStore()
    timeout = None
    if "RANK" in env:
        # with TORCHELASTIC_USE_AGENT_STORE torchrun's agent keeps the store; under other launchers
        # rank 0 keeps the store
        is_master = env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and layout.rank == 0
        timeout = datetime.timedelta(seconds=cfg.init_timeout_s)
        store = dist.TCPStore(
            env["MASTER_ADDR"],
            int(env["MASTER_PORT"]),
            layout.world_size,
            is_master,
            timeout=timeout,
        )
        from distributed.launcher import agree_on_attempt  # plain python needs no other process

        store = dist.PrefixStore(agree_on_attempt(store, layout, cfg.init_timeout_s), store)
    backend = "gloo"
    if layout.device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend, store=store, rank=layout.rank, world_size=layout.world_size, timeout=timeout
    )
    # for messages: see process_of()
    own = f"{socket.gethostname()} {os.getpid()}"
    dist.distributed_c10d._get_default_store().set(f"process {layout.rank}", own)
    patience.cancel()
    if layout.device.type == "cuda":
        # on the host: sent by gloo
        memory = torch.tensor(torch.cuda.get_device_properties(layout.device).total_memory)
        dist.all_reduce(memory, op=dist.ReduceOp.MIN)
        layout = replace(layout, memory=memory.item())
    return layout


def own_gpu() -> torch.device:
    """Make this process's GPU the current one: number LOCAL_RANK, or the only one that its
    scheduler lets it see."""
    index = 0
    if torch.cuda.device_count() > 1:
        index = int(os.environ.get("LOCAL_RANK", 0))
    device = torch.device("cuda", index)
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        # Freed neighbouring memory can then be joined, and does not lie idle in pieces too small
        # for use.
        # read at the first allocation
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    torch.cuda.set_device(device)
    try:
        torch.empty(1, device=device)
    except RuntimeError:  # a sandbox or a virtual GPU, whose driver cannot map memory
        torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    return device


def allow_many_ranks() -> None:
    """Let gloo connect two ranks when they first exchange something: its full mesh has 2 sockets
    per rank in every rank. And raise the number of open files to what the system allows. All
    processes of a run must do the same."""
    os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def give_up(seconds: int) -> None:
    """End a process that could not join the others: a port may belong to a stranger, a peer may
    never start."""
    print(
        f"error on {name_rank()}: not connected to "
        f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')} within "
        f"--init_timeout_s {seconds}: is every process started, and the port free?",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def usable_cores() -> int:
    """Cores that this process may use: affinity, and a container's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
        return max(1, min(cores, -(-int(quota) // int(period))))
    except (OSError, ValueError):  # no control group of version 2, or "max"
        return cores


def set_timeouts(layout: Layout, timeout_s: int) -> None:
    """Set the timeout of all collectives: torch gives the groups of a mesh 30 minutes.
    checkpoint.py's group keeps its own, because ranks wait for the slowest disk."""
    groups = [None]
    for mesh in (layout.mesh, layout.full_mesh, layout.expert_mesh):
        if mesh is not None:
            groups += mesh.get_all_groups()
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=timeout_s), group)


def tell(line: str) -> None:
    """Print a line from a signal's handler, where print() may not be used: the signal may have come
    inside of print()."""
    with suppress(OSError):  # nobody reads any more
        os.write(2, f"\n{line}\n".encode())


class StopSignal:
    """SIGTERM, SIGINT or SIGUSR1: finish the step, save, exit. Another Ctrl-C more than two seconds
    later exits at once. Rank 0 answers each at once. cfg: a recipe's whole Config; without it the
    signals are only recorded."""

    def __init__(self, cfg: Any = None):
        self.cfg = cfg
        self.answers = cfg is not None and own_rank() == 0
        # grpo.py's warm-up does not
        self.saves = cfg is not None and cfg.checkpoint_every > 0 and not cfg.load_only
        self.received = ""
        self.at = 0.0
        self.asked = None
        self.ended = 0.0  # when the last step ended; 0: none has
        self.seconds = 0.0  # of the last step
        self.ranks = 1  # that stop together; known after the first step
        for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(s, self.handle)

    def handle(self, number, frame):
        # launchers may deliver a single Ctrl-C or scancel twice at nearly the same time
        if number == signal.SIGINT and self.received and time.monotonic() - self.at > 2:
            if self.answers:
                tell(f"Ctrl-C again: the run ends now; {self.newest()}")
            os._exit(130)
        if not self.received:
            self.received = signal.Signals(number).name
            self.at = time.monotonic()
            if self.answers:
                tell(self.plan())

    def plan(self) -> str:
        """What the first signal does, how long it takes, and what a second Ctrl-C would cost."""
        steps = "this step"
        seconds = self.seconds
        if self.ranks > 1:  # agreed() knows a step later
            steps = "the next step"
            seconds *= 2
        if seconds >= 1:
            steps += f" (about {seconds:.0f} s)"
        then = "without a save"
        if self.saves:
            then = "and a save"
        return (
            f"{self.received}: the run ends after {steps} {then}; Ctrl-C again, 2 s later or more, "
            f"ends it now, and {self.newest()}"
        )

    def newest(self) -> str:
        """What is left if the run ends now."""
        with suppress(OSError):
            for step, _ in step_folders(self.cfg.out):
                return f"the last checkpoint is step {step}"
        return "there is no checkpoint"

    def agreed(self, layout: Layout) -> bool:
        """True on every rank at the same step if any rank was signalled before the last call.
        Signals reach the ranks at different moments; a rank that stopped one step earlier would
        leave the others waiting for it."""
        now = time.monotonic()
        if self.ended:  # the first step also has the time of its start
            self.seconds = now - self.ended
        self.ended = now
        self.ranks = layout.world_size
        if layout.world_size == 1:
            return bool(self.received)
        # on the host, so that no device waits
        before = self.asked
        flag = torch.tensor(int(bool(self.received)))
        self.asked = flag, dist.all_reduce(flag, op=dist.ReduceOp.MAX, async_op=True)
        if before is None:
            return False
        before[1].wait()  # the answer of the step before has come while this step was computed
        return bool(before[0])

    def agreed_now(self, layout: Layout) -> bool:
        """The same, and waits for the answer: after a save or a validation, which take so long that
        a signal may well have come meanwhile."""
        if layout.world_size == 1:
            return bool(self.received)
        flag = torch.tensor(int(bool(self.received)))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag)

    def report(self, step: int, layout: Layout) -> int:
        """Rank 0 says where the run stopped. Returns the exit status of an unfinished run."""
        if layout.rank == 0:
            line = f"{self.received or 'a signal to another rank'}: stopped after step {step}"
            print(line, flush=True)
            if self.received and layout.world_size > 1:
                from distributed.launcher import repeat_after_torchrun

                repeat_after_torchrun(line)
        return UNFINISHED


def name_rank() -> str:
    return f"rank {own_rank()}" + f" ({socket.gethostname()})" * (
        int(os.environ.get("WORLD_SIZE", 1)) > 1
    )


def process_of(rank: int) -> tuple[str, int]:
    """(machine, pid) of a rank, which connect() has told."""
    told = dist.distributed_c10d._get_default_store().get(f"process {rank}").decode()
    host, _, pid = told.rpartition(" ")
    return host, int(pid)


def host_of(rank: int) -> str:
    """The machine of a rank."""
    return process_of(rank)[0]


def is_gone(rank: int) -> bool:
    """Whether the process of a rank of this machine has ended."""
    host, pid = process_of(rank)
    if host != socket.gethostname():
        return False
    try:
        with open(f"/proc/{pid}/stat") as file:  # "123 (python) Z ...": ended, not yet asked for
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except OSError:  # none such, or a system without /proc
        return os.path.exists("/proc/self/stat")


def disconnect() -> None:
    """Leave together: a rank that ends early makes its peers fail in their last messages."""
    dist.barrier()
    # the first connects its pairs, with addresses from the store, which may end with rank 0
    dist.barrier()
    dist.destroy_process_group()
