"""Writes and reads tensors with torch's distributed checkpoint (DCP): every rank writes its shards,
any layout reads them.

Nothing is unpickled: a pickle can run any code. DCP would pickle its table of tensors into
.metadata; we write tensors.json:
    {"files": ["__0_0.distcp", ...], "tensors": {"model.norm.weight": {"dtype": "float32", "shape": [64], "n": 4,
                                                                       "shards": [...]}}}
"shards" has seven columns for a matrix, with a number for each of its n shards: index of the file,
first byte, bytes, two columns of offsets in the tensor, two of shapes. A column of a regular grid
is a rule of four numbers (pack_column), because a model of 70 billion parameters on 1,024 ranks has
two million shards. In format 2, "shards" has a row for each shard.
"""

import json
import math
import warnings
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from distributed.agree import (
    attempt,
    fail_together,
    holds_on_any_rank,
    on_rank_0,
    rank_in,
    reason,
    scatter,
)
from distributed.layout import local_slice
from flags.files import check_room, read_json, write_file
from storage.manifest import TABLE

MOST_SHARDS = 1 << 20  # of a tensor; more in a file of a stranger would take all memory


def import_dcp() -> ModuleType:
    # imported late: takes long, and only saving and loading need DCP
    import torch.distributed.checkpoint as dcp

    # one process without a launcher is fine
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    return dcp


class SavePlan:
    """The shards that this rank writes at each save of a run, planned once, because the layout does
    not change.

    items: DCP's items of this rank, before the ranks share out the replicated shards; final: DCP's
    plan afterwards; written:
    DCP's results of the last save; table: the content of tensors.json, n_bytes: of all shards of all
    ranks, both on rank 0."""

    items: list | None = None
    final: Any = None
    written: list | None = None
    table: Any = None
    n_bytes: int = 0


def write_tensors(
    tensors: dict[str, Tensor],
    folder: str,
    group: dist.ProcessGroup | None,
    plan: SavePlan,
    staged: bool = False,
    process=None,
) -> list[str]:
    """Writes this rank's shards; every rank of `group` calls. A shard held by several ranks is
    written once. Returns the names of this rank's files. Raises Failed, the same on all ranks.

    plan: of the last save; ranks that save the same tensors again need not talk about shards.
    staged: all tensors are in CPU
    memory already. process: this rank's writer process, for the writing.
    """
    dcp = import_dcp()
    is_first = rank_in(group) == 0
    plans = []
    # With copy_ahead DCP asks for a CUDA stream; in a background thread every rank would get a
    # stream of GPU 0.
    writer = dcp.FileSystemWriter(
        folder, sync_files=False, per_thread_copy_ahead=0 if staged else 10_000_000
    )
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)

    def plan_alone():
        planner.set_up_planner(tensors, None, is_first)
        writer.set_up_storage_writer(is_first)
        return planner.create_local_plan()

    def plan_for_all(ranks):  # on rank 0; the planner keeps the metadata
        plans.extend(writer.prepare_global_plan(planner.create_global_plan(ranks)[0]))
        plan.n_bytes = sum(map(bytes_of_plan, plans))
        check_room(folder, plan.n_bytes)

    def write():
        if is_first and not is_new:
            check_room(folder, plan.n_bytes)
        final = planner.finish_plan(plan.final)
        if not final.items:
            # a rank without tensors: DCP would leave an empty file, which no manifest lists
            return []
        if process is None:
            return writer.write_data(final, planner).value()
        contents = {item.index: planner.resolve_data(item) for item in final.items}
        try:
            return process.submit(write_apart, folder, final, contents).result()
        except BrokenProcessPool:
            raise ChildProcessError("the writer process has died") from None

    own_plan = fail_together(plan_alone, group)
    is_new = holds_on_any_rank(plan.items != own_plan.items, group)
    if is_new:
        on_rank_0(plan_for_all, group, own_plan)
        plan.items = own_plan.items
        plan.final = scatter(plans, group)
        plan.written = None
    written = fail_together(write, group)
    if holds_on_any_rank(plan.written != written, group):
        if not is_new:  # the same tensors, in other bytes than at the last save
            plan.items = None
            return write_tensors(tensors, folder, group, plan, staged, process)
        plan.written = written
        plan.table = on_rank_0(
            lambda results: table_bytes(planner.metadata, results), group, written
        )

    def write_table():
        if is_first:
            write_file(Path(folder, TABLE), plan.table)

    fail_together(write_table, group)
    return sorted({result.storage_data.relative_path for result in written})


def bytes_of_plan(plan: Any) -> int:
    """Of the shards that a rank writes by a plan of DCP's."""
    total = 0
    for item in plan.items:
        shard = item.tensor_data
        total += math.prod(shard.chunk.sizes) * shard.properties.dtype.itemsize
    return total


def write_apart(folder: str, plan: Any, tensors: dict) -> list:
    """In the writer process: writes this plan of DCP's. Returns DCP's results."""
    writer = import_dcp().FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=0)
    planner: Any = SimpleNamespace(resolve_data=lambda item: tensors[item.index])
    return writer.write_data(plan, planner).value()


def read_tensors(tensors: dict[str, Tensor], folder: str, table: dict) -> None:
    """Overwrites `tensors` (plain or DTensor, any layout) with the folder's tensors of the same
    keys, each rank by itself.
    table: from read_table(). Raises ValueError."""
    dcp = import_dcp()
    found = find_shards(tensors, table, folder)

    class Reader(dcp.FileSystemReader):
        def read_metadata(self):  # DCP's version unpickles .metadata, and a pickle can run any code
            return found

    try:
        dcp.load(
            tensors,
            storage_reader=Reader(folder),
            planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
            no_dist=True,
        )
    except dcp.api.CheckpointException as error:
        # a BaseException: no `except Exception` stops the error
        raise ValueError(f"{folder}: {reason(error)}") from None


# --- tensors.json ---
def pack_column(column: np.ndarray) -> int | dict | list:
    """A column as 7 for 7, 7, 7; as {"rule": [first, step, repeat, count]}, such as [0, 64, 2, 3]
    for 0, 0, 64, 64, 128, 128, 0, 0 ..., or as a list."""
    changes = np.flatnonzero(np.diff(column))
    if len(changes) == 0:
        return int(column[0])
    repeat = int(changes[0]) + 1
    # after `count` values the first comes again
    again = np.flatnonzero(column[repeat:] == column[0])
    count = len(column)
    if len(again):
        count = int(again[0]) // repeat + 1
    packed = {"rule": [int(column[0]), int(column[repeat] - column[0]), repeat, count]}
    if np.array_equal(unpack_column(packed, np.arange(len(column))), column):
        return packed
    return column.tolist()


def unpack_column(packed: int | dict | list, at: np.ndarray) -> np.ndarray:
    """The column's values at these places."""
    if isinstance(packed, dict):
        first, step, repeat, count = packed["rule"]
        return first + step * (at // max(repeat, 1) % max(count, 1))
    if isinstance(packed, int):
        return np.full(len(at), packed)
    return np.array(packed, np.int64)[at]


def table_bytes(metadata: Any, results: list) -> bytes:
    """The content of tensors.json, from DCP's metadata on rank 0 and the write results of all
    ranks."""
    where = {}  # (key, offsets of a shard): its place in a file
    files = {}  # name: index
    for part in results:
        for written in part:
            info = written.storage_data
            where[written.index.fqn, written.index.offset] = info
            files.setdefault(info.relative_path, len(files))
    tensors = {}
    for key, t in metadata.state_dict_metadata.items():
        rows = []
        for chunk in t.chunks:
            info = where[key, chunk.offsets]
            file = files[info.relative_path]
            rows.append([file, info.offset, info.length, *chunk.offsets, *chunk.sizes])
        tensors[key] = {
            "dtype": str(t.properties.dtype).removeprefix("torch."),
            "shape": t.size,
            "n": len(rows),
            "shards": [pack_column(column) for column in np.array(rows).T],
        }
    table = {"files": list(files), "tensors": tensors}
    return json.dumps(table, separators=(",", ":")).encode()


class SavedTensor(NamedTuple):
    """An entry of tensors.json. shards: packed columns for n shards; files: all names and sizes,
    the same for all entries."""

    size: torch.Size
    dtype: torch.dtype
    files: tuple[list[str], np.ndarray]
    n: int
    shards: list

    def read_shards(self, first, shape) -> tuple:
        """(index of the file, first byte, bytes, offsets (n, dims), sizes (n, dims)) of the shards
        that overlap with this part of the tensor. Raises ValueError when one lies outside of its
        file or of the tensor, or when some are missing: DCP would leave the rest as it was."""
        at = np.arange(self.n)
        dims = len(self.size)
        ends = self.files[1]
        # axis by axis, each leaves fewer: of millions only some are looked at in all columns
        for d in range(dims):
            begin = unpack_column(self.shards[3 + d], at)
            end = begin + unpack_column(self.shards[3 + dims + d], at)
            at = at[(begin < first[d] + shape[d]) & (end > first[d])]
        file, start, length, *place = (unpack_column(column, at) for column in self.shards)
        offsets, sizes = np.array(place, np.int64).reshape(2, dims, len(at)).transpose(0, 2, 1)
        common = np.minimum(offsets + sizes, np.add(first, shape)) - np.maximum(offsets, first)
        if (
            common.prod(1).sum() != math.prod(shape)
            or (np.minimum(offsets, self.size - offsets - sizes) < 0).any()
        ):
            raise ValueError(f"its shards do not add up to {tuple(self.size)}")
        if (np.array([file, len(ends) - 1 - file, start, length]) < 0).any() or (
            length > ends[file] - start
        ).any():
            raise ValueError("its shards are no part of this checkpoint")
        return file, start, length, offsets, sizes


def read_tensor(key: str, folder: str, table: dict) -> Tensor:
    """One whole tensor of a folder. table: of read_table."""
    tensor = torch.empty(table[key].size, dtype=table[key].dtype)
    read_tensors({key: tensor}, folder, table)
    return tensor


def read_table(folder: str, files: dict[str, list]) -> dict[str, SavedTensor]:
    """{key: entry} of tensors.json. files: the manifest's. Raises ValueError for shards that cannot
    be: a stranger's checkpoint can have right checksums, too."""
    table = {}
    key = ""
    try:
        saved = read_json(folder, TABLE)
        sizes = np.array([files[name][0] for name in saved["files"]])
        names_and_sizes = (saved["files"], sizes)
        for key, entry in saved["tensors"].items():
            dtype = getattr(torch, entry["dtype"])
            shards = entry["shards"]
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{entry['dtype']} is no dtype")
            n = entry.get("n", len(shards))
            if not 0 < n <= MOST_SHARDS:
                raise ValueError(f"it is said to have {n} shards")
            if "n" not in entry:  # format 2: a row for each shard
                shards = [*np.array(shards).T]
            shape = torch.Size(entry["shape"])
            table[key] = SavedTensor(shape, dtype, names_and_sizes, n, shards)
    except Exception as error:
        raise ValueError(f"{folder}/{TABLE} is refused: {key}: {reason(error)}") from None
    return table


def find_shards(tensors: dict[str, Tensor], table: dict[str, SavedTensor], folder: str) -> Any:
    """DCP's Metadata with the saved shards that overlap with this rank's part of `tensors`: of
    millions only a few."""
    from torch.distributed.checkpoint import filesystem, metadata

    found = metadata.Metadata(state_dict_metadata={}, storage_data={})
    for key, tensor in tensors.items():
        shape, first = local_slice(tensor)
        saved = table[key]
        chunks = []
        shards, error = attempt(saved.read_shards, first, shape)
        if error:
            raise ValueError(f"{folder}/{TABLE} is refused: {key}: {error}")
        for file, start, length, offset, size in zip(*(column.tolist() for column in shards)):
            chunks.append(metadata.ChunkStorageMetadata(torch.Size(offset), torch.Size(size)))
            info = filesystem._StorageInfo(saved.files[0][file], start, length)
            found.storage_data[metadata.MetadataIndex(key, torch.Size(offset))] = info
        properties = metadata.TensorProperties(saved.dtype)
        found.state_dict_metadata[key] = metadata.TensorStorageMetadata(
            properties, saved.size, chunks
        )
    return found
