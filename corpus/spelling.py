"""Text that a tokenizer cannot spell, and tokenizers for the inside of a long text.

A tokenizer without all 256 bytes drops characters, or writes <unk>, and says nothing: the loss of a
model that never saw these characters looks better. So we count lost characters (Spelling). A
tokenizer of byte-level BPE with all bytes can spell everything, and nothing is counted.

A long text is cut into segments. Many tokenizers put a space in front of a text, or strip the space
around a text; at a seam no tokenizer may do so (segment_tokenizer).
"""

import json
import math
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from corpus.tokenizer import encoding_of, load_tokenizer
from flags.files import sha256_file

WARN = 0.1  # per cent of the characters that a tokenizer may fail to spell without a warning
MOST = 5.0  # per cent, above which preparation is refused
SEGMENT = 1 << 16  # characters of a segment of a long text
EXAMPLES = 8  # characters or words named
# Rules that keep every character. Each Replace and each Split is looked at by itself.
HARMLESS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "Prepend", "Strip", "ByteLevel"}
HARMLESS |= {"Metaspace", "Digits", "UnicodeScripts", "FixedLength"}
WORD_MODELS = {"WordLevel", "WordPiece"}
WORD_SPLITS = {"Whitespace", "WhitespaceSplit", "BertPreTokenizer", "CharDelimiterSplit"}


# --------------------------------------------------------------------------------------------------
# How a tokenizer.json changes a text, from the rules
class Traits(NamedTuple):
    """How a tokenizer changes a text, by the rules in tokenizer.json."""

    spells_all: bool  # no text is lost
    has_seams: bool  # the tokenizer may change a text at our cuts
    is_byte_level: bool
    by_word: bool  # a word is in the vocabulary, or unknown
    prefix: str  # of a token inside of a word
    unknown: str | int | None  # the token for unknown words: text or id


def traits_of(file: Path) -> Traits:
    """The traits of a tokenizer.json. A file that is no tokenizer has some, too: load_tokenizer
    reports the error."""
    return read_traits(file, sha256_file(file))


@lru_cache(maxsize=4)
def read_traits(file: Path, sha256: str) -> Traits:
    """sha256: of the file, so that a changed file is read again."""
    try:
        rules = json.loads(Path(file).read_bytes())
    except (ValueError, RecursionError):
        rules = None
    if not isinstance(rules, dict):
        rules = {}
    model = rules.get("model")
    if not isinstance(model, dict):
        model = {}
    steps = steps_of(rules.get("normalizer")) + steps_of(rules.get("pre_tokenizer"))
    return Traits(
        spells_all=spells_all(model, steps),
        has_seams=has_seams(model, steps),
        is_byte_level=is_byte_level(steps),
        by_word=model.get("type") in WORD_MODELS,
        prefix=model.get("continuing_subword_prefix") or "",
        unknown=model.get("unk_id", model.get("unk_token")),
    )


def steps_of(rule: Any) -> list[dict]:
    """The steps of a normalizer or pre-tokenizer, which may be a sequence of others."""
    if not isinstance(rule, dict):
        return []
    inner = rule.get("normalizers") or rule.get("pretokenizers")
    if isinstance(inner, list):
        return [step for part in inner for step in steps_of(part)]
    return [rule]


def is_byte_level(steps: list[dict]) -> bool:
    return any(step.get("type") == "ByteLevel" for step in steps)


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in a byte-level tokenizer, sorted."""
    from tokenizers.pre_tokenizers import ByteLevel

    return sorted(ByteLevel.alphabet())


def keeps_characters(step: dict) -> bool:
    """Whether a step of a normalizer or pre-tokenizer takes no character out of the text."""
    kind = step.get("type")
    if kind == "Replace":
        return bool(step.get("content"))
    if kind in ("Split", "Punctuation"):
        return step.get("behavior") != "Removed"
    return kind in HARMLESS


def spells_all(model: dict, steps: list[dict]) -> bool:
    """Whether a tokenizer can spell every text: a BPE or Unigram with all 256 bytes. steps: of its
    normalizer and pre-tokenizer."""
    vocab = model.get("vocab") or {}
    if isinstance(vocab, list):  # of Unigram: [[token, score]]
        vocab = {entry[0] for entry in vocab}
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return False
    if not all(keeps_characters(step) for step in steps):
        return False
    if is_byte_level(steps):
        return all(character in vocab for character in byte_alphabet())
    return bool(model.get("byte_fallback")) and all(f"<0x{i:02X}>" in vocab for i in range(256))


def has_seams(model: dict, steps: list[dict]) -> bool:
    """Whether a tokenizer may change a text at our cuts: by adding or stripping a space, or by reading
    whole words, because half a word is another word."""
    if model.get("type") in WORD_MODELS:
        return True
    kinds = {step.get("type") for step in steps}
    return bool(kinds & WORD_SPLITS) or any(
        rule_inside(step, False, False) != step for step in steps
    )


def spelling_rules(file: Path, may_be_long: bool = True) -> tuple:
    """The rules, beside the tokenizer's file, that decide about tokens and counts of a text: () for a
    tokenizer that spells everything and adds nothing at seams. may_be_long: whether a text
    may have seams."""
    traits = traits_of(file)
    counts = ("counted",)
    if traits.spells_all:
        counts = ()
    seams = ()
    if traits.has_seams and may_be_long:
        seams = ("seams",)
    return counts + seams


# --------------------------------------------------------------------------------------------------
# Seams
def rule_inside(rule: Any, opens: bool, closes: bool) -> Any:
    """A normalizer or pre-tokenizer for a part of a text: a change of the beginning of a text
    is made only if the part opens the text, a change of the end only if the part closes the text."""
    if not isinstance(rule, dict):
        return rule
    for key in ("normalizers", "pretokenizers"):
        if isinstance(rule.get(key), list):
            parts = [rule_inside(part, opens, closes) for part in rule[key]]
            return rule | {key: parts}
    kind = rule.get("type")
    if kind == "Strip":
        left = rule.get("strip_left", True) and opens
        right = rule.get("strip_right", True) and closes
        return rule | {"strip_left": left, "strip_right": right}
    if opens:
        return rule
    if kind == "Prepend":
        return {"type": "Sequence", "normalizers": []}
    if kind == "Metaspace":
        return rule | {"prepend_scheme": "never", "add_prefix_space": False}
    if kind == "ByteLevel":
        return rule | {"add_prefix_space": False}
    return rule


def segment_tokenizer(file: Path, opens: bool, closes: bool):
    """load_tokenizer for a part of a text. opens, closes: whether the text begins and ends here."""
    whole = load_tokenizer(file)
    if opens and closes:
        return whole
    return tokenizer_inside(whole, opens, closes)


@lru_cache(maxsize=4)
def tokenizer_inside(whole, opens: bool, closes: bool):
    """A tokenizer for a part of a text; itself, if the parts are tokenized like a whole text."""
    from tokenizers import Tokenizer

    rules = json.loads(whole.to_str())
    names = ("normalizer", "pre_tokenizer")
    changed = {name: rule_inside(rules[name], opens, closes) for name in names}
    if changed == {name: rules[name] for name in names}:
        return whole
    rules |= changed
    rules["post_processor"] = None  # some trim the space from a token's place in the text
    tokenizer = Tokenizer.from_str(json.dumps(rules))
    tokenizer.encode_special_tokens = True
    return tokenizer


# --------------------------------------------------------------------------------------------------
# What is lost
class Spelling:
    """Counts the characters of texts that a tokenizer drops or writes as <unk>. White space does
    not count if the tokenizer takes white space for the border of words."""

    def __init__(self, file: Path):
        traits = traits_of(file)
        self.is_byte_level = traits.is_byte_level
        self.tokenizer = segment_tokenizer(file, False, False)
        self.vocab = self.tokenizer.get_vocab(with_added_tokens=True)
        # without this token, the tokenizer drops unknown words
        self.unknown = traits.unknown
        if isinstance(traits.unknown, str):
            self.unknown = self.vocab.get(traits.unknown)
        self.prefix = traits.prefix
        self.drops_space = len("".join(self.words_of("a b"))) < 3
        self.lengths = None
        if traits.by_word:
            self.lengths = self.token_lengths(traits.prefix)
        # characters that were tried
        self.spelt = set()
        self.unspelt = set()
        self.characters = 0  # that were looked at
        self.lost = 0  # of these
        self.examples = Counter()  # {lost character or word: how often}

    def token_lengths(self, prefix: str) -> np.ndarray:
        """(largest id + 1,) int64: characters of each token, without white space; 0 for <unk>."""
        lengths = np.zeros(max(self.vocab.values()) + 1, np.int64)
        for token, i in self.vocab.items():
            if i != self.unknown:
                lengths[i] = len(without_space(token.removeprefix(prefix)))
        return lengths

    def words_of(self, text: str) -> list[str]:
        """The text as the model sees it: normalized, and in words."""
        if self.tokenizer.normalizer is not None:
            text = self.tokenizer.normalizer.normalize_str(text)
        if self.tokenizer.pre_tokenizer is None:
            return [text]
        return [word for word, _ in self.tokenizer.pre_tokenizer.pre_tokenize_str(text)]

    def look(self, text: str, ids: list[int] | None = None):
        """Counts the lost characters of a text. ids: of the tokens of the text, if known."""
        self.characters += len(text)
        if self.lengths is None:
            self.count_characters(text)
            return
        if ids is None:
            ids = encoding_of(self.tokenizer, text).ids
        self.count_words(text, ids)

    def count_characters(self, text: str) -> None:
        """What is lost does not depend on the neighbours, so each character is tried once."""
        letters = set(text)
        new = sorted(letters - self.spelt - self.unspelt)
        for character in new:
            if self.spells(character):
                self.spelt.add(character)
            else:
                self.unspelt.add(character)
        for character in sorted(letters & self.unspelt):
            n = text.count(character)
            self.lost += n
            self.examples[character] += n

    def spells(self, character: str) -> bool:
        """Whether a character between two others has a token, and, byte-level, all of its bytes."""
        if self.drops_space and character.isspace():
            return True
        text = f"a{character}a"
        if self.is_byte_level:
            letters = "".join(self.words_of(text))[1:-1]
            return all(letter in self.vocab for letter in letters) and letters != ""
        if self.prefix and any(self.prefix + x not in self.vocab for x in self.words_of(character)):
            return False
        if self.unknown is None:  # what is dropped would not show in the places of the tokens
            return encoding_of(self.tokenizer, character).ids != []
        encoding = encoding_of(self.tokenizer, text)
        for i, (start, end) in zip(encoding.ids, encoding.offsets):
            if start <= 1 < end and i != self.unknown:
                return True
        return False

    def count_words(self, text: str, ids: list[int]) -> None:
        """A word is known or not: lost is what the tokens do not add up to."""
        if self.unknown is not None and self.unknown not in ids:
            return
        normalizer = self.tokenizer.normalizer
        letters = text
        if normalizer is not None:
            letters = normalizer.normalize_str(text)
        assert self.lengths is not None, "look() counts characters where words have no lengths"
        lost = len(without_space(letters)) - int(self.lengths[ids].sum())
        if lost <= 0:
            return
        self.lost += lost
        if len(self.examples) < EXAMPLES:
            encoding = encoding_of(self.tokenizer, text)
            for i, (start, end) in zip(encoding.ids, encoding.offsets):
                if i == self.unknown:
                    self.examples[text[start:end]] += 1

    def counted(self) -> dict:
        """For index.json. "examples": [[character or word, how often]], the commonest."""
        return {
            "characters": self.characters,
            "lost": self.lost,
            "examples": commonest(self.examples),
        }


def without_space(text: str) -> str:
    return "".join(text.split())


def add_counts(counts: list[dict]) -> dict:
    """The sum of several counted()."""
    examples = Counter()
    for count in counts:
        examples.update(dict(count["examples"]))
    characters = sum(count["characters"] for count in counts)
    lost = sum(count["lost"] for count in counts)
    return {"characters": characters, "lost": lost, "examples": commonest(examples)}


def commonest(examples: Counter) -> list:
    return sorted(examples.items(), key=lambda example: (-example[1], example[0]))[:EXAMPLES]


def per_cent(lost: dict) -> float:
    """Per cent of the characters that are lost. lost: Spelling.counted()."""
    return 100 * lost["lost"] / max(1, lost["characters"])


def describe_lost(lost: dict) -> str:
    """One line about Spelling.counted()."""
    line = (
        f"the tokenizer cannot spell {lost['lost']:,} of {lost['characters']:,} characters "
        f"({per_cent(lost):.4g} %)"
    )
    if not lost["lost"]:
        return line
    examples = ", ".join(f"{part!r:.40} {n:,} x" for part, n in lost["examples"])
    return f"{line}: they are lost or <unk>, most often {examples}"


def lost_refusal(lost: dict, accept: str) -> str:
    """What to type when a tokenizer cannot spell a text. accept: see corpus.build.build_shards."""
    flag = f"--max_lost {math.ceil(per_cent(lost))}"
    if accept:
        accept = f"{accept} {flag}, and train with --data FOLDER"
    else:
        accept = f"type {flag}"
    return (
        f"{describe_lost(lost)}; take a tokenizer with all bytes (python data.py tokenizer trains "
        f"one), or to accept the loss, {accept}"
    )


def warn_lost(what: str, lost: dict) -> None:
    """Prints a line if more is lost than a reader would expect. what: flag and source."""
    if per_cent(lost) > WARN:
        print(f"warning: {what}: {describe_lost(lost)}", flush=True)
