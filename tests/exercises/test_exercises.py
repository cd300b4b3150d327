"""exercises/: the project's own functions pass each check, a blank does not, other right answers
pass, and a typical wrong one is told what is wrong. The answers are in tests/answers/."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import feedback
import pytest
from bugs import BUGS, planted_bug
from course import COURSE, functions, original, source_of, with_blanks
from mistakes import changed_functions
from runs import MODEL, REPO, column, ended, json_lines, launch
from submission import plant
from tried import answers, table


def blanks(number: int) -> dict:
    """{file: {function: its source as a blank}}"""
    made = {}
    for file, names in COURSE[number].blanks.items():
        text = with_blanks(original(file).read_text(), names, f"exercise {number}")
        made[file] = {name: source_of(text, name) for name in names}
    return made


def check(number: int, answer=None):
    """The check, with an answer in place of the project's own functions in the processes that it
    starts: there and nowhere else, as a student's functions run."""
    with mock.patch.object(feedback, "planted", answer or {}):
        importlib.import_module(COURSE[number].name).check()


@pytest.mark.parametrize(
    "number", [pytest.param(n, marks=[pytest.mark.slow] * (n != 7), id=str(n)) for n in COURSE]
)
def test_an_exercise_knows_right_from_wrong(number):
    given = answers(number)
    assert given.RIGHT
    assert given.WRONG
    check(number)
    with pytest.raises(Exception, match=f"exercise {number}: .* is still a blank"):
        check(number, blanks(number))
    for answer in given.RIGHT:
        check(number, answer)
    for answer, words in given.WRONG:
        with pytest.raises(feedback.Wrong, match=re.escape(words)):
            check(number, answer)


def run(*argv, status=0):
    done = ended([sys.executable, REPO / "exercises" / "run.py", *argv], status=status)
    return done.stdout + done.stderr


def test_list_has_a_line_for_each():
    lines = run("list").splitlines()
    assert [int(line.split()[0]) for line in lines[:-1]] == list(range(1, len(COURSE) + 1))


@pytest.mark.parametrize("number", COURSE)
def test_a_page_says_what_to_do(number):
    task, hints = COURSE[number].page()
    assert task.startswith(f"# {number} ")
    assert len(task) > 1000
    assert len(hints) >= 2
    for file, names in COURSE[number].blanks.items():
        for name in names:
            assert f"`{name.split('.')[0]}" in task, name
            assert f"`{file}`" in task, name
            assert functions(original(file).read_text())[name].body[0].value.value, (
                f"{name} has no docstring"
            )


def write(answer: dict, folder):
    for file, sources in answer.items():
        text = (folder / file).read_text()
        for name, source in sources.items():
            text = text.replace(source_of(text, name), source.strip())
        (folder / file).write_text(text)


@pytest.mark.slow
def test_a_student_starts_checks_asks_and_solves(tmp_path):
    folder = tmp_path / "mine"
    assert "hand01.py, line" in run("start", 1, "--out", folder)
    assert "is still a blank" in run("check", folder, status=1)
    assert run("hint", folder) != run("hint", folder)
    given = answers(1)
    for answer, status, words in (
        (given.WRONG[0][0] | {"parallel.py": given.RIGHT[0]["parallel.py"]}, 1, given.WRONG[0][1]),
        (given.RIGHT[0], 0, "is solved"),
    ):
        write(answer, folder)
        assert words in run("check", folder, "--limit", 500, status=status)
    assert "no end after 1 s" in run("check", folder, "--limit", 1, status=1)
    path = folder / "hand01.py"
    first = "    for "
    path.write_text(path.read_text().replace(first, "    while True:\n        pass\n" + first, 1))
    said = " ".join(run("check", folder, "--limit", 40, status=1).split())
    assert "No rank waits for another: the answer still computes" in said
    assert "hand01.py, in" in said
    assert "is there already" in run("start", 1, "--out", folder, status=2)


@pytest.mark.slow
def test_an_answer_that_fails_is_shown_where_it_does(tmp_path):
    run("solution", 1, "--out", tmp_path / "a")
    path = tmp_path / "a" / "hand01.py"
    path.write_text(path.read_text().replace("loss.backward()", "loss.backwards()"))
    said = run("check", tmp_path / "a", "--limit", 500, status=1)
    assert "hand01.py" in said
    assert "loss.backwards()" in said
    assert "AttributeError" in said
    assert len(said.splitlines()) < 8


@pytest.mark.slow
def test_a_file_that_cannot_be_imported_is_named(tmp_path):
    run("start", "--bug", 1, "--out", tmp_path / "a b")
    path = tmp_path / "a b" / "parallel.py"
    path.write_text(path.read_text() + "def (\n")
    said = run("check", tmp_path / "a b", "--limit", 500, status=1)
    assert "SyntaxError: parallel.py, line" in said
    assert "def (" in said
    assert len(said.splitlines()) < 8
    path.unlink()
    assert "parallel.py cannot be read: No such file" in run("check", tmp_path / "a b", status=1)
    (tmp_path / "a b" / "exercise.json").write_text("[1]")
    assert "names no exercise or bug" in run("check", tmp_path / "a b", status=2)


@pytest.mark.parametrize(
    "argv, words",
    [
        (("start", 1, "--out", __file__ + "/new"), "cannot be made: Not a directory"),
        (("start", 99, "--out", "{}"), "there is no exercise 99; use 1 .. "),
        (("start", "--out", "{}"), "needs the number of an exercise or --bug N or --diff FILE"),
        (
            ("start", 1, "--bug", 1, "--out", "{}"),
            "needs the number of an exercise or --bug N or --diff FILE",
        ),
        (("start", "--bug", 99, "--out", "{}"), "there is no bug 99; use 1 .. 15"),
        (("start", "99"), "error: the following arguments are required: --out"),
        (("start", "4x", "--out", "{}"), "error: number: invalid int value: '4x'"),
        ((), "required: list|start|solution|hint|check|grade"),
        (("check", "{}"), "is no folder of an exercise"),
        (("hint", "{}"), "is no folder of an exercise"),
    ],
)
def test_wrong_usage_is_one_line(argv, words, tmp_path):
    said = run(*[str(tmp_path / "new") if word == "{}" else word for word in argv], status=2)
    assert words in said
    assert len(said.splitlines()) == 1


def test_a_pipe_that_has_seen_enough_hears_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, str(REPO / "exercises" / "run.py"), "list"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


BODY = "    n = T // (2 * cp)\n"  # the first line of exercise 7's right answer
SUBMISSIONS = [  # files to write, what stands before BODY, verdict, a part of the message
    ({}, "", "solved", ""),
    # nothing else is read
    ({"pool.py": "1 / 0", "ex07.py": "1 / 0", "sitecustomize.py": "1 / 0"}, "", "solved", ""),
    ({}, "    import os\n    os._exit(0)\n", "refused", "import os"),
    ({}, "    torch.os._exit(0)\n", "refused", "._exit"),
    # would hide traffic from the check
    ({}, "    with torch._C._DisableTorchDispatch():\n        pass\n", "refused", "._C"),
    ({}, "    import feedback\n    feedback.alone = print\n", "refused", "import feedback"),
    (
        {},
        "    class T:\n        def __reduce__(self):\n            return print, ()\n",
        "refused",
        "def __reduce__",
    ),
    ({}, "    print('exercise 7 is solved')\n    raise SystemExit(0)\n", "error", "SystemExit"),
    ({}, "    torch.ones(10**10)\n", "error", "memory"),
    (
        {},
        "    torch.equal = lambda a, b: True\n    return torch.arange(T).chunk(cp)[rank]\n",
        "not yet",
        "all wait for",
    ),
    (
        {"parallel.py": Path(REPO, "parallel.py").read_text()},
        "",
        "refused",
        "the project's own lines, word for word",
    ),
    (
        {"exercise.json": '{"exercise": 8, "hints": 0}'},
        "",
        "refused",
        "does exercise.json name another exercise",
    ),
]


def test_the_table_of_answers_is_fresh():
    assert table(SUBMISSIONS) == (REPO / "exercises" / "tried.md").read_text(), (
        "run `python exercises/tried.py`"
    )


@pytest.mark.slow
def test_a_class_is_graded_unattended(tmp_path):
    for i, (files, before, *_) in enumerate(SUBMISSIONS):
        folder = tmp_path / "class" / f"{i:02}" / "handed-in"
        run("start", 7, "--out", folder)
        write(answers(7).RIGHT[0], folder)
        path = folder / "parallel.py"
        path.write_text(path.read_text().replace(BODY, before + BODY))
        for file, text in files.items():
            (folder / file).write_text(text)
    run("grade", tmp_path / "class", "--json", tmp_path / "out.jsonl", "--limit", 300)
    rows = json_lines(tmp_path / "out.jsonl")
    assert column(rows, "verdict") == [verdict for *_, verdict, _ in SUBMISSIONS], rows
    for row, (*_, words) in zip(rows, SUBMISSIONS, strict=True):
        assert words in row["message"], rows
    assert column(rows, "student") == [f"{i:02}" for i in range(len(rows))]
    assert rows[0]["exercise"] == 7
    # natural_order is right in all; a submission that is refused has no points
    points = {"solved": 2, "refused": 0}
    assert [(row["points"], row["of"]) for row in rows[:-1]] == [
        (points.get(row["verdict"], 1), 2) for row in rows[:-1]
    ]


def test_a_short_function_may_come_out_like_the_projects(tmp_path):
    run("solution", 18, "--out", tmp_path / "a")
    assert plant(18, tmp_path / "a", only=("moments",)).files


def test_a_copy_does_not_hold_the_answer(tmp_path):
    """Nor does a mistake that a lecturer plants say where it is."""
    run("start", 7, "--out", tmp_path / "a")
    text = (tmp_path / "a/docs/parallelism.md").read_text()
    assert "chunks[2 * cp - 1 - rank]" not in text
    assert "left out of your copy" in text
    assert "import parallel" in (tmp_path / "a/play.py").read_text()
    (tmp_path / "my.diff").write_text(
        "--- a/parallel.py\n+++ b/parallel.py\n@@ -1 +1 @@\n-    dist.all_reduce(squares)\n+   "
        " pass\n"
    )
    run("start", "--diff", tmp_path / "my.diff", "--out", tmp_path / "b")
    assert "    pass\n    norm = squares" in (tmp_path / "b/parallel.py").read_text()
    assert "squares" not in (tmp_path / "b/TASK.md").read_text()


def test_a_copy_has_what_git_tracks_and_nothing_of_the_lecturer(tmp_path):
    own = REPO / "docs" / "questions_of_my_exam.md"
    own.write_text("a file that git does not know")
    try:
        run("start", 3, "--out", tmp_path / "a")
    finally:
        own.unlink()
    made = {str(path.relative_to(tmp_path / "a")) for path in (tmp_path / "a").rglob("*.*")}
    assert {"flags/config.py", "tools/reports/page.html", "hand03.py"} <= made
    assert not [name for name in made if name.endswith(own.name)]
    assert not [name for name in made if name.startswith(("tests", "exercises", "."))]


MODEL_OF_SIX = MODEL.replace("n_layers=2", "n_layers=6")
SMALL = ["--dp_shard", "2", "--seq_len", "32", "--local_batch_size", "2"]
REPORTS = {  # the flags of a report -> what the program says
    "--explain --html layout.html": "open it in a browser",
    "--explain": "attn.wq.weight",
    "--plot": "mesh.svg",
    "--dry_run": "80 GB: fits",
}


def report_in(folder, words: list[str], status=0) -> str:
    """What a report says in a program of its own, which finds no file but those of the folder."""
    command = launch(1, "train_llama3.py", *SMALL, "--model_args", MODEL_OF_SIX, *words)
    return ended(command, folder, real=True, status=status).stdout


@pytest.mark.parametrize(
    "start",
    [
        pytest.param(("3",), id="exercise"),
        pytest.param(("--bug", "9"), id="bug", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    "flags",
    [pytest.param(flags, marks=[pytest.mark.slow] * ("--html" not in flags)) for flags in REPORTS],
)
def test_every_report_works_in_a_students_folder(start, flags, tmp_path):
    run("start", *start, "--out", tmp_path / "a")
    assert REPORTS[flags] in report_in(tmp_path / "a", flags.split())


@pytest.mark.slow
def test_the_first_operation_that_differs_is_named_in_a_students_folder(tmp_path):
    run("start", 3, "--out", tmp_path / "a")
    assert "no difference at" in report_in(tmp_path / "a", ["--check_parity", "--where"])
    run("start", "--bug", 9, "--out", tmp_path / "b")
    said = report_in(tmp_path / "b", ["--check_parity", "--where"], status=1)
    assert "look at: every gradient is off by the factor 0.5" in said


# ---------------------------------------------------------------- bugs
def test_every_known_mistake_can_be_planted():
    for bug in BUGS.values():
        for file, text in planted_bug(bug).items():
            compile(text, file, "exec")


@pytest.mark.slow
@pytest.mark.parametrize("number", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_bug_is_there_until_it_is_repaired(number, tmp_path):
    """As a student sees it, with the folder and the commands. These two cannot be swapped into a
    running function."""
    run("start", "--bug", number, "--out", tmp_path / "bug")
    assert "differs from plain torch" in run("check", tmp_path / "bug", status=1)
    for file in planted_bug(BUGS[number]):
        (tmp_path / "bug" / file).write_text(Path(REPO, file).read_text())
    assert "is solved" in run("check", tmp_path / "bug")


@pytest.mark.slow
@pytest.mark.parametrize("number", [n for n in BUGS if n > 2])
def test_a_bug_is_found_by_its_check(number):
    BUGS[number].check()
    with (
        mock.patch.object(feedback, "planted", changed_functions(BUGS[number])),
        pytest.raises(feedback.Wrong, match="differs from plain torch"),
    ):
        BUGS[number].check()
