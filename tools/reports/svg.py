"""Draw in SVG, as text: boxes, labels, arrows; tensors with a rank's part, collectives over time, a
pipeline's schedule.

Functions return a piece of SVG. Things of the same meaning have the same class, and so the same
look (looks.json), in every picture and on the page of --explain --html. The page turns classes into
style rules, with other colours on a dark screen. A file has literal colours in place of classes,
because viewers outside of browsers know no style rules.
"""

import json
import re
from collections.abc import Iterable
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any

from tools.reports.dryrun import format_bytes
from tools.reports.explain import MOVES
from tools.reports.schedule import DOES, duration

# {name: [on white, on a dark page]}
COLORS, LOOKS = json.loads(Path(__file__).with_name("looks.json").read_text()).values()


def variables(dark: bool) -> str:
    return "; ".join(f"--{name}: {colors[dark]}" for name, colors in COLORS.items())


def style_rules() -> str:
    """The looks as style rules, for the page."""

    rules = []
    for name, look in LOOKS.items():
        properties = []
        for key, value in look.items():
            if value in COLORS:
                value = f"var(--{value})"
            properties.append(f"{key}: {value}")
        rules.append(f".{name} {{{'; '.join(properties)}}}")
    return "\n".join(rules)


def with_literal_colors(drawn: str) -> str:
    """The picture with attributes in place of classes."""

    def literal(found: re.Match) -> str:
        named = {}
        for look in found[1].split():
            named |= LOOKS[look]
        return attributes({name: COLORS.get(value, [value])[0] for name, value in named.items()})

    return re.sub(' class="([^"]*)"', literal, drawn)


TIP = (
    '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
    'markerHeight="7" orient="auto">'
    '<path d="M0,0 L10,5 L0,10 z" class="compute"/></marker></defs>'
)


def document(width: int, height: float, body: str, says: str) -> str:
    """The text of an SVG file, with a white ground for dark pages. says: a title for readers who do
    not see pictures."""
    size = f'width="{width}" height="{decimals(height)}" viewBox="0 0 {width} {decimals(height)}"'
    return with_literal_colors(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="text" {size} '
        f'role="img">\n<title>{escape(says)}</title>\n{TIP}\n'
        f"{rect(0, 0, width, height, 'page')}{body}</svg>\n"
    )


def attributes(others: dict) -> str:
    return "".join(
        f' {name.replace("_", "-")}="{escape(str(value))}"' for name, value in others.items()
    )


def decimals(x: float) -> str:
    return f"{x:.2f}".rstrip("0").rstrip(".")


def rect(x: float, y: float, w: float, h: float, look: str, **others: Any) -> str:
    place = f'x="{decimals(x)}" y="{decimals(y)}" width="{decimals(w)}" height="{decimals(h)}"'
    return f'<rect class="{look}" {place}{attributes(others)}/>\n'


def label(x: float, y: float, text: Any, look: str = "", anchor: str = "start") -> str:
    return f'<text class="{look}" x="{decimals(x)}" y="{decimals(y)}" text-anchor="{anchor}">{escape(str(text))}</text>\n'


def lines(
    x: float,
    y: float,
    texts: Iterable[Any],
    look: str = "",
    anchor: str = "start",
    step: float = 15,
) -> str:
    return "".join(label(x, y + i * step, text, look, anchor) for i, text in enumerate(texts))


def arrow(x1: float, y1: float, x2: float, y2: float, look: str = "line") -> str:
    ends = f'x1="{decimals(x1)}" y1="{decimals(y1)}" x2="{decimals(x2)}" y2="{decimals(y2)}"'
    return f'<line class="{look}" {ends} marker-end="url(#tip)"/>\n'


def legend(x: float, y: float, entries: Iterable[tuple[str, str]]) -> str:
    """A line of coloured boxes with text. entries: [(class, text)]."""
    out = ""
    for look, text in entries:
        out += rect(x, y - 11, 14, 14, look) + label(x + 20, y, text, "small")
        x += 20 + 6.1 * len(text) + 22
    return out


# ---------------------------------------------------------------- tensors
def box_size(shape: tuple, longest: int, most: int = 112) -> tuple[float, float]:
    """Width and height of a tensor's box, proportional to the root of the sizes, so that short
    sides stay visible. longest: the size that is drawn with `most` pixels. A stack of experts (E,
    out, in) is drawn as E x out, a vector as a stripe."""
    rows, columns = (*shape, 1)[:2]

    def side(n: int) -> float:
        return min(most, max(24, most * (n / longest) ** 0.5))

    if len(shape) == 1:
        return 14, side(rows)
    return side(columns), side(rows)


def inside(
    part: list[tuple], shape: tuple, x: float, y: float, w: float, h: float
) -> tuple[float, float, float, float]:
    """(x, y, width, height) of a part [(first, end) per dim] in the box of the whole. A part that
    is not empty is at least 2 wide and high."""
    (a, b), (c, d) = (*part, (0, 1))[:2]
    rows, columns = (*shape, 1)[:2]
    wide = 0
    high = 0
    if b > a and d > c:
        wide = max(2, (d - c) / columns * w)
        high = max(2, (b - a) / rows * h)
    return min(x + c / columns * w, x + w - wide), min(y + a / rows * h, y + h - high), wide, high


def tensor(
    x: float,
    y: float,
    w: float,
    h: float,
    shape: tuple,
    kept: list[tuple],
    gathered: list[tuple] | None = None,
) -> str:
    """A tensor: the whole as an outline, in it the gathered part pale and the kept part."""
    pale = ""
    if gathered is not None:
        pale = rect(*inside(gathered, shape, x, y, w, h), "gathered")
    return (
        rect(x, y, w, h, "whole")
        + pale
        + rect(*inside(kept, shape, x, y, w, h), "kept")
        + rect(x, y, w, h, "frame")
    )


def tokens(x: float, y: float, w: float, h: float, held: dict, shape: tuple) -> str:
    """The global batch, a row per sequence, and a rank's tokens: inside of attention and FFN
    (pale), and between the blocks.
    held: see explain.tokens_of; shape: (sequences, tokens)."""
    out = rect(x, y, w, h, "whole")
    for look, kind in ("tokens", "inside"), ("token", "between"):
        for part in held[kind]:
            out += rect(*inside([held["sequences"], part], shape, x, y, w, h), look)
    return out + rect(x, y, w, h, "frame")


def words_for(part: list[tuple], shape: tuple) -> str:
    """A part in words: 'rows 0-511', 'expert 4, columns 0-2,047', 'whole'."""
    names = {1: ["rows"], 2: ["rows", "columns"]}.get(len(shape), ["experts", "rows", "columns"])
    words = []
    for name, (a, b), n in zip(names, part, shape):
        if (a, b) == (0, n):
            continue
        if a == b:
            return "nothing"
        if b - a > 1:
            words.append(f"{name} {a:,}-{b - 1:,}")
        else:
            words.append(f"{name[:-1]} {a:,}")
    return ", ".join(words) or "whole"


# ---------------------------------------------------------------- what travels when
FORWARD = [
    "before",
    "into attention",
    "attention",
    "behind attention",
    "into FFN",
    "FFN",
    "behind FFN",
    "after",
]
BACKWARD = [
    "before",
    "behind FFN",
    "FFN",
    "into FFN",
    "behind attention",
    "attention",
    "into attention",
    "after",
]
ORDER = ["fsdp", "efsdp", "dp_replicate", "tp", "cp", "etp", "ep"]


def timeline(moved: list[tuple], names: tuple[str, str], width: int = 860) -> tuple[str, int]:
    """(SVG, height): a band for each phase, time from left to right, a row for each axis. moved:
    from list_collectives;
    names: for the two halves of a block."""
    slots = {"forward": FORWARD, "recompute": FORWARD, "backward": BACKWARD}
    y = 0
    out = ""
    left = 92
    step = (width - 92) / 8
    for phase, places in slots.items():
        rows = [m for m in moved if m[0] == phase]
        if not rows and phase != "forward":
            continue
        like = phase  # where things travel
        says = f"{phase} of the block"
        if phase == "recompute":
            like = "forward"
            says = "forward of the block (again: results were not kept)"
        out += label(0, y + 16, says, "bold")
        out += arrow(left, y + 42, width - 4, y + 42)
        for half, name in zip(("attention", "FFN"), names, strict=True):
            x = left + places.index(half) * step
            out += rect(x + 2, y + 26, step - 4, 32, "compute", rx=4) + label(
                x + step / 2, y + 46, name, "on bold", "middle"
            )
        y += 64
        for axis in sorted({m[1] for m in rows}, key=ORDER.index):
            out += label(0, y + 26, axis, "bold")
            for _, _, op, n, size, _ in [m for m in rows if m[1] == axis]:
                what, where, _ = MOVES.get((axis, op, like), (axis, ["after"], ""))
                where = where[:n]
                name = op.replace("_", "-")
                each = n // len(where)
                here = format_bytes(size / len(where))
                says = [name, what, here]
                if each > 1:
                    says = [f"{name} x {each}", what, f"{here} in all"]
                for place in where:
                    x = left + places.index(place) * step
                    out += rect(x + 1, y, step - 2, 50, "sent", rx=5)
                    out += lines(x + step / 2, y + 15, says, "small dark", "middle")
            y += 56
        y += 12
    return out, y


# ---------------------------------------------------------------- the schedule
def schedule(
    times: list[list[tuple]], width: int = 860, left: int = 58, height: int = 26
) -> tuple[str, int]:
    """(SVG, height): a row per pipeline rank, a box with the micro-batch's number per forward or
    backward. Boxes with a thick edge belong to a rank's second stage."""
    end = duration(times)
    n = len(times)
    unit = (width - left - 2) / end
    out = ""
    for rank, row in enumerate(times):
        y = rank * (height + 4)
        out += label(0, y + 18, f"pp {rank}", "bold") + rect(
            left, y, width - left - 2, height, "idle"
        )
        for a, b, kind, stage, m in row:
            w = (b - a) * unit
            thick = {}
            if stage >= n:
                thick = {"stroke_width": 2.5}
            out += rect(
                left + a * unit + thick.get("stroke_width", 1) / 2,
                y + 1,
                w - 1,
                height - 2,
                kind,
                **thick,
            )
            middle = left + (a + b) / 2 * unit
            if w > 21:
                out += label(middle, y + 18, f"{kind}{m}", "small dark", "middle")
            elif w > 13:
                out += label(middle, y + 18, m, "small dark", "middle")
    return out, n * (height + 4)


def schedule_legend(x: float, y: float, times: list[list[tuple]]) -> str:
    kinds = {kind for *_, kind, _, _ in chain(*times)}
    texts = [(kind, f"{kind} {does}") for kind, does in DOES.items() if kind in kinds]
    return legend(x, y, [*texts, ("idle", "idle: the bubble")])
