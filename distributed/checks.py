"""Checks on a built model and running processes: the model's tables fit the model, memory holds the
training state, and all ranks have the same weights and data."""

import fnmatch
import os
import socket
import sys
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.dropout import _DropoutNd

from distributed.agree import brief, gather, holds_on_any_rank
from distributed.initial import constants_of, initial_values
from distributed.layout import Layout, local_slice, local_tensor
from models.layers import takes_places
from models.loss import IGNORE

DROPOUT = "use models.dropout.dropout, see 'Random numbers' in docs/fork_me.md"


def check_model(
    model: nn.Module,
    layout: Layout,
    styles: Mapping[str, Any],
    ac: str,
    param_dtype: str,
    optimizer: str = "",
) -> None:
    """Check the tables of the full model before memory is taken. Raises ValueError for a pattern of
    tp_plan or init_constants without a match, for a style missing in parallel.TP_STYLES, for a
    parameter or buffer without an initial value, and for a model beyond memory. ac, param_dtype,
    optimizer: the flags."""
    check_tp_plan(model, styles)
    names = [fqn for fqn, _ in [*model.named_parameters(), *model.named_buffers()]]
    constants = constants_of(model)
    for pattern in constants:
        if not fnmatch.filter(names, pattern):
            raise ValueError(
                f"init_constants: pattern {pattern!r} matches no parameter or buffer of "
                f"{type(model).__name__}"
            )
    initial_values(model)
    # torch counts the changes of a tensor. Its modules fill a parameter once, but
    # nn.MultiheadAttention this bias twice.
    fills = Counter()
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            fills[f"{name}.out_proj.bias"] = 1
    for fqn, p in model.named_parameters():
        fills[fqn] += 1
        is_constant = any(fnmatch.fnmatch(fqn, pattern) for pattern in constants)
        if p._version > fills[fqn] and not is_constant:
            raise ValueError(
                f"{fqn} is filled in a constructor, where no memory is: the values are lost. Give "
                "a number in "
                "init_constants, or a standard deviation in init_std, of class "
                f"{type(model).__name__} instead; "
                "leave out a padding_idx, whose zeros are lost, too"
            )
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            raise ValueError(
                f"{fqn} has a hook from a constructor, which nothing would call: FSDP and tp make "
                "parameters of "
                "their own; change the gradient in a forward, or between clip_grad_norm and the "
                "optimizer's step"
            )
    check_random(model)
    check_owners(model, layout)
    if takes_places(model) and layout.pp > 1 and ac != "none":
        raise ValueError(
            f"--ac {ac} with --pp {layout.pp} would recompute a block with the places of a "
            "later micro-batch, "
            "and so with another dropout; use --ac none"
        )
    check_memory(model, layout, param_dtype, optimizer)


def check_documents(model: nn.Module, layout: Layout) -> None:
    """With --doc_mask, rank 0 names the blocks that do not call attend: the mask changes nothing in
    such a block."""
    if layout.rank > 0:
        return
    from distributed.doc_mask_check import blocks_without_attend  # only --doc_mask needs the file

    names = blocks_without_attend(model)
    if names:
        print(
            f"--doc_mask does nothing in {brief(names)}: they do not call attend, so what else "
            "mixes tokens mixes documents"
        )


def check_tp_plan(model, styles: Mapping[str, Any]) -> None:
    """Every pattern of the plan must name a module of the full model: a misspelt one would silently
    leave a layer unsharded."""
    names = [n for n, _ in model.named_modules()]
    for pattern, style in model.tp_plan().items():
        if style not in styles:
            raise ValueError(
                f"tp_plan: {pattern!r} asks for style {style!r}; parallel.TP_STYLES has "
                f"{', '.join(styles)}"
            )
        if not fnmatch.filter(names, pattern):
            raise ValueError(
                f"tp_plan: pattern {pattern!r} matches no module of {type(model).__name__}"
            )


def check_random(model: nn.Module) -> None:
    """Raises ValueError for a module that draws from a generator: every data rank would draw the
    same numbers, activation checkpointing others in the backward, a layout and a continued run
    others again, and validation would draw, too."""
    for name, module in model.named_modules():
        if any(isinstance(value, torch.Generator) for value in vars(module).values()):
            raise ValueError(
                f"{name or 'the model'} has a generator, and no checkpoint holds its state; "
                f"{DROPOUT}"
            )
        draws = False
        if isinstance(module, _DropoutNd):
            draws = module.p > 0
        elif isinstance(module, (nn.MultiheadAttention, nn.RNNBase)):
            draws = module.dropout > 0
        if draws:
            raise ValueError(
                f"{name} is {type(module).__name__}, whose numbers depend on the layout and on "
                f"--ac; {DROPOUT}"
            )


def check_owners(model: nn.Module, layout: Layout) -> None:
    """Raises ValueError for a parameter that two modules hold, on several processes: FSDP, tp and
    pp split modules one by one. (A tied head is no module: the loss reads the embedding's weight.)
    """
    if layout.world_size == 1:
        return
    first = {}  # parameter -> its first name
    for fqn, p in model.named_parameters(remove_duplicate=False):
        other = first.setdefault(p, fqn)
        if other != fqn:
            raise ValueError(
                f"{fqn} is {other}: no layout can split a parameter that two modules hold; call "
                "one module twice"
            )


def check_memory(model: nn.Module, layout: Layout, param_dtype: str, optimizer: str) -> None:
    """Raise ValueError with the numbers if parameters, gradients and moments alone, shared evenly
    by all processes, exceed the memory of a device or host. A lower bound: activations, buffers and
    an uneven split come on top."""
    size = getattr(torch, param_dtype).itemsize
    total = Counter()
    for fqn, p in model.named_parameters():
        if not p.requires_grad:
            total["parameters"] += p.numel() * layout.compute_dtype.itemsize
            continue
        total["parameters"] += p.numel() * size
        total["gradients"] += p.numel() * size
        moment_size = size
        if optimizer == "adamw_bf16_moments":
            moment_size = 2
        total["moments"] += p.numel() * moment_size * moments_of(optimizer, fqn, p)
    sharers = 1
    if layout.device.type == "cpu" or layout.offload:
        where = "a host"
        offload = ""
        has = host_memory()
        sharers = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    else:
        where = "each device"
        offload = "--cpu_offload, "
        has = torch.cuda.get_device_properties(layout.device).total_memory
    each = sharers * layout.dp_replicate / layout.world_size
    needs = sum(total.values()) * each
    if needs > has:
        parts = " + ".join(f"{kind} {n * each / 1e9:.1f}" for kind, n in total.items() if n)
        raise ValueError(
            f"{where} would need at least {needs / 1e9:.1f} GB ({parts}), and there are "
            f"{has / 1e9:.1f} GB; use "
            f"more processes with --dp_shard, --tp or --pp, {offload}or a smaller --flavor; see "
            "--dry_run"
        )


def moments_of(optimizer: str, fqn: str, p: Tensor) -> int:
    """How many numbers the optimizer keeps for each number of a parameter; 0 if unknown."""
    if optimizer == "muon" and p.dim() > 1 and fqn.startswith("blocks."):
        return 1
    if optimizer in ("adamw", "adamw_sr", "adamw_bf16_moments", "muon"):
        return 2
    return 0


def host_memory() -> int:
    """Bytes for all processes of the host together: memory, or a control group's limit (version 2),
    and swap."""
    try:
        sizes = dict(line.split()[:2] for line in Path("/proc/meminfo").read_text().splitlines())
        memory = int(sizes["MemTotal:"]) * 1024
        swap = int(sizes["SwapTotal:"]) * 1024
        group = Path("/proc/self/cgroup").read_text().strip().rpartition(":")[2]
        folder = Path("/sys/fs/cgroup" + group)
    except (OSError, KeyError):  # no Linux: nothing is refused
        return sys.maxsize
    for place in (folder, *folder.parents):
        # a container sees its own folders only; "max" is no limit
        with suppress(OSError, ValueError):
            memory = min(memory, int((place / "memory.max").read_text()))
    return memory + swap


def check_replicas(stages: Sequence[nn.Module], layout: Layout, **values: Any) -> list[tuple]:
    """Compare the ranks that hold the same part of a parameter, and `values` on all ranks.

    Raises ValueError on all ranks with the first difference and its ranks. Runs once: a wrong seed
    or file on one node is found at the start, not a week later. The ranks exchange one number per
    parameter; only after a difference, names. Returns (fqn, parameter, bits_sum) of the trained
    parameters, for Guard.
    """
    start = [(fqn, p, bits_sum(p)) for stage in stages for fqn, p in stage.named_parameters()]
    known = {}
    for name, value in values.items():  # a dict field by field, so that the message names the flag
        if isinstance(value, dict):
            for field, x in value.items():
                known[f"{name} {field}".strip(), 0] = repr(x)
        else:
            known[name, 0] = repr(value)
    # ranks that must agree: numbers
    groups = {dist.group.WORLD: [zlib.crc32(repr(known).encode())]}
    for _, p, total in start:
        if not isinstance(p, DTensor):
            continue
        for i, placement in enumerate(p.placements):
            if placement.is_replicate() and p.device_mesh.size(i) > 1:
                groups.setdefault(p.device_mesh.get_group(i), []).append(total)
    found = False
    for group, numbers in groups.items():  # every group, after a difference, too: all ranks join in
        if differ(numbers, group, layout.device):
            found = True
    if holds_on_any_rank(found, dist.group.WORLD):
        known |= {(fqn, local_slice(p)): total for fqn, p, total in start}
        raise_first_difference(known)
    return [(fqn, p, total) for fqn, p, total in start if p.requires_grad]


def raise_first_difference(known: dict) -> None:
    """Raise ValueError, on all ranks, for the first value that differs between ranks. known:
    {(name, part): this rank's value}."""
    everyone = gather((socket.gethostname(), known), dist.group.WORLD)
    first = {}
    for rank, (host, theirs) in enumerate(everyone):
        for key, value in theirs.items():
            owner, expected = first.setdefault(key, (rank, value))
            if value != expected:
                where = f"ranks {owner} and {rank} ({everyone[owner][0]}, {host})"
                raise ValueError(
                    f"{key[0]} differs between {where}: same seed, flags, files on every node?"
                )


def differ(numbers: list[int], group: dist.ProcessGroup | None, device: torch.device) -> bool:
    """Whether any of the numbers is not equal on all ranks of the group."""
    own = torch.tensor(numbers, device=device)
    both = torch.stack([own, -own])
    dist.all_reduce(both, dist.ReduceOp.MAX, group)  # the highest, and minus the lowest
    return not torch.equal(both[0], -both[1])


@torch.no_grad()
def bits_sum(p: Tensor) -> int:
    """A checksum of the rank's part of a parameter; every bit counts, and every place."""
    total = 0
    flat = local_tensor(p).contiguous().flatten()
    words = flat.view(torch.int16) if flat.element_size() > 1 else flat.to(torch.int16)
    for bits in words.split(2**24):
        places = torch.arange(1, bits.numel() + 1, device=bits.device)
        total = total * 31 % 2**61 + (bits * places).sum().item()
    return total


def check_first_batch(batch: Any) -> None:
    """Raises RuntimeError if no token of a run's first batch has a loss: such a run would go on at
    loss 0.0000. Only the first is asked, for the answer makes the host wait for the device, and a
    later batch may be without."""
    n = (batch.labels != IGNORE).sum()
    dist.all_reduce(n)
    if not n:
        raise RuntimeError(
            f"no token of the first batch has a loss: all its labels are {IGNORE}; train on data "
            "with labels"
        )


def reduce_hash(share: str, layout: Layout, own: float = 0.0) -> tuple[str, list[float]]:
    """(hash of the tokens and labels of the global batch, `own` of each rank), on every rank. The
    hash is the sum of the data ranks' hashes (data.py), equal in every layout. own: of this rank,
    to 1e-6."""
    # of the ranks with the same sequences the first pp, cp and tp rank adds the hash
    is_first = (
        layout.rank < layout.world_size // layout.pp and layout.rank % (layout.cp * layout.tp) == 0
    )
    # on the host, so that nothing waits for the device
    table = torch.zeros(1 + layout.world_size, dtype=torch.int64)
    if is_first:
        table[0] = int(share, 16)
    table[1 + layout.rank] = int(own * 1e6)
    dist.all_reduce(table)
    return f"{table[0].item() % 2**48:012x}", (table[1:] / 1e6).tolist()
