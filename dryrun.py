"""What a layout does, before it is trusted with a real run, or before the machines for it are rented.

--dry_run       the recipe's own parallelisation code under a fake process group of any size, on tensors without memory:
                bytes, collectives, FLOPs and the pipeline's bubble, per pipeline rank
--explain       the same for one block, parameter by parameter and collective by collective
--plan          tokens per second and MFU on a named machine, predicted from the same numbers
--plot          the mesh and the pipeline's schedule as pictures
--check_parity  three real steps on one process and on the layout, compared
"""
import importlib.util
import math
import os
import re
import subprocess
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

import optim
import parallel
from config import FROM_FILE, no_effect, spell, unmet_needs
from metrics import peak_flops, read_lines
from models.loss import CHUNK_ELEMENTS
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


def unwatched(function):
    """The function, on tensors whose values count and whom nobody counts."""

    def run(*args):
        with _disable_current_modes():
            return function(*args)

    return run


class Watch(TorchDispatchMode):
    """What runs inside the context, on real tensors or on fake ones:

    moved: {(phase, axis, op, bytes of the largest tensor involved): how often}
    flops: {phase: FLOPs of matmuls and attention}; phases are forward, backward, recompute, update; of these, "attention"
    live, peak: bytes of tensors made inside that are alive now, and at the worst moment
    """

    def __init__(self, layout=None):
        super().__init__()
        self.moved, self.flops, self.live, self.peak, self.sizes = Counter(), Counter(), 0, 0, {}
        self.outside = "forward"  # phase of what runs while autograd does not: forward, backward (of a pipeline), update
        self.axes = {}  # name of a process group -> the axes that it serves: one that spans all ranks has the world's group
        for mesh in [m for m in layout and (layout.experts, layout.axes, layout.mesh) or () if m is not None]:
            for axis in mesh.mesh_dim_names:
                self.axes.setdefault(mesh.get_group(axis).group_name, []).extend([axis] * (mesh[axis].size() > 1))
        if layout and layout.world_size > 1 and not self.axes.get(world := dist.group.WORLD.group_name):
            self.axes[world] = ["world"]

    def __enter__(self):
        resize = torch.UntypedStorage.resize_  # how FSDP frees a block's weights, and takes the memory again

        def counted(storage, size):
            if storage._cdata in self.sizes:
                self.change(storage._cdata, size)
            return resize(storage, size)

        self.patches = ExitStack()
        self.patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", counted))
        # DTensor finds shapes by running operations on whole tensors: that is not what this device does
        shapes = "_propagate_tensor_meta_non_cached"
        unseen = unwatched(getattr(ShardingPropagator, shapes))
        self.patches.enter_context(mock.patch.object(ShardingPropagator, shapes, unseen))
        return super().__enter__()

    def __exit__(self, *error):
        self.patches.close()
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
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                if (key := storage._cdata) not in known and key not in self.sizes:
                    self.change(key, storage.nbytes())
                    weakref.finalize(storage, self.change, key, None)
        flops = 0
        if name in FLOPS:
            flops = FLOPS[name](out, *args, **kwargs)
        elif func._overloadpacket in flop_registry:
            flops = flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
        self.flops[self.phase()] += flops
        self.flops["attention"] += flops * ("attention" in name)
        if func.namespace in ("c10d", "_c10d_functional") and name in OPS:
            flat = [*tree_iter((args, kwargs)), *tree_iter(out)]
            group = next((a for a in reversed(flat) if isinstance(a, str) and a in self.axes), None)
            if group is None:
                objects = (a for a in flat if isinstance(a, torch.ScriptObject))
                group = next((dist.ProcessGroup.unbox(a).group_name for a in objects if is_group(a)), None)
            axes = self.axes.get(group, [group])
            if axes:  # nothing travels in a group of one
                if len(axes) > 1 and OPS[name] != "all_reduce":  # axes over the same ranks: whose is it?
                    fsdp = called_by_fsdp()
                    axes = [a for a in axes if (a in ("dp_replicate", "dp_shard", "fsdp", "efsdp")) == fsdp] or axes
                size = max(t.numel() * t.element_size() for t in flat if isinstance(t, torch.Tensor))
                self.moved[self.phase(), axes[-1], OPS[name], size] += 1
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

    def phase(self) -> str:
        if torch._C._current_graph_task_id() == -1:
            return self.outside
        return "recompute" if torch.is_grad_enabled() else "backward"

    def mark(self) -> int:
        """The peak since the last mark."""
        peak, self.peak = self.peak, self.live
        return peak


def totals(moved) -> dict:
    """{(axis, op): [number, bytes]}"""
    counts = {}
    for (_, axis, op, size), n in moved.items():
        entry = counts.setdefault((axis, op), [0, 0])
        entry[0] += n
        entry[1] += n * size
    return counts


def called_by_fsdp() -> bool:
    frame = sys._getframe()
    while frame is not None and "_fully_shard" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


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
        if func is torch.ops.aten.scatter_add_.default and args[0].dtype == torch.int64:  # models.moe.Balance.count
            self.rows = args[2].numel()
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.int64:
            return self.rows // self.ep  # tokens to and from each rank that holds experts
        if func is torch.ops.aten.repeat_interleave.Tensor:  # the expert of each token
            return args[0].new_empty(self.rows)
        if func is torch.ops.aten._grouped_mm.default:  # torch's own shape rule wants bf16
            x, w, experts = args[0], args[1], kwargs.get("offs", args[2] if len(args) > 2 else None)
            return x.new_empty((x.shape[0], w.shape[-1]) if w.dim() == 3 else (len(experts), x.shape[0], w.shape[1]))
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
    data = SimpleNamespace(
        vocab_size=0, n_val_samples=1, fingerprint={}, tokenizer_file=None)
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


# What a dry run executes in place of a schedule, with 1 or 2 micro-batches: the same collectives, in a simpler order
SIMPLE_ORDER = {"1F1B": "GPipe", "DualPipeV": "ZBVZeroBubble"}


@contextmanager
def dry_world(main, cfg, pp_rank: int):
    """(stages, optimizers, layout) of a pipeline rank's first device, in a world of fake processes and fake tensors.

    What the code finds different there: no start-up handshakes, no masks that only CPU kernels need, no random numbers.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed.pipelining import schedules
    from torch.distributed.pipelining.stage import _PipelineStageBase
    from torch.testing._internal.distributed.fake_pg import FakeStore

    fake = FakeTensorMode(allow_non_fake_inputs=True)
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

    def shapes_are_given(schedule, pipeline_stages, *args):  # the result of a vote of all ranks, torch 2.13
        for stage in pipeline_stages:
            stage._inference_mode = sys.modules["torch.distributed.pipelining.stage"].InferenceMode.STATIC

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(world_size)))
        if cfg.device != "cpu":  # fake tensors say that they are on the CPU: chunks as large as on a GPU
            stack.enter_context(mock.patch.dict(CHUNK_ELEMENTS, cpu=CHUNK_ELEMENTS["cuda"]))
        for owner, name, value in [
            *[(module, "local_slice", unwatched(parallel.local_slice)) for module in (parallel, optim)],
            (DeviceMesh, "__getitem__", unwatched(DeviceMesh.__getitem__)),
            (parallel, "lower_right_mask", lambda T, S, device: None),  # CUDA's flash kernel has it built in
            (schedules._PipelineSchedule, "_warmup_p2p", shapes_are_given),
            (_PipelineStageBase, "_get_init_p2p_neighbors_ops", lambda stage: []),  # the handshake before torch 2.13
        ]:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        try:
            built = build(main, replace(cfg, dry_run=True), connect, init_weights)
            with fake:
                yield built
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            _clear_sharding_prop_cache()  # it holds this world's groups, and would find them in the next


# ---------------------------------------------------------------- one step, measured


def size_of(tensors) -> int:
    local = [local_tensor(t) for t in tensors if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in local)


def optimizer_state(optimizers) -> int:
    return size_of(t for optimizer in optimizers for state in optimizer.state.values() for t in state.values())


def gathered(stage) -> int:
    """Bytes of weights that FSDP holds whole at the moment."""
    sharded = lambda p: isinstance(p, DTensor) and {"fsdp", "efsdp"} & set(p.device_mesh.mesh_dim_names)  # noqa: E731
    storages = [local_tensor(p).untyped_storage() for p in stage.parameters() if not sharded(p)]
    return sum({s._cdata: s.nbytes() for s in storages}.values())


def observe(stages, optimizers, layout, seq_len: int, n: int, watch: Watch) -> Counter:
    """Run a training step of n micro-batches (pipeline) or accumulation steps, and measure it, on any kind of tensor. Memory
    is right in the first step of a model: later ones find FSDP's buffers made.

    A stage is its place on this rank. Keys, all but (flops, ..) and (moved, ..) in bytes:
    parameters, gradients, optimizer
    (activations, stage): what one micro-batch leaves for its backward
    peak: at the worst moment, without those activations; update: of the optimizer's step; measured: of all together
    (flops, phase), (flops, stage): of the step, and of its forwards alone
    (moved, phase, axis, op, bytes): how often
    """
    if layout.pp > 1:
        layout.local_batch_size = layout.cfg.pp_microbatch_size * n
    layout.global_batch_size = layout.local_batch_size * layout.data_ranks * (1 if layout.pp > 1 else n)
    tokens = torch.randint(0, stages[0].config.vocab_size, (layout.accumulation, layout.local_batch_size, seq_len))
    batch = SimpleNamespace(tokens=tokens, labels=tokens, positions=torch.arange(seq_len).expand_as(tokens), doc_ids=None)
    params = [p for stage in stages for p in stage.parameters()]
    out, had = Counter(parameters=size_of(params)), optimizer_state(optimizers)
    before, held, peaks, place = {}, Counter(), [], {s.index: i for i, s in enumerate(stages)}

    def mark():  # the peak since the last mark, and the micro-batches per stage that were under way
        peaks.append((watch.mark(), dict(held)))

    def enter(stage, *args):
        mark()
        if layout.pp == 1:
            held.clear()  # the backward is over
        held[place[stage.index]] += 1
        watch.outside = "forward"
        before[stage.index] = watch.live - gathered(stage), watch.flops["forward"]

    def leave(stage, *args):
        i, (live, flops) = place[stage.index], before[stage.index]
        out["activations", i] = watch.live - gathered(stage) - live
        out["flops", i] += watch.flops["forward"] - flops

    def ends(backward):  # of the pipeline: a whole one, or its second half
        def run(stage, *args, full_backward=True, **kwargs):
            watch.outside = "backward"  # FSDP reduces gradients behind it
            done = backward(stage, *args, **kwargs | ({} if full_backward else {"full_backward": False}))
            mark()
            held[place[stage.stage_index]] -= full_backward
            return done

        return run

    with ExitStack() as stack:
        for stage in stages:
            stack.callback(stage.register_forward_pre_hook(enter, prepend=True).remove)
            stack.callback(stage.register_forward_hook(leave).remove)
        if layout.pp > 1:
            from torch.distributed.pipelining import PipelineStage

            for name in ("backward_one_chunk", "backward_weight_one_chunk"):
                stack.enter_context(mock.patch.object(PipelineStage, name, ends(getattr(PipelineStage, name))))
        stack.enter_context(watch)
        parallel.forward_backward(stages, batch, layout)
        mark()
        out["gradients"] = size_of(p.grad for p in params)
        watch.outside = "update"
        parallel.clip_grad_norm(stages, 1.0, layout)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if getattr(stages[0].config, "n_experts", 0):
            parallel.balance_experts(stages, layout, "bias", 1e-3)
    out["optimizer"] = optimizer_state(optimizers)
    state = out["parameters"] + out["optimizer"]
    out["update"] = out["parameters"] + had + watch.mark()  # the first step makes the optimizer's state
    out["peak"] = state + max(peak - sum(k * out["activations", i] for i, k in under_way.items()) for peak, under_way in peaks)
    out["measured"] = max(out["update"], *(state + peak for peak, _ in peaks))
    out.update({("flops", name): flops for name, flops in watch.flops.items()})
    out.update({("moved", *key): number for key, number in watch.moved.items()})
    return out


def plus(a, factor, b) -> Counter:
    return Counter({key: a[key] + factor * b[key] for key in {**a, **b}})  # a | b would drop what is negative


def measure(stages, optimizers, layout, seq_len: int, n: int) -> Counter:
    """A step of n micro-batches or accumulation steps from steps of 2 and of 1: each one more costs the same."""
    if n <= 2 or layout.cfg.pp_schedule_csv:
        return observe(stages, optimizers, layout, seq_len, n, DryWatch(layout))
    two, one = (observe(stages, optimizers, layout, seq_len, m, DryWatch(layout)) for m in (2, 1))
    step = plus(two, n - 2, plus(two, -1, one))
    # memory does not grow with n, but for the buffers that receive from a neighbour: one per micro-batch for the whole step
    received = sum(key[4] * k for key, k in two.items() if key[0] == "moved" and key[2:4] == ("pp", "recv")) // 2
    memory = {key: two[key] for key in two if key[0] == "activations"} | {key: two[key] for key in ("update", "measured")}
    return Counter({**step, **memory, "peak": two["peak"] + received * (n - 2)})


def rank_kind(stages):
    """Equal for pipeline ranks that do the same work."""
    kind = [b.index - a.index == 1 for a, b in pairwise(stages)]  # then nothing travels between them
    for stage in stages:
        recomputed = tuple(isinstance(block.forward, partial) for block in stage.blocks.values())
        shapes = tuple((p.shape, local_tensor(p).shape) for p in stage.parameters())
        kind.append((stage.index == 0, stage.index == stage.n_stages - 1, recomputed, shapes))
    return tuple(kind)


# ---------------------------------------------------------------- the pipeline's schedule


LETTERS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def rows_of(cfg, pp: int, n: int, n_stages: int) -> list[list[tuple[str, int, int]]]:
    """Per pipeline rank its actions in order: (F forward | B backward | I, W its two halves, stage, micro-batch)."""
    if pp == 1:
        return [[(kind, 0, m) for m in range(n) for kind in "FB"]]
    if cfg.pp_schedule_csv:
        table = parallel.read_csv(cfg.pp_schedule_csv).splitlines()
        return [[(k, int(s), int(m)) for s, k, m in re.findall(r"(\d+)([FBIW])(\d+)", line)] for line in table]
    if cfg.pp_schedule in parallel.ONE_STAGE_PER_RANK:  # by hand: torch's order of 1F1B is one off on the last rank
        rows = []
        for rank in range(pp):
            ahead = n if cfg.pp_schedule == "GPipe" else min(n, pp - rank)
            row = [("F", rank, m) for m in range(ahead)]
            for m in range(n):
                row.append(("B", rank, m))
                if ahead + m < n:
                    row.append(("F", rank, ahead + m))
            rows.append(row)
        return rows
    from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

    rows = []
    for ops in get_schedule_ops(cfg.pp_schedule, pp, n, n_stages // pp):
        flat = [a for op in ops if op is not None for a in (op.sub_actions or (op,))]
        rows.append([(LETTERS.get(a.computation_type.name), a.stage_index, a.microbatch_index) for a in flat])
        rows[-1] = [a for a in rows[-1] if a[0]]  # not REDUCE_GRAD
    return rows


def simulate(rows, cost=lambda kind, stage: 2 if kind == "B" else 1) -> list[list[tuple]]:
    """Per rank (start, end, kind, stage, micro-batch), each as early as its place in the row and what it waits for allow."""
    last = max(stage for row in rows for _, stage, _ in row)
    done, times, waiting, clock = {}, [[] for _ in rows], [list(row) for row in rows], [0] * len(rows)
    while any(waiting):
        moved = False
        for rank, row in enumerate(waiting):
            while row:
                kind, stage, m = row[0]
                needs = {"F": [("F", stage - 1, m)] if stage else [], "W": [("I", stage, m)]}.get(kind)
                if needs is None:
                    needs = [("F", stage, m)] + [("B", stage + 1, m)] * (stage < last)
                if any(need not in done for need in needs):
                    break
                start = max([clock[rank], *(done[need] for need in needs)])
                clock[rank] = start + cost(kind, stage)
                times[rank].append((start, clock[rank], *row.pop(0)))
                done["B" if kind == "I" else kind, stage, m] = clock[rank]
                if kind == "I":
                    done[kind, stage, m] = clock[rank]
                moved = True
        assert moved, f"the schedule waits for itself: {[row[:1] for row in waiting]}"
    return times


def duration(times) -> float:
    return max(row[-1][1] for row in times)


def bubble(times) -> float:
    """Share of the ranks' time in which they wait."""
    return 1 - sum(e - s for row in times for s, e, *_ in row) / (len(times) * duration(times))


def in_flight(row, ids: list[int], step: Counter) -> int:
    """Most bytes of activations that a rank with the stages `ids` holds: from a micro-batch's forward to its backward's end."""
    now = most = 0
    for kind, stage, _ in row:
        now += {"F": 1, "I": 0}.get(kind, -1) * step["activations", ids.index(stage)]
        most = max(most, now)
    return most


# ---------------------------------------------------------------- --dry_run: the report

DEVICES = (80, 141, 192)  # GB, of 10^9 bytes: what is left to a gibibyte is the driver's, NCCL's and the allocator's


@dataclass
class Rank:
    """One pipeline rank's first device, in one step."""

    stages: list
    step: Counter  # see observe
    same_as: int | None = None  # an earlier rank that does the same work
    activations: int = 0  # bytes, of all micro-batches that are under way at the worst moment
    peak: int = 0

    @property
    def ids(self):
        return [stage.index for stage in self.stages]

    def flops(self, *phases) -> int:
        return sum(self.step["flops", name] for name in phases)


@dataclass
class Report:
    layout: object
    ranks: list[Rank]
    n: int  # micro-batches, or accumulation steps
    rows: list  # rows_of: the schedule
    n_params: int
    flops_per_token: int  # as MFU counts them, see metrics.py
    cost: Callable  # (kind, stage) -> FLOPs of a forward, a backward, or half of one

    @property
    def mfu_bound(self) -> float:
        """Share of the FLOPs that train, in what all devices could do while the pipeline runs."""
        useful = sum(rank.flops("forward", "backward") for rank in self.ranks)
        return useful / (self.layout.pp * duration(simulate(self.rows, self.cost)))


def make_report(main, cfg) -> Report:
    ranks, first = [], {}
    for pp_rank in range(max(1, cfg.pp)):
        with dry_world(main, cfg, pp_rank) as (stages, optimizers, layout):
            n = layout.n_microbatches if layout.pp > 1 else layout.accumulation
            if (same := first.setdefault(rank_kind(stages), pp_rank)) < pp_rank:
                ranks.append(Rank(stages, ranks[same].step, same_as=same))
                continue
            sequences = layout.global_batch_size
            ranks.append(Rank(stages, measure(stages, optimizers, layout, cfg.seq_len, n)))
            layout.global_batch_size = sequences  # observe ran with few
    rows = rows_of(cfg, layout.pp, n, stages[0].n_stages)
    for row, rank in zip(rows, ranks, strict=True):
        rank.activations = in_flight(row, rank.ids, rank.step)
        rank.peak = max(rank.step["update"], rank.activations + rank.step["peak"])
        if cfg.cpu_offload:
            rank.peak -= rank.step["parameters"] + rank.step["optimizer"]
    with torch.device("meta"):
        model = type(stages[0])(stages[0].config)  # whole again, and plain
    owner = {i: rank for rank in ranks for i in rank.ids}

    def cost(kind, stage):
        rank = owner[stage]
        forward = rank.step["flops", rank.ids.index(stage)]
        backward = rank.flops("backward", "recompute") * forward / max(1, rank.flops("forward"))
        return {"F": forward, "B": backward}.get(kind, backward / 2) / n

    n_params = sum(p.numel() for p in model.parameters())
    return Report(layout, ranks, n, rows, n_params, model.flops_per_token(cfg.seq_len), cost)


def table(rows: list[list], right=True) -> str:
    """Columns as wide as their widest cell, flush right but for the first."""
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [str(c).rjust(w) if right and i else str(c).ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def human(n: float) -> str:
    unit = next((i for i in range(4) if n < 1000 * 1024**i), 4)
    return f"{n / 1024**unit:.3g} {'B KiB MiB GiB TiB'.split()[unit]}"


def print_report(cfg, report: Report) -> None:
    layout, ranks = report.layout, report.ranks
    print(f"dry run: {report.n_params:,} parameters | {layout} = {layout.world_size:,} device{'s' * (layout.world_size > 1)} | "
          f"{str(layout.compute_dtype)[6:]} compute | {layout.global_batch_size} sequences x {cfg.seq_len} tokens per step")
    print(f"\nThe first device of each pipeline rank; the peak fits ({' / '.join(map(str, DEVICES))} GB) or does not:\n")
    lines = [["pp rank", "layers", "parameters", "gradients", "optimizer", "activations", "peak", "fits", "TFLOPs/step"]]
    for i, rank in enumerate(ranks):
        fits = " / ".join("yes" if rank.peak <= size * 1e9 else "no" for size in DEVICES)
        sizes = [rank.step["parameters"], rank.step["gradients"], rank.step["optimizer"], rank.activations, rank.peak]
        tera = rank.flops("forward", "backward", "recompute") / 1e12
        lines.append([i, sum(len(s.blocks) for s in rank.stages), *map(human, sizes), fits, f"{tera:,.3g}"])
    print(table(lines))

    different = [i for i, rank in enumerate(ranks) if rank.same_as is None]
    names = [", ".join(str(j) for j, r in enumerate(ranks) if j == i or r.same_as == i) for i in different]
    print("\nCollectives of one step: number and bytes (of the largest tensor of each, summed), by axis:\n")
    counts = [totals({key[1:]: n for key, n in ranks[i].step.items() if key[0] == "moved"}) for i in different]
    lines = [["axis", "operation", *(f"pp rank {name}" for name in names)]]
    for axis, op in sorted({key for c in counts for key in c}):
        cells = [c.get((axis, op), (0, 0)) for c in counts]
        lines.append([axis, op, *(f"{number:,} x, {human(size)}" if number else "-" for number, size in cells)])
    print(table(lines) if len(lines) > 1 else "none")

    whole, lost = sum(r.flops("forward", "backward", "recompute") for r in ranks), sum(r.flops("recompute") for r in ranks)
    print()
    if layout.pp > 1:
        order = cfg.pp_schedule_csv or cfg.pp_schedule
        print(f"Pipeline: {order}, {report.n} micro-batches: bubble {bubble(simulate(report.rows)):.1%} if all stages take as "
              f"long, {bubble(simulate(report.rows, report.cost)):.1%} with these stages' FLOPs")
    why = ["the pipeline's waiting"] * (layout.pp > 1) + [f"recomputation ({lost / whole:.1%} of the FLOPs)"] * bool(lost)
    print(f"MFU at most {report.mfu_bound:.1%}: {' and '.join(why) or 'nobody waits for a pipeline, nothing is recomputed'}; "
          "communication and kernels take the rest")
    worst = max(ranks, key=lambda r: r.peak)
    verdict = [f"{size} GB: {'fits' if worst.peak <= size * 1e9 else 'does not fit'}" for size in DEVICES]
    print(f"Peak {human(worst.peak)} on pipeline rank {ranks.index(worst)}. {', '.join(verdict)}")
    print("\nHow this was found: the recipe's own code ran under a fake process group, on tensors without memory.")
    if report.n > 2 and not cfg.pp_schedule_csv:
        print(f"Run were 2 of {report.n} {'micro-batches' if layout.pp > 1 else 'accumulation steps'}; the rest is linear.")
    print("Activations are what torch's CPU kernels keep; CUDA kernels and --compile keep less. The peak counts tensors only.")
    if cfg.cpu_offload:
        print("--cpu_offload: parameters, gradients and optimizer state are in host memory, not in the peak.")
    if cfg.ac == "budget":
        print("--ac budget is the compiler's decision: shown as --ac none.")
    if getattr(cfg, "doc_mask", False):
        print("--doc_mask: shown without. The mask saves FLOPs of attention, and changes no other number.")


# ---------------------------------------------------------------- --plan: how fast it would be


@dataclass(frozen=True)
class Machine:
    flops: float  # dense bf16, of the data sheet
    nvlink: float  # bytes/s per device and direction
    network: float  # bytes/s per device and direction
    per_node: int = 8


MACHINES = {
    "H100": Machine(peak_flops("H100"), 450e9, 50e9),
    "H200": Machine(peak_flops("H200"), 450e9, 50e9),
    "B200": Machine(peak_flops("B200"), 900e9, 50e9),
}
# Fitted to what others published, see benchmarks/scaling.py: the share of the data sheet's FLOP/s and bandwidths that a
# compiled bf16 step reaches, and attention's own share of the FLOP/s; and how far a row was off, on average and at worst,
# when it was left out of the fit
EFFICIENCY, BANDWIDTH, ATTENTION = 0.44, 0.59, 0.18
MEAN_ERROR, WORST_ERROR = 0.1, 0.23
OVERLAPPED = ("fsdp", "efsdp", "dp_replicate")  # behind arithmetic that does not wait for them


def axis_span(layout, axis: str) -> tuple[int, int]:
    """(ranks of a group, distance of neighbours in rank) on an axis of the dense or the expert mesh."""
    sizes, ep, etp = layout.degrees, layout.cfg.ep, layout.cfg.etp
    dense = {a: sizes[a] for a in reversed(parallel.AXES)}  # innermost first
    fsdp = {"tp": sizes["tp"], "fsdp": sizes["cp"] * sizes["dp_shard"]}
    experts = {"etp": etp, "ep": ep, "efsdp": math.prod(fsdp.values()) // (ep * etp)}
    for mesh in (dense, fsdp, experts):
        if axis in mesh:
            names = list(mesh)
            return mesh[axis], math.prod(mesh[a] for a in names[: names.index(axis)])
    return layout.world_size, 1


def wire_seconds(layout, axis: str, op: str, size: int, machine: Machine) -> float:
    """Of one collective at full bandwidth. A group inside a node uses NVLink; one across nodes the network cards of all its
    ranks in a node."""
    n, distance = axis_span(layout, axis)
    speed = machine.nvlink
    if n * distance > machine.per_node:
        speed = min(speed, machine.network * max(1, machine.per_node // distance))
    share = {"send": 1, "recv": 0, "all_reduce": 2 * (n - 1) / n}.get(op, (n - 1) / n)  # a recv is its neighbour's send
    return size * share / speed


def predict(
    report, machine: Machine, efficiency=EFFICIENCY, bandwidth=BANDWIDTH, attention_efficiency=ATTENTION, matmul_gain=1.0
) -> dict:
    """Seconds of one step, and the parts of the slowest rank: compute, wire (that it waits for), hidden, uncovered, bubble.

    attention_efficiency: share of the data sheet's FLOP/s that attention gets; efficiency: what the other matmuls get, and
    matmul_gain: how much faster than bf16 they are.
    """
    layout, parts = report.layout, []
    # a causal kernel does half of what is counted; all_gather_attention has left out most of the other half already
    causal = 2 * layout.cp / (2 * layout.cp + 1) if layout.cp > 1 and layout.cfg.cp_method == "allgather" else 1 / 2
    for rank in report.ranks:
        wire = Counter()
        for key, number in rank.step.items():
            if key[0] == "moved":
                wire[key[2]] += number * wire_seconds(layout, *key[2:], machine) / bandwidth
        attention = rank.flops("attention")
        matmuls = (rank.flops("forward", "backward", "recompute") - attention) / (efficiency * matmul_gain)
        compute = (matmuls + attention * causal / attention_efficiency) / machine.flops
        hidden = sum(wire[a] for a in OVERLAPPED)
        parts.append(dict(compute=compute, wire=wire.total() - hidden, hidden=hidden, uncovered=max(0, hidden - compute)))
    owner = {i: (rank, part) for rank, part in zip(report.ranks, parts, strict=True) for i in rank.ids}

    def cost(kind, stage):  # seconds: waiting for the wire lengthens forwards and backwards alike
        rank, part = owner[stage]
        per_flop = (part["compute"] + part["wire"]) / rank.flops("forward", "backward", "recompute")
        return report.cost(kind, stage) * per_flop

    times = simulate(report.rows, cost)
    slowest = max(parts, key=lambda part: part["compute"] + part["wire"])
    seconds = duration(times) + max(part["uncovered"] for part in parts)
    busy = slowest["compute"] + slowest["wire"] + slowest["uncovered"]
    return slowest | dict(seconds=seconds, bubble=max(0.0, seconds - busy))


def machine_of(cfg) -> Machine:
    flags = dict(nvlink_gb_s=cfg.nvlink_gb_s, network_gb_s=cfg.network_gb_s, devices_per_node=cfg.devices_per_node)
    if wrong := [f"--{name} {value}" for name, value in flags.items() if value < 0]:
        raise ValueError(f"{', '.join(wrong)} must not be negative; 0 is the machine's own")
    given = dict(nvlink=cfg.nvlink_gb_s * 1e9, network=cfg.network_gb_s * 1e9, per_node=cfg.devices_per_node)
    return replace(MACHINES[cfg.machine], **{name: value for name, value in given.items() if value})


def print_plan(cfg, report, machine: Machine) -> None:
    layout, p = report.layout, predict(report, machine)
    speed = layout.global_batch_size * cfg.seq_len / layout.world_size / p["seconds"]
    mfu = speed * report.flops_per_token / machine.flops
    print(f"\nplan: {layout} on {layout.world_size:,} x {cfg.machine}: about {speed:,.0f} tokens/s per device, MFU {mfu:.0%}, "
          f"{p['seconds']:.3g} s per step\nPublished runs were predicted {MEAN_ERROR:.0%} off on average, {WORST_ERROR:.0%} at "
          f"worst, each with constants fitted without it:\nexpect {speed * (1 - MEAN_ERROR):,.0f} to "
          f"{speed * (1 + MEAN_ERROR):,.0f} tokens/s, and do not be surprised by less.\n")
    names = dict(compute="arithmetic", wire="waiting for tp, cp, ep, pp", uncovered="fsdp and dp_replicate beyond arithmetic",
                 bubble="waiting for other stages")
    print(table([[text, f"{p[key]:.3g} s", f"{p[key] / p['seconds']:.0%}"] for key, text in names.items()]))
    print(f"\nAssumed: {machine.flops / 1e12:.0f} TFLOP/s (bf16, dense), NVLink {machine.nvlink / 1e9:g} GB/s in a node of "
          f"{machine.per_node}, network {machine.network / 1e9:g} GB/s per device, each way;\n{EFFICIENCY:.0%} of the FLOP/s "
          f"({ATTENTION:.0%} in attention) and {BANDWIDTH:.0%} of the bandwidths are reached (--compile, bf16). Causal "
          f"attention costs half of its FLOPs."
          f"\nfsdp and dp_replicate ({p['hidden']:.3g} s) hide behind arithmetic, the other axes do not. No stragglers.")
    if not cfg.compile:
        print("Without --compile expect about a seventh less (torchtitan, 8B on 8 H100: 5,762 instead of 6,667 tokens/s).")


# ---------------------------------------------------------------- --explain: one block

AGAIN = "the same weights again: they were freed after the forward"
REASONS = {  # (axis, operation, phase)
    ("fsdp", "all_gather", "forward"): "the weights, whole, before they are used",
    ("fsdp", "all_gather", "backward"): AGAIN,
    ("fsdp", "reduce_scatter", "backward"): "the gradients: summed over data and cp ranks, each keeps its shard",
    ("efsdp", "all_gather", "forward"): "the weights of this rank's experts, whole, before they are used",
    ("efsdp", "all_gather", "backward"): AGAIN,
    ("efsdp", "reduce_scatter", "backward"): "the experts' gradients: summed, each rank keeps its shard",
    ("dp_replicate", "all_reduce", "backward"): "the shards of the gradients, summed over the copies of the model",
    ("tp", "all_gather", "forward"): "the sequence, whole, before attention and FFN: each rank has other heads and channels",
    ("tp", "reduce_scatter", "forward"): "partial sums behind attention and FFN; each rank keeps its part of the sequence",
    ("tp", "all_gather", "backward"): "the mirror of the forward's reduce-scatter",
    ("tp", "reduce_scatter", "backward"): "the mirror of the forward's all-gather",
    ("tp", "all_gather", "recompute"): "the forward's, as its result was not kept",
    ("tp", "reduce_scatter", "recompute"): "the forward's, as its result was not kept",
    ("tp", "all_reduce", "forward"): "what ranks with parts of one sequence must agree on",
    ("tp", "all_reduce", "backward"): "gradients of weights that every rank holds: each saw a part of the tokens or heads",
    ("cp", "all_gather", "forward"): "keys and values of the whole sequence, for this rank's queries",
    ("cp", "all_gather", "recompute"): "the forward's, as its result was not kept",
    ("cp", "reduce_scatter", "backward"): "gradients of keys and values: every rank used them all",
    ("cp", "all_to_all", "forward"): "q, k, v: parts of a sequence for whole sequences of fewer heads; the output: back",
    ("cp", "all_to_all", "recompute"): "the forward's, as its result was not kept",
    ("cp", "all_to_all", "backward"): "the mirror of the forward's",
    ("ep", "all_to_all", "forward"): "how many tokens come; the tokens to their experts; the results back",
    ("ep", "all_to_all", "recompute"): "the forward's, as its result was not kept",
    ("ep", "all_to_all", "backward"): "gradients of the results to the experts, and of the tokens back",
}


def placed(p) -> str:
    """'tp: rows, fsdp: rows', with dimensions named by number beyond matrices."""
    if not isinstance(p, DTensor):
        return "whole"
    names = {1: ["rows"], 2: ["rows", "columns"]}.get(p.dim(), [f"dim {d}" for d in range(p.dim())])
    axes = zip(p.device_mesh.mesh_dim_names, p.device_mesh.shape, p.placements, strict=True)
    # FSDP's axes stand first in the mesh, and split what the others left
    said = [f"{a}: {'whole' if x.is_replicate() else names[x.dim]}" for a, size, x in axes if size > 1]
    return ", ".join(reversed(said)) or "whole"


def explain(main, cfg) -> None:
    """What a block costs is the difference between a stage that ends in three and one that ends in two of them."""
    steps = []
    for keep in (3, 2):
        with dry_world(main, cfg, 0) as (stages, optimizers, layout):
            blocks = max((stage.blocks for stage in stages), key=len)
            if len(blocks) < 3:
                raise ValueError("--explain needs three layers on a rank, to compare three with two of them")
            names = list(blocks)
            name, block = names[-3], blocks[names[-3]]
            for unused in names[:-keep]:
                del blocks[unused]
            if not steps:
                params = [[n, p.shape, placed(p), local_tensor(p)] for n, p in block.named_parameters()]
            n = layout.n_microbatches if cfg.pp_schedule_csv else 1
            steps.append(observe(stages, optimizers, layout, cfg.seq_len, n, DryWatch(layout)))
    step = plus(steps[0], -1, steps[1])
    print(f"One block of {layout}: blocks.{name}, on the first device\n")
    shape = lambda s: " x ".join(map(str, s))  # noqa: E731
    lines = [["parameter", "whole", "split by", "on this device", ""]]
    lines += [[n, shape(whole), split, shape(p.shape), human(size_of([p]))] for n, whole, split, p in params]
    print(table(lines, right=False))
    size = f"{cfg.pp_microbatch_size if layout.pp > 1 else cfg.local_batch_size} x {cfg.seq_len}"
    print(f"\nWhat travels for it in one forward and backward of {size} tokens. Bytes: of the largest tensor "
          "of each;\na rank sends and receives (n-1)/n of them over an axis of n ranks, and twice that in an all-reduce.\n")
    lines = [["phase", "axis", "operation", "number", "bytes", "why"]]
    for p in ("forward", "recompute", "backward"):
        moved = Counter({key[1:]: k for key, k in step.items() if key[:2] == ("moved", p) and k})
        for (axis, op), (number, size) in totals(moved).items():
            lines.append([p, axis, op, number, human(size), REASONS.get((axis, op, p), "")])
    print(table(lines, right=False) if len(lines) > 1 else "Nothing: no axis has more than one rank.")
    if layout.pp > 1:
        print("\nBetween pipeline ranks only the activations behind a stage's last block travel, and their gradients back.")
    print(f"\nFLOPs: {sum(step['flops', f] for f in ('forward', 'backward', 'recompute')):.3g} on each device.")


# ---------------------------------------------------------------- --plot: the mesh, and the pipeline's schedule

COLORS = {"F": "#4c78a8", "I": "#f58518", "W": "#54a24b", "idle": "#e6e6e6"}
MEANINGS = {"F": "forward", "I": "backward of the input", "W": "backward of the weights", "idle": "idle"}


def halves(times):
    """A whole backward is two units: its input half, then its weight half."""
    for rank, row in enumerate(times):
        for start, end, kind, stage, m in row:
            middle = (start + end) / 2
            parts = [(start, middle, "I"), (middle, end, "W")] if kind == "B" else [(start, end, kind)]
            yield from ((rank, a, b, k, stage, m) for a, b, k in parts)


def text_picture(times) -> str:
    """One line per rank, one character per unit of time: F, I (backward, input), W (backward, weight) or '.'"""
    end = max(row[-1][1] for row in times)
    lines = [["."] * round(end) for _ in times]
    for rank, a, b, kind, *_ in halves(times):
        lines[rank][round(a) : round(b)] = kind * (round(b) - round(a))
    return "\n".join(f"rank {i:>3} |{''.join(line)}|" for i, line in enumerate(lines))


AXIS_COLORS = {"tp": "#4c78a8", "cp": "#72b7b2", "fsdp": "#54a24b", "dp_replicate": "#eeca3b", "pp": "#f58518",
               "ep": "#b279a2", "etp": "#ff9da6", "efsdp": "#9d755d"}
AXIS_MEANINGS = {
    "tp": "activations, four times per block and direction", "cp": "keys and values of every block",
    "fsdp": "weights, gradients (dp_shard x cp)", "dp_replicate": "sums of gradients, once per step",
    "pp": "activations between stages", "ep": "tokens to their experts and back",
    "etp": "tokens to the parts of experts and back", "efsdp": "the experts' weights, gradients",
}


def pyplot_and_patches():
    import matplotlib
    from matplotlib import patches, pyplot

    matplotlib.use("Agg")  # files, no windows
    return pyplot, patches


def save(figure, path: str) -> None:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot_and_patches()[0].close(figure)


def draw_schedule(times, title: str, path: str) -> None:
    pyplot, patches = pyplot_and_patches()
    end, n = duration(times), len(times)
    figure, axes = pyplot.subplots(figsize=(min(20, max(8, end / 3)), 1.6 + 0.45 * n), layout="constrained")
    axes.barh(range(n), [end] * n, height=0.9, color=COLORS["idle"])
    shades = max(stage for row in times for *_, stage, _ in row) >= n  # several stages per rank: later ones are paler
    for rank, a, b, kind, stage, m in halves(times):
        pale = stage >= n
        look = dict(color=COLORS[kind], edgecolor="white", linewidth=0.6, alpha=0.5 if pale else 1)
        axes.barh(rank, b - a, left=a, height=0.9, **look)
        if end <= 120:
            axes.text((a + b) / 2, rank, m, ha="center", va="center", fontsize=7, color="black" if pale else "white")
    entries = [patches.Patch(color=COLORS[k], label=MEANINGS[k]) for k in COLORS]
    if shades:
        entries.append(patches.Patch(color=COLORS["F"], alpha=0.5, label="paler: a rank's later stages"))
    figure.legend(handles=entries, loc="outside lower center", ncols=len(entries), frameon=False)
    axes.set(xlim=(0, end), xlabel="time (one forward of a stage = 1); the numbers are micro-batches")
    axes.set(yticks=range(n), ylabel="pipeline rank", title=title)
    axes.invert_yaxis()
    save(figure, path)


def mesh_groups(layout) -> dict[str, list[int]]:
    """{axis: the ranks of device 0's group, itself first} of the groups of more than one that something travels in, from the
    meshes that the recipe made, innermost axis first and the experts' last. FSDP's is dp_shard x cp."""
    groups = {}
    for mesh, axes in (layout.axes, ["tp", "cp"]), (layout.mesh, ["fsdp", "dp_replicate", "pp"]), (
            layout.experts, ["etp", "ep", "efsdp"]):
        for axis in axes if mesh is not None else ():
            ranks = mesh.mesh.movedim(mesh.mesh_dim_names.index(axis), -1).flatten(0, -2)[0].tolist()
            groups |= {axis: ranks} if len(ranks) > 1 else {}
    return groups


def text_mesh(layout) -> str:
    lines = [["axis", "ranks", "device 0 is with", "what travels"]]
    for axis, ranks in mesh_groups(layout).items():
        named = ", ".join(map(str, ranks[:4])) + (f" .. {ranks[-1]}" if len(ranks) > 4 else "")
        lines.append([axis, len(ranks), named, AXIS_MEANINGS[axis]])
    return table(lines, right=False) if len(lines) > 1 else "one device: no axis"


def draw_mesh(layout, path: str) -> None:
    """A cell per device; coloured are those that device 0 exchanges with, a stripe for each axis that they share. Of large
    meshes only the beginning."""
    pyplot, patches = pyplot_and_patches()
    inner, data = layout.cp * layout.tp, layout.data_ranks
    n, w, h = min(8, layout.pp), min(32, data), min(16, inner)  # panels, and cells of each
    columns = max(1, min(n, 20 // w))
    side = min(0.42, 13 / (columns * (w + 1)))  # inches per cell
    size = (max(7.5, columns * (w + 1) * side), math.ceil(n / columns) * (h + 1.6) * side + 1.6)
    figure, all_axes = pyplot.subplots(math.ceil(n / columns), columns, figsize=size, layout="constrained", squeeze=False)
    groups, all_ranks = mesh_groups(layout), layout.axes.mesh.reshape(layout.pp, data, inner).tolist()
    for i, axes in enumerate(all_axes.flat):
        axes.set_axis_off()
        if i >= n:
            continue
        for d in range(w):
            for j in range(h):
                rank = all_ranks[i][d][j]
                shared = [AXIS_COLORS[axis] for axis, ranks in groups.items() if rank in ranks]
                colors = ["#222222"] if rank == 0 else shared or [COLORS["idle"]]
                for k, color in enumerate(colors):
                    left, width = d + 0.92 * k / len(colors), 0.92 / len(colors)
                    axes.add_patch(patches.Rectangle((left, j), width, 0.92, color=color, linewidth=0))
                if side > 0.22:
                    axes.text(d + 0.46, j + 0.46, rank, ha="center", va="center", fontsize=min(8, side * 20),
                              color="white" if shared else "#444444")
        axes.set(xlim=(0, w), ylim=(h, 0), aspect="equal")
        axes.set_title(f"pp {i}" if layout.pp > 1 else "", fontsize=9, loc="left")
    entries = [patches.Patch(color="#222222", label="device 0")]
    entries += [patches.Patch(color=AXIS_COLORS[a], label=f"{a} {len(r)}: {AXIS_MEANINGS[a]}") for a, r in groups.items()]
    figure.legend(handles=entries, loc="outside lower center", ncols=1 if len(entries) < 4 else 2, frameon=False, fontsize=9)
    cut = [f"{n} of {layout.pp} pipeline ranks"] * (n < layout.pp)
    cut += [f"{w} of {data} columns"] * (w < data) + [f"{h} of {inner} rows"] * (h < inner)
    figure.suptitle(f"{layout}: {layout.world_size:,} devices, by rank\ncolumns: dp_replicate x dp_shard, rows: cp x tp"
                    + (f" (shown: {', '.join(cut)})" if cut else ""), fontsize=10)
    save(figure, path)


def plot(cfg, report) -> None:
    layout = report.layout
    pictures = {"mesh.png": partial(draw_mesh, layout)}
    print(f"{layout}: {layout.world_size:,} devices\n{text_mesh(layout)}\n")
    if layout.pp > 1:
        times = simulate(report.rows)
        order = cfg.pp_schedule_csv or cfg.pp_schedule
        title = f"{order}, pp {layout.pp}, {report.n} micro-batches: bubble {bubble(times):.1%}"
        print(f"{title}\n{text_picture(times)}\n{', '.join(f'{k} {MEANINGS[k]}' for k in 'FIW')}, . idle")
        pictures["pipeline.png"] = partial(draw_schedule, times, title)
    if importlib.util.find_spec("matplotlib") is None:
        print("As text only: pictures need matplotlib (pip install matplotlib)")
        return
    for name, draw in pictures.items():
        draw(path=os.path.join(cfg.out, name))
        print(os.path.join(cfg.out, name))


def dry_run(main, cfg) -> int:
    """--dry_run, --plan, --explain and --plot of a recipe; returns the exit status."""
    if "RANK" in os.environ:
        raise ValueError("--dry_run, --plan, --explain and --plot run in one process: use python, not torchrun")
    machine = machine_of(cfg)
    if cfg.dry_run or cfg.plan or cfg.plot:
        report = make_report(main, cfg)
    if cfg.dry_run:
        print_report(cfg, report)
    if cfg.plan:
        print_plan(cfg, report, machine)
    if cfg.explain:
        explain(main, cfg)
    if cfg.plot:
        plot(cfg, report)
    return 0


# ---------------------------------------------------------------- --check_parity

# fp32, three steps. Every mistake of tests/test_mutants.py is far above these; weights get more room than gradients because
# AdamW divides a gradient by its own size, so that the rounding of a tiny one moves a weight as far as a large one does.
LOSS_TOLERANCE, NORM_TOLERANCE, GRADIENT_TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 2e-5, 1e-4, 5e-4
STEPS = 3
# After the first update the weights differ by rounding, and gradients by more: so many times the tolerances of step 1. Muon
# makes small directions as large as the others; a router may send a token that is on the edge to another expert; and what
# the optimizer of a fork does with rounding, nobody knows.
LATER = {"adamw": 10, "muon": 100}


def model_config_of(main, cfg):
    """What the recipe's main gives check_layout as the model's config; it ends there."""

    def seen(cfg, model_config, **kwargs):
        raise Built(model_config)

    patches = [mock.patch.object(parallel, "check_layout", seen)]
    patches += [mock.patch.dict(main.__globals__, check_layout=seen)] * ("check_layout" in main.__globals__)
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        try:
            main(replace(cfg, dry_run=True))  # a copy, and nothing of an earlier run is looked at
        except Built as built:
            return built.args[0]
    raise RuntimeError("main ended without a call of check_layout")


def half_flags(cfg, flags: dict, model_config) -> dict:
    """Flags of one half of --check_parity, and the defaults of all those that have no effect in it and would be refused."""
    flags, defaults = {name: value for name, value in flags.items() if hasattr(cfg, name)}, type(cfg)()
    while True:  # without one flag another may have no effect either
        half = replace(cfg, **flags)
        degrees = {axis: getattr(half, axis) for axis in parallel.AXES}
        unmet = unmet_needs(half, parallel.facts(half, model_config, degrees, half.device))
        if not unmet:
            return flags
        flags |= {name: getattr(defaults, name) for name in unmet}


def check_parity(main, cfg, degrees: dict[str, int]) -> int:
    """Train STEPS steps of the running recipe on one process and on the layout, in fp32; compare; return the exit status.

    Works for any copy of a recipe: it is started twice with flags appended, and parallel.clip_grad_norm, where a step's
    gradients are complete, writes them down (record_step there).
    """
    if "RANK" in os.environ:
        raise ValueError("--check_parity starts its own processes: run it with python, not torchrun")
    if cfg.optimizer_in_backward:
        raise ValueError("--check_parity compares gradients, which --optimizer_in_backward frees; leave one of them out")
    if degrees["dp_shard"] == -1:  # as many as the experts must borrow
        borrowed = degrees["cp"] * (degrees["tp"] if cfg.etp == 1 else 1)
        degrees = degrees | {"dp_shard": max(cfg.ep, 1) // math.gcd(max(cfg.ep, 1), max(borrowed, 1))}
    model_config = model_config_of(main, cfg)
    if unused := no_effect(cfg, parallel.facts(cfg, model_config, degrees, cfg.device)):
        raise ValueError("; ".join(unused))
    world_size = math.prod(max(n, 1) for n in degrees.values())
    data_ranks = max(degrees["dp_replicate"], 1) * max(degrees["dp_shard"], 1)
    batch = cfg.global_batch_size if cfg.global_batch_size != -1 else cfg.local_batch_size * data_ranks
    both = dict(check_parity=False, steps=STEPS, compute_dtype="float32", global_batch_size=batch, checkpoint_every=0,
                export_hf="", val_every=0, log_every=1, device="cuda" if torch.cuda.device_count() >= world_size else "cpu")
    if "global_batch_size" in FROM_FILE:
        del both["global_batch_size"]  # both runs read it from there, and find the local batch that fits
    one = dict.fromkeys(degrees, 1) | dict(ep=1, etp=1, ac="none", compile=False, cpu_offload=False)
    with tempfile.TemporaryDirectory() as folder:
        halves = {"one process": one, "layout": {a: max(n, 1) for a, n in degrees.items()}}
        halves = {name: half_flags(cfg, both | half | {"out": os.path.join(folder, name.replace(" ", "_"))}, model_config)
                  for name, half in halves.items()}
        if len({repr(replace(cfg, **half | {"out": ""})) for half in halves.values()}) == 1:
            raise ValueError("--check_parity compares one process with a layout, and these flags ask for one process without "
                             "anything to compare; add a layout like --tp 2, or --ac, --compile or --cpu_offload")
        runs = {}
        for name, flags in halves.items():
            processes, out = math.prod(flags[axis] for axis in parallel.AXES), flags["out"]
            print(f"check_parity: {STEPS} steps on {name} ({processes} process{'es' * (processes > 1)}) ...", flush=True)
            launch = [sys.executable]
            if processes > 1:
                launch += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
            # a flag given twice has its last value
            extra = [f"--{k}={spell(v)}" for k, v in flags.items()]
            env = os.environ | {"NANOTITAN_RECORD": out + "_record"}
            done = subprocess.run([*launch, *sys.argv, *extra], env=env, capture_output=True, text=True)
            if done.returncode:
                lines = done.stderr.splitlines()
                reason = [line for line in lines if line.startswith("error")] or lines[-20:]
                print("\n".join(reason[:1] if reason[0].startswith("error: ") else reason), file=sys.stderr)
                return done.returncode if processes == 1 else 2 if reason[0].startswith("error: ") else 1
            runs[name] = read_records(out)
        has_experts = any(".experts." in fqn for fqn in runs["layout"][0]["gradient"])
        later = math.inf if has_experts else LATER.get(getattr(cfg, "optimizer", "adamw"), math.inf)
        return print_comparison(*runs.values(), later)


def read_records(out: str) -> list[dict]:
    """Per step: loss, norm, tokens_hash, and gradients and weights by fqn, of all pipeline stages together."""
    lines = [line for line in read_lines(os.path.join(out, "metrics.jsonl")) if "loss" in line]
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


def print_comparison(one: list[dict], layout: list[dict], later: float = 1) -> int:
    """The table; 0 when all is within tolerance, else 1 after a line that names the first difference.

    later: how many times the tolerances of loss, norm and gradients hold after step 1; infinite: then only the weights after
    the first update count.
    """
    first = ""
    head = ["loss, 1 process", "layout", "norm, 1 process", "layout"]
    print("step", *(f"{text:>16}" for text in head), " worst gradient / worst weight")
    for n, (a, b) in enumerate(zip(one, layout, strict=True), 1):
        problems, worst, slack = [], {}, 1 if n == 1 else later
        # the third weights come from the gradients of step 2
        weight_tolerance = WEIGHT_TOLERANCE if n <= 2 or later < math.inf else math.inf
        if a["hash"] != b["hash"]:
            problems.append("the tokens of the global batch")
        for kind, tolerance in (("gradient", slack * GRADIENT_TOLERANCE), ("weight", weight_tolerance)):
            if missing := sorted(a[kind].keys() ^ b[kind].keys()):
                problems.append(f"the {kind} of {missing[0]}, which only one of the two has")
            errors = {fqn: relative(b[kind][fqn].float(), a[kind][fqn].float()) for fqn in a[kind] if fqn in b[kind]}
            worst[kind] = max(errors.items(), key=lambda item: item[1])
            problems += [f"the {kind} of {fqn} by {e:.1e} (relative)" for fqn, e in errors.items() if not e <= tolerance][:1]
        if not abs(a["loss"] - b["loss"]) <= slack * LOSS_TOLERANCE * max(1.0, abs(a["loss"])):
            problems.append(f"the loss, {b['loss']} instead of {a['loss']}")
        if not abs(a["norm"] - b["norm"]) <= slack * NORM_TOLERANCE * abs(a["norm"]):
            problems.append(f"the gradient norm, {b['norm']} instead of {a['norm']}")
        first = first or (problems and f"step {n} differs first in {problems[0]}") or ""
        notes = " / ".join(f"{e:.1e} {fqn}" for fqn, e in worst.values())
        print(f"{n:>4} {a['loss']:>16.8f} {b['loss']:>16.8f} {a['norm']:>16.8f} {b['norm']:>16.8f}  {notes}")
    print(f"check_parity: NOT EQUAL: {first}" if first else "check_parity: equal")
    return int(bool(first))
