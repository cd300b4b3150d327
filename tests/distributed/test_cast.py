"""Mixed precision on one process, against distributed/cast.py: its numbers are FSDP's, and its parameters stay the model's."""
from contextlib import nullcontext
from fnmatch import fnmatch
from functools import partial
from itertools import count
from unittest import mock

import pytest
import torch
from layouts import KINDS, build, config, full, global_batch, local_batch, without_inductor
from pool import pool

import parallel
from distributed.cast import CastUnit

BF16 = dict(compute_dtype="bfloat16")
MOE, MTP = KINDS["qwen3_moe"], KINDS["mtp"]
CASES = [
    ({}, BF16),
    # every other combination of dtypes: of compute, parameters and sums
    ({}, BF16 | dict(reduce_dtype="bfloat16")), ({}, BF16 | dict(param_dtype="bfloat16")), ({}, dict(param_dtype="bfloat16")),
    ({}, dict(reduce_dtype="bfloat16")), ({}, dict(param_dtype="bfloat16", reduce_dtype="bfloat16")),
    ({}, BF16 | dict(ac="full")), (MOE, BF16 | dict(ac="op")), ({}, BF16 | dict(reshard_after_forward="never")),
    ({}, BF16, "*w?.weight"), ({}, BF16, "*", [2]),  # a fork that freezes the norms, and a fork that skips a block
    # adapters are trained, beside frozen weights
    ({}, BF16 | dict(lora_rank=4), "*.lora_*"), ({}, BF16 | dict(lora_rank=4, ac="full"), "*.lora_*"),
]
# dtypes are chosen parameter by parameter, so of the other models each combination is shown by one
SLOW = [
    (MTP, BF16), ({}, BF16 | dict(compile=True)), (dict(tie_embeddings=True), BF16 | dict(compile=True)), (MOE, BF16),
    (dict(tie_embeddings=True), BF16 | dict(reduce_dtype="bfloat16")), (MOE, BF16 | dict(param_dtype="bfloat16")),
    (MOE, dict(param_dtype="bfloat16", reduce_dtype="bfloat16")), (MTP, BF16 | dict(ac="full")),
    (MTP, BF16 | dict(reduce_dtype="bfloat16")), (MTP, dict(param_dtype="bfloat16")), (MOE, BF16 | dict(compile=True)),
]


def everything_of_two_steps(under_fsdp: bool, problem: dict, flags: dict, trained="*", skipping=()) -> list:
    """Losses, gradient norms, gradients and weights of two steps of three micro-batches, and validation between them.
    trained: the only parameters that are not frozen. skipping: in which forwards block 1 is left out."""
    numbers = count()

    def freeze_and_shard(stage, *args, shard=parallel.shard):
        for fqn, p in stage.named_parameters():
            p.requires_grad_(fnmatch(fqn, trained))
        shard(stage, *args)

    def forward(x, *args, usual):
        return x.clone() if next(numbers) in skipping else usual(x, *args)

    fsdp = mock.patch.object(parallel, "cast_weights", parallel.wrap_units)
    with fsdp if under_fsdp else nullcontext(), without_inductor() if "compile" in flags else nullcontext():
        with mock.patch.object(parallel, "shard", freeze_and_shard):
            stages, layout = build(config(**problem), flags, 6, 2)
        assert isinstance(stages[0], parallel.FSDPModule) == under_fsdp
        if skipping:
            stages[0].blocks["1"].forward = partial(forward, usual=stages[0].blocks["1"].forward)
        params, seen = dict(stages[0].named_parameters()), []
        optimizer = torch.optim.AdamW(params.values(), lr=1e-3)
        for step in range(2):
            loss = parallel.forward_backward(stages, local_batch(global_batch(step, 6, False), layout), layout)
            assert all(p is params[fqn] for fqn, p in stages[0].named_parameters())
            grads = {fqn: full(p.grad) for fqn, p in params.items() if p.grad is not None}
            norm = parallel.clip_grad_norm(stages, 0.5, layout)
            optimizer.step()
            optimizer.zero_grad()
            validation = parallel.evaluate(stages, [local_batch(global_batch(9, 6, False), layout)], layout)
            seen += [loss, norm, torch.tensor(validation[0]), *grads.values(), *(full(p) for p in params.values())]
        return seen


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)], ids=str)
def test_one_process_equals_fsdp_to_the_last_bit(case):
    ours, fsdps = (pool(1).run(everything_of_two_steps, under_fsdp, *case)[0] for under_fsdp in (False, True))
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, fsdps, strict=True))


def memory_of_casts(flags: dict) -> list:
    """Bytes of all casts: ahead of each block's forward and in it, ahead of each block's backward, and after the step."""
    units, seen = [], []
    made = CastUnit.__init__

    def make(unit, *args):
        made(unit, *args)
        units.append(unit)

    def look(*args):
        storages = {cast.untyped_storage() for unit in units if unit.params for cast, _ in unit.copies}
        seen.append(sum(storage.nbytes() for storage in storages))

    with mock.patch.object(CastUnit, "__init__", make):
        stages, layout = build(config(), BF16 | flags, 2, 2)
    for block in stages[0].blocks.values():
        block.attn.register_forward_pre_hook(look)
        block.attn.register_full_backward_pre_hook(look)
    parallel.forward_backward(stages, local_batch(global_batch(0, 2, False), layout), layout)
    look()
    whole = [2 * sum(p.numel() for p in unit.params) for unit in units]
    return seen, whole[:4], sum(whole[4:]) - whole[4]


def test_the_casts_of_a_block_are_there_while_it_computes():
    seen, blocks, rest = pool(1).run(memory_of_casts, {})[0]
    one = blocks[0]
    assert seen == [rest + one] * 4 + [one] * 4 + [0]  # the head's are freed by its gradient, first of all
    seen, blocks, rest = pool(1).run(memory_of_casts, dict(reshard_after_forward="never"))[0]
    assert seen[3] > rest + 4 * one and seen[4:] == [seen[3] - rest - i * one for i in range(4)] + [0]
