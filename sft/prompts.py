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
    from sft.chat import read_template, remove_marks

    template = read_template(folder if is_hf_folder(folder) else newest_readable(folder))
    if template is None:
        raise ValueError(f"--chat: {folder} has no chat template (tokenizer_config.json, chat_template.jinja); leave it out")
    values, system = read_values(template_args), system.replace("\\n", "\n").replace("\\t", "\t")
    if unknown := sorted(values.keys() - template.names):
        raise ValueError(f"--template_args {template_args}: {template.name} does not ask for {unknown[0]}; it asks for "
                         f"{', '.join(sorted(template.names)) or 'nothing'}")

    def render(text: str, system=system, values=values, flag="--chat") -> str:
        messages = [{"role": "system", "content": system}] * bool(system) + [{"role": "user", "content": text}]
        try:
            return remove_marks(template.render(messages, None, True, **values))
        except ValueError as error:
            raise ValueError(f"{flag}: {error}") from None

    if system:
        flag, shown = f"--system {system!r}", system.strip()
        if render(PROBE, flag=flag).count(shown) <= render(PROBE, system="", values={}).count(shown):
            raise ValueError(f"{flag}: {template.name} does not show it, or shows it anyway; leave it out")
    for name, value in values.items():
        flag, others = f"--template_args {name}={value}", {other: values[other] for other in values if other != name}
        if render(PROBE, flag=flag) == render(PROBE, values=others) and isinstance(value, str):
            raise ValueError(f"{flag}: it changes nothing in a prompt; give true, false, a number or another text")
    return render


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
