"""Ctrl-C, against flags/interrupt.py: from the first import on a program ends with one line."""

import ast
import signal
import subprocess
import sys

import pytest
from programs import REPO

PROGRAMS = (
    "train_llama3 train_qwen3 train_deepseek finetune grpo evaluate ablate generate data checkpoint"
).split()


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_hears_ctrl_c_first(program):
    """Before torch, whose import takes seconds."""
    tree = ast.parse((REPO / f"{program}.py").read_text())
    first = next(node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom))
    assert ast.unparse(first) == "import flags.interrupt"


@pytest.mark.parametrize("in_import", [False, True])
@pytest.mark.parametrize("rank", ["", "RANK=0", "RANK=1", "SLURM_PROCID=1"])
def test_ctrl_c_is_one_line_of_rank_0(in_import, rank, tmp_path):
    """Also where an import turns the interrupt into an error of its own, as numpy's does."""
    # Short sleeps: a signal that comes just before a system call is heard when the call returns.
    sleep = "for _ in range(600): time.sleep(0.1)"
    if in_import:
        sleep = """
try:
    for _ in range(600): time.sleep(0.1)
except BaseException:
    raise ImportError("cannot load module more than once per process")
"""
    (tmp_path / "slow.py").write_text(
        f"import flags.interrupt\nimport time\nprint('here', flush=True)\n{sleep}\n"
    )
    env = {"PYTHONPATH": str(REPO)}
    if rank:
        name, number = rank.split("=")
        env[name] = number
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "slow.py")],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "here\n"
    process.send_signal(signal.SIGINT)
    error = process.communicate(timeout=600)[1]
    is_other = rank.endswith("1")
    assert error == ("" if is_other else "\nCtrl-C: ended before the work was done\n")
    assert process.returncode in (130, -signal.SIGINT)


def test_another_error_keeps_its_traceback(tmp_path):
    (tmp_path / "wrong.py").write_text("import flags.interrupt\n1 / 0\n")
    done = subprocess.run(
        [sys.executable, str(tmp_path / "wrong.py")],
        env={"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
