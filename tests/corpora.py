"""Texts, token shards and batches for the tests of data.py, corpus/ and sft/."""

import itertools
import json
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import torch

from corpus import commands as data_commands
from data import DataConfig, TokenData, open_data

WORDS = "the a model reads trains writes token shard of and to layer gradient rank step seed loss axis".split()


def sentences(count: int, seed: int) -> str:
    words = random.Random(seed)
    return "".join(
        " ".join(words.choices(WORDS, k=8)) + f" {words.random():.3f}.\n" for _ in range(count)
    )


def opened(folder: Path, name: str, text="", seq_len=16, **flags) -> TokenData:
    """The data of a file in this folder, which is the cache, too. text: what to write to the file
    first."""
    if text:
        (folder / name).write_text(text)
    return open_data(DataConfig(data=str(folder / name), cache_dir=str(folder), **flags), seq_len)


def copy_of(shards: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(shards, tmp_path / "tokens"))


def take(batches, count: int) -> list:
    taken = list(itertools.islice(batches, count))
    batches.close()
    return taken


def flat(batches, name="tokens") -> torch.Tensor:
    """(sequences, T) of all batches, in order."""
    return torch.cat([getattr(batch, name).flatten(0, 1) for batch in batches])


def change_index(folder: Path, change):
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


def call_cli(monkeypatch, capsys, *argv):
    """(status, stdout, stderr) of main(), without the start of another process."""
    monkeypatch.setattr(sys, "argv", ["data.py", *map(str, argv)])
    try:
        data_commands.main()
        status = 0
    except SystemExit as stop:
        status = stop.code or 0
    return status, *capsys.readouterr()


def tokens(folder) -> dict:
    """{split: all its tokens}"""
    index = json.loads((folder / "index.json").read_text())
    found = {}
    for split, entries in index["splits"].items():
        found[split] = np.concatenate(
            [[], *(np.load(folder / entry["name"]) for entry in entries)]
        ).tolist()
    return found
