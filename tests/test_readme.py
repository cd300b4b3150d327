"""tests/README.md says what is promised, who judges and where; it is made from the first lines of
the test files.

    python tests/test_readme.py     # writes it
"""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
ROOMS = {  # a folder of tests -> what of the house it looks at, in the order of the floors
    "models": "models/",
    "flags": "flags/",
    "training": "training/",
    "distributed": "distributed/",
    "corpus": "corpus/",
    "storage": "storage/",
    "lora": "lora/",
    "sft": "sft/",
    "rl": "rl/",
    "tools": "tools/",
    ".": "recipes, parallel.py, data.py, checkpoint.py, and the house as a whole",
    "forks": "forks/",
    "exercises": "exercises/ and the course",
    "nullcuda": "the paths of a GPU, on a device that computes nothing (`make test-cuda`)",
}
JUDGES = {  # who judges -> what the code of such a test has
    "transformers": r"^\s*(import|from) transformers",
    "peft": r"^\s*import peft",
    "torch": r"torch\.(optim\.(AdamW|Muon)|nn\.functional\.cross_entropy)|fully_shard",
    "one process": r"\b(compare|reference|pool|on_a_layout|whole_run|launch)\b\(",
    "real processes": r"\b(run_program|start_program|ended|Job)\(",
    "kill -9": r"SIGKILL",
    "a planted mistake": r"\b(mutate|planted_bug|plant|MISTAKE|EDITS|changed_forward)\b",
}
TOP = """\
# What is promised, who judges, where

Made by `python tests/test_readme.py` from the first lines of the test files, in the order of the
floors of the house. Judges are those that the code of a file calls; where none is named, the
expected values are written out in the tests: formulas, loops, lines. `make test` runs the quick
tests, `make test-slow` the others; files marked with * have tests of both kinds, files marked with
** are slow as a whole.

"""


def promise_of(source: str) -> str:
    """The first paragraph of a file's docstring."""
    first = ast.get_docstring(ast.parse(source)).split("\n\n")[0]
    return " ".join(first.split()).replace("|", "\\|")


def mark_of(source: str) -> str:
    if re.search(r"^pytestmark = .*\bslow\b", source, re.M):
        return " **"
    return " *" if "mark.slow" in source else ""


def table_of(folder: str) -> str:
    rows = ["| promised | judges | file |", "|---|---|---|"]
    for path in sorted((TESTS / folder).glob("test_*.py")):
        source = path.read_text()
        judges = [name for name, code in JUDGES.items() if re.search(code, source, re.M)]
        file = path.relative_to(TESTS)
        rows.append(f"| {promise_of(source)} | {', '.join(judges)} | `{file}`{mark_of(source)} |")
    return "\n".join(rows)


def readme() -> str:
    parts = [f"## {what}\n\n{table_of(folder)}\n" for folder, what in ROOMS.items()]
    return TOP + "\n".join(parts)


def test_the_readme_is_that_of_these_files():
    assert (TESTS / "README.md").read_text() == readme(), "type: python tests/test_readme.py"


def test_every_folder_of_tests_is_a_room():
    assert {str(path.parent.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")} == set(ROOMS)


if __name__ == "__main__":
    (TESTS / "README.md").write_text(readme())
