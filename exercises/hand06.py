"""Exercise 6, by hand: cross-entropy where each rank has the logits of a part of the vocabulary."""
import torch
import torch.distributed as dist

from models.loss import IGNORE


def token_losses(logits, labels, vocab_start: int, group):
    """(losses (N,), gradient (N, V/tp) of their sum by this rank's logits), of N tokens.

    logits (N, V/tp), fp32: of the words vocab_start .. vocab_start + V/tp. labels (N,), the same on all ranks of the group:
    numbers of words in the whole vocabulary, or IGNORE, whose loss and gradient are 0. The losses are whole on every rank. No
    rank may make a tensor of N x V numbers. There is no autograd here: the gradient is written down, softmax(logits) -
    one_hot(label).
    """
    V = logits.shape[1]
    top = logits.amax(1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    exp = (logits - top[:, None]).exp()
    total = exp.sum(1)
    dist.all_reduce(total, group=group)
    local = labels - vocab_start
    mine = (local >= 0) & (local < V)  # never of IGNORE, which is negative
    index = torch.where(mine, local, 0)[:, None]
    target = torch.where(mine, logits.gather(1, index)[:, 0], 0.0)  # every rank but one adds 0
    dist.all_reduce(target, group=group)
    valid = labels != IGNORE
    losses = torch.where(valid, total.log() + top - target, 0.0)
    gradient = (exp / total[:, None]).scatter_add(1, index, -mine.float()[:, None])
    return losses, torch.where(valid[:, None], gradient, 0.0)
