"""The two halves of an exchange of tokens, with work in between while the rows travel. Only runs with
experts load this file."""

import torch
from torch.autograd.function import once_differentiable

from distributed.layout import functional, start_exchange


class Depart(torch.autograd.Function):
    """AllToAll in two halves, Arrive.apply(*Depart.apply(x, *sizes), *sizes) with sizes (group,
    sent, received). Work between the halves runs while rows travel. In the backward Arrive sends
    the gradient, and Depart waits for it: autograd goes back in the reverse order, so the backward
    of the same work runs in between."""

    @staticmethod
    def forward(ctx, x, group, sent, received):
        """Returns x, and the rows on the way in a list, where autograd does not see them."""
        return x.view_as(x), [start_exchange(x, group, sent, received)]

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        return functional.wait_tensor(grad), None, None, None


class Arrive(torch.autograd.Function):
    """The second half of the exchange that Depart starts."""

    @staticmethod
    def forward(ctx, x, rows, group, sent, received):
        ctx.given = group, received, sent
        return functional.wait_tensor(*rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return start_exchange(grad, *ctx.given), None, None, None, None
