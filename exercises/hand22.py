"""Exercise 22, by hand: experts with a capacity. Each computes equally many rows, and tokens that
find no room are dropped (GShard, arXiv:2006.16668, section 2.2; Switch Transformer,
arXiv:2101.03961, section 2.2)."""

import math

import torch
from torch.nn import functional as F


def capacity_of(tokens: int, n_experts: int, top_k: int, factor: float) -> int:
    """Rows in the buffer of an expert: those that it would get if all experts got equally many,
    times factor, rounded up."""
    return math.ceil(factor * tokens * top_k / n_experts)


def places(scores, top_k: int, capacity: int):
    """scores (T, E) -> experts (T, top_k), each token's best experts, the best first; rows (T,
    top_k), the row of the token in the buffer of that expert, or -1 where the choice is dropped
    because `capacity` rows are taken.

    Rows are given to the first choices of all tokens, in the order of the tokens; then to the
    second choices, and so on.
    """
    experts = scores.topk(top_k, dim=1).indices
    # (top_k * T, E): all first choices, then all second choices
    chosen = F.one_hot(experts.T.flatten(), scores.shape[1])
    rows = (chosen.cumsum(0) * chosen).sum(1) - 1  # how many have chosen this expert before
    rows = rows.view(top_k, -1).T
    return experts, torch.where(rows < capacity, rows, -1)


def moe(x, scores, top_k: int, capacity: int, compute):
    """x (T, D), scores (T, E) -> (T, D): for each token the sum of score times result over its
    choices that are not dropped. A token without any gets 0: only the residual connection carries
    it on. Gradients reach x and scores.

    compute(buffers (E, capacity, D)) runs all experts, and returns the same shape. Rows that no
    token has are 0.
    """
    experts, rows = places(scores, top_k, capacity)
    token, choice = (rows >= 0).nonzero(as_tuple=True)  # of each row that is taken
    expert = experts[token, choice]
    row = rows[token, choice]
    buffers = x.new_zeros(scores.shape[1], capacity, x.shape[1]).index_put((expert, row), x[token])
    results = compute(buffers)[expert, row] * scores[token, expert, None]
    return torch.zeros_like(x).index_add(0, token, results)
