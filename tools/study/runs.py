"""Make the runs of a study: several at once, each a process of its own, in its own run folder.
ablate.py says which."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

from flags.files import write_file
from flags.progress import Progress
from tools.study.study import FAILED, folder_of, has_died, is_finished, lines_of
from training.metrics import is_number

LOOK = 2.0  # seconds between two looks at the numbers of the runs


def start_run(
    study: dict, name: str, seed: int, folder: Path, gpus: list[int] | None
) -> subprocess.Popen:
    variant = study["variants"][name]
    env = dict(os.environ, OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"))
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(study["nproc"]),
    ]
    command = [sys.executable]
    if study["nproc"] > 1:
        command += torchrun
    command += [variant["file"], *variant["flags"]]
    command += [*(f"--{flag}={seed}" for flag in variant["seeded"]), f"--out={folder}"]
    if gpus is not None:
        visible = env.get("CUDA_VISIBLE_DEVICES", "").split(
            ","
        )  # the user may have chosen some GPUs
        names = []
        for i in gpus:
            name = str(i)
            if len(visible) > i and visible[i]:
                name = visible[i]
            names.append(name)
        env["CUDA_VISIBLE_DEVICES"] = ",".join(names)

    def end_with_parent():  # if ablate.py is killed, the runs stop, save, and can be continued
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)

    folder.mkdir(parents=True, exist_ok=True)
    (folder / FAILED).unlink(missing_ok=True)
    # a new session: a Ctrl-C ends ablate.py, and run_all ends the runs
    with open(folder / "log.txt", "a") as log:
        return subprocess.Popen(
            command,
            env=env,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


def last_line(folder: Path) -> str:
    log = (folder / "log.txt").read_text(errors="replace")
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error")]
    said = errors or lines or ["nothing printed"]
    return said[-1].strip()


def steps_so_far(folder: Path, runs: list[tuple]) -> dict[tuple, int]:
    """{run: its last logged step}"""
    return {run: last_step_of(folder, run)["step"] for run in runs}


def last_step_of(folder: Path, run: tuple) -> dict:
    """The last line with a loss that a run has logged; of step 0 if there is none."""
    last = {"step": 0}
    for line in lines_of(folder, *run):
        if "loss" in line:
            last = line
    return last


def describe_running(folder: Path, running: dict) -> str:
    """ "llama3, seed 1: loss 3.214; mine, seed 1: starts" """
    said = []
    for name, seed in running:
        line = last_step_of(folder, (name, seed))
        state = "starts"
        if "loss" in line:
            loss = "no number"  # null in the log
            if is_number(line["loss"]):
                loss = f"{line['loss']:.3f}"
            state = f"step {line['step']}, loss {loss}"
        said.append(f"{name}, seed {seed}: {state}")
    return "; ".join(said)


def check_metric(metric: str, lines: list[dict]) -> None:
    """Raises ValueError if a run that ended well has not logged the metric."""
    numbers = set()
    for line in lines:
        numbers |= {key for key, value in line.items() if isinstance(value, int | float)}
    if metric not in numbers and not has_died(lines, metric):
        known = ", ".join(sorted(numbers))
        raise ValueError(f"--metric {metric}: no run logs it; there are {known}")


def run_all(study: dict, folder: Path, todo: list[tuple], stopping: list) -> None:
    """Make the unfinished runs (variant, seed) in this order, --jobs at once, until all are done or a
    signal came.

    A run with an exit status other than 0 has failed, even with all numbers logged (a full disk at
    the last save). The last line of the log is then in the file FAILED of the run's folder. With
    --only the program makes one run and ends.
    """
    asked = []
    for name, seed in todo:
        run = f"{study['size']}/{name}/{seed}".lstrip("/")
        if not study["only"] or run == study["only"]:
            asked.append((name, seed))
    todo = []
    for name, seed in asked:
        if not is_finished(lines_of(folder, name, seed), study["variants"][name]):
            todo.append((name, seed))
    if study["only"] and asked and not todo:
        print(f"--only {study['only']}: finished before")
        sys.exit()
    # a run on slot i has the GPUs from i * nproc on
    waiting = list(todo)
    running = {}
    slots = list(range(study["jobs"]))
    began = time.monotonic()
    looked = began
    if todo:
        counted = f"{len(todo)} runs"
        if len(todo) == 1:
            counted = "1 run"
        print(f"{folder}: {counted}, {study['jobs']} at once", flush=True)
    trained = steps_so_far(folder, todo)
    total = sum(study["variants"][name]["steps"] for name, _ in todo) - sum(trained.values())
    progress = Progress(f"{folder}", total, "steps")
    stack = ExitStack()
    try:
        stack.enter_context(progress)
        while (waiting or running) and not stopping:
            while waiting and slots:
                name, seed = key = waiting.pop(0)
                slot = slots.pop(0)
                place = folder_of(folder, name, seed)
                gpus = None
                if study["gpus"]:
                    gpus = range(slot * study["nproc"], (slot + 1) * study["nproc"])
                running[key] = start_run(study, name, seed, place, gpus), place, slot
            time.sleep(0.2)
            if time.monotonic() - looked > LOOK:
                looked = time.monotonic()
                now = steps_so_far(folder, todo)
                progress.done = sum(now.values()) - sum(trained.values())
                progress.text = f"{folder}: {describe_running(folder, running)}"
            for key, (process, place, slot) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[key]
                rest = len(waiting) + len(running)
                left = timedelta(
                    seconds=round((time.monotonic() - began) / (len(todo) - rest) * rest)
                )
                slots.insert(0, slot)
                lines = lines_of(folder, *key)
                end = "done"
                if process.returncode or not is_finished(lines, study["variants"][key[0]]):
                    end = f"failed: {last_line(place)}"
                    if "is in use by process" not in end:  # another --only makes the same run
                        write_file(place / FAILED, last_line(place).encode())
                progress.say(
                    f"{key[0]}, seed {key[1]}: {end} ({rest} of {len(todo)} runs to go, about "
                    f"{left})"
                )
                if end == "done":
                    check_metric(study["metric"], lines)
    finally:
        stack.close()
        for process, *_ in running.values():
            process.terminate()  # a recipe then finishes its step, saves and exits
        for process, *_ in running.values():
            process.wait()
    if study["only"] and todo and not stopping:
        sys.exit(int((place / FAILED).exists()))
