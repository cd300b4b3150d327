"""Prompts for a chat model: --chat, --system and --template_args of grpo.py, evaluate.py and generate.py.

A prompt is one message of a user, written out by the chat template of the model's folder, after --system TEXT if given. Some
templates read further values, such as Qwen3's enable_thinking: --template_args enable_thinking=false.
"""
import re
from collections.abc import Callable
from dataclasses import fields

from corpus.tokenizer import ChatConfig, read_chat_template
from storage.manifest import is_hf_folder, newest_readable
from support.config import default_of, spell_flag

PROBE = "2 + 2?"  # a question to try out a template


def open_chat(folder: str, cfg: ChatConfig) -> Callable | None:
    """Function text -> prompt for the flags; None: the text is the prompt. folder: of the model, "" for a new model. Raises
    ValueError for a flag without effect."""
    defaults = {f.name: default_of(f) for f in fields(cfg)}  # of the program: in grpo.py --chat is on
    given = [spell_flag(f.name, getattr(cfg, f.name)) for f in fields(ChatConfig)
             if getattr(cfg, f.name) != defaults[f.name]]
    if not cfg.chat and (cfg.system or cfg.template_args):
        raise ValueError(f"{', '.join(given)}: " + (
            "there is no place for one without the chat template; leave out the one or the other" if "--no-chat" in given else
            "without --chat there is no place for it; add --chat, or leave it out"))
    if not cfg.chat and not given:
        return None
    if not folder and given:
        raise ValueError(f"{', '.join(given)}: a model that begins from nothing has no chat template; leave it out")
    has_template = folder and read_chat_template(folder if is_hf_folder(folder) else newest_readable(folder))
    if not has_template and given:
        raise ValueError(f"{', '.join(given)}: {folder} has no chat template (tokenizer_config.json, chat_template.jinja); "
                         "leave it out")
    return chat_prompts(folder, cfg.system, cfg.template_args) if cfg.chat and has_template else None


def chat_prompts(folder: str, system="", template_args="") -> Callable:
    """Function text -> prompt for a chat model, by the folder's chat template. Raises ValueError."""

    def guarded(flag, what, *args, **values):
        try:
            return what(*args, **values)
        except ValueError as error:
            raise ValueError(f"{flag}: {error}") from None

    from sft.chat import read_template, remove_marks

    template = guarded("--chat", read_template, folder if is_hf_folder(folder) else newest_readable(folder))
    if template is None:
        raise ValueError(f"--chat: {folder} has no chat template (tokenizer_config.json, chat_template.jinja); leave it out")
    values, system = read_values(template_args), system.replace("\\n", "\n").replace("\\t", "\t")
    if unknown := sorted(values.keys() - template.names):
        raise ValueError(f"--template_args {template_args}: {template.name} does not ask for {unknown[0]}; it asks for "
                         f"{', '.join(sorted(template.names)) or 'nothing'}")

    def render(text: str, system: str, values: dict) -> str:
        messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": text}]
        return remove_marks(template.render(messages, None, True, **values))

    if system:
        with_it = guarded(f"--system {system!r}", render, PROBE, system, values)
        if with_it.count(system.strip()) <= render(PROBE, "", values).count(system.strip()):
            raise ValueError(f"--system {system!r}: {template.name} does not show it, or shows it anyway; leave it out")
    for name, value in values.items():
        others = {other: values[other] for other in values if other != name}
        flag = f"--template_args {name}={value}"
        if guarded(flag, render, PROBE, system, values) == render(PROBE, system, others) and isinstance(value, str):
            raise ValueError(f"{flag}: it changes nothing in a prompt; give true, false, a number or another text")
    return lambda text: guarded("--chat", render, text, system, values)


def read_values(text: str) -> dict:
    """{name: value} of "enable_thinking=false,n=3"."""
    values = {}
    for item in filter(None, (item.strip() for item in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not name.isidentifier() or name in values:
            raise ValueError(f"--template_args {text}: {item!r} is no name=value, or its name is there twice; give "
                             "enable_thinking=false, several with commas between them")
        values[name] = {"true": True, "false": False}.get(value.lower(), value)
        if re.fullmatch(r"[+-]?\d+", value):
            values[name] = int(value)
        elif re.fullmatch(r"[+-]?(\d+\.\d*|\.\d+|\d+)([eE][+-]?\d+)?", value):
            values[name] = float(value)
    return values
