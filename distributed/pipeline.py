"""Pipeline parallelism: the layers of a rank, torch's schedules, and the weight shared by two stages."""
import copy
import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.layout import Layout, ParallelConfig, local_tensor
from support.config import Need, flag

Schedule = Literal["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"]
PIPELINE = Need("without --pp 2 or more", lambda c: c.pp > 1)
NO_CSV = Need("with --pp_schedule_csv, which says it all", lambda c: not c.pp_schedule_csv)
NO_FQNS = Need("with --pp_stage_fqns, which says it all", lambda c: not c.pp_stage_fqns)


@dataclass(kw_only=True)
class PipelineConfig:
    pp_schedule: Schedule = flag("1F1B", PIPELINE, NO_CSV)  # order of the micro-batches' forwards and backwards
    pp_schedule_csv: str = flag("", PIPELINE)  # a file: one row per rank, cells like 0F0,0B0 (stage, action, micro-batch)
    pp_microbatch_size: int = flag(1, PIPELINE)  # sequences per micro-batch
    pp_layers_per_stage: int | None = flag(None, PIPELINE, NO_CSV, NO_FQNS)  # none = one or two stages per rank, as needed
    pp_first_stage_less_layers: int = flag(1, PIPELINE, NO_FQNS)  # the embedding counts as so many, to balance stages
    pp_last_stage_less_layers: int = flag(1, PIPELINE, NO_FQNS)  # the head and the loss count as so many layers
    pp_stage_fqns: str = flag("", PIPELINE)  # explicit split, stages by ';': "tok_embeddings,blocks.0;blocks.1,norm,head"


ONE_STAGE_PER_RANK = ("GPipe", "1F1B")
ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
KNOWN = ("tok_embeddings.", "blocks.", "norm.", "head.", "mtp.")  # parameters of parts with a fixed stage
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # rank r holds stages r and last-r: the pipeline goes down and comes back


def n_microbatches(layout: Layout) -> int:
    """Micro-batches of a step, of all gradient accumulation steps together."""
    return layout.accumulation * layout.local_batch_size // layout.microbatch_size


def split_stages(cfg: ParallelConfig, pp: int, n_layers: int) -> list[list[str]]:
    """Module names of every pipeline stage, in order. Raises ValueError when the layers do not fill the stages."""
    blocks = [f"blocks.{i}" for i in range(n_layers)]
    if cfg.pp_stage_fqns:
        return named_stages(cfg.pp_stage_fqns, ["tok_embeddings", *blocks, "norm", "head"])
    first, last = cfg.pp_first_stage_less_layers, cfg.pp_last_stage_less_layers
    weight = n_layers + first + last  # the embedding and the head count as layers when the work is balanced
    if cfg.pp_schedule_csv:
        n = 1 + max((stage for row in csv_rows(cfg.pp_schedule_csv) for _, stage, _ in row), default=0)
    elif cfg.pp_layers_per_stage:
        n = math.ceil(weight / cfg.pp_layers_per_stage)
        if n % pp:
            fits = " or ".join(str(k) for k in range(1, weight + 1) if math.ceil(weight / k) % pp == 0) or "a smaller --pp"
            raise ValueError(f"--pp_layers_per_stage {cfg.pp_layers_per_stage} makes {n} stages of {n_layers} layers, no "
                             f"multiple of --pp {pp}; use {fits}")
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


def named_stages(text: str, everything: list[str]) -> list[list[str]]:
    """--pp_stage_fqns: stages by ';', each with its modules by ','. Raises ValueError unless they are everything, in order."""
    split = [[n.strip() for n in stage.split(",")] for stage in text.split(";")]
    given = [n for stage in split for n in stage]
    if given != everything:
        wrong = next((a for a, b in zip(everything, given + [None], strict=False) if a != b), given[-1])
        raise ValueError(f"--pp_stage_fqns must name tok_embeddings, blocks.0 .. {everything[-3]}, norm and head once each, in "
                         f"order; {wrong!r} is missing, double or misplaced")
    return split


def csv_rows(path: str) -> list[list[tuple[str, int, int]]]:
    """--pp_schedule_csv: per rank its actions in order: (F forward | B backward | I, W its two halves, stage, micro-batch)."""
    try:
        with open(path) as f:
            lines = f.read().splitlines()
    except OSError as e:
        raise ValueError(f"--pp_schedule_csv {path}: {e.strerror}") from None
    return [[(kind, int(s), int(m)) for s, kind, m in re.findall(r"(\d+)([FBIW])(\d+)", line)] for line in lines]


def stage_ids(layout: Layout, n_stages: int, rank: int) -> list[int]:
    """The stages of a pipeline rank: every pp-th, or for V schedules one on the way down and one on the way back."""
    if layout.schedule not in get_args(Schedule):  # a file
        return sorted({stage for _, stage, _ in csv_rows(layout.schedule)[rank]})
    if layout.schedule in V_SHAPED:
        return [rank, n_stages - 1 - rank]
    return list(range(rank, n_stages, layout.pp))


def pipeline_stages(model, layout: Layout, cfg: PipelineConfig) -> list[nn.Module]:
    """The rank's stages: copies of the (meta) model without the parts of other stages, names unchanged."""
    split, stages, ends = split_stages(cfg, layout.pp, model.config.n_layers), [], stages_of_parts(model)
    split[0] += [name for name, end in ends.items() if end == "first"]
    split[-1] += [name for name, end in ends.items() if end == "last"] + ["mtp"]
    if embeds_at_both_ends(model.config):
        split[-1].append("tok_embeddings")  # a copy, kept equal by sum_tied_gradients
    held = {name for names in split for name in names}
    for i in stage_ids(layout, len(split), layout.coordinate("pp")):
        stage = copy.deepcopy(model)
        stage.index, stage.n_stages = i, len(split)
        for name in held - set(split[i]):
            if hasattr(stage, name):
                setattr(stage, name, None)
        for name in [n for n in stage.blocks if f"blocks.{n}" not in split[i]]:
            del stage.blocks[name]
        stages.append(stage)
    stages[0].schedules = {}  # torch's schedule by the shape of the batch: see pipeline_schedule
    return stages


def stages_of_parts(model) -> dict[str, str]:
    """{a part that only a fork's model has: "first" or "last", the pipeline stage that holds the part}, as `pp_stage` of the
    model's class says. Raises ValueError for a part with parameters that is not in pp_stage."""
    parts = dict.fromkeys(fqn.partition(".")[0] for fqn, _ in model.named_parameters() if not fqn.startswith(KNOWN))
    stages = {name: getattr(model, "pp_stage", {}).get(name) for name in parts}
    for name, stage in stages.items():
        if stage not in ("first", "last"):
            raise ValueError(f"--pp: no stage is given for {name}; write pp_stage = {{{name!r}: \"first\"}} into class "
                             f"{type(model).__name__} if forward uses {name} before the blocks, \"last\" if after the blocks; "
                             "or make it part of a block")
    return stages


def embeds_at_both_ends(config) -> bool:
    """Whether the last stage of a pipeline needs the embedding, too: as a tied head, or for multi-token prediction."""
    return config.tie_embeddings or getattr(config, "mtp_depth", 0) > 0


def tied_copy(stage):
    """The last stage's copy of the embedding's weight under pp, or None."""
    is_copy = stage.index == stage.n_stages - 1 > 0 and stage.tok_embeddings is not None
    return stage.tok_embeddings.weight if is_copy else None


def sum_tied_gradients(stages, layout: Layout) -> None:
    """Give the embedding's weight and its copy in the last stage the sum of their two gradients. The first and the last
    pipeline rank send each other V/tp*D elements (FSDP: shards); the ranks between send nothing. stages: the rank's; under a
    V schedule both ends may be among the stages."""
    first = next((s.tok_embeddings.weight for s in stages if s.index == 0), None)
    last = next((w for s in stages if (w := tied_copy(s)) is not None), None)
    mine = [local_tensor(w.grad) for w in (first, last) if w is not None and w.requires_grad]  # both may be frozen
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


def pipeline_schedule(stages, layout: Layout, T: int, kwargs: dict):
    """torch's schedule for sequences of T tokens on this rank, made once per shape, because its buffers have fixed shapes.
    kwargs: arguments of every stage. Tensors are cut into micro-batches, except loss_denom, a number."""
    key, made = (n_microbatches(layout), T), stages[0].schedules
    if key in made:
        return made[key]
    from torch.distributed.pipelining import PipelineStage, schedules
    from torch.distributed.pipelining.microbatch import TensorChunkSpec, _Replicate

    B, D, device = layout.microbatch_size, stages[0].config.dim, layout.device
    # The shapes are given, not inferred: inference runs a real forward on garbage, and resets FSDP's gradients.
    tokens = torch.empty(B, T, dtype=torch.int64, device=device)
    h = torch.empty(B, T // layout.tp, D, dtype=layout.compute_dtype, device=device, requires_grad=True)
    loss = torch.empty((), dtype=torch.float32, device=device, requires_grad=True)
    parts = []
    for s in stages:
        takes, gives = tokens if s.index == 0 else h, loss if s.index == s.n_stages - 1 else h
        parts.append(PipelineStage(s, s.index, s.n_stages, device, (takes,), (gives,), group=layout.group("pp")))
    # The last stage's forward returns the loss, because FSDP gathers the head's weight only for that forward. The loss is
    # divided by the tokens of the global batch already; with scale_grads torch would divide by the micro-batches too.
    options = dict(n_microbatches=n_microbatches(layout), loss_fn=lambda loss, target: loss, scale_grads=False)
    name = layout.schedule
    if name not in get_args(Schedule):
        schedule = schedules._PipelineScheduleRuntime(parts, **options)
        schedule._load_csv(name, format="compute_only")
    else:
        schedule = schedules.get_schedule_class(name)(parts[0] if name in ONE_STAGE_PER_RANK else parts, **options)
    # set afterwards, because LoopedBFS has no such option
    schedule._kwargs_chunk_spec = {name: _Replicate if name == "loss_denom" else TensorChunkSpec(0) for name in kwargs}
    made[key] = schedule
    return schedule


def pipeline_forward_backward(stages, kwargs: dict[str, Tensor], loss_denom: Tensor, layout: Layout) -> Tensor:
    """Run one step of the schedule over all micro-batches, and complete the gradients. kwargs: the model's arguments,
    (sequences, T). Returns the loss on the rank of the last stage, divided by loss_denom, elsewhere 0."""
    tokens, losses, kwargs = kwargs.pop("tokens"), [], kwargs | {"loss_denom": loss_denom}
    schedule = pipeline_schedule(stages, layout, tokens.shape[1], kwargs)
    args = [tokens] if stages[0].index == 0 else []
    if any(s.index == s.n_stages - 1 for s in stages):
        kwargs = kwargs | dict(target=kwargs["labels"], losses=losses)  # the schedule fills losses
    schedule.step(*args, return_outputs=False, **kwargs)
    if embeds_at_both_ends(stages[0].config):
        sum_tied_gradients(stages, layout)
    return torch.stack(losses).sum().detach() if losses else torch.zeros((), device=layout.device)


def pipeline_forward(stages, kwargs: dict[str, Tensor], layout: Layout) -> list[Tensor]:
    """Forward only, for evaluation. Returns the result of each micro-batch on the rank of the last stage, elsewhere [].

    A relay: all micro-batches pass one stage, then travel to the rank of the next stage. So every send has a receiving partner,
    and nothing hangs if a send waits for its receive (NCCL). The ranks are idle in turn, but the first ranks can
    begin with the next batch. torch's own schedule.eval fails on V schedules and on a loss computed inside the stage.
    """
    pieces = zip(*(x.split(layout.microbatch_size) for x in kwargs.values()), strict=True)
    microbatches = [dict(zip(kwargs, values, strict=True)) for values in pieces]
    group = layout.group("pp")
    ranks = dist.get_process_group_ranks(group)
    n_stages, mine, by_index = stages[0].n_stages, layout.coordinate("pp"), {s.index: s for s in stages}
    owner = {i: r for r in range(layout.pp) for i in stage_ids(layout, n_stages, r)}
    B, T = microbatches[0]["tokens"].shape
    shape = (B, T // layout.tp, stages[0].config.dim)
    h = []  # per micro-batch the input of the stage, then its output
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
    return h if owner[n_stages - 1] == mine else []
