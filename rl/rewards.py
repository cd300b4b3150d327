"""(3) of grpo.py: rewards with a time limit, in threads, and the fate of failed rewards; the numbers of an evaluation.

A reward is the user's Python on a model's text, so a reward may raise, or never return. A late reward is given up, but a thread
cannot be ended from outside: the thread runs on until the process ends, and slows the others. Code that never releases the
interpreter, such as a regular expression that backtracks without end, also stops the clock; then only the other ranks end the
run, after --rollout_timeout_s.
"""
import inspect
import math
import queue
import threading
import time
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(kw_only=True)
class RewardConfig:
    reward_timeout_s: float = 300.0  # a reward that takes longer has failed; 0 = no limit
    reward_threads: int = 1  # rewards, tools and games that are called at once, by threads: for those that wait for a server
    failed_reward: float | None = None  # reward of a sample whose reward fails or is late; none = end the run


class Paid(NamedTuple):
    """What a sample earned: its reward, the sum of the parts if the reward has named parts; or None, and the failure."""

    reward: float | None
    failure: str = ""
    parts: dict = {}


def pay(env, prompt: str, completions: list[str], truncated: list[bool]) -> list[Paid]:
    """Pay the samples of a prompt: all samples of the group at once for a group_reward, else one sample. All fail together, for
    instance if a reward is not finite."""
    try:
        together = hasattr(env, "group_reward")
        function = env.group_reward if together else env.reward
        asks = "truncated" in inspect.signature(function).parameters
        given = dict(truncated=truncated if together else truncated[0]) if asks else {}
        values = function(prompt, completions, **given) if together else [function(prompt, completions[0], **given)]
        if len(values) != len(completions):
            raise ValueError(f"{len(values)} rewards for {len(completions)} samples")
        rewards = [float(sum(value.values()) if isinstance(value, dict) else value) for value in values]
        if wrong := [value for reward, value in zip(rewards, values) if not math.isfinite(reward)]:
            raise ValueError(f"it is {wrong[0]}")
    except BaseException as error:  # also SystemExit: pay_all waits for an answer of each thread
        return [Paid(None, no_reward(prompt, text, repr(error))) for text in completions]
    parts = [{name: float(x) for name, x in value.items()} if isinstance(value, dict) else {} for value in values]
    return [Paid(reward, "", part) for reward, part in zip(rewards, parts)]


def no_reward(prompt: str, completion: str, reason: str) -> str:
    return f"no reward for prompt {short(prompt)}, completion {short(completion)}: {reason}"


def short(text: str) -> str:
    """The text in one line, without the middle of a long text."""
    return repr(text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}")


def pay_all(env, jobs: list[tuple], cfg: RewardConfig) -> list[Paid]:
    """What pay() returns for each job (prompt, completions, truncated), one after the other. A failure that ends the run comes
    back alone. Threads are daemons, because the process must not wait for a late reward at exit."""
    waiting, running, results, ended = list(range(len(jobs)))[::-1], {}, {}, queue.SimpleQueue()

    def work(i):
        ended.put((i, pay(env, *jobs[i])))

    while waiting or running:
        while waiting and len(running) < cfg.reward_threads:
            i = waiting.pop()
            running[i] = time.monotonic() + (cfg.reward_timeout_s or 1e9)
            threading.Thread(target=work, args=(i,), daemon=True).start()
        first = min(running, key=running.get)
        try:
            i, result = ended.get(timeout=max(running[first] - time.monotonic(), 0))
        except queue.Empty:
            reason = f"it takes longer than --reward_timeout_s {cfg.reward_timeout_s:g}"
            i, result = first, [Paid(None, no_reward(jobs[first][0], text, reason)) for text in jobs[first][1]]
        if running.pop(i, None) is not None:  # else given up before
            results[i] = result
            if result[0].failure and cfg.failed_reward is None:
                return result[:1]
    return sum((results[i] for i in range(len(jobs))), [])


# ---------------------------------------------------------------- evaluation
def ratio(name: str, y: list[float], x: list[float] | None = None, scale=1.0) -> dict:
    """{name: sum y / sum x, name_stderr: its standard error by linearisation}, both times scale. x None: the mean of y, and the
    sample's standard deviation / sqrt(n). The error of a single value is None."""
    n, x = len(y), x or [1.0] * len(y)
    r = sum(y) / sum(x)
    squares = sum((a - r * b) ** 2 for a, b in zip(y, x))
    return {name: r * scale, f"{name}_stderr": math.sqrt(n / (n - 1) * squares) / sum(x) * scale if n > 1 else None}


def held_out_numbers(samples: list[dict], greedy: list[dict], k: int) -> dict:
    """Mean reward of k samples per prompt (pass@1 for rewards of 0 and 1), mean reward of greedy samples, and the share of
    prompts with a full reward among k samples (pass@k). Errors are over prompts: samples of one prompt are not independent."""
    rewards = [[s["reward"] for s in samples[i : i + k]] for i in range(0, len(samples), k)]
    line = {"eval_n": len(rewards), "eval_k": k} | ratio("eval_reward", [sum(group) / k for group in rewards])
    line |= ratio("eval_pass_at_k", [float(max(group) >= 1) for group in rewards])
    return line | ratio("eval_greedy", [s["reward"] for s in greedy])
