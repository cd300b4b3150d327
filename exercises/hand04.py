"""Exercise 4, by hand: a feed-forward layer with matrices split over the ranks of a group (tensor
parallelism)."""

import torch
import torch.distributed as dist
import torch.nn.functional as F


def split_weights(w1, w3, w2, rank: int, tp: int):
    """(w1, w3, w2) of rank `rank` of tp: F/tp rows of w1 and w3 (F, D), and the matching columns of
    w2 (D, F)."""
    return w1.chunk(tp, 0)[rank], w3.chunk(tp, 0)[rank], w2.chunk(tp, 1)[rank]


class Enter(torch.autograd.Function):
    """Stands before the column-parallel matrices. Every rank has the same x, so the forward sends
    nothing."""

    @staticmethod
    def forward(ctx, x, group):
        """Returns x (N, D) unchanged."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        """grad (N, D): gradient of x through this rank's channels. Returns the whole gradient of x,
        equal on all ranks, and None."""
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    """Stands after the row-parallel matrix. Each rank has a summand of the result."""

    @staticmethod
    def forward(ctx, y, group):
        """y (N, D): this rank's summand. Returns the sum over the ranks, on every rank."""
        y = y.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx, grad):
        """grad (N, D): gradient of the loss by the sum; all ranks compute the same loss. Returns
        the gradient of this rank's y, and None."""
        return grad, None


def ffn(x, w1, w3, w2, group):
    """SwiGLU, w2(silu(w1 x) * w3 x), with this rank's parts of the matrices (split_weights).

    x (N, D) and the result (N, D) are the same on all ranks of the group, and so is the loss
    computed from the result. Every rank must end with the whole gradient of x. The gradient of a
    matrix part is the same part of the matrix's gradient.
    """
    x = Enter.apply(x, group)
    hidden = F.silu(F.linear(x, w1)) * F.linear(x, w3)  # (N, F/tp)
    return Leave.apply(F.linear(hidden, w2), group)
