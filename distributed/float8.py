"""Matmuls in 8 and 4 bits, by torchao."""
import dataclasses
import logging
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache, partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Shard

from distributed.layout import EXPERTS, Layout, all_blocks
from models.moe import swiglu_experts
from support.config import GPU, Need, flag

FLOAT8 = Need("without --float8", lambda c: c.float8 != "off")
FLOAT8_TENSORWISE = Need("without --float8 tensorwise", lambda c: c.float8 == "tensorwise")
FLOAT8_EXPERTS = Need("without --float8 rowwise or mxfp8", lambda c: c.float8 in ("rowwise", "mxfp8"))
GATHERED = Need("in one process: nothing is gathered", lambda c: c.world_size > 1)

BLOCK = {"mxfp8": 32, "nvfp4": 128}  # numbers that share a scale, in the kinds of --float8 that have such blocks


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
    names = float8_names(stage, layout)
    if cfg.float8 in BLOCK:
        multiply = mxfp8_matmul(layout) if cfg.float8 == "mxfp8" else nvfp4_matmul()
    elif names:
        multiply = float8_matmul(stage, names, layout)
    for name in names:
        if cfg.float8 in BLOCK or layout.tp > 1:
            module = stage.get_submodule(name)
            module.multiply, module.__class__ = multiply, with_parts(type(module))
    if cfg.float8_experts:
        multiply = float8_grouped_linear(layout)
        for block in all_blocks(stage).values():
            if hasattr(block, "moe"):
                block.moe.experts.compute = partial(padded_experts, linear=multiply, block=BLOCK.get(cfg.float8, 16))


def float8_names(stage, layout: Layout) -> list[str]:
    """The linears that multiply in float8. Raises ValueError if there is nothing to do; tells which ones do not fit."""
    cfg, names, odd = layout.cfg, [], {}
    block = BLOCK.get(cfg.float8, 16)
    for fqn, module in stage.named_modules():
        in_block = fqn.startswith(("blocks.", "mtp."))
        if not isinstance(module, nn.Linear) or not in_block or any(part in fqn for part in cfg.float8_filter):
            continue
        sizes = sides_on_a_rank(stage, fqn, module, layout.tp)
        if all(n % block == 0 for n in sizes):
            names.append(fqn)
        else:
            odd[".".join(fqn.split(".")[-2:])] = " x ".join(map(str, sizes))
    left = ", ".join(f"{name} {sizes}" for name, sizes in odd.items())
    why = f"on a rank a side is no multiple of {block}: {left}" if odd else f"all are in --float8_filter {cfg.float8_filter}"
    if not names and not cfg.float8_experts:
        raise ValueError(f"--float8 {cfg.float8} changes no matrix of the blocks, for {why}; use --float8 off, or other sizes")
    if odd and layout.rank == 0:
        print(f"--float8 {cfg.float8} leaves some matrices as they are, for {why}")
    return names


def sides_on_a_rank(stage, fqn: str, module, tp: int) -> tuple[int, int]:
    """(out, in) of a linear, or of the part of it that the model's tp_plan gives a rank."""
    style = next((style for pattern, style in stage.tp_plan().items() if fnmatch(fqn, pattern)), "")
    rows, columns = module.weight.shape
    return rows // tp if "colwise" in style else rows, columns // tp if style == "rowwise" else columns


def float8_matmul(stage, names: list[str], layout: Layout):
    """Swap these linears for torchao's; returns their (x (..., in), weight (out, in)) -> (..., out)."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    config = Float8LinearConfig.from_recipe_name(layout.cfg.float8)
    emulate = layout.device.type == "cpu"
    config = dataclasses.replace(config, emulate=emulate, enable_fsdp_float8_all_gather=layout.cfg.float8_all_gather)
    convert_to_float8_training(stage, config=config, module_filter_fn=lambda module, fqn: fqn in names)
    kernels = stage.get_submodule(names[0]).linear_mm_config
    return lambda x, weight: matmul_with_hp_or_float8_args.apply(x, weight.t(), kernels, config)


class Parts(nn.Linear):
    """A linear that multiplies with self.multiply(x (..., in), weight (out, in)). Under TP its weight and x are DTensors, and
    this rank multiplies its parts of them, with scales of their own numbers: so nothing is sent for scales. torchao, given
    DTensors, agrees on the scales with all ranks, in 28 all-reduces per layer and step.

    A method of a class, and not a function in place of forward: for the compiler each module would have another one.
    """

    def forward(self, x):
        weight = self.weight
        if not isinstance(weight, DTensor):
            return self.multiply(x, weight)
        (cut,) = weight.placements
        if cut.is_shard(0):  # colwise: x (..., in) is whole, and every rank has a summand of its gradient
            x_grad, weight_grad, out = Partial(), cut, Shard(x.dim() - 1)
        elif cut.is_shard(1):  # rowwise: x (..., in/tp)
            x_grad, weight_grad, out = x.placements[0], cut, Partial()
        else:  # a whole weight on every rank, and rows of its own
            x_grad, weight_grad, out = x.placements[0], Partial(), x.placements[0]
        y = self.multiply(x.to_local(grad_placements=[x_grad]), weight.to_local(grad_placements=[weight_grad]))
        return DTensor.from_local(y, weight.device_mesh, [out], run_check=False)


@cache
def with_parts(kind: type) -> type:
    """A class of linears, with the forward of Parts."""
    return type(kind.__name__, (Parts, kind), {})


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
    """models.moe.grouped_linear in float8, for numbers of rows per expert that are multiples of 16 (mxfp8: 32)."""
    from torchao.prototype import moe_training
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    options = dict(out_dtype=torch.bfloat16, pad_token_groups_for_grouped_mm=False)
    if layout.cfg.float8 == "rowwise":
        multiply = moe_training._to_fp8_rowwise_then_scaled_grouped_mm
    else:
        multiply = moe_training._to_mxfp8_then_scaled_grouped_mm
        options["kernel_preference"] = KernelPreference.EMULATED if layout.device.type == "cpu" else KernelPreference.AUTO

    def linear(x, weight, counts):
        ends = counts.cumsum(0).to(torch.int32)
        return multiply(x.bfloat16(), weight.transpose(1, 2).bfloat16(), ends, **options).to(x.dtype)

    return linear


def padded_experts(x: Tensor, counts: Tensor, w1: Tensor, w2: Tensor, w3: Tensor, *, linear, block: int) -> Tensor:
    """models.moe.swiglu_experts with the rows of every expert padded to a multiple of block: x (N*k, D), counts (E,).

    Nothing waits for counts: there is room for all that padding can add, and the last expert gets the rest of it.
    """
    size = -(-(len(x) + len(counts) * (block - 1)) // block) * block
    padded = (counts + block - 1) // block * block
    padded[-1] = size - padded[:-1].sum()
    shift = (padded - counts).cumsum(0) - (padded - counts)  # by how much the rows of each expert move
    place = torch.arange(len(x), device=x.device) + shift.repeat_interleave(counts, output_size=len(x))
    y = swiglu_experts(x.new_zeros(size, x.shape[1]).index_copy(0, place, x), padded, w1, w2, w3, linear=linear)
    return y.index_select(0, place)


def float8_scales(stages, layout: Layout) -> None:
    """After an optimizer step: find the scales of all weights with one all-reduce. Otherwise FSDP would send one all-reduce
    per weight, just before it gathers that weight in float8."""
    if layout.cfg.float8_all_gather:
        from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

        for stage in stages:
            precompute_float8_dynamic_scale_for_fsdp(stage)
