"""AdamW with moments of fewer bits, and Muon for sharded matrices: torch.optim.Muon with the work shared between the ranks.

Muon (Keller Jordan, 2024) makes the singular values of each matrix's momentum equal with five Newton-Schulz steps, 15 matrix
products. torch's own, given FSDP's DTensors, communicates in every one of them. Here each matrix is gathered once, one rank
does its 15 products, and the results are exchanged: as many bytes as one FSDP forward, and 1/ranks of the arithmetic. Stacks
of experts, which torch's refuses, are in support/stacks.py.
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
from support.stacks import orthogonal_parts


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
    """Give all parameter groups this learning rate; returns it. A group that was made with a rate of its own keeps its share:
    half of the optimizer's then is half of it now."""
    for optimizer, group in ((o, group) for o in optimizers for group in o.param_groups):
        usual = float(optimizer.defaults["lr"])
        share = group.setdefault("lr_share", float(group["lr"]) / usual if usual else 1.0)
        # torchao's compiled step wants a tensor
        group["lr"] = torch.tensor(lr * share) if isinstance(group["lr"], Tensor) else lr * share
    return lr


def adamw(groups, lr: float, betas, eps: float, moments: str = "param", stochastic_rounding: bool = False):
    """torch's fused AdamW; or torchao's (arXiv:2110.02861), each of whose two moments takes 2 bytes per parameter (bfloat16), 1
    (8bit, fp8) or 1/2 (4bit), and which can round bf16 weights up or down by chance, so that small updates are not lost.

    torchao compiles a step per shape of parameter (seconds each on a CPU).
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

        @torch.no_grad()
        def step(self):
            """As torchao's step, but that found_inf is read on the device."""
            compiled = torch.compile(step_unless, fullgraph=True, dynamic=False)
            # the first: it would take 4bit's graph for 8bit's; the second: the number of shapes is fixed
            with torch._functorch.config.patch(enable_autograd_cache=False), torch._dynamo.utils.disable_cache_limit():
                for p, group in [(p, g) for g in self.param_groups for p in g["params"] if p.grad is not None]:
                    state, rounds = self.state[p], self.bf16_stochastic_round and p.dtype == torch.bfloat16
                    if not state:
                        state["step"] = torch.zeros((), device=local_tensor(p).device)
                        state["exp_avg"], state["exp_avg_sq"] = self._new_buffer(p, True), self._new_buffer(p, False)
                    found_inf = torch.zeros_like(state["step"]) if self.found_inf is None else self.found_inf
                    tensors = (local_tensor(x.detach()) for x in (p, p.grad, state["exp_avg"], state["exp_avg_sq"]))
                    options = (group["lr"], *group["betas"], group["weight_decay"], group["eps"], True, rounds)
                    compiled(found_inf, state["step"], *tensors, *options)

    for kind in (optim.subclass_8bit.OptimState8bit, optim.subclass_4bit.OptimState4bit, optim.subclass_fp8.OptimStateFp8):
        kind.implements([torch.ops.aten.clone.default, torch.ops.aten.where.self])(on_codes)
    return AdamW(groups, lr, betas, eps, bf16_stochastic_round=stochastic_rounding)


def step_unless(found_inf, step, p, grad, exp_avg, exp_avg_sq, *options):
    """torchao's step of one parameter; nothing changes if found_inf is 1. Compiled, the copies are never made."""
    from torchao.optim.adam import single_param_adam

    old = (step, p, exp_avg, exp_avg_sq)
    new = [x.clone() for x in old]
    new[0] += 1
    single_param_adam(new[1], grad, new[0], new[2], new[3], None, *options)
    for x, y in zip(old, new, strict=True):
        x.copy_(torch.where(found_inf.bool(), x, y))


def on_codes(op, types, args, kwargs):
    """clone and where for torchao's moments: on their codes and scales."""
    like = next(x for x in args if hasattr(x, "codes"))
    names, rest = like.__tensor_flatten__()
    # the compiler has no where for float8: as bytes
    part = lambda x, name: getattr(x, name).view(torch.uint8) if name == "codes" else getattr(x, name)  # noqa: E731
    parts = {name: op(*(part(x, name) if hasattr(x, name) else x for x in args), **kwargs) for name in names}
    return like.__tensor_unflatten__(parts | {"codes": parts["codes"].view(like.codes.dtype)}, rest)


class Muon(torch.optim.Muon):
    """torch.optim.Muon for 2-D parameters, plain or sharded in any way; equal to it on one process. A 3-D parameter is a stack
    of matrices (E, out, in), each of which is treated as if it were a parameter of its own.

    found_inf: 0-d tensor, 1.0 to let the next step change nothing; as in torch's fused optimizers.
    """

    found_inf, _step_supports_amp_scaling = None, True  # see guard.py

    def __init__(self, params, *args, **options):
        defaults = torch.optim.Muon([torch.zeros(1, 1)], *args, **options).defaults  # checks them; it refuses 3-D parameters
        torch.optim.Optimizer.__init__(self, params, defaults)

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
                same_shape = list(same_shape)
                if same_shape[0].dim() == 3:
                    self.step_stacks(same_shape, group)
                else:
                    self.step_same_shape(same_shape, group)

    def step_stacks(self, params, group):
        def update(p, begin, end):
            """Of some experts of this rank, in bf16."""
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
                self.move(local_tensor(p), part, p.shape, group)

    def move(self, local, part, shape, group):
        """shape: of the whole matrix, which decides how far it moves."""
        moves = 1.0 if self.found_inf is None else 1.0 - self.found_inf
        local.mul_(1 - group["lr"] * group["weight_decay"] * moves)
        local.add_(part * moves, alpha=-_adjust_lr(group["lr"], group["adjust_lr_fn"], shape))
