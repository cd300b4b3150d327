"""What a program asks of the device, on a device that has only zeros to say. All else that runs is
the recipe's own code.

Each name that is replaced here must exist: replace() fails otherwise, so that nothing is left
unanswered in silence.
"""

import ctypes
import dataclasses
import importlib
import json
import os
import runpy
import sys
import types

import torch
import torch.distributed as dist


def replace(owner, name: str, make):
    """owner.name = make(what it was)"""
    setattr(owner, name, make(getattr(owner, name)))


def around(owner, name: str, before=None, after=None):
    """owner.name calls before() ahead of what it was, and after() behind it, both with its
    arguments."""

    def make(known):
        def called(*args, **kwargs):
            if before:
                before(*args, **kwargs)
            result = known(*args, **kwargs)
            if after:
                after(*args, **kwargs)
            return result

        return called

    replace(owner, name, make)


def always(value):
    """make for replace: a function that returns this."""
    return lambda known: lambda *args, **kwargs: value


class Log:
    """Lines of our own in the null device's log, and its end on the disk."""

    library = ctypes.CDLL(None)

    @classmethod
    def mark(cls, text: str):
        cls.library.nullcuda_mark(text.encode())

    @classmethod
    def flush(cls, status: int):
        cls.library.nullcuda_flush()


def answer() -> None:
    """Before the recipe is imported: it takes some of these names with it."""
    from torch.distributed.pipelining.schedules import _PipelineSchedule

    import distributed.checks
    import models.moe
    import rl.decoding
    import rl.rollouts

    replace(distributed.checks, "check_first_batch", always(None))  # how many tokens have a loss: 0
    around(os, "_exit", before=Log.flush)

    # A sampled token is read from the device, as 0, which ends a text. So every token is 1, with a
    # log-probability of -1.
    def read(known):
        def answered(copies, arrived):
            known(copies, arrived)
            return [1] * len(copies[0]), [-1.0] * len(copies[0])

        return answered

    replace(rl.decoding, "read", read)
    around(
        rl.rollouts,
        "sample_groups",
        before=lambda *args: Log.mark(f"generator on {torch.cuda.current_device()}"),
    )

    # How many rows travel between ranks that share the experts: as many from each to each. The
    # tensors that ask are the rows per part and rank, (2, parts, ep), and the rows per expert,
    # (E,).
    rows = [0]

    def count(known):
        def counted(self, index):
            rows[0] = index.numel()
            return known(self, index)

        return counted

    def tolist(known):
        def answered(self):
            values = known(self)
            if self.is_cuda and self.dtype == torch.int64 and self.dim() in (1, 3):
                if self.dim() == 3:
                    n = self[0].numel()
                else:
                    n = len(self)
                even = torch.tensor([rows[0] // n + (i < rows[0] % n) for i in range(n)])
                if self.dim() == 1:
                    return even.tolist()
                return [known(even.view(self.shape[1:]))] * len(self)
            # forks/once_per_rank.py: (rows, rows, copies) of each rank
            if self.is_cuda and self.dim() == 2 and len(self) == 3:
                return [[rows[0] // self.shape[1] // n] * self.shape[1] for n in (2, 2, 1)]
            return values

        return answered

    replace(models.moe.Balance, "count", count)
    # of a part, maybe none
    around(models.moe, "kernel_fits", before=lambda x, weight: rows.__setitem__(0, len(x)))
    replace(torch.Tensor, "tolist", tolist)

    # torch's pipelines vote whether the shapes are given (1) or must be found out. They are given;
    # the votes travel anyway.
    def warmup(known):
        def voted(*args):
            item = torch.Tensor.item
            torch.Tensor.item = lambda self: 1
            try:
                return known(*args)
            finally:
                torch.Tensor.item = item

        return voted

    if hasattr(_PipelineSchedule, "_warmup_p2p"):  # torch 2.11 has no vote
        replace(_PipelineSchedule, "_warmup_p2p", warmup)


# cuDNN plans its attention on a real device. So of these two only the shapes are computed; choosing
# it remains torch's code.
LIBRARIES = []  # a torch.library.Library ends with the last reference to it


def cudnn_attention() -> None:
    from torch._meta_registrations import alloc_with_matching_layout

    forward = torch.ops.aten._scaled_dot_product_cudnn_attention
    backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
    library = torch.library.Library("aten", "IMPL")

    def attend(
        q,
        k,
        v,
        attn_bias,
        compute_log_sumexp,
        dropout_p=0.0,
        is_causal=False,
        return_debug_mask=False,
        *,
        scale=None,
    ):
        Log.mark("kernel cudnn_attention")
        B, H, T, _ = q.shape
        out = alloc_with_matching_layout(q, (B, H, T, v.shape[-1]))
        seed = torch.empty((), dtype=torch.int64, device=q.device)
        lse = q.new_empty((B, H, T, 1) if compute_log_sumexp else (0,), dtype=torch.float32)
        return out, lse, None, None, T, k.shape[2], seed, torch.empty_like(seed), None

    def attend_backward(grad, q, k, v, *rest, **kwargs):
        Log.mark("kernel cudnn_attention_backward")
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    library.impl(forward.default.name(), attend, "CUDA")
    library.impl(backward.default.name(), attend_backward, "CUDA")
    LIBRARIES.append(library)


# --------------------------------------------- real sizes: one process of a world that is not there
def fake_world(world_size: int, module) -> None:
    """The recipe is rank 0 of a world whose other processes are not there: NCCL's stand-in waits
    for nobody, and on the host a fake process group returns at once. Without checkpoints, and
    without what ranks tell each other on the host."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401, registers the backend

    import distributed.launch
    import distributed.launcher

    def connect(layout, cfg, *args, **kwargs):
        os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        torch.cuda.set_device(0)
        dist.init_process_group(
            "cpu:fake,cuda:nccl", rank=0, world_size=world_size, store=dist.HashStore()
        )
        return dataclasses.replace(
            layout,
            device=torch.device("cuda", 0),
            compute_dtype=distributed.launch.dtype_of_compute(cfg, True),
            memory=torch.cuda.get_device_properties(0).total_memory,
        )

    replace(dist.distributed_c10d, "_store_based_barrier", always(None))

    # made_from: no code, no commit
    no_checkpoints = types.SimpleNamespace(
        made_from={}, load=lambda: None, close=lambda **kwargs: None
    )
    os.environ.update(
        RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE="1",
        MASTER_ADDR="localhost",
        MASTER_PORT="29500",
    )
    replace(module, "connect", lambda known: connect)
    replace(module, "Checkpoints", always(no_checkpoints))
    replace(module, "check_replicas", always([]))
    replace(module, "set_timeouts", always(None))
    replace(distributed.launcher, "watch_launcher", always(None))


def empty_weights() -> None:
    """Not a number is drawn: billions of them on the host would take minutes, and the device does
    not keep them."""
    import parallel

    def init_weights(stage, layout, *rest):
        stage.to_empty(device="cpu" if layout.offload else layout.device)

    parallel.init_weights = init_weights


# ---------------------------------------------------------------- what a step is made of
PARTS = ("forward_backward", "clip_grad_norm")


def mark_parts(module, memory: bool) -> None:
    """Lines in the log: "mark step 3" .. "mark end 3" around a step (from its batch to its
    optimizer), around its parts "mark forward_backward" .. "mark /forward_backward", and "mark
    report 3" where the host is about to ask how it went. memory: print the allocator's state after
    each part."""
    import parallel
    from training.metrics import Metrics
    from training.optim import Guard

    def state(name):
        if memory:
            gib = {
                kind: getattr(torch.cuda, kind)() / 2**30
                for kind in (
                    "memory_allocated",
                    "max_memory_allocated",
                    "memory_reserved",
                    "max_memory_reserved",
                )
            }
            print(
                f"memory after {name}: "
                + " ".join(f"{kind}={value:.3f}" for kind, value in gib.items()),
                flush=True,
            )

    def start(name):
        return lambda *args: Log.mark(name)

    def end(name):
        return lambda *args: (Log.mark(f"/{name}"), state(name))

    def end_step(self, tokens):
        Log.mark(f"end {self.step}")
        state(f"step {self.step}")

    for name in PARTS:
        owner = module if hasattr(module, name) else parallel  # grpo.py has a step of its own
        around(owner, name, before=start(name), after=end(name))
    around(Metrics, "start_step", before=lambda self, batches: Log.mark(f"step {self.step + 1}"))
    around(Metrics, "end_step", after=end_step)
    around(Guard, "report", before=lambda self, step: Log.mark(f"report {step}"))


def forbid_waiting() -> None:
    """From the second step on torch raises where the host waits for the device, until the step's
    report, which does."""
    from training.metrics import Metrics
    from training.optim import Guard

    def start_step(self, batches):
        if self.step > 0:
            torch.cuda.set_sync_debug_mode("error")

    around(Metrics, "start_step", before=start_step)
    around(Guard, "report", before=lambda self, step: torch.cuda.set_sync_debug_mode("default"))


def report_compiles() -> None:
    """Print after each step "compiles {...}": graphs so far, the most versions of one function, why
    a graph was broken."""
    from torch._dynamo.convert_frame import FRAME_COMPILE_COUNTER
    from torch._dynamo.utils import counters

    from training.metrics import Metrics

    def end_step(self, tokens):
        versions = max(FRAME_COMPILE_COUNTER.values(), default=0)
        found = dict(
            step=self.step,
            graphs=counters["stats"]["unique_graphs"],
            versions=versions,
            breaks=list(counters["graph_break"]),
        )
        print("compiles", json.dumps(found), flush=True)

    around(Metrics, "end_step", after=end_step)


def program(argv: list[str], options: dict):
    """Runs a recipe, `argv` its file and its flags, and ends this process with its status. options:
    those of run.py."""
    answer()
    cudnn_attention()
    if change := options.get("change"):
        runpy.run_path("benchmarks/changed.py")["CHANGES"][change]()
    file = os.path.abspath(argv[0])
    folder, name = os.path.split(file.removesuffix(".py"))
    if os.path.basename(folder) == "forks":
        name = f"forks.{name}"
    sys.argv[:] = [file, *argv[1:]]
    module = importlib.import_module(name)
    if options.get("world"):
        fake_world(options["world"], module)
    if options.get("world") or options.get("empty_weights"):
        empty_weights()
    # it asks in every step whether the norm is finite: of a tensor on the host it learns that 0 is
    if name == "grpo":
        replace(module, "clip_grad_norm", lambda known: lambda *args: known(*args).cpu())

        # it divides by them
        def of_one_token(known):
            return lambda *args: dataclasses.replace(known(*args), tokens=1)

        replace(module.agreement, "agreement_of", of_one_token)
    mark_parts(module, options.get("memory", False))
    if options.get("no_waiting"):
        forbid_waiting()
    if options.get("compiles"):
        report_compiles()
    from tools.run import run

    if name == "generate":  # one process, which nothing has to connect
        # whether all weights are finite: of a device that computes nothing it learns that none is
        replace(module, "check_weights", always(None))
        module.main(sys.argv[1:])
        os._exit(0)
    run(module.main, module.Config)
