"""From a sequence back to file and line: every label of every training sequence is in the text of the
line that is named."""

import gzip
import json
import random
from pathlib import Path

import pytest
from runs import column

import corpus.build
import corpus.origins
from corpus.build import build_shards
from corpus.origins import files_of_parts, find_origin, spans_of
from corpus.special import find_tokenizer
from corpus.tokenizer import load_tokenizer
from data import DataConfig, open_data

WORDS = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu".split()


def stories(n: int, seed: int) -> list[str]:
    """Texts that no other text contains: each word has a number."""
    draw = random.Random(seed)
    found = []
    for i in range(n):
        found.append(" ".join(f"{draw.choice(WORDS)}{seed}{i}" for _ in range(draw.randint(3, 30))))
    return found


def write_jsonl(path: Path, texts: list[str]):
    """With blank lines, null and an empty text between them, which are no documents."""
    lines = [json.dumps({"text": text}) for text in texts]
    lines[3:3] = ["", '{"text": null}', '{"text": ""}']
    content = "\n".join(lines).encode() + b"\n"
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def check_every_label(data, files, text_of_place) -> int:
    """Compare each document of each window with the text of its place; returns how many documents
    there were. text_of_place: function (file, place) -> text."""
    decode = load_tokenizer(Path(data.tokenizer_file)).decode
    seen = set()
    for number in range(data.n_samples):
        [window] = data.windows("train", [number])
        spans = spans_of(data, number)
        ends = [0, *(span.end for span in spans)]
        assert [span.start for span in spans] == ends[:-1]
        assert ends[-1] == data.seq_len
        for span in spans:
            ids = window[span.start + 1 : span.end + 1]
            text = decode(ids[ids != data.eot].tolist())
            origin = find_origin(data, span, files)
            # a token may end in the middle of a letter
            assert text.strip("\ufffd") in text_of_place(*origin), (number, span, origin)
            seen.add(origin)
    return len(seen)


def lines_of(file: str) -> list[str]:
    if file.endswith(".gz"):
        read = gzip.open
    else:
        read = open
    with read(file, "rt") as lines:
        return lines.read().split("\n")


def text_of_line(file: str, place: str) -> str:
    word, number = place.split()
    assert word == "line"
    return json.loads(lines_of(file)[int(number) - 1])["text"]


@pytest.mark.parametrize("name", ["few.jsonl", "many.jsonl", "packed.jsonl.gz"])
def test_lines_of_json(tmp_path, monkeypatch, name):
    """Also of a file in many pieces, whose documents are split into training and validation by
    hash."""
    monkeypatch.setattr(corpus.build, "piece_size", lambda paths: 4000)
    path = tmp_path / name
    write_jsonl(path, stories(40 if name == "few.jsonl" else 300, seed=1))
    cfg = DataConfig(data=str(path), cache_dir=str(tmp_path / "cache"))
    data = open_data(cfg, 16)
    pieces = len(data.entries["train"])
    assert (pieces > 3) == (name == "many.jsonl")
    found = check_every_label(data, files_of_parts(cfg.data, cfg.cache_dir)[""], text_of_line)
    assert found == sum(column(data.entries["train"], "documents"))


def test_lines_of_text(tmp_path, monkeypatch):
    """The line where the excerpt begins, in a file of several pieces with several documents."""
    monkeypatch.setattr(corpus.build, "piece_size", lambda paths: 4000)
    path = tmp_path / "book.txt"
    texts = stories(300, seed=2)
    texts[150] += "<|endoftext|>"
    path.write_text("\n".join(texts) + "\n")
    cfg = DataConfig(data=str(path), cache_dir=str(tmp_path / "cache"))
    data = open_data(cfg, 16)
    assert len(data.entries["train"]) > 3
    lines = path.read_text().split("\n")

    def from_line(file, place):
        # an excerpt goes over some lines, and may begin with the end of a line
        begin = int(place.split()[1]) - 1
        return "\n".join(lines[begin : begin + 6]).replace("<|endoftext|>", "")

    assert check_every_label(data, files_of_parts(cfg.data, cfg.cache_dir)[""], from_line) > 100


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("kind", ["txt", "jsonl"])
def test_lines_of_many_small_files(tmp_path, monkeypatch, kind, shared):
    """Many files share a shard: a place in the shard is a file and its line. Not shared: as before
    0.11, when each file had a shard of its own."""
    if not shared:
        one_each = lambda pieces, size: [[piece] for piece in pieces]  # noqa: E731
        monkeypatch.setattr(corpus.build, "share_shards", one_each)
    monkeypatch.setattr(corpus.build, "piece_size", lambda paths: 4000)
    monkeypatch.setattr(corpus.origins, "piece_size", lambda paths: 4000)
    for i in range(70):
        texts = stories(9, seed=i)
        if kind == "jsonl":
            write_jsonl(tmp_path / f"{i:02}.jsonl", texts)
        else:
            texts[4] += "<|endoftext|>"
            (tmp_path / f"{i:02}.txt").write_text("\n".join(texts) + "\n")
    cfg = DataConfig(data=str(tmp_path), cache_dir=str(tmp_path / "cache"))
    data = open_data(cfg, 64)
    if shared:
        assert 3 < len(data.entries["train"]) < 40
    else:
        assert len(data.entries["train"]) >= 60

    def from_place(file, place):
        if kind == "jsonl":
            return text_of_line(file, place)
        begin = int(place.split()[1]) - 1
        return "\n".join(lines_of(file)[begin:]).replace("<|endoftext|>", "")

    files = files_of_parts(cfg.data, cfg.cache_dir)[""]
    assert check_every_label(data, files, from_place) > 140


def test_parts_of_a_mixture_and_shards(tmp_path):
    """Each part has files of its own; of token shards the place is the number of the document."""
    for seed, name in ((3, "first"), (4, "second")):
        write_jsonl(tmp_path / f"{name}.jsonl", stories(60, seed))
    cache = tmp_path / "cache"
    first = open_data(DataConfig(data=str(tmp_path / "first.jsonl"), cache_dir=str(cache)), 16)
    tokenizer = find_tokenizer(first.tokenizer_file)
    build_shards([tmp_path / "second.jsonl"], tokenizer, tmp_path / "shards")
    mixture = f"a={tmp_path}/first.jsonl:0.5,b={tmp_path}/shards:0.5"
    cfg = DataConfig(data=mixture, cache_dir=str(cache))
    data = open_data(cfg, 16)
    files = files_of_parts(cfg.data, cfg.cache_dir)
    assert files == {"a": [tmp_path / "first.jsonl"], "b": None}
    texts, shards = data.parts
    check_every_label(texts, files["a"], text_of_line)
    documents = [line for line in lines_of(f"{tmp_path}/second.jsonl") if "alpha" in line or line]
    documents = [json.loads(line)["text"] for line in documents]
    documents = [text for text in documents if text]

    def in_shard(file, place):
        assert file == "second.jsonl", place
        assert place.endswith("shards/train-00000.npy)"), place
        return documents[int(place.split()[1]) - 1]

    check_every_label(shards, files["b"], in_shard)


def test_a_file_with_other_documents_today_has_no_line(tmp_path):
    path = tmp_path / "some.jsonl"
    write_jsonl(path, stories(60, seed=5))
    cfg = DataConfig(data=str(path), cache_dir=str(tmp_path / "cache"))
    data = open_data(cfg, 16)
    [span, *_] = spans_of(data, 0)
    write_jsonl(path, stories(50, seed=5))
    origin = find_origin(data, span, files_of_parts(cfg.data, cfg.cache_dir)[""])
    assert origin.file == str(path)
    assert "the file has other documents today" in origin.place
