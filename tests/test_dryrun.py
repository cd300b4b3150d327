"""The dry run against reality: the same recipe on real gloo processes has the same bytes, collectives and memory.

What is compared on every pipeline rank's first device: parameters, gradients and optimizer state to the byte; collectives by
axis and operation in number and bytes, with experts that are equally busy, as the dry run assumes; what a micro-batch leaves
for its backward within 1 %, and the peak within 15 %: 0.5 % without a pipeline, 15 % with zero-bubble schedules. Of 5 layers
and 4 or 5 micro-batches the dry run executes 3.
"""
import importlib
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pool import pool
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import dryrun
import parallel
from dryrun import Watch, bubble, rows_of, simulate

REPO = Path(__file__).parent.parent
SMALL = "n_layers=5,dim=64,n_heads=4,n_kv_heads=2,head_dim=16,ffn_dim=128,vocab_size=512"
MOE = SMALL + ",n_experts=8,top_k=2,moe_ffn_dim=64"


def config(recipe: str, flags: dict):
    small = dict(model_args=SMALL, seq_len=64, local_batch_size=4, compute_dtype="float32", device="cpu", steps=2)
    return importlib.import_module(recipe).Config(**small | flags)


def really(recipe: str, flags: dict) -> dict:
    """On a gloo process: the recipe's own main up to its checkpoints, then a step with real tensors, watched."""
    cfg = config(recipe, flags)
    _clear_sharding_prop_cache()  # of the layouts that ran before in this process
    torch.manual_seed(int(parallel.os.environ["RANK"]))
    stages, optimizers, layout = dryrun.build(importlib.import_module(recipe).main, cfg, parallel.make_mesh)
    n = layout.n_microbatches if layout.pp > 1 else layout.accumulation
    first = dryrun.observe(stages, optimizers, layout, cfg.seq_len, n, Watch)  # its memory: nothing is left from before
    second = dryrun.observe(stages, optimizers, layout, cfg.seq_len, n, Watch)  # its collectives: all are connected
    counts = dryrun.totals({key[1:]: number for key, number in second.items() if key[0] == "moved"})
    kept = {key: value for key, value in first.items() if key[0] in ("activations", "flops")}
    return dict(first={k: first[k] for k in ("parameters", "gradients", "optimizer", "measured")} | kept, counts=counts)


LAYOUTS = {
    "one": ("train_llama3", 1, {}),
    "fsdp": ("train_llama3", 2, {}),
    "fsdp, accumulation": ("train_llama3", 2, dict(global_batch_size=40)),
    "fsdp, kept weights, accumulation": ("train_llama3", 2, dict(global_batch_size=40, reshard_after_forward="never")),
    "hsdp": ("train_llama3", 4, dict(dp_replicate=2)),
    "fsdp x tp": ("train_llama3", 4, dict(tp=2)),
    "tp, head gathered": ("train_llama3", 2, dict(tp=2, loss_parallel=False)),
    "cp": ("train_llama3", 2, dict(cp=2)),
    "cp all-to-all, fsdp": ("train_llama3", 4, dict(cp=2, cp_method="alltoall")),
    "recomputed": ("train_llama3", 2, dict(tp=2, ac="full")),
    "half recomputed": ("train_llama3", 2, dict(ac="selective")),
    "pp": ("train_llama3", 2, dict(pp=2)),
    "pp, tied": ("train_llama3", 2, dict(pp=2, model_args=SMALL + ",tie_embeddings=true")),
    "pp x fsdp": ("train_llama3", 4, dict(pp=2)),
    "pp x fsdp, resharded": ("train_llama3", 4, dict(pp=2, reshard_after_forward="always")),
    "pp x tp, zero bubble": ("train_llama3", 4, dict(pp=2, tp=2, pp_schedule="InterleavedZeroBubble")),
    "pp, down and back": ("train_llama3", 2, dict(pp=2, pp_schedule="DualPipeV")),
    "pp, interleaved": ("train_llama3", 2, dict(pp=2, pp_schedule="Interleaved1F1B")),
    "experts": ("train_qwen3", 2, dict(ep=2, model_args=MOE, moe_force_balance=True)),
    "experts x tp x fsdp": ("train_qwen3", 4, dict(ep=2, tp=2, model_args=MOE, moe_force_balance=True)),
    "experts split": ("train_qwen3", 4, dict(ep=2, tp=2, etp=2, model_args=MOE, moe_force_balance=True)),
    "muon": ("train_llama3", 2, dict(optimizer="muon")),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_dry_run_equals_gloo(name):
    recipe, processes, flags = LAYOUTS[name]
    everyone = pool(processes).run(really, recipe, flags)
    degrees = {axis: flags.get(axis, 1) for axis in parallel.AXES}
    degrees["dp_shard"] = processes // math.prod(degrees.values())
    report = dryrun.make_report(importlib.import_module(recipe).main, config(recipe, flags | degrees))
    for pp_rank, rank in enumerate(report.ranks):
        real = everyone[pp_rank * processes // len(report.ranks)]
        first, step = real["first"], rank.step
        for key in ("parameters", "gradients", "optimizer"):
            assert step[key] == first[key], key
        counts = dryrun.totals({key[1:]: n for key, n in step.items() if key[0] == "moved"})
        assert counts.keys() == real["counts"].keys()
        for key, (number, size) in real["counts"].items():
            assert counts[key][0] == number, key
            assert counts[key][1] == size, key
        for key in first:
            if key[0] == "activations":
                assert step[key] == pytest.approx(first[key], rel=0.01), key
        assert rank.peak == pytest.approx(first["measured"], rel=0.15 if "pp" in flags else 0.01)


@pytest.mark.parametrize("left_out", ["attn_norm", "ffn"])
def test_another_plan_is_another_report(monkeypatch, left_out):
    """What is left out of tp_plan is whole on every tp rank. A norm: its gradient is no longer summed. A FFN: more bytes."""
    recipe = importlib.import_module("train_llama3")
    cfg, plan = config("train_llama3", dict(tp=2, dp_shard=2)), recipe.Llama3.tp_plan
    before = dryrun.make_report(recipe.main, cfg).ranks[0].step
    changed = lambda model: {k: v for k, v in plan(model).items() if left_out not in k.split(".")}  # noqa: E731
    monkeypatch.setattr(recipe.Llama3, "tp_plan", changed)
    after = dryrun.make_report(recipe.main, cfg).ranks[0].step
    moved = [dryrun.totals({key[1:]: n for key, n in step.items() if key[0] == "moved"}) for step in (before, after)]
    fewer = {key: moved[0][key][0] - moved[1][key][0] for key in moved[0] if moved[0][key] != moved[1][key]}
    grown = after["parameters"] - before["parameters"]
    if left_out == "attn_norm":
        assert fewer == {("tp", "all_reduce"): 5} and grown == 0
    else:
        assert fewer["tp", "all_gather"] == fewer["tp", "reduce_scatter"] == 2 * 5
        assert grown == 5 * 3 * 64 * 128 * 4 // 2 // 2  # two FSDP ranks have half each, and no longer a quarter


def run(recipe: str, *argv) -> subprocess.CompletedProcess:
    command = [sys.executable, REPO / recipe, *map(str, argv)]
    return subprocess.run(command, capture_output=True, text=True, cwd=REPO, timeout=300)


def test_every_violation_at_once():
    wrong = run("train_llama3.py", "--tp", 3, "--cp", 2, "--seq_len", 250, "--global_batch_size", 7, "--dry_run")
    assert wrong.returncode == 2 and wrong.stderr.count("\n") == 1
    for words in ("--tp 3 does not divide", "--seq_len 250 is not a multiple", "--global_batch_size 7 is not a multiple"):
        assert words in wrong.stderr


def test_the_report_of_a_layout_no_laptop_has(tmp_path):
    """No data is read, no folder made; a layer's numbers by hand: 8B, 8 x 128 devices."""
    out = tmp_path / "run"
    done = run("train_llama3.py", "--flavor", "8B", "--seq_len", 8192, "--local_batch_size", 1, "--dp_shard", 128, "--tp", 8,
               "--dry_run", "--explain", "--data", "/nowhere", "--out", out)
    assert done.returncode == 0, done.stderr
    assert not out.exists()
    assert "8,030,261,248 parameters | dp_shard 128 x tp 8 = 1,024 devices" in done.stdout
    assert "80 GB: fits, 141 GB: fits, 192 GB: fits" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    wo = next(line for line in lines if line[:1] == ["attn.wo.weight"])
    assert wo[1:4] == ["4096", "x", "4096"] and " ".join(wo[4:11]) == "tp: columns, fsdp: rows 32 x 512"
    # two per block and direction, each of 8192 x 4096 bf16
    assert ["forward", "tp", "all_gather", "2", "128", "MiB"] in [line[:6] for line in lines]
    assert ["backward", "tp", "reduce_scatter", "2", "128", "MiB"] in [line[:6] for line in lines]


def test_torchrun_is_not_needed():
    env = dict(parallel.os.environ, RANK="0", WORLD_SIZE="1")
    command = [sys.executable, REPO / "train_llama3.py", "--dry_run"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 2 and "use python, not torchrun" in done.stderr


# ---------------------------------------------------------------- schedules and pictures

BUBBLES = dict(GPipe=3 / 11, LoopedBFS=3 / 19, Interleaved1F1B=3 / 19, InterleavedZeroBubble=1 / 17, ZBVZeroBubble=1 / 17,
               DualPipeV=1 / 17) | {"1F1B": 3 / 11}


@pytest.mark.parametrize("name", BUBBLES)
def test_schedule(name):
    """4 ranks, 8 micro-batches, forward and both halves of a backward of one unit: the papers' bubbles, drawn as computed."""
    stages = 4 if name in parallel.ONE_STAGE_PER_RANK else 8
    times = simulate(rows_of(parallel.ParallelConfig(pp=4, pp_schedule=name), 4, 8, stages))
    assert bubble(times) == pytest.approx(BUBBLES[name], abs=2e-3)
    work = sorted((kind, stage, m) for row in times for *_, kind, stage, m in row if kind in "FB")
    assert [w for w in work if w[0] == "F"] == [("F", s, m) for s in range(stages) for m in range(8)]
    picture = dryrun.text_picture(times)
    drawn = "".join(line.split("|")[1] for line in picture.splitlines())
    assert drawn.count(".") / len(drawn) == pytest.approx(bubble(times), abs=1e-9)
    assert {k: drawn.count(k) for k in "FIW"} == dict.fromkeys("FIW", 8 * stages)


def test_1f1b_holds_as_many_microbatches_as_ranks_are_behind():
    rows = rows_of(parallel.ParallelConfig(pp=4), 4, 8, 4)
    assert [dryrun.in_flight(row, [r], {("activations", 0): 1}) for r, row in enumerate(rows)] == [4, 3, 2, 1]


def test_plot_without_matplotlib_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match="pip install matplotlib"):
        dryrun.draw([[(0, 1, "F", 0, 0)]], "", str(tmp_path / "a.png"))


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    times = simulate(rows_of(parallel.ParallelConfig(pp=4, pp_schedule="DualPipeV"), 4, 8, 8))
    dryrun.draw(times, "DualPipeV", str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


# ---------------------------------------------------------------- docs/parallelism.md

GUIDE = REPO / "docs" / "parallelism.md"
BEGIN, END = "<!-- support matrix: PYTHONPATH=. python tests/test_dryrun.py -->\n", "<!-- end -->\n"
FEATURES = {
    "FSDP": lambda f, p, fsdp: fsdp > 1,
    "replicas": lambda f, p, fsdp: f.get("dp_replicate", 1) > 1,
    "TP": lambda f, p, fsdp: f.get("tp", 1) > 1,
    "CP": lambda f, p, fsdp: f.get("cp", 1) > 1,
    "PP": lambda f, p, fsdp: f.get("pp", 1) > 1,
    "EP": lambda f, p, fsdp: f.get("ep", 1) > 1,
    "ETP": lambda f, p, fsdp: f.get("etp", 1) > 1,
    "recomputation": lambda f, p, fsdp: f.get("ac", "none") != "none",
    "document masks": lambda f, p, fsdp: p.get("doc", False),
    "tied embeddings": lambda f, p, fsdp: p.get("tie_embeddings", False),
    "accumulation": lambda f, p, fsdp: p["n"] > p["b"] * fsdp * f.get("dp_replicate", 1),
}


def support_matrix() -> str:
    """How many layouts of tests/test_parallel.py have both features; on the diagonal, the feature at all."""
    from test_parallel import LAYOUTS, SLOW

    found = []
    for processes, flags, problem in LAYOUTS + SLOW:
        others = math.prod(flags.get(axis, 1) for axis in parallel.AXES if axis != "dp_shard")
        found.append({name for name, has in FEATURES.items() if has(flags, problem, processes // others)})
    names = list(FEATURES)
    lines = [["", *names], ["---"] * (len(names) + 1)]
    lines += [[a, *(str(sum({a, b} <= f for f in found) or "-") for b in names)] for a in names]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def test_the_support_matrix_is_that_of_the_tests():
    written = GUIDE.read_text().split(BEGIN)[1].split(END)[0]
    assert written == support_matrix(), "stale: run `PYTHONPATH=. python tests/test_dryrun.py`"


if __name__ == "__main__":
    text = GUIDE.read_text()
    GUIDE.write_text(text.split(BEGIN)[0] + BEGIN + support_matrix() + END + text.split(END)[1])
