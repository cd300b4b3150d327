"""What a wrong command line is told: one line of stderr and status 2, before anything is computed
or written.

A row: what is typed, and a regular expression that the line must match. All programs run in this
process, in a folder with a text, token shards and a tokenizer; what a layout cannot do is in
test_refusals.py, what a file may hold beside its reader.
"""

import importlib
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from programs import run_nested
from tables import as_parameters, read_table

from corpus import commands as data_commands
from data import DataConfig, open_data
from storage import commands as checkpoint_commands
from tools.run import run

REPO = Path(__file__).parents[2]
TINY = "--data shards --model_args n_layers=1,dim=8,ffn_dim=8 --steps 2 --device cpu --out run"
BASE = {
    "train_llama3": TINY,
    "train_qwen3": "--out run",
    "train_deepseek": "--out run",
    "grpo": "--out run",
}


def rows_of_all_programs() -> dict[str, tuple[str, str, str]]:
    """{"messages.txt:LINE": (program, what is typed, what the line must match)}"""
    found = {}
    for program, rows in read_table("flags/messages.txt").items():
        for line, row in rows.items():
            typed, message = row.split("=> ")
            found[line] = (program, typed, message)
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    root = tmp_path_factory.mktemp("messages")
    folder = root / "here"
    (folder / "folder").mkdir(parents=True)
    (folder / "book.txt").write_text("".join(f"line {i} of {i * i}\n" for i in range(3000)))
    for name in ("table.csv", "list.json"):
        (folder / name).write_text('{"text": "x"}')
    (folder / "empty.txt").touch()
    (folder / "other.jsonl").write_text(json.dumps({"content": "word"}))
    (folder / "one.jsonl").write_text(json.dumps({"text": "word " * 3000}))
    (folder / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "u"}]}')
    (folder / "a.txt.gz").write_bytes(b"1")
    cut = open_data(
        DataConfig(data=str(folder / "book.txt"), cache_dir=str(root / "cache")), 32
    ).folder
    shutil.copytree(cut, folder / "shards")
    shutil.copy(cut / "tokenizer.json", folder / "t.json")
    return folder


@pytest.mark.parametrize("row", as_parameters(rows_of_all_programs()))
def test_a_wrong_command_line_is_told_in_one_line(place, monkeypatch, capsys, row):
    program, typed, message = row
    monkeypatch.chdir(place)
    monkeypatch.setenv("XDG_CACHE_HOME", str(place.parent / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    argv, module = (
        shlex.split(f"{BASE.get(program, '')} {typed}".replace("REPO", str(REPO))),
        importlib.import_module(program),
    )
    monkeypatch.setattr(sys, "argv", [f"{program}.py", *argv])
    monkeypatch.setattr(subprocess, "run", run_nested)  # ablate.py asks each recipe
    before = sorted(os.listdir(place))
    # whose checks end in forked processes
    monkeypatch.setattr(os, "_exit", sys.exit if program != "ablate" else os._exit)
    with pytest.raises(SystemExit) as stop:
        if program == "ablate":
            runpy.run_path(str(REPO / "ablate.py"), run_name="__main__")
        elif program in ("data", "checkpoint"):
            main = {"data": data_commands, "checkpoint": checkpoint_commands}[program].main
            main(argv) if program == "checkpoint" else main()
        elif program == "generate":
            module.main(argv)
        else:
            run(module.main, module.Config)
    out, err = capsys.readouterr()
    assert stop.value.code == 2, err
    assert err.count("\n") == 1, err
    assert re.search(message, err), err
    assert err.startswith("error: ")
    assert "loss" not in out
    assert not dist.is_initialized()
    made = set(os.listdir(place)) - set(before)  # a run is locked before its data is opened
    assert made <= ({"run"} if "--data" in typed else set())
    assert not (place / "run" / "metrics.jsonl").exists()
    shutil.rmtree(place / "run", ignore_errors=True)
