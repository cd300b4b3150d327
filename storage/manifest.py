"""Checks a step folder: manifest.json lists the size and crc32 of every file in a step folder.

If a disk flips a bit in a tensor, the crc32 shows it; torch's distributed checkpoint loads the
tensor without an error.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from flags.files import STEP_FOLDER, fsync, json_bytes, write_file

FORMAT_VERSION = 3  # 2 had a longer tensors.json
TABLE = "tensors.json"  # names, dtypes and shapes of all tensors, and the places of all shards
# an unlisted file of these kinds is refused
READ = (".json", ".jinja", ".py", ".distcp", ".safetensors", ".bin", ".model")

AT_ONCE = 2e8  # bytes that are read within a second


class Damaged(ValueError):
    """A step folder has changed since the save. The message names the file and the change."""


def own_hash(manifest: dict) -> str:
    return hashlib.sha256(
        json_bytes({k: v for k, v in manifest.items() if k != "sha256"})
    ).hexdigest()


def write_manifest(folder: str, files: dict[str, list], **about: Any) -> None:
    """files: {name: [bytes, crc32]}, from checksums(). about: values shown by `checkpoint.py ls`."""
    manifest = dict(format_version=FORMAT_VERSION, **about, files=files)
    write_file(Path(folder, "manifest.json"), json_bytes(manifest | {"sha256": own_hash(manifest)}))


def read_manifest(folder: str, is_wanted: Callable[[str], bool] | None = None) -> dict:
    """The manifest of a step folder. Raises Damaged if a file is missing, unlisted or of another
    size; reads no content.

    is_wanted: name -> whether to look for this file, and for no other: with a file per rank,
    looking takes long."""
    file = Path(folder, "manifest.json")
    try:
        if file.is_fifo():  # to open it would wait without end
            raise Damaged("manifest.json is a pipe, not a file")
        raw = file.read_bytes()
        manifest = json.loads(raw)
        # Compare bytes, not only values: some flipped bits change the text of a JSON file but no
        # value.
        if raw != json_bytes(manifest) or manifest["sha256"] != own_hash(manifest):
            raise Damaged("manifest.json is not as it was written")
        if manifest["format_version"] not in (2, FORMAT_VERSION):
            raise Damaged(
                f"it is of format {manifest['format_version']} and this code reads 2 and "
                f"{FORMAT_VERSION}; with the "
                "code that wrote it, python checkpoint.py to_hf exports its weights"
            )
        named = STEP_FOLDER.fullmatch(os.path.basename(os.path.abspath(folder)))
        if named and int(named[1]) != manifest["step"]:
            raise Damaged(f"its manifest.json is that of step {manifest['step']}")
        files = {}
        for name, entry in manifest["files"].items():
            if is_wanted is None or is_wanted(name):
                files[name] = entry
        if is_wanted is None:
            for name in sorted(set(os.listdir(folder)) ^ {*files, "manifest.json"}):
                if name in files:
                    raise Damaged(f"{name} is missing")
                if name.endswith(READ):
                    raise Damaged(f"{name} is not in manifest.json")
        for name, (size, _) in files.items():
            path = os.path.join(folder, name)
            if os.path.islink(path) or not os.path.isfile(path):
                raise Damaged(f"{name} is not a plain file of {size} bytes")
            now = os.path.getsize(path)
            if now != size:
                raise Damaged(f"{name} was changed: it has {now} bytes, and had {size} when saved")
    except OSError as error:
        raise Damaged(f"{os.path.basename(error.filename or folder)}: {error.strerror}") from None
    except Damaged:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise Damaged("manifest.json is not as it was written") from None
    return manifest


def checksums(
    folder: str,
    names: list[str],
    progress: Callable[[int], None] = lambda n_bytes: None,
    sync: bool = False,
) -> dict[str, list]:
    """{name: [bytes, crc32 in hex]}, four files at a time: zlib works without Python's lock.

    sync: also make the contents durable; the disk and the processor work side by side.
    """

    def checksum(name):
        size = 0
        crc = 0
        buffer = memoryview(bytearray(1 << 22))
        with open(os.path.join(folder, name), "rb", buffering=0) as f:
            while n := f.readinto(buffer):
                size += n
                crc = zlib.crc32(buffer[:n], crc)
                progress(n)
        return [size, f"{crc:08x}"]

    with ThreadPoolExecutor(4) as pool, ThreadPoolExecutor(4) as disk:
        synced = []
        if sync:
            synced = disk.map(fsync, [os.path.join(folder, name) for name in names])
        found = dict(zip(names, pool.map(checksum, names)))
        list(synced)  # raises the errors of fsync
    return found


def check_files(
    folder: str,
    manifest: dict,
    names: list[str],
    progress: Callable[[int], None] = lambda n_bytes: None,
) -> None:
    """Reads the files `names` of a step folder. Raises Damaged if a single bit has changed."""
    try:
        found = checksums(folder, names, progress)
    except OSError as error:
        raise Damaged(f"{os.path.basename(error.filename or folder)}: {error.strerror}") from None
    for name, entry in found.items():
        if entry != manifest["files"][name]:
            raise Damaged(f"{name} has crc32 {entry[1]} instead of {manifest['files'][name][1]}")


def verify(folder: str) -> dict:
    """The manifest of a step folder, after a check of every byte of every file. Raises Damaged."""
    manifest = read_manifest(folder)
    names = [*manifest["files"]]
    n_bytes = sum(size for size, _ in manifest["files"].values())
    if n_bytes < AT_ONCE:  # nothing to show, and no file of ours to load for it
        check_files(folder, manifest, names)
        return manifest
    from flags.progress import Progress

    with Progress(f"verifying {folder}", n_bytes, "GB", 1e9) as progress:
        check_files(folder, manifest, names, progress)
    return manifest
