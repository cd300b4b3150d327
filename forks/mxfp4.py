"""Reads weights in MXFP4, the format of gpt-oss's experts: 4 bits per number, and 8 bits for a
power of two shared by 32 numbers (OCP Microscaling Formats, version 1.0, section 5)."""

import torch
from torch import Tensor

from storage.hf import HFTensors

BLOCK = 32  # numbers per scale
# values of the lower three bits; the fourth bit is the sign
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """blocks (..., n, 16) and scales (..., n), both uint8 -> (..., 32 n) fp32. The low half of a
    byte is the first number."""
    values = torch.tensor([*E2M1, *(-x for x in E2M1)])[
        torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).int()
    ]
    return torch.ldexp(values, scales[..., None].int() - 127).flatten(-2)


class PackedTensors(HFTensors):
    """The tensors of a folder of gpt-oss: NAME_blocks and NAME_scales in the files are the stack
    NAME, (E, in, out)."""

    def __init__(self, folder: str):
        super().__init__(folder)
        parts = ("blocks", "scales")
        names = [name.removesuffix("_blocks") for name in self.where if name.endswith("_blocks")]
        self.packed = {
            name for name in names if name not in self.where and f"{name}_scales" in self.where
        }
        self.files = {
            f"{name}_{part}": self.where.pop(f"{name}_{part}")
            for name in self.packed
            for part in parts
        }
        self.where |= {name: self.files[f"{name}_blocks"] for name in self.packed}

    def split_experts(self):
        """The experts of gpt-oss are stacks in the model as well."""

    def handles(self, name: str) -> list:
        """safetensors' handles of blocks (E, out, in / 32, 16) and scales (E, out, in / 32)."""
        parts = [
            (part, self.open(self.files[part])) for part in (f"{name}_blocks", f"{name}_scales")
        ]
        for part, file in parts:
            if part not in file.keys():
                raise ValueError(
                    f"{self.folder}: the index says that {part} is in {self.files[part]}, but it "
                    "is not"
                )
        return [file.get_slice(part) for part, file in parts]

    def problem(self, name: str, shape: tuple) -> str:
        if name not in self.packed:
            return super().problem(name, shape)
        E, n_in, n_out = shape
        want = (E, n_out, n_in // BLOCK, BLOCK // 2)
        blocks, scales = self.handles(name)
        found = (
            tuple(blocks.get_shape()),
            tuple(scales.get_shape()),
            blocks.get_dtype(),
            scales.get_dtype(),
        )
        if found == (want, want[:3], "U8", "U8") and n_in % BLOCK == 0:
            return ""
        return f"{name}_blocks and {name}_scales are {found} there, and should be {(want, want[:3], 'U8', 'U8')}"

    def read(self, name: str, offset: tuple, shape: tuple) -> Tensor:
        if name not in self.packed:
            return super().read(name, offset, shape)
        experts, columns = (slice(offset[i], offset[i] + shape[i]) for i in (0, 2))
        # blocks with the wanted rows
        first = offset[1] // BLOCK
        last = -(-(offset[1] + shape[1]) // BLOCK)
        whole = from_mxfp4(*(part[experts, columns, first:last] for part in self.handles(name)))
        begin = offset[1] - first * BLOCK
        return whole[:, :, begin : begin + shape[1]].transpose(1, 2)
