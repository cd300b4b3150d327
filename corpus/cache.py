"""The sources that --data names, and tokenized text in the user's cache: found again by path, size and
time of the text files, or made by corpus/build.py."""

import os
import re
import sys
import sysconfig
import time
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from corpus.beside import files_beside
from corpus.shards import cache_name
from corpus.special import TextSource, find_tokenizer, prefix_ids
from corpus.tokenizer import BPE_VOCAB, added_beside, load_tokenizer, tokenizer_path
from flags.config import own_rank
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
    # not at the top: on Windows flags.config says that this is no place for us, and has to come
    # first
    import fcntl

    from corpus.build import build_shards, collect_stdlib, is_chat, train_tokenizer

    if data != "stdlib" and (no_chats or not tokenizer) and any(map(is_chat, paths)):
        raise ValueError(
            no_chats
            or f"--data {data} holds conversations; give the folder of a tokenizer and a chat template"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # all ranks come here together: rank 0 goes first, because only rank 0 shows progress
        time.sleep(1)
    with open(cache / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other ranks wait here, and find the corpus finished
        if (folder / "index.json").is_file():
            return folder
        if own_rank() == 0:
            from corpus.files import describe_left_out

            others = describe_left_out(left_out)
            size = sum(size for _, size, _ in stats) / 1e6
            print(
                f"{data}: {len(paths):,} file{'s' * (len(paths) > 1)}{others}, {size:.1f} MB of "
                "text, tokenized once into "
                f"{folder}",
                flush=True,
            )
        if data == "stdlib":
            paths = [collect_stdlib(paths, cache / "stdlib.jsonl")]
        if not tokenizer:
            train_tokenizer(paths, folder / "tokenizer.json")
        accept = (
            f"python data.py prepare --input {quote(data)} --tokenizer {quote(tokenizer)} "
            "--out FOLDER"
        )
        found = find_tokenizer(tokenizer or str(folder))
        build_shards(paths, found, folder, begin=begin, accept=accept)
    return folder
