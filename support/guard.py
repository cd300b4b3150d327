"""A step with a NaN or infinite gradient changes nothing; the run then stops, or goes on without the step (--on_nan)."""
import math
import random

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distributed.agree import brief
from distributed.checks import DROPOUT, bits_sum
from distributed.layout import Layout, local_tensor
from support.files import step_folders


class Guard:
    """Skip steps with a NaN gradient on the GPU, without waiting for the GPU between two log lines. The report comes with the
    next log line, and before anything reads the weights (validation, checkpoint).

        guard.before_update(step, grad_norm)  # before optimizer.step()
        guard.report(step)                    # raises RuntimeError for a skipped step, or with --on_nan skip prints a line
    """

    def __init__(self, optimizers, layout: Layout, cfg, start: list[tuple]):
        """cfg: on_nan, out, compile. start: of check_replicas."""
        self.optimizers, self.layout, self.on_nan, self.out = optimizers, layout, cfg.on_nan, cfg.out
        self.norms: dict[int, Tensor] = {}  # step -> norm, of the steps since the last report
        self.first_step = FirstStep(layout, optimizers, start, cfg.compile)

    def before_update(self, step: int, grad_norm: Tensor) -> None:
        self.first_step = self.first_step and self.first_step.look(grad_norm)
        self.norms[step] = grad_norm
        skip_if_not_finite(self.optimizers, grad_norm, on_host=self.layout.offload)

    def report(self, step: int) -> None:
        self.first_step = self.first_step and self.first_step.look()
        for bad, norm in take_not_finite(self.norms):
            if self.on_nan == "stop":
                good = next((path for _, path in step_folders(self.out)), "none yet")
                raise RuntimeError(f"step {bad}: gradient norm {norm}, weights unchanged by it, noticed after step {step}; "
                                   f"last checkpoint: {good}")
            if self.layout.rank == 0:
                print(f"step {bad}: the gradient norm is {norm}; step skipped")


def skip_if_not_finite(optimizers, grad_norm: Tensor, on_host: bool = False) -> None:
    """Let the next step() of each optimizer change neither weights nor moments if the norm is not finite.

    torch's fused optimizers and Muon read `found_inf`, the protocol of torch.amp.GradScaler (_step_supports_amp_scaling): the
    device decides, and the host does not wait. For other optimizers the host waits once per step, and removes the gradients,
    because parameters without a gradient stay. The host also decides for an optimizer without state: torch's fused SGD
    fills the momentum only in a step that is not skipped.

    on_host: the parameters are in host memory (--cpu_offload).
    """
    found_inf = (~grad_norm.isfinite()).float()
    for optimizer in optimizers:
        if getattr(optimizer, "_step_supports_amp_scaling", False) and optimizer.state:
            optimizer.found_inf = found_inf.cpu() if on_host else found_inf
        elif found_inf:
            optimizer.zero_grad(set_to_none=True)


def take_not_finite(norms: dict[int, Tensor]) -> list[tuple[int, float]]:
    """(step, gradient norm) of the skipped steps; empties norms. Waits for the device, as log lines do anyway."""
    values = dict(zip(norms, torch.stack([*norms.values()]).tolist(), strict=True))
    norms.clear()
    return [(step, norm) for step, norm in values.items() if not math.isfinite(norm)]


# ---------------------------------------------------------------- checks of the first step of a start
def random_state() -> list:
    """State of the global generators of torch, Python and NumPy: every number drawn without a generator changes one."""
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else [])
    return [*(state.tolist() for state in states), random.getstate(), str(np.random.get_state())]


class FirstStep:
    """Raises ValueError when the first forward and backward have drawn random numbers. One line from rank 0 names the
    parameters without a gradient, another line the parameters with a gradient that did not move.

        watch = FirstStep(layout, optimizers, start, compiles)  # before the step
        watch = watch.look(grad_norm)              # before the optimizers step
        watch = watch.look()                       # after the optimizers have stepped: None, the check is over
    """

    def __init__(self, layout: Layout, optimizers, start: list[tuple], compiles: bool):
        self.layout, self.optimizers, self.random = layout, optimizers, random_state()
        self.start, self.compiles = start, compiles
        self.reached, self.unreached, self.waiting = [], [], None

    def look(self, grad_norm: Tensor | None = None):
        if self.waiting is None:
            self.before_update(grad_norm)
            return self
        self.after_update()

    def before_update(self, grad_norm: Tensor) -> None:
        drew = torch.tensor(int(self.random != random_state()))
        dist.all_reduce(drew)  # all ranks must agree: a dropout may be on one pipeline stage only
        if drew and not self.compiles:  # a compiler that measures kernels on random inputs draws, too
            raise ValueError("forward or backward draws random numbers without a generator: they depend on the layout and "
                             f"on --ac, and a continued run draws others; {DROPOUT}")
        self.waiting = []
        if not math.isfinite(grad_norm):
            return  # the step changes nothing
        self.reached, self.unreached = ([fqn for fqn, p, _ in self.start if (p.grad is None) == none] for none in (False, True))
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        lrs = {id(p): float(group["lr"]) for group in groups for p in group["params"]}
        for fqn, p, total in self.start:
            grad, weight = (0.0 if t is None or not local_tensor(t).numel() else local_tensor(t).detach().abs().max().item()
                            for t in (p.grad, p))
            # An update is about as large as lr. An update lost in the rounding of the weights is no mistake of the model.
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
            print(f"no gradient reaches {brief(names)}: nothing trains what is not used in the loss")
        if still := {fqn: rank for rank, part in reversed([*enumerate(everyone)]) for fqn in part[1]}:
            print(f"the first step has not moved {brief(sorted(still))} on rank {min(still.values())}, though there is a "
                  "gradient: is every parameter in an optimizer, and changed in place? (p.data = ... changes no shard)")
