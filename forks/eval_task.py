"""Score a task of evaluate.py in training, at each validation, on the weights as they are then: learning curves of a benchmark.
docs/fork_me.md has the lines for a recipe."""
from itertools import chain
from types import SimpleNamespace
from typing import NamedTuple

from torch import nn

import evaluate
from corpus.tokenizer import encoding_of, load_tokenizer


class Task(NamedTuple):
    kind: str  # text or choice, see evaluate.read_task
    lines: list[evaluate.Line]
    groups: list[list[tuple]]  # of each line its requests (context, continuation), as ids


def open_task(cfg, model_config, data) -> Task:
    """The requests of cfg.eval_task, as `evaluate.py --task` makes them of a checkpoint of this run. Raises ValueError."""
    kind, lines = evaluate.read_task(cfg.eval_task, "--eval_task")
    if kind == "answer":
        raise ValueError(f"--eval_task {cfg.eval_task} asks for written answers: use evaluate.py on a checkpoint")
    if cfg.tp > 1 and not cfg.loss_parallel:
        raise ValueError("--eval_task under --tp needs the loss to be split as well: leave --no-loss_parallel out")
    tokenizer = load_tokenizer(data.tokenizer_file)
    ids = lambda string, bos=False: encoding_of(tokenizer, string, bos).ids  # noqa: E731
    text = SimpleNamespace(ids=ids, chat=None, bos=False, first=data.eot)
    longest = cfg.seq_len if kind == "text" else model_config.max_seq_len
    groups = evaluate.requests_of(evaluate.Config(task=cfg.eval_task), kind, text, lines, longest)
    sizes = [len(group) for group in groups]
    requests, n_cut = evaluate.cut_requests([*chain(*groups)], longest + 1, model_config.vocab_size)
    if n_cut:
        raise ValueError(f"--eval_task {cfg.eval_task}: {n_cut:,} prompts have more than {longest:,} tokens")
    requests = iter(requests)
    return Task(kind, lines, [[next(requests) for _ in range(size)] for size in sizes])


def log_task(step: int, metrics, stages, layout, task: Task) -> None:
    """Score the task on all ranks, print the result, and write it to metrics.jsonl: eval_loss, or eval_acc with eval_acc_norm
    and eval_acc_bytes, each with its standard error. Call it before parallel.evaluate, which frees the gathered weights."""
    usual = [stage.token_loss for stage in stages]
    nn.ModuleList(stages).eval()
    scores = iter(evaluate.score(stages, layout, [*chain(*task.groups)]))
    for stage, token_loss in zip(stages, usual, strict=True):
        stage.train().token_loss = token_loss
    scores = [[next(scores) for _ in group] for group in task.groups]
    choice = task.kind == "choice"
    found = evaluate.multiple_choice(task.lines, scores) if choice else evaluate.perplexity(task.lines, task.groups, scores)
    if layout.rank == 0:
        metrics.write({"step": step} | {f"eval_{name}": value for name, value in found[1].items()})
        name, value = ("acc", found[1]["acc"]) if choice else ("loss", found[1]["loss"])
        print(f"step {step}/{metrics.steps} eval_{name} {value:.4f}", flush=True)
