"""Phases: start from weights and moments of a run, with other data, lengths or learning rates;
against storage/resume.py and a
whole recipe."""

import contextlib
import io
import shutil
from dataclasses import asdict, replace

import pytest
from corpora import sentences
from observe import MODEL, equal, hashes, observed, steps
from runs import column
from saves import IDENTITY, assert_same, refused, save_run, saver, trained

import train_llama3
from data import DataConfig, open_data
from flags.config import save_config
from models.llama3 import FLAVORS, Llama3
from storage.changes import compare_start
from storage.hf import save_hf
from storage.newest import Source
from storage.resume import check_run

CONFIG = train_llama3.Config(steps=20, warmup_steps=2, local_batch_size=4, global_batch_size=8)


def other(part: str, **fields) -> dict:
    """IDENTITY with some fields changed"""
    return {**IDENTITY, part: {**IDENTITY[part], **fields}}


@pytest.fixture
def old(tmp_path) -> str:
    """A run folder with a checkpoint of step 7, with weights and moments of trained(0, 7)."""
    checkpoints = saver(*trained(0, 7), tmp_path / "old", config=asdict(CONFIG))
    checkpoints.save(7, {"step": 7, "samples": 56})
    return str(tmp_path / "old")


def started(tmp_path, old, identity=IDENTITY, **flags):
    """(net and optimizers, state, printed text) of a start from the whole state of `old`."""
    cfg = replace(CONFIG, init_from=old, init_model_only=False, out=str(tmp_path / "new"), **flags)
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        check_run(cfg.out, identity, cfg, train_llama3.lr_at)
        fresh = trained(1, 0)
        checkpoints = saver(*fresh, cfg.out, identity, config=asdict(cfg))
        checkpoints.cfg = cfg
        state = checkpoints.load()
    return fresh, state, said.getvalue()


@pytest.mark.parametrize(
    "identity, flags, told",
    [
        (other("data", seq_len=64), {}, ["seq_len 16 -> 64"]),
        (
            other("data", sha256="34cd"),
            {"weight_decay": 0.0},
            ["sha256 12ab -> 34cd", "weight_decay 0.1 -> 0.0"],
        ),
        (
            other("model", rope_theta=1e6, max_seq_len=4096),
            {},
            ["rope_theta 500000.0 -> 1000000.0", "max_seq_len"],
        ),
        (
            IDENTITY,
            {"lr": 1e-4, "min_lr_ratio": 0.0},
            ["lr 0.003 -> 0.0001", "min_lr_ratio 0.1 -> 0.0", "same order again"],
        ),
        (IDENTITY, {"steps": 40}, ["steps 20 -> 40"]),
        *[
            (IDENTITY, flag, [f"{name} " for name in flag])
            for flag in (
                {"schedule_steps": 30},
                {"warmup_steps": 0},
                {"decay_ratio": 0.2},
                {"decay_type": "linear"},
            )
        ],
    ],
)
def test_a_new_phase_keeps_every_bit_of_weights_and_moments(tmp_path, old, identity, flags, told):
    """AdamW's count of steps, read by the bias correction, is kept, too; step and data cursor begin
    anew."""
    identity = {**identity, "data": {**identity["data"], "data_seed": 3}}
    data = {**IDENTITY["data"], "data_seed": 3}
    with_seed = saver(*trained(0, 7), old, {**IDENTITY, "data": data}, config=asdict(CONFIG))
    shutil.rmtree(f"{old}/checkpoints")
    with_seed.save(7, {"step": 7})
    net, state, said = started(tmp_path, old, identity, **flags)
    assert state is None
    assert_same(net, trained(0, 7))
    line = next(line for line in said.splitlines() if line.startswith("a new phase: "))
    for text in told:
        assert text in line
    assert f"{old}/checkpoints/step-7" in line
    assert ("come in the same order again" in line) == (
        identity["data"] == {**IDENTITY["data"], "data_seed": 3}
    )
    assert "step 0, with the weights and the optimizer state of" in said


def test_the_same_flags_go_on(tmp_path, old):
    # weight decay changes neither order of data nor schedule
    net, state, said = started(tmp_path, old, weight_decay=0.0)
    assert state == {"step": 7, "samples": 56}
    assert "new phase" not in said
    assert "continuing from" in said
    assert_same(net, trained(0, 7))
    assert "weight_decay 0.1 -> 0.0" in said


@pytest.mark.parametrize(
    "identity, parts",
    [
        (
            other("optimizer", name="muon"),
            ["optimizer.name is muon but", "was trained with adamw", "--no-init_model_only"],
        ),
        (other("model", n_layers=9), ["n_layers is 9 but", "was trained with 4"]),
        (
            {**other("data", seq_len=64), "model": {**IDENTITY["model"], "norm_eps": 1.0}},
            ["norm_eps is 1.0 but"],
        ),
    ],
)
def test_what_moments_do_not_fit_is_refused_by_name(tmp_path, old, identity, parts):
    with refused(old, *parts):
        started(tmp_path, old, identity, lr=1e-4)


def test_a_run_does_not_change_its_phase_by_itself(tmp_path, old):
    """In a run's own folder other data is refused, and other flags continue the same run."""
    cfg = replace(CONFIG, out=old, steps=40)
    assert compare_start(
        f"{old}/checkpoints/step-7",
        Source(old, -1, True),
        False,
        other("data", seq_len=64),
        [],
        asdict(cfg),
    )
    with refused("data.seq_len is 64 but", "--out NEW"):
        check_run(old, other("data", seq_len=64), cfg)
    check_run(old, IDENTITY, cfg)
    save_run(tmp_path / "new", 3)  # the phase has a checkpoint of its own by now
    net, state, said = started(tmp_path, old, steps=40)
    assert state["step"] == 3
    assert "IGNORED" in said


@pytest.mark.slow
def test_phases_of_a_recipe(tmp_path):
    """Whole runs: the first step of a phase has learning rate and sequences of a new run, and the
    gradients of the given weights; a stopped and continued phase ends in the same bits; the same
    flags end in the weights of the first run."""
    for name in ("first", "second"):
        (tmp_path / f"{name}.txt").write_text(sentences(400, seed=len(name)))
    first = open_data(DataConfig(data=str(tmp_path / "first.txt"), cache_dir=str(tmp_path)), 16)
    common = dict(
        model_args=MODEL,
        seq_len=16,
        local_batch_size=2,
        warmup_steps=2,
        val_every=0,
        checkpoint_every=2,
        log_every=1,
        device="cpu",
        compute_dtype="float32",
        cache_dir=str(tmp_path),
        tokenizer=first.tokenizer_file,
    )

    def trains(out, data, **flags):
        flags = common | dict(data=str(tmp_path / f"{data}.txt"), out=str(tmp_path / out)) | flags
        run = observed("train_llama3", train_llama3.Config(**flags))
        assert not run.error, run.error
        return run

    run = trains("old", "first", steps=4)
    again = trains(
        "again", "first", steps=4, init_from=f"{run.out}/checkpoints/step-2", init_model_only=False
    )
    assert steps(again) == [3, 4]
    assert equal(again.final, run.final)

    phase = dict(
        data="second",
        seq_len=32,
        lr=1e-3,
        schedule_steps=4,
        init_from=run.out,
        model_args=f"{MODEL},rope_theta=1000000,max_seq_len=64",
    )
    whole = trains("whole", **phase, steps=4, init_model_only=False)
    plain = trains("plain", **phase, steps=4)
    line = next(line for line in whole.printed.splitlines() if line.startswith("a new phase: "))
    for text in (
        "seq_len 16 -> 32",
        "lr 0.003 -> 0.001",
        "rope_theta 500000.0 -> 1000000.0",
        "data_sha256 ",
    ):
        assert text in line
    assert "model_args" not in line
    assert steps(whole) == [1, 2, 3, 4]
    assert whole.lines[0]["lr"] == 1e-3 * train_llama3.lr_at(1, whole.cfg) == 5e-4
    assert hashes(whole) == hashes(plain)
    assert equal(whole.init, run.final)
    assert equal(whole.grads[0], plain.grads[0])
    assert not equal(whole.final, plain.final)
    assert whole.lines[0]["tokens"] == 64
    stopped = trains("stopped", **phase, steps=2, init_model_only=False)
    # this process holds the lock of the other folder
    shutil.copytree(stopped.out, tmp_path / "parts")
    parts = trains("parts", **phase, steps=4, init_model_only=False)
    assert steps(parts) == [1, 2, 3, 4]
    assert len(parts.batches) == 2
    assert equal(parts.final, whole.final)
    assert hashes(parts) == hashes(whole)
    assert column(parts.lines, "loss") == column(whole.lines, "loss")


def test_a_start_without_the_moments_says_so(tmp_path, old):
    identity = other("data", data_seed=3)
    said = started(tmp_path, old, identity, exclude_from_loading=["optimizer"])[2]
    assert "step 0, with the weights, and no optimizer state, of" in said


@pytest.mark.parametrize("moved", [False, True])
def test_a_step_of_another_run_is_told(tmp_path, moved, capsys):
    """Its weights are continued, because somebody may want that; but the curve joins two runs."""
    net = trained(0, 7)
    ids = {}
    for name in ("mine", "other"):
        run = saver(*net, tmp_path / name, config=asdict(CONFIG))
        ids[name] = run.id
        run.save(7, {"step": 7, "samples": 56})
        save_config(CONFIG, tmp_path / name / "config.json", run.made_from)
    if moved:
        shutil.rmtree(tmp_path / "mine/checkpoints")
        shutil.copytree(tmp_path / "other/checkpoints", tmp_path / "mine/checkpoints")
    capsys.readouterr()
    run = saver(*trained(1, 0), tmp_path / "mine", config=asdict(CONFIG))
    assert run.load() == {"step": 7, "samples": 56}
    said = capsys.readouterr().out
    told = f"step-7 is of ANOTHER RUN, {ids['other']}, and {tmp_path}/mine of the run {ids['mine']}"
    assert (told in said) == moved
    assert run.id == ids["mine"] != ids["other"]


def test_a_base_of_another_model_is_refused_before_the_data_is_read(tmp_path):
    model = Llama3(replace(FLAVORS["debug"], n_layers=2))
    save_hf(model, str(tmp_path / "base"))
    cfg = replace(
        CONFIG, init_from=str(tmp_path / "base"), data="nowhere.txt", out=str(tmp_path / "run")
    )
    with refused("config.json is of another model: n_layers is 2 there, 6 here"):
        train_llama3.main(cfg)
