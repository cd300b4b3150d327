"""How good is a model? Perplexity of a text, multiple choice by log-likelihood, or exact match of written answers.

    python evaluate.py --checkpoint runs/llama3 --task book.txt
    python evaluate.py --checkpoint runs/llama3/checkpoints/step-300 --task choices.jsonl --out results.jsonl
    torchrun --nproc_per_node 2 evaluate.py --checkpoint HUGGING_FACE_FOLDER --task questions.jsonl --chat --tp 2

The fields of a line decide the kind of task; further fields are allowed:

    {"text": "..."}, or a .txt        loss: nats per token, perplexity = e^loss, bits_per_byte. Each token is scored once
    {"question", "choices", "answer"} acc: the likeliest choice is right; acc_norm, acc_bytes: by log-probability divided by the
                                      number of characters or bytes. answer: the choice's text, its letter, or its number from 0
    {"question", "answer"}            exact_match: the text of the model has the same number as the answer (after the last ####,
                                      else the last number), or equals an answer without a number; --answers math: the last
                                      \\boxed{} is compared, fractions as fractions (rl/answers.py). A text cut off at
                                      --max_new_tokens is wrong

A prompt is "Question: {question}\\nAnswer:", or with --chat "{question}" in the chat template, cut into requests as by lm-eval
(rl/scoring.py). All layouts and batch sizes give the same numbers, up to rounding. The standard error (_stderr) of a ratio
r = sum y_i / sum x_i over n lines (or windows of a single text) is sqrt(n / (n - 1) sum_i (y_i - r x_i)^2) / sum_i x_i. For a
mean (x_i = 1) the formula is the sample's standard deviation / sqrt(n); for n = 1 the error is null. --out gets one JSON object
per line of the task, and a last line {"summary": {...}}, all written at the end: Ctrl-C leaves nothing. For lm-eval's own tasks
see docs/finetune.md.
"""
import json
import math
import os
import time
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from corpus.mixture import format_of
from corpus.tokenizer import ChatConfig
from distributed.launch import connect, run
from parallel import make_mesh
from rl.answers import KINDS as RIGHT
from rl.answers import final_number, is_right, never_right
from rl.datasets import Line, fill_template, is_answer, jsonl_lines, read_content, unescape
from rl.scoring import (
    WRITING,
    ScoringConfig,
    check_requests,
    complete,
    encode_pair,
    open_model,
    opening_ids,
    plan_layout,
    read_checkpoint,
    rolling_windows,
    score,
)
from rl.text import Text
from sft.chat import open_chat
from storage.manifest import is_hf_folder
from support.config import Need, check_range, flag
from support.files import check_local, read_json, write_file

BASE_PROMPT = "Question: {question}\nAnswer:"  # for a base model; a chat model has its template
# Needs of flags: see support/config.py. c.kind: from read_task, set by plan_layout.
QUESTIONS = Need("on a text, which asks nothing", lambda c: c.kind != "text")
WINDOWS = Need("on questions, which are scored as a whole", lambda c: c.kind == "text")
SAMPLING = Need("with --temperature 0", lambda c: c.temperature > 0)
SHOTS = Need("without --shots", lambda c: c.shots)


@dataclass(kw_only=True)
class Config(ScoringConfig, ChatConfig):
    task: str = ""  # a .txt, or a .jsonl of texts or questions, told apart by their fields, see above
    out: str = ""  # new file for the results, .jsonl; empty: only a summary on the screen
    limit: int = 0  # only the first lines of the task, so many; 0 = all
    stride: int = flag(-1, WINDOWS)  # tokens scored by each window after a text's first, the rest is context; -1 = all
    chat: bool = flag(False, QUESTIONS)  # wrap the prompt in the chat template of the tokenizer
    prompt_template: str = flag("", QUESTIONS)  # with {fields}; empty: Question: {question}\nAnswer:, or with --chat {question}
    shots: int = flag(0, QUESTIONS)  # answered questions before each one
    shots_file: str = flag("", SHOTS)  # .jsonl with these questions in its first lines
    answers: Literal["auto", *RIGHT] = flag("auto", WRITING)  # right answers; auto: number, or exact for answers without one
    max_new_tokens: int = flag(256, WRITING)  # longer answers are cut off, and wrong
    temperature: float = flag(0.0, WRITING)  # 0 always takes the likeliest token
    stop: list[str] = flag(["\\nQuestion:"], WRITING)  # an answer ends before any of these strings; \n is a new line
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
    """("text", "choice" or "answer", the lines) of a task's file. The ValueError names the line."""
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
    """Raises ValueError for a line with an answer that no text can match."""
    for line in lines:
        if reason := never_right(answers, str(line.fields["answer"])):
            raise ValueError(f"{line.where}: nothing can be right with --answers {answers} where the answer is "
                             f"{str(line.fields['answer'])[-60:]!r}: {reason}")


def check_line(line: Line, kind: str) -> Line:
    """The line, with its answer among choices as a number from 0. Raises ValueError for missing or wrong fields."""
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
    """The text before each answer: shots, then the line in --prompt_template; with --chat, all in one message."""
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


# ---------------------------------------------------------------- scores -> an item per line, and metrics
def ratio(name: str, y: list[float], x: list[float] | None = None, scale=1.0) -> dict:
    """{name: sum y / sum x, name_stderr: its standard error by linearisation}, both times scale. x None: the mean of y."""
    n, x = len(y), x or [1.0] * len(y)
    r = sum(y) / sum(x)
    squares = sum((a - r * b) ** 2 for a, b in zip(y, x))
    return {name: r * scale, f"{name}_stderr": math.sqrt(n / (n - 1) * squares) / sum(x) * scale if n > 1 else None}


def perplexity(lines: list[Line], windows: list[list[tuple]], scores: list[list[tuple]]) -> tuple[list[dict], dict]:
    """(items, metrics) of texts. windows: requests of each line. scores: results of score() for each line."""
    nats = [[-logprob for logprob, _ in of_line] for of_line in scores]
    tokens = [[len(continuation) for _, continuation in of_line] for of_line in windows]
    n_bytes = [len(line.fields["text"].encode()) for line in lines]
    items = [dict(logprob=-sum(a), tokens=sum(b), bytes=c) for a, b, c in zip(nats, tokens, n_bytes)]
    if len(lines) == 1:  # a single text is a sample of windows, each with a share of the bytes
        nats, tokens = nats[0], tokens[0]
        n_bytes = [n_bytes[0] * n / sum(tokens) for n in tokens]
    else:
        nats, tokens = [sum(a) for a in nats], [sum(b) for b in tokens]
    metrics = ratio("loss", nats, tokens) | ratio("bits_per_byte", nats, n_bytes, 1 / math.log(2))
    most = 700.0  # e^710 is too large for a float
    return items, metrics | dict(perplexity=math.exp(min(metrics["loss"], most)), tokens=sum(tokens), bytes=round(sum(n_bytes)))


def multiple_choice(lines: list[Line], scores: list[list[tuple]]) -> tuple[list[dict], dict]:
    """(items, metrics) of questions with choices. scores: for each line, the scores of its choices."""
    lengths = {"acc": lambda choice: 1, "acc_norm": len, "acc_bytes": lambda choice: len(choice.encode())}
    items = []
    for line, of_line in zip(lines, scores):
        logprobs, choices, answer = [logprob for logprob, _ in of_line], line.fields["choices"], line.fields["answer"]
        best = {name: [x / length(choice) for x, choice in zip(logprobs, choices)] for name, length in lengths.items()}
        right = {name: int(each.index(max(each)) == answer) for name, each in best.items()}
        items.append(dict(logprobs=logprobs, answer=answer) | right)
    return items, {name: x for metric in lengths for name, x in ratio(metric, [item[metric] for item in items]).items()}


def exact_match(lines: list[Line], samples: list[dict], answers="auto") -> tuple[list[dict], dict]:
    """(items, metrics) of written answers. samples: from complete(). answers: kind in rl/answers.py, or auto."""
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
    """The most tokens of a forward. Raises ValueError for flags that do not fit this task or this model."""
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
        (kind == "answer" and cfg.pp * cfg.cp > 1, f"--pp {cfg.pp} --cp {cfg.cp}: answers are written token by token, with "
         "which neither helps; use --dp_shard or --tp"),
        (kind == "answer" and cfg.tp > 1 and hasattr(model_config, "mtp_depth"),
         f"--tp {cfg.tp}: writing with DeepSeek caches latents, which tp does not split; use --dp_shard"),
    ]:
        if wrong:
            raise ValueError(message)
    return longest


def requests_of(cfg: Config, kind: str, text: Text, lines: list[Line], longest: int) -> list[list[tuple]]:
    """For each line its requests (context, continuation): windows of a text, choices of a question, or a prompt without a
    continuation."""
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
    # 1. task, model and layout: all errors in files and flags are found before anything is built
    began = time.time()
    if not cfg.task:
        raise ValueError("--task is missing: give a .txt, or a .jsonl of texts or questions; see --help")
    kind, lines = read_task(cfg.task)
    lines = lines[: cfg.limit or None]
    counted = f"{len(lines):,} line{'s' * (len(lines) > 1)}"
    if kind == "answer" and cfg.answers != "auto":
        check_answers(lines, cfg.answers)
    text, Model, model_config, folder = read_checkpoint(cfg.checkpoint, open_chat(cfg.checkpoint, cfg))
    longest = check_task(cfg, kind, model_config, folder)
    cfg, layout = plan_layout(cfg, kind, model_config, longest)

    # 2. requests to the model
    groups = requests_of(cfg, kind, text, lines, longest)
    requests, room = [*chain(*groups)], longest - cfg.max_new_tokens if kind == "answer" else longest + 1
    if not requests:
        raise ValueError(f"--task {cfg.task}: its texts are empty")
    n_cut = check_requests(requests, room, model_config.vocab_size)

    # 3. scores or answers of the model
    try:
        layout = make_mesh(connect(layout, cfg, cfg.device))
        stages = open_model(cfg.checkpoint, layout, cfg, Model, model_config)
        if layout.rank == 0:
            print(f"{cfg.task}: {counted}, up to {longest:,} tokens at once | {folder} | "
                  f"{layout} on {layout.device.type}, {str(layout.compute_dtype)[6:]}", flush=True)
            if n_cut:
                print(f"{n_cut:,} of {len(requests):,} prompts do not fit into {longest:,} tokens: they lose their beginnings")
        if kind == "answer":
            prompts = [prompt[-room:] for prompt, _ in requests]
            stop = [unescape(string) for string in cfg.stop if string]
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
