"""Evaluate the runs of a study: the metric in pairs, and verdicts with intervals. ablate.py makes
the runs.

A study is a folder with study.json (variants and settings) and a run folder VARIANT/seed-I for each
variant and seed. Everything here is computed from the folder, so a report can be made again at any
time.
"""

import argparse
import math
import re
from itertools import product
from pathlib import Path

import numpy as np

from flags.files import read_json, step_folders
from tools.study.significance import ALPHA, add_looks, interval
from training.metrics import read_lines

FAILED = "failed.txt"  # in the folder of a run that ended with an error: the last line of its log
# runs that are not compared, such as the runs of --tune, have seeds from here on; compared runs have
# smaller seeds
APART = 1000
# keys that an older study.json may lack
DEFAULTS = {
    "first_seed": 0,
    "sizes": 1,
    "size": "",
    "noise": None,
    "tuned": [],
    "looks": [],
    "budget": None,
    "command": "",
    "comparisons": 1,
}
OF_VARIANT = {"files": {}, **dict.fromkeys(("parameters", "all_parameters", "tokens", "flops"))}
# keys that differ between runs even if training is equal
NOT_TRAINING = re.compile(r"_s$|per_second|mfu|memory|time|slowest")


# ---------------------------------------------------------------- one run
def read_study(folder: str | Path) -> dict:
    """study.json of a folder. Raises ValueError if there is none."""
    if not Path(folder, "study.json").exists():
        raise ValueError(f"{folder} has no study.json; give the --out of a study")
    study = DEFAULTS | read_json(folder, "study.json")
    # a variant that was dropped later had been compared, and counts
    study["comparisons"] = max(study["comparisons"], len(study["variants"]) - 1)
    variants = {}
    for name, variant in study["variants"].items():
        variants[name] = OF_VARIANT | {"file": variant["recipe"]} | variant
    return study | {"variants": variants}


def folder_of(study_folder: str | Path, name: str, seed: int) -> Path:
    return Path(study_folder, re.sub(r"[^\w.=,+-]+|^\.+", "_", name), f"seed-{seed}")


def locate(recipe: Path, file: str) -> Path:
    """The file that a recipe imports: beside the recipe, or, for a recipe in forks/, in the folder
    above."""
    for home in recipe.resolve().parents[:2]:
        if (home / file).is_file():
            return home / file
    return recipe.parent / file


def lines_of(folder: str | Path, name: str, seed: int) -> list[dict]:
    return list(read_lines(str(folder_of(folder, name, seed) / "metrics.jsonl")))


def is_finished(lines: list[dict], variant: dict) -> bool:
    """Whether the last step is logged, and validated if the variant validates."""
    logged = set()
    for line in lines:
        if line["step"] == variant["steps"]:
            logged |= line.keys()
    if variant["val_every"]:
        return {"loss", "val_loss"} <= logged
    return "loss" in logged


def read_runs(study: dict, folder: str | Path) -> dict[tuple[str, int], list[dict]]:
    """{(variant, seed): lines of metrics.jsonl} of the finished runs; no lines for a run that
    failed.

    Raises ValueError for runs that cannot be compared, by their config.json: see check_units and
    check_code. Unfinished runs without a checkpoint are not checked, because they begin again.
    """
    found = {}
    configs = []
    texts = {}
    first = study["first_seed"]
    seeds = range(first, first + max(study["seeds"], study["max_seeds"]))
    for name, variant in study["variants"].items():
        for seed in seeds:
            run = folder_of(folder, name, seed)
            lines = lines_of(folder, name, seed)
            finished = is_finished(lines, variant)
            if finished:
                found[name, seed] = lines
            elif (run / FAILED).exists():
                found[name, seed] = []
            if (run / "config.json").exists() and (finished or step_folders(str(run))):
                config = read_json(run, "config.json")
                configs.append(config)
                data = dict(config["_run"].get("data", {}))
                data.pop("data_seed", None)
                if texts.setdefault(name, data) != data:
                    raise ValueError(
                        f"{run} was trained on another text than {name} before; use --out NEW"
                    )
                check_code(run, config["_run"], variant)
    check_units(study["metric"], configs)
    return found


def check_code(run: Path, about: dict, variant: dict) -> None:
    """Refuse a run of older code. variant["files"]: {file: sha256} of the code that trains now.
    about: "_run" of the run's config.json."""
    code = about | about.get("code", {})
    changed = []
    for file, now in variant.get("files", {}).items():
        if code.get(file, now) != now:
            changed.append(file)
    if changed:
        raise ValueError(
            f"{', '.join(changed)}: changed since {run} was made; undo the change, or use --out NEW"
        )


def check_units(metric: str, configs: list[dict]) -> None:
    """Refuse a metric if its unit or its text differs between runs. configs: flags of the runs, with
    "_run" for a run that has begun."""
    texts = set()
    tokens = set()
    for config in configs:
        n_tokens = (config.get("val_batches") or 0) * (config.get("seq_len") or 0)
        texts.add((config.get("val_data") or config.get("data"), n_tokens))
        run = {"data": {}, "model": {}} | config.get("_run", {})
        tokens.add((run["data"].get("tokenizer_sha256"), run["model"].get("vocab_size")))
    if metric.startswith("val_") and len(texts) > 1:
        raise ValueError(
            f"{metric} of different texts, {texts}: give all the same --val_data and "
            "--val_batches x --seq_len"
        )
    if metric in ("loss", "loss_max", "val_loss") and len(tokens) > 1:
        raise ValueError(
            f"{metric} is per token, of {len(tokens)} tokenizers or vocabularies: use --metric "
            "val_bits_per_byte"
        )


def curve(lines: list[dict], metric: str, axis: str = "step") -> tuple[np.ndarray, np.ndarray]:
    """(x, metric) of the lines with the metric; x in steps, or in tokens."""
    points = [(line["step"], line[metric]) for line in lines if line.get(metric) is not None]
    steps, values = np.array(points, float).reshape(-1, 2).T
    if axis == "step":
        return steps, values
    passed = [(0, 0)]
    for line in lines:
        if "tokens" in line:
            passed.append((line["step"], line["tokens"]))
    done, tokens = np.array(passed, float).T
    return np.interp(steps, done, tokens), values


def has_died(lines: list[dict], metric: str) -> bool:
    """Whether a run failed, or ended with a NaN or infinite loss, which metrics.jsonl has as null. A
    metric that is null in every line, such as mfu on a CPU, is unknown and no failure."""
    last = {}
    for line in lines:
        last |= line
    ended = last.get(metric, 0) is None and any(line.get(metric) is not None for line in lines)
    return not lines or ended or None in (last.get("loss", 0), last.get("val_loss", 0))


def metric_of(lines: list[dict], study: dict) -> float | None:
    """The number that judges a run: the last value of the metric, or the tokens until --reach. If the
    run died or never came to --reach, the worst number, inf or -inf. None if unknown."""
    reach = study["reach"]
    sign = -1
    if study["best"] == "low":
        sign = 1
    axis = "step"
    worst = sign * math.inf
    if reach is not None:
        axis = "tokens"
        worst = math.inf
    if has_died(lines, study["metric"]):
        return worst
    x, y = curve(lines, study["metric"], axis)
    if not len(y):
        return None
    if reach is None:
        return float(y[-1])
    there = np.flatnonzero(sign * (y - reach) <= 0)
    if not len(there):
        return worst
    if there[0] == 0:
        return None  # reached before the first line
    # a straight line between the last point before --reach and the first point after
    between = slice(there[0] - 1, there[0] + 1)
    return float(np.interp(-sign * reach, -sign * y[between], x[between]))


def values_of(study: dict, runs: dict) -> dict[tuple[str, int], float]:
    """{(variant, seed): metric_of the run}, without unknown ones."""
    found = {key: metric_of(lines, study) for key, lines in runs.items()}
    return {key: value for key, value in found.items() if value is not None}


# ---------------------------------------------------------------- pairs
def pairs_of(study: dict, found: dict, name: str, seeds: float = math.inf) -> list[tuple]:
    """[(of the variant, of the baseline)] for the first seeds with both. found: {(variant, seed): anything}."""
    base = study["baseline"]
    pairs = []
    for n, seed in found:
        if n == name and seed < seeds and (base, seed) in found:
            pairs.append((found[name, seed], found[base, seed]))
    return pairs


def training_of(lines: list[dict]) -> dict:
    """{(step, True for training, False for validation): the numbers that must be equal if two
    trainings are equal}"""
    found = {}
    for line in lines:
        numbers = {key: value for key, value in line.items() if not NOT_TRAINING.search(key)}
        found[line["step"], "loss" in line] = numbers
    return found


def looks_of(study: dict) -> list:
    """All looks at the study, earlier ones and those of its settings, see add_looks."""
    most = study["seeds"]
    if study["until"]:
        most = study["max_seeds"]
    least = 2
    if study["noise"]:
        least = 1
    return add_looks(study["looks"], study["seeds"], most, least)


def compare_variant(
    study: dict, values: dict, name: str, identical: set, tried: set
) -> tuple[list[float], tuple, list]:
    """(differences that count, (low, high, level) of their mean, [(variant, seed)] to run now) of a
    variant.

    Without --until there is a single look, at all seeds. With --until, there is a look after every
    seed from --seeds to --max_seeds; a decided variant runs no more, and its verdict stays. tried:
    finished and failed runs.
    """
    D = study["until"] or 0
    alpha = ALPHA / max(study["comparisons"] - len(identical), 1) / study["sizes"]
    most = study["seeds"]
    if D:
        most = max(most, study["max_seeds"])
    for seeds in range(study["seeds"], most + 1):
        asked = product(range(seeds), (study["baseline"], name))
        missing = [(n, seed) for seed, n in asked if (n, seed) not in tried]
        pairs = pairs_of(study, values, name, seeds)
        d = [difference(value, base) for value, base in pairs]
        low, high, level = interval(d, alpha, looks_of(study), study["noise"])
        if name in identical:
            return d, (0.0, 0.0, level), missing
        if missing or low > 0 or high < 0 or -D < low <= high < D:
            break
    return d, (low, high, level), missing


def difference(value: float, base: float) -> float:
    if value == base:  # both may be infinite
        return 0.0
    return value - base


def identical_variants(study: dict, runs: dict) -> set[str]:
    """Variants with the baseline's numbers in every logged step of every seed, bit for bit; none if
    speed or memory decides."""
    if NOT_TRAINING.search(study["metric"]):
        return set()
    numbers = {key: training_of(lines) for key, lines in runs.items()}
    found = set()
    for name in study["variants"]:
        both = pairs_of(study, numbers, name)
        if name != study["baseline"] and both and all(ours == base != {} for ours, base in both):
            found.add(name)
    return found


def look_at_all(study: dict, runs: dict) -> dict[str, tuple]:
    """{variant: compare_variant(...)}"""
    values = values_of(study, runs)
    identical = identical_variants(study, runs)
    found = {}
    for name in study["variants"]:
        if name != study["baseline"]:
            found[name] = compare_variant(study, values, name, identical, runs.keys())
    return found


def next_runs(study: dict, folder: str | Path, tried: set) -> list[tuple[str, int]]:
    """The (variant, seed) to run now, in the order of seeds. tried: runs that, if they have failed,
    are not tried again."""
    runs = {run: lines for run, lines in read_runs(study, folder).items() if lines or run in tried}
    wanted = []
    for *_, missing in look_at_all(study, runs).values():
        wanted += missing
    return sorted(dict.fromkeys(wanted), key=lambda run: run[1])


# ---------------------------------------------------------------- before a comparison
def winners_of(
    study: dict, folder: str | Path, names: list[str], cells: list[str]
) -> tuple[dict[str, str], list[str]]:
    """({variant: its best cell}, lines for the report), from the finished runs "VARIANT CELL" of
    --tune.

    The best is the best mean of all seeds; a seed that died is the worst. Raises ValueError if runs
    are missing, or if all values of a variant died.
    """
    runs = read_runs(study, folder)
    values = values_of(study, runs)
    best = {}
    said = []
    grid = sorted(cells, key=lambda cell: float(cell.partition("=")[2]))
    sign = -1
    if study["best"] == "low" or study["reach"] is not None:
        sign = 1
    for name in names:
        means = {}
        for cell in cells:
            found = [value for (variant, _), value in values.items() if variant == f"{name} {cell}"]
            if len(found) < study["seeds"]:
                raise ValueError(
                    f"{folder}: {name} {cell} has {study['metric']} of {len(found)} of "
                    f"{study['seeds']} runs: "
                    "make these first, with the same command without --only"
                )
            means[cell] = sum(found) / len(found)
        best[name] = min(cells, key=lambda cell: sign * means[cell])
        if math.isinf(means[best[name]]):
            raise ValueError(
                f"{folder}: all values of --tune died for {name}; see log.txt of its runs"
            )
        line = ", ".join(f"{cell}: {mean:.4f}" for cell, mean in means.items())
        edge = ""
        if best[name] in (grid[0], grid[-1]):
            edge = "; this is the edge of its grid, and a value beyond may be better"
        said.append(
            f"tuned on {study['seeds']} other seeds: {name} is best with {best[name]} "
            f"({line}){edge}"
        )
    return best, said


def noise_of(folder: str, args: argparse.Namespace, baseline: dict) -> dict:
    """{"sd", "df"}: the standard deviation of paired differences in a finished study, over all its
    variants, and the degrees of freedom. Raises ValueError for another metric, and for another
    recipe or size than `baseline`, a variant, has. Other flags are not compared."""
    study = read_study(folder)
    theirs = study["variants"][study["baseline"]] | study
    ours = baseline | vars(args)
    for key in (
        "metric",
        "reach",
        "recipe",
        "steps",
        "parameters",
        "tokens",
        "data",
        "val_data",
        "val_batches",
        "seq_len",
    ):
        here = ours[key]
        if here != theirs.get(key):
            raise ValueError(
                f"--noise {folder}: its {key} is {theirs.get(key)}, here {here}: measure the "
                "noise of this again"
            )
    values = values_of(study, read_runs(study, folder))
    found = []  # of each variant: differences that say something about noise
    for name in study["variants"]:
        d = np.diff(pairs_of(study, values, name), axis=-1).ravel()
        is_noise = len(d) > 1 and np.isfinite(d).all() and np.ptp(d) > 0
        if name != study["baseline"] and is_noise:
            found.append(d)
    df = sum(len(d) - 1 for d in found)
    if df < 5:
        raise ValueError(
            f"--noise {folder}: {df} degrees of freedom, too few; a variant that differs a "
            "little, 6 seeds, has 5"
        )
    return {"sd": math.sqrt(sum(np.var(d) * len(d) for d in found) / df), "df": df}
