"""The tasks of grpo.py as text and as tokens, and the form of a task of your own (--env my_env.py).

An environment is a class in this file, or a module in a file of your own. An environment must have

    make(rng) -> (prompt, answer)         one task; the supervised warm-up imitates the answer
    reward(prompt, completion) -> float   completion: all text after the prompt, without the end-of-text token

and may have

    problems                              instead of make: a list of all (prompt, answer), drawn pass after pass, each problem
                                          once per pass
    eval_problems                         a second list, for evaluation only. Without eval_problems an eighth of the problems
                                          is held out
    reward(..., truncated)                third parameter: whether the sample was cut off before its end. The tasks in this file
                                          then pay 0, because the last number of a truncated text is no answer
    ALPHABET                              characters of a model with random weights; the default is printable ASCII
    TOOL_END, tool(completion) -> str     after TOOL_END in a completion comes the text of the tool. The model reads the text
                                          but did not write it, so the text carries no gradient
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


class Reverse:
    ALPHABET = string.digits + ">"

    def make(rng):
        number = "".join(rng.choices(string.digits, k=5))
        return f"{number}>", number[::-1]

    def reward(prompt, completion, truncated=False):
        return float(completion == prompt[-2::-1] and not truncated)


class SumDigits:
    ALPHABET = string.digits + "Sum the digits of :"
    problems = [(f"Sum the digits of {i:03}: ", str(sum(map(int, f"{i:03}")))) for i in range(1000)]

    def reward(prompt, completion, truncated=False):
        return float(completion.strip() == str(sum(map(int, re.findall(r"\d", prompt)))) and not truncated)


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
    """The exact value of + - * / and parentheses over small integers; None for any other text of a model."""
    text = text.strip()
    if not re.fullmatch(r"[0-9+*/() -]{1,100}", text):  # Python would also read comments and 1_000
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


ENVS = {"reverse": Reverse, "sum_digits": SumDigits, "calculator": Calculator}


def open_env(name: str):
    """The environment for --env; rl/datasets.py has the environments for problems in files. Raises ValueError."""
    env = ENVS.get(name) or load_own("env", name, [*ENVS, "dataset", "gsm8k"])
    wanted = ["make"] * (not hasattr(env, "problems")) + ["reward"] + ["TOOL_END"] * hasattr(env, "tool")
    if missing := [word for word in wanted if not hasattr(env, word)]:
        raise ValueError(f"--env {name} does not define {' and '.join(missing)}; rl/environments.py says what it needs")
    return env


def load_own(flag: str, path: str, names: list[str]):
    """Load the .py file given as --env or --reward. names: other values of the flag. Raises ValueError."""
    if not path.endswith(".py") or not os.path.isfile(path):
        raise ValueError(f"--{flag} {path} is no file ending in .py and none of {', '.join(names)}")
    spec = importlib.util.spec_from_file_location(f"nanotitan_{flag}", path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # so that checkpoints keep the source
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"--{flag} {path}: {error!r}") from None
    return module


def is_held_out(prompt: str) -> bool:
    """Whether a prompt is for evaluation and never trained on: an eighth of all prompts, chosen by hash."""
    return zlib.crc32(prompt.encode()) % 8 == 0


@functools.lru_cache(8)
def shuffled(env, split: str, epoch: int) -> list[tuple[str, str]]:
    """The problems of a split, each prompt once, in the order of pass number `epoch`."""
    tasks = dict(env.problems).items()
    if hasattr(env, "eval_problems"):
        tasks = dict(env.eval_problems).items() if split == "eval" else tasks
    else:
        tasks = [task for task in tasks if is_held_out(task[0]) == (split == "eval")]
    return random.Random(f"{split}/{epoch}").sample([*tasks], len(tasks))


def draw_task(env, split: str, index: int, fits=lambda prompt: True) -> tuple[str, str]:
    """(prompt, answer) number `index` of a split: a pure function. "eval" is the held-out split, all other names are the rest.

    A list of problems is drawn without replacement, pass after pass. A task of make() is drawn again if the prompt belongs to
    the other split, or if fits(prompt) is false.
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
    """The first n different held-out prompts; fewer if many draws in a row bring no new prompt. -1: all of eval_problems, else
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
    """Remove problems with prompts of seq_len tokens or more from the lists; returns messages for the user. Prompts of make()
    are checked when drawn. Raises ValueError if nothing is left."""
    said, fits = [], functools.partial(text.fits, seq_len=seq_len)
    for name in {"problems", "eval_problems"} & set(dir(env)):
        before = getattr(env, name)
        setattr(env, name, [task for task in before if fits(task[0])])
        if n := len(before) - len(getattr(env, name)):
            said.append(f"{n:,} of {len(before):,} {name.replace('_', ' ')} are left out: with their prompts --seq_len "
                        f"{seq_len} leaves no room to answer")
    shuffled.cache_clear()
    draw_task(env, "train", 0, fits)  # raises ValueError if no prompt is left
    return said


def tool_of(env, text):
    """The environment's tool as a function from ids to ids, for rollout(); None without a tool."""
    if not hasattr(env, "tool"):
        return None

    def answer(ids):
        is_question = text.decode(ids[-len(env.TOOL_END) - 8 :]).endswith(env.TOOL_END)
        return text.ids(env.tool(text.decode(ids))) if is_question else []

    return answer


def supervised_sample(env, text, prompt: str, answer: str) -> dict:
    """An answer in the form of a sample; the text of the tool is masked, as in a rollout."""
    ids, tool = text.ids(answer) + [text.eot], tool_of(env, text)
    mask = [1.0] * len(ids)
    for i in range(len(ids) if tool else 0):
        said = tool(ids[: i + 1]) if mask[i] else []
        if said and ids[i + 1 : i + 1 + len(said)] == said:
            mask[i + 1 : i + 1 + len(said)] = [0.0] * len(said)
    return dict(prompt=text.prompt(prompt), ids=ids, logprobs=[0.0] * len(ids), mask=mask, advantage=1.0)
