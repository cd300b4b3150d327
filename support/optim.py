"""AdamW with moments of fewer bits, and Muon for sharded matrices: torch.optim.Muon with the work shared between the ranks.

Muon (Keller Jordan, 2024) makes the singular values of each matrix's momentum equal with five Newton-Schulz steps, 15 matrix
products. torch's own, given FSDP's DTensors, communicates in every one of them. Here each matrix is gathered once, one rank
does its 15 products, and the results are exchanged: as many bytes as one FSDP forward, and 1/ranks of the arithmetic.
"""
import logging
from functools import partial
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.tensor import DTensor
from torch.optim._muon import _adjust_lr, _zeropower_via_newtonschulz

from distributed.layout import Layout, local_slice, local_tensor
from parallel import replicas


def step_in_backward(optimizers, layout: Layout) -> None:
    """--optimizer_in_backward: from now on each parameter is updated within the backward, when its gradient is summed over
    the ranks, and the gradient is freed. There are never more gradients in memory than those of one FSDP unit."""
    if not layout.cfg.optimizer_in_backward:
        return
    layout.squares = torch.zeros((), dtype=torch.float64, device=layout.device)

    def update(p, optimizer, group):
        (norm,) = torch._foreach_norm([local_tensor(p.grad)], 2, dtype=torch.float64)  # without a copy of it in fp64
        layout.squares += norm.square() / replicas(p.grad, layout)
        everything, optimizer.param_groups = optimizer.param_groups, [{**group, "params": [p]}]
        optimizer.step()
        optimizer.param_groups, p.grad = everything, None

    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.register_post_accumulate_grad_hook(partial(update, optimizer=optimizer, group=group))


def set_lr(optimizers, lr: float) -> float:
    """Give all parameter groups this learning rate; returns it."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = torch.tensor(lr) if isinstance(group["lr"], Tensor) else lr  # torchao's compiled step wants a tensor
    return lr


def adamw(groups, lr: float, betas, eps: float, moments: str = "param", stochastic_rounding: bool = False):
    """torch's fused AdamW; or torchao's (arXiv:2110.02861), each of whose two moments takes 2 bytes per parameter (bfloat16), 1
    (8bit, fp8) or 1/2 (4bit), and which can round bf16 weights up or down by chance, so that small updates are not lost.

    torchao compiles a step per shape of parameter (seconds each on a CPU) and asks the device whether to skip.
    """
    if moments == "param" and not stochastic_rounding:
        return torch.optim.AdamW(groups, lr, betas, eps, fused=True)
    if any(isinstance(local_tensor(p), FakeTensor) for group in groups for p in group["params"]):
        raise ValueError("--adamw_moments and --stochastic_rounding are compiled, which a dry run cannot be; leave them out")
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it tells of kernels for other Pythons that it could not load
    from torchao import optim

    kinds = {"8bit": optim.AdamW8bit, "4bit": optim.AdamW4bit, "fp8": optim.AdamWFp8}

    class AdamW(kinds.get(moments, optim._AdamW)):
        found_inf, _step_supports_amp_scaling = None, True  # see guard.py

        def _new_buffer(self, p, signed):
            if moments == "bfloat16":
                return torch.zeros_like(p, dtype=torch.bfloat16)
            # .float(): codes that pass for bf16 do not compile
            return super()._new_buffer(p if moments == "param" else p.float(), signed)

        def step(self):
            if self.found_inf is None or not self.found_inf:
                with torch._functorch.config.patch(enable_autograd_cache=False):  # it would take 4bit's graph for 8bit's
                    super().step()

    return AdamW(groups, lr, betas, eps, bf16_stochastic_round=stochastic_rounding)


class Muon(torch.optim.Muon):
    """torch.optim.Muon for 2-D parameters, plain or sharded in any way; equal to it on one process.

    found_inf: 0-d tensor, 1.0 to let the next step change nothing; as in torch's fused optimizers.
    """

    found_inf, _step_supports_amp_scaling = None, True  # see guard.py

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            for p in params:  # momentum is elementwise: on the shards
                if p not in self.state or not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p.grad)
                buffer, grad = local_tensor(self.state[p]["momentum_buffer"]), local_tensor(p.grad)
                if self.found_inf is not None:  # gradient := momentum, which changes nothing in the next line
                    torch.where(self.found_inf.bool(), buffer, grad, out=grad)
                buffer.lerp_(grad, 1 - group["momentum"])
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
                local, moves = local_tensor(p), 1.0 if self.found_inf is None else 1.0 - self.found_inf
                local.mul_(1 - group["lr"] * group["weight_decay"] * moves)
                local.add_(part * moves, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], p.shape))
