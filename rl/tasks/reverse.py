"""A task of grpo.py (--env reverse, the default): five digits backwards, "12345>" -> "54321"."""

import string

ALPHABET = string.digits + ">"


def make(rng):
    number = "".join(rng.choices(string.digits, k=5))
    return f"{number}>", number[::-1]


def reward(prompt, completion, truncated=False):
    return float(completion == prompt[-2::-1] and not truncated)
