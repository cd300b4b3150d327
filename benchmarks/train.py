"""Training on one GPU: speed, MFU and peak memory of our Llama, transformers' and torchtitan's, in the same run.

    python benchmarks/train.py                                  # 16 layers of the 1B model, seq_len 8192, all compiled
    python benchmarks/train.py --ac op                          # with torchtitan's and our list of operators to keep
    python benchmarks/train.py --eager                          # the eager ones as well
    python benchmarks/train.py --float8 rowwise --model_args "dim=4096,n_layers=4,n_heads=32,n_kv_heads=8,head_dim=128,\
ffn_dim=14336,vocab_size=32768"                                 # layers of the 8B model; ours and torchtitan's, beside bf16

transformers and torchtitan (0.2.2) take part where they are installed, as their users run them: see loops.py. Processes take
turns on the GPU, whose order changes from round to round. A turn is one step that is not timed, because the memory was given
back after the turn before, and then --steps_per_round that are. Weights and optimizer states of all of them have to fit at
once; --systems takes fewer. MFU counts PaLM's FLOPs against the data sheet and against the rate that a large matmul reaches.
"""

import os
import re
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

# in benchmarks/ are files of the same names as the modules imported here
sys.path[0] = str(Path(__file__).parent.parent)
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch

from benchmarks.loops import StepConfig, llama_config, measure, ratio_of, variants
from flags.config import parse_config
from training.peak_flops import peak_flops

LLAMA_1B = "dim=2048,n_layers=16,n_heads=32,n_kv_heads=8,head_dim=64,ffn_dim=8192,vocab_size=128256"


@dataclass(kw_only=True)
class Config(StepConfig):
    model_args: str = LLAMA_1B  # fields of Llama3Config
    seq_len: int = 8192  # tokens per sequence
    local_batch_size: int = 2  # sequences per step
    # of matmuls and activations; weights and optimizer stay float32
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    eager: bool = False  # the eager ones as well
    systems: str = ""  # only these of ours, transformers, torchtitan: "ours,torchtitan"
    steps_per_round: int = 5  # timed steps per turn of a variant


def matmul_rate() -> float:
    """FLOP/s of a square bf16 matmul of 8192, median of 20."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(25):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        a @ b
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1000)
    return 2 * 8192**3 / statistics.median(times[5:])


def main(cfg: Config):
    if not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks/train.py needs a GPU, and torch finds none here; use "
            "benchmarks/train_cpu.py"
        )
    wanted = cfg.systems.split(",") if cfg.systems else []
    names = [
        n
        for n in variants(compiled=True, eager=cfg.eager, fsdp=True)
        if not wanted or re.split("[ ,]", n)[0] in wanted
    ]
    configs = {name: replace(cfg, float8="off") for name in names}
    if cfg.float8 != "off":
        have_it = ("ours", "torchtitan") if "wise" in cfg.float8 else ("ours",)
        configs |= {
            f"{n}: {cfg.float8}": cfg
            for n in names
            if n.endswith("compiled") and n.startswith(have_it)
        }
    names = list(configs)
    if not names:
        raise SystemExit(
            f"--systems {cfg.systems}: none of them is installed; use some of "
            "ours,transformers,torchtitan"
        )
    rate = matmul_rate()
    peak = peak_flops(torch.cuda.get_device_name())
    torch.cuda.empty_cache()
    reports = measure(names, configs.get, cfg.rounds, "cuda")
    c = llama_config(cfg)
    tokens = cfg.seq_len * cfg.local_batch_size
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {cfg.model_args}; {tokens:,} "
        "tokens per step, "
        f"{cfg.dtype}, --ac {cfg.ac}, matmul of 8192 at {rate / 1e12:,.0f} TFLOP/s, "
        f"{cfg.rounds} rounds of {cfg.steps_per_round} steps"
    )
    print(
        "| | x ours | tokens/s | MFU | of the matmul's rate | peak GiB | seconds to the second "
        "step |\n|" + " --- |" * 7
    )
    for name in names:
        r = reports[name]
        per_second = tokens / statistics.median(r["times"])
        n = r["parameters"] - c.vocab_size * c.dim
        flops = per_second * (6 * n + 12 * c.n_layers * c.n_heads * c.head_dim * cfg.seq_len)
        mfu = f"{flops / peak:.1%}" if peak else "unknown"
        print(
            f"| {name} | {ratio_of(reports, name, names[0]):.3f} | {per_second:,.0f} | {mfu} | "
            f"{flops / rate:.1%} | "
            f"{r['peak'] / 2**30:.1f} | {r['first']:.0f} |"
        )


if __name__ == "__main__":
    main(parse_config(Config))
