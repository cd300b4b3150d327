"""Draw in SVG, as text: boxes, labels, arrows, a pipeline's schedule. exercises/figures.py adds what only lessons show.

Functions return a piece of SVG. Things of the same meaning have the same class, and so the same look (looks.json), in every
picture and on the page of --explain --html. A file has literal colours in place of classes, because viewers outside of
browsers know no style rules.
"""
import json
import re
from html import escape
from pathlib import Path

from tools.schedule import DOES, duration

COLORS, LOOKS = json.loads(Path(__file__).with_name("looks.json").read_text()).values()  # {name: [on white, on a dark page]}


def with_literal_colors(drawn: str) -> str:
    """The picture with attributes in place of classes."""
    def literal(found: re.Match) -> str:
        named = {name: value for look in found[1].split() for name, value in LOOKS[look].items()}
        return attributes({name: COLORS.get(value, [value])[0] for name, value in named.items()})

    return re.sub(' class="([^"]*)"', literal, drawn)


TIP = ('<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto">'
       '<path d="M0,0 L10,5 L0,10 z" class="compute"/></marker></defs>')


def document(width: int, height: float, body: str, says: str) -> str:
    """The text of an SVG file, with a white ground for dark pages. says: a title for readers who do not see pictures."""
    size = f'width="{width}" height="{decimals(height)}" viewBox="0 0 {width} {decimals(height)}"'
    return with_literal_colors(
        f'<svg xmlns="http://www.w3.org/2000/svg" class="text" {size} role="img">\n<title>{escape(says)}</title>\n{TIP}\n'
        f'{rect(0, 0, width, height, "page")}{body}</svg>\n')


def attributes(others: dict) -> str:
    return "".join(f' {name.replace("_", "-")}="{escape(str(value))}"' for name, value in others.items())


def decimals(x: float) -> str:
    return f"{x:.2f}".rstrip("0").rstrip(".")


def rect(x, y, w, h, look: str, **others) -> str:
    place = f'x="{decimals(x)}" y="{decimals(y)}" width="{decimals(w)}" height="{decimals(h)}"'
    return f'<rect class="{look}" {place}{attributes(others)}/>\n'


def label(x, y, text, look="", anchor="start") -> str:
    return f'<text class="{look}" x="{decimals(x)}" y="{decimals(y)}" text-anchor="{anchor}">{escape(str(text))}</text>\n'


def legend(x, y, entries) -> str:
    """A line of coloured boxes with text. entries: [(class, text)]."""
    out = ""
    for look, text in entries:
        out += rect(x, y - 11, 14, 14, look) + label(x + 20, y, text, "small")
        x += 20 + 6.1 * len(text) + 22
    return out


def schedule(times, width=860, left=58, height=26) -> tuple[str, int]:
    """(SVG, height): a row per pipeline rank, a box with the micro-batch's number per forward or backward. Boxes with a thick
    edge belong to a rank's second stage."""
    end, n = duration(times), len(times)
    unit, out = (width - left - 2) / end, ""
    for rank, row in enumerate(times):
        y = rank * (height + 4)
        out += label(0, y + 18, f"pp {rank}", "bold") + rect(left, y, width - left - 2, height, "idle")
        for a, b, kind, stage, m in row:
            w, thick = (b - a) * unit, {"stroke_width": 2.5} if stage >= n else {}
            out += rect(left + a * unit + thick.get("stroke_width", 1) / 2, y + 1, w - 1, height - 2, kind, **thick)
            text = f"{kind}{m}" if w > 21 else str(m) if w > 13 else ""
            out += label(left + (a + b) / 2 * unit, y + 18, text, "small dark", "middle") if text else ""
    return out, n * (height + 4)


def schedule_legend(x, y, times) -> str:
    kinds = {kind for row in times for *_, kind, _, _ in row}
    texts = [(kind, f"{kind} {does}") for kind, does in DOES.items() if kind in kinds]
    return legend(x, y, [*texts, ("idle", "idle: the bubble")])
