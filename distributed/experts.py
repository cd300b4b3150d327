"""Expert parallelism: the experts are split over ranks, and tokens travel to their experts and
back."""

from collections.abc import Callable, Iterable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding

from distributed.exchange import Arrive, Depart
from distributed.layout import (
    AllGather,
    AllToAll,
    Layout,
    ReduceScatter,
    all_blocks,
    local_tensor,
    mtp_depth_of,
)
from models.moe import (
    Balance,
    Experts,
    Spread,
    inverse,
    kernel_fits,
    load_statistics,
    saved_for_good,
)

# A rank's experts are cut into so many parts, and while the rows of one part travel, the experts of
# another compute
PARTS = {"cuda": 2, "cpu": 1}


def expert_parallel(
    stage, layout: Layout, *, aux_coef: float = 0.0, force_balance: bool = False
) -> None:
    """Split the experts over ep (and each expert over etp). Per layer and direction two all-to-alls
    of B*T/tp*k*D elements: each token travels to its k experts, and their results travel back; on
    GPUs in two parts, see PARTS.

    Between the layers a tp rank holds T/tp of the sequence. With etp 1 it routes these tokens by
    itself. With etp = tp the tp ranks all-gather the tokens first, each computes its part of every
    expert's hidden width, and a reduce-scatter adds them up. aux_coef, force_balance: see
    models.moe.Balance.
    """
    mesh = layout.expert_mesh
    etp = layout.etp
    if layout.device.type == "cuda" and layout.rank == 0:
        say_slow_experts(*torch.cuda.get_device_capability())
    for block in all_blocks(stage).values():
        if not hasattr(block, "moe"):
            continue
        experts = block.moe.experts
        balance = block.moe.balance
        assert isinstance(experts, Experts) and isinstance(balance, Balance)
        if layout.ep * etp > 1:
            for name, p in list(experts.named_parameters()):
                placements = [Shard(0)]
                over = mesh["ep"]
                if etp > 1:
                    placements = [Shard(0), Shard(experts.etp_dims[name])]
                    over = mesh["ep", "etp"]
                w = distribute_tensor(p, over, placements, src_data_rank=None)
                setattr(experts, name, nn.Parameter(w, p.requires_grad))
            n = balance.n_experts // layout.ep
            parts = PARTS[layout.device.type]
            if layout.ep == 1 or n % parts:
                parts = 1
            if parts > 1:  # sort by the part within the rank's n experts, then by expert
                experts.turn = lambda index, n=n, E=balance.n_experts, parts=parts: (
                    index % n * parts // n * E + index
                )
            experts.forward = partial(exchange_tokens, experts, mesh["ep"].get_group(), parts=parts)
        if etp > 1:
            block.moe.forward = partial(gathered_moe, block.moe.forward, layout.group("tp"))
        sharers = []  # the ranks that have other tokens of the same sequences
        if layout.cp > 1:
            sharers.append(layout.group("cp"))
        if layout.tp > 1 and etp == 1:
            sharers.append(layout.group("tp"))
        balance.aux_scale = aux_coef / layout.global_batch_size
        balance.force = force_balance
        # every tp rank sees all T tokens and adds their whole auxiliary loss: each adds its share
        if etp > 1:
            balance.aux_scale /= etp
        balance.parts = layout.cp
        if etp == 1:
            balance.parts *= layout.tp
        balance.sum_over_parts = partial(sum_over, groups=sharers)


def say_slow_experts(major: int, minor: int) -> None:
    """A line for a GPU on which torch has no kernel for all experts at once."""
    if (major, minor) < (9, 0):
        print(
            f"experts on a GPU of capability {major}.{minor}: torch multiplies them one after the "
            "other, and the host waits "
            "three times per product and step; from 9.0 (H100) on, one kernel multiplies all"
        )


@register_sharding(torch.ops.aten.mm.dtype)
def sharding_of_scores(a, b, out_dtype):
    """What DTensor has no rule for: a router's matmul of bf16 that returns fp32,
    models.moe.router_scores. Rows stay split."""
    return [([rows], [rows, Replicate(), None]) for rows in (Shard(0), Replicate())]


def sum_over(x: Tensor, groups: Iterable[dist.ProcessGroup | None]) -> Tensor:
    for group in groups:
        dist.all_reduce(x, group=group)
    return x


def gathered_moe(
    moe_forward: Callable[[Tensor], Tensor],
    group: dist.ProcessGroup,
    x: Tensor,
    shared: nn.Module | None = None,
) -> Tensor:
    """etp = tp: (B, T/tp, D) -> every tp rank's part of the result for all T -> summed, (B, T/tp,
    D)."""
    out = ReduceScatter.apply(moe_forward(AllGather.apply(x, 1, group)), 1, group)
    # shared has hooks of its own that gather and scatter
    if shared is None:
        return out
    return out + shared(x)


def exchange_tokens(
    experts,
    group: dist.ProcessGroup | None,
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    shared: Callable[[], Any] = lambda: None,
    parts: int = 1,
) -> list[Tensor]:
    """Experts.forward over ep ranks: x (N*k, D) sorted by expert, so also by the rank that holds
    it; weight (N*k,), the factor of each row's result; counts (E,), the rows for each expert.
    Returns the results in the same order, of each part (its rows, D). Rank r holds the experts
    r E/ep .. (r + 1) E/ep - 1. shared(): work for the time while rows travel, see apply_experts.
    parts: x is sorted by part first, as experts.turn says: the rows for the first E/ep/parts
    experts of all ranks, and so on.
    """

    def travel(x, weight, arriving, sent, received, stacks):
        """The rows of a part: to their experts (first turn), through their experts (second), home
        (third)."""
        weights_travelling = Depart.apply(weight, group, sent, received)
        travelling = Depart.apply(x, group, sent, received)
        # While the rows travel, the device finds their order by (expert, rank).
        expert = torch.arange(arriving.shape[1], device=x.device).short().repeat(ep)
        arrived = expert.repeat_interleave(arriving.flatten(), output_size=sum(received))
        order = arrived.argsort(stable=True)
        back = inverse(order)  # to the order of arrival
        yield
        # sorted by (rank, expert)
        weight = Arrive.apply(*weights_travelling, group, sent, received)
        x = Arrive.apply(*travelling, group, sent, received)
        weight = Spread.apply(weight, order, back[:, None])
        x = Spread.apply(x, order, back[:, None])
        y = experts.compute(x, weight, arriving.sum(0), *stacks)
        with saved_for_good():
            y = Spread.apply(y, back, order[:, None])
        travelling = Depart.apply(y, group, received, sent)
        yield
        yield Arrive.apply(*travelling, group, received, sent)

    ep = dist.get_world_size(group)
    stacks = [local_tensor(w) for w in experts.parameters()]
    if ep == 1:  # --etp alone: every rank has a part of each expert, and no token travels
        return [experts.compute(x, weight, counts, *stacks)]
    # (ep * E/ep,): from every rank, its rows for each of this rank's experts
    arriving = AllToAll.apply(counts, group)
    # The all-to-all needs its sizes on the host: only here a layer waits for the device. --ac op
    # keeps the copy on the host (distributed/keep.py), so its recomputation does not wait again.
    sizes = torch.stack([counts, arriving]).view(2, ep, parts, -1).sum(-1).transpose(1, 2)
    sent, received = sizes.tolist()  # [part][rank]
    arriving_rows = arriving.view(ep, parts, -1).unbind(1)  # (ep, E/ep/parts) of each part
    if parts > 1:
        lengths = [sum(rows) for rows in sent]
        halves = zip(*(w.chunk(parts) for w in stacks))
        given = zip(x.split(lengths), weight.split(lengths), arriving_rows, sent, received, halves)
    else:  # a split into one part would copy the gradients
        given = [(x, weight, arriving_rows[0], sent[0], received[0], stacks)]
    # The parts take turns: while the rows of one travel, the device computes the other's experts,
    # and the shared experts.
    turns = [travel(*part) for part in given]
    for turn in turns:
        next(turn)
    shared()
    for turn in turns:
        next(turn)
    return [next(turn) for turn in turns]


def prefetch_units(stage: nn.Module, blocks) -> None:
    """Gather the next block's weights before a block computes, and in the backward the previous
    block's. FSDP alone prefetches only as far as the host is ahead of the device, and with --ep the
    host waits in every layer with experts (exchange_tokens).
    """
    units = []
    for block in blocks:
        unit = [block]
        for name, m in block.named_modules():
            if name == "moe.experts" and isinstance(m, FSDPModule):
                unit.append(m)
        units.append(unit)
    if units and isinstance(stage.tok_embeddings, FSDPModule):
        stage.tok_embeddings.set_modules_to_forward_prefetch(units[0])
    for this, following in pairwise(units):
        this[0].set_modules_to_forward_prefetch(following)
        following[0].set_modules_to_backward_prefetch(this)


def balance_experts(stages, layout: Layout, mode: str, rate: float | Tensor) -> dict[str, Tensor]:
    """After an optimizer step: sum each layer's load over all ranks, and with mode bias move the
    biases against it (arXiv:2408.15664: up by rate below the mean load, down above, then centred).
    Returns statistics; loads restart at 0.
    """
    config = stages[0].config
    moes = {}
    for stage in stages:
        for i, block in all_blocks(stage).items():
            if hasattr(block, "moe"):
                moes[i] = block.moe
    n_layers = config.n_layers + mtp_depth_of(config)
    loads = torch.zeros(n_layers, config.n_experts, device=layout.device)
    for i, moe in moes.items():
        if moe.balance.load is not None:  # None: no forward since the last call
            loads[i] = moe.balance.load
            moe.balance.load = None
    # Ranks have different tokens, or under pp different layers, so the sum over all ranks is the
    # whole table on each of them. With etp = tp every tp rank counted all tokens; a factor changes
    # neither a sign nor a ratio.
    sum_over(loads, [None])
    for i, moe in moes.items():
        if mode == "bias" and moe.router.weight.requires_grad:  # a frozen router keeps its biases
            step = (loads[i].mean() - loads[i]).sign() * rate
            moe.balance.bias += step - step.mean()
    worst, dead = load_statistics(loads)
    return {"moe_load_max_over_mean": worst, "moe_dead_experts": dead}


def compiled_experts(
    compiled: Callable[..., Tensor],
    eager: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    *stacks: Tensor,
) -> Tensor:
    """Experts.compute, compiled once for all numbers of rows of x (N*k, D).

    Runs uncompiled in three cases: in fp32, for the compiler knows the grouped matmul in bf16 only;
    without a kernel for it, for the fallback loop synchronises; and with 0 or 1 rows, for which
    dynamo would compile a version of its own.
    """
    if x.dtype != torch.bfloat16 or len(x) < 2 or not kernel_fits(x, stacks[0]):
        return eager(x, weight, counts, *stacks)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(weight, 0)
    return compiled(x, weight, counts, *stacks)


def compiled_combine(
    compiled: Callable[..., Tensor],
    eager: Callable[..., Tensor],
    results: list[Tensor],
    order: Tensor,
    places: Tensor,
) -> Tensor:
    """Experts.combine, compiled once for all numbers of rows of the parts. With 0 or 1 rows in a
    part, for which dynamo would compile a version of its own, it runs uncompiled."""
    if len(results) > 1:
        if min(len(y) for y in results) < 2:
            return eager(results, order, places)
        for y in results:
            torch._dynamo.mark_dynamic(y, 0)
    return compiled(results, order, places)


def compile_experts(experts) -> None:
    """The arithmetic of a layer's experts, and what brings the tokens into their order and back."""
    if not isinstance(experts.compute, partial):  # float8 has kernels of its own
        experts.compute = partial(
            compiled_experts, torch.compile(experts.compute, fullgraph=True), experts.compute
        )
    experts.spread = torch.compile(experts.spread, fullgraph=True)
    # force_pointwise_cat: the parts are read where they lie, in place of a copy of both
    combine = torch.compile(experts.combine, fullgraph=True, options={"force_pointwise_cat": True})
    experts.combine = partial(compiled_combine, combine, experts.combine)
