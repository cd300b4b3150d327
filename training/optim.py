"""What a step of the optimizers stands on: the learning rate of all groups; AdamW, torch's, or
torchao's for bfloat16 weights; and a guard: a step with a NaN or infinite gradient changes nothing,
and the run stops or goes on without (--on_nan)."""

import logging
import math
import random
from collections.abc import Iterable
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from distributed.agree import brief, holds_on_any_rank
from distributed.checks import DROPOUT, bits_sum
from distributed.layout import Layout, local_tensor
from flags.config import check_range
from flags.files import step_folders

# a run may change between adamw and adamw_sr
Optimizer = Literal["adamw", "adamw_sr", "adamw_bf16_moments", "muon"]


def check_optimizer(cfg: Any) -> None:
    """Raise ValueError for numbers of the optimizer and its schedule that are out of range, and for
    an optimizer that needs parameters of another dtype."""
    check_range(cfg, 1, math.inf, "steps", "val_batches")
    check_range(cfg, 0, math.inf, "lr", "eps", "weight_decay", "max_norm")
    check_range(cfg, 0, 1, "beta1", "beta2", "min_lr_ratio", "decay_ratio")
    for name in ("lr", "eps", "weight_decay"):  # --max_norm inf never clips
        if getattr(cfg, name) == math.inf:
            raise ValueError(f"--{name} inf trains nothing: need a finite number, like 1e-3")
    if max(cfg.beta1, cfg.beta2) == 1:
        raise ValueError(
            f"--beta1 {cfg.beta1} and --beta2 {cfg.beta2} must be below 1: a mean that never moves"
        )
    if cfg.optimizer == "adamw_sr" and cfg.param_dtype != "bfloat16":
        raise ValueError(
            f"--optimizer adamw_sr needs --param_dtype bfloat16, not {cfg.param_dtype}"
        )
    if cfg.optimizer == "adamw_bf16_moments":
        if cfg.param_dtype != "float32":
            raise ValueError(
                f"--optimizer adamw_bf16_moments needs --param_dtype float32, not "
                f"{cfg.param_dtype}: moments of bfloat16 weights are bfloat16 with --optimizer adamw"
            )
        if max(cfg.beta1, cfg.beta2) > 0.99:
            raise ValueError(
                f"--optimizer adamw_bf16_moments needs --beta1 {cfg.beta1} and --beta2 {cfg.beta2} "
                "of at most 0.99: a mean in bfloat16, which has 8 bits, would stand still"
            )


def set_lr(optimizers: Iterable[torch.optim.Optimizer], lr: float) -> float:
    """Set the learning rate of all parameter groups, and return the rate. A group made with half of
    the optimizer's rate keeps half."""
    for optimizer in optimizers:
        usual = float(optimizer.defaults["lr"])
        for group in optimizer.param_groups:
            if "lr_share" not in group:
                group["lr_share"] = 1.0
                if usual:
                    group["lr_share"] = float(group["lr"]) / usual
            share = group["lr_share"]
            rate = lr * share
            if isinstance(group["lr"], Tensor):  # torchao's compiled step wants a tensor
                rate = torch.tensor(rate)
            group["lr"] = rate
    return lr


def adamw(
    groups: list[dict], lr: float, betas: tuple[float, float], eps: float, kind: str
) -> torch.optim.Optimizer:
    """torch's fused AdamW, also for the parameters beside Muon's or a fork's. adamw_sr: torchao's,
    compiled for each shape of a parameter; bfloat16 weights are rounded up or down by chance, so
    that small steps survive. adamw_bf16_moments: see training/bf16_moments.py."""
    if kind == "adamw_bf16_moments":
        from training.bf16_moments import AdamWBf16Moments

        return AdamWBf16Moments(groups, lr, betas, eps)
    if kind != "adamw_sr":
        return torch.optim.AdamW(groups, lr, betas, eps, fused=True)
    for group in groups:
        if any(isinstance(local_tensor(p), FakeTensor) for p in group["params"]):
            raise ValueError(
                "--optimizer adamw_sr is compiled, which a dry run cannot be; use adamw"
            )
    # or torchao lists its kernels for other versions of Python
    logging.getLogger("torchao").setLevel(logging.ERROR)
    from torch._functorch import config
    from torchao.optim import _AdamW

    config.enable_autograd_cache = False  # this cache on disk cannot tell uneven shards apart
    return _AdamW(groups, lr, betas, eps, bf16_stochastic_round=True)


# ---------------------------------------------------------------- steps that are not finite
class Guard:
    """Skip steps with a NaN gradient on the GPU, without waiting for the GPU between two log lines.
    The report comes with the next log line, and before anything reads the weights (validation,
    checkpoint). The first step of a start is looked at more
    closely: see look_at_gradients and look_at_weights.

        guard.before_update(step, grad_norm)  # before optimizer.step()
        guard.report(step)                    # raises RuntimeError for a skipped step, or with --on_nan skip prints a line
    """

    def __init__(
        self,
        optimizers,
        layout: Layout,
        start: list[tuple],
        out: str,
        on_nan: str,
        checkpoint_every: int,
        compile: bool,
    ):
        """start: of check_replicas. The last four are the flags of these names."""
        self.optimizers = optimizers
        self.layout = layout
        self.start = start
        self.out = out
        self.stops = on_nan == "stop"
        self.saves = bool(checkpoint_every)
        self.compile = compile
        self.random = random_state()
        self.norms: dict[int, Tensor] = {}  # step -> norm, of the steps since the last report
        self.found = None  # by look_at_gradients, for look_at_weights

    def before_update(self, step: int, grad_norm: Tensor) -> None:
        if self.found is None:
            self.found = self.look_at_gradients(grad_norm)
        elif self.start is not None:
            self.look_at_weights()
        self.norms[step] = grad_norm
        skip_if_not_finite(self.optimizers, grad_norm, on_host=self.layout.offload)

    def report(self, step: int) -> None:
        if self.start is not None:
            self.look_at_weights()
        # waits for the device, as log lines do anyway
        norms = torch.stack([*self.norms.values()]).tolist()
        steps = [*self.norms]
        self.norms.clear()
        for skipped, norm in zip(steps, norms, strict=True):
            if math.isfinite(norm):
                continue
            if self.stops:
                folders = step_folders(self.out)
                newest = folders[0][1] if folders else "none yet"
                raise RuntimeError(
                    f"step {skipped}: gradient norm {norm}, weights unchanged by it, noticed "
                    f"after step {step}; "
                    f"last checkpoint: {newest}"
                )
            if self.layout.rank == 0:
                print(f"step {skipped}: the gradient norm is {norm}; step skipped")

    # ------------------------------------------------ the first step of a start
    def look_at_gradients(self, grad_norm: Tensor) -> tuple[list, list, list]:
        """Raise ValueError if forward and backward have drawn random numbers. Returns names of
        parameters with and without a gradient, and (name, parameter, checksum) of those that the
        update must move."""
        # all ranks must agree: a dropout may be on one pipeline stage only
        drew = holds_on_any_rank(self.random != random_state(), dist.group.WORLD)
        # a compiler that measures kernels on random inputs draws, too
        if drew and not self.compile:
            raise ValueError(
                "forward or backward draws random numbers without a generator: they depend on the "
                "layout and "
                f"on --ac, and a continued run draws others; {DROPOUT}"
            )
        if not math.isfinite(grad_norm):
            return [], [], []  # the step changes nothing
        lrs = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                lrs |= dict.fromkeys(group["params"], float(group["lr"]))
        reached = []
        unreached = []
        moving = []
        for fqn, p, total in self.start:
            if p.grad is None:
                unreached.append(fqn)
                continue
            reached.append(fqn)
            # An update is about as large as lr. An update lost in the rounding of the weights is no
            # mistake of the model.
            rounding = 8 * torch.finfo(p.dtype).eps * largest(p)
            if largest(p.grad) and lrs.get(p, math.inf) > rounding:
                moving.append((fqn, p, total))
        return reached, unreached, moving

    def look_at_weights(self) -> None:
        """Let rank 0 name the parameters without a gradient, and the parameters with a gradient
        that did not move."""
        reached, unreached, moving = self.found
        plain = []
        if self.saves:
            plain = numbers_in_state(self.optimizers, self.start)
        self.start = None
        still = [fqn for fqn, p, total in moving if bits_sum(p) == total]
        drew = self.random != random_state()
        everyone = [None] * self.layout.world_size
        dist.all_gather_object(everyone, (reached, still, unreached, plain, drew))

        reached_anywhere = set()
        unreached_anywhere = set()
        first_rank = {}  # parameter that did not move -> the lowest such rank
        drew_anywhere = False
        for rank, (reached, still, unreached, plain, drew) in enumerate(everyone):
            if plain:
                raise ValueError(
                    f"{plain[0]}: no checkpoint holds it; make it a tensor, torch.tensor(0.0)"
                )
            reached_anywhere.update(reached)
            unreached_anywhere.update(unreached)
            for fqn in still:
                first_rank.setdefault(fqn, rank)
            drew_anywhere = drew_anywhere or drew

        # adamw_sr, by chance
        rounds = any("torchao" in type(optimizer).__module__ for optimizer in self.optimizers)
        if drew_anywhere and not rounds and not self.compile:
            raise ValueError(
                "numbers are drawn between the gradients and the end of the optimizer's step: a "
                "continued run "
                "draws others; see 'Random numbers' in docs/fork_me.md"
            )
        if self.layout.rank > 0:
            return
        # a parameter may have a gradient on one rank and none on another
        unused = sorted(unreached_anywhere - reached_anywhere)
        if unused:
            print(
                f"no gradient reaches {brief(unused)}: nothing trains what is not used in the loss"
            )
        if first_rank:
            print(
                f"the first step has not moved {brief(sorted(first_rank))} on rank "
                f"{min(first_rank.values())}, though there is a "
                "gradient: is every parameter in an optimizer, and changed in place? (p.data = "
                "... changes no shard)"
            )


def largest(tensor: Tensor) -> float:
    """The largest absolute number of this rank's part; 0.0 for an empty part."""
    part = local_tensor(tensor).detach()
    if part.numel() == 0:
        return 0.0
    return part.abs().max().item()


def numbers_in_state(
    optimizers: Iterable[torch.optim.Optimizer], trained: list[tuple]
) -> list[str]:
    """Sentences on numbers in the optimizers' state that are no tensors. trained: (fqn, parameter,
    checksum) of the parameters."""
    found = []
    for fqn, p, _ in trained:
        for optimizer in optimizers:
            for name, x in optimizer.state.get(p, {}).items():
                if not isinstance(x, Tensor):
                    kind = type(x).__name__
                    found.append(f"state {name} of {fqn} in {type(optimizer).__name__} is a {kind}")
    return found


def skip_if_not_finite(optimizers, grad_norm: Tensor, on_host: bool = False) -> None:
    """Let the next step() of each optimizer change neither weights nor moments if the norm is not
    finite.

    torch's fused optimizers and Muon read `found_inf`, the protocol of torch.amp.GradScaler
    (_step_supports_amp_scaling): the device decides, and the host does not wait. For other
    optimizers the host waits once per step, and removes the gradients, because parameters without a
    gradient stay. The host also decides for an optimizer without state: torch's fused SGD fills the
    momentum only in a step that is not skipped.

    on_host: the parameters are in host memory (--cpu_offload).
    """
    found_inf = (~grad_norm.isfinite()).float()
    for optimizer in optimizers:
        if getattr(optimizer, "_step_supports_amp_scaling", False) and optimizer.state:
            optimizer.found_inf = found_inf.cpu() if on_host else found_inf
        elif found_inf:
            optimizer.zero_grad(set_to_none=True)


def random_state() -> list:
    """State of the global generators of torch, Python and NumPy: every number drawn without a
    generator changes one."""
    states = [torch.get_rng_state().tolist()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state().tolist())
    return [*states, random.getstate(), str(np.random.get_state())]
