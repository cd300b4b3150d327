"""A task of grpo.py (--env calculator) with a tool: after "=" the tool writes the value and ";".

"37*4+12: " -> "37*4=148;148+12=160;160"
"""

import ast
import operator
import random
import re
import string
from fractions import Fraction

ALPHABET = string.digits + "+-*=;: "
TOOL_END = "="


def make(rng: random.Random) -> tuple[str, str]:
    a = rng.randint(10, 99)
    b = rng.randint(2, 9)
    c = rng.randint(10, 99)
    return f"{a}*{b}+{c}: ", f"{a}*{b}={a * b};{a * b}+{c}={a * b + c};{a * b + c}"


def tool(completion: str) -> str:
    value = arithmetic(re.split(r"[;:]", completion[:-1])[-1])
    return f"{'' if value is None else value};"


def reward(prompt: str, completion: str, truncated: bool = False) -> float:
    return float(
        completion.split(";")[-1] == str(arithmetic(prompt.rstrip(": "))) and not truncated
    )


def arithmetic(text: str) -> Fraction | None:
    """The exact value of + - * / and parentheses over small integers; None for any other text of a
    model."""
    text = text.strip()
    if not re.fullmatch(r"[0-9+*/() -]{1,100}", text):  # Python would also read comments and 1_000
        return None
    operations = {
        ast.Add: operator.add,
        ast.Sub: operator.sub,
        ast.Mult: operator.mul,
        ast.Div: operator.truediv,
    }

    def value(node):
        if isinstance(node, ast.BinOp):
            return operations[type(node.op)](value(node.left), value(node.right))
        return {int: Fraction(node.value)}[type(node.value)]

    try:
        return value(ast.parse(text, mode="eval").body)
    except (
        SyntaxError,
        KeyError,
        AttributeError,
        ValueError,
        ZeroDivisionError,
        RecursionError,
        MemoryError,
    ):
        return None
