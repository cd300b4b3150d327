"""Shared by the checks: run a student's functions on several processes, and say what is wrong.

run.py starts a process for each check. In this process `import parallel` finds the student's file; the tests/ folder is the
project's. check() of ex04.py raises Wrong with a text for the student, or returns.
"""
import faulthandler
import importlib
import inspect
import textwrap
from contextlib import contextmanager
from functools import partial

import layouts
from pool import pool

STUCK_S = 60  # must be less than run.LIMIT_S
# {file: {function: source}}: tests/exercises/test_exercises.py puts answers here; checks run these, not the files' code
planted = {}


class Wrong(Exception):
    """Says the mistake in an answer, and the place to look at."""


@contextmanager
def replaced(answers: dict[str, dict[str, str]]):
    """Give functions the code of `answers` ({file: {function: source}}) for a while. Only the function's code object is
    replaced, so every module that has imported the function runs the new code."""
    before = []
    try:
        for file, sources in answers.items():
            module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
            for name, source in sources.items():
                *path, last = name.split(".")
                holder = vars(getattr(module, path[0]) if path else module)
                function, made = inspect.unwrap(getattr(holder[last], "__func__", holder[last])), {}
                exec(compile(textwrap.dedent(source), f"answer in {file}", "exec"), vars(module), made)
                new = inspect.unwrap(getattr(made[last], "__func__", made[last]))
                before.append((function, function.__code__, function.__defaults__, function.__kwdefaults__))
                function.__code__, function.__defaults__, function.__kwdefaults__ = (
                    new.__code__, new.__defaults__, new.__kwdefaults__)
        yield
    finally:
        for function, *was in before:
            function.__code__, function.__defaults__, function.__kwdefaults__ = was


@contextmanager
def watched(answers: dict):
    """On a rank: put the answers in place. After STUCK_S write the stack to stderr; run.py reads there which rank waits."""
    faulthandler.dump_traceback_later(STUCK_S)
    try:
        with replaced(answers):
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def call(watch, function, args):
    with watch():
        return function(*args)


def on_ranks(n: int, function, *args) -> list:
    """[function(*args) on rank 0, on rank 1, ...] for n processes connected by gloo. The function must be importable."""
    return pool(n).run(call, partial(watched, planted), function, args, tries=1)


def compare(processes: int, flags: dict, problem: dict) -> str:
    """'' if the layout trains like a single process, else the first difference (see tests/layouts.py)."""
    return layouts.compare(processes, flags, problem, partial(watched, planted))


def check_groups(flags: dict, problem: dict):
    """Compare an axis of 2 on 4 processes. On 2 processes a collective without its group reaches the same ranks, so the
    mistake stays hidden."""
    try:
        difference = compare(4, flags, problem)
    except RuntimeError as e:
        difference = str(e).strip().splitlines()[-1]
    if difference:
        raise Wrong(f"right on 2 processes, and not on 4, where {flags} makes two groups of two ranks: {difference}. Does "
                    "every collective get its group, and are rank and number of ranks those in the group?")
