"""The check of exercise 9: attention on 2 and 4 ranks against 1 process, then training steps with
document masks."""

import torch
import torch.distributed as dist
from feedback import Traffic, Wrong, check_groups, compare, on_ranks, without

import parallel
from models.attention import causal_attention

B = 2
T = 16
K = 4
SISTER = "that is exercise 8's way; here each rank attends with some of the heads, over the whole sequence"


def problem(H: int, G: int):
    """q, k, v of whole sequences, and weights: the loss is the sum of result * weights."""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(B, n, T, K, generator=g) for n in (H, G, G, H)]


def attended(H: int, G: int, scale=None):
    """(result, gradients of q, k and v, traffic of the forward) of this rank's tokens."""
    cp = dist.get_world_size()
    rank = dist.get_rank()
    index = parallel.sequence_index(T, cp, rank)
    q, k, v, weights = [x[:, :, index] for x in problem(H, G)]
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    with without(parallel, "all_gather_attention", SISTER), Traffic() as traffic:
        out = parallel.all_to_all_attention(index.expand(B, -1), group=dist.group.WORLD)(
            *inputs, scale=scale
        )
    if out.shape == weights.shape and out.requires_grad:
        (out * weights).sum().backward()
    return out.detach(), [x.grad for x in inputs], traffic.moved


def places(got, whole) -> dict:
    """(head, row) of got -> (head, token) with the same numbers in the result for the whole
    sequence; left out if none has."""
    # (H, T/cp, H, T)
    equal = (got[:, :, :, None, None] - whole[:, None, None]).abs().amax((0, -1)) < 1e-4
    return {
        (h, t): tuple(where[0].tolist())
        for h in range(equal.shape[0])
        for t in range(equal.shape[1])
        if len(where := equal[h, t].nonzero())
    }


def in_rank_order(q, k, v, cp: int):
    """(result, order) of the mistake in which the causal mask is laid on tokens in the order of the
    ranks."""
    order = torch.cat([parallel.sequence_index(T, cp, r) for r in range(cp)])
    out = causal_attention(order)(*(x[:, :, order] for x in (q, k, v)))
    return out, order


def why(outs, q, k, v, whole, unscaled) -> str:
    """The likely mistake, guessed from the numbers in the ranks' results."""
    cp = len(outs)
    G = k.shape[1]
    if all(
        torch.allclose(out, unscaled[:, :, parallel.sequence_index(T, cp, r)], atol=1e-4)
        for r, out in enumerate(outs)
    ):
        return "attend was given a scale, and the result is that without it"
    for rank, out in enumerate(outs):
        index = parallel.sequence_index(T, cp, rank)
        found = places(out, whole)
        n = out.shape[1] * out.shape[2]
        if len(found) == n:  # the right numbers in wrong places
            for (h, t), (head, token) in found.items():
                if head != h:
                    return (
                        f"head {h} of the result on rank {rank} is head {head}. What arrives "
                        "first are the heads that "
                        "rank 0 has attended with: on the way back the rank comes before the "
                        "heads, (cp, H/cp), not "
                        "behind them"
                    )
                if token != index[t]:
                    return (
                        f"row {t} of the result on rank {rank} is that of token {token}, and this "
                        "rank has token "
                        f"{index[t]} there. On the way back a rank must get its own tokens, an "
                        "early and a late chunk: "
                        "sequence_index"
                    )
    mixed, order = in_rank_order(q, k, v, cp)
    if all(len(places(out, mixed)) == out.shape[1] * out.shape[2] for out in outs):
        return (
            f"it is what a causal mask gives for tokens in the order {order.tolist()}. So they "
            "arrive, rank by rank: "
            "natural_order puts them into theirs"
        )
    if G < cp:
        swapped = causal_attention(order)(q, *(x.repeat(1, cp // G, 1, 1) for x in (k, v)))
        right = sum(len(places(out, swapped)) for out in outs)
        if right == sum(out.shape[1] * out.shape[2] for out in outs):
            heads = list(range(G)) * (cp // G)
            return (
                f"it is what you get when the ranks have the key/value heads {heads}. Query head "
                "h uses key/value head "
                f"h // (H / G), so {sorted(heads)}: repeat_interleave, not repeat"
            )
    return "it is a result of other tokens or other heads: check with two heads and four tokens what each rank sends, on paper"


def check_ranks(cp: int, H: int, G: int, scale=None):
    said = f"cp {cp}, {H} query heads, {G} key/value heads" + (f", scale {scale}" if scale else "")
    q, k, v, weights = problem(H, G)
    inputs = [x.clone().requires_grad_() for x in (q, k, v)]
    attend = causal_attention(torch.arange(T).expand(B, -1))
    whole = attend(*inputs, scale=scale)
    (whole * weights).sum().backward()
    try:
        parts = on_ranks(cp, attended, H, G, scale)
    except RuntimeError as e:
        if SISTER in str(e):
            raise Wrong(str(e).strip().splitlines()[-1]) from None
        if G >= cp:
            raise
        raise Wrong(
            f"{said}: {str(e).strip().splitlines()[-1]}. There are fewer key/value heads than "
            "ranks: a rank needs a "
            "copy of the one that its query heads share"
        ) from e
    outs = [out for out, *_ in parts]
    for rank, out in enumerate(outs):
        if tuple(out.shape) != (B, H, T // cp, K):
            raise Wrong(
                f"{said}: the result on rank {rank} is {tuple(out.shape)}, and should be (B, H, "
                "T/cp, K) = "
                f"{(B, H, T // cp, K)}"
            )
    indices = [parallel.sequence_index(T, cp, r) for r in range(cp)]
    worst = max((out - whole[:, :, i]).abs().max().item() for out, i in zip(outs, indices))
    if not worst < 1e-4:
        raise Wrong(
            f"{said}: the result is off by up to {worst:.2g} from that of one process: "
            + why(outs, q, k, v, whole.detach(), attend(q, k, v))
        )
    for name, x, grads in zip("qkv", inputs, zip(*(grads for _, grads, _ in parts))):
        for rank, (grad, index) in enumerate(zip(grads, indices)):
            want = x.grad[:, :, index]
            off = "missing" if grad is None else f"off by up to {(grad - want).abs().max():.2g}"
            if grad is None or not (grad - want).abs().max() < 1e-4:
                raise Wrong(
                    f"{said}: the result is right, but the gradient of {name} on rank {rank} is "
                    f"{off}. What travels "
                    "forward must travel back in the backward: AllToAll.apply does that, "
                    "dist.all_to_all_single does "
                    "not"
                )

    most = 4 * B * T // cp * K * (H + max(G, cp))  # q, k, v and the result, sent and received
    if (moved := parts[0][2]) > most:
        raise Wrong(
            f"{said}: right, but {moved} numbers go through the collectives of a rank, and "
            "trading q, k, v and the "
            f"result needs {most}, each number sent to one rank and not to all: all-to-alls, and "
            "no all-gather"
        )


def check():
    check_ranks(2, 4, 2)
    check_ranks(4, 4, 2)
    check_ranks(2, 4, 4, scale=0.7)
    if difference := compare(2, dict(cp=2, cp_method="alltoall"), dict(n=4, b=2, doc=True)):
        raise Wrong(
            f"on cp 2, with several documents in a sequence: {difference}. Do the document "
            "borders (doc_ids) reach "
            "causal_attention?"
        )
    check_groups(dict(cp=2, cp_method="alltoall"), dict(n=4, b=2, n_layers=2))
