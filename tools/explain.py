"""--explain: a page on a single block: the placement of each parameter, and each collective with its phase and reason.

For every rank of a layout: the place on each axis, the part of each parameter, and the tokens. All of this is read from the
objects that the recipe made: places from the meshes, parts from the DTensors, tokens from parallel.sequence_index. So a picture
cannot differ from the program.
"""
import json
from pathlib import Path

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from distributed.layout import local_tensor
from distributed.pipeline import n_microbatches
from parallel import sequence_index
from tools.dryrun import DryWatch, add_scaled, dry_world, human, observe, size_of, table, totals

# {axis: what travels}, [axis, operation, phase, contents, places in the phase (see svg.timeline), reason]
AXIS_WORDS, moves = json.loads(Path(__file__).with_name("traffic.json").read_text()).values()
MOVES = {tuple(row[:3]): row[3:] for row in moves}
GATHERED = ("fsdp", "efsdp")  # axes over which FSDP gathers the parts while a block runs


# ---------------------------------------------------------------- every rank
def axis_groups(layout) -> dict[str, list[list[int]]]:
    """{axis: groups of ranks} for all axes with traffic and more than one rank, innermost first, experts last. The axis fsdp
    is dp_shard x cp."""
    groups = {}
    for mesh, axes in (layout.full_mesh, ["tp", "cp"]), (layout.mesh, ["fsdp", "dp_replicate", "pp"]), (
            layout.expert_mesh, ["etp", "ep", "efsdp"]):
        for axis in axes if mesh is not None else ():
            found = mesh.mesh.movedim(mesh.mesh_dim_names.index(axis), -1).flatten(0, -2).tolist()
            groups |= {axis: found} if len(found[0]) > 1 else {}
    return groups


def shown_ranks(layout) -> tuple[list[list[list[int]]], str]:
    """(ranks by pipeline rank, data rank and cp x tp rank, words on the cut or ""), of a large mesh only the beginning."""
    sizes = (8, layout.pp, "pipeline ranks"), (32, layout.data_ranks, "columns"), (8, layout.cp * layout.tp, "rows")
    ranks = layout.full_mesh.mesh.reshape([n for _, n, _ in sizes])[:8, :32, :8].tolist()
    return ranks, ", ".join(f"{most} of {n} {what}" for most, n, what in sizes if most < n)


def place_of(layout, rank: int) -> dict[str, int]:
    """{axis: coordinate of the rank}, over the axes of all meshes."""
    meshes = [mesh for mesh in (layout.full_mesh, layout.mesh, layout.expert_mesh) if mesh is not None]
    return {axis: i for mesh in meshes
            for axis, i in zip(mesh.mesh_dim_names, (mesh.mesh == rank).nonzero()[0].tolist(), strict=True)}


def held_part(p, place: dict[str, int], gathered=False) -> list[tuple[int, int]]:
    """[(first, end) per dim]: a rank's part of a parameter, and of the gradient and the optimizer's state. gathered: the part
    while the block runs, after FSDP has gathered the shards."""
    if not isinstance(p, DTensor):
        return [(0, n) for n in p.shape]
    axes = p.device_mesh.mesh_dim_names
    placements = [Replicate() if gathered and axis in GATHERED else x for axis, x in zip(axes, p.placements, strict=True)]
    here = [place[axis] for axis in axes]
    shape, first = _compute_local_shape_and_global_offset(p.shape, p.device_mesh.shape, here, placements)
    return [(a, a + n) for a, n in zip(first, shape, strict=True)]


def ranges(index) -> list[tuple[int, int]]:
    """[0 1 2 6 7] -> [(0, 3), (6, 8)]"""
    index = torch.as_tensor(index)
    breaks = (index.diff() != 1).nonzero().flatten() + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in index.tensor_split(breaks.tolist()) if len(run)]


def tokens_of(layout, place: dict[str, int], seq_len: int) -> dict:
    """The tokens of a rank: rows of the global batch, and positions [(first, end)] in the rank's order: inside of attention
    and FFN (equal on all tp ranks), and between them (each tp rank has a part)."""
    share = layout.global_batch_size // layout.data_ranks
    data_rank = place["dp_replicate"] * layout.dp_shard + place["dp_shard"]
    index = sequence_index(seq_len, layout.cp, place["cp"]) if layout.cp > 1 else torch.arange(seq_len)
    mine = index.chunk(layout.tp)[place["tp"]]
    return {"sequences": (data_rank * share, (data_rank + 1) * share), "inside": ranges(index), "between": ranges(mine)}


def shown_block(stages) -> tuple[str, torch.nn.Module]:
    """(number, block): the block shown for all blocks of a rank. Not the last block, because FSDP does not reshard it."""
    blocks = max((stage.blocks for stage in stages), key=len)
    name = list(blocks)[-min(3, len(blocks))] if len(blocks) else ""
    return name, blocks[name] if name else torch.nn.Module()


def shown_parameters(stages) -> dict:
    """{name: parameter} of the shown block, without the block's number in the names, and of the rank's other modules."""
    found = {f"block {name}": p for name, p in shown_block(stages)[1].named_parameters()}
    outside = {n: p for stage in stages for n, p in stage.named_parameters() if not n.startswith(("blocks.", "mtp."))}
    return found | outside


# ---------------------------------------------------------------- one block
def describe_split(p) -> str:
    """Describe how a parameter is split: 'tp: rows, fsdp: rows'. Dims of tensors larger than matrices are named by number."""
    if not isinstance(p, DTensor):
        return "whole"
    names = {1: ["rows"], 2: ["rows", "columns"]}.get(p.dim(), [f"dim {d}" for d in range(p.dim())])
    axes = zip(p.device_mesh.mesh_dim_names, p.device_mesh.shape, p.placements, strict=True)
    # FSDP's axes stand first in the mesh but split last, so name them last
    said = [f"{a}: {'whole' if x.is_replicate() else names[x.dim]}" for a, size, x in axes if size > 1]
    return ", ".join(reversed(said)) or "whole"


def count_block(main, cfg):
    """(layout, name, parameters, step) of a block: run the first stage with three blocks and with two; a block costs the
    difference. parameters: [name, shape, how it is split, this device's part]; step: see dryrun.observe. Returns None if a
    rank has fewer than three layers."""
    steps = []
    for keep in (3, 2):
        with dry_world(main, cfg, 0) as (stages, optimizers, layout):
            blocks = max((stage.blocks for stage in stages), key=len)
            if len(blocks) < 3:
                return None
            name, block = shown_block(stages)
            for unused in list(blocks)[:-keep]:
                del blocks[unused]
            for module in (m for stage in stages for m in stage.modules() if isinstance(m, FSDPModule)):
                module.set_modules_to_forward_prefetch([])  # with --ep blocks name their neighbours, deleted above
                module.set_modules_to_backward_prefetch([])
            if not steps:
                params = [[n, p.shape, describe_split(p), local_tensor(p)] for n, p in block.named_parameters()]
            n = n_microbatches(layout) if cfg.pp_schedule_csv else 1
            steps.append(observe(stages, optimizers, layout, cfg.seq_len, n, DryWatch(layout)))
    return layout, name, params, add_scaled(steps[0], -1, steps[1])


def list_collectives(step) -> list[tuple]:
    """(phase, axis, operation, number, bytes, why) of all collectives of a block, in the order of the phases."""
    moved = {key[1:]: n for key, n in step.items() if key[0] == "moved" and n}
    found = []
    for p in ("forward", "recompute", "backward"):
        here = {key: n for key, n in moved.items() if key[0] == p}
        for (axis, op), (number, size) in totals(here).items():
            *_, why = MOVES.get((axis, op, p), [""])
            found.append((p, axis, op, number, size, "the forward's, as its result was not kept" if p == "recompute" else why))
    return found


def explain(cfg, counted) -> None:
    """Print the counts of count_block."""
    if counted is None:
        raise ValueError("--explain needs three layers on a rank, to compare three with two of them; --html FILE shows the "
                         "parts of each rank and the schedule")
    layout, name, params, step = counted
    print(f"One block of {layout}: blocks.{name}, on the first device\n")
    shape = lambda s: " x ".join(map(str, s))  # noqa: E731
    lines = [["parameter", "whole", "split by", "on this device", ""]]
    lines += [[n, shape(whole), split, shape(p.shape), human(size_of([p]))] for n, whole, split, p in params]
    print(table(lines, right=False))
    size = f"{cfg.pp_microbatch_size if layout.pp > 1 else cfg.local_batch_size} x {cfg.seq_len}"
    print(f"\nWhat travels for it in one forward and backward of {size} tokens. Bytes in all: the largest tensor of each,\n"
          "added up; a rank sends and receives (n-1)/n of them over an axis of n ranks, and twice that in an all-reduce.\n")
    lines = [["phase", "axis", "operation", "number", "bytes in all", "why"]]
    lines += [[*key, number, human(size), why] for *key, number, size, why in list_collectives(step)]
    print(table(lines, right=False) if len(lines) > 1 else "Nothing: no axis has more than one rank.")
    if layout.pp > 1:
        print("\nBetween pipeline ranks only the activations behind a stage's last block travel, and their gradients back.")
    print(f"\nFLOPs: {sum(step['flops', f] for f in ('forward', 'backward', 'recompute')):.3g} on each device.")
