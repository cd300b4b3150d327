"""Exercise 19, by hand: attention over keys that arrive block by block (online softmax, as
FlashAttention and ring attention do)."""

import torch


def attend_blocks(q, blocks):
    """softmax(q @ k.T / sqrt(K)) @ v over the keys of all blocks, (T, V), without ever having all
    of them.

    q (T, K). blocks: an iterator of (k (S, K), v (S, V), mask (T, S), True for each key that a
    query may see); it can be read once, and blocks have different S. A query may see nothing of a
    block, even of the first; of all blocks together it sees a key. Scores may be so large that
    exp() of them is infinite. No tensor may be larger than T x S of a block, or the result.
    """
    top = q.new_full((q.shape[0], 1), -torch.inf)  # largest score so far
    # sum of exp(score - top), and of the same weights times v
    total = torch.zeros_like(top)
    out = 0.0
    for k, v, mask in blocks:
        scores = (q @ k.T / q.shape[1] ** 0.5).masked_fill(~mask, -torch.inf)
        new = torch.maximum(top, scores.amax(1, keepdim=True))
        # no key seen yet: exp(-inf - 0) is 0, and -inf - -inf would be nan
        safe = torch.where(new.isinf(), 0.0, new)
        weights = (scores - safe).exp()
        shrink = (top - safe).exp()
        total = total * shrink + weights.sum(1, keepdim=True)
        out = out * shrink + weights @ v
        top = new
    return out / total
