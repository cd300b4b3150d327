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
answer then. The completion is what comes after the thoughts. Without --eval_data an eighth of the
prompts is held out, chosen by hash. With
--eval_data nothing of --env_data is held out, and the whole test file is evaluated.
"""

import inspect
import json
import os
import string
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from corpus.beside import read_special_tokens
from corpus.files import unpacked
from corpus.mixture import PACKED, format_of
from corpus.special import ids_of, prefix_ids
from corpus.spelling import tokenizer_inside
from corpus.tokenizer import check_hf_tokenizer, encoding_of, load_tokenizer
from distributed.refusals import refuse
from flags.config import Need, flag
from flags.escapes import unescape
from flags.files import step_folders, write_file
from flags.hints import tokenizer_hint
from rl.answers import KINDS, answer_text, is_right, never_right
from rl.calls import WATCH
from rl.environments import ask_for_two, load_own, open_env
from rl.prompts import Line, check_template, fill_template
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
    # with {fields}, {{ for a brace (rl/prompts.py); empty: only the prompt or question, for gsm8k
    # with a hint after it
    prompt_template: str = flag("", FILES)


# ---------------------------------------------------------------- lines
def read_task_lines(path: str, flag: str, *suffixes: str) -> list[Line]:
    """The lines of a .jsonl or rows of a .parquet, or a .txt as a single line {"text": ...}, packed
    or not. Raises ValueError for a name with none of the suffixes, and for a file without lines."""
    file = Path(path)
    suffix = format_of(Path(path))
    try:
        if path and file.is_dir():
            raise ValueError("it is a folder")
        if path and not file.exists():
            raise ValueError("No such file or directory")
        if suffix not in suffixes:
            raise ValueError(f"it ends with {suffix or 'nothing'}")
        if file.suffix in PACKED:
            content = b"".join(unpacked(file, ""))
        else:
            content = file.read_bytes()
        content = content.decode().removeprefix("\ufeff")
    except (OSError, ValueError) as error:
        reason = error
        if isinstance(error, OSError):
            reason = error.strerror
        need = " or ".join(suffixes)
        raise ValueError(
            f"{flag} {path!r}: {reason}; need a {need}, which may be packed as .gz or .zst"
        ) from None
    if suffix == ".txt":
        lines = [Line(path, {"text": content})] * bool(content)
    else:
        lines = []
        for n, text in enumerate(content.split("\n"), 1):
            if text.strip():
                lines.append(json_line(text, f"{path}:{n}"))
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


# ---------------------------------------------------------------- problems
class Problem(NamedTuple):
    """A line of a file as a problem."""

    prompt: str  # as text; of a list of messages their contents
    line: Line


def read_problems(
    path: str, flag: str, template: str, hint: str, kind: str
) -> tuple[dict[str, Problem], str]:
    """({task: Problem}, what was left out) of a file. Lines that are equal as a whole count once.
    The task is the prompt, or for further lines with the same prompt a name of their own. kind: of
    the reward. The ValueError names the line."""
    lines = read_task_lines(path, flag, ".jsonl")
    asked = "question"
    if lines[0].fields.get("prompt") is not None:
        asked = "prompt"
    asked_lines = [read_question(line, asked, kind) for line in lines]
    if template:
        check_template(template, asked_lines, asked)
    problems = {}
    known = {}
    first_of = {}  # prompt -> its first line
    for line, asked_line in zip(lines, asked_lines):
        whole = json.dumps(line.fields, sort_keys=True)
        if template:
            prompt = fill_template(template, asked_line)
        else:
            prompt = asked_line.fields[asked] + hint
        check_problem(asked_line, prompt, kind, first_of.setdefault(prompt, asked_line))
        if isinstance(line.fields[asked], list) and len(line.fields[asked]) > 1:
            if template or hint:
                raise ValueError(
                    f"{line.where}: --prompt_template fills in a text, and {asked} is a list of "
                    "messages"
                )
        if isinstance(line.fields[asked], list):
            check_messages(line, asked)
        if whole in known:
            continue
        known[whole] = line
        task = prompt
        while task in problems:
            task += f"\n(line {line.where.rpartition(':')[2]})"
        problems[task] = Problem(prompt, with_answer(line, kind))
    n = len(lines) - len(problems)
    if n == 0:
        return problems, ""
    said = f"{n:,} of {len(lines):,} lines of {flag} are left out: equal to an earlier line"
    return problems, said


def read_question(line: Line, asked: str, kind: str) -> Line:
    """The line with its answer, and with its question as a text. Raises ValueError."""
    if asked not in line.fields:
        raise ValueError(
            f"{line.where} has no {asked}; need prompt or question, the same in all lines"
        )
    messages = messages_of(line.fields[asked])
    if not messages:
        raise ValueError(
            f"{line.where}: {asked} is no text, and no list of messages {{role, content}}"
        )
    text = "\n\n".join(message["content"] for message in messages)
    return Line(line.where, with_answer(line, kind).fields | {asked: text})


def check_messages(line: Line, asked: str) -> None:
    """Raises ValueError for messages that a prompt would show in another way than their line says."""
    last = line.fields[asked][-1]["role"]
    refuse(
        [
            (
                last == "assistant",
                f"{line.where}: the last message of {asked} is the assistant's, and the model would "
                "answer after its end; let a question be the last",
            ),
            (
                line.fields.get("tools") not in (None, "", [], "[]"),
                f"{line.where}: tools are not written into a prompt; write them into its system "
                "message, or take the key out",
            ),
        ]
    )


def check_problem(line: Line, prompt: str, kind: str, first: Line) -> None:
    """Raises ValueError for a line that cannot be asked, or where nothing can be right. first: the
    first line with this prompt; a rule of ours gives a prompt one answer, a reward of your own may
    judge each line by its fields."""
    answer = line.fields["answer"]
    reason = ""
    if kind in KINDS:
        reason = never_right(kind, answer)
    refuse(
        [
            (not prompt.strip(), f"{line.where}: the prompt is empty"),
            (
                reason,
                f"{line.where}: nothing can be right for --reward {kind} where the answer is "
                f"{str(answer)[-60:]!r}: {reason}",
            ),
            (
                kind in KINDS and answer_of(first).strip() != answer_of(line).strip(),
                f"{line.where}: the prompt is that of {first.where}, and the answer another; "
                "remove one of the lines",
            ),
        ]
    )


def with_answer(line: Line, kind: str) -> Line:
    """The line with an answer: its own, else verl's, else "" for a reward of one's own. Raises
    ValueError."""
    verl = line.fields.get("reward_model")
    if kind in KINDS:
        known = {}
    else:
        known = {"answer": ""}
    if isinstance(verl, dict) and verl.get("ground_truth") is not None:
        known["answer"] = verl["ground_truth"]
    if known and line.fields.get("answer") is None:  # a table has null where a field is missing
        return Line(line.where, line.fields | known)
    if "answer" not in line.fields:
        raise ValueError(f"{line.where} has no answer; need prompt or question, and answer")
    return line


def messages_of(prompt: Any) -> list[dict]:
    """A prompt as messages, [] if it is no text and no list of messages."""
    if isinstance(prompt, str):
        said = [{"role": "user", "content": prompt}]
    elif isinstance(prompt, list):
        said = prompt
    else:
        said = []
    for message in said:
        if not isinstance(message, dict):
            return []
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            return []
    return said


class Dataset:
    """An environment for rl/environments.py. Raises ValueError."""

    def __init__(self, cfg):
        self.__name__ = f"--env {cfg.env}"
        kind = cfg.reward
        if cfg.env == "gsm8k":
            kind = "number"
        template = unescape(cfg.prompt_template)
        hint = HINTS[cfg.env]
        if kind in KINDS:
            self.right = built_in(kind)
        else:
            self.right = open_reward(kind)
        self.known, said = read_problems(cfg.env_data, "--env_data", template, hint, kind)
        self.problems = tasks_with_answers(self.known)
        self.left_out = []
        if said:
            self.left_out.append(said)
        if cfg.eval_data:
            held_out, said = read_problems(cfg.eval_data, "--eval_data", template, hint, kind)
            trained = {problem.prompt for problem in self.known.values()}
            n_both = sum(problem.prompt in trained for problem in held_out.values())
            if n_both:
                raise ValueError(
                    f"{n_both:,} of the {len(held_out):,} prompts of --eval_data "
                    f"{cfg.eval_data} are in "
                    "--env_data as well; remove them from one"
                )
            self.eval_problems = tasks_with_answers(held_out)
            if said:
                self.left_out.append(said)
            self.known = self.known | held_out
        # what the model sees of a task that is not its own prompt; and the prompts, for the split
        self.messages = {}
        self.prompts = {}
        letters = set()
        if cfg.env == "gsm8k":
            letters = set(string.printable)
        for task, (prompt, line) in self.known.items():
            asked = line.fields.get("prompt")
            if asked is None:
                asked = line.fields.get("question")
            if [message["role"] for message in messages_of(asked)] != ["user"]:
                self.messages[task] = asked
            elif task != prompt:
                self.messages[task] = prompt
            if task != prompt:
                self.prompts[task] = prompt
            letters |= set(prompt + answer_of(line))
        self.ALPHABET = "".join(sorted(letters))

    def reward(self, prompt, completion, truncated=False):
        """The reward of a sample. prompt: the task, see read_problems()."""
        asked, line = self.known[prompt]
        return self.right(
            prompt=asked,
            completion=completion,
            answer=answer_of(line),
            truncated=truncated,
            fields=line.fields,
        )


def tasks_with_answers(problems: dict[str, Problem]) -> list[tuple[str, str]]:
    """(task, answer) of each problem."""
    return [(task, answer_of(problem.line)) for task, problem in problems.items()]


def answer_of(line: Line) -> str:
    return answer_text(line.fields["answer"])


def built_in(kind: str) -> Callable[..., float]:
    """A right answer earns 1. A truncated text earns nothing, because the last number before the
    cut is no answer."""

    def right(completion, answer, truncated, **others) -> float:
        return float(not truncated and is_right(kind, completion, answer))

    return right


def open_reward(path: str) -> Callable[..., Any]:
    """The function reward() of a file, called with the parameters in its signature. Raises
    ValueError."""
    module = load_own("reward", path, KINDS)
    if not hasattr(module, "reward") or not callable(module.reward):
        raise ValueError(f"--reward {path}: it must define reward({', '.join(REWARD_PARAMETERS)})")
    parameters = inspect.signature(module.reward).parameters.values()
    names = [p.name for p in parameters if p.default is p.empty or p.name in REWARD_PARAMETERS]
    unknown = [name for name in names if name not in REWARD_PARAMETERS]
    if unknown:
        raise ValueError(
            f"--reward {path}: reward() asks for {unknown[0]}; it may ask for "
            f"{', '.join(REWARD_PARAMETERS)}"
        )

    def reward(**given):
        return module.reward(**{name: given[name] for name in names})

    return reward


def open_task(cfg: Any) -> Any:
    """The environment that the flags name. Raises ValueError."""
    WATCH.seconds = cfg.reward_timeout_s
    if cfg.env in HINTS:
        return Dataset(cfg)
    return open_env(cfg.env)


# ---------------------------------------------------------------- text and token ids
class Text:
    """Prompts and samples of grpo.py as token ids, and back."""

    def __init__(self, source: str, out="", alphabet=string.printable, chat=None, env=None):
        """source: a Hugging Face folder or a checkpoint with a tokenizer; "": a new tokenizer with
        a token per character of the
        alphabet, for save() in the folder out. chat: text or messages -> prompt, from open_chat(),
        or None. env: an environment whose tasks are not what the model sees."""
        self.chat = chat
        self.alphabet = None
        self.env = env
        self.messages = {}
        if hasattr(env, "messages"):
            self.messages = env.messages
        if source:
            source = text_folder(source)
            self.file = check_hf_tokenizer(source, 1 << 31)
            if self.file is None:
                raise ValueError(
                    f"{source} has no tokenizer.json: it cannot be given any text"
                    + tokenizer_hint(source)
                )
            self.ends = ends_of(source)
            self.bos = has_bos(source)
            self.tokenizer = load_tokenizer(Path(self.file))
        else:
            self.file = f"{out}/tokenizer.json"
            self.ends = [0]
            self.bos = False
            self.alphabet = alphabet
            self.tokenizer = character_tokenizer(alphabet)
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
        if self.bos:
            self.first = self.first_id(source)
        else:
            self.first = self.eot
        # markers in a template are tokens, in other texts plain text
        self.tokenizer.encode_special_tokens = not self.chat

    def first_id(self, source: str) -> int:
        """The last id that the tokenizer puts before a text, else its bos_token, else the end."""
        prefix = prefix_ids(self.tokenizer)
        if prefix:
            return prefix[-1]
        bos = self.tokenizer.token_to_id(read_special_tokens(source).get("bos_token", ""))
        if bos is None:
            return self.eot
        return bos

    def save(self):
        """Write the tokenizer of characters into the run's folder, over the file of an earlier
        start without a checkpoint."""
        if self.alphabet is not None:
            write_file(self.file, self.tokenizer.to_str(pretty=True).encode())

    def prompt(self, task: str) -> list[int]:
        if hasattr(self.env, "step"):
            text = ask_for_two(self.env, "reset", task)[1]
        else:
            text = self.messages.get(task, task)
        if isinstance(text, list) and not self.chat:
            raise ValueError(
                f"the prompt {task[:60]!r} is a list of messages, which needs the chat template "
                "of an --init_from"
            )
        if self.chat:
            ids = self.ids(self.chat(text))
        else:
            ids = self.ids(text, self.bos)
        return ids or [self.eot]

    def check_alphabet(self, text: str):
        if not self.alphabet:
            return
        other = set(text) - set(self.alphabet)
        if other:
            raise ValueError(
                f"{min(other)!r} in {text[:60]!r} is not in the ALPHABET of --env; add it there"
            )

    def ids(self, text: str, bos: bool = False) -> list[int]:
        """The ids of a text. bos: with what the tokenizer puts before a text, never after it."""
        self.check_alphabet(text)
        return ids_of(self.tokenizer, text, bos)

    def ids_after(self, text: str) -> list[int]:
        """The tokens of a text that goes on from another one, as a tool's: without the space that
        many tokenizers put in front of a text."""
        self.check_alphabet(text)
        inside = tokenizer_inside(self.tokenizer, False, False)
        inside.encode_special_tokens = self.tokenizer.encode_special_tokens
        return encoding_of(inside, text).ids

    def fits(self, task: str, seq_len: int) -> bool:
        """Whether a prompt leaves room for at least one new token."""
        return len(self.prompt(task)) < seq_len

    def decode(self, ids: list[int]) -> str:
        """The text of a sample without its end token. Other special tokens stay visible:
        <|im_start|> makes an answer wrong."""
        if ids and ids[-1] in self.ends:
            ids = ids[:-1]
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def unknown_ids(self, vocab_size: int, device) -> Tensor | None:
        """Ids of the model without a token in the tokenizer; in a rewarded text such ids would be
        invisible, so generator and trainer give them probability 0. None: no such id."""
        known = self.tokenizer.get_vocab(with_added_tokens=True).values()
        ids = sorted(set(range(vocab_size)) - set(known))
        if ids:
            return torch.tensor(ids, device=device)
        return None


def character_tokenizer(alphabet: str):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    names = ["<|endoftext|>", *dict.fromkeys(alphabet)]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(names[:1])
    return tokenizer
