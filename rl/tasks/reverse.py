"""A task of grpo.py (--env reverse, the default): five digits backwards, "12345>" -> "54321"."""

import random
import string

ALPHABET = string.digits + ">"


def make(rng: random.Random) -> tuple[str, str]:
    number = "".join(rng.choices(string.digits, k=5))
    return f"{number}>", number[::-1]


def reward(prompt: str, completion: str, truncated: bool = False) -> float:
    return float(completion == prompt[-2::-1] and not truncated)
