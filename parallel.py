"""Everything that makes one model run on many devices: start-up, mesh, TP, CP, PP, FSDP2, and the sums that keep it exact.

One process drives one device. The processes form a grid with one named axis per kind of parallelism, outermost first:

    pp            pipeline: each rank holds some layers; activations travel between neighbours
    dp_replicate  copies of the model; gradients are all-reduced between them
    dp_shard      FSDP: parameters, gradients and optimizer state are sharded; all-gathered when needed
    cp            context: each rank holds a part of every sequence; FSDP shards over cp as well
    tp            tensor: each rank holds a part of every matrix, and between blocks a part of the sequence

Whatever the grid, the model trained is the same, because of five rules: the same weights (init_weights), the same data
(data.py), the same loss (count_tokens, forward_backward), the same gradient norm (clip_grad_norm), the same code path
(shard wraps the model even on one device, unless that computes in float32).
"""
import copy
import dataclasses
import datetime
import fnmatch
import hashlib
import logging
import math
import os
import re
import shlex
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections import Counter
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from config import GPU, Need, flag, no_effect, usage_error
from models.attention import causal_attention, lower_right_mask, sdpa
from models.loss import IGNORE, linear_cross_entropy, softmax_loss

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
Schedule = Literal[
    "GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"
]
ONE_STAGE_PER_RANK = ("GPipe", "1F1B")
ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # rank r holds stages r and last-r: the pipeline goes down and comes back
Reshard = Literal["default", "always", "never"]

# What flags need to have an effect, see config.py; c is what facts() knows
TP = Need("without --tp 2 or more", lambda c: c.tp > 1)
CP = Need("without --cp 2 or more", lambda c: c.cp > 1)
PIPELINE = Need("without --pp 2 or more", lambda c: c.pp > 1)
NO_CSV = Need("with --pp_schedule_csv, which says it all", lambda c: not c.pp_schedule_csv)
NO_FQNS = Need("with --pp_stage_fqns, which says it all", lambda c: not c.pp_stage_fqns)
EXPERTS = Need("without experts, and this flavor has none", lambda c: getattr(c, "n_experts", 0))
AC_SELECTIVE = Need("without --ac selective", lambda c: c.ac == "selective")
AC_BUDGET = Need("without --ac budget", lambda c: c.ac == "budget")
FLOAT8 = Need("without --float8", lambda c: c.float8 != "off")
FLOAT8_TENSORWISE = Need("without --float8 tensorwise", lambda c: c.float8 == "tensorwise")
FLOAT8_EXPERTS = Need("without --float8 rowwise or mxfp8", lambda c: c.float8 in ("rowwise", "mxfp8"))
# kernels to choose from exist for bf16 only, and the masks of documents and of gathered keys have one kernel each
KERNELS = [GPU, Need("in float32", lambda c: c.dtype != torch.float32),
           Need("with --cp_method allgather", lambda c: c.cp == 1 or c.cp_method != "allgather"),
           Need("with --doc_mask", lambda c: not getattr(c, "doc_mask", False))]
ASYNC_TP = Need("without CUDA, --compile and --tp 2 or more", lambda c: c.on_cuda and c.compile and c.tp > 1)
WRAPPED = Need("in one process that computes in float32: nothing is gathered", lambda c: c.world_size > 1 or c.cpu_offload
               or c.float8_all_gather or c.dtype != torch.float32 or "bfloat16" in (c.param_dtype, c.reduce_dtype))
NCCL = Need("without NCCL, so without GPUs", lambda c: c.on_cuda)
PLAN = Need("without --plan", lambda c: c.plan)


@dataclass(kw_only=True)
class ParallelConfig:
    dp_replicate: int = 1  # copies of the (sharded) model, gradients all-reduced between them: HSDP, or DDP with dp_shard 1
    dp_shard: int = -1  # ranks that share one copy of parameters, gradients, optimizer state (FSDP2); -1 = what is left
    tp: int = 1  # tensor parallelism with sequence parallelism: every matrix is split over this many ranks
    pp: int = 1  # pipeline parallelism: the layers are split over this many ranks
    cp: int = 1  # context parallelism: every sequence is split over this many ranks
    ep: int = flag(1, EXPERTS)  # expert parallelism: the experts are split over this many of the dp_shard x cp x tp ranks
    etp: int = flag(1, EXPERTS)  # 1: tp ranks hold whole experts (ep may borrow tp); tp: tp ranks split every expert
    reshard_after_forward: Reshard = flag("default", WRAPPED)  # free gathered weights after the forward; default: unless pp
    cpu_offload: bool = False  # keep parameters, gradients and optimizer state in host memory (slow, small)
    loss_parallel: bool = flag(True, TP)  # split the loss over the vocabulary; off = over the sequence, gathering the head
    async_tp: bool = flag(False, ASYNC_TP)  # overlap tp's communication with its matmuls
    pp_schedule: Schedule = flag("1F1B", PIPELINE, NO_CSV)  # order of the micro-batches' forwards and backwards
    pp_schedule_csv: str = flag("", PIPELINE)  # a file: one row per rank, cells like 0F0,0B0 (stage, action, micro-batch)
    pp_microbatch_size: int = flag(1, PIPELINE)  # sequences per micro-batch
    pp_layers_per_stage: int | None = flag(None, PIPELINE, NO_CSV, NO_FQNS)  # none = one or two stages per rank, as needed
    pp_first_stage_less_layers: int = flag(1, PIPELINE, NO_FQNS)  # the embedding counts as so many, to balance stages
    pp_last_stage_less_layers: int = flag(1, PIPELINE, NO_FQNS)  # the head and the loss count as so many layers
    pp_stage_fqns: str = flag("", PIPELINE)  # explicit split, stages by ';': "tok_embeddings,blocks.0;blocks.1,norm,head"
    cp_method: Literal["allgather", "alltoall"] = flag("allgather", CP)  # gather keys and values, or trade sequence for heads
    attention: Literal["auto", "flash", "cudnn"] = flag("auto", *KERNELS)  # kernel; auto: both race, on this run's shapes
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"  # of matmuls and activations; auto = bfloat16 where native
    param_dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of the parameters that the optimizer updates
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"  # dtype in which gradients are summed over ranks
    ac: Literal["none", "full", "selective", "op", "budget"] = "none"  # what the backward recomputes of a block
    ac_every: int = flag(2, AC_SELECTIVE)  # checkpoint every k-th block
    ac_budget: float = flag(0.5, AC_BUDGET)  # share of the activation memory to keep: 0 = recompute all, 1 = keep all
    compile: bool = False  # torch.compile each block
    float8: Literal["off", "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "nvfp4"] = "off"  # blocks' matmuls (torchao)
    float8_experts: bool = flag(False, FLOAT8_EXPERTS, EXPERTS)  # the experts' grouped matmuls as well
    float8_filter: list[str] = flag([], FLOAT8)  # linears to leave alone: parts of names, like attn.wk,ffn.w2
    float8_all_gather: bool = flag(False, FLOAT8_TENSORWISE, GPU)  # FSDP gathers the weights in float8, half the bytes
    dry_run: bool = False  # no device, no launcher: report memory, collectives, FLOPs and bubble of this layout
    plan: bool = False  # predict tokens/s and MFU of this layout on --machine, with the error of such predictions
    machine: Literal["H100", "H200", "B200"] = flag("H100", PLAN)  # the device, with its FLOP/s and bandwidths
    nvlink_gb_s: float = flag(0.0, PLAN)  # GB/s per device and direction inside a node; 0 = the machine's
    network_gb_s: float = flag(0.0, PLAN)  # GB/s per device and direction between nodes; 0 = the machine's
    devices_per_node: int = flag(0, PLAN)  # devices that NVLink connects; 0 = the machine's
    explain: bool = False  # one page on one block: how each parameter is placed, and what travels when, and why
    check_parity: bool = False  # train 3 steps on one process and on this layout, in fp32, and compare; start it with python
    flight_recorder: bool = flag(False, NCCL)  # when a collective times out, every rank writes its last ones to <out>/trace
    deterministic: bool = False  # bitwise reproducible kernels, slower on GPUs
    optimizer_in_backward: bool = False  # update each weight when its gradient is there and free it: less memory, no clipping
    init_timeout_s: int = 300  # a collective that waits longer before or in the first step ends the run
    train_timeout_s: int = 100  # the same after the first step: everything is compiled and connected


# ---------------------------------------------------------------- layout: the numbers, checked before anything is built


@dataclass
class Layout:
    """The degrees of all axes, and what follows from them; `connect` adds the device, the process groups and the mesh."""

    cfg: ParallelConfig
    degrees: dict[str, int]
    world_size: int
    local_batch_size: int  # sequences that one data rank runs per forward
    global_batch_size: int  # sequences per optimizer step, over all data ranks
    device: torch.device = torch.device("cpu")
    compute_dtype: torch.dtype = torch.float32
    rank: int = 0
    mtp: bool = False  # the model has multi-token prediction
    mesh: DeviceMesh | None = None  # pp, dp_replicate, fsdp (= dp_shard x cp), tp
    axes: DeviceMesh | None = None  # the same ranks with all five axes
    experts: DeviceMesh | None = None  # MoE: the same ranks as pp, dp_replicate, efsdp, ep, etp
    schedules: dict = field(default_factory=dict)  # pipeline schedules by batch shape
    loss_denom: Tensor | None = None  # pipeline: tokens of the global batch that is under way
    squares: Tensor | None = None  # --optimizer_in_backward: sum of the squares of the gradients that are gone

    def __getattr__(self, name):  # layout.tp instead of layout.degrees["tp"]
        if name in AXES:
            return self.degrees[name]
        raise AttributeError(name)

    @property
    def data_ranks(self) -> int:  # ranks with different sequences
        return self.dp_replicate * self.dp_shard

    @property
    def data_rank(self) -> int:
        return self.rank // (self.cp * self.tp) % self.data_ranks

    @property
    def accumulation(self) -> int:
        return self.global_batch_size // (self.local_batch_size * self.data_ranks)

    @property
    def n_microbatches(self) -> int:  # of the pipeline: accumulation is nothing but more micro-batches there
        return self.accumulation * self.local_batch_size // self.cfg.pp_microbatch_size

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.axes[axis].get_group()

    def coordinate(self, axis: str) -> int:
        return self.axes[axis].get_local_rank()

    def __str__(self):
        borrowed = {"ep": self.cfg.ep, "etp": self.cfg.etp}
        return " x ".join(f"{a} {n}" for a, n in (self.degrees | borrowed).items() if n > 1) or "one process"


def divisors(*numbers) -> str:
    """'1, 2, 4 or 8': what divides all of the numbers, for error messages."""
    g = math.gcd(*numbers)
    fits = [str(d) for d in range(1, g + 1) if g % d == 0]
    return " or ".join(filter(None, [", ".join(fits[:-1]), fits[-1]]))


def runs_on_cuda(cfg: ParallelConfig, device: str) -> bool:
    return cfg.dry_run or device == "cuda" or device == "auto" and torch.cuda.is_available()


def dtype_of_compute(cfg: ParallelConfig, on_cuda: bool) -> torch.dtype:
    native_bf16 = on_cuda or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if cfg.compute_dtype == "bfloat16" or cfg.compute_dtype == "auto" and native_bf16 else torch.float32


def facts(cfg: ParallelConfig, model_config, degrees: dict[str, int], device: str) -> SimpleNamespace:
    """What decides whether a flag has an effect (Need in config.py): every flag and every field of the model by its name; the
    degrees as they are, dp_shard too; and world_size, on_cuda and dtype, in which the model computes."""
    on_cuda = runs_on_cuda(cfg, device)
    more = dict(world_size=math.prod(degrees.values()), on_cuda=on_cuda, dtype=dtype_of_compute(cfg, on_cuda))
    return SimpleNamespace(**vars(model_config) | vars(cfg) | degrees | more)


def check_layout(
    cfg: ParallelConfig, model_config, *, seq_len, local_batch_size, global_batch_size, device="auto", world_size=None
) -> Layout:
    """The Layout that the flags ask for. Raises ValueError with every violation: the values, and what to type instead."""
    world_size = world_size or int(os.environ.get("WORLD_SIZE", 1))
    degrees = {axis: getattr(cfg, axis) for axis in AXES}
    errors = [f"--{a} {n} must be at least 1" for a, n in degrees.items() if n < 1 and (a, n) != ("dp_shard", -1)]
    if errors:
        raise ValueError("; ".join(errors))
    others = math.prod(n for a, n in degrees.items() if a != "dp_shard")
    if degrees["dp_shard"] == -1 and world_size % others == 0:
        degrees["dp_shard"] = world_size // others
    named = [a for a in AXES if degrees[a] != -1]
    product = math.prod(degrees[a] for a in named)
    if product != world_size:
        fix = f"leave out --dp_shard (it becomes {world_size // others})" if world_size % others == 0 else "change a degree"
        start = f"start {product} processes"
        if "RANK" not in os.environ and product <= 16:  # plain python; more than a node needs docs/cluster.md
            start += f": torchrun --nproc_per_node {product} {shlex.join(sys.argv)}"
        raise ValueError(
            f"{world_size} process{'es' * (world_size > 1)} but {'*'.join(named)} = {'*'.join(str(degrees[a]) for a in named)} "
            f"= {product}; {fix} or {start}"
        )

    tp, pp, cp = degrees["tp"], degrees["pp"], degrees["cp"]
    data_ranks = degrees["dp_replicate"] * degrees["dp_shard"]
    if local_batch_size < 1:
        raise ValueError(f"--local_batch_size {local_batch_size} must be at least 1")
    if global_batch_size == -1:
        global_batch_size = local_batch_size * data_ranks
    forward = local_batch_size * data_ranks
    if global_batch_size < 1 or global_batch_size % forward:
        near = max(1, round(global_batch_size / forward)) * forward
        errors.append(
            f"--global_batch_size {global_batch_size} is not a multiple of --local_batch_size {local_batch_size} x "
            f"{data_ranks} data rank{'s' * (data_ranks > 1)} = {forward}; use --global_batch_size {near}"
        )
    layout = Layout(cfg, degrees, world_size, local_batch_size, global_batch_size, rank=int(os.environ.get("RANK", 0)))
    layout.mtp = getattr(model_config, "mtp_depth", 0) > 0

    c = model_config
    sizes = {"n_heads": c.n_heads, "n_kv_heads": c.n_kv_heads, "ffn_dim": c.ffn_dim}
    if shared := getattr(c, "n_shared_experts", 0):
        sizes["n_shared_experts x moe_ffn_dim"] = shared * c.moe_ffn_dim
    if odd := [f"{name} {size}" for name, size in sizes.items() if size % tp]:
        errors.append(f"--tp {tp} does not divide {', '.join(odd)}; use {divisors(*sizes.values())}")
    if seq_len < 1:
        raise ValueError(f"--seq_len {seq_len} must be at least 1")
    if seq_len > c.max_seq_len:
        longer = f"--model_args max_seq_len={seq_len}"
        errors.append(f"--seq_len {seq_len} is longer than the model's max_seq_len {c.max_seq_len}; use {longer}")
    pieces = (2 * cp if cp > 1 else 1) * tp  # cp cuts a sequence into 2*cp chunks, tp each rank's part into tp
    if seq_len % pieces:
        rule = " x ".join(["2", "cp"] * (cp > 1) + ["tp"] * (tp > 1))
        near = max(1, min(round(seq_len / pieces), c.max_seq_len // pieces)) * pieces
        errors.append(f"--seq_len {seq_len} is not a multiple of {rule + ' = ' if rule else ''}{pieces}; use --seq_len {near}")
    heads, kv_heads = c.n_heads // tp, c.n_kv_heads // tp
    if cp > 1 and cfg.cp_method == "alltoall" and tp <= c.n_kv_heads and (heads % cp or (kv_heads % cp and cp % kv_heads)):
        errors.append(
            f"--cp_method alltoall needs cp {cp} to divide the {heads} heads of a tp rank, and to divide or be a multiple of "
            f"its {kv_heads} kv heads; use --cp_method allgather"
        )
    on_cuda = runs_on_cuda(cfg, device)
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if on_cuda and not cfg.dry_run and local_world > torch.cuda.device_count():
        errors.append(
            f"{local_world} process{'es' * (local_world > 1)} here, but torch finds {torch.cuda.device_count()} GPUs; "
            "use --device cpu or fewer processes"
        )
    if min(cfg.init_timeout_s, cfg.train_timeout_s) < 1:
        errors.append(f"--init_timeout_s {cfg.init_timeout_s} and --train_timeout_s {cfg.train_timeout_s} must be at least 1")
    errors += no_effect(cfg, facts(cfg, model_config, degrees, device))
    if cfg.ac == "budget" and not cfg.compile:
        errors.append("--ac budget needs --compile: the compiler chooses what to keep; add --compile or use --ac op")
    if cfg.ac_every < 1 or not 0 <= cfg.ac_budget <= 1:
        errors.append(f"--ac_every {cfg.ac_every} must be at least 1 and --ac_budget {cfg.ac_budget} between 0 and 1")
    if cfg.optimizer_in_backward and (pp > 1 or layout.accumulation > 1 or cfg.cpu_offload):
        errors.append(
            f"--optimizer_in_backward needs one backward per step and gradients on the device, but --pp is {pp}, accumulation "
            f"{layout.accumulation}, --cpu_offload {cfg.cpu_offload}; leave it out"
        )
    if cfg.float8 != "off":
        errors += float8_errors(layout, c, on_cuda, seq_len)
    errors += expert_errors(layout, c)
    if pp > 1 and layout.accumulation:
        errors += pipeline_errors(layout, c)
    if errors:
        raise ValueError("; ".join(dict.fromkeys(errors)))
    return layout


def float8_errors(layout: Layout, model_config, on_cuda: bool, seq_len: int) -> list[str]:
    cfg, errors = layout.cfg, []
    kind = cfg.float8
    block = {"mxfp8": 32, "nvfp4": 128}.get(kind, 1)
    sequences = cfg.pp_microbatch_size if layout.pp > 1 else layout.local_batch_size
    tokens = sequences * seq_len // layout.cp  # of one forward: the sum that is the weight's gradient is cut into blocks, too
    if cfg.dry_run or cfg.explain or cfg.plan:
        errors.append(f"--float8 {kind} is not in the dry run, which would count bf16; leave it out")
    elif on_cuda:
        major, minor = torch.cuda.get_device_capability()
        if (major, minor) < (8, 9):
            errors.append(f"--float8 {kind} needs a GPU with float8 matmuls (H100, L40 or newer); use --float8 off")
        elif block > 1 and major < 10:
            errors.append(f"--float8 {kind} needs a Blackwell GPU (capability 10.0; this one has {major}.{minor}); use rowwise")
    elif kind == "nvfp4" or cfg.float8_experts and kind != "mxfp8":
        wish = "--float8 nvfp4" if kind == "nvfp4" else f"--float8_experts with --float8 {kind}"
        errors.append(f"{wish} needs a GPU, for torchao has no emulation of it; on a CPU use --float8 mxfp8")
    elif cfg.compile:
        errors.append(f"--float8 {kind} is emulated on CPU, and the emulation cannot be compiled; leave out --compile")
    if block > 1 and layout.tp > 1:
        errors.append(f"--float8 {kind} does not split matrices over --tp {layout.tp}; use rowwise, or --tp 1")
    if tokens % block:
        now = f"{sequences} x {seq_len} / {layout.cp} = {tokens}"
        errors.append(f"--float8 {kind} needs a multiple of {block} tokens in a forward, not {now}; use another --seq_len")
    return errors


def expert_errors(layout: Layout, model_config) -> list[str]:
    ep, etp, n_experts = layout.cfg.ep, layout.cfg.etp, getattr(model_config, "n_experts", 0)
    if not n_experts:
        return []
    errors = []
    if etp not in (1, layout.tp):
        errors.append(f"--etp {etp} must be 1 or --tp {layout.tp}")
    if etp > 1 and model_config.moe_ffn_dim % etp:
        errors.append(f"--etp {etp} does not divide moe_ffn_dim {model_config.moe_ffn_dim}; use --etp 1")
    lenders = layout.dp_shard * layout.cp * (1 if etp > 1 else layout.tp)
    if ep < 1 or n_experts % ep or lenders % ep:
        ranks = f"dp_shard x cp{' x tp' if etp == 1 else ''} = {lenders}"
        errors.append(f"--ep {ep} must divide n_experts {n_experts} and {ranks}; use {divisors(n_experts, lenders)}")
    return errors


def pipeline_errors(layout: Layout, model_config) -> list[str]:
    cfg, pp, name = layout.cfg, layout.pp, layout.cfg.pp_schedule
    counts = {"pp_microbatch_size": cfg.pp_microbatch_size, "pp_layers_per_stage": cfg.pp_layers_per_stage}
    if wrong := [f"--{flag} {n} must be at least 1" for flag, n in counts.items() if n is not None and n < 1]:
        return wrong
    if layout.local_batch_size % cfg.pp_microbatch_size:
        return [f"--pp_microbatch_size {cfg.pp_microbatch_size} does not divide --local_batch_size {layout.local_batch_size}; "
                f"use {divisors(layout.local_batch_size)}"]
    errors, n, splits_backward = [], layout.n_microbatches, name in ZERO_BUBBLE
    if cfg.pp_schedule_csv:
        name, table = cfg.pp_schedule_csv, read_csv(cfg.pp_schedule_csv)
        splits_backward = bool(re.search(r"\dI\d", table))
        rows, last = len(table.splitlines()), max(map(int, re.findall(r"\d+F(\d+)", table)), default=-1)
        if rows != pp or last + 1 != n:
            fits = f"use --pp {rows} and --local_batch_size {(last + 1) * cfg.pp_microbatch_size}"
            return [f"--pp_schedule_csv {name} is for {rows} ranks and {last + 1} micro-batches, not {pp} and {n}; {fits}"]
    fewest = {"1F1B": pp, "DualPipeV": 2 * pp}.get(name, 1)
    if n < fewest:
        sequences = math.ceil(fewest * cfg.pp_microbatch_size / layout.accumulation)
        errors.append(
            f"--pp_schedule {name} with --pp {pp} needs at least {fewest} micro-batches, but there are {n} (local batch x "
            f"accumulation / micro-batch size); use --local_batch_size {sequences} and --global_batch_size "
            f"{sequences * layout.data_ranks * layout.accumulation}, or more"
        )
    if name in ("Interleaved1F1B", "InterleavedZeroBubble") and n % max(1, n // pp):
        sequences = pp * (n // pp) * cfg.pp_microbatch_size // layout.accumulation or cfg.pp_microbatch_size
        rule = f"a number of micro-batches that its {n // pp} rounds of --pp {pp} divide, not {n}"
        errors.append(f"--pp_schedule {name} needs {rule}; use --local_batch_size {sequences}")
    if splits_backward:
        if cfg.reshard_after_forward == "always":
            errors.append(
                f"--reshard_after_forward always gives wrong gradients with --pp_schedule {name}: its two half backwards would "
                "see resharded weights; use never"
            )
        if model_config.tie_embeddings and layout.mtp:
            errors.append(
                f"--pp_schedule {name} cannot halve the backward of a tied embedding with mtp_depth 1; use 1F1B"
            )
        if cfg.ac != "none":
            errors.append(f"--ac {cfg.ac} with --pp_schedule {name} recomputes each block many times; use --ac none or 1F1B")
        if torch.__version__ < "2.13":
            errors.append(f"--pp_schedule {name} fails in torch {torch.__version__}, needs 2.13; use 1F1B or Interleaved1F1B")
    try:
        split = split_stages(cfg, pp, model_config.n_layers)
    except ValueError as e:
        return errors + [str(e)]
    fewest, most = (1, 1) if name in ONE_STAGE_PER_RANK else (2, 2) if name in V_SHAPED else (2, model_config.n_layers)
    if not cfg.pp_schedule_csv and (len(split) % pp or not fewest <= len(split) // pp <= most):
        wanted = f"exactly {fewest}" if fewest == most else f"{fewest} or more"
        errors.append(
            f"{len(split)} stages over --pp {pp} ranks, but --pp_schedule {name} needs {wanted} per rank; change "
            "--pp_layers_per_stage or --pp_stage_fqns"
        )
    return errors


# ---------------------------------------------------------------- processes: start, agree, stop


def connect(layout: Layout, device: str = "auto", seed: int = 0, trace: str = "trace") -> None:
    """Join the other processes: device, threads, process groups and mesh. Plain `python` is a world of one.

    trace: folder of --flight_recorder, to be read with torch's `torchfrtrace`.
    """
    cfg, env = layout.cfg, os.environ
    local_rank, local_world = int(env.get("LOCAL_RANK", 0)), int(env.get("LOCAL_WORLD_SIZE", 1))
    if cfg.deterministic:
        env["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # read when CUDA starts
        torch.use_deterministic_algorithms(True)
    if device == "cuda" or (device == "auto" and torch.cuda.is_available()):
        layout.device = torch.device("cuda", local_rank)
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
        # torchrun's agent holds the store, if it says so
        is_master = env.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and layout.rank == 0
        timeout = datetime.timedelta(seconds=cfg.init_timeout_s)
        store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), layout.world_size, is_master, timeout=timeout)
        store = dist.PrefixStore(agree_on_attempt(store, layout), store)
    else:
        timeout, store = None, dist.HashStore()
    dist.init_process_group(backend, store=store, rank=layout.rank, world_size=layout.world_size, timeout=timeout)
    make_mesh(layout)


def choose_attention(layout: Layout, config, seq_len: int, local_batch_size: int) -> None:
    """On GPUs, leave the faster of flash and cuDNN attention switched on, forward and backward measured on this run's shapes.

    Not where there is no choice: fp32 has neither, and the masks of --cp_method allgather only flash.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    cfg, choice = layout.cfg, layout.cfg.attention
    if layout.device.type != "cuda" or layout.compute_dtype == torch.float32 or layout.cp > 1 and cfg.cp_method == "allgather":
        return
    if choice == "auto":
        B, heads = cfg.pp_microbatch_size if layout.pp > 1 else local_batch_size, layout.tp * layout.cp
        shape = lambda n: (B, max(1, n // heads), seq_len, config.head_dim)  # noqa: E731
        q, k, v = (torch.randn(shape(n), device=layout.device, dtype=layout.compute_dtype, requires_grad=True)
                   for n in (config.n_heads, config.n_kv_heads, config.n_kv_heads))
        times = torch.full((2,), math.inf, device=layout.device)
        for i, backend in enumerate((SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            try:
                for step in range(6):
                    if step == 3:  # the first ones warm up
                        begin.record()
                    with sdpa_kernel(backend):
                        sdpa(q, k, v, is_causal=True).sum().backward()
                end.record()
                end.synchronize()
                times[i] = begin.elapsed_time(end) / 3
            except RuntimeError:  # no such kernel for these shapes, or in this build
                pass
        dist.all_reduce(times)  # one choice for all ranks
        flash, cudnn = (times / layout.world_size).tolist()
        if not min(flash, cudnn) < math.inf:
            return
        choice = "flash" if flash <= cudnn else "cudnn"
        if layout.rank == 0:
            print(f"attention: flash {flash:.2f} ms, cuDNN {cudnn:.2f} ms per layer, forward and backward: {choice}")
    torch.backends.cuda.enable_flash_sdp(choice == "flash")
    torch.backends.cuda.enable_cudnn_sdp(choice == "cudnn")


def agree_on_attempt(store: dist.Store, layout: Layout) -> str:
    """A name that the processes of this attempt have in common, and no earlier attempt had.

    torchrun keeps one store for all restarts, full of dead processes' addresses, and its restart count is no name: every
    node counts its own. So each rank leaves a word of its own, and rank 0 answers every word it finds with the name; one
    that a dead process left there is overwritten soon, and answered then.
    """
    mine = uuid.uuid4().hex
    if layout.rank > 0:
        store.set(f"rank {layout.rank}", mine)
        name = store.get(mine).decode()  # waits for the answer
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


def make_mesh(layout: Layout) -> None:
    """Lay the ranks out on the named axes: neighbours in rank share tp, the fastest links, and pp crosses the slowest."""
    fsdp = layout.dp_shard * layout.cp  # cp ranks hold different tokens, so FSDP treats them as data ranks
    shape, names = (layout.pp, layout.dp_replicate, fsdp, layout.tp), ("pp", "dp_replicate", "fsdp", "tp")
    layout.mesh = init_device_mesh(layout.device.type, shape, mesh_dim_names=names)
    layout.axes = layout.mesh._unflatten(2, (layout.dp_shard, layout.cp), ("dp_shard", "cp"))  # by name fails in torch 2.11


def expert_mesh(layout: Layout) -> DeviceMesh:
    """The ranks as the experts see them: ep and etp innermost, and efsdp, what is left of dp_shard x cp x tp, shards them."""
    if layout.experts is None:
        ep, etp = layout.cfg.ep, layout.cfg.etp
        shape = (layout.pp, layout.dp_replicate, layout.dp_shard * layout.cp * layout.tp // (ep * etp), ep, etp)
        names = ("pp", "dp_replicate", "efsdp", "ep", "etp")
        layout.experts = init_device_mesh(layout.device.type, shape, mesh_dim_names=names)
    return layout.experts


def watch_launcher() -> None:
    """End this process when its launcher dies: torchrun killed by SIGKILL leaves workers that go on writing checkpoints."""
    launcher, env = os.getppid(), os.environ
    if env.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and env.get("GROUP_RANK") == "0":
        try:  # it may have died while we were importing torch; then nobody answers at its store
            socket.create_connection((env["MASTER_ADDR"], int(env["MASTER_PORT"])), timeout=60).close()
        except OSError as error:
            raise RuntimeError(f"torchrun, which started this process, is gone: {error}") from None

    def watch():
        while os.getppid() == launcher:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def train_timeouts(layout: Layout) -> None:
    """After the first step of this process nothing slow is left: a collective that hangs now is a fault, and found sooner.

    The group in which ranks wait for the slowest disk (checkpoint.py) keeps its own patience.
    """
    for group in [None, *layout.mesh.get_all_groups(), *layout.axes.get_all_groups()]:
        dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=layout.cfg.train_timeout_s), group)


class StopSignal:
    """SIGTERM, SIGINT or SIGUSR1: finish the step, save, exit. A second Ctrl-C, two seconds later, ends the process at once."""

    def __init__(self):
        self.received, self.at = "", 0.0
        for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(s, self.handle)

    def handle(self, number, frame):
        # launchers deliver one Ctrl-C or one scancel twice within moments: only a later SIGINT means "now"
        if number == signal.SIGINT and self.received and time.monotonic() - self.at > 2:
            os._exit(130)
        if not self.received:
            self.received, self.at = signal.Signals(number).name, time.monotonic()

    def agreed(self, layout: Layout) -> bool:
        """True on every rank at the same step if any rank was signalled: handlers run at different moments on each."""
        if layout.world_size == 1:
            return bool(self.received)
        flag = torch.tensor([int(bool(self.received))])  # on the host, so that no device waits for it
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        return bool(flag.item())


def run(main, cfg) -> None:
    """Run main(cfg) and end the process with the status that tells what happened: 0 done, 2 wrong usage, 1 failure.

    A ValueError before the processes are connected is the user's, shown in one line by rank 0; later it is a failure.
    """
    rank, status = int(os.environ.get("RANK", 0)), 0
    try:
        if "RANK" in os.environ:
            watch_launcher()
        if cfg.check_parity:
            from dryrun import check_parity

            raise SystemExit(check_parity(main, cfg, {axis: getattr(cfg, axis) for axis in AXES}))
        plots_layout = cfg.plot and "RANK" not in os.environ and any(getattr(cfg, axis) > 1 for axis in AXES)
        if cfg.dry_run or cfg.plan or cfg.explain or plots_layout:
            from dryrun import dry_run

            raise SystemExit(dry_run(main, cfg))
        main(cfg)
    except BaseException as e:  # CheckpointException and KeyboardInterrupt are no Exceptions
        message = " ".join(str(e).split())
        if isinstance(e, SystemExit):
            status = e.code if isinstance(e.code, int) else 0 if e.code is None else 1
        elif isinstance(e, KeyboardInterrupt):  # before the loop, which finishes its step: nothing to finish yet
            status = 130
        elif isinstance(e, ValueError) and not dist.is_initialized():
            usage_error(message)
        else:
            status = 1
            if "TORCHELASTIC_ERROR_FILE" in os.environ:  # torchrun then shows the first failure, not just its status
                from torch.distributed.elastic.multiprocessing.errors import get_error_handler

                get_error_handler().record_exception(e)
            if rank == 0 or not isinstance(e, ValueError):  # every rank raises the same ValueError
                if not isinstance(e, ValueError):
                    traceback.print_exc()
                print(f"error on rank {rank}: {type(e).__name__}: {message}{failed_module(e)}", file=sys.stderr)
    if status == 0 and dist.is_initialized():
        disconnect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # gloo's threads abort now and then in a normal exit, and torchrun would count that as a failure


def failed_module(error: BaseException) -> str:
    """" (in blocks.0.attn.wq, a Linear)": the innermost module of the model that was running when the error came up, or ""."""
    owners = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [owner for owner in owners if isinstance(owner, nn.Module)]
    names = {module: fqn for fqn, module in modules[0].named_modules()} if modules else {}
    inside = [module for module in modules if names.get(module)]
    if not inside:
        return ""
    return f" (in {names[inside[-1]]}, a {type(inside[-1]).__name__.removeprefix('FSDP')})"


def disconnect() -> None:
    """Leave together: a rank that ends while another still talks to it makes that one fail."""
    dist.barrier()
    dist.destroy_process_group()


def check_replicas(stages, layout: Layout, **values) -> None:
    """All ranks that hold the same part of a parameter must hold the same numbers, and all ranks the same `values`.

    Raises RuntimeError naming the first difference and its rank. Runs once: a wrong seed or file on one node is found
    here and not a week later.
    """
    mine = {(name, 0): repr(value) for name, value in values.items()}
    for stage in stages:
        for fqn, p in stage.named_parameters():
            shape, offset = local_slice(p)
            total = 0
            for bits in local_tensor(p).detach().contiguous().view(torch.int16).flatten().split(2**24):
                places = torch.arange(1, bits.numel() + 1, device=bits.device)  # so that swapped numbers do not cancel
                total = total * 31 % 2**61 + (bits * places).sum().item()
            mine[fqn, (shape, offset)] = total
    everyone = [None] * layout.world_size
    dist.all_gather_object(everyone, mine)
    first = {}
    for rank, theirs in enumerate(everyone):
        for key, value in theirs.items():
            owner, expected = first.setdefault(key, (rank, value))
            if value != expected:
                raise RuntimeError(f"{key[0]} differs between ranks {owner} and {rank}: same seed, flags, files on every node?")


# ---------------------------------------------------------------- tensor parallelism


class GatherSequence(torch.distributed.tensor.parallel.ParallelStyle):
    """Before attention or FFN: all-gather the sequence, (B, T/tp, D) -> (B, T, D); backward: reduce-scatter."""

    def _apply(self, module, mesh):
        def gather(module, args):
            x = DTensor.from_local(args[0], mesh, [Shard(1)], run_check=False)
            return (x.redistribute(placements=[Replicate()]), *args[1:])

        module.register_forward_pre_hook(gather)
        return module


class Gather(torch.distributed.tensor.parallel.ParallelStyle):
    """After a module without weights: all-gather the sequence, (B, T/tp, ...) -> (B, T, ...); backward: reduce-scatter."""

    def _apply(self, module, mesh):
        module.register_forward_hook(lambda module, args, out: AllGather.apply(out, 1, mesh.get_group()))
        return module


class SequenceLinear(torch.distributed.tensor.parallel.ParallelStyle):
    """A whole matrix that sees a part of the tokens (B, T/tp, D): its gradient is summed over tp. The tokens go in as rows,
    because torch 2.11 has no product of a DTensor that is split along dim 1."""

    def _apply(self, module, mesh):
        module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Replicate()], src_data_rank=None))
        plain = module.forward

        def forward(x):
            rows = DTensor.from_local(x.flatten(0, -2), mesh, [Shard(0)], run_check=False)
            return plain(rows).to_local().unflatten(0, x.shape[:-1])

        module.forward = forward
        return module


class VocabEmbedding(RowwiseParallel):
    """Each rank looks up the tokens of its part of the vocabulary; the sum over ranks leaves sharded along the sequence."""

    def __init__(self):
        super().__init__(input_layouts=Replicate(), output_layouts=Shard(1))

    def _apply(self, module, mesh):
        module = super()._apply(module, mesh)
        # A compiled block cannot take the asynchronous tensor that leaves here, and its wait() would cut the gradient.
        module.register_forward_hook(lambda module, args, out: out.clone())
        return module


class VocabHead(torch.distributed.tensor.parallel.ParallelStyle):
    """The head's rows, one part of the vocabulary per rank; vocab_parallel_loss and vocab_parallel_logits multiply with it."""

    def _apply(self, module, mesh):
        module.weight = nn.Parameter(distribute_tensor(module.weight, mesh, [Shard(0)], src_data_rank=None))
        return module


TP_STYLES = {
    "colwise": lambda: ColwiseParallel(),  # W (out/tp, in): no communication, the output is this rank's heads or channels
    "rowwise": lambda: RowwiseParallel(output_layouts=Shard(1)),  # W (out, in/tp): reduce-scatter along the sequence
    "gather_sequence": lambda: GatherSequence(),
    # replicated weights that see a part of the tokens: as DTensors their gradient is summed over tp, which a plain weight's
    # would not be; norms, and below whole matrices such as routers
    "sequence": lambda: SequenceParallel(use_local_output=True),
    "sequence_linear": lambda: SequenceLinear(),
    "gather": lambda: Gather(),
    "gather_colwise": lambda: ColwiseParallel(input_layouts=Shard(1)),  # the same, after an all-gather of the sequence
    "head_norm": lambda: SequenceParallel(sequence_dim=2, use_local_output=True),  # (B, T, H/tp, K): a part of the heads
    "vocab_embedding": VocabEmbedding,
    "vocab_head": VocabHead,
}


def check_tp_plan(model) -> None:
    """Every pattern of the plan must name a module of the full model: a misspelt one would silently leave a layer unsharded."""
    names = [n for n, _ in model.named_modules()]
    for pattern, style in model.tp_plan().items():
        if style not in TP_STYLES:
            raise ValueError(f"tp_plan: {pattern!r} asks for style {style!r}; parallel.TP_STYLES has {', '.join(TP_STYLES)}")
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"tp_plan: pattern {pattern!r} matches no module of {type(model).__name__}")


def tensor_parallel(stage, layout: Layout) -> None:
    """Split the matrices over tp as the model's tp_plan says. Per block, forward and backward each: two all-gathers and two
    reduce-scatters of B*T*D elements."""
    if layout.tp == 1:
        return
    mesh = layout.mesh["tp"]
    names = [n for n, _ in stage.named_modules()]
    plan = {n: style for pattern, style in stage.tp_plan().items() for n in fnmatch.filter(names, pattern)}
    parallelize_module(stage, mesh, {n: TP_STYLES[style]() for n, style in plan.items()})
    if layout.cfg.loss_parallel:
        stage.token_loss = partial(vocab_parallel_loss, mesh=mesh)
    else:
        stage.token_loss = partial(gathered_head_loss, mesh=mesh)
    stage.logits = partial(vocab_parallel_logits, mesh=mesh)
    if layout.cfg.async_tp:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        torch._inductor.config._micro_pipeline_tp = True
        enable_symm_mem_for_group(mesh.get_group().group_name)


def vocab_parallel_loss(h, weight, labels, denom, *, mesh, loss=linear_cross_entropy, **options):
    """A loss of models/loss.py with each rank's rows of the head; h (B, T/tp, D). The result is whole on every tp rank."""

    def all_reduce(x, op):
        dist.all_reduce(x, op=dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM, group=mesh.get_group())
        return x

    h = AllGather.apply(h, 1, mesh.get_group())  # (B, T, D); backward sums the ranks' gradients of h
    return loss(h, weight.to_local(), labels, denom, all_reduce, vocab_start=local_slice(weight)[1][0], **options)


def gathered_head_loss(h, weight, labels, denom, *, mesh, kernel=softmax_loss) -> Tensor:
    """--no-loss_parallel: gather the head, and compute the loss of this rank's T/tp tokens: this rank's summand."""
    weight = weight.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return linear_cross_entropy(h, weight, labels.chunk(mesh.size(), 1)[mesh.get_local_rank()], denom, kernel=kernel)


def vocab_parallel_logits(h, weight, *, mesh) -> Tensor:
    """(B, T/tp, D) -> (B, T, V), whole on every rank: for generation and evaluation by hand, not for training."""
    h = AllGather.apply(h, 1, mesh.get_group())
    return whole_vocab(torch.nn.functional.linear(h, weight.to_local()), weight.shape[0], mesh)


def whole_vocab(logits: Tensor, V: int, mesh) -> Tensor:
    """This rank's part of the vocabulary (..., V/tp), even or not -> (..., V), on every rank."""
    whole = torch.empty(*logits.shape[:-1], V, device="meta")
    kind = dict(run_check=False, shape=whole.shape, stride=whole.stride())
    return DTensor.from_local(logits, mesh, [Shard(logits.dim() - 1)], **kind).full_tensor()


def all_blocks(stage) -> dict[int, nn.Module]:
    """Layer number -> block. DeepSeek's multi-token prediction has a block as well, behind the last."""
    mtp = {stage.config.n_layers: stage.mtp.block} if getattr(stage, "mtp", None) is not None else {}
    return {int(i): block for i, block in stage.blocks.items()} | mtp


# ---------------------------------------------------------------- context parallelism

# torch 2.13 renamed both collectives, 2.11 has only the old names
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
# These return what they received instead of writing into a tensor that they are given: --ac op can keep such a result.
functional = torch.ops._c10d_functional


class AllGather(torch.autograd.Function):
    """Concatenate the ranks' x along dim. Backward: every rank used the result, so gradients are summed, and scattered back."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        x = x.movedim(dim, 0).contiguous()
        out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
        all_gather_single(out, x, group=group)
        return out.movedim(0, dim)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.movedim(ctx.dim, 0).contiguous()
        out = grad.new_empty(grad.shape[0] // dist.get_world_size(ctx.group), *grad.shape[1:])
        reduce_scatter_single(out, grad, group=ctx.group)
        return out.movedim(0, ctx.dim), None, None


class ReduceScatter(torch.autograd.Function):
    """Sum the ranks' x, each rank keeps its part along dim. Backward: the inverse of AllGather's, an all-gather."""

    @staticmethod
    def forward(ctx, x, dim, group):
        ctx.dim, ctx.group = dim, group
        x = x.movedim(dim, 0).contiguous()
        out = functional.reduce_scatter_tensor(x, "sum", dist.get_world_size(group), group.group_name)
        return functional.wait_tensor(out).movedim(0, dim)

    @staticmethod
    def backward(ctx, grad):
        return AllGather.apply(grad, ctx.dim, ctx.group), None, None


class AllToAll(torch.autograd.Function):
    """Rows of x to all ranks: sent[i] of them to rank i, received[i] from it; equal shares if None. Backward: back again."""

    @staticmethod
    def forward(ctx, x, group, sent=None, received=None):
        ctx.group, ctx.sent, ctx.received = group, sent, received
        n = dist.get_world_size(group)
        equal = [x.shape[0] // n] * n
        out = functional.all_to_all_single(x.contiguous(), received or equal, sent or equal, group.group_name)
        return functional.wait_tensor(out)

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, ctx.group, ctx.received, ctx.sent), None, None, None


def sequence_index(T: int, cp: int, rank: int) -> Tensor:
    """Positions of this cp rank: chunks rank and 2cp-1-rank of 2cp. A cheap early chunk and a dear late one: causal attention
    then costs every rank the same."""
    chunks = torch.arange(T).chunk(2 * cp)
    return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]])


def natural_order(x: Tensor, dim: int, cp: int) -> Tensor:
    """Undo sequence_index on a tensor gathered in rank order: chunk i is of rank i (first half) or rank 2cp-1-i (second)."""
    chunks = x.chunk(2 * cp, dim)
    return torch.cat([chunks[2 * i] for i in range(cp)] + [chunks[2 * i + 1] for i in reversed(range(cp))], dim)


def context_parallel(stage, layout: Layout) -> None:
    """Replace the model's attention by one that sees the keys and values of all cp ranks."""
    if layout.cp > 1:
        attend = all_gather_attention if layout.cfg.cp_method == "allgather" else all_to_all_attention
        stage.make_attend = partial(attend, group=layout.group("cp"))


def all_gather_attention(positions, doc_ids=None, *, group):
    """Gather keys and values, 2*B*T*G*K elements per layer (small under GQA), and attend from this rank's queries."""
    cp, rank = dist.get_world_size(group), dist.get_rank(group)
    chunk = positions.shape[1] // 2  # this rank has chunks `rank` and `2cp-1-rank`; chunk i sees the keys of chunks 0..i
    ends = [(rank + 1) * chunk, (2 * cp - rank) * chunk]
    if doc_ids is None:
        masks = [lower_right_mask(chunk, end, positions.device) for end in ends]
    else:
        doc_attend = causal_attention(positions, doc_ids, sequence_index(2 * cp * chunk, cp, rank).to(doc_ids.device))

    def attend(q, k, v, scale=None):  # q (B, H, T/cp, K), k and v (B, G, T/cp, K)
        kv = natural_order(AllGather.apply(torch.cat([k, v], -1), 2, group), 2, cp)  # one collective for both
        k, v = kv.split([k.shape[-1], v.shape[-1]], -1)  # (B, G, T, K)
        if doc_ids is not None:
            return doc_attend(q, k, v, scale=scale)
        parts = zip(q.chunk(2, dim=2), ends, masks, strict=True)
        return torch.cat([sdpa(qc, k[:, :, :end], v[:, :, :end], mask, scale=scale) for qc, end, mask in parts], 2)

    return attend


def all_to_all_attention(positions, doc_ids=None, *, group):
    """Ulysses (arXiv:2309.14509): trade a part of every sequence for whole sequences of H/cp heads, and back."""
    cp = dist.get_world_size(group)
    attend_whole = causal_attention(positions, doc_ids)

    def heads_to_sequence(x):  # (B, H, T/cp, K) -> (B, H/cp, T, K)
        B, H, T, K = x.shape
        x = AllToAll.apply(x.unflatten(1, (cp, H // cp)).transpose(0, 1), group)  # (cp, B, H/cp, T/cp, K), one piece per rank
        return natural_order(x.permute(1, 2, 0, 3, 4).reshape(B, H // cp, cp * T, K), 2, cp)

    def sequence_to_heads(x):  # (B, H/cp, T, K) -> (B, H, T/cp, K)
        pieces = [x.index_select(2, sequence_index(x.shape[2], cp, r).to(x.device)) for r in range(cp)]
        x = AllToAll.apply(torch.stack(pieces), group)  # (cp, B, H/cp, T/cp, K)
        return x.transpose(0, 1).flatten(1, 2)

    def attend(q, k, v, scale=None):
        if k.shape[1] % cp:  # fewer kv heads than ranks: every rank gets a copy of the one that its query heads share
            k, v = (x.repeat_interleave(cp // x.shape[1], dim=1) for x in (k, v))
        return sequence_to_heads(attend_whole(*map(heads_to_sequence, (q, k, v)), scale=scale))

    return attend


# ---------------------------------------------------------------- expert parallelism


def expert_parallel(stage, layout: Layout, *, aux_coef: float = 0.0, force_balance: bool = False) -> None:
    """Split the experts over ep (and each expert over etp); tokens travel to their experts and back, two all-to-alls per layer.

    Tokens stay split along the sequence over tp, so with etp 1 every tp rank routes its own; with etp = tp the tp ranks gather
    them first, each computes its part of every expert's hidden width, and the sums are scattered back.
    aux_coef, force_balance: see models.moe.Balance.
    """
    from models.moe import Balance, Experts

    if not getattr(stage.config, "n_experts", 0):
        return
    mesh, etp = expert_mesh(layout), layout.cfg.etp  # made by all ranks together, also those whose stage has no experts
    for block in (block for block in all_blocks(stage).values() if hasattr(block, "moe")):
        experts, balance = block.moe.experts, block.moe.balance
        assert isinstance(experts, Experts) and isinstance(balance, Balance)
        if layout.cfg.ep * etp > 1:
            for name, dim in (("w1", 1), ("w2", 2), ("w3", 1)):  # F is dim 1 of w1 and w3, dim 2 of w2
                placements = [Shard(0), Shard(dim)] if etp > 1 else [Shard(0)]
                over = mesh["ep", "etp"] if etp > 1 else mesh["ep"]
                w = distribute_tensor(getattr(experts, name), over, placements, src_data_rank=None)
                setattr(experts, name, nn.Parameter(w))
            experts.forward = partial(exchange_tokens, experts, mesh["ep"].get_group())
        if etp > 1:
            block.moe.forward = partial(gathered_moe, block.moe.forward, layout.group("tp"))
        sharers = [layout.group(axis) for axis in ("cp", "tp") if layout.degrees[axis] > 1 and (axis, etp > 1) != ("tp", True)]
        balance.aux_scale, balance.force = aux_coef / layout.global_batch_size, force_balance
        if etp > 1:  # every tp rank adds the loss of all of its ranks' tokens
            balance.aux_scale /= etp
        balance.parts = layout.cp * (layout.tp if etp == 1 else 1)
        balance.sum_over_parts = partial(sum_over, groups=sharers)


def sum_over(x: Tensor, groups) -> Tensor:
    for group in groups:
        dist.all_reduce(x, group=group)
    return x


def gathered_moe(moe_forward, group, x: Tensor) -> Tensor:
    """etp = tp: (B, T/tp, D) -> every tp rank's part of the result for all T -> summed, (B, T/tp, D)."""
    return ReduceScatter.apply(moe_forward(AllGather.apply(x, 1, group)), 1, group)


def exchange_tokens(experts, group, x: Tensor, counts: Tensor) -> Tensor:
    """Experts.forward over ep ranks: x (N*k, D) sorted by expert, so also by the rank that holds it; counts (E,)."""
    ep = dist.get_world_size(group)
    arriving = AllToAll.apply(counts, group)  # (ep * E/ep,): from every rank, its rows for each of this rank's experts
    # the all-to-all takes its sizes from the host: the one place where a layer waits for the device
    sent, received = torch.stack([counts, arriving]).view(2, ep, -1).sum(-1).tolist()
    x = AllToAll.apply(x, group, sent, received)  # sorted by (rank, expert)
    expert = torch.arange(len(counts) // ep, device=x.device).repeat(ep)
    order = expert.repeat_interleave(arriving, output_size=len(x)).argsort(stable=True)
    weights = (local_tensor(w) for w in (experts.w1, experts.w2, experts.w3))
    y = experts.compute(x[order], arriving.view(ep, -1).sum(0), *weights)
    y = y[order.argsort()]  # as they came
    return AllToAll.apply(y, group, received, sent)


@torch.no_grad()
def balance_experts(stages, layout: Layout, mode: str, rate: float | Tensor, per_layer: bool = False) -> dict[str, Tensor]:
    """After an optimizer step: sum each layer's load over all ranks, and with mode bias move the biases against it
    (arXiv:2408.15664: up by rate below the mean load, down above, then centred). Returns statistics; loads restart at 0.
    per_layer: with moe_load (layers, E), each expert's share of its layer's load; zeros for a layer without experts.
    """
    from models.moe import load_statistics

    config = stages[0].config
    layers = {i: block.moe.balance for stage in stages for i, block in all_blocks(stage).items() if hasattr(block, "moe")}
    n_layers = config.n_layers + getattr(config, "mtp_depth", 0)
    loads = torch.zeros(n_layers, config.n_experts, device=layout.device)
    for i, balance in layers.items():
        if balance.load is not None:  # None: no forward since the last call
            loads[i] = balance.load
        balance.load = None
    # every rank has other tokens, or under pp other layers: one sum over all of them gives everyone the whole table
    sum_over(loads, [None])
    loads /= layout.cfg.etp  # with etp = tp every tp rank counted all tokens
    if mode == "bias":
        for i, balance in layers.items():
            step = (loads[i].mean() - loads[i]).sign() * rate
            balance.bias += step - step.mean()
    worst, dead = load_statistics(loads)
    shares = {"moe_load": loads / loads.sum(1, keepdim=True).clamp(min=1)} if per_layer else {}
    return {"moe_load_max_over_mean": worst, "moe_dead_experts": dead} | shares


# ---------------------------------------------------------------- activation checkpointing, compile


# What --ac op keeps beside every other matmul: dear to compute again, or to send again. Some of these only newer torch has.
KEPT = {
    "aten": (
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "_scaled_mm", "_scaled_mm_v2",
        "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "_grouped_mm",
    ),
    "_c10d_functional": ("all_to_all_single", "reduce_scatter_tensor"),
    # FlexAttention, and that in its compiled form: see models.attention.compiled_flex_attention
    "higher_order": ("flex_attention", "inductor_compiled_code"),
}


class Only(TorchDispatchMode):
    """Hands to one of torch's two modes of selective checkpointing only the ops that may be kept, and runs the others.

    torch's modes count every op, and the recomputation must have those of the forward. But the experts are an FSDP unit inside
    the checkpointed block, whose hooks do something else then: their weights may be there already, or have to be gathered.
    """

    supports_higher_order_operators = True

    def __init__(self, ops: set, mode: TorchDispatchMode):
        super().__init__()
        self.ops, self.mode = ops, mode

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return self.mode.__torch_dispatch__(op, types, args, kwargs) if op in self.ops else op(*args, **(kwargs or {}))


def checkpoint_activations(stage, layout: Layout) -> None:
    """Recompute in the backward instead of keeping: --ac full every block, selective every k-th, op half of the matmuls."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    cfg = layout.cfg
    if cfg.ac in ("none", "budget"):
        return  # the budget is the compiler's business: compile_blocks

    found = [getattr(getattr(torch.ops, space), name, None) for space, names in KEPT.items() for name in names]
    saved = {getattr(op, "default", op) for op in found if op is not None}
    mm = torch.ops.aten.mm.default

    def contexts(is_compiled: bool):
        matmuls = {False: 0, True: 0}  # forward and recomputation count alike, so that they agree which one was kept

        def policy(ctx, op, *args, **kwargs):
            if op is mm:
                matmuls[ctx.is_recompute] += 1
                keep = matmuls[ctx.is_recompute] % 2 == 0
            else:
                keep = op in saved
            return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

        modes = create_selective_checkpoint_contexts(policy)
        # the compiler wants torch's own modes, and finds no FSDP unit in a block that it compiles as a whole
        return modes if is_compiled else tuple(Only({mm, *saved}, mode) for mode in modes)

    for i, block in all_blocks(stage).items():
        if cfg.ac == "selective" and i % cfg.ac_every:
            continue
        is_compiled = cfg.compile and not hasattr(block, "moe")
        options = {"context_fn": partial(contexts, is_compiled)} if cfg.ac == "op" else {}
        # wrapping forward, and not the module, leaves every parameter's name as it was; there is no dropout to replay
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **options)


def compile_blocks(stage, layout: Layout) -> None:
    """Compile each block by itself, and the loss: all blocks share one compilation, and FSDP's hooks stay outside of it.

    A block with experts holds an exchange of tokens whose sizes only the run knows: there, its attention and the arithmetic of
    its experts are compiled apart, and routing and exchange stay as they are.
    """
    cfg = layout.cfg
    if not cfg.compile:
        return
    if cfg.ac == "budget":
        torch._functorch.config.activation_memory_budget = cfg.ac_budget
    if layout.pp > 1 and (cfg.pp_schedule in ZERO_BUBBLE or cfg.pp_schedule_csv):
        torch._functorch.config.donated_buffer = False  # the split backward reads them twice
    stage.token_loss = partial(stage.token_loss, kernel=torch.compile(softmax_loss))
    for block in all_blocks(stage).values():
        whole = block.attn if hasattr(block, "moe") else block
        whole.forward = torch.compile(whole.forward, fullgraph=layout.cp == 1)
        if hasattr(block, "moe") and not cfg.float8_experts:  # those quantize in kernels of their own
            block.moe.experts.compute = partial(compiled_experts, torch.compile(block.moe.experts.compute, fullgraph=True))


def compiled_experts(compiled, x: Tensor, counts: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    """Experts.compute, compiled once for all numbers of rows of x (N*k, D).

    Not where that is impossible: for the compiler, the grouped matmul is bf16 only (so the experts of an fp32 run, and thus of
    a CPU without bf16, stay as they are), its substitute waits for the device, and 0 and 1 rows would be constants.
    """
    from models.moe import kernel_fits, swiglu_experts

    if x.dtype != torch.bfloat16 or len(x) < 2 or not kernel_fits(x, w1):
        return swiglu_experts(x, counts, w1, w2, w3)
    torch._dynamo.mark_dynamic(x, 0)
    return compiled(x, counts, w1, w2, w3)


# ---------------------------------------------------------------- float8


def float8_linears(stage, layout: Layout) -> None:
    """Let the blocks' linears multiply in float8, with scales from each call's own numbers: torchao.float8. Parameters, their
    names and the optimizer stay as they are. Not the head, the router and, but for --float8_experts, the stacked experts, nor
    what has a dimension, on this rank, that is no multiple of 16 (mxfp8: 32, nvfp4: 128)."""
    cfg = layout.cfg
    if cfg.float8 == "off":
        return
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it tells of kernels for other Pythons that it could not load
    block = {"mxfp8": 32, "nvfp4": 128}.get(cfg.float8, 16)

    def wanted(module, fqn):
        sizes = [n // layout.tp if n % layout.tp == 0 else n for n in module.weight.shape]
        in_block = fqn.startswith(("blocks.", "mtp."))
        return in_block and all(n % block == 0 for n in sizes) and not any(part in fqn for part in cfg.float8_filter)

    if block > 16:
        multiply = mxfp8_matmul(layout) if cfg.float8 == "mxfp8" else nvfp4_matmul()
        for fqn, module in stage.named_modules():
            if isinstance(module, nn.Linear) and wanted(module, fqn):
                module.forward = partial(lambda module, x: multiply(x, module.weight), module)
    else:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(cfg.float8)
        emulate = layout.device.type == "cpu"
        config = dataclasses.replace(config, emulate=emulate, enable_fsdp_float8_all_gather=cfg.float8_all_gather)
        convert_to_float8_training(stage, config=config, module_filter_fn=wanted)
    if cfg.float8_experts:
        from models.moe import swiglu_experts

        for block in all_blocks(stage).values():
            if hasattr(block, "moe"):
                block.moe.experts.compute = partial(swiglu_experts, linear=float8_grouped_linear(layout))


def mxfp8_matmul(layout: Layout):
    """(x (..., in), weight (out, in)) -> (..., out), all three matmuls of a training step in e4m3 with a power of two per 32
    numbers (OCP Microscaling Formats v1.0). Emulated on a CPU: quantized, and multiplied as what the codes stand for."""
    from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    kernel = KernelPreference.EMULATED if layout.device.type == "cpu" else KernelPreference.AUTO
    return lambda x, w: _to_mxfp8_then_scaled_mm(x, w, kernel, ScaleCalculationMode.RCEIL)


def nvfp4_matmul():
    """As mxfp8_matmul in 4 bits: Hadamard rotation and stochastic rounding of the gradients (arXiv:2509.25149)."""
    from torchao.prototype.moe_training.nvfp4_training.nvfp4_linear import nvfp4_linear
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    signs = tuple(1 if bit == "1" else -1 for bit in f"{0x9E37:016b}")  # any fixed ones, the same on all ranks
    seed = torch.zeros(1, dtype=torch.int64, device="cuda")
    return lambda x, w: nvfp4_linear(x, w, None, kernel_preference=KernelPreference.TRITON, sr_seed=seed, sign_vector=signs)


def float8_grouped_linear(layout: Layout):
    """models.moe.grouped_linear in float8: an expert's rows are padded to what the kernels want."""
    from torchao.prototype import moe_training
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    from models.moe import grouped_linear

    options = dict(out_dtype=torch.bfloat16, pad_token_groups_for_grouped_mm=True)
    if layout.cfg.float8 == "rowwise":
        multiply = moe_training._to_fp8_rowwise_then_scaled_grouped_mm
    else:
        multiply = moe_training._to_mxfp8_then_scaled_grouped_mm
        options["kernel_preference"] = KernelPreference.EMULATED if layout.device.type == "cpu" else KernelPreference.AUTO

    def linear(x, weight, counts):
        if len(x) == 0:  # a rank without a row has nothing to multiply, and takes the usual way
            return grouped_linear(x, weight, counts)
        ends = counts.cumsum(0).to(torch.int32)
        return multiply(x.bfloat16(), weight.transpose(1, 2).bfloat16(), ends, **options).to(x.dtype)

    return linear


def float8_scales(stages, layout: Layout) -> None:
    """After an optimizer step: the scales of all weights with one all-reduce, which FSDP would else ask for one by one."""
    if layout.cfg.float8_all_gather:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        for stage in stages:
            precompute_float8_dynamic_scale_for_fsdp(stage)


# ---------------------------------------------------------------- FSDP2, HSDP, DDP: one wrapper for all


def shard(stage, layout: Layout) -> None:
    """fully_shard every block, then the rest, over dp_shard x cp, replicated over dp_replicate; also at degree 1, so that
    mixed precision is the same everywhere. Per block: all-gather its weights before use, reduce-scatter its gradients.

    Only one process that computes in float32 does without: there is nothing to mix or to send, and FSDP would still copy
    every weight and gradient.
    """
    cfg = layout.cfg
    mesh = layout.mesh["dp_replicate", "fsdp"] if layout.dp_replicate > 1 else layout.mesh["fsdp"]
    for p in stage.parameters():  # not the buffers: balancing biases count in thousandths
        p.data = p.data.to(getattr(torch, cfg.param_dtype))
    dtypes = {getattr(torch, cfg.param_dtype), layout.compute_dtype, getattr(torch, cfg.reduce_dtype)}
    if layout.world_size == 1 and dtypes == {torch.float32} and not (cfg.cpu_offload or cfg.float8_all_gather):
        return
    # Weights are cast for the forward. What is handed to a block is not: FSDP would cast cos and sin, which are fp32, as well.
    dtypes = dict(param_dtype=layout.compute_dtype, reduce_dtype=getattr(torch, cfg.reduce_dtype))
    options = dict(mesh=mesh, mp_policy=MixedPrecisionPolicy(**dtypes, cast_forward_inputs=False))
    if cfg.cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    reshard = reshards(layout)
    blocks = list(all_blocks(stage).values())
    for block in blocks:
        if hasattr(block, "moe"):  # before the block: each parameter belongs to the innermost fully_shard around it
            experts = expert_mesh(layout)
            experts = experts["dp_replicate", "efsdp"] if layout.dp_replicate > 1 else experts["efsdp"]
            fully_shard(block.moe.experts, reshard_after_forward=reshard, **options | {"mesh": experts})
        # the backward starts with the last block: what it needs first is not freed just before
        fully_shard(block, reshard_after_forward=reshard and block is not blocks[-1], **options)
    if stage.tok_embeddings is not None and not stage.config.tie_embeddings:
        fully_shard(stage.tok_embeddings, reshard_after_forward=reshard, **options)
    # The root keeps the norm and the head, whose weight the loss uses directly: they are gathered before its forward.
    fully_shard(stage, reshard_after_forward=False, **options)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            # the loss is divided by the tokens of the global batch already: gradients are summed, not averaged
            module.set_force_sum_reduction_for_comms(True)
            if layout.world_size > 1:  # alone, torch would copy each gradient to divide it by 1
                module.set_gradient_divide_factor(1.0)


def reshards(layout: Layout) -> bool:
    """Whether a block's weights are freed after its forward. Under a pipeline every micro-batch would gather them again, and
    zero-bubble schedules would even go wrong."""
    return {"always": True, "never": False, "default": layout.pp == 1}[layout.cfg.reshard_after_forward]


def local_tensor(p: Tensor) -> Tensor:
    return p.to_local() if isinstance(p, DTensor) else p


def local_slice(p: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, offset) of this rank's part of a parameter in the whole parameter."""
    if not isinstance(p, DTensor):
        return tuple(p.shape), (0,) * p.dim()
    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return tuple(shape), tuple(offset)


NORMS = (nn.RMSNorm, nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def check_model(model, layout: Layout) -> None:
    """What the full model says of itself must fit it, before memory is taken: raises ValueError for a pattern of tp_plan or
    init_constants that names nothing, for a parameter or buffer without an initial value, and for more than memory holds."""
    check_tp_plan(model)
    names = [fqn for fqn, _ in [*model.named_parameters(), *model.named_buffers()]]
    for pattern in constants_of(model):
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"init_constants: pattern {pattern!r} matches no parameter or buffer of {type(model).__name__}")
    initial_values(model)
    check_memory(model, layout)


def check_memory(model, layout: Layout) -> None:
    """Raise ValueError with the numbers where parameters, gradients and moments alone, shared evenly by all processes, exceed
    what a device or its host has. A lower bound: activations, buffers and an uneven split come on top."""
    cfg, GB = layout.cfg, 1e9
    if cfg.dry_run:
        return
    size = getattr(torch, cfg.param_dtype).itemsize
    # per number; of an optimizer that is not known here nothing is assumed
    adamw = {"param": 2 * size, "bfloat16": 4, "8bit": 2, "fp8": 2, "4bit": 1}.get(getattr(cfg, "adamw_moments", ""), 0)
    total = Counter()
    for fqn, p in model.named_parameters():
        n, kind = p.numel() * layout.dp_replicate / layout.world_size, getattr(cfg, "optimizer", "")
        total["parameters"] += n * size
        total["gradients"] += 0 if cfg.optimizer_in_backward else n * size
        is_muons = kind == "muon" and p.dim() == 2 and fqn.startswith("blocks.")
        total["moments"] += n * (size if is_muons else adamw if kind in ("adamw", "muon") else 0)
    on_host = layout.device.type == "cpu" or cfg.cpu_offload
    sharers = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if on_host else 1
    has = host_memory() if on_host else torch.cuda.get_device_properties(layout.device).total_memory
    if (needs := sum(total.values()) * sharers) > has:
        parts = " + ".join(f"{kind} {n * sharers / GB:.1f}" for kind, n in total.items() if n)
        where = f"the {sharers} process{'es' * (sharers > 1)} of a host" if on_host else "each device"
        less = ["more processes with --dp_shard, --tp or --pp"] + ["fewer --dp_replicate"] * (layout.dp_replicate > 1)
        less += ["--cpu_offload"] * (not on_host) + ["--adamw_moments 8bit"] * bool(total["moments"]) + ["a smaller --flavor"]
        raise ValueError(f"{where} would need at least {needs / GB:.1f} GB ({parts}), and there are {has / GB:.1f} GB; "
                         f"use {', '.join(less[:-1])} or {less[-1]}; --dry_run shows what a layout needs")


def host_memory() -> int:
    """Bytes that the processes of this host may use together: memory, or a control group's limit of it, and swap."""
    try:
        with open("/proc/meminfo") as f:
            sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in f if line.split()[1].isdigit()}
        swap = sizes.get("SwapTotal", 0)
        limits = [sizes["MemTotal"] + swap]
        with open("/proc/self/cgroup") as f:
            groups = [line.rstrip("\n").split(":", 2)[1:] for line in f]
    except (OSError, KeyError):  # no Linux: nothing is refused
        return sys.maxsize
    for kind, path in groups:  # "" is version 2
        if kind == "" or "memory" in kind.split(","):
            root, name = ("/sys/fs/cgroup", "memory.max") if kind == "" else ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            folders = path.strip("/").split("/")
            for depth in range(len(folders) + 1):
                try:
                    with open(os.path.join(root, *folders[:depth], name)) as f:
                        limits += [int(text) + swap] if (text := f.read().strip()).isdigit() else []  # else "max"
                except OSError:
                    pass  # a container sees its own folders only
    return min(limits)


def constants_of(model) -> dict[str, float]:
    return model.init_constants() if hasattr(model, "init_constants") else {}


def initial_values(stage) -> dict[str, tuple[float, float]]:
    """fqn -> (number, 0) for a parameter or buffer that starts as this number, (0, standard deviation) for one that is drawn.

    The first rule that knows it decides: the model's init_constants; a norm of any class starts at 1, a bias at 0; the model's
    init_std; the matrix of an nn.Linear or nn.Embedding gets 0.02. What no rule knows raises ValueError: the numbers that a
    constructor gave are lost on the meta device, and zeros or noise in their place would train as well, only worse.
    """
    values, constants, model = {}, constants_of(stage), type(stage).__name__
    for path, module in stage.named_modules():
        for name, t in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            fqn = f"{path}.{name}" if path else name
            number, std = usual_value(module, name, t), None
            number = next((value for pattern, value in constants.items() if fnmatch.fnmatch(fqn, pattern)), number)
            if not isinstance(t, nn.Parameter):
                if number is None:
                    raise ValueError(f"buffer {fqn} is empty on the meta device: compute it in forward, or add a number for it "
                                     f"to init_constants, in class {model}")
            elif t.dim() == 0:
                raise ValueError(f"parameter {fqn} has no dimension, and FSDP needs one: make it nn.Parameter(torch.empty(1))")
            elif number is None:
                usual = 0.02 if name == "weight" and isinstance(module, (nn.Linear, nn.Embedding)) else None
                std = given if (given := stage.init_std(fqn)) is not None else usual
                if std is None:
                    raise ValueError(f"parameter {fqn} has no initial value: add a standard deviation for it to init_std, or a "
                                     f"number to init_constants, in class {model}")
            values[fqn] = (0.0 if number is None else float(number), float(std or 0))
    return values


def usual_value(module: nn.Module, name: str, t: Tensor) -> float | None:
    """What every model agrees on: 0 for biases, 1 for norms (known by class, or by a class name such as MyNorm)."""
    if name.endswith("bias"):  # in_proj_bias too
        return 0.0
    if isinstance(module, NORMS) or "Norm" in type(module).__name__ and t.dim() == 1:  # a matrix in WeightNormLinear is drawn
        return {"weight": 1.0, "running_mean": 0.0, "running_var": 1.0, "num_batches_tracked": 0.0}.get(name)
    return None


def init_weights(stage, layout: Layout, seed: int) -> None:
    """Allocate the meta parameters on the device and fill them: a function of (seed, fqn) alone, so equal in every layout.

    A parameter is drawn in blocks of rows, each from a generator of its own, and a rank draws only the blocks that it holds
    a part of: 405B parameters take no longer per rank than their shard, and never more memory than one block.
    """
    values = initial_values(stage)
    stage.to_empty(device="cpu" if layout.cfg.cpu_offload else layout.device)
    for fqn, p in [*stage.named_parameters(), *stage.named_buffers()]:
        local, (number, std) = local_tensor(p.detach()), values[fqn]
        if std == 0:
            local.fill_(number)
            continue
        (rows, *_), (first, *_) = shape, offset = local_slice(p)
        block = 1 if p.dim() == 3 else 1024  # a stack of experts: one generator per expert
        rest = tuple(slice(o, o + n) for o, n in zip(offset[1:], shape[1:], strict=True))
        for b in range(first // block, math.ceil((first + rows) / block) if local.numel() else 0):
            digest = hashlib.sha256(f"{seed}/{fqn}/{b}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            begin, end = max(first, b * block), min(first + rows, (b + 1) * block)
            n = min(block, p.shape[0] - b * block)  # rows of this block in the whole parameter
            drawn = torch.randn(n, *p.shape[1:], generator=generator)[begin - b * block : end - b * block]
            local[begin - first : end - first] = drawn[(slice(None), *rest)] * std


# ---------------------------------------------------------------- pipeline parallelism


def split_stages(cfg: ParallelConfig, pp: int, n_layers: int) -> list[list[str]]:
    """Module names of every pipeline stage, in order. Raises ValueError when the layers do not fill the stages."""
    blocks = [f"blocks.{i}" for i in range(n_layers)]
    everything = ["tok_embeddings", *blocks, "norm", "head"]
    if cfg.pp_stage_fqns:
        split = [[n.strip() for n in stage.split(",")] for stage in cfg.pp_stage_fqns.split(";")]
        given = [n for stage in split for n in stage]
        for n in given:
            if n not in everything:
                names = f"tok_embeddings, blocks.0 .. blocks.{n_layers - 1}, norm, head"
                raise ValueError(f"--pp_stage_fqns: {n!r} is no module of the model; use {names}")
        if given != everything:
            wrong = next((a for a, b in zip(everything, given + [None], strict=False) if a != b), given[-1])
            raise ValueError(f"--pp_stage_fqns must name each module once, in order; {wrong!r} is missing, double or misplaced")
        return split
    first, last = cfg.pp_first_stage_less_layers, cfg.pp_last_stage_less_layers
    weight = n_layers + first + last  # the embedding and the head count as layers when the work is balanced
    if cfg.pp_schedule_csv:
        n = 1 + max(map(int, re.findall(r"(\d+)[FBIW]", read_csv(cfg.pp_schedule_csv))), default=0)
    elif cfg.pp_layers_per_stage:
        n = math.ceil(weight / cfg.pp_layers_per_stage)
        if n % pp:
            made = f"--pp_layers_per_stage {cfg.pp_layers_per_stage} makes {n} stages"
            fits = " or ".join(str(k) for k in range(1, weight + 1) if math.ceil(weight / k) % pp == 0)
            raise ValueError(f"{made} of {n_layers} layers, no multiple of --pp {pp}; use {fits or 'a smaller --pp'}")
    else:
        n = pp if cfg.pp_schedule in ONE_STAGE_PER_RANK else 2 * pp
    sizes = [weight // n + (i < weight % n) for i in range(n)]
    sizes[0] -= first
    sizes[-1] -= last
    if min(sizes) < (n > n_layers) or min(sizes[1:-1], default=1) < 1 or min(sizes) < 0:
        raise ValueError(f"{n_layers} layers are too few for {n} pipeline stages; use a smaller --pp or more layers")
    bounds = [sum(sizes[:i]) for i in range(n + 1)]
    split = [blocks[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]
    split[0].insert(0, "tok_embeddings")
    split[-1] += ["norm", "head"]
    return split


def read_csv(path: str) -> str:
    try:
        with open(path) as f:
            return f.read()
    except OSError as e:
        raise ValueError(f"--pp_schedule_csv {path}: {e.strerror}") from None


def stage_ids(layout: Layout, n_stages: int, rank: int) -> list[int]:
    """The stages of a pipeline rank: every pp-th, or for V schedules one on the way down and one on the way back."""
    if layout.cfg.pp_schedule_csv:
        row = read_csv(layout.cfg.pp_schedule_csv).splitlines()[rank]
        return sorted(set(map(int, re.findall(r"(\d+)[FBIW]", row))))
    if layout.cfg.pp_schedule in V_SHAPED:
        return [rank, n_stages - 1 - rank]
    return list(range(rank, n_stages, layout.pp))


def pipeline_stages(model, layout: Layout) -> list[nn.Module]:
    """This rank's stages: copies of the (meta) model without the parts that others hold, names unchanged; [model] if pp 1."""
    split = split_stages(layout.cfg, layout.pp, model.config.n_layers) if layout.pp > 1 else [[]]
    stages = []
    for i in stage_ids(layout, len(split), layout.coordinate("pp")) if layout.pp > 1 else [0]:
        stage = model
        if layout.pp > 1:
            stage = copy.deepcopy(model)
            keep = set(split[i])
            if i == len(split) - 1:
                keep.add("mtp")
                if embeds_at_both_ends(model.config):
                    keep.add("tok_embeddings")  # a copy, kept equal by sum_tied_gradients
            for name in ("tok_embeddings", "norm", "head", "mtp"):
                if name not in keep and hasattr(stage, name):
                    setattr(stage, name, None)
            for name in [n for n in stage.blocks if f"blocks.{n}" not in keep]:
                del stage.blocks[name]
        stage.index, stage.n_stages = i, len(split)
        stages.append(stage)
    return stages


def embeds_at_both_ends(config) -> bool:
    """Whether the last stage of a pipeline needs the embedding, too: as a tied head, or for multi-token prediction."""
    return config.tie_embeddings or getattr(config, "mtp_depth", 0) > 0


def tied_copy(stage):
    """The last stage's copy of the embedding's weight under pp, or None."""
    is_copy = stage.index == stage.n_stages - 1 > 0 and stage.tok_embeddings is not None
    return stage.tok_embeddings.weight if is_copy else None


def sum_tied_gradients(stages, layout: Layout) -> None:
    """Under pp the embedding's weight and its copy in the last stage each got a part of the gradient: give both the sum."""
    first = next((s.tok_embeddings.weight for s in stages if s.index == 0), None)
    last = next((w for s in stages if (w := tied_copy(s)) is not None), None)
    mine = [local_tensor(w.grad) for w in (first, last) if w is not None]
    if len(mine) == 2:  # a V schedule: both ends are on this rank
        mine[0].add_(mine[1])
        mine[1].copy_(mine[0])
    elif len(mine) == 1:
        group = layout.group("pp")
        ends = dist.get_process_group_ranks(group)
        peer = ends[-1] if last is None else ends[0]
        theirs = torch.empty_like(mine[0])
        ops = [dist.P2POp(dist.isend, mine[0].clone(), peer, group), dist.P2POp(dist.irecv, theirs, peer, group)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        mine[0].add_(theirs)


def pipeline_schedule(stages, layout: Layout, T: int):
    """torch's schedule for sequences of T tokens on this rank. Built once per shape, because its buffers keep the first."""
    key = (layout.n_microbatches, T)
    if key in layout.schedules:
        return layout.schedules[key]
    from torch.distributed.pipelining import PipelineStage, schedules

    B, D, device = layout.cfg.pp_microbatch_size, stages[0].config.dim, layout.device
    # The shapes are given, not inferred: inference runs a real forward on garbage, and resets FSDP's gradients.
    tokens = torch.empty(B, T, dtype=torch.int64, device=device)
    h = torch.empty(B, T // layout.tp, D, dtype=layout.compute_dtype, device=device, requires_grad=True)
    loss = torch.empty((), dtype=torch.float32, device=device, requires_grad=True)
    parts = [
        PipelineStage(
            s, s.index, s.n_stages, device, group=layout.group("pp"),
            input_args=(tokens if s.index == 0 else h,), output_args=(loss if s.index == s.n_stages - 1 else h,),
        )
        for s in stages
    ]
    options = dict(
        n_microbatches=layout.n_microbatches,
        # the last stage's forward returns the sum of token losses itself, as FSDP has the head's weight at hand only there
        loss_fn=lambda loss, target: loss / layout.loss_denom,
        scale_grads=False,  # divided by the tokens of the global batch: dividing by micro-batches as well would be wrong
    )
    name = layout.cfg.pp_schedule
    if layout.cfg.pp_schedule_csv:
        schedule = schedules._PipelineScheduleRuntime(parts, **options)
        schedule._load_csv(layout.cfg.pp_schedule_csv, format="compute_only")
    else:
        schedule = schedules.get_schedule_class(name)(parts[0] if name in ONE_STAGE_PER_RANK else parts, **options)
    layout.schedules[key] = schedule
    return schedule


def pipeline_forward(stages, layout: Layout, microbatches: list[dict]) -> Tensor:
    """Forward only, for evaluation. Returns the loss summed over the micro-batches on the rank of the last stage, else 0.

    A relay: all micro-batches go through one stage, then to the rank of the next. So at any time a rank waits for one other
    only, which is waiting for it, and nothing can hang even where a send waits for its receive (NCCL). Meanwhile the first
    ranks of a 1F1B pipeline are with the next call. torch's own schedule.eval fails on V schedules and on a loss computed
    inside the stage.
    """
    group = layout.group("pp")
    ranks = dist.get_process_group_ranks(group)
    n_stages, mine, by_index = stages[0].n_stages, layout.coordinate("pp"), {s.index: s for s in stages}
    owner = {i: r for r in range(layout.pp) for i in stage_ids(layout, n_stages, r)}
    B, T = microbatches[0]["tokens"].shape
    shape = (B, T // layout.tp, stages[0].config.dim)
    h = []  # per micro-batch what goes into the stage, then what comes out of it
    for i in range(n_stages):
        if owner[i] != mine:
            if i + 1 < n_stages and owner[i + 1] == mine:
                h = [torch.empty(shape, dtype=layout.compute_dtype, device=layout.device) for _ in microbatches]
                for x in h:
                    dist.recv(x, ranks[owner[i]], group)
            continue
        arguments = [b if i == 0 else b | {"tokens": x} for b, x in zip(microbatches, h if i else microbatches, strict=True)]
        h = [by_index[i](**a) for a in arguments]
        if i + 1 < n_stages and owner[i + 1] != mine:
            for x in h:
                dist.send(x.contiguous(), ranks[owner[i + 1]], group)
    return torch.stack(h).sum() if owner[n_stages - 1] == mine else torch.zeros((), device=layout.device)


# ---------------------------------------------------------------- one training step


def inputs(batch, a: int | None, layout: Layout) -> dict[str, Tensor]:
    """Arguments of the model for accumulation step a (None: all steps at once): this cp rank's part of each sequence."""
    pick = (lambda x: x.flatten(0, 1)) if a is None else (lambda x: x[a])
    out = {"tokens": pick(batch.tokens), "labels": pick(batch.labels), "positions": pick(batch.positions)}  # (B, T)
    if layout.mtp:  # what lies to the right of a token may be on another cp rank
        from models.deepseek import shift_targets

        doc_ids = None if batch.doc_ids is None else pick(batch.doc_ids)
        out["next_tokens"], out["next_labels"] = shift_targets(out["tokens"], out["labels"], doc_ids)
    if layout.cp > 1:
        index = sequence_index(out["tokens"].shape[1], layout.cp, layout.coordinate("cp")).to(out["tokens"].device)
        out = {k: v.index_select(1, index) for k, v in out.items()}  # (B, T/cp)
    if batch.doc_ids is not None:
        out["doc_ids"] = pick(batch.doc_ids)  # whole sequences: a query's keys may be on any rank
    return out


def count_tokens(labels: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """(tokens with a loss in the global batch, of this data rank): the one denominator of every layout. Stays on the device."""
    mine = (labels != IGNORE).sum()
    total = mine.clone()
    dist.all_reduce(total)
    # every data rank was counted once by each of its pp, cp and tp ranks
    return (total // (layout.world_size // layout.data_ranks)).clamp(min=1), mine


def check_first_batch(batch, layout: Layout) -> None:
    """Raises RuntimeError if no token of a run's first batch has a loss: it could go on for ever at loss 0.0000. Later ones
    may be without, so nobody waits for the device to ask them."""
    n = (batch.labels != IGNORE).sum()
    dist.all_reduce(n)
    if not n:
        raise RuntimeError(f"no token of the first batch has a loss: all its labels are {IGNORE}; train on data with labels")


def forward_backward(stages, batch, layout: Layout) -> Tensor:
    """Gradients of the mean loss over the global batch, complete when this returns. Gives this rank's part for reduce_loss.

    Gradients travel once per step: FSDP's reduce-scatter waits for the last accumulation step.
    """
    denom, mine = count_tokens(batch.labels, layout)
    total = torch.zeros((), device=layout.device)
    if layout.pp > 1:
        kwargs = inputs(batch, None, layout)
        tokens, layout.loss_denom = kwargs.pop("tokens"), denom
        schedule = pipeline_schedule(stages, layout, tokens.shape[1])
        args = [tokens] if stages[0].index == 0 else []
        if any(s.index == s.n_stages - 1 for s in stages):
            schedule.step(*args, target=kwargs["labels"], losses=(losses := []), return_outputs=False, **kwargs)
            total = torch.stack(losses).sum().detach()
        else:
            schedule.step(*args, return_outputs=False, **kwargs)
        if embeds_at_both_ends(stages[0].config):
            sum_tied_gradients(stages, layout)
    else:
        model = stages[0]
        for a in range(batch.tokens.shape[0]):
            last = a == batch.tokens.shape[0] - 1
            if isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(last)
                model.set_is_last_backward(last)
                # what stays gathered between forward and backward may stay for the next accumulation step as well
                model.set_reshard_after_backward(last, recurse=not reshards(layout))
            loss = model(**inputs(batch, a, layout), loss_denom=denom)
            loss.backward()
            total += loss.detach()
    if layout.cfg.loss_parallel and layout.tp > 1:
        total = total / layout.tp  # every tp rank has the whole loss
    return torch.stack([total, total * denom / mine.clamp(min=1)])


def reduce_loss(part: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """(mean loss over the tokens of the global batch, largest mean of one data rank), on every rank."""
    table = part.new_zeros(2, layout.data_ranks)
    table[:, layout.data_rank] = part
    dist.all_reduce(table)
    return table[0].sum(), table[1].max()


def reduce_hash(share: str, layout: Layout) -> str:
    """Hash of the tokens and labels of the global batch, on every rank, from that of each data rank's sequences (data.py)."""
    speaks = layout.rank < layout.world_size // layout.pp and layout.rank % (layout.cp * layout.tp) == 0  # one per data rank
    total = torch.tensor(int(share, 16) * speaks)  # on the host, so that no device waits for it
    dist.all_reduce(total)
    return f"{total.item() % 2**48:012x}"


@torch.no_grad()
def evaluate(stages, batches, layout: Layout) -> tuple[float, float | None]:
    """(loss in nats per token, in bits per byte or None where the bytes are unknown) over all batches of all data ranks.
    NaN where no token has a loss."""
    sums = torch.zeros(3, dtype=torch.float64, device=layout.device)
    n_bytes_known = True
    for batch in batches:
        if layout.pp > 1:
            kwargs = inputs(batch, None, layout)
            size = layout.cfg.pp_microbatch_size
            pieces = [dict(zip(kwargs, v, strict=True)) for v in zip(*(v.split(size) for v in kwargs.values()), strict=True)]
            loss = pipeline_forward(stages, layout, pieces)
        else:
            loss = sum(stages[0](**inputs(batch, a, layout)) for a in range(batch.tokens.shape[0]))
        sums[0] += loss / (layout.tp if layout.cfg.loss_parallel else 1)
        # counted by every pp, cp and tp rank of this data rank: taken as a share
        copies = layout.world_size // layout.data_ranks
        sums[1] += (batch.labels != IGNORE).sum() / copies
        n_bytes_known = n_bytes_known and batch.n_bytes is not None
        sums[2] += (batch.n_bytes or 0) / copies
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # without a backward nothing else frees the gathered weights
    dist.all_reduce(sums)
    total, tokens, n_bytes = sums.tolist()
    return total / tokens if tokens else math.nan, total / n_bytes / math.log(2) if n_bytes_known and n_bytes else None


def replicas(grad: Tensor, layout: Layout) -> int:
    """How many ranks of a pipeline stage hold the same part of this gradient."""
    sharded = 1
    if isinstance(grad, DTensor):
        sharded = math.prod(grad.device_mesh.size(i) for i, x in enumerate(grad.placements) if not x.is_replicate())
    return layout.world_size // layout.pp // sharded


def step_in_backward(optimizers, layout: Layout) -> None:
    """--optimizer_in_backward: from now on each parameter is updated within the backward, when its gradient is summed over
    the ranks, and the gradient is freed. There are never more gradients in memory than those of one FSDP unit."""
    if not layout.cfg.optimizer_in_backward:
        return
    layout.squares = torch.zeros((), dtype=torch.float64, device=layout.device)

    def update(p, optimizer, group):
        layout.squares += local_tensor(p.grad).double().square().sum() / replicas(p.grad, layout)
        everything, optimizer.param_groups = optimizer.param_groups, [{**group, "params": [p]}]
        optimizer.step()
        optimizer.param_groups, p.grad = everything, None

    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.register_post_accumulate_grad_hook(partial(update, optimizer=optimizer, group=group))


def clip_grad_norm(stages, max_norm: float, layout: Layout) -> Tensor:
    """Scale the gradients so that their norm is at most max_norm; returns the norm before, a 0-d tensor, equal on every rank.

    One rule for every layout: a rank adds the squares of its part of each gradient, divided by the number of ranks that hold
    the same part; one all-reduce over all ranks gives the square of the norm. Right for parameters on different meshes, for
    pipeline stages, and for a tied weight that two stages hold (counted once).
    """
    squares = torch.zeros((), dtype=torch.float64, device=layout.device)
    if layout.squares is not None:
        squares += layout.squares
        layout.squares.zero_()
    grads: list[Tensor] = []
    groups: dict[int, list[Tensor]] = {}  # number of ranks that hold the same part -> local gradients
    copies = {id(w) for s in stages if (w := tied_copy(s)) is not None}
    for stage in stages:
        for p in stage.parameters():
            if p.grad is None:
                continue
            grads.append(local_tensor(p.grad))
            if id(p) not in copies:
                groups.setdefault(replicas(p.grad, layout), []).append(grads[-1])
    for n, members in groups.items():
        norms = torch._foreach_norm(members, 2, dtype=torch.float64)  # in fp32 a sum of a million squares loses six digits
        squares += (torch.stack(norms) ** 2).sum().to(layout.device) / n
    dist.all_reduce(squares)
    norm = squares.sqrt().float()
    if "NANOTITAN_RECORD" in os.environ:
        record_step(stages, layout, os.environ["NANOTITAN_RECORD"])
    if max_norm > 0 and grads:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, scale.to(grads[0].device))
    return norm


def skip_if_not_finite(optimizers, grad_norm: Tensor, layout: Layout) -> None:
    """The next step() of each optimizer changes neither weights nor moments if the norm is not finite.

    torch's fused optimizers, and those of optim.py, announce with _step_supports_amp_scaling that they read `found_inf`, as
    torch.amp.GradScaler tells them: decided on the device, the host hurries on; read the norms when they are logged
    (not_finite). For any other optimizer the host asks, one wait per step, and takes the gradients away: a parameter without
    one is left alone. The same for one without state yet, as torch's fused SGD fills its momentum only in a step that is not
    skipped.

    With --optimizer_in_backward it is too late for all that: the weights have moved.
    """
    if layout.cfg.optimizer_in_backward:
        return
    found_inf = (~grad_norm.isfinite()).float()
    for optimizer in optimizers:
        if getattr(optimizer, "_step_supports_amp_scaling", False) and optimizer.state:
            optimizer.found_inf = found_inf.cpu() if layout.cfg.cpu_offload else found_inf
        elif found_inf:
            optimizer.zero_grad(set_to_none=True)


def not_finite(norms: dict[int, Tensor]) -> list[tuple[int, float]]:
    """(step, gradient norm) of the steps that were skipped; empties norms. Waits for the device: log lines do anyway."""
    values = dict(zip(norms, torch.stack([*norms.values()]).tolist(), strict=True))
    norms.clear()
    return [(step, norm) for step, norm in values.items() if not math.isfinite(norm)]


def record_step(stages, layout: Layout, folder: str) -> None:
    """Write this step's whole gradients, and the weights before the update, for --check_parity (dryrun.py)."""
    os.makedirs(folder, exist_ok=True)
    whole = lambda t: (t.full_tensor() if isinstance(t, DTensor) else t).detach().cpu().clone()  # noqa: E731  all ranks take part
    named = [(fqn, p) for stage in stages for fqn, p in stage.named_parameters()]
    part = {"gradient": {n: whole(p.grad) for n, p in named if p.grad is not None}, "weight": {n: whole(p) for n, p in named}}
    if layout.rank % (layout.world_size // layout.pp) == 0:  # one rank of each pipeline rank's group
        n = len([f for f in os.listdir(folder) if f.endswith(f"-{layout.rank}.pt")])
        torch.save(part, os.path.join(folder, f"{n}-{layout.rank}.pt"))
