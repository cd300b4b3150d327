"""For the tests on the null device: each is marked `nullcuda`, and skipped where this python's
torch is not the CUDA build.

A test gets `device`, which runs recipes in processes of their own: torch is imported once per
session, and each run is a fork.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from build import environment, has_cuda_build
from programs import Server, ask

HERE = Path(__file__).parent
if not has_cuda_build():
    MISSING = "needs the CUDA build of torch: make test-cuda"
elif not (shutil.which("g++") and shutil.which("nm")):
    MISSING = "needs g++ and nm, to build the null device"
else:
    MISSING = ""


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.nullcuda)
            if MISSING:
                item.add_marker(pytest.mark.skip(reason=MISSING))


@dataclass
class Done:
    """A run that has ended: per rank its status, what it printed, and what it did on the device, a
    line each."""

    statuses: list[int]
    texts: list[str]
    seconds: float
    logs: list[list[str]]

    def step(self, number: int, rank: int = 0) -> list[str]:
        """What a rank did on the device in a step, from its batch to its optimizer."""
        log = self.logs[rank]
        return log[log.index(f"mark step {number}") : log.index(f"mark end {number}")]


class Device:
    """run() sends a case to a process that has imported torch (run.py --serve), which forks one
    process per rank."""

    # a run of two steps that logs the first and the last, and writes no checkpoint unless it is
    # told to
    BRIEF = [
        "--steps",
        "2",
        "--log_every",
        "0",
        "--val_every",
        "0",
        "--checkpoint_every",
        "0",
        "--device",
        "cuda",
    ]

    def __init__(self):
        self.server = None

    def run(
        self,
        out,
        recipe: str,
        *flags,
        status: int | None = 0,
        log: bool = True,
        brief=BRIEF,
        **options,
    ) -> Done:
        """A recipe with `flags` after those of BRIEF, in the folder `out`. status: what every rank
        must end with, None for any.
        options: those of run.py, such as nproc=2, major=10, no_waiting=True, env={...}."""
        self.server = self.server or Server(HERE / "run.py", "--serve")
        argv = [str(HERE.parent.parent / recipe), *map(str, [*brief, *flags])]
        argv += ["--out", f"{out}/run"] * (recipe != "generate.py")
        if log:
            logs = f"{out}/log"
        else:
            logs = ""
        done = Done(**ask(self.server.path, argv=argv, log=logs, **options), logs=[])
        if status is not None:
            failed = [rank for rank, s in enumerate(done.statuses) if s != status]
            assert not failed, (
                f"{recipe} {' '.join(map(str, flags))}: "
                f"{done.statuses}\n{done.texts[failed[0]][-4000:]}"
            )
        if log:
            files = [Path(f"{logs}.{rank}") for rank in range(len(done.statuses))]
            done.logs = [file.read_text().splitlines() if file.exists() else [] for file in files]
        return done


@pytest.fixture(scope="session")
def device():
    environment()  # builds it, where it is missing
    return Device()
