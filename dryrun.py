"""What a layout does, before it is trusted with a real run: --check_parity compares it with one process."""
import json
import math
import os
import subprocess
import sys
import tempfile

import torch

# fp32, three steps. Every mistake of tests/test_mutants.py is far above these; weights get more room than gradients because
# AdamW divides a gradient by its own size, so that the rounding of a tiny one moves a weight as far as a large one does.
LOSS_TOLERANCE, NORM_TOLERANCE, GRADIENT_TOLERANCE, WEIGHT_TOLERANCE = 1e-5, 2e-5, 1e-4, 5e-4
STEPS = 3


def check_parity(cfg, degrees: dict[str, int]) -> int:
    """Train STEPS steps of the running recipe on one process and on the layout, in fp32; compare; return the exit status.

    Works for any copy of a recipe: it is started twice with flags appended, and parallel.clip_grad_norm, where a step's
    gradients are complete, writes them down (record_step there).
    """
    if "RANK" in os.environ:
        raise ValueError("--check_parity starts its own processes: run it with python, not torchrun")
    world_size = math.prod(max(n, 1) for n in degrees.values())
    data_ranks = max(degrees["dp_replicate"], 1) * max(degrees["dp_shard"], 1)
    batch = cfg.global_batch_size if cfg.global_batch_size != -1 else cfg.local_batch_size * data_ranks
    both = dict(check_parity=False, steps=STEPS, compute_dtype="float32", global_batch_size=batch, checkpoint_every=0,
                val_every=0, log_every=1, device="cuda" if torch.cuda.device_count() >= world_size else "cpu")
    one = dict.fromkeys(degrees, 1) | dict(ac="none", compile=False, cpu_offload=False)
    with tempfile.TemporaryDirectory() as folder:
        runs = {"one process": (1, both | one), "layout": (world_size, both | {a: max(n, 1) for a, n in degrees.items()})}
        for name, (processes, flags) in runs.items():
            out = os.path.join(folder, name.replace(" ", "_"))
            print(f"check_parity: {STEPS} steps on {name} ({processes} process{'es' * (processes > 1)}) ...", flush=True)
            launch = [sys.executable]
            if processes > 1:
                launch += ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
            # a flag given twice has its last value
            extra = [f"--{k}={v}" for k, v in (flags | {"out": out}).items() if hasattr(cfg, k)]
            env = os.environ | {"NANOTITAN_RECORD": out + "_record"}
            done = subprocess.run([*launch, *sys.argv, *extra], env=env, capture_output=True, text=True)
            if done.returncode:
                lines = done.stderr.splitlines()
                reason = [line for line in lines if line.startswith("error")] or lines[-20:]
                print("\n".join(reason[:1] if reason[0].startswith("error: ") else reason), file=sys.stderr)
                return done.returncode if processes == 1 else 2 if reason[0].startswith("error: ") else 1
            runs[name] = read_records(out)
        return print_comparison(*runs.values())


def read_records(out: str) -> list[dict]:
    """Per step: loss, norm, tokens_hash, and gradients and weights by fqn, of all pipeline stages together."""
    with open(os.path.join(out, "metrics.jsonl")) as f:
        lines = [line for line in map(json.loads, f) if "loss" in line]
    steps = []
    for n, line in enumerate(lines):
        step = {"loss": line["loss"], "norm": line["grad_norm"], "hash": line["tokens_hash"], "gradient": {}, "weight": {}}
        for file in sorted(os.listdir(out + "_record")):
            if file.startswith(f"{n}-"):
                part = torch.load(os.path.join(out + "_record", file), weights_only=True, mmap=True)
                step["gradient"] |= part["gradient"]
                step["weight"] |= part["weight"]
        steps.append(step)
    return steps


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a - b).norm() / b.norm().clamp(min=1e-12)).item()


def print_comparison(one: list[dict], layout: list[dict]) -> int:
    """The table; 0 when all is within tolerance, else 1 after a line that names the first difference."""
    first = ""
    head = ["loss, 1 process", "layout", "norm, 1 process", "layout"]
    print("step", *(f"{text:>16}" for text in head), " worst gradient / worst weight")
    for n, (a, b) in enumerate(zip(one, layout, strict=True), 1):
        problems, worst = [], {}
        if a["hash"] != b["hash"]:
            problems.append("the tokens of the global batch")
        for kind, tolerance in (("gradient", GRADIENT_TOLERANCE), ("weight", WEIGHT_TOLERANCE)):
            if missing := sorted(a[kind].keys() ^ b[kind].keys()):
                problems.append(f"the {kind} of {missing[0]}, which only one of the two has")
            errors = {fqn: relative(b[kind][fqn].float(), a[kind][fqn].float()) for fqn in a[kind] if fqn in b[kind]}
            worst[kind] = max(errors.items(), key=lambda item: item[1])
            problems += [f"the {kind} of {fqn} by {e:.1e} (relative)" for fqn, e in errors.items() if not e <= tolerance][:1]
        if not abs(a["loss"] - b["loss"]) <= LOSS_TOLERANCE * max(1.0, abs(a["loss"])):
            problems.append(f"the loss, {b['loss']} instead of {a['loss']}")
        if not abs(a["norm"] - b["norm"]) <= NORM_TOLERANCE * abs(a["norm"]):
            problems.append(f"the gradient norm, {b['norm']} instead of {a['norm']}")
        first = first or (problems and f"step {n} differs first in {problems[0]}") or ""
        notes = " / ".join(f"{e:.1e} {fqn}" for fqn, e in worst.values())
        print(f"{n:>4} {a['loss']:>16.8f} {b['loss']:>16.8f} {a['norm']:>16.8f} {b['norm']:>16.8f}  {notes}")
    print(f"check_parity: NOT EQUAL: {first}" if first else "check_parity: equal")
    return int(bool(first))
