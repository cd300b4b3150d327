"""A folder of token shards: train-00000.npy, val-00000.npy, ..., tokenizer.json and, written last, index.json.

A shard is a one-dimensional array of token ids, uint16 where the vocabulary allows it, else uint32; np.load reads it. Each
document ends with the end-of-text token (eot), which is how document boundaries are kept. index.json lists the shards with
their checksums and counts, and says what they were made from. (piece-*.json is for a second data.py prepare: corpus.py.)
"""
import hashlib
import io
import json
import re
from itertools import chain
from pathlib import Path

import numpy as np

from support.files import sha256_file, write_file
from support.tokenizer import BESIDE

VERSION = 2  # of this format; 1 had shards with a header of its own
PREPARE = "python data.py prepare --input TEXT --tokenizer tokenizer.json --out DIR"


def token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 65536 else "<u4")


def write_shard(path: Path, tokens: np.ndarray, documents: int) -> dict:
    """Returns the shard's entry in index.json."""
    buffer = io.BytesIO()
    np.save(buffer, tokens)
    content = buffer.getvalue()
    write_file(path, content)
    return {"name": path.name, "sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content), "tokens": len(tokens),
            "documents": documents}


def index_totals(index: dict) -> dict:
    """What index.json says of all shards together.

    sha256 identifies the data: the checksums of all shards in their order, and what their numbers mean."""
    splits = index["splits"]
    shards = [[entry["sha256"] for entry in splits[split]] for split in ("train", "val")]
    identity = repr((shards, index["vocab_size"], index["eot"], index["source"]["tokenizer"]))
    return {"sha256": hashlib.sha256(identity.encode()).hexdigest(),
            "documents": {split: sum(entry["documents"] for entry in entries) for split, entries in splits.items()}}


def write_index(folder: Path, index: dict):
    write_file(folder / "index.json", json.dumps({"version": VERSION, **index_totals(index), **index}, indent=1).encode())


def check_index(index: dict):
    """Raises an error of some kind if index.json does not agree with itself. The shards are not looked at."""
    if index["version"] != VERSION:
        raise ValueError(f"format version {index['version']}, need {VERSION}")
    for entry in chain(*index["splits"].values()):
        if not re.fullmatch(r"(train|val)-\d+\.npy", entry["name"]):
            raise ValueError(f"{entry['name']!r} is not the name of a shard")
        if min(entry["tokens"], entry["documents"], index["eot"], index["vocab_size"] - index["eot"] - 1) < 0:
            raise ValueError("impossible numbers")
    if not index["beside"].keys() <= set(BESIDE):
        raise ValueError(f"{index['beside']} names other files than {BESIDE}")
    if index | index_totals(index) != index:
        raise ValueError("its checksums and counts do not fit together")


def read_index(folder: Path) -> dict:
    """index.json. ValueError with one line where it is missing, damaged, or of the format before."""
    try:
        index = json.loads((folder / "index.json").read_text("utf-8"))
        is_old = index["version"] == 1
        if not is_old:
            check_index(index)
    except FileNotFoundError:
        raise ValueError(f"{folder}: no index.json, so it is not a folder of finished token shards; make one: "
                         f"{PREPARE}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{folder}/index.json is damaged ({error!r}); delete it and make the shards again") from None
    if is_old:
        raise ValueError(f"{folder} holds token shards of an older format; delete the folder and prepare it again: {PREPARE}")
    return index


def open_shard(folder: Path, entry: dict, index: dict) -> np.ndarray:
    """The tokens of a shard, memory-mapped. Raises ValueError if the file is not the array that index.json promises."""
    path, cure = folder / entry["name"], f"delete it and {folder}/index.json and make the shards again"
    if not path.is_file():
        raise ValueError(f"{path} is missing; {cure}")
    size, needed = path.stat().st_size, entry["bytes"]
    if size != needed:
        raise ValueError(f"{path} is {'truncated' if size < needed else 'too long'}: {size} bytes, need {needed}; {cure}")
    try:
        tokens = np.lib.format.open_memmap(path, mode="r")
        fits = (tokens.dtype, tokens.shape) == (token_dtype(index["vocab_size"]), (entry["tokens"],))
        fits = fits and tokens.offset + tokens.nbytes == size  # a header of another length would shift all tokens
    except OSError:
        raise
    except Exception:  # numpy raises errors of many kinds at a damaged header
        fits = False
    if not fits:
        raise ValueError(f"{path}: its header is damaged or belongs to other data; {cure}")
    return tokens


def find_damage(folder: Path) -> list:
    """One line for each thing that is not as it was written."""
    try:
        index, problems = read_index(folder), []
    except ValueError as error:
        return [str(error)]
    for name, sha256 in {"tokenizer.json": index["source"]["tokenizer"], **index["beside"]}.items():
        if not (folder / name).is_file() or sha256_file(folder / name) != sha256:
            problems.append(f"{folder / name} is missing or changed")
    for entry in chain(*index["splits"].values()):
        path = folder / entry["name"]
        try:
            tokens = open_shard(folder, entry, index)
        except ValueError as error:
            problems.append(str(error))
            continue
        if sha256_file(path) != entry["sha256"]:
            problems.append(f"{path}: wrong checksum, a byte has changed")
        if tokens.max(initial=0) >= index["vocab_size"]:
            problems.append(f"{path}: token id {tokens.max()}, but the vocabulary ends at {index['vocab_size'] - 1}")
        if (documents := int((tokens == index["eot"]).sum())) != entry["documents"]:
            problems.append(f"{path}: {documents} documents, but index.json says {entry['documents']}")
    return problems
