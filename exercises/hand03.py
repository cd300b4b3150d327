"""Exercise 3, by hand: a linear layer under FSDP. Each rank holds some rows of the weight, and has
sequences of its own."""

import torch
import torch.distributed as dist

from distributed.layout import reduce_scatter_single


def shard_of(weight, rank: int, n: int):
    """The rows (out/n, in) of weight (out, in) for rank `rank` of n, as a copy and not a view. out
    is a multiple of n."""
    return weight.chunk(n)[rank].clone()


def gathered(shard, group):
    """The whole weight (out, in) from the ranks' rows (out/n, in): an all-gather, written for you."""
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, shard.contiguous(), group=group)
    return torch.cat(parts)


class ShardedLinear(torch.autograd.Function):
    """x @ weight.T. The whole weight exists during the forward and again during the backward, but
    not in between."""

    @staticmethod
    def forward(ctx, x, shard, group):
        """x (N, in): this rank's tokens; shard (out/n, in): this rank's rows. Returns (N, out)."""
        ctx.save_for_backward(x, shard)
        ctx.group = group
        return x @ gathered(shard, group).T

    @staticmethod
    def backward(ctx, grad):
        """grad (N, out): gradient of this rank's loss. Returns the gradients of x (N, in), of the
        shard (out/n, in), and None.

        Training minimises the sum of the ranks' losses, so the shard's gradient must include the
        tokens of all ranks.
        """
        x, shard = ctx.saved_tensors
        dx = grad @ gathered(shard, ctx.group)
        dw = grad.T @ x  # (out, in): all rows, from this rank's tokens
        mine = torch.empty_like(shard)
        reduce_scatter_single(mine, dw, group=ctx.group)
        return dx, mine, None
