"""Command lines, against flags/config.py: what one may say, what is refused and with which line,
--config, --help."""

import dataclasses
import importlib
import json
import math
import re
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, Literal, Optional

import pytest
from saves import stops

from flags.answers import ANSWERS
from flags.config import Need, flag, no_effect, parse_config, save_config, usage_error
from flags.other_names import ELSEWHERE, suggest_flag
from tools.reports.options import ReportConfig

REPO = Path(__file__).parents[2]


@dataclass(kw_only=True)
class DataOptions:
    data: str = "stdlib"  # what to train on: stdlib, a folder or a file
    load_step: int = -1  # checkpoint to load; -1 = the newest


@dataclass(kw_only=True)
class Config(DataOptions):
    kinds: ClassVar[int] = 3  # no flag
    steps: int = 10  # optimizer steps, 100% of them
    flavor: Literal["debug", "1B"] = "debug"  # model size
    gpus: Literal[1, 8] = 1  # a choice of integers
    lr: float = 3e-4  # peak learning rate, reached after warmup_steps
    min_lr_ratio: float = 0.1  # final learning rate / lr
    decay_ratio: float | None = None  # none = decay right after warmup
    note: Optional[str] = None  # noqa: UP045 (the old spelling must work too)
    compile: bool = True  # compile the blocks
    plot: bool = False  # draw
    sizes: list[int] = field(default_factory=lambda: [1, 2])  # some integers
    names: list[str] = field(default_factory=list)  # some names
    local_batch_size: int = 4  # sequences per forward
    # sequences per step
    global_batch_size: int = -1


def refused(capsys, *argv, config=Config) -> str:
    """The one line on stderr."""
    return stops(capsys, parse_config, config, list(argv))


def help_of(capsys, config) -> str:
    """The help, which ends with status 0."""
    with pytest.raises(SystemExit) as stop:
        parse_config(config, ["--help"])
    out, err = capsys.readouterr()
    assert stop.value.code == 0
    assert err == ""
    return out


def parsed(*argv) -> dict:
    defaults = vars(Config())
    found = {}
    for name, value in vars(parse_config(Config, list(argv))).items():
        if value != defaults[name]:
            found[name] = value
    return found


# (what is typed, the values that differ from the defaults)
ACCEPTED = [
    ("", {}),
    ("--steps 5", dict(steps=5)),
    ("--steps=5 --steps 6", dict(steps=6)),
    ("--load_step 3 --global_batch_size -1 --lr -1e-4", dict(load_step=3, lr=-0.0001)),
    ("--lr inf --min_lr_ratio -inf", dict(lr=math.inf, min_lr_ratio=-math.inf)),
    ("--flavor 1B --gpus 8", dict(flavor="1B", gpus=8)),
    ("--decay_ratio 0.5 --note x", dict(decay_ratio=0.5, note="x")),
    ("--decay_ratio 0.5 --decay_ratio none --note none", {}),
    ("--no-compile --plot", dict(compile=False, plot=True)),
    ("--compile False --plot TRUE --steps 7", dict(compile=False, plot=True, steps=7)),
    ("--no-compile --compile --plot --no-plot", {}),
    ("--sizes 3,-4 --names a,b", dict(sizes=[3, -4], names=["a", "b"])),
    ("--sizes -4,3", dict(sizes=[-4, 3])),
    ("--steps 1e3 --sizes 2.5e1,2E+02", dict(steps=1000, sizes=[25, 200])),
    ("--sizes= --names x", dict(sizes=[], names=["x"])),
    ("--data= --note=a=b", dict(data="", note="a=b")),
    ("--data -x", dict(data="-x")),
]


@pytest.mark.parametrize("typed, changed", ACCEPTED)
def test_accepted(typed, changed):
    assert parsed(*typed.split()) == changed


def test_values_with_spaces_and_empty_values():
    assert parsed("--data", "", "--note", "two words") == {"data": "", "note": "two words"}
    assert parsed("--names", "a, b") == {"names": ["a", "b"]}
    assert type(parse_config(Config, ["--lr", "1"]).lr) is float


@pytest.mark.parametrize(
    "argv, parts",
    [
        # no guess from help texts
        ("--checkpoint 3", ["unknown flag --checkpoint; --help lists all flags"]),
        ("--kinds 4", ["unknown flag --kinds"]),
        ("--gpus 2", ["--gpus '2'", "1|8"]),
        ("--sizes 1,x", ["--sizes '1,x'", "integer,..."]),
        ("--sizes 1,,2", ["--sizes '1,,2'"]),
        ("--steps 99999999999999999999", ["below 2**63"]),
    ],
)
def test_refused(capsys, argv, parts):
    """Types that no flag of train_llama3.py has; test_messages.py has the others."""
    line = refused(capsys, *argv.split())
    for part in parts:
        assert part in line, line


def test_a_newline_in_a_value_stays_on_one_line(capsys):
    assert "--steps" in refused(capsys, "--steps", "1\n2")
    assert (
        stops(capsys, usage_error, ValueError("first\nsecond\r\nthird"))
        == "error: first second third\n"
    )


def test_the_first_rank_of_a_machine_speaks(capsys, monkeypatch):
    waits = []

    def sleep(seconds):
        if (
            threading.current_thread() is threading.main_thread()
        ):  # not one that polls for its child
            waits.append(seconds)

    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(time, "sleep", sleep)
    for argv, status in (["--stpes", "5"], 2), (["--help"], 0):
        with pytest.raises(SystemExit) as stop:
            parse_config(Config, argv)
        assert stop.value.code == status
    assert capsys.readouterr() == ("", "")
    assert waits == [5]  # until rank 0 has said what is wrong
    monkeypatch.setenv("LOCAL_RANK", "0")  # of another machine, where the cause may be
    assert re.match(
        "error on rank 3 [(].+[)]: .*--steps", stops(capsys, parse_config, Config, ["--stpes", "5"])
    )


def test_config_file_round_trip_and_overrides(tmp_path):
    cfg = parse_config(
        Config, "--lr inf --no-compile --sizes= --names a,b --decay_ratio 0.25 --data=".split()
    )
    path = tmp_path / "config.json"
    save_config(cfg, path, run={"torch": "2.13", "model": {"dim": 8}})
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["_run"] == {
        "torch": "2.13",
        "model": {"dim": 8},
    }
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    assert parse_config(Config, ["--config", str(path)]) == cfg
    assert parse_config(Config, [f"--config={path}"]) == cfg
    for argv in ["--steps", "99", "--config", str(path)], ["--config", str(path), "--steps", "99"]:
        assert vars(parse_config(Config, argv)) == vars(cfg) | {"steps": 99}


# (a config.json, what the line of the refusal must name, in addition to the file)
REFUSED = [
    ('{"stpes": 5}', ["unknown key 'stpes'", "did you mean steps?"]),
    ('{"steps": "5"}', ['steps = "5"', "integer"]),
    ('{"steps": true}', ["steps = true", "integer"]),
    ('{"steps": 5.0}', ["steps = 5.0", "integer"]),
    ('{"compile": 1}', ["compile = 1", "true|false"]),
    ('{"lr": NaN}', ["lr = NaN"]),
    ('{"flavor": "2B"}', ['flavor = "2B"', "debug|1B"]),
    ('{"sizes": ["3"]}', ['sizes = ["3"]']),
    ("[1]", ["'list' object"]),
    ("{", ["config.json"]),
    ("\udcff", []),
    ("[" * 100_000, []),
]


@pytest.mark.parametrize("text, parts", REFUSED)
def test_config_file_refused(capsys, tmp_path, text, parts):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    line = refused(capsys, "--config", str(path))
    assert str(path) in line, line
    for part in parts:
        assert part in line, line


def test_config_file_numbers(tmp_path):
    (tmp_path / "c.json").write_text(
        '{"lr": 1, "min_lr_ratio": "-inf", "decay_ratio": null, "_run": {"anything": [1]}}'
    )
    cfg = parse_config(Config, ["--config", str(tmp_path / "c.json")])
    assert (cfg.lr, cfg.min_lr_ratio, cfg.decay_ratio) == (1.0, float("-inf"), None)


def test_help(capsys):
    out = help_of(capsys, Config)
    assert out.startswith(__doc__)
    flat = " ".join(out.split())
    assert "optimizer steps, 100% of them [default: 10]" in flat
    assert "compile the blocks [default: true; --no-compile turns it off]" in flat
    assert "--flavor debug|1B model size [default: debug]" in flat
    assert "--decay_ratio number|none none = decay right after warmup [default: none]" in flat
    assert "some integers [default: 1,2]" in flat
    assert 'some names [default: ""]' in flat
    assert "sequences per step [default: -1]" in flat  # a field over several lines
    assert (
        flat.index("Config:")
        < flat.index("--steps")
        < flat.index("DataOptions:")
        < flat.index("--load_step")
    )
    assert "kinds" not in flat


PROGRAMS = ["train_llama3", "train_qwen3", "grpo", "generate"]


def test_an_answer_names_a_flag_that_is_there():
    """Each row has a flag of some program, no name that is a flag itself, and names no flag where the
    program lacks it."""
    programs = [*PROGRAMS, "train_deepseek", "finetune", "evaluate", "forks.train_dpo"]
    flags = {"config"}
    for config in (ReportConfig, *[importlib.import_module(name).Config for name in programs]):
        flags |= {field.name for field in dataclasses.fields(config)}
    for ours, names in ELSEWHERE.items():
        assert ours in flags, ours
        for name in names.split():
            assert f"--{ours}" in suggest_flag(name, {ours}), name
            assert "--" not in suggest_flag(name, {"eot"}), name
            assert name != ours, name
    for answer in ANSWERS:
        needed = answer.needs
        named = re.search(r"--(\w+)", answer.text)
        if named and not needed:
            needed = named[1]
        assert not needed or needed in flags, answer.text
        for name in answer.names.split():
            assert suggest_flag(name, {needed}), name
            assert not needed or "--" not in suggest_flag(name, {"eot"}), name
    assert suggest_flag("no_such_name", flags) == ""
    assert "finetune.py" in suggest_flag("lora_rank", {"steps"})


PIPELINE = Need("without --pp 2 or more", lambda c: c.pp > 1)
MANUAL = Need("with --auto", lambda c: not c.auto)


@dataclass(kw_only=True)
class Pipeline:
    pp: int = 1  # ranks
    auto: bool = False  # let it choose
    schedule: str = flag("1F1B", PIPELINE, MANUAL)  # order of the micro-batches
    parts: list[int] = flag([1, 2], PIPELINE)  # layers per rank
    balance: bool = flag(True, PIPELINE)  # equal parts
    last: float | None = flag(None, MANUAL)  # of the last rank


@pytest.mark.parametrize(
    "argv, sentences",
    [
        ("", []),
        # a default that somebody types is no wish
        ("--schedule 1F1B --parts 1,2 --balance --last none", []),
        ("--auto", []),
        ("--pp 2 --schedule GPipe --no-balance", []),
        (
            "--schedule GPipe",
            ["--schedule GPipe has no effect without --pp 2 or more; leave it out"],
        ),
        (
            "--no-balance --auto --last 2",
            [
                "--no-balance has no effect without --pp 2 or more; leave it out",
                "--last 2.0 has no effect with --auto; leave it out",
            ],
        ),
        (
            "--schedule GPipe --parts 3",
            ["--schedule GPipe, --parts 3 have no effect without --pp 2 or more; leave them out"],
        ),
        (
            "--pp 2 --schedule GPipe --auto",
            ["--schedule GPipe has no effect with --auto; leave it out"],
        ),
        ("--parts=", ['--parts "" has no effect without --pp 2 or more; leave it out']),
    ],
)
def test_flags_without_effect_are_named_with_what_they_need(argv, sentences):
    cfg = parse_config(Pipeline, argv.split())
    assert no_effect(cfg, SimpleNamespace(**vars(cfg))) == sentences


def test_flags_without_effect_that_nobody_typed_return_to_their_defaults(tmp_path, capsys):
    """--config of a run with a pipeline, and --pp 1: who asks for that need not type each of the
    pipeline's flags again."""
    save_config(Pipeline(pp=2, schedule="GPipe", parts=[3]), tmp_path / "config.json", run={})
    cfg = parse_config(
        Pipeline, ["--config", str(tmp_path / "config.json"), "--pp", "1", "--parts", "4"]
    )
    assert no_effect(cfg, SimpleNamespace(**vars(cfg))) == [
        "--parts 4 has no effect without --pp 2 or more; leave it out"
    ]
    said = "--config: schedule without effect here, back to the default\n"
    assert (cfg.schedule, cfg.parts) == (
        Pipeline().schedule,
        [4],
    )
    assert capsys.readouterr().out == said


def test_a_new_default_keeps_the_needs_and_help_names_them(capsys):
    @dataclass(kw_only=True)
    class Fork(Pipeline):
        schedule: str = "GPipe"  # order of the micro-batches, ours
        more: int = flag(0, Need("without more", lambda c: False))  # own flag

    cfg = parse_config(Fork, ["--schedule", "1F1B", "--more", "1"])
    assert no_effect(cfg, SimpleNamespace(**vars(cfg))) == [
        "--schedule 1F1B has no effect without --pp 2 or more; leave it out",
        "--more 1 has no effect without more; leave it out",
    ]
    assert no_effect(Fork(), SimpleNamespace(**vars(Fork()))) == []
    assert Pipeline().parts is not Pipeline().parts
    text = " ".join(help_of(capsys, Fork).split())
    assert "layers per rank [default: 1,2; no effect without --pp 2 or more]" in text
    assert "ours [default: GPipe; no effect without --pp 2 or more; no effect with --auto]" in text


def test_two_groups_may_not_share_a_name():
    @dataclass(kw_only=True)
    class Other:
        load_step: int = 0

    @dataclass(kw_only=True)
    class Both(DataOptions, Other):
        pass

    with pytest.raises(TypeError, match="DataOptions.*Other.*--load_step"):
        parse_config(Both, [])


def test_classes_without_source(capsys):
    space = {"__name__": "nowhere"}
    exec(
        "from dataclasses import dataclass\n@dataclass(kw_only=True)\nclass C:\n    steps: int = "
        "1  # unseen",
        space,
    )
    assert parse_config(space["C"], ["--steps", "2"]).steps == 2
    assert "--steps" in help_of(capsys, space["C"])
    assert "did you mean --steps?" in refused(capsys, "--stpes", "2", config=space["C"])


START = """
import os, runpy, sys

class Ended(Exception):
    pass

def end(status):  # tools/run.py ends the process; here the next program follows
    raise Ended

os._exit = end
for program in PROGRAMS:
    for words in (["--help"], ["--stpes", "3"]):
        sys.argv = [program, *words]
        try:
            runpy.run_path(program, run_name="__main__")
        except (Ended, SystemExit):
            pass
        assert "torch._dynamo" not in sys.modules, sys.argv
print("ALL", len(PROGRAMS))
"""


def test_help_and_a_mistyped_flag_load_no_compiler():
    """torch._dynamo costs 0.6 s of each answer. One process asks all the programs."""
    programs = sorted(path.name for path in REPO.glob("*.py") if path.stem != "parallel")
    code = START.replace("PROGRAMS", repr(programs))
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"ALL {len(programs)}\n")
    assert done.stderr.count("error: ") == len(programs)  # a line for each mistyped flag
