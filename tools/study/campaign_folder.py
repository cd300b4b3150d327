"""The folder of a campaign: its log, and the code of its candidates. tools/study/campaign.py has the
order of events.

    FOLDER/log.jsonl                    a line for each event: begin, submit, test, answer, final
    FOLDER/candidates/0003/code/        the checkout of candidate 3 as it was submitted; 0000: the start
    FOLDER/candidates/0003/runs/        its run folders: best, candidate, and those of the gates
    FOLDER/final/                       the runs that judge the last best
"""

import hashlib
import json
import os
import shutil
from pathlib import Path

from flags.files import write_file
from tools.study.report import seconds_of
from tools.study.variants import ask_recipe, sources_of
from training.metrics import read_lines

OWN = Path(__file__).parents[2]  # this checkout


# ---------------------------------------------------------------- the log
def read_log(folder) -> list[dict]:
    """The events of a campaign. A line that a kill has cut off did not happen."""
    path = Path(folder, "log.jsonl")
    if not path.exists():
        return []
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        write_file(path, whole)
    return [json.loads(line) for line in whole.splitlines()]


def append(folder, **event) -> dict:
    """Add an event to the log; it is on the disk when this returns."""
    line = json.dumps(event) + "\n"
    with open(Path(folder, "log.jsonl"), "ab") as file:
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())
    return event


def events_of(log: list[dict], kind: str) -> list[dict]:
    return [event for event in log if event["event"] == kind]


def best_of(log: list[dict]) -> int:
    """The number of the candidate that was kept last; 0 is the start."""
    best = 0
    for answer in events_of(log, "answer"):
        if answer["verdict"] == "kept":
            best = answer["candidate"]
    return best


def kept_of(log: list[dict]) -> int:
    return sum(answer["verdict"] == "kept" for answer in events_of(log, "answer"))


def open_submission(log: list[dict]) -> dict | None:
    """The candidate that has no answer yet."""
    answered = {answer["candidate"] for answer in events_of(log, "answer")}
    for submit in events_of(log, "submit"):
        if submit["candidate"] not in answered:
            return submit
    return None


def cost_of(folder) -> dict:
    """Runs and seconds of training below a folder."""
    files = sorted(Path(folder).glob("**/metrics.jsonl"))
    seconds = 0.0
    for file in files:
        seconds += seconds_of(list(read_lines(str(file))))
    return {"runs": len(files), "seconds": round(seconds, 1)}


def by_number(log: list[dict], number: int) -> dict:
    """The begin or submit event of a candidate."""
    for event in log:
        if event["event"] in ("begin", "submit") and event["candidate"] == number:
            return event
    raise ValueError(f"the log has no candidate {number}")


def path_of_best(folder, log: list[dict], number: int) -> str:
    """The file of the best so far, to copy and to change."""
    event = by_number(log, number)
    return str(Path(folder, "candidates", f"{number:04}", "code", event["file"]))


def sha256_of(text: str) -> str:
    """Of a file, or of the files of a folder."""
    found = hashlib.sha256()
    for path in sorted([Path(text), *Path(text).rglob("*")]):
        if path.is_file():
            found.update(path.read_bytes())
    return found.hexdigest()


# ---------------------------------------------------------------- code
def home_of(recipe: Path) -> Path:
    """The checkout whose modules a recipe imports."""
    for folder in recipe.resolve().parents[:2]:
        if (folder / "data.py").is_file():
            return folder
    return OWN


def copy_code(recipe: Path, target: Path) -> str:
    """Copy a recipe and the modules that it may import; later edits of the checkout change nothing.
    Returns the recipe's path below target."""
    home = home_of(recipe)
    below = recipe.name
    if home in recipe.resolve().parents:
        below = str(recipe.resolve().relative_to(home))
    shutil.rmtree(target, ignore_errors=True)  # of a kill in the middle of a copy
    wanted = shutil.ignore_patterns("__pycache__", "*.pyc", "tests")
    target.mkdir(parents=True)
    for path in home.iterdir():
        if path.is_dir() and (path / "__init__.py").exists():
            shutil.copytree(path, target / path.name, ignore=wanted)
        elif path.suffix == ".py" and path.is_file():
            shutil.copy(path, target / path.name)
    (target / below).parent.mkdir(exist_ok=True)
    shutil.copy(recipe, target / below)
    return below


def code_key(recipe: Path, flags: list[str]) -> str:
    """The same for the same candidate: flags, and the sources of its training."""
    text = json.dumps([flags, sorted(sources_of(recipe).items())])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def variant_of(folder, submit: dict, nproc: int) -> dict:
    """The variant of a submission, as tools/study/runs.py makes runs of it. Raises ValueError if its
    recipe refuses the flags."""
    file = Path(folder, "candidates", f"{submit['candidate']:04}", "code", submit["file"])
    variant = {"recipe": str(file), "file": str(file), "flags": submit["flags"]}
    variant["files"] = sources_of(file)
    return variant | ask_recipe(submit["name"], variant, Path(folder, "check"), nproc)
