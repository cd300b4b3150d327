"""Prompts and samples as token ids and back: a model's tokenizer with its chat template, or a token per character."""
import os
import string
from pathlib import Path

import torch
from torch import Tensor

from corpus.tokenizer import check_hf_tokenizer, encode, ends_of, has_bos, load_tokenizer, read_special_tokens
from storage.manifest import is_hf_folder, newest_readable
from support.files import step_folders


class Text:
    """Prompts and samples of grpo.py as token ids, and back."""

    def __init__(self, source: str, out="", alphabet=string.printable, chat=None):
        """source: a Hugging Face folder or a checkpoint with a tokenizer; "": a new tokenizer with a token per character of the
        alphabet, for save() in the folder out. chat: text -> prompt, from open_chat(), or None."""
        self.chat, self.alphabet = chat, None
        if source and not is_hf_folder(source):
            source = newest_readable(source)  # our checkpoints have a copy of the tokenizer
        if source:
            self.file = check_hf_tokenizer(source, 1 << 31)
            if self.file is None:
                raise ValueError(f"{source} has no tokenizer.json: it cannot be given any text")
            self.ends, self.bos, self.tokenizer = ends_of(source), has_bos(source), load_tokenizer(Path(self.file))
        else:
            self.file, self.ends, self.bos = f"{out}/tokenizer.json", [0], False
            self.alphabet, self.tokenizer = alphabet, character_tokenizer(alphabet)
            if step_folders(out) and os.path.isfile(self.file):  # token ids would mean other characters
                if load_tokenizer(Path(self.file)).get_vocab() != self.tokenizer.get_vocab():
                    raise ValueError(f"the characters of the task are not those in {self.file}, that {out} began with; "
                                     "give the old ALPHABET or data, or use --out NEW")
        self.eot = self.ends[0]
        bos = read_special_tokens(source).get("bos_token") if self.bos else None
        bos = self.tokenizer.token_to_id(bos) if bos else None
        self.first = self.eot if bos is None else bos  # the token before the beginning of a text
        self.tokenizer.encode_special_tokens = not self.chat  # markers in a template are tokens, in other texts plain text

    def save(self):
        """Write the tokenizer of characters into the run's folder, over the file of an earlier start without a checkpoint."""
        if self.alphabet is not None:
            self.tokenizer.save(self.file)

    def prompt(self, text: str) -> list[int]:
        return self.ids(self.chat(text) if self.chat else text, self.bos and not self.chat) or [self.eot]

    def ids(self, text: str, bos: bool = False) -> list[int]:
        if self.alphabet and (other := set(text) - set(self.alphabet)):
            raise ValueError(f"{min(other)!r} in {text[:60]!r} is not in the ALPHABET of --env; add it there")
        return encode(self.tokenizer, text, bos)

    def fits(self, text: str, seq_len: int) -> bool:
        """Whether a prompt leaves room for at least one new token."""
        return len(self.prompt(text)) < seq_len

    def decode(self, ids: list[int]) -> str:
        """The text of a sample without its end token. Other special tokens stay visible: <|im_start|> makes an answer wrong."""
        return self.tokenizer.decode(ids[:-1] if ids and ids[-1] in self.ends else ids, skip_special_tokens=False)

    def unknown_ids(self, vocab_size: int, device) -> Tensor | None:
        """Ids of the model without a token in the tokenizer; in a rewarded text such ids would be invisible, so generator and
        trainer give them probability 0. None: no such id."""
        ids = sorted(set(range(vocab_size)) - set(self.tokenizer.get_vocab(with_added_tokens=True).values()))
        return torch.tensor(ids, device=device) if ids else None


def character_tokenizer(alphabet: str):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    names = ["<|endoftext|>", *dict.fromkeys(alphabet)]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(names[:1])
    return tokenizer
