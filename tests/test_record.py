"""tools/parity_half.py: a recipe runs as if started by python, and the arguments of clip_grad_norm are recorded."""
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tools import parity

ROOT = Path(__file__).parent.parent
PARALLEL = '''
def clip_grad_norm(stages, max_norm, layout, scale=0.5):
    """Of this fork, and not the house's."""
    for stage in stages:
        for p in stage.parameters():
            p.grad *= scale
    return "the norm"
'''
RECIPE = '''
"""A recipe."""
import json, sys, types
import torch, parallel
from neighbour import name
from parallel import clip_grad_norm

class Config: "so that its source can be read"

if __name__ == "__main__":
    import inspect
    stage, layout = torch.nn.Linear(1, 2, bias=False), types.SimpleNamespace(rank=0, world_size=1, pp=1)
    norms = []
    for step in range(4):
        stage.weight.data.fill_(step)
        stage.weight.grad = torch.full((2, 1), float(step))
        if step < 2:
            norms.append(clip_grad_norm([stage], 1.0, layout))
        else:
            norms.append(parallel.clip_grad_norm(layout=layout, max_norm=1.0, stages=[stage], scale=2))
    print(json.dumps({"argv": sys.argv, "path": sys.path[0], "file": __file__, "own source": open(__file__).read()[:15],
                      "doc": sys.modules["__main__"].__doc__, "source": inspect.getsource(Config), "neighbour": name,
                      "norms": norms, "gradient": stage.weight.grad.tolist(), "what it is": parallel.clip_grad_norm.__doc__}))
    raise SystemExit(7)
'''


@pytest.fixture
def fork(tmp_path) -> Path:
    folder = tmp_path / "a fork"
    folder.mkdir()
    for name, text in {"mine.py": RECIPE, "parallel.py": PARALLEL, "neighbour.py": "name = 'mine'\n"}.items():
        (folder / name).write_text(text)
    return folder


def test_a_recipe_runs_as_if_started_by_python_and_is_recorded(fork, tmp_path):
    """From any folder, with imports from the recipe's folder; for every way to call clip_grad_norm, gradients are unscaled."""
    commands = [[sys.executable, *before, fork / "mine.py", "--flag", "x"]
                for before in ([], [ROOT / "tools" / "parity_half.py", tmp_path / "record"])]
    pipes = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    both = [subprocess.Popen(command, cwd=tmp_path, **pipes) for command in commands]
    (plain, _), (recorded, errors) = (process.communicate(timeout=100) for process in both)
    assert [process.returncode for process in both] == [7, 7] and recorded == plain, errors
    said = json.loads(plain)
    assert said["path"] == str(fork) and said["argv"] == [str(fork / "mine.py"), "--flag", "x"] and said["neighbour"] == "mine"
    assert said["gradient"] == [[6.0], [6.0]]
    assert sorted(file.name for file in (tmp_path / "record").iterdir()) == [f"{step}-0.pt" for step in range(4)]
    for step in range(4):
        part = torch.load(tmp_path / "record" / f"{step}-0.pt")
        for kind in "gradient", "weight":
            assert part[kind].keys() == {"weight"} and part[kind]["weight"].tolist() == [[step], [step]]


def test_a_recipe_without_clip_grad_norm_has_nothing_to_compare(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text('{"loss": 1.0}\n')
    with pytest.raises(RuntimeError, match="calls parallel.clip_grad_norm nowhere"):
        parity.read_records(str(tmp_path / "out"))
