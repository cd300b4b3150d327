"""An environment of OpenEnv (`pip install openenv-core`, 0.3.0 was tried) as a task of grpo.py.

    python grpo.py --env openenv --max_new_tokens 24 --seq_len 32 --out runs/openenv

Edit make_env, action and text. The example is an environment in the library's own classes, played
in this process; a client of an environment's server has the same reset and step. A task is a seed,
so reset(seed=...) must decide all of an episode.
"""

import random
from typing import Any

try:
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action, Observation, State
except ImportError:
    raise ValueError("environments of OpenEnv need a library: pip install openenv-core") from None


class Guess(Action):
    number: int


class Answer(Observation):
    hint: str


class HigherOrLower(Environment):
    """Find a number from 0 to 99 in four guesses."""

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.secret = seed * 37 % 100
        self.steps = 0
        return Answer(hint=">")

    def step(self, action, timeout_s=None, **kwargs):
        self.steps += 1
        found = action.number == self.secret
        if found:
            hint = "="
        elif action.number < self.secret:
            hint = "+"
        else:
            hint = "-"
        return Answer(hint=hint, done=found or self.steps == 4, reward=float(found))

    @property
    def state(self):
        return State(step_count=self.steps)


make_env = HigherOrLower
ALPHABET = "0123456789>+-=\n"
TURN_END = "\n"


def action(turn: str) -> Guess | None:
    """The model's turn as an action; None ends the episode without a reward."""
    if turn.isdigit() and len(turn) < 5:
        return Guess(number=int(turn))
    return None


def text(observation: Any) -> str:
    """An observation as the model reads it."""
    return observation.hint


def make(rng: random.Random) -> tuple[str, str]:
    """A seed, and for the warm-up an episode of a player that halves the range and errs at times."""
    seed = rng.randrange(10**6)
    low = 0
    high = 99
    said = ""
    env, _ = reset(str(seed))
    for _ in range(4):
        if rng.random() < 0.7:
            guess = (low + high) // 2
        else:
            guess = rng.randint(low, high)
        hint, done, _ = step(env, str(guess))
        said += f"{guess}\n" + hint * (not done)
        if done:
            break
        low, high = (guess + 1, high) if hint == "+" else (low, max(guess - 1, low))
    return str(seed), said


def reset(task: str) -> tuple:
    env = make_env()
    return env, text(env.reset(seed=int(task)))


def step(env: Any, turn: str) -> tuple[str, bool, float]:
    chosen = action(turn)
    if chosen is None:
        return "", True, 0.0
    seen = env.step(chosen)
    return text(seen), seen.done, float(seen.reward or 0)
