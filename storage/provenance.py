"""Records the code of a run, so that the run can be repeated: all sources, the git commit and the uncommitted changes.

A checkpoint holds code.json, {file: source}. If the recipe is in a git repository, provenance.json has the commit, the diff
from the commit to the working tree, and the untracked sources. config.json has the commit and a hash of every source under
"_run". `python checkpoint.py source STEP_FOLDER OUT` writes the sources into a folder, to run them again.
"""
import contextlib
import hashlib
import os
import re
import signal
import subprocess
import sys
import sysconfig
import threading
from functools import cache
from pathlib import Path

from support.files import read_json

REPOSITORY = Path(__file__).parent.parent
MODULES = ("__main__", "nanotitan_env", "nanotitan_reward")  # the program, and the files of --env and --reward
GIT_SECONDS, DIFF_BYTES = 3.0, 1 << 20  # longest wait for git at a start; most bytes of a saved diff


# --- Sources ---
def code_roots() -> list[str]:
    """The folders of the recipe, of our own files, of --env and --reward, each with a final slash."""
    own = str(REPOSITORY / "checkpoint.py")
    files = [getattr(sys.modules.get(name), "__file__", None) or own for name in MODULES]
    return [os.path.dirname(os.path.realpath(file)) + os.sep for file in (files[0], own, *files[1:])]


def local_code() -> dict[str, str]:
    """{path: source} of all imported modules in or below code_roots()."""
    found = {}
    files = {getattr(module, "__dict__", {}).get("__file__") for module in list(sys.modules.values())}
    files = sorted(os.path.realpath(file) for file in files if isinstance(file, str) and file.endswith(".py"))
    elsewhere = os.path.realpath(sysconfig.get_paths()["stdlib"]) + os.sep  # a root may hold a virtual environment
    for root in code_roots():
        for file in files:
            if file.startswith(root) and not file.startswith(elsewhere) and "-packages" + os.sep not in file:
                found.setdefault(file.removeprefix(root), Path(file).read_text("utf-8", "replace"))
    return found


def with_later_imports(code: dict[str, str]) -> dict[str, str]:
    """`code`, and all local modules imported later, inside of functions."""
    found, left, roots, seen = dict(code), list(code), code_roots(), set()
    while left:
        names = imported_names(found[left.pop()]) - seen
        seen |= names
        for stem in (name.replace(".", "/") for name in names):
            for file in {f"{stem}.py", f"{stem}/__init__.py"} - found.keys():
                if path := next((root + file for root in roots if os.path.isfile(root + file)), None):
                    found[file] = Path(path).read_text("utf-8", "replace")
                    left.append(file)
    return found


IMPORT = re.compile(r"^[ \t]*(?:from[ \t]+([\w.]+)[ \t]+import[ \t]+(\([^)]*\)|.+)|import[ \t]+(.+))", re.M)


def imported_names(source: str) -> set[str]:
    """Every module a source may import, with all packages around: "from a.b import c" gives a, a.b and a.b.c. A regular
    expression takes a hundredth of a parser's time; a sentence similar to an import names no file of ours."""
    names = set()
    for package, members, modules in IMPORT.findall(source):
        inside = [re.match(r"\w*", part.strip(" \t\n()"))[0] for part in members.split(",")]
        names |= {f"{package}.{name}" for name in inside if package}
        names |= {part.split()[0] for part in modules.split(",") if part.strip()}
    return {name.rsplit(".", n)[0] for name in names for n in range(name.count(".") + 1)}


def changed_code(path: str, code: dict[str, str]) -> list[str]:
    """The files of `code` that are new or differ from a step folder's code.json, if there is a code.json.

    Files are compared as text; no code of a checkpoint is ever run.
    """
    if not os.path.isfile(os.path.join(path, "code.json")):
        return []
    there = read_json(path, "code.json")
    return [file + " (new)" * (file not in there) for file in code if there.get(file) != code[file]]


# --- git ---
def git(folder: str, *words: str, most: int = DIFF_BYTES) -> bytes | None:
    """The first bytes printed by a git command, at most `most` + 1. None if git fails, takes too long, or is absent."""
    env = {name: value for name, value in os.environ.items() if name not in ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")}
    env |= {"GIT_TERMINAL_PROMPT": "0", "GIT_NO_LAZY_FETCH": "1"}  # no questions to the user, no network
    try:
        process = subprocess.Popen(["git", "--no-optional-locks", "-C", folder, *words], env=env, start_new_session=True,
                                   stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    except OSError:
        return None

    def end():
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # git's children, too

    timer = threading.Timer(GIT_SECONDS, end)
    timer.start()
    said = process.stdout.read(most + 1)
    timer.cancel()
    if len(said) > most:
        end()
    with process:  # closes the pipe and waits
        pass
    return said if process.returncode == 0 or len(said) > most else None


@cache
def git_state(root: str, files: tuple[str, ...]) -> dict:
    """{"commit", "diff", "untracked"} of the repository around the recipe's folder `root`; {} without a repository, or if none
    of `files` is tracked, as in a repository of a whole home folder. diff: of the tracked files in and below root, None if
    git took too long."""
    commit = git(root, "rev-parse", "--verify", "HEAD")
    listed = git(root, "ls-files", "-z", "--", ".", most=1 << 26) if commit else None
    tracked = set((listed or b"").decode("utf-8", "replace").split("\0"))
    here = [file for file in files if os.path.isfile(root + file)]
    if not tracked & set(here):
        return {}
    diff = git(root, "diff", "--no-color", "--no-ext-diff", "--no-textconv", "--ignore-submodules=dirty", "HEAD", "--", ".")
    if diff is not None and len(diff) > DIFF_BYTES:
        diff = diff[:diff[:DIFF_BYTES].rfind(b"\n") + 1] + f"... cut: only {DIFF_BYTES:,} bytes are kept\n".encode()
    return {"commit": commit.decode().strip(), "diff": None if diff is None else diff.decode("utf-8", "replace"),
            "untracked": [file for file in here if file not in tracked]}


def in_short(state: dict, code: dict[str, str]) -> dict:
    """The entries of config.json for a git_state and the sources."""
    hashes = {file: hashlib.sha256(text.encode()).hexdigest() for file, text in sorted(code.items())}
    of_git = {"commit": state["commit"], "dirty": None if state["diff"] is None else bool(state["diff"])} if state else {}
    return {**of_git, "code": hashes}


# --- Flags ---
