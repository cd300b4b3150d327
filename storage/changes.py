"""Compares a checkpoint with the run about to start from it: model, data, flags, learning rate."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from flags.files import json_bytes, read_json

# Model fields that may change with --init_from: another class, as in a fork, other positions, for
# longer texts, and fields that only add or remove tensors. With excluded parameters the sizes of
# the excluded may change, too.
FREE_FIELDS = {"module", "class", "max_seq_len", "rope_theta", "rope_scaling", "mtp_depth"}
EXCLUDED_FIELDS = {"vocab_size", "n_layers", "tie_embeddings"}
# Flags of the learning rate's schedule. If one changes, --no-init_model_only begins a new phase.
SCHEDULE_FLAGS = (
    "steps",
    "schedule_steps",
    "lr",
    "min_lr_ratio",
    "warmup_steps",
    "decay_ratio",
    "decay_type",
)
# Flags without effect on the trained numbers: where to run, what to write and show. Data and
# tokenizer are compared by content.
UNTOLD_FLAGS = set(
    """
    out device log_every checkpoint_every init_from init_model_only load_step exclude_from_loading checkpoint_async
    keep_latest_k checkpoint_first_step load_only last_save_model_only after_save export_hf export_dtype data
    tokenizer cache_dir tensorboard wandb profile memory_snapshot gc_every
    init_timeout_s train_timeout_s
""".split()
)


def changes(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yields (name, old value, new value) where two nested dicts differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in dict.fromkeys([*new, *old]):
            inner = key  # n_layers, but data.seq_len
            if name not in ("", "model"):
                inner = f"{name}.{key}"
            yield from changes(old.get(key, "not set"), new.get(key, "not set"), inner)
    elif json_bytes(old) != json_bytes(new):  # as JSON: a saved tuple comes back as a list
        yield name, shorten_value(old), shorten_value(new)


def shorten_value(value: Any) -> str:
    text = f"{value}"
    if len(text) <= 40:
        return text
    return text[:16] + "..."


def describe_changes(differ: list[tuple]) -> str:
    texts = {name: f"{name} {old} -> {new}" for name, old, new in differ}
    return ", ".join(texts.values())


def compare_start(
    path: str, source, own: bool, identity: dict, exclude_from_loading: list[str], flags: dict
) -> list[tuple]:
    """[(name, saved value, present value)] for all that differs between a step folder and a start from it with --init_from.

    A start with the whole state continues at the saved step if the list is empty. Else a new phase
    begins: weights and moments are kept; step, data and schedule begin at 0. own: the step folder
    is the run's own, and nothing may differ. source: result of resume_source. flags: {name: value}
    of this start; the schedule's are compared. Raises ValueError for changes that are not allowed.
    """
    saved = read_json(path, "state.json")
    saved_flags = read_json(path, "config.json")
    there = saved.get("identity", {})
    if not there.get("model"):  # a stranger may have written anything
        raise ValueError(
            f"{path}/state.json names no model for its weights; give a checkpoint as a recipe "
            "saves it"
        )
    fields = there["model"].keys() | identity["model"].keys()
    free = FREE_FIELDS | {"data"}
    if set(exclude_from_loading) - {"optimizer"}:
        free |= EXCLUDED_FIELDS
    differ = []
    for name, old, new in changes(there, identity):
        field = name.split(".")[0]
        # a checkpoint of before a model had a field knows nothing of it: False or None is what the
        # model did then
        if old == "not set" and new in ("False", "None"):
            continue
        if not source.everything and field not in fields:
            continue
        differ.append((name, old, new))
        if field in fields and "not set" in (old, new):
            free.add(field)  # of a fork's new field
    wrong = []
    for name, old, new in differ:
        if own or name.split(".")[0] not in free:
            wrong.append(f"{name} is {new} but {source.folder} was trained with {old}")
    if wrong:
        if own:
            advice = "use --out NEW to train another model, or give the old values to continue"
        else:
            advice = "give the old values"
            if source.everything:
                advice += ", or leave out --no-init_model_only to take only the weights"
        saved_class = there["model"].get("class")
        if saved_class != identity["model"].get("class"):
            advice += (
                f"; the checkpoint holds a {saved_class}, and this recipe trains another model"
            )
        raise ValueError(f"{'; '.join(wrong)}; {advice}")
    if source.everything and saved["model_only"]:
        raise ValueError(
            f"{path} holds only the weights; start a new run from them with --init_from {path} "
            "--out NEW"
        )
    if source.everything and not own:
        for name in SCHEDULE_FLAGS:
            if name in saved_flags and name in flags:
                differ += changes(saved_flags[name], flags[name], name)
    return differ


def describe_start(
    path: str, differ: list[tuple], cfg: Any, lr_at: Callable[[int, Any], float] | None = None
) -> str:
    """One line with all flags of `cfg` that differ from a step folder's, and with the resulting
    learning rate. Empty when nothing differs or no step is left to train. differ: result of
    compare_start(). cfg: the whole Config of a recipe, for any of its flags may differ."""
    step = read_json(path, "manifest.json")["step"]
    old = read_json(path, "config.json")
    new = asdict(cfg)
    flags = []
    for name in new:
        if name in old and name not in UNTOLD_FLAGS:
            flags += changes(old[name], new[name], name)
    if differ:
        told = []
        same = "; the same data come in the same order again"
        for name, before, now in [*differ, *flags]:
            if name != "model_args":
                told.append((name.removeprefix("data."), before, now))
        if any(name.startswith("data.") for name, _, _ in differ):
            same = ""
        return (
            f"a new phase: weights and optimizer state of {path}, while step, data and schedule "
            "begin at 0; what differs: "
            f"{describe_changes(told)}{same}"
        )
    if not flags or step >= new.get("steps", math.inf):
        return ""
    text = f"flags that differ from those of step {step}: {describe_changes(flags)}"
    if lr_at:
        other = copy.copy(cfg)  # a copy: lr_at of a fork may call what its Config defines
        vars(other).update(old)
        usual = other.lr * lr_at(step + 1, other)
        now = cfg.lr * lr_at(step + 1, cfg)
        if not math.isclose(usual, now, rel_tol=1e-6):
            text += f"; the learning rate of step {step + 1} is {now:.2e}, not {usual:.2e}"
            by_steps = old.get("schedule_steps") == new.get("schedule_steps") == -1
            if by_steps and old["steps"] != cfg.steps:
                text += f"; --schedule_steps {old['steps']} keeps the length of the schedule"
    return text
