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
import fnmatch
import hashlib
import math
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from distributed.experts import compiled_experts
from distributed.layout import AllGather, AllToAll, Layout, all_blocks, expert_mesh, local_slice, local_tensor
from distributed.pipeline import (
    ZERO_BUBBLE,
    embeds_at_both_ends,
    pipeline_forward,
    pipeline_schedule,
    sum_tied_gradients,
    tied_copy,
)
from distributed.refusals import initial_values
from models.attention import causal_attention, lower_right_mask, sdpa
from models.loss import IGNORE, linear_cross_entropy, softmax_loss


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
        if hasattr(block, "moe") and not isinstance(block.moe.experts.compute, partial):  # float8 has kernels of its own
            block.moe.experts.compute = partial(compiled_experts, torch.compile(block.moe.experts.compute, fullgraph=True))


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
    if layout.world_size == 1 and dtypes == {torch.float32} and not cfg.cpu_offload:
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
    if max_norm > 0 and grads:
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(grads, scale.to(grads[0].device))
    return norm
