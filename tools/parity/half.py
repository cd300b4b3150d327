"""Run a recipe as python would, and record the gradients and weights of each step: one half of
--check_parity.

    python tools/parity/half.py FOLDER recipe.py --steps 3 ...
    python tools/parity/half.py --where FOLDER recipe.py --steps 2 ...   # every operation of a step: tools/parity/operations.py

The recipe needs no change: before its start, functions of parallel.py are replaced by functions
that record and then call the real ones (tools/parity/operations.py).
"""

import os
import runpy
import sys
from pathlib import Path


def main():
    """Imitate `python recipe.py --flags`, and record."""
    where = sys.argv[1] == "--where"
    folder, recipe, *flags = sys.argv[2:] if where else sys.argv[1:]
    sys.argv = [recipe, *flags]
    # as `python recipe.py` sets sys.path[0]
    sys.path[0] = os.path.dirname(os.path.realpath(recipe))
    # The house comes after the recipe's folder, because parallel is imported before a recipe can
    # extend sys.path itself; and before installed packages, because a package may be called
    # distributed.
    sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
    import distributed.initial
    from tools.parity.operations import gradients_of_all_steps, seams_of_a_step

    # a weight of 0 hides the gradients behind: LoRA's B at 0 makes the gradient of A 0
    distributed.initial.ZERO = 0.01
    with seams_of_a_step(folder) if where else gradients_of_all_steps(folder):
        runpy.run_path(os.path.abspath(recipe), run_name="__main__")


if __name__ == "__main__":
    main()
