"""Matmuls in 8 and 4 bits, by torchao."""
import dataclasses
import logging
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import nn

from distributed.layout import EXPERTS, Layout, all_blocks
from support.config import GPU, Need, flag

FLOAT8 = Need("without --float8", lambda c: c.float8 != "off")
FLOAT8_TENSORWISE = Need("without --float8 tensorwise", lambda c: c.float8 == "tensorwise")
FLOAT8_EXPERTS = Need("without --float8 rowwise or mxfp8", lambda c: c.float8 in ("rowwise", "mxfp8"))
GATHERED = Need("in one process: nothing is gathered", lambda c: c.world_size > 1)


@dataclass(kw_only=True)
class Float8Config:
    float8: Literal["off", "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "nvfp4"] = "off"  # blocks' matmuls (torchao)
    float8_experts: bool = flag(False, FLOAT8_EXPERTS, EXPERTS)  # the experts' grouped matmuls as well
    float8_filter: list[str] = flag([], FLOAT8)  # linears to leave alone: parts of names, like attn.wk,ffn.w2
    float8_all_gather: bool = flag(False, FLOAT8_TENSORWISE, GPU, GATHERED)  # FSDP gathers weights in float8, half the bytes


def float8_linears(stage, layout: Layout) -> None:
    """Let the blocks' linears multiply in float8, with scales from each call's own numbers: torchao.float8. Parameters, their
    names and the optimizer stay as they are.

    Left in the compute dtype: the head, the router, the stacked experts (unless --float8_experts), and a matrix with a
    dimension on this rank that is no multiple of 16 (mxfp8: 32, nvfp4: 128).
    """
    cfg = layout.cfg
    if cfg.float8 == "off":
        return
    logging.getLogger("torchao").setLevel(logging.ERROR)  # it warns of kernels that are for other versions of Python
    block = {"mxfp8": 32, "nvfp4": 128}.get(cfg.float8, 16)

    def wanted(module, fqn):
        sizes = [n // layout.tp if n % layout.tp == 0 else n for n in module.weight.shape]
        in_block = fqn.startswith(("blocks.", "mtp."))
        return in_block and all(n % block == 0 for n in sizes) and not any(part in fqn for part in cfg.float8_filter)

    if block > 16:
        multiply = mxfp8_matmul(layout) if cfg.float8 == "mxfp8" else nvfp4_matmul()
        for fqn, module in stage.named_modules():
            if isinstance(module, nn.Linear) and wanted(module, fqn):
                module.forward = partial(lambda module, x: multiply(x, module.weight), module)
    else:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        config = Float8LinearConfig.from_recipe_name(cfg.float8)
        emulate = layout.device.type == "cpu"
        config = dataclasses.replace(config, emulate=emulate, enable_fsdp_float8_all_gather=cfg.float8_all_gather)
        convert_to_float8_training(stage, config=config, module_filter_fn=wanted)
    if cfg.float8_experts:
        from models.moe import swiglu_experts

        for block in all_blocks(stage).values():
            if hasattr(block, "moe"):
                block.moe.experts.compute = partial(swiglu_experts, linear=float8_grouped_linear(layout))


def mxfp8_matmul(layout: Layout):
    """(x (..., in), weight (out, in)) -> (..., out), all three matmuls of a training step in e4m3 with a power of two per 32
    numbers (OCP Microscaling Formats v1.0). Emulated on a CPU: quantized, and multiplied as what the codes stand for."""
    from torchao.prototype.moe_training.mxfp8_linear import _to_mxfp8_then_scaled_mm
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    kernel = KernelPreference.EMULATED if layout.device.type == "cpu" else KernelPreference.AUTO
    return lambda x, w: _to_mxfp8_then_scaled_mm(x, w, kernel, ScaleCalculationMode.RCEIL)


def nvfp4_matmul():
    """As mxfp8_matmul in 4 bits: Hadamard rotation and stochastic rounding of the gradients (arXiv:2509.25149)."""
    from torchao.prototype.moe_training.nvfp4_training.nvfp4_linear import nvfp4_linear
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    signs = tuple(1 if bit == "1" else -1 for bit in f"{0x9E37:016b}")  # any fixed ones, the same on all ranks
    seed = torch.zeros(1, dtype=torch.int64, device="cuda")
    return lambda x, w: nvfp4_linear(x, w, None, kernel_preference=KernelPreference.TRITON, sr_seed=seed, sign_vector=signs)


def float8_grouped_linear(layout: Layout):
    """models.moe.grouped_linear in float8: an expert's rows are padded to what the kernels want."""
    from torchao.prototype import moe_training
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    from models.moe import grouped_linear

    options = dict(out_dtype=torch.bfloat16, pad_token_groups_for_grouped_mm=True)
    if layout.cfg.float8 == "rowwise":
        multiply = moe_training._to_fp8_rowwise_then_scaled_grouped_mm
    else:
        multiply = moe_training._to_mxfp8_then_scaled_grouped_mm
        options["kernel_preference"] = KernelPreference.EMULATED if layout.device.type == "cpu" else KernelPreference.AUTO

    def linear(x, weight, counts):
        if len(x) == 0:  # the float8 kernels take no empty input
            return grouped_linear(x, weight, counts)
        ends = counts.cumsum(0).to(torch.int32)
        return multiply(x.bfloat16(), weight.transpose(1, 2).bfloat16(), ends, **options).to(x.dtype)

    return linear


def float8_scales(stages, layout: Layout) -> None:
    """After an optimizer step: find the scales of all weights with one all-reduce. Otherwise FSDP would send one all-reduce
    per weight, just before it gathers that weight in float8."""
    if layout.cfg.float8_all_gather:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        for stage in stages:
            precompute_float8_dynamic_scale_for_fsdp(stage)
