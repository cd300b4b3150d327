"""--lora_nf4: the frozen matrices of the blocks in 4 bits, as in QLoRA (Dettmers et al., arXiv:2305.14314).

A weight lies in 4 bits between its uses. While a block computes, it is there in the compute dtype, as without this flag: FSDP
gathers the 4 bits and unpacks what has arrived, one process (distributed/cast.py) unpacks what it holds. After the block's
forward, and again after its backward, only the 4 bits are left. So linears, adapters, --compile and --tp see nothing of it.

    a row of a weight (in)      blocks of 64 numbers, each divided by its largest absolute value, its scale
    a number                    the nearest of the 16 levels below, which are quantiles of a normal distribution
    a row in memory (bytes)     in / 2 of levels, two per byte, and then its in / 64 scales in the compute dtype

Blocks never cross a row, and a rank holds whole blocks. So every layout has the same 4 bits, and a continued run has them
again: its checkpoint knows the weights by their hash before they are packed. Scales are not rounded once more, as the paper's
are (4.13 bits per number): the largest number of a block is of the compute dtype anyway, which makes 4.25 bits in bfloat16.

torchao's NF4Tensor is not used: it rounds scales around the mean of the tensor that it is given, which would be a rank's shard,
and its all-gather (0.18) unpacks all ranks' shards with the mean of one.
"""
import math
from fnmatch import fnmatch

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distributed.layout import Layout, all_blocks

# arXiv:2305.14314, appendix E
LEVELS = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
          -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
          0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)
BLOCK, SMALLEST_BLOCK = 64, 16  # numbers that share a scale; fewer in rows that 64 does not divide
AT_ONCE = 2**24  # numbers that are packed or unpacked at a time: each takes up to 16 bytes on the way


# ---------------------------------------------------------------- numbers
def block_of(columns: int) -> int:
    """How many numbers of a row share a scale: the largest power of two up to 64 that divides the row of the whole weight."""
    return math.gcd(BLOCK, columns)


def pack_rows(weight: Tensor, block: int) -> Tensor:
    """(..., in) -> (..., in / 2 + in / block * bytes of a scale), uint8."""
    *rows, columns = weight.shape
    levels = torch.tensor(LEVELS, device=weight.device)
    between = (levels[1:] + levels[:-1]) / 2
    out = weight.new_empty(math.prod(rows), columns // 2 + columns // block * weight.element_size(), dtype=torch.uint8)
    step = max(1, AT_ONCE // columns)
    for part, x in zip(out.split(step), weight.reshape(-1, columns).split(step), strict=True):
        x = x.unflatten(1, (-1, block))
        scale = x.abs().amax(2)
        x = x.float() / scale.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]  # a block of zeros stays one
        codes = torch.bucketize(x, between, out_int32=True).to(torch.uint8).flatten(1)
        part[:, : columns // 2] = codes[:, ::2] << 4 | codes[:, 1::2]
        part[:, columns // 2 :] = scale.view(torch.uint8)
    return out.unflatten(0, rows)


def unpack_rows(packed: Tensor, block: int, out: Tensor) -> None:
    """Write the numbers of pack_rows into out (..., in), whose dtype is that of the scales."""
    columns, levels = out.shape[-1], torch.tensor(LEVELS, device=out.device).to(out.dtype)
    pairs = torch.stack([levels.repeat_interleave(16), levels.repeat(16)], 1)  # (256, 2): the two numbers of each byte
    step = max(1, AT_ONCE // columns)
    for x, part in zip(out.view(-1, columns).split(step), packed.reshape(-1, packed.shape[-1]).split(step), strict=True):
        scale = part[:, columns // 2 :].contiguous().view(out.dtype)  # (rows, in / block)
        numbers = pairs[part[:, : columns // 2].int()].view(len(x), -1, block)
        torch.mul(numbers, scale[..., None], out=x.unflatten(1, (-1, block)))


# ---------------------------------------------------------------- a weight at rest
class Nf4(torch.Tensor):
    """A rank's part of a weight: with the weight's shape and dtype, but without its numbers, which are in `packed`. Nothing can
    be computed with it. FSDP finds the two methods below and sends the bytes in place of the numbers."""

    @staticmethod
    def __new__(cls, packed: Tensor, shape, dtype: torch.dtype, block: int):
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=packed.device)

    def __init__(self, packed: Tensor, shape, dtype: torch.dtype, block: int):
        self.packed, self.block = packed, block

    def __repr__(self):
        return f"Nf4({tuple(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].packed, args[0].shape, args[0].dtype, args[0].block)
        if func is torch.ops.aten.view.default:  # FSDP keeps a flat view, and DTensor one of the same shape; both read `packed`
            return cls(args[0].packed, torch.empty(args[0].shape, device="meta").view(args[1]).shape, args[0].dtype,
                       args[0].block)
        raise NotImplementedError(f"{func} of a weight that --lora_nf4 keeps in 4 bits: take distributed.nf4.in_full of it")

    def fsdp_pre_all_gather(self, mesh):
        return (self.packed,), (self.block, self.dtype)  # one tensor: for a group of one rank FSDP takes the first alone

    @torch.no_grad()
    def fsdp_post_all_gather(self, gathered, about, param_dtype, *, out: Tensor | None = None):
        (packed,), (block, dtype) = gathered, about
        if out is None:
            weight = packed.new_empty(*packed.shape[:-1], columns_of(packed, block, dtype), dtype=dtype)
            unpack_rows(packed, block, weight)
            return weight, (weight,)  # the second: what FSDP frees, and allocates again before the next time
        weight = out._local_tensor if isinstance(out, DTensor) else out
        with torch.autograd._unsafe_preserve_version_counter(weight):  # the graph has saved it: it gets the same numbers again
            unpack_rows(packed, block, weight)


def columns_of(packed: Tensor, block: int, dtype: torch.dtype) -> int:
    return packed.shape[-1] * 2 * block // (block + 2 * dtype.itemsize)


def is_nf4(t: Tensor) -> bool:
    return isinstance(t._local_tensor if isinstance(t, DTensor) else t, Nf4)


def in_full(t: Tensor) -> Tensor:
    """A weight in 4 bits as an ordinary tensor, sharded as it is, with the numbers that training computes with. Any other
    tensor as it is."""
    if not is_nf4(t):
        return t
    local = t.detach()._local_tensor if isinstance(t, DTensor) else t
    out = torch.empty(local.shape, dtype=local.dtype, device=local.device)
    unpack_rows(local.packed, local.block, out)
    if not isinstance(t, DTensor):
        return out
    return DTensor.from_local(out, t.device_mesh, t.placements, run_check=False, shape=t.shape, stride=t.stride())


def bytes_of(t: Tensor) -> int:
    """Memory of a plain tensor, or of a weight in 4 bits."""
    t = t.packed if isinstance(t, Nf4) else t
    return t.numel() * t.element_size()


# ---------------------------------------------------------------- the model's
def block_matrices(stage) -> dict[str, nn.Parameter]:
    """fqn -> parameter, of what --lora_nf4 keeps in 4 bits where it is frozen: the linears and experts of the blocks. Not the
    routers, whose close scores would change places, nor norms and biases; nor embedding and head, which are in no block."""
    blocks = {*all_blocks(stage).values()}
    found = [(f"{prefix}.{name}", p) for prefix, m in stage.named_modules() if m in blocks for name, p in m.named_parameters()]
    return {fqn: p for fqn, p in found if p.dim() > 1 and ".router." not in fqn and not fqn.endswith("bias")}


def check_nf4(model, layout: Layout) -> None:
    """Raises ValueError for a matrix of the full model that its ranks could not pack as one process does: a shard must hold
    whole blocks, and FSDP gathers packed shards of equal size only."""
    if not getattr(layout.cfg, "lora_nf4", False):
        return
    ranks, tp, etp = layout.dp_shard * layout.cp, layout.tp, layout.cfg.etp
    plan = model.tp_plan()
    for fqn, p in block_matrices(model).items():
        if p.dim() == 3:  # experts (E, ., .): over ep and what is left for FSDP; etp cuts their width
            experts, _, name = fqn.rpartition(".")
            cuts_columns = model.get_submodule(experts).etp_dims.get(name) == 2
            rows, columns, shards = p.shape[0], p.shape[2] // (etp if cuts_columns else 1), ranks * tp // etp
        else:
            style = next((style for pattern, style in plan.items() if fnmatch(fqn.removesuffix(".weight"), pattern)), "")
            rows, columns = p.shape[0], p.shape[1] // (tp if style == "rowwise" else 1)
            shards = ranks * (tp if style.endswith("colwise") else 1)
        block = block_of(p.shape[-1])
        if block < SMALLEST_BLOCK or columns % block:
            raise ValueError(f"--lora_nf4: {fqn} has rows of {columns} numbers on a rank, which are no whole blocks of "
                             f"{max(block, SMALLEST_BLOCK)}; use a smaller --tp, or leave --lora_nf4 out")
        if rows % shards:
            raise ValueError(f"--lora_nf4: {fqn} has {rows} rows, which {shards} ranks cannot share evenly; use a number of "
                             "ranks that divides them, or leave --lora_nf4 out")


@torch.no_grad()
def quantize_base(stages, layout: Layout, say=print) -> None:
    """--lora_nf4: pack the frozen matrices, one after the other, and free what they were packed from. Once, after everything is
    loaded and before the first forward: FSDP looks at the tensors that it shall gather when it first needs them."""
    if not getattr(layout.cfg, "lora_nf4", False):
        return
    before = after = numbers = 0
    for stage in stages:
        for fqn, p in block_matrices(stage).items():
            if p.requires_grad:  # an adapter
                continue
            whole = p._local_tensor if isinstance(p, DTensor) else p.detach()
            block = block_of(p.shape[-1])
            small = Nf4(pack_rows(whole, block), whole.shape, whole.dtype, block)
            numbers, before, after = numbers + whole.numel(), before + bytes_of(whole), after + bytes_of(small)
            whole.untyped_storage().resize_(0)  # FSDP refers to it until its first all-gather
            if isinstance(p, DTensor):
                p._local_tensor = small
            else:
                module, _, name = fqn.rpartition(".")
                stage.get_submodule(module)._parameters[name] = nn.Parameter(small, requires_grad=False)
    if layout.rank == 0:
        say(f"--lora_nf4: {numbers:,} frozen numbers of the blocks on rank 0 take {8 * after / numbers:.2f} bits each, "
            f"{after / 1e9:.3g} GB instead of {before / 1e9:.3g}", flush=True)
