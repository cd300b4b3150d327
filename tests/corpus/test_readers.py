"""Text files, against corpus/files.py: every packing of a text gives the same shards; user errors
take one line."""

import gzip
import json
import random
import sys

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from chats import chat_folder, conversations
from corpora import call_cli, sentences, tokens
from runs import as_json_lines
from saves import refused

from corpus import build as texts
from corpus.build import build_shards
from corpus.commands import documents_of
from corpus.files import text_files, unpacked
from corpus.special import find_tokenizer
from corpus.tokenizer import load_tokenizer
from data import DataConfig, open_data
from sft.chat_data import ChatData

DOCUMENTS = [sentences(1 + i % 7, seed=i) for i in range(300)]


def jsonl(documents, column="text") -> bytes:
    return "".join(
        json.dumps({"id": i, column: text}) + "\n" for i, text in enumerate(documents)
    ).encode()


def gzipped(text: bytes) -> bytes:
    # as two runs of gzip would append
    return gzip.compress(text[: len(text) // 3], mtime=0) + gzip.compress(text[len(text) // 3 :])


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
    assert packed == [plain, plain]
    assert (len(plain["val"]) > 0) == (n > 1)
    assert rows["train"] + rows["val"] == plain["train"] + plain["val"]
    assert (len(rows["val"]) > 0) == (n > 1)
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
    assert packed == [plain, plain]
    assert len(list((tmp_path / "of a.txt.gz").glob("train-*.npy"))) > 1


def test_conversations_in_every_format(tmp_path):
    folder = chat_folder(tmp_path / "qwen", "qwen3")
    chats = [
        {"messages": c["messages"]}
        for c in conversations(400, seed=3, most_turns=2)
        if all(m.keys() == {"role", "content"} for m in c["messages"])
    ][:120]
    text = as_json_lines(chats).encode()
    (tmp_path / "a.jsonl").write_bytes(text)
    (tmp_path / "a.jsonl.gz").write_bytes(gzipped(text))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(chats), tmp_path / "a.parquet")
    cfgs = []
    for name in ("a.jsonl", "a.jsonl.gz", "a.parquet"):
        cfgs.append(
            DataConfig(data=str(tmp_path / name), tokenizer=str(folder), cache_dir=str(tmp_path))
        )
    plain, *others = (tokens(open_data(cfg, 256, Chats=ChatData).folder) for cfg in cfgs)
    assert others == [plain, plain]
    assert len(plain["train"]) > 1000
    (tmp_path / "b.txt").write_text("so it is")
    with refused("a.jsonl holds conversations", "b.txt text", "name=path:weight"):
        build_shards(
            [tmp_path / "a.jsonl", tmp_path / "b.txt"], find_tokenizer(str(folder)), tmp_path / "x"
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
        ("a.jsonl.gz", lambda raw: gzip.compress(b"", mtime=0), ["empty"]),
        (
            "a.jsonl.gz",
            lambda raw: gzip.compress(jsonl(DOCUMENTS) + b"oops\n", mtime=0),
            ["line 301", '"text"'],
        ),
        (
            "a.jsonl.gz",
            lambda raw: gzip.compress(jsonl(DOCUMENTS[:30]) + b"oops\n", mtime=0),
            ["line 31", '"text"'],
        ),
        (
            "a.jsonl.zst",
            lambda raw: zstd(jsonl(DOCUMENTS) + b'{"text": "caf\xe9"}\n'),
            ["line 301", "utf-8"],
        ),
        (
            "a.txt.gz",
            lambda raw: gzip.compress(b"caf\xe9 " * 100, mtime=0),
            ["byte 3 is not UTF-8"],
        ),
    ],
)
def test_damaged_files(tmp_path, tokenizer, name, change, parts):
    path = tmp_path / name
    if path.suffix == ".parquet":
        parquet(path, DOCUMENTS)
    else:
        path.write_bytes((gzipped if path.suffix == ".gz" else zstd)(jsonl(DOCUMENTS)))
    path.write_bytes(change(path.read_bytes()))
    with refused(str(path), *parts):
        build_shards([path], tokenizer, tmp_path / "out")


@pytest.mark.parametrize("name, package", [("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow")])
def test_a_package_that_is_missing(tmp_path, tokenizer, monkeypatch, name, package):
    (tmp_path / name).write_bytes(b"x" * 50)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setitem(sys.modules, f"{package}.parquet", None)
    with refused(name, f"pip install {package}"):
        build_shards([tmp_path / name], tokenizer, tmp_path / "out")


def test_columns(tmp_path, tokenizer):
    parquet(tmp_path / "a.parquet", DOCUMENTS, "content")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(jsonl(DOCUMENTS, "content"), mtime=0))
    for name in ("a.parquet", "a.jsonl.gz"):
        build_shards([tmp_path / name], tokenizer, tmp_path / f"of {name}", text_column="content")
    assert tokens(tmp_path / "of a.parquet") == tokens(tmp_path / "of a.jsonl.gz")
    with refused(
        "no column 'text'",
        "but id, content",
        "data.py prepare --input",
        "--text_column NAME",
        "--data FOLDER",
    ):
        open_data(DataConfig(data=str(tmp_path / "a.parquet"), cache_dir=str(tmp_path)), 16)
    for name, part in (
        ("a.parquet", 'row 1: need a JSON object with a string "id"'),
        ("a.jsonl.gz", "line 1: need a JSON"),
    ):
        with refused(part):
            build_shards([tmp_path / name], tokenizer, tmp_path / "x", text_column="id")


def test_rows_of_nulls_are_left_out_and_counted(tmp_path, tokenizer, capsys):
    """A null is no document; the same documents without nulls give the same tokens."""
    with_nulls = [None, *DOCUMENTS[:130], None, *DOCUMENTS[130:], None]
    parquet(tmp_path / "a.parquet", with_nulls)
    (tmp_path / "a.jsonl").write_bytes(jsonl(with_nulls))
    (tmp_path / "a.jsonl.gz").write_bytes(gzipped(jsonl(with_nulls)))
    (tmp_path / "plain.jsonl").write_bytes(jsonl(DOCUMENTS))
    build_shards([tmp_path / "plain.jsonl"], tokenizer, tmp_path / "plain")
    for name in ("a.parquet", "a.jsonl", "a.jsonl.gz"):
        capsys.readouterr()
        build_shards([tmp_path / name], tokenizer, tmp_path / f"of {name}")
        assert tokens(tmp_path / f"of {name}") == tokens(tmp_path / "plain")
        said = capsys.readouterr().out
        assert said == "3 lines or rows have null for a text and are left out\n"
    # a key that is missing is another fault
    (tmp_path / "b.jsonl").write_text('{"text": "so it is"}\n{"txt": "no"}\n')
    with refused("b.jsonl line 2", "KeyError('text')"):
        build_shards([tmp_path / "b.jsonl"], tokenizer, tmp_path / "x")


def test_conversations_with_nulls(tmp_path, capsys):
    chat = find_tokenizer(str(chat_folder(tmp_path / "qwen", "qwen3")))
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "So."}]
    rows = [None, turns, None, turns]
    pyarrow.parquet.write_table(pyarrow.table({"messages": rows}), tmp_path / "a.parquet")
    lines = [json.dumps({"messages": row}) + "\n" for row in rows]
    (tmp_path / "a.jsonl").write_text("".join(lines))
    for name in ("a.parquet", "a.jsonl"):
        build_shards([tmp_path / name], chat, tmp_path / f"of {name}")
        assert "2 lines or rows have null for a text" in capsys.readouterr().out
        index = json.loads((tmp_path / f"of {name}" / "index.json").read_text())
        assert sum(index["documents"].values()) == 2
        assert index["version"] == 3


BINARY = [pyarrow.binary(), pyarrow.large_binary(), pyarrow.binary_view(), pyarrow.string_view()]


@pytest.mark.parametrize("kind", BINARY, ids=str)
def test_text_in_bytes(tmp_path, tokenizer, kind):
    """A column of bytes is text as much as a column of strings; bytes that are no UTF-8 are named
    by their row."""
    parquet(tmp_path / "a.parquet", DOCUMENTS)
    build_shards([tmp_path / "a.parquet"], tokenizer, tmp_path / "a")
    column = pyarrow.array([text.encode() for text in DOCUMENTS], pyarrow.binary()).cast(kind)
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), tmp_path / "b.parquet")
    build_shards([tmp_path / "b.parquet"], tokenizer, tmp_path / "b")
    assert tokens(tmp_path / "a") == tokens(tmp_path / "b")


def test_rows_that_are_not_utf8(tmp_path, tokenizer):
    raw = [text.encode() for text in DOCUMENTS]
    raw[250] = b"caf\xe9"
    whole = pyarrow.array(raw, pyarrow.binary())
    # as a writer does that trusts its text
    trusted = pyarrow.Array.from_buffers(pyarrow.string(), len(raw), whole.buffers())
    for name, column in (("binary", whole), ("string", trusted)):
        path = tmp_path / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": column}), path)
        with refused(f"{path} row 251: byte 3 of a text is not UTF-8", "write the file again"):
            build_shards([path], tokenizer, tmp_path / "x")
    pictures = {"text": ["so it is"] * 3, "picture": [b"\xff\xd8", b"plain", None]}
    pyarrow.parquet.write_table(pyarrow.table(pictures), tmp_path / "p.parquet")
    rows = b"".join(unpacked(tmp_path / "p.parquet", "")).splitlines()
    assert [json.loads(row).get("picture") for row in rows] == [None, "plain", None]


ENGLISH = "".join(DOCUMENTS[:30])


@pytest.mark.parametrize(
    "name, content, parts",
    [
        ("a.txt", ENGLISH.encode("utf-16"), ["is UTF-16: iconv -f utf-16 -t utf-8 < "]),
        ("a.txt", b"\xfe\xff" + ENGLISH.encode("utf-16-be"), ["is UTF-16: iconv -f utf-16 "]),
        ("a.txt", ENGLISH.encode("utf-32"), ["is UTF-32: iconv -f utf-32 -t utf-8 < "]),
        ("a.md", ENGLISH.encode("utf-16-le"), ["is UTF-16, without a mark", "iconv -f utf-16le"]),
        ("a.txt", ENGLISH.encode("utf-16-be"), ["is UTF-16, without a mark", "iconv -f utf-16be"]),
        ("a.jsonl", b'\xff\xfe{\0"\0', ["is UTF-16: iconv -f utf-16 "]),
        ("a.jsonl", '{"text": "x"}'.encode("utf-16-le"), ["is UTF-16, without a mark"]),
        ("a.jsonl", b'{"text": "so"}\n{"text": "\0"}\n', ["line 2", "it has NULs"]),
        (
            "a.txt.gz",
            gzip.compress(ENGLISH.encode("utf-16"), mtime=0),
            ["zcat", "| iconv -f utf-16 "],
        ),
        ("a.jsonl.zst", zstd('{"text": "x"}'.encode("utf-16")), ["zstdcat", "| iconv -f utf-16 "]),
        ("a.txt", b"so it is\0 and so on", ["byte 8 is NUL", "tr -d '\\000' < "]),
        ("a.txt", gzip.compress(b"so it is", mtime=0), ["is packed by gzip: zcat < "]),
        (
            "a.txt",
            "caf\u00e9 ".encode() * 9 + b"\xe9",
            ["byte 54 is not UTF-8", "iconv -c -f utf-8"],
        ),
        ("a.txt", b"caf\xc3", ["byte 3 is not UTF-8; the text ends inside of a character"]),
        ("a.txt.gz", gzip.compress(b"\xf0\x9f\x99", mtime=0), ["ends inside of", "zcat"]),
        ("a.txt", b"caf\xe9 " * 9, ["byte 3 is not UTF-8", "iconv -f latin1 -t utf-8 < "]),
        ("a.jsonl", b'{"text": "' + b"a" * 9999 + b'\xe9"}', ["line 1: byte 10009 is not UTF-8"]),
    ],
)
def test_text_in_another_encoding(tmp_path, tokenizer, name, content, parts):
    path = tmp_path / name
    path.write_bytes(content)
    with refused(str(path), *parts):
        build_shards([path], tokenizer, tmp_path / "out")


def test_a_file_in_several_paths_is_read_once(tmp_path, tokenizer, monkeypatch, capsys):
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.txt").write_text("hello\n")
    (data / "link.txt").symlink_to("a.txt")
    paths = (data / "a.txt", data, data / "link.txt", f"{data}/*")
    out = tmp_path / "out"
    argv = ("prepare", "--input", *paths, "--tokenizer", tokenizer[0], "--out", out)
    status, said, errors = call_cli(monkeypatch, capsys, *argv)
    assert (status, errors) == (0, "")
    assert "1 documents" in said
    assert said.count("0 files, without") == 3
    assert "a.txt (read already)" in said


def test_columns_beside_a_conversation(tmp_path):
    """The system message and values for the template in columns of their own, as in a .jsonl."""
    messages = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]
    folder = chat_folder(tmp_path / "qwen", "qwen3")
    template = "<{{ mood }}>{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    rows = [
        {"messages": messages, "system_prompt": "s", "chat_template_kwargs": {"mood": f"m{i}"}}
        for i in range(3)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    told = []
    for name in ("a.jsonl", "a.parquet"):
        documents = documents_of(tmp_path / name, *find_tokenizer(str(folder))[:2])
        told.append([ids for ids, _ in documents])
    assert told[0] == told[1]
    decoded = load_tokenizer(folder / "tokenizer.json").decode(told[0][2])
    assert decoded == "<m2><system>s<user>u<assistant>a"


def test_empty_files_among_others(tmp_path, tokenizer, capsys):
    """An empty file in a folder is left out with a line; alone, or with other empty ones, it is
    refused."""
    root = tmp_path / "data"
    root.mkdir()
    (root / "a.jsonl").write_bytes(jsonl(DOCUMENTS))
    (root / "empty.jsonl").touch()
    (root / "packed.jsonl.gz").write_bytes(gzip.compress(b"", mtime=0))
    parquet(root / "rows.parquet", pyarrow.array([], pyarrow.string()))
    files, left_out = text_files(str(root))
    assert left_out == {root / "empty.jsonl": "empty"}
    build_shards(files, tokenizer, tmp_path / "out")
    said = capsys.readouterr().out
    assert "packed.jsonl.gz" in said
    assert "rows.parquet is empty and left out" in said
    build_shards([root / "a.jsonl"], tokenizer, tmp_path / "one")
    assert tokens(tmp_path / "out") == tokens(tmp_path / "one")
    with refused("empty.jsonl is empty"):
        text_files(str(root / "empty.jsonl"))
    (root / "a.jsonl").write_bytes(b"")
    for what in (root / "*.jsonl", root / "[ae]*"):
        with refused("a.jsonl is empty"):
            text_files(str(what))


def test_folders_and_globs(tmp_path, tokenizer, capsys):
    """Files in the order of names, on every machine; hidden files are left out, and files without
    text are listed."""
    places = [
        "b/a.jsonl.gz",
        "a/b.txt",
        "a/z.jsonl",
        "Z.parquet",
        "README.md",
        "notes.txt.gz",
        "a/LICENSE",
        "a/License-CC.txt",
        "a/notes.me",
        ".git/c.txt",
        "a/.b.txt.part",
        "meta.json",
    ]
    contents = {}
    for i, name in enumerate(places):
        if "json" in name:
            text = jsonl(DOCUMENTS[30 * i : 30 * i + 30])
        else:
            text = "".join(DOCUMENTS[30 * i : 30 * i + 30]).encode()
        if name.endswith("gz"):
            contents[name] = gzip.compress(text, mtime=0)
        else:
            contents[name] = text
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
            "a/b.txt",
            "a/z.jsonl",
            "b/a.jsonl.gz",
        ]
        no_text = [path.name for path, reason in left_out.items() if reason == "no text"]
        assert no_text == ["LICENSE", "notes.me", "meta.json"]
        beside = sorted(path.name for path in left_out if path.name not in no_text)
        assert beside == ["License-CC.txt", "README.md", "notes.txt.gz"]
        cfg = DataConfig(
            data=str(root), tokenizer=str(tokenizer[0]), cache_dir=str(root.parent / "cache")
        )
        prints.append(open_data(cfg, 16).fingerprint)
        said = capsys.readouterr().out
        assert "4 files, without " in said
        assert ", without LICENSE, notes.me, meta.json (no text)" in said
        assert "README.md, a/License" not in said
        assert "(no data beside .jsonl or .parquet; to train on it, name the file)" in said
    assert prints[0] == prints[1]
    assert text_files(str(root / "README.md"))[0] == [root / "README.md"]
    assert [p.name for p in text_files(f"{root}/**/*.jsonl*")[0]] == ["z.jsonl", "a.jsonl.gz"]
    for what, part in (
        (f"{root}/*.zst", "no file matches"),
        (f"{root}/m*", "meta.json: need .txt, .md, .jsonl"),
        (f"{root}/no.txt", "no such file"),
    ):
        with refused(part):
            text_files(what)
    (tmp_path / "empty").mkdir()
    with refused("no index.json", "data.py prepare"):
        open_data(DataConfig(data=str(tmp_path / "empty")), 16)


def test_texts_alone_are_all_read(tmp_path):
    """Without .jsonl and .parquet, a README and a licence are text as well as others."""
    for name in ("README.md", "LICENSE.txt", "book.txt", "more/README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("so it is")
    assert len(text_files(str(tmp_path))[0]) == 4


def test_a_packed_twin_counts_once(tmp_path):
    for name in ("a.jsonl", "a.jsonl.gz", "b.txt.gz", "b.txt.zst", "c.jsonl.zst", "d/a.jsonl.gz"):
        (tmp_path / "data" / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / "data" / name).write_text("x")
    pattern = str(tmp_path / "data" / "**" / "*")
    files, left_out = text_files(pattern)
    names = [file.relative_to(tmp_path / "data").as_posix() for file in files]
    assert names == ["a.jsonl", "b.txt.gz", "c.jsonl.zst", "d/a.jsonl.gz"]
    reasons = {path.name: reason for path, reason in left_out.items()}
    assert reasons == {"a.jsonl.gz": "a.jsonl, packed", "b.txt.zst": "b.txt.gz, packed"}
    # named by its own name it is read
    assert text_files(str(tmp_path / "data" / "a.jsonl.gz"))[0] != []


def test_linked_folders(tmp_path):
    """Another disk is linked in; no circle is followed, and nothing is read twice."""
    disk, data = tmp_path / "disk", tmp_path / "data"
    for folder in (disk / "part" / "deep", data / "own"):
        folder.mkdir(parents=True)
    (disk / "part" / "a.jsonl").write_text("{}")
    (disk / "part" / "deep" / "b.jsonl").write_text("{}")
    (data / "own" / "c.jsonl").write_text("{}")
    (data / "more").symlink_to("../disk/part")
    expected = ["more/a.jsonl", "more/deep/b.jsonl", "own/c.jsonl"]

    def names() -> list[str]:
        return [file.relative_to(data).as_posix() for file in text_files(str(data))[0]]

    assert names() == expected
    links = {
        data / "circle": ".",
        data / "own" / "up": "..",
        data / "around": tmp_path,
        disk / "part" / "back": data,
        data / "twice": disk / "part" / "deep",
        data / "own" / "same.jsonl": "c.jsonl",
        disk / "part" / "deep" / ".hidden": disk,
    }
    for link, target in links.items():
        link.symlink_to(target)
    assert names() == expected
    left_out = text_files(str(data))[1]
    assert sorted(path.name for path in left_out) == sorted(
        ["circle", "up", "around", "back", "twice", "same.jsonl"]
    )
    # with ** Python's glob would try every way through the circles
    files = text_files(f"{data}/**/*.jsonl")[0]
    assert sorted(file.name for file in files) == ["a.jsonl", "b.jsonl", "c.jsonl"]
    (data / "lost").symlink_to("/no/disk")
    with refused("lost is a link to /no/disk, which is not there"):
        text_files(str(data))


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

    def watched(piece, *rest):
        read.append(piece.path.name)
        return real(piece, *rest)

    monkeypatch.setattr(texts, "read_documents", watched)
    assert call_cli(monkeypatch, capsys, *argv)[0] == 0
    assert read == []
    (tmp_path / "out" / "index.json").unlink()
    parquet(tmp_path / "in" / "b.parquet", ["other", *DOCUMENTS[1:]])
    assert call_cli(monkeypatch, capsys, *argv)[0] == 0
    assert read == ["b.parquet"]
    status, _, err = call_cli(
        monkeypatch, capsys, "show", tmp_path / "out", "--tokenizer", tokenizer[0]
    )
    assert status == 2
    assert "these are token shards; show the text" in err


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
    with refused("unpacks to more than 268,435,456 bytes, 1000 times its size"):
        [None for _ in unpacked(path)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.txt.gz"])
def test_a_line_has_a_limit(tmp_path, monkeypatch, name):
    """A line is read, split and tokenized at once: an endless one would take all memory. A plain .txt
    may be one line: it is cut elsewhere."""
    monkeypatch.setattr(texts, "LINE_LIMIT", 1 << 21)
    path = tmp_path / name
    content = (
        b'{"text": "a"}\n'
        + b'{"text": "%s"}\n' % random.Random(0).randbytes(2 << 20).hex().encode()
    )
    if path.suffix == ".gz":
        content = gzip.compress(content)
    path.write_bytes(content)
    with refused("has a line of more than 2,097,152 bytes, which is absurd"):
        texts.cut_into_pieces([path], "<eot>")
        list(texts.json_lines(texts.Piece(path, 0, None, "hash", True)))
