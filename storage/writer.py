"""Writes step folders: at once, or in the background while training goes on.

A save goes to step-N.tmp-x and is renamed to step-N at the end, so a folder named step-N is always
complete. A save that fails leaves nothing behind, and older checkpoints untouched.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distributed.agree import Failed, fail_together, on_rank_0, rank_in
from distributed.layout import AXES
from flags import VERSION
from flags.files import free_bytes, publish, step_folders, write_file
from storage.dcp import SavePlan, import_dcp, write_tensors
from storage.manifest import TABLE, Damaged, checksums, read_manifest, write_manifest

# folders left by a process killed while saving or deleting
LEFTOVER = re.compile(r"step-\d+\.tmp-.*|trash-.*")


def step_path(out: str, step: int) -> str:
    return os.path.join(out, "checkpoints", f"step-{step}")


def delete_leftovers(out: str) -> None:
    folder = os.path.join(out, "checkpoints")
    if os.path.isdir(folder):
        for name in filter(LEFTOVER.fullmatch, os.listdir(folder)):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def run_after_save(command: str, folder: str) -> None:
    """Runs --after_save in a shell, while training goes on. A failure prints one line: the
    checkpoint itself is complete."""
    done = subprocess.run(
        command.replace("{}", shlex.quote(folder)),
        shell=True,
        capture_output=True,
        text=True,
        errors="replace",
        stdin=subprocess.DEVNULL,
    )
    if done.returncode:
        text = done.stderr.strip() or done.stdout.strip() or "it said nothing"
        last_line = text.splitlines()[-1].strip()
        print(
            f"checkpoint: --after_save FAILED for {folder}, status {done.returncode}: "
            f"{last_line[:200]}",
            flush=True,
        )


class Writer:
    """Writes the step folders of one run, at most one at a time, so that the background threads of
    all ranks save in the same order.

    group: gloo, of all ranks, for the background thread alone: two threads on one gloo group crash.
    files_beside: {name: bytes} of what lies in every step folder beside the tensors, on rank 0.
    layout: {axis: degree} for the manifest. say: prints a line on rank 0. in_process: a process
    saves in the background, not a thread. keep_latest_k, after_save, load_only: the flags.
    """

    def __init__(
        self,
        out: str,
        group,
        files_beside: dict,
        layout: dict,
        say,
        *,
        in_process: bool,
        keep_latest_k: int,
        after_save: str,
        load_only: bool,
    ):
        self.out = out
        self.keep_latest_k = keep_latest_k
        self.after_save = after_save
        self.group = group
        self.rank = rank_in(group)
        self.world_size = dist.get_world_size(group) if group else 1
        self.files_beside = files_beside
        self.layout = layout
        self.say = say
        self.plan = SavePlan()
        self.pool = ThreadPoolExecutor(1)
        self.stager = None
        self.staged = None  # the copy to CPU memory, under way
        self.flight = None  # the save, under way
        self.why_not = ""  # of the last save that failed
        self.commands = ThreadPoolExecutor(1)
        self.copying = {}  # --after_save: {folder: its command}
        self.process = None
        if not load_only:
            if in_process:
                from storage.writer_process import writer_process

                self.process = writer_process()
            if self.rank == 0:
                delete_leftovers(out)

    # --- in the background ---
    def stage(self, tensors: dict, step: int, about: dict) -> None:
        """Begins to copy the tensors to CPU memory, and then to write them."""
        # before 2.13 a stager works only once
        if self.stager is not None and torch.__version__ < "2.13":
            self.stager.close()
            self.stager = None
        if self.stager is None:
            self.stager = self.new_stager()
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the stager's own stream does not wait for the optimizer's
        self.staged = self.stager.stage(tensors)
        self.flight = self.pool.submit(self.write, step, about, self.staged.result, staged=True)

    def new_stager(self):
        staging = import_dcp().staging
        cuda = torch.cuda.is_available()
        return staging.DefaultStager(
            staging.StagingOptions(
                use_pinned_memory=cuda,
                use_non_blocking_copy=cuda,
                use_shared_memory=self.process is not None,
            )
        )

    def wait_staged(self) -> None:
        """Returns when the weights may change; every optimizer calls this before a step."""
        if self.staged is not None:
            wait([self.staged])  # write() reports an error of the copy
            self.staged = None

    def finish_flight(self) -> None:
        """Waits for the running save."""
        self.wait_staged()
        flight = self.flight
        self.flight = None
        if flight is not None and not flight.result() and self.process is not None:
            self.process.shutdown()
            # from here on the same on all ranks: all agreed on the result
            self.process = None
            self.stager = None
            self.say("from now on a thread saves, for a writer process may have died")

    def close(self) -> None:
        """Waits for the running save, and raises the save's error."""
        self.finish_flight()
        self.pool.shutdown()
        self.commands.shutdown()
        if self.stager is not None:
            self.stager.close()
        if self.process is not None:
            self.process.shutdown()

    # --- a save ---
    def write(self, step: int, about: dict, get_tensors, staged: bool = False) -> bool:
        """The whole save, in the training thread or in the background. All ranks run the same
        collectives in the same order. about: {name: bytes} of this step, on rank 0. False: not
        saved, and a line has said why."""
        began = time.perf_counter()
        path = step_path(self.out, step)
        folder = None
        try:
            folder = on_rank_0(lambda: self.begin(path), self.group)
            if folder is None:
                return True
            # an error inside DCP's collectives would leave the peers waiting
            tensors = fail_together(get_tensors, self.group)
            process = self.process if staged else None
            names = write_tensors(tensors, folder, self.group, self.plan, staged, process)
            own = fail_together(lambda: checksums(folder, names, sync=True), self.group)
            size = on_rank_0(
                lambda ranks: self.commit(step, folder, about, ranks), self.group, value=own
            )
        except Failed as error:
            if self.rank == 0 and folder:
                shutil.rmtree(folder, ignore_errors=True)  # or the leftovers would fill the disk
            newest = step_folders(self.out)[:1]
            newest = newest[0][1] if newest else "none yet"
            self.why_not = f"{error}; the newest is {newest}"
            self.say(f"{path} is NOT SAVED: {self.why_not}")
            return False
        if self.after_save and self.rank == 0:
            self.copying[path] = self.commands.submit(run_after_save, self.after_save, path)
        self.purge(step)
        seconds = time.perf_counter() - began
        self.say(f"saved {path} ({size / 1e6:.1f} MB in {seconds:.2f} s)")
        return True

    def begin(self, path: str) -> str | None:
        """Makes the folder to write to (rank 0). None: this step is saved already."""
        if os.path.isdir(path):
            try:
                read_manifest(path)
                return None
            except Damaged as error:
                set_aside(path, f"damaged: {error}", self.say)
        folder = f"{path}.tmp-{uuid.uuid4().hex[:8]}"
        os.makedirs(folder)
        return folder

    def size_beside(self) -> int:
        """Bytes of the files beside the tensors, on rank 0."""
        return sum(map(len, self.files_beside.values()))

    def commit(self, step: int, folder: str, about: dict, ranks: list[dict]) -> int:
        """Completes the folder and renames it to step-<step> (rank 0). ranks: of each rank
        checksums(). Returns the size in bytes."""
        listed = {}
        for own in ranks:
            listed |= own
        # by stat: listings are cached on network file systems
        for name, (size, _) in listed.items():
            file = os.path.join(folder, name)
            if not os.path.isfile(file) or os.path.getsize(file) != size:
                raise OSError(
                    f"rank 0 does not see {name}: {self.out} must be on a file system that all "
                    "machines share"
                )
        return commit_step(
            folder,
            step_path(self.out, step),
            about | self.files_beside,
            listed,
            step=step,
            model_only=json.loads(about["state.json"])["model_only"],
            layout=self.layout,
            world_size=self.world_size,
        )

    def purge(self, step: int) -> None:
        """Deletes all but the newest keep_latest_k, after `step` is complete. The next start
        deletes leftovers of a kill."""
        if self.rank > 0 or not self.keep_latest_k:
            return
        earlier = [entry for entry in step_folders(self.out) if entry[0] < step]
        for n, path in earlier[self.keep_latest_k - 1 :]:
            if path in self.copying and not self.copying[path].done():
                continue  # the next save deletes the folder
            trash = os.path.join(os.path.dirname(path), f"trash-{n}-{uuid.uuid4().hex[:8]}")
            try:
                os.rename(path, trash)
                self.pool.submit(shutil.rmtree, trash, ignore_errors=True)
            except OSError as error:
                self.say(f"{path} could not be deleted: {error.strerror}")


def describe_room(out: str, n_bytes: float, n_saves: int, keep_latest_k: int) -> str:
    """What is told at a start if the checkpoints of a run do not fit into its folder; "" if they do.
    n_bytes: of one; n_saves: to come. A step is deleted after the next one is complete, so one more
    than keep_latest_k are there."""
    free = free_bytes(out)
    if keep_latest_k:
        n_saves = min(n_saves, max(1, keep_latest_k + 1 - len(step_folders(out))))
    if n_saves * n_bytes <= free:
        return ""
    one = f"a checkpoint takes {n_bytes / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free in {out}"
    if n_bytes > free:
        return f"{one}: NO SAVE WILL SUCCEED; make room there, or use --out on another disk"
    fits = int(free / n_bytes)
    return (
        f"{one}: of {n_saves} saves to come the first {fits} fit; make room there, or use a smaller "
        "--keep_latest_k"
    )


def layout_in_manifest(config: dict) -> dict[str, int]:
    """{axis: degree} of the axes that split something."""
    found = {}
    for axis in (*AXES, "ep"):
        if config.get(axis, 1) not in (1, -1):
            found[axis] = config[axis]
    return found


def set_aside(path: str, why: str, say: Callable[[str], None]) -> None:
    """Renames a step folder to damaged-N-x or abandoned-N-x: later starts ignore the folder, and
    the user may delete it."""
    step = os.path.basename(path).removeprefix("step-")
    name = f"{why.split(':')[0]}-{step}-{uuid.uuid4().hex[:4]}"
    target = os.path.join(os.path.dirname(path), name)
    os.rename(path, target)
    say(f"{path} is now {target} ({why})")


def commit_step(
    folder: str, target: str, contents: dict[str, bytes], listed: dict, **about: Any
) -> int:
    """Completes a folder of tensors and renames it to `target`, a step folder. contents: {name:
    bytes} of the other files; listed: checksums() of the files that are there; about: values of the
    manifest. Returns the size in bytes."""
    for name, content in contents.items():
        write_file(Path(folder, name), content)
    files = listed | checksums(folder, [TABLE, *contents])
    write_manifest(folder, files, **about, version=VERSION, torch=torch.__version__)
    publish(folder, target)
    return sum(size for size, _ in files.values())
