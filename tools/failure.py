"""The last words of a run: an error of main, told in one line. tools/run.py calls report_error()."""

import datetime
import errno
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from distributed.agree import brief
from distributed.launch import host_of, is_gone, name_rank
from distributed.layout import pattern_of
from distributed.tp_check import STYLES
from flags.config import own_rank, usage_error
from flags.files import printable
from flags.progress import stop_all

# A SystemExit from these rooms is meant: --help, wrong usage, a recipe that ends itself, a lost
# replica.
MAY_EXIT = {"flags", "argparse", "__main__", "forks"}

# Errors of a disk or a folder, where path and reason say more than a traceback
OF_FILES = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EIO,
    errno.ESTALE,
    errno.EACCES,
    errno.EPERM,
    errno.EISDIR,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
}

# what torch says where two shapes do not fit
UNFIT = re.compile(
    "must match the size|reduction dim|normalized_shape|cannot be multiplied|is invalid for input"
)

# what gloo and NCCL say when another process is gone
LOST = re.compile(r"closed by peer|reset by peer|broken pipe|remote process exited", re.I)


def report_error(error: BaseException) -> int:
    """Print the error that ended main, and return the exit status.

    Before the processes are connected, a ValueError is a user's mistake: rank 0 shows one line, and
    the status is 2. Later a ValueError is a failure like any other error.
    """
    stop_all()
    if isinstance(error, SystemExit):
        return report_exit(error)
    if isinstance(error, KeyboardInterrupt):  # before the loop: no step to finish
        if own_rank() == 0:
            print("\nCtrl-C: ended before the work was done", file=sys.stderr)
        return 130
    message = printable(" ".join(str(error).split()))
    # we raise ValueErrors with a message for the user; other errors need their traceback
    has_message = isinstance(error, ValueError)
    if isinstance(error, OSError) and error.filename and error.errno in OF_FILES:
        message = printable(f"{error.filename}: {error.strerror}")
        has_message = True
    if has_message and not dist.is_initialized():
        if isinstance(error, ValueError):
            usage_error(message)
        print(f"error on {name_rank()}: {message}", file=sys.stderr)
        return 1
    if LOST.search(message):
        dead = ask_briefly(dead_ranks)
        if dead:
            return report_death(dead)
    ask_briefly(tell_failure)
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        # torchrun then shows this error, and not only the exit status
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    if not has_message:
        traceback.print_exception(error)
    elif ask_briefly(lambda: rank_0_tells(message)):
        return 1
    silent = ask_briefly(lambda: silent_ranks(message)) or ""
    more = failed_module(error) + silent
    print(f"error on {name_rank()}: {type(error).__name__}: {message}{more}", file=sys.stderr)
    return 1


def ask_briefly(ask: Callable) -> Any:
    """What ask() returns; None after five seconds: torchrun may keep the store, and hang itself, and
    a wait for the store has no limit of its own."""
    answers = []
    thread = threading.Thread(target=lambda: answers.append(ask()), daemon=True)
    thread.start()
    thread.join(5)
    if answers:
        return answers[0]
    return None


def tell_failure() -> None:
    """Let the other ranks know that this one ends with an error of its own, and has not died."""
    if dist.is_initialized():
        with suppress(RuntimeError, ValueError):  # rank 0 kept the store and has ended
            dist.distributed_c10d._get_default_store().set(f"failed {dist.get_rank()}", "")


def dead_ranks() -> list[int]:
    """Ranks of this machine whose process has ended without an error of its own."""
    if not dist.is_initialized():
        return []
    try:
        store = dist.distributed_c10d._get_default_store()
        for _ in range(20):  # a process first loses its connections, and has ended a moment later
            dead = []
            for rank in range(dist.get_world_size()):
                is_known = store.check([f"process {rank}"])  # else it would be waited for
                if is_known and is_gone(rank) and not store.check([f"failed {rank}"]):
                    dead.append(rank)
            if dead:
                return dead
            time.sleep(0.1)
    except (RuntimeError, ValueError):  # rank 0 kept the store and has ended
        pass
    return []


def report_death(dead: list[int]) -> int:
    """One line about ranks that have died, in place of this rank's traceback, which would blame the
    wrong code. The first rank that notices prints the line."""
    names = [f"rank {rank} ({host_of(rank)})" for rank in dead]
    line = (
        f"error: {brief(names)} has died without a word: ended by kill -9, by the system for want "
        "of memory, by a crash, or by os._exit in a file of yours"
    )
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(RuntimeError(line))
    store = dist.distributed_c10d._get_default_store()
    if store.add(f"death of {dead[0]}", 1) == 1:
        print(line, file=sys.stderr, flush=True)
        restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")
        if os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == restarts:  # torchrun ends, too
            from distributed.launcher import repeat_after_torchrun

            repeat_after_torchrun(line)
    return 1


def report_exit(error: SystemExit) -> int:
    """The exit status of a SystemExit. A file of the user's, such as --env, must not end the run:
    sys.exit() there would look like success with nothing trained, so it is printed as an error."""
    ask_briefly(tell_failure)
    frames = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") != "_sitebuiltins":  # the inside of exit() and quit()
            frames.append((frame, line))
    frame, line = frames[-1]
    room = frame.f_globals.get("__name__", "").split(".")[0]
    if room in MAY_EXIT:
        if error.code is None:
            return 0
        if isinstance(error.code, int):
            return error.code
        return 1  # sys.exit("a text")
    print(
        f"error on {name_rank()}: {frame.f_code.co_filename}, line {line} ended the program with "
        f"sys.exit({error.code!r}), before the work was done: return, or raise an error",
        file=sys.stderr,
    )
    return 1


def failed_module(error: BaseException) -> str:
    """ " (in blocks.0.attn.wq, a Linear)": the innermost module of the model that raised the error,
    or ""."""
    modules = []  # outermost first
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            modules.append(owner)
    fqn = ""
    if modules:
        names = {module: name for name, module in modules[0].named_modules()}
        for module in modules:
            if names.get(module):
                fqn = names[module]
                kind = type(module).__name__.removeprefix("FSDP")
    is_mixed = "Tensor and DTensor" in str(error)  # under tp
    if fqn in ("", "head"):  # the loss multiplies with the rows of a head
        if is_mixed:
            return (
                '; under tp a "head" is given to self.token_loss(..., kernel=YOURS), not called: '
                "docs/fork_me.md"
            )
        return ""
    place = f" (in {fqn}, a {kind})"
    if is_mixed:
        place += f'; under tp "{pattern_of(fqn)}" needs a style in tp_plan: {STYLES}'
    if "only accepts torch.Tensor but got" in str(error):  # a style that wraps its input once more
        place += (
            f'; under tp the input of "{pattern_of(fqn)}" is whole already, gathered by the module '
            'around it: its style in tp_plan must be "colwise", which splits the output'
        )
    if UNFIT.search(str(error)):
        place += styles_of(modules[0], fqn)
    return place


def styles_of(model: Any, fqn: str) -> str:
    """Under tp: the styles of a module and of those inside of it, one of which may be wrong; else ""."""
    meshes = [p.device_mesh for p in model.parameters() if isinstance(p, DTensor)]
    if not any("tp" in (mesh.mesh_dim_names or ()) for mesh in meshes):
        return ""
    styles = []
    for pattern, style in model.tp_plan().items():
        if f"{pattern}.".startswith(f"{pattern_of(fqn)}."):
            styles.append(f'"{pattern}": "{style}"')
    if not styles:
        return ""
    return (
        "; under tp the styles in tp_plan decide the shapes there, and one may be wrong: "
        f"{', '.join(styles)}"
    )


def silent_ranks(message: str) -> str:
    """After a collective that timed out: "; no word from rank 3 (host)", the ranks that hang. Only
    the first rank that failed returns this text, all others ""."""
    has_timed_out = "timed out" in message.lower()
    try:
        store = dist.distributed_c10d._get_default_store()
        if not has_timed_out or store.add("timed out", 1) > 1:
            return ""
        time.sleep(2)  # the other ranks of the collective fail in the same moment
        silent = []
        for rank in range(dist.get_world_size()):
            if not store.check([f"failed {rank}"]):
                silent.append(f"rank {rank} ({host_of(rank)})")
    except (RuntimeError, ValueError):  # rank 0 kept the store and has ended; or no store yet
        return ""
    if silent:
        return f"; no word from {brief(silent)}"
    return ""


def rank_0_tells(message: str) -> bool:
    """Whether rank 0 reports the same error within two seconds: most checks fail on every rank, and
    one line is enough. An error of this rank alone must be printed here. False on rank 0."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("error", message)
        return False
    try:
        store.wait(["error"], datetime.timedelta(seconds=2))
        return store.get("error").decode() == message
    except dist.DistStoreError:  # a timeout: rank 0 has no error
        return False
    except RuntimeError:  # the store is gone: rank 0 kept the store, and an error has ended rank 0
        return True
