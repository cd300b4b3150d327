"""Expert parallelism in which a token travels once to each rank that holds some of its experts, and
not once to each expert.

In a copy of train_qwen3.py (in one of train_deepseek.py likewise, with models.deepseek):

    import models.qwen3
    from forks.once_per_rank import apply_once

    models.qwen3.apply_experts = apply_once  # after all imports

With k of E experts, spread evenly over R ranks, a token has R (1 - (1 - 1/R)^k) ranks on average:
5.25 in place of 8 for 8 of 128 experts on 8 ranks, 7.2 on 32. The rank of an expert copies the
token, weighs the results and adds them up, so a sum travels home. The price: weights must be known
before tokens travel, and rows have unequally many copies. Nothing is cut into two parts, so no
expert computes while rows travel; distributed/experts.py does that. benchmarks/RESULTS.md has both
beside each other.

N tokens on this rank, D dim, k experts per token, M rows that arrive, K copies of them, n experts
on a rank
"""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.autograd.function import once_differentiable

from distributed.exchange import Arrive, Depart
from distributed.layout import AllToAll, local_tensor
from models.moe import apply_experts


def pick(x: Tensor, row: Tensor) -> Tensor:
    """x[row]: row i of x in any number of copies, at least one."""
    order = row.argsort(stable=True)
    return Pick.apply(
        x, row, order, torch.searchsorted(row[order], torch.arange(len(x), device=row.device))
    )


def add_up(y: Tensor, row: Tensor, n_rows: int) -> Tensor:
    """(n_rows, D): row i is the sum of all y[j] with row[j] = i."""
    order = row.argsort(stable=True)
    return AddUp.apply(
        y, row, order, torch.searchsorted(row[order], torch.arange(n_rows, device=row.device))
    )


def sum_bags(y: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """Row i is the sum of y[order[j]] for j from starts[i] on: F.embedding_bag adds in fp32, in the
    same order in every run."""
    return (
        F.embedding_bag(order, y, starts, mode="sum") if len(starts) else y.new_zeros(0, y.shape[1])
    )


class Pick(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, row, order, starts):
        ctx.save_for_backward(order, starts)
        return x.index_select(0, row)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return sum_bags(grad, *ctx.saved_tensors), None, None, None


class AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, row, order, starts):
        ctx.save_for_backward(row)
        return sum_bags(y, order, starts)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad.index_select(0, *ctx.saved_tensors), None, None, None


def apply_once(
    experts, x: Tensor, index: Tensor, weight: Tensor, counts: Tensor, shared=None
) -> Tensor:
    """models.moe.apply_experts, which also says what is what."""
    exchange = experts.forward  # a partial of exchange_tokens, if expert_parallel has set it
    if not isinstance(exchange, partial) or dist.get_world_size(exchange.args[1]) == 1:
        return apply_experts(experts, x, index, weight, counts, shared)
    if isinstance(x, FakeTensor):
        raise ValueError(
            "a dry run does not know how many rows travel once per rank; leave apply_once out for "
            "it"
        )
    experts.forward = partial(travel_once, *exchange.args)
    for_every_token = shared and partial(shared, x)
    return experts(x.flatten(0, -2), index, weight, counts, for_every_token).view_as(x)


def travel_once(
    experts, group, x: Tensor, index: Tensor, weight: Tensor, counts: Tensor, shared
) -> Tensor:
    """Experts.forward over ep ranks, x (N, D) -> (N, D). Called as a module, so that FSDP's hooks
    gather the weights."""
    ranks = dist.get_world_size(group)
    n, (N, k) = len(counts) // ranks, index.shape
    # (ranks, N)
    goes = torch.zeros(N, ranks, dtype=torch.bool, device=x.device).scatter_(1, index // n, True).T
    # copies for each expert, rows for the rank
    counts = torch.cat([counts.view(ranks, n), goes.sum(1, keepdim=True)], 1)
    arriving = AllToAll.apply(counts.flatten(), group).view(ranks, n + 1)  # from each rank
    # the host waits here, once per layer, for the sizes
    sent, received, copies = torch.stack(
        [counts[:, n], arriving[:, n], arriving[:, :n].sum(1)]
    ).tolist()
    # rank by rank the tokens that go there
    token = (~goes).flatten().byte().argsort(stable=True)[: sum(sent)] % N
    choices = Depart.apply(
        pick(torch.cat([weight, index.float()], 1), token), group, sent, received
    )
    travelling = Depart.apply(pick(x, token), group, sent, received)
    for_every_token = shared().flatten(0, -2) if shared else 0
    # (M, k) each, in fp32, before the rows
    weight, expert = Arrive.apply(*choices, group, sent, received).split(k, 1)
    expert = expert.long() - n * dist.get_rank(group)
    expert = torch.where((expert < 0) | (expert >= n), n, expert)  # of other ranks: after ours
    order = expert.flatten().short().argsort(stable=True)[: sum(copies)]
    row = order // k  # (K,) of the rows that arrive, expert by expert
    rows = Arrive.apply(*travelling, group, sent, received)
    y = experts.compute(
        pick(rows, row),
        weight.flatten()[order],
        arriving[:, :n].sum(0),
        *(local_tensor(w) for w in experts.parameters()),
    )
    y = add_up(y, row, len(rows))
    return add_up(AllToAll.apply(y, group, received, sent), token, N) + for_every_token
