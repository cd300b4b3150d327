"""Is a variant better, and by how much? Paired differences, Student's t, Holm's correction, and corrected early looks.

Two runs of a seed start from the same weights and see the same batches. The effect of the seed on both falls out of the
difference, so n seeds give n independent differences d, with mean m and standard deviation s. The interval of the true
difference is m +- c * s / sqrt(n), and c is Student's t with n - 1 degrees of freedom.

A person who looks after every seed and stops when the difference "is significant" has many chances to be wrong. `boundaries`
makes c larger at each planned look, so that all looks together are wrong as often as a single look.
"""
import math
from functools import cache

import numpy as np

ALPHA = 0.05  # how often a study of equal variants may find a difference, whatever the number of variants and of looks
PATHS = 400_000  # studies that `boundaries` simulates: takes a second, and is right to 1 % of a look's chance to be wrong


@cache
def t_quantile(alpha: float, df: int) -> float:
    """The t with P(|Student's t| > t) = alpha. With t = sqrt(df) tan(angle), the density of the angle is cos(angle)^(df - 1),
    which we add up over a fine grid."""
    angle = np.linspace(0, math.pi / 2, 20_001)
    density = np.cos(angle) ** (df - 1)
    within = np.append(0, np.cumsum(density[1:] + density[:-1]))
    return math.sqrt(df) * math.tan(np.interp(1 - alpha, within / within[-1], angle))


@cache
def simulated_t(most: int) -> np.ndarray:
    """|t| of PATHS studies of equal variants after 2, 3, ... most pairs: (PATHS, most - 1)."""
    d = np.random.default_rng(0).standard_normal((PATHS, most), dtype=np.float32)
    n = np.arange(1, most + 1, dtype=np.float32)
    mean, square = d.cumsum(1) / n, (d * d).cumsum(1) / n
    variance = np.maximum(square - mean**2, 1e-12)[:, 1:] * n[1:] / (n[1:] - 1)
    return np.abs(mean[:, 1:]) / np.sqrt(variance / n[1:])


@cache
def boundaries(alpha: float, first: int, most: int) -> dict[int, float]:
    """{pairs at a look: how large |t| must be there}, for looks after first, first + 1, ... most pairs.

    After n pairs, alpha * n / most of the chance to be wrong may be spent (Lan and DeMets, 1983, with a linear spending
    function). The necessary t is read off simulated studies, because the looks depend on each other.
    """
    first = max(first, 2)
    if first >= most:
        return {most: t_quantile(alpha, most - 1)}
    t, going, found, spent = simulated_t(most), np.ones(PATHS, dtype=bool), {}, 0.0
    for n in range(first, most + 1):
        values = np.sort(t[going, n - 2])
        crossing = round((alpha * n / most - spent) * PATHS)
        found[n] = float(values[len(values) - 1 - crossing])
        going &= t[:, n - 2] <= found[n]
        spent = 1 - going.mean()
    return found


def intervals(differences: dict[str, list[float]], first: int, most: int) -> dict[str, tuple[float, float]]:
    """{variant: (low, high)}: 95 % intervals of the true differences, right for all variants together (Holm, 1979).

    differences: of each variant, a number per pair. first, most: the planned looks, see boundaries; equal for a single look.
    Holm: a variant is decided if its interval at alpha / (undecided variants) excludes 0; the others then share alpha anew.
    With one pair nothing is known about noise: (-inf, inf).
    """

    def interval(d, alpha):
        n = len(d)
        if n < 2:
            return -math.inf, math.inf
        # Student's t for a single look, or after a number of pairs without a planned look
        critical = boundaries(alpha, first, most).get(n) if first < most else None
        half = (critical or t_quantile(alpha, n - 1)) * np.std(d, ddof=1) / math.sqrt(n)
        return float(np.mean(d) - half), float(np.mean(d) + half)

    found, left = {}, dict(differences)
    while left:
        now = {name: interval(d, ALPHA / len(left)) for name, d in left.items()}
        decided = [name for name, (low, high) in now.items() if low > 0 or high < 0]
        found |= {name: now[name] for name in decided or now}
        left = {name: d for name, d in left.items() if name not in found}
    return found


def seeds_to_show(difference: float, d: list[float]) -> int | None:
    """Pairs needed for an interval with half width <= difference, with the noise of d; None above 1,000."""
    s = np.std(d, ddof=1)
    return next((n for n in range(2, 1001) if t_quantile(ALPHA, n - 1) * s / math.sqrt(n) <= difference), None)


def fit_sizes(sizes: list[float], losses: list[float]) -> dict:
    """Least squares fit of L = E + A / N^a with E >= 0 and A > 0 (arXiv:2001.08361): {E, A, a, low, high, residuals}.

    For each a the best E and A are a linear fit. low, high: the 95 % interval of a (profile likelihood): all values with a fit
    not worse than the best by more than chance explains. If the largest a of the search still fits, high is inf; if the
    smallest, low is 0. Raises ValueError for fewer than four sizes: three constants fit any three.
    """
    N, L = np.asarray(sizes, dtype=float), np.asarray(losses, dtype=float)
    if len(set(sizes)) < 4:
        raise ValueError(f"--fit has three constants, so it needs four sizes or more, and there are {len(set(sizes))}")

    def fit(a):
        x = (N / N.min()) ** -a
        slope, E = np.polyfit(x, L, 1)
        if E < 0:
            slope, E = (x @ L) / (x @ x), 0.0
        return float(np.sum((E + slope * x - L) ** 2)), float(E), float(slope)

    exponents = np.geomspace(1e-3, 4, 2000)
    errors = np.array([fit(a)[0] for a in exponents])
    best = int(errors.argmin())
    a, dof = float(exponents[best]), len(L) - 3
    _, E, slope = fit(a)
    inside = exponents[errors <= errors[best] * (1 + t_quantile(ALPHA, dof) ** 2 / dof) + 1e-18]
    low, high = float(inside.min()), float(inside.max())
    residuals = (L - E - slope * (N / N.min()) ** -a).tolist()
    return {"E": E, "A": slope * N.min() ** a, "a": a, "low": low if low > exponents[0] else 0.0,
            "high": high if high < exponents[-1] else math.inf, "residuals": residuals}
