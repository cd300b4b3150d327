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

FEW_FILES = 64  # of more files, the small ones share shards


def share_shards(pieces: list, size: int) -> list[list]:
    """The pieces (corpus.build.Piece) of each shard. Of few files each piece has its own shard; of
    many files, those smaller than `size` bytes share a shard of about that size, because each shard
    costs files and waits for the disk. The order of the pieces, and so of the tokens, stays."""
    if len({piece.path for piece in pieces}) <= FEW_FILES:
        return [[piece] for piece in pieces]
    groups = []
    room = 0  # bytes that the last group still takes
    path = None  # of the piece before
    for piece in pieces:
        if piece.path != path:
            path = piece.path
            n_bytes = path.stat().st_size
            begins = n_bytes > room
            room -= n_bytes
            if begins:
                room = size - n_bytes
        else:
            begins = n_bytes >= size  # each piece of a large file has its own shard
        if begins:
            groups.append([])
        groups[-1].append(piece)
    return groups


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


def write_index(folder: Path, index: dict) -> None:
    version = VERSION
    if any("mask_sha256" in entry for entry in chain(*index["splits"].values())):
        version = MASKED
    write_file(
        folder / "index.json",
        json.dumps({"version": version, **index_totals(index), **index}, indent=1).encode(),
    )
