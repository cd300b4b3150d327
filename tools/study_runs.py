"""Make the runs of a study: several at once, each a process of its own, in its own run folder. ablate.py says which."""
import ctypes
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

from support.files import write_file
from tools.study import FAILED, folder_of, has_died, is_finished, lines_of

SAY_EVERY = 60  # seconds between two lines about the progress of runs that take long


def start_run(study: dict, name: str, seed: int, folder: Path, gpus: list[int] | None) -> subprocess.Popen:
    variant, env = study["variants"][name], dict(os.environ, OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(study["nproc"])]
    command = [sys.executable, *(torchrun if study["nproc"] > 1 else []), variant["file"], *variant["flags"]]
    command += [*(f"--{flag}={seed}" for flag in variant["seeded"]), f"--out={folder}"]
    if gpus is not None:
        mine = env.get("CUDA_VISIBLE_DEVICES", "").split(",")  # the user may have chosen some GPUs
        env["CUDA_VISIBLE_DEVICES"] = ",".join(mine[i] if len(mine) > i and mine[i] else str(i) for i in gpus)

    def end_with_parent():  # if the study is killed, its runs stop, save, and can be continued
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)

    folder.mkdir(parents=True, exist_ok=True)
    (folder / FAILED).unlink(missing_ok=True)
    with open(folder / "log.txt", "a") as log:  # a new session: Ctrl-C reaches the run only through us
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True, preexec_fn=end_with_parent)


def last_line(folder: Path) -> str:
    lines = [line for line in (folder / "log.txt").read_text(errors="replace").splitlines() if line.strip()]
    return ([line for line in lines if line.startswith("error")] or lines or ["nothing printed"])[-1].strip()


def share_done(study: dict, folder: Path, name: str, seed: int) -> float:
    """Share of a run's steps that are logged."""
    steps = [line["step"] for line in lines_of(folder, name, seed)]
    return min(max(steps, default=0) / study["variants"][name]["steps"], 1.0)


def run_all(study: dict, folder: Path, todo: list[tuple], stopping: list) -> None:
    """Make each (variant, seed) that is not finished, --jobs at once, in this order, until all are done or a signal came.

    A run that ends with an error leaves the last line of its log in the file FAILED of its folder, even a run with all numbers,
    such as after a full disk. With --only this run alone is made, and then the program ends.
    """
    todo = [(name, seed) for name, seed in todo if not is_finished(lines_of(folder, name, seed), study["variants"][name])]
    if study["only"]:
        todo = [(name, seed) for name, seed in todo if f"{study['size']}/{name}/{seed}".lstrip("/") == study["only"]]
    waiting, running, slots = list(todo), {}, list(range(study["jobs"]))  # a run's slot tells its GPUs
    began = said = time.monotonic()
    if todo:
        print(f"{folder}: {len(todo)} run{'s' * (len(todo) > 1)}, {study['jobs']} at once", flush=True)
    try:
        while (waiting or running) and not stopping:
            while waiting and slots:
                name, seed = key = waiting.pop(0)
                slot, place = slots.pop(0), folder_of(folder, name, seed)
                gpus = range(slot * study["nproc"], (slot + 1) * study["nproc"]) if study["gpus"] else None
                running[key] = start_run(study, name, seed, place, gpus), place, slot
            time.sleep(0.2)
            ended = [key for key, (process, *_) in running.items() if process.poll() is not None]
            if ended or time.monotonic() > said + SAY_EVERY:
                said, rest = time.monotonic(), len(waiting) + len(running) - len(ended)
                done = len(todo) - rest + sum(share_done(study, folder, *key) for key in running.keys() - {*ended})
                left = timedelta(seconds=round((said - began) / done * (len(todo) - done))) if done else "an unknown time"
                progress = f"{rest} of {len(todo)} runs to go, about {left}"
                if not ended:
                    print(f"{folder}: {progress}", flush=True)
            for key in ended:
                process, place, slot = running.pop(key)
                slots.insert(0, slot)
                lines, end = lines_of(folder, *key), "done"
                if process.returncode or not is_finished(lines, study["variants"][key[0]]):
                    end = f"failed: {last_line(place)}"
                    write_file(place / FAILED, last_line(place).encode())
                print(f"{key[0]}, seed {key[1]}: {end} ({progress})", flush=True)
                known = sorted({key for line in lines for key, value in line.items() if isinstance(value, int | float)})
                if end == "done" and not has_died(lines, study["metric"]) and study["metric"] not in known:
                    raise ValueError(f"--metric {study['metric']}: no run logs it; there are {', '.join(known)}")
    finally:
        for process, *_ in running.values():
            process.terminate()  # a recipe then finishes its step, saves and exits
        for process, *_ in running.values():
            process.wait()
    if study["only"] and todo and not stopping:
        sys.exit(int((place / FAILED).exists()))

