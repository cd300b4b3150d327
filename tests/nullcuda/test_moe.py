"""Experts on a GPU: which kernels a layer launches, models/moe.py."""

import re

import pytest

MODEL = "n_layers=2,dim=256,n_heads=4,n_kv_heads=2,head_dim=64,ffn_dim=256,moe_ffn_dim=128,n_experts=16,top_k=4,vocab_size=4096"
QWEN3 = ("train_qwen3.py", "--flavor", "debug_moe", "--model_args", MODEL)


@pytest.mark.parametrize("nproc, flags", [(1, []), (2, ["--ep", "2"])], ids=str)
def test_tokens_are_sorted_once_and_added_up_without_atomics(device, tmp_path, nproc, flags):
    """Per layer one sort, of 16 bits (a part's arriving rows are few here, and another kernel sorts
    them). torch's gradients of indexing sort once more, or add with atomics."""
    done = device.run(tmp_path, *QWEN3, *flags, nproc=nproc, empty_weights=True)
    for rank in range(nproc):
        kernels = [line for line in done.step(2, rank) if line.startswith(("kernel", "triton"))]
        passes = [line for line in kernels if "RadixSortOnesweep" in line]
        assert len(passes) == 2 * 2  # layers, bytes
        assert not [
            line for line in kernels if re.search("indexFunc|index_put|indexing_backward", line)
        ]


DEEPSEEK = ("train_deepseek.py", "--flavor", "debug", "--model_args", "n_layers=2,n_experts=16")


@pytest.mark.parametrize(
    "recipe, forward, backward",
    [(QWEN3, [0, 3, 3, 0], [0, 6, 6, 0]), (DEEPSEEK, [3, 6, 3, 0], [0, 6, 12, 6])],
    ids=["qwen3", "deepseek"],
)
def test_what_is_computed_while_rows_travel(device, tmp_path, recipe, forward, backward):
    """Matmuls between an exchange of bf16 rows (type 9) and the wait for it, of a layer's four
    exchanges in the forward: two parts there, two parts home; in the backward as well. A part's
    experts multiply three times, and so do shared experts."""
    step = device.run(tmp_path, *recipe, "--ep", 2, nproc=2, empty_weights=True).step(2)
    found = []
    for i in [
        i for i, line in enumerate(step) if line == "nccl group_end" and "type=9" in step[i - 1]
    ]:
        arrived = step.index(f"wait stream=0 {step[i + 1].split()[-1]}", i)
        found.append(
            sum(line.startswith("gemm") or "GroupProblemShape" in line for line in step[i:arrived])
        )
    layers = len(found) // 8
    assert found == forward * layers + backward * layers
    assert layers > 0


@pytest.mark.parametrize("nproc, flags", [(1, []), (2, ["--tp", "2"])], ids=str)
def test_routers_multiply_in_bf16(device, tmp_path, nproc, flags):
    """Per layer three matmuls, and no copy of the tokens in fp32 for them; under tensor parallelism
    each for its half."""
    step = device.run(tmp_path, *QWEN3, *flags, nproc=nproc, empty_weights=True).step(2)
    routers = []
    for i, line in enumerate(step):
        if line.startswith("gemm") and re.search(r"\b[mnk]=16\b", line):
            routers.append(i)
    assert len(routers) == 2 * 3
    # nothing between the norm and the router
    for i in routers[:2]:
        assert "norm" in step[i - 1]


def test_ac_op_repeats_neither_routing_nor_sends_nor_what_takes_long(device, tmp_path):
    """Launches of a step with --ac op: as many as without, but for plain matmuls and what is
    between them."""
    steps = []
    for ac in ("none", "op"):
        steps.append(
            device.run(
                tmp_path / ac, *QWEN3, "--ep", 2, "--ac", ac, nproc=2, empty_weights=True
            ).step(2)
        )
    for what in (
        "^nccl send",
        "^nccl recv",
        "RadixSortOnesweep",
        "gatherTopK",
        "cudnn_attention",
        "kind=d2h",
        "GroupProblemShape",
    ):
        none, op = (sum(bool(re.search(what, line)) for line in step) for step in steps)
        assert none == op > 0, (what, none, op)
    none, op = (sum(line.startswith("gemm") for line in step) for step in steps)
    assert none < op
