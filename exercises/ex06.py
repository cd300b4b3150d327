"""The check of exercise 6: logits split over 2 and 4 ranks against F.cross_entropy of all logits,
then the head, then training."""

import hand06
import torch
import torch.distributed as dist
import torch.nn.functional as F
from feedback import (
    ABOUT_GROUPS,
    FOUR,
    ONE_GROUP,
    TWO_GROUPS,
    Traffic,
    Wrong,
    check_groups,
    compare,
    in_groups,
    on_ranks,
    own_group,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import parallel
from distributed.layout import local_slice
from models.loss import IGNORE

TP = 2
V = 101
CASES = ("usual logits", "logits around 200", "a rank's logits 90 above the other's")


def tokens(case: str, N: int, V: int, tp: int, seed=0):
    """logits (N, V) and labels (N,). Labels sit on both sides of the borders between the ranks'
    words; a token has no loss."""
    # seed: the group's number. The second group's logits are larger by far: the largest of all
    # groups is wrong for the first
    logits = 3 * torch.randn(N, V, generator=torch.Generator().manual_seed(seed)) + 200 * seed
    if case == CASES[1]:
        logits += 200
    if case == CASES[2]:
        logits[:, V // tp :] += 90
    return logits, torch.tensor([0, V // tp - 1, V // tp, V - 1, IGNORE, 7, V // 2 + seed, 3][:N])


def losses_on_a_rank(groups, case: str, N: int, V: int):
    group, number = own_group(groups)
    tp = group.size()
    rank = group.rank()
    logits, labels = tokens(case, N, V, tp, number)
    begin = rank * V // tp
    with Traffic() as traffic:
        losses, gradient = hand06.token_losses(
            logits[:, begin : begin + V // tp].clone(), labels, begin, group
        )
    return losses, gradient, traffic.largest, traffic.moved


def usual_mistakes(logits, labels, TP: int) -> list:
    """[(losses of each rank, the mistake in words)]."""
    N, V = logits.shape
    parts = logits.split(V // TP, 1)
    rows = torch.arange(N)
    valid = labels != IGNORE
    target = logits[rows, labels.clamp(min=0)]
    tops = [p.amax(1) for p in parts]
    sums = [(p - top[:, None]).exp().sum(1) for p, top in zip(parts, tops)]
    each = [torch.where(valid, sum(sums).log() + top - target, 0.0) for top in tops]
    inside = [(labels >= r * V // TP) & (labels < (r + 1) * V // TP) for r in range(TP)]
    alone = [
        torch.where(valid, p.logsumexp(1) - torch.where(here, target, 0.0), 0.0)
        for p, here in zip(parts, inside)
    ]
    half = [
        torch.where(valid, logits.logsumexp(1) - torch.where(here, target, 0.0), 0.0)
        for here in inside
    ]
    wrap = sum(p[rows, (labels - r * V // TP) % (V // TP)] for r, p in enumerate(parts))
    wrapped = torch.where(valid, logits.logsumexp(1) - wrap, 0.0)
    return [
        (
            each,
            "each rank has subtracted the largest of its own logits, and then the sums of the "
            "exponentials were added: "
            "they are in different units. The largest logit of all ranks comes first",
        ),
        (
            alone,
            "it is made of this rank's words only: the sum of the exponentials is to be taken "
            "over all ranks",
        ),
        (
            half,
            "the label's logit is missing on the rank that does not have that word: who tells it?",
        ),
        (
            [wrapped] * TP,
            "every rank has added a logit for the label. It belongs to one rank, and the others "
            "add 0",
        ),
    ]


def check_losses(groups, case: str, N: int, V: int):
    TP = len(groups[0])
    try:
        parts = in_groups(groups, losses_on_a_rank, case, N, V)
    except RuntimeError as e:
        if groups == ONE_GROUP or "still a blank" in str(e):
            raise
        raise Wrong(
            f"token_losses, right on 2 ranks, ends on {TP} with {N} tokens and {V // TP} words "
            "each with "
            f"{str(e).strip().splitlines()[-1]}: are the sizes those of the group and of logits?"
        ) from None
    for number, (ranks, got) in enumerate(zip(groups, parts)):
        about = f" in the group {ranks} ({ABOUT_GROUPS})" if len(groups) > 1 else f" on {TP} ranks"
        check_group(got, *tokens(case, N, V, TP, number), f"token_losses, {case}{about}:")


def check_group(got, logits, labels, where: str):
    TP, (N, V) = len(got), logits.shape
    want = F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
    softmax = logits.softmax(1)
    gradient = softmax - F.one_hot(labels.clamp(min=0), V)
    gradient[labels == IGNORE] = 0
    if any(losses.shape != (N,) or grad.shape != (N, V // TP) for losses, grad, *_ in got):
        raise Wrong(
            f"{where} it returns {tuple(got[0][0].shape)} and {tuple(got[0][1].shape)}, and "
            "should return losses "
            f"({N},) and their gradient by this rank's logits ({N}, {V // TP})"
        )
    close = lambda a, b: torch.allclose(a, b, atol=1e-4, rtol=1e-4)  # noqa: E731
    for rank, (losses, *_) in enumerate(got):
        if not losses.isfinite().all():
            raise Wrong(
                f"{where} the losses are {losses.tolist()} on rank {rank}. exp(100) is infinite "
                "in fp32: what is "
                "subtracted before, and is it the largest logit of all words?"
            )
        ignored = losses[labels == IGNORE]
        if ignored.any():
            raise Wrong(
                f"{where} the token whose label is IGNORE has the loss {ignored.item():.3f}, and "
                "should have 0"
            )
        if not close(losses, want):
            guess = next(
                (
                    text
                    for values, text in usual_mistakes(logits, labels, TP)
                    if all(close(mine, v) for (mine, *_), v in zip(got, values))
                ),
                "look at the largest logit, the sum of the exponentials and the label's logit, "
                "each by itself",
            )
            i = (losses - want).abs().argmax().item()
            raise Wrong(
                f"{where} token {i} with label {labels[i]} has the loss {losses[i]:.4f} on rank "
                f"{rank}, which has the "
                f"words {rank * V // TP} .. {(rank + 1) * V // TP - 1}, and F.cross_entropy says "
                f"{want[i]:.4f}: "
                f"{guess}"
            )
    check_gradients(
        where,
        [g for _, g, *_ in got],
        gradient.split(V // TP, 1),
        softmax.split(V // TP, 1),
        labels,
        close,
    )
    if (most := max(largest for *_, largest, _ in got)) > N * V // TP:
        raise Wrong(
            f"{where} right, but a tensor of {most} numbers was made, and a rank's logits are {N} "
            f"x {V // TP} = "
            f"{N * V // TP}: with V = 128,256 this is what should not be gathered. Three numbers "
            "per token are enough"
        )
    if (most := max(moved for *_, moved in got)) > 3 * N * (TP + 1):
        raise Wrong(
            f"{where} right, but {most} numbers went through the collectives, and {N} tokens on "
            f"{TP} ranks need at "
            f"most {3 * N * (TP + 1)}: were logits gathered piece by piece? Three numbers per "
            "token are enough"
        )


def check_gradients(where, got, gradient, softmax, labels, close):
    for rank, (mine, want) in enumerate(zip(got, gradient)):
        if close(mine, want):
            continue
        ignored = mine[labels == IGNORE]
        guess = (
            "the label's 1 is not subtracted"
            if close(mine, softmax[rank])
            else "the token without a loss has a gradient"
            if ignored.any()
            else "it is softmax - one_hot: exp / (sum over all ranks), and 1 less at the label, where that word is this rank's"
        )
        raise Wrong(
            f"{where} the losses are right, and the gradient on rank {rank} is off by "
            f"{(mine - want).abs().max():.3f}: {guess}"
        )


def head_on_a_rank():
    """(loss, gradient of h, gradient of the head's rows, first row) on this rank. V is odd: the
    last rank has fewer rows."""
    h, weight, labels = head_problem()
    mesh = init_device_mesh("cpu", (TP,), mesh_dim_names=("tp",))["tp"]
    mine = h.chunk(TP, 1)[dist.get_rank()].clone().requires_grad_()
    split = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None).requires_grad_()
    with Traffic() as traffic:
        loss = parallel.vocab_parallel_loss(mine, split, labels, 5, mesh=mesh)
        loss.backward()
    return loss.item(), mine.grad, split.grad.to_local(), local_slice(split)[1][0], traffic.moved


def head_problem():
    g = torch.Generator().manual_seed(1)
    h = torch.randn(2, 4, 8, generator=g)
    weight = torch.randn(V, 8, generator=g)
    labels = torch.randint(0, V, (2, 4), generator=g)
    labels[0, 1:3] = labels[1, 3] = IGNORE
    return h, weight, labels


def check_head():
    h, weight, labels = (t.requires_grad_() if t.is_floating_point() else t for t in head_problem())
    want = (
        F.cross_entropy(
            (h @ weight.T).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
        )
        / 5
    )
    want.backward()
    try:
        got = on_ranks(TP, head_on_a_rank)
    except RuntimeError as e:
        if "still a blank" in str(e):
            raise
        raise Wrong(
            f"vocab_parallel_loss on tp 2 ends with {str(e).strip().splitlines()[-1]}. A rank "
            "gets h of T/tp tokens "
            "and labels of all T, and weight is a DTensor: gather h, and multiply with this "
            "rank's rows"
        ) from None
    for rank, (loss, dh, dw, begin, moved) in enumerate(got):
        if abs(loss - want.item()) > 1e-4:
            raise Wrong(
                f"vocab_parallel_loss is {loss:.4f} on rank {rank} of {TP} and should be "
                f"{want.item():.4f} on both. "
                f"Its first word is number {begin}: does the loss know (vocab_start)? Are max and "
                "sum taken over the "
                "ranks, each as op says?"
            )
        for name, mine, right in (
            ("h", dh, h.grad.chunk(TP, 1)[rank]),
            ("the head", dw, weight.grad[begin : begin + len(dw)]),
        ):
            if mine is None or not torch.allclose(mine, right, atol=1e-5):
                raise Wrong(
                    f"vocab_parallel_loss: the loss is right, and the gradient of {name} on rank "
                    f"{rank} is not. What "
                    "each rank's words say about h must be added up: does the gather of h have a "
                    "backward that does "
                    "(AllGather)?"
                )
        if moved > (most := 2 * (TP + 1) * h.numel()):
            raise Wrong(
                f"vocab_parallel_loss: right, but {moved} numbers go through the collectives of "
                f"rank {rank}, and the "
                f"gather of h, its backward and three numbers per token need at most {most}: were "
                "the head's rows or "
                "the logits gathered?"
            )


def check():
    for case in CASES:
        check_losses(ONE_GROUP, case, 6, 40)
    check_losses(FOUR, CASES[2], 8, 96)
    check_losses(TWO_GROUPS, CASES[0], 7, 40)
    check_head()
    if difference := compare(2, dict(tp=2), dict(n=2, b=2, n_layers=2)):
        raise Wrong(f"on tp 2: {difference}")
    check_groups(dict(tp=2), dict(n=4, b=2, n_layers=2))
