"""Tokenizers: tokenizer.json and the files beside tokenizer.json, which name more tokens.
corpus/special.py has the ids that begin, end and pad a text."""

import json
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from distributed.agree import reason
from flags.files import HF_LIMIT, HF_LIMITS, hf_file, hub_hint, read_json, tokenizer_hint

BPE_VOCAB = 4096  # ids of a tokenizer of our own
# Files beside tokenizer.json in a Hugging Face folder: special tokens, chat template, and the ids
# that end an answer
BESIDE = (
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "generation_config.json",
    "added_tokens.json",
)


@lru_cache(maxsize=1)
def load_tokenizer(file: Path):
    from tokenizers import Tokenizer  # not at the top: a run on finished shards needs no tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"{file}: not a tokenizer.json ({error})") from None
    lengths = []  # of the texts that rules put in the place of others, one rule after the other

    def note_length(rule: dict):
        lengths.append(len(rule.get("content", "")))

    for rules in filter(None, (tokenizer.normalizer, tokenizer.decoder)):
        json.loads(rules.__getstate__(), object_hook=note_length)
    growth = np.prod([max(1, length) for length in lengths], dtype=float)
    if growth > 10_000:
        raise ValueError(
            f"{file}: its rules may make a text {growth:,.0f} times longer, which is absurd: "
            "10,000 is the most"
        )
    tokenizer.no_truncation()  # some tokenizer.json cut every text at 512 tokens
    tokenizer.no_padding()
    add_tokens_beside(tokenizer, os.path.dirname(file) or ".")
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a document is text, not its end
    return tokenizer


# --- Tokens that only the files beside tokenizer.json name ---
FLAGS = ("lstrip", "rstrip", "single_word", "normalized")


def listed_tokens(folder: str) -> dict[int, dict]:
    """{id: AddedToken's fields} of added_tokens_decoder in tokenizer_config.json, or, without one, of
    added_tokens.json, its older form. Raises ValueError."""
    config = read_beside(folder, "tokenizer_config.json")
    if "added_tokens_decoder" not in config:
        return older_tokens(folder)
    listed = config["added_tokens_decoder"] or {}
    found = {}
    try:
        for key, token in listed.items():
            fields = {name: token[name] for name in (*FLAGS, "special") if name in token}
            if not isinstance(token["content"], str) or not token["content"]:
                raise TypeError("a content is no text")
            for name in fields:
                if not isinstance(fields[name], bool):
                    raise TypeError(f"{name} is no truth value")
            found[int(key)] = {"content": token["content"], **fields}
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{folder}/tokenizer_config.json: added_tokens_decoder must be {{id: token}} ({error!r})"
        ) from None
    return dict(sorted(found.items()))


def older_tokens(folder: str) -> dict[int, dict]:
    """{id: AddedToken's fields} of added_tokens.json, which holds {text: id}. As in transformers a
    token is special if another file names the token. Raises ValueError."""
    named = named_tokens(folder)
    found = {}
    for content, number in read_beside(folder, "added_tokens.json").items():
        if type(number) is not int or number < 0 or not content:
            raise ValueError(f"{folder}/added_tokens.json must be {{token: id}}, not {content!r}")
        is_special = content in named
        found[number] = {
            "content": content,
            "special": is_special,
            "normalized": not is_special,
        }
    return dict(sorted(found.items()))


def named_tokens(folder: str) -> list[str]:
    """The texts of the special tokens that the files beside tokenizer.json name without an id: eos,
    pad and others, then additional_special_tokens. In the order of transformers."""
    names = read_special_tokens(folder)
    found = [names[f"{name}_token"] for name in STANDARD if f"{name}_token" in names]
    for file in special_files(folder):
        content = read_beside(folder, file)
        for key in ("additional_special_tokens", "extra_special_tokens"):
            others = content.get(key) or []
            if isinstance(others, dict):
                others = list(others.values())
            if not isinstance(others, list):
                raise ValueError(f"{folder}/{file}: {key} must be a list of tokens, not {others!r}")
            found += [text for text in map(text_of_token, others) if text]
    return list(dict.fromkeys(found))


def rows_in_model(folder: str) -> int | None:
    """The number of ids that the model of a folder knows: of Hugging Face, of token shards, or a step
    of ours. None if no file has the number."""
    for name in ("state.json", "index.json", "config.json"):
        with suppress(OSError, ValueError, LookupError, TypeError, RecursionError):
            content = read_json(folder, name)
            if name == "state.json":
                content = content["identity"]["model"]
            return int(content["vocab_size"])
    return None


def add_tokens_beside(tokenizer, folder: str) -> None:
    """Adds the tokens that tokenizer_config.json or special_tokens_map.json name, and tokenizer.json
    lacks, as transformers adds them: otherwise <|im_end|> would be eight tokens. Raises ValueError
    where the two files give a token different ids."""
    from tokenizers import AddedToken

    is_older = "added_tokens_decoder" not in read_beside(folder, "tokenizer_config.json")
    file = f"{folder}/tokenizer_config.json"
    key = "added_tokens_decoder"
    if is_older:
        file = f"{folder}/added_tokens.json"
        key = "added_tokens.json"
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for number, fields in listed_tokens(folder).items():
        content = fields["content"]
        there = tokenizer.token_to_id(content)
        other = tokenizer.id_to_token(number)
        if there not in (None, number) or other not in (None, content):
            raise ValueError(
                f"{file} says that id {number} is {content!r}, but in tokenizer.json "
                f"{content!r} is {there} and {number} is {other!r}; correct {key}"
            )
        token = AddedToken(**fields)
        if content in known and is_older:
            continue  # added_tokens.json tells no flags
        if content in known:
            # tokenizer.json decides whether a token counts as special
            token.special = known[content].special
            if all(getattr(token, flag) == getattr(known[content], flag) for flag in FLAGS):
                continue
        tokenizer.add_tokens([token])
        if tokenizer.token_to_id(content) != number:
            raise ValueError(
                f"{file} says that {content!r} is id {number}, but tokenizer.json ends before: it "
                f"would be id {tokenizer.token_to_id(content)}; name the ids between in "
                f"{key}"
            )
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for content in named_tokens(folder):
        if content in known:
            continue
        # A padding token often has no row in the model. In transformers the token gets an id, and
        # the model crashes at the id; here the token stays text.
        rows = rows_in_model(folder)
        if tokenizer.token_to_id(content) is None and rows is not None:
            if max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1 >= rows:
                continue
        tokenizer.add_tokens([AddedToken(content, special=True)])
        known.add(content)


def added_beside(file: Path) -> list[tuple[int, str]]:
    """[(id, text)] of the tokens that a tokenizer.json has only by the files beside it."""
    own = {token["content"] for token in read_json(file).get("added_tokens") or []}
    tokens = load_tokenizer(file).get_added_tokens_decoder()
    return [(i, token.content) for i, token in sorted(tokens.items()) if token.content not in own]


def token_text(tokenizer, number: int) -> str:
    """The text of a token, as the vocabulary spells it. The tokenizer must have the id."""
    text = tokenizer.id_to_token(number)
    assert text is not None, f"the tokenizer has no token {number}"
    return text


def encoding_of(tokenizer, text: str):
    """The tokens of a text, with places in the text, and without tokens for begin and end. Raises
    ValueError where the library fails."""
    try:
        return tokenizer.encode(text, add_special_tokens=False)
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
    if os.path.isdir(path):
        file = Path(path, "tokenizer.json")
    else:
        file = Path(path)
    if not file.is_file():
        raise ValueError(
            f"--tokenizer {path}: need a tokenizer.json, or a folder that holds one"
            f"{hub_hint(path)}{tokenizer_hint(path)}"
        )
    hf_file(str(file.parent), file.name, HF_LIMITS["tokenizer.json"])
    return file


def tokenizer_and_beside(file: str) -> dict[str, bytes]:
    """{name: content} of a tokenizer.json and of the Hugging Face files beside, so that to_hf can
    write all again."""
    return {"tokenizer.json": tokenizer_path(file).read_bytes()} | files_beside(file)


def bytes_of_tokens(
    tokenizer_json: bytes, vocab_size: int, listed: dict[int, dict] | None = None
) -> np.ndarray | None:
    """(vocab,) int64: bytes of text in each token, 0 for special tokens. None if the tokenizer is
    not byte-level. listed: tokens of the files beside, from listed_tokens()."""
    try:
        rules = json.loads(tokenizer_json)
        if rules["model"].get("type") != "BPE" or '"ByteLevel"' not in json.dumps(
            rules.get("decoder")
        ):
            return None
        count = np.zeros(vocab_size, np.int64)
        for token, i in rules["model"]["vocab"].items():
            count[i] = len(token)  # a byte-level BPE writes every byte as one character
        for i, token in (listed or {}).items():
            if i < vocab_size:  # shards of an earlier version do not know these tokens
                count[i] = 0 if token.get("special") else len(token["content"].encode())
        for token in rules.get("added_tokens") or []:
            count[token["id"]] = 0 if token["special"] else len(token["content"].encode())
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise ValueError(
            f"tokenizer.json does not fit a vocabulary of {vocab_size} ids: {error!r}"
        ) from None
    return count


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


# The names of special tokens in transformers, in the order of transformers
STANDARD = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")


def text_of_token(token) -> str | None:
    """The text of a special token, which files write as a text or as {"content": text}."""
    text = token
    if isinstance(token, dict):
        text = token.get("content")
    if isinstance(text, str):
        return text
    return None


def special_files(folder: str) -> list[str]:
    """The files that name special tokens, the stronger last. As in transformers,
    special_tokens_map.json, a file of older versions, counts only if tokenizer_config.json has no
    added_tokens_decoder."""
    if "added_tokens_decoder" in read_beside(folder, "tokenizer_config.json"):
        return ["tokenizer_config.json"]
    return ["tokenizer_config.json", "special_tokens_map.json"]


def read_special_tokens(folder: str) -> dict[str, str]:
    """{name, such as eos_token: text} of the special tokens that tokenizer_config.json and
    special_tokens_map.json of a folder name."""
    found = {}
    for file in special_files(folder):
        for name, token in read_beside(folder, file).items():
            text = text_of_token(token)
            if name.endswith("_token") and text is not None:
                found[name] = text
    return found


@dataclass(kw_only=True)
class ChatConfig:
    # wrap the prompt, a question to a chat model, in the chat template of its tokenizer
    chat: bool = False
    system: str = ""  # system message before each prompt, in the chat template; \n is a new line
    # values for the chat template: "enable_thinking=false"; a number, true, false, or else text
    template_args: str = ""
