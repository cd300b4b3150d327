"""The learning rate of all groups, and AdamW: torch's, or torchao's with moments of few bits."""
import logging
import math
from typing import Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from distributed.layout import local_tensor
from support.config import check_range

# The names of --optimizer. A run may be continued with another kind of AdamW: its checkpoints hold the moments in fp32.
Optimizer = Literal["adamw", "adamw_8bit", "adamw_4bit", "adamw_fp8", "adamw_sr", "muon"]

def check_optimizer(cfg) -> None:
    """Raise ValueError for numbers of the optimizer and its schedule that are out of range, and for an optimizer that needs
    parameters of another dtype: torchao compiles small moments for fp32 only."""
    check_range(cfg, 1, math.inf, "steps", "val_batches")
    check_range(cfg, 0, math.inf, "lr", "eps", "weight_decay", "max_norm")
    check_range(cfg, 0, 1, "beta1", "beta2", "min_lr_ratio", "decay_ratio")
    if max(cfg.beta1, cfg.beta2) == 1:
        raise ValueError(f"--beta1 {cfg.beta1} and --beta2 {cfg.beta2} must be below 1: a mean that never moves")
    needs = {"adamw_8bit": "float32", "adamw_4bit": "float32", "adamw_fp8": "float32", "adamw_sr": "bfloat16"}
    if (wanted := needs.get(cfg.optimizer, cfg.param_dtype)) != cfg.param_dtype:
        raise ValueError(f"--optimizer {cfg.optimizer} needs --param_dtype {wanted}, not {cfg.param_dtype}")


def set_lr(optimizers, lr: float) -> float:
    """Set the learning rate of all parameter groups, and return the rate. A group made with half of the optimizer's rate keeps
    half."""
    for optimizer, group in ((o, group) for o in optimizers for group in o.param_groups):
        usual = float(optimizer.defaults["lr"])
        share = group.setdefault("lr_share", float(group["lr"]) / usual if usual else 1.0)
        # torchao's compiled step wants a tensor
        group["lr"] = torch.tensor(lr * share) if isinstance(group["lr"], Tensor) else lr * share
    return lr


def adamw(groups, lr: float, betas, eps: float, kind: str):
    """torch's fused AdamW, also for the parameters beside Muon's or a fork's. Or torchao's, compiled for each shape of a
    parameter: adamw_8bit (arXiv:2110.02861) and adamw_fp8 keep each of the two moments in 1 byte per parameter, adamw_4bit in
    1/2; adamw_sr rounds bfloat16 weights up or down by chance, so that small steps survive."""
    if kind not in ("adamw_8bit", "adamw_4bit", "adamw_fp8", "adamw_sr"):
        return torch.optim.AdamW(groups, lr, betas, eps, fused=True)
    params = [local_tensor(p) for group in groups for p in group["params"]]
    if any(isinstance(p, FakeTensor) for p in params):
        raise ValueError(f"--optimizer {kind} is compiled, which a dry run cannot be; use adamw")
    logging.getLogger("torchao").setLevel(logging.ERROR)  # or torchao lists its kernels for other versions of Python
    from torch._functorch import config
    from torchao import optim

    # This cache on disk cannot tell kinds of moments apart, nor uneven shards: 4bit would get the code that 8bit has left.
    config.enable_autograd_cache = False
    small = {"adamw_8bit": optim.AdamW8bit, "adamw_4bit": optim.AdamW4bit, "adamw_fp8": optim.AdamWFp8}
    return small.get(kind, optim._AdamW)(groups, lr, betas, eps, bf16_stochastic_round=kind == "adamw_sr")
