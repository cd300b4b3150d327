"""The engines of grpo.py: who samples a step's prompts.

    engine.submit(cursor)     # the next prompts, for the policy as it is now
    batch = engine.collect()  # {"samples": [...], "cursor": where the next prompts begin, "version": of the policy, ...}
    engine.close()            # when the run ends: every submit() has had its collect()

The training loop makes no other calls, so an engine that asks a server over HTTP would fit as well (docs/grpo.md). InPlace, in
rl/rollouts.py, samples on the trainer's ranks, with the weights that are there; Generators, in rl/generators.py, sends the
weights to ranks that only sample.
"""
from rl.generators import Generators, open_bridge
from rl.rollouts import InPlace


def open_engine(trainer, env, text, n_trainers: int):
    """The engine that --gen_ranks asks for, on a trainer's rank."""
    cfg, layout = trainer.cfg, trainer.layout
    if not cfg.gen_ranks:
        return InPlace(trainer, cfg, env, text, layout)
    return Generators(trainer, open_bridge(cfg, n_trainers)[1] if layout.rank == 0 else None)


def next_batch(engine, batch: dict | None, cursor: int):
    """Yields the batch that was sampled ahead, or one that is sampled now."""
    if batch is None:
        engine.submit(cursor)
        batch = engine.collect()
    yield batch
