r"""Templates of prompts (--prompt_template): a text with fields of a line in braces.

    {question}        the field of the line
    {{number}}        the word in braces, {number}: doubled braces are braces
    \boxed{{{unit}}}  a field in braces. \boxed{unit} is refused, because it could mean two things
    \frac{1}{2}       braces around anything but a name stay as they are

A name in braces that is no field of the line is refused: it may be a misspelt field. The right
answer is refused as well, {answer} and any field that says the same.

A field is written as a text: numbers and texts as they are, true and false as in JSON, choices as
lettered lines ("A. Paris"), other lists with commas. null, objects and lists of them are refused.
"""

import difflib
import json
import re
import string
from typing import Any, NamedTuple

from rl.answers import marked

# A command of LaTeX with its earlier arguments, or a power: the braces that follow belong to it.
COMMAND = re.compile(r"(?:\\[a-zA-Z]+\*?|\^)(?:\[[^\[\]]*\]|\{[^{}]*\})*$")
NAME = re.compile(r"\{([^\W\d]\w*)\}")


class Line(NamedTuple):
    """One line of a file."""

    where: str  # file and line, for errors
    fields: dict


class Part(NamedTuple):
    """A piece of a template."""

    text: str  # as it stands, or the name of a field
    is_field: bool


def parts_of(template: str) -> list[Part]:
    """The parts of a template. Raises ValueError for a field that could be an argument of LaTeX."""
    parts = []
    opened = []  # "{" or "{{" for each brace that is not closed yet
    plain = ""
    place = 0
    while place < len(template):
        found = NAME.match(template, place)
        if template.startswith("{{", place):
            opened.append("{{")
            plain += "{"
            place += 2
        elif template.startswith("}}", place) and opened and opened[-1] == "{{":
            opened.pop()
            plain += "}"
            place += 2
        elif found:
            check_before(template[:place], plain, found[1])
            parts += [Part(plain, False), Part(found[1], True)]
            plain = ""
            place = found.end()
        else:
            letter = template[place]
            if letter == "{":
                opened.append("{")
            elif letter == "}" and opened:
                opened.pop()
            plain += letter
            place += 1
    return [*parts, Part(plain, False)]


def check_before(before: str, plain: str, name: str) -> None:
    """Raises ValueError if the braces of a field could be those of LaTeX: the field's text would
    stand there without braces. before: of the template; plain: the text since the last field."""
    in_formula = before.count("$") % 2 == 1
    command = COMMAND.search(plain)
    if command or in_formula and plain.endswith("_"):
        shown = "_"
        if command:
            shown = command[0]
        word = f"write {shown}{{{{{name}}}}} for the word {name} in braces"
        if name == "answer":
            raise ValueError(
                f"--prompt_template: {shown}{{answer}} would show the right answer; {word}"
            )
        raise ValueError(
            f"--prompt_template: {shown}{{{name}}} could be the word or the field; {word}, "
            f"{shown}{{{{{{{name}}}}}}} for the field in braces, or a space before {{{name}}}"
        )


def check_template(template: str, lines: list[Line], asked: str) -> None:
    """Raises ValueError for a template that shows the right answer, that has no field, or that has
    a name that is no field. asked: the field with the question."""
    names = [part.text for part in parts_of(template) if part.is_field]
    if not names:
        raise ValueError(
            f"--prompt_template {template!r} has no field in braces, so all prompts would be the "
            f"same; write {{{asked}}} where the question belongs"
        )
    for name in names:
        for line in lines:
            if name not in line.fields:
                raise ValueError(unknown_field(name, line))
        if name == "answer" or name not in (asked, "choices") and is_answer(name, lines):
            raise ValueError(
                f"--prompt_template has {{{name}}}, and {name} is the right answer of each line: "
                f"the model would read it in its prompt; leave it out, or write {{{{{name}}}}} for "
                "the word in braces"
            )


def unknown_field(name: str, line: Line) -> str:
    """The message for a name in braces that is no field of a line."""
    near = difflib.get_close_matches(name.lower(), line.fields, 1)
    advice = ""
    if near:
        advice = f"is {{{near[0]}}} meant? "
    return (
        f"{line.where} has no {name}, which --prompt_template asks for; {advice}Write "
        f"{{{{{name}}}}} for the word in braces"
    )


def is_answer(name: str, lines: list[Line]) -> bool:
    """Whether a field says the right answer in every line."""
    return all(says_answer(line.fields[name], line.fields) for line in lines)


def says_answer(value: Any, fields: dict) -> bool:
    answer = fields.get("answer", "")
    answers = [answer]
    choices = fields.get("choices")
    if isinstance(choices, list) and type(answer) is int and 0 <= answer < len(choices):
        answers += [choices[answer], string.ascii_uppercase[answer : answer + 1]]
    right = set()
    for each in answers:
        right |= spellings(each)
    return bool(right & spellings(value))


def spellings(value: Any) -> set[str]:
    """A text as it is and, where it has a \\boxed{} or a ####, the part marked by these."""
    text = str(value)
    found = {text, marked(text) or ""}
    return {each.strip().casefold() for each in found if each.strip()}


def fill_template(template: str, line: Line) -> str:
    """The template, filled with the fields of a line. Raises ValueError for a field that cannot be
    written."""
    text = ""
    for part in parts_of(template):
        if part.is_field and part.text not in line.fields:
            raise ValueError(unknown_field(part.text, line))
        if part.is_field:
            text += write_field(line, part.text)
        else:
            text += part.text
    return text


def write_field(line: Line, name: str) -> str:
    """A field of a line as a text. Raises ValueError for null and for objects."""
    value = line.fields[name]
    items = [value]
    if isinstance(value, list):
        items = value
    for item in items:
        if item is None or isinstance(item, (dict, list)):
            if item is None:
                kind = "null"
            elif isinstance(item, dict):
                kind = "an object"
            else:
                kind = "a list"
            where = "there"
            if isinstance(value, list):
                where = "in a list"
            raise ValueError(
                f"{line.where}: {name} has {kind} {where}, which cannot be written into a prompt; "
                f"give it a text, or take {{{name}}} out of the template"
            )
    texts = []
    for item in items:
        if isinstance(item, bool):
            texts.append(json.dumps(item))
        else:
            texts.append(str(item))
    if not isinstance(value, list):
        return texts[0]
    if name == "choices" and len(texts) <= 26:
        lettered = zip(string.ascii_uppercase, texts)
        return "\n".join(f"{letter}. {text}" for letter, text in lettered)
    return ", ".join(texts)
