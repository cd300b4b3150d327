"""Is an answer right: the same text, the same number, or the same in mathematics. For rewards and for evaluate.py.

    exact    the same text, without the spaces and lines around the text
    number   the same number: the first after the last ####, else the last number of the text
    math     the content of the last \\boxed{}, else the line after the last ####, else the last number or fraction of the
             text. Numbers are compared as exact fractions (\\frac{1}{2} = 1/2 = 0.5 = 50%), with roots or pi as floats;
             everything else letter by letter, without spaces, \\left, \\, $ and the like
    math_verify  as the library of this name judges (pip install math-verify), which also computes: 2+3 is 5

A model wrote the text in the hope of a reward, so math computes nothing for the model: 2+3 is not 5, and 0.333 is not 1/3.
"""

import math
import re
from contextlib import suppress
from fractions import Fraction
from importlib.util import find_spec
from itertools import accumulate, pairwise

KINDS = ("exact", "number", "math", "math_verify")

# All characters of a number, and of what is no plain number: 1/2, 5^2, 5:30, 2+3, 1e9. A minus is
# part of the number, unless a letter, a digit or a bracket stands before the minus.
NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?(?:(?<!\w)\.)?[0-9](?:[0-9,./$^*:+eE-]*[0-9])?", re.ASCII)
DECIMAL = re.compile(r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|0|[1-9][0-9]*)?(?:\.[0-9]+)?", re.ASCII)
# A number, a fraction in one of two spellings or a percentage, in the middle of a text
FRACTION = re.compile(
    r"(?:(?<![\w)}])-)?\$?(?:\\[dt]?frac\{-?[0-9]+\}\{[0-9]+\}|(?:[0-9][0-9,]*)?\.?[0-9]+(?:/[0-9]+)?)"
    r"(?:\s?\\?%)?",
    re.ASCII,
)
LONGEST = 300  # characters: longer answers are not read as mathematics
OF_LATEX = [
    (r"\\(?:left|right|displaystyle|limits|big|Big)(?![a-zA-Z])", ""),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    (r"\\[,!;:> ]|\\q?quad(?![a-zA-Z])|~|\\?\$|\\\(|\\\)|\\\[|\\\]", ""),
    (r"\{,\}", ","),
    (r"\^\{?\\circ\}?|\\degree|°", ""),
    # a unit at the end, but no second answer and no constant
    (
        r"(?<=[0-9a-zA-Z)}%])\s*\\(?:text|mathrm|mbox)\{(?!\s*(?:or|and)\b|[ei]\})[^{}0-9]*\}(?:\^\{?[23]\}?)?$",
        "",
    ),
    (r"\\(?:text|mathrm|mathbf|textbf|mbox)\{([^{}]*)\}", r"\1"),
    (r"\\frac([0-9])([0-9])", r"\\frac{\1}{\2}"),
    (r"\\sqrt([0-9])", r"\\sqrt{\1}"),
    (r"π", r"\\pi"),
    (r"−", "-"),
    (r"\\%", "%"),
    (r"^\s*\(([A-Z])\)\s*$", r"\1"),
    (r"^\s*\{([^{}]*)\}\s*$", r"\1"),
]


def is_right(kind: str, text: str, answer: str) -> bool:
    if kind == "exact":
        return text.strip() == answer.strip()
    if kind == "number":
        found = final_number(text)
        return found is not None and found == final_number(answer)
    return by_library(text, answer) if kind == "math_verify" else same_in_mathematics(text, answer)


def by_library(text: str, answer: str) -> bool:
    """Without the library's time limits, which need the main thread; see --reward_timeout_s."""
    from math_verify import parse, verify

    return verify(
        parse(f"${answer}$", parsing_timeout=None),
        parse(text, parsing_timeout=None),
        timeout_seconds=None,
    )


def never_right(kind: str, answer) -> str:
    """The reason why no text can be right with this answer, any value of a JSON line; "" if a text
    can be."""
    text = str(answer)
    if kind == "math_verify" and not find_spec("math_verify"):
        raise ValueError("math_verify needs a library: pip install math-verify")
    if type(answer) not in (str, int, float) or not text.strip():
        return "it is no text and no number"
    if kind == "number" and final_number(text) is None:
        return "it ends with no number"
    return (
        "it has nothing to compare"
        if kind == "math" and not plain_latex(marked(text) or text)
        else ""
    )


# ---------------------------------------------------------------- number
def final_number(text: str) -> float | None:
    """The first number after the last ####, else the last number of the text. None for 1,2,3 or 1/2
    or 3-5 or 5^2."""
    _, marker, after = text.replace("−", "-").rpartition("####")
    found = NUMBER.findall(after)
    word = (found[0] if marker else found[-1]) if found else ""
    if not re.fullmatch(r"-?\$?([0-9]{1,3}(,[0-9]{3})+|[0-9]+)?(\.[0-9]+)?", word) or not word:
        return None
    return float(re.sub(r"[$,]", "", word))


# ---------------------------------------------------------------- math
def same_in_mathematics(text: str, answer: str) -> bool:
    """Whether a text ends with the answer. The answer may be marked (\\boxed, ####) or bare."""
    wanted, found = plain_latex(marked(answer) or answer), marked(text)
    if found is None:
        last = FRACTION.findall(text[-10 * LONGEST :].replace("−", "-"))
        found = text if plain_latex(text) == wanted else last[-1] if last else ""
    found = plain_latex(found)
    return bool(found) and max(len(found), len(wanted)) <= LONGEST and equal_parts(found, wanted)


def marked(text: str) -> str | None:
    """The content of the last \\boxed{}, else the line after the last ####; None without both."""
    if (begin := max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))) >= 0:
        return braced(text, text.index("{", begin)) or ""  # None: cut off before the closing brace
    _, marker, after = text.rpartition("####")
    return after.strip().split("\n")[0] if marker else None


def braced(text: str, begin: int) -> str | None:
    """The text between the { at `begin` and the matching }; None without."""
    depths = accumulate({"{": 1, "}": -1}.get(letter, 0) for letter in text[begin:])
    return next(
        (text[begin + 1 : begin + length] for length, depth in enumerate(depths) if depth == 0),
        None,
    )


def plain_latex(text: str) -> str:
    """The text without pure typesetting, and without the name in x = 5."""
    if len(text) > 10 * LONGEST:
        return text
    text = text.strip().rstrip(".")
    for pattern, plain in OF_LATEX:
        text = re.sub(pattern, plain, text)
    text = re.sub(r"^\s*[a-zA-Z]\s*(?:=|\\in(?![a-zA-Z]))\s*", "", text)
    mixed = re.fullmatch(
        r"\s*(-?)([0-9]+)(?:\s*\\frac\{([0-9]+)\}\{([0-9]+)\}|\s+([0-9]+)/([0-9]+))\s*", text
    )
    if mixed and int(mixed[4] or mixed[6]):  # 1 1/2 is one and a half
        below = int(mixed[4] or mixed[6])
        text = f"{mixed[1]}{int(mixed[2]) * below + int(mixed[3] or mixed[5])}/{below}"
    return re.sub(r"\s+", "", text)


def equal_parts(a: str, b: str) -> bool:
    """Compare numbers by value, lists in the same brackets part by part, anything else letter by
    letter."""
    if a == b:
        return True
    x, y = number_of(a), number_of(b)
    if x is not None and y is not None:
        return (
            same_value(x, y)
            or a.endswith("%") != b.endswith("%")
            and same_value(number_of(a.rstrip("%")), number_of(b.rstrip("%")))
        )
    if x is not None or y is not None:
        return False
    parts, others = split_list(a), split_list(b)
    return len(parts) == len(others) > 1 and all(map(equal_parts, parts, others))


def same_value(x, y) -> bool:
    """Fractions exactly; with roots or pi in one of them up to the rounding of a float."""
    exact = isinstance(x, Fraction) and isinstance(y, Fraction)
    return x == y if exact else math.isclose(x, y, rel_tol=1e-9)


def split_list(text: str) -> list[str]:
    """["(", "1", "2", ")"] for "(1,2)": the brackets, and the parts between the outermost commas."""
    found = re.fullmatch(r"(\\\{)(.*)(\\\})|([(\[{])(.*)([)\]}])", text, re.DOTALL)
    first, inside, last = (
        [part for part in found.groups() if part is not None] if found else ("", text, "")
    )
    depths = accumulate(
        {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(letter, 0) for letter in inside
    )
    commas = [
        place
        for place, (letter, depth) in enumerate(zip(inside, depths))
        if letter == "," and depth == 0
    ]
    parts = [inside[before + 1 : comma] for before, comma in pairwise([-1, *commas, len(inside)])]
    return [text] if len(parts) == 1 else [first, *parts, last]


def number_of(text: str) -> Fraction | float | None:
    """The value of a number, a fraction or a percentage, also times a root or pi; None for anything
    else."""
    with suppress(ValueError, ArithmeticError):
        return evaluate_number(text)


def evaluate_number(text: str) -> Fraction | float:
    if text.endswith("%"):
        return evaluate_number(text[:-1]) / 100
    if text[:1] in ("-", "+") and text[1:2] not in ("-", "+"):
        return evaluate_number(text[1:]) * (-1 if text[0] == "-" else 1)
    if text and DECIMAL.fullmatch(text):
        return Fraction(text.replace(",", ""))
    if text.startswith("\\frac{"):
        above = braced(text, 5) or ""
        after = text[7 + len(above) :]
        below = braced(after, 0) or "" if after.startswith("{") else ""
        rest = after[2 + len(below) :]
        return (
            evaluate_number(above) / evaluate_number(below) * (evaluate_number(rest) if rest else 1)
        )
    above, slash, below = text.rpartition("/")
    if slash and not re.search(r"[-+%]", below):
        return evaluate_number(above) / evaluate_number(below)
    found = re.fullmatch(r"([0-9.]*)(\\pi|\\sqrt\{([0-9.]+)\})(\\pi)?", text)
    if not found:
        raise ValueError(f"{text} is no number")
    value = evaluate_number(found[1]) if found[1] else 1
    value *= math.sqrt(evaluate_number(found[3])) if found[3] else math.pi
    return value * math.pi if found[4] else value
