"""forks/train_distill.py: gradient and KL are the formula written out, in every layout; runs on
ranks."""

import policy
import pytest
import torch
from policy import (
    assert_close,
    full_logprobs,
    gradients,
    launch,
    samples_of,
    sharp_model,
    trainer_of,
)
from pool import pool
from programs import run_program
from saves import refuses

from forks.train_distill import Config, Trainer

pytestmark = pytest.mark.slow


def student_of(flags):
    """A trainer with a policy and another teacher."""
    trainer = trainer_of(loss="dapo", **flags)
    trainer.reference = trainer_of(seed=1, **flags).model
    trainer.compares = True
    trainer.__class__ = Trainer
    return trainer


def ours(flags, samples):
    return (trainer := student_of(flags)).train_on(samples), gradients(trainer)


@pytest.mark.parametrize(
    "n, flags", [(1, {}), (2, dict(dp_shard=2, pack_tokens=64)), (4, dict(cp=2, tp=2))], ids=str
)
def test_gradient_is_that_of_the_reverse_kl(n, flags):
    student = sharp_model()
    teacher = sharp_model(seed=1)
    samples = samples_of(student)
    surrogate = 0.0
    kl = []
    for s in samples:
        lp = full_logprobs(student, s)
        q = full_logprobs(teacher, s).detach()
        surrogate = surrogate + ((lp.detach() - q) * lp).sum()
        kl.append(lp - q)
    surrogate.backward()
    for found, grads in pool(n).run(ours, flags, samples):
        assert found.kl == pytest.approx(torch.cat(kl).mean().item(), rel=1e-4)
        assert found.kl > 0.1
        assert_close(grads, {fqn: p.grad for fqn, p in student.named_parameters()}, 1e-4)


def test_the_policy_comes_nearer_to_the_teacher():
    trainer = student_of({})
    kl = []
    for i in range(15):
        kl.append(trainer.train_on(samples_of(trainer.model, n_prompts=8, group_size=8, seed=i)).kl)
        trainer.optim_step(1e-2)
    assert sum(kl[-3:]) < 0.8 * sum(kl[:3]), kl


def test_runs(tmp_path):
    """Two ranks sample and learn as one process does, rewards or not; an unlike teacher is refused."""
    refuses("--std_norm: advantages come from the teacher", Config, std_norm=True)
    policy.run(
        1, *policy.TINY, "--steps", 1, "--eval_every", 0, "--seed", 1, "--out", tmp_path / "teacher"
    )

    def distill(n, name, *argv):
        command = launch(
            n,
            *policy.SAME,
            "--teacher",
            tmp_path / "teacher",
            *argv,
            "--out",
            tmp_path / name,
            program="forks/train_distill.py",
        )
        return run_program(command, env=policy.ENV, timeout=400)

    checked = distill(1, "checked", "--check")  # grpo.main stops, to which main hands over
    assert checked.returncode == 0, checked.stderr
    assert '"seeded": ["seed"]' in checked.stdout.splitlines()[-1]
    assert not (tmp_path / "checked").exists()
    assert distill(1, "one", "--control", "random").returncode == 0
    assert distill(2, "two", "--control", "random", "--tp", 2).returncode == 0
    policy.assert_same(policy.steps_of(tmp_path / "one"), policy.steps_of(tmp_path / "two"), 1e-5)
    done = distill(1, "other", "--env", "sum_digits")
    assert done.returncode == 2
    assert "has another vocabulary" in done.stderr
    assert len(done.stderr.splitlines()) == 1
