"""tests/README.md says what is promised, who judges, where, and what it costs; it is made from the
first lines of the test files, and from the seconds that the suites have printed.

    python tests/test_readme.py                      # writes it
    make test > quick.log; make test-slow > slow.log
    python tests/test_readme.py quick.log slow.log   # writes it with the seconds of these runs
"""

import ast
import json
import re
import sys
from pathlib import Path

TESTS = Path(__file__).parent
SECONDS = TESTS / "seconds.json"  # a file of tests: its CPU seconds in the quick suite, in the slow
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
tests, `make test-slow` the others. The seconds are those of a processor, of one run of both suites
on a quiet machine; where they are missing the file is newer.

"""


def promise_of(source: str) -> str:
    """The first paragraph of a file's docstring."""
    first = ast.get_docstring(ast.parse(source)).split("\n\n")[0]
    return " ".join(first.split()).replace("|", "\\|")


def seconds_of(log: str) -> dict[str, float]:
    """{file of tests: CPU seconds}: the table with which a suite ends, see clock.py."""
    rows = re.findall(r"^ +([\d.]+) +[\d.]+ +\d+  (\S+\.py)$", log, re.M)
    return {file: float(seconds) for seconds, file in rows}


def shown(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.0f}"


def table_of(folder: str) -> str:
    costs = json.loads(SECONDS.read_text())
    rows = ["| promised | judges | file | quick, s | slow, s |", "|---|---|---|---|---|"]
    for path in sorted((TESTS / folder).glob("test_*.py")):
        source = path.read_text()
        judges = [name for name, code in JUDGES.items() if re.search(code, source, re.M)]
        file = str(path.relative_to(TESTS))
        quick, slow = costs.get(file, (None, None))
        costs_both = f"{shown(quick)} | {shown(slow)}"
        rows.append(f"| {promise_of(source)} | {', '.join(judges)} | `{file}` | {costs_both} |")
    return "\n".join(rows)


def readme() -> str:
    parts = [f"## {what}\n\n{table_of(folder)}\n" for folder, what in ROOMS.items()]
    return TOP + "\n".join(parts)


def test_the_readme_is_that_of_these_files():
    assert (TESTS / "README.md").read_text() == readme(), "type: python tests/test_readme.py"


def test_every_folder_of_tests_is_a_room():
    assert {str(path.parent.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")} == set(ROOMS)


def test_seconds_are_read_from_the_end_of_a_suite():
    log = "passed\n    88.5    150.1    112  test_parallel.py\n     0.4      1.0      2  rl/test_x.py\n"
    assert seconds_of(log) == {"test_parallel.py": 88.5, "rl/test_x.py": 0.4}


def test_seconds_are_of_files_that_exist():
    for file in json.loads(SECONDS.read_text()):
        assert (TESTS / file).exists(), f"{file} has gone: take it out of {SECONDS.name}"


if __name__ == "__main__":
    if len(sys.argv) == 3:
        quick, slow = (seconds_of(Path(log).read_text()) for log in sys.argv[1:])
        files = sorted(quick.keys() | slow.keys())
        both = {file: [quick.get(file), slow.get(file)] for file in files}
        lines = [f"  {json.dumps(file)}: {json.dumps(costs)}" for file, costs in both.items()]
        SECONDS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    (TESTS / "README.md").write_text(readme())
