"""How one model runs on many devices, in the order of a lecture: the mesh, tensor parallelism,
context parallelism, activation checkpointing and compile, FSDP2, the initial weights, one training
step, the gradient norm.

One process drives one device. The processes form a grid with one named axis per kind of
parallelism, outermost first:

    pp            pipeline: each rank holds some layers; activations travel between neighbours
    dp_replicate  copies of the model; gradients are all-reduced between them
    dp_shard      FSDP: parameters, gradients and optimizer state are sharded; all-gathered when needed
    cp            context: each rank holds a part of every sequence; FSDP shards over cp as well
    tp            tensor: each rank holds a part of every matrix, and between blocks a part of the sequence

Whatever the grid, the same model is trained, because of five rules:

    1. same weights        how a parameter starts depends on the seed and its name only (init_weights)
    2. same data           the global batch of a step is the same in every layout; a rank takes its part (data.py, inputs)
    3. same loss           sum of token losses / tokens of the global batch, never a mean of means (count_tokens)
    4. same gradient norm  every gradient counts once, however many ranks hold it (clip_grad_norm)
    5. same rounding       one device casts weights and gradients where FSDP does, to the same bits (shard, distributed/cast.py)

This file stands on distributed/: flags and numbers of a layout (layout.py), refusals (refusals.py),
start and end of processes (launch.py), pipelines (pipeline.py, stages.py, schedule.py), experts
(experts.py), matmuls in 8 bits (float8.py).
"""

import fnmatch
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.parallel.style import ParallelStyle
from torch.utils.checkpoint import checkpoint

from distributed.cast import cast_experts, cast_weights
from distributed.initial import draw_block, draw_side_by_side, initial_values
from distributed.launch import usable_cores
from distributed.layout import (
    AllGather,
    AllToAll,
    Layout,
    ParallelConfig,
    all_blocks,
    local_slice,
    local_tensor,
    reduces_always,
    reshard,
)
from distributed.pipeline import ZERO_BUBBLE, Schedule, tied_copy
from models.attention import causal_attention, lower_right_mask, sdpa
from models.layers import places_of, takes_places
from models.loss import IGNORE, linear_cross_entropy, softmax_loss


# ---------------------------------------------------------------- the mesh
def make_mesh(layout: Layout) -> Layout:
    """Lay the ranks out on named axes: tp, for the fastest links, connects neighbours in rank, pp
    crosses the slowest.

    Three views of the one grid, because parameters, tokens and experts are split over different
    ranks:

        full_mesh    pp, dp_replicate, dp_shard, cp, tp   the axes of the flags
        mesh         pp, dp_replicate, fsdp, tp           fsdp = dp_shard x cp: cp ranks hold other tokens, as data ranks do
        expert_mesh  pp, dp_replicate, efsdp, ep, etp     with experts only: efsdp shards over the ranks beside ep and etp

    With --dp_shard 2 --cp 2 --tp 2 on 8 ranks, tp is {0,1} {2,3} {4,5} {6,7}; cp {0,2} {1,3} {4,6}
    {5,7}; fsdp {0,2,4,6} {1,3,5,7}. Nothing is sent here: NCCL connects a process group at its
    first use. Returns the layout with its meshes.
    """
    device = layout.device.type
    pp = layout.pp
    dp_replicate = layout.dp_replicate
    tp = layout.tp
    fsdp = layout.dp_shard * layout.cp
    mesh = init_device_mesh(
        device, (pp, dp_replicate, fsdp, tp), mesh_dim_names=("pp", "dp_replicate", "fsdp", "tp")
    )
    # the axis by number: torch 2.11 does not accept a name
    full_mesh = mesh._unflatten(2, (layout.dp_shard, layout.cp), ("dp_shard", "cp"))
    expert_mesh = None
    if layout.has_experts:
        ep = layout.ep
        etp = layout.etp
        shape = (pp, dp_replicate, fsdp * tp // (ep * etp), ep, etp)
        names = ("pp", "dp_replicate", "efsdp", "ep", "etp")
        expert_mesh = init_device_mesh(device, shape, mesh_dim_names=names)
    return replace(layout, mesh=mesh, full_mesh=full_mesh, expert_mesh=expert_mesh)


# ---------------------------------------------------------------- tensor parallelism
class GatherSequence(ParallelStyle):
    """Before attention or FFN: all-gather the sequence, (B, T/tp, D) -> (B, T, D); backward:
    reduce-scatter."""

    def _apply(self, module, mesh):
        def gather(module, args):
            x = DTensor.from_local(args[0], mesh, [Shard(1)], run_check=False)
            return (x.redistribute(placements=[Replicate()]), *args[1:])

        module.register_forward_pre_hook(gather)
        return module


class Gather(ParallelStyle):
    """After a module without weights: all-gather the sequence, (B, T/tp, ...) -> (B, T, ...);
    backward: reduce-scatter."""

    def _apply(self, module, mesh):
        module.register_forward_hook(
            lambda module, args, out: AllGather.apply(out, 1, mesh.get_group())
        )
        return module


class SequenceLinear(ParallelStyle):
    """A matrix with its bias, such as a router. Every tp rank holds the matrix whole and sees T/tp
    of the tokens, (B, T/tp, D).

    Gradients must be summed over tp: see "sequence" below. The tokens go in as rows (B*T/tp, D),
    because torch 2.11 cannot multiply a DTensor split along dim 1.
    """

    def _apply(self, module, mesh):
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(
                module,
                name,
                nn.Parameter(distribute_tensor(p, mesh, [Replicate()], src_data_rank=None)),
            )

        def forward(x):
            rows = DTensor.from_local(x.flatten(0, -2), mesh, [Shard(0)], run_check=False)
            # the class at the time of the call: LoRA swaps the class later
            out = type(module).forward(module, rows)
            return out.to_local().unflatten(0, x.shape[:-1])

        module.forward = forward
        return module


class VocabEmbedding(RowwiseParallel):
    """V/tp rows of the table per rank. Each rank looks up the tokens of its rows; a reduce-scatter
    adds the results and leaves each rank a part of the sequence: (B, T) -> (B, T/tp, D)."""

    def __init__(self):
        super().__init__(input_layouts=Replicate(), output_layouts=Shard(1))

    def _apply(self, module, mesh):
        module = super()._apply(module, mesh)
        # The data of the result may still be on the way. A compiled block cannot take an unfinished
        # tensor, and wait() would cut the tensor off from autograd. A clone is an ordinary tensor
        # with a gradient.
        module.register_forward_hook(lambda module, args, out: out.clone())
        return module


class VocabHead(ParallelStyle):
    """V/tp rows of the head per rank, for vocab_parallel_loss and vocab_parallel_logits."""

    def _apply(self, module, mesh):
        module.weight = nn.Parameter(
            distribute_tensor(module.weight, mesh, [Shard(0)], src_data_rank=None)
        )
        return module


TP_STYLES = {  # names for a model's tp_plan; called once per module
    # W (out/tp, in): no communication, the output is this rank's heads or channels
    "colwise": ColwiseParallel,
    # W (out, in/tp): reduce-scatter along the sequence
    "rowwise": partial(RowwiseParallel, output_layouts=Shard(1)),
    "gather_sequence": GatherSequence,
    # colwise after an all-gather of the sequence
    "gather_colwise": partial(ColwiseParallel, input_layouts=Shard(1)),
    "gather": Gather,
    # Norms. Every tp rank holds the weight whole but sees only T/tp of the tokens (or H/tp of the
    # heads), so the gradients must be summed over tp. A DTensor weight sums gradients; a plain
    # weight silently does not.
    "sequence": partial(SequenceParallel, use_local_output=True),  # (B, T/tp, D)
    # (B, T, H/tp, K)
    "head_norm": partial(SequenceParallel, sequence_dim=2, use_local_output=True),
    "sequence_linear": SequenceLinear,
    "vocab_embedding": VocabEmbedding,
    "vocab_head": VocabHead,
}


def tensor_parallel(stage, layout: Layout, cfg: ParallelConfig) -> None:
    """Split the matrices over tp as the model's tp_plan says; between the blocks a rank holds T/tp
    of the sequence.

    Per block, forward and backward each: two all-gathers and two reduce-scatters of B*T*D elements
    (2*B*T*D bytes in bfloat16), and the next matmul waits for each collective. So tp belongs inside
    a node.
    """
    from distributed.tp_check import check_split  # only --tp needs the file

    mesh = layout.mesh["tp"]
    names = [n for n, _ in stage.named_modules()]
    plan = {}  # module -> name of its style
    styles = {}
    for pattern, style in stage.tp_plan().items():
        for name in fnmatch.filter(names, pattern):
            plan[name] = style
            styles[name] = TP_STYLES[style]()
    frozen = [n for n, p in stage.named_parameters() if not p.requires_grad]
    parallelize_module(stage, mesh, styles)
    for n in frozen:  # the styles make new parameters
        stage.get_parameter(n).requires_grad_(False)
    check_split(stage, plan)
    if stage.token_loss is not linear_cross_entropy:
        raise ValueError(
            "--tp replaces token_loss, so that yours would not be trained; add your term to the "
            "loss in forward; "
            "change logits by self.token_loss(h, weight, labels, loss_denom, kernel=YOURS): "
            "docs/fork_me.md"
        )
    if cfg.loss_parallel:
        stage.token_loss = partial(vocab_parallel_loss, mesh=mesh)
    else:
        stage.token_loss = partial(gathered_head_loss, mesh=mesh)
    stage.logits = partial(vocab_parallel_logits, mesh=mesh)
    if cfg.async_tp:
        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        torch._inductor.config._micro_pipeline_tp = True
        enable_symm_mem_for_group(mesh.get_group().group_name)


def vocab_parallel_loss(h, weight, labels, denom, *, mesh, loss=linear_cross_entropy, **options):
    """Apply a loss function of models/loss.py to h (B, T/tp, D) and this rank's V/tp rows of the
    head. The result is whole on every tp rank.

    One all-gather of h (B*T*D elements). Of the logits nothing travels but three numbers per token:
    the largest logit, the sum of the exponentials, and the label's logit.
    """

    def all_reduce(x, op):
        operation = dist.ReduceOp.SUM
        if op == "max":
            operation = dist.ReduceOp.MAX
        dist.all_reduce(x, op=operation, group=mesh.get_group())
        return x

    # (B, T, D); backward sums the ranks' gradients of h
    h = AllGather.apply(h, 1, mesh.get_group())
    return loss(
        h,
        weight.to_local(),
        labels,
        denom,
        all_reduce,
        vocab_start=local_slice(weight)[1][0],
        **options,
    )


def gathered_head_loss(
    h: Tensor, weight, labels: Tensor, denom, *, mesh: DeviceMesh, kernel: Callable = softmax_loss
) -> Tensor:
    """--no-loss_parallel: all-gather the head's V*D elements instead, and compute the loss of the
    rank's T/tp tokens only.
    Each tp rank then has a part of the loss, and the parts are added up."""
    weight = weight.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])
    return linear_cross_entropy(
        h, weight, labels.chunk(mesh.size(), 1)[mesh.get_local_rank()], denom, kernel=kernel
    )


def vocab_parallel_logits(h: Tensor, weight: DTensor, *, mesh: DeviceMesh) -> Tensor:
    """(B, T/tp, D) -> (B, T, V), whole on every rank: for generation and evaluation by hand, not
    for training."""
    h = AllGather.apply(h, 1, mesh.get_group())
    return whole_vocab(torch.nn.functional.linear(h, weight.to_local()), weight.shape[0], mesh)


def whole_vocab(logits: Tensor, V: int, mesh: DeviceMesh) -> Tensor:
    """All-gather logits: (..., V/tp), where the last rank may hold fewer than the others -> (...,
    V) on every rank."""
    whole = torch.empty(*logits.shape[:-1], V, device="meta")
    kind = dict(run_check=False, shape=whole.shape, stride=whole.stride())
    return DTensor.from_local(logits, mesh, [Shard(logits.dim() - 1)], **kind).full_tensor()


# ---------------------------------------------------------------- context parallelism
def context_parallel(stage, layout: Layout, cfg: ParallelConfig) -> None:
    """Replace the model's attention by an attention over the keys and values of all cp ranks. The
    rest of a model treats each token alone, and so needs no change when a rank holds T/cp of every
    sequence."""
    attend = all_gather_attention if cfg.cp_method == "allgather" else all_to_all_attention
    stage.make_attend = partial(attend, group=layout.group("cp"))


def sequence_index(T: int, cp: int, rank: int, device: torch.device | None = None) -> Tensor:
    """Positions (T/cp,) of a cp rank's tokens: chunks rank and 2cp-1-rank of 2cp.

    A late token attends to more keys than an early one. cp 2 cuts four chunks: rank 0 takes 0 and
    3, rank 1 takes 1 and 2, so both do the same causal work.
    """
    # made on the device: a copy from the host would wait
    chunks = torch.arange(T, device=device).chunk(2 * cp)
    return torch.cat([chunks[rank], chunks[2 * cp - 1 - rank]])


def natural_order(x: Tensor, dim: int, cp: int) -> Tensor:
    """Put a tensor gathered in rank order back into the order of the tokens: the inverse of
    sequence_index."""
    # early and late chunk of rank 0, early and late chunk of rank 1, ...
    chunks = x.chunk(2 * cp, dim)
    early = chunks[0::2]
    late = chunks[1::2]  # the latest tokens are rank 0's
    return torch.cat([*early, *reversed(late)], dim)


def all_gather_attention(
    positions: Tensor,
    doc_ids: Tensor | None = None,
    reach: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None,
) -> Callable[..., Tensor]:
    """--cp_method allgather: gather keys and values, and attend from this rank's queries. Per layer
    one all-gather of
    2*B*T*G*K elements (few under grouped queries), and a reduce-scatter in the backward."""
    cp = dist.get_world_size(group)
    rank = dist.get_rank(group)
    # the rank has chunks `rank` and `2cp-1-rank`; chunk i sees the keys of chunks 0..i
    chunk = positions.shape[1] // 2
    ends = [(rank + 1) * chunk, (2 * cp - rank) * chunk]
    masked = doc_ids is not None or reach is not None
    if not masked:
        masks = [lower_right_mask(chunk, end, positions.device) for end in ends]
    else:
        T = 2 * cp * chunk
        masked_attend = causal_attention(
            positions, doc_ids, sequence_index(T, cp, rank, positions.device), reach, T
        )

    def attend(q, k, v, scale=None, **options):  # q (B, H, T/cp, K), k and v (B, G, T/cp, K)
        # one collective for both
        kv = natural_order(AllGather.apply(torch.cat([k, v], -1), 2, group), 2, cp)
        k, v = kv.split([k.shape[-1], v.shape[-1]], -1)  # (B, G, T, K)
        if masked:
            return masked_attend(q, k, v, scale=scale, **options)
        outs = []
        for q_chunk, end, mask in zip(q.chunk(2, dim=2), ends, masks, strict=True):
            outs.append(sdpa(q_chunk, k[:, :, :end], v[:, :, :end], mask, scale=scale))
        return torch.cat(outs, 2)

    return attend


def all_to_all_attention(
    positions: Tensor,
    doc_ids: Tensor | None = None,
    reach: Tensor | None = None,
    *,
    group: dist.ProcessGroup | None,
) -> Callable[..., Tensor]:
    """--cp_method alltoall, Ulysses (arXiv:2309.14509): trade a part of every sequence for whole
    sequences of H/cp heads,
    attend, and trade back. Per layer four all-to-alls of this rank's q, k, v and result,
    B*T/cp*(2H+2G)*K elements together; as many in the backward.

    Returns attend(q, k, v, scale=None): q (B, H, T/cp, K), k and v (B, G, T/cp, K), the tokens of
    sequence_index -> (B, H, T/cp, K). positions and reach (B, T/cp), doc_ids (B, T) or None."""
    cp = dist.get_world_size(group)
    if reach is not None:
        reach = natural_order(AllGather.apply(reach, 1, group), 1, cp)  # (B, T)
        positions = reach  # of the whole sequence: only the shape counts
    attend_whole = causal_attention(positions, doc_ids, reach=reach)

    def heads_to_sequence(x):  # (B, H, T/cp, K) -> (B, H/cp, T, K)
        B, H, T, K = x.shape
        # (cp, B, H/cp, T/cp, K): the heads of each rank
        x = AllToAll.apply(x.unflatten(1, (cp, H // cp)).transpose(0, 1), group)
        return natural_order(x.permute(1, 2, 0, 3, 4).reshape(B, H // cp, cp * T, K), 2, cp)

    def sequence_to_heads(x):  # (B, H/cp, T, K) -> (B, H, T/cp, K)
        tokens = []  # of each rank: (B, H/cp, T/cp, K)
        for rank in range(cp):
            index = sequence_index(x.shape[2], cp, rank, x.device)
            tokens.append(x.index_select(2, index))
        x = AllToAll.apply(torch.stack(tokens), group)  # (cp, B, H/cp, T/cp, K)
        return x.transpose(0, 1).flatten(1, 2)

    def attend(q, k, v, scale=None, sinks=None):
        # fewer kv heads than ranks: every rank gets a copy of its query heads' kv head
        if k.shape[1] % cp:
            copies = cp // k.shape[1]
            k = k.repeat_interleave(copies, dim=1)
            v = v.repeat_interleave(copies, dim=1)
        options = {}
        if sinks is not None:
            options["sinks"] = sinks.chunk(cp)[dist.get_rank(group)]  # of this rank's heads
        q = heads_to_sequence(q)
        k = heads_to_sequence(k)
        v = heads_to_sequence(v)
        return sequence_to_heads(attend_whole(q, k, v, scale=scale, **options))

    return attend


# ---------------------------------------------------------------- activation checkpointing, compile
def checkpoint_activations(stage: nn.Module, cfg: ParallelConfig) -> None:
    """Keep only the input of a block, (B, T/cp/tp, D), and compute the rest again in the backward:
    --ac full for every block, selective for every k-th. With --ac op a block also keeps half of its
    matmuls and all slow results (distributed/keep.py)."""
    for i, block in all_blocks(stage).items():
        if cfg.ac == "selective" and i % cfg.ac_every:
            continue
        is_compiled = cfg.compile and not hasattr(block, "moe")
        options = {}
        if cfg.ac == "op":
            from distributed.keep import keep_contexts

            options["context_fn"] = partial(keep_contexts, is_compiled)
        # Wrapping forward, not the module, keeps every parameter's name. No random numbers need to
        # be replayed, because models/dropout.py draws from no generator.
        block.forward = partial(
            checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False, **options
        )


def compile_blocks(stage, layout: Layout, cfg: ParallelConfig) -> None:
    """Compile each block alone, and the loss: all blocks share one compilation, and FSDP's hooks
    stay outside.

    In a block with experts, attention, experts and the sorting of tokens are compiled one by one.
    Routing and the exchange of tokens are not compiled: the number of tokens per expert is known
    only at run time.
    """
    if cfg.ac == "budget":
        torch._functorch.config.activation_memory_budget = cfg.ac_budget
    is_file = layout.schedule not in get_args(Schedule)
    if layout.pp > 1 and (layout.schedule in ZERO_BUBBLE or is_file):
        # the two halves of a split backward both read these buffers
        torch._functorch.config.donated_buffer = False
    stage.token_loss = partial(stage.token_loss, kernel=torch.compile(softmax_loss))
    for block in all_blocks(stage).values():
        compiled = block
        if hasattr(block, "moe"):
            from distributed.experts import compile_experts

            compile_experts(block.moe.experts)
            compiled = block.attn
        compiled.forward = torch.compile(compiled.forward, fullgraph=layout.cp == 1)


# ------------------------------------------------------------ FSDP2, HSDP, DDP: one wrapper for all
def shard(stage, layout: Layout, cfg: ParallelConfig) -> None:
    """Give the parameters their dtype, and let FSDP shard them. On one process FSDP would copy
    every weight and gradient for
    nothing: distributed/cast.py casts at the same places instead."""
    # not the buffers: balancing biases move in steps that bfloat16 would round away
    for p in stage.parameters():
        dtype = getattr(torch, cfg.param_dtype)
        if not p.requires_grad:
            # A frozen weight is only read, in the compute dtype: kept in it, the weight loses nothing.
            dtype = layout.compute_dtype
        if isinstance(p, DTensor):  # split by tp: setting .data would silently change nothing
            torch.utils.swap_tensors(p, nn.Parameter(p.detach().to(dtype), p.requires_grad))
        else:
            p.data = p.data.to(dtype)
    stage.reduces_always = reduces_always(stage, layout, cfg)
    if layout.world_size == 1 and not cfg.cpu_offload:
        cast_weights(stage, layout, getattr(torch, cfg.reduce_dtype))
    else:
        wrap_units(stage, layout, getattr(torch, cfg.reduce_dtype))


def wrap_units(stage, layout: Layout, reduce_dtype: torch.dtype) -> None:
    """fully_shard every block, then the rest, over dp_shard x cp, with copies over dp_replicate.

    Per block of P parameters on this tp rank: all-gather P weights in the compute dtype before the
    forward and again before the backward, reduce-scatter P gradients in --reduce_dtype after the
    backward; with dp_replicate, all-reduce P / (dp_shard x cp) gradients between the copies.
    """
    # FSDP casts weights only: casting a block's inputs as well would round cos and sin to bfloat16.
    dtypes = MixedPrecisionPolicy(
        param_dtype=layout.compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    options = dict(mp_policy=dtypes)
    if layout.offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())

    def with_copies(mesh, axis):  # two axes for HSDP: copies, each sharded over `axis`
        if layout.dp_replicate > 1:
            return mesh["dp_replicate", axis]
        return mesh[axis]

    options["mesh"] = with_copies(layout.mesh, "fsdp")
    reshard = layout.reshards
    blocks = list(all_blocks(stage).values())
    experts = [block.moe.experts for block in blocks if hasattr(block, "moe")]
    if experts:
        expert_mesh = with_copies(layout.expert_mesh, "efsdp")
        # --ep over all ranks: nothing to gather or sum
        if expert_mesh.size() == 1 and layout.pp == 1 and not layout.offload:
            cast_experts(experts, stage, layout, reduce_dtype)
        else:
            for each in experts:
                fully_shard(each, reshard_after_forward=reshard, **options | {"mesh": expert_mesh})
    for block in blocks:  # after its experts: a parameter belongs to the innermost fully_shard
        wrapped = None  # parameters that have their own fully_shard
        if hasattr(block, "moe"):
            wrapped = set(block.moe.experts.parameters())
        # the backward begins with the last block, so its weights are not freed just before
        fully_shard(
            block,
            reshard_after_forward=reshard and block is not blocks[-1],
            ignored_params=wrapped,
            **options,
        )
    # Wrapped apart, the embedding's V*D numbers are freed after the lookup. The loss reads a tied
    # embedding as well.
    if stage.tok_embeddings is not None and not stage.config.tie_embeddings:
        fully_shard(stage.tok_embeddings, reshard_after_forward=reshard, **options)
    # The root gathers the norm and the head before its forward; the loss uses the head's weight
    # directly.
    fully_shard(stage, reshard_after_forward=False, **options)
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            # the loss is divided by the tokens of the global batch already: gradients are summed,
            # not averaged
            module.set_force_sum_reduction_for_comms(True)
            # on one process the setting would only add a copy of each gradient
            if layout.world_size > 1:
                module.set_gradient_divide_factor(1.0)
    if layout.ep > 1:
        from distributed.experts import prefetch_units

        prefetch_units(stage, blocks)


# ---------------------------------------------------------------- initial weights
def init_weights(
    stage, layout: Layout, seed: int, skip: Callable[[str], bool] = lambda fqn: False
) -> None:
    """Allocate the meta parameters on the device and fill them: a function of (seed, fqn) alone, so
    equal in every layout. Nothing travels.

    A parameter is drawn in blocks of 1,024 rows (a stack of experts: one expert), each block from
    its own generator. A rank draws only blocks of its own rows: at most one extra block at either
    end. Columns cut by tp are drawn whole. The process's share of the cores draws side by side;
    each core needs memory for one block.
    skip: whether a checkpoint will overwrite the parameter fqn. Skipped parameters are NaN, so a
    missing overwrite shows.
    """
    values = initial_values(stage)
    draws = []
    stage.seed = seed  # dropout depends on it, too
    stage.to_empty(device="cpu" if layout.offload else layout.device)
    # only parameters are offloaded: the computation reads the buffers
    for module in stage.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.to(layout.device))
    for fqn, p in [*stage.named_parameters(), *stage.named_buffers()]:
        local = local_tensor(p.detach())
        number, std = values[fqn]
        if std == 0:
            local.fill_(number)
        elif skip(fqn):
            local.fill_(math.nan)
        elif local.numel():
            # rows per block; in a stack of experts one expert
            rows = 1024
            if p.dim() == 3:
                rows = 1
            _, offset = local_slice(p)
            first = offset[0]
            for b in range(first // rows, math.ceil((first + len(local)) / rows)):
                key = f"{seed}/{fqn}/{b}"
                draws.append(partial(draw_block, local, p.shape, offset, rows, b, std, key))
    cores = usable_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    draw_side_by_side(draws, min(16, max(1, cores)))  # more would need much memory


# ---------------------------------------------------------------- one training step
def inputs(stage, batch: Any, a: int | None, layout: Layout) -> dict[str, Tensor]:
    """Arguments of the stage for accumulation step a (None: all steps at once): the cp rank's part
    of each sequence."""

    def pick(x):  # (A, B, T) -> (B, T), or all steps at once (A*B, T)
        if a is None:
            return x.flatten(0, 1)
        return x[a]

    kwargs = {
        "tokens": pick(batch.tokens),
        "labels": pick(batch.labels),
        "positions": pick(batch.positions),
    }
    if layout.mtp:  # before the sequence is cut: the next token may be on another cp rank
        from models.deepseek import shift_targets

        doc_ids = None
        if batch.doc_ids is not None:
            doc_ids = pick(batch.doc_ids)
        kwargs["next_tokens"], kwargs["next_labels"] = shift_targets(
            kwargs["tokens"], kwargs["labels"], doc_ids
        )
    # None: validation, where nothing is dropped
    if takes_places(stage) and batch.first is not None:
        kwargs["places"] = pick(places_of(batch, stage.seed))
    if layout.cp > 1:
        tokens = kwargs["tokens"]
        index = sequence_index(tokens.shape[1], layout.cp, layout.coordinate("cp"), tokens.device)
        kwargs = {k: v.index_select(1, index) for k, v in kwargs.items()}  # (B, T/cp)
    if "places" in kwargs:
        # (B, T/cp/tp), as between the blocks
        kwargs["places"] = kwargs["places"].chunk(layout.tp, 1)[layout.rank % layout.tp]
    if batch.doc_ids is not None:
        kwargs["doc_ids"] = pick(batch.doc_ids)  # (B, T): a query attends to keys of all cp ranks
    return kwargs


def count_tokens(labels: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """(tokens with a loss in the global batch, tokens with a loss in this data rank's part). Every
    layout divides the loss by the first number. One all-reduce of one number; both numbers stay on
    the device, so the host does not wait."""
    own = (labels != IGNORE).sum()
    total = own.clone()
    dist.all_reduce(total)
    # all pp, cp and tp ranks of a data rank have added the same tokens
    return (total // (layout.world_size // layout.data_ranks)).clamp(min=1), own


def forward_backward(stages: Sequence[nn.Module], batch: Any, layout: Layout) -> Tensor:
    """Compute the complete gradients of the mean loss over the global batch. Returns (2,) for
    reduce_loss: the rank's part of the global batch's mean loss, and the rank's part of its data
    rank's own mean."""
    loss_denom, own_tokens = count_tokens(batch.labels, layout)
    if layout.pp > 1:  # gradient accumulation is nothing but more micro-batches
        from distributed.schedule import pipeline_forward_backward

        total = pipeline_forward_backward(
            stages, inputs(stages[0], batch, None, layout), loss_denom, layout
        )
    else:
        model = stages[0]
        total = torch.zeros((), device=layout.device)
        for a in range(batch.tokens.shape[0]):
            next_backward(model, a == batch.tokens.shape[0] - 1, layout)
            loss = model(**inputs(model, batch, a, layout), loss_denom=loss_denom)
            loss.backward()
            total += loss.detach()
    if layout.loss_parallel and layout.tp > 1:
        # every tp rank has computed the whole loss, and reduce_loss adds up all ranks
        total = total / layout.tp
    return torch.stack([total, total * loss_denom / own_tokens.clamp(min=1)])


def next_backward(model, is_last: bool, layout: Layout) -> None:
    """Tell FSDP, before a micro-batch's forward, about the backward: gradients are reduce-scattered
    after the last micro-batch of a step, or with model.reduces_always after each. The all-reduce
    between copies always waits for the last."""
    model.is_last_backward = is_last  # for distributed/cast.py
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(is_last or model.reduces_always)
        model.set_requires_all_reduce(is_last)
        model.set_is_last_backward(is_last or model.reduces_always)
        # if blocks stay gathered after the forward, all do until the last micro-batch; else only
        # the root
        model.set_reshard_after_backward(is_last, recurse=not layout.reshards)


def reduce_loss(part: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """(mean loss over the tokens of the global batch, largest mean of one data rank), on every
    rank. One all-reduce of two numbers per data rank."""
    table = part.new_zeros(2, layout.data_ranks)
    # a column adds up the parts of a data rank's pp, cp and tp ranks
    table[:, layout.data_rank] = part
    dist.all_reduce(table)
    return table[0].sum(), table[1].max()


def run_forwards(
    stages: Sequence[nn.Module], kwargs: dict[str, Tensor], layout: Layout
) -> list[Tensor]:
    """A list with the model's result; or in a pipeline, where no backward can follow, with the
    results of the micro-batches of kwargs on the rank of the last stage, elsewhere []. kwargs: the
    model's arguments, (sequences, T/cp). Losses are sums over tokens: loss_denom is 1."""
    one = torch.ones((), dtype=torch.int64, device=layout.device)
    if layout.pp == 1:
        return [stages[0](**kwargs, loss_denom=one)]
    from distributed.schedule import pipeline_forward  # torch's pipelines take 0.7 s to load

    return pipeline_forward(stages, kwargs, one, layout)


@torch.no_grad()
def evaluate(
    stages: Sequence[nn.Module], batches: Iterable[Any], layout: Layout
) -> tuple[float, float | None, dict[str, float]]:
    """(loss in nats per token, in bits per byte or None if the bytes are unknown, {part of a
    mixture: loss}) over all batches of all data ranks. NaN if no token has a loss. Besides the
    forwards, one all-reduce of three numbers per part."""
    sums = {}  # part -> of losses, tokens, bytes
    copies = layout.world_size // layout.data_ranks  # ranks with the same tokens: each adds a share
    n_bytes_known = True
    nn.ModuleList(stages).eval()
    for batch in batches:
        losses = run_forwards(stages, inputs(stages[0], batch, None, layout), layout)
        part = sums.setdefault(
            batch.part, torch.zeros(3, dtype=torch.float64, device=layout.device)
        )
        loss = sum(losses)
        if layout.loss_parallel:
            loss = loss / layout.tp  # every tp rank has computed the whole loss
        part[0] += loss
        part[1] += (batch.labels != IGNORE).sum() / copies
        part[2] += (batch.n_bytes or 0) / copies
        n_bytes_known = n_bytes_known and batch.n_bytes is not None
    nn.ModuleList(stages).train()
    reshard(*stages)
    found = torch.stack([*sums.values()])  # every rank has batches of every part
    dist.all_reduce(found)
    found = found.tolist()
    total, tokens, n_bytes = map(sum, zip(*found))
    mean = math.nan
    if tokens:
        mean = total / tokens
    bits_per_byte = None
    if n_bytes_known and n_bytes:
        bits_per_byte = total / n_bytes / math.log(2)
    of_parts = {}
    for name, (loss, n_tokens, _) in zip(sums, found):
        if name:
            of_parts[name] = loss / n_tokens if n_tokens else math.nan
    return mean, bits_per_byte, of_parts


# ---------------------------------------------------------------- the gradient norm
def replicas(grad: Tensor, layout: Layout) -> int:
    """Number of ranks of a pipeline stage with the same part of the gradient. For a norm of your
    own: divide the squares of each rank's part by this number, add up, and all-reduce, as
    clip_grad_norm does."""
    sharded = 1  # a finished gradient is Shard or Replicate, never Partial
    if isinstance(grad, DTensor):
        sharded = math.prod(
            grad.device_mesh.size(i) for i, x in enumerate(grad.placements) if not x.is_replicate()
        )
    return layout.world_size // layout.pp // sharded


def clip_grad_norm(stages: Sequence[nn.Module], max_norm: float, layout: Layout) -> Tensor:
    """Scale the gradients to a norm of at most max_norm. Returns the norm before, a 0-d tensor,
    equal on every rank.

    One rule for every layout: a rank adds the squares of its part of each gradient, divided by the
    number of ranks with the same part; one all-reduce over all ranks gives the square of the norm.
    Right for parameters on different meshes, for pipeline stages, and for a tied weight on two
    stages (counted once).
    """
    squares = torch.zeros((), dtype=torch.float64, device=layout.device)
    grads: list[Tensor] = []
    groups: dict[int, list[Tensor]] = {}  # number of ranks with the same part -> local gradients
    copies = set()  # ids of tied weights, which the first stage counts
    if layout.pp > 1:
        copies = {id(tied_copy(stage)) for stage in stages}
    for stage in stages:
        for p in stage.parameters():
            if p.grad is None:
                continue
            grads.append(local_tensor(p.grad))
            if id(p) not in copies:
                groups.setdefault(replicas(p.grad, layout), []).append(grads[-1])
    for n, members in groups.items():
        # in fp32 a sum of a million squares loses six digits
        norms = torch._foreach_norm(members, 2, dtype=torch.float64)
        squares += (torch.stack(norms) ** 2).sum().to(layout.device) / n
    dist.all_reduce(squares)
    norm = squares.sqrt().float()
    if max_norm > 0 and grads:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, scale.to(grads[0].device))
    return norm
