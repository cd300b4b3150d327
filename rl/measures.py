"""What evaluate.py makes of scores and written answers: an item for each line of a task, and metrics
with standard errors.

Each measure gets the lines, their requests, the results of the requests (a score, or a written
answer), and --answers: a kind of rl/answers.py, or auto.
"""

import math
from typing import NamedTuple

from rl.answers import answer_text, cut_thoughts, final_number, is_ordinary_number, is_right
from rl.datasets import Line
from rl.evaluation import ratio
from rl.sample import Sample


class Measured(NamedTuple):
    items: list[dict]  # of each line
    metrics: dict[str, float | None]
    notes: tuple[str, ...] = ()  # what is judged otherwise than it may seem


def perplexity(
    lines: list[Line], windows: list[list[tuple]], scores: list[list[float]], answers: str
) -> Measured:
    """Of texts. windows: requests of each line. scores: results of score() for each line."""
    items = []
    for line, of_line, logprobs in zip(lines, windows, scores):
        n_tokens = sum(len(continuation) for _, continuation in of_line)
        n_bytes = len(line.fields["text"].encode())
        items.append(dict(logprob=sum(logprobs), tokens=n_tokens, bytes=n_bytes))
    nats = []
    tokens = []
    n_bytes = []
    if len(lines) == 1:  # a single text is a sample of windows, each with a share of the bytes
        (item,) = items
        for (_, continuation), logprob in zip(windows[0], scores[0], strict=True):
            nats.append(-logprob)
            tokens.append(len(continuation))
            n_bytes.append(item["bytes"] * len(continuation) / item["tokens"])
    else:
        for item in items:
            nats.append(-item["logprob"])
            tokens.append(item["tokens"])
            n_bytes.append(item["bytes"])
    metrics = ratio("loss", nats, tokens) | ratio("bits_per_byte", nats, n_bytes, 1 / math.log(2))
    most = min(metrics["loss"], 700.0)  # e^710 is too large for a float
    metrics |= dict(perplexity=math.exp(most), tokens=sum(tokens), bytes=round(sum(n_bytes)))
    return Measured(items, metrics)


def multiple_choice(
    lines: list[Line], choices: list[list[tuple]], scores: list[list[float]], answers: str
) -> Measured:
    """Of questions with choices. scores: for each line, the scores of its choices."""
    items = []
    for line, logprobs in zip(lines, scores):
        item = dict(logprobs=logprobs, answer=line.fields["answer"])
        texts = line.fields["choices"]
        lengths = {
            "acc": [1] * len(texts),
            "acc_norm": [len(text) for text in texts],
            "acc_bytes": [len(text.encode()) for text in texts],
        }
        for metric, length in lengths.items():
            each = [x / n for x, n in zip(logprobs, length)]
            item[metric] = int(each.index(max(each)) == item["answer"])
        items.append(item)
    metrics = {}
    for metric in ("acc", "acc_norm", "acc_bytes"):
        metrics |= ratio(metric, [item[metric] for item in items])
    return Measured(items, metrics)


def exact_match(
    lines: list[Line], prompts: list[list[tuple]], samples: list[list[Sample]], answers: str
) -> Measured:
    """Of written answers. samples: from evaluate.complete, one for each line."""
    items = []
    kinds = []
    n_in_thought = 0
    for line, (s,) in zip(lines, samples):
        answer = answer_text(line.fields["answer"])
        kind = kind_of(answers, answer)
        kinds.append(kind)
        said = cut_thoughts(s.text, s.opened)
        correct = said is not None and not s.truncated and is_right(kind, said, answer)
        n_in_thought += said is None
        if kind == "number":
            number = final_number(answer)
            if number is not None:
                answer = float(number)
        item = dict(
            question=line.fields["question"],
            prediction=s.text,
            answer=answer,
            tokens=len(s.ids),
            truncated=s.truncated,
            correct=int(correct),
        )
        items.append(item)
    metrics = ratio("exact_match", [item["correct"] for item in items])
    metrics["truncated"] = sum(item["truncated"] for item in items) / len(items)
    notes = []
    n = kinds.count("number")
    if answers == "auto" and n < len(kinds):
        notes.append(
            f"--answers auto: {n:,} answers are numbers; {len(kinds) - n:,} are not, and only the "
            "same text is right (for all: --answers number, exact or math)"
        )
    if n_in_thought:
        notes.append(
            f"{n_in_thought:,} of {len(items):,} texts end in a thought, and are wrong: raise "
            "--max_new_tokens, or see the template for --template_args enable_thinking=false"
        )
    return Measured(items, metrics, tuple(notes))


def kind_of(answers: str, answer: str) -> str:
    """The rule in rl/answers.py for an answer; auto: number for a number, else exact."""
    if answers != "auto":
        return answers
    if is_ordinary_number(answer):
        return "number"
    return "exact"
