"""Muon: equal to torch's own on one process, and the same on shards as on whole matrices."""
import pytest
import torch
from layouts import build, config, full, global_batch, local_batch
from pool import pool

import parallel
from optim import Muon

OPTIONS = dict(lr=0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")


def test_equals_torch_on_plain_matrices():
    def train(kind):
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(shape)) for shape in ((8, 24), (24, 8), (8, 24), (16, 16))]
        optimizer = kind(params, **OPTIONS)
        for step in range(3):
            for i, p in enumerate(params):
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i))
            optimizer.step()
        return params

    for ours, theirs in zip(train(Muon), train(torch.optim.Muon), strict=True):
        assert torch.equal(ours, theirs)


def steps(flags, n):
    """Weights after three Muon steps whose gradients are the same in every layout, to the last bit: the weights themselves."""
    stages, layout = build(config(), flags, n, 1 if flags.get("pp", 1) == 1 else 2)
    params = [(fqn, p) for s in stages for fqn, p in s.named_parameters() if p.dim() == 2 and fqn.startswith("blocks.")]
    optimizer = Muon([p for _, p in params], **OPTIONS)
    parallel.forward_backward(stages, local_batch(global_batch(0, n, False), layout), layout)
    for _ in range(3):
        for _, p in params:
            p.grad = p.detach().sin()
        optimizer.step()
    return {fqn: full(p) for fqn, p in params}


@pytest.mark.parametrize("processes, flags", [(2, {}), (4, dict(dp_replicate=2)), (4, dict(tp=2)), (2, dict(pp=2)), (4, {})])
def test_sharded_equals_whole(processes, flags):
    whole = pool(1).run(steps, {}, 4)[0]
    for part in pool(processes).run(steps, flags, 4):
        for fqn, weight in part.items():
            assert torch.equal(weight, whole[fqn]), fqn
