"""Tests checkpoint.py: a saved run comes back to the bit in any layout, and damage is noticed."""

import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import saves
import torch
from layouts import MOE, SMALL, build, config, full, global_batch, local_batch, on_meta
from pool import forkserver, pool
from programs import run_program
from saves import (
    IDENTITY,
    assert_same,
    everything,
    flip,
    names,
    path,
    refuses,
    rewrite,
    save_run,
    saver,
    stops,
    trained,
)
from torch import nn
from torch.distributed.checkpoint import DefaultSavePlanner

import checkpoint
import grpo
import parallel
from checkpoint import CheckpointConfig, Checkpoints, saved_state
from distributed.agree import Failed
from distributed.experts import balance_experts
from distributed.layout import Layout
from flags.files import STEP_FOLDER, check_room, free_bytes, json_bytes, step_folders
from generate import generate
from models.llama3 import Llama3, Llama3Config
from storage import commands as checkpoint_commands
from storage import dcp, writer
from storage.commands import diff
from storage.dcp import pack_column, unpack_column
from storage.hf import save_hf
from storage.manifest import Damaged, verify
from storage.newest import ABOUT, has_adapters, newest_readable, saved_model
from storage.resume import check_run
from storage.saved import load_model
from storage.source_tokenizer import has_bos
from storage.writer import describe_room


def run_forked(function, *args):
    """The exit code of function(*args) in a new process."""
    process = forkserver.Process(target=function, args=args)
    process.start()
    process.join(600)
    assert process.exitcode is not None, "hangs"
    return process.exitcode


# --- one process


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_is_saved_comes_back(tmp_path, optimizer):
    run = trained(0, 2, optimizer)
    check_run(str(tmp_path), IDENTITY, CheckpointConfig())
    assert saver(*run, tmp_path).load() is None  # nothing is there: a fresh start
    assert_same(run, trained(0, 2, optimizer))
    assert saver(*run, tmp_path).save(2, {"step": 2, "list": (1, 2)})
    fresh = trained(1, 0, optimizer)
    assert saver(*fresh, tmp_path).load() == {"step": 2, "list": [1, 2]}
    assert_same(run, fresh)
    for net, optimizers in (run, fresh):  # and training goes on alike
        torch.manual_seed(5)
        net(torch.randn(4, 24)).square().sum().backward()
        for o in optimizers:
            o.step()
    assert_same(run, fresh)
    assert fresh[1][0].param_groups[0]["lr"] == 1e-2
    verify(path(tmp_path, 2))
    assert Path(path(tmp_path, 2), "recipe.py").read_text() == "print(1)\n"


def test_another_optimizer_for_some_parameters_is_named(tmp_path):
    """As in a run with Muon that began with AdamW for the experts. The weights go on with a new
    state."""
    save_run(tmp_path, 2)
    refuses(
        "does not fit this model: missing: optimizer.*momentum_buffer; unknown: .*; the optimizer "
        "has "
        ".*--exclude_from_loading optimizer starts it anew",
        saver(*trained(1, 0, "muon"), tmp_path).load,
    )
    net, optimizers = trained(1, 0, "muon")
    assert saver(net, optimizers, tmp_path, exclude_from_loading=["optimizer"]).load()["step"] == 2
    assert torch.equal(net.last.weight, trained(0, 2)[0].last.weight)
    assert not optimizers[1].state


def test_parameters_without_gradient_have_no_state_and_wrapped_modules_have_their_plain_names(
    tmp_path,
):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    net, optimizers = trained(0, 0)
    net.last.requires_grad_(False)
    net(torch.randn(4, 24)).sum().backward()
    optimizers[0].step()
    plain = everything(net, optimizers)
    net.first, net.last = checkpoint_wrapper(net.first), torch.compile(net.last)
    saver(net, optimizers, tmp_path).save(1, {})
    fresh = trained(1, 0)
    saver(*fresh, tmp_path).load()
    loaded = everything(*fresh)
    assert loaded.keys() == plain.keys()
    for key in plain:
        assert torch.equal(loaded[key], plain[key])
    assert fresh[0].last.weight not in fresh[1][0].state


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_async_saves_what_was_there_when_save_was_called(tmp_path, mode):
    net, optimizers = trained(0, 1)
    sync = saver(net, optimizers, tmp_path / "sync")
    background = saver(net, optimizers, tmp_path / "async", checkpoint_async=mode)
    for step in (1, 2):
        assert sync.save(step, {"step": step})
        state = {"step": step}
        assert background.save(step, state)
        state["step"] = "changed later"
        net.counts += 1  # a forward pass may change a buffer at once
        net(torch.randn(4, 24)).sum().backward()
        optimizers[0].step()  # waits by itself until the copy is made
        with torch.no_grad():
            for p in net.parameters():
                p.mul_(3)
    background.close()
    for step in (1, 2):
        assert diff(path(tmp_path / "sync", step), path(tmp_path / "async", step)) == 0
        assert json.loads(Path(path(tmp_path / "async", step), "state.json").read_text())[
            "state"
        ] == {"step": step}


def test_a_dead_writer_process_costs_one_save(tmp_path, capsys):
    checkpoints = saver(*trained(0, 1), tmp_path, checkpoint_async="process")
    next(iter(checkpoints.writer.process._processes.values())).kill()
    checkpoints.save(1, {})
    checkpoints.save(2, {})
    checkpoints.close()
    assert names(tmp_path) == ["step-2"]
    assert "step-1 is NOT SAVED: the writer process" in capsys.readouterr().out


def test_keep_latest_k(tmp_path):
    for k, expected in (
        (2, ["step-2", "step-3"]),
        (1, ["step-3"]),
        (0, ["step-1", "step-2", "step-3"]),
    ):
        checkpoints = saver(*trained(0, 1), tmp_path / str(k), keep_latest_k=k)
        for step in (1, 2, 3):
            checkpoints.save(step, {})
        checkpoints.close()
        assert names(tmp_path / str(k)) == expected


def test_an_existing_step_is_never_overwritten(tmp_path):
    save_run(tmp_path, 1)
    before = Path(path(tmp_path, 1), "manifest.json").read_bytes()
    assert saver(*trained(5, 1), tmp_path).save(1, {})
    assert Path(path(tmp_path, 1), "manifest.json").read_bytes() == before
    os.remove(path(tmp_path, 1) + "/__0_0.distcp")  # but a damaged step makes room
    assert saver(*trained(5, 1), tmp_path).save(1, {})
    verify(path(tmp_path, 1))
    assert [n.rpartition("-")[0] for n in names(tmp_path)] == ["damaged-1", "step"]


def kill_while_saving(out, function_name, after):
    """Saves step 2 and dies by SIGKILL when the save calls a function of storage/writer.py, or right
    after the call."""
    owners = {"rmtree": shutil, "write_manifest": writer, "publish": writer}
    owner = owners.get(function_name, writer)
    original = getattr(owner, function_name)

    def dying(*args, **kwargs):
        if after:
            original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, function_name, dying)
    saver(*trained(0, 2), out, keep_latest_k=1).save(2, {"step": 2})


@pytest.mark.parametrize(
    "function_name, after, survivor",
    [
        # before
        ("write_tensors", False, 1),
        ("write_tensors", True, 1),
        ("write_manifest", False, 1),
        ("publish", False, 1),
        ("step_folders", False, 2),
        ("rmtree", False, 2),  # after the rename
    ],
)
def test_kill_9_in_the_middle_of_a_save(tmp_path, function_name, after, survivor):
    save_run(tmp_path, 1)
    assert run_forked(kill_while_saving, tmp_path, function_name, after) == -signal.SIGKILL
    assert len(names(tmp_path)) == 2, "killed too early or too late to leave anything"
    fresh = trained(1, 0)
    assert saver(*fresh, tmp_path).load()["step"] == survivor
    assert_same(fresh, trained(0, survivor))
    for name in names(tmp_path):
        assert STEP_FOLDER.fullmatch(name)
    verify(path(tmp_path, survivor))


def save_with_a_full_disk(out, log):
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    out_of_disk = saver(*trained(0, 2, width=200), out)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    assert out_of_disk.save(2, {}) is False
    assert names(out) == ["step-1"]
    with pytest.raises(Failed, match="step 3"):
        out_of_disk.save(3, {}, last=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert out_of_disk.save(4, {})
    os._exit(0)


def test_full_disk(tmp_path):
    save_run(tmp_path, 1)
    assert run_forked(save_with_a_full_disk, tmp_path, tmp_path / "log") == 0
    lines = (tmp_path / "log").read_text().splitlines()  # of stdout and stderr together, one each
    said = [re.sub(f" {tmp_path}/checkpoints/| \\(.*", " ", line.split(":")[1]) for line in lines]
    assert said == [" step-2 is NOT SAVED", " step-3 is NOT SAVED", " saved step-4 "]
    assert names(tmp_path) == ["step-1", "step-4"]
    verify(path(tmp_path, 1))


def test_no_permission(tmp_path, capsys):
    Path(tmp_path, "checkpoints").write_text("a file where the folder should be")
    assert saver(*trained(), tmp_path).save(1, {}) is False
    assert capsys.readouterr().out.count("\n") == 1


def test_the_saves_to_come_follow_the_last_step_folder(tmp_path):
    run = SimpleNamespace(out=save_run(tmp_path, 1, 2), flags={"steps": 10, "checkpoint_every": 3})
    assert Checkpoints.saves_to_come(run) == 3  # of 8 steps


def test_every_flipped_bit_is_noticed(tmp_path):
    folder = Path(path(save_run(tmp_path, 1, 2), 2))
    rng = random.Random(0)
    files = sorted(folder.iterdir())
    for trial in range(200):
        file = files[trial % len(files)]
        bit = rng.randrange(8 * file.stat().st_size)
        flip(file, bit)
        try:
            verify(str(folder))
        except Damaged:
            pass
        else:
            pytest.fail(f"bit {bit} of {file.name} was flipped, and verify() found no damage")
        if trial < 12:  # and a run continues from step 1
            assert saver(*trained(1, 0), tmp_path, load_only=True).load()["step"] == 1
        flip(file, bit)
    verify(str(folder))


DAMAGES = {  # what happens to the file of tensors of step 2
    "missing": lambda shard: shard.unlink(),
    "unlisted": lambda shard: shard.with_name("__1_0.distcp").write_bytes(b""),
    "truncated": lambda shard: os.truncate(shard, shard.stat().st_size - 64),
    "link": lambda shard: shard.symlink_to(shard.rename(shard.parents[2] / "elsewhere")),
    "renamed": lambda shard: shard.parent.rename(shard.parent.with_name("step-3")),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_every_other_damage_is_noticed(tmp_path, damage, capsys):
    DAMAGES[damage](Path(path(save_run(tmp_path, 1, 2), 2), "__0_0.distcp"))
    with pytest.raises(Damaged):
        verify(step_folders(str(tmp_path))[0][1])
    fresh = trained(1, 0)
    assert saver(*fresh, tmp_path).load()["step"] == 1
    assert "DAMAGED" in capsys.readouterr().out
    assert_same(fresh, trained(0, 1))
    # out of the way of keep_latest_k
    assert [n.split("-")[0] for n in names(tmp_path)] == ["damaged", "step"]


def test_all_damaged_is_refused(tmp_path):
    steps = (1, 2, 3, 4)
    save_run(tmp_path, *steps)
    for step in steps:
        flip(path(tmp_path, step) + "/__0_0.distcp", 12345)
    # not all of them, in one line
    said = r"no undamaged checkpoint among step-4, step-3, step-2, \.\.\. \(step-4: "
    for _ in range(2):  # the second start, too
        refuses(said, saver(*trained(1, 0), tmp_path).load)
    for step in steps:
        os.remove(path(tmp_path, step) + "/manifest.json")
    refuses(said, check_run, str(tmp_path), IDENTITY, CheckpointConfig())


def test_load_step(tmp_path):
    save_run(tmp_path, 2, 4, 10)
    assert saver(*trained(1, 0), tmp_path, load_only=True, load_step=4).load()["step"] == 4
    assert names(tmp_path) == ["step-10", "step-2", "step-4"]
    refuses(
        "no checkpoint of step 5; it has the steps 10, 4, 2",
        check_run,
        str(tmp_path),
        IDENTITY,
        CheckpointConfig(load_step=5),
    )
    refuses("none", check_run, str(tmp_path / "new"), IDENTITY, CheckpointConfig(load_step=5))
    # one history per run: newer steps than the loaded step are set aside
    assert saver(*trained(1, 0), tmp_path, load_step=4).load()["step"] == 4
    assert [n.split("-")[0] for n in names(tmp_path)] == ["abandoned", "step", "step"]
    flip(path(tmp_path, 4) + "/__0_0.distcp", 12345)
    refuses("no undamaged checkpoint among", saver(*trained(1, 0), tmp_path, load_step=4).load)


def test_a_restart_by_the_launcher_goes_on_from_the_newest(tmp_path, monkeypatch):
    save_run(tmp_path, 2, 4)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    check_run(str(tmp_path), IDENTITY, CheckpointConfig(load_step=2))
    assert saver(*trained(1, 0), tmp_path, load_step=2).load()["step"] == 4


@pytest.mark.parametrize(
    "excluded", [["optimizer"], ["last"], ["model.last.*"], ["last.weight", "counts"]]
)
def test_exclude_from_loading(tmp_path, excluded):
    save_run(tmp_path, 2)
    fresh = trained(1, 0)
    start = everything(*trained(1, 0))
    there = everything(*trained(0, 2))
    assert saver(*fresh, tmp_path, exclude_from_loading=excluded).load()["step"] == 2
    prefixes = tuple(e.removeprefix("model.").removesuffix(".*") for e in excluded)
    for name, tensor in everything(*fresh).items():
        assert torch.equal(tensor, start[name] if name.startswith(prefixes) else there[name]), name
    # a parameter that starts anew has no old moments
    for name, param in fresh[0].named_parameters():
        assert (param in fresh[1][0].state) == (
            excluded != ["optimizer"] and not name.startswith(prefixes)
        ), name


def test_unknown_exclusion(tmp_path):
    save_run(tmp_path, 2)
    refuses(
        "lst.weight: no such parameter; the model has counts, first.bias, first.weight and 4 more$",
        saver(*trained(), tmp_path, exclude_from_loading=["lst.weight"]).load,
    )


def test_a_model_that_does_not_fit_is_untouched(tmp_path):
    save_run(tmp_path, 2)
    net = trained(1, 0)[0]
    optimizers = None
    net.last, net.extra = nn.Linear(24, 8), nn.Linear(2, 2)
    del net.norm
    net.first.bfloat16()
    optimizers = [torch.optim.AdamW(net.parameters())]
    before = {name: t.clone() for name, t in net.state_dict().items()}
    said = refuses(".", saver(net, optimizers, tmp_path).load)
    for text in (
        "missing: model.extra.weight",
        "shape: model.last.weight (7, 24), here (8, 24)",
        "unknown: model.norm.weight",
        "dtype: model.first.weight float32, here bfloat16",
    ):
        assert text in said
    for name, t in net.state_dict().items():
        assert torch.equal(t, before[name])


def test_init_from(tmp_path, capsys):
    save_run(tmp_path / "old", 2, 4)
    for source, step in ((tmp_path / "old", 4), (path(tmp_path / "old", 2), 2)):
        weights = trained(1, 0)
        check_run(
            str(tmp_path / "new"),
            {"model": IDENTITY["model"]},
            CheckpointConfig(init_from=str(source)),
        )
        assert saver(*weights, tmp_path / "new", init_from=str(source)).load() is None
        assert torch.equal(weights[0].last.weight, trained(0, step)[0].last.weight)
        assert not weights[1][0].state
        everything_of_it = trained(1, 0)
        flags = dict(init_from=str(source), init_model_only=False)
        check_run(str(tmp_path / "new"), IDENTITY, CheckpointConfig(**flags))
        assert saver(*everything_of_it, tmp_path / "new", **flags).load()["step"] == step
        assert_same(everything_of_it, trained(0, step))
    deeper = IDENTITY | {"model": IDENTITY["model"] | {"n_layers": 5}}
    refuses("n_layers is 5", check_run, str(tmp_path / "new"), deeper, CheckpointConfig(**flags))
    refuses(
        "holds no checkpoint",
        check_run,
        str(tmp_path / "new"),
        IDENTITY,
        CheckpointConfig(init_from=str(tmp_path)),
    )
    assert names(tmp_path / "old") == ["step-2", "step-4"]
    net = trained(1, 0)[0].bfloat16()  # another dtype may start a run, but not continue one
    saver(
        net,
        [torch.optim.AdamW(net.parameters())],
        tmp_path / "new",
        init_from=str(tmp_path / "old"),
    ).load()
    assert torch.equal(net.last.weight, trained(0, 4)[0].last.weight.bfloat16())
    save_run(tmp_path / "new", 1)
    assert (
        saver(*trained(1, 0), tmp_path / "new", init_from=str(tmp_path / "old")).load()["step"] == 1
    )
    assert "IGNORED" in capsys.readouterr().out


def start_run(model_config, seed, out, drawn=None, **flags):
    """(model, Checkpoints) of a start. drawn: a list for the names of all drawn parameters; the
    others are loaded later."""
    model = on_meta(model_config)
    draw = parallel.draw_block

    def watched(*args):
        drawn.append(args[-1].split("/")[1])
        draw(*args)

    skip = checkpoint.loaded_later(CheckpointConfig(**flags), str(out))
    with mock.patch.object(parallel, "draw_block", draw if drawn is None else watched):
        parallel.init_weights(model, Layout(), seed, skip)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return model, saver(model, optimizer, out, source="", **flags)


@pytest.mark.parametrize("source", ["this run", "a run", "a step", "all of a run", "Hugging Face"])
@pytest.mark.parametrize(
    "excluded", [[], ["head", "blocks.1.attn"], ["optimizer", "model.norm.weight"]]
)
def test_only_what_no_checkpoint_overwrites_is_drawn(tmp_path, source, excluded):
    """Before load() the other parameters are NaN; after load() every parameter has the expected
    value."""
    old, checkpoints = start_run(config(), 3, tmp_path / "old")
    optimizer = checkpoints.run.optimizers[0]
    for p in old.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert checkpoints.save(4, {"step": 4})
    flags = {
        "a run": dict(init_from=str(tmp_path / "old")),
        "a step": dict(init_from=path(tmp_path / "old", 4)),
        "all of a run": dict(init_from=str(tmp_path / "old"), init_model_only=False),
    }.get(source, {})
    if source == "Hugging Face":
        save_hf([old], str(tmp_path / "hf"), torch.float32)
        flags = dict(init_from=str(tmp_path / "hf"))
        excluded = [name for name in excluded if name != "optimizer"]
    drawn = []
    out = tmp_path / ("old" if source == "this run" else "new")
    fresh = start_run(config(), 5, tmp_path / "other")[0]
    model, checkpoints = start_run(config(), 5, out, drawn, exclude_from_loading=excluded, **flags)
    names = tuple(f"{name.removeprefix('model.')}." for name in excluded)
    kept = {fqn for fqn, _ in model.named_parameters() if f"{fqn}.".startswith(names)}
    assert set(drawn) == {fqn for fqn in kept if "norm" not in fqn}
    for fqn, p in model.named_parameters():
        if "norm" not in fqn and fqn not in kept:
            assert p.isnan().all()
    checkpoints.load()
    for fqn, p in model.named_parameters():
        assert torch.equal(p, (fresh if fqn in kept else old).get_parameter(fqn)), fqn


def test_weights_that_no_file_has_are_drawn(tmp_path):
    """A new run draws all parameters; a run from Hugging Face's files draws multi-token prediction,
    if missing there."""
    with_mtp = config("deepseek", n_layers=2, mtp_depth=1)
    old = start_run(replace(with_mtp, mtp_depth=0), 3, tmp_path / "old")[0]
    save_hf([old], str(tmp_path / "hf"), torch.float32)
    everything = []
    drawn = []
    fresh = start_run(with_mtp, 5, tmp_path / "other", everything)[0]
    assert set(everything) == {fqn for fqn, p in fresh.named_parameters() if "norm" not in fqn}
    model, checkpoints = start_run(
        with_mtp, 5, tmp_path / "new", drawn, init_from=str(tmp_path / "hf")
    )
    checkpoints.load()
    assert set(drawn) == {fqn for fqn in everything if fqn.startswith("mtp.")}
    for fqn, p in model.named_parameters():
        assert torch.equal(p, (fresh if fqn.startswith("mtp.") else old).get_parameter(fqn)), fqn
    for b in model.buffers():
        assert (b == 0).all()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_tokenizer_that_no_checkpoint_can_hold_is_refused_before_training(tmp_path, book, name):
    first = Path(book[1])
    (first / "chat_template.jinja").write_text("{{ messages }}")
    checkpoints = saver(*trained(), tmp_path / "run", tokenizer_file=str(first / "tokenizer.json"))
    with open(first / name, "wb") as sparse:
        sparse.truncate(1 << 30)
    refuses(
        f"{name}.* has 1,073,741,824 bytes, which is absurd",
        saver,
        *trained(),
        tmp_path / "other",
        tokenizer_file=str(first / "tokenizer.json"),
    )
    loads = saver(
        *trained(), tmp_path / "other", tokenizer_file=str(first / "tokenizer.json"), load_only=True
    )
    # never saves
    assert loads.save(1, {}, last=True) is False
    assert not (tmp_path / "other").exists()
    assert checkpoints.save(1, {})  # later edits change no run
    assert Path(path(tmp_path / "run", 1), "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads(Path(path(tmp_path / "run", 1), "tokenizer.json").read_bytes())["model"]


# --- the code of a run


def test_changed_code_is_told_when_a_run_goes_on(tmp_path, monkeypatch, capsys):
    """A fork in another folder, with a module beside and a module in a folder below; our files are
    elsewhere."""
    fork = tmp_path / "fork"
    out = tmp_path / "run"
    (fork / "parts").mkdir(parents=True)
    sources = {
        "my_env.py": "from parts import block\n",
        "mine.py": "a = 1\n",
        "parts/block.py": "WIDTH = 4\n",
    }
    for (name, text), module in zip(sources.items(), ("nanotitan_env", "mine", "parts.block")):
        (fork / name).write_text(text)
        monkeypatch.setitem(sys.modules, module, SimpleNamespace(__file__=str(fork / name)))
    checkpoints = saver(*trained(), out)
    (fork / "mine.py").write_text("a = 2\n")  # edited while the run trains
    checkpoints.save(1, {"step": 1})
    code = json.loads(Path(path(out, 1), "code.json").read_bytes())
    assert sources.items() <= code.items()  # as imported, without later edits
    assert {"checkpoint.py", "flags/config.py"} <= code.keys()
    # no library's source
    assert not [name for name in code if ".venv" in name or Path(name).is_absolute()]

    def load(out, **flags) -> str:
        capsys.readouterr()
        saver(*trained(), out, **flags).load()
        said = capsys.readouterr().out
        return said.partition("code that has changed since step-1 was written: ")[2].strip()

    (fork / "mine.py").write_text(sources["mine.py"])
    assert load(out) == ""
    rewrite(
        path(out, 1),
        "code.json",
        json.dumps(code | {"mine.py": "raise SystemExit(3)", "gone.py": ""}).encode(),
    )
    (fork / "my_env.py").write_text("from parts import block, new\n")
    (fork / "parts" / "new.py").write_text("")
    expected = "mine.py, my_env.py"  # compared as text, and never run
    assert load(out) == expected == load(tmp_path / "other", init_from=str(out))
    rewrite(path(out, 1), "code.json", json.dumps(dict.fromkeys(code, "")).encode())
    assert re.fullmatch(r"[\w/]+\.py, [\w/]+\.py, [\w/]+\.py and \d+ more", load(out))
    rewrite(path(out, 1), "code.json", None)  # as an older program wrote it
    assert load(out) == ""
    assert names(out) == ["step-1"]


def test_a_model_whose_file_has_changed_is_told_where_one_samples_from_it(tmp_path, capsys):
    checkpoints = saver(Llama3(config()), [], tmp_path)
    checkpoints.save(1, {"step": 1})
    load_model(str(tmp_path))
    assert "code that has changed" not in capsys.readouterr().err
    there = checkpoints.code | {"models/llama3.py": "", "models/gone.py": "", "train_llama3.py": ""}
    rewrite(path(tmp_path, 1), "code.json", json.dumps(there).encode())
    load_model(str(tmp_path))
    said = capsys.readouterr()  # stdout is for sampled text
    assert "code that has changed since step-1 was written: models/llama3.py\n" in said.err
    assert not said.out


def test_model_only(tmp_path):
    saver(*trained(0, 2), tmp_path).save(2, {"step": 2}, last=True, model_only=True)
    for refusal in (
        lambda: check_run(str(tmp_path), IDENTITY, CheckpointConfig()),
        saver(*trained(1, 0), tmp_path).load,
    ):
        refuses("holds only the weights; .* --init_from", refusal)
    fresh = trained(1, 0)
    saver(*fresh, tmp_path / "new", init_from=str(tmp_path)).load()
    assert torch.equal(fresh[0].last.weight, trained(0, 2)[0].last.weight)


def test_no_pickle_is_written_and_tables_of_format_2_are_read(tmp_path):
    """In format 2 a table had a row for each shard."""
    folder = path(save_run(tmp_path, 2), 2)
    assert not Path(folder, ".metadata").exists()
    table = json.loads(Path(folder, "tensors.json").read_bytes())
    weight = table["tensors"]["model.first.weight"]
    begin, n_bytes = weight["shards"][1:3]
    assert table["files"] == ["__0_0.distcp"]
    assert 0 <= begin < begin + n_bytes <= os.path.getsize(f"{folder}/__0_0.distcp")
    assert weight == {
        "dtype": "float32",
        "shape": [24, 24],
        "n": 1,
        "shards": [0, begin, n_bytes, 0, 0, 24, 24],
    }
    for entry in table["tensors"].values():
        entry["shards"] = np.array(
            [unpack_column(column, np.arange(entry["n"])) for column in entry["shards"]]
        ).T.tolist()
        del entry["n"]
    rewrite(folder, "tensors.json", json.dumps(table).encode())
    saves.set_manifest(folder, format_version=2)
    fresh = trained(0, 1)
    assert saver(*fresh, tmp_path).load()["step"] == 2
    assert torch.equal(fresh[0].last.weight, trained(0, 2)[0].last.weight)


def two_saves(folder) -> tuple[list, int]:
    """(plans made by this rank until each of two saves of a sharded run was complete, scalars that
    this rank saves)"""
    stages, layout = build(config(**SMALL), dict(dp_shard=2), 4, 2)
    optimizer = torch.optim.AdamW([p for stage in stages for p in stage.parameters()])
    found = []
    make = DefaultSavePlanner.create_global_plan
    with mock.patch.object(
        DefaultSavePlanner, "create_global_plan", autospec=True, side_effect=make
    ) as plans:
        run = saver(stages, optimizer, folder)
        for step in 1, 2:
            for p in stages[0].parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
            assert run.save(step, {"step": step})
            found.append(plans.call_count)
        scalars = [key for key, t in run.run.named(True, saving=True).items() if t.dim() == 0]
    return found, len(scalars)


def test_a_run_plans_its_saves_once(tmp_path):
    (plans, scalars), others = pool(2).run(two_saves, tmp_path)
    # AdamW's steps are saved by one rank
    assert plans == [1, 1]
    assert scalars > 0
    assert others == ([0, 0], 0)
    tables = [Path(path(tmp_path, step), "tensors.json").read_bytes() for step in (1, 2)]
    assert tables[0] == tables[1]
    assert verify(path(tmp_path, 2))


def test_a_start_looks_at_no_file_of_tensors(tmp_path):
    """A large run has one for each rank, and every rank looks for the newest checkpoint several
    times."""
    folder = save_run(tmp_path, 2)
    os.rename(f"{path(folder, 2)}/__0_0.distcp", tmp_path / "gone")
    assert newest_readable(str(folder), names=ABOUT) == path(folder, 2)
    with pytest.raises(Damaged, match="__0_0.distcp is missing"):
        verify(path(folder, 2))


def test_columns_of_a_grid_are_short():
    # offsets of 64 x 3 shards
    grid = np.array([[first, second] for first in range(0, 640, 10) for second in range(0, 96, 32)])
    assert [pack_column(column) for column in grid.T] == [
        {"rule": [0, 10, 3, 192]},
        {"rule": [0, 32, 1, 3]},
    ]
    uneven = np.array([3, 1, 4, 1])
    assert pack_column(uneven) == [3, 1, 4, 1]
    assert pack_column(uneven[:1]) == 3
    generator = np.random.default_rng(0)
    for n in (1, 2, 3, 8, 60):
        for column in (
            generator.integers(0, 3, n),
            np.arange(n) // 2 % 3 * 7 + 5,
            np.sort(generator.integers(0, 4, n)),
        ):
            packed = json.loads(json.dumps(pack_column(column)))
            assert np.array_equal(unpack_column(packed, np.arange(n)), column)


@pytest.mark.parametrize(
    "first, shape, found", [((0, 0), (1, 1), 1), ((15, 8), (15, 56), 4), ((640, 96), (0, 0), 0)]
)
def test_a_rank_reads_the_rows_of_its_own_shards(monkeypatch, first, shape, found):
    """Of 64 x 3 shards most are looked at in two of seven columns only."""
    grid = np.array([[0, 7, 9, i, j, 10, 32] for i in range(0, 640, 10) for j in range(0, 96, 32)])
    saved = dcp.SavedTensor(
        torch.Size((640, 96)), torch.float32, (["a"], np.array([16])), 192, [*grid.T]
    )
    looked = []

    def unpack(column, at):
        looked.append(len(at))
        return column[at]

    monkeypatch.setattr(dcp, "unpack_column", unpack)
    *_, offsets, sizes = saved.read_shards(first, shape)
    overlap = []
    for row in grid:
        if all((row[3:5] < np.add(first, shape)) & (row[3:5] + row[5:] > first)):
            overlap.append(row[3:].tolist())
    assert np.hstack([offsets, sizes]).tolist() == overlap
    assert len(overlap) == found
    assert sum(looked) <= 2 * 192 + 2 * 3 * 3 + 7 * found


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda table, entry: table["files"].__setitem__(0, "../../../secret.distcp"),
            "KeyError: .*secret.distcp",
        ),
        (lambda table, entry: entry["shards"].__setitem__(2, 10**9), "no part of"),
        (lambda table, entry: entry["shards"].__setitem__(1, -1), "no part of"),
        (lambda table, entry: entry["shards"].__setitem__(0, 9), "no part of"),
        (
            lambda table, entry: entry["shards"].__setitem__(3, {"rule": [1, 0, 0, 0]}),
            "do not add up",
        ),
        (lambda table, entry: entry["shards"].__setitem__(5, 1 << 62), "do not add up"),
        (lambda table, entry: entry["shards"].pop(), "refused"),
        (lambda table, entry: entry.update(shards=[]), "refused"),
        (lambda table, entry: entry.update(n=1 << 40), "is said to have"),
        (lambda table, entry: entry.update(dtype="save"), "save is no dtype"),
        (lambda table, entry: entry.update(dtype="nonsense"), "refused"),
        (None, "refused"),
    ],
)
def test_an_evil_table_reads_nothing_from_elsewhere(tmp_path, change, message):
    folder = path(save_run(tmp_path, 2), 2)
    table = json.loads(Path(folder, "tensors.json").read_bytes())
    if change:
        change(table, table["tensors"]["model.first.weight"])
    rewrite(folder, "tensors.json", json.dumps(table if change else 3).encode())
    verify(folder)  # the checksums are right, but an attacker can compute checksums
    fresh = trained(1, 0)
    refuses(f"tensors.json is refused: .*{message}|{message}", saver(*fresh, tmp_path).load)
    weights = everything(*fresh)  # the optimizer has got zeros to load into
    for key, value in everything(*trained(1, 0)).items():
        assert torch.equal(weights[key], value)


def test_a_checkpoint_of_an_older_format_says_so(tmp_path, capsys):
    saves.set_manifest(path(save_run(tmp_path, 2), 2), format_version=1)
    said = "it is of format 1 and this code reads 2 and 3; with the code that wrote it"
    refuses(
        f"no undamaged checkpoint among step-2 .step-2: {said}",
        check_run,
        str(tmp_path),
        IDENTITY,
        CheckpointConfig(),
    )
    assert checkpoint_commands.main(["verify", str(tmp_path)]) == 1
    assert said in capsys.readouterr().out


def test_a_checkpoint_does_not_choose_what_is_imported(tmp_path):
    state = json.loads(Path(path(save_run(tmp_path, 2), 2), "state.json").read_text())
    state["identity"]["model"]["module"] = "os.path"
    rewrite(path(tmp_path, 2), "state.json", json_bytes(state))
    for reader in (load_model, lambda folder: grpo.model_of(grpo.Config(init_from=folder), 8)):
        refuses("only those in models/ and forks/", reader, str(tmp_path))
    os.remove(os.path.join(path(tmp_path, 2), "state.json"))
    save_run(tmp_path, 1)
    assert grpo.model_of(grpo.Config(init_from=str(tmp_path)), 8)[1] == config()  # of step 1
    refuses(
        "--model_args n_layers=1: the model is that of --init_from",
        grpo.model_of,
        grpo.Config(init_from=str(tmp_path), model_args="n_layers=1"),
        8,
    )


def test_command_line(tmp_path, capsys):
    save_run(tmp_path, 2, 4)
    a = path(tmp_path, 2)
    b = path(tmp_path, 4)
    done = run_program([sys.executable, "checkpoint.py", "diff", a, b])
    assert done.returncode == 1
    assert "state.json: step is 2 / 4" in done.stdout
    assert "25 of 25 tensors differ, most of all:\n  optimizer." in done.stdout
    assert checkpoint_commands.main(["diff", a, a]) == 0
    flip(b + "/recipe.py", 3)
    for wrong in (
        [],
        ["verify"],
        ["nonsense", a],
        ["ls", str(tmp_path / "nowhere")],
        ["diff", a, b],
    ):
        stops(capsys, checkpoint_commands.main, wrong)
    error = stops(capsys, checkpoint_commands.main, ["diff", a, str(tmp_path)])  # a run folder
    assert error == (
        f"error: {tmp_path} is no step folder; give two folders RUN/checkpoints/step-N\n"
    )


def test_verify_reads_every_byte_of_a_run_and_ls_does_not(tmp_path, capsys, monkeypatch):
    save_run(tmp_path, 2, 4)

    def command(*argv):
        capsys.readouterr()
        return checkpoint_commands.main([str(arg) for arg in argv]), capsys.readouterr().out

    (tmp_path / "checkpoints" / "step-6.tmp-1234").mkdir()  # of a killed save: no checkpoint
    status, out = command("verify", tmp_path)
    assert status == 0
    assert [line.split(":")[0] for line in out.splitlines()] == [
        f"{path(tmp_path, n)} is good" for n in (4, 2)
    ]
    tensors = next(name for name in os.listdir(path(tmp_path, 2)) if name.startswith("__"))
    flip(f"{path(tmp_path, 2)}/{tensors}", 1000)
    status, out = command("ls", tmp_path)
    assert status == 0
    assert out.count("complete (bytes not read)") == 2
    status, out = command("verify", tmp_path)
    assert status == 1
    assert "step-4 is good" in out
    assert f"step-2 is DAMAGED: {tensors} has crc32" in out
    assert command("verify", path(tmp_path, 4))[0] == 0
    assert command("verify", path(tmp_path, 2))[0] == 1

    for name in ("state.json", "config.json", "tensors.json"):  # ls reads manifests, and no more
        flip(f"{path(tmp_path, 4)}/{name}", 100)
    status, out = command("ls", tmp_path)
    assert status == 0
    assert out.count("complete (bytes not read)") == 2
    assert "1 rank(s), tp 2 " in out
    assert "only the weights" not in out
    os.truncate(f"{path(tmp_path, 4)}/{tensors}", 10)
    Path(path(tmp_path, 2), "manifest.json").unlink()
    status, out = command("ls", tmp_path)
    assert status == 0
    shown = {line.split()[0]: line for line in out.splitlines()}
    assert "DAMAGED: manifest.json: No such file" in shown["step-2"]
    assert f"DAMAGED: {tensors} was changed: it has 10 bytes, and had" in shown["step-4"]
    for folder in (
        tmp_path,
        path(tmp_path, 2),
        tmp_path / "nowhere",
        tmp_path / "checkpoints" / "step-6.tmp-1234",
    ):
        assert command("verify", folder)[0] == 1, folder
    # what is no checkpoint is not called damaged
    for folder in (tmp_path / "nowhere", tmp_path / "config.json"):
        assert f"{folder} is no folder; give a run folder" in command("verify", folder)[1]
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").mkdir()
    status, out = command("verify", tmp_path)
    assert status == 1
    assert "holds no checkpoint" in out


def test_load_model(tmp_path):
    torch.manual_seed(3)
    model = Llama3(config(tie_embeddings=True))
    optimizer = torch.optim.AdamW(model.parameters())
    identity = {**IDENTITY, "model": {**IDENTITY["model"], "tie_embeddings": True}}
    saver(model, optimizer, tmp_path, identity).save(7, {"step": 7})
    tokens = torch.arange(12)[None]
    for folder in (tmp_path, path(tmp_path, 7)):
        loaded, state = load_model(str(folder))
        assert state == {"step": 7}
        assert loaded.config == Llama3Config(**SMALL, tie_embeddings=True)
        assert torch.equal(loaded(tokens), model(tokens))
    assert load_model(str(tmp_path), dtype=torch.bfloat16)[0].norm.weight.dtype == torch.bfloat16


# --- several processes: any layout continues any layout's checkpoint, bit for bit

FOUR = [
    (4, flags)
    for flags in (
        dict(dp_replicate=2, dp_shard=2),
        dict(dp_shard=2, tp=2),
        dict(dp_shard=2, pp=2),
        dict(pp=2, tp=2),
        dict(dp_shard=2, cp=2),
        dict(tp=4),
        dict(
            dp_shard=2,
            pp=2,
            pp_schedule="Interleaved1F1B",
            pp_layers_per_stage=1,
            pp_first_stage_less_layers=0,
            pp_last_stage_less_layers=0,
        ),
    )
]
TWO = [(2, {}), (2, dict(pp=2))]


def run_layout(flags, source, target, options):
    """Loads `source` into this layout, trains, saves to `target`; returns {key: hash} of this
    rank's tensors."""
    steps = options.get("steps", 0)
    mode = options.get("mode", "off")
    if options.get("moe"):
        model_config = config("qwen3", **MOE)
    else:
        model_config = config(tie_embeddings=options.get("tie", False))
    stages, layout = build(model_config, flags, n=8, local_batch_size=2)
    optimizer = torch.optim.AdamW(
        [p for s in stages for p in s.parameters()], lr=1e-3, foreach=True
    )
    if mode == "process":
        multiprocessing.current_process()._config["daemon"] = False  # a daemon may start no process
    if source:
        step = saver(stages, optimizer, source, source="", load_only=True).load()["step"]
    else:
        step = 0
    c = saver(
        stages, optimizer, target, config=flags, source="", checkpoint_async=mode, keep_latest_k=2
    )
    for _ in range(steps):
        parallel.forward_backward(stages, local_batch(global_batch(step, 8, False), layout), layout)
        optimizer.step()
        optimizer.zero_grad()
        if options.get("moe"):
            balance_experts(stages, layout, "bias", 1e-3)
        step += 1
        if mode != "off":
            assert c.save(step, {"step": step})
    if mode == "off":
        assert c.save(step, {"step": step})
    c.close()

    def weigh(t):
        return (t.double() * torch.arange(1, t.numel() + 1).view(t.shape)).sum().item()

    return {key: weigh(full(t)) for key, t in c.run.named(True).items()}


def test_a_mean_needs_to_be_told_its_steps(tmp_path, capsys):
    said = stops(capsys, checkpoint_commands.main, ["average", "run", str(tmp_path / "new")])
    assert "one of the arguments --last --steps is required" in said


@pytest.mark.slow
def test_the_mean_of_sharded_steps_is_that_by_hand(tmp_path, capsys):
    run = str(tmp_path / "run")
    out = str(tmp_path / "mean")
    pool(2).run(run_layout, dict(tp=2), None, run, {"steps": 2, "mode": "thread"})
    steps = [load_model(path(run, step))[0].state_dict() for step in (1, 2)]
    assert checkpoint_commands.main(["average", run, out, "--last", "2"]) == 0
    model, state = load_model(out)
    assert state == {"step": 2, "mean_of_steps": [2, 1]}
    assert steps[0].keys() == model.state_dict().keys()
    for fqn, mean in model.state_dict().items():
        assert torch.equal(mean, (steps[1][fqn] + steps[0][fqn]) / 2), fqn
        assert not torch.equal(mean, steps[1][fqn]), fqn
    assert len(generate(model, [[1, 2]], 3, 0.0)[0]) == 3
    fresh = Llama3(config())
    assert saver(fresh, [], tmp_path / "new", init_from=out, load_only=True).load() is None
    assert torch.equal(fresh.head.weight, model.head.weight)
    assert checkpoint_commands.main(["average", run, out + "2", "--steps", "1,2"]) == 0
    assert diff(path(out, 2), path(out + "2", 2)) == 0
    saver(
        Llama3(config(n_layers=2)),
        [],
        run,
        IDENTITY | {"model": IDENTITY["model"] | {"n_layers": 2}},
    ).save(3, {})
    for wrong, words in [
        (
            ["--last", "4"],
            "--last 4: .*run has checkpoints of the steps .3, 2, 1.; give two or more",
        ),
        (["--steps", "1,1"], "--steps .1, 1.: "),
        (["--steps", "1,7"], "--steps .1, 7.: "),
        (["--last", "2"], "step-2 and .*step-3 hold different models: n_layers 4 -> 2"),
    ]:
        said = stops(
            capsys, checkpoint_commands.main, ["average", run, str(tmp_path / "none"), *wrong]
        )
        assert re.search(words, said), said
        assert not (tmp_path / "none").exists(), said
    refuses("is there already and not an empty folder", checkpoint_commands.average, run, out, 2)


def merged(parts):
    """The tensors of all ranks; tensors of several ranks must be the same."""
    whole = {}
    for part in parts:
        for key, value in part.items():
            assert whole.setdefault(key, value) == value, key
    return whole


def continued(first: str, layouts: list, hashes: dict, options: dict) -> str:
    """Loads the run `first` in one layout after the other, each from the run of the one before, and
    compares every copy."""
    before = first
    for i, (n, flags) in enumerate(layouts, 1):
        after = f"{first}-{i}"
        got = merged(pool(n).run(run_layout, flags, before, after, options))
        assert got == hashes, flags
        assert diff(path(first, 2), path(after, 2)) == 0, flags
        before = after
    return before


@pytest.mark.slow
def test_any_layout_continues_any_layout(tmp_path):
    first = str(tmp_path / "0")
    hashes = merged(pool(4).run(run_layout, {}, None, first, {"steps": 2}))
    assert len(hashes) == 4 * len(list(Llama3(config()).parameters()))
    # through all of them, and back to the first
    before = continued(first, [*FOUR, *TWO, (4, {})], hashes, {})
    # and a plain process
    model = Llama3(config())
    optimizer = torch.optim.AdamW(model.parameters())
    assert saver(model, optimizer, before, load_only=True).load() == {"step": 2}
    assert saver(model, optimizer, tmp_path / "one").save(2, {"step": 2})
    assert diff(path(first, 2), path(tmp_path / "one", 2)) == 0


@pytest.mark.slow
def test_any_expert_layout_continues_any(tmp_path):
    """Experts, moments and balancing biases through every kind of split, and back to the first
    layout, to the bit."""
    first = str(tmp_path / "0")
    hashes = merged(pool(4).run(run_layout, dict(ep=2), None, first, {"steps": 2, "moe": True}))
    biases = [value for key, value in hashes.items() if key.endswith("balance.bias")]
    assert len(biases) == 4
    assert all(biases)
    # 4 layers, 3 matrices; weight, two moments, step
    assert sum(".moe.experts.w" in key for key in hashes) == 4 * 3 * 4
    continued(
        first,
        [
            (2, {}),
            (4, dict(ep=4)),
            (4, dict(tp=2, ep=2, etp=2)),
            (4, dict(tp=2, ep=4)),
            (4, dict(pp=2, ep=2)),
            (4, dict(ep=2)),
        ],
        hashes,
        {"moe": True},
    )


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
@pytest.mark.slow
def test_tied_embeddings_at_both_ends_of_a_pipeline(tmp_path, schedule):
    whole = str(tmp_path / "whole")
    ends = str(tmp_path / "ends")
    hashes = merged(pool(2).run(run_layout, {}, None, whole, {"steps": 2, "tie": True}))
    got = merged(
        pool(2).run(run_layout, dict(pp=2, pp_schedule=schedule), whole, ends, {"tie": True})
    )
    assert got == hashes
    assert diff(path(whole, 2), path(ends, 2)) == 0


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_async_on_several_ranks_while_they_train(tmp_path, mode):
    sync = str(tmp_path / "sync")
    background = str(tmp_path / "async")
    for target, how in ((sync, "off"), (background, mode)):
        pool(2).run(run_layout, {"tp": 2}, None, target, {"steps": 3, "mode": how})
    assert diff(path(sync, 3), path(background, 3)) == 0
    assert names(background) == ["step-2", "step-3"]


def sharded(out):
    stages, _ = build(config(), {}, n=8, local_batch_size=2)
    return saver(stages, torch.optim.AdamW(stages[0].parameters()), out, source="")


def save_with_one_failing_rank(out, failing):
    c = sharded(out)
    error = OSError(28, "No space left on device")
    full_disk = mock.patch.object(
        dcp.import_dcp().FileSystemWriter, "write_data", side_effect=error
    )
    with full_disk if c.rank == failing else nullcontext():
        first = c.save(1, {})
    return first, c.save(2, {}), step_folders(out)


def test_one_rank_fails_and_all_agree(tmp_path):
    for first, second, folders in pool(2).run(save_with_one_failing_rank, str(tmp_path), 1):
        assert (first, second, [n for n, _ in folders]) == (False, True, [2])
    assert names(tmp_path) == ["step-2"]


def save_without_a_table(out):
    """The disk is full when rank 0 writes tensors.json."""
    c = sharded(out)
    error = OSError(28, "No space left on device", "tensors.json")
    with mock.patch.object(dcp, "write_file", side_effect=error):
        first = c.save(1, {})
    return first, c.save(2, {}), step_folders(out)


def test_a_table_that_cannot_be_written_ends_no_run(tmp_path):
    for first, second, folders in pool(2).run(save_without_a_table, str(tmp_path)):
        assert (first, second, [n for n, _ in folders]) == (False, True, [2])


def test_room_for_checkpoints_is_told_at_the_start(tmp_path):
    free = free_bytes(tmp_path / "not" / "there")
    assert describe_room(tmp_path, free / 20, 5, 10) == ""
    said = describe_room(tmp_path, free / 3.5, 5, 10)
    assert "of 5 saves to come the first 3 fit" in said or "the first 2 fit" in said  # others write
    assert describe_room(tmp_path, free / 3.5, 5, 1) == ""  # no more than two at once
    assert "NO SAVE WILL SUCCEED" in describe_room(tmp_path, 2 * free, 1, 1)
    with pytest.raises(OSError, match="it takes 1,000,000,000,000.0 MB, and .* MB are free"):
        check_room(tmp_path, 10**18)


def test_a_save_that_does_not_fit_writes_nothing(tmp_path, capsys):
    c = saver(*trained(0, 1), tmp_path)
    assert c.save(1, {})
    c.writer.plan.n_bytes = 10**18
    with pytest.raises(Failed, match="step 2, could not be saved to .*: it takes|No space left"):
        c.save(2, {}, last=True)
    assert names(tmp_path) == ["step-1"]
    assert "step-2 is NOT SAVED" in capsys.readouterr().out


def test_a_last_save_of_the_weights_asks_for_less_room(tmp_path):
    c = saver(*trained(0, 1), tmp_path)
    assert c.save(1, {})
    c.writer.plan.n_bytes = 10**18  # of a save with the optimizer
    assert c.save(2, {}, model_only=True, last=True)


def load_error(out):
    try:
        return sharded(out).load()
    except ValueError as error:
        return str(error)


def test_all_ranks_take_the_same_decision(tmp_path):
    out = str(tmp_path)
    for step in (1, 2):
        pool(2).run(run_layout, {}, None, out, {"steps": step})
    flip(path(out, 2) + "/__1_0.distcp", 4321)
    assert pool(2).run(load_error, out) == [{"step": 1}, {"step": 1}]
    flip(path(out, 1) + "/__1_0.distcp", 4321)
    one, two = pool(2).run(load_error, out)
    assert one == two
    assert "no undamaged checkpoint" in one


def test_a_note_in_a_step_folder_is_named_and_costs_nothing(tmp_path, capsys):
    """But a file of a known kind is damage: an added chat template would be used."""
    save_run(tmp_path, 2, 4)
    for name in ("notes.txt", ".nfs0000000012"):
        Path(path(tmp_path, 4), name).write_text("good run")
    assert saver(*trained(), tmp_path).load()["step"] == 4
    assert (
        "step-4 has files that no save has written, and they are not read: .nfs0000000012, notes.txt"
        in capsys.readouterr().out
    )
    Path(path(tmp_path, 4), "chat_template.jinja").write_text("x")
    assert saver(*trained(), tmp_path).load()["step"] == 2
    assert "DAMAGED: chat_template.jinja is not in manifest.json" in capsys.readouterr().out


def test_a_step_folder_whose_state_names_no_model_is_told_in_one_line(tmp_path):
    """To a start, to evaluate.py and to generate.py."""
    folder = path(save_run(tmp_path, 2), 2)
    rewrite(folder, "state.json", json_bytes({"state": [1]}))
    for out, init_from in (str(tmp_path), ""), ("new", folder):
        cfg = SimpleNamespace(**vars(CheckpointConfig(init_from=init_from)), data="", tokenizer="")
        refuses(
            "state.json names no model for its weights; give",
            check_run,
            out,
            {"model": {"module": "models.llama3"}},
            cfg,
        )
    refuses("does not describe a model", load_model, folder)
    refuses("is no place in a run", has_bos, str(tmp_path))
    assert not has_adapters(folder)


def test_a_state_that_is_no_place_in_a_run_or_describes_no_model(tmp_path):
    for state in {"step": float("nan")}, {"samples": -5}, [1]:
        (tmp_path / "state.json").write_text(json.dumps({"state": state}))
        refuses("is no place in a run", saved_state, str(tmp_path))
    known = {"module": "models.llama3", "class": "Llama3"}
    nothing = "does not describe a model"
    for model, words in (
        ({"class": "Nothing"}, nothing),
        ({"n_layers": "x"}, nothing),
        (None, nothing),
        ({"n_layers": 10**7}, "n_layers 10000000 is absurd"),
    ):
        model = model and known | model
        (tmp_path / "state.json").write_text(json.dumps({"identity": {"model": model}}))
        refuses(words, saved_model, str(tmp_path))
