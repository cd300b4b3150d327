"""make gpu-report on the null device: each row runs, or is left out with its reason. What it
measures means nothing here."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from build import environment
from run import REPO, variables

# Python runs this file at its start: what a program asks of the device is answered in every process
# of the report.
ANSWERS = f"""
import sys
sys.path += [{str(REPO)!r}, {str(REPO / "tests/nullcuda")!r}]
import answers
answers.answer()
answers.cudnn_attention()
"""


def start(folder, *flags, **options) -> subprocess.Popen:
    (folder / "sitecustomize.py").write_text(ANSWERS)
    env = os.environ | environment() | variables(options) | {"PYTHONPATH": str(folder)}
    command = [
        sys.executable,
        REPO / "benchmarks/gpu_report.py",
        "--out",
        folder / "report",
        *flags,
    ]
    return subprocess.Popen(command, env=env, cwd=folder, stdout=subprocess.PIPE, text=True)


def report(folder, *flags, **options) -> dict[str, dict]:
    """{name: row}"""
    start(folder, *flags, **options).communicate()
    found = {}
    for row in json.loads((folder / "report" / "report.json").read_text())["rows"]:
        found[row["name"]] = row
    return found


def test_rows_on_two_gpus(tmp_path):
    rows = report(tmp_path, "--only", "links", devices=2, gib=12)
    assert rows["links"]["status"] == "ok", rows
    assert "| 2 neighbours |" in rows["links"]["text"], rows
    rows = report(tmp_path, "--only", "eager", devices=1, gib=12)
    assert rows["eager"]["status"] == "ok", rows
    assert rows["eager"]["metrics"]["memory_gib"] > 1, rows
    assert "| eager |" in (tmp_path / "report" / "report.md").read_text()


def test_a_recipe_with_nccls_memory(device, tmp_path):
    """FSDP's buffers come from NCCL, once: from the second step on no more of it is asked for."""
    done = device.run(
        tmp_path, "train_llama3.py", nproc=2, empty_weights=True, change="nccl_memory"
    )
    made = [i for i, line in enumerate(done.logs[0]) if line.startswith("nccl mem_alloc")]
    assert made
    assert max(made) < done.logs[0].index("mark step 2")


def test_a_recipe_whose_experts_wait(device, tmp_path):
    """The tokens of each of the 6 layers travel four times in a step, in one part, and not eight
    times; once per rank in half as many rows, as the answers say."""
    flags = ("train_qwen3.py", "--flavor", "debug_moe", "--ep", 2)
    sent = []
    for change, n in ("", 8), ("one_part", 4), ("once_per_rank", 4):
        step = device.run(
            tmp_path / f"run{change}", *flags, nproc=2, empty_weights=True, change=change
        ).step(2)
        assert (
            sum(line == "nccl group_end" and "type=9" in step[i - 1] for i, line in enumerate(step))
            == n * 6
        )
        sent.append(
            sum(
                int(size)
                for line in step
                for size in re.findall("^nccl send.* count=(.*) type=9", line)
            )
        )
    assert sent[0] == sent[1] == 2 * sent[2] > 0


def test_ctrl_c(tmp_path):
    """Nothing that the report has started outlives it."""
    program = start(tmp_path, "--only", "loss on", devices=1)
    log = tmp_path / "report" / "rows" / "loss-on-the-CPU" / "metrics.jsonl"
    while not log.exists():
        assert program.poll() is None
        time.sleep(0.1)
    program.send_signal(signal.SIGINT)
    assert "interrupted" in program.communicate()[0]
    assert program.returncode == 130
    rows = json.loads((tmp_path / "report" / "report.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["interrupted", "not run"]


# The stand-ins have no symmetric memory. And no number that is read means anything: grpo.py takes a
# gradient for not finite, with experts the parity of later steps is a norm of 0 within infinity
# times 0, and kernels.py compares two losses.
NOT_HERE = {"async tp", "grpo", "grpo, a rank samples", "parity of --ep 2", "parts of a step"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [dict(devices=2, gib=12), dict(devices=2, gib=80), dict(devices=1, gib=80, major=10)],
    ids=["2 small", "2 Hopper", "1 Blackwell"],
)
def test_every_row(tmp_path, options):
    rows = report(tmp_path, "--minutes", "90", **options)
    assert not {
        name: row["reason"]
        for name, row in rows.items()
        if row["status"] == "failed" and name not in NOT_HERE
    }
