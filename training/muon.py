"""Muon for sharded matrices: torch.optim.Muon with the work shared between the ranks, and for
stacks of experts.

Muon (Keller Jordan, 2024) makes the singular values of each matrix's momentum equal with five
Newton-Schulz steps, 15 matrix products. Given FSDP's DTensors, torch's own communicates in every
product. Here each matrix is gathered once, one rank does the 15 products, and the results are
exchanged: as many bytes as one FSDP forward, and 1/ranks of the arithmetic. Small matrices of one
shape travel together.

Stacks of experts (E, out, in): ep and FSDP split a stack between two matrices, so a rank holds
whole matrices and nothing travels. With more FSDP ranks than experts some ranks have no matrix, and
wait. --etp cuts every matrix, and is refused.
"""

import math
from collections import defaultdict

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from distributed.layout import all_gather_single, local_slice, local_tensor, whole_tensor

# numbers of matrices that a rank treats at once: about 0.5 GB of temporary memory, and enough to
# keep a GPU busy
AT_ONCE = 1 << 25


def how_cut(p: Tensor) -> str:
    """A name for the mesh and the placements of a parameter, the same on all ranks that share it."""
    if isinstance(p, DTensor):
        return f"{p.device_mesh} {p.placements}"
    return "not at all"


def behind_a_stack(placement: Placement) -> Placement:
    """How a stack of matrices is cut that are each cut by `placement`: dim d is now dim d + 1."""
    if isinstance(placement, _StridedShard):
        return _StridedShard(placement.dim + 1, split_factor=placement.split_factor)
    if isinstance(placement, Shard):
        return Shard(placement.dim + 1)
    return placement


class Muon(torch.optim.Muon):
    """torch.optim.Muon for 2-D parameters, plain or sharded in any way; on one process the results
    are equal. A 3-D parameter is a stack of matrices (E, out, in); each matrix is treated like a
    parameter of its own.

    found_inf: 0-d tensor, 1.0 to let the next step change nothing; as in torch's fused optimizers.
    """

    # Of the products of Newton-Schulz. --check_parity computes them in fp32: they make small
    # directions up to 485 = 3.4445^5 times larger, and with them bf16's rounding, so that the
    # updates of two equal layouts would differ by percents, and a mistake could hide there.
    dtype = torch.bfloat16
    # see optim.py
    found_inf = None
    _step_supports_amp_scaling = True

    def __init__(self, params, *args, **options):
        # checks the options on a 2-D parameter
        defaults = torch.optim.Muon([torch.zeros(1, 1)], *args, **options).defaults
        torch.optim.Optimizer.__init__(self, params, defaults)

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:  # momentum is elementwise: on the shards
                if p not in self.state or not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
                buffer = local_tensor(self.state[p]["momentum_buffer"])
                grad = local_tensor(p.grad)
                # gradient := momentum, so that the next line changes nothing
                if self.found_inf is not None:
                    torch.where(self.found_inf.bool(), buffer, grad, out=grad)
                buffer.lerp_(grad, 1 - group["momentum"])
            # the same order on all ranks; matrices cut alike together, for they travel together
            alike = defaultdict(list)  # (shape, how it is cut) -> parameters
            for p in params:
                if p.dim() == 3:
                    self.step_stack(p, group)
                elif p.dim() == 2:
                    alike[tuple(p.shape), how_cut(p)].append(p)
            for key in sorted(alike):
                self.step_alike(alike[key], group)

    def step_stack(self, p, group):
        """Each rank treats the experts that it holds; nothing travels."""
        weights = local_tensor(p)
        grads = local_tensor(p.grad)
        buffers = local_tensor(self.state[p]["momentum_buffer"])
        assert weights.shape[1:] == p.shape[1:], (weights.shape, p.shape)
        at_once = max(1, AT_ONCE // p.shape[1:].numel())
        for first in range(0, len(weights), at_once):
            some = slice(first, first + at_once)
            update = buffers[some]
            if group["nesterov"]:
                update = grads[some].lerp(update, group["momentum"])
            part = self.rescale(p, self.orthogonalize(update, group), first)
            self.move(weights[some], part, p.shape[1:], group)

    def step_alike(self, params, group):
        """Each rank treats some of the matrices, and all ranks get the results."""
        ranks = 1
        rank = 0
        process_group = None
        if isinstance(params[0], DTensor) and params[0].device_mesh["fsdp"].size() > 1:
            process_group = params[0].device_mesh["fsdp"].get_group()
            ranks = dist.get_world_size(process_group)
            rank = dist.get_rank(process_group)
        shape, offset = local_slice(params[0])
        here = tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
        share = math.ceil(len(params) / ranks)  # matrices of a rank
        share = max(1, min(share, AT_ONCE // params[0].numel()))
        for begin in range(0, len(params), share * ranks):
            chunk = params[begin : begin + share * ranks]
            orthogonal = torch.zeros(
                share, *params[0].shape, dtype=self.dtype, device=params[0].device
            )
            for owner in range(ranks):
                owned = chunk[owner * share : (owner + 1) * share]
                if not owned:
                    break
                updates = self.whole_updates(owned, group)
                if owner == rank:
                    for i, update in enumerate(updates):
                        orthogonal[i] = self.orthogonalize(update, group)
            results = orthogonal
            if process_group is not None:
                results = orthogonal.new_empty(ranks * share, *params[0].shape)
                all_gather_single(results, orthogonal, group=process_group)
            for p, result in zip(chunk, results, strict=False):
                self.move(local_tensor(p), self.rescale(p, result)[here], p.shape, group)

    def whole_updates(self, params, group) -> Tensor:
        """(n, out, in) of n parameters cut alike, in the dtype of Newton-Schulz; gathered
        together, on every rank."""
        updates = []
        for p in params:
            update = local_tensor(self.state[p]["momentum_buffer"])
            if group["nesterov"]:
                update = local_tensor(p.grad).lerp(update, group["momentum"])
            updates.append(update.to(self.dtype))
        stack = torch.stack(updates)  # a copy: torch's Newton-Schulz divides in place
        p = params[0]
        if not isinstance(p, DTensor):
            return stack
        whole = torch.empty(len(params), *p.shape, device="meta")
        placements = [behind_a_stack(x) for x in p.placements]
        cut = DTensor.from_local(
            stack,
            p.device_mesh,
            placements,
            run_check=False,
            shape=whole.shape,
            stride=whole.stride(),
        )
        return whole_tensor(cut)

    def move(self, local, part, shape, group):
        """Update this rank's part of a parameter. shape: of the whole matrix, which sets the step
        size."""
        moves = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        local.mul_(1 - group["lr"] * group["weight_decay"] * moves)
        local.add_(part * moves, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], shape))

    # -------------------- what a variant of Muon replaces: forks/normuon.py, forks/polar_express.py
    def orthogonalize(self, update: Tensor, group) -> Tensor:
        """(out, in), or a stack (E, out, in) whose matrices are treated each alone -> the same
        shape in self.dtype, all singular values near 1: torch.optim.Muon's Newton-Schulz."""
        is_matrix = update.dim() == 2
        if is_matrix and self.dtype != torch.bfloat16:  # torch's function rounds to bf16
            return self.orthogonalize(update[None], group)[0]
        if is_matrix:
            return _zeropower_via_newtonschulz(
                update, group["ns_coefficients"], group["ns_steps"], group["eps"]
            )
        a, b, c = group["ns_coefficients"]
        x = update.to(self.dtype)
        if x.shape[1] > x.shape[2]:
            x = x.mT  # the products below are then of the shorter side
        # no singular value above 1
        x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=group["eps"])
        for _ in range(group["ns_steps"]):
            gram = torch.bmm(x, x.mT)
            x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
        return x.mT if update.shape[1] > update.shape[2] else x

    def rescale(self, p, result: Tensor, first: int = 0) -> Tensor:
        """The direction in which p moves. result, of orthogonalize: the whole matrix p, on every
        rank, or whole matrices of the stack p, from number `first` of those that this rank holds.
        """
        return result
