"""--routing_replay: what the generator took is recorded for every token, and the trainer takes it, in every layout."""
import base64
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from policy import TINY, assert_close, gradients, run, samples_of, sharp_model, steps_of, trainer_of
from pool import pool

import grpo
from distributed.experts import balance_experts
from models.deepseek import DeepSeekConfig
from models.moe import Balance
from models.qwen3 import Qwen3Config
from rl import environments, rollouts
from rl.routing import recorded_experts, routers

SIZES = dict(dim=32, n_heads=4, ffn_dim=64, vocab_size=24, max_seq_len=64, n_experts=8, top_k=2, moe_ffn_dim=32)
QWEN3 = Qwen3Config(**SIZES, n_layers=2, n_kv_heads=2, head_dim=8)
DEEPSEEK = DeepSeekConfig(**SIZES, n_layers=3, q_lora_rank=16, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4,
                          v_head_dim=8, n_shared_experts=1, n_dense_layers=1, n_groups=4, top_k_groups=2)


def recorded_samples(model, **options):
    with recorded_experts(model):
        return samples_of(model, **options)


def ids_of(sample) -> torch.Tensor:
    """(T, L, k) of a sample, read as bytes."""
    ids = torch.tensor([*base64.b64decode(sample["experts"])])
    return ids.view(len(sample["prompt"]) + len(sample["ids"]) - 1, 2, 2)


def chosen(model, forward) -> torch.Tensor:
    """(F, N, L, k): what the layers took in each of F forwards, as they counted it."""
    seen = {router: [] for router in routers(model)}

    def count(self, index):
        seen[self].append(index)
        return counted(self, index)

    counted, Balance.count = Balance.count, count
    try:
        forward()
    finally:
        Balance.count = counted
    return torch.stack([torch.stack(of_layer) for of_layer in seen.values()], 2)


LONG = dict(n_prompts=6, max_new_tokens=20)


def tool(ids):
    return [3, 5] if ids[-1] % 3 == 0 else []


@pytest.mark.parametrize("config", [QWEN3, DEEPSEEK], ids=["qwen3", "deepseek"])
@pytest.mark.parametrize("options", [{}, {"rows": 3}, {"tool": tool}, {"tool": tool, "ahead": 3, "rows": 6}],
                         ids=lambda options: " ".join(options) or "plain")
def test_what_is_recorded_is_what_a_forward_over_the_sample_takes(config, options):
    """Rows that are refilled and compacted, prompts that several rows share, and tokens that a tool's answer makes void."""
    model = sharp_model(config)
    plain, samples = samples_of(model, **LONG, **options), recorded_samples(model, **LONG, **options)
    assert [s["ids"] for s in samples] == [s["ids"] for s in plain] and not any("experts" in s for s in plain)
    for s in samples:
        tokens = torch.tensor([s["prompt"] + s["ids"][:-1]])
        assert torch.equal(ids_of(s).sort(-1)[0], chosen(model, lambda tokens=tokens: model(tokens))[0].sort(-1)[0])
    assert len({len(s["ids"]) for s in samples}) > 1 and ("tool" in options) == any(0.0 in s["mask"] for s in samples)


def test_long_prompts_are_recorded_piece_by_piece(monkeypatch):
    monkeypatch.setattr("rl.decoding.PREFILL_CHUNK", 3)
    model = sharp_model(QWEN3)
    for s in recorded_samples(model):
        tokens = torch.tensor([s["prompt"] + s["ids"][:-1]])
        assert torch.equal(ids_of(s).sort(-1)[0], chosen(model, lambda tokens=tokens: model(tokens))[0].sort(-1)[0])


@pytest.mark.parametrize("config", [QWEN3, DEEPSEEK], ids=["qwen3", "deepseek"])
def test_the_same_weights_train_the_same(config):
    samples, found = recorded_samples(sharp_model(config)), []
    for part in (samples, [{k: v for k, v in s.items() if k != "experts"} for s in samples]):
        trainer = trainer_of(config=config, local_batch_size=5)
        found.append((trainer.score(part), trainer.train_on(part), gradients(trainer)))
    assert found[0][:2] == found[1][:2]
    assert_close(found[0][2], found[1][2], 1e-6)


@pytest.mark.parametrize("ac", ["none", "full", "op"])
def test_the_trainer_takes_what_the_generator_took(ac):
    """The generator has other weights, so that of its choices a third is not the trainer's."""
    samples = recorded_samples(sharp_model(QWEN3, seed=1))
    trainer = trainer_of(config=QWEN3, ac=ac)
    (part, batch), = trainer.microbatches(samples)
    n, T = batch["tokens"].shape
    real = torch.arange(T) < torch.tensor([[len(ids_of(s))] for s in part])  # the others are padding
    want = torch.cat([ids_of(s) for s in part])
    own, = chosen(trainer.model, lambda: trainer.forward(trainer.model, batch))
    assert (own[real.flatten()].sort(-1)[0] != want.sort(-1)[0]).any(-1).float().mean() > 0.3
    balance_experts([trainer.model], trainer.layout, "none", 0.0)
    taken = [*chosen(trainer.model, lambda: trainer.score(samples)), *chosen(trainer.model, lambda: trainer.train_on(samples))]
    assert len(taken) == (2 if ac == "none" else 3)  # the backward has computed the forward again
    assert all(torch.equal(once[real.flatten()], want) for once in taken)
    load = torch.stack([router.load for router in routers(trainer.model)])  # of the training forward, padding included
    assert torch.equal(load, torch.stack([ids.flatten().bincount(minlength=8).float() for ids in taken[1].unbind(1)]))
    router = routers(trainer.model)[0]
    assert router.replayed is None and not router.keeps


def test_replay_brings_a_generator_in_bf16_nearer():
    samples, trainer = recorded_samples(sharp_model(QWEN3).bfloat16(), n_prompts=24), trainer_of(config=QWEN3)
    replayed = trainer.score(samples)["logprob_k3"]
    own = trainer.score([{k: v for k, v in s.items() if k != "experts"} for s in samples])["logprob_k3"]
    late = [s | {"experts": base64.b64encode(bytes(ids_of(s).roll(1, 0).flatten().tolist()))} for s in samples]
    assert replayed < own / 2 and trainer.score(late)["logprob_k3"] > 10 * own  # late: of the token before


def ranks_train_experts(flags: dict, samples):
    """On every rank: loss and gradients / denominator of the samples; the experts of the rollouts of some prompts."""
    trainer = trainer_of(config=QWEN3, local_batch_size=3, **flags)
    found = trainer.train_on(samples)
    grads = {fqn: g / trainer.denominator for fqn, g in gradients(trainer).items()}
    env = environments.open_env("reverse")
    cfg = replace(trainer.cfg, prompts_per_step=5, group_size=3, routing_replay=True)
    with rollouts.whole_weights(trainer.model):
        batch = rollouts.make_batch(cfg, env, grpo.Text("", alphabet=env.ALPHABET), trainer.layout, trainer.model, 0, 1)
    dist.barrier()
    return found["loss"], grads, [(s["ids"], s["experts"]) for s in batch["samples"]]


LAYOUTS = [(2, {"ep": 2}), (2, {"tp": 2}), (2, {"tp": 2, "etp": 2, "ac": "full"}), (2, {"cp": 2, "ac": "full"})]
LARGE = [(4, {"dp_shard": 2, "tp": 2, "ep": 4}), (4, {"cp": 2, "tp": 2, "ac": "op"}), (4, {"dp_replicate": 2, "dp_shard": 2})]


@pytest.mark.parametrize("n, flags", LAYOUTS + [pytest.param(*x, marks=pytest.mark.slow) for x in LARGE], ids=str)
def test_layouts_equal_one_process(n, flags):
    samples = recorded_samples(sharp_model(QWEN3, seed=1), n_prompts=5, group_size=1)
    want = pool(1).run(ranks_train_experts, {}, samples)[0]
    for loss, grads, sampled in pool(n).run(ranks_train_experts, flags, samples):
        assert loss == pytest.approx(want[0], abs=2e-5) and sampled == want[2]
        assert_close(grads, want[1], 1e-4)


@pytest.mark.slow
def test_a_run_goes_on_with_the_experts_in_its_checkpoint(tmp_path):
    """Generator ranks send them, a checkpoint keeps those of the batch that was sampled ahead; evaluations need none."""
    out, flags = tmp_path / "run", [
        *TINY, "--flavor", "debug_moe", "--model_args", "n_layers=2,dim=32,moe_ffn_dim=32", "--compute_dtype", "float32",
        "--lr", "1e-2", "--warmup_steps", 1, "--async_steps", 1, "--steps", 4, "--checkpoint_every", 2]
    run(2, *flags, "--routing_replay", "--gen_ranks", 1, "--out", out)
    whole = steps_of(out)
    shutil.rmtree(out / "checkpoints" / "step-4")
    assert "sampled again" not in run(1, *flags, "--routing_replay", "--out", out)
    for a, b in zip(whole, steps_of(out), strict=True):
        assert a["tokens_hash"] == b["tokens_hash"] and a["loss"] == pytest.approx(b["loss"], abs=1e-5)
    shutil.rmtree(out / "checkpoints" / "step-4")
    assert "--routing_replay True -> None" in run(1, *flags, "--out", out)
    assert whole[0]["logprob_k3"] < 1e-8 and 0 < whole[2]["logprob_k3"] and whole[2]["staleness"] == 1
