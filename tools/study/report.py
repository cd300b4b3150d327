"""The report of a study: sentences, tables, pictures, and an appendix with all that is needed to
repeat the study."""

import difflib
import io
import json
import math
import platform
import shlex
import statistics
from pathlib import Path

import numpy as np

from flags.files import read_json, sha256_file, write_file
from tools.study.page import page_of
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
    points = [(0, 0)]
    for line in lines:
        if "step_time_s" in line:
            points.append((line["step"], line["step_time_s"]))
    done, seconds = np.array(points, float).T
    return float(np.diff(done) @ seconds[1:])


def verdict_of(low: float, high: float, sign: int) -> str:
    """What an interval of variant minus baseline says. sign: 1 if low is good, -1 if high is."""
    if low < 0 < high:
        return "undecided"
    if low == 0:
        return "identical"
    if sign * low < 0:
        return "better"
    return "worse"


def verdicts(study: dict, runs: dict) -> list[dict]:
    """The contents of verdicts.json. difference, low and high are variant minus baseline; null:
    unknown. level: of the interval. died, baseline_died: seeds with the worst value. budget: of
    each run, as typed; null: the recipe's steps.
    differences: of the pairs, in the order of seeds."""
    values = values_of(study, runs)
    rows = []
    sign = 1
    if study["best"] == "high" and study["reach"] is None:
        sign = -1
    for name, (d, (low, high, level), _) in look_at_all(study, runs).items():
        verdict = verdict_of(low, high, sign)
        mean = None
        died = 0
        base_died = 0
        if d:
            mean = sum(d) / len(d)
            ours, base = zip(*pairs_of(study, values, name, len(d)))
            died = sum(map(math.isinf, ours))
            base_died = sum(map(math.isinf, base))
        rows.append(
            {
                "variant": name,
                "baseline": study["baseline"],
                "metric": study["metric"],
                "difference": to_json(mean),
                "low": to_json(low),
                "high": to_json(high),
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
    if study["reach"] is not None:
        unit = "tokens"
    elif row["metric"] in ("loss", "val_loss"):
        unit = "nats"
    else:
        unit = row["metric"]
    name = row["variant"]
    base = row["baseline"]
    pairs = f"{row['pairs']} pairs"
    if row["pairs"] == 1:
        pairs = "1 pair"
    verb = {"better": "beats", "worse": "is worse than"}.get(row["verdict"])
    if row["verdict"] == "identical":
        return f"{name} and {base} are identical in every logged step ({pairs})"
    if not d:
        return f"{name}: no pair of runs to compare"
    if row["died"] or row["baseline_died"]:
        if study["reach"] is None:
            end = "died"
        else:
            end = f"died or never reached {study['reach']:g}"
        text = f"{row['died']} of {len(d)} seeds {end}, and {row['baseline_died']} of {len(d)} of {base}"
        if verb:
            return f"{name} {verb} {base}: {text}"
        return f"{name}: no verdict against {base}: {text}"
    if row["low"] is None:
        why = "give all --seeds, 3 or more"
        if len(d) in dict(looks_of(study)):
            why = "equal numbers may be a coarse metric's"
        return f"{name} minus {base} is {row['difference']:+.3g} {unit} ({pairs}); nothing is known about noise: {why}"
    low = row["low"]
    high = row["high"]
    if verb:
        low, high = sorted((abs(low), abs(high)))
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
    more = "even 1,000 seeds would not show"
    if enough:
        more = f"about {max(enough - len(d), 1)} more seeds would show"
    text = f"{name}: no difference from {base} found; one of {hidden:.2g} {unit} could hide"
    return f"{text} ({interval}); {more} {wish:.2g} with a chance of 80 %"


def comparison(study: dict, runs: dict, rows: list[dict]) -> list[list[str]]:
    """Header and a row per variant: mean, difference, and costs."""
    values = values_of(study, runs)
    by_name = {row["variant"]: row for row in rows}
    lines = [
        ["variant", study["metric"], "difference", "interval", "level"]
        + ["pairs", "noise", "tokens/s", "MFU", "GiB", "batches"]
    ]
    for name in study["variants"]:
        of_seeds = [value for (n, _), value in values.items() if n == name]
        mean = mean_in_words(of_seeds, bool(study["until"]))
        if name in by_name:
            row = by_name[name]
            cells = [
                show("{:+.3g}", row["difference"]),
                show("{:.3g} to {:.3g}", row["low"], row["high"]),
                show("{:.4g}", row["level"]),
                str(row["pairs"]),
                noise_of_pairs(pairs_of(study, values, name)),
                *speed_and_memory(runs, name),
                batches(study, runs, name),
            ]
        else:
            cells = ["", "", "", "baseline", "", *speed_and_memory(runs, name), ""]
        lines.append([name, mean, *cells])
    return lines


def show(text: str, *numbers: float | None) -> str:
    """The text with the numbers; "" if one of them is unknown."""
    if None in numbers:
        return ""
    return text.format(*numbers)


def mean_in_words(values: list[float], says_seeds: bool) -> str:
    """The mean over the seeds of a variant, and how many of them died."""
    if not values:
        return ""
    text = f"{statistics.mean(values):.4f}"
    if says_seeds:
        text += f", {len(values)} seeds"
    dead = sum(map(math.isinf, values))
    if dead:
        text += f", {dead} of {len(values)} died"
    return text


def noise_of_pairs(pairs: list[tuple[float, float]]) -> str:
    """The standard deviation of the differences; "" for a single pair, and if a run died."""
    if len(pairs) < 2 or not np.isfinite(pairs).all():
        return ""
    return f"{statistics.stdev(value - base for value, base in pairs):.2g}"


def speed_and_memory(runs: dict, name: str) -> tuple[str, str, str]:
    """Tokens per second, MFU and GiB of a variant, over all its runs; "" for what was not logged,
    such as MFU on a device whose peak nobody knows."""
    speeds = []
    mfus = []
    memory = []
    for (n, _), lines in runs.items():
        for line in lines:
            if n == name and "tokens_per_second" in line:
                speeds.append(line["tokens_per_second"])
                memory.append(line["memory_gib"])
            if n == name and line.get("mfu") is not None:
                mfus.append(line["mfu"])
    if not speeds:
        return "", "", ""
    mfu = ""
    if mfus:
        mfu = f"{100 * statistics.median(mfus):.1f} %"
    return f"{statistics.median(speeds):,.0f}", mfu, f"{max(memory):.2f}"


def batches(study: dict, runs: dict, name: str) -> str:
    """Whether the pairs of a variant saw the same tokens, by their tokens_hash."""
    seen = {}  # run -> {step: tokens_hash}
    for run, lines in runs.items():
        seen[run] = {line["step"]: line["tokens_hash"] for line in lines if "tokens_hash" in line}
    pairs = pairs_of(study, seen, name)
    if not pairs:
        return ""
    differ = set()  # steps
    for ours, base in pairs:
        for step in ours.keys() & base.keys():
            if ours[step] != base[step]:
                differ.add(step)
    if differ:
        return f"others from step {min(differ)} on"
    return "the same"


def markdown(lines: list[list[str]]) -> str:
    """A table, without empty columns, that is also readable as it stands."""
    columns = []
    for column in zip(*lines):
        if any(column[1:]):
            width = max(map(len, column))
            head, *cells = [cell.ljust(width) for cell in column]
            columns.append([head, "-" * width, *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in zip(*columns))


def curves_of(study: dict, runs: dict) -> list[tuple[str, dict]]:
    """Two panels for draw_curves: the metric of the variants with curves, and the differences of
    their pairs."""
    found = {run: curve(lines, study["metric"]) for run, lines in runs.items()}
    found = {run: (x, y) for run, (x, y) in found.items() if len(x)}
    curves = {}
    differences = {}
    for name in study["variants"]:
        of_seeds = [points for (n, _), points in found.items() if n == name]
        both = pairs_of(study, found, name)
        if of_seeds:
            curves[f"{name} ({len(of_seeds)} seeds)"] = of_seeds
        # where one of a pair has no point, on the line between its points
        if both and name != study["baseline"]:
            minus = [(x, y - np.interp(x, *base)) for (x, y), base in both]
            differences[f"{name} ({len(both)} pairs)"] = minus
    panels = [(study["metric"], curves)]
    if differences:
        panels.append((f"minus {study['baseline']} of the same seed", differences))
    return panels


# ---------------------------------------------------------------- the report
def draw_curves(panels: list[tuple[str, dict]], path: str | Path) -> str:
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
            marker = None
            if len(x) < 40:
                marker = "."
            (line,) = axis.plot(x, y.mean(0), label=name, marker=marker)
            colour = line.get_color()
            axis.fill_between(x, y.min(0), y.max(0), color=colour, alpha=0.2, linewidth=0)
            ends = [(x[-1], y[-1]) for x, y in found]
            axis.plot(*zip(*ends), "o", color=colour, markersize=4)
        axis.set(xlabel="step", ylabel=unit)
        axis.grid(alpha=0.3)
        axis.legend()
    picture = io.BytesIO()
    figure.savefig(picture, dpi=120, format="png")
    write_file(path, picture.getvalue())
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
        cells = []
        for key in ("parameters", "all_parameters", "steps"):
            cells.append(known("{:,}", variant[key]))
        for key in ("tokens", "flops"):
            cells.append(known("{:.3g}", variant[key] and variant[key] * variant["steps"]))
        seconds = [seconds_of(lines) for (n, _), lines in (runs or {}).items() if n == name]
        cells.append(known("{:.3g}", max(seconds, default=0)))
        rows.append([name, *cells])
    return rows


def known(text: str, number: float | None) -> str:
    """The text with the number; "" for none and 0."""
    if not number:
        return ""
    return text.format(number)


def appendix(study: dict, folder: Path, runs: dict) -> list[str]:
    """Paragraphs: command, code, seeds and machine of a study, and how the variants' code differs
    from the baseline's."""
    configs = [folder_of(folder, *run) / "config.json" for run in runs]
    made = [read_json(path)["_run"] for path in configs if path.exists()]
    facts = {}
    for key in ("commit", "torch"):
        facts[key] = {str(run[key]) for run in made if key in run}
    facts["seeds"] = {str(seed) for _, seed in runs}
    facts["machine of this report"] = {platform.node()}
    found = [f"command: `{study['command']}`"]
    for key, values in facts.items():
        found.append(f"{key}: {', '.join(sorted(values))}")
    diffs = []
    for name, variant in study["variants"].items():
        found.append(f"{name}: `{shlex.join(['python', variant['recipe'], *variant['flags']])}`")
        diffs += diffs_of(study["variants"][study["baseline"]], variant)
    return found + list(dict.fromkeys(diffs))


def diffs_of(base: dict, variant: dict) -> list[str]:
    """The files of a variant that are not the baseline's, as diffs. A file that the baseline lacks is
    compared with the file of its folder that it was copied from, if one looks like it."""
    recipe = Path(base["file"])
    fork = Path(variant["file"])
    diffs = []
    for file in variant["files"].keys() - {"torch"}:
        # the recipes may have different names, the other files do not
        old = file
        if file == fork.name:
            old = recipe.name
        now = variant["files"][file]
        if base["files"].get(old) == now:
            continue
        after = lines_as_trained(locate(fork, file), now)
        if old not in base["files"]:
            old = copied_from(file, after, base)
        before = []
        if old in base["files"]:
            before = lines_as_trained(locate(recipe, old), base["files"][old])
        diff = difflib.unified_diff(before, after, old, file, lineterm="", n=1)
        diffs.append("\n".join(["```diff", *diff, "```"]))
    return diffs


ALIKE = 0.5  # share of equal lines from which a file counts as a copy


def copied_from(file: str, lines: list[str], base: dict) -> str:
    """The file of the baseline, in the folder of `file`, with the most lines in common with it;
    /dev/null if none looks like an original."""
    best = ALIKE
    original = "/dev/null"
    matcher = difflib.SequenceMatcher(autojunk=False)
    matcher.set_seq2(lines)
    for name, sha256 in base["files"].items():
        if Path(name).parent != Path(file).parent or name == "torch":
            continue
        matcher.set_seq1(lines_as_trained(locate(Path(base["file"]), name), sha256))
        if matcher.quick_ratio() > best and matcher.ratio() > best:
            best = matcher.ratio()
            original = name
    return original


def lines_as_trained(path: Path, sha256: str | None) -> list[str]:
    """The lines of a file, if it is still the one that trained."""
    if path.is_file() and sha256_file(path) == sha256:
        return path.read_text().splitlines()
    return [f"(unknown: {sha256})"]


def report_study(folder: str | Path) -> bool:
    """Print the report of a study, and write verdicts.json, report.md, report.html and curves.png.
    Returns whether no run has failed."""
    folder = Path(folder)
    study = read_study(folder)
    runs = read_runs(study, folder)
    study["looks"] = looks_of(study)
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
    has_failed = False
    for name, seed in dict.fromkeys([*asked, *runs]):
        failed = folder_of(folder, name, seed) / FAILED
        if failed.exists():
            has_failed = True
            said.append(f"{name}, seed {seed} has failed: {failed.read_text()}")
    missing = [f"{name}, seed {seed}" for name, seed in asked if (name, seed) not in runs]
    if missing:
        said.append(f"not finished, so left out: {'; '.join(missing)}")
    silent = [f"{name}, seed {seed}" for name, seed in runs if (name, seed) not in values]
    if silent:
        said.append(f"no {study['metric']} to compare, so left out: {'; '.join(silent)}")
    tables = [markdown(comparison(study, runs, rows)), markdown(costs_of(study["variants"], runs))]
    print(f"\n{tables[0]}\n\n" + "\n".join(said))
    write_file(folder / "verdicts.json", json.dumps(rows, indent=1).encode())
    print(f"\n{folder}: report.md, report.html, verdicts.json")
    print(draw_curves(curves_of(study, runs), folder / "curves.png"))
    title = f"# {study['metric']} of {len(study['variants'])} variants"
    paragraphs = [title, *said, *tables, *appendix(study, folder, runs)]
    text = "\n\n".join(paragraphs)
    write_file(folder / "report.md", f"{text}\n".encode())
    write_file(folder / "report.html", page_of(paragraphs, folder / "curves.png").encode())
    return not has_failed
