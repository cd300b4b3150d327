"""The report of a study as one web page: headings, tables, diffs and the picture, for light and dark."""

import base64
import html
import re
from pathlib import Path

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
img { max-width: 100%; background: white; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 0.3rem 0.8rem; border-bottom: 1px solid #8886; white-space: nowrap; }
code, pre { font: 14px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { overflow-x: auto; padding: 0.6rem; border: 1px solid #8886; overflow-wrap: normal; }
pre span { display: block; }
.new { background: #2a62; }
.old { background: #b332; }
"""


def page_of(paragraphs: list[str], picture: Path) -> str:
    """The HTML file. paragraphs: of report.md; picture: goes into the file, after the heading."""
    title = html.escape(paragraphs[0].lstrip("# "))
    parts = [html_paragraph(paragraph) for paragraph in paragraphs]
    if picture.exists():
        data = base64.b64encode(picture.read_bytes()).decode()
        image = f'<img alt="curves, and differences of pairs" src="data:image/png;base64,{data}">'
        parts.insert(1, image)
    body = "\n".join(parts)
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<style>{STYLE}</style>\n<body>\n{body}\n</body></html>\n"
    )


def html_paragraph(paragraph: str) -> str:
    """A paragraph of report.md: a heading, a table, a diff, or a sentence."""
    if paragraph.startswith("# "):
        return f"<h1>{html.escape(paragraph[2:])}</h1>"
    if paragraph.startswith("| "):
        return html_table(paragraph.splitlines())
    if paragraph.startswith("```diff"):
        return html_diff(paragraph.splitlines()[1:-1])
    text = re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(paragraph))
    return f"<p>{text}</p>"


def html_table(lines: list[str]) -> str:
    """lines: of a table in Markdown; the second is the rule under the header."""
    rows = []
    for number, line in enumerate(lines):
        if number == 1:
            continue
        tag = "td"
        if number == 0:
            tag = "th"
        cells = line.strip("| ").split(" | ")
        row = "".join(f"<{tag}>{html.escape(cell.strip())}</{tag}>" for cell in cells)
        rows.append(f"<tr>{row}</tr>")
    return '<div class="wide"><table>\n' + "\n".join(rows) + "\n</table></div>"


def html_diff(lines: list[str]) -> str:
    shown = []
    for line in lines:
        kind = {"+": ' class="new"', "-": ' class="old"'}.get(line[:1], "")
        shown.append(f"<span{kind}>{html.escape(line) or ' '}</span>")
    return "<pre>" + "".join(shown) + "</pre>"
