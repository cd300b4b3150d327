"""Conversations as tokens: a folder's chat template writes the text, and a mask marks the
assistant's tokens.

A template with {% generation %} ... {% endgeneration %} marks the assistant's text itself. For any
other template we render prefixes of the conversation: an answer is the text after the prompt. If
the prefixes do not fit together, the template is refused, because no number would show a loss on
the wrong tokens. Some published templates would be refused, such as those of DeepSeek-V3 and
gpt-oss: chat_marks.json says where {% generation %} belongs in their texts.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable
from contextlib import suppress
from functools import cache, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import jinja2.meta
import jinja2.nodes

from corpus.sandbox import BEGIN, END, Endless, Sandbox, limits
from corpus.tokenizer import encoding_of, load_tokenizer, read_chat_template, read_special_tokens

SHAREGPT_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
# keys of the thoughts before an answer, in various files
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
PROBE = "2 + 2?"  # a question to try out a template
MARKS = Path(__file__).with_name("chat_marks.json")
NEEDED = '{"messages": [{"role": ..., "content": ...}]} or ShareGPT\'s {"conversations": [{"from": ..., "value": ...}]}'


class Conversation(NamedTuple):
    messages: list[dict]
    tools: list | None  # functions that the assistant may call, as JSON schemas


class ChatTemplate(NamedTuple):
    name: str  # for errors, with the folder
    # (messages, tools, add_generation_prompt=False, **values) -> text, with BEGIN and END around
    # marked text
    render: Callable
    has_marks: bool  # {% generation %}
    rules: str  # identifies the text that a conversation becomes
    names: frozenset[str]  # values that the template reads, apart from the usual ones


# --------------------------------------------------------------------------------------------------
# Templates
def add_marks(template: str) -> tuple[str, str]:
    """(template with {% generation %} added, its name) of a published template in chat_marks.json,
    found by the SHA-256 of its text without blanks at both ends. Any other template comes back
    unchanged, with the name ""."""
    found, none = (
        hashlib.sha256(template.strip().encode()).hexdigest(),
        {"sha256": {}, "replace": []},
    )
    row = next(
        (row for row in json.loads(MARKS.read_text("utf-8")) if found in row["sha256"]), none
    )
    for text, marked in row["replace"]:
        template = template.replace(text, marked)
    return template, row["sha256"].get(found, "")


def read_template(folder: str, user: str) -> ChatTemplate:
    """The chat template of a folder, ready to render. user: flag or file that needs the template,
    for the ValueError."""
    template, for_tools = read_chat_template(folder), read_chat_template(folder, "tool_use")
    if template is None:
        raise ValueError(
            f"{user}: {folder} has no chat template (chat_template.jinja, or in "
            "tokenizer_config.json)"
        )
    special_tokens = read_special_tokens(folder)
    marked, _ = add_marks(template)

    environment = Sandbox()

    def guarded(what, *args, **values):
        try:
            with limits():
                return what(*args, **values)
        except (Exception, Endless) as error:  # a template can make Python raise anything
            raise ValueError(
                f"the chat template of {folder} fails: {str(error) or type(error).__name__}"
            ) from None

    compiled = guarded(environment.from_string, marked)
    always = {"messages", "tools", "documents", "add_generation_prompt", *special_tokens}
    parsed = environment.parse(marked)
    # computes constants, too
    names = frozenset(guarded(jinja2.meta.find_undeclared_variables, parsed) - always)
    has_marks = any(part.data == BEGIN for part in parsed.find_all(jinja2.nodes.TemplateData))

    def render(
        messages: list, tools: list | None, add_generation_prompt: bool = False, **values
    ) -> str:
        if tools and for_tools not in (None, template):
            raise ValueError(
                f"{folder} has another chat template for tools; write it to chat_template.jinja "
                "to use it for all"
            )
        return guarded(
            compiled.render,
            **special_tokens,
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **values,
        )

    return ChatTemplate(
        f"the chat template of {folder}",
        render,
        has_marks,
        repr((2, marked, special_tokens)),
        names,
    )


def remove_marks(text: str) -> str:
    return text.replace(BEGIN, "").replace(END, "")


# --------------------------------------------------------------------------------------------------
# Files -> conversations
def parse_conversation(line: bytes) -> Conversation:
    """The conversation in one line of a file. Raises ValueError."""
    try:
        record = json.loads(line)
        text = json.dumps(record, ensure_ascii=False)
        text.encode()  # "\ud800" is JSON, but no text
        if BEGIN in text or END in text:
            raise ValueError("it has U+FDD0 or U+FDD1, which are no characters")
        messages, tools = (
            record["messages"] if "messages" in record else from_sharegpt(record),
            record.get("tools"),
        )
        tools = json.loads(tools) if isinstance(tools, str) and tools.strip() else tools
        if tools and not isinstance(tools, list):
            raise TypeError("tools must be a list")
        if not messages or not isinstance(messages, list):
            raise TypeError("a list of messages, and every message needs a role and a content")
        return Conversation([prepare_message(message) for message in messages], tools or None)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        # the repr of UnicodeError has the whole line
        reason = str(error) if isinstance(error, UnicodeError) else repr(error)
        raise ValueError(f"need a conversation like {NEEDED} ({reason})") from None


def prepare_message(message: dict) -> dict:
    """A message as templates read it: content as one text, thoughts as reasoning_content and as
    thinking. The content is a text or a list of parts; beside tool calls also null or missing.
    Raises an error for a message that we cannot train on."""
    content, weight, train = (
        message.get("content"),
        message.get("weight", 1),
        message.get("train", True),
    )
    has_content = isinstance(content, str | list) or content is None and message.get("tool_calls")
    if not has_content or not isinstance(message.get("role"), str):
        raise TypeError("every message needs a role and a content")
    if weight not in (0, 1) or train not in (True, False):
        raise ValueError(f"weight {weight}, train {train}: a message is trained or not, 1 or 0")
    if message["role"] != "assistant" and message.get("train"):
        raise ValueError(
            f"train: true in a message of {message['role']}: only what the assistant says has a "
            "loss"
        )
    # most templates know no parts, and would write nothing, or a Python list
    if isinstance(content, list):
        if kinds := [
            part.get("type", "nameless")
            for part in content
            if not isinstance(part.get("text"), str)
        ]:
            raise ValueError(
                f"a part of a content is {kinds[0]}, and only text is trained; take such "
                "conversations out"
            )
        message = message | {"content": "".join(part["text"] for part in content)}
    thoughts = [message[name] for name in THOUGHTS if message.get(name) is not None]
    return (
        {"thinking": thoughts[0]} | message | {"reasoning_content": thoughts[0]}
        if thoughts
        else message
    )


def is_trained(message: dict) -> bool:
    """Whether an answer has a loss: "weight": 0 (OpenAI) or "train": false (axolotl) switch the
    loss off."""
    return bool(message.get("weight", 1)) and message.get("train", True)


def from_sharegpt(record: dict) -> list[dict]:
    """{"conversations": [{"from", "value"}], "system"} as messages."""
    messages = [{"role": "system", "content": record["system"]}] if record.get("system") else []
    return messages + [from_turn(turn) for turn in record["conversations"]]


def from_turn(turn: dict) -> dict:
    """{"from", "value"} as a message. Some files have role and content in "conversations"; such a
    turn is a message already."""
    if "from" not in turn:
        return turn
    role, value = turn["from"], turn["value"]
    if role != "function_call":
        return {"role": SHAREGPT_ROLES.get(role.lower(), role), "content": value}
    calls = json.loads(value) if isinstance(value, str) else value
    calls = calls if isinstance(calls, list) else [calls]
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }


# --------------------------------------------------------------------------------------------------
# Conversation -> text and spans of the assistant's text -> tokens and mask
def assistant_spans(
    conversation: Conversation, template: ChatTemplate
) -> tuple[str, list[tuple[int, int]]]:
    """(whole text, [(start, end)] of the assistant's trained text, in characters). Raises
    ValueError if the template fails, or if the spans are not certain."""
    messages, tools = conversation
    full = template.render(messages, tools)
    check_rendered(conversation, template, remove_marks(full))
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if template.has_marks:
        full, spans = find_marks(full)
        if all(is_trained(messages[i]) for i in turns):
            return full, spans
        if len(spans) != len(turns):
            raise ValueError(
                f"{template.name} marks {len(spans)} texts of {len(turns)} answers: which have "
                '"weight": 0?'
            )
    else:
        spans = [find_answer(i, full, conversation, template) for i in turns]
    if None in spans:
        raise ValueError(
            f"{template.name} does not tell which tokens of message "
            f"{turns[spans.index(None)] + 1} are the "
            "assistant's; write {% generation %} ... {% endgeneration %} around the assistant's "
            "part of it"
        )
    return full, [span for i, span in zip(turns, spans, strict=True) if is_trained(messages[i])]


def check_rendered(conversation: Conversation, template: ChatTemplate, text: str) -> None:
    """Raises ValueError if the template leaves out a part of a message: training would silently
    lose content, calls or thoughts. Many templates leave out earlier thoughts on purpose, so we
    only ask whether a template writes thoughts at all."""
    for i, message in enumerate(conversation.messages, 1):
        calls = [
            call.get("function", call)
            for call in message.get("tool_calls") or []
            if isinstance(call, dict)
        ]
        names = [str(call.get("name", "")) for call in calls if isinstance(call, dict)]
        content = (message.get("content") or "").rpartition("</think>")[2].strip()
        # Llama 3 writes the output of a tool as JSON
        written = [content, json.dumps(content, ensure_ascii=False)[1:-1]]
        # some templates leave out text beside a call
        checks = {
            "reasoning_content": "reasoning_content" not in message or knows_thoughts(template),
            "tool_calls": all(name in text for name in names),
            "content": any(part in text for part in written) or calls,
        }
        if missing := [name for name, is_there in checks.items() if not is_there]:
            raise ValueError(
                f"{template.name} does not write out the {missing[0]} of message {i}, from "
                f"{message['role']}"
            )


@cache
def knows_thoughts(template: ChatTemplate) -> bool:
    thought = {
        "role": "assistant",
        "content": "x",
        "reasoning_content": "because of this",
        "thinking": "because of this",
    }
    return "because of this" in template.render(
        [{"role": "user", "content": "Why?"}, thought], None
    )


def find_marks(text: str) -> tuple[str, list[tuple[int, int]]]:
    """(text without marks, [(start, end)] of the marked parts)"""
    text = text.replace(END + BEGIN, "")  # a template may write one answer in several marked parts
    # every second is marked
    parts = [remove_marks(part) for part in re.split(f"{BEGIN}(.*?){END}", text, flags=re.DOTALL)]
    ends = accumulate(map(len, parts))
    return "".join(parts), [
        (end - len(part), end) for part, end in [*zip(parts, ends)][1::2] if part
    ]


def find_answer(
    i: int, full: str, conversation: Conversation, template: ChatTemplate
) -> tuple[int, int] | None:
    """(start, end) of message i, the assistant's, in the full text: from the end of its prompt to
    its own end. None if the rendered prefixes do not fit the full text."""
    messages, tools = conversation
    prompt, answered = (
        template.render(messages[:i], tools, True),
        template.render(messages[: i + 1], tools),
    )
    if not full.startswith(prompt):
        return None
    start = len(prompt)
    if full.startswith(answered) and len(answered) >= start:
        return start, len(answered)
    with suppress(ValueError):  # the template refuses our probes
        if end := find_answer_end(
            i, full, start, messages, lambda messages: template.render(messages, tools)
        ):
            return start, end


def find_answer_end(i: int, full: str, start: int, messages: list, render) -> int | None:
    """End of message i if the template rewrites an answer once a later question follows: Qwen3's
    drops the thoughts. The ending (like <|im_end|>) is still the same, so look for the ending after
    `start`. Two probes make sure of the right place. Another answer in place of message i must
    change nothing after the end. Other later messages must change nothing before the end: gpt-oss
    and Phi-3 write their ending only after the last answer, so we would find a later one."""
    one, other = (
        render([*messages[:i], {"role": "assistant", "content": content}]) for content in ("x", "y")
    )
    ending = os.path.commonprefix([one[::-1], other[::-1]])[::-1]
    plain = {key: value for key, value in messages[i].items() if key != "tool_calls"} | {
        "content": "x"
    }
    changed = render([*messages[:i], plain, *messages[i + 1 :]])
    end, changed_end = (text.find(ending, start) + len(ending) for text in (full, changed))
    found = (
        ending.strip()
        and changed.startswith(full[:start])
        and min(end, changed_end) >= start + len(ending)
    )
    if not found or full[end:] != changed[changed_end:]:
        return None
    behind = [
        message | {"content": BEGIN + (message.get("content") or "")}
        for message in messages[i + 1 :]
    ]
    return end if render([*messages[: i + 1], *behind]).startswith(full[:end]) else None


@lru_cache(maxsize=1)
def chat_tokenizer(file: Path):
    """Like load_tokenizer, but markers of the template, like <|im_start|>, become special tokens."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_str(load_tokenizer(file).to_str())
    # the offsets of a token include its space
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def tokens_and_mask(
    conversation: Conversation, template: ChatTemplate, tokenizer
) -> tuple[list[int], list[int]]:
    """(ids, mask) of equal length; mask: 1 for a token with a loss, the assistant's. tokenizer: a
    chat_tokenizer. A token partly in the assistant's text counts, and of several tokens for the
    last character the first: both as in transformers. Unlike transformers, a blank outside of all
    offsets does not end the answer."""
    text, spans = assistant_spans(conversation, template)
    encoding = encoding_of(tokenizer, text)
    before = [0, *(end for _, end in encoding.offsets)]  # where the token before each token ends
    mask = [
        int(any(first < end and start < last and done < end for start, end in spans))
        for done, (first, last) in zip(before, encoding.offsets)
    ]
    return encoding.ids, mask


# --------------------------------------------------------------------------------------------------
