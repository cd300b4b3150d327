"""docs/grpo.md is true: the table of metrics has the names in a run's file, and the example of a
task runs."""

import dataclasses
import importlib
import json
import random
import re
import sys

from policy import ENV, REPO, run
from programs import run_program

import grpo
from corpus.chat import read_template
from rl import environments
from rl.datasets import open_task
from tools.reports.options import ReportConfig

PAGE = (REPO / "docs" / "grpo.md").read_text()


def section(title: str) -> str:
    return re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)[1]


def test_every_number_is_explained_and_every_explained_number_is_written(tmp_path):
    """A row with a flag has numbers of runs with the flag only; these numbers must be in the
    source."""
    model = "dim=32,n_layers=2,n_heads=4,n_kv_heads=2,head_dim=8,ffn_dim=64,moe_ffn_dim=32"
    run(
        1,
        "--flavor",
        "debug_moe",
        "--model_args",
        model,
        "--steps",
        1,
        "--sft_steps",
        1,
        "--prompts_per_step",
        2,
        "--group_size",
        2,
        "--eval_n",
        2,
        "--checkpoint_every",
        0,
        "--device",
        "cpu",
        "--out",
        tmp_path,
    )
    written = {name for line in (tmp_path / "metrics.jsonl").open() for name in json.loads(line)}
    lines = [
        line
        for line in section("Every number of metrics.jsonl").splitlines()
        if line.startswith("| `")
    ]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    names = [(name, what) for first, what in rows for name in re.findall(r"`(\w+)`", first)]
    assert len(names) == len(dict(names))
    assert all(len(row) == 2 and len(row[1]) > 10 for row in rows)
    assert written - dict(names).keys() == set()
    folders = ("rl", "training", "corpus", "storage")
    source = "".join(
        path.read_text() for folder in folders for path in (REPO / folder).glob("*.py")
    )
    source += (REPO / "grpo.py").read_text()
    for name in dict(names).keys() - written:
        assert "only with `--" in dict(names)[name], name
        assert re.search(rf"\b{name}\b", source), name


def test_flags_of_the_page_are_flags_of_our_programs():
    programs = [
        importlib.import_module(name)
        for name in ("forks.train_distill", "evaluate", "generate", "train_qwen3")
    ]
    known = {
        field.name
        for config in (ReportConfig, *(p.Config for p in programs))
        for field in dataclasses.fields(config)
    }
    others = [
        r".*(vllm|vLLM|sglang|SGLang|hf download|data\.py (tokenizer|prepare)).*\n(    --.*\n)*",
        r"benchmarks/[^`\n]*",
        "--nproc_per_node",
        "--help",
    ]
    ours = re.sub("|".join(others), "", PAGE)
    named = set(re.findall(r"--(?:no-)?([a-z]\w+)", ours))
    assert len(named) > 40
    assert named - known == set()


def test_the_letters_of_the_page(tmp_path):
    """No problem is in two files, and an answer earns a reward; prompts equal those of the trained
    conversations."""
    run_program(
        [sys.executable, REPO / "docs" / "letters.py", "--out", tmp_path], check=True, env=ENV
    )
    lines = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").open()]
        for name in ("chat", "train", "test")
    }
    asked = {name: {line["question"] for line in lines[name]} for name in ("train", "test")}
    asked["chat"] = {line["messages"][0]["content"] for line in lines["chat"]}
    assert [len(asked[name]) for name in ("chat", "train", "test")] == [4000, 4000, 500]
    assert len(asked["chat"] | asked["train"] | asked["test"]) == 8500
    env = open_task(
        grpo.Config(
            env="dataset",
            env_data=str(tmp_path / "train.jsonl"),
            eval_data=str(tmp_path / "test.jsonl"),
        )
    )
    assert all(env.reward(prompt, answer) == 1.0 for prompt, answer in env.problems[:50])
    messages = lines["chat"][0]["messages"]
    render = read_template(str(tmp_path), "").render
    assert render(messages, None).startswith(render(messages[:1], None, True))
    assert render(messages[:1], None, True)[-1] == ">"


def test_the_own_task_of_the_page_pays_its_answers(tmp_path):
    code = re.search(r"```python\n(.*?)```", section("Your own task"), re.S)[1]
    (tmp_path / "my_env.py").write_text(code)
    env = environments.open_env(str(tmp_path / "my_env.py"))
    for seed in range(20):
        prompt, answer = env.make(random.Random(seed))
        assert env.reward(prompt, answer) == 1.0
        assert env.reward(prompt, answer + "a") == 0.0
        assert set(prompt + answer) <= set(env.ALPHABET)
