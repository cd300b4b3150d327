"""Conversations as training data: packed into sequences, with a loss only on the assistant's tokens."""
from pathlib import Path

import numpy as np

from corpus.shards import FIRST, LOSS, mask_array_of, opened_array
from corpus.tokenizer import load_tokenizer
from data import TokenData
from sft.packing import pack
from support.config import own_rank


class ChatData(TokenData):
    """Sequences of conversations, with a loss only on the assistant's tokens: several conversations in each with doc_mask, else
    one. Sequences take the place of TokenData's windows: order, shares and cursor work in the same way."""

    def __init__(self, folder: Path, seq_len: int, data_seed: int = 0, doc_mask: bool = False, name="", all_val=False):
        super().__init__(folder, seq_len, data_seed, doc_mask, name, all_val)
        self.mask = lambda split, i: opened_array(folder, *mask_array_of(self.entries[split][i]))
        self.packing = {split: pack(folder, self.entries[split], seq_len, doc_mask) for split in ("train", "val")}
        self.n_samples, self.n_val_samples = (len(self.packing[split]) for split in ("train", "val"))

    def windows(self, split: str, numbers) -> np.ndarray:
        """(len(numbers), seq_len + 1) int64: tokens, the bits of their masks above 2**32, -1 for padding."""
        out, (documents, bounds) = np.full((len(numbers), self.seq_len + 1), -1, np.int64), self.packing[split][:2]
        for row, number in zip(out, numbers):
            for shard, start, n in documents[bounds[number]:bounds[number + 1]]:
                ids, mask = (array(split, shard)[start:start + n].astype(np.int64) for array in (self.shard, self.mask))
                self.check_ids(ids)
                row[:n], row = ids | mask << 32, row[n:]
        return out

    def arrays(self, windows: np.ndarray):
        """Like TokenData.arrays. The padding of a sequence is one more document, without labels."""
        is_text = windows >= 0
        ids, bits = np.where(is_text, windows & 0xFFFFFFFF, self.eot), np.where(is_text, windows >> 32, 0)
        begins = (bits & FIRST > 0) | ~is_text & np.pad(is_text[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        labels = np.where((bits & LOSS > 0) & ~begins, ids, -100)[:, 1:]  # a document's first token has no context
        return ids[:, :-1], labels, *self.positions_and_ids(begins[:, :-1])

    def first_words(self) -> str:
        """The first words of the longest line before the first answer."""
        split = "val" if self.n_val_samples else "train"
        shard, start, n = self.packing[split].documents[0]
        ids, mask = (array(split, shard)[start:start + n] for array in (self.shard, self.mask))
        asked = load_tokenizer(Path(self.tokenizer_file)).decode(ids[:int((mask & LOSS > 0).argmax())].tolist())
        return " ".join(max(asked.splitlines() or [""], key=len).split()[:4])[:60].rstrip("\ufffd")

    def check(self, what: str, path: str, split: str):
        if not len(self.packing[split]):
            raise ValueError(f"{what}: in no conversation the assistant says anything within --seq_len {self.seq_len}; "
                             "take other conversations or a larger --seq_len")
        if own_rank() == 0:
            print(f"{path}: {self.summary(split)}", flush=True)

    def summary(self, split: str) -> str:
        packing, n_sequences = self.packing[split], len(self.packing[split])
        text = (f"{len(packing.documents):,} conversations in {n_sequences:,} sequences of {self.seq_len} tokens, "
                f"{packing.padding:.1%} of them padding" + "; --doc_mask packs several into one" * (not self.doc_mask))
        text += f"; {packing.n_cut:,} were too long and are cut" * (packing.n_cut > 0)
        return text + f"; {packing.n_left_out:,} are left out, for no answer is in their beginning" * (packing.n_left_out > 0)
