"""Text to token shards, and one global order of sequences: the batch of a step depends on (data,
data_seed, cursor) alone.

    python data.py stdlib                       # the built-in corpus: the sources of Python's standard library, into the cache
    python data.py tokenizer --input a.txt b.jsonl --vocab_size 8192 --out tokenizer.json      # a byte-level BPE of your own
    python data.py prepare --input a.txt b.jsonl --tokenizer tokenizer.json --out tokens       # then train with --data tokens
    python data.py prepare --from_datasets roneneldan/TinyStories --tokenizer tokenizer.json --out tokens/stories   # read once
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

import flags.interrupt  # noqa: F401  Ctrl-C ends in one line, from here on

import hashlib
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch

from corpus.cache import Part, cache_folder, cached_corpus, parse_mixture
from corpus.shards import MASKED, array_of, check_arrays, is_shards, opened_array, read_index
from corpus.special import NEW_TOKENIZER, TextSource, find_tokenizer
from corpus.tokenizer import bytes_of_tokens, load_tokenizer, tokens_beside
from flags.config import Need, flag, own_rank
from flags.files import sha256_file


def reads_text(cfg: Any) -> bool:
    """Whether --data or --val_data names something else than token shards."""
    for data in filter(None, (cfg.data, cfg.val_data)):
        for part in parse_mixture(data):
            if not is_shards(part.path):
                return True
    return False


# Text of the refusal of a flag without its precondition: see flags/config.py
TEXT = Need("with --data of token shards, which need no cache", reads_text)


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
    out = np.array(k, np.uint64)
    walking = np.ones(len(k), bool)
    while walking.any():
        left = out[walking] >> half
        right = out[walking] & mask
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
    total = 0
    for number, (row, row_labels) in enumerate(zip(tokens, labels), first_row):
        content = b"%d " % number + row.tobytes() + row_labels.tobytes()
        total += int.from_bytes(hashlib.sha256(content).digest()[:6], "little")
    return total % 2**48


def to_tensors(
    arrays: Iterable[np.ndarray | None], local_batch_size: int, device: torch.device | str
) -> list:
    """Each array (sequences, T) as a tensor (A, B, T) on the host, page-locked if the batch goes to
    a GPU."""
    tensors = []
    for array in arrays:
        if array is None:
            tensors.append(None)
            continue
        batch = array.reshape(-1, local_batch_size, array.shape[-1])  # (A, B, T)
        tensor = torch.from_numpy(batch.copy())
        if torch.device(device).type == "cuda":
            tensor = tensor.pin_memory()
        tensors.append(tensor)
    return tensors


def prefetch(batches: Iterator[Batch], device: torch.device) -> Generator[Batch, None, None]:
    """Yields the batches on `device`. A thread keeps two ready, so that reading and hashing cost
    the training step nothing.

    An error in the thread is raised here. The thread ends with the generator (close(), garbage
    collection) or at exit."""
    on_gpu = {}
    if device.type == "cuda":
        gpu = device.index
        if gpu is None:
            gpu = torch.cuda.current_device()
        # a new thread is on GPU 0, and pinning there would cost every rank a context on it
        on_gpu = {"initializer": torch.cuda.set_device, "initargs": (gpu,)}
    thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch", **on_gpu)
    try:
        ready = deque(thread.submit(next, batches, None) for _ in range(2))
        while (batch := ready.popleft().result()) is not None:
            ready.append(thread.submit(next, batches, None))
            moved = {}
            for name, value in vars(batch).items():
                if torch.is_tensor(value):
                    moved[name] = value.to(device, non_blocking=True)
            yield replace(batch, **moved)
    finally:
        # the garbage collector may close us in any thread, also in our own, and a thread must not
        # wait for itself
        is_own = threading.current_thread().name.startswith("prefetch")
        thread.shutdown(wait=not is_own, cancel_futures=True)


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
        index = read_index(folder)
        tokenizer_file = folder / "tokenizer.json"
        splits = index["splits"]
        tokenizer_sha256 = index["source"]["tokenizer"]
        tokenizer_json = b""
        if tokenizer_file.is_file():
            tokenizer_json = tokenizer_file.read_bytes()
        if tokenizer_json and hashlib.sha256(tokenizer_json).hexdigest() != tokenizer_sha256:
            raise ValueError(
                f"{tokenizer_file} is not the tokenizer that these shards were made with; make "
                "the shards again"
            )
        self.folder = folder
        self.seq_len = seq_len
        self.data_seed = data_seed
        self.doc_mask = doc_mask
        self.vocab_size = index["vocab_size"]
        self.eot = index["eot"]
        self.tokenizer_file = None
        self.token_bytes = None
        if tokenizer_json:
            self.tokenizer_file = str(tokenizer_file)
            listed = tokens_beside(str(folder))
            self.token_bytes = bytes_of_tokens(tokenizer_json, self.vocab_size, listed)
        opened_array.cache_clear()  # the folder may have been made anew
        # once per machine: there may be millions; each rank checks what it opens
        if own_rank("LOCAL_RANK") == 0:
            check_arrays(folder, index)
        if all_val:
            splits = {"train": [], "val": [*splits["train"], *splits["val"]]}
        self.shard = lambda split, i: opened_array(folder, *array_of(splits[split][i], index))
        self.ends = {}  # split -> number of tokens to the end of each shard
        for split in splits:
            sizes = [entry["tokens"] for entry in splits[split]]
            self.ends[split] = np.cumsum(sizes, dtype=np.int64)
        n_tokens = sum(entry["tokens"] for entry in splits["train"])
        n_val_tokens = sum(entry["tokens"] for entry in splits["val"])
        self.n_samples = max(0, n_tokens - 1) // seq_len
        self.n_val_samples = -(-max(0, n_val_tokens - 1) // seq_len)  # rounded up
        self.entries = splits
        self.name = name
        self.validation = self
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
                row = row[len(part) :]
                position = position + len(part)
        self.check_ids(out)
        return out

    def check_ids(self, ids: np.ndarray) -> None:
        if ids.max(initial=0) >= self.vocab_size:
            raise ValueError(
                f"{self.folder} is damaged: token id {ids.max()} is too large; see python data.py "
                "check"
            )

    def arrays(self, windows: np.ndarray):
        """tokens, labels, positions, doc_ids, each (sequences, seq_len) int64; doc_ids is None
        without doc_mask."""
        tokens = np.where(windows < 0, self.eot, windows)[:, :-1]
        labels = np.where(windows < 0, -100, windows)[:, 1:]
        is_eot = tokens == self.eot
        # a document begins after each eot
        begins = np.pad(is_eot[:, :-1], ((0, 0), (1, 0)), constant_values=True)
        if self.doc_mask:
            labels = np.where(is_eot, -100, labels)
        return tokens, labels, *self.positions_and_ids(begins)

    def positions_and_ids(self, begins: np.ndarray):
        """positions, doc_ids from the places where a document begins."""
        positions = np.broadcast_to(np.arange(self.seq_len), begins.shape)
        if not self.doc_mask:
            return positions, None
        starts = np.maximum.accumulate(np.where(begins, positions, 0), axis=1)
        return positions - starts, begins.cumsum(axis=1) - 1

    def first_words(self) -> str:
        """The first words of the validation text, else of the training text: a prompt for a sample."""
        split = "train"
        n = self.n_samples
        if self.n_val_samples:
            split = "val"
            n = self.n_val_samples
        ids = self.windows(split, range(min(n, 1 + 256 // self.seq_len)))[:, :-1].ravel()
        assert self.tokenizer_file is not None, "without a tokenizer there are no words"
        tokenizer = load_tokenizer(Path(self.tokenizer_file))
        for part in np.split(ids, np.flatnonzero(ids == self.eot)):
            document = part[(part >= 0) & (part != self.eot)].tolist()
            for line in tokenizer.decode(document).splitlines():
                if line.strip():
                    # 60: not all writing has spaces
                    return " ".join(line.split()[:4])[:60].rstrip("\ufffd")
        return ""

    def sequences(self, numbers: np.ndarray):
        """arrays() of training sequences; numbers: cursors, counted through all epochs."""
        epochs, places = np.divmod(numbers, self.n_samples)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            order = f"{self.data_seed}/{epoch}"
            if self.name:
                order += f"/{self.name}"
            places[here] = permute(places[here], self.n_samples, order)
        return self.arrays(self.windows("train", places))

    def val_sets(self, n_sequences: int) -> list:
        """[(data, numbers of its validation windows)], at most n_sequences windows, the same for every data_seed."""
        n = min(n_sequences, self.n_val_samples)
        if n:
            return [(self, permute(np.arange(n), self.n_val_samples, "validation"))]
        return []

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
        lines = ""
        epochs = self.epochs(samples)
        for name, part in self.fingerprint.get("parts", {}).items():
            lines += (
                f"{name}: {100 * float(Fraction(part['weight'])):.6g} % of the sequences, "
                f"{part['n_tokens']:,} tokens, "
                f"{epochs['data_epochs'][name]:.3g} epochs\n"
            )
        return lines

    def has_labels(self, split: str, n_samples: int) -> bool:
        """Whether any token of a split has a loss. Stops at the first window with a loss, usually
        number 0."""
        for first in range(0, n_samples, 64):
            windows = self.windows(split, range(first, min(first + 64, n_samples)))
            labels = self.arrays(windows)[1]
            if (labels >= 0).any():
                return True
        return False

    def check(self, what: str, path: str, split: str) -> None:
        """Raises ValueError if a split has nothing to learn from. what: flag and source, for
        errors; path: source."""
        n_samples = self.n_samples
        use = "training"
        if split == "val":
            n_samples = self.n_val_samples
            use = "validation"
        if n_samples < 1:
            n_tokens = 0
            if len(self.ends[split]):
                n_tokens = int(self.ends[split][-1])
            raise ValueError(
                f"{what}: {n_tokens} {use} tokens, but one sequence needs --seq_len "
                f"{self.seq_len} + 1; "
                f"take a longer text or --seq_len {max(1, n_tokens - 1)}"
            )
        if not self.has_labels(split, n_samples):
            reason = ""
            if self.doc_mask:
                reason = ", for --doc_mask masks them"
            raise ValueError(f"{what}: no token of the {use} text has a loss{reason}")
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
                tokens, labels, positions, doc_ids = to_tensors(arrays, local_batch_size, device)
                yield Batch(
                    tokens,
                    labels,
                    positions,
                    doc_ids,
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
        sets = self.validation.val_sets(n_sequences)
        rows = local_batch_size * data_ranks

        def make():
            for data, numbers in sets:
                for first in range(0, len(numbers), rows):
                    windows = np.full((local_batch_size, data.seq_len + 1), -1)
                    batch = numbers[first : first + rows]
                    own_numbers = batch[data_rank * local_batch_size :][:local_batch_size]
                    windows[: len(own_numbers)] = data.windows("val", own_numbers)
                    arrays = data.arrays(windows)
                    ids = arrays[1]
                    n_bytes = None
                    if data.token_bytes is not None:
                        n_bytes = int(data.token_bytes[ids[ids >= 0]].sum())
                    tokens, labels, positions, doc_ids = to_tensors(
                        arrays, local_batch_size, device
                    )
                    yield Batch(
                        tokens,
                        labels,
                        positions,
                        doc_ids,
                        min(rows, len(numbers) - first),
                        "",
                        n_bytes,
                        data.name,
                    )

        return prefetch(make(), torch.device(device))


class MixedData(TokenData):
    """Parts that take turns (corpus/mixture.py). Each part has its own order and its own epochs, as
    without a mixture."""

    def __init__(self, parts: list[TokenData], shares: list[int], folder: str):
        from corpus.mixture import take_turns  # only mixtures need the file

        first = parts[0]
        self.parts = parts
        self.turns = take_turns(shares)
        self.folder = folder
        self.validation = self
        self.vocab_size = first.vocab_size
        self.eot = first.eot
        self.tokenizer_file = first.tokenizer_file
        self.first_words = first.first_words
        self.n_val_samples = sum(part.n_val_samples for part in parts)
        about = {}
        for part, share in zip(parts, shares):
            about[part.name] = {
                "weight": str(Fraction(share, sum(shares))),
                "data_sha256": part.fingerprint["data_sha256"],
                "n_tokens": part.fingerprint["n_tokens"],
            }
        self.fingerprint = dict(first.fingerprint)
        del self.fingerprint["data_sha256"]
        del self.fingerprint["n_tokens"]
        self.fingerprint["parts"] = about

    def sequences(self, numbers: np.ndarray):
        turn, numbers = self.turns.at(numbers)
        rows = []  # of each part: the places of its sequences
        found = []
        for i, part in enumerate(self.parts):
            here = np.flatnonzero(turn == i)
            rows.append(here)
            if len(here):
                found.append(part.sequences(numbers[here]))
        back = np.argsort(np.concatenate(rows))
        mixed = []
        for arrays in zip(*found):
            if arrays[0] is None:
                mixed.append(None)
            else:
                mixed.append(np.concatenate(arrays)[back])
        return mixed

    def val_sets(self, n_sequences: int) -> list:
        sets = []
        for part, n in zip(self.parts, self.turns.counts(n_sequences)):
            sets += part.val_sets(int(n))
        return sets

    def learnt_ends(self) -> list[int]:
        ends = []
        for part in self.parts:
            ends += part.learnt_ends()
        return list(dict.fromkeys(ends))

    def epochs(self, samples: int) -> dict:
        epochs = {}
        for part, n in zip(self.parts, self.turns.counts(samples)):
            epochs[part.name] = int(n) / part.n_samples
        return {"data_epochs": epochs}


def open_data(
    cfg: DataConfig,
    seq_len: int,
    tokenizer: TextSource = NEW_TOKENIZER,
    Chats: type | None = None,
    vocab_size: int | None = None,
) -> TokenData:
    """The data of --data; text is tokenized first. Raises ValueError with one line for every
    mistake of a user.

    tokenizer: for text without --tokenizer; without a folder: train one on the text. Chats: class for
    conversations, sft.chat_data.ChatData;
    None: refuse conversations. vocab_size: of the model, so that a tokenizer with more ids is refused
    before any text is read. Needs no process group: ranks that call together wait until one rank
    has filled the cache."""
    named = cfg.tokenizer or tokenizer.folder
    if vocab_size is not None and named and reads_text(cfg):
        check_vocabulary(find_tokenizer(named)[2], vocab_size)
    data = open_parts(cfg, "--data", cfg.data, seq_len, tokenizer, Chats)
    if cfg.val_data:
        data.validation = open_parts(
            cfg, "--val_data", cfg.val_data, seq_len, tokenizer.or_of(data), Chats
        )
        from corpus.mixture import check_same_ids

        check_same_ids({f"--data {cfg.data}": data, f"--val_data {cfg.val_data}": data.validation})
        data.n_val_samples = data.validation.n_val_samples
    return data


def open_parts(
    cfg: DataConfig, flag: str, named: str, seq_len: int, tokenizer: TextSource, Chats: type | None
) -> TokenData:
    """Data of --data or --val_data (flag): one source, or the parts of a mixture."""
    parts = parse_mixture(named, flag)
    found = {}
    # shards first: their tokenizer cuts the text
    for part in sorted(parts, key=lambda part: not is_shards(part.path)):
        what = f"{flag} {part.path}"
        if part.name:
            what = f"{flag} {part.name}={part.path}"
        all_val = flag == "--val_data"
        found[part.name] = open_part(cfg, what, part, seq_len, tokenizer, all_val, Chats)
        tokenizer = tokenizer.or_of(found[part.name])
    if parts[0].name == "":
        return found[""]
    from corpus.mixture import check_same_ids

    check_same_ids({f"{flag} {name}": data for name, data in found.items()})
    return MixedData([found[part.name] for part in parts], [part.share for part in parts], named)


def open_part(
    cfg: DataConfig,
    what: str,
    part: Part,
    seq_len: int,
    tokenizer: TextSource,
    all_val: bool,
    Chats: type | None,
) -> TokenData:
    """Data of one source. what: flag and source, for errors."""
    no_chats = ""
    if Chats is None:
        no_chats = (
            f"{what} holds conversations, and this recipe trains on text; use finetune.py "
            "--init_from "
            f"FOLDER --data {part.path}, with the folder of a model that they are to change"
        )
    try:
        if not is_shards(part.path):
            source = tokenizer._replace(folder=cfg.tokenizer or tokenizer.folder)
            folder = cached_corpus(part.path, source, cfg.cache_dir, no_chats)
        else:
            folder = Path(part.path)
            if cfg.tokenizer:
                check_tokenizer_of(folder, cfg.tokenizer)
        index = read_index(folder)
        if "lost" in index and own_rank() == 0:
            from corpus.spelling import warn_lost

            warn_lost(what, index["lost"])
        is_chat = index["version"] == MASKED
        Data = TokenData
        if is_chat:
            if Chats is None:
                raise ValueError(no_chats)
            Data = Chats
        data = Data(folder, seq_len, cfg.data_seed, cfg.doc_mask, part.name, all_val)
    except OSError as error:
        cache = cache_folder(cfg.cache_dir)  # a full disk names no file
        rights = f"--data must be readable, --cache_dir {cache} writable"
        raise ValueError(f"{error.filename or cache}: {error.strerror}; {rights}") from error
    split = "train"
    if all_val:
        split = "val"
    data.check(what, part.path, split)
    return data


def check_vocabulary(ids: int, vocab_size: int) -> None:
    """Raises ValueError for a tokenizer with more ids than the model."""
    if ids > vocab_size:
        raise ValueError(
            f"the tokenizer has {ids} ids, the model {vocab_size}; use --model_args "
            f"vocab_size={ids}"
        )


def check_tokenizer_of(folder: Path, tokenizer: str) -> None:
    """Raises ValueError if a folder of token shards was made with another tokenizer."""
    if sha256_file(find_tokenizer(tokenizer)[0]) != read_index(folder)["source"]["tokenizer"]:
        raise ValueError(
            f"--tokenizer {tokenizer} is not the one that {folder} was made with; leave it out"
        )


if __name__ == "__main__":
    from corpus.commands import main

    main(__doc__)
