"""What grows with the number of ranks: sockets, messages between ranks, and the table of a checkpoint.

    python benchmarks/scaling.py                    # 4 to 32 processes, tables of 64, 1,024 and 16,384 ranks; 3 minutes
    python benchmarks/scaling.py --processes 4,8 --tables 64x200

The processes are real, on this machine. The tables are those of runs with one file per rank, with every tensor split over all
ranks; plans, shards and the file tensors.json are the real ones, only the tensors have no values. CPU seconds are of one
process, so the number of cores of this machine does not matter.
"""
import argparse
import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).parent.parent))

from distributed.agree import fail_together, gather, on_rank_0  # noqa: E402
from distributed.launch import StopSignal, allow_many_ranks  # noqa: E402
from distributed.layout import Layout  # noqa: E402
from storage.dcp import find_shards, read_table, table_bytes  # noqa: E402
from storage.manifest import TABLE, read_manifest, write_manifest  # noqa: E402

CALLS = 20


def open_sockets() -> int:
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sum("socket:" in link for link in links)


def measure_messages(rank: int, n: int, file: str, answers) -> None:
    """In one of n processes: sockets, and CPU ms per call of the functions that a step, a save and a resume are made of."""
    allow_many_ranks()
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=n)
    group, stop, layout = dist.new_group(backend="gloo"), StopSignal(), Layout(dp_shard=n, rank=rank)
    rows = {
        "stop.agreed, each step": lambda: stop.agreed(layout),
        "fail_together": lambda: fail_together(lambda: None, group),
        "on_rank_0": lambda: on_rank_0(lambda: "a folder", group),
        "on_rank_0, with values": lambda: on_rank_0(len, group, {f"__{rank}_0.distcp": [rank, "crc"]}),
        "gather, at a start only": lambda: gather({f"__{rank}_0.distcp": [rank, "crc"]}, group),
    }
    found = {}
    for name, call in rows.items():
        call()  # connects
        dist.barrier()
        began = time.process_time()
        for _ in range(CALLS):
            call()
        found[name] = (time.process_time() - began) / CALLS * 1e3
        dist.barrier()
    answers.put({"sockets": open_sockets()} | found)
    dist.barrier()


def measure_table(n_ranks: int, n_tensors: int) -> dict:
    """CPU seconds of rank 0 in the first save, of any rank in a resume, and the size of tensors.json and manifest.json."""
    from torch.distributed.checkpoint import default_planner, filesystem, metadata, planner, storage
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    rows, columns = n_ranks * 4, 64
    properties, bytes_each = metadata.TensorProperties(torch.float32), rows // n_ranks * columns * 4 + 800
    names = [f"optimizer.blocks.{i}.attn.wq.weight.exp_avg" for i in range(n_tensors)]

    def items(rank):
        chunk = metadata.ChunkStorageMetadata(torch.Size([rank * 4, 0]), torch.Size([4, columns]))
        data = planner.TensorWriteData(chunk, properties, torch.Size([rows, columns]))
        return [planner.WriteItem(metadata.MetadataIndex(name, chunk.offsets), planner.WriteItemType.SHARD, tensor_data=data)
                for name in names]

    found, began = {"shards": n_ranks * n_tensors}, time.process_time()
    plans = [planner.SavePlan(items(rank)) for rank in range(n_ranks)]
    found["-"], began = time.process_time() - began, time.process_time()
    saver = default_planner.DefaultSavePlanner(flatten_state_dict=False)
    plans, about = saver.create_global_plan(plans)
    results = [[storage.WriteResult(item.index, bytes_each, filesystem._StorageInfo(
        f"__{rank}_0.distcp", i * bytes_each, bytes_each)) for i, item in enumerate(plan.items)]
        for rank, plan in enumerate(plans)]
    content = table_bytes(about, results)
    found["first save, rank 0: CPU s"] = time.process_time() - began
    began, same = time.process_time(), [items(0), items(0)]
    making, began = time.process_time() - began, time.process_time()
    assert same[0] == same[1]
    found["later saves, any rank: CPU s"] = time.process_time() - began + making / 2
    found["MB at rank 0"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    found["tensors.json MB"] = len(content) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, TABLE).write_bytes(content)
        files = {f"__{rank}_0.distcp": [n_tensors * bytes_each, "0" * 8] for rank in range(n_ranks)}
        write_manifest(folder, files | {TABLE: [len(content), ""]}, step=1)
        del plans, about, results
        found |= measure_resume(folder, n_ranks, names, (rows, columns), distribute_tensor, init_device_mesh, Shard)
    return found


def measure_resume(folder, n_ranks, names, shape, distribute_tensor, init_device_mesh, Shard) -> dict:
    dist.init_process_group("fake", rank=n_ranks // 2, world_size=n_ranks)
    with torch.device("meta"):
        tensor = distribute_tensor(torch.empty(shape), init_device_mesh("cpu", (n_ranks,)), [Shard(0)])
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    manifest = read_manifest(folder, lambda name: name == TABLE)
    table = read_table(folder, manifest["files"])
    shards = find_shards(dict.fromkeys(names, tensor), table)
    assert len(shards.storage_data) == len(names)  # of each tensor one shard: this rank's
    return {"resume, any rank: CPU s": time.process_time() - began,
            "more MB": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3}


def print_rows(head: str, rows: list[tuple]) -> None:
    names = [name for name in rows[0][1] if name != "-"]
    print(f"| {head} | {' | '.join(names)} |\n|---{'|---' * len(names)}|")
    for label, found in rows:
        print(f"| {label} | {' | '.join(f'{found[name]:,.3g}' for name in names)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", default="4,8,16,32", help="numbers of real processes")
    parser.add_argument("--tables", default="64x2000,1024x400,16384x24", help="RANKSxTENSORS of checkpoints")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for n in map(int, args.processes.split(",")):
        answers = mp.get_context("fork").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            task = n, f"{folder}/store", answers
            processes = mp.start_processes(measure_messages, task, n, join=False, start_method="fork")
            found = [answers.get() for _ in range(n)]
            processes.join()
        rows.append((n, {name: sum(one[name] for one in found) / n for name in found[0]}))
    print("CPU ms per rank and call\n")
    print_rows("processes", rows)
    rows = []
    for text in args.tables.split(","):
        n_ranks, n_tensors = map(int, text.split("x"))
        with mp.get_context("fork").Pool(1) as pool:
            rows.append((text.replace("x", " x "), pool.apply(measure_table, (n_ranks, n_tensors))))
    print("\nThe table of a checkpoint\n")
    print_rows("ranks x tensors", rows)


if __name__ == "__main__":
    main()
