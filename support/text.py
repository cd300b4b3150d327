"""Text as token ids and back: tokenizers, what ends a text, chat templates, and text that is shown as it comes."""
import os
import string
from pathlib import Path

from support.asking import chat_prompts
from support.files import read_json
from support.hf import check_hf_tokenizer, read_chat, read_hf_json
from support.manifest import is_hf_folder, newest_readable, step_folders
from support.tokenizer import encoding_of, find_tokenizer, load_tokenizer


def encode(tokenizer, text: str, bos: bool) -> list[int]:
    return encoding_of(tokenizer, text, bos).ids


def ends_of(folder: str) -> list[int]:
    """The ids that end a text: a Hugging Face folder's eos_token and what its generation_config.json lists; for a checkpoint of
    ours what ended the documents of its training, and the eos_token if its tokenizer came with one. Raises ValueError."""
    eos = read_chat(folder)[1].get("eos_token", "")
    found = [find_tokenizer(folder, name)[1] for name in ([eos] if is_hf_folder(folder) else ["", *[eos] * (eos != "")])]
    if os.path.lexists(os.path.join(folder, "generation_config.json")):
        listed = read_hf_json(folder, "generation_config.json").get("eos_token_id")
        found += [i for i in (listed if isinstance(listed, list) else [listed]) if type(i) is int and i >= 0]
    return list(dict.fromkeys(found))


def has_bos(folder: str) -> bool:
    """Whether texts begin as the tokenizer says: for models from Hugging Face folders, and what grpo.py made of them. The text
    that we train on has no beginning-of-text token."""
    path = step_folders(folder)[0][1] if step_folders(folder) else folder
    about = os.path.join(path, "state.json")
    return is_hf_folder(folder) or os.path.isfile(about) and bool(read_json(about)["state"].get("bos"))


class TextStream:
    """Text from ids one at a time. A character may span several tokens: what is not yet whole UTF-8 is held back."""

    def __init__(self, tokenizer):
        self.tokenizer, self.ids, self.begin, self.shown = tokenizer, [], 0, 0

    def push(self, token: int | None) -> str:
        """What can be shown after one more token; None: there are no more, so show what was held back."""
        if token is not None:
            self.ids.append(token)
        # Decoded together with the piece before: some decoders drop the space that a text begins with.
        before = self.tokenizer.decode(self.ids[self.begin : self.shown])
        text = self.tokenizer.decode(self.ids[self.begin :])
        if text.endswith("\ufffd") and token is not None:
            return ""
        self.begin, self.shown = self.shown, len(self.ids)
        return text[len(before) :]


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
            has_template, chat = chat is True and read_chat(source)[0], chat if callable(chat) else None
            self.chat, self.bos = chat_prompts(source) if has_template else chat, has_bos(source)
            self.tokenizer = load_tokenizer(Path(self.file))
        else:
            self.file, self.ends = f"{out}/tokenizer.json", [0]
            self.alphabet, self.tokenizer = alphabet, character_tokenizer(alphabet)
            check_characters(out, self.file, self.tokenizer)
        self.eot = self.ends[0]
        bos = read_chat(source)[1].get("bos_token") if self.bos else None
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
