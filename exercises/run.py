"""Exercises with automatic checks: write parts of the lecture yourself. No GPU needed.

    python exercises/run.py list
    python exercises/run.py start 4 --out ~/ex4          # a copy of the project with a blank; read TASK.md
    python exercises/run.py start --bug 7 --out ~/bug7   # a copy of the project with a mistake, to be found
    python exercises/run.py check ~/ex4                  # says solved (status 0), or what is wrong (status 1)
    python exercises/run.py hint ~/ex4                   # the next hint
    python exercises/run.py solution 4 --out ~/ex4-done  # the same copy without the blank; prints the function
"""
import argparse
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import traceback
from pathlib import Path

from bugs import BUGS, TASK, planted_bug
from course import COURSE, HERE, HOUSE, functions, original, source_of, with_blanks

COPIED = ("*.py", "*.md", "LICENSE", "requirements*.txt", "models", "distributed", "support", "corpus", "storage", "sft", "rl",
          "tools", "forks", "docs")
STATE = "exercise.json"  # in a student's folder: {"exercise": 4 or "bug": 7, "hints": number of hints shown so far}
LIMIT_S = 120


def say(text: str):
    print(textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False))


def copy_of_project(out: str, state: dict, changed: dict[str, str], task: str):
    """Write a student's folder. changed: file -> new text. Raises ValueError if the folder exists and is not empty."""
    folder = Path(out).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{out} is there already and not empty: give --out a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ValueError(f"--out {out} cannot be made: {e.strerror}") from None
    for pattern in COPIED:
        for path in HOUSE.glob(pattern):
            if path.is_dir():
                shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(path, folder / path.name)
    for file, text in changed.items():
        (folder / file).write_text(text)
    (folder / "TASK.md").write_text(task)
    (folder / STATE).write_text(json.dumps(state | {"hints": 0}))


def start(number: int, out: str, solved=False):
    """Write a folder with exercise `number`. solved: leave the project's own functions in place of the blanks."""
    exercise = COURSE[number]
    texts = {file: original(file).read_text() for file in exercise.blanks}
    blank = {file: with_blanks(text, exercise.blanks[file], f"exercise {number}") for file, text in texts.items()}
    copy_of_project(out, {"exercise": number}, texts if solved else blank, exercise.page()[0])
    print(f"exercise {number}: {exercise.title}")
    for file, names in exercise.blanks.items():
        for name in names:
            if solved:
                print(f"\n{file}:\n{source_of(texts[file], name)}")
            else:
                print(f"  {file}, line {functions(blank[file])[name].lineno}: {name}")
    print(f"\nRead {out}/TASK.md" * (not solved) + f"\nCheck it: python {sys.argv[0]} check {shlex.quote(out)}")


def start_bug(number: int, out: str):
    bug = BUGS[number]
    head = bug.page()[0]
    copy_of_project(out, {"bug": number}, planted_bug(bug), TASK.format(head=head))
    print(f"{head[2:]}\nRead {out}/TASK.md\nCheck your repair: python {sys.argv[0]} check {shlex.quote(out)}")


def state_of(folder: str) -> dict:
    try:
        state = json.loads((Path(folder).expanduser() / STATE).read_text())
    except OSError:
        raise ValueError(f"{folder} is no folder of an exercise: make one with start N --out {folder}") from None
    except ValueError:
        state = None
    if not isinstance(state, dict) or "hints" not in state or not (state.get("exercise") in COURSE or state.get("bug") in BUGS):
        raise ValueError(f"{folder}/{STATE} names no exercise or bug that there is: begin again with start N --out NEW")
    return state


def hint(folder: str):
    state = state_of(folder)
    hints = COURSE[state["exercise"]].page()[1] if "exercise" in state else BUGS[state["bug"]].page()[1]
    n = min(state["hints"], len(hints) - 1)
    say(f"hint {n + 1} of {len(hints)}: {hints[n]}")
    if n + 1 == len(hints) and "exercise" in state:
        print(f"That was the last; the answer: python {sys.argv[0]} solution {state['exercise']} --out NEW")
    (Path(folder).expanduser() / STATE).write_text(json.dumps(state | {"hints": n + 1}))


def what(state: dict) -> str:
    return " ".join(f"{kind} {state[kind]}" for kind in ("exercise", "bug") if kind in state)


def still_blank(folder: Path, number: int) -> str:
    """A line that names a function not written yet; '' if the student has filled every blank."""
    for file, names in COURSE[number].blanks.items():
        try:
            text = (folder / file).read_text()
            found = functions(text)
        except SyntaxError as e:
            return f"{file}, line {e.lineno}: {e.msg}"
        except OSError as e:
            return f"{file} cannot be read: {e.strerror}"
        for name in names:
            if name not in found:
                return f"{file} has no function {name} any more; TASK.md says what it must do"
            if f'NotImplementedError("exercise {number}: ' in source_of(text, name):
                return (f"{file}, line {found[name].lineno}: {name} is still a blank. What it must do is in its docstring "
                        f"and in TASK.md; python {sys.argv[0]} hint {folder} tells more")
    return ""


def check(name: str) -> int:
    """Check a student's folder in a new process that imports the student's modules. Returns the exit status."""
    state, folder = state_of(name), Path(name).expanduser().resolve()
    if "exercise" in state and (blank := still_blank(folder, state["exercise"])):
        say(f"{what(state)}, not yet: {blank}")
        return 1
    paths = os.pathsep.join(map(str, (folder, HERE, HOUSE / "tests")))
    env = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1"}
    print(f"checking {what(state)}, usually 5 to 20 s ...", flush=True)
    command = [sys.executable, HERE / "run.py", "check-here", json.dumps(state), folder]
    warnings = tempfile.TemporaryFile("w+")  # torch's warnings would bury the answer
    process = subprocess.Popen(command, env=env, cwd=folder, start_new_session=True, stderr=warnings)
    try:
        if (status := process.wait(LIMIT_S)) not in (0, 1):
            warnings.seek(0)
            print(warnings.read(), file=sys.stderr)
        return status
    except subprocess.TimeoutExpired:
        warnings.seek(0)
        places = re.findall(rf'File "{re.escape(str(folder))}/(\S+)", line (\d+) in (\w+)', warnings.read())
        seen = "; ".join(f"{file}, line {line}, in {function}" for file, line, function in dict.fromkeys(places)) or "not known"
        say(f"{what(state)}, not yet: no end after {LIMIT_S} s. Usually ranks that wait for each other: each must call the "
            f"same collectives in the same order, whatever its data. Where they are: {seen}")
        return 1
    except KeyboardInterrupt:
        return 130
    finally:
        with contextlib.suppress(ProcessLookupError):  # with the workers of the check
            os.killpg(process.pid, signal.SIGKILL)


def students_lines(text: str, folder: str) -> str:
    """The error of a traceback, and the last line in the student's files on the way to the error."""
    lines = text.strip().splitlines()
    places = [i for i, line in enumerate(lines) if f'File "{folder}' in line]
    error = next((line for line in reversed(lines) if line[:1].isalpha()), lines[-1])
    where = [" ".join(lines[places[-1]].split()).removeprefix("File "), lines[places[-1] + 1].strip()] if places else []
    return "\n    ".join([error, *where])


def check_here(state: dict, folder: str) -> int:
    """Run the check itself, in the process that imports the student's modules. Returns the exit status."""
    try:
        import feedback  # imports the student's modules; one of these may have a syntax error

        wrong = ""
        try:
            if "bug" in state:
                BUGS[state["bug"]].check()
            else:
                __import__(COURSE[state["exercise"]].name).check()
        except feedback.Wrong as e:
            wrong = str(e)
    except Exception:
        print(f"{what(state)}, not yet: it ends with an error\n    {students_lines(traceback.format_exc(), folder)}")
        return 1
    if wrong:
        print(f"{what(state)}, not yet:")
        for line in wrong.splitlines():  # an indented line is part of a table
            print(textwrap.indent(line if line[:1] == " " else textwrap.fill(line, 106, break_on_hyphens=False), "    "))
        return 1
    print(f"{what(state)} is solved")
    return 0


def show_list():
    for number, exercise in COURSE.items():
        files = "; ".join(f"{file}: {', '.join(names)}" for file, names in exercise.blanks.items())
        print(f"{number:>2}  {exercise.title:<52} {files}")
    print(f"Mistakes to find: start --bug 1 .. {len(BUGS)} --out DIR")


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("list")
    for name in ("start", "solution"):
        command = commands.add_parser(name)
        command.add_argument("number", type=int, nargs="?", help=f"1 .. {len(COURSE)}")
        command.add_argument("--out", required=True, help="a new folder")
        if name == "start":
            command.add_argument("--bug", type=int, help=f"1 .. {len(BUGS)}, in place of an exercise")
    for name in ("check", "hint"):
        commands.add_parser(name).add_argument("folder", help="a folder that start has made")
    args = parser.parse_args(argv)
    try:
        if args.command == "list":
            show_list()
        elif args.command in ("start", "solution"):
            bug = getattr(args, "bug", None)
            if (args.number is None) == (bug is None):
                raise ValueError(f"{args.command} needs the number of an exercise" + " or --bug N" * (args.command == "start"))
            if bug is None and args.number not in COURSE:
                raise ValueError(f"there is no exercise {args.number}; use 1 .. {len(COURSE)}")
            if bug is not None and bug not in BUGS:
                raise ValueError(f"there is no bug {bug}; use 1 .. {len(BUGS)}")
            start(args.number, args.out, args.command == "solution") if bug is None else start_bug(bug, args.out)
        elif args.command == "hint":
            hint(args.folder)
        else:
            return check(args.folder)
    except ValueError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["check-here"]:  # the process started by check()
        sys.exit(check_here(json.loads(sys.argv[2]), sys.argv[3]))
    with contextlib.suppress(BrokenPipeError):  # "solution 4 ... | head"
        sys.exit(main(sys.argv[1:]))
