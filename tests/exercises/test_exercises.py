"""exercises/: the project's own functions pass each check, a blank does not, other right answers pass, and a typical wrong one
is told what is wrong. The answers are in tests/answers/."""
import importlib.util
import re
import sys
from contextlib import contextmanager
from pathlib import Path

import feedback
import pytest
from bugs import BUGS, planted_bug
from course import COURSE, functions, original, source_of, with_blanks
from programs import run_program
from runs import REPO
from test_mutants import changed_functions

QUICK = (7, 14)  # the others are slow


def answers(number: int):
    path = REPO / "tests" / "answers" / f"ex{number:02}.py"
    spec = importlib.util.spec_from_file_location(f"answers{number}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def blanks(number: int) -> dict:
    """{file: {function: its source as a blank}}"""
    made = {}
    for file, names in COURSE[number].blanks.items():
        text = with_blanks(original(file).read_text(), names, f"exercise {number}")
        made[file] = {name: source_of(text, name) for name in names}
    return made


@contextmanager
def answered(answer: dict):
    """The answer in place of the project's own functions, in this process and in those that a check starts."""
    feedback.planted = answer
    try:
        with feedback.replaced(answer):
            yield
    finally:
        feedback.planted = {}


def check(number: int):
    importlib.import_module(COURSE[number].name).check()


def numbers():
    return [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow, id=str(n)) for n in COURSE]


@pytest.mark.parametrize("number", numbers())
def test_an_exercise_knows_right_from_wrong(number):
    given = answers(number)
    assert given.RIGHT and given.WRONG
    check(number)
    with answered(blanks(number)), pytest.raises(Exception, match=f"exercise {number}: .* is still a blank"):
        check(number)
    for answer in given.RIGHT:
        with answered(answer):
            check(number)
    for answer, words in given.WRONG:
        with answered(answer), pytest.raises(feedback.Wrong, match=re.escape(words)):
            check(number)


def run(*argv, status=0):
    done = run_program([sys.executable, REPO / "exercises" / "run.py", *argv])
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_list_has_a_line_for_each():
    lines = run("list").splitlines()
    assert [int(line.split()[0]) for line in lines[:-1]] == list(range(1, len(COURSE) + 1))


@pytest.mark.parametrize("number", COURSE)
def test_a_page_says_what_to_do(number):
    task, hints = COURSE[number].page()
    assert task.startswith(f"# {number} ") and len(task) > 1000 and len(hints) >= 2
    for file, names in COURSE[number].blanks.items():
        for name in names:
            assert f"`{name.split('.')[0]}" in task and f"`{file}`" in task, name
            assert functions(original(file).read_text())[name].body[0].value.value, f"{name} has no docstring"


@pytest.mark.slow
def test_a_student_starts_checks_asks_and_solves(tmp_path):
    folder = tmp_path / "mine"
    assert "hand01.py, line" in run("start", 1, "--out", folder)
    assert "is still a blank" in run("check", folder, status=1)
    assert run("hint", folder) != run("hint", folder)
    given = answers(1)
    for answer, status, words in ((given.WRONG[0][0] | {"parallel.py": given.RIGHT[0]["parallel.py"]}, 1, given.WRONG[0][1]),
                                  (given.RIGHT[0], 0, "is solved")):
        for file, sources in answer.items():
            text = (folder / file).read_text()
            for name, source in sources.items():
                text = text.replace(source_of(text, name), source.strip())
            (folder / file).write_text(text)
        assert words in run("check", folder, status=status)
    assert "is there already" in run("start", 1, "--out", folder, status=2)


@pytest.mark.slow
def test_an_answer_that_fails_is_shown_where_it_does(tmp_path):
    run("solution", 1, "--out", tmp_path / "a")
    path = tmp_path / "a" / "hand01.py"
    path.write_text(path.read_text().replace("loss.backward()", "loss.backwards()"))
    said = run("check", tmp_path / "a", status=1)
    assert "hand01.py" in said and "loss.backwards()" in said and "AttributeError" in said and len(said.splitlines()) < 8


@pytest.mark.slow
def test_a_file_that_cannot_be_imported_is_named(tmp_path):
    run("start", "--bug", 1, "--out", tmp_path / "a b")
    path = tmp_path / "a b" / "parallel.py"
    path.write_text(path.read_text() + "def (\n")
    said = run("check", tmp_path / "a b", status=1)
    assert "SyntaxError" in said and "parallel.py" in said and "def (" in said and len(said.splitlines()) < 8
    path.unlink()
    assert "No module named 'parallel'" in run("check", tmp_path / "a b", status=1)
    (tmp_path / "a b" / "exercise.json").write_text("[1]")
    assert "names no exercise or bug" in run("check", tmp_path / "a b", status=2)


@pytest.mark.parametrize("argv, words", [
    (("start", 1, "--out", __file__ + "/new"), "cannot be made: Not a directory"),
    (("start", 99, "--out", "{}"), "there is no exercise 99; use 1 .. "),
    (("start", "--out", "{}"), "needs the number of an exercise or --bug N"),
    (("start", 1, "--bug", 1, "--out", "{}"), "needs the number of an exercise or --bug N"),
    (("start", "--bug", 99, "--out", "{}"), "there is no bug 99; use 1 .. 14"),
    (("check", "{}"), "is no folder of an exercise"), (("hint", "{}"), "is no folder of an exercise"),
])
def test_wrong_usage_is_one_line(argv, words, tmp_path):
    said = run(*[str(tmp_path / "new") if word == "{}" else word for word in argv], status=2)
    assert words in said and len(said.splitlines()) == 1


# ---------------------------------------------------------------- bugs
def test_every_known_mistake_can_be_planted():
    for bug in BUGS.values():
        for file, text in planted_bug(bug).items():
            compile(text, file, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_bug_is_there_until_it_is_repaired(number, tmp_path):
    """As a student sees it, with the folder and the commands. These two cannot be swapped into a running function."""
    run("start", "--bug", number, "--out", tmp_path / "bug")
    assert "differs from plain torch" in run("check", tmp_path / "bug", status=1)
    for file in planted_bug(BUGS[number]):
        (tmp_path / "bug" / file).write_text(Path(REPO, file).read_text())
    assert "is solved" in run("check", tmp_path / "bug")


@pytest.mark.slow
@pytest.mark.parametrize("number", [n for n in BUGS if n > 2])
def test_a_bug_is_found_by_its_check(number):
    BUGS[number].check()
    with answered(changed_functions(BUGS[number])), pytest.raises(feedback.Wrong, match="differs from plain torch"):
        BUGS[number].check()
