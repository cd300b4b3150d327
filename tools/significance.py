"""Is a variant better, and by how much? Paired differences, Student's t, simultaneous intervals, and looks that are paid for.

Two runs of a seed start from the same weights and see the same batches. The effect of the seed on both falls out of the
difference, so n seeds give n independent differences d, with mean m and standard deviation s. The interval of the true
difference is m +- c * s / sqrt(n), and c is Student's t with n - 1 degrees of freedom.

A person who looks after every seed and stops when the difference "is significant" has many chances to be wrong. So a study
keeps a list of its looks, [pairs, share]: after a look at so many pairs, this share of ALPHA is spent. `boundaries` makes c so
large at each look that all looks together are wrong in ALPHA of the studies.
"""
import math
from functools import cache

import numpy as np

ALPHA = 0.05  # how often a study of equal variants may find a difference, whatever the number of variants and of looks
LATER = 0.1  # the first plan of a study spends ALPHA, and each later plan half of what is left of 0.1 ALPHA: 5.5 % in all
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


def add_looks(looks: list, first: int, most: int) -> list:
    """The looks of a study with those of a new plan, after first, first + 1, ... most pairs. Pairs that an earlier plan has
    looked at cost nothing. The share grows linearly with the pairs (Lan and DeMets, 1983)."""
    pairs, spent = looks[-1] if looks else (0, 0.0)
    share = (1 + LATER - spent) / 2 if looks else 1.0
    return looks + [[n, spent + share * (n - pairs) / (most - pairs)] for n in range(max(first, pairs + 1, 2), most + 1)]


@cache
def boundaries(alpha: float, looks: tuple) -> dict[int, float]:
    """{pairs at a look: how large |t| must be there}, for looks ((pairs, share of alpha that is spent then), ...).

    The t of later looks is read off simulated studies, because the looks depend on each other.
    """
    found = {n: t_quantile(alpha * share, n - 1) for n, share in looks[:1]}
    if len(looks) > 1:
        t = simulated_t(looks[-1][0])
        going = np.ones(PATHS, dtype=bool)
        for n, share in looks:
            values = np.sort(t[going, n - 2])
            found.setdefault(n, float(values[round((1 - alpha * share) * PATHS) - 1]))  # of the studies without a verdict yet
            going &= t[:, n - 2] <= found[n]
    return found


def interval(d: list[float], alpha: float, looks: list) -> tuple[float, float, float]:
    """(low, high, level): interval of the true difference. All intervals of one study at alpha = ALPHA / variants, at all its
    looks, are right in 95 % of studies (Bonferroni).

    d: a number per pair; inf or -inf if only one run of the pair survived. looks: see add_looks. (-inf, inf): nothing is
    known, with a single pair, with pairs that no look was planned for, or if all differences are equal: equal numbers of a
    coarse metric say nothing about noise. If a run died there is no mean. Of two equal variants that die with chance p, one
    certain run alone survives with chance p (1 - p) <= 1/4 in each pair; so if that happens in all pairs, and they are enough,
    both ends are inf or -inf.
    """
    n, shares = len(d), dict(looks)
    level = 1 - alpha * shares.get(n, 1)
    if n not in shares or np.isfinite(d).all() and np.ptp(d) <= 1e-9 * abs(np.mean(d)):
        return -math.inf, math.inf, level
    if not np.isfinite(d).all():
        sure = len(set(d)) == 1 and 2 / 4**n <= 1 - level
        return (d[0], d[0], level) if sure else (-math.inf, math.inf, level)
    half = boundaries(alpha, tuple(map(tuple, looks)))[n] * np.std(d, ddof=1) / math.sqrt(n)
    return float(np.mean(d) - half), float(np.mean(d) + half), level


def seeds_to_show(difference: float, d: list[float], alpha: float) -> int | None:
    """Pairs with which a look at alpha finds a true difference in 80 % of studies; None above 1,000. The noise of few pairs may
    be too small by chance, so the noise of d counts for more, by Student's t against the normal distribution at 80 %."""
    s = np.std(d, ddof=1) * t_quantile(0.2, len(d) - 1) / 1.2816
    needed = (n for n in range(2, 1001) if (t_quantile(alpha, n - 1) + t_quantile(0.4, n - 1)) * s / math.sqrt(n) <= difference)
    return next(needed, None)


def fit_sizes(sizes: list[float], losses: list[float]) -> dict:
    """Least squares fit of L = E + A / N^a with E >= 0 and A > 0 (arXiv:2001.08361): {E, A, a, low, high, residuals}.

    For each a the best E and A are a linear fit. low, high: the 95 % interval of a (profile likelihood): all values with a fit
    not worse than the best by more than chance explains. If the largest a of the search still fits, high is inf; if the
    smallest, low is 0. sizes: four different ones or more, because three constants fit any three.
    """
    N, L = np.asarray(sizes, dtype=float), np.asarray(losses, dtype=float)

    def fit(a):
        x = (N / N.min()) ** -a
        slope, E = np.polyfit(x, L, 1)
        if E < 0:
            slope, E = (x @ L) / (x @ x), 0.0
        return np.sum((E + slope * x - L) ** 2), E, slope

    exponents = np.geomspace(1e-3, 4, 2000)
    errors, offsets, slopes = np.array([fit(a) for a in exponents]).T
    best, dof = int(errors.argmin()), len(L) - 3
    a, E, slope = float(exponents[best]), float(offsets[best]), float(slopes[best])
    inside = exponents[errors <= errors[best] * (1 + t_quantile(ALPHA, dof) ** 2 / dof) + 1e-18]
    low, high = float(inside.min()), float(inside.max())
    residuals = (L - E - slope * (N / N.min()) ** -a).tolist()
    return {"E": E, "A": slope * N.min() ** a, "a": a, "low": low if low > exponents[0] else 0.0,
            "high": high if high < exponents[-1] else math.inf, "residuals": residuals}
