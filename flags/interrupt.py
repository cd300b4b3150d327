"""Ctrl-C ends a program in one line, not in a traceback. A program imports this file first, because the
import of torch takes seconds, in which Ctrl-C may come."""

import os
import signal
import sys
import threading

pressed = []  # Ctrl-C, if it has come: an interrupted import may end in an ImportError


def handle(number, frame) -> None:
    pressed.append(number)
    raise KeyboardInterrupt


def show_error(kind, error, trace) -> None:
    """In place of sys.excepthook, which Python calls with an exception that nobody has caught."""
    if not pressed:
        sys.__excepthook__(kind, error, trace)
        return
    if os.environ.get("RANK", "0") == "0":
        print("\nCtrl-C: ended before the work was done", file=sys.stderr)
    if not issubclass(kind, KeyboardInterrupt):  # Python itself ends an interrupt with its status
        sys.stdout.flush()
        os._exit(130)


is_main = threading.current_thread() is threading.main_thread()  # others may not set handlers
# a program that is started to ignore Ctrl-C goes on ignoring it
if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, handle)
    sys.excepthook = show_error
