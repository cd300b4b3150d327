"""Tokenized text in the user's cache: found again by name, size and time of the text files, or made by corpus/build.py."""
import fcntl
import os
import sys
import sysconfig
import time
from pathlib import Path

from corpus.shards import cache_name
from corpus.tokenizer import BPE_VOCAB, files_beside, find_tokenizer, tokenizer_path
from distributed.agree import brief
from support.config import own_rank
from support.files import sha256_file

STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__",
                  "encodings", "pydoc_data", "entities.py"}  # the last three are 2 MB of tables, not text to learn from


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


def cache_folder(cache_dir: str) -> Path:
    home = os.path.expanduser("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    return Path(cache_dir or os.path.join(os.environ.get("XDG_CACHE_HOME") or home, "nanotitan")).absolute()


def cached_corpus(data: str, tokenizer: str, cache_dir: str, no_chats: str = "") -> Path:
    """The folder of token shards for a text, made on first use; its name has the hash of text and tokenizer.

    A link named after size and time of the text leads to the folder, so that a later start does not read the text. Of the
    tokenizer's small files the contents count, because every checkpoint has a copy of them under another path.
    no_chats: the error for a recipe that does not train on conversations."""
    cache, rules = cache_folder(cache_dir), BPE_VOCAB
    if data == "stdlib":
        paths, left_out = stdlib_files(), []
    else:
        from corpus.readers import is_chat, text_files

        paths, left_out = text_files(data)
    if tokenizer:
        file = tokenizer_path(tokenizer)
        rules = sha256_file(file), sorted(files_beside(file).items())
    stats = [(str(path.absolute()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    link = cache / cache_name(data == "stdlib", rules, stats)
    if (link / "index.json").is_file():
        return link.resolve()
    if data != "stdlib" and (no_chats or not tokenizer) and any(map(is_chat, paths)):
        raise ValueError(no_chats or f"--data {data} holds conversations; give the folder of a tokenizer with a chat template: "
                         "--tokenizer")
    from corpus.build import build_shards, collect_stdlib, train_tokenizer

    cache.mkdir(parents=True, exist_ok=True)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(1)  # all ranks come here together: rank 0 goes first, because only rank 0 shows progress
    with open(cache / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other ranks wait here, and find the corpus finished
        if (link / "index.json").is_file():
            return link.resolve()
        if data == "stdlib":
            collect_stdlib(paths, cache / "stdlib.jsonl")
            paths = [cache / "stdlib.jsonl"]
        found = find_tokenizer(tokenizer) if tokenizer else None
        many = len(paths) > 1
        hashes = [sha256_file(path) for path in paths] if many else sha256_file(paths[0])
        folder = cache / f"{Path(data).name.strip('*') or 'text' if many else paths[0].stem}-{cache_name(hashes, rules)}"
        if not (folder / "index.json").is_file():
            if own_rank() == 0:
                size = sum(path.stat().st_size for path in paths)
                others = f", without {brief([path.name for path in left_out])} (no text)" * bool(left_out)
                print(f"{data}: {f'{len(paths):,} files{others}, ' * many}{size / 1e6:.1f} MB of text, tokenized once into "
                      f"{folder}", flush=True)
            folder.mkdir(exist_ok=True)
            if not found:
                train_tokenizer(paths, folder / "tokenizer.json")
                found = find_tokenizer(str(folder))
            build_shards(paths, found, folder)
        link.unlink(missing_ok=True)  # a link may lead to a deleted folder
        link.symlink_to(folder.name)
        return link.resolve()
