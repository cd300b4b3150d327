"""grpo.py --compile: blocks are compiled once for training; rollouts of the same model run
uncompiled blocks."""

import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from layouts import without_inductor
from policy import MODEL, OTHERS, assert_close, gradients, samples_of, sharp_model, trainer_of
from pool import pool
from torch._dynamo.utils import counters

from rl import agreement, rollouts

CONFIGS = {"llama3": MODEL, "qwen3": OTHERS["qwen3_moe"], "deepseek": OTHERS["deepseek"]}


def steps_of_samples(config) -> list[list[dict]]:
    """Of five steps: other numbers of samples, and other samples."""
    samples, rng = samples_of(sharp_model(config), n_prompts=9), random.Random(0)
    return [rng.sample(samples, n) for n in (27, 20, 15, 9, 26)]


def train(steps, flags: dict, model: str):
    """On this rank: (numbers, gradients) of each step; (graphs, graph breaks) so far after each
    step, and after rollouts and a further step; the ids of the rollouts."""
    config, found, graphs = CONFIGS[model], [], []
    torch._dynamo.reset()
    counters.clear()
    with without_inductor():
        trainer = trainer_of(config=config, **flags)
        for samples in steps:
            numbers = trainer.train_on([replace(s) for s in samples])
            found.append(
                (numbers, {fqn: g / trainer.denominator for fqn, g in gradients(trainer).items()})
            )
            trainer.optimizer.zero_grad()
            trainer.denominator = 0.0
            agreement.compare_samples(trainer, samples)
            graphs.append(
                (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))
            )
        mesh = trainer.layout.mesh["tp"] if trainer.layout.tp > 1 else None
        with rollouts.whole_weights(trainer.model):
            ids = [s.ids for s in samples_of(trainer.model, tp_mesh=mesh)]
        trainer.train_on(steps[0])
    graphs.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    if dist.get_world_size() > 1:
        dist.barrier()
    return found, graphs, ids


@pytest.mark.slow
@pytest.mark.parametrize(
    "n, flags, model",
    [
        (1, dict(ac="full"), "llama3"),
        (2, dict(tp=2), "llama3"),
        (2, dict(cp=2, loss="gspo"), "llama3"),
        (2, dict(ep=2, dp_shard=2), "qwen3"),
        (1, dict(), "deepseek"),
    ],
    ids=str,
)
def test_compiled_blocks_train_as_eager_ones_and_are_compiled_once(n, flags, model):
    config, flags = CONFIGS[model], flags | {"pack_tokens": 64}
    steps = steps_of_samples(config)
    found, none, ids = pool(n).run(train, steps, flags, model)[0]
    assert set(none) == {(0, 0)}
    for mine, graphs, sampled in pool(n).run(train, steps, flags | {"compile": True}, model):
        assert sampled == ids
        for (numbers, grads), (want, wanted) in zip(mine, found, strict=True):
            assert numbers.loss == pytest.approx(want.loss, abs=1e-5)
            assert numbers.entropy == pytest.approx(want.entropy, abs=1e-5)
            assert_close(grads, wanted, 1e-5)
        # all in the first step, and none in rollouts
        assert graphs[0][0] > 0 == graphs[0][1]
        assert set(graphs) == {graphs[0]}
