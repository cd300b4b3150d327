"""Conversations as training data: packed into sequences, with a loss only on the assistant's
tokens.

Long conversations are cut, then first-fit; each conversation is a document.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from corpus.answer_ends import find_ends
from corpus.chat import add_marks, read_chat_template
from corpus.shards import FIRST, LOSS, mask_array_of, open_array, opened_array
from corpus.tokenizer import load_tokenizer
from data import TokenData
from flags.config import own_rank

# number of sequences in the search for room; with more, a long file would take minutes
OPEN_SEQUENCES = 1024
# words of templates, which are no question
ROLES = {"system", "developer", "user", "human", "assistant", "model", "tool", "ipython"}


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

    A sequence is seq_len + 1 tokens, the last only as a label. The rest of a longer conversation is
    cut off, and a conversation without an answer in the beginning is left out."""
    documents = [np.empty((0, 3), np.int64)]
    n_cut = 0
    n_left_out = 0
    for shard, entry in enumerate(entries):
        mask = open_array(folder, *mask_array_of(entry))
        starts = np.flatnonzero(mask & FIRST)
        lengths = np.diff(np.append(starts, len(mask)))
        tokens = np.minimum(lengths, seq_len + 1)
        losses_before = np.concatenate([[0], np.cumsum(mask & LOSS, dtype=np.int64)])
        # the first token of a conversation is no label
        teaches = losses_before[starts + tokens] > losses_before[starts + 1]
        n_cut += int((teaches & (tokens < lengths)).sum())
        n_left_out += int((~teaches).sum())
        documents.append(np.stack([np.full(len(starts), shard), starts, tokens], axis=1)[teaches])
    documents = np.concatenate(documents)
    if together:
        sequence = first_fit(documents[:, 2], seq_len + 1)
    else:
        sequence = np.arange(len(documents))
    order = np.argsort(sequence, kind="stable")
    bounds = np.searchsorted(sequence[order], np.arange(sequence.max(initial=-1) + 2))
    if len(documents):
        filled = np.add.reduceat(documents[order, 2], bounds[:-1])
    else:
        filled = np.zeros(0)
    padding = 1 - np.minimum(filled, seq_len).sum() / max(1, len(filled) * seq_len)
    return Packing(documents[order], bounds, float(padding), n_cut, n_left_out)


def first_fit(lengths: np.ndarray, room: int) -> np.ndarray:
    """The number of the sequence for each length: the first open sequence with enough room."""
    left = np.zeros(OPEN_SEQUENCES, np.int64)
    number = np.zeros(OPEN_SEQUENCES, np.int64)
    out = []
    n = 0
    for length in lengths:
        slot = int((left >= length).argmax())
        if left[slot] < length:  # open a new sequence; with all slots in use, close the fullest
            slot = n
            if n >= OPEN_SEQUENCES:
                slot = int(left.argmin())
            left[slot] = room
            number[slot] = n
            n += 1
        left[slot] -= length
        out.append(number[slot])
    return np.array(out, np.int64)


class ChatData(TokenData):
    """Sequences of conversations, with a loss only on the assistant's tokens: several conversations
    in each with doc_mask, else one. Sequences take the place of TokenData's windows: order, shares
    and cursor work in the same way."""

    def __init__(
        self,
        folder: Path,
        seq_len: int,
        data_seed: int = 0,
        doc_mask: bool = False,
        name="",
        all_val=False,
    ):
        super().__init__(folder, seq_len, data_seed, doc_mask, name, all_val)
        self.mask = lambda split, i: opened_array(folder, *mask_array_of(self.entries[split][i]))
        self.learnt = []  # ids that end an answer, from check() on rank 0
        self.packing = {
            split: pack(folder, self.entries[split], seq_len, doc_mask)
            for split in ("train", "val")
        }
        self.n_samples = len(self.packing["train"])
        self.n_val_samples = len(self.packing["val"])

    def windows(self, split: str, numbers) -> np.ndarray:
        """(len(numbers), seq_len + 1) int64: tokens, the bits of their masks above 2**32, -1 for
        padding."""
        out = np.full((len(numbers), self.seq_len + 1), -1, np.int64)
        documents, bounds = self.packing[split][:2]
        for row, number in zip(out, numbers):
            for shard, start, n in documents[bounds[number] : bounds[number + 1]]:
                part = slice(start, start + n)
                ids = self.shard(split, shard)[part].astype(np.int64)
                mask = self.mask(split, shard)[part].astype(np.int64)
                self.check_ids(ids)
                row[:n] = ids | mask << 32
                row = row[n:]
        return out

    def arrays(self, windows: np.ndarray):
        """Like TokenData.arrays. The padding of a sequence is one more document, without labels."""
        is_text = windows >= 0
        ids = np.where(is_text, windows & 0xFFFFFFFF, self.eot)
        bits = np.where(is_text, windows >> 32, 0)
        begins = (bits & FIRST > 0) | ~is_text & np.pad(
            is_text[:, :-1], ((0, 0), (1, 0)), constant_values=True
        )
        # a document's first token has no context
        labels = np.where((bits & LOSS > 0) & ~begins, ids, -100)[:, 1:]
        return ids[:, :-1], labels, *self.positions_and_ids(begins[:, :-1])

    def learnt_ends(self) -> list[int]:
        return self.learnt

    def first_words(self) -> str:
        """The first words of the longest line of the question before the first answer."""
        split = "train"
        if self.n_val_samples:
            split = "val"
        (window,) = self.windows(split, [0])
        asked = window[: int((window >> 32 & LOSS > 0).argmax())] & 0xFFFFFFFF
        tokenizer = load_tokenizer(Path(self.tokenizer_file))
        markers = [*tokenizer.get_added_tokens_decoder()]
        # the template writes markers, such as <|im_start|>, between roles and texts
        parts = np.split(asked, np.flatnonzero(np.isin(asked, markers)))
        question = ""
        for part in parts:
            text = tokenizer.decode(part[~np.isin(part, markers)].tolist())
            lines = [line.strip() for line in text.splitlines()]
            lines = [line for line in lines if line and line not in ROLES]
            if lines:
                question = max(lines, key=len)
        return " ".join(question.split()[:4])[:60].rstrip("\ufffd")

    def check(self, what: str, path: str, split: str):
        packing = self.packing[split]
        n_sequences = len(self.packing[split])
        if not n_sequences:
            raise ValueError(
                f"{what}: in no conversation the assistant says anything within --seq_len "
                f"{self.seq_len}"
            )
        if own_rank() == 0:
            _, name = add_marks(read_chat_template(str(Path(self.tokenizer_file).parent)) or "")
            text = (
                f"{path}: the chat template is that of {name}, with marks of ours around the "
                "answers\n" * (name != "")
            )
            text += f"{path}: {len(packing.documents):,} conversations in {n_sequences:,} sequences of {self.seq_len} tokens, "
            text += (
                f"{packing.padding:.1%} of them padding"
                + "; --doc_mask packs several into one" * (not self.doc_mask)
            )
            text += f"; {packing.n_cut:,} were too long and are cut" * (packing.n_cut > 0)
            text += (
                f"; {packing.n_left_out:,} are left out, for no answer is in their beginning"
                * (packing.n_left_out > 0)
            )
            print(text, flush=True)
            self.check_ends(path, split)

    def check_ends(self, path: str, split: str):
        """Finds what ends the answers, for learnt_ends(). Prints a warning if a model would not learn
        to end its answers. Rank 0 calls, because only rank 0 saves."""
        if not self.tokenizer_file:
            return
        file = Path(self.tokenizer_file)
        shards = [
            (self.shard(split, i), self.mask(split, i)) for i in range(len(self.entries[split]))
        ]
        found = find_ends(shards, file)
        self.learnt = found.ends
        n = found.n_answers
        if found.n_open > n / 10:
            print(
                f"{path}: {found.n_open:,} of {n:,} last answers end with no token that ends a text, "
                f"as here: {found.example}; the model will not learn to stop. Let the chat "
                "template write eos_token after an answer, and inside of {% generation %}",
                flush=True,
            )
        if self.packing[split].n_cut == len(self.packing[split].documents):
            print(
                f"{path}: all conversations are cut at --seq_len {self.seq_len}, so that the end of "
                "their last answer is not learnt; use a larger --seq_len",
                flush=True,
            )
