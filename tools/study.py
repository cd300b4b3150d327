"""Evaluate the runs of a study: the metric in pairs, verdicts with intervals, and the report. ablate.py makes the runs.

A study is a folder with study.json (variants and settings) and a run folder VARIANT/seed-I for each variant and seed.
Everything here is computed from the folder, so a report can be made again at any time.
"""
import json
import math
import re
import shlex
import statistics
from pathlib import Path

import numpy as np

from support.files import read_json, write_file
from support.metrics import read_lines
from tools.significance import fit_sizes, intervals, seeds_to_show

NOT_TRAINING = re.compile(r"_s$|per_second|mfu|memory|time")  # keys that differ between runs even if training is equal


# ---------------------------------------------------------------- one run
def folder_of(study_folder, name: str, seed: int) -> Path:
    return Path(study_folder, re.sub(r"[^\w.=,+-]+", "_", name), f"seed-{seed}")


def is_finished(lines: list[dict], variant: dict) -> bool:
    """Whether the last step is logged, and validated if the variant validates."""
    last = [line for line in lines if line["step"] == variant["steps"]]
    wanted = ["loss"] + ["val_loss"] * bool(variant["val_every"])
    return all(any(key in line for line in last) for key in wanted)


def read_runs(study: dict, folder) -> dict[tuple[str, int], list[dict]]:
    """{(variant, seed): lines of metrics.jsonl} of the finished runs."""
    found = {}
    for name, variant in study["variants"].items():
        for seed in range(max(study["seeds"], study["max_seeds"])):
            lines = read_lines(str(folder_of(folder, name, seed) / "metrics.jsonl"))
            if is_finished(lines, variant):
                found[name, seed] = lines
    return found


def curve(lines: list[dict], metric: str, axis: str = "step") -> tuple[np.ndarray, np.ndarray]:
    """(x, metric) of the lines with the metric; x in steps, tokens, or seconds of training."""
    points = [(line["step"], line[metric]) for line in lines if line.get(metric) is not None]
    steps, values = np.array([p[0] for p in points], float), np.array([p[1] for p in points], float)
    if axis == "step" or not points:
        return steps, values
    trained = [line for line in lines if "step_time_s" in line]
    done = np.array([0] + [line["step"] for line in trained], float)
    if axis == "tokens":
        return np.interp(steps, done, [0] + [line["tokens"] for line in trained]), values
    seconds = np.diff(done) * [line["step_time_s"] for line in trained]  # the mean since the last logged step
    return np.interp(steps, done, np.append(0, np.cumsum(seconds))), values


def metric_of(lines: list[dict], study: dict, budget: float) -> float | None:
    """The number that a run is judged by, or None. budget: tokens or seconds of --at, the same for all runs."""
    metric = study["metric"]
    x, y = curve(lines, metric, "tokens" if study["reach"] is not None else study["at"].replace("end", "step"))
    if not len(y):
        return None
    if study["reach"] is None:
        return float(y[-1] if study["at"] == "end" else np.interp(budget, x, y))
    sign = 1 if study["best"] == "low" else -1
    there = np.flatnonzero(sign * (y - study["reach"]) <= 0)
    if not len(there):
        return None
    i = int(there[0])  # between the last point above and the first below, on a straight line
    return float(x[i] if i == 0 else x[i - 1] + (x[i] - x[i - 1]) * (study["reach"] - y[i - 1]) / (y[i] - y[i - 1]))


def values_of(study: dict, runs: dict) -> dict[tuple[str, int], float]:
    """{(variant, seed): metric_of the run}, without the runs for which metric_of returns None."""
    budget = math.inf
    if study["at"] != "end":
        ends = [curve(lines, study["metric"], study["at"])[0] for lines in runs.values()]
        budget = min((x[-1] for x in ends if len(x)), default=math.inf)
    found = {key: metric_of(lines, study, budget) for key, lines in runs.items()}
    return {key: value for key, value in found.items() if value is not None}


# ---------------------------------------------------------------- pairs
def pairs_of(study: dict, found: dict, name: str, seeds: float = math.inf) -> list[tuple]:
    """[(of the variant, of the baseline)] for the first seeds with both. found: {(variant, seed): anything}."""
    base = study["baseline"]
    return [(found[name, i], found[base, i]) for n, i in found if n == name and i < seeds and (base, i) in found]


def differences(study: dict, values: dict, name: str, seeds: int) -> list[float]:
    """Variant minus baseline, for the first seeds with a number of both."""
    return [value - base for value, base in pairs_of(study, values, name, seeds)]


def training_of(lines: list[dict]) -> dict:
    """{(step, whether training or validation): the numbers that two equal trainings have alike}"""
    return {(line["step"], "loss" in line): {k: v for k, v in line.items() if not NOT_TRAINING.search(k)} for line in lines}


def plan_looks(study: dict, values: dict, identical: set[str], tried: set) -> tuple[dict[str, int], dict, list]:
    """({variant: seeds that count}, {variant: interval}, [(variant, seed)] to run now).

    Without --until there is a single look, at all seeds. With --until, there is a look after every seed from --seeds to
    --max_seeds; a decided variant runs no more, and its verdict stays. tried: finished and failed runs.
    """
    others, base = [name for name in study["variants"] if name != study["baseline"]], study["baseline"]
    first, most = study["seeds"], study["max_seeds"] if study["until"] else study["seeds"]
    counted, seeds = dict.fromkeys(others, first), first
    while True:
        open_ = [name for name in others if counted[name] == seeds]
        missing = [(name, i) for i in range(seeds) for name in (base, *open_) if (name, i) not in tried]
        pairs = {name: differences(study, values, name, counted[name]) for name in others if name not in identical}
        found = intervals({name: d for name, d in pairs.items() if d}, first, most)
        if missing or seeds == most:
            return counted, found, missing
        D = study["until"]
        undecided = [name for name in open_ if name in found and found[name][0] <= 0 <= found[name][1]
                     and not -D < found[name][0] <= found[name][1] < D]
        if not undecided:
            return counted, found, []
        seeds += 1
        counted |= dict.fromkeys(undecided, seeds)


def identical_variants(study: dict, runs: dict) -> set[str]:
    """Variants with the baseline's numbers in every logged step of every seed, bit for bit."""
    numbers = {key: training_of(lines) for key, lines in runs.items()}
    pairs = {name: pairs_of(study, numbers, name) for name in study["variants"] if name != study["baseline"]}
    return {name for name, both in pairs.items() if both and all(mine == base for mine, base in both)}


def next_runs(study: dict, folder, failed: set) -> list[tuple[str, int]]:
    runs = read_runs(study, folder)
    return plan_looks(study, values_of(study, runs), identical_variants(study, runs), runs.keys() | failed)[2]


def verdicts(study: dict, runs: dict) -> list[dict]:
    """The contents of verdicts.json. difference, low and high are variant minus baseline; null: unknown."""
    values, identical = values_of(study, runs), identical_variants(study, runs)
    counted, found, _ = plan_looks(study, values, identical, runs.keys())
    rows = []
    for name, seeds in counted.items():
        d = differences(study, values, name, seeds)
        low, high = (0.0, 0.0) if name in identical else found.get(name, (-math.inf, math.inf))
        good = -1 if study["best"] == "high" and study["reach"] is None else 1
        verdict = "undecided"
        if name in identical:
            verdict = "identical"
        elif low > 0 or high < 0:
            verdict = "better" if good * low < 0 else "worse"
        rows.append({
            "variant": name, "baseline": study["baseline"], "metric": study["metric"],
            "difference": statistics.mean(d) if d else None, "low": low if math.isfinite(low) else None,
            "high": high if math.isfinite(high) else None, "pairs": len(d), "verdict": verdict,
        })
    return rows


# ---------------------------------------------------------------- words
def sentence(row: dict, study: dict, d: list[float]) -> str:
    """One verdict in words."""
    unit = "tokens" if study["reach"] is not None else "nats" if row["metric"] in ("loss", "val_loss") else row["metric"]
    name, base, pairs = row["variant"], row["baseline"], f"{row['pairs']} pair{'s' * (row['pairs'] != 1)}"
    if row["verdict"] == "identical":
        return f"{name} and {base} are identical in every logged step ({pairs})"
    if not d:
        return f"{name}: no pair of runs to compare"
    if row["low"] is None:
        text = f"{name} minus {base} is {row['difference']:+.3g} {unit} with one seed"
        return f"{text}; nothing is known about noise: use --seeds 3 or more"
    interval = f"95 % interval {row['low']:.3g} to {row['high']:.3g}, {pairs}"
    if row["verdict"] != "undecided":
        low, high = sorted((abs(row["low"]), abs(row["high"])))
        verb = "beats" if row["verdict"] == "better" else "is worse than"
        return f"{name} {verb} {base} by {abs(row['difference']):.3g} {unit} (95 % interval {low:.3g} to {high:.3g}, {pairs})"
    hidden = max(abs(row["low"]), abs(row["high"]))
    if study["until"] and hidden < study["until"]:
        return f"{name}: no difference from {base} as large as {study['until']:.4g} {unit} ({interval})"
    wish = study["until"] or hidden / 2
    enough, text = seeds_to_show(wish, d), f"{name}: no difference from {base} found; one of {hidden:.2g} {unit} could hide"
    more = max(enough - len(d), 1) if enough else 0
    seeds = f"about {more} more seed{'s' * (more > 1)} would" if enough else "even 1,000 seeds would not"
    return f"{text} ({interval}); {seeds} show {wish:.2g}"


def comparison(study: dict, runs: dict, rows: list[dict]) -> list[list[str]]:
    """Header and a row per variant: mean, difference, and costs."""
    values, by_name = values_of(study, runs), {row["variant"]: row for row in rows}
    paired, unpaired = "noise of a difference, paired", "unpaired"
    head = ["variant", study["metric"], "difference", "95 % interval", "pairs", paired, unpaired, "tokens/s", "GiB", "batches"]
    lines = [head]
    for name in study["variants"]:
        cells, row = dict.fromkeys(head, "") | {"variant": name, "pairs": "baseline"}, by_name.get(name)
        mine, both = [value for (n, _), value in values.items() if n == name], pairs_of(study, values, name)
        trained = [line for (n, _), found in runs.items() if n == name for line in found if "tokens_per_second" in line]
        if mine:
            cells[study["metric"]] = f"{statistics.mean(mine):.4f}"
        if row:
            cells |= {"pairs": str(row["pairs"]), "batches": batches(study, runs, name)}
            if row["difference"] is not None:
                cells["difference"] = f"{row['difference']:+.3g}"
            if row["low"] is not None:
                cells["95 % interval"] = f"{row['low']:.3g} to {row['high']:.3g}"
            if len(both) > 1:
                cells[paired] = f"{statistics.stdev(value - base for value, base in both):.2g}"
                cells[unpaired] = f"{math.hypot(*map(statistics.stdev, zip(*both))):.2g}"
        if trained:
            cells["tokens/s"] = f"{statistics.median(line['tokens_per_second'] for line in trained):,.0f}"
            cells["GiB"] = f"{max(line['memory_gib'] for line in trained):.2f}"
        lines.append(list(cells.values()))
    return lines


def batches(study: dict, runs: dict, name: str) -> str:
    """Whether the pairs of a variant saw the same tokens, by their tokens_hash."""
    seen = {key: {line["step"]: line["tokens_hash"] for line in lines if "tokens_hash" in line} for key, lines in runs.items()}
    pairs = pairs_of(study, seen, name)
    others = [step for mine, base in pairs for step in mine.keys() & base.keys() if mine[step] != base[step]]
    return "" if not pairs else f"others from step {min(others)} on" if others else "the same"


def markdown(lines: list[list[str]]) -> str:
    """A table, without empty columns, that is also readable as it stands."""
    used = [column for column in zip(*lines) if any(column[1:])]
    head, *rows = zip(*([cell.ljust(max(map(len, column))) for cell in column] for column in used))
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["-" * len(cell) for cell in head], *rows))


def curves_of(study: dict, runs: dict) -> dict[str, list]:
    """{variant and number of seeds: [(steps, metric) of each run]}, of the variants with curves."""
    curves = {}
    for name in study["variants"]:
        found = [curve(lines, study["metric"]) for (n, _), lines in runs.items() if n == name]
        if found and all(len(x) for x, _ in found):
            curves[f"{name} ({len(found)} seeds)"] = found
    return curves


def fit_text(study: dict, runs: dict) -> str:
    """--fit: L = E + A / N^a over the variants' sizes, N without the embedding table. ValueError for fewer than four sizes."""
    sizes = {name: variant["parameters"] for name, variant in study["variants"].items()}
    points = [(sizes[name], value) for (name, _), value in sorted(values_of(study, runs).items()) if sizes[name]]
    found = fit_sizes([n for n, _ in points], [value for _, value in points])
    text = (f"L = {found['E']:.4g} + {found['A']:.4g} / N^{found['a']:.3g}, 95 % interval of the exponent {found['low']:.3g} "
            f"to {found['high']:.3g}, {len(points)} runs of {len({n for n, _ in points})} sizes")
    rows = [[f"{n:,}", f"{v:.4f}", f"{r:+.4f}"] for (n, v), r in zip(points, found["residuals"])]
    return f"{text}\n\n{markdown([['N', study['metric'], 'residual'], *rows])}"


# ---------------------------------------------------------------- the report
def draw_curves(panels: list[tuple[str, dict]], path) -> str:
    """Draw [(unit, {name: [(steps, values) of each run]})] side by side, each band from the lowest run to the highest. Returns
    a line to print: the path, or the package to install."""
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
        axis.set(xlabel="step", ylabel=unit)
        axis.grid(alpha=0.3), axis.legend()
    figure.savefig(path, dpi=120)
    return f"picture: {path}"


def report_study(folder, failed: dict | None = None) -> None:
    """Print the report of a study, and write verdicts.json, results.jsonl, report.md and curves.png.

    failed: {(variant, seed): last line of the log}.
    """
    folder, study = Path(folder), read_json(folder, "study.json")
    runs = read_runs(study, folder)
    rows, values = verdicts(study, runs), values_of(study, runs)
    said = [sentence(row, study, differences(study, values, row["variant"], row["pairs"])) for row in rows]
    said += [f"{name}, seed {seed} has failed: {line}" for (name, seed), line in (failed or {}).items()]
    if silent := [f"{name}, seed {seed}" for name, seed in runs if (name, seed) not in values]:
        what = f"reached {study['metric']} {study['reach']}" if study["reach"] is not None else f"logged {study['metric']}"
        said.append(f"never {what}, so left out: {'; '.join(silent)}")
    if study["fit"]:
        said.append(fit_text(study, runs))
    cells = comparison(study, runs, rows)
    print(f"\n{markdown(cells)}\n\n" + "\n".join(said))
    results = [{"variant": name, "seed": seed, "value": values.get((name, seed)), "folder": str(folder_of(folder, name, seed))}
               for name, seed in sorted(runs)]
    commands = {name: shlex.join([variant["recipe"], *variant["flags"]]) for name, variant in study["variants"].items()}
    flags = "\n".join(f"- {name}: `{command}`" for name, command in commands.items())
    text = f"# {study['metric']} of {len(study['variants'])} variants\n\n" + "\n\n".join(said) + f"\n\n{markdown(cells)}\n\n"
    write_file(folder / "verdicts.json", json.dumps(rows, indent=1).encode())
    write_file(folder / "results.jsonl", "".join(json.dumps(line) + "\n" for line in results).encode())
    write_file(folder / "report.md", f"{text}{flags}\n".encode())
    print(f"\n{folder}: report.md, verdicts.json, results.jsonl")
    print(draw_curves([(study["metric"], curves_of(study, runs))], folder / "curves.png"))
