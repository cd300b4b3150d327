"""When may a campaign keep a candidate? The rule alone: numbers in, a verdict out, and no runs.

A campaign tests candidates one after the other, and nobody knows how many will come. Test t gets the
level

    alpha_t = ALPHA * share(t) * (keeps before t + 1),    share(1) + share(2) + ... <= 1

which is LOND (Javanmard and Montanari, Online rules for control of false discovery rate, 2018,
arXiv:1603.09000). Each candidate is compared on seeds of its own that no earlier answer depends on.
So whatever the earlier answers were, and whatever candidate was made of them, a candidate that is
not better is kept with a chance of alpha_t at most. That is all the proof needs: with R keeps in the
end, a false keep at test t has R >= keeps before t + 1, so

    E[false keeps / R] <= sum of E[kept at t and false / (keeps before t + 1)] <= ALPHA * sum of share(t)

at most 5 % of the keeps are false on average, and a campaign of candidates that are all useless keeps
anything at all in at most 5 % of cases. With seeds shared between comparisons, tests depend on each
other, and LOND needs positive dependence (Zrnic, Ramdas and Jordan, 2021, arXiv:1812.05068), which
nobody can promise for candidates that were written after looking at earlier answers.

Inside of a comparison there are four looks, which share alpha_t (tools/study/significance.py), and
after each pair a candidate without a prospect is dropped, which can only lower the chance of a keep.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np

from tools.study.significance import ALPHA, interval, t_quantile

# share(t) falls with this power of t: of the powers from 1.1 to 1.5, the one with the largest shares
# between 50 and 100 candidates
POWER = 1.3
# looks at these parts of the pairs, with these parts of alpha_t spent so far
LOOKS = ((0.25, 0.125), (0.5, 0.25), (0.75, 0.5), (1.0, 1.0))
# a comparison has so many pairs that a difference of EFFECT times the noise of a pair is found with
# a chance of 80 %
EFFECT = 1.0
LEAST = 3  # pairs; fewer say nothing of noise
# a candidate is dropped early if the optimistic end of its 80 % interval could not win
DOUBT = 0.2


@cache
def sum_of_shares() -> float:
    """1 + 2^-POWER + 3^-POWER + ..., or a little more: the rest of the sum is below its integral."""
    n = 10_000
    terms = np.arange(1, n + 1, dtype=float) ** -POWER
    return float(terms.sum()) + n ** (1 - POWER) / (POWER - 1)


def share(test: int) -> float:
    """The share of ALPHA of a test, counted from 1; all shares together are at most 1."""
    return test**-POWER / sum_of_shares()


def level_of(test: int, kept: int) -> float:
    """The chance with which a test may keep a candidate that is not better. kept: earlier keeps."""
    return ALPHA * share(test) * (kept + 1)


def left_after(test: int) -> float:
    """ALPHA times the shares of all later tests."""
    return ALPHA * (1 - sum(share(t) for t in range(1, test + 1)))


class Plan(NamedTuple):
    """A comparison, fixed before its first pair."""

    alpha: float
    most: int  # pairs
    looks: list  # [pairs, part of alpha spent so far], for significance.interval
    effect: float  # the difference, in units of the noise of a pair, that is found in 80 % of cases


def findable(alpha: float, pairs: int) -> float:
    """The true difference, in units of a pair's noise, that the last look finds in 80 % of cases."""
    last = alpha * (LOOKS[-1][1] - LOOKS[-2][1])
    return (t_quantile(2 * last, pairs - 1) + t_quantile(0.4, pairs - 1)) / math.sqrt(pairs)


@cache
def plan_of(alpha: float, most: int | None = None) -> Plan:
    """The comparison at a level. most: pairs, if the user wants no more than that."""
    pairs = LEAST
    while findable(alpha, pairs) > EFFECT and pairs != most:
        pairs += 1
    looks = []
    for part, spent in LOOKS:
        n = max(LEAST, math.ceil(part * pairs))
        if looks and looks[-1][0] == n:
            looks.pop()
        looks.append([n, spent])
    return Plan(alpha, pairs, looks, findable(alpha, pairs))


class Decision(NamedTuple):
    verdict: str  # kept, dropped, or "" if more pairs are needed
    pairs: int  # that counted; a scheduler may have made more
    low: float  # of the interval of the difference, variant minus best
    high: float
    level: float
    why: str


def decide(d: list[float], plan: Plan, sign: int = 1) -> Decision:
    """The verdict of the pairs so far, in the order of seeds. d: candidate minus best; infinite if
    one of both died. sign: 1 if a low metric is good, -1 if a high one is. Every pair is looked at
    in turn, so the verdict does not depend on how many pairs were made at once."""
    decision = Decision("", 0, -math.inf, math.inf, 1 - 2 * plan.alpha, "")
    for n in range(LEAST, min(len(d), plan.most) + 1):
        decision = decide_at(d[:n], plan, sign)
        if decision.verdict:
            break
    return decision


def decide_at(d: list[float], plan: Plan, sign: int) -> Decision:
    """The verdict after the last of these pairs. Only one side of the interval can keep a candidate,
    so the interval may miss the truth on each side with the look's part of alpha."""
    n = len(d)
    looks = plan.looks
    is_look = n in dict(looks)
    if not is_look:  # its interval is shown, and decides nothing
        looks = [[n, 1.0]]
    low, high, level = interval(d, 2 * plan.alpha, looks)
    if is_look and sign * (high if sign == 1 else low) < 0:
        return Decision("kept", n, low, high, level, "the interval excludes 0")
    if sign * sum(d) == math.inf:
        return Decision("dropped", n, low, high, level, "a run of the candidate died")
    if n == plan.most:
        why = f"no difference shown by the {n} pairs of its plan"
        return Decision("dropped", n, low, high, level, why)
    if is_hopeless(d, plan, sign):
        why = "no prospect of showing a difference within its plan"
        return Decision("dropped", n, low, high, level, why)
    return Decision("", n, low, high, level, "")


def is_hopeless(d: list[float], plan: Plan, sign: int) -> bool:
    """Whether even the optimistic end of the 80 % interval of the mean is less than the last look
    needs."""
    if not np.isfinite(d).all():
        return False
    n = len(d)
    noise = float(np.std(d, ddof=1))
    gain = -sign * float(np.mean(d))
    last = plan.alpha * (LOOKS[-1][1] - LOOKS[-2][1])
    needed = t_quantile(2 * last, plan.most - 1) * noise / math.sqrt(plan.most)
    hoped = gain + t_quantile(DOUBT, n - 1) * noise / math.sqrt(n)
    return hoped < needed or (noise == 0 and gain <= 0)
