"""How good is a model: perplexity of a text, multiple choice by log-likelihood, or exact match of written answers.

    python evaluate.py --checkpoint runs/llama3 --task book.txt
    python evaluate.py --checkpoint runs/llama3/checkpoints/step-300 --task choices.jsonl --out results.jsonl
    torchrun --nproc_per_node 2 evaluate.py --checkpoint HUGGING_FACE_FOLDER --task questions.jsonl --chat --tp 2

The fields of a line say what is asked; more fields than these may be there:

    {"text": "..."}, or a .txt        loss: nats per token, perplexity = e^loss, bits_per_byte. Each token is scored once
    {"question", "choices", "answer"} acc: the likeliest choice is right; acc_norm, acc_bytes: by log-probability divided by the
                                      number of characters or bytes. answer: the choice's text, its letter, or its number from 0
    {"question", "answer"}            exact_match: what the model writes has the answer's number (behind the last ####, else the
                                      last one in the text), or is the answer where that has no number; --answers math: the
                                      answer is in the last \\boxed{}, and fractions are compared as such (rl/answers.py). A
                                      text that is cut off at --max_new_tokens is wrong

A prompt is "Question: {question}\\nAnswer:", or with --chat "{question}" in the chat template; requests are made of it as
lm-eval makes them (rl/scoring.py). The same numbers come out in every layout and with every batch size, up to rounding. Errors
(_stderr) are sqrt(n / (n - 1) sum_i (y_i - r x_i)^2) / sum_i x_i of a ratio r = sum y_i / sum x_i over n lines (or windows of a
single text): for a mean, where x_i = 1, the sample's standard deviation / sqrt(n). They are null for n = 1. --out gets one JSON
object per line of the task, and at last {"summary": {...}}. It is written at the end, as a whole: Ctrl-C leaves nothing.
lm-eval's own tasks: see docs/finetune.md.
"""
import json
import math
import os
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from corpus.readers import format_of
from corpus.tokenizer import ChatConfig
from distributed.launch import run
from rl.answers import KINDS as RIGHT
from rl.answers import final_number, is_right, never_right
from rl.datasets import Line, fill_template, is_answer, jsonl_lines, read_content, unescape
from rl.scoring import (
    WRITING,
    ScoringConfig,
    check_requests,
    check_writing,
    complete,
    encode_pair,
    join,
    open_model,
    opening_ids,
    plan_layout,
    read_checkpoint,
    rolling_windows,
    score,
)
from rl.text import Text
from sft.prompts import open_chat
from storage.manifest import is_hf_folder
from support.config import Need, check_range, flag
from support.files import check_local, read_json, write_file

BASE_PROMPT = "Question: {question}\nAnswer:"  # for a model that goes on with texts; to a chat model its template says who asks
# What flags need to have an effect: see support/config.py. c.kind is what read_task says.
QUESTIONS = Need("on a text, which asks nothing", lambda c: c.kind != "text")
WINDOWS = Need("on questions, which are scored as a whole", lambda c: c.kind == "text")
SAMPLING = Need("with --temperature 0", lambda c: c.temperature > 0)
SHOTS = Need("without --shots", lambda c: c.shots)


@dataclass(kw_only=True)
class Config(ScoringConfig, ChatConfig):
    task: str = ""  # a .txt, or a .jsonl of texts or questions: their fields say what is asked, see above
    out: str = ""  # new file for the results, .jsonl; empty: they are only summed up on the screen
    limit: int = 0  # only so many lines of the task, the first ones; 0 = all
    stride: int = flag(-1, WINDOWS)  # tokens that a window after a text's first scores, the rest is context; -1 = all
    chat: bool = flag(False, QUESTIONS)  # wrap the prompt in the chat template of the tokenizer
    prompt_template: str = flag("", QUESTIONS)  # with {fields}; empty: Question: {question}\nAnswer:, or with --chat {question}
    shots: int = flag(0, QUESTIONS)  # answered questions before each one
    shots_file: str = flag("", SHOTS)  # .jsonl whose first lines they are
    answers: Literal["auto", *RIGHT] = flag("auto", WRITING)  # what is right; auto: number, or exact without one
    max_new_tokens: int = flag(256, WRITING)  # an answer that has not ended by then is cut off, and wrong
    temperature: float = flag(0.0, WRITING)  # 0 always takes the likeliest token
    stop: list[str] = flag(["\\nQuestion:"], WRITING)  # an answer ends before any of these; \n is a new line
    seed: int = flag(0, WRITING, SAMPLING)  # another seed is another sample

    def __post_init__(self):
        ScoringConfig.__post_init__(self)
        check_range(self, 1, math.inf, "max_new_tokens")
        check_range(self, 0, math.inf, "limit", "shots", "temperature")
        if self.shots and not self.shots_file:
            raise ValueError(f"--shots {self.shots} needs --shots_file FILE.jsonl, which has them")


# ---------------------------------------------------------------- tasks
KINDS = {"text": ("text",), "choice": ("question", "choices", "answer"), "answer": ("question", "answer")}


def read_task(path: str, flag="--task") -> tuple[str, list[Line]]:
    """("text", "choice" or "answer", the lines) of a task's file. Raises ValueError that names the line."""
    content = read_content(path, flag, ".txt", ".jsonl")
    if format_of(Path(path)) == ".txt":
        lines = [Line(path, {"text": content})] if content else []
    else:
        lines = jsonl_lines(content, path)
    if not lines:
        raise ValueError(f"{flag} {path} is empty: there is nothing to evaluate")
    found = [kind for kind, names in KINDS.items() if set(names) <= lines[0].fields.keys()]
    found = [kind for kind in found if kind != "answer" or "choice" not in found]
    if len(found) != 1:
        raise ValueError(f"{lines[0].where} has {', '.join(lines[0].fields) or 'no fields'}; need text, or question, choices "
                         "and answer, or question and answer")
    return found[0], [check_line(line, found[0]) for line in lines]


def check_answers(lines: list[Line], answers: str):
    """Raises ValueError for a line whose answer no text can give."""
    for line in lines if answers != "auto" else ():
        if reason := never_right(answers, str(line.fields["answer"])):
            raise ValueError(f"{line.where}: nothing can be right with --answers {answers} where the answer is "
                             f"{str(line.fields['answer'])[-60:]!r}: {reason}")


def check_line(line: Line, kind: str) -> Line:
    """The line, its answer as a number from 0 where there are choices. Raises ValueError for what its kind does not allow."""
    where, record = line
    if missing := [name for name in KINDS[kind] if name not in record]:
        raise ValueError(f"{where} has no {missing[0]}, and the first line has")
    if wrong := [name for name in ("text", "question") if name in KINDS[kind] and not isinstance(record[name], str)]:
        raise ValueError(f"{where}: {wrong[0]} is no text")
    if kind == "answer" and not is_answer(record["answer"]):
        raise ValueError(f"{where}: the answer is no text and no number")
    if kind != "choice":
        return line
    choices, answer = record["choices"], record["answer"]
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) and c for c in choices):
        raise ValueError(f"{where}: choices are no list of texts, none of them empty")
    is_letter = isinstance(answer, str) and len(answer) == 1 and answer.isalpha()
    index = choices.index(answer) if answer in choices else ord(answer.upper()) - ord("A") if is_letter else answer
    if type(index) is not int or not 0 <= index < len(choices):
        raise ValueError(f"{where}: the answer {answer!r} is none of the {len(choices)} choices, nor the letter of one, nor "
                         "its number from 0")
    return Line(where, record | {"answer": index})


def prompts_of(cfg: Config, text: Text, lines: list[Line], kind: str) -> list[str]:
    """What is before each answer: the shots, and the line's fields in --prompt_template; with --chat, as one message."""
    template = unescape(cfg.prompt_template) or ("{question}" if text.chat else BASE_PROMPT)

    shots = ""
    if cfg.shots:
        shots_kind, examples = read_task(cfg.shots_file, "--shots_file")
        if shots_kind != kind or len(examples) < cfg.shots:
            raise ValueError(f"--shots_file {cfg.shots_file} has {len(examples)} lines of kind {shots_kind}; need {cfg.shots} "
                             f"of kind {kind}, as in --task")
        for line in examples[: cfg.shots]:
            answer = line.fields["answer"]
            shots += f"{fill_template(template, line)} {line.fields['choices'][answer] if kind == 'choice' else answer}\n\n"
    prompts = [shots + fill_template(template, line) for line in lines]
    return [text.chat(prompt) for prompt in prompts] if text.chat else prompts


# ---------------------------------------------------------------- scores -> one item per line, and the metrics of all
def ratio(name: str, y: list[float], x: list[float] | None = None, scale=1.0) -> dict:
    """{name: sum y / sum x, name_stderr: its standard error by linearisation}, both times scale. x None: the mean of y."""
    n, x = len(y), x or [1.0] * len(y)
    r = sum(y) / sum(x)
    squares = sum((a - r * b) ** 2 for a, b in zip(y, x))
    return {name: r * scale, f"{name}_stderr": math.sqrt(n / (n - 1) * squares) / sum(x) * scale if n > 1 else None}


def perplexity(lines: list[Line], windows: list[list[tuple]], scores: list[list[tuple]]) -> tuple[list[dict], dict]:
    """(items, metrics) of texts. windows, scores: for each line its requests, and what score() says of them."""
    nats = [[-logprob for logprob, _ in of_line] for of_line in scores]
    tokens = [[len(continuation) for _, continuation in of_line] for of_line in windows]
    n_bytes = [len(line.fields["text"].encode()) for line in lines]
    items = [dict(logprob=-sum(a), tokens=sum(b), bytes=c) for a, b, c in zip(nats, tokens, n_bytes)]
    if len(lines) == 1:  # of a single text the windows are the sample, each with its share of the bytes
        nats, tokens = nats[0], tokens[0]
        n_bytes = [n_bytes[0] * n / sum(tokens) for n in tokens]
    else:
        nats, tokens = [sum(a) for a in nats], [sum(b) for b in tokens]
    metrics = ratio("loss", nats, tokens) | ratio("bits_per_byte", nats, n_bytes, 1 / math.log(2))
    most = 700.0  # e^710 is too large for a float
    return items, metrics | dict(perplexity=math.exp(min(metrics["loss"], most)), tokens=sum(tokens), bytes=round(sum(n_bytes)))


def multiple_choice(lines: list[Line], scores: list[list[tuple]]) -> tuple[list[dict], dict]:
    """(items, metrics) of questions with choices. scores: for each line those of its choices."""
    lengths = {"acc": lambda choice: 1, "acc_norm": len, "acc_bytes": lambda choice: len(choice.encode())}
    items = []
    for line, of_line in zip(lines, scores):
        logprobs, choices, answer = [logprob for logprob, _ in of_line], line.fields["choices"], line.fields["answer"]
        best = {name: [x / length(choice) for x, choice in zip(logprobs, choices)] for name, length in lengths.items()}
        right = {name: int(each.index(max(each)) == answer) for name, each in best.items()}
        items.append(dict(logprobs=logprobs, answer=answer) | right)
    return items, {name: x for metric in lengths for name, x in ratio(metric, [item[metric] for item in items]).items()}


def exact_match(lines: list[Line], samples: list[dict], answers="auto") -> tuple[list[dict], dict]:
    """(items, metrics) of questions that were answered. samples: of complete(); answers: of rl/answers.py, or auto."""
    items = []
    for line, sample in zip(lines, samples):
        answer = str(line.fields["answer"])
        number = final_number(answer) if answers in ("auto", "number") else None
        kind = answers if answers != "auto" else "exact" if number is None else "number"
        correct = is_right(kind, sample["text"], answer) and not sample["truncated"]
        items.append(dict(
            question=line.fields["question"], prediction=sample["text"], answer=answer if number is None else number,
            tokens=len(sample["ids"]), truncated=sample["truncated"], correct=int(correct)))
    return items, ratio("exact_match", [item["correct"] for item in items]) | dict(
        truncated=sum(item["truncated"] for item in items) / len(items))


# ---------------------------------------------------------------- the program
def check_task(cfg: Config, kind: str, model_config, folder: str) -> int:
    """Tokens of a forward, at most. Raises ValueError for what cannot work with this task, or this model."""
    check_local(cfg.out, "--out")
    longest, place = model_config.max_seq_len if cfg.seq_len == -1 else cfg.seq_len, os.path.dirname(cfg.out) or "."
    if cfg.seq_len == -1 and kind == "text" and not is_hf_folder(folder):
        longest = min(longest, read_json(folder, "config.json").get("seq_len", longest))
    for wrong, message in [
        (cfg.out and os.path.lexists(cfg.out), f"--out {cfg.out} is there already: give a new file, or remove it"),
        (cfg.out and not os.path.isdir(place), f"--out {cfg.out}: {place} is no folder"),
        (not 1 <= longest <= model_config.max_seq_len, f"--seq_len {cfg.seq_len} must be between 1 and the model's "
         f"max_seq_len {model_config.max_seq_len}, or -1 for that"),
        (cfg.stride != -1 and not 1 <= cfg.stride <= longest, f"--stride {cfg.stride} must be between 1 and --seq_len "
         f"{longest}, or -1 for that"),
        (kind == "answer" and cfg.max_new_tokens >= longest, f"--max_new_tokens {cfg.max_new_tokens} leaves no room for a "
         f"prompt in the {longest} tokens of --seq_len, or of the model; lower it"),
    ]:
        if wrong:
            raise ValueError(message)
    if kind == "answer":
        check_writing(cfg, model_config)
    return longest


def requests_of(cfg: Config, kind: str, text: Text, lines: list[Line], longest: int) -> list[list[tuple]]:
    """For each line what the model is asked: (context, continuation) of a text's windows, or of each choice; or the prompt of
    an answer, with nothing after it."""
    if kind == "text":
        stride = longest if cfg.stride == -1 else cfg.stride
        return [rolling_windows(text.ids(line.fields["text"]), text.first, longest, stride) for line in lines]
    prompts = prompts_of(cfg, text, lines, kind)
    if kind == "answer":
        return [[(opening_ids(text, prompt) or [text.first], [])] for prompt in prompts]
    groups, space = [], "" if text.chat else " "
    for line, prompt in zip(lines, prompts):
        try:
            groups.append([encode_pair(text, prompt, space + choice) for choice in line.fields["choices"]])
        except ValueError as error:
            raise ValueError(f"{line.where}: {error}") from None
    return groups


def main(cfg: Config):
    # 1. the task, the model and the layout: what is wrong with files and flags is found before anything is built
    began = time.time()
    if not cfg.task:
        raise ValueError("--task is missing: give a .txt, or a .jsonl of texts or questions; see --help")
    kind, lines = read_task(cfg.task)
    lines, cfg.kind = lines[: cfg.limit or None], kind
    counted = f"{len(lines):,} line{'s' * (len(lines) > 1)}"
    check_answers(lines, cfg.answers if kind == "answer" else "auto")
    text, Model, model_config, folder = read_checkpoint(cfg.checkpoint, open_chat(cfg.checkpoint, cfg))
    longest = check_task(cfg, kind, model_config, folder)
    layout = plan_layout(cfg, model_config, longest)

    # 2. what the model is asked
    groups = requests_of(cfg, kind, text, lines, longest)
    requests, room = [*chain(*groups)], longest - cfg.max_new_tokens if kind == "answer" else longest + 1
    if not requests:
        raise ValueError(f"--task {cfg.task}: its texts are empty")
    n_cut = check_requests(requests, room, model_config.vocab_size)

    # 3. its scores, or its answers
    try:
        layout = join(layout, cfg)
        stages = open_model(cfg.checkpoint, layout, cfg, Model, model_config)
        if layout.rank == 0:
            print(f"{cfg.task}: {counted}, up to {longest:,} tokens at once | {folder} | "
                  f"{layout} on {layout.device.type}, {str(layout.compute_dtype)[6:]}", flush=True)
            if n_cut:
                print(f"{n_cut:,} of {len(requests):,} prompts do not fit into {longest:,} tokens: they lose their beginnings")
        if kind == "answer":
            prompts = [prompt[-room:] for prompt, _ in requests]
            stop = [unescape(string) for string in cfg.stop]
            samples = complete(stages[0], layout, cfg.rollout_timeout_s, text, prompts, cfg.max_new_tokens, cfg.temperature,
                               cfg.seed, stop)
            items, metrics = exact_match(lines, samples, cfg.answers)
        else:
            scores = iter(score(stages, layout, requests, longest))
            grouped = [[next(scores) for _ in group] for group in groups]
            items, metrics = perplexity(lines, groups, grouped) if kind == "text" else multiple_choice(lines, grouped)
    except KeyboardInterrupt:
        if layout.rank == 0:
            print(f"stopped: nothing is written{f' to {cfg.out}' if cfg.out else ''}", flush=True)
        raise

    # 4. results
    if layout.rank == 0:
        summary = dict(task=cfg.task, kind=kind, checkpoint=folder, n=len(lines)) | metrics | dict(
            cut=n_cut, seq_len=longest, layout=str(layout), dtype=str(layout.compute_dtype)[6:],
            seconds=round(time.time() - began, 1))
        found = [dict(index=i) | item for i, item in enumerate(items)] + [dict(summary=summary)]
        if cfg.out:
            write_file(cfg.out, "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in found).encode())
        errors = {name: f" +- {metrics[f'{name}_stderr']:.4f}" for name in metrics if metrics.get(f"{name}_stderr") is not None}
        shown = [f"{name} {x:.4f}{errors.get(name, '')}" if isinstance(x, float) else f"{name} {x:,}"
                 for name, x in metrics.items() if not name.endswith("_stderr")]
        print(f"{'   '.join(shown)}   ({counted}, {summary['seconds']} s{cfg.out and f', {cfg.out}'})")


if __name__ == "__main__":
    run(main, Config)
