"""A task of grpo.py (--env sum_digits) with a list of problems: "Sum the digits of 123: " -> "6"."""

import re
import string

ALPHABET = string.digits + "Sum the digits of :"
problems = [(f"Sum the digits of {i:03}: ", str(sum(map(int, f"{i:03}")))) for i in range(1000)]


def reward(prompt: str, completion: str, truncated: bool = False) -> float:
    return float(
        completion.strip() == str(sum(map(int, re.findall(r"\d", prompt)))) and not truncated
    )
