"""Does a difference hold for larger models? The studies of a ladder of sizes together: ablate.py
--ladder makes them.

Each size is a study of its own, in the folder --out/SIZE, with the same tokens per parameter; its
interval takes its share of the 5 %. A straight line through the differences of all pairs, against
the logarithm of the baseline's parameters, says what a larger size would show if the trend goes on.
With several numbers of tokens per parameter each size has a study for each, in --out/SIZE@NUMBER,
the line is a plane over the logarithms of parameters and tokens, and the laws have two exponents
(tools/study/laws.py).
ablate.py imports this file only if --ladder is given.
"""

import json
import math
from pathlib import Path

import numpy as np

from flags.files import read_json, write_file
from tools.study.laws import WORST, condition_of, fit_sizes_and_tokens
from tools.study.report import markdown, show
from tools.study.significance import ALPHA, t_quantile
from tools.study.study import pairs_of, read_runs, read_study, values_of


def describe_design(points: list[tuple[float, float]]) -> str:
    """The condition number of a design, in words. points: (parameters, tokens) of each study. Raises
    ValueError for a design over two axes that cannot tell the exponents apart."""
    condition = condition_of(*zip(*points))
    if has_two_axes(points):
        text = f"condition number of the design: {condition:.3g}"
        if condition > WORST:
            raise ValueError(
                f"{text}, above {WORST:g}: it cannot tell the exponents of sizes and tokens apart; "
                "give --ladder three sizes or more over a factor of 4 in parameters, and "
                "--tokens_per_parameter numbers over a factor of 4, or a single number"
            )
        return text
    return (
        f"condition number of the design for two exponents: {condition:.3g}: with one number of "
        "tokens per parameter, sizes and tokens cannot be told apart, and a law's exponent belongs to "
        "both together; --tokens_per_parameter 5,20,80 tells them apart"
    )


def has_two_axes(points: list[tuple[float, float]]) -> bool:
    """Whether tokens per parameter vary by more than the rounding to whole steps."""
    ratios = [tokens / parameters for parameters, tokens in points]
    return max(ratios) > 1.2 * min(ratios)


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
    D = [tokens_of_run(study["variants"][base]) for study in studies]
    is_grid = has_two_axes([*zip(N, D)])
    to = to or 10 * max(N)
    at = [math.log(to)]
    if is_grid:
        at.append(math.log(to * max(d / n for n, d in zip(N, D))))
    rows = []
    said = []
    alpha = ALPHA / max(len(names) - 1, 1) / (len(sizes) + 1)
    for name in names:
        for size, n, tokens in zip(sizes, N, D):
            for row in read_json(folder, size, "verdicts.json"):
                if row["variant"] == name:
                    rows.append({"size": size, "parameters": n, "tokens": tokens} | row)
        places = []  # (log N), or (log N, log D), of each pair at each size
        both = []  # the difference of each pair
        points = []  # (N, D, value) of each run at each size
        for n, tokens, study, found in zip(N, D, studies, values):
            for ours, of_base in pairs_of(study, found, name):
                places.append((math.log(n), math.log(tokens))[: len(at)])
                both.append(ours - of_base)
            own = study["variants"][name]
            for (variant, _), value in found.items():
                if variant == name:
                    points.append((own["parameters"], tokens_of_run(own), value))
        if name != base and len(set(places)) > 1 + len(at) and np.isfinite(both).all():
            difference, low, high = line_at(places, both, at, alpha)
            row = {
                "difference": difference,
                "low": low,
                "high": high,
                "size": f"{to / max(N):.3g} x the largest",
                "parameters": to,
                "tokens": to * max(d / n for n, d in zip(N, D)),
                "variant": name,
                "baseline": base,
                "pairs": len(both),
                "level": 1 - alpha,
                "verdict": "extrapolated",
            }
            rows.append(row)
        if points and np.isfinite(points).all():
            said += law_of(name, points, is_grid)
    said.append(describe_design([*zip(N, D)]))
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


def tokens_of_run(variant: dict) -> float:
    """The tokens of a run."""
    return variant["tokens"] * variant["steps"]


def law_of(name: str, points: list[tuple], is_grid: bool) -> list[str]:
    """The law of a variant in words; nothing with too few points. points: (parameters, tokens, loss)
    of each run."""
    N, D, losses = zip(*points)
    if is_grid and len(set(zip(N, D))) > 5:
        law = fit_sizes_and_tokens(N, D, losses)
        return [
            f"{name}: L = {law.E:.4g} + {law.A:.4g} / N^{law.a:.3g} + {law.B:.4g} / D^{law.b:.3g}, 95 % "
            f"intervals of the exponents {law.a_low:.3g} to {law.a_high:.3g} (sizes) and "
            f"{law.b_low:.3g} to {law.b_high:.3g} (tokens)"
        ]
    if is_grid or len(set(N)) < 4:
        return []
    return [
        "{}: L = {E:.4g} + {A:.4g} / N^{a:.3g}, 95 % interval of the exponent {low:.3g} to {high:.3g}".format(
            name, **fit_sizes(N, losses)
        )
    ]


def table_of(rows: list[dict], base: str) -> str:
    table = [
        ["size", "parameters", "tokens", "variant", f"minus {base}"]
        + ["interval", "level", "pairs", "verdict"]
    ]
    for row in rows:
        low = show("{:+.3g}", row["low"])
        high = show("{:+.3g}", row["high"])
        table.append(
            [
                row["size"],
                f"{row['parameters']:,.0f}",
                f"{row['tokens']:,.0f}",
                row["variant"],
                show("{:+.3g}", row["difference"]),
                f"{low} to {high}",
                f"{row['level']:.4g}",
                str(row["pairs"]),
                row["verdict"],
            ]
        )
    return markdown(table)


def line_at(x, d: list[float], at, alpha: float) -> tuple[float, float, float]:
    """(value, low, high) at `at` of the straight line, or plane, through the points (x, d), by least
    squares; the interval is right in 1 - alpha of cases if the points lie on it but for equal,
    independent, normal noise. x: a number, or a row of numbers, for each point; more points than
    coefficients."""
    d = np.asarray(d, float)
    rows = np.column_stack([np.ones(len(d)), np.asarray(x, float).reshape(len(d), -1)])
    there = np.append(1, at)
    coefficients = np.linalg.lstsq(rows, d, rcond=None)[0]
    dof = len(d) - rows.shape[1]
    residual = math.sqrt(np.sum((d - rows @ coefficients) ** 2) / dof)
    spread = there @ np.linalg.pinv(rows.T @ rows) @ there
    half = t_quantile(alpha, dof) * residual * math.sqrt(spread)
    value = there @ coefficients
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
