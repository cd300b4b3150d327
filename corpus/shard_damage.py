"""Finds damaged files in a folder of token shards by reading every byte, as a run does not."""

from itertools import chain
from pathlib import Path

import numpy as np

from corpus.shards import FIRST, MASKED, array_of, mask_array_of, mask_name, open_array, read_index
from flags.files import sha256_file


def changed_files(folder: Path, entry: dict) -> list[str]:
    """Names of the files of a shard, tokens and mask, whose checksum is not the one of the entry."""
    checksums = {entry["name"]: entry["sha256"], mask_name(entry["name"]): entry.get("mask_sha256")}
    changed = []
    for name, sha256 in checksums.items():
        if sha256 and sha256_file(folder / name) != sha256:
            changed.append(name)
    return changed


def find_damage(folder: Path) -> list:
    """One line per damage in a folder of shards: checksums, counts and ids of every file."""
    try:
        index = read_index(folder)
        problems = []
    except ValueError as error:
        return [str(error)]
    for name, sha256 in {"tokenizer.json": index["source"]["tokenizer"], **index["beside"]}.items():
        if not (folder / name).is_file() or sha256_file(folder / name) != sha256:
            problems.append(f"{folder / name} is missing or changed")
    for entry in chain(*index["splits"].values()):
        path = folder / entry["name"]
        masked = index["version"] == MASKED
        try:
            tokens = open_array(folder, *array_of(entry, index))
            if masked:
                begins = open_array(folder, *mask_array_of(entry)) & FIRST
            else:
                begins = tokens == index["eot"]
        except ValueError as error:
            problems.append(str(error))
            continue
        problems += [
            f"{folder / name}: wrong checksum, a byte has changed"
            for name in changed_files(folder, entry)
        ]
        if tokens.max(initial=0) >= index["vocab_size"]:
            problems.append(
                f"{path}: token id {tokens.max()}, but the vocabulary ends at "
                f"{index['vocab_size'] - 1}"
            )
        documents = np.count_nonzero(begins)
        if documents != entry["documents"]:
            problems.append(
                f"{path}: {documents} documents, but index.json says {entry['documents']}"
            )
    return problems
