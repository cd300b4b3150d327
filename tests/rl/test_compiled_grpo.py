"""grpo.py --compile: blocks are compiled once for training; rollouts of the same model run
uncompiled blocks."""

import random
import shutil
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from layouts import without_inductor
from policy import MODEL, OTHERS, assert_close, gradients, samples_of, sharp_model, trainer_of
from pool import pool
from torch._dynamo.utils import counters

from rl import agreement, rollouts
from rl.decoding import RowCache, next_logits, read_prompts, rollout
from rl.replay import compiled_blocks

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


PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9]]


def logits_of_a_token(model, cache, n_rows):
    """The logits (R, V) of a token of the first n_rows rows; again gives the same, because what is
    written to the cache is the same."""
    tokens = torch.arange(n_rows)[:, None] + 1
    at = torch.tensor([[len(prompt)] for prompt in PROMPTS[:n_rows]])
    rows = torch.arange(n_rows)
    return next_logits(model, cache, tokens, at, torch.zeros_like(rows), [8] * n_rows, None, rows)


@torch.no_grad()
@pytest.mark.parametrize("model", CONFIGS)
@pytest.mark.parametrize("inductor", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_token_of_compiled_blocks_has_the_same_logits(inductor, model):
    """As in a CUDA graph: the blocks share one compilation, a third number of rows compiles no
    more, and the model is as before afterwards."""
    if inductor and not shutil.which("g++"):
        pytest.skip("needs g++")
    model = sharp_model(CONFIGS[model])
    cache = RowCache(len(PROMPTS), 16)
    with rollouts.whole_weights(model):
        read_prompts(model, cache, PROMPTS, torch.arange(len(PROMPTS)), 3, 1)
        want = {n: logits_of_a_token(model, cache, n).log_softmax(-1) for n in (4, 3, 2)}
        torch._dynamo.reset()
        counters.clear()
        graphs = []
        with nullcontext() if inductor else without_inductor(), compiled_blocks(model):
            for n, logits in want.items():
                found = logits_of_a_token(model, cache, n).log_softmax(-1)
                torch.testing.assert_close(found, logits, atol=1e-6, rtol=1e-6)
                graphs.append(counters["stats"]["unique_graphs"])
        assert 0 < graphs[0] and graphs[1] == graphs[2]
        logits_of_a_token(model, cache, 4)
        assert counters["stats"]["unique_graphs"] == graphs[2]
    for module in model.modules():
        assert "forward" not in vars(module)


def test_on_a_cpu_a_rollout_compiles_nothing():
    """Also where no caller has forbidden it, as whole_weights() does."""
    model = sharp_model(CONFIGS["llama3"])
    noise = torch.full((len(PROMPTS), 1, 4), 0.5)
    torch._dynamo.reset()
    counters.clear()
    drawn = []
    for compiled in (False, True):
        samples = rollout(model, PROMPTS, noise, 1.0, [], max_len=12, compiled=compiled)
        drawn.append([sample.ids for sample in samples])
    assert drawn[0] == drawn[1]
    assert counters["stats"]["unique_graphs"] == 0
