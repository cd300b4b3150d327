"""--plan: predicted tokens per second and MFU of a layout on a machine."""
import math
from collections import Counter
from dataclasses import dataclass, replace

from distributed.layout import AXES
from support.dryrun import duration, simulate, table
from support.metrics import peak_flops


@dataclass(frozen=True)
class Machine:
    flops: float  # dense bf16, of the data sheet
    nvlink: float  # bytes/s per device and direction
    network: float  # bytes/s per device and direction
    per_node: int = 8


MACHINES = {
    "H100": Machine(peak_flops("H100"), 450e9, 50e9),
    "H200": Machine(peak_flops("H200"), 450e9, 50e9),
    "B200": Machine(peak_flops("B200"), 900e9, 50e9),
}
# Fitted to published runs (benchmarks/scaling.py): which share of the data sheet's FLOP/s and bandwidths a compiled bf16 step
# reaches, and attention alone of the FLOP/s. The errors are of runs that were left out of the fit: on average, and the worst.
EFFICIENCY, BANDWIDTH, ATTENTION = 0.44, 0.59, 0.18
MEAN_ERROR, WORST_ERROR = 0.1, 0.23
OVERLAPPED = ("fsdp", "efsdp", "dp_replicate")  # axes whose collectives run while the device computes


def axis_span(layout, axis: str) -> tuple[int, int]:
    """(ranks of a group, difference between the ranks of two neighbours) on an axis of the dense or the expert mesh."""
    sizes, ep, etp = layout.degrees, layout.cfg.ep, layout.cfg.etp
    dense = {a: sizes[a] for a in reversed(AXES)}  # innermost first
    fsdp = {"tp": sizes["tp"], "fsdp": sizes["cp"] * sizes["dp_shard"]}
    experts = {"etp": etp, "ep": ep, "efsdp": math.prod(fsdp.values()) // (ep * etp)}
    for mesh in (dense, fsdp, experts):
        if axis in mesh:
            names = list(mesh)
            return mesh[axis], math.prod(mesh[a] for a in names[: names.index(axis)])
    return layout.world_size, 1


def wire_seconds(layout, axis: str, op: str, size: int, machine: Machine) -> float:
    """Seconds of one collective at full bandwidth. A group inside a node uses NVLink; a group across nodes uses the network
    cards of all its ranks in a node."""
    n, distance = axis_span(layout, axis)
    speed = machine.nvlink
    if n * distance > machine.per_node:
        speed = min(speed, machine.network * max(1, machine.per_node // distance))
    share = {"send": 1, "recv": 0, "all_reduce": 2 * (n - 1) / n}.get(op, (n - 1) / n)  # a recv is its neighbour's send
    return size * share / speed


def predict(
    report, machine: Machine, efficiency=EFFICIENCY, bandwidth=BANDWIDTH, attention_efficiency=ATTENTION, matmul_gain=1.0
) -> dict:
    """Seconds of one step, and the parts of the slowest rank: compute, wire (that it waits for), hidden, uncovered, bubble.

    attention_efficiency: share of the data sheet's FLOP/s that attention gets; efficiency: what the other matmuls get, and
    matmul_gain: how much faster than bf16 they are.
    """
    layout, parts = report.layout, []
    # A causal kernel does half of the FLOPs that are counted. all_gather_attention calls it on parts of the sequence, and has
    # left out most of the other half itself.
    causal = 2 * layout.cp / (2 * layout.cp + 1) if layout.cp > 1 and layout.cfg.cp_method == "allgather" else 1 / 2
    for rank in report.ranks:
        wire = Counter()
        for key, number in rank.step.items():
            if key[0] == "moved":
                wire[key[2]] += number * wire_seconds(layout, *key[2:], machine) / bandwidth
        attention = rank.flops("attention")
        matmuls = (rank.flops("forward", "backward", "recompute") - attention) / (efficiency * matmul_gain)
        compute = (matmuls + attention * causal / attention_efficiency) / machine.flops
        hidden = sum(wire[a] for a in OVERLAPPED)
        parts.append(dict(compute=compute, wire=wire.total() - hidden, hidden=hidden, uncovered=max(0, hidden - compute)))
    owner = {i: (rank, part) for rank, part in zip(report.ranks, parts, strict=True) for i in rank.ids}

    def cost(kind, stage):  # in seconds; waiting for the wire makes forwards and backwards longer by the same share
        rank, part = owner[stage]
        per_flop = (part["compute"] + part["wire"]) / rank.flops("forward", "backward", "recompute")
        return report.cost(kind, stage) * per_flop

    times = simulate(report.rows, cost)
    slowest = max(parts, key=lambda part: part["compute"] + part["wire"])
    seconds = duration(times) + max(part["uncovered"] for part in parts)
    busy = slowest["compute"] + slowest["wire"] + slowest["uncovered"]
    return slowest | dict(seconds=seconds, bubble=max(0.0, seconds - busy))


def machine_of(cfg) -> Machine:
    flags = dict(nvlink_gb_s=cfg.nvlink_gb_s, network_gb_s=cfg.network_gb_s, devices_per_node=cfg.devices_per_node)
    if wrong := [f"--{name} {value}" for name, value in flags.items() if value < 0]:
        raise ValueError(f"{', '.join(wrong)} must not be negative; 0 is the machine's own")
    given = dict(nvlink=cfg.nvlink_gb_s * 1e9, network=cfg.network_gb_s * 1e9, per_node=cfg.devices_per_node)
    return replace(MACHINES[cfg.machine], **{name: value for name, value in given.items() if value})


def print_plan(cfg, report, machine: Machine) -> None:
    layout, p = report.layout, predict(report, machine)
    speed = layout.global_batch_size * cfg.seq_len / layout.world_size / p["seconds"]
    mfu = speed * report.flops_per_token / machine.flops
    print(f"\nplan: {layout} on {layout.world_size:,} x {cfg.machine}: about {speed:,.0f} tokens/s per device, MFU {mfu:.0%}, "
          f"{p['seconds']:.3g} s per step\nPublished runs were predicted {MEAN_ERROR:.0%} off on average, {WORST_ERROR:.0%} at "
          f"worst, each with constants fitted without it:\nexpect {speed * (1 - MEAN_ERROR):,.0f} to "
          f"{speed * (1 + MEAN_ERROR):,.0f} tokens/s, and do not be surprised by less.\n")
    names = dict(compute="arithmetic", wire="waiting for tp, cp, ep, pp", uncovered="fsdp and dp_replicate beyond arithmetic",
                 bubble="waiting for other stages")
    print(table([[text, f"{p[key]:.3g} s", f"{p[key] / p['seconds']:.0%}"] for key, text in names.items()]))
    print(f"\nAssumed: {machine.flops / 1e12:.0f} TFLOP/s (bf16, dense), NVLink {machine.nvlink / 1e9:g} GB/s in a node of "
          f"{machine.per_node}, network {machine.network / 1e9:g} GB/s per device, each way;\n{EFFICIENCY:.0%} of the FLOP/s "
          f"({ATTENTION:.0%} in attention) and {BANDWIDTH:.0%} of the bandwidths are reached (--compile, bf16). Causal "
          f"attention costs half of its FLOPs."
          f"\nfsdp and dp_replicate ({p['hidden']:.3g} s) hide behind arithmetic, the other axes do not. No stragglers.")
    if not cfg.compile:
        print("Without --compile expect about a seventh less (torchtitan, 8B on 8 H100: 5,762 instead of 6,667 tokens/s).")
