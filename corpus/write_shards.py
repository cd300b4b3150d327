"""Writes the files of a folder of token shards: corpus/shards.py reads them and describes the
format."""

import hashlib
import io
import json
from itertools import chain
from pathlib import Path

import numpy as np

from corpus.shards import MASKED, VERSION, index_totals, mask_name
from flags.files import write_file


def write_array(path: Path, array: np.ndarray) -> tuple[str, int]:
    """Returns (sha256, bytes) of the file."""
    buffer = io.BytesIO()
    np.save(buffer, array)
    content = buffer.getbuffer()  # no copy of a gigabyte
    write_file(path, content)
    return hashlib.sha256(content).hexdigest(), len(content)


def write_shard(
    path: Path, tokens: np.ndarray, documents: int, mask: np.ndarray | None = None
) -> dict:
    """Returns the shard's entry in index.json."""
    sha256, size = write_array(path, tokens)
    entry = {
        "name": path.name,
        "sha256": sha256,
        "bytes": size,
        "tokens": len(tokens),
        "documents": documents,
    }
    if mask is not None:
        entry["mask_sha256"], entry["mask_bytes"] = write_array(
            path.with_name(mask_name(path.name)), mask
        )
    return entry


def write_index(folder: Path, index: dict):
    version = VERSION
    if any("mask_sha256" in entry for entry in chain(*index["splits"].values())):
        version = MASKED
    write_file(
        folder / "index.json",
        json.dumps({"version": version, **index_totals(index), **index}, indent=1).encode(),
    )
