"""The tasks of grpo.py as text and as tokens, and what a task of your own (--env my_env.py) looks like.

An environment is anything, a class here and a module in a file of your own, that has

    make(rng) -> (prompt, answer)         one task; the answer is what the supervised warm-up imitates
    reward(prompt, completion) -> float   completion: all text after the prompt, without the end-of-text token

and may have

    ALPHABET                              characters of a model that begins at random; without it printable ASCII
    TOOL_END, tool(completion) -> str     when a completion ends with TOOL_END, the tool's text comes next: the model reads it,
                                          but did not write it, so it carries no gradient
"""
import ast
import importlib.util
import json
import operator
import os
import random
import re
import string
import zlib
from pathlib import Path

from checkpoint import is_hf_folder, newest_readable
from data import find_tokenizer, load_tokenizer
from generate import chat_prompts, encode
from hf import check_hf_tokenizer, read_chat


def digits(rng, n: int) -> str:
    return "".join(rng.choices(string.digits, k=n))


class Reverse:
    ALPHABET = string.digits + ">"

    def make(rng):
        number = digits(rng, 5)
        return f"{number}>", number[::-1]

    def reward(prompt, completion):
        return float(completion == prompt[-2::-1])


class SumDigits:
    ALPHABET = string.digits + "Sum the digits of :"

    def make(rng):
        number = digits(rng, 3)
        return f"Sum the digits of {number}: ", str(sum(map(int, number)))

    def reward(prompt, completion):
        return float(completion.strip() == str(sum(map(int, re.findall(r"\d", prompt)))))


class Countdown:
    """Reach the target with +, -, * and each of the numbers once: "3 7 2 = 19: " -> "3*7-2"."""

    ALPHABET = string.digits + "+-*()=: "

    def make(rng):
        numbers = [rng.randint(1, 9) for _ in range(3)]
        answer = "".join(f"{rng.choice('+-*')}{n}" for n in rng.sample(numbers, 3))[1:]
        return f"{' '.join(map(str, numbers))} = {arithmetic(answer)}: ", answer

    def reward(prompt, completion):
        numbers, target = prompt.rstrip(": ").split(" = ")
        used = sorted(re.findall(r"\d+", completion)) == sorted(numbers.split())
        return float(used and arithmetic(completion) == int(target))


class Calculator:
    """Several turns: after "=" the tool writes the value and ";". "37*4+12: " -> "37*4=148;148+12=160;160"."""

    ALPHABET = string.digits + "+-*=;: "
    TOOL_END = "="

    def make(rng):
        a, b, c = rng.randint(10, 99), rng.randint(2, 9), rng.randint(10, 99)
        return f"{a}*{b}+{c}: ", f"{a}*{b}={a * b};{a * b}+{c}={a * b + c};{a * b + c}"

    def tool(completion):
        value = arithmetic(re.split(r"[;:]", completion[:-1])[-1])
        return f"{'' if value is None else value};"

    def reward(prompt, completion):
        return float(completion.split(";")[-1] == str(arithmetic(prompt.rstrip(": "))))


class GSM8K:
    """Grade-school problems from a .jsonl; the reward looks at the last number only."""

    HINT = "\nThink step by step, and end with the answer alone on a line: #### number"
    problems: list = []

    def load(path: str):
        try:
            lines = [json.loads(line) for line in Path(path).read_text("utf-8").splitlines() if line.strip()]
            GSM8K.problems = [(line["question"] + GSM8K.HINT, line["answer"]) for line in lines]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"--env_data {path!r}: {error!r}; need a .jsonl with question and answer in each line") from None
        GSM8K.answers = {question: final_number(answer) for question, answer in GSM8K.problems}
        GSM8K.ALPHABET = "".join(sorted(set(string.printable).union(*(q + a for q, a in GSM8K.problems))))

    def make(rng):
        return rng.choice(GSM8K.problems)

    def reward(prompt, completion):
        found = final_number(completion)
        return float(found is not None and found == GSM8K.answers[prompt])


def final_number(text: str) -> float | None:
    """The number behind the last ####, else the last one in the text."""
    numbers = re.findall(r"-?\d[\d,]*\.?\d*", text.rpartition("####")[2] if "####" in text else text)
    return float(numbers[-1].replace(",", "")) if numbers else None


def arithmetic(text: str) -> int | None:
    """The value of + - * and parentheses over small integers; None for anything else. It is a model that writes this."""
    operations = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}

    def value(node):
        if isinstance(node, ast.BinOp):
            return operations[type(node.op)](value(node.left), value(node.right))
        return {int: node.value}[type(node.value)]

    try:
        return value(ast.parse(text, mode="eval").body) if len(text) < 100 else None
    except (SyntaxError, KeyError, AttributeError, ValueError, RecursionError, MemoryError):
        return None


ENVS = {"reverse": Reverse, "sum_digits": SumDigits, "countdown": Countdown, "calculator": Calculator, "gsm8k": GSM8K}


def open_env(name: str, data: str = ""):
    """The environment that --env names; data: --env_data. Raises ValueError."""
    if name not in ENVS:
        if not name.endswith(".py") or not os.path.isfile(name):
            raise ValueError(f"--env {name} is no file ending in .py and none of {', '.join(ENVS)}")
        spec = importlib.util.spec_from_file_location("env", name)
        env = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(env)
        except Exception as error:
            raise ValueError(f"--env {name}: {error!r}") from None
        wanted = ["make", "reward"] + ["TOOL_END"] * hasattr(env, "tool")
        if missing := [name for name in wanted if not hasattr(env, name)]:
            raise ValueError(f"--env {name} does not define {' and '.join(missing)}; environments.py says what it needs")
        return env
    if name == "gsm8k":
        GSM8K.load(data)
    return ENVS[name]


def draw_task(env, split: str, index: int) -> tuple[str, str]:
    """(prompt, answer) number `index` of a split: a pure function. An eighth of all prompts, by their hash, is held out."""
    rng = random.Random(f"{split}/{index}")
    for _ in range(10_000):
        prompt, answer = env.make(rng)
        if (zlib.crc32(prompt.encode()) % 8 == 0) == (split == "eval"):
            return prompt, answer
    raise ValueError(f"{env.__name__}.make gives no prompts for the split {split}: it needs more than a few different prompts")


# ---------------------------------------------------------------- their texts as tokens


class Text:
    """Texts of an environment as token ids, and back."""

    def __init__(self, env, source: str, out: str):
        """source: a Hugging Face folder or a checkpoint with a tokenizer; "": one of the environment's characters is made."""
        self.chat, self.bos, self.alphabet = None, False, None
        if source and not is_hf_folder(source):
            source = newest_readable(source)  # a checkpoint of ours has its tokenizer with it
        if source:
            self.file = check_hf_tokenizer(source, 1 << 31)
            if self.file is None:
                raise ValueError(f"--init_from {source} has no tokenizer.json")
            template, special = read_chat(source) if is_hf_folder(source) else (None, {})
            self.eot = find_tokenizer(source, special.get("eos_token", ""))[1]
            self.chat, self.bos = template and chat_prompts(source), is_hf_folder(source)
            self.tokenizer = load_tokenizer(Path(self.file))
        else:
            self.file, self.eot = f"{out}/tokenizer.json", 0
            self.alphabet = getattr(env, "ALPHABET", string.printable)
            self.tokenizer = character_tokenizer(self.alphabet)
        self.tokenizer.encode_special_tokens = not self.chat  # a template's markers are tokens; in any other text they are text

    def save(self):
        if not os.path.exists(self.file):
            self.tokenizer.save(self.file)

    def prompt(self, text: str) -> list[int]:
        return self.ids(self.chat(text) if self.chat else text, self.bos and not self.chat) or [self.eot]

    def ids(self, text: str, bos: bool = False) -> list[int]:
        if self.alphabet and (other := set(text) - set(self.alphabet)):
            raise ValueError(f"{min(other)!r} in {text[:60]!r} is not in the ALPHABET of --env; add it there")
        return encode(self.tokenizer, text, bos)

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids[:-1] if ids[-1:] == [self.eot] else ids)

    def tool(self, env):
        """The environment's tool from ids to ids, for rollout(); None if it has none."""
        if not hasattr(env, "tool"):
            return None
        ends = lambda ids: self.decode(ids[-len(env.TOOL_END) - 8 :]).endswith(env.TOOL_END)  # noqa: E731
        return lambda ids: self.ids(env.tool(self.decode(ids))) if ends(ids) else []


def character_tokenizer(alphabet: str):
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    names = ["<|endoftext|>", *dict.fromkeys(alphabet)]
    tokenizer = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(names[:1])
    return tokenizer


def supervised_sample(env, text, prompt: str, answer: str) -> dict:
    """An answer as if it had been sampled; what the tool says in it is masked, as in a rollout."""
    ids, tool = text.ids(answer) + [text.eot], text.tool(env)
    mask = [1.0] * len(ids)
    for i in range(len(ids) if tool else 0):
        said = tool(ids[: i + 1]) if mask[i] else []
        if said and ids[i + 1 : i + 1 + len(said)] == said:
            mask[i + 1 : i + 1 + len(said)] = [0.0] * len(said)
    return dict(prompt=text.prompt(prompt), ids=ids, logprobs=[0.0] * len(ids), mask=mask, advantage=1.0)
