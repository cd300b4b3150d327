"""The proof of the proof: mistakes that users of other trainers have met are seeded here, and the
comparison of test_parallel.py must catch each one and name the parameter.

The mistakes are the bugs of exercises/. A mutant makes a context manager that plants one inside the
workers, and mends it.
"""

import ast
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from bugs import BUGS, planted_bug
from course import functions, source_of
from feedback import replaced
from layouts import compare

import parallel

REPO = Path(__file__).parent.parent


def changed_functions(bug) -> dict:
    """{file: {function: its source with the mistake}}"""
    found = {}
    for file, text in planted_bug(bug).items():
        before = functions(Path(REPO, file).read_text())
        after = functions(text)
        found[file] = {
            name: source_of(text, name)
            for name in before
            if ast.dump(after[name]) != ast.dump(before[name])
        }
    return found


# Bugs 1 and 2 change a table and a method with super(), which nobody can swap in a running process.


class PlainStyle(torch.distributed.tensor.parallel.ParallelStyle):
    def _apply(self, module, mesh):
        return module


class Waiting(parallel.VocabEmbedding):
    def _apply(self, module, mesh):
        module = super(parallel.VocabEmbedding, self)._apply(module, mesh)
        module.register_forward_hook(
            lambda module, args, out: out.wait() if hasattr(out, "wait") else out
        )
        return module


BY_HAND = {
    "norm_without_all_reduce": partial(mock.patch.dict, "parallel.TP_STYLES", sequence=PlainStyle),
    "waiting_embedding": partial(mock.patch.dict, "parallel.TP_STYLES", vocab_embedding=Waiting),
}
# mutant -> (what the report must name; the seam, and the function or style, that test_where.py
# finds)
NAMED = {
    name: words
    for name, *words in (
        line.split(" | ")
        for line in Path(__file__).with_name("mutants.txt").read_text().splitlines()[1:]
    )
}
# name -> (the mutant, the first layout of the bug's check)
MUTANTS = {
    bug.mutant: (BY_HAND.get(bug.mutant) or partial(replaced, changed_functions(bug)), bug.rows[0])
    for bug in BUGS.values()
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mistake_is_caught_and_named(name):
    mutant, row = MUTANTS[name]
    assert NAMED[name][0] in compare(*row, mutate=mutant)
