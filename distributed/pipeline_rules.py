"""The rules of --pp for distributed/refusals.py: which schedules, stages and micro-batches fit
together. Loaded with --pp only."""

import math
from collections.abc import Iterator
from typing import Any

import torch

from distributed.agree import divisors
from distributed.layout import Layout
from distributed.pipeline import V_SHAPED, ZERO_BUBBLE, n_microbatches
from distributed.stages import ONE_STAGE_PER_RANK, csv_rows, split_stages


def pipeline_rows(layout: Layout, cfg: Any, c: Any) -> Iterator[tuple[Any, str]]:
    """Rules of a pipeline. The first rules that fail hide the others, because the others divide by
    the same numbers."""
    pp = layout.pp
    local = layout.local_batch_size
    size = cfg.pp_microbatch_size
    if local % size:
        yield (
            True,
            f"--pp_microbatch_size {size} does not divide --local_batch_size {local}; use "
            f"{divisors(local)}",
        )
        return
    n = n_microbatches(layout)
    name = cfg.pp_schedule
    splits_backward = cfg.pp_schedule in ZERO_BUBBLE
    if cfg.pp_schedule_csv:
        name = cfg.pp_schedule_csv
        table = csv_rows(cfg.pp_schedule_csv)
        ranks = len(table)
        splits_backward = False
        n_csv = 0
        for row in table:
            for kind, _, m in row:
                splits_backward |= kind == "I"
                if kind == "F":
                    n_csv = max(n_csv, m + 1)
        if (ranks, n_csv) != (pp, n):
            yield (
                True,
                (
                    f"--pp_schedule_csv {name} is for {ranks} ranks and {n_csv} micro-batches, "
                    f"not {pp} and {n}; use "
                    f"--pp {ranks} and --local_batch_size {n_csv * size}"
                ),
            )
            return
    yield from microbatch_rows(layout, name, n)
    if splits_backward:
        yield from split_backward_rows(layout, cfg, c, name)
    try:
        n_stages = len(split_stages(cfg, pp, c.n_layers))
    except ValueError as error:
        yield True, str(error)
        return
    fewest = 2
    most = c.n_layers
    if name in ONE_STAGE_PER_RANK:
        fewest = 1
        most = 1
    elif name in V_SHAPED:
        most = 2
    wanted = f"{fewest} or more"
    if fewest == most:
        wanted = f"exactly {fewest}"
    yield (
        not cfg.pp_schedule_csv and (n_stages % pp or not fewest <= n_stages // pp <= most),
        (
            f"{n_stages} stages over --pp {pp} ranks, but --pp_schedule {name} needs {wanted} per "
            "rank; change "
            "--pp_layers_per_stage or --pp_stage_fqns"
        ),
    )


def microbatch_rows(layout: Layout, name: str, n: int) -> Iterator[tuple[Any, str]]:
    """Whether n micro-batches are enough for the schedule, and divide into its rounds."""
    pp = layout.pp
    size = layout.microbatch_size
    accumulation = layout.accumulation
    # 2: with 1, half backwards leave gradients in both the compute dtype and --reduce_dtype, and
    # FSDP refuses the mixture
    fewest = {"1F1B": pp, "DualPipeV": 2 * pp, "ZBVZeroBubble": 2, "InterleavedZeroBubble": 2}.get(
        name, 1
    )
    rounds = max(1, n // pp)
    enough = math.ceil(fewest * size / accumulation)
    yield (
        n < fewest,
        (
            f"--pp_schedule {name} with --pp {pp} needs at least {fewest} micro-batches, but "
            f"there are {n}; use --local_batch_size "
            f"{enough} and --global_batch_size {enough * layout.data_ranks * accumulation}, or more"
        ),
    )
    yield (
        name in ("Interleaved1F1B", "InterleavedZeroBubble") and n % rounds,
        (
            f"--pp_schedule {name} needs a number of micro-batches that its {rounds} rounds of "
            f"--pp {pp} divide, not {n}; use "
            f"--local_batch_size {pp * rounds * size // accumulation or size}"
        ),
    )


def split_backward_rows(layout: Layout, cfg: Any, c: Any, name: str) -> Iterator[tuple[Any, str]]:
    """Zero-bubble schedules compute the gradients of inputs and those of weights in two separate
    halves of the backward."""
    yield (
        cfg.reshard_after_forward == "always",
        (
            "--reshard_after_forward always gives wrong gradients in the two half backwards of "
            f"--pp_schedule {name}; use never"
        ),
    )
    yield (
        c.tie_embeddings and layout.mtp,
        (
            f"--pp_schedule {name} cannot halve the backward of a tied embedding with mtp_depth "
            "1; use 1F1B"
        ),
    )
    yield (
        cfg.ac != "none",
        f"--ac {cfg.ac} with --pp_schedule {name} recomputes a block many times; use --ac none or "
        "1F1B",
    )
    yield (
        torch.__version__ < "2.13",
        (
            f"--pp_schedule {name} fails in torch {torch.__version__}, needs 2.13; use 1F1B or "
            "Interleaved1F1B"
        ),
    )
