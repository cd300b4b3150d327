"""--explain --html FILE: a web page on a layout: the tensors of each rank, the collectives, and the
schedule, tick by tick.

The page is a single file without a server or a download. Python draws a section for each rank; the
script in page.html shows the section of the chosen rank, and moves a mark over the schedule. An
address with #rank=3&tick=5 opens that state.
"""

import json
from html import escape
from itertools import chain
from pathlib import Path
from string import Template
from typing import Any

from distributed.layout import Layout
from tools.reports import explain, parts, svg
from tools.reports.dryrun import Report, format_bytes
from tools.reports.schedule import DOES, bubble, duration, simulate

# width and height of a tensor's cell in the picture, and the picture's width
CELL = 143
PITCH = 190
WIDTH = 860


def draw_grid(layout: Layout, ranks: list[list[list[int]]]) -> str:
    """HTML with a button per rank and a panel per pipeline rank."""
    out = ""
    for pp, columns in enumerate(ranks):
        cells = ""
        for r in chain(*columns):
            cells += (
                f'<button data-rank="{r}" tabindex="-1" aria-label="rank '
                f'{r}">{r}<small></small></button>'
            )
        rows = f"grid-template-rows: repeat({len(columns[0])}, auto)"
        out += f'<div><b>pp {pp}</b><div class="panel" style="{rows}">{cells}</div></div>'
    return out


# ---------------------------------------------------------------- what a rank holds
def draw_holding(shapes: dict, parameters: dict, layout: Layout, place: dict, seq_len: int) -> str:
    """The boxes of all tensors, in each the part of the rank at the place, and the rank's tokens of
    the global batch.

    shapes: of the tensors of all ranks; parameters: of the pipeline rank, see shown_parameters.
    """
    of_block = [shape for name, shape in shapes.items() if name.startswith("block ")]
    longest = max(chain(*of_block))
    gathered = "from the first forward to the last backward of a step"
    if layout.reshards:
        gathered = "while the block runs"
    out = svg.legend(
        0,
        12,
        [
            ("kept", "kept all the time"),
            ("gathered", f"here {gathered}"),
            ("whole", "held by other ranks"),
        ],
    )
    for i, (name, shape) in enumerate(shapes.items()):
        x = i % (WIDTH // CELL) * CELL
        y = 30 + i // (WIDTH // CELL) * PITCH
        w, h = svg.box_size(shape, longest)
        if name in parameters:
            part = parts.held_part(parameters[name], place)
            out += svg.tensor(
                x, y, w, h, shape, part, parts.held_part(parameters[name], place, gathered=True)
            )
            says = svg.words_for(part, shape).split(", ")
        else:
            out = out + svg.rect(x, y, w, h, "whole")
            says = ["not on this rank"]
        out += svg.label(x, y + h + 15, name.removesuffix(".weight"), "small bold")
        out += svg.lines(x, y + h + 30, [" x ".join(f"{n:,}" for n in shape), *says], "small")
    n = layout.global_batch_size
    y = y + PITCH + 50
    out += svg.label(
        0,
        y - 38,
        f"Activations: the tokens of the global batch, {n:,} sequences (rows) x {seq_len:,} tokens "
        "(columns)",
        "bold",
    )
    out += svg.legend(
        0,
        y - 14,
        [
            ("token", "between the blocks"),
            ("tokens", "also in attention and FFN"),
            ("whole", "tokens of other ranks"),
        ],
    )
    high = min(112, max(28, 14 * n))
    held = parts.tokens_of(layout, place, seq_len)
    says = [
        f"sequences {spans([held['sequences']])}",
        f"positions {spans(held['between'])}",
        f"in attention and FFN {spans(held['inside'])}",
    ]
    out += svg.tokens(0, y, 560, high, held, (n, seq_len))
    out += svg.lines(575, y + 14, says, "small")
    return figure(out, y + max(high, 50) + 10, "what this rank holds")


def spans(parts: list[tuple[int, int]]) -> str:
    return " and ".join(f"{first:,}-{end - 1:,}" for first, end in parts)


def rank_sections(
    layout: Layout, report: Report, ranks: list[list[list[int]]], seq_len: int
) -> str:
    """HTML: for each shown rank a hidden section with place, memory and holding."""
    out = ""
    parameters = [parts.shown_parameters(rank.stages) for rank in report.ranks]
    shapes = {}
    for found in parameters:
        shapes |= {name: tuple(p.shape) for name, p in found.items()}
    for pp, columns in enumerate(ranks):
        rank = report.ranks[pp]
        numbers = chain(*(stage.blocks for stage in rank.stages))
        layers = spans(parts.ranges([*map(int, numbers)]))
        kinds = ("parameters", "gradients", "optimizer")
        sizes = ", ".join(f"{what} {format_bytes(rank.step[what])}" for what in kinds)
        says = f"layers {layers}; below, as block: layer {explain.shown_block(rank.stages)[0]}. In bytes: {sizes}"
        for r in chain(*columns):
            place = parts.place_of(layout, r)
            axes = [axis for axis, degree in layout.degrees.items() if degree > 1]
            named = ", ".join(f"{axis} {place[axis]}" for axis in axes)
            out += f'<section id="rank{r}" hidden><p>{named or "one process"}; {says}</p><div class="scroll">'
            out += (
                draw_holding(shapes, parameters[pp], layout, place, seq_len) + "</div></section>\n"
            )
    return out


# ---------------------------------------------------------------- the schedule
def list_ticks(times: list[list[tuple]], owner: dict[int, int], size: str) -> list[dict]:
    """Per unit of time: the work of each pipeline rank, and the sends at the end. owner: stage ->
    pipeline rank."""
    found = []
    for t in range(round(duration(times))):
        now = ["waits"] * len(times)
        sent = []
        for rank, row in enumerate(times):
            for start, end, kind, stage, m in row:
                if start <= t < end:
                    now[rank] = f"{DOES[kind]} of micro-batch {m}, stage {stage}"
                what = "gradients"
                to = owner.get(stage - 1)
                if kind == "F":
                    what = "activations"
                    to = owner.get(stage + 1)
                if end == t + 1 and kind != "W" and to not in (None, rank):
                    sent.append(
                        f"pp {rank} sends the {what} of micro-batch {m} to pp {to} ({size})"
                    )
        found.append(dict(now=now, sent=sent))
    return found


# ---------------------------------------------------------------- the page
def figure(body: str, height: float, says: str) -> str:
    size = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 -4 {WIDTH} {height:.0f}"'
    return f'<svg class="text" {size} role="img" aria-label="{says}">{body}</svg>'


def make_page(cfg: Any, report, counted: tuple | None, command: str) -> str:
    """The page as text. counted: see explain.count_block."""
    layout = report.layout
    ranks, cut = parts.shown_ranks(layout)
    traffic = "<p>Not counted: needs three layers on the first device, to compare three with two of them.</p>"
    if counted:
        halves = ("attention", "FFN")
        if any(name.startswith("moe.") for name, *_ in counted[2]):
            halves = ("attention", "experts")
        drawn, height = svg.timeline(explain.list_collectives(counted[3]), halves)
        traffic = figure(svg.TIP + drawn, height, "what travels when")
    times = simulate(report.rows)
    owner = {i: pp for pp, rank in enumerate(report.ranks) for i in rank.ids}
    size = (
        cfg.pp_microbatch_size
        * cfg.seq_len
        // layout.cp
        // layout.tp
        * report.ranks[0].stages[0].config.dim
    )
    ticks = list_ticks(times, owner, format_bytes(size * layout.compute_dtype.itemsize))
    unit = (WIDTH - 60) / duration(times)
    picture, height = svg.schedule(times)
    picture += svg.rect(58, -3, unit, height + 2, "mark", id="now") + svg.schedule_legend(
        58, height + 18, times
    )
    data = dict(
        groups=parts.axis_groups(layout), ticks=ticks, unit=unit, inner=layout.cp * layout.tp
    )
    flavor = "model"
    if hasattr(cfg, "flavor"):
        flavor = cfg.flavor
    shown = ""
    if cut:
        shown = f"Shown: {cut}."
    pipeline = "hidden"
    if layout.pp > 1:
        pipeline = ""
    axes = [f"{axis}: {explain.AXIS_WORDS[axis]}" for axis in parts.axis_groups(layout)]
    does = ""
    for pp in range(len(times)):
        does += f'<tr><th scope="row">pp {pp}</th><td id="does{pp}"></td></tr>'
    values = dict(
        TITLE=escape(f"{flavor} on {layout.world_size:,} devices: {layout}"),
        COMMAND=escape(command),
        LIGHT=svg.variables(False),
        DARK=svg.variables(True),
        RULES=svg.style_rules(),
        SHOWN=shown,
        GRID=draw_grid(layout, ranks),
        AXES="; ".join(axes),
        RANKS=rank_sections(layout, report, ranks, cfg.seq_len),
        TRAFFIC=traffic,
        PIPELINE=pipeline,
        ORDER=escape(cfg.pp_schedule_csv or cfg.pp_schedule),
        BUBBLE=f"{bubble(times):.1%}",
        SCHEDULE=figure(picture, height + 30, "schedule"),
        LAST=str(len(ticks) - 1),
        DOES=does,
        DATA=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    )
    return Template(Path(__file__).with_name("page.html").read_text()).substitute(values)


def write_page(path: str, cfg: Any, report: Report, counted: tuple | None, command: str) -> None:
    page = make_page(cfg, report, counted, command)
    try:
        Path(path).write_text(page)
    except OSError as error:
        raise ValueError(f"--html {path} could not be written: {error.strerror}") from None
    print(f"\n{path}: what every rank holds, what travels, and the schedule; open it in a browser")
