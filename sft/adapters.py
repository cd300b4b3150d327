"""Files of adapters: step folders of LoRA runs, and the format of the peft library, both ways.

A step folder holds adapters, and its state.json names the frozen weights, the base.
"""
import os

import torch
from torch import nn

from corpus.tokenizer import read_hf_json
from distributed.agree import brief, reason
from distributed.layout import local_slice, local_tensor
from sft.lora import adapted_linears, base_hash, block_linears, lora_names, merged_weight
from storage.dcp import read_tensors
from storage.manifest import is_hf_folder
from support.files import hf_file, json_bytes, publish, read_json, write_file

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# Fields of adapter_config.json that change the maths, with the only value that we implement
FIXED = dict(peft_type="LORA", bias="none", use_dora=False, use_rslora=False, fan_in_fan_out=False, rank_pattern={},
             alpha_pattern={}, modules_to_save=None, lora_bias=False)
EXPERTS = {"gate_proj", "up_proj", "down_proj"}


def lora_of(path: str) -> dict:
    """rank, alpha and on of the adapters in a step folder of a LoRA run."""
    return read_json(path, "state.json")["identity"]["lora"]


def adapter_names(path: str, model) -> list[str]:
    """fqns of the adapters in a step folder, for this model."""
    return [f"{name}.lora_{x}.weight" for name in lora_names(model, lora_of(path)["on"]) for x in "ab"]


def read_adapters(table, path: str) -> dict[str, torch.Tensor]:
    """{fqn: the whole tensor}: adapters are small."""
    found = {key: torch.empty(kind.size, dtype=kind.dtype) for key, kind in table.items()
             if key.startswith("model.")}
    read_tensors(found, path, table)
    return {key.removeprefix("model."): t for key, t in found.items()}


def base_of(path: str) -> str:
    """Folder of the frozen weights below a step folder. Raises ValueError if the folder is gone."""
    folder = read_json(path, "state.json")["base"]["folder"]
    if not os.path.isdir(folder):
        raise ValueError(f"{path} holds adapters of {folder}, which is gone; continue the run with --init_from NEW_PLACE")
    return folder


def check_base(path: str, modules: list[nn.Module], group=None) -> str:
    """The hash of the frozen weights of the modules. Raises ValueError if the adapters of a step folder were trained with other
    weights. path: the step folder; "": none."""
    found, there = base_hash(modules, group), read_json(path, "state.json")["base"] if path else {}
    if there.get("hash", found) != found:
        raise ValueError(f"{path} holds adapters of {there['folder']}, whose hash was {there['hash']}, and the frozen weights "
                         f"have {found} now; give the weights of the training with --init_from")
    return found


@torch.no_grad()
def add_adapters_of(path: str, table, modules: list[nn.Module]):
    """Add a step folder's adapters to the weights of a whole model, or to this rank's rows and columns of each weight."""
    adapters, scale = read_adapters(table, path), lora_of(path)["alpha"] / lora_of(path)["rank"]
    for fqn, p in [item for module in modules for item in module.named_parameters()]:
        name = fqn.removesuffix(".weight")
        if (a := adapters.get(f"{name}.lora_a.weight")) is not None:
            local, (shape, (row, column)) = local_tensor(p), local_slice(p)
            a = a[:, column : column + shape[1]].to(local.device)
            b = adapters[f"{name}.lora_b.weight"][row : row + shape[0]].to(local.device)
            local.copy_(merged_weight(local, a, b, scale))


# ---------------------------------------------------------------- peft's format
def is_peft_folder(folder: str) -> bool:
    return folder != "" and os.path.lexists(os.path.join(folder, CONFIG))


def read_adapter_config(folder: str) -> dict:
    """adapter_config.json. Raises ValueError for an adapter of another kind."""
    path, found = os.path.join(folder, CONFIG), read_hf_json(folder, CONFIG)
    other = [f"{name} {found[name]}" for name, value in FIXED.items() if found.get(name, value) not in (value, None)]
    if other:
        raise ValueError(f"{path} has {brief(other)}; only plain LoRA adapters are read")
    if type(found.get("r")) is not int or type(found.get("lora_alpha")) not in (int, float):
        raise ValueError(f"{path}: r is {found.get('r')!r} and lora_alpha {found.get('lora_alpha')!r}, which are no numbers")
    return found


def peft_keys(module, names) -> dict[str, str]:
    """{fqn of an adapter's weight: name in peft's files} for adapters beside linears of these names."""
    theirs, letters = module.hf_keys(), {"lora_a": "lora_A", "lora_b": "lora_B"}
    return {f"{fqn}.{ours}.weight": f"base_model.model.{theirs[f'{fqn}.weight'].removesuffix('.weight')}.{letter}.weight"
            for fqn in names for ours, letter in letters.items()}


def check_peft(model, names: list[str], cfg) -> None:
    """Raises ValueError if the adapters in --lora_from do not fit the flags. model: the full model, on meta."""
    if not is_peft_folder(cfg.lora_from):
        raise ValueError(f"--lora_from {cfg.lora_from} is no PEFT adapter: there is no {CONFIG} in it")
    folder, found = cfg.lora_from, read_adapter_config(cfg.lora_from)
    if (found["r"], found["lora_alpha"]) != (cfg.lora_rank, cfg.lora_alpha):
        raise ValueError(f"--lora_rank {cfg.lora_rank} --lora_alpha {cfg.lora_alpha:g}, but --lora_from {folder} has "
                         f"--lora_rank {found['r']} --lora_alpha {found['lora_alpha']:g}; give those")
    wanted, there = set(peft_keys(model, names).values()), set(open_adapter(folder).keys())
    ours = {key: fqn.split(".")[-3] for fqn, key in peft_keys(model, block_linears(model)).items()}
    if strange := sorted(there - ours.keys()):
        raise ValueError(f"--lora_from {folder} has {brief(strange)}, which this model has no adapter for")
    if wanted != there:
        beside = ",".join(dict.fromkeys(name for key, name in ours.items() if key in there))
        raise ValueError(f"--lora_on {','.join(cfg.lora_on)} does not fit --lora_from {folder}; use --lora_on {beside}")


def open_adapter(folder: str):
    from safetensors import SafetensorError, safe_open

    real = hf_file(folder, TENSORS)
    try:
        return safe_open(real, "pt")  # checks all sizes and offsets, and refuses absurd headers
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{os.path.join(folder, TENSORS)} cannot be read: {reason(error)}") from None


@torch.no_grad()
def load_peft(modules, folder: str) -> None:
    """Fill this rank's slice of each adapter from a PEFT folder. Raises ValueError for a wrong shape."""
    file = open_adapter(folder)
    for module in modules:
        linears = adapted_linears(module)
        for fqn, key in peft_keys(module, linears).items():
            p = module.get_parameter(fqn)
            (shape, offset), part = local_slice(p), file.get_slice(key)
            if tuple(part.get_shape()) != tuple(p.shape):
                raise ValueError(f"{folder}: {key} is {tuple(part.get_shape())} there, {tuple(p.shape)} here")
            local_tensor(p).copy_(part[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))])


def write_peft(out: str, path: str, table, model, beside: dict[str, bytes]) -> None:
    """Write the adapters of a step folder to the folder `out`, in peft's format. path, table: the step folder and its tensors;
    model: the full model, on meta; beside: {name: content} of the tokenizer's files."""
    from safetensors.torch import save

    about, adapters = read_json(path, "state.json"), read_adapters(table, path)
    lora, base = about["identity"]["lora"], about["base"]["folder"]
    base = base if is_hf_folder(base) else ""  # peft cannot read a run of ours
    keys, hf = peft_keys(model, [fqn.removesuffix(".lora_a.weight") for fqn in adapters if ".lora_a." in fqn]), model.hf_keys()
    # all linears of the blocks, to find short names for the adapted linears
    theirs = {name: hf[f"{name}.weight"].removesuffix(".weight") for name in block_linears(model)}
    chosen = {theirs[fqn.split(".lora_")[0]] for fqn in adapters}
    if getattr(model.config, "n_experts", 0) and (theirs_too := {name.rpartition(".")[2] for name in chosen} & EXPERTS):
        raise ValueError(f"peft takes {', '.join(sorted(theirs_too))} for weights of experts; leave out --adapter")
    short = {name.rpartition(".")[2] for name in chosen}  # peft adapts every module whose name ends with a target
    exact = {name for name in theirs.values() if name.rpartition(".")[2] in short} == chosen
    config = dict(
        peft_type="LORA", task_type="CAUSAL_LM", base_model_name_or_path=base, r=lora["rank"], lora_alpha=lora["alpha"],
        target_modules=sorted(short if exact else chosen), bias="none", lora_dropout=0.0, fan_in_fan_out=False,
        use_rslora=False, use_dora=False, init_lora_weights=True, modules_to_save=None, inference_mode=True)
    temporary = f"{os.path.abspath(out)}.tmp-{os.getpid()}"
    os.makedirs(temporary)
    for name, content in {**beside, CONFIG: json_bytes(config)}.items():
        write_file(os.path.join(temporary, name), content)
    tensors = {keys[fqn]: t.contiguous() for fqn, t in adapters.items()}
    write_file(os.path.join(temporary, TENSORS), save(tensors, {"format": "pt"}))
    publish(temporary, out)
    print(f"checkpoint: exported {out} ({len(tensors)} tensors of adapters; the weights below them: {base or 'not named'})")
