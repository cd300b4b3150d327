"""The evaluation of grpo.py: how good is the policy on held-out prompts?"""

import math
from dataclasses import dataclass

from rl import messages
from rl.datasets import Text
from rl.sample import Sample
from training.metrics import Metrics


@dataclass(kw_only=True)
class EvaluationConfig:
    # steps between evaluations, also before the first step and at the end; 0 = never
    eval_every: int = 100
    eval_n: int = -1  # held-out prompts, all different; -1 = all of --eval_data, else up to 1024
    eval_k: int = 4  # samples per held-out prompt, for pass@k; a greedy one comes on top


def ratio(name: str, y: list[float], x: list[float] | None = None, scale: float = 1.0) -> dict:
    """{name: sum y / sum x, name_stderr: its standard error by linearisation}, both times scale. x
    None: the mean of y, and the sample's standard deviation / sqrt(n). The error of a single value
    is None."""
    n = len(y)
    x = x or [1.0] * len(y)
    r = sum(y) / sum(x)
    squares = sum((a - r * b) ** 2 for a, b in zip(y, x))
    error = None
    if n > 1:
        error = math.sqrt(n / (n - 1) * squares) / sum(x) * scale
    return {name: r * scale, f"{name}_stderr": error}


def held_out_numbers(samples: list[Sample], greedy: list[Sample], k: int) -> dict:
    """Mean reward of k samples per prompt (pass@1 for rewards of 0 and 1), mean reward of greedy
    samples, and the share of prompts with a full reward among k samples (pass@k). Errors are over
    prompts: samples of one prompt are not independent."""
    rewards = []
    for i in range(0, len(samples), k):
        rewards.append([s.reward for s in samples[i : i + k]])
    line = {"eval_n": len(rewards), "eval_k": k}
    line |= ratio("eval_reward", [sum(group) / k for group in rewards])
    line |= ratio("eval_pass_at_k", [float(max(group) >= 1) for group in rewards])
    return line | ratio("eval_greedy", [s.reward for s in greedy])


def evaluate_policy(
    trainer, engine, text: Text, held_out: dict[str, str], metrics: Metrics, step: int
) -> None:
    """Evaluate held-out prompts, log held_out_numbers() and print a line."""
    cfg = trainer.cfg
    tasks = [(f"eval/{i}", *task) for i, task in enumerate(held_out.items())]
    samples = engine.evaluate(tasks, cfg.eval_k, cfg.temperature)
    greedy = engine.evaluate(tasks, 1, 0.0)
    line = held_out_numbers(samples, greedy, cfg.eval_k)
    if trainer.layout.rank == 0:
        metrics.write({"step": step} | line)
        messages.show_evaluation(cfg, step, line)
        messages.keep_samples(cfg, step, greedy, text, evaluation=True)
