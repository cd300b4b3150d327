"""What a layout does, before it is trusted with a real run, or before the machines for it are rented.

--dry_run       the recipe's own parallelisation code under a fake process group of any size, on tensors without memory:
                bytes, collectives, FLOPs and the pipeline's bubble, per pipeline rank
--explain       the same for one block, parameter by parameter and collective by collective
--plot          the pipeline's schedule as a picture
--check_parity  three real steps on one process and on the layout, compared
"""
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import weakref
from collections import Counter
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

import parallel
from parallel import local_tensor


# ---------------------------------------------------------------- watching a step, op by op

OPS = {
    "_allgather_base_": "all_gather", "all_gather_into_tensor": "all_gather", "allgather_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce", "all_reduce": "all_reduce",
    "alltoall_base_": "all_to_all", "all_to_all_single": "all_to_all",
    "send": "send", "recv_": "recv",
}


def sdpa_flops(out, q, k, v, *rest, **kwargs) -> int:
    return 4 * q.shape[:3].numel() * k.shape[2] * q.shape[3]  # q k^T, and the probabilities times v; the mask saves nothing


FLOPS = {
    "_scaled_dot_product_flash_attention_for_cpu": sdpa_flops,
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda out, grad, *qkv, **kwargs: 2 * sdpa_flops(out, *qkv),
    # (N, in) x (E, in, out), or for the weights' gradient (in, N) x (N, out)
    "_grouped_mm": lambda out, x, w, *rest, **kwargs: 2 * x.numel() * w.shape[-1],
}


class Watch(TorchDispatchMode):
    """What runs inside the context, on real tensors or on fake ones:

    moved: {(phase, axis, op, bytes of the largest tensor involved): how often}
    flops: {phase: FLOPs of matmuls and attention}; phases are forward, backward, recompute
    live, peak: bytes of tensors made inside that are alive now, and at the worst moment
    """

    def __init__(self, layout):
        super().__init__()
        self.moved, self.flops, self.live, self.peak, self.sizes = Counter(), Counter(), 0, 0, {}
        self.axes = {dist.group.WORLD.group_name: "world"}
        meshes = [m for m in (layout.experts, layout.axes, layout.mesh) if m is not None]
        for mesh in meshes:  # an axis that spans all ranks has the world's group, and its name here
            self.axes |= {mesh.get_group(axis).group_name: axis for axis in mesh.mesh_dim_names if mesh[axis].size() > 1}

    def __enter__(self):
        resize = torch.UntypedStorage.resize_  # how FSDP frees a block's weights, and takes the memory again

        def counted(storage, size):
            if storage._cdata in self.sizes:
                self.change(storage._cdata, size)
            return resize(storage, size)

        self.patch = mock.patch.object(torch.UntypedStorage, "resize_", counted)
        self.patch.start()
        return super().__enter__()

    def __exit__(self, *error):
        self.patch.stop()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it dispatches again, with plain tensors and its collectives
        kwargs = kwargs or {}
        out = self.run(func, *args, **kwargs)
        name = func._opname
        inside = [t for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)]
        known = {t.untyped_storage()._cdata for t in inside}
        for t in tree_iter(out):
            if isinstance(t, torch.Tensor) and (key := (storage := t.untyped_storage())._cdata) not in known | self.sizes.keys():
                self.change(key, storage.nbytes())
                weakref.finalize(storage, self.change, key, None)
        if name in FLOPS:
            self.flops[phase()] += FLOPS[name](out, *args, **kwargs)
        elif func._overloadpacket in flop_registry:
            self.flops[phase()] += flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        if func.namespace in ("c10d", "_c10d_functional") and name in OPS:
            flat = [*tree_iter((args, kwargs)), *tree_iter(out)]
            group = next((a for a in reversed(flat) if isinstance(a, str) and a in self.axes), None)
            if group is None:
                objects = (a for a in flat if isinstance(a, torch.ScriptObject))
                group = next(dist.ProcessGroup.unbox(a).group_name for a in objects if is_group(a))
            size = max(t.numel() * t.element_size() for t in flat if isinstance(t, torch.Tensor))
            self.moved[phase(), self.axes.get(group, group), OPS[name], size] += 1
        return out

    def run(self, func, *args, **kwargs):
        return func(*args, **kwargs)

    def change(self, key, size):
        """A storage now has this many bytes; None: it is gone."""
        self.live += (size or 0) - self.sizes.get(key, 0)
        self.peak = max(self.peak, self.live)
        if size is None:
            self.sizes.pop(key, None)
        else:
            self.sizes[key] = size

    @property
    def counts(self) -> dict:
        """{(axis, op): [number, bytes]}"""
        return totals(self.moved)


def totals(moved) -> dict:
    counts = {}
    for (_, axis, op, size), n in moved.items():
        entry = counts.setdefault((axis, op), [0, 0])
        entry[0] += n
        entry[1] += n * size
    return counts


def phase() -> str:
    if torch._C._current_graph_task_id() == -1:
        return "forward"
    return "recompute" if torch.is_grad_enabled() else "backward"


def is_group(obj) -> bool:
    try:
        return isinstance(dist.ProcessGroup.unbox(obj), dist.ProcessGroup)
    except RuntimeError:
        return False


class DryWatch(Watch):
    """Watch for fake tensors, with an answer where the program asks for a value. Experts are equally busy."""

    def __init__(self, layout):
        super().__init__(layout)
        self.rows, self.ep = 1, layout.cfg.ep

    def run(self, func, *args, **kwargs):
        if func is torch.ops.aten.bincount.default:  # tokens per expert
            self.rows = args[0].numel()
            return args[0].new_empty(args[2])
        if func is torch.ops.aten._local_scalar_dense.default:  # tokens to and from each rank that holds experts
            return self.rows // self.ep
        if func is torch.ops.aten.repeat_interleave.Tensor:  # the expert of each token
            return args[0].new_empty(self.rows)
        return func(*args, **kwargs)


# ---------------------------------------------------------------- building the recipe's model without devices


class Built(BaseException):
    """The recipe has its model and its optimizers: as far as a dry run goes."""


def build(main, cfg, connect, init_weights=None):
    """(stages, optimizers, layout) from the recipe's own main, run up to its checkpoints.

    Where main would touch data, disk or other processes it finds stand-ins; the rest of it is its own code and parallel.py's.
    """
    seen = []

    def stand_in_connect(layout, *args, **kwargs):
        connect(layout)
        seen.append(layout)

    def checkpoints(*args, modules, optimizer, **kwargs):
        raise Built(modules, optimizer)

    nothing = lambda *args, **kwargs: None  # noqa: E731
    data = SimpleNamespace(vocab_size=0, n_val_samples=1, n_samples=1, fingerprint={}, tokenizer_file=None)
    stand_ins = dict(open_data=lambda *args: data, check_run=nothing, lock_run=nothing, StopSignal=nothing,
                     connect=stand_in_connect, Checkpoints=checkpoints)
    if init_weights:
        stand_ins["init_weights"] = init_weights
    names = main.__globals__
    with mock.patch.dict(names, {name: value for name, value in stand_ins.items() if name in names}):
        try:
            main(cfg)
        except Built as built:
            stages, optimizers = built.args
            return stages, optimizers, seen[0]
    raise RuntimeError("main ended before it made its Checkpoints: a dry run needs them to know that the model is complete")


# What a dry run executes in place of a schedule, with 2 or 3 micro-batches: the same collectives, in a simpler order
SIMPLE_ORDER = {"1F1B": "GPipe", "Interleaved1F1B": "LoopedBFS", "InterleavedZeroBubble": "LoopedBFS", "DualPipeV": "ZBVZeroBubble"}


def dry_build(main, cfg, pp_rank: int, fake):
    """build() for the first device of a pipeline rank, in a world of fake processes and fake tensors."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    world_size = math.prod(max(1, getattr(cfg, axis)) for axis in parallel.AXES)
    rank = pp_rank * (world_size // max(1, cfg.pp))

    def connect(layout):
        # compiled or not, the same bytes travel; and the order of the micro-batches is simulated, not run
        order = cfg.pp_schedule if cfg.pp_schedule_csv else SIMPLE_ORDER.get(cfg.pp_schedule, cfg.pp_schedule)
        layout.cfg = replace(layout.cfg, compile=False, async_tp=False, pp_schedule=order)
        layout.compute_dtype = torch.float32 if cfg.compute_dtype == "float32" else torch.bfloat16
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        parallel.make_mesh(layout)

    def init_weights(stage, layout, seed):
        with fake:
            stage.to_empty(device="cpu")

    with mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(world_size)):
        return build(main, replace(cfg, dry_run=True), connect, init_weights)


@contextmanager
def dry_world():
    """What the code under a dry run finds different: no start-up handshakes, no masks that only CPU kernels need."""
    from torch.distributed.pipelining import schedules

    def local_slice(p, original=parallel.local_slice):
        with _disable_current_modes():  # computed with tensors whose values count
            return original(p)

    with ExitStack() as stack:
        for owner, name, value in [
            (parallel, "local_slice", local_slice),
            (parallel, "lower_right_mask", lambda T, S, device: None),  # CUDA's flash kernel has it built in
            (schedules._PipelineSchedule, "_warmup_p2p", lambda *args: None),
        ]:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        yield
        if dist.is_initialized():
            dist.destroy_process_group()


# ---------------------------------------------------------------- --check_parity

# fp32, three steps. Every mistake of tests/test_mutants.py is far above these; weights get more room than gradients because
# AdamW divides a gradient by its own size, so that the rounding of a tiny one moves a weight as far as a large one does.
LOSS_TOLERANCE, NORM_TOLERANCE, GRADIENT_TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 2e-5, 1e-4, 5e-4
STEPS = 3


def check_parity(cfg, degrees: dict[str, int]) -> int:
    """Train STEPS steps of the running recipe on one process and on the layout, in fp32; compare; return the exit status.

    Works for any copy of a recipe: it is started twice with flags appended, and parallel.clip_grad_norm, where a step's
    gradients are complete, writes them down (record_step there).
    """
    if "RANK" in os.environ:
        raise ValueError("--check_parity starts its own processes: run it with python, not torchrun")
    world_size = math.prod(max(n, 1) for n in degrees.values())
    data_ranks = max(degrees["dp_replicate"], 1) * max(degrees["dp_shard"], 1)
    batch = cfg.global_batch_size if cfg.global_batch_size != -1 else cfg.local_batch_size * data_ranks
    both = dict(check_parity=False, steps=STEPS, compute_dtype="float32", global_batch_size=batch, checkpoint_every=0,
                val_every=0, log_every=1, device="cuda" if torch.cuda.device_count() >= world_size else "cpu")
    one = dict.fromkeys(degrees, 1) | dict(ac="none", compile=False, cpu_offload=False)
    with tempfile.TemporaryDirectory() as folder:
        runs = {"one process": (1, both | one), "layout": (world_size, both | {a: max(n, 1) for a, n in degrees.items()})}
        for name, (processes, flags) in runs.items():
            out = os.path.join(folder, name.replace(" ", "_"))
            print(f"check_parity: {STEPS} steps on {name} ({processes} process{'es' * (processes > 1)}) ...", flush=True)
            launch = [sys.executable]
            if processes > 1:
                launch += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
            # a flag given twice has its last value
            extra = [f"--{k}={v}" for k, v in (flags | {"out": out}).items() if hasattr(cfg, k)]
            env = os.environ | {"NANOTITAN_RECORD": out + "_record"}
            done = subprocess.run([*launch, *sys.argv, *extra], env=env, capture_output=True, text=True)
            if done.returncode:
                lines = done.stderr.splitlines()
                reason = [line for line in lines if line.startswith("error")] or lines[-20:]
                print("\n".join(reason[:1] if reason[0].startswith("error: ") else reason), file=sys.stderr)
                return done.returncode if processes == 1 else 2 if reason[0].startswith("error: ") else 1
            runs[name] = read_records(out)
        return print_comparison(*runs.values())


def read_records(out: str) -> list[dict]:
    """Per step: loss, norm, tokens_hash, and gradients and weights by fqn, of all pipeline stages together."""
    with open(os.path.join(out, "metrics.jsonl")) as f:
        lines = [line for line in map(json.loads, f) if "loss" in line]
    steps = []
    for n, line in enumerate(lines):
        step = {"loss": line["loss"], "norm": line["grad_norm"], "hash": line["tokens_hash"], "gradient": {}, "weight": {}}
        for file in sorted(os.listdir(out + "_record")):
            if file.startswith(f"{n}-"):
                part = torch.load(os.path.join(out + "_record", file), weights_only=True, mmap=True)
                step["gradient"] |= part["gradient"]
                step["weight"] |= part["weight"]
        steps.append(step)
    return steps


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp(min=1e-12)).item()


def print_comparison(one: list[dict], layout: list[dict]) -> int:
    """The table; 0 when all is within tolerance, else 1 after a line that names the first difference."""
    first = ""
    head = ["loss, 1 process", "layout", "norm, 1 process", "layout"]
    print("step", *(f"{text:>16}" for text in head), " worst gradient / worst weight")
    for n, (a, b) in enumerate(zip(one, layout, strict=True), 1):
        problems, worst = [], {}
        if a["hash"] != b["hash"]:
            problems.append("the tokens of the global batch")
        for kind, tolerance in (("gradient", GRADIENT_TOLERANCE), ("weight", WEIGHT_TOLERANCE)):
            if missing := sorted(a[kind].keys() ^ b[kind].keys()):
                problems.append(f"the {kind} of {missing[0]}, which only one of the two has")
            errors = {fqn: relative(b[kind][fqn].float(), a[kind][fqn].float()) for fqn in a[kind] if fqn in b[kind]}
            worst[kind] = max(errors.items(), key=lambda item: item[1])
            problems += [f"the {kind} of {fqn} by {e:.1e} (relative)" for fqn, e in errors.items() if not e <= tolerance][:1]
        if not abs(a["loss"] - b["loss"]) <= LOSS_TOLERANCE * max(1.0, abs(a["loss"])):
            problems.append(f"the loss, {b['loss']} instead of {a['loss']}")
        if not abs(a["norm"] - b["norm"]) <= NORM_TOLERANCE * abs(a["norm"]):
            problems.append(f"the gradient norm, {b['norm']} instead of {a['norm']}")
        first = first or (problems and f"step {n} differs first in {problems[0]}") or ""
        notes = " / ".join(f"{e:.1e} {fqn}" for fqn, e in worst.values())
        print(f"{n:>4} {a['loss']:>16.8f} {b['loss']:>16.8f} {a['norm']:>16.8f} {b['norm']:>16.8f}  {notes}")
    print(f"check_parity: NOT EQUAL: {first}" if first else "check_parity: equal")
    return int(bool(first))
