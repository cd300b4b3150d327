"""What a run reports: metrics.jsonl, a line per logged step, a progress bar, a loss curve. And when garbage is collected."""
import gc
import json
import math
import os
import re
import resource
import sys
import time
from dataclasses import dataclass

import torch


@dataclass(kw_only=True)
class MetricsConfig:
    gc_every: int = 50  # collect garbage every N steps, on all ranks in the same step; 0: whenever Python likes


# Dense bf16 FLOP/s of one device, without sparsity (the vendors' data sheets). The first match counts; a device that is
# not here has no MFU rather than a wrong one (\b keeps GB200 from passing for a B200, MIG slices are no whole device).
PEAK_FLOPS = [
    (r"\bMIG\b", None),
    (r"\bA100\b", 312e12),
    (r"\bH100\b.*\bPCIe\b", 756e12),
    (r"\bH100\b.*\bNVL\b", 835e12),
    (r"\bH100\b", 989e12),
    (r"\bH200\b.*\bNVL\b", 835e12),
    (r"\bH200\b", 989e12),
    (r"\bB200\b", 2250e12),
    (r"\bMI300X\b", 1307e12),
]


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of one device by the name that its driver reports, or None where it is not known."""
    return next((peak for pattern, peak in PEAK_FLOPS if re.search(pattern, device_name)), None)


def peak_memory_gib(device) -> float:
    """Peak since the start of this process, in GiB: allocated tensors on a GPU, resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # bytes on macOS, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def plain(value):
    """A JSON value: 0-d tensors become numbers (this waits for the device), NaN and infinity become null."""
    if isinstance(value, torch.Tensor):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_lines(path: str) -> list[dict]:
    """The lines of a metrics.jsonl. Half a line, left by a process that was killed, is passed over."""
    lines = []
    if os.path.exists(path):
        with open(path, errors="replace") as file:
            for text in file:
                try:
                    line = json.loads(text)
                except ValueError:
                    continue
                if isinstance(line, dict) and isinstance(line.get("step"), int):
                    lines.append(line)
    return lines


def drop_lines_from(path: str, first_step: int):
    """Take the lines of steps >= first_step out of a metrics.jsonl: the run is about to do them again.

    Written next to the file and renamed, so that a kill here loses no line.
    """
    if not os.path.exists(path):
        return
    kept = [line for line in read_lines(path) if line["step"] < first_step]
    with open(path + ".new", "w") as file:
        file.writelines(json.dumps(line) + "\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)


class Metrics:
    """Times the steps on every rank, writes and prints on rank 0 alone.

        metrics.start_step()
        batch = next(batches)
        metrics.data_done()
        ...                                          # forward, backward, optimizer
        metrics.end_step(tokens)                     # tokens of the global batch, counted on the host
        if metrics.due(step):                        # the same answer on every rank
            metrics.log(step, loss=..., ...)         # 0-d tensors are read here, and only here

    Between logged steps nothing waits for the device. Time outside start_step .. end_step (validation, checkpoints)
    does not count as training time. `tokens` is what the run has seen since its step 0: start it with the checkpoint's.
    """

    def __init__(
        self, out: str, cfg: MetricsConfig, *, rank0: bool, world_size: int, device, flops_per_token: int,
        first_step: int, steps: int, log_every: int, tokens: int = 0,
    ):
        self.cfg, self.rank0, self.steps, self.log_every, self.tokens = cfg, rank0, steps, log_every, tokens
        self.device, self.flops_per_token = torch.device(device), flops_per_token
        self.step = first_step - 1  # the last one that is done
        peak = peak_flops(torch.cuda.get_device_name(self.device)) if self.device.type == "cuda" else None
        self.job_flops = peak and peak * world_size
        self.reset_interval()
        self.file, self.bar = None, False
        if rank0:
            os.makedirs(out, exist_ok=True)
            self.path = os.path.join(out, "metrics.jsonl")
            drop_lines_from(self.path, first_step if first_step > 1 else 0)  # step 0: validation before any training
            self.file = open(self.path, "a")
            self.bar = sys.stdout.isatty()
        # Python starts a collection whenever a rank happens to have made enough objects. Ranks pause at different
        # moments, and each pause is one that all the others wait for; so pause together, and rarely.
        self.gc_was_on = gc.isenabled()
        if cfg.gc_every > 0:
            gc.collect()
            gc.disable()

    def reset_interval(self):
        """Start the means of step time, data time and tokens per second anew."""
        self.n_steps = self.n_tokens = 0
        self.step_time = self.data_time = 0.0
        self.step_ended = time.perf_counter()

    def start_step(self):
        self.step_started = time.perf_counter()
        # Drawn while a step runs and wiped at its end, so whatever is printed between two steps meets an empty line.
        if self.bar and self.steps > 0:
            filled = round(30 * self.step / self.steps)
            pace = f"  {self.step_time / self.n_steps:.2f} s/step" if self.n_steps else ""
            bar = f"{'#' * filled}{'.' * (30 - filled)}"
            print(f"\r\033[Kstep {self.step + 1}/{self.steps} [{bar}]{pace}", end="", flush=True)

    def data_done(self):
        """The batch is here: what passed since start_step was spent waiting for data."""
        self.data_time += time.perf_counter() - self.step_started

    def end_step(self, tokens: int):
        """tokens: of the whole global batch, all ranks together."""
        self.step += 1
        self.tokens += tokens
        self.n_tokens += tokens
        self.n_steps += 1
        if self.cfg.gc_every > 0 and self.step % self.cfg.gc_every == 0:
            gc.collect(1)  # young objects only: milliseconds
        self.step_ended = time.perf_counter()
        self.step_time += self.step_ended - self.step_started
        if self.bar:
            print("\r\033[K", end="", flush=True)

    def due(self, step: int) -> bool:
        """Whether this step is logged: the first, every log_every-th, the last. Only the step decides, not the rank."""
        return step in (1, self.steps) or (self.log_every > 0 and step % self.log_every == 0)

    def log(self, step: int, *, loss, loss_max, grad_norm, lr: float, tokens_hash: str, extra: dict | None = None):
        """Write and print one training line. loss: mean over the valid tokens of the global batch; extra: more JSON fields."""
        if self.rank0:
            # Reading the loss waits for the device, and that wait belongs to the steps that it finishes.
            loss, loss_max, grad_norm = plain(loss), plain(loss_max), plain(grad_norm)
            elapsed = self.step_time + time.perf_counter() - self.step_ended
            n_steps = max(self.n_steps, 1)
            speed = self.n_tokens / elapsed
            line = {
                "step": step,
                "loss": loss,
                "loss_max": loss_max,
                "grad_norm": grad_norm,
                "lr": lr,
                "tokens": self.tokens,
                "tokens_per_second": speed,
                "mfu": self.flops_per_token * speed / self.job_flops if self.job_flops else None,
                "memory_gib": peak_memory_gib(self.device),
                "step_time_s": elapsed / n_steps,
                "data_time_s": self.data_time / n_steps,
                "tokens_hash": tokens_hash,
            } | (extra or {})
            self.write(line)
            print(train_line(line, self.steps), flush=True)
        self.reset_interval()

    def log_val(self, step: int, val_loss, val_bits_per_byte=None):
        """Write and print one validation line. val_loss in nats per token; bits per byte compares across tokenizers."""
        if self.rank0:
            line = {"step": step, "val_loss": plain(val_loss), "val_bits_per_byte": plain(val_bits_per_byte)}
            self.write(line)
            bits = line["val_bits_per_byte"]
            bits = "" if bits is None else f"  val_bits_per_byte {bits:.4f}"
            print(f"step {step}/{self.steps}  val_loss {number(line['val_loss'], '.4f')}{bits}", flush=True)

    def write(self, line: dict):
        """Append one line and flush it: whoever follows the file, or the run that replaces a killed one, finds it whole."""
        self.file.write(json.dumps({key: plain(value) for key, value in line.items()}) + "\n")
        self.file.flush()

    def close(self):
        """Print the loss curve of the whole run and give Python its garbage collector back."""
        if self.gc_was_on:
            gc.enable()
        if self.file is not None:
            self.file.close()
            self.file = None
            print(loss_curve(read_lines(self.path)), flush=True)


def number(value: float | None, spec: str) -> str:
    return "nan" if value is None else format(value, spec)


def train_line(line: dict, steps: int) -> str:
    """The line that a logged step prints."""
    left = int((steps - line["step"]) * line["step_time_s"])
    parts = [
        f"step {line['step']}/{steps}",
        f"loss {number(line['loss'], '.4f')}",
        f"grad_norm {number(line['grad_norm'], '.3f')}",
        f"lr {line['lr']:.2e}",
        f"{line['tokens_per_second']:,.0f} tok/s",
        f"MFU {line['mfu']:.1%}" if line["mfu"] is not None else "",
        f"mem {line['memory_gib']:.2f} GiB",
        f"data {line['data_time_s'] / line['step_time_s']:.1%}",
        f"ETA {left // 3600}:{left // 60 % 60:02}:{left % 60:02}",
    ]
    return "  ".join(part for part in parts if part)


def loss_curve(lines: list[dict], rows=12, columns=60) -> str:
    """Training (.) and validation (o) loss over the steps as text; steps that share a column are averaged."""
    train = [(line["step"], line["loss"]) for line in lines if line.get("loss") is not None]
    val = [(line["step"], line["val_loss"]) for line in lines if line.get("val_loss") is not None]
    if len(train) < 2:
        return "no loss curve: fewer than two training steps were logged"
    steps, losses = zip(*train + val)
    first, last, low, high = min(steps), max(steps), min(losses), max(losses)
    grid = [[" "] * columns for _ in range(rows)]
    for points, mark in (train, "."), (val, "o"):
        by_column = {}
        for step, loss in points:
            by_column.setdefault(round((columns - 1) * (step - first) / max(last - first, 1)), []).append(loss)
        for column, group in by_column.items():
            height = (sum(group) / len(group) - low) / (high - low or 1)
            grid[round((rows - 1) * (1 - height))][column] = mark
    labels = [f"{high - (high - low) * i / (rows - 1):9.3f}" if i % 3 == 0 or i == rows - 1 else " " * 9 for i in range(rows)]
    return "\n".join(
        ["     loss   . training   o validation" if val else "     loss   . training"]
        + [f"{label} |{''.join(row).rstrip()}" for label, row in zip(labels, grid)]
        + [" " * 10 + "+" + "-" * columns, f"{'step':>9}  {first}{last:>{columns - len(str(first))}}"]
    )
