"""Tokenizers: tokenizer.json, read and used. corpus/beside.py reads the files beside it, and
corpus/special.py has the ids that begin, end and pad a text."""

import json
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from corpus.beside import files_beside, has_files_beside
from flags.files import HF_LIMITS, hf_file, read_json

BPE_VOCAB = 4096  # ids of a tokenizer of our own


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
    folder = os.path.dirname(file) or "."
    if has_files_beside(folder):
        from corpus.added_tokens import add_tokens_beside  # only such folders need the file

        add_tokens_beside(tokenizer, folder)
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" inside a document is text, not its end
    return tokenizer


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


def tokenizer_path(path: str) -> Path:
    """The path of a tokenizer.json, given itself or by its folder. ValueError for links elsewhere
    and absurd sizes."""
    if os.path.isdir(path):
        file = Path(path, "tokenizer.json")
    else:
        file = Path(path)
    if not file.is_file():
        from flags.hints import hub_hint, tokenizer_hint

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


def tokens_beside(folder: str) -> dict[int, dict]:
    """{id: AddedToken's fields} that the files beside a tokenizer.json list; {} without such files.
    Raises ValueError."""
    if not has_files_beside(folder):
        return {}
    from corpus.added_tokens import listed_tokens  # only such folders need the file

    return listed_tokens(folder)


def bytes_of_tokens(
    tokenizer_json: bytes, vocab_size: int, listed: dict[int, dict] | None = None
) -> np.ndarray | None:
    """(vocab,) int64: bytes of text in each token, 0 for special tokens. None if the tokenizer is
    not byte-level. listed: tokens of the files beside, from tokens_beside()."""
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


@dataclass(kw_only=True)
class ChatConfig:
    # wrap the prompt, a question to a chat model, in the chat template of its tokenizer
    chat: bool = False
    system: str = ""  # system message before each prompt, in the chat template; \n is a new line
    # values for the chat template: "enable_thinking=false"; a number, true, false, or else text
    template_args: str = ""
