"""The tasks of grpo.py as text and as tokens, and the form of a task of your own (--env my_env.py).

An environment is a file in rl/tasks/, or a file of your own. An environment must have

    make(rng) -> (prompt, answer)         one task; the supervised warm-up imitates the answer
    reward(prompt, completion) -> float   completion: all text after the prompt and the thoughts, without the end-of-text token.
                                          Or a dict of named parts, {"right": 1.0, "short": 0.2}, which are added up

and may have

    problems                              instead of make: a list of all (prompt, answer), drawn pass after pass, each problem
                                          once per pass
    eval_problems                         a second list, for evaluation only. Without eval_problems an eighth of the problems
                                          is held out
    group_reward(prompt, completions)     instead of reward: a list with the reward of each sample of the prompt
    reward(..., truncated)                third parameter: whether the sample was cut off before its end. The tasks in rl/tasks/
                                          then pay 0, because the last number of a truncated text is no answer
    ALPHABET                              characters of a model with random weights; the default is printable ASCII
    TOOL_END, tool(completion) -> str     after TOOL_END in a completion comes the text of the tool. The model reads the text
                                          but did not write it, so the text carries no gradient

An environment with state, such as a game, has turns, as many as it likes. In place of reward() it
has

    reset(task) -> (state, prompt)        the beginning of a sample, of the task alone: the first part of what make() returns
    step(state, text) -> (text, done, reward)   text: the model's turn, without TURN_END. The model reads the returned text,
                                          unless the sample is done. The rewards of a sample's steps are added up
    TURN_END                              text at the end of a turn; without TURN_END the end-of-text token ends a turn
"""

import difflib
import functools
import importlib
import importlib.util
import inspect
import os
import random
import string
import sys
import traceback
import zlib
from collections.abc import Callable, Collection
from concurrent.futures import Future
from types import ModuleType
from typing import Any

from rl.answers import cut_thoughts, opened_by
from rl.calls import WATCH, Calls
from rl.rewards import finite, short
from rl.sample import Sample

SOME_TASKS = 64  # tasks of make() that tell how long prompts are
# --env NAME is the file rl/tasks/NAME.py, written like a task of your own
TASKS = (
    "reverse",
    "sum_digits",
    "calculator",
    "countdown",
    "wordle",
    "code",
    "verifiers",
    "openenv",
    "few_problems",
    "two_ways",
)
# all names that grpo.py reads in an environment
NAMES = (
    "make",
    "reward",
    "problems",
    "eval_problems",
    "group_reward",
    "ALPHABET",
    "TOOL_END",
    "tool",
    "reset",
    "step",
    "TURN_END",
)
# what users typed before these tasks had a name
RENAMED = {
    "docs/code_task.py": "code",
    "docs/verifiers_env.py": "verifiers",
    "docs/openenv_env.py": "openenv",
    "docs/few_problems.py": "few_problems",
    "docs/two_ways.py": "two_ways",
    "forks/sum_digits.py": "sum_digits",
    "forks/calculator.py": "calculator",
    "forks/wordle.py": "wordle",
}


def open_env(name: str) -> Any:
    """The environment for --env; rl/datasets.py has the environments for problems in files. Raises
    ValueError."""
    if name in TASKS:
        env = importlib.import_module(f"rl.tasks.{name}")
    elif os.path.normpath(name) in RENAMED and not os.path.isfile(name):
        new = RENAMED[os.path.normpath(name)]
        raise ValueError(
            f"--env {name} is --env {new} now, the file rl/tasks/{new}.py; a run of before goes on "
            f"with --env {new}"
        )
    else:
        env = load_own("env", name, [*TASKS, "dataset", "gsm8k"])
    given = {*dir(env)}
    wanted = []
    if "problems" not in given:
        wanted += ["make"]
    if given & {"TOOL_END", "tool"}:
        wanted += ["TOOL_END", "tool"]
    if given & {"reset", "step", "TURN_END"}:
        wanted += ["reset", "step"]
    elif "group_reward" not in given:
        wanted += ["reward"]
    missing = [word for word in wanted if word not in given]
    if missing:
        raise ValueError(
            f"--env {name} does not define {' and '.join(missing)}; rl/environments.py says what "
            "it needs"
        )
    for word in given & {"TOOL_END", "TURN_END", "ALPHABET"}:
        text = getattr(env, word)
        if not isinstance(text, str) or not text:
            raise ValueError(
                f"--env {name}: {word} must be a text with at least one character, not {text!r}"
            )
    for misspelt, word in near_names(env):
        if misspelt.isupper():
            raise ValueError(
                f"--env {name}: {misspelt} is not read; is {word} meant? Rename it, to another "
                "name if not"
            )
    for word in ("problems", "eval_problems"):
        if word in given:
            check_problems(name, word, getattr(env, word))
    return env


def near_names(env: Any) -> list[tuple[str, str]]:
    """(name, the name that may be meant) of names in an environment that nobody reads, where the
    meant name is missing."""
    given = {name for name in dir(env) if not name.startswith("_")}
    missing = {name.lower(): name for name in NAMES if name not in given}
    found = []
    for name in sorted(given - set(NAMES)):
        near = difflib.get_close_matches(name.lower(), missing, 1, cutoff=0.79)
        if near and not inspect.ismodule(getattr(env, name)):
            found.append((name, missing[near[0]]))
    return found


def check_problems(name: str, word: str, problems: Any) -> None:
    """Raises ValueError for problems that are no pairs of texts."""
    if not isinstance(problems, Collection) or not problems:
        raise ValueError(
            f"--env {name}: {word} must be a list of pairs (prompt, answer), and not empty"
        )
    for i, pair in enumerate(problems):
        if isinstance(pair, str):
            raise ValueError(
                f"--env {name}: {word} must be pairs (prompt, answer), and {pair!r} is a text"
            )
        is_pair = isinstance(pair, (list, tuple)) and len(pair) == 2
        if not is_pair or not all(isinstance(text, str) for text in pair):
            raise ValueError(
                f"--env {name}: {word} must be pairs (prompt, answer) of texts, and number {i} is "
                f"{repr(pair)[:200]}"
            )


def load_own(flag: str, path: str, names: Collection[str]) -> ModuleType:
    """Load the .py file given as --env or --reward. names: other values of the flag. Raises
    ValueError."""
    if not path.endswith(".py") or not os.path.isfile(path):
        raise ValueError(f"--{flag} {path} is no file ending in .py and none of {', '.join(names)}")
    spec = importlib.util.spec_from_file_location(f"nanotitan_{flag}", path)
    # so that checkpoints keep the source
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    try:
        WATCH.call(f"the import of {path}", spec.loader.exec_module, module)
    except Exception as error:
        raise ValueError(f"--{flag} {path}: {error!r}") from None
    return module


def is_held_out(prompt: str) -> bool:
    """Whether a prompt is for evaluation and never trained on: an eighth of all prompts, chosen by
    hash."""
    return zlib.crc32(prompt.encode()) % 8 == 0


@functools.lru_cache(8)
def shuffled(env: Any, split: str, epoch: int) -> list[tuple[str, str]]:
    """The problems of a split, each prompt once, in the order of pass number `epoch`."""
    if hasattr(env, "eval_problems"):
        problems = env.problems
        if split == "eval":
            problems = env.eval_problems
        tasks = dict(problems).items()
    else:
        # problems with one prompt stay on one side, whatever their names
        prompts = {}
        if hasattr(env, "prompts"):
            prompts = env.prompts
        tasks = []
        for task, answer in dict(env.problems).items():
            if is_held_out(prompts.get(task, task)) == (split == "eval"):
                tasks.append((task, answer))
    return random.Random(f"{split}/{epoch}").sample([*tasks], len(tasks))


def ask_for_two(env: Any, name: str, given: Any) -> tuple:
    """The two values of env.make(rng) or env.reset(task). Raises ValueError, one line with the line
    of the user's file."""
    try:
        first, second = WATCH.call(name, getattr(env, name), given)
    except Exception as error:
        raise ValueError(
            f"--env: {name} fails, or does not return two values: {error!r} "
            f"({line_of_error(error, env)})"
        ) from error
    texts = {"make": (first, second), "reset": ()}[name]
    if name == "reset" and not isinstance(second, list):  # a list of messages is a prompt, too
        texts = (second,)
    for text in texts:
        if not isinstance(text, str):
            needed = "(state, prompt)"
            if name == "make":
                needed = "(prompt, answer), two texts"
            raise ValueError(f"--env: {name} must return {needed}, and {repr(text)[:200]} is none")
    return first, second


def line_of_error(error: Exception, env: Any) -> str:
    """File and line of an error, in the user's file if it passed there."""
    frames = traceback.extract_tb(error.__traceback__)
    file = ""
    if hasattr(env, "__file__"):
        file = env.__file__
    own = [frame for frame in frames if frame.filename == file]
    frame = (own or frames)[-1]
    return f"{os.path.basename(frame.filename)}, line {frame.lineno}"


def alphabet_of(env: Any) -> str:
    """The characters that a new model has to know; of a task that does not say: all of ASCII."""
    if hasattr(env, "ALPHABET"):
        return env.ALPHABET
    return string.printable


def draw_task(
    env: Any, split: str, index: int, fits: Callable[[str], bool] = lambda prompt: True
) -> tuple[str, str]:
    """(prompt, answer) number `index` of a split: a pure function. "eval" is the held-out split,
    all other names are the rest.

    A list of problems is drawn without replacement, pass after pass. A task of make() is drawn
    again if the prompt belongs to the other split, or if fits(prompt) is false.
    """
    if hasattr(env, "problems"):
        tasks = shuffled(env, split, 0)
        if tasks:
            return shuffled(env, split, index // len(tasks))[index % len(tasks)]
    else:
        rng = random.Random(f"{split}/{index}")
        for _ in range(10_000):
            prompt, answer = ask_for_two(env, "make", rng)
            if is_held_out(prompt) == (split == "eval") and fits(prompt):
                return prompt, answer
    raise ValueError(
        f"--env gives no prompts for the split {split}: too few are different and fit into "
        "--seq_len"
    )


def held_out_tasks(
    env: Any, n: int, fits: Callable[[str], bool] = lambda prompt: True
) -> dict[str, str]:
    """{prompt: answer} of the first n different held-out prompts; fewer if many draws in a row
    bring no new prompt. -1: all of eval_problems, else 1,024."""
    if n == -1:
        n = 1024
        if hasattr(env, "eval_problems"):
            n = len(env.eval_problems)
    found = {}
    index = 0
    last_new = 0
    while len(found) < n and index - last_new <= 100 + 10 * len(found):
        prompt, answer = draw_task(env, "eval", index, fits)
        index += 1
        if prompt not in found:
            found[prompt] = answer
            last_new = index
    return found


def leave_out_long(env: Any, text, seq_len: int, max_new_tokens: int = 1) -> list[str]:
    """Remove problems with prompts of seq_len tokens or more from the lists; returns messages for
    the user, also about prompts that leave less than max_new_tokens for the answer. Prompts of
    make() are checked when drawn. Raises ValueError if nothing is left."""
    said = []
    if hasattr(env, "left_out"):
        said = [*env.left_out]
    fits = functools.partial(text.fits, seq_len=seq_len)
    for name in {"problems", "eval_problems"} & set(dir(env)):
        before = getattr(env, name)
        setattr(env, name, [task for task in before if fits(task[0])])
        n = len(before) - len(getattr(env, name))
        if n:
            said.append(
                f"{n:,} of {len(before):,} {name.replace('_', ' ')} are left out: with their "
                "prompts --seq_len "
                f"{seq_len} leaves no room to answer"
            )
    shuffled.cache_clear()
    draw_task(env, "train", 0, fits)  # raises ValueError if no prompt is left
    for name, word in near_names(env):
        said.append(f"--env: nobody reads {name}; is {word} meant?")
    said += say_tight(env, text, seq_len, max_new_tokens, fits)
    return said + notice_chance(env, fits)


def notice_chance(env: Any, fits: Callable[[str], bool]) -> list[str]:
    """Ask for a few tasks and their beginnings twice. Returns messages about chance; raises
    ValueError where a prompt depends on chance, because all samples of a task must begin alike."""
    said = []
    for i in range(4):
        task, answer = draw_task(env, "train", i, fits)
        if not said and (task, answer) != draw_task(env, "train", i, fits):
            said.append(
                "--env: two calls of make with equal random numbers differ: a run that goes on has "
                "other tasks; take all chance from its argument, rng"
            )
        if not hasattr(env, "step"):
            continue
        beginnings = [ask_for_two(env, "reset", task) for _ in range(2)]
        states, prompts = zip(*beginnings)
        if prompts[0] != prompts[1]:
            raise ValueError(
                f"--env: two resets of the task {short(task)} begin with {short(str(prompts[0]))} "
                f"and {short(str(prompts[1]))}: reset must depend on the task alone; for chance, "
                "use random.Random(task)"
            )
        if content_of(states[0]) != content_of(states[1]):
            said.append(
                f"--env: two resets of the task {short(task)} have different states: if chance "
                "decides, samples of one task are not compared on equal terms; use "
                "random.Random(task)"
            )
            break
    return said


def content_of(state: Any, depth: int = 6) -> Any:
    """What a state holds, comparable; of an object its class and its attributes."""
    if depth == 0 or state is None or isinstance(state, (str, bytes, int, float)):
        if isinstance(state, (str, bytes, int, float)):
            return repr(state)
        return type(state).__name__
    if isinstance(state, random.Random):
        return state.getstate()
    if isinstance(state, dict):
        return [(repr(key), content_of(state[key], depth - 1)) for key in sorted(state, key=repr)]
    if isinstance(state, (list, tuple)):
        return [content_of(part, depth - 1) for part in state]
    if isinstance(state, (set, frozenset)):
        return sorted(map(repr, state))
    name = type(state).__name__
    if hasattr(state, "__dict__"):
        return name, content_of(vars(state), depth - 1)
    return name


def say_tight(
    env: Any, text, seq_len: int, max_new_tokens: int, fits: Callable[[str], bool]
) -> list[str]:
    """A line for the user if prompts leave less than max_new_tokens for the answer: samples that
    are cut are paid 0, and nothing else would tell why."""
    tasks = []
    for name in ("problems", "eval_problems"):
        if hasattr(env, name):
            tasks += getattr(env, name)
    if not tasks:
        tasks = [draw_task(env, "train", i, fits) for i in range(SOME_TASKS)]
    lengths = [len(text.prompt(task[0])) for task in tasks]
    tight = [length for length in lengths if length + max_new_tokens > seq_len]
    if not tight:
        return []
    return [
        f"{len(tight):,} of {len(lengths):,} prompts leave less than --max_new_tokens "
        f"{max_new_tokens} in --seq_len {seq_len}, the longest {seq_len - max(tight)}: samples that "
        f"are cut there are truncated; --seq_len {max(tight) + max_new_tokens} has room for all"
    ]


class Turns:
    """What an environment says in the samples of rollout(): the text of its tool, or of its steps.
    A simple environment says nothing. calls and earned: number and rewards of the calls in each
    sample; failed: messages of failed calls."""

    def __init__(self, env, text, tasks: list[str], threads=1, seconds=0.0):
        """tasks: of each sample. threads: calls that run at once, while other samples go on.
        seconds: the limit of a call, 0 = none."""
        self.env = env
        self.text = text
        self.failed = []
        self.seconds = seconds
        self.threads = Calls(threads, seconds)
        self.has_state = hasattr(env, "step")
        self.end = ""  # text at the end of a turn
        if hasattr(env, "TURN_END"):
            self.end = env.TURN_END
        elif hasattr(env, "TOOL_END"):
            self.end = env.TOOL_END
        self.states = []
        if self.has_state:
            self.states = [ask_for_two(env, "reset", task)[0] for task in tasks]
        self.calls = [0] * len(tasks)
        self.earned = [0.0] * len(tasks)
        # for rollout()
        if self.has_state or hasattr(env, "tool"):
            self.reply = self.answer
        else:
            self.reply = None

    def is_over(self, s: Sample) -> bool:
        """Whether the newest token of a sample ends a turn. A token may go on after the end: "</code>" and "\n" can be one."""
        last = s.ids[max(s.begin, len(s.ids) - 8 - 4 * len(self.end)) :]
        if self.has_state and last[-1] in self.text.ends:
            return True
        n = 0
        if self.end:
            n = self.text.decode(last).count(self.end)
        if n == 0 or n == self.text.decode(last[:-1]).count(self.end):
            return False
        # a thought may have new lines, and no game hears it; a tool may be asked in a thought
        return not self.has_state or self.end in (self.turn_of(s) or "")

    def turn_of(self, s: Sample) -> str | None:
        """What the model says in its newest turn, after its thoughts; None within a thought."""
        opened = s.begin == 0 and opened_by(self.text, s.prompt)
        return cut_thoughts(self.text.decode(s.ids[s.begin :]), opened)

    def answer(self, s: Sample) -> list | Future:
        """For rollout(): [] within a turn, else a Future of the environment's ids after the turn,
        or of None: the end."""
        turn = self.ended(s)
        if turn:
            return self.begin(*turn)
        return []

    def begin(self, i: int, completion: str, turn: str | None) -> Future:
        """ask() in a thread, with a time limit: a Future of its ids. A call that is late ends the
        sample, and has failed."""
        said = Future()

        def hear(call: Future) -> None:
            error = call.exception()
            if error is not None:
                what = "tool"
                if self.has_state:
                    what = "step"
                late = f"takes longer than --reward_timeout_s {self.seconds:g}"
                if isinstance(error, TimeoutError):
                    how = late
                else:
                    how = f"fails: {error!r}"
                self.failed.append(f"the {what} {how}, at completion {short(completion)}")
            result = None
            if error is None:
                result = call.result()
            said.set_result(result)

        self.threads.submit(self.ask, i, completion, turn).add_done_callback(hear)
        return said

    def ended(self, s: Sample) -> tuple[int, str, str | None] | None:
        """(index, completion, turn) of a sample at the end of a turn; None within a turn."""
        if not self.is_over(s):
            return None
        self.calls[s.index] += 1
        return s.index, self.text.decode(s.ids), self.turn_of(s)

    def ask(self, i: int, completion: str, turn: str | None) -> list[int] | None:
        if self.has_state and turn is None:  # the text ends in a thought, and earns nothing
            return None
        try:
            if not self.has_state:
                return self.text.ids_after(
                    self.env.tool(completion[: completion.rindex(self.end) + len(self.end)])
                )
            if self.end:
                turn = turn.split(self.end)[0]
            said, done, reward = self.env.step(self.states[i], turn)
            if done is None or isinstance(done, (str, float)):
                raise ValueError(f"whether the game is over must be True or False, not {done!r}")
            self.earned[i] += finite(reward)
            if done:
                return None
            return self.text.ids_after(said)
        except Exception as error:
            # raising now would leave other ranks waiting in their next forward
            what = "the tool fails"
            if self.has_state:
                what = "the step fails, or does not return (text, done, reward),"
            self.failed.append(f"{what} at completion {short(completion)}: {error!r}")
            return None

    def close(self, samples: list[Sample]) -> list[Sample]:
        """The samples, with numbers and rewards of their calls."""
        self.threads.close()
        for s, n, earned in zip(samples, self.calls, self.earned):
            s.calls = n
            s.earned = earned
        return samples


def supervised_sample(env: Any, text, task: str, answer: str, seconds: float = 0.0) -> Sample:
    """An answer in the form of a sample; the text of the environment is masked, as in a rollout.
    seconds: the limit of a step or a call of the tool."""
    ids = text.ids(answer) + [text.eot]
    turns = Turns(env, text, [task], 1, seconds)
    prompt = text.prompt(task)
    mask = [1.0] * len(ids)
    so_far = Sample(prompt=prompt)
    for i in range(len(ids) if turns.reply else 0):
        said = []
        if mask[i]:
            so_far.ids = ids[: i + 1]
            turn = turns.ended(so_far)
            if turn:
                said = turns.begin(*turn).result()
        if said is None:
            ids = ids[: i + 1]
            mask = mask[: i + 1]
            break
        if said and ids[i + 1 : i + 1 + len(said)] == said:
            so_far.begin = i + 1 + len(said)
            mask[i + 1 : so_far.begin] = [0.0] * len(said)
    turns.threads.close()
    if turns.failed:
        raise ValueError(f"--env: in an answer of the warm-up, {turns.failed[0]}")
    return Sample(prompt=prompt, ids=ids, logprobs=[0.0] * len(ids), mask=mask, advantage=1.0)
