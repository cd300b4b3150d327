"""As env_counting.py, with a tool that answers every 7 by "12"."""
ALPHABET = "0123456789>"
TOOL_END = "7"


def make(rng):
    number = rng.randrange(10**4)
    return f"{number}>", f"{number}"


def tool(completion):
    return "12"


def reward(prompt, completion):
    return 0.5 * (len(completion) % 2) + 0.5 * (sum(map(ord, completion)) % 3 == 0)
