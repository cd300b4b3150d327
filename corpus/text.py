"""Text as token ids and back: the ids that end a text, flags of chat templates, and text shown while it is generated."""
import os
from dataclasses import dataclass

from corpus.tokenizer import encoding_of, find_tokenizer, read_chat, read_hf_json
from storage.manifest import is_hf_folder, step_folders
from support.files import read_json


def encode(tokenizer, text: str, bos: bool) -> list[int]:
    return encoding_of(tokenizer, text, bos).ids


def ends_of(folder: str) -> list[int]:
    """The ids that end a text: eos_token of a Hugging Face folder and the ids in generation_config.json; for a checkpoint of
    ours the id that ended the documents in training, and the eos_token of the tokenizer, if any. Raises ValueError."""
    eos = read_chat(folder)[1].get("eos_token", "")
    found = [find_tokenizer(folder, name)[1] for name in ([eos] if is_hf_folder(folder) else ["", *[eos] * (eos != "")])]
    if os.path.lexists(os.path.join(folder, "generation_config.json")):
        listed = read_hf_json(folder, "generation_config.json").get("eos_token_id")
        found += [i for i in (listed if isinstance(listed, list) else [listed]) if type(i) is int and i >= 0]
    return list(dict.fromkeys(found))


def has_bos(folder: str) -> bool:
    """Whether texts begin with the tokenizer's beginning-of-text token: for models from Hugging Face folders, and for runs of
    grpo.py from them. Our own training text has no such token."""
    path = step_folders(folder)[0][1] if step_folders(folder) else folder
    about = os.path.join(path, "state.json")
    return is_hf_folder(folder) or os.path.isfile(about) and bool(read_json(about)["state"].get("bos"))


@dataclass(kw_only=True)
class ChatConfig:
    chat: bool = False  # wrap the prompt, a question to a chat model, in the chat template of its tokenizer
    system: str = ""  # system message before each prompt, in the chat template; \n is a new line
    template_args: str = ""  # values for the chat template: "enable_thinking=false"; a number, true, false, or else text


class TextStream:
    """Text from ids one at a time. A character may span several tokens: incomplete UTF-8 is held back."""

    def __init__(self, tokenizer):
        self.tokenizer, self.ids, self.begin, self.shown = tokenizer, [], 0, 0

    def push(self, token: int | None) -> str:
        """The text to show after one more token; None: the end, so show all that was held back."""
        if token is not None:
            self.ids.append(token)
        # Decode together with the piece before: some decoders drop the first space of a text.
        before = self.tokenizer.decode(self.ids[self.begin : self.shown])
        text = self.tokenizer.decode(self.ids[self.begin :])
        if text.endswith("\ufffd") and token is not None:
            return ""
        self.begin, self.shown = self.shown, len(self.ids)
        return text[len(before) :]
