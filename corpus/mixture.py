"""What --data names: formats of text, and mixtures, name=path:weight,name=path:weight: the part
that gives each sequence.

The weights are shares of the sequences, exact at every moment: of the first n sequences of a run, a
part with share w has given more than n w - 1 and fewer than n w + 1, for every n. The turn depends
on the cursor alone, so that a run goes on from a checkpoint, on any number of ranks, without
counting from the beginning.
"""

import math
import re
from fractions import Fraction
from pathlib import Path
from shlex import quote
from typing import NamedTuple

import numpy as np

NEEDED = (
    "a mixture is name=path:weight,name=path:weight, like web=tokens/web:0.7,code=tokens/code:0.3"
)
PACKED = (".gz", ".zst", ".parquet")
FORMATS = ".txt, .md, .jsonl (each also with .gz or .zst) or .parquet"
LONGEST_PERIOD = 100_000  # sequences until the turns repeat: enough for shares of five decimals


def format_of(path: Path) -> str:
    """Format after unpacking: .txt (Markdown, too) or .jsonl (a .parquet, too). Any other suffix is
    no text."""
    if path.suffix in (".gz", ".zst"):
        suffix = path.with_suffix("").suffix
    else:
        suffix = path.suffix
    return {".md": ".txt", ".parquet": ".jsonl"}.get(suffix, suffix)


def is_text_file(path: Path) -> bool:
    return format_of(path) in (".txt", ".jsonl")


def prepare_column(path: Path) -> str:
    """For errors: how to train on a file with another name than "text" for its texts."""
    return (
        f'if its texts are not named "text": python data.py prepare --input {quote(str(path))} '
        "--text_column NAME "
        "--tokenizer tokenizer.json --out FOLDER, and train with --data FOLDER"
    )


def mixture_parts(data: str, flag: str) -> list[tuple[str, str, int]]:
    """(name, path, share) of each part of a mixture, sorted by name. The shares have no common
    divisor. flag: for errors. Raises ValueError."""
    found = {}
    for item in map(str.strip, data.split(",")):
        name, _, rest = item.partition("=")
        path, _, weight = rest.rpartition(":")
        try:
            share = Fraction(weight)
        except (ValueError, ZeroDivisionError):
            share = 0
        if not (re.fullmatch(r"\w[\w.-]*", name) and path and share > 0):
            raise ValueError(f"{flag}: {item!r} lacks a name, a path or a weight above 0; {NEEDED}")
        if name in found:
            raise ValueError(f"{flag} names two parts {name}; give each a name of its own")
        found[name] = path, share
    total = sum(share for _, share in found.values())
    period = math.lcm(*((share / total).denominator for _, share in found.values()))
    if period > LONGEST_PERIOD:
        raise ValueError(
            f"{flag}: with these weights the turns repeat after {period:,} sequences; round the "
            "weights, so that "
            f"the turns repeat after at most {LONGEST_PERIOD:,}"
        )
    parts = []
    for name, (path, share) in sorted(found.items()):
        parts.append((name, path, int(share / total * period)))
    return parts


class Turns(NamedTuple):
    """The part that gives each sequence. The order repeats after a period: as many sequences as the
    sum of the shares."""

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

    With w a part's share of the whole, sequence j (from 0) of the part may come from place floor(j
    / w) on: earlier, the part would be more than one sequence ahead. The sequence must come before
    place ceil((j + 1) / w): later, the part would be more than one sequence behind. Of all
    sequences that may come, take the earliest deadline. If each part gave the fraction w of a
    sequence at every place, all deadlines would be met; then earliest deadline first meets all of
    them in whole sequences, too. (Scheduling on one processor, in the windows of Baruah et al.,
    Proportionate progress, Algorithmica 15, 1996.)
    """
    period = sum(shares)
    given = [0] * len(shares)
    part = []
    number = []
    for place in range(period):
        may_come = [i for i, share in enumerate(shares) if given[i] * period // share <= place]
        # the earliest deadline, rounded up
        _, i = min((-(-(given[i] + 1) * period // shares[i]), i) for i in may_come)
        part.append(i)
        number.append(given[i])
        given[i] += 1
    return Turns(*(np.array(x, np.int64) for x in (shares, part, number)))


def check_same_ids(sources: dict) -> None:
    """Raises ValueError if two sources have different tokenizers. sources: {flag and source, for
    errors: TokenData}."""
    (first, known), *others = sources.items()
    for name, data in others:
        if ids_of_data(data) != ids_of_data(known):
            raise ValueError(
                f"{first} and {name} have different tokenizers ({about_ids(known)}; "
                f"{about_ids(data)}); prepare both with one"
            )


def ids_of_data(data) -> tuple:
    """What decides which text an id stands for."""
    return data.fingerprint["tokenizer_sha256"], data.vocab_size, data.eot


def about_ids(data) -> str:
    sha256, n_ids, eot = ids_of_data(data)
    return f"{n_ids} ids, end of text {eot}, sha256 {sha256[:12]}"
