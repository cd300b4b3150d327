"""Mixtures, against corpus/mixture.py and data.MixedData: exact shares at every prefix, parts in
their own order, val_data."""

import dataclasses
import json
import math
import os
import random
import re
import resource

import numpy as np
import pytest
import torch
from chats import chat_folder, conversations
from corpora import flat, sentences, take
from observe import observed
from runs import MODEL, as_json_lines
from saves import refused

import train_llama3
from corpus.build import build_shards
from corpus.cache import parse_mixture
from corpus.mixture import LONGEST_PERIOD, take_turns
from corpus.shards import opened_array
from corpus.special import find_tokenizer
from data import DataConfig, MixedData, TokenData, open_data
from sft.chat_data import ChatData
from storage.changes import changes

T = 32


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Folders of shards: web, code and tiny with the same tokenizer, other with another; a text;
    all beside the cache."""
    root = tmp_path_factory.mktemp("sources")
    for i, (name, n) in enumerate(
        {"web": 300, "code": 120, "tiny": 12, "other": 60, "text": 90}.items()
    ):
        documents = [sentences(1 + j % 7, seed=1000 * i + j) for j in range(n)]
        (root / f"{name}.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in documents)
        )
    first = open_data(DataConfig(data=str(root / "web.jsonl"), cache_dir=str(root)), T).folder
    for name in ("web", "code", "tiny"):
        build_shards([root / f"{name}.jsonl"], find_tokenizer(str(first)), root / name)
    second = open_data(DataConfig(data=str(root / "other.jsonl"), cache_dir=str(root)), T).folder
    build_shards([root / "other.jsonl"], find_tokenizer(str(second)), root / "other")
    return root


def mixed(root, data="web={}/web:0.6,code={}/code:0.3,tiny={}/tiny:0.1", **flags) -> MixedData:
    return open_data(
        DataConfig(data=data.replace("{}", str(root)), cache_dir=str(root), **flags),
        T,
        Chats=ChatData,
    )


# ---- turns ---------------------------------------------------------------------------------------


def shares_of(words: random.Random) -> list[int]:
    shares = []
    for _ in range(words.choice((1, 2, 3, 5, 12, 40))):
        shares.append(words.randint(1, words.choice((3, 20, 300))))
    shares[0] *= words.choice((1, 1, 30))
    return [share // math.gcd(*shares) for share in shares]


# The obvious rule, next comes the part furthest behind, leaves a part with these shares 1.4
# sequences behind.
UNEVEN = [3, 8, 1, 1, 8, 8, 60, 60, 1, 13, 1, 3, 2, 1, 60, 1]


@pytest.mark.parametrize("seed", range(7))
def test_shares_are_exact_at_any_prefix(seed):
    """At 50 random prefixes and more: of n sequences a part has given its share of n, within one;
    also after billions."""
    words = random.Random(seed)
    if seed:
        shares = shares_of(words)
    else:
        shares = UNEVEN
    turns, total, weights = take_turns(shares), sum(shares), np.array(shares, object)
    for n in [
        *range(total + 2),
        10**15 + 7,
        *(words.randrange(10 ** words.randint(1, 13)) for _ in range(50)),
    ]:
        counts = turns.counts(n)
        assert counts.sum() == n, (shares, n)
        assert (abs(counts.astype(object) * total - n * weights) < total).all(), (shares, n)
        (part,), (number,) = turns.at(np.array([n]))
        # a part's sequences come one by one
        assert number == counts[part]
        assert turns.counts(n + 1)[part] == number + 1
    seen = np.bincount(turns.at(np.arange(5 * total))[0], minlength=len(shares))
    assert (seen == 5 * np.array(shares)).all()


def test_the_turns_of_today_are_those_of_tomorrow():
    """A continued run reads on where it stopped, in any version. Worked out by hand from the rule;
    where two deadlines are equal, the first part comes first."""
    assert take_turns([3, 2, 2]).part.tolist() == [0, 1, 2, 0, 0, 1, 2]
    assert take_turns([1, 1, 1]).part.tolist() == [0, 1, 2]
    assert take_turns([1, 2, 1]).part.tolist() == [1, 0, 1, 2]
    # place 1: the deadline of part 2 is 16 / 5, rounded up 4, as that of part 1
    assert take_turns([1, 2, 5]).part.tolist() == [2, 1, 2, 2, 2, 0, 1, 2]


def test_weights_are_shares():
    """With any sum, in any order, as decimals or fractions."""
    parts = parse_mixture("web=a b:c/web:0.7,code=stdlib:0.3")
    assert [(part.name, part.path, part.share) for part in parts] == [
        ("code", "stdlib", 3),
        ("web", "a b:c/web", 7),
    ]
    for same in (
        "code=stdlib:3,web=a b:c/web:7",
        "web=a b:c/web:1/3, code=stdlib:1/7",
        "web=a b:c/web:14e9,code=stdlib:6e9",
    ):
        assert parse_mixture(same) == parts
    assert parse_mixture("tokens/web") == parse_mixture("tokens/web")[:1]
    assert parse_mixture("tokens/web")[0].name == ""
    assert sum(part.share for part in parse_mixture("a=a:0.12345,b=b:0.87655")) <= LONGEST_PERIOD


# ---- the sequences -------------------------------------------------------------------------------


def test_each_part_has_its_own_order_and_epochs(sources):
    """Row by row, against the parts opened alone; a part begins again after its last sequence."""
    data = mixed(sources)
    alone = {name: TokenData(sources / name, T, name=name) for name in ("web", "code", "tiny")}
    n = 14 * alone["tiny"].n_samples
    rows = flat(take(data.batches(0, n, n, 0, 1, "cpu"), 1))
    counts, found = dict.fromkeys(alone, 0), {name: [] for name in alone}
    turn, _ = data.turns.at(np.arange(n))
    for row, i in zip(rows, turn):
        name = sorted(alone)[i]
        expected = alone[name].sequences(np.array([counts[name]]))[0][0]
        assert row.tolist() == expected.tolist()
        counts[name] += 1
        found[name].append(tuple(row.tolist()))
    tiny = alone["tiny"].n_samples
    # each once in an epoch
    assert len(set(found["tiny"][:tiny])) == tiny == len(set(found["tiny"])) < len(found["tiny"])
    assert data.epochs(n) == {
        "data_epochs": {name: counts[name] / alone[name].n_samples for name in sorted(alone)}
    }
    assert data.plan(n).count("\n") == 3
    assert "web: 60 % of the sequences, 15,298 tokens, 0.282 epochs" in data.plan(n)
    # two parts of the same data do not go side by side
    assert TokenData(sources / "tiny", T).sequences(np.arange(5))[0].tolist() != (
        alone["tiny"].sequences(np.arange(5))[0].tolist()
    )


@pytest.mark.parametrize("doc_mask", [False, True])
def test_mixed_batches_are_the_same_in_every_layout_and_from_any_cursor(sources, doc_mask):
    data = mixed(sources, doc_mask=doc_mask)
    names = ["tokens", "labels", "positions"] + ["doc_ids"] * doc_mask
    straight = take(data.batches(0, 12, 12, 0, 1, "cpu"), 6)
    split = [take(data.batches(0, 12, 1, rank, 4, "cpu"), 6) for rank in range(4)]
    for step, one in enumerate(straight):
        for name in names:
            assert torch.equal(flat([part[step] for part in split], name), flat([one], name))
    for cursor, size in (12, 12), (7, 20), (61, 11):
        assert torch.equal(
            flat(take(data.batches(cursor, size, size, 0, 1, "cpu"), 1)),
            flat(straight)[cursor : cursor + size],
        )
    far = take(data.batches(3 * 10**12, 12, 4, 0, 1, "cpu"), 1)  # as quick as the first
    assert len(far[0].tokens) == 3
    turned = mixed(sources, "tiny={}/tiny:1,web={}/web:6,code={}/code:3", doc_mask=doc_mask)
    assert turned.fingerprint == data.fingerprint
    assert [b.hash for b in take(turned.batches(0, 12, 12, 0, 1, "cpu"), 6)] == [
        b.hash for b in straight
    ]


def test_changed_weights_and_parts_are_other_data(sources):
    known = mixed(sources).fingerprint
    other = mixed(sources, "web={}/web:0.5,code={}/code:0.4,tiny={}/tiny:0.1").fingerprint
    assert [*changes(known, other, "data")] == [
        ("data.parts.code.weight", "3/10", "2/5"),
        ("data.parts.web.weight", "3/5", "1/2"),
    ]
    renamed = mixed(sources, "web={}/web:0.6,code={}/code:0.3,small={}/tiny:0.1").fingerprint
    assert {name for name, _, _ in changes(known, renamed, "data")} == {
        "data.parts.small",
        "data.parts.tiny",
    }
    assert json.loads(json.dumps(known)) == known


def test_parts_are_what_data_accepts(sources, capsys):
    """A text beside shards gets the shards' tokenizer; several texts share the tokenizer of the
    first text."""
    data = mixed(sources, "text={}/text.jsonl:1,web={}/web:1")
    assert {part.vocab_size for part in data.parts} == {data.vocab_size}
    assert data.tokenizer_file == (data.parts[0].tokenizer_file)
    assert (
        data.parts[0].fingerprint["tokenizer_sha256"]
        == data.fingerprint["tokenizer_sha256"]
        == (mixed(sources).fingerprint["tokenizer_sha256"])
    )
    texts = mixed(sources, "a={}/text.jsonl:1,b={}/code.jsonl:1")
    assert texts.fingerprint["tokenizer_sha256"] not in (data.fingerprint["tokenizer_sha256"], None)
    assert texts.first_words()
    with refused(
        "--data other and --data web", "different tokenizers", "390 ids", "719 ids", "sha256"
    ):
        mixed(sources, "web={}/web:1,other={}/other:1")
    with refused("gone: no such file; need .txt"):
        mixed(sources, "web={}/web:1,no={}/gone:1")
    with refused("none.txt"):
        mixed(sources, "web={}/web:1,none={}/none.txt:1")
    (sources / "short.txt").write_text("a model reads.")
    with refused("--data short=", "training tokens", "a longer text"):
        mixed(sources, "web={}/web:1,short={}/short.txt:1")


def test_conversations_beside_text(tmp_path):
    folder = chat_folder(tmp_path / "qwen", "qwen3")
    (tmp_path / "a.jsonl").write_text(as_json_lines(conversations(120, seed=3, most_turns=2)))
    (tmp_path / "b.txt").write_text(sentences(300, 3))
    data = mixed(
        tmp_path, "chat={}/a.jsonl:1,text={}/b.txt:1", tokenizer=str(folder), doc_mask=True
    )
    batch = take(data.batches(0, 8, 8, 0, 1, "cpu"), 1)[0]
    turn, _ = data.turns.at(np.arange(8))
    kept = (batch.labels[0] >= 0).float().mean(1)
    assert sorted(turn) == [0] * 4 + [1] * 4
    assert (kept[turn == 0] < 0.95).all()
    assert (kept[turn == 1] > 0.95).all()
    assert [len(found.val_sets(3)) for found in (data, *data.parts)] == [2, 1, 1]


# ---- validation ----------------------------------------------------------------------------------


def test_validation_of_a_mixture_has_its_shares(sources):
    data = mixed(sources)
    for n, ranks, local in (10, 1, 4), (10, 2, 3), (2, 3, 1), (10**6, 1, 8):
        found = []
        for rank in range(ranks):
            found.append(take(data.val_batches(n, local, rank, ranks, "cpu"), 10**6))
        assert len({len(batches) for batches in found}) == 1
        counts = np.minimum(data.turns.counts(n), [part.n_val_samples for part in data.parts])
        assert sum(batch.samples for batch in found[0]) == counts.sum()
        assert (
            sum(int((flat(batches, "labels") >= 0).any(1).sum()) for batches in found)
            == counts.sum()
        )


def test_val_data_is_validated_whole(sources):
    """Both splits of --val_data are for validation; the order of training stays the same."""
    plain, loaded = (
        mixed(sources, "{}/web"),
        mixed(sources, "{}/web", val_data=str(sources / "tiny")),
    )
    tiny = TokenData(sources / "tiny", T)
    windows = flat(take(loaded.val_batches(10**6, 4, 0, 1, "cpu"), 10**6))
    stream = np.concatenate(
        [
            tiny.shard(split, i)
            for split in ("train", "val")
            for i in range(len(tiny.entries[split]))
        ]
    )
    rows = {tuple(stream[i : i + T].tolist()) for i in range(0, len(stream) - T, T)}
    assert rows <= {tuple(row) for row in windows.tolist()}
    assert loaded.n_val_samples == -(-(len(stream) - 1) // T)
    assert loaded.fingerprint == plain.fingerprint
    assert [b.hash for b in take(loaded.batches(0, 8, 8, 0, 1, "cpu"), 3)] == [
        b.hash for b in take(plain.batches(0, 8, 8, 0, 1, "cpu"), 3)
    ]
    both = mixed(sources, "{}/web", val_data=f"a={sources}/code:1,b={sources}/text.jsonl:1")
    assert len(both.validation.val_sets(8)) == 2
    assert both.first_words() == plain.first_words()
    with refused("--val_data", "different tokenizers"):
        mixed(sources, "{}/web", val_data=str(sources / "other"))
    with refused("gone.txt: no such file"):
        mixed(sources, "{}/web", val_data=str(sources / "gone.txt"))
    with refused("--val_data", "lacks"):
        mixed(sources, "{}/web", val_data=f"a={sources}/code")


def test_validation_tells_each_part(sources, tmp_path):
    """The whole is the mean over all tokens of all parts."""
    # weights stay the same
    flags = dict(
        model_args=MODEL,
        seq_len=T,
        local_batch_size=2,
        steps=2,
        val_every=2,
        val_batches=1,
        log_every=1,
        warmup_steps=1,
        device="cpu",
        compute_dtype="float32",
        checkpoint_every=2,
        lr=0.0,
    )
    data = f"web={sources}/web:0.5,code={sources}/code:0.5"
    cfg = train_llama3.Config(**flags, data=data, out=str(tmp_path / "mixed"))
    seen = observed("train_llama3", cfg)
    assert not seen.error, seen.error
    (line,) = (line for line in seen.log if "val_loss" in line)
    parts = line["val_loss_by_part"]
    assert [*parts] == [
        "code",
        "web",
    ]
    assert f"  code {parts['code']:.4f}  web {parts['web']:.4f}\n" in seen.printed
    loaded, counts = mixed(sources, data), {}
    for batch in take(loaded.val_batches(8, 2, 0, 1, "cpu"), 100):
        counts[batch.part] = counts.get(batch.part, 0) + int((batch.labels >= 0).sum())
    mean = sum(parts[name] * n for name, n in counts.items()) / sum(counts.values())
    assert line["val_loss"] == pytest.approx(mean, abs=1e-6)
    assert parts["web"] != parts["code"]
    assert [line["data_epochs"].keys() for line in seen.lines] == [{"code", "web"}] * 2
    for name, epochs in seen.lines[-1][
        "data_epochs"
    ].items():  # the start says how the run will end
        promised = re.search(rf"^{name}: 50 % .* tokens, (\S+) epochs$", seen.printed, re.M)
        assert promised[1] == f"{epochs:.3g}", seen.printed
    alone = observed(
        "train_llama3",
        dataclasses.replace(cfg, data=str(sources / "web"), out=str(tmp_path / "web")),
    )
    assert not any("val_loss_by_part" in line or "data_epochs" in line for line in alone.log)
    four = TokenData(sources / "web", T)  # the mixture takes the first four sequences of the part
    rows = []
    for x, n in ((loaded, 8), (four, 4)):
        rows.append(
            flat(
                [
                    batch
                    for batch in take(x.val_batches(n, 2, 0, 1, "cpu"), 9)
                    if batch.part in ("", "web")
                ]
            )
        )
    assert torch.equal(*rows)


# ---- files and runs ------------------------------------------------------------------------------


def test_many_parts_keep_few_files_open(sources):
    """All parts, training and validation by turns, in a process that may open only 48 more files."""
    many = sources / "many"
    (many / "in").mkdir(parents=True)
    for i in range(60):
        lines = [json.dumps({"text": sentences(4, seed=100 * i + j)}) + "\n" for j in range(3)]
        (many / "in" / f"{i:02}.jsonl").write_text("".join(lines))
    build_shards(
        sorted((many / "in").iterdir()), find_tokenizer(str(sources / "web")), many / "out"
    )

    def read():
        data, found = (
            mixed(
                sources,
                "a={}/many/out:1,b={}/many/out:2,c={}/many/out:3",
                val_data=str(many / "out"),
            ),
            [],
        )
        training = data.batches(0, 64, 64, 0, 1, "cpu")
        for _ in range(4):
            found += [next(training), *data.val_batches(64, 64, 0, 1, "cpu")]
        training.close()
        return flat(found)

    expected, before = read(), resource.getrlimit(resource.RLIMIT_NOFILE)
    opened_array.cache_clear()
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 48, before[1])
        )
        found = read()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert torch.equal(found, expected)
