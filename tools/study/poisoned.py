"""Train a recipe with its validation text exchanged: python tools/study/poisoned.py RECIPE FLAGS.

Each window of the validation split is handed out back to front. A recipe whose training reads the
validation split then trains something else, and a recipe that only measures with it does not. The
gate of a campaign (tools/study/gates.py) compares both to the bit.
"""

import os
import runpy
import sys

MARK = "validation_exchanged"  # a file in the run folder: the validation was read, and exchanged


def exchange_validation(TokenData, out: str) -> None:
    """Change windows() of a class. out: the run folder."""
    usual = TokenData.windows

    def windows(self, split, numbers):
        found = usual(self, split, numbers)
        if split == "val":
            os.makedirs(out, exist_ok=True)
            open(os.path.join(out, MARK), "w").close()
            for row in found:
                n = (row >= 0).sum()  # after the end of the text a row has -1
                row[:n] = row[:n][::-1].copy()
        return found

    TokenData.windows = windows


if __name__ == "__main__":
    recipe = sys.argv[1]
    sys.argv = sys.argv[1:]
    sys.path[0] = os.path.dirname(os.path.abspath(recipe))
    if not os.path.isfile(os.path.join(sys.path[0], "data.py")):  # a recipe in forks/
        sys.path.insert(0, os.path.dirname(sys.path[0]))
    import data

    outs = [word.partition("=")[2] for word in sys.argv if word.startswith("--out=")]
    exchange_validation(data.TokenData, outs[-1])
    runpy.run_path(recipe, run_name="__main__")
