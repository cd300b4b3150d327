"""Exercise 4, by hand: a feed-forward layer whose matrices are split over the ranks of a group (tensor parallelism)."""
import torch
import torch.distributed as dist
import torch.nn.functional as F


def split_weights(w1, w3, w2, rank: int, tp: int):
    """The parts of rank `rank` of tp: F/tp of the rows of w1 and w3 (F, D), and the columns of w2 (D, F) that fit."""
    return w1.chunk(tp, 0)[rank], w3.chunk(tp, 0)[rank], w2.chunk(tp, 1)[rank]


class Enter(torch.autograd.Function):
    """Before the column-parallel matrices: every rank has the same x, and nothing has to travel in the forward."""

    @staticmethod
    def forward(ctx, x, group):
        """x (N, D), returned as it is."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        """grad (N, D): what this rank's channels say about x. Returns the gradient of x, equal on all ranks, and None."""
        grad = grad.clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class Leave(torch.autograd.Function):
    """Behind the row-parallel matrix: each rank has a summand of the result."""

    @staticmethod
    def forward(ctx, y, group):
        """y (N, D), another one on each rank. Returns their sum, on every rank."""
        y = y.clone()
        dist.all_reduce(y, group=group)
        return y

    @staticmethod
    def backward(ctx, grad):
        """grad (N, D): of the loss, which all ranks compute alike, by the sum. Returns the gradient of this rank's y, None."""
        return grad, None


def ffn(x, w1, w3, w2, group):
    """SwiGLU, w2(silu(w1 x) * w3 x), from this rank's parts of the matrices, as split_weights gives them.

    x (N, D) is the same on all ranks of the group, and so is the result (N, D). All ranks then compute the same loss with it.
    The gradient of x must be whole on every rank, and that of a part of a matrix the part of its gradient.
    """
    x = Enter.apply(x, group)
    hidden = F.silu(F.linear(x, w1)) * F.linear(x, w3)  # (N, F/tp)
    return Leave.apply(F.linear(hidden, w2), group)
