"""The tasks of grpo.py as text and as tokens, and what a task of your own (--env my_env.py) looks like.

An environment is anything, a class here and a module in a file of your own, that has

    make(rng) -> (prompt, answer)         one task; the answer is what the supervised warm-up imitates
    reward(prompt, completion) -> float   completion: all text after the prompt, without the end-of-text token

and may have

    problems                              instead of make: a list of all (prompt, answer); each is drawn once before any is
                                          drawn again
    eval_problems                         a list beside problems: what is evaluated. Without it an eighth of them is held out
    reward(..., truncated)                a third parameter: whether the sample was cut off before its end. The tasks here then
                                          pay 0: where a text was cut off, its last number is no answer
    ALPHABET                              characters of a model that begins at random; without it printable ASCII
    TOOL_END, tool(completion) -> str     when a completion ends with TOOL_END, the tool's text comes next: the model reads it,
                                          but did not write it, so it carries no gradient
"""
import ast
import functools
import importlib.util
import operator
import os
import random
import re
import string
import sys
import zlib
from fractions import Fraction


def digits(rng, n: int) -> str:
    return "".join(rng.choices(string.digits, k=n))


class Reverse:
    ALPHABET = string.digits + ">"

    def make(rng):
        number = digits(rng, 5)
        return f"{number}>", number[::-1]

    def reward(prompt, completion, truncated=False):
        return float(completion == prompt[-2::-1] and not truncated)


class SumDigits:
    ALPHABET = string.digits + "Sum the digits of :"
    problems = [(f"Sum the digits of {i:03}: ", str(sum(map(int, f"{i:03}")))) for i in range(1000)]

    def reward(prompt, completion, truncated=False):
        return float(completion.strip() == str(sum(map(int, re.findall(r"\d", prompt)))) and not truncated)


class Countdown:
    """Reach the target with +, -, * and each of the numbers once: "3 7 2 = 19: " -> "3*7-2"."""

    ALPHABET = string.digits + "+-*()=: "

    def make(rng):
        numbers = [rng.randint(1, 9) for _ in range(3)]
        answer = "".join(f"{rng.choice('+-*')}{n}" for n in rng.sample(numbers, 3))[1:]
        return f"{' '.join(map(str, numbers))} = {arithmetic(answer)}: ", answer

    def reward(prompt, completion, truncated=False):
        numbers, target = prompt.rstrip(": ").split(" = ")
        used = sorted(re.findall(r"\d+", completion)) == sorted(numbers.split())
        return float(used and arithmetic(completion) == int(target) and not truncated)


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

    def reward(prompt, completion, truncated=False):
        return float(completion.split(";")[-1] == str(arithmetic(prompt.rstrip(": "))) and not truncated)


def arithmetic(text: str) -> Fraction | None:
    """The exact value of + - * / and parentheses over small integers; None for anything else: models write this."""
    text = text.strip()
    if not re.fullmatch(r"[0-9+*/() -]{1,100}", text):  # Python would read comments and 1_000 as well
        return None
    operations = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}

    def value(node):
        if isinstance(node, ast.BinOp):
            return operations[type(node.op)](value(node.left), value(node.right))
        return {int: Fraction(node.value)}[type(node.value)]

    try:
        return value(ast.parse(text, mode="eval").body)
    except (SyntaxError, KeyError, AttributeError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


ENVS = {"reverse": Reverse, "sum_digits": SumDigits, "countdown": Countdown, "calculator": Calculator}


def open_env(name: str):
    """The environment that --env names; those of problems in files are in rl/datasets.py. Raises ValueError."""
    shuffled.cache_clear()
    if name not in ENVS:
        env = load_own("env", name, [*ENVS, "dataset", "gsm8k"])
        wanted = ["make"] * (not hasattr(env, "problems")) + ["reward"] + ["TOOL_END"] * hasattr(env, "tool")
        if missing := [name for name in wanted if not hasattr(env, name)]:
            raise ValueError(f"--env {name} does not define {' and '.join(missing)}; rl/environments.py says what it needs")
        return env
    return ENVS[name]


def load_own(flag: str, path: str, names: list[str]):
    """The module of a file that --env or --reward names. names: what else the flag takes. Raises ValueError."""
    if not path.endswith(".py") or not os.path.isfile(path):
        raise ValueError(f"--{flag} {path} is no file ending in .py and none of {', '.join(names)}")
    spec = importlib.util.spec_from_file_location(f"nanotitan_{flag}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # checkpoints keep its source
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"--{flag} {path}: {error!r}") from None
    return module


def is_held_out(prompt: str) -> bool:
    """Whether a prompt is for evaluation, and never trained on: an eighth of all prompts, chosen by their hash."""
    return zlib.crc32(prompt.encode()) % 8 == 0


@functools.lru_cache(8)
def shuffled(env, split: str, epoch: int) -> list[tuple[str, str]]:
    """The problems of a split, each prompt once, in the order of one pass through them."""
    tasks = dict(env.problems).items()
    if hasattr(env, "eval_problems"):
        tasks = dict(env.eval_problems).items() if split == "eval" else tasks
    else:
        tasks = [task for task in tasks if is_held_out(task[0]) == (split == "eval")]
    return random.Random(f"{split}/{epoch}").sample([*tasks], len(tasks))


def draw_task(env, split: str, index: int, fits=lambda prompt: True) -> tuple[str, str]:
    """(prompt, answer) number `index` of a split: a pure function. "eval" is what is held out, all others are the rest.

    From a list of problems without replacement, pass after pass. What make() gives is drawn again while it belongs to the
    other split, or fits(prompt) says no.
    """
    if hasattr(env, "problems"):
        if tasks := shuffled(env, split, 0):
            return shuffled(env, split, index // len(tasks))[index % len(tasks)]
    else:
        rng = random.Random(f"{split}/{index}")
        for _ in range(10_000):
            prompt, answer = env.make(rng)
            if is_held_out(prompt) == (split == "eval") and fits(prompt):
                return prompt, answer
    what = "problems" if hasattr(env, "problems") else "make"
    raise ValueError(f"{env.__name__}.{what} gives no prompts for the split {split}: it needs more than a few different ones, "
                     "and some that are short enough for --seq_len")


def held_out_tasks(env, n: int, fits=lambda prompt: True) -> list[str]:
    """The first n different held-out prompts; fewer where draw after draw finds no other. -1: all of a list of their own, else
    1,024."""
    n = n if n != -1 else len(env.eval_problems) if hasattr(env, "eval_problems") else 1024
    found, index, last_new = {}, 0, 0
    while len(found) < n and index - last_new <= 100 + 10 * len(found):
        prompt = draw_task(env, "eval", index, fits)[0]
        index += 1
        if prompt not in found:
            found[prompt], last_new = True, index
    return list(found)


def leave_out_long(env, text, seq_len: int) -> list[str]:
    """Take the problems whose prompts fill seq_len out of the lists; returns what there is to say of it. Prompts that make()
    gives are judged when they are drawn. Raises ValueError where nothing is left."""
    said = []
    for name in ("problems", "eval_problems"):
        if not (before := getattr(env, name, [])):
            continue
        lengths = {prompt: len(text.prompt(prompt)) for prompt, _ in before}
        setattr(env, name, [task for task in before if lengths[task[0]] < seq_len])
        if not (n := len(getattr(env, name))):
            raise ValueError(f"--seq_len {seq_len} leaves no room to answer: the shortest of {len(before):,} prompts has "
                             f"{min(lengths.values())} tokens; raise it")
        if n < len(before):
            said.append(f"{len(before) - n:,} of {len(before):,} {name.replace('_', ' ')} are left out: with their prompts "
                        f"--seq_len {seq_len} leaves no room to answer")
    shuffled.cache_clear()
    draw_task(env, "train", 0, lambda prompt: text.fits(prompt, seq_len))  # raises ValueError where there are none
    return said


def tool_of(env, text):
    """The environment's tool from ids to ids, for rollout(); None if it has none."""
    if not hasattr(env, "tool"):
        return None
    asks = lambda ids: text.decode(ids[-len(env.TOOL_END) - 8 :]).endswith(env.TOOL_END)  # noqa: E731
    return lambda ids: text.ids(env.tool(text.decode(ids))) if asks(ids) else []


def supervised_sample(env, text, prompt: str, answer: str) -> dict:
    """An answer as if it had been sampled; what the tool says in it is masked, as in a rollout."""
    ids, tool = text.ids(answer) + [text.eot], tool_of(env, text)
    mask = [1.0] * len(ids)
    for i in range(len(ids) if tool else 0):
        said = tool(ids[: i + 1]) if mask[i] else []
        if said and ids[i + 1 : i + 1 + len(said)] == said:
            mask[i + 1 : i + 1 + len(said)] = [0.0] * len(said)
    return dict(prompt=text.prompt(prompt), ids=ids, logprobs=[0.0] * len(ids), mask=mask, advantage=1.0)
