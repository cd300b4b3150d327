"""AdamW whose moments are 8-bit codes, with torchao's table of values (arXiv:2110.02861): about a
quarter of AdamW's memory. docs/fork_me.md has the line for a recipe.

torchao's own AdamW8bit compiles its step for each shape of a parameter, and cuts a rank's part of a
weight into blocks, so its state fits one layout only. Here the step is torch's fused AdamW on
moments in fp32 that live as long as the step, torchao's functions make and read the codes, and a
block is a part of one row. So codes and scales are sharded like the weight, and a checkpoint
continues on other layouts. Nothing is compiled, on no device.
"""

import logging

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from distributed.layout import local_tensor
from training.bf16_moments import fused_step, some_at_a_time

# torchao warns of kernels for other versions of Python
logging.getLogger("torchao").setLevel(logging.ERROR)
from torchao.optim.quant_utils import (  # noqa: E402
    create_dynamic_map,
    dequant_with_qmap,
    quantize_8bit_with_qmap,
    scale_tensor,
)

# numbers in a row that share a scale, which is the largest of them
BLOCK = 128
# as torchao: smaller parameters, such as norms, keep their moments in fp32
SMALLEST = 4096


def adamw_8bit(groups, lr: float, betas, eps: float, kind: str) -> torch.optim.Optimizer:
    """In place of training.optim.adamw. kind: --optimizer; Muon's other parameters are in 8 bits as
    well."""
    if kind not in ("adamw", "muon"):
        raise ValueError(f"moments in 8 bits replace --optimizer {kind}: use --optimizer adamw")
    return AdamW8bit(groups, lr, betas, eps)


class AdamW8bit(torch.optim.AdamW):
    """State of a matrix with rows of whole blocks: exp_avg_codes and exp_avg_sq_codes, a byte
    per number, and exp_avg_scales and exp_avg_sq_scales, a number in fp32 per block."""

    # a tensor, 1.0 to let the next step change nothing: training.optim.skip_if_not_finite
    found_inf: torch.Tensor | None = None

    def __init__(self, groups, lr: float, betas, eps: float):
        super().__init__(groups, lr, betas, eps, fused=True)
        self.defaults["moment_dtype"] = torch.uint8  # for the size of a checkpoint
        for group in self.param_groups:
            for p in group["params"]:
                if p.dtype != torch.float32:
                    raise ValueError(
                        f"moments in 8 bits need --param_dtype float32, not {p.dtype}".replace(
                            "torch.", ""
                        )
                    )
        # the 256 values of a code: the mean has a sign, the mean of squares has none
        device = self.param_groups[0]["params"][0].device
        self.table = {
            "exp_avg": torch.tensor(create_dynamic_map(signed=True), device=device),
            "exp_avg_sq": torch.tensor(create_dynamic_map(signed=False), device=device),
        }

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for params in some_at_a_time(group["params"]):
                self.update(params, group)

    def update(self, params: list, group: dict) -> None:
        means = []
        squares = []
        for p in params:
            if not self.state[p]:
                self.make_state(p)
            means.append(self.read(p, "exp_avg"))
            squares.append(self.read(p, "exp_avg_sq"))
        fused_step(self, params, means, squares, group)
        for p, mean, square in zip(params, means, squares):
            self.write(p, "exp_avg", mean)
            self.write(p, "exp_avg_sq", square)

    def make_state(self, p: Tensor) -> None:
        state = self.state[p]
        state["step"] = torch.zeros((), device=p.device)
        # the same on all ranks: FSDP cuts a vector into uneven parts, some of whole blocks by chance
        in_blocks = p.dim() > 1 and p.numel() >= SMALLEST
        if local_tensor(p).shape[-1] % BLOCK != 0:
            in_blocks = False
        for name in ("exp_avg", "exp_avg_sq"):
            if in_blocks:
                state[f"{name}_codes"] = torch.zeros_like(p, dtype=torch.uint8)
                state[f"{name}_scales"] = new_scales(p)
            else:
                state[name] = torch.zeros_like(p)

    def read(self, p: Tensor, name: str) -> Tensor:
        """This rank's part of a moment, in fp32."""
        state = self.state[p]
        if name in state:
            return local_tensor(state[name])
        codes = local_tensor(state[f"{name}_codes"])
        scales = local_tensor(state[f"{name}_scales"])
        if codes.numel() == 0:  # a rank without a row
            return codes.float()
        return dequant_with_qmap(codes, self.table[name], scales.flatten())

    def write(self, p: Tensor, name: str, moment: Tensor) -> None:
        state = self.state[p]
        if name in state or moment.numel() == 0:
            return  # was changed in place
        codes = local_tensor(state[f"{name}_codes"])
        scales = local_tensor(state[f"{name}_scales"])
        scaled, new = scale_tensor(moment, BLOCK)
        new_codes = quantize_8bit_with_qmap(scaled, self.table[name])
        new = new.view(scales.shape)
        # a step that is skipped; to code a moment again would change it
        if self.found_inf is not None:
            skipped = self.found_inf.bool()
            new_codes = torch.where(skipped, codes, new_codes)
            new = torch.where(skipped, scales, new)
        codes.copy_(new_codes)
        scales.copy_(new)


def new_scales(p: Tensor) -> Tensor:
    """Zeros, one for each block of a parameter, sharded like the parameter."""
    local = local_tensor(p)
    scales = local.new_zeros((*local.shape[:-1], local.shape[-1] // BLOCK))
    if not isinstance(p, DTensor):
        return scales
    shape = torch.Size((*p.shape[:-1], p.shape[-1] // BLOCK))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        scales, p.device_mesh, p.placements, run_check=False, shape=shape, stride=stride
    )
