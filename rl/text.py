"""Prompts and samples as token ids and back: a model's tokenizer with its chat template, or one token per character."""
import os
import string
from pathlib import Path

from corpus.tokenizer import (
    check_hf_tokenizer,
    encode,
    ends_of,
    has_bos,
    load_tokenizer,
    read_chat_template,
    read_special_tokens,
)
from storage.manifest import is_hf_folder, newest_readable
from support.files import step_folders


class Text:
    """Prompts and samples of grpo.py as token ids, and back."""

    def __init__(self, source: str, out="", alphabet=string.printable, chat=True):
        """source: a Hugging Face folder or a checkpoint with a tokenizer; "": one token for each character of the alphabet is
        made, to be saved in the folder out. chat: text -> prompt, of open_chat(); True: its chat template, where it has one."""
        self.chat, self.bos, self.alphabet = None, False, None
        if source and not is_hf_folder(source):
            source = newest_readable(source)  # a checkpoint of ours has its tokenizer with it
        if source:
            self.file = check_hf_tokenizer(source, 1 << 31)
            if self.file is None:
                raise ValueError(f"{source} has no tokenizer.json: it cannot be given any text")
            self.ends = ends_of(source)
            has_template, chat = chat is True and read_chat_template(source), chat if callable(chat) else None
            if has_template:
                from sft.prompts import chat_prompts

                chat = chat_prompts(source)
            self.chat, self.bos = chat, has_bos(source)
            self.tokenizer = load_tokenizer(Path(self.file))
        else:
            self.file, self.ends = f"{out}/tokenizer.json", [0]
            self.alphabet, self.tokenizer = alphabet, character_tokenizer(alphabet)
            check_characters(out, self.file, self.tokenizer)
        self.eot = self.ends[0]
        bos = read_special_tokens(source).get("bos_token") if self.bos else None
        bos = self.tokenizer.token_to_id(bos) if bos else None
        self.first = self.eot if bos is None else bos  # what a text with nothing before it follows
        self.tokenizer.encode_special_tokens = not self.chat  # a template's markers are tokens; in any other text they are text

    def save(self):
        """Characters into the run's folder; where there is no checkpoint yet, in place of those of an earlier start."""
        if self.alphabet is not None:
            self.tokenizer.save(self.file)

    def prompt(self, text: str) -> list[int]:
        return self.ids(self.chat(text) if self.chat else text, self.bos and not self.chat) or [self.eot]

    def ids(self, text: str, bos: bool = False) -> list[int]:
        if self.alphabet and (other := set(text) - set(self.alphabet)):
            raise ValueError(f"{min(other)!r} in {text[:60]!r} is not in the ALPHABET of --env; add it there")
        return encode(self.tokenizer, text, bos)

    def fits(self, text: str, seq_len: int) -> bool:
        """Whether a prompt leaves room for a sample of one token at least."""
        return len(self.prompt(text)) < seq_len

    def decode(self, ids: list[int]) -> str:
        """The text of a sample without its end. Other special tokens show: no answer is right with <|im_start|> in it."""
        return self.tokenizer.decode(ids[:-1] if ids and ids[-1] in self.ends else ids, skip_special_tokens=False)

    def unknown(self, vocab_size: int) -> list[int]:
        """Ids of the model that are none of the tokenizer's: they would be invisible in the text that earns the reward."""
        return sorted(set(range(vocab_size)) - set(self.tokenizer.get_vocab(with_added_tokens=True).values()))


def check_characters(out: str, file: str, tokenizer):
    """Raises ValueError where a run goes on that began with other characters: to its model the ids would mean other ones."""
    if not step_folders(out) or not os.path.isfile(file):
        return
    before, now = load_tokenizer(Path(file)).get_vocab(), tokenizer.get_vocab()
    if before != now:
        new, gone = (sorted(a.keys() - b.keys()) for a, b in ((now, before), (before, now)))
        said = [f"{letters[0]!r} {what}" for letters, what in ((new, "is new"), (gone, "is missing")) if letters]
        raise ValueError(f"the characters of the task are not those that {out} began with, which {file} lists: "
                         f"{' and '.join(said) or 'their order is another'}; give the old ALPHABET or data, or use --out NEW")


def character_tokenizer(alphabet: str):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    names = ["<|endoftext|>", *dict.fromkeys(alphabet)]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(names[:1])
    return tokenizer
