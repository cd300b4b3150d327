"""Recipes with the lines that docs/fork_me.md adds, and the flags of their small runs."""

import re

from runs import MODEL, REPO

FLAGS = [
    "--steps",
    24,
    "--model_args",
    MODEL,
    "--seq_len",
    32,
    "--local_batch_size",
    2,
    "--log_every",
    4,
    "--val_every",
    0,
    "--compute_dtype",
    "float32",
    "--device",
    "cpu",
    "--dp_shard",
    2,
]


def write_copy(path, heading: str, *planted, original="train_llama3.py") -> None:
    """A copy of a recipe with the lines under a heading of docs/fork_me.md."""
    text = (REPO / original).read_text()
    block = re.search(
        rf"## {heading}\n.*?```diff\n(.*?)```", (REPO / "docs/fork_me.md").read_text(), re.S
    )[1]
    for hunk in block.strip("\n").split("\n\n"):
        old, new = (
            "".join(line[1:] + "\n" for line in hunk.split("\n") if line[0] == sign)
            for sign in "-+"
        )
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    for line, code in planted:
        assert text.count(line) == 1, line
        text = text.replace(line, code + line)
    path.write_text(text)
