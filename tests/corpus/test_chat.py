"""Conversations as tokens, against corpus/chat.py: transformers is the judge of ids and of masks."""

import hashlib
import json
import re
import subprocess
import sys
from functools import partial

import pytest
from chats import (
    EOS,
    SPECIAL,
    TEMPLATES,
    WORDS,
    bpe,
    chat_folder,
    conversations,
    judged,
    with_marks,
)
from corpora import call_cli
from runs import REPO, as_json_lines
from saves import refuses
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AutoTokenizer

from corpus import chat, sandbox
from corpus.beside import read_special_tokens
from corpus.build import is_chat
from corpus.chat import (
    add_marks,
    chat_tokenizer,
    parse_conversation,
    read_template,
    tokens_and_mask,
)
from corpus.commands import documents_of
from corpus.tokenizer import ChatConfig, load_tokenizer
from data import DataConfig, open_data
from sft.chat_data import ChatData
from storage.prompt import open_chat

FOUR = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}] * 2
CALLS = [
    FOUR[0],
    FOUR[1]
    | {"tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {}}}] * 2},
    {"role": "tool", "content": '"3"'},
    FOUR[1],
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """kind -> (folder without marks, the judge's mask and ids of a record)"""
    root = tmp_path_factory.mktemp("templates")

    def judge(kind):
        theirs = AutoTokenizer.from_pretrained(
            chat_folder(root / f"{kind}-marks", kind, marks=True)
        )
        return partial(judged, theirs)

    return {kind: (chat_folder(root / kind, kind), judge(kind)) for kind in TEMPLATES}


def ours(folder, record, template=None):
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    conversation = parse_conversation(json.dumps(record).encode())
    return tokens_and_mask(
        conversation, read_template(str(folder), "x"), chat_tokenizer(folder / "tokenizer.json")
    )


def told(folder, record, template=None) -> list[str]:
    """[text with a loss, other text] of a conversation."""
    (ids, mask), tokenizer = (
        ours(folder, record, template),
        chat_tokenizer(folder / "tokenizer.json"),
    )
    found = []
    for want in (1, 0):
        found.append(
            tokenizer.decode(
                [i for i, bit in zip(ids, mask, strict=True) if bit == want],
                skip_special_tokens=False,
            )
        )
    return found


@pytest.mark.parametrize(
    "kind", ["llama3", "deepseek", pytest.param("qwen3", marks=pytest.mark.slow)]
)
def test_masks_are_those_of_transformers(folders, kind):
    """300 conversations with marks in the template, and without, by rendering prefixes."""
    folder, judge = folders[kind]
    marked, plain = (
        read_template(str(path), "x") for path in (folder.with_name(f"{kind}-marks"), folder)
    )
    assert (marked.has_marks, plain.has_marks) == (True, False)
    tokenizer, answers = chat_tokenizer(folder / "tokenizer.json"), 0
    for record in conversations(300, beside=kind != "llama3"):
        if kind == "deepseek":  # whose template knows calls, but no tools
            record.pop("tools", None)
        conversation = parse_conversation(json.dumps(record).encode())
        expected = judge(record)
        text = tokenizer.decode(expected[0], skip_special_tokens=False)
        for template in (marked, plain):
            ids, mask = tokens_and_mask(conversation, template, tokenizer)
            # first as text, of which a failure shows the line that differs
            assert tokenizer.decode(ids, skip_special_tokens=False) == text
            assert (ids, mask) == expected
        answers += sum(expected[1])
    assert answers > 6_000


def test_what_the_mask_covers(folders, tmp_path):
    """In plain sight: from the end of the header to the end of the turn; a thought before a later
    question is gone."""
    folder, _ = folders["qwen3"]
    ids, mask = ours(
        folder,
        {
            "messages": [
                {"role": "system", "content": "Be kind."},
                {"role": "user", "content": "2+2?"},
                {"role": "assistant", "content": "<think>\neasy\n</think>\n\n4"},
                {"role": "user", "content": "sure?"},
                {"role": "assistant", "content": "<think>\nyes\n</think>\n\nYes."},
            ]
        },
    )
    tokenizer = chat_tokenizer(folder / "tokenizer.json")
    said = tokenizer.decode([i for i, bit in zip(ids, mask) if bit], skip_special_tokens=False)
    assert said == "4<|im_end|>\n<think>\nyes\n</think>\n\nYes.<|im_end|>\n"
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        "<|im_start|>system\nBe "
        "kind.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4<|im_end|>\n"
        "<|im_start|>user\nsure?<|im_end|>\n<|im_start|>assistant\n<think>\nyes\n</think>\n\nYes.<|im_end|>\n"
    )


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' if loop.index0 > "
        "messages|length - 3 else '' }}{% endfor %}",
        "{{ messages|length }}{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% "
        "endfor %}",
        # an earlier answer is rewritten, and has no ending
        "{% for m in messages %}<{{ m.role }}>{{ m.content if loop.last else m.content|upper }}{% "
        "endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
        "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '<end>' if m.role != 'tool' "
        "else '' }}{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% else %}{{ eos_token }}{% endif %}",
        # an earlier thought is removed, and a call is a separate turn after the answer: the first
        # ending is not the answer's
        "{% for m in messages %}<{{ m.role }}>{{ '<think></think>' if loop.last and m.role == "
        "'assistant' }}{{ m.content }}<end>"
        "{% for call in m.tool_calls or [] %}<call>{{ call.function.name }}<end>{% endfor %}{% "
        "endfor %}"
        "{% if add_generation_prompt %}<assistant>{% endif %}",
    ],
)
def test_a_template_that_does_not_tell_is_refused_by_name(tmp_path, template):
    folder = chat_folder(tmp_path / "strange", "qwen3")
    words = f"^the chat template of {folder} does not tell which tokens of message .*{{% generation %}} ... {{% endgeneration"
    refuses(
        words, ours, folder, {"messages": CALLS if "tool_calls" in template else FOUR}, template
    )


@pytest.mark.parametrize(
    "row, name, messages, said",
    [
        (
            0,
            "short_deepseek",
            CALLS,
            "aadd<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>add<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            "<｜end▁of▁sentence｜>a<｜end▁of▁sentence｜>",
        ),
        (
            1,
            "short_gpt_oss",
            # one call: of a second the template would lose all
            [
                *FOUR,
                CALLS[0],
                CALLS[1] | {"content": "", "tool_calls": CALLS[1]["tool_calls"][:1]},
                CALLS[2],
                FOUR[1] | {"thinking": "t"},
            ],
            "<|channel|>final<|message|>a<|end|>" * 2 + " to=add<|call|>"
            "<|channel|>analysis<|message|>t<|end|><|start|>assistant<|channel|>final<|message|>a<|return|>",
        ),
        (2, "short_phi3", FOUR, "a<|end|>a<|end|>"),
    ],
)
def test_published_templates_get_marks_by_their_hash(
    tmp_path, monkeypatch, capsys, row, name, messages, said
):
    """Short templates with pieces of the published ones; their hash comes into a copy of
    chat_marks.json."""
    folder, record, rows = (
        chat_folder(tmp_path / name, "qwen3"),
        {"messages": messages},
        json.loads(chat.MARKS.read_text()),
    )
    template = (REPO / f"tests/chat_templates/{name}.jinja").read_text().strip()
    refuses("does not tell which tokens", ours, folder, record, template)
    rows[row]["sha256"][hashlib.sha256(template.encode()).hexdigest()] = name
    (tmp_path / "marks.json").write_text(json.dumps(rows))
    monkeypatch.setattr(chat, "MARKS", tmp_path / "marks.json")
    (ids, mask), theirs = ours(folder, record, template), AutoTokenizer.from_pretrained(folder)
    assert (ids, mask) == judged(theirs, record, chat_template=add_marks(template)[0])
    assert ids == judged(theirs, record, chat_template=template)[0]
    assert (
        chat_tokenizer(folder / "tokenizer.json").decode([i for i, bit in zip(ids, mask) if bit])
        == said
    )
    (tmp_path / "chat.jsonl").write_text(f"{json.dumps(record)}\n" * 99)
    open_data(
        DataConfig(
            data=str(tmp_path / "chat.jsonl"), tokenizer=str(folder), cache_dir=str(tmp_path)
        ),
        64,
        Chats=ChatData,
    )
    assert (
        f"the chat template is that of {name}, with marks of ours around the answers\n"
        in capsys.readouterr().out
    )


def test_an_end_of_turn_inside_an_answer_is_not_taken_for_its_end(tmp_path, folders):
    """A rewritten answer is refused if its ending is not certain."""
    folder = chat_folder(tmp_path / "qwen", "qwen3")
    typed = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a<|im_end|>\nb"}]
    record = {"messages": typed * 2}
    refuses("does not tell which tokens of message 2", ours, folder, record)
    assert ours(folder, {"messages": typed}) == folders["qwen3"][1]({"messages": typed})
    assert ours(folder, record, with_marks(TEMPLATES["qwen3"])) == folders["qwen3"][1](record)


def test_marks_in_every_place(tmp_path):
    """Dashes and blanks in the tag; blocks around nothing, around the header, in a macro, with a
    variable."""
    said = partial(told, chat_folder(tmp_path / "marks", "qwen3"), {"messages": FOUR[:2]})
    assert said(
        "<{{ messages[0].content }}>{%generation%}[{{ messages[1].content }}]{%-endgeneration-%}  ."
    ) == ["[a]", "<u>."]
    both = "{{ messages[0].content }}{{ messages[1].content }}"
    assert said("{% generation %}{% endgeneration %}" + both) == ["", "ua"]
    macro = "{% macro say(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
    assert said(macro + "{{ messages[0].content }}<{{ say(messages[1]) }}>") == ["a", "u<>"]
    assert said("{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}-" + both) == [
        "1",
        "-ua",
    ]
    assert said(both + "{% if false %}{% generation %}{% endgeneration %}{% endif %}") == ["", "ua"]


def test_tools_and_other_spellings_of_a_conversation(folders):
    """ShareGPT's names, system message and calls; tools as a string of JSON."""
    folder, judge = folders["qwen3"]
    function = {"name": "add", "arguments": {"a": 1, "b": 2}}
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "1+2?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "It is 3."},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    expected = judge({"messages": messages, "tools": tools})
    assert sum(expected[1]) > 10
    turns = [
        ("human", "1+2?"),
        ("function_call", json.dumps(function)),
        ("observation", "3"),
        ("gpt", "It is 3."),
    ]
    sharegpt = [{"from": name, "value": value} for name, value in turns]
    for record in (
        {"messages": messages, "tools": json.dumps(tools)},
        {"conversations": messages, "tools": tools},
        {"conversations": sharegpt, "system": "s", "tools": tools},
        {
            "conversations": [{"from": "system", "value": "s"}, *sharegpt],
            "tools": json.dumps(tools),
        },
    ):
        assert ours(folder, record) == expected
    none = {"messages": messages[:2]}
    assert (
        ours(folder, none | {"tools": []})
        == ours(folder, none | {"tools": ""})
        == ours(folder, none)
    )
    assert sum(ours(folder, none)[1]) == 0  # nobody answers


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_thoughts_under_every_name(tmp_path, name):
    folder = chat_folder(tmp_path / "thinks", "llama3")
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role }}{% generation %}{% if m.thinking %}({{ "
        "m.reasoning_content }}|{{ m.thinking }})"
        "{% endif %}{{ m.content }}{% endgeneration %}{% endfor %}"
    )
    record = {
        "messages": [
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "a", name: "why"},
        ]
    }
    theirs = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        record["messages"], return_dict=True
    )["input_ids"]
    ids, _ = ours(folder, record)
    assert ids == list(theirs)
    assert chat_tokenizer(folder / "tokenizer.json").decode(ids) == "useruassistant(why|why)a"


def test_a_token_at_the_border_counts_as_in_transformers(tmp_path):
    """Without a special token after the header, a token may hold the end of the header and the
    begin of the answer."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}A: {% generation %}{{ m.content "
        "}}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
    )
    folder, straddles = chat_folder(tmp_path / "loose", "llama3"), 0
    (folder / "chat_template.jinja").write_text(template)
    theirs = AutoTokenizer.from_pretrained(folder)
    for content in (
        "think",
        "then so",
        "it's\ndone",
        "  return x",
        "naïve.",
        "spaces   ",
        "so 🙂",
        "e\u0301",
    ):
        record = {
            "messages": [
                {"role": "user", "content": "What"},
                {"role": "assistant", "content": content},
            ]
        }
        ids, mask = ours(folder, record)
        assert (ids, mask) == judged(theirs, record)
        said = chat_tokenizer(folder / "tokenizer.json").decode(
            [i for i, bit in zip(ids, mask) if bit]
        )
        straddles += said != content
    assert straddles


@pytest.mark.parametrize("kind", TEMPLATES)
def test_masks_where_the_tokenizer_puts_in_a_blank_of_its_own(tmp_path, kind):
    """As with SentencePiece: after a special token two tokens may stand for a single character."""
    folder = chat_folder(tmp_path / kind, kind, marks=True)
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.train_from_iterator(
        [" ".join(WORDS)] * 9,
        trainers.BpeTrainer(
            vocab_size=400, special_tokens=["<unk>", *SPECIAL[kind]], show_progress=False
        ),
    )
    made.save(str(folder / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(folder)
    for record in conversations(60, seed=2, beside=False):
        if kind == "deepseek":
            record.pop("tools", None)
        ids, mask = ours(folder, record)
        assert (ids, mask) == judged(theirs, record)
        assert sum(mask) > 0


@pytest.mark.parametrize(
    "line, part",
    [
        ("{", "Expecting property name"),
        ("[]", "AttributeError"),
        ('{"messages": []}', "every message needs"),
        ('{"messages": {"role": "user"}}', "every message needs"),
        ('{"messages": [{"role": "user"}]}', "every message needs"),
        ('{"messages": [{"content": "x"}]}', "every message needs"),
        ('{"messages": [{"role": "user", "content": 3}]}', "every"),
        ('{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogates"),
        ('{"text": "x"}', "conversations"),
        ('{"messages": [{"role": "user", "content": "\\ufdd0"}]}', "U\\+FDD0"),
        ('{"conversations": [3]}', "int"),
        (
            '{"messages": [{"role": "user", "content": "x"}], "conversations": [{"from": "human"}]}',
            "messages and conversations in one line",
        ),
        ('{"messages": [{"role": "user", "content": "x"}], "documents": ["d"]}', "documents are"),
        ('{"messages": [{"role": "user", "content": "x"}], "weight": 0}', "weight: 0 for a whole"),
        ('{"messages": [{"role": "user", "content": "x"}], "train": false}', "train: False for a"),
        (
            '{"messages": [{"role": "system", "content": "x"}], "system": "y"}',
            "system and another system message",
        ),
        ('{"messages": [{"role": "user", "content": ["x"]}]}', "a part of a content is 'x'"),
        (
            '{"messages": [{"role": "user", "content": [{"text": "x", "train": false}]}]}',
            "train in a part of a content is unknown",
        ),
        (
            '{"messages": [{"role": "user", "content": [{"type": "reasoning", "text": "x"}]}]}',
            "a part of a content is reasoning",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "", "tool_calls": {"name": "a"}}]}',
            "tool_calls must be a list",
        ),
        (
            '{"messages": [{"role": "assistant", "content": "", "tool_calls": ["a"]}]}',
            "a call must be an object",
        ),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": ["1"]}', "a list of objects"),
        (
            '{"messages": [{"role": "user", "content": "x"}], "tools": {"a": 1}}',
            "tools must be a list",
        ),
        ('{"conversations": [{"from": "function_call", "value": "add(1)"}]}', "Expecting value"),
        pytest.param(
            '{"messages": "' + "\xe4" * 9999 + '"}',
            "can't decode byte 0xe4 in position",
            id="bytes that are not UTF-8",
        ),
    ],
)
def test_bad_lines_are_named(tmp_path, line, part):
    file, folder = tmp_path / "c.jsonl", chat_folder(tmp_path / "qwen", "qwen3")
    file.write_bytes(
        f"\ufeff{json.dumps({'messages': FOUR})}\n\n".encode() + line.encode("latin1") + b"\n"
    )
    words = f"c.jsonl line 3: need a conversation like .*{part}"
    # without the line itself
    assert len(refuses(words, list, documents_of(file, folder / "tokenizer.json", 0))) < 500


def test_a_template_that_fails_or_never_ends_is_named_with_the_line(tmp_path, monkeypatch):
    folder = chat_folder(tmp_path / "fails", "qwen3")
    with pytest.raises(
        ValueError, match="^the chat template of .*fails fails: roles must alternate$"
    ):
        ours(folder, {"messages": FOUR}, "{{ raise_exception('roles must alternate') }}")
    refuses("^the chat template of .*fails fails: ", ours, folder, {"messages": FOUR}, "{% if %}")
    for what, evil in [
        (
            "longer than 0.2 s",
            "{% for i in range(9**5) %}{% for j in range(9**5) %}{{ {}['z'] }}{% endfor %}{% "
            "endfor %}",
        ),
        (
            "grown by 0.25 GiB",
            "{% set ns = namespace(x='abc') %}{% for i in range(40) %}{% set ns.x = ns.x ~ ns.x "
            "%}{% endfor %}",
        ),
        (r"(?<!\*)\* makes more than 268,435,456", "{{ 'x' * 4611686018427387904 }}"),  # 2 ** 62
        (r"\*\* makes more than", "{{ 2 ** 64 }}"),
        ("text is longer than", "{{ 'x'|center(300000000) }}"),
    ]:
        # the limit that is tested is small, because a whole GiB takes seconds, and the other large
        monkeypatch.setattr(sandbox, "LONGEST_S", 0.2 if "longer than 0" in what else 60)
        monkeypatch.setattr(sandbox, "MOST_GIB", 0.25 if "grown" in what else 8)
        refuses(f"fails fails: .*{what}", ours, folder, {"messages": FOUR}, evil)
    (folder / "chat_template.jinja").unlink()
    refuses("x: .*fails has no chat template", read_template, str(folder), "x")
    assert read_special_tokens(str(folder))["eos_token"] == EOS["qwen3"]


def test_rules_of_a_tokenizer_that_grow_a_text_absurdly_are_refused(tmp_path):
    rules = []
    for a, b in ("ab", "bc", "cd"):
        rules.append({"type": "Replace", "pattern": {"String": a}, "content": b * 99})
    for part in "normalizer", "decoder":
        made = json.loads(bpe("abc", 300).to_str()) | {
            part: {"type": "Sequence", f"{part}s": rules}
        }
        (tmp_path / f"{part}.json").write_text(json.dumps(made))
        refuses(
            f"{part}.json: its rules may make a text 970,299 times longer",
            load_tokenizer,
            tmp_path / f"{part}.json",
        )


def test_a_second_template_for_tools_is_not_passed_over(tmp_path):
    folder = chat_folder(tmp_path / "two", "qwen3")
    (folder / "chat_template.jinja").unlink()
    rules = json.loads((folder / "tokenizer_config.json").read_text())
    rules["chat_template"] = [
        {
            "name": "default",
            "template": TEMPLATES["qwen3"].replace("ENDMARK", "").replace("MARK", ""),
        },
        {"name": "tool_use", "template": "{{ tools }}"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(rules))
    assert sum(ours(folder, {"messages": FOUR})[1]) > 0
    with_tools = {"messages": FOUR, "tools": [{"type": "function", "function": {"name": "add"}}]}
    refuses("two has another chat template for tools", ours, folder, with_tools)
    both = {named["name"]: named["template"] for named in rules["chat_template"]}
    rules["chat_template"] = both  # as an object
    (folder / "tokenizer_config.json").write_text(json.dumps(rules))
    assert sum(ours(folder, {"messages": FOUR})[1]) > 0
    refuses("two has another chat template for tools", ours, folder, with_tools)
    (folder / "chat_template.jinja").write_text(both["default"])
    assert sum(ours(folder, with_tools)[1]) > 0
    (folder / "additional_chat_templates").mkdir()  # as transformers writes further templates
    (folder / "additional_chat_templates/tool_use.jinja").write_text(both["tool_use"])
    assert sum(ours(folder, {"messages": FOUR})[1]) > 0
    refuses("two has another chat template for tools", ours, folder, with_tools)


def test_further_special_tokens_have_their_names_in_the_template(tmp_path):
    """transformers is the judge."""
    folder = chat_folder(tmp_path / "further", "qwen3")
    rules = json.loads((folder / "tokenizer_config.json").read_text())
    rules["extra_special_tokens"] = {"boi": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(rules))
    template = "{{ boi }}{{ eos_token }}" + CHATML.replace("{{ m.", "{% generation %}{{ m.")
    template = template.replace("content }}", "content }}{% endgeneration %}", 1)
    template = template.replace("{% generation %}{{ m.role", "{{ m.role")
    (folder / "chat_template.jinja").write_text(template)
    expected = judged(AutoTokenizer.from_pretrained(folder), {"messages": FOUR})
    assert ours(folder, {"messages": FOUR}) == expected


@pytest.mark.parametrize(
    "name, first, expected",
    [
        ("a.jsonl", {"messages": []}, True),
        ("a.jsonl", {"conversations": []}, True),
        ("a.txt", {"messages": []}, False),
        ("a.jsonl", {"text": "x", "messages": []}, False),
        ("a.jsonl", {"text": "x"}, False),
        ("a.jsonl", [], False),
    ],
)
def test_what_is_a_file_of_conversations(tmp_path, name, first, expected):
    (tmp_path / name).write_text("\n" + json.dumps(first) + "\n")
    assert is_chat(tmp_path / name) is expected
    (tmp_path / name).write_text("{")
    assert is_chat(tmp_path / name) is False is is_chat(tmp_path / "none.jsonl")


def test_marks_are_not_in_the_prompt_of_a_chat(tmp_path):
    """generate.py --chat and grpo.py also use templates for training."""
    folder = chat_folder(tmp_path / "marked", "qwen3", marks=True)
    (folder / "model.safetensors").touch()
    assert (
        open_chat(str(folder), ChatConfig(chat=True))("hi")
        == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    (folder / "chat_template.jinja").write_text(
        "{{ messages[0].content }}{% generation %}A: {% endgeneration %}"
    )
    assert open_chat(str(folder), ChatConfig(chat=True))("hi") == "hiA: "


# ---- python data.py show -------------------------------------------------------------------------


def test_show(tmp_path, folders, monkeypatch, capsys):
    """Only the assistant's text is green; what would command the terminal is not printed."""
    folder, judge = folders["llama3"]
    records = conversations(5, seed=3, beside=False)
    (tmp_path / "chat.jsonl").write_text(as_json_lines(records))
    assert [*map(tuple, documents_of(tmp_path / "chat.jsonl", folder / "tokenizer.json", 0))] == [
        *map(judge, records)
    ]
    record = {
        "messages": [
            {"role": "user", "content": "a\033[2Jb"},
            {"role": "assistant", "content": "def f(x)"},
        ]
    }
    (tmp_path / "one.jsonl").write_text(json.dumps(record))
    status, out, err = call_cli(
        monkeypatch,
        capsys,
        "show",
        tmp_path / "one.jsonl",
        "--tokenizer",
        folder / "tokenizer.json",
    )
    ids, mask = judge(record)
    shown = (
        f"--- document 1: {len(ids)} tokens, {sum(mask)} with a loss (green), "
        "7 of them markers with an id of their own (underlined)\n"
        "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\na\ufffd[2Jb<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n\033[32mdef f(x)\033[0m<|eot_id|>\n"
    )
    for marker in set(re.findall(r"<\|\w+\|>", shown)):  # each is one id, and has a line below
        shown = shown.replace(marker, f"\033[4m{marker}\033[24m")
    last = shown.rindex("\033[4m")
    shown = f"{shown[:last]}\033[32m{shown[last:-1]}\033[0m\n"
    assert (status, err, out) == (0, "", shown)


@pytest.mark.parametrize(
    "name, text", [("a.jsonl", '{"text": "x = <|eot_id|>"}\n'), ("a.txt", "x = <|eot_id|>")]
)
def test_show_of_text(tmp_path, folders, name, text):
    """Every token has a loss, also the end of the document; a typed special token is text."""
    folder, _ = folders["llama3"]
    (tmp_path / name).write_text(text)
    tokenizer = chat_tokenizer(folder / "tokenizer.json")
    ((ids, mask),) = documents_of(
        tmp_path / name, folder / "tokenizer.json", tokenizer.token_to_id("<|end_of_text|>")
    )
    assert mask == [1] * len(ids)
    assert tokenizer.token_to_id("<|eot_id|>") not in ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == "x = <|eot_id|><|end_of_text|>"


def test_show_ends_when_nobody_reads_on(tmp_path, folders):
    """As in show ... | head -1."""
    (tmp_path / "a.txt").write_text("x = 1\n" * 100_000)  # more than a pipe holds
    command = [
        sys.executable,
        "data.py",
        "show",
        tmp_path / "a.txt",
        "--tokenizer",
        folders["qwen3"][0],
    ]
    shown = subprocess.Popen(command, cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert shown.stdout.read(8) == b"--- docu"
    shown.stdout.close()
    assert shown.stderr.read() == b""
    assert shown.wait() == 0


def text_of(folders, kind, *messages) -> list[str]:
    return told(
        folders[kind][0],
        {"messages": [dict(zip(("role", "content"), m[:2])) | dict(*m[2:]) for m in messages]},
    )


@pytest.mark.parametrize("kind", [*TEMPLATES])
def test_content_in_parts_is_one_text_and_messages_without_weight_have_no_loss(folders, kind):
    parts = [{"type": "text", "text": "an"}, {"type": "text", "text": "swer"}]
    plain = ("user", "ask"), ("assistant", "answer"), ("user", "again"), ("assistant", "more")
    in_parts = ("user", [{"type": "text", "text": "ask"}]), ("assistant", parts), *plain[2:]
    assert text_of(folders, kind, *in_parts) == text_of(folders, kind, *plain)
    for off in (dict(weight=0), dict(train=False)):
        trained, rest = text_of(folders, kind, plain[0], ("assistant", "answer", off), *plain[2:])
        assert "more" in trained
        assert "answer" not in trained
        assert "answer" in rest
    assert text_of(
        folders, kind, plain[0], ("assistant", "answer", dict(weight=1, train=True)), *plain[2:]
    ) == text_of(folders, kind, *plain)


@pytest.mark.parametrize(
    "message, words",
    [
        (
            dict(role="assistant", content=[{"type": "image_url", "image_url": "x"}]),
            "a part of a content is image_url",
        ),
        (dict(role="assistant", content="a", weight=0.5), "weight 0.5"),
        (dict(role="user", content="a", train=True), "train: true in a message of user"),
        (
            dict(role="tool", content="a"),
            "does not write out the content of message 1, from tool",
        ),
        (dict(role="Sydney", content="a"), "the role Sydney is unknown"),
        (
            dict(role="assistant", content="", tool_calls=[{"name": "a", "arguments": "{"}]),
            "does not write out the tool_calls of message 1",
        ),
        (dict(role="assistant", content="a", loss_mask=0), "loss_mask in a message is unknown"),
        (dict(role="assistant", content="a", train_detail=[1]), "train_detail in a message"),
        (
            dict(role="assistant", content="<think>a</think>b", reasoning_content="c"),
            "thoughts in its content and beside it",
        ),
        (
            dict(
                role="assistant",
                content=None,
                tool_calls=[{"function": {"name": "add", "arguments": {}}}],
            ),
            "does not write out the tool_calls of message 1, from assistant",
        ),
        (
            dict(role="assistant", content="a", reasoning_content="b"),
            "does not write out the reasoning_content of message 1",
        ),
    ],
)
def test_what_would_be_lost_is_refused_by_name(tmp_path, message, words):
    template = (
        "{% for m in messages if m.role != 'tool' %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
    )
    refuses(
        re.escape(words),
        ours,
        chat_folder(tmp_path / "simple", "qwen3"),
        {"messages": [message]},
        template,
    )


CALL = {"name": "weather", "arguments": '{"city": "Paris"}'}
ASK = {"role": "user", "content": "Weather in Paris?"}
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{% endfor %}"
WITH_CALLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }} {{ ARGUMENTS }}{% endfor %}<end>{% endfor %}"
)


@pytest.mark.parametrize(
    "arguments", ["c.function.arguments | tojson", "'' + c.function.arguments"]
)
def test_arguments_are_encoded_once(tmp_path, arguments):
    """As a JSON text or as an object, in three forms: whatever the template needs."""
    folder = chat_folder(tmp_path / "calls", "qwen3")
    template = WITH_CALLS.replace("ARGUMENTS", arguments)
    call = {"type": "function", "function": CALL}
    decoded = {"type": "function", "function": CALL | {"arguments": {"city": "Paris"}}}
    beside = {"role": "assistant", "content": ""}
    for record in (
        {"messages": [ASK, beside | {"tool_calls": [call]}]},
        {"messages": [ASK, beside | {"tool_calls": [decoded]}]},
        {"messages": [ASK, {"role": "assistant", "content": None, "function_call": CALL}]},
        {
            "conversations": [
                {"from": "human", "value": ASK["content"]},
                {"from": "function_call", "value": json.dumps(CALL)},
            ]
        },
    ):
        text = "".join(told(folder, record, template)[::-1])
        assert 'weather {"city": "Paris"}' in text


def test_arguments_that_are_no_object(tmp_path):
    """A template that encodes them would train a quoted text; no text is no arguments."""
    folder = chat_folder(tmp_path / "calls", "qwen3")
    template = WITH_CALLS.replace("ARGUMENTS", "c.function.arguments | tojson")

    def record(arguments: str) -> dict:
        call = {"type": "function", "function": CALL | {"arguments": arguments}}
        return {
            "messages": [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, FOUR[0]]
        }

    assert "weather {}<end>" in "".join(told(folder, record(""), template)[::-1])
    for arguments in ('{"city": ', "[1]", "Paris"):
        refuses("no JSON object", ours, folder, record(arguments), template)


PROMPTED = CHATML + "{% if add_generation_prompt %}<assistant>{% endif %}"


def test_what_stands_beside_the_messages(tmp_path):
    """A system message, values for the template, and JSON texts of calls and tools."""
    folder = chat_folder(tmp_path / "simple", "qwen3")
    plain = {"messages": [{"role": "system", "content": "Be kind."}, *FOUR]}
    expected = told(folder, plain, PROMPTED)
    for name in ("system", "system_prompt", "system_message"):
        assert told(folder, {"messages": FOUR, name: "Be kind."}) == expected
        assert told(folder, plain | {name: "Be kind."}) == expected
    turns = [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}] * 2
    assert told(folder, {"conversations": turns, "system": "Be kind."}) == expected
    assert told(folder, {"conversations": turns, "messages": None, "system": ""}) == told(
        folder, {"messages": FOUR}
    )
    with_tools = "{{ tools | tojson }}" + PROMPTED
    given = {"tools": [{"type": "function", "function": CALL}]}
    texts = {"tools": [json.dumps(tool) for tool in given["tools"]]}
    messages = {"messages": FOUR}
    assert told(folder, messages | texts, with_tools) == told(folder, messages | given, with_tools)
    values = {"chat_template_kwargs": {"mood": "calm"}}
    moody = "<{{ mood | default('none') }}>" + PROMPTED
    assert told(folder, messages | values, moody)[1].startswith("<calm>")
    assert told(folder, messages, moody)[1].startswith("<none>")
    refuses("does not ask for mood", ours, folder, messages | values, PROMPTED)
    empty = {"mood": "", "xml_tools": [], "enable_thinking": False, "python_tools": None}
    unused = {"chat_template_kwargs": empty}  # as in SmolTalk2
    assert told(folder, messages | unused, PROMPTED) == told(folder, messages, PROMPTED)


def test_a_role_that_only_some_answers_have(tmp_path):
    """Another name for the assistant would have no loss; a template may know it."""
    folder = chat_folder(tmp_path / "simple", "qwen3")
    record = {"messages": [*FOUR, FOUR[0], {"role": "narrator", "content": "b"}]}
    refuses("the role narrator is unknown", ours, folder, record, PROMPTED)
    known = PROMPTED + "{% if messages[0].role == 'narrator' %}!{% endif %}"
    assert told(folder, record, known)[0] == "a<end>" * 2
    spaced = {"messages": [FOUR[0], FOUR[1] | {"role": " Assistant "}]}
    assert told(folder, spaced, PROMPTED) == told(folder, {"messages": FOUR[:2]}, PROMPTED)


def test_a_header_has_no_loss_where_only_a_question_asks_for_it(tmp_path):
    folder = chat_folder(tmp_path / "simple", "qwen3")
    asked = CHATML.replace(
        "{% endfor %}",
        "{% if loop.last and m.role == 'user' and add_generation_prompt %}<assistant>{% endif %}"
        "{% endfor %}",
    )
    for messages in ([*FOUR[:2], FOUR[1]], [FOUR[1], *FOUR[:2]]):
        assert told(folder, {"messages": messages}, asked)[0] == "a<end>" * 2
    literal = [FOUR[0], FOUR[1] | {"content": "<assistant>a"}]
    assert told(folder, {"messages": literal}, asked)[0] == "<assistant>a<end>"


def test_a_template_that_writes_parts_in_its_own_way(tmp_path):
    folder = chat_folder(tmp_path / "simple", "qwen3")
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    record = {"messages": [FOUR[0] | {"content": parts}, FOUR[1]]}
    joined = {"messages": [FOUR[0] | {"content": "one two"}, FOUR[1]]}
    of_list = (
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "{{ p.text }}{% endfor %}{% endif %}"
    )
    reads_parts = PROMPTED.replace("{{ m.content }}", of_list)
    for template in (PROMPTED, reads_parts):
        assert told(folder, record, template) == told(folder, joined, template)
    trimmed = reads_parts.replace("p.text", "p.text | trim")
    refuses("does not join the parts of a content", ours, folder, record, trimmed)
    assert told(folder, joined, trimmed)[0] == "a<end>"


def test_marks_that_would_change_the_text_are_refused(tmp_path):
    folder = chat_folder(tmp_path / "simple", "qwen3")
    trimmed = "{% set text %}{% generation %} {{ m.content }} {% endgeneration %}{% endset %}"
    for rest, is_right in (("{{ text }}", True), ("{{ text | trim }}", False)):
        template = CHATML.replace("{{ m.content }}", trimmed + rest)
        if is_right:
            assert told(folder, {"messages": FOUR[:1]}, template)[0].startswith(" u ")
        else:
            refuses("after it is written", ours, folder, {"messages": FOUR}, template)


def test_a_part_that_is_elsewhere_by_chance_is_lost_as_well(tmp_path):
    """Each of these has words that stand in another part of the conversation."""
    folder = chat_folder(tmp_path / "simple", "qwen3")
    call = {"type": "function", "function": {"name": "Paris", "arguments": {}}}
    called = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = {"role": "assistant", "content": "The result is 4 in Paris."}
    no_system = CHATML.replace("messages %}", "messages if m.role not in ('tool', 'system') %}")
    no_tools = {"messages": [ASK, answer], "tools": [{"type": "function", "function": CALL}]}
    for record, template, words in (
        ({"messages": [ASK, called]}, CHATML, "the tool_calls of message 2"),
        (
            {"messages": [ASK, called, {"role": "tool", "content": "4"}, answer]},
            WITH_CALLS.replace("ARGUMENTS", "''").replace(
                "messages %}", "messages if m.role != 'tool' %}"
            ),
            "the content of message 3, from tool",
        ),
        (
            {"messages": [{"role": "system", "content": "Paris"}, ASK, answer]},
            no_system,
            "the content of message 1, from system",
        ),
        (no_tools, CHATML, "does not read tools"),
        ({"messages": [ASK, answer], "functions": [CALL]}, CHATML, "does not read tools"),
        ({"messages": [ASK, answer], "tool_defs": [CALL]}, CHATML, "does not read tools"),
    ):
        refuses(words, ours, folder, record, template)


def test_an_answer_with_a_second_end_of_thoughts(folders):
    """Qwen3's template cuts an answer at its last </think>."""
    folder, _ = folders["qwen3"]
    for content in (
        "<think>\na\n</think>\nfirst part\n<think>\nb\n</think>\nsecond part",
        "Write the tag </think> and then your answer.",
    ):
        messages = [ASK, {"role": "assistant", "content": content}, ASK, FOUR[1]]
        refuses("does not write out the content of message 2", ours, folder, {"messages": messages})


def test_null_is_no_key_and_other_words_for_the_loss(tmp_path):
    folder = chat_folder(tmp_path / "simple", "qwen3")
    plain = told(
        folder,
        {"messages": FOUR},
        CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}"),
    )
    nulls = dict.fromkeys(("weight", "reasoning_content", "name", "tool_calls", "anything"))
    with_nulls = [message | nulls for message in FOUR]
    assert told(folder, {"messages": with_nulls}) == plain
    assert told(folder, {"messages": [FOUR[0], FOUR[1] | {"reasoning_content": ""}] * 2}) == plain
    for off in ({"loss": False}, {"training": False}, {"masked": True}, {"train": 0}):
        conversation = {"messages": [FOUR[0], FOUR[1] | off]}
        (folder / "chat_template.jinja").write_text(
            CHATML + "{% if add_generation_prompt %}<assistant>{% endif %}"
        )
        assert sum(ours(folder, conversation)[1]) == 0
    turns = [{"from": "human", "value": "u"}, {"from": "gpt", "value": "a", "train": False}]
    assert sum(ours(folder, {"conversations": turns})[1]) == 0
    for role in ("model", "Assistant", "bot", "bing"):
        record = {"messages": [FOUR[0], FOUR[1] | {"role": role}]}
        assert ours(folder, record) == ours(folder, {"messages": FOUR[:2]})
