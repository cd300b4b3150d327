"""Cross-entropy of a linear head, without ever holding all logits in fp32.

N tokens (B*T), D dim, V vocab (V/tp on this rank under vocab parallelism)

The logits of N = 16,384 tokens over V = 128,256 words take 8.4 GB in fp32, their gradient as much again: more than
the 8B model's activations. So the head's matmul, the loss and both gradients are computed together, a few hundred
tokens at a time, and the gradients are kept from the forward until the backward asks for them. torch's own
`F.linear_cross_entropy` (2.13) sums in bf16 and refuses DTensor weights, hence this one.
"""
import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # a label with this value has no loss, as in F.cross_entropy
CHUNK_ELEMENTS = 2**24  # logits per chunk: 64 MiB in fp32


def alone(x: Tensor, op: str) -> Tensor:
    """One process holds the whole vocabulary: nothing to reduce."""
    return x


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight, labels, all_reduce, vocab_start):
        wants_h, wants_w = ctx.needs_input_grad[:2]
        V = weight.shape[0]
        rows = max(256, CHUNK_ELEMENTS // V)
        total = h.new_zeros((), dtype=torch.float32)
        dh = torch.empty_like(h) if wants_h else None
        dw = torch.zeros_like(weight, dtype=torch.float32) if wants_w else None
        for begin in range(0, h.shape[0], rows):
            hc, yc = h[begin : begin + rows], labels[begin : begin + rows]  # (n, D), (n)
            valid = yc != IGNORE
            local = yc - vocab_start
            mine = valid & (local >= 0) & (local < V)  # the label's logit is on this rank
            local = torch.where(mine, local, 0)[:, None]
            logits = F.linear(hc, weight).float()  # (n, V)
            target = logits.gather(1, local)[:, 0]
            top = all_reduce(logits.amax(1), "max")
            exp = logits.sub_(top[:, None]).exp_()
            # one reduction for two sums: of exp over the vocabulary, and of the logit that exactly one rank has
            sums = all_reduce(torch.stack([exp.sum(1), torch.where(mine, target, 0.0)]), "sum")
            total += torch.where(valid, sums[0].log() + top - sums[1], 0.0).sum()
            if wants_h or wants_w:
                dlogits = exp.div_(sums[0][:, None])  # softmax - one_hot(label), zero where there is no loss
                dlogits.scatter_add_(1, local, -mine.float()[:, None])
                dlogits = dlogits.mul_(valid[:, None]).to(h.dtype)
                if wants_h:
                    torch.mm(dlogits, weight, out=dh[begin : begin + rows])
                if wants_w:
                    dw += dlogits.T @ hc  # fp32 sum over chunks: in bf16 the later chunks would be rounded away
        ctx.save_for_backward(dh, dw.to(weight.dtype) if wants_w else None)
        return total

    @staticmethod
    def backward(ctx, grad):
        dh, dw = ctx.saved_tensors
        scale = lambda g: None if g is None else g * grad.to(g.dtype)  # noqa: E731
        return scale(dh), scale(dw), None, None, None


def linear_cross_entropy(h: Tensor, weight: Tensor, labels: Tensor, denom=None, all_reduce=alone, vocab_start=0) -> Tensor:
    """Sum of the token losses / denom, a scalar in fp32. h (..., D), weight (V, D), labels (...) with IGNORE for no loss.

    Under vocab parallelism each rank holds `weight` rows vocab_start .. vocab_start+V/tp and passes an `all_reduce(x, op)`
    over its peers; the gradient of h is then this rank's summand. denom None divides by nothing.
    """
    total = LinearCrossEntropy.apply(h.reshape(-1, h.shape[-1]), weight, labels.reshape(-1), all_reduce, vocab_start)
    return total if denom is None else total / denom
