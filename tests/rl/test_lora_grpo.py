"""grpo.py with --lora_rank: samples come from the trained policy; the reference is the model
without adapters."""

import pytest
import torch
from layouts import drawn_adapters
from policy import (
    LORA,
    TINY,
    assert_close,
    gradients,
    hf_folder,
    run,
    samples_of,
    sharp_model,
    steps_of,
    trainer_of,
)

from rl.policy import forward
from storage.adapters import is_adapter


def test_the_reference_is_the_model_below_the_adapters():
    with drawn_adapters():
        one, two = (trainer_of(loss="dapo", **LORA) for _ in range(2))
    two.reference = trainer_of().model  # a second copy, as without LoRA
    samples = samples_of(sharp_model())
    _, batch = next(one.microbatches(samples))
    policy, base = (
        forward(model, batch, one.layout)[0].detach() for model in (one.model, two.reference)
    )
    assert torch.equal(one.reference_logprobs(batch), base)
    assert (policy - base).abs().max() > 1e-2
    # the adapters are on again
    assert torch.equal(forward(one.model, batch, one.layout)[0].detach(), policy)
    found = [trainer.train_on(samples) for trainer in (one, two)]
    assert found[0].loss == pytest.approx(found[1].loss, rel=1e-6)
    assert_close(gradients(one), gradients(two), 1e-6)
    assert all(is_adapter(fqn) and grad.any() for fqn, grad in gradients(one).items())


@pytest.mark.slow
def test_generator_ranks_get_the_adapters_and_a_run_goes_on(tmp_path):
    """DeepSeek: cached attention multiplies with a weight by hand, so the adapter must be merged."""
    hf_folder(tmp_path / "hf", "deepseek_v3", std=0.3)
    flags = [
        *TINY[:2],
        *TINY[4:],
        "--init_from",
        tmp_path / "hf",
        "--seq_len",
        64,
        "--max_new_tokens",
        24,
        "--eval_every",
        0,
        "--lora_rank",
        4,
        "--lora_on",
        "wq_a,wkv_b,wo",
        "--kl_coef",
        0.1,
        "--lr",
        "1e-2",
        "--compute_dtype",
        "float32",
    ]
    run(1, *flags, "--steps", 4, "--out", tmp_path / "one")
    run(3, *flags, "--steps", 2, "--pp", 2, "--gen_ranks", 1, "--out", tmp_path / "two")
    run(3, *flags, "--steps", 4, "--pp", 2, "--gen_ranks", 1, "--out", tmp_path / "two")
    exact = ("step", "tokens_hash", "reward_mean", "loss", "logprob_max_diff")
    one, two = (
        [{name: step[name] for name in exact} for step in steps_of(tmp_path / out)][:2]
        for out in ("one", "two")
    )
    assert one == two
    assert [step["step"] for step in steps_of(tmp_path / "two")] == [1, 2, 3, 4]
    assert all(
        step["grad_norm"] > 0 and step["logprob_max_diff"] < 1e-4
        for step in steps_of(tmp_path / "two")
    )
    assert not (tmp_path / "one" / "reference").exists()
