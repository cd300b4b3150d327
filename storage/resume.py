"""What a start does about --out and --init_from before anything is built: may it go on from there, and what has changed?

Only small files are read here, and no process is connected yet, so what is wrong is said within a second.
"""
import fcntl
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict

from corpus.mixture import parse_mixture
from corpus.shards import is_shards
from corpus.tokenizer import BESIDE
from storage.manifest import ABOUT, is_hf_folder, newest_readable, resume_source, step_folders
from support.config import FROM_FILE
from support.files import check_local, matches, read_json


def claim_run(cfg, Model, model_config, data, lr_at=None, lora: dict | None = None) -> dict:
    """May --out go on, --init_from be read, --export_hf be written, and does the data fit the model? Raises ValueError if not,
    before anything is built. Locks --out, and returns what identifies the run: a continued one must not change it.

    cfg: of a recipe; data: of open_data; lr_at: the recipe's, to tell what changed flags do to the learning rate; lora: of a
    LoRA run, what identifies its adapters.
    """
    if (ids := data.vocab_size) > model_config.vocab_size:
        raise ValueError(f"the tokenizer has {ids} ids, the model {model_config.vocab_size}; use --model_args vocab_size={ids}")
    if cfg.val_every and not data.n_val_samples:
        raise ValueError(f"--data {cfg.data} has no validation text; use --val_every 0")
    model = {"module": Model.__module__, "class": Model.__name__, **asdict(model_config)}
    identity = {"model": model, "data": data.fingerprint, "optimizer": {"name": cfg.optimizer}}
    identity |= {"lora": lora} if lora else {}
    check_run(cfg.out, identity, cfg, lr_at)
    if is_hf_folder(cfg.init_from):
        if not cfg.init_model_only:
            raise ValueError(f"--no-init_model_only: {cfg.init_from} holds weights and no more; leave it out")
        from storage.hf import check_hf_config

        check_hf_config(model_config, cfg.init_from)
    if cfg.export_hf and all(step < cfg.steps for step, _ in step_folders(cfg.out)):
        from storage.hf import check_export

        check_export(cfg.export_hf, Model, model_config)
    seen = step_folders(cfg.out)
    lock_run(cfg.out)
    if step_folders(cfg.out) != seen:  # only where another start made the folder after keep_batch had looked
        raise ValueError(f"{cfg.out} got a checkpoint from another process while this start waited for it; start again")
    return identity


def check_run(out: str, identity: dict, cfg, lr_at=None):
    """Raises ValueError when this run may not continue what is in `out`, or start from --init_from.

    When it may, rank 0 prints which flags have changed. lr_at: the recipe's, to say what they do to the learning rate.
    """
    if cfg.keep_latest_k < 0:
        raise ValueError(f"--keep_latest_k {cfg.keep_latest_k}: give a number of checkpoints, or 0 to keep all")
    if cfg.after_save:
        from storage.after_save import check_after_save

        check_after_save(cfg.after_save)
    if stateless := {"lr_scheduler", "dataloader", "train_state"} & set(cfg.exclude_from_loading):
        raise ValueError(f"--exclude_from_loading {min(stateless)}: there is no such state, as the learning rate and the place "
                         "in the data follow from the step; leave it out")
    if cfg.init_from and not has_new_ids(cfg):
        from corpus.init_tokenizer import check_tokenizer

        check_tokenizer(out, identity, cfg)
    if source := resume_source(out, cfg):
        from storage.changes import changed_flags, check_continuable, may_change, model_changes, phase_changes, phase_line

        path = newest_readable(source.folder, source.step, ABOUT)
        if source.folder != out and "lora" in read_json(path, "state.json")["identity"]:
            raise ValueError(f"--init_from {source.folder} holds adapters only; merge them with the weights below them, python "
                             f"checkpoint.py to_hf {source.folder} OUT, and start from OUT")
        if source.everything and source.folder != out and (differ := phase_changes(path, identity, cfg)):
            if int(os.environ.get("RANK", 0)) == 0:
                print(phase_line(path, differ, identity, cfg), flush=True)
        elif source.everything:
            check_continuable(path, source.folder, identity)
            if int(os.environ.get("RANK", 0)) == 0 and (text := changed_flags(path, cfg, lr_at)):
                print(text, flush=True)
        elif wrong := [change for change in model_changes(path, identity) if change[0].split(".")[0] not in may_change(cfg)]:
            text = "; ".join(f"{name} is {old} there, {new} here" for name, old, new in wrong)
            raise ValueError(f"--init_from {source.folder} is of another model: {text}; give the model of the checkpoint")


HELD = set()  # folders that this process has locked
# What the ranks of one start have in common, and those of two starts do not
JOB = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "SLURM_RESTART_COUNT")


def wait_for_run(out: str):
    """What is in `out` may change until the process that writes there has ended: every rank waits for that before it looks.
    Where there is no <out>/.lock, nobody has written yet, and nothing is made before the flags are known to be right. Raises
    ValueError for an address that is no folder."""
    check_local(out, "--out")
    lock, rank, job = os.path.join(out, ".lock"), int(os.environ.get("RANK", 0)), job_name()
    if rank == 0 and os.path.exists(lock):
        lock_run(out)
    deadline = time.monotonic() + 35
    while rank > 0 and os.path.exists(lock) and time.monotonic() < deadline:  # rank 0 says what is wrong if it does not end
        with suppress(OSError), open(lock, errors="replace") as file:
            if file.read().endswith(job):
                return
        time.sleep(0.1)


def job_name() -> str:
    return ", job " + " ".join(os.environ.get(name, "-") for name in JOB)


def lock_run(out: str):
    """Rank 0 holds <out>/.lock until its process ends, however it ends: two jobs never write into one run folder.

    Waits up to 30 s, because workers of a killed launcher take some seconds to notice; then ValueError names the pid.
    """
    if int(os.environ.get("RANK", 0)) != 0 or out in HELD:
        return
    try:
        os.makedirs(out, exist_ok=True)
        descriptor = os.open(os.path.join(out, ".lock"), os.O_RDWR | os.O_CREAT, 0o644)  # left open: closing it would unlock
    except OSError as error:
        raise ValueError(f"--out {out!r} is no folder to write to: {error.strerror}") from None
    for tries_left in range(300, -1, -1):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return sign_lock(descriptor, out)
        except BlockingIOError:
            holder = os.pread(descriptor, 999, 0).decode(errors="replace").partition(", job")[0]
            if not tries_left:
                raise ValueError(f"{out} is in use by process {holder}: stop that first, or use --out NEW") from None
            if tries_left == 300:
                print(f"checkpoint: {out} is in use by process {holder}; waiting up to 30 s", flush=True)
            time.sleep(0.1)
        except OSError as error:  # a file system without locks, or without room for the pid
            print(f"checkpoint: {out}/.lock: {error.strerror}; see that no second job writes there", flush=True)
            with suppress(OSError):
                sign_lock(descriptor, out)  # the other ranks wait for that
            return


def sign_lock(descriptor: int, out: str):
    HELD.add(out)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()} on {socket.gethostname()}{job_name()}".encode(), 0)


# --- Is it the same model, on the same data? ---


# --- The batch of a continued run ---
def continued(cfg) -> str | None:
    """The step folder whose weights and optimizer state a start with these flags trains on; None where it has none, or has
    done its last step."""
    source = resume_source(cfg.out, cfg)
    path = newest_readable(source.folder, source.step, ABOUT) if source and source.everything else None
    to_do = path and (source.folder != cfg.out or read_json(path, "manifest.json")["step"] < cfg.steps)
    return path if to_do else None


def keep_batch(cfg):
    """Replaces --global_batch_size -1 in cfg by a number: that of the run which is continued, or in a new run
    local_batch_size x data ranks.

    A batch that comes from a checkpoint or a config.json is kept on any number of processes. Where local_batch_size does not
    divide it, the largest smaller one that does is taken, and rank 0 says so: that only changes how much runs at once.
    Raises ValueError where no local_batch_size divides it. Waits until no other process writes into --out.
    """
    wait_for_run(cfg.out)
    processes, others = int(os.environ.get("WORLD_SIZE", 1)), cfg.pp * cfg.cp * cfg.tp
    if min(cfg.pp, cfg.cp, cfg.tp, cfg.local_batch_size) < 1 or processes % others:
        return  # check_layout says what is wrong
    data_ranks, source = processes // others, "--config" if "global_batch_size" in FROM_FILE else ""
    if cfg.global_batch_size == -1:
        path = continued(cfg)
        kept = read_json(path, "config.json").get("global_batch_size") if path else None
        source, cfg.global_batch_size = path if kept else "", kept or cfg.local_batch_size * data_ranks
    share, size = cfg.global_batch_size // data_ranks, cfg.pp_microbatch_size if cfg.pp > 1 else 1
    if not source or size < 1 or cfg.global_batch_size % (cfg.local_batch_size * data_ranks) == 0:
        return
    fits = [n for n in range(1, min(cfg.local_batch_size, share) + 1) if share % n == 0 and n % size == 0]
    if cfg.global_batch_size % data_ranks or not fits:
        near = -(-cfg.global_batch_size // (data_ranks * size)) * data_ranks * size
        each = f" in micro-batches of {size}" * (size > 1)
        raise ValueError(f"the global batch of {source} is {cfg.global_batch_size} sequences, which {data_ranks} data ranks "
                         f"cannot share{each}; use --global_batch_size {near} to change it, another number of processes to "
                         "keep it, or --out NEW to train another model")
    if int(os.environ.get("RANK", 0)) == 0:
        print(f"the global batch stays {cfg.global_batch_size} sequences, as in {source}: --local_batch_size "
              f"{cfg.local_batch_size} becomes {fits[-1]} on {data_ranks} data ranks", flush=True)
    cfg.local_batch_size = fits[-1]


# --- The tokenizer of --init_from ---
def source_tokenizer(cfg) -> str:
    """The folder of the tokenizer.json that the weights of --init_from were trained with: the default for text. "" where the
    flags name a tokenizer, or where there is none to follow.

    A run that has checkpoints of its own takes it from those: the folder that it began with may be gone. Raises ValueError.
    """
    is_text = not all(is_shards(part.path) for part in parse_mixture(cfg.data))
    if not cfg.init_from or cfg.tokenizer or not is_text or has_new_ids(cfg):
        return ""
    source, names = resume_source(cfg.out, cfg), (*ABOUT, "tokenizer.json", *BESIDE)
    folder = newest_readable(source.folder, source.step, names) if source else cfg.init_from
    file = os.path.join(folder, "tokenizer.json")
    if not os.path.lexists(file):
        raise ValueError(f"{file} is missing, so nothing tells how to cut --data {cfg.data} into the ids that these weights "
                         "know; give their tokenizer with --tokenizer")
    return folder


def has_new_ids(cfg) -> bool:
    """Whether the embedding starts at random: no id has a meaning yet, so any tokenizer will do."""
    return matches([name.removeprefix("model.") for name in cfg.exclude_from_loading], "model.tok_embeddings.weight")
