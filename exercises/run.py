"""Exercises with automatic checks: write parts of the lecture yourself. No GPU needed.

    python exercises/run.py list
    python exercises/run.py start 4 --out ~/ex4          # a copy of the project with a blank; read TASK.md
    python exercises/run.py start --bug 7 --out ~/bug7   # a copy of the project with a mistake, to be found
    python exercises/run.py check ~/ex4                  # says solved (status 0), or what is wrong (status 1)
    python exercises/run.py hint ~/ex4                   # the next hint
    python exercises/run.py solution 4 --out ~/ex4-done  # the same copy without the blank; prints the function

For a lecturer:

    python exercises/run.py grade handed-in --json grades.jsonl   # every submission below a folder; a line of JSON for each
    python exercises/run.py start --diff my.diff --out exam       # a copy with a mistake of your own, which is in no list
"""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

from bugs import BUGS, TASK, planted_bug, planted_diff
from course import COURSE, HOUSE, functions, original, source_of, with_blanks
from grading import LIMIT_S, Progress, grade, judged
from submission import STATE, state_of, what

# folders that a student does not get: answers, checks, and what only developers run
NOT_COPIED = ("tests", "exercises", "benchmarks")
LEFT_OUT = (
    "(The code that stands here is the answer to this exercise, and is left out of your copy.)"
)
PLAY = '''"""A place to try your functions on two ranks: torchrun --nproc_per_node 2 play.py

Change anything here; no check reads this file.
"""
import torch
import torch.distributed as dist

{imports}

dist.init_process_group("gloo")
rank, n, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD


def show(name, x):
    """Print a value of every rank, rank after rank."""
    values = [None] * n
    dist.all_gather_object(values, x)
    for r, value in enumerate(values) if rank == 0 else ():
        print(f"{{name}} on rank {{r}}: {{value}}")


x = torch.arange(4.0) + 10 * rank
show("x", x)
total = x.clone()
dist.all_reduce(total, group=group)
show("the sum of all ranks' x", total)
# now your own: {names}

dist.destroy_process_group()
'''


def say(text: str):
    print(textwrap.fill(text, 110, break_long_words=False, break_on_hyphens=False))


def files_to_copy() -> list[str]:
    """The project's files, without those of NOT_COPIED and of hidden folders. Only what git tracks:
    a file that lies beside them may be the lecturer's own."""
    git = ["git", "-C", str(HOUSE), "ls-files", "-z"]
    try:
        listed = subprocess.run(git, capture_output=True, text=True).stdout.split("\0")
    except FileNotFoundError:
        listed = []
    files = [file for file in listed if file and (HOUSE / file).is_file()]
    if not files:
        say(
            f"note: git does not know {HOUSE}, so the copy has every file that lies there, files "
            "of your own as well"
        )
        found = [path for path in HOUSE.rglob("*") if path.is_file()]
        files = sorted(str(path.relative_to(HOUSE)) for path in found)
    copied = []
    for file in files:
        rooms = Path(file).parts
        hidden = any(room.startswith(".") for room in rooms)
        if not hidden and rooms[0] not in NOT_COPIED and "__pycache__" not in rooms:
            copied.append(file)
    return copied


def copy_of_project(out: str, state: dict, changed: dict[str, str], task: str):
    """Write a student's folder. changed: file -> new text. Raises ValueError if the folder exists
    and is not empty."""
    folder = Path(out).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{out} is there already and not empty: give --out a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ValueError(f"--out {out} cannot be made: {e.strerror}") from None
    for file in files_to_copy():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(HOUSE / file, folder / file)
    for file, text in changed.items():
        (folder / file).write_text(text)
    (folder / "TASK.md").write_text(task)
    (folder / STATE).write_text(json.dumps(state | {"hints": 0}))


def play(exercise) -> str:
    modules = {
        file.removesuffix(".py").replace("/", "."): names for file, names in exercise.blanks.items()
    }
    names = dict.fromkeys(
        f"{module}.{name.split('.')[0]}" for module, names in modules.items() for name in names
    )
    return PLAY.format(
        imports="\n".join(f"import {module}" for module in modules), names=", ".join(names)
    )


def docs_without(exercise) -> dict[str, str]:
    """The texts of docs/ with a sentence in place of each piece of code that shows a line of the
    exercise's answer."""
    answer = set()
    for file, names in exercise.blanks.items():
        text = original(file).read_text()
        for name in names:
            answer |= {
                line.strip()
                for line in source_of(text, name).splitlines()
                if len(line.strip()) > 20
            }
        answer -= {line.strip() for line in with_blanks(text, names, "").splitlines()}
    changed = {}
    for path in (HOUSE / "docs").glob("*.md"):
        text = path.read_text()
        for block in re.findall(r"^```python\n.*?^```\n", text, re.M | re.S):
            if answer & {line.strip() for line in block.splitlines()}:
                text = text.replace(block, LEFT_OUT + "\n")
        if text != path.read_text():
            changed[f"docs/{path.name}"] = text
    return changed


def start(number: int, out: str, solved=False):
    """Write a folder with exercise `number`. solved: leave the project's own functions in place of
    the blanks."""
    exercise = COURSE[number]
    texts = {file: original(file).read_text() for file in exercise.blanks}
    blank = {
        file: with_blanks(text, exercise.blanks[file], f"exercise {number}")
        for file, text in texts.items()
    }
    changed = texts if solved else blank | docs_without(exercise) | {"play.py": play(exercise)}
    copy_of_project(out, {"exercise": number}, changed, exercise.page()[0])
    print(f"exercise {number}: {exercise.title}")
    for file, names in exercise.blanks.items():
        for name in names:
            if solved:
                print(f"\n{file}:\n{source_of(texts[file], name)}")
            else:
                print(f"  {file}, line {functions(blank[file])[name].lineno}: {name}")
    print(
        f"\nRead {out}/TASK.md" * (not solved)
        + f"\nCheck it: python {sys.argv[0]} check {shlex.quote(out)}"
    )


def start_bug(number: int, out: str):
    bug = BUGS[number]
    head = bug.page()[0]
    changed = planted_bug(bug)
    where = (
        "`forks/`"
        if any(file.startswith("forks/") for file in changed)
        else "`parallel.py` or `distributed/`"
    )
    copy_of_project(out, {"bug": number}, changed, TASK.format(head=head, where=where))
    print(
        f"{head[2:]}\nRead {out}/TASK.md\nCheck your repair: python {sys.argv[0]} check "
        f"{shlex.quote(out)}"
    )


def start_diff(path: str, out: str):
    """A copy with a lecturer's own mistake. The folder does not say what was changed; keep the
    diff."""
    try:
        changed = planted_diff(Path(path).expanduser().read_text(), path)
    except OSError as e:
        raise ValueError(f"--diff {path} cannot be read: {e.strerror}") from None
    head = (
        "# A mistake to find\n\n    python RECIPE.py --check_parity FLAGS\n\n"
        "RECIPE is train_llama3 or train_qwen3; FLAGS are those of an axis.\n"
    )
    copy_of_project(
        out,
        {"diff": True},
        changed,
        TASK.format(head=head, where="`parallel.py` or `distributed/`"),
    )
    print(f"Read {out}/TASK.md\nCheck a repair: python {sys.argv[0]} check {shlex.quote(out)}")


def hint(folder: str):
    state = state_of(folder)
    if "diff" in state:
        raise ValueError("this mistake is your lecturer's, and has no hints here")
    hints = (
        COURSE[state["exercise"]].page()[1] if "exercise" in state else BUGS[state["bug"]].page()[1]
    )
    n = min(state["hints"], len(hints) - 1)
    say(f"hint {n + 1} of {len(hints)}: {hints[n]}")
    if n + 1 == len(hints) and "exercise" in state:
        print(
            f"That was the last; the answer: python {sys.argv[0]} solution {state['exercise']} "
            "--out NEW"
        )
    (Path(folder).expanduser() / STATE).write_text(json.dumps(state | {"hints": n + 1}))


def check(folder: str, limit: float) -> int:
    """Check a student's folder in other processes. Returns the exit status, for shells; the line
    that says "solved" is printed only after the check's own message."""
    state = state_of(folder)
    print(f"checking {what(state)}, usually 5 to 20 s ...", flush=True)
    try:
        with Progress(f"checking {what(state)}"):
            result = judged(folder, limit, prints=True)
    except KeyboardInterrupt:
        return 130
    if result["verdict"] == "solved":
        print(f"{what(state)} is solved")
        return 0
    print(
        f"{what(state)}, not yet:"
        if result["verdict"] == "not yet"
        else f"{what(state)}, not yet ({result['verdict']}):"
    )
    for line in result["message"].splitlines():
        print(
            textwrap.indent(
                line if line[:1] == " " else textwrap.fill(line, 106, break_on_hyphens=False),
                "    ",
            )
        )
    return 1


def show_list():
    for number, exercise in COURSE.items():
        files = "; ".join(f"{file}: {', '.join(names)}" for file, names in exercise.blanks.items())
        print(f"{number:>2}  {exercise.title:<52} {files}")
    print(f"Mistakes to find: start --bug 1 .. {len(BUGS)} --out DIR")


def chosen(args) -> int | None:
    """The exercise that was asked for, or None for a bug or a diff. Raises ValueError unless
    exactly one was asked for."""
    bug = getattr(args, "bug", None)
    diff = getattr(args, "diff", None)
    if [args.number, bug, diff].count(None) != 2:
        others = " or --bug N or --diff FILE" * (args.command == "start")
        raise ValueError(f"{args.command} needs the number of an exercise{others}")
    if args.number is not None and args.number not in COURSE:
        raise ValueError(f"there is no exercise {args.number}; use 1 .. {len(COURSE)}")
    if bug is not None and bug not in BUGS:
        raise ValueError(f"there is no bug {bug}; use 1 .. {len(BUGS)}")
    return args.number


def main(argv: list[str]) -> int:
    from flags.config import Parser  # grading has put the project on the path

    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="list|start|solution|hint|check|grade"
    )
    commands.add_parser("list")
    for name in ("start", "solution"):
        command = commands.add_parser(name)
        command.add_argument("number", type=int, nargs="?", help=f"1 .. {len(COURSE)}")
        command.add_argument("--out", required=True, help="a new folder")
        if name == "start":
            command.add_argument(
                "--bug", type=int, help=f"1 .. {len(BUGS)}, in place of an exercise"
            )
            command.add_argument(
                "--diff", help="a file with a mistake of your own, in place of an exercise"
            )
    commands.add_parser("hint").add_argument("folder", help="a folder that start has made")
    for name, what_for in (
        ("check", "a folder that start has made"),
        ("grade", "a folder with submissions in it"),
    ):
        command = commands.add_parser(name)
        command.add_argument("folder", help=what_for)
        command.add_argument(
            "--limit",
            type=float,
            default=LIMIT_S,
            help="seconds that a check may take; more on a busy machine",
        )
        if name == "grade":
            command.add_argument(
                "--json", required=True, help="a file for the results, a line of JSON for each"
            )
    args = parser.parse_args(argv)
    try:
        if args.command == "list":
            show_list()
        elif args.command == "grade":
            grade(args.folder, args.json, args.limit)
        elif args.command == "check":
            return check(args.folder, args.limit)
        elif args.command == "hint":
            hint(args.folder)
        elif (number := chosen(args)) is not None:
            start(number, args.out, solved=args.command == "solution")
        elif args.bug is not None:
            start_bug(args.bug, args.out)
        else:
            start_diff(args.diff, args.out)
        sys.stdout.flush()
    except BrokenPipeError:
        # `list | head` has seen enough, and Python would complain once more at its exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    # so that a check's processes are ended, too
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main(sys.argv[1:]))
