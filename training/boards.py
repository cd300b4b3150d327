"""Sends the numbers of metrics.jsonl to TensorBoard and to Weights & Biases. Only runs with
--tensorboard or --wandb load this file."""

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple


class Board(NamedTuple):
    write: Callable  # write(step, line)
    close: Callable


def open_boards(out: str, cfg: Any, first_step: int) -> list[Board]:
    """The boards of a run that begins with step first_step. cfg: its flags, which W&B shows."""
    boards = []
    if cfg.tensorboard:
        boards.append(open_tensorboard(out, first_step))
    if cfg.wandb:
        boards.append(open_wandb(out, cfg, first_step))
    return boards


def open_tensorboard(out: str, first_step: int) -> Board:
    from torch.utils.tensorboard import SummaryWriter

    board = SummaryWriter(os.path.join(out, "tb"), purge_step=first_step)

    def write(step, line):
        for name, number in line.items():
            board.add_scalar(name, number, step)

    return Board(write, board.close)


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

    return Board(write, project.finish)
