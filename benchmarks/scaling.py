"""What grows with the number of ranks: sockets, the rendezvous, the parts of a run, and the table
of a checkpoint.

    python benchmarks/scaling.py                    # 4 to 32 processes, tables of 64, 1,024 and 16,384 ranks; 3 minutes
    python benchmarks/scaling.py --processes 4,8 --tables 64x200

The processes are real, on this machine. The tables are those of runs with one file per rank, with
every tensor split over all ranks; plans, shards and the file tensors.json are the real ones, only
the tensors have no values. CPU seconds are of one process, so the number of cores of this machine
does not matter.
"""

import argparse
import contextlib
import os
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.tensor import DTensor, Shard

sys.path.insert(0, str(Path(__file__).parent.parent))

from checkpoint import CheckpointConfig, Checkpoints  # noqa: E402
from distributed.checks import check_replicas, reduce_hash  # noqa: E402
from distributed.launch import StopSignal, allow_many_ranks  # noqa: E402
from distributed.layout import Layout  # noqa: E402
from parallel import make_mesh  # noqa: E402
from storage.dcp import find_shards, import_dcp, read_table, table_bytes  # noqa: E402
from storage.manifest import TABLE, read_manifest, write_manifest  # noqa: E402
from storage.newest import ABOUT, newest_readable  # noqa: E402

CALLS = 20


def open_sockets() -> int:
    links = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    return sum("socket:" in link for link in links)


def memory_mb() -> float:
    return int(re.search(r"VmRSS:\s*(\d+)", Path("/proc/self/status").read_text())[1]) / 1e3


def count_metadata_calls() -> Counter:
    """Count, from now on, this process's calls that ask a file system for names: stat, listings,
    open."""
    calls = Counter()
    for name in ("stat", "lstat", "listdir", "scandir", "open"):
        real = getattr(os, name)
        setattr(
            os, name, lambda *args, real=real, **more: calls.update(["n"]) or real(*args, **more)
        )
    sys.addaudithook(
        lambda event, args: calls.update(["n"] * (event == "open" and isinstance(args[0], str)))
    )
    return calls


def measure_run(rank: int, n: int, folder: str, answers) -> None:
    """In one of n processes: what the parts of a run cost, without the model. The model: 48
    matrices, split over all ranks."""
    found, calls = {}, count_metadata_calls()

    def measure(name, work, per=1, unit=1.0):
        began = time.process_time()
        before = memory_mb()
        asked = calls["n"]
        for _ in range(per):
            result = work()
        found[f"{name}: CPU {'ms' if unit > 1 else 's'}"] = (
            (time.process_time() - began) / per * unit
        )
        found[f"{name}: MB"], found[f"{name}: files asked for"] = (
            memory_mb() - before,
            (calls["n"] - asked) / per,
        )
        # along a ring: a barrier would open 2 log N sockets that a run opens at its end only
        dist.all_reduce(torch.ones(1))
        return result

    def start():
        allow_many_ranks()
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=n
        )
        return make_mesh(Layout(dp_shard=n, rank=rank, global_batch_size=n))

    def open_run():
        module = nn.Module()
        for i in range(48):
            part = DTensor.from_local(torch.ones(4, 64), layout.mesh["fsdp"], [Shard(0)])
            module.register_parameter(f"w{i}", nn.Parameter(part))
        optimizer = torch.optim.AdamW(module.parameters())
        run = Checkpoints(
            CheckpointConfig(),
            f"{folder}/run",
            modules=[module],
            optimizer=optimizer,
            source="",
            identity={"model": {"class": "Module"}, "data": {}, "optimizer": {}},
            config={"checkpoint_every": 1},
        )
        check_replicas([module], layout)
        return run

    def save(step):
        for p in run.params.values():
            p.grad = torch.ones_like(p)
        run.optimizers[0].step()
        assert run.save(step, {"step": step})

    layout = measure("join", start)
    run = measure("open", open_run)
    found["start: CPU s"] = found.pop("join: CPU s") + found.pop("open: CPU s")
    found["start: MB"] = found.pop("join: MB") + found.pop("open: MB")
    stop = StopSignal()
    measure("step", lambda: (stop.agreed(layout), reduce_hash("0", layout)), CALLS, 1e3)
    measure("first save", lambda: save(1))
    measure("next save", lambda: save(2))
    run = open_run()
    measure("resume", lambda: (newest_readable(f"{folder}/run", names=ABOUT), run.load()))
    found["sockets"], found["store: bytes"] = open_sockets(), os.path.getsize(f"{folder}/store") / n
    answers.put((rank, found))
    dist.all_reduce(torch.ones(1))


def measure_table(n_ranks: int, n_tensors: int) -> dict:
    """CPU seconds of rank 0 in the first save, of any rank in a resume, and the size of
    tensors.json and manifest.json."""
    from torch.distributed.checkpoint import default_planner, filesystem, metadata, planner, storage
    from torch.distributed.tensor import distribute_tensor, init_device_mesh

    rows = n_ranks * 4
    columns = 64
    properties = metadata.TensorProperties(torch.float32)
    bytes_each = rows // n_ranks * columns * 4 + 800
    names = [f"optimizer.blocks.{i}.attn.wq.weight.exp_avg" for i in range(n_tensors)]

    def items(rank):
        chunk = metadata.ChunkStorageMetadata(torch.Size([rank * 4, 0]), torch.Size([4, columns]))
        data = planner.TensorWriteData(chunk, properties, torch.Size([rows, columns]))
        return [
            planner.WriteItem(
                metadata.MetadataIndex(name, chunk.offsets),
                planner.WriteItemType.SHARD,
                tensor_data=data,
            )
            for name in names
        ]

    found = {"shards": n_ranks * n_tensors}
    began = time.process_time()
    plans = [planner.SavePlan(items(rank)) for rank in range(n_ranks)]
    found["-"], began = time.process_time() - began, time.process_time()
    saver = default_planner.DefaultSavePlanner(flatten_state_dict=False)
    plans, about = saver.create_global_plan(plans)
    results = [
        [
            storage.WriteResult(
                item.index,
                bytes_each,
                filesystem._StorageInfo(f"__{rank}_0.distcp", i * bytes_each, bytes_each),
            )
            for i, item in enumerate(plan.items)
        ]
        for rank, plan in enumerate(plans)
    ]
    content = table_bytes(about, results)
    found["first save, rank 0: CPU s"] = time.process_time() - began
    began = time.process_time()
    same = [items(0), items(0)]
    making = time.process_time() - began
    began = time.process_time()
    assert same[0] == same[1]
    found["later saves, any rank: CPU s"] = time.process_time() - began + making / 2
    found["MB at rank 0"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    found["tensors.json MB"] = len(content) / 1e6
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, TABLE).write_bytes(content)
        files = {f"__{rank}_0.distcp": [n_tensors * bytes_each, "0" * 8] for rank in range(n_ranks)}
        for name, (size, _) in files.items():
            Path(folder, name).touch()
            os.truncate(f"{folder}/{name}", size)  # takes no space
        write_manifest(folder, files | {TABLE: [len(content), ""]}, step=1)
        del plans, about, results
        found |= measure_resume(
            folder, n_ranks, names, (rows, columns), distribute_tensor, init_device_mesh
        )
    return found


def measure_resume(folder, n_ranks, names, shape, distribute_tensor, init_device_mesh) -> dict:
    dist.init_process_group("fake", rank=n_ranks // 2, world_size=n_ranks)
    with torch.device("meta"):
        tensor = distribute_tensor(
            torch.empty(shape), init_device_mesh("cpu", (n_ranks,)), [Shard(0)]
        )
    began = time.process_time()
    read_manifest(folder)  # looks at the files of all ranks
    looked = time.process_time()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    manifest = read_manifest(folder, lambda name: name == TABLE)
    table = read_table(folder, manifest["files"])
    parsed = time.process_time()
    shards = find_shards(dict.fromkeys(names, tensor), table, folder)
    assert len(shards.storage_data) == len(names)  # of each tensor one shard: this rank's
    return {
        "resume, rank 0, files: CPU s": looked - began,
        "any rank, table: CPU s": parsed - looked,
        "its own shards: CPU s": time.process_time() - parsed,
        "more MB": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1e3,
    }


def print_rows(head: str, rows: list[tuple]) -> None:
    names = [name for name in rows[0][1] if name != "-"]
    print(f"| {head} | {' | '.join(names)} |\n|---{'|---' * len(names)}|")
    for label, found in rows:
        print(f"| {label} | {' | '.join(f'{found[name]:,.3g}' for name in names)} |", flush=True)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", default="4,8,16,32", help="numbers of real processes")
    parser.add_argument(
        "--tables", default="64x2000,1024x400,16384x24", help="RANKSxTENSORS of checkpoints"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    import_dcp()  # takes a second, which is not counted
    rows = []
    for n in map(int, args.processes.split(",")):
        answers = mp.get_context("fork").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            with open(f"{folder}/log", "w") as log, contextlib.redirect_stdout(log):
                processes = mp.start_processes(
                    measure_run, (n, folder, answers), n, join=False, start_method="fork"
                )
            while not processes.join(1):  # raises the error of a process
                pass
            found = dict(answers.get() for _ in range(n))
        others = {
            name: sum(found[rank][name] for rank in range(1, n)) / (n - 1) for name in found[0]
        }
        found[0]["most sockets"], others["most sockets"] = (
            max(found[rank]["sockets"] for rank in ranks) for ranks in ([0], range(1, n))
        )
        rows += [(f"{n}, rank 0", found[0]), (f"{n}, others", others)]
    for part in ("sockets|store|start|step", "save", "resume"):
        print(f"Processes: {part.replace('|', ', ')}\n")
        print_rows(
            "processes",
            [(label, {k: v for k, v in row.items() if re.search(part, k)}) for label, row in rows],
        )
        print()
    rows = []
    for text in args.tables.split(","):
        n_ranks, n_tensors = map(int, text.split("x"))
        with mp.get_context("fork").Pool(1) as pool:
            rows.append((text.replace("x", " x "), pool.apply(measure_table, (n_ranks, n_tensors))))
    print("The table of a checkpoint\n")
    print_rows("ranks x tensors", rows)


if __name__ == "__main__":
    main()
