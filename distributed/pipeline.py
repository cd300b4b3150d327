"""Pipeline parallelism: the flags, and the layers of a rank. Only runs with --pp load stages.py,
which splits the layers into stages, and schedule.py, which runs the stages."""

import copy
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch import nn

from distributed.layout import Layout, mtp_depth_of
from flags.config import Need, flag

Schedule = Literal[
    "GPipe",
    "1F1B",
    "Interleaved1F1B",
    "LoopedBFS",
    "InterleavedZeroBubble",
    "ZBVZeroBubble",
    "DualPipeV",
]
PIPELINE = Need("without --pp 2 or more", lambda c: c.pp > 1)
NO_CSV = Need(
    "with --pp_schedule_csv, whose file gives the whole schedule", lambda c: not c.pp_schedule_csv
)
NO_FQNS = Need(
    "with --pp_stage_fqns, which names every module of every stage", lambda c: not c.pp_stage_fqns
)


@dataclass(kw_only=True)
class PipelineConfig:
    # order of the micro-batches' forwards and backwards
    pp_schedule: Schedule = flag("1F1B", PIPELINE, NO_CSV)
    # a file: one row per rank, cells like 0F0,0B0 (stage, action, micro-batch)
    pp_schedule_csv: str = flag("", PIPELINE)
    pp_microbatch_size: int = flag(1, PIPELINE)  # sequences per micro-batch
    # none = one or two stages per rank, as needed
    pp_layers_per_stage: int | None = flag(None, PIPELINE, NO_CSV, NO_FQNS)
    # the embedding counts as so many, to balance stages
    pp_first_stage_less_layers: int = flag(1, PIPELINE, NO_FQNS)
    # the head and the loss count as so many layers
    pp_last_stage_less_layers: int = flag(1, PIPELINE, NO_FQNS)
    # explicit split, stages by ';': "tok_embeddings,blocks.0;blocks.1,norm,head"
    pp_stage_fqns: str = flag("", PIPELINE)


ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
# rank r holds stages r and last-r: the pipeline goes down and comes back
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def n_microbatches(layout: Layout) -> int:
    """Micro-batches of a step, of all gradient accumulation steps together."""
    return layout.accumulation * layout.local_batch_size // layout.microbatch_size


def stage_ids(layout: Layout, n_stages: int, rank: int) -> list[int]:
    """The stages of a pipeline rank: every pp-th, or for V schedules one on the way down and one on
    the way back."""
    if layout.schedule not in get_args(Schedule):  # a file
        from distributed.stages import csv_rows  # only --pp needs the file

        return sorted({stage for _, stage, _ in csv_rows(layout.schedule)[rank]})
    if layout.schedule in V_SHAPED:
        return [rank, n_stages - 1 - rank]
    return list(range(rank, n_stages, layout.pp))


def pipeline_stages(model, layout: Layout, cfg: PipelineConfig) -> list[nn.Module]:
    """The rank's stages: copies of the (meta) model without the parts of other stages, names
    unchanged."""
    # only --pp needs the file
    from distributed.stages import split_stages, stages_of_parts

    split = split_stages(cfg, layout.pp, model.config.n_layers)
    stages = []
    ends = stages_of_parts(model)
    for name, end in ends.items():
        if end == "first":
            split[0].append(name)
        elif end == "last":
            split[-1].append(name)
    split[-1].append("mtp")
    if embeds_at_both_ends(model.config):
        split[-1].append("tok_embeddings")  # a copy, kept equal by sum_tied_gradients
    held = {name for names in split for name in names}
    for i in stage_ids(layout, len(split), layout.coordinate("pp")):
        stage = copy.deepcopy(model)
        stage.index = i
        stage.n_stages = len(split)
        for name in held - set(split[i]):
            if hasattr(stage, name):
                setattr(stage, name, None)
        for name in [n for n in stage.blocks if f"blocks.{n}" not in split[i]]:
            del stage.blocks[name]
        stages.append(stage)
    # the shape of the batches for which stages[0].schedule was made: see distributed/schedule.py
    stages[0].made_for = None
    return stages


def embeds_at_both_ends(config: Any) -> bool:
    """Whether the last stage of a pipeline needs the embedding, too: as a tied head, or for
    multi-token prediction."""
    return config.tie_embeddings or mtp_depth_of(config) > 0


def tied_copy(stage) -> nn.Parameter | None:
    """The last stage's copy of the embedding's weight under pp, or None."""
    is_copy = stage.index == stage.n_stages - 1 > 0 and stage.tok_embeddings is not None
    if is_copy:
        return stage.tok_embeddings.weight
    return None
