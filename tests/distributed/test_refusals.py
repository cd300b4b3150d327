"""Wrong command lines, against distributed/refusals.py: each rule of check_layout with its line,
and what a user sees.

`test_recipes.py` runs the command lines that are right, `test_messages.py` has all other wrong
ones.
"""

import re
from dataclasses import asdict, replace

import pytest
import torch
from layouts import Flags, build, config
from pool import pool
from runs import ended, launch
from saves import refuses

from distributed.checks import check_replicas
from distributed.layout import local_tensor
from distributed.pipeline import n_microbatches
from distributed.refusals import check_layout
from models.llama3 import Llama3Config

MODEL = Llama3Config(
    n_layers=6, n_heads=8, n_kv_heads=4, head_dim=64, ffn_dim=512, max_seq_len=8192
)
RECIPE = dict(seq_len=64, local_batch_size=4, global_batch_size=-1, device="cpu", world_size=1)
FIELDS = asdict(MODEL)


def check(**given):
    """check_layout with these flags, recipe values and fields of the model, on top of one process
    and MODEL."""
    recipe = RECIPE | {k: given.pop(k) for k in RECIPE if k in given}
    model = replace(MODEL, **{k: given.pop(k) for k in list(given) if k in FIELDS})
    on_cuda = given.pop("dry_run", None)  # a dry run takes GPUs for granted
    return check_layout(Flags(**given), model, **recipe, on_cuda=on_cuda)


def refusal(**given) -> str:
    return refuses(".", check, **given)


PP = dict(world_size=2, pp=2)
TWO_LAYERS = PP | dict(n_layers=2)
TWO = "tok_embeddings,blocks.0;blocks.1,norm,head"  # stages of two layers
FOUR = "tok_embeddings;blocks.0;blocks.1;norm,head"
# (what is asked for, a regular expression that the one line must match, the cures that the line
# names: changes with which the same is accepted). No cure where it needs a GPU or another flavor.
RULES = [
    (
        dict(world_size=4, dp_replicate=2, dp_shard=3),
        r"leave out --dp_shard \(it becomes 2\).*or start 6 processes",
        [dict(world_size=6)],
    ),
    (
        dict(world_size=6, tp=4),
        r"6 processes but.*= 1\*1\*1\*4 = 4.*change a degree or start 4",
        [dict(world_size=4)],
    ),
    (
        dict(world_size=1, dp_shard=2),
        r"1 process but.*leave out --dp_shard \(it becomes 1\)",
        [dict(dp_shard=-1)],
    ),
    (dict(device="cuda"), "torch finds 0 GPUs.*use --device cpu", [dict(device="cpu")]),
    (
        dict(float8="rowwise", compile=True),
        "--float8 rowwise is emulated on CPU.*leave out --compile",
        [dict(compile=False)],
    ),
    (
        dict(float8="tensorwise", float8_all_gather=True),
        "--float8_all_gather has no effect without a GPU",
        [dict(float8_all_gather=False)],
    ),
    (dict(pp=0), "--pp 0 must be at least 1", []),
    (dict(dp_replicate=0), "--dp_replicate 0 must be at least 1", []),
    (dict(dp_shard=0), "--dp_shard 0 must be at least 1", []),
    (
        dict(dp_shard=-2),
        "--dp_shard -2 must be at least 1",
        [dict(world_size=6, dp_replicate=2, dp_shard=-1)],
    ),
    (dict(cp=0), "--cp 0 must be at least 1", []),
    (dict(tp=0), "--tp 0 must be at least 1", []),
    (
        dict(local_batch_size=0),
        "--local_batch_size 0 must be at least 1",
        [dict(local_batch_size=1)],
    ),
    (
        dict(global_batch_size=10),
        "10 is not a multiple of --local_batch_size 4 x 1 data rank = 4.* 8$",
        [dict(global_batch_size=8)],
    ),
    (
        dict(world_size=4, dp_replicate=2, global_batch_size=20),
        "4 x 4 data ranks = 16.*--global_batch_size 16",
        [dict(global_batch_size=16)],
    ),
    (
        dict(global_batch_size=0),
        "--global_batch_size 0.*use --global_batch_size 4",
        [dict(global_batch_size=4)],
    ),
    (
        dict(seq_len=8193),
        "is longer than the model's max_seq_len 8192.*--model_args max_seq_len=8193",
        [dict(max_seq_len=8193)],
    ),
    (
        dict(world_size=4, cp=2, tp=2, seq_len=30),
        "--seq_len 30 is not a multiple of 2 x cp x tp = 8.*use --seq_len 32",
        [dict(seq_len=32)],
    ),
    (dict(world_size=4, cp=2, tp=2, seq_len=3), "use --seq_len 8", [dict(seq_len=8)]),
    (
        dict(world_size=4, tp=4, seq_len=255, max_seq_len=255),
        "use --seq_len 252",
        [dict(seq_len=252)],
    ),
    (
        dict(world_size=8, tp=8),
        "--tp 8 does not divide n_kv_heads 4.*use 1, 2 or 4",
        [dict(world_size=4, tp=4)],
    ),
    (
        dict(world_size=3, tp=3, seq_len=66),
        "n_heads 8, n_kv_heads 4, ffn_dim 512.*use 1, 2 or 4",
        [dict(world_size=2, tp=2)],
    ),
    (
        dict(world_size=4, tp=4, ffn_dim=514),
        "--tp 4 does not divide ffn_dim 514.*use 1 or 2",
        [dict(world_size=2, tp=2)],
    ),
    (
        dict(world_size=2, tp=2, async_tp=True),
        "--async_tp.*CUDA.*--compile.*leave it out",
        [dict(async_tp=False)],
    ),
    (
        dict(world_size=3, cp=3, cp_method="alltoall", seq_len=66),
        "cp 3.*8 heads.*use --cp_method allgather",
        [dict(cp_method="allgather")],
    ),
    (
        dict(world_size=6, cp=6, cp_method="alltoall", seq_len=60, n_heads=12),
        "4 kv heads.*use --cp_method allgather",
        [dict(cp_method="allgather")],
    ),
    (
        dict(ac="budget"),
        "--ac budget needs --compile.*add --compile or use --ac op",
        [dict(compile=True), dict(ac="op")],
    ),
    (dict(ac="selective", ac_every=0), "--ac_every 0.*at least 1", [dict(ac_every=1)]),
    (
        dict(ac="budget", compile=True, ac_budget=1.5),
        "--ac_budget 1.5.*between 0 and 1",
        [dict(ac_budget=1.0)],
    ),
    (
        PP | dict(pp_microbatch_size=3),
        "3 does not divide --local_batch_size 4.*use 1, 2 or 4",
        [dict(pp_microbatch_size=2)],
    ),
    (
        PP | dict(pp_microbatch_size=3, local_batch_size=1125899906842624),
        "use 1, 2, 4.*2048 or 4096",
        [dict(pp_microbatch_size=2)],
    ),
    (
        PP | dict(local_batch_size=1),
        "1F1B .* needs at least 2 micro-batches, but there are 1.* 2",
        [dict(local_batch_size=2)],
    ),
    (
        PP | dict(pp_schedule="DualPipeV", local_batch_size=3),
        "DualPipeV with --pp 2 needs at least 4.* 4",
        [dict(local_batch_size=4)],
    ),
    (
        PP | dict(pp_schedule="ZBVZeroBubble", local_batch_size=1),
        "ZBVZeroBubble with --pp 2 needs at least 2.* 2",
        [dict(local_batch_size=2)],
    ),
    (
        PP | dict(pp_schedule="InterleavedZeroBubble", local_batch_size=1),
        "InterleavedZeroBubble with --pp 2 needs at least 2.* 2",
        [dict(local_batch_size=2)],
    ),
    (
        PP | dict(pp_schedule="Interleaved1F1B", local_batch_size=5),
        "2 rounds of --pp 2 divide, not 5.* 4",
        [dict(local_batch_size=4)],
    ),
    (
        dict(world_size=8, pp=8, local_batch_size=8),
        "6 layers are too few for 8 pipeline stages.*or more layers",
        [dict(n_layers=8)],
    ),
    (
        PP | dict(n_layers=4, pp_first_stage_less_layers=9),
        "4 layers are too few for 2 pipeline stages",
        [dict(pp_first_stage_less_layers=1)],
    ),
    (
        PP | dict(pp_layers_per_stage=3),
        "makes 3 stages of 6 layers, no multiple of --pp 2",
        [dict(pp_layers_per_stage=4)],
    ),
    (
        PP | dict(pp_layers_per_stage=2),
        "4 stages over --pp 2 ranks.*1F1B needs exactly 1 per rank",
        [dict(pp_layers_per_stage=4)],
    ),
    (
        PP | dict(pp_schedule="ZBVZeroBubble", pp_layers_per_stage=2, n_layers=14),
        "8 stages over --pp 2.*exactly 2",
        [dict(pp_layers_per_stage=4)],
    ),
    (
        TWO_LAYERS | dict(pp_schedule="LoopedBFS", pp_stage_fqns=TWO),
        "2 stages over --pp 2.*LoopedBFS needs",
        [dict(pp_stage_fqns=FOUR)],
    ),
    (
        TWO_LAYERS | dict(pp_stage_fqns="tok_embeddings,block.0;blocks.1,norm,head"),
        "blocks.1.*'blocks.0' is missing",
        [dict(pp_stage_fqns=TWO)],
    ),
    (
        TWO_LAYERS | dict(pp_stage_fqns=TWO + ",head"),
        "'head' is missing",
        [dict(pp_stage_fqns=TWO)],
    ),
    (
        PP | dict(pp_schedule_csv="nowhere.csv"),
        "--pp_schedule_csv nowhere.csv: No such file",
        [dict(pp_schedule_csv="")],
    ),
    (
        PP | dict(pp_schedule="InterleavedZeroBubble", reshard_after_forward="always"),
        "Interleaved.*use never",
        [dict(reshard_after_forward="never")],
    ),
    (
        PP | dict(pp_schedule="ZBVZeroBubble", ac="full"),
        "--ac full.*--pp_schedule ZBVZeroBubble.*use --ac none",
        [dict(ac="none")],
    ),
    (
        dict(pp_schedule="ZBVZeroBubble"),
        "--pp_schedule ZBVZeroBubble has no effect without --pp 2 or more; leave it out",
        [PP],
    ),
    (
        dict(pp_schedule_csv="/nonexistent.csv"),
        "--pp_schedule_csv /nonexistent.csv has no effect without --pp",
        [],
    ),
    (
        dict(pp_first_stage_less_layers=0, pp_last_stage_less_layers=0),
        "layers 0, --pp_last_stage_less_layers 0 have no effect",
        [PP],
    ),
    (
        dict(pp_microbatch_size=7, pp_layers_per_stage=3, pp_stage_fqns="x"),
        "size 7, --pp_layers_per_stage 3, --pp_stage_fqns x have no effect",
        [],
    ),
    (dict(ac_every=3), "--ac_every 3 has no effect without --ac selective", [dict(ac="selective")]),
    (
        TWO_LAYERS | dict(pp_stage_fqns=TWO, pp_layers_per_stage=3),
        "has no effect with --pp_stage_fqns",
        [dict(pp_layers_per_stage=None)],
    ),
    (
        dict(cp_method="alltoall"),
        "--cp_method alltoall has no effect without --cp 2 or more",
        [dict(cp=2, world_size=2)],
    ),
    (
        dict(loss_parallel=False),
        "--no-loss_parallel has no effect without --tp 2 or more",
        [dict(tp=2, world_size=2)],
    ),
    (
        dict(float8_filter=["wq", "wk"]),
        "--float8_filter wq,wk has no effect without --float8",
        [dict(float8="rowwise")],
    ),
    (
        dict(float8_all_gather=True),
        "--float8_all_gather has no effect without --float8 tensorwise",
        [],
    ),
    (
        dict(ac_budget=0.1),
        "--ac_budget 0.1 has no effect without --ac budget",
        [dict(ac="budget", compile=True)],
    ),
    (
        dict(ep=2, etp=2),
        "--ep 2, --etp 2 have no effect without experts, and this flavor has none",
        [],
    ),
    (
        dict(reshard_after_forward="never", compute_dtype="float32"),
        "never has no effect in one",
        [dict(compute_dtype="bfloat16")],
    ),
    (dict(n_kv_heads=3), "n_heads 8.*n_kv_heads 3", []),
    (dict(head_dim=7), "head_dim 7", []),
    (dict(n_layers=0), "n_layers 0", []),
]


def spelled(given: dict) -> str:
    return " ".join(f"{name}={value}" for name, value in given.items())


@pytest.mark.parametrize(
    "given, message, cures", [pytest.param(*rule, id=spelled(rule[0])) for rule in RULES]
)
def test_rule(given, message, cures, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("RANK", raising=False)
    assert re.search(message, refusal(**given))
    for changed in cures:
        check(**given | changed)


def test_without_torchao(monkeypatch):
    monkeypatch.setattr("distributed.refusals.find_spec", lambda name: None)
    assert (
        refusal(float8="rowwise")
        == "--float8 and --optimizer adamw_sr need torchao: pip install torchao==0.18.0"
    )
    check()


def test_one_visible_gpu_is_each_processs_own_unless_torchrun_shares_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    check(device="cuda", world_size=2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert "2 processes here, but torch finds 1 GPUs" in refusal(device="cuda", world_size=2)


@pytest.mark.parametrize(
    "given, words",
    [
        (dict(world_size=4, pp=4), ["is for 2 ranks", "not 4 and", "use --pp 2"]),
        (PP | dict(local_batch_size=3), ["2 micro-batches", "3"]),
        (PP | dict(local_batch_size=2, n_layers=1), ["1 layers are too few for 4 pipeline stages"]),
        (PP | dict(local_batch_size=2), []),
    ],
)
def test_csv_of_another_layout(given, words, tmp_path):
    """Two ranks, two stages each, two micro-batches."""
    rows = "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1", "1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1"
    (tmp_path / "schedule.csv").write_text("\n".join(rows) + "\n")
    given = given | dict(pp_schedule_csv=str(tmp_path / "schedule.csv"))
    if words:
        message = refusal(**given)
        for text in words:
            assert text in message
    else:
        assert n_microbatches(check(**given)) == 2


@pytest.mark.parametrize(
    "given, words",
    [
        (
            dict(
                world_size=3, tp=3, global_batch_size=10, seq_len=8200, ac="budget", async_tp=True
            ),
            [
                "--tp 3",
                "--global_batch_size 10",
                "max_seq_len 8192",
                "multiple of tp = 3",
                "--ac budget",
                "--async_tp",
            ],
        ),
        (
            PP
            | dict(
                pp_schedule="DualPipeV",
                local_batch_size=2,
                ac="op",
                reshard_after_forward="always",
                pp_layers_per_stage=4,
            ),
            [
                "at least 4 micro-batches",
                "--reshard_after_forward always",
                "--ac op",
                "exactly 2 per rank",
            ],
        ),
    ],
)
def test_violations_are_listed_together(given, words):
    message = refusal(**given)
    for text in words:
        assert text in message
    assert message.count(";") >= len(words) - 1


@pytest.mark.parametrize(
    "given, expected",
    [
        (dict(), dict(data_ranks=1, accumulation=1, global_batch_size=4, dp_shard=1)),
        (
            dict(world_size=8, dp_replicate=2, tp=2),
            dict(data_ranks=4, dp_shard=2, accumulation=1, global_batch_size=16),
        ),
        (
            dict(world_size=8, cp=2, tp=2, global_batch_size=24),
            dict(data_ranks=2, dp_shard=2, accumulation=3),
        ),
        (
            PP | dict(global_batch_size=12, pp_microbatch_size=2),
            dict(data_ranks=1, accumulation=3, n_microbatches=6),
        ),
        # fewer kv heads than ranks
        (dict(world_size=4, cp=4, cp_method="alltoall", n_kv_heads=2), dict(cp=4)),
        (dict(world_size=4, cp=4, cp_method="alltoall", n_kv_heads=1, n_heads=4), dict(cp=4)),
    ],
)
def test_layouts_that_are_fine(given, expected):
    layout = check(**given)
    found = {}
    for name in expected:
        if name == "n_microbatches":
            found[name] = n_microbatches(layout)
        else:
            found[name] = getattr(layout, name)
    assert found == expected


# ---------------------------------------------------------------- as a process


@pytest.mark.slow
def test_one_line_from_all_ranks(tmp_path):
    """Under torchrun, which adds a page of its own: one rank speaks."""
    command = launch(2, "train_llama3.py", "--device", "cpu", "--tp", 3, "--out", tmp_path / "run")
    (line,) = [
        line
        for line in ended(command, real=True, status=1).stderr.splitlines()
        if line.startswith("error:")
    ]
    assert "2 processes but pp*dp_replicate*cp*tp = 1*1*1*3 = 3" in line
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- copies that differ


def replicas_after(flags, change_rank):
    """The message of check_replicas when one rank's norm is a little off."""
    stages, layout = build(config(), flags, 4, 1)
    if layout.rank == change_rank:
        with torch.no_grad():
            local_tensor(stages[0].norm.weight)[0] += 1e-3
    try:
        check_replicas(stages, layout, seed=3)
    except ValueError as e:
        return str(e)


def test_a_rank_with_other_weights_is_named():
    assert pool(4).run(replicas_after, dict(dp_replicate=4), None) == [None] * 4
    for message in pool(4).run(replicas_after, dict(dp_replicate=4), 2):
        assert "norm.weight differs between ranks 0 and 2 (" in message
    assert (
        "differs between ranks 2 and 3"
        in pool(4).run(replicas_after, dict(tp=2, dp_replicate=1), 3)[0]
    )
