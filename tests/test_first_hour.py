"""docs/first_hour.ipynb, against the project: every cell runs, from top to bottom, and the commands say
what the text claims."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from programs import REPO

NOTEBOOK = REPO / "docs" / "first_hour.ipynb"
# After the recipe's name in a command that trains or compares: a 16th of the tokens of a step. The
# notebook's own flags stay.
SMALL = "--local_batch_size 2 --seq_len 64"
RECIPES = ("train_llama3.py --optimizer", "train_mine.py --dp_shard", 'train_mine.py" --seeds')


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def run_cell(source: str, names: dict) -> str:
    """What a cell prints. As in a notebook, a line that begins with ! is a command for a shell, with
    Python values in braces, and the last value shows itself."""
    printed = []
    python = []

    def run_python():
        exec("\n".join(python), names)  # a notebook's code is code
        python.clear()

    for line in source.splitlines():
        if not line.startswith("!"):
            python.append(line)
            continue
        run_python()
        command = line[1:].format_map(names)
        for recipe in RECIPES:
            script, _, flags = recipe.partition(" ")
            command = command.replace(recipe, f"{script} {SMALL} {flags}")
        done = subprocess.run(
            ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, timeout=500
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        printed.append(done.stdout)
    run_python()
    return "".join(printed)


def test_the_notebook_is_one_and_has_no_outputs():
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    for recipe in RECIPES:
        assert recipe in "\n".join(code_cells()), "SMALL has no place in this command any more"
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        assert not cell.get("outputs"), (
            "clear the outputs: they hold times and folders of a machine"
        )


@pytest.mark.slow
def test_every_cell_runs(tmp_path, monkeypatch):
    """In a copy of the project, because the notebook writes into runs/."""
    tree = tmp_path / "nanotitan"
    files = subprocess.run(
        ["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True
    ).stdout.split()
    for name in files:
        if (REPO / name).is_file() and not name.startswith("docs/pictures/"):
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            (tree / name).write_bytes((REPO / name).read_bytes())
    for name in ("PATH", "PYTHONPATH", "OMP_NUM_THREADS"):  # set by the first cell
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.chdir(tree)
    names = {}
    said = [run_cell(source, names) for source in code_cells()]
    text = "\n".join(said)
    assert "not solved yet" in text
    assert "mean of the micro-batches" in text or "mean of means" in text
    assert "exercise 1 is solved" in text
    assert "NOT EQUAL" in text
    wrong, right = [out for out in said if "check_parity" in out]
    assert "exit status 1" in wrong
    assert "NOT EQUAL" not in right
    assert "mine" in said[-1]
    assert names["Picture"]("runs/first_hour/llama3/loss.png")._repr_png_().startswith(b"\x89PNG")
    assert "iframe" in names["Page"]("runs/first_hour/layout.html")._repr_html_()
    assert Path(sys.executable).exists()
