"""The proof: every layout trains the model that one process trains.

Each row of LAYOUTS runs three AdamW steps through parallel.py on real gloo processes, with ragged masks, and is compared
with plain torch in one process (layouts.reference): loss atol 1e-5, every gradient rel 1e-4, grad norm rtol 2e-5, the
validation loss, the weights. docs/parallelism.md draws its support matrix from this table.
"""
from contextlib import contextmanager
from functools import partial
from unittest import mock

import pytest
import torch
from layouts import config, first_difference, reference, train
from pool import pool

# (processes, flags, {batch and model}); n: global batch in sequences, b: local batch, so n / (b x data ranks) is the
# accumulation; doc: document masks; the rest are fields of the model config
LAYOUTS = [
    (1, {}, dict(n=6, b=2, doc=True)),
    # data: FSDP, HSDP, replicas; accumulation 1 and 3; weights kept or freed, on the device or the host
    (2, {}, dict(n=6, b=1)),
    (2, dict(reshard_after_forward="never"), dict(n=8, b=2)),
    (2, dict(cpu_offload=True), dict(n=8, b=2)),
    (2, dict(dp_replicate=2), dict(n=6, b=1, tie_embeddings=True)),
    (4, {}, dict(n=12, b=1, doc=True)),
    (4, dict(dp_replicate=4), dict(n=4, b=1)),
    (4, dict(dp_replicate=2, dp_shard=2), dict(n=12, b=1, doc=True)),
    # tensor
    (2, dict(tp=2), dict(n=6, b=2)),
    (2, dict(tp=2), dict(n=4, b=4, tie_embeddings=True, doc=True)),
    (2, dict(tp=2, loss_parallel=False), dict(n=4, b=2, tie_embeddings=True)),
    (4, dict(tp=4), dict(n=4, b=2, vocab_size=103)),  # 103 words over 4 ranks: uneven
    (4, dict(tp=2), dict(n=8, b=2, doc=True)),
    (4, dict(tp=2, dp_replicate=2), dict(n=8, b=2, tie_embeddings=True)),
    (4, dict(tp=2, loss_parallel=False), dict(n=8, b=1)),
    # context
    (2, dict(cp=2), dict(n=6, b=2)),
    (2, dict(cp=2), dict(n=4, b=2, doc=True)),
    (2, dict(cp=2, cp_method="alltoall"), dict(n=4, b=2, doc=True)),
    (4, dict(cp=4), dict(n=4, b=2)),
    (4, dict(cp=4, cp_method="alltoall"), dict(n=4, b=2, n_kv_heads=2)),  # fewer kv heads than ranks
    (4, dict(cp=2), dict(n=8, b=2, doc=True)),
    (4, dict(cp=2, dp_replicate=2), dict(n=8, b=2, tie_embeddings=True)),
    (4, dict(cp=2, tp=2), dict(n=4, b=2)),
    (4, dict(cp=2, tp=2, cp_method="alltoall"), dict(n=4, b=2, doc=True)),
    # pipeline: every schedule, 2 and 4 ranks, tied (the embedding's gradient is exchanged), accumulation on top
    *[(2, dict(pp=2, pp_schedule=s), dict(n=8, b=4, doc=True)) for s in ("GPipe", "1F1B", "LoopedBFS")],
    *[(2, dict(pp=2, pp_schedule=s), dict(n=8, b=4)) for s in ("Interleaved1F1B", "InterleavedZeroBubble")],
    *[(2, dict(pp=2, pp_schedule=s), dict(n=8, b=4, tie_embeddings=True)) for s in ("ZBVZeroBubble", "DualPipeV")],
    *[
        (4, dict(pp=4, pp_schedule=s), dict(n=16, b=8, n_layers=8, tie_embeddings=True))
        for s in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
    ],
    (2, dict(pp=2, pp_stage_fqns="tok_embeddings,blocks.0;blocks.1,blocks.2,blocks.3,norm,head"), dict(n=4, b=2)),
    (2, dict(pp=2, pp_layers_per_stage=2, pp_schedule="Interleaved1F1B"), dict(n=4, b=2, n_layers=6)),
    (2, dict(pp=2, pp_microbatch_size=2), dict(n=8, b=4, doc=True)),
    (2, dict(pp=2, reshard_after_forward="always"), dict(n=8, b=4)),
    *[(4, dict(pp=2, pp_schedule=s), dict(n=16, b=4)) for s in ("1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")],
    (4, dict(pp=2, dp_replicate=2), dict(n=8, b=2, tie_embeddings=True)),
    (4, dict(pp=2, tp=2), dict(n=4, b=2, tie_embeddings=True)),
    (4, dict(pp=2, tp=2, pp_schedule="ZBVZeroBubble"), dict(n=4, b=4, doc=True)),
    (4, dict(pp=2, tp=2, loss_parallel=False, pp_schedule="Interleaved1F1B"), dict(n=4, b=4)),
    (4, dict(pp=2, cp=2), dict(n=4, b=2, doc=True)),
    (4, dict(pp=2, cp=2, cp_method="alltoall", pp_schedule="DualPipeV"), dict(n=4, b=4, tie_embeddings=True)),
    # activation checkpointing
    *[(2, dict(tp=2, ac=ac), dict(n=4, b=2)) for ac in ("full", "selective", "op")],
    (2, dict(ac="op", cp=2), dict(n=4, b=2)),
    (2, dict(ac="full", pp=2), dict(n=4, b=2)),
]
SLOW = [  # eight processes: three and four axes at once
    (8, dict(pp=2, tp=2, cp=2), dict(n=8, b=4, tie_embeddings=True, doc=True)),
    (8, dict(pp=2, tp=2), dict(n=8, b=2, doc=True)),
    (8, dict(pp=2, cp=2, pp_schedule="Interleaved1F1B"), dict(n=8, b=4)),
    (8, dict(cp=2, tp=2), dict(n=8, b=2, doc=True)),
    (8, dict(dp_replicate=2, cp=2), dict(n=8, b=2, doc=True)),
    (8, dict(dp_replicate=2, tp=2), dict(n=8, b=1, tie_embeddings=True)),
    (8, dict(dp_replicate=2, pp=2, tp=2, pp_schedule="Interleaved1F1B"), dict(n=8, b=4)),
    (8, dict(pp=2, tp=2, cp=2, pp_schedule="ZBVZeroBubble", cp_method="alltoall"), dict(n=8, b=4, doc=True)),
    (8, dict(dp_replicate=2, cp=2, tp=2, ac="op"), dict(n=8, b=2)),
    (8, dict(pp=4, pp_schedule="DualPipeV"), dict(n=16, b=8, n_layers=8)),
]


COMPILED = [
    (1, dict(compile=True), dict(n=4, b=2)),
    (2, dict(compile=True, ac="op"), dict(n=4, b=2)),
    (2, dict(compile=True, tp=2), dict(n=4, b=2)),
    (2, dict(compile=True, cp=2), dict(n=4, b=2)),
    (2, dict(compile=True, pp=2, pp_schedule="InterleavedZeroBubble"), dict(n=8, b=4)),
]


def name(row) -> str:
    processes, flags, problem = row
    return f"{processes}-" + "-".join(f"{k}={v}" for k, v in {**flags, **problem}.items())


def compare(processes: int, flags: dict, problem: dict, mutate=None) -> str:
    """'' or the first difference of any rank to the one-process reference."""
    problem = dict(problem)
    n, b, doc = problem.pop("n"), problem.pop("b"), problem.pop("doc", False)
    model_config = config(**problem)
    want = reference(model_config, n, doc)
    results = pool(processes).run(train, model_config, flags, n, b, doc, mutate)
    return next(filter(None, (first_difference(got, want) for got in results)), "")


@pytest.mark.parametrize("row", LAYOUTS, ids=name)
def test_layout_equals_one_process(row):
    assert compare(*row) == ""


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW, ids=name)
def test_eight_processes_equal_one(row):
    assert compare(*row) == ""


@contextmanager
def without_inductor():
    """Dynamo's and AOTAutograd's graphs, run op by op: what can break under FSDP and TP, without minutes of g++."""
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("row", COMPILED, ids=name)
def test_compiled_layout_equals_one_process(row):
    assert compare(*row, mutate=without_inductor) == ""
