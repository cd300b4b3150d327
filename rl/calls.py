"""Calls of the user's Python (rewards, tools, steps of a game) in threads, each with a time limit.

A call that takes longer is given up, and its thread is ended by an exception raised inside of it:
this ends a loop, at the next line of Python. A thread that sleeps or waits hears the exception when
it wakes. Code that never releases the interpreter, such as a regular expression that backtracks
without end, stops the clock as well.
"""

import ctypes
import math
import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

from flags.config import own_rank

TRIES = 10  # exceptions for a late thread, one a second: a bare `except:` may swallow the first


class Late(BaseException):
    """A BaseException, because an `except Exception` in a reward must not catch it."""


def end_thread(thread: threading.Thread) -> None:
    """Raise Late in a thread."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread.ident or 0), ctypes.py_object(Late)
    )


class Call:
    """A call, the thread that runs it, and its last moment (time.monotonic)."""

    def __init__(self, function: Callable, args: tuple):
        self.function = function
        self.args = args
        self.future = Future()
        self.thread = None
        self.end = math.inf


class Calls:
    """n calls at once, each for at most so many seconds (0: no limit). Threads are daemons, because
    the process must not wait for a late call at its exit."""

    def __init__(self, n: int, seconds: float):
        self.n = n
        self.seconds = seconds or math.inf
        self.news = queue.SimpleQueue()
        self.clock = None  # the thread of run(), from the first call on

    def submit(self, function: Callable, *args) -> Future:
        """Call function(*args). The Future has TimeoutError for a late call."""
        call = Call(function, args)
        self.news.put(("asked", call, None))
        if self.clock is None:
            self.clock = threading.Thread(target=self.run, daemon=True)
            self.clock.start()
        return call.future

    def close(self) -> None:
        """Begin no further call, and end the late ones."""
        self.news.put(("closed", None, None))

    def work(self, call: Call) -> None:
        try:
            self.news.put(("done", call, call.function(*call.args)))
        except BaseException as error:
            self.news.put(("failed", call, error))

    def run(self) -> None:
        waiting: deque[Call] = deque()
        running: list[Call] = []
        late: dict[Call, int] = {}  # and how often it was told
        is_open = True
        while is_open or running or late:
            while waiting and len(running) < self.n:
                call = waiting.popleft()
                call.thread = threading.Thread(target=self.work, args=(call,), daemon=True)
                call.end = time.monotonic() + self.seconds
                running.append(call)
                call.thread.start()
            what, call, result = self.next_news(running, bool(late))
            if what == "asked":
                waiting.append(call)
            elif what == "closed":
                is_open = False
                waiting.clear()
            elif call in running:  # else given up before
                running.remove(call)
                if what == "done":
                    call.future.set_result(result)
                else:
                    call.future.set_exception(result)
            for call in [call for call in running if call.end <= time.monotonic()]:
                running.remove(call)
                late[call] = 0
                call.future.set_exception(TimeoutError())
            late = {call: n for call, n in late.items() if call.thread.is_alive() and n < TRIES}
            for call in late:
                end_thread(call.thread)
                late[call] += 1

    def next_news(self, running: list[Call], some_are_late: bool) -> tuple:
        """The next entry of the queue; ("", None, None) when a call is late, or after a second if
        some are."""
        first = min((call.end for call in running), default=math.inf) - time.monotonic()
        seconds = first
        if some_are_late:
            seconds = min(first, 1.0)
        try:
            return self.news.get(timeout=max(min(seconds, 1e6), 0))
        except queue.Empty:
            return "", None, None


class Watch:
    """Ends the program, with one line, when the making of a task takes longer than the limit.

    Such a call stays in the thread that needs its result, and nothing can go on without the
    result; so a late call is not ended alone, as one of Calls is.
    """

    def __init__(self):
        self.seconds = 0.0  # the limit, 0: none
        self.running: dict[int, tuple[float, str]] = {}  # of each thread: its last moment, the call
        self.clock = None

    def call(self, what: str, function: Callable, *args):
        """function(*args), within the limit."""
        if not self.seconds:
            return function(*args)
        if self.clock is None:
            self.clock = threading.Thread(target=self.run, daemon=True)
            self.clock.start()
        thread = threading.get_ident()
        outer = self.running.get(thread)  # a file of the user's may open another one
        self.running[thread] = (time.monotonic() + self.seconds, what)
        try:
            return function(*args)
        finally:
            if outer is None:
                del self.running[thread]
            else:
                self.running[thread] = outer

    def run(self) -> None:
        while True:
            time.sleep(0.5)
            for end, what in [*self.running.values()]:
                if time.monotonic() > end:
                    print(
                        f"error on rank {own_rank()}: --env: {what} takes longer than "
                        f"--reward_timeout_s {self.seconds:g}",
                        file=sys.stderr,
                        flush=True,
                    )
                    os._exit(1)


WATCH = Watch()  # of make() and reset(), and of the import of a file of the user's
