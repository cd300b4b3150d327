"""Is a variant better, and by how much? Paired differences, Student's t, simultaneous intervals,
and looks that are paid for.

Two runs of a seed start from the same weights and see the same batches. The effect of the seed on
both falls out of the difference, so n seeds give n independent differences d, with mean m and
standard deviation s. The interval of the true difference is m +- t * s / sqrt(n), with the t of
Student's distribution of n - 1 degrees of freedom.

A person who looks after every seed and stops when the difference "is significant" has many chances
to be wrong. So a study keeps a list of its looks, [pairs, share]: at the look at so many pairs, the
share of ALPHA that is spent so far. Each look may be wrong in the share that it adds, so all looks
together are wrong in ALPHA of the studies at most (Bonferroni). The last look of a series has half of
the series' share: simulated with 3 to 12 pairs, a difference as large as the noise is found in 80 %
of studies. Equal shares find 56 %, and shares with boundaries from simulated studies 76 %.
"""

import math
from functools import cache, lru_cache

import numpy as np

# how often a study of equal variants may find a difference, whatever the number of variants
ALPHA = 0.05
# The first series of looks spends ALPHA. A continued study has a further series, with half of the
# rest of 0.1 ALPHA: 5.5 % in all.
LATER = 0.1


@lru_cache(64)  # 320 kB each
def share_below(df: int) -> tuple[np.ndarray, np.ndarray]:
    """(angles from 0 to 90 degrees, P(|Student's t| < t) at each), with t = sqrt(df) tan(angle). The
    density of the angle is cos(angle)^(df - 1), which we add up over a fine grid."""
    angle = np.linspace(0, math.pi / 2, 20_001)
    density = np.cos(angle) ** (df - 1)
    within = np.append(0, np.cumsum(density[1:] + density[:-1]))
    return angle, within / within[-1]


@cache
def t_quantile(alpha: float, df: int) -> float:
    """The t with P(|Student's t| > t) = alpha."""
    angle, share = share_below(df)
    return math.sqrt(df) * math.tan(np.interp(1 - alpha, share, angle))


def add_looks(looks: list, first: int, most: int, least: int = 2) -> list:
    """The earlier looks of a study and a new series, at first, first + 1, ... most pairs. Numbers of
    pairs with an earlier look cost nothing. least: fewer pairs have no interval."""
    pairs = 0
    spent = 0.0
    share = 1.0
    if looks:
        pairs, spent = looks[-1]
        share = (1 + LATER - spent) / 2
    new = range(max(first, pairs + 1, least), most + 1)
    found = [*looks]
    for i, n in enumerate(new):
        part = (i + 1) / len(new) / 2
        if n == most:
            part = 1
        found.append([n, spent + share * part])
    return found


def interval(
    d: list[float], alpha: float, looks: list, noise: dict | None = None
) -> tuple[float, float, float]:
    """(low, high, level): interval of the true difference. All intervals of one study at alpha =
    ALPHA / variants, at all its looks, are right in 95 % of studies (Bonferroni).

    d: a number per pair; inf or -inf if only one run of the pair survived. looks: see add_looks.
    (-inf, inf): nothing is
    known, with a single pair, with pairs that no look was planned for, or if all differences are
    equal: equal numbers of a coarse metric say nothing about noise. If a run died there is no mean.
    Of two equal variants that die with chance p, one certain run alone survives with chance p (1 -
    p) <= 1/4 in each pair; so if that happens in all pairs, and they are enough, both ends are inf
    or -inf.

    noise: {"sd", "df"}, measured before in another study: its degrees of freedom are added to those
    of d. Noise of d above
    twice the other study's is another noise: then d counts alone.
    """
    n = len(d)
    shares = dict(looks)
    spent = max((share for pairs, share in looks if pairs < n), default=0)
    level = 1 - alpha * (shares.get(n, 1) - spent)
    nothing_known = (-math.inf, math.inf, level)
    if n not in shares:
        return nothing_known
    if not np.isfinite(d).all():
        if len(set(d)) == 1 and 2 / 4**n <= 1 - level:
            return d[0], d[0], level
        return nothing_known
    own = 0.0
    if n > 1:
        own = float(np.std(d, ddof=1))
    squares = (n - 1) * own**2
    extra = 0  # degrees of freedom of the other study
    if noise and own <= 2 * noise["sd"]:
        extra = noise["df"]
        squares += extra * noise["sd"] ** 2
    are_equal = np.ptp(d) <= 1e-9 * abs(np.mean(d))
    if are_equal and (n > 1 or not extra):
        return nothing_known
    s = math.sqrt(squares / (n - 1 + extra))
    half = t_quantile(1 - level, n - 1 + extra) * s / math.sqrt(n)
    return float(np.mean(d) - half), float(np.mean(d) + half), level


def seeds_to_show(difference: float, d: list[float], alpha: float) -> int | None:
    """Pairs with which a look at alpha finds a true difference in 80 % of studies; None above
    1,000. The noise of few pairs may be too small by chance, so the noise of d counts for more, by
    Student's t against the normal distribution at 80 %."""
    s = np.std(d, ddof=1) * t_quantile(0.2, len(d) - 1) / 1.2816
    for n in range(2, 1001):
        found = (t_quantile(alpha, n - 1) + t_quantile(0.4, n - 1)) * s / math.sqrt(n)
        if found <= difference:
            return n
    return None
