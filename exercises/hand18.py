"""Exercise 18, by hand: ZeRO-1. Every rank holds all weights, and the optimizer's memory for its
part of them only."""

import torch
import torch.distributed as dist

from distributed.layout import all_gather_single, reduce_scatter_single


def adam(weight, grad, first, second, step: int, lr: float):
    """One step of Adam, in place, on weight, first and second moment (any shape, all alike). step
    counts from 1. Written for you."""
    first.lerp_(grad, 0.1)
    second.lerp_(grad * grad, 0.001)
    weight -= lr * (first / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)


def moments(weight, rank: int, n: int):
    """(first, second): the moments that rank `rank` of n begins with, zeros, for its part of weight
    (N,): N/n numbers each. N is a multiple of n."""
    part = weight.chunk(n)[rank]
    return torch.zeros_like(part), torch.zeros_like(part)


def zero1_step(weight, grad, first, second, step: int, lr: float, group):
    """Update weight (N,) in place as adam() would with the sum of the ranks' gradients, and this
    rank's moments (N/n,) with it.

    weight is the same on all ranks before and after. grad (N,): gradient from this rank's
    sequences. A rank may receive the sum of its part only, and computes adam() for its part only;
    then the new parts go to everyone.
    """
    n = dist.get_world_size(group)
    rank = dist.get_rank(group)
    mine = weight.chunk(n)[rank].clone()
    total = torch.empty_like(mine)
    reduce_scatter_single(total, grad.contiguous(), group=group)
    adam(mine, total, first, second, step, lr)
    all_gather_single(weight, mine, group=group)
