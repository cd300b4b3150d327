"""Wrong command lines, against distributed/refusals.py: each rule of check_layout with its line,
and what a user sees.

A row of RULES: what is asked for => a regular expression that the one line must match => what to
change so that it is accepted, the cure that the line itself names. `test_recipes.py` runs the
command lines that are right, `test_messages.py` has all other wrong ones.
"""

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from layouts import Flags, build, config, fields_of
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
# stages of two layers
TWO, FOUR = (
    "tok_embeddings,blocks.0;blocks.1,norm,head",
    "tok_embeddings;blocks.0;blocks.1;norm,head",
)
RULES = Path(__file__).with_name("refusals.txt").read_text()


def flags_of(text: str) -> dict:
    """{name: value}"""
    for name, meant in dict(
        TWO_LAYERS="PP n_layers=2", PP="world_size=2 pp=2", TWO=TWO, FOUR=FOUR
    ).items():
        text = text.replace(name, meant)
    return fields_of(text)


@pytest.mark.parametrize(
    "rule", RULES.strip("\n").split("\n"), ids=lambda rule: rule.split(" => ")[0].strip()[:70]
)
def test_rule(rule, monkeypatch):
    """Where the cure needs a GPU or another flavor there is none in the row."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("RANK", raising=False)
    given, message, *cure = rule.split(" => ")
    assert re.search(message, refusal(**flags_of(given)))
    for changed in cure:
        check(**flags_of(given) | flags_of(changed))


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
        assert all(text in message for text in words)
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
    assert all(text in message for text in words) and message.count(";") >= len(words) - 1


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
    found = {
        name: n_microbatches(layout) if name == "n_microbatches" else getattr(layout, name)
        for name in expected
    }
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
