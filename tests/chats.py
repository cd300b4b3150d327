"""Chat templates and conversations for tests: small versions of the templates of Qwen3, Llama 3 and
DeepSeek.

MARK and ENDMARK stand for {% generation %} and {% endgeneration %}, as in a template for training.
"""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

# qwen3: tools and system in one block; answers before the last question lose their thoughts, later
# answers always have some.
# llama3: a beginning-of-text token, headers, trimmed contents, tools in the system message, a call
# as the whole answer.
# deepseek: system message without a role; the text after tool outputs closes the outputs, and the
# assistant goes on without a header.
TEMPLATES = {
    name: Path(__file__).with_name("chat_templates").joinpath(f"{name}.jinja").read_text()
    for name in ("qwen3", "llama3", "deepseek")
}
SPECIAL = {
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama3": [
        "<|end_of_text|>",
        "<|begin_of_text|>",
        "<|start_header_id|>",
        "<|end_header_id|>",
        "<|eot_id|>",
    ],
    "deepseek": [
        f"<｜{name}｜>"
        for name in (
            "end▁of▁sentence",
            "begin▁of▁sentence",
            "User",
            "Assistant",
            "tool▁call▁begin",
            "tool▁call▁end",
            "tool▁sep",
            "tool▁outputs▁begin",
            "tool▁outputs▁end",
            "tool▁output▁begin",
            "tool▁output▁end",
        )
    ],
}
EOS = {"qwen3": "<|im_end|>", "llama3": "<|eot_id|>", "deepseek": "<｜end▁of▁sentence｜>"}
BOS = {"llama3": "<|begin_of_text|>", "deepseek": "<｜begin▁of▁sentence｜>"}

WORDS = (
    "What is the sum of 17 and 25? Träume, 你好, naïve 🙂 code: def f(x):\n    return x + 1\n and "
    "then   spaces\n\n"
    " it's done, I think so <b> {json: 1} user assistant \tend"
).split(" ")
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        },
    },
}


def with_marks(template: str, marks: bool = True) -> str:
    begin, end = ("{%- generation %}", "{%- endgeneration %}") if marks else ("", "")
    return template.replace("ENDMARK", end).replace("MARK", begin)


def bpe(text: str, size: int, special=()) -> Tokenizer:
    """A byte-level BPE, trained on a text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    made.train_from_iterator(
        [text] * 9,
        trainers.BpeTrainer(
            vocab_size=size,
            special_tokens=[*special],
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    return made


def judged(theirs, record, **options) -> tuple[list[int], list[int]]:
    """(ids, mask) of a conversation from a tokenizer of transformers."""
    found = theirs.apply_chat_template(
        record["messages"],
        tools=record.get("tools"),
        return_dict=True,
        return_assistant_tokens_mask=True,
        **options,
    )
    return list(found["input_ids"]), list(found["assistant_masks"])


def chat_folder(folder, kind: str, marks: bool = False):
    """A Hugging Face folder with tokenizer and chat template, of a kind in TEMPLATES."""
    folder.mkdir(parents=True, exist_ok=True)
    made = bpe(" ".join(WORDS), 400, SPECIAL[kind])
    if kind in BOS:  # as Llama 3's: would add a second beginning-of-text token if asked
        begin = BOS[kind], made.token_to_id(BOS[kind])
        made.post_processor = processors.TemplateProcessing(
            single=f"{BOS[kind]} $A", special_tokens=[begin]
        )
    made.save(str(folder / "tokenizer.json"))
    rules = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": EOS[kind]}
    rules |= {"bos_token": BOS[kind]} if kind in BOS else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(rules))
    (folder / "chat_template.jinja").write_text(with_marks(TEMPLATES[kind], marks))
    return folder


def conversations(
    count: int, seed: int = 0, tools: bool = True, most_turns: int = 6, beside: bool = True
) -> list[dict]:
    """1 to most_turns turns each: with and without system message, thoughts, a call of a tool and
    its output. beside: text beside a call, which Llama 3's template would drop."""
    rng, made = random.Random(seed), []

    def words(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

    for _ in range(count):
        messages, calls = [], tools and rng.random() < 0.3
        if rng.random() < 0.4:
            messages.append({"role": "system", "content": words(8)})
        for _ in range(rng.randint(1, most_turns)):
            messages.append({"role": "user", "content": words(20)})
            if calls and rng.random() < 0.6:
                call = {
                    "type": "function",
                    "function": {"name": "add", "arguments": {"a": rng.randint(0, 99), "b": "ä"}},
                }
                messages.append(
                    {
                        "role": "assistant",
                        "content": rng.choice(["", words(4)]) if beside else "",
                        "tool_calls": [call],
                    }
                )
                messages += [{"role": "tool", "content": words(3)}] * rng.randint(1, 2)
            if rng.random() < 0.4:
                thoughts = f"<think>\n{words(9)}\n</think>\n\n"
            else:
                thoughts = ""
            messages.append({"role": "assistant", "content": thoughts + words(20)})
        made.append({"messages": messages} | ({"tools": [TOOL]} if calls else {}))
    return made
