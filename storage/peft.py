"""Reads and writes LoRA adapters in peft's format: adapter_config.json names the base, a Hugging
Face folder of weights, and adapter_model.safetensors has the matrices A and B. evaluate.py,
generate.py and --init_from read such a folder as a model; python checkpoint.py to_hf --adapter
writes one."""

import math
import os
import re
from functools import partial
from typing import Any

from safetensors.torch import save
from torch import Tensor, nn

from corpus.beside import read_hf_json
from distributed.agree import brief
from distributed.layout import n_experts_of
from flags.files import json_bytes, publish, read_json, write_file
from storage.adapters import merged_weight, read_adapters
from storage.newest import ADAPTER, is_hf_folder
from storage.source_tokenizer import weights_folder

# Fields of adapter_config.json that do not change what A and B compute: the shape of A tells the
# rank of a linear
HARMLESS = set(
    """
    alpha_pattern auto_mapping base_model_name_or_path ensure_weight_tying eva_config exclude_modules fan_in_fan_out
    inference_mode layers_pattern layers_to_transform lora_alpha lora_dropout megatron_core modules_to_save peft_version
    qalora_group_size r rank_pattern revision runtime_config target_modules task_type use_rslora
""".split()
)
# Names of linears that peft takes for weights of experts
EXPERTS = {"gate_proj", "up_proj", "down_proj"}
# Fields that do change what A and B compute, with the values that mean plain LoRA
PLAIN = {
    "peft_type": ["LORA"],
    "bias": ["none"],
    "init_lora_weights": [True, "gaussian", "eva", "orthogonal"],
}


def merge_adapters(source, folder: str, file) -> None:
    """Let the tensors of a base, `source` (storage.hf.HFTensors), be read with the adapters of a
    PEFT folder merged into the weights. file: adapter_model.safetensors, opened. Raises ValueError
    for all but plain LoRA, and for adapters that do not fit the base."""
    about = read_hf_json(folder, ADAPTER)
    patterns = about.get("alpha_pattern") or {}
    usual: Any = about.get("lora_alpha")
    odd = []
    for name, value in about.items():
        if value and name not in HARMLESS and value not in PLAIN.get(name, []):
            odd.append(f"{name} {value}")
    # peft reads the keys of alpha_pattern as regular expressions; we read plain names only
    is_plain = isinstance(patterns, dict) and all(re.fullmatch(r"[\w.]+", end) for end in patterns)
    if not is_plain or not {type(alpha) for alpha in (usual, *patterns.values())} <= {int, float}:
        odd.append(f"lora_alpha {usual}, alpha_pattern {patterns}")
    if odd:
        raise ValueError(
            f"{folder}/{ADAPTER} has {brief(odd)}, and only plain LoRA is read here; "
            "merge_and_unload() of peft "
            "merges the adapter with its base"
        )
    keys = set(file.keys())  # of matrices that fit no weight
    adapters = {}
    for name in source.where:
        linear = name.removesuffix(".weight")
        key_a = f"base_model.model.{linear}.lora_A.weight"
        key_b = f"base_model.model.{linear}.lora_B.weight"
        if key_a not in keys or key_b not in keys:
            continue
        a = file.get_tensor(key_a)  # (rank, in)
        b = file.get_tensor(key_b)  # (out, rank)
        fits_weight = source.handle(name).get_shape() == [*b.shape[:1], *a.shape[1:]]
        if not fits_weight or not a.shape[:1] == b.shape[1:] != (0,):
            continue
        alpha = usual
        for end, of_end in patterns.items():
            if f".{linear}".endswith(f".{end}"):
                alpha = of_end
                break
        rank = len(a)
        if about.get("use_rslora"):
            adapters[name] = a, b, alpha / math.sqrt(rank)
        else:
            adapters[name] = a, b, alpha / rank
        keys -= {key_a, key_b}
    if keys:
        raise ValueError(
            f"{folder}: {brief(sorted(keys))}: no pair of LoRA matrices that fits a weight of "
            f"{source.folder}"
        )
    source.read = partial(read_merged, source.read, adapters)


def read_merged(read, adapters: dict[str, tuple], name: str, offset: tuple, shape: tuple) -> Tensor:
    """The part of a tensor as by HFTensors.read, with the adapters of this weight. adapters: {name:
    (A, B, scale)}."""
    part = read(name, offset, shape)
    if name not in adapters:
        return part
    a, b, scale = adapters[name]
    row, column = offset
    rows, columns = shape
    return merged_weight(part, a[:, column : column + columns], b[row : row + rows], scale)


def export_peft(
    out: str, path: str, table: dict, model: nn.Module, beside: dict[str, bytes]
) -> None:
    """Write the adapters of a step folder to the folder `out`. path, table: the step folder and its
    tensors; beside: {name: content} of the tokenizer's files."""
    about = read_json(path, "state.json")
    adapters = read_adapters(table, path)
    lora = about["identity"]["lora"]
    base = about["base"]["folder"]
    # peft reads no run of ours, nor two adapters
    if not is_hf_folder(base) or base != weights_folder(base):
        base = ""
    write_peft(out, adapters, lora["rank"], lora["alpha"], model, base, beside)
    print(
        f"checkpoint: exported {out} ({len(adapters)} tensors of adapters; the weights below "
        f"them: {base or 'not named'})"
    )


def write_peft(
    out: str, adapters: dict[str, Tensor], rank: int, alpha: float, model, base: str, beside: dict
) -> None:
    """Write adapters {fqn: whole tensor} to the folder `out`, in peft's format. model: has
    hf_keys(), and may be on meta; base: the folder of the weights below, "": not named; beside: see
    export_peft."""
    names = model.hf_keys()
    tensors = {}
    chosen = set()  # the linears, by their names in the files
    for fqn, t in adapters.items():
        linear, _, letter = fqn.removesuffix(".weight").rpartition(".lora_")
        name = names[f"{linear}.weight"].removesuffix(".weight")
        chosen.add(name)
        tensors[f"base_model.model.{name}.lora_{letter.upper()}.weight"] = t.contiguous()
    odd = {name.rpartition(".")[2] for name in chosen} & EXPERTS
    if odd and n_experts_of(model.config):
        raise ValueError(
            f"peft takes {brief(sorted(odd))} for weights of experts; leave out --adapter or "
            "--engine_adapters"
        )
    config = dict(
        peft_type="LORA",
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
        r=rank,
        lora_alpha=alpha,
        target_modules=sorted(chosen),
        bias="none",
        lora_dropout=0.0,
        fan_in_fan_out=False,
        use_rslora=False,
        use_dora=False,
        init_lora_weights=True,
        modules_to_save=None,
        inference_mode=True,
    )
    temporary = f"{os.path.abspath(out)}.tmp-{os.getpid()}"
    os.makedirs(temporary)
    files = dict(beside)
    files[ADAPTER] = json_bytes(config)
    files["adapter_model.safetensors"] = save(tensors, {"format": "pt"})
    for name, content in files.items():
        write_file(os.path.join(temporary, name), content)
    publish(temporary, out)
