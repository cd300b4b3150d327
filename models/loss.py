"""Cross-entropy of a linear head, without ever holding all logits in fp32.

N tokens (B*T), D dim, V vocab (V/tp on this rank under vocab parallelism)

The logits of N = 16,384 tokens over V = 128,256 words take 8.4 GB in fp32, their gradient as much
again: more than the 8B model's activations. So the forward computes the head's matmul, the loss and
both gradients together, a chunk of tokens at a time, and keeps the gradients for the backward.
torch's own `F.linear_cross_entropy` (2.13) sums in bf16 and refuses DTensor weights.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # label of a token without a loss, as in F.cross_entropy


# Most logits per chunk: in fp32 4 MiB on a CPU, which stay in its caches, 1 GiB on a GPU. With
# smaller chunks a GPU would spend as much time on adding up the head's gradient as on the head's
# matmuls.
CHUNK_ELEMENTS = {"cpu": 2**20, "cuda": 2**28, "meta": 2**28}


def rows_per_chunk(h: Tensor, weight: Tensor) -> int:
    """Split h into as few equal chunks as CHUNK_ELEMENTS allows. The number of rows is a multiple
    of 256, the tile size of a GPU's matmuls."""
    most = max(256, CHUNK_ELEMENTS[h.device.type] // weight.shape[0] // 256 * 256)
    chunks = max(1, math.ceil(h.shape[0] / most))
    return max(256, math.ceil(h.shape[0] / chunks / 256) * 256)


def add_product(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """total + a @ b in fp32, in the memory of total; with total None a @ b. Of bf16 a and b, too: a
    bf16 total would round away the later chunks."""
    if total is None:
        if a.is_cuda:
            return torch.mm(a, b, out_dtype=torch.float32)
        return (a @ b).float()  # on a CPU no matmul of bf16 returns fp32
    if a.is_cuda:  # a single kernel, adding in fp32 registers
        return torch.addmm(total, a, b, out_dtype=torch.float32, out=total)
    return total.add_(a @ b)


def no_reduce(x: Tensor, op: str) -> Tensor:
    """The all_reduce of a process with the whole vocabulary: nothing to reduce."""
    return x


def softmax_loss(
    h: Tensor,
    weight: Tensor,
    labels: Tensor,
    all_reduce: Callable,
    vocab_start: int,
    out: Tensor | None,
) -> Tensor:
    """Sum of a chunk's losses in fp32. out (n, V): filled with the gradient of the sum by the
    logits. Compiled by --compile."""
    V = weight.shape[0]
    compiled = torch.compiler.is_compiling()
    if compiled or out is None:
        logits = F.linear(h, weight)  # (n, V)
    else:  # in the memory of their gradient; a compiled kernel would copy the gradient there
        logits = torch.mm(h, weight.T, out=out)
    valid = labels != IGNORE
    local = labels - vocab_start
    # the label's logit is on this rank; always False for IGNORE
    on_rank = (local >= 0) & (local < V)
    local = torch.where(on_rank, local, 0)[:, None]
    target = logits.gather(1, local)[:, 0].float()
    top = all_reduce(logits.amax(1).float(), "max")
    exp = (logits - top[:, None]).exp_()  # in fp32, as top is
    # two sums in a single all-reduce: exp over the vocabulary, and the label's logit (0 on ranks
    # without the label)
    sums = all_reduce(torch.stack([exp.sum(1), torch.where(on_rank, target, 0.0)]), "sum")
    if out is not None:  # softmax - one_hot(label); zero for a token without a loss
        total = torch.where(valid, sums[0], torch.inf)
        if compiled:  # the subtraction joins the only pass over the logits
            one_hot = (torch.arange(V, device=h.device) == local) & on_rank[:, None]
            out.copy_(exp / total[:, None] - one_hot.float())
        else:
            # at the label, too, the subtraction comes before the rounding
            torch.div(exp, total[:, None], out=out)
            at_label = (target - top).exp() / total - on_rank.float()
            out.scatter_(1, local, at_label.to(out.dtype)[:, None])
    return torch.where(valid, sums[0].log() + top - sums[1], 0.0).sum()


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, weight, labels, all_reduce, vocab_start, kernel, gradient):
        wants_h = gradient and ctx.needs_input_grad[0]
        wants_w = gradient and ctx.needs_input_grad[1]
        N, D = h.shape
        rows = rows_per_chunk(h, weight)
        # Up to 2 D tokens: the gradient of all logits needs no more memory than the head's gradient
        # in fp32, to which every chunk would add its part. So one matmul computes the head's
        # gradient, and no sum is read and written.
        at_once = wants_w and N <= max(rows, 2 * D)
        total = h.new_zeros((), dtype=torch.float32)
        dh = None
        if wants_h:
            dh = torch.empty_like(h)
        dw = None
        dlogits = None
        out = None
        if wants_h or wants_w:
            dlogits = h.new_empty(N if at_once else rows, len(weight))
        for begin in range(0, N, rows):
            hc = h[begin : begin + rows]  # (n, D)
            if dlogits is not None:
                out = dlogits[begin % len(dlogits) :][: len(hc)]  # (n, V)
            total += kernel(hc, weight, labels[begin : begin + rows], all_reduce, vocab_start, out)
            if out is None:
                continue  # no gradient is wanted
            if dh is not None:
                torch.mm(out, weight, out=dh[begin : begin + rows])
            if wants_w and not at_once:
                dw = add_product(dw, out.T, hc)
        if at_once and dlogits is not None:
            dw = dlogits.T @ h
        ctx.save_for_backward(dh, dw)
        ctx.dtype = h.dtype
        return total

    @staticmethod
    def backward(ctx, grad):
        scaled = []
        for g in ctx.saved_tensors:  # of h and of the weight
            if g is not None:
                # grad[None] is no scalar, so that fp32 is multiplied; `out` rounds in the same pass
                g = torch.mul(g, grad[None], out=g.new_empty(g.shape, dtype=ctx.dtype))
            scaled.append(g)
        return *scaled, None, None, None, None, None


def linear_cross_entropy(
    h: Tensor,
    weight: Tensor,
    labels: Tensor,
    denom: Tensor | float | None = None,
    all_reduce: Callable = no_reduce,
    vocab_start: int = 0,
    kernel: Callable = softmax_loss,
) -> Tensor:
    """Sum of the token losses / denom, a scalar in fp32. h (..., D), weight (V, D), labels (...)
    with IGNORE for no loss.

    Under vocab parallelism each rank holds `weight` rows from vocab_start up to vocab_start+V/tp-1
    and passes an `all_reduce(x, op)` over the tp ranks; the gradient of h is then this rank's
    summand. denom None: no division.
    """
    # ask here: gradients are always off inside a Function
    flat = h.reshape(-1, h.shape[-1])
    gradient = torch.is_grad_enabled()
    total = LinearCrossEntropy.apply(
        flat, weight, labels.reshape(-1), all_reduce, vocab_start, kernel, gradient
    )
    return total if denom is None else total / denom


# Logit of ids unknown to the tokenizer, in sampling and in training alike: probability 0, gradient
# 0. Finite, because 0 * -inf in the entropy would be NaN.
NEVER = -1e30


def log_normalizer(logits: Tensor, all_reduce: Callable = no_reduce) -> Tensor:
    """log sum exp over the vocabulary, (n,) from fp32 logits (n, V/tp). The generator and the
    trainer of grpo.py share this
    function: a difference in rounding would look like a difference between policies."""
    top = all_reduce(logits.amax(-1), "max")
    return top + all_reduce((logits - top[:, None]).exp_().sum(-1), "sum").log()


class TokenLogprobs(torch.autograd.Function):
    """Like LinearCrossEntropy, for losses with a weight per token. The weights are known only after
    the forward, so the backward computes each chunk's logits again."""

    @staticmethod
    def chunks(h, weight, labels, temperature, vocab_start, unknown):
        """Yields (rows, fp32 logits (n, V/tp) at the temperature, index of the label (n, 1), label
        on this rank? (n))."""
        V = weight.shape[0]
        size = rows_per_chunk(h, weight)
        for begin in range(0, h.shape[0], size):
            rows = slice(begin, begin + size)
            local = labels[rows] - vocab_start
            on_rank = (local >= 0) & (local < V)
            logits = F.linear(h[rows], weight).float().div_(temperature)
            if unknown is not None:
                here = unknown - vocab_start
                logits.index_fill_(1, here[(here >= 0) & (here < V)], NEVER)
            yield rows, logits, torch.where(on_rank, local, 0)[:, None], on_rank

    @staticmethod
    def forward(ctx, h, weight, labels, temperature, all_reduce, vocab_start, unknown):
        logprobs = h.new_empty(h.shape[0], dtype=torch.float32)
        entropy = torch.empty_like(logprobs)
        lse = torch.empty_like(logprobs)
        for rows, logits, index, on_rank in TokenLogprobs.chunks(
            h, weight, labels, temperature, vocab_start, unknown
        ):
            lse[rows] = log_normalizer(logits, all_reduce)
            target = all_reduce(torch.where(on_rank, logits.gather(1, index)[:, 0], 0.0), "sum")
            logprobs[rows] = target - lse[rows]
            # of the log p that the backward computes: where one token has almost all probability,
            # the rounding of lse is as large as the entropy, and cancels in log p + entropy
            logp = logits.sub_(lse[rows, None])
            p = logp.exp()
            entropy[rows] = -all_reduce(logp.mul_(p).sum(1), "sum")
        ctx.save_for_backward(h, weight, labels, lse, entropy)
        ctx.options = temperature, vocab_start, unknown
        # the gradient of an output without a use is None, not zeros: most losses use no entropy
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    def backward(ctx, grad, entropy_grad):
        h, weight, labels, lse, entropy = ctx.saved_tensors
        if grad is None:
            grad = torch.zeros_like(lse)
        dh = torch.empty_like(h)
        dw = None
        for rows, logits, index, on_rank in TokenLogprobs.chunks(h, weight, labels, *ctx.options):
            logp = logits.sub_(lse[rows, None])
            if entropy_grad is not None:
                # -d entropy / d logit = p (log p + entropy) / temperature
                fall = (logp + entropy[rows, None]).mul_(logp.exp())
                fall.mul_(entropy_grad[rows, None])
            # d logprob / d logit = (one_hot(label) - softmax) / temperature
            dlogits = logp.exp_().neg_().scatter_add_(1, index, on_rank.float()[:, None])
            dlogits.mul_(grad[rows, None])
            if entropy_grad is not None:
                dlogits.sub_(fall)
            dlogits = dlogits.div_(ctx.options[0]).to(h.dtype)
            torch.mm(dlogits, weight, out=dh[rows])
            if ctx.needs_input_grad[1]:
                dw = add_product(dw, dlogits.T, h[rows])
        if dw is not None:
            dw = dw.to(weight.dtype)
        return dh, dw, None, None, None, None, None


def token_logprobs(
    h: Tensor,
    weight: Tensor,
    labels: Tensor,
    temperature: float = 1.0,
    all_reduce: Callable = no_reduce,
    vocab_start: int = 0,
    unknown: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(log-probability of each label, entropy of each token's distribution), both fp32 and shaped
    like labels (...), both with a gradient. h (..., D), weight (V, D); every label must be a
    token, not IGNORE. Vocab parallelism as in linear_cross_entropy. unknown: ids with probability
    0, see NEVER."""
    flat = h.reshape(-1, h.shape[-1])
    logprobs, entropy = TokenLogprobs.apply(
        flat, weight, labels.reshape(-1), temperature, all_reduce, vocab_start, unknown
    )
    # clone: FSDP's hooks cannot work on views
    logprobs = logprobs.reshape(labels.shape).clone()
    entropy = entropy.reshape(labels.shape).clone()
    return logprobs, entropy
