"""Dropout and stochastic depth that every layout, every recomputation and every continued run
repeat: for a model of your own. docs/fork_me.md, "Random numbers", shows where to call it.

B batch, T sequence
"""

import hashlib

import torch
from torch import Tensor


def dropout(
    x: Tensor, p: float, places: Tensor | None, key: str, whole_sequences: bool = False
) -> Tensor:
    """Set each number of x (B, T, ...) to 0 with probability p, and divide the others by 1 - p
    (arXiv:1207.0580).
    whole_sequences: keep or drop whole sequences (stochastic depth, arXiv:1603.09382). Without
    places, as in validation, x is
    returned unchanged.

    places (B, T): a number that identifies each token; parallel.inputs passes it to a forward with
    an argument `places`. key: a different text at each call, such as "3.ffn". Only places and key
    decide the numbers to drop: every layout, every recomputation by activation checkpointing and
    every resumed run drops the same. Use it on the residual stream or on a block's summand to the
    stream. Inside attention, under tp, a rank has other tokens than places: raises ValueError if
    the shapes show this.
    """
    if places is None and p and torch.is_grad_enabled() and not x.is_meta:
        raise ValueError(
            "dropout without places in training: the model's forward needs an argument `places`, "
            "see 'Random "
            "numbers' in docs/fork_me.md"
        )
    if places is None or p == 0:
        return x
    if places.shape != x.shape[:2]:
        raise ValueError(
            f"dropout: x {tuple(x.shape)} does not begin with the (B, T) of places "
            f"{tuple(places.shape)}"
        )
    size = x[0, 0].numel()
    if whole_sequences:
        places = places[:, :1] >> 24
        size = 1
    bits = places[..., None] + int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little")
    bits = mixed(mixed(bits) + torch.arange(size, device=x.device))  # (B, T, size)
    kept = (bits >> 33 & 0x7FFFFFFF) >= int(p * 2**31)
    if whole_sequences:
        kept = kept[..., 0].view(-1, *[1] * (x.dim() - 1))
    else:
        kept = kept.view(x.shape)
    return torch.where(kept, x / (1 - p), 0)


def mixed(x: Tensor) -> Tensor:
    """int64 -> int64, a bijection that makes near numbers unlike (the finalizer of splitmix64,
    doi:10.1145/2714064.2660195)."""
    x = (x ^ (x >> 30 & 2**34 - 1)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27 & 2**37 - 1)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ (x >> 31 & 2**33 - 1)
