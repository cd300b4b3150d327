"""Checks --out and --init_from at a start, before anything is built: may this run continue, and
which flags have changed?

Only small files are read, before the processes connect, so that an error appears within a second.
"""

import fcntl
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

from data import check_vocabulary
from flags.config import FROM_FILE, own_rank
from flags.files import check_local, read_json, step_folders
from storage.newest import ABOUT, is_hf_folder, newest_readable, resume_source
from storage.source_tokenizer import has_new_ids


def check_start(cfg: Any, model_config: Any) -> None:
    """Raises ValueError if --init_from is a Hugging Face folder of another model. Asked before the
    data is read: to tokenize the text may take an hour."""
    if is_hf_folder(cfg.init_from):
        if not cfg.init_model_only:
            raise ValueError(
                f"--no-init_model_only: {cfg.init_from} holds weights and no more; leave it out"
            )
        from storage.hf_config import check_hf_config

        check_hf_config(model_config, cfg.init_from)


def claim_run(
    cfg: Any,
    Model: type,
    model_config: Any,
    data: Any,
    lr_at: Callable[[int, Any], float] | None = None,
    lora: dict | None = None,
) -> dict:
    """Checks --out, --init_from, --export_hf and the data before anything is built, and locks
    --out. Raises ValueError. Returns the run's identity: model, data and optimizer, which a
    continued run must not change.

    cfg: a recipe's whole Config, because any of its flags may differ from the checkpoint's. data:
    result of open_data. lr_at: the recipe's, to show how changed flags move the learning rate.
    lora: identity of a LoRA run's adapters.
    """
    check_start(cfg, model_config)  # once more, for a copy of a recipe that does not call it
    check_vocabulary(data.vocab_size, model_config.vocab_size)
    if cfg.val_every and not data.n_val_samples:
        raise ValueError(f"--data {cfg.data} has no validation text; use --val_every 0")
    # without _sr, because both kinds of AdamW load each other's moments
    identity = identify_run(
        cfg, Model, model_config, data.fingerprint, cfg.optimizer.removesuffix("_sr"), lr_at, lora
    )
    seen = step_folders(cfg.out)
    lock_run(cfg.out)
    if step_folders(cfg.out) != seen:  # another start made the folder after keep_batch had looked
        raise ValueError(
            f"{cfg.out} got a checkpoint from another process while this start waited for it; "
            "start again"
        )
    return identity


def identify_run(
    cfg: Any,
    Model: type,
    model_config: Any,
    data: dict,
    optimizer: str,
    lr_at: Callable[[int, Any], float] | None,
    lora: dict | None,
) -> dict:
    """The identity of a run, equal in every continued run. Raises ValueError if --out cannot be
    continued with it, or if --export_hf cannot be written."""
    model = {"module": Model.__module__, "class": Model.__name__, **asdict(model_config)}
    identity = {"model": model, "data": data, "optimizer": {"name": optimizer}} | (
        {"lora": lora} if lora else {}
    )
    check_run(cfg.out, identity, cfg, lr_at)
    if cfg.export_hf and all(step < cfg.steps for step, _ in step_folders(cfg.out)):
        from storage.hf_config import check_same_model
        from storage.hf_write import check_export, check_export_of

        check_same_model(Model, model_config)
        check_export(cfg.export_hf)
        check_export_of(Model, model_config, cfg.export_hf, cfg.export_dtype)
    return identity


def check_run(
    out: str, identity: dict, cfg: Any, lr_at: Callable[[int, Any], float] | None = None
) -> None:
    """Raises ValueError when this run may not continue the run in `out`, or start from --init_from.

    Otherwise rank 0 prints the changed flags. lr_at: the recipe's, to show how changed flags move
    the learning rate.
    """
    if cfg.after_save and "{}" not in cfg.after_save:
        raise ValueError(
            f"--after_save {cfg.after_save!r} must have {{}} where the checkpoint's folder goes: "
            f"'cp -r {{}} /x'"
        )
    if stateless := {"lr_scheduler", "dataloader", "train_state"} & set(cfg.exclude_from_loading):
        raise ValueError(
            f"--exclude_from_loading {min(stateless)}: there is no such state, all follows from "
            "the step"
        )
    if "lora" in identity:
        from storage.adapters import check_frozen  # only --lora_rank needs the file

        rank = identity["lora"]["rank"]
        check_frozen(rank, cfg.init_from, cfg.init_model_only, cfg.exclude_from_loading)
    source = resume_source(out, cfg.init_from, cfg.load_step, cfg.init_model_only)
    here = identity.get("data", {}).get("tokenizer_sha256")
    if here is not None and cfg.init_from and not has_new_ids(cfg.exclude_from_loading):
        from storage.other_tokenizer import check_tokenizer

        check_tokenizer(source, cfg.init_from, here, cfg.data, cfg.tokenizer)
    if source:
        from storage.changes import compare_start, describe_start

        path = newest_readable(source.folder, source.step, ABOUT)
        if source.folder != out and "lora" in read_json(path, "state.json").get("identity", {}):
            raise ValueError(
                f"--init_from {source.folder} holds adapters only; merge them, python "
                "checkpoint.py to_hf "
                f"{source.folder} OUT, and start from OUT"
            )
        differ = compare_start(
            path, source, source.folder == out, identity, cfg.exclude_from_loading, vars(cfg)
        )
        text = describe_start(path, differ, cfg, lr_at) if source.everything else ""
        if text and own_rank() == 0:
            print(text, flush=True)


HELD = set()  # folders locked by this process
# Environment variables with one value in all ranks of a start, and another value in the next start
JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")


def wait_for_run(out: str) -> None:
    """Waits on every rank until no other process writes to `out`: the newest checkpoint may change
    until then. Without <out>/.lock nobody has written yet; the folder is made only after all flags
    are checked. Raises ValueError for an address of a store."""
    check_local(out, "--out")
    lock = os.path.join(out, ".lock")
    rank = own_rank()
    job = job_name()
    if rank == 0 and os.path.exists(lock):
        lock_run(out)
    deadline = time.monotonic() + 35
    # after a timeout rank 0 reports the error
    while rank > 0 and os.path.exists(lock) and time.monotonic() < deadline:
        with suppress(OSError), open(lock, errors="replace") as file:
            if file.read().endswith(job):
                return
        time.sleep(0.1)


def job_name() -> str:
    return ", job " + " ".join(os.environ.get(name, "-") for name in JOB)


def check_places(out: str) -> None:
    """Raises ValueError if something else lies where a run writes: a folder in place of metrics.jsonl,
    a link to nowhere in place of checkpoints/, whose disk is not mounted. The run would end at its
    first line, or save nothing."""
    for name in (".lock", "config.json", "metrics.jsonl", "samples.jsonl"):
        path = os.path.join(out, name)
        # a link would let our pid overwrite another file
        is_file = os.path.isfile(path) and not (name == ".lock" and os.path.islink(path))
        if os.path.lexists(path) and not is_file:
            raise ValueError(f"{path} is no file to write to: move it away, or use --out NEW")
    path = os.path.join(out, "checkpoints")
    if os.path.lexists(path) and not os.path.isdir(path):
        raise ValueError(
            f"{path} is no folder, or a link to a folder that is not there: mount its disk, move it "
            "away, or use --out NEW"
        )


def lock_run(out: str):
    """Rank 0 holds <out>/.lock until the process ends, even by a kill: two jobs never write into
    one run folder.

    Waits up to 30 s, because workers of a killed launcher take some seconds to notice; then
    ValueError names the pid.
    """
    if own_rank() != 0 or out in HELD:
        return
    check_places(out)
    try:
        os.makedirs(out, exist_ok=True)
        # left open: closing it would unlock
        descriptor = os.open(os.path.join(out, ".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise ValueError(f"--out {out!r} is no folder to write to: {error.strerror}") from None
    for tries_left in range(300, -1, -1):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return sign_lock(descriptor, out)
        except BlockingIOError:
            holder = os.pread(descriptor, 999, 0).decode(errors="replace").partition(", job")[0]
            if not tries_left:
                raise ValueError(
                    f"{out} is in use by process {holder}: stop that first, or use --out NEW"
                ) from None
            if tries_left == 300:
                print(
                    f"checkpoint: {out} is in use by process {holder}; waiting up to 30 s",
                    flush=True,
                )
            time.sleep(0.1)
        except OSError as error:  # a file system without locks, or without room for the pid
            print(
                f"checkpoint: {out}/.lock: {error.strerror}; see that no second job writes there",
                flush=True,
            )
            with suppress(OSError):
                sign_lock(descriptor, out)  # the other ranks wait for the signature
            return


def sign_lock(descriptor: int, out: str) -> None:
    HELD.add(out)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()} on {socket.gethostname()}{job_name()}".encode(), 0)


def list_finished(out: str, done: int, steps: int, export_hf: str) -> list[str]:
    """Lines to print at the start of a run with all steps done, none of another run. done: steps so
    far."""
    lines = [
        f"{out} is finished: {done} of {steps} steps are done; use a larger --steps, or --out NEW"
    ]
    if export_hf and os.path.exists(export_hf):
        lines.append(
            f"--export_hf {export_hf} is there already: nothing is exported; give a new "
            "folder, or remove it"
        )
    return lines if done >= steps else []


def list_warnings(
    out: str, done: int, steps: int, schedule_steps: int, warmup_steps: int, export_hf: str
) -> str:
    """Warnings to print at the start, one per line (run finished, folder exists, warmup too long).
    done: steps so far."""
    total = schedule_steps
    if total == -1:
        total = steps
    lines = ["", *list_finished(out, done, steps, export_hf)]
    if warmup_steps > total:
        lines.append(
            f"--warmup_steps {warmup_steps} is longer than the schedule; it is clamped to {total}"
        )
    return "\n".join(lines)


# --- The batch of a continued run ---
def continued_folder(cfg: Any) -> str | None:
    """The step folder that these flags continue, with weights and optimizer state; None for a new
    or a finished run."""
    source = resume_source(cfg.out, cfg.init_from, cfg.load_step, cfg.init_model_only)
    if source is None or not source.everything:
        return None
    path = newest_readable(source.folder, source.step, ABOUT)
    if source.folder == cfg.out and read_json(path, "manifest.json")["step"] >= cfg.steps:
        return None
    return path


def keep_batch(cfg: Any):
    """Returns cfg with a number in place of --global_batch_size -1: the continued run's, or in a
    new run local_batch_size x data ranks.

    A global batch from a checkpoint or a config.json is kept on any number of processes. If
    local_batch_size does not divide the batch, the largest smaller divisor replaces
    local_batch_size, and rank 0 prints a line: the result of training is the same. Raises
    ValueError if no local_batch_size divides the batch. Waits until no other process writes to
    --out.
    """
    wait_for_run(cfg.out)
    processes = int(os.environ.get("WORLD_SIZE", 1))
    ranks_per_data_rank = cfg.pp * cfg.cp * cfg.tp
    if min(cfg.pp, cfg.cp, cfg.tp, cfg.local_batch_size) < 1 or processes % ranks_per_data_rank:
        return cfg  # check_layout reports the error
    data_ranks = processes // ranks_per_data_rank
    source = "--config" if "global_batch_size" in FROM_FILE else ""
    if cfg.global_batch_size == -1:
        source = continued_folder(cfg) or ""
        kept = None
        if source:
            kept = read_json(source, "config.json").get("global_batch_size")
        if not kept:
            source = ""
            kept = cfg.local_batch_size * data_ranks
        cfg = replace(cfg, global_batch_size=kept)
    share = cfg.global_batch_size // data_ranks
    size = 1  # sequences of a micro-batch
    if cfg.pp > 1:
        size = cfg.pp_microbatch_size
    if not source or size < 1 or cfg.global_batch_size % (cfg.local_batch_size * data_ranks) == 0:
        return cfg
    fits = []  # values of local_batch_size
    for n in range(1, min(cfg.local_batch_size, share) + 1):
        if share % n == 0 and n % size == 0:
            fits.append(n)
    if cfg.global_batch_size % data_ranks or not fits:
        near = -(-cfg.global_batch_size // (data_ranks * size)) * data_ranks * size
        raise ValueError(
            f"the global batch of {source} is {cfg.global_batch_size}, which {data_ranks} data "
            "ranks cannot share "
            f"in micro-batches of {size}; use --global_batch_size {near}, other processes, or "
            "--out NEW"
        )
    if own_rank() == 0:
        print(
            f"the global batch stays {cfg.global_batch_size} sequences, as in {source}: "
            "--local_batch_size "
            f"{cfg.local_batch_size} becomes {fits[-1]} on {data_ranks} data ranks",
            flush=True,
        )
    return replace(cfg, local_batch_size=fits[-1])
