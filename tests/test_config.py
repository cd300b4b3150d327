"""Command lines, against support/config.py: what one may say, what is refused and with which line, --config, --help."""

import dataclasses
import importlib
import json
import math
import os
import re
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar, Literal, Optional

import pytest
from programs import run_program

from support.config import Need, Parser, check_range, flag, no_effect, parse_config, save_config, usage_error
from support.other_names import ELSEWHERE, hint

REPO = Path(__file__).parent.parent


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
    global_batch_size: int = (
        -1
    )  # sequences per step


def refused(capsys, *argv, config=Config) -> str:
    """The one line on stderr."""
    with pytest.raises(SystemExit) as stop:
        parse_config(config, list(argv))
    out, err = capsys.readouterr()
    assert stop.value.code == 2 and out == "" and err.count("\n") == 1 and err.endswith("\n"), err
    return err


def parsed(*argv) -> dict:
    defaults = vars(Config())
    return {name: value for name, value in vars(parse_config(Config, list(argv))).items() if value != defaults[name]}


@pytest.mark.parametrize("argv, changed", [
    ("", {}),
    ("--steps 5", {"steps": 5}),
    ("--steps=5 --steps 6", {"steps": 6}),
    ("--load_step 3 --global_batch_size -1 --lr -1e-4", {"load_step": 3, "lr": -1e-4}),
    ("--lr inf --min_lr_ratio -inf", {"lr": float("inf"), "min_lr_ratio": float("-inf")}),
    ("--lr 1", {"lr": 1.0}),
    ("--flavor 1B --gpus 8", {"flavor": "1B", "gpus": 8}),
    ("--decay_ratio 0.5 --note x", {"decay_ratio": 0.5, "note": "x"}),
    ("--decay_ratio 0.5 --decay_ratio none --note none", {}),
    ("--no-compile --plot", {"compile": False, "plot": True}),
    ("--compile=false --plot=true", {"compile": False, "plot": True}),
    ("--compile False --plot TRUE --steps 7", {"compile": False, "plot": True, "steps": 7}),
    ("--no-compile --compile --plot --no-plot", {}),
    ("--sizes 3,-4 --names a,b", {"sizes": [3, -4], "names": ["a", "b"]}),
    ("--sizes -4,3", {"sizes": [-4, 3]}),
    ("--steps 1e3 --sizes 2.5e1,2E+02", {"steps": 1000, "sizes": [25, 200]}),
    ("--sizes= --names x", {"sizes": [], "names": ["x"]}),
    ("--data= --note=a=b", {"data": "", "note": "a=b"}),
    ("--data -", {"data": "-"}),
    ("--data -x", {"data": "-x"}),
])
def test_accepted(argv, changed):
    assert parsed(*argv.split()) == changed


def test_values_with_spaces_and_empty_values():
    assert parsed("--data", "", "--note", "two words") == {"data": "", "note": "two words"}
    assert parsed("--names", "a, b") == {"names": ["a", "b"]}
    assert type(parse_config(Config, ["--lr", "1"]).lr) is float


@pytest.mark.parametrize("argv, parts", [
    ("--stpes 5", ["unknown flag --stpes", "did you mean --steps?"]),
    ("--stpes=5", ["unknown flag --stpes;", "did you mean --steps?"]),
    ("--stpes -5", ["unknown flag --stpes;", "did you mean --steps?"]),
    ("--learning_rate 1", ["did you mean --lr?"]),
    ("--learning-rate 1", ["did you mean --lr?"]),
    ("--local-batch-size 3", ["unknown flag --local-batch-size", "did you mean --local_batch_size?"]),
    ("--Steps 3", ["did you mean --steps?"]),
    ("--batch_size 3", ["did you mean --local_batch_size?"]),
    ("--checkpoint 3", ["unknown flag --checkpoint; --help lists all flags"]),  # no guess from help texts
    ("-steps 3", ["unknown flag -steps", "did you mean --steps?"]),
    ("--step 3", ["unknown flag --step;", "did you mean --steps?"]),  # no abbreviations
    ("--no-compil", ["did you mean --no-compile?"]),
    ("--no_compile", ["did you mean --no-compile?"]),
    ("--no-steps", ["unknown flag --no-steps"]),
    ("--qqqq", ["unknown flag --qqqq", "--help"]),
    ("--kinds 4", ["unknown flag --kinds"]),
    ("5", ["unexpected argument '5'", "--help"]),
    ("--plot 5", ["--plot '5'", "true|false"]),
    ("--no-plot=true", ["--no-plot"]),
    ("--steps 1.5", ["--steps '1.5'", "integer"]),
    ("--steps -1", ["--steps -1 must be 0 or more"]),
    ("--load_step -2", ["--load_step -2 must be -1 or more"]),
    ("--steps 99999999999999999999", ["below 2**63"]),
    ("--steps=", ["--steps ''", "integer"]),
    ("--steps 1.55e1", ["--steps '1.55e1'", "integer"]),
    ("--steps 1e-3", ["--steps '1e-3'", "integer"]),
    ("--steps 1e99", ["below 2**63"]),
    ("--steps 1e999999999", ["--steps '1e999999999'", "integer"]),
    ("--steps none", ["--steps 'none'", "integer"]),
    ("--steps", ["--steps"]),
    ("--steps --plot", ["--steps"]),
    ("--lr fast", ["--lr 'fast'", "number"]),
    ("--lr nan", ["--lr 'nan'", "number"]),
    ("--decay_ratio x", ["--decay_ratio 'x'", "number|none"]),
    ("--flavor 2B", ["--flavor '2B'", "debug|1B"]),
    ("--gpus 2", ["--gpus '2'", "1|8"]),
    ("--sizes 1,x", ["--sizes '1,x'", "integer,..."]),
    ("--sizes 1,,2", ["--sizes '1,,2'"]),
])
def test_refused(capsys, argv, parts):
    line = refused(capsys, *argv.split())
    assert all(part in line for part in parts), line


def test_check_range():
    check_range(Config(), 0, math.inf, "lr", "decay_ratio")
    with pytest.raises(ValueError, match="--lr -0.1 must be 0 or more"):
        check_range(Config(lr=-0.1), 0, math.inf, "decay_ratio", "lr")
    with pytest.raises(ValueError, match="--min_lr_ratio 2 must be between 0 and 1"):
        check_range(Config(min_lr_ratio=2), 0, 1, "min_lr_ratio")


def test_a_newline_in_a_value_stays_on_one_line(capsys):
    assert "--steps" in refused(capsys, "--steps", "1\n2")
    with pytest.raises(SystemExit):
        usage_error(ValueError("first\nsecond\r\nthird"))
    assert capsys.readouterr().err == "error: first second third\n"


def test_only_rank_0_speaks(capsys, monkeypatch):
    waits = []
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(time, "sleep", waits.append)
    for argv, status in (["--stpes", "5"], 2), (["--help"], 0):
        with pytest.raises(SystemExit) as stop:
            parse_config(Config, argv)
        assert stop.value.code == status
    assert capsys.readouterr() == ("", "") and waits == [5]  # until rank 0 has said what is wrong


def test_config_file_round_trip_and_overrides(tmp_path):
    cfg = parse_config(Config, "--lr inf --no-compile --sizes= --names a,b --decay_ratio 0.25 --data=".split())
    path = tmp_path / "config.json"
    save_config(cfg, path, run={"torch": "2.13", "model": {"dim": 8}})
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["_run"] == {"torch": "2.13", "model": {"dim": 8}}
    assert [file.name for file in tmp_path.iterdir()] == ["config.json"]
    assert parse_config(Config, ["--config", str(path)]) == cfg
    assert parse_config(Config, [f"--config={path}"]) == cfg
    for argv in ["--steps", "99", "--config", str(path)], ["--config", str(path), "--steps", "99"]:
        assert vars(parse_config(Config, argv)) == vars(cfg) | {"steps": 99}


@pytest.mark.parametrize("text, parts", [
    ('{"stpes": 5}', ["unknown key 'stpes'", "did you mean steps?"]),
    ('{"learning_rate": 5}', ["did you mean lr?"]),
    ('{"steps": "5"}', ['steps = "5"', "integer"]),
    ('{"steps": true}', ["steps = true", "integer"]),
    ('{"steps": 5.0}', ["steps = 5.0", "integer"]),
    ('{"steps": null}', ["steps = null", "integer"]),
    ('{"compile": 1}', ["compile = 1", "true|false"]),
    ('{"compile": "true"}', ['compile = "true"']),
    ('{"lr": "0.1"}', ['lr = "0.1"', "number"]),
    ('{"lr": NaN}', ["lr = NaN"]),
    ('{"lr": [1]}', ["lr = [1]"]),
    ('{"flavor": "2B"}', ['flavor = "2B"', "debug|1B"]),
    ('{"gpus": "8"}', ['gpus = "8"']),
    ('{"sizes": 3}', ["sizes = 3", "integer,..."]),
    ('{"sizes": ["3"]}', ['sizes = ["3"]']),
    ('{"data": 3}', ["data = 3", "text"]),
    ('{"note": {}}', ["note = {}"]),
    ("[1]", ["JSON list"]),
    ("{", ["config.json"]),
    ("", ["config.json"]),
    ("\udcff", ["config.json"]),
    ("[" * 100_000, ["config.json"]),
])
def test_config_file_refused(capsys, tmp_path, text, parts):
    path = tmp_path / "config.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    line = refused(capsys, "--config", str(path))
    assert str(path) in line and all(part in line for part in parts), line


def test_config_file_missing_or_a_folder(capsys, tmp_path):
    assert "No such file" in refused(capsys, "--config", str(tmp_path / "none.json"))
    assert str(tmp_path) in refused(capsys, "--config", str(tmp_path))


def test_config_file_numbers(tmp_path):
    (tmp_path / "c.json").write_text('{"lr": 1, "min_lr_ratio": "-inf", "decay_ratio": null, "_run": {"anything": [1]}}')
    cfg = parse_config(Config, ["--config", str(tmp_path / "c.json")])
    assert (cfg.lr, cfg.min_lr_ratio, cfg.decay_ratio) == (1.0, float("-inf"), None)


def test_help(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_config(Config, ["--help"])
    out, err = capsys.readouterr()
    assert stop.value.code == 0 and err == ""
    assert out.startswith(__doc__)
    flat = " ".join(out.split())
    assert "optimizer steps, 100% of them [default: 10]" in flat
    assert "compile the blocks [default: true; --no-compile turns it off]" in flat
    assert "--flavor debug|1B model size [default: debug]" in flat
    assert "--decay_ratio number|none none = decay right after warmup [default: none]" in flat
    assert "some integers [default: 1,2]" in flat and 'some names [default: ""]' in flat
    assert "sequences per step [default: -1]" in flat  # a field over several lines
    assert flat.index("Config:") < flat.index("--steps") < flat.index("DataOptions:") < flat.index("--load_step")
    assert "kinds" not in flat


@dataclass(kw_only=True)
class Recipe:
    steps: int = 10  # optimizer steps
    out: str = "runs"  # folder
    local_batch_size: int = 4  # sequences per forward
    global_batch_size: int = -1  # sequences per step
    checkpoint_every: int = 100  # steps between checkpoints
    val_every: int = 50  # steps between validations
    compute_dtype: Literal["auto", "bfloat16"] = "auto"  # of matmuls
    model_args: str = ""  # fields of the flavor
    device: Literal["auto", "cpu", "cuda"] = "auto"  # where


@pytest.mark.parametrize("argv, answer", [
    ("--dtype bfloat16", "did you mean --compute_dtype? --help"),
    ("--bf16", "use --compute_dtype bfloat16"),
    ("--save_every 5", "did you mean --checkpoint_every?"),
    ("--max_iters 5", "did you mean --steps?"),
    ("--max-steps 5", "did you mean --steps?"),
    ("--training.steps 5", "did you mean --steps?"),
    ("--eval_interval 5", "did you mean --val_every?"),
    ("--grad_accum 5", "use --global_batch_size: "),
    ("--gradient_accumulation_steps=5", "use --global_batch_size: "),
    ("--batch_size 5", "did you mean --local_batch_size? It is what one data rank runs at once; --global_batch_size"),
    ("--resume", "the same --out continues where it stopped; --help"),
    ("--resume_from_checkpoint x", "the same --out continues"),
    ("--nproc_per_node 2", "before the script: torchrun --nproc_per_node 2 FILE"),
    ("--epochs 3", "--steps counts optimizer steps"),
    ("--n_layer 3", "--model_args n_layers=4,dim=512"),
    ("--device mps", "--device 'mps': need auto|cpu|cuda; --device knows cpu and cuda"),
    ("config.json", "unexpected argument 'config.json'; did you mean --config config.json?"),
])
def test_names_of_other_projects_are_answered(capsys, argv, answer):
    assert answer in refused(capsys, *argv.split(), config=Recipe)


def test_an_answer_names_a_flag_that_is_there(capsys):
    """Each of the table names a flag of some program first, and is not given where that flag does not exist."""
    flags = {field.name for name in ("train_llama3", "train_qwen3", "grpo", "generate")
             for field in dataclasses.fields(importlib.import_module(name).Config)}
    for names, answer in ELSEWHERE.items():
        first = (re.search(r"--(\w+)", answer) or [None, "config"])[1]  # which is always there, like an answer without a flag
        assert first in flags or first == "config", answer
        assert all(hint(name, flags) and (first == "config" or hint(name, flags - {first}) != answer) for name in names.split())
        assert [name for name in names.split() if name in flags and name not in first and hint(name, {name})] == []
    assert hint("resume", set()) == hint("no_such_name", flags) == ""
    assert "compute_dtype" not in refused(capsys, "--dtype", "x")  # the Config of this file has no such flag


TITAN = """
job.config_file --config, job.dump_folder --out, job.description --out, job.print_config nothing, job.custom_config_module
fork_me, model.name another recipe, model.flavor =, model.hf_assets_path --init_from, model.tokenizer_path --tokenizer,
model.converters --float8, model.print_after_conversion --explain, optimizer.name --optimizer, optimizer.lr =, optimizer.beta1
=, optimizer.beta2 =, optimizer.eps =, optimizer.weight_decay =, optimizer.implementation fused,
optimizer.early_step_in_backward --optimizer_in_backward, lr_scheduler.warmup_steps =, lr_scheduler.decay_ratio =,
lr_scheduler.decay_type =, lr_scheduler.min_lr_factor --min_lr_ratio, training.dataset --data, training.dataset_path --data,
training.local_batch_size =, training.global_batch_size =, training.seq_len =, training.max_norm =, training.steps =,
training.enable_cpu_offload --cpu_offload, training.dtype --param_dtype, training.mixed_precision_param --compute_dtype,
training.mixed_precision_reduce --reduce_dtype, training.gc_freq --gc_every, training.gc_debug --memory_snapshot, training.seed
=, training.deterministic =, training.debug_moe_force_load_balance --moe_force_balance,
parallelism.data_parallel_replicate_degree --dp_replicate, parallelism.data_parallel_shard_degree --dp_shard,
parallelism.fsdp_reshard_after_forward --reshard_after_forward, parallelism.tensor_parallel_degree --tp,
parallelism.enable_compiled_autograd --compile, parallelism.disable_loss_parallel --no-loss_parallel,
parallelism.enable_async_tensor_parallel --async_tp, parallelism.pipeline_parallel_degree --pp,
parallelism.module_fqns_per_model_part --pp_stage_fqns, parallelism.pipeline_parallel_first_stage_less_layers
--pp_first_stage_less_layers, parallelism.pipeline_parallel_last_stage_less_layers --pp_last_stage_less_layers,
parallelism.pipeline_parallel_layers_per_stage --pp_layers_per_stage, parallelism.pipeline_parallel_schedule --pp_schedule?,
parallelism.pipeline_parallel_schedule_csv --pp_schedule_csv, parallelism.pipeline_parallel_microbatch_size
--pp_microbatch_size, parallelism.context_parallel_degree --cp, parallelism.context_parallel_rotate_method --cp_method,
parallelism.expert_parallel_degree --ep, parallelism.expert_tensor_parallel_degree --etp, checkpoint.enable --checkpoint_every,
checkpoint.enable_ft_dataloader_checkpoints train_llama3_ft, checkpoint.folder --out, checkpoint.interval --checkpoint_every,
checkpoint.initial_load_path --init_from, checkpoint.initial_load_model_only --init_model_only, checkpoint.initial_load_in_hf
--init_from, checkpoint.initial_load_in_hf_quantized --init_from, checkpoint.last_save_model_only =, checkpoint.last_save_in_hf
--export_hf, checkpoint.export_dtype =, checkpoint.async_mode --checkpoint_async, checkpoint.keep_latest_k =,
checkpoint.load_step =, checkpoint.exclude_from_loading =, checkpoint.enable_first_step_checkpoint --checkpoint_first_step,
checkpoint.create_seed_checkpoint --seed, checkpoint.load_only =, activation_checkpoint.mode --ac,
activation_checkpoint.selective_ac_option --ac_every, compile.enable --compile, compile.components --compile,
comm.init_timeout_seconds --init_timeout_s, comm.train_timeout_seconds --train_timeout_s, comm.trace_buf_size --flight_recorder,
memory_estimation.enable --dry_run """


@pytest.mark.parametrize("line", [part.strip() for part in " ".join(TITAN.split()).strip(", ").split(",")])
def test_torchtitans_names_are_answered_with_their_section_and_without(line):
    """All of its configuration reference. "=": it is the same name here, and alone no error."""
    flags = {field.name for field in dataclasses.fields(importlib.import_module("train_deepseek").Config)}
    name, answer = line.split(maxsplit=1)
    leaf = name.rpartition(".")[2]
    if answer == "=":
        assert leaf in flags and hint(name, flags) == f"did you mean --{leaf}?"
    else:
        assert answer in hint(name, flags), hint(name, flags)
        assert answer in hint(leaf, flags) or leaf in ("name", "enable"), hint(leaf, flags)
        assert leaf not in flags


def test_a_single_word_is_not_looked_for_in_help_texts(capsys):
    said = refused(capsys, "--folders", "x", config=importlib.import_module("train_llama3").Config)
    assert said.startswith("error: unknown flag --folders; --help lists all flags")


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


@pytest.mark.parametrize("argv, sentences", [
    ("", []),
    ("--schedule 1F1B --parts 1,2 --balance --last none", []),  # a default that somebody types is no wish
    ("--auto", []),
    ("--pp 2 --schedule GPipe --no-balance", []),
    ("--schedule GPipe", ["--schedule GPipe has no effect without --pp 2 or more; leave it out"]),
    ("--no-balance --auto --last 2", ["--no-balance has no effect without --pp 2 or more; leave it out",
                                      "--last 2.0 has no effect with --auto; leave it out"]),
    ("--schedule GPipe --parts 3", ["--schedule GPipe, --parts 3 have no effect without --pp 2 or more; leave them out"]),
    ("--pp 2 --schedule GPipe --auto", ["--schedule GPipe has no effect with --auto; leave it out"]),
    ("--parts=", ['--parts "" has no effect without --pp 2 or more; leave it out']),
])
def test_flags_without_effect_are_named_with_what_they_need(argv, sentences):
    cfg = parse_config(Pipeline, argv.split())
    assert no_effect(cfg, SimpleNamespace(**vars(cfg))) == sentences


def test_flags_without_effect_that_nobody_typed_return_to_their_defaults(tmp_path, capsys):
    """--config of a run with a pipeline, and --pp 1: who asks for that need not type each of the pipeline's flags again."""
    save_config(Pipeline(pp=2, schedule="GPipe", parts=[3]), tmp_path / "config.json", run={})
    cfg = parse_config(Pipeline, ["--config", str(tmp_path / "config.json"), "--pp", "1", "--parts", "4"])
    assert no_effect(cfg, SimpleNamespace(**vars(cfg))) == ["--parts 4 has no effect without --pp 2 or more; leave it out"]
    said = "--config: --schedule GPipe has no effect without --pp 2 or more; back to the default\n"
    assert (cfg.schedule, cfg.parts) == (Pipeline().schedule, [4]) and capsys.readouterr().out == said


def test_a_new_default_keeps_the_needs_and_help_names_them(capsys):
    @dataclass(kw_only=True)
    class Fork(Pipeline):
        schedule: str = "GPipe"  # order of the micro-batches, ours
        more: int = flag(0, Need("without more", lambda c: False))  # own flag

    cfg = parse_config(Fork, ["--schedule", "1F1B", "--more", "1"])
    assert no_effect(cfg, SimpleNamespace(**vars(cfg))) == [
        "--schedule 1F1B has no effect without --pp 2 or more; leave it out",
        "--more 1 has no effect without more; leave it out"]
    assert no_effect(Fork(), SimpleNamespace(**vars(Fork()))) == []
    assert Pipeline().parts is not Pipeline().parts
    with pytest.raises(SystemExit):
        parse_config(Fork, ["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "layers per rank [default: 1,2; no effect without --pp 2 or more]" in text
    assert "ours [default: GPipe; no effect without --pp 2 or more; no effect with --auto]" in text


def test_two_groups_may_not_share_a_name():
    @dataclass(kw_only=True)
    class Other:
        load_step: int = 0

    @dataclass(kw_only=True)
    class Both(DataOptions, Other):
        pass

    @dataclass(kw_only=True)
    class Reserved:
        config: str = ""

    with pytest.raises(TypeError, match="DataOptions.*Other.*--load_step"):
        parse_config(Both, [])
    with pytest.raises(TypeError, match="--config is reserved"):
        parse_config(Reserved, [])


def test_a_recipe_may_change_a_default(capsys):
    @dataclass(kw_only=True)
    class Recipe(DataOptions):
        load_step: int = 7  # another default

    assert parse_config(Recipe, []).load_step == 7
    with pytest.raises(SystemExit):
        parse_config(Recipe, ["--help"])
    assert "another default [default: 7]" in " ".join(capsys.readouterr().out.split())


def test_classes_without_source(capsys):
    space = {"__name__": "nowhere"}
    exec("from dataclasses import dataclass\n@dataclass(kw_only=True)\nclass C:\n    steps: int = 1  # unseen", space)
    assert parse_config(space["C"], ["--steps", "2"]).steps == 2
    with pytest.raises(SystemExit) as stop:
        parse_config(space["C"], ["--help"])
    assert stop.value.code == 0 and "--steps" in capsys.readouterr().out
    assert "did you mean --steps?" in refused(capsys, "--stpes", "2", config=space["C"])


def test_post_init_errors_are_usage_errors(capsys):
    @dataclass(kw_only=True)
    class Checked:
        steps: int = 1

        def __post_init__(self):
            if self.steps == 3:
                raise ValueError("--steps must not be 3")

    assert "--steps must not be 3" in refused(capsys, "--steps", "3", config=Checked)


def test_parser_of_the_small_clis(capsys):
    parser = Parser()
    parser.add_argument("--out", required=True)
    for argv in [], ["--ou", "x"], ["--out"]:
        with pytest.raises(SystemExit) as stop:
            parser.parse_args(argv)
        assert stop.value.code == 2 and capsys.readouterr().err.count("\n") == 1


RECIPE = '''"""Train something.

    python recipe.py --steps 5    # 50% done
The end.
"""

from dataclasses import dataclass

from support.config import parse_config


@dataclass(kw_only=True)
class Config:
    steps: int = 10  # optimizer steps
    lr: float = 3e-4  # peak learning rate, reached after warmup_steps


if __name__ == "__main__":
    print(parse_config(Config))
'''


@pytest.mark.parametrize("argv, rank, status, out, err", [
    ("--steps 5", "0", 0, "Config(steps=5, lr=0.0003)\n", ""),
    ("--stpes 5", "0", 2, "", "error: unknown flag --stpes; did you mean --steps? --help lists all flags\n"),
    ("--learning_rate 5", "0", 2, "", "error: unknown flag --learning_rate; did you mean --lr? --help lists all flags\n"),
    ("--help", "1", 0, "", ""),
])
def test_as_a_script(tmp_path, argv, rank, status, out, err):
    (tmp_path / "recipe.py").write_text(RECIPE)
    env = os.environ | {"PYTHONPATH": str(REPO), "RANK": rank}
    done = run_program([sys.executable, tmp_path / "recipe.py", *argv.split()], env=env)
    assert (done.returncode, done.stdout, done.stderr) == (status, out, err)


def test_help_of_a_script(tmp_path):
    (tmp_path / "recipe.py").write_text(RECIPE)
    env = os.environ | {"PYTHONPATH": str(REPO)}
    done = run_program([sys.executable, tmp_path / "recipe.py", "--help"], env=env)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("Train something.\n\n    python recipe.py --steps 5    # 50% done\n")
    assert "--steps integer  optimizer steps [default: 10]" in done.stdout
