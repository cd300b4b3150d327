"""Training on a CPU: tokens per CPU second and peak memory of our Llama, transformers' and
torchtitan's, in the same run.

    python benchmarks/train_cpu.py                       # 6.5 M parameters, 1,024 tokens per step, fp32, one thread
    python benchmarks/train_cpu.py --dtype bfloat16
    python benchmarks/train_cpu.py --compile             # the compiled ones as well: minutes to start
    python benchmarks/train_cpu.py --against "n_heads=8,head_dim=32;n_heads=2,head_dim=128"    # other shapes of ours instead

torchtitan takes part where `import torchtitan` works (0.2.2; later ones do not train on a CPU).
Times are CPU seconds of the process, so what else the machine does hardly shows; only their ratios
mean something elsewhere. Operators and bytes do not depend on the machine at all. Peak memory is
that of the whole process, and also without what it has before the model exists.
"""

import os
import statistics
import sys
from dataclasses import dataclass, replace
from pathlib import Path

# in benchmarks/ are files of the same names as the modules imported here
sys.path[0] = str(Path(__file__).parent.parent)
os.environ.setdefault("OMP_NUM_THREADS", "1")

from benchmarks.loops import StepConfig, measure, ratio_of, variants
from flags.config import parse_config


@dataclass(kw_only=True)
class Config(StepConfig):
    # fields of Llama3Config
    model_args: str = "dim=256,n_layers=6,n_heads=4,n_kv_heads=2,head_dim=64,ffn_dim=704"
    # other fields to change, several with ';': compares our own shapes instead of the systems
    against: str = ""
    compile: bool = False  # the compiled ones as well


def main(cfg: Config):
    names = variants(cfg.compile)
    configs = {}
    if cfg.against:
        names = ["ours: as it is"] + [f"ours: {change}" for change in cfg.against.split(";")]
        fields = dict(part.split("=") for part in cfg.model_args.split(",") if part)
        for name in names[1:]:
            changed = fields | dict(
                part.split("=") for part in name.removeprefix("ours: ").split(",")
            )
            configs[name] = replace(
                cfg, model_args=",".join(f"{k}={v}" for k, v in changed.items())
            )
    reports = measure(names, lambda name: configs.get(name, cfg), cfg.rounds, "cpu")
    tokens = cfg.seq_len * cfg.local_batch_size
    base = names[0]
    print(
        f"{cfg.model_args}; {tokens} tokens per step, {cfg.dtype}, "
        f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}, "
        f"{cfg.rounds} rounds of {cfg.steps_per_round} steps"
    )
    print(
        "| | parameters | tokens per CPU second | x ours | peak MiB | without imports | operators "
        "per step | MB written |\n|" + " --- |" * 8
    )
    for name in names:
        r = reports[name]
        peak, model = (f"{x / 2**20:,.0f}" for x in (r["peak"], r["peak"] - r["before"]))
        counts = f"{r['ops']:,} | {r['bytes'] / 1e6:,.0f}" if "ops" in r else "| "
        print(
            f"| {name} | {r['parameters']:,} | {tokens / statistics.median(r['times']):,.0f} | "
            f"{ratio_of(reports, name, base):.2f} | {peak} | {model} | {counts} |"
        )


if __name__ == "__main__":
    main(parse_config(Config))
