"""Judges submissions: one in its own process (check), or those of a class, unattended (grade)."""

import contextlib
import json
import os
import re
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from course import COURSE, HERE, HOUSE
from submission import STATE, state_of, what

sys.path.append(str(HOUSE))  # behind the files beside this one
from flags.progress import Progress  # noqa: E402

LIMIT_S = 120
# bytes of address space of each process of a check, under grade; torch alone reserves some
MEMORY = 24 * 2**30


def judged(folder, limit: float, memory=0, alone=False, prints=False, only=()) -> dict:
    """{verdict, message, seconds, ...}. verdict: solved, not yet, error, refused, no verdict, no
    time.

    memory: bytes of address space, 0 = no limit; alone: without network where the system allows it;
    prints: what the student's
    functions print is shown; only: names of functions, the others are the project's own.
    """
    folder = Path(folder).expanduser().resolve()
    start = time.monotonic()
    nonce, (read, write) = secrets.token_hex(16), os.pipe()
    with (
        tempfile.TemporaryDirectory() as clean,
        tempfile.TemporaryDirectory() as empty,
        tempfile.TemporaryFile("w+") as errors,
    ):
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "LD_"))
        }
        env |= {
            "PYTHONPATH": os.pathsep.join(map(str, (HERE, HOUSE, HOUSE / "tests"))),
            "PYTHONSAFEPATH": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONNOUSERSITE": "1",
        }
        process = subprocess.Popen(
            [sys.executable, HERE / "judge.py", str(write)],
            env=env,
            cwd=empty,
            pass_fds=[write],
            start_new_session=True,
            text=True,
            stdin=subprocess.PIPE,
            stdout=None if prints else subprocess.DEVNULL,
            stderr=errors,
        )
        os.close(write)
        try:
            work = dict(
                nonce=nonce,
                folder=str(folder),
                only=only,
                clean=clean,
                limit=limit,
                memory=memory,
                alone=alone,
            )
            print(json.dumps(work), file=process.stdin, flush=True)
            found = reached(read, nonce, start + limit)
            if found == {}:  # its end of the pipe is closed: the process is about to end
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(start + limit - time.monotonic(), 0))
            status = process.poll()
        finally:
            os.close(read)
            try:
                os.killpg(process.pid, signal.SIGKILL)  # with the workers of the check
            except ProcessLookupError:
                pass
            process.wait()
        errors.seek(0)
        found = found or without_verdict(errors.read(), status, clean, limit)
    return found | {"seconds": round(time.monotonic() - start, 1)}


def reached(read: int, nonce: str, deadline: float) -> dict | None:
    """The verdict of the process at the other end, as soon as it is there; {} at the end of the
    process; None at the deadline."""
    text = b""
    while (left := deadline - time.monotonic()) > 0:
        if not select.select([read], [], [], left)[0]:
            continue
        if not (piece := os.read(read, 65536)):
            return {}
        text += piece
        for line in text.decode(errors="replace").splitlines(keepends=True):
            if line.startswith(nonce + " ") and line.endswith("\n"):
                return json.loads(line.removeprefix(nonce))
    return None


def without_verdict(errors: str, status: int | None, clean: str, limit: float) -> dict:
    if status is not None:
        last = (errors.strip().splitlines() or [""])[-1]
        return dict(
            verdict="no verdict",
            message=f"the check ended with status {status} and without a verdict: an answer "
            f"returns, and does not end its process. {last}".strip(),
        )
    places = re.findall(rf'File "{re.escape(clean)}/(\S+)", line \d+ in (\w+)', errors)
    seen = (
        "; ".join(f"{file}, in {function}" for file, function in dict.fromkeys(places))
        or "not known"
    )
    if places and not waits_for_others(errors, clean):
        reason = (
            "No rank waits for another: the answer still computes. It may be right and too slow, "
            "or a loop of it never ends."
        )
    else:
        reason = (
            "Usually ranks that wait for each other: each must call the same collectives in the "
            "same order, whatever its data."
        )
    return dict(
        verdict="no time",
        message=f"no end after {limit:g} s. {reason} Where they are: {seen}. On a busy machine: "
        f"--limit {2 * limit:g}",
    )


def waits_for_others(stacks: str, clean: str) -> bool:
    """Whether a function of the student's has called a collective that has not come back."""
    for stack in stacks.split("(most recent call first)")[1:]:
        called, found, _ = stack.partition(f'File "{clean}/')
        if found and "torch/distributed/" in called:
            return True
    return False


def submissions(top: Path) -> list[Path]:
    """Folders with an exercise.json, the outer ones only."""
    found = []
    for folder, inner, files in os.walk(top):
        if STATE in files:
            found.append(Path(folder))
            inner.clear()
        inner.sort()
    return found


def points_of(number: int, folder: Path, limit: float, verdict: str) -> dict[str, int]:
    """{points, of}: how many of an exercise's parts are right, each alone among the project's own
    functions. A submission that is refused has none."""
    parts = COURSE[number].parts()
    if verdict == "solved" or verdict == "refused" or len(parts) == 1:
        return {"points": len(parts) * (verdict == "solved"), "of": len(parts)}
    alone = [judged(folder, limit, MEMORY, alone=True, only=part)["verdict"] for part in parts]
    return {"points": alone.count("solved"), "of": len(parts)}


def grade(top: str, out: str, limit: float):
    """One JSON line per student and exercise. student: the first folder below `top` on the way to
    the submission."""
    root = Path(top).expanduser()
    folders = submissions(root)
    if not folders:
        raise ValueError(
            f"{top} has no folder with an {STATE}; a submission is the whole folder that `start` "
            "made"
        )
    counts: dict[str, int] = {}
    with open(out, "w") as lines, Progress("grading", len(folders), "submissions") as progress:
        for folder in folders:
            try:
                name = what(state_of(folder)).removeprefix("exercise ")
            except ValueError:
                name = "?"
            result = judged(folder, limit, MEMORY, alone=True)
            row = {
                "student": folder.relative_to(root).parts[0] if folder != root else folder.name,
                "exercise": int(name) if name.isdigit() else name,
                "verdict": result["verdict"],
                "message": " ".join(result["message"].split()),
                "seconds": result["seconds"],
            }
            row |= points_of(int(name), folder, limit, row["verdict"]) if name.isdigit() else {}
            print(json.dumps(row), file=lines, flush=True)
            counts[row["verdict"]] = counts.get(row["verdict"], 0) + 1
            points = f"{row['points']}/{row['of']}" if "of" in row else ""
            progress()
            progress.say(
                f"{row['student']:<20} {row['exercise']!s:<10} {row['verdict']:<10} {points:<5} "
                f"{row['seconds']:>6} s  "
                f"{row['message'][:70]}"
            )
            if not result.get("alone", True):
                progress.say("note: this system lets a check keep the network", sys.stderr)
    print(
        f"{len(folders)} submissions: "
        + ", ".join(f"{n} {verdict}" for verdict, n in sorted(counts.items()))
        + f"; {out}"
    )
