"""docs/own_layer.md: its changes make a model that is equal on a layout, is compared, exported and read
again; its table names every style of tp."""

import re
import shutil

import pytest
from programs import REPO
from runs import ENV, MODEL, ended, launch

PAGE = (REPO / "docs/own_layer.md").read_text()
TINY = ["--model_args", MODEL, "--seq_len", "32", "--local_batch_size", "2", "--device", "cpu"]
ROOMS = "models flags distributed training corpus storage lora sft rl tools forks".split()


def test_the_table_has_every_style():
    """Of the file: other tests import forks, which add styles of their own to parallel.TP_STYLES."""
    rows = re.findall(r"^\| `(\w+)` \|", PAGE, re.M)
    table = (REPO / "parallel.py").read_text().partition("\nTP_STYLES = {")[2].partition("\n}")[0]
    styles = re.findall(r'^    "(\w+)": ', table, re.M)
    assert "colwise" in styles and sorted(rows) == sorted(styles)


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """The project with the model and the recipe of the page: a model has to lie in models/."""
    folder = tmp_path_factory.mktemp("house")
    for room in ROOMS:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPO / room, folder / room, ignore=ignored)
    for file in REPO.glob("*.py"):
        shutil.copy(file, folder / file.name)
    recipe = (folder / "train_llama3.py").read_text()
    (folder / "train_gated.py").write_text(recipe.replace("models.llama3", "models.gated"))
    model = (folder / "models/llama3.py").read_text()
    for block in re.findall(r"```diff\n(.*?)```", PAGE, re.S):
        for hunk in block.strip("\n").split("\n\n-"):
            old = []
            new = []
            for line in f"-{hunk.removeprefix('-')}".split("\n"):
                lines = {"-": old, "+": new}[line[:1]]
                lines.append(line[1:] + "\n")
            assert model.count("".join(old)) == 1, old
            model = model.replace("".join(old), "".join(new))
    (folder / "models/gated.py").write_text(model)
    return folder


def run_in(house, *words) -> str:
    return ended(launch(1, *words), house, env=ENV).stdout


@pytest.mark.slow
def test_the_layer_is_equal_on_a_layout(house):
    out = run_in(house, "train_gated.py", *TINY, "--check_parity", "--tp", "2", "--steps", "2")
    assert "check_parity: equal in 2 steps" in out


@pytest.mark.slow
def test_the_mistake_is_named(house):
    file = house / "models/gated.py"
    right = file.read_text()
    file.write_text(right.replace("self.gate(x).sigmoid()", "self.gate(x).softmax(-1)"))
    try:
        words = ["train_gated.py", *TINY, "--check_parity", "--where", "--tp", "2"]
        out = ended(launch(1, *words), house, env=ENV, status=1).stdout
    finally:
        file.write_text(right)
    where, look = re.search(r"(first difference: [^:]+): \.\.\.\n(look at: .*)\n", PAGE).groups()
    assert where in out
    assert look in out


@pytest.mark.slow
def test_the_layer_is_compared_exported_and_read(house):
    words = ["train_llama3.py", "train_gated.py", *TINY, "--seeds", "2", "--steps", "4"]
    out = run_in(house, "ablate.py", *words, "--val_every", "4", "--out", "study")
    assert "train_gated" in out
    words = ["--tp", "2", "--dp_shard", "1", "--steps", "4", "--out", "run", "--export_hf", "hf"]
    ended(launch(2, "train_gated.py", *TINY, *words), house, env=ENV)
    common = ["--prompt", "def ", "--temperature", "0", "--max_new_tokens", "9", "--device", "cpu"]
    texts = []
    for checkpoint in ("run", "hf"):
        texts.append(run_in(house, "generate.py", "--checkpoint", checkpoint, *common))
    assert texts[0] == texts[1]
