"""Each recipe runs on the null device, with each flag and pair of flags that takes another way
there: two steps, status 0. Runs with --compile are in test_compile.py. A row has several flags at
once where they do not touch each other. What test_waiting.py, test_order.py or test_failures.py run
as well is not here."""

from pathlib import Path

import pytest
from rows import rows, run


@pytest.mark.parametrize("row", rows(Path(__file__).with_name("hopper.txt").read_text()))
def test_it_runs_on_hopper(device, tmp_path, row):
    run(device, tmp_path, row, log=False, timeout=200)


@pytest.mark.parametrize("row", rows(Path(__file__).with_name("blackwell.txt").read_text()))
def test_it_runs_on_blackwell(device, tmp_path, row):
    run(device, tmp_path, row, major=10, log=False, timeout=500)


def test_texts_and_answers_of_a_model(device, tmp_path):
    (tmp_path / "task.jsonl").write_text('{"question": "What is it?", "answer": "a test"}\n')
    done = run(device, tmp_path, "generate 1", "--prompt", "def ", "--max_new_tokens", 4)
    # a kernel that takes masks, and needs no plan: for the prompt, and for a token that is
    # launched, captured, then replayed
    attention = [line for line in done.logs[0] if "fmha_cutlassF" in line]
    assert len(attention) == 3 * 9 and not any("mark kernel cudnn" in line for line in done.logs[0])
    (tmp_path / "evaluate").mkdir()
    run(
        device,
        tmp_path / "evaluate",
        "evaluate 1",
        "--task",
        tmp_path / "task.jsonl",
        "--max_new_tokens",
        4,
    )
    (tmp_path / "base/chat_template.jinja").write_text("{{ messages[0].content }}")
    chat = ("--prompt", "Who are you?", "--chat", "--max_new_tokens", 4)
    device.run(
        tmp_path, "generate.py", "--checkpoint", tmp_path / "base", *chat, brief=[], log=False
    )


def test_generators_sample_on_their_own_gpu(device, tmp_path):
    trainer, generator = run(device, tmp_path, "grpo 2 --gen_ranks 1").logs
    assert generator.count("mark generator on 1") == 2
    # segments that expand, as the trainer's
    assert any(line.startswith("map ") for line in generator)


def test_experts_on_an_older_gpu_say_what_is_slow(device, tmp_path):
    assert (
        "capability 8.0: torch multiplies them one after the other"
        in run(device, tmp_path, "moe 1", major=8).texts[0]
    )


def test_each_process_may_see_one_gpu_of_its_own(device, tmp_path):
    run(device, tmp_path, "llama3 2", devices=1, log=False)
