"""Real sizes under the memory of a real device, rank 0 of a world that is not there: the peak, what
the allocator asks of the driver once a run is under way, and whether --dry_run knew."""

import re
from dataclasses import replace
from importlib import import_module

import pytest

from flags.config import parse_config
from tools.reports.dryrun import make_report

BATCH = ["--seq_len", "8192", "--local_batch_size", "1"]
# name -> (world, GiB of a device, recipe, flags besides BATCH)
CASES = {
    "8 layers on 8": (8, 80, "train_llama3", "--flavor 8B --model_args n_layers=8"),
    "8 layers on 8, compile": (
        8,
        80,
        "train_llama3",
        "--flavor 8B --model_args n_layers=8 --compile",
    ),
    "8 layers on 8, accumulation": (
        8,
        80,
        "train_llama3",
        "--flavor 8B --model_args n_layers=8 --compile --ac op --global_batch_size 32",
    ),
    "8B on 8": (8, 80, "train_llama3", "--flavor 8B --compile"),
    "8 layers on 8, tp 4": (
        8,
        80,
        "train_llama3",
        "--flavor 8B --model_args n_layers=8 --ac op --tp 4",
    ),
    "8B on 8, accumulation": (
        8,
        80,
        "train_llama3",
        "--flavor 8B --compile --ac op --global_batch_size 32",
    ),
    "8B on 1": (1, 140, "train_llama3", "--flavor 8B --compile --ac full"),
    "8B on 1, bf16 weights": (
        1,
        80,
        "train_llama3",
        "--flavor 8B --compile --ac full --param_dtype bfloat16",
    ),
    "70B on 64": (64, 80, "train_llama3", "--flavor 70B --compile --ac full"),
    "70B on 64, accumulation": (
        64,
        80,
        "train_llama3",
        "--flavor 70B --compile --ac full --global_batch_size 128",
    ),
    "70B on 64, tp 8": (64, 80, "train_llama3", "--flavor 70B --compile --ac op --tp 8"),
    "30B-A3B on 8": (8, 140, "train_qwen3", "--flavor 30B-A3B --ac op --compile"),
    "30B-A3B on 8, ep": (8, 140, "train_qwen3", "--flavor 30B-A3B --ac op --compile --ep 8"),
    "16B on 8": (8, 80, "train_deepseek", "--flavor 16B --ac op --compile"),
}


def predicted(recipe: str, flags, world: int) -> float:
    """GiB that --dry_run says."""
    module = import_module(recipe)
    cfg = parse_config(module.Config, flags)
    report = make_report(module.main, replace(cfg, dp_shard=world // cfg.tp))
    return max(rank.peak for rank in report.ranks) / 2**30


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if "layers" in name else pytest.mark.slow) for name in CASES],
)
def test_the_peak_and_what_the_allocator_asks_for(device, tmp_path, name):
    world, gib, recipe, flags = CASES[name]
    flags = [*flags.split(), *BATCH]
    if world > 1:
        options = dict(world=world)
    else:
        options = {}
    done = device.run(
        tmp_path,
        f"{recipe}.py",
        *flags,
        "--steps",
        4,
        gib=gib,
        memory=True,
        empty_weights=True,
        **options,
    )
    peaks = []
    for x in re.findall(r"memory after step [34]: .* max_memory_allocated=([\d.]+)", done.texts[0]):
        peaks.append(float(x))
    assert len(peaks) == 2, done.texts[0][-2000:]
    log = done.logs[0]
    later = [line.split()[0] for line in log[log.index("mark step 3") : log.index("mark end 4")]]
    asked = {}
    for kind in ("malloc", "free", "malloc_failed", "map", "unmap"):
        if kind in later:
            asked[kind] = later.count(kind)
    says = predicted(recipe, flags, world)
    print(
        f"{name}: peak {peaks[-1]:.2f} GiB, --dry_run {says:.2f}, asked of the driver from step 3 "
        f"on: {asked or 'nothing'}"
    )
    assert not {"free", "malloc_failed", "unmap"} & asked.keys()
    assert abs(says / peaks[-1] - 1) < 0.1
