"""Finds the checkpoint to start from, the newest undamaged step folder of a run, in --out or of
--init_from; and opens a step folder as a model without memory."""

import importlib
import json
import os
import re
import sys
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, NamedTuple

import torch

from distributed.agree import Failed
from distributed.layout import named_tensors
from flags.files import read_json, step_folders
from storage.dcp import read_table
from storage.manifest import TABLE, Damaged, check_files, read_manifest, verify
from storage.provenance import changed_code, local_code

ADAPTER = "adapter_config.json"  # of peft, beside adapter_model.safetensors
# of Hugging Face folders
HF_FILES = (
    ADAPTER,
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
ABOUT = ("state.json", "config.json")  # files of a step folder read at a start, before the tensors


def is_hf_folder(folder: str) -> bool:
    """Whether the folder holds weights in Hugging Face's format, or a PEFT adapter beside such
    weights. Pickled weights (.bin) count, too: a later reader refuses them with the reason."""
    if folder == "" or os.path.lexists(os.path.join(folder, "manifest.json")):
        return False
    return any(os.path.lexists(os.path.join(folder, name)) for name in HF_FILES)


def candidates(folder: str, step: int = -1) -> list[str]:
    """The step folders to try, newest first: all of a run folder, or only `step`; or `folder`
    itself, if a step folder."""
    if os.path.isfile(os.path.join(folder, "manifest.json")):
        return [folder]
    found = dict(step_folders(folder))
    if step >= 0 and step not in found:
        raise ValueError(
            f"{folder} has no checkpoint of step {step}; it has the steps "
            f"{', '.join(map(str, found)) or 'none'}"
        )
    if os.path.isfile(folder):
        raise ValueError(f"{folder} is a file; give its folder, {os.path.dirname(folder) or '.'}")
    if not found:
        what = "is no folder"
        if os.path.isdir(folder):
            what = "holds no checkpoint"
        from flags.hints import hub_hint

        raise ValueError(
            f"{folder} {what}; give a run folder, or one of its folders "
            f"checkpoints/step-N{hub_hint(folder)}"
        )
    if step >= 0:
        return [found[step]]
    return list(found.values())


class Source(NamedTuple):
    """A checkpoint of ours to start from."""

    folder: str  # a run folder or a step folder
    step: int  # -1: the newest
    everything: bool  # load optimizer state, step and data cursor, too; else only the weights


def resume_source(
    out: str, init_from: str, load_step: int = -1, init_model_only: bool = True
) -> Source | None:
    """The run folder `out`, if checkpoints exist there; else --init_from. None: no checkpoint of
    ours. The other parameters are the flags of these names."""
    step = load_step
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        if os.environ.get(name, "0") != "0":
            step = -1  # after a restart: the newest, not the flag's
    if step >= 0 or step_folders(out):
        return Source(out, step, True)
    if init_from and not is_hf_folder(init_from):
        return Source(init_from, -1, not init_model_only)
    return None


def newest_good(
    folder: str, paths: list[str], check: Callable[[str], dict], say: Callable[[str], None]
) -> tuple[str, dict]:
    """(path, manifest) of the first undamaged step folder in `paths`. check(path) returns the
    manifest or raises Damaged.

    Raises ValueError if all are damaged: a run that began again at step 0 would overwrite files
    that can still be rescued.
    """
    damaged = {}
    for path in paths:
        try:
            return path, check(path)
        except (Damaged, Failed) as error:
            say(f"{path} is DAMAGED: {error}")
            damaged[os.path.basename(path)] = error
    names = ", ".join([*damaged][:3])
    if len(damaged) > 3:
        names += ", ..."
    newest, why = next(iter(damaged.items()))
    raise ValueError(
        f"{folder} has no undamaged checkpoint among {names} ({newest}: {why}); nothing begins "
        "again at step 0 "
        "over them: use --out NEW or another --load_step, or move them away"
    )


def newest_readable(folder: str, step: int = -1, names: Collection[str] = ()) -> str:
    """The newest checkpoint with undamaged small files (`names`, or all but the tensors). Raises
    ValueError.

    At a start every rank calls this several times, so no other file is looked at: a tokenizer has
    megabytes, and a large run a file of tensors for each rank.
    """

    def is_wanted(name):
        return name in names if names else not name.startswith((TABLE, "__"))

    def check(path):
        manifest = read_manifest(path, is_wanted)
        check_files(path, manifest, [*filter(is_wanted, manifest["files"])])
        return manifest

    return newest_good(folder, candidates(folder, step), check, lambda text: None)[0]


def saved_state(path: str) -> dict:
    """The `state` given to save(). Raises ValueError unless step, samples and tokens are numbers of
    a real run."""
    state = read_json(path, "state.json")["state"]
    numbers = [-1]
    if isinstance(state, dict):
        numbers = [state.get(name, 0) for name in ("step", "samples", "tokens")]
    if not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise ValueError(f"{path}/state.json: {json.dumps(state)[:100]} is no place in a run")
    return state


def has_adapters(path: str) -> bool:
    """Whether a step folder holds the adapters of a LoRA run, not the weights of a whole model."""
    return "lora" in read_json(path, "state.json").get("identity", {})


# --- A step folder as a model ---
def saved_model(path: str) -> tuple[type, object]:
    """(model class, config) of a step folder. Raises ValueError unless the class is in models/ or
    forks/."""
    try:
        fields = dict(read_json(path, "state.json")["identity"]["model"])
        module = fields.pop("module")
        name = fields.pop("class")
        # a file must not decide what is imported
        if not re.fullmatch(r"(models|forks)\.[A-Za-z_]\w*", module):
            raise ValueError(
                f"it is a {module}.{name}, and only those in models/ and forks/ are loaded"
            )
        module = importlib.import_module(module)
        config = getattr(module, f"{name}Config")(**fields)
        if not 0 < config.n_layers <= 10_000:
            raise ValueError(f"n_layers {config.n_layers} is absurd: 10,000 are the most")
        return getattr(module, name), config
    except (ImportError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path}/state.json does not describe a model: {error}") from None


def open_saved(folder: str) -> tuple[str, Any, dict]:
    """(path, model on meta, DCP's table) of a step folder, or of a run folder's newest good
    checkpoint. Raises ValueError.

    The table of a LoRA run has only the adapters.
    """
    say = partial(print, "checkpoint:", file=sys.stderr, flush=True)  # stdout is for sampled text
    path, manifest = newest_good(folder, candidates(folder), verify, say)
    Model, config = saved_model(path)
    code = {}  # what computes the model
    for file, text in local_code().items():
        if file.startswith(("models/", "forks/")):
            code[file] = text
    changed = changed_code(path, code)
    if changed:
        say(changed)
    with torch.device("meta"):  # takes memory only once, and in the wanted dtype
        model = Model(config)
    table = read_table(path, manifest["files"])
    there = {key for key in table if key.startswith("model.")}
    names = list(named_tensors(model))
    if has_adapters(path):
        from storage.adapters import lora_names, lora_of

        names = []
        for name in lora_names(model, lora_of(path)["on"]):
            names += [f"{name}.lora_a.weight", f"{name}.lora_b.weight"]
    odd = sorted(there ^ {f"model.{fqn}" for fqn in names})
    if odd:
        kind = f"{Model.__module__}.{Model.__name__}"
        raise ValueError(
            f"{path} does not fit {kind}: {len(odd)} odd tensors, the first is {odd[0]}; if the "
            f"model's file was edited since, the text of then is in {path}/code.json"
        )
    return path, model, table
