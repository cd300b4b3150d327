"""data.py prepare --from_datasets: the same shards as from the files of the data set, read once; errors
of the library are one line. Against corpus/from_datasets.py, with folders on this disk."""

import json
import sys
from pathlib import Path

import pytest
from chats import bpe
from programs import REPO, run_program
from runs import ENV

from corpus.from_datasets import file_stem, wanted_columns
from corpus.shards import read_index

WORDS = "one two three four five six seven eight nine ten".split()
ROWS = [{"text": f"{word} {number} {word}", "url": word} for number, word in enumerate(WORDS * 9)]


def write_rows(file: Path, rows: list[dict]) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.fixture
def folder(tmp_path):
    bpe(" ".join(WORDS), 300, ["<|endoftext|>"]).save(str(tmp_path / "tokenizer.json"))
    write_rows(tmp_path / "stories" / "train.jsonl", ROWS)
    return tmp_path


def prepare(folder: Path, out: str, *words: str, status=0):
    """data.py prepare into folder/out; (stdout, stderr)."""
    command = [sys.executable, "data.py", "prepare", "--tokenizer", f"{folder}/tokenizer.json"]
    command += ["--out", f"{folder}/{out}", "--workers", "1", *words]
    env = ENV | {"HF_HOME": f"{folder}/hf", "HF_HUB_OFFLINE": "1"}
    done = run_program(command, cwd=REPO, env=env)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout, done.stderr


def tokens_of(folder: Path) -> tuple:
    index = read_index(folder)
    return index["documents"], {
        split: [(entry["tokens"], entry["sha256"]) for entry in entries]
        for split, entries in index["splits"].items()
    }


def test_without_the_library_a_line_says_what_to_install(folder, monkeypatch):
    from corpus import from_datasets

    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match="needs the datasets library: pip install datasets$"):
        from_datasets.text_of_dataset("x", "", "train", "text", folder / "out")


def test_the_columns_that_are_kept():
    assert wanted_columns(["id", "text", "messages"], "text", "x") == ["text"]
    assert wanted_columns(["id", "messages", "tools"], "text", "x") == ["messages", "tools"]
    beside = ["system", "chat_template_kwargs", "conversations"]
    assert sorted(wanted_columns(["id", *beside], "text", "x")) == sorted(beside)
    assert wanted_columns(["id", "story"], "story", "x") == ["story"]
    for columns in (["id", "story"], ["tools"]):
        with pytest.raises(ValueError, match="no column 'text'.*give --text_column$"):
            wanted_columns(columns, "text", "x")


def test_a_slice_is_a_file_name():
    assert file_stem("train[:1%]") == "train-1"


def test_two_sources_or_none_are_refused(folder):
    for words, error in (
        ([], "prepare needs --input FILE"),
        (["--input", "a.txt", "--from_datasets", "x"], "two sources of text: give one of them"),
        (["--input", "a.txt", "--split", "test"], "no effect without --from_datasets NAME"),
    ):
        assert error in prepare(folder, "out", *words, status=2)[1]


def test_shards_are_those_of_the_files(folder):
    pytest.importorskip("datasets")
    out, error = prepare(folder, "a", "--from_datasets", str(folder / "stories"))
    assert f"{folder}/stories: 90 rows, text, in {folder}/a/dataset (" in out
    assert error == ""
    prepare(folder, "b", "--input", str(folder / "stories"))
    assert tokens_of(folder / "a") == tokens_of(folder / "b")
    # read once: the data set may go
    (folder / "stories" / "train.jsonl").unlink()
    again, _ = prepare(folder, "a", "--from_datasets", str(folder / "stories"))
    assert again == out
    # and another one is not taken for it
    words = ["--from_datasets", str(folder / "stories"), "--split", "test"]
    assert "name a new --out" in prepare(folder, "a", *words, status=2)[1]
    [file] = (folder / "a" / "dataset").glob("*.parquet")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    _, error = prepare(folder, "a", "--from_datasets", str(folder / "stories"), status=2)
    assert f"{file} is missing or not as it was written; delete {folder}/a/dataset" in error


def test_many_files_are_contiguous_parts(folder, monkeypatch):
    pytest.importorskip("datasets")
    from corpus import from_datasets

    monkeypatch.setenv("HF_HOME", f"{folder}/hf")
    monkeypatch.setattr(from_datasets, "FILE_BYTES", 500)
    asked = (str(folder / "stories"), "", "train", "text", folder / "out")
    paths, note = from_datasets.text_of_dataset(*asked)
    import pyarrow.parquet

    texts = []
    for path in paths:
        texts += pyarrow.parquet.read_table(path)["text"].to_pylist()
    assert len(paths) > 2
    assert texts == [row["text"] for row in ROWS]
    assert note["rows"] == 90


def test_conversations_and_a_saved_dataset(folder):
    datasets = pytest.importorskip("datasets")
    rows = [{"story": row["text"]} for row in ROWS]
    made = datasets.Dataset.from_list(rows)
    datasets.DatasetDict({"train": made, "test": made}).save_to_disk(str(folder / "saved"))
    words = ["--from_datasets", f"{folder}/saved", "--text_column", "story"]
    out, _ = prepare(folder, "c", *words, "--split", "test")
    assert "90 rows, story" in out
    _, error = prepare(folder, "d", *words, "--split", "dev", status=2)
    assert "no split 'dev'; there are train, test" in error
    assert "no column 'text'" in prepare(folder, "e", *words[:2], status=2)[1]


def test_a_subset(folder):
    pytest.importorskip("datasets")
    lines = ["---", "configs:"]
    for name, n in (("small", 20), ("large", 90)):
        write_rows(folder / "two" / f"{name}.jsonl", ROWS[:n])
        lines += [f"- config_name: {name}", f"  data_files: {name}.jsonl"]
    (folder / "two" / "README.md").write_text("\n".join([*lines, "---", ""]))
    words = ["--from_datasets", f"{folder}/two"]
    assert "20 rows, text" in prepare(folder, "s", *words, "--subset", "small")[0]
    error = prepare(folder, "t", *words, status=2)[1]
    assert "small" in error and "large" in error  # the library says which there are


def test_errors_of_the_library_are_one_line(folder):
    pytest.importorskip("datasets")
    write_rows(folder / "broken" / "train.jsonl", ROWS[:1])
    (folder / "broken" / "train.jsonl").write_text('{"text": [1}\n{"text": 2')
    for name in (f"{folder}/broken", f"{folder}/nowhere", "nobody/no-such-set"):
        out, error = prepare(folder, "x", "--from_datasets", name, status=2)
        assert error.startswith(f"error: --from_datasets {name}: ")
        assert error.count("\n") == 1
        assert out == ""
        assert not (folder / "x" / "index.json").exists()
