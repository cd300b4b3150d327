"""What each way to save memory saves and costs: peak memory and tokens per second of our Llama, all in one run.

    python benchmarks/memory.py                              # layers of the 1B model; 4 of its 16, so that a laptop has room
    python benchmarks/memory.py --model_args "dim=2048,n_layers=16,n_heads=32,n_kv_heads=8,head_dim=64,ffn_dim=8192,\
vocab_size=128256,tie_embeddings=true" --seq_len 8192 --local_batch_size 2           # the whole 1B model: for a GPU

One process and one device. On a CPU, time is CPU seconds and memory that of the whole process without its imports.
"""

import os
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

# in benchmarks/ are files of the same names as the modules imported here
sys.path[0] = str(Path(__file__).parent.parent)
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from benchmarks.loops import StepConfig, measure, ratio_of
from flags.config import parse_config


@dataclass(kw_only=True)
class Config(StepConfig):
    model_args: str = (  # fields of Llama3Config
        "dim=2048,n_layers=4,n_heads=32,n_kv_heads=8,head_dim=64,ffn_dim=8192,vocab_size=16384,tie_embeddings=true"
    )
    seq_len: int = 512  # tokens per sequence
    local_batch_size: int = 1  # sequences per step
    # of matmuls and activations; weights and optimizer stay float32
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    counts: bool = False  # torchao's optimizer compiles, which the count would disturb
    rounds: int = 3  # rounds that count; their order changes
    steps_per_round: int = 1  # steps per turn of a variant
    only: str = ""  # rows with this in their name


ROWS = {
    "as it is": "",
    "--ac op": "--ac op",
    "--ac selective": "--ac selective",
    "--ac full": "--ac full",
    "--optimizer adamw_bf16_moments": "--optimizer adamw_bf16_moments",
    "--param_dtype bfloat16": "--param_dtype bfloat16",
    "the same, --optimizer adamw_sr": "--param_dtype bfloat16 --optimizer adamw_sr",
    "--cpu_offload": "--cpu_offload",  # GPU
    "--compile": "--compile",  # GPU
    "--compile --ac budget": "--compile --ac budget",  # GPU
}


def main(cfg: Config):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = {name: flags for name, flags in ROWS.items() if cfg.only in name}
    if device == "cpu":
        rows = {
            name: flags
            for name, flags in rows.items()
            if "compile" not in name and "offload" not in name
        }
    configs = {
        f"ours: {name}": replace(cfg, flags=f"{cfg.flags} {flags}") for name, flags in rows.items()
    }
    reports = {}
    for name in configs:  # one after the other: together they would not fit
        reports |= measure([name], configs.get, cfg.rounds, device)
    tokens = cfg.seq_len * cfg.local_batch_size
    first = next(iter(configs))
    print(
        f"{cfg.model_args}; {tokens:,} tokens per step, {cfg.dtype}, {device}, {cfg.rounds} rounds"
    )
    print("| | peak GiB | of the first | tokens/s | x the first |\n|" + " --- |" * 5)
    gib = lambda r: (r["peak"] - (r["before"] if device == "cpu" else 0)) / 2**30  # noqa: E731
    for name, r in reports.items():
        speed = tokens / statistics.median(r["times"])
        print(
            f"| {name.removeprefix('ours: ')} | {gib(r):.2f} | {gib(r) / gib(reports[first]):.0%} "
            f"| {speed:,.0f} | "
            f"{ratio_of(reports, name, first):.2f} |"
        )


if __name__ == "__main__":
    main(parse_config(Config))
