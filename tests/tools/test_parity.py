"""--check_parity: the user compares a layout with a single process; against tools/parity/check_parity.py."""

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Literal
from unittest import mock

import pytest
import torch
from runs import REPO
from test_refusals import MODEL

import tools.parity.check_parity
import train_llama3
from distributed.refusals import check_layout
from flags.config import Need, flag, parse_config
from tools.parity import check_parity as parity
from tools.parity.check_parity import check_parity
from tools.reports.options import with_report_flags


@dataclass(kw_only=True)
class Fork(train_llama3.Config):
    # own flag
    wide: bool = flag(
        False, Need("without --tp 2 or more and dim 32", lambda c: c.tp > 1 and c.dim == 32)
    )


def test_both_halves_of_check_parity_are_given_no_flag_in_vain(tmp_path, monkeypatch):
    """Flags that need the layout get their default on a single process; with a feature also its
    details are off."""
    argv = (
        "--tp 2 --pp 2 --no-loss_parallel --pp_schedule GPipe --wide --ac selective --ac_every 3 "
        "--export_hf new --export_dtype bfloat16 --exclude_from_loading head --load_step 3 "
        "--model_args dim=32"
    ).split()
    cfg = parse_config(Fork, argv)
    halves = []
    (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
    cfg.out = str(tmp_path)  # with a checkpoint, so that --exclude_from_loading has an effect

    def started(command, **kwargs):
        halves.append(
            parse_config(with_report_flags(Fork), command[command.index("recipe.py") + 1 :])
        )
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(sys, "argv", ["recipe.py", *argv])
    monkeypatch.setattr(parity, "subprocess", SimpleNamespace(run=started))
    monkeypatch.setattr(tools.parity.check_parity, "read_records", lambda out: [{"gradient": {}}])
    monkeypatch.setattr(tools.parity.check_parity, "print_comparison", lambda *records: 0)
    assert check_parity(train_llama3.main, cfg) == 0
    one, layout = halves
    for half, size in (one, 1), (layout, 4):
        check_layout(
            half,
            replace(MODEL, dim=32),
            seq_len=64,
            local_batch_size=4,
            global_batch_size=4,
            device="cpu",
            world_size=size,
        )
        assert (half.export_dtype, half.exclude_from_loading) == ("float32", [])
    named = ("tp", "loss_parallel", "pp_schedule", "wide", "ac", "ac_every")
    assert [getattr(one, name) for name in named] == [1, True, "1F1B", False, "none", 2]
    assert [getattr(layout, name) for name in named] == [2, False, "GPipe", True, "selective", 3]
    # before anything is started
    with pytest.raises(ValueError, match="--cp_method alltoall has no effect without --cp 2"):
        cfg.cp_method = "alltoall"
        check_parity(train_llama3.main, cfg)
    assert len(halves) == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv, same",
    [
        ("", True),
        ("--lr 0.1 --dp_replicate 1 --seq_len 64", True),
        ("--ac full", False),
        ("--cpu_offload", False),
        ("--compile", False),
        ("--cp 2", False),
    ],
)
def test_check_parity_needs_something_to_compare(argv, same, monkeypatch):
    """A process compared with itself would hide every mistake of a recipe."""
    cfg = parse_config(train_llama3.Config, argv.split())
    started = []
    run = lambda command, **kwargs: started.append(command) or mock.Mock(returncode=0)  # noqa: E731
    monkeypatch.setattr(tools.parity.check_parity.subprocess, "run", run)
    monkeypatch.setattr(tools.parity.check_parity, "read_records", lambda out: [{"gradient": {}}])
    monkeypatch.setattr(tools.parity.check_parity, "print_comparison", lambda *records: 0)
    with pytest.raises(ValueError, match="add a layout like --tp 2") if same else nullcontext():
        check_parity(train_llama3.main, cfg)
    assert len(started) == (0 if same else 2)


def test_check_parity_of_an_optimizer_that_it_does_not_know(monkeypatch, tmp_path):
    """After the first update the limit of rounding is unknown, but below the size of a mistake."""

    @dataclass(kw_only=True)
    class Fork(train_llama3.Config):
        optimizer: Literal["lion", "adamw"] = "lion"

    one = {"w": torch.ones(2)}
    known = dict(loss=1.0, norm=1.0, hash="0", buffer={}, uneven=set(), trained={"w"})
    steps = [known | dict(gradient=one, weight=one, update=one) for _ in range(3)]
    off = [
        dict(step, gradient={"w": torch.full((2,), 1.0 + 0.04 * n)}) for n, step in enumerate(steps)
    ]
    far = [
        dict(step, gradient={"w": torch.full((2,), 1.0 + 0.4 * n)}) for n, step in enumerate(steps)
    ]
    still = [dict(step, update={"w": torch.zeros(2)}) for step in steps]
    monkeypatch.setattr(
        tools.parity.check_parity.subprocess, "run", lambda *args, **kwargs: mock.Mock(returncode=0)
    )
    for optimizer, layout, status in (
        ("lion", off, 0),
        ("lion", off[::-1], 1),
        ("lion", far, 1),
        ("lion", still, 1),
        ("adamw", off, 1),
        ("adamw", steps, 0),
    ):
        records = iter([steps, layout])
        monkeypatch.setattr(
            tools.parity.check_parity, "read_records", lambda out, records=records: next(records)
        )
        cfg = Fork(optimizer=optimizer, tp=2)
        assert check_parity(train_llama3.main, cfg) == status


# --------------------------------------------------------- tools/parity/half.py: the recording half
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
    for name, text in {
        "mine.py": RECIPE,
        "parallel.py": PARALLEL,
        "neighbour.py": "name = 'mine'\n",
    }.items():
        (folder / name).write_text(text)
    return folder


def test_a_recipe_runs_as_if_started_by_python_and_is_recorded(fork, tmp_path):
    """From any folder, with imports from the recipe's folder; for every way to call clip_grad_norm,
    gradients are unscaled."""
    commands = [
        [sys.executable, *before, fork / "mine.py", "--flag", "x"]
        for before in ([], [REPO / "tools" / "parity" / "half.py", tmp_path / "record"])
    ]
    pipes = dict(text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    both = [subprocess.Popen(command, cwd=tmp_path, **pipes) for command in commands]
    (plain, _), (recorded, errors) = (process.communicate(timeout=100) for process in both)
    assert [process.returncode for process in both] == [7, 7] and recorded == plain, errors
    said = json.loads(plain)
    assert (
        said["path"] == str(fork)
        and said["argv"] == [str(fork / "mine.py"), "--flag", "x"]
        and said["neighbour"] == "mine"
    )
    assert said["gradient"] == [[6.0], [6.0]]
    assert sorted(file.name for file in (tmp_path / "record").iterdir()) == [
        f"{step}-0.pt" for step in range(4)
    ]
    for step in range(4):
        part = torch.load(tmp_path / "record" / f"{step}-0.pt")
        for kind in "gradient", "weight":
            assert part[kind].keys() == {"weight"} and part[kind]["weight"].tolist() == [
                [step],
                [step],
            ]


def test_a_recipe_without_clip_grad_norm_has_nothing_to_compare(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text('{"loss": 1.0}\n')
    with pytest.raises(RuntimeError, match="calls parallel.clip_grad_norm nowhere"):
        parity.read_records(str(tmp_path / "out"))
