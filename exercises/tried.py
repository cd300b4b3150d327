"""Writes exercises/tried.md, the table of all answers that tests have given to the checks: python
exercises/tried.py

The answers themselves are in tests/answers/, the cheats in tests/exercises/test_exercises.py.
"""

import importlib.util
import sys

from course import COURSE, HERE, HOUSE, in_files

HEAD = """# Answers that were given to the checks

Made by `python exercises/tried.py` from tests/answers/. tests/exercises/test_exercises.py gives them to the checks: a right one
must be accepted, and a wrong one must be told a sentence with the words on the right.

| exercise | right answers accepted | wrong answers | what a wrong answer is told |
| --- | --- | --- | --- |
"""
CHEATS = """
## Folders that cheat, or only look like it

Each is exercise 7 with a right answer, and the change on the left. `grade` must give the verdict.

| change | verdict | words in the message |
| --- | --- | --- |
"""


def answers(number: int):
    """The module of an exercise's answers. An answer is the text of its functions, or {file:
    {function: its source}}."""
    spec = importlib.util.spec_from_file_location(
        f"answers{number}", HOUSE / "tests" / "answers" / f"ex{number:02}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    placed = lambda answer: in_files(COURSE[number], answer) if isinstance(answer, str) else answer  # noqa: E731
    module.RIGHT = [placed(answer) for answer in module.RIGHT]
    module.WRONG = [(placed(answer), words) for answer, words in module.WRONG]
    return module


def cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())


def table(submissions) -> str:
    """The text of tried.md. submissions: see test_exercises.SUBMISSIONS."""
    out = HEAD
    right = 0
    wrong = 0
    for number, exercise in COURSE.items():
        given = answers(number)
        right = right + 1 + len(given.RIGHT)
        wrong = wrong + len(given.WRONG)
        told = "; ".join(f"“{cell(words)}”" for _, words in given.WRONG)
        out += f"| {number} {exercise.title} | {1 + len(given.RIGHT)} | {len(given.WRONG)} | {told} |\n"
    out += f"| all | {right} | {wrong} | |\n" + CHEATS
    for files, before, verdict, words in submissions:
        files = ", ".join(f"its own {file}" for file in files)
        does = " ".join(f"`{cell(line)}`" for line in before.splitlines()) or files or "none"
        out += f"| {does} | {verdict} | {cell(words)} |\n"
    return out


if __name__ == "__main__":
    sys.path[:0] = [str(HOUSE), str(HOUSE / "tests"), str(HOUSE / "tests" / "exercises")]
    from test_exercises import SUBMISSIONS

    (HERE / "tried.md").write_text(table(SUBMISSIONS))
