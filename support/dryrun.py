"""What a layout does, before it is trusted with a real run, or before the machines for it are rented.

--dry_run       the recipe's own parallelisation code under a fake process group of any size, on tensors without memory:
                bytes, collectives, FLOPs and the pipeline's bubble, per pipeline rank
--explain       the same for one block, parameter by parameter and collective by collective
--plan          tokens per second and MFU on a named machine, predicted from the same numbers
--plot          the mesh and the pipeline's schedule as pictures
--check_parity  three real steps on one process and on the layout, compared
"""
import math
import os
import sys
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

import distributed.layout
import parallel
from distributed import checks, refusals
from distributed.experts import balance_experts
from distributed.layout import AXES, local_tensor
from distributed.pipeline import ONE_STAGE_PER_RANK, csv_rows, n_microbatches
from models.loss import CHUNK_ELEMENTS
from support import optim, resume

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
        for mesh in [m for m in layout and (layout.expert_mesh, layout.full_mesh, layout.mesh) or () if m is not None]:
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


@contextmanager
def no_earlier_run():
    """What is in --out is neither looked at nor locked while a recipe's main runs for a report."""
    with ExitStack() as stack:
        for name in "check_run", "lock_run", "continued":
            stack.enter_context(mock.patch.object(resume, name, lambda *args, **kwargs: None))
        yield


def build(main, cfg, connect, **stand_ins):
    """(stages, optimizers, layout) from the recipe's own main, run up to its checkpoints.

    Where main would touch data, disk or other processes it finds stand-ins; the rest of it is its own code and parallel.py's.
    stand_ins: more of them, by the name that main knows them by.
    """
    seen = []

    def stand_in_connect(layout, *args, **kwargs):
        connect(layout)
        seen.append(layout)

    def checkpoints(*args, modules, optimizer, **kwargs):
        raise Built(modules, optimizer)

    nothing = lambda *args, **kwargs: None  # noqa: E731
    data = SimpleNamespace(vocab_size=0, n_val_samples=1, fingerprint={}, tokenizer_file=None)
    stand_ins |= dict(source_tokenizer=nothing, open_data=lambda *args: data, check_run=nothing, lock_run=nothing,
                      StopSignal=nothing, connect=stand_in_connect, Checkpoints=checkpoints)
    names = main.__globals__
    known = {name: value for name, value in stand_ins.items() if name in names}
    with mock.patch.dict(names, known), no_earlier_run():
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
    world_size = math.prod(max(1, getattr(cfg, axis)) for axis in AXES)
    rank = pp_rank * (world_size // max(1, cfg.pp))

    def connect(layout):
        # compiled or not, the same bytes travel; and the order of the micro-batches is simulated, not run
        order = cfg.pp_schedule if cfg.pp_schedule_csv else SIMPLE_ORDER.get(cfg.pp_schedule, cfg.pp_schedule)
        layout.cfg = replace(layout.cfg, compile=False, async_tp=False, pp_schedule=order)
        layout.compute_dtype = torch.float32 if cfg.compute_dtype == "float32" else torch.bfloat16
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

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
            *[(module, "local_slice", unwatched(distributed.layout.local_slice)) for module in (parallel, optim)],
            (DeviceMesh, "__getitem__", unwatched(DeviceMesh.__getitem__)),
            (checks, "check_memory", lambda model, layout: None),
            (parallel, "lower_right_mask", lambda T, S, device: None),  # CUDA's flash kernel has it built in
            (schedules._PipelineSchedule, "_warmup_p2p", shapes_are_given),
            (_PipelineStageBase, "_get_init_p2p_neighbors_ops", lambda stage: []),  # the handshake before torch 2.13
        ]:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        try:
            on_gpus = partial(refusals.check_layout, on_cuda=True)
            built = build(main, replace(cfg), connect, init_weights=init_weights, check_layout=on_gpus)
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
            balance_experts(stages, layout, "bias", 1e-3)
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
        return csv_rows(cfg.pp_schedule_csv)
    if cfg.pp_schedule in ONE_STAGE_PER_RANK:  # by hand: torch's order of 1F1B is one off on the last rank
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
            n = n_microbatches(layout) if layout.pp > 1 else layout.accumulation
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
