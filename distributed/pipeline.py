"""Pipeline parallelism: the layers of a rank. distributed/schedule.py runs them; only runs with
--pp load that file."""

import copy
import math
import re
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from distributed.layout import Layout, ParallelConfig
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
NO_CSV = Need("with --pp_schedule_csv, which says it all", lambda c: not c.pp_schedule_csv)
NO_FQNS = Need("with --pp_stage_fqns, which says it all", lambda c: not c.pp_stage_fqns)


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


ONE_STAGE_PER_RANK = ("GPipe", "1F1B")
ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
# parameters of parts with a fixed stage
KNOWN = ("tok_embeddings.", "blocks.", "norm.", "head.", "mtp.")
# rank r holds stages r and last-r: the pipeline goes down and comes back
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")


def n_microbatches(layout: Layout) -> int:
    """Micro-batches of a step, of all gradient accumulation steps together."""
    return layout.accumulation * layout.local_batch_size // layout.microbatch_size


def split_stages(cfg: ParallelConfig, pp: int, n_layers: int) -> list[list[str]]:
    """Module names of every pipeline stage, in order. Raises ValueError when the layers do not fill
    the stages."""
    blocks = [f"blocks.{i}" for i in range(n_layers)]
    if cfg.pp_stage_fqns:
        return named_stages(cfg.pp_stage_fqns, ["tok_embeddings", *blocks, "norm", "head"])
    first = cfg.pp_first_stage_less_layers
    last = cfg.pp_last_stage_less_layers
    # the embedding and the head count as layers when the work is balanced
    weight = n_layers + first + last
    if cfg.pp_schedule_csv:
        n = 1
        for row in csv_rows(cfg.pp_schedule_csv):
            for _, stage, _ in row:
                n = max(n, stage + 1)
    elif cfg.pp_layers_per_stage:
        n = math.ceil(weight / cfg.pp_layers_per_stage)
        if n % pp:
            fitting = [k for k in range(1, weight + 1) if math.ceil(weight / k) % pp == 0]
            fits = " or ".join(map(str, fitting)) or "a smaller --pp"
            raise ValueError(
                f"--pp_layers_per_stage {cfg.pp_layers_per_stage} makes {n} stages of {n_layers} "
                "layers, no "
                f"multiple of --pp {pp}; use {fits}"
            )
    elif cfg.pp_schedule in ONE_STAGE_PER_RANK:
        n = pp
    else:
        n = 2 * pp
    sizes = [weight // n + (i < weight % n) for i in range(n)]
    sizes[0] -= first
    sizes[-1] -= last
    if min(sizes) < (n > n_layers) or min(sizes[1:-1], default=1) < 1 or min(sizes) < 0:
        raise ValueError(
            f"{n_layers} layers are too few for {n} pipeline stages; use a smaller --pp or more "
            "layers"
        )
    split = []
    done = 0
    for size in sizes:
        split.append(blocks[done : done + size])
        done += size
    split[0].insert(0, "tok_embeddings")
    split[-1] += ["norm", "head"]
    return split


def named_stages(text: str, everything: list[str]) -> list[list[str]]:
    """--pp_stage_fqns: stages by ';', each with its modules by ','. Raises ValueError unless they
    are everything, in order."""
    split = []
    given = []
    for stage in text.split(";"):
        names = [name.strip() for name in stage.split(",")]
        split.append(names)
        given += names
    if given != everything:
        wrong = given[-1]
        for expected, found in zip(everything, given + [None], strict=False):
            if expected != found:
                wrong = expected
                break
        raise ValueError(
            f"--pp_stage_fqns must name tok_embeddings, blocks.0 .. {everything[-3]}, norm and "
            "head once each, in "
            f"order; {wrong!r} is missing, double or misplaced"
        )
    return split


def csv_rows(path: str) -> list[list[tuple[str, int, int]]]:
    """--pp_schedule_csv: per rank its actions in order: (F forward | B backward | I, W its two
    halves, stage, micro-batch)."""
    try:
        with open(path) as f:
            lines = f.read().splitlines()
    except OSError as e:
        raise ValueError(f"--pp_schedule_csv {path}: {e.strerror}") from None
    rows = []
    for line in lines:
        actions = re.findall(r"(\d+)([FBIW])(\d+)", line)
        rows.append([(kind, int(stage), int(m)) for stage, kind, m in actions])
    return rows


def stage_ids(layout: Layout, n_stages: int, rank: int) -> list[int]:
    """The stages of a pipeline rank: every pp-th, or for V schedules one on the way down and one on
    the way back."""
    if layout.schedule not in get_args(Schedule):  # a file
        return sorted({stage for _, stage, _ in csv_rows(layout.schedule)[rank]})
    if layout.schedule in V_SHAPED:
        return [rank, n_stages - 1 - rank]
    return list(range(rank, n_stages, layout.pp))


def pipeline_stages(model, layout: Layout, cfg: PipelineConfig) -> list[nn.Module]:
    """The rank's stages: copies of the (meta) model without the parts of other stages, names
    unchanged."""
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


def stages_of_parts(model) -> dict[str, str]:
    """{a part that only a fork's model has: "first" or "last", the pipeline stage that holds the
    part}, as `pp_stage` of the model's class says. Raises ValueError for a part with parameters
    that is not in pp_stage."""
    parts = dict.fromkeys(
        fqn.partition(".")[0] for fqn, _ in model.named_parameters() if not fqn.startswith(KNOWN)
    )
    stages = dict.fromkeys(parts)
    if hasattr(model, "pp_stage"):
        stages = {name: model.pp_stage.get(name) for name in parts}
    for name, stage in stages.items():
        if stage not in ("first", "last"):
            raise ValueError(
                f'--pp: no stage is given for {name}; write pp_stage = {{{name!r}: "first"}} into '
                "class "
                f'{type(model).__name__} if forward uses {name} before the blocks, "last" if '
                "after the blocks; "
                "or make it part of a block"
            )
    return stages


def embeds_at_both_ends(config) -> bool:
    """Whether the last stage of a pipeline needs the embedding, too: as a tied head, or for
    multi-token prediction."""
    return config.tie_embeddings or config.mtp_depth > 0


def tied_copy(stage):
    """The last stage's copy of the embedding's weight under pp, or None."""
    is_copy = stage.index == stage.n_stages - 1 > 0 and stage.tok_embeddings is not None
    if is_copy:
        return stage.tok_embeddings.weight
    return None
