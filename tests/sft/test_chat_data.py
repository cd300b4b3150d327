"""Conversations as training data, against data.py: shards with masks, first-fit sequences, and the
same loss packed or not."""

import itertools
import json
import re
import shutil
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from chats import chat_folder, conversations, judged
from corpora import call_cli, change_index, copy_of, take
from layouts import Flags, drawn, initialised
from runs import MODEL, as_json_lines, column, having, launch, metrics, run, train_lines
from saves import refused, tokenizer_of
from transformers import AutoTokenizer

import data
import finetune
import train_llama3
from corpus.build import build_shards
from corpus.commands import documents_of
from corpus.special import find_tokenizer
from data import DataConfig, open_data
from flags.config import override_fields
from models.deepseek import DeepSeekConfig
from models.llama3 import Llama3, Llama3Config
from models.qwen3 import Qwen3Config
from sft import chat_data
from sft.chat_data import ChatData, first_fit
from storage.hf import load_hf_model, save_hf
from storage.saved import load_model

T = 192
NAMES = ("tokens", "labels", "positions", "doc_ids")


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    """(folder with chat.jsonl, tokenizer and cache; [(ids, mask)] by transformers) of 200
    conversations with at most T / 2 tokens and 20 that are too long."""
    root = tmp_path_factory.mktemp("chats")
    chat_folder(root / "qwen", "qwen3")
    theirs = AutoTokenizer.from_pretrained(chat_folder(root / "judge", "qwen3", marks=True))
    short, long = [], []
    for record in conversations(900, seed=5, most_turns=3):
        ids, mask = judged(theirs, record)
        n, document = len(ids), (record, ids, mask)
        (short if n <= T // 2 else long if n > T + 1 else []).append(document)
    assert len(short) >= 200
    assert len(long) >= 20
    chosen = short[:200] + long[:20]
    (root / "chat.jsonl").write_text("".join(json.dumps(record) + "\n" for record, _, _ in chosen))
    return root, [(tuple(ids[: T + 1]), tuple(mask[: T + 1])) for _, ids, mask in chosen]


def opened(chats, seq_len=T, **flags) -> ChatData:
    root = chats[0]
    cfg = DataConfig(
        **dict(data=str(root / "chat.jsonl"), tokenizer=str(root / "qwen"), cache_dir=str(root))
        | flags
    )
    return open_data(cfg, seq_len, Chats=ChatData)


def epoch(loaded):
    """All training sequences in the order of the first epoch, a Batch of one sequence each."""
    return take(loaded.batches(0, 1, 1, 0, 1, "cpu"), loaded.n_samples)


def documents_of_rows(batches, eot):
    """[(ids, mask)] of the documents in the sequences, separated by doc_ids, with a loop over the tokens. The last token of a
    longest document is only a label."""
    out = []
    for batch in batches:
        tokens, labels, positions, docs = (getattr(batch, name)[0, 0].tolist() for name in NAMES)
        found = {}
        for t, (token, label, position, doc) in enumerate(zip(tokens, labels, positions, docs)):
            ids, mask = found.setdefault(doc, ([], [0]))
            assert position == len(ids)  # positions restart with each document
            ids.append(token)
            assert (
                label == -100
                or t == len(tokens) - 1
                or label == tokens[t + 1]
                and doc == docs[t + 1]
            )
            mask.append(int(label != -100))
            if t == len(tokens) - 1 and label != -100:
                ids.append(label)
        assert list(found) == list(range(len(found)))
        out += [(tuple(ids), tuple(mask[: len(ids)])) for ids, mask in found.values()]
    return [(ids, mask) for ids, mask in out if any(mask)]


def test_sequences_hold_every_conversation_once(chats):
    """The same ids and masks as transformers, and each label at the token before."""
    loaded = opened(chats, doc_mask=True)
    assert isinstance(loaded, ChatData)
    n_val = len(loaded.packing["val"].documents)
    found = documents_of_rows(epoch(loaded), loaded.eot)
    # the first token is never a label
    expected = {(ids, (0, *mask[1:])) for ids, mask in chats[1] if any(mask[1:])}
    # ends with the row, without a label at the end
    last = {(ids[:-1], mask[:-1]) for ids, mask in expected if not mask[-1]}
    assert set(found) <= expected | last
    assert len(found) + n_val == len(chats[1]) - loaded.packing["train"].n_left_out - (
        loaded.packing["val"].n_left_out
    )
    assert 5 < n_val < 40
    assert sum(sum(mask) for _, mask in found) == sum(
        int((b.labels >= 0).sum()) for b in epoch(loaded)
    )


def test_nothing_predicts_how_a_conversation_begins(tmp_path):
    """If the assistant speaks first, the first token has no label; an answer of a single token
    leaves nothing to learn."""
    folder = chat_folder(tmp_path / "first", "llama3")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% "
        "endgeneration %}{% else %}"
        "{{ m.content }}{% endif %}{% endfor %}"
    )
    said = [
        [("assistant", "think"), ("user", " so")],
        [("assistant", "<|eot_id|>"), ("user", " think so")],
    ] * 10
    lines = []
    for turns in said:
        lines.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    (tmp_path / "chat.jsonl").write_text(as_json_lines(lines))
    loaded = opened((tmp_path,), seq_len=64, doc_mask=True, tokenizer=str(folder))
    train = loaded.packing["train"]
    ids, masks = zip(*documents_of(tmp_path / "chat.jsonl", folder / "tokenizer.json", 0))
    assert sum(masks[1]) == masks[1][0] == 1 == masks[0][0] < sum(masks[0])
    left_out = train.n_left_out
    assert left_out in (9, 10), f"{left_out} of 10 conversations without another label are left out"
    assert {n for _, _, n in train.documents} == {len(ids[0])}
    labels = sum(int((row.labels >= 0).sum()) for row in epoch(loaded))
    n = len(train.documents)
    assert labels == n * sum(masks[0][1:]), f"{n} conversations, whose first token is no label"


def test_a_conversation_without_any_token_is_none(tmp_path):
    """ShareGPT's names in any spelling are known; a role that a template does not write may take the whole conversation
    out."""
    folder = chat_folder(tmp_path / "qwen", "qwen3")
    strange = {"conversations": [{"from": "developer", "value": ""}]}
    known = {"conversations": [{"from": "Human", "value": "x"}, {"from": "GPT", "value": "y"}]}
    (tmp_path / "chat.jsonl").write_text(as_json_lines((strange, known, strange)))
    loaded = opened((tmp_path,), tokenizer=str(folder))
    (row,) = epoch(loaded)
    labels = [token for token in row.labels[0, 0].tolist() if token >= 0]
    said = data.load_tokenizer(folder / "tokenizer.json").decode(labels, skip_special_tokens=False)
    assert said == "<think>\n\n</think>\n\ny<|im_end|>\n"


def test_one_conversation_each_without_doc_mask(chats):
    loaded, packed = opened(chats), opened(chats, doc_mask=True)
    rows = epoch(loaded)
    assert loaded.n_samples == len(loaded.packing["train"].documents) > packed.n_samples
    for row in rows:
        assert row.doc_ids is None
        assert (row.positions == torch.arange(T)).all()
    assert sum(int((row.labels >= 0).sum()) for row in rows) == sum(
        int((row.labels >= 0).sum()) for row in epoch(packed)
    )
    assert loaded.fingerprint != packed.fingerprint
    padded = {(*ids[:T], *[loaded.eot] * (T - len(ids))) for ids, _ in chats[1]}
    assert {tuple(row.tokens[0, 0].tolist()) for row in rows} <= padded


def test_conversations_keep_their_order_in_a_sequence(chats):
    """On every machine: how a sort that is not stable orders them depends on the processor."""
    packing = opened(chats, doc_mask=True).packing["train"]
    for begin, end in itertools.pairwise(packing.bounds):
        places = packing.documents[begin:end, :2].tolist()  # (shard, first token)
        assert places == sorted(places)
    assert len(packing) < len(packing.documents) / 2


def test_first_fit(monkeypatch):
    """Against the definition, sequence by sequence; with few open sequences none is too full and
    nothing is lost."""
    rng = np.random.default_rng(0)
    for room in (1, 7, 100):
        lengths, free, expected = rng.integers(1, room + 1, 500), [], []
        for n in lengths:
            k = next((k for k, left in enumerate(free) if left >= n), len(free))
            free[k : k + 1] = [(free[k] if k < len(free) else room) - n]
            expected.append(k)
        assert first_fit(lengths, room).tolist() == expected
    assert first_fit(np.array([], np.int64), 5).tolist() == []
    monkeypatch.setattr(chat_data, "OPEN_SEQUENCES", 4)
    lengths = np.random.default_rng(1).integers(1, 50, 2000)
    sequence = first_fit(lengths, 64)
    totals = np.bincount(sequence, lengths)
    assert totals.max() <= 64
    assert totals.min() > 0
    assert totals.mean() > 50


def test_padding_and_what_is_too_long_is_said(chats, capsys, monkeypatch):
    """Printed by rank 0 only; padding as counted in the batches."""
    loaded = opened(chats, doc_mask=True)
    text, rows = capsys.readouterr().out, epoch(loaded)
    padding = 0
    for row in rows:
        last = row.doc_ids[0, 0] == row.doc_ids[0, 0, -1]
        padding += (
            int(last.sum())
            if (row.labels[0, 0][last] < 0).all() and (row.tokens[0, 0][last] == loaded.eot).all()
            else 0
        )
    assert (
        f"{loaded.n_samples:,} sequences of {T} tokens, {padding / (T * len(rows)):.1%} of them "
        "padding;" in text
    )
    assert padding / (T * len(rows)) < 0.12
    train, val = (loaded.packing[split] for split in ("train", "val"))
    nothing = sum(not any(mask[1:]) for _, mask in chats[1])
    assert (train.n_cut + val.n_cut, train.n_left_out + val.n_left_out) == (
        20 - nothing,
        nothing,
    )
    assert min(train[3:]) > 0
    assert (
        f"; {train.n_cut} were too long and are cut; {train.n_left_out} are left out, for no "
        "answer is in" in text
    )
    monkeypatch.setenv("RANK", "1")
    opened(chats, doc_mask=True)
    assert capsys.readouterr().out == ""
    monkeypatch.delenv("RANK")
    short = opened(chats, seq_len=24)
    assert short.packing["train"].n_left_out > 0
    assert "are left out, for no answer is in their beginning" in capsys.readouterr().out
    with refused("in no conversation the assistant says anything within --seq_len 3"):
        opened(chats, seq_len=3)


def test_packed_loss_is_the_unpacked_loss(chats, tmp_path):
    """Loss and gradients: no conversation sees another, each has its own positions, padding changes
    nothing."""
    found, few = {}, (chats[0] / "chat.jsonl").read_text().splitlines(keepends=True)[:20]
    (tmp_path / "few.jsonl").write_text("".join(few))
    for doc_mask in (False, True):
        loaded = opened(
            chats, doc_mask=doc_mask, data=str(tmp_path / "few.jsonl"), cache_dir=str(tmp_path)
        )
        assert (
            loaded.n_samples == len(loaded.packing["train"].documents) > 15
            if not doc_mask
            else 2 < loaded.n_samples < 10
        )
        model = drawn(
            Llama3(
                Llama3Config(
                    dim=32,
                    n_layers=2,
                    n_heads=4,
                    n_kv_heads=2,
                    head_dim=8,
                    ffn_dim=64,
                    vocab_size=loaded.vocab_size,
                    max_seq_len=T,
                )
            )
        )
        rows = epoch(loaded)
        total, loss = sum(int((row.labels >= 0).sum()) for row in rows), 0.0
        for first in range(0, len(rows), 8):
            part = rows[first : first + 8]
            args = {}
            for name in NAMES[: 4 if doc_mask else 3]:
                args[name] = torch.cat([getattr(row, name)[0] for row in part])
            step = model(**args, loss_denom=total)
            step.backward()
            loss += step.item()
        found[doc_mask] = loss, {name: p.grad for name, p in model.named_parameters()}
    assert abs(found[True][0] - found[False][0]) <= 1e-6 * found[False][0]
    assert found[False][0] > 1
    for name, grad in found[False][1].items():
        assert (found[True][1][name] - grad).abs().max() <= 1e-5 * grad.abs().max(), name


# ---- shards --------------------------------------------------------------------------------------


def test_prepare_check_and_train(chats, tmp_path, monkeypatch, capsys):
    """The same data as from the file itself; a second start does nothing again; an older program
    does not read the folder."""
    root, argv = chats[0], ["--workers", 1, "--out", tmp_path / "tokens"]
    argv = ["prepare", "--input", root / "chat.jsonl", "--tokenizer", root / "qwen", *argv]
    status, out, _ = call_cli(monkeypatch, capsys, *argv)
    assert status == 0
    assert "documents" in out
    assert call_cli(monkeypatch, capsys, "check", tmp_path / "tokens")[0] == 0
    prepared = opened(
        chats, data=str(tmp_path / "tokens"), tokenizer="", cache_dir="", doc_mask=True
    )
    assert prepared.fingerprint == opened(chats, doc_mask=True).fingerprint
    assert json.loads((tmp_path / "tokens" / "index.json").read_text())["version"] == 3
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "tokens").glob("*.npy")}
    capsys.readouterr()
    assert call_cli(monkeypatch, capsys, *argv)[:2] == (0, out)
    assert {path: path.stat().st_mtime_ns for path in files} == files
    assert len(files) == 4
    # another template makes other tokens of the same file
    chat_folder(tmp_path / "other", "qwen3")
    (tmp_path / "other" / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    )
    argv[argv.index(root / "qwen")] = tmp_path / "other"
    status, _, err = call_cli(monkeypatch, capsys, *argv)
    assert status == 2
    assert "another tokenizer or chat template; name a new --out" in err
    (tmp_path / "a.txt").write_text("text " * 100)
    argv.insert(3, tmp_path / "a.txt")
    status, _, err = call_cli(monkeypatch, capsys, *argv)
    assert status == 2
    assert "holds conversations and" in err
    assert err.count("\n") == 1


MASK = "train-00000.mask.npy"


@pytest.mark.parametrize(
    "damage, part",
    [
        (lambda folder: (folder / MASK).unlink(), "mask.npy is missing"),
        (
            lambda folder: (folder / MASK).write_bytes((folder / MASK).read_bytes()[:-1]),
            "mask.npy is truncated",
        ),
        (
            lambda folder: (folder / MASK).write_bytes((folder / MASK).read_bytes()[:-1] + b"\x07"),
            "mask.npy: wrong checksum",
        ),
        (
            lambda folder: change_index(folder, lambda index: index.update(version=2)),
            "index.json is damaged",
        ),
        (
            lambda folder: change_index(
                folder, lambda index: index["splits"]["train"][0].pop("mask_bytes")
            ),
            "index.json is damaged",
        ),
        (
            lambda folder: change_index(
                folder, lambda index: index["splits"]["train"][0].update(mask_sha256="0" * 64)
            ),
            "index.json is damaged",
        ),
    ],
)
def test_damaged_masks(chats, tmp_path, monkeypatch, capsys, damage, part):
    folder = copy_of(opened(chats).folder, tmp_path)
    damage(folder)
    capsys.readouterr()
    status, _, err = call_cli(monkeypatch, capsys, "check", folder)
    assert status == 1
    assert part in err
    if "checksum" not in part:
        with refused(part):
            opened(chats, data=str(folder), tokenizer="", cache_dir="")


def test_many_pieces_are_the_same_conversations(chats, tmp_path, monkeypatch):
    """A file cut into pieces between lines, as large files are."""
    import corpus.build as corpus

    whole, real = opened(chats), corpus.cut_into_pieces

    def cut(paths, *rest):
        (piece,) = real(paths, *rest)
        middle = piece.path.read_bytes().index(b"\n", piece.end // 2) + 1
        return [piece._replace(end=middle), piece._replace(start=middle)]

    monkeypatch.setattr(corpus, "cut_into_pieces", cut)
    build_shards(
        [chats[0] / "chat.jsonl"], find_tokenizer(str(chats[0] / "qwen")), tmp_path / "tokens"
    )
    parts = ChatData(tmp_path / "tokens", T)
    for split in ("train", "val"):
        a, b = (
            loaded.arrays(loaded.windows(split, range(len(loaded.packing[split]))))
            for loaded in (whole, parts)
        )
        for x, y in zip(a[:3], b[:3]):
            assert (x == y).all()
        assert len(a[0]) > 5
    assert len(list((tmp_path / "tokens").glob("train-*.mask.npy"))) == 2


@pytest.mark.parametrize("kind", ["llama3", "qwen3"])
@pytest.mark.parametrize("system", [[], ["You are a model that trains other models all day long."]])
def test_the_first_words_are_the_question_alone(tmp_path, kind, system):
    """Neither roles, which a template writes as text, nor the system message."""
    folder = chat_folder(tmp_path / "m", kind)
    turns = [{"role": "system", "content": text} for text in system]
    turns += [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Four."}]
    (tmp_path / "a.jsonl").write_text((json.dumps({"messages": turns}) + "\n") * 40)
    build_shards([tmp_path / "a.jsonl"], find_tokenizer(str(folder)), tmp_path / "tokens")
    assert ChatData(tmp_path / "tokens", 256).first_words() == "Hi?"


def test_what_conversations_need(chats, tmp_path):
    root = chats[0]
    with refused("chat.jsonl holds conversations; give the folder of a tokenizer"):
        opened(chats, tokenizer="")
    (tmp_path / "plain").mkdir()
    shutil.copy(root / "qwen" / "tokenizer.json", tmp_path / "plain")
    with refused("plain has no chat template"):
        opened(chats, tokenizer=str(tmp_path / "plain"))
    assert opened(chats).first_words()


def test_the_weights_bring_their_chat_template(chats, tmp_path):
    """--init_from in place of --tokenizer: a folder from Hugging Face, as any checkpoint of ours
    has the same files."""
    root, source = chats[0], Path(shutil.copytree(chats[0] / "qwen", tmp_path / "hf"))
    (source / "model.safetensors").touch()
    flags = dict(data=str(root / "chat.jsonl"), cache_dir=str(root), out=str(tmp_path / "out"))
    cfg = finetune.Config(init_from=str(source), **flags)
    assert (
        open_data(cfg, T, tokenizer_of(cfg), ChatData).fingerprint
        == opened(chats, doc_mask=True).fingerprint
    )


@pytest.mark.parametrize("data", ["chat.jsonl", "text={}/a.txt:1,chat={}/chat.jsonl:1", "shards"])
def test_a_recipe_that_trains_on_text_refuses_conversations(chats, tmp_path, data):
    root = chats[0]
    (root / "a.txt").write_text("It was so. " * 5000)
    if data == "shards":
        path = str(opened(chats).folder)
    else:
        path = data.replace("{}", str(root))
    if data == "shards":
        flags = {}
    else:
        flags = dict(cache_dir=str(tmp_path), tokenizer=str(root / "qwen"))
    if ":" not in path:
        path = str(root / path)
    cfg = train_llama3.Config(data=path, out=str(tmp_path / "out"), device="cpu", **flags)
    with refused(
        "holds conversations, and this recipe trains on text; use finetune.py --init_from"
    ):
        train_llama3.main(cfg)


# ---- whole runs ----------------------------------------------------------------------------------

DEGREES = {
    "dp": ["--dp_shard", 2],
    "tp": ["--tp", 2],
    "cp": ["--cp", 2],
    "pp": ["--pp", 2],
    "ep": ["--ep", 2],
}
LORA = ["--lora_rank", 4, "--lr", "1e-2"]
KINDS = {
    "all weights": ("llama3", ["--lr", "3e-3"]),
    "lora": ("llama3", LORA),
    "experts": ("qwen3", ["--lr", "3e-3"]),
    "experts, lora": ("qwen3", LORA),
    "deepseek": ("deepseek", ["--lr", "3e-3"]),
}
EXPERTS = dict(dim=32, n_layers=4, n_heads=4, vocab_size=4096, n_experts=4, top_k=2, moe_ffn_dim=32)
CONFIGS = {
    "llama3": override_fields(Llama3Config(), MODEL, "--model_args"),
    "qwen3": Qwen3Config(**EXPERTS, n_kv_heads=2, head_dim=8),
    "deepseek": DeepSeekConfig(
        **EXPERTS,
        ffn_dim=64,
        n_groups=2,
        top_k_groups=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
    ),
}


@pytest.fixture(scope="module")
def bases(chats, tmp_path_factory):
    """{model: a Hugging Face folder of it, with the tokenizer and template of the conversations}"""
    root = tmp_path_factory.mktemp("bases")
    for name, model_config in CONFIGS.items():
        model = initialised(model_config, Flags(), 3)
        save_hf(
            model,
            str(root / name),
            torch.float32,
            tokenizer_file=str(chats[0] / "qwen" / "tokenizer.json"),
        )
    return {name: root / name for name in CONFIGS}


@pytest.fixture(scope="module")
def one_process(chats, bases, tmp_path_factory):
    @cache
    def trained(kind):
        (model, flags), root = KINDS[kind], chats[0]
        command = [
            "finetune.py",
            "--init_from",
            bases[model],
            "--data",
            root / "chat.jsonl",
            *flags,
            "--cache_dir",
            root,
            "--seq_len",
            T,
            "--compute_dtype",
            "float32",
            "--local_batch_size",
            4,
            "--global_batch_size",
            8,
            "--steps",
            4,
            "--warmup_steps",
            1,
            "--log_every",
            1,
            "--val_batches",
            1,
            "--device",
            "cpu",
        ]
        out = tmp_path_factory.mktemp("runs") / "one"
        return command, run(launch(1, *command, "--out", out)), metrics(out), out

    return trained


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind, layout",
    [
        *(
            (kind, layout)
            for kind in ("all weights", "lora")
            for layout in ("dp", "tp", "cp", "pp")
        ),
        ("experts", "ep"),
        ("experts, lora", "ep"),
        ("deepseek", "tp"),
    ],
)
def test_every_layout_trains_what_one_process_does(one_process, tmp_path, kind, layout):
    """Loss, norm, validation, and the hash of the batches. Only rank 0 prints the line about the
    data."""
    command, said, one, _ = one_process(kind)
    printed = run(launch(2, *command, *DEGREES[layout], "--out", tmp_path / "two"))
    two = metrics(tmp_path / "two")
    assert len(one) == len(two) == 5
    for x, y in zip(one, two):
        assert {key: x.get(key) for key in ("step", "tokens", "tokens_hash")} == {
            key: y.get(key) for key in ("step", "tokens", "tokens_hash")
        }
        for key in {"loss", "grad_norm", "val_loss", "val_bits_per_byte"} & x.keys():
            assert abs(x[key] - y[key]) <= 2e-5 * x[key], (key, x[key], y[key])
    lines = having(said.splitlines(), "conversations in")
    assert len(lines) == 1
    assert lines == having(printed.splitlines(), "conversations in")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all weights", "lora"])
def test_a_step_of_conversations_is_replayed(one_process, chats, kind):
    """To the bit, and the named lines hold the conversations."""
    *_, out = one_process(kind)
    root = chats[0]
    text = run(launch(1, "finetune.py", "--out", out, "--cache_dir", root, "--replay", 3))
    assert "of step 3 is" in text, text
    assert "as logged, to the bit" in text, text
    named = re.findall(r" (\S+chat.jsonl) line (\d+): (['\"])(.*)\3", text)
    lines = (root / "chat.jsonl").read_text().splitlines()
    assert len(named) >= 8, text
    for file, number, _, excerpt in named:
        asked = json.loads(lines[int(number) - 1])["messages"][0]["content"]
        assert file == str(root / "chat.jsonl")
        assert repr(asked.strip()[:12])[1:-1] in excerpt, (number, excerpt)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["all weights", "lora"])
def test_a_run_goes_on_in_another_layout_and_is_exported(one_process, tmp_path, kind):
    command, _, _, out = one_process(kind)
    run(launch(1, *command, "--steps", 2, "--schedule_steps", 4, "--out", tmp_path / "two"))
    said = run(
        launch(2, *command, "--tp", 2, "--export_hf", tmp_path / "hf", "--out", tmp_path / "two")
    )
    one, two = train_lines(out), train_lines(tmp_path / "two")
    assert "continuing from" in said
    assert "sample (" in said
    assert column(two, "tokens_hash") == column(one, "tokens_hash")
    for x, y in zip(one, two, strict=True):
        assert abs(x["loss"] - y["loss"]) <= 2e-5 * x["loss"]
    exported, merged = load_hf_model(str(tmp_path / "hf"))[0], load_model(str(tmp_path / "two"))[0]
    before = load_hf_model(str(command[2]))[0].state_dict()
    for fqn, weight in exported.state_dict().items():
        torch.testing.assert_close(weight, merged.state_dict()[fqn], rtol=0, atol=1e-6)
    assert any(
        (weight - before[fqn]).abs().max() > 1e-3 for fqn, weight in exported.state_dict().items()
    )


@pytest.mark.slow
def test_a_chat_is_learned_and_asked(chats, one_process, tmp_path):
    """Without --doc_mask; the checkpoint keeps the chat template, and generate.py uses the
    template."""
    command = one_process("all weights")[0]
    out = tmp_path / "run"
    said = run(launch(1, *command, "--no-doc_mask", "--steps", 8, "--lr", "1e-2", "--out", out))
    # the sample is asked as trained
    assert f"generate.py --checkpoint {out} --prompt" in said
    assert " --chat):\n\n" in said
    lines = column(train_lines(out), "loss")
    assert "--doc_mask packs several into one" in said
    assert "sample (" in said
    assert lines[-1] < lines[0] - 0.5
    assert (out / "checkpoints" / "step-8" / "chat_template.jinja").read_bytes() == (
        chats[0] / "qwen" / "chat_template.jinja"
    ).read_bytes()
    run(
        launch(
            1,
            "generate.py",
            "--checkpoint",
            out,
            "--prompt",
            "What is the sum?",
            "--chat",
            "--max_new_tokens",
            4,
            "--device",
            "cpu",
        )
    )  # ends with status 0


def test_a_model_or_data_that_is_not_given_is_asked_for(chats):
    for flags in {}, dict(init_from="folder"), dict(data="chat.jsonl"):
        with refused("fine-tuning needs a model and what to learn:"):
            finetune.main(finetune.Config(**flags))
    with refused("--lora_rank 4 with --float8 rowwise: the frozen"):
        finetune.Config(lora_rank=4, float8="rowwise")


def test_bad_conversations_are_left_out_and_listed(tmp_path, monkeypatch, capsys):
    folder = chat_folder(tmp_path / "qwen", "qwen3")
    good = []
    for i in range(300):
        good.append(
            {
                "messages": [
                    {"role": "user", "content": f"q{i}"},
                    {"role": "assistant", "content": f"a{i}"},
                ]
            }
        )
    bad = [
        {"messages": []},
        {"messages": [{"role": "user", "content": [{"type": "audio"}]}]},
        {"nothing": 1},
    ]
    lines = []
    for x in [*good[:7], bad[0], *good[7:150], "", bad[1], bad[2], *good[150:]]:
        lines.append(json.dumps(x))
    (tmp_path / "chat.jsonl").write_text("\n".join(lines).replace('""', ""))
    (tmp_path / "good.jsonl").write_text(as_json_lines(good))

    def prepare(name, out, *more):
        return call_cli(
            monkeypatch,
            capsys,
            "prepare",
            "--input",
            tmp_path / name,
            "--tokenizer",
            folder,
            "--out",
            tmp_path / out,
            "--workers",
            1,
            *more,
        )

    status, _, error = prepare("chat.jsonl", "none")
    assert status == 2
    assert "chat.jsonl line 8: need a conversation" in error
    assert "prepare --skip_bad N leaves out" in error
    status, _, error = prepare("chat.jsonl", "few", "--skip_bad", 2)
    assert status == 2
    assert "--skip_bad 2: 3 of 303 conversations cannot be trained" in error
    assert error.count("\n") == 1
    status, out, _ = prepare("chat.jsonl", "kept", "--skip_bad", 3)
    assert status == 0
    assert "3 of 303 conversations are left out" in out
    listed = (tmp_path / "kept" / "skipped.txt").read_text().splitlines()
    assert [line.split(": ")[0].split()[-1] for line in listed] == [
        "8",
        "153",
        "154",
    ]
    assert "audio" in listed[1]
    assert prepare("good.jsonl", "good")[0] == 0
    one, other = (
        json.loads((tmp_path / name / "index.json").read_text()) for name in ("kept", "good")
    )
    assert one["splits"] == other["splits"]
