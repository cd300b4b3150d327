"""(3) of grpo.py: rewards with a time limit, in threads, and the fate of failed rewards; the numbers of an evaluation.

A reward is the user's Python on a model's text, so a reward may raise, or never return. With --reward_threads 1, in the main
thread, an alarm raises an exception inside a late reward and so ends a loop, a regular expression or a sleep (a reward with an
alarm of its own loses our alarm). With more threads, and with --engine, which pays beside training, a late reward is given up:
a thread cannot be ended from outside, so the thread runs on until the process ends, and slows the others. C code that never
releases the interpreter stops both clocks; then only the other ranks end the run, after --rollout_timeout_s.
"""
import inspect
import math
import queue
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass


class RewardIsLate(BaseException):
    """A BaseException, because an `except Exception` in a reward must not catch the alarm."""


@dataclass(kw_only=True)
class RewardConfig:
    reward_timeout_s: float = 300.0  # a reward that takes longer has failed; 0 = no limit
    reward_threads: int = 1  # rewards computed at once, by threads: for rewards that wait for a server or another program
    failed_reward: float | None = None  # reward of a sample whose reward fails or is late; none = end the run


@contextmanager
def time_limit(seconds: float):
    """Raise RewardIsLate inside the block after so many seconds, and again every second, because a bare `except:` can swallow
    the first. Only the main thread can have an alarm. 0 = no limit."""
    if not seconds:
        yield
        return

    def late(*_):
        raise RewardIsLate

    before = signal.signal(signal.SIGALRM, late)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


def pay(env, prompt: str, completion: str, truncated: bool, seconds: float = 0.0) -> float:
    """The reward of a sample. Raises ValueError with prompt and completion if the reward fails, is late or not finite."""
    try:
        asks = "truncated" in inspect.signature(env.reward).parameters
        with time_limit(seconds):
            value = env.reward(prompt, completion, **({"truncated": truncated} if asks else {}))
        if not math.isfinite(reward := float(value)):
            raise ValueError(f"it is {value}")
    except RewardIsLate:
        raise ValueError(no_reward(prompt, completion, f"it takes longer than --reward_timeout_s {seconds:g}")) from None
    except Exception as error:
        raise ValueError(no_reward(prompt, completion, repr(error))) from None
    return reward


def no_reward(prompt: str, completion: str, reason: str) -> str:
    return f"no reward for prompt {short(prompt)}, completion {short(completion)}: {reason}"


def short(text: str) -> str:
    """The text in one line, without the middle of a long text."""
    return repr(text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}")


def pay_all(env, jobs: list[tuple[str, str, bool]], cfg: RewardConfig) -> list[float | ValueError]:
    """For each (prompt, completion, truncated) the reward, or an error. The list ends at a failure that ends the run."""
    if cfg.reward_threads > 1 or threading.current_thread() is not threading.main_thread():
        return pay_in_threads(env, jobs, cfg.reward_threads, cfg.reward_timeout_s)
    results = []
    for job in jobs:
        try:
            results.append(pay(env, *job, cfg.reward_timeout_s))
        except ValueError as error:
            results.append(error)
            if cfg.failed_reward is None:
                break
    return results


def pay_in_threads(env, jobs: list, n: int, seconds: float) -> list[float | ValueError]:
    """The same with n threads at once. Daemon threads, because the process must not wait for a late reward at exit."""
    waiting, running, results, ended = list(range(len(jobs)))[::-1], {}, {}, queue.SimpleQueue()

    def work(i):
        try:
            ended.put((i, pay(env, *jobs[i])))
        except ValueError as error:
            ended.put((i, error))
        except BaseException as error:  # such as SystemExit, or the loop below would wait forever
            ended.put((i, ValueError(no_reward(*jobs[i][:2], repr(error)))))

    while waiting or running:
        while waiting and len(running) < n:
            i = waiting.pop()
            running[i] = time.monotonic() + (seconds or math.inf)
            threading.Thread(target=work, args=(i,), daemon=True).start()
        first = min(running, key=running.get)
        try:
            left = running[first] - time.monotonic()
            i, result = ended.get(timeout=None if left == math.inf else max(left, 0))
        except queue.Empty:
            reason = f"it takes longer than --reward_timeout_s {seconds:g}, and its thread, which cannot be ended, runs on"
            i, result = first, ValueError(no_reward(*jobs[first][:2], reason))
        if running.pop(i, None) is not None:  # else given up before
            results[i] = result
    return [results[i] for i in range(len(jobs))]


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
