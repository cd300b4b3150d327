"""Problems in files as a task of grpo.py (--env dataset, --env gsm8k): lines, prompts and the
reward of an answer; and Text, which turns prompts and samples into token ids and back.

    {"prompt": "2+3=", "answer": 5}         or "question"; further fields are for --prompt_template and for rewards of your own
    {"prompt": [{"role": "user", "content": "2+3="}], "reward_model": {"ground_truth": "5"}}      messages, and verl's answers

In a .jsonl or a .parquet. A list of messages goes through the chat template; a user's message alone
is like a text.

--reward says which answers earn 1: exact, number, math and math_verify are in rl/answers.py. A file
of your own defines

    reward(prompt, completion, answer, truncated, fields) -> float

with any of these parameters, by name; fields is the whole line as a dict, and a line needs no
answer then. Without --eval_data an eighth of the prompts is held out, chosen by hash. With
--eval_data nothing of --env_data is held out, and the whole test file is evaluated.
"""

import inspect
import json
import os
import re
import string
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from corpus.files import unpacked
from corpus.mixture import PACKED, format_of
from corpus.special import ids_of, prefix_ids
from corpus.tokenizer import check_hf_tokenizer, load_tokenizer, read_special_tokens
from distributed.refusals import refuse
from flags.config import Need, flag
from flags.files import step_folders
from rl.answers import KINDS, is_right, never_right
from rl.environments import ask_for_two, load_own, open_env
from storage.source_tokenizer import ends_of, has_bos, text_folder

HINTS = {
    "dataset": "",
    "gsm8k": "\nThink step by step, and end with the answer alone on a line: #### number",
}
REWARD_PARAMETERS = ("prompt", "completion", "answer", "truncated", "fields")
# Needs of flags: see flags/config.py
FILES = Need("without --env dataset or --env gsm8k", lambda c: c.env in HINTS)
DATASET = Need("without --env dataset", lambda c: c.env == "dataset")


@dataclass(kw_only=True)
class DatasetConfig:
    # problems to train on, .jsonl or .parquet: "prompt" or "question", and "answer" in each
    env_data: str = flag("", FILES)
    # problems to evaluate on, likewise; empty: an eighth of --env_data is held out
    eval_data: str = flag("", FILES)
    # right answers: exact, number, math, math_verify, or a file of your own, my_reward.py
    reward: str = flag("exact", DATASET)
    # with {fields}; empty: only the prompt or question, for gsm8k with a hint after it
    prompt_template: str = flag("", FILES)


# ---------------------------------------------------------------- lines
class Line(NamedTuple):
    """One line of a file."""

    where: str  # file and line, for errors
    fields: dict


def read_task_lines(path: str, flag: str, *suffixes: str) -> list[Line]:
    """The lines of a .jsonl or rows of a .parquet, or a .txt as a single line {"text": ...}, packed
    or not. Raises ValueError for a name with none of the suffixes, and for a file without lines."""
    file, suffix = Path(path), format_of(Path(path))
    try:
        if suffix not in suffixes:
            raise ValueError(f"it ends with {suffix or 'nothing'}")
        content = (
            (b"".join(unpacked(file, "")) if file.suffix in PACKED else file.read_bytes())
            .decode()
            .removeprefix("\ufeff")
        )
    except (OSError, ValueError) as error:
        reason, need = getattr(error, "strerror", error), " or ".join(suffixes)
        raise ValueError(
            f"{flag} {path!r}: {reason}; need a {need}, which may be packed as .gz or .zst"
        ) from None
    if suffix == ".txt":
        lines = [Line(path, {"text": content})] * bool(content)
    else:
        lines = [
            json_line(text, f"{path}:{n}")
            for n, text in enumerate(content.split("\n"), 1)
            if text.strip()
        ]
    if not lines:
        raise ValueError(f"{flag} {path} is empty")
    return lines


def json_line(text: str, where: str) -> Line:
    try:
        record = json.loads(text)
        json.dumps(record, ensure_ascii=False).encode()  # fails for "\ud800": JSON, but no text
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from None
    if not isinstance(record, dict):
        raise ValueError(f"{where} is a JSON {type(record).__name__}, not an object")
    return Line(where, record)


def unescape(text: str) -> str:
    return text.replace("\\n", "\n").replace("\\t", "\t")


def fill_template(template: str, line: Line) -> str:
    """The template, filled with the fields of a line."""
    if missing := set(re.findall(r"\{(\w+)\}", template)) - line.fields.keys():
        raise ValueError(f"{line.where} has no {min(missing)}, which --prompt_template asks for")
    return re.sub(r"\{(\w+)\}", lambda name: str(line.fields[name[1]]), template)


# ---------------------------------------------------------------- problems
def read_problems(path: str, flag: str, template: str, hint: str, kind: str) -> dict[str, Line]:
    """{prompt: Line} of a file; equal lines count once. kind: of the reward. The ValueError names
    the line."""
    lines, found = read_task_lines(path, flag, ".jsonl"), {}
    asked = "prompt" if "prompt" in lines[0].fields else "question"
    for line in lines:
        if asked not in line.fields:
            raise ValueError(
                f"{line.where} has no {asked}; need prompt or question, the same in all lines"
            )
        line, said = with_answer(line, kind), messages_of(line.fields[asked])
        answer, text = line.fields["answer"], "\n\n".join(message["content"] for message in said)
        prompt = fill_template(
            template or f"{{{asked}}}{hint}", Line(line.where, line.fields | {asked: text})
        )
        reason = never_right(kind, answer) if kind in KINDS else ""
        refuse(
            (wrong, f"{line.where}: {message}")
            for wrong, message in [
                (not said, f"{asked} is no text, and no list of messages {{role, content}}"),
                (
                    len(said) > 1 and (template or hint),
                    f"--prompt_template fills in a text, and {asked} is a list of messages",
                ),
                (not prompt.strip(), "the prompt is empty"),
                (
                    reason,
                    f"nothing can be right for --reward {kind} where the answer is "
                    f"{str(answer)[-60:]!r}: {reason}",
                ),
                (
                    answer_of(found.get(prompt, line)).strip() != str(answer).strip(),
                    f"the prompt is that of {found.get(prompt, line).where}, and the answer "
                    "another; remove one of the lines",
                ),
            ]
        )
        found.setdefault(prompt, line)
    return found


def with_answer(line: Line, kind: str) -> Line:
    """The line with an answer: its own, else verl's, else "" for a reward of one's own. Raises
    ValueError."""
    verl = line.fields.get("reward_model")
    known = {} if kind in KINDS else {"answer": ""}
    known |= (
        {"answer": verl["ground_truth"]}
        if isinstance(verl, dict) and "ground_truth" in verl
        else {}
    )
    if "answer" not in (fields := known | line.fields):
        raise ValueError(f"{line.where} has no answer; need prompt or question, and answer")
    return Line(line.where, fields)


def messages_of(prompt) -> list[dict]:
    """A prompt as messages, [] if it is no text and no list of messages."""
    said = (
        [{"role": "user", "content": prompt}]
        if isinstance(prompt, str)
        else prompt
        if isinstance(prompt, list)
        else []
    )
    texts = [
        message.get(key)
        for message in said
        for key in ("role", "content")
        if isinstance(message, dict)
    ]
    return (
        said if len(texts) == 2 * len(said) and all(isinstance(text, str) for text in texts) else []
    )


class Dataset:
    """An environment for rl/environments.py. Raises ValueError."""

    def __init__(self, cfg):
        self.__name__, kind = f"--env {cfg.env}", "number" if cfg.env == "gsm8k" else cfg.reward
        template, hint = unescape(cfg.prompt_template), HINTS[cfg.env]
        self.right = built_in(kind) if kind in KINDS else open_reward(kind)
        self.lines = read_problems(cfg.env_data, "--env_data", template, hint, kind)
        self.problems = [(prompt, answer_of(line)) for prompt, line in self.lines.items()]
        if cfg.eval_data:
            held_out = read_problems(cfg.eval_data, "--eval_data", template, hint, kind)
            if both := held_out.keys() & self.lines.keys():
                raise ValueError(
                    f"{len(both):,} of the {len(held_out):,} prompts of --eval_data "
                    f"{cfg.eval_data} are in "
                    "--env_data as well; remove them from one"
                )
            self.eval_problems = [(prompt, answer_of(line)) for prompt, line in held_out.items()]
            self.lines = self.lines | held_out
        asked = {
            prompt: line.fields.get("prompt", line.fields.get("question"))
            for prompt, line in self.lines.items()
        }
        self.messages = {
            prompt: said
            for prompt, said in asked.items()
            if [m["role"] for m in messages_of(said)] != ["user"]
        }
        letters = {
            letter for prompt, line in self.lines.items() for letter in prompt + answer_of(line)
        }
        self.ALPHABET = "".join(
            sorted(letters | set(string.printable if cfg.env == "gsm8k" else ""))
        )

    def reward(self, prompt, completion, truncated=False):
        return self.right(
            prompt=prompt,
            completion=completion,
            answer=answer_of(self.lines[prompt]),
            truncated=truncated,
            fields=self.lines[prompt].fields,
        )


def answer_of(line: Line) -> str:
    return str(line.fields["answer"])


def built_in(kind: str):
    """A right answer earns 1. A truncated text earns nothing, because the last number before the
    cut is no answer."""
    return lambda completion, answer, truncated, **others: float(
        not truncated and is_right(kind, completion, answer)
    )


def open_reward(path: str):
    """The function reward() of a file, called with the parameters in its signature. Raises
    ValueError."""
    module = load_own("reward", path, KINDS)
    if not callable(getattr(module, "reward", None)):
        raise ValueError(f"--reward {path}: it must define reward({', '.join(REWARD_PARAMETERS)})")
    parameters = inspect.signature(module.reward).parameters.values()
    names = [p.name for p in parameters if p.default is p.empty or p.name in REWARD_PARAMETERS]
    if unknown := [name for name in names if name not in REWARD_PARAMETERS]:
        raise ValueError(
            f"--reward {path}: reward() asks for {unknown[0]}; it may ask for "
            f"{', '.join(REWARD_PARAMETERS)}"
        )
    return lambda **given: module.reward(**{name: given[name] for name in names})


def open_task(cfg):
    """The environment that the flags name. Raises ValueError."""
    return Dataset(cfg) if cfg.env in HINTS else open_env(cfg.env)


# ---------------------------------------------------------------- text and token ids
class Text:
    """Prompts and samples of grpo.py as token ids, and back."""

    def __init__(self, source: str, out="", alphabet=string.printable, chat=None, env=None):
        """source: a Hugging Face folder or a checkpoint with a tokenizer; "": a new tokenizer with
        a token per character of the
        alphabet, for save() in the folder out. chat: text or messages -> prompt, from open_chat(),
        or None. env: an environment whose tasks are not what the model sees."""
        self.chat, self.alphabet, self.env, self.messages = (
            chat,
            None,
            env,
            getattr(env, "messages", {}),
        )
        if source:
            source = text_folder(source)
            self.file = check_hf_tokenizer(source, 1 << 31)
            if self.file is None:
                raise ValueError(f"{source} has no tokenizer.json: it cannot be given any text")
            self.ends, self.bos, self.tokenizer = (
                ends_of(source),
                has_bos(source),
                load_tokenizer(Path(self.file)),
            )
        else:
            self.file, self.ends, self.bos = f"{out}/tokenizer.json", [0], False
            self.alphabet, self.tokenizer = alphabet, character_tokenizer(alphabet)
            # token ids would mean other characters
            if step_folders(out) and os.path.isfile(self.file):
                if load_tokenizer(Path(self.file)).get_vocab() != self.tokenizer.get_vocab():
                    raise ValueError(
                        f"the characters of the task are not those in {self.file}, that {out} "
                        "began with; "
                        "give the old ALPHABET or data, or use --out NEW"
                    )
        self.eot = self.ends[0]
        # the token before the beginning of a text
        self.first = self.first_id(source) if self.bos else self.eot
        # markers in a template are tokens, in other texts plain text
        self.tokenizer.encode_special_tokens = not self.chat

    def first_id(self, source: str) -> int:
        """The last id that the tokenizer puts before a text, else its bos_token, else the end."""
        if prefix := prefix_ids(self.tokenizer):
            return prefix[-1]
        bos = self.tokenizer.token_to_id(read_special_tokens(source).get("bos_token", ""))
        return self.eot if bos is None else bos

    def save(self):
        """Write the tokenizer of characters into the run's folder, over the file of an earlier
        start without a checkpoint."""
        if self.alphabet is not None:
            self.tokenizer.save(self.file)

    def prompt(self, task: str) -> list[int]:
        text = (
            ask_for_two(self.env, "reset", task)[1]
            if hasattr(self.env, "step")
            else self.messages.get(task, task)
        )
        if isinstance(text, list) and not self.chat:
            raise ValueError(
                f"the prompt {task[:60]!r} is a list of messages, which needs the chat template "
                "of an --init_from"
            )
        return self.ids(self.chat(text) if self.chat else text, self.bos and not self.chat) or [
            self.eot
        ]

    def ids(self, text: str, bos: bool = False) -> list[int]:
        """The ids of a text. bos: with what the tokenizer puts before a text, never after it."""
        if self.alphabet and (other := set(text) - set(self.alphabet)):
            raise ValueError(
                f"{min(other)!r} in {text[:60]!r} is not in the ALPHABET of --env; add it there"
            )
        return ids_of(self.tokenizer, text, bos)

    def fits(self, task: str, seq_len: int) -> bool:
        """Whether a prompt leaves room for at least one new token."""
        return len(self.prompt(task)) < seq_len

    def decode(self, ids: list[int]) -> str:
        """The text of a sample without its end token. Other special tokens stay visible:
        <|im_start|> makes an answer wrong."""
        return self.tokenizer.decode(
            ids[:-1] if ids and ids[-1] in self.ends else ids, skip_special_tokens=False
        )

    def unknown_ids(self, vocab_size: int, device) -> Tensor | None:
        """Ids of the model without a token in the tokenizer; in a rewarded text such ids would be
        invisible, so generator and trainer give them probability 0. None: no such id."""
        ids = sorted(
            set(range(vocab_size)) - set(self.tokenizer.get_vocab(with_added_tokens=True).values())
        )
        return torch.tensor(ids, device=device) if ids else None


def character_tokenizer(alphabet: str):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    names = ["<|endoftext|>", *dict.fromkeys(alphabet)]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(names[:1])
    return tokenizer
