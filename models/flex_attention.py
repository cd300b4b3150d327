"""FlexAttention, compiled: attention on a GPU with document masks or windows. Only such runs load this
file."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor


def compile_each_shape(function: Callable, **options: Any) -> Callable:
    """Compile once per shape, and once more without gradients. After 8 compilations torch would
    only warn and run the function
    uncompiled: FlexAttention then writes all T x T scores. The packed samples of grpo.py have more
    than 8 shapes."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 128)
    return torch.compile(function, dynamic=False, **options)


@cache
def compiled_flex_attention() -> Callable:
    """FlexAttention, compiled once per process. Uncompiled, FlexAttention is slow and holds all
    scores."""
    from torch._inductor import config
    from torch.nn.attention.flex_attention import flex_attention

    # --ac op keeps or recomputes each operator. Without this option the compiled kernel is
    # invisible and always recomputed.
    visible = None
    if hasattr(config, "wrap_inductor_compiled_regions"):
        visible = {"wrap_inductor_compiled_regions": True}
    return compile_each_shape(flex_attention, options=visible)


@cache
def compiled_block_mask() -> Callable:
    """create_block_mask, compiled to write only blocks; uncompiled it writes the whole mask (B, T,
    S), 10 GiB at 32k tokens."""
    from torch.nn.attention.flex_attention import create_block_mask

    return compile_each_shape(create_block_mask)


def flex_attend(
    q_index: Tensor, S: int, doc_ids: Tensor | None, reach: Tensor | None
) -> Callable[..., Tensor]:
    """causal_attention on a GPU, by FlexAttention."""
    rows = 1  # of the block mask: B where the mask is not the same for all sequences
    for numbers in (doc_ids, reach):
        if numbers is not None:
            rows = max(rows, len(numbers))

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
        # total (B, H, T): log of the softmax's sum
        out, total = compiled_flex_attention()(q, k, v, return_lse=True, **options)
        # without the sink's share
        return out * torch.sigmoid(total - sinks[:, None])[..., None].to(out.dtype)

    return attend
