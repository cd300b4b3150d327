"""A step whose gradient is not finite changes nothing, and the user is told: stop there, or go on without it (--on_nan)."""
import math

import torch
from torch import Tensor

from distributed.layout import Layout
from support.first_step import FirstStep
from support.manifest import step_folders


class Guard:
    """Nothing waits for the GPU between two log lines. A step with a NaN gradient is skipped on the GPU; the next log line, and
    whatever else reads the weights (validation, checkpoint), tells first.

        guard.before_update(step, grad_norm)  # ahead of optimizer.step()
        guard.report(step)                    # raises RuntimeError for such a step, or with --on_nan skip prints a line
    """

    def __init__(self, optimizers, layout: Layout, on_nan: str, out: str):
        self.optimizers, self.layout, self.on_nan, self.out = optimizers, layout, on_nan, out
        self.norms: dict[int, Tensor] = {}  # step -> norm, of the steps that nobody has been told about
        self.first_step = FirstStep(layout, optimizers)

    def before_update(self, step: int, grad_norm: Tensor) -> None:
        self.first_step = self.first_step and self.first_step.look(grad_norm)
        self.norms[step] = grad_norm
        if not self.layout.cfg.optimizer_in_backward:  # there the weights have moved already
            skip_if_not_finite(self.optimizers, grad_norm, on_host=self.layout.cfg.cpu_offload)

    def report(self, step: int) -> None:
        self.first_step = self.first_step and self.first_step.look()
        for bad, norm in take_not_finite(self.norms):
            if self.on_nan == "stop":
                good = next((path for _, path in step_folders(self.out)), "none yet")
                weights = "the weights have seen it" if self.layout.cfg.optimizer_in_backward else "weights unchanged by it"
                raise RuntimeError(f"step {bad}: gradient norm {norm}, {weights}, noticed after step {step}; last "
                                   f"checkpoint: {good}")
            if self.layout.rank == 0:
                print(f"step {bad}: the gradient norm is {norm}; step skipped")


def skip_if_not_finite(optimizers, grad_norm: Tensor, on_host: bool = False) -> None:
    """The next step() of each optimizer changes neither weights nor moments if the norm is not finite.

    torch's fused optimizers, and those of optim.py, announce with _step_supports_amp_scaling that they read `found_inf`, as
    torch.amp.GradScaler tells them: it is decided on the device, and the host does not wait. For any other optimizer the host
    asks, one wait per step, and takes the gradients away: a parameter without a gradient is left alone. The same for an
    optimizer without state yet, because torch's fused SGD fills its momentum only in a step that is not skipped.

    on_host: the parameters are in host memory (--cpu_offload).
    """
    found_inf = (~grad_norm.isfinite()).float()
    for optimizer in optimizers:
        if getattr(optimizer, "_step_supports_amp_scaling", False) and optimizer.state:
            optimizer.found_inf = found_inf.cpu() if on_host else found_inf
        elif found_inf:
            optimizer.zero_grad(set_to_none=True)


def take_not_finite(norms: dict[int, Tensor]) -> list[tuple[int, float]]:
    """(step, gradient norm) of the steps that were skipped; empties norms. Waits for the device, as log lines do anyway."""
    values = dict(zip(norms, torch.stack([*norms.values()]).tolist(), strict=True))
    norms.clear()
    return [(step, norm) for step, norm in values.items() if not math.isfinite(norm)]
