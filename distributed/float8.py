"""Matmuls in 8 bits, by torchao."""

import dataclasses
import logging
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Literal

from torch import nn
from torch.distributed.tensor import DTensor, Partial

from distributed.layout import Layout, beside_weight, with_forward
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
        module.__class__ = with_forward(type(module), Parts)


def float8_names(stage, layout: Layout, cfg: Float8Config) -> list[str]:
    """Names of the linears for float8. Prints the linears that do not fit; raises ValueError if
    none is left."""
    names = []
    odd = {}
    for fqn, module in stage.named_modules():
        in_block = fqn.startswith(("blocks.", "mtp."))
        is_left_out = any(part in fqn for part in cfg.float8_filter)
        if not isinstance(module, nn.Linear) or not in_block or is_left_out:
            continue
        sizes = sides_on_a_rank(stage, fqn, module, layout.tp)
        if all(n % 16 == 0 for n in sizes):
            names.append(fqn)
        else:
            odd[".".join(fqn.split(".")[-2:])] = " x ".join(map(str, sizes))
    left = ", ".join(f"{name} {sizes}" for name, sizes in odd.items())
    if not odd:
        left = f"--float8_filter {cfg.float8_filter}"
    if not names:
        raise ValueError(
            f"--float8 {cfg.float8} changes no matrix, for on a rank a side is no multiple of 16: "
            f"{left}"
        )
    if odd and layout.rank == 0:
        print(
            f"--float8 {cfg.float8} leaves matrices as they are, for on a rank a side is no "
            f"multiple of 16: {left}"
        )
    return names


def sides_on_a_rank(stage, fqn: str, module, tp: int) -> tuple[int, int]:
    """(out, in) of a rank's part of a linear, by the model's tp_plan."""
    style = ""
    for pattern, planned in stage.tp_plan().items():
        if fnmatch(fqn, pattern):
            style = planned
            break
    rows, columns = module.weight.shape
    if "colwise" in style:
        rows //= tp
    if style == "rowwise":
        columns //= tp
    return rows, columns


class Parts(nn.Linear):
    """A linear that multiplies with self.multiply(x (..., in), weight (out, in)). Under TP weight
    and x are DTensors, and every rank multiplies its parts with scales of the parts, so no scale is
    sent. Given DTensors, torchao would agree on scales with all ranks, in 28 all-reduces per layer
    and step.

    A method of a class, not a function in place of forward: the compiler would compile a function
    once per module.
    """

    def forward(self, x):
        if isinstance(self.weight, DTensor):
            y = self.multiply_parts(x, self.weight)
        else:
            y = self.multiply(x, self.weight)
        if self.bias is None:
            return y
        return y + self.bias

    def multiply_parts(self, x, weight):
        (cut,) = weight.placements
        x_grad, out = beside_weight(x, weight)
        weight_grad = cut
        if not cut.is_shard():  # of a whole weight every rank has a summand
            weight_grad = Partial()
        y = self.multiply(
            x.to_local(grad_placements=[x_grad]), weight.to_local(grad_placements=[weight_grad])
        )
        return DTensor.from_local(y, weight.device_mesh, [out], run_check=False)


def float8_scales(stages) -> None:
    """--float8_all_gather, after an optimizer step: find the scales of all weights with one
    all-reduce. FSDP alone would send
    an all-reduce per weight, just before gathering the weight in float8."""
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    for stage in stages:
        precompute_float8_dynamic_scale_for_fsdp(stage)
