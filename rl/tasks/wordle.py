"""A game for grpo.py, as an example of an environment with state: find a word of three letters in five guesses.

    python grpo.py --env wordle --max_new_tokens 40 --seq_len 48 --sft_steps 500 --lr 5e-4 --steps 300 --eval_n 256 \\
        --model_args dim=64,n_layers=2,n_heads=4,n_kv_heads=4,head_dim=16,ffn_dim=192 --eval_every 50 --out runs/wordle

The task is the secret word and a number, so an eighth of the games is held out; the prompt is ">" in every game. A turn of the
model is a guess and a new line. The game answers with a mark per letter and a new line: + for a letter at its place, - for a
letter of another place, . for a letter that the word does not have.
"""

import random

LETTERS = "abcd"
ALPHABET = LETTERS + ">+-.\n"
TURN_END = "\n"
GUESSES = 5


def make(rng: random.Random) -> tuple[str, str]:
    """A secret word, and a poor player's game for the warm-up: three of four right letters are
    kept, the rest is guessed."""
    task = f"{''.join(rng.choices(LETTERS, k=3))}{rng.randrange(100)}"
    transcript = ""
    guess = ""
    marks = "..."
    state = reset(task)[0]
    done = False
    while not done:
        keep = [mark == "+" and rng.random() < 0.75 for mark in marks]
        letters = []
        for letter, is_kept in zip(guess or "aaa", keep):
            if not is_kept:
                letter = rng.choice(LETTERS)
            letters.append(letter)
        guess = "".join(letters)
        marks, done, _ = step(state, guess)
        transcript += f"{guess}\n" + marks * (not done)
    return task, transcript


def reset(task: str) -> tuple[dict, str]:
    return {"secret": task[:3], "guesses": 0}, ">"


def step(state: dict, text: str) -> tuple[str, bool, float]:
    """(marks, whether the game is over, reward)"""
    secret = state["secret"]
    state["guesses"] += 1
    if text == secret:
        return "", True, 1.0
    marks = []
    for letter, right in zip(text, secret):
        if letter == right:
            marks.append("+")
        elif letter in secret:
            marks.append("-")
        else:
            marks.append(".")
    return "".join(marks) + "\n", state["guesses"] == GUESSES, 0.0
