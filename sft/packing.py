"""Pack conversations into sequences: cut long conversations, then first-fit; each conversation is a document."""
from pathlib import Path
from typing import NamedTuple

import numpy as np

from corpus.shards import FIRST, LOSS, mask_array_of, open_array

OPEN_SEQUENCES = 1024  # number of sequences in the search for room; with more, a long file would take minutes


class Packing(NamedTuple):
    """The conversations of each sequence: sequence k has documents[bounds[k]:bounds[k + 1]]."""

    documents: np.ndarray  # (conversations, 3) int64: shard, first token in it, tokens
    bounds: np.ndarray  # (sequences + 1,) int64
    padding: float  # share of padding among the input tokens
    n_cut: int  # conversations cut to seq_len + 1
    n_left_out: int  # conversations left out, because no token would have a loss

    def __len__(self):
        return len(self.bounds) - 1


def pack(folder: Path, entries: list, seq_len: int, together: bool) -> Packing:
    """The conversations of a split in sequences. together: several in each, else one.

    A sequence is seq_len + 1 tokens, the last only as a label. The rest of a longer conversation is cut off, and a conversation
    without an answer in the beginning is left out."""
    documents, n_cut, n_left_out = [np.empty((0, 3), np.int64)], 0, 0
    for shard, entry in enumerate(entries):
        mask = open_array(folder, *mask_array_of(entry))
        starts = np.flatnonzero(mask & FIRST)
        lengths = np.diff(np.append(starts, len(mask)))
        tokens = np.minimum(lengths, seq_len + 1)
        losses_before = np.concatenate([[0], np.cumsum(mask & LOSS, dtype=np.int64)])
        teaches = losses_before[starts + tokens] > losses_before[starts + 1]  # the first token of a conversation is no label
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
    """The number of the sequence for each length: the first open sequence with enough room."""
    left, number, out, n = np.zeros(OPEN_SEQUENCES, np.int64), np.zeros(OPEN_SEQUENCES, np.int64), [], 0
    for length in lengths:
        slot = int((left >= length).argmax())
        if left[slot] < length:  # open a new sequence; with all slots in use, close the fullest
            slot = n if n < OPEN_SEQUENCES else int(left.argmin())
            left[slot], number[slot], n = room, n, n + 1
        left[slot] -= length
        out.append(number[slot])
    return np.array(out, np.int64)
