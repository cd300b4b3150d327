"""The supervised warm-up of grpo.py, for a model that begins with random weights."""

import time
from dataclasses import dataclass
from functools import partial
from typing import Any

from distributed.launch import StopSignal
from flags.config import flag
from flags.progress import Progress
from rl import messages
from rl.datasets import Text
from rl.environments import draw_task, supervised_sample
from rl.policy import NEW_MODEL


@dataclass(kw_only=True)
class WarmUpConfig:
    # steps of supervised warm-up on answers, at most, for a model without --init_from
    sft_steps: int = 200
    # the warm-up ends below this loss per token: most is left to learn
    sft_loss: float = flag(0.25, NEW_MODEL)
    sft_lr: float = flag(1e-3, NEW_MODEL)  # learning rate of the warm-up, whatever --lr is


def warm_up(trainer, env: Any, text: Text, stop: StopSignal) -> bool:
    """Train random weights on some answers: GRPO has no gradient until some samples earn a reward.
    Returns whether a signal has ended it."""
    cfg = trainer.cfg
    fits = partial(text.fits, seq_len=cfg.seq_len)
    is_rank_0 = trainer.layout.rank == 0
    said = time.monotonic()
    saves = stop.saves
    stop.saves = False
    losses = []
    with Progress("supervised warm-up", cfg.sft_steps, "steps") as progress:
        for step in range(cfg.sft_steps):
            samples = []
            for i in range(128 * step, 128 * (step + 1)):
                task = draw_task(env, f"sft/{cfg.seed}", i, fits)
                samples.append(supervised_sample(env, text, *task, cfg.reward_timeout_s))
            losses.append(trainer.train_supervised(samples))
            trainer.optim_step(cfg.sft_lr * min(1, (step + 1) / 10))
            if stop.agreed(trainer.layout):
                if is_rank_0:
                    progress.say("stopped in the supervised warm-up: the same command begins again")
                return True
            recent = losses[-4:]
            if sum(recent) / len(recent) < cfg.sft_loss:
                break
            progress()
            if is_rank_0 and time.monotonic() - said > 5:
                said = time.monotonic()
                progress.erase()
                messages.show_warm_up(cfg, losses)
    stop.saves = saves
    trainer.new_optimizer()
    trainer.policy_version = 0
    if is_rank_0:
        messages.show_end_of_warm_up(losses)
    return False
