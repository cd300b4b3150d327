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
from contextlib import suppress
from pathlib import Path

import torch

from distributed.agree import brief
from flags import VERSION
from flags.config import own_rank
from flags.files import read_json

# the program, and the files of --env and --reward
MODULES = ("__main__", "nanotitan_env", "nanotitan_reward")
SOURCES = (".py", ".json", ".tsv", ".html")  # code, and tables beside the code
GIT_SECONDS, FILE_BYTES = 3.0, 1 << 18  # longest wait for git; most bytes of a source


# --- Sources ---
def code_roots() -> list[str]:
    """The folders of the recipe, of our own files, of --env and --reward, each with a final slash."""
    own = os.path.dirname(__file__)
    files = [getattr(sys.modules.get(name), "__file__", None) or own for name in MODULES]
    return [
        os.path.dirname(os.path.realpath(file)) + os.sep for file in (files[0], own, *files[1:])
    ]


def local_code() -> dict[str, str]:
    """{path: text} of all sources that a run may import, at the start or later in a function: the
    *.py files in code_roots() and beside the loaded modules below, and the packages that they name,
    with their tables."""
    found, files = (
        {},
        [getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())],
    )
    # installed libraries are no sources of a run, and to resolve their 3,000 paths would take 0.3 s
    loaded = {
        os.path.dirname(os.path.realpath(file))
        for file in files
        if isinstance(file, str) and "/lib/python3" not in file
    }

    def add(root: str, paths):
        for path in sorted(paths):
            if path.suffix in SOURCES and path.is_file() and path.stat().st_size <= FILE_BYTES:
                found.setdefault(str(path.relative_to(root)), path.read_text("utf-8", "replace"))

    for root in dict.fromkeys(code_roots()):
        beside = [folder for folder in loaded if folder.startswith(root)]
        add(root, [path for folder in (root, *beside) for path in Path(folder).glob("*.py")])
        text = "\n".join(found.values())
        # import NAME
        named = [
            file.parent
            for file in Path(root).glob("*/__init__.py")
            if f" {file.parent.name}" in text
        ]
        add(root, [path for package in named for path in package.rglob("*.*")])
    return found


def changed_code(path: str, code: dict[str, str]) -> str:
    """The line about the files of `code` that differ from a step folder's; "" if all are equal, or
    without a code.json.

    Files are compared as text; no code of a checkpoint is ever run.
    """
    there = read_json(path, "code.json") if os.path.isfile(os.path.join(path, "code.json")) else {}
    changed = [file for file in code if there.get(file, code[file]) != code[file]]
    return (
        f"code that has changed since {os.path.basename(path)} was written: {brief(changed)}"
        if changed
        else ""
    )


def check_machines(code: dict[str, str], out: str, gather) -> None:
    """Raises ValueError on all ranks when machines run different sources or another torch, or do
    not share the run folder `out` ("": none is written). The first rank of each machine has read
    `code`; gather: of all ranks' answers."""
    mine = None
    if own_rank("LOCAL_RANK") == 0:
        lock = Path(out, ".lock")  # signed by rank 0 before the processes connected
        signed = lock.read_text(errors="replace") if out and lock.exists() else ""
        mine = (
            socket.gethostname(),
            signed,
            {"torch": torch.__version__} | summarize_code({}, code)["code"],
        )
    (_, (first, signed, sources)), *others = [
        (rank, found) for rank, found in enumerate(gather(mine)) if found
    ]
    for rank, (host, theirs, found) in others:
        where = f"rank 0 ({first}) and rank {rank} ({host})"
        if changed := [name for name in found if sources.get(name, found[name]) != found[name]]:
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
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    }

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
    hashes = {
        file: hashlib.sha256(text.encode()).hexdigest() for file, text in sorted(code.items())
    }
    return {**state, "version": VERSION, "torch": torch.__version__, "code": hashes}
