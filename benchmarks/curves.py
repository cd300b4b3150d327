"""Does a cheaper precision train as well? Whole runs of train_llama3.py on the built-in text, in fp32 and in the others.

    python benchmarks/curves.py                                  # 300 steps, three seeds; on a CPU float8 is emulated: an hour
    python benchmarks/curves.py --only mxfp8 --seeds 0           # fp32 and this row

A seed is that of the weights and of the order of the data. The noise is how far fp32 runs of different seeds lie apart. A run
that is in --out already is not run again.
"""
import json
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

REPO = Path(__file__).parent.parent
sys.path[0] = str(REPO)  # in benchmarks/ are files of the same names as the modules imported here

from support.config import parse_config


@dataclass(kw_only=True)
class Config:
    steps: int = 300  # optimizer steps of each run
    seeds: list[str] = field(default_factory=lambda: ["0", "1", "2"])  # of the weights and of the data
    only: list[str] = field(default_factory=list)  # these rows, besides fp32
    flags: str = "--seq_len 128 --local_batch_size 8"  # more flags of train_llama3.py, for all runs
    out: str = "runs/curves"  # folder for the runs


ROWS = {
    "fp32": "--compute_dtype float32",
    "bf16": "--compute_dtype bfloat16",
    "float8 tensorwise": "--compute_dtype bfloat16 --float8 tensorwise",
    "float8 rowwise": "--compute_dtype bfloat16 --float8 rowwise",
    "float8 rowwise_with_gw_hp": "--compute_dtype bfloat16 --float8 rowwise_with_gw_hp",
    "mxfp8": "--compute_dtype bfloat16 --float8 mxfp8",
    "bf16 weights": "--compute_dtype bfloat16 --param_dtype bfloat16",
    "bf16 weights, stochastic_rounding": "--compute_dtype bfloat16 --param_dtype bfloat16 --stochastic_rounding",
    "moments bfloat16": "--compute_dtype bfloat16 --adamw_moments bfloat16",
    "moments 8bit": "--compute_dtype bfloat16 --adamw_moments 8bit",
    "moments 4bit": "--compute_dtype bfloat16 --adamw_moments 4bit",
    "moments fp8": "--compute_dtype bfloat16 --adamw_moments fp8",
}


def final_loss(cfg: Config, name: str, seed: str) -> float:
    """Validation loss after the last step, in nats per token."""
    out = Path(cfg.out, f"{name} {seed}".replace(" ", "-").replace(",", ""))
    log = out / "metrics.jsonl"
    flags = f"--steps {cfg.steps} --val_every {cfg.steps} --checkpoint_every 0 --seed {seed} --data_seed {seed}"
    if not log.exists() or '"val_loss"' not in log.read_text():
        flags = f"{flags} {cfg.flags} {ROWS[name]}".split()
        command = [sys.executable, str(REPO / "train_llama3.py"), *flags, "--out", str(out)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stderr}")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return next(line["val_loss"] for line in reversed(lines) if "val_loss" in line)


def main(cfg: Config):
    rows = [name for name in ROWS if name == "fp32" or not cfg.only or name in cfg.only]
    losses = {}
    for name in rows:
        for seed in cfg.seeds:
            losses[name, seed] = final_loss(cfg, name, seed)
            print(f"{name}, seed {seed}: {losses[name, seed]:.4f}", file=sys.stderr, flush=True)
    noise = statistics.stdev(losses["fp32", seed] for seed in cfg.seeds) if len(cfg.seeds) > 1 else float("nan")
    print(f"{cfg.steps} steps, {cfg.flags}; validation loss. fp32 of different seeds: standard deviation {noise:.4f}")
    print("| | " + " | ".join(f"seed {seed}" for seed in cfg.seeds) + " | mean difference from fp32 | largest |\n|" + " --- |"
          * (len(cfg.seeds) + 3))
    for name in rows:
        away = [losses[name, seed] - losses["fp32", seed] for seed in cfg.seeds]
        print(f"| {name} | " + " | ".join(f"{losses[name, seed]:.4f}" for seed in cfg.seeds)
              + f" | {statistics.mean(away):+.4f} | {max(away, key=abs):+.4f} |")


if __name__ == "__main__":
    main(parse_config(Config))
