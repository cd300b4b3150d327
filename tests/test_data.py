"""Data, against data.py: one global order of sequences in every layout, undamaged shards, one line
per user error."""

import gc
import io
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from corpora import WORDS, call_cli, change_index, copy_of, flat, opened, sentences, take
from pool import pool
from programs import REPO, run_program
from runs import json_lines
from saves import refused, refuses
from tokenizers import Tokenizer, models, pre_tokenizers

import data
from corpus import build as texts
from corpus import cache, first_use, write_shards
from corpus.shard_damage import find_damage
from corpus.shards import read_index
from corpus.special import find_tokenizer
from data import DataConfig, TokenData, hash_sequences, open_data, permute
from distributed.checks import check_first_batch, reduce_hash
from distributed.layout import Layout


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """400 documents as .jsonl; the folder is the cache, too."""
    folder = tmp_path_factory.mktemp("corpus")
    lines = [json.dumps({"text": sentences(1 + i % 7, seed=i)}) for i in range(400)]
    (folder / "docs.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="session")
def shards(corpus) -> Path:
    """The folder of token shards of the corpus."""
    return open_corpus(corpus).folder


def open_corpus(corpus, seq_len=32, **flags) -> TokenData:
    return opened(corpus, "docs.jsonl", "", seq_len, **flags)


def all_tokens(folder: Path, split: str) -> np.ndarray:
    """The tokens of a split, read without data.py's own reader."""
    index = json.loads((folder / "index.json").read_text())
    return np.concatenate([np.load(folder / s["name"]) for s in index["splits"][split]])


# ---- the global order ----------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 100, 257, 1000, 4097])
def test_permutation_is_a_bijection(n):
    everything = permute(np.arange(n), n, "0/0")
    assert sorted(everything) == list(range(n))
    for k in {0, n // 2, n - 1}:  # any k alone: no state
        assert permute(np.array([k]), n, "0/0")[0] == everything[k]
    if n >= 100:
        assert (everything != np.arange(n)).mean() > 0.9
        assert (everything != permute(np.arange(n), n, "0/1")).mean() > 0.9


def test_permutation_is_even():
    """Each of 8 elements lands in each place about equally often, and neighbours do not stay
    together."""
    orders = np.stack([permute(np.arange(8), 8, f"{seed}/0") for seed in range(4000)])
    counts = np.stack([np.bincount(column, minlength=8) for column in orders.T])
    assert abs(counts - 500).max() < 5 * math.sqrt(500)
    steps = np.diff(permute(np.arange(10_000), 10_000, "7/3"))
    assert (np.abs(steps) == 1).mean() < 0.01
    assert abs(np.sign(steps).mean()) < 0.05


def test_huge_index_is_cheap():
    n = 10**12 + 1
    inside = permute(np.arange(n - 1000, n), n, "x")
    # as ever
    assert len(set(inside)) == 1000
    assert inside.min() >= 0
    assert inside.max() < n
    assert inside[0] == 998310590234


def test_windows_are_the_text(corpus, shards):
    """Every window of an epoch is a stretch of the concatenated shards, each exactly once; labels
    are the next tokens."""
    tokens, loaded = all_tokens(shards, "train"), open_corpus(corpus)
    assert loaded.n_samples == (len(tokens) - 1) // 32
    assert loaded.fingerprint["n_tokens"] == len(tokens)
    batches = take(loaded.batches(0, 4, 4, 0, 1, "cpu"), -(-loaded.n_samples // 4))
    sequences, labels = (
        flat(batches)[: loaded.n_samples].numpy(),
        flat(batches, "labels")[: loaded.n_samples].numpy(),
    )
    order = permute(np.arange(loaded.n_samples), loaded.n_samples, "0/0")
    for sequence, label, number in zip(sequences, labels, order):
        assert (sequence == tokens[number * 32 : number * 32 + 32]).all()
        assert (label == tokens[number * 32 + 1 : number * 32 + 33]).all()
    assert (
        batches[0].tokens.dtype
        == batches[0].labels.dtype
        == batches[0].positions.dtype
        == torch.int64
    )
    assert (batches[0].positions == torch.arange(32)).all()
    assert batches[0].doc_ids is None
    assert batches[0].n_bytes is None
    assert batches[0].samples == 4


@pytest.mark.parametrize("doc_mask", [False, True])
def test_same_batches_in_every_layout(corpus, doc_mask):
    loaded = open_corpus(corpus, doc_mask=doc_mask)
    straight = take(loaded.batches(0, 12, 12, 0, 1, "cpu"), 5)
    names = ["tokens", "labels", "positions"] + ["doc_ids"] * doc_mask
    for ranks in 1, 2, 3, 4, 6, 12:
        for local in {1, 12 // ranks}:
            split = []
            for rank in range(ranks):
                split.append(take(loaded.batches(0, 12, local, rank, ranks, "cpu"), 5))
            for step, one in enumerate(straight):
                assert split[0][step].tokens.shape == (12 // local // ranks, local, 32)
                assert split[0][step].samples == 12
                assert sum(int(part[step].hash, 16) for part in split) % 2**48 == int(one.hash, 16)
                for name in names:
                    joined = flat([split[rank][step] for rank in range(ranks)], name)
                    assert torch.equal(joined, flat([one], name)), (ranks, local, step, name)
    assert len({batch.hash for batch in straight}) == 5


def test_resume_anywhere_with_any_batch_size(corpus):
    """The cursor is all the state: also in a later epoch, across the border of an epoch, and with
    another batch size."""
    loaded = open_corpus(corpus)
    n = loaded.n_samples
    straight = flat(take(loaded.batches(0, 8, 8, 0, 1, "cpu"), 3 * n // 8))
    for cursor, size in (8, 8), (n - 3, 6), (n, 4), (2 * n - 5, 10), (13, 1):
        batch = take(loaded.batches(cursor, size, size, 0, 1, "cpu"), 1)
        assert torch.equal(flat(batch), straight[cursor : cursor + size])
    rows = [tuple(row.tolist()) for row in straight]
    # an epoch: the same in another order
    assert Counter(rows[:n]) == Counter(rows[n : 2 * n])
    assert rows[:n] != rows[n : 2 * n]
    bigger = take(loaded.batches(0, 3 * n, n, 0, 1, "cpu"), 1)  # a batch of three epochs
    assert torch.equal(flat(bigger)[: len(straight)], straight)


def test_hash_and_order_depend_on_the_seed_only(corpus):
    first, again = (take(open_corpus(corpus).batches(0, 8, 4, 0, 1, "cpu"), 3) for _ in range(2))
    other = take(open_corpus(corpus, data_seed=1).batches(0, 8, 4, 0, 1, "cpu"), 3)
    assert [b.hash for b in first] == [b.hash for b in again] != [b.hash for b in other]
    for b in first:
        assert int(b.hash, 16) >= 0
    masked = take(open_corpus(corpus, doc_mask=True).batches(0, 8, 4, 0, 1, "cpu"), 3)
    # other labels
    assert torch.equal(flat(first), flat(masked))
    assert [b.hash for b in first] != [b.hash for b in masked]
    prints = []
    for flags in ({}, {"data_seed": 1}, {"doc_mask": True}):
        prints.append(open_corpus(corpus, **flags).fingerprint)
    assert len({json.dumps(p) for p in prints}) == 3
    assert open_corpus(corpus).fingerprint == prints[0]
    assert open_corpus(corpus, seq_len=16).fingerprint != prints[0]


def test_bytes_of_token_0_count(corpus):
    """Bits per byte divides by the bytes of every label; token 0 is a label like any other."""
    loaded = open_corpus(corpus)
    loaded.windows, loaded.token_bytes = (
        lambda split, i: np.zeros((len(i), 33), np.int64),
        np.full(loaded.vocab_size, 3),
    )
    batch = next(iter(loaded.val_batches(2, 2, 0, 1, "cpu")))
    assert (batch.labels == 0).all()
    assert batch.n_bytes == 2 * 32 * 3


def test_validation_is_the_same_in_every_layout(corpus, shards):
    loaded, tokens = open_corpus(corpus, doc_mask=True), all_tokens(shards, "val")
    assert loaded.n_val_samples == -(-(len(tokens) - 1) // 32)
    bytes_of = np.array([len(text) for text in map(loaded_text(shards), range(loaded.vocab_size))])
    for wanted in 1, 10, 10**6:
        reference = None
        for local, ranks in (4, 1), (3, 2), (1, 4), (16, 3):
            per_rank = []
            for rank in range(ranks):
                per_rank.append(list(loaded.val_batches(wanted, local, rank, ranks, "cpu")))
            assert len({len(batches) for batches in per_rank}) == 1
            assert {batch.tokens.shape for batches in per_rank for batch in batches} == {
                (1, local, 32)
            }
            n = min(wanted, loaded.n_val_samples)
            joined = []
            for name in ("tokens", "labels", "doc_ids"):
                joined.append(torch.cat([flat(step, name) for step in zip(*per_rank)]))
            assert (joined[1][n:] == -100).all()
            assert (joined[1][:n] >= 0).any(1).all()
            reference = reference or [array[:n] for array in joined]
            for array, known in zip(joined, reference):
                assert torch.equal(array[:n], known)
            assert sum(batch.samples for batch in per_rank[0]) == n
            valid = joined[1][joined[1] >= 0].numpy()
            assert (
                sum(batch.n_bytes for batches in per_rank for batch in batches)
                == bytes_of[valid].sum()
            )
    seeds = []
    for s in (0, 1):
        seeds.append(flat(list(open_corpus(corpus, data_seed=s).val_batches(8, 8, 0, 1, "cpu"))))
    assert torch.equal(*seeds)
    every_label = flat(list(open_corpus(corpus).val_batches(10**6, 8, 0, 1, "cpu")), "labels")
    # all validation text counts, the last, shorter window too
    assert (every_label >= 0).sum() == len(tokens) - 1


def loaded_text(folder: Path):
    """id -> the bytes of a token, by `tokenizers`; no bytes for the special token."""
    # GPT-2's table from bytes to printable characters
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    decode = {c: b for b, c in bytes_to_unicode().items()}
    return lambda i: (
        b""
        if i == tokenizer.token_to_id("<|endoftext|>")
        else bytes(decode[c] for c in tokenizer.id_to_token(i))
    )


def test_doc_mask_arrays(corpus):
    """Positions, ids and labels against a loop over the tokens."""
    loaded, some_boundary = open_corpus(corpus, doc_mask=True), False
    batch = take(loaded.batches(0, 32, 32, 0, 1, "cpu"), 1)[0]
    plain = take(open_corpus(corpus).batches(0, 32, 32, 0, 1, "cpu"), 1)[0]
    for row in range(32):
        document = position = 0
        for t in range(32):
            token = int(batch.tokens[0, row, t])
            place = f"row {row}, token {t}"
            assert int(batch.doc_ids[0, row, t]) == document, f"document of {place}"
            assert int(batch.positions[0, row, t]) == position, f"position of {place}"
            label = int(plain.labels[0, row, t])
            if token == loaded.eot:
                label = -100
            assert int(batch.labels[0, row, t]) == label, f"label of {place}"
            position += 1
            if token == loaded.eot:
                document += 1
                position = 0
                some_boundary = True
    assert some_boundary
    assert (plain.labels >= 0).all()


# ---- the prefetch thread -------------------------------------------------------------------------


def prefetch_threads() -> int:
    return sum(thread.name.startswith("prefetch") for thread in threading.enumerate())


def test_prefetch_ends_when_closed_or_collected(corpus):
    loaded = open_corpus(corpus)
    gc.collect()
    batches = loaded.batches(0, 4, 4, 0, 1, "cpu")
    assert prefetch_threads() == 0  # nothing to clean up before the first batch
    next(batches)
    assert prefetch_threads() == 1
    batches.close()
    assert prefetch_threads() == 0
    batches = loaded.batches(0, 4, 4, 0, 1, "cpu")
    next(batches)
    del batches
    gc.collect()
    assert prefetch_threads() == 0
    for _ in loaded.val_batches(4, 2, 0, 1, "cpu"):
        break
    list(loaded.val_batches(4, 2, 0, 1, "cpu"))
    gc.collect()
    assert prefetch_threads() == 0


def count_reads(loaded, monkeypatch, fail_at=-1) -> list:
    """The sizes of all reads from now on. fail_at: number of the read that fails."""
    windows, read = loaded.windows, []

    def counting(split, numbers):
        read.append(len(numbers))
        if len(read) == fail_at:
            raise RuntimeError("the disk is gone")
        return windows(split, numbers)

    monkeypatch.setattr(loaded, "windows", counting)
    return read


@pytest.mark.parametrize("rank", [0, 3])
def test_prefetch_keeps_two_ready_and_no_more(corpus, monkeypatch, rank):
    """A rank reads its own share only: 4 of 16 sequences."""
    loaded = open_corpus(corpus)
    read = count_reads(loaded, monkeypatch)
    batches = loaded.batches(0, 16, 2, rank, 4, "cpu")
    next(batches)
    # its thread does one task after the other: this one comes after all that next() has asked for
    batches.gi_frame.f_locals["thread"].submit(int).result(timeout=60)
    assert read == [4, 4, 4]
    batches.close()
    assert read == [4, 4, 4]


def test_prefetch_raises_the_error_of_its_thread(corpus, monkeypatch):
    loaded = open_corpus(corpus)
    count_reads(loaded, monkeypatch, fail_at=3)
    batches = loaded.batches(0, 4, 4, 0, 1, "cpu")
    assert next(batches).samples == next(batches).samples == 4
    with pytest.raises(RuntimeError, match="the disk is gone"):
        next(batches)
    assert prefetch_threads() == 0


def test_the_hash_sees_every_change():
    """A changed token or label, two swapped tokens, another order of sequences: all hashes differ."""
    tokens = np.random.default_rng(0).integers(0, 50, (4, 6))
    labels = np.where(tokens < 10, -100, np.roll(tokens, -1, 1))
    whole = hash_sequences(tokens, labels, 0)
    assert 0 <= whole < 2**48
    seen = {
        "no change": whole,
        "another first row": hash_sequences(tokens, labels, 1),
        "reversed rows": hash_sequences(tokens[::-1], labels[::-1], 0),
    }
    for i, j in itertools.product(range(4), range(6)):
        for array, change in itertools.product((tokens, labels), (1, 1 << 20)):
            name = "tokens" if array is tokens else "labels"
            array[i, j] += change
            seen[f"{name}[{i}, {j}] += {change}"] = hash_sequences(tokens, labels, 0)
            array[i, j] -= change
    for a, b in itertools.combinations(range(4), 2):
        order = [{a: b, b: a}.get(i, i) for i in range(4)]
        seen[f"rows {a} and {b} swapped"] = hash_sequences(tokens[order], labels[order], 0)
        order = [{a: b, b: a}.get(i, i) for i in range(6)]
        columns = hash_sequences(tokens[:, order], labels, 0)
        seen[f"tokens {a} and {b} of each row swapped"] = columns
    assert len(seen) == 3 + 4 * 24 + 12
    changes = {}  # hash -> the first change that gave it
    for change, found in seen.items():
        assert found not in changes, f"the hash is the same after: {changes[found]}; {change}"
        changes[found] = change
    assert hash_sequences(tokens, labels, 0) == whole


def hash_of(flags: dict, rows: int) -> str:
    layout = Layout(
        **flags, local_batch_size=rows, global_batch_size=rows, rank=torch.distributed.get_rank()
    )
    tokens = np.arange(rows * 5).reshape(rows, 5)
    share = rows // layout.data_ranks
    mine = slice(layout.data_rank * share, (layout.data_rank + 1) * share)
    return reduce_hash(f"{hash_sequences(tokens[mine], -tokens[mine], mine.start):012x}", layout)[0]


@pytest.mark.slow
def test_every_layout_has_the_same_hash():
    (want,) = set(pool(1).run(hash_of, {}, 8))
    layouts = [
        dict(dp_shard=4),
        dict(dp_replicate=2, dp_shard=2),
        dict(pp=2, dp_shard=2),
        dict(tp=2, dp_shard=2),
        dict(cp=2, dp_replicate=2),
        dict(pp=2, tp=2),
        dict(cp=2, tp=2),
    ]
    assert (
        {h for flags in layouts for h in pool(4).run(hash_of, flags, 8)}
        == {want}
        != set(pool(1).run(hash_of, {}, 4))
    )


def one_label(masked: bool):
    labels = torch.full((1, 1, 4), -100)
    if torch.distributed.get_rank() == 1 and not masked:
        labels[0, 0, 2] = 3
    try:
        return check_first_batch(Mock(labels=labels))
    except RuntimeError as error:
        return str(error)


def test_a_first_batch_without_any_loss_stops_the_run():
    """A single label on a single rank is enough."""
    assert pool(2).run(one_label, False) == [None, None]
    for said in pool(2).run(one_label, True):
        assert "no token of the first batch has a loss" in said


@pytest.mark.parametrize("split", ["train", "val"])
def test_text_without_any_loss(shards, tmp_path, split):
    """Only ends of documents, which have no label with --doc_mask: refused for training, no
    validation otherwise."""
    folder = copy_of(shards, tmp_path)
    index = json.loads((folder / "index.json").read_text())
    for entry in index["splits"][split]:
        np.load(folder / entry["name"], mmap_mode="r+")[:] = index["eot"]
    cfg = DataConfig(data=str(folder), doc_mask=True)
    if split == "train":
        with refused("no token of the training text has a loss", "--doc_mask"):
            open_data(cfg, 32)
    else:
        assert (
            open_data(cfg, 32).n_val_samples
            == 0
            < open_data(DataConfig(data=str(folder)), 32).n_val_samples
        )
    # to predict the ends is possible
    assert open_data(DataConfig(data=str(folder)), 32).n_samples > 0


def test_exit_with_an_open_iterator(corpus):
    code = (
        "from data import *\n"
        f"d = open_data(DataConfig(data={str(corpus / 'docs.jsonl')!r}, "
        f"cache_dir={str(corpus)!r}), 32)\n"
        "batches = d.batches(0, 4, 4, 0, 1, 'cpu')\nnext(batches)\nvals = d.val_batches(8, 1, 0, "
        "1, 'cpu')\nnext(vals)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


# ---- text in the cache ---------------------------------------------------------------------------


def test_documents_are_kept_and_split_by_hash(corpus, shards):
    index, documents = json.loads((shards / "index.json").read_text()), []
    tokenizer = Tokenizer.from_file(str(shards / "tokenizer.json"))
    for split in "train", "val":
        tokens = all_tokens(shards, split)
        ends = np.flatnonzero(tokens == index["eot"])
        assert len(ends) == index["documents"][split]
        assert ends[-1] == len(tokens) - 1
        documents.append([tokenizer.decode(part[:-1]) for part in np.split(tokens, ends + 1)[:-1]])
    texts = [json.loads(line)["text"] for line in open(corpus / "docs.jsonl")]
    assert Counter(documents[0] + documents[1]) == Counter(texts)
    assert 5 <= len(documents[1]) <= 50
    assert index["vocab_size"] == tokenizer.get_vocab_size() < 4096


def test_a_changed_text_is_tokenized_again(tmp_path):
    text = sentences(300, seed=1)
    first, again, changed, back = (
        opened(tmp_path, "a.txt", t) for t in (text, "", text + "more.\n", text)
    )
    assert first.fingerprint == again.fingerprint == back.fingerprint != changed.fingerprint
    assert first.folder == again.folder != changed.folder
    shutil.rmtree(back.folder)  # the user may tidy up
    assert opened(tmp_path, "a.txt").fingerprint == first.fingerprint


@pytest.mark.parametrize("has_lines", [True, False])
def test_plain_text_keeps_every_character_and_its_tail_validates(tmp_path, has_lines):
    """Cut at a line, or in a text without lines between two characters."""
    text = (
        "\ufeff"
        + sentences(1000, seed=2)
        + "žluťoučký kůň 🐎\r\n" * 30
        + "the end without a newline"
    )
    if not has_lines:
        text = "\ufeff" + "žluťoučký kůň úpěl ďábelské ódy " * 300
    loaded = opened(tmp_path, "a.txt", text)
    tokenizer = Tokenizer.from_file(loaded.tokenizer_file)
    parts = [all_tokens(loaded.folder, split) for split in ("train", "val")]
    for part in parts:
        assert part[-1] == loaded.eot
        assert (part == loaded.eot).sum() == 1
    train, val = (tokenizer.decode(part[:-1]) for part in parts)
    assert "\ufeff" + train + val == text
    assert train.endswith("\n") == has_lines
    assert 0.049 < len(val.encode()) / len(text.encode()) < 0.06


def test_eot_in_plain_text_separates_documents_but_not_in_json(tmp_path):
    text = sentences(60, 1) + "<|endoftext|>" + sentences(60, 2)
    for name, content, documents in [
        ("a.txt", text + "<|endoftext|>", {"train": 2, "val": 1}),
        ("b.jsonl", json.dumps({"text": text}) + "\n", {"train": 1, "val": 0}),
    ]:
        loaded = opened(tmp_path, name, content, 8)
        assert json.loads((loaded.folder / "index.json").read_text())["documents"] == documents
        assert find_damage(loaded.folder) == []


def test_no_document_end_is_lost_between_pieces(tmp_path):
    """A separator at the start of a line belongs to the document above, wherever the pieces end."""
    stories = [sentences(1, seed=i) for i in range(100)] * 500
    (tmp_path / "a.txt").write_text("<|endoftext|>".join(stories))
    pieces = texts.cut_into_pieces([tmp_path / "a.txt"], "<|endoftext|>")
    assert len(pieces) > 2
    documents = []
    for piece in pieces:
        for document in texts.read_documents(piece, "<|endoftext|>"):
            documents.append(document)
    assert [text for _, text, _ in documents] == stories
    for _, _, closed in documents:
        assert closed


def test_long_text_in_pieces(tmp_path):
    """A text of several pieces and segments is a single document; the cuts lose nothing."""
    text = sentences(30_000, seed=3) * 2
    loaded = opened(tmp_path, "a.txt", text, 1000)
    index = json.loads((loaded.folder / "index.json").read_text())
    assert len(index["splits"]["train"]) >= 2
    assert index["documents"] == {"train": 1, "val": 1}
    tokens = all_tokens(loaded.folder, "train")
    tokenizer = Tokenizer.from_file(loaded.tokenizer_file)
    assert text.startswith(tokenizer.decode(tokens[:-1]))
    assert find_damage(loaded.folder) == []
    border = index["splits"]["train"][0]["tokens"] // 1000
    # over two shards
    assert (
        loaded.windows("train", [border])[0] == tokens[border * 1000 : border * 1000 + 1001]
    ).all()


def test_several_ranks_build_once(tmp_path):
    (tmp_path / "a.txt").write_text(sentences(2000, seed=4))
    code = (
        f"from data import *\nprint(open_data(DataConfig(data={str(tmp_path / 'a.txt')!r}, "
        f"cache_dir={str(tmp_path / 'cache')!r}), 32).fingerprint)"
    )

    def start(rank):
        return run_program(
            [sys.executable, "-c", code],
            env=os.environ
            | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": "1",
            },
        )

    with ThreadPoolExecutor() as ranks:
        done = list(ranks.map(start, range(3)))
    outputs = [(rank.stdout, rank.stderr) for rank in done]
    assert [rank.returncode for rank in done] == [0, 0, 0], outputs
    assert len({out.splitlines()[-1] for out, _ in outputs}) == 1
    for _, err in outputs:
        assert err == ""
    # only rank 0 reports progress
    assert [len(out.splitlines()) for out, _ in outputs[1:]] == [1, 1]
    assert sorted(
        path.name.split("-")[0] for path in (tmp_path / "cache").iterdir() if not path.is_symlink()
    ) == ["a", "lock"]


def test_many_small_files_share_shards(tmp_path, monkeypatch):
    """The stream of tokens and the validation text are those of a shard per piece."""
    monkeypatch.setattr(texts, "piece_size", lambda paths: 4000)
    folder = tmp_path / "many"
    folder.mkdir()
    for i in range(70):
        (folder / f"{i:02}.txt").write_text(sentences(12, seed=i))
    (folder / "33.txt").write_text(sentences(200, seed=33))  # has pieces of its own
    cfg = DataConfig(data=str(folder), cache_dir=str(tmp_path / "together"))
    together = open_data(cfg, 16)
    monkeypatch.setattr(write_shards, "FEW_FILES", 1000)
    alone = replace(
        cfg, cache_dir=str(tmp_path / "alone"), tokenizer=str(together.folder / "tokenizer.json")
    )
    apart = open_data(alone, 16)
    assert len(apart.entries["train"]) > 70
    assert len(together.entries["train"]) < 30
    assert find_damage(together.folder) == []
    for split in ("train", "val"):
        streams = []
        for loaded in (together, apart):
            n = -(-int(loaded.ends[split][-1]) // 16)
            streams.append(loaded.windows(split, range(n)))
        assert (streams[0] == streams[1]).all()
    documents = [read_index(loaded.folder)["documents"] for loaded in (together, apart)]
    assert documents[0] == documents[1]


def test_a_vocabulary_too_large_is_refused_before_the_text_is_read(tmp_path):
    """The text has a NUL, which whoever reads the text refuses."""
    tokenizer = opened(tmp_path, "a.txt", sentences(30, seed=1)).tokenizer_file
    (tmp_path / "b.txt").write_bytes(b"a\0b" * 100)
    cfg = DataConfig(data=str(tmp_path / "b.txt"), tokenizer=tokenizer, cache_dir=str(tmp_path))
    refuses("NUL", open_data, cfg, 16)
    words = r"the tokenizer has \d+ ids, the model 100; use --model_args vocab_size=\d+"
    refuses(words, open_data, cfg, 16, vocab_size=100)


# ---- the built-in corpus -------------------------------------------------------------------------


@pytest.mark.slow
def test_stdlib_corpus(tmp_path):
    cfg = DataConfig(cache_dir=str(tmp_path))
    loaded = open_data(cfg, 256)
    index = json.loads((loaded.folder / "index.json").read_text())
    assert loaded.vocab_size == 4096
    assert Tokenizer.from_file(loaded.tokenizer_file).get_vocab_size() == 4096
    assert loaded.fingerprint["n_tokens"] > 1_000_000
    assert 0.01 < index["documents"]["val"] / index["documents"]["train"] < 0.1
    assert loaded.n_val_samples > 64
    assert find_damage(loaded.folder) == []
    assert open_data(cfg, 256).fingerprint == loaded.fingerprint


def test_stdlib_selection(tmp_path, monkeypatch):
    root = tmp_path / "python"
    files = {
        "a.py": b"a = 1\n",
        "b/c.py": b"c = 2\n",
        "b/same.py": b"a = 1\n",
        "latin.py": b"\xe9\n",
        "empty.py": b"",
        "big.py": b"x = 'y'\n" * 300_000,
    }
    files |= dict.fromkeys(
        [
            "test/t.py",
            "b/tests/t.py",
            "idlelib/idle_test/t.py",
            "encodings/cp1.py",
            "site-packages/p.py",
            "_sysconfigdata_x.py",
            "pydoc_data/topics.py",
            "html/entities.py",
            "x.txt",
        ],
        b"unwanted = 1\n",
    )
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": str(root)})
    target = tmp_path / "stdlib.jsonl"
    first_use.collect_stdlib(cache.stdlib_files(), target)
    records = json_lines(target)
    assert [record["split_key"] for record in records if record["text"]] == [
        "a.py",
        "big.py",
        "b/c.py",
    ]
    (root / "big.py").write_bytes(b"x = 1\n")
    with refused("--data FILE.txt", str(root)):
        open_data(DataConfig(cache_dir=str(tmp_path)), 16)
    shutil.rmtree(root)
    with refused("--data FILE.txt"):
        open_data(DataConfig(cache_dir=str(tmp_path)), 16)


def test_cache_folder(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache.cache_folder("") == Path("/somewhere/nanotitan")
    assert cache.cache_folder("/x") == Path("/x")
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert cache.cache_folder("") == Path("/home/me/Library/Caches/nanotitan")
    monkeypatch.setattr(sys, "platform", "linux")
    assert cache.cache_folder("") == Path("/home/me/.cache/nanotitan")


# ---- tokenizers ----------------------------------------------------------------------------------


# what word_tokenizer can spell
KNOWN_WORDS = "\n".join(" ".join(word for word in WORDS if word != "axis") for _ in range(200))


def word_tokenizer(path: Path, size: int = 0, special=(), **settings) -> Path:
    """A tokenizer.json that knows WORDS (and more, up to `size`)."""
    vocab = {}
    for i, word in enumerate(dict.fromkeys([*WORDS, "[UNK]", *(f"w{i}" for i in range(size))])):
        vocab[word] = i
    tokenizer = Tokenizer(
        models.WordLevel(
            dict(itertools.islice(vocab.items(), max(size, len(WORDS) + 1))), unk_token="[UNK]"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(list(special))
    if settings:
        tokenizer.enable_truncation(**settings)
    path.parent.mkdir(exist_ok=True)
    tokenizer.save(str(path))
    return path


@pytest.mark.parametrize(
    "special, config, expected",
    [
        (["<s>", "</s>"], None, "</s>"),
        (["<|im_end|>", "<|endoftext|>"], None, "<|endoftext|>"),
        (["<stop>"], {"eos_token": "<stop>"}, "<stop>"),
        (["<stop>"], {"eos_token": {"content": "<stop>", "special": True}}, "<stop>"),
        (["<stop>"], {"eos_token": None}, None),
        (["<stop>"], None, None),
    ],
)
def test_eot_is_found(tmp_path, special, config, expected):
    file = word_tokenizer(tmp_path / "hf" / "tokenizer.json", special=special)
    if config:
        (tmp_path / "hf" / "tokenizer_config.json").write_text(json.dumps(config))
    for path in tmp_path / "hf", file:
        if expected is None:
            with refused("--eot", str(path)):
                find_tokenizer(str(path))
        else:
            eot = Tokenizer.from_file(str(file)).token_to_id(expected)
            assert find_tokenizer(str(path)) == (file, eot, len(WORDS) + 1 + len(special))
    assert find_tokenizer(str(file), "the")[1] == 0
    with refused("<nope>"):
        find_tokenizer(str(file), "<nope>")


def test_given_tokenizer_and_uint32(tmp_path):
    """More than 65,536 ids need uint32; truncation settings in a tokenizer.json must not cut
    documents."""
    file = word_tokenizer(
        tmp_path / "hf" / "tokenizer.json", size=70_000, special=["</s>"], max_length=5
    )
    loaded = opened(
        tmp_path, "a.txt", " ".join(["the", "w69000", "model"] * 500), tokenizer=str(file.parent)
    )
    tokens = all_tokens(loaded.folder, "train")
    assert tokens.dtype == np.uint32
    assert tokens.max() == 70_000 == loaded.eot
    assert len(tokens) > 1400
    assert (loaded.vocab_size, loaded.token_bytes) == (70_001, None)
    assert next(loaded.val_batches(2, 2, 0, 1, "cpu")).n_bytes is None
    assert find_damage(loaded.folder) == []
    same = open_data(DataConfig(data=str(loaded.folder), tokenizer=str(file)), 16)
    assert same.fingerprint == loaded.fingerprint
    assert same.tokenizer_file == str(loaded.folder / "tokenizer.json")
    other = word_tokenizer(tmp_path / "other" / "tokenizer.json", size=70_001, special=["</s>"])
    with refused("--tokenizer", "leave it out"):
        open_data(DataConfig(data=str(loaded.folder), tokenizer=str(other)), 16)
    again = opened(tmp_path, "a.txt", tokenizer=str(other))
    assert again.fingerprint["tokenizer_sha256"] != loaded.fingerprint["tokenizer_sha256"]
    assert again.folder != loaded.folder


CHAT_FILES = {
    "tokenizer_config.json": b'{"eos_token": "</s>"}',
    "chat_template.jinja": b"{{ messages }}",
    "special_tokens_map.json": b"{}",
    "generation_config.json": b'{"eos_token_id": [3, 4]}',
}


def chat_tokenizer(folder: Path, template=b"{{ messages }}") -> Path:
    file = word_tokenizer(folder / "tokenizer.json", special=["</s>"])
    for name, content in (CHAT_FILES | {"chat_template.jinja": template}).items():
        (folder / name).write_bytes(content)
    return file


def test_the_files_beside_a_tokenizer_come_along(tmp_path, monkeypatch, capsys):
    """Through the cache and through prepare, for a folder and for a tokenizer.json; changed files
    are noticed."""
    (tmp_path / "a.txt").write_text(KNOWN_WORDS)
    file = chat_tokenizer(tmp_path / "hf")
    cfg = DataConfig(
        data=str(tmp_path / "a.txt"), tokenizer=str(file.parent), cache_dir=str(tmp_path / "c")
    )
    argv = [
        "prepare",
        "--input",
        tmp_path / "a.txt",
        "--tokenizer",
        file,
        "--out",
        tmp_path / "tokens",
        "--workers",
        1,
    ]
    assert call_cli(monkeypatch, capsys, *argv)[0] == 0
    for folder in Path(open_data(cfg, 16).tokenizer_file).parent, tmp_path / "tokens":
        assert {name: (folder / name).read_bytes() for name in CHAT_FILES} == CHAT_FILES
        assert find_damage(folder) == []
    # the same tokenizer.json with another template: other files, but the same data
    chat_tokenizer(tmp_path / "hf", b"{{ other }}")
    again = open_data(cfg, 16)
    assert (
        Path(again.tokenizer_file).with_name("chat_template.jinja").read_bytes() == b"{{ other }}"
    )
    assert again.fingerprint == open_data(DataConfig(data=str(tmp_path / "tokens")), 16).fingerprint
    (tmp_path / "tokens" / "chat_template.jinja").write_bytes(b"{{ evil }}")
    damage = find_damage(tmp_path / "tokens")
    assert damage == [f"{tmp_path / 'tokens' / 'chat_template.jinja'} is missing or changed"]


def test_a_copy_of_the_tokenizer_finds_the_same_shards(tmp_path):
    """Every checkpoint has a copy of the tokenizer, the default of the next start."""
    file = chat_tokenizer(tmp_path / "hf")
    (tmp_path / "a.txt").write_text(KNOWN_WORDS)

    def folder(tokenizer):
        return opened(tmp_path, "a.txt", tokenizer=str(tokenizer)).folder

    first = folder(file)
    copy = Path(shutil.copytree(tmp_path / "hf", tmp_path / "step-3"))
    os.utime(file, (1, 1))
    assert {folder(path) for path in (copy, copy / "tokenizer.json", tmp_path / "hf", file)} == {
        first
    }
    stamp = file.stat()
    file.write_text(file.read_text().replace('"axis"', '"AXIS"'))  # of the same size and time
    os.utime(file, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    data.load_tokenizer.cache_clear()
    other = folder(file)
    assert other != first
    (copy / "chat_template.jinja").write_bytes(b"{{ other }}")
    assert folder(copy) not in (first, other)
    (copy / "tokenizer.json").unlink()
    with refused("need a tokenizer.json"):
        folder(copy)


@pytest.mark.parametrize("name", ["tokenizer.json", *CHAT_FILES])
def test_a_tokenizer_of_strangers(tmp_path, name):
    file = chat_tokenizer(tmp_path / "hf")
    (tmp_path / "secret").write_bytes((file.parent / name).read_bytes())
    (file.parent / name).unlink()
    (file.parent / name).symlink_to(tmp_path / "secret")
    with refused(name, "is a link that leads out of the folder"):
        find_tokenizer(str(file.parent))
    (file.parent / name).unlink()
    with open(file.parent / name, "wb") as sparse:
        sparse.truncate(1 << 30)
    for path in file.parent, file:
        with refused(name, "which is absurd"):
            find_tokenizer(str(path))


# ---- mistakes of users: one line each ------------------------------------------------------------


@pytest.mark.parametrize(
    "name, content, parts",
    [
        ("short.txt", b"ab\n", ["short.txt", "--seq_len 64", "longer text"]),
        ("latin.txt", b"caf\xe9 " * 100, ["latin.txt", "byte 3", "UTF-8", "iconv"]),
        ("a.jsonl", b'{"text": "ok"}\n\n{"text": "ok"\n', ["a.jsonl line 3", '"text"']),
        ("b.jsonl", b'{"text": "ok"}\n{"content": "no"}\n', ["b.jsonl line 2", "KeyError('text')"]),
        ("c.jsonl", b'{"text": 3}\n', ["c.jsonl line 1", '"text"']),
        ("d.jsonl", b"[1]\n", ["d.jsonl line 1"]),
        ("e.jsonl", b'{"text": "\\ud800"}\n', ["e.jsonl line 1"]),
        ("f.jsonl", b'{"text": ""}\n' * 200, ["f.jsonl", "0 training tokens"]),
        ("h.jsonl", b'{"text": "ok"}\n' * 100 + b"oops\n", ["h.jsonl line 101"]),
    ],
)
def test_bad_text(tmp_path, name, content, parts):
    (tmp_path / name).write_bytes(content)
    with refused(*parts):
        opened(tmp_path, name, seq_len=64)


def test_line_numbers_count_from_the_start_of_the_file(tmp_path):
    lines = [json.dumps({"text": "x" * 20_000})] * 300
    lines[250] = "broken"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    assert len(texts.cut_into_pieces([tmp_path / "a.jsonl"], "<|endoftext|>")) > 3
    with refused("a.jsonl line 251:"):
        opened(tmp_path, "a.jsonl", seq_len=64)


OUTSIDE = [
    "../train-00000.npy",
    "/etc/passwd",
    "a/../train-00000.npy",
    "..\\x",
    "",
    "index.json",
    3,
]


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.pop("splits"),
        lambda index: index["splits"].pop("val"),
        lambda index: index.update(version=1),  # of an older program
        lambda index: index.update(version=99),
        lambda index: index.update(vocab_size=7),
        lambda index: index.update(eot=-1),
        lambda index: index.update(eot="0"),
        lambda index: index.update(source=None),
        lambda index: (
            index["splits"]["train"].reverse()
            or index["splits"]["train"].append(index["splits"]["val"][0])
        ),
        lambda index: index["splits"]["train"][0].update(tokens=-5),
        *[
            lambda index, name=name: index["splits"]["train"][0].update(name=name)
            for name in OUTSIDE
        ],
    ],
)
def test_damaged_index(shards, tmp_path, change):
    folder = copy_of(shards, tmp_path)
    shutil.copy(folder / "train-00000.npy", tmp_path / "train-00000.npy")
    change_index(folder, change)
    with refused("index.json is damaged or old", "python data.py prepare"):
        TokenData(folder, 8)
    (folder / "index.json").write_text("{")
    with refused("index.json is damaged or old", "python data.py prepare"):
        TokenData(folder, 8)
    assert len(find_damage(folder)) == 1


def test_damaged_shards(shards, tmp_path, monkeypatch):
    folder = copy_of(shards, tmp_path)
    shard = folder / "train-00000.npy"
    whole = shard.read_bytes()
    other = io.BytesIO()
    np.save(other, np.frombuffer(whole[128:], np.uint16).astype(np.int16))
    # magic, version, length, dtype, shape
    places = 0, 6, 8, whole.index(b"<u2") + 2, whole.index(b",), }") - 1
    changed = [whole[:i] + bytes([whole[i] ^ 1]) + whole[i + 1 :] for i in places]
    for content, part in [
        (whole[:-2], "truncated"),
        (whole[:30], "truncated"),
        (b"", "truncated"),
        (whole + b"\0", "too long"),
        (other.getvalue(), "header"),
        *((content, "header") for content in changed),
    ]:
        shard.write_bytes(content)
        with refused(str(shard), "make the shards again", part):
            TokenData(folder, 8).windows("train", [0])
        assert any(str(shard) in line for line in find_damage(folder))
    # ids beyond the vocabulary never reach the model: the first, and the largest
    n_ids = (len(whole) - 128) // 2
    for id in (TokenData(folder, 8).vocab_size, 65535):
        shard.write_bytes(whole[:128] + id.to_bytes(2, "little") * n_ids)
        with refused(str(id), "data.py check"):
            next(TokenData(folder, 8).batches(0, 1, 1, 0, 1, "cpu"))
    assert any("token id 65535" in line for line in find_damage(folder))
    shard.unlink()
    with refused(str(shard), "missing"):
        TokenData(folder, 8)
    # one rank of a machine looks at all files, the others at those that they open
    monkeypatch.setenv("LOCAL_RANK", "1")
    opened = TokenData(folder, 8)
    with refused(str(shard), "missing"):
        opened.windows("train", [0])
    shard.write_bytes(whole)
    assert find_damage(folder) == []


def test_check_finds_every_flipped_byte(shards, tmp_path):
    folder = copy_of(shards, tmp_path)
    places = random.Random(0)
    for name in "train-00000.npy", "val-00000.npy", "tokenizer.json", "index.json":
        whole = (folder / name).read_bytes()
        # file names, kept for the reader
        named = whole.find(b'"inputs"'), whole.find(b'"tokenizer"')
        for place in [
            *range(0, 112, 9),
            len(whole) - 1,
            *(places.randrange(len(whole)) for _ in range(20)),
        ]:
            if name == "index.json" and (whole[place] in b" \n" or named[0] <= place <= named[1]):
                continue
            (folder / name).write_bytes(
                whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
            )
            assert find_damage(folder), (name, place)
        (folder / name).write_bytes(whole)
    assert find_damage(folder) == []


def test_another_tokenizer_in_the_folder(shards, tmp_path):
    folder = copy_of(shards, tmp_path)
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + " ")
    with refused("tokenizer.json", "make the shards again"):
        TokenData(folder, 8)
    tokenizer.unlink()
    bare = TokenData(folder, 8)
    assert (bare.tokenizer_file, bare.token_bytes) == (None, None)
    assert len(find_damage(folder)) == 1


# ---- the command line ----------------------------------------------------------------------------


def run_cli(*argv):
    return run_program([sys.executable, REPO / "data.py", *argv], timeout=100)


def test_a_dead_process_is_told():
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
        refuses(
            "^a process that tokenizes has died.*the same command goes on",
            list,
            texts.told_deaths(pool.map(os._exit, [1])),
        )


def test_a_full_disk_is_told_with_the_place(tmp_path, monkeypatch, capsys):
    """Python's error has no file's name."""
    (tmp_path / "a.txt").write_text("word " * 3000)
    monkeypatch.setattr(
        texts, "write_shard", Mock(side_effect=OSError(28, "No space left on device"))
    )
    cfg = DataConfig(data=str(tmp_path / "a.txt"), cache_dir=str(tmp_path / "c"))
    refuses(f"^{tmp_path}/c: No space left", open_data, cfg, 32)
    (own,) = (tmp_path / "c").glob("*/tokenizer.json")
    argv = [
        "prepare",
        "--input",
        tmp_path / "a.txt",
        "--tokenizer",
        own,
        "--out",
        tmp_path / "new",
        "--workers",
        1,
    ]
    assert f"error: {tmp_path}/new: No space" in call_cli(monkeypatch, capsys, *argv)[2]


@pytest.mark.slow
def test_prepare_in_processes(corpus, shards, tmp_path):
    """Two worker processes write the same files as a single process; check and training accept
    them."""
    (tmp_path / "a.txt").write_text(sentences(500, seed=9))
    argv = [
        "prepare",
        "--input",
        corpus / "docs.jsonl",
        tmp_path / "a.txt",
        "--tokenizer",
        shards / "tokenizer.json",
    ]
    done = run_cli(*argv, "--out", tmp_path / "two", "--workers", 2)
    assert done.returncode == 0, done.stderr
    assert "train: " in done.stdout, done.stderr
    assert done.stderr == "", done.stderr
    texts.build_shards(
        [corpus / "docs.jsonl", tmp_path / "a.txt"], find_tokenizer(str(shards)), tmp_path / "one"
    )
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in files:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    loaded = open_data(DataConfig(data=str(tmp_path / "two")), 16)
    assert loaded.n_samples > open_corpus(corpus, 16).n_samples
    assert loaded.n_val_samples > 1
    check = run_cli("check", tmp_path / "two")
    assert check.returncode == 0
    assert check.stdout == done.stdout
    assert check.stderr == ""


def test_prepare_again_keeps_what_is_intact(corpus, shards, tmp_path, monkeypatch, capsys):
    argv = [
        "prepare",
        "--input",
        corpus / "docs.jsonl",
        "--tokenizer",
        shards,
        "--out",
        tmp_path / "out",
    ]
    assert call_cli(monkeypatch, capsys, *argv)[0] == 0
    out = tmp_path / "out"
    whole = {path.name: path.read_bytes() for path in out.iterdir()}

    (out / "index.json").unlink()  # as after an interruption, with a damaged shard
    damaged = bytearray(whole["val-00000.npy"])
    damaged[-1] ^= 1
    (out / "val-00000.npy").write_bytes(damaged)
    (out / "pytorch_model.bin").write_bytes(b"not ours")
    assert call_cli(monkeypatch, capsys, *argv)[0] == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == whole | {
        "pytorch_model.bin": b"not ours"
    }

    times = {name: (out / name).stat().st_mtime_ns for name in whole}
    # all intact: nothing is tokenized again, and nothing written
    assert call_cli(monkeypatch, capsys, *argv)[0] == 0
    for name in whole:
        if name.endswith(".npy"):
            assert (out / name).stat().st_mtime_ns == times[name]


def test_prepare_in_shares(corpus, shards, tmp_path, monkeypatch, capsys):
    """The shares of three machines, one of them repeated, one in a folder of its own, one after a
    death: the same files. A folder of other data is refused."""
    (tmp_path / "a.txt").write_text(sentences(500, seed=9))
    argv = [
        "prepare",
        "--input",
        corpus / "docs.jsonl",
        tmp_path / "a.txt",
        "--tokenizer",
        shards,
        "--workers",
        1,
        "--out",
    ]
    assert call_cli(monkeypatch, capsys, *argv, tmp_path / "whole")[0] == 0
    out, encoded, real = tmp_path / "out", [], texts.read_documents

    def watched(piece, *rest):
        encoded.append(piece.split)
        return real(piece, *rest)

    monkeypatch.setattr(texts, "read_documents", watched)
    for share, folder in ("0/3", out), ("0/3", out), ("1/3", tmp_path / "own"):
        assert (
            f"share {share} is in {folder};"
            in call_cli(monkeypatch, capsys, *argv, folder, "--shard", share)[1]
        )
    shutil.copytree(tmp_path / "own", out, dirs_exist_ok=True)
    (out / "val-00002.npy").write_bytes(b"half")  # of a machine that died before its note
    assert call_cli(monkeypatch, capsys, "check", out)[0] == 1
    assert encoded == ["hash", "train"]
    assert call_cli(monkeypatch, capsys, *argv, out, "--shard", "2/3")[0] == 0
    assert call_cli(monkeypatch, capsys, *argv, out)[0] == 0
    assert encoded == ["hash", "train", "val"]
    assert {p.name: p.read_bytes() for p in out.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "whole").iterdir()
    }
    for wrong in ("3/3", "1", "0/0"):
        assert "need I/N" in call_cli(monkeypatch, capsys, *argv, out, "--shard", wrong)[2]
    status, _, err = call_cli(monkeypatch, capsys, *argv[:2], *argv[3:], out)  # other data
    assert status == 2
    assert err.count("\n") == 1
    assert "new --out" in err


def test_own_tokenizer(corpus, tmp_path, monkeypatch, capsys):
    """Trained on all given files, with the requested size, and good for a run: all text comes back."""
    (tmp_path / "odd.txt").write_text("zyzzyva zyzzyva zyzzyva\n" * 400 + sentences(400, 1))
    argv = [
        "--input",
        corpus / "docs.jsonl",
        tmp_path / "odd.txt",
        "--vocab_size",
        400,
        "--out",
        tmp_path / "x" / "own.json",
    ]
    status, out, _ = call_cli(monkeypatch, capsys, "tokenizer", *argv)
    assert status == 0
    assert "own.json: 400 ids; train with --tokenizer" in out
    tokenizer = Tokenizer.from_file(str(tmp_path / "x" / "own.json"))
    assert len(tokenizer.encode(" zyzzyva").ids) == 1 < len(tokenizer.encode(" zyxwvu").ids)
    assert (
        tokenizer.decode(tokenizer.encode("caf\u00e9 \U0001f600\n").ids) == "caf\u00e9 \U0001f600\n"
    )
    cfg = DataConfig(
        data=str(tmp_path / "odd.txt"),
        tokenizer=str(tmp_path / "x" / "own.json"),
        cache_dir=str(tmp_path),
    )
    loaded = open_data(cfg, 16)
    assert loaded.vocab_size == 400
    assert tokenizer.id_to_token(loaded.eot) == "<|endoftext|>"
    (tmp_path / "tiny.txt").write_text("abc\n")
    argv = ["--input", tmp_path / "tiny.txt", "--out", tmp_path / "tiny.json"]
    status, out, _ = call_cli(monkeypatch, capsys, "tokenizer", *argv)
    assert status == 0
    assert "tiny.json: 257 ids instead of 4,096" in out
