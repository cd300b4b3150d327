"""Reads and writes LoRA adapters in peft's format: adapter_config.json names the base, a Hugging
Face folder of weights, and adapter_model.safetensors has the matrices A and B. evaluate.py,
generate.py and --init_from read such a folder as a model; --lora_from trains its adapters on; python
checkpoint.py to_hf --adapter writes one."""

import math
import os
import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from corpus.beside import read_hf_json
from distributed.agree import brief
from distributed.layout import local_slice, local_tensor, n_experts_of, named_tensors
from flags.files import json_bytes, publish, read_json, step_folders, write_file
from storage.adapters import block_linears, lora_names, merged_weight, read_adapters
from storage.hf_config import class_of
from storage.hf_files import open_safetensors
from storage.newest import ADAPTER, is_hf_folder
from storage.source_tokenizer import weights_folder

MATRICES = "adapter_model.safetensors"
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


def read_matrices(
    folder: str, names: Iterable[str], shape_of: Callable[[str], list[int]], owner: str
) -> dict[str, tuple[Tensor, Tensor, float]]:
    """{name of a weight: (A, B, scale)} of a folder of peft. names: of the weights that may have
    adapters, without ".weight"; shape_of: name -> [out, in]; owner: whose weights these are, for
    errors. Raises ValueError for all but plain LoRA, and for matrices that fit no weight."""
    about = read_hf_json(folder, ADAPTER)
    file = open_safetensors(folder, MATRICES)
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
    pairs = {}
    for linear in names:
        key_a = f"base_model.model.{linear}.lora_A.weight"
        key_b = f"base_model.model.{linear}.lora_B.weight"
        if key_a not in keys or key_b not in keys:
            continue
        a = file.get_tensor(key_a)  # (rank, in)
        b = file.get_tensor(key_b)  # (out, rank)
        fits_weight = [*shape_of(linear)] == [*b.shape[:1], *a.shape[1:]]
        if not fits_weight or not a.shape[:1] == b.shape[1:] != (0,):
            continue
        alpha = usual
        for end, of_end in patterns.items():
            if f".{linear}".endswith(f".{end}"):
                alpha = of_end
                break
        rank = len(a)
        if about.get("use_rslora"):
            pairs[linear] = a, b, alpha / math.sqrt(rank)
        else:
            pairs[linear] = a, b, alpha / rank
        keys -= {key_a, key_b}
    if keys:
        raise ValueError(
            f"{folder}: {brief(sorted(keys))}: no pair of LoRA matrices that fits {owner}"
        )
    return pairs


# --- An adapter merged into its base ---
def merge_adapters(source, folder: str) -> None:
    """Let the tensors of a base, `source` (storage.hf.HFTensors), be read with the adapters of a
    PEFT folder merged into the weights. Raises ValueError for adapters that do not fit the base."""

    def shape_of(linear):
        return source.handle(f"{linear}.weight").get_shape()

    names = [name.removesuffix(".weight") for name in source.where if name.endswith(".weight")]
    pairs = read_matrices(folder, names, shape_of, f"a weight of {source.folder}")
    adapters = {f"{linear}.weight": pair for linear, pair in pairs.items()}
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


# --- An adapter as the start of a training: --lora_from ---
def read_adapters_of(folder: str, model) -> dict[str, tuple[Tensor, Tensor, float]]:
    """{fqn of a linear: (A, B, scale)} of a folder of peft, for a whole model, which may be on meta.
    Raises ValueError."""
    keys = model.hf_keys()
    names = {}  # of a linear in the files -> fqn; stacks of experts are no linears
    for fqn in block_linears(model):
        names[keys[f"{fqn}.weight"].removesuffix(".weight")] = fqn

    def shape_of(name):
        return model.get_parameter(f"{names[name]}.weight").shape

    pairs = read_matrices(folder, names, shape_of, "the linears in the blocks of this model")
    return {names[name]: pair for name, pair in pairs.items()}


def check_adapters(
    folder: str, model, init_from: str, rank: int, alpha: float, on: list[str]
) -> None:
    """Raises ValueError unless the adapters of a folder of peft are those that the flags describe.
    model: whole, on meta; the other parameters are the flags of these names."""
    flag = f"--lora_from {folder}"
    missing = [name for name in (ADAPTER, MATRICES) if not os.path.exists(f"{folder}/{name}")]
    if missing:
        from flags.hints import hub_hint

        way = "give the folder that peft's save_pretrained() writes" + hub_hint(folder)
        if step_folders(folder) or os.path.exists(f"{folder}/manifest.json"):
            way = f"python checkpoint.py to_hf {folder} OUT --adapter writes one; give OUT"
        raise ValueError(f"{flag} has no {missing[0]}: {way}")
    if os.path.realpath(folder) == os.path.realpath(init_from):
        raise ValueError(
            f"{flag} is the folder of --init_from too, which would add these adapters twice; give "
            "the folder of the base: --init_from BASE"
        )
    pairs = read_adapters_of(folder, model)
    ranks = sorted({len(a) for a, _, _ in pairs.values()})
    alphas = sorted({round(scale * len(a), 6) for a, _, scale in pairs.values()})
    if len(ranks) != 1 or len(alphas) != 1:
        raise ValueError(
            f"{flag} has adapters of the ranks {ranks} with lora_alpha {alphas}, and one rank and "
            f"one alpha are trained here; --init_from {folder} merges them, and trains new ones"
        )
    chosen = lora_names(model, on)
    if ranks == [rank] and math.isclose(alphas[0], alpha, rel_tol=1e-6) and chosen == [*pairs]:
        return
    raise ValueError(
        f"{flag} has {len(pairs)} adapters, and not the {len(chosen)} of --lora_rank {rank} "
        f"--lora_alpha {alpha:g} --lora_on {','.join(on)}; give --lora_rank {ranks[0]} --lora_alpha "
        f"{alphas[0]:g} --lora_on {','.join(describe_linears(model, [*pairs]))}"
    )


def describe_linears(model, fqns: list[str]) -> list[str]:
    """The shortest value of --lora_on that chooses these linears: the last part of their names, if
    all linears of that name are meant, else the whole name."""
    names = []
    for fqn in fqns:
        last = fqn.rpartition(".")[2]
        if set(lora_names(model, [last])) <= set(fqns):
            names.append(last)
        else:
            names.append(fqn)
    return list(dict.fromkeys(names))


@torch.no_grad()
def fill_adapters(folder: str, modules: list) -> str:
    """Copy A and B of a folder of peft into this rank's parts of the adapters. Returns a line about
    the folder."""
    config = modules[0].config
    with torch.device("meta"):
        whole = class_of(config)(config)
    pairs = read_adapters_of(folder, whole)
    for module in modules:
        for fqn, p in named_tensors(module).items():
            linear, _, letter = fqn.removesuffix(".weight").rpartition(".lora_")
            if linear not in pairs:
                continue
            a, b, _ = pairs[linear]
            matrix = {"a": a, "b": b}[letter]
            (rows, columns), (row, column) = local_slice(p)
            part = matrix[row : row + rows, column : column + columns]
            local_tensor(p).copy_(part)
    about = read_hf_json(folder, ADAPTER)
    made_for = about.get("base_model_name_or_path") or "a base that it does not name"
    text = f"{len(pairs)} adapters begin as those of {folder}, which was made for {made_for}"
    if about.get("lora_dropout"):
        text += f"; its lora_dropout {about['lora_dropout']} is left out here"
    return text


# --- Adapters of ours, as a folder of peft ---
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
    files[MATRICES] = save(tensors, {"format": "pt"})
    for name, content in files.items():
        write_file(os.path.join(temporary, name), content)
    publish(temporary, out)
