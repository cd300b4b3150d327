"""The checkpoints of LoRA runs: they hold adapters, and name the weights below them."""
import os
import shlex

import torch
from torch import Tensor, nn

from distributed.layout import AXES, Layout, ParallelConfig, local_slice, local_tensor
from distributed.lora import merged_weight
from parallel import init_weights
from support.dcp import read_tensors
from support.files import read_json
from support.manifest import ABOUT, is_hf_folder, newest_readable


def lora_of(path: str) -> dict | None:
    """rank, alpha and on of the adapters that a step folder holds; None where it holds a whole model."""
    return read_json(path, "state.json")["identity"].get("lora")


def read_adapters(table, path: str) -> dict[str, Tensor]:
    """{fqn: the whole tensor}: adapters are small."""
    found = {key: torch.empty(kind.size, dtype=kind.properties.dtype) for key, kind in table.state_dict_metadata.items()
             if key.startswith("model.")}
    read_tensors(found, path, table)
    return {key.removeprefix("model."): t for key, t in found.items()}


def known_base(path: str) -> str:
    """Where the weights below the adapters of a step folder were when the run began; "" where its seed drew them. Raises
    ValueError where they are gone."""
    folder = read_json(path, "state.json")["base"]["folder"]
    if folder and not os.path.isdir(folder):
        raise ValueError(f"{path} holds adapters of {folder}, which is gone: put it back there, or continue the run with "
                         "--init_from its new place and --export_hf")
    return folder


def drawn_base(path: str) -> str:
    return (f"{path} holds adapters of what its seed drew, which only one process draws again; merge them first: python "
            f"checkpoint.py to_hf {path} OUT --dtype float32")


def base_of(path: str, modules: list[nn.Module]) -> str:
    """known_base, and where a seed drew the weights they are in `modules` afterwards, drawn again. Raises ValueError."""
    folder, plain = known_base(path), modules[0]
    if not folder:
        if len(modules) > 1 or any(hasattr(p, "placements") for p in plain.parameters()):
            raise ValueError(drawn_base(path))
        layout = Layout(ParallelConfig(), dict.fromkeys(AXES, 1), 1, 1, 1, next(plain.parameters()).device)
        init_weights(plain, layout, read_json(path, "config.json")["seed"])
    return folder


def hf_base_of(path: str) -> str:
    """The Hugging Face folder below the adapters of a step folder; "" where it is none."""
    folder = read_json(path, "state.json")["base"]["folder"]
    return folder if is_hf_folder(folder) else ""


def base_again(out: str, step: int, folder: str) -> str:
    """Where the weights are below the adapters of the run `out`, which goes on from `step` with those of `folder`: if that is a
    run that has been trained on since, in the checkpoint that the adapters began with, as long as it is there."""
    known = read_json(newest_readable(out, step, ABOUT), "state.json")["base"]["folder"]
    is_of_run = bool(known) and os.path.dirname(os.path.dirname(known)) == os.path.abspath(folder)
    return known if is_of_run and os.path.isdir(known) else folder


def check_base(path: str, base: dict):
    """Raises ValueError unless the adapters of a step folder were trained on this base."""
    there = read_json(path, "state.json")["base"]
    if there["hash"] != base["hash"]:
        names = [known["folder"] or "what --seed draws" for known in (there, base)]
        raise ValueError(f"{path} holds adapters of {names[0]}, whose hash was {there['hash']}; {names[1]} has {base['hash']} "
                         "now, so these are other weights; give those that it was trained on")


def rounded_base(run: str, lora: dict, base: dict, params: dict[str, Tensor], dtype: str) -> str:
    """What --export_hf says where it merges the adapters of `run` with weights that have fewer digits than the --export_dtype
    that was asked for; "" where it need not."""
    kept = {p.dtype for p in params.values() if not p.requires_grad and p.element_size() < getattr(torch, dtype).itemsize}
    if lora.get("nf4"):
        digits = "4 bits (--lora_nf4)"
    elif kept:
        digits = f"the digits of {str(kept.pop())[6:]}"
    else:
        return ""
    return (f"the weights below the adapters are exported with {digits}, as training saw them; "
            f"python checkpoint.py to_hf {shlex.quote(run)} OUT --dtype {dtype} takes them from "
            f"{base['folder'] or 'the seed'} in full")


@torch.no_grad()
def add_adapters_of(path: str, table, modules: list[nn.Module]):
    """Adds a step folder's adapters to the weights of a model, plain or this rank's part of it: its rows and columns."""
    adapters, scale = read_adapters(table, path), lora_of(path)["alpha"] / lora_of(path)["rank"]
    for fqn, p in [item for module in modules for item in module.named_parameters()]:
        name = fqn.removesuffix(".weight")
        if (a := adapters.get(f"{name}.lora_a.weight")) is not None:
            local, (shape, (row, column)) = local_tensor(p), local_slice(p)
            a = a[:, column : column + shape[1]].to(local.device)
            b = adapters[f"{name}.lora_b.weight"][row : row + shape[0]].to(local.device)
            local.copy_(merged_weight(local, a, b, scale))
