"""What a start does about --out and --init_from before anything is built: may it go on from there, and what has changed?

Only small files are read here, and no process is connected yet, so what is wrong is said within a second.
"""
import copy
import fcntl
import math
import os
import socket
import time
from contextlib import suppress
from dataclasses import asdict

import torch

from distributed.lora import check_lora, lora_names
from support.after_save import check_after_save
from support.certificate import carry_certificate
from support.config import FROM_FILE
from support.files import check_local, json_bytes, read_json
from support.hf import check_export, check_hf_config
from support.init_tokenizer import check_tokenizer
from support.manifest import ABOUT, is_hf_folder, newest_readable, resume_source, step_folders
from support.peft import base_folder, check_peft, is_peft_folder


def claim_run(cfg, Model, model_config, data, lr_at=None) -> dict:
    """May --out go on, --init_from be read, --export_hf be written, and does the data fit the model? Raises ValueError if not,
    before anything is built. Locks --out, and returns what identifies the run: a continued one must not change it.

    cfg: of a recipe; data: of open_data; lr_at: the recipe's, to tell what changed flags do to the learning rate.
    """
    if (ids := data.vocab_size) > model_config.vocab_size:
        raise ValueError(f"the tokenizer has {ids} ids, the model {model_config.vocab_size}; use --model_args vocab_size={ids}")
    if cfg.val_every and not data.n_val_samples:
        raise ValueError(f"--data {cfg.data} has no validation text; use --val_every 0")
    model = {"module": Model.__module__, "class": Model.__name__, **asdict(model_config)}
    identity = {"model": model, "data": data.fingerprint, "optimizer": {"name": cfg.optimizer}}
    identity |= claim_adapters(cfg, Model, model_config)
    check_run(cfg.out, identity, cfg, lr_at)
    if is_hf_folder(base_folder(cfg)):
        if not cfg.init_model_only:
            raise ValueError(f"--no-init_model_only: {cfg.init_from} holds weights and no more; leave it out")
        check_hf_config(model_config, base_folder(cfg))
    if cfg.export_hf and all(step < cfg.steps for step, _ in step_folders(cfg.out)):
        check_export(cfg.export_hf, Model, model_config)
    seen = step_folders(cfg.out)
    lock_run(cfg.out)
    if step_folders(cfg.out) != seen:  # only where another start made the folder after keep_batch had looked
        raise ValueError(f"{cfg.out} got a checkpoint from another process while this start waited for it; start again")
    carry_certificate(cfg, model_config)
    return identity


def claim_adapters(cfg, Model, model_config) -> dict:
    """What identifies a LoRA run besides, {} without --lora_rank. Raises ValueError where its flags do not fit the model, or
    --init_from."""
    if not getattr(cfg, "lora_rank", 0):
        return {}
    if not cfg.init_model_only:
        raise ValueError("--no-init_model_only with --lora_rank: the optimizer's state there is of weights that are frozen "
                         "here; leave it out")
    if drawn := [pattern for pattern in cfg.exclude_from_loading if pattern != "optimizer"]:
        raise ValueError(f"--exclude_from_loading {','.join(drawn)} with --lora_rank: what is not loaded would be frozen as "
                         "it was drawn; leave it out")
    with torch.device("meta"):
        model = Model(model_config)
    check_lora(model, cfg)
    if (folder := base_folder(cfg)) and not os.path.isdir(folder):  # of a run that is continued, too: it holds adapters only
        raise ValueError(f"--init_from {folder} is no folder; give the one of the weights below the adapters")
    if is_peft_folder(cfg.init_from) and not step_folders(cfg.out):
        check_peft(model, lora_names(model, cfg), cfg)
    lora = {"rank": cfg.lora_rank, "alpha": cfg.lora_alpha, "on": list(cfg.lora_on)}
    return {"lora": lora | ({"nf4": True} if cfg.lora_nf4 else {})}  # adapters of a rounded base are others


def check_run(out: str, identity: dict, cfg, lr_at=None):
    """Raises ValueError when this run may not continue what is in `out`, or start from --init_from.

    When it may, rank 0 prints which flags have changed. lr_at: the recipe's, to say what they do to the learning rate.
    """
    if cfg.keep_latest_k < 0:
        raise ValueError(f"--keep_latest_k {cfg.keep_latest_k}: give a number of checkpoints, or 0 to keep all")
    check_after_save(cfg.after_save)
    if stateless := {"lr_scheduler", "dataloader", "train_state"} & set(cfg.exclude_from_loading):
        raise ValueError(f"--exclude_from_loading {min(stateless)}: there is no such state, as the learning rate and the place "
                         "in the data follow from the step; leave it out")
    check_tokenizer(out, identity, cfg)
    if source := resume_source(out, cfg):
        path = newest_readable(source.folder, source.step, ABOUT)
        if source.folder != out and "lora" in read_json(path, "state.json")["identity"]:
            raise ValueError(f"--init_from {source.folder} holds adapters only; merge them with the weights below them, python "
                             f"checkpoint.py to_hf {source.folder} OUT, and start from OUT")
        if source.everything and source.folder != out and (differ := phase_changes(path, identity, cfg)):
            if int(os.environ.get("RANK", 0)) == 0:
                print(phase_line(path, differ, identity, cfg), flush=True)
        elif source.everything:
            check_continuable(path, source.folder, identity)
            base = read_json(path, "state.json").get("base", {}).get("folder")
            if "lora" in identity and base and not cfg.init_from:
                raise ValueError(f"{out} holds adapters of {base}; give --init_from {base} to continue")
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
def model_changes(path: str, identity: dict) -> list[tuple]:
    """[(name, value there, value here)] of the fields that the model has in common with a checkpoint's, and that differ."""
    there = read_json(path, "state.json")["identity"]["model"]
    return [change for change in changes(there, identity["model"], "model") if "not set" not in change]


def may_change(cfg) -> set[str]:
    """Fields of the model that may differ from those of --init_from: a fork has its own class, longer texts need other
    positions, and some fields only add or remove tensors."""
    excluded = {"vocab_size", "n_layers", "tie_embeddings"} if set(cfg.exclude_from_loading) - {"optimizer"} else set()
    return {"module", "class", "max_seq_len", "rope_theta", "rope_scaling", "mtp_depth"} | excluded


# Flags of the learning rate's schedule: with other ones, everything of another run begins a new phase.
SCHEDULE_FLAGS = ("steps", "schedule_steps", "lr", "min_lr_ratio", "warmup_steps", "decay_ratio", "decay_type")


def phase_changes(path: str, identity: dict, cfg) -> list[tuple]:
    """[(name, value there, value here)] of what makes a start with everything of another run's step folder a new phase, with
    step, data and schedule from 0: other data, another schedule, other positions. Empty where nothing of that differs: then it
    goes on where that run stopped. Raises ValueError for what may not change while weights and moments are kept."""
    there, flags = read_json(path, "state.json")["identity"], read_json(path, "config.json")
    model, (old, new) = model_changes(path, identity), ({k: v for k, v in x.items() if k != "model"} for x in (there, identity))
    rest = [*changes(old, new)]
    wrong = [c for c in model if c[0].split(".")[0] not in may_change(cfg)] + [c for c in rest if not c[0].startswith("data.")]
    if wrong:
        text = "; ".join(f"{name} is {new} but {cfg.init_from} was trained with {old}" for name, old, new in wrong)
        raise ValueError(f"{text}; leave out --no-init_model_only to take its weights without the optimizer state, or give the "
                         "old values")
    known = [name for name in SCHEDULE_FLAGS if name in flags and hasattr(cfg, name)]
    differ = model + rest + [c for name in known for c in changes(flags[name], getattr(cfg, name), name)]
    if differ:
        check_continuable(path, cfg.init_from, there)  # that there is an optimizer state
    return differ


def phase_line(path: str, differ: list[tuple], identity: dict, cfg) -> str:
    """What the start of a new phase says. differ: of phase_changes; changed flags of other kinds are told, too."""
    flags = [change for change in differing_flags(path, cfg) if change[0] != "model_args"]  # its fields are told one by one
    told = [(name.removeprefix("data."), old, new) for name, old, new in differ] + flags
    text = ", ".join({name: f"{name} {old} -> {new}" for name, old, new in told}.values())
    seed = next((name for name in ("data_seed", "seed") if name in identity["data"]), None)  # the latter is grpo.py's
    again = (f"; the data are the same, and come in the same order again: --{seed} {identity['data'][seed] + 1} gives another"
             if seed and not any(name.startswith("data.") for name, _, _ in differ) else "")
    return (f"a new phase: weights and optimizer state of {path}, while step, data and schedule begin at 0; what differs: "
            f"{text}{again}")


def check_continuable(path: str, folder: str, identity: dict):
    """Raises ValueError when the checkpoint is one of another model, data or optimizer, or lacks the optimizer state."""
    saved = read_json(path, "state.json")
    changed = list(changes(saved["identity"], identity))
    if changed:
        text = "; ".join(f"{name} is {new} but {folder} was trained with {old}" for name, old, new in changed)
        raise ValueError(f"{text}; use --out NEW to train another model, or give the old values to continue")
    if saved["model_only"]:
        raise ValueError(f"{path} holds only the weights (it was the last of --last_save_model_only) and cannot be continued; "
                         f"start a new run from it with --init_from {path} --out NEW")


def changes(old, new, name=""):
    """Yields (name, old value, new value) where two nested dicts differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in [*new, *(key for key in old if key not in new)]:
            inner = key if name in ("", "model") else f"{name}.{key}"  # n_layers, but data.seq_len
            yield from changes(old.get(key, "not set"), new.get(key, "not set"), inner)
    elif json_bytes(old) != json_bytes(new):  # as JSON: a tuple is a list after it was saved
        yield name, *(f"{value}" if len(f"{value}") <= 40 else f"{value}"[:16] + "..." for value in (old, new))


# --- With which flags was it trained? ---
# Flags that change no number of the training: they say where it runs and what is written and shown. Data and tokenizer are
# compared by their contents.
UNTOLD_FLAGS = set("""
    out device log_every checkpoint_every init_from init_model_only load_step exclude_from_loading checkpoint_async
    keep_latest_k checkpoint_first_step load_only last_save_model_only after_save export_hf export_dtype lora_base data
    tokenizer cache_dir plot text_column tensorboard wandb profile memory_snapshot gc_every dry_run plan machine nvlink_gb_s
    network_gb_s devices_per_node explain check_parity where certify flight_recorder init_timeout_s train_timeout_s
""".split())


def continued(cfg) -> str | None:
    """The step folder whose weights and optimizer state a start with these flags trains on; None where it has none, or has
    done its last step."""
    source = resume_source(cfg.out, cfg)
    path = newest_readable(source.folder, source.step, ABOUT) if source and source.everything else None
    to_do = path and (source.folder != cfg.out or read_json(path, "manifest.json")["step"] < cfg.steps)
    return path if to_do else None


def differing_flags(path: str, cfg) -> list[tuple]:
    """[(name, value there, value here)] of the flags that matter and are not those of a step folder."""
    old, new = read_json(path, "config.json"), asdict(cfg)
    told = [name for name in new if name in old and name not in UNTOLD_FLAGS]
    return [change for name in told for change in changes(old[name], new[name], name)]


def changed_flags(path: str, cfg, lr_at=None) -> str:
    """One line that names the flags of `cfg` which differ from those of a step folder, and what becomes of the learning rate.
    Empty where nothing differs or no step is left to train."""
    step, old, new = read_json(path, "manifest.json")["step"], read_json(path, "config.json"), asdict(cfg)
    if step >= new.get("steps", math.inf):
        return ""
    differ = [f"{name} {was} -> {now}" for name, was, now in differing_flags(path, cfg)]
    if not differ:
        return ""
    text = f"flags that differ from those of step {step}: {', '.join(differ)}"
    if lr_at is None:
        return text

    def rate(n, **flags):
        other = copy.copy(cfg)  # a copy: lr_at of a fork may call what its Config defines
        vars(other).update(flags)
        return other.lr * lr_at(n, other)

    before, usual, now = rate(step, **old), rate(step + 1, **old), rate(step + 1)
    if not math.isclose(usual, now, rel_tol=1e-6):
        text += f"; the learning rate goes from {before:.2e} to {now:.2e} at step {step + 1}"
        length = old["steps"] if old.get("schedule_steps", -1) == -1 else old["schedule_steps"]
        if "schedule_steps" in new and math.isclose(usual, rate(step + 1, schedule_steps=length), rel_tol=1e-6):
            text += f"; --schedule_steps {length} keeps the old schedule"
    return text


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

