"""As env_counting.py, with a tool that answers every 7 by "12"."""

from tests.env_counting import ALPHABET, make, reward  # noqa: F401

TOOL_END = "7"


def tool(completion):
    return "12"
