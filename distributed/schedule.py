"""Pipeline parallelism: a step of torch's schedules, an evaluation, and the gradient of the weight
that two stages share."""

from collections.abc import Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

from distributed.layout import Layout, local_tensor
from distributed.pipeline import Schedule, embeds_at_both_ends, n_microbatches, stage_ids, tied_copy
from distributed.stages import ONE_STAGE_PER_RANK


def pipeline_schedule(stages, layout: Layout, n: int, shape: torch.Size, kwargs: dict) -> Any:
    """torch's schedule for n micro-batches of tokens in `shape`, (B, T/cp) each, kept for the next
    step, because its buffers have fixed shapes. kwargs: arguments of every stage. Tensors are cut
    into micro-batches, except loss_denom, a number."""
    if stages[0].made_for == (n, shape):
        return stages[0].schedule
    B, T = shape
    D = stages[0].config.dim
    device = layout.device
    # The shapes are given, not inferred: inference runs a real forward on garbage, and resets
    # FSDP's gradients.
    tokens = torch.empty(B, T, dtype=torch.int64, device=device)
    h = torch.empty(
        B, T // layout.tp, D, dtype=layout.compute_dtype, device=device, requires_grad=True
    )
    loss = torch.empty((), dtype=torch.float32, device=device, requires_grad=True)
    parts = []
    for s in stages:
        takes = h
        if s.index == 0:
            takes = tokens
        gives = h
        if s.index == s.n_stages - 1:
            gives = loss
        parts.append(
            PipelineStage(
                s, s.index, s.n_stages, device, (takes,), (gives,), group=layout.group("pp")
            )
        )
    # The last stage's forward returns the loss, because FSDP gathers the head's weight only for
    # that forward. The loss is divided by the tokens of the global batch already; with scale_grads
    # torch would divide by the micro-batches too.
    options = dict(n_microbatches=n, loss_fn=lambda loss, target: loss, scale_grads=False)
    name = layout.schedule
    if name not in get_args(Schedule):
        schedule = schedules._PipelineScheduleRuntime(parts, **options)
        schedule._load_csv(name, format="compute_only")
    else:
        if name in ONE_STAGE_PER_RANK:
            parts = parts[0]
        schedule = schedules.get_schedule_class(name)(parts, **options)
    cuts = {}
    for argument in kwargs:
        cuts[argument] = TensorChunkSpec(0)
        if argument == "loss_denom":
            cuts[argument] = _Replicate
    schedule._kwargs_chunk_spec = cuts  # set afterwards, because LoopedBFS has no such option
    stages[0].made_for = (n, shape)
    stages[0].schedule = schedule
    return schedule


def run_schedule(stages, kwargs: dict[str, Tensor], n: int, layout: Layout) -> list[Tensor]:
    """Run one step of the schedule over n micro-batches, and add their gradients; those of a weight
    on two stages need sum_tied_gradients, too. kwargs: the model's arguments, (n * B, T/cp).
    Returns the losses, on the rank of the last stage."""
    tokens = kwargs.pop("tokens")
    losses = []
    schedule = pipeline_schedule(stages, layout, n, tokens[: len(tokens) // n].shape, kwargs)
    args = []
    if stages[0].index == 0:
        args = [tokens]
    if any(s.index == s.n_stages - 1 for s in stages):
        kwargs = kwargs | dict(target=kwargs["labels"], losses=losses)  # the schedule fills losses
    schedule.step(*args, return_outputs=False, **kwargs)
    return losses


def pipeline_forward_backward(
    stages: Sequence[nn.Module], kwargs: dict[str, Tensor], loss_denom: Tensor, layout: Layout
) -> Tensor:
    """One step over all micro-batches, with complete gradients. Returns the loss on the rank of the
    last stage, divided by loss_denom, elsewhere 0."""
    losses = run_schedule(
        stages, kwargs | {"loss_denom": loss_denom}, n_microbatches(layout), layout
    )
    if embeds_at_both_ends(stages[0].config):
        sum_tied_gradients(stages, layout)
    if losses:
        return torch.stack(losses).sum().detach()
    return torch.zeros((), device=layout.device)


def sum_tied_gradients(stages, layout: Layout) -> None:
    """Give the embedding's weight and its copy in the last stage the sum of their two gradients.
    The first and the last pipeline rank send each other V/tp*D elements (FSDP: shards); the ranks
    between send nothing. stages: the rank's; under a V schedule both ends may be among the stages.
    """
    first = next((s.tok_embeddings.weight for s in stages if s.index == 0), None)
    copies = [tied_copy(s) for s in stages]
    last = next((w for w in copies if w is not None), None)
    # both may be frozen
    grads = [local_tensor(w.grad) for w in (first, last) if w is not None and w.requires_grad]
    if len(grads) == 2:  # a V schedule: both ends are on this rank
        grads[0].add_(grads[1])
        grads[1].copy_(grads[0])
    elif len(grads) == 1:
        group = layout.group("pp")
        ends = dist.get_process_group_ranks(group)
        if last is None:
            peer = ends[-1]
        else:
            peer = ends[0]
        received = torch.empty_like(grads[0])
        ops = [
            dist.P2POp(dist.isend, grads[0].clone(), peer, group),
            dist.P2POp(dist.irecv, received, peer, group),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        grads[0].add_(received)


def pipeline_forward(
    stages, kwargs: dict[str, Tensor], loss_denom: Tensor, layout: Layout
) -> list[Tensor]:
    """Forward only, for evaluation. Returns the result of each micro-batch on the rank of the last
    stage, elsewhere [].

    A relay: a micro-batch passes a stage, then travels to the rank of the next stage. So every send
    has a receiving partner, and nothing hangs if a send waits for its receive (NCCL). With a stage
    per rank all ranks work at once, each on another micro-batch. torch's own schedule.eval fails on
    V schedules and on a loss computed inside the stage.
    """
    group = layout.group("pp")
    results = []
    ranks = dist.get_process_group_ranks(group)
    n_stages = stages[0].n_stages
    pp_rank = layout.coordinate("pp")
    by_index = {s.index: s for s in stages}
    owner = {i: r for r in range(layout.pp) for i in stage_ids(layout, n_stages, r)}
    for values in zip(*(x.split(layout.microbatch_size) for x in kwargs.values()), strict=True):
        b = dict(zip(kwargs, values, strict=True))
        h = b["tokens"]  # the input of a stage, then its output
        B, T = h.shape
        for i in range(n_stages):
            if owner[i] == pp_rank:
                h = by_index[i](**b | {"tokens": h, "loss_denom": loss_denom})
                if i + 1 == n_stages:
                    results.append(h)
                elif owner[i + 1] != pp_rank:
                    dist.send(h.contiguous(), ranks[owner[i + 1]], group)
            elif i + 1 < n_stages and owner[i + 1] == pp_rank:
                h = torch.empty(
                    B,
                    T // layout.tp,
                    stages[0].config.dim,
                    dtype=layout.compute_dtype,
                    device=layout.device,
                )
                dist.recv(h, ranks[owner[i]], group)
    return results
