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
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jinja2.meta
import jinja2.nodes

from corpus.beside import read_beside, read_special_tokens
from corpus.parts import in_parts, knows_parts, text_of_parts
from corpus.sandbox import BEGIN, END, Endless, Sandbox, limits
from corpus.tokenizer import encoding_of, load_tokenizer
from flags.files import HF_LIMIT, hf_file

# other words for a role, in lower case, in "role" as in "from"
ROLES = {
    "human": "user",
    "prompter": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "ai": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "function_call": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
# keys that switch the loss of an answer: name -> the value that means trained
SWITCHES = {"weight": 1, "train": True, "training": True, "loss": True, "masked": False}
# keys of a message that templates read, and keys that say nothing to a model
READ = ("role", "content", "name", "tool_calls", "tool_call_id", "end_turn", "prefix")
IGNORED = ("id", "index", "timestamp", "created_at", "date", "model", "language", "lang")
# keys of the thoughts before an answer, in various files
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
# (thoughts at the beginning of an answer, the blank after them, the answer)
THOUGHT = re.compile(r"(\s*<think>(?:(?!</?think>).)*</think>)?(\s*)(.*)", re.DOTALL)
PROBE = "2 + 2?"  # a question to try out a template
MARKS = Path(__file__).with_name("chat_marks.json")
NEEDED = '{"messages": [{"role": ..., "content": ...}]} or ShareGPT\'s {"conversations": [{"from": ..., "value": ...}]}'


CHAT_ROLES = ("system", "user", "assistant", "tool", "developer")
# keys of a line for a system message beside the others
SYSTEM = ("system", "system_prompt", "system_message")


class Conversation(NamedTuple):
    messages: list[dict]
    tools: list | None  # functions that the assistant may call, as JSON schemas
    values: str = "{}"  # JSON of further values for the template: chat_template_kwargs


class ChatTemplate(NamedTuple):
    name: str  # for errors, with the folder
    # (messages, tools, add_generation_prompt=False, **values) -> text, with BEGIN and END around
    # marked text
    render: Callable
    has_marks: bool  # {% generation %}
    rules: str  # identifies the text that a conversation becomes
    names: frozenset[str]  # values that the template reads, apart from the usual ones
    reads_tools: bool
    render_plain: Callable  # render without marks
    strings: frozenset[str]  # texts in the template's code, such as the roles that it knows


# --------------------------------------------------------------------------------------------------
# Templates
def add_marks(template: str) -> tuple[str, str]:
    """(template with {% generation %} added, its name) of a published template in chat_marks.json,
    found by the SHA-256 of its text without blanks at both ends. Any other template comes back
    unchanged, with the name ""."""
    found = hashlib.sha256(template.strip().encode()).hexdigest()
    for row in json.loads(MARKS.read_text("utf-8")):
        if found in row["sha256"]:
            for text, marked in row["replace"]:
                template = template.replace(text, marked)
            return template, row["sha256"][found]
    return template, ""


def read_chat_template(folder: str, name: str = "default") -> str | None:
    """The chat template of a Hugging Face folder, None without one. name: of the template, if the
    folder has several."""
    for place, file in (
        (os.path.join(folder, "additional_chat_templates"), f"{name}.jinja"),
        (folder, "chat_template.jinja"),
    ):
        if os.path.lexists(os.path.join(place, file)):
            return Path(hf_file(place, file, HF_LIMIT)).read_text("utf-8")
    template = read_beside(folder, "tokenizer_config.json").get("chat_template")
    if isinstance(template, dict):
        template = template.get(name)
    if isinstance(template, list):
        for named in template:
            if isinstance(named, dict) and named.get("name") == name:
                template = named.get("template")
                break
    if isinstance(template, str):
        return template
    return None


def read_template(folder: str, user: str) -> ChatTemplate:
    """The chat template of a folder, ready to render. user: flag or file that needs the template,
    for the ValueError."""
    template = read_chat_template(folder)
    for_tools = read_chat_template(folder, "tool_use")
    if template is None:
        raise ValueError(
            f"{user}: {folder} has no chat template (chat_template.jinja, or in "
            "tokenizer_config.json)"
        )
    special_tokens = read_special_tokens(folder)
    marked, _ = add_marks(template)

    environment = Sandbox()
    unmarked = Sandbox(marks=("", ""))

    def guarded(what, *args, **values):
        try:
            with limits():
                return what(*args, **values)
        except (Exception, Endless) as error:  # a template can make Python raise anything
            said = " ".join(str(error).split())
            raise ValueError(
                f"the chat template of {folder} fails: {said or type(error).__name__}"
            ) from None

    compiled = guarded(environment.from_string, marked)
    compiled_plain = guarded(unmarked.from_string, marked)
    always = {"messages", "tools", "documents", "add_generation_prompt", *special_tokens}
    parsed = environment.parse(marked)
    # computes constants, too
    read = guarded(jinja2.meta.find_undeclared_variables, parsed)
    names = frozenset(read - always)
    has_marks = any(part.data == BEGIN for part in parsed.find_all(jinja2.nodes.TemplateData))
    constants = [constant.value for constant in parsed.find_all(jinja2.nodes.Const)]

    def render(
        messages: list,
        tools: list | None,
        add_generation_prompt: bool = False,
        compiled=compiled,
        **values,
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
        repr((3, marked, special_tokens)),
        names,
        "tools" in read,
        partial(render, compiled=compiled_plain),
        frozenset(text for text in constants if isinstance(text, str)),
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
        check_keys_beside(record)
        if record.get("messages") is not None:
            messages = record["messages"]
        else:
            messages = [from_turn(turn) for turn in record["conversations"]]
        if not messages or not isinstance(messages, list):
            raise TypeError("a list of messages, and every message needs a role and a content")
        prepared = [prepare_message(message) for message in messages]
        values = json.dumps(record.get("chat_template_kwargs") or {}, sort_keys=True)
        return Conversation(with_system(record, prepared), tools_of(record), values)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        # the repr of UnicodeError has the whole line
        if isinstance(error, UnicodeError):
            reason = str(error)
        else:
            reason = repr(error)
        raise ValueError(f"need a conversation like {NEEDED} ({reason})") from None


def check_keys_beside(record: dict) -> None:
    """Raises an error for keys of a line that would change what is trained, and that nobody reads."""
    if record.get("messages") and record.get("conversations"):
        raise ValueError("messages and conversations in one line: take one of them out")
    if record.get("documents"):
        raise ValueError("documents are given to no template; write them into a message")
    if not isinstance(record.get("chat_template_kwargs") or {}, dict):
        raise TypeError("chat_template_kwargs must be an object")
    for name, on in SWITCHES.items():
        value = record.get(name)
        is_off = isinstance(value, bool) and value != on
        if is_off or name == "weight" and value not in (None, 1):
            raise ValueError(
                f"{name}: {value} for a whole conversation is not read; leave the line out, or "
                f"write {name} into its messages"
            )


def with_system(record: dict, messages: list[dict]) -> list[dict]:
    """The messages after the system message that some files write beside them. Raises an error if
    there are two of them."""
    found = {name: record[name] for name in SYSTEM if record.get(name)}
    for name, content in found.items():
        message = prepare_message({"role": "system", "content": content})
        if messages[0]["role"] != "system":
            messages = [message, *messages]
        elif messages[0]["content"] != message["content"]:
            raise ValueError(f"{name} and another system message: give one of them")
    return messages


def tools_of(record: dict) -> list | None:
    """The functions that an assistant may call: tools, OpenAI's older functions, or verifiers'
    tool_defs, as a list or as its JSON text. Raises an error for two of them."""
    found = {name: record.get(name) for name in ("tools", "functions", "tool_defs")}
    found = {name: value for name, value in found.items() if value}
    if len(found) > 1:
        raise ValueError(f"{' and '.join(found)}: give the functions once")
    for name, tools in found.items():
        if isinstance(tools, str) and tools.strip():
            tools = json.loads(tools)
        if tools and not isinstance(tools, list):
            raise TypeError(f"{name} must be a list")
        tools = [json.loads(tool) if isinstance(tool, str) else tool for tool in tools or []]
        if not all(isinstance(tool, dict) for tool in tools):
            raise TypeError(f"{name} must be a list of objects")
        if name != "tools":
            tools = [as_tool(function) for function in tools]
        return tools or None
    return None


def as_tool(function: dict) -> dict:
    """A function's description in today's form, under the key "function"."""
    if "function" in function:
        return function
    return {"type": "function", "function": function}


def prepare_message(message: dict) -> dict:
    """A message as templates read it: content as one text, thoughts as reasoning_content and as
    thinking, calls as tool_calls, the usual names of roles. The content is a text or a list of
    parts; beside tool calls also null or missing. A key that is null is no key, as tables write
    it. Raises an error for a message that we cannot train on, and for keys that nobody reads."""
    message = {key: value for key, value in message.items() if value is not None}
    message = {key: value for key, value in message.items() if value != "" or key not in THOUGHTS}
    message = with_calls(message)
    content = message.get("content")
    role = message.get("role")
    has_content = isinstance(content, str | list) or content is None and message.get("tool_calls")
    if not has_content or not isinstance(role, str):
        raise TypeError("every message needs a role and a content")
    usual = role.strip().lower()
    usual = ROLES.get(usual, usual)
    if usual in CHAT_ROLES:
        message["role"] = usual
    message.setdefault("content", None)
    check_keys(message)
    # most templates know no parts, and would write nothing, or a Python list
    if isinstance(content, list):
        message["content"] = text_of_parts(content)
        message["content_parts"] = content
    thoughts = [message[name] for name in THOUGHTS if name in message]
    if not thoughts:
        return message
    if (message["content"] or "").lstrip().startswith("<think>"):
        raise ValueError("a message has thoughts in its content and beside it: give them once")
    return {"thinking": thoughts[0]} | message | {"reasoning_content": thoughts[0]}


def check_keys(message: dict) -> None:
    """Raises an error for a key of a message that is unknown, or for a value that is neither on
    nor off."""
    known = {*READ, *IGNORED, *THOUGHTS, *SWITCHES}
    unknown = [key for key in message if key not in known and message[key] not in ([], {})]
    if unknown:
        advice = ""
        if any(word in unknown[0] for word in ("detail", "mask", "train")):
            advice = 'switch the loss of an answer off with "train": false; '
        raise ValueError(
            f"{unknown[0]} in a message is unknown, and would be lost; {advice}take the key out, "
            f"or rename it: {', '.join([*READ, THOUGHTS[0], *SWITCHES])}"
        )
    for name, on in SWITCHES.items():
        value = message.get(name, on)
        if value not in (0, 1):
            said = f"weight {message.get('weight', 1)}, train {message.get('train', True)}"
            if name not in ("weight", "train"):
                said = f"{name} {value}"
            raise ValueError(f"{said}: a message is trained or not, 1 or 0")
        if name in message and name not in ("weight", "masked") and value:
            if message["role"] != "assistant":
                raise ValueError(
                    f"{name}: true in a message of {message['role']}: only what the assistant says "
                    "has a loss"
                )


def with_calls(message: dict) -> dict:
    """The message, with calls as a list: tool_calls, a list or its JSON text, or OpenAI's older
    function_call. Raises an error for anything else."""
    calls = message.get("tool_calls")
    if isinstance(calls, str) and calls.strip():
        calls = json.loads(calls)
    if calls and not isinstance(calls, list):
        raise TypeError("tool_calls must be a list")
    for call in calls or []:
        if not isinstance(call, dict) or not isinstance(call.get("function", call), dict):
            raise TypeError(f"a call must be an object, not {call!r:.40}")
    if "tool_calls" in message:
        message = message | {"tool_calls": calls or []}
    if "function_call" not in message:
        return message
    call = message["function_call"]
    rest = {key: value for key, value in message.items() if key != "function_call"}
    return rest | {"tool_calls": [{"type": "function", "function": call}]}


def is_trained(message: dict) -> bool:
    """Whether an answer has a loss: "weight": 0 (OpenAI), "train": false (axolotl), "training",
    "loss": false, or "masked": true switch the loss off."""
    return all(bool(message.get(name, on)) == bool(on) for name, on in SWITCHES.items())


def from_turn(turn: dict) -> dict:
    """{"from", "value"} as a message, with its other keys. Some files have role and content in
    "conversations"; such a turn is a message already."""
    if "from" not in turn:
        return turn
    role = turn["from"]
    value = turn["value"]
    more = {key: each for key, each in turn.items() if key not in ("from", "value")}
    if role != "function_call":
        return {"role": role, "content": value} | more
    calls = value
    if isinstance(value, str):
        calls = json.loads(value)
    if not isinstance(calls, list):
        calls = [calls]
    calls = [{"type": "function", "function": call} for call in calls]
    return {"role": "assistant", "content": "", "tool_calls": calls} | more


# --------------------------------------------------------------------------------------------------
# Conversation -> text and spans of the assistant's text -> tokens and mask
def assistant_spans(
    conversation: Conversation, template: ChatTemplate
) -> tuple[str, list[tuple[int, int]]]:
    """(whole text, [(start, end)] of the assistant's trained text, in characters). Raises
    ValueError if the template fails, or if the spans are not certain."""
    template = with_values(template, conversation.values)
    conversation = with_arguments(conversation, template)
    messages, tools, _ = conversation
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    # another name for the assistant would have no loss; a template that knows a role has its name
    known = template.strings.union(CHAT_ROLES)
    unknown = [message["role"] for message in messages if message["role"] not in known]
    if unknown:
        raise ValueError(
            f"the role {unknown[0]} is unknown, also to {template.name}; use "
            f"{', '.join(CHAT_ROLES)}"
        )
    full = template.render(messages, tools)
    check_joined(conversation, template)
    if template.has_marks:
        full, spans = find_marks(full)
        if full != template.render_plain(messages, tools):
            raise ValueError(
                f"{template.name} changes the text of {{% generation %}} after it is written, as by "
                "trim: write {% generation %} around the last form of the text"
            )
        check_rendered(conversation, template)
        if all(is_trained(messages[i]) for i in turns):
            return full, spans
        if len(spans) != len(turns):
            raise ValueError(
                f"{template.name} marks {len(spans)} texts of {len(turns)} answers: which have "
                '"weight": 0?'
            )
    else:
        spans = []
        for i in turns:
            span = find_answer(i, full, conversation, template)
            if span is None:
                raise ValueError(
                    f"{template.name} does not tell which tokens of message {i + 1} are the "
                    "assistant's; write {% generation %} ... {% endgeneration %} around the "
                    "assistant's part of it"
                )
            spans.append(span)
        check_rendered(conversation, template)
    return full, [span for i, span in zip(turns, spans, strict=True) if is_trained(messages[i])]


@lru_cache(maxsize=64)
def with_values(template: ChatTemplate, values: str) -> ChatTemplate:
    """The template with a line's chat_template_kwargs, as JSON. Raises ValueError for a value that
    the template does not ask for."""
    given = {}
    for name, value in json.loads(values).items():
        # a false or an empty value that no template asks for says nothing
        if value or name in template.names:
            given[name] = value
    if not given:
        return template
    unknown = sorted(given.keys() - template.names)
    if unknown:
        raise ValueError(f"chat_template_kwargs: {template.name} does not ask for {unknown[0]}")
    return template._replace(
        render=partial(template.render, **given),
        render_plain=partial(template.render_plain, **given),
    )


def check_joined(conversation: Conversation, template: ChatTemplate) -> None:
    """Raises ValueError if the template writes the parts of a content in another way than joined,
    as we write them: with lines between, or each part trimmed."""
    messages, tools, _ = conversation
    listed = in_parts(messages)
    if listed == messages or not knows_parts(template.render_plain):
        return
    if template.render_plain(listed, tools) != template.render_plain(messages, tools):
        raise ValueError(
            f"{template.name} does not join the parts of a content; give each content as one text"
        )


def check_rendered(conversation: Conversation, template: ChatTemplate) -> None:
    """Raises ValueError if the template leaves out a part of a message: training would silently
    lose content, calls or thoughts. We put a word of our own in the place of each part, and look
    for the words. Many templates leave out earlier thoughts on purpose, so we only ask whether a
    template writes thoughts at all."""
    if conversation.tools and not template.reads_tools:
        raise ValueError(f"{template.name} does not read tools, and the conversation has some")
    words: dict[str, tuple[int, str]] = {}  # word -> number of the message, part
    messages = []
    for i, message in enumerate(conversation.messages, 1):
        if "reasoning_content" in message and not knows_thoughts(template):
            raise ValueError(not_written(template, "reasoning_content", i, message))
        messages.append(with_words(message, i, words))
    text = template.render(messages, conversation.tools).lower()
    for word, (i, part) in words.items():
        if word.lower() not in text:
            raise ValueError(not_written(template, part, i, conversation.messages[i - 1]))


def not_written(template: ChatTemplate, part: str, i: int, message: dict) -> str:
    return f"{template.name} does not write out the {part} of message {i}, from {message['role']}"


def with_words(message: dict, i: int, words: dict) -> dict:
    """Message number i with a word in the place of each part, which goes into `words`."""

    def word_for(part: str) -> str:
        word = f"Qz{len(words)}zQ"
        words[word] = i, part
        return word

    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        named: dict[str, Any] = {"name": word_for("tool_calls")}
        if function.get("arguments"):
            arguments: dict | str = {word_for("arguments"): word_for("arguments")}
            if isinstance(function["arguments"], str):
                arguments = json.dumps(arguments)
            named["arguments"] = arguments
        if "function" in call:
            named = {"function": function | named}
        calls.append(call | named)
    changed: dict[str, Any] = {}
    if calls:
        changed["tool_calls"] = calls
    content = message["content"]
    if content and content.strip():
        pieces = [""]
        if message["role"] == "assistant":
            # the thoughts at the beginning may be left out, but no text behind them
            found = THOUGHT.match(content)
            assert found is not None, "every part of THOUGHT may be empty"
            thought, pieces[0], content = found.groups(default="")
            pieces[0] = thought + pieces[0]
        for piece in re.split("(</?think>)", content):
            if piece.strip() and piece not in ("<think>", "</think>"):
                piece = word_for("content")
            pieces.append(piece)
        changed["content"] = "".join(pieces)
    return message | changed


@lru_cache(maxsize=256)
def arguments_as(template: ChatTemplate) -> type | None:
    """How a template reads the arguments of a call: dict, if the template writes JSON itself or
    each argument alone; str, if the template wants JSON text; None, if neither comes out right."""
    for kind in (dict, str):
        arguments = {"Qkey": "Qvalue"}
        if kind is str:
            arguments = json.dumps(arguments)
        call = {"name": "Qname", "arguments": arguments}
        message = {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "id": "call00000", "function": call}],
        }
        with suppress(ValueError):
            text = template.render([{"role": "user", "content": PROBE}, message], None)
            is_encoded_twice = '\\"Qkey' in text
            is_python = "'Qkey'" in text
            if "Qkey" in text and "Qvalue" in text and not is_encoded_twice and not is_python:
                return kind
    return None


def with_arguments(conversation: Conversation, template: ChatTemplate) -> Conversation:
    """The conversation, with the arguments of its calls as the template reads them: OpenAI writes a
    JSON text, and a template that encodes the text once more would train escaped quotes."""
    if not any(message.get("tool_calls") for message in conversation.messages):
        return conversation
    wanted = arguments_as(template)
    messages = []
    for message in conversation.messages:
        calls = [with_argument(call, wanted) for call in message.get("tool_calls") or []]
        if calls:
            message = message | {"tool_calls": calls}
        messages.append(message)
    return conversation._replace(messages=messages)


def with_argument(call: dict, wanted: type | None) -> dict:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if wanted is dict and isinstance(arguments, str):
        decoded = None
        with suppress(ValueError):
            # no text is no arguments
            decoded = json.loads(arguments.strip() or "{}")
        if not isinstance(decoded, dict):
            raise ValueError(
                f"the arguments of a call are no JSON object, but {arguments!r:.60}: the template "
                "would write them as a quoted text"
            )
        arguments = decoded
    elif wanted is str and isinstance(arguments, dict):
        arguments = json.dumps(arguments, ensure_ascii=False)
    if arguments is None:
        return call
    changed = function | {"arguments": arguments}
    if "function" in call:
        return call | {"function": changed}
    return changed


@lru_cache(maxsize=256)
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
    plain = ""
    spans = []
    for i, part in enumerate(re.split(f"{BEGIN}(.*?){END}", text, flags=re.DOTALL)):
        part = remove_marks(part)
        if i % 2 == 1 and part:  # every second is marked
            spans.append((len(plain), len(plain) + len(part)))
        plain += part
    return plain, spans


def find_answer(
    i: int, full: str, conversation: Conversation, template: ChatTemplate
) -> tuple[int, int] | None:
    """(start, end) of message i, the assistant's, in the full text: from the end of its prompt to
    its own end. None if the rendered prefixes do not fit the full text."""
    messages, tools, _ = conversation
    try:
        prompt = template.render(messages[:i], tools, True)
        answered = template.render(messages[: i + 1], tools)
    except ValueError:
        return None  # the template refuses a prefix, such as one without a message
    if not full.startswith(prompt):
        return None
    start = len(prompt)
    # some templates write the header of an answer only after a question: it has no loss
    header = generation_prompt(template)
    if full.startswith(header, start) and not prompt.endswith(header):
        start += len(header)
    if full.startswith(answered) and len(answered) >= start:
        return start, len(answered)
    with suppress(ValueError):  # the template refuses our probes
        end = find_answer_end(i, full, start, messages, partial(template.render, tools=tools))
        if end:
            return start, end


@lru_cache(maxsize=256)
def generation_prompt(template: ChatTemplate) -> str:
    """What a template writes after a question to begin an answer, such as <|im_start|>assistant."""
    asked = [{"role": "user", "content": PROBE}]
    with suppress(ValueError):
        text = template.render(asked, None)
        prompt = template.render(asked, None, True)
        if prompt.startswith(text):
            return prompt[len(text) :]
    return ""


def find_answer_end(
    i: int, full: str, start: int, messages: list, render: Callable[[list], str]
) -> int | None:
    """End of message i if the template rewrites an answer once a later question follows: Qwen3's
    drops the thoughts. The ending (like <|im_end|>) is still the same, so look for the ending after
    `start`. Two probes make sure of the right place. Another answer in place of message i must
    change nothing after the end. Other later messages must change nothing before the end: gpt-oss
    and Phi-3 write their ending only after the last answer, so we would find a later one."""
    before = messages[:i]
    after = messages[i + 1 :]
    one = render([*before, {"role": "assistant", "content": "x"}])
    other = render([*before, {"role": "assistant", "content": "y"}])
    ending = os.path.commonprefix([one[::-1], other[::-1]])[::-1]
    plain = messages[i] | {"content": "x"}
    plain.pop("tool_calls", None)
    changed = render([*before, plain, *after])
    end = full.find(ending, start) + len(ending)
    changed_end = changed.find(ending, start) + len(ending)
    found = (
        ending.strip()
        and changed.startswith(full[:start])
        and min(end, changed_end) >= start + len(ending)
    )
    if not found or full[end:] != changed[changed_end:]:
        return None
    behind = [message | {"content": BEGIN + (message.get("content") or "")} for message in after]
    if render([*messages[: i + 1], *behind]).startswith(full[:end]):
        return end
    return None


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
    mask = []
    for done, (first, last) in zip(before, encoding.offsets):
        is_trained = any(first < end and start < last and done < end for start, end in spans)
        mask.append(int(is_trained))
    return encoding.ids, mask


# --------------------------------------------------------------------------------------------------
