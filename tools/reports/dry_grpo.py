"""grpo.py --dry_run: the memory of an update and of a rollout, before you rent machines.

As in dryrun.py the program's own code runs on tensors without memory: build_policy and Trainer, two
forwards and backwards as large as --local_batch_size or --pack_tokens says, AdamW; and in rollouts
the gathered weights, the longest prompts read, and a token drawn for each row with a full cache.
The log-probabilities get a gradient of 1, and nothing is rewarded. Of the reference only the
weights are counted: its forward keeps nothing.
"""

import tempfile
from dataclasses import replace
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from distributed.layout import AXES, Layout
from flags.progress import Progress
from rl.decoding import KEY_BUCKET, RowCache, draw, next_logits, read_prompts
from rl.packing import token_step
from rl.rollouts import whole_weights
from tools.reports.costs import totals
from tools.reports.dryrun import (
    DEVICES,
    DryWatch,
    dry_world,
    format_bytes,
    observe,
    optimizer_state,
    say_fits,
    size_of,
    table,
)

# bytes of a token's values on the device, from rl/packing.py: five integers, six floats
VALUES = 64


class Phase(NamedTuple):
    """Bytes of a device in one half of a step."""

    held: int  # beside the tensors made in it
    # gradients and activations at the worst moment; or gathered weights, cache, and the logits of a
    # token
    made: int
    cache: int
    moved: dict  # see Watch


def observe_update(
    model, optimizer: torch.optim.Optimizer, layout: Layout, cfg: Any, held: int
) -> Phase:
    """Two forwards and backwards of this rank, and the optimizer's first step, which makes its
    state. In a pipeline as many forwards wait for their backwards as there are stages from this one
    on."""
    B = cfg.local_batch_size
    T = cfg.seq_len
    if cfg.pack_tokens:
        B = 1
        T = cfg.pack_tokens
    step = token_step(T, layout)
    T = -(-T // step) * step
    logprobs = model.token_loss
    model.token_loss = lambda *given: logprobs(*given)[0].sum()
    found = observe(
        [model],
        [optimizer],
        replace(layout, local_batch_size=B, microbatch_size=B),
        T,
        2,
        DryWatch(layout),
    )
    peak = max(
        found["update"],
        (layout.pp - layout.coordinate("pp")) * found["activations", 0] + found["peak"],
    )
    made = peak - found["parameters"] + 2 * B * T // layout.cp * VALUES
    return Phase(held, made, 0, {key[1:]: n for key, n in found.items() if key[0] == "moved"})


@torch.no_grad()
def observe_rollout(model: nn.Module, layout, cfg: Any, beside: int, samplers: int) -> Phase:
    """Whole weights, as many rows as run at once, and their prompts: the longest that leave room
    for --max_new_tokens.
    beside: bytes held beside the parameters. samplers: ranks that share the prompts of a step."""
    width = layout.tp
    mesh = None
    if layout.tp > 1:
        mesh = layout.mesh["tp"]
    watch = DryWatch(layout)
    n = max(1, min(cfg.rollout_rows // cfg.group_size, -(-cfg.prompts_per_step // samplers)))
    length = max(1, cfg.seq_len - cfg.max_new_tokens)
    rows = n * cfg.group_size
    with watch, whole_weights(model):
        cache = RowCache(rows, -(-(cfg.seq_len + width) // KEY_BUCKET) * KEY_BUCKET)
        slots = torch.arange(rows).view(n, cfg.group_size)
        read_prompts(model, cache, [[0] * length] * n, slots[:, 0], length, width, mesh)
        cache.copy_first(slots, length)
        at = torch.full((rows, width), cfg.seq_len - 1)
        logits = next_logits(
            model, cache, at, at, torch.zeros(rows, dtype=torch.long), [cfg.seq_len] * rows, mesh
        )
        draw(logits, torch.zeros(rows, dtype=torch.float64), cfg.temperature)
    return Phase(
        size_of(model.parameters()) + beside,
        watch.take_peak(),
        size_of(sum(cache.kept.values(), [])),
        watch.moved,
    )


def observe_phases(main: FunctionType, cfg: Any) -> tuple:
    """(layout, parameters of the whole model, bytes of a trainer's parameters, reference and
    optimizer, {name: Phase}). Of a pipeline the bytes are those of the first stage, and each stage
    has an update."""
    phases = {}
    held = []
    numel = {}
    if cfg.gen_ranks:
        engine = "any"
    else:
        engine = cfg.engine
    with tempfile.TemporaryDirectory() as out:  # main makes the folder, and writes its tokenizer
        # with an engine the trainers are those of --gen_ranks, and may be a pipeline
        trainers = replace(
            cfg,
            out=out,
            gen_ranks=0,
            async_steps=0,
            eval_every=0,
            engine=engine,
            batch_invariant=False,
        )
        for stage in range(max(1, cfg.pp)):
            with dry_world(main, trainers, stage) as ([model], optimizer, layout):
                parameters = size_of(model.parameters())
                reference = 0
                if cfg.kl_coef and not cfg.lora_rank:
                    reference = parameters
                name = "update"
                if layout.pp > 1:
                    name = f"update, stage {stage}"
                phases[name] = observe_update(model, optimizer, layout, cfg, parameters + reference)
                held.append((parameters, reference, optimizer_state([optimizer])))
                numel |= {fqn: p.numel() for fqn, p in model.named_parameters()}
        name = "rollout"
        samplers = layout.data_ranks
        beside = sum(held[0][1:])
        sampling = trainers
        if cfg.gen_ranks:  # a process of its own, with the whole model in the dtype of its products
            name = "generator"
            samplers = cfg.gen_ranks
            beside = 0
            alone = dict.fromkeys((*AXES, "ep", "etp"), 1)
            sampling = replace(
                trainers, engine="", param_dtype=str(layout.compute_dtype)[6:], **alone
            )
        if not cfg.engine:
            with dry_world(main, sampling, 0) as ([model], _, one):
                phases[name] = observe_rollout(model, one, cfg, beside, samplers)
    return layout, sum(numel.values()), held[0], phases


def dry_run(main: FunctionType, cfg: Any) -> None:
    """Print the report."""
    with Progress("dry run of an update and a rollout"):
        layout, n_params, (parameters, reference, state), phases = observe_phases(main, cfg)
    holders = "on each trainer"
    if layout.pp > 1:
        holders = "on each trainer of the first stage"
    held = f"{format_bytes(parameters)} parameters, {format_bytes(state)} optimizer"
    if reference:
        held += f", {format_bytes(reference)} reference"
    print(
        f"dry run: {n_params:,} parameters | {layout} | {str(layout.compute_dtype)[6:]} compute | "
        f"{holders} {held}"
    )
    lines = [
        [
            "a device in",
            "held",
            "made",
            "of it cache",
            "peak",
            f"fits ({' / '.join(map(str, DEVICES))} GB)",
        ]
    ]
    for name, phase in phases.items():
        peak = phase.held + phase.made
        sizes = (phase.held, phase.made, phase.cache, peak)
        lines.append([name, *map(format_bytes, sizes), say_fits(peak)])
    print(table(lines))
    for name, phase in phases.items():
        for (axis, op), (number, size) in sorted(totals(phase.moved).items()):
            print(f"{name}: {axis} {op}, {number:,} x, {format_bytes(size)}")
