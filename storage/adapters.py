"""The adapters of a LoRA run as they are saved: their names, the step folder that holds them, and the
identity of the frozen weights, the base. lora/lora.py has the layer."""

import hashlib
import json
import math
import os
from collections import Counter
from fnmatch import fnmatch

import torch
import torch.distributed as dist
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


def lora_names(module: nn.Module, patterns: list[str]) -> list[str]:
    """fqns of the linears of a model, or of a pipeline stage, that get adapters: linears of the
    blocks whose fqn, or the last part of the fqn, fits a pattern of --lora_on."""
    found = []
    for fqn in block_linears(module):
        ends = (fqn, fqn.rpartition(".")[2])
        if any(fnmatch(end, pattern) for end in ends for pattern in patterns):
            found.append(fqn)
    return found


def block_linears(module: nn.Module) -> list[str]:
    found = []
    for fqn, m in module.named_modules():
        if isinstance(m, nn.Linear) and fqn.startswith("blocks.") and not is_adapter(f"{fqn}."):
            found.append(fqn)
    return found


def merged_weight(w: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """W + scale * B A (out, in) in fp32, of whole matrices or of a rank's rows and columns."""
    return torch.addmm(w.float(), b.float(), a.float(), alpha=scale)


@torch.no_grad()
def base_hash(modules: list[nn.Module], group: dist.ProcessGroup | None = None) -> str:
    """A hash of all frozen weights, equal in every layout and on every device: per tensor the sum
    of the bits of each number in bfloat16 times its place, modulo 2**64. Every rank reads its
    shards once.

    In bfloat16, because the weights are kept in the compute dtype: fp32 on one machine, bfloat16 on
    the next.
    """
    own_sums = {}
    for module in modules:
        for fqn, t in named_tensors(module).items():
            if is_frozen(fqn):
                own_sums[fqn, local_slice(t)] = placed_sum(t)
    parts = {}  # a part that several ranks hold counts once
    for of_rank in gather(own_sums, group):
        parts |= of_rank
    sums = Counter()
    for (fqn, _), value in parts.items():
        sums[fqn] += value
    text = json.dumps({fqn: sums[fqn] % 2**64 for fqn in sorted(sums)})
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def placed_sum(t: torch.Tensor) -> int:
    """Sum of bits * (1 + place in the whole tensor) over this rank's part of a tensor, modulo
    2**64."""
    shape, offset = local_slice(t)
    whole = tuple(t.shape)
    local = local_tensor(t.detach())
    device = local.device
    # place within a row of the first dimension
    columns = torch.zeros(1, dtype=torch.int64, device=device)
    for n, first, size in zip(shape[1:], offset[1:], whole[1:], strict=True):
        along = torch.arange(first, first + n, device=device)
        columns = (columns[:, None] * size + along).flatten()
    total = torch.zeros((), dtype=torch.int64, device=device)
    n_columns = math.prod(whole[1:])
    for i, rows in enumerate(local.reshape(len(local), math.prod(shape[1:])).split(256)):
        first = offset[0] + 256 * i
        starts = torch.arange(first, first + len(rows), device=device) * n_columns
        bits = rows.to(torch.bfloat16).view(torch.int16).long()
        total += (bits.sum(1) * starts).sum() + (bits.sum(0) * (columns + 1)).sum()
    return int(total.item())


def lora_of(path: str) -> dict:
    """rank, alpha and on of the adapters in a step folder of a LoRA run."""
    return read_json(path, "state.json")["identity"]["lora"]


def read_adapters(table: dict, path: str) -> dict[str, torch.Tensor]:
    """{fqn: the whole tensor}: adapters are small."""
    found = {}
    for key, kind in table.items():
        if key.startswith("model."):
            found[key] = torch.empty(kind.size, dtype=kind.dtype)
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


def check_base(path: str, modules: list[nn.Module], group: dist.ProcessGroup | None = None) -> str:
    """The hash of the frozen weights of the modules. Raises ValueError if the adapters of a step
    folder were trained with other weights. path: the step folder; "": none."""
    found = base_hash(modules, group)
    there = read_json(path, "state.json")["base"] if path else {}
    if there.get("hash", found) != found:
        raise ValueError(
            f"{path} holds adapters of {there['folder']}, whose hash was {there['hash']}, and the "
            "frozen weights "
            f"have {found} now; give the weights of the training with --init_from"
        )
    return found


@torch.no_grad()
def add_adapters_of(path: str, table: dict, modules: list[nn.Module]) -> None:
    """Add a step folder's adapters to the weights of a whole model, or to this rank's rows and
    columns of each weight."""
    adapters = read_adapters(table, path)
    lora = lora_of(path)
    scale = lora["alpha"] / lora["rank"]
    for module in modules:
        for fqn, p in module.named_parameters():
            name = fqn.removesuffix(".weight")
            a = adapters.get(f"{name}.lora_a.weight")
            if a is None:
                continue
            local = local_tensor(p)
            shape, (row, column) = local_slice(p)
            a = a[:, column : column + shape[1]].to(local.device)
            b = adapters[f"{name}.lora_b.weight"][row : row + shape[0]].to(local.device)
            local.copy_(merged_weight(local, a, b, scale))


def check_frozen(
    lora_rank: int, init_from: str, init_model_only: bool, exclude_from_loading: list[str]
) -> None:
    """Raises ValueError if a run with --lora_rank would freeze weights that have not learned. The
    parameters are the flags of these names."""
    if not init_from:
        raise ValueError(
            f"--lora_rank {lora_rank} trains beside weights that have learned; give "
            "--init_from FOLDER"
        )
    if not init_model_only:
        raise ValueError(
            "--no-init_model_only with --lora_rank: the optimizer there has state of frozen "
            "weights; leave it out"
        )
    drawn = [pattern for pattern in exclude_from_loading if pattern != "optimizer"]
    if drawn:
        raise ValueError(
            f"--exclude_from_loading {','.join(drawn)} with --lora_rank would freeze random "
            "weights; leave it out"
        )
    # needed to continue a run, too: checkpoints hold adapters only
    if not os.path.isdir(init_from):
        raise ValueError(
            f"--init_from {init_from} is no folder; give the one of the frozen weights"
        )
