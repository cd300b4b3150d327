"""--explain: a page on a single block: the placement of each parameter, and each collective with
its phase and reason.

Read from the objects that the recipe made, and from a forward and backward of the dry run, so the
page cannot differ from the program. parts.py has the part of every rank, for pictures.
"""

import json
from collections import Counter
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from distributed.layout import local_tensor
from distributed.pipeline import n_microbatches
from tools.reports.dryrun import (
    DryWatch,
    add_scaled,
    dry_world,
    format_bytes,
    observe,
    size_of,
    table,
    totals,
)

# {axis: what travels}, [axis, operation, phase, contents, places in the phase (see svg.timeline),
# reason]
AXIS_WORDS, moves = json.loads(Path(__file__).with_name("traffic.json").read_text()).values()
MOVES = {tuple(row[:3]): row[3:] for row in moves}


def shown_block(stages) -> tuple[str, torch.nn.Module]:
    """(number, block): the block shown for all blocks of a rank. Not the last block, because FSDP
    does not reshard it."""
    blocks = max((stage.blocks for stage in stages), key=len)
    if not len(blocks):
        return "", torch.nn.Module()
    name = list(blocks)[-min(3, len(blocks))]
    return name, blocks[name]


def describe_split(p: torch.Tensor) -> str:
    """Describe how a parameter is split: 'tp: rows, fsdp: rows'. Dims of tensors larger than
    matrices are named by number."""
    if not isinstance(p, DTensor):
        return "whole"
    names = {1: ["rows"], 2: ["rows", "columns"]}.get(p.dim(), [f"dim {d}" for d in range(p.dim())])
    axes = zip(p.device_mesh.mesh_dim_names, p.device_mesh.shape, p.placements, strict=True)
    said = []
    for axis, size, placement in axes:
        if size == 1:
            continue
        if placement.is_replicate():
            said.append(f"{axis}: whole")
        else:
            said.append(f"{axis}: {names[placement.dim]}")
    # FSDP's axes stand first in the mesh but split last, so name them last
    return ", ".join(reversed(said)) or "whole"


def count_block(main: FunctionType, cfg: Any) -> tuple | None:
    """(layout, name, parameters, step) of a block: run the first stage with three blocks and with
    two; a block costs the difference. parameters: [name, shape, how it is split, this device's
    part]; step: see dryrun.observe. Returns None if a rank has fewer than three layers."""
    steps = []
    for keep in (3, 2):
        with dry_world(main, cfg, 0) as (stages, optimizers, layout):
            blocks = max((stage.blocks for stage in stages), key=len)
            if len(blocks) < 3:
                return None
            name, block = shown_block(stages)
            for unused in list(blocks)[:-keep]:
                del blocks[unused]
            for stage in stages:
                forget_neighbours(stage)
            if not steps:
                params = []
                for n, p in block.named_parameters():
                    params.append([n, p.shape, describe_split(p), local_tensor(p)])
            n = 1
            if cfg.pp_schedule_csv:
                n = n_microbatches(layout)
            steps.append(observe(stages, optimizers, layout, cfg.seq_len, n, DryWatch(layout)))
    return layout, name, params, add_scaled(steps[0], -1, steps[1])


def forget_neighbours(stage: nn.Module) -> None:
    """With --ep, blocks name their neighbours, and count_block has deleted some."""
    for module in stage.modules():
        if isinstance(module, FSDPModule):
            module.set_modules_to_forward_prefetch([])
            module.set_modules_to_backward_prefetch([])


def list_collectives(step: Counter) -> list[tuple]:
    """(phase, axis, operation, number, bytes, why) of all collectives of a block, in the order of
    the phases."""
    moved = {key[1:]: n for key, n in step.items() if key[0] == "moved" and n}
    found = []
    for p in ("forward", "recompute", "backward"):
        here = {key: n for key, n in moved.items() if key[0] == p}
        for (axis, op), (number, size) in totals(here).items():
            *_, why = MOVES.get((axis, op, p), [""])
            if p == "recompute":
                why = "the forward's, as its result was not kept"
            found.append((p, axis, op, number, size, why))
    return found


def explain(cfg: Any, counted: tuple | None) -> None:
    """Print the counts of count_block."""
    if counted is None:
        raise ValueError(
            "--explain needs three layers on a rank, to compare three with two of them; --html "
            "FILE shows the "
            "parts of each rank and the schedule"
        )
    layout, name, params, step = counted
    print(f"One block of {layout}: blocks.{name}, on the first device\n")
    lines = [["parameter", "whole", "split by", "on this device", ""]]
    for n, whole, split, p in params:
        whole = " x ".join(map(str, whole))
        here = " x ".join(map(str, p.shape))
        lines.append([n, whole, split, here, format_bytes(size_of([p]))])
    print(table(lines, right=False))
    size = f"{cfg.local_batch_size} x {cfg.seq_len}"
    if layout.pp > 1:
        size = f"{cfg.pp_microbatch_size} x {cfg.seq_len}"
    print(
        f"\nTraffic of the block in one forward and backward of {size} tokens. Bytes in all: the "
        "largest tensor of each,\n"
        "added up; a rank sends and receives (n-1)/n of them over an axis of n ranks, and twice "
        "that in an all-reduce.\n"
    )
    lines = [["phase", "axis", "operation", "number", "bytes in all", "why"]]
    lines += [
        [*key, number, format_bytes(size), why]
        for *key, number, size, why in list_collectives(step)
    ]
    print(
        table(lines, right=False) if len(lines) > 1 else "Nothing: no axis has more than one rank."
    )
    if layout.pp > 1:
        print(
            "\nBetween pipeline ranks only the outputs of a stage's last block travel, "
            "and their gradients back."
        )
    print(
        f"\nFLOPs: {sum(step['flops', f] for f in ('forward', 'backward', 'recompute')):.3g} on "
        "each device."
    )
