"""What a run writes, against training/metrics.py: the file, the printed line, the peaks, the garbage
collector, the curve."""

import gc
import gzip
import importlib.util
import json
import math
import re
import shutil
import time
import tracemalloc
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from runs import column, json_lines
from saves import refuses

from tools.reports.options import run_report
from training import metrics
from training.boards import Board
from training.metrics import Metrics, MetricsConfig, loss_curve
from training.peak_flops import peak_flops

KEYS = [
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
]


def make(
    out, rank0=True, first_step=1, steps=10, log_every=1, flops_per_token=10, tokens=0, **flags
):
    # what Metrics reads of it
    layout = SimpleNamespace(rank=int(not rank0), world_size=2, device=torch.device("cpu"))
    cfg = MetricsConfig(**{"gc_every": 0, "log_every": log_every} | flags)
    return Metrics(
        str(out), cfg, layout, flops_per_token, first_step=first_step, steps=steps, tokens=tokens
    )


def train(m, steps, loss=lambda step: torch.tensor(8.0 / step), **more):
    for step in steps:
        m.start_step(iter([None]))
        m.end_step(100)
        if m.due(step):
            now = loss(step)
            m.log(
                step,
                loss=now,
                loss_max=now,
                grad_norm=torch.tensor(0.5),
                lr=1e-3,
                tokens_hash=f"h{step}",
                **more,
            )


def strict_lines(out):
    """The lines as a strict JSON reader sees them: NaN and Infinity, which Python's reader would
    take, are errors."""
    return [json.loads(text, parse_constant=pytest.fail) for text in open(out / "metrics.jsonl")]


def test_line_has_the_contract_keys_and_full_precision(tmp_path, capsys):
    m = make(tmp_path)
    third = torch.tensor(1 / 3)
    train(m, [1, 2], loss=lambda step: third)
    lines = strict_lines(tmp_path)  # already there before close: every line is flushed
    m.close()
    assert [list(line) for line in lines] == [KEYS, KEYS]
    assert lines[1]["loss"] == third.item()
    assert lines[1]["tokens"] == 200
    assert lines[1]["tokens_hash"] == "h2"
    assert lines[1]["mfu"] is None
    assert 0.01 < lines[1]["memory_gib"] < 100
    assert lines[1]["tokens_per_second"] == pytest.approx(100 / lines[1]["step_time_s"])
    assert "step 2/10  loss 0.3333  grad_norm 0.500  lr 1.00e-03" in capsys.readouterr().out


def test_nan_is_null(tmp_path, capsys):
    m = make(tmp_path)
    train(m, [1], loss=lambda step: torch.tensor(math.nan))
    m.log_val(1, torch.tensor(math.inf), None)
    m.close()
    first, val = strict_lines(tmp_path)
    assert first["loss"] is None
    assert first["grad_norm"] == 0.5
    assert val == {"step": 1, "val_loss": None, "val_bits_per_byte": None}
    assert "loss nan" in capsys.readouterr().out


def test_extra_fields_and_tokens_go_on_after_resume(tmp_path):
    m = make(tmp_path, first_step=6, tokens=500)
    train(m, [6], extra={"moe_dead_experts": torch.tensor(3), "moe_load_max_over_mean": 1.5})
    m.close()
    (line,) = strict_lines(tmp_path)
    assert line["tokens"] == m.tokens == 600
    assert line["moe_dead_experts"] == 3
    assert line["moe_load_max_over_mean"] == 1.5


def test_continued_run_drops_the_lines_that_it_does_again(tmp_path, capsys):
    m = make(tmp_path)
    train(m, range(1, 6))
    m.log_val(3, 2.5, 1.5)
    m.log_val(5, 2.0, 1.2)
    m.close()
    before = strict_lines(tmp_path)
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "loss": 1.')  # killed in the middle of a line
    m = make(tmp_path, first_step=4, tokens=300)
    assert strict_lines(tmp_path) == [line for line in before if line["step"] < 4]
    assert capsys.readouterr().out.endswith(
        """metrics.jsonl: left out '{"step": 2, "loss": 1.', a line that was cut\n"""
    )
    train(m, [4])
    m.close()
    assert column(strict_lines(tmp_path), "step") == [1, 2, 3, 3, 4]
    assert strict_lines(tmp_path)[-1]["tokens"] == 400
    make(tmp_path).close()  # a new run in the same folder begins with nothing
    assert strict_lines(tmp_path) == []
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["metrics.jsonl", "metrics.old-1.jsonl"]


def test_long_files_are_read_as_a_stream(tmp_path, capsys):
    """Dropping lines and drawing the curve take a small part of the memory of all lines; of a file
    cut between a line and its newline nothing is lost."""
    lines = []
    for step in range(2000):
        lines.append({name: step + 0.5 for name in KEYS} | {"step": step})
    whole = (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    tracemalloc.start()
    m = make(tmp_path, first_step=2000)
    dropping = tracemalloc.get_traced_memory()[1]
    m.close()
    drawing = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert strict_lines(tmp_path) == lines
    assert "1999" in capsys.readouterr().out
    assert dropping < whole / 3
    assert drawing < whole


def test_other_ranks_write_print_and_read_nothing(tmp_path, capsys):
    m = make(tmp_path / "run", rank0=False)
    # .item() of a meta tensor raises, as a stand-in for waiting on a device
    never_read = torch.empty((), device="meta")
    train(m, [1, 2], loss=lambda step: never_read)
    m.log_val(2, never_read)
    m.close()
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""
    assert m.tokens == 200


def test_only_logged_steps_read_the_loss_and_means_cover_the_interval(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: clock[0])
    m = make(tmp_path, log_every=4, flops_per_token=1e12)
    m.job_flops = 1e15

    def slow():
        clock[0] += 0.5
        yield None

    for step in range(1, 9):
        m.start_step(slow())
        clock[0] += 1.5  # compute
        m.end_step(1000)
        if m.due(step):
            m.log(step, loss=1.0, loss_max=1.0, grad_norm=1.0, lr=0.1, tokens_hash="")
        clock[0] += 100.0  # validation and checkpoints are no training time
    m.close()
    lines = strict_lines(tmp_path)
    assert column(lines, "step") == [1, 4, 8]
    for line in lines:
        assert (line["step_time_s"], line["data_time_s"], line["tokens_per_second"]) == (
            2.0,
            0.5,
            500.0,
        )
        assert line["mfu"] == 0.5  # 500 tokens/s * 1e12 FLOPs/token of 1e15 FLOP/s


def test_the_start_says_what_the_numbers_are_measured_against(tmp_path, capsys, monkeypatch):
    m = make(tmp_path, first_step=6)
    text = capsys.readouterr().out
    assert re.fullmatch(r"process: \d+\.\d\d GiB before step 6; no MFU on a CPU\n", text), text
    make(tmp_path, rank0=False)
    assert capsys.readouterr().out == ""
    # a GPU, of which only the answers of torch are stood in for
    m.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    capability = SimpleNamespace(major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: capability)
    m.job_flops = 2 * peak_flops("NVIDIA H100 80GB HBM3")  # of two GPUs
    assert m.describe_device().splitlines()[0] == (
        "rank 0 holds 3.00 GiB before step 6; MFU against 989 TFLOP/s, dense bf16, of NVIDIA H100 "
        "80GB HBM3"
    )
    assert "attention by cudnn where" in m.describe_device().splitlines()[1]
    capability.major = 8
    assert "attention by flash where" in m.describe_device().splitlines()[1]
    m.job_flops = None
    assert "no MFU: the peak of NVIDIA H100" in m.describe_device()


def test_the_slowest_rank_is_told_when_the_others_wait_for_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(metrics, "host_of", lambda rank: f"node{rank}")
    m = make(tmp_path)
    for seconds in [1.0, 1.0, 1.15, 1.0], [1.0, 1.0, 1.25, 1.1], [1.0, 1.3], [1.0]:
        m.start_step(iter([None]))
        m.end_step(100)
        m.step_time, m.of_ranks = 1.0, seconds
        m.log(m.step, loss=1.0, loss_max=1.0, grad_norm=1.0, lr=0.1, tokens_hash="")
    late = []
    for line in strict_lines(tmp_path):
        late.append([line.get(f"slowest_{name}") for name in ("rank", "host", "by_s")])
    assert late == [[None] * 3, [2, "node2", 0.25], [1, "node1", pytest.approx(0.3)], [None] * 3]
    assert capsys.readouterr().out.splitlines()[2].endswith("  rank 2 (node2) is 0.25 s late")
    m.start_step(iter([None]))
    while time.process_time() < m.cpu_started + 0.05:  # the processor's time is a rank's own
        time.sleep(0.001)  # unlike a wait for others
    m.end_step(100)
    assert 0.05 <= m.cpu_time < m.step_time / 2


@pytest.mark.parametrize(
    "name, peak",
    [
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA B200", 2250e12),
        ("AMD Instinct MI300X", 1307e12),
        ("NVIDIA GB200", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
    ],
)
def test_peak_table(name, peak):
    assert peak_flops(name) == peak


def test_garbage_is_collected_on_schedule_and_the_collector_comes_back(tmp_path, monkeypatch):
    assert gc.isenabled()
    collected = []
    monkeypatch.setattr(
        gc,
        "collect",
        lambda generation=2: collected.append((generation, m.step if collected else None)),
    )
    m = make(tmp_path, gc_every=3, rank0=False)
    assert not gc.isenabled()
    train(m, range(1, 8))
    m.close()
    assert gc.isenabled()
    assert collected == [(2, None), (1, 3), (1, 6)]
    m = make(tmp_path, gc_every=0, rank0=False)
    assert gc.isenabled()
    m.close()


def test_loss_curve():
    lines = [{"step": step, "loss": 8.0 - step / 25} for step in range(1, 101)]
    lines += [{"step": step, "val_loss": 9.0 - step / 25} for step in (50, 100)] + [
        {"step": 101, "loss": None}
    ]
    picture = loss_curve(lines).split("\n")
    legend = "     loss  . training, last 4.000  o validation, last 5.000, best 5.000"
    assert picture[0] == legend
    body = picture[1:13]
    assert len(body) == 12
    for row in picture:
        assert len(row) <= 71
    # begins at the top left
    assert body[0].split("|")[0].strip() == "7.960"
    assert body[0].split("|")[1][0] == "."
    # ends at the bottom right
    assert body[-1].split("|")[0].strip() == "4.000"
    assert body[-1].endswith(".")
    assert sum(row.count("o") for row in body) == 2
    assert picture[-1].split() == ["step", "1", "100"]
    assert "fewer than two" in loss_curve(lines[:1])
    # a flat line has no height to divide by
    assert loss_curve([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 2.0}])


def test_tensorboard_has_the_numbers_of_the_file(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    m = make(tmp_path, steps=3, tensorboard=True)
    train(m, [1, 2, 3])
    m.log_val(3, 1.25, None)
    m.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [
        (1, 8.0),
        (2, 4.0),
        (3, pytest.approx(8 / 3)),
    ]
    assert [(e.step, e.value) for e in events.Scalars("val_loss")] == [(3, 1.25)]


@pytest.mark.parametrize("rank0", [True, False])
@pytest.mark.parametrize(
    "first, stop, name",
    [
        (1, 9, "steps-3-6"),
        (1, 4, "steps-3-4"),
        (1, 3, "steps-3"),
        (5, 6, "steps-5-6"),
        (1, 2, None),
    ],
)
def test_the_named_steps_are_traced_also_by_a_run_that_stops_meanwhile(
    tmp_path, rank0, first, stop, name
):
    """As after a signal: the loop ends with close(), and the file tells which steps it has."""
    m = make(tmp_path, rank0, first_step=first, steps=9, log_every=0, profile="3-6")
    for step in range(first, stop + 1):
        m.start_step(iter([None]))
        torch.zeros(8).view(2, 4).logsumexp(dim=0) if 3 <= step <= 6 else torch.zeros(3).cosh()
        m.end_step(1)
    m.close()
    traces = list(tmp_path.glob("trace/*"))
    assert [path.name for path in traces] == [f"{name}-rank-{0 if rank0 else 1}.json.gz"] * bool(
        name
    )
    for path in traces:
        events = []
        for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]:
            events.append(event.get("name"))
        assert "aten::logsumexp" in events
        assert "aten::cosh" not in events


def test_a_step_that_never_comes_is_said(tmp_path, capsys):
    make(tmp_path, steps=9, profile="30").close()
    assert "--profile: step 30 is none of this run's, 1 to 9" in capsys.readouterr().out


def test_wandb_continues_the_curves_of_a_continued_run_only(tmp_path, monkeypatch):
    """With the real package, where it is installed; offline, so its files are all that is written."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    files = []
    for first_step in (1, 3, 1):
        m = make(tmp_path, first_step=first_step, steps=4, wandb="nano")
        train(m, [first_step, first_step + 1])
        m.close()
        files.append((tmp_path / "wandb" / "latest-run").resolve())
    first, continued, new = (next(file.glob("run-*.wandb")) for file in files)
    assert first.name == continued.name != new.name
    assert first.read_bytes().count(b"grad_norm") == continued.read_bytes().count(b"grad_norm") >= 2


def test_an_instrument_that_is_not_there(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refuses("pip install wandb", MetricsConfig, wandb="x")


@dataclass(kw_only=True)
class Config(MetricsConfig):
    out: str = ""  # folder of the run


def test_plot_draws_the_curves_of_a_run_that_has_ended(tmp_path):
    pytest.importorskip("matplotlib")

    def main(cfg):
        m = make(cfg.out)
        train(m, [1, 2])
        m.close()

    assert run_report(main, Config, ["--out", str(tmp_path)]) == 0
    assert not (tmp_path / "loss.png").exists()
    assert run_report(main, Config, ["--out", str(tmp_path), "--plot"]) == 0
    assert (tmp_path / "loss.png").read_bytes()[1:4] == b"PNG"


def test_lines_of_a_run_whose_checkpoints_are_gone_are_kept(tmp_path, capsys):
    """A disk that is not mounted, a folder that somebody emptied: the curve is all that is left."""
    for n in (1, 2):
        m = make(tmp_path)
        train(m, [1, 2, 3])
        m.close()
        said = capsys.readouterr().out
        if n == 1:
            assert "no checkpoint to continue" not in said
    assert "has lines up to step 3, and there is no checkpoint to continue" in said
    kept = json_lines(tmp_path / "metrics.old-1.jsonl")
    new = json_lines(tmp_path / "metrics.jsonl")
    assert column(kept, "step") == column(new, "step") == [1, 2, 3]
    make(tmp_path).close()
    assert (tmp_path / "metrics.old-2.jsonl").exists()
    make(tmp_path).close()  # no line yet: nothing to keep
    assert not (tmp_path / "metrics.old-3.jsonl").exists()


def test_a_full_disk_at_a_log_line_ends_no_run(tmp_path, capsys):
    """/dev/full answers every write as a full disk does. The lines are written when there is room."""
    m = make(tmp_path)
    train(m, [1])
    whole = m.file
    m.file = open("/dev/full", "wb", buffering=0)
    train(m, [2, 3])
    said = capsys.readouterr().out
    assert said.count("metrics.jsonl cannot be written (No space left on device)") == 1  # once
    assert column(strict_lines(tmp_path), "step") == [1]
    m.file = whole
    train(m, [4])
    assert "is written again, with all lines" in capsys.readouterr().out
    assert column(strict_lines(tmp_path), "step") == [1, 2, 3, 4]
    m.file = open("/dev/full", "wb", buffering=0)
    train(m, [5])
    m.close()
    assert 'lacks its last lines: {"step": 5' in capsys.readouterr().out


@pytest.mark.parametrize("value", [None, "x", [1], {}, True, math.nan, math.inf, 10**400])
def test_an_edited_file_ends_no_run(tmp_path, value):
    """The curve at the end of a run is drawn from the file."""
    lines = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": value}, {"step": 3, "loss": 1.0}]
    assert metrics.points_of(lines, "loss") == {"loss": [(1, 3.0), (3, 1.0)]}
    assert "training" in loss_curve(lines)
    path = tmp_path / "metrics.jsonl"
    path.write_text("[" * 100_000 + "\n" + '{"step": 1, "loss": 3.0}\n')
    assert list(metrics.read_lines(str(path))) == lines[:1]


def test_a_board_that_fails_ends_no_run(tmp_path, capsys):
    """A board is a copy of metrics.jsonl; its disk is full, or its server is away."""
    written = []

    def full(*_):
        raise OSError(28, "No space left on device")

    good = Board("wandb", lambda step, line: written.append(step), lambda: None)
    m = make(tmp_path)
    m.boards = [Board("tensorboard", full, full), good]
    train(m, [1, 2])
    said = capsys.readouterr().out
    assert said.count("--tensorboard failed and is off from here on") == 1
    assert written == [1, 2]
    m.boards = [Board("tensorboard", full, full)]
    m.close()
    assert "metrics.jsonl has all numbers" in capsys.readouterr().out


def test_a_trace_that_cannot_be_written_ends_no_run(tmp_path, capsys):
    m = make(tmp_path, profile="1")
    (tmp_path / "trace").symlink_to(tmp_path / "not" / "there")
    train(m, [1, 2])
    m.close()
    assert "step 1: a file of" in capsys.readouterr().out


def test_a_run_whose_folder_was_removed_does_not_end_well(tmp_path):
    """At the next line, or at the end: nothing of what it goes on to do would be found."""
    out = tmp_path / "run"
    m = make(out)
    train(m, [1])
    shutil.rmtree(out)
    with pytest.raises(ValueError, match="metrics.jsonl was removed under the run"):
        train(m, [2])
    with pytest.raises(ValueError, match="metrics.jsonl was removed under the run"):
        m.close()
