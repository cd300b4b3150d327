"""How long a checkpoint keeps training waiting, and what checking it costs, next to plain
torch.distributed.checkpoint (DCP).

    torchrun --nproc_per_node 2 benchmarks/checkpoint.py
    torchrun --nproc_per_node 8 benchmarks/checkpoint.py --flavor 1B --folder /where/checkpoints/go

All variants take turns in one run, and only their ratios mean something elsewhere. Nothing trains
meanwhile: what an asynchronous save takes from the steps beside it shows only in how long it runs.
Files that are loaded were just written, so they come out of memory, on both sides.
"""

import contextlib
import multiprocessing
import os
import shutil
import statistics
import sys
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

# in benchmarks/ this file would pass for the checkpoint.py that it imports
sys.path[0] = str(Path(__file__).parent.parent)

import storage.writer
from checkpoint import CheckpointConfig, Checkpoints
from distributed.launch import LaunchConfig, connect
from distributed.layout import ParallelConfig
from distributed.refusals import check_layout
from flags.config import override_fields
from flags.files import fsync
from models.llama3 import FLAVORS, Llama3
from parallel import init_weights, make_mesh, shard, tensor_parallel
from tools.run import run


@dataclass(kw_only=True)
class Config(ParallelConfig, LaunchConfig):
    # model size: see FLAVORS in models/llama3.py
    flavor: Literal["debug", "1B", "3B", "8B"] = "debug"
    model_args: str = ""  # fields of the flavor to change: "n_layers=12,dim=512"
    repeats: int = 5  # rounds that count, after one that does not
    # on the disk to measure; a folder benchmark-<pid> is made there, and deleted at the end
    folder: str = "runs"
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto = a GPU if there is one


def trained(cfg, layout, model_config):
    """(model, optimizer) with a moment for every weight, as after a step."""
    with torch.device("meta"):
        model = Llama3(model_config)
    if cfg.tp > 1:
        tensor_parallel(model, layout, cfg)
    shard(model, layout, cfg)
    init_weights(model, layout, seed=0)
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def without_reading(folder, names, progress=None, sync=False):
    """checkpoint.checksums, but it only makes the files durable."""
    paths = [os.path.join(folder, name) for name in names]
    for path in paths if sync else ():
        fsync(path)
    return {name: [os.path.getsize(path), "00000000"] for name, path in zip(names, paths)}


def main(cfg: Config):
    model_config = override_fields(FLAVORS[cfg.flavor], cfg.model_args, "--model_args")
    layout = check_layout(
        cfg, model_config, seq_len=256, local_batch_size=1, global_batch_size=-1, device=cfg.device
    )
    layout = make_mesh(connect(layout, cfg, cfg.device))
    model, optimizer = trained(cfg, layout, model_config)
    group = dist.new_group(backend="gloo")  # for DCP's asynchronous saves
    dist.broadcast_object_list(box := [f"{cfg.folder}/benchmark-{os.getpid()}"])
    folder = box[0]

    def ours(mode, load_only=False):
        flags = CheckpointConfig(checkpoint_async=mode, keep_latest_k=0, load_only=load_only)
        about = dict(identity={"model": {"class": "DeepSeek"}}, config={}, source="")
        checkpoints = Checkpoints(flags, folder, modules=[model], optimizer=optimizer, **about)
        checkpoints.say = lambda text: None
        return checkpoints

    writers = {mode: ours(mode) for mode in ("off", "thread", "process")}

    # Each variant returns what ends it; the time until it returns is what training waits.
    def save(mode):
        assert writers[mode].save(1, {})
        writers[mode].writer.wait_staged()  # as an optimizer's step would
        return writers[mode].writer.finish_flight

    def save_without_checksums():
        with mock.patch.object(storage.writer, "checksums", without_reading):
            return save("off")

    def save_with_dcp(mode):
        tensors = writers["off"].run.named(True)
        if mode == "off":
            dcp.save(tensors, checkpoint_id=f"{folder}/dcp")
            return lambda: None
        kind = dcp.state_dict_saver.AsyncCheckpointerType(mode)
        return dcp.async_save(
            tensors,
            checkpoint_id=f"{folder}/dcp",
            process_group=group,
            async_checkpointer_type=kind,
        ).result

    def load():
        assert ours("off", load_only=True).load() == {}
        return lambda: None

    def load_with_dcp():
        dcp.load(writers["off"].run.named(True), checkpoint_id=f"{folder}/dcp")
        return lambda: None

    variants = {
        "dcp.save": lambda: save_with_dcp("off"),
        "--checkpoint_async off": lambda: save("off"),
        "the same without checksums": save_without_checksums,
        "dcp.async_save, thread": lambda: save_with_dcp("thread"),
        "--checkpoint_async thread": lambda: save("thread"),
        "dcp.async_save, process": lambda: save_with_dcp("process"),
        "--checkpoint_async process": lambda: save("process"),
        "dcp.load": load_with_dcp,
        "our load, verified": load,
    }
    loads = {"dcp.load": "dcp.save", "our load, verified": "--checkpoint_async off"}
    waits = {name: [] for name in variants}
    totals = {name: [] for name in variants}
    size = 0
    for repeat in range(1 + cfg.repeats):
        names = list(variants)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
            if name in loads:
                variants[loads[name]]()
            dist.barrier()
            began = time.perf_counter()
            finish = variants[name]()
            waited = time.perf_counter() - began
            finish()
            taken = torch.tensor([waited, time.perf_counter() - began], dtype=torch.float64)
            dist.all_reduce(taken, op=dist.ReduceOp.MAX)  # all wait for the slowest rank
            if repeat:
                waits[name].append(taken[0].item())
                totals[name].append(taken[1].item())
            if layout.rank == 0:
                size = max(
                    size, sum(file.stat().st_size for file in Path(folder).rglob("*.distcp"))
                )
                shutil.rmtree(folder)
            dist.barrier()
    for checkpoints in writers.values():
        checkpoints.close()
    # DCP's, which would complain when this process is gone
    for process in multiprocessing.active_children():
        process.kill()
    if layout.rank == 0:
        print_results(cfg, layout, size, waits, totals)


def print_results(cfg, layout, size, waits, totals):
    data = bytes(1 << 26)
    began = time.perf_counter()
    zlib.crc32(data)
    speed = len(data) / (time.perf_counter() - began)
    print(
        f"{cfg.flavor} {cfg.model_args} on {layout.world_size} x {layout.device.type}, "
        f"{os.cpu_count()} cores, torch "
        f"{torch.__version__}: {size / 1e6:.0f} MB. Shortest of {cfg.repeats} (median), and the "
        "shortest as a multiple"
    )
    print(f"{'':30} training waits{'':22} until it is durable")
    for name, values in waits.items():
        base = "dcp.load" if "load" in name else "dcp.save"
        cells = []
        for mine, theirs in ((values, waits[base]), (totals[name], totals[base])):
            # of the shortest: what else the machine does can only add
            ratio = min(mine) / min(theirs)
            cells.append(f"{min(mine):.3f} s ({statistics.median(mine):.3f}) {ratio:5.2f} x {base}")
        print(f"{name:30} {cells[0]:36} {cells[1] if 'load' not in name else ''}")
    for how, kind in ((min, "shortest"), (statistics.median, "median")):
        full, without = (
            how(waits[name]) for name in ("--checkpoint_async off", "the same without checksums")
        )
        print(f"checksums: {1 - without / full:.1%} of the save ({kind})")
    print(f"crc32 on one core: {speed / 1e9:.1f} GB/s")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        run(main, Config)
