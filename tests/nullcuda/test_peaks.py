"""Real sizes under the memory of a real device, rank 0 of a world that is not there: the peak, what
the allocator asks of the driver once a run is under way, and whether --dry_run knew."""

import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from flags.config import parse_config
from tools.reports.dryrun import make_report

PEAKS = (
    line.split(" : ") for line in Path(__file__).with_name("peaks.txt").read_text().splitlines()
)
CASES = {name: row.split() for name, row in PEAKS}  # world, GiB of a device, recipe and flags


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
    world, gib, recipe, *flags = CASES[name]
    options = dict(world=int(world)) if world != "1" else {}
    done = device.run(
        tmp_path,
        f"{recipe}.py",
        *flags,
        "--steps",
        4,
        gib=int(gib),
        memory=True,
        empty_weights=True,
        **options,
    )
    peaks = [
        float(x)
        for x in re.findall(
            r"memory after step [34]: .* max_memory_allocated=([\d.]+)", done.texts[0]
        )
    ]
    assert len(peaks) == 2, done.texts[0][-2000:]
    log = done.logs[0]
    later = [line.split()[0] for line in log[log.index("mark step 3") : log.index("mark end 4")]]
    asked = {
        kind: later.count(kind)
        for kind in ("malloc", "free", "malloc_failed", "map", "unmap")
        if kind in later
    }
    says = predicted(recipe, flags, int(world))
    print(
        f"{name}: peak {peaks[-1]:.2f} GiB, --dry_run {says:.2f}, asked of the driver from step 3 "
        f"on: {asked or 'nothing'}"
    )
    assert not {"free", "malloc_failed", "unmap"} & asked.keys()
    assert abs(says / peaks[-1] - 1) < 0.1
