"""Start of the process to the end of the first step: `python train_llama3.py --steps 1` against
transformers in a plain loop.

    python benchmarks/startup.py
    python benchmarks/startup.py --imports          # and what the time of our imports goes to

Both train one step of 2,048 tokens on the debug flavor's shape; ours reads text besides (tokenized
before the first round) and checks and logs what every run does. They take turns. CPU seconds of the
whole process, so what else the machine does hardly shows, and seconds on the clock, which on a busy
machine mean nothing.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parent.parent
sys.path[0] = str(REPO)  # in benchmarks/ are files of the same names as the modules imported here

from flags.config import parse_config

# Packages that take long to import and that one step without their flags does not need
HEAVY = (
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "torch.utils.tensorboard",
    "torchao",
    "transformers",
    "tokenizers",
    "wandb",
    "matplotlib",
)
THEIRS = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM
model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, hidden_size=192, num_hidden_layers=6, num_attention_heads=8,
                                     num_key_value_heads=4, head_dim=32, intermediate_size=512, use_cache=False))
optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
tokens = torch.randint(4096, (8, 256))
with torch.autocast("cpu", torch.bfloat16, enabled=torch.cpu._is_avx512_bf16_supported()):
    loss = model(tokens, labels=tokens).loss
loss.backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
optimizer.step()
print(f"step 1  loss {loss.item():.4f}")
"""


@dataclass(kw_only=True)
class Config:
    rounds: int = 7  # runs of each that count, after one that does not
    imports: bool = False  # list what is imported until the first step is done, by package


def ours(out: str) -> list[str]:
    flags = {"steps": 1, "val_every": 0, "checkpoint_every": 0, "device": "cpu", "out": out}
    return [
        sys.executable,
        f"{REPO}/train_llama3.py",
        *(f"--{name}={value}" for name, value in flags.items()),
    ]


def run(command: list[str]) -> tuple[float, float, str]:
    """(CPU seconds, seconds on the clock, stderr) of a process that must succeed and report its
    step."""
    before = os.times()
    begin = time.perf_counter()
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=REPO
    )
    clock = time.perf_counter() - begin
    after = os.times()
    if done.returncode or "loss" not in done.stdout:
        raise SystemExit(f"{' '.join(command)[:200]}\n{done.stdout}{done.stderr}")
    cpu = (
        after.children_user + after.children_system - before.children_user - before.children_system
    )
    return cpu, clock, done.stderr


def print_imports(stderr: str) -> None:
    """What `python -X importtime` wrote: seconds that the modules took themselves, by package."""
    seconds = Counter()
    lines = re.findall(r"^import time: +(\d+) \| +\d+ \| +(\S+)$", stderr, re.M)
    for own, name in lines:
        depth = 3 if name.startswith("torch.distributed") else 2 if name.startswith("torch.") else 1
        seconds[".".join(name.split(".")[:depth])] += int(own) / 1e6
    print(f"{len(lines)} modules, {sum(seconds.values()):.2f} seconds on the clock:")
    print(", ".join(f"{name} {s:.2f}" for name, s in seconds.most_common(20)))
    print("heavy ones among them:", ", ".join({name for _, name in lines} & set(HEAVY)) or "none")


def main(cfg: Config):
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            "ours": lambda i: ours(f"{folder}/{i}"),
            "transformers": lambda i: [sys.executable, "-c", THEIRS],
        }
        times = {name: [] for name in commands}
        for i in range(cfg.rounds + 1):
            for name in sorted(commands, reverse=i % 2 == 1):
                times[name] += [run(commands[name](i))[:2]] * (i > 0)
        print(
            f"{cfg.rounds} rounds; medians\n| | CPU seconds | x ours | seconds on the clock | "
            "shortest |\n|" + " --- |" * 5
        )
        for name, seconds in times.items():
            cpu, clock = zip(*seconds)
            low = min(clock)
            ratio = statistics.median(a / b[0] for a, b in zip(cpu, times["ours"]))
            print(
                f"| {name} | {statistics.median(cpu):.2f} | {ratio:.2f} | "
                f"{statistics.median(clock):.2f} | {low:.2f} |"
            )
        if cfg.imports:
            command = ours(f"{folder}/imports")
            print_imports(run([command[0], "-X", "importtime", *command[1:]])[2])


if __name__ == "__main__":
    main(parse_config(Config))
