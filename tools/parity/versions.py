"""--check_parity --where --against RECIPE@COMMIT: the first operation that another commit of a recipe
computes in another way.

Both commits run on the same layout; without flags of a layout on one process. The files of the other
commit are unpacked into a temporary folder, and the recipe runs there with the commit's own modules,
under today's recorder (tools/parity/version_half.py). Then every rank is compared with the same rank
of the other run.
"""

import glob
import io
import json
import math
import os
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch

from distributed.agree import brief
from flags.config import spell
from flags.progress import Progress
from tools.parity.advice import look_at
from tools.parity.compare import RECORD, distance
from tools.parity.halves import degrees_of, device_for
from tools.parity.where import (
    TOLERANCES,
    Piece,
    Seam,
    pieces_of,
    report_seams,
    seam_of,
    without_advice,
)


class Version(NamedTuple):
    """A recipe of a commit, unpacked, or the working tree."""

    name: str  # "train_llama3.py of 1a2b3c4 (title)", or "... of the working tree"
    tree: str  # the folder that stands for the root of the repository
    recipe: str  # path of the recipe in the tree


class Failure(NamedTuple):
    """A version that does not run."""

    status: int
    text: str  # the error


# ---------------------------------------------------------------- git


def git(root: str | Path, *words: str) -> bytes:
    """Output of git. Raises ValueError with git's own words."""
    ours = ("GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE")
    env = {name: value for name, value in os.environ.items() if name not in ours}
    try:
        done = subprocess.run(["git", "-C", root, *words], capture_output=True, env=env)
    except FileNotFoundError:
        raise ValueError("comparing commits needs git, which is not installed") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(f"git {' '.join(words)}: {said[0] if said else 'failed'}")
    return done.stdout


def repository() -> tuple[str, str]:
    """(root of the repository of the running recipe, path of the recipe in it)."""
    recipe = os.path.realpath(sys.argv[0])
    folder = os.path.dirname(recipe)
    try:
        root = git(folder, "rev-parse", "--show-toplevel").decode().rstrip("\n")
    except ValueError:
        raise ValueError(
            f"{folder} is in no git repository, so it has no commits to compare; --against FOLDER "
            "compares with transformers"
        ) from None
    return os.path.realpath(root), os.path.relpath(recipe, os.path.realpath(root))


def commit_of(root: str, name: str) -> str:
    """The hash of a commit. Raises ValueError for an unknown name."""
    try:
        return git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}").decode().strip()
    except ValueError:
        raise ValueError(
            f"{name} is no commit of {root}; give a hash, a tag, a branch, or HEAD~5"
        ) from None


def title_of(root: str, commit: str) -> str:
    """ "1a2b3c4 (Title of the commit)" """
    return git(root, "log", "-1", "--format=%h (%s)", commit).decode().strip()


def unpack(root: str, commit: str, recipe: str, folder: str) -> Version:
    """Unpack a commit into a folder. Raises ValueError if the commit has no such recipe."""
    try:
        git(root, "cat-file", "-e", f"{commit}:{recipe}")
    except ValueError:
        title = title_of(root, commit)
        raise ValueError(
            f"{recipe} is not in {title}; name a recipe of that commit: RECIPE@COMMIT"
        ) from None
    content = git(root, "archive", "--format=tar", commit)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        archive.extractall(folder, filter="data")
    return Version(f"{recipe} of {title_of(root, commit)}", folder, recipe)


def working_tree(root: str, recipe: str) -> Version:
    """The files of today, uncommitted changes included."""
    changed = [line[3:] for line in changes_of_tree(root)]
    beside = f" with changes of {brief(changed)}" if changed else ""
    name = f"{recipe} of the working tree, {title_of(root, 'HEAD')}{beside}"
    return Version(name, root, recipe)


def changes_of_tree(root: str) -> list[str]:
    """Lines of git about files that are not as in HEAD: "M  parallel.py"."""
    told = git(root, "status", "--porcelain", "--untracked-files=no")
    return told.decode(errors="replace").splitlines()


# ---------------------------------------------------------------- runs


def training_words(options: Any, argv: list[str]) -> list[str]:
    """The words of a command line without the flags of reports."""
    kinds = get_type_hints(type(options))
    names = {field.name for field in fields(options)}
    kept = []
    words = list(argv)
    while words:
        word = words.pop(0)
        name = word.split("=")[0].removeprefix("--").removeprefix("no-")
        if not word.startswith("--") or name not in names:
            kept.append(word)
            continue
        has_value = "=" in word or word.startswith("--no-")
        follows = bool(words) and not words[0].startswith("--")
        if not has_value and follows and (kinds[name] is not bool or words[0] in ("true", "false")):
            words.pop(0)
    return kept


def flags_of_version(cfg: Any, out: str, steps: int) -> dict:
    """The flags to append for a recorded run: short, in fp32, and nothing is kept."""
    flags = dict(
        steps=steps,
        compute_dtype="float32",
        checkpoint_every=0,
        export_hf="",
        val_every=0,
        log_every=1,
    )
    return flags | dict(device=device_for(degrees_of(cfg)), out=out)


def processes_of(cfg: Any) -> int:
    """The number of processes of a layout."""
    return math.prod(degrees_of(cfg).values())


def run_version(
    version: Version, kind: str, words: list[str], cfg: Any, out: str, steps: int
) -> Failure | None:
    """Train some steps of a version, and record them beside `out`. kind: of version_half.py."""
    n = processes_of(cfg)
    torchrun = []
    if n > 1:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(n)]
    half = os.path.join(os.path.dirname(os.path.abspath(__file__)), "version_half.py")
    flags = [f"--{name}={spell(x)}" for name, x in flags_of_version(cfg, out, steps).items()]
    recipe = os.path.join(version.tree, version.recipe)
    command = [sys.executable, *torchrun, half, kind, out + RECORD]
    command += [version.tree, recipe, *words, *flags]
    with Progress(f"{steps} step{'s' * (steps > 1)} of {version.name}"):
        done = subprocess.run(command, capture_output=True, text=True)
    if not done.returncode:
        return None
    lines = done.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error")] or lines[-1:]
    text = "it said nothing"
    if errors:
        text = errors[0].removeprefix("error: ")
    return Failure(done.returncode, text)


def read_loaded(out: str) -> list[str]:
    """The files that a recorded run has imported from the tree."""
    with open(os.path.join(out + RECORD, "loaded.json")) as file:
        return json.load(file)


def read_seams(out: str) -> list[dict]:
    """Seams.found() of each rank."""
    files = glob.glob(f"{glob.escape(out + RECORD)}/seams-*.pt")
    parts = [torch.load(file, weights_only=True, mmap=True) for file in files]
    return sorted(parts, key=lambda part: part["rank"])


# ---------------------------------------------------------------- rank by rank


def compare_ranks(theirs: list[dict], ours: list[dict]) -> list[Seam]:
    """All seams of two runs on one layout, in the order of execution."""
    rows_here = [part["rows"] for part in ours]
    rows_there = [part["rows"] for part in theirs]
    differ = rows_here != rows_there
    seams = [Seam("sequences", "", 0, float(differ), TOLERANCES["sequences"])]
    if differ:
        return seams
    degrees = ours[0]["degrees"]
    here = pieces_of(ours)
    there = pieces_of(theirs)
    for key in there | here:
        seams.append(compare_pieces(key, there.get(key, []), here.get(key, []), degrees))
    phases = list(TOLERANCES)
    return sorted(seams, key=lambda seam: phases.index(seam.phase))


def compare_pieces(key: tuple, theirs: list[Piece], ours: list[Piece], degrees: dict) -> Seam:
    """Compare a seam rank by rank; error nan if the two runs have different parts."""
    phase, name, call = key
    if list(map(about, theirs)) != list(map(about, ours)):
        return Seam(phase, name, call, math.nan, TOLERANCES[phase])
    errors = {}
    pairs = []
    for piece, other in zip(ours, theirs, strict=True):
        error = distance(piece.tensor, other.tensor, other.tensor)
        errors[piece.rank] = max(errors.get(piece.rank, 0.0), error)
        pairs.append((piece.tensor, other.tensor))
    return seam_of(phase, name, call, errors, pairs, degrees)


def about(piece: Piece) -> tuple:
    """The facts of a part that must agree before numbers are compared."""
    return piece.rank, piece.rows, piece.offset, piece.tensor.shape


# ---------------------------------------------------------------- the command


def names_commit(against: str) -> bool:
    """Whether the text of --against is RECIPE@COMMIT, and not a folder."""
    return "@" in against and not os.path.lexists(against)


def compare_versions(cfg: Any, options: Any) -> int:
    """--check_parity --where --against RECIPE@COMMIT; returns the exit status: 0 equal, 1 different.
    Raises ValueError."""
    if cfg.compile:
        raise ValueError(
            "--where sees no operations inside of compiled blocks; leave --compile out, or --where"
        )
    root, recipe = repository()
    named, _, revision = options.against.rpartition("@")
    commit = commit_of(root, revision or "HEAD")
    if named:  # as typed, from the folder where it was typed; or a path in the repository
        path = os.path.relpath(os.path.realpath(named), root)
        named = named if path.startswith("..") else path
    words = training_words(options, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        tree = os.path.join(folder, "tree")
        other = unpack(root, commit, named or recipe, tree)
        outs = []
        for version in (working_tree(root, recipe), other):
            out = os.path.join(folder, f"run{len(outs)}")
            outs.append(out)
            n = processes_of(cfg)
            print(
                f"check_parity: a step of {version.name} ({n} process{'es' * (n > 1)}) ...",
                flush=True,
            )
            failed = run_version(version, "seams", words, cfg, out, steps=2)
            if failed:
                print(f"error: {version.name} does not run: {failed.text}", file=sys.stderr)
                return 2 if failed.status == 2 else 1
        loaded = set(read_loaded(outs[0])) | set(read_loaded(outs[1]))
        ours = read_seams(outs[0])
        theirs = read_seams(outs[1])
        for version, parts in ((working_tree(root, recipe), ours), (other, theirs)):
            if not parts:
                raise RuntimeError(
                    f"{version.name} calls parallel.forward_backward nowhere, so there is nothing "
                    "to compare"
                )
        seams = compare_ranks(theirs, ours)
        look = partial(look_at, seams=seams, layout=ours)
        text, status = report_seams(seams, f" from {other.name}", look)
        if not options.advice:
            text = without_advice(text)
        print(text, flush=True)
        if status:
            print_changed_files(root, commit, sorted(loaded))
    return status


def print_changed_files(root: str, commit: str, loaded: list[str]) -> None:
    """Print the loaded files with changes since the commit."""
    changed = git(root, "diff", "--stat=100", commit, "--", *loaded).decode(errors="replace")
    print(f"changed since {title_of(root, commit)}, of the files that the runs load:")
    print(changed.rstrip("\n") or "  none", flush=True)
