"""The checkpoints of LoRA runs: a step folder holds adapters, and its state.json names the frozen weights, the base."""
import os

import torch
from torch import Tensor, nn

from distributed.layout import local_slice, local_tensor
from sft.lora import base_hash, lora_names, merged_weight
from storage.dcp import read_tensors
from support.files import read_json


def lora_of(path: str) -> dict:
    """rank, alpha and on of the adapters in a step folder of a LoRA run."""
    return read_json(path, "state.json")["identity"]["lora"]


def adapter_names(path: str, model) -> list[str]:
    """fqns of the adapters in a step folder, for this model."""
    return [f"{name}.lora_{x}.weight" for name in lora_names(model, lora_of(path)["on"]) for x in "ab"]


def read_adapters(table, path: str) -> dict[str, Tensor]:
    """{fqn: the whole tensor}: adapters are small."""
    found = {key: torch.empty(kind.size, dtype=kind.properties.dtype) for key, kind in table.state_dict_metadata.items()
             if key.startswith("model.")}
    read_tensors(found, path, table)
    return {key.removeprefix("model."): t for key, t in found.items()}


def base_of(path: str) -> str:
    """Folder of the frozen weights below a step folder. Raises ValueError if the folder is gone."""
    folder = read_json(path, "state.json")["base"]["folder"]
    if not os.path.isdir(folder):
        raise ValueError(f"{path} holds adapters of {folder}, which is gone: put it back there, or continue the run with "
                         "--init_from its new place and --export_hf")
    return folder


def check_base(path: str, modules: list[nn.Module], group=None) -> str:
    """The hash of the frozen weights of the modules. Raises ValueError if the adapters of a step folder were trained with other
    weights. path: the step folder; "": none."""
    found, there = base_hash(modules, group), read_json(path, "state.json")["base"] if path else {}
    if there.get("hash", found) != found:
        raise ValueError(f"{path} holds adapters of {there['folder']}, whose hash was {there['hash']}, and the frozen weights "
                         f"have {found} now, so these are other weights; give those that it was trained on with --init_from")
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
