"""Records the code of a run, so that the run can be repeated: all sources, and the git commit.

A checkpoint holds code.json, {file: source}, with all uncommitted changes. If the recipe is in a
git repository, provenance.json has the commit. config.json has the commit and a hash of every
source under "_run". docs/fork_me.md runs the sources again.
"""

import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from distributed.agree import brief
from flags import VERSION
from flags.config import own_rank
from flags.files import read_json

# the program, and the files of --env and --reward
MODULES = ("__main__", "nanotitan_env", "nanotitan_reward")
SOURCES = (".py", ".json", ".tsv", ".html")  # code, and tables beside the code
GIT_SECONDS = 3.0  # longest wait for git
FILE_BYTES = 1 << 18  # the most bytes of a source


# --- Sources ---
def file_of_module(module: ModuleType | None) -> str:
    """The file of a module; "" for a module without. Read from its own names, because some modules
    of libraries import others when they are asked for one."""
    if module is None or "__file__" not in vars(module):
        return ""
    file = vars(module)["__file__"]
    return file if isinstance(file, str) else ""


def code_roots() -> list[str]:
    """The folders of the recipe, of our own files, of --env and --reward, each with a final slash."""
    own = os.path.dirname(__file__)
    program, *given = [file_of_module(sys.modules.get(name)) or own for name in MODULES]
    files = [program, own, *given]
    return [os.path.dirname(os.path.realpath(file)) + os.sep for file in files]


def local_code() -> dict[str, str]:
    """{path: text} of all sources that a run may import, at the start or later in a function: the
    *.py files in code_roots() and beside the loaded modules below, and the packages that they name,
    with their tables."""
    loaded = set()  # folders
    for module in list(sys.modules.values()):
        file = file_of_module(module)
        # installed libraries are no sources of a run, and to resolve their 3,000 paths would take
        # 0.3 s
        if file and "/lib/python3" not in file:
            loaded.add(os.path.dirname(os.path.realpath(file)))
    found = {}

    def add(root: str, paths):
        for path in sorted(paths):
            if path.suffix in SOURCES and path.is_file() and path.stat().st_size <= FILE_BYTES:
                found.setdefault(str(path.relative_to(root)), path.read_text("utf-8", "replace"))

    for root in dict.fromkeys(code_roots()):
        paths = [*Path(root).glob("*.py")]
        for folder in loaded:
            if folder.startswith(root):
                paths += Path(folder).glob("*.py")
        add(root, paths)
        text = "\n".join(found.values())
        packaged = []
        for file in Path(root).glob("*/__init__.py"):
            if f" {file.parent.name}" in text:  # import NAME
                packaged += file.parent.rglob("*.*")
        add(root, packaged)
    return found


def changed_code(path: str, code: dict[str, str]) -> str:
    """The line about the files of `code` that differ from a step folder's; "" if all are equal, or
    without a code.json.

    Files are compared as text; no code of a checkpoint is ever run.
    """
    there = {}
    if os.path.isfile(os.path.join(path, "code.json")):
        there = read_json(path, "code.json")
    changed = [file for file in code if there.get(file, code[file]) != code[file]]
    if not changed:
        return ""
    return f"code that has changed since {os.path.basename(path)} was written: {brief(changed)}"


def check_machines(code: dict[str, str], out: str, gather: Callable[[Any], list]) -> None:
    """Raises ValueError on all ranks when machines run different sources or another torch, or do
    not share the run folder `out` ("": none is written). The first rank of each machine has read
    `code`; gather: of all ranks' answers."""
    own = None
    if own_rank("LOCAL_RANK") == 0:
        lock = Path(out, ".lock")  # signed by rank 0 before the processes connected
        signed = ""
        if out and lock.exists():
            signed = lock.read_text(errors="replace")
        sources = {"torch": torch.__version__} | summarize_code({}, code)["code"]
        own = (socket.gethostname(), signed, sources)
    machines = [(rank, answer) for rank, answer in enumerate(gather(own)) if answer]
    _, (first, signed, sources) = machines[0]
    for rank, (host, theirs, found) in machines[1:]:
        where = f"rank 0 ({first}) and rank {rank} ({host})"
        changed = [name for name in found if sources.get(name, found[name]) != found[name]]
        if changed:
            raise ValueError(
                f"{brief(changed)} is not the same on {where}: every machine needs the same code "
                "and torch"
            )
        if theirs != signed:
            raise ValueError(
                f"--out {out} is not the same folder on {where}: give a folder that all machines "
                "share, or "
                "--checkpoint_every 0"
            )


# --- git ---
def git_commit(root: str, files: list[str]) -> dict:
    """{"commit"} of the repository around the recipe's folder `root`; {} without git or a
    repository, and if none of `files` is tracked, as in a repository of a whole home folder.
    Changes since the commit are in code.json."""
    env = {**os.environ}
    for name in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"):
        env.pop(name, None)

    def git(*words):
        return subprocess.check_output(
            ["git", "-C", root, *words], stderr=subprocess.DEVNULL, env=env, timeout=GIT_SECONDS
        )

    with suppress(OSError, subprocess.SubprocessError):
        if git("ls-files", "--", *files):
            return {"commit": git("rev-parse", "--verify", "HEAD").decode().strip()}
    return {}


def summarize_code(state: dict, code: dict[str, str]) -> dict:
    """The entries of config.json for a git_commit and the sources."""
    hashes = {}
    for file, text in sorted(code.items()):
        hashes[file] = hashlib.sha256(text.encode()).hexdigest()
    return {**state, "version": VERSION, "torch": torch.__version__, "code": hashes}
