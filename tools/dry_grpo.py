"""grpo.py --dry_run: the memory of an update and of a rollout, before you rent machines.

As in dryrun.py the program's own code runs on tensors without memory: build_policy and Trainer, two forwards and backwards as
large as --local_batch_size or --pack_tokens says, AdamW; and in rollouts the gathered weights, the longest prompts read, and a
token drawn for each row with a full cache. The log-probabilities get a gradient of 1, and nothing is rewarded. Of the reference
only the weights are counted: its forward keeps nothing.
"""
import tempfile
from collections import Counter
from dataclasses import dataclass, replace

import torch

import parallel
from rl import packing
from rl.decoding import KEY_BUCKET, RowCache, draw, next_logits, read_prompts
from rl.rollouts import whole_weights
from tools.costs import totals
from tools.dryrun import DEVICES, DryWatch, dry_world, human, optimizer_state, size_of, table


@dataclass
class Phase:
    """Bytes of a device in one half of a step. held: beside the tensors made in it."""

    held: int
    made: int  # gradients and activations at the worst moment; or gathered weights, cache, and the logits of a token
    cache: int
    moved: dict  # see Watch

    @property
    def peak(self) -> int:
        return self.held + self.made


def observe_update(model, optimizer, watch, layout, cfg, held: int) -> Phase:
    """Two forwards and backwards of this rank and the optimizer's first step, which makes its state."""
    B, T = (1, cfg.pack_tokens) if cfg.pack_tokens else (cfg.local_batch_size, cfg.seq_len)
    shape, watch.moved = (B, -(-T // packing.pieces(layout)) * packing.pieces(layout) // layout.cp), Counter()
    watch.take_peak()  # from here on: the rollout's tensors are gone
    with watch:
        for i in range(2):
            parallel.next_backward(model, i == 1, layout)
            tokens = torch.zeros(shape, dtype=torch.long)
            logprobs, _ = model(tokens, labels=tokens, positions=torch.arange(shape[1]).expand_as(tokens))
            logprobs.sum().backward()
        before = watch.take_peak()
        parallel.clip_grad_norm([model], 1.0, layout)
        optimizer.step()
        optimizer.zero_grad()
    state = optimizer_state([optimizer])
    return Phase(held, max(before + state, watch.take_peak()), 0, watch.moved)


@torch.no_grad()
def observe_rollout(model, watch, layout, cfg, held: int, samplers: int) -> Phase:
    """Whole weights, as many rows as run at once, and their prompts: the longest that leave room for --max_new_tokens.
    samplers: ranks that share the prompts of a step."""
    width, mesh, watch.moved = layout.tp, layout.mesh["tp"] if layout.tp > 1 else None, Counter()
    n = max(1, min(cfg.rollout_rows // cfg.group_size, -(-cfg.prompts_per_step // samplers)))
    length, rows = max(1, cfg.seq_len - cfg.max_new_tokens), n * cfg.group_size
    with watch, whole_weights(model):
        cache = RowCache(rows, -(-(cfg.seq_len + width) // KEY_BUCKET) * KEY_BUCKET)
        slots = torch.arange(rows).view(n, cfg.group_size)
        read_prompts(model, cache, [[0] * length] * n, slots[:, 0], length, width, mesh)
        cache.copy_first(slots, length)
        at = torch.full((rows, width), cfg.seq_len - 1)
        logits = next_logits(model, cache, at, at, torch.zeros(rows, dtype=torch.long), [cfg.seq_len] * rows, mesh)
        draw(logits, torch.zeros(rows, dtype=torch.float64), cfg.temperature)
    return Phase(held, watch.take_peak(), size_of(t for kept in cache.kept.values() for t in kept), watch.moved)


def observe_phases(main, cfg) -> tuple:
    """(layout, parameters of the model, bytes of a trainer's parameters, reference and optimizer, {name: Phase})"""
    with tempfile.TemporaryDirectory() as out:  # main makes the folder, and writes its tokenizer
        trainers = replace(cfg, out=out, gen_ranks=0, async_steps=0, eval_every=0)
        with dry_world(main, trainers, 0) as ([model], optimizer, layout):
            parameters, watch, phases = size_of(model.parameters()), DryWatch(layout), {}
            reference = parameters if cfg.kl_coef and not cfg.lora_rank else 0
            held = parameters + reference
            if not cfg.engine and not cfg.gen_ranks:  # before the update, which makes the optimizer's state
                phases["rollout"] = observe_rollout(model, watch, layout, cfg, held, layout.data_ranks)
            phases["update"] = observe_update(model, optimizer, watch, layout, cfg, held)
            state = optimizer_state([optimizer])
            if "rollout" in phases:
                phases["rollout"].held += state
        if cfg.gen_ranks:  # a process of its own, with the whole model in the dtype of its products
            dtype = "float32" if layout.compute_dtype == torch.float32 else "bfloat16"
            alone = replace(trainers, dp_replicate=1, dp_shard=1, tp=1, cp=1, ep=1, etp=1, param_dtype=dtype)
            with dry_world(main, alone, 0) as ([model], _, one):
                held = size_of(model.parameters())
                phases["generator"] = observe_rollout(model, DryWatch(one), one, cfg, held, cfg.gen_ranks)
    return layout, sum(p.numel() for p in model.parameters()), (parameters, reference, state), phases


def dry_run(main, cfg) -> None:
    """Print the report."""
    layout, n_params, (parameters, reference, state), phases = observe_phases(main, cfg)
    print(f"dry run: {n_params:,} parameters | {layout} | {str(layout.compute_dtype)[6:]} compute | on each trainer "
          f"{human(parameters)} parameters, {human(state)} optimizer" + f", {human(reference)} reference" * bool(reference))
    lines = [["a device in", "held", "made", "of it cache", "peak", f"fits ({' / '.join(map(str, DEVICES))} GB)"]]
    for name, phase in phases.items():
        fits = " / ".join("yes" if phase.peak <= size * 1e9 else "no" for size in DEVICES)
        lines.append([name, *map(human, (phase.held, phase.made, phase.cache, phase.peak)), fits])
    print(table(lines))
    for name, phase in phases.items():
        for (axis, op), (number, size) in sorted(totals(phase.moved).items()):
            print(f"{name}: {axis} {op}, {number:,} x, {human(size)}")
