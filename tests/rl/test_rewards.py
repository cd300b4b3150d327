"""Failing, hanging and slow rewards, and the numbers of an evaluation."""

import json
import math
import random
import re
import statistics
import threading
import time
from types import SimpleNamespace

import pytest
from policy import TINY, run, steps_of

from rl import evaluation, rewards
from rl.sample import Sample


def paid(reward, texts, **flags) -> list:
    cfg = rewards.RewardConfig(**{"failed_reward": 0.0, **flags})
    payments = rewards.Payments(SimpleNamespace(reward=reward), len(texts), cfg)
    for i in random.Random(0).sample(range(len(texts)), len(texts)):  # samples end in any order
        payments.add(i, ("1 2", [texts[i]], [False]))
    return [failure or reward for reward, failure, _ in payments.wait()]


def test_a_reward_that_hangs_is_given_up_and_the_others_go_on():
    release = threading.Event()
    try:
        for n in (1, 2):
            results = paid(
                lambda prompt, text: float(text != "hang" or release.wait()),
                ["hang", "a", "hang", "b", "hang"],
                reward_timeout_s=1.0,  # `a` and `b` must end within it, on a busy machine too
                reward_threads=n,
            )
            assert [results[1], results[3]] == [1.0, 1.0]
            assert threading.active_count() > 3 * n
            late = "no reward for prompt '1 2', completion 'hang': it takes longer than --reward_timeout_s 1"
            assert [str(r) for r in results[::2]] == [late] * 3
        ended = paid(
            lambda prompt, text: float(release.wait()),
            ["hang"] * 9,
            reward_timeout_s=0.1,
            failed_reward=None,
        )
        assert len(ended) == 1  # the end of the run
    finally:
        release.set()


def test_an_endless_loop_is_ended():
    """Its thread would slow all others until the end of the run. A bare except: hears it again."""

    def reward(prompt, text):
        while text == "loop":
            pass
        while text == "stubborn":
            try:
                while True:
                    pass
            except BaseException:
                text = "loop"
        return 1.0

    before = threading.active_count()
    for n in (1, 3):
        results = paid(
            reward, ["loop", "a", "stubborn", "b"], reward_timeout_s=1.0, reward_threads=n
        )
        assert [results[1], results[3]] == [1.0, 1.0]
        assert "longer than" in results[0]
    for _ in range(6000):
        if threading.active_count() == before:
            break
        time.sleep(0.1)
    assert threading.active_count() == before


def test_threads_give_the_rewards_of_one():
    """In any order of ending, and with failures."""

    def reward(prompt, completion):
        time.sleep(random.random() / 100)
        if completion == "13":
            raise SystemExit("no\nmore")
        return int(completion) if completion != "7" else math.nan

    texts = [str(i) for i in range(40)]
    for n, limit in ((1, 60.0), (8, 60.0), (1000, 0.0)):
        results = paid(reward, texts, reward_threads=n, reward_timeout_s=limit)
        failed = {i: str(result) for i, result in enumerate(results) if isinstance(result, str)}
        assert [i for i, result in enumerate(results) if i != result] == [7, 13] == sorted(failed)
        assert "completion '7': ValueError('the reward is nan')" in failed[7]
        assert "\n" not in failed[13]


def test_together_is_shorter():
    """Waiting rewards wait at the same time: the last of 16 to arrive releases all."""
    barrier = threading.Barrier(16, timeout=600)
    assert (
        paid(lambda prompt, text: float(barrier.wait() >= 0), ["x"] * 16, reward_threads=16)
        == [1.0] * 16
    )


def test_named_parts_are_added_up_and_logged_and_a_group_is_paid_at_once(tmp_path):
    """The group's reward sees all samples of its prompt: here the longest of them earns 1."""
    (tmp_path / "env.py").write_text(
        "from tests.env_counting import ALPHABET, make\n\n\ndef group_reward(prompt, completions, "
        "truncated):\n"
        "    assert len(completions) == len(truncated) > 1 or not any(truncated[1:])\n"
        "    longest = max(map(len, completions))\n"
        "    return [{'longest': float(len(text) == longest), 'size': len(completions) / 8} for "
        "text in completions]\n"
    )
    run(
        1,
        *TINY,
        "--env",
        tmp_path / "env.py",
        "--steps",
        2,
        "--checkpoint_every",
        0,
        "--out",
        tmp_path / "run",
    )
    for line in steps_of(tmp_path / "run"):
        assert line["reward_part_size"] == 0.5
        assert 0.25 <= line["reward_part_longest"] <= 1
        parts = line["reward_part_longest"] + line["reward_part_size"]
        said = f"reward_mean {line['reward_mean']} is not the sum of the parts, {parts}"
        assert line["reward_mean"] == pytest.approx(parts, abs=1e-6), said
    for value, message in (
        ([1.0], "1 rewards for 2 samples"),
        ([1.0, math.inf], "is inf"),
        ([{}, {"a": "x"}], "TypeError"),
    ):
        group = SimpleNamespace(group_reward=lambda prompt, completions: value)  # noqa: B023
        paid = rewards.pay(group, "1", ["a", "b"], [False, False])
        assert all(p.reward is None and message in p.failure for p in paid)
        assert "completion 'b'" in paid[1].failure


def test_a_sample_that_ends_in_a_thought_earns_0_in_a_group_too():
    """Whatever the group's reward says of the empty text that stands for it."""
    group = SimpleNamespace(group_reward=lambda prompt, completions: [{"right": 1.0}] * 3)
    texts = ["7", "<think>so 7", "<think>so</think>7"]
    right = rewards.Paid(1.0, "", {"right": 1.0})
    assert rewards.pay(group, "1", texts, [False] * 3) == [right, rewards.Paid(0.0), right]


def test_errors_are_over_prompts():
    samples = [Sample(reward=float(r)) for r in (1, 1, 0, 1, 0, 0, 1, 0)]
    line = evaluation.held_out_numbers(samples, [Sample(reward=1.0), Sample(reward=0.0)] * 2, 2)
    means = [1.0, 0.5, 0.0, 0.5]
    assert line == {
        "eval_reward": 0.5,
        "eval_greedy": 0.5,
        "eval_pass_at_k": 0.75,
        "eval_n": 4,
        "eval_k": 2,
        "eval_reward_stderr": pytest.approx(statistics.stdev(means) / 2),
        "eval_pass_at_k_stderr": pytest.approx(0.25),
        "eval_greedy_stderr": pytest.approx(math.sqrt(1 / 12)),
    }
    assert (
        evaluation.held_out_numbers(samples[:2], [Sample(reward=1.0)], 2)["eval_reward_stderr"]
        is None
    )


@pytest.mark.parametrize(
    "processes, flags",
    [
        (1, ["--reward_threads", 16]),  # the late ones of a step wait at the same time
        pytest.param(2, ["--dp_shard", 2, "--reward_threads", 3], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_with_rewards_that_fail(tmp_path, processes, flags):
    """Failed rewards get their value, are counted, and the first is named."""
    (tmp_path / "env.py").write_text(
        "import time\nimport tests.env_counting\nfrom tests.env_counting import ALPHABET, "
        "make\n\n\n"
        "def reward(prompt, completion):\n    if len(completion) % 3 == 1:\n        "
        "time.sleep(1e6)\n"
        "    return tests.env_counting.reward(prompt, completion)\n"
    )
    flags = [
        *TINY,
        "--env",
        tmp_path / "env.py",
        "--steps",
        2,
        "--eval_every",
        0,
        "--checkpoint_every",
        0,
        *flags,
        "--reward_timeout_s",
        1.5,
    ]
    said = run(processes, *flags, "--failed_reward", -0.5, "--out", tmp_path / "run")
    assert re.search(
        r" of 16 rewards failed and count as --failed_reward -0.5, the first one: no reward for prompt '\d",
        said,
    )
    assert sum(line["failed_rewards"] for line in steps_of(tmp_path / "run")) > 0
    shown = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").open()]
    assert all((s["reward"] == -0.5) == (len(s["completion"]) % 3 == 1) for s in shown)
    assert len(shown) == 8
