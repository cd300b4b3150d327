"""Text as token ids and back: tokenizers, what ends a text, chat templates, and text that is shown as it comes."""
import os
from dataclasses import dataclass

from corpus.tokenizer import encoding_of, find_tokenizer, read_chat, read_hf_json
from storage.manifest import is_hf_folder, step_folders
from support.files import read_json


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


@dataclass(kw_only=True)
class ChatConfig:
    chat: bool = False  # wrap the prompt, a question to a chat model, in the chat template of its tokenizer
    system: str = ""  # system message before each prompt, in the chat template; \n is a new line
    template_args: str = ""  # values for the chat template: "enable_thinking=false"; what is no number, true or false is text


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
