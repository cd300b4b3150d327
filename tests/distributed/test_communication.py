"""What goes over the wire in one step, against parallel.py: as much as the textbook says, and no
more, on real gloo runs.

L layers, P parameters of a block, N tokens of the global batch on this rank, D dim; everything in
fp32 here, 4 bytes.
"""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from collectives import count
from layouts import SMALL, T, build, config, global_batch, local_batch
from pool import pool
from torch.distributed.fsdp._fully_shard import _fsdp_param_group

import parallel
from distributed.launch import set_timeouts

L = SMALL["n_layers"]
D = SMALL["dim"]
V = SMALL["vocab_size"]


def block_bytes(tp=1) -> int:
    c = config()
    matrices = D * c.head_dim * (2 * c.n_heads + 2 * c.n_kv_heads) + 3 * D * c.ffn_dim
    return 4 * (matrices // tp + 2 * D)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_fsdp_reduces_once_per_step_and_gathers_twice_per_accumulation(accumulation):
    counts = pool(2).run(count, {}, 2 * accumulation, 1)[0]
    # backward gathers all blocks again but the last, and the embedding; the root (norm, head) stays
    # from the first forward on
    assert counts["fsdp", "all_gather"][0] == accumulation * (2 * L - 1 + 2) + 1
    # blocks, embedding, root: not times accumulation
    assert counts["fsdp", "reduce_scatter"][0] == L + 2
    embedding = 4 * (V + V % 2) * D  # FSDP pads the rows to a multiple of the ranks
    assert counts["fsdp", "reduce_scatter"][1] == L * block_bytes() + 2 * embedding + 4 * D
    # number of tokens, gradient norm: eight bytes each
    assert counts["fsdp", "all_reduce"] == [2, 16]
    assert set(counts) == {
        ("fsdp", "all_gather"),
        ("fsdp", "reduce_scatter"),
        ("fsdp", "all_reduce"),
    }


@pytest.mark.slow
def test_float8_sends_nothing_for_scales():
    """torchao, given DTensors, agrees on scales with all tp ranks: 28 all-reduces per block,
    forward and backward."""
    want, got = (
        pool(2).run(count, dict(tp=2, float8=kind), 2, 2)[0] for kind in ("off", "tensorwise")
    )
    assert got == want


def test_reduce_grads_always_reduces_every_micro_batch_and_sums_copies_once():
    counts = pool(4).run(count, dict(dp_replicate=2, reduce_grads="always"), 12, 1)[0]
    assert counts["fsdp", "reduce_scatter"][0] == 3 * (L + 2)
    assert counts["dp_replicate", "all_reduce"][0] == L + 2


def test_weights_that_are_never_resharded_are_gathered_once_per_step():
    counts = pool(2).run(count, dict(reshard_after_forward="never"), 6, 1)[0]
    assert counts["fsdp", "all_gather"][0] == L + 2
    assert counts["fsdp", "reduce_scatter"][0] == L + 2


def test_hsdp_all_reduces_shards_only():
    counts = pool(4).run(count, dict(dp_replicate=2), 4, 1)[0]
    assert counts["fsdp", "reduce_scatter"][0] == L + 2
    assert counts["dp_replicate", "all_reduce"][0] == L + 2
    assert counts["dp_replicate", "all_reduce"][1] == counts["fsdp", "reduce_scatter"][1] // 2


def test_tensor_parallel_moves_four_activations_per_block_and_direction():
    b = 2
    counts = pool(2).run(count, dict(tp=2), b, b)[0]
    activation = 4 * b * T * D  # a whole (B, T, D)
    # forward: gather before attention and FFN, scatter behind both; the backward mirrors it. Around
    # the blocks: the embedding (scatter, then gather) and the loss (gather, then scatter)
    assert counts["tp", "all_gather"] == [4 * L + 2, (4 * L + 2) * activation]
    assert counts["tp", "reduce_scatter"] == [4 * L + 2, (4 * L + 2) * activation]
    # the loss: maximum, and (sum of exp, target logit); the norms' gradients: two per block and the
    # last; two scalars
    assert counts["tp", "all_reduce"][0] == 2 + 2 * L + 1 + 2
    assert counts["tp", "all_reduce"][1] == 3 * 4 * b * T + (2 * L + 1) * 4 * D + 16


def test_context_parallel_gathers_keys_and_values_once_per_layer():
    b = 2
    counts = pool(4).run(count, dict(cp=2), 2 * b, b)[0]
    kv = 4 * b * T * 2 * config().n_kv_heads * config().head_dim
    assert counts["cp", "all_gather"] == [L, L * kv]
    assert counts["cp", "reduce_scatter"] == [L, L * kv]


def test_ulysses_trades_four_tensors_per_layer_and_direction():
    counts = pool(4).run(count, dict(cp=2, cp_method="alltoall"), 4, 2)[0]
    # q, k, v and the output, forward and backward
    assert counts["cp", "all_to_all"][0] == 2 * 4 * L


def test_pipeline_moves_one_activation_per_microbatch_and_reduces_once():
    n = 4
    first, second, *_ = pool(2).run(count, dict(pp=2), n, n)
    activation = 4 * T * D
    assert first["pp", "send"] == [n, n * activation] == second["pp", "recv"]
    assert second["pp", "send"] == [n, n * activation] == first["pp", "recv"]
    counts = pool(4).run(count, dict(pp=2), 2 * n, n)[0]
    # its blocks and the embedding; norm and head are elsewhere
    assert counts["fsdp", "reduce_scatter"][0] == L // 2 + 1


def saved_with_budget(budget: float) -> int:
    """Bytes that compiled blocks keep for the backward, without inductor: its partitioner decides
    what is kept."""
    torch._dynamo.reset()
    partitioned = partial(torch.compile, backend="aot_eager_decomp_partition")
    with mock.patch.object(torch, "compile", partitioned):
        stages, layout = build(
            config(dim=64, ffn_dim=256), dict(ac="budget", ac_budget=budget, compile=True), 4, 4
        )
        batch = local_batch(global_batch(0, 4, False), layout)
        parallel.forward_backward(stages, batch, layout)  # compiles
        saved = {}

        def pack(t):
            saved[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            stages[0](**parallel.inputs(stages[0], batch, 0, layout)).backward()
    return sum(saved.values())


@pytest.mark.slow
def test_activation_memory_budget_keeps_less():
    all_of_it, some = (pool(1).run(saved_with_budget, budget)[0] for budget in (1.0, 0.1))
    assert some < 0.8 * all_of_it


def events_of_a_step(flags) -> list[str]:
    """ "gather UNIT" where FSDP asks for a unit's weights and "read" where a layer waits for the
    device, in a second step."""
    stages, layout = build(config(model="qwen3", n_experts=8, top_k=2, moe_ffn_dim=32), flags, 4, 1)
    batch = local_batch(global_batch(0, 4, False), layout)
    events = []
    parallel.forward_backward(stages, batch, layout)
    gather = _fsdp_param_group.foreach_all_gather
    tolist = torch.Tensor.tolist

    def gathers(params, *args):
        fqn = params[0]._param_fqn
        events.append(
            "gather "
            + (
                fqn.split(".moe.")[0] + ".experts"
                if ".experts." in fqn
                else ".".join(fqn.split(".")[:2])
            )
        )
        return gather(params, *args)

    def reads(tensor):
        events.append("read")
        return tolist(tensor)

    with (
        mock.patch.object(_fsdp_param_group, "foreach_all_gather", gathers),
        mock.patch.object(torch.Tensor, "tolist", reads),
    ):
        parallel.forward_backward(stages, batch, layout)
    return events


def test_the_next_layers_weights_are_asked_for_before_a_layer_waits_for_the_device():
    for events in pool(4).run(events_of_a_step, dict(ep=2, ac="full")):
        reads = [i for i, event in enumerate(events) if event == "read"]
        assert len(reads) == 2 * L  # forwards, and the same again in the backward
        for layer, when in enumerate(reads[:L]):
            wanted = set()
            for i in range(min(layer + 2, L)):
                for unit in ("", ".experts"):
                    wanted.add(f"gather blocks.{i}{unit}")
            assert wanted <= set(events[:when])
        for layer, when in zip(reversed(range(1, L)), reads[L:]):
            assert {f"gather blocks.{layer - 1}", f"gather blocks.{layer - 1}.experts"} <= set(
                events[reads[L - 1] : when]
            )
        assert [events.count(f"gather blocks.{i}.experts") for i in range(L)] == [2] * L


def groups_without_timeout() -> int:
    """Of a layout with experts: how many of its groups set_timeouts leaves out."""
    known = {*dist.distributed_c10d._world.pg_map}
    _, layout = build(
        config(model="qwen3", n_experts=8, top_k=2, moe_ffn_dim=32), dict(tp=2, ep=2), 4, 1
    )
    made = {*dist.distributed_c10d._world.pg_map} - known
    with mock.patch.object(dist.distributed_c10d, "_set_pg_timeout") as set_timeout:
        set_timeouts(layout, 222)
    assert len(made) > 6
    for call in set_timeout.call_args_list:
        assert call.args[0].total_seconds() == 222
    return len({None, *made} - {call.args[1] for call in set_timeout.call_args_list})


def test_no_group_of_the_meshes_keeps_its_own_timeout():
    assert pool(4).run(groups_without_timeout) == [0] * 4
