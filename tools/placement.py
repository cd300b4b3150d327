"""Who holds what: for every rank of a layout its place on each axis, its part of the parameters, and its tokens.

All of it is read from what the recipe really made: the places from its meshes, the parts from its DTensors, the tokens from
parallel.sequence_index. So a picture that is drawn from it cannot differ from the program.
"""
import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from parallel import sequence_index

GATHERED = ("fsdp", "efsdp")  # axes whose parts FSDP puts together for the time in which a block runs


def meshes(layout) -> list:
    return [mesh for mesh in (layout.full_mesh, layout.mesh, layout.expert_mesh) if mesh is not None]


def axis_groups(layout) -> dict[str, list[list[int]]]:
    """{axis: its groups of ranks} for the axes of more than one rank that something travels on, innermost first, experts last.
    FSDP's is dp_shard x cp."""
    groups = {}
    for mesh, axes in (layout.full_mesh, ["tp", "cp"]), (layout.mesh, ["fsdp", "dp_replicate", "pp"]), (
            layout.expert_mesh, ["etp", "ep", "efsdp"]):
        for axis in axes if mesh is not None else ():
            found = mesh.mesh.movedim(mesh.mesh_dim_names.index(axis), -1).flatten(0, -2).tolist()
            groups |= {axis: found} if len(found[0]) > 1 else {}
    return groups


def place_of(layout, rank: int) -> dict[str, int]:
    """{axis: this rank's number on it}, over the axes of all views of the grid."""
    return {axis: i for mesh in meshes(layout)
            for axis, i in zip(mesh.mesh_dim_names, (mesh.mesh == rank).nonzero()[0].tolist(), strict=True)}


def held_part(p, place: dict[str, int], gathered=False) -> list[tuple[int, int]]:
    """[(first, end) per dim]: the part of a parameter that a rank keeps, and with it of the gradient and the optimizer's state.
    gathered: the part that it has while the block runs, when FSDP's shards are put together."""
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
    """Which tokens a rank has: rows of the global batch, and positions [(first, end)] of each: in attention and FFN, where tp
    ranks have the same ones, and between them, where each has its part. In the order in which the rank holds them."""
    share = layout.global_batch_size // layout.data_ranks
    data_rank = place["dp_replicate"] * layout.dp_shard + place["dp_shard"]
    index = sequence_index(seq_len, layout.cp, place["cp"]) if layout.cp > 1 else torch.arange(seq_len)
    mine = index.chunk(layout.tp)[place["tp"]]
    return {"sequences": (data_rank * share, (data_rank + 1) * share), "inside": ranges(index), "between": ranges(mine)}


def shown_block(stages) -> tuple[str, torch.nn.Module]:
    """(number, block): the block that stands for all of a rank. Not its last one, which FSDP treats in another way."""
    blocks = max((stage.blocks for stage in stages), key=len)
    name = list(blocks)[-min(3, len(blocks))] if len(blocks) else ""
    return name, blocks[name] if name else torch.nn.Module()


def shown_parameters(stages) -> dict:
    """{name: parameter} of one block of a rank, under names without its number, and of what the rank has outside of blocks."""
    found = {f"block {name}": p for name, p in shown_block(stages)[1].named_parameters()}
    outside = {n: p for stage in stages for n, p in stage.named_parameters() if not n.startswith(("blocks.", "mtp."))}
    return found | outside
