"""The ids that begin, end and pad a text: of a Hugging Face folder, of token shards, of a step of ours
and of an export. No other file decides about these ids.

Transformers resolves the ids twice. The tokenizer reads tokenizer_config.json (or, in old folders,
special_tokens_map.json) and begins a text as the post-processor of tokenizer.json says.
generate() stops at the ids of generation_config.json, else of config.json. Folders contradict
themselves often, so an end is here an id that any of these files calls an end.
"""

import os
from pathlib import Path
from typing import NamedTuple

from corpus.beside import files_beside, read_beside, read_special_tokens
from corpus.tokenizer import encoding_of, load_tokenizer, tokenizer_path

# Tokens that end a document of text: a tokenizer uses the first token of this list in its vocabulary
EOT_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")


def find_tokenizer(path: str, eot: str = "") -> tuple[Path, int, int]:
    """(tokenizer.json, eot id, vocab size) for a tokenizer.json or its folder. The eot ends each
    document of text in training. eot: its text, "": look for it. Raises ValueError."""
    file = tokenizer_path(path)
    files_beside(file)  # raises for links elsewhere and absurd sizes
    tokenizer = load_tokenizer(file)
    names: list[str] = [eot]
    if not eot:
        names = list(EOT_NAMES)
        eos = read_special_tokens(str(file.parent)).get("eos_token")
        if eos:
            names.append(eos)
    # a BPE may know "</s>" as HTML
    special = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    found = [tokenizer.token_to_id(name) for name in names if name in special or name == eot]
    if not found or found[0] is None:
        raise ValueError(
            f"--tokenizer {path}: has none of {', '.join(names)} to end a text; use data.py "
            "prepare --eot TOKEN"
        )
    vocab_size = max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
    if vocab_size > 1 << 24:  # a broken file: the model would get a row for every id
        raise ValueError(
            f"--tokenizer {path}: its ids go up to {vocab_size - 1}; need ids below {1 << 24}"
        )
    return file, found[0], vocab_size


class SpecialIds(NamedTuple):
    """The ids with a meaning in a folder."""

    # the files call this id the beginning of a text; prefix_ids() has the ids of a real beginning
    bos: int | None
    ends: list[
        int
    ]  # each id ends a text; the first is the tokenizer's, if the tokenizer has an end
    pad: int | None

    def for_config(self) -> dict:
        """As config.json and generation_config.json write them."""
        if len(self.ends) == 1:
            eos = self.ends[0]
        else:
            eos = self.ends or None
        return {"bos_token_id": self.bos, "eos_token_id": eos, "pad_token_id": self.pad}


def listed_ids(folder: str, file: dict, name: str) -> list[int]:
    """The ids of a file's eos_token_id and the like: an id, a list of ids, or null; some files say -1
    for none. Raises ValueError: an end that is overlooked lets texts run on."""
    values = file.get(name)
    if values is None:
        return []
    if not isinstance(values, list):
        values = [values]
    for i in values:
        if type(i) is not int or not -1 <= i < 2**31:
            raise ValueError(
                f"{folder}: {name} is {str(values)[:60]}; need an id, a list of ids, or null"
            )
    return [i for i in values if i >= 0]


def config_of(folder: str) -> dict:
    """config.json of a Hugging Face folder; {} for a step of ours, whose config.json holds flags."""
    if os.path.lexists(os.path.join(folder, "manifest.json")):
        return {}
    return read_beside(folder, "config.json")


class NoEnds(ValueError):
    """No file of a folder names an end of a text. Other ValueErrors: a file cannot be read."""


def special_ids(folder: str, is_ours: bool = False) -> SpecialIds:
    """The ids of a folder with tokenizer.json. The ends are the union of all files.

    is_ours: the ids were learnt from nothing, in training on text: the first end is the token between
    the documents, nothing begins a text, and the end pads. Raises ValueError, NoEnds if nothing
    names an end."""
    names = read_special_tokens(folder)
    files = [read_beside(folder, "generation_config.json"), config_of(folder)]
    of_text = files[1].get("text_config")  # of a model that reads pictures, too
    if isinstance(of_text, dict):
        files.append(of_text)
    tokenizer = load_tokenizer(tokenizer_path(folder))

    def id_of(name: str) -> int | None:
        for file in files:
            for i in listed_ids(folder, file, f"{name}_token_id"):
                return i
        return tokenizer.token_to_id(names.get(f"{name}_token", ""))

    ends = []
    if is_ours:
        ends = [find_tokenizer(folder)[1]]
    eos = tokenizer.token_to_id(names.get("eos_token", ""))
    if eos is not None:
        ends.append(eos)
    markers = tokenizer.get_added_tokens_decoder()
    in_generation = listed_ids(folder, files[0], "eos_token_id")
    ends += in_generation
    for file in files[1:]:
        # generate() reads config.json only without the other file. config.json often holds a default
        # of transformers, such as 2, perhaps the id of a letter.
        more = listed_ids(folder, file, "eos_token_id")
        ends += [i for i in more if i in markers or not in_generation]
    if not ends:
        try:
            ends = [find_tokenizer(folder, names.get("eos_token", ""))[1]]
        except ValueError as error:
            raise NoEnds(error) from None
    ends = list(dict.fromkeys(ends))
    if is_ours:
        return SpecialIds(None, ends, ends[0])
    return SpecialIds(id_of("bos"), ends, id_of("pad"))


# --- What a tokenizer puts before a text ---
class TextSource(NamedTuple):
    """The tokenizer for text that comes with the weights of a run."""

    folder: str = ""  # of the tokenizer.json; "": the flags name one, or a new one is trained
    begins: bool = False  # each document begins with prefix_ids()

    def or_of(self, data) -> "TextSource":
        """This source; without a tokenizer, with the tokenizer of data (TokenData)."""
        return self._replace(folder=self.folder or data.tokenizer_file or "")


def prefix_ids(tokenizer) -> list[int]:
    """The ids that the post-processor of a tokenizer puts before a text, such as <s>. Ids
    after a text, such as </s>, are left out: prompts go on."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    ids = encoding.ids
    text = tokenizer.encode("a", add_special_tokens=False).ids
    for start in range(len(ids) - len(text) + 1):
        if ids[start : start + len(text)] == text and not any(
            encoding.special_tokens_mask[start : start + len(text)]
        ):
            return ids[:start]
    return []


NEW_TOKENIZER = TextSource()


def ids_of(tokenizer, text: str, begins: bool = False) -> list[int]:
    """The ids of a text. begins: with the tokenizer's ids before a text, and no ids after the text."""
    prefix = []
    if begins:
        prefix = prefix_ids(tokenizer)
    return prefix + encoding_of(tokenizer, text).ids
