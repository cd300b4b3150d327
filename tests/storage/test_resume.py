"""Tests storage/resume.py: refusals and messages at a start with checkpoints in --out or
--init_from."""

import copy
import dataclasses
import multiprocessing
import os
import time
from dataclasses import asdict, replace
from types import SimpleNamespace

import pytest
from layouts import config
from runs import having
from saves import IDENTITY, path, refuses, save_run, saver, trained

import grpo
import train_deepseek
import train_llama3
import train_qwen3
from checkpoint import CheckpointConfig
from distributed.refusals import check_layout
from flags.config import parse_config, save_config
from models.llama3 import Llama3
from storage import changes, resume
from storage.resume import check_run, lock_run
from tools.reports.stop_main import no_earlier_run


def test_changed_identity_is_refused_by_name(tmp_path):
    save_run(tmp_path, 2)
    changed = copy.deepcopy(IDENTITY)
    changed["model"]["n_layers"], changed["data"]["seq_len"] = 8, 32
    said = refuses(".", check_run, str(tmp_path), changed, CheckpointConfig())
    assert f"n_layers is 8 but {tmp_path} was trained with 4" in said
    assert "--out NEW" in said
    assert "data.seq_len is 32" in said


def test_init_from_another_model_is_refused_though_the_shapes_fit(tmp_path, capsys):
    save_run(tmp_path / "old", 2)

    def check(excluded=(), **changed):
        flags = CheckpointConfig(init_from=str(tmp_path / "old"), exclude_from_loading=[*excluded])
        check_run(
            str(tmp_path / "new"), {**IDENTITY, "model": {**IDENTITY["model"], **changed}}, flags
        )

    for changed in (dict(norm_eps=10.0), dict(n_heads=2, head_dim=2), dict(vocab_size=9)):
        refuses(
            "; ".join(
                f"{name} is {value} but .* trained with .*" for name, value in changed.items()
            ),
            check,
            **changed,
        )
    check(excluded=["head"], vocab_size=9)
    refuses(
        "norm_eps is 10.0 but .* was trained with 1e-05; give the old values$",
        check,
        excluded=["head"],
        norm_eps=10.0,
    )
    refuses(
        "give the old values; the checkpoint holds a \\w+, and this recipe trains another model$",
        check,
        **{"norm_eps": 10.0, "class": "Qwen3"},
    )
    check(module="models.mine", window=128)  # a fork's model, with a new field
    longer = dict(max_seq_len=4096, rope_theta=1e6)  # to read longer texts: allowed, and said
    check(**longer)
    new = saver(*trained(1, 0), tmp_path / "new", init_from=str(tmp_path / "old"))
    new.identity = {**IDENTITY, "model": {**IDENTITY["model"], **longer}}
    new.load()
    assert "rope_theta 500000.0 -> 1000000.0" in capsys.readouterr().out


def test_an_out_that_is_no_folder(tmp_path):
    (tmp_path / "file").touch()
    for out in ("", str(tmp_path / "file"), str(tmp_path / "file" / "run")):
        refuses(f"--out '{out}' is no folder to write to: ", lock_run, out)


def hold_lock(out, ready):
    lock_run(str(out))
    ready.set()
    time.sleep(3600)  # until it is killed


@pytest.mark.parametrize("name", [".lock", "config.json", "metrics.jsonl", "checkpoints"])
def test_what_lies_where_a_run_writes_is_refused(tmp_path, name):
    """A pipe would be read without end; a dangling link is a disk that is not mounted, and the run
    would begin at step 0 and save nothing."""
    place = tmp_path / name
    place.symlink_to(tmp_path / "not" / "there")
    refuses(f"{place} is no f", lock_run, str(tmp_path))
    place.unlink()
    place.symlink_to(place)
    refuses(f"{place} is no f", lock_run, str(tmp_path))
    place.unlink()
    os.mkfifo(place)
    refuses(f"{place} is no f", lock_run, str(tmp_path))


def test_lock(tmp_path, monkeypatch):
    # calls only lock_run, so a copy of this process will do
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    holder = fork.Process(target=hold_lock, args=(tmp_path, ready), daemon=True)
    holder.start()
    assert ready.wait(600)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    refuses(f"in use by process {holder.pid} on", lock_run, str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    lock_run(str(tmp_path))  # only rank 0 holds the lock
    monkeypatch.setenv("RANK", "0")
    holder.kill()
    holder.join()
    lock_run(str(tmp_path))


def end_with_a_checkpoint(out, saved, ready, waiting):
    lock_run(str(out))
    ready.set()
    for rank_waits in waiting:
        rank_waits.wait(600)
    os.rename(saved / "checkpoints", out / "checkpoints")


def start_with(cfg, rank, found, waits):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": "123"}
    sleep = time.sleep

    def tell_and_sleep(seconds):  # a rank that waits for the lock sleeps between two looks at it
        waits.set()
        sleep(seconds)

    time.sleep = tell_and_sleep
    found.put(resume.keep_batch(cfg).global_batch_size)


def test_a_start_that_waits_for_the_lock_keeps_the_batch_of_the_checkpoint_that_appears_meanwhile(
    tmp_path,
):
    """Preempted and started again on two processes: both ranks read the checkpoints after the lock
    is free, not before."""
    (out := tmp_path / "run").mkdir()
    cfg = replace(
        make_run(tmp_path / "saved", step=10, global_batch_size=4),
        out=str(out),
        global_batch_size=-1,
    )
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()
    found = fork.Queue()
    waiting = [fork.Event(), fork.Event()]
    holder = fork.Process(
        target=end_with_a_checkpoint, args=(out, tmp_path / "saved", ready, waiting)
    )
    holder.start()
    assert ready.wait(600)
    ranks = []
    for rank in (1, 0):
        ranks.append(fork.Process(target=start_with, args=(cfg, rank, found, waiting[rank])))
    for process in ranks:
        process.start()
    # from the run on one process; 8 in a new run
    assert [found.get(timeout=600), found.get(timeout=600)] == [4, 4]
    assert waiting[0].is_set()
    assert waiting[1].is_set()
    for process in (holder, *ranks):
        process.join()


def test_a_checkpoint_that_appears_after_the_batch_was_chosen_is_refused(tmp_path, monkeypatch):
    """Another start ended between the look at the checkpoints and the lock: this start's batch may
    be wrong."""
    cfg = make_run(tmp_path / "saved", step=10)
    out = tmp_path / "run"
    cfg = replace(cfg, out=str(out), val_every=0)
    data = SimpleNamespace(vocab_size=8, fingerprint={}, n_val_samples=0)
    lock = resume.lock_run

    def lock_after_another(folder):
        lock(folder)
        (out / "checkpoints").mkdir()
        (out / "checkpoints" / "step-10").mkdir()

    monkeypatch.setattr(resume, "lock_run", lock_after_another)
    refuses(
        "got a checkpoint from another process while .*; start again",
        resume.claim_run,
        cfg,
        Llama3,
        config(),
        data,
    )


def make_run(out, processes=1, step=20, **flags):
    """(flags, a run folder): with a checkpoint of `step`, as left by train_llama3.py on so many
    processes."""
    cfg = train_llama3.Config(out=str(out), steps=20, warmup_steps=2, local_batch_size=4, **flags)
    checkpoints = saver(*trained(), out, config=asdict(cfg))
    checkpoints.writer.world_size = processes
    checkpoints.save(step, {"step": step})
    return cfg


def resolve_batch(monkeypatch, cfg, processes, **flags):
    """(global, local batch) after keep_batch for a start with these flags on so many processes."""
    monkeypatch.setenv("WORLD_SIZE", str(processes))
    cfg = resume.keep_batch(replace(cfg, **flags))
    sizes = {name: getattr(cfg, name) for name in ("global_batch_size", "local_batch_size")}
    check_layout(cfg, config(), seq_len=16, device="cpu", **sizes)  # the layout accepts the result
    return tuple(sizes.values())


@pytest.mark.parametrize(
    "processes, flags, expected, says",
    [
        (1, {}, (8, 4), False),
        (2, {}, (8, 4), False),
        (4, {}, (8, 2), True),
        (8, {"local_batch_size": 3}, (8, 1), True),
        (1, {"local_batch_size": 3}, (8, 2), True),
        (1, {"local_batch_size": 16}, (8, 8), True),
        (4, {"tp": 2}, (8, 4), False),
        (2, {"pp": 2, "pp_microbatch_size": 2, "local_batch_size": 7}, (8, 4), True),
        (4, {"global_batch_size": 16}, (16, 4), False),  # a typed flag wins
    ],
)
def test_a_continued_run_keeps_its_global_batch(
    tmp_path, monkeypatch, capsys, processes, flags, expected, says
):
    cfg = make_run(tmp_path, processes=2, global_batch_size=8)
    cfg = replace(cfg, global_batch_size=-1, steps=40)
    assert resolve_batch(monkeypatch, cfg, processes, **flags) == expected
    out = capsys.readouterr().out
    assert (
        f"stays 8 sequences, as in {path(tmp_path, 20)}" in out
        and f"becomes {expected[1]} on" in out
    ) == says


def test_a_batch_that_the_ranks_cannot_share_is_refused(tmp_path, monkeypatch):
    cfg = replace(make_run(tmp_path, global_batch_size=8), global_batch_size=-1, steps=40)
    refuses(
        "3 data ranks cannot share in micro-batches of 1; use --global_batch_size 9",
        resolve_batch,
        monkeypatch,
        cfg,
        3,
    )
    refuses(
        "2 data ranks cannot share in micro-batches of 3; use --global_batch_size 12",
        resolve_batch,
        monkeypatch,
        cfg,
        4,
        pp=2,
        pp_microbatch_size=3,
        local_batch_size=3,
    )
    assert resolve_batch(monkeypatch, cfg, 3, local_batch_size=3, global_batch_size=9) == (9, 3)


def test_the_batch_of_a_new_run_is_its_own(tmp_path, monkeypatch):
    cfg = replace(make_run(tmp_path / "old", global_batch_size=8), global_batch_size=-1, steps=40)
    new = dict(out=str(tmp_path / "new"), init_from=cfg.out)
    assert resolve_batch(monkeypatch, cfg, 4, **new) == (16, 4)
    whole = new | dict(init_model_only=False)
    # continues the old run, or is a new phase of it
    for more in {}, dict(steps=5), dict(steps=500), dict(seq_len=1024):
        assert resolve_batch(monkeypatch, cfg, 4, **whole | more) == (8, 2)
    assert resolve_batch(monkeypatch, cfg, 4, **whole | dict(global_batch_size=16)) == (16, 4)
    assert resolve_batch(monkeypatch, cfg, 4, steps=20) == (16, 4)  # nothing left to train
    with no_earlier_run():  # a dry run is about the flags, whatever lies in the folder
        assert resolve_batch(monkeypatch, cfg, 4) == (16, 4)


def test_the_batch_of_a_config_file_is_kept_and_that_of_a_flag_is_not_bent(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setattr(resume, "FROM_FILE", set())
    monkeypatch.setattr("flags.config.FROM_FILE", resume.FROM_FILE)  # only for this test
    save_config(
        train_llama3.Config(out=str(tmp_path / "run"), global_batch_size=8),
        tmp_path / "config.json",
        {},
    )
    cfg = resume.keep_batch(
        parse_config(train_llama3.Config, ["--config", str(tmp_path / "config.json")])
    )
    assert (cfg.global_batch_size, cfg.local_batch_size) == (8, 2)
    assert (
        "as in --config: --local_batch_size 8 becomes 2 on 4 data ranks" in capsys.readouterr().out
    )
    for argv in (
        ["--global_batch_size", "8"],
        ["--config", str(tmp_path / "config.json"), "--global_batch_size", "8"],
    ):
        cfg = resume.keep_batch(parse_config(train_llama3.Config, argv))
        assert (cfg.global_batch_size, cfg.local_batch_size) == (8, 8)  # for check_layout to refuse


def test_changed_flags_are_told_with_what_follows(tmp_path, monkeypatch, capsys):
    cfg, lr_at = make_run(tmp_path, global_batch_size=4), train_llama3.lr_at
    capsys.readouterr()

    def told(**flags):
        check_run(cfg.out, IDENTITY, replace(cfg, **flags), lr_at)
        out = capsys.readouterr().out
        assert out.count("\n") == bool(out)
        return out

    # 20 of 20 steps are done: nothing is trained with these flags
    assert told() == "" == told(lr=1.0)
    old, new = cfg.lr * lr_at(21, cfg), cfg.lr * lr_at(21, replace(cfg, steps=40))
    assert told(steps=40, log_every=3, device="cpu", checkpoint_every=7) == (
        "flags that differ from those of step 20: steps 20 -> 40; the learning rate of step 21 "
        f"is {new:.2e}, not {old:.2e}; "
        "--schedule_steps 20 keeps the length of the schedule\n"
    )
    assert told(steps=40, schedule_steps=20) == (
        "flags that differ from those of step 20: steps 20 -> 40, schedule_steps -1 -> 20\n"
    )
    line = told(
        steps=40,
        schedule_steps=20,
        lr=1e-3,
        beta2=0.9,
        weight_decay=0.0,
        seed=1,
        global_batch_size=16,
        tp=2,
    )
    for text in (
        "lr 0.003 -> 0.001",
        "beta2 0.95 -> 0.9",
        "weight_decay 0.1 -> 0.0",
        "seed 0 -> 1",
        "tp 1 -> 2",
        "global_batch_size 4 -> 16",
        "of step 21 is 1.00e-04",
    ):
        assert text in line
    assert "keeps the length" not in line

    class Fork(train_llama3.Config):
        total = property(lambda self: self.steps)  # a fork's lr_at may call new methods of Config

    cfg, lr_at = Fork(**vars(cfg)), lambda step, cfg: 1 / cfg.total
    assert "of step 21 is 7.50e-05, not 1.50e-04" in told(steps=40)
    monkeypatch.setenv("RANK", "1")
    assert told(steps=40) == ""


@pytest.mark.parametrize("recipe", [train_llama3, train_qwen3, train_deepseek, grpo])
def test_flags_that_are_not_told_exist_and_concern_no_training(recipe):
    fields = {field.name for field in dataclasses.fields(recipe.Config)}
    left_out = changes.UNTOLD_FLAGS & fields
    told = {
        "lr",
        "steps",
        "warmup_steps",
        "seed",
        "local_batch_size",
        "tp",
        "compute_dtype",
        "weight_decay",
        "max_norm",
    }
    assert len(left_out) > 20
    assert not told & left_out
    assert told <= fields
    if recipe is not grpo:
        assert changes.UNTOLD_FLAGS <= fields


@pytest.mark.parametrize("names", [["dataloader"], ["head", "lr_scheduler"]])
def test_flags_that_say_nothing_about_this_run(tmp_path, names):
    cfg = replace(make_run(tmp_path, step=10), exclude_from_loading=names)
    refuses(
        f"--exclude_from_loading {names[-1]}: there is no such state",
        check_run,
        str(tmp_path),
        IDENTITY,
        cfg,
    )


def test_a_command_behind_each_checkpoint(tmp_path, capsys):
    """The command gets complete folders, in order; the run waits for the last; a failure is one
    line, and the run goes on."""
    out = tmp_path / "a run's folder"
    command = f"test -f {{}}/manifest.json && sleep 0.2 && basename {{}} >> {tmp_path}/copied; echo no room >&2"
    checkpoints = saver(*trained(), out, after_save=f"{command}; case {{}} in *-3) exit 1;; esac")
    for step in (1, 2, 3):
        assert checkpoints.save(step, {"step": step})
    checkpoints.close()
    assert (tmp_path / "copied").read_text().split() == ["step-1", "step-2", "step-3"]
    said = having(capsys.readouterr().out.splitlines(), "after_save")
    assert said == [
        f"checkpoint: --after_save FAILED for {out}/checkpoints/step-3, status 1: no room"
    ]


def test_a_finished_run_says_that_nothing_is_exported_only_if_the_folder_is_there(tmp_path):
    new = str(tmp_path / "new")
    there = str(tmp_path)
    assert len(resume.list_finished("run", 4, 4, "")) == 1
    assert len(resume.list_finished("run", 4, 4, new)) == 1
    assert "nothing is exported" in resume.list_finished("run", 4, 4, there)[1]
    assert resume.list_finished("run", 3, 4, there) == []
