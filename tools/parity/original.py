"""The recipe as committed runs beside the edited recipe, so that --check_parity of grpo.py can say by
how much an edit changes the gradient."""

import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from tools.parity.versions import git

HOUSE = Path(__file__).resolve().parents[2]
# rooms in which an edit changes nothing that is trained
ASIDE = ("tests/", "docs/", "benchmarks/", "exercises/", "tools/")


class Beside:
    """The process that runs the original, or the reason for having no process."""

    def __init__(self, reason="", process=None, out="", name=""):
        self.reason = reason
        self.process = process
        self.out = out
        self.name = name

    def wait(self) -> str:
        """Wait for the end of the process. Returns "", or the reason for having nothing to
        compare."""
        if self.process is None:
            return self.reason
        if self.process.wait() == 0:
            return ""
        for name, last in (("error", 0), ("txt", -1)):
            file = Path(f"{self.out}-0.{name}")
            if not file.exists():
                continue
            lines = file.read_text().splitlines()
            if lines:
                return f"{self.name} ended with an error: {lines[last]}"
        return f"{self.name} ended with status {self.process.returncode}"

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def stripped_lines(file: Path) -> set[str]:
    return {line.strip() for line in file.read_text().splitlines()}


def most_alike(recipe: str, folder: Path) -> Path:
    """The recipe in the folder that shares most lines with `recipe`, a copy."""
    copy = stripped_lines(Path(recipe))
    found = {}
    for file in [*folder.glob("*.py"), *folder.glob("forks/*.py")]:
        lines = stripped_lines(file)
        if "from tools.run import run" in lines:
            found[file] = len(lines & copy)
    return max(found, key=found.get)


def start(recipe: str, given: dict, flags: dict, folder: str) -> Beside:
    """Start the original of a recipe with these flags, in a copy of the last commit. given: the
    flags of the command line."""
    try:
        changed = (
            git(HOUSE, "diff", "--name-only", "--relative", "HEAD", "--", "*.py").decode().split()
        )
        commit = git(HOUSE, "rev-parse", "--short", "HEAD").decode().strip()
        committed = git(HOUSE, "ls-tree", "-r", "--name-only", "HEAD", "--", ".").decode().split()
        changed = [file for file in changed if not file.startswith(ASIDE)]
        path = os.path.relpath(os.path.realpath(recipe), HOUSE)
        if path in committed and not changed:
            return Beside(f"{path} is as committed in {commit}: no edit to look at")
        export = Path(folder, "original")
        with tarfile.open(fileobj=io.BytesIO(git(HOUSE, "archive", "HEAD"))) as archive:
            archive.extractall(export, filter="data")
    except (OSError, ValueError):
        return Beside("no git history here, so the edit is not compared with the original")
    # both recipes are recorded by the tools of today
    shutil.rmtree(export / "tools", ignore_errors=True)
    shutil.copytree(HOUSE / "tools", export / "tools", ignore=shutil.ignore_patterns("__pycache__"))
    if path in committed:
        file = export / path
    else:
        file = most_alike(recipe, export)
    out = os.path.join(folder, "cut-original")
    spec = dict(
        recipe=str(file),
        given=given,
        flags=flags | {"out": out},
        samples=os.path.join(folder, "samples"),
    )
    Path(folder, "original.json").write_text(json.dumps(spec))
    with contextlib.ExitStack() as files:
        said = files.enter_context(open(f"{out}-0.txt", "w"))
        process = subprocess.Popen(
            [
                sys.executable,
                export / "tools" / "parity" / "policy_half.py",
                os.path.join(folder, "original.json"),
            ],
            stdout=said,
            stderr=said,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
    return Beside("", process, out, f"{file.relative_to(export)} of {commit}")
