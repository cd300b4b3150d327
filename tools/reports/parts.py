"""What every rank of a layout holds, for pictures: the place on each axis, the part of each
parameter, and the tokens.

All of this is read from the objects that the recipe made: places from the meshes, parts from the
DTensors, tokens from parallel.sequence_index. So a picture cannot differ from the program.
"""

from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset

from distributed.layout import Layout
from parallel import sequence_index
from tools.reports.explain import shown_block

GATHERED = ("fsdp", "efsdp")  # axes over which FSDP gathers the parts while a block runs


def axis_groups(layout) -> dict[str, list[list[int]]]:
    """{axis: groups of ranks} for all axes with traffic and more than one rank, innermost first,
    experts last. The axis fsdp is dp_shard x cp."""
    groups = {}
    for mesh, axes in (
        (layout.full_mesh, ["tp", "cp"]),
        (layout.mesh, ["fsdp", "dp_replicate", "pp"]),
        (layout.expert_mesh, ["etp", "ep", "efsdp"]),
    ):
        if mesh is None:
            continue
        for axis in axes:
            found = mesh.mesh.movedim(mesh.mesh_dim_names.index(axis), -1).flatten(0, -2).tolist()
            if len(found[0]) > 1:
                groups[axis] = found
    return groups


def shown_ranks(layout) -> tuple[list[list[list[int]]], str]:
    """(ranks by pipeline rank, data rank and cp x tp rank, words on the cut or ""), of a large mesh
    only the beginning."""
    sizes = (
        (8, layout.pp, "pipeline ranks"),
        (32, layout.data_ranks, "columns"),
        (8, layout.cp * layout.tp, "rows"),
    )
    ranks = layout.full_mesh.mesh.reshape([n for _, n, _ in sizes])[:8, :32, :8].tolist()
    return ranks, ", ".join(f"{most} of {n} {what}" for most, n, what in sizes if most < n)


def place_of(layout, rank: int) -> dict[str, int]:
    """{axis: coordinate of the rank}, over the axes of all meshes."""
    place = {}
    for mesh in (layout.full_mesh, layout.mesh, layout.expert_mesh):
        if mesh is not None:
            coordinates = (mesh.mesh == rank).nonzero()[0].tolist()
            place |= dict(zip(mesh.mesh_dim_names, coordinates, strict=True))
    return place


def held_part(
    p: torch.Tensor, place: dict[str, int], gathered: bool = False
) -> list[tuple[int, int]]:
    """[(first, end) per dim]: a rank's part of a parameter, and of the gradient and the optimizer's state. gathered: the part
    while the block runs, after FSDP has gathered the shards."""
    if not isinstance(p, DTensor):
        return [(0, n) for n in p.shape]
    axes = p.device_mesh.mesh_dim_names
    placements = list(p.placements)
    for i, axis in enumerate(axes):
        if gathered and axis in GATHERED:
            placements[i] = Replicate()
    here = [place[axis] for axis in axes]
    shape, first = _compute_local_shape_and_global_offset(
        p.shape, p.device_mesh.shape, here, placements
    )
    return [(a, a + n) for a, n in zip(first, shape, strict=True)]


def ranges(index: torch.Tensor | list[int]) -> list[tuple[int, int]]:
    """[0 1 2 6 7] -> [(0, 3), (6, 8)]"""
    index = torch.as_tensor(index)
    breaks = (index.diff() != 1).nonzero().flatten() + 1
    runs = index.tensor_split(breaks.tolist())
    return [(int(run[0]), int(run[-1]) + 1) for run in runs if len(run)]


def tokens_of(layout: Layout, place: dict[str, int], seq_len: int) -> dict:
    """The tokens of a rank: rows of the global batch, and positions [(first, end)] in the rank's
    order: inside of attention and FFN (equal on all tp ranks), and between them (each tp rank has a
    part)."""
    share = layout.global_batch_size // layout.data_ranks
    data_rank = place["dp_replicate"] * layout.dp_shard + place["dp_shard"]
    index = torch.arange(seq_len)
    if layout.cp > 1:
        index = sequence_index(seq_len, layout.cp, place["cp"])
    part = index.chunk(layout.tp)[place["tp"]]
    return {
        "sequences": (data_rank * share, (data_rank + 1) * share),
        "inside": ranges(index),
        "between": ranges(part),
    }


def shown_parameters(stages: Sequence[nn.Module]) -> dict:
    """{name: parameter} of the shown block, without the block's number in the names, and of the
    rank's other modules."""
    found = {f"block {name}": p for name, p in shown_block(stages)[1].named_parameters()}
    for stage in stages:
        for name, p in stage.named_parameters():
            if not name.startswith(("blocks.", "mtp.")):
                found[name] = p
    return found
