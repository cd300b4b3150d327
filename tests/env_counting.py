"""A task for tests/test_grpo.py (--env tests/env_counting.py) whose rewards a model at random earns
now and then."""

ALPHABET = "0123456789>"


def make(rng):
    number = rng.randrange(10**4)
    return f"{number}>", f"{number}"


def reward(prompt, completion):
    return 0.5 * (len(completion) % 2) + 0.5 * (sum(map(ord, completion)) % 3 == 0)
