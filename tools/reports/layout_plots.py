"""--plot of a layout: the mesh and the schedule as SVG files."""

from pathlib import Path
from typing import Any

from distributed.layout import Layout
from distributed.pipeline import embeds_at_both_ends
from flags.files import write_file
from tools.reports import svg
from tools.reports.dryrun import Report
from tools.reports.explain import AXIS_WORDS
from tools.reports.parts import axis_groups, shown_ranks
from tools.reports.schedule import bubble, duration, simulate

SIDE = 25  # of a device's cell in the picture


def draw_schedule(times: list[list[tuple]], title: str) -> str:
    width = round(min(4000, max(860, 18 * duration(times))))
    drawn, height = svg.schedule(times, width - 20)
    body = svg.label(10, 24, title, "bold") + f'<g transform="translate(10 40)">{drawn}</g>'
    return svg.document(
        width, height + 76, body + svg.schedule_legend(68, height + 62, times), title
    )


def pipeline_peers(report: Report) -> list[int]:
    """Pipeline ranks that exchange activations or gradients with pipeline rank 0: the owners of
    neighbouring stages, and the last rank if both ends need the embedding."""
    owner = {i: rank for rank, held in enumerate(report.ranks) for i in held.ids}
    peers = set()
    for i in report.ranks[0].ids:
        peers |= {owner[stage] for stage in (i - 1, i + 1) if stage in owner}
    if embeds_at_both_ends(report.ranks[0].stages[0].config):
        peers.add(owner[max(owner)])
    return sorted(peers - {0})


def draw_mesh(layout: Layout, peers: list[int]) -> str:
    """Draw a cell per device. A cell has a coloured stripe for each axis on which the device
    exchanges with device 0. Of a large mesh, draw only the beginning. peers: see pipeline_peers."""
    ranks, cut = shown_ranks(layout)
    groups = {axis: found[0] for axis, found in axis_groups(layout).items()}
    # of a panel, which is a pipeline rank
    wide = len(ranks[0]) * SIDE + 10
    high = len(ranks[0][0]) * SIDE + 30
    across = max(1, 840 // wide)
    shown = ""
    if cut:
        shown = f" (shown: {cut})"
    out = svg.label(10, 24, f"{layout}: {layout.world_size:,} devices, by rank", "title")
    out += svg.label(10, 44, f"columns: dp_replicate x dp_shard, rows: cp x tp{shown}")
    for i, panel in enumerate(ranks):
        left = 10 + i % across * wide
        top = 74 + i // across * high
        if layout.pp > 1:
            out += svg.label(left, top - 6, f"pp {i}", "small")
        for d, column in enumerate(panel):
            for j, rank in enumerate(column):
                shared = []
                look = "small"
                for axis, group in groups.items():
                    if rank in group and (axis != "pp" or i in peers):
                        shared.append(axis)
                if rank == 0:
                    shared = ["compute"]
                    look = "small on"
                elif not shared:
                    shared = ["idle"]
                x = left + d * SIDE
                y = top + j * SIDE
                stripe = (SIDE - 2) / len(shared)
                for k, axis in enumerate(shared):
                    out += svg.rect(x + k * stripe, y, stripe, SIDE - 2, axis)
                out += svg.label(x + SIDE / 2 - 1, y + 16, rank, look, "middle")
    bottom = 74 + -(-len(ranks) // across) * high
    entries = [("compute", "device 0")]
    for axis, group in groups.items():
        entries.append((axis, f"{axis} {len(group)}: {AXIS_WORDS[axis]}"))
    for i, entry in enumerate(entries):
        out += svg.legend(10, bottom + 20 * i, [entry])
    return svg.document(
        max(860, wide + 20),
        bottom + 20 * len(entries),
        out,
        f"the partners of device 0 on {layout}",
    )


def plot(cfg: Any, report) -> None:
    layout = report.layout
    pictures = {"mesh.svg": draw_mesh(layout, pipeline_peers(report))}
    if layout.pp > 1:
        times = simulate(report.rows)
        order = cfg.pp_schedule_csv or cfg.pp_schedule
        title = f"{order}, pp {layout.pp}, {report.n} micro-batches: bubble {bubble(times):.1%}"
        print(title)
        pictures["pipeline.svg"] = draw_schedule(times, title)
    for name, drawn in pictures.items():
        write_file(Path(cfg.out, name), drawn.encode())
        print(Path(cfg.out, name))
