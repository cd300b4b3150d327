"""The adapters of a LoRA run as they are saved: their names, the step folder that holds them, and the
identity of the frozen weights, the base. lora/lora.py has the layer."""

import hashlib
import json
import math
import os
from collections import Counter
from fnmatch import fnmatch

import torch
from torch import nn

from distributed.agree import gather
from distributed.layout import local_slice, local_tensor, named_tensors
from flags.files import read_json
from storage.dcp import read_tensors


def is_adapter(fqn: str) -> bool:
    return ".lora_a." in fqn or ".lora_b." in fqn


def is_frozen(fqn: str) -> bool:
    """Whether LoRA freezes a parameter: loaded from --init_from, so init_weights need not draw it."""
    return not is_adapter(fqn)


def lora_names(module, patterns: list[str]) -> list[str]:
    """fqns of the linears of a model, or of a pipeline stage, that get adapters: linears of the
    blocks whose fqn, or the last part of the fqn, fits a pattern of --lora_on."""
    ends = {fqn: (fqn, fqn.rpartition(".")[2]) for fqn in block_linears(module)}
    return [
        fqn
        for fqn in ends
        if any(fnmatch(end, pattern) for end in ends[fqn] for pattern in patterns)
    ]


def block_linears(module) -> list[str]:
    found = [
        fqn
        for fqn, m in module.named_modules()
        if isinstance(m, nn.Linear) and fqn.startswith("blocks.")
    ]
    return [fqn for fqn in found if not is_adapter(f"{fqn}.")]


def merged_weight(w, a, b, scale: float):
    """W + scale * B A (out, in) in fp32, of whole matrices or of a rank's rows and columns."""
    return torch.addmm(w.float(), b.float(), a.float(), alpha=scale)


@torch.no_grad()
def base_hash(modules, group=None) -> str:
    """A hash of all frozen weights, equal in every layout and on every device: per tensor the sum
    of the bits of each number in bfloat16 times its place, modulo 2**64. Every rank reads its
    shards once.

    In bfloat16, because the weights are kept in the compute dtype: fp32 on one machine, bfloat16 on
    the next.
    """
    frozen = [
        (fqn, t) for module in modules for fqn, t in named_tensors(module).items() if is_frozen(fqn)
    ]
    mine, sums = {(fqn, local_slice(t)): placed_sum(t) for fqn, t in frozen}, Counter()
    for (fqn, _), value in {
        key: value for part in gather(mine, group) for key, value in part.items()
    }.items():
        sums[fqn] += value
    return hashlib.sha256(
        json.dumps({fqn: sums[fqn] % 2**64 for fqn in sorted(sums)}).encode()
    ).hexdigest()[:16]


def placed_sum(t) -> int:
    """Sum of bits * (1 + place in the whole tensor) over this rank's part of a tensor, modulo
    2**64."""
    (shape, offset), whole = local_slice(t), tuple(t.shape)
    # place within a row of the first dimension
    columns = torch.zeros(1, dtype=torch.int64, device=local_tensor(t).device)
    for n, first, size in zip(shape[1:], offset[1:], whole[1:], strict=True):
        columns = (
            columns[:, None] * size + torch.arange(first, first + n, device=columns.device)
        ).flatten()
    local, total = (
        local_tensor(t.detach()),
        torch.zeros((), dtype=torch.int64, device=columns.device),
    )
    for i, rows in enumerate(local.reshape(len(local), math.prod(shape[1:])).split(256)):
        first = offset[0] + 256 * i
        starts = torch.arange(first, first + len(rows), device=columns.device) * math.prod(
            whole[1:]
        )
        bits = rows.to(torch.bfloat16).view(torch.int16).long()
        total += (bits.sum(1) * starts).sum() + (bits.sum(0) * (columns + 1)).sum()
    return total.item()


def lora_of(path: str) -> dict:
    """rank, alpha and on of the adapters in a step folder of a LoRA run."""
    return read_json(path, "state.json")["identity"]["lora"]


def read_adapters(table, path: str) -> dict[str, torch.Tensor]:
    """{fqn: the whole tensor}: adapters are small."""
    found = {
        key: torch.empty(kind.size, dtype=kind.dtype)
        for key, kind in table.items()
        if key.startswith("model.")
    }
    read_tensors(found, path, table)
    return {key.removeprefix("model."): t for key, t in found.items()}


def base_of(path: str) -> str:
    """Folder of the frozen weights below a step folder. Raises ValueError if the folder is gone."""
    folder = read_json(path, "state.json")["base"]["folder"]
    if not os.path.isdir(folder):
        raise ValueError(
            f"{path} holds adapters of {folder}, which is gone; continue the run with --init_from "
            "NEW_PLACE"
        )
    return folder


def check_base(path: str, modules: list[nn.Module], group=None) -> str:
    """The hash of the frozen weights of the modules. Raises ValueError if the adapters of a step
    folder were trained with other weights. path: the step folder; "": none."""
    found, there = base_hash(modules, group), read_json(path, "state.json")["base"] if path else {}
    if there.get("hash", found) != found:
        raise ValueError(
            f"{path} holds adapters of {there['folder']}, whose hash was {there['hash']}, and the "
            "frozen weights "
            f"have {found} now; give the weights of the training with --init_from"
        )
    return found


@torch.no_grad()
def add_adapters_of(path: str, table, modules: list[nn.Module]):
    """Add a step folder's adapters to the weights of a whole model, or to this rank's rows and
    columns of each weight."""
    adapters, scale = read_adapters(table, path), lora_of(path)["alpha"] / lora_of(path)["rank"]
    for fqn, p in [item for module in modules for item in module.named_parameters()]:
        name = fqn.removesuffix(".weight")
        if (a := adapters.get(f"{name}.lora_a.weight")) is not None:
            local, (shape, (row, column)) = local_tensor(p), local_slice(p)
            a = a[:, column : column + shape[1]].to(local.device)
            b = adapters[f"{name}.lora_b.weight"][row : row + shape[0]].to(local.device)
            local.copy_(merged_weight(local, a, b, scale))
