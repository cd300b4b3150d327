"""Shared by the checks: run a student's functions on several processes, and say what is wrong.

check() of ex04.py raises Wrong with a text for the student, or returns. In the process that runs
check() `import parallel` finds the project's own file; in the processes of on_ranks() the
student's.
"""

import faulthandler
import functools
import importlib
import inspect
import signal
import textwrap
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from unittest import mock

import layouts
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from pool import pool
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

stuck_s = 60.0  # must be less than the limit of a check
# {file: {function: source}}: tests/exercises/test_exercises.py puts answers here; workers run
# these, not the files' code
planted = {}
ONE_GROUP = [[0, 1]]
TWO_GROUPS = [[0, 2], [1, 3]]
FOUR = [[0, 1, 2, 3]]


class Wrong(Exception):
    """Says the mistake in an answer, and the place to look at."""


@contextmanager
def replaced(answers: dict[str, dict[str, str]]):
    """Give functions the code of `answers` ({file: {function: source}}) for a while. Only the
    function's code object is replaced, so every module that has imported the function runs the new
    code."""
    before = []
    try:
        for file, sources in answers.items():
            module = importlib.import_module(file.removesuffix(".py").replace("/", "."))
            for name, source in sources.items():
                *path, last = name.split(".")
                holder = vars(getattr(module, path[0]) if path else module)
                function = inspect.unwrap(getattr(holder[last], "__func__", holder[last]))
                made = {}
                exec(
                    compile(textwrap.dedent(source), f"answer in {file}", "exec"),
                    vars(module),
                    made,
                )
                new = inspect.unwrap(getattr(made[last], "__func__", made[last]))
                before.append(
                    (function, function.__code__, function.__defaults__, function.__kwdefaults__)
                )
                function.__code__ = new.__code__
                function.__defaults__ = new.__defaults__
                function.__kwdefaults__ = new.__kwdefaults__
        yield
    finally:
        for function, *was in before:
            function.__code__, function.__defaults__, function.__kwdefaults__ = was


@contextmanager
def watched(answers: dict, seconds: float):
    """On a rank: put the answers in place. After `seconds` write the stack to stderr; grading.py
    reads there which rank waits."""
    faulthandler.dump_traceback_later(seconds)
    try:
        with replaced(answers):
            yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def call(watch, function, args):
    with watch():
        return function(*args)


def on_ranks(n: int, function, *args) -> list:
    """[function(*args) on rank 0, on rank 1, ...] for n processes connected by gloo. The function must be importable. A
    student's function is called in such processes only: what computes the right answer and compares
    runs no code of a student's."""
    return pool(n).run(call, partial(watched, planted, stuck_s), function, args, tries=1)


def alone(function, *args):
    """function(*args) in another process."""
    return on_ranks(1, function, *args)[0]


class Late(BaseException):
    """Raised in a function that computes for too long; an answer's `except Exception` lets it pass."""


def until(seconds: float, function, args) -> list:
    """On a rank: [function(*args)], or [] if there is no value after so many seconds."""

    def late(*_):
        raise Late

    signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return [function(*args)]
    except Late:
        return []
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def alone_until(seconds: float, name: str, said: str, function, *args):
    """function(*args) in another process, for arithmetic that takes milliseconds. Wrong if it takes
    longer than this, with the name of the student's function and the case in words."""
    values = alone(until, seconds, function, args)
    if not values:
        raise Wrong(
            f"{name}: {said}: no answer after {seconds:g} s, where a loop over the layers or "
            "micro-batches takes milliseconds. It may well be right, and it is too slow: does it "
            "try all possibilities, or does a loop of it never end?"
        )
    return values[0]


def elsewhere(function, *args):
    """function(*args) in an interpreter started anew. The other processes are copies of one, down
    to the seed of hash()."""
    with ProcessPoolExecutor(1, mp.get_context("spawn")) as executor:
        return executor.submit(call, partial(watched, planted, stuck_s), function, args).result()


@functools.cache
def process_group(ranks: tuple):
    return dist.new_group(list(ranks))


def own_group(groups: list[list[int]]):
    """On a rank: (the group of this rank, the group's number). Every rank makes all groups, as
    torch wants it."""
    made = [process_group(tuple(ranks)) for ranks in groups]
    number = next(i for i, ranks in enumerate(groups) if dist.get_rank() in ranks)
    return made[number], number


def in_groups(groups: list[list[int]], function, *args) -> list[list]:
    """[[function(groups, *args) on each rank of a group] for each group]. function calls own_group(groups)."""
    try:
        results = on_ranks(sum(map(len, groups)), function, groups, *args)
    except RuntimeError as e:
        if len(groups) == 1 or "NotImplementedError" in str(e):
            raise
        raise Wrong(
            f"right with one group of ranks, and on 4 processes in the groups {groups} it ends "
            "with "
            f"{str(e).strip().splitlines()[-1]}. {ABOUT_GROUPS}"
        ) from None
    return [[results[rank] for rank in ranks] for ranks in groups]


ABOUT_GROUPS = (
    "Does every collective get its group, and are rank and number of ranks those in the group?"
)


class Traffic(TorchDispatchMode):
    """moved: numbers in the tensors of all collectives called inside the block, sent and received;
    calls: their names; largest:
    numbers in the largest tensor that was made."""

    def __init__(self):
        super().__init__()
        self.moved = 0
        self.calls = []
        self.largest = 0
        self.storages = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        out = func(*args, **(kwargs or {}))
        made = [t for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        if func.namespace in ("c10d", "_c10d_functional"):
            if "wait" not in str(func):
                self.calls.append(str(func).split(".")[1].strip("_"))
                self.moved += sum({t.data_ptr(): t.numel() for t in tensors if t.numel()}.values())
        else:
            self.largest = max([self.largest, *(t.numel() for t in made)])
        self.storages += [StorageWeakRef(t.untyped_storage()) for t in made]
        return out

    def alive(self, at_most: int) -> int:
        """Bytes of all tensors made inside the block that are still alive. Waits up to a second for
        no more than at_most, because gloo's thread may free tensors late."""
        for _ in range(20):
            storages = {
                ref.cdata: torch.UntypedStorage._new_with_weak_ptr(ref.cdata)
                for ref in self.storages
            }
            n_bytes = sum(storage.nbytes() for storage in storages.values() if storage is not None)
            del storages
            if n_bytes <= at_most:
                break
            time.sleep(0.05)
        return n_bytes


@contextmanager
def without(module, name: str, reason: str):
    """Let a function of the project raise: an exercise is not solved by a call of its sister."""

    def refused(*args, **kwargs):
        raise RuntimeError(f"{name} was called: {reason}")

    with mock.patch.object(module, name, refused):
        yield


def compare(processes: int, flags: dict, problem: dict) -> str:
    """'' if the layout trains like a single process, else the first difference (see
    tests/layouts.py)."""
    return layouts.compare(processes, flags, problem, partial(watched, planted, stuck_s))


def check_groups(flags: dict, problem: dict):
    """Compare an axis of 2 on 4 processes. On 2 processes a collective without its group reaches
    the same ranks, so the mistake stays hidden."""
    try:
        difference = compare(4, flags, problem)
    except RuntimeError as e:
        difference = str(e).strip().splitlines()[-1]
    if difference:
        raise Wrong(
            f"right on 2 processes, and not on 4, where {flags} makes two groups of two ranks: "
            f"{difference}. "
            f"{ABOUT_GROUPS}"
        )
