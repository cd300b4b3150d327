"""Answers to exercise 21: those of other exercises, together."""

import runpy
from pathlib import Path

SEVEN, ELEVEN = (
    runpy.run_path(Path(__file__).with_name(f"ex{number}.py")) for number in ("07", "11")
)
RIGHT = [SEVEN["RIGHT"][0] + ELEVEN["RIGHT"][0]]
halved = next(answer for answer, words in ELEVEN["WRONG"] if words == "it is the mean")
WRONG = [
    (
        SEVEN["RIGHT"][0] + halved,
        "with {'pp': 2, 'tp': 2}: step 0: gradient of tok_embeddings.weight",
    )
]
