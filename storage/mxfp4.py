"""Reads weights in MXFP4, the format of gpt-oss's experts: 4 bits per number, and 8 bits for a power of two shared by 32
numbers (OCP Microscaling Formats, version 1.0, section 5)."""
import torch
from torch import Tensor

BLOCK = 32  # numbers per scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # values of the lower three bits; the fourth bit is the sign


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks (..., n, 16) and scales (..., n), both uint8 -> (..., 32 n) fp32. The low half of a byte is the first number."""
    values = torch.tensor([*E2M1, *(-x for x in E2M1)])[torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).int()]
    return torch.ldexp(values, scales[..., None].int() - 127).flatten(-2)


def mxfp4_problem(name: str, shape: tuple, blocks, scales) -> str:
    """The error if blocks and scales do not fit a stack of `shape`, (E, in, out); else ''."""
    E, n_in, n_out = shape
    want = (E, n_out, n_in // BLOCK, BLOCK // 2)
    found = tuple(blocks.get_shape()), tuple(scales.get_shape()), blocks.get_dtype(), scales.get_dtype()
    if found == (want, want[:3], "U8", "U8") and n_in % BLOCK == 0:
        return ""
    return f"{name}_blocks and {name}_scales are {found} there, and should be {(want, want[:3], 'U8', 'U8')}"


def read_mxfp4(blocks, scales, offset: tuple, shape: tuple) -> Tensor:
    """The part of a stack (E, in, out) at `offset`, in fp32. blocks, scales: safetensors handles of (E, out, in / 32, ...)."""
    experts, columns = (slice(offset[i], offset[i] + shape[i]) for i in (0, 2))
    first, last = offset[1] // BLOCK, -(-(offset[1] + shape[1]) // BLOCK)  # blocks with the wanted rows
    whole = from_mxfp4(blocks[experts, columns, first:last], scales[experts, columns, first:last])
    begin = offset[1] - first * BLOCK
    return whole[:, :, begin : begin + shape[1]].transpose(1, 2)
