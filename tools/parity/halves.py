"""The halves of --check_parity: the user's own command, started again with other flags appended, on
one process and on the layout."""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import FunctionType
from typing import Any

import torch

from distributed.layout import AXES
from distributed.refusals import check_layout, collect_facts, runs_on_cuda
from flags.config import FROM_FILE, no_effect, spell, unmet_needs
from flags.progress import Progress
from tools.parity.compare import RECORD
from tools.reports.stop_main import stop_main

HALF = os.path.join(os.path.dirname(os.path.abspath(__file__)), "half.py")
# one process, without the features that may change the numbers
ONE = dict.fromkeys(AXES, 1) | dict(ep=1, etp=1, ac="none", compile=False, cpu_offload=False)


def without_refused(cfg: Any, flags: dict, model_config: Any) -> dict:
    """`flags` of a half, and the defaults of flags that have no effect beside them: with tp 1
    --async_tp would be refused, so the half gets --no-async_tp."""
    flags = {name: value for name, value in flags.items() if hasattr(cfg, name)}
    defaults = type(cfg)()
    while True:  # a default may make another flag ineffective
        half = replace(cfg, **flags)
        degrees = {axis: getattr(half, axis) for axis in AXES}
        facts = collect_facts(half, model_config, degrees, runs_on_cuda(half.device))
        unmet = unmet_needs(half, facts)
        if not unmet:
            return flags
        flags |= {name: getattr(defaults, name) for name in unmet}


def degrees_of(cfg: Any) -> dict[str, int]:
    """The degree of each axis. --dp_shard -1 becomes 1, or --ep: the experts share its ranks."""
    degrees = {axis: getattr(cfg, axis) for axis in AXES}
    if degrees["dp_shard"] == -1:
        degrees["dp_shard"] = 1
        if hasattr(cfg, "ep"):
            degrees["dp_shard"] = cfg.ep
    return degrees


def device_for(degrees: dict[str, int]) -> str:
    if torch.cuda.device_count() >= math.prod(degrees.values()):
        return "cuda"
    return "cpu"


class Halves:
    """The flags of both halves. Raises ValueError for flags without effect, before any half starts."""

    def __init__(self, main, cfg, *, steps: int, checkpoint_every=0, val_every=0):
        self.cfg = cfg
        self.degrees = degrees_of(cfg)
        # a copy: main writes the batch size into cfg
        (_, self.model_config), sizes = stop_main(main, replace(cfg), "check_layout")
        facts = collect_facts(cfg, self.model_config, self.degrees, runs_on_cuda(cfg.device))
        unused = no_effect(cfg, facts)
        if unused:
            raise ValueError("; ".join(unused))
        self.degrees = {axis: max(n, 1) for axis, n in self.degrees.items()}
        self.both = dict(
            steps=steps,
            compute_dtype="float32",
            checkpoint_every=checkpoint_every,
            keep_latest_k=0,
            checkpoint_first_step=False,
            last_save_model_only=False,
            after_save="",
            export_hf="",
            val_every=val_every,
            val_batches=1,
            log_every=1,
            device=device_for(self.degrees),
        )
        # with a size in --config both halves read the file, and find a fitting local batch
        if "global_batch_size" not in FROM_FILE:
            self.both["global_batch_size"] = cfg.global_batch_size
            if cfg.global_batch_size == -1:
                ranks = self.degrees["dp_replicate"] * self.degrees["dp_shard"]
                self.both["global_batch_size"] = cfg.local_batch_size * ranks
        self.batch = self.both.get("global_batch_size", cfg.global_batch_size)
        if "global_batch_size" not in FROM_FILE:
            # now, and not when the half on one process has trained, which may take minutes
            layout = replace(cfg, **self.layout(cfg.out))
            n = math.prod(self.degrees[axis] for axis in AXES)
            # main's own number is for one process
            sizes |= {"global_batch_size": self.batch, "device": layout.device}
            check_layout(layout, self.model_config, world_size=n, **sizes)

    def layout(self, out: str) -> dict:
        """Flags of the half with the layout of the command line."""
        return without_refused(self.cfg, self.both | self.degrees | {"out": out}, self.model_config)

    def one_process(self, out: str) -> dict:
        """Flags of the half on one process, with another cut of the batch than the layout's."""
        flags = without_refused(self.cfg, self.both | ONE | {"out": out}, self.model_config)
        ranks = self.degrees["dp_replicate"] * self.degrees["dp_shard"]
        flags["local_batch_size"] = choose_another_cut(self.cfg, self.batch, ranks)
        return flags

    def another_layout(self, out: str, axes: dict[str, int]) -> dict:
        """Flags of a half on other axes than the command line's."""
        degrees = {axis: axes.get(axis, 1) for axis in AXES}
        flags = self.both | ONE | axes | {"out": out, "device": device_for(degrees)}
        flags = without_refused(self.cfg, flags, self.model_config)
        of_rank = self.batch // (degrees["dp_replicate"] * degrees["dp_shard"])
        sizes = [n for n in range(1, self.cfg.local_batch_size + 1) if of_rank % n == 0]
        flags["local_batch_size"] = max(sizes)
        return flags


def choose_another_cut(cfg: Any, n: int, data_ranks: int) -> int:
    """Sequences per forward of the one process, for a global batch of n.

    The one process must cut the batch in another way than the layout. Otherwise a wrong loss, such
    as a mean over a micro-batch, would be wrong by the same factor on both sides. The factor could
    also come from the means of all cp and tp ranks, so these numbers are avoided as well. If the
    layout has one forward in a step, the one process has several: a loss could count forwards.
    """
    here = cfg.local_batch_size
    other = cfg.pp_microbatch_size
    if cfg.pp > 1:
        here = cfg.pp_microbatch_size
        other = cfg.local_batch_size
    accumulates = n // (here * data_ranks) > 1
    ranks = {1, cfg.cp, cfg.tp, cfg.cp * cfg.tp}
    for avoided in (
        {n // b * r for b in (here, other) for r in ranks},
        {n // here * r for r in ranks},
        {n // here},
    ):
        sizes = []
        for size in range(1, n + 1):
            forwards = n // size
            if n % size == 0 and forwards not in avoided and (accumulates or forwards > 1):
                sizes.append(size)
        if sizes:
            return max((size for size in sizes if size <= cfg.local_batch_size), default=sizes[0])
    print(
        "check_parity: one sequence cannot be cut in another way, so a loss that depends on the "
        "cut is not noticed; "
        "give --global_batch_size 2 or more",
        flush=True,
    )
    return 1


@dataclass
class Half:
    """A run to start. flags: appended to the user's command. save_at: steps with a checkpoint.
    move: [step folder of another run, its new place in this run], or []."""

    name: str
    flags: dict
    save_at: list[int] = field(default_factory=list)
    move: list[str] = field(default_factory=list)

    @property
    def record(self) -> str:
        return self.flags["out"] + RECORD

    @property
    def processes(self) -> int:
        return math.prod(self.flags[axis] for axis in AXES)

    def as_json(self) -> dict:
        # appended: the last value of a repeated flag counts
        words = ["--no-check_parity", "--no-where", "--advice", "--through="]
        words += [f"--{flag}={spell(value)}" for flag, value in self.flags.items()]
        return dict(record=self.record, flags=words, save_at=self.save_at, move=self.move)

    def announce(self):
        n = self.flags["steps"]
        print(
            f"check_parity: {n} step{'s' * (n > 1)} on {self.name} ({self.processes} "
            f"process{'es' * (self.processes > 1)}) ...",
            flush=True,
        )


def run_half(half: Half, where: bool = False, told: set | None = None) -> int:
    """Run the recipe of this command once more, as a half. Returns the exit status, after printing
    the error line of a failed run.

    where: record all operations of the first step (tools/parity/operations.py), in place of the
    gradients of all steps. told: warnings that are printed already, such as "no checkpoint holds".
    """
    half.announce()
    torchrun = []
    if half.processes > 1:
        move_checkpoint(half)
        torchrun = ["-m", "torch.distributed.run", "--standalone"]
        torchrun += [f"--nproc_per_node={half.processes}"]
    run = half.as_json()
    if where:
        command = ["--where", half.record, *sys.argv, *run["flags"]]
    else:
        command = ["--runs", write_runs(half, [run]), *sys.argv]
    with Progress(f"check_parity: {half.name}"):
        done = subprocess.run(
            [sys.executable, *torchrun, HALF, *command], capture_output=True, text=True
        )
    if half.processes > 1 or where:
        return report_half(half.processes, done.returncode, done.stdout, done.stderr, told)
    return report_run(half, done, told)


def run_on_one_process(halves: list[Half], told: set) -> list[int]:
    """Run halves of one process each, one after the other, until one fails. Returns their exit
    statuses, and prints as run_half does."""
    if halves[0].flags["device"] == "cuda":  # a copy of a process cannot use the GPU of the first
        return [run_half(half, told=told) for half in halves]
    for half in halves:
        half.announce()
    file = write_runs(halves[0], [half.as_json() for half in halves])
    with Progress("check_parity: one process"):
        done = subprocess.run(
            [sys.executable, HALF, "--runs", file, *sys.argv], capture_output=True, text=True
        )
    statuses = []
    for half in halves:
        statuses.append(report_run(half, done, told))
        if statuses[-1]:
            break
    return statuses


def move_checkpoint(half: Half) -> None:
    """Move a checkpoint before the ranks start, so that no rank finds the folder half moved. For a
    run on one process half.py does the same."""
    if half.move and os.path.isdir(half.move[0]):
        os.makedirs(os.path.dirname(half.move[1]))
        os.rename(*half.move)


def write_runs(half: Half, runs: list[dict]) -> str:
    file = f"{half.record}.json"
    os.makedirs(os.path.dirname(file), exist_ok=True)
    with open(file, "w") as out:
        json.dump(runs, out)
    return file


def report_run(half: Half, done: subprocess.CompletedProcess, told: set[str] | None) -> int:
    """The exit status of a run that half.py has made among several; prints as report_half does."""
    if not os.path.exists(f"{half.record}.status"):  # half.py itself has failed
        return report_half(1, done.returncode or 1, done.stdout, done.stderr, told)
    texts = []
    for name in ("status", "out", "err"):
        with open(f"{half.record}.{name}", errors="replace") as file:
            texts.append(file.read())
    return report_half(1, int(texts[0]), texts[1], texts[2], told)


def report_half(
    processes: int, status: int, stdout: str, stderr: str, told: set[str] | None
) -> int:
    """Print the error of a failed run, or what no checkpoint holds; return the exit status."""
    if not status:
        for line in (stdout or "").splitlines():
            if "no checkpoint holds" in line and told is not None and line not in told:
                told.add(line)
                print(line, flush=True)
        return 0
    lines = stderr.splitlines()
    errors = [line for line in lines if line.startswith("error")]
    is_refused = bool(errors) and errors[0].startswith("error: ")
    shown = errors or lines[-20:]
    if is_refused:
        shown = errors[:1]
    print("\n".join(shown), file=sys.stderr)
    if processes == 1:
        return status
    if is_refused:
        return 2
    return 1  # torchrun's own status is always 1


def run_both_halves(
    main: FunctionType, cfg: Any, read: Callable[[str], Any], where: bool = False, **common: Any
) -> tuple[int, list]:
    """Run the recipe on one process and on the layout. Returns (exit status of a failed run or 0,
    [read(out) of each half])."""
    found = []
    halves = Halves(main, cfg, **common)
    with tempfile.TemporaryDirectory() as folder:
        for name, make in {"one process": halves.one_process, "layout": halves.layout}.items():
            half = Half(name, make(os.path.join(folder, name.replace(" ", "_"))))
            status = run_half(half, where)
            if status:
                return status, []
            found.append(read(half.flags["out"]))
        return 0, found
