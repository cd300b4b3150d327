"""--data name=path:weight,name=path:weight: the part of the mixture that gives each sequence of the run.

The weights are shares of the sequences, exact at every moment: of the first n sequences of a run, a part with share w has given
more than n w - 1 and fewer than n w + 1, for every n. The turn depends on the cursor alone, so that a run goes on from a
checkpoint, on any number of ranks, without counting from the beginning.
"""
import math
import os
import re
from fractions import Fraction
from typing import NamedTuple

import numpy as np

NEEDED = "a mixture is name=path:weight,name=path:weight, like web=tokens/web:0.7,code=tokens/code:0.3"
LONGEST_PERIOD = 100_000  # sequences until the turns repeat: enough for shares of five decimals


class Part(NamedTuple):
    name: str  # "" without a mixture
    path: str  # stdlib, a file, a glob, a folder of text or of token shards
    share: int  # sequences of this part in a period


def parse_mixture(data: str, flag: str = "--data") -> list[Part]:
    """The parts of --data, sorted by name; without a mixture a single part without a name. The shares have no common divisor.
    flag: for errors. Raises ValueError."""
    if not re.match(r"\w[\w.-]*=", data) or os.path.lexists(data):
        return [Part("", data, 1)]
    found = {}
    for item in map(str.strip, data.split(",")):
        name, _, rest = item.partition("=")
        path, _, weight = rest.rpartition(":") if ":" in rest else (rest, "", "")
        try:
            share = Fraction(weight)
        except (ValueError, ZeroDivisionError):
            share = None
        if missing := [what for what, has in (("name", re.fullmatch(r"\w[\w.-]*", name)), ("path", path), ("weight", share))
                       if has is None or has == ""]:
            raise ValueError(f"{flag}: {item!r} has no {missing[0]}; {NEEDED}")
        if share <= 0:
            raise ValueError(f"{flag}: the weight of {name} is {weight}; give a number above 0, or leave {name} out")
        if name in found:
            raise ValueError(f"{flag} names two parts {name}; give each a name of its own")
        found[name] = path, share
    total = sum(share for _, share in found.values())
    period = math.lcm(*((share / total).denominator for _, share in found.values()))
    if period > LONGEST_PERIOD:
        near = ", ".join(f"{name} {max(1, round(share / total * 10_000))}" for name, (_, share) in found.items())
        raise ValueError(f"{flag}: to be exact at each sequence, the turns must repeat after at most {LONGEST_PERIOD:,}; with "
                         f"these weights they do after {period:,}; near to them is {near}")
    return [Part(name, path, int(share / total * period)) for name, (path, share) in sorted(found.items())]


def spell_part(part: Part) -> str:
    """A part as the user typed it, for errors."""
    return f"{part.name}={part.path}" if part.name else part.path


class Turns(NamedTuple):
    """The part that gives each sequence. The order repeats after a period: as many sequences as the sum of the shares."""

    shares: np.ndarray  # (parts,) int64
    part: np.ndarray  # (period,) int64: the part of each sequence
    number: np.ndarray  # (period,) int64: number of each sequence within its part and the period

    def at(self, cursors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(part, number of the sequence among those of its part), both as long as the cursors."""
        periods, places = np.divmod(cursors, len(self.part))
        part = self.part[places]
        return part, periods * self.shares[part] + self.number[places]

    def counts(self, n: int) -> np.ndarray:
        """(parts,) int64: how many of the first n sequences come from each part."""
        periods, rest = divmod(n, len(self.part))
        return periods * self.shares + np.bincount(self.part[:rest], minlength=len(self.shares))


def take_turns(shares: list[int]) -> Turns:
    """The turns of parts with these shares, each exact within one sequence at every prefix.

    With w a part's share of the whole, sequence j (from 0) of the part may come from place floor(j / w) on: earlier, the part
    would be more than one sequence ahead. The sequence must come before place ceil((j + 1) / w): later, the part would be more
    than one sequence behind. Of all sequences that may come, take the earliest deadline. If each part gave the fraction w of a
    sequence at every place, all deadlines would be met; then earliest deadline first meets all of them in whole sequences, too.
    (Scheduling on one processor, in the windows of Baruah et al., Proportionate progress, Algorithmica 15, 1996.)
    """
    period, given, part, number = sum(shares), [0] * len(shares), [], []
    for place in range(period):
        may_come = [i for i, share in enumerate(shares) if given[i] * period // share <= place]
        _, i = min((-(-(given[i] + 1) * period // shares[i]), i) for i in may_come)  # the earliest deadline, rounded up
        part.append(i)
        number.append(given[i])
        given[i] += 1
    return Turns(*(np.array(x, np.int64) for x in (shares, part, number)))
