"""parity.json: what --certify compares and writes, and what a run makes of it."""
import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from programs import run_program
from runs import ENV, MODEL, REPO, launch

import train_llama3
import train_qwen3
from support.certificate import NAME, axes_of, carried_certificate, carry_certificate, certified_code, parts_of, why_uncertified
from support.certify import layouts_of, small_model
from support.config import parse_config
from support.parity import model_config_of


def test_layouts_are_all_axes_and_each_pair():
    assert layouts_of(["tp"]) == [("tp",)]
    assert layouts_of(["dp_shard", "tp"]) == [("dp_shard", "tp")]
    assert layouts_of(["pp", "cp", "tp"]) == [("pp", "cp", "tp"), ("pp", "cp"), ("pp", "tp"), ("cp", "tp")]
    # ep borrows the ranks of another axis, and etp splits experts over those of tp
    assert layouts_of(["pp", "dp_shard", "ep"]) == [("pp", "dp_shard", "ep"), ("pp", "dp_shard"), ("dp_shard", "ep")]
    assert layouts_of(["dp_shard", "tp", "ep", "etp"])[1:] == [
        ("dp_shard", "tp"), ("dp_shard", "ep"), ("dp_shard", "tp", "etp"), ("tp", "ep"), ("tp", "etp")]


@pytest.mark.parametrize("argv, world_size, axes", [
    ("", 1, []), ("", 8, ["dp_shard"]), ("--tp 2", 2, ["tp"]), ("--tp 2 --cp 2", 8, ["dp_shard", "cp", "tp"]),
    ("--pp 2 --dp_replicate 2 --dp_shard 1", 4, ["pp", "dp_replicate"]),
])
def test_axes_in_use(argv, world_size, axes):
    assert axes_of(parse_config(train_llama3.Config, argv.split()), world_size) == axes


@pytest.fixture
def certificate(monkeypatch):
    """Of train_llama3.py on dp_shard and cp, as if it were the program that runs."""
    monkeypatch.setitem(sys.modules, "__main__", train_llama3)
    return {"hashes": certified_code(), "worst_error": {"dp_shard": 1e-7, "cp": 1e-7},
            "parts": [], "flags": {"pp_schedule": "1F1B", "cp_method": "allgather", "loss_parallel": True, "async_tp": False}}


def test_the_code_is_that_which_trains(certificate):
    code = certificate["hashes"].keys()
    assert {"train_llama3.py", "models/llama3.py", "models/attention.py", "parallel.py", "distributed/pipeline.py"} <= code
    assert not [name for name in code if name.startswith(("support", "tests", "data"))]


@pytest.mark.parametrize("argv, change, words", [
    ("--cp 2", {}, ""), ("--tp 2", {}, "its certificate is without tp"),
    ("--cp 2 --cp_method alltoall", {}, "without --cp_method alltoall"),
    ("--cp 2", {"parallel.py": "0"}, "parallel.py is not as it was certified"),
    ("--cp 2", {"models/mine.py": "0"}, "models/mine.py is not as it was certified"),
    ("--cp 2", {"parallel.py": "0", "models/llama3.py": "0"}, "models/llama3.py (and 1 more) is not"),
])
def test_what_a_certificate_lacks_is_named(certificate, argv, change, words):
    cfg = parse_config(train_llama3.Config, argv.split())
    said = why_uncertified(certificate, certificate["hashes"] | change, cfg, axes_of(cfg, 4), [])
    assert words in said and bool(said) == bool(words)


def test_a_certificate_is_of_a_model_with_the_same_parts(certificate):
    cfg, code = parse_config(train_llama3.Config, ["--cp", "2"]), certificate["hashes"]
    said = why_uncertified(certificate, code, cfg, axes_of(cfg, 4), ["n_experts"])
    assert said.startswith("its certificate is of a model with none of them, and this one has n_experts (of ")
    certificate["worst_error"]["tp"] = 1e-7
    cfg = parse_config(train_llama3.Config, ["--tp", "2", "--no-loss_parallel"])
    assert why_uncertified(certificate, code, cfg, axes_of(cfg, 4), []) == "its certificate is without --no-loss_parallel"


@pytest.mark.parametrize("recipe, argv, flavor, parts", [
    (train_llama3, "--flavor 1B", "debug", ["tie_embeddings"]), (train_llama3, "--flavor 8B", "debug", []),
    (train_qwen3, "--flavor 30B-A3B", "debug_moe", ["n_experts"]), (train_qwen3, "--flavor 0.6B", "debug", ["tie_embeddings"]),
    (train_qwen3, "--flavor debug_moe", "debug_moe", ["n_experts"]),
])
def test_the_small_model_has_the_parts_of_the_large_one(recipe, argv, flavor, parts):
    main = recipe.main
    cfg = parse_config(recipe.Config, argv.split())
    model = small_model(main, cfg)
    assert model["flavor"] == flavor and parts_of(model_config_of(main, replace(cfg, **model))) == parts


def test_a_run_carries_its_certificate_or_says_that_it_has_none(certificate, monkeypatch, tmp_path, capsys):
    @dataclass(kw_only=True)
    class Config(train_llama3.Config):
        out: str = str(tmp_path / "usual")

    def said(argv="", **env):
        for name, value in ({"WORLD_SIZE": "2", "RANK": "0"} | env).items():
            monkeypatch.setenv(name, value)
        carry_certificate(parse_config(Config, ["--out", str(tmp_path / "run"), *argv.split()]), train_llama3.FLAVORS["debug"])
        return capsys.readouterr().out

    for name in "usual", "run":
        (tmp_path / name).mkdir()
    assert "train_llama3.py is not certified on dp_shard: it has no certificate; " in said()
    assert said(RANK="1") == "" and said(WORLD_SIZE="1") == ""
    (tmp_path / "usual" / NAME).write_text("{")
    assert f"{tmp_path}/usual/parity.json cannot be read" in said()
    (tmp_path / "usual" / NAME).write_text(json.dumps(certificate))
    assert "--check_parity --certify --tp 2\n" in said("--tp 2") and not (tmp_path / "run" / NAME).exists()
    assert said("--pp 2 --pp_schedule GPipe --flavor 8B").endswith("--certify --pp 2 --flavor 8B --pp_schedule GPipe\n")
    assert said() == "" and json.loads(carried_certificate(str(tmp_path / "run"))) == certificate
    (tmp_path / "run" / NAME).write_text(json.dumps(certificate | {"hashes": {}}))
    assert carried_certificate(str(tmp_path / "run")) is None


@pytest.mark.slow
def test_certify_then_run_then_change(tmp_path):
    """The whole way: a certificate, a run that carries it into its checkpoint, an edit of the recipe, the line that tells."""
    recipe, out = tmp_path / "train_mine.py", tmp_path / "run"
    recipe.write_text((REPO / "train_llama3.py").read_text())
    flags = ["--model_args", MODEL, "--local_batch_size", 2, "--seq_len", 32, "--val_every", 0, "--out", out, "--steps", 2]
    env = ENV | {"PYTHONPATH": str(REPO)}

    def start(processes, *more):
        done = run_program(launch(processes, recipe, *flags, *more), env=env)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert "certify: 1 layouts equal one process" in start(1, "--check_parity", "--certify", "--tp", 2, "--dp_shard", 1)
    made = json.loads((out / NAME).read_text())
    assert made["recipe"] == "train_mine.py" and made["worst_error"].keys() == {"tp"} and 0 <= made["worst_error"]["tp"] < 1e-4
    assert "parity:" not in start(2, "--tp", 2)
    assert json.loads((out / "checkpoints" / "step-2" / NAME).read_text()) == made
    recipe.write_text(recipe.read_text() + "\n# changed\n")
    assert "parity: train_mine.py is not certified on tp: train_mine.py is not as" in start(2, "--tp", 2, "--steps", 3)
    assert not Path(out, "checkpoints", "step-3", NAME).exists()


@pytest.mark.slow
def test_a_layout_that_differs_is_not_certified(tmp_path):
    line, source = "        grad_norm = clip_grad_norm(", (REPO / "train_llama3.py").read_text()
    mistake = """        if layout.tp > 1:
            stages[0].blocks["1"].ffn.w1.weight.grad.to_local().mul_(0.5)
"""
    assert source.count(line) == 1
    recipe, out = tmp_path / "train_mine.py", tmp_path / "run"
    recipe.write_text(source.replace(line, mistake + line))
    flags = ["--check_parity", "--certify", "--tp", 2, "--dp_shard", 1, "--out", out, "--local_batch_size", 2, "--seq_len", 32]
    done = run_program(launch(1, recipe, *flags, "--model_args", MODEL), env=ENV | {"PYTHONPATH": str(REPO)})
    assert done.returncode == 1 and "not certified, because of tp 2" in done.stdout, done.stdout + done.stderr
    assert not (out / NAME).exists()
