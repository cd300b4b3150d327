"""The sources that --data names, and tokenized text in the user's cache: found again by path, size and
time of the text files, or made by corpus/build.py."""

import os
import re
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from corpus.beside import files_beside
from corpus.shards import cache_name
from corpus.special import TextSource, prefix_ids
from corpus.tokenizer import BPE_VOCAB, added_beside, load_tokenizer, tokenizer_path
from flags.files import sha256_file

# the last three are 2 MB of tables, not text to learn from
STDLIB_SKIPPED = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
    "encodings",
    "pydoc_data",
    "entities.py",
}


class Part(NamedTuple):
    name: str  # "" without a mixture
    path: str  # stdlib, a file, a glob, a folder of text or of token shards
    share: int  # sequences of this part in a period


def parse_mixture(data: str, flag: str = "--data") -> list[Part]:
    """The parts of --data, sorted by name; without a mixture a single part without a name.
    flag: for errors. Raises ValueError."""
    if not re.match(r"\w[\w.-]*=", data) or os.path.lexists(data):
        return [Part("", data, 1)]
    from corpus.mixture import mixture_parts  # only mixtures need the file

    return [Part(*values) for values in mixture_parts(data, flag)]


def stdlib_files() -> list:
    """The sources of the running Python's standard library, without tests and tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(set(folders) - STDLIB_SKIPPED)
        for name in sorted(set(names) - STDLIB_SKIPPED):
            is_source = name.endswith(".py") and not name.startswith("_sysconfigdata")
            if is_source and Path(folder, name).is_file():
                found.append(Path(folder, name))
    size = sum(path.stat().st_size for path in found)
    if size < 2_000_000:
        raise ValueError(
            f"--data stdlib: this Python has few sources ({size / 1e6:.1f} MB in {root}); use "
            "--data FILE.txt"
        )
    return found


def cache_folder(cache_dir: str) -> Path:
    home = os.path.expanduser("~/.cache")
    if sys.platform == "darwin":
        home = os.path.expanduser("~/Library/Caches")
    return Path(
        cache_dir or os.path.join(os.environ.get("XDG_CACHE_HOME") or home, "nanotitan")
    ).absolute()


def cached_corpus(data: str, source: TextSource, cache_dir: str, no_chats: str = "") -> Path:
    """The folder of token shards for a text, made on first use. The name has a hash of path, size
    and time of each file, so that a later start does not read the text. Of the tokenizer's small
    files the contents count, because every checkpoint has a copy under another path. no_chats: the
    error for a recipe that trains on text only."""
    cache = cache_folder(cache_dir)
    rules = BPE_VOCAB
    left_out = {}
    tokenizer = source.folder  # a folder or a tokenizer.json
    begin = []  # ids before each document
    if data == "stdlib":
        paths = stdlib_files()
    else:
        from corpus.files import text_files

        paths, left_out = text_files(data)
    if tokenizer:
        from corpus.mixture import PACKED
        from corpus.spelling import SEGMENT, spelling_rules

        file = tokenizer_path(tokenizer)
        rules = sha256_file(file), sorted(files_beside(file).items())
        if source.begins:
            begin = prefix_ids(load_tokenizer(file))
        # only what was not known to earlier versions, whose folders are found again by their names
        more = [part for part in (begin, added_beside(file)) if part]
        if more:
            rules = (*rules, more)
        # a text of so many bytes is one segment
        long = any(path.suffix in PACKED or path.stat().st_size > SEGMENT for path in paths)
        rules += spelling_rules(file, long)
    stats = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    name = Path(data).stem.strip("*") or "text"
    folder = cache / f"{name}-{cache_name(data == 'stdlib', rules, stats)}"
    if (folder / "index.json").is_file():
        return folder
    from corpus.first_use import build_once

    return build_once(
        data, paths, folder, tokenizer=tokenizer, begin=begin, left_out=left_out, no_chats=no_chats
    )
