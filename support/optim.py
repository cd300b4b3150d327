"""The learning rate of all groups, and AdamW: torch's, or torchao's with moments of few bits."""
import logging

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from distributed.layout import local_tensor


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
    """torch's fused AdamW. Or torchao's, compiled for each shape of a parameter: each of the two moments takes 1 byte per
    parameter (8bit, arXiv:2110.02861; fp8) or 1/2 (4bit), or bf16 weights are rounded up or down by chance."""
    if moments == "param" and not stochastic_rounding:
        return torch.optim.AdamW(groups, lr, betas, eps, fused=True)
    params = [local_tensor(p) for group in groups for p in group["params"]]
    if any(isinstance(p, FakeTensor) for p in params):
        raise ValueError("--adamw_moments and --stochastic_rounding are compiled, which a dry run cannot be; leave them out")
    if moments != "param" and params[0].dtype != torch.float32:
        raise ValueError(f"--adamw_moments {moments} needs fp32 weights: torchao compiles no other; leave out --param_dtype")
    logging.getLogger("torchao").setLevel(logging.ERROR)  # or torchao lists its kernels for other versions of Python
    from torch._functorch import config
    from torchao import optim

    # This cache on disk cannot tell kinds of moments apart, nor uneven shards: 4bit would get the code that 8bit has left.
    config.enable_autograd_cache = False
    kinds = {"param": optim._AdamW, "8bit": optim.AdamW8bit, "4bit": optim.AdamW4bit, "fp8": optim.AdamWFp8}
    return kinds[moments](groups, lr, betas, eps, bf16_stochastic_round=stochastic_rounding)
