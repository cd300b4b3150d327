"""The flags and the numbers of a layout, the three collectives that have a backward, and this
rank's part of a tensor."""

import math
import re
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from flags.config import Need, flag

Reshard = Literal["default", "always", "never"]
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
# What flags need to have an effect: see flags/config.py. c is what refusals.collect_facts()
# returns.
TP = Need("without --tp 2 or more", lambda c: c.tp > 1)
CP = Need("without --cp 2 or more", lambda c: c.cp > 1)


def n_experts_of(config: Any) -> int:
    """Experts of a layer; 0 for a model without, whose config need not have the field."""
    if hasattr(config, "n_experts"):
        return config.n_experts
    return 0


def mtp_depth_of(config: Any) -> int:
    """Layers of multi-token prediction; 0 for a model without, whose config need not have the
    field."""
    if hasattr(config, "mtp_depth"):
        return config.mtp_depth
    return 0


EXPERTS = Need("without experts, and this flavor has none", n_experts_of)
AC_SELECTIVE = Need("without --ac selective", lambda c: c.ac == "selective")
AC_BUDGET = Need("without --ac budget", lambda c: c.ac == "budget")
ASYNC_TP = Need(
    "without CUDA, --compile and --tp 2 or more", lambda c: c.on_cuda and c.compile and c.tp > 1
)
COPIED = Need(
    "in one process that computes with its parameters as they are: nothing is gathered or cast",
    lambda c: c.world_size > 1 or c.cpu_offload or str(c.dtype)[6:] != c.param_dtype,
)


@dataclass(kw_only=True)
class ParallelConfig:
    # copies of the (sharded) model, gradients all-reduced between them: HSDP, or DDP with dp_shard
    # 1
    dp_replicate: int = 1
    # ranks that share one copy of parameters, gradients, optimizer state (FSDP2); -1 = what is left
    dp_shard: int = -1
    # tensor parallelism with sequence parallelism: every matrix is split over this many ranks
    tp: int = 1
    pp: int = 1  # pipeline parallelism: the layers are split over this many ranks
    cp: int = 1  # context parallelism: every sequence is split over this many ranks
    # free gathered weights after the forward; default: unless pp
    reshard_after_forward: Reshard = flag("default", COPIED)
    # keep parameters, gradients and optimizer state in host memory (slow, small)
    cpu_offload: bool = False
    # split the loss over the vocabulary; off = over the sequence, gathering the head
    loss_parallel: bool = flag(True, TP)
    async_tp: bool = flag(False, ASYNC_TP)  # overlap tp's communication with its matmuls
    # gather keys, or trade sequence for heads (Ulysses)
    cp_method: Literal["allgather", "alltoall"] = flag("allgather", CP)
    # of matmuls and activations; auto = bfloat16 where native
    compute_dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    # dtype of the parameters that the optimizer updates
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    # dtype in which gradients are summed over ranks
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    # what the backward recomputes of a block
    ac: Literal["none", "full", "selective", "op", "budget"] = "none"
    ac_every: int = flag(2, AC_SELECTIVE)  # checkpoint every k-th block
    # share of the activation memory to keep: 0 = recompute all, 1 = keep all
    ac_budget: float = flag(0.5, AC_BUDGET)
    compile: bool = False  # torch.compile each block


@dataclass(kw_only=True)
class ExpertConfig:
    # expert parallelism: the experts are split over this many of the dp_shard x cp x tp ranks
    ep: int = flag(1, EXPERTS)
    # 1: tp ranks hold whole experts (ep may borrow tp); tp: tp ranks split every expert
    etp: int = flag(1, EXPERTS)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Facts about this run on these devices. check_layout derives them from the flags, connect adds
    the device, make_mesh the meshes; nothing changes them afterwards."""

    pp: int = 1  # degrees of the axes
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    local_batch_size: int = 1  # sequences that one data rank runs per forward
    global_batch_size: int = 1  # sequences per optimizer step, over all data ranks
    microbatch_size: int = 1  # sequences of a pipeline's micro-batch
    # order of a pipeline's micro-batches: --pp_schedule, or the file of --pp_schedule_csv
    schedule: str = "1F1B"
    reshards: bool = True  # a block's gathered weights are freed after its forward
    # under tp the loss is split over the vocabulary, and every tp rank has the whole of it
    loss_parallel: bool = True
    rank: int = 0
    device: torch.device = torch.device("cpu")  # where the model computes
    offload: bool = False  # parameters, gradients and moments are in host memory
    compute_dtype: torch.dtype = torch.float32
    memory: int = 0  # bytes of the smallest device; 0 = not known, as on CPUs
    mtp: bool = False  # the model has multi-token prediction
    has_experts: bool = False  # the model has layers with experts
    # pp, dp_replicate, fsdp (= dp_shard x cp), tp; all three: see parallel.make_mesh
    mesh: DeviceMesh | None = None
    full_mesh: DeviceMesh | None = None  # the same ranks with all five axes
    # the same ranks as pp, dp_replicate, efsdp, ep, etp; None without experts
    expert_mesh: DeviceMesh | None = None

    @property
    def degrees(self) -> dict[str, int]:
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        return math.prod(self.degrees.values())

    @property
    def data_ranks(self) -> int:  # ranks with different sequences
        return self.dp_replicate * self.dp_shard

    @property
    def data_rank(self) -> int:
        return self.rank // (self.cp * self.tp) % self.data_ranks

    @property
    def accumulation(self) -> int:
        return self.global_batch_size // (self.local_batch_size * self.data_ranks)

    def group(self, axis: str) -> dist.ProcessGroup:
        return self.full_mesh[axis].get_group()

    def coordinate(self, axis: str) -> int:
        return self.full_mesh[axis].get_local_rank()

    def step_text(self, seq_len: int, reduces_always: bool) -> str:
        """Where the model runs, and how a step's sequences are shared out: for the line that a run
        begins with.
        reduces_always: the result of the function below."""
        each = ""
        if reduces_always and self.accumulation > 1:
            each = ", gradients reduced after each"
        return (
            f"{self} on {self.device.type}, {str(self.compute_dtype)[6:]} | "
            f"{self.global_batch_size} sequences x {seq_len} "
            f"tokens per step, {self.accumulation} x {self.local_batch_size} on each of "
            f"{self.data_ranks} data ranks{each}"
        )

    def __str__(self):
        borrowed = {"ep": self.ep, "etp": self.etp}
        return (
            " x ".join(f"{a} {n}" for a, n in (self.degrees | borrowed).items() if n > 1)
            or "one process"
        )


def dtype_of_compute(cfg: ParallelConfig, on_cuda: bool) -> torch.dtype:
    native_bf16 = (
        on_cuda or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    )
    if cfg.compute_dtype == "bfloat16" or cfg.compute_dtype == "auto" and native_bf16:
        return torch.bfloat16
    return torch.float32


def all_blocks(stage) -> dict[int, nn.Module]:
    """Layer number -> block. The block of DeepSeek's multi-token prediction has the number after
    the last."""
    blocks = {int(i): block for i, block in stage.blocks.items()}
    if hasattr(stage, "mtp") and stage.mtp is not None:
        blocks[stage.config.n_layers] = stage.mtp.block
    return blocks


def reduces_always(stage: nn.Module, layout: Layout, cfg: ParallelConfig) -> bool:
    """Whether gradients are reduce-scattered after every micro-batch of a step, and not once at its
    end.

    Once per step costs the least communication, and the memory of whole gradients until then. After
    every micro-batch: where whole gradients, with this rank's parameters, gradients and two
    moments, would take more than half of a device and leave too little for activations. Never with
    --param_dtype bfloat16, because the micro-batches' sums would be rounded to bfloat16.
    """
    ranks = layout.dp_shard * layout.cp
    if ranks == 1 or layout.pp > 1 or cfg.param_dtype != "float32" or not layout.memory:
        return False
    experts = set()
    for block in all_blocks(stage).values():
        if hasattr(block, "moe"):
            experts |= set(block.moe.experts.parameters())
    whole = 0  # bytes of whole gradients
    held = 0  # bytes of this rank's parameters, gradients and moments
    for p in stage.parameters():
        n = local_tensor(p).numel()
        sharers = ranks
        if p in experts:
            sharers = ranks * layout.tp / (layout.ep * layout.etp)
        if p.requires_grad:
            whole += n * getattr(torch, cfg.reduce_dtype).itemsize
            held += n / sharers * 4 * 4
        else:  # frozen: only the parameter
            held += n / sharers * p.element_size()
    if cfg.cpu_offload:
        held = 0
    return whole + held > layout.memory / 2


# torch 2.13 renamed both collectives
if torch.__version__ < "2.13":
    all_gather_single = dist.all_gather_into_tensor
    reduce_scatter_single = dist.reduce_scatter_tensor
else:
    all_gather_single = dist.all_gather_single
    reduce_scatter_single = dist.reduce_scatter_single
# These return their result instead of writing into a tensor that they are given: --ac op can keep
# only what is returned.
functional = torch.ops._c10d_functional


class AllGather(torch.autograd.Function):
    """Concatenate the ranks' x along dim. Backward: every rank used every part, so a reduce-scatter
    adds up their gradients."""

    @staticmethod
    def forward(ctx, x, dim, group):
        """x (..., n, ...) on each of the group's ranks, n along dim -> (..., ranks * n, ...), in
        rank order, equal on all."""
        ctx.dim = dim
        ctx.group = group
        x = x.movedim(dim, 0).contiguous()
        out = x.new_empty(dist.get_world_size(group) * x.shape[0], *x.shape[1:])
        all_gather_single(out, x, group=group)
        return out.movedim(0, dim)

    @staticmethod
    def backward(ctx, grad):
        """grad: of the loss on this rank by the whole result. Returns the gradient of all ranks'
        losses together by this
        rank's x, and None for dim and group."""
        grad = grad.movedim(ctx.dim, 0).contiguous()
        out = grad.new_empty(grad.shape[0] // dist.get_world_size(ctx.group), *grad.shape[1:])
        reduce_scatter_single(out, grad, group=ctx.group)
        return out.movedim(0, ctx.dim), None, None


class ReduceScatter(torch.autograd.Function):
    """Sum the ranks' x; each rank keeps its part along dim. Backward: an all-gather."""

    @staticmethod
    def forward(ctx, x, dim, group):
        """x (..., ranks * n, ...) on each of the group's ranks -> part number `rank` of their sum,
        (..., n, ...)."""
        ctx.dim = dim
        ctx.group = group
        x = x.movedim(dim, 0).contiguous()
        out = functional.reduce_scatter_tensor(
            x, "sum", dist.get_world_size(group), group.group_name
        )
        return functional.wait_tensor(out).movedim(0, dim)

    @staticmethod
    def backward(ctx, grad):
        """grad (..., n, ...): of this rank's loss by its part. Returns the gradient of all ranks'
        losses together by this rank's x, (..., ranks * n, ...), and None for dim and group."""
        return AllGather.apply(grad, ctx.dim, ctx.group), None, None


def start_exchange(
    x: Tensor, group: dist.ProcessGroup, sent: list[int] | None, received: list[int] | None
) -> Tensor:
    """Send sent[i] rows of x to rank i, receive received[i] from it; None: all alike. The rows are
    on the way until functional.wait_tensor(result)."""
    n = dist.get_world_size(group)
    equal = [x.shape[0] // n] * n
    return functional.all_to_all_single(
        x.contiguous(), received or equal, sent or equal, group.group_name
    )


class AllToAll(torch.autograd.Function):
    """Send sent[i] rows of x to rank i, receive received[i] from it; None: all alike. Backward: the
    other way round."""

    @staticmethod
    def forward(ctx, x, group, sent=None, received=None):
        ctx.given = group, received, sent
        return functional.wait_tensor(start_exchange(x, group, sent, received))

    @staticmethod
    def backward(ctx, grad):
        return AllToAll.apply(grad, *ctx.given), None, None, None


def local_tensor(p: Tensor) -> Tensor:
    """This rank's part of a parameter or gradient; a plain tensor is whole on every rank."""
    if isinstance(p, DTensor):
        return p.to_local()
    return p


def whole_tensor(p: Tensor) -> Tensor:
    """The whole of a parameter or gradient, on every rank. Gathering is collective: all ranks call
    this function."""
    if isinstance(p, DTensor):
        return p.full_tensor()
    return p


def reshard(*stages) -> None:
    """Free the weights that FSDP, or distributed/cast.py, has gathered, as a backward does: after
    rollouts, and after a forward without a backward."""
    for stage in stages:
        for module in stage.modules():
            if hasattr(module, "reshard"):
                module.reshard()


def local_slice(p: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(shape, offset) of this rank's part of a parameter in the whole parameter."""
    if not isinstance(p, DTensor):
        return tuple(p.shape), (0,) * p.dim()
    shape, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return tuple(shape), tuple(offset)


def pattern_of(fqn: str) -> str:
    """The same module in every block: blocks.0.attn.wq -> blocks.*.attn.wq."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", fqn)


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """fqn -> parameter (tied ones once) or persistent buffer, under the plain model's names."""
    tensors = dict(module.named_parameters())
    for name, t in module.state_dict(keep_vars=True).items():
        if isinstance(t, Tensor) and not isinstance(t, nn.Parameter):
            tensors[name] = t
    # compile's and activation checkpointing's
    wrappers = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.")
    return {wrappers.sub("", name): tensor for name, tensor in tensors.items()}
