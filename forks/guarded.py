"""Two guards for a long run: skip the step of a spike in the gradient norm, and compute a gradient
twice to find a device that computes wrongly. docs/fork_me.md has the lines for a recipe."""

import math
import socket

import torch
import torch.distributed as dist

from distributed.checks import bits_sum
from training.optim import Guard

# norms to remember; fewest to judge by; standard deviations above their mean of a spike
WINDOW = 128
LEAST = 16
FAR = 6.0


class SpikeGuard(Guard):
    """Guard that also skips steps with a norm above mean + 6 std of the last 128 (as OLMo-core
    does), on the device like a NaN.

    Norms of skipped steps are not remembered. The window is in no checkpoint: a continued run
    begins to judge after 16 steps.
    """

    def __init__(self, optimizers, layout, start, *flags):
        super().__init__(optimizers, layout, start, *flags)
        self.recent = torch.full((WINDOW,), math.nan, device=layout.device)
        self.judged = {}

    def before_update(self, step, grad_norm):
        mean = self.recent.nanmean()
        limit = mean + FAR * (self.recent - mean).square().nanmean().sqrt()
        spike = (grad_norm > limit) & grad_norm.isfinite() & (self.recent.isfinite().sum() >= LEAST)
        self.judged[step] = torch.stack([spike.to(limit.dtype), grad_norm.to(limit.dtype), limit])
        remembered = grad_norm.isfinite() & ~spike
        self.recent[step % WINDOW] = torch.where(remembered, grad_norm, self.recent[step % WINDOW])
        super().before_update(step, grad_norm.where(~spike, math.inf))

    def report(self, step):
        judged = torch.stack([*self.judged.values()]).tolist()
        for skipped, (spike, norm, limit) in zip(self.judged, judged, strict=True):
            if spike:
                # reported here, and no reason to stop
                self.norms[skipped] = torch.zeros_like(self.norms[skipped])
                if self.layout.rank == 0:
                    print(
                        f"step {skipped}: the gradient norm is {norm:.4g}, above {limit:.4g}: a "
                        "spike; step skipped"
                    )
        self.judged.clear()
        super().report(step)


def replay(stages, batch, layout, loss, step: int, forward_backward):
    """Computes the step's gradients a second time, and returns the loss. Raises RuntimeError on all
    ranks if a bit differs on any rank: then a device, its memory or a link is broken, or, on GPUs
    without --deterministic, a kernel adds in any order. A model that counts in its forward, such as
    experts for their balance, would count twice."""
    params = {}
    for stage in stages:
        for fqn, p in stage.named_parameters():
            if p.grad is not None:
                params[fqn] = p
    first = [bits_sum(p.grad) for p in params.values()] + [bits_sum(loss)]
    for p in params.values():
        p.grad = None
    loss = forward_backward(stages, batch, layout)
    second = [bits_sum(p.grad) for p in params.values()] + [bits_sum(loss)]
    odd = []
    for name, a, b in zip([*params, "the loss"], first, second, strict=True):
        if a != b:
            odd.append(name)
    everyone = [None] * layout.world_size
    dist.all_gather_object(everyone, (socket.gethostname(), odd))
    wrong = []  # of each rank with a difference: how many names, rank, host, names
    for rank, (host, names) in enumerate(everyone):
        if names:
            wrong.append((len(names), rank, host, names))
    if wrong:
        _, rank, host, names = min(wrong)
        raise RuntimeError(
            f"step {step}, computed twice, differs on {len(wrong)} of {layout.world_size} ranks: "
            f"on rank {rank} "
            f"({host}) in the gradient of {names[0]} and {len(names) - 1} more; checkpoints are "
            "as before"
        )
    return loss
