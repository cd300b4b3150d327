"""Ctrl-C ends a program in one line, not in a traceback. A program imports this file first, because the
import of torch takes seconds, in which Ctrl-C may come."""

import os
import signal
import sys
import threading
import time
from types import FrameType, TracebackType

# when Ctrl-C has come: an interrupted import may end in an ImportError, a moment later
pressed: list[float] = []


def handle(number: int, frame: FrameType | None) -> None:
    pressed.append(time.monotonic())
    raise KeyboardInterrupt


def show_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """In place of sys.excepthook, which Python calls with an exception that nobody has caught."""
    is_interrupt = issubclass(kind, KeyboardInterrupt)
    is_fresh = bool(pressed) and time.monotonic() - pressed[-1] < 5
    if hasattr(sys, "ps1") or not (is_interrupt or is_fresh):  # ps1: a person types Python
        sys.__excepthook__(kind, error, trace)
        return
    # srun alone gives a process its number as SLURM_PROCID
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    if rank == "0":
        print("\nCtrl-C: ended before the work was done", file=sys.stderr)
    if not is_interrupt:  # Python itself ends an interrupt with its status
        sys.stdout.flush()
        os._exit(130)


is_main = threading.current_thread() is threading.main_thread()  # others may not set handlers
# a program that is started to ignore Ctrl-C goes on ignoring it
if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, handle)
    sys.excepthook = show_error
