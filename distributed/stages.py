"""How the layers are split into the stages of a pipeline: evenly, as --pp_stage_fqns says, or into as
many stages as --pp_schedule_csv names. Only runs with --pp load this file."""

import math
import re

ONE_STAGE_PER_RANK = ("GPipe", "1F1B")
# parameters of parts with a fixed stage
KNOWN = ("tok_embeddings.", "blocks.", "norm.", "head.", "mtp.")


def split_stages(cfg, pp: int, n_layers: int) -> list[list[str]]:
    """Module names of every pipeline stage, in order. cfg: a PipelineConfig. Raises ValueError when
    the layers do not fill the stages."""
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
