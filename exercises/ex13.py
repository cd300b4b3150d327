"""The check of exercise 13: the norm of a real step's gradients on layouts of 2 and 4 processes,
before and after clipping."""

import math
from collections import Counter

import layouts
import torch
from feedback import Wrong, compare, on_ranks
from torch.distributed.tensor import Shard, distribute_tensor

import parallel
from distributed.layout import Layout, local_slice, local_tensor

TIED = dict(tie_embeddings=True)
MOE = dict(model="qwen3", n_experts=8, top_k=2, moe_ffn_dim=32)
UNEVEN = "Numbers of elements do not tell: parts may be uneven, or empty. Look at the mesh and at the placements"
LAYOUTS = [  # flags, fields of the model, the layout in words
    ({}, {}, "FSDP on 2 ranks"),
    (
        dict(dp_replicate=2, dp_shard=2),
        {},
        "4 ranks, dp_replicate 2 and dp_shard 2: two copies, each in two parts",
    ),
    (dict(dp_replicate=2), {}, "dp_replicate 2: two copies of the model"),
    (dict(tp=2), {}, "tp 2"),
    (dict(ep=2), MOE, "ep 2: each rank has half of the experts, and FSDP's part of the rest"),
    (dict(pp=2), {}, "pp 2"),
    (dict(pp=2), TIED, "pp 2 with the embedding tied to the head: both stages have it"),
]


def gradients_of_a_step(flags: dict, fields: dict):
    """(stages, layout, {(stage, fqn): gradient}) of this rank."""
    stages, layout = layouts.build(
        layouts.config(**fields), flags, 4, 1 if "n_experts" in fields or "dp_shard" in flags else 2
    )
    if layout.pp == 1:
        # as the stages of a pipeline have
        stages[0].index = 0
        stages[0].n_stages = 1
    parallel.forward_backward(
        stages, layouts.local_batch(layouts.global_batch(0, 4, False), layout), layout
    )
    return (
        stages,
        layout,
        {
            (s.index, fqn): p.grad
            for s in stages
            for fqn, p in s.named_parameters()
            if p.grad is not None
        },
    )


def clipped(flags: dict, fields: dict) -> dict:
    """Gradients of a real step on this rank, and the answers of the student's two functions.

    parts: gradient -> (shape and offset here, replicas()); whole: norm of each full gradient;
    copies: tied weights that must
    not count; local: norm of this rank's parts; norms, scales: results of clip_grad_norm, and its
    effect on each gradient.
    """
    stages, layout, grads = gradients_of_a_step(flags, fields)
    parts = {
        key: (local_slice(grad), parallel.replicas(grad, layout)) for key, grad in grads.items()
    }
    whole = {key: layouts.full(grad).double().norm().item() for key, grad in grads.items()}
    last = max(s.n_stages for s in stages) - 1
    copies = {key for key in whole if key == (last, "tok_embeddings.weight") and last > 0}
    before = {key: local_tensor(grad).clone() for key, grad in grads.items()}
    local = math.sqrt(sum(x.double().square().sum().item() for x in before.values()))
    norms = []
    scales = []
    for share in (0.0, 2.0, 0.5):  # max_norm / norm: never clip, nothing to clip, clip
        norm = parallel.clip_grad_norm(stages, share * norms[0] if norms else 0.0, layout)
        if not isinstance(norm, torch.Tensor) or norm.dim():
            raise TypeError(f"clip_grad_norm must return a tensor without dimensions, not {norm}")
        norms.append(float(layouts.full(norm)))
        scales.append(
            {
                key: (local_tensor(grad).norm() / before[key].norm().clamp(min=1e-12)).item()
                for key, grad in grads.items()
                if before[key].norm() > 0
            }
        )
    return dict(parts=parts, whole=whole, copies=copies, local=local, norms=norms, scales=scales)


def check_replicas(ranks: list[dict], said: str):
    ranks = [r["parts"] for r in ranks]
    holders = Counter((key, part) for parts in ranks for key, (part, _) in parts.items())
    for rank, parts in enumerate(ranks):
        for key, (part, given) in parts.items():
            want = holders[key, part]
            if given != want:
                held = (
                    "1 rank of its stage holds" if want == 1 else f"{want} ranks of its stage hold"
                )
                raise Wrong(
                    f"{said}: replicas gives {given} for the gradient of {key[1]} on rank {rank}, "
                    "which has "
                    f"{part[0]} of it; {held} this part. Look at its mesh and its placements, one "
                    "for each axis; "
                    f"parts may be uneven"
                )


def uneven(degrees: dict) -> list[tuple]:
    """[(rows, rows here, replicas())] for gradients with fewer rows than ranks, or not a multiple, cut over fsdp."""
    layout = parallel.make_mesh(Layout(**degrees, rank=torch.distributed.get_rank()))
    found = []
    for rows in (1, 3, 5):
        grad = distribute_tensor(
            torch.ones(rows, 2), layout.mesh["fsdp"], [Shard(0)], src_data_rank=None
        )
        found.append((rows, len(grad.to_local()), parallel.replicas(grad, layout)))
    return found


def check_uneven():
    for degrees, want in ((dict(dp_shard=4), 1), (dict(dp_replicate=2, dp_shard=2), 2)):
        try:
            ranks = on_ranks(4, uneven, degrees)
        except RuntimeError as e:
            if "still a blank" in str(e):
                raise
            raise Wrong(
                f"replicas, on {degrees} with a gradient of 1, 3 or 5 rows, ends with "
                f"{str(e).strip().splitlines()[-1]}. {UNEVEN}"
            ) from None
        for rank, rows in enumerate(ranks):
            for whole, here, got in rows:
                if got != want:
                    raise Wrong(
                        f"replicas, on {degrees}, with a gradient of {whole} rows, {here} of them "
                        f"on rank {rank}, "
                        f"gives {got} and should give {want}. {UNEVEN}"
                    )


def why(got: list[float], want: float, ranks: list[dict]) -> str:
    """The likely mistake behind a wrong norm."""
    near = lambda a, b: abs(a - b) < 1e-4 * max(b, 1e-9)  # noqa: E731
    tied = next((r["whole"][key] for r in ranks for key in r["copies"]), 0.0)
    locals_ = [r["local"] for r in ranks]
    for values, text in [
        (
            [math.sqrt(want**2 + tied**2)] * len(ranks),
            "the tied weight is counted twice, once in each of its stages: it is one weight, so "
            "leave tied_copy(stage) out",
        ),
        (locals_, "each rank has the norm of its own part: who adds up the others'?"),
        (
            [math.sqrt(sum(x * x for x in locals_))] * len(ranks),
            "all ranks' squares are added, also those that several ranks hold: a gradient that is "
            "whole on both must count once",
        ),
        ([want**2] * len(ranks), "that is the square of the norm: the root is missing"),
        (
            [sum(locals_)] * len(ranks),
            "the ranks' norms are added up: what adds up are their squares",
        ),
        (
            [math.sqrt(max(want**2 - tied**2, 0))] * len(ranks),
            "the tied weight is not counted at all: leave out the copy only",
        ),
    ]:
        if all(near(a, b) for a, b in zip(got, values)) and not near(values[0], want) | near(
            values[-1], want
        ):
            return text
    if not all(near(x, got[0]) for x in got):
        return "and the ranks disagree: all of them must clip by the same norm"
    squares = {key[1]: x * x for r in ranks for key, x in r["whole"].items()}
    extra = got[0] ** 2 - want**2
    guilty = min(squares, key=lambda fqn: abs(abs(extra) - squares[fqn]))
    if abs(abs(extra) - squares[guilty]) < 1e-2 * squares[guilty]:
        return f"as if {guilty} were counted {'twice' if extra > 0 else 'not at all'}"
    if abs(got[0] / want - 1) < 0.01:
        return "nearly right: are parts of uneven size among them? 101 rows are 51 on one rank and 50 on the other"
    return "count every gradient once, however many ranks hold it"


def check_norm(flags, fields, said):
    try:
        ranks = on_ranks(
            math.prod(flags.values()) if "dp_shard" in flags else 2, clipped, flags, fields
        )
    except RuntimeError as e:
        last = next((line for line in str(e).splitlines() if "must have the same mesh" in line), "")
        if not last:
            raise
        raise Wrong(
            f"{said}: {last[:200]}. torch adds up only gradients on one mesh, and experts have "
            "another one than the "
            "rest: add up the squares of the ranks' own parts, local_tensor(p.grad)"
        ) from e
    check_replicas(ranks, said)
    unique = {key: x for r in ranks for key, x in r["whole"].items() if key not in r["copies"]}
    want = math.sqrt(sum(x * x for x in unique.values()))
    got = [r["norms"][0] for r in ranks]
    if any(not abs(x - want) < 2e-5 * want for x in got):
        shown = " and ".join(f"{x:.5f}" for x in got)
        raise Wrong(
            f"{said}: the norm is {shown} on the ranks, and should be {want:.5f}: "
            f"{why(got, want, ranks)}"
        )
    for rank, r in enumerate(ranks):
        for scales, wanted, text in zip(
            r["scales"],
            (1.0, 1.0, 0.5),
            (
                "max_norm 0 means never",
                "max_norm is twice the norm, so nothing is to be done",
                "max_norm is half of the norm, so each gradient is halved",
            ),
        ):
            if bad := next((key for key, x in scales.items() if abs(x - wanted) > 1e-3), None):
                raise Wrong(
                    f"{said}: the norm is right, but the gradient of {bad[1]} on rank {rank} is "
                    "scaled by "
                    f"{scales[bad]:.3f} in place of {wanted}: {text}"
                    + ". It is the tied copy: it must stay equal "
                    "to the original" * (bad in r["copies"])
                )


def check():
    for layout in LAYOUTS:
        check_norm(*layout)
    check_uneven()
    if difference := compare(2, dict(pp=2), dict(n=4, b=2, tie_embeddings=True)):
        raise Wrong(f"on pp 2 with a tied embedding, three steps of training: {difference}")
