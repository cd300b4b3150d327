"""Text to token shards, and one global order of sequences: the batch of a step depends on (data,
data_seed, cursor) alone.

    python data.py stdlib                       # the built-in corpus: the sources of Python's standard library, into the cache
    python data.py tokenizer --input a.txt b.jsonl --vocab_size 8192 --out tokenizer.json      # a byte-level BPE of your own
    python data.py prepare --input a.txt b.jsonl --tokenizer tokenizer.json --out tokens       # then train with --data tokens
    python data.py show chat.jsonl --tokenizer HUGGING_FACE_FOLDER      # conversations as they will be trained, see below
    python data.py check tokens                 # is every byte as it was written? exit status 0 or 1

Text is .txt, .jsonl (each also .gz or .zst) and .parquet, files, folders of them, and globs
(corpus/files.py). Of a folder, linked folders count too; beside .jsonl or .parquet a README, a
licence, .md or .txt does not, and of a file and its packed twin one. Text that the tokenizer cannot
spell is counted: above 5 % of the characters preparation refuses, see prepare --max_lost. A mixture
is --data "web=tokens/web:0.7,code=tokens/code:0.3": shares of the sequences, exact at every moment
(corpus/mixture.py). A .jsonl of conversations, {"messages": [...]} per line, is written out by the
tokenizer's chat template, and only answers of the assistant have a loss (corpus/chat.py); `show`
prints them in green.
Read next: corpus/build.py (text -> shards), corpus/shards.py (files of a folder of shards).
"""

import hashlib
import threading
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count
from pathlib import Path

import numpy as np
import torch

from corpus.cache import cache_folder, cached_corpus
from corpus.mixture import parse_mixture, take_turns
from corpus.shards import MASKED, array_of, check_arrays, is_shards, opened_array, read_index
from corpus.special import NEW_TOKENIZER, TextSource, find_tokenizer
from corpus.tokenizer import bytes_of_tokens, listed_tokens, load_tokenizer
from flags.config import Need, flag, own_rank
from flags.files import sha256_file

# Text of the refusal of a flag without its precondition: see flags/config.py
TEXT = Need(
    "with --data of token shards, which need no cache",
    lambda c: (
        not all(
            is_shards(part.path)
            for data in (c.data, c.val_data)
            if data
            for part in parse_mixture(data)
        )
    ),
)


@dataclass(kw_only=True)
class DataConfig:
    # stdlib (Python's sources), text or chats (file, folder, glob), shards, or name=path:weight,...
    data: str = "stdlib"
    # validate on all of this, in place of the part of --data that is kept for it; named as --data
    # is
    val_data: str = ""
    # tokenizer.json or Hugging Face folder; empty: --init_from's, or a BPE of 4096 ids, made of the
    # text
    tokenizer: str = ""
    # documents do not see each other: attention, positions and labels stop where a document ends
    doc_mask: bool = False
    data_seed: int = 0  # another seed is another order of the same sequences
    # folder for tokenized text; empty: nanotitan in the user's cache folder
    cache_dir: str = flag("", TEXT)


# --------------------------------------------------------------------------------------------------
# The global order of sequences
@dataclass
class Batch:
    """The data of one step on one data rank. A gradient accumulation steps, B local_batch_size, T
    seq_len."""

    tokens: torch.Tensor  # (A, B, T) int64
    labels: torch.Tensor  # (A, B, T) int64, the next token; -100 = no loss here
    positions: torch.Tensor  # (A, B, T) int64
    # (A, B, T) int64, counts the documents of a sequence; None without doc_mask
    doc_ids: torch.Tensor | None
    samples: int  # sequences in the global batch
    # training: of this data rank's tokens and labels; checks.reduce_hash sums over ranks for the
    # global batch
    hash: str
    # validation: bytes of text in this rank's labels; None if the tokenizer is not byte-level
    n_bytes: int | None = None
    # validation: the part of a mixture; all sequences of the batch, on every rank, come from one
    # part
    part: str = ""
    first: int | None = None  # training: cursor of this data rank's first sequence


def permute(k: np.ndarray, n: int, key: str) -> np.ndarray:
    """perm(k) for each k in range(n); `key` chooses the permutation. Nothing is stored, and every k
    costs the same.

    A Feistel network is a bijection of the numbers of 2 x half bits, whatever the round function; a
    result outside of range(n) goes through the network again until it is inside (cycle walking):
    fewer than 4 passes on average."""
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask = (np.uint64(1) << half) - np.uint64(1)
    out, walking = np.array(k, np.uint64), np.ones(len(k), bool)
    while walking.any():
        left, right = out[walking] >> half, out[walking] & mask
        for round_key in np.frombuffer(hashlib.sha512(key.encode()).digest(), "<u8"):
            mixed = (right ^ round_key) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ (mixed >> (np.uint64(64) - half))
        out[walking] = left << half | right
        walking = out >= n
    return out.astype(np.int64)


# --------------------------------------------------------------------------------------------------
# Finished batches: a hash that is equal in all layouts, tensors, and a thread that reads ahead
def hash_sequences(tokens: np.ndarray, labels: np.ndarray, first_row: int) -> int:
    """A number below 2**48 for some rows (sequences, T) of a global batch. The sum over all rows,
    modulo 2**48, is the same in every layout, and differs if a token, a label or the order of the
    rows changes. first_row: number of the first row."""
    rows = enumerate(zip(tokens, labels), first_row)
    contents = (
        b"%d " % number + row.tobytes() + row_labels.tobytes() for number, (row, row_labels) in rows
    )
    return (
        sum(int.from_bytes(hashlib.sha256(content).digest()[:6], "little") for content in contents)
        % 2**48
    )


def to_tensors(arrays, local_batch_size: int, device: torch.device | str) -> list:
    """Each array (sequences, T) as a tensor (A, B, T) on the host, page-locked if the batch goes to
    a GPU."""
    tensors = [
        a if a is None else torch.from_numpy(a.reshape(-1, local_batch_size, a.shape[-1]).copy())
        for a in arrays
    ]
    return [
        t.pin_memory() if t is not None and torch.device(device).type == "cuda" else t
        for t in tensors
    ]


def prefetch(batches, device: torch.device):
    """Yields the batches on `device`. A thread keeps two ready, so that reading and hashing cost
    the training step nothing.

    An error in the thread is raised here. The thread ends with the generator (close(), garbage
    collection) or at exit."""
    gpu = (
        None
        if device.type != "cuda"
        else torch.cuda.current_device()
        if device.index is None
        else device.index
    )
    # a new thread is on GPU 0, and pinning there would cost every rank a context on it
    thread = ThreadPoolExecutor(
        1, "prefetch", *(() if gpu is None else (torch.cuda.set_device, (gpu,)))
    )
    try:
        ready = deque(thread.submit(next, batches, None) for _ in range(2))
        while (batch := ready.popleft().result()) is not None:
            ready.append(thread.submit(next, batches, None))
            tensors = {name: value for name, value in vars(batch).items() if torch.is_tensor(value)}
            yield replace(
                batch,
                **{name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()},
            )
    finally:
        # the garbage collector may close us in any thread, also in our own, and a thread must not
        # wait for itself
        thread.shutdown(
            wait=not threading.current_thread().name.startswith("prefetch"), cancel_futures=True
        )


# --------------------------------------------------------------------------------------------------
# Where the sequences come from
class TokenData:
    """Windows of seq_len + 1 tokens, one every seq_len tokens of a split's concatenated shards, in
    one global order.

    The cursor counts the sequences of the whole run: number c is window perm(c % n_samples) of
    epoch c // n_samples."""

    def __init__(
        self,
        folder: Path,
        seq_len: int,
        data_seed: int = 0,
        doc_mask: bool = False,
        name="",
        all_val=False,
    ):
        """name: of a part of a mixture; each has its own order. all_val: use the training split for
        validation, too."""
        index, tokenizer_file = read_index(folder), folder / "tokenizer.json"
        splits, tokenizer_sha256 = index["splits"], index["source"]["tokenizer"]
        tokenizer_json = tokenizer_file.read_bytes() if tokenizer_file.is_file() else b""
        if tokenizer_json and hashlib.sha256(tokenizer_json).hexdigest() != tokenizer_sha256:
            raise ValueError(
                f"{tokenizer_file} is not the tokenizer that these shards were made with; make "
                "the shards again"
            )
        self.folder, self.seq_len, self.data_seed, self.doc_mask = (
            folder,
            seq_len,
            data_seed,
            doc_mask,
        )
        self.vocab_size, self.eot = index["vocab_size"], index["eot"]
        self.tokenizer_file = str(tokenizer_file) if tokenizer_json else None
        self.token_bytes = (
            bytes_of_tokens(tokenizer_json, self.vocab_size, listed_tokens(str(folder)))
            if tokenizer_json
            else None
        )
        opened_array.cache_clear()  # the folder may have been made anew
        # once per machine: there may be millions; each rank checks what it opens
        if own_rank("LOCAL_RANK") == 0:
            check_arrays(folder, index)
        if all_val:
            splits = {"train": [], "val": [*splits["train"], *splits["val"]]}
        self.shard = lambda split, i: opened_array(folder, *array_of(splits[split][i], index))
        self.ends = {
            split: np.cumsum([entry["tokens"] for entry in splits[split]], dtype=np.int64)
            for split in splits
        }
        n_tokens, n_val_tokens = (
            sum(entry["tokens"] for entry in splits[split]) for split in ("train", "val")
        )
        self.n_samples, self.n_val_samples = (
            max(0, n_tokens - 1) // seq_len,
            -(-max(0, n_val_tokens - 1) // seq_len),
        )
        self.entries, self.name, self.validation = splits, name, self
        self.fingerprint = {
            "data_sha256": index["sha256"],
            "n_tokens": n_tokens,
            "tokenizer_sha256": tokenizer_sha256,
            "seq_len": seq_len,
            "data_seed": data_seed,
            "doc_mask": doc_mask,
        }

    def windows(self, split: str, numbers) -> np.ndarray:
        """(len(numbers), seq_len + 1) int64 tokens, -1 after the end of the split."""
        out = np.full((len(numbers), self.seq_len + 1), -1, np.int64)
        for row, number in zip(out, numbers):
            position = number * self.seq_len
            while len(row) and position < self.ends[split][-1]:  # a window may span several shards
                i = np.searchsorted(self.ends[split], position, side="right")
                part = self.shard(split, i)[position - self.ends[split][i] :][: len(row)]
                row[: len(part)] = part
                row, position = row[len(part) :], position + len(part)
        self.check_ids(out)
        return out

    def check_ids(self, ids: np.ndarray):
        if ids.max(initial=0) >= self.vocab_size:
            raise ValueError(
                f"{self.folder} is damaged: token id {ids.max()} is too large; see python data.py "
                "check"
            )

    def arrays(self, windows: np.ndarray):
        """tokens, labels, positions, doc_ids, each (sequences, seq_len) int64; doc_ids is None
        without doc_mask."""
        tokens, labels = (
            np.where(windows < 0, self.eot, windows)[:, :-1],
            np.where(windows < 0, -100, windows)[:, 1:],
        )
        is_eot = tokens == self.eot
        # a document begins after each eot
        begins = np.pad(is_eot[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        return (
            tokens,
            np.where(is_eot, -100, labels) if self.doc_mask else labels,
            *self.positions_and_ids(begins),
        )

    def positions_and_ids(self, begins: np.ndarray):
        """positions, doc_ids from the places where a document begins."""
        positions = np.broadcast_to(np.arange(self.seq_len), begins.shape)
        if not self.doc_mask:
            return positions, None
        return positions - np.maximum.accumulate(
            np.where(begins, positions, 0), axis=1
        ), begins.cumsum(axis=1) - 1

    def first_words(self) -> str:
        """The first words of the validation text, else of the training text: a prompt for a sample."""
        split, n = ("val", self.n_val_samples) if self.n_val_samples else ("train", self.n_samples)
        ids = self.windows(split, range(min(n, 1 + 256 // self.seq_len)))[:, :-1].ravel()
        decode = load_tokenizer(Path(self.tokenizer_file)).decode
        documents = [
            part[(part >= 0) & (part != self.eot)].tolist()
            for part in np.split(ids, np.flatnonzero(ids == self.eot))
        ]
        line = next(
            (line for part in documents for line in decode(part).splitlines() if line.strip()), ""
        )
        return " ".join(line.split()[:4])[:60].rstrip("\ufffd")  # 60: not all writing has spaces

    def sequences(self, numbers: np.ndarray):
        """arrays() of training sequences; numbers: cursors, counted through all epochs."""
        epochs, places = np.divmod(numbers, self.n_samples)
        for epoch in np.unique(epochs):
            here, order = (
                epochs == epoch,
                f"{self.data_seed}/{epoch}" + f"/{self.name}" * bool(self.name),
            )
            places[here] = permute(places[here], self.n_samples, order)
        return self.arrays(self.windows("train", places))

    def val_sets(self, n_sequences: int) -> list:
        """[(data, numbers of its validation windows)], at most n_sequences windows, the same for every data_seed."""
        n = min(n_sequences, self.n_val_samples)
        return [(self, permute(np.arange(n), self.n_val_samples, "validation"))] if n else []

    def learnt_ends(self) -> list[int]:
        """The ids that end a text in these data: what a model learns to end with."""
        return [self.eot]

    def epochs(self, samples: int) -> dict:
        """For metrics.jsonl: epochs of each part of a mixture in the first `samples` sequences of a
        run."""
        return {}

    def plan(self, samples: int) -> str:
        """For the start: a line per part of a mixture, with its share and epochs in so many
        sequences."""
        parts, epochs = self.fingerprint.get("parts", {}), self.epochs(samples)
        return "".join(
            f"{name}: {100 * float(Fraction(part['weight'])):.6g} % of the sequences, "
            f"{part['n_tokens']:,} tokens, "
            f"{epochs['data_epochs'][name]:.3g} epochs\n"
            for name, part in parts.items()
        )

    def has_labels(self, split: str, n_samples: int) -> bool:
        """Whether any token of a split has a loss. Stops at the first window with a loss, usually
        number 0."""
        return any(
            (self.arrays(self.windows(split, range(i, min(i + 64, n_samples))))[1] >= 0).any()
            for i in range(0, n_samples, 64)
        )

    def check(self, what: str, path: str, split: str):
        """Raises ValueError if a split has nothing to learn from. what: flag and source, for
        errors; path: source."""
        n_samples, use = (
            (self.n_val_samples, "validation") if split == "val" else (self.n_samples, "training")
        )
        if n_samples < 1:
            n_tokens = int(self.ends[split][-1]) if len(self.ends[split]) else 0
            raise ValueError(
                f"{what}: {n_tokens} {use} tokens, but one sequence needs --seq_len "
                f"{self.seq_len} + 1; "
                f"take a longer text or --seq_len {max(1, n_tokens - 1)}"
            )
        if not self.has_labels(split, n_samples):
            raise ValueError(
                f"{what}: no token of the {use} text has a loss"
                + ", for --doc_mask masks them" * self.doc_mask
            )
        if not self.has_labels("val", self.n_val_samples):
            self.n_val_samples = 0  # a loss of 0.0000 over no token would look good

    def batches(
        self,
        first_sample: int,
        global_batch_size: int,
        local_batch_size: int,
        data_rank: int,
        data_ranks: int,
        device: torch.device | str,
    ):
        """Endless iterator of Batch from cursor first_sample on. Rank r has sequences r*A*B ..
        (r+1)*A*B of a global batch."""
        share = global_batch_size // data_ranks
        first_row = data_rank * share  # of the global batch

        def make():
            for cursor in count(first_sample, global_batch_size):
                arrays = self.sequences(np.arange(cursor + first_row, cursor + first_row + share))
                digest = f"{hash_sequences(*arrays[:2], first_row):012x}"
                yield Batch(
                    *to_tensors(arrays, local_batch_size, device),
                    global_batch_size,
                    digest,
                    first=cursor + first_row,
                )

        return prefetch(make(), torch.device(device))

    def val_batches(
        self,
        n_sequences: int,
        local_batch_size: int,
        data_rank: int,
        data_ranks: int,
        device: torch.device | str,
    ):
        """Iterator of Batch (A = 1) over at most n_sequences validation windows, the same in every
        layout and for every data_seed. Every rank gets as many batches; rows left over in the last
        batches have no labels."""
        sets, rows = self.validation.val_sets(n_sequences), local_batch_size * data_ranks

        def make():
            for data, numbers in sets:
                for first in range(0, len(numbers), rows):
                    windows = np.full((local_batch_size, data.seq_len + 1), -1)
                    mine = numbers[first : first + rows][data_rank * local_batch_size :][
                        :local_batch_size
                    ]
                    windows[: len(mine)] = data.windows("val", mine)
                    arrays, bytes_of = data.arrays(windows), data.token_bytes
                    n_bytes = (
                        None if bytes_of is None else int(bytes_of[arrays[1][arrays[1] >= 0]].sum())
                    )
                    tensors = to_tensors(arrays, local_batch_size, device)
                    yield Batch(*tensors, min(rows, len(numbers) - first), "", n_bytes, data.name)

        return prefetch(make(), torch.device(device))


class MixedData(TokenData):
    """Parts that take turns (corpus/mixture.py). Each part has its own order and its own epochs, as
    without a mixture."""

    def __init__(self, parts: list[TokenData], shares: list[int], folder: str):
        first, self.parts, self.turns = parts[0], parts, take_turns(shares)
        self.folder, self.validation = folder, self
        self.vocab_size, self.eot, self.tokenizer_file = (
            first.vocab_size,
            first.eot,
            first.tokenizer_file,
        )
        self.first_words = first.first_words
        self.n_val_samples = sum(part.n_val_samples for part in parts)
        about = {
            part.name: {"weight": str(Fraction(share, sum(shares)))}
            | {key: part.fingerprint[key] for key in ("data_sha256", "n_tokens")}
            for part, share in zip(parts, shares)
        }
        self.fingerprint = {
            key: value
            for key, value in first.fingerprint.items()
            if key not in ("data_sha256", "n_tokens")
        }
        self.fingerprint["parts"] = about

    def sequences(self, numbers: np.ndarray):
        turn, numbers = self.turns.at(numbers)
        rows = [np.flatnonzero(turn == i) for i in range(len(self.parts))]
        found = [part.sequences(numbers[here]) for part, here in zip(self.parts, rows) if len(here)]
        back = np.argsort(np.concatenate(rows))
        return [
            None if arrays[0] is None else np.concatenate(arrays)[back] for arrays in zip(*found)
        ]

    def val_sets(self, n_sequences: int) -> list:
        return [
            found
            for part, n in zip(self.parts, self.turns.counts(n_sequences))
            for found in part.val_sets(int(n))
        ]

    def learnt_ends(self) -> list[int]:
        return list(dict.fromkeys(i for part in self.parts for i in part.learnt_ends()))

    def epochs(self, samples: int) -> dict:
        return {
            "data_epochs": {
                part.name: int(n) / part.n_samples
                for part, n in zip(self.parts, self.turns.counts(samples))
            }
        }


def open_data(
    cfg: DataConfig,
    seq_len: int,
    tokenizer: TextSource = NEW_TOKENIZER,
    Chats: type | None = None,
) -> TokenData:
    """The data of --data; text is tokenized first. Raises ValueError with one line for every
    mistake of a user.

    tokenizer: for text without --tokenizer; without a folder: train one on the text. Chats: class for
    conversations, sft.chat_data.ChatData;
    None: refuse conversations. Needs no process group: ranks that call together wait until one rank
    has filled the cache."""
    data = open_parts(cfg, "--data", cfg.data, seq_len, tokenizer, Chats)
    if cfg.val_data:
        data.validation = open_parts(
            cfg, "--val_data", cfg.val_data, seq_len, tokenizer.or_of(data), Chats
        )
        check_same_ids({f"--data {cfg.data}": data, f"--val_data {cfg.val_data}": data.validation})
        data.n_val_samples = data.validation.n_val_samples
    return data


def open_parts(
    cfg: DataConfig, flag: str, named: str, seq_len: int, tokenizer: TextSource, Chats: type | None
) -> TokenData:
    """Data of --data or --val_data (flag): one source, or the parts of a mixture."""
    parts, found = parse_mixture(named, flag), {}
    # shards first: their tokenizer cuts the text
    for part in sorted(parts, key=lambda part: not is_shards(part.path)):
        what, all_val = (
            f"{flag} {part.name}{'=' * (part.name != '')}{part.path}",
            flag == "--val_data",
        )
        found[part.name] = open_part(cfg, what, part, seq_len, tokenizer, all_val, Chats)
        tokenizer = tokenizer.or_of(found[part.name])
    if parts[0].name == "":
        return found[""]
    check_same_ids({f"{flag} {name}": data for name, data in found.items()})
    return MixedData([found[part.name] for part in parts], [part.share for part in parts], named)


def check_same_ids(sources: dict[str, TokenData]):
    """Raises ValueError if two sources have different tokenizers. sources: {flag and source, for
    errors: data}."""
    (first, known), *others = sources.items()
    for name, data in others:
        a, b = ((x.fingerprint["tokenizer_sha256"], x.vocab_size, x.eot) for x in (known, data))
        if a != b:
            about = [
                f"{ids} ids, end of text {eot}, sha256 {sha256[:12]}" for sha256, ids, eot in (a, b)
            ]
            raise ValueError(
                f"{first} and {name} have different tokenizers ({'; '.join(about)}); prepare both "
                "with one"
            )


def open_part(
    cfg: DataConfig,
    what: str,
    part,
    seq_len: int,
    tokenizer: TextSource,
    all_val: bool,
    Chats: type | None,
) -> TokenData:
    """Data of one source. what: flag and source, for errors."""
    no_chats = (
        ""
        if Chats
        else (
            f"{what} holds conversations, and this recipe trains on text; use finetune.py "
            "--init_from "
            f"FOLDER --data {part.path}, with the folder of a model that they are to change"
        )
    )
    try:
        if not is_shards(part.path):
            source = tokenizer._replace(folder=cfg.tokenizer or tokenizer.folder)
            folder = cached_corpus(part.path, source, cfg.cache_dir, no_chats)
        else:
            folder = Path(part.path)
            if (
                cfg.tokenizer
                and sha256_file(find_tokenizer(cfg.tokenizer)[0])
                != read_index(folder)["source"]["tokenizer"]
            ):
                raise ValueError(
                    f"--tokenizer {cfg.tokenizer} is not the one that {folder} was made with; "
                    "leave it out"
                )
        index = read_index(folder)
        if "lost" in index and own_rank() == 0:
            from corpus.spelling import warn_lost

            warn_lost(what, index["lost"])
        is_chat = index["version"] == MASKED
        if is_chat and no_chats:
            raise ValueError(no_chats)
        data = (Chats if is_chat else TokenData)(
            folder, seq_len, cfg.data_seed, cfg.doc_mask, part.name, all_val
        )
    except OSError as error:
        cache = cache_folder(cfg.cache_dir)  # a full disk names no file
        rights = f"--data must be readable, --cache_dir {cache} writable"
        raise ValueError(f"{error.filename or cache}: {error.strerror}; {rights}") from error
    data.check(what, part.path, "val" if all_val else "train")
    return data


if __name__ == "__main__":
    from corpus.commands import main

    main(__doc__)
