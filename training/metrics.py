"""Reports of a run: metrics.jsonl, a line per logged step, a loss curve. And garbage collection."""

import errno
import gc
import importlib.util
import json
import math
import os
import re
import resource
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from distributed.checks import reduce_hash
from distributed.launch import host_of
from distributed.layout import Layout
from flags.config import GPU, flag
from flags.files import write_file
from models.attention import kernels_of


@dataclass(kw_only=True)
class MetricsConfig:
    log_every: int = 10  # steps between log lines
    tensorboard: bool = False  # write the numbers of metrics.jsonl to <out>/tb as well
    wandb: str = ""  # send the numbers to this project of Weights & Biases as well
    # steps to trace, like 10-12: every rank writes a file for ui.perfetto.dev to <out>/trace
    profile: str = ""
    # CUDA allocations for pytorch.org/memory_viz, in <out>/trace
    memory_snapshot: bool = flag(False, GPU)
    # collect garbage every N steps, on all ranks in the same step; 0: whenever Python likes
    gc_every: int = 50

    def __post_init__(self):
        for package in ("tensorboard", "wandb"):
            if getattr(self, package) and importlib.util.find_spec(package) is None:
                raise ValueError(
                    f"--{package} needs a package that is not installed: pip install {package}"
                )
        if self.profile and profiled_steps(self.profile) is None:
            raise ValueError(
                f"--profile {self.profile!r} must be one step or the first and last of some, like "
                "10-12"
            )


def profiled_steps(text: str) -> range | None:
    """'10-12' -> range(10, 13); None for a text without a range of steps."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    steps = match and range(int(match[1]), int(match[2] or match[1]) + 1)
    return steps if steps and steps.start > 0 else None


def peak_memory_gib(device: torch.device) -> float:
    """Peak since the start of this process, in GiB: allocated tensors on a GPU, resident memory on
    a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak / 2**30  # bytes on macOS, KiB on Linux
    # ru_maxrss begins at the parent's peak
    found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())
    return int(found[1] if found else peak) / 2**20


def to_json(value: Any) -> Any:
    """A JSON value: tensors become numbers or lists (this waits for the device), a NaN or infinity
    becomes null."""
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_lines(path: str) -> Iterator[dict]:
    """Yields the lines of a metrics.jsonl. What cannot be read is named and left out: half a line,
    left by a killed process."""
    if os.path.exists(path):
        with open(path, errors="replace") as file:
            for text in file:
                try:
                    line = json.loads(text)
                except (ValueError, RecursionError):  # cut, or thousands of brackets
                    print(
                        f"{path}: left out {text[:40].rstrip()!r}, a line that was cut", flush=True
                    )
                    continue
                if isinstance(line, dict) and isinstance(line.get("step"), int):
                    yield line


def drop_lines_from(path: str, first_step: int) -> None:
    """Remove the lines of steps >= first_step from a metrics.jsonl: the run repeats these steps. A
    kill here loses nothing."""
    write_file(
        Path(path),
        (
            json.dumps(line).encode() + b"\n"
            for line in read_lines(path)
            if line["step"] < first_step
        ),
    )


def set_lines_aside(path: str) -> None:
    """Rename the metrics.jsonl of a run that begins again at step 0, because its checkpoints are gone
    or there were none: its lines may be all that is left of it."""
    last = max((line["step"] for line in read_lines(path)), default=None)
    if last is None:
        return
    n = 1
    while os.path.exists(f"{path.removesuffix('.jsonl')}.old-{n}.jsonl"):
        n += 1
    aside = f"{path.removesuffix('.jsonl')}.old-{n}.jsonl"
    os.rename(path, aside)
    print(
        f"{path} has lines up to step {last}, and there is no checkpoint to continue: this run begins "
        f"at step 0, and the old lines are in {aside}",
        flush=True,
    )


def is_number(value: Any) -> bool:
    """Whether a value of metrics.jsonl can be drawn: anyone may have edited the file."""
    return type(value) in (int, float) and abs(value) < 1e300  # False for a NaN, too


def points_of(lines: Iterable[dict], *names: str) -> dict[str, list[tuple]]:
    """{name: (step, number) of each line with a number of this name}, in one pass over the lines."""
    points = {name: [] for name in names}
    for line in lines:
        for name in names:
            if is_number(line.get(name)):
                points[name].append((line["step"], line[name]))
    return points


class Metrics:
    """Time the steps on every rank; write and print on rank 0 alone.

        batch = metrics.start_step(batches)          # batches: any iterator; the time for a batch is data_time_s
        ...                                          # forward, backward, optimizer
        metrics.end_step(tokens)                     # tokens of the global batch, counted on the host
        if metrics.due(step):                        # the same answer on every rank
            metrics.log(step, loss=..., ...)         # reads 0-d tensors; nothing else does

    Between logged steps nothing waits for the device. Time outside start_step .. end_step
    (validation, checkpoints) does not count as training time. tokens: the run's tokens since step
    0, so a continued run starts with the checkpoint's.
    """

    def __init__(
        self,
        out,
        cfg: MetricsConfig,
        layout: Layout,
        flops_per_token: int,
        *,
        first_step: int,
        steps: int,
        tokens=0,
    ):
        self.cfg = cfg
        self.rank0 = layout.rank == 0
        self.steps = steps
        self.tokens = tokens
        self.layout = layout
        self.device = layout.device
        self.flops_per_token = flops_per_token
        self.step = first_step - 1  # the last finished step
        self.job_flops = None
        if self.device.type == "cuda":
            from training.peak_flops import peak_flops

            peak = peak_flops(torch.cuda.get_device_name(self.device))
            self.job_flops = peak and peak * layout.world_size
        if self.rank0:
            print(self.describe_device(), flush=True)
            recipe: Any = cfg  # with the flags of all groups
            if hasattr(recipe, "compile") and recipe.compile:
                print("compiling: the first step takes longer, up to minutes", flush=True)
        self.reset_interval()
        self.out = out
        self.rank = layout.rank
        self.profiler = None
        self.profiled = profiled_steps(cfg.profile) or range(0)
        if cfg.memory_snapshot:
            torch.cuda.memory._record_memory_history()
            torch._C._cuda_attach_out_of_memory_observer(
                lambda *_: self.dump_memory("out-of-memory")
            )
        self.boards = []
        if self.rank0:
            os.makedirs(out, exist_ok=True)
            self.path = os.path.join(out, "metrics.jsonl")
            if first_step > 1:
                drop_lines_from(self.path, first_step)
            else:
                set_lines_aside(self.path)
            self.file = open(self.path, "ab", buffering=0)
            self.unwritten = b""
            self.is_full = False
            if self.profiled and (self.profiled[-1] < first_step or self.profiled[0] > steps):
                print(
                    f"--profile: step {self.profiled[0]} is none of this run's, {first_step} to "
                    f"{steps}",
                    flush=True,
                )
            if cfg.tensorboard or cfg.wandb:
                from training.boards import open_boards

                self.boards = open_boards(out, cfg, first_step)
        self.live = None  # a line that moves on a terminal, where log lines are far apart
        if self.rank0 and sys.stderr is not None and sys.stderr.isatty():  # None: closed
            from flags.progress import Progress

            self.live = Progress(f"step {first_step}/{steps}").start()
        # Python starts a collection whenever a rank happens to have made enough objects. Ranks
        # pause at different moments, and all ranks wait for each pause; so pause together, and
        # rarely.
        if cfg.gc_every > 0:
            gc.collect()
            gc.disable()

    def describe_device(self) -> str:
        """For the start: what the numbers of the run are measured against."""
        when = f"before step {self.step + 1}"
        if self.device.type == "cpu":
            return f"process: {peak_memory_gib(self.device):.2f} GiB {when}; no MFU on a CPU"
        # AdamW's moments come in the first step, unless a checkpoint brought them
        held = torch.cuda.memory_allocated(self.device) / 2**30
        name = torch.cuda.get_device_name(self.device)
        mfu = f"no MFU: the peak of {name} is not known"
        if self.job_flops:
            peak = self.job_flops / self.layout.world_size
            mfu = f"MFU against {peak / 1e12:,.0f} TFLOP/s, dense bf16, of {name}"
        names = []
        for kernel in kernels_of(self.device)[:2]:
            names.append(kernel.name.removesuffix("_ATTENTION").lower())
        kernels = f"attention by {names[0]} where it takes the shapes, else {names[1]}"
        masked = "by FlexAttention under document masks and windows"
        return f"rank 0 holds {held:.2f} GiB {when}; {mfu}\n{kernels}; {masked}"

    def reset_interval(self):
        """Restart the means of step time, data time and tokens per second."""
        self.n_steps = self.n_tokens = 0
        self.step_time = self.data_time = self.cpu_time = 0.0
        self.of_ranks = [0.0]  # seconds of each rank's own, see reduce_hash
        self.step_ended = time.perf_counter()

    def start_step(self, batches):
        """Begin a step: return the next batch, and measure the wait for the batch."""
        if self.step + 1 in self.profiled and self.profiler is None:
            self.profiler = torch.profiler.profile()
            self.profiled = range(self.step + 1, self.profiled.stop)
            self.profiler.start()
        self.step_started = time.perf_counter()
        if self.live:
            self.live.text = f"step {self.step + 1}/{self.steps}"
        batch = next(batches)
        self.data_time += time.perf_counter() - self.step_started
        self.cpu_started = time.process_time()
        return batch

    def end_step(self, tokens: int):
        """End a step. tokens: of the whole global batch, all ranks together."""
        self.step += 1
        self.tokens += tokens
        self.n_tokens += tokens
        self.n_steps += 1
        if self.cfg.gc_every > 0 and self.step % self.cfg.gc_every == 0:
            gc.collect(1)  # young objects only: milliseconds
        self.step_ended = time.perf_counter()
        self.step_time += self.step_ended - self.step_started
        if self.device.type == "cpu":
            self.cpu_time += time.process_time() - self.cpu_started
        if self.profiler is not None and (
            self.step == self.profiled[-1] or self.step == self.steps
        ):
            self.write_trace()

    def write_trace(self):
        """Write the trace of the steps since the first of --profile; the file's name has the
        numbers of the steps."""
        steps = "-".join(map(str, dict.fromkeys((self.profiled[0], self.step))))
        profiler = self.profiler
        assert profiler is not None  # write_trace() is called while one runs
        profiler.stop()
        name = f"steps-{steps}-rank-{self.rank}.json.gz"
        self.try_to_write(lambda: profiler.export_chrome_trace(self.trace_file(name)))
        self.profiler = None
        self.profiled = range(0)

    def trace_file(self, name: str) -> str:
        os.makedirs(os.path.join(self.out, "trace"), exist_ok=True)
        return os.path.join(self.out, "trace", name)

    def dump_memory(self, when: str):
        name = f"memory-{when}-rank-{self.rank}.pickle"
        self.try_to_write(lambda: torch.cuda.memory._dump_snapshot(self.trace_file(name)))

    def try_to_write(self, write) -> None:
        """Call write(), which makes a file of trace/. A full disk there ends no run."""
        try:
            write()
        except OSError as error:
            print(
                f"step {self.step}: a file of {self.out}/trace could not be written: "
                f"{error.strerror or error}",
                flush=True,
            )

    def due(self, step: int) -> bool:
        """Whether this step is logged: the first, every log_every-th, the last. Equal on all ranks."""
        return step in (1, self.steps) or (
            self.cfg.log_every > 0 and step % self.cfg.log_every == 0
        )

    def reduce_hash(self, share: str) -> str:
        """On all ranks: the hash of the global batch from the ranks' shares, before log(). The same
        all-reduce tells the ranks each other's own seconds: the wait for data and, on a CPU, the
        processor's time. The time of a step is no rank's own, because the collectives let all ranks
        wait for the slowest."""
        tokens_hash, self.of_ranks = reduce_hash(share, self.layout, self.data_time + self.cpu_time)
        return tokens_hash

    def log(
        self,
        step: int,
        *,
        loss,
        loss_max,
        grad_norm,
        lr: float,
        tokens_hash: str,
        extra: dict | None = None,
        show=True,
    ):
        """Write and print one training line. loss: mean over the valid tokens of the global batch;
        extra: more JSON fields.

        show=False: write but do not print; the recipe prints a line of its own.
        """
        if self.rank0:
            # Reading the loss waits for the device; the wait belongs to the time of the steps.
            loss = float(loss)
            loss_max = float(loss_max)
            grad_norm = float(grad_norm)
            elapsed = self.step_time + time.perf_counter() - self.step_ended
            n_steps = max(self.n_steps, 1)
            speed = self.n_tokens / elapsed
            mfu = self.flops_per_token * speed / self.job_flops if self.job_flops else None
            memory = peak_memory_gib(self.device)
            step_time = elapsed / n_steps
            line = dict(
                step=step,
                loss=loss,
                loss_max=loss_max,
                grad_norm=grad_norm,
                lr=lr,
                tokens=self.tokens,
            )
            line |= dict(tokens_per_second=speed, mfu=mfu, memory_gib=memory, step_time_s=step_time)
            # the rank that the others wait for, if that costs them a fifth of their time or more
            worst = max(self.of_ranks)
            usual = sorted(self.of_ranks)[(len(self.of_ranks) - 1) // 2]
            rank = self.of_ranks.index(worst)
            seconds = (worst - usual) / n_steps
            line |= dict(data_time_s=self.data_time / n_steps, tokens_hash=tokens_hash)
            slow = ""
            if seconds > step_time / 5:
                host = host_of(rank)
                line |= dict(slowest_rank=rank, slowest_host=host, slowest_by_s=seconds)
                slow = f"  rank {rank} ({host}) is {seconds:.2f} s late"
            self.write(line | (extra or {}))
            if self.live:
                self.live.restart(f"after step {step}/{self.steps}")
            if show:
                left = timedelta(seconds=int((self.steps - step) * step_time))
                share = "" if mfu is None else f"MFU {mfu:.1%}  "
                print(
                    f"step {step}/{self.steps}  loss {loss:.4f}  grad_norm {grad_norm:.3f}  "
                    f"lr {lr:.2e}  {speed:,.0f} tok/s  {share}mem {memory:.2f} GiB  "
                    f"data {self.data_time / elapsed:.1%}  ETA {left}{slow}",
                    flush=True,
                )
        self.reset_interval()

    def log_val(
        self, step: int, val_loss, val_bits_per_byte=None, val_loss_by_part: dict | None = None
    ):
        """Write and print one validation line. val_loss in nats per token; bits per byte compares
        across tokenizers;
        val_loss_by_part: of the parts of a mixture."""
        if self.rank0:
            numbers = {"val_loss": val_loss, "val_bits_per_byte": val_bits_per_byte}
            line = {"step": step, **numbers}
            parts = val_loss_by_part or {}
            if parts:
                line["val_loss_by_part"] = {name: to_json(loss) for name, loss in parts.items()}
            self.write(line)
            known = [f" {name} {n:.4f}" for name, n in (numbers | parts).items() if n is not None]
            if self.live:
                self.live.restart(f"after step {step}/{self.steps}")
            print(f"step {step}/{self.steps}", *known, flush=True)

    def write(self, line: dict):
        """Append one line and flush: a reader of the file, or the run that replaces a killed run,
        finds the line whole."""
        line = {key: to_json(value) for key, value in line.items()}
        self.unwritten += json.dumps(line).encode() + b"\n"
        self.write_lines(line["step"])
        numbers = {}
        for key, value in line.items():
            if type(value) in (int, float) and key != "step":
                numbers[key] = value
        if self.boards:
            from training.boards import write_boards

            self.boards = write_boards(self.boards, line["step"], numbers)

    def write_lines(self, step: int):
        """Append the lines that are not in the file yet. A disk that is full, or away for a while,
        ends no run: the lines are kept, and written with a later one."""
        self.check_there()
        size = os.path.getsize(self.path)
        try:
            if self.file.write(self.unwritten) < len(self.unwritten):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.truncate(self.path, size)  # no half line
            if not self.is_full:
                print(
                    f"step {step}: {self.path} cannot be written ({error.strerror}): its lines are "
                    "kept, and written when there is room",
                    flush=True,
                )
            self.is_full = True
            return
        if self.is_full:
            print(f"step {step}: {self.path} is written again, with all lines", flush=True)
        self.is_full = False
        self.unwritten = b""

    def check_there(self):
        """Raises ValueError if the file was removed: the run would go on without a trace of itself."""
        if not os.path.exists(self.path):
            raise ValueError(
                f"{self.path} was removed under the run, perhaps with all of {self.out}: nothing of "
                "this run is kept from here on; start again, with --out NEW"
            )

    def close(self):
        """On all ranks: write a trace in progress (after a signal), print the loss curve of the
        whole run, and turn Python's garbage collector on again."""
        if self.live:
            self.live.stop()
        if self.profiler is not None:
            self.write_trace()
        gc.enable()
        if self.cfg.memory_snapshot:
            self.dump_memory(f"step-{self.step}")
        if self.boards:
            from training.boards import close_boards

            close_boards(self.boards, self.step)
        if self.rank0:
            self.file.close()
            self.check_there()
            if self.unwritten:
                print(f"{self.path} lacks its last lines: {self.unwritten.decode()}", flush=True)
            print(loss_curve(read_lines(self.path)), flush=True)


def loss_curve(lines: Iterable[dict]) -> str:
    """Loss, or the reward of grpo.py, for training (.) and validation (o), as text; steps that
    share a column are averaged."""
    train, val, rewards, val_rewards = points_of(
        lines, "loss", "val_loss", "reward_mean", "eval_reward"
    ).values()
    name = "loss"
    if rewards:
        name = "reward"
        train = rewards
        val = val_rewards
    if len(train) < 2:
        return "no loss curve: fewer than two training steps were logged"
    steps, losses = zip(*train + val)
    first = min(steps)
    last = max(steps)
    low = min(losses)
    high = max(losses)
    grid = [[" "] * 60 for _ in range(12)]
    for points, mark in (train, "."), (val, "o"):
        by_column = {}
        for step, loss in points:
            by_column.setdefault(round(59 * (step - first) / max(last - first, 1)), []).append(loss)
        for column, group in by_column.items():
            height = (sum(group) / len(group) - low) / (high - low or 1)
            grid[round(11 * (1 - height))][column] = mark
    legend = f"{name:>9}  . training, last {train[-1][1]:.3f}"
    if val:
        numbers = [value for _, value in val]
        best = min(numbers)
        if rewards:
            best = max(numbers)
        legend += f"  o validation, last {numbers[-1]:.3f}, best {best:.3f}"
    rows = [legend]
    for i, row in enumerate(grid):
        height = high - (high - low) * i / 11
        rows.append(f"{height:9.3f} |{''.join(row).rstrip()}")
    rows.append(" " * 10 + "+" + "-" * 60)
    rows.append(f"{'step':>9}  {first}{last:>{60 - len(str(first))}}")
    return "\n".join(rows)
