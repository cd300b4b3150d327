"""The files beside tokenizer.json in a folder of Hugging Face: special tokens, chat template, and the
ids that end an answer."""

import os
from pathlib import Path
from typing import Any

from distributed.agree import reason
from flags.files import HF_LIMIT, HF_LIMITS, hf_file, read_json

# Files beside tokenizer.json in a Hugging Face folder: special tokens, chat template, and the ids
# that end an answer
BESIDE = (
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
    "added_tokens.json",
)
# The names of special tokens in transformers, in the order of transformers
STANDARD = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
# Keys of {name: token} with further special tokens, such as those for pictures
FURTHER = ("extra_special_tokens", "model_specific_special_tokens")


def has_files_beside(folder: str) -> bool:
    return any(os.path.lexists(os.path.join(folder, name)) for name in BESIDE)


def read_hf_json(folder: str, name: str) -> dict:
    real = hf_file(folder, name, HF_LIMITS.get(name, HF_LIMIT))
    path = os.path.join(folder, name)
    try:
        value = read_json(real)
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON that can be read: {reason(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def read_beside(folder: str, name: str) -> dict:
    """read_hf_json of a file that a folder may lack; {} without."""
    if os.path.lexists(os.path.join(folder, name)):
        return read_hf_json(folder, name)
    return {}


def files_beside(tokenizer_file: str | Path) -> dict:
    """{name: content} of the files to copy along with a tokenizer.json. ValueError for links
    elsewhere, absurd sizes."""
    folder = os.path.dirname(os.path.abspath(tokenizer_file))
    there = [name for name in BESIDE if os.path.lexists(os.path.join(folder, name))]
    return {
        name: Path(hf_file(folder, name, HF_LIMITS.get(name, HF_LIMIT))).read_bytes()
        for name in there
    }


def special_files(folder: str) -> list[str]:
    """The files that name special tokens, the stronger last. As in transformers,
    special_tokens_map.json, a file of older versions, counts only if tokenizer_config.json has no
    added_tokens_decoder."""
    if "added_tokens_decoder" in read_beside(folder, "tokenizer_config.json"):
        return ["tokenizer_config.json"]
    return ["tokenizer_config.json", "special_tokens_map.json"]


def read_special_tokens(folder: str) -> dict[str, str]:
    """{name, such as eos_token: text} of the special tokens that tokenizer_config.json and
    special_tokens_map.json of a folder name. A model may name further ones in an object."""
    found = {}
    further = {}
    for file in special_files(folder):
        content = read_beside(folder, file)
        for name, token in content.items():
            text = text_of_token(token)
            if name.endswith("_token") and text is not None:
                found[name] = text
        for key in FURTHER:
            named = content.get(key)
            if isinstance(named, dict):
                further |= {name: text_of_token(token) for name, token in named.items()}
    return {name: text for name, text in further.items() if text is not None} | found


def text_of_token(token: Any) -> str | None:
    """The text of a special token, which files write as a text or as {"content": text}."""
    text = token
    if isinstance(token, dict):
        text = token.get("content")
    if isinstance(text, str):
        return text
    return None
