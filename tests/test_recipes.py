"""The recipes as a user runs them: every command line of README.md and of the docstrings, and whole
runs against each other.

A command is taken as it is written, in an empty folder, with flags appended that make it small.
Runs are compared through metrics.jsonl alone.
"""

import ast
import dataclasses
import importlib
import json
import math
import os
import re
import shlex
import signal
import sys
from pathlib import Path

import pytest
from commands import commands_in, split_command
from runs import (
    MLA,
    MODEL,
    REPO,
    Job,
    as_json_lines,
    column,
    ended,
    having,
    launch,
    metrics,
    run,
    train_lines,
)

from corpus.build import build_shards
from corpus.special import find_tokenizer
from data import DataConfig, open_data
from docs.flags import document
from flags.config import field_comments, option_groups, override_fields, parse_config
from models.llama3 import FLAVORS
from storage.manifest import verify
from storage.resume import list_warnings

RECIPES = sorted(path.name for path in REPO.glob("train_*.py"))
TRAINING = [*RECIPES, "finetune.py"]
DOCUMENTED = [
    REPO / name
    for name in (*TRAINING, "grpo.py", "generate.py", "evaluate.py", "data.py", "checkpoint.py")
]
SMALL = ["--seq_len", 32, "--log_every", 1, "--val_batches", 1, "--device", "cpu"]
TINY = ["--model_args", MODEL, *SMALL]
TRAIN_KEYS = {
    "step",
    "loss",
    "loss_max",
    "grad_norm",
    "lr",
    "tokens",
    "tokens_per_second",
    "mfu",
    "memory_gib",
    "step_time_s",
    "data_time_s",
    "tokens_hash",
}
MOE_KEYS = {"moe_load_max_over_mean", "moe_dead_experts"}
VAL_KEYS = {"step", "val_loss", "val_bits_per_byte"}


def tiny(script: str) -> list:
    if script == "finetune.py":
        return SMALL
    if "deepseek" in script:
        return ["--model_args", MLA, *SMALL]
    return TINY


# ---------------------------------------------------------------- the command lines that we publish


def published() -> list[str]:
    blocks = re.findall(r"^```\w*\n(.*?)^```", (REPO / "README.md").read_text(), re.M | re.S)
    texts = blocks + [ast.get_docstring(ast.parse(path.read_text())) or "" for path in DOCUMENTED]
    return list(
        dict.fromkeys(
            shlex.join(shlex.split(line, comments=True))
            for text in texts
            for line in commands_in(text)
        )
    )


COMMANDS = published()
COMPILED = [command for command in COMMANDS if "--compile" in command]


def name(command: str) -> str:
    return f"{COMMANDS.index(command)} {command[:70]}"


# The first command of each program; all others run in make test-slow. So do those of
# train_qwen3.py, train_deepseek.py and grpo.py, for 15 seconds each: the quick tests of flags and
# layouts run these recipes.
QUICK = {next(c for c in COMMANDS if split_command(c)[1] == path.name) for path in DOCUMENTED}
QUICK = {
    c
    for c in QUICK
    if split_command(c)[1] not in ("train_qwen3.py", "train_deepseek.py", "grpo.py")
}

# Started as they stand. The others run in forks that have torch: see programs.py
REAL = [
    next(c for c in COMMANDS if c.startswith(f"{program} ")) for program in ("python", "torchrun")
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What the commands find: a finished run in runs/llama3, a text or two, a tokenizer.json, token
    shards in tokens."""
    folder = tmp_path_factory.mktemp("user")
    lines = [f"line {i} of {i * i}\n" for i in range(3000)]
    (folder / "a.txt").write_text("".join(lines))
    (folder / "b.jsonl").write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    (folder / "book.txt").write_text("".join(lines[:100]))
    # a folder goes before a name of the hub, so nothing is downloaded
    stories = folder / "roneneldan" / "TinyStories"
    stories.mkdir(parents=True)
    (stories / "train.jsonl").write_text("".join(json.dumps({"text": x}) + "\n" for x in lines))
    questions = [{"question": f"line {i} of", "answer": f"{i * i}"} for i in range(200)]
    chats = []
    for q in questions:
        chats.append(
            {
                "messages": [
                    {"role": "user", "content": q["question"]},
                    {"role": "assistant", "content": q["answer"]},
                ]
            }
        )
    choices = [q | {"choices": ["3", q["answer"]]} for q in questions[2:4]]
    for name, records in {
        "questions": questions[:20],
        "test": questions[20:24],
        "choices": choices,
        "chat": chats,
    }.items():
        (folder / f"{name}.jsonl").write_text(as_json_lines(records))
    made = open_data(
        DataConfig(data=str(folder / "a.txt"), cache_dir=str(folder / "cache")), 32
    ).folder
    (folder / "tokenizer.json").write_bytes((made / "tokenizer.json").read_bytes())
    build_shards(
        [folder / "a.txt"], find_tokenizer(str(folder / "tokenizer.json")), folder / "tokens"
    )
    run(launch(1, REPO / "train_llama3.py", *TINY, "--steps", 4, "--checkpoint_every", 2), folder)
    return folder


def hugging_face_folder(folder: Path) -> Path:
    """A chat model, as a download would leave it: a small one of the kind of Llama 3.2 1B."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = folder / "hf"
    if not path.exists():
        config = override_fields(FLAVORS["1B"], MODEL, "--model_args")
        LlamaForCausalLM(LlamaConfig(**config.to_hf())).save_pretrained(path)
        (path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        special = {"chat_template": template, "eos_token": "<|endoftext|>"}
        (path / "tokenizer_config.json").write_text(json.dumps(special))
    return path


def fine_tune(folder: Path):
    """Makes runs/sft and runs/sft-hf, with README's own command."""
    if not (folder / "runs" / "sft").exists():
        run_published(next(c for c in COMMANDS if c.endswith("--out runs/sft")), folder, "runs/sft")


def run_published(command: str, folder: Path, out: str, *more) -> tuple[str, Path]:
    processes, script, args = split_command(command)
    args = [
        re.sub(r"step-\d+", "step-4", arg).replace("STEP_FOLDER", "runs/llama3/checkpoints/step-4")
        for arg in args
    ]
    args = [hugging_face_folder(folder) if arg == "HUGGING_FACE_FOLDER" else arg for arg in args]
    args = [out if arg == "OUT" else arg for arg in args]  # each command writes a folder of its own
    # README's fine-tuning has --lora_rank
    args = [{"runs/lora": "runs/sft", "runs/adamw": "runs/llama3"}.get(arg, arg) for arg in args]
    if script in TRAINING:
        args = [f"{out}-hf" if arg == "runs/sft-hf" else arg for arg in args]
    elif {"runs/sft", "runs/sft-hf"} & set(args):
        fine_tune(folder)
    if "--dry_run" in args:
        pass  # as it stands: it is for models of any size
    elif script in TRAINING:
        args += [
            *tiny(script),
            "--steps",
            4,
            "--local_batch_size",
            4 if "--pp_schedule" in args else 2,
            "--out",
            out,
        ]
    elif script == "grpo.py":
        args += [
            "--steps",
            2,
            "--prompts_per_step",
            4,
            "--group_size",
            2,
            "--sft_steps",
            2,
            "--eval_n",
            8,
            "--eval_k",
            2,
            "--device",
            "cpu",
            "--out",
            out,
        ]
    elif script == "evaluate.py":
        args += ["--device", "cpu", *["--max_new_tokens", 8] * ("questions.jsonl" in args)]
    elif script == "generate.py":
        args += ["--max_new_tokens", 8, "--device", "cpu"]
    elif args[0] == "prepare":
        args += ["--workers", 1, "--out", out]
    elif args[0] == "tokenizer":
        args += ["--out", f"{out}.json"]
    return run(
        launch(processes, REPO / script, *args, *more), folder, real=command in REAL
    ), folder / out


def check_run_folder(out: Path, script: str):
    """DESIGN's contract of a run folder, after 4 steps that were all logged."""
    lines = metrics(out)
    train, val = (
        having(lines, "loss"),
        having(lines, "val_loss"),
    )
    assert column(train, "step") == [1, 2, 3, 4]
    assert column(val, "step") == [4]
    for line in train:
        assert math.isfinite(line["loss"])
        assert line["tokens"] == line["step"] * train[0]["tokens"]
    Config = importlib.import_module(script.removesuffix(".py")).Config
    saved = json.loads((out / "config.json").read_text())
    keys = TRAIN_KEYS | (MOE_KEYS if saved["_run"]["model"].get("n_experts") else set())
    late = {"slowest_rank", "slowest_host", "slowest_by_s"}  # only in lines with a late rank
    for line in train:
        assert set(line) - late == keys
    for line in val:
        assert set(line) == VAL_KEYS
    assert set(saved) == {field.name for field in dataclasses.fields(Config)} | {"_run"}
    again = dataclasses.asdict(parse_config(Config, ["--config", str(out / "config.json")]))
    assert again == {k: v for k, v in saved.items() if k != "_run"}
    assert verify(out / "checkpoints" / "step-4")["step"] == 4
    assert (out / "checkpoints" / "step-4" / "recipe.py").read_bytes() == (
        REPO / script
    ).read_bytes()


def test_commands_were_found():
    """The collector sees all of them: README and every documented file have some, and each names a
    file that is there."""
    scripts = [split_command(command)[1] for command in COMMANDS]
    assert set(scripts) == {path.name for path in DOCUMENTED}
    assert [name for name in TRAINING if scripts.count(name) < 2] == []


@pytest.mark.parametrize(
    "command",
    [pytest.param(c, marks=[] if c in QUICK else pytest.mark.slow) for c in COMMANDS],
    ids=name,
)
def test_published_command(command, folder):
    script = split_command(command)[1]
    if "--from_datasets" in command:
        pytest.importorskip("datasets")
    # minutes: test_published_command_compiled
    if "--compile" in command:
        compiled = ["--no-compile"]
    else:
        compiled = []
    stdout, out = run_published(command, folder, f"out/{COMMANDS.index(command)}", *compiled)
    if "--check_parity" in command:
        assert "check_parity: equal" in stdout
    elif "--dry_run" in command:
        assert "fits" in stdout
        assert "bubble" in stdout
    elif script in TRAINING:
        check_run_folder(out, script)
        assert "loss  . training, last " in stdout
        assert f"checkpoint: out/{COMMANDS.index(command)}/checkpoints/step-4" in stdout
        assert "sample (" in stdout  # the curve, the checkpoint, a sample: how every run ends
    elif script == "grpo.py":
        lines = having(metrics(out), "reward_mean")
        assert column(lines, "step") == [1, 2] == column(lines, "policy_version")
        for line in lines:
            assert TRAIN_KEYS | {"logprob_max_diff", "logprob_k3"} <= set(line)
        assert sum("eval_reward" in line for line in metrics(out)) == 2
        assert "reward  . training, last " in stdout and "  o validation, last " in stdout
        assert verify(out / "checkpoints" / "step-2")["step"] == 2
    elif script == "evaluate.py":
        assert re.search(r"(bits_per_byte|acc|exact_match) [\d.]+.* lines?, ", stdout)
    elif script == "generate.py":
        prompts = []
        for a, b in zip(shlex.split(command), shlex.split(command)[1:]):
            if a == "--prompt":
                prompts.append(b)
        assert all(prompt in stdout for prompt in prompts) or "--chat" in command and stdout.strip()
    elif " tokenizer " in command:
        assert Path(f"{out}.json").is_file()
    elif " show " in command:
        assert "with a loss (green)" in stdout
        assert "line 0 of" in stdout
    elif script == "data.py":
        assert re.search(r"train: [\d,]+ tokens", stdout)
        assert "sha256" in stdout
        assert (out / "index.json").exists() or "prepare" not in command
    else:
        assert re.search(
            r"complete|is good|0 of \d+ tensors differ|checkpoint: (exported|saved) |sources of ",
            stdout,
        )


@pytest.mark.slow
@pytest.mark.parametrize("command", COMPILED, ids=name)
def test_published_command_compiled(command, folder):
    _, out = run_published(command, folder, f"out/compiled-{COMMANDS.index(command)}")
    check_run_folder(out, split_command(command)[1])


# ---------------------------------------------------------------- flags

CONFIGS = [*TRAINING, "grpo.py", "generate.py", "evaluate.py"]


@pytest.mark.parametrize("script", CONFIGS)
def test_every_flag_has_a_help_text(script):
    Config = importlib.import_module(script.removesuffix(".py")).Config
    for group, fields in option_groups(Config).items():
        comments = field_comments(group)
        assert [field.name for field in fields if len(comments.get(field.name, "")) < 5] == []


def test_a_finished_run_says_why_it_exports_nothing(tmp_path):
    for folder, said in ((tmp_path, True), (tmp_path / "new", False)):
        text = list_warnings("runs/x", 10**6, 160, -1, 20, str(folder))
        assert "is finished" in text
        assert ("is there already: nothing is exported" in text) == said


# ---------------------------------------------------------------- whole runs

EXACT = ["--compute_dtype", "float32", "--local_batch_size", 2, "--global_batch_size", 8]


def assert_same_training(a: list[dict], b: list[dict]):
    assert column(a, "step") == column(b, "step")
    for x, y in zip(a, b):
        assert {k: x[k] for k in ("tokens", "lr", "tokens_hash")} == {
            k: y[k] for k in ("tokens", "lr", "tokens_hash")
        }
        assert abs(x["loss"] - y["loss"]) <= 1e-5
        assert abs(x["grad_norm"] - y["grad_norm"]) <= 1e-4 * y["grad_norm"]


def test_the_learning_rate_of_each_step():
    """Four steps up to the peak, one at the peak, five down; the last still learns."""
    recipe = importlib.import_module("train_llama3")
    cfg = recipe.Config(
        steps=10, warmup_steps=4, decay_ratio=0.5, decay_type="linear", min_lr_ratio=0.0
    )
    found = [recipe.lr_at(step, cfg) for step in range(1, 11)]
    down = [5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]
    assert found == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, *down]), "shares of the peak"


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_stopped_by_sigterm_and_continued_by_two_processes(tmp_path, recipe):
    """4 processes until SIGTERM, then 2, against 1 that nobody disturbs: the same tokens, the same
    losses."""
    # the schedule has a length of its own, so that the last step can be chosen when it is known
    # where the first part ended
    common = [
        REPO / recipe,
        *tiny(recipe),
        *EXACT,
        "--schedule_steps",
        10,
        "--val_every",
        0,
        "--checkpoint_every",
        1_000_000,
    ]
    out = tmp_path / "stopped"
    job = Job(
        launch(4, *common, "--dp_replicate", 2, "--steps", 1_000_000, "--out", out),
        out,
        tmp_path / "log",
    )
    job.until_step(3)
    job.launcher.send_signal(signal.SIGTERM)
    job.end()  # its status is torchrun's, which is always 1 after a signal
    stopped = job.last_step()
    assert f"stopped after step {stopped}" in job.text()
    assert os.listdir(out / "checkpoints") == [f"step-{stopped}"]

    steps = stopped + 4
    stdout = run(launch(2, *common, "--steps", steps, "--out", out))
    assert f"continuing from {out}/checkpoints/step-{stopped} (written by 4 rank(s))" in stdout
    whole = launch(1, *common, "--steps", steps, "--out", tmp_path / "whole")
    run(whole)
    lines = train_lines(tmp_path / "whole")
    assert_same_training(train_lines(out), lines)
    assert lines[-1]["loss"] < lines[0]["loss"]

    # a finished run: the same command says so, and changes nothing
    def files():
        found = []
        for name in ("metrics.jsonl", "config.json"):
            found.append((tmp_path / "whole" / name).read_bytes())
        return found

    before = files()
    assert f"is finished: {steps} of {steps} steps are done" in run([*whole, "--lr", "0.1"])
    assert files() == before
    assert os.listdir(tmp_path / "whole" / "checkpoints") == [f"step-{steps}"]


@pytest.mark.slow
def test_other_data_in_the_middle_of_a_run(folder, tmp_path):
    """As docs/fork_me.md says: not under the same name, but from its weights, with its ids."""
    flags = [
        *TINY,
        "--steps",
        2,
        "--local_batch_size",
        2,
        "--val_every",
        0,
        "--cache_dir",
        tmp_path / "cache",
    ]
    source, book = folder / "runs" / "llama3", ["--data", folder / "a.txt"]
    command = launch(1, REPO / "train_llama3.py", *flags, *book, "--steps", 8, "--out", source)
    assert (
        "use --out NEW to train another model, or give the old values"
        in ended(command, folder, status=2).stderr
    )
    stdout = run(
        launch(
            1,
            REPO / "train_llama3.py",
            *flags,
            *book,
            "--init_from",
            source,
            "--out",
            tmp_path / "new",
        ),
        folder,
    )
    assert f"step 0, with the weights of {source}/checkpoints/step-4" in stdout
    tokenizers = []
    for path in (source / "checkpoints" / "step-4", tmp_path / "new/checkpoints/step-2"):
        tokenizers.append(path / "tokenizer.json")
    assert tokenizers[0].read_bytes() == tokenizers[1].read_bytes()
    assert train_lines(tmp_path / "new")[0]["loss"] < math.log(4096) + 0.1


# --------------------------------------------------------------- options of the loop, in whole runs


@pytest.mark.slow
def test_a_run_goes_on_with_other_rounding_and_processes_and_the_same_batch(tmp_path):
    """As a user gets it, with torchao's compiled step: one process, then two with torch's, which go
    on learning."""
    flags = [
        *TINY,
        "--val_every",
        0,
        "--checkpoint_every",
        4,
        "--warmup_steps",
        2,
        "--local_batch_size",
        16,
        "--out",
        tmp_path,
        "--param_dtype",
        "bfloat16",
    ]
    run(launch(1, "train_llama3.py", *flags, "--steps", 4, "--optimizer", "adamw_sr"))
    stdout = run(launch(2, "train_llama3.py", *flags, "--steps", 8))
    assert "the global batch stays 16 sequences" in stdout
    assert "--local_batch_size 16 becomes 8 on 2 data ranks" in stdout
    assert "steps 4 -> 8" in stdout
    assert "local_batch_size 16 -> 8" in stdout
    assert "optimizer adamw_sr -> adamw" in stdout
    lines = train_lines(tmp_path)
    assert {line["tokens"] / line["step"] for line in lines} == {16 * 32}
    assert len(lines) == 8
    assert lines[7]["loss"] < lines[4]["loss"] < lines[0]["loss"]
    saved = []
    for path in (tmp_path / "config.json", tmp_path / "checkpoints/step-8/config.json"):
        saved.append(json.loads(path.read_text()))
    assert column(saved, "global_batch_size") == [16, 16]


@pytest.mark.slow
def test_memory_that_readme_promises_is_that_of_the_dry_run():
    """ "in 27 GiB", "--ac op (21 GiB)": each is the peak of the command beside it."""
    text = (REPO / "README.md").read_text()
    one, eight = (
        re.search(rf"\*\*{title}.*?```bash\n(.*?)\n```", text, re.S)
        for title in ("One GPU", "Eight GPUs")
    )
    numbers = re.search(
        r"in (\d+) GiB\. .* `--ac op` \((\d+) GiB\), or `--ac full` \((\d+) GiB\).*?`(--flavor 8B .*?)` takes "
        r"(\d+) GiB",
        one[0],
    )
    base = shlex.split(one[1])[2:]
    rows = [
        (base, numbers[1]),
        ([*base, "--ac", "op"], numbers[2]),
        ([*base, "--ac", "full"], numbers[3]),
        # in place of the size in the command
        ([*shlex.split(numbers[4]), "--compile"], numbers[5]),
        (
            [*shlex.split(eight[1])[4:], "--dp_shard", "8"],
            re.search(r"in (\d+) GiB on each", eight[0])[1],
        ),
    ]
    for flags, promised in rows:
        said = run([sys.executable, "train_llama3.py", *flags, "--dry_run"])
        assert abs(float(re.search(r"Peak ([\d.]+) GiB", said)[1]) - int(promised)) <= 1, (
            flags,
            promised,
        )


def test_every_flag_is_in_a_document():
    assert (REPO / "docs" / "flags.md").read_text() == document(), (
        "python docs/flags.py > docs/flags.md"
    )
