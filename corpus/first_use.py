"""Token shards of a text, built in the cache when a run first uses the text. corpus/cache.py finds
them again; later starts do not load this file."""

import contextlib
import fcntl
import json
import os
import sysconfig
import time
from pathlib import Path
from shlex import quote

from corpus.build import build_shards, is_chat
from corpus.files import describe_left_out
from corpus.own_tokenizer import train_tokenizer
from corpus.special import find_tokenizer
from flags.config import own_rank
from flags.files import write_file


def build_once(
    data: str,
    paths: list[Path],
    folder: Path,
    *,
    tokenizer: str,
    begin: list[int],
    left_out: dict,
    no_chats: str,
) -> Path:
    """The folder, with the shards of these files of --data. Ranks that call together wait until one
    has built them. tokenizer: a folder or a file; "": a new one is trained. begin: ids before each
    document. left_out, no_chats: see text_files() and cached_corpus()."""
    if data != "stdlib" and (no_chats or not tokenizer) and any(map(is_chat, paths)):
        raise ValueError(
            no_chats
            or f"--data {data} holds conversations; give the folder of a tokenizer and a chat template"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # all ranks come here together: rank 0 goes first, because only rank 0 shows progress
        time.sleep(1)
    with open(folder.parent / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the other ranks wait here, and find the corpus finished
        if (folder / "index.json").is_file():
            return folder
        if own_rank() == 0:
            others = describe_left_out(left_out)
            size = sum(path.stat().st_size for path in paths) / 1e6
            print(
                f"{data}: {len(paths):,} file{'s' * (len(paths) > 1)}{others}, {size:.1f} MB of "
                "text, tokenized once into "
                f"{folder}",
                flush=True,
            )
        if data == "stdlib":
            paths = [collect_stdlib(paths, folder.parent / "stdlib.jsonl")]
        if not tokenizer:
            train_tokenizer(paths, folder / "tokenizer.json")
        accept = (
            f"python data.py prepare --input {quote(data)} --tokenizer {quote(tokenizer)} "
            "--out FOLDER"
        )
        found = find_tokenizer(tokenizer or str(folder))
        build_shards(paths, found, folder, begin=begin, accept=accept)
    return folder


def collect_stdlib(paths: list, target: Path) -> Path:
    """Write all sources as one .jsonl, each text once. Split by path: the same files validate in
    every version of Python."""
    root = sysconfig.get_paths()["stdlib"]
    texts = {}
    for path in paths:
        with contextlib.suppress(UnicodeDecodeError):
            texts.setdefault(path.read_bytes().decode(), path.relative_to(root).as_posix())
    lines = [json.dumps({"split_key": name, "text": text}) + "\n" for text, name in texts.items()]
    write_file(target, "".join(lines).encode())
    return target
