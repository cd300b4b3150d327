"""How long is each command silent? Starts each on a terminal of its own, and measures the longest time
without a word.

    python benchmarks/silence.py                  # all commands: a quarter of an hour on two cores
    python benchmarks/silence.py parity grpo      # those with such a word in their line

The time that Python needs for `import torch` is taken off the first silence, because nothing can be
said before; for torchrun twice that time, because its workers import torch after it. A line of
progress that is rewritten counts as a word. A busy machine has longer gaps.
"""

import os
import pty
import select
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
LIMIT = 300  # seconds for a command
MODEL = "--model_args n_layers=2,dim=64 --seq_len 64 --local_batch_size 2"
SMALL = f"{MODEL} --val_every 0"
TRAIN = "python train_llama3.py"
COMMANDS = [  # in this order: later commands read what earlier ones wrote
    f"{TRAIN} {SMALL} --steps 30 --out OUT/run --export_hf OUT/hf",
    f"{TRAIN} {SMALL} --steps 3 --out OUT/compiled --compile",
    f"torchrun --nproc_per_node 2 train_llama3.py {SMALL} --steps 5 --out OUT/two",
    f"{TRAIN} {SMALL} --check_parity --tp 2",
    f"{TRAIN} {SMALL} --check_parity --where --tp 2",
    f"{TRAIN} {SMALL} --check_parity --where --against OUT/hf",
    f"{TRAIN} {SMALL} --out OUT/run --replay 20",
    f"{TRAIN} --flavor 8B --dp_shard 8 --seq_len 8192 --local_batch_size 1 --dry_run",
    f"{TRAIN} --flavor 8B --seq_len 4096 --local_batch_size 1 --dry_run --best 8",
    f"{TRAIN} --flavor 8B --dp_shard 2 --tp 2 --explain --html OUT/layout.html",
    f"{TRAIN} --pp 4 --dp_shard 8 --tp 4 --plot --out OUT/mesh --local_batch_size 4",
    "python data.py tokenizer --input docs --vocab_size 2000 --out OUT/tokenizer.json",
    "python data.py prepare --input docs --tokenizer OUT/tokenizer.json --out OUT/tokens",
    "python checkpoint.py verify OUT/run",
    "python checkpoint.py to_hf OUT/run OUT/hf2",
    "python generate.py --checkpoint OUT/run --prompt def --max_new_tokens 100",
    "python evaluate.py --checkpoint OUT/run --task docs/grpo.md",
    "python finetune.py --init_from OUT/hf --data docs/grpo.md --seq_len 64 --steps 3 --out OUT/sft",
    "python grpo.py --steps 3 --eval_n 64 --out OUT/grpo",
    "python grpo.py --check_parity",
    f"python ablate.py train_llama3.py --vary lr=1e-3,3e-3 --seeds 2 --out OUT/study {MODEL} --steps 10",
    "python exercises/run.py list",
]


def longest_gap(command: list[str], seconds_of_torch: float) -> tuple[float, str, float, int]:
    """(longest time without output, the last line before it, seconds in all, exit status)."""
    reader, writer = pty.openpty()
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=writer, stderr=writer, stdin=writer, cwd=HERE)
    os.close(writer)
    last = began + seconds_of_torch
    said = "(the start)"
    longest = 0.0
    before = said
    while time.monotonic() - began < LIMIT:
        ready, _, _ = select.select([reader], [], [], 0.2)
        if not ready:
            if process.poll() is not None:
                break
            continue
        try:
            text = os.read(reader, 1 << 16)
        except OSError:  # the other end is closed
            break
        now = time.monotonic()
        if now - last > longest:
            longest = now - last
            before = said
        last = max(last, now)
        lines = text.decode(errors="replace").replace("\r", "\n").strip().split("\n")
        if lines[-1].strip():
            said = lines[-1].strip()
    if process.poll() is None and time.monotonic() - began >= LIMIT:
        process.terminate()
    status = process.wait()
    os.close(reader)
    end = time.monotonic()
    if end - last > longest:  # after the last word
        longest = end - last
        before = said
    return longest, before, end - began, status


def main() -> None:
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    seconds_of_torch = time.monotonic() - began
    print(f"import torch: {seconds_of_torch:.1f} s; load {os.getloadavg()[0]:.1f}", flush=True)
    print("| command | longest silence | before it | seconds in all |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as out:
        for line in COMMANDS:
            if sys.argv[1:] and not any(word in line for word in sys.argv[1:]):
                continue
            command = shlex.split(line.replace("OUT", out))
            imports = seconds_of_torch
            if command[0] == "python":
                command[0] = sys.executable
            else:
                command[:1] = [sys.executable, "-m", "torch.distributed.run"]
                imports = 2 * seconds_of_torch
            gap, before, total, status = longest_gap(command, imports)
            if status:
                before += f" (status {status})"
            shown = before.replace(out, "OUT").replace("|", "/")[:60]
            print(f"| `{line}` | {gap:.1f} s | {shown} | {total:.0f} |", flush=True)


if __name__ == "__main__":
    main()
