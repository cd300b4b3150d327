"""The task of docs/grpo.md's distillation: reverse five digits, with 300 problems to learn from and 500 others to test."""
import random
import string

ALPHABET = string.digits + ">"
NUMBERS = random.Random(0).sample(range(100_000), 800)
PROBLEMS = [(f"{number:05}>", f"{number:05}"[::-1]) for number in NUMBERS]
problems, eval_problems = PROBLEMS[:300], PROBLEMS[300:]


def reward(prompt, completion, truncated=False):
    return float(completion == prompt[-2::-1] and not truncated)
