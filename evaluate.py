"""How good is a model? Perplexity of a text, multiple choice by log-likelihood, or exact match of written answers.

    python evaluate.py --checkpoint runs/llama3 --task book.txt
    python evaluate.py --checkpoint runs/llama3/checkpoints/step-300 --task choices.jsonl --out results.jsonl
    torchrun --nproc_per_node 2 evaluate.py --checkpoint HUGGING_FACE_FOLDER --task questions.jsonl --chat --tp 2

The fields of a line decide the kind of task; further fields are allowed:

    {"text": "..."}, or a .txt        loss: nats per token, perplexity = e^loss, bits_per_byte. Each token is scored once
    {"question", "choices", "answer"} acc: the likeliest choice is right; acc_norm, acc_bytes: by log-probability divided by the
                                      number of characters or bytes. answer: the choice's text, its letter, or its number from 0
    {"question", "answer"}            exact_match: the text of the model has the same number as the answer (after the last ####,
                                      else the last number), or equals an answer that is no number (Apollo 11, July 20, 1969);
                                      --answers math: the last \\boxed{} is compared, fractions as fractions (rl/answers.py).
                                      Thoughts are cut off before. A text cut off at --max_new_tokens or in a thought is wrong

A prompt is "Question: {question}\\nAnswer:", or with --chat "{question}" in the chat template, cut into requests as by lm-eval.
All layouts and batch sizes give the same numbers, up to rounding. The standard error (_stderr) of a ratio
r = sum y_i / sum x_i over n lines (or windows of a single text) is sqrt(n / (n - 1) sum_i (y_i - r x_i)^2) / sum_i x_i. For a
mean (x_i = 1) the formula is the sample's standard deviation / sqrt(n); for n = 1 the error is null. --out gets one JSON object
per line of the task, and a last line {"summary": {...}}, all written at the end: Ctrl-C leaves nothing. For lm-eval's own tasks
see docs/finetune.md.

N requests, B sequences of a forward, T tokens, D dim, V vocab. A request is (context, continuation), lists of token ids; its
score is the log-probability of the continuation after the context. Every rank gets the same requests and returns all scores.
Data ranks share the requests; the pp, cp and tp ranks of a data rank work together on the same requests.
"""

import flags.interrupt  # noqa: F401  Ctrl-C ends in one line, from here on

import json
import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

import parallel
from corpus.tokenizer import ChatConfig
from distributed.checks import check_tp_plan
from distributed.launch import LaunchConfig, connect, set_timeouts
from distributed.layout import ExpertConfig, Layout, ParallelConfig, mtp_depth_of
from distributed.pipeline import PipelineConfig, pipeline_stages
from distributed.refusals import check_layout, refuse, runs_on_cuda
from flags.config import Need, check_range, flag, given_flags, no_effect, own_rank, spell_flag
from flags.escapes import unescape
from flags.files import check_local, check_writable, read_json, write_file
from flags.progress import Progress
from models.loss import IGNORE, no_reduce, token_logprobs
from parallel import make_mesh
from rl.answers import KINDS as RIGHT
from rl.answers import answer_begins, opened_by
from rl.datasets import Line, Text
from rl.decoding import draw_noise, rollout
from rl.measures import exact_match, multiple_choice, perplexity
from rl.packing import in_rows, lay_out, pieces, row_number, token_step
from rl.policy import split_model
from rl.prompts import check_template, fill_template
from rl.questions import (
    answer_of_shot,
    encode_pair,
    opening_ids,
    other_shots,
    read_shots,
    read_task,
    rolling_windows,
)
from rl.rollouts import gather_samples, lockstep, patient_group, whole_weights
from rl.sample import Sample
from storage.adapters import base_of
from storage.hf import class_of, read_hf_config
from storage.loading import load_weights
from storage.newest import has_adapters, is_hf_folder, newest_readable, saved_model
from storage.prompt import open_chat
from tools.run import run

BASE_PROMPT = "Question: {question}\nAnswer:"  # for a base model; a chat model has its template
NOTHING = ([0], [IGNORE])  # a request of one token without a score
# Inherited flags that are for training only
TRAINING = (
    "reduce_dtype",
    "param_dtype",
    "loss_parallel",
    "async_tp",
    "ac",
    "ac_every",
    "ac_budget",
    "compile",
    "cpu_offload",
    "train_timeout_s",
    "pp_schedule",
    "pp_schedule_csv",
)
# Needs of flags: see flags/config.py. c.kind: of the task. c.writes: whether the model writes
# answers to such a task.
QUESTIONS = Need("on a text, which asks nothing", lambda c: c.kind != "text")
WINDOWS = Need("on questions, which are scored as a whole", lambda c: c.kind == "text")
WRITING = Need("where nothing is written: see --task", lambda c: c.writes)
SAMPLING = Need("with --temperature 0", lambda c: c.temperature > 0)
SHOTS = Need("without --shots", lambda c: c.shots)


@dataclass(kw_only=True)
class LayoutConfig(ParallelConfig, ExpertConfig, LaunchConfig, PipelineConfig):
    """How the model is spread over devices, whatever is asked."""


@dataclass(kw_only=True)
class TaskConfig(ChatConfig):
    """How the model is asked, and what is right."""

    TITLE = "asking"
    # tokens scored by each window after a text's first, the rest is context; -1 = all
    stride: int = flag(-1, WINDOWS)
    chat: bool = flag(False, QUESTIONS)  # wrap the prompt in the chat template of the tokenizer
    # with {fields}, {{ for a brace (rl/prompts.py); empty: Question: {question}\nAnswer:, or with
    # --chat {question}
    prompt_template: str = flag("", QUESTIONS)
    shots: int = flag(0, QUESTIONS)  # answered questions before each one, never itself
    shots_file: str = flag("", SHOTS)  # .jsonl with these questions in its first lines
    # right answers; auto: number for answers that are numbers, else exact
    answers: Literal["auto", *RIGHT] = flag("auto", WRITING)
    max_new_tokens: int = flag(256, WRITING)  # longer answers are cut off, and wrong
    temperature: float = flag(0.0, WRITING)  # 0 always takes the likeliest token
    # an answer ends before any of these strings, but never in a thought; \n is a new line; none =
    # \nQuestion: , with --chat nothing
    stop: list[str] | None = flag(None, WRITING)
    seed: int = flag(0, WRITING, SAMPLING)  # another seed is another sample
    # a rank that waits longer for the others' answers ends the run
    rollout_timeout_s: int = flag(7200, WRITING)


@dataclass(kw_only=True)
class Config(LayoutConfig, TaskConfig):
    REFUSED = TRAINING
    # a run folder (its newest checkpoint), a checkpoints/step-N, or a Hugging Face folder
    checkpoint: str = "runs/llama3"
    # a .txt, or a .jsonl of texts or questions, told apart by their fields, see above
    task: str = ""
    out: str = ""  # new file for the results, .jsonl; empty: only a summary on the screen
    limit: int = 0  # only the first lines of the task, so many; 0 = all
    # tokens of a forward, at most; -1 = the model's max_seq_len, for texts the length of its
    # training
    seq_len: int = -1
    local_batch_size: int = 16  # sequences per forward of a data rank

    def __post_init__(self):
        check_range(self, 1, math.inf, "local_batch_size", "rollout_timeout_s", "max_new_tokens")
        check_range(self, 0, math.inf, "limit", "shots", "temperature")


def flags_of_group(cfg: Config, Group: type) -> Any:
    """A copy of the flags of one group. Later changes stay in the copy: cfg is what was typed."""
    return Group(**{field.name: getattr(cfg, field.name) for field in fields(Group)})


# ---------------------------------------------------------------- prompts
def prompts_of(asked: TaskConfig, text: Text, lines: list[Line], kind: str) -> list[str]:
    """The text before each answer: shots, then the line in --prompt_template; with --chat, all in
    one message. Raises ValueError."""
    template = unescape(asked.prompt_template)
    if not template and text.chat:
        template = "{question}"
    elif not template:
        template = BASE_PROMPT
    check_template(template, lines, "question")
    examples = []
    if asked.shots:
        examples = read_shots(asked.shots_file, asked.shots, kind)
    prompts = []
    for line in lines:
        prompt = ""
        for example in other_shots(examples, line, asked.shots):
            answer = answer_of_shot(example, kind)
            prompt += f"{fill_template(template, example)} {answer}\n\n"
        prompts.append(prompt + fill_template(template, line))
    if text.chat:
        return [text.chat(prompt) for prompt in prompts]
    return prompts


def strings_of(asked: TaskConfig) -> list[str]:
    """The texts that end an answer. A base model goes on with the next question of the prompt's
    form; a chat model ends by itself, and may well repeat its question."""
    given = asked.stop
    if given is None and asked.chat:
        given = []
    elif given is None:
        given = ["\\nQuestion:"]
    return [unescape(string) for string in given if string]


# ---------------------------------------------------------------- the model
def read_checkpoint(folder: str, chat=None) -> tuple[Text, type, object, str]:
    """(tokenizer, model class, model config, folder of the weights) of a run, step or Hugging Face
    folder; for a run the folder of its newest step. chat: from open_chat(). Reads only small files.
    Raises ValueError."""
    if is_hf_folder(folder):
        config = read_hf_config(folder)
        if mtp_depth_of(config):
            config = replace(config, mtp_depth=0)  # a second prediction is for training only
        return Text(folder, chat=chat), class_of(config), config, folder
    folder = newest_readable(folder)
    if has_adapters(folder):
        base_of(folder)  # raises if the frozen weights are gone
    return Text(folder, chat=chat), *saved_model(folder), folder


def longest_forward(cfg: Config, kind: str, model_config: Any, folder: str) -> int:
    """The most tokens of a forward. folder: of the weights."""
    if cfg.seq_len != -1:
        return cfg.seq_len
    longest = model_config.max_seq_len
    if kind == "text" and not is_hf_folder(folder):
        return min(longest, read_json(folder, "config.json").get("seq_len", longest))
    return longest


def window_stride(asked: TaskConfig, longest: int) -> int:
    if asked.stride == -1:
        return longest
    return asked.stride


def check_task_flags(
    cfg: Config, model_config: Any, asked: TaskConfig, kind: str, longest: int
) -> None:
    """Refuse flags that do not fit this task or this model. asked: returns to its defaults where
    --config gives a flag without effect."""
    check_local(cfg.out, "--out")
    place = os.path.dirname(cfg.out) or "."
    most = model_config.max_seq_len
    writes = TASKS[kind].writes
    given = []
    for name, value in given_flags(cfg).items():
        if name in TRAINING:
            given.append(spell_flag(name, value))
    rows = []
    for text in no_effect(asked, SimpleNamespace(**vars(asked), kind=kind, writes=writes)):
        rows.append((True, text))
    rows += [
        (
            cfg.out and os.path.lexists(cfg.out),
            f"--out {cfg.out} is there already: give a new file, or remove it",
        ),
        (cfg.out and not os.path.isdir(place), f"--out {cfg.out}: {place} is no folder"),
        (
            not 1 <= longest <= most,
            f"--seq_len {cfg.seq_len} must be between 1 and the model's max_seq_len {most}, or -1",
        ),
        (
            not 1 <= window_stride(asked, longest) <= longest,
            f"--stride {asked.stride} must be between 1 and --seq_len {longest}",
        ),
        (
            writes and asked.max_new_tokens >= longest,
            f"--max_new_tokens {asked.max_new_tokens} leaves no room for a prompt in the "
            f"{longest} tokens of --seq_len; lower it",
        ),
        (
            writes and cfg.pp * cfg.cp > 1,
            "--pp and --cp do not help to write answers; use --dp_shard or --tp",
        ),
        (
            writes and cfg.tp > 1 and hasattr(model_config, "kv_lora_rank"),
            f"--tp {cfg.tp}: writing with DeepSeek caches latents, which tp does not split; "
            "use --dp_shard",
        ),
        (given, f"{', '.join(given)}: nothing is trained here; leave it out"),
    ]
    refuse(rows)


def layout_flags(cfg: Config) -> LayoutConfig:
    """The flags of the layout, as inference needs them."""
    dtype = cfg.compute_dtype
    if dtype == "auto":
        dtype = "float32"
        if runs_on_cuda(cfg.device):
            dtype = "bfloat16"
    flags = flags_of_group(cfg, LayoutConfig)
    # without an optimizer, nothing needs more digits than the matmuls
    flags = replace(flags, compute_dtype=dtype, param_dtype=dtype)
    if flags.pp > 1:
        flags = replace(flags, pp_schedule="GPipe")  # works with any number of micro-batches
    return flags


def layout_of(flags: LayoutConfig, model_config: Any, longest: int, rows: int) -> Layout:
    """The Layout of forwards of `rows` sequences. Raises ValueError with every violation."""
    step = max(pieces(flags), 1)  # a forward's tokens are padded to a multiple
    return check_layout(
        flags,
        model_config,
        seq_len=max(longest // step, 1) * step,
        local_batch_size=rows,
        global_batch_size=-1,
        device=flags.device,
    )


def open_model(
    folder: str, layout: Layout, flags: LayoutConfig, Model: type, model_config: Any
) -> list[nn.Module]:
    """This rank's stages (one stage without --pp) with the weights of a run, step or Hugging Face
    folder, ready for score() and complete(). Raises the same ValueError on all ranks."""
    with torch.device("meta"):
        model = Model(model_config)
    # not check_model, because check_model counts gradients
    check_tp_plan(model, parallel.TP_STYLES)
    stages = [model]
    if flags.pp > 1:
        stages = pipeline_stages(model, layout, flags)
    for stage in stages:
        split_model(stage, layout, flags)
        parallel.shard(stage, layout, flags)
        parallel.init_weights(stage, layout, 0, skip=lambda fqn: True)
    load_weights(stages, folder)
    return [stage.eval() for stage in stages]


# ---------------------------------------------------------------- requests
def cut_requests(requests: list[tuple], room: int, vocab_size: int) -> tuple[list[tuple], int]:
    """(requests of at most `room` tokens, the number of those whose context has lost its
    beginning). Raises ValueError for a continuation that leaves no room for a context, and for ids
    outside of the model's vocabulary."""
    for context, continuation in requests:
        if len(continuation) >= room:
            raise ValueError(
                f"{len(continuation):,} tokens are to be scored as a whole, but there is room for "
                f"{room - 1:,}"
            )
        last = max(context + continuation)
        if last >= vocab_size:
            raise ValueError(
                f"token id {last} in a text, but the model's vocab_size is {vocab_size}: wrong "
                "tokenizer?"
            )
    cut = []
    n_shorter = 0
    for context, continuation in requests:
        kept = context[len(continuation) - room :]
        n_shorter += len(kept) < len(context)
        cut.append((kept, continuation))
    return cut, n_shorter


def check_finite(logprobs: list[float]) -> None:
    n = len(logprobs) - sum(map(math.isfinite, logprobs))
    if n:
        raise ValueError(
            f"{n:,} of {len(logprobs):,} log-probabilities are no numbers: the model has "
            "diverged, or is damaged"
        )


# ---------------------------------------------------------------- requests -> scores
def label_logprobs(
    h: Tensor,
    weight: Tensor,
    labels: Tensor,
    denom: Tensor | None = None,
    all_reduce: Callable = no_reduce,
    vocab_start: int = 0,
) -> Tensor:
    """The log-probability of each label (...) in fp32; 0 for labels IGNORE. h (..., D), weight
    (V/tp, D); vocab parallelism as in models.loss.linear_cross_entropy."""
    wanted = labels != IGNORE  # the head is a large part of a forward, so we leave out the contexts
    logprobs = h.new_zeros(labels.shape, dtype=torch.float32)
    logprobs[wanted], _ = token_logprobs(
        h[wanted], weight, labels[wanted], 1.0, all_reduce, vocab_start
    )
    return logprobs


def pack_requests(requests: list[tuple], layout: Layout) -> dict[str, Tensor]:
    """The model's arguments, (B, T/cp) each. Label t is the token after input t. Padding is on the
    right, invisible to all tokens."""
    rows = []
    for context, continuation in requests:
        ids = context + continuation
        labels = [IGNORE] * (len(context) - 1) + continuation
        row = dict(
            tokens=torch.tensor(ids[:-1]),
            labels=torch.tensor(labels),
            positions=torch.arange(len(labels)),
        )
        rows.append([row])
    T = max(len(row["tokens"]) for (row,) in rows)
    step = token_step(T, layout)
    T = -(-T // step) * step
    return lay_out(rows, T, layout, {"labels": IGNORE})


@torch.no_grad()
def score(stages: list[nn.Module], layout: Layout, requests: list[tuple]) -> list[float]:
    """The log-probability in nats of the continuation of each request, on every rank. Raises
    ValueError on every rank for a log-probability of nan or inf."""
    if layout.tp == 1:
        by_label = label_logprobs
    else:
        by_label = partial(
            parallel.vocab_parallel_loss, mesh=layout.mesh["tp"], loss=label_logprobs
        )
    for stage in stages:  # a forward with labels now returns their log-probabilities
        stage.token_loss = by_label
    sums = torch.zeros(len(requests), dtype=torch.float64, device=layout.device)
    size = layout.local_batch_size
    lengths = [len(context) + len(continuation) for context, continuation in requests]
    shares = in_rows(lengths, size, layout.data_ranks)
    with Progress("scored", len(requests), "requests") as progress:
        for first, own in zip(shares[0], shares[layout.data_rank]):
            indices = [*chain(*own)]
            # All data ranks run as many rows as the first, which has the most, because the
            # collectives need all ranks.
            idle = row_number(len(first), size, layout) - len(indices)
            kwargs = pack_requests([requests[i] for i in indices] + [NOTHING] * idle, layout)
            logprobs = parallel.run_forwards(stages, kwargs, layout)
            # all tp ranks have the same numbers, cp ranks a part each
            if logprobs and indices and layout.coordinate("tp") == 0:
                sums[indices] = torch.cat(logprobs).sum(1, dtype=torch.float64)[: len(indices)]
            progress(size * layout.data_ranks)
    dist.all_reduce(sums)
    check_finite(sums.tolist())
    return sums.tolist()


# ---------------------------------------------------------------- prompts -> texts
@torch.no_grad()
def complete(
    model: nn.Module, layout: Layout, asked: TaskConfig, text: Text, prompts: list[list[int]]
) -> list[Sample]:
    """The model's answer to each prompt, on every rank. An answer ends before its first --stop
    string after its thoughts, or with an id of text.ends, or is truncated. Raises ValueError on
    every rank if the model gives no probabilities."""
    stop = strings_of(asked)
    new = asked.max_new_tokens
    group = None
    if layout.world_size > 1:
        group = patient_group(dist.group.WORLD, asked.rollout_timeout_s)
    order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    indices = order[layout.data_rank :: layout.data_ranks]
    noise = draw_noise([f"{asked.seed}/{i}" for i in indices], 1, new)
    progress = Progress("answered", len(prompts), "prompts")
    rows = layout.local_batch_size
    tail = 8 + len("".join(stop).encode())  # ids that hold any string of stop

    def end_at_stop(s):
        # the last rows run on
        progress(max((s.index + 1 - rows) * layout.data_ranks - progress.done, 0))
        last = text.decode(s.ids[-tail:])  # each id is at least one byte of text
        if not any(string in last for string in stop):
            return []
        opened = opened_by(text, s.prompt)
        said = cut_at_stop(text.decode(s.ids), opened, stop)
        if said is None:
            return []
        return None

    tp_mesh = None
    if layout.tp > 1:
        tp_mesh = layout.mesh["tp"]
    with whole_weights(model), progress:
        samples = rollout(
            model,
            [prompts[i] for i in indices],
            noise,
            asked.temperature,
            text.ends,
            rows=rows,
            reply=end_at_stop,
            max_len=max(map(len, prompts)) + new,
            agree=lockstep(layout, asked.rollout_timeout_s),
            tp_mesh=tp_mesh,
        )
    for i, s in zip(indices, samples):
        s.index = i
        s.opened = opened_by(text, prompts[i])
        s.text = text.decode(s.ids)
        said = cut_at_stop(s.text, s.opened, stop)
        if said is not None:
            s.text = said
    everyone = gather_samples(samples, layout, group)
    check_finite([*chain(*(s.logprobs for s in everyone))])
    return sorted(everyone, key=lambda s: s.index)


def cut_at_stop(text: str, opened: bool, stop: list[str]) -> str | None:
    """The text before its first stop string after the thoughts; None without such a string."""
    begin = answer_begins(text, opened)
    if begin is None:
        return None
    places = [text.find(string, begin) for string in stop]
    found = [place for place in places if place >= 0]
    if found:
        return text[: min(found)]
    return None


# ---------------------------------------------------------------- kinds of tasks
def cut_texts(asked: TaskConfig, text: Text, lines: list[Line], longest: int) -> list[list[tuple]]:
    """For each text its windows."""
    stride = window_stride(asked, longest)
    groups = []
    for line in lines:
        ids = text.ids(line.fields["text"])
        groups.append(rolling_windows(ids, text.first, longest, stride))
    return groups


def ask_choices(
    asked: TaskConfig, text: Text, lines: list[Line], longest: int
) -> list[list[tuple]]:
    """For each question its choices, each after the prompt."""
    space = " "
    if text.chat:
        space = ""
    groups = []
    for line, prompt in zip(lines, prompts_of(asked, text, lines, "choice")):
        group = []
        for choice in line.fields["choices"]:
            group.append(encode_pair(text, prompt, space + choice))
        groups.append(group)
    return groups


def ask_questions(
    asked: TaskConfig, text: Text, lines: list[Line], longest: int
) -> list[list[tuple]]:
    """For each question its prompt alone, without a continuation."""
    groups = []
    for prompt in prompts_of(asked, text, lines, "answer"):
        ids = opening_ids(text, prompt) or [text.first]
        groups.append([(ids, [])])
    return groups


class Task(NamedTuple):
    """A kind of task."""

    # (asked, text, lines, longest) -> for each line its requests
    make_requests: Callable
    # see rl/measures.py
    measure: Callable
    # a result is a text that the model writes after the context; else the score of the continuation
    writes: bool = False


# A new kind of task is a row here, a measure in rl/measures.py, and a row in KINDS of
# rl/questions.py, which tells the kind by the fields of a line: the first row that fits. There,
# check_line and answer_of_shot must know the new fields. ask_questions names the kind "answer" for
# --shots, and --answers would be ignored by a measure that does not read it.
TASKS = {
    "text": Task(cut_texts, perplexity),
    "choice": Task(ask_choices, multiple_choice),
    "answer": Task(ask_questions, exact_match, writes=True),
}


# ---------------------------------------------------------------- the program
def main(cfg: Config) -> None:
    # 1. task, model and layout: all errors in files and flags are found before anything is built
    began = time.time()
    kind, lines = read_task(cfg.task, answers=cfg.answers)
    task = TASKS[kind]
    lines = lines[: cfg.limit or None]
    counted = f"{len(lines):,} lines"
    if len(lines) == 1:
        counted = "1 line"
    text, Model, model_config, folder = read_checkpoint(
        cfg.checkpoint, open_chat(cfg.checkpoint, cfg)
    )
    asked = flags_of_group(cfg, TaskConfig)
    longest = longest_forward(cfg, kind, model_config, folder)
    check_task_flags(cfg, model_config, asked, kind, longest)
    if cfg.out and own_rank() == 0:
        check_writable(cfg.out, "--out")
    flags = layout_flags(cfg)
    layout = layout_of(flags, model_config, longest, cfg.local_batch_size)

    # 2. requests to the model
    groups = task.make_requests(asked, text, lines, longest)
    requests = [*chain(*groups)]
    room = longest + 1  # the last token needs no forward
    if task.writes:
        room = longest - asked.max_new_tokens
    if not requests:
        raise ValueError(f"--task {cfg.task}: its texts are empty")
    requests, n_cut = cut_requests(requests, room, model_config.vocab_size)

    # 3. scores or answers of the model
    layout = make_mesh(connect(layout, flags, flags.device))
    set_timeouts(layout, flags.init_timeout_s)
    stages = open_model(cfg.checkpoint, layout, flags, Model, model_config)
    if layout.rank == 0:
        print(
            f"{cfg.task}: {counted}, up to {longest:,} tokens at once | {folder} | "
            f"{layout} on {layout.device.type}, {str(layout.compute_dtype)[6:]}",
            flush=True,
        )
        if kind == "text" and cfg.seq_len == -1 and is_hf_folder(folder):
            print(
                f"windows of {longest:,} tokens, the most that config.json allows; a run of ours is "
                "scored in windows of its own --seq_len: give the same --seq_len to compare them"
            )
        if n_cut:
            print(
                f"{n_cut:,} of {len(requests):,} prompts do not fit into {longest:,} tokens: they "
                "lose their beginnings"
            )
    if task.writes:
        found = complete(stages[0], layout, asked, text, [prompt for prompt, _ in requests])
    else:
        found = score(stages, layout, requests)

    # 4. the report
    if layout.rank == 0:
        results = iter(found)
        of_lines = [[next(results) for _ in group] for group in groups]
        report = task.measure(lines, groups, of_lines, asked.answers)
        for note in report.notes:
            print(note)
        summary = dict(task=cfg.task, kind=kind, checkpoint=folder, n=len(lines))
        summary |= report.metrics
        summary |= dict(
            cut=n_cut,
            seq_len=longest,
            layout=str(layout),
            dtype=flags.compute_dtype,
            seconds=round(time.time() - began, 1),
        )
        counted += f", {summary['seconds']} s"
        print(f"{in_words(report.metrics)}   ({counted})", flush=True)
        if cfg.out:
            try:
                write_results(cfg.out, report.items, summary)
            except OSError as error:
                raise ValueError(
                    f"--out {cfg.out} could not be written: {error.strerror}; the results above "
                    "are all that is left"
                ) from None
            print(f"--out {cfg.out}: {len(report.items):,} lines and the summary")


def write_results(path: str, items: list[dict], summary: dict) -> None:
    """--out: a JSON object per line of the task, and the summary."""
    found = [dict(index=i) | item for i, item in enumerate(items)]
    found.append(dict(summary=summary))
    lines = [json.dumps(line, ensure_ascii=False) + "\n" for line in found]
    write_file(path, "".join(lines).encode())


def in_words(metrics: dict) -> str:
    """The metrics in one line, each followed by its standard error."""
    words = []
    for name, x in metrics.items():
        if x is None:
            continue
        shown = f"{x:,}"
        if isinstance(x, float):
            shown = f"{x:.4f}"
        if name.endswith("_stderr"):
            words.append(f"+- {shown}")
        else:
            words.append(f"  {name} {shown}")
    return " ".join(words).strip()


if __name__ == "__main__":
    run(main, Config)
