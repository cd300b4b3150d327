"""Forks of a few lines: on one process, and on layouts; equal, refused in one line, or told. See
research_forks.py."""

import json
import re
import sys
from types import SimpleNamespace
from unittest import mock

import pytest
import runs
import torch
from programs import run_program
from research_forks import CODE, IMPORTS, REPO, M, write_fork
from runs import column
from saves import refuses
from torch import nn

from distributed.doc_mask_check import blocks_without_attend
from distributed.stages import stages_of_parts
from models import llama3
from models.dropout import dropout, mixed
from models.layers import places_of
from storage.adapters import read_adapters
from storage.dcp import read_table
from storage.loading import restore_numbers
from storage.manifest import read_manifest
from storage.optimizer_numbers import OptimizerNumbers, find_copies, merge_numbers, sum_copies
from training.optim import set_lr

ENV = runs.ENV | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"}
EQUAL = "check_parity: equal"
# (forks of research_forks.py, the layout, what --check_parity says in the end)
TABLE = [
    ("positions", "--tp 2 --pp 2 --pp_schedule ZBVZeroBubble", EQUAL),
    ("two_heads", "--pp 2", EQUAL),  # with 4 stages: test_a_pipelines_checkpoint_...
    ("two_heads", "--tp 2 --dp_shard 2", EQUAL),
    (
        "tied_second_head",
        "--pp 2",
        "head2.weight is tok_embeddings.weight: no layout can split a parameter that two",
    ),
    ("smoothed_loss", "--tp 2", "--tp replaces token_loss, so that yours would not be trained"),
    ("smoothed_loss", "--dp_shard 2", EQUAL),
    (
        "tokens_seen",
        "--dp_shard 2",
        "check_parity: NOT EQUAL: step 1 differs first in the buffer seen by 5.0e-01",
    ),
    (
        "dropped_through_kwargs",
        "--dp_shard 2",
        "dropout without places in training: the model's forward needs an argument",
    ),
    (
        "dropped",
        "--pp 2 --ac full",
        "--ac full with --pp 2 would recompute a block with the places of a later micro-batch",
    ),
    ("python_random", "--dp_shard 2", "draws random numbers without a generator"),
    (
        "residual_scales",
        "--pp 2",
        "--pp: no stage is given for scales; write pp_stage = {'scales': \"first\"} into class",
    ),
    (
        "residual_scales",
        "--tp 2",
        "--tp: scales has no style in tp_plan.* put it into a small module of its own",
    ),
    ("residual_scales", "--dp_shard 2", EQUAL),
    (
        "mean_loss",
        "--dp_shard 2",
        "check_parity: NOT EQUAL: step 1 differs first in the gradient of tok_embeddings.weight by 5.0e-01",
    ),
    ("mean_loss", "--pp 2", "check_parity: NOT EQUAL: step 1"),
    (
        "halved",
        "--tp 2",
        "check_parity: NOT EQUAL: step 1 differs first in the gradient of blocks.1.ffn.w1.weight",
    ),
    ("batch_statistics", "--dp_replicate 2", "check_parity: NOT EQUAL: step 1"),
    ("batch_statistics", "--cp 2", "check_parity: NOT EQUAL: step 1"),
    ("loss_per_layer", "--pp 2", EQUAL),
    ("loss_per_layer", "--dp_shard 2 --tp 2", EQUAL),
    (
        "norm_of_heads",
        "--tp 2",
        r'--tp: blocks.0.attn.q_norm.weight has no style in tp_plan.*"blocks\.\*\.attn\.q_norm"',
    ),
    ("norm_of_heads", "--cp 2", EQUAL),  # with dp_shard: the row with zeros and lion
    ("dropped", "--dp_shard 2", EQUAL),
    ("dropped", "--tp 2 --ac full", EQUAL),
    ("dropped", "--cp 2 --pp 2", EQUAL),
    (
        "torch_dropout",
        "--dp_shard 2",
        "draws random numbers without a generator.*models.dropout.dropout",
    ),
    (
        "dropout_module",
        "--tp 2",
        "blocks.0.ffn.drop is Dropout, whose numbers depend on the layout.*models.dropout.dropout",
    ),
    ("frozen_norms", "--tp 2", EQUAL),
    ("frozen_norms", "--pp 2", EQUAL),
    (
        "unused_bias",
        "--dp_shard 2",
        "check_parity: NOT COMPARED: head.bias, whose gradient is 0 or missing on both sides",
    ),
    ("complex_phase", "--dp_shard 2", "parameter phase is complex.*view_as_complex"),
    ("parallel_block", "--tp 2 --pp 2", EQUAL),
    ("parallel_block", "--cp 2 --dp_shard 2", EQUAL),
    ("zeros", "--tp 2", EQUAL),
    ("zeros norm_of_heads lion", "--dp_shard 2 --optimizer own", EQUAL),
    ("lion", "--tp 2 --lr 1e-5", EQUAL),
    (
        "rebound",
        "--dp_shard 2 --lr 1e-6",
        r"check_parity: NOT EQUAL: step 2 differs first in the update of \S+ by 1.0e\+00",
    ),
    (
        "decayed",
        "--dp_shard 2",
        "check_parity: NOT EQUAL: step 2 differs first in the update of tok_embeddings.weight",
    ),
    ("noisy", "--tp 2 --pp 2", EQUAL),
    ("noisy", "--dp_shard 2", EQUAL),
    (
        "noisy_late",
        "--dp_shard 2",
        "numbers are drawn between the gradients and the end of the optimizer's step",
    ),
    ("filled", "--dp_shard 2", "blocks.0.gate.weight is filled in a constructor.* init_constants"),
    (
        "generator",
        "--pp 2",
        "blocks.0 has a generator, and no checkpoint holds its state; use models.dropout.dropout",
    ),
    ("counting", "--pp 2", EQUAL),
    (
        "hooked",
        "--dp_shard 2",
        "blocks.0.attn.wq.weight has a hook from a constructor, which nothing would call",
    ),
    ("two_rates", "--dp_shard 2", EQUAL),
    ("forks/train_speedrun.py", "--dp_shard 2 --tp 2 --lr 1e-3", EQUAL),
    ("forks/train_speedrun.py", "--pp 2 --cp 2 --lr 1e-3", EQUAL),
    # --check_parity --where: first a style that is right, then one that leaves a parameter alone
    ("more_norm sequence", "--tp 2 --where", "no difference at"),
    (
        "more_norm nothing",
        "--tp 2 --where",
        r"first difference: finished gradient of blocks.0.more.weight[\s\S]*look at: .*style 'nothing' of blocks.0.more",
    ),
    ("more_norm nothing", "--tp 2 --where --no-advice", r"(?s)\A(?!.*look at).*first difference:"),
]
QUICK = {"mean_loss --dp_shard 2"}


@pytest.mark.parametrize(
    "forks, layout, said",
    [
        pytest.param(
            *row, marks=[] if " ".join(row[:2]) in QUICK else pytest.mark.slow, id=" ".join(row[:2])
        )
        for row in TABLE
    ],
)
def test_a_fork_is_equal_or_refused(tmp_path, forks, layout, said):
    if forks.endswith(".py"):
        script = REPO / forks
    else:
        script = write_fork(tmp_path, *forks.split())
    done = run_program(
        [sys.executable, script, *M, *layout.split(), "--check_parity"], cwd=tmp_path, env=ENV
    )
    assert re.search(said, done.stdout + done.stderr), done.stdout[-2000:] + done.stderr[-2000:]
    assert (done.returncode == 0) == (said in (EQUAL, "no difference at"))


def train(tmp_path, processes, forks, *argv, status=0) -> str:
    flags = ["--compute_dtype", "float32", "--val_every", "0", "--log_every", "1", *argv]
    command = runs.launch(processes, write_fork(tmp_path, *forks.split()), *M, *flags)
    done = runs.ended(command, tmp_path, status=status, env=ENV)
    return done.stdout + done.stderr


def weights(folder) -> dict:
    # all that are the model's
    return read_adapters(read_table(str(folder), read_manifest(str(folder))["files"]), str(folder))


def differ(a, b) -> dict[str, float]:
    """fqn -> relative difference of a weight in two step folders, of those that are more than
    rounding."""
    a = weights(a)
    b = weights(b)
    assert a.keys() == b.keys()
    far = {fqn: ((a[fqn] - b[fqn]).norm() / a[fqn].norm()).item() for fqn in a}
    return {fqn: x for fqn, x in far.items() if x > 1e-3}


@pytest.mark.slow
@pytest.mark.parametrize("fork", ["two_heads", "positions"])
def test_a_pipelines_checkpoint_has_the_trained_weights(tmp_path, fork):
    train(tmp_path, 1, fork, "--steps", 4, "--out", "one", "--checkpoint_first_step")
    train(tmp_path, 4, fork, "--steps", 4, "--out", "four", "--pp", 4)
    assert differ(tmp_path / "one/checkpoints/step-4", tmp_path / "four/checkpoints/step-4") == {}
    moved = differ(tmp_path / "one/checkpoints/step-1", tmp_path / "four/checkpoints/step-4")
    assert ("head2.weight" if fork == "two_heads" else "pos.weight") in moved


@pytest.mark.slow
def test_numbers_that_an_optimizer_keeps_beside_its_state(tmp_path):
    """Its own attributes and those of its groups, on another layout, too."""
    train(tmp_path, 1, "counting", "--steps", 6, "--out", "whole")
    for processes, layout in (1, ()), (2, ("--pp", 2)):
        out = f"cut{processes}"
        train(tmp_path, 1, "counting", "--steps", 3, "--schedule_steps", 6, "--out", out)
        assert "continuing from" in train(
            tmp_path,
            processes,
            "counting",
            "--steps",
            6,
            "--out",
            out,
            "--global_batch_size",
            4,
            *layout,
        )
        assert (
            differ(tmp_path / "whole/checkpoints/step-6", tmp_path / out / "checkpoints/step-6")
            == {}
        )


@pytest.mark.slow
def test_what_a_plain_run_says(tmp_path):
    """Of what only a first step shows, and of what no checkpoint could keep."""
    flags = ["--steps", 2, "--checkpoint_every", 0]
    assert "no gradient reaches head.bias: " in train(
        tmp_path, 1, "unused_bias", *flags, "--out", "a"
    )
    said = train(tmp_path, 2, "rebound", *flags, "--out", "b", "--lr", "1e-3")
    assert re.search(
        r"the first step has not moved \S+, \S+, \S+ and \d+ more on rank 0, though there is a gradient",
        said,
    )
    # lost in rounding
    assert "has not moved" not in train(tmp_path, 2, "lion", *flags, "--out", "c", "--lr", "1e-8")
    said = train(tmp_path, 1, "no_attention", *flags, "--out", "d", "--doc_mask")
    assert "--doc_mask does nothing in blocks.1: they do not call attend" in said
    said = train(tmp_path, 1, "averaging", "--steps", 1, "--out", "e", status=1)
    assert "Own keeps ema outside of self.state[p]" in said
    assert "has not moved" not in said
    assert "no gradient" not in said
    assert "Own keeps MOMENTS outside of self.state[p]" in train(
        tmp_path, 1, "outside", "--steps", 1, "--out", "g", status=1
    )
    train(
        tmp_path, 1, "only_in_training", "--steps", 1, "--out", "h", "--lr", "0", "--val_every", 1
    )
    trained, validated = runs.metrics(tmp_path / "h")
    # as another model, which multiplies by 1
    assert abs(trained["loss"] - validated["val_loss"]) > 1e-3
    before = train(
        tmp_path,
        2,
        "frozen_norms",
        "--steps",
        2,
        "--out",
        "f",
        "--tp",
        2,
        "--checkpoint_first_step",
    )
    assert "no gradient" not in before
    steps = [tmp_path / f"f/checkpoints/step-{n}" for n in (1, 2)]
    moved = differ(*steps)
    assert moved
    for fqn in moved:
        assert not ("norm" in fqn or ".w1." in fqn)


@pytest.mark.slow
def test_rates_of_groups_and_dropped_numbers_are_the_same_when_a_run_is_continued(tmp_path):
    for fork in "two_rates", "dropped":
        train(tmp_path, 1, fork, "--steps", 4, "--out", f"{fork}1")
        train(tmp_path, 1, fork, "--steps", 2, "--schedule_steps", 4, "--out", f"{fork}2")
        train(tmp_path, 2, fork, "--steps", 4, "--out", f"{fork}2", "--tp", 2, "--ac", "full")
        assert (
            differ(
                tmp_path / f"{fork}1/checkpoints/step-4", tmp_path / f"{fork}2/checkpoints/step-4"
            )
            == {}
        )
    plain, half = (runs.train_lines(tmp_path / f"{name}1") for name in ("two_rates", "dropped"))
    assert plain[0]["lr"] == half[0]["lr"]


@pytest.mark.slow
def test_unequal_copies_are_not_saved(tmp_path):
    """Were a part copied into every stage, one copy would be trained, and DCP would save any of
    them."""
    path = write_fork(tmp_path, "two_heads")
    text = path.read_text()
    copied = "import distributed.stages\n\ndistributed.stages.stages_of_parts = lambda model: {}\n"
    path.write_text(text.replace("\nif __name__", f"\n{copied}\nif __name__"))
    command = runs.launch(2, path, *M, "--pp", 2, "--val_every", 0, "--steps", 2, "--out", "run")
    assert (
        "is not equal on all ranks that hold it"
        in runs.ended(command, tmp_path, status=1, env=ENV).stderr
    )
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))


# ---------------------------------------------------------------- in this process
def made(fork: str):
    names = {"torch": torch}
    # some forks replace these
    kept = {name: getattr(llama3, name) for name in ("Block", "Attention", "FeedForward")}
    with torch.device("meta"), mock.patch.multiple(llama3, **kept):
        exec(IMPORTS + CODE[fork], names)
        config = llama3.Llama3Config(
            dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=64, vocab_size=512
        )
        return names["Llama3"](config)


def test_a_part_of_a_fork_is_on_the_stage_that_its_class_names():
    assert stages_of_parts(made("positions")) == {"pos": "first", "embed_norm": "first"}
    assert stages_of_parts(made("two_heads")) == {"head2": "last", "norm2": "last"}
    assert stages_of_parts(made("frozen_norms")) == {}
    model = made("two_heads")
    model.pp_stage = {"head2": "last", "norm2": "middle"}
    refuses(
        "no stage is given for norm2; write pp_stage = {'norm2': \"first\"} into class",
        stages_of_parts,
        model,
    )


def test_doc_mask_names_the_blocks_that_it_does_not_change():
    assert blocks_without_attend(made("no_attention")) == ["blocks.1"]
    assert blocks_without_attend(made("frozen_norms")) == []


def test_the_bits_of_dropout_are_those_of_splitmix64():
    """In Python's numbers. A run that another version continues drops what it would have dropped."""
    numbers = [0, 1, 2**31, 2**62 + 5, -1, -(2**40) - 3, -(2**63)]
    expected = []
    for number in numbers:
        z = number % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        z = z ^ (z >> 31)
        if z >= 2**63:
            z -= 2**64
        expected.append(z)
    assert mixed(torch.tensor(numbers)).tolist() == expected


def test_what_is_dropped_depends_on_the_places_the_key_and_the_seed():
    batch = SimpleNamespace(tokens=torch.zeros(2, 3, 8), first=40)
    x = torch.ones(3, 8, 64, requires_grad=True)
    places = places_of(batch, 0)[1]
    whole = dropout(x, 0.25, places, "a")
    # as tp and cp cut it
    parts = [dropout(x[:, part], 0.25, places[:, part], "a") for part in (slice(5), slice(5, 8))]
    assert torch.equal(whole, torch.cat(parts, 1))
    assert abs((whole == 0).float().mean() - 0.25) < 0.04
    assert set(whole.unique().tolist()) == {
        0.0,
        torch.tensor(4 / 3).item(),
    }
    # another layout, or a continued run
    later = places_of(SimpleNamespace(tokens=torch.zeros(1, 3, 8), first=43), 0)[0]
    assert torch.equal(places, later)
    assert torch.equal(whole, dropout(x, 0.25, later, "a"))
    others = (places, "b"), (places_of(batch, 0)[0], "a"), (places_of(batch, 1)[1], "a")
    for other in others:
        assert 0.2 < ((whole == 0) == (dropout(x, 0.25, *other) == 0)).float().mean() < 0.75
    whole.sum().backward()
    assert torch.equal(x.grad, whole.detach())
    places = places_of(SimpleNamespace(tokens=torch.zeros(1, 400, 2), first=0), 7)[0]
    rows = dropout(torch.ones(400, 2, 3), 0.5, places, "a", whole_sequences=True)
    assert (rows.flatten(1).std(1) == 0).all()
    assert 150 < (rows[:, 0, 0] == 0).sum() < 250
    with torch.no_grad():
        assert dropout(x, 0.25, None, "a") is x is dropout(x, 0.0, places, "a")
    refuses("does not begin with the", dropout, x, 0.25, places, "a")


def test_a_groups_own_rate_keeps_its_share():
    p = nn.Parameter(torch.ones(2))
    q = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([{"params": [p]}, {"params": [q], "lr": 0.1}], lr=0.4)
    for lr in 0.4, 0.2, 0.0, 1.0:
        assert set_lr([optimizer], lr) == lr
        assert column(optimizer.param_groups, "lr") == [lr, lr / 4]


def test_numbers_outside_of_the_state_are_found_and_restored():
    names = {"torch": torch}
    exec(CODE["counting"] + CODE["averaging"].replace("Own", "Averaging"), names)
    p = nn.Parameter(torch.ones(3))

    def stepped(kind, n):
        optimizer = names[kind]([p], 1e-3)
        outside = OptimizerNumbers([optimizer], {id(p): "p"})
        for _ in range(n):
            p.grad = torch.ones(3)
            optimizer.step()
        return optimizer, outside

    _, outside = stepped("Own", 3)
    saved = json.loads(json.dumps(outside.changed()))
    assert saved == {"p": [{"total": 1.5}, {"k": 3}]}
    optimizer, outside = stepped("Own", 1)  # the step that creates the state
    restore_numbers(outside, saved)
    assert (optimizer.total, optimizer.param_groups[0]["k"]) == (1.5, 3)
    refuses("Averaging keeps ema outside of self.state", stepped("Averaging", 1)[1].changed)
    wrapper = stepped("Own", 0)[0]
    wrapper.inner = torch.optim.AdamW([p])
    outside = OptimizerNumbers([wrapper], {id(p): "p"})
    wrapper.inner.step()
    refuses(
        "Own keeps inner outside of self.state.*; an inner optimizer shares the state",
        outside.changed,
    )
    wrapper.state = wrapper.inner.state
    outside.changed()
    adamw = torch.optim.AdamW([p], fused=True)
    outside = OptimizerNumbers([adamw], {id(p): "p"})
    set_lr([adamw], 1e-4)
    adamw.step()
    assert outside.changed() == {}


def changes_by(change) -> dict:
    """What OptimizerNumbers saves of an AdamW after change(optimizer)."""
    p = nn.Parameter(torch.ones(3))
    p.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([p], lr=1e-3)
    optimizer.generator, optimizer.tracker = torch.Generator(), SimpleNamespace(k=0)
    outside = OptimizerNumbers([optimizer], {id(p): "p"})
    change(optimizer)
    optimizer.step()
    return outside.changed()


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda o: o.state.update(k=3), "AdamW keeps 'k' outside of self.state"),
        (
            lambda o: torch.rand(1, generator=o.generator),
            "AdamW keeps generator outside of self.state",
        ),
        (lambda o: vars(o.tracker).update(k=1), "AdamW keeps tracker outside of self.state"),
        (
            lambda o: torch.optim.lr_scheduler.ConstantLR(o),
            "the scheduler of torch that counts the steps of AdamW",
        ),
    ],
)
def test_state_that_no_checkpoint_would_hold_is_refused(change, said):
    refuses(said, changes_by, change)


def test_a_learning_rate_of_the_forks_own_is_saved():
    assert changes_by(lambda o: o.param_groups[0].update(lr=5e-4)) == {"p": [{}, {"lr": 5e-4}]}
    assert changes_by(lambda o: set_lr([o], 5e-4)) == changes_by(lambda o: None) == {}


def test_buffers_that_drift_apart_are_not_saved():
    buffers = [{"seen": torch.full((2,), x)} for x in (1.0, 2.0)]
    sums = []
    for tensors in buffers:
        sums.append(({}, sum_copies(find_copies(tensors, lambda mine: [mine])), []))
    assert merge_numbers(sums[:1] * 2) == {}
    refuses("seen is not equal on all ranks that hold it", merge_numbers, sums)


@pytest.mark.parametrize("program", ["data", "train_llama3"])
def test_a_start_on_windows_is_told_in_one_line(program):
    there = "import sys, torch; sys.platform = 'win32'; sys.modules['fcntl'] = sys.modules['resource'] = None; import "
    done = run_program([sys.executable, "-c", there + program], cwd=REPO, env=ENV)
    assert done.returncode == 1
    assert done.stderr.startswith("error: nanotitan runs on Linux")
    assert done.stderr.count("\n") == 1
