"""RMSNorm and rotary embedding for all models, with few passes over memory in eager mode.

B batch, T sequence, D dim, H heads, K head_dim, N tokens (B*T)
"""

import inspect
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class RMSNorm(nn.RMSNorm):
    """On a GPU or compiled, nn.RMSNorm is a single kernel; eager on a CPU it runs twenty operators,
    Normalize only a few."""

    def forward(self, x):
        if (
            x.is_cuda
            or hasattr(x, "placements")
            or torch.compiler.is_compiling()
            or x.dtype == torch.float64
        ):
            return super().forward(x)  # placements: a DTensor
        if not torch.is_grad_enabled():  # skip autograd's bookkeeping, as slow as two operators
            return normalized(x, self.weight, self.eps)[0]
        return Normalize.apply(x, self.weight, self.eps)


def normalized(x: Tensor, weight: Tensor, eps: float | None) -> tuple[Tensor, Tensor]:
    """(x / rms(x) * weight, 1 / rms(x) (..., 1)), computed in fp32 (arXiv:1910.07467, eq. 4)."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)  # (..., 1)
    if eps is None:
        eps = torch.finfo(x.dtype).eps  # as nn.RMSNorm without eps
    r = torch.addcmul(torch.scalar_tensor(eps), norm, norm, value=1 / x.shape[-1]).rsqrt_()
    return (x * r).mul_(weight).to(x.dtype), r


class Normalize(torch.autograd.Function):
    """normalized(), with a gradient in few operators."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        out, r = normalized(x, weight, eps)
        ctx.save_for_backward(x, weight, r)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, r = ctx.saved_tensors
        normed = x * r
        product = grad * normed
        # (D)
        dw = None
        if ctx.needs_input_grad[1]:
            dw = product.sum_to_size(weight.shape).to(weight.dtype)
        # dx = r (g - normed <g, normed> / D), where g = grad * weight
        dot = (product @ weight.float())[..., None]
        dx = (grad * weight).float().addcmul_(normed, dot, value=-1 / x.shape[-1]).mul_(r)
        return dx.to(x.dtype), dw, None


def takes_places(model: nn.Module) -> bool:
    """Whether the model's forward has an argument `places`, for models/dropout.py."""
    return "places" in inspect.signature(model.forward).parameters


def places_of(batch: Any, seed: int) -> Tensor:
    """(A, B, T) int64: a number for each token of the run, the same in every layout. The low 24
    bits are the position in the sequence, the bits above are the number of the sequence. Another
    seed starts to count sequences elsewhere."""
    A, B, T = batch.tokens.shape
    first = batch.first + seed * 0x9E3779B97F4A7C15 % 2**38
    sequences = first + torch.arange(A * B, device=batch.tokens.device).view(A, B, 1)
    return (sequences << 24) + torch.arange(T, device=batch.tokens.device)


def weight_of(linear: nn.Linear) -> Tensor:
    """The effective matrix (out, in), LoRA's product included (lora/lora.py). Use it wherever code
    multiplies with .weight instead of calling the linear; plain .weight would leave the adapters
    out."""
    merged = getattr(linear, "merged", None)
    if merged is None:
        return linear.weight
    return merged().to(linear.weight.dtype)


def rope_frequencies(
    config: Any, K: int, device: torch.device | str, truncate: bool = True
) -> Tensor:
    """(K/2,) radians per position, fp32 (RoPE eq. 34, arXiv:2104.09864), stretched for long context
    if config.rope_scaling says so, like Llama 3.1 or by yarn (arXiv:2309.00071, section 3.2): fast
    pairs stay, slow pairs are slowed down by `factor`.

    truncate: yarn's limits are whole numbers of pairs.
    """
    # 1 / theta^x as in transformers, not theta^-x: the last bits differ, by 0.01 radians at
    # position 100,000
    freq = 1.0 / config.rope_theta ** (
        torch.arange(0, K, 2, dtype=torch.float32, device=device) / K
    )
    s = config.rope_scaling
    if s is None:
        return freq
    original = s["original_max_position_embeddings"]  # the trained context
    if "low_freq_factor" in s:
        turns = original / (2 * math.pi / freq)  # of each pair, within the trained context
        keep = (turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
    else:
        # the pairs that turn beta_fast and beta_slow times within the trained context, as numbers
        # between pairs
        low, high = (
            math.log(original / (turns * 2 * math.pi)) * K / (2 * math.log(config.rope_theta))
            for turns in (s.get("beta_fast", 32.0), s.get("beta_slow", 1.0))
        )
        if truncate:
            low = math.floor(low)
            high = math.ceil(high)
        low = max(low, 0)
        high = min(high, K - 1)
        keep = 1 - (torch.arange(K // 2, device=device) - low) / max(high - low, 0.001)
    keep = keep.clamp(0, 1)  # 1: stays, 0: slowed down, linear in between
    return (1 - keep) * freq / s["factor"] + keep * freq


def attention_factors(config: Any) -> tuple[float, float]:
    """(factor of cos and sin, factor of the softmax scale in latent attention): yarn's correction
    of attention's entropy."""
    s = config.rope_scaling
    if s is None or "low_freq_factor" in s:
        return 1.0, 1.0
    growth = 0.1 * math.log(max(s["factor"], 1))
    mscale = s.get("mscale", 0)
    all_dim = s.get("mscale_all_dim", 0)
    if mscale and all_dim:
        factor = (growth * mscale + 1) / (growth * all_dim + 1)
    else:
        factor = growth + 1
    return s.get("attention_factor", factor), (growth * all_dim + 1) ** 2


def cos_and_sin(config: Any, K: int, positions: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    """cos and sin (B or 1, 1, T/cp, K/2) fp32 of positions (B or 1, T/cp), for rotate."""
    angle = positions[:, None, ..., None] * rope_frequencies(config, K, positions.device, **options)
    factor = attention_factors(config)[0]
    if factor == 1:
        return angle.cos(), angle.sin()
    return (angle.cos() * factor, angle.sin() * factor)


class Rotate(torch.autograd.Function):
    """A rotation in three operators, with a gradient in three. autograd's gradient would take
    twenty operators and write three times as much memory."""

    @staticmethod
    def forward(ctx, x, cos, sin, interleave):
        ctx.save_for_backward(cos, sin)
        ctx.interleave = interleave
        pairs = pair_up(x, interleave)
        a, b = pairs.unbind(-2)
        out = pairs * cos[..., None, :]  # (..., 2, K/2) fp32
        out_a, out_b = out.unbind(-2)
        out_a.addcmul_(b, sin, value=-1)
        out_b.addcmul_(a, sin)
        return out.flatten(-2).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        pairs = pair_up(grad, False)
        a, b = pairs.unbind(-2)
        dx = pairs * cos[..., None, :]  # a rotation's derivative turns back
        da, db = dx.unbind(-2)
        da.addcmul_(b, sin)
        db.addcmul_(a, sin, value=-1)
        if ctx.interleave:
            dx = dx.transpose(-1, -2)
        return dx.flatten(-2).to(grad.dtype), None, None, None


def pair_up(x: Tensor, interleave: bool) -> Tensor:
    """(..., K) -> (..., 2, K/2), a view: elements (0, i) and (1, i) rotate together."""
    if interleave:
        return x.unflatten(-1, (-1, 2)).transpose(-1, -2)
    return x.unflatten(-1, (2, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleave: bool = False) -> Tensor:
    """Rotary embedding (arXiv:2104.09864) in fp32; x (B, H, T, K); cos, sin (B or 1, 1, T, K/2)
    fp32. Half-split order, as on disk at Hugging Face. interleave: the pairs of x lie side by side
    (DeepSeek). The result is half-split in both cases: only products of queries and keys are used,
    and both have the same order."""
    # the compiler fuses these lines; torch 2.11 would give Rotate a gradient of zero
    if torch.compiler.is_compiling():
        a, b = pair_up(x, interleave).unbind(-2)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)
    return Rotate.apply(x, cos, sin, interleave)
