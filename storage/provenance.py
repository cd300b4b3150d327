"""Records the code of a run, so that the run can be repeated: all sources, the git commit and the uncommitted changes.

A checkpoint holds code.json, {file: source}. If the recipe is in a git repository, provenance.json has the commit, the diff
from the commit to the working tree, and the untracked sources. config.json has the commit and a hash of every source under
"_run". `python checkpoint.py source STEP_FOLDER OUT` writes the sources into a folder, to run them again.
"""
import hashlib
import os
import re
import subprocess
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

from support.files import read_json

MODULES = ("__main__", "nanotitan_env", "nanotitan_reward")  # the program, and the files of --env and --reward
GIT_SECONDS, DIFF_BYTES = 3.0, 1 << 20  # longest wait for git at a start; most bytes of a saved diff
IMPORT = re.compile(r"^[ \t]*(?:from ([\w.]+) )?import (?:\(([^)]*)|(.*))", re.M)  # package or "", names in brackets, or a line


# --- Sources ---
def code_roots() -> list[str]:
    """The folders of the recipe, of our own files, of --env and --reward, each with a final slash."""
    own = os.path.dirname(__file__)
    files = [getattr(sys.modules.get(name), "__file__", None) or own for name in MODULES]
    return [os.path.dirname(os.path.realpath(file)) + os.sep for file in (files[0], own, *files[1:])]


def local_code() -> dict[str, str]:
    """{path: source} of all imported modules in or below code_roots(), and of local modules imported later, in functions."""
    found, roots = {}, list(dict.fromkeys(code_roots()))
    files = {getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())}
    files = sorted(os.path.realpath(file) for file in files if isinstance(file, str) and file.endswith(".py"))
    elsewhere = os.path.realpath(sysconfig.get_paths()["stdlib"]) + os.sep  # a root may hold a virtual environment
    for root in roots:
        for file in files:
            if file.startswith(root) and not file.startswith(elsewhere) and "-packages" + os.sep not in file:
                found.setdefault(file.removeprefix(root), Path(file).read_text("utf-8", "replace"))
    left = list(found)
    while left:
        for stem in (name.replace(".", "/") for name in imported_names(found[left.pop()])):
            for file in (f"{stem}.py", f"{stem}/__init__.py"):
                path = next((root + file for root in roots if os.path.isfile(root + file)), None)
                if path and file not in found:
                    found[file] = Path(path).read_text("utf-8", "replace")
                    left.append(file)
    return found


def imported_names(source: str) -> set[str]:
    """Every module a source may import, with all packages around: "from a.b import c" gives a, a.b and a.b.c. A regular
    expression takes a hundredth of a parser's time; a sentence similar to an import names no file of ours."""
    names = set()
    for package, inside, line in IMPORT.findall(source):
        names |= {f"{package}.{name}".strip(".") for name in ("", *re.findall(r"[\w.]+", inside + line))}
    return {name.rsplit(".", n)[0] for name in names for n in range(name.count(".") + 1)} - {""}


def changed_code(path: str, code: dict[str, str]) -> list[str]:
    """The files of `code` that are new or differ from a step folder's code.json, if there is a code.json.

    Files are compared as text; no code of a checkpoint is ever run.
    """
    if not os.path.isfile(os.path.join(path, "code.json")):
        return []
    there = read_json(path, "code.json")
    return [file + " (new)" * (file not in there) for file in code if there.get(file) != code[file]]


# --- git ---
def git(folder: str, *words: str) -> str | None:
    """The text printed by a git command. None if git fails, takes too long, or is absent."""
    env = {name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")}
    env |= {"GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1"}  # no questions to the user, no network
    with tempfile.TemporaryFile() as said:  # a file, because a pipe may stay open in git's children after a timeout
        try:
            subprocess.run(["git", "--no-optional-locks", "-C", folder, *words], env=env, stdin=subprocess.DEVNULL, stdout=said,
                           stderr=subprocess.DEVNULL, timeout=GIT_SECONDS, check=True)
        except (OSError, subprocess.SubprocessError):
            return None
        said.seek(0)
        return said.read(5 * DIFF_BYTES).decode("utf-8", "replace")  # more characters than DIFF_BYTES: each has at most 4 bytes


@cache
def git_state(root: str, files: tuple[str, ...]) -> dict:
    """{"commit", "diff", "untracked"} of the repository around the recipe's folder `root`; {} without a repository, or if none
    of `files` is tracked, as in a repository of a whole home folder. diff: of the tracked files in and below root, None if
    git took too long."""
    here = [file for file in files if os.path.isfile(root + file)]
    commit, tracked = git(root, "rev-parse", "--verify", "HEAD"), git(root, "ls-files", "-z", "--", *here)
    if not commit or not here or not tracked:
        return {}
    diff = git(root, "diff", "--no-color", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty", "HEAD", "--", ".")
    if diff and len(diff) > DIFF_BYTES:
        diff = diff[: diff.rfind("\n", 0, DIFF_BYTES) + 1] + f"... cut: only {DIFF_BYTES:,} bytes are kept\n"
    return {"commit": commit.strip(), "diff": diff, "untracked": [file for file in here if file not in tracked.split("\0")]}


def summarize_code(state: dict, code: dict[str, str]) -> dict:
    """The entries of config.json for a git_state and the sources."""
    hashes = {file: hashlib.sha256(text.encode()).hexdigest() for file, text in sorted(code.items())}
    of_git = {"commit": state["commit"], "dirty": None if state["diff"] is None else bool(state["diff"])} if state else {}
    return {**of_git, "code": hashes}
