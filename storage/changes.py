"""Compares a checkpoint with the run about to start from it: model, data, flags, learning rate."""
import copy
import math
from dataclasses import asdict

from support.files import json_bytes, read_json


def model_changes(path: str, identity: dict) -> list[tuple]:
    """[(name, saved value, present value)] for the fields of both models whose values differ."""
    there = read_json(path, "state.json")["identity"]["model"]
    return [change for change in changes(there, identity["model"], "model") if "not set" not in change]


def model_conflicts(path: str, identity: dict, cfg) -> list[tuple]:
    """The changes of model_changes() not allowed with --init_from. Allowed are another class, as in a fork, other positions,
    for longer texts, and fields that only add or remove tensors."""
    allowed = {"module", "class", "max_seq_len", "rope_theta", "rope_scaling", "mtp_depth"}
    if set(cfg.exclude_from_loading) - {"optimizer"}:
        allowed |= {"vocab_size", "n_layers", "tie_embeddings"}
    return [change for change in model_changes(path, identity) if change[0].split(".")[0] not in allowed]


# Flags of the learning rate's schedule. If one changes, --no-init_model_only begins a new phase.
SCHEDULE_FLAGS = ("steps", "schedule_steps", "lr", "min_lr_ratio", "warmup_steps", "decay_ratio", "decay_type")


def phase_changes(path: str, identity: dict, cfg) -> list[tuple]:
    """[(name, saved value, present value)] for the changes that make --no-init_model_only a new phase.

    A new phase keeps weights and moments; step, data and schedule begin at 0. Other data, another schedule or other positions
    cause a new phase. Without such a change the list is empty, and training continues at the saved step. Raises ValueError
    for changes that are impossible while weights and moments are kept.
    """
    there, flags = read_json(path, "state.json")["identity"], read_json(path, "config.json")
    model, (old, new) = model_changes(path, identity), ({k: v for k, v in x.items() if k != "model"} for x in (there, identity))
    rest = [*changes(old, new)]
    if wrong := model_conflicts(path, identity, cfg) + [c for c in rest if not c[0].startswith("data.")]:
        text = "; ".join(f"{name} is {new} but {cfg.init_from} was trained with {old}" for name, old, new in wrong)
        raise ValueError(f"{text}; leave out --no-init_model_only to take its weights without the optimizer state, or give the "
                         "old values")
    known = [name for name in SCHEDULE_FLAGS if name in flags and hasattr(cfg, name)]
    differ = model + rest + [c for name in known for c in changes(flags[name], getattr(cfg, name), name)]
    if differ:
        check_continuable(path, cfg.init_from, there)  # there must be an optimizer state
    return differ


def describe_phase(path: str, differ: list[tuple], identity: dict, cfg) -> str:
    """The line printed at the start of a new phase. differ: result of phase_changes(); other changed flags are printed, too."""
    flags = [change for change in differing_flags(path, cfg) if change[0] != "model_args"]  # printed field by field
    told = [(name.removeprefix("data."), old, new) for name, old, new in differ] + flags
    text = ", ".join({name: f"{name} {old} -> {new}" for name, old, new in told}.values())
    seed = next((name for name in ("data_seed", "seed") if name in identity["data"]), None)  # "seed" in grpo.py
    again = (f"; the data are the same, and come in the same order again: --{seed} {identity['data'][seed] + 1} gives another"
             if seed and not any(name.startswith("data.") for name, _, _ in differ) else "")
    return (f"a new phase: weights and optimizer state of {path}, while step, data and schedule begin at 0; what differs: "
            f"{text}{again}")


def check_continuable(path: str, folder: str, identity: dict):
    """Raises ValueError when the checkpoint belongs to another model, data or optimizer, or lacks the optimizer state."""
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
    elif json_bytes(old) != json_bytes(new):  # as JSON: a saved tuple comes back as a list
        yield name, *(f"{value}" if len(f"{value}") <= 40 else f"{value}"[:16] + "..." for value in (old, new))


# --- Flags of the saved run ---
# Flags without effect on the trained numbers: where to run, what to write and show. Data and tokenizer are compared by content.
UNTOLD_FLAGS = set("""
    out device log_every checkpoint_every init_from init_model_only load_step exclude_from_loading checkpoint_async
    keep_latest_k checkpoint_first_step load_only last_save_model_only after_save export_hf export_dtype lora_from data
    tokenizer cache_dir tensorboard wandb profile memory_snapshot gc_every
    init_timeout_s train_timeout_s
""".split())


def differing_flags(path: str, cfg) -> list[tuple]:
    """[(name, saved value, present value)] for the flags that matter and differ from a step folder's."""
    old, new = read_json(path, "config.json"), asdict(cfg)
    told = [name for name in new if name in old and name not in UNTOLD_FLAGS]
    return [change for name in told for change in changes(old[name], new[name], name)]


def describe_flags(path: str, cfg, lr_at=None) -> str:
    """One line with the flags of `cfg` that differ from a step folder's, and with the resulting learning rate. Empty when
    nothing differs or no step is left to train."""
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
