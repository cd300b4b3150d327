"""(3) of grpo.py: rewards with a time limit, in threads, and the fate of failed rewards.

A reward is the user's Python on a model's text, so a reward may raise, or never return: rl/calls.py
has the clock. A regular expression that backtracks without end stops the clock; then only the other
ranks end the run, after --rollout_timeout_s.
"""

import inspect
import math
import queue
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple

from rl.answers import cut_thoughts
from rl.calls import Calls


@dataclass(kw_only=True)
class RewardConfig:
    # a reward, step or tool that takes longer has failed, and is ended; a make or reset ends the
    # run; 0 = no limit
    reward_timeout_s: float = 300.0
    # rewards, tools and games that are called at once, by threads: for those that wait for a server
    reward_threads: int = 1
    # reward of a sample whose reward fails or is late; none = end the run
    failed_reward: float | None = None


class Paid(NamedTuple):
    """What a sample earned: its reward, the sum of the parts if the reward has named parts; or
    None, and the failure."""

    reward: float | None
    failure: str = ""
    parts: dict = {}


def finite(reward: float) -> float:
    """The reward as a float. Raises ValueError if it is nan or infinite."""
    reward = float(reward)
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}")
    return reward


def pay(
    env: Any, prompt: str, completions: list[str], truncated: list[bool], opened: bool = False
) -> list[Paid]:
    """Pay the samples of a prompt: all samples of the group at once for a group_reward, else one
    sample. All fail together, for instance if a reward is not finite. A reward sees what comes
    after the thoughts; a sample that ends in a thought earns 0. opened: the prompt has begun a
    thought."""
    in_turns = hasattr(env, "tool") or hasattr(env, "step")
    said = [cut_thoughts(text, opened, in_turns) for text in completions]
    if all(text is None for text in said):
        return [Paid(0.0)] * len(completions)
    try:
        values = ask_reward(env, prompt, said, truncated)
        if len(values) != len(completions):
            raise ValueError(f"{len(values)} rewards for {len(completions)} samples")
        rewards = [finite(total_of(value)) for value in values]
    except BaseException as error:  # also SystemExit: Payments waits for an answer of each thread
        return [Paid(None, no_reward(prompt, text, repr(error))) for text in completions]
    paid = []
    for text, value, reward in zip(said, values, rewards):
        parts = {}
        if isinstance(value, dict):
            parts = {name: float(x) for name, x in value.items()}
        if text is None:  # it ends in a thought
            paid.append(Paid(0.0))
        else:
            paid.append(Paid(reward, "", parts))
    return paid


def total_of(value: Any) -> Any:
    """A reward with named parts is their sum."""
    if isinstance(value, dict):
        return sum(value.values())
    return value


def ask_reward(env: Any, prompt: str, said: list[str | None], truncated: list[bool]) -> list:
    """What the user's function returns for each sample. said: None for a sample that ends in a
    thought; a group_reward sees an empty text there."""
    more = {}
    if hasattr(env, "group_reward"):
        if takes_truncated(env.group_reward):
            more = {"truncated": truncated}
        return env.group_reward(prompt, [text or "" for text in said], **more)
    if takes_truncated(env.reward):
        more = {"truncated": truncated[0]}
    return [env.reward(prompt, said[0], **more)]


def takes_truncated(function: Callable) -> bool:
    return "truncated" in inspect.signature(function).parameters


def no_reward(prompt: str, completion: str, reason: str) -> str:
    return f"no reward for prompt {short(prompt)}, completion {short(completion)}: {reason}"


def short(text: str) -> str:
    """The text in one line, without the middle of a long text."""
    if len(text) > 400:
        text = f"{text[:200]} ... {text[-200:]}"
    return repr(text)


class Payments:
    """Pays n jobs (prompt, completions, truncated, opened), in threads, as soon as they are
    added."""

    def __init__(self, env, n: int, cfg: RewardConfig):
        self.env = env
        self.n = n
        self.cfg = cfg
        self.calls = Calls(cfg.reward_threads, cfg.reward_timeout_s)
        self.paid = queue.SimpleQueue()

    def add(self, i: int, job: tuple) -> None:
        call = self.calls.submit(pay, self.env, *job)
        call.add_done_callback(lambda call: self.paid.put((i, self.outcome(job, call))))

    def outcome(self, job: tuple, call: Future) -> list[Paid]:
        """What pay() has returned, or the failure of each sample of a job that is late."""
        prompt, completions, *_ = job
        error = call.exception()
        if error is None:
            return call.result()
        reason = repr(error)
        if isinstance(error, TimeoutError):
            reason = f"it takes longer than --reward_timeout_s {self.cfg.reward_timeout_s:g}"
        return [Paid(None, no_reward(prompt, text, reason)) for text in completions]

    def wait(self) -> list[Paid]:
        """What pay() returns for each job, one after the other. A failure that ends the run comes
        back alone."""
        results = {}
        while len(results) < self.n:
            i, result = self.paid.get()
            results[i] = result
            if result[0].failure and self.cfg.failed_reward is None:
                results = {i: result[:1]}
                break
        self.calls.close()
        return sum((results[i] for i in sorted(results)), [])
