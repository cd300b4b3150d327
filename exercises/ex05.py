"""The check of exercise 5: the plan fits models of several depths, 2 and 4 processes train as 1
does, and share every matrix."""

import re

import layouts
from feedback import Wrong, alone, compare, on_ranks

from distributed.checks import check_tp_plan
from distributed.layout import local_tensor
from models.llama3 import Llama3
from parallel import TP_STYLES

QUESTIONS = [  # first parameter that differs -> hint for the student
    (r"norm\.weight$", "it saw half of the tokens; who adds up the other half?"),
    (
        r"attn\.|ffn\.",
        "which part of the tokens does this matrix see, and in which order do the parts come "
        "together?",
    ),
    (
        r"tok_embeddings|head",
        "the table is split over the vocabulary, and the blocks hold T/tp of the tokens",
    ),
]


def question_about(name: str) -> str:
    return next(
        text
        for pattern, text in [*QUESTIONS, ("", "what does each rank see?")]
        if re.search(pattern, name)
    )


def whole_matrices(tp: int) -> list[str]:
    """Names of the matrices held whole by all ranks of tp."""
    (stage,), _ = layouts.build(layouts.config(n_layers=2), dict(tp=tp), 2, 2)
    return [
        name
        for name, p in stage.named_parameters()
        if p.dim() == 2 and local_tensor(p).numel() == p.numel()
    ]


def names_refused(n_layers: int, tied: bool) -> str:
    """What check_tp_plan says of the plan of a model."""
    try:
        check_tp_plan(Llama3(layouts.config(n_layers=n_layers, tie_embeddings=tied)), TP_STYLES)
    except ValueError as e:
        return str(e)
    return ""


def check_names():
    for n_layers, tied in ((4, False), (4, True), (7, False), (1, False)):
        if said := alone(names_refused, n_layers, tied):
            raise Wrong(f"with n_layers={n_layers}, tie_embeddings={tied}: {said}")


def check_training(tp: int):
    try:
        difference = compare(tp, dict(tp=tp), dict(n=4, b=2, n_layers=2))
    except RuntimeError as e:
        last = str(e).strip().splitlines()[-1]
        if found := re.search(r"--tp: (\S+) has no style", last):
            question = question_about(found[1])
            raise Wrong(
                f"{found[1]} has no style, so on tp {tp} its gradient is not whole: {question}"
            ) from None
        raise Wrong(
            f"the plan does not run on tp {tp}: {last}. Where a rank has T/tp of the tokens and "
            "where all T? A colwise "
            "matrix needs all of them, and leaves H/tp heads or F/tp channels; a rowwise one "
            "takes these and leaves "
            "T/tp tokens"
        ) from None
    if found := re.search(r"gradient of (\S+) off by (\S+)", difference):
        name = found[1]
        off = float(found[2])
        raise Wrong(
            f"gradient of {name} is off by {off:.2f} (relative) on tp {tp}: {question_about(name)}"
        )
    if difference:
        raise Wrong(f"on tp {tp}: {difference}")


def check():
    check_names()
    for tp in (2, 4):
        check_training(tp)
        if whole := on_ranks(tp, whole_matrices, tp)[0]:
            raise Wrong(
                f"it trains the same model, but on tp {tp} each rank holds all of {whole[0]} "
                f"({len(whole)} matrices "
                "are whole): then tp saves no memory there. Split by rows what makes heads or "
                "channels, by columns "
                "what puts them together"
            )
