"""A prompt in the chat template of a model's folder: --chat, --system and --template_args."""

import json
from collections.abc import Callable
from contextlib import suppress

from corpus.chat import PROBE, read_chat_template, read_template, remove_marks
from corpus.tokenizer import ChatConfig
from flags.escapes import unescape
from storage.source_tokenizer import text_folder


# Prompts for a chat model: --chat, --system and --template_args of grpo.py, evaluate.py and
# generate.py. A prompt is one message of a user, written out by the chat template of the model's
# folder, after --system TEXT if given. Some templates read further values, such as Qwen3's
# enable_thinking: --template_args enable_thinking=false.
def open_chat(folder: str, cfg: ChatConfig) -> Callable | None:
    """Function text (or messages) -> prompt for the flags; None: the text is the prompt. folder: of
    the model, "" for a new model. Raises ValueError for a flag without effect."""
    given = []
    if cfg.system:
        given.append(f"--system {cfg.system}")
    if cfg.template_args:
        given.append(f"--template_args {cfg.template_args}")
    if given and not (cfg.chat and folder):
        raise ValueError(
            f"{', '.join(given)}: there is no chat template without --chat or in a model that "
            "begins from nothing"
        )
    # on by default, as in grpo.py: only if there is a template
    is_default = type(cfg).chat and not given
    if not cfg.chat or not folder or is_default and not read_chat_template(text_folder(folder)):
        return None
    template = read_template(text_folder(folder), "--chat")
    values = read_values(cfg.template_args)
    system = unescape(cfg.system)
    unknown = sorted(values.keys() - template.names)
    if unknown:
        raise ValueError(
            f"--template_args {cfg.template_args}: {template.name} does not ask for {unknown[0]}; "
            "it asks for "
            f"{', '.join(sorted(template.names)) or 'nothing'}"
        )

    def render(text: str | list[dict], system=system, values=values) -> str:
        messages = [{"role": "user", "content": text}]
        if isinstance(text, list):
            messages = text
        if system and messages[0]["role"] == "system":
            raise ValueError(
                f"--system {system!r}: the prompts have a system message of their own; leave it out"
            )
        if system:
            messages = [{"role": "system", "content": system}, *messages]
        return remove_marks(template.render(messages, None, True, **values))

    if system:
        shown = system.strip()
        without = render(PROBE, system="", values={})
        if render(PROBE).count(shown) <= without.count(shown):
            raise ValueError(
                f"--system {system!r}: {template.name} does not show it, or shows it anyway; leave "
                "it out"
            )
    for name, value in values.items():
        others = {other: values[other] for other in values if other != name}
        if isinstance(value, str) and render(PROBE) == render(PROBE, values=others):
            raise ValueError(
                f"--template_args {name}={value}: it changes nothing in a prompt; give another "
                "value"
            )
    return render


def read_values(text: str) -> dict:
    """{name: value} of "enable_thinking=false,n=3"."""
    values = {}
    for item in text.split(","):
        item = item.strip()
        if not item:
            continue
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or not name.isidentifier() or name in values:
            raise ValueError(
                f"--template_args {text}: {item!r} is no name=value, or its name is there twice; "
                "give a=false,b=2"
            )
        values[name] = value  # text, if JSON reads nothing else
        with suppress(ValueError):
            values[name] = json.loads(value.lower())
    return values
