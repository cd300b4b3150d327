"""A run goes on after whatever ends its processes, against distributed/launch.py: kill -9, signals,
NaN, hangs, lost nodes.

The recipe and torchrun run in forks of one process, see programs.py, and a few times as a user
would start them (real=True). They are disturbed from outside while they train. What must come out
is what an undisturbed run gives: the same metrics.jsonl and the same tensors, to the bit where the
number of processes is the same.

    CHAOS_KILLS=20 python -m pytest tests/distributed/test_launch.py -m slow -k chaos     # make chaos
"""

import itertools
import os
import platform
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import runs
import torch
import torch.distributed as dist
from pool import forkserver
from programs import REPO, hold_port, port_of
from runs import Job, column, fork, having
from torch.distributed.run import get_args_parser

import train_llama3
from data import DataConfig, open_data
from distributed.agree import fail_together, new_gloo_group, on_rank_0, scatter
from distributed.launch import allow_many_ranks, connect, disconnect, usable_cores
from distributed.launcher import agree_on_attempt
from distributed.layout import Layout
from flags.config import parse_config
from flags.files import step_folders
from parallel import make_mesh
from storage.commands import diff
from storage.manifest import STEP_FOLDER, verify
from storage.writer import LEFTOVER
from training.metrics import read_lines

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="finds processes in /proc"
)

RECIPE = REPO / "train_llama3.py"
STEPS = 24
MODEL = "n_layers=2,dim=32,n_heads=4,n_kv_heads=4,head_dim=8,ffn_dim=64"
FLAGS = [
    "--model_args",
    MODEL,
    "--seq_len",
    32,
    "--local_batch_size",
    1,
    "--steps",
    STEPS,
    "--val_every",
    0,
    "--log_every",
    1,
    "--checkpoint_every",
    2,
    "--device",
    "cpu",
    "--compute_dtype",
    "float32",
]
ENDLESS = ["--steps", 1_000_000]
SAME = ("step", "loss", "loss_max", "grad_norm", "lr", "tokens", "tokens_hash")


DATA = []  # --data and --cache_dir: a small text, tokenized once


@pytest.fixture(scope="module", autouse=True)
def text(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=rng.randint(2, 8))) for _ in range(200)]
    (folder / "a.txt").write_text(
        "\n\n".join(" ".join(rng.choices(words, k=60)) for _ in range(300))
    )
    DATA[:] = ["--data", folder / "a.txt", "--cache_dir", folder / "cache"]
    open_data(DataConfig(data=str(folder / "a.txt"), cache_dir=str(folder / "cache")), 32)


def launch(processes, torchrun, script, out, *flags) -> list:
    if processes > 1 or torchrun:
        launcher = ["-m", "torch.distributed.run", "--nproc_per_node", processes, *torchrun]
    else:
        launcher = []
    return [sys.executable, *launcher, script, *FLAGS, *DATA, "--out", out, *flags]


@pytest.fixture
def start(tmp_path):
    """start(out, processes, flag, ...) -> Job; what is left of them is killed when the test ends."""
    jobs = []

    def job(command, out, **env):
        jobs.append(Job(command, out, tmp_path / f"log {len(jobs)}", **env))
        return jobs[-1]

    def start(out, processes, *flags, script=RECIPE, torchrun=(), **env):
        return job(launch(processes, torchrun, script, out, *flags), out, **env)

    start.job = job  # for other commands
    yield start
    for job in jobs:
        job.kill_everything()


def finish(out, processes, *flags, script=RECIPE, status=0) -> str:
    """All that a run prints that nobody disturbs, and that must end with this status."""
    command = runs.launch(processes, script, *FLAGS, *DATA, "--out", out, *flags)
    env = runs.ENV | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPO)}
    done = runs.ended(command, out.parent, status=status, env=env)
    return done.stdout + done.stderr


def whole_run(folder, processes, *flags) -> Path:
    """The folder of a run that nobody disturbs."""
    finish(folder / "whole", processes, *flags)
    return folder / "whole"


@pytest.fixture(scope="module")
def undisturbed(text, tmp_path_factory) -> Path:
    return whole_run(tmp_path_factory.mktemp("undisturbed"), 2)


def assert_same_run(out, other, tolerance=None):
    """Every step once and with the same numbers, no debris, and the same tensors at the end.

    tolerance: of the loss, where another number of processes adds in another order, and only the
    data is the same."""
    ours, theirs = (
        [{key: line[key] for key in SAME} for line in read_lines(f"{run}/metrics.jsonl")]
        for run in (out, other)
    )
    assert column(ours, "step") == list(range(1, len(theirs) + 1))
    if tolerance is None:
        assert ours == theirs
        (step, path), (other_step, other_path) = (
            step_folders(str(out))[0],
            step_folders(str(other))[0],
        )
        assert step == other_step == len(ours)
        assert diff(path, other_path) == 0
    for a, b in zip(ours, theirs):
        for key in ("tokens_hash", "tokens", "lr"):
            assert a[key] == b[key]
        assert abs(a["loss"] - b["loss"]) <= (tolerance or 0)
    assert all_good(out) == len(ours)
    assert [
        name for name in os.listdir(f"{out}/checkpoints") if not STEP_FOLDER.fullmatch(name)
    ] == []


def all_good(out) -> int:
    """The newest step (0: none). Every checkpoint must be as it was written; what is none, the next
    start will clean up."""
    if os.path.isdir(f"{out}/checkpoints"):
        names = os.listdir(f"{out}/checkpoints")
    else:
        names = []
    assert [
        name for name in names if not STEP_FOLDER.fullmatch(name) and not LEFTOVER.fullmatch(name)
    ] == []
    return max([verify(path)["step"] for _, path in step_folders(str(out))], default=0)


def closed(out, step) -> Path:
    """While this file exists, a run of `gated` waits in this step."""
    return Path(f"{out}.closed at step {step}")


def reached(out, step, rank) -> Path:
    """Written by a rank of `gated` that has come to a closed step."""
    return Path(f"{out}.rank {rank} at step {step}")


def gated(folder) -> Path:
    """The recipe, which waits in a step for as long as the test keeps it closed: a run is never over
    before the test has done its part, however fast or slow the machine is."""
    return fork(
        folder,
        """
        import os, time
        while os.path.exists(f"{cfg.out}.closed at step {step}"):
            open(f"{cfg.out}.rank {layout.rank} at step {step}", "w").close()
            time.sleep(0.02)
    """,
    )


def until_both_wait(job: Job, step):
    """Until ranks 0 and 1 have come to a closed step."""
    for rank in (0, 1):
        job.until(reached(job.out, step, rank).exists)


# ---------------------------------------------------------------- processes that die


@pytest.mark.slow
@pytest.mark.parametrize(
    "real, rank, number, flags, torchrun",
    [
        (True, 1, signal.SIGKILL, [], []),
        (False, 0, signal.SIGKILL, [], []),
        # the others wait for --train_timeout_s, torchrun for --shutdown-timeout; then all is as if it
        # had died
        pytest.param(
            False,
            1,
            signal.SIGSTOP,
            ["--train_timeout_s", 15],  # a step of a busy machine takes seconds
            ["--shutdown-timeout", 2],
            id="a_rank_that_hangs",
        ),
    ],
)
def test_a_rank_that_dies(tmp_path, start, undisturbed, real, rank, number, flags, torchrun):
    """torchrun --max_restarts goes on by itself."""
    out = tmp_path / "run"
    closed(out, 10).touch()
    restarts = ["--max_restarts", 1, *torchrun]
    job = start(out, 2, *flags, script=gated(tmp_path), torchrun=restarts, real=real)
    until_both_wait(job, 10)
    os.kill(job.worker(rank), number)
    closed(out, 10).unlink()
    assert job.end() == 0
    assert_same_run(job.out, undisturbed)
    # one death, one restart: none is wasted on addresses of the dead
    assert job.text().count("continuing from") == 1
    name = f"rank {rank} ({socket.gethostname()})"
    assert (f"; no word from {name}\n" in job.text()) == bool(flags)
    assert (f"error: {name} has died without a word" in job.text()) == (not flags)


@pytest.mark.slow
def test_a_slow_rank_is_named(tmp_path, start):
    """Every step takes both ranks as long, and rank 1 waits for its data: four seconds, which are
    more than a fifth of a step on a busy machine, too."""
    script = fork(tmp_path, "")
    slow = "import time\n    batches = (time.sleep(4 * layout.rank) or batch for batch in batches)\n    for step in"
    script.write_text(script.read_text().replace("for step in", slow, 1))
    assert start(tmp_path / "run", 2, "--steps", 4, script=script).end() == 0
    # not in a slow first step
    late = having(read_lines(f"{tmp_path}/run/metrics.jsonl"), "slowest_rank")
    assert len(late) >= 2
    assert {(line["slowest_rank"], line["slowest_host"]) for line in late} == {
        (1, socket.gethostname())
    }
    for line in late:
        assert 0.5 < line["slowest_by_s"] < line["step_time_s"]


@pytest.mark.slow
def test_kill_9_of_the_launcher(tmp_path, start, undisturbed):
    """Its workers end, so the same command can be given again at once."""
    out = tmp_path / "run"
    closed(out, 10).touch()
    script = gated(tmp_path)
    first = start(out, 2, script=script)
    until_both_wait(first, 10)
    first.launcher.kill()
    second = start(out, 2, script=script)
    first.end()
    closed(out, 10).unlink()
    assert second.end() == 0
    assert_same_run(second.out, undisturbed)


@pytest.mark.slow
def test_kill_9_of_the_launcher_while_it_starts(tmp_path, start):
    """Its workers notice, even if they were still importing torch when it died."""
    job = start(tmp_path / "run", 2, *ENDLESS, real=True)
    job.until(lambda: job.worker(0) and job.worker(1))
    job.launcher.kill()
    job.end()  # how long the import takes is the machine's


@pytest.mark.slow
def test_a_run_that_always_fails_at_the_same_step_ends(tmp_path, start):
    """--on_nan stop, the default, when one rank has no finite gradient: torchrun's restarts do not
    help, and it gives up."""
    script = fork(
        tmp_path,
        """
        if step == 5 and layout.rank == 1:
            next(stages[0].parameters()).grad.mul_(float("nan"))
    """,
    )
    job = start(tmp_path / "run", 2, script=script, torchrun=["--max_restarts", 1])
    assert job.end() == 1
    assert job.text().count("continuing from") == 1
    said = (
        "step 5: gradient norm nan, weights unchanged by it, noticed after step 5; last checkpoint:"
    )
    assert f"{said} {job.out}/checkpoints/step-4" in job.text()
    assert all_good(job.out) == 4
    assert sorted(os.listdir(job.out / "checkpoints")) == [
        "step-2",
        "step-4",
    ]


@pytest.mark.slow
def test_chaos(tmp_path, start):
    """kill -9 of everything at random moments, and the same command again until the run is done."""
    kills = int(os.environ.get("CHAOS_KILLS", 5))
    rng = random.Random(0)
    saved = 0
    # the last step in metrics.jsonl: lines that the next start will drop are no sign of its life
    newest = 0
    last = 40 + 20 * kills
    steps = ["--steps", last]
    script = gated(tmp_path)
    closed(tmp_path / "run", last).touch()  # a run is not over before its kill
    for kill in range(kills):
        # the ways to write take turns; what they write is the same
        job = start(
            tmp_path / "run",
            2,
            *steps,
            "--checkpoint_async",
            ("off", "thread", "process")[kill % 3],
            script=script,
        )
        if rng.random() < 0.25:
            wait = rng.uniform(0, 5)  # while it starts, or whatever it does then
        else:
            job.until_step(min(newest + rng.randint(1, 10), last - 1))
            wait = rng.uniform(0, 0.05)
        moment = time.monotonic() + wait
        job.until(lambda moment=moment: time.monotonic() > moment)
        job.kill_everything()
        continued = re.findall(r"continuing from .*/step-(\d+) ", job.text())
        before = saved
        saved = all_good(job.out)
        newest = max(newest, job.last_step())
        print(f"kill {kill + 1} at step {newest}: the newest checkpoint is that of step {saved}")
        assert saved >= before
        assert continued in ([], [str(before)])
    closed(tmp_path / "run", last).unlink()
    job = start(tmp_path / "run", 2, *steps, script=script)
    assert job.end() == 0
    assert f"/step-{saved} (written by 2 rank(s))" in job.text()
    assert_same_run(job.out, whole_run(tmp_path, 2, *steps))


PATIENT = """
import types
import train_llama3
from storage import resume

waits = []
resume.time = types.SimpleNamespace(sleep=waits.append, monotonic=resume.time.monotonic)
try:
    train_llama3.run(train_llama3.main, train_llama3.Config)
finally:
    print(f"waited {sum(waits):.0f} s in all", flush=True)
"""


@pytest.mark.slow
def test_a_second_start_in_the_same_folder(tmp_path, start):
    first = start(tmp_path / "run", 1, *ENDLESS, "--checkpoint_every", 0)
    first.until_step(1)
    first.launcher.send_signal(signal.SIGSTOP)  # it would take a core
    patient = tmp_path / "patient.py"  # the recipe, for which 30 seconds are over at once
    patient.write_text(PATIENT)
    second = start(tmp_path / "run", 1, script=patient)
    assert second.end() == 2
    assert "waited 30 s in all" in second.text()
    assert (
        f"error: {second.out} is in use by process {first.worker(0) or first.launcher.pid} on "
        in second.text()
    )
    assert first.launcher.poll() is None
    assert not (second.out / "checkpoints").exists()


def test_each_attempt_has_a_name_of_its_own():
    """The ranks of one attempt agree on it, whatever earlier ones left in the store that torchrun
    keeps."""
    store = dist.HashStore()

    def attempt(world_size):
        layouts = [SimpleNamespace(rank=rank, world_size=world_size) for rank in range(world_size)]
        with ThreadPoolExecutor(world_size) as threads:
            (name,) = set(threads.map(lambda layout: agree_on_attempt(store, layout, 30), layouts))
        return name

    names = [attempt(world_size) for world_size in (3, 3, 1, 4)]
    store.set("rank 1", "of a process that died before it was answered")
    assert len({*names, attempt(3)}) == 5


# ---------------------------------------------------------------- numbers that are not finite


def test_on_nan_stop(tmp_path):
    """Status 1 before the next save, and the last line names the step and the last good checkpoint."""
    script = fork(
        tmp_path,
        """
        if step == 5:
            next(stages[0].parameters()).grad.mul_(float("inf"))
    """,
    )
    out = tmp_path / "run"
    text = finish(out, 1, "--log_every", 0, script=script, status=1)
    good = f"{out}/checkpoints/step-4"
    last_line = text.splitlines()[-1]
    said = "weights unchanged by it, noticed after step 6; last checkpoint:"
    assert re.fullmatch(f"error on rank 0: RuntimeError: step 5: .*, {said} {good}", last_line)
    assert all_good(out) == 4


@pytest.mark.slow
def test_on_nan_skip(tmp_path):
    """One rank's gradient is not finite: all ranks skip the step, and go on with the next batch."""
    script = fork(
        tmp_path,
        """
        if step == 5 and layout.rank == 1:
            stages[0].blocks["1"].attn.wo.weight.grad.mul_(float("nan"))
    """,
    )
    out = tmp_path / "run"
    text = finish(out, 2, "--on_nan", "skip", "--steps", 7, "--checkpoint_every", 1, script=script)
    assert text.count("step 5: the gradient norm is nan; step skipped") == 1
    lines = list(read_lines(f"{out}/metrics.jsonl"))
    assert [line["step"] for line in lines if line["grad_norm"] is None] == [5]
    assert len(lines) == 7
    assert len(set(column(lines, "tokens_hash"))) == 7
    assert lines[-1]["tokens"] == 7 * 64
    steps = [path for _, path in reversed(step_folders(str(out)))]
    differ = [diff(a, b) for a, b in itertools.pairwise(steps)]
    assert differ == [1, 1, 1, 0, 1, 1]  # step-4 and step-5 hold the same weights and moments


# ---------------------------------------------------------------- signals


SLURM = ["--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1", "--max_restarts", 3]


@pytest.mark.parametrize(
    "processes, torchrun, rank, signals, status, said",
    [
        (
            1,
            [],
            None,
            [signal.SIGINT] * 2,
            75,
            "SIGINT",
        ),  # one Ctrl-C that a launcher delivers twice
        # torchrun's status after any signal
        pytest.param(2, [], None, [signal.SIGINT], 1, "SIGINT", marks=pytest.mark.slow),
        # all agree on the step
        pytest.param(
            2, [], 1, [signal.SIGTERM], 1, "a signal to another rank", marks=pytest.mark.slow
        ),
        # what Slurm sends before a job's time is over
        pytest.param(2, SLURM, None, [signal.SIGUSR1], 1, "SIGUSR1", marks=pytest.mark.slow),
    ],
)
def test_a_signal_finishes_the_step_and_saves(
    tmp_path, start, processes, torchrun, rank, signals, status, said
):
    """rank: the process that gets the signals; None: the launcher."""
    real = torchrun == SLURM
    flags = [*ENDLESS, "--checkpoint_every", 1_000_000, "--val_every", 1, "--val_batches", 1]
    job = start(tmp_path / "run", processes, *flags, torchrun=torchrun, real=real)
    job.until_step(3)
    for number in signals:
        os.kill(job.launcher.pid if rank is None else job.worker(rank), number)
    assert job.end() == status
    assert f"{said}: stopped after step {job.last_step()}" in job.text()
    if rank is None:  # rank 0 has answered at once
        assert job.text().count(f"{said}: the run ends after ") == 1
    assert (
        os.listdir(job.out / "checkpoints")
        == [f"step-{all_good(job.out)}"]
        == [f"step-{job.last_step()}"]
    )


@pytest.mark.parametrize(
    "before, saving", [("stopping = stop", 2), ("if validating:", 2), ("if validating:", 1000)]
)
def test_a_signal_in_a_step_a_save_or_a_validation(tmp_path, start, before, saving):
    """No other step is trained, and none is saved twice. After a signal in a step there may be little
    time, so the save comes before the validation."""
    script = fork(tmp_path, "")
    come = f"        if step == 4:\n            os.kill(os.getpid(), 2)\n        {before}"
    script.write_text(script.read_text().replace(f"        {before}", come, 1))
    flags = ["--checkpoint_every", saving, "--val_every", 2, "--val_batches", 1]
    job = start(tmp_path / "run", 1, *flags, script=script)
    assert job.end() == 75, job.text()
    assert "SIGINT: stopped after step 4" in job.text()
    assert job.text().count("step-4 ") == 1
    assert all_good(job.out) == 4
    saved_first = job.text().rindex("checkpoint: saved") < job.text().rindex("val_loss")
    assert saved_first == (saving == 2)


@pytest.mark.slow
@pytest.mark.parametrize("saving", [2, 1000])
def test_a_signal_of_one_rank_in_a_validation_stops_both(tmp_path, start, saving):
    script = fork(tmp_path, "")
    come = "        if step == 4 and layout.rank == 1:\n            os.kill(os.getpid(), 10)\n"
    place = "        if validating:"
    script.write_text(script.read_text().replace(place, f"{come}{place}", 1))
    flags = ["--checkpoint_every", saving, "--val_every", 2, "--val_batches", 1]
    job = start(tmp_path / "run", 2, *flags, script=script)
    assert job.end() == 1
    assert "a signal to another rank: stopped after step 4" in job.text()
    assert all_good(job.out) == 4


@pytest.mark.slow
def test_ctrl_c_twice(tmp_path, start):
    """The second one, after two seconds, ends a process that does not come to the end of its step."""
    out = tmp_path / "run"
    closed(out, 5).touch()
    job = start(out, 1, script=gated(tmp_path))
    job.until(reached(out, 5, 0).exists)
    began = time.monotonic()
    while job.launcher.poll() is None:
        job.launcher.send_signal(signal.SIGINT)
        assert time.monotonic() - began < 600
        time.sleep(0.1)
    assert job.end() == 130
    assert time.monotonic() - began > 2
    assert all_good(job.out) == 4
    assert "Ctrl-C again: the run ends now; the last checkpoint is step 4" in job.text()


def is_pending(pid: int, number: int) -> bool:
    """Whether a stopped process will get this signal as soon as it goes on."""
    return (
        int(re.search(r"ShdPnd:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())[1], 16)
        >> (number - 1)
        & 1
        == 1
    )


@pytest.mark.slow
@pytest.mark.parametrize("patience", [2, 600])
def test_shutdown_timeout(tmp_path, start, patience):
    """torchrun kills what has not saved within --shutdown-timeout."""
    out = tmp_path / "run"
    closed(out, 5).touch()
    torchrun = ["--shutdown-timeout", patience]
    job = start(out, 2, "--checkpoint_every", 4, script=gated(tmp_path), torchrun=torchrun)
    until_both_wait(job, 5)
    if patience == 2:  # they never come out of step 5
        job.launcher.send_signal(signal.SIGTERM)
        assert job.end() == 1
        assert all_good(out) == 4
        return
    ranks = [job.worker(0), job.worker(1)]
    for pid in ranks:
        os.kill(pid, signal.SIGSTOP)  # both have the signal before step 5 goes on
    job.launcher.send_signal(signal.SIGTERM)
    for pid in ranks:
        job.until(lambda pid=pid: is_pending(pid, signal.SIGTERM))
    closed(out, 5).unlink()
    for pid in ranks:
        os.kill(pid, signal.SIGCONT)
    assert job.end() == 1
    # the ranks agree during the step after the signal
    assert all_good(out) == 6


# ------------------------------------------------------------ several machines: two torchrun agents


class Nodes:
    """Two torchrun agents on this machine that take each other for two machines; the first holds
    the rendezvous."""

    def __init__(self, start, out, nnodes, script):
        self.holder = hold_port()
        self.port = port_of(self.holder)
        self.start_job = start
        self.out = out
        self.nnodes = nnodes
        self.script = script
        self.first = self.start()
        self.first.until(self.has_rendezvous)
        self.second = self.start()

    def start(self) -> Job:
        # a lost node is noticed after 9 s instead of 15, because a healthy node may be silent for 3 s
        # on a busy machine; and a smaller job starts after 1 s instead of 30
        timing = "keep_alive_interval=3,last_call_timeout=1"
        torchrun = [
            "--nnodes",
            self.nnodes,
            "--max_restarts",
            3,
            "--rdzv_id",
            "job",
            "--rdzv_backend",
            "c10d",
            "--rdzv_conf",
            timing,
            "--rdzv_endpoint",
            f"127.0.0.1:{self.port}",
            "--local_addr",
            "127.0.0.1",
        ]
        env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}  # see docs/cluster.md
        flags = ["--global_batch_size", 2, "--checkpoint_every", 1]
        return self.start_job(self.out, 1, *flags, script=self.script, torchrun=torchrun, **env)

    def has_rendezvous(self) -> bool:
        with socket.socket() as s:
            return s.connect_ex(("127.0.0.1", self.port)) == 0


@pytest.mark.slow
def test_a_node_is_replaced(tmp_path, start, undisturbed):
    """The other node waits for it, and both continue from the newest checkpoint."""
    out = tmp_path / "run"
    closed(out, 10).touch()
    nodes = Nodes(start, out, "2", gated(tmp_path))
    until_both_wait(nodes.first, 10)
    nodes.second.launcher.kill()
    nodes.second.end()
    closed(out, 10).unlink()
    replacement = nodes.start()
    assert replacement.end() == 0
    assert nodes.first.end() == 0
    assert_same_run(nodes.out, undisturbed)


@pytest.mark.slow
def test_a_node_is_lost_and_comes_back(tmp_path, start, undisturbed):
    """--nnodes 1:2: the other node goes on alone, with the same global batch. When the lost node
    comes back, torchrun stops the one that runs, which saves, and starts both. Lost again, it
    leaves the other to end the run alone. The run waits in steps 9, 13 and 17, so that it is
    never over before the test has done its part: an agent that ends waits five minutes for others."""
    out = tmp_path / "run"
    for step in (9, 13, 17):
        closed(out, step).touch()
    nodes = Nodes(start, out, "1:2", gated(tmp_path))
    nodes.first.until_step(8)
    nodes.second.launcher.kill()
    nodes.second.end()
    closed(out, 9).unlink()
    nodes.first.until(lambda: "continuing from" in nodes.first.text())
    nodes.first.until_step(12)
    alone = nodes.first.worker(0)
    os.kill(alone, signal.SIGSTOP)
    replacement = nodes.start()
    nodes.first.until(lambda: is_pending(alone, signal.SIGTERM))
    closed(out, 13).unlink()
    os.kill(alone, signal.SIGCONT)
    # whichever has rank 0
    nodes.first.until(lambda: "(written by 1 rank(s))" in nodes.first.text() + replacement.text())
    nodes.first.until_step(16)
    replacement.launcher.kill()
    replacement.end()
    closed(out, 17).unlink()
    assert nodes.first.end() == 0
    # a busy machine may lose a node once more, so the run is compared, not the number of restarts
    said = nodes.first.text()
    assert "SIGTERM: stopped after step" in said
    assert "(written by 2 rank(s))" in said
    assert_same_run(nodes.out, undisturbed, tolerance=1e-4)


@pytest.mark.slow
def test_the_node_with_the_rendezvous_is_lost(tmp_path, start, undisturbed):
    """The others end with status 1; all nodes started again continue."""
    out = tmp_path / "run"
    closed(out, 10).touch()
    script = gated(tmp_path)
    nodes = Nodes(start, out, "2", script)
    until_both_wait(nodes.first, 10)
    nodes.first.launcher.kill()
    nodes.first.end()
    closed(out, 10).unlink()
    assert nodes.second.end() == 1
    again = Nodes(start, out, "2", script)
    assert again.first.end() == 0
    assert again.second.end() == 0
    assert_same_run(again.out, undisturbed)


# ---------------------------------------------------------------- launchers other than torchrun


@pytest.mark.parametrize(
    "quota, cores", [("max 100000", 3), ("150000 100000", 2), ("900000 100000", 3)]
)
def test_cores_are_those_that_affinity_and_a_quota_allow(monkeypatch, quota, cores):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2, 5})
    monkeypatch.setattr("builtins.open", mock.mock_open(read_data=quota))
    assert usable_cores() == cores


# pages that the system hands out for a tensor of 20 MiB, 21 MiB ..., each larger than those before
PAGES = """
import resource
import torch
import train_llama3
from distributed.launch import connect
from distributed.layout import Layout

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

connect(Layout(), train_llama3.Config(), "cpu")
for size in range(20, 30):
    before = pages()
    tensor = torch.ones(size * 2**18)
    del tensor
    print(pages() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="a limit of glibc")
def test_memory_of_freed_tensors_is_kept_on_a_cpu(tmp_path):
    script = tmp_path / "steps.py"
    script.write_text(PAGES)
    env = runs.ENV | {"PYTHONPATH": str(REPO)}
    said = runs.run([sys.executable, script], tmp_path, env=env)
    # the smallest fills 5,120 pages
    assert min(map(int, said.split())) < 2000, said


@pytest.mark.parametrize(
    "env, told",
    [
        (
            dict(SLURM_PROCID="3", SLURM_NTASKS="4", SLURM_LOCALID="3"),
            "srun started 4 tasks.*RANK=.SLURM_PROCID",
        ),
        (dict(WORLD_SIZE="2"), "WORLD_SIZE=2, but RANK is not set"),
        (dict(RANK="0", WORLD_SIZE="2", MASTER_PORT="29500"), "MASTER_ADDR is not set"),
        (dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost"), "MASTER_PORT='' is no number"),
        (
            dict(RANK="", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1"),
            "RANK='' is no number",
        ),
        (
            dict(RANK="0", WORLD_SIZE="abc", MASTER_ADDR="localhost", MASTER_PORT="1"),
            "WORLD_SIZE='abc' is no number",
        ),
        (
            dict(
                RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost", MASTER_PORT="1", LOCAL_RANK="x"
            ),
            "LOCAL_RANK='x' is no number",
        ),
        (
            dict(RANK="3", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1"),
            "RANK=3 must be below WORLD_SIZE=2",
        ),
    ],
    ids=str,
)
def test_an_incomplete_environment_is_told_in_one_line(tmp_path, env, told):
    done = runs.ended(
        [sys.executable, RECIPE, "--out", tmp_path / "run"], tmp_path, status=2, env=runs.ENV | env
    )
    assert re.fullmatch(f"error.*{told}.*\n", done.stderr)
    assert not (tmp_path / "run").exists()


def by_hand(start, folder, rank: int, port: int, *flags, script=RECIPE, **more) -> Job:
    """A rank of two as mpirun or srun would start it: the variables, and no torchrun."""
    env = (
        dict(
            RANK=str(rank),
            WORLD_SIZE="2",
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE="2",
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
            PYTHONPATH=str(REPO),
        )
        | more
    )
    return start(folder / "run", 1, *flags, script=script, **env)


@pytest.mark.parametrize(
    "what, told",
    [
        ("code", "ValueError: models/llama3.py is not the same on rank 0 .* and rank 1 "),
        ("out", "ValueError: --out .* is not the same folder on rank 0 .* and rank 1 "),
        ("flag", "flags weight_decay differs between ranks 0 and 1"),
    ],
)
@pytest.mark.slow
def test_machines_that_differ_do_not_train_together(tmp_path, start, port, what, told):
    """Two machines: each process is the first of its own."""
    other = tmp_path / "other"
    flags = []
    if what == "code":
        shutil.copytree(
            REPO,
            other,
            ignore=shutil.ignore_patterns(".*", "tests", "forks", "exercises", "runs", "shared"),
        )
        with open(other / "models/llama3.py", "a") as file:
            file.write("NEW = 1\n")
    elif what == "flag":
        flags = ["--weight_decay", 0.2]
    if what == "code":
        script = other / RECIPE.name
    else:
        script = RECIPE
    if what == "out":
        there = other
    else:
        there = tmp_path
    first = by_hand(start, tmp_path, 0, port, LOCAL_RANK="0")
    second = by_hand(
        start, there, 1, port, *flags, script=script, LOCAL_RANK="0", PYTHONPATH=str(script.parent)
    )
    assert first.end() == 1
    assert second.end() == 1
    assert re.search(told, first.text() + second.text())
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@pytest.fixture
def port():
    with hold_port() as holder:
        yield port_of(holder)


@pytest.mark.slow
@pytest.mark.parametrize("failing", [(0, 1), (1,)], ids=["all", "one"])
def test_an_error_is_told_once_by_a_rank_that_has_it(tmp_path, start, port, failing):
    script = fork(
        tmp_path,
        f"""
        if step == 3 and layout.rank in {failing}:
            raise ValueError("a bad record")
    """,
    )
    jobs = [by_hand(start, tmp_path, rank, port, script=script) for rank in (0, 1)]
    assert jobs[1].end() == 1
    assert jobs[0].end() == 1
    told = f"error on rank {failing[0]} ({socket.gethostname()}): ValueError: a bad record"
    assert told in jobs[failing[0]].text()
    assert sum(job.text().count("ValueError: a bad record") for job in jobs) == 1


def count_sockets(rank: int, ranks: int, port: int, found):
    """Connect as a recipe does, make the mesh and the group of checkpoints, exchange what steps,
    saves and resumes exchange. Count this rank's sockets, and on rank 0 the bytes in the store."""
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    layout = Layout(dp_shard=ranks // 2, tp=2, rank=rank, global_batch_size=ranks)
    allow_many_ranks()
    layout = make_mesh(connect(layout, train_llama3.Config(), "cpu"))
    group = new_gloo_group("checkpoint")
    assert scatter(on_rank_0(lambda values: values, group, rank), group) == fail_together(
        lambda: rank, group
    )
    dist.all_reduce(torch.ones(1))
    links = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    store = dist.distributed_c10d._get_default_store().underlying_store.underlying_store
    if rank == 0:
        stored = sum(len(key) + len(store.get(key)) for key in store.list_keys())
    else:
        stored = 0
    found.put((rank, sum("socket:" in link for link in links), stored))
    disconnect()
    os._exit(0)


@pytest.mark.slow
def test_sockets_do_not_grow_with_the_ranks(port):
    """A full mesh of connections, gloo's default, has 2 sockets per rank in every rank: 1,024 file
    handles at 510 ranks. Only the process with the store, here rank 0, under torchrun the launcher,
    has a socket per rank, and rank 0 another, for what all ranks tell it in a save. Twice the ranks
    are one neighbour more for one rank of a broadcast's tree; the mean is two."""
    for ranks in (4, 8, 16, 32):
        found = forkserver.Queue()
        workers = []
        for rank in range(ranks):
            workers.append(
                forkserver.Process(target=count_sockets, args=(rank, ranks, port, found))
            )
        for worker in workers:
            worker.start()
        (_, first, stored), *others = sorted(found.get(timeout=300) for _ in workers)
        for worker in workers:
            worker.join()
        sockets = [number for _, number, _ in others]
        assert sum(sockets) / len(sockets) < 16.5
        assert max(sockets) <= 14 + ranks.bit_length()
        assert first <= 12 + 2 * ranks
        assert stored < 1800 * ranks


DIES = """
import os, time
import train_llama3 as recipe

rank = os.environ["RANK"]
open(f"{folder}/ready {{rank}}", "w").close()
while not os.path.exists("{folder}/go"):
    time.sleep(0.02)


def die(*args, **more):
    open("{folder}/died", "w").close()
    os._exit(0)


if rank == "1":
    recipe.Checkpoints = die
recipe.run(recipe.main, recipe.Config)
"""


@pytest.mark.slow
def test_a_wait_for_others_ends(tmp_path, start, port):
    """Ctrl-C and SIGTERM end a start at once; a stranger at the port, who never answers, after
    --init_timeout_s; and so does a rank that dies between connecting and checkpoint.py's group."""
    for number in (signal.SIGINT, signal.SIGTERM):
        job = by_hand(start, tmp_path, 0, port)
        job.until(
            lambda: (
                f":{port:04X} "
                in Path("/proc/net/tcp").read_text() + Path("/proc/net/tcp6").read_text()
            )
        )
        job.launcher.send_signal(number)
        assert job.end(within=240) != 0  # --init_timeout_s is 300
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        # in a folder of its own: in that of the others it would first wait 35 s for their lock
        new = tmp_path / "new"
        job = by_hand(start, new, 1, stranger.getsockname()[1], "--init_timeout_s", 2)
        assert job.end() == 1
        assert "within --init_timeout_s 2" in job.text()
    jobs = []
    for rank in (0, 1):
        script = tmp_path / f"dies-{rank}.py"
        script.write_text(DIES.format(folder=str(tmp_path)))
        jobs.append(by_hand(start, tmp_path, rank, port, "--init_timeout_s", 30, script=script))
    for rank, job in enumerate(jobs):  # both have imported torch, and connect at the same time
        job.until((tmp_path / f"ready {rank}").exists)
    (tmp_path / "go").touch()
    assert jobs[0].end() == 1
    assert (tmp_path / "died").exists()  # and did not come too late


# ---------------------------------------------------------------- Slurm


def test_the_files_for_kubernetes_and_skypilot(tmp_path):
    """Both are YAML; torchrun and the recipe know the flags of their commands."""
    yaml = pytest.importorskip("yaml")
    job, task = (
        yaml.safe_load(text)
        for text in re.findall(
            r"```yaml\n(.*?)```", (REPO / "docs" / "cluster.md").read_text(), re.S
        )
    )
    pod = job["spec"]["template"]["spec"]
    assert job["kind"] == "Job"
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy needs it
    script = f"torchrun() {{ printf '%s\\n' \"$@\"; }}\n{task['run']}"
    env = {
        "NUM_NODES": "2",
        "NUM_GPUS_PER_NODE": "8",
        "NODE_IPS": "10.0.0.1\n10.0.0.2",
        "TASK_ID": "t",
    }
    env = os.environ | {f"SKYPILOT_{name}": value for name, value in env.items()}
    done = subprocess.run(
        ["bash", "-euc", script], env=env, capture_output=True, text=True, check=True
    )
    started = done.stdout.split()
    assert started[started.index("--rdzv_endpoint") + 1] == "10.0.0.1:29500"
    for words in (pod["containers"][0]["command"][1:], started):
        asked = get_args_parser().parse_args(words)
        assert asked.training_script == "train_llama3.py"
        assert asked.nproc_per_node == "8"
        assert (
            parse_config(train_llama3.Config, asked.training_script_args).out == "/shared/runs/8B"
        )


@pytest.mark.slow
def test_slurm_script(tmp_path, start, port):
    """The script of docs/cluster.md, with stand-ins for srun and scontrol: it requeues itself while
    there is progress."""
    (script,) = re.findall(
        r"```bash\n(#!/bin/bash.*?)```", (REPO / "docs" / "cluster.md").read_text(), re.S
    )
    out = tmp_path / "run"
    programs = {
        "srun": f'while [ "$1" != torchrun ]; do shift; done; shift\n'
        f'exec {sys.executable} -m torch.distributed.run --local_addr 127.0.0.1 "$@"\n',
        "scontrol": f"case $1 in show) echo 127.0.0.1;; requeue) echo $2 >> {tmp_path}/requeued;; esac\n",
    }
    for name, text in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}")
        (tmp_path / name).chmod(0o755)

    def submit(name, *flags, **env):
        text = script
        ours = {
            r"^out=.*$": f"out={out}",
            r" 8 ": " 2 ",
            r"29500": str(port),
            r" train_llama3\.py .* --out": f" {RECIPE} {' '.join(map(str, [*FLAGS, *DATA, *flags]))} --out",
        }
        for pattern, replacement in ours.items():
            text, n = re.subn(pattern, replacement, text, flags=re.M)
            assert n == 1, pattern
        (tmp_path / name).write_text(text)
        env |= {"SLURM_JOB_ID": "77", "SLURM_NNODES": "1", "SLURM_JOB_NODELIST": "n[1-4]"}
        return start.job(
            ["bash", tmp_path / name], out, PATH=f"{tmp_path}:{os.environ['PATH']}", **env
        )

    def requeued():
        if (tmp_path / "requeued").exists():
            return (tmp_path / "requeued").read_text().split()
        return []

    job = submit("1.sh", *ENDLESS, "--checkpoint_every", 1_000_000)
    job.until_step(3)
    found = []
    for pid in job.processes():
        with suppress(OSError):  # they come and go
            if b"torch.distributed.run" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    (torchrun,) = found
    os.kill(torchrun, signal.SIGUSR1)
    assert job.end() == 1
    assert requeued() == ["77"]
    stopped = all_good(out)
    assert f"SIGUSR1: stopped after step {stopped}" in job.text()

    job = submit("2.sh", "--lr", "nonsense", SLURM_RESTART_COUNT="1")
    assert job.end() == 1
    assert requeued() == ["77"]  # no progress

    # what --load_step says is for the first start
    job = submit("3.sh", "--steps", stopped + 3, "--load_step", 1, SLURM_RESTART_COUNT="1")
    assert job.end() == 0
    assert requeued() == ["77"]
    assert f"/step-{stopped} (written by 2 rank(s))" in job.text()
    assert all_good(out) == stopped + 3
