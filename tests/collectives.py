"""Counts the collectives of a training step."""

from layouts import build, config, global_batch, local_batch

import parallel
from tools.reports.dryrun import Watch, totals


def count(flags, n, b, problem=None):
    """Collectives of one training step, after a first one that connects everything."""
    stages, layout = build(config(**(problem or {})), flags, n, b)
    batch = local_batch(global_batch(0, n, False), layout)
    parallel.forward_backward(stages, batch, layout)
    with Watch(layout) as collectives:
        parallel.forward_backward(stages, batch, layout)
        parallel.clip_grad_norm(stages, 1.0, layout)
    return totals(collectives.moved)
