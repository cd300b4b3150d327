"""data.py prepare --from_datasets: a data set of the `datasets` library, read once and written as
.parquet files beside the shards. A run reads shards alone: no network, no library, one order."""

import hashlib
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

from corpus.files import CONVERSATION
from distributed.agree import brief
from flags.files import sha256_file, write_file

FILE_BYTES = 500 << 20  # of rows in memory, for each file: a piece of work for one process
NOTE = "dataset.json"  # beside the files: what they were made of


def text_of_dataset(
    name: str, subset: str, split: str, text_column: str, out: Path
) -> tuple[list[Path], dict]:
    """(the .parquet files with the text or the conversations of a data set, the note about them).
    Files of an earlier call with the same words are used as they are. subset, split: "" and "train"
    unless the data set has others. Raises ValueError, one line."""
    folder = out / "dataset"
    asked = dict(name=name, subset=subset, split=split, text_column=text_column)
    if (folder / NOTE).is_file():
        note = json.loads((folder / NOTE).read_bytes())
        if note["asked"] != asked:
            raise ValueError(
                f"{folder} holds {words_of_dataset(note['asked'])}, not {words_of_dataset(asked)}; name a new --out"
            )
        return check_files_of(folder, note), note
    dataset = load_split(name, subset, split)
    columns = wanted_columns(dataset.column_names, text_column, name)
    dataset = dataset.select_columns(columns)
    folder.mkdir(parents=True, exist_ok=True)
    n_bytes = dataset.data.nbytes
    n = max(1, math.ceil(n_bytes / FILE_BYTES))
    files = {}
    for i in range(n):
        path = folder / f"{file_stem(split)}-{i:05d}.parquet"
        part = dataset.shard(num_shards=n, index=i, contiguous=True)
        called(name, part.to_parquet, str(path))
        files[path.name] = [path.stat().st_size, sha256_file(path)]
    note = {"asked": asked, "rows": len(dataset), "columns": columns, "files": files}
    write_file(folder / NOTE, json.dumps(note, indent=1).encode())
    return [folder / file for file in files], note


def file_stem(split: str) -> str:
    """train[:1%] as a part of a file's name."""
    return re.sub(r"\W+", "-", split).strip("-")


def words_of_dataset(asked: dict) -> str:
    words = [asked["name"]]
    for key in ("subset", "split", "text_column"):
        if asked[key]:
            words.append(f"--{key} {asked[key]}")
    return " ".join(words)


def check_files_of(folder: Path, note: dict) -> list[Path]:
    """The files of a note. Raises ValueError for one that is not as it was written."""
    paths = []
    for name, (size, sha256) in note["files"].items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size or sha256_file(path) != sha256:
            raise ValueError(
                f"{path} is missing or not as it was written; delete {folder}, and it is read again"
            )
        paths.append(path)
    return paths


def load_split(name: str, subset: str, split: str) -> Any:
    """The data set, of the hub or of a folder; one that was written by save_to_disk, too."""
    try:
        import datasets
    except ImportError:
        raise ValueError(
            "--from_datasets needs the datasets library: pip install datasets"
        ) from None
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it raises is said here
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    for file in ("state.json", "dataset_dict.json"):
        if os.path.isfile(os.path.join(name, file)):
            found = called(name, datasets.load_from_disk, name)
            if isinstance(found, datasets.DatasetDict):
                if split not in found:
                    raise ValueError(
                        f"--from_datasets {name}: no split {split!r}; there are {', '.join(map(str, found))}"
                    )
                found = found[split]
            return found
    return called(name, datasets.load_dataset, name, subset or None, split=split)


def called(name: str, function, *args, **options) -> Any:
    """function(...); any error of the library becomes one line."""
    try:
        return function(*args, **options)
    except Exception as raised:  # the library raises its own, of many kinds
        error: BaseException = raised
        while error.__cause__ is not None:  # "an error occurred", and the cause is the reason
            error = error.__cause__
        words = " ".join(str(error).split()) or "no reason given"
        raise ValueError(f"--from_datasets {name}: {type(error).__name__}: {words}") from None


def wanted_columns(columns: list[str], text_column: str, name: str) -> list[str]:
    """The text, or else the conversations with what belongs to them, such as tools and a system message.
    Raises ValueError if there is neither."""
    if text_column in columns:
        return [text_column]
    if set(CONVERSATION[:2]) & set(columns):
        return [column for column in CONVERSATION if column in columns]
    raise ValueError(
        f"--from_datasets {name} has no column {text_column!r}, and no conversations: there are "
        f"{brief(columns)}; give --text_column"
    )


def fingerprint_of(note: dict) -> str:
    """A hash of the files that were written."""
    digests = [sha256 for _, sha256 in note["files"].values()]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()[:16]
