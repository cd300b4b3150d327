"""Training on one GPU: tokens/s, MFU and peak memory of our Llama, transformers' and torchtitan's, in the same run.

    python benchmarks/train.py                                  # 16 layers of the 1B model, seq_len 8192, all compiled
    python benchmarks/train.py --eager                          # the eager ones as well
    python benchmarks/train.py --float8 rowwise --model_args "dim=4096,n_layers=4,n_heads=32,n_kv_heads=8,head_dim=128,\
ffn_dim=14336,vocab_size=32768"                                 # layers of the 8B model; float8 is ours only, beside bf16

torchtitan takes part where `import torchtitan` works. Processes take turns on the GPU and give back what they cached; weights
and optimizer states of all of them have to fit at once. MFU counts PaLM's FLOPs against the data sheet and against the rate
that a large matmul reaches here.
"""
import os
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

sys.path[0] = str(Path(__file__).parent.parent)  # in benchmarks/ are files of the same names as the modules imported here
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

import torch

from benchmarks.loops import StepConfig, llama_config, measure, ratio_of, variants
from support.config import parse_config
from support.metrics import peak_flops

LLAMA_1B = "dim=2048,n_layers=16,n_heads=32,n_kv_heads=8,head_dim=64,ffn_dim=8192,vocab_size=128256"


@dataclass(kw_only=True)
class Config(StepConfig):
    model_args: str = LLAMA_1B  # fields of Llama3Config
    seq_len: int = 8192  # tokens per sequence
    local_batch_size: int = 2  # sequences per step
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # of matmuls and activations; weights and optimizer stay float32
    eager: bool = False  # the eager ones as well
    float8: Literal["off", "tensorwise", "rowwise", "rowwise_with_gw_hp", "mxfp8", "nvfp4"] = "off"  # adds ours with it


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
        raise SystemExit("benchmarks/train.py needs a GPU, and torch finds none here; use benchmarks/train_cpu.py")
    names = variants(compiled=True, eager=cfg.eager)
    configs = dict.fromkeys(names, cfg)
    if cfg.float8 != "off":
        names.append(f"ours, compiled: {cfg.float8}")
        configs[names[-1]] = replace(cfg, flags=f"{cfg.flags} --float8 {cfg.float8}")
    rate, peak = matmul_rate(), peak_flops(torch.cuda.get_device_name())
    torch.cuda.empty_cache()
    reports = measure(names, configs.get, cfg.rounds, "cuda")
    c, tokens = llama_config(cfg), cfg.seq_len * cfg.local_batch_size
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {cfg.model_args}; {tokens:,} tokens per step, "
          f"{cfg.dtype}, matmul of 8192 at {rate / 1e12:,.0f} TFLOP/s, {cfg.rounds} rounds of {cfg.steps_per_round} steps")
    print("| | tokens/s | x ours | MFU | of the matmul's rate | peak GiB | seconds to the second step |\n|" + " --- |" * 7)
    for name in names:
        r = reports[name]
        per_second = tokens / statistics.median(r["times"])
        n = r["parameters"] - c.vocab_size * c.dim
        flops = per_second * (6 * n + 12 * c.n_layers * c.n_heads * c.head_dim * cfg.seq_len)
        mfu = f"{flops / peak:.1%}" if peak else "unknown"
        print(f"| {name} | {per_second:,.0f} | {ratio_of(reports, name, names[0]):.2f} | {mfu} | {flops / rate:.1%} | "
              f"{r['peak'] / 2**30:.1f} | {r['first']:.0f} |")


if __name__ == "__main__":
    main(parse_config(Config))
