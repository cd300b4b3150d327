"""The code that makes the runs of a study: checkouts side by side, worktrees of commits, and hashes of sources."""
import contextlib
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import torch

from support.files import sha256_file

ROOT = Path(__file__).resolve().parents[1]


def checkout_of(recipe) -> Path:
    """The folder whose modules a recipe imports: the nearest one with support/config.py, or the recipe's own."""
    folder = Path(recipe).resolve().parent
    return next((home for home in (folder, *folder.parents) if (home / "support/config.py").is_file()), folder)


@contextlib.contextmanager
def modules_of(home: Path):
    """Inside, imports find the modules of the checkout `home`, and none of another checkout."""
    names = {path.stem for folder in (ROOT, home) for path in folder.iterdir()} if home != ROOT else set()
    mine = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in names}
    others = [entry for entry in sys.path if home == ROOT or Path(entry).resolve() != ROOT]
    for name in mine:
        del sys.modules[name]
    try:
        with mock.patch.object(sys, "path", [str(home), *others]):
            yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in names]:
            del sys.modules[name]
        sys.modules.update(mine)


def check_out(recipe: str, out) -> str:
    """The path of RECIPE@COMMIT in a git worktree below `out`, made if missing; of a recipe without @COMMIT, as it is."""
    path, _, commit = recipe.partition("@")
    if not commit:
        return recipe

    def git(*words) -> str:
        done = subprocess.run(["git", "-C", Path(path).parent, *words], capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"{recipe}: git has no such commit here: {(done.stderr.strip() or 'unknown').splitlines()[-1]}")
        return done.stdout.strip()

    sha = git("rev-parse", "--verify", "--quiet", f"{commit}^{{commit}}")
    place = Path(out, "commits", sha[:12]).resolve()
    if not (place / ".git").exists():
        git("worktree", "add", "--force", "--detach", str(place), sha)  # force: a deleted study leaves its entry behind
    return str(place / git("rev-parse", "--show-prefix") / Path(path).name)


def sources_of(recipe: str) -> dict[str, str]:
    """{file: sha256} of the recipe and of all files of its checkout that training may import, and the version of torch. tools/
    has reports, which training never runs."""
    found, waiting = {"torch": torch.__version__}, [Path(recipe).stem]
    while waiting:
        file = waiting.pop().replace(".", "/") + ".py"
        there = [home / file for home in (Path(recipe).parent, checkout_of(recipe)) if (home / file).is_file()]
        if file not in found and not file.startswith("tools/") and there:
            found[file] = sha256_file(there[0])
            for module, names in re.findall(r"^ *(?:from|import) ([\w.]+)(?: import (.*))?", there[0].read_text(), re.M):
                waiting += [module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))]
    return found
