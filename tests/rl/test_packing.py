"""Packing of samples: a packed step equals a step with one sample per row, in every layout, with
little padding."""

import random
from dataclasses import replace
from types import SimpleNamespace

import policy
import pytest
import torch
import torch.distributed as dist
from layouts import layouts_of
from policy import (
    OTHERS,
    assert_close,
    full_logprobs,
    gradients,
    samples_of,
    sharp_model,
    trainer_of,
)
from pool import pool
from tables import as_parameters

from rl import agreement, packing

LOSSES = ["grpo", "dr_grpo", "dapo", "gspo", "cispo"]
PACKED = 64  # tokens; the samples have up to 15


def lognormal(n: int, seed=0) -> list[int]:
    draw = random.Random(seed).lognormvariate
    return [min(4096, max(8, int(256 * draw(0, 1)))) for _ in range(n)]


def plan_of(lengths, ranks, pp=1, device="cpu", **flags):
    usual = dict(
        pack_tokens=0, local_batch_size=64, compile=False, batch_invariant=False, seq_len=4096
    )
    cfg = SimpleNamespace(**usual | flags)
    layout = SimpleNamespace(data_ranks=ranks, cp=2, tp=2, pp=pp, device=torch.device(device))
    return packing.plan_forwards(lengths, cfg, layout)


@pytest.mark.parametrize("n", [256, 2048])
@pytest.mark.parametrize("ranks", [1, 8, 64])
@pytest.mark.parametrize("room", [0, 4096, 16384])
def test_a_plan_has_every_sample_once_and_few_tokens_of_padding(n, ranks, room):
    lengths = lognormal(n)
    plan = plan_of(lengths, ranks, pack_tokens=room)
    # every rank has equally many forwards
    assert len(plan) == ranks
    assert len({len(share) for share in plan}) == 1
    assert sorted(i for share in plan for rows, _ in share for row in rows for i in row) == list(
        range(n)
    )
    for rows, T in (forward for share in plan for forward in share):
        assert T % 8 == 0
        assert max(sum(lengths[i] for i in row) for row in rows) <= T <= (room or 4096)
    per_forward = [[max(len(rows), 1) * T for rows, T in share] for share in plan]
    fed, real = sum(map(sum, per_forward)), sum(lengths)
    if room:
        assert fed <= (1.15 if n / ranks >= 32 or room == 4096 else 1.3) * real
        assert len({T for share in plan for _, T in share}) <= 16
        # ranks wait for the rank with the most tokens; with four samples per rank, the longest
        # sample decides
        assert sum(map(max, zip(*per_forward))) * ranks <= (1.15 if n / ranks >= 32 else 2) * real
    elif n == 256:
        assert fed > 2.3 * real


@pytest.mark.parametrize("size, n", [(8, 64), (64, 1024)])
def test_on_a_gpu_forwards_have_few_shapes(size, n):
    """A kernel of attention is planned for each shape, and 50 steps with as many samples as pass a
    filter have at most 20 shapes; on a CPU, where no plan is made, hundreds."""
    draw = random.Random(0)
    shapes = {"cpu": set(), "cuda": set()}
    real = 0
    fed = 0
    for _ in range(50):
        n_kept = n - draw.randrange(n // 8)
        lengths = [min(1023, int(260 * draw.lognormvariate(0, 0.5))) for _ in range(n_kept)]
        for device, found in shapes.items():
            (share,) = plan_of(lengths, 1, local_batch_size=size, device=device)
            found |= {(len(rows), T) for rows, T in share}
            samples = sorted(i for rows, _ in share for row in rows for i in row)
            assert samples == list(range(n_kept))
            for rows, T in share:
                longest = max(lengths[i] for row in rows for i in row)
                assert longest <= T < longest + (64 if device == "cuda" else 8)
        real += sum(lengths)
        fed += sum(len(rows) * T for rows, T in share)
    assert len(shapes["cuda"]) <= 20
    assert len(shapes["cpu"]) > 100
    assert fed < 1.35 * real


def test_on_a_gpu_the_lengths_of_long_samples_are_few():
    lengths = set()
    for tokens in range(1, 16384, 7):
        [[(_, T)]] = plan_of([tokens], 1, device="cuda", seq_len=16384)
        assert tokens <= T <= max(tokens + 63, 1.125 * tokens)
        lengths.add(T)
    assert len(lengths) == 16 + 4 * 8


def test_with_compile_all_sequences_have_one_length():
    assert {
        T for share in plan_of(lognormal(256), 8, pack_tokens=4096, compile=True) for _, T in share
    } == {4096}
    longer = plan_of([90, 10, 10], 2, pack_tokens=64, compile=True)  # an answer of the warm-up
    assert sorted(T for share in longer for _, T in share) == [64, 96]


@pytest.mark.parametrize(
    "flags", [dict(local_batch_size=8), dict(pack_tokens=4096)], ids=["rows", "packed"]
)
@pytest.mark.parametrize("n", [1, 3, 21, 256])
def test_in_a_pipeline_all_forwards_have_one_shape_and_each_stage_has_one(n, flags):
    plan = plan_of(lengths := lognormal(n), 2, 4, **flags)
    assert sorted(i for share in plan for rows, _ in share for row in rows for i in row) == list(
        range(n)
    )
    ((B, T, forwards),) = {(len(rows), T, len(share)) for share in plan for rows, T in share}
    assert forwards >= 4
    assert B * T <= 8 * 4096
    assert B == 1 or 2 * forwards * B < n + 8
    assert T >= max(
        sum(lengths[i] for i in row) for share in plan for rows, _ in share for row in rows
    )


def test_samples_that_fill_a_sequence_alone_are_planned():
    assert sorted(
        rows for share in plan_of([40] * 5, 2, pack_tokens=64) for rows, _ in share if rows
    ) == [[[i]] for i in range(5)]
    assert [[len(rows) for rows, _ in share] for share in plan_of([8], 4, pack_tokens=64)].count(
        [1]
    ) == 1
    # 65: an answer for the warm-up
    assert plan_of([8, 65, 30], 1, pack_tokens=64) == [[([[1]], 72), ([[2, 0]], 40)]]


def test_a_packed_row_is_its_samples_one_after_the_other():
    samples = samples_of(sharp_model(), n_prompts=3, group_size=2)
    parts = list(trainer_of(pack_tokens=128).microbatches(samples))
    assert len(parts) == 1
    assert parts[0][1]["tokens"].shape[0] == 1
    part, b = parts[0]
    begin, ids = 0, sum((s.ids for s in samples), [])
    for k, s in enumerate(part):
        whole, here = s.prompt + s.ids, slice(begin, begin + packing.n_read(s))
        assert b["tokens"][0, here].tolist() == whole[:-1]
        assert b["labels"][0, here].tolist() == whole[1:]
        assert b["positions"][0, here].tolist() == list(range(len(whole) - 1))
        assert set(b["doc_ids"][0, here].tolist()) == {k}
        asked = b["at"][0, here]
        assert (
            [ids[i] for i in asked[asked >= 0].tolist()]
            == s.ids
            == b["labels"][0, here][b["mask"][0, here] > 0].tolist()
        )
        begin = here.stop
    assert b["mask"][0, begin:].sum() == 0
    assert set(b["doc_ids"][0, begin:].tolist()) <= {len(samples)}


# ---------------------------------------------------------------- the same training step


def off_policy(samples, seed=1):
    """As if from an older policy; the last token of each sample is a tool's, and some samples are
    masked (--mask_truncated)."""
    rng = random.Random(seed)
    for i, s in enumerate(samples):
        s.logprobs = [lp + rng.gauss(0, 0.3) for lp in s.logprobs]
        s.sampled = s.mask = [1.0] * (len(s.ids) - 1) + [float(len(s.ids) == 1)]
        if i % 4 == 1:
            s.advantage, s.mask = 0.0, [0.0] * len(s.ids)
    return samples


def two_updates(flags: dict, samples: list[dict], model="llama3"):
    """On this rank: numbers and gradients of two updates of a step, and the scores before the first
    update."""
    config = OTHERS.get(model, policy.MODEL)
    flags = dict(local_batch_size=3) | flags if not flags.get("pack_tokens") else flags
    trainer, samples = trainer_of(config=config, **flags), [replace(s) for s in samples]
    if trainer.cfg.kl_coef:
        trainer.reference = trainer_of(config=config, seed=1, **flags).model
    steps, rng = [vars(agreement.compare_samples(trainer, samples))], random.Random(2)
    if trainer.cfg.tis:
        scored = [s.old for s in samples]
        for s in samples:  # as if updates lay between: a ratio is not 1
            s.old = [lp + rng.gauss(0, 0.2) for lp in s.old]
    for part in (samples[: len(samples) // 2], samples[len(samples) // 2 :]):
        found = trainer.train_on(part)
        steps.append(
            vars(found)
            | {"gradients": {fqn: g / trainer.denominator for fqn, g in gradients(trainer).items()}}
        )
        trainer.optimizer.zero_grad()
        trainer.denominator = 0.0
    if dist.get_world_size() > 1:
        dist.barrier()
    return steps, scored if trainer.cfg.tis else []


def assert_equal_steps(a, b, tolerance=1e-5):
    (steps, scored), (wanted, scored_there) = a, b
    assert len(scored) == len(scored_there)
    for mine, theirs in zip(scored, scored_there):
        assert mine == pytest.approx(theirs, abs=1e-5)
    for found, want in zip(steps, wanted, strict=True):
        assert found["tokens"] > 0
        assert found["tokens"] * want["ranks"] == want["tokens"] * found["ranks"]
        for name in ("logprob_k3", "ratio_outside", "entropy", "logprob_max_diff"):
            assert found[name] == pytest.approx(want[name], rel=1e-4, abs=1e-5), name
        if "loss" in want:
            assert found["loss"] == pytest.approx(want["loss"], abs=1e-5)
            assert want["clip_share"] > 0
            assert found["clip_share"] == pytest.approx(want["clip_share"], abs=1e-6)
            assert_close(found["gradients"], want["gradients"], tolerance)


def counted(ranks: int, result):
    """Add the number of tp ranks, because each of them counts the tokens."""
    return [step | {"ranks": ranks} for step in result[0]], result[1]


ALL = dict(kl_coef=0.3, tis=2.0, minibatches=2, clip_low=0.01, clip_high=0.015)


@pytest.mark.parametrize("flags", [{}, ALL], ids=["plain", "kl, tis, minibatches"])
@pytest.mark.parametrize("kind", LOSSES)
def test_packed_and_rows_are_one_step(kind, flags):
    samples = off_policy(samples_of(sharp_model(seed=0), n_prompts=8))
    flags = dict(clip_low=0.01, clip_high=0.015) | flags | dict(loss=kind)
    rows, packed = (
        two_updates(flags | more, samples)
        for more in ({"local_batch_size": 16}, {"pack_tokens": PACKED})
    )
    assert_equal_steps(counted(1, packed), counted(1, rows))
    assert packed[0][1]["padding"] < 0.1 < rows[0][1]["padding"]


def test_scored_log_probabilities_come_back_to_every_rank():
    """A rank trains on samples scored by another rank: --tis with --minibatches. Scores once went
    to the sampling rank."""
    samples = samples_of(sharp_model(), n_prompts=5)
    for flags in (dict(), dict(pack_tokens=PACKED)):
        for _, scored in pool(2).run(two_updates, ALL | flags | dict(dp_shard=2), samples):
            for s, old in zip(samples, scored, strict=True):
                assert torch.allclose(torch.tensor(old), full_logprobs(sharp_model(), s), atol=1e-4)


@pytest.mark.parametrize(
    "row",
    [
        *as_parameters(layouts_of("packing")),
        *as_parameters(layouts_of("packing, slow"), pytest.mark.slow),
    ],
)
def test_packed_layouts_take_the_step_of_rows_on_one_process(row):
    n, flags, kind = row
    model = kind.get("model", "llama3")
    config = OTHERS.get(model, policy.MODEL)
    samples = off_policy(samples_of(sharp_model(config), n_prompts=5))
    flags, ranks, pp = ALL | flags, 2 if flags.get("tp") else 1, flags.get("pp", 1)
    axes = ("dp_shard", "dp_replicate", "tp", "cp", "pp", "ep", "cp_method")
    alone = {name: flags[name] for name in flags if name not in axes}
    want = counted(1, pool(1).run(two_updates, alone, samples, model)[0])
    for packed in [dict(pack_tokens=PACKED)] + [{}] * (pp > 1):
        found = pool(n).run(
            two_updates, flags | packed | dict(engine="no" * (pp > 1)), samples, model
        )
        for stages in (found[i :: n // pp] for i in range(n // pp)):
            # a stage has its own gradients, and two stages have parts of a tied weight's
            for i in (1, 2):
                parts = [steps[i]["gradients"] for steps, _ in stages]
                whole = {
                    fqn: sum(part.get(fqn, 0) for part in parts) for part in parts for fqn in part
                }
                for steps, _ in stages:
                    steps[i]["gradients"] = whole
            for result in stages:
                assert_equal_steps(counted(ranks, result), want)
