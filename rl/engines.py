"""The engines of grpo.py: an engine samples the prompts of a step.

    engine.submit(cursor)     # start a batch with the current policy; prompts from cursor on, None: after the previous batch
    batch = engine.collect()  # the oldest batch: {"samples": [...], "cursor": of the next prompts, "version": of the policy}
    samples = engine.evaluate(tasks, group_size, temperature)  # of (name, prompt) pairs, with rewards, by the current policy
    engine.close()            # at the end of the run, after a collect() for every submit()

The training loop makes no other calls. InPlace (rl/rollouts.py) samples on the trainer's ranks with the trainer's weights;
Generators (rl/generators.py) sends the weights to ranks for sampling only, HTTPEngine (rl/http_engine.py) to a server.
"""
from collections import deque

from rl.generators import Generators, open_bridge
from rl.http_engine import HTTPEngine
from rl.rollouts import InPlace


def open_engine(trainer, env, text, n_trainers: int):
    """The engine for these flags, on a trainer's rank."""
    cfg, layout = trainer.cfg, trainer.layout
    if cfg.engine:
        return HTTPEngine(trainer, env, text)
    in_place = InPlace(trainer, cfg, env, text, layout)
    if not cfg.gen_ranks:
        return in_place
    return Generators(trainer, in_place, open_bridge(cfg, n_trainers, layout.device) if layout.rank == 0 else None)


class Ahead:
    """The batches of the next steps: ready ones, the oldest first, and those in flight."""

    def __init__(self, engine, ready: list[dict], cursor: int):
        """ready: batches of a checkpoint. cursor: number of the first prompt without a batch."""
        self.engine, self.ready, self.running = engine, deque(ready), 0
        self.cursor = ready[-1]["cursor"] if ready else cursor

    def submit(self):
        self.engine.submit(self.cursor)
        self.cursor, self.running = None, self.running + 1  # None: the engine knows the end of the previous batch

    def fill(self, n: int):
        """Submit until n batches are ready or in flight, sampled by the current policy."""
        while len(self.ready) + self.running < n:
            self.submit()

    def take(self):
        """Yield the batch of this step; sample a batch now if none was submitted before."""
        self.fill(1)
        if not self.ready:
            self.collect(1)
        yield self.ready.popleft()

    def collect(self, n: int):
        for _ in range(n):
            self.ready.append(self.engine.collect())
            self.running -= 1

    def all(self) -> list[dict]:
        """Wait for all batches in flight; a checkpoint saves them."""
        self.collect(self.running)
        return list(self.ready)

    def close(self):
        self.all()  # a generator ends only after its samples were fetched
        self.engine.close()


def staleness(batch: dict, policy_version: int, cfg) -> dict:
    """Age of the tokens of a batch in policy versions: the largest, and the mean if ages differ. Raises RuntimeError."""
    ages = [policy_version - v for s in batch["samples"] for v in s.get("versions", [batch["version"]])]
    if max(ages) > cfg.async_steps * cfg.minibatches:
        raise RuntimeError(f"the samples are {max(ages)} policy versions old, more than --async_steps {cfg.async_steps} x "
                           f"--minibatches {cfg.minibatches}: the engine has mixed up its batches")
    mean = {"staleness_mean": sum(ages) / len(ages)} if min(ages) < max(ages) else {}
    return {"staleness": max(ages)} | mean
