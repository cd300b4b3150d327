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

from support.files import read_json, step_folders, write_file
from support.metrics import read_lines, to_json
from tools.significance import ALPHA, LATER, add_looks, fit_sizes, interval, seeds_to_show

NOT_TRAINING = re.compile(r"_s$|per_second|mfu|memory|time|slowest")  # keys that differ between runs even if training is equal


# ---------------------------------------------------------------- one run
def folder_of(study_folder, name: str, seed: int) -> Path:
    return Path(study_folder, re.sub(r"[^\w.=,+-]+", "_", name), f"seed-{seed}")


def is_finished(lines: list[dict], variant: dict) -> bool:
    """Whether the last step is logged, and validated if the variant validates."""
    logged = {key for line in lines if line["step"] == variant["steps"] for key in line}
    return {"loss", "val_loss" if variant["val_every"] else "loss"} <= logged


def read_runs(study: dict, folder) -> dict[tuple[str, int], list[dict]]:
    """{(variant, seed): lines of metrics.jsonl} of the finished runs; no lines for a run that failed.

    ValueError for runs that cannot be compared, by their config.json: see check_units, and for runs by other code than a
    variant's "files", {file: sha256}, the code that trains now. An unfinished run without a checkpoint starts from zero.
    """
    found, configs, failed = {}, [], [run[:2] for run in study.get("failed", [])]
    for name, variant in study["variants"].items():
        for seed in range(max(study["seeds"], study["max_seeds"])):
            run = folder_of(folder, name, seed)
            lines = list(read_lines(str(run / "metrics.jsonl")))
            finished = is_finished(lines, variant)
            if finished or [name, seed] in failed:
                found[name, seed] = lines if finished else []
            if (run / "config.json").exists() and (finished or step_folders(str(run))):
                configs.append(read_json(run, "config.json"))
                code = configs[-1]["_run"] | configs[-1]["_run"].get("code", {})
                if changed := [file for file, now in variant.get("files", {}).items() if code.get(file, now) != now]:
                    raise ValueError(f"{', '.join(changed)}: changed since {run} was made; undo the change, or use --out NEW")
    check_units(study["metric"], configs)
    return found


def check_units(metric: str, configs: list[dict]) -> None:
    """Refuse a metric whose unit or text is not the same in all runs. configs: their flags, and "_run" once there is a run."""
    texts = {(c.get("val_data") or c.get("data"), (c.get("val_batches") or 0) * (c.get("seq_len") or 0)) for c in configs}
    runs = [{"data": {}, "model": {}} | c.get("_run", {}) for c in configs]
    tokens = {(run["data"].get("tokenizer_sha256"), run["model"].get("vocab_size")) for run in runs}
    if metric.startswith("val_") and len(texts) > 1:
        raise ValueError(f"{metric} of different texts, {texts}: give all the same --val_data and --val_batches x --seq_len")
    if metric in ("loss", "loss_max", "val_loss") and len(tokens) > 1:
        raise ValueError(f"{metric} is per token, of {len(tokens)} tokenizers or vocabularies: use --metric val_bits_per_byte")


def curve(lines: list[dict], metric: str, axis: str = "step") -> tuple[np.ndarray, np.ndarray]:
    """(x, metric) of the lines with the metric; x in steps, tokens, or seconds of training."""
    points = [(line["step"], line[metric]) for line in lines if line.get(metric) is not None]
    steps, values = np.array(points, float).reshape(-1, 2).T
    if axis == "step" or not points:
        return steps, values
    trained = [(line["step"], line["tokens"], line["step_time_s"]) for line in lines if "step_time_s" in line]
    done, tokens, seconds = np.array([(0, 0, 0), *trained], float).T
    seconds[1:] *= np.diff(done)  # before: a step's mean time since the last logged step
    return np.interp(steps, done, tokens if axis == "tokens" else np.cumsum(seconds)), values


def has_died(lines: list[dict], metric: str) -> bool:
    """Whether a run failed, or ended with a NaN or infinite loss: null in metrics.jsonl. A metric that is null in every line,
    such as mfu on a CPU, is only unknown."""
    last = {key: value for line in lines for key, value in line.items()}
    ended = last.get(metric, 0) is None and any(line.get(metric) is not None for line in lines)
    return not lines or ended or None in (last.get("loss", 0), last.get("val_loss", 0))


def metric_of(lines: list[dict], study: dict, budget: float) -> float | None:
    """The number that a run is judged by; the worst, inf or -inf, if the run died or never got to --reach; None if unknown.

    budget: tokens or seconds of --at, the same for all runs.
    """
    sign = 1 if study["best"] == "low" else -1
    worst = math.inf if study["reach"] is not None else sign * math.inf
    if has_died(lines, study["metric"]):
        return worst
    x, y = curve(lines, study["metric"], "tokens" if study["reach"] is not None else study["at"].replace("end", "step"))
    if not len(y) or x[0] > budget:
        return None
    if study["reach"] is None:
        return float(y[-1] if study["at"] == "end" else np.interp(budget, x, y))
    if not len(there := np.flatnonzero(sign * (y - study["reach"]) <= 0)):
        return worst
    between = slice(max(there[0] - 1, 0), there[0] + 1)  # the last point above and the first below, and a straight line
    return float(np.interp(-sign * study["reach"], -sign * y[between], x[between]))


def values_of(study: dict, runs: dict) -> tuple[dict, dict, float | None]:
    """({(variant, seed): metric_of the run}, without unknown ones; {(variant, seed): where its curve ends, in tokens or seconds
    of --at}; the budget: the smallest of them)"""
    ends = {key: curve(lines, study["metric"], study["at"])[0] for key, lines in runs.items() if study["at"] != "end"}
    ends = {key: float(x[-1]) for key, x in ends.items() if len(x) and not has_died(runs[key], study["metric"])}
    budget = min(ends.values(), default=None)
    found = {key: metric_of(lines, study, budget or math.inf) for key, lines in runs.items()}
    return {key: value for key, value in found.items() if value is not None}, ends, budget


# ---------------------------------------------------------------- pairs
def pairs_of(study: dict, found: dict, name: str, seeds: float = math.inf) -> list[tuple]:
    """[(of the variant, of the baseline)] for the first seeds with both. found: {(variant, seed): anything}."""
    base = study["baseline"]
    return [(found[name, i], found[base, i]) for n, i in found if n == name and i < seeds and (base, i) in found]


def training_of(lines: list[dict]) -> dict:
    """{(step, whether training or validation): the numbers that two equal trainings have alike}"""
    return {(line["step"], "loss" in line): {k: v for k, v in line.items() if not NOT_TRAINING.search(k)} for line in lines}


def looks_of(study: dict) -> list:
    """All looks at the study, earlier ones and those of its settings, see add_looks."""
    return add_looks(study.get("looks", []), study["seeds"], study["max_seeds"] if study["until"] else study["seeds"])


def compare_variant(study: dict, values: dict, name: str, identical: set, tried: set) -> tuple[list[float], tuple, list]:
    """(differences that count, (low, high, level) of their mean, [(variant, seed)] to run now) of a variant.

    Without --until there is a single look, at all seeds. With --until, there is a look after every seed from --seeds to
    --max_seeds; a decided variant runs no more, and its verdict stays. tried: finished and failed runs.
    """
    D, alpha = study["until"] or 0, ALPHA / max(len(study["variants"]) - 1 - len(identical), 1)
    for seeds in range(study["seeds"], max(study["seeds"], study["max_seeds"] if D else 0) + 1):
        missing = [(n, i) for i in range(seeds) for n in (study["baseline"], name) if (n, i) not in tried]
        d = [0.0 if value == base else value - base for value, base in pairs_of(study, values, name, seeds)]
        low, high, level = interval(d, alpha, looks_of(study))
        if missing or name in identical or low > 0 or high < 0 or -D < low <= high < D:
            break
    return d, (0.0, 0.0, level) if name in identical else (low, high, level), missing


def identical_variants(study: dict, runs: dict) -> set[str]:
    """Variants with the baseline's numbers in every logged step of every seed, bit for bit; none if speed or memory decides."""
    numbers = {key: training_of(lines) for key, lines in runs.items()}
    pairs = {name: pairs_of(study, numbers, name) for name in study["variants"] if name != study["baseline"]}
    of_training = study["at"] != "seconds" and not NOT_TRAINING.search(study["metric"])
    return {name for name, both in pairs.items() if of_training and both and all(mine == base != {} for mine, base in both)}


def look_at_all(study: dict, runs: dict) -> dict[str, tuple]:
    """{variant: compare_variant(...)}"""
    values, identical = values_of(study, runs)[0], identical_variants(study, runs)
    return {name: compare_variant(study, values, name, identical, runs.keys())
            for name in study["variants"] if name != study["baseline"]}


def next_runs(study: dict, folder) -> list[tuple[str, int]]:
    """The (variant, seed) to run now, in the order of seeds."""
    found = look_at_all(study, read_runs(study, folder))
    return sorted(dict.fromkeys(run for *_, missing in found.values() for run in missing), key=lambda run: run[1])


def verdicts(study: dict, runs: dict) -> list[dict]:
    """The contents of verdicts.json. difference, low and high are variant minus baseline; null: unknown. level: of the
    interval. died, baseline_died: seeds with the worst value. budget: tokens or seconds of --at."""
    (values, _, budget), rows = values_of(study, runs), []
    sign = -1 if study["best"] == "high" and study["reach"] is None else 1
    for name, (d, (low, high, level), _) in look_at_all(study, runs).items():
        verdict = "undecided" if low < 0 < high else "identical" if low == 0 else "better" if sign * low < 0 else "worse"
        died, base_died = (sum(map(math.isinf, side)) for side in zip(*pairs_of(study, values, name, len(d)))) if d else (0, 0)
        mean, low, high = map(to_json, (sum(d) / len(d) if d else None, low, high))
        rows.append({
            "variant": name, "baseline": study["baseline"], "metric": study["metric"], "difference": mean, "low": low,
            "high": high, "pairs": len(d), "verdict": verdict, "level": level, "died": died, "baseline_died": base_died,
            "budget": budget,
        })
    return rows


# ---------------------------------------------------------------- words
def sentence(row: dict, study: dict, d: list[float]) -> str:
    """One verdict in words."""
    unit = "tokens" if study["reach"] is not None else "nats" if row["metric"] in ("loss", "val_loss") else row["metric"]
    name, base, pairs = row["variant"], row["baseline"], f"{row['pairs']} pair{'s' * (row['pairs'] != 1)}"
    verb = {"better": "beats", "worse": "is worse than"}.get(row["verdict"])
    if row["verdict"] == "identical":
        return f"{name} and {base} are identical in every logged step ({pairs})"
    if not d:
        return f"{name}: no pair of runs to compare"
    if row["died"] or row["baseline_died"]:
        end = "died" if study["reach"] is None else f"died or never reached {study['reach']:g}"
        text = f"{row['died']} of {len(d)} seeds {end}, and {row['baseline_died']} of {len(d)} of {base}"
        return f"{name} {verb} {base}: {text}" if verb else f"{name}: no verdict against {base}: {text}"
    if row["low"] is None:
        why = "equal numbers may be a coarse metric's" if len(d) in dict(looks_of(study)) else "give all --seeds, 3 or more"
        return f"{name} minus {base} is {row['difference']:+.3g} {unit} ({pairs}); nothing is known about noise: {why}"
    low, high = sorted(map(abs, (row["low"], row["high"]))) if verb else (row["low"], row["high"])
    interval = f"{100 * row['level']:.3g} % interval {low:.3g} to {high:.3g}, {pairs}"
    if verb:
        return f"{name} {verb} {base} by {abs(row['difference']):.3g} {unit} ({interval})"
    hidden = max(-low, high)
    if study["until"] and hidden < study["until"]:
        return f"{name}: no difference from {base} as large as {study['until']:.4g} {unit} ({interval})"
    left, wish = (1 + LATER - looks_of(study)[-1][1]) / 2, study["until"] or hidden / 2  # left: the share of the next look
    enough = seeds_to_show(wish, d, ALPHA * left / (len(study["variants"]) - 1))
    more = f"about {max(enough - len(d), 1)} more seeds would show" if enough else "even 1,000 seeds would not show"
    text = f"{name}: no difference from {base} found; one of {hidden:.2g} {unit} could hide"
    return f"{text} ({interval}); {more} {wish:.2g} with a chance of 80 %"


def comparison(study: dict, runs: dict, rows: list[dict]) -> list[list[str]]:
    """Header and a row per variant: mean, difference, and costs."""
    values, by_name = values_of(study, runs)[0], {row["variant"]: row for row in rows}
    lines = [["variant", study["metric"], "difference", "interval", "level", "pairs", "noise of a difference, paired",
              "unpaired", "tokens/s", "GiB", "batches"]]
    for name in study["variants"]:
        row = {key: value for key, value in by_name.get(name, {"pairs": "baseline"}).items() if value is not None}
        mine, both = [value for (n, _), value in values.items() if n == name], pairs_of(study, values, name)
        trained = [line for (n, _), found in runs.items() if n == name for line in found if "tokens_per_second" in line]

        def show(text, *keys, row=row):
            return text.format(*map(row.get, keys)) if row.keys() >= {*keys} else ""

        dead, noise = sum(map(math.isinf, mine)), len(both) > 1 and np.isfinite(both).all()
        lines.append([
            name, (f"{statistics.mean(mine):.4f}" + f", {dead} of {len(mine)} died" * (dead > 0)) if mine else "",
            show("{:+.3g}", "difference"), show("{:.3g} to {:.3g}", "low", "high"), show("{:.4g}", "level"), str(row["pairs"]),
            f"{statistics.stdev(value - base for value, base in both):.2g}" if noise and name in by_name else "",
            f"{math.hypot(*map(statistics.stdev, zip(*both))):.2g}" if noise and name in by_name else "",
            f"{statistics.median(line['tokens_per_second'] for line in trained):,.0f}" if trained else "",
            f"{max(line['memory_gib'] for line in trained):.2f}" if trained else "",
            batches(study, runs, name) if name in by_name else "",
        ])
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
    found = {name: [curve(lines, study["metric"]) for (n, _), lines in runs.items() if n == name] for name in study["variants"]}
    return {f"{name} ({len(both)} seeds)": both for name, both in found.items() if both and all(len(x) for x, _ in both)}


def fit_text(study: dict, runs: dict) -> str:
    """--fit: L = E + A / N^a over the variants' sizes, N without the embedding table; or why there is none."""
    sizes, values = {name: v["parameters"] for name, v in study["variants"].items()}, sorted(values_of(study, runs)[0].items())
    points = [(sizes[name], value) for (name, _), value in values if sizes[name] and math.isfinite(value)]
    if not 4 <= len(dict(points)) == len({name for (name, _), value in values if math.isfinite(value)}):
        return f"no fit of {len(dict(points))} sizes: one law needs four or more, one variant of each; see docs/ablations.md"
    found = fit_sizes(*zip(*points))
    text = (f"L = {found['E']:.4g} + {found['A']:.4g} / N^{found['a']:.3g}, 95 % interval of the exponent {found['low']:.3g} "
            f"to {found['high']:.3g}, {len(points)} runs of {len(dict(points))} sizes")
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


def report_study(folder) -> None:
    """Print the report of a study, and write verdicts.json, results.jsonl, report.md and curves.png."""
    folder, study = Path(folder), read_json(folder, "study.json")
    runs, study["looks"] = read_runs(study, folder), looks_of(study)
    write_file(folder / "study.json", json.dumps(study, indent=1).encode())
    rows, looks, (values, ends, budget) = verdicts(study, runs), look_at_all(study, runs), values_of(study, runs)
    said = [sentence(row, study, looks[row["variant"]][0]) for row in rows]
    if budget:
        late = ", ".join(sorted({name for (name, _), end in ends.items() if end > 1.02 * budget})) or "no run"
        said.append(f"compared after {budget:,.6g} {study['at']}, in the middle of the learning rate schedule of {late}")
    said += [f"{name}, seed {seed} has failed: {line}" for name, seed, line in study.get("failed", [])]
    if silent := [f"{name}, seed {seed}" for name, seed in runs if (name, seed) not in values]:
        said.append(f"no {study['metric']} yet{', use a smaller --val_every' * bool(budget)}, so left out: {'; '.join(silent)}")
    if study["fit"]:
        said.append(fit_text(study, runs))
    table = markdown(comparison(study, runs, rows))
    print(f"\n{table}\n\n" + "\n".join(said))
    results = [{"variant": name, "seed": seed, "value": to_json(values.get((name, seed))),
                "folder": str(folder_of(folder, name, seed))} for name, seed in sorted(runs)]
    flags = "\n".join(f"- {name}: `{shlex.join([v['recipe'], *v['flags']])}`" for name, v in study["variants"].items())
    text = f"# {study['metric']} of {len(study['variants'])} variants\n\n" + "\n\n".join(said) + f"\n\n{table}\n\n"
    write_file(folder / "verdicts.json", json.dumps(rows, indent=1).encode())
    write_file(folder / "results.jsonl", "".join(json.dumps(line) + "\n" for line in results).encode())
    write_file(folder / "report.md", f"{text}{flags}\n".encode())
    print(f"\n{folder}: report.md, verdicts.json, results.jsonl")
    print(draw_curves([(study["metric"], curves_of(study, runs))], folder / "curves.png"))
