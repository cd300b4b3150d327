"""forks/train_dpo.py: loss and gradient are the formula written out, in every layout; pairs as TRL
reads them; whole runs."""

import json

import pytest
import torch
from policy import (
    ENV,
    assert_close,
    full_logprobs,
    gradients,
    hf_folder,
    samples_of,
    sharp_model,
    trainer_of,
)
from pool import pool
from runs import REPO, column, launch, run, train_lines
from saves import refuses

from forks.train_dpo import split_pair, update_policy

pytestmark = pytest.mark.slow  # make test has no room for it


def ours(flags, pairs):
    """(numbers of a step, gradient of the mean loss) with a policy and another reference."""
    trainer = trainer_of(**flags)
    grads = {}
    trainer.reference = trainer_of(seed=1, **flags).model

    def keep_gradients(lr):
        for fqn, g in gradients(trainer).items():
            grads[fqn] = g / trainer.denominator
        return 0.0

    trainer.optim_step = keep_gradients
    return update_policy(trainer, pairs, 0.3, 0.0), grads


@pytest.mark.parametrize(
    "n, flags",
    [
        (1, {}),
        (1, dict(pack_tokens=64)),
        (2, dict(dp_shard=2, pack_tokens=64)),
        (2, dict(tp=2)),
        (4, dict(cp=2, tp=2)),
    ],
    ids=str,
)
def test_loss_and_gradient_are_the_formula(n, flags):
    """As in TRL: -logsigmoid(beta * ((pi+ - pi-) - (ref+ - ref-))) with sums of log-probabilities,
    mean over the pairs."""
    samples = samples_of(sharp_model(), n_prompts=5, group_size=2)
    pairs = [samples[i : i + 2] for i in range(0, 10, 2)]
    policy = sharp_model()
    reference = sharp_model(seed=1)
    losses = []
    for pair in pairs:
        pi, ref = ([full_logprobs(model, s).sum() for s in pair] for model in (policy, reference))
        losses.append(-torch.nn.functional.logsigmoid(0.3 * ((pi[0] - pi[1]) - (ref[0] - ref[1]))))
    torch.stack(losses).mean().backward()
    want = {fqn: p.grad for fqn, p in policy.named_parameters()}
    for found, grads in pool(n).run(ours, flags, pairs):
        assert found["loss"] == pytest.approx(sum(losses).item() / 5, rel=1e-5)
        assert found["loss_max"] > 1.1 * found["loss"]
        assert_close(grads, want, 1e-4)


def test_pairs():
    def say(*words):
        return [{"role": "user", "content": word} for word in words]

    assert split_pair(dict(prompt="a", chosen="b", rejected="c")) == ("a", "b", "c")
    assert split_pair(dict(chosen=say("a", "b"), rejected=say("a", "c"))) == (
        say("a"),
        say("b"),
        say("c"),
    )
    assert split_pair(dict(chosen="1 + 1 = 2", rejected="1 + 1 = 3")) == ("1 + 1 =", " 2", " 3")
    for wrong in (
        dict(chosen="a", rejected="a"),
        dict(prompt="a", chosen="b"),
        dict(prompt="a", chosen=[], rejected=say("b")),
    ):
        refuses("all texts or all lists", split_pair, wrong)


def test_runs(tmp_path):
    """Of messages, with adapters on two processes, and with all weights on one, continued: the
    right answers win."""
    hf_folder(tmp_path / "hf", "qwen3")
    lines = []
    for i in range(12):
        lines.append(
            dict(
                prompt=[dict(role="user", content=f"{i}?")],
                chosen=[dict(role="assistant", content="yes")],
                rejected=[dict(role="assistant", content="no no")],
            )
        )
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, lines)))
    common = [
        "--init_from",
        tmp_path / "hf",
        "--data",
        tmp_path / "pairs.jsonl",
        "--pairs_per_step",
        4,
        "--val_pairs",
        4,
        "--lr",
        "1e-2",
        "--seq_len",
        64,
        "--warmup_steps",
        1,
        "--compute_dtype",
        "float32",
        "--device",
        "cpu",
    ]
    for name, n, flags in (
        ("lora", 2, ["--tp", 2, "--lora_rank", 4]),
        ("all", 1, ["--pack_tokens", 128]),
    ):
        for steps in (4, 8):
            command = launch(
                n,
                REPO / "forks/train_dpo.py",
                *common,
                *flags,
                "--steps",
                steps,
                "--out",
                tmp_path / name,
            )
            said = run(command, env=ENV)
        found = train_lines(tmp_path / name)
        assert column(found, "step") == [*range(1, 9)]
        assert "accuracy 1.000" in said
        assert found[0]["loss"] == pytest.approx(0.6931472, abs=1e-5)
        assert found[-1]["loss"] < 0.6
        assert found[-1]["margin"] > 0.1
