"""--plot: pictures of the schedule and of the mesh, as text and as PNG."""
import importlib.util
import math
import os

from distributed.pipeline import embeds_at_both_ends
from tools.dryrun import bubble, duration, simulate, table
from tools.placement import axis_groups, shown_ranks

COLORS = {"F": "#4c78a8", "I": "#f58518", "W": "#54a24b", "idle": "#e6e6e6"}
MEANINGS = {"F": "forward", "I": "backward of the input", "W": "backward of the weights", "idle": "idle"}


def halves(times):
    """Yield (rank, start, end, kind, stage, micro-batch), with each whole backward cut in two halves: input, then weights."""
    for rank, row in enumerate(times):
        for start, end, kind, stage, m in row:
            middle = (start + end) / 2
            parts = [(start, middle, "I"), (middle, end, "W")] if kind == "B" else [(start, end, kind)]
            yield from ((rank, a, b, k, stage, m) for a, b, k in parts)


def text_picture(times) -> str:
    """A line per rank, a character per unit of time: F, I (backward, input), W (backward, weight) or '.' (idle)"""
    end = max(row[-1][1] for row in times)
    lines = [["."] * round(end) for _ in times]
    for rank, a, b, kind, *_ in halves(times):
        lines[rank][round(a) : round(b)] = kind * (round(b) - round(a))
    return "\n".join(f"rank {i:>3} |{''.join(line)}|" for i, line in enumerate(lines))


AXIS_COLORS = {"tp": "#4c78a8", "cp": "#72b7b2", "fsdp": "#54a24b", "dp_replicate": "#eeca3b", "pp": "#f58518",
               "ep": "#b279a2", "etp": "#ff9da6", "efsdp": "#9d755d"}
AXIS_MEANINGS = {
    "tp": "activations, four times per block and direction", "cp": "keys and values of every block",
    "fsdp": "weights, gradients (dp_shard x cp)", "dp_replicate": "sums of gradients, once per step",
    "pp": "activations between stages", "ep": "tokens to their experts and back",
    "etp": "tokens to the parts of experts and back", "efsdp": "the experts' weights, gradients",
}


def pyplot_and_patches():
    import matplotlib
    from matplotlib import patches, pyplot

    matplotlib.use("Agg")  # files, no windows
    return pyplot, patches


def save(figure, path: str) -> None:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    figure.savefig(path, dpi=110)
    print(path)
    pyplot_and_patches()[0].close(figure)


def draw_schedule(times, title: str, path: str) -> None:
    pyplot, patches = pyplot_and_patches()
    end, n = duration(times), len(times)
    figure, axes = pyplot.subplots(figsize=(min(20, max(8, end / 3)), 1.6 + 0.45 * n), layout="constrained")
    axes.barh(range(n), [end] * n, height=0.9, color=COLORS["idle"])
    shades = max(stage for row in times for *_, stage, _ in row) >= n  # several stages per rank: later ones are paler
    for rank, a, b, kind, stage, m in halves(times):
        pale = stage >= n
        look = dict(color=COLORS[kind], edgecolor="white", linewidth=0.6, alpha=0.5 if pale else 1)
        axes.barh(rank, b - a, left=a, height=0.9, **look)
        if end <= 120:
            axes.text((a + b) / 2, rank, m, ha="center", va="center", fontsize=7, color="black" if pale else "white")
    entries = [patches.Patch(color=COLORS[k], label=MEANINGS[k]) for k in COLORS]
    if shades:
        entries.append(patches.Patch(color=COLORS["F"], alpha=0.5, label="paler: a rank's later stages"))
    figure.legend(handles=entries, loc="outside lower center", ncols=len(entries), frameon=False)
    axes.set(xlim=(0, end), xlabel="time (one forward of a stage = 1); the numbers are micro-batches")
    axes.set(yticks=range(n), ylabel="pipeline rank", title=title)
    axes.invert_yaxis()
    save(figure, path)


def pipeline_peers(report) -> list[int]:
    """Pipeline ranks that exchange activations or gradients with pipeline rank 0: the owners of neighbouring stages, and
    the last rank if both ends need the embedding."""
    owner = {i: rank for rank, held in enumerate(report.ranks) for i in held.ids}
    peers = {owner[i + step] for i in report.ranks[0].ids for step in (-1, 1) if i + step in owner}
    if embeds_at_both_ends(report.ranks[0].stages[0].config):
        peers.add(owner[max(owner)])
    return sorted(peers - {0})


def mesh_groups(layout, peers: list[int] | None = None) -> dict[str, list[int]]:
    """{axis: the ranks of device 0's group, beginning with 0}, see axis_groups."""
    groups = {axis: groups[0] for axis, groups in axis_groups(layout).items()}
    if peers is not None and "pp" in groups:
        groups["pp"] = [groups["pp"][i] for i in (0, *peers)]
    return groups


def text_mesh(layout, peers: list[int] | None = None) -> str:
    lines = [["axis", "ranks", "device 0 is with", "what travels"]]
    for axis, ranks in mesh_groups(layout, peers).items():
        named = ", ".join(map(str, ranks[:4])) + (f" .. {ranks[-1]}" if len(ranks) > 4 else "")
        lines.append([axis, len(ranks), named, AXIS_MEANINGS[axis]])
    return table(lines, right=False) if len(lines) > 1 else "one device: no axis"


def draw_mesh(layout, path: str, peers: list[int] | None = None) -> None:
    """Draw a cell per device. A cell has a coloured stripe for each axis on which the device exchanges with device 0. Of a
    large mesh, draw only the beginning."""
    pyplot, patches = pyplot_and_patches()
    ranks, cut = shown_ranks(layout, columns=32)
    n, w, h = len(ranks), len(ranks[0]), len(ranks[0][0])  # panels, and cells of each
    columns = max(1, min(n, 20 // w))
    side = min(0.42, 13 / (columns * (w + 1)))  # inches per cell
    size = (max(7.5, columns * (w + 1) * side), math.ceil(n / columns) * (h + 1.6) * side + 1.6)
    figure, all_axes = pyplot.subplots(math.ceil(n / columns), columns, figsize=size, layout="constrained", squeeze=False)
    groups = mesh_groups(layout, peers)
    for i, axes in enumerate(all_axes.flat):
        axes.set_axis_off()
        if i >= n:
            continue
        for d, column in enumerate(ranks[i]):
            for j, rank in enumerate(column):
                shared = [AXIS_COLORS[axis] for axis, group in groups.items() if rank in group]
                colors = ["#222222"] if rank == 0 else shared or [COLORS["idle"]]
                for k, color in enumerate(colors):
                    left, width = d + 0.92 * k / len(colors), 0.92 / len(colors)
                    axes.add_patch(patches.Rectangle((left, j), width, 0.92, color=color, linewidth=0))
                if side > 0.22:
                    axes.text(d + 0.46, j + 0.46, rank, ha="center", va="center", fontsize=min(8, side * 20),
                              color="white" if shared else "#444444")
        axes.set(xlim=(0, w), ylim=(h, 0), aspect="equal")
        axes.set_title(f"pp {i}" if layout.pp > 1 else "", fontsize=9, loc="left")
    entries = [patches.Patch(color="#222222", label="device 0")]
    sizes = {axis: len(ranks) for axis, ranks in mesh_groups(layout).items()}
    entries += [patches.Patch(color=AXIS_COLORS[a], label=f"{a} {n}: {AXIS_MEANINGS[a]}") for a, n in sizes.items()]
    figure.legend(handles=entries, loc="outside lower center", ncols=1 if len(entries) < 4 else 2, frameon=False, fontsize=9)
    shown = f" (shown: {cut})" if cut else ""
    figure.suptitle(f"{layout}: {layout.world_size:,} devices, by rank\ncolumns: dp_replicate x dp_shard, rows: cp x tp{shown}",
                    fontsize=10)
    save(figure, path)


def plot(cfg, report) -> None:
    layout = report.layout
    peers = pipeline_peers(report)
    print(f"{layout}: {layout.world_size:,} devices\n{text_mesh(layout, peers)}\n")
    times = simulate(report.rows)
    title = f"{cfg.pp_schedule_csv or cfg.pp_schedule}, pp {layout.pp}, {report.n} micro-batches: bubble {bubble(times):.1%}"
    if layout.pp > 1:
        print(f"{title}\n{text_picture(times)}\n{', '.join(f'{k} {MEANINGS[k]}' for k in 'FIW')}, . idle")
    if importlib.util.find_spec("matplotlib") is None:
        print("As text only: pictures need matplotlib (pip install matplotlib)")
        return
    draw_mesh(layout, os.path.join(cfg.out, "mesh.png"), peers)
    if layout.pp > 1:
        draw_schedule(times, title, os.path.join(cfg.out, "pipeline.png"))
