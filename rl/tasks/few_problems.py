"""The task of a distillation in benchmarks/RESULTS.md: five digits backwards, as --env reverse, but
only 176 problems to learn from."""

import random
import string

ALPHABET = string.digits + ">"
rng = random.Random(0)
numbers = list(dict.fromkeys("".join(rng.choices(string.digits, k=5)) for _ in range(800)))
tasks = [(f"{number}>", number[::-1]) for number in numbers]
eval_problems = tasks[:512]
problems = tasks[512:688]


def reward(prompt: str, completion: str, truncated: bool = False) -> float:
    return float(completion == prompt[-2::-1] and not truncated)
