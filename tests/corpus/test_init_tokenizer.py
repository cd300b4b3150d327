"""The tokenizer of --init_from, against corpus/cache.py: data with other ids than the weights is
refused."""

import json
import shutil
from pathlib import Path

import pytest
from saves import IDENTITY, path, refuses, saver, tokenizer_of, trained

import train_llama3
from data import DataConfig, open_data
from flags.files import sha256_file
from storage import newest, resume
from storage.resume import check_run


def source_of(kind, folder, tokenizer) -> str:
    """Weights with or without a tokenizer: a run folder, a step folder, or a Hugging Face folder."""
    if kind == "hugging face":
        folder.mkdir()
        (folder / "model.safetensors").touch()
        if tokenizer:
            shutil.copy(f"{tokenizer}/tokenizer.json", folder)
        return str(folder)
    saver(*trained(), folder, tokenizer_file=tokenizer and f"{tokenizer}/tokenizer.json").save(
        3, {"step": 3}
    )
    if kind == "step":
        return path(folder, 3)
    return str(folder)


def start(flags, **more):
    """sha256 of the tokenizer after a start with the flags, if check_run accepts the run."""
    cfg = train_llama3.Config(**flags | more)
    data = open_data(cfg, 16, tokenizer_of(cfg))
    check_run(cfg.out, IDENTITY | {"data": data.fingerprint}, cfg)
    return data.fingerprint["tokenizer_sha256"]


@pytest.mark.parametrize("kind", ["run", "step", "hugging face"])
def test_init_from_goes_on_with_the_ids_of_its_tokenizer(tmp_path, book, kind):
    flags, first, second = book
    flags["init_from"] = source_of(kind, tmp_path / "source", first)
    its, other = (sha256_file(Path(folder, "tokenizer.json")) for folder in (first, second))
    assert start(flags) == its == start(flags, tokenizer=first) == start(flags, data=first)
    for wrong, fix in (
        (dict(tokenizer=second), "leave out --tokenizer"),
        (dict(data=second), "make the shards with"),
    ):
        refuses(
            f"another tokenizer .sha256 {its[:12]}. than the data has .{other[:12]}.*{fix}",
            start,
            flags,
            **wrong,
        )
        assert start(flags, **wrong, exclude_from_loading=["tok_embeddings", "head"]) == other
    # new ids: a new tokenizer
    assert start(flags, exclude_from_loading=["model.tok_embeddings.*"]) not in (its, other)
    assert start(flags | {"init_from": ""}) not in (its, other)


@pytest.mark.parametrize("kind", ["run", "hugging face"])
def test_weights_without_a_tokenizer_need_one(tmp_path, book, kind):
    flags, first, second = book
    flags["init_from"] = source_of(kind, tmp_path / "source", None)
    refuses(
        "tokenizer.json is missing: give the tokenizer of these weights with --tokenizer",
        start,
        flags,
    )
    assert start(flags, tokenizer=first) == start(flags, data=first)


def test_a_run_that_goes_on_keeps_the_tokenizer_it_began_with(tmp_path, book):
    """Also when the folder of --init_from is gone; and from another run folder, with everything."""
    flags, first, second = book
    flags["init_from"] = source_of("run", tmp_path / "source", first)
    its = start(flags)
    identity = IDENTITY | {
        "data": open_data(cfg := train_llama3.Config(**flags), 16, tokenizer_of(cfg)).fingerprint
    }
    saver(*trained(), flags["out"], identity, f"{first}/tokenizer.json").save(3, {"step": 3})
    shutil.rmtree(flags["init_from"])
    assert start(flags) == its
    more = dict(init_from=flags["out"], init_model_only=False, out=str(tmp_path / "third"))
    assert start(flags, **more) == its
    refuses("another tokenizer", start, flags, **more, tokenizer=second)


@pytest.mark.parametrize("kind", ["run", "hugging face"])
def test_a_tokenizer_of_the_same_ids_is_no_other_one(tmp_path, book, kind):
    """Chat models are published with another post_processor, truncation or padding than their base
    models."""
    flags, first, second = book
    flags["init_from"] = source_of(kind, tmp_path / "source", first)
    rules = json.loads(Path(first, "tokenizer.json").read_bytes())
    model = rules["model"]
    # the other spelling
    joined = []
    for pair in model["merges"]:
        if isinstance(pair, list):
            joined.append(" ".join(pair))
        else:
            joined.append(pair.split(" "))
    same = dict(
        truncation=dict(direction="Right", max_length=9, strategy="LongestFirst", stride=0),
        post_processor=dict(
            type="ByteLevel", add_prefix_space=True, trim_offsets=False, use_regex=True
        ),
        model=model | {"merges": joined},
    )
    a, b, *rest = model["vocab"]
    swapped = model["vocab"] | {a: model["vocab"][b], b: model["vocab"][a]}
    new = rules["added_tokens"][0] | dict(id=len(model["vocab"]), content="<new>")
    others = [
        dict(normalizer=dict(type="Lowercase")),
        dict(pre_tokenizer=rules["pre_tokenizer"] | {"add_prefix_space": True}),
        dict(model=model | {"merges": model["merges"][::-1]}),
        dict(model=model | {"vocab": swapped}),
        dict(added_tokens=[*rules["added_tokens"], new]),
    ]
    for i, (changes, is_same) in enumerate([(same, True), *((other, False) for other in others)]):
        (folder := tmp_path / f"other{i}").mkdir()
        file = folder / "tokenizer.json"
        file.write_text(json.dumps(rules | changes))
        shards = open_data(
            DataConfig(data=flags["data"], tokenizer=str(file), cache_dir=flags["cache_dir"]), 16
        ).folder
        for more in dict(tokenizer=str(file)), dict(data=str(shards)):
            if is_same:
                assert (
                    start(flags, **more)
                    == sha256_file(file)
                    != sha256_file(Path(first, "tokenizer.json"))
                )
            else:
                refuses("another tokenizer", start, flags, **more)


def test_a_start_reads_of_a_checkpoint_what_it_needs(tmp_path, book, monkeypatch):
    """Every rank reads several times, and a tokenizer has megabytes."""
    flags, first, second = book
    source_of("run", tmp_path / "new", first)
    read, checks = [], newest.check_files

    def watched(path, whole, names):
        read.append(names)
        return checks(path, whole, names)

    monkeypatch.setattr(newest, "check_files", watched)
    cfg = train_llama3.Config(**flags, steps=9)
    cfg = resume.keep_batch(cfg)
    check_run(cfg.out, IDENTITY, cfg)
    assert len(read) > 1
    for names in read:
        assert sorted(names) == ["config.json", "state.json"]
    for name in "state.json", "config.json", "tokenizer.json":  # each file is checked by its reader
        saver(*trained(), flags["out"], tokenizer_file=f"{first}/tokenizer.json").save(
            4, {"step": 4}
        )
        file = Path(path(flags["out"], 4), name)
        file.write_bytes(file.read_bytes()[:-1] + b" ")
        cfg = train_llama3.Config(**flags, init_from="runs/gone")
        assert tokenizer_of(cfg) == (path(flags["out"], 3), False)
        shutil.rmtree(path(flags["out"], 4))
