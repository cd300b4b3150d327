"""Muon for sharded matrices: torch.optim.Muon with the work shared between the ranks.

Muon (Keller Jordan, 2024) makes the singular values of each matrix's momentum equal with five Newton-Schulz steps, 15 matrix
products. torch's own, given FSDP's DTensors, communicates in every one of them. Here each matrix is gathered once, one rank
does its 15 products, and the results are exchanged: as many bytes as one FSDP forward, and 1/ranks of the arithmetic.
"""
from itertools import groupby

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from parallel import local_slice


class Muon(torch.optim.Muon):
    """torch.optim.Muon for 2-D parameters, plain or sharded in any way; equal to it on one process."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:  # momentum is elementwise: on the shards
                if p not in self.state or not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
                self.state[p]["momentum_buffer"].lerp_(p.grad, 1 - group["momentum"])
            # the same order on all ranks, equal shapes together: one exchange serves one matrix per rank
            params.sort(key=lambda p: tuple(p.shape))
            for _, same_shape in groupby(params, key=lambda p: p.shape):
                self.step_same_shape(list(same_shape), group)

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
                update = update.bfloat16()  # as Newton-Schulz computes in it, and half the bytes
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
                local = p.to_local() if isinstance(p, DTensor) else p
                local.mul_(1 - group["lr"] * group["weight_decay"])
                local.add_(part, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], p.shape))
