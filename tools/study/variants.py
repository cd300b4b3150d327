"""The variants of a study: names, recipes and flags of ablate.py's command line. Each recipe checks
its own."""

import argparse
import ast
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from flags.files import sha256_file
from flags.progress import Progress
from tools.study.study import folder_of, locate


# ---------------------------------------------------------------- from the command line
def grid_of(flag: str, items: list[str]) -> list[tuple[str, list[str]]]:
    """[(name, flags)] of all combinations of FLAG=A,B; a single one without a name if there are no items."""
    axes = []
    for item in items:
        name, equals, values = item.partition("=")
        separator = ","
        if ";" in values:
            separator = ";"
        texts = values.split(separator)
        if not equals or "" in texts:
            raise ValueError(f"{flag} {item!r}: need FLAG=A,B")
        axes.append([f"{name.lstrip('-')}={text}" for text in texts])
    grid = []
    for cell in itertools.product(*axes):
        grid.append((" ".join(cell), [f"--{text}" for text in cell]))
    return grid


def named_variants(items: list[str], recipes: list[str]) -> list[tuple[str, str, list[str]]]:
    """[(name, recipe, flags)] of each --variant. Without --variant: the recipes, without a name."""
    if not items:
        return [("", recipe, []) for recipe in recipes]
    named = []
    for item in items:
        name, colon, text = item.partition(":")
        name = name.strip()
        if not colon or not name:
            raise ValueError(
                f"--variant {item!r}: need 'NAME: FLAGS' or 'NAME: RECIPE FLAGS', where FLAGS may "
                "be empty"
            )
        words = shlex.split(text)
        if words and not words[0].startswith("-"):
            named.append((name, words[0], words[1:]))
            continue
        if not recipes:
            raise ValueError(
                f"--variant {item!r} names no recipe: write one after the name, or before all flags"
            )
        for recipe in recipes:
            named.append((name, recipe, words))
    return named


def variants_of(args: argparse.Namespace, common: list[str]) -> dict[str, dict]:
    """{name: {"recipe", "flags"}}, the baseline first. common: flags of every run."""
    found = {}
    folders = set()
    for name, recipe, flags in named_variants(args.variant, args.recipes):
        stem = Path(recipe).name.replace(".py", "")
        for cell, more in grid_of("--vary", args.vary):
            parts = [name, cell]
            if len(args.recipes) > 1 and recipe in args.recipes:
                parts.insert(0, stem)
            full = " ".join(filter(None, parts)) or stem
            folder = folder_of("", full, 0)
            if folder in folders:
                raise ValueError(f"two variants are called {full!r}; give each a name of its own")
            folders.add(folder)
            found[full] = {"recipe": recipe, "flags": [*common, *flags, *more]}
    if len(found) < 2 and not args.ladder:
        raise ValueError(
            "one variant is nothing to compare: give --vary, two --variant, or a second recipe"
        )
    baseline = args.baseline or next(iter(found))
    if baseline not in found:
        names = ", ".join(map(repr, found))
        raise ValueError(f"--baseline {baseline!r} is none of the variants: {names}")
    return {baseline: found[baseline]} | found


def has_flag(words: list[str], flag: str) -> bool:
    """Whether a command line has --flag. flag: a regular expression."""
    return any(re.match(f"--({flag})(=|$)", word) for word in words)


def candidates_of(variants: dict, grid: list[tuple]) -> dict[str, dict]:
    """Each variant with each (name, flags) of a grid, as "VARIANT NAME"."""
    found = {}
    for name, variant in variants.items():
        for cell, flags in grid:
            full = f"{name} {cell}".strip()
            found[full] = variant | {"flags": [*variant["flags"], *flags]}
    return found


def at_size(variants: dict, size: str) -> dict[str, dict]:
    """The variants at one size of --ladder: their --model_args with `size` added."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model_args", default="")
    sized = set(re.findall(r"(\w+)=", size))
    found = {}
    for name, variant in variants.items():
        own, others = parser.parse_known_args(variant["flags"])
        twice = sized & set(re.findall(r"(\w+)=", own.model_args))
        if twice:
            raise ValueError(
                f"variant {name!r}: --ladder sets {', '.join(sorted(twice))} of every size; leave "
                "it out"
            )
        fields = ",".join(filter(None, (own.model_args, size)))
        found[name] = variant | {"flags": [*others, f"--model_args={fields}"]}
    return found


def set_steps(variants: dict[str, dict], unit: str, amount: float) -> None:
    """Give each variant the --steps for an amount of "tokens", "flops" or "seconds". A variant has
    each unit as a key: how many of them a step takes."""
    for name, variant in variants.items():
        if has_flag(variant["flags"], "steps|schedule_steps"):
            raise ValueError(
                f"variant {name!r}: --budget and --ladder set the steps; leave --steps and "
                "--schedule_steps out"
            )
        of_step = variant.get(unit)
        if not of_step:
            raise ValueError(
                f"variant {name!r}: the {unit} of a step of {variant['recipe']} are unknown; give "
                "--steps instead"
            )
        if not 0.5 < amount / of_step < 1e12:
            raise ValueError(
                f"variant {name!r}: {amount:,.4g} {unit} are no number of steps of "
                f"{of_step:,.4g} {unit}"
            )
        steps = round(amount / of_step)
        variant["steps"] = steps
        variant["flags"] = [*variant["flags"], f"--steps={steps}"]


# ---------------------------------------------------------------- recipes
def file_of(recipe: str, out: str) -> Path:
    """The file of a recipe. RECIPE@COMMIT is checked out, once, as a git worktree in the folder of
    the study, `out`."""
    path, at, commit = recipe.rpartition("@")
    if not at or Path(recipe).is_file():
        return Path(recipe)

    def git(*words) -> str:
        command = ["git", "-C", str(Path(path).resolve().parent), *words]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise ValueError(f"recipe {recipe}: {done.stderr.strip().splitlines()[-1]}")
        return done.stdout.strip()

    sha = git("rev-parse", "--verify", f"{commit}^{{commit}}")
    below = git("rev-parse", "--show-prefix")
    tree = Path(out, "checkouts", sha[:12]).resolve()
    if not tree.exists():
        git("worktree", "add", "--detach", str(tree), sha)
    return tree / below / Path(path).name


def sources_of(recipe: Path) -> dict[str, str]:
    """{file: sha256} of the recipe and of all files of its checkout that training may import, and
    the version of torch. tools/ has reports, which training never runs."""
    found = {"torch": str(torch.__version__)}
    waiting = [recipe.name]  # its name may have dots, such as idea_0.9.py
    while waiting:
        file = waiting.pop()
        if file != recipe.name:
            file = file.replace(".", "/") + ".py"
        path = locate(recipe, file)
        if file in found or file.startswith("tools/") or not path.is_file():
            continue
        found[file] = sha256_file(path)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                waiting += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                waiting.append(node.module)
                waiting += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def check_variants(variants: dict[str, dict], args: argparse.Namespace) -> None:
    """Check all command lines, and add to each variant: what its recipe answers to --check, the
    recipe's "file", and "files", the sources of its training. Raises ValueError."""
    sources = {}
    for name, variant in variants.items():
        for flag in ("seed", "data_seed", "out"):
            if has_flag(variant["flags"], flag):
                raise ValueError(
                    f"variant {name!r}: ablate.py sets --{flag} of every run; leave it out"
                )
        file = str(file_of(variant["recipe"], args.out))
        if not os.path.isfile(file):
            if "=" in file:
                raise ValueError(f"{file} is no file; did you mean --{file}?")
            raise ValueError(f"recipe {file} is no file")
        if file not in sources:
            sources[file] = sources_of(Path(file))
        variant["file"] = file
        variant["files"] = sources[file]

    def ask(name: str) -> dict:
        return ask_recipe(name, variants[name], folder_of(args.out, name, 0), args.nproc)

    # as many at once as there are cores: an answer is mostly the start of Python
    checking = Progress("checking command lines", len(variants), "variants")
    with checking, ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, answer in zip(variants, pool.map(ask, variants)):
            checking()
            if args.metric.startswith("val_") and not answer["val_every"]:
                raise ValueError(
                    f"variant {name!r}: no validation, so no {args.metric}: give --val_every, or "
                    "another --metric, such as loss"
                )
            variants[name] |= answer


def ask_recipe(name: str, variant: dict, out: Path, nproc: int) -> dict:
    """What a variant's own recipe, in a process of its own, answers to --check, a dict:
    tools/reports/check.py has the keys. Raises ValueError for a wrong command line."""
    command = [sys.executable, variant["file"], *variant["flags"], f"--out={out}", "--check"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    if nproc > 1:  # the first of so many processes; none connects
        env |= {"RANK": "0", "WORLD_SIZE": str(nproc)}
        env |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    said = f"ended with status {done.returncode}"
    if done.stderr.strip():
        said = done.stderr.strip().splitlines()[-1]
    is_older = "unknown flag --check;" in said
    if done.returncode and not is_older:
        raise ValueError(f"variant {name!r}: {said.removeprefix('error: ')}")
    try:
        return {"val_every": None, **json.loads(done.stdout.splitlines()[-1])}
    except (IndexError, ValueError, TypeError):
        raise ValueError(
            f"variant {name!r}: {variant['recipe']} does not answer --check: it must end with "
            "run(main, Config) of tools/run.py, version 0.11.0 or later, and no report may be "
            "among the flags"
        ) from None
