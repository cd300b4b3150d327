"""LoRA: freeze the weights, and train two small matrices beside some linears (Hu et al.,
arXiv:2106.09685).

    y = W x + alpha / rank * B A x        W (out, in) frozen, A (rank, in) drawn, B (out, rank) starts at 0

An adapted linear keeps name, weight and place in the layout, and gets two children:
blocks.0.attn.wq.lora_a.weight and .lora_b.weight. Only the children have gradients and optimizer
state, and only the children are saved: a step folder holds adapters, and its state.json names the
frozen weights, the base.
"""

import hashlib
import json
import math
import os
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, distribute_tensor

from distributed.agree import gather
from distributed.layout import beside_weight, local_slice, local_tensor, named_tensors, with_forward
from storage.dcp import read_tensors
from support.config import Need, flag
from support.files import read_json

# Patterns for --exclude_from_loading that leave adapters alone
ADAPTERS = ("*.lora_a.weight", "*.lora_b.weight")
LORA = Need("without --lora_rank", lambda c: c.lora_rank)


@dataclass(kw_only=True)
class LoraConfig:
    # freeze all weights, and train two matrices of this rank beside some of them (LoRA); 0 = train
    # all
    lora_rank: int = 0
    lora_alpha: float = flag(32.0, LORA)  # adapters are scaled by lora_alpha / lora_rank
    # linears of the blocks that get adapters: names or patterns
    lora_on: list[str] = flag(["wq*", "w[kv]*", "wo"], LORA)


# ---------------------------------------------------------------- linears with adapters
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


def check_lora(model, cfg: LoraConfig) -> None:
    """Raises ValueError for a name in --lora_on that fits no linear of the full model's blocks."""
    if not cfg.lora_alpha > 0:
        raise ValueError(f"--lora_alpha {cfg.lora_alpha:g} must be above 0")
    if wrong := [pattern for pattern in cfg.lora_on or [""] if not lora_names(model, [pattern])]:
        known = ",".join(dict.fromkeys(fqn.rpartition(".")[2] for fqn in block_linears(model)))
        raise ValueError(
            f"--lora_on {wrong[0]}: only linears of the blocks get adapters, which are {known}"
        )


# ---------------------------------------------------------------- the layer
def lora_linears(stage, cfg: LoraConfig) -> None:
    """Freeze the parameters of a stage, and put adapters beside the linears of --lora_on.

    After tensor_parallel, because an adapter is split like the weight beside it; and after
    expert_parallel, because the experts get new parameters there. With --tp adapters cost no
    further message but the sum of their own small gradients:

        weight          A           B           a rank adds to y
        rows            whole       rows        its rows of B times all of A x
        columns         columns     whole       B times its summand of A x; the reduce-scatter of y adds the summands
        whole           whole       whole       B A x for its own tokens
    """
    names = lora_names(stage, cfg.lora_on)
    stage.requires_grad_(False)
    add_adapters(stage, names, cfg.lora_rank, cfg.lora_alpha)
    if cfg.pp > 1 and stage.index == 0 and not names:
        # A pipeline sends gradients back to the first stage, so torch requires that the output of
        # this stage has a gradient. Without an adapter on the stage nothing else would give the
        # output a gradient.
        stage.tok_embeddings.register_forward_hook(
            lambda module, args, out: out.requires_grad_(torch.is_grad_enabled())
        )


def add_adapters(module, names: list[str], rank: int, alpha: float) -> None:
    """Put adapters beside the linears of these names: split like the weights, on the same device,
    without values."""
    for linear in map(module.get_submodule, names):
        weight = linear.weight
        linear.lora_a = nn.Linear(linear.in_features, rank, bias=False, device=weight.device)
        linear.lora_b = nn.Linear(rank, linear.out_features, bias=False, device=weight.device)
        if isinstance(weight, DTensor):
            (cut,) = weight.placements
            for adapter, dim in (linear.lora_a, 1), (linear.lora_b, 0):
                placement = cut if cut.is_shard(dim) else Replicate()
                split = distribute_tensor(
                    adapter.weight, weight.device_mesh, [placement], src_data_rank=None
                )
                adapter.weight = nn.Parameter(split)
        # as wide as peft's kaiming_uniform_(a=sqrt(5))
        linear.lora_a.initial_std = 1 / math.sqrt(3 * linear.in_features)
        linear.lora_b.initial_std = 0.0  # new adapters change nothing
        linear.lora_scale, linear.__class__ = alpha / rank, with_forward(type(linear), Adapted)


class Adapted(nn.Linear):
    """A linear with adapters. The forward is a method of a class, because with a function per
    module the compiler would compile each module anew."""

    def forward(self, x):
        y, a, b = super().forward(x), self.lora_a.weight, self.lora_b.weight
        if not self.lora_scale:  # switched off: see base_model
            return y
        if not isinstance(a, DTensor):
            return y + F.linear(F.linear(x, a) * self.lora_scale, b)
        # Each tp rank multiplies its own parts. A whole A or B gets summands of its gradient: from
        # this rank's rows of B, from this rank's summand of A x, or from the rank's own tokens.
        # FSDP adds up the summands.
        cut, (x_grad, out) = self.weight.placements[0], beside_weight(x, self.weight)
        a_grad = cut if cut.is_shard(1) else Partial()
        b_grad = cut if cut.is_shard(0) else Partial()
        x, a, b = (
            t.to_local(grad_placements=[p]) for t, p in ((x, x_grad), (a, a_grad), (b, b_grad))
        )
        z = F.linear(F.linear(x, a) * self.lora_scale, b)
        return y + DTensor.from_local(z, y.device_mesh, [out], run_check=False)

    def merged(self, whole=lambda p: p):
        """W + s B A as one (out, in) matrix in fp32: see models.layers.weight_of. whole: gathers a
        parameter that tp or FSDP has split."""
        w, a, b = (whole(p) for p in (self.weight, self.lora_a.weight, self.lora_b.weight))
        assert not isinstance(w, DTensor), "a weight that tp has split"
        return merged_weight(w, a, b, self.lora_scale)


@contextmanager
def base_model(module):
    """Inside of the `with`, the adapters are switched off."""
    scales = {
        linear: linear.lora_scale for linear in module.modules() if isinstance(linear, Adapted)
    }
    for linear in scales:
        linear.lora_scale = 0.0
    try:
        yield
    finally:
        for linear, scale in scales.items():
            linear.lora_scale = scale


def merged_weight(w, a, b, scale: float):
    """W + scale * B A (out, in) in fp32, of whole matrices or of a rank's rows and columns."""
    return torch.addmm(w.float(), b.float(), a.float(), alpha=scale)


# --------------------------------------------------------------- the identity of the frozen weights
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


# ---------------------------------------------------------------- costs
def lora_counts(model, cfg) -> tuple[str, int]:
    """(text about LoRA for the start line, FLOPs per token) of a full model, before tp or FSDP
    split the weights.

    PaLM's convention of 6 FLOPs per weight is 2 for the forward, 2 for the gradient of the input
    and 2 for the gradient of the weight; a frozen weight has no gradient.
    """
    linears = {fqn: model.get_submodule(fqn) for fqn in lora_names(model, cfg.lora_on)}
    n = sum(
        cfg.lora_rank * (linear.in_features + linear.out_features) for linear in linears.values()
    )
    kinds = Counter(fqn.rpartition(".")[2] for fqn in linears)
    beside = ", ".join(f"{count} {name}" for name, count in kinds.items())
    text = f" + {n:,} in adapters beside {beside}, which alone are trained"
    return text, model.flops_per_token(cfg.seq_len) - model.flops_per_token(0) // 3 + 6 * n


# ---------------------------------------------------------------- files of adapters
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


def claim_adapters(cfg, Model, model_config) -> dict:
    """The identity of the adapters of a run with --lora_rank. Raises ValueError if the flags do not
    fit the model or --init_from."""
    if not cfg.init_from:
        raise ValueError(
            f"--lora_rank {cfg.lora_rank} trains beside weights that have learned; give "
            "--init_from FOLDER"
        )
    if not cfg.init_model_only:
        raise ValueError(
            "--no-init_model_only with --lora_rank: the optimizer there has state of frozen "
            "weights; leave it out"
        )
    if drawn := [pattern for pattern in cfg.exclude_from_loading if pattern != "optimizer"]:
        raise ValueError(
            f"--exclude_from_loading {','.join(drawn)} with --lora_rank would freeze random "
            "weights; leave it out"
        )
    with torch.device("meta"):
        model = Model(model_config)
    check_lora(model, cfg)
    # needed to continue a run, too: checkpoints hold adapters only
    if not os.path.isdir(cfg.init_from):
        raise ValueError(
            f"--init_from {cfg.init_from} is no folder; give the one of the frozen weights"
        )
    return {"rank": cfg.lora_rank, "alpha": cfg.lora_alpha, "on": list(cfg.lora_on)}
