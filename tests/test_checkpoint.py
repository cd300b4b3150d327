"""Tests checkpoint.py: a saved run comes back to the bit in any layout, and damage is noticed."""
import json
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from layouts import MODELS, MOE, SMALL, build, config, full, global_batch, local_batch
from pool import forkserver, pool
from programs import run_program
from saves import IDENTITY, Net, assert_same, everything, flip, names, of, path, rewrite, saved, trained
from torch import nn

import checkpoint
import grpo
import parallel
from checkpoint import CheckpointConfig, Checkpoints, Damaged, load_model, saved_model, saved_state, step_folders, verify
from distributed.experts import balance_experts
from distributed.layout import Layout
from models.llama3 import FLAVORS as LLAMA3
from models.llama3 import Llama3, Llama3Config
from storage import dcp
from storage.diff import diff
from storage.hf import save_hf
from storage.manifest import STEP_FOLDER, own_hash
from storage.resume import check_run
from support.files import json_bytes
from tools import checkpoint_commands


def forked(function, *args):
    """The exit code of function(*args) in a new process."""
    process = forkserver.Process(target=function, args=args)
    process.start()
    process.join(60)
    assert process.exitcode is not None, "hangs"
    return process.exitcode


# --- one process


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_what_is_saved_comes_back(tmp_path, optimizer):
    run = trained(0, 2, optimizer)
    assert of(*run, tmp_path).save(2, {"step": 2, "list": (1, 2)})
    fresh = trained(1, 0, optimizer)
    assert of(*fresh, tmp_path).load() == {"step": 2, "list": [1, 2]}
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
    """As in a run with Muon that began with AdamW for the experts. The weights go on with a new state."""
    saved(tmp_path, 2)
    with pytest.raises(ValueError, match="does not fit this model: missing: optimizer.*momentum_buffer; unknown: "
                                         ".*; the optimizer has .*--exclude_from_loading optimizer starts it anew") as error:
        of(*trained(1, 0, "muon"), tmp_path).load()
    assert "\n" not in str(error.value)
    net, optimizers = trained(1, 0, "muon")
    assert of(net, optimizers, tmp_path, exclude_from_loading=["optimizer"]).load()["step"] == 2
    assert torch.equal(net.last.weight, trained(0, 2)[0].last.weight) and not optimizers[1].state


def test_nothing_there_is_a_fresh_start(tmp_path):
    run = trained(0, 0)
    check_run(str(tmp_path), IDENTITY, CheckpointConfig())
    assert of(*run, tmp_path).load() is None
    assert_same(run, trained(0, 0))


def test_parameters_without_gradient_have_no_state(tmp_path):
    net, optimizers = trained(0, 0)
    net.last.requires_grad_(False)
    net(torch.randn(4, 24)).sum().backward()
    optimizers[0].step()
    of(net, optimizers, tmp_path).save(1, {})
    fresh = trained(1, 0)
    of(*fresh, tmp_path).load()
    assert_same((net, optimizers), fresh)
    assert fresh[0].last.weight not in fresh[1][0].state


def test_wrapped_names_are_those_of_the_plain_model(tmp_path):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    net, optimizers = trained(0, 1)
    net.first = checkpoint_wrapper(net.first)
    net.last = torch.compile(net.last)
    of(net, optimizers, tmp_path).save(1, {})
    fresh = trained(1, 0)
    of(*fresh, tmp_path).load()
    assert torch.equal(fresh[0].last.weight, net.last.weight)


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_async_saves_what_was_there_when_save_was_called(tmp_path, mode):
    net, optimizers = trained(0, 1)
    sync, background = of(net, optimizers, tmp_path / "sync"), of(net, optimizers, tmp_path / "async", checkpoint_async=mode)
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
        assert json.loads(Path(path(tmp_path / "async", step), "state.json").read_text())["state"] == {"step": step}


def test_a_dead_writer_process_costs_one_save(tmp_path, capsys):
    checkpoints = of(*trained(0, 1), tmp_path, checkpoint_async="process")
    checkpoints.process.process.kill()
    checkpoints.process.process.join()
    checkpoints.save(1, {})
    checkpoints.save(2, {})
    checkpoints.close()
    assert names(tmp_path) == ["step-2"]
    assert "step-1 is NOT SAVED: the writer process" in capsys.readouterr().out


def test_keep_latest_k(tmp_path):
    for k, expected in ((2, ["step-2", "step-3"]), (1, ["step-3"]), (0, ["step-1", "step-2", "step-3"])):
        checkpoints = of(*trained(0, 1), tmp_path / str(k), keep_latest_k=k)
        for step in (1, 2, 3):
            checkpoints.save(step, {})
        checkpoints.close()
        assert names(tmp_path / str(k)) == expected


def test_an_existing_step_is_never_overwritten(tmp_path):
    saved(tmp_path, 1)
    before = Path(path(tmp_path, 1), "manifest.json").read_bytes()
    assert of(*trained(5, 1), tmp_path).save(1, {})
    assert Path(path(tmp_path, 1), "manifest.json").read_bytes() == before
    os.remove(path(tmp_path, 1) + "/__0_0.distcp")  # but a damaged step makes room
    assert of(*trained(5, 1), tmp_path).save(1, {})
    verify(path(tmp_path, 1))
    assert [n.rpartition("-")[0] for n in names(tmp_path)] == ["damaged-1", "step"]


def kill_while_saving(out, function_name, after):
    """Saves step 2 and dies by SIGKILL when the save calls a function of checkpoint.py, or right after the call."""
    owner = shutil if function_name == "rmtree" else checkpoint
    original = getattr(owner, function_name)

    def dying(*args, **kwargs):
        if after:
            original(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(owner, function_name, dying)
    of(*trained(0, 2), out, keep_latest_k=1).save(2, {"step": 2})


@pytest.mark.parametrize("function_name, after, survivor", [
    ("write_tensors", False, 1), ("write_tensors", True, 1), ("write_manifest", False, 1), ("publish", False, 1),  # before
    ("step_folders", False, 2), ("rmtree", False, 2),  # after the rename
])
def test_kill_9_in_the_middle_of_a_save(tmp_path, function_name, after, survivor):
    saved(tmp_path, 1)
    assert forked(kill_while_saving, tmp_path, function_name, after) == -signal.SIGKILL
    assert len(names(tmp_path)) == 2, "killed too early or too late to leave anything"
    fresh = trained(1, 0)
    assert of(*fresh, tmp_path).load()["step"] == survivor
    assert_same(fresh, trained(0, survivor))
    assert all(STEP_FOLDER.fullmatch(name) for name in names(tmp_path))
    verify(path(tmp_path, survivor))


def save_with_a_full_disk(out, log):
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    out_of_disk = of(*trained(0, 2, width=200), out)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, resource.RLIM_INFINITY))
    assert out_of_disk.save(2, {}) is False
    assert names(out) == ["step-1"]
    try:
        out_of_disk.save(3, {}, last=True)
    except RuntimeError as error:
        assert "step 3" in str(error)
    else:
        os._exit(7)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert out_of_disk.save(4, {})
    os._exit(0)


def test_full_disk(tmp_path):
    saved(tmp_path, 1)
    assert forked(save_with_a_full_disk, tmp_path, tmp_path / "log") == 0
    said = [line.split(":")[1].split(str(tmp_path))[0] for line in (tmp_path / "log").read_text().splitlines()]
    assert said == [" step-2 is NOT SAVED", " step-3 is NOT SAVED", " saved "]  # one line each, on stdout and stderr together
    assert names(tmp_path) == ["step-1", "step-4"]
    verify(path(tmp_path, 1))


def test_no_permission(tmp_path, capsys):
    Path(tmp_path, "checkpoints").write_text("a file where the folder should be")
    assert of(*trained(), tmp_path).save(1, {}) is False
    assert capsys.readouterr().out.count("\n") == 1


def test_every_flipped_bit_is_noticed(tmp_path):
    folder, rng = Path(path(saved(tmp_path, 1, 2), 2)), random.Random(0)
    files = sorted(folder.iterdir())
    for trial in range(200):
        file = files[trial % len(files)]
        bit = rng.randrange(8 * file.stat().st_size)
        flip(file, bit)
        with pytest.raises(Damaged):
            verify(str(folder))
        if trial < 12:  # and a run continues from step 1
            assert of(*trained(1, 0), tmp_path, load_only=True).load()["step"] == 1
        flip(file, bit)
    verify(str(folder))


@pytest.mark.parametrize("damage", ["missing", "unlisted", "truncated", "link", "renamed"])
def test_every_other_damage_is_noticed(tmp_path, damage, capsys):
    folder = Path(path(saved(tmp_path, 1, 2), 2))
    shard = folder / "__0_0.distcp"
    if damage == "missing":
        shard.unlink()
    elif damage == "unlisted":
        (folder / "__1_0.distcp").write_bytes(b"")
    elif damage == "truncated":
        os.truncate(shard, shard.stat().st_size - 64)
    elif damage == "link":
        shard.rename(tmp_path / "elsewhere")
        shard.symlink_to(tmp_path / "elsewhere")
    elif damage == "renamed":
        folder = folder.rename(folder.with_name("step-3"))
    with pytest.raises(Damaged):
        verify(str(folder))
    fresh = trained(1, 0)
    assert of(*fresh, tmp_path).load()["step"] == 1
    assert "DAMAGED" in capsys.readouterr().out
    assert_same(fresh, trained(0, 1))
    assert [n.split("-")[0] for n in names(tmp_path)] == ["damaged", "step"]  # out of the way of keep_latest_k


def test_all_damaged_is_refused(tmp_path):
    saved(tmp_path, 1, 2)
    for step in (1, 2):
        flip(path(tmp_path, step) + "/__0_0.distcp", 12345)
    for _ in range(2):  # the second start, too
        with pytest.raises(ValueError, match="no undamaged checkpoint among"):
            of(*trained(1, 0), tmp_path).load()
    for step in (1, 2):
        os.remove(path(tmp_path, step) + "/manifest.json")
    with pytest.raises(ValueError, match="no undamaged checkpoint among"):
        check_run(str(tmp_path), IDENTITY, CheckpointConfig())


def test_load_step(tmp_path):
    saved(tmp_path, 2, 4, 10)
    assert of(*trained(1, 0), tmp_path, load_only=True, load_step=4).load()["step"] == 4
    assert names(tmp_path) == ["step-10", "step-2", "step-4"]
    with pytest.raises(ValueError, match="no checkpoint of step 5; it has the steps 10, 4, 2"):
        check_run(str(tmp_path), IDENTITY, CheckpointConfig(load_step=5))
    with pytest.raises(ValueError, match="none"):
        check_run(str(tmp_path / "new"), IDENTITY, CheckpointConfig(load_step=5))
    # one history per run: newer steps than the loaded step are set aside
    assert of(*trained(1, 0), tmp_path, load_step=4).load()["step"] == 4
    assert [n.split("-")[0] for n in names(tmp_path)] == ["abandoned", "step", "step"]
    flip(path(tmp_path, 4) + "/__0_0.distcp", 12345)
    with pytest.raises(ValueError, match="no undamaged checkpoint among"):
        of(*trained(1, 0), tmp_path, load_step=4).load()


def test_a_restart_by_the_launcher_goes_on_from_the_newest(tmp_path, monkeypatch):
    saved(tmp_path, 2, 4)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    check_run(str(tmp_path), IDENTITY, CheckpointConfig(load_step=2))
    assert of(*trained(1, 0), tmp_path, load_step=2).load()["step"] == 4


@pytest.mark.parametrize("excluded", [["optimizer"], ["last"], ["model.last.*"], ["last.weight", "counts"]])
def test_exclude_from_loading(tmp_path, excluded):
    saved(tmp_path, 2)
    fresh, start, there = trained(1, 0), everything(*trained(1, 0)), everything(*trained(0, 2))
    assert of(*fresh, tmp_path, exclude_from_loading=excluded).load()["step"] == 2
    prefixes = tuple(e.removeprefix("model.").removesuffix(".*") for e in excluded)
    for name, tensor in everything(*fresh).items():
        assert torch.equal(tensor, start[name] if name.startswith(prefixes) else there[name]), name
    for name, param in fresh[0].named_parameters():  # a parameter that starts anew has no old moments
        assert (param in fresh[1][0].state) == (excluded != ["optimizer"] and not name.startswith(prefixes)), name


def test_unknown_exclusion(tmp_path):
    saved(tmp_path, 2)
    with pytest.raises(ValueError, match="lst.weight: no such parameter; did you mean last.weight"):
        of(*trained(), tmp_path, exclude_from_loading=["lst.weight"]).load()


def test_a_model_that_does_not_fit_is_untouched(tmp_path):
    saved(tmp_path, 2)
    net, optimizers = Net(1), None
    net.last, net.extra = nn.Linear(24, 8), nn.Linear(2, 2)
    del net.norm
    net.first.bfloat16()
    optimizers = [torch.optim.AdamW(net.parameters())]
    before = {name: t.clone() for name, t in net.state_dict().items()}
    with pytest.raises(ValueError) as error:
        of(net, optimizers, tmp_path).load()
    for text in ("missing: model.extra.weight", "shape: model.last.weight (7, 24), here (8, 24)", "unknown: model.norm.weight",
                 "dtype: model.first.weight float32, here bfloat16"):
        assert text in str(error.value)
    assert all(torch.equal(t, before[name]) for name, t in net.state_dict().items())


def test_init_from(tmp_path, capsys):
    saved(tmp_path / "old", 2, 4)
    for source, step in ((tmp_path / "old", 4), (path(tmp_path / "old", 2), 2)):
        weights = trained(1, 0)
        check_run(str(tmp_path / "new"), {"model": IDENTITY["model"]}, CheckpointConfig(init_from=str(source)))
        assert of(*weights, tmp_path / "new", init_from=str(source)).load() is None
        assert torch.equal(weights[0].last.weight, trained(0, step)[0].last.weight) and not weights[1][0].state
        everything_of_it = trained(1, 0)
        flags = dict(init_from=str(source), init_model_only=False)
        check_run(str(tmp_path / "new"), IDENTITY, CheckpointConfig(**flags))
        assert of(*everything_of_it, tmp_path / "new", **flags).load()["step"] == step
        assert_same(everything_of_it, trained(0, step))
    with pytest.raises(ValueError, match="n_layers is 5"):
        check_run(str(tmp_path / "new"), {**IDENTITY, "model": {**IDENTITY["model"], "n_layers": 5}}, CheckpointConfig(**flags))
    with pytest.raises(ValueError, match="holds no checkpoint"):
        check_run(str(tmp_path / "new"), IDENTITY, CheckpointConfig(init_from=str(tmp_path)))
    assert names(tmp_path / "old") == ["step-2", "step-4"]
    saved(tmp_path / "new", 1)
    assert of(*trained(1, 0), tmp_path / "new", init_from=str(tmp_path / "old")).load()["step"] == 1
    assert "IGNORED" in capsys.readouterr().out


def begun(model_config, seed, out, drawn=None, **flags):
    """(model, Checkpoints) of a start. drawn: a list for the names of all drawn parameters; the others are loaded later."""
    with torch.device("meta"):
        model = MODELS[type(model_config)](model_config)
    draw = parallel.draw_block

    def watched(*args):
        drawn.append(args[-1].split("/")[1])
        draw(*args)

    cfg = CheckpointConfig(**flags)
    cfg.out = str(out)
    with mock.patch.object(parallel, "draw_block", draw if drawn is None else watched):
        parallel.init_weights(model, Layout(), seed, checkpoint.loaded_later(cfg))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    return model, Checkpoints(cfg, str(out), modules=[model], optimizer=optimizer, identity=IDENTITY, config={}, source="")


@pytest.mark.parametrize("source", ["this run", "a run", "a step", "all of a run", "Hugging Face"])
@pytest.mark.parametrize("excluded", [[], ["head", "blocks.1.attn"], ["optimizer", "model.norm.weight"]])
def test_only_what_no_checkpoint_overwrites_is_drawn(tmp_path, source, excluded):
    """Before load() the other parameters are NaN; after load() every parameter has the expected value."""
    old, checkpoints = begun(config(), 3, tmp_path / "old")
    optimizer = checkpoints.optimizers[0]
    for p in old.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert checkpoints.save(4, {"step": 4})
    flags = {"a run": dict(init_from=str(tmp_path / "old")), "a step": dict(init_from=path(tmp_path / "old", 4)),
             "all of a run": dict(init_from=str(tmp_path / "old"), init_model_only=False)}.get(source, {})
    if source == "Hugging Face":
        save_hf([old], str(tmp_path / "hf"), torch.float32)
        flags, excluded = dict(init_from=str(tmp_path / "hf")), [name for name in excluded if name != "optimizer"]
    drawn, out = [], tmp_path / ("old" if source == "this run" else "new")
    fresh = begun(config(), 5, tmp_path / "other")[0]
    model, checkpoints = begun(config(), 5, out, drawn, exclude_from_loading=excluded, **flags)
    names = tuple(f"{name.removeprefix('model.')}." for name in excluded)
    kept = {fqn for fqn, _ in model.named_parameters() if f"{fqn}.".startswith(names)}
    assert set(drawn) == {fqn for fqn in kept if "norm" not in fqn}
    assert all(p.isnan().all() for fqn, p in model.named_parameters() if "norm" not in fqn and fqn not in kept)
    checkpoints.load()
    for fqn, p in model.named_parameters():
        assert torch.equal(p, (fresh if fqn in kept else old).get_parameter(fqn)), fqn


def test_weights_that_no_file_has_are_drawn(tmp_path):
    """A new run draws all parameters; a run from Hugging Face's files draws multi-token prediction, if missing there."""
    with_mtp = config("deepseek", n_layers=2, mtp_depth=1)
    old = begun(replace(with_mtp, mtp_depth=0), 3, tmp_path / "old")[0]
    save_hf([old], str(tmp_path / "hf"), torch.float32)
    everything, drawn = [], []
    fresh = begun(with_mtp, 5, tmp_path / "other", everything)[0]
    assert set(everything) == {fqn for fqn, p in fresh.named_parameters() if "norm" not in fqn}
    model, checkpoints = begun(with_mtp, 5, tmp_path / "new", drawn, init_from=str(tmp_path / "hf"))
    checkpoints.load()
    assert set(drawn) == {fqn for fqn in everything if fqn.startswith("mtp.")}
    for fqn, p in model.named_parameters():
        assert torch.equal(p, (fresh if fqn.startswith("mtp.") else old).get_parameter(fqn)), fqn
    assert all((b == 0).all() for b in model.buffers())


def test_weights_in_another_dtype_may_start_a_run_but_not_continue_one(tmp_path):
    saved(tmp_path, 2)
    net = Net(1).bfloat16()
    of(net, [torch.optim.AdamW(net.parameters())], tmp_path / "new", init_from=str(tmp_path)).load()
    assert torch.equal(net.last.weight, trained(0, 2)[0].last.weight.bfloat16())


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_tokenizer_that_no_checkpoint_can_hold_is_refused_before_training(tmp_path, book, name):
    first = Path(book[1])
    (first / "chat_template.jinja").write_text("{{ messages }}")
    checkpoints = of(*trained(), tmp_path / "run", tokenizer_file=str(first / "tokenizer.json"))
    with open(first / name, "wb") as sparse:
        sparse.truncate(1 << 30)
    with pytest.raises(ValueError, match=f"{name}.* has 1,073,741,824 bytes, which is absurd"):
        of(*trained(), tmp_path / "other", tokenizer_file=str(first / "tokenizer.json"))
    of(*trained(), tmp_path / "other", tokenizer_file=str(first / "tokenizer.json"), load_only=True)  # never saves
    assert checkpoints.save(1, {})  # later edits change no run
    assert Path(path(tmp_path / "run", 1), "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads(Path(path(tmp_path / "run", 1), "tokenizer.json").read_bytes())["model"]


# --- the code of a run

FORK = """import sys
sys.path.append({repo!r})
from types import SimpleNamespace
import torch
from checkpoint import CheckpointConfig, Checkpoints
from mine import build
from parts.block import WIDTH
net = build(WIDTH)
cfg, out = CheckpointConfig(init_from=sys.argv[2] if len(sys.argv) > 2 else ""), sys.argv[1]
run = Checkpoints(cfg, out, modules=[net], optimizer=torch.optim.AdamW(net.parameters()), config={{}},
                  identity={{"model": {{}}, "data": {{}}, "optimizer": {{}}}}, source=open(__file__).read())
state = run.load() or {{"step": 0}}
open(sys.modules["mine"].__file__, "a").write("# edited while it trains\\n")
run.save(state["step"] + 1, {{"step": state["step"] + 1}})
"""


@pytest.mark.slow
def test_changed_code_is_told_when_a_run_goes_on(tmp_path):
    """A fork in another folder, with a module beside and a module in a folder below; our files are elsewhere."""
    fork, out = tmp_path / "fork", tmp_path / "run"
    (fork / "parts").mkdir(parents=True)
    mine = "import torch\ndef build(width):\n    return torch.nn.Linear(width, width)\n"
    (fork / "train_mine.py").write_text(FORK.format(repo=str(Path(checkpoint.__file__).parent)))
    (fork / "mine.py").write_text(mine)
    (fork / "parts" / "block.py").write_text("WIDTH = 4\n")

    def start(*argv) -> list[str]:
        command = [sys.executable, fork / "train_mine.py", *argv]
        done = run_program(command, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return [line.split(": ", 2)[2] for line in done.stdout.splitlines() if "code that has changed since step" in line]

    assert start(out) == []
    verify(path(out, 1))
    saved = json.loads(Path(path(out, 1), "code.json").read_bytes())
    assert saved["mine.py"] == mine and saved["parts/block.py"] == "WIDTH = 4\n"  # as imported, without later edits
    assert {"train_mine.py", "checkpoint.py", "support/config.py"} <= saved.keys()
    assert not [name for name in saved if ".venv" in name or Path(name).is_absolute()]  # no library's source
    assert saved["train_mine.py"] == Path(path(out, 1), "recipe.py").read_text()

    (fork / "parts" / "block.py").write_text("WIDTH = 2 * 2\n")
    rewrite(path(out, 1), "code.json", json.dumps(saved | {"mine.py": "raise SystemExit(3)", "gone.py": ""}).encode())
    assert start(out) == ["mine.py, parts/block.py"]  # compared as text, and never run
    recipe = fork / "train_mine.py"
    recipe.write_text(recipe.read_text().replace("parts.block", "new_block"))
    (fork / "new_block.py").write_text("WIDTH = 4\n")
    assert start(tmp_path / "other", out) == ["mine.py, new_block.py (new), train_mine.py"]


def test_a_model_whose_file_has_changed_is_told_where_one_samples_from_it(tmp_path, capsys):
    checkpoints = of(Llama3(config()), [], tmp_path)
    checkpoints.save(1, {"step": 1})
    load_model(str(tmp_path))
    assert "code that has changed" not in capsys.readouterr().err
    there = checkpoints.code | {"models/llama3.py": "", "models/gone.py": "", "train_llama3.py": ""}
    rewrite(path(tmp_path, 1), "code.json", json.dumps(there).encode())
    load_model(str(tmp_path))
    said = capsys.readouterr()  # stdout is for sampled text
    assert "code that has changed since step 1 was written: models/llama3.py\n" in said.err and not said.out


def test_checkpoints_without_code_continue(tmp_path, capsys):
    saved(tmp_path, 1)
    about = json.loads(Path(path(tmp_path, 1), "manifest.json").read_bytes())
    Path(path(tmp_path, 1), "code.json").unlink()
    del about["files"]["code.json"]
    about["sha256"] = own_hash(about)
    Path(path(tmp_path, 1), "manifest.json").write_bytes(json_bytes(about))
    assert of(*trained(1, 0), tmp_path).load()["step"] == 1
    assert "code that has changed" not in capsys.readouterr().out


def test_model_only(tmp_path):
    of(*trained(0, 2), tmp_path).save(2, {"step": 2}, last=True, model_only=True)
    for refusal in (lambda: check_run(str(tmp_path), IDENTITY, CheckpointConfig()), of(*trained(1, 0), tmp_path).load):
        with pytest.raises(ValueError, match="holds only the weights .* --init_from"):
            refusal()
    fresh = trained(1, 0)
    of(*fresh, tmp_path / "new", init_from=str(tmp_path)).load()
    assert torch.equal(fresh[0].last.weight, trained(0, 2)[0].last.weight)


def test_load_only_writes_nothing(tmp_path):
    assert of(*trained(), tmp_path / "run", load_only=True).save(1, {}, last=True) is False
    assert not (tmp_path / "run").exists()


def test_no_pickle_is_written_or_read(tmp_path):
    folder = path(saved(tmp_path, 2), 2)
    assert not Path(folder, ".metadata").exists()
    table = json.loads(Path(folder, "tensors.json").read_bytes())
    assert table["tensors"]["model.first.weight"]["shape"] == [24, 24] and table["files"] == ["__0_0.distcp"]


@pytest.mark.parametrize("change, message", [
    (lambda table, shard: table["files"].__setitem__(0, "../../../secret.distcp"), "secret.distcp at .*, which is no part of"),
    (lambda table, shard: shard.__setitem__(2, 10**9), "no part of"),
    (lambda table, shard: shard.__setitem__(1, -1), "no part of"),
    (lambda table, shard: shard.__setitem__(0, -1), "no part of"),
    (lambda table, shard: shard.__setitem__(0, 9), "refused"),
    (lambda table, shard: shard.__setitem__(3, "0"), "refused"),
    (lambda table, shard: shard.pop(), "do not add up"),
    (lambda table, shard: shard.clear(), "refused"),
    (lambda table, shard: table["tensors"]["model.first.weight"].update(shards=[]), "do not add up"),
    (lambda table, shard: table["tensors"]["model.first.weight"].update(dtype="save"), "save is no dtype"),
    (lambda table, shard: table["tensors"]["model.first.weight"].update(dtype="nonsense"), "refused"),
    (lambda table, shard: table.pop("tensors"), "refused"),
    (None, "refused"),
])
def test_an_evil_table_reads_nothing_from_elsewhere(tmp_path, change, message):
    folder = path(saved(tmp_path, 2), 2)
    table = json.loads(Path(folder, "tensors.json").read_bytes())
    if change:
        change(table, table["tensors"]["model.first.weight"]["shards"][0])
    rewrite(folder, "tensors.json", json.dumps(table if change else 3).encode())
    verify(folder)  # the checksums are right, but an attacker can compute checksums
    fresh = trained(1, 0)
    with pytest.raises(ValueError, match=f"tensors.json is refused: .*{message}|{message}"):
        of(*fresh, tmp_path).load()
    assert_same(fresh, trained(1, 0))


def test_a_checkpoint_of_an_older_format_says_so(tmp_path, capsys):
    about = json.loads(Path(path(saved(tmp_path, 2), 2), "manifest.json").read_bytes()) | {"format_version": 1}
    about["sha256"] = own_hash(about)
    Path(path(tmp_path, 2), "manifest.json").write_bytes(json_bytes(about))
    said = "it is of format 1 and this code reads 2; with the code that wrote it"
    with pytest.raises(ValueError, match=f"no undamaged checkpoint among step-2 .step-2: {said}"):
        check_run(str(tmp_path), IDENTITY, CheckpointConfig())
    assert checkpoint_commands.main(["verify", str(tmp_path)]) == 1 and said in capsys.readouterr().out


@pytest.mark.slow
def test_the_table_of_a_large_model_on_1024_ranks_stays_small(tmp_path):
    """DCP's description of Llama 70B with AdamW under FSDP, with 4 of 80 layers: below 100 MB for all 80 (77 MB)."""
    from torch.distributed.checkpoint import metadata

    with torch.device("meta"):
        model = Llama3(replace(LLAMA3["70B"], n_layers=4, vocab_size=128 * 1024))
    ends, written, found = [0] * 1024, [], metadata.Metadata({}, storage_data={})
    parts = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    for key, param in ((f"{part}.{fqn}", param) for part in parts for fqn, param in model.named_parameters()):
        sizes, chunks = torch.Size((param.shape[0] // 1024, *param.shape[1:])), []
        for rank in range(1024):
            offsets = torch.Size((rank * sizes[0], *(0 for _ in sizes[1:])))
            where = SimpleNamespace(relative_path=f"__{rank}_0.distcp", offset=ends[rank], length=4 * math.prod(sizes) + 1500)
            ends[rank] += where.length
            written.append(SimpleNamespace(index=metadata.MetadataIndex(key, offsets), storage_data=where))
            chunks.append(metadata.ChunkStorageMetadata(offsets, sizes))
        kind = metadata.TensorProperties(torch.float32)
        found.state_dict_metadata[key] = metadata.TensorStorageMetadata(kind, param.shape, chunks)
    content = dcp.table_bytes(found, [written])
    assert 3e6 < len(content) and len(content) * 80 / 4 < 100e6
    (tmp_path / "tensors.json").write_bytes(content)
    back = dcp.read_table(str(tmp_path), {f"__{rank}_0.distcp": [end, ""] for rank, end in enumerate(ends)})
    assert back.state_dict_metadata == found.state_dict_metadata
    assert {one.index: vars(one.storage_data) for one in written} == {
        index: dict(relative_path=info.relative_path, offset=info.offset, length=info.length)
        for index, info in back.storage_data.items()}


def test_a_checkpoint_does_not_choose_what_is_imported(tmp_path):
    state = json.loads(Path(path(saved(tmp_path, 2), 2), "state.json").read_text())
    state["identity"]["model"]["module"] = "os.path"
    rewrite(path(tmp_path, 2), "state.json", json_bytes(state))
    for reader in (load_model, lambda folder: grpo.model_of(grpo.Config(init_from=folder), 8)):
        with pytest.raises(ValueError, match="only those in models/ and forks/"):
            reader(str(tmp_path))
    os.remove(os.path.join(path(tmp_path, 2), "state.json"))
    saved(tmp_path, 1)
    assert grpo.model_of(grpo.Config(init_from=str(tmp_path)), 8)[1] == config()  # of step 1
    with pytest.raises(ValueError, match="--model_args n_layers=1: the model is that of --init_from"):
        grpo.model_of(grpo.Config(init_from=str(tmp_path), model_args="n_layers=1"), 8)


def command(*args):
    done = run_program([sys.executable, "checkpoint.py", *args])
    return done.returncode, done.stdout, done.stderr


def test_command_line(tmp_path, capsys):
    saved(tmp_path, 2, 4)
    a, b = path(tmp_path, 2), path(tmp_path, 4)
    assert checkpoint_commands.main(["verify", a]) == 0
    status, out, _ = command("diff", a, b)
    assert status == 1 and "25 of 25 tensors differ, most of all:\n  optimizer." in out and "state.json: step is 2 / 4" in out
    assert checkpoint_commands.main(["diff", a, a]) == 0
    flip(b + "/recipe.py", 3)
    assert command("verify", b)[0] == 1
    status, out, _ = command("ls", tmp_path)
    assert status == 0 and out.count("complete (bytes not read)") == 2
    capsys.readouterr()
    for wrong in ([], ["verify"], ["nonsense", a], ["ls", str(tmp_path / "nowhere")], ["diff", a, b]):
        with pytest.raises(SystemExit, match="2"):
            checkpoint_commands.main(wrong)
        assert capsys.readouterr().err.count("\n") == 1, wrong


def test_verify_reads_every_byte_of_a_run_and_ls_does_not(tmp_path, capsys, monkeypatch):
    saved(tmp_path, 2, 4)

    def command(*argv):
        capsys.readouterr()
        return checkpoint_commands.main([str(arg) for arg in argv]), capsys.readouterr().out

    (tmp_path / "checkpoints" / "step-6.tmp-1234").mkdir()  # of a killed save: no checkpoint
    assert checkpoint_commands.main(["verify", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines[-2:]] == [f"{path(tmp_path, n)} is good" for n in (4, 2)]

    tensors = next(name for name in os.listdir(path(tmp_path, 2)) if name.startswith("__"))
    flip(f"{path(tmp_path, 2)}/{tensors}", 1000)
    status, out = command("ls", tmp_path)
    assert status == 0 and out.count("complete (bytes not read)") == 2
    status, out = command("verify", tmp_path)
    assert status == 1 and "step-4 is good" in out and f"step-2 is DAMAGED: {tensors} has crc32" in out
    assert command("verify", path(tmp_path, 4))[0] == 0 and command("verify", path(tmp_path, 2))[0] == 1

    for name in ("state.json", "config.json", "tensors.json"):  # ls reads manifests, and no more
        flip(f"{path(tmp_path, 4)}/{name}", 100)
    status, out = command("ls", tmp_path)
    assert status == 0 and out.count("complete (bytes not read)") == 2
    assert "1 rank(s), tp 2 " in out and "only the weights" not in out
    os.truncate(f"{path(tmp_path, 4)}/{tensors}", 10)
    Path(path(tmp_path, 2), "manifest.json").unlink()
    assert checkpoint_commands.main(["ls", str(tmp_path)]) == 0 and capsys.readouterr().out.count("DAMAGED") == 2
    for folder in (tmp_path, path(tmp_path, 2), tmp_path / "nowhere", tmp_path / "checkpoints" / "step-6.tmp-1234"):
        assert checkpoint_commands.main(["verify", str(folder)]) == 1, folder
    shutil.rmtree(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").mkdir()
    assert checkpoint_commands.main(["verify", str(tmp_path)]) == 1 and "holds no checkpoint" in capsys.readouterr().out


def test_load_model(tmp_path):
    torch.manual_seed(3)
    model = Llama3(config(tie_embeddings=True))
    optimizer = torch.optim.AdamW(model.parameters())
    identity = {**IDENTITY, "model": {**IDENTITY["model"], "tie_embeddings": True}}
    rest = dict(identity=identity, config={}, source="")
    Checkpoints(CheckpointConfig(), str(tmp_path), modules=[model], optimizer=optimizer, **rest).save(7, {"step": 7})
    tokens = torch.arange(12)[None]
    for folder in (tmp_path, path(tmp_path, 7)):
        loaded, state = load_model(str(folder))
        assert state == {"step": 7} and loaded.config == Llama3Config(**SMALL, tie_embeddings=True)
        assert torch.equal(loaded(tokens), model(tokens))
    assert load_model(str(tmp_path), dtype=torch.bfloat16)[0].norm.weight.dtype == torch.bfloat16


# --- several processes: any layout continues any layout's checkpoint, bit for bit

FOUR = {
    "hsdp": dict(dp_replicate=2, dp_shard=2),
    "tp2": dict(dp_shard=2, tp=2),
    "pp2": dict(dp_shard=2, pp=2),
    "pp2tp2": dict(pp=2, tp=2),
    "cp2": dict(dp_shard=2, cp=2),
    "tp4": dict(tp=4),
    "interleaved": dict(dp_shard=2, pp=2, pp_schedule="Interleaved1F1B", pp_layers_per_stage=1, pp_first_stage_less_layers=0,
                        pp_last_stage_less_layers=0),
}
TWO = {"dp2 of 2": {}, "pp2 of 2": dict(pp=2)}


def run_layout(flags, source, target, options):
    """Loads `source` into this layout, trains, saves to `target`; returns {key: hash} of this rank's tensors."""
    steps, mode = options.get("steps", 0), options.get("mode", "off")
    model_config = config("qwen3", **MOE) if options.get("moe") else config(tie_embeddings=options.get("tie", False))
    stages, layout = build(model_config, flags, n=8, local_batch_size=2)
    optimizer = torch.optim.AdamW([p for s in stages for p in s.parameters()], lr=1e-3, foreach=True)
    rest = dict(modules=stages, optimizer=optimizer, identity=IDENTITY, config=flags, source="")
    if mode == "process":
        multiprocessing.current_process()._config["daemon"] = False  # a daemon may start no process
    step = 0
    if source:
        step = Checkpoints(CheckpointConfig(load_only=True), source, **rest).load()["step"]
    c = Checkpoints(CheckpointConfig(checkpoint_async=mode, keep_latest_k=2), target, **rest)
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
    weigh = lambda t: (t.double() * torch.arange(1, t.numel() + 1).view(t.shape)).sum().item()  # noqa: E731
    return {key: weigh(full(t)) for key, t in c.tensors(True).items()}


def merged(parts):
    """The tensors of all ranks; tensors of several ranks must be the same."""
    whole = {}
    for part in parts:
        for key, value in part.items():
            assert whole.setdefault(key, value) == value, key
    return whole


@pytest.mark.slow
def test_any_layout_continues_any_layout(tmp_path):
    first = before = str(tmp_path / "0")
    hashes = merged(pool(4).run(run_layout, {}, None, first, {"steps": 2}))
    assert len(hashes) == 4 * len(list(Llama3(config()).parameters()))
    chain = [*FOUR.items(), *TWO.items(), ("dp4", {})]  # through all of them, and back to the first
    for i, (name, flags) in enumerate(chain):
        after = str(tmp_path / str(i + 1))
        got = merged(pool(2 if name in TWO else 4).run(run_layout, flags, before, after, {}))
        assert got == hashes and diff(path(first, 2), path(after, 2)) == 0, name
        before = after
    # and a plain process
    model = Llama3(config())
    rest = dict(modules=[model], optimizer=torch.optim.AdamW(model.parameters()), identity=IDENTITY, config={}, source="")
    assert Checkpoints(CheckpointConfig(load_only=True), before, **rest).load() == {"step": 2}
    assert Checkpoints(CheckpointConfig(), str(tmp_path / "one"), **rest).save(2, {"step": 2})
    assert diff(path(first, 2), path(tmp_path / "one", 2)) == 0


@pytest.mark.slow
def test_any_expert_layout_continues_any(tmp_path):
    """Experts, moments and balancing biases through every kind of split, and back to the first layout, to the bit."""
    first = before = str(tmp_path / "0")
    hashes = merged(pool(4).run(run_layout, dict(ep=2), None, first, {"steps": 2, "moe": True}))
    biases = [value for key, value in hashes.items() if key.endswith("balance.bias")]
    assert len(biases) == 4 and all(biases)
    assert sum(".moe.experts.w" in key for key in hashes) == 4 * 3 * 4  # 4 layers, 3 matrices; weight, two moments, step
    for i, (n, flags) in enumerate([
        (2, {}), (4, dict(ep=4)), (4, dict(tp=2, ep=2, etp=2)), (4, dict(tp=2, ep=4)), (4, dict(pp=2, ep=2)), (4, dict(ep=2)),
    ]):
        after = str(tmp_path / str(i + 1))
        got = merged(pool(n).run(run_layout, flags, before, after, {"moe": True}))
        assert got == hashes and diff(path(first, 2), path(after, 2)) == 0, flags
        before = after


@pytest.mark.parametrize("schedule", [pytest.param("1F1B", marks=pytest.mark.slow), "ZBVZeroBubble"])
def test_tied_embeddings_at_both_ends_of_a_pipeline(tmp_path, schedule):
    whole, ends = str(tmp_path / "whole"), str(tmp_path / "ends")
    hashes = merged(pool(2).run(run_layout, {}, None, whole, {"steps": 2, "tie": True}))
    got = merged(pool(2).run(run_layout, dict(pp=2, pp_schedule=schedule), whole, ends, {"tie": True}))
    assert got == hashes and diff(path(whole, 2), path(ends, 2)) == 0


@pytest.mark.parametrize("mode", ["thread", pytest.param("process", marks=pytest.mark.slow)])
@pytest.mark.slow
def test_async_on_several_ranks_while_they_train(tmp_path, mode):
    sync, background = str(tmp_path / "sync"), str(tmp_path / "async")
    for target, how in ((sync, "off"), (background, mode)):
        pool(2).run(run_layout, {"tp": 2}, None, target, {"steps": 3, "mode": how})
    assert diff(path(sync, 3), path(background, 3)) == 0
    assert names(background) == ["step-2", "step-3"]


def save_with_one_failing_rank(out, failing):
    stages, _ = build(config(), {}, n=8, local_batch_size=2)
    optimizer = torch.optim.AdamW(stages[0].parameters())
    c = Checkpoints(CheckpointConfig(), out, modules=stages, optimizer=optimizer, identity=IDENTITY, config={}, source="")
    torch_dcp = dcp.import_dcp()
    original = torch_dcp.FileSystemWriter.write_data

    def full_disk(*args):
        raise OSError(28, "No space left on device")

    try:
        if c.rank == failing:
            torch_dcp.FileSystemWriter.write_data = full_disk
        first = c.save(1, {})
    finally:
        torch_dcp.FileSystemWriter.write_data = original
    return first, c.save(2, {}), step_folders(out)


def test_one_rank_fails_and_all_agree(tmp_path):
    for first, second, folders in pool(2).run(save_with_one_failing_rank, str(tmp_path), 1):
        assert (first, second, [n for n, _ in folders]) == (False, True, [2])
    assert names(tmp_path) == ["step-2"]


def load_error(out):
    stages, _ = build(config(), {}, n=8, local_batch_size=2)
    optimizer = torch.optim.AdamW(stages[0].parameters())
    c = Checkpoints(CheckpointConfig(), out, modules=stages, optimizer=optimizer, identity=IDENTITY, config={}, source="")
    try:
        return c.load()
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
    assert one == two and "no undamaged checkpoint" in one


def test_a_note_in_a_step_folder_is_named_and_costs_nothing(tmp_path, capsys):
    """But a file of a known kind is damage: an added chat template would be used."""
    saved(tmp_path, 2, 4)
    for name in ("notes.txt", ".nfs0000000012"):
        Path(path(tmp_path, 4), name).write_text("good run")
    assert of(*trained(), tmp_path).load()["step"] == 4
    assert "step-4 has files that are not its own, and nobody reads: .nfs0000000012, notes.txt" in capsys.readouterr().out
    Path(path(tmp_path, 4), "chat_template.jinja").write_text("x")
    assert of(*trained(), tmp_path).load()["step"] == 2
    assert "DAMAGED: chat_template.jinja is not in manifest.json" in capsys.readouterr().out


@pytest.mark.parametrize("change, words", [
    (lambda state: state["state"].update(step=float("nan")), "is no place in a run"),
    (lambda state: state["state"].update(samples=-5), "is no place in a run"),
    (lambda state: state.update(state=[1]), "is no place in a run"),
])
def test_a_state_that_is_no_place_in_a_run(tmp_path, change, words):
    saved(tmp_path, 2)
    folder = Path(path(tmp_path, 2))
    state = json.loads((folder / "state.json").read_text())
    change(state)
    (folder / "state.json").write_text(json.dumps(state))
    with pytest.raises(ValueError, match=words):
        saved_state(str(folder))


@pytest.mark.parametrize("model, words", [
    ({"class": "Nothing"}, "does not describe a model"), ({"n_layers": 10**7}, "n_layers 10000000 is absurd"),
    ({"n_layers": "x"}, "does not describe a model"), ({"more": 1}, "does not describe a model"), (None, "names no model"),
])
def test_a_state_that_describes_no_model(tmp_path, model, words):
    known = {"module": "models.llama3", "class": "Llama3"}
    (tmp_path / "state.json").write_text(json.dumps({"identity": {"model": model and known | model}}))
    with pytest.raises(ValueError, match=words) as error:
        saved_model(str(tmp_path))
    assert "\n" not in str(error.value)
