"""Muon for sharded matrices: torch.optim.Muon with the work shared between the ranks, and for stacks of experts.

Muon (Keller Jordan, 2024) makes the singular values of each matrix's momentum equal with five Newton-Schulz steps, 15 matrix
products. Given FSDP's DTensors, torch's own communicates in every product. Here each matrix is gathered once, one rank does the
15 products, and the results are exchanged: as many bytes as one FSDP forward, and 1/ranks of the arithmetic.

Stacks of experts (E, out, in): with ep, and with FSDP up to one rank per expert, a rank holds whole matrices and nothing
travels. If --etp cuts every matrix, or FSDP has more ranks than experts, the ranks gather the matrices in bf16, each rank
treats a share, and the results are exchanged: as many bytes as two all-gathers of the weight.
"""
from itertools import groupby
from math import prod
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from distributed.layout import local_slice, local_tensor

AT_ONCE = 1 << 25  # numbers per call of Newton-Schulz: about 0.5 GB of temporary memory, and enough to keep a GPU busy


class Muon(torch.optim.Muon):
    """torch.optim.Muon for 2-D parameters, plain or sharded in any way; on one process the results are equal. A 3-D parameter
    is a stack of matrices (E, out, in); each matrix is treated like a parameter of its own.

    found_inf: 0-d tensor, 1.0 to let the next step change nothing; as in torch's fused optimizers.
    """

    found_inf, _step_supports_amp_scaling = None, True  # see guard.py

    def __init__(self, params, *args, **options):
        defaults = torch.optim.Muon([torch.zeros(1, 1)], *args, **options).defaults  # checks the options on a 2-D parameter
        torch.optim.Optimizer.__init__(self, params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:  # momentum is elementwise: on the shards
                if p not in self.state or not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
                buffer, grad = local_tensor(self.state[p]["momentum_buffer"]), local_tensor(p.grad)
                if self.found_inf is not None:  # gradient := momentum, so that the next line changes nothing
                    torch.where(self.found_inf.bool(), buffer, grad, out=grad)
                buffer.lerp_(grad, 1 - group["momentum"])
            # the same order on all ranks, equal shapes together: one exchange serves one matrix per rank
            params.sort(key=lambda p: tuple(p.shape))
            for _, same_shape in groupby(params, key=lambda p: p.shape):
                same_shape = list(same_shape)
                if same_shape[0].dim() == 3:
                    self.step_stacks(same_shape, group)
                else:
                    self.step_same_shape(same_shape, group)

    def step_stacks(self, params, group):
        def update(p, begin, end):
            """The update of experts begin..end of this rank, in bf16."""
            grad, buffer = (local_tensor(t)[begin:end] for t in (p.grad, self.state[p]["momentum_buffer"]))
            return (grad.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer).bfloat16()

        options = (group["ns_coefficients"], group["ns_steps"], group["eps"])
        for p, begin, end, part in orthogonal_parts(params, update, options):
            self.move(local_tensor(p)[begin:end], part, p.shape[1:], group)

    def step_same_shape(self, params, group):
        ranks, rank, process_group = 1, 0, None
        if isinstance(params[0], DTensor) and params[0].device_mesh["fsdp"].size() > 1:
            process_group = params[0].device_mesh["fsdp"].get_group()
            ranks, rank = dist.get_world_size(process_group), dist.get_rank(process_group)
        for begin in range(0, len(params), ranks):
            chunk = params[begin : begin + ranks]
            mine = torch.zeros(chunk[0].shape, dtype=torch.bfloat16, device=chunk[0].device)
            for i, p in enumerate(chunk):
                buffer, momentum = self.state[p]["momentum_buffer"], group["momentum"]
                update = p.grad.lerp(buffer, momentum) if group["nesterov"] else buffer.clone()
                update = update.bfloat16()  # the dtype of Newton-Schulz, and half the bytes
                update = update.full_tensor() if isinstance(update, DTensor) else update
                if i == rank:
                    mine = _zeropower_via_newtonschulz(update, group["ns_coefficients"], group["ns_steps"], group["eps"])
            results = [mine]
            if process_group is not None:
                results = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(ranks)]
                dist.all_gather(results, mine.contiguous(), group=process_group)
            for p, result in zip(chunk, results, strict=False):
                shape, offset = local_slice(p)
                part = result[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
                self.move(local_tensor(p), part, p.shape, group)

    def move(self, local, part, shape, group):
        """Update this rank's part of a parameter. shape: of the whole matrix, which sets the step size."""
        moves = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        local.mul_(1 - group["lr"] * group["weight_decay"] * moves)
        local.add_(part * moves, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], shape))


# ---------------------------------------------------------------- stacks of experts
def orthogonalize(stack: Tensor, ns_coefficients, ns_steps: int, eps: float) -> Tensor:
    """(E, out, in) -> (E, out, in) in bf16: torch.optim.Muon's Newton-Schulz, applied to each matrix alone."""
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
    """An axis of the mesh whose ranks must gather a stack along `dim` before its matrices can be treated."""

    group: dist.ProcessGroup
    dim: int
    ranks: int
    rank: int
    size: int  # of the stack along dim, before the cut


def cuts_of(p: Tensor) -> list[Cut]:
    """Mesh axes to gather over before Newton-Schulz, in order; empty if this rank already holds whole matrices."""
    if not isinstance(p, DTensor):
        return []
    names, mesh = p.device_mesh.mesh_dim_names, p.device_mesh
    degree = {name: mesh[name].size() for name in names}
    experts = p.shape[0] // degree.get("ep", 1)  # shared by the ranks of the other axes

    def cut(name, dim, size):
        return Cut(mesh[name].get_group(), dim, degree[name], mesh[name].get_local_rank(), size)

    cuts = []
    if degree.get("etp", 1) > 1:
        dim = p.placements[names.index("etp")].dim
        cuts.append(cut("etp", dim, p.shape[dim]))
    if degree.get("efsdp", 1) > experts:
        cuts.append(cut("efsdp", 0, experts))
    return cuts


def gather_stack(t: Tensor, cut: Cut) -> Tensor:
    """All-gather the ranks' parts. The last parts may be smaller or empty, as torch.chunk leaves them."""
    most = -(-cut.size // cut.ranks)
    if t.shape[cut.dim] < most:
        shape = list(t.shape)
        shape[cut.dim] = most - t.shape[cut.dim]
        t = torch.cat([t, t.new_zeros(shape)], cut.dim)
    parts = [torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(cut.ranks)]
    dist.all_gather(parts, t.contiguous(), group=cut.group)
    return torch.cat(parts, cut.dim).narrow(cut.dim, 0, cut.size)


def slice_own(whole: Tensor, cut: Cut) -> Tensor:
    """The part of a gathered stack that this rank holds: the inverse of gather_stack."""
    first = min(-(-cut.size // cut.ranks) * cut.rank, cut.size)
    return whole.narrow(cut.dim, first, min(-(-cut.size // cut.ranks), cut.size - first))


def orthogonal_parts(params: list, update, options: tuple):
    """Yields (parameter, first, end, part): the step of this rank's experts first..end.

    params: stacks of one shape, the same on all ranks. update(p, first, end): momentum of this rank's experts, in bf16."""
    cuts = cuts_of(params[0])
    if not cuts:
        at_once = max(1, AT_ONCE // prod(params[0].shape[1:]))
        for p in params:
            for first in range(0, len(local_tensor(p)), at_once):
                end = min(first + at_once, len(local_tensor(p)))
                yield p, first, end, orthogonalize(update(p, first, end), *options)
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
                whole = gather_stack(whole, cut)
            first, end = (min(max(rank * share + n - i * n_experts, 0), n_experts) for n in (0, share))
            mine.append(whole[first:end].clone())
        mine = torch.cat(mine)
        at_once = max(1, AT_ONCE // prod(params[0].shape[1:]))
        done = [orthogonalize(part, *options) for part in mine.split(at_once)] if len(mine) else [mine]
        results = torch.cat([*done, mine.new_zeros(share - len(mine), *mine.shape[1:])])
        for cut in cuts:
            results = gather_stack(results, cut._replace(dim=0, size=len(results) * cut.ranks))
        for p, part in zip(together, results.split(n_experts)):
            for cut in cuts_of(p):
                part = slice_own(part, cut)
            yield p, 0, len(local_tensor(p)), part
