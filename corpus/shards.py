"""A folder of token shards: train-00000.npy, val-00000.npy, ..., tokenizer.json and, written last,
index.json.

A shard is a one-dimensional array of token ids for np.load, uint16 if the vocabulary allows, else
uint32. Each document ends with the end-of-text token (eot), which marks the boundary. index.json
lists the shards with checksums and counts, and names the sources. (piece-*.json lets an interrupted
data.py prepare continue: corpus/build.py.)

A shard of conversations has a uint8 array beside it, train-00000.mask.npy: bit LOSS at the
assistant's tokens, bit FIRST at the first token of a conversation. No eot is between conversations:
the chat template has already written every separator.
"""

import hashlib
import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from corpus.beside import BESIDE

VERSION = 2  # of this format; version 1 had shards with another header
MASKED = 3  # version 2 with masks; programs that know only 2 must refuse the folder
# bits of a mask
LOSS = 1
FIRST = 2
PREPARE = "python data.py prepare --input TEXT --tokenizer tokenizer.json --out DIR"


def token_dtype(vocab_size: int) -> np.dtype:
    if vocab_size <= 65536:
        return np.dtype("<u2")
    return np.dtype("<u4")


def mask_name(name: str) -> str:
    """train-00000.npy -> train-00000.mask.npy"""
    return f"{name.removesuffix('.npy')}.mask.npy"


def index_totals(index: dict) -> dict:
    """Entries of index.json about all shards together.

    sha256 identifies the data: checksums of all shards in order, vocabulary, eot and tokenizer."""
    splits = index["splits"]
    shards = []
    for split in ("train", "val"):
        shards.append([entry["sha256"] + entry.get("mask_sha256", "") for entry in splits[split]])
    identity = repr((shards, index["vocab_size"], index["eot"], index["source"]["tokenizer"]))
    documents = {}
    for split, entries in splits.items():
        documents[split] = sum(entry["documents"] for entry in entries)
    return {"sha256": hashlib.sha256(identity.encode()).hexdigest(), "documents": documents}


def check_index(index: dict) -> None:
    """Raises an error (of various types) if index.json contradicts itself. Reads no shard."""
    if index["version"] not in (VERSION, MASKED):
        raise ValueError(f"format version {index['version']}, need {VERSION} or {MASKED}")
    for entry in chain(*index["splits"].values()):
        if not re.fullmatch(r"(train|val)-\d+\.npy", entry["name"]):
            raise ValueError(f"{entry['name']!r} is not the name of a shard")
        if (
            min(
                entry["tokens"],
                entry["documents"],
                index["eot"],
                index["vocab_size"] - index["eot"] - 1,
            )
            < 0
        ):
            raise ValueError("impossible numbers")
        if ("mask_sha256" in entry) != ("mask_bytes" in entry) or ("mask_sha256" in entry) != (
            index["version"] == MASKED
        ):
            raise ValueError("a mask is missing, or too many")
    if not index["beside"].keys() <= set(BESIDE):
        raise ValueError(f"{index['beside']} names other files than {BESIDE}")
    if index | index_totals(index) != index:
        raise ValueError("its checksums and counts do not fit together")


def read_index(folder: Path) -> dict:
    """index.json. ValueError with one line if the file is missing, damaged, or of an older format."""
    try:
        index = json.loads((folder / "index.json").read_text("utf-8"))
        check_index(index)
    except FileNotFoundError:
        raise ValueError(
            f"{folder}: no index.json of finished token shards; make some: {PREPARE}"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{folder}/index.json is damaged or old ({error!r}); delete the folder, and {PREPARE}"
        ) from None
    return index


def is_shards(path: str) -> bool:
    """Whether a path is a folder of finished token shards, and not text."""
    return path != "stdlib" and os.path.isfile(os.path.join(path, "index.json"))


def array_of(entry: dict, index: dict) -> tuple:
    """(name, bytes, dtype, length) of the file with the tokens of a shard"""
    return entry["name"], entry["bytes"], token_dtype(index["vocab_size"]), entry["tokens"]


def mask_array_of(entry: dict) -> tuple:
    """(name, bytes, dtype, length) of the file with the mask of a shard"""
    return mask_name(entry["name"]), entry["mask_bytes"], np.dtype("u1"), entry["tokens"]


def open_array(folder: Path, name: str, needed: int, dtype: np.dtype, length: int) -> np.ndarray:
    """A file of array_of or mask_array_of, memory-mapped. Raises ValueError if the file does not
    fit index.json."""
    path = folder / name
    cure = f"delete it and {folder}/index.json and make the shards again"
    if not path.is_file():
        raise ValueError(f"{path} is missing; {cure}")
    size = path.stat().st_size
    if size < needed:
        raise ValueError(f"{path} is truncated: {size} bytes, need {needed}; {cure}")
    if size > needed:
        raise ValueError(f"{path} is too long: {size} bytes, need {needed}; {cure}")
    try:
        array = np.lib.format.open_memmap(path, mode="r")
        # a header of another length would shift all tokens
        if (array.dtype, array.shape, array.offset + array.nbytes) == (dtype, (length,), size):
            return array
    except OSError:
        raise
    except Exception:  # numpy raises errors of many kinds at a damaged header
        pass
    raise ValueError(f"{path}: its header is damaged or belongs to other data; {cure}")


# A mapped array keeps a file open, and a process may open only 1,024 files, or 256. So at most 32
# arrays stay open, of all folders together; opening an array again takes microseconds.
opened_array = lru_cache(32)(open_array)


def check_arrays(folder: Path, index: dict) -> None:
    """Raises ValueError if a file is missing or its size does not fit index.json: at the start, and
    not in the middle of a run. The header of a shard is checked when the shard is opened. 16
    threads hide the latency of network file systems."""
    entries = [*chain(*index["splits"].values())]
    arrays = [array_of(entry, index) for entry in entries]
    arrays += [mask_array_of(entry) for entry in entries if index["version"] == MASKED]

    def check(array):
        path = f"{folder}/{array[0]}"
        if not os.path.isfile(path) or os.path.getsize(path) != array[1]:
            open_array(folder, *array)  # raises with the reason

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(check, arrays))


def cache_name(*what: Any) -> str:
    """A name for a file of the cache, by the hash of everything that decides about the contents."""
    return hashlib.sha256(repr((VERSION, *what)).encode()).hexdigest()[:16]
