"""The last line of every recipe: parse the command line, then train, or report in place of training,
or say in one line what is wrong."""

import os
import signal
import sys
from dataclasses import fields
from types import FunctionType

import torch.distributed as dist

from distributed.launch import allow_many_ranks, disconnect
from flags.config import parse_config, say_flags

# a launcher sets one of these variables
STARTED = {"RANK", "WORLD_SIZE", "SLURM_PROCID"}


def run(main: FunctionType, Config: type) -> None:
    """Parse the command line, run main(cfg), and end the process with a status: 0 done, 75 stopped
    by a signal before the last step, 2 wrong usage, 1 failure. A command line with flags unknown to
    Config goes to tools/reports/options.py: --help, a report in place of training, or a mistake."""
    status = 0
    known = {f"--{no}{field.name}" for field in fields(Config) for no in ("", "no-")} | {"--config"}
    asked = {word.split("=")[0] for word in sys.argv[1:] if word.startswith("--") or word == "-h"}
    try:
        if STARTED & os.environ.keys():
            from distributed.launcher import check_launcher  # a plain `python` does not need it

            check_launcher()
        allow_many_ranks()
        if "RANK" in os.environ:
            from distributed.launcher import watch_launcher

            # waits for other ranks, inside of C++, do not hear Python's handler
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            watch_launcher()
        if asked - known:
            from tools.reports.options import run_report

            status = run_report(main, Config)
        else:
            cfg = parse_config(Config)
            say_flags(cfg)
            status = main(cfg) or 0
    except BaseException as error:  # CheckpointException and KeyboardInterrupt are no Exceptions
        from tools.failure import report_error

        status = report_error(error)
    if status == 0 and dist.is_initialized():
        disconnect()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # gloo's threads sometimes abort in a normal exit, a failure to torchrun
