"""The check of exercise 5: the plan fits the model, 2 processes train the same as 1, and each holds half of every matrix."""
import re

import layouts
from feedback import Wrong, compare, on_ranks

from distributed.checks import check_tp_plan
from distributed.layout import local_tensor
from models.llama3 import Llama3
from parallel import TP_STYLES

QUESTIONS = [  # first parameter that differs -> hint for the student
    (r"norm\.weight$", "it saw half of the tokens; who adds up the other half?"),
    (r"attn\.|ffn\.", "which part of the tokens does this matrix see, and in which order do the parts come together?"),
    (r"tok_embeddings|head", "the table is split over the vocabulary, and the blocks hold T/tp of the tokens"),
]


def question_about(name: str) -> str:
    return next(text for pattern, text in [*QUESTIONS, ("", "what does each rank see?")] if re.search(pattern, name))


def whole_matrices() -> list[str]:
    """Names of the matrices held whole by both ranks of tp 2."""
    (stage,), _ = layouts.build(layouts.config(n_layers=2), dict(tp=2), 2, 2)
    return [name for name, p in stage.named_parameters() if p.dim() == 2 and local_tensor(p).numel() == p.numel()]


def check_names():
    for tied in (False, True):
        try:
            check_tp_plan(Llama3(layouts.config(tie_embeddings=tied)), TP_STYLES)
        except ValueError as e:
            raise Wrong(f"with tie_embeddings={tied}: {e}") from None


def check_training():
    try:
        difference = compare(2, dict(tp=2), dict(n=4, b=2, n_layers=2))
    except RuntimeError as e:
        last = str(e).strip().splitlines()[-1]
        if found := re.search(r"--tp: (\S+) has no style", last):
            raise Wrong(f"{found[1]} has no style, so on tp 2 its gradient is not whole: {question_about(found[1])}") from None
        raise Wrong(f"the plan does not run on tp 2: {last}. Where a rank has T/tp of the tokens "
                    "and where all T? A colwise matrix needs all of them, and leaves H/tp heads or F/tp channels; a rowwise "
                    "one takes these and leaves T/tp tokens") from None
    if found := re.search(r"gradient of (\S+) off by (\S+)", difference):
        name, off = found[1], float(found[2])
        raise Wrong(f"gradient of {name} is off by {off:.2f} (relative) on tp 2: {question_about(name)}")
    if difference:
        raise Wrong(f"on tp 2: {difference}")


def check():
    check_names()
    check_training()
    if whole := on_ranks(2, whole_matrices)[0]:
        raise Wrong(f"it trains the same model, but on tp 2 each rank holds all of {whole[0]} ({len(whole)} matrices are "
                    "whole): then tp saves no memory there. Split by rows what makes heads or channels, by columns what puts "
                    "them together")
