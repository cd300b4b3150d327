"""Cross-entropy of a linear head, without ever holding all logits in fp32.

N tokens (B*T), D dim, V vocab (V/tp on this rank under vocab parallelism)

The logits of N = 16,384 tokens over V = 128,256 words take 8.4 GB in fp32, their gradient as much again: more than
the 8B model's activations. So the forward computes the head's matmul, the loss and both gradients together, a chunk
of tokens at a time, and keeps the gradients for the backward. torch's own `F.linear_cross_entropy` (2.13) sums in
bf16 and refuses DTensor weights.
"""
import math

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # label of a token without a loss, as in F.cross_entropy


# Most logits per chunk: in fp32 64 MiB on a CPU, 1 GiB on a GPU. With smaller chunks a GPU would spend as much time on adding
# up the head's gradient as on the head's matmuls.
CHUNK_ELEMENTS = {"cpu": 2**24, "cuda": 2**28, "meta": 2**28}


def rows_per_chunk(h: Tensor, weight: Tensor) -> int:
    """Split h into as few equal chunks as CHUNK_ELEMENTS allows. The number of rows is a multiple of 256, the tile size of a
    GPU's matmuls."""
    most = max(256, CHUNK_ELEMENTS[h.device.type] // weight.shape[0] // 256 * 256)
    chunks = max(1, math.ceil(h.shape[0] / most))
    return max(256, math.ceil(h.shape[0] / chunks / 256) * 256)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b in fp32, for bf16 a and b as well: a bf16 total would round away the later chunks."""
    if total.is_cuda:  # a single kernel, adding in fp32 registers; on a CPU no matmul of bf16 returns fp32
        torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    else:
        total.add_(a @ b)


def no_reduce(x: Tensor, op: str) -> Tensor:
    """The all_reduce of a process with the whole vocabulary: nothing to reduce."""
    return x


def softmax_loss(h: Tensor, weight: Tensor, labels: Tensor, all_reduce, vocab_start: int, gradient: bool):
    """(sum of a chunk's losses in fp32, gradient of the sum by the logits (n, V) or None). Compiled by --compile."""
    V = weight.shape[0]
    logits = F.linear(h, weight).float()  # (n, V)
    valid = labels != IGNORE
    local = labels - vocab_start
    mine = (local >= 0) & (local < V)  # the label's logit is on this rank; always False for IGNORE
    local = torch.where(mine, local, 0)[:, None]
    target = logits.gather(1, local)[:, 0]
    top = all_reduce(logits.amax(1), "max")
    exp = logits.sub_(top[:, None]).exp_()
    # two sums in a single all-reduce: exp over the vocabulary, and the label's logit (0 on ranks without the label)
    sums = all_reduce(torch.stack([exp.sum(1), torch.where(mine, target, 0.0)]), "sum")
    loss = torch.where(valid, sums[0].log() + top - sums[1], 0.0).sum()
    if not gradient:
        return loss, None
    # softmax - one_hot(label); zero for a token without a loss
    dlogits = exp.div_(torch.where(valid, sums[0], torch.inf)[:, None])
    if torch.compiler.is_compiling():  # compiled, the subtraction joins the only pass over the logits; a scatter adds a second
        dlogits = dlogits - ((torch.arange(V, device=h.device) == local) & mine[:, None]).float()
    else:
        dlogits.scatter_add_(1, local, -mine.float()[:, None])
    return loss, dlogits.to(h.dtype)


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight, labels, all_reduce, vocab_start, kernel, gradient):
        wants_h, wants_w = (gradient and needed for needed in ctx.needs_input_grad[:2])
        rows = rows_per_chunk(h, weight)
        total = h.new_zeros((), dtype=torch.float32)
        dh = torch.empty_like(h) if wants_h else None
        dw = torch.zeros_like(weight, dtype=torch.float32) if wants_w and rows < h.shape[0] else None
        for begin in range(0, h.shape[0], rows):
            hc = h[begin : begin + rows]  # (n, D)
            loss, dlogits = kernel(hc, weight, labels[begin : begin + rows], all_reduce, vocab_start, wants_h or wants_w)
            total += loss
            if wants_h:
                torch.mm(dlogits, weight, out=dh[begin : begin + rows])
            if wants_w and rows < h.shape[0]:
                add_product(dw, dlogits.T, hc)
            elif wants_w:  # the only chunk
                dw = dlogits.T @ hc
        ctx.save_for_backward(dh, dw if dw is None else dw.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx, grad):
        scaled = [None if g is None else g * grad.to(g.dtype) for g in ctx.saved_tensors]
        return *scaled, None, None, None, None, None


def linear_cross_entropy(
    h: Tensor, weight: Tensor, labels: Tensor, denom=None, all_reduce=no_reduce, vocab_start=0, kernel=softmax_loss
) -> Tensor:
    """Sum of the token losses / denom, a scalar in fp32. h (..., D), weight (V, D), labels (...) with IGNORE for no loss.

    Under vocab parallelism each rank holds `weight` rows from vocab_start up to vocab_start+V/tp-1 and passes an
    `all_reduce(x, op)` over the tp ranks; the gradient of h is then this rank's summand. denom None: no division.
    """
    flat, gradient = h.reshape(-1, h.shape[-1]), torch.is_grad_enabled()  # ask here: gradients are always off inside a Function
    total = LinearCrossEntropy.apply(flat, weight, labels.reshape(-1), all_reduce, vocab_start, kernel, gradient)
    return total if denom is None else total / denom


# Logit of ids unknown to the tokenizer, in sampling and in training alike: probability 0, gradient 0. Finite, because
# 0 * -inf in the entropy would be NaN.
NEVER = -1e30


def log_normalizer(logits: Tensor, all_reduce=no_reduce) -> Tensor:
    """log sum exp over the vocabulary, (n,) from fp32 logits (n, V/tp). The generator and the trainer of grpo.py share this
    function: a difference in rounding would look like a difference between policies."""
    top = all_reduce(logits.amax(-1), "max")
    return top + all_reduce((logits - top[:, None]).exp().sum(-1), "sum").log()


class TokenLogprobs(torch.autograd.Function):
    """Like LinearCrossEntropy, for losses with a weight per token. The weights are known only after the forward, so the
    backward computes each chunk's logits again."""

    @staticmethod
    def chunks(h, weight, labels, temperature, vocab_start, unknown):
        """Yields (rows, fp32 logits (n, V/tp) at the temperature, index of the label (n, 1), label on this rank? (n))."""
        V, size = weight.shape[0], rows_per_chunk(h, weight)
        for begin in range(0, h.shape[0], size):
            rows = slice(begin, begin + size)
            local = labels[rows] - vocab_start
            mine = (local >= 0) & (local < V)
            logits = F.linear(h[rows], weight).float().div_(temperature)
            if unknown is not None:
                here = unknown - vocab_start
                logits.index_fill_(1, here[(here >= 0) & (here < V)], NEVER)
            yield rows, logits, torch.where(mine, local, 0)[:, None], mine

    @staticmethod
    def forward(ctx, h, weight, labels, temperature, all_reduce, vocab_start, unknown):
        logprobs, entropy, lse = (h.new_empty(h.shape[0], dtype=torch.float32) for _ in range(3))
        for rows, logits, index, mine in TokenLogprobs.chunks(h, weight, labels, temperature, vocab_start, unknown):
            lse[rows] = log_normalizer(logits, all_reduce)
            target = all_reduce(torch.where(mine, logits.gather(1, index)[:, 0], 0.0), "sum")
            logprobs[rows] = target - lse[rows]
            p = (logits - lse[rows, None]).exp()
            entropy[rows] = lse[rows] - all_reduce(logits.mul_(p).sum(1), "sum")
        ctx.save_for_backward(h, weight, labels, lse)
        ctx.options = temperature, vocab_start, unknown
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, _):
        h, weight, labels, lse = ctx.saved_tensors
        dh, dw = torch.empty_like(h), torch.zeros_like(weight, dtype=torch.float32) if ctx.needs_input_grad[1] else None
        for rows, logits, index, mine in TokenLogprobs.chunks(h, weight, labels, *ctx.options):
            # d logprob / d logit = (one_hot(label) - softmax) / temperature
            dlogits = logits.sub_(lse[rows, None]).exp_().neg_().scatter_add_(1, index, mine.float()[:, None])
            dlogits = dlogits.mul_(grad[rows, None] / ctx.options[0]).to(h.dtype)
            torch.mm(dlogits, weight, out=dh[rows])
            if dw is not None:
                add_product(dw, dlogits.T, h[rows])
        return dh, dw if dw is None else dw.to(weight.dtype), None, None, None, None, None


def token_logprobs(
    h: Tensor, weight: Tensor, labels: Tensor, temperature=1.0, all_reduce=no_reduce, vocab_start=0, unknown=None
):
    """(log-probability of each label, entropy of each token's distribution), both fp32 and shaped like labels (...). The
    entropy has no gradient. h (..., D), weight (V, D); every label must be a token, not IGNORE. Vocab parallelism as in
    linear_cross_entropy. unknown: ids with probability 0, see NEVER."""
    flat = h.reshape(-1, h.shape[-1]), weight, labels.reshape(-1)
    flat = TokenLogprobs.apply(*flat, temperature, all_reduce, vocab_start, unknown)
    return tuple(x.reshape(labels.shape).clone() for x in flat)  # clone: FSDP's hooks cannot work on views
