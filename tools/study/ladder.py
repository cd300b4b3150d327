"""Does a difference hold for larger models? The studies of a ladder of sizes together: ablate.py
--ladder makes them.

Each size is a study of its own, in the folder --out/SIZE, with the same tokens per parameter; its
interval takes its share of the 5 %. A straight line through the differences of all pairs, against
the logarithm of the baseline's parameters, says what a larger size would show if the trend goes on.
ablate.py imports this file only if --ladder is given.
"""

import json
import math
from pathlib import Path

import numpy as np

from flags.files import read_json, write_file
from tools.study.report import markdown, show
from tools.study.significance import ALPHA, t_quantile
from tools.study.study import pairs_of, read_runs, read_study, values_of


def report_ladder(folder: str | Path, sizes: list[str], to: float | None) -> None:
    """Print, and write to ladder.md and ladder.json, the differences at each size, at the size `to`
    (parameters; None: 10 times the largest), and a law L = E + A / N^a for each variant, if there
    are four sizes or more."""
    studies = []
    values = []
    for size in sizes:
        study = read_study(Path(folder, size))
        studies.append(study)
        values.append(values_of(study, read_runs(study, Path(folder, size))))
    base = studies[0]["baseline"]
    names = list(studies[0]["variants"])
    N = [study["variants"][base]["parameters"] for study in studies]
    to = to or 10 * max(N)
    rows = []
    said = []
    alpha = ALPHA / max(len(names) - 1, 1) / (len(sizes) + 1)
    for name in names:
        for size, n in zip(sizes, N):
            for row in read_json(folder, size, "verdicts.json"):
                if row["variant"] == name:
                    rows.append({"size": size, "parameters": n} | row)
        both = []  # (log N, difference) of each pair at each size
        points = []  # (N, value) of each run at each size
        for n, study, found in zip(N, studies, values):
            for ours, of_base in pairs_of(study, found, name):
                both.append((math.log(n), ours - of_base))
            for (variant, _), value in found.items():
                if variant == name:
                    points.append((study["variants"][name]["parameters"], value))
        if name != base and len(dict(both)) > 2 and np.isfinite(both).all():
            difference, low, high = line_at(*zip(*both), math.log(to), alpha)
            row = {
                "difference": difference,
                "low": low,
                "high": high,
                "size": f"{to / max(N):.3g} x the largest",
                "parameters": to,
                "variant": name,
                "baseline": base,
                "pairs": len(both),
                "level": 1 - alpha,
                "verdict": "extrapolated",
            }
            rows.append(row)
        if len(dict(points)) > 3 and np.isfinite(points).all():
            said.append(
                "{}: L = {E:.4g} + {A:.4g} / N^{a:.3g}, 95 % interval of the exponent {low:.3g} to {high:.3g}".format(
                    name, **fit_sizes(*zip(*points))
                )
            )
    said.append(
        "A variant with dead seeds has no law and no extrapolation. An extrapolated difference is "
        "right if all "
        "lie on a straight line in log N, with equal noise. How far that carries: of two data "
        "recipes, the better at "
        "one size was the better at 1B in about 80 % of pairs (DataDecide, arXiv:2504.11393)"
    )
    title = f"# {studies[0]['metric']} over {len(sizes)} sizes"
    text = "\n\n".join([title, table_of(rows, base), *said])
    print(f"\n{text}\n\n{folder}: ladder.md, ladder.json", flush=True)
    write_file(Path(folder, "ladder.md"), f"{text}\n".encode())
    write_file(Path(folder, "ladder.json"), json.dumps(rows, indent=1).encode())


def table_of(rows: list[dict], base: str) -> str:
    table = [
        ["size", "parameters", "variant", f"minus {base}", "interval", "level", "pairs", "verdict"]
    ]
    for row in rows:
        low = show("{:+.3g}", row["low"])
        high = show("{:+.3g}", row["high"])
        table.append(
            [
                row["size"],
                f"{row['parameters']:,.0f}",
                row["variant"],
                show("{:+.3g}", row["difference"]),
                f"{low} to {high}",
                f"{row['level']:.4g}",
                str(row["pairs"]),
                row["verdict"],
            ]
        )
    return markdown(table)


def line_at(x: list[float], d: list[float], at: float, alpha: float) -> tuple[float, float, float]:
    """(value, low, high) at `at` of the straight line through the points (x, d), by least squares;
    the interval is right in 1 - alpha of cases if the points lie on a line but for equal,
    independent, normal noise. x: three points or more."""
    x = np.asarray(x, float)
    d = np.asarray(d, float)
    slope, offset = np.polyfit(x, d, 1)
    residual = math.sqrt(np.sum((d - offset - slope * x) ** 2) / (len(x) - 2))
    half = (
        t_quantile(alpha, len(x) - 2)
        * residual
        * math.sqrt(1 / len(x) + (at - x.mean()) ** 2 / np.sum((x - x.mean()) ** 2))
    )
    value = offset + slope * at
    return float(value), float(value - half), float(value + half)


def fit_sizes(sizes: list[float], losses: list[float]) -> dict:
    """Least squares fit of L = E + A / N^a with E >= 0 and A > 0 (arXiv:2001.08361): {E, A, a, low,
    high, residuals}.

    For each a the best E and A are a linear fit. low, high: the 95 % interval of a (profile
    likelihood): all values with a fit not worse than the best by more than chance explains. If the
    largest a of the search still fits, high is inf; if the smallest, low is 0. sizes: four
    different ones or more, because three constants fit any three.
    """
    N = np.asarray(sizes, dtype=float)
    L = np.asarray(losses, dtype=float)

    def fit(a):
        x = (N / N.min()) ** -a
        slope, E = np.polyfit(x, L, 1)
        if E < 0:
            slope = (x @ L) / (x @ x)
            E = 0.0
        return np.sum((E + slope * x - L) ** 2), E, slope

    exponents = np.geomspace(1e-3, 4, 2000)
    errors, offsets, slopes = np.array([fit(a) for a in exponents]).T
    best = int(errors.argmin())
    dof = len(L) - 3
    a = float(exponents[best])
    E = float(offsets[best])
    slope = float(slopes[best])
    inside = exponents[errors <= errors[best] * (1 + t_quantile(ALPHA, dof) ** 2 / dof) + 1e-18]
    low = float(inside.min())
    high = float(inside.max())
    residuals = (L - E - slope * (N / N.min()) ** -a).tolist()
    if low <= exponents[0]:  # the end of the grid: the data bound nothing there
        low = 0.0
    if high >= exponents[-1]:
        high = math.inf
    return {
        "E": E,
        "A": slope * N.min() ** a,
        "a": a,
        "low": low,
        "high": high,
        "residuals": residuals,
    }
