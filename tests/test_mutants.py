"""The proof of the proof: mistakes that users of other trainers have met are seeded here, and the
comparison of test_parallel.py must catch each one and name the parameter. They are in mistakes.py.
"""

import pytest
from layouts import compare
from mistakes import MUTANTS, NAMED


@pytest.mark.parametrize("name", MUTANTS)
def test_mistake_is_caught_and_named(name):
    mutant, row = MUTANTS[name]
    assert NAMED[name][0] in compare(*row, mutate=mutant)
