"""The proof of the proof: mistakes that users of other trainers have met are seeded here, and the
comparison of test_parallel.py must catch each one and name the parameter.

The mistakes are the bugs of exercises/. A mutant makes a context manager that plants one inside the
workers, and mends it.
"""

from pathlib import Path

import pytest
from layouts import compare
from mistakes import MUTANTS, NAMED

REPO = Path(__file__).parent.parent


# Bugs 1 and 2 change a table and a method with super(), which nobody can swap in a running process.


@pytest.mark.parametrize("name", MUTANTS)
def test_mistake_is_caught_and_named(name):
    mutant, row = MUTANTS[name]
    assert NAMED[name][0] in compare(*row, mutate=mutant)
