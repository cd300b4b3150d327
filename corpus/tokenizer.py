"""Tokenizers: tokenizer.json and the files beside it, the tokens that end a text, and text shown
while it is generated."""

import json
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from distributed.agree import reason
from flags.files import HF_LIMIT, HF_LIMITS, hf_file, hub_hint, read_json

BPE_VOCAB = 4096  # ids of a tokenizer of our own
EOT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
# Files beside tokenizer.json in a Hugging Face folder: special tokens, chat template, and the ids
# that end an answer
BESIDE = (
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
)


@lru_cache(maxsize=1)
def load_tokenizer(file: Path):
    from tokenizers import Tokenizer  # not at the top: a run on finished shards needs no tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{file}: not a tokenizer.json ({error})") from None
    lengths = []  # of the texts that rules put in the place of others, one rule after the other
    for rules in filter(None, (tokenizer.normalizer, tokenizer.decoder)):
        json.loads(
            rules.__getstate__(),
            object_hook=lambda rule: lengths.append(len(rule.get("content", ""))),
        )
    if (growth := np.prod([max(1, length) for length in lengths], dtype=float)) > 10_000:
        raise ValueError(
            f"{file}: its rules may make a text {growth:,.0f} times longer, which is absurd: "
            "10,000 is the most"
        )
    tokenizer.no_truncation()  # some tokenizer.json cut every text at 512 tokens
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a document is text, not its end
    return tokenizer


def encoding_of(tokenizer, text: str, bos: bool):
    """The tokens of a text, with places in the text. bos: add the tokenizer's tokens for begin and
    end."""
    try:
        return tokenizer.encode(text, add_special_tokens=bos)
    except BaseException as error:
        # the library panics if a regular expression of a stranger's tokenizer.json gives up
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the tokenizer fails on {text[:40]!r}: {error}") from None


def files_beside(tokenizer_file) -> dict:
    """{name: content} of the files to copy along with a tokenizer.json. ValueError for links
    elsewhere, absurd sizes."""
    folder = os.path.dirname(os.path.abspath(tokenizer_file))
    there = [name for name in BESIDE if os.path.lexists(os.path.join(folder, name))]
    return {
        name: Path(hf_file(folder, name, HF_LIMITS.get(name, HF_LIMIT))).read_bytes()
        for name in there
    }


def tokenizer_path(path: str) -> Path:
    """The path of a tokenizer.json, given itself or by its folder. ValueError for links elsewhere
    and absurd sizes."""
    file = Path(path, "tokenizer.json") if os.path.isdir(path) else Path(path)
    if not file.is_file():
        raise ValueError(
            f"--tokenizer {path}: need a tokenizer.json, or a folder that holds one{hub_hint(path)}"
        )
    hf_file(str(file.parent), file.name, HF_LIMITS["tokenizer.json"])
    return file


def tokenizer_and_beside(file: str) -> dict[str, bytes]:
    """{name: content} of a tokenizer.json and of the Hugging Face files beside, so that to_hf can
    write all again."""
    return {"tokenizer.json": tokenizer_path(file).read_bytes()} | files_beside(file)


def find_tokenizer(path: str, eot: str = ""):
    """(tokenizer.json, eot id, vocab size) for a tokenizer.json or its folder. eot: text of the
    token, "": look for it."""
    file = tokenizer_path(path)
    files_beside(file)  # raises for links elsewhere and absurd sizes
    tokenizer, names = load_tokenizer(file), [eot] if eot else list(EOT_NAMES)
    if not eot and (eos := read_special_tokens(str(file.parent)).get("eos_token")):
        names.append(eos)
    # a BPE may know "</s>" as HTML
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    eot_id = next(
        (tokenizer.token_to_id(name) for name in names if name in special or name == eot), None
    )
    if eot_id is None:
        raise ValueError(
            f"--tokenizer {path}: has none of {', '.join(names)} to end a text; use data.py "
            "prepare --eot TOKEN"
        )
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if vocab_size > 1 << 24:  # a broken file: the model would get a row for every id
        raise ValueError(
            f"--tokenizer {path}: its ids go up to {vocab_size - 1}; need ids below {1 << 24}"
        )
    return file, eot_id, vocab_size


def bytes_of_tokens(tokenizer_json: bytes, vocab_size: int):
    """(vocab,) int64: bytes of text in each token, 0 for special tokens. None if the tokenizer is
    not byte-level."""
    try:
        rules = json.loads(tokenizer_json)
        if rules["model"].get("type") != "BPE" or '"ByteLevel"' not in json.dumps(
            rules.get("decoder")
        ):
            return None
        count = np.zeros(vocab_size, np.int64)
        for token, i in rules["model"]["vocab"].items():
            count[i] = len(token)  # a byte-level BPE writes every byte as one character
        for token in rules.get("added_tokens") or []:
            count[token["id"]] = 0 if token["special"] else len(token["content"].encode())
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"tokenizer.json does not fit a vocabulary of {vocab_size} ids: {error!r}"
        ) from None
    return count


def read_hf_json(folder: str, name: str) -> dict:
    real, path = hf_file(folder, name, HF_LIMITS.get(name, HF_LIMIT)), os.path.join(folder, name)
    try:
        value = read_json(real)
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON that can be read: {reason(error)}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def read_beside(folder: str, name: str) -> dict:
    """read_hf_json of a file that a folder may lack; {} without."""
    return read_hf_json(folder, name) if os.path.lexists(os.path.join(folder, name)) else {}


def check_hf_tokenizer(folder: str, vocab_size: int) -> str | None:
    """The path of tokenizer.json, None if missing. Raises ValueError when an id is beyond the
    model's vocabulary."""
    path = os.path.join(folder, "tokenizer.json")
    if not os.path.lexists(path):
        return None
    tokenizer_path(folder)
    last = max(load_tokenizer(Path(path)).get_vocab(with_added_tokens=True).values(), default=0)
    if last >= vocab_size:
        raise ValueError(
            f"{path}: its ids go up to {last}, but config.json says that vocab_size is {vocab_size}"
        )
    return path


def read_special_tokens(folder: str) -> dict[str, str]:
    """{name, such as eos_token: text} of the special tokens in a folder's tokenizer_config.json."""
    tokens = {
        name: token
        for name, token in read_beside(folder, "tokenizer_config.json").items()
        if name.endswith("_token")
    }
    texts = {
        name: token.get("content") if isinstance(token, dict) else token
        for name, token in tokens.items()
    }
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def read_chat_template(folder: str, name: str = "default") -> str | None:
    """The chat template of a Hugging Face folder, None without one. name: of the template, if the
    folder has several."""
    if os.path.lexists(os.path.join(folder, "chat_template.jinja")):
        return Path(hf_file(folder, "chat_template.jinja", HF_LIMIT)).read_text("utf-8")
    template = read_beside(folder, "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        template = next(
            (t.get("template") for t in template if isinstance(t, dict) and t.get("name") == name),
            None,
        )
    return template if isinstance(template, str) else None


@dataclass(kw_only=True)
class ChatConfig:
    # wrap the prompt, a question to a chat model, in the chat template of its tokenizer
    chat: bool = False
    system: str = ""  # system message before each prompt, in the chat template; \n is a new line
    # values for the chat template: "enable_thinking=false"; a number, true, false, or else text
    template_args: str = ""
