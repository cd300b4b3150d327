"""--after_save: runs a user's command after each checkpoint, such as a copy to an object store."""
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor


def check_after_save(command: str) -> None:
    if "{}" not in command:
        raise ValueError(f"--after_save {command!r} must have {{}} where the checkpoint's folder goes, such as "
                         "'aws s3 sync {} s3://bucket/run'")


class AfterSave:
    """Runs the command in a shell while training goes on, one checkpoint after the other. A failure prints one line and the
    run goes on: the checkpoint itself is complete."""

    def __init__(self, command: str):
        self.command, self.pool = command, ThreadPoolExecutor(1)
        self.waiting: set[str] = set()  # folders still needed by the command

    def __call__(self, folder: str) -> None:
        self.waiting.add(folder)
        self.pool.submit(self.run, folder)

    def run(self, folder: str) -> None:
        done = subprocess.run(self.command.replace("{}", shlex.quote(folder)), shell=True, capture_output=True, text=True,
                              errors="replace", stdin=subprocess.DEVNULL)
        if done.returncode:
            said = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()] or ["it said nothing"]
            print(f"checkpoint: --after_save FAILED for {folder}, status {done.returncode}: {said[-1][:200]}", flush=True)
        self.waiting.discard(folder)

    def close(self) -> None:
        """Waits for all running commands."""
        self.pool.shutdown()
