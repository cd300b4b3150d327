"""An exponential moving average (EMA) of the weights: an optimizer that reads no gradient and
changes no weight.

The average is the optimizer's state, so the checkpoint saves it and reshards it for any layout, as
it does with moments.
"""

from contextlib import contextmanager

import torch

from distributed.layout import local_tensor


class Ema(torch.optim.Optimizer):
    """Averages all parameters, in fp32 and sharded as the parameters are: 4 bytes per weight. Call
    step() after the optimizers.

    At the k-th step: ema += max(1 - decay, 1 / k) (weight - ema). So the average is the plain mean
    of the first 1 / (1 - decay) steps, without a part of the initial weights. A skipped step
    counts: the weights are then averaged in once more.
    """

    def __init__(self, params, decay: float):
        # the rate is never read; a checkpoint sets it to create the state
        super().__init__(params, dict(lr=0.0))
        self.decay = decay

    @torch.no_grad()
    def step(self):
        for p in [p for group in self.param_groups for p in group["params"]]:
            state = self.state[p]
            if not state:
                state["ema"] = torch.zeros_like(p, dtype=torch.float32)
                # of each parameter, like AdamW's step
                state["ema_steps"] = torch.zeros((), device=local_tensor(p).device)
            state["ema_steps"] += 1
            share = (1 / state["ema_steps"]).clamp(min=1 - self.decay)
            local_tensor(state["ema"]).lerp_(local_tensor(p).float(), share)

    @contextmanager
    @torch.no_grad()
    def in_place_of_weights(self):
        """Holds the average in the parameters, for an evaluation; later the weights are back to the
        bit. Copies the weights."""
        kept = {p: local_tensor(p).clone() for p in self.state}
        for p, state in self.state.items():
            local_tensor(p).copy_(local_tensor(state["ema"]))
        try:
            yield
        finally:
            for p, weights in kept.items():
                local_tensor(p).copy_(weights)
