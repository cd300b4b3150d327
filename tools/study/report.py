"""The report of a study: sentences, tables, pictures, and an appendix with all that is needed to
repeat the study."""

import base64
import difflib
import html
import json
import math
import platform
import shlex
import statistics
from pathlib import Path

import numpy as np

from flags.files import read_json, sha256_file, write_file
from tools.study.significance import ALPHA, LATER, seeds_to_show
from tools.study.study import (
    FAILED,
    curve,
    folder_of,
    locate,
    look_at_all,
    looks_of,
    pairs_of,
    read_runs,
    read_study,
    values_of,
)
from training.metrics import to_json


# ---------------------------------------------------------------- numbers
def seconds_of(lines: list[dict]) -> float:
    """Seconds of all training steps: step_time_s is the mean since the last logged step."""
    done, seconds = np.array(
        [(0, 0), *((x["step"], x["step_time_s"]) for x in lines if "step_time_s" in x)], float
    ).T
    return float(np.diff(done) @ seconds[1:])


def verdicts(study: dict, runs: dict) -> list[dict]:
    """The contents of verdicts.json. difference, low and high are variant minus baseline; null:
    unknown. level: of the interval. died, baseline_died: seeds with the worst value. budget: of
    each run, as typed; null: the recipe's steps.
    differences: of the pairs, in the order of seeds."""
    values = values_of(study, runs)
    rows = []
    sign = -1 if study["best"] == "high" and study["reach"] is None else 1
    for name, (d, (low, high, level), _) in look_at_all(study, runs).items():
        verdict = (
            "undecided"
            if low < 0 < high
            else "identical"
            if low == 0
            else "better"
            if sign * low < 0
            else "worse"
        )
        died, base_died = (
            (sum(map(math.isinf, side)) for side in zip(*pairs_of(study, values, name, len(d))))
            if d
            else (0, 0)
        )
        mean, low, high = map(to_json, (sum(d) / len(d) if d else None, low, high))
        rows.append(
            {
                "variant": name,
                "baseline": study["baseline"],
                "metric": study["metric"],
                "difference": mean,
                "low": low,
                "high": high,
                "pairs": len(d),
                "verdict": verdict,
                "level": level,
                "died": died,
                "baseline_died": base_died,
                "budget": study["budget"],
                "differences": [*map(to_json, d)],
            }
        )
    return rows


# ---------------------------------------------------------------- words
def sentence(row: dict, study: dict, d: list[float]) -> str:
    """One verdict in words."""
    unit = (
        "tokens"
        if study["reach"] is not None
        else "nats"
        if row["metric"] in ("loss", "val_loss")
        else row["metric"]
    )
    name = row["variant"]
    base = row["baseline"]
    pairs = f"{row['pairs']} pair{'s' * (row['pairs'] != 1)}"
    verb = {"better": "beats", "worse": "is worse than"}.get(row["verdict"])
    if row["verdict"] == "identical":
        return f"{name} and {base} are identical in every logged step ({pairs})"
    if not d:
        return f"{name}: no pair of runs to compare"
    if row["died"] or row["baseline_died"]:
        end = "died" if study["reach"] is None else f"died or never reached {study['reach']:g}"
        text = f"{row['died']} of {len(d)} seeds {end}, and {row['baseline_died']} of {len(d)} of {base}"
        return (
            f"{name} {verb} {base}: {text}"
            if verb
            else f"{name}: no verdict against {base}: {text}"
        )
    if row["low"] is None:
        why = (
            "equal numbers may be a coarse metric's"
            if len(d) in dict(looks_of(study))
            else "give all --seeds, 3 or more"
        )
        return f"{name} minus {base} is {row['difference']:+.3g} {unit} ({pairs}); nothing is known about noise: {why}"
    low, high = sorted(map(abs, (row["low"], row["high"]))) if verb else (row["low"], row["high"])
    interval = f"{100 * row['level']:.3g} % interval {low:.3g} to {high:.3g}, {pairs}"
    if verb:
        return f"{name} {verb} {base} by {abs(row['difference']):.3g} {unit} ({interval})"
    hidden = max(-low, high)
    if study["until"] and hidden < study["until"]:
        return f"{name}: no difference from {base} as large as {study['until']:.4g} {unit} ({interval})"
    if len(d) < 2:
        return f"{name}: no difference from {base} found; one of {hidden:.2g} {unit} could hide ({interval})"
    # left: the share of the next look
    left = (1 + LATER - looks_of(study)[-1][1]) / 2
    wish = study["until"] or hidden / 2
    enough = seeds_to_show(wish, d, ALPHA * left / study["comparisons"] / study["sizes"])
    more = (
        f"about {max(enough - len(d), 1)} more seeds would show"
        if enough
        else "even 1,000 seeds would not show"
    )
    text = f"{name}: no difference from {base} found; one of {hidden:.2g} {unit} could hide"
    return f"{text} ({interval}); {more} {wish:.2g} with a chance of 80 %"


def comparison(study: dict, runs: dict, rows: list[dict]) -> list[list[str]]:
    """Header and a row per variant: mean, difference, and costs."""
    values = values_of(study, runs)
    by_name = {row["variant"]: row for row in rows}
    lines = [
        [
            "variant",
            study["metric"],
            "difference",
            "interval",
            "level",
            "pairs",
            "noise",
            "tokens/s",
            "GiB",
            "batches",
        ]
    ]
    for name in study["variants"]:
        row = {
            key: value
            for key, value in by_name.get(name, {"pairs": "baseline"}).items()
            if value is not None
        }
        mine = [value for (n, _), value in values.items() if n == name]
        both = pairs_of(study, values, name)
        trained = [
            line
            for (n, _), found in runs.items()
            if n == name
            for line in found
            if "tokens_per_second" in line
        ]

        def show(text, *keys, row=row):
            return text.format(*map(row.get, keys)) if row.keys() >= {*keys} else ""

        dead = sum(map(math.isinf, mine))
        noise = len(both) > 1 and np.isfinite(both).all()
        lines.append(
            [
                name,
                (
                    f"{statistics.mean(mine):.4f}"
                    + f", {len(mine)} seeds" * bool(study["until"])
                    + f", {dead} of {len(mine)} died" * (dead > 0)
                )
                if mine
                else "",
                show("{:+.3g}", "difference"),
                show("{:.3g} to {:.3g}", "low", "high"),
                show("{:.4g}", "level"),
                str(row["pairs"]),
                f"{statistics.stdev(value - base for value, base in both):.2g}"
                if noise and name in by_name
                else "",
                f"{statistics.median(line['tokens_per_second'] for line in trained):,.0f}"
                if trained
                else "",
                f"{max(line['memory_gib'] for line in trained):.2f}" if trained else "",
                batches(study, runs, name) if name in by_name else "",
            ]
        )
    return lines


def batches(study: dict, runs: dict, name: str) -> str:
    """Whether the pairs of a variant saw the same tokens, by their tokens_hash."""
    seen = {
        key: {line["step"]: line["tokens_hash"] for line in lines if "tokens_hash" in line}
        for key, lines in runs.items()
    }
    pairs = pairs_of(study, seen, name)
    others = [
        step
        for mine, base in pairs
        for step in mine.keys() & base.keys()
        if mine[step] != base[step]
    ]
    return "" if not pairs else f"others from step {min(others)} on" if others else "the same"


def markdown(lines: list[list[str]]) -> str:
    """A table, without empty columns, that is also readable as it stands."""
    used = [column for column in zip(*lines) if any(column[1:])]
    head, *rows = zip(*([cell.ljust(max(map(len, column))) for cell in column] for column in used))
    return "\n".join(
        "| " + " | ".join(row) + " |" for row in (head, ["-" * len(cell) for cell in head], *rows)
    )


def curves_of(study: dict, runs: dict) -> list[tuple[str, dict]]:
    """Two panels for draw_curves: the metric of the variants with curves, and the differences of
    their pairs."""
    found = {run: curve(lines, study["metric"]) for run, lines in runs.items()}
    found = {run: (x, y) for run, (x, y) in found.items() if len(x)}
    curves = {}
    differences = {}
    for name in study["variants"]:
        mine = [points for (n, _), points in found.items() if n == name]
        both = pairs_of(study, found, name)
        if mine:
            curves[f"{name} ({len(mine)} seeds)"] = mine
        # where one of a pair has no point, on the line between its points
        if both and name != study["baseline"]:
            differences[f"{name} ({len(both)} pairs)"] = [
                (x, y - np.interp(x, *base)) for (x, y), base in both
            ]
    return [(study["metric"], curves)] + [
        (f"minus {study['baseline']} of the same seed", differences)
    ] * bool(differences)


# ---------------------------------------------------------------- the report
def draw_curves(panels: list[tuple[str, dict]], path) -> str:
    """Draw [(unit, {name: [(steps, values) of each run]})] side by side, each band from the lowest
    run to the highest, with a dot at the end of each run. Returns a line to print: the path, or the
    package to install."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "no picture without matplotlib: pip install matplotlib"
    figure = Figure(figsize=(8 * len(panels), 5), layout="constrained")
    for axis, (unit, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels):
        for name, found in curves.items():
            x = np.unique(np.concatenate([x for x, _ in found]))
            y = np.array([np.interp(x, *points) for points in found])
            (line,) = axis.plot(x, y.mean(0), label=name, marker="." if len(x) < 40 else None)
            axis.fill_between(x, y.min(0), y.max(0), color=line.get_color(), alpha=0.2, linewidth=0)
            axis.plot(
                [x[-1] for x, _ in found],
                [y[-1] for _, y in found],
                "o",
                color=line.get_color(),
                markersize=4,
            )
        axis.set(xlabel="step", ylabel=unit)
        axis.grid(alpha=0.3), axis.legend()
    figure.savefig(path, dpi=120)
    return f"picture: {path}"


def costs_of(variants: dict[str, dict], runs: dict | None = None) -> list[list[str]]:
    """Header and a row per variant: what one run costs, as far as it is known, with the seconds of
    the slowest of the runs."""
    rows = [
        [
            "variant",
            "active parameters",
            "all parameters",
            "steps",
            "tokens",
            "FLOPs",
            "seconds of training",
        ]
    ]
    for name, variant in variants.items():
        of_run = [variant[key] and variant[key] * variant["steps"] for key in ("tokens", "flops")]
        seconds = [seconds_of(lines) for (n, _), lines in (runs or {}).items() if n == name]
        numbers = [
            *(
                f"{variant[key]:,}" if variant[key] else ""
                for key in ("parameters", "all_parameters", "steps")
            ),
            *(f"{number:.3g}" if number else "" for number in (*of_run, max(seconds, default=0))),
        ]
        rows.append([name, *numbers])
    return rows


def appendix(study: dict, folder: Path, runs: dict) -> list[str]:
    """Paragraphs: command, code, seeds and machine of a study, and how the variants' code differs
    from the baseline's."""
    configs = [folder_of(folder, *run) / "config.json" for run in runs]
    made = [read_json(path)["_run"] for path in configs if path.exists()]
    facts = {key: {str(run[key]) for run in made if key in run} for key in ("commit", "torch")}
    facts |= {"seeds": {str(seed) for _, seed in runs}, "machine of this report": {platform.node()}}
    found = [
        f"command: `{study['command']}`",
        *(f"{key}: {', '.join(sorted(values))}" for key, values in facts.items()),
    ]
    base = study["variants"][study["baseline"]]
    texts = {}
    for name, variant in study["variants"].items():
        found.append(f"{name}: `{shlex.join(['python', variant['recipe'], *variant['flags']])}`")
        recipe = Path(base["file"])
        fork = Path(variant["file"])
        # the recipes may have different names, the other files do not
        for file in variant["files"].keys() - {"torch"}:
            old = recipe.name if file == fork.name else file
            if base["files"].get(old) != variant["files"][file]:
                pairs = (
                    (locate(recipe, old), base["files"].get(old)),
                    (locate(fork, file), variant["files"][file]),
                )
                both = [
                    path.read_text().splitlines()
                    if path.is_file() and sha256_file(path) == was
                    else [f"(unknown: {was})"]
                    for path, was in pairs
                ]
                texts[
                    "\n".join(
                        [
                            "```diff",
                            *difflib.unified_diff(*both, old, file, lineterm="", n=1),
                            "```",
                        ]
                    )
                ] = None
    return found + list(texts)


def page_of(text: str, picture: Path) -> str:
    """The report as one HTML file, the picture inside."""
    data = base64.b64encode(picture.read_bytes() if picture.exists() else b"").decode()
    image = (
        '<img alt="curves, and differences of pairs" width="100%" '
        f'src="data:image/png;base64,{data}">' * bool(data)
    )
    return f'<!doctype html><meta charset="utf-8"><title>Report</title>\n{image}\n<pre>\n{html.escape(text)}\n</pre>\n'


def report_study(folder) -> bool:
    """Print the report of a study, and write verdicts.json, report.md, report.html and curves.png.
    Returns whether no run has failed."""
    folder, study = Path(folder), read_study(folder)
    runs, study["looks"] = read_runs(study, folder), looks_of(study)
    write_file(folder / "study.json", json.dumps(study, indent=1).encode())
    rows = verdicts(study, runs)
    looks = look_at_all(study, runs)
    values = values_of(study, runs)
    said = study["tuned"] + [sentence(row, study, looks[row["variant"]][0]) for row in rows]
    if study["noise"]:
        said.append(
            "right if the noise is {sd:.2g} here, too ({df} degrees of freedom)".format(
                **study["noise"]
            )
        )
    asked = [(name, seed) for name in study["variants"] for seed in range(study["seeds"])]
    failed = [
        run for run in dict.fromkeys([*asked, *runs]) if (folder_of(folder, *run) / FAILED).exists()
    ]
    said += [
        f"{name}, seed {seed} has failed: {(folder_of(folder, name, seed) / FAILED).read_text()}"
        for name, seed in failed
    ]
    if missing := [f"{name}, seed {seed}" for name, seed in asked if (name, seed) not in runs]:
        said.append(f"not finished, so left out: {'; '.join(missing)}")
    if silent := [f"{name}, seed {seed}" for name, seed in runs if (name, seed) not in values]:
        said.append(f"no {study['metric']} to compare, so left out: {'; '.join(silent)}")
    tables = [markdown(comparison(study, runs, rows)), markdown(costs_of(study["variants"], runs))]
    print(f"\n{tables[0]}\n\n" + "\n".join(said))
    write_file(folder / "verdicts.json", json.dumps(rows, indent=1).encode())
    print(f"\n{folder}: report.md, report.html, verdicts.json")
    print(draw_curves(curves_of(study, runs), folder / "curves.png"))
    title = f"# {study['metric']} of {len(study['variants'])} variants"
    text = "\n\n".join([title, *said, *tables, *appendix(study, folder, runs)])
    write_file(folder / "report.md", f"{text}\n".encode())
    write_file(folder / "report.html", page_of(text, folder / "curves.png").encode())
    return not failed
