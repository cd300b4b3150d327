"""config.json of a Hugging Face folder: which of our models it describes, whether the model fits, and
whether transformers would open an export as the same model."""

import importlib
import os
import re
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from torch import nn

from corpus.beside import read_hf_json
from distributed.agree import reason
from flags.config import spell, unwrap
from storage.source_tokenizer import weights_folder

# --- model_type: which of our models is it, and what will transformers open? ---
# All other differences between models are in the models' files: Config.from_hf and to_hf for
# config.json; hf_keys(), the table of fqn -> name in the files, or for a stack of experts (E, ...)
# a list of E names; hf_optional() lists patterns of optional names (MTP);
# hf_tensors(), in some forks, is the reader of the files.
HF_MODELS = {
    "llama": "models.llama3",
    "mistral": "models.llama3",
    "qwen2": "models.llama3",
    "qwen3": "models.qwen3",
    "qwen3_moe": "models.qwen3",
    "deepseek_v2": "models.deepseek",
    "deepseek_v3": "models.deepseek",
    "kimi_k2": "models.deepseek",
}


def config_class(kind: str) -> type | None:
    """The config of our model for a model_type: of HF_MODELS, or of the file of that name in
    models/ or forks/, with or without "_text". None without such a file."""
    module = HF_MODELS.get(kind) or find_model_file(kind.removesuffix("_text"))
    if module is None:
        return None
    for value in vars(importlib.import_module(module)).values():
        if isinstance(value, type) and value.__module__ == module and hasattr(value, "from_hf"):
            return value
    return None


def find_model_file(name: str) -> str | None:
    """The module of a model's file in models/ or forks/. A stranger's config.json has the name, so
    only a plain name counts, and only a file that reads config.json is imported."""
    if not re.fullmatch(r"[a-z]\w*", name):
        return None
    for room in ("models", "forks"):
        file = Path(__file__).parents[1] / room / f"{name}.py"
        if file.is_file() and "def from_hf(" in file.read_text("utf-8"):
            return f"{room}.{name}"
    return None


def class_of(config: Any) -> type[nn.Module]:
    """The model's class of a config: Llama3 of a Llama3Config."""
    return getattr(
        sys.modules[type(config).__module__], type(config).__name__.removesuffix("Config")
    )


# --- Reading ---
def read_hf_config(folder: str, Config: type | None = None) -> Any:
    """The model config of config.json. Config: the class; None: chosen by model_type. Raises
    ValueError."""
    folder = weights_folder(folder)
    found = read_hf_json(folder, "config.json")
    path = os.path.join(folder, "config.json")
    if Config is None:
        kind = found.get("model_type")
        if isinstance(kind, str):
            Config = config_class(kind)
        if Config is None:
            raise ValueError(
                f"{path}: model_type is {kind!r}; there is a model for {', '.join(HF_MODELS)}, and "
                "another is read by the file of its name in forks/"
            )
    try:
        config = Config.from_hf(found)
    except Exception as error:  # any error: a value in the file is the cause
        raise ValueError(f"{path}: {reason(error).removeprefix('config.json: ')}") from None
    hints = get_type_hints(Config)
    for field in fields(Config):
        name = field.name
        value: Any = getattr(config, name)
        kind, optional = unwrap(hints[name])
        if not has_type(value, kind) and not (optional and value is None):
            if kind is int and type(value) is int:
                raise ValueError(
                    f"{path}: {name} would be {value}, which is absurd: need 0 to {2**31 - 1}"
                )
            raise ValueError(
                f"{path}: {name} would be {str(value)[:40]!r}, not "
                f"{getattr(kind, '__name__', kind)}"
            )
        is_number = isinstance(value, int | float)
        if name == "norm_eps" and not (is_number and 0 <= value < 1):
            raise ValueError(f"{path}: {name} would be {value}, need 0 or more, below 1")
        if name == "rope_theta" and not (is_number and value > 0):
            raise ValueError(f"{path}: {name} would be {value}, need more than 0")
    return config


def is_finite(value: Any) -> bool:
    """Whether a value is a number with which a model computes numbers."""
    return type(value) in (int, float) and abs(value) < 1e300  # False for a NaN


def has_type(value: Any, kind: Any) -> bool:
    """Whether a value from a file has the annotated type of the config's field: strangers may have
    written anything."""
    if kind is int:
        return type(value) is int and 0 <= value < 2**31
    if kind is float:
        return is_finite(value)
    if kind is dict:
        return type(value) is dict and all(map(is_finite, value.values()))
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    return type(value) is kind


# --- Checks before anything is built ---
def check_hf_config(model_config: Any, folder: str) -> None:
    """Raises ValueError with every field of config.json that differs from the model's, and the
    flags to type instead."""
    theirs = read_hf_config(folder, type(model_config))
    module = type(model_config).__module__
    flavors = sys.modules[module].FLAVORS
    differ = differing_fields(model_config, theirs)
    if not differ:
        return
    told = []
    for name, value in differ.items():
        told.append(f"{name} is {value} there, {getattr(model_config, name)} here")
    # the flavor with the fewest fields to give as --model_args
    of_flavors = {name: differing_fields(config, theirs) for name, config in flavors.items()}
    nearest = min(of_flavors, key=lambda name: len(of_flavors[name]))
    args = of_flavors[nearest]
    if any(isinstance(value, dict) for value in args.values()):
        # a dict cannot be typed as --model_args
        fix = f"add a flavor with its values to FLAVORS in {module.replace('.', '/')}.py"
    elif args:
        spelt = ",".join(f"{name}={spell(value)}" for name, value in args.items())
        fix = f'use --flavor {nearest} and --model_args "{spelt}"'
    else:
        fix = f"use --flavor {nearest} and no --model_args"
    raise ValueError(f"{folder}/config.json is of another model: {'; '.join(told)}; {fix}")


def differing_fields(config: Any, theirs: Any) -> dict:
    """{name: value in `theirs`} of the fields that differ between two configs of one class.
    mtp_depth may differ: load_hf prints the missing layers."""
    found = {}
    for field in fields(config):
        value = getattr(theirs, field.name)
        if field.name != "mtp_depth" and getattr(config, field.name) != value:
            found[field.name] = value
    return found


def check_same_model(Model: type, config: Any) -> None:
    """Raises ValueError where transformers would open an export of this class as the model of
    another class, or where config.json cannot tell all of the config."""
    own = f"{Model.__module__}.{Model.__name__}"
    if not hasattr(config, "to_hf") or not hasattr(Model, "hf_keys"):
        raise ValueError(f"{own} cannot be exported: it needs hf_keys(), and to_hf() of its config")
    kind = config.to_hf().get("model_type")
    Known = config_class(kind)
    if Known is None:
        return  # a model_type of its own
    rename = (
        f"transformers would open an export of {own} as {kind}; let to_hf() return another "
        "model_type"
    )
    if own != f"{Known.__module__}.{Known.__name__}".removesuffix("Config"):
        raise ValueError(rename)
    if Known.from_hf(config.to_hf()) != config:
        raise ValueError(f"{rename}, because config.json cannot tell all of {config}")
