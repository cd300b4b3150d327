"""For every test file: shared fixtures; what an older torch cannot run is skipped; and no test
remembers the command line or the process group of the one before."""

import gc
import re
import signal
from importlib.util import find_spec

import pytest
import torch
import torch.distributed as dist
from torch.distributed.run import get_args_parser

from data import DataConfig, open_data
from flags.config import FROM_FILE

# A shell starts its background jobs, as .ci/run does, with Ctrl-C ignored, which all processes that
# they start inherit.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# what each file cost; which workers of the pool died; the names of rows
pytest_plugins = ["clock", "crashes", "places"]
OLDER = []  # (what words_of a test contain, why it is skipped)
if torch.__version__ < "2.13":
    schedules = "ZBV|ZeroBubble|Dua|zero_bubble|zero bubble|down and back|schedule_from_csv"
    OLDER.append(
        (schedules, "this --pp_schedule is refused before torch 2.13: distributed/refusals.py")
    )
if find_spec("torchao") is None:
    OLDER.append(("float8|adamw_sr", "needs torchao"))
if "--shutdown-timeout" not in get_args_parser().format_help():
    OLDER.append(
        (
            "a_rank_that_hangs|shutdown_timeout|slurm_script",
            "this torchrun has no --shutdown-timeout",
        )
    )


@pytest.fixture(autouse=True)
def no_command_line_before_this_one():
    """A program reads one command line; a test that read one with --config must not be remembered
    by the next test."""
    yield
    FROM_FILE.clear()


@pytest.fixture(autouse=True, scope="module")
def no_process_group_before_this_file():
    """A test file may make a process group of this process alone; the next file expects none."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def book(tmp_path):
    """flags of a text, and two tokenizers that do not agree"""
    for name in ("book", "first", "second"):
        (tmp_path / f"{name}.txt").write_text(
            "".join(f"{name} line {i} of {i * i}\n" for i in range(300))
        )
    flags = dict(
        cache_dir=str(tmp_path / "cache"),
        out=str(tmp_path / "new"),
        data=str(tmp_path / "book.txt"),
    )
    made = [
        open_data(
            DataConfig(data=str(tmp_path / f"{name}.txt"), cache_dir=flags["cache_dir"]), 16
        ).folder
        for name in ("first", "second")
    ]
    return flags, *map(str, made)


# Files of layouts: one of pytest's workers runs them all, so that each process of its pools warms
# up once.
POOLED = [
    f"test_{name}"
    for name in (
        "parallel mutants pool lora optim optimizers cast communication experts float8 pipeline where packing "
        "evaluate hf architectures"
    ).split()
]


def pytest_collection_finish():
    gc.freeze()  # a run collects garbage at its start: its own, not that of all the test files


def words_of(item) -> str:
    """The name of a test; with the row itself, where a name says only in which line the row is."""
    if re.search(r"\.(txt|py):\d", item.nodeid):
        return f"{item.nodeid} {item.callspec.params}"
    return item.nodeid


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.stem in POOLED:
            item.add_marker(pytest.mark.xdist_group("pool"))
        for names, reason in OLDER:
            if re.search(names, words_of(item)):
                item.add_marker(pytest.mark.skip(reason=reason))
