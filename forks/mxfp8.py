"""Matmuls in MXFP8, by torchao: codes of 8 bits with a power of two for each 32 numbers (OCP
Microscaling Formats v1.0). docs/fork_me.md has the line for a recipe.

All three products of a training step are multiplied so: the output, the gradient of the input and
that of the weight. On a CPU they are emulated: made into codes, read back, and multiplied in the
compute dtype. torchao's part is a prototype, and no GPU has run this fork.
"""

import logging
from typing import Any

import torch
from torch import nn

from distributed.float8_linears import Float8Linear, float8_names, sides_on_a_rank
from distributed.layout import Layout
from distributed.linears import with_forward

# numbers that share a scale
BLOCK = 32


def mxfp8_linears(stage: nn.Module, layout: Layout, cfg) -> None:
    """In place of distributed.float8.float8_linears: any value of --float8 but `off` is MXFP8."""
    check_mxfp8(layout, cfg)
    # torchao warns of kernels for other versions of Python
    logging.getLogger("torchao").setLevel(logging.ERROR)
    from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    kernel = KernelPreference.AUTO
    if layout.device.type == "cpu":
        kernel = KernelPreference.EMULATED
    rounding = ScaleCalculationMode.RCEIL

    def multiply(x, weight):  # (..., in), (out, in) -> (..., out)
        return _to_mxfp8_then_scaled_mm(x, weight, kernel, rounding)

    for name in float8_names(stage, layout, cfg):
        module: Any = stage.get_submodule(name)
        sides = sides_on_a_rank(stage, name, module, layout.tp)
        if any(side % BLOCK for side in sides):
            raise ValueError(
                f"MXFP8 needs sides of a multiple of {BLOCK} on a rank, and {name} has {sides[0]} "
                f"x {sides[1]}; leave it alone: --float8_filter {name.split('.')[-1]}"
            )
        module.multiply = multiply
        module.__class__ = with_forward(type(module), Float8Linear)


def check_mxfp8(layout: Layout, cfg) -> None:
    """Raise ValueError for a GPU without such products, and for what the blocks do not allow."""
    if layout.device.type == "cuda":
        capability = torch.cuda.get_device_capability(layout.device)
        if capability < (10, 0):
            raise ValueError(
                "MXFP8 needs a GPU of capability 10.0 (B200, GB200), and this one has "
                f"{capability[0]}.{capability[1]}; use --float8 off, or the original recipe"
            )
    if cfg.float8_all_gather:
        raise ValueError("MXFP8 has no --float8_all_gather; leave it out")
    # the gradient of a weight is a sum over tokens, in blocks as well
    sequences = layout.local_batch_size
    if layout.pp > 1:
        sequences = layout.microbatch_size
    tokens = sequences * cfg.seq_len // (layout.cp * layout.tp)
    if tokens % BLOCK:
        raise ValueError(
            f"MXFP8 needs a multiple of {BLOCK} tokens in a forward of a rank, not {tokens}; use "
            "another --seq_len"
        )
