"""What ended a run, in one line: tools/run.py asks when main has raised an error."""

import contextlib
import datetime
import os
import sys
import time
import traceback

import torch.distributed as dist
from torch import nn

from distributed.agree import brief
from distributed.launch import host_of, name_rank
from distributed.layout import pattern_of
from distributed.tp_check import STYLES
from flags.config import usage_error
from flags.files import printable

# rooms whose SystemExit is meant: --help, wrong usage, a recipe that ends itself, a lost replica
MAY_EXIT = {"flags", "argparse", "__main__", "forks"}


def report_error(error: BaseException) -> int:
    """Print the error that ended main, and return the exit status.

    A ValueError before the processes are connected is a user's mistake, shown in one line by rank
    0; later a failure.
    """
    message = printable(" ".join(str(error).split()))
    is_known = isinstance(error, ValueError)
    if isinstance(error, SystemExit):
        return report_exit(error)
    if isinstance(error, KeyboardInterrupt):  # before the loop: no step to finish
        return 130
    if is_known and not dist.is_initialized():
        usage_error(message)
    # torchrun then shows the first failure, not just its status
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    if not is_known:
        traceback.print_exception(error)
    if not (is_known and is_told(message)):
        more = failed_module(error) + silent_ranks(message)
        print(f"error on {name_rank()}: {type(error).__name__}: {message}{more}", file=sys.stderr)
    return 1


def report_exit(error: SystemExit) -> int:
    """The status of a SystemExit of the house's or of the recipe. One from another file, such as
    --env, would end the run with status 0 and nothing trained: it is an error."""
    frames = []
    for frame, line in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") != "_sitebuiltins":  # of exit() and quit()
            frames.append((frame, line))
    frame, line = frames[-1]
    if frame.f_globals.get("__name__", "").split(".")[0] in MAY_EXIT:
        if error.code is None:
            return 0
        return error.code if isinstance(error.code, int) else 1
    print(
        f"error on {name_rank()}: {frame.f_code.co_filename}, line {line} ended the program with "
        f"sys.exit({error.code!r}), before the work was done: return, or raise an error",
        file=sys.stderr,
    )
    return 1


def failed_module(error: BaseException) -> str:
    """ " (in blocks.0.attn.wq, a Linear)": the innermost module of the model that raised the error,
    or ""."""
    modules = [
        owner
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if isinstance(owner := frame.f_locals.get("self"), nn.Module)
    ]
    names = {module: fqn for fqn, module in modules[0].named_modules()} if modules else {}
    inside = [module for module in modules if names.get(module)]
    is_mixed = "Tensor and DTensor" in str(error)
    if not inside or names[inside[-1]] == "head":  # the loss multiplies with the rows of a head
        return (
            '; under tp a "head" is given to self.token_loss(..., kernel=YOURS), not called: '
            "docs/fork_me.md" * is_mixed
        )
    fqn = names[inside[-1]]
    hint = f'; under tp "{pattern_of(fqn)}" needs a style in tp_plan: {STYLES}' * is_mixed
    return f" (in {fqn}, a {type(inside[-1]).__name__.removeprefix('FSDP')}){hint}"


def silent_ranks(message: str) -> str:
    """After a collective that timed out: "; no word from rank 3 (host)", the ranks that hang, said
    by the first rank that failed; else ""."""
    # rank 0 kept the store, and has ended; or there is no store yet
    with contextlib.suppress(RuntimeError, ValueError):
        store = dist.distributed_c10d._get_default_store()
        store.set(f"failed {dist.get_rank()}", "")
        if "timed out" in message.lower() and store.add("timed out", 1) == 1:
            time.sleep(2)  # the others fail in the same moment
            silent = [
                rank for rank in range(dist.get_world_size()) if not store.check([f"failed {rank}"])
            ]
            return (
                f"; no word from {brief([f'rank {rank} ({host_of(rank)})' for rank in silent])}"
                if silent
                else ""
            )
    return ""


def is_told(message: str) -> bool:
    """Whether rank 0 reports the same error within two seconds. Most checks fail on every rank, and
    one line is enough; a failure of one rank alone must not be silent."""
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 0:
        store.set("error", message)
        return False
    try:
        store.wait(["error"], datetime.timedelta(seconds=2))
        return store.get("error").decode() == message
    except dist.DistStoreError:  # a timeout: rank 0 goes on
        return False
    except RuntimeError:  # rank 0 kept the store, and has ended with an error of its own
        return True
