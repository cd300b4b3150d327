"""AdamW whose moments are bfloat16 beside weights in fp32: half of AdamW's memory. DeepSeek-V3 was
trained so (arXiv:2412.19437, section 3.3.3)."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from distributed.layout import local_tensor

# numbers whose moments are in fp32 at a time: 128 MiB
AT_ONCE = 1 << 24


class AdamWBf16Moments(torch.optim.AdamW):
    """torch's fused AdamW: each step computes in fp32, and rounds the moments to bfloat16 to keep
    them. The state has the names of torch.optim.AdamW. checkpoint.py keeps its dtype; torch's own
    load_state_dict() would make fp32 of it, the dtype of the weights.

    bfloat16 has 8 bits, so a moment that moves by less than 1/256 of itself in a step stands still:
    see check_optimizer for --beta2.
    """

    # a tensor, 1.0 to let the next step change nothing: training.optim.skip_if_not_finite
    found_inf: torch.Tensor | None = None

    def __init__(self, groups, lr: float, betas, eps: float):
        super().__init__(groups, lr, betas, eps, fused=True)
        self.defaults["moment_dtype"] = torch.bfloat16  # for the size of a checkpoint

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for params in some_at_a_time(group["params"]):
                self.update(params, group)

    def update(self, params, group):
        kept = []  # moments as they are between two steps
        for p in params:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros((), device=p.device)
                state["exp_avg"] = torch.zeros_like(p, dtype=torch.bfloat16)
                state["exp_avg_sq"] = torch.zeros_like(p, dtype=torch.bfloat16)
            kept.append(local_tensor(state["exp_avg"]))
            kept.append(local_tensor(state["exp_avg_sq"]))
        moments = [moment.float() for moment in kept]
        fused_step(self, params, moments[0::2], moments[1::2], group)
        torch._foreach_copy_(kept, moments)  # rounds to nearest


def some_at_a_time(params: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """The parameters with a gradient, in lists of about AT_ONCE numbers on this rank."""
    some = []
    numbers = 0
    for p in params:
        if p.grad is None:
            continue
        some.append(p)
        numbers += local_tensor(p).numel()
        if numbers >= AT_ONCE:
            yield some
            some = []
            numbers = 0
    if some:
        yield some


def fused_step(
    optimizer: Any, params: list, means: list[Tensor], squares: list[Tensor], group: dict
) -> None:
    """torch's fused AdamW on this rank's parts of the parameters. means, squares: their moments in
    fp32, updated in place."""
    beta1, beta2 = group["betas"]
    adamw(
        [local_tensor(p) for p in params],
        [local_tensor(p.grad) for p in params],
        means,
        squares,
        [],
        [optimizer.state[p]["step"] for p in params],
        fused=True,
        grad_scale=None,
        found_inf=optimizer.found_inf,
        amsgrad=False,
        beta1=beta1,
        beta2=beta2,
        lr=group["lr"],
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=False,
    )
