"""What the checks share: a student's functions on several processes, and what is said about them.

A check runs in a process of its own, in which `import parallel` finds the student's file and tests/ those of the project
(run.py arranges that). check() of ex04.py raises Wrong with a text for the student, or returns.
"""
import faulthandler
import importlib
import inspect
import textwrap
from contextlib import contextmanager
from functools import partial

import layouts
from pool import pool

STUCK_S = 60  # less than run.LIMIT_S
planted = {}  # tests/test_exercises.py: {file: {function: source}}, answers to be checked in place of those in the files


class Wrong(Exception):
    """What is wrong with an answer, and where to look."""


@contextmanager
def replaced(answers: dict[str, dict[str, str]]):
    """Functions of modules, with the code of other source. It is swapped inside the function, so whoever has imported the
    function sees it as well."""
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
    """On a rank: the answers in place, and after STUCK_S a note on stderr of where it is, from which run.py tells who waits."""
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
    """What function(*args) returns on each of n processes, which are connected by gloo. It must be importable."""
    return pool(n).run(call, partial(watched, planted), function, args, tries=1)


def compare(processes: int, flags: dict, problem: dict) -> str:
    """'' if this layout trains as one process does, else the first difference: see tests/layouts.py."""
    return layouts.compare(processes, flags, problem, partial(watched, planted))


def check_groups(flags: dict, problem: dict):
    """An axis of 2 on 4 processes: with 2, a collective that forgets its group goes to the same ranks, and nobody sees it."""
    try:
        difference = compare(4, flags, problem)
    except RuntimeError as e:
        difference = str(e).strip().splitlines()[-1]
    if difference:
        raise Wrong(f"right on 2 processes, and not on 4, where {flags} makes two groups of two ranks: {difference}. Does "
                    "every collective get its group, and are rank and number of ranks those in the group?")
