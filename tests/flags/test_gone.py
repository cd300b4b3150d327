"""Flags of earlier versions: typed, in --help and in an old config.json they are answered with the
reason, in every program that once had them; and the version, in one place."""

import json
import sys
from pathlib import Path

import pytest
from programs import run_program

import evaluate
import finetune
import grpo
import train_llama3
from flags import VERSION
from flags.config import make_parser, parse_config
from flags.gone import GONE, PROGRAMS, find_gone, program_of, tell_gone

REPO = Path(__file__).parents[2]
CONFIGS = {
    "train": train_llama3.Config,
    "finetune": finetune.Config,
    "grpo": grpo.Config,
    "evaluate": evaluate.Config,
}


def flags_of(program: str) -> dict:
    from typing import get_type_hints

    Config = CONFIGS[program]
    return make_parser(Config, get_type_hints(Config))[1]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_flag_that_is_gone_is_no_flag_of_today(program):
    flags = flags_of(program)
    assert program_of(flags) == program
    rows = [row for row in GONE if program in row.programs.split()]
    assert rows
    for row in rows:
        for name in row.names.split():
            assert find_gone(name, flags) is row, name


def test_the_changelog_has_every_flag_that_is_gone():
    text = (REPO / "CHANGELOG.md").read_text()
    for row in GONE:
        for name in row.names.split():
            assert name in text, name
    assert f"## {VERSION} - " in text


@pytest.mark.parametrize(
    "typed",
    ["--lora_nf4", "--lora_nf4=true", "--no-optimizer_in_backward", "--optimizer-in-backward"],
)
def test_a_flag_that_is_gone_is_answered_with_its_reason(capsys, typed):
    with pytest.raises(SystemExit) as stop:
        parse_config(train_llama3.Config, [typed])
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert err.count("\n") == 1
    assert "gone since 0.5.0: " in err
    assert "; instead: " in err


@pytest.mark.parametrize(
    "asked, words",
    [
        (["--help", "lora_nf4"], "--lora_nf4 is gone since 0.5.0: frozen weights in 4 bits"),
        (["--help", "--optimizer_in_backward"], "is gone since 0.5.0: there is no optimizer step"),
        (["-h", "warmup_steps"], "steps of linear warmup [default: 20]"),
    ],
)
def test_help_of_one_name(capsys, asked, words):
    with pytest.raises(SystemExit) as stop:
        parse_config(train_llama3.Config, asked)
    out = capsys.readouterr().out
    assert stop.value.code == 0
    assert words in out
    assert out.count("\n") <= 2


def test_the_config_of_an_old_run(tmp_path, capsys):
    """All keys that are gone are told at once; those that were off are left out."""
    path = tmp_path / "config.json"
    gone = {"optimizer_in_backward": False, "lora_nf4": False, "plan": False}
    path.write_text(json.dumps({"steps": 7} | gone))
    assert parse_config(train_llama3.Config, ["--config", str(path)]).steps == 7
    assert (
        "without optimizer_in_backward, lora_nf4, plan, which are gone" in capsys.readouterr().out
    )
    path.write_text(json.dumps({"steps": 7} | gone | {"optimizer_in_backward": True}))
    with pytest.raises(SystemExit) as stop:
        parse_config(train_llama3.Config, ["--config", str(path)])
    err = capsys.readouterr().err
    assert stop.value.code == 2
    assert err.count("\n") == 1
    assert "to go on, delete these keys" in err
    for name in gone:
        assert f"{name} is {tell_gone(name, {'steps': ''})}" in err


@pytest.mark.parametrize(
    "program", ["train_llama3", "grpo", "generate", "data", "checkpoint", "ablate"]
)
def test_every_program_tells_its_version(program):
    done = run_program([sys.executable, f"{program}.py", "--version"])
    assert (done.returncode, done.stdout, done.stderr) == (0, f"nanotitan {VERSION}\n", "")


def test_the_contract_names_can_be_imported():
    """The Python surface: names that a copy of a recipe or a notebook may rely on."""
    from checkpoint import load_hf, save_hf
    from flags.config import parse_config
    from generate import generate
    from models import deepseek, llama3, qwen3
    from storage import hf

    assert (load_hf, save_hf) == (hf.load_hf, hf.save_hf)
    for module, name in (llama3, "Llama3"), (qwen3, "Qwen3"), (deepseek, "DeepSeek"):
        Model, Config = getattr(module, name), getattr(module, f"{name}Config")
        assert isinstance(module.FLAVORS["debug"], Config)
        assert callable(Config.from_hf)
        assert callable(Model.tp_plan)
        assert callable(Model.hf_keys)
    assert callable(parse_config)
    assert callable(generate)
