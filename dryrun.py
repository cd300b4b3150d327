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
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
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
    flops: {phase: FLOPs of matmuls and attention}; phases are forward, backward, recompute, update
    live, peak: bytes of tensors made inside that are alive now, and at the worst moment
    """

    def __init__(self, layout=None):
        super().__init__()
        self.moved, self.flops, self.live, self.peak, self.sizes = Counter(), Counter(), 0, 0, {}
        self.updating = False  # the gradients are complete, the optimizer's turn
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
            if isinstance(t, torch.Tensor):
                storage = t.untyped_storage()
                if (key := storage._cdata) not in known and key not in self.sizes:
                    self.change(key, storage.nbytes())
                    weakref.finalize(storage, self.change, key, None)
        if name in FLOPS:
            self.flops[self.phase()] += FLOPS[name](out, *args, **kwargs)
        elif func._overloadpacket in flop_registry:
            self.flops[self.phase()] += flop_registry[func._overloadpacket](*args, **kwargs, out_val=out)
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
            return "update" if self.updating else "forward"
        return "recompute" if torch.is_grad_enabled() else "backward"

    def mark(self) -> int:
        """The peak since the last mark."""
        peak, self.peak = self.peak, self.live
        return peak

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
        if func is torch.ops.aten.bincount.default:  # tokens per expert
            self.rows = args[0].numel()
            return args[0].new_empty(args[2])
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


# What a dry run executes in place of a schedule, with 2 or 3 micro-batches: the same collectives, in a simpler order
SIMPLE_ORDER = {"1F1B": "GPipe", "DualPipeV": "ZBVZeroBubble"}


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

    def really(function):  # what computes places and ranks, with tensors whose values count
        def run(*args):
            with _disable_current_modes():
                return function(*args)

        return run

    def shapes_are_given(schedule, pipeline_stages, *args):  # the result of a vote of all ranks, torch 2.13
        for stage in pipeline_stages:
            stage._inference_mode = sys.modules["torch.distributed.pipelining.stage"].InferenceMode.STATIC

    with ExitStack() as stack:
        for owner, name, value in [
            (parallel, "local_slice", really(parallel.local_slice)),
            (DeviceMesh, "__getitem__", really(DeviceMesh.__getitem__)),
            (parallel, "lower_right_mask", lambda T, S, device: None),  # CUDA's flash kernel has it built in
            (schedules._PipelineSchedule, "_warmup_p2p", shapes_are_given),
        ]:
            stack.enter_context(mock.patch.object(owner, name, value, create=True))
        try:
            yield
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            _clear_sharding_prop_cache()  # it holds this world's groups, and would find them in the next


# ---------------------------------------------------------------- one step, measured


def gathered(stage) -> int:
    """Bytes of weights that FSDP holds whole at the moment."""
    whole = [p for p in stage.parameters() if not is_sharded_by_fsdp(p)]
    return sum({(s := local_tensor(p).untyped_storage())._cdata: s.nbytes() for p in whole}.values())


def is_sharded_by_fsdp(p) -> bool:
    return isinstance(p, DTensor) and {"fsdp", "efsdp"} & set(p.device_mesh.mesh_dim_names)


def size_of(tensors) -> int:
    local = [local_tensor(t) for t in tensors if isinstance(t, torch.Tensor)]
    return sum(t.numel() * t.element_size() for t in local)


def prepare(stages, optimizers, layout, watch_type=DryWatch) -> Counter:
    """Take one step with gradients of zero, so that the optimizer has its state; its bytes and the parameters'."""
    out, params = Counter(), [p for stage in stages for p in stage.parameters()]
    with watch_type(layout):
        for p in params:
            p.grad = torch.zeros_like(p)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    out["parameters"] = size_of(params)
    out["optimizer"] = size_of(t for optimizer in optimizers for state in optimizer.state.values() for t in state.values())
    return out


def update(stages, optimizers, layout, watch) -> Counter:
    """What a recipe does when the gradients are complete."""
    watch.updating = True
    parallel.clip_grad_norm(stages, 1.0, layout)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    if getattr(stages[0].config, "n_experts", 0):
        parallel.balance_experts(stages, layout, "bias", 1e-3)


def observe(stages, optimizers, layout, seq_len: int, n: int, watch_type=DryWatch) -> Counter:
    """Run a training step of n micro-batches (pipeline) or accumulation steps, and measure it, on any kind of tensor.

    A stage is its place on this rank. Keys, all but (flops, ..) and (moved, ..) in bytes:
    parameters, gradients, optimizer
    (activations, stage): what one micro-batch leaves for its backward
    (peak, moment): of forwards and backwards, without those activations. By moment, as each is linear in the layers, and their
        maximum is not; update: of the optimizer's step; measured: of all together
    (flops, phase), (flops, stage): of the step, and of its forwards alone
    (moved, phase, axis, op, bytes): how often
    """
    out = prepare(stages, optimizers, layout, watch_type)
    if layout.pp > 1:
        layout.local_batch_size = layout.cfg.pp_microbatch_size * n
    layout.global_batch_size = layout.local_batch_size * layout.data_ranks * (1 if layout.pp > 1 else n)
    tokens = torch.randint(0, stages[0].config.vocab_size, (layout.accumulation, layout.local_batch_size, seq_len))
    batch = SimpleNamespace(tokens=tokens, labels=tokens, positions=torch.arange(seq_len).expand_as(tokens), doc_ids=None)

    watch, before, held, peaks, place = watch_type(layout), {}, Counter(), [], {s.index: i for i, s in enumerate(stages)}
    now = "start"

    def mark(what):  # the peak since the last mark: (what was going on, bytes, micro-batches per stage that were under way)
        nonlocal now
        peaks.append((now, watch.mark(), dict(held)))
        now = what

    def enter(stage, *args):
        mark("first forward")
        if layout.pp == 1:
            held.clear()  # the backward is over
        held[place[stage.index]] += 1
        before[stage.index] = watch.live - gathered(stage), watch.flops["forward"]

    def leave(stage, *args):
        i, (live, flops) = place[stage.index], before[stage.index]
        out["activations", i] = watch.live - gathered(stage) - live
        out["flops", i] += watch.flops["forward"] - flops
        mark("head backward")

    def block_hook(which, block, args, output):
        mark(f"behind {which} forward")
        if output.requires_grad:
            output.register_hook(lambda grad: mark(f"{which} backward"))

    def ends(backward):  # of the pipeline: a whole one, or its second half
        def run(stage, *args, full_backward=True, **kwargs):
            done = backward(stage, *args, **kwargs | ({} if full_backward else {"full_backward": False}))
            mark("between")
            held[place[stage.stage_index]] -= full_backward
            return done

        return run

    with ExitStack() as stack:
        for stage in stages:
            hooks = [stage.register_forward_pre_hook(enter, prepend=True), stage.register_forward_hook(leave)]
            blocks = list(stage.blocks.values())
            for block in blocks:
                which = "first" if block is blocks[0] else "last" if block is blocks[-1] else "inner"
                hooks.append(block.register_forward_hook(partial(block_hook, which)))
            stack.callback(lambda hooks=hooks: [hook.remove() for hook in hooks])
        if layout.pp > 1:
            from torch.distributed.pipelining import PipelineStage

            for name in ("backward_one_chunk", "backward_weight_one_chunk"):
                stack.enter_context(mock.patch.object(PipelineStage, name, ends(getattr(PipelineStage, name))))
        stack.enter_context(watch)
        parallel.forward_backward(stages, batch, layout)
        mark("")
        out["gradients"] = size_of(p.grad for stage in stages for p in stage.parameters())
        update(stages, optimizers, layout, watch)
    state = out["parameters"] + out["optimizer"]
    for what, peak, under_way in peaks:
        rest = state + peak - sum(k * out["activations", i] for i, k in under_way.items())
        if "inner" not in what:  # between its neighbours in memory as well; and absent where few blocks are run
            out["peak", what] = max(rest, out.get(("peak", what), rest))
    out["update"] = state + watch.mark()
    out["measured"] = max(out["update"], *(state + peak for _, peak, _ in peaks))
    out.update({("flops", name): flops for name, flops in watch.flops.items()})
    out.update({("moved", *key): number for key, number in watch.moved.items()})
    return out


MOST_BLOCKS = 3  # of one kind that are run; more are extrapolated. Less by one: still a first and a last
MOST_MICROBATCHES = 3  # likewise


def block_kinds(stages) -> dict:
    """{(place of the stage, whether it is recomputed, its parameters' shapes): names of the blocks that are alike}"""
    kinds = {}
    for i, stage in enumerate(stages):
        for name, block in stage.blocks.items():
            shapes = tuple((n, p.shape, local_tensor(p).shape) for n, p in block.named_parameters())
            kinds.setdefault((i, isinstance(block.forward, partial), shapes), []).append(name)
    return kinds


def rank_kind(stages):
    """Equal for pipeline ranks that do the same work."""
    ends = [(s.index == 0, s.index == s.n_stages - 1) for s in stages]
    neighbours = [b.index - a.index == 1 for a, b in zip(stages, stages[1:])]
    blocks = tuple((kind, len(names)) for kind, names in block_kinds(stages).items())
    return (*ends, *neighbours, blocks)


def leave_out_blocks(stages, optimizers, less=None) -> None:
    """Keep MOST_BLOCKS of each kind of block, the first ones and the last, and of the kind `less` one fewer."""
    for kind, names in block_kinds(stages).items():
        most = min(MOST_BLOCKS, len(names)) - (kind == less)
        for name in names[most - 1 : -1]:
            del stages[kind[0]].blocks[name]
    alive = {id(p) for stage in stages for p in stage.parameters()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in alive]


def plus(a, factor, b) -> Counter:
    return Counter({key: a[key] + factor * b[key] for key in {**a, **b}})  # a | b would drop what is negative


def run_few(main, cfg, pp_rank: int, n: int, less=None) -> Counter:
    """observe() of n micro-batches or accumulation steps through few blocks, on fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with dry_world():
        stages, optimizers, layout = dry_build(main, cfg, pp_rank, fake)
        leave_out_blocks(stages, optimizers, less)
        with fake:
            return observe(stages, optimizers, layout, cfg.seq_len, n)


def measure(main, cfg, pp_rank: int, kinds: dict, n: int) -> Counter:
    """A step of n micro-batches or accumulation steps from runs with few of them, through few blocks: all blocks of a kind cost
    the same. Exact for what is linear in both; parameters, gradients and optimizer state are.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    fake, watch = FakeTensorMode(allow_non_fake_inputs=True), None
    with dry_world():  # the optimizer's step with all layers: Muon's exchanges are not linear in them
        stages, optimizers, layout = dry_build(main, cfg, pp_rank, fake)
        with fake:
            exact, watch = prepare(stages, optimizers, layout), DryWatch(layout)
            for p in (p for stage in stages for p in stage.parameters()):
                p.grad = torch.zeros_like(p)
            with watch:
                update(stages, optimizers, layout, watch)
    exact.update({("moved", *key): number for key, number in watch.moved.items()})

    results = []
    ns = [n] if n <= MOST_MICROBATCHES or cfg.pp_schedule_csv else [MOST_MICROBATCHES - 1, MOST_MICROBATCHES]
    for m in ns:
        total = few = run_few(main, cfg, pp_rank, m)
        for kind, names in kinds.items():
            if (more := len(names) - MOST_BLOCKS) > 0:
                total = plus(total, more, plus(few, -1, run_few(main, cfg, pp_rank, m, less=kind)))
        results.append(total)
    step = results[0] if len(ns) == 1 else plus(results[1], n - ns[1], plus(results[1], -1, results[0]))
    # memory does not grow with n, but for the buffers that receive from a neighbour: one per micro-batch for the whole step
    received = sum(key[4] * k for key, k in results[-1].items() if key[0] == "moved" and key[2:4] == ("pp", "recv")) // ns[-1]
    grows = {"activations": 0, "peak": received * (n - ns[-1])}
    step = {key: results[-1][key] + grows[key[0]] if key[0] in grows else value for key, value in step.items()}
    return Counter({key: value for key, value in step.items() if key[:2] != ("moved", "update")} | exact)


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


def bubble(times) -> float:
    """Share of the ranks' time in which they wait."""
    end = max(row[-1][1] for row in times)
    return 1 - sum(e - s for row in times for s, e, *_ in row) / (len(times) * end)


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
    activations: int = 0  # bytes, of all micro-batches that are under way at the worst moment
    peak: int = 0
    same_as: int | None = None  # an earlier rank that does the same work

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
    times: list  # simulate: the schedule, forward and both halves of a backward one unit each
    n_params: int
    device_bubble: float  # the bubble when every stage takes the time of its FLOPs
    mfu_bound: float
    guessed: list[str]


def plan(main, cfg) -> tuple:
    """(layout, stages of every pipeline rank, micro-batches or accumulation steps): built, nothing is run yet."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    everyone = []
    for pp_rank in range(max(1, cfg.pp)):
        with dry_world():
            stages, _, layout = dry_build(main, cfg, pp_rank, FakeTensorMode(allow_non_fake_inputs=True))
            everyone.append((stages, block_kinds(stages), rank_kind(stages)))
    return layout, everyone, layout.n_microbatches if layout.pp > 1 else layout.accumulation


def make_report(main, cfg) -> Report:
    layout, everyone, n = plan(main, cfg)
    n_stages = everyone[0][0][0].n_stages
    rows = rows_of(cfg, layout.pp, n, n_stages)
    ranks, first, guessed = [], {}, set()
    for pp_rank, (stages, kinds, kind) in enumerate(everyone):
        if kind not in first:
            first[kind] = pp_rank
            ranks.append(Rank(stages, measure(main, cfg, pp_rank, kinds, n)))
        else:
            ranks.append(Rank(stages, ranks[first[kind]].step, same_as=first[kind]))
        rank = ranks[-1]
        rank.activations = in_flight(rows[pp_rank], rank.ids, rank.step)
        rank.peak = max([rank.step["update"], *(rank.activations + b for key, b in rank.step.items() if key[0] == "peak")])
        if cfg.cpu_offload:
            rank.peak -= rank.step["parameters"] + rank.step["optimizer"]
        guessed |= {f"{MOST_BLOCKS} of {len(names)} equal layers" for names in kinds.values() if len(names) > MOST_BLOCKS}
    if n > MOST_MICROBATCHES and not cfg.pp_schedule_csv:
        guessed.add(f"{MOST_MICROBATCHES} of {n} {'micro-batches' if layout.pp > 1 else 'accumulation steps'}")
    copies = {id(w) for r in ranks for s in r.stages if (w := parallel.tied_copy(s)) is not None}
    n_params = sum(p.numel() for r in ranks for s in r.stages for p in s.parameters() if id(p) not in copies)
    owner = {i: rank for rank in ranks for i in rank.ids}

    def cost(kind, stage):
        rank = owner[stage]
        forward = rank.step["flops", rank.ids.index(stage)]
        backward = rank.flops("backward", "recompute") * forward / max(1, rank.flops("forward"))
        return {"F": forward, "B": backward}.get(kind, backward / 2) / n

    timed = simulate(rows, cost)
    useful = sum(rank.flops("forward", "backward") for rank in ranks)
    mfu_bound = useful / (layout.pp * max(row[-1][1] for row in timed))
    return Report(layout, ranks, n, simulate(rows), n_params, bubble(timed), mfu_bound, sorted(guessed))


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
        print(f"Pipeline: {order}, {report.n} micro-batches: bubble {bubble(report.times):.1%} if all stages take as long, "
              f"{report.device_bubble:.1%} with these stages' FLOPs")
    why = ["the pipeline's waiting"] * (layout.pp > 1) + [f"recomputation ({lost / whole:.1%} of the FLOPs)"] * bool(lost)
    print(f"MFU at most {report.mfu_bound:.1%}: {' and '.join(why) or 'nobody waits for a pipeline, nothing is recomputed'}; "
          "communication and kernels take the rest")
    worst = max(ranks, key=lambda r: r.peak)
    verdict = [f"{size} GB: {'fits' if worst.peak <= size * 1e9 else 'does not fit'}" for size in DEVICES]
    print(f"Peak {human(worst.peak)} on pipeline rank {ranks.index(worst)}. {', '.join(verdict)}")
    print("\nHow this was found: the recipe's own code ran under a fake process group, on tensors without memory.")
    if report.guessed:
        print(f"Run were {', '.join(report.guessed)}; the rest is linear. Parameters, gradients and optimizer state are exact.")
    print("Activations are what torch's CPU kernels keep; CUDA kernels and --compile keep less. The peak counts tensors only.")
    if cfg.cpu_offload:
        print("--cpu_offload: parameters, gradients and optimizer state are in host memory, not in the peak.")
    if cfg.ac == "budget":
        print("--ac budget is the compiler's decision: shown as --ac none.")


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
    layout, everyone, _ = plan(main, cfg)
    stages, kinds, _ = everyone[0]
    kind, names = max(kinds.items(), key=lambda item: len(item[1]))
    if len(names) < 2:
        raise ValueError("--explain compares a model with one that has a layer less: it needs two equal layers on a rank")
    block = stages[kind[0]].blocks[names[0]]
    print(f"One block of {layout}: blocks.{names[0]}, one of {len(names)} alike on the first device\n")
    lines = [["parameter", "whole", "split by", "on this device", ""]]
    shape = lambda s: " x ".join(map(str, s))  # noqa: E731
    for name, p in block.named_parameters():
        lines.append([name, shape(p.shape), placed(p), shape(local_tensor(p).shape), human(size_of([p]))])
    print(table(lines, right=False))
    n = layout.n_microbatches if cfg.pp_schedule_csv else 1
    step = plus(run_few(main, cfg, 0, n), -1, run_few(main, cfg, 0, n, less=kind))
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


# ---------------------------------------------------------------- --plot: the pipeline's schedule

COLORS = {"F": "#4c78a8", "B": "#f58518", "I": "#f58518", "W": "#54a24b", "idle": "#e6e6e6"}
MEANINGS = {"F": "forward", "B": "backward", "I": "backward, input", "W": "backward, weight", "idle": "idle"}


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


def draw(times, title: str, path: str) -> None:
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot draws with matplotlib, which is not installed: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    end, n = max(row[-1][1] for row in times), len(times)
    figure, axes = pyplot.subplots(figsize=(min(20, max(8, end / 3)), 1.6 + 0.45 * n), layout="constrained")
    axes.barh(range(n), [end] * n, height=0.9, color=COLORS["idle"])
    shades = max(stage for row in times for *_, stage, _ in row) >= n  # several stages per rank: later ones are paler
    for rank, a, b, kind, stage, m in halves(times):
        axes.barh(rank, b - a, left=a, height=0.9, color=COLORS[kind], edgecolor="white", linewidth=0.6,
                  alpha=0.6 if shades and stage >= n else 1)
        if end <= 120:
            axes.text((a + b) / 2, rank, m, ha="center", va="center", fontsize=7, color="white", fontweight="bold")
    patches = [matplotlib.patches.Patch(color=COLORS[k], label=MEANINGS[k]) for k in ("F", "I", "W", "idle")]
    if shades:
        patches.append(matplotlib.patches.Patch(color=COLORS["F"], alpha=0.6, label="paler: a rank's later stage"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    axes.set(xlim=(0, end), xlabel="time (one forward = 1); the numbers are micro-batches")
    axes.set(yticks=range(n), ylabel="pipeline rank", title=title)
    axes.invert_yaxis()
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def plot(main, cfg) -> None:
    layout, everyone, n = plan(main, cfg)
    if layout.pp == 1:
        raise ValueError("--plot draws a pipeline's schedule: use --pp 2 or more")
    times = simulate(rows_of(cfg, layout.pp, n, everyone[0][0][0].n_stages))
    title = f"{cfg.pp_schedule_csv or cfg.pp_schedule}, pp {layout.pp}, {n} micro-batches: bubble {bubble(times):.1%}"
    print(f"{title}\n{text_picture(times)}\nF forward, I backward of the input, W backward of the weights, . idle")
    path = os.path.join(cfg.out, "pipeline.png")
    draw(times, title, path)
    print(path)


def dry_run(main, cfg) -> int:
    """--dry_run, --explain and --plot of a recipe; returns the exit status."""
    if "RANK" in os.environ:
        raise ValueError("--dry_run, --explain and --plot run in one process: use python, not torchrun")
    if cfg.dry_run:
        print_report(cfg, make_report(main, cfg))
    if cfg.explain:
        explain(main, cfg)
    if cfg.plot:
        plot(main, cfg)
    return 0


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
