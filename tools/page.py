"""--explain --html FILE: a web page on a layout: the tensors of each rank, the collectives, and the schedule, tick by tick.

The page is a single file without a server or a download. Python draws everything once, for rank 0, and computes the position
of all parts for every rank; the script in page.html only moves the parts. An address with #rank=3&tick=5 opens that state.
"""
import json
import os
from html import escape
from pathlib import Path
from string import Template

from tools import svg
from tools.dryrun import PEAK, human
from tools.explain import AXIS_WORDS, list_collectives
from tools.placement import axis_groups, held_part, place_of, shown_block, shown_parameters, shown_ranks, tokens_of
from tools.schedule import DOES, bubble, duration, simulate

CELL, WIDTH = 140, 860  # width of a tensor's cell in the picture, and of the picture


def check_page(path: str) -> None:
    """Raise ValueError if no file can be written at path; called before anything is computed."""
    if os.path.isdir(path) or not os.path.isdir(os.path.dirname(path) or "."):
        raise ValueError(f"--html {path}: need the name of a file, such as layout.html, in a folder that exists")


def draw_grid(layout, ranks) -> str:
    """HTML with a button per rank and a panel per pipeline rank."""
    out, small = "", sum(len(column) for panel in ranks for column in panel) <= 128
    for pp, columns in enumerate(ranks):
        cells = "".join(f'<button data-rank="{r}" tabindex="-1" aria-label="rank {r}">{r}{"<small></small>" * small}</button>'
                        for column in columns for r in column)
        title = f"<b>pp {pp}</b>" if layout.pp > 1 else ""
        rows = f"grid-template-rows: repeat({len(columns[0])}, auto)"
        out += f'<div>{title}<div class="panel" style="{rows}">{cells}</div></div>'
    says = (f"The ranks of a column work on the same sequences. Columns: {layout.data_ranks} (dp_replicate x dp_shard); "
            f"ranks in one: {layout.cp * layout.tp} (cp x tp).")
    axes = "; ".join(AXIS_WORDS[axis][0] for axis in axis_groups(layout))
    return out + f'<p class="soft">{says} {axes}.</p>' * bool(axes)


# ---------------------------------------------------------------- what a rank holds
class Sheet:
    """The picture of all tensors' boxes, and the position of each box. The page finds parts by the names from svg.tensor."""

    def __init__(self, shapes: dict, layout, seq_len: int):
        self.boxes, self.height, self.shapes, self.seq_len, self.layout = {}, 18, shapes, seq_len, layout
        longest = max(n for name, shape in shapes.items() for n in shape if name.startswith("block "))
        gathered = [("gathered", f"here {gathered_while(layout)}")] * (layout.dp_shard * layout.cp > 1)
        others = [("whole", "held by other ranks")] * (layout.world_size > layout.dp_replicate)
        self.picture = svg.legend(0, 12, [("kept", "kept all the time"), *gathered, *others])
        for title, names in self.sections().items():
            self.picture += svg.label(0, self.height + 22, title, "bold")
            self.height += 34
            for row in (names[i:i + WIDTH // CELL] for i in range(0, len(names), WIDTH // CELL)):
                sizes = [svg.box_size(shapes[name], longest) for name in row]
                deep = max(h for _, h in sizes)
                for i, (name, (w, h)) in enumerate(zip(row, sizes, strict=True)):
                    self.boxes[name] = x, y, w, h = i * (CELL + 3), self.height, w, h
                    nothing = [(0, 0)] * len(shapes[name])
                    self.picture += svg.tensor(x, y, w, h, shapes[name], nothing, nothing, key=name)
                    self.picture += svg.label(x, y + h + 15, name.removeprefix("block ").removesuffix(".weight"), "small bold")
                    self.picture += svg.label(x, y + h + 29, " x ".join(f"{n:,}" for n in shapes[name]), "small soft")
                    for line in 0, 1:
                        self.picture += svg.label(x, y + h + 44 + 14 * line, "", "small", data_say=f"{line} {name}")
                self.height += deep + 68
        self.draw_tokens()

    def sections(self) -> dict:
        block = [name for name in self.shapes if name.startswith("block ")]
        rest = [name for name in self.shapes if name not in block]
        return {title: names for title, names in (("The weights of a block", block), ("Outside of the blocks", rest)) if names}

    def draw_tokens(self) -> None:
        n, y = self.layout.global_batch_size, self.height + 62
        self.picture += svg.label(0, y - 38, f"Activations: the tokens of the global batch, {n:,} sequences (rows) x "
                                             f"{self.seq_len:,} tokens (columns)", "bold")
        inside = [("tokens", "also in attention and FFN")] * (self.layout.tp > 1)
        others = [("whole", "tokens of other ranks")] * (self.layout.world_size > 1)
        self.picture += svg.legend(0, y - 14, [("token", "between the blocks"), *inside, *others])
        self.tokens = 0, y, 560, min(112, max(28, 14 * n))
        self.picture += svg.rect(*self.tokens, "whole")
        parts = [(look, i) for look in ("tokens", "token") for i in (0, 1)]
        self.picture += "".join(svg.rect(0, 0, 0, 0, look, data_part=f"{look} {i}") for look, i in parts)
        self.picture += svg.rect(*self.tokens, "frame")
        self.picture += "".join(svg.label(575, y + 14 + 16 * i, "", "small", data_say=f"says {i}") for i in range(3))
        self.height = y + max(self.tokens[3], 50) + 10

    def of_rank(self, parameters: dict, place: dict, block: str) -> dict:
        """{name of a part: [x, y, width, height]} and {name of a line: text}. block: number of the shown block."""
        found = {}
        for name, shape in self.shapes.items():
            if (p := parameters.get(name)) is None:
                found[f"0 {name}"] = f"not in blocks.{block}" if name.startswith("block ") else "another pipeline rank's"
                continue
            for kind, gathered in (("kept", False), ("gathered", True)):
                where = svg.inside(held_part(p, place, gathered), shape, *self.boxes[name])
                found[f"{kind} {name}"] = [round(x, 1) for x in where]
            says = svg.words_for(held_part(p, place), shape).replace(", ", "\n").split("\n", 1)
            found |= {f"{i} {name}": text.replace("\n", ", ") for i, text in enumerate(says)}
        mine = tokens_of(self.layout, place, self.seq_len)
        rows, shape = mine["sequences"], (self.layout.global_batch_size, self.seq_len)
        for look, kind in (("tokens", "inside"), ("token", "between")):
            for i, part in enumerate([*mine[kind], (0, 0)][:2]):  # one or two runs of positions
                found[f"{look} {i}"] = [round(x, 1) for x in svg.inside([rows, part], shape, *self.tokens)]
        spans = lambda kind: " and ".join(f"{a:,}-{b - 1:,}" for a, b in mine[kind])  # noqa: E731
        found["says 0"] = f"sequences {rows[0]:,}-{rows[1] - 1:,}" if rows[1] - rows[0] > 1 else f"sequence {rows[0]:,}"
        found["says 1"] = f"positions {spans('between')}"
        found["says 2"] = f"in attention and FFN {spans('inside')}" if self.layout.tp > 1 else ""
        return found


def gathered_while(layout) -> str:
    """In words: the time in which FSDP keeps gathered weights."""
    return "while the block runs" if layout.reshards else "from the first forward to the last backward of a step"


def layers_of(stages) -> str:
    numbers = [sorted(map(int, stage.blocks)) for stage in stages]
    return " and ".join(f"layers {n[0]}-{n[-1]}" if len(n) > 1 else f"layer {n[0]}" for n in numbers if n) or "no layers"


def list_holdings(layout, report, ranks, sheet: Sheet) -> tuple[dict, list]:
    """({rank: place, memory in words, number of the holding}, all different holdings)."""
    by_rank, known, found = {}, {}, []
    for p, columns in enumerate(ranks):
        stages, rank = report.ranks[p].stages, report.ranks[p]
        parameters, (block, _) = shown_parameters(stages), shown_block(stages)
        sizes = [f"{what} {human(rank.step[what])}" for what in ("parameters", "gradients", "optimizer")]
        holds = " | ".join([layers_of(stages) + f", below: blocks.{block}" * bool(block), *sizes])
        for r in (r for column in columns for r in column):
            place = place_of(layout, r)
            key = p, *((axis, i) for axis, i in place.items() if axis != "pp")
            if key not in known:
                known[key] = len(found)
                found.append(sheet.of_rank(parameters, place, block))
            named = ", ".join(f"{axis} {place[axis]}" for axis in layout.degrees if layout.degrees[axis] > 1)
            by_rank[r] = dict(place=named or "one process", holds=holds, holding=known[key])
    return by_rank, found


# ---------------------------------------------------------------- the schedule
def list_ticks(times, owner: dict[int, int], size: str) -> list[dict]:
    """Per unit of time: the work of each pipeline rank, and the sends at the end. owner: stage -> pipeline rank."""
    last, found = max(owner), []
    for t in range(round(duration(times))):
        now, sent = ["waits"] * len(times), []
        for rank, row in enumerate(times):
            for start, end, kind, stage, m in row:
                if start <= t < end:
                    now[rank] = f"{DOES[kind]} of micro-batch {m}" + f", stage {stage}" * (last >= len(times))
                to = owner.get(stage + (1 if kind == "F" else -1))
                if end == t + 1 and kind != "W" and to not in (None, rank):
                    what = "activations" if kind == "F" else "gradients"
                    sent.append(f"pp {rank} sends the {what} of micro-batch {m} to pp {to} ({size})")
        found.append(dict(now=now, sent=sent))
    return found


def schedule_section(cfg, times, found) -> str:
    picture, height = svg.schedule(times)
    n = len(times)
    legend = svg.schedule_legend(58, height + 18, times)
    two = any(stage >= n for row in times for *_, stage, _ in row)
    halves = ", and either half of one (I, W) one tick" * any(kind == "I" for row in times for *_, kind, _, _ in row)
    second = " An edge is thicker where a rank runs its second stage." * two
    mark = svg.rect(58, -3, unit_of(times), height + 2, "mark", id="now")
    rows = "".join(f'<tr><th scope="row">pp {i}</th><td id="does{i}"></td></tr>' for i in range(n))
    return f"""<h2>The schedule: {escape(cfg.pp_schedule_csv or cfg.pp_schedule)}, bubble {bubble(times):.1%}</h2>
<p>A row is a pipeline rank, a number a micro-batch; a forward takes one tick, a backward two{halves}.{second} What pp 0 sends
to pp 1, each of its ranks sends to the one at the same place there.</p>
<div id="steps"><button id="previous">Previous</button><button id="next">Next</button><button id="play">Play</button>
<input id="slider" type="range" min="0" max="{len(found) - 1}" value="0" aria-label="tick"><output id="tick"></output></div>
<div class="scroll">{figure(picture + mark + legend, height + 30, "schedule")}</div>
<div aria-live="polite"><table>{rows}</table><p id="sent"></p></div>
"""


def unit_of(times) -> float:
    return (WIDTH - 60) / duration(times)


# ---------------------------------------------------------------- the page
def html_table(head: list, rows: list) -> str:
    """Cells are text, or (attribute, text)."""
    cell = lambda c: f"<td {c[0]}>{escape(str(c[1]))}</td>" if isinstance(c, tuple) else f"<td>{escape(str(c))}</td>"  # noqa: E731
    body = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    return f"<table><tr>{''.join(f'<th>{escape(h)}</th>' for h in head)}</tr>{body}</table>"


def make_page(cfg, report, counted, command: str) -> str:
    """The page as text. counted: see explain.count_block; None: show the collectives of the whole step."""
    layout = report.layout
    ranks, cut = shown_ranks(layout)
    shown = sum(len(column) for panel in ranks for column in panel)
    cut = f"Shown: {shown:,} of {layout.world_size:,} ranks, namely {cut}." if cut else ""
    shapes = {name: tuple(p.shape) for rank in report.ranks for name, p in shown_parameters(rank.stages).items()}
    sheet = Sheet(shapes, layout, cfg.seq_len)
    by_rank, found = list_holdings(layout, report, ranks, sheet)
    moved = list_collectives(counted[3] if counted else report.ranks[0].step)
    has_experts = counted and any(name.startswith("moe.") for name, *_ in counted[2])
    names = "attention", "experts" if has_experts else "FFN"
    drawn, high = svg.timeline(moved, names) if counted else ("", 0)
    left, unit, steps, section = 58, 0, [], ""
    if layout.pp > 1:
        times = simulate(report.rows)
        owner = {i: r for r, rank in enumerate(report.ranks) for i in rank.ids}
        size = cfg.pp_microbatch_size * cfg.seq_len // layout.cp // layout.tp * report.ranks[0].stages[0].config.dim
        steps, unit = list_ticks(times, owner, human(size * layout.compute_dtype.itemsize)), unit_of(times)
        section = schedule_section(cfg, times, steps)
    data = dict(ranks=by_rank, holdings=found, groups=axis_groups(layout), ticks=steps, left=left, unit=unit,
                inner=layout.cp * layout.tp)
    block = f"one block (blocks.{counted[1]})" if counted else "the whole step of the first device"
    rows = [[p, axis, op.replace("_", "-"), n, human(size), (f'data-with="{axis}"', ""), why]
            for p, axis, op, n, size, why in moved]
    head = ["phase", "axis", "operation", "number", "bytes in all", "among ranks", "why"]
    held = ["parameters", "gradients", "optimizer"]
    memory = [[i, layers_of(r.stages), *(human(r.step[k]) for k in held), human(r.activations), human(r.peak)]
              for i, r in enumerate(report.ranks)]
    devices = f"{layout.world_size:,} device{'s' * (layout.world_size > 1)}"
    step = f"{layout.global_batch_size:,} sequences of {cfg.seq_len:,} tokens per step, {str(layout.compute_dtype)[6:]}"
    gathers = layout.dp_shard * layout.cp > 1
    values = dict(
        TITLE=escape(f"{vars(cfg).get('flavor', 'model')} on {devices}: {layout}"),
        SUMMARY=escape(f"{report.n_params:,} parameters, {step}. Made by:"),
        COMMAND=escape(command), SHOWN=escape(cut), GRID=draw_grid(layout, ranks), SIDE=str(44 if len(by_rank) <= 128 else 30),
        LIGHT=svg.variables(False), DARK=svg.variables(True), RULES=svg.style_rules(),
        HOLDINGS=figure(sheet.picture, sheet.height, "what this rank holds"),
        NOTE=f"The paler part is what the rank has besides, {gathered_while(layout)}." * gathers,
        TRAVELS=f"What travels for {block}, forward and backward",
        TIMELINE=figure(drawn, high, "what travels when") if rows and drawn else "",
        TABLE=html_table(head, rows) if rows else "<p>Nothing travels: no axis has more than one rank.</p>", SCHEDULE=section,
        BOXES=", a box has those of one" * bool(drawn),
        PEAK=PEAK,
        MEMORY=html_table(["pp rank", "layers", *held, "activations", "peak"], memory),
        DATA=json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    )
    return Template((Path(__file__).parent / "page.html").read_text()).substitute(values)


def figure(body: str, height: float, says: str) -> str:
    size = f'width="{WIDTH}" height="{height:.0f}" viewBox="0 -4 {WIDTH} {height:.0f}"'
    return f'<svg class="text" {size} role="img" aria-label="{says}">{svg.TIP}{body}</svg>'


def write_page(path: str, cfg, report, counted, command: str) -> None:
    Path(path).write_text(make_page(cfg, report, counted, command))
    print(f"\n{path}: what every rank holds, what travels, and the schedule; open it in a browser")
