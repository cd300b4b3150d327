"""Sends the numbers of metrics.jsonl to TensorBoard and to Weights & Biases. Only runs with
--tensorboard or --wandb load this file."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from distributed.agree import reason


class Board(NamedTuple):
    name: str
    write: Callable  # write(step, line)
    close: Callable


def write_boards(boards: list[Board], step: int, line: dict) -> list[Board]:
    """The boards that took the numbers of a step. A board is a copy of metrics.jsonl: no full disk and
    no server that is away may end the run."""
    working = []
    for board in boards:
        try:
            board.write(step, line)
            working.append(board)
        except Exception as error:  # each package has errors of its own
            turn_off(board.name, step, error)
    return working


def close_boards(boards: list[Board], step: int) -> None:
    for board in boards:  # unwritten numbers would be lost with the process
        try:
            board.close()
        except Exception as error:
            turn_off(board.name, step, error)


def turn_off(name: str, step: int, error: Exception) -> None:
    print(
        f"step {step}: --{name} failed and is off from here on ({reason(error)}); metrics.jsonl "
        "has all numbers",
        flush=True,
    )


def open_boards(out: str, cfg: Any, first_step: int) -> list[Board]:
    """The boards of a run that begins with step first_step. cfg: its flags, which W&B shows."""
    boards = []
    if cfg.tensorboard:
        try:
            boards.append(open_tensorboard(out, first_step))
        except OSError as error:
            turn_off("tensorboard", first_step, error)
    if cfg.wandb:
        boards.append(open_wandb(out, cfg, first_step))
    return boards


def open_tensorboard(out: str, first_step: int) -> Board:
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(os.path.join(out, "tb"), purge_step=first_step)

    def write(step, line):
        for name, number in line.items():
            board.add_scalar(name, number, step)

    return Board("tensorboard", write, board.close)


def open_wandb(out: str, cfg: Any, first_step: int) -> Board:
    import wandb

    known = Path(out, "wandb_id")  # a continued run continues its curves
    if first_step == 1 or not known.exists():
        known.write_text(uuid.uuid4().hex)
    project = wandb.init(
        project=cfg.wandb,
        id=known.read_text(),
        name=out,
        dir=out,
        resume="allow",
        config=vars(cfg),
    )

    def write(step, line):
        project.log(line, step=step)

    return Board("wandb", write, project.finish)
