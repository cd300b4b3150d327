"""Steps of Muon and its kin in a layout, with gradients that are the same in every layout."""

import warnings

from layouts import build, config, full, global_batch, local_batch
from saves import saver

import parallel
from training.muon import Muon

OPTIONS = dict(lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")


def steps(flags, n, problem, kind=Muon, out=None, first=0, last=3):
    """Weights and state after three Muon steps with gradients that are the same in every layout, to
    the last bit: the sine of the weights. out: a folder to save to after `last` steps, or to load
    from before step `first`."""
    stages, layout = build(config(**problem), flags, n, 1 if flags.get("pp", 1) == 1 else 2)
    params = []
    for s in stages:
        for fqn, p in s.named_parameters():
            if p.dim() > 1 and fqn.startswith("blocks."):
                params.append((fqn, p))
    optimizer = kind([p for _, p in params], **OPTIONS)
    parallel.forward_backward(stages, local_batch(global_batch(0, n, False), layout), layout)
    if out:
        checkpoints = saver(stages, [optimizer], out)
    else:
        checkpoints = None
    if first:
        checkpoints.load()
    for _ in range(first, last):
        for _, p in params:
            p.grad = p.detach().sin()
        with warnings.catch_warnings():
            # such as torch's of a collective that it has renamed, which each rank would print
            warnings.simplefilter("error")
            optimizer.step()
    if out and not first:
        checkpoints.save(last, {}, last=True)
    state = {}
    for fqn, p in params:
        for name, t in optimizer.state[p].items():
            state[f"{fqn} {name}"] = full(t)
    return {fqn: full(p) for fqn, p in params} | state


# stacked: (8, 16, 32) and (8, 32, 16)
EXPERTS = dict(model="qwen3", n_experts=8, top_k=2, moe_ffn_dim=16, n_layers=2)
