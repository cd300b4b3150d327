"""The gated delta rule (arXiv:2412.06464) with its short convolution, as a scan over a sequence:
forks/qwen3_next.py's seam beside make_attend.

B batch, T sequence, H key heads of this rank, R value heads of each key head, N numbers of a key, U
of a value, C chunk

A state (N, U) per value head takes the place of keys and values:

    S_t = exp(g_t) S_{t-1} + k_t (b_t (v_t - exp(g_t) S_{t-1}^T k_t))^T, and the result is S_t^T q_t

The tokens of a sequence meet in `scan(x, weight, N)` only: x (B, T, H, 2 N + R U + 2 R) fp32 has of
each key head query, key, values, log of the decay g, strength b. So boundaries of documents,
context parallelism and generation concern this file only:

    documents   the convolution sees no token of another document, and the state begins at 0, on and off chunk boundaries
    cp          an all-to-all gives each cp rank whole sequences of H/cp heads, as --cp_method alltoall does for attention, and
                another one gives the results back: the convolution needs no halo, and no state travels
    generation  the cache keeps x of all tokens, not the state: padded prompts and waiting rows write nothing that counts. A new
                token costs a scan over the row, as attention costs a look at all keys
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from distributed.layout import AllGather, AllToAll, local_tensor
from parallel import natural_order, sequence_index

CHUNK = 64


class ShortConv(nn.Module):
    """The weight of a causal convolution of each channel by itself, by key heads: (H, 2 N + R U,
    size)."""

    def __init__(self, n_heads: int, sizes: tuple[int, ...], size: int):
        super().__init__()
        self.n_heads = n_heads
        self.sizes = sizes
        # all queries, all keys, all values
        self.weight = nn.Parameter(torch.empty(n_heads * sum(sizes), 1, size))
        self.whole = lambda weight: weight
        self.parts = 1
        self.part = 0

    def forward(self):
        parts = self.whole(self.weight)[:, 0].split([self.n_heads * size for size in self.sizes])
        return torch.cat([x.unflatten(0, (self.n_heads, -1)) for x in parts], 1).chunk(self.parts)[
            self.part
        ]


class GatherRows(ParallelStyle):
    """A ShortConv under tp. The channels are not in the order of heads, so a rank has any rows of
    the weight, and all ranks gather the few numbers. Backward: a reduce-scatter adds the gradients
    up."""

    def _apply(self, module, mesh):
        module.weight = nn.Parameter(
            distribute_tensor(module.weight, mesh, [Shard(0)], src_data_rank=None)
        )
        module.whole = lambda weight: AllGather.apply(local_tensor(weight), 0, mesh.get_group())
        module.parts, module.part = mesh.size(), mesh.get_local_rank()
        return module


class OwnRows(ParallelStyle):
    """Numbers of the rank's own heads. All T tokens of these heads are here, so the gradients are
    complete."""

    def _apply(self, module, mesh):
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(
                module,
                name,
                nn.Parameter(distribute_tensor(p, mesh, [Shard(0)], src_data_rank=None)),
            )
        return module


def make_scan(group, doc_ids: Tensor | None):
    """scan(x, weight, N) -> (B, T/cp, H, R, U) fp32 for a forward. group: of the cp ranks, or None.
    doc_ids (B, T): of whole sequences."""
    if group is None:
        return lambda x, weight, N: delta_scan(x, weight, N, doc_ids)
    cp, rank = dist.get_world_size(group), dist.get_rank(group)

    def scan(x, weight, N):
        B, T, H, n = x.shape
        if H % cp:
            raise ValueError(
                f"--cp {cp} does not divide the {H} key heads of the delta rule on a tp rank"
            )
        # (cp, B, T/cp, H/cp, n), a piece per rank
        x = AllToAll.apply(x.unflatten(2, (cp, H // cp)).movedim(2, 0), group)
        x = natural_order(x.movedim(0, 1).flatten(1, 2), 1, cp)  # (B, T, H/cp, n)
        out = delta_scan(x, weight.chunk(cp)[rank], N, doc_ids)  # (B, T, H/cp, R, U)
        # (cp, T/cp): tokens of each rank
        orders = torch.stack([sequence_index(cp * T, cp, i, x.device) for i in range(cp)])
        # (cp, B, T/cp, H/cp, R, U), a piece of heads per rank
        out = AllToAll.apply(out[:, orders].movedim(1, 0), group)
        return out.movedim(0, 2).flatten(2, 3)

    return scan


def cached_scan(cache, block: str):
    """The scan of one block in one forward of generation. cache: rl.decoding.RowCache, which keeps
    x as keys are kept."""

    def scan(x, weight, N):
        if block not in cache.kept:
            B, T, H, n = x.shape
            cache.kept[block] = [x.new_zeros(cache.rows, H, cache.max_len, n)]
        kept = cache.kept[block][0]
        kept[cache.row, :, cache.at] = x
        rows = kept[: cache.rows, :, : cache.n_keys].transpose(1, 2)
        if cache.chosen is not None:
            rows = rows[cache.chosen]
        return delta_scan(rows, weight, N)[
            torch.arange(len(rows), device=x.device)[:, None], cache.at
        ]

    return scan


def delta_scan(x: Tensor, weight: Tensor, N: int, doc_ids: Tensor | None = None) -> Tensor:
    """x (B, T, H, 2 N + R U + 2 R), weight (H, 2 N + R U, size) -> (B, T, H, R, U), fp32."""
    n = weight.shape[1]
    R = (x.shape[-1] - n) // 2
    qkv, g, strength = x.split([n, R, R], -1)
    q, k, v = short_conv(qkv, weight.to(x.dtype), doc_ids).split([N, N, n - 2 * N], -1)
    q, k = (y * torch.rsqrt(y.square().sum(-1, keepdim=True) + 1e-6) for y in (q, k))
    # (B, H, 1, T, N)
    q = q.transpose(1, 2)[:, :, None] * N**-0.5
    k = k.transpose(1, 2)[:, :, None]
    v = v.unflatten(-1, (R, -1)).permute(0, 2, 3, 1, 4)  # (B, H, R, T, U)
    # (B, H, R, T, U)
    out = chunked(q, k, v, g.permute(0, 2, 3, 1), strength.permute(0, 2, 3, 1), doc_ids)
    return out.permute(0, 3, 1, 2, 4)


def short_conv(x: Tensor, weight: Tensor, doc_ids: Tensor | None) -> Tensor:
    """silu of a causal convolution along T; tokens before the document count as 0. x (B, T, H, n),
    weight (H, n, size)."""
    T = x.shape[1]
    size = weight.shape[-1]
    out = x * weight[..., -1]
    for back in range(1, min(size, T)):
        earlier = F.pad(x[:, :-back], (0, 0, 0, 0, back, 0))
        if doc_ids is not None:
            same = F.pad(doc_ids[:, back:] == doc_ids[:, :-back], (back, 0))
            earlier = earlier * same[:, :, None, None]
        out = out + earlier * weight[..., -1 - back]
    return F.silu(out)


def chunked(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, strength: Tensor, doc_ids: Tensor | None
) -> Tensor:
    """The delta rule, chunk by chunk (arXiv:2412.06464, section 3.3): q, k (B, H, 1, T, N), v (B,
    H, R, T, U), g and strength (B, H, R, T) -> (B, H, R, T, U). Inside a chunk all tokens at once;
    between chunks the state travels."""
    B = len(q)
    T = q.shape[-2]
    rest = -q.shape[-2] % CHUNK
    # (B, H, R, n, C, N or U)
    q, k, v = (F.pad(y, (0, 0, 0, rest)).unflatten(-2, (-1, CHUNK)) for y in (q, k, v))
    # (B, H, R, n, C)
    g, strength = (F.pad(y, (0, rest)).unflatten(-1, (-1, CHUNK)) for y in (g, strength))
    doc_ids = q.new_zeros(B, T) if doc_ids is None else doc_ids
    # (B, 1, 1, n, C)
    docs = F.pad(doc_ids, (0, rest), value=-1).unflatten(-1, (-1, CHUNK))[:, None, None]
    # (B, 1, 1, n, 1): document of the last token before
    before = torch.cat([docs[..., :1, :1], docs[..., :-1, -1:]], -2)
    goes_on = docs == before  # the state of the chunk before counts
    total = g.cumsum(-1)
    may = (docs[..., :, None] == docs[..., None, :]) & torch.ones(
        CHUNK, CHUNK, dtype=torch.bool, device=q.device
    ).tril()
    # (B, H, R, n, C, C)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~may, -torch.inf).exp()
    faded = total.exp() * goes_on  # (B, H, R, n, C): what is left of the state
    # what is left of a token at the end of the chunk
    left = (total[..., -1:] - total).exp() * (docs == docs[..., -1:])

    # each token's change of the state depends on the tokens before: a triangular system per chunk
    system = (k @ k.transpose(-1, -2) * decay * strength[..., None]).tril(-1)  # the diagonal is 1
    sides = torch.cat([v * strength[..., None], k * (strength * faded)[..., None]], -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    new, of_state = solved.split([v.shape[-1], k.shape[-1]], -1)
    inside = q @ k.transpose(-1, -2) * decay
    q = q * faded[..., None]
    k = k * left[..., None]
    state = v.new_zeros(*v.shape[:3], k.shape[-1], v.shape[-1])
    out = []
    for i in range(v.shape[3]):
        change = new[:, :, :, i] - of_state[:, :, :, i] @ state  # (B, H, R, C, U)
        out.append(q[:, :, :, i] @ state + inside[:, :, :, i] @ change)
        state = state * faded[:, :, :, i, -1, None, None] + k[:, :, :, i].transpose(-1, -2) @ change
    return torch.cat(out, -2)[..., :T, :]
