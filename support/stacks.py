"""Muon for stacks of experts, (E, out, in): Newton-Schulz for many matrices at once, and who does it where they are sharded.

With ep, and with FSDP as long as there is an expert for every rank, a rank holds whole matrices: it treats its own, and nothing
travels. Where --etp cuts every matrix, or FSDP has more ranks than experts and would let some of them wait, the ranks gather
the matrices in bf16, each treats its share, and the results are exchanged. That is as many bytes as two all-gathers of the
weight, and in memory the same two copies in bf16 for a moment.
"""
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from distributed.layout import local_tensor

AT_ONCE = 1 << 25  # numbers that Newton-Schulz works on: about 0.5 GB of temporary memory, and enough for a GPU to be busy


def orthogonal(stack: Tensor, ns_coefficients, ns_steps: int, eps: float) -> Tensor:
    """(E, out, in) -> the same in bf16, where each matrix is what torch.optim.Muon's Newton-Schulz makes of it alone."""
    a, b, c = ns_coefficients
    x = stack.bfloat16()
    if x.shape[1] > x.shape[2]:
        x = x.mT  # the products below are then of the shorter side
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=eps)  # no singular value above 1
    for _ in range(ns_steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if stack.shape[1] > stack.shape[2] else x


class Cut(NamedTuple):
    """An axis of the mesh whose ranks have to gather a stack along `dim` before they can treat its matrices."""

    group: dist.ProcessGroup
    dim: int
    ranks: int
    rank: int
    size: int  # of the stack along dim, before this axis has cut it


def cuts_of(p: Tensor) -> list[Cut]:
    """The cuts of a stack in the order in which they are undone: none where this rank holds whole matrices, and its share."""
    if not isinstance(p, DTensor):
        return []
    names, mesh = p.device_mesh.mesh_dim_names, p.device_mesh
    degree = {name: mesh[name].size() for name in names}
    experts = p.shape[0] // degree.get("ep", 1)  # that the ranks of the other axes have between them

    def cut(name, dim, size):
        return Cut(mesh[name].get_group(), dim, degree[name], mesh[name].get_local_rank(), size)

    cuts = []
    if degree.get("etp", 1) > 1:
        dim = p.placements[names.index("etp")].dim
        cuts.append(cut("etp", dim, p.shape[dim]))
    if degree.get("efsdp", 1) > experts:
        cuts.append(cut("efsdp", 0, experts))
    return cuts


def gathered(t: Tensor, cut: Cut) -> Tensor:
    """The parts of all ranks. The last ones may be smaller or empty, as torch.chunk leaves them."""
    most = -(-cut.size // cut.ranks)
    if t.shape[cut.dim] < most:
        shape = list(t.shape)
        shape[cut.dim] = most - t.shape[cut.dim]
        t = torch.cat([t, t.new_zeros(shape)], cut.dim)
    parts = [torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(cut.ranks)]
    dist.all_gather(parts, t.contiguous(), group=cut.group)
    return torch.cat(parts, cut.dim).narrow(cut.dim, 0, cut.size)


def own_part(whole: Tensor, cut: Cut) -> Tensor:
    first = min(-(-cut.size // cut.ranks) * cut.rank, cut.size)
    return whole.narrow(cut.dim, first, min(-(-cut.size // cut.ranks), cut.size - first))


def orthogonal_parts(params: list, update, options: tuple):
    """Yields (parameter, first, end, part): how the experts first..end that this rank holds are to move.

    params: stacks of one shape, the same on all ranks. update(p, first, end): of this rank's experts, in bf16."""
    cuts = cuts_of(params[0])
    if not cuts:
        at_once = max(1, AT_ONCE // prod(params[0].shape[1:]))
        for p in params:
            for first in range(0, len(local_tensor(p)), at_once):
                end = min(first + at_once, len(local_tensor(p)))
                yield p, first, end, orthogonal(update(p, first, end), *options)
        return
    ranks, rank = 1, 0
    for cut in cuts:  # etp is inside efsdp
        ranks, rank = ranks * cut.ranks, rank + ranks * cut.rank
    n_experts = next((cut.size for cut in cuts if cut.dim == 0), len(local_tensor(params[0])))
    if n_experts == 0:  # the same on all ranks of these cuts
        return
    n_together = max(1, ranks // n_experts)  # with fewer experts than ranks, several stacks give each rank a matrix
    for begin in range(0, len(params), n_together):
        together = params[begin:begin + n_together]
        share = -(-len(together) * n_experts // ranks)
        mine = []
        for i, p in enumerate(together):
            whole = update(p, 0, len(local_tensor(p)))
            for cut in cuts_of(p):
                whole = gathered(whole, cut)
            first, end = (min(max(rank * share + n - i * n_experts, 0), n_experts) for n in (0, share))
            mine.append(whole[first:end].clone())
        mine = torch.cat(mine)
        at_once = max(1, AT_ONCE // prod(params[0].shape[1:]))
        done = [orthogonal(part, *options) for part in mine.split(at_once)] if len(mine) else [mine]
        results = torch.cat([*done, mine.new_zeros(share - len(mine), *mine.shape[1:])])
        for cut in cuts:
            results = gathered(results, cut._replace(dim=0, size=len(results) * cut.ranks))
        for p, part in zip(together, results.split(n_experts)):
            for cut in cuts_of(p):
                part = own_part(part, cut)
            yield p, 0, len(local_tensor(p)), part
