"""Conversations in sequences: cut where they are too long, packed first-fit, each a document of its own."""
from pathlib import Path
from typing import NamedTuple

import numpy as np

from corpus.shards import FIRST, LOSS, open_mask

OPEN_SEQUENCES = 1024  # that are looked through for room; with more, a long file would take minutes


class Packing(NamedTuple):
    """Which conversations are in which sequence: number k has documents[bounds[k]:bounds[k + 1]]."""

    documents: np.ndarray  # (conversations, 3) int64: shard, first token in it, tokens
    bounds: np.ndarray  # (sequences + 1,) int64
    padding: float  # share of the input tokens that are padding
    n_cut: int  # conversations that were too long
    n_left_out: int  # and those without any token that has a loss

    def __len__(self):
        return len(self.bounds) - 1


def pack(folder: Path, entries: list, seq_len: int, together: bool) -> Packing:
    """The conversations of a split in sequences, several in each if they may be together.

    A sequence is seq_len + 1 tokens, the last one only as a label. Of a longer conversation the rest is cut off, and one in
    which no answer is left has nothing to teach."""
    documents, n_cut, n_left_out = [np.empty((0, 3), np.int64)], 0, 0
    for shard, entry in enumerate(entries):
        mask = open_mask(folder, entry)
        starts = np.flatnonzero(mask & FIRST)
        lengths = np.diff(np.append(starts, len(mask)))
        tokens = np.minimum(lengths, seq_len + 1)
        losses_before = np.concatenate([[0], np.cumsum(mask & LOSS, dtype=np.int64)])
        teaches = losses_before[starts + tokens] > losses_before[starts + 1]  # nothing predicts a conversation's first token
        n_cut += int((teaches & (tokens < lengths)).sum())
        n_left_out += int((~teaches).sum())
        documents.append(np.stack([np.full(len(starts), shard), starts, tokens], axis=1)[teaches])
    documents = np.concatenate(documents)
    sequence = first_fit(documents[:, 2], seq_len + 1) if together else np.arange(len(documents))
    order = np.argsort(sequence, kind="stable")
    bounds = np.searchsorted(sequence[order], np.arange(sequence.max(initial=-1) + 2))
    filled = np.add.reduceat(documents[order, 2], bounds[:-1]) if len(documents) else np.zeros(0)
    padding = 1 - np.minimum(filled, seq_len).sum() / max(1, len(filled) * seq_len)
    return Packing(documents[order], bounds, float(padding), n_cut, n_left_out)


def first_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """The number of the sequence that each length goes to: the first that has as much room left, among the open ones."""
    left, number, out, n = np.zeros(OPEN_SEQUENCES, np.int64), np.zeros(OPEN_SEQUENCES, np.int64), [], 0
    for length in lengths:
        slot = int((left >= length).argmax())
        if left[slot] < length:  # none: a new one, which closes the fullest if there are enough
            slot = n if n < OPEN_SEQUENCES else int(left.argmin())
            left[slot], number[slot], n = room, n, n + 1
        left[slot] -= length
        out.append(number[slot])
    return np.array(out, np.int64)
