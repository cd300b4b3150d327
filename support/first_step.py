"""What only the first step of a start shows: random numbers, and parameters that nobody trains."""
import math

import torch
import torch.distributed as dist
from torch import Tensor

from distributed.agree import some
from distributed.checks import DROPOUT, bits_sum
from distributed.layout import Layout, local_tensor


def random_state() -> list[Tensor]:
    """Of torch's own generators, which change with every number that is drawn without a generator."""
    return [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])


class FirstStep:
    """Raises ValueError when the first forward and backward have drawn random numbers. One line from rank 0 names the
    parameters that no gradient reaches, another those that have a gradient and were not moved.

        watch = FirstStep(layout, optimizers)      # ahead of the step
        watch = watch.look(grad_norm)              # ahead of its update
        watch = watch.look()                       # when the optimizers have stepped: None, all is said
    """

    def __init__(self, layout: Layout, optimizers):
        self.layout, self.optimizers, self.random = layout, optimizers, random_state()
        self.reached, self.unreached, self.waiting = [], [], None

    def look(self, grad_norm: Tensor | None = None):
        if self.waiting is None:
            self.before_update(grad_norm)
            return self
        self.after_update()

    def before_update(self, grad_norm: Tensor) -> None:
        drew = torch.tensor(int(not all(map(torch.equal, self.random, random_state()))))
        dist.all_reduce(drew)  # a dropout may be on one pipeline stage only, and the other ranks must not wait for it
        if drew and not self.layout.cfg.compile:  # a compiler that measures kernels on random inputs draws, too
            raise ValueError("forward or backward draws random numbers from torch's generator: they depend on the layout and "
                             f"on --ac, and a continued run draws others; {DROPOUT}")
        self.waiting = []
        start, self.layout.start = self.layout.start, []  # not longer than needed: it holds on to the parameters
        if self.layout.cfg.optimizer_in_backward or not math.isfinite(grad_norm):
            return  # the gradients are gone, or the step changes nothing
        self.reached, self.unreached = ([fqn for fqn, p, _ in start if (p.grad is None) == none] for none in (False, True))
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        lrs = {id(p): float(group["lr"]) for group in groups for p in group["params"]}
        for fqn, p, total in start:
            grad, weight = (0.0 if t is None or not local_tensor(t).numel() else local_tensor(t).detach().abs().max().item()
                            for t in (p.grad, p))
            # An update is about as large as lr. That one is lost in the rounding of the weights is nobody's mistake.
            if grad and lrs.get(id(p), math.inf) > 8 * torch.finfo(p.dtype).eps * weight:
                self.waiting.append((fqn, p, total))

    def after_update(self) -> None:
        still = [fqn for fqn, p, total in self.waiting if bits_sum(p) == total]
        everyone = [None] * self.layout.world_size
        dist.all_gather_object(everyone, (self.unreached, still, self.reached))
        if self.layout.rank > 0:
            return
        reached = {fqn for _, _, names in everyone for fqn in names}
        if names := sorted({fqn for part, _, _ in everyone for fqn in part} - reached):
            print(f"no gradient reaches {some(names)}: nothing trains what is not used in the loss")
        if still := {fqn: rank for rank, part in reversed([*enumerate(everyone)]) for fqn in part[1]}:
            print(f"the first step has not moved {some(sorted(still))} on rank {min(still.values())}, though there is a "
                  "gradient: is every parameter in an optimizer, and changed in place? (p.data = ... changes no shard)")
