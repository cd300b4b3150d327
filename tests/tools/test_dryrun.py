"""--dry_run, against tools/reports/dryrun.py: the same recipe on real gloo processes has the same bytes,
collectives and memory.

Compared on every pipeline rank's first device: parameters, gradients and optimizer state to the
byte; collectives by axis and operation in number and bytes, with equally busy experts, as the dry
run assumes; activations of a micro-batch within 1 %; the peak within 1 % without a pipeline, 15 %
with a pipeline. Of 4 or 5 micro-batches the dry run executes 2. Layouts implied by others are slow
tests.
"""

import importlib
import math
import os
import re
import sys
from dataclasses import replace
from unittest import mock

import pytest
import torch
from dry import MOE, REPO, Settled, collectives_of, config, recipe_of, report_of, run
from layouts import Flags, layouts_of
from pool import pool
from programs import run_program
from saves import refuses
from tables import as_parameters
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

import models.attention
import parallel
from distributed import experts, launch, pipeline, schedule
from distributed import layout as layouts
from distributed.layout import AXES, Layout
from distributed.pipeline import n_microbatches
from tools.reports import best_layouts as best
from tools.reports import dryrun
from tools.reports.costs import tensors_in
from tools.reports.dryrun import Watch, rows_of
from tools.reports.explain import count_block, describe_split, explain, list_collectives
from tools.reports.parts import tokens_of
from tools.reports.stop_main import stop_main


# A dry run is about GPUs: attention keeps what torch's kernels keep, and not the probabilities that
# a CPU keeps in bf16.
@mock.patch.object(models.attention, "SHORT_ON_CPU", 0)
def really(recipe: str, flags: dict) -> dict:
    """On a gloo process: the recipe's own main up to its checkpoints, then a step with real
    tensors, watched."""
    cfg = config(recipe, flags)
    _clear_sharding_prop_cache()  # of earlier layouts in the same process
    torch.manual_seed(int(os.environ["RANK"]))

    def connect(layout, cfg, *args, **kwargs):
        return replace(layout, compute_dtype=getattr(torch, cfg.compute_dtype))

    stages, optimizers, layout = dryrun.build(importlib.import_module(recipe).main, cfg, connect)
    if layout.pp > 1:
        n = n_microbatches(layout)
    else:
        n = layout.accumulation
    # for memory: nothing is left over yet
    first = dryrun.observe(stages, optimizers, layout, cfg.seq_len, n, Settled(layout))
    # for collectives: all connections exist
    second = dryrun.observe(stages, optimizers, layout, cfg.seq_len, n, Watch(layout))
    counts = collectives_of(second)
    kept = {key: value for key, value in first.items() if key[0] in ("activations", "flops")}
    return dict(
        first={k: first[k] for k in ("parameters", "gradients", "optimizer", "measured")} | kept,
        counts=counts,
    )


@pytest.mark.parametrize(
    "row",
    [
        *as_parameters(layouts_of("dry run")),
        *as_parameters(layouts_of("dry run, slow"), pytest.mark.slow),
    ],
)
def test_dry_run_equals_gloo(row):
    processes, flags, model = row
    recipe, flags = recipe_of(flags, model)
    everyone = pool(processes).run(really, recipe, flags)
    degrees = {axis: flags.get(axis, 1) for axis in AXES}
    degrees["dp_shard"] = processes // math.prod(degrees.values())
    report = dryrun.make_report(
        importlib.import_module(recipe).main, config(recipe, flags | degrees)
    )
    for pp_rank, rank in enumerate(report.ranks):
        real = everyone[pp_rank * processes // len(report.ranks)]
        first = real["first"]
        step = rank.step
        for key in ("parameters", "gradients", "optimizer"):
            assert step[key] == first[key], f"pp rank {pp_rank}, bytes: {key}"
        counts = collectives_of(step)
        assert counts == real["counts"]
        for key in first:
            if key[0] == "activations":
                assert step[key] == pytest.approx(first[key], rel=0.01), f"pp rank {pp_rank}: {key}"
        # pipelines: another order of micro-batches; split experts: the real step has already freed
        # a tensor of sorted tokens
        if "pp" in flags:
            error = 0.15
        elif "etp" in flags:
            error = 0.02
        else:
            error = 0.01
        peak = pytest.approx(first["measured"], rel=error)
        assert rank.peak == peak, f"pp rank {pp_rank}: bytes at the peak, dry run and real step"


@pytest.mark.slow
@pytest.mark.parametrize("left_out", ["attn_norm", "ffn"])
def test_another_plan_is_another_report(monkeypatch, left_out):
    """A norm without style is refused. A FFN that every tp rank holds whole, for T/tp tokens, has
    more bytes."""
    recipe = importlib.import_module("train_llama3")
    cfg = config("train_llama3", dict(tp=2, dp_shard=2))
    plan = recipe.Llama3.tp_plan
    before = dryrun.make_report(recipe.main, cfg).ranks[0].step
    if left_out == "ffn":
        whole = {f"blocks.*.ffn.w{i}": "sequence_linear" for i in (1, 2, 3)}
    else:
        whole = {}

    def changed(model):
        return {k: v for k, v in plan(model).items() if left_out not in k.split(".")} | whole

    monkeypatch.setattr(recipe.Llama3, "tp_plan", changed)
    if left_out == "attn_norm":
        refuses("blocks.0.attn_norm.weight has no style", dryrun.make_report, recipe.main, cfg)
        return
    after = dryrun.make_report(recipe.main, cfg).ranks[0].step
    moved = []
    for step in (before, after):
        moved.append(collectives_of(step))
    fewer = {}
    for key in moved[0]:
        if moved[0][key] != moved[1][key]:
            fewer[key] = moved[0][key][0] - moved[1][key][0]
    grown = after["parameters"] - before["parameters"]
    expected = {
        ("tp", "all_gather"): 2 * 5,
        ("tp", "reduce_scatter"): 2 * 5,
        ("tp", "all_reduce"): -3 * 5,
    }
    assert {key: n for key, n in fewer.items() if n} == expected
    # two FSDP ranks have half each, and no longer a quarter
    assert grown == 5 * 3 * 64 * 128 * 4 // 2 // 2


# of 8 experts: two on each rank, or one, which cannot be cut
@pytest.mark.parametrize("ep, parts", [(4, 2), (8, 1)])
def test_tokens_travel_in_parts_on_gpus(ep, parts):
    """As many bytes as on a CPU, where rows travel in one part, in as many times the exchanges, but
    for those of the counts. A layer exchanges rows, their weights and results, and the gradients of
    all three."""

    def exchanges(device):
        step = (
            report_of("train_qwen3", model_args=MOE, dp_shard=8, ep=ep, device=device).ranks[0].step
        )
        return collectives_of(step)["ep", "all_to_all"]

    (on_cpu, size), (on_gpu, same) = exchanges("cpu"), exchanges("cuda")
    assert (on_cpu, on_gpu) == (5 * (1 + 6), 5 * (1 + 6 * parts))
    assert same == size


def test_bound_counts_causal_attention_at_half():
    report = report_of(seq_len=256, local_batch_size=1)
    layers = 5
    heads = 4
    head_dim = 16
    attention = 12 * layers * heads * head_dim * 256**2  # 4 in the forward, 8 in the backward
    assert report.least_flops == pytest.approx(
        report.ranks[0].flops("forward", "backward") - attention / 2
    )
    halves = []
    for m in ("allgather", "alltoall"):
        halves.append(report_of(seq_len=256, local_batch_size=1, cp=2, dp_shard=1, cp_method=m))
    assert [2 * half.least_flops for half in halves] == [pytest.approx(report.least_flops)] * 2


@pytest.mark.slow
def test_every_way_to_save_memory_shows():
    flags = dict(dp_shard=2, seq_len=512, compute_dtype="bfloat16")
    plain = report_of(**flags).ranks[0]
    kept = {}
    for ac in ("op", "selective", "full"):
        kept[ac] = report_of(ac=ac, **flags).ranks[0].activations
    assert kept["full"] < kept["selective"] < plain.activations
    assert kept["full"] < kept["op"] < plain.activations
    compiled, budget = (
        report_of(ac=ac, compile=True, **flags).ranks[0].activations for ac in ("none", "budget")
    )
    assert budget == compiled < plain.activations  # the report says so
    full = report_of(ac="full", **flags)
    # everything except the head: the loss computes the head's gradients in the forward
    assert 0.7 < full.ranks[0].flops("recompute") / full.ranks[0].flops("forward") < 0.9
    assert full.mfu_bound < 0.85
    offloaded = report_of(cpu_offload=True, **flags).ranks[0]
    assert offloaded.peak < plain.peak - 0.9 * (plain.step["parameters"] + plain.step["optimizer"])
    wide = report_of(**flags | dict(compute_dtype="float32")).ranks[0]
    assert 1.4 * plain.activations < wide.activations < 2.1 * plain.activations


@pytest.mark.slow
def test_compiled_blocks_keep_no_silu():
    """The compiler recomputes a single activation of a block: silu's result, (B, T, F)."""
    B = 4
    T = 64
    F = 128
    layers = 5
    for flags, kept in ({}, layers), (dict(ac="selective"), 2), (dict(ac="full"), 0):
        eager, compiled = (
            report_of(**flags, compile=on).ranks[0].activations for on in (False, True)
        )
        assert eager - compiled == kept * B * T * F * 4, flags


def test_a_peak_fits_up_to_the_last_byte(capsys):
    report = report_of(dp_shard=1)
    cfg = config("train_llama3", dict(dp_shard=1))
    for peak, verdict in [
        (80e9, "80 GB: fits, 141 GB: fits, 192 GB: fits"),
        (80e9 + 1, "80 GB: does not fit, 141 GB: fits"),
        (192e9 + 1, "141 GB: does not fit, 192 GB: does not fit"),
    ]:
        report.ranks[0].peak = peak
        dryrun.print_report(cfg, report, "H100")
        assert verdict in capsys.readouterr().out


def test_torchrun_is_not_needed():
    env = dict(os.environ, RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="29500")
    command = [sys.executable, REPO / "train_llama3.py", "--dry_run"]
    done = run_program(command, env=env, timeout=120)
    assert done.returncode == 2
    assert "use python, not torchrun" in done.stderr


# ---------------------------------------------------------------- schedules and pictures


def test_1f1b_holds_as_many_microbatches_as_ranks_are_behind():
    rows = rows_of(Flags(pp=4), 4, 8, 4)
    assert [dryrun.in_flight(row, [r], {("activations", 0): 1}) for r, row in enumerate(rows)] == [
        4,
        3,
        2,
        1,
    ]


def test_activations_are_kept_from_forward_to_the_end_of_backward():
    """Also where the peak is not at the start, and a backward in halves: I and W."""
    step = {("activations", 0): 10, ("activations", 1): 1}
    row = [(kind, 0, m) for m, kind in enumerate("FBFIFWF")]
    assert dryrun.in_flight(row, [0, 1], step) == 20
    assert dryrun.in_flight([*row, ("F", 1, 0)], [0, 1], step) == 21


# ---------------------------------------------------------------- --explain


def test_tokens_and_tensors_of_a_rank():
    layout = Layout(dp_replicate=2, dp_shard=2, global_batch_size=8)
    place = dict(dp_replicate=1, dp_shard=0, cp=0, tp=0)
    assert tokens_of(layout, place, 16)["sequences"] == (4, 6)
    x, y, z = (torch.empty(n, device="meta") for n in (1, 2, 3))
    found = tensors_in((x, {"y": [y], "more": None}, 3, z))
    assert [len(tensor) for tensor in found] == [1, 2, 3]


@pytest.mark.slow
def test_the_report_of_a_layout_no_laptop_has(tmp_path):
    """No data is read, no folder made; expected numbers were computed by hand: 8B, 8 x 128 devices."""
    out = tmp_path / "run"
    done = run(
        "train_llama3.py",
        "--flavor",
        "8B",
        "--seq_len",
        8192,
        "--local_batch_size",
        1,
        "--dp_shard",
        128,
        "--tp",
        8,
        "--dry_run",
        "--explain",
        "--data",
        "/nowhere",
        "--out",
        out,
    )
    assert done.returncode == 0, done.stderr
    assert not out.exists()
    assert "8,030,261,248 parameters | dp_shard 128 x tp 8 = 1,024 devices" in done.stdout
    assert "80 GB: fits, 141 GB: fits, 192 GB: fits" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    wo = next(line for line in lines if line[:1] == ["attn.wo.weight"])
    assert wo[1:4] == ["4096", "x", "4096"]
    assert " ".join(wo[4:11]) == "tp: columns, fsdp: rows 32 x 512"
    # two per block and direction, each of 8192 x 4096 bf16
    assert ["forward", "tp", "all_gather", "2", "128", "MiB"] in [line[:6] for line in lines]
    assert ["backward", "tp", "reduce_scatter", "2", "128", "MiB"] in [line[:6] for line in lines]


@pytest.mark.slow
def test_one_block_of_split_experts():
    """With --ep a block names neighbours for FSDP to gather early, among them blocks that --explain
    leaves out."""
    flags = dict(dp_shard=2, ep=2, model_args=MOE)
    _, name, parameters, step = count_block(
        importlib.import_module("train_qwen3").main, config("train_qwen3", flags)
    )
    moved = {tuple(key): number for *key, number, _, _ in list_collectives(step)}
    assert name == "2"
    assert [split for n, _, split, _ in parameters if n == "moe.experts.w1"] == ["ep: dim 0"]
    # no counts and no weights go back
    assert moved["forward", "ep", "all_to_all"] == 4
    assert moved["backward", "ep", "all_to_all"] == 3
    assert (
        moved["forward", "fsdp", "all_gather"] == moved["backward", "fsdp", "reduce_scatter"] == 1
    )


def test_how_a_parameter_is_split():
    main = importlib.import_module("train_llama3").main
    for flags, said in (
        (dict(tp=2, dp_shard=2), "tp: columns, fsdp: rows"),
        (dict(tp=1, dp_shard=1), "whole"),
    ):
        with dryrun.dry_world(main, config("train_llama3", flags), 0) as (stages, _, _):
            assert describe_split(stages[0].blocks["0"].attn.wo.weight) == said
    assert describe_split(torch.empty(2, 2)) == "whole"


def test_too_few_layers_are_refused_unless_there_is_a_page():
    cfg = config("train_llama3", dict(pp=4, dp_shard=1, local_batch_size=4))
    assert count_block(importlib.import_module("train_llama3").main, cfg) is None
    refuses("three layers on a rank.*--html FILE", explain, cfg, None)


# ---------------------------------------------------------------- docs/parallelism.md

GUIDE = REPO / "docs" / "parallelism.md"
BEGIN = "<!-- support matrix: PYTHONPATH=.:tests python tests/tools/test_dryrun.py -->\n"
END = "<!-- end -->\n"


def features_of(processes: int, flags: dict, problem: dict) -> dict[str, bool]:
    """{feature: whether a layout of layouts.txt has it}"""
    replicas = flags.get("dp_replicate", 1)
    others = math.prod(flags.get(axis, 1) for axis in AXES if axis != "dp_shard")
    fsdp = processes // others
    return {
        "FSDP": fsdp > 1,
        "replicas": replicas > 1,
        "TP": flags.get("tp", 1) > 1,
        "CP": flags.get("cp", 1) > 1,
        "PP": flags.get("pp", 1) > 1,
        "EP": flags.get("ep", 1) > 1,
        "ETP": flags.get("etp", 1) > 1,
        "recomputation": flags.get("ac", "none") != "none",
        "document masks": problem.get("doc", False),
        "tied embeddings": problem.get("tie_embeddings", False),
        "accumulation": problem["n"] > problem["b"] * fsdp * replicas,
    }


def support_matrix() -> str:
    """How many layouts of tests/test_parallel.py have both features; on the diagonal, the feature
    at all."""
    rows = [features_of(*layout) for layout in layouts_of("layouts").values()]
    names = list(rows[0])
    lines = [["", *names], ["---"] * (len(names) + 1)]
    for a in names:
        line = [a]
        for b in names:
            both = sum(row[a] and row[b] for row in rows)
            line.append(str(both or "-"))
        lines.append(line)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def test_the_support_matrix_is_that_of_the_tests():
    written = GUIDE.read_text().split(BEGIN)[1].split(END)[0]
    assert written == support_matrix(), (
        "stale: run `PYTHONPATH=.:tests python tests/tools/test_dryrun.py`"
    )


def test_the_guide_names_functions_that_exist():
    rooms = [parallel, pipeline, schedule, experts, launch, layouts]
    named = []
    for line in GUIDE.read_text().split("Function")[1:]:
        for name in re.findall(r"`(\w+)`", line.split(".")[0]):
            named.append(name)
    assert len(named) > 8
    assert [name for name in named if not any(hasattr(m, name) for m in rooms)] == ["tp_plan"]
    pictures = re.findall(r"!\[\w+\]\((\S+)\)", GUIDE.read_text())
    assert len(pictures) > 5
    for name in pictures:
        assert (GUIDE.parent / name).exists()


# axis of the guide's table: flags of the run, and the guide's word for each (axis, operation) of
# pipeline rank 0
MEASURED = {
    "dp_shard": (
        dict(dp_shard=8),
        {("fsdp", "all_gather"): "gathers", ("fsdp", "reduce_scatter"): "reduces"},
    ),
    "dp_replicate": (
        dict(dp_shard=1, dp_replicate=8),
        {("dp_replicate", "all_reduce"): "all-reduces"},
    ),
    "tp": (
        dict(dp_shard=1, tp=8),
        {("tp", "all_gather"): "gathers", ("tp", "reduce_scatter"): "scatters"},
    ),
    "cp": (
        dict(dp_shard=1, cp=8),
        {("cp", "all_gather"): "gathers", ("cp", "reduce_scatter"): "scatters"},
    ),
    "cp ": (dict(dp_shard=1, cp=8, cp_method="alltoall"), {("cp", "all_to_all"): "exchanges"}),
}


@pytest.mark.slow
@pytest.mark.parametrize("axis", MEASURED)
def test_the_measured_numbers_of_the_guide(axis):
    flags, words = MEASURED[axis]
    flags |= dict(
        flavor="8B", model_args="", seq_len=8192, local_batch_size=1, compute_dtype="auto"
    )
    step = report_of(**flags).ranks[0].step
    counts = collectives_of(step)
    said = "; ".join(
        f"{counts[key][0]} {word} {dryrun.format_bytes(counts[key][1])}"
        for key, word in words.items()
    )
    assert f"| {said} |" in GUIDE.read_text()


if __name__ == "__main__":
    text = GUIDE.read_text()
    GUIDE.write_text(text.split(BEGIN)[0] + BEGIN + support_matrix() + END + text.split(END)[1])


def test_a_table_without_experts_split_says_why():
    """--best of a recipe with experts, where no row has --ep."""
    cfg = config("train_qwen3", {})
    plain = (1e9, {"arithmetic": 1.0}, cfg)
    split = (1e9, {"arithmetic": 1.0, "ep": 3.0}, replace(cfg, ep=2))
    assert "none is legal" in best.explain_no_ep([plain], 1.0, 8e10)
    text = best.explain_no_ep([plain, split], 1.0, 8e10)
    assert "--ep 2, is estimated at 4 s, bound by ep, and the slowest row takes 1 s" in text
    assert "does not fit" in best.explain_no_ep([plain, split], 1.0, 1e8)


def test_links_are_slow_beyond_a_node():
    cfg = config("train_llama3", dict(tp=best.NODE, dp_shard=2))
    seconds = best.seconds_per_byte(cfg, "H100")
    assert 1 / seconds["tp"] == pytest.approx(450e9 * 8 / 7)  # 8 devices are a node
    assert 1 / seconds["fsdp"] == pytest.approx(50e9 * 2)


@pytest.mark.parametrize("given, total", [(-1, 8), (16, 16)])
def test_all_layouts_of_best_train_on_the_same_batch(given, total):
    """Without --global_batch_size: that of one micro-batch of 4 on each of two devices."""
    cfg = config("train_llama3", dict(global_batch_size=given))
    called, options = stop_main(importlib.import_module("train_llama3").main, cfg, "check_layout")
    found = best.legal_layouts(cfg, 2, called[1], options)
    assert {c.dp_shard for c in found} == {1, 2}
    assert {c.global_batch_size for c in found} == {total}


NEVER = "--reshard_after_forward never"


def flags_of(cell: str) -> dict:
    """{flag: value} of a cell of the table of --best."""
    flags = {}
    for pair in cell.removeprefix("--").split(" --"):
        name, value = pair.split()
        if value.isdigit():
            value = int(value)
        flags[name] = value
    return flags


@pytest.mark.slow
def test_best_layouts_are_dry_runs_of_their_flags(monkeypatch, capsys):
    """The table's peak is that of a dry run of its flags; slow links, or a small device, give
    another table."""
    main = importlib.import_module("train_qwen3").main
    cfg = config("train_qwen3", dict(tp=2, model_args=MOE))
    found = []
    monkeypatch.setattr(best, "SHOWN", 3)
    monkeypatch.setattr(best, "MOST_RUNS", 3)
    for speed, bounds in (1e15, {"arithmetic"}), (1e6, {"tp", "efsdp"}):
        monkeypatch.setitem(best.MACHINES, "H100", (80, speed, speed))
        best.print_best(main, cfg, 4, "H100")
        title, table, *sentences = capsys.readouterr().out.split("\n\n")
        reason = any("no row has --ep: " in sentence for sentence in sentences)
        rows = table.splitlines()[1:]
        assert any("--ep" in row for row in rows) != reason
        assert title.startswith("26 legal layouts of 4 devices")
        assert "--global_batch_size 16:" in title
        found.append([re.split("  +", row) for row in rows])
        assert sum(NEVER not in row for row in rows) == 3
        assert {row[3] for row in found[-1] if NEVER not in row[4]} == bounds
        for row in found[-1]:
            assert "--tp 2" in row[4]
        assert found[-1] == sorted(found[-1], key=lambda row: float(row[0][:-2]))
    plain = [row for row in found[1] if NEVER not in row[4]]
    c = replace(cfg, **flags_of(plain[1][4]), global_batch_size=16)
    assert c.ep == 2
    assert plain[1][2] == dryrun.format_bytes(dryrun.make_report(main, c).ranks[0].peak)
    monkeypatch.setitem(best.MACHINES, "H100", (1e-3, 1e6, 1e6))
    refuses(
        "none of 26 legal layouts fits a device of 0.001 GB; of 3 dry runs",
        best.print_best,
        main,
        cfg,
        4,
        "H100",
    )


@pytest.mark.slow
def test_a_row_that_never_reshards_is_a_dry_run(monkeypatch, capsys):
    """A layout that also fits with never has a second row: the peak is that of a dry run with the
    flag, and the all-gathers that it saves are those that this dry run lacks."""
    main = importlib.import_module("train_llama3").main
    cfg = config("train_llama3", dict(dp_shard=2, local_batch_size=1, global_batch_size=2))
    monkeypatch.setattr(best, "SHOWN", 1)
    best.print_best(main, cfg, 2, "H100")
    said = capsys.readouterr()
    _, table, sentence = said.out.split("\n\n")
    assert sentence.startswith(NEVER)
    rows = [re.split("  +", line) for line in table.splitlines()[1:]]
    plain = next(row for row in rows if NEVER not in row[4])
    kept = next(row for row in rows if NEVER in row[4])
    assert kept[4] == f"{plain[4]} {NEVER}"
    assert f"dry run 1, fits too: {'  '.join(kept)}" in said.err
    flags = flags_of(kept[4])
    report = dryrun.make_report(main, replace(cfg, **flags))
    assert kept[2] == dryrun.format_bytes(report.ranks[0].peak)
    again = dryrun.make_report(main, replace(cfg, **flags | {"reshard_after_forward": "default"}))
    number, size = dryrun.gathered_again(again)
    left, left_size = dryrun.gathered_again(report)
    assert number > left
    assert kept[5] == f"{number - left:,} all-gathers, {dryrun.format_bytes(size - left_size)}"


def test_never_resharding_is_proposed_where_it_fits(capsys):
    """The all-gathers that the line promises to save are those that a dry run with never lacks, and
    its peak is not above the promised one."""
    flags = dict(dp_shard=2, local_batch_size=2, global_batch_size=8)  # two micro-batches
    before = report_of(**flags)
    after = report_of(**flags, reshard_after_forward="never")
    number, size = dryrun.gathered_again(before)
    saved = []
    for report in (before, after):
        saved.append(collectives_of(report.ranks[0].step)["fsdp", "all_gather"])
    # each micro-batch gathers the embedding and four of five blocks again, and the last not; never
    # also keeps weights for the next micro-batch
    assert number == 2 * 5
    assert saved[0][0] - saved[1][0] >= number
    assert saved[0][1] - saved[1][1] >= size
    assert dryrun.gathered_again(after) == (0, 0)
    kept = size // before.n
    assert before.ranks[0].peak < after.ranks[0].peak <= before.ranks[0].peak + kept
    cfg = config("train_llama3", flags)
    dryrun.print_report(cfg, before, "H100")
    assert (
        f"--reshard_after_forward never fits 80 GB too: it saves {number} "
        in capsys.readouterr().out
    )
    before.ranks[0].peak = 80_000_000_000 - kept + 1
    dryrun.print_report(cfg, before, "H100")
    dryrun.print_report(cfg, after, "H100")
    assert "--reshard_after_forward" not in capsys.readouterr().out
