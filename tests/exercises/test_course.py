"""docs/course.md: what a lecturer is told to project, to run and to ask is there, and is true."""

import importlib
import math
import re
import shlex

import pytest
from bugs import BUGS
from commands import commands_in, split_command
from course import COURSE
from layouts import Flags
from runs import MODEL, REPO, launch, run

from flags.config import parse_config
from parallel import sequence_index
from tools.reports.options import with_report_flags
from tools.reports.schedule import bubble, rows_of, simulate

TEXT = (REPO / "docs" / "course.md").read_text()
LECTURES = TEXT.split("\n## Lecture ")[1:]
COMMANDS = [
    shlex.join(shlex.split(line, comments=True))
    for block in re.findall(r"```\n(.*?)```", TEXT, re.S)
    for line in commands_in(block)
    if "exercises/run.py" not in line
]


def numbers(word: str) -> list[int]:
    """The exercises or bugs of all lectures, in their order."""
    named = [re.findall(rf"\| do \|.*?{word}? ([\d, ]+)", lecture) for lecture in LECTURES]
    return [int(n) for found in named for text in found for n in re.findall(r"\d+", text)]


def test_every_exercise_and_every_bug_has_its_lecture():
    assert sorted(numbers("exercises")) == list(COURSE)
    assert sorted(numbers("bugs")) == list(BUGS)


def test_answers_of_the_quiz():
    held = sequence_index(8, 2, 0).tolist()
    assert f"7. {', '.join(map(str, held))}." in TEXT
    assert sum(i + 1 for i in held) == 18
    idle = bubble(simulate(rows_of(Flags(pp=4, pp_schedule="1F1B"), 4, 8, 4)))
    assert math.isclose(idle, 3 / 11, rel_tol=1e-6)
    assert "= 27 %" in TEXT


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_command_of_a_lecture(command, tmp_path):
    processes, script, args = split_command(command)
    parse_config(
        with_report_flags(importlib.import_module(script.removesuffix(".py")).Config), args
    )
    if "--check_parity" in args:  # a minute each, and the README's is run by tests/test_recipes.py
        return
    if "--dry_run" not in args:
        deep = {"--pp", "--explain"} & set(args)  # layers for every stage, and three for --explain
        if deep:
            model = MODEL.replace("n_layers=2", "n_layers=12")
        else:
            model = MODEL
        args += ["--model_args", model, "--seq_len", "32"]
    if script == "train_llama3.py" and processes > 1:
        args += ["--steps", "2", "--device", "cpu"]
    run(launch(processes, REPO / script, *args), tmp_path)
    assert "--html" not in args or (tmp_path / "layout.html").stat().st_size > 1000
