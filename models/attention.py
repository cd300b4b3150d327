"""The attention kernels: which one runs, and what its mask is. Nothing here knows of other processes.

B batch, T sequence, H query heads, G key/value heads (H a multiple of G), K head_dim, S keys seen so far

A block never builds a mask: it calls `attend(q, k, v)`, which the model makes once per forward with
`causal_attention(positions, doc_ids)`. That call is the one seam here: context parallelism puts its own maker in its place
(`model.make_attend`, see parallel.py), and generation hands each block an `attend` that has a cache (rl/decoding.py).
"""
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

flash_is_first = True  # of the kernels of a GPU that can compute an attention; set by distributed.launch.choose_attention


def sdpa(q: Tensor, k: Tensor, v: Tensor, mask=None, is_causal=False, scale=None, sinks=None) -> Tensor:
    """Scaled dot-product attention: q (B, H, T, K), k (B, G, S, K), v (B, G, S, U) -> (B, H, T, U).

    `mask`, broadcastable to (B, H, T, S), is boolean, True where a query may look, or is added to the scores. sinks (H,): a
    logit per head, of a key without a value; it takes a mask.
    """
    if sinks is not None:
        return attention_with_sinks(q, k, v, mask, scale, sinks)
    K, U = q.shape[-1], v.shape[-1]
    # DeepSeek's values are narrower than its keys, and flash kernels want one width. From 1,000 tokens on, a flash kernel on
    # values padded with zeros is faster than the plain kernel. On a GPU flash takes neither fp32 nor a mask of booleans.
    flash_runs = not q.is_cuda or flash_is_first and q.element_size() == 2 and type(mask) is not Tensor
    if U < K <= 256 and flash_runs:
        v = F.pad(v, (0, K - U))
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out if v.shape[-1] == U else out[..., :U]


def attention_with_sinks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale, sinks: Tensor) -> Tensor:
    """sdpa() step by step, with all scores (B, H, T, S) in memory: no kernel of a CPU has sinks."""
    G = k.shape[1]
    scores = q.unflatten(1, (G, -1)) @ k[:, :, None].transpose(-1, -2) * (scale or q.shape[-1] ** -0.5)  # (B, G, H/G, T, S)
    mask = mask[:, :, None]
    scores = scores.float().masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores.float() + mask
    sink = sinks.float().view(1, G, -1, 1, 1).expand(*scores.shape[:-1], 1)
    weight = torch.cat([scores, sink], -1).softmax(-1)[..., :-1].to(v.dtype)
    return (weight @ v[:, :, None]).flatten(1, 2)


def compile_each_shape(function, **options):
    """Compiled once per shape, and once more without gradients. After 8 times torch would run the function as it is, and only
    warn: FlexAttention then writes all T x T scores. The packed samples of grpo.py come in more shapes than that."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 128)
    return torch.compile(function, dynamic=False, **options)


@cache
def compiled_flex_attention():
    """FlexAttention is only fast, and only lean in memory, when compiled; once per process is enough."""
    from torch._inductor import config
    from torch.nn.attention.flex_attention import flex_attention

    # --ac op decides operator by operator what to keep. Without this option it cannot see the compiled kernel, and repeats it.
    visible = {"wrap_inductor_compiled_regions": True} if hasattr(config, "wrap_inductor_compiled_regions") else None
    return compile_each_shape(flex_attention, options=visible)


@cache
def compiled_block_mask():
    """create_block_mask writes the whole mask (B, T, S) on its way, 10 GiB at 32k tokens; compiled it writes blocks only."""
    from torch.nn.attention.flex_attention import create_block_mask

    return compile_each_shape(create_block_mask)


def causal_attention(positions: Tensor, doc_ids: Tensor | None = None, q_index: Tensor | None = None, reach=None, S=None):
    """Return attend(q, k, v, scale=None, sinks=None) for queries at positions (B or 1, T). With doc_ids (B, S), attention stops
    at document boundaries as well. sinks: see sdpa; only with a reach.

    q_index (T,): the positions of the queries, where they are only some of the S positions (context parallelism).
    reach (B or 1, T): how many tokens back each query looks, itself included: a sliding window, or what is left of a chunk.
    """
    if doc_ids is None and reach is None:
        assert q_index is None, "queries that are only some of the positions need a mask: see lower_right_mask"
        return lambda q, k, v, scale=None: sdpa(q, k, v, is_causal=True, scale=scale)

    S = S or (positions if doc_ids is None else doc_ids).shape[1]
    k_index = torch.arange(S, device=positions.device)
    q_index = k_index if q_index is None else q_index
    if positions.is_cuda:  # a boolean mask would rule out the flash kernel there and cost B*T*S bytes
        return flex_attend(q_index, S, doc_ids, reach)

    mask = (q_index[:, None] >= k_index)[None]
    if doc_ids is not None:
        mask = mask & (doc_ids[:, q_index, None] == doc_ids[:, None, :])
    if reach is not None:
        mask = mask & (q_index[:, None] - k_index < reach[:, :, None])
    mask = mask[:, None]  # (B or 1, 1, T, S), made once and shared by all layers
    return lambda q, k, v, scale=None, sinks=None: sdpa(q, k, v, mask, scale=scale, sinks=sinks)


def flex_attend(q_index: Tensor, S: int, doc_ids: Tensor | None, reach: Tensor | None):
    """causal_attention on a GPU, by FlexAttention."""
    rows = 1 if doc_ids is None else len(doc_ids)
    if reach is not None and len(reach) > 1:
        rows = len(reach)

    def may_look(b, h, q, k):
        seen = q_index[q] >= k
        if doc_ids is not None:
            seen = seen & (doc_ids[b, q_index[q]] == doc_ids[b, k])
        if reach is not None:
            seen = seen & (q_index[q] - k < reach[b if len(reach) > 1 else 0, q])
        return seen

    block_mask = compiled_block_mask()(may_look, rows, None, len(q_index), S, device=q_index.device)

    def attend(q, k, v, scale=None, sinks=None):
        options = dict(block_mask=block_mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
        if sinks is None:
            return compiled_flex_attention()(q, k, v, **options)
        out, total = compiled_flex_attention()(q, k, v, return_lse=True, **options)  # total (B, H, T): log of the softmax's sum
        return out * torch.sigmoid(total - sinks[:, None])[..., None].to(out.dtype)  # the share that the sink leaves

    return attend


def lower_right_mask(T: int, S: int, device: torch.device):
    """The mask of T queries that are the last T of S positions: a causal triangle in the lower right corner of (T, S)."""
    if device.type == "cuda":  # takes no memory: it only tells the flash kernel where the triangle is
        from torch.nn.attention.bias import causal_lower_right

        return causal_lower_right(T, S)
    return torch.ones(T, S, dtype=torch.bool, device=device).tril(S - T)
