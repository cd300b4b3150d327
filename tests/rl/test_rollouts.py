"""Samples of a policy, in place and on ranks of their own: the same tokens and log-probabilities,
against rl/rollouts.py."""

import dataclasses
import json
import math
import multiprocessing
import os
import resource
import shutil
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import policy
import pytest
import torch
import torch.distributed as dist
from layouts import build, config
from policy import (
    SAME,
    TINY,
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
from runs import Job, json_lines
from saves import refuses
from torch.distributed.tensor import DTensor

import grpo
from distributed.layout import Layout
from grpo import Config
from lora.lora import add_adapters
from rl import decoding, engines, environments, messages, rollouts
from rl.policy import list_weights, pack_weights
from rl.sample import Sample
from storage.adapters import is_adapter, lora_names
from storage.hf import load_hf_model


@pytest.mark.parametrize("tp, tool", [(1, None), (2, None), (1, print)])
def test_ranks_whose_forwards_are_their_own_or_alike_do_not_wait_for_each_other(
    monkeypatch, tp, tool
):
    monkeypatch.setattr(rollouts, "patient_group", None)
    assert rollouts.lockstep(SimpleNamespace(ep=1, tp=tp), 1, tool) is None


def test_a_sample_depends_on_its_noise_and_not_on_its_row():
    """Refill, compaction, prefill batches, padding: nothing changes a sample."""
    model = sharp_model()
    together = samples_of(model, n_prompts=11, group_size=3)
    lengths = {len(s.ids) for s in together}
    # rows end at different times, so rows are refilled
    assert len(lengths) > 3
    assert any(not s.truncated for s in together)
    for rows in (3, 7, 100):
        again = samples_of(model, n_prompts=11, group_size=3, rows=rows)
        assert [s.ids for s in again] == [s.ids for s in together]
        for a, b in zip(again, together):
            assert torch.allclose(torch.tensor(a.logprobs), torch.tensor(b.logprobs), atol=1e-5)


@pytest.mark.parametrize("kind", ["reward", "group_reward", "tool"])
def test_rewards_begin_while_other_samples_go_on(monkeypatch, kind):
    """After the first sample has ended, no forward goes on before its reward has begun; of a group,
    after its last sample. With a tool rewards come after all, so that a single thread calls one of
    the two at a time."""
    model, added, begun, seen = sharp_model(), threading.Event(), threading.Event(), []
    pays = lambda prompt, text: begun.set() or 1.0  # noqa: E731
    env = (
        SimpleNamespace(reward=pays)
        if kind != "group_reward"
        else SimpleNamespace(
            group_reward=lambda prompt, texts: [pays(prompt, text) for text in texts]
        )
    )
    if kind == "tool":
        env.tool, env.TOOL_END = str, "never"
    add = rollouts.Payments.add
    monkeypatch.setattr(rollouts.Payments, "add", lambda *args: (add(*args), added.set()))
    model.register_forward_pre_hook(
        lambda *_: seen.append(begun.wait(600)) if added.is_set() else None
    )
    cfg = Config(rollout_rows=3, max_new_tokens=9, seq_len=16)
    layout = SimpleNamespace(world_size=1, data_rank=0, data_ranks=1, cp=1, tp=1, ep=1, rank=0)
    text = SimpleNamespace(prompt=lambda task: [1, 2, int(task)], decode=str, ends=[0])
    samples = rollouts.sample_groups(
        cfg, env, text, layout, model, [(f"train/0/{i}", str(i), "") for i in range(6)], 3, 1.0
    )
    assert len(samples) == 18
    assert all(s.reward == 1 and s.text == str(list(s.ids)) for s in samples)
    assert bool(seen) == (kind != "tool")
    assert all(seen)
    assert begun.is_set()


def test_prompts_are_read_once_for_their_group_and_rows_are_refilled():
    model, seen = sharp_model(), []
    hook = model.register_forward_pre_hook(lambda m, args: seen.append(tuple(args[0].shape)))
    samples = samples_of(model, n_prompts=6, group_size=4, rows=8)
    hook.remove()
    prefills = [shape for i, shape in enumerate(seen) if i == 0 or shape[0] not in (8,)]
    # every prompt once, in a row of a prefill
    assert sum(shape[0] for shape in prefills if shape[0] <= 2) == 6
    # 8 samples, then the next 8
    without_refill = sum(max(len(s.ids) for s in samples[i : i + 8]) for i in range(0, 24, 8))
    assert len([s for s in seen if s[0] == 8]) <= without_refill


def test_a_rank_that_is_done_goes_on_with_those_that_are_not():
    """All samples of this rank end at once; another rank has prompts left, and this rank joins the
    other's forwards."""
    answers = iter([(3, False), (0, True), (0, False)])  # from all ranks, after this rank's end
    agree = lambda *numbers: numbers if any(numbers) else next(answers)  # noqa: E731
    noise = torch.rand(8, 4, 5, generator=torch.Generator().manual_seed(0))
    samples = decoding.rollout(
        sharp_model(), [[1, 2, 3]] * 8, noise, 1.0, [], max_len=32, rows=64, agree=agree
    )
    assert [len(s.ids) for s in samples] == [5] * 32
    assert next(answers, None) is None


def test_eos_is_in_and_everything_after_it_is_out_also_when_padding_is_eos():
    """A sampled EOS is trained, in the mask and in the logprobs; padding may have the same id."""
    model = sharp_model()
    samples = samples_of(model, n_prompts=12)
    whole = [s for s in samples if not s.truncated]
    assert whole
    assert all(
        s.ids[-1] == 0 and 0 not in s.ids[:-1] and s.mask == [1.0] * len(s.ids) for s in whole
    )
    samples, packed = next(trainer_of().microbatches(samples))  # right padding is id 0 as well
    assert packed["mask"].sum() == sum(len(s.ids) for s in samples)
    for row, s in zip(range(len(samples)), samples):
        ends = len(s.prompt) + len(s.ids) - 1
        assert packed["mask"][row, ends - 1] == 1
        assert packed["mask"][row, ends:].sum() == 0


def test_what_has_probability_0_is_never_sampled():
    """test_generate.py has the distribution; here are its ends."""
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0, -torch.inf]])
    assert decoding.draw(logits, torch.tensor([1 - 2**-24]), 1.0)[0] == 3
    assert decoding.draw(logits, torch.rand(1), 0.0)[0] == 0
    assert decoding.draw(logits.flip(1), torch.zeros(1), 1.0)[0] == 1
    wide = torch.full((3, 2000), -torch.inf)  # a draw has two levels, with chunks of the vocabulary
    wide[0, 0] = wide[1, 1999] = wide[2, decoding.DRAW_CHUNK - 1] = wide[2, decoding.DRAW_CHUNK] = 0
    for u, last in ((0.0, decoding.DRAW_CHUNK - 1), (1 - 2**-53, decoding.DRAW_CHUNK)):
        assert decoding.draw(wide, torch.full((3,), u, dtype=torch.float64), 1.0)[0].tolist() == [
            0,
            1999,
            last,
        ]


def test_batch_invariant_is_exact(request):
    """Bit for bit on a single thread with the shapes of this test; nothing more is promised."""
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(1)
    trainer = trainer_of(batch_invariant=True, local_batch_size=5)
    samples = samples_of(trainer.model, n_prompts=6, group_size=4, batch_invariant=True)
    found = trainer.train_on(samples)
    assert found.logprob_max_diff == 0.0 == found.logprob_k3 == found.ratio_outside
    trainer = trainer_of()
    found = trainer.train_on(samples_of(trainer.model, n_prompts=6, group_size=4))
    assert 0 < found.logprob_max_diff < 1e-4


def test_ids_that_the_tokenizer_lacks_are_never_sampled():
    """In the rewarded text such ids would be invisible. Generator and trainer both give probability
    0."""
    unknown = [3, 7, 14, 19, 23]
    usual, samples = (
        samples_of(trainer_of(unknown=ids).model, n_prompts=8, group_size=6)
        for ids in (None, unknown)
    )
    assert {i for s in usual for i in s.ids} & set(unknown)
    assert not {i for s in samples for i in s.ids} & set(unknown)
    trainer, other = trainer_of(unknown=unknown), trainer_of()
    found = trainer.train_on(samples)
    assert found.logprob_max_diff < 1e-4
    assert math.isfinite(found.entropy)
    assert other.train_on(samples).logprob_max_diff > 0.01
    head = gradients(trainer)[
        next(fqn for fqn in gradients(trainer) if fqn.endswith("head.weight"))
    ]
    assert (head[unknown] == 0).all()
    assert head.isfinite().all()
    assert head.any()


def test_tool_tokens_are_read_and_not_trained():
    """The tool's answer is in the context, without gradient and outside of the denominator."""
    model = sharp_model()
    tool = lambda ids: [20, 7] if ids[-1] == 7 else []  # noqa: E731
    found = [
        s
        for seed in range(9)
        for s in samples_of(model, seed=seed, reply=lambda s: tool(s.ids))
        if 0.0 in s.mask
    ]
    assert found
    for s in found:
        chosen = torch.tensor(s.mask) > 0
        assert torch.allclose(
            full_logprobs(model, s)[chosen], torch.tensor(s.logprobs)[chosen], atol=1e-4
        )
    # a sample that ends with the tool's words: others in their place change nothing at all
    end = [
        Sample(
            prompt=[1, 2],
            ids=[5, 7, a, b],
            logprobs=[-1.0, -1.0, 0.0, 0.0],
            mask=[1.0, 1.0, 0.0, 0.0],
            advantage=1.0,
        )
        for a, b in ((20, 21), (3, 4))
    ]
    trainers = [trainer_of(loss="dapo") for _ in end]
    losses = [t.train_on([s]).loss for t, s in zip(trainers, end)]
    assert losses[0] == losses[1]
    assert trainers[0].denominator == 2
    assert all(
        torch.equal(a, b)
        for a, b in zip(gradients(trainers[0]).values(), gradients(trainers[1]).values())
    )


def test_what_is_trained_are_the_sampled_ids():
    """Never the encoded text: "1" + "2" may become the token "12"."""
    env = environments.open_env("reverse")
    cfg = Config(prompts_per_step=3, group_size=2, seq_len=20)
    text = grpo.Text("", alphabet=env.ALPHABET)
    trainer = trainer_of(seq_len=20)  # its vocabulary of 24 covers the 12 ids of this text
    text.decode = lambda ids: "something else"
    batch = rollouts.make_batch(cfg, env, text, trainer.layout, trainer.model, 0, 0)
    for s in batch["samples"]:
        _, packed = next(trainer.microbatches([replace(s, advantage=1.0)]))
        assert packed["labels"][0][packed["mask"][0] > 0].tolist() == [*s.ids]
        assert s.text == "something else"


class Noting(Config):
    """Flags that note which of them are read."""

    read = set()

    def __getattribute__(self, name):
        Noting.read.add(name)
        return super().__getattribute__(name)


def test_a_batch_is_sampled_again_if_a_flag_changes_that_it_was_made_with():
    """Each flag that sampling reads is saved beside a batch that was sampled ahead; but for those
    that change how fast the same samples come, or their last bits."""
    env = environments.open_env("reverse")
    text = grpo.Text("", alphabet=env.ALPHABET)
    trainer = trainer_of(seq_len=20)
    cfg = Noting(prompts_per_step=3, group_size=2, seq_len=20, dynamic_sampling=1)
    Noting.read.clear()
    rollouts.make_batch(cfg, env, text, trainer.layout, trainer.model, 0, 0)
    flags = {field.name for field in dataclasses.fields(Config)}
    read = Noting.read & flags
    assert {"temperature", "group_size", "control", "seq_len", "seed"} <= read
    saved = {name.removeprefix("--") for name in rollouts.batch_flags(Config())}
    assert read - saved <= {"rollout_rows", "rollout_timeout_s", "batch_invariant", "compile"}


WAITING = """
import os
import time

from tests.env_counting import *
from tests import env_counting

paid = 0


def reward(prompt, completion):
    global paid
    while "RANK" in os.environ and paid >= 16 and written() < paid // 16:
        time.sleep(0.01)
    paid += 1
    return env_counting.reward(prompt, completion)


def written():
    return open(PATH).read().count("reward_mean") if os.path.exists(PATH) else 0
"""


@pytest.mark.parametrize("k", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_separate_generators_equal_the_emulation(tmp_path, k):
    """A trainer and a generator, k steps ahead, against a single process with the same schedule.
    The generator pays for a batch only after the previous step was trained, so a trainer that waits
    for its generator first would hang."""
    (tmp_path / "env_waiting.py").write_text(
        f"PATH = {str(tmp_path / 'two' / 'metrics.jsonl')!r}\n{WAITING}"
    )
    flags = [
        *SAME,
        "--env",
        tmp_path / "env_waiting.py",
        "--reward_timeout_s",
        600,
        "--steps",
        k + 2,
        "--async_steps",
        k,
        "--lr",
        "1e-2",
        "--warmup_steps",
        0,
    ]
    run(2, *flags, "--gen_ranks", 1, "--out", tmp_path / "two")
    run(1, *flags, "--out", tmp_path / "one")
    two, one = steps_of(tmp_path / "two"), steps_of(tmp_path / "one")
    assert_same(two, one, 1e-5)
    assert (
        [line["staleness"] for line in two]
        == [*range(k), k, k]
        == [line["staleness"] for line in one]
    )
    assert two[0]["logprob_max_diff"] < 1e-4 < two[-1]["logprob_max_diff"]  # k policies apart


def batches_of(out, step: int) -> list[dict]:
    """The batches that a checkpoint keeps for the next steps."""
    return json.loads((out / "checkpoints" / f"step-{step}" / rollouts.BATCHES).read_text())[
        "batch"
    ]


def test_ranks_that_share_a_model_must_sample_the_same(monkeypatch):
    monkeypatch.setattr(rollouts, "gather", lambda value, group: [value, (value[0] + 1, [])])
    with pytest.raises(
        RuntimeError, match="ranks 0 and 1 share one model but sampled different tokens"
    ):
        rollouts.gather_samples([], SimpleNamespace(cp=1, tp=2, rank=0), None)


def test_batches_ahead_are_saved_as_arrays(tmp_path):
    """A token has 12 bytes, as base64 16; a list in JSON had 60."""
    cfg, numbers = Config(async_steps=1), torch.rand(1000).tolist()
    sample = Sample(
        prompt=[1, 2],
        ids=[*range(1000)],
        logprobs=numbers,
        mask=[1.0, 0.0] * 500,
        text="",
        reward=1.0,
    )
    batch = dict(samples=[rollouts.as_arrays(sample)], cursor=3, version=1)
    assert [*batch["samples"][0].logprobs] == numbers
    ((name, content),) = rollouts.pack_batches([batch], cfg).items()
    (tmp_path / name).write_bytes(content)
    assert len(content) < 16 * 1000 + 3000
    assert rollouts.reuse_batches({"ahead": 1}, str(tmp_path), cfg, True) == [batch]
    assert rollouts.pack_batches([], cfg) == {}
    assert rollouts.reuse_batches({}, "", cfg, True) == []
    saved = json.loads(content)  # of a copy whose samples have another field
    saved["batch"][0]["samples"][0]["colour"] = "red"
    (tmp_path / name).write_text(json.dumps(saved))
    refuses(
        f"{name}: .*'colour'.*other fields than in the run that saved it: ",
        rollouts.reuse_batches,
        {"ahead": 1},
        str(tmp_path),
        cfg,
        True,
    )


def test_a_full_disk_at_samples_ends_no_run(tmp_path, capsys):
    """/dev/full answers every write as a full disk does."""
    (tmp_path / "samples.jsonl").symlink_to("/dev/full")
    text = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids, skip_special_tokens: "a"))
    cfg = Config(out=str(tmp_path), log_samples=1)
    messages.keep_samples(cfg, 3, [Sample(prompt=[1], text="b")], text)
    said = f"step 3: {tmp_path}/samples.jsonl cannot be written (No space left on device): "
    assert capsys.readouterr().out == f"{said}its samples are left out\n"


def keep_beyond_the_limit(out, text):
    cfg = Config(out=out, log_samples=1)
    # longer than the line that this process prints, for the limit holds for stdout, too
    messages.keep_samples(cfg, 1, [Sample(prompt=[1], text="b" * 10_000)], text)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    size = os.path.getsize(f"{out}/samples.jsonl")
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, resource.RLIM_INFINITY))
    messages.keep_samples(cfg, 2, [Sample(prompt=[1], text="b")], text)


def test_samples_are_written_whole_or_not_at_all(tmp_path):
    text = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids, skip_special_tokens: "a"))
    process = multiprocessing.get_context("fork").Process(
        target=keep_beyond_the_limit, args=(str(tmp_path), text)
    )
    process.start()
    process.join()
    assert process.exitcode == 0
    assert [line["step"] for line in json_lines(tmp_path / "samples.jsonl")] == [1]


def test_a_clip_is_refused_for_a_loss_that_clips_nothing(monkeypatch, tmp_path):
    monkeypatch.setitem(grpo.LOSSES, "dapo", grpo.SUPERVISED)
    cfg = Config(loss="dapo", clip_low=0.1, out=str(tmp_path / "run"))
    refuses("--clip_low 0.1 has no effect with a --loss that clips nothing", grpo.main, cfg)


@pytest.mark.slow
@pytest.mark.parametrize(
    "k, processes, flags",
    [
        (3, 1, ["--minibatches", 2]),
        (3, 2, ["--gen_ranks", 1, "--dynamic_sampling", 1]),
        (2, 2, ["--dp_shard", 2]),
    ],
    ids=str,
)
def test_a_run_goes_on_with_all_batches_that_were_ahead(tmp_path, k, processes, flags):
    """From each checkpoint, also from the last, with fewer batches ahead because the run was about
    to end."""
    flags, out = (
        [*SAME, *flags, "--async_steps", k, "--lr", "3e-3", "--warmup_steps", 0, "--steps", 6],
        tmp_path / "run",
    )
    del flags[flags.index("--checkpoint_every") : flags.index("--checkpoint_every") + 2]
    run(processes, *flags, "--checkpoint_every", 2, "--out", out)
    whole, updates = steps_of(out), 2 if "--minibatches" in flags else 1
    for step, n in ((2, k), (4, 2)):
        versions = [updates * max(0, of - 1 - k) for of in range(step + 1, step + 1 + n)]
        assert [batch["version"] for batch in batches_of(out, step)] == versions
    run(processes, *flags, "--checkpoint_every", 2, "--load_step", 2, "--out", out)
    assert_same(steps_of(out), whole, 0.0)
    assert len({line["staleness"] for line in whole}) > 1


GAME = """
import os
import time

from tests.env_counting import ALPHABET, make

TURN_END = "7"
here = os.path.dirname(__file__)


def trained():
    path = f"{here}/run/metrics.jsonl"
    return open(path).read().count("reward_mean") if os.path.exists(path) else 0


def reset(task):
    return [task], task


def step(state, text):
    while os.path.exists(f"{here}/closed") and trained() >= 5:  # until the test has killed the run
        time.sleep(0.01)
    state.append(text)
    return str(len(state)), len(state) == 4, len(text) % 3 / 4
"""


@pytest.mark.slow
def test_games_sampled_ahead_go_on_after_a_kill(tmp_path):
    """kill -9 of trainer and generator while batches are in flight: the hashes, rewards and losses
    of an undisturbed run."""
    (tmp_path / "game.py").write_text(GAME)
    flags = [
        *TINY,
        "--env",
        tmp_path / "game.py",
        "--max_new_tokens",
        20,
        "--seq_len",
        32,
        "--gen_ranks",
        1,
        "--steps",
        12,
        "--async_steps",
        2,
        "--reward_threads",
        4,
        "--eval_every",
        0,
        "--checkpoint_every",
        2,
        "--lr",
        "3e-3",
        "--warmup_steps",
        0,
    ]
    out = tmp_path / "run"
    (tmp_path / "closed").touch()
    job = Job(policy.launch(2, *flags, "--out", out), out, tmp_path / "log")
    job.until_step(5)
    job.kill_everything()
    (tmp_path / "closed").unlink()
    assert 5 <= max(line["step"] for line in steps_of(out)) < 12
    assert "continuing from" in run(2, *flags, "--out", out)
    run(2, *flags, "--out", tmp_path / "whole")
    assert_same(steps_of(out), steps_of(tmp_path / "whole"), 0.0)
    assert steps_of(out)[-1]["staleness"] == 2
    assert all(line["tool_calls"] > 0.5 for line in steps_of(out))


def test_trainer_and_generator_meet_at_the_start(monkeypatch):
    """Twice on one store, which torchrun keeps for all starts: machines count their starts each for
    themselves."""
    store, cpu = (
        dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
        torch.device("cpu"),
    )
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    cfg, numbers = (
        SimpleNamespace(gen_ranks=1, init_timeout_s=600, rollout_timeout_s=600),
        [torch.zeros(1), torch.ones(1)],
    )

    def meet(rank):
        engines.open_bridge(cfg, rank, cpu).talk.broadcast(numbers[rank], 0).wait()

    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(meet, (0, 1))] == [*threads.map(meet, (0, 1))]
        assert numbers == [0, 0]
    cfg.init_timeout_s = 1
    with pytest.raises(TimeoutError, match="1 of 2 processes did not come in 1 s"):
        meet(0)


def test_a_batch_that_is_too_old_ends_the_run():
    cfg = Config(async_steps=2, minibatches=2)
    assert engines.staleness({"version": 5}, 7, cfg) == {"staleness": 2}
    with pytest.raises(
        RuntimeError, match="5 policy versions old, more than --async_steps 2 x --minibatches 2"
    ):
        engines.staleness({"version": 5}, 10, cfg)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3", "adapters"])
def test_weights_travel_bit_by_bit(tmp_path, kind):
    """Tied ones once, buffers in their own dtype; with LoRA from the second time on only the
    adapters."""
    policy.hf_folder(tmp_path / "hf", "llama" if kind == "adapters" else kind, std=0.3)
    ours, theirs = (load_hf_model(str(tmp_path / "hf"))[0] for _ in range(2))
    for model in (ours, theirs):
        add_adapters(model, lora_names(model, ["wq", "wo"] * (kind == "adapters")), 2, 4.0)
    received = list_weights(theirs, torch.bfloat16)
    for t, dtype in received.values():
        t.data = torch.zeros(t.shape, dtype=dtype)
    for again in (False, True):
        for p in [
            p
            for fqn, p in ours.named_parameters()
            if not again or kind != "adapters" or is_adapter(fqn)
        ]:
            torch.nn.init.normal_(p)
        listed = list_weights(ours, torch.bfloat16, again and kind == "adapters")
        packed, whole = pack_weights(listed, Layout(), None), list_weights(ours, torch.bfloat16)
        assert [*packed] == [*listed]
        assert pack_weights(listed, Layout(dp_shard=2, rank=1), None) == {}
        for fqn, sent in packed.items():
            received[fqn][0].data.copy_(sent)
        assert [*whole] == [*received]
        assert len(listed) < len(whole) or not (again and kind == "adapters")
        assert all(
            received[fqn][0].dtype == dtype and torch.equal(t.to(dtype), received[fqn][0])
            for fqn, (t, dtype) in whole.items()
        )
    assert len({dtype for _, dtype in whole.values()}) == (
        2 if kind in ("deepseek_v3", "qwen3_moe") else 1
    )


@pytest.mark.parametrize(
    "kind, processes, layout",
    [
        ("", 3, ["--pp", 2]),
        pytest.param("deepseek_v3", 3, ["--tp", 2], marks=pytest.mark.slow),
        pytest.param("qwen3_moe", 5, ["--pp", 2, "--dp_shard", 2], marks=pytest.mark.slow),
    ],
)
def test_generators_serve_trainers_that_could_not_sample(tmp_path, kind, processes, layout):
    """Samples and evaluations equal those of one process; and either run, of slow rows, goes on in
    the other's layout, with its reference and the batch that was sampled ahead."""
    model = ["--model_args", f"{policy.SMALL},tie_embeddings=true"]
    if kind:
        policy.hf_folder(tmp_path / "hf", kind, std=0.3)
        model = ["--init_from", tmp_path / "hf"]
    flags = [
        *SAME[:2],
        *SAME[4:],
        *model,
        "--seq_len",
        64,
        "--steps",
        4,
        "--lr",
        "2e-3",
        "--warmup_steps",
        0,
        "--abort_k3",
        0,
        "--eval_every",
        1,
        "--async_steps",
        1,
        "--kl_coef",
        0.1,
        "--dynamic_sampling",
        1,
        "--checkpoint_every",
        2,
    ]
    layouts = (processes, *layout, "--gen_ranks", 1), (1,)
    for names, more in [(("many", "one"), []), (("one", "many"), ["--load_step", 2])][
        : 1 + (kind != "")
    ]:
        for name, (n, *own) in zip(names, layouts):
            run(n, *flags, *own, *more, "--out", tmp_path / name)
        assert_same(steps_of(tmp_path / "many"), steps_of(tmp_path / "one"), 1e-4 if kind else 1e-5)
        assert policy.evaluations(tmp_path / "many") == policy.evaluations(tmp_path / "one")


@pytest.mark.slow
def test_a_batch_of_other_flags_is_sampled_again(tmp_path):
    """--async_steps 1 keeps a batch in the checkpoint; with another --group_size it would merge the
    groups of two prompts."""
    out, flags = tmp_path / "run", [*TINY, "--steps", 4, "--eval_every", 0, "--checkpoint_every", 2]
    run(1, *flags, "--async_steps", 1, "--out", out)
    again = {}
    for name, other in {
        "same": ["--async_steps", 1],
        "step": [],
        "group": ["--async_steps", 1, "--group_size", 8],
    }.items():
        shutil.copytree(out, tmp_path / name)
        said = run(1, *flags, *other, "--load_step", 2, "--out", tmp_path / name)
        again[name] = steps_of(tmp_path / name)[2:]
        assert ("sampled again" in said) == (name != "same")
        assert len(again[name]) == 2
    assert_same(again["same"], steps_of(out)[2:], 0.0)
    assert "--async_steps 1 -> 0" not in said
    assert "--group_size 4 -> 8" in said
    assert [line["staleness"] for line in again["step"]] == [0, 0]
    assert [line["staleness"] for line in again["group"]] == [0, 1]
    prompts = [s["prompt"] for s in batches_of(tmp_path / "group", 2)[0]["samples"]]
    shown = [
        json.loads(line) for line in (tmp_path / "group" / "samples.jsonl").read_text().splitlines()
    ]
    # a group has one prompt
    assert len({s["prompt"] for s in shown if s["step"] == 3}) == 1
    assert prompts[0] != prompts[4]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3"])
def test_generator_ranks_compute_what_the_trainer_computes(tmp_path, kind, dtype):
    """To the last bit: the same tokens and log-probabilities, and so the same loss and gradient."""
    policy.hf_folder(tmp_path / "hf", kind, std=0.3)
    flags = [
        *TINY[:2],
        *TINY[4:],
        "--init_from",
        tmp_path / "hf",
        "--seq_len",
        64,
        "--max_new_tokens",
        24,
        "--steps",
        3,
        "--eval_every",
        0,
        "--checkpoint_every",
        0,
        "--compute_dtype",
        dtype,
    ]
    run(1, *flags, "--out", tmp_path / "one")
    run(2, *flags, "--gen_ranks", 1, "--out", tmp_path / "two")
    exact = ("tokens_hash", "reward_mean", "loss", "grad_norm", "logprob_max_diff")
    one, two = (
        [{name: step[name] for name in exact} for step in steps_of(tmp_path / out)]
        for out in ("one", "two")
    )
    assert one == two
    assert all(step["grad_norm"] > 0 for step in one)


def hooks_around_forwards(flags) -> list[int]:
    """Before, inside of and after whole_weights()."""
    (model,), layout = build(config(), flags, 4, 2)

    def count() -> int:
        return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())

    found = [count()]
    with rollouts.whole_weights(model):
        assert layout.tp > 1 or not any(isinstance(p, DTensor) for p in model.parameters())
        found.append(count())
    return [*found, count()]


def test_nothing_is_gathered_around_each_token():
    """FSDP's hooks are off while a rank decodes, those of tp stay, and training finds all of them
    again."""
    before, inside, after = pool(2).run(hooks_around_forwards, {})[0]
    assert before == after > 0 == inside
    before, inside, after = pool(2).run(hooks_around_forwards, {"tp": 2})[0]
    assert before == after > inside > 0


def test_kernels_that_a_gpu_lacks_end_the_run_before_anything_is_trained(monkeypatch):
    model, layout = sharp_model(), SimpleNamespace(tp=1)
    rollouts.try_sampling(model, layout)
    monkeypatch.setattr(
        decoding,
        "sdpa",
        Mock(side_effect=RuntimeError("No available kernel.\nAborting execution.")),
    )
    refuses(
        "cannot sample .No available kernel.*: use --engine", rollouts.try_sampling, model, layout
    )
