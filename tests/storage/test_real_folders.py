"""Folders as the world has them, in a table: kinds of tokenizers x what stands beside tokenizer.json.
transformers is the judge of the ids of texts and chats, of ends, of exports, and of generation. A new
folder is a row."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from chats import bpe
from saves import refuses, tokenizer_of
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
)

import finetune
from corpus.added_tokens import listed_tokens
from corpus.answer_ends import before_blanks, find_ends
from corpus.beside import read_special_tokens
from corpus.cache import cached_corpus
from corpus.chat import chat_tokenizer, parse_conversation, read_template, tokens_and_mask
from corpus.shards import FIRST, LOSS, read_index
from corpus.special import NoEnds, TextSource, ids_of, special_ids
from corpus.tokenizer import bytes_of_tokens, load_tokenizer
from generate import generate
from storage import commands
from storage.hf import load_hf_model
from storage.hf_config import find_model_file
from storage.other_tokenizer import describe_ends
from storage.source_tokenizer import (
    ends_of,
    folder_of_ids,
    generation_of_run,
    has_bos,
    ids_of_folder,
    text_folder,
)

TEXTS = ["The sky is blue,  and\n the cat sat.", "naïve 42 北京", " a", "x = <b>1</b>"]
CORPUS = [*TEXTS, "What is two and two? Four. user assistant system"] * 9
BEGIN, END, DOCUMENT, TURN = "<s>", "<|eot_id|>", "<|endoftext|>", "<|im_start|>"
MARKERS = [DOCUMENT, BEGIN, TURN, END]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|eot_id|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TALK = {
    "messages": [
        {"role": "user", "content": "What is two and two?"},
        {"role": "assistant", "content": "Four."},
    ]
}
LLAMA3 = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


# --- Tokenizers, one function per family ---
def byte_level(*splits) -> Tokenizer:
    made = Tokenizer(models.BPE())
    parts = [pre_tokenizers.Split(Regex(split), "isolated") for split in splits]
    parts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not splits))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Sequence(parts), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    train(made, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False))
    return made


def deepseek() -> Tokenizer:
    return byte_level("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"\p{N}")


def qwen() -> Tokenizer:
    made = byte_level(QWEN)
    made.normalizer = normalizers.NFC()
    return made


def train(made: Tokenizer, trainer) -> None:
    made.train_from_iterator(CORPUS, trainer)


def byte_fallback() -> Tokenizer:
    """As Llama 2's: a normalizer writes the spaces, and letters that are unknown become bytes."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    names = ["<unk>", *(f"<0x{i:02X}>" for i in range(256))]
    train(made, trainers.BpeTrainer(vocab_size=360, special_tokens=names, show_progress=False))
    rules = json.loads(made.to_str())
    rules["added_tokens"] = rules["added_tokens"][:1]
    rules["model"] |= {"byte_fallback": True, "fuse_unk": True}
    made = Tokenizer.from_str(json.dumps(rules))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return made


def metaspace(scheme: str) -> Tokenizer:
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    special = ["<unk>"]
    train(made, trainers.BpeTrainer(vocab_size=120, special_tokens=special, show_progress=False))
    return made


def word_level() -> Tokenizer:
    made = Tokenizer(models.WordLevel(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    train(made, trainers.WordLevelTrainer(special_tokens=["<unk>"], show_progress=False))
    return made


def unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=90, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    train(made, trainer)
    return made


FAMILIES = {
    "llama3": partial(byte_level, LLAMA3),
    "qwen": qwen,
    "deepseek": deepseek,
    "byte fallback": byte_fallback,
    "metaspace always": partial(metaspace, "always"),
    "metaspace first": partial(metaspace, "first"),
    "metaspace never": partial(metaspace, "never"),
    "word level": word_level,
    "unigram": unigram,
}


# --- What stands beside tokenizer.json ---
# own: markers that tokenizer.json has itself; eos: in tokenizer_config.json; generation, config: the
# eos ids of generation_config.json and config.json, None: there is no such file or key;
# before, after: what the post-processor puts around a text
BESIDE = {
    "all": dict(generation=[END], config=END, before=[BEGIN]),
    "several ends": dict(generation=[END, DOCUMENT], config=END),
    "no generation_config": dict(generation=None, config=[END, DOCUMENT], before=[BEGIN]),
    "special_tokens_map alone": dict(eos="map", generation=None, config=None),
    "tokenizer_config alone": dict(generation=None, config=None),
    "other ends in each": dict(eos=END, generation=[DOCUMENT], config=DOCUMENT, before=[BEGIN]),
    "appends its end": dict(generation=[END], config=END, before=[BEGIN], after=[END]),
    "markers by id": dict(own=1, listed=True, generation=[END], config=END),
    "markers by name": dict(own=1, generation=[END], config=END),
    "markers by added_tokens.json": dict(own=1, older=True, generation=[END], config=END),
}
QUICK = {(family, beside) for family in FAMILIES for beside in ("all", "markers by id")}
QUICK |= {("llama3", beside) for beside in BESIDE} | {("unigram", beside) for beside in BESIDE}


def make_folder(folder: Path, family: str, own=4, listed=False, eos=END, generation=None, config=None,
                before=(), after=(), older=False) -> Path:  # fmt: skip
    """A Hugging Face folder with a model of random weights."""
    made = FAMILIES[family]()
    markers = [AddedToken(name, special=True, normalized=False) for name in MARKERS]
    whole = Tokenizer.from_str(made.to_str())
    whole.add_special_tokens(markers)
    ids = {name: whole.token_to_id(name) for name in MARKERS}
    made.add_special_tokens(markers[:own])
    around = [*before, "$A", *after]
    if len(around) > 1:
        special = [(name, ids[name]) for name in (*before, *after)]
        made.post_processor = processors.TemplateProcessing(
            single=" ".join(around), special_tokens=special
        )

    def id_of(value):
        if isinstance(value, list):
            return [ids[name] for name in value]
        return ids.get(value)

    torch.manual_seed(0)
    vocab_size = max(whole.get_vocab(with_added_tokens=True).values()) + 1
    sizes = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    about = LlamaConfig(
        **sizes,
        num_key_value_heads=1,
        vocab_size=vocab_size,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=ids[BEGIN],
        eos_token_id=id_of(config),
        pad_token_id=ids[DOCUMENT],
    )
    model = LlamaForCausalLM(about)
    model.generation_config = GenerationConfig(
        bos_token_id=ids[BEGIN], eos_token_id=id_of(generation), pad_token_id=ids[DOCUMENT]
    )
    model.save_pretrained(folder)
    if generation is None:
        (folder / "generation_config.json").unlink()
    made.save(str(folder / "tokenizer.json"))
    rules = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "pad_token": DOCUMENT,
    }
    if eos == "map":
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": END}))
    else:
        rules["eos_token"] = eos
    flags = dict(special=True, normalized=False, lstrip=False, rstrip=False, single_word=False)
    if listed:
        rules["added_tokens_decoder"] = {
            str(ids[name]): {"content": name, **flags} for name in MARKERS
        }
    elif older:
        (folder / "added_tokens.json").write_text(json.dumps({name: ids[name] for name in MARKERS}))
    elif own < 4:  # in the order in which transformers gives ids
        rules["additional_special_tokens"] = [TURN, END]
        rules |= {"pad_token": DOCUMENT, "bos_token": BEGIN, "eos_token": DOCUMENT}
    (folder / "tokenizer_config.json").write_text(json.dumps(rules))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def end_at_once(model, prompt: list[int], end: int) -> None:
    """Changes the head so that the likeliest token after the prompt is `end`."""
    with torch.no_grad():
        hidden = model.model(torch.tensor([prompt])).last_hidden_state[0, -1]
        model.lm_head.weight.zero_()
        model.lm_head.weight[end] = hidden


@pytest.mark.parametrize(
    "family, beside",
    [
        pytest.param(*row, marks=() if row in QUICK else pytest.mark.slow, id=", ".join(row))
        for row in ((family, beside) for family in FAMILIES for beside in BESIDE)
    ],
)
def test_folders_as_transformers_reads_them(tmp_path, family, beside):
    folder = make_folder(tmp_path / "hf", family, **BESIDE[beside])
    theirs = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder / "tokenizer.json")
    marks = chat_tokenizer(folder / "tokenizer.json")

    # texts and chats
    n_after = len(BESIDE[beside].get("after", ()))
    for text in TEXTS:
        expected = theirs(text).input_ids
        assert ids_of(ours, text, begins=True) == expected[: len(expected) - n_after]
    conversation = parse_conversation(json.dumps(TALK).encode())
    ids, mask = tokens_and_mask(conversation, read_template(str(folder), "x"), marks)
    assert ids == theirs.apply_chat_template(TALK["messages"]).input_ids

    # ends: all that the tokenizer, generate() and config.json name, in folder, run and export
    end = theirs.convert_tokens_to_ids(END)
    model = AutoModelForCausalLM.from_pretrained(folder)
    listed = model.generation_config.eos_token_id
    expected = {theirs.eos_token_id, *(listed if isinstance(listed, list) else [listed])} - {None}
    assert set(ends_of(str(folder))) == expected
    shard = torch.tensor(ids).numpy(), torch.tensor(mask).numpy().astype("u1") * LOSS
    shard[1][0] |= FIRST
    found = find_ends([shard], folder / "tokenizer.json")
    assert (found.ends, found.n_answers, found.n_open) == ([end], 1, 0)
    run, out = str(tmp_path / "run"), str(tmp_path / "out")
    commands.from_hf(str(folder), run)
    commands.to_hf(run, out, dtype="float32")
    assert has_bos(run)
    assert ids_of_folder(text_folder(run)) == ids_of_folder(str(folder))
    assert ids_of_folder(out) == ids_of_folder(str(folder))
    exported = AutoModelForCausalLM.from_pretrained(out)
    for about in exported.generation_config, exported.config:
        eos = about.eos_token_id
        assert {*(eos if isinstance(eos, list) else [eos])} == expected
        assert about.bos_token_id == theirs.bos_token_id
        assert about.pad_token_id == theirs.convert_tokens_to_ids(DOCUMENT)
    again = AutoTokenizer.from_pretrained(out)
    assert [again(text).input_ids for text in TEXTS] == [theirs(text).input_ids for text in TEXTS]

    # generation: greedy, first as it comes, then with a model that says an end at once
    prompt = ids_of(ours, TEXTS[0], begins=True)
    for last in None, *expected:
        if last is not None:
            end_at_once(model, prompt, last)
            end_at_once(exported, prompt, last)
            model.save_pretrained(folder)
        options = dict(max_new_tokens=5, do_sample=False)
        said = exported.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()
        own = generate(load_hf_model(str(folder))[0], [prompt], 5, 0.0, eot=ends_of(str(folder)))
        assert own == [said]
        assert last is None or said == [last]


# Ids that contradict are refused, and so is a gap. Tokens that are named without an id need a row.
@pytest.mark.parametrize(
    "listed, words",
    [
        ({"9": END}, "correct added_tokens_decoder"),
        ({"5": TURN}, "correct added_tokens_decoder"),
        ({"999": "<|new|>"}, "name the ids between"),
        ({"x": "<|new|>"}, "added_tokens_decoder must be"),
        ({"5": ""}, "added_tokens_decoder must be"),
    ],
)
def test_contradictions_are_refused(tmp_path, listed, words):
    folder = make_folder(tmp_path, "llama3", generation=[END])
    rules = json.loads((folder / "tokenizer_config.json").read_text())
    rules["added_tokens_decoder"] = {i: {"content": content} for i, content in listed.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps(rules))
    refuses(words, load_tokenizer, folder / "tokenizer.json")


def test_a_model_file_is_found_by_a_plain_name_only():
    """The name is a stranger's, and the file would be imported."""
    assert find_model_file("llama3") == "models.llama3"
    assert find_model_file("olmo3") == "forks.olmo3"
    for name in ("../models/llama3", "../forks/olmo3", "nothing"):
        assert find_model_file(name) is None


def test_older_files_that_contradict_or_are_odd_are_refused(tmp_path):
    row = BESIDE["markers by added_tokens.json"]
    folder = make_folder(tmp_path, "llama3", **row)
    file = folder / "tokenizer.json"
    for listed, words in (
        ({END: 9}, "correct added_tokens.json"),
        ({END: 999}, "name the ids between in added_tokens.json"),
        ({END: "9"}, "added_tokens.json must be {token: id}"),
    ):
        (folder / "added_tokens.json").write_text(json.dumps(listed))
        refuses(words, load_tokenizer, file)
    (folder / "added_tokens.json").unlink()
    rules = json.loads((folder / "tokenizer_config.json").read_text())
    for odd, words in (
        ({"additional_special_tokens": 5}, "additional_special_tokens must be a list of tokens"),
        ({"added_tokens_decoder": {"9": {"content": END, "lstrip": "x"}}}, "lstrip is no truth"),
    ):
        (folder / "tokenizer_config.json").write_text(json.dumps(rules | odd))
        refuses(words, load_tokenizer, file)


def test_bytes_of_tokens_that_only_tokenizer_config_has(tmp_path):
    """A special token is no text, another is."""
    folder = make_folder(tmp_path, "llama3", **BESIDE["markers by id"])
    rules = (folder / "tokenizer.json").read_bytes()
    listed = listed_tokens(str(folder))
    size = max(listed) + 1
    counts = bytes_of_tokens(rules, size, listed)
    assert not counts[list(listed)].any()
    assert counts[:50].all()
    listed[max(listed)]["special"] = False
    assert bytes_of_tokens(rules, size, listed)[-1] == len(END)
    assert len(bytes_of_tokens(rules, size - 2, listed)) == size - 2


def test_a_padding_token_without_a_row_stays_text(tmp_path):
    folder = make_folder(tmp_path, "llama3", generation=[END])
    rules = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(rules | {"pad_token": "[PAD]"}))
    assert load_tokenizer(folder / "tokenizer.json").token_to_id("[PAD]") is None


# --- What training makes of them ---
def documents(folder: Path) -> list[list[int]]:
    """The ids of the documents of token shards, each with its end."""
    index = read_index(folder)
    names = [entry["name"] for split in ("train", "val") for entry in index["splits"][split]]
    ids = [i for name in names for i in np.load(folder / name).tolist()]
    ends = [place + 1 for place, i in enumerate(ids) if i == index["eot"]]
    return [ids[start:stop] for start, stop in zip([0, *ends], ends)]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_run_from_a_folder_begins_its_documents_as_the_folder(tmp_path, name):
    """Text from nothing has no such token, with the same tokenizer."""
    folder = make_folder(tmp_path / "hf", "llama3", **BESIDE["appends its end"])
    lines = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
    if name == "a.jsonl":
        written = lines
    else:
        written = DOCUMENT.join(TEXTS)
    (tmp_path / name).write_text(written)
    theirs = AutoTokenizer.from_pretrained(folder)
    expected = [theirs(text).input_ids[:-1] for text in TEXTS]
    flags = dict(data=str(tmp_path / name), cache_dir=str(tmp_path / "cache"), val_every=0)
    cfg = finetune.Config(**flags, init_from=str(folder), out=str(tmp_path / "run"))
    source = tokenizer_of(cfg)
    assert source == (str(folder), True)
    made = cached_corpus(cfg.data, source, cfg.cache_dir)
    whole = documents(made)
    assert [ids[:-1] for ids in whole[: len(TEXTS) - 1]] == expected[: len(TEXTS) - 1]
    plain = cached_corpus(cfg.data, TextSource(str(folder)), cfg.cache_dir)
    assert plain != made
    assert [ids[:-1] for ids in documents(plain)][0] == expected[0][1:]


def test_a_run_knows_the_ids_of_its_folder_and_what_its_data_taught(tmp_path):
    folder = make_folder(tmp_path / "hf", "llama3", eos=DOCUMENT, generation=[DOCUMENT])
    ids = ids_of_folder(str(folder))
    file = str(folder / "tokenizer.json")
    end = load_tokenizer(Path(file)).token_to_id(END)
    cfg = finetune.Config(data="x", init_from=str(folder), out=str(tmp_path / "run"))
    source = folder_of_ids(cfg.out, None, cfg.init_from, new_ids=False)
    found, new = generation_of_run(source, file, [end])
    assert new == [end]
    assert found["eos_token_id"] == [*ids.ends, end]
    assert (found["bos_token_id"], found["pad_token_id"]) == (ids.bos, ids.pad)
    assert repr(END) in describe_ends(file, new)
    assert str(end) in describe_ends(file, new)
    assert generation_of_run(source, file, ids.ends)[1] == []  # nothing new
    # from nothing, with a tokenizer that names its end: nothing is to be written
    source = folder_of_ids(str(tmp_path / "other"), None, "", new_ids=False)
    (tmp_path / "bare").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "bare" / name).write_bytes((folder / name).read_bytes())
    bare = str(tmp_path / "bare" / "tokenizer.json")
    assert generation_of_run(source, bare, ids.ends) == (None, [])


def test_an_end_that_a_tokenizer_alone_does_not_tell_is_written(tmp_path):
    """The texts of a run from nothing end with another token than a reader of its tokenizer.json
    would look for."""
    file = str(tmp_path / "tokenizer.json")
    tokenizer = bpe("some text", 300, special=["<|endoftext|>", "<|mine|>"])
    tokenizer.save(file)
    usual = tokenizer.token_to_id("<|endoftext|>")
    mine = tokenizer.token_to_id("<|mine|>")
    assert generation_of_run("", file, [usual]) == (None, [])
    found, new = generation_of_run("", file, [mine])
    assert new == [mine]
    assert mine in found["eos_token_id"]


# Templates that teach no end: the end is not trained, the next turn ends the answer, plain text
@pytest.mark.parametrize(
    "template, n_open",
    [
        (TEMPLATE, 0),
        (TEMPLATE.replace(END, "<|end|>"), 1),
        (TEMPLATE.replace(f"{END}\n", ""), 1),
        (TEMPLATE.replace(f"{END}\n", "\n\n"), 1),
        (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{% generation %}{{ m.content }}"
            "{% endgeneration %}<|eot_id|>\n{% endfor %}",
            1,
        ),
    ],
)
def test_answers_without_an_end_are_found(tmp_path, template, n_open):
    folder = make_folder(tmp_path, "llama3", eos=DOCUMENT, generation=[DOCUMENT])
    (folder / "chat_template.jinja").write_text(template)
    file = folder / "tokenizer.json"
    conversation = parse_conversation(json.dumps(TALK).encode())
    ids, mask = tokens_and_mask(conversation, read_template(str(folder), "x"), chat_tokenizer(file))
    bits = np.array(mask, np.uint8) * LOSS
    bits[0] |= FIRST
    found = find_ends([(np.array(ids), bits)], file)
    assert (found.n_answers, found.n_open, len(found.ends)) == (1, n_open, 1 - n_open)
    assert ("Four" in found.example) == bool(n_open)


@pytest.mark.parametrize("trained, place", [([1, 1, 1], 0), ([0, 1, 1], 1), ([0, 0, 1], 2)])
def test_blanks_after_an_end_are_left_as_far_as_they_are_trained(tmp_path, trained, place):
    tokenizer = load_tokenizer(make_folder(tmp_path, "llama3") / "tokenizer.json")
    (blank,) = tokenizer.encode("\n", add_special_tokens=False).ids
    tokens = np.array([tokenizer.token_to_id(END), blank, blank])
    bits = np.array(trained, np.uint8) * LOSS
    assert before_blanks(tokens, bits, np.array([2]), tokenizer).tolist() == [place]


def test_an_end_of_earlier_answers_that_is_rare_inside(tmp_path):
    """<|eot_id|> ends earlier answers, <|endoftext|> the last: both are ends, unless one of them also
    stands inside of answers, as gpt-oss's <|end|> after thoughts."""
    folder = make_folder(tmp_path, "llama3", eos=BEGIN, generation=[BEGIN])
    file = folder / "tokenizer.json"
    a, end, last = 5, *map(load_tokenizer(file).token_to_id, (END, DOCUMENT))
    ids = np.array([a, a, end, a, a, last])
    bits = np.array([FIRST, LOSS, LOSS, 0, LOSS, LOSS], np.uint8)
    assert find_ends([(ids, bits)], file).ends == [last, end]
    ids = np.array([a, end, a, end, a, a, last])
    bits = np.array([FIRST, LOSS, LOSS, LOSS, 0, LOSS, LOSS], np.uint8)
    assert find_ends([(ids, bits)], file).ends == [last]


def test_ends_that_cannot_be_read_are_refused(tmp_path):
    """An end that is overlooked lets texts run on. Only a folder that names none has none."""
    Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a")).save(str(tmp_path / "tokenizer.json"))
    file = tmp_path / "generation_config.json"
    for value in ("x", 1.5, {}, True, [0, "1"], 2**40):
        file.write_text(json.dumps({"eos_token_id": value}))
        refuses("eos_token_id is .*; need an id", special_ids, str(tmp_path))
    file.write_text("{")
    refuses("generation_config.json is not JSON", special_ids, str(tmp_path))
    file.write_text('{"eos_token_id": [1, -1]}')
    assert special_ids(str(tmp_path)).ends == [1]
    file.write_text('{"eos_token_id": -1}')
    with pytest.raises(NoEnds):
        special_ids(str(tmp_path))


def test_ends_of_a_model_that_reads_pictures_are_those_of_its_text_model(tmp_path):
    folder = make_folder(tmp_path, "llama3", eos=DOCUMENT, generation=[DOCUMENT], config=DOCUMENT)
    ids = load_tokenizer(folder / "tokenizer.json").token_to_id
    assert special_ids(str(folder)).ends == [ids(DOCUMENT)]
    about = json.loads((folder / "config.json").read_text())
    of_text = {"eos_token_id": ids(END), "vocab_size": about["vocab_size"]}
    (folder / "config.json").write_text(json.dumps(about | {"text_config": of_text}))
    assert special_ids(str(folder)).ends == [ids(DOCUMENT), ids(END)]


@pytest.mark.parametrize("rules, eos", [({"added_tokens_decoder": {}}, "of now"), ({}, "older")])
def test_an_older_file_of_special_tokens_counts_without_a_newer_table_only(tmp_path, rules, eos):
    rules = {"eos_token": "of now"} | rules
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(rules))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "older"}))
    assert read_special_tokens(str(tmp_path)) == {"eos_token": eos}
