"""--dry_run: the costs of a layout, before you rent machines.

The recipe's own parallelisation code runs under a fake process group of any size, on tensors
without memory. The dry run counts bytes, collectives, FLOPs and the pipeline's bubble, for the
first device of each pipeline rank. --plot and --explain start from the same numbers
(layout_plots.py and explain.py).
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from types import FunctionType, SimpleNamespace
from typing import Any, get_args
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining import stage as stage_module
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import distributed.layout
import parallel
from distributed import checks, refusals
from distributed.experts import PARTS, balance_experts
from distributed.layout import AXES, Layout, all_blocks, local_tensor
from distributed.pipeline import ZERO_BUBBLE, Schedule, n_microbatches
from flags.progress import Progress
from models.loss import CHUNK_ELEMENTS
from tools.reports.costs import Watch, totals, unwatched
from tools.reports.schedule import bubble, duration, in_flight, rows_of, simulate
from tools.reports.stop_main import do_nothing, stop_main
from training import muon
from training.peak_flops import peak_flops


class DryWatch(Watch):
    """Watch for fake tensors, without values: if the program asks for a value, all experts have
    equally many tokens."""

    def __init__(self, layout):
        super().__init__(layout)
        self.rows = 1
        self.pieces = 1

    def run(self, func, *args, **kwargs):
        # models.moe.Balance.count
        if func is torch.ops.aten.scatter_add_.default and args[0].dtype == torch.int64:
            self.rows = args[2].numel()
        is_sum = func is torch.ops.aten.sum.dim_IntList
        if is_sum and args[0].dim() == 4 and args[0].dtype == torch.int64:
            # exchange_tokens: (2, ep, parts, experts)
            self.pieces = args[0].shape[1] * args[0].shape[2]
        if func is torch.ops.aten._local_scalar_dense.default and args[0].dtype == torch.int64:
            # tokens to and from each ep rank, of a part of its experts
            return self.rows // self.pieces
        # what the division leaves
        if func is torch.ops.aten.split_with_sizes.default and sum(args[1]) < len(args[0]):
            args = args[0], [*args[1][:-1], len(args[0]) - sum(args[1][:-1])]
        if func is torch.ops.aten.repeat_interleave.Tensor:  # the expert of each token
            return args[0].new_empty(kwargs["output_size"])
        # ids that grpo.py never samples: all
        if func is torch.ops.aten.index.Tensor and args[1][0].dtype == torch.bool:
            return args[0].clone()
        # torch's own rule for the shape accepts bf16 only
        if func is torch.ops.aten._grouped_mm.default:
            x = args[0]
            w = args[1]
            if w.dim() == 3:
                return x.new_empty(x.shape[0], w.shape[-1])
            if "offs" in kwargs:
                experts = kwargs["offs"]
            else:
                experts = args[2]
            return x.new_empty(len(experts), x.shape[0], w.shape[1])
        return func(*args, **kwargs)

    def device_of(self, tensor) -> torch.device:
        if isinstance(tensor, FakeTensor):
            return tensor.fake_device  # the same answer without a further dispatch
        return super().device_of(tensor)


# ------------------------------------------------------ building the recipe's model without devices
def build(main: FunctionType, cfg: Any, connect: Callable, **stand_ins: Any) -> tuple:
    """(stages, optimizers, layout) from the recipe's own main, stopped at the first call of
    Checkpoints.

    Functions that touch data, disk or other processes are replaced by stand-ins; everything else is
    the code of main and of parallel.py. stand_ins: more replacements, by their names in the recipe
    or in parallel.py.
    """
    layouts = []

    def make_mesh(layout, usual=parallel.make_mesh):
        layouts.append(usual(layout))
        return layouts[0]

    data = SimpleNamespace(
        vocab_size=0,
        n_val_samples=1,
        fingerprint={},
        tokenizer_file=None,
        learnt_ends=lambda: [],
    )
    # check_groups, of forks/ft.py, and find_server, of grpo.py, would ask a server
    stand_ins |= dict.fromkeys(
        (
            "check_groups",
            "find_server",
            "source_tokenizer",
            "StopSignal",
            "set_timeouts",
            "warm_up",
        ),
        do_nothing,
    )
    stand_ins |= dict(open_data=lambda *args, **kwargs: data, connect=connect, make_mesh=make_mesh)
    in_parallel = {name: value for name, value in stand_ins.items() if hasattr(parallel, name)}
    with mock.patch.multiple(parallel, **in_parallel):
        _, made = stop_main(
            main, cfg, "Checkpoints", **stand_ins, loaded_later=lambda cfg, out: lambda fqn: False
        )
    stages = made["modules"]
    (layout,) = layouts
    if layout.pp == 1:
        # as a pipeline's stages have
        stages[0].index = 0
        stages[0].n_stages = 1
    return stages, made["optimizer"], layout


# Schedules that a dry run replaces: the same collectives in a simpler order, and 1 or 2
# micro-batches suffice
SIMPLE_ORDER = {"1F1B": "GPipe", "DualPipeV": "ZBVZeroBubble"}


@contextmanager
def dry_world(main: FunctionType, cfg: Any, pp_rank: int) -> Iterator[tuple]:
    """(stages, optimizers, layout) of a pipeline rank's first device, in a world of fake processes
    and fake tensors.

    Left out: the handshakes of a start, masks that only CPU kernels need, random initial weights.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    fake = FakeTensorMode(allow_non_fake_inputs=True)
    world_size = math.prod(max(1, getattr(cfg, axis)) for axis in AXES)
    rank = pp_rank * (world_size // max(1, cfg.pp))

    def connect(layout, *args, **kwargs):
        # compiled or not, the same bytes travel; the order of the micro-batches is not run but
        # simulated (schedule.py)
        order = SIMPLE_ORDER.get(layout.schedule, layout.schedule)
        memory = int(DEVICES[0] * 1e9)
        if cfg.device == "cpu":
            memory = 0
        dtype = torch.bfloat16
        if cfg.compute_dtype == "float32":
            dtype = torch.float32
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        return replace(layout, schedule=order, memory=memory, compute_dtype=dtype)

    def not_async(stage, layout, cfg, usual=parallel.tensor_parallel):
        usual(stage, layout, replace(cfg, async_tp=False))

    def init_weights(stage, *args):
        with fake:
            stage.to_empty(device="cpu")

    # all ranks vote on it, since torch 2.12
    def shapes_are_given(schedule, pipeline_stages, *args):
        for stage in pipeline_stages:
            stage._inference_mode = stage_module.InferenceMode.STATIC

    with ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ, RANK=str(rank), WORLD_SIZE=str(world_size)))
        # fake tensors are on the CPU, but the loss must take chunks as large as on a GPU, and so on
        if cfg.device != "cpu":
            for table in CHUNK_ELEMENTS, PARTS:
                stack.enter_context(mock.patch.dict(table, cpu=table["cuda"]))
        local_slice = unwatched(distributed.layout.local_slice)
        replaced = [
            (parallel, "local_slice", local_slice),
            (muon, "local_slice", local_slice),
            (DeviceMesh, "__getitem__", unwatched(DeviceMesh.__getitem__)),
            (checks, "check_memory", do_nothing),
            (parallel, "lower_right_mask", do_nothing),  # CUDA's flash kernel has the mask built in
        ]
        if hasattr(stage_module, "InferenceMode"):
            replaced.append((schedules._PipelineSchedule, "_warmup_p2p", shapes_are_given))
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        try:
            on_gpus = partial(refusals.check_layout, on_cuda=True)
            built = build(
                main,
                replace(cfg),
                connect,
                init_weights=init_weights,
                check_layout=on_gpus,
                compile_blocks=do_nothing,
                tensor_parallel=not_async,
            )
            if cfg.compile:
                forget_silu(built[0])
            with fake:
                yield built
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            # else the next world would find the process groups of the last
            _clear_sharding_prop_cache()


def forget_silu(stages: Sequence[nn.Module]) -> None:
    """Drop the results of silu from the activations of compiled blocks: the compiler recomputes
    silu from its input, and keeps everything else that eager code keeps. Blocks under activation
    checkpointing keep neither, so they are left alone."""

    def pack(x):
        is_silu = type(x.grad_fn).__name__ == "SiluBackward0"
        if is_silu:
            return partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=x.device)
        return x

    def unpack(kept):
        if isinstance(kept, partial):
            return kept()
        return kept

    def without_silu(compute):
        def run(*args, **kwargs):
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                return compute(*args, **kwargs)

        return run

    for stage in stages:
        for block in all_blocks(stage).values():
            if isinstance(block.forward, partial):
                continue
            if hasattr(block, "moe"):
                block.moe.experts.compute = without_silu(block.moe.experts.compute)
            else:
                block.forward = without_silu(block.forward)


# ---------------------------------------------------------------- one step, measured
def size_of(tensors: Iterable[Any]) -> int:
    return sum(local_tensor(t).nbytes for t in tensors if isinstance(t, torch.Tensor))


def optimizer_state(optimizers: list[torch.optim.Optimizer]) -> int:
    total = 0
    for optimizer in optimizers:
        for state in optimizer.state.values():
            total += size_of(state.values())
    return total


@torch.no_grad()
def storages_of(parameters: Iterable[torch.Tensor]) -> dict:
    """{key of a storage: its bytes} of this rank's parts."""
    storages = [local_tensor(p).untyped_storage() for p in parameters]
    return {s._cdata: s.nbytes() for s in storages}


def gathered_bytes(stage: nn.Module, own: dict) -> int:
    """Bytes of gathered or cast weights at the moment: storages of the stage's parameters other
    than those of `own`, the parameters between steps. A cast to a parameter's own dtype shares the
    parameter's storage."""
    return sum(size for key, size in storages_of(stage.parameters()).items() if key not in own)


@contextmanager
def stages_followed(
    stages: Sequence[nn.Module], layout: Layout, watch: Watch, out: Counter
) -> Iterator[tuple]:
    """Follow each micro-batch through the stages of a rank, counted from 0.

    Writes (activations, stage) and (flops, stage) into out: see observe. Yields (peaks, mark):
    mark() appends to peaks the memory's peak since the last mark, and how many micro-batches of
    each stage were between forward and end of backward."""
    before = {}
    under_way = Counter()
    peaks = []
    place = {s.index: i for i, s in enumerate(stages)}
    own = storages_of(p for stage in stages for p in stage.parameters())

    def mark():
        peaks.append((watch.take_peak(), dict(under_way)))

    def enter(stage, *args):
        mark()
        if layout.pp == 1:
            under_way.clear()  # without a pipeline, the backward of the last micro-batch is over
        under_way[place[stage.index]] += 1
        watch.outside = "forward"
        before[stage.index] = watch.live - gathered_bytes(stage, own), watch.flops["forward"]

    def leave(stage, *args):
        i = place[stage.index]
        live, flops = before[stage.index]
        out["activations", i] = watch.live - gathered_bytes(stage, own) - live
        out["flops", i] += watch.flops["forward"] - flops

    # a pipeline's whole backward, or the second half: both free the activations
    def marked(backward):
        def run(stage, *args, full_backward=True, **kwargs):
            watch.outside = "backward"  # FSDP reduces the gradients after autograd has returned
            if not full_backward:
                kwargs["full_backward"] = False
            done = backward(stage, *args, **kwargs)
            mark()
            under_way[place[stage.stage_index]] -= full_backward
            return done

        return run

    with ExitStack() as stack:
        for stage in stages:
            stack.callback(stage.register_forward_pre_hook(enter, prepend=True).remove)
            stack.callback(stage.register_forward_hook(leave).remove)
        if layout.pp > 1:
            for name in ("backward_one_chunk", "backward_weight_one_chunk"):
                backward = marked(getattr(PipelineStage, name))
                stack.enter_context(mock.patch.object(PipelineStage, name, backward))
        yield peaks, mark


def observe(stages, optimizers, layout: Layout, seq_len: int, n: int, watch: Watch) -> Counter:
    """Run a training step of n micro-batches pipeline or accumulation steps, and measure memory,
    FLOPs and collectives.

    Memory is right only in a model's first step: in later steps FSDP's buffers already exist, and
    are not counted.
    stage: place of a stage on the rank, from 0. Keys of the result, in bytes except for flops and
    moved:
    parameters, gradients, optimizer
    (activations, stage): kept by one micro-batch for the backward
    peak: the worst moment, without activations; update: the optimizer's step; measured: the worst
    of everything together
    (flops, phase): of the step; (flops, stage): of the forwards alone
    (moved, phase, axis, op, bytes): number of calls
    """
    if layout.pp > 1:
        local = layout.microbatch_size * n
    else:
        local = layout.local_batch_size
    few = local * layout.data_ranks * (1 if layout.pp > 1 else n)
    layout = replace(layout, local_batch_size=local, global_batch_size=few)
    tokens = torch.randint(
        0, stages[0].config.vocab_size, (layout.accumulation, layout.local_batch_size, seq_len)
    )
    batch = SimpleNamespace(
        tokens=tokens,
        labels=tokens,
        positions=torch.arange(seq_len).expand_as(tokens),
        doc_ids=None,
    )
    params = [p for stage in stages for p in stage.parameters()]
    out = Counter(parameters=size_of(params))
    had = optimizer_state(optimizers)
    with stages_followed(stages, layout, watch, out) as (peaks, mark), watch:
        parallel.forward_backward(stages, batch, layout)
        mark()
        out["gradients"] = size_of(p.grad for p in params)
        watch.outside = "update"
        parallel.clip_grad_norm(stages, 1.0, layout)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if layout.has_experts:
            balance_experts(stages, layout, "bias", 1e-3)
    out["optimizer"] = optimizer_state(optimizers)
    state = out["parameters"] + out["optimizer"]
    # the first step makes the optimizer's state
    out["update"] = out["parameters"] + had + watch.take_peak()
    without = []  # the peaks, without activations
    for peak, under_way in peaks:
        without.append(peak - sum(k * out["activations", i] for i, k in under_way.items()))
    out["peak"] = state + max(without)
    out["measured"] = max(out["update"], *(state + peak for peak, _ in peaks))
    out.update({("flops", name): flops for name, flops in watch.flops.items()})
    out.update({("moved", *key): number for key, number in watch.moved.items()})
    return out


def add_scaled(a: Counter, factor: int, b: Counter) -> Counter:
    # Counter's own + and - drop negative numbers
    return Counter({key: a[key] + factor * b[key] for key in {**a, **b}})


def measure(
    stages: Sequence[nn.Module],
    optimizers: list[torch.optim.Optimizer],
    layout: Layout,
    seq_len: int,
    n: int,
) -> Counter:
    """A step of n micro-batches or accumulation steps, extrapolated from a step of 2 and a step of
    1: each further micro-batch costs the difference. Zero-bubble schedules do not run with 1, so 3
    take the place of 1."""
    if n <= 2 or layout.schedule not in get_args(Schedule):
        return observe(stages, optimizers, layout, seq_len, n, DryWatch(layout))
    other = 1
    if layout.pp > 1 and layout.schedule in ZERO_BUBBLE:
        other = 3
    two = observe(stages, optimizers, layout, seq_len, 2, DryWatch(layout))
    also = observe(stages, optimizers, layout, seq_len, other, DryWatch(layout))
    if other == 1:
        each = add_scaled(two, -1, also)
    else:
        each = add_scaled(also, -1, two)
    step = add_scaled(two, n - 2, each)
    # memory does not grow with n, but for the buffers that receive from a neighbour: one per
    # micro-batch for the whole step
    received = 0
    for key, number in two.items():
        if key[0] == "moved" and key[2:4] == ("pp", "recv"):
            received += key[4] * number
    step = Counter(step)
    for key in two:
        if key[0] == "activations":
            step[key] = two[key]
    step["update"] = two["update"]
    step["measured"] = two["measured"]
    step["peak"] = two["peak"] + received // 2 * (n - 2)
    return step


def rank_kind(stages) -> tuple:
    """A tuple, equal for pipeline ranks that do the same work."""
    # nothing travels between neighbours on one rank
    kind = [b.index - a.index == 1 for a, b in pairwise(stages)]
    for stage in stages:
        recomputed = tuple(isinstance(block.forward, partial) for block in stage.blocks.values())
        shapes = tuple((p.shape, local_tensor(p).shape) for p in stage.parameters())
        kind.append((stage.index == 0, stage.index == stage.n_stages - 1, recomputed, shapes))
    return tuple(kind)


# ---------------------------------------------------------------- --dry_run: the report
# sizes in GB of 10^9 bytes. Devices have as many GiB; driver, NCCL and allocator take the rest
DEVICES = (80, 141, 192)


@dataclass
class Rank:
    """One pipeline rank's first device, in one step."""

    stages: list
    ids: list[int]  # of the stages
    step: Counter  # see observe
    same_as: int  # the first rank with the same work
    # bytes of all micro-batches between their forward and backward, at the worst moment
    activations: int = 0
    peak: int = 0

    def flops(self, *phases) -> int:
        return sum(self.step["flops", name] for name in phases)


@dataclass
class Report:
    layout: object
    ranks: list[Rank]
    n: int  # micro-batches, or accumulation steps
    rows: list  # rows_of: the schedule
    n_params: int
    cost: Callable  # (kind, stage) -> FLOPs of a forward, a backward, or half of one
    causal: float  # share of the counted FLOPs of attention that a causal kernel needs

    @property
    def mfu_bound(self) -> float:
        """FLOPs of forward and backward, without recomputation, as a share of all that the devices
        could do meanwhile."""
        useful = sum(rank.flops("forward", "backward") for rank in self.ranks)
        return useful / (self.layout.pp * duration(simulate(self.rows, self.cost)))

    @property
    def least_flops(self) -> float:
        """FLOPs of one device from the first forward to the last backward, waiting included."""
        attention = max(
            r.flops("attention") / r.flops("forward", "backward", "recompute") for r in self.ranks
        )
        return (1 - attention * (1 - self.causal)) * duration(simulate(self.rows, self.cost))


def make_report(main: FunctionType, cfg: Any) -> Report:
    ranks = []
    first = {}
    with Progress("dry run", max(1, cfg.pp), "pipeline ranks") as progress:
        for pp_rank in range(max(1, cfg.pp)):
            with dry_world(main, cfg, pp_rank) as (stages, optimizers, layout):
                if layout.pp > 1:
                    n = n_microbatches(layout)
                else:
                    n = layout.accumulation
                same = first.setdefault(rank_kind(stages), pp_rank)
                if same < pp_rank:
                    step = ranks[same].step
                else:
                    step = measure(stages, optimizers, layout, cfg.seq_len, n)
                ranks.append(Rank(stages, [stage.index for stage in stages], step, same))
            progress()
    rows = rows_of(cfg, layout.pp, n, stages[0].n_stages)
    for row, rank in zip(rows, ranks, strict=True):
        rank.activations = in_flight(row, rank.ids, rank.step)
        rank.peak = max(rank.step["update"], rank.activations + rank.step["peak"])
        if cfg.cpu_offload:
            rank.peak -= rank.step["parameters"] + rank.step["optimizer"]
    with torch.device("meta"):
        model = type(stages[0])(stages[0].config)  # the whole model, without any parallelism
    owner = {i: rank for rank in ranks for i in rank.ids}

    def cost(kind, stage):
        rank = owner[stage]
        forward = rank.step["flops", rank.ids.index(stage)]
        backward = rank.flops("backward", "recompute") * forward / max(1, rank.flops("forward"))
        return {"F": forward, "B": backward}.get(kind, backward / 2) / n

    # a full square is counted; with gathered keys and no window, only those up to the end of each
    # of 2 cp chunks
    windows = any(getattr(model.config, name, None) for name in ("sliding_window", "chunk_size"))
    chunks = layout.cp > 1 and cfg.cp_method == "allgather" and not windows
    causal = 0.5
    if chunks:
        causal = 2 * layout.cp / (2 * layout.cp + 1)
    return Report(layout, ranks, n, rows, sum(p.numel() for p in model.parameters()), cost, causal)


def table(rows: list[list], right: bool = True) -> str:
    """Text with columns as wide as the widest cell. right: align all columns but the first to the
    right."""
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = []
        for cell, width in zip(row, widths, strict=True):
            if right and cells:
                cells.append(str(cell).rjust(width))
            else:
                cells.append(str(cell).ljust(width))
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def format_bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:.3g} TiB"


def print_report(cfg: Any, report: Report, machine: str) -> None:
    layout = report.layout
    devices = "devices"
    if layout.world_size == 1:
        devices = "device"
    print(
        f"dry run: {report.n_params:,} parameters | {layout} = {layout.world_size:,} "
        f"{devices} | {str(layout.compute_dtype)[6:]} compute | "
        f"{layout.global_batch_size} sequences x {cfg.seq_len} tokens per step"
    )
    print(
        "\nThe first device of each pipeline rank; the peak fits "
        f"({' / '.join(map(str, DEVICES))} GB) or does not:\n"
    )
    print(table(memory_rows(report.ranks)))
    print(
        "\nCollectives of one step: number and bytes (of the largest tensor of each, summed), by "
        "axis:\n"
    )
    lines = collective_rows(report.ranks)
    if len(lines) > 1:
        print(table(lines))
    else:
        print("none")
    print()
    print_bounds(cfg, report, machine)
    print_peak(cfg, report)


def say_fits(peak: float) -> str:
    """yes or no for each size of DEVICES."""
    words = []
    for size in DEVICES:
        if peak <= size * 1e9:
            words.append("yes")
        else:
            words.append("no")
    return " / ".join(words)


def memory_rows(ranks: list[Rank]) -> list[list]:
    """Header and a row per pipeline rank: bytes of its first device, and its FLOPs."""
    lines = [
        ["pp rank", "layers", "parameters", "gradients", "optimizer", "activations"]
        + ["peak", "fits", "TFLOPs/step"]
    ]
    for i, rank in enumerate(ranks):
        sizes = [
            rank.step["parameters"],
            rank.step["gradients"],
            rank.step["optimizer"],
            rank.activations,
            rank.peak,
        ]
        tera = rank.flops("forward", "backward", "recompute") / 1e12
        n_layers = sum(len(s.blocks) for s in rank.stages)
        lines.append([i, n_layers, *map(format_bytes, sizes), say_fits(rank.peak), f"{tera:,.3g}"])
    return lines


def collective_rows(ranks: list[Rank]) -> list[list[str]]:
    """Header and a row per axis and operation; a column for the ranks with the same work."""
    head = ["axis", "operation"]
    columns = []
    for i in sorted({rank.same_as for rank in ranks}):
        alike = [str(j) for j, rank in enumerate(ranks) if rank.same_as == i]
        head.append(f"pp rank {', '.join(alike)}")
        moved = {key[1:]: n for key, n in ranks[i].step.items() if key[0] == "moved"}
        columns.append(totals(moved))
    rows = [head]
    for key in sorted(set().union(*columns)):
        row = [*key]
        for column in columns:
            number, size = column.get(key, (0, 0))
            cell = "-"
            if number:
                cell = f"{number:,} x, {format_bytes(size)}"
            row.append(cell)
        rows.append(row)
    return rows


def print_bounds(cfg: Any, report: Report, machine: str) -> None:
    """What the pipeline, recomputation and arithmetic leave of the peak."""
    layout = report.layout
    ranks = report.ranks
    whole = sum(r.flops("forward", "backward", "recompute") for r in ranks)
    lost = sum(r.flops("recompute") for r in ranks)
    why = []
    if layout.pp > 1:
        why.append("the pipeline's waiting")
        order = cfg.pp_schedule_csv or cfg.pp_schedule
        print(
            f"Pipeline: {order}, {report.n} micro-batches: bubble "
            f"{bubble(simulate(report.rows)):.1%} if all stages take as "
            f"long, {bubble(simulate(report.rows, report.cost)):.1%} with these stages' FLOPs"
        )
    if ranks[0].stages[0].reduces_always:
        print(
            f"Gradients are reduced after each micro-batch, as on devices of {DEVICES[0]} GB: "
            "whole, they take too much"
        )
    if lost:
        why.append(f"recomputation ({lost / whole:.1%} of the FLOPs)")
    print(
        f"MFU at most {report.mfu_bound:.1%}: "
        f"{' and '.join(why) or 'nobody waits for a pipeline, nothing is recomputed'}; "
        "communication and kernels take the rest"
    )
    print(
        f"At the peak of {machine}, {peak_flops(machine) / 1e12:.0f} TFLOP/s in bf16, a step "
        "takes at least "
        f"{report.least_flops / peak_flops(machine):.3g} s: a bound by arithmetic and the "
        "pipeline alone, with causal "
        "attention at half of its FLOPs; not a prediction"
    )


def gathered_again(report: Report) -> tuple[int, int]:
    """(number, bytes) of the all-gathers of weights in the backwards of a step, on the first device:
    those that --reshard_after_forward never saves, by keeping the weights of the forward."""
    number = 0
    size = 0
    for key, count in report.ranks[0].step.items():
        if key[0] != "moved" or key[3] != "all_gather" or key[2] not in ("fsdp", "efsdp"):
            continue
        if key[1] in ("backward", "recompute"):
            number += count
            size += count * key[4]
    return number, size


def print_peak(cfg: Any, report: Report) -> None:
    """The rank with the highest peak, and what the numbers leave out."""
    worst = max(report.ranks, key=lambda r: r.peak)
    verdict = []
    for size in DEVICES:
        if worst.peak <= size * 1e9:
            verdict.append(f"{size} GB: fits")
        else:
            verdict.append(f"{size} GB: does not fit")
    place = report.ranks.index(worst)
    print(f"Peak {format_bytes(worst.peak)} on pipeline rank {place}. {', '.join(verdict)}")
    number, size = gathered_again(report)
    limit = DEVICES[0]
    kept = size // report.n  # of all blocks at once: each micro-batch gathers them
    if number and worst.peak + kept <= limit * 1e9:
        print(
            f"--reshard_after_forward never fits {limit} GB too: it saves {number:,} all-gathers "
            f"({format_bytes(size)}) per step, for at most {format_bytes(kept)} more memory, a peak "
            f"of {format_bytes(worst.peak + kept)}"
        )
    print(
        "\nThe peak is more than the columns, and less than their sum: docs/parallelism.md says "
        "what is counted, and how."
    )
    if cfg.cpu_offload:
        print(
            "--cpu_offload: parameters, gradients and optimizer state are in host memory, not in "
            "the peak."
        )
    if cfg.ac == "budget":
        print("--ac budget is the compiler's decision: shown as --ac none.")
    if cfg.doc_mask:
        print(
            "--doc_mask: shown without. The mask saves FLOPs of attention, and changes no other "
            "number."
        )
