"""forks/train_llama3_ft.py: replica groups equal one layout, survive kill -9, and come back with
the weights of the others.

    pip install torchft
    pytest -m "" tests/forks/test_ft.py                # two kills
    KILLS=10 pytest -s -m "" tests/forks/test_ft.py -k killed
"""

import importlib
import importlib.util
import json
import os
import random
import shutil
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from programs import hold_port, port_of
from runs import REPO, Job, column, launch, run, train_lines
from saves import refuses

from data import Batch
from flags.files import step_folders
from forks import ft
from storage.commands import diff
from training.metrics import read_lines

recipe = importlib.import_module("forks.train_llama3_ft")
needs_torchft = pytest.mark.skipif(
    importlib.util.find_spec("torchft") is None, reason="torchft is not installed"
)
MODEL = "n_layers=2,dim=16,n_heads=2,n_kv_heads=1,head_dim=8,ffn_dim=32,vocab_size=4096"
# A small learning rate: at 1e-3 this model has steps with a gradient norm of 17, where rounding
# differences grow a thousandfold
FLAGS = [
    "--compute_dtype",
    "float32",
    "--model_args",
    MODEL,
    "--local_batch_size",
    2,
    "--seq_len",
    32,
    "--lr",
    1e-4,
    "--steps",
    20000,
    "--schedule_steps",
    1000,
    "--log_every",
    1,
    "--val_every",
    0,
]
TIMEOUT = 20  # --ft_timeout_s
# train_llama3.py in one process, with as many sequences in each step as a list says
REFERENCE = """
import json, sys
import train_llama3
from data import TokenData
from tools.run import run
from flags.config import parse_config
sizes, one = json.loads(sys.argv.pop(1)), TokenData.batches
def batches(self, cursor, size, *rest):
    for size in sizes:
        reader = one(self, cursor, size, *rest)
        yield next(reader)
        reader.close()
        cursor += size
TokenData.batches = batches
run(train_llama3.main, train_llama3.Config)
"""


# ---------------------------------------------------------------- without torchft
def test_what_is_missing_is_said_in_one_line(monkeypatch):
    cfg = recipe.Config(ft_lighthouse="http://127.0.0.1:1")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    refuses("pip install torchft", ft.check_groups, cfg)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    refuses("no lighthouse at .*:1 .* start one: torchft_lighthouse", ft.check_groups, cfg)
    refuses(
        "use --optimizer adamw, not adamw_sr",
        ft.check_groups,
        recipe.Config(optimizer="adamw_sr", param_dtype="bfloat16"),
    )


class Numbers:
    """Data whose sequences are their own numbers."""

    def batches(self, cursor, size, local, rank, ranks, device):
        while True:
            share = size // ranks
            yield list(range(cursor + rank * share, cursor + (rank + 1) * share))
            cursor += size


def groups_at(samples: int, place: int, n: int, data_rank: int) -> ft.ReplicaGroups:
    """A rank of a group of two data ranks with two sequences each, which knows of nobody."""
    groups = object.__new__(ft.ReplicaGroups)
    layout = SimpleNamespace(
        global_batch_size=4, local_batch_size=2, data_rank=data_rank, data_ranks=2, device="cpu"
    )
    vars(groups).update(
        layout=layout, state={"samples": samples}, place=place, n=n, reader=None, next=None
    )
    return groups


def test_the_batch_follows_from_the_cursor_and_the_live_groups():
    every = [groups_at(100, place, 3, rank) for place in range(3) for rank in range(2)]
    assert sum((next(groups.batches(Numbers())) for groups in every), []) == list(range(100, 112))
    groups = every[3]  # of the second group
    groups.state["samples"] = 112
    assert next(groups.batches(Numbers())) == [118, 119]
    # the step is done again: nothing is left out
    assert next(groups.batches(Numbers())) == [118, 119]
    # both others have died
    groups.place = 0
    groups.n = 1
    assert next(groups.batches(Numbers())) == [114, 115]


def test_gradients_are_weighted_by_tokens():
    """Two groups, of 6 and 2 tokens with a loss: their gradients count 3/4 and 1/4. A death in a
    sum is told."""
    dead = []
    pg = SimpleNamespace(abort=lambda: None)
    manager = SimpleNamespace(errored=lambda: bool(dead), should_commit=lambda: not dead, _pg=pg)
    groups = object.__new__(ft.ReplicaGroups)
    layout = SimpleNamespace(world_size=1, data_ranks=1, rank=0)
    vars(groups).update(
        manager=manager, layout=layout, n=2, flags={}, state={"step": 0}, has_stepped=False
    )
    stage = torch.nn.Linear(2, 2, bias=False)
    labels = torch.tensor([[1] * 6 + [ft.IGNORE] * 2])
    batch = Batch(labels, labels, labels, None, 4, f"{2**48 - 1:012x}")
    others = iter([torch.tensor([2, 3, ft.zlib.crc32(b"{}")]), torch.full((5,), 0.25 * 8)])
    groups.sum = lambda tensor: tensor + next(others)
    stage.weight.grad, loss = torch.full((2, 2), 4.0), torch.tensor([2.0, 5.0])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ft.dist, "all_reduce", lambda tensor: None)
        assert groups.sum_gradients([stage], loss, batch)
        assert torch.equal(stage.weight.grad, torch.full((2, 2), 0.75 * 4 + 0.25 * 8))
        assert loss.tolist() == [0.75 * 2 + 0.25 * 8, 5.0]
        assert batch.hash == f"{2:012x}"
        others = iter([torch.tensor([2, 3, 0])])
        groups.has_stepped = False
        refuses("other flags", groups.sum_gradients, [stage], loss, batch)
        dead.append(True)
        others = iter([torch.zeros(3, dtype=torch.int64), torch.zeros(5)])
        assert not groups.sum_gradients([stage], loss, batch)


# ---------------------------------------------------------------- with it
class World:
    """A lighthouse and the groups that use it, each a torchrun of two processes."""

    def __init__(self, folder: Path, min_replicas: int = 1, flags=()):
        self.folder = folder
        self.jobs = {}
        self.starts = 0
        self.holder = hold_port()
        port = port_of(self.holder)
        self.flags = [
            *FLAGS,
            *flags,
            "--dp_shard",
            2,
            "--ft_lighthouse",
            f"http://127.0.0.1:{port}",
            "--ft_timeout_s",
            TIMEOUT,
            "--out",
            folder / "run",
        ]
        lighthouse = [
            Path(sys.executable).parent / "torchft_lighthouse",
            "--bind",
            f"[::]:{port}",
            "--min_replicas",
            min_replicas,
            "--heartbeat_timeout_ms",
            1000,
        ]
        self.lighthouse = Job(lighthouse, folder, folder / "lighthouse.log")
        while ft.cannot_reach(f"http://127.0.0.1:{port}"):
            time.sleep(0.1)

    def start(self, group: int) -> Job:
        self.starts += 1
        command = launch(2, REPO / "forks/train_llama3_ft.py", "--ft_group", group, *self.flags)
        job = Job(
            command, self.folder / f"run/group-{group}", self.folder / f"log-{group}-{self.starts}"
        )
        self.jobs[group] = job
        return job

    def close(self):
        for job in [*self.jobs.values(), self.lighthouse]:
            job.kill_everything()
        self.holder.close()


@needs_torchft
@pytest.mark.slow
def test_two_groups_equal_one_layout(tmp_path):
    with closing(
        World(tmp_path, min_replicas=2, flags=["--checkpoint_every", 0, "--steps", 20])
    ) as w:
        for job in [w.start(0), w.start(1)]:
            assert job.end() == 0, job.text()
    layout = [
        "--dp_replicate",
        2,
        "--dp_shard",
        2,
        "--checkpoint_every",
        0,
        "--out",
        tmp_path / "one",
    ]
    run(launch(4, REPO / "train_llama3.py", *FLAGS, "--steps", 20, *layout), cwd=tmp_path)
    one = train_lines(tmp_path / "one")
    two = [train_lines(tmp_path / f"run/group-{i}") for i in range(2)]
    assert len(one) == 20 == len(two[0])
    for expected, *found in zip(one, *two, strict=True):
        for line in found:
            assert [line[key] for key in ("step", "tokens", "tokens_hash")] == [
                expected[key] for key in ("step", "tokens", "tokens_hash")
            ]
            assert line["groups"] == 2
            assert line["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert line["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)


@needs_torchft
@pytest.mark.slow
def test_the_death_of_the_lighthouse_is_one_line(tmp_path):
    with closing(World(tmp_path, flags=["--checkpoint_every", 0])) as w:
        job = w.start(0)
        job.until_step(3)
        w.lighthouse.kill_everything()
        assert job.end() != 0
        lines = []
        for line in job.text().splitlines():
            if "lighthouse" in line and not line.startswith("flags:"):
                lines.append(line)
        assert len(lines) == 1
        assert " is gone, after step " in lines[0]
        assert "start it again (torchft_lighthouse" in lines[0]


def steps_saved(job: Job) -> set[int]:
    return {step for step, _ in step_folders(str(job.out))}


def longest_pause(job: Job, done, timeout=180) -> float:
    """Seconds that a job took at most between two lines of its log, until done()."""
    path = job.out / "metrics.jsonl"
    begin = time.monotonic()
    written = path.stat().st_mtime_ns
    longest = 0.0
    while not done():
        assert job.launcher.poll() is None, job.text()[-3000:]
        assert time.monotonic() < begin + timeout, job.text()[-3000:]
        time.sleep(0.02)
        now = path.stat().st_mtime_ns
        longest = max(longest, (now - written) / 1e9)
        written = now
    return max(longest, time.time() - written / 1e9)


def kill_one(w: World, chance: random.Random, from_nothing: bool) -> tuple[int, int, float, float]:
    """kill -9 of a whole group at a random moment. It is started again when the other has done five
    steps alone, and waited for until both have saved the same three steps. (step, group, longest
    pause of the other when alone, and when it came back)"""
    dead, alive = chance.sample([0, 1], 2)
    time.sleep(chance.uniform(0, 1))
    survivor, at = w.jobs[alive], w.jobs[dead].last_step()
    w.jobs[dead].kill_everything()
    if from_nothing:  # not from a checkpoint of its own
        shutil.rmtree(w.jobs[dead].out / "checkpoints")
    alone = longest_pause(survivor, lambda: survivor.last_step() > at + 5)
    back = w.start(dead)
    came = longest_pause(
        survivor,
        lambda: sum(step > at + 5 for step in steps_saved(back) & steps_saved(survivor)) >= 3,
    )
    # weights and moments, bit by bit
    for step in {step for step in steps_saved(back) & steps_saved(survivor) if step > at}:
        assert diff(*(str(job.out / f"checkpoints/step-{step}") for job in (back, survivor))) == 0
    return at, dead, alone, came


@needs_torchft
@pytest.mark.slow
def test_killed_groups_come_back(tmp_path):
    chance = random.Random(0)
    kills = int(os.environ.get("KILLS", 2))
    pauses = []
    with closing(World(tmp_path, flags=["--checkpoint_every", 10, "--keep_latest_k", 0])) as w:
        for group in range(2):
            w.start(group)
        w.jobs[0].until(lambda: steps_saved(w.jobs[0]) & steps_saved(w.jobs[1]))
        for kill in range(kills):
            pauses.append(kill_one(w, chance, from_nothing=kill % 2 == 1))
            step, group, alone, came = pauses[-1]
            print(
                f"kill {kill + 1}, group {group} at step {step}: the other paused {alone:.1f} s, "
                f"{came:.1f} s at its return"
            )
        for job in w.jobs.values():
            os.kill(job.launcher.pid, 15)
        for job in w.jobs.values():
            job.end()
        redone = sum(
            text.read_text().count("the step is done again") for text in tmp_path.glob("log-*")
        )
    assert max(max(alone, came) for *_, alone, came in pauses) < TIMEOUT

    # losses: each step is in at least one log, and equals a run on one process with as many
    # sequences
    logs = []
    for job in w.jobs.values():
        logs.append({line["step"]: line for line in read_lines(str(job.out / "metrics.jsonl"))})
    keys = ("loss", "grad_norm", "tokens", "tokens_hash", "groups")
    for step in logs[0].keys() & logs[1].keys():
        assert [logs[0][step][key] for key in keys] == [logs[1][step][key] for key in keys], step
    merged = logs[0] | logs[1]
    last = next(step for step in range(1, 10**6) if step + 1 not in merged)
    sizes = [4 * merged[step]["groups"] for step in range(1, last + 1)]
    reference = tmp_path / "reference"
    run(
        [
            sys.executable,
            "-c",
            REFERENCE,
            json.dumps(sizes),
            *map(str, FLAGS),
            "--steps",
            str(last),
            "--checkpoint_every",
            "0",
            "--global_batch_size",
            "4",
            "--out",
            str(reference),
        ]
    )
    expected = train_lines(reference)
    far = [abs(line["loss"] / merged[line["step"]]["loss"] - 1) for line in expected]
    print(
        f"{len(pauses)} kills in {last} steps, {redone} done again by a survivor, "
        f"{sizes.count(4)} steps by one group; "
        f"{len(logs[0].keys() & logs[1].keys())} are in both logs; losses differ from one process "
        f"by up to {max(far):.1e}"
    )
    assert column(expected, "tokens_hash") == [
        merged[line["step"]]["tokens_hash"] for line in expected
    ]
    assert sizes.count(4)
    assert max(far) < 1e-5
    assert redone <= 2 * kills


def test_a_group_that_comes_back_when_the_run_is_finished(tmp_path, capsys):
    """It does not train the whole run again, alone, beside the others' checkpoints."""
    cfg = recipe.Config(out=str(tmp_path), ft_group=1, steps=50)
    for step in (20, 40):
        (tmp_path / "group-0" / "checkpoints" / f"step-{step}").mkdir(parents=True)
    ft.look_beside(cfg)
    out = capsys.readouterr().out
    assert "group 0 has done step 40" in out
    assert "this group has step 0: if no group is alive" in out
    (tmp_path / "group-1" / "checkpoints" / "step-45").mkdir(parents=True)
    ft.look_beside(cfg)
    assert capsys.readouterr().out == ""
    (tmp_path / "group-0" / "checkpoints" / "step-50").mkdir()
    with pytest.raises(SystemExit) as end:
        ft.check_groups(cfg)
    assert end.value.code == 0
    assert "step-50); the run is finished, and nothing is trained" in capsys.readouterr().out
    ft.look_beside(replace(cfg, steps=60))
    assert "this group has step 45" in capsys.readouterr().out
