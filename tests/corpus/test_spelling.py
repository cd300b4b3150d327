"""Text that a tokenizer cannot spell is counted, warned of and refused; the seams of a long text add
nothing: corpus/spelling.py."""

import json

import numpy as np
import pytest
from chats import chat_folder
from corpora import call_cli, sentences, tokens
from saves import refused
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, trainers
from tokenizers import normalizers as norm
from tokenizers import pre_tokenizers as pre

from corpus import build as texts
from corpus.build import build_shards
from corpus.cache import cached_corpus
from corpus.special import TextSource, find_tokenizer
from corpus.spelling import Spelling, traits_of
from corpus.tokenizer import load_tokenizer
from data import DataConfig, open_data

ALPHABET = pre.ByteLevel.alphabet()
LEARNT = ["the cat sat on the mat, and so it is", sentences(60, 1), "▁ \n"]


def save(folder, model, trainer, pre_tokenizer=None, normalizer=None, decoder=None):
    """A tokenizer, trained on LEARNT, as a folder."""
    tokenizer = Tokenizer(model)
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.train_from_iterator(LEARNT, trainer)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def bpe(folder, *rules, model=None, **trainer):
    settings = dict(vocab_size=600, show_progress=False, special_tokens=["<unk>"]) | trainer
    return save(folder, model or models.BPE(), trainers.BpeTrainer(**settings), *rules)


def sentencepiece(folder, pre_tokenizer=None, normalizer=None, decoder=None):
    """As converters write Llama 2: spaces as ▁, bytes for the unknown."""
    special = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    decoder = decoder or decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])
    model = models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    return bpe(folder, pre_tokenizer, normalizer, decoder, model=model, special_tokens=special)


LLAMA = norm.Sequence([norm.Prepend("▁"), norm.Replace(" ", "▁")])
LOSSY = {
    "bytes": lambda folder: bpe(folder, pre.ByteLevel(add_prefix_space=False)),
    "bytes and unk": lambda folder: bpe(
        folder, pre.ByteLevel(), model=models.BPE(unk_token="<unk>")
    ),
    "metaspace": lambda folder: bpe(folder, pre.Metaspace(), model=models.BPE(unk_token="<unk>")),
    "fused": lambda folder: bpe(
        folder, pre.Metaspace(), model=models.BPE(unk_token="<unk>", fuse_unk=True)
    ),
    "dropped": lambda folder: bpe(folder, pre.Metaspace()),
    "one word": lambda folder: bpe(folder, model=models.BPE(unk_token="<unk>")),
    "unigram": lambda folder: save(
        folder,
        models.Unigram(),
        trainers.UnigramTrainer(
            vocab_size=300, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"]
        ),
        pre.Metaspace(),
    ),
}


@pytest.mark.parametrize("kind", LOSSY)
def test_characters_that_are_lost_are_counted(tmp_path, kind):
    """11 of 32 characters, whether they are dropped, or <unk>, alone or together."""
    file = LOSSY[kind](tmp_path / "t") / "tokenizer.json"
    assert not traits_of(file).spells_all
    spelling = Spelling(file)
    text = "the cat, na\u00efve caf\u00e9 \u5317\u4eac ZQ 4\tsat"
    spelling.look(text)
    lost = {"\u00ef", "\u00e9", "\u5317", "\u4eac", "Z", "Q", "\t"}
    learnt = set("".join(LEARNT))
    lost |= set(text) - learnt
    assert set(spelling.examples) == lost - {" "}
    assert (spelling.lost, spelling.characters) == (len(spelling.examples), len(text))
    if kind != "unigram":  # what the tokenizer's own decoder gives back agrees
        ids = load_tokenizer(file).encode(text, add_special_tokens=False).ids
        decoded = load_tokenizer(file).decode(ids)
        assert not lost & set(decoded)


WORDS = {"<unk>": 0, "the": 1, "cat": 2, "sat": 3, "##s": 4, ",": 5}


@pytest.mark.parametrize("model", [models.WordLevel, models.WordPiece])
def test_words_that_are_unknown_are_counted(tmp_path, model):
    """A word is known or not. White space is the border of words, and does not count."""
    tokenizer = Tokenizer(model(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    spelling = Spelling(tmp_path / "tokenizer.json")
    text = "the cat\n\tsat, the dogs sat, zebra dogs\n"
    ids = load_tokenizer(tmp_path / "tokenizer.json").encode(text).ids
    for known in (ids, None):  # a message comes without the ids of its text
        spelling.look(text, known)
    assert spelling.lost == 2 * len("dogszebradogs")
    assert dict(spelling.examples) == {"dogs": 4, "zebra": 2}


COMPLETE = {
    "bytes": lambda folder: bpe(folder, pre.ByteLevel(), initial_alphabet=ALPHABET),
    "after other steps": lambda folder: bpe(
        folder,
        pre.Sequence([pre.Split(Regex(r"\d"), "isolated"), pre.ByteLevel(use_regex=False)]),
        norm.Sequence([norm.NFC()]),
        initial_alphabet=ALPHABET,
    ),
    "byte fallback": lambda folder: sentencepiece(folder, None, LLAMA),
}


@pytest.mark.parametrize("kind", COMPLETE)
def test_tokenizers_that_spell_everything_cost_nothing(tmp_path, kind):
    folder = COMPLETE[kind](tmp_path / "t")
    assert traits_of(folder / "tokenizer.json").spells_all
    (tmp_path / "a.txt").write_text("\u5317\u4eac \u00e9\t\x01 \U0001f600" * 99)
    build_shards([tmp_path / "a.txt"], find_tokenizer(str(folder)), tmp_path / "out")
    assert "lost" not in json.loads((tmp_path / "out" / "index.json").read_text())


def test_steps_that_take_characters_out(tmp_path):
    """All bytes are in the vocabulary, but a rule before drops what it does not like."""
    steps = {
        "punctuation": (pre.Sequence([pre.Punctuation("removed"), pre.ByteLevel()]), None),
        "split": (pre.Sequence([pre.Split(",", "removed"), pre.ByteLevel()]), None),
        "replace": (pre.ByteLevel(), norm.Replace(",", "")),
    }
    for name, (pre_tokenizer, normalizer) in steps.items():
        folder = bpe(tmp_path / name, pre_tokenizer, normalizer, initial_alphabet=ALPHABET)
        spelling = Spelling(folder / "tokenizer.json")
        spelling.look("so, it, is")
        assert (spelling.lost, dict(spelling.examples)) == (2, {",": 2}), name


def test_a_loss_is_warned_of_and_refused(tmp_path, monkeypatch, capsys):
    """prepare, check, --data FILE and --data FOLDER all say it; above 5 per cent nothing is trained
    without --max_lost."""
    folder = LOSSY["bytes"](tmp_path / "t")
    base = "the cat sat on the mat, and so it is\n" * 30
    argv = ["prepare", "--tokenizer", folder, "--workers", 1, "--input"]
    for name, share, said in (("rare", 0.0005, ""), ("few", 0.01, "warning: "), ("many", 0.2, "")):
        n = round(len(base) * share / (1 - share))
        (tmp_path / f"{name}.txt").write_text(base + "\u00e9" * n)
        out = tmp_path / f"{name} tokens"
        line = f"the tokenizer cannot spell {n:,} of {len(base) + n:,} characters"
        status, stdout, stderr = call_cli(
            monkeypatch, capsys, *argv, tmp_path / f"{name}.txt", "--out", out
        )
        cfg = DataConfig(
            data=str(tmp_path / f"{name}.txt"), tokenizer=str(folder), cache_dir=str(tmp_path)
        )
        if name == "many":
            assert status == 2
            assert stderr.startswith(f"error: {line}")
            assert "--max_lost 21" in stderr
            with refused(line, "data.py prepare", "--max_lost 21"):
                open_data(cfg, 16)
            argv += [tmp_path / "many.txt", "--out", out, "--max_lost"]
            assert call_cli(monkeypatch, capsys, *argv, 21)[0] == 0
            cfg = DataConfig(data=str(out))
        else:
            assert status == 0
            assert f"\n{said}{line}" in stdout
            assert "'\u00e9'" in stdout
        status, stdout, _ = call_cli(monkeypatch, capsys, "check", out)
        if name != "rare":
            warned = "warning: "
        else:
            warned = ""
        assert status == 0
        assert f"\n{warned}{line}" in stdout
        for _ in range(2):  # also when the shards are there already
            open_data(cfg, 16)
            assert (f"warning: --data {cfg.data}: {line}" in capsys.readouterr().out) == bool(
                warned
            )
    status, _, stderr = call_cli(monkeypatch, capsys, *argv, 101)
    assert status == 2
    assert "--max_lost 101" in stderr
    # shards of before do not tell
    index = json.loads((out / "index.json").read_text())
    del index["lost"]
    (out / "index.json").write_text(json.dumps(index))
    assert "it was not counted what was lost" in call_cli(monkeypatch, capsys, "check", out)[1]


def test_conversations_are_counted(tmp_path):
    folder = chat_folder(tmp_path / "qwen", "qwen3")
    rules = json.loads((folder / "tokenizer.json").read_text())
    for byte in ("\u00e5", "\u00c3"):  # the first of 北, and of é
        rules["model"]["vocab"].pop(byte, None)
    rules["model"]["merges"] = []
    (folder / "tokenizer.json").write_text(json.dumps(rules))
    turns = [{"role": "user", "content": "\u5317?"}, {"role": "assistant", "content": "caf\u00e9"}]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    with refused("cannot spell 2 of 6 characters (33.33 %)"):
        build_shards([tmp_path / "a.jsonl"], find_tokenizer(str(folder)), tmp_path / "x")


# ---- seams


SEAMS = {
    "prepend": lambda folder: sentencepiece(folder, None, LLAMA),
    "always": lambda folder: sentencepiece(folder, pre.Metaspace(prepend_scheme="always")),
    "first": lambda folder: sentencepiece(
        folder, pre.Metaspace(prepend_scheme="first", split=False)
    ),
    "bytes with a space": lambda folder: bpe(
        folder,
        pre.ByteLevel(add_prefix_space=True),
        None,
        decoders.ByteLevel(),
        initial_alphabet=ALPHABET,
    ),
    "strip": lambda folder: bpe(
        folder,
        pre.ByteLevel(add_prefix_space=False),
        norm.Strip(),
        decoders.ByteLevel(),
        initial_alphabet=ALPHABET,
    ),
}


@pytest.mark.parametrize("kind", SEAMS)
@pytest.mark.parametrize("newlines", [True, False])
def test_a_long_document_is_as_it_was_written(tmp_path, kind, newlines):
    """Segments and pieces of a long text: no space is added or lost where they meet."""
    folder = SEAMS[kind](tmp_path / "t")
    assert traits_of(folder / "tokenizer.json").has_seams
    # indented lines, as in Python
    lines = [" " * (i % 5) + line for i, line in enumerate(sentences(3000, 5).splitlines())]
    text = ("\n" if newlines else " ").join(lines) + "end"
    documents = [text, "short", text[:70_000]]
    (tmp_path / "a.txt").write_text("</s>".join(documents))
    monkey = pytest.MonkeyPatch()
    monkey.setattr(texts, "piece_size", lambda paths: 100_000)
    with monkey.context():
        build_shards([tmp_path / "a.txt"], find_tokenizer(str(folder)), tmp_path / "out")
    monkey.undo()
    written = tokens(tmp_path / "out")
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    eot = tokenizer.token_to_id("</s>")
    ids = np.array(written["train"] + written["val"], np.int64)
    parts = np.split(ids, np.flatnonzero(ids == eot) + 1)
    found = [tokenizer.decode(part.tolist()) for part in parts if len(part)]
    if kind in ("bytes with a space", "strip"):
        # the first adds one at the beginning, the second takes it away
        found = [part.strip() for part in found]
    # the last twentieth, for validation, is a document of its own
    assert found[:2] == [part.strip() if kind == "strip" else part for part in documents[:2]]
    assert "".join("".join(found[2:]).split()) == "".join(documents[2].split())


def test_half_a_word_is_no_word(tmp_path):
    """A line of 300,000 characters is cut between words, where a tokenizer knows whole words."""
    tokenizer = Tokenizer(models.WordLevel({"<unk>": 0, "abcdefg": 1}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre.Whitespace()
    tokenizer.add_special_tokens(["</s>"])
    (tmp_path / "t").mkdir()
    tokenizer.save(str(tmp_path / "t" / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "abcdefg " * 40_000}))
    build_shards([tmp_path / "a.jsonl"], find_tokenizer(str(tmp_path / "t")), tmp_path / "out")
    assert tokens(tmp_path / "out")["train"] == [1] * 40_000 + [2]


def test_names_of_the_cache_change_only_with_the_content(tmp_path):
    """A text that is one segment, and a tokenizer that spells everything and adds nothing, keep the
    names that they had."""
    short, long = tmp_path / "short.txt", tmp_path / "long.txt"
    short.write_text(sentences(20, 1))
    long.write_text(sentences(3000, 1))
    plain = COMPLETE["bytes"](tmp_path / "plain")
    rules = json.loads((plain / "tokenizer.json").read_text())
    rules["pre_tokenizer"]["add_prefix_space"] = False
    (plain / "tokenizer.json").write_text(json.dumps(rules))
    llama = SEAMS["prepend"](tmp_path / "llama")
    lossy = LOSSY["bytes"](tmp_path / "lossy")
    stems = []
    for text, tokenizer in ((short, plain), (long, plain), (short, llama), (long, llama)):
        folder = cached_corpus(str(text), TextSource(str(tokenizer)), str(tmp_path / "cache"))
        stems.append(len(old_name(text, tokenizer) & {folder.name}))
    assert stems == [1, 1, 1, 0]
    folder = cached_corpus(str(short), TextSource(str(lossy)), str(tmp_path / "cache"))
    assert folder.name not in old_name(short, lossy)


def old_name(text, folder) -> set[str]:
    """The name in the cache before tokenizers were looked at."""
    from corpus.shards import cache_name
    from flags.files import sha256_file

    rules = sha256_file(folder / "tokenizer.json"), []
    stat = text.stat()
    stats = [(str(text), stat.st_size, stat.st_mtime_ns)]
    return {f"{text.stem}-{cache_name(False, rules, stats)}"}
