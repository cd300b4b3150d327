"""The engines of grpo.py: who samples a step's prompts.

    engine.submit(cursor)     # the next prompts, for the policy as it is now
    batch = engine.collect()  # {"samples": [...], "cursor": where the next prompts begin, "version": of the policy, ...}
    samples = engine.evaluate(tasks, group_size, temperature)  # of these (name, prompt), with rewards, by the policy of now
    engine.close()            # when the run ends: every submit() has had its collect()

The training loop makes no other calls. InPlace, in rl/rollouts.py, samples on the trainer's ranks, with the weights that are
there; Generators, in rl/generators.py, sends the weights to ranks that only sample; HTTPEngine, in rl/http_engine.py, to a
server.
"""
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
    return Generators(trainer, in_place, open_bridge(cfg, n_trainers)[1] if layout.rank == 0 else None)


def next_batch(engine, batch: dict | None, cursor: int):
    """Yields the batch that was sampled ahead, or one that is sampled now."""
    if batch is None:
        engine.submit(cursor)
        batch = engine.collect()
    yield batch
