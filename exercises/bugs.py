"""Mistakes to find, written as a hurried author would write them. tests/test_mutants.py plants the
same mistakes.

Bug 7 is bug07.md: the symptom, a command that shows the symptom, hints, and the mistake as a diff.
`start --bug 7` applies the diff to a copy of the project. The check accepts any repair: the layouts
of BUGS[7] must train like plain torch on one process.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from course import HERE, HOUSE

TASK = """{head}
In this copy of the project somebody has changed a few lines of {where}, comments included. Find them,
and repair them. What helps, with the flags of the command above after it:

    python RECIPE.py --check_parity           one process and this layout, compared: the first parameter that differs
    python RECIPE.py --check_parity --where   the first operation that differs
    python RECIPE.py --explain                how each parameter is split, what travels, and why (without --check_parity);
                                              what should travel is in docs/parallelism.md

Both halves of `--check_parity` run the code in this folder. A mistake that one process makes as well is in both of them, and
then they are equal: there the numbers have to be compared with what the docstrings promise.

Any repair is right under which every layout trains what plain torch trains on one process.
"""
PLAIN = dict(n=4, b=2)
TIED = dict(n=4, b=2, tie_embeddings=True)
OLMO = dict(n=4, b=2, model="olmo3")
MOE = dict(model="qwen3", n_experts=8, top_k=2, moe_ffn_dim=32)
MOE_1 = dict(n=4, b=1, **MOE)
MOE_2 = dict(n=4, b=2, **MOE)
ONE = (1, {}, PLAIN)
ONE_MOE = (1, {}, MOE_1)
ZERO_BUBBLE = dict(pp=2, pp_schedule="InterleavedZeroBubble")


@dataclass(frozen=True)
class Bug:
    number: int
    mutant: str  # name of the mistake in tests/mistakes.py
    # layouts to compare with one process: (processes, flags, problem), see tests/layouts.py
    rows: tuple[tuple, ...]

    def page(self) -> tuple[str, list[str], str]:
        """(title and command, hints, the mistake as a diff)."""
        head, hints, mistake = re.split("\n## .*\n", (HERE / f"bug{self.number:02}.md").read_text())
        return head, [hint.strip() for hint in hints.split("\n\n") if hint.strip()], mistake

    def check(self):
        check_rows(self.rows)


def check_rows(rows):
    import feedback

    for processes, flags, problem in rows:
        if difference := feedback.compare(processes, flags, problem):
            layout = ", ".join(f"{k} {v}" for k, v in flags.items()) or "no axis but dp_shard"
            ranks = f"{processes} process{'es' * (processes > 1)}, {layout}"
            raise feedback.Wrong(f"{ranks}: differs from plain torch: {difference}")


def check_all():
    """The layouts of all bugs: for a mistake that is in no list."""
    rows = []
    for bug in BUGS.values():
        rows += [row for row in bug.rows if row not in rows]
    check_rows(rows)


BUGS = {
    n: Bug(n, mutant, rows)
    for n, (mutant, *rows) in enumerate(
        [
            ("norm_without_all_reduce", (2, dict(tp=2), PLAIN), ONE),
            ("waiting_embedding", (2, dict(tp=2), PLAIN), ONE),
            (
                "reshard_in_zero_bubble",
                (4, ZERO_BUBBLE, dict(n=16, b=4)),
                (4, dict(pp=2), dict(n=16, b=4)),
            ),
            ("mean_of_means", (2, {}, PLAIN), ONE, (2, dict(cp=2), PLAIN)),
            ("masked_tokens_counted", (2, {}, PLAIN), ONE),
            ("tied_weight_counted_twice", (2, dict(pp=2), TIED), (2, dict(pp=2), PLAIN), ONE),
            ("tied_gradient_not_exchanged", (2, dict(pp=2), TIED), (2, dict(pp=2), PLAIN), ONE),
            (
                "positions_not_balanced",
                (2, dict(cp=2), PLAIN),
                (2, dict(cp=2, cp_method="alltoall"), PLAIN),
                ONE,
            ),
            ("averaged_gradients", (2, {}, PLAIN), (4, dict(dp_replicate=2), dict(n=8, b=2)), ONE),
            (
                "experts_not_reduced_over_tp",
                (2, dict(tp=2), MOE_2),
                (2, dict(ep=2), MOE_1),
                ONE_MOE,
            ),
            ("weights_doubled_on_the_way", (2, dict(ep=2), MOE_1), (2, dict(tp=2), MOE_2), ONE_MOE),
            ("balancing_loss_per_microbatch", (2, dict(ep=2), MOE_1), ONE_MOE),
            ("own_load_only", (2, dict(ep=2), MOE_1), (2, dict(pp=2), MOE_1), ONE_MOE),
            ("norm_of_own_stage", (2, dict(pp=2), PLAIN), (2, dict(tp=2), PLAIN), ONE),
            ("norm_of_own_heads", (2, dict(tp=2), OLMO), (1, {}, OLMO)),
        ],
        1,
    )
}


def places() -> list[Path]:
    """The files that can hold a mistake; a repair is read from them."""
    return [
        HOUSE / "parallel.py",
        *sorted((HOUSE / "distributed").glob("*.py")),
        HOUSE / "forks" / "norm_over_heads.py",
    ]


def planted_bug(bug: Bug) -> dict[str, str]:
    """file -> text with the mistake."""
    return planted_diff(
        bug.page()[2].partition("```diff\n")[2].partition("```")[0], f"bug {bug.number}"
    )


def planted_diff(diff: str, name: str) -> dict[str, str]:
    """file -> the project's text with the changes of a diff. A file begins with "--- FILE", a
    change with "@@"; git's and diff's own output have this form. Raises ValueError unless the old
    lines of each change stand in the file exactly once."""
    texts = {}
    for file, hunks in re.findall(
        r"^--- (?:a/)?(\S+)[^\n]*\n(?:\+\+\+ [^\n]*\n)?(.*?)(?=^---|^diff |\Z)", diff, re.M | re.S
    ):
        if HOUSE / file not in places():
            raise ValueError(
                f"{name} changes {file}; a mistake is to be in parallel.py or in a file of "
                "distributed/"
            )
        texts[file] = (HOUSE / file).read_text()
        for hunk in re.split(r"^@@.*\n", hunks, flags=re.M):
            lines = [line for line in hunk.splitlines(keepends=True) if line[0] in " -+"]
            old, new = (
                "".join(line[1:] for line in lines if line[0] in kinds) for kinds in (" -", " +")
            )
            if not lines:
                continue
            if texts[file].count(old) != 1:
                raise ValueError(
                    f"{name}: {file} has the old lines of a change {texts[file].count(old)} "
                    "times, and must have "
                    f"them once; the change begins with {lines[0].strip()!r}"
                )
            texts[file] = texts[file].replace(old, new)
    if not texts:
        raise ValueError(
            f"{name} holds no change: lines '--- parallel.py', then '-old' and '+new', changes "
            "separated by '@@'"
        )
    return texts
