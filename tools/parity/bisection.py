"""--check_parity --bisect GOOD..BAD: the commit that changed the numbers of a recipe.

Some steps of GOOD and of BAD are trained on one layout, in fp32, and then of commits halfway between
the last commit with GOOD's numbers and the first with others. Compared are the tokens, the losses,
the gradient norms, every gradient, and the updates of the weights. Uncommitted changes do not count.
"""

import math
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tools.parity import compare as parity
from tools.parity.check_parity import STEPS, is_typed
from tools.parity.versions import (
    Failure,
    changes_of_tree,
    commit_of,
    git,
    processes_of,
    read_loaded,
    repository,
    run_version,
    title_of,
    training_words,
    unpack,
)

SHOWN = 120  # lines of the hunks


class Result(NamedTuple):
    """A commit in comparison with GOOD."""

    difference: str  # "" = as GOOD
    failure: str  # the error; "" = the commit runs


@dataclass
class Search:
    """The constants of a bisection, and the results so far."""

    root: str
    recipe: str
    words: list[str]
    cfg: object
    later: float  # of compare.LATER: room after the first update; -1: to the bit
    folder: str
    steps: int
    good: dict[int, parity.Step] = field(default_factory=dict)  # records of GOOD, by step
    loaded: set[str] = field(default_factory=set)  # files that the runs have imported
    known: dict[tuple, tuple[str, Result]] = field(default_factory=dict)  # by files_of


# ---------------------------------------------------------------- one commit


def files_of(search: Search, commit: str) -> tuple:
    """The contents of all files that a run reads: of the imported files of earlier runs, and of
    tables beside these files. Two commits with the same contents, such as before and after a change
    of the documents, compute the same."""
    listed = git(search.root, "ls-tree", "-r", "-z", commit).decode(errors="replace").split("\0")
    folders = {os.path.dirname(name) for name in search.loaded}
    found = []
    for line in filter(None, listed):
        about, _, name = line.partition("\t")
        is_table = not name.endswith((".py", ".md")) and os.path.dirname(name) in folders - {""}
        if name in search.loaded or is_table:
            found.append((name, about))
    return tuple(found)


def try_commit(search: Search, commit: str) -> Result:
    """Run a commit, and compare it with GOOD. The first is GOOD."""
    key = files_of(search, commit) if search.loaded else ()
    if key in search.known:
        same, result = search.known[key]
        print(f"bisect: {title_of(search.root, commit)}: the files of {same}", flush=True)
        return result
    out = os.path.join(search.folder, "run")
    tree = os.path.join(search.folder, "tree")
    try:
        version = unpack(search.root, commit, search.recipe, tree)
        failed = run_version(
            version, "gradients", search.words, search.cfg, out, steps=search.steps
        )
    except ValueError as error:  # the recipe is not in this commit
        failed = Failure(2, str(error))
    result = Result("", failed.text) if failed else Result(compare_with_good(search, out), "")
    if not failed:
        search.loaded |= {*read_loaded(out)}
        short = title_of(search.root, commit).split(" ")[0]
        search.known[files_of(search, commit)] = short, result
    for folder in (tree, out, out + parity.RECORD):
        shutil.rmtree(folder, ignore_errors=True)
    return result


def compare_with_good(search: Search, out: str) -> str:
    """The first difference from GOOD, "" if there is none."""
    found = parity.read_run(out).steps
    if not search.good:
        search.good = found
        return ""
    for n, (step, theirs) in enumerate(found.items(), 1):
        ours = search.good[step]
        problems, _ = parity.compare_step(ours, theirs, limits_of_step(search, n))
        if problems:
            return f"step {step} differs first in {min(problems, key=place_in_order)}"
    return ""


def limits_of_step(search: Search, n: int) -> parity.Limits:
    """The largest differences of the nth step that are no difference."""
    if search.later == -1:
        return parity.Limits(*[0.0] * 6)
    limits = parity.limits_of(n, search.later)
    has_experts = any(".experts." in fqn for fqn in search.good[1].gradient)
    if has_experts and n > 1:  # a router may have sent a token to another expert
        parity.widen(limits, parity.MOVED)
    return limits


def place_in_order(problem: str) -> int:
    """For sorting the sentences of compare_step: causes before effects."""
    order = ("the tokens", "the weight", "the update", "the buffer", "the loss", "the gradient of")
    for place, beginning in enumerate(order):
        if problem.startswith(beginning):
            return place
    return len(order)


# ---------------------------------------------------------------- the search


def bisect_commits(cfg: Any, options: Any) -> int:
    """--check_parity --bisect; returns the exit status: 0 after a commit was named. Raises
    ValueError."""
    root, recipe = repository()
    good, bad, between = commits_between(root, options.bisect)
    if changes_of_tree(root):
        print(
            "bisect: the working tree has changes that are in no commit; they are not looked at",
            flush=True,
        )
    words = training_words(options, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        steps = cfg.steps if is_typed("steps") else STEPS
        search = Search(root, recipe, words, cfg, room_of(cfg, options), folder, steps)
        n = processes_of(cfg)
        print(
            f"bisect: {len(between)} commit{'s' * (len(between) > 1)} after {title_of(root, good)}; "
            f"{steps} step{'s' * (steps > 1)} on {n} process{'es' * (n > 1)} of {recipe} each, and about "
            f"{math.ceil(math.log2(len(between))) if len(between) > 1 else 0} commits to try "
            "between both ends",
            flush=True,
        )
        for end, commit in (("GOOD", good), ("BAD", bad)):
            result = try_commit(search, commit)
            if result.failure:
                raise ValueError(f"{end}, {title_of(root, commit)}, does not run: {result.failure}")
        if not result.difference:
            how = "to the bit" if search.later == -1 else "up to rounding"
            raise ValueError(
                f"{title_of(root, good)} and {title_of(root, bad)} compute the same, {how}, in "
                f"{steps} steps: nothing to find"
                + "; --expect bits finds changes of rounding"
                * (search.later != -1)
            )
        print(f"bisect: {title_of(root, bad)}: {result.difference}", flush=True)
        results = narrow(search, between, result)
        return report_commit(search, between, results)


def commits_between(root: str, text: str) -> tuple[str, str, list[str]]:
    """(GOOD, BAD, the commits after GOOD up to BAD, along the first parents). Raises ValueError."""
    first, dots, last = text.partition("..")
    if not dots or not first or last.startswith("."):
        raise ValueError(
            f"--bisect {text}: need two commits, GOOD..BAD, such as HEAD~20..HEAD; the first is the "
            "older one"
        )
    good = commit_of(root, first)
    bad = commit_of(root, last or "HEAD")
    if good == bad:
        raise ValueError(f"--bisect {text}: both are {title_of(root, good)}; give two commits")
    try:
        git(root, "merge-base", "--is-ancestor", good, bad)
    except ValueError:
        raise ValueError(
            f"--bisect {text}: {title_of(root, good)} is no ancestor of {title_of(root, bad)}; the "
            f"last that they share is {shared_commit(root, good, bad)}"
        ) from None
    listed = git(root, "rev-list", "--first-parent", "--reverse", f"{good}..{bad}")
    return good, bad, listed.decode().split()


def shared_commit(root: str, good: str, bad: str) -> str:
    try:
        return title_of(root, git(root, "merge-base", good, bad).decode().strip())
    except ValueError:
        return "none"


def room_of(cfg: Any, options: Any) -> float:
    """-1 for equal bits, else the factor of the tolerances after the first update."""
    if options.expect == "bits":
        return -1
    return parity.room_after_update(cfg)


def narrow(search: Search, between: list[str], last: Result) -> dict[int, Result]:
    """{place in between: result} of the tried commits, with place -1 for GOOD. At the end only
    failures lie between the last commit with GOOD's numbers and the first with others. last: the
    result of BAD."""
    low = -1
    high = len(between) - 1
    results = {-1: Result("", ""), high: last}
    while True:
        left = [i for i in range(low + 1, high) if i not in results]
        if not left:
            return results
        middle = min(left, key=lambda i: abs(i - (low + high) / 2))
        print(
            f"bisect: {len(left)} commit{'s' * (len(left) > 1)} left, about "
            f"{math.ceil(math.log2(len(left) + 1))} "
            f"step{'s' * (len(left) > 1)}: {title_of(search.root, between[middle])}",
            flush=True,
        )
        result = try_commit(search, between[middle])
        results[middle] = result
        if result.failure:
            print(f"bisect:   skipped, for it does not run: {result.failure}", flush=True)
        elif result.difference:
            print(f"bisect:   {result.difference}", flush=True)
            high = middle
        else:
            print("bisect:   as GOOD", flush=True)
            low = middle


def report_commit(search: Search, between: list[str], results: dict[int, Result]) -> int:
    """Print the commit that changed the numbers, with the hunks of files that a run loads."""
    good = max(i for i, result in results.items() if not result.failure and not result.difference)
    bad = min(i for i, result in results.items() if result.difference)
    about = "--format=%h  %s  (%an, %ad)"
    if bad - good > 1:
        print(
            f"bisect: one of {bad - good} commits changed the numbers, for the others between do "
            "not run:"
        )
    else:
        print("bisect: the commit that changed the numbers:")
    for commit in between[good + 1 : bad + 1]:
        line = git(search.root, "log", "-1", "--date=short", about, commit)
        print(f"  {line.decode(errors='replace').strip()}")
    print(f"  {results[bad].difference}")
    for commit in between[good + 1 : bad + 1]:
        print_hunks(search, commit)
    sys.stdout.flush()
    return 0


def print_hunks(search: Search, commit: str) -> None:
    """The changes of a commit to the files that the runs load."""
    changed = git(search.root, "diff", f"{commit}^1", commit, "--", *sorted(search.loaded))
    lines = changed.decode(errors="replace").splitlines()
    print("\n".join(lines[:SHOWN]))
    if len(lines) > SHOWN:
        print(f"... and {len(lines) - SHOWN} more lines: git show {commit[:10]}")
