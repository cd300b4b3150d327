r"""Is an answer right: the same text, the same number, or the same in mathematics. For rewards and
for evaluate.py. Thoughts are cut off first, see cut_thoughts().

    exact    the same text, without the spaces and lines around the text
    number   the same number: the first after the last ####, else the last number of the text
    math     the content of the last \boxed{}, else the line after the last ####, else the last number
             or fraction of the text. Numbers are compared as exact fractions (\frac{1}{2} = 1/2 =
             0.5 = 50%), with roots or pi as floats; the parts of a set in any order; everything
             else letter by letter, without spaces, \left, \, $ and the like
    math_verify  as the library of this name judges (pip install math-verify), which also computes:
             2+3 is 5

A number may have a sign (also U+2212, a dash, "minus"), groups (1,000, 1 000, 1_000) and a power of
ten (2 \times 10^{3}, 2 million); 1 1/2 is one and a half, and 3\pi is not 3. A model wrote the
text in the hope of a reward, so nothing is computed for the model: 2+3 is not 5, 2^{10} is not
1024, and 0.333 is not 1/3.
"""

import math
import re
import unicodedata
from contextlib import suppress
from decimal import Decimal
from fractions import Fraction
from importlib.util import find_spec
from typing import Any

KINDS = ("exact", "number", "math", "math_verify")

# What some models write around their thoughts; a template may have written the first already.
THOUGHTS = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
]

# All characters of a number, and of what is no plain number: 1/2, 5^2, 5:30, 2+3, 1e9. A minus is
# part of the number, unless a letter, a digit or a bracket stands before the minus.
NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?(?:(?<!\w)\.)?[0-9](?:[0-9,./$^*:+eE_-]*[0-9])?", re.ASCII)
PLAIN = re.compile(r"-?\$?([0-9]{1,3}(,[0-9]{3})+|[0-9]+)?(\.[0-9]+)?", re.ASCII)
POWER_OF_TEN = re.compile(r"(-?)(?:([0-9.,]+)\*)?10\^(-?[0-9]{1,3})", re.ASCII)
# How texts write signs, groups, powers and currencies, and what NUMBER reads
MINUS = "\u2212\u2013\u2010\u2011\u2012\ufe63\uff0d"
GROUPS = re.compile(
    r"(?<![0-9.,_^*/])([1-9][0-9]{0,2})(?=([ _'’\u00a0\u2007\u2009\u202f]|\\,|\{,\}|\\_)[0-9])"
    r"((?:\2[0-9]{3})+)(?!\2?[0-9])",
)
SCALES = {"thousand": "10^3", "million": "10^6", "billion": "10^9", "trillion": "10^12"}
SCALE = re.compile(
    rf"(?<=[0-9])[ \t~]*(\\(?:text|mathrm|mbox)\{{)?[ \t]*({'|'.join(SCALES)})\b", re.IGNORECASE
)
VULGAR = re.compile("[¼½¾⅐-⅞↉]")
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
SPELLINGS = [
    (f"[{MINUS}]", "-"),
    (r"—(?=[$0-9.])", "-"),
    (r"[€£¥₹]|\\\$", "$"),
    (r"\\[dtc]?frac\{(-?[0-9.,]+)\}\{(-?[0-9.,]+)\}", r"\1/\2"),
    (r"\\(?:times|cdot)(?![a-zA-Z])|[×·⋅]", "*"),
    (r"\\div(?![a-zA-Z])|÷", "/"),
    (r"(?<=[0-9)}])\s?\^\s?\{?\s?(-?[0-9]+)\s?\}?", r"^\1"),
    # 10 - 5 is no more a number than 10-5
    (r"(?<=[0-9])[ \t]+([-+*/])[ \t]+(?=\$?[0-9.])", r"\1"),
    (r"(?<=[0-9])\*[ \t]+(?=[0-9])|(?<=[0-9])[ \t]+\*(?=[0-9])", "*"),
    (r"\bnegative[ \t]+(?=\$?[0-9.])", "-"),
    (r"(^|[^0-9 \t])([ \t]*)minus[ \t]+(?=\$?[0-9.])", r"\1\2-"),
    # a sign with a space after it, where no difference can be meant
    (
        r"(^|[=:({\[]|####|\b(?:is|are|was|equals|gives|get|to|be|of|by|at))([ \t]*)-[ \t]+(?=\$?[0-9.])",
        r"\1\2-",
    ),
]
# The number after these is not the answer: a difference, one of two, a root, a power, an index
NO_NUMBER = re.compile(
    r"(?:-\s{1,9}|minus\s{1,9}|±\s?|\\pm\s?|√\(?|\\sqrt\{?|\^|_\{?|[0-9][:/]|[0-9][eE][-+]?)\Z"
)
# A number before these is a factor
FACTOR = re.compile(r"[ \t]?(?:\\pi(?![a-zA-Z])|π|\\sqrt|√|\\overline)")
VARIABLE = re.compile(r"[a-ce-fi-kn-rt-z](?![a-zA-Z])")
GROUP = re.compile(r"[0-9][ ,_'’]\Z")  # before 00: the rest of a number in wrong groups
SUM = re.compile(r"[0-9)}][-+*]\$?\Z")  # before 3: the rest of 2+3
# --answers auto: a number, with a name before it or a unit after it
UNITS = """USD EUR GBP L N J W V A K C F kN kW kWh MW KB MB GB TB Hz kHz MHz GHz mL Pa kPa MPa kJ eV
    MeV kcal""".split()
UNIT = r"°?[a-z]+(?:[²³]|\^[23])?(?:/[a-z]+(?:[²³]|\^[23])?)?"
ORDINARY = re.compile(
    # 42, $5, x = 5, 3 + 4 = 7, the answer is 42; 007 is a name
    r"(?:(?:.*\banswer(?: is)?|.*=)[\s:]*)?(?P<number>-?\$?(?!0[0-9])[0-9.][0-9.,*^-]*)"
    r"(?![0-9.,*^-])"
    # 1960s and 21st are words, 10 am is a time, 2x a term
    r"(?!(?:s|st|nd|rd|th)\b|\s?(?:am|pm|[a-ce-fi-kn-rt-z])\b)"
    rf"\s?(?:\\?%|°?(?:{'|'.join(UNITS)})|{UNIT}(?:\s{UNIT}){{0,2}})?",
    re.DOTALL,
)
DECIMAL = re.compile(r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|0|[1-9][0-9]*)?(?:\.[0-9]+)?", re.ASCII)
# A number, a fraction in one of two spellings or a percentage, in the middle of a text
FRACTION = re.compile(
    r"(?:(?<![\w)}])-)?\$?(?:(?:[0-9.,]+\*)?10\^-?[0-9]{1,3}|\\[dt]?frac\{-?[0-9]+\}\{[0-9]+\}"
    r"|(?<![0-9.,/:])[0-9]+[ \t]+[0-9]+/[0-9]+(?![0-9/])|(?:[0-9][0-9,]*)?\.?[0-9]+(?:/[0-9]+)?)"
    r"(?:\s?\\?%)?",
    re.ASCII,
)
LONGEST = 300  # characters: longer answers are not read as mathematics
OF_LATEX = [
    (r"\\(?:left|right|displaystyle|limits|big|Big)(?![a-zA-Z])", ""),
    (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
    # not of \\\\, which ends a row of a matrix
    (r"(?<!\\)\\[,!;:> ()[\]]|\\q?quad(?![a-zA-Z])|~|\\?\$", ""),
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
    (f"[{MINUS}]", "-"),
    (r"(?:\\times|\\cdot|[×·⋅*])\s*10\s*\^", "*10^"),
    (r"10\s*\^\s*\{\s*(-?[0-9]{1,3})\s*\}", r"10^\1"),
    (r"\\%", "%"),
    (r"([\^_])\{\s*([0-9a-zA-Z])\s*\}", r"\1\2"),
    (r"^\s*(\*\*|__|`)(.*)\1\s*$", r"\2"),
    (r"^\s*\(([A-Z])\)\s*$", r"\1"),
    (r"^\s*\{([^{}]*)\}\s*$", r"\1"),
]


def is_right(kind: str, text: str, answer: str) -> bool:
    if kind == "exact":
        return text.strip() == answer.strip()
    if kind == "number":
        found = final_number(text)
        return found is not None and found == final_number(answer)
    if kind == "math_verify":
        return by_library(text, answer)
    return same_in_mathematics(text, answer)


def by_library(text: str, answer: str) -> bool:
    """Without the library's time limits, which need the main thread; see --reward_timeout_s."""
    from math_verify import parse, verify

    return verify(
        parse(f"${answer}$", parsing_timeout=None),
        parse(text, parsing_timeout=None),
        timeout_seconds=None,
    )


def never_right(kind: str, answer: Any) -> str:
    """The reason why no text can be right with this answer, any value of a JSON line; "" if a text
    can be."""
    text = answer_text(answer)
    if kind == "math_verify" and not find_spec("math_verify"):
        raise ValueError("math_verify needs a library: pip install math-verify")
    is_finite = type(answer) is not float or math.isfinite(answer)
    if type(answer) not in (str, int, float) or not text.strip() or not is_finite:
        return "it is no text and no number"
    if kind == "number" and final_number(text) is None:
        return "it ends with no number"
    if kind == "math" and not plain_latex(marked(text) or text):
        return "it has nothing to compare"
    return ""


def answer_text(answer) -> str:
    """An answer of a JSON line as a text: 0.00001, not 1e-05 as Python writes it."""
    if type(answer) is float and math.isfinite(answer):
        return format(Decimal(repr(answer)), "f")
    return str(answer)


# ---------------------------------------------------------------- thoughts
def opens_thought(prompt: str) -> bool:
    """Whether a prompt ends with the beginning of a thought, as some chat templates write it."""
    begins = tuple(begin for begin, _ in THOUGHTS)
    return prompt.rstrip().endswith(begins)


def opened_by(text, prompt: list[int]) -> bool:
    """Whether a prompt of token ids has begun a thought. text: with decode()."""
    return opens_thought(text.decode([*prompt[-64:]]))


def answer_begins(text: str, opened: bool = False) -> int | None:
    """Where the answer begins, after the last thought; None in a thought that has no end. opened:
    the prompt has begun a thought."""
    begin = -1
    end = -1
    for first, last in THOUGHTS:
        begin = max(begin, text.rfind(first))
        place = text.rfind(last)
        if place >= 0:
            end = max(end, place + len(last))
    if begin >= max(end, 0) or opened and end < 0:
        return None
    return max(end, 0)


def cut_thoughts(text: str, opened: bool = False, in_turns: bool = False) -> str | None:
    """The text that is judged: what comes after the last thought; None in a thought that has no
    end, which earns nothing. opened: the prompt has begun a thought. in_turns: an answer in several
    turns, so what was said between two thoughts belongs to it."""
    if in_turns:
        for first, last in THOUGHTS:
            if opened and last in text and first not in text.partition(last)[0]:
                text = text.partition(last)[2]
                opened = False
            text = cut_between(text, first, last)
    begin = answer_begins(text, opened)
    if begin is None:
        return None
    if begin:
        return text[begin:].lstrip()
    return text


def cut_between(text: str, first: str, last: str) -> str:
    """The text without all that stands from a `first` to the next `last`, both included."""
    kept = ""
    place = 0
    while True:
        begin = text.find(first, place)
        end = text.find(last, max(begin, 0))
        if begin < 0 or end < 0:
            return kept + text[place:]
        kept += text[place:begin]
        place = end + len(last)


# ---------------------------------------------------------------- number
def plain_numbers(text: str) -> str:
    """The text with signs, groups of digits and powers as NUMBER reads them."""
    text = spell_out(GROUPS.sub(lambda found: found[1] + re.sub("[^0-9]", "", found[3]), text))
    text = re.sub(r"(?<=[0-9])(?=\\[dtc]?frac)", " ", text)
    text = re.sub(
        "(?<=[0-9])[⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+", lambda found: "^" + found[0].translate(SUPERSCRIPTS), text
    )
    for pattern, plain in SPELLINGS:
        text = re.sub(pattern, plain, text)
    return text


def spell_out(text: str) -> str:
    """The text with 2*10^6 for 2 million, and with " 1/2" for the one character ½."""
    text = SCALE.sub(lambda found: f"*{SCALES[found[2].lower()]}{found[1] or ''}", text)
    return VULGAR.sub(
        lambda found: " " + unicodedata.normalize("NFKC", found[0]).replace("⁄", "/"), text
    )


def final_number(text: str) -> Fraction | None:
    """The first number after the last ####, else the last number of the text. None for 1,2,3 or 1/2
    or 3-5 or 5^2 or 3\\pi, and where a sign could be a difference."""
    before, marker, after = text.rpartition("####")
    if marker:
        after = after.lstrip(" ")
    after = plain_numbers(after)
    found = [*NUMBER.finditer(after)]
    if not found:
        return None
    if marker:
        number = found[0]
    else:
        number = found[-1]
    if is_a_part(after[: number.start()], number[0]) or FACTOR.match(after, number.end()):
        return None
    return number_in(number[0])


def is_a_part(before: str, number: str) -> bool:
    """Whether a number belongs to what stands before it, and is no answer of its own."""
    before = before[-20:]
    in_group = re.match("0[0-9]", number) and GROUP.search(before)
    return bool(NO_NUMBER.search(before) or in_group)


def number_in(word: str) -> Fraction | None:
    """The value of a plain number, or of one times a power of ten; None for anything else. Exact:
    as floats, two long numbers may be the same."""
    if len(word) > LONGEST:
        return None
    power = POWER_OF_TEN.fullmatch(word)
    if power:
        sign, factor, exponent = power.groups()
        if factor and not PLAIN.fullmatch(factor) or abs(int(exponent)) > 300:
            return None
        value = Fraction(10) ** int(exponent)
        if factor:
            value *= Fraction(factor.replace(",", ""))
        if sign:
            return -value
        return value
    if not word or not PLAIN.fullmatch(word):
        return None
    return Fraction(re.sub(r"[$,]", "", word))


def is_ordinary_number(answer: str) -> bool:
    """--answers auto: whether an answer is a number, such as 42, $5, 3 km, x = 5 or a text that
    ends with #### 42. No names with a number (Apollo 11), no dates and no decades."""
    found = ORDINARY.fullmatch(plain_numbers((marked(answer) or answer).strip().rstrip(".")))
    return found is not None and number_in(found["number"].rstrip(".,")) is not None


# ---------------------------------------------------------------- math
def same_in_mathematics(text: str, answer: str) -> bool:
    """Whether a text ends with the answer. The answer may be marked (\\boxed, ####) or bare."""
    wanted = plain_latex(marked(answer) or answer)
    found = marked(text)
    if found is None:
        found = text
        if plain_latex(text) != wanted:
            found = last_fraction(text)
    found = plain_latex(found)
    return bool(found) and max(len(found), len(wanted)) <= LONGEST and equal_parts(found, wanted)


def last_fraction(text: str) -> str:
    """The last number or fraction of a text; "" if there is none, or a power or a difference."""
    text = plain_numbers(text[-10 * LONGEST :])
    found = [*FRACTION.finditer(text)]
    if not found:
        return ""
    before = text[: found[-1].start()]
    number = found[-1][0]
    after = text[found[-1].end() :]
    is_part = is_a_part(before, number) or SUM.search(before[-20:]) or after.startswith("^")
    if is_part or FACTOR.match(after) or VARIABLE.match(after):
        return ""
    return number


def marked(text: str) -> str | None:
    """The content of the last \\boxed{}, else the line after the last ####; None without both."""
    begin = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if begin >= 0:
        return braced(text, text.index("{", begin)) or ""  # None: cut off before the closing brace
    _, marker, after = text.rpartition("####")
    if marker:
        return after.strip().split("\n")[0]
    return None


def braced(text: str, begin: int) -> str | None:
    """The text between the { at `begin` and the matching }; None without."""
    depth = 0
    for place in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin + 1 : place]
    return None


def plain_latex(text: str) -> str:
    """The text without pure typesetting, and without the name in x = 5."""
    if len(text) > 10 * LONGEST:
        return text
    text = GROUPS.sub(lambda found: found[1] + re.sub("[^0-9]", "", found[3]), text.strip())
    text = spell_out(text).rstrip(".")
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
    x = number_of(a)
    y = number_of(b)
    if x is not None and y is not None:
        return (
            same_value(x, y)
            or a.endswith("%") != b.endswith("%")
            and same_value(number_of(a.rstrip("%")), number_of(b.rstrip("%")))
        )
    if x is not None or y is not None:
        return False
    parts = split_list(a)
    others = split_list(b)
    if len(parts) != len(others) or len(parts) == 1:
        return False
    if parts[0] == others[0] == "\\{":
        return same_set(parts, others)
    return all(map(equal_parts, parts, others))


def same_set(parts: list[str], others: list[str]) -> bool:
    """Whether each part equals one of the others, in any order."""
    left = [*others]
    for part in parts:
        place = next((i for i, other in enumerate(left) if equal_parts(part, other)), None)
        if place is None:
            return False
        del left[place]
    return True


def same_value(x, y) -> bool:
    """Fractions exactly; with roots or pi in one of them up to the rounding of a float."""
    exact = isinstance(x, Fraction) and isinstance(y, Fraction)
    if exact:
        return x == y
    return math.isclose(x, y, rel_tol=1e-9)


def split_list(text: str) -> list[str]:
    """["(", "1", "2", ")"] for "(1,2)": the brackets, and the parts between the outermost commas."""
    found = re.fullmatch(r"(\\\{)(.*)(\\\})|([(\[{])(.*)([)\]}])", text, re.DOTALL)
    first = ""
    inside = text
    last = ""
    if found:
        first, inside, last = (part for part in found.groups() if part is not None)
    parts = [""]
    depth = 0
    for letter in inside:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    if len(parts) == 1:
        return [text]
    return [first, *parts, last]


def number_of(text: str) -> Fraction | float | None:
    """The value of a number, a fraction or a percentage, also times a root or pi; None for anything
    else."""
    with suppress(ValueError, ArithmeticError):
        return evaluate_number(text)


def evaluate_number(text: str) -> Fraction | float:
    if text.endswith("%"):
        return evaluate_number(text[:-1]) / 100
    if text[:1] in ("-", "+") and text[1:2] not in ("-", "+"):
        value = evaluate_number(text[1:])
        if text[0] == "-":
            return -value
        return value
    if text and DECIMAL.fullmatch(text):
        return Fraction(text.replace(",", ""))
    if text.startswith("\\frac{"):
        above = braced(text, 5) or ""
        after = text[7 + len(above) :]
        below = ""
        if after.startswith("{"):
            below = braced(after, 0) or ""
        rest = after[2 + len(below) :]
        value = evaluate_number(above) / evaluate_number(below)
        if rest:
            value *= evaluate_number(rest)
        return value
    above, slash, below = text.rpartition("/")
    if slash and not re.search(r"[-+%]", below):
        return evaluate_number(above) / evaluate_number(below)
    power = POWER_OF_TEN.fullmatch(text)
    if power:
        factor = 1
        if power[2]:
            factor = evaluate_number(power[2])
        return factor * Fraction(10) ** int(power[3])
    found = re.fullmatch(r"([0-9.]*)(\\pi|\\sqrt\{([0-9.]+)\})(\\pi)?", text)
    if not found:
        raise ValueError(f"{text} is no number")
    value = 1
    if found[1]:
        value = evaluate_number(found[1])
    if found[3]:
        value *= math.sqrt(evaluate_number(found[3]))
    else:
        value *= math.pi
    if found[4]:
        return value * math.pi
    return value
