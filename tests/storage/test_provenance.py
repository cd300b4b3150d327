"""Tests storage/provenance.py: git's commit, the sources, and a run from saved sources."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from runs import ENV, MODEL, REPO, launch, run, train_lines
from saves import path

import flags.config
import train_llama3
from flags.config import parse_config
from storage import provenance

WITHOUT = {name: value for name, value in ENV.items() if not name.startswith("GIT_")} | {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
}


def call_git(folder, *words) -> str:
    who = ["-c", "user.name=A", "-c", "user.email=a@b.c"]
    return subprocess.run(
        ["git", "-C", folder, *who, *words], check=True, capture_output=True, text=True, env=WITHOUT
    ).stdout


@pytest.fixture
def repository(tmp_path):
    """A repository with a recipe and a module, and an untracked file."""
    root = tmp_path / "repository"
    (root / "parts").mkdir(parents=True)
    for name, text in (
        ("recipe.py", "import parts.block\n"),
        ("parts/block.py", "WIDTH = 4\n"),
        ("notes.txt", "a\n"),
    ):
        (root / name).write_text(text)
    call_git(root, "init", "-q")
    call_git(root, "add", ".")
    call_git(root, "commit", "-q", "-m", "one")
    (root / "mine.py").write_text("")
    return root


def state_of(root, *files) -> dict:
    return provenance.git_commit(
        f"{root}/", files or ("recipe.py", "parts/block.py", "mine.py", "elsewhere.py")
    )


def test_the_commit(repository):
    assert (
        state_of(repository)
        == {"commit": call_git(repository, "rev-parse", "HEAD").strip()}
        != state_of(repository, "x")
    )


def test_no_repository_no_git_and_a_repository_around_all_are_nothing(
    repository, tmp_path, monkeypatch
):
    work = repository / "home" / "project"  # a user may keep the home folder in git
    work.mkdir(parents=True)
    (work / "recipe.py").write_text("")
    assert state_of(work) == {}
    call_git(repository, "add", "home/project/recipe.py")
    assert state_of(work)["commit"]
    (tmp_path / "plain").mkdir()
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path))
    assert state_of(tmp_path / "plain") == {}
    empty = tmp_path / "empty"  # no commit yet
    empty.mkdir()
    (empty / "recipe.py").write_text("")
    call_git(empty, "init", "-q")
    assert state_of(empty) == {}
    monkeypatch.setenv("PATH", str(tmp_path))
    assert state_of(repository) == {}


def test_flags_that_differ_are_said_by_rank_0(capsys, monkeypatch):
    def said(*argv):
        flags.config.say_flags(parse_config(train_llama3.Config, argv))
        return capsys.readouterr().out

    assert said() == said("--tp", "1", "--lr", "3e-3") == ""
    assert said(
        "--steps", "50", "--tp", "2", "--no-loss_parallel", "--data", "my text.txt", "--doc_mask"
    ) == ("flags: --data 'my text.txt' --doc_mask --tp 2 --no-loss_parallel --steps 50\n")
    monkeypatch.setenv("RANK", "1")
    assert said("--steps", "50") == ""


def test_modules_that_are_imported_late_belong_to_the_code(tmp_path, monkeypatch):
    """The files beside a program, of packages there, and of folders with a loaded module: code and
    tables, no large files."""
    sources = {
        "my_env.py": "def f():\n    import late.c.d\n",
        "beside.py": "",
        "late/__init__.py": "",
        "late/c/d.py": "x",
        "late/table.json": "{}",
        "loaded/a.py": "",
        "loaded/b.py": "",
    }
    others = {
        "notes.txt": "",
        "data.json": "",
        "late/large.json": " " * 300_000,
        "unknown/a.py": "",
        "lib/python3.9/x.py": "",
    }
    for name, text in (sources | others).items():
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text(text)
    for module, name in (
        ("nanotitan_env", "my_env.py"),
        ("loaded.a", "loaded/a.py"),
        ("x", "lib/python3.9/x.py"),
    ):
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(__file__=str(tmp_path / name)))
    code = provenance.local_code()
    assert sources.items() <= code.items()
    assert not others.keys() & code.keys()
    assert {"checkpoint.py", "rl/decoding.py", "lora/lora.py"} <= code.keys()
    for name in code:
        assert not name.startswith("torch")


# ---- a run from its sources ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_from_its_sources_has_the_same_losses(tmp_path):
    """The recipe and all modules, changed since, are written side by side; no other file of ours is
    imported."""
    fork, again, out = tmp_path / "fork", tmp_path / "again", tmp_path / "run"
    rooms = "models flags distributed training corpus storage lora sft rl tools"
    for name in rooms.split():
        shutil.copytree(REPO / name, fork / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("train_llama3.py", "parallel.py", "checkpoint.py", "data.py", "generate.py"):
        shutil.copy(REPO / name, fork / name)
    call_git(fork, "init", "-q")
    call_git(fork, "add", ".")
    call_git(fork, "commit", "-q", "-m", "one")
    (fork / "book.txt").write_text((REPO / "README.md").read_text())
    (fork / "parallel.py").write_text((fork / "parallel.py").read_text() + "# changed\n")
    flags = [
        "--data",
        "book.txt",
        "--model_args",
        MODEL,
        "--steps",
        3,
        "--log_every",
        1,
        "--val_every",
        0,
        "--seq_len",
        64,
        "--local_batch_size",
        2,
        "--device",
        "cpu",
        "--compute_dtype",
        "float32",
    ]
    first = run(launch(1, "train_llama3.py", *flags, "--out", out), cwd=fork).splitlines()[0]
    assert first.startswith("flags: ")
    assert first.endswith(
        f" --model_args {MODEL} --out {out} --steps 3 --seq_len 64 "
        "--local_batch_size 2 --val_every 0"
    )
    about, commit = (
        json.loads((out / "config.json").read_text())["_run"],
        call_git(fork, "rev-parse", "HEAD").strip(),
    )
    assert about["commit"] == commit
    assert about["code"].keys() >= {
        "train_llama3.py",
        "rl/decoding.py",
    }
    assert {"torch", "world_size", "model", "data", "optimizer"} <= about.keys()
    assert json.loads(Path(path(out, 3), "provenance.json").read_text()) == {"commit": commit}
    cfg = parse_config(train_llama3.Config, ["--config", str(out / "config.json")])
    assert (cfg.steps, cfg.model_args) == (3, MODEL)

    (fork / "models" / "llama3.py").write_text("raise SystemExit('changed since')\n")
    snippet = (
        (REPO / "docs" / "fork_me.md")
        .read_text()
        .split("```python\nimport json\n")[1]
        .split("```")[0]
    )
    step = path(out, 3)
    run(
        [
            sys.executable,
            "-c",
            "import json\n" + snippet.replace("runs/mine/checkpoints/step-300", step),
        ],
        cwd=tmp_path,
    )
    start = [
        f"{again}/train_llama3.py",
        "--config",
        f"{step}/config.json",
        "--out",
        again / "runs" / "again",
    ]
    run([sys.executable, *start], cwd=fork)
    assert [
        (line["loss"], line["grad_norm"]) for line in train_lines(again / "runs" / "again")
    ] == [(line["loss"], line["grad_norm"]) for line in train_lines(out)]
    assert (
        json.loads((again / "runs" / "again" / "config.json").read_text())["_run"]["code"]
        == about["code"]
    )
