"""LoRA: freeze the weights, and train two small matrices beside some linears (Hu et al.,
arXiv:2106.09685).

    y = W x + alpha / rank * B A x        W (out, in) frozen, A (rank, in) drawn, B (out, rank) starts at 0

An adapted linear keeps name, weight and place in the layout, and gets two children:
blocks.0.attn.wq.lora_a.weight and .lora_b.weight. Only the children have gradients and optimizer
state, and only the children are saved: a step folder holds adapters, and its state.json names the
frozen weights, the base.
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from distributed.linears import beside_weight, with_forward
from flags.config import Need, flag
from flags.files import step_folders
from storage.adapters import block_linears, lora_names, merged_weight

# Patterns for --exclude_from_loading that leave adapters alone
ADAPTERS = ("*.lora_a.weight", "*.lora_b.weight")
LORA = Need("without --lora_rank", lambda c: c.lora_rank)


@dataclass(kw_only=True)
class LoraConfig:
    # freeze all weights, and train two matrices of this rank beside some of them (LoRA); 0 = train
    # all
    lora_rank: int = 0
    lora_alpha: float = flag(32.0, LORA)  # adapters are scaled by lora_alpha / lora_rank
    # linears of the blocks that get adapters: names or patterns
    lora_on: list[str] = flag(["wq*", "w[kv]*", "wo"], LORA)
    # start from the adapters of this folder of peft, beside the weights of --init_from
    lora_from: str = flag("", LORA)


# ---------------------------------------------------------------- linears with adapters


def check_lora(model: nn.Module, cfg: LoraConfig) -> None:
    """Raises ValueError for a name in --lora_on that fits no linear of the full model's blocks."""
    if not cfg.lora_alpha > 0:
        raise ValueError(f"--lora_alpha {cfg.lora_alpha:g} must be above 0")
    wrong = [pattern for pattern in cfg.lora_on or [""] if not lora_names(model, [pattern])]
    if wrong:
        known = ",".join(dict.fromkeys(fqn.rpartition(".")[2] for fqn in block_linears(model)))
        raise ValueError(
            f"--lora_on {wrong[0]}: only linears of the blocks get adapters, which are {known}"
        )


# ---------------------------------------------------------------- the layer
def lora_linears(stage, cfg: LoraConfig) -> None:
    """Freeze the parameters of a stage, and put adapters beside the linears of --lora_on.

    After tensor_parallel, because an adapter is split like the weight beside it; and after
    expert_parallel, because the experts get new parameters there. With --tp adapters cost no
    further message but the sum of their own small gradients:

        weight          A           B           a rank adds to y
        rows            whole       rows        its rows of B times all of A x
        columns         columns     whole       B times its summand of A x; the reduce-scatter of y adds the summands
        whole           whole       whole       B A x for its own tokens
    """
    names = lora_names(stage, cfg.lora_on)
    stage.requires_grad_(False)
    add_adapters(stage, names, cfg.lora_rank, cfg.lora_alpha)
    if cfg.pp > 1 and stage.index == 0 and not names:
        # A pipeline sends gradients back to the first stage, so torch requires that the output of
        # this stage has a gradient. Without an adapter on the stage nothing else would give the
        # output a gradient.
        stage.tok_embeddings.register_forward_hook(
            lambda module, args, out: out.requires_grad_(torch.is_grad_enabled())
        )


def add_adapters(module, names: list[str], rank: int, alpha: float) -> None:
    """Put adapters beside the linears of these names: split like the weights, on the same device,
    without values."""
    for linear in map(module.get_submodule, names):
        weight = linear.weight
        linear.lora_a = nn.Linear(linear.in_features, rank, bias=False, device=weight.device)
        linear.lora_b = nn.Linear(rank, linear.out_features, bias=False, device=weight.device)
        if isinstance(weight, DTensor):
            (cut,) = weight.placements
            for adapter, dim in (linear.lora_a, 1), (linear.lora_b, 0):
                placement = Replicate()
                if cut.is_shard(dim):
                    placement = cut
                split = distribute_tensor(
                    adapter.weight, weight.device_mesh, [placement], src_data_rank=None
                )
                adapter.weight = nn.Parameter(split)
        # as wide as peft's kaiming_uniform_(a=sqrt(5))
        linear.lora_a.initial_std = 1 / math.sqrt(3 * linear.in_features)
        linear.lora_b.initial_std = 0.0  # new adapters change nothing
        linear.lora_scale = alpha / rank
        linear.__class__ = with_forward(type(linear), Adapted)


class Adapted(nn.Linear):
    """A linear with adapters. The forward is a method of a class, because with a function per
    module the compiler would compile each module anew."""

    def forward(self, x):
        y = super().forward(x)
        a = self.lora_a.weight
        b = self.lora_b.weight
        if not self.lora_scale:  # switched off: see base_model
            return y
        if not isinstance(a, DTensor):
            return y + F.linear(F.linear(x, a) * self.lora_scale, b)
        # Each tp rank multiplies its own parts. A whole A or B gets summands of its gradient: from
        # this rank's rows of B, from this rank's summand of A x, or from the rank's own tokens.
        # FSDP adds up the summands.
        cut = self.weight.placements[0]
        x_grad, out = beside_weight(x, self.weight)
        a_grad = Partial()
        b_grad = Partial()
        if cut.is_shard(1):
            a_grad = cut
        if cut.is_shard(0):
            b_grad = cut
        x = x.to_local(grad_placements=[x_grad])
        a = a.to_local(grad_placements=[a_grad])
        b = b.to_local(grad_placements=[b_grad])
        z = F.linear(F.linear(x, a) * self.lora_scale, b)
        return y + DTensor.from_local(z, y.device_mesh, [out], run_check=False)

    def merged(self, whole=lambda p: p):
        """W + s B A as one (out, in) matrix in fp32: see models.layers.weight_of. whole: gathers a
        parameter that tp or FSDP has split."""
        w, a, b = (whole(p) for p in (self.weight, self.lora_a.weight, self.lora_b.weight))
        assert not isinstance(w, DTensor), "a weight that tp has split"
        return merged_weight(w, a, b, self.lora_scale)


@contextmanager
def base_model(module) -> Iterator[None]:
    """Inside of the `with`, the adapters are switched off."""
    adapted = [linear for linear in module.modules() if isinstance(linear, Adapted)]
    scales = {linear: linear.lora_scale for linear in adapted}
    for linear in scales:
        linear.lora_scale = 0.0
    try:
        yield
    finally:
        for linear, scale in scales.items():
            linear.lora_scale = scale


# --------------------------------------------------------------- the identity of the frozen weights


# ---------------------------------------------------------------- costs
def lora_counts(model, cfg: LoraConfig) -> tuple[str, int]:
    """(text about LoRA for the start line, change of the FLOPs per token) of a full model, before
    tp or FSDP split the weights.

    PaLM's convention of 6 FLOPs per weight is 2 for the forward, 2 for the gradient of the input
    and 2 for the gradient of the weight; a frozen weight has no gradient.
    """
    n = 0
    kinds = Counter()
    for fqn in lora_names(model, cfg.lora_on):
        linear = model.get_submodule(fqn)
        n += cfg.lora_rank * (linear.in_features + linear.out_features)
        kinds[fqn.rpartition(".")[2]] += 1
    beside = ", ".join(f"{count} {name}" for name, count in kinds.items())
    text = f" + {n:,} in adapters beside {beside}, which alone are trained"
    return text, 6 * n - model.flops_per_token(0) // 3


# ---------------------------------------------------------------- files of adapters


def claim_adapters(cfg: Any, Model: type, model_config: Any) -> dict:
    """The identity of the adapters of a run with --lora_rank. Raises ValueError if --lora_on,
    --lora_alpha or the adapters of --lora_from do not fit; storage/resume.py checks the flags of
    --init_from. cfg: a recipe's Config."""
    with torch.device("meta"):
        model = Model(model_config)
    check_lora(model, cfg)
    if cfg.lora_from and not step_folders(cfg.out):  # a run that goes on has its own adapters
        from storage.peft import check_adapters

        check_adapters(
            cfg.lora_from, model, cfg.init_from, cfg.lora_rank, cfg.lora_alpha, cfg.lora_on
        )
    return {"rank": cfg.lora_rank, "alpha": cfg.lora_alpha, "on": list(cfg.lora_on)}
