"""Attention kernels and masks. Nothing here knows of other processes.

B batch, T sequence, H query heads, G key/value heads (H a multiple of G), K head_dim, S keys seen
so far

A block never builds a mask. Once per forward the model calls `causal_attention(positions,
doc_ids)`, and every block calls the returned `attend(q, k, v)`. To change attention, replace the
maker: context parallelism sets `model.make_attend` (parallel.py), and generation hands each block
an `attend` with a cache (rl/decoding.py).
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend, sdpa_kernel

# cuDNN's kernel is the fastest on these GPUs, by their compute capability: Hopper and B200. On an
# A100 flash is 1.1 to 1.2 x faster than cuDNN (transformers PR 48163, pytorch PR 192799), on L40S,
# A10G and RTX PRO 6000 as fast or faster.
CUDNN_FIRST = ((9, 0), (10, 0))

# On a CPU, training in bf16 computes attention to at most so many tokens in plain products:
# CausalOnCPU.
SHORT_ON_CPU = 512
QUERIES_AT_ONCE = 64  # their scores stay in a cache of the CPU


def kernels_of(device: torch.device) -> list[SDPBackend]:
    """The kernels of attention; torch takes the first that can compute the attention."""
    first = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        if (gpu.major, gpu.minor) not in CUDNN_FIRST:
            first.reverse()
    return [*first, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def sdpa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Scaled dot-product attention: q (B, H, T, K), k (B, G, S, K), v (B, G, S, U) -> (B, H, T, U).

    mask: broadcastable to (B, H, T, S); boolean (True: the query may look at the key), or numbers
    added to the scores.
    sinks (H,): a logit per head for a key without a value; needs a mask.
    """
    if sinks is not None:
        assert mask is not None, "sinks need a mask"
        return attention_with_sinks(q, k, v, mask, scale, sinks)
    if mask is None and is_causal and is_short_on_cpu(q, k, v):
        if scale is None:
            scale = q.shape[-1] ** -0.5
        return CausalOnCPU.apply(q, k, v, scale)
    K = q.shape[-1]
    U = v.shape[-1]
    kernels = kernels_of(q.device)
    if q.is_cuda and type(mask) is Tensor:  # generation: cuDNN would plan anew for each length
        kernels = kernels[2:]
        if q.shape[1] != k.shape[1]:  # the efficient kernel knows no groups
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    # DeepSeek's values are narrower than the keys, but flash kernels need equal widths. From 1,000
    # tokens on, a flash kernel on values padded with zeros is faster than the plain one. Flash
    # refuses fp32 on a GPU; only flash takes lower_right_mask.
    flash_runs = (
        not q.is_cuda or q.element_size() == 2 and mask is not None and type(mask) is not Tensor
    )
    if U < K <= 256 and flash_runs:
        v = F.pad(v, (0, K - U))
    with sdpa_kernel(kernels, set_priority=True):
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    if v.shape[-1] == U:
        return out
    return out[..., :U]


def is_short_on_cpu(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether CausalOnCPU computes this attention."""
    if type(q) is not Tensor or q.device.type != "cpu" or q.dtype != torch.bfloat16:
        return False
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        return False
    T = q.shape[2]
    return T == k.shape[2] and T <= SHORT_ON_CPU and q.shape[3] == v.shape[3]


class CausalOnCPU(torch.autograd.Function):
    """Causal attention of short sequences in bf16 on a CPU, in plain products, a few queries at a
    time. The probabilities are kept for the gradient: B*H*T*T/2 numbers in bf16. torch's flash
    kernel keeps none, and takes twice as long.

    The scores are computed in fp32, as in the kernel; all that is multiplied later is bf16.
    """

    @staticmethod
    def forward(ctx, q, k, v, scale):
        B, H, T, K = q.shape
        G = k.shape[1]
        out = q.new_empty(B, T, H, K).transpose(1, 2)  # the order in memory that wo reads
        scaled_k = k.float() * scale
        kept = []
        for first in range(0, T, QUERIES_AT_ONCE):
            end = min(first + QUERIES_AT_ONCE, T)  # no query here sees a later key
            some_q = rows_of_groups(q, G, first, end)  # (B, G, H/G * n, K)
            scores = some_q.float() @ scaled_k[:, :, :end].mT  # (B, G, H/G * n, S)
            later = torch.ones(end - first, end - first, dtype=torch.bool).triu(1)
            by_head = scores.unflatten(2, (-1, end - first))  # (B, G, H/G, n, S)
            by_head[..., first:].masked_fill_(later, -torch.inf)
            weights = torch.softmax(scores, -1, out=scores).bfloat16()
            kept.append(weights)
            some_out = weights @ v[:, :, :end]
            out[:, :, first:end] = some_out.unflatten(2, (-1, end - first)).flatten(1, 2)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        q, k, v, *kept = ctx.saved_tensors
        G = k.shape[1]
        dq = torch.empty_like(q)
        dk = torch.zeros_like(k, dtype=torch.float32)
        dv = torch.zeros_like(v, dtype=torch.float32)
        first = 0
        for weights in kept:
            end = weights.shape[3]
            some_q = rows_of_groups(q, G, first, end)
            some_grad = rows_of_groups(grad, G, first, end)
            dweights = some_grad @ v[:, :, :end].mT
            dscores = torch._softmax_backward_data(dweights, weights, -1, torch.bfloat16)
            dv[:, :, :end] += weights.mT @ some_grad
            dk[:, :, :end] += dscores.mT @ some_q
            some_dq = dscores @ k[:, :, :end]
            dq[:, :, first:end] = some_dq.unflatten(2, (-1, end - first)).flatten(1, 2)
            first = end
        dq.mul_(ctx.scale)
        dk.mul_(ctx.scale)
        return dq, dk.bfloat16(), dv.bfloat16(), None


def rows_of_groups(x: Tensor, G: int, first: int, end: int) -> Tensor:
    """(B, H, T, K) -> (B, G, H/G * n, K) at n positions: a group's heads lie one below the other,
    because they share keys and values."""
    return x[:, :, first:end].unflatten(1, (G, -1)).flatten(2, 3)


def attention_with_sinks(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None, sinks: Tensor
) -> Tensor:
    """sdpa() step by step, with all scores (B, H, T, S) in memory: no CPU kernel has sinks."""
    G = k.shape[1]
    # (B, G, H/G, T, S)
    scores = (
        q.unflatten(1, (G, -1)) @ k[:, :, None].transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)
    )
    mask = mask[:, :, None]
    if mask.dtype == torch.bool:
        scores = scores.float().masked_fill(~mask, -torch.inf)
    else:
        scores = scores.float() + mask
    sink = sinks.float().view(1, G, -1, 1, 1).expand(*scores.shape[:-1], 1)
    weight = torch.cat([scores, sink], -1).softmax(-1)[..., :-1].to(v.dtype)
    return (weight @ v[:, :, None]).flatten(1, 2)


def causal_attention(
    positions: Tensor,
    doc_ids: Tensor | None = None,
    q_index: Tensor | None = None,
    reach: Tensor | None = None,
    S=None,
) -> Callable[..., Tensor]:
    """Return attend(q, k, v, scale=None, sinks=None) for queries at positions (B or 1, T). sinks:
    see sdpa; only with a reach.

    doc_ids (B, S): attention also stops at document boundaries.
    q_index (T,): positions of the queries, if this rank has only some of the S positions (context
    parallelism). reach (B or 1, T): number of tokens that each query sees, its own included: a
    sliding window, or the chunk so far.
    """
    if doc_ids is None and reach is None:
        assert q_index is None, (
            "queries that are only some of the positions need a mask: see lower_right_mask"
        )
        return lambda q, k, v, scale=None: sdpa(q, k, v, is_causal=True, scale=scale)

    S = S or (positions if doc_ids is None else doc_ids).shape[1]
    k_index = torch.arange(S, device=positions.device)
    if q_index is None:
        q_index = k_index
    # on a GPU a boolean mask would rule out the flash kernel and cost B*T*S bytes
    if positions.is_cuda:
        from models.flex_attention import flex_attend  # only document masks and windows need it

        return flex_attend(q_index, S, doc_ids, reach)

    mask = (q_index[:, None] >= k_index)[None]
    if doc_ids is not None:
        mask = mask & (doc_ids[:, q_index, None] == doc_ids[:, None, :])
    if reach is not None:
        mask = mask & (q_index[:, None] - k_index < reach[:, :, None])
    mask = mask[:, None]  # (B or 1, 1, T, S), made once and shared by all layers
    return lambda q, k, v, scale=None, sinks=None: sdpa(q, k, v, mask, scale=scale, sinks=sinks)


def lower_right_mask(T: int, S: int, device: torch.device) -> Tensor:
    """The mask for queries at the last T of S positions: a causal triangle in the lower right
    corner of (T, S)."""
    if device.type == "cuda":  # takes no memory: only tells the flash kernel the triangle's corner
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(T, S)
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)
