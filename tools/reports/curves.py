"""The curves of one run or of several, from their metrics.jsonl: one page of panels as a picture, for
--plot and ablate.py --picture; and in the terminal while they train, for ablate.py --watch."""

import os
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from distributed.refusals import refuse
from flags.files import check_writable, read_json
from flags.progress import duration_text
from training.metrics import is_number, read_lines

# of Okabe and Ito, told apart by people who do not see all colours; a run has one in all panels
COLOURS = "#0072B2 #D55E00 #009E73 #CC79A7 #E69F00 #56B4E9 #000000 #8C564B".split()
ANSI = (34, 31, 32, 35, 33, 36, 39, 90)  # about the same, for a terminal
POINTS = 200  # a longer curve is shown as means of so many parts
LETTERS = "abcdefghijklmnopqrstuvwxyz"
PAUSE = 2.0  # seconds between two pictures of --watch
WIDE = 3  # panels beside each other


@dataclass
class Curve:
    """(x, y) of a number of a run; label: of a part of a mixture, else ""."""

    x: np.ndarray
    y: np.ndarray
    label: str = ""
    is_held_out: bool = False


@dataclass
class RunCurves:
    """The lines of a run. steps, tokens, seconds: of its training lines, in order."""

    name: str
    lines: list[dict]
    last: int = 0  # the step at which it will end; 0: not known
    steps: list[int] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)


@dataclass
class Panel:
    title: str
    x_label: str
    y_label: str
    curves: list[list[Curve]]  # of each run
    from_zero: bool = False


# ---------------------------------------------------------------- read
def read_curves(name: str, folder: str | Path) -> RunCurves:
    """Time is that of the training steps; validation and saves are left out, as in the log."""
    run = RunCurves(name, list(read_lines(str(Path(folder, "metrics.jsonl")))))
    try:
        run.last = read_json(folder, "config.json")["steps"]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    before = 0
    seconds = 0.0
    for line in run.lines:
        if not is_number(line.get("tokens")):
            continue
        if is_number(line.get("step_time_s")):
            seconds += (line["step"] - before) * line["step_time_s"]
        before = line["step"]
        run.steps.append(before)
        run.tokens.append(line["tokens"])
        run.seconds.append(seconds)
    return run


def find_runs(folders: list[str]) -> dict[str, Path]:
    """{name: folder} of run folders; of another folder, such as a study's, all run folders in it.
    Raises ValueError for a folder without runs."""
    found = {}
    for folder in folders:
        inside = [Path(folder)]
        if not Path(folder, "metrics.jsonl").is_file():
            inside = sorted(file.parent for file in Path(folder).rglob("metrics.jsonl"))
        if not inside:
            raise ValueError(
                f"{folder} has no metrics.jsonl, and no folder in it has one; give the --out of a "
                "run, or the folder of a study"
            )
        for path in inside:
            found[str(path)] = path
    if len(found) == 1:
        return found
    shared = os.path.commonpath([os.path.abspath(name) for name in found])
    return {os.path.relpath(name, shared): path for name, path in found.items()}


# ---------------------------------------------------------------- numbers -> curves
def curve_of(run: RunCurves, name: str, places: list[float], part: str = "") -> Curve | None:
    """A number of the lines over places (of the training lines, such as tokens). part: of a number
    that is an object. None if no line has the number."""
    steps = []
    values = []
    for line in run.lines:
        value = line.get(name)
        if part and isinstance(value, dict):
            value = value.get(part)
        if is_number(value):
            steps.append(line["step"])
            values.append(value)
    if not values or not places:
        return None
    x = np.interp(steps, [0, *run.steps], [0, *places])
    is_held_out = name.startswith(("val_", "eval_"))
    return Curve(x, np.array(values, float), part, is_held_out)


def names_of_parts(run: RunCurves, name: str) -> list[str]:
    parts = {}
    for line in run.lines:
        value = line.get(name)
        if isinstance(value, dict):
            parts |= dict.fromkeys(value)
    return [*parts]


def panel_of(
    runs: list[RunCurves], title: str, y_label: str, *names: str, by="tokens", from_zero=False
):
    """A panel with these numbers of all runs, or None if no run has one of them. A number that is an
    object, as of the parts of a mixture, is a curve for each part."""
    curves = []
    for run in runs:
        places = run.tokens
        if by == "seconds":
            places = run.seconds
        of_run = []
        for name in names:
            for part in names_of_parts(run, name) or [""]:
                curve = curve_of(run, name, places, part)
                if curve is not None:
                    of_run.append(curve)
        curves.append(of_run)
    if not any(curves):
        return None
    x_label = by
    if by == "seconds":
        x_label = in_longer_units(curves)
    return Panel(title, x_label, y_label, curves, from_zero)


def in_longer_units(curves: list[list[Curve]]) -> str:
    """Make the x of the curves, seconds, minutes or hours if they are many; the name of the axis."""
    most = max(curve.x.max() for of_run in curves for curve in of_run)
    name = "seconds"
    scale = 1
    if most > 2 * 3600:
        name = "hours"
        scale = 3600
    elif most > 2 * 60:
        name = "minutes"
        scale = 60
    for of_run in curves:
        for curve in of_run:
            curve.x = curve.x / scale
    return f"{name} of training"


def panels_of(runs: list[RunCurves]) -> list[Panel]:
    """The panels that have a number of any of the runs."""
    nats = "nats per token"
    if any("reward_mean" in line for run in runs for line in run.lines):
        nats = ""  # the loss of a policy has no unit
    panels = [
        panel_of(runs, "loss by tokens", nats, "loss", "val_loss"),
        panel_of(runs, "loss by time", nats, "loss", "val_loss", by="seconds"),
        panel_of(runs, "validation", "bits per byte", "val_bits_per_byte"),
        panel_of(runs, "reward", "mean", "reward_mean", "eval_reward"),
        panel_of(runs, "gradient norm", "before clipping", "grad_norm"),
        panel_of(runs, "learning rate", "", "lr"),
        panel_of(
            runs, "tokens per second", "of the whole job", "tokens_per_second", from_zero=True
        ),
        panel_of(runs, "peak memory of rank 0", "GiB", "memory_gib", from_zero=True),
        panel_of(runs, "load of experts", "largest / mean", "moe_load_max_over_mean"),
        panel_of(runs, "dead experts", "in all layers", "moe_dead_experts", from_zero=True),
        panel_of(runs, "validation of the parts", nats, "val_loss_by_part"),
        panel_of(runs, "epochs of the parts", "", "data_epochs"),
        panel_of(runs, "entropy of the policy", "nats per token", "entropy"),
        panel_of(runs, "length of samples", "tokens", "length_mean"),
    ]
    return [panel for panel in panels if panel is not None]


def means_of_curve(curve: Curve) -> Curve:
    """The means of POINTS parts of a long curve."""
    if len(curve.x) <= POINTS:
        return curve
    x = [part.mean() for part in np.array_split(curve.x, POINTS)]
    y = [part.mean() for part in np.array_split(curve.y, POINTS)]
    return Curve(np.array(x), np.array(y), curve.label, curve.is_held_out)


# ---------------------------------------------------------------- a picture
def draw_runs(runs: list[RunCurves], path: str) -> str:
    """Draw the panels of the runs on one page, .png, .svg or .pdf. Returns a line to print: the path,
    or the package to install, or that there is nothing to draw."""
    try:
        from matplotlib.figure import Figure
        from matplotlib.lines import Line2D
    except ImportError:
        return "no picture without matplotlib: pip install matplotlib"
    panels = panels_of(runs)
    if not panels:
        return "no picture: no step is logged yet"
    wide = min(WIDE, len(panels))
    high = -(-len(panels) // wide)
    figure = Figure(figsize=(4.2 * wide, 2.9 * high + 0.5), layout="constrained")
    axes = figure.subplots(high, wide, squeeze=False).flat
    for axis, panel in zip(axes, panels):
        draw_panel(axis, panel)
    for axis in list(figure.axes)[len(panels) :]:
        axis.remove()
    handles = []
    for i, run in enumerate(runs):
        handles.append(Line2D([], [], color=colour_of(i), lw=2, label=run.name))
    if any(curve.is_held_out for panel in panels for run in panel.curves for curve in run):
        handles.append(Line2D([], [], color="gray", lw=1.2, label="training"))
        held_out: dict[str, Any] = dict(color="gray", ls="--", lw=1.2, marker="o", ms=3.5)
        handles.append(Line2D([], [], label="held out", **held_out))
    figure.legend(handles=handles, loc="outside upper left", ncols=min(4, len(handles)), fontsize=9)
    figure.savefig(path, dpi=150)
    return f"picture: {path}"


def colour_of(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def draw_panel(axis, panel: Panel) -> None:
    """All runs in their colours; parts of a mixture have a mark each, named in the panel."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    labels = []
    for of_run in panel.curves:
        labels += [curve.label for curve in of_run if curve.label not in ("", *labels)]
    marks = "os^vDP*X"
    for i, of_run in enumerate(panel.curves):
        for curve in map(means_of_curve, of_run):
            # the first is the widest: curves that are the same are seen
            width = 1.1 + 1.2 * (1 - (i + 1) / len(panel.curves))
            style = dict(color=colour_of(i), lw=width)
            if curve.is_held_out:
                style |= dict(ls="--", marker="o", ms=3.5)
            elif len(curve.x) == 1:
                style |= dict(marker=".")
            if curve.label:
                style["marker"] = marks[labels.index(curve.label) % len(marks)]
                style["ms"] = 3.5
            axis.plot(curve.x, curve.y, **style)
    for number, label in enumerate(labels):
        mark = marks[number % len(marks)]
        axis.plot([], [], color="gray", marker=mark, ms=3.5, ls="", label=label)
    if labels:
        axis.legend(fontsize=7, frameon=False)
    if panel.from_zero:
        axis.set_ylim(bottom=0)
    else:
        lowest = min(curve.y.min() for of_run in panel.curves for curve in of_run)
        highest = max(curve.y.max() for of_run in panel.curves for curve in of_run)
        if lowest > 0 and highest > 30 * lowest:
            axis.set_yscale("log")
    if panel.x_label == "tokens":
        axis.xaxis.set_major_formatter(EngFormatter())  # 1.5 M
    axis.xaxis.set_major_locator(MaxNLocator(5))
    axis.set_title(panel.title, fontsize=10, loc="left")
    axis.set_xlabel(panel.x_label, fontsize=8)
    axis.set_ylabel(panel.y_label, fontsize=8)
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


# ---------------------------------------------------------------- a terminal
def text_panel(panel: Panel, width: int, height: int, paint=lambda text, run: text) -> list[str]:
    """The lines of a panel as text: run 0 has the letter a, its held-out numbers A. Points that share
    a column are averaged. paint(text, run): the text in the run's colour."""
    curves = [curve for of_run in panel.curves for curve in of_run]
    left = min(curve.x.min() for curve in curves)
    right = max(curve.x.max() for curve in curves)
    low = min(curve.y.min() for curve in curves)
    high = max(curve.y.max() for curve in curves)
    grid = [[" "] * width for _ in range(height)]
    numbered = [(run, curve) for run, of_run in enumerate(panel.curves) for curve in of_run]
    numbered.sort(key=held_out_last)
    for run, curve in numbered:
        mark = letter_of(run)
        if curve.is_held_out:
            mark = mark.upper()
        places = np.round((width - 1) * (curve.x - left) / ((right - left) or 1)).astype(int)
        for column in np.unique(places):
            y = curve.y[places == column].mean()
            row = round((height - 1) * (high - y) / ((high - low) or 1))
            grid[row][column] = paint(mark, run)
    lines = [f"{panel.title}, {panel.y_label}"]
    for i, cells in enumerate(grid):
        y = high - (high - low) * i / (height - 1)
        lines.append(f"{y:9.3f} |{''.join(cells).rstrip()}")
    lines.append(" " * 10 + "+" + "-" * width)
    ends = f"{panel.x_label:>9}  {left:,.0f}"
    lines.append(f"{ends}{f'{right:,.0f}':>{max(width + 11 - len(ends), 1)}}")
    return lines


def held_out_last(numbered: tuple[int, Curve]) -> bool:
    return numbered[1].is_held_out


def letter_of(run: int) -> str:
    return LETTERS[run % len(LETTERS)]


def describe_run(run: RunCurves, number: int) -> str:
    """One line of the table below the curves."""
    train = {}
    held_out = {}
    for line in run.lines:
        if line.get("tokens") is not None:
            train = line
        if "val_loss" in line:
            held_out = line
    if not train:
        return f"{letter_of(number)}  {run.name}: no step is logged yet"
    words = [f"step {train['step']}"]
    if run.last:
        words[0] += f"/{run.last}"
    words.append(f"loss {train['loss']:.4f}")
    if train.get("reward_mean") is not None:
        words.append(f"reward {train['reward_mean']:.3f}")
    if held_out.get("val_loss") is not None:
        words.append(f"val_loss {held_out['val_loss']:.4f} ({letter_of(number).upper()})")
    words.append(f"{train['tokens_per_second']:,.0f} tok/s")
    if train.get("moe_dead_experts"):
        words.append(f"{train['moe_dead_experts']:g} dead experts")
    if run.last > train["step"]:
        left = (run.last - train["step"]) * train["step_time_s"]
        words.append(f"{duration_text(left)} left")
    return f"{letter_of(number)}  {run.name}: {'  '.join(words)}"


def draw_text(runs: list[RunCurves], columns: int, rows: int, colours: bool) -> str:
    """The loss, or the reward, of all runs, and a line for each."""

    def paint(text: str, run: int) -> str:
        if not colours:
            return text
        return f"\x1b[{ANSI[run % len(ANSI)]}m{text}\x1b[0m"

    panel = panel_of(runs, "reward by tokens", "mean", "reward_mean", "eval_reward")
    if panel is None:
        panel = panel_of(runs, "loss by tokens", "nats per token", "loss", "val_loss")
    lines = []
    if panel is not None:
        height = min(max(rows - len(runs) - 5, 6), 30)
        lines = text_panel(panel, max(columns - 13, 20), height, paint)
    for number, run in enumerate(runs):
        lines.append(paint(describe_run(run, number), number))
    return "\n".join(lines)


def watch_runs(folders: list[str]) -> None:
    """Draw the runs in the terminal, again and again, until all have reached their last step, or
    Ctrl-C. Where stdout is no terminal: once. Raises ValueError for a folder without runs."""
    on_terminal = sys.stdout.isatty()
    while True:
        runs = [read_curves(name, path) for name, path in find_runs(folders).items()]
        columns, rows = 80, 30
        if on_terminal:
            columns, rows = os.get_terminal_size()
            print("\x1b[H\x1b[2J", end="")  # clear, and begin at the top
        print(draw_text(runs, columns, rows, on_terminal), flush=True)
        if not on_terminal or all(is_over(run) for run in runs):
            return
        time.sleep(PAUSE)


def is_over(run: RunCurves) -> bool:
    return bool(run.last) and bool(run.steps) and run.steps[-1] >= run.last


def show_runs(folders: list[str], picture: str | None, others: list[str]) -> int:
    """ablate.py --watch, and --picture: of runs that are there. others: words of the command line that
    start runs. Returns the exit status."""
    refuse(
        [
            (
                not folders,
                f"--picture {picture} draws the runs of --watch: add --watch RUN RUN",
            ),
            (bool(others), f"--watch shows runs and starts none: leave out {' '.join(others)}"),
        ]
    )
    if picture:
        check_writable(picture, "--picture")
        if Path(picture).suffix not in (".png", ".svg", ".pdf"):
            raise ValueError(f"--picture {picture}: need a .png, .svg or .pdf")
        runs = [read_curves(name, path) for name, path in find_runs(folders).items()]
        said = draw_runs(runs, picture)
        print(said)
        return int(not os.path.exists(picture))
    try:
        watch_runs(folders)
    except KeyboardInterrupt:
        print()
    return 0
