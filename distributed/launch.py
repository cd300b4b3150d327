"""Processes: how they start together, stop together, and tell how they ended."""
import datetime
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from distributed.checks import STYLES
from distributed.layout import Layout, dtype_of_compute, pattern_of
from distributed.refusals import runs_on_cuda
from models import attention
from support.config import GPU, Need, flag, usage_error

NCCL = Need("without NCCL, so without GPUs", lambda c: c.on_cuda)
# There is a choice of kernels for bf16 only, and the masks of documents and of gathered keys have one kernel each.
KERNELS = [GPU, Need("in float32", lambda c: c.dtype != torch.float32),
           Need("with --cp_method allgather", lambda c: c.cp == 1 or c.cp_method != "allgather"),
           Need("with --doc_mask", lambda c: not getattr(c, "doc_mask", False))]


@dataclass(kw_only=True)
class LaunchConfig:
    attention: Literal["auto", "flash", "cudnn"] = flag("auto", *KERNELS)  # kernel; auto: both race, on this run's shapes
    deterministic: bool = False  # bitwise reproducible kernels, slower on GPUs
    flight_recorder: bool = flag(False, NCCL)  # when a collective times out, every rank writes its last ones to <out>/trace
    init_timeout_s: int = 300  # a collective that waits longer before or in the first step ends the run
    train_timeout_s: int = 100  # the same after the first step: everything is compiled and connected


def connect(layout: Layout, device: str = "auto", seed: int = 0, trace: str = "trace") -> None:
    """Join the other processes: device, threads and the process group of all. Plain `python` is a world of one.

    trace: folder of --flight_recorder, to be read with torch's `torchfrtrace`.
    """
    cfg, env = layout.cfg, os.environ
    for report in ("dry_run", "plan", "explain", "check_parity"):
        if getattr(cfg, report, False):  # a report connects to nobody
            raise ValueError(f"--{report} reports in place of training, but this program would train: end it with "
                             "run(with_reports(main), parse_config(Config)), see support/reports.py")
    local_rank, local_world = int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1))
    if cfg.deterministic:
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when CUDA starts
        torch.use_deterministic_algorithms(True)
    if runs_on_cuda(device):
        layout.device = torch.device("cuda", local_rank)
        if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & env.keys():
            # Freed memory can then grow together with its neighbours, and does not lie idle because its pieces are too small.
            env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # read at the first allocation
        torch.cuda.set_device(layout.device)
        backend = "cpu:gloo,cuda:nccl"
    else:
        backend = "gloo"
        if "OMP_NUM_THREADS" not in env:  # more threads than cores made a small run 15 times slower
            torch.set_num_threads(max(1, (os.cpu_count() or 1) // local_world))
    layout.compute_dtype = dtype_of_compute(cfg, layout.device.type == "cuda")
    torch.manual_seed(seed)

    if cfg.flight_recorder:
        os.makedirs(trace, exist_ok=True)
        env |= {"TORCH_NCCL_TRACE_BUFFER_SIZE": "20000", "TORCH_FR_BUFFER_SIZE": "20000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
        env |= {"TORCH_NCCL_DEBUG_INFO_TEMP_FILE": f"{trace}/rank_", "TORCH_FR_DUMP_TEMP_FILE": f"{trace}/rank_"}
    if "RANK" in env:
        # torchrun's agent keeps the store and says so in this variable; other launchers leave that to rank 0
        is_master = env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and layout.rank == 0
        timeout = datetime.timedelta(seconds=cfg.init_timeout_s)
        store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), layout.world_size, is_master, timeout=timeout)
        store = dist.PrefixStore(agree_on_attempt(store, layout), store)
    else:
        timeout, store = None, dist.HashStore()
    dist.init_process_group(backend, store=store, rank=layout.rank, world_size=layout.world_size, timeout=timeout)
    if layout.device.type == "cuda":
        memory = torch.tensor(torch.cuda.get_device_properties(layout.device).total_memory)  # on the host: sent by gloo
        dist.all_reduce(memory, op=dist.ReduceOp.MIN)
        layout.memory = memory.item()


def choose_attention(layout: Layout, config, seq_len: int, local_batch_size: int) -> None:
    """On GPUs, let the faster of flash and cuDNN attention come first, forward and backward measured on this run's shapes. What
    it cannot compute, as flash the masks of grouped queries in rollouts, goes to the other one, not to the slow plain kernel.

    There is no choice in fp32, which neither of them computes, and with --cp_method allgather, whose masks only flash takes.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    cfg, choice = layout.cfg, layout.cfg.attention
    if layout.device.type != "cuda" or layout.compute_dtype == torch.float32 or layout.cp > 1 and cfg.cp_method == "allgather":
        return
    if choice == "auto":
        B, heads = cfg.pp_microbatch_size if layout.pp > 1 else local_batch_size, layout.tp * layout.cp
        widths = config.head_dim, config.head_dim, getattr(config, "v_head_dim", config.head_dim)
        q, k, v = (torch.randn(B, max(1, n // heads), seq_len, width, device=layout.device, dtype=layout.compute_dtype,
                               requires_grad=True)
                   for n, width in zip((config.n_heads, config.n_kv_heads, config.n_kv_heads), widths, strict=True))
        times = torch.full((2,), math.inf, device=layout.device)
        for i, backend in enumerate((SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            attention.flash_is_first = backend == SDPBackend.FLASH_ATTENTION
            try:
                for step in range(6):
                    if step == 3:  # the first ones warm up
                        begin.record()
                    with sdpa_kernel(backend):
                        attention.sdpa(q, k, v, is_causal=True).sum().backward()
                end.record()
                end.synchronize()
                times[i] = begin.elapsed_time(end) / 3
            except RuntimeError:  # no such kernel for these shapes, or in this build
                pass
        dist.all_reduce(times)  # one choice for all ranks
        flash, cudnn = (times / layout.world_size).tolist()
        if not min(flash, cudnn) < math.inf:
            attention.flash_is_first = True
            return
        choice = "flash" if flash <= cudnn else "cudnn"
        if layout.rank == 0:
            print(f"attention: flash {flash:.2f} ms, cuDNN {cudnn:.2f} ms per layer, forward and backward: {choice}")
    attention.flash_is_first = choice == "flash"
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION][:: 1 if attention.flash_is_first else -1]
    x = torch.empty(1, 1, 1, 8, device=layout.device, dtype=layout.compute_dtype)
    torch._fused_sdp_choice(x, x, x)  # the first time that torch is asked, it sets an order of its own
    torch._C._set_sdp_priority_order([int(kind) for kind in (*order, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH)])
    # the compiler has a cache on disk that does not know of this order: it would hand out blocks made for the other kernel
    torch.compiler.config.cache_key_tag += f" attention {choice}"


def agree_on_attempt(store: dist.Store, layout: Layout) -> str:
    """A name for this attempt that all its processes know, and that no earlier attempt had: it goes before their keys.

    torchrun keeps one store for all restarts, in which the addresses of dead processes still stand. Its restart count cannot
    be the name, because each node has a count of its own. So rank 0 makes up a name, every other rank makes up a key and
    writes it down, and rank 0 stores the name under each key that it finds, until all ranks have read it. A key that a dead
    process left behind is soon overwritten by the living one.
    """
    mine = uuid.uuid4().hex  # rank 0: the name; others: the key under which they wait for it
    if layout.rank > 0:
        store.set(f"rank {layout.rank}", mine)
        name = store.get(mine).decode()  # waits until it is there
        store.add(f"{name} joined", 1)
        return name
    deadline = time.monotonic() + layout.cfg.init_timeout_s
    while missing := layout.world_size - 1 - store.add(f"{mine} joined", 0):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{missing} of {layout.world_size} processes did not come in {layout.cfg.init_timeout_s} s")
        for rank in range(1, layout.world_size):
            if store.check([f"rank {rank}"]):
                store.set(store.get(f"rank {rank}").decode(), mine)
        time.sleep(0.02)
    return mine


def watch_launcher() -> None:
    """End this process when its launcher dies: torchrun killed by SIGKILL leaves workers that go on writing checkpoints."""
    launcher, env = os.getppid(), os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and env.get("GROUP_RANK") == "0":
        try:  # torchrun may have died while we were importing torch: then nobody answers at its store
            socket.create_connection((env["MASTER_ADDR"], int(env["MASTER_PORT"])), timeout=60).close()
        except OSError as error:
            raise RuntimeError(f"torchrun, which started this process, is gone: {error}") from None

    def watch():
        while os.getppid() == launcher:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def train_timeouts(layout: Layout) -> None:
    """After the first step everything is compiled and connected, so a collective that hangs is noticed after a shorter time.
    The group of checkpoint.py keeps its long one: there, ranks wait for the slowest disk."""
    for group in [None, *layout.mesh.get_all_groups(), *layout.full_mesh.get_all_groups()]:
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=layout.cfg.train_timeout_s), group)


class StopSignal:
    """SIGTERM, SIGINT or SIGUSR1: finish the step, save, exit. Another Ctrl-C more than two seconds later exits at once."""

    def __init__(self):
        self.received, self.at = "", 0.0
        for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(s, self.handle)

    def handle(self, number, frame):
        # launchers may deliver one Ctrl-C or one scancel twice at nearly the same time: that does not mean "at once"
        if number == signal.SIGINT and self.received and time.monotonic() - self.at > 2:
            os._exit(130)
        if not self.received:
            self.received, self.at = signal.Signals(number).name, time.monotonic()

    def agreed(self, layout: Layout) -> bool:
        """True on every rank at the same step if any rank was signalled. Signals reach the ranks at different moments; a rank
        that stopped one step earlier would leave the others waiting for it."""
        if layout.world_size == 1:
            return bool(self.received)
        flag = torch.tensor([int(bool(self.received))])  # on the host, so that no device waits for it
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


def run(main, cfg) -> None:
    """Run main(cfg) and end the process with the status that tells what happened: 0 done, 2 wrong usage, 1 failure."""
    status = 0
    try:
        if "RANK" in os.environ:
            watch_launcher()
        main(cfg)
    except BaseException as error:  # CheckpointException and KeyboardInterrupt are no Exceptions
        status = report(error)
    if status == 0 and dist.is_initialized():
        disconnect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # gloo's threads abort now and then in a normal exit, and torchrun would count that as a failure


def report(error: BaseException) -> int:
    """Print what ended main, and return the exit status.

    A ValueError before the processes are connected is the user's, shown in one line by rank 0; later it is a failure.
    """
    rank, message, is_known = int(os.environ.get("RANK", 0)), " ".join(str(error).split()), isinstance(error, ValueError)
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    if isinstance(error, KeyboardInterrupt):  # before the loop, so there is no step to finish
        return 130
    if is_known and not dist.is_initialized():
        usage_error(message)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun then shows the first failure, not just its status
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    if not is_known:
        traceback.print_exception(error)
    if rank == 0 or not is_known:  # every rank raises the same ValueError
        print(f"error on rank {rank}: {type(error).__name__}: {message}{failed_module(error)}", file=sys.stderr)
    return 1


def failed_module(error: BaseException) -> str:
    """" (in blocks.0.attn.wq, a Linear)": the innermost module of the model that was running when the error came up, or ""."""
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]
    names = {module: fqn for fqn, module in modules[0].named_modules()} if modules else {}
    inside = [module for module in modules if names.get(module)]
    if not inside:
        return ""
    fqn = names[inside[-1]]
    hint = f'; under tp "{pattern_of(fqn)}" needs a style in tp_plan: {STYLES}' if "Tensor and DTensor" in str(error) else ""
    return f" (in {fqn}, a {type(inside[-1]).__name__.removeprefix('FSDP')}){hint}"


def disconnect() -> None:
    """Leave together: a rank that ends while another still talks to it makes that one fail."""
    dist.barrier()
    dist.destroy_process_group()
