"""Questions with choices, scored in training at each validation, on the weights as they are then: a
benchmark's learning curve. docs/fork_me.md has the lines for a recipe. (For the loss on a text
there is --val_data.)"""

from functools import partial
from itertools import chain
from types import SimpleNamespace

from torch import nn

import evaluate
from corpus.special import ids_of
from corpus.tokenizer import load_tokenizer


def open_eval_task(cfg, model_config, data) -> tuple[list, list]:
    """(lines, requests of each line) of the file cfg.eval_task, as `evaluate.py --task` makes them.
    Raises ValueError."""
    kind, lines = evaluate.read_task(cfg.eval_task, "--eval_task")
    if kind != "choice":
        raise ValueError(
            f"--eval_task {cfg.eval_task}: need questions with choices; for the loss on a text "
            "use --val_data"
        )
    if cfg.tp > 1 and not cfg.loss_parallel:
        raise ValueError(
            f"--eval_task under --tp {cfg.tp} scores with a split head: leave out "
            "--no-loss_parallel"
        )
    tokenizer = load_tokenizer(data.tokenizer_file)
    ids = partial(ids_of, tokenizer)
    text = SimpleNamespace(ids=ids, chat=None, bos=False, first=data.eot)
    groups = evaluate.ask_choices(evaluate.TaskConfig(), text, lines, 0)
    if evaluate.cut_requests(
        [*chain(*groups)], model_config.max_seq_len + 1, model_config.vocab_size
    )[1]:
        raise ValueError(
            f"--eval_task {cfg.eval_task}: some questions have more than "
            f"{model_config.max_seq_len:,} tokens"
        )
    return lines, groups


def log_eval_task(step: int, metrics, stages, layout, lines: list, groups: list) -> None:
    """Score the task on all ranks; print eval_acc, and write to metrics.jsonl eval_acc,
    eval_acc_norm and eval_acc_bytes with standard errors. Call it before parallel.evaluate, which
    frees the gathered weights."""
    usual = [stage.token_loss for stage in stages]
    nn.ModuleList(stages).eval()
    scores = iter(evaluate.score(stages, layout, [*chain(*groups)]))
    for stage, token_loss in zip(stages, usual, strict=True):
        stage.train().token_loss = token_loss
    grouped = [[next(scores) for _ in group] for group in groups]
    found = evaluate.multiple_choice(lines, groups, grouped, "auto").metrics
    if layout.rank == 0:
        metrics.write({"step": step} | {f"eval_{name}": value for name, value in found.items()})
        print(
            f"step {step}/{metrics.steps} eval_acc {found['acc']:.4f} ({len(lines):,} questions)",
            flush=True,
        )
