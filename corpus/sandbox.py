"""Runs a chat template, a program by a stranger: the template cannot reach Python's
objects, and a template without end is stopped.

jinja2's sandbox limits neither time nor memory. Python can raise an error in another thread,
between two of its instructions (PyThreadState_SetAsyncExc): a thread looks every 50 ms at the
templates that run, and ends those beyond a limit. An instruction that takes long cannot be ended,
so sums, products and powers are checked before. Not caught: a huge width given to a filter or a
format, and the text or comparison of lists that hold each other many times.
"""

import ctypes
import json
import resource
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn

import jinja2.ext
import jinja2.nodes
import jinja2.sandbox

# around the assistant's text; Unicode reserves both for programs, so no text has them
BEGIN = "\ufdd0"
END = "\ufdd1"
# of one rendering: time, memory; and the most that a number or a length may be
LONGEST_S = 10
MOST_GIB = 1
LARGEST = 1 << 28
PER_GIB = 1 << 20  # the unit of ru_maxrss is a KiB
if sys.platform == "darwin":
    PER_GIB = 1 << 30  # a byte
RESULTS = {"+": float.__add__, "*": float.__mul__, "**": float.__pow__}


class Generation(jinja2.ext.Extension):
    """{% generation %}: puts the inner text between the marks of the environment."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list:
        next(parser.stream)
        inside = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        begin, end = (jinja2.nodes.TemplateData(mark) for mark in parser.environment.marks)
        return [
            jinja2.nodes.Output([begin]),
            jinja2.nodes.Scope(inside),
            jinja2.nodes.Output([end]),
        ]


class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Options and names are as in transformers."""

    intercepted_binops = frozenset(RESULTS)

    def __init__(self, marks: tuple[str, str] = (BEGIN, END)):
        self.marks = marks
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", Generation]
        )
        self.filters["tojson"] = write_json
        self.globals |= dict(raise_exception=fail, strftime_now=strftime_now)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        # nearly always, so quickly
        if type(left) is str and type(right) is str and len(left) + len(right) < LARGEST:
            return self.binop_table[operator](left, right)
        sizes = [size_or_value(left), size_or_value(right)]
        most = LARGEST
        if sizes == [left, right]:
            most = 1 << 63  # two numbers: of 64 bits, like a time in nanoseconds
        are_whole = all(isinstance(size, int) for size in sizes)
        if are_whole and RESULTS[operator](*map(float, sizes)) > most:
            fail(f"{operator} makes more than {most:,}")
        return self.binop_table[operator](left, right)

    def concat(self, parts: Iterable[str]) -> str:
        text = "".join(parts)
        if len(text) <= LARGEST:
            return text
        return fail(f"its text is longer than {LARGEST:,} characters")


def write_json(value: Any, **options: Any) -> str:
    options.setdefault("ensure_ascii", False)
    return json.dumps(value, **options)


def strftime_now(text: str) -> str:
    return datetime.now().strftime(text)


def size_or_value(x: Any) -> Any:
    """The length of a text or a list; a number itself."""
    if hasattr(x, "__len__"):
        return len(x)
    return x


def fail(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


class Endless(BaseException):  # jinja2 swallows any Exception where it looks up a key
    def __str__(self):
        return f"it takes longer than {LONGEST_S} s, or the process has grown by {MOST_GIB} GiB meanwhile"


# {thread: [when its template began, peak memory of the process soon after]}
running = {}
lock = threading.Lock()


@contextmanager
def limits() -> Iterator[None]:
    """Raises Endless inside of the context if it takes too long, or too much memory."""
    # the first time, and after a fork
    if all(thread.name != "watch" for thread in threading.enumerate()):
        threading.Thread(target=watch, name="watch", daemon=True).start()
    running[threading.get_ident()] = [time.monotonic(), None]
    try:
        yield
    finally:
        # watch() holds the lock while ending a template, so the error comes inside of this context or
        # never
        with lock:
            running.pop(threading.get_ident(), None)


def watch() -> None:
    while True:
        time.sleep(0.05)
        if not running:  # a process forked while the lock is held would wait for ever
            continue
        with lock:
            for thread, entry in [*running.items()]:
                memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / PER_GIB
                entry[1] = entry[1] or memory
                if time.monotonic() - entry[0] > LONGEST_S or memory - entry[1] > MOST_GIB:
                    del running[thread]
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread), ctypes.py_object(Endless)
                    )
