"""Shared by mixture-of-experts models: sorting tokens by expert, the grouped matmul, load counting,
the balancing loss.

N tokens on this rank (B * T/cp/tp), D dim, E experts (E/ep on this rank), k experts per token, F
moe_ffn_dim

Each model chooses in its own way. Its choice is `index` (N, k), the chosen experts, and `weight`
(N, k), the experts' weights. Routing is dropless: every token reaches all k experts, however uneven
the load.
"""

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# None in its place: a matmul per expert, as benchmarks/moe.py compares
grouped_mm = F.grouped_mm


def kernel_fits(x: Tensor, weight: Tensor) -> bool:
    """Whether grouped_mm can multiply x (N, in) with weight (E, out, in): rows must be multiples of
    16 bytes, GPUs have no fp32 kernel, and the backward fails for N = 0 (no token chose an expert
    of this rank)."""
    if grouped_mm is None or len(x) == 0:
        return False
    if x.is_cuda and x.dtype != torch.bfloat16:
        return False
    return all(n * x.element_size() % 16 == 0 for n in weight.shape[1:])


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x (N, in) sorted by expert, weight (E, out, in), counts (E,): rows of x per expert. Returns
    (N, out)."""
    if kernel_fits(x, weight):
        return grouped_mm(x, weight.transpose(1, 2), offs=counts.cumsum(0).to(torch.int32))
    # a matmul per expert: the host waits for the device to learn the sizes
    parts = x.split(counts.tolist())
    return torch.cat([F.linear(part, w) for part, w in zip(parts, weight, strict=True)])


class Experts(nn.Module):
    """E SwiGLU feed-forward networks side by side. distributed.experts.expert_parallel puts an
    exchange of tokens around them.

    Parameters are stacks of E, in the order of `compute`'s arguments. etp_dims: the dimension of
    each stack split by --etp, the hidden width.
    """

    etp_dims = {"w1": 1, "w2": 2, "w3": 1}
    # what rows are sorted by; with --ep not by the expert's number alone
    turn = staticmethod(lambda index: index)

    def __init__(self, n_experts: int, dim: int, ffn_dim: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(n_experts, ffn_dim, dim))
        self.w2 = nn.Parameter(torch.empty(n_experts, dim, ffn_dim))
        self.w3 = nn.Parameter(torch.empty(n_experts, ffn_dim, dim))
        # compiled by parallel.compile_blocks
        self.compute = swiglu_experts
        self.spread = spread
        self.combine = combine

    def forward(self, x: Tensor, weight: Tensor, counts: Tensor, shared=None) -> list[Tensor]:
        """x (N*k, D) sorted by expert, weight (N*k,) and counts (E,) -> the weighted results in the
        same order: [(N*k, D)], or with --ep the rows of each part. shared: see apply_experts."""
        return [self.compute(x, weight, counts, *self.parameters())]


def swiglu_experts(
    x: Tensor,
    weight: Tensor,
    counts: Tensor,
    w1: Tensor,
    w2: Tensor,
    w3: Tensor,
    linear=grouped_linear,
) -> Tensor:
    """weight times w2(silu(w1 x) * w3 x). The weight is applied before w2, to F numbers per row in
    place of D, and the backward then needs no result of w2."""
    hidden = F.silu(linear(x, w1, counts)) * linear(x, w3, counts)  # (N*k, F)
    return linear(hidden * weight[:, None].to(hidden.dtype), w2, counts)


class ScoresFromBf16(torch.autograd.Function):
    """x W^T in fp32 from x (N, D) and W (E, D) in bf16. In the backward the gradient is rounded, as
    in every other linear."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return torch.mm(x, weight.T, out_dtype=torch.float32)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        grad = grad.to(x.dtype)
        return grad @ weight, grad.T @ x


def router_scores(x: Tensor, weight: Tensor) -> Tensor:
    """x (..., D), weight (E, D) -> (..., E), in fp32: rounded to bf16, close scores change places
    and tokens go to other experts."""
    # GPU matmuls add up in fp32 anyway: no copies of x in fp32
    if x.is_cuda and x.dtype == weight.dtype == torch.bfloat16:
        return ScoresFromBf16.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    return F.linear(x.float(), weight.float())


class Router(nn.Module):
    """The weight (E, D) of a layer's scores. What a model makes of the scores stands in the model's
    MoE."""

    def __init__(self, dim: int, n_experts: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_experts, dim))

    def forward(self, x):
        return router_scores(x, self.weight)  # (B, T/cp/tp, E) fp32


class Spread(torch.autograd.Function):
    """x[index], with every row of x k times in the index. places (rows of x, k): the rows of the
    result with the k copies.

    With places, the gradient picks the k copies and adds them up in fp32. torch's own gradient of
    x[index] sorts the index first, and torch's gradient of index_select adds with atomics, in
    another order in every run.
    """

    @staticmethod
    def forward(ctx, x, index, places):
        ctx.save_for_backward(index, places)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx, grad):
        return AddUp.apply(grad, *ctx.saved_tensors), None, None


class AddUp(torch.autograd.Function):
    """The gradient of Spread: row i is the sum of the k rows places[i]."""

    @staticmethod
    def forward(ctx, y, index, places):
        ctx.save_for_backward(index, places)
        if y.is_cuda:
            return add_up(y, places)
        # index_add_ is quicker on a CPU, and adds row after row, in the same order in every run
        total = y.new_zeros(len(places), *y.shape[1:], dtype=torch.float32).index_add_(
            0, index, y.float()
        )
        return total.to(y.dtype, copy=True)

    @staticmethod
    def backward(ctx, grad):
        return Spread.apply(grad, *ctx.saved_tensors), None, None


def add_up(y: Tensor, places: Tensor) -> Tensor:
    """(N*k, ...) -> (N, ...), places (N, k). In fp32: bf16 sums of k terms would round small
    differences away. copy: torch 2.11 compiles a Function that returns x.to(x.dtype), so x itself,
    to one without a gradient."""
    rows = y.index_select(0, places.flatten()).unflatten(0, places.shape)
    if places.shape[1] == 1:
        return rows[:, 0]
    return rows.sum(1, dtype=torch.float32).to(y.dtype, copy=True)


def inverse(order: Tensor) -> Tensor:
    """order[inverse(order)] is 0, 1, 2, ... A second argsort would launch twenty kernels."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


def apply_experts(
    experts: Experts,
    x: Tensor,
    index: Tensor,
    weight: Tensor,
    counts: Tensor,
    shared: nn.Module | None = None,
) -> Tensor:
    """Send each token to k experts and add up the weighted results: x (..., D), index (N, k),
    weight (N, k) -> (..., D).

    shared: the experts for every token, a module; shared(x) is added to the result. With --ep it is
    computed while tokens travel, and else below.
    """
    # (N*k,) copies of the tokens, expert by expert. Sorting 16-bit numbers takes a fourth of the
    # passes of 64-bit numbers.
    order = experts.turn(index).flatten().short().argsort(stable=True)
    places = inverse(order).view_as(index)  # the row of each copy

    @cache
    def for_every_token() -> Tensor | None:
        if shared is None:
            return None
        return shared(x)

    rows, weight = experts.spread(x.flatten(0, -2), weight, order, places)
    results = experts(rows, weight, counts, for_every_token)
    with saved_for_good():
        out = experts.combine(results, order, places).view_as(x)
    of_shared = for_every_token()
    if of_shared is None:
        return out
    return out + of_shared


def spread(x: Tensor, weight: Tensor, order: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """The tokens' copies, x (N, D) -> (N*k, D), and their weights, (N, k) -> (N*k,), expert by
    expert."""
    rows = Spread.apply(x, order // places.shape[1], places)
    return rows, Spread.apply(weight.flatten(), order, places.view(-1, 1))


def combine(results: list[Tensor], order: Tensor, places: Tensor) -> Tensor:
    """The experts' weighted results, together (N*k, D), added up for each token: (N, D)."""
    y = results[0]
    if len(results) > 1:
        y = torch.cat(results)
    return AddUp.apply(y, order // places.shape[1], places)


def saved_for_good() -> torch.autograd.graph.saved_tensors_hooks:
    """Tensors that are saved for the backward in here stay, also with activation checkpointing: use
    it for a few small ones. A recomputation ends with the last tensor that it has to make, so what
    comes after the experts, the way home included, is not repeated for the sake of row numbers."""
    return torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)


def in_forward() -> bool:
    """False while activation checkpointing repeats a forward inside the backward: load must be
    counted only once."""
    return torch._C._current_graph_task_id() == -1


class AddLoss(torch.autograd.Function):
    """Return x unchanged and give `loss` a gradient of 1: adds a loss from inside a layer to the
    model's loss, on any pipeline stage."""

    @staticmethod
    def forward(ctx, x, loss):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad, torch.ones((), dtype=torch.float32, device=grad.device)


class Balance(nn.Module):
    """Keep the experts of a layer equally busy, as --moe_balance says, and count the tokens of each
    expert.

    bias: added to the scores when experts are chosen, never to the experts' weights; after each
    step
        parallel.balance_experts moves the bias against the load (arXiv:2408.15664).
    aux: a loss of coef * E * sum_e f_e P_e, with f_e the share of choices and P_e the mean
    probability (Switch,
        arXiv:2101.03961, eq. 4), per sequence and averaged over the sequences of the global batch: equal in every layout,
        unlike the usual batch-wise form.
    none: no balancing. force (--moe_force_balance): round-robin instead of the router, for
    benchmarks.
    """

    bias: Tensor

    def __init__(self, n_experts: int):
        super().__init__()
        self.n_experts = n_experts
        self.register_buffer("bias", torch.zeros(n_experts))
        self.load = None  # (E,) tokens per expert since the last step, fp32
        self.aux_scale = 0.0  # coefficient / sequences in the global batch
        self.force = False
        # set if cp and tp ranks share a sequence: the number of parts, and a function that sums
        # over the parts
        self.parts = 1
        self.sum_over_parts = lambda x: x

    def choose(self, scores: Tensor, k: int, limit=lambda scores: scores) -> Tensor:
        """Indices (N, k) of the chosen experts from the router's scores (N, E); limit: puts -inf at
        forbidden experts."""
        if self.force:
            n = torch.arange(scores.shape[0] * k, device=scores.device)
            return (n % self.n_experts).view(-1, k)
        return limit(scores + self.bias).topk(k, dim=-1).indices

    def count(self, index: Tensor) -> Tensor:
        """Rows per expert (E,) of this call; also added to the load."""
        chosen = index.flatten()
        counts = torch.zeros(self.n_experts, dtype=torch.int64, device=index.device)
        # bincount would wait for the device
        counts.scatter_add_(0, chosen, torch.ones_like(chosen))
        if torch.is_grad_enabled() and in_forward():
            load = counts.float()
            if self.load is not None:
                load = load + self.load
            self.load = load
        return counts

    def add_loss(self, x: Tensor, probs: Tensor, index: Tensor, B: int) -> Tensor:
        """x (N, ...) unchanged, with the balancing loss of the B sequences attached. probs (N, E),
        index (N, k)."""
        if self.aux_scale == 0.0 or not torch.is_grad_enabled():
            return x
        k = index.shape[1]
        E = self.n_experts
        T = self.parts * x.shape[0] // B  # tokens of a whole sequence
        chosen = F.one_hot(index.view(B, -1), E).sum(1).float()  # (B, E)
        f = self.sum_over_parts(chosen) / (T * k)  # no gradient flows through a count
        # (B, E) this rank's part of the mean: the ranks' losses add up
        P = probs.view(B, -1, E).sum(1) / T
        return AddLoss.apply(x, self.aux_scale * E * (f * P).sum())


def load_statistics(loads: Tensor) -> tuple[Tensor, Tensor]:
    """(largest load / mean load in the worst layer, number of experts without a token in all
    layers) of loads (layers, E).

    A row of zeros is a layer without experts, and is skipped.
    """
    uneven = loads.amax(1) / loads.mean(1).clamp(min=1e-9)  # (layers,)
    total = loads.sum(1, keepdim=True)  # (layers, 1)
    without_token = (loads == 0) & (total > 0)
    return uneven.max(), without_token.sum()
