"""Text to token shards, and one global order of sequences: the batch of a step depends on (data, data_seed, cursor) alone.

    python data.py stdlib                       # the built-in corpus: the sources of Python's standard library, into the cache
    python data.py tokenizer --input a.txt b.jsonl --vocab_size 8192 --out tokenizer.json      # a byte-level BPE of your own
    python data.py prepare --input a.txt b.jsonl --tokenizer tokenizer.json --out tokens       # then train with --data tokens
    python data.py check tokens                 # is every byte as it was written? exit status 0 or 1

A folder of token shards holds train-00000.bin, val-00000.bin, ..., tokenizer.json and, written last, index.json. A shard
is a header (HEADER below) and little-endian token ids, uint16 where the vocabulary allows it, else uint32. Each document
ends with the end-of-text token (eot), which is how document boundaries are kept.
"""
import contextlib
import fcntl
import hashlib
import json
import mmap
import multiprocessing
import os
import re
import struct
import sys
import sysconfig
import threading
import time
from collections import deque
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from support.config import Need, Parser, flag, usage_error
from support.files import sha256_file, write_file

MAGIC, VERSION = b"NTTOKENS", 1
# magic, version, bytes per token, vocab size, eot, tokens, documents, sha256 of what it was made from, sha256 of its tokens
HEADER = struct.Struct("<8sIIQQQQ32s32s")
EOT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
VAL_PART = 20  # one document in 20 is for validation, or the last 20th of a file with few documents
MANY_DOCUMENTS = 100
OPEN_SHARDS = 32  # files that stay mapped; another one is mapped in microseconds
BPE_VOCAB, BPE_BYTES = 4096, 10_000_000  # the tokenizer that we train ourselves: its ids, and text for so many
# What a Hugging Face folder has beside tokenizer.json: special tokens, chat template, and which ids end an answer
BESIDE = ("tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json", "generation_config.json")
STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__",
                  "encodings", "pydoc_data", "entities.py"}  # the last three are 2 MB of tables, not text to learn from
TEXT = Need("with --data of token shards, which need no cache", lambda c: not os.path.isdir(c.data))  # see config.py


@dataclass(kw_only=True)
class DataConfig:
    data: str = "stdlib"  # stdlib (Python's own sources), a .txt or .jsonl file, or a folder from python data.py prepare
    tokenizer: str = ""  # tokenizer.json or Hugging Face folder; empty: --init_from's, or a BPE of 4096 ids, made of the text
    doc_mask: bool = False  # documents do not see each other: attention, positions and labels stop where a document ends
    data_seed: int = 0  # another seed is another order of the same sequences
    cache_dir: str = flag("", TEXT)  # folder for tokenized text; empty: nanotitan in the user's cache folder


# ---------------------------------------------------------------------------------------------------------------------
# Text -> documents
class Piece(NamedTuple):
    """Bytes start..end of a text file, from line to line: the work for one shard per split."""

    path: Path
    start: int
    end: int
    split: str  # "train", "val", or "hash": each document goes where its hash says
    closed: bool  # a document ends here; else (a long .txt) the next piece goes on with it


UNPACK = {".gz": "gunzip -k", ".zst": "unzstd", ".xz": "unxz -k", ".bz2": "bunzip2 -k", ".zip": "unzip"}
PARQUET = """python -c "import pandas; pandas.read_parquet('{0}')[['text']].to_json('{1}', orient='records', lines=True)\""""


def check_text(path: Path):
    """Raises ValueError with what to do about a file that is not text to train on."""
    if path.is_file() and path.suffix in UNPACK:
        raise ValueError(f"{path} is compressed; unpack it first: {UNPACK[path.suffix]} {path}")
    if path.is_file() and path.suffix == ".parquet":
        convert = PARQUET.format(path, path.with_suffix(".jsonl"))
        raise ValueError(f"{path}: write its column of text to a .jsonl first: {convert}")
    if path.suffix not in (".txt", ".jsonl") or not path.is_file():
        raise ValueError(f'{path}: need a .txt file, or a .jsonl file with a JSON object {{"text": ...}} per line')
    if not path.stat().st_size:
        raise ValueError(f"{path} is empty; give a file with text in it")


def cut_into_pieces(paths: list, eot_text: str) -> list:
    """Many documents (lines of a .jsonl) are split by hash, so that validation is like training; else the tail validates."""
    pieces, eot = [], re.escape(eot_text.encode())
    for path in paths:
        check_text(path)
        size = path.stat().st_size
        chunk = min(max(size // 64, 1 << 20), 32 << 20)  # enough pieces for all processes, few enough files
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            is_jsonl = path.suffix == ".jsonl"
            between = re.compile(b"\n" if is_jsonl else b"\n(?!%s)|%s" % (eot, eot))  # an eot ends what is before it
            by_hash = is_jsonl and sum(1 for _ in islice(re.finditer(b"\n", text), MANY_DOCUMENTS)) == MANY_DOCUMENTS
            border = size if by_hash else tail_border(text, is_jsonl)
            for split, start, end in ("hash" if by_hash else "train", 0, border), ("val", border, size):
                while start < end:
                    stop = found.end() if (found := between.search(text, start + chunk, end)) else end
                    pieces.append(Piece(path, start, stop, split, is_jsonl or stop == end))
                    start = stop
    return pieces


def tail_border(text: mmap.mmap, is_jsonl: bool) -> int:
    """Where the last 20th of a text begins: at a line, or, where a .txt has no lines thereabouts, at a character."""
    border = len(text) - len(text) // VAL_PART
    line = text.rfind(b"\n", 0 if is_jsonl else border - border // VAL_PART, border) + 1
    if line or is_jsonl:
        return line or len(text)  # a single JSON object: nothing to validate on
    while border < len(text) and text[border] & 0xC0 == 0x80:  # 10xxxxxx: inside a UTF-8 character
        border += 1
    return border


def read_documents(piece: Piece, eot_text: str):
    """Yields (split, text, closed). In a .txt file the eot token, spelled out, separates documents."""
    with open(piece.path, "rb") as file:
        file.seek(piece.start)
        raw = file.read(piece.end - piece.start)
    try:
        text = raw.decode().removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise ValueError(f"{piece.path}: byte {piece.start + error.start} is not UTF-8; convert the file, for example: "
                         "iconv -f latin1 -t utf-8") from None
    if piece.path.suffix == ".txt":
        *whole, last = text.split(eot_text)
        yield from ((piece.split, document, True) for document in whole if document)
        if last:
            yield piece.split, last, piece.closed
        return
    for number, line in enumerate(text.split("\n")):
        try:
            record = json.loads(line) if line.strip() else {"text": ""}
            document, key = record["text"], record.get("split_key", record["text"])  # our stdlib.jsonl is split by path
            is_val = hashlib.sha256(key.encode()).digest()[0] * VAL_PART < 256  # 13 of 256: one in 20
            document.encode()  # a string, and valid Unicode: "\ud800" is JSON, but no text
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            with open(piece.path, "rb") as file:
                number += 1 + file.read(piece.start).count(b"\n")
            raise ValueError(f'{piece.path} line {number}: need a JSON object with a string "text" ({error!r})') from None
        if document:
            yield ("val" if is_val else "train") if piece.split == "hash" else piece.split, document, True


def cut_at_lines(text: str, size: int = 1 << 16):
    """A long document in segments, to be tokenized side by side and in little memory; cut behind a newline if possible."""
    start = 0
    while start < len(text):
        stop = len(text) if start + size >= len(text) else text.rfind("\n", start, start + size) + 1 or start + size
        yield text[start:stop]
        start = stop


# ---------------------------------------------------------------------------------------------------------------------
# Tokenizers
@lru_cache(maxsize=1)
def load_tokenizer(file: Path):
    from tokenizers import Tokenizer  # here, because a run on finished shards needs no tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # `tokenizers` raises nothing more special
        raise ValueError(f"--tokenizer {file}: not a tokenizer.json ({error})") from None
    tokenizer.no_truncation()  # some tokenizer.json cut every text at 512 tokens
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a document is text, not its end
    return tokenizer


def files_beside(tokenizer_file) -> dict:
    """{name: content} of the files that go wherever this tokenizer.json goes. ValueError for links elsewhere, absurd sizes."""
    from support.files import HF_LIMIT, HF_LIMITS, hf_file

    folder = os.path.dirname(os.path.abspath(tokenizer_file))
    there = [name for name in BESIDE if os.path.lexists(os.path.join(folder, name))]
    return {name: Path(hf_file(folder, name, HF_LIMITS.get(name, HF_LIMIT))).read_bytes() for name in there}


def tokenizer_path(path: str) -> Path:
    """The tokenizer.json that this path is, or that the folder holds. ValueError for links elsewhere and absurd sizes."""
    from support.files import HF_LIMITS, hf_file, hub_hint

    file, limit = Path(path, "tokenizer.json") if os.path.isdir(path) else Path(path), HF_LIMITS["tokenizer.json"]
    if not file.is_file():
        raise ValueError(f"--tokenizer {path}: need a tokenizer.json, or a folder that holds one{hub_hint(path)}")
    if os.path.isdir(path):
        hf_file(path, "tokenizer.json", limit)
    elif file.stat().st_size > limit:
        raise ValueError(f"--tokenizer {path} has {file.stat().st_size:,} bytes, which is absurd: {limit:,} are the most")
    return file


def find_tokenizer(path: str, eot: str = ""):
    """(tokenizer.json, eot id, vocab size) for a tokenizer.json or a folder that holds one."""
    file = tokenizer_path(path)
    tokenizer, names, config = load_tokenizer(file), [eot] if eot else list(EOT_NAMES), file.with_name("tokenizer_config.json")
    if (rules := files_beside(file).get(config.name)) and not eot:
        try:
            eos = json.loads(rules).get("eos_token") or ""
            names.append(eos["content"] if isinstance(eos, dict) else eos)
        except (ValueError, KeyError, AttributeError, RecursionError) as error:
            raise ValueError(f"{config} is damaged ({error!r})") from None
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}  # a BPE may know "</s>" as HTML
    eot_id = next((tokenizer.token_to_id(name) for name in names if name in special or name == eot), None)
    if eot_id is None:
        raise ValueError(f"--tokenizer {path}: no token ends a document ({', '.join(names)} are not in it); name the one that "
                         "does: python data.py prepare ... --eot TOKEN")
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if vocab_size > 1 << 24:  # a broken file: the model would get a row for every id
        raise ValueError(f"--tokenizer {path}: its ids go up to {vocab_size - 1}; need ids below {1 << 24}")
    return file, eot_id, vocab_size


def train_tokenizer(paths: list, file: Path, vocab_size: int = BPE_VOCAB):
    """Byte-level BPE, trained on the beginning of each text; of fewer ids where short texts have no more pairs that occur
    twice. Returns how many."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    texts, enough = [], BPE_BYTES * vocab_size // BPE_VOCAB // len(paths)
    for path in paths:
        size, pieces = 0, cut_into_pieces([path], EOT_NAMES[0])
        for split, text, _ in (document for piece in pieces for document in read_documents(piece, EOT_NAMES[0])):
            if split == "train":
                texts.extend(cut_at_lines(text))
                size += len(text)
            if size >= enough:
                break
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()  # all 256 bytes, so that no text is unknown
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[EOT_NAMES[0]], initial_alphabet=alphabet, min_frequency=2, show_progress=False))
    write_file(file, tokenizer.to_str().encode())
    return tokenizer.get_vocab_size()


def bytes_of_tokens(tokenizer_json: bytes, vocab_size: int):
    """(vocab,) int64: bytes of text that each token stands for, 0 for special ones. None if the tokenizer is not byte-level."""
    rules = json.loads(tokenizer_json)
    if rules["model"].get("type") != "BPE" or '"ByteLevel"' not in json.dumps(rules.get("decoder")):
        return None
    count = np.zeros(vocab_size, np.int64)
    for token, i in rules["model"]["vocab"].items():
        count[i] = len(token)  # a byte-level BPE writes every byte as one character
    for token in rules.get("added_tokens") or []:
        count[token["id"]] = 0 if token["special"] else len(token["content"].encode())
    return count


def intact_shard(path: Path, made_from: bytes):
    """The index entry of a shard that was made from this and has the right checksum, else None."""
    if not path.is_file() or path.stat().st_size < HEADER.size:
        return None
    raw = path.read_bytes()
    magic, version, _, _, _, n_tokens, documents, key, checksum = HEADER.unpack_from(raw)
    if (magic, version, key, checksum) != (MAGIC, VERSION, made_from, hashlib.sha256(raw[HEADER.size:]).digest()):
        return None
    return {"name": path.name, "sha256": hashlib.sha256(raw).hexdigest(), "bytes": len(raw), "tokens": n_tokens,
            "documents": documents}


def tokenize_piece(piece: Piece, number: int, folder: Path, tokenizer_file: Path, eot: int, vocab_size: int) -> dict:
    """Writes the shards of a piece, unless they are there and intact. Returns {split: index entry}."""
    tokenizer, dtype = load_tokenizer(tokenizer_file), np.dtype("<u2" if vocab_size <= 65536 else "<u4")
    with open(piece.path, "rb") as file:
        file.seek(piece.start)
        made_from = hashlib.sha256(file.read(piece.end - piece.start) + tokenizer_file.read_bytes())
    made_from.update(repr((VERSION, eot, vocab_size, piece.split, piece.closed, piece.path.suffix)).encode())
    splits = ("train", "val") if piece.split == "hash" else (piece.split,)
    paths = {split: folder / f"{split}-{number:05d}.bin" for split in splits}
    entries = {split: intact_shard(path, made_from.digest()) for split, path in paths.items()}
    if all(entries.values()):
        return entries

    segments, tokens, documents = [], {split: [np.empty(0, dtype)] for split in splits}, dict.fromkeys(splits, 0)
    for split, text, closed in read_documents(piece, tokenizer.id_to_token(eot)):
        *parts, last = cut_at_lines(text)
        segments += [(split, part, False) for part in parts] + [(split, last, closed)]
    for first in range(0, len(segments), 64):  # 4 MB of text at once, because they become 200 MB of Encoding objects
        group = segments[first:first + 64]
        encodings = tokenizer.encode_batch_fast([text for _, text, _ in group], add_special_tokens=False)
        for (split, _, closed), encoding in zip(group, encodings):
            tokens[split].append(np.array(encoding.ids + [eot] * closed, dtype))
            documents[split] += closed
    for split, path in paths.items():
        payload = np.concatenate(tokens[split]).tobytes()
        write_file(path, HEADER.pack(MAGIC, VERSION, dtype.itemsize, vocab_size, eot, len(payload) // dtype.itemsize,
                                     documents[split], made_from.digest(), hashlib.sha256(payload).digest()), payload)
    return {split: intact_shard(path, made_from.digest()) for split, path in paths.items()}


def build_shards(paths: list, tokenizer: tuple, folder: Path, workers: int = 1):
    """Tokenizes text files into a folder of token shards. Started again after an interruption it keeps what is finished.

    tokenizer: from find_tokenizer(). workers: processes; 1 = here, with the threads of the `tokenizers` library."""
    tokenizer_file, eot, vocab_size = tokenizer
    pieces = cut_into_pieces(paths, load_tokenizer(tokenizer_file).id_to_token(eot))
    source = {"inputs": [[path.name, path.stat().st_size] for path in paths], "tokenizer": sha256_file(tokenizer_file)}
    if (folder / "index.json").exists() and ((old := read_index(folder))["source"], old["eot"]) != (source, eot):
        raise ValueError(f"{folder} holds shards that were made from other files or with another tokenizer; name a new --out")
    folder.mkdir(parents=True, exist_ok=True)
    files = {"tokenizer.json": tokenizer_file.read_bytes()} | files_beside(tokenizer_file)
    for name, content in files.items():
        write_file(folder / name, content)
    job = partial(tokenize_piece, folder=folder, tokenizer_file=tokenizer_file, eot=eot, vocab_size=vocab_size)
    splits, workers = {"train": [], "val": []}, min(workers, len(pieces))
    with contextlib.ExitStack() as stack:
        do = map
        if workers > 1:
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread in each process
            do = stack.enter_context(ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))).map
        for done, entries in enumerate(do(job, pieces, range(len(pieces))), 1):
            for split, entry in entries.items():
                splits[split].append(entry)
            if sys.stderr.isatty() and os.environ.get("RANK", "0") == "0":
                bar, end = "#" * (30 * done // len(pieces)), "\n" * (done == len(pieces))
                print(f"\rtokenizing [{bar:30}] {done}/{len(pieces)}", end=end, file=sys.stderr, flush=True)
    beside = {name: hashlib.sha256(content).hexdigest() for name, content in files.items() if name in BESIDE}
    index = {"version": VERSION, "vocab_size": vocab_size, "eot": eot, "source": source, "beside": beside,
             "documents": count_documents(splits), "splits": splits}
    write_file(folder / "index.json", json.dumps({"sha256": data_hash(index), **index}, indent=1).encode())
    listed = {entry["name"] for entry in chain(*splits.values())}
    for path in folder.iterdir():  # what is left of an interrupted run
        if re.fullmatch(r"(train|val)-\d+\.bin(\.tmp-\d+)?", path.name) and path.name not in listed:
            path.unlink()


def count_documents(splits: dict) -> dict:
    return {split: sum(entry["documents"] for entry in entries) for split, entries in splits.items()}


def data_hash(index: dict) -> str:
    """What identifies the data: the checksums of all shards in their order, and what their numbers mean."""
    shards = [[entry["sha256"] for entry in index["splits"][split]] for split in ("train", "val")]
    return hashlib.sha256(repr((shards, index["vocab_size"], index["eot"], index["source"]["tokenizer"])).encode()).hexdigest()


def read_index(folder: Path) -> dict:
    try:
        index = json.loads((folder / "index.json").read_text("utf-8"))
        if index["version"] != VERSION:
            raise ValueError(f"format version {index['version']}, need {VERSION}")
        for entry in chain(*index["splits"].values()):
            if not re.fullmatch(r"(train|val)-\d+\.bin", entry["name"]):
                raise ValueError(f"{entry['name']!r} is not the name of a shard")
            if min(entry["tokens"], entry["documents"], index["eot"], index["vocab_size"] - index["eot"] - 1) < 0:
                raise ValueError("impossible numbers")
        if not index.get("beside", {}).keys() <= set(BESIDE):
            raise ValueError(f"{index['beside']} names other files than {BESIDE}")
        if index["sha256"] != data_hash(index) or index["documents"] != count_documents(index["splits"]):
            raise ValueError("its checksums and counts do not fit together")
        return index
    except FileNotFoundError:
        raise ValueError(f"{folder}: no index.json, so it is not a folder of finished token shards; make one: "
                         "python data.py prepare --input TEXT --tokenizer tokenizer.json --out DIR") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder}/index.json is damaged ({error!r}); delete it and make the shards again") from None


def check_shard(folder: Path, entry: dict, index: dict):
    """Raises ValueError if a shard's header, its size and the index do not say the same. Leaves no file open."""
    path, cure = folder / entry["name"], f"delete it and {folder}/index.json and make the shards again"
    if not path.is_file():
        raise ValueError(f"{path} is missing; {cure}")
    with open(path, "rb") as file:
        raw = file.read(HEADER.size)
    magic, version, itemsize, *numbers, _, _ = HEADER.unpack(raw.ljust(HEADER.size, b"\0"))
    wanted = [index["vocab_size"], index["eot"], entry["tokens"], entry["documents"]]
    if (magic, version, numbers) != (MAGIC, VERSION, wanted) or itemsize != (2 if index["vocab_size"] <= 65536 else 4):
        raise ValueError(f"{path}: its header is damaged or belongs to other data; {cure}")
    size, needed = path.stat().st_size, HEADER.size + itemsize * entry["tokens"]
    if not size == needed == entry["bytes"]:
        raise ValueError(f"{path} is {'truncated' if size < needed else 'too long'}: {size} bytes, need {needed}; {cure}")


def map_shard(path: Path, vocab_size: int) -> np.ndarray:
    """The tokens of a shard that is not empty, memory-mapped."""
    return np.memmap(path, "<u2" if vocab_size <= 65536 else "<u4", "r", HEADER.size)


def find_damage(folder: Path) -> list:
    """One line for each thing that is not as it was written."""
    try:
        index, problems = read_index(folder), []
    except ValueError as error:
        return [str(error)]
    for name, sha256 in {"tokenizer.json": index["source"]["tokenizer"], **index.get("beside", {})}.items():
        if not (folder / name).is_file() or sha256_file(folder / name) != sha256:
            problems.append(f"{folder / name} is missing or changed")
    for entry in chain(*index["splits"].values()):
        try:
            check_shard(folder, entry, index)
        except ValueError as error:
            problems.append(str(error))
            continue
        path = folder / entry["name"]
        tokens = map_shard(path, index["vocab_size"]) if entry["tokens"] else np.empty(0, np.uint16)
        documents = int((tokens == index["eot"]).sum())
        if sha256_file(path) != entry["sha256"]:
            problems.append(f"{path}: wrong checksum, a byte has changed")
        if tokens.max(initial=0) >= index["vocab_size"]:
            problems.append(f"{path}: token id {tokens.max()}, but the vocabulary ends at {index['vocab_size'] - 1}")
        if documents != entry["documents"]:
            problems.append(f"{path}: {documents} documents, but index.json says {entry['documents']}")
    return problems


# ---------------------------------------------------------------------------------------------------------------------
# The cache: the built-in corpus, and text files that are tokenized when they are first used
def stdlib_files() -> list:
    """The sources of the running Python's standard library, without tests and tables."""
    root, found = Path(sysconfig.get_paths()["stdlib"]), []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - STDLIB_SKIPPED)
        found += [Path(folder, name) for name in sorted(set(names) - STDLIB_SKIPPED)
                  if name.endswith(".py") and not name.startswith("_sysconfigdata") and Path(folder, name).is_file()]
    if (size := sum(path.stat().st_size for path in found)) < 2_000_000:
        raise ValueError(f"--data stdlib: this Python comes without its sources ({size / 1e6:.1f} MB in {root}); train on your "
                         "own text with --data FILE.txt")
    return found


def collect_stdlib(paths: list, target: Path):
    """All sources as one .jsonl, each text once. Split by path: the same files validate in every version of Python."""
    root, texts = sysconfig.get_paths()["stdlib"], {}
    for path in paths:
        with contextlib.suppress(UnicodeDecodeError):
            texts.setdefault(path.read_bytes().decode(), path.relative_to(root).as_posix())
    lines = [json.dumps({"split_key": name, "text": text}) + "\n" for text, name in texts.items()]
    write_file(target, "".join(lines).encode())


def cache_folder(cache_dir: str) -> Path:
    home = os.path.expanduser("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    return Path(cache_dir or os.path.join(os.environ.get("XDG_CACHE_HOME") or home, "nanotitan")).absolute()


def cached_corpus(data: str, tokenizer: str, cache_dir: str) -> Path:
    """The folder of token shards for a text, made if it is not in the cache yet; named after the hash of text and tokenizer.

    A link named after size and time of the text leads to it, so that a start does not read all the text again. The tokenizer's
    files are small: their contents count, for every checkpoint has a copy of them under another path."""
    cache, paths = cache_folder(cache_dir), stdlib_files() if data == "stdlib" else [Path(data)]
    rules = None
    if tokenizer:
        file = tokenizer_path(tokenizer)
        rules = sha256_file(file), sorted(files_beside(file).items())
    if data != "stdlib":
        check_text(paths[0])
    stats = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    link = cache / hashlib.sha256(repr((VERSION, BPE_VOCAB, data == "stdlib", rules, stats)).encode()).hexdigest()[:16]
    if (link / "index.json").is_file():
        return link.resolve()
    cache.mkdir(parents=True, exist_ok=True)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(1)  # all ranks come here together: rank 0 goes first, because it is the one that shows progress
    with open(cache / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the others wait here, and find the corpus finished
        if (link / "index.json").is_file():
            return link.resolve()
        if data == "stdlib":
            collect_stdlib(paths, cache / "stdlib.jsonl")
            paths = [cache / "stdlib.jsonl"]
        found = find_tokenizer(tokenizer) if tokenizer else None
        key = (VERSION, sha256_file(paths[0]), (sha256_file(found[0]), *found[1:]) if found else BPE_VOCAB)
        if found and (beside := files_beside(found[0])):  # a base model and its chat model may share a tokenizer.json
            key += (hashlib.sha256(repr(beside).encode()).hexdigest(),)
        folder = cache / f"{paths[0].stem}-{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}"
        if not (folder / "index.json").is_file():
            if os.environ.get("RANK", "0") == "0":
                print(f"{data}: {paths[0].stat().st_size / 1e6:.1f} MB of text, tokenized once into {folder}", flush=True)
            folder.mkdir(exist_ok=True)
            if not found:
                train_tokenizer(paths, folder / "tokenizer.json")
                found = find_tokenizer(str(folder))
            build_shards(paths, found, folder)
        link.unlink(missing_ok=True)  # it may lead to a folder that somebody deleted
        link.symlink_to(folder.name)
    return folder


# ---------------------------------------------------------------------------------------------------------------------
# The global order of sequences
@dataclass
class Batch:
    """What a data rank trains on in one step. A gradient accumulation steps, B local_batch_size, T seq_len."""

    tokens: torch.Tensor  # (A, B, T) int64
    labels: torch.Tensor  # (A, B, T) int64, the next token; -100 = no loss here
    positions: torch.Tensor  # (A, B, T) int64
    doc_ids: torch.Tensor | None  # (A, B, T) int64, counts the documents of a sequence; None without doc_mask
    samples: int  # sequences in the global batch
    hash: str  # training: of this data rank's tokens and labels; checks.reduce_hash makes that of the global batch of it
    n_bytes: int | None = None  # validation: bytes of text behind this rank's labels; None where the tokenizer does not tell


def permute(k: np.ndarray, n: int, key: str) -> np.ndarray:
    """perm(k) for each k in range(n), where `key` chooses the permutation. Nothing is stored, and every k costs the same.

    A Feistel network is a bijection of the numbers of 2 x half bits, whatever its round function; a result outside of
    range(n) goes through it again until it is inside (cycle walking), which takes fewer than 4 passes on average."""
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


class TokenData:
    """Windows of seq_len + 1 tokens, one every seq_len tokens of a split's concatenated shards, in one global order.

    The cursor counts the sequences of the whole run: number c is window perm(c % n_samples) of epoch c // n_samples."""

    def __init__(self, folder: Path, seq_len: int, data_seed: int = 0, doc_mask: bool = False):
        index, tokenizer_file = read_index(folder), folder / "tokenizer.json"
        splits, tokenizer_sha256 = index["splits"].items(), index["source"]["tokenizer"]
        tokenizer_json = tokenizer_file.read_bytes() if tokenizer_file.is_file() else b""
        if tokenizer_json and hashlib.sha256(tokenizer_json).hexdigest() != tokenizer_sha256:
            raise ValueError(f"{tokenizer_file} is not the tokenizer that these shards were made with; make the shards again")
        self.folder, self.seq_len, self.data_seed, self.doc_mask = folder, seq_len, data_seed, doc_mask
        self.vocab_size, self.eot = index["vocab_size"], index["eot"]
        self.tokenizer_file = str(tokenizer_file) if tokenizer_json else None
        self.token_bytes = bytes_of_tokens(tokenizer_json, self.vocab_size) if tokenizer_json else None
        for entry in chain(*index["splits"].values()):
            check_shard(folder, entry, index)
        # a map holds a file open, and a process may open 1,024: mapped when they are read, and only the last ones stay so
        self.map_shard = lru_cache(OPEN_SHARDS)(partial(map_shard, vocab_size=self.vocab_size))
        self.shards = {split: [folder / entry["name"] for entry in entries] for split, entries in splits}
        self.ends = {split: np.cumsum([entry["tokens"] for entry in entries]) for split, entries in splits}
        n_tokens, n_val_tokens = (sum(entry["tokens"] for entry in index["splits"][split]) for split in ("train", "val"))
        self.n_samples, self.n_val_samples = (n_tokens - 1) // seq_len, -(-max(0, n_val_tokens - 1) // seq_len)
        self.fingerprint = {"data_sha256": index["sha256"], "n_tokens": n_tokens, "tokenizer_sha256": tokenizer_sha256,
                            "seq_len": seq_len, "data_seed": data_seed, "doc_mask": doc_mask}

    def windows(self, split: str, numbers) -> np.ndarray:
        """(len(numbers), seq_len + 1) int64 tokens, -1 behind the end of the split."""
        out = np.full((len(numbers), self.seq_len + 1), -1, np.int64)
        for row, number in zip(out, numbers):
            position = number * self.seq_len
            while len(row) and position < self.ends[split][-1]:  # a window may go over several shards
                i = np.searchsorted(self.ends[split], position, side="right")
                part = self.map_shard(self.shards[split][i])[position - self.ends[split][i]:][:len(row)]
                row[:len(part)] = part
                row, position = row[len(part):], position + len(part)
        if out.max(initial=0) >= self.vocab_size:
            raise ValueError(f"{self.folder} is damaged: token id {out.max()} in a vocabulary of {self.vocab_size}; see "
                             f"python data.py check {self.folder}")
        return out

    def arrays(self, windows: np.ndarray):
        """tokens, labels, positions, doc_ids, each (sequences, seq_len) int64; doc_ids is None without doc_mask."""
        tokens, labels = np.where(windows < 0, self.eot, windows)[:, :-1], np.where(windows < 0, -100, windows)[:, 1:]
        positions = np.broadcast_to(np.arange(self.seq_len), tokens.shape)
        if not self.doc_mask:
            return tokens, labels, positions, None
        is_eot = tokens == self.eot
        begins = np.pad(is_eot[:, :-1], ((0, 0), (1, 0)))  # a document begins behind each eot
        start = np.maximum.accumulate(np.where(begins, positions, 0), axis=1)
        return tokens, np.where(is_eot, -100, labels), positions - start, np.cumsum(begins, axis=1)

    def first_words(self) -> str:
        """How the validation text begins, or the training text where there is none: a prompt to go on from."""
        split, n = ("val", self.n_val_samples) if self.n_val_samples else ("train", self.n_samples)
        ids = self.windows(split, range(min(n, 1 + 256 // self.seq_len)))[:, :-1].ravel()
        decode = load_tokenizer(Path(self.tokenizer_file)).decode
        documents = [part[(part >= 0) & (part != self.eot)].tolist() for part in np.split(ids, np.flatnonzero(ids == self.eot))]
        line = next((line for part in documents for line in decode(part).splitlines() if line.strip()), "")
        return " ".join(line.split()[:4])[:60].rstrip("\ufffd")  # 60: not all writing has spaces

    def has_labels(self, split: str, n_samples: int) -> bool:
        """Whether any token of a split has a loss. Reads until it finds one: of usual text the first windows only."""
        return any((self.arrays(self.windows(split, range(i, min(i + 64, n_samples))))[1] >= 0).any()
                   for i in range(0, n_samples, 64))

    def batches(self, first_sample: int, global_batch_size: int, local_batch_size: int, data_rank: int, data_ranks: int,
                device: torch.device | str):
        """Endless iterator of Batch from cursor first_sample on. Rank r has sequences r*A*B .. (r+1)*A*B of a global batch."""
        if global_batch_size < 1 or global_batch_size % (local_batch_size * data_ranks):
            raise ValueError(f"--global_batch_size {global_batch_size} is not a multiple of --local_batch_size x data ranks = "
                             f"{local_batch_size} x {data_ranks} = {local_batch_size * data_ranks}")
        share = global_batch_size // data_ranks
        first_row = data_rank * share  # of the global batch

        def make():
            cursor = first_sample
            while True:
                epochs, numbers = np.divmod(np.arange(cursor + first_row, cursor + first_row + share), self.n_samples)
                for epoch in np.unique(epochs):
                    here = epochs == epoch
                    numbers[here] = permute(numbers[here], self.n_samples, f"{self.data_seed}/{epoch}")
                arrays = self.arrays(self.windows("train", numbers))
                digest = f"{hash_sequences(*arrays[:2], first_row):012x}"
                yield Batch(*to_tensors(arrays, local_batch_size), global_batch_size, digest)
                cursor += global_batch_size

        return prefetch(make(), torch.device(device))

    def val_batches(self, n_sequences: int, local_batch_size: int, data_rank: int, data_ranks: int, device: torch.device | str):
        """Iterator of Batch (A = 1) over n_sequences validation windows, or all if there are fewer: the same in every layout
        and for every data_seed. Every rank gets as many batches; where the sequences do not divide, the rest has no labels."""
        n, rows = min(n_sequences, self.n_val_samples), local_batch_size * data_ranks
        if n < 1:
            raise ValueError(f"{self.folder} has no text for validation; take more documents or --val_every 0")
        numbers = permute(np.arange(n), self.n_val_samples, "validation")

        def make():
            for first in range(0, n, rows):
                windows = np.full((local_batch_size, self.seq_len + 1), -1)
                mine = numbers[first:first + rows][data_rank * local_batch_size:][:local_batch_size]
                windows[:len(mine)] = self.windows("val", mine)
                arrays = self.arrays(windows)
                n_bytes = None if self.token_bytes is None else int(self.token_bytes[arrays[1][arrays[1] >= 0]].sum())
                yield Batch(*to_tensors(arrays, local_batch_size), min(rows, n - first), "", n_bytes)

        return prefetch(make(), torch.device(device))


def scramble(x: np.ndarray) -> np.ndarray:
    """uint64 to uint64, one to one; near numbers become unlike ones."""
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    return x ^ (x >> np.uint64(32))


def hash_sequences(tokens: np.ndarray, labels: np.ndarray, first_row: int) -> int:
    """A number below 2**48 for some rows (sequences, T) of a global batch. The sum over all rows, modulo 2**48, is the same
    however they are shared out, and another one if a token, a label or the order of the rows changes."""
    weights = scramble(np.arange(1, tokens.shape[1] + 1, dtype=np.uint64)) | np.uint64(1)  # odd: no change is multiplied away
    pairs = tokens.astype(np.uint64) + (labels.astype(np.uint64) << np.uint64(32))
    rows = np.arange(first_row + 1, first_row + 1 + len(tokens), dtype=np.uint64)
    return int(scramble((pairs * weights).sum(1, dtype=np.uint64) + scramble(rows)).sum(dtype=np.uint64)) % 2**48


def to_tensors(arrays, local_batch_size: int) -> list:
    """Each array (sequences, T) as a tensor (A, B, T)."""
    return [a if a is None else torch.from_numpy(a.reshape(-1, local_batch_size, a.shape[-1]).copy()) for a in arrays]


def prefetch(batches, device: torch.device):
    """Yields the batches on `device`. A thread keeps two ready, so that reading and hashing cost the training step nothing.

    An error in the thread is raised here. The thread ends with this generator (close(), garbage collection) or at exit."""
    gpu = None if device.type != "cuda" else torch.cuda.current_device() if device.index is None else device.index

    def on_tensors(change, batch):
        return Batch(**{name: change(value) if torch.is_tensor(value) else value for name, value in vars(batch).items()})

    def load():
        batch = next(batches, None)
        return batch if gpu is None or batch is None else on_tensors(torch.Tensor.pin_memory, batch)

    # a new thread is on GPU 0, and pinning there would cost every rank a context on it
    thread = ThreadPoolExecutor(1, "prefetch", *(() if gpu is None else (torch.cuda.set_device, (gpu,))))
    try:
        ready = deque(thread.submit(load) for _ in range(2))
        while (batch := ready.popleft().result()) is not None:
            ready.append(thread.submit(load))
            yield batch if gpu is None else on_tensors(lambda tensor: tensor.to(device, non_blocking=True), batch)
    finally:  # by the garbage collector anywhere, in the thread itself as well, which cannot wait for itself
        thread.shutdown(wait=not threading.current_thread().name.startswith("prefetch"), cancel_futures=True)


def open_data(cfg: DataConfig, seq_len: int, tokenizer: str = "") -> TokenData:
    """The data that --data names, tokenized first if it is text. ValueError with one line for whatever a user can get wrong.

    tokenizer: for text without --tokenizer; "": one is trained on it. Needs no process group: ranks that call it together
    wait until one of them has filled the cache."""
    if seq_len < 1:
        raise ValueError(f"--seq_len {seq_len}: need at least 1")
    if cfg.data != "stdlib" and not os.path.exists(cfg.data):
        raise ValueError(f"--data {cfg.data}: no such file; need stdlib, a .txt or .jsonl file, or a folder of token shards")
    try:
        if cfg.data == "stdlib" or not os.path.isdir(cfg.data):
            folder = cached_corpus(cfg.data, cfg.tokenizer or tokenizer, cfg.cache_dir)
        else:
            folder = Path(cfg.data)
            if cfg.tokenizer and sha256_file(find_tokenizer(cfg.tokenizer)[0]) != read_index(folder)["source"]["tokenizer"]:
                raise ValueError(f"--tokenizer {cfg.tokenizer} is not the one that {folder} was made with; leave it out")
        data = TokenData(folder, seq_len, cfg.data_seed, cfg.doc_mask)
    except OSError as error:
        raise ValueError(f"{error.filename}: {error.strerror}; --data must be readable and --cache_dir "
                         f"{cache_folder(cfg.cache_dir)} writable") from error
    if data.n_samples < 1:
        n_tokens = data.fingerprint["n_tokens"]
        raise ValueError(f"--data {cfg.data}: {n_tokens} training tokens, but one sequence with its last label needs --seq_len "
                         f"{seq_len} + 1; take a longer text or --seq_len {max(1, n_tokens - 1)}")
    if not data.has_labels("train", data.n_samples):
        raise ValueError(f"--data {cfg.data}: no token of the training text has a loss, every label is masked"
                         + "; --doc_mask masks the token behind the end of a document, and these are empty" * cfg.doc_mask)
    if not data.has_labels("val", data.n_val_samples):
        data.n_val_samples = 0  # a loss of 0.0000 over no token would look like a good one
    return data


# ---------------------------------------------------------------------------------------------------------------------
# Command line
def own_tokenizer(paths: list, out: Path, vocab_size: int):
    """python data.py tokenizer"""
    least, most = 257, 1 << 20
    if not least <= vocab_size <= most:
        raise ValueError(f"--vocab_size {vocab_size} must be between {least:,}, all bytes and {EOT_NAMES[0]}, and {most:,}")
    if out.suffix != ".json" or out.exists():
        raise ValueError(f"--out {out} {'is there already' if out.exists() else 'is no .json'}; name a new file, like own.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    found = train_tokenizer(paths, out, vocab_size)
    fewer = f" instead of {vocab_size:,}, for no other pair of tokens occurs twice in this text" * (found < vocab_size)
    print(f"{out}: {found:,} ids{fewer}; train with --tokenizer {out}")


def main():
    parser = Parser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="stdlib|tokenizer|prepare|check")
    stdlib = commands.add_parser("stdlib", help="build the built-in corpus")
    stdlib.add_argument("--cache_dir", default="", help="instead of the user's cache folder")
    own = commands.add_parser("tokenizer", help="train a byte-level BPE on text files, for --tokenizer")
    own.add_argument("--input", nargs="+", required=True, help=".txt and .jsonl files")
    own.add_argument("--vocab_size", type=int, default=BPE_VOCAB, help=f"ids, {EOT_NAMES[0]} among them [default: {BPE_VOCAB}]")
    own.add_argument("--out", required=True, metavar="FILE.json", help="file to write")
    prepare = commands.add_parser("prepare", help="tokenize text files into a folder of token shards")
    prepare.add_argument("--input", nargs="+", required=True, help=".txt and .jsonl files")
    prepare.add_argument("--tokenizer", required=True, help="tokenizer.json, or a Hugging Face folder")
    prepare.add_argument("--out", required=True, help="folder to write; the same command again finishes what was interrupted")
    prepare.add_argument("--eot", default="", help="token that ends a document, where the tokenizer does not tell")
    prepare.add_argument("--workers", type=int, default=os.cpu_count(), help="processes")
    check = commands.add_parser("check", help="verify header, sizes, checksums and ids of a folder of token shards")
    check.add_argument("out", metavar="DIR", help="the folder")
    args = parser.parse_args()
    try:
        folder = cached_corpus("stdlib", "", args.cache_dir) if args.command == "stdlib" else Path(args.out)
        if args.command == "prepare":
            if not args.out or args.workers < 1:
                raise ValueError(f"--out {args.out!r} must be a folder, and --workers {args.workers} at least 1")
            build_shards([Path(path) for path in args.input], find_tokenizer(args.tokenizer, args.eot), folder, args.workers)
        if args.command == "tokenizer":
            return own_tokenizer([Path(path) for path in args.input], folder, args.vocab_size)
        if args.command == "check" and (damage := find_damage(folder)):
            print("\n".join(damage), file=sys.stderr)
            raise SystemExit(1)
        index = read_index(folder)
    except OSError as error:
        usage_error(f"{error.filename}: {error.strerror}")
    except ValueError as error:
        usage_error(error)
    for split, entries in index["splits"].items():
        print(f"{split}: {sum(entry['tokens'] for entry in entries):,} tokens, {index['documents'][split]:,} documents")
    print(f"{folder}: {index['vocab_size']:,} ids, sha256 {index['sha256'][:16]}")


if __name__ == "__main__":
    main()
