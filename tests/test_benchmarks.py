"""The benchmarks run, at a small size, and two claims hold without timing: nothing heavy is
imported at the start, and between two log lines nothing waits for the device."""

import importlib
import json
import os
import re
import signal
import sys
import threading
import time

import pytest
from runs import ENV, MLA, MODEL, ended

from benchmarks import gpu_report
from benchmarks.silence import longest_gap
from benchmarks.startup import HEAVY
from flags.config import parse_config
from tools.reports.options import with_report_flags

SHAPE = "dim=32,n_layers=2,n_heads=4,n_kv_heads=2,head_dim=8,ffn_dim=64,vocab_size=128"


def run(*argv, status=0, real=False) -> str:
    """stdout of a Python process, or stderr if a failure is expected."""
    env = ENV | {"OMP_NUM_THREADS": "1"}
    done = ended([sys.executable, *argv], timeout=300, real=real, status=status, env=env)
    if status == 0:
        return done.stdout
    return done.stderr


def rows(stdout: str) -> dict[str, list[str]]:
    """First cell -> the other cells of every line of the printed tables."""
    cells = []
    for line in stdout.splitlines():
        if line.startswith("|"):
            cells.append([cell.strip() for cell in line.strip("|\n").split("|")])
    return {first: rest for first, *rest in cells}


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape", [SHAPE, f"{SHAPE},n_experts=4,top_k=2,moe_ffn_dim=16"], ids=["dense", "experts"]
)
def test_kernels(shape):
    flags = [
        "--rounds",
        1,
        "--seq_len",
        32,
        "--local_batch_size",
        2,
        "--loss_vocab",
        256,
        "--matmul_size",
        64,
    ]
    table = rows(run("benchmarks/kernels.py", *flags, "--model_args", shape))
    wanted = {"attention", "loss", "norms, rope", "chunked", "F.cross_entropy", "48", "96", "192"}
    assert wanted | (
        {"experts"} if "experts" in shape else {"w1 w2 w3, silu", "step", "the rest"}
    ) <= set(table)


ONCE = ["--rounds", 1, "--seq_len", 32, "--model_args", SHAPE]


@pytest.mark.slow
@pytest.mark.parametrize(
    "argv, systems",
    [
        # both have equally many parameters and (asserted in the benchmark) the same loss; all counts
        # are printed
        (["train_cpu.py", *ONCE, "--steps_per_round", 1], ["ours", "transformers"]),
        # savings at a small size are too small to assert
        (["memory.py", *ONCE], ["as it is", "--ac full", "the same, --optimizer adamw_sr"]),
        (["startup.py", "--rounds", 1], ["ours", "transformers"]),
    ],
    ids=["train_cpu", "memory", "startup"],
)
def test_systems_beside_each_other(argv, systems):
    table = rows(run(f"benchmarks/{argv[0]}", *argv[1:], real="startup" in argv[0]))
    for system in systems:
        assert float(table[system][0].replace(",", "")) > 0
    assert "steps_per_round" not in str(argv) or table["ours"][0] == table["transformers"][0]


def test_the_longest_silence_is_found_and_what_was_said_before():
    code = "import time; print('one'); time.sleep(0.5); print('two', flush=True); time.sleep(1); exit(3)"
    command = [sys.executable, "-u", "-c", code]
    gap, before, total, status = longest_gap(command, seconds_of_torch=0.0)
    assert gap >= 0.5
    assert total >= 1.5
    assert before in ("(the start)", "one", "two")  # a busy machine may be slow to start or to end
    assert status == 3


@pytest.mark.slow
def test_checkpoint(tmp_path):
    shape = "n_layers=1,dim=32,n_heads=4,n_kv_heads=2,head_dim=8,ffn_dim=32,vocab_size=64"
    stdout = run(
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        1,
        "benchmarks/checkpoint.py",
        "--repeats",
        1,
        "--device",
        "cpu",
        "--model_args",
        shape,
        "--folder",
        tmp_path,
    )
    assert "--checkpoint_async process" in stdout
    assert "our load, verified" in stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "script, status, text",
    [
        ("train.py", 1, "needs a GPU"),
        ("gpu_report.py", 2, "error: a GPU report needs a GPU, and torch finds none here\n"),
    ],
)
def test_without_a_gpu_a_line_says_so(script, status, text, monkeypatch):
    monkeypatch.setitem(ENV, "CUDA_VISIBLE_DEVICES", "")
    error = run(f"benchmarks/{script}", status=status)
    assert text in error
    assert "Traceback" not in error


# ---------------------------------------------------------------- the report of a machine with GPUs

GPU = {"name": "NVIDIA H100", "gib": 79.2, "capability": 9.0}
STEP = {"memory_gib": 3.0, "mfu": None, "loss": 2.5, "tokens": 1}


def machine_of(count: int, **gpu) -> dict:
    return {
        "gpus": [GPU | gpu] * count,
        "packages": {"torchao": "0"},
        "torch": "2",
        "cuda": "13",
        "nccl": "2",
        "driver": "",
        "python": "3",
        "commit": "",
        "cores": 8,
        "links": "",
    }


def test_links():
    table = rows(
        run(
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            2,
            "benchmarks/links.py",
            "--mib",
            1,
            "--repeats",
            1,
            "--device",
            "cpu",
        )
    )
    assert len(table["2 neighbours"]) == 5
    for cell in table["2 neighbours"]:
        assert float(cell) > 0


@pytest.mark.parametrize(
    "found",
    [machine_of(2, gib=11.0), machine_of(8, capability=10.0)],
    ids=["2 small", "8 Blackwell"],
)
@pytest.mark.slow
def test_the_rows_of_a_report_are_commands_that_exist(found, monkeypatch):
    known = set()
    for row in gpu_report.rows_of(found):
        assert not row.base or row.base in known, (
            f"{row.name} is compared with a row that does not come before it"
        )
        known.add(row.name)
        argv = gpu_report.argv_of(row)
        if "benchmarks/changed.py" in argv:  # the change, then a recipe and its flags
            at = argv.index("benchmarks/changed.py")
            assert argv[at + 1] in importlib.import_module("benchmarks.changed").CHANGES
            del argv[at : at + 2]
        i = next(i for i, word in enumerate(argv) if word.endswith(".py"))
        module = importlib.import_module(argv[i].removesuffix(".py").replace("/", "."))
        monkeypatch.setenv("WORLD_SIZE", argv[i - 1] if argv[i - 2] == "--nproc_per_node" else "1")
        recipe = argv[i].startswith("train_") or "/train_" in argv[i]
        parse_config(with_report_flags(module.Config) if recipe else module.Config, argv[i + 1 :])
    assert len(known) == len(gpu_report.rows_of(found))


def test_the_numbers_of_a_row():
    """Medians after step 5, the peak of all steps, the first step by itself; unknown numbers are
    left out."""
    lines = []
    for step, s in ((1, 30.0), (5, 4.0), (10, 1.0), (15, 2.0), (20, 1.0)):
        lines.append(STEP | {"step": step, "step_time_s": s, "tokens_per_second": 100 / s})
    lines += [{"step": 20, "val_loss": 1.0}]
    lines[2]["memory_gib"] = 5.0
    found = gpu_report.numbers(lines)
    assert found == {
        "tokens_per_second": 100,
        "step_time_s": 1,
        "memory_gib": 5,
        "first_step_s": 30,
        "loss": 2.5,
    }
    assert gpu_report.numbers([]) == {}
    base, row = (gpu_report.Row(name, "", "", 1, base) for name, base in (("a", ""), ("b", "a")))
    base.metrics = found
    row.metrics = found | {"tokens_per_second": 150}
    gpu_report.compare(row, [base, row])
    assert (row.metrics["x_base"], row.metrics["x_base_memory"], row.metrics["x_base_loss"]) == (
        1.5,
        1,
        1,
    )


def test_rows_that_do_not_fit_into_the_time_are_not_run(tmp_path, monkeypatch):
    now = [0.0]
    written = []

    def execute(row, out, limit):
        now[0] += 50
        row.status = "ok"

    monkeypatch.setattr(gpu_report, "execute", execute)
    found = []
    for name, limit in (("a", 100), ("skipped", 10), ("long", 300), ("b", 100)):
        found.append(gpu_report.Row(name, "", "", limit))
    found[1].status = "skipped"
    gpu_report.run_rows(
        found,
        tmp_path,
        200,
        lambda: written.append([row.status for row in found]),
        clock=lambda: now[0],
    )
    assert [row.status for row in found] == ["ok", "skipped", "not run", "ok"]
    assert found[2].reason.startswith("time: ")
    assert written[0] == ["ok", "skipped", "", ""], "written after each row"


@pytest.mark.slow
def test_what_comes_of_a_row(tmp_path):
    """A row that works, a row that fails with torchrun's page after the reason, a row without end."""
    code = {
        "well": f"open(out + '/metrics.jsonl', 'w').write(json.dumps({STEP | dict(step=6, step_time_s=1)}))",
        "fails": "sys.exit('ValueError: the reason\\nChildFailedError: a page\\n=====')",
        "hangs": "time.sleep(600)",
    }
    found = {}
    for name, line in code.items():
        (tmp_path / f"{name}.py").write_text(
            f"import json, sys, time; out = sys.argv[1]; print('float8: 14 linears'); {line}"
        )
        found[name] = gpu_report.Row(
            name, f"python {tmp_path}/{name}.py {tmp_path}/report/rows/{name}", "", 1
        )
        gpu_report.execute(found[name], tmp_path / "report", 10)
    assert [row.status for row in found.values()] == ["ok", "failed", "time limit"]
    assert found["well"].metrics["loss"] == 2.5
    assert found["well"].text == "float8: 14 linears"
    assert found["fails"].reason == "status 1: ValueError: the reason"
    assert 10 <= found["hangs"].seconds < 500
    report = dict(machine=machine_of(1), began="now", seconds=1.0, budget=60, size="--flavor 1B")
    text = gpu_report.markdown(report, list(found.values()))
    assert "| fails: failed | status 1: ValueError: the reason |" in text
    assert "| well |" in text


def test_ctrl_c_keeps_what_was_measured(tmp_path):
    found = [
        gpu_report.Row("a", "python -c pass", "", 9),
        gpu_report.Row("b", f"python {tmp_path}/b.py", "", 9),
        gpu_report.Row("c", "", "", 9),
    ]
    (tmp_path / "b.py").write_text(
        "import os, pathlib, time\n"
        f"pathlib.Path({str(tmp_path)!r}, 'pid').write_text(str(os.getpid()))\ntime.sleep(100)\n"
    )

    def interrupt():
        while not (pid := tmp_path / "pid").exists() or not pid.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    try:
        gpu_report.run_rows(found, tmp_path / "report", 60, lambda: None)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # run_rows ignores a second signal
    assert [row.status for row in found] == ["ok", "interrupted", "not run"]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# ------------------------------------------------------- imports of a run, and waits for the device

# Runs a recipe and prints {"steps": {step: [source lines that asked the device for a value]},
# "modules": [...]}. On a GPU each such question ends the overlap of the host with the device.
WATCH = """
import json, linecache, os, sys, threading
import torch
from torch.utils._python_dispatch import TorchDispatchMode
recipe = __import__(sys.argv[1])
from flags.config import parse_config
from training.metrics import Metrics
steps = {}
# AdamW's count of steps, which is not asked for where AdamW is fused; and which part of a parameter a rank has
ON_THE_HOST = ("_get_value", "compute_local_shape_and_global_offset")

def note():
    frame = sys._getframe(1)
    while frame and os.path.dirname(frame.f_code.co_filename) not in (os.getcwd(), os.getcwd() + "/models"):
        if frame.f_code.co_name in ON_THE_HOST:
            return
        frame = frame.f_back
    if steps and threading.current_thread() is threading.main_thread():
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip() if frame else "inside torch"
        if "one_hot(" not in line:  # it looks for its largest number on a CPU only
            steps[max(steps)].append(line)

ASKS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::_unique2", "aten::bincount"}

class Asks(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        by_mask = func.name() == "aten::index.Tensor" and any(i is not None and i.dtype == torch.bool for i in args[1])
        if func.name() in ASKS or by_mask:
            note()
        return func(*args, **(kwargs or {}))

def noted(method):
    def wrapper(*args, **kwargs):
        note()
        return method(*args, **kwargs)
    return wrapper

for name in ("tolist", "cpu", "numpy"):
    setattr(torch.Tensor, name, noted(getattr(torch.Tensor, name)))
start_step = Metrics.start_step
def start(self, batches):
    steps[self.step + 1] = []
    return start_step(self, batches)
Metrics.start_step = start
with Asks():
    recipe.main(parse_config(recipe.Config, sys.argv[2:]))
print("WATCHED", json.dumps({"steps": steps, "modules": sorted(sys.modules)}))
sys.stdout.flush()
os._exit(0)
"""
FLAGS = [
    "--steps",
    5,
    "--log_every",
    0,
    "--val_every",
    0,
    "--checkpoint_every",
    0,
    "--seq_len",
    32,
    "--device",
    "cpu",
]


@pytest.mark.parametrize(
    "recipe, flags",
    [
        ("train_llama3", ["--model_args", MODEL]),
        pytest.param(
            "train_llama3", ["--model_args", MODEL, "--optimizer", "muon"], marks=pytest.mark.slow
        ),
        pytest.param(
            "train_qwen3",
            ["--flavor", "debug_moe", "--model_args", MODEL + ",moe_ffn_dim=32"],
            marks=pytest.mark.slow,
        ),
        pytest.param("train_deepseek", ["--model_args", MLA], marks=pytest.mark.slow),
    ],
    ids=["llama3", "muon", "qwen3 with experts", "deepseek"],
)
def test_nothing_waits_for_the_device_and_nothing_heavy_is_imported(recipe, flags, tmp_path):
    """Steps 1 and 5 are logged. In the other steps the loop asks the device nothing, not even if
    gradients are finite."""
    stdout = run("-c", WATCH, recipe, *FLAGS, *flags, "--out", tmp_path, real=True)
    found = json.loads(re.search(r"^WATCHED (.*)$", stdout, re.M)[1])
    assert [found["steps"][step] for step in "234"] == [[]] * 3
    assert len(found["steps"]["5"]) > 1, "a logged step reads its numbers: the detector works"
    assert [module for module in HEAVY if module in found["modules"]] == []
    assert os.path.exists(tmp_path / "metrics.jsonl")
