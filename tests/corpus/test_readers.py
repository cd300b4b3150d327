"""Text files, against corpus/files.py: every packing of a text gives the same shards; user errors
take one line."""

import gzip
import json
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from chats import chat_folder, conversations
from test_data import call_cli, refused, sentences

from corpus import build as texts
from corpus.build import build_shards
from corpus.files import text_files, unpacked
from corpus.special import find_tokenizer
from data import DataConfig, open_data
from sft.chat_data import ChatData

DOCUMENTS = [sentences(1 + i % 7, seed=i) for i in range(300)]


def jsonl(documents, column="text") -> bytes:
    return "".join(
        json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(documents)
    ).encode()


def gzipped(text: bytes) -> bytes:
    # as two runs of gzip would append
    return gzip.compress(text[: len(text) // 3]) + gzip.compress(text[len(text) // 3 :])


def zstd(text: bytes) -> bytes:
    pack = zstandard.ZstdCompressor(write_checksum=True).compress
    return pack(text[: len(text) // 3]) + pack(text[len(text) // 3 :])


def parquet(path, documents, column="text", rows=70):
    table = pyarrow.table({"id": range(len(documents)), column: documents})
    pyarrow.parquet.write_table(table, path, row_group_size=rows)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """(file, eot, vocab size) of a tokenizer for DOCUMENTS"""
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "a.jsonl").write_bytes(jsonl(DOCUMENTS))
    return find_tokenizer(
        str(open_data(DataConfig(data=str(folder / "a.jsonl"), cache_dir=str(folder)), 16).folder)
    )


def tokens(folder) -> dict:
    """{split: all its tokens}"""
    index = json.loads((folder / "index.json").read_text())
    return {
        split: np.concatenate(
            [[], *(np.load(folder / entry["name"]) for entry in entries)]
        ).tolist()
        for split, entries in index["splits"].items()
    }


@pytest.mark.parametrize("n", [300, 100, 40, 1])
def test_every_format_holds_the_same_documents(tmp_path, tokenizer, n):
    """Many documents are split by hash, of few the last are for validation; a single document is
    for training."""
    text = jsonl(DOCUMENTS[:n])
    for name, content in {
        "a.jsonl": text,
        "a.jsonl.gz": gzipped(text),
        "a.jsonl.zst": zstd(text),
    }.items():
        (tmp_path / name).write_bytes(content)
        build_shards([tmp_path / name], tokenizer, tmp_path / f"of {name}")
    parquet(tmp_path / "a.parquet", DOCUMENTS[:n])
    build_shards([tmp_path / "a.parquet"], tokenizer, tmp_path / "of a.parquet")
    plain, *packed, rows = (
        tokens(tmp_path / f"of {name}")
        for name in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet")
    )
    assert packed == [plain, plain] and (len(plain["val"]) > 0) == (n > 1)
    assert rows["train"] + rows["val"] == plain["train"] + plain["val"] and (
        len(rows["val"]) > 0
    ) == (n > 1)
    assert rows == plain or n == 40  # the last twentieth: of the bytes, or of the rows


def test_packed_text_is_the_text(tmp_path, tokenizer):
    text = (sentences(24_000, 5) + "caf\u00e9").encode()  # several pieces
    for name, content in {
        "a.txt": text,
        "a.txt.gz": gzipped(text),
        "a.txt.zst": zstd(text),
    }.items():
        (tmp_path / name).write_bytes(content)
        build_shards([tmp_path / name], tokenizer, tmp_path / f"of {name}")
    plain, *packed = (
        tokens(tmp_path / f"of {name}") for name in ("a.txt", "a.txt.gz", "a.txt.zst")
    )
    assert (
        packed == [plain, plain] and len(list((tmp_path / "of a.txt.gz").glob("train-*.npy"))) > 1
    )


def test_conversations_in_every_format(tmp_path):
    folder = chat_folder(tmp_path / "qwen", "qwen3")
    chats = [
        {"messages": c["messages"]}
        for c in conversations(400, seed=3, most_turns=2)
        if all(m.keys() == {"role", "content"} for m in c["messages"])
    ][:120]
    text = "".join(json.dumps(chat) + "\n" for chat in chats).encode()
    (tmp_path / "a.jsonl").write_bytes(text)
    (tmp_path / "a.jsonl.gz").write_bytes(gzipped(text))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), tmp_path / "a.parquet")
    cfgs = [
        DataConfig(data=str(tmp_path / name), tokenizer=str(folder), cache_dir=str(tmp_path))
        for name in ("a.jsonl", "a.jsonl.gz", "a.parquet")
    ]
    plain, *others = (tokens(open_data(cfg, 256, Chats=ChatData).folder) for cfg in cfgs)
    assert others == [plain, plain] and len(plain["train"]) > 1000
    (tmp_path / "b.txt").write_text("so it is")
    refused(
        lambda: build_shards(
            [tmp_path / "a.jsonl", tmp_path / "b.txt"], find_tokenizer(str(folder)), tmp_path / "x"
        ),
        "a.jsonl holds conversations",
        "b.txt text",
        "name=path:weight",
    )


@pytest.mark.parametrize(
    "name, change, parts",
    [
        ("a.jsonl.gz", lambda raw: raw[:-9], ["truncated"]),
        ("a.jsonl.gz", lambda raw: raw[:200] + bytes([raw[200] ^ 64]) + raw[201:], ["damaged"]),
        ("a.jsonl.gz", lambda raw: b"{}\n", ["damaged"]),
        ("a.jsonl.zst", lambda raw: raw[:-9], ["truncated"]),
        ("a.jsonl.zst", lambda raw: raw[:200] + bytes([raw[200] ^ 64]) + raw[201:], ["damaged"]),
        ("a.parquet", lambda raw: raw[:-9], ["damaged"]),
        (
            "a.parquet",
            lambda raw: raw[:4] + bytes(len(raw) // 2) + raw[4 + len(raw) // 2 :],
            ["damaged"],
        ),
        ("a.jsonl.gz", lambda raw: gzip.compress(b""), ["empty"]),
        (
            "a.jsonl.gz",
            lambda raw: gzip.compress(jsonl(DOCUMENTS) + b"oops\n"),
            ["line 301", '"text"'],
        ),
        (
            "a.jsonl.gz",
            lambda raw: gzip.compress(jsonl(DOCUMENTS[:30]) + b"oops\n"),
            ["line 31", '"text"'],
        ),
        (
            "a.jsonl.zst",
            lambda raw: zstd(jsonl(DOCUMENTS) + b'{"text": "caf\xe9"}\n'),
            ["line 301", "utf-8"],
        ),
        ("a.txt.gz", lambda raw: gzip.compress(b"caf\xe9 " * 100), ["byte 3 is not UTF-8"]),
    ],
)
def test_damaged_files(tmp_path, tokenizer, name, change, parts):
    path = tmp_path / name
    if path.suffix == ".parquet":
        parquet(path, DOCUMENTS)
    else:
        path.write_bytes((gzipped if path.suffix == ".gz" else zstd)(jsonl(DOCUMENTS)))
    path.write_bytes(change(path.read_bytes()))
    refused(lambda: build_shards([path], tokenizer, tmp_path / "out"), str(path), *parts)


@pytest.mark.parametrize("name, package", [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_a_package_that_is_missing(tmp_path, tokenizer, monkeypatch, name, package):
    (tmp_path / name).write_bytes(b"x" * 50)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.parquet", None)
    refused(
        lambda: build_shards([tmp_path / name], tokenizer, tmp_path / "out"),
        name,
        f"pip install {package}",
    )


def test_columns(tmp_path, tokenizer):
    parquet(tmp_path / "a.parquet", DOCUMENTS, "content")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(DOCUMENTS, "content")))
    for name in ("a.parquet", "a.jsonl.gz"):
        build_shards([tmp_path / name], tokenizer, tmp_path / f"of {name}", text_column="content")
    assert tokens(tmp_path / "of a.parquet") == tokens(tmp_path / "of a.jsonl.gz")
    refused(
        lambda: open_data(
            DataConfig(data=str(tmp_path / "a.parquet"), cache_dir=str(tmp_path)), 16
        ),
        "no column 'text'",
        "but id, content",
        "data.py prepare --input",
        "--text_column NAME",
        "--data FOLDER",
    )
    for name, part in (
        ("a.parquet", 'row 1: need a JSON object with a string "id"'),
        ("a.jsonl.gz", "line 1: need a JSON"),
    ):
        refused(
            lambda name=name: build_shards(
                [tmp_path / name], tokenizer, tmp_path / "x", text_column="id"
            ),
            part,
        )
    pyarrow.parquet.write_table(
        pyarrow.table({"text": ["yes", None, "no"] * 50}), tmp_path / "null.parquet"
    )
    refused(
        lambda: build_shards([tmp_path / "null.parquet"], tokenizer, tmp_path / "x"),
        "null.parquet row 2",
        '"text"',
    )
    parquet(tmp_path / "late.parquet", [*DOCUMENTS[:250], None, *DOCUMENTS[:30]])
    refused(
        lambda: build_shards([tmp_path / "late.parquet"], tokenizer, tmp_path / "x"),
        "late.parquet row 251",
        '"text"',
    )
    pyarrow.parquet.write_table(
        pyarrow.table({"messages": [[{"role": "user", "content": b"raw"}]]}),
        tmp_path / "raw.parquet",
    )
    chat = find_tokenizer(str(chat_folder(tmp_path / "qwen", "qwen3")))
    refused(
        lambda: build_shards([tmp_path / "raw.parquet"], chat, tmp_path / "x"),
        "raw.parquet row 1",
        "needs a role",
    )


def test_folders_and_globs(tmp_path, tokenizer, capsys):
    """Files in the order of names, on every machine; hidden files are left out, and files without
    text are listed."""
    places = [
        "b/a.jsonl.gz",
        "a-b.txt",
        "a/z.jsonl",
        "Z.parquet",
        "a/notes.me",
        ".git/c.txt",
        "a/.b.txt.part",
        "meta.json",
    ]
    contents = {}
    for i, name in enumerate(places):
        text = (
            jsonl(DOCUMENTS[30 * i : 30 * i + 30])
            if "json" in name
            else "".join(DOCUMENTS[30 * i : 30 * i + 30]).encode()
        )
        contents[name] = gzip.compress(text) if name.endswith("gz") else text
    parquet(tmp_path / "Z.parquet", DOCUMENTS[:30])
    contents["Z.parquet"] = (tmp_path / "Z.parquet").read_bytes()
    prints = []
    for order in (places, places[::-1]):
        root = tmp_path / f"from {order[0][0]}" / "data"
        for name in order:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(contents[name])
        files, left_out = text_files(str(root))
        assert [path.relative_to(root).as_posix() for path in files] == [
            "Z.parquet",
            "a-b.txt",
            "a/z.jsonl",
            "b/a.jsonl.gz",
        ]
        assert sorted(path.name for path in left_out) == ["meta.json", "notes.me"]
        cfg = DataConfig(
            data=str(root), tokenizer=str(tokenizer[0]), cache_dir=str(root.parent / "cache")
        )
        prints.append(open_data(cfg, 16).fingerprint)
        assert "4 files, without notes.me, meta.json (no text), " in capsys.readouterr().out
    assert prints[0] == prints[1]
    assert [p.name for p in text_files(f"{root}/**/*.jsonl*")[0]] == ["z.jsonl", "a.jsonl.gz"]
    for what, part in (
        (f"{root}/*.zst", "no file matches"),
        (f"{root}/m*", "meta.json: need .txt, .md, .jsonl"),
        (f"{root}/no.txt", "no such file"),
    ):
        refused(lambda what=what: text_files(what), part)
    (tmp_path / "empty").mkdir()
    refused(
        lambda: open_data(DataConfig(data=str(tmp_path / "empty")), 16),
        "no index.json",
        "data.py prepare",
    )


def test_prepare_again_keeps_what_is_packed(tmp_path, tokenizer, monkeypatch, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl.gz").write_bytes(gzipped(jsonl(DOCUMENTS)))
    parquet(tmp_path / "in" / "b.parquet", DOCUMENTS)
    argv = [
        "prepare",
        "--input",
        tmp_path / "in",
        "--tokenizer",
        tokenizer[0],
        "--out",
        tmp_path / "out",
        "--workers",
        1,
    ]
    assert call_cli(monkeypatch, capsys, *argv)[0] == 0
    (tmp_path / "out" / "index.json").unlink()
    read, real = [], texts.read_documents
    monkeypatch.setattr(
        texts,
        "read_documents",
        lambda piece, *rest: read.append(piece.path.name) or real(piece, *rest),
    )
    assert call_cli(monkeypatch, capsys, *argv)[0] == 0 and read == []
    (tmp_path / "out" / "index.json").unlink()
    parquet(tmp_path / "in" / "b.parquet", ["other", *DOCUMENTS[1:]])
    assert call_cli(monkeypatch, capsys, *argv)[0] == 0 and read == ["b.parquet"]
    status, _, err = call_cli(
        monkeypatch, capsys, "show", tmp_path / "out", "--tokenizer", tokenizer[0]
    )
    assert status == 2 and "these are token shards; show the text" in err


@pytest.mark.parametrize("suffix", [".txt.zst", pytest.param(".parquet", marks=pytest.mark.slow)])
def test_what_unpacks_to_a_thousand_times_its_size_is_refused(tmp_path, suffix):
    """Zstandard packs 300 MB of one letter into 27 KB, parquet into 15 KB, and a stranger's file
    may mean 300 GB."""
    path, million = tmp_path / f"a{suffix}", b"0" * (1 << 20)
    if suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"text": [million.decode()] * 300}), path)
    else:
        packer = zstandard.ZstdCompressor(level=19).compressobj()
        path.write_bytes(b"".join(packer.compress(million) for _ in range(300)) + packer.flush())
    refused(
        lambda: [None for _ in unpacked(path)],
        "unpacks to more than 268,435,456 bytes, 1000 times its size",
    )
