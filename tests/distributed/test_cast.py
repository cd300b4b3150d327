"""Mixed precision on one process, against distributed/cast.py: its numbers are FSDP's, and its
parameters stay the model's."""

from contextlib import nullcontext
from fnmatch import fnmatch
from functools import partial
from itertools import count
from unittest import mock

import pytest
import torch
from layouts import KINDS, build, config, full, global_batch, local_batch, without_inductor
from pool import pool
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import parallel
from distributed.cast import CastUnit
from distributed.experts import PARTS

BF16 = dict(compute_dtype="bfloat16")
MOE = KINDS["qwen3_moe"]
MTP = KINDS["mtp"]
CASES = [
    ({}, BF16),
    # every other combination of dtypes: of compute, parameters and sums
    ({}, BF16 | dict(reduce_dtype="bfloat16")),
    ({}, BF16 | dict(param_dtype="bfloat16")),
    ({}, dict(param_dtype="bfloat16")),
    ({}, dict(reduce_dtype="bfloat16")),
    ({}, dict(param_dtype="bfloat16", reduce_dtype="bfloat16")),
    ({}, BF16 | dict(ac="full")),
    (MOE, BF16 | dict(ac="op")),
    ({}, BF16 | dict(reshard_after_forward="never")),
    # a fork that freezes the norms, and a fork that skips a block
    ({}, BF16, "*w?.weight"),
    ({}, BF16, "*", [2]),
    # adapters are trained, beside frozen weights
    ({}, BF16 | dict(lora_rank=4), "*.lora_*"),
    ({}, BF16 | dict(lora_rank=4, ac="full"), "*.lora_*"),
]
# dtypes are chosen parameter by parameter, so of the other models each combination is shown by one
SLOW = [
    (MTP, BF16),
    ({}, BF16 | dict(compile=True)),
    (dict(tie_embeddings=True), BF16 | dict(compile=True)),
    (MOE, BF16),
    (dict(tie_embeddings=True), BF16 | dict(reduce_dtype="bfloat16")),
    (MOE, BF16 | dict(param_dtype="bfloat16")),
    (MOE, dict(param_dtype="bfloat16", reduce_dtype="bfloat16")),
    (MTP, BF16 | dict(ac="full")),
    (MTP, BF16 | dict(reduce_dtype="bfloat16")),
    (MTP, dict(param_dtype="bfloat16")),
    (MOE, BF16 | dict(compile=True)),
]


def fully_shard_experts(experts, stage, layout, reduce_dtype):
    """What cast_experts stands for: FSDP over a mesh of one rank."""
    policy = MixedPrecisionPolicy(
        param_dtype=layout.compute_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False
    )
    for each in experts:
        fully_shard(
            each,
            mesh=layout.expert_mesh["efsdp"],
            reshard_after_forward=layout.reshards,
            mp_policy=policy,
        )


def everything_of_two_steps(
    under_fsdp: bool, problem: dict, flags: dict, trained="*", skipping=()
) -> list:
    """Losses, gradient norms, gradients and weights of two steps of three micro-batches, and
    validation between them.
    trained: the only parameters that are not frozen. skipping: in which forwards block 1 is left
    out."""
    numbers, n = count(), 6 * torch.distributed.get_world_size() // flags.get("tp", 1)

    def freeze_and_shard(stage, *args, shard=parallel.shard):
        for fqn, p in stage.named_parameters():
            p.requires_grad_(fnmatch(fqn, trained))
        shard(stage, *args)

    def forward(x, *args, usual):
        if next(numbers) in skipping:
            return x.clone()
        return usual(x, *args)

    flags = dict(flags)
    parts = mock.patch.dict(PARTS, cpu=flags.pop("parts", 1))
    fsdp = mock.patch.multiple(
        parallel, cast_weights=parallel.wrap_units, cast_experts=fully_shard_experts
    )
    with (
        parts,
        fsdp if under_fsdp else nullcontext(),
        without_inductor() if "compile" in flags else nullcontext(),
    ):
        with mock.patch.object(parallel, "shard", freeze_and_shard):
            stages, layout = build(config(**problem), flags, n, 2)
        assert isinstance(stages[0], parallel.FSDPModule) == (under_fsdp or layout.world_size > 1)
        if layout.has_experts:
            assert isinstance(stages[0].blocks["1"].moe.experts, parallel.FSDPModule) == under_fsdp
        if skipping:
            stages[0].blocks["1"].forward = partial(forward, usual=stages[0].blocks["1"].forward)
        params = dict(stages[0].named_parameters())
        seen = []
        optimizer = torch.optim.AdamW(params.values(), lr=1e-3)
        for step in range(2):
            loss = parallel.forward_backward(
                stages, local_batch(global_batch(step, n, False), layout), layout
            )
            loss, _ = parallel.reduce_loss(loss, layout)
            for fqn, p in stages[0].named_parameters():
                assert p is params[fqn]
            grads = {fqn: full(p.grad) for fqn, p in params.items() if p.grad is not None}
            norm = parallel.clip_grad_norm(stages, 0.5, layout)
            optimizer.step()
            optimizer.zero_grad()
            validation = parallel.evaluate(
                stages, [local_batch(global_batch(9, n, False), layout)], layout
            )
            seen += [
                loss,
                norm,
                torch.tensor(validation[0]),
                *grads.values(),
                *(full(p) for p in params.values()),
            ]
        return seen


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str
)
def test_one_process_equals_fsdp_to_the_last_bit(case):
    ours, fsdps = (
        pool(1).run(everything_of_two_steps, under_fsdp, *case)[0] for under_fsdp in (False, True)
    )
    for a, b in zip(ours, fsdps, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


# --ep over all ranks: no other rank has a rank's experts, and FSDP wraps only the rest
EP = [
    (MOE, BF16 | dict(ep=2)),
    (MOE, BF16 | dict(tp=2, etp=2)),
    (MOE, BF16 | dict(ep=2, etp=1, tp=2, ac="op")),
    (MTP, BF16 | dict(ep=2, reduce_dtype="bfloat16")),
    (MOE, BF16 | dict(ep=2), "*", [2]),
    (MOE, BF16 | dict(ep=2, param_dtype="bfloat16")),
    (MOE, BF16 | dict(ep=2, reshard_after_forward="never")),
    (MOE, dict(ep=2, reduce_dtype="bfloat16")),
    (MOE, BF16 | dict(ep=2), "*w?.weight"),
    (MOE, BF16 | dict(ep=2, compile=True)),
    (MOE, BF16 | dict(ep=2, parts=2, ac="full")),
]


@pytest.mark.parametrize(
    "case", [*EP[:2], *(pytest.param(case, marks=pytest.mark.slow) for case in EP[2:])], ids=str
)
def test_experts_that_no_other_rank_has_equal_fsdp_to_the_last_bit(case):
    ours, fsdps = (
        pool(2).run(everything_of_two_steps, under_fsdp, *case) for under_fsdp in (False, True)
    )
    for mine, theirs in zip(ours, fsdps, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


def memory_of_casts(flags: dict) -> list:
    """Bytes of all casts: ahead of each block's forward and in it, ahead of each block's backward,
    and after the step."""
    units = []
    seen = []
    made = CastUnit.__init__

    def make(unit, *args):
        made(unit, *args)
        units.append(unit)

    def look(*args):
        storages = set()
        for unit in units:
            if unit.params:
                for cast, _ in unit.copies:
                    storages.add(cast.untyped_storage())
        seen.append(sum(storage.nbytes() for storage in storages))

    with mock.patch.object(CastUnit, "__init__", make):
        stages, layout = build(config(), BF16 | flags, 2, 2)
    for block in stages[0].blocks.values():
        block.attn.register_forward_pre_hook(look)
        block.attn.register_full_backward_pre_hook(look)
    parallel.forward_backward(stages, local_batch(global_batch(0, 2, False), layout), layout)
    look()
    whole = []
    for unit in units:
        whole.append(2 * sum(p.numel() for p in unit.params))
    return seen, whole[:4], sum(whole[4:]) - whole[4]


def test_the_casts_of_a_block_are_there_while_it_computes():
    seen, blocks, rest = pool(1).run(memory_of_casts, {})[0]
    one = blocks[0]
    # the head's are freed by its gradient, first of all
    assert seen == [rest + one] * 4 + [one] * 4 + [0]
    seen, blocks, rest = pool(1).run(memory_of_casts, dict(reshard_after_forward="never"))[0]
    assert seen[3] > rest + 4 * one
    assert seen[4:] == [seen[3] - rest - i * one for i in range(4)] + [0]
