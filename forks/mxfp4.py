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
    positive = torch.tensor(E2M1)
    table = torch.cat([positive, -positive])
    halves = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)  # (..., n, 32)
    return torch.ldexp(table[halves.int()], scales[..., None].int() - 127).flatten(-2)


class PackedTensors(HFTensors):
    """The tensors of a folder of gpt-oss: NAME_blocks and NAME_scales in the files are the stack
    NAME, (E, in, out)."""

    def __init__(self, folder: str):
        super().__init__(folder)
        self.packed = set()
        self.files = {}  # of the blocks and of the scales
        for blocks in [*self.where]:
            name = blocks.removesuffix("_blocks")
            scales = f"{name}_scales"
            if not blocks.endswith("_blocks") or name in self.where or scales not in self.where:
                continue
            self.packed.add(name)
            self.files[blocks] = self.where.pop(blocks)
            self.files[scales] = self.where.pop(scales)
            self.where[name] = self.files[blocks]

    def split_experts(self):
        """The experts of gpt-oss are stacks in the model as well."""

    def handles(self, name: str) -> list:
        """safetensors' handles of blocks (E, out, in / 32, 16) and scales (E, out, in / 32)."""
        handles = []
        for part in (f"{name}_blocks", f"{name}_scales"):
            file = self.open(self.files[part])
            if part not in file.keys():
                raise ValueError(
                    f"{self.folder}: the index says that {part} is in {self.files[part]}, but it "
                    "is not"
                )
            handles.append(file.get_slice(part))
        return handles

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
        experts = slice(offset[0], offset[0] + shape[0])
        columns = slice(offset[2], offset[2] + shape[2])
        # blocks with the wanted rows
        first = offset[1] // BLOCK
        last = -(-(offset[1] + shape[1]) // BLOCK)
        blocks, scales = self.handles(name)
        wanted = experts, columns, slice(first, last)
        whole = from_mxfp4(blocks[wanted], scales[wanted])
        begin = offset[1] - first * BLOCK
        return whole[:, :, begin : begin + shape[1]].transpose(1, 2)
