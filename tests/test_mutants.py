"""The proof of the proof: mistakes that users of other trainers have met are seeded here, and the comparison of
test_parallel.py must catch each one and name the parameter.

A mutant is a context manager that breaks parallel.py inside the workers and mends it afterwards.
"""
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import layouts
import pytest
import torch
from layouts import compare
from test_parallel import MOE

import distributed.experts
import distributed.layout
import distributed.pipeline
import distributed.refusals
import parallel
from distributed.layout import AllToAll
from models.loss import IGNORE


@contextmanager
def norm_without_all_reduce():
    """Trap 2: a replicated norm on sequence-sharded activations, as a plain weight whose gradient nobody sums over tp."""
    with mock.patch.dict(parallel.TP_STYLES, sequence=PlainStyle):
        yield


class PlainStyle(torch.distributed.tensor.parallel.ParallelStyle):
    def _apply(self, module, mesh):
        return module


@contextmanager
def waiting_embedding():
    """Trap 3: .wait() instead of .clone() on the asynchronous output of the embedding cuts its gradient."""

    class Waiting(parallel.VocabEmbedding):
        def _apply(self, module, mesh):
            module = super(parallel.VocabEmbedding, self)._apply(module, mesh)
            module.register_forward_hook(lambda module, args, out: out.wait() if hasattr(out, "wait") else out)
            return module

    with mock.patch.dict(parallel.TP_STYLES, vocab_embedding=Waiting):
        yield


@contextmanager
def reshard_in_zero_bubble():
    """Trap 1: the refusal taken away."""
    with mock.patch.object(distributed.refusals, "pipeline_rows", lambda *args: []):
        yield


@contextmanager
def mean_of_means():
    """Each data rank divides by its own tokens, and the ranks' means are averaged."""

    def own_tokens(labels, layout):
        mine = (labels != IGNORE).sum()
        return mine * layout.data_ranks, mine

    with mock.patch.object(parallel, "count_tokens", own_tokens):
        yield


@contextmanager
def masked_tokens_counted():
    real = parallel.count_tokens
    with mock.patch.object(parallel, "count_tokens", lambda labels, layout: real(torch.zeros_like(labels), layout)):
        yield


@contextmanager
def tied_weight_counted_twice():
    real = parallel.clip_grad_norm

    def wrong(stages, max_norm, layout):
        with mock.patch.object(parallel, "tied_copy", lambda stage: None):
            return real(stages, max_norm, layout)

    with mock.patch.object(parallel, "clip_grad_norm", wrong):
        yield


@contextmanager
def tied_gradient_not_exchanged():
    """Trap 17: the embedding and its copy in the head drift apart."""
    with mock.patch.object(distributed.pipeline, "sum_tied_gradients", lambda stages, layout: None):
        yield


@contextmanager
def positions_not_balanced():
    """Tokens in head-tail order, positions in natural order: rotary embedding at the wrong places."""
    real = parallel.inputs

    def wrong(stage, batch, a, layout):
        out = real(stage, batch, a, layout)
        T = out["positions"].shape[1]
        first = layout.coordinate("cp") * T
        return out | {"positions": torch.arange(first, first + T).repeat(out["tokens"].shape[0], 1)}

    with mock.patch.object(parallel, "inputs", wrong):
        yield


@contextmanager
def averaged_gradients():
    """FSDP's default: the mean over data ranks of gradients that are parts of one sum."""
    with mock.patch.object(parallel.FSDPModule, "set_gradient_divide_factor", lambda self, factor: None), mock.patch.object(
        parallel.FSDPModule, "set_force_sum_reduction_for_comms", lambda self, enable: None
    ):
        yield


@contextmanager
def norm_of_own_stage():
    """A pipeline rank clips by the norm of its own layers."""
    real = parallel.clip_grad_norm

    def wrong(stages, max_norm, layout):
        with mock.patch.object(parallel.dist, "all_reduce", lambda *args, **kwargs: None):
            return real(stages, max_norm, layout)

    with mock.patch.object(parallel, "clip_grad_norm", wrong):
        yield


@contextmanager
def experts_not_reduced_over_tp():
    """Experts sharded like the dense weights, over dp x cp only, though every tp rank sends them other tokens."""
    real = parallel.make_mesh

    def wrong(layout):
        layout = real(layout)
        return replace(layout, expert_mesh={"efsdp": layout.mesh["fsdp"], "ep": layout.mesh["tp"]})

    with mock.patch.object(parallel, "make_mesh", wrong):
        yield


@contextmanager
def weights_doubled_on_the_way():
    """A wrong expert scale: what comes back from another rank is multiplied."""
    real = AllToAll.apply
    louder = lambda x, *args: real(x * 1.5 if x.is_floating_point() else x, *args)  # noqa: E731  how many travel stays true
    with mock.patch.object(AllToAll, "apply", louder):
        yield


@contextmanager
def balancing_loss_per_microbatch():
    """Trap 15: the auxiliary loss averaged over the sequences of this rank's forward, not of the global batch."""
    real = distributed.experts.expert_parallel

    def wrong(stage, layout, *, aux_coef):
        real(stage, layout, aux_coef=aux_coef * layout.global_batch_size / layout.local_batch_size)

    with mock.patch.object(layouts, "expert_parallel", wrong):
        yield


@contextmanager
def own_load_only():
    """Biases moved by the load of this rank's tokens."""
    with mock.patch.object(distributed.experts, "sum_over", lambda x, groups: x):
        yield


ZERO_BUBBLE = dict(pp=2, pp_schedule="InterleavedZeroBubble", reshard_after_forward="always")
MUTANTS = [  # mutant, layout, what the report must name
    (norm_without_all_reduce, (2, dict(tp=2), dict(n=4, b=2)), "gradient of blocks.0.attn_norm.weight"),
    (waiting_embedding, (2, dict(tp=2), dict(n=4, b=2)), "gradient of tok_embeddings.weight"),
    (reshard_in_zero_bubble, (4, ZERO_BUBBLE, dict(n=16, b=4)), "gradient of blocks."),
    (mean_of_means, (2, {}, dict(n=4, b=2)), "gradient of tok_embeddings.weight"),
    (masked_tokens_counted, (2, {}, dict(n=4, b=2)), "gradient of tok_embeddings.weight"),
    (tied_weight_counted_twice, (2, dict(pp=2), dict(n=4, b=2, tie_embeddings=True)), "tok_embeddings.weight were miscounted"),
    (tied_gradient_not_exchanged, (2, dict(pp=2), dict(n=4, b=2, tie_embeddings=True)), "gradient of tok_embeddings.weight"),
    (positions_not_balanced, (2, dict(cp=2), dict(n=4, b=2)), "gradient of"),
    (averaged_gradients, (2, {}, dict(n=4, b=2)), "gradient of tok_embeddings.weight"),
    (experts_not_reduced_over_tp, (2, dict(tp=2), dict(n=4, b=2, **MOE)), "gradient of blocks.0.moe.experts.w1"),
    (weights_doubled_on_the_way, (2, dict(ep=2), dict(n=4, b=1, **MOE)), "gradient of"),
    (balancing_loss_per_microbatch, (2, dict(ep=2), dict(n=4, b=1, **MOE)), "gradient of"),
    (own_load_only, (2, dict(ep=2), dict(n=4, b=1, **MOE)), "bias of blocks.0"),
    (norm_of_own_stage, (2, dict(pp=2), dict(n=4, b=2)), "grad norm"),
]


@pytest.mark.parametrize("mutant, row, named", MUTANTS, ids=[m[0].__name__ for m in MUTANTS])
def test_mistake_is_caught_and_named(mutant, row, named):
    assert named in compare(*row, mutate=mutant)
