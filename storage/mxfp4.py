"""Weights in MXFP4, as gpt-oss publishes its experts: 4 bits per number, and 8 for a power of two that 32 numbers share (OCP
Microscaling Formats, version 1.0, section 5)."""
import torch
from torch import Tensor

BLOCK = 32  # numbers that share a scale
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # what three bits mean; the fourth is the sign


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks (..., n, 16) and scales (..., n), both uint8 -> (..., 32 n) fp32. The low half of a byte is the first number."""
    values = torch.tensor([*E2M1, *(-x for x in E2M1)])[torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).int()]
    return torch.ldexp(values, scales[..., None].int() - 127).flatten(-2)


def mxfp4_problem(name: str, shape: tuple, blocks, scales) -> str:
    """What is wrong with two handles for a stack of this shape, (E, in, out); '' if nothing is."""
    E, n_in, n_out = shape
    want = (E, n_out, n_in // BLOCK, BLOCK // 2)
    found = tuple(blocks.get_shape()), tuple(scales.get_shape()), blocks.get_dtype(), scales.get_dtype()
    if found == (want, want[:3], "U8", "U8") and n_in % BLOCK == 0:
        return ""
    return f"{name}_blocks and {name}_scales are {found} there, and should be {(want, want[:3], 'U8', 'U8')}"


def read_mxfp4(blocks, scales, offset: tuple, shape: tuple) -> Tensor:
    """The part of a stack (E, in, out) that begins at `offset`, in fp32, from two handles. The files have (E, out, in)."""
    experts, columns = (slice(offset[i], offset[i] + shape[i]) for i in (0, 2))
    first, last = offset[1] // BLOCK, -(-(offset[1] + shape[1]) // BLOCK)  # blocks that hold these rows
    whole = from_mxfp4(blocks[experts, columns, first:last], scales[experts, columns, first:last])
    begin = offset[1] - first * BLOCK
    return whole[:, :, begin : begin + shape[1]].transpose(1, 2)
