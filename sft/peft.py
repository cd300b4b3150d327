"""Adapters in the format of the peft library, both ways."""
import os

import torch

from corpus.tokenizer import read_hf_json
from distributed.agree import brief, reason
from distributed.layout import local_slice, local_tensor
from sft.adapters import read_adapters
from sft.lora import adapted_linears, block_linears
from storage.manifest import is_hf_folder
from support.files import SAFETENSORS_HEADER_LIMIT, hf_file, json_bytes, publish, read_json, write_file

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# Fields of adapter_config.json that change the maths, with the only value that we implement
FIXED = dict(peft_type="LORA", bias="none", use_dora=False, use_rslora=False, fan_in_fan_out=False, rank_pattern={},
             alpha_pattern={}, modules_to_save=None, lora_bias=False)
EXPERTS = {"gate_proj", "up_proj", "down_proj"}


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
    if wanted != there:
        ours = {key: fqn for fqn, key in peft_keys(model, block_linears(model)).items()}
        if strange := sorted(there - ours.keys()):
            raise ValueError(f"--lora_from {folder} has {brief(strange)}, which this model has no adapter for")
        beside = dict.fromkeys(fqn.split(".")[-3] for key, fqn in ours.items() if key in there)
        raise ValueError(f"--lora_on {','.join(cfg.lora_on)} names {len(wanted) // 2} linears, but --lora_from {folder} has "
                         f"adapters for {len(there) // 2}; use --lora_on {','.join(beside)}")


def open_adapter(folder: str):
    from safetensors import SafetensorError, safe_open

    real = hf_file(folder, TENSORS)
    try:
        with open(real, "rb") as f:
            size = int.from_bytes(f.read(8), "little")
        if size > SAFETENSORS_HEADER_LIMIT:
            raise ValueError(f"a header of {size:,} bytes is absurd: {SAFETENSORS_HEADER_LIMIT:,} are the most")
        return safe_open(real, "pt")
    except (ValueError, OSError, SafetensorError) as error:
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
        raise ValueError(f"peft takes {', '.join(sorted(theirs_too))} of a model with experts for the experts'; leave out "
                         "--adapter, which merges the adapters with the weights")
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
