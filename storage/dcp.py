"""Writes and reads tensors with torch's distributed checkpoint (DCP): every rank writes its shards, any layout reads them.

Nothing is unpickled: a pickle can run any code. DCP would pickle its table of tensors into .metadata; we write tensors.json:
    {"files": ["__0_0.distcp", ...], "tensors": {"model.norm.weight": {"dtype": "float32", "shape": [64], "shards": [...]}}}
A shard is [index of its file, first byte, bytes, *offset in the tensor, *shape], short on purpose: a model of 70 billion
parameters on 1,024 ranks has two million shards, in 77 MB.
"""
import json
import math
import resource
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from distributed.agree import reason
from storage.manifest import TABLE
from support.files import read_json, write_file


def import_dcp():
    import torch.distributed.checkpoint as dcp  # imported late: takes long, and only saving and loading need DCP

    warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process without a launcher is fine
    return dcp


def write_tensors(tensors: dict[str, Tensor], folder: str, group, staged=False, process=None):
    """Writes this rank's shards; every rank of `group` calls. A shard held by several ranks is written once.

    staged: all tensors are in CPU memory already. process: this rank's writer process, for the writing; the planning, with
    its collectives, stays in the calling process.
    """
    dcp = import_dcp()

    class Writer(dcp.FileSystemWriter):
        def write_data(self, plan, planner):
            if process is None:
                return super().write_data(plan, planner)
            written = torch.futures.Future()
            written.set_result(process.write(folder, plan, {item.index: planner.resolve_data(item) for item in plan.items}))
            return written

        def finish(self, metadata, results):  # on rank 0; DCP's version pickles the table into .metadata
            write_file(Path(folder, TABLE), table_bytes(metadata, results))

    # With copy_ahead DCP asks for a CUDA stream; in a background thread every rank would get a stream of GPU 0.
    writer = Writer(folder, sync_files=False, per_thread_copy_ahead=0 if staged else 10_000_000)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(tensors, storage_writer=writer, planner=planner, process_group=group, no_dist=group is None)


class WriterProcess:
    """Writes files in a separate process, so that serialising does not take Python's lock from the training loop.

    The process has no process group, and ends when the pipe is closed: no writer outlives the parent. Tensors arrive through
    shared memory.
    """

    def __init__(self):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]  # each shared tensor takes a file descriptor
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        spawn = torch.multiprocessing.get_context("spawn")  # a fork would copy CUDA and locks held by other threads
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(target=serve_writes, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()  # so that recv() fails at once when the process dies

    def write(self, folder, plan, tensors):
        try:
            self.pipe.send((folder, plan, tensors))
            answer = self.pipe.recv()
        except (EOFError, OSError):
            raise ChildProcessError(f"the writer process {self.process.pid} has died") from None
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def close(self):
        self.pipe.close()
        self.process.join(10)


def serve_writes(pipe):
    """The main function of the writer process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # launchers signal all processes; the writer completes the save
    dcp = import_dcp()
    while True:
        try:
            folder, plan, tensors = pipe.recv()
        except (EOFError, OSError):
            return
        planner = SimpleNamespace(resolve_data=lambda item, tensors=tensors: tensors[item.index])
        try:
            writer = dcp.FileSystemWriter(folder, sync_files=False, per_thread_copy_ahead=0)
            pipe.send(writer.write_data(plan, planner).value())
        except Exception as error:
            pipe.send(error)


def read_tensors(tensors: dict[str, Tensor], folder: str, table, group=None):
    """Overwrites `tensors` (plain or DTensor, any layout) with the folder's tensors of the same keys."""
    dcp = import_dcp()

    class Reader(dcp.FileSystemReader):
        def read_metadata(self):  # DCP's version unpickles .metadata, and a pickle can run any code
            return table

    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    try:
        dcp.load(tensors, storage_reader=Reader(folder), planner=planner, process_group=group, no_dist=group is None)
    except dcp.api.CheckpointException as error:  # a BaseException: no `except Exception` stops the error
        raise ValueError(f"{folder}: {reason(error)}") from None


def table_bytes(metadata, results) -> bytes:
    """The content of tensors.json, from DCP's metadata on rank 0 and the write results of all ranks."""
    where = {(written.index.fqn, written.index.offset): written.storage_data for part in results for written in part}
    files = {name: i for i, name in enumerate(sorted({info.relative_path for info in where.values()}))}

    def shard(key, chunk):
        info = where[key, chunk.offsets]
        return [files[info.relative_path], info.offset, info.length, *chunk.offsets, *chunk.sizes]

    tensors = {key: dict(dtype=str(t.properties.dtype)[6:], shape=t.size, shards=[shard(key, chunk) for chunk in t.chunks])
               for key, t in metadata.state_dict_metadata.items()}
    return json.dumps(dict(files=[*files], tensors=tensors), separators=(",", ":")).encode()


def read_table(folder: str, files: dict[str, list]):
    """tensors.json as DCP's Metadata. files: the manifest's.

    Raises ValueError when a shard lies outside of the listed files: a stranger's checkpoint can have right checksums, too.
    """
    from torch.distributed.checkpoint import filesystem, metadata

    table = metadata.Metadata(state_dict_metadata={}, storage_data={})
    try:
        saved = read_json(folder, TABLE)
        for key, tensor in saved["tensors"].items():
            size, dtype, chunks = torch.Size(tensor["shape"]), getattr(torch, tensor["dtype"]), []
            for file, start, length, *place in tensor["shards"]:
                name, offsets, sizes = saved["files"][file], torch.Size(place[: len(size)]), torch.Size(place[len(size) :])
                if name not in files or min(file, start, length, *place) < 0 or start + length > files[name][0]:
                    raise ValueError(f"{key} is said to be in {name} at {start}, which is no part of this checkpoint")
                chunks.append(metadata.ChunkStorageMetadata(offsets, sizes))
                table.storage_data[metadata.MetadataIndex(key, offsets)] = filesystem._StorageInfo(name, start, length)
            if not isinstance(dtype, torch.dtype):
                raise ValueError(f"{tensor['dtype']} is no dtype")
            if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(size):
                raise ValueError(f"the shards of {key} do not add up to {tuple(size)}")  # DCP would leave the rest as it was
            table.state_dict_metadata[key] = metadata.TensorStorageMetadata(metadata.TensorProperties(dtype), size, chunks)
    except Exception as error:
        raise ValueError(f"{folder}/{TABLE} is refused: {reason(error)}") from None
    return table

