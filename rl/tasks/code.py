"""A task of grpo.py with code: find an expression of x, a program of one line, that gives two known and two hidden values.

    python grpo.py --env code --sft_steps 150 --sft_lr 2e-3 --reward_threads 2 --max_new_tokens 12 --seq_len 32 \\
        --prompts_per_step 16 --steps 60 --eval_every 60 --eval_n 64 --checkpoint_every 0 --out runs/code

"3:11,5:17 " -> "3*x+2". A model writes its programs in the hope of a reward, so each runs in a process of its own, with limits.
Linux's `unshare` gives a network without devices, a read-only root file system and process numbers of its own, so a program can
signal nobody else; where it is missing or not allowed, one line says so. What the user may read, a program may read.
"""

import contextlib
import functools
import os
import random
import resource
import signal
import string
import subprocess
import sys
import tempfile

ALPHABET = string.digits + "x+-*:, ()"
# of a program: time, and memory
SECONDS = 2
BYTES = 1 << 28
ALONE = [
    "unshare",
    "--user",
    "--map-root-user",
    "--mount",
    "--net",
    "--pid",
    "--fork",
    "--kill-child",
    "sh",
    "-c",
    'mount --make-rprivate / && mount -o remount,bind,ro / && exec "$@"',
    "sh",
]


def make(rng: random.Random) -> tuple[str, str]:
    a = rng.randint(1, 9)
    b = rng.randint(0, 9)
    first, second = rng.sample(range(2, 10), 2)
    return f"{first}:{a * first + b},{second}:{a * second + b} ", f"{a}*x+{b}"


def reward(prompt: str, completion: str, truncated: bool = False) -> float:
    """1 for the right values of x: the two in the prompt, and two that the model has not seen. One
    process runs all four."""
    (x, y), (u, v) = (map(int, point.split(":")) for point in prompt.strip().split(","))
    a = (y - v) // (x - u)
    places = [x, u, 11, 37]
    program = f"for x in {places}: print({completion})"
    return float(not truncated and run(program) == "\n".join(str(y + a * (n - x)) for n in places))


@functools.cache
def alone() -> list[str]:
    """The command before a program that cuts it off from the rest of the machine; [] where the
    system does not allow that."""
    with contextlib.suppress(OSError):
        if subprocess.run([*ALONE, "true"], capture_output=True).returncode == 0:
            return ALONE
    print(
        "programs of the model are limited in time and memory only: `unshare` does not work here",
        flush=True,
    )
    return []


def limit() -> None:
    """In the child, before its program begins."""
    for what, most in [
        (resource.RLIMIT_CPU, SECONDS),
        (resource.RLIMIT_AS, BYTES),
        (resource.RLIMIT_FSIZE, 1000),
        (resource.RLIMIT_CORE, 0),
    ]:
        resource.setrlimit(what, (most, most))


def run(program: str) -> str | None:
    """What a Python program prints; None if it fails, is late, or prints more than 1,000 bytes."""
    with tempfile.TemporaryFile() as out:
        process = subprocess.Popen(
            [*alone(), sys.executable, "-I", "-S", "-c", program],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.DEVNULL,
            cwd="/",
            env={"PATH": os.defpath},
            preexec_fn=limit,
            start_new_session=True,
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(SECONDS)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with whatever it has started
        status = process.wait()
        out.seek(0)
        if status == 0:
            return out.read().decode(errors="replace").strip()
        return None
