"""forks/train_distill.py: gradient and KL are the formula written out, in every layout; whole runs come nearer to it."""
import pytest
import torch
from policy import (
    ENV,
    TINY,
    assert_close,
    assert_same,
    full_logprobs,
    gradients,
    launch,
    run,
    samples_of,
    sharp_model,
    steps_of,
    trainer_of,
)
from pool import pool
from programs import run_program

from forks.train_distill import Config, Trainer

pytestmark = pytest.mark.slow


def ours(flags, samples):
    """(numbers, gradient of the summed loss) with a policy and another teacher."""
    trainer = trainer_of(loss="dapo", **flags)
    trainer.reference, trainer.compares, trainer.__class__ = trainer_of(seed=1, **flags).model, True, Trainer
    return trainer.train_on(samples), gradients(trainer)


@pytest.mark.parametrize("n, flags", [(1, {}), (2, dict(dp_shard=2, pack_tokens=64)), (4, dict(cp=2, tp=2))], ids=str)
def test_gradient_is_that_of_the_reverse_kl(n, flags):
    policy, teacher = sharp_model(), sharp_model(seed=1)
    samples, surrogate, kl = samples_of(policy), 0.0, []
    for s in samples:
        lp, q = full_logprobs(policy, s), full_logprobs(teacher, s).detach()
        surrogate = surrogate + ((lp.detach() - q) * lp).sum()
        kl.append(lp - q)
    surrogate.backward()
    for found, grads in pool(n).run(ours, flags, samples):
        assert found["kl"] == pytest.approx(torch.cat(kl).mean().item(), rel=1e-4) and found["kl"] > 0.1
        assert_close(grads, {fqn: p.grad for fqn, p in policy.named_parameters()}, 1e-4)


def test_runs(tmp_path):
    """Two ranks sample and learn as one process does, rewards or not; an unlike teacher is refused."""
    with pytest.raises(ValueError, match="--std_norm: advantages come from the teacher"):
        Config(std_norm=True)
    common = [*TINY, "--compute_dtype", "float32", "--eval_every", 0, "--checkpoint_every", 0, "--lr", "1e-2"]
    run(1, *TINY, "--steps", 1, "--eval_every", 0, "--sft_steps", 60, "--sft_lr", "1e-2", "--seed", 1,
        "--out", tmp_path / "teacher")

    def distill(n, name, *argv, steps=9):
        return run_program(launch(n, *common, *argv, "--warmup_steps", 1, "--steps", steps, "--out", tmp_path / name,
                                  program="forks/train_distill.py"), env=ENV, timeout=400)

    for n, name, flags in ((1, "one", []), (2, "two", ["--tp", 2])):
        done = distill(n, name, "--teacher", tmp_path / "teacher", "--control", "random", *flags)
        assert done.returncode == 0, done.stderr[-2000:]
    one, two = steps_of(tmp_path / "one"), steps_of(tmp_path / "two")
    assert_same(one[:3], two[:3], 1e-5)
    assert sum(line["kl"] for line in one[-3:]) < 0.7 * sum(line["kl"] for line in one[:3])
    done = distill(1, "other", "--teacher", tmp_path / "teacher", "--env", "sum_digits")
    assert done.returncode == 2 and "has another vocabulary" in done.stderr and len(done.stderr.splitlines()) == 1
