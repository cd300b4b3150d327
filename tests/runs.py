"""What starts programs for the tests, and reads what they leave: the command of a recipe, jobs that
are watched and killed."""

import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from programs import REPO, run_program, start_program

from training.metrics import read_lines

MODEL = "n_layers=2,dim=32,n_heads=4,n_kv_heads=2,head_dim=8,ffn_dim=64,vocab_size=4096"
MLA = (
    "n_layers=4,dim=32,n_heads=4,ffn_dim=64,vocab_size=4096,q_lora_rank=16,kv_lora_rank=16,qk_nope_head_dim=8,"
    "qk_rope_head_dim=4,v_head_dim=8,moe_ffn_dim=32"
)
# threads that spin while they wait for each other take 50 times as long on a busy machine
ENV = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | {
    "OMP_WAIT_POLICY": "passive"
}


def launch(processes: int, *argv) -> list[str]:
    """The command for a recipe: plain python for one process, as torchrun runs it for more."""
    if processes > 1:
        torchrun = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc_per_node",
            str(processes),
        ]
    else:
        torchrun = []
    return [sys.executable, *torchrun, *map(str, argv)]


def ended(
    command: list, cwd=REPO, timeout=600, real=False, status=0, env=ENV
) -> subprocess.CompletedProcess:
    """A command that has ended with this status, as it must. real: start it as it stands, not in a
    fork, see programs.py."""
    done = run_program(command, cwd=cwd, env=env, timeout=timeout, real=real)
    assert done.returncode == status, (
        f"{shlex.join(map(str, command))}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    )
    return done


def run(command: list, cwd=REPO, **options) -> str:
    """stdout of a command that has ended as it must."""
    return ended(command, cwd, **options).stdout


def fork(folder, lines: str) -> Path:
    """A copy of train_llama3.py in another folder, with `lines` in every step between the backward
    and the clipping."""
    source = (REPO / "train_llama3.py").read_text()
    place = "        grad_norm = parallel.clip_grad_norm("
    assert source.count(place) == 1
    added = textwrap.indent(textwrap.dedent(lines).strip("\n"), " " * 8)
    script = folder / "train_fork.py"
    script.write_text(source.replace(place, f"{added}\n{place}"))
    return script


def json_lines(file) -> list[dict]:
    """The objects of a file that has one in each line."""
    return [json.loads(line) for line in Path(file).read_text().splitlines()]


def as_json_lines(rows) -> str:
    """The text of a file that has one object in each line."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def metrics(out) -> list[dict]:
    return json_lines(Path(out) / "metrics.jsonl")


def column(lines: list[dict], name: str) -> list:
    """One value of each line of a log, in order; a line without it is a KeyError."""
    return [line[name] for line in lines]


def having(lines: list, name: str) -> list:
    """The lines with this name: a key of a line of a log, or words of a printed line."""
    return [line for line in lines if name in line]


def train_lines(out) -> list[dict]:
    return having(metrics(out), "loss")


# of a launcher that runs these tests
NOT_OURS = re.compile("RANK|WORLD_SIZE|LOCAL_|GROUP_|MASTER_|SLURM|TORCH")
numbers = itertools.count()


class Job:
    """A launcher and all that it starts, found by an environment variable that they inherit, or by
    the name of a fork.
    real: start the command as it stands, not in a fork, see programs.py."""

    def __init__(self, command, out, log, real=False, **env):
        self.out, self.log, self.mark = Path(out), Path(log), f"{os.getpid()}.{next(numbers)}"
        env = (
            {k: v for k, v in os.environ.items() if not NOT_OURS.match(k)}
            | {"OMP_NUM_THREADS": "1"}
            | env
        )
        env |= {"PYTHONPATH": str(REPO), "JOB_OF_THE_TEST": self.mark}
        self.launcher = start_program(
            [str(word) for word in command], str(log), str(self.log.parent), env, real
        )

    def processes(self) -> dict[int, dict[str, str]]:
        """{pid: its environment} of those that are alive, the launcher too."""
        found = {}
        for pid in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):  # they come and go
                words = os.fsdecode(Path("/proc", pid, "environ").read_bytes()).split("\0")
                job, _, rank = Path("/proc", pid, "comm").read_text().strip().rpartition(".")
                if job == self.mark:
                    found[int(pid)] = {"RANK": rank}
                elif f"JOB_OF_THE_TEST={self.mark}" in words:
                    found[int(pid)] = dict(word.split("=", 1) for word in words if "=" in word)
        return found

    def worker(self, rank) -> int | None:
        """The pid of a rank; its writer process, if it has one, is younger."""
        return min(
            (pid for pid, env in self.processes().items() if env.get("RANK") == str(rank)),
            default=None,
        )

    def kill_everything(self):
        while pids := self.processes():
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.launcher.poll()

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def last_step(self) -> int:
        return max((line["step"] for line in read_lines(f"{self.out}/metrics.jsonl")), default=0)

    # Limits end a deadlock; how fast a machine is that does other things as well is no matter of a
    # test. A start of two ranks may take a minute there.
    def until(self, condition, timeout=600):
        """Waits until condition() holds; a job that ends before fails the test."""
        deadline = time.monotonic() + timeout
        while True:
            ended = self.launcher.poll()  # before the condition, which its last act may fulfil
            if condition():
                return
            assert ended is None, f"ended with {ended} before that\n{self.text()[-3000:]}"
            assert time.monotonic() < deadline, f"not within {timeout} s\n{self.text()[-3000:]}"
            time.sleep(0.005)

    def until_step(self, step):
        self.until(lambda: self.last_step() >= step)

    def end(self, within=600) -> int:
        """Waits until no process of the job is left; returns the launcher's status."""
        deadline = time.monotonic() + within
        while self.launcher.poll() is None or self.processes():
            assert time.monotonic() < deadline, (
                f"after {within} s: {list(self.processes())}\n{self.text()[-3000:]}"
            )
            time.sleep(0.01)
        return self.launcher.returncode
