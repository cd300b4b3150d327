"""The engines of grpo.py: who samples a step's prompts.

    engine.submit(cursor)     # the prompts from cursor on, None: behind those of the batch before, for the policy as it is now
    batch = engine.collect()  # the oldest: {"samples": [...], "cursor": where the next prompts begin, "version": of the policy}
    samples = engine.evaluate(tasks, group_size, temperature)  # of these (name, prompt), with rewards, by the policy of now
    engine.close()            # when the run ends: every submit() has had its collect()

The training loop makes no other calls. InPlace, in rl/rollouts.py, samples on the trainer's ranks, with the weights that are
there; Generators, in rl/generators.py, sends the weights to ranks that only sample; HTTPEngine, in rl/http_engine.py, to a
server.
"""
from collections import deque

from rl.generators import Generators, open_bridge
from rl.http_engine import HTTPEngine
from rl.rollouts import InPlace


def open_engine(trainer, env, text, n_trainers: int):
    """The engine that the flags ask for, on a trainer's rank."""
    cfg, layout = trainer.cfg, trainer.layout
    if cfg.engine:
        return HTTPEngine(trainer, env, text)
    in_place = InPlace(trainer, cfg, env, text, layout)
    if not cfg.gen_ranks:
        return in_place
    return Generators(trainer, in_place, open_bridge(cfg, n_trainers, layout.device) if layout.rank == 0 else None)


class Ahead:
    """The batches of the next steps: those that are there, the oldest first, and those that the engine is at work on."""

    def __init__(self, engine, ready: list[dict], cursor: int):
        """ready: what a checkpoint had. cursor: where the prompts begin that nobody has been asked for."""
        self.engine, self.ready, self.running = engine, deque(ready), 0
        self.cursor = ready[-1]["cursor"] if ready else cursor

    def submit(self):
        self.engine.submit(self.cursor)
        self.cursor, self.running = None, self.running + 1  # from now on the engine knows where its batch before ended

    def fill(self, n: int):
        """Have n batches sampled ahead, by the policy of now."""
        while len(self.ready) + self.running < n:
            self.submit()

    def take(self):
        """Yields the batch of this step, which is sampled now if none was ahead."""
        self.fill(1)
        if not self.ready:
            self.collect(1)
        yield self.ready.popleft()

    def collect(self, n: int):
        for _ in range(n):
            self.ready.append(self.engine.collect())
            self.running -= 1

    def all(self) -> list[dict]:
        """Every batch that is ahead, once it is there: what a checkpoint keeps."""
        self.collect(self.running)
        return list(self.ready)

    def close(self):
        self.all()  # a generator goes only when its samples are fetched
        self.engine.close()


def staleness(batch: dict, policy_version: int, cfg) -> dict:
    """By how many policy versions the tokens of a batch are behind; the mean too, where they differ. Raises RuntimeError."""
    ages = [policy_version - v for s in batch["samples"] for v in s.get("versions", [batch["version"]])]
    if max(ages) > cfg.async_steps * cfg.minibatches:
        raise RuntimeError(f"the samples are {max(ages)} policy versions old, more than --async_steps {cfg.async_steps} x "
                           f"--minibatches {cfg.minibatches}: the engine has mixed up its batches")
    mean = {"staleness_mean": sum(ages) / len(ages)} if min(ages) < max(ages) else {}
    return {"staleness": max(ages)} | mean
