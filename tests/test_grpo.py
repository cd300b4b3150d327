"""GRPO, against grpo.py: every known slip of policy-gradient code has a test here; layouts and
resumed runs equal one process.

The slips were made by public implementations: each test names the slip to be caught.
"""

import json
import math
import os
import random
import shutil
import signal
import time
from dataclasses import replace
from pathlib import Path

import policy
import pytest
import torch
import torch.distributed as dist
from layouts import drawn_adapters
from policy import (
    LORA,
    TINY,
    assert_close,
    assert_same,
    full_logprobs,
    gradients,
    run,
    samples_of,
    sharp_model,
    steps_of,
    trainer_of,
)
from pool import pool
from runs import REPO, Job, metrics
from saves import IDENTITY

import generate
import grpo
from distributed.layout import AXES, local_tensor
from grpo import LOSSES, Tokens, advantages, loss_denominator, overlong_penalty
from models.loss import CHUNK_ELEMENTS, token_logprobs
from rl import agreement, decoding, environments, rollouts
from rl.messages import FEW, sample_numbers, warn_of_equal_rewards
from rl.policy import forward, keep_reference
from rl.sample import Sample
from storage.hf import load_hf_model
from storage.prompt import open_chat

# ---------------------------------------------------------------- log-probabilities


def test_uniform_model_and_finite_difference():
    """Shift by one: logits at t speak of token t+1."""
    h, labels = torch.randn(2, 5, 8), torch.randint(24, (2, 5))
    logprobs, entropy = token_logprobs(h, torch.zeros(24, 8), labels)
    assert (logprobs + math.log(24)).abs().max() < 1e-6 > (entropy - math.log(24)).abs().max()
    model = sharp_model()
    s = Sample(prompt=[3, 1], ids=[7, 9], logprobs=[0.0] * 2, mask=[1.0] * 2, advantage=1.0)
    trainer = trainer_of()
    _, packed = next(trainer.microbatches([s]))
    assert packed["tokens"].tolist() == [[3, 1, 7]]
    assert packed["labels"].tolist() == [[1, 7, 9]]
    assert packed["mask"].tolist() == [[0, 1, 1]]
    lp, _ = trainer.model(packed["tokens"], labels=packed["labels"], positions=packed["positions"])
    assert torch.allclose(lp[0, 1:], full_logprobs(model, s), atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_token_logprobs_and_gradient_equal_autograd(temperature, monkeypatch):
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", 1)
    # three chunks of 256 rows at most
    h = torch.randn(700, 8, dtype=torch.float32, requires_grad=True)
    w, labels, g = (
        torch.randn(24, 8, requires_grad=True),
        torch.randint(24, (700,)),
        torch.randn(700),
    )
    reference = (h @ w.T / temperature).log_softmax(-1)
    want_lp = reference.gather(1, labels[:, None])[:, 0]
    want_entropy = -(reference.exp() * reference).sum(-1)
    lp, entropy = token_logprobs(h, w, labels, temperature)
    assert torch.allclose(lp, want_lp, atol=1e-5)
    assert torch.allclose(entropy, want_entropy, atol=1e-4)
    # each alone, with nothing from the other, and both
    for n_lp, n_entropy in ((1, 0), (0, 1), (1, 3)):
        outputs = []
        wants = []
        for n, output, expected in ((n_lp, lp, want_lp), (n_entropy, entropy, want_entropy)):
            if n:
                outputs.append((output * g).sum() * n)
                wants.append((expected * g).sum() * n)
        want = torch.autograd.grad(sum(wants), (h, w), retain_graph=True)
        for a, b in zip(torch.autograd.grad(sum(outputs), (h, w), retain_graph=True), want):
            assert (a - b).norm() < 1e-5 * b.norm()


def entropy_gradients(flags, samples):
    """Gradients of the sum of the entropies of all sampled tokens; the last of them counts twice."""
    trainer = trainer_of(**flags)
    for _, b in trainer.microbatches(samples):
        weight = b["mask"] * (1 + b["at"] / sum(len(s.ids) for s in samples))
        _, entropy = forward(trainer.model, b, trainer.layout)
        (entropy * weight).sum().backward()
    return gradients(trainer)


@pytest.mark.slow
@pytest.mark.parametrize(
    "n, flags",
    [
        (1, {}),
        (1, dict(pack_tokens=64)),
        (2, dict(dp_shard=2)),
        (2, dict(tp=2)),
        (2, dict(cp=2, pack_tokens=64)),
    ],
    ids=str,
)
def test_gradient_of_the_entropy_in_every_layout(n, flags):
    """Of ids that the tokenizer does not know, too: their probability is 0, and so is the gradient."""
    flags = flags | dict(temperature=0.7, unknown=[21, 22, 23])
    model = sharp_model()
    samples = samples_of(model, eot=0)
    for s in samples:
        s.ids = [i % 21 for i in s.ids]
        s.prompt = [i % 21 for i in s.prompt]
    at = 0
    total = 0.0
    n_ids = sum(len(s.ids) for s in samples)
    for s in samples:
        logits = model(torch.tensor([s.prompt + s.ids]))[0, len(s.prompt) - 1 : -1]
        logp = (logits[:, :21].float() / 0.7).log_softmax(-1)
        weight = 1 + torch.arange(at, at + len(s.ids)) / n_ids
        total = total - ((logp.exp() * logp).sum(-1) * weight).sum()
        at += len(s.ids)
    total.backward()
    want = {fqn: p.grad for fqn, p in model.named_parameters()}
    for got in pool(n).run(entropy_gradients, flags, samples):
        assert_close(got, want, 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_softmax_is_in_fp32_on_both_sides(dtype):
    lp, entropy = token_logprobs(
        torch.randn(3, 8, dtype=dtype), torch.randn(24, 8, dtype=dtype), torch.tensor([1, 2, 3])
    )
    assert lp.dtype == entropy.dtype == torch.float32
    h, w = torch.randn(3, 1, 8, dtype=dtype), torch.randn(24, 8, dtype=dtype)
    logits = decoding.column_logits(h, w, column=torch.zeros(3).long())
    assert logits.dtype == torch.float32
    assert decoding.draw(logits, torch.rand(3), 1.0)[1].dtype == torch.float32


# ---------------------------------------------------------------- advantages and losses


def test_advantages():
    """Groups of one, of equal rewards, biased standard deviation."""
    assert advantages([1.0], True) == [0.0]
    assert advantages([0.3] * 4, True) == [0.0] * 4
    assert advantages([1.0], False) == [0.0]
    assert advantages([1.0, 0.0, 0.0, 0.0], False) == [0.75, -0.25, -0.25, -0.25]
    a = torch.tensor(advantages([1.0, 0.0, 0.0, 0.0], True))
    variance = a.square().mean().item()
    assert abs(variance - 1) < 1e-4, "divided by the standard deviation of all samples"
    assert abs(a.sum()) < 1e-6


def test_overlong_penalty():
    assert [overlong_penalty(n, 20, 10) for n in (5, 10, 15, 20)] == [
        0,
        0,
        -0.5,
        -1,
    ]
    assert overlong_penalty(20, 20, 0) == 0


def with_tools(samples):
    """As if every third token were a tool's: read by the model, not sampled by it."""
    for s in samples:
        s.mask = [float(i % 3 != 1) for i in range(len(s.ids))]
        s.sampled = s.mask
    return samples


def by_hand(kind, samples, model, clip, reference=None, kl_coef=0.0):
    """The objectives as the papers write them: a loop over samples and tokens. A tool's tokens are
    read, and neither trained nor counted. Each token's KL has the weight of the token."""
    total = 0.0
    tokens = sum(sum(s.mask) for s in samples)
    for s in samples:
        sampled = torch.tensor(s.mask) > 0
        lp, mu, A = full_logprobs(model, s), torch.tensor(s.logprobs), s.advantage
        lp = lp[sampled]
        mu = mu[sampled]
        n = len(lp)
        r = (lp - mu).exp()
        weight = {
            "grpo": 1 / n / len(samples),
            "gspo": 1 / n / len(samples),
            "dr_grpo": 1 / (len(samples) * 9),
            "dapo": 1 / tokens,
            "cispo": 1 / tokens,
        }[kind]
        if kind == "gspo":
            r = ((lp - mu).sum() / n).exp()
            total += min(r * A, r.clamp(1 - clip[0], 1 + clip[1]) * A) * n * weight
        elif kind == "cispo":
            total += (r.detach().clamp(max=1 + clip[1]) * A * lp).sum() * weight
        else:
            for x in r:
                total += torch.min(x * A, x.clamp(1 - clip[0], 1 + clip[1]) * A) * weight
        if reference is not None:
            d = full_logprobs(reference, s).detach()[sampled] - lp
            total -= kl_coef * (d.exp() - d - 1).sum() * weight
    return -total


def train_by(want, trainer, samples, model) -> grpo.Trained:
    """Numbers of train_on(samples), whose loss and gradients must be those of `want`, computed with
    the plain model."""
    want.backward()
    found = trainer.train_on(samples)
    assert found.loss == pytest.approx(want.item(), abs=1e-5), "the loss is not the formula's"
    # the Trainer divides in optim_step
    got = {fqn: g / trainer.denominator for fqn, g in gradients(trainer).items()}
    assert_close(got, {fqn: p.grad for fqn, p in model.named_parameters()}, 1e-4)
    return found


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_losses_and_gradients_equal_the_papers(kind):
    """Denominators, clipping on the objective, sequence ratios: off-policy by a different sampler."""
    clip = {"gspo": (0.01, 0.015)}.get(kind, (0.2, 0.28) if kind != "cispo" else (1.0, 0.3))
    trainer = trainer_of(loss=kind, clip_low=clip[0], clip_high=clip[1], local_batch_size=5)
    samples = with_tools(samples_of(sharp_model(seed=0), n_prompts=5))
    rng = random.Random(1)
    for s in samples:  # an older policy
        s.logprobs = [lp + rng.gauss(0, 0.3) for lp in s.logprobs]
    plain = sharp_model()
    assert train_by(by_hand(kind, samples, plain, clip), trainer, samples, plain).clip_share > 0


def of_row(x):
    """sequence_sum of Tokens, where a row is one sample."""
    return x.sum(1, keepdim=True)


def test_clipped_tokens_have_no_gradient_on_one_side_only():
    lp = torch.log(torch.tensor([[1.5, 1.5, 0.5, 0.5, 1.0]])).requires_grad_()
    A = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0]])
    one = torch.ones(1, 5)
    tokens = Tokens(lp, torch.zeros(1, 5), A, one, one, of_row)
    objective, clipped = LOSSES["dapo"].objective(tokens, 0.2, 0.28)
    objective.sum().backward()
    assert (lp.grad != 0).tolist() == [[False, True, True, False, True]]
    assert clipped.tolist() == [[True, False, False, True, False]]


@pytest.mark.parametrize(
    "cap, mode, weights",
    [
        (2.0, "token_truncate", [1.0, 2.0, 0.5 / 0.9]),
        (2.0, "token_mask", [1.0, 0.0, 0.5 / 0.9]),
        (2.0, "sequence_truncate", [2.0] * 3),
        (2.0, "sequence_mask", [0.0] * 3),
        (3.0, "sequence_mask", [0.5**3 / 0.045] * 3),
    ],
)
def test_importance_sampling_weighs_the_gradient(cap, mode, weights):
    """The modes are those of TRL's vllm_importance_sampling_mode. The last token is not of the
    sample."""
    lp = torch.log(torch.tensor([[0.5, 0.5, 0.5, 0.5]])).requires_grad_()
    one = torch.ones(1, 4)
    b = dict(
        mu=torch.log(torch.tensor([[0.5, 0.1, 0.9, 1e-9]])),
        mask=torch.tensor([[1.0, 1.0, 1.0, 0.0]]),
        old=torch.zeros(1, 4),
        advantage=one,
        n=3 * one,
        segment=torch.tensor([[0, 0, 0, 1]]),
    )
    trainer = trainer_of(tis=cap, tis_mode=mode)
    loss, _, _ = trainer.loss_of_tokens(LOSSES["dapo"], b, None, lp, one)
    loss.sum().backward()
    assert torch.allclose(-lp.grad, torch.tensor([[*weights, 0.0]]))


def test_several_updates_keep_the_policy_before_the_first():
    """--tis with --minibatches: the ratio of later updates is against the first policy, not against
    the current policy."""
    trainer, samples = trainer_of(tis=2.0, minibatches=2, loss="dapo"), samples_of(sharp_model())
    for s in samples:
        s.logprobs = [lp - 0.4 for lp in s.logprobs]  # a sampler that was less sure
    agreement.compare_samples(trainer, samples)
    for s in samples:
        assert torch.allclose(torch.tensor(s.old), full_logprobs(sharp_model(), s), atol=1e-4)
    first = trainer.train_on(samples)
    # the ratio is 1; against the sampler it would be 1.5, and clipped
    assert first.clip_share == 0
    want = -sum(math.exp(0.4) * s.advantage * len(s.ids) for s in samples) / sum(
        len(s.ids) for s in samples
    )
    assert first.loss == pytest.approx(want, rel=1e-3)
    trainer.optim_step(0.02)
    assert trainer.train_on(samples).clip_share > 0


@pytest.mark.parametrize("kind", ["grpo", "gspo", "dr_grpo", "dapo"])
def test_kl_to_the_reference_is_k3(kind):
    trainer = trainer_of(kl_coef=0.5, loss=kind)
    trainer.reference = trainer_of(seed=1).model
    samples = with_tools(samples_of(sharp_model()))
    for s in samples:
        s.advantage = 0.0
    plain, other = sharp_model(), sharp_model(seed=1)
    want = by_hand(kind, samples, plain, (0.2, 0.28), other, kl_coef=0.5)
    assert want > 0.01
    mean = by_hand("dapo", samples, plain, (0.2, 0.28), other, kl_coef=1.0).item()
    assert train_by(want, trainer, samples, plain).kl == pytest.approx(mean, rel=1e-4)


def test_minibatches_without_tis_train_against_the_sampler():
    """With --tis the ratio is against the policy before the first update; without, against the one
    that sampled."""
    clip = (0.2, 0.28)
    trainer = trainer_of(minibatches=2, loss="dapo", clip_low=clip[0], clip_high=clip[1])
    samples = samples_of(sharp_model())
    rng = random.Random(1)
    for s in samples:
        s.logprobs = [lp + rng.gauss(0, 0.3) for lp in s.logprobs]
    agreement.compare_samples(trainer, samples)
    plain = sharp_model()
    train_by(by_hand("dapo", samples, plain, clip), trainer, samples, plain)


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo"])
def test_many_calls_and_microbatches_are_one(kind):
    """The denominator is one per optimizer step: not one per micro-batch, per call, or per step
    divided again."""
    samples = samples_of(sharp_model(), n_prompts=7)
    whole, parts = (
        trainer_of(loss=kind, local_batch_size=64),
        trainer_of(loss=kind, local_batch_size=2),
    )
    whole.train_on(samples)
    for part in (samples[:4], samples[4:5], samples[5:]):
        parts.train_on(part)
    assert (
        whole.denominator == parts.denominator == loss_denominator(LOSSES[kind].divisor, samples, 9)
    )
    assert_close(gradients(parts), gradients(whole), 1e-5)
    norms = [t.optim_step(1e-3) for t in (whole, parts)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert whole.policy_version == 1
    assert whole.denominator == 0
    assert not gradients(whole)
    for (fqn, a), (_, b) in zip(whole.model.named_parameters(), parts.model.named_parameters()):
        assert torch.allclose(a, b, atol=1e-5), fqn


def test_groups_of_equal_rewards_may_be_left_out():
    """A = 0 exactly: without such groups in the forward, but counted in the denominator, loss and
    gradient stay the same."""
    samples = samples_of(sharp_model(), n_prompts=6)
    for s in samples[6:15]:
        s.advantage = 0.0
    whole, kept = trainer_of(loss="dr_grpo"), trainer_of(loss="dr_grpo")
    a, b = whole.train_on(samples), kept.train_on(samples[:6] + samples[15:], counted=samples)
    assert_close(gradients(kept), gradients(whole), 1e-5)
    assert a.loss == pytest.approx(b.loss, rel=1e-4)
    assert whole.denominator == kept.denominator == 18 * 9


def mask_truncated(samples):
    found = []
    for s in samples:
        if s.truncated:
            s = replace(s, mask=[0.0] * len(s.ids), sampled=s.mask, advantage=0.0)
        found.append(s)
    return found


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_truncated_samples_leave_numerator_and_denominator_together(kind):
    """--mask_truncated: as if never sampled, except in the proof, which covers all samples."""
    samples = samples_of(sharp_model(), n_prompts=6)
    cut, rest = [s for s in samples if s.truncated], [s for s in samples if not s.truncated]
    assert cut
    assert rest
    plain, trainer = (
        sharp_model(),
        trainer_of(loss=kind, clip_low=0.2, clip_high=0.28, local_batch_size=4),
    )
    found = train_by(
        by_hand(kind, rest, plain, (0.2, 0.28)), trainer, mask_truncated(samples), plain
    )
    assert found.tokens == sum(len(s.ids) for s in samples)
    whole = trainer_of(loss=kind).train_on(samples)
    for name in ("logprob_k3", "logprob_max_diff", "ratio_outside", "entropy"):
        assert getattr(found, name) == pytest.approx(getattr(whole, name), rel=1e-3, abs=1e-5)
    # nothing left, and nothing to divide by
    assert trainer_of().train_on(mask_truncated(cut)).loss == 0


def test_wrong_old_logprobs_are_noticed():
    """A ratio of 1 by construction hides such errors; the proof compares with the generator's
    numbers. Negative tests."""
    samples = samples_of(sharp_model(), n_prompts=6)
    assert trainer_of().train_on(samples).logprob_max_diff < 1e-4
    # stale weights, another temperature
    for wrong in (trainer_of(seed=1), trainer_of(temperature=0.9)):
        found = wrong.train_on(samples)
        assert found.logprob_max_diff > 0.02
        assert found.logprob_k3 > 1e-4
    shifted = [replace(s, logprobs=s.logprobs[1:] + s.logprobs[:1]) for s in samples]
    assert trainer_of().train_on(shifted).logprob_max_diff > 0.1


@pytest.mark.slow
def test_metrics_are_those_of_the_whole_step(tmp_path):
    """With lr 0 every part of a step is trained by one policy: logged numbers depend neither on the
    number of parts, nor on a forward for groups of equal rewards, whose gradient is 0."""
    flags = [
        "--lr",
        0,
        "--steps",
        2,
        "--eval_every",
        0,
        "--checkpoint_every",
        0,
        "--clip_low",
        0,
        "--clip_high",
        0,
        "--async_steps",
        1,
        "--temperature",
        0.9,
        "--prompts_per_step",
        8,
        "--group_size",
        2,
        "--proof_share",
        1,
    ]
    runs = {}
    for name, more in {
        "plain": [],
        "parts": ["--minibatches", 4],
        "all": ["--kl_coef", 1e-12],
    }.items():
        run(1, *TINY, *flags, *more, "--out", tmp_path / name)
        runs[name] = steps_of(tmp_path / name)
    assert any(0 < step["zero_variance_groups"] < 1 for step in runs["plain"])
    assert all("kl" not in step for step in runs["plain"])
    assert all(abs(step["kl"]) < 1e-9 for step in runs["all"])
    for name in ("parts", "all"):
        for a, b in zip(runs["plain"], runs[name], strict=True):
            assert a["tokens_hash"] == b["tokens_hash"]
            assert all(
                a[key] == pytest.approx(b[key], rel=1e-4) for key in ("entropy", "ratio_outside")
            )
            assert a["loss"] == pytest.approx(b["loss"], abs=1e-6)
            assert a["logprob_max_diff"] < 1e-4 > b["logprob_max_diff"]


def test_a_trained_model_has_a_learning_rate_of_its_own():
    given = (
        {},
        dict(init_from="hf"),
        dict(init_from="hf", lora_rank=8),
        dict(init_from="hf", lr=5e-4),
    )
    assert [grpo.Config(**flags).lr for flags in given] == [5e-4, 1e-6, 1e-5, 5e-4]


@pytest.mark.parametrize("equal, n, told", [(0.75, FEW, 1), (0.75, FEW - 1, 0), (0.7, FEW, 0)])
def test_steps_that_teach_little_are_told(capsys, equal, n, told):
    recent = [dict(zero_variance_groups=equal, all_failed_groups=0.5, truncated=0.25)] * n
    warn_of_equal_rewards(recent)
    said = capsys.readouterr().out
    assert (
        said.count("75% of the groups had equal rewards (50% all 0), 25% of the samples were cut")
        == told
        == (not recent)
    )


def test_groups_that_teach_nothing_are_counted():
    groups = []
    for rewards in ((1.0, 1.0), (0.0, 0.0), (1.0, 0.0), (0.5, 0.0)):
        groups.append([Sample(ids=[1], reward=reward, advantage=0.0) for reward in rewards])
    line = sample_numbers(groups, {"drawn": 4, "too_long": 0, "began": 1.0, "ended": 3.0})
    assert (line["zero_variance_groups"], line["all_failed_groups"]) == (0.5, 0.25)
    assert (line["reward_mean"], line["rollout_tokens_per_second"]) == (0.4375, 4.0)


def test_numbers_of_a_step_are_weighted():
    assert agreement.weighted_mean([1.0, 4.0], [10, 30]) == 3.25
    assert agreement.weighted_mean([0.5, 0.0], [10, 30]) == 0.125
    trainer, samples = trainer_of(), samples_of(sharp_model(), n_prompts=6)
    whole = trainer.train_on(samples)
    # forwarded only, and trained
    parts = [agreement.compare_samples(trainer, samples[:5]), trainer.train_on(samples[5:])]
    together = agreement.joined(parts)
    for name in ("logprob_k3", "ratio_outside", "entropy", "tokens"):
        want = pytest.approx(getattr(whole, name), rel=1e-4, abs=1e-9)
        assert getattr(together, name) == want, name
    assert 0 < together.logprob_max_diff < 1e-4


def test_some_samples_without_a_gradient_stand_for_all():
    """All of them differ equally from the trainer, so every draw must report the same mean."""
    samples, found = samples_of(sharp_model(), n_prompts=8, group_size=2), []
    for s in samples[4:]:
        s.advantage = 0.0
        s.logprobs = [x - 0.3 for x in s.logprobs]
    for share in (1.0, 0.5, 0.01):
        trainer = trainer_of(group_size=2, proof_share=share, abort_k3=0.0)
        found.append(
            grpo.update_policy(trainer, [samples[i : i + 2] for i in range(0, 16, 2)], 0.0)
        )
        assert found[-1].logprob_k3 == pytest.approx(found[0].logprob_k3, rel=1e-3)
    assert found[0].proven == 1 > found[1].proven > found[2].proven > 0
    assert found[0].logprob_k3 > 0.01
    assert found[0].grad_norm == pytest.approx(found[2].grad_norm)


# ---------------------------------------------------------------- several ranks


def ranks_train(flags: dict, samples):
    """On every rank: loss, gradients / denominator, and the rollouts of the same prompts."""
    with drawn_adapters():
        trainer = trainer_of(local_batch_size=3, **flags)
    found = trainer.train_on(samples)
    grads = {fqn: g / trainer.denominator for fqn, g in gradients(trainer).items()}
    norm = trainer.optim_step(1e-2)
    env = environments.open_env("reverse")
    cfg = replace(trainer.cfg, prompts_per_step=5, group_size=3)
    with rollouts.whole_weights(trainer.model):
        batch = rollouts.make_batch(
            cfg, env, grpo.Text("", alphabet=env.ALPHABET), trainer.layout, trainer.model, 0, 1
        )
    again = trainer.train_on([replace(s, advantage=0.5) for s in batch["samples"]])
    dist.barrier()
    return found, grads, norm, [s.ids for s in batch["samples"]], again


LAYOUTS = [
    (2, {"dp_shard": 2}),
    (2, {"tp": 2}),
    (2, {"cp": 2, "loss": "gspo"}),
    (2, LORA | {"dp_shard": 2}),
]
LARGE = [
    (2, {"tp": 2, "unknown": [13, 19, 23]}),
    (4, {"dp_shard": 2, "tp": 2}),
    (4, {"dp_replicate": 2, "cp": 2}),
    (4, {"dp_replicate": 2, "dp_shard": 2, "loss": "grpo"}),
    (2, LORA | {"tp": 2}),
    (4, LORA | {"dp_shard": 2, "cp": 2}),
]


@pytest.mark.parametrize(
    "n, flags", LAYOUTS + [pytest.param(*x, marks=pytest.mark.slow) for x in LARGE], ids=str
)
def test_layouts_equal_one_process(n, flags):
    """Gradients summed, not averaged, over ranks with unequal tokens; empty ranks take part; tp
    ranks sample alike."""
    samples = mask_truncated(samples_of(sharp_model(), n_prompts=5, group_size=1))
    # 5 samples: micro-batches of 3 and of 2, or of 3, 2, 0, 0
    assert {sum(s.mask) > 0 for s in samples} == {True, False}
    flags = {"loss": "dapo"} | flags
    alone = {name: value for name, value in flags.items() if name not in AXES}
    want = pool(1).run(ranks_train, alone, samples)[0]
    for rank, (found, grads, norm, ids, again) in enumerate(
        pool(n).run(ranks_train, flags, samples)
    ):
        for name in ("loss", "entropy", "clip_share", "ratio_outside"):
            known = pytest.approx(getattr(want[0], name), abs=2e-5)
            assert getattr(found, name) == known, (rank, name)
        assert_close(grads, want[1], 1e-4)
        assert norm == pytest.approx(want[2], rel=1e-4)
        # the same rollouts, and trained as sampled
        assert ids == want[3]
        assert again.logprob_max_diff < 1e-4


# ---------------------------------------------------------------- whole runs


def test_a_run_and_its_folder(tmp_path):
    out = tmp_path / "run"
    stdout = run(1, *TINY, "--steps", 3, "--out", out)
    steps, evals = steps_of(out), [line for line in metrics(out) if "eval_reward" in line]
    assert (
        [line["step"] for line in steps] == [1, 2, 3] == [line["policy_version"] for line in steps]
    )
    assert [line["step"] for line in evals] == [0, 2, 3]
    assert all(line["grad_norm"] > 0 for line in steps)  # with rewards
    assert all(
        line["logprob_max_diff"] < 1e-4 and line["logprob_k3"] < 1e-6 and line["staleness"] == 0
        for line in steps
    )
    shown = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert {s["step"] for s in shown} == {0, 1, 2, 3}
    assert set(shown[0]) >= {
        "prompt",
        "completion",
        "reward",
        "answer",
        "ids",
    }
    # not always the first
    assert [s["group"] for s in shown if not s["evaluation"]][::4] == [1, 2, 3]
    assert "reward  . training, last " in stdout and "  o validation, last " in stdout
    assert (out / "checkpoints" / "step-3").is_dir()
    code = json.loads((out / "checkpoints" / "step-3" / "code.json").read_bytes())
    # the user's reward, too
    assert {"grpo.py", "models/llama3.py", "tests/env_counting.py"} <= code.keys()
    assert json.loads((out / "config.json").read_bytes())["_run"]["code"].keys() == code.keys()
    assert stdout.startswith("flags: ")
    assert f" --out {out} " in stdout.splitlines()[0]
    before = [(out / name).read_bytes() for name in ("metrics.jsonl", "config.json")]
    assert "is finished" in run(1, *TINY, "--steps", 3, "--lr", 0.1, "--out", out)
    assert [(out / name).read_bytes() for name in ("metrics.jsonl", "config.json")] == before


# The first steps of a run, by several processes and by one: the same tokens and rewards, losses and
# norms to fp32 rounding.
TURNS = ["--env", REPO / "tests" / "env_turns.py", "--max_new_tokens", 24, "--seq_len", 32]


@pytest.mark.slow
@pytest.mark.parametrize(
    "processes, flags, one",
    [
        (4, ["--dp_shard", 2, "--tp", 2], []),
        (2, ["--cp", 2, "--loss", "gspo"], ["--loss", "gspo"]),
        (2, ["--flavor", "debug_moe", "--ep", 2], ["--flavor", "debug_moe"]),
        (2, ["--dp_shard", 2, *TURNS], TURNS),
    ],
    ids=str,
)
def test_processes_take_the_steps_of_one(tmp_path, processes, flags, one):
    extra = ["n_layers=2,dim=32,moe_ffn_dim=32"] if "debug_moe" in flags else [policy.SMALL]
    run(processes, *policy.SAME, "--model_args", *extra, *flags, "--out", tmp_path / "many")
    run(1, *policy.SAME, "--model_args", *extra, *one, "--out", tmp_path / "one")
    assert_same(steps_of(tmp_path / "many"), steps_of(tmp_path / "one"), 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("start", ["warm-up", "own run"])
def test_the_reference_is_saved_once(tmp_path, start):
    """--kl_coef: a continued run, also with --load_step or in another layout, keeps the initial
    policy as its reference."""
    flags = [
        *TINY,
        "--steps",
        4,
        "--checkpoint_every",
        2,
        "--eval_every",
        0,
        "--kl_coef",
        0.1,
        "--compute_dtype",
        "float32",
    ]
    if start == "own run":
        run(1, *TINY, "--steps", 1, "--eval_every", 0, "--out", tmp_path / "first")
        del flags[2:4]  # without --model_args
        flags += ["--init_from", tmp_path / "first"]
    out = tmp_path / "run"
    run(1, *flags, "--out", out)
    saved = {
        path: path.stat().st_mtime_ns for path in (out / "reference").rglob("*") if path.is_file()
    }
    whole = steps_of(out)
    for processes, tolerance in ((1, 0.0), (2, 1e-5)):
        said = run(processes, *flags, "--load_step", 2, "--out", out)
        assert "supervised warm-up" not in said
        assert saved == {path: path.stat().st_mtime_ns for path in saved}
        assert_same(steps_of(out), whole, tolerance)
    shutil.rmtree(out / "reference")
    assert "has not kept its initial policy: it was begun without this flag" in run(
        1, *flags, "--out", out, status=2
    )


def test_a_new_run_does_not_keep_the_reference_of_another(tmp_path):
    """A run that ended before its first checkpoint has left one in --out."""
    about = dict(identity=IDENTITY, config={}, source="", tokenizer_file=None)
    for seed in (0, 1):
        trainer = trainer_of(seed, kl_coef=0.1, out=str(tmp_path))
        trainer.reference = trainer_of().model
        keep_reference(trainer, True, about)
    trainer.reference = trainer_of().model
    keep_reference(trainer, False, about)  # as a continued run reads it
    wanted = dict(sharp_model(seed=1).named_parameters())
    for fqn, p in trainer.reference.named_parameters():
        assert torch.equal(local_tensor(p), wanted[fqn]), fqn


@pytest.mark.parametrize("kind", ["qwen3", pytest.param("deepseek_v3", marks=pytest.mark.slow)])
def test_from_a_hugging_face_folder_and_back(tmp_path, kind):
    """A tiny random model with a real tokenizer and chat template: trained, exported, and
    transformers reads it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy.hf_folder(tmp_path / "hf", kind)
    flags = [
        *TINY[:2],
        *TINY[4:],
        "--seq_len",
        64,
        "--steps",
        2,
        "--kl_coef",
        0.1,
        "--minibatches",
        2,
    ]
    run(
        1,
        "--init_from",
        tmp_path / "hf",
        *flags,
        "--out",
        tmp_path / "run",
        "--export_hf",
        tmp_path / "back",
    )
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 2
    assert all(line["grad_norm"] > 0 and 0 < line["logprob_max_diff"] < 1e-4 for line in steps)
    shown = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[0])
    assert shown["prompt"].startswith("<|im_start|>user\n")
    assert shown["prompt"].endswith("><|im_end|>\n<|im_start|>assistant\n")
    model, again = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "back"),
        AutoTokenizer.from_pretrained(tmp_path / "back"),
    )
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = again("Sum the digits of 123", return_tensors="pt").input_ids
    assert torch.isfinite(model(ids).logits).all()
    assert not torch.equal(model(ids).logits, before(ids).logits)
    ours, _ = load_hf_model(str(tmp_path / "back"))
    assert torch.allclose(ours(ids), model(ids).logits, atol=1e-4)


def test_own_checkpoints_keep_the_chat_template_and_the_ends(tmp_path, capsys):
    """Template and end tokens of a Hugging Face folder are in the run's checkpoint, for --init_from
    and generate.py --chat."""
    policy.hf_folder(tmp_path / "hf", "qwen3")
    (tmp_path / "hf" / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 0]}))
    flags = [
        *TINY[:2],
        *TINY[4:],
        "--seq_len",
        64,
        "--eval_every",
        0,
        "--steps",
        1,
        "--init_from",
        tmp_path / "hf",
    ]
    run(1, *flags, "--out", tmp_path / "run")
    theirs, ours = (
        grpo.Text(folder, chat=open_chat(folder, grpo.Config()))
        for folder in (str(tmp_path / "hf"), str(tmp_path / "run"))
    )
    assert theirs.ends == [2, 0]
    assert sorted(ours.ends) == [0, 2]
    assert theirs.bos
    assert ours.bos
    assert theirs.prompt("12>") == ours.prompt("12>")
    assert "user" in ours.tokenizer.decode(ours.prompt("12>"))
    generate.main(
        [
            "--checkpoint",
            f"{tmp_path}/run",
            "--chat",
            "--prompt",
            "12>",
            "--max_new_tokens",
            "4",
            "--device",
            "cpu",
        ]
    )
    assert capsys.readouterr().out.endswith("\n")


@pytest.mark.slow
def test_dynamic_sampling_fills_the_batch(tmp_path):
    """DAPO: groups of further prompts replace groups of equal rewards; the cursor counts all
    prompts drawn."""
    (tmp_path / "coin.py").write_text(
        "ALPHABET = '0123456789'\nmake = lambda rng: (str(rng.randrange(10**6)), '1')\n"
        "reward = lambda prompt, completion: float(sum(map(ord, completion)) % 2 and int(prompt) "
        "% 3 > 0)\n"
    )
    flags = [
        "--env",
        tmp_path / "coin.py",
        "--steps",
        4,
        "--loss",
        "dapo",
        "--overlong_tokens",
        4,
        "--dynamic_sampling",
        40,
    ]
    run(1, *TINY, *flags, "--out", tmp_path / "run")
    steps = steps_of(tmp_path / "run")
    assert all(line["zero_variance_groups"] == 0 and line["prompts_drawn"] > 4 for line in steps)
    assert any(line["prompts_drawn"] % 4 for line in steps)  # no more than are likely to suffice
    run(1, *TINY, *flags[:-2], "--out", tmp_path / "without")
    without = steps_of(tmp_path / "without")
    failed, equal = (
        sum(line[name] for line in without)
        for name in ("all_failed_groups", "zero_variance_groups")
    )
    assert failed > equal / 2 > 0
    assert {line["prompts_drawn"] for line in without} == {4}


# ---------------------------------------------------------------- signals, hangs, patience

WAITS = '''
import os, time
from tests.env_counting import ALPHABET, make
import tests.env_counting

here, calls = os.path.dirname(__file__), 0


def reward(prompt, completion, truncated=False):
    """As env_counting.py; before step 4, or after so many calls, it waits on each rank or on one until a test goes on."""
    global calls
    calls += 1
    own = os.environ.get("RANK", "0")
    if calls == int(os.environ.get("WAITS_AT", 16 * 3)) + 1 and own == os.environ.get("LATE", own):
        open(f"{here}/waiting", "w").close()
        while not os.path.exists(f"{here}/go"):
            time.sleep(0.01)
    return tests.env_counting.reward(prompt, completion)
'''
HANGS = """
import os, sys, time
sys.path.insert(0, {repo!r})
import grpo
optim_step, begun = grpo.Trainer.optim_step, []


def hang(self, *args, **options):
    begun.append(1)
    if "%s, %d" % (os.environ.get("RANK", "0"), len(begun) - 3) == os.environ["HANGS_AT"]:  # rank, step after 3 of warm-up
        open(os.path.dirname(__file__) + "/waiting", "w").close()
        time.sleep(600)
    return optim_step(self, *args, **options)


grpo.Trainer.optim_step = hang
grpo.run(grpo.main, grpo.Config)
"""
LONG = [
    *TINY[2:],
    "--steps",
    6,
    "--eval_every",
    0,
    "--checkpoint_every",
    100,
    "--compute_dtype",
    "float32",
]


@pytest.fixture
def start(tmp_path):
    """start(processes, flag, ...) -> Job with the task of env.py, which waits if the test writes no
    other; remaining processes are killed at the end of the test."""
    jobs = []
    (tmp_path / "env.py").write_text(WAITS)

    def start(processes, *flags, program="grpo.py", **env):
        files = ["--env", tmp_path / "env.py", "--out", tmp_path / "run"]
        jobs.append(
            Job(
                policy.launch(processes, *LONG, *files, *flags, program=program),
                tmp_path / "run",
                tmp_path / f"log {len(jobs)}",
                **env,
            )
        )
        return jobs[-1]

    yield start
    for job in jobs:
        job.kill_everything()


@pytest.mark.slow
@pytest.mark.parametrize("where, flags", [("rollout", []), ("training", ["--async_steps", 3])])
def test_killed_and_continued_is_undisturbed(tmp_path, start, where, flags):
    """kill -9 inside the rollouts of step 4, or in its update: the run goes on from step 2, with
    the same rewards."""
    flags = ["--steps", 5, "--checkpoint_every", 2, "--eval_every", 2, *flags]
    if where == "rollout":
        # rewards of three steps and two evaluations
        job = start(1, *flags, WAITS_AT=str(3 * 16 + 2 * 3 * 8))
    else:
        (tmp_path / "hangs.py").write_text(HANGS.format(repo=str(REPO)))
        job = start(1, *flags, program=tmp_path / "hangs.py", WAITS_AT="-1", HANGS_AT="0, 4")
    job.until((tmp_path / "waiting").exists)
    job.kill_everything()
    (tmp_path / "go").touch()
    assert [line["step"] for line in steps_of(job.out)] == [1, 2, 3]
    assert os.listdir(job.out / "checkpoints") == ["step-2"]
    again = start(1, *flags)
    assert again.end() == 0
    assert "continuing from" in again.text()
    run(1, *LONG, "--env", tmp_path / "env.py", *flags, "--out", tmp_path / "whole")
    assert_same(steps_of(job.out), steps_of(tmp_path / "whole"), 0.0)
    for name in ("eval_reward", "eval_greedy"):
        assert [x[name] for x in metrics(job.out) if name in x] == [
            x[name] for x in metrics(tmp_path / "whole") if name in x
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "processes, how, steps_ahead",
    [
        (1, "SIGTERM", 0),
        (1, "SIGTERM", 1),
        (2, "SIGTERM to the workers", 1),
        (2, "SIGINT to all", 0),
    ],
)
def test_a_signal_saves_and_ends(tmp_path, start, processes, how, steps_ahead):
    """In place and with a generator rank, in step and one ahead: the step is finished and saved,
    and the run can go on."""
    flags = ["--async_steps", steps_ahead] + ["--gen_ranks", 1] * (processes > 1)
    job = start(processes, *flags)
    job.until((tmp_path / "waiting").exists)
    for pid in job.processes():
        if pid != job.launcher.pid or "workers" not in how:
            os.kill(pid, signal.SIGINT if "SIGINT" in how else signal.SIGTERM)
    (tmp_path / "go").touch()
    # torchrun's own status, for a signal or for a worker's 75, is 1
    assert job.end() == (75 if processes == 1 else 1)
    said = job.text()
    assert "stopped after step" in said
    assert "error on rank" not in said
    assert os.listdir(job.out / "checkpoints") == [f"step-{job.last_step()}"]
    assert 3 <= job.last_step() <= 4
    again = start(processes, *flags)
    assert again.end() == 0
    assert "continuing from" in again.text()
    run(1, *LONG, "--env", tmp_path / "env.py", "--out", tmp_path / "whole", *flags[:2])
    assert_same(steps_of(job.out), steps_of(tmp_path / "whole"), 1e-5 if processes > 1 else 0.0)


@pytest.mark.slow
def test_a_signal_without_checkpoints_ends_as_well(tmp_path, start):
    job = start(2, "--gen_ranks", 1, "--async_steps", 1, "--checkpoint_every", 0)
    job.until((tmp_path / "waiting").exists)
    os.kill(job.worker(0), signal.SIGTERM)
    (tmp_path / "go").touch()
    assert job.end() == 1
    assert "stopped after step" in job.text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "rank, where", [(0, "rollout"), (0, "training"), (1, "rollout"), (0, "warm-up")]
)
def test_trainer_and_generator_end_together(tmp_path, start, rank, where):
    """If one dies, while the generator samples or waits for a training step, or before the first
    weights, the other ends as well, even without help of a launcher: torchrun is stopped in this
    test."""
    if where == "rollout":
        job = start(2, "--gen_ranks", 1)
    else:
        (tmp_path / "hangs.py").write_text(HANGS.format(repo=str(REPO)))
        hangs_at = {"training": "0, 4", "warm-up": "0, -2"}[where]
        program = tmp_path / "hangs.py"
        job = start(2, "--gen_ranks", 1, program=program, WAITS_AT="-1", HANGS_AT=hangs_at)
    job.until((tmp_path / "waiting").exists)
    # Both are looked up while they live: later the survivor may have ended, and a child of it, or a
    # stranger with the pid of that child, would be waited for.
    killed = job.worker(rank)
    survivor = job.worker(1 - rank)
    os.kill(job.launcher.pid, signal.SIGSTOP)
    os.kill(killed, signal.SIGKILL)
    (tmp_path / "go").touch()

    def has_ended(pid):
        try:
            stat = Path("/proc", str(pid), "stat").read_text()
        except OSError:  # gone, perhaps in this moment
            return True
        return stat.rpartition(")")[2].split()[0] == "Z"

    job.until(lambda: has_ended(killed))
    job.until(lambda: has_ended(survivor))


@pytest.mark.slow
@pytest.mark.parametrize(
    "processes, late, samplers, flags",
    [(2, 1, 2, ["--dp_shard", 2]), (3, 2, 1, ["--gen_ranks", 1])],
    ids=str,
)
def test_rewards_may_take_longer_than_training(tmp_path, start, processes, late, samplers, flags):
    """--train_timeout_s is for collectives in training: other ranks, and trainers of generators,
    wait for a slow reward."""
    job = start(
        processes,
        "--steps",
        4,
        "--checkpoint_every",
        0,
        "--train_timeout_s",
        15,
        *flags,
        LATE=str(late),
        WAITS_AT=str(2 * 16 // samplers),
    )  # in step 3
    job.until((tmp_path / "waiting").exists)
    time.sleep(20)
    (tmp_path / "go").touch()
    assert job.end() == 0, job.text()[-3000:]
    assert max(line["rollout_s"] for line in steps_of(job.out)) > 18
    assert job.last_step() == 4


@pytest.mark.slow
def test_a_hang_in_training_still_ends_the_run(tmp_path, start):
    (tmp_path / "hangs.py").write_text(HANGS.format(repo=str(REPO)))
    job = start(
        2, "--dp_shard", 2, "--train_timeout_s", 20, program=tmp_path / "hangs.py", HANGS_AT="1, 3"
    )
    job.until(lambda: "error on rank 0" in job.text())
    assert job.last_step() == 2
    assert "imed out" in job.text()
