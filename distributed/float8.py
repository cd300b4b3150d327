"""Matmuls in 8 bits, by torchao: the flags, and what a recipe calls. Only runs with --float8 load
float8_linears.py."""

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from distributed.layout import Layout
from flags.config import GPU, Need, flag

FLOAT8 = Need("without --float8", lambda c: c.float8 != "off")
FLOAT8_TENSORWISE = Need("without --float8 tensorwise", lambda c: c.float8 == "tensorwise")
# the recipes of torchao.float8
Recipe = Literal["off", "tensorwise", "rowwise", "rowwise_with_gw_hp"]
GATHERED = Need("in one process: nothing is gathered", lambda c: c.world_size > 1)


@dataclass(kw_only=True)
class Float8Config:
    # of the blocks' matmuls, by torchao; the stacked experts stay as they are
    float8: Recipe = "off"
    # linears to leave alone: parts of names, like attn.wk,ffn.w2
    float8_filter: list[str] = flag([], FLOAT8)
    # FSDP gathers weights in float8, half the bytes
    float8_all_gather: bool = flag(False, FLOAT8_TENSORWISE, GPU, GATHERED)


def float8_linears(stage, layout: Layout, cfg: Float8Config) -> None:
    """Let the blocks' linears multiply in float8, with scales from each call's own numbers:
    torchao.float8. Parameters, their names and the optimizer stay as they are.

    Left in the compute dtype: the head, the router, the stacked experts, and a matrix with a
    dimension on this rank that is no multiple of 16.
    """
    # torchao warns of kernels for other versions of Python
    logging.getLogger("torchao").setLevel(logging.ERROR)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    # only --float8 needs these files
    from distributed.float8_linears import Float8Linear, float8_names
    from distributed.linears import with_forward

    names = float8_names(stage, layout, cfg)
    config = Float8LinearConfig.from_recipe_name(cfg.float8)
    emulate = layout.device.type == "cpu"
    config = dataclasses.replace(
        config, emulate=emulate, enable_fsdp_float8_all_gather=cfg.float8_all_gather
    )
    convert_to_float8_training(
        stage, config=config, module_filter_fn=lambda module, fqn: fqn in names
    )
    kernels = stage.get_submodule(names[0]).linear_mm_config

    def multiply(x, weight):  # (..., in), (out, in) -> (..., out)
        return matmul_with_hp_or_float8_args.apply(x, weight.t(), kernels, config)

    for module in map(stage.get_submodule, names):
        module.multiply = multiply
        module.__class__ = with_forward(type(module), Float8Linear)


def float8_scales(stages: Sequence[nn.Module]) -> None:
    """--float8_all_gather, after an optimizer step: find the scales of all weights with one
    all-reduce. FSDP alone would send
    an all-reduce per weight, just before gathering the weight in float8."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    for stage in stages:
        precompute_float8_dynamic_scale_for_fsdp(stage)
