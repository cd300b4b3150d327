"""The task of a distillation in benchmarks/RESULTS.md: four digits, backwards or in order; both
answers are right, and a coin chooses."""

import random
import string

ALPHABET = string.digits + ">"


def make(rng: random.Random) -> tuple[str, str]:
    digits = "".join(rng.choices(string.digits, k=4))
    return f"{digits}>", rng.choice([digits[::-1], "".join(sorted(digits))])


def reward(prompt: str, completion: str, truncated: bool = False) -> float:
    return float(completion in (prompt[-2::-1], "".join(sorted(prompt[:-1]))) and not truncated)
