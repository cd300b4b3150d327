"""Experts, models/moe.py and distributed/experts.py: grouped against a loop, routing against
transformers, loads per layer."""

from contextlib import contextmanager
from functools import partial
from unittest import mock

import layouts
import pytest
import torch
import torch.nn.functional as F
from layouts import build, clear_seed, compare, drawn, global_batch, local_batch, without_inductor
from pool import pool
from runs import MODEL, launch, run
from saves import refuses
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

import models.moe
import parallel
from distributed.experts import PARTS, balance_experts, compiled_experts
from distributed.layout import Layout, all_blocks
from forks import once_per_rank as once
from models import deepseek, qwen3
from models.moe import Balance, Experts, apply_experts, load_statistics, swiglu_experts
from models.qwen3 import MoE, Qwen3, Qwen3Config


def loop(experts, x, index, weight):
    """Token by token, expert by expert."""
    out = torch.zeros_like(x)
    for n in range(x.shape[0]):
        for e, w in zip(index[n].tolist(), weight[n], strict=True):
            hidden = F.silu(experts.w1[e] @ x[n]) * (experts.w3[e] @ x[n])
            out[n] = out[n] + w * (experts.w2[e] @ hidden)
    return out


@pytest.mark.parametrize("use_kernel", [True, False])
@pytest.mark.parametrize("used", [8, 3, 1])  # experts that get tokens at all
def test_grouped_equals_loop(use_kernel, used, monkeypatch):
    if not use_kernel:
        monkeypatch.setattr(models.moe, "grouped_mm", None)
    torch.manual_seed(0)
    experts = drawn(Experts(8, 16, 24))
    index = torch.stack([torch.randperm(used)[: min(2, used)] for _ in range(20)])
    x, weight = torch.randn(20, 16), torch.rand(index.shape)
    results = []

    def ours(e, x, index, w):
        return apply_experts(e, x, index, w, torch.bincount(index.flatten(), minlength=8))

    for function in (ours, loop):
        leaves = [
            x.clone().requires_grad_(),
            weight.clone().requires_grad_(),
            *experts.parameters(),
        ]
        out = function(experts, leaves[0], index, leaves[1])
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    for ours, want in zip(*results, strict=True):
        torch.testing.assert_close(ours, want, atol=2e-5, rtol=1e-4)


def with_plain_indexing(experts, x, index, weight, counts):
    """apply_experts with torch's own indexing and gradients."""
    order = index.flatten().argsort(stable=True)
    token = order // index.shape[1]
    [y] = experts(x[token], weight.flatten()[order], counts)
    return torch.zeros(x.shape, dtype=torch.float32).index_add(0, token, y.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [1, 2, 6])
def test_tokens_travel_as_with_plain_indexing(monkeypatch, dtype, k):
    """To the bit in fp32. And the way of a GPU, which here a CPU takes, gives the same sums in
    another order."""
    torch.manual_seed(0)
    experts = drawn(Experts(8, 16, 24).to(dtype))
    index = torch.rand(20, 8).topk(k).indices
    x, weight, counts = (
        torch.randn(20, 16, dtype=dtype),
        torch.rand(index.shape),
        torch.bincount(index.flatten(), minlength=8),
    )

    def results(function):
        leaves = [
            x.clone().requires_grad_(),
            weight.clone().requires_grad_(),
            *experts.parameters(),
        ]
        out = function(experts, leaves[0], index, leaves[1], counts)
        return [out, *torch.autograd.grad(out.float().sin().sum(), leaves)]

    before = results(with_plain_indexing)
    ours = results(apply_experts)
    monkeypatch.setattr(
        models.moe.AddUp,
        "forward",
        staticmethod(
            lambda ctx, y, index, places: (
                ctx.save_for_backward(index, places),
                models.moe.add_up(y, places),
            )[1]
        ),
    )
    for was, cpu, gpu in zip(before, ours, results(apply_experts), strict=True):
        assert cpu.dtype == gpu.dtype == was.dtype
        assert dtype == torch.bfloat16 or torch.equal(cpu, was)
        if dtype == torch.float32:
            close = dict(atol=1e-5, rtol=1e-5)
        else:
            close = dict(atol=0.03, rtol=0.02)
        torch.testing.assert_close(cpu, was, **close)
        torch.testing.assert_close(gpu, cpu, **close)


def test_scores_from_bf16_are_those_of_fp32(monkeypatch):
    """The way of a GPU, which has a matmul of bf16 that returns fp32: the products of bf16 numbers
    are exact in fp32."""
    torch.manual_seed(0)
    leaves = [
        torch.randn(3, 5, 64).bfloat16().requires_grad_(),
        torch.randn(8, 64).bfloat16().requires_grad_(),
    ]
    up = torch.randn(3, 5, 8)
    want = models.moe.router_scores(*leaves)
    grads = torch.autograd.grad(want, leaves, up)
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: mm(a.to(out_dtype), b.to(out_dtype)))
    got = models.moe.ScoresFromBf16.apply(leaves[0].flatten(0, -2), leaves[1]).view(3, 5, 8)
    assert got.dtype == want.dtype == torch.float32
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-6)
    for ours, theirs in zip(torch.autograd.grad(got, leaves, up), grads, strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - theirs.float()).norm() < 0.01 * theirs.float().norm()


@pytest.mark.parametrize("use_kernel", [True, False])
def test_a_rank_without_tokens(use_kernel, monkeypatch):
    """Nothing in, nothing out, and gradients of zeros: FSDP waits for a gradient of every rank."""
    if not use_kernel:
        monkeypatch.setattr(models.moe, "grouped_mm", None)
    torch.manual_seed(0)
    leaves = []
    for shape in [(0, 16), (0,), (4, 24, 16), (4, 16, 24), (4, 24, 16)]:
        leaves.append(torch.randn(shape, requires_grad=True))
    x, weight, *stacks = leaves
    out = swiglu_experts(x, weight, torch.zeros(4, dtype=torch.int64), *stacks)
    assert out.shape == (0, 16)
    for grad, leaf in zip(torch.autograd.grad(out.sum(), leaves), leaves, strict=True):
        assert torch.equal(grad, torch.zeros_like(leaf))


def in_two_parts():
    """As on a GPU, and on a CPU in one."""
    return mock.patch.dict(PARTS, cpu=PARTS["cuda"])


@contextmanager
def once_per_rank():
    changed = {"apply_experts": once.apply_once}
    watched = mock.patch.object(once, "travel_once", wraps=once.travel_once)
    with (
        mock.patch.dict(vars(qwen3), changed),
        mock.patch.dict(vars(deepseek), changed),
        watched as travelled,
    ):
        yield
    assert travelled.called


@pytest.mark.parametrize(
    "processes, flags, kind",
    [
        (2, dict(ep=2), "qwen3_moe"),
        (4, dict(tp=2, ep=4), "deepseek"),
        *(
            pytest.param(*row, marks=pytest.mark.slow)
            for row in [
                (4, dict(ep=4, ac="op"), "qwen3_moe"),
                (4, dict(tp=2, ep=2, etp=2), "qwen3_moe"),
                (2, dict(ep=2, ac="full"), "mtp"),
                (4, dict(pp=2, ep=2, pp_schedule="ZBVZeroBubble"), "qwen3_moe"),
                (4, dict(cp=2, ep=2), "deepseek"),
            ]
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("way", [in_two_parts, once_per_rank])
def test_rows_travel_in_other_ways(processes, flags, kind, way):
    """Loss, gradients and weights equal one process."""
    assert compare(processes, flags, dict(n=8, b=2, **layouts.KINDS[kind]), way) == ""


EXPERTS = dict(n_experts=8, top_k=3, moe_ffn_dim=24)


def test_from_hf_refuses_by_name():
    good = Qwen3Config(**layouts.SMALL | EXPERTS).to_hf()
    wrong = dict(
        model_type="qwen2",
        use_sliding_window=True,
        mlp_only_layers=[1],
        attention_bias=True,
        hidden_act="gelu",
    )
    for field, value in (wrong | {"decoder_sparse_step": 2}).items():
        refuses(field, Qwen3Config.from_hf, good | {field: value})


def moe_layer(top_k=2):
    torch.manual_seed(0)  # of what the tests draw
    return drawn(MoE(Qwen3Config(**layouts.SMALL, n_experts=4, top_k=top_k, moe_ffn_dim=16)))


def test_auxiliary_loss_is_the_formula():
    """coef * E * mean over sequences of sum_e f_e P_e, written out, through a layer whose output is
    ignored."""
    layer = moe_layer()
    x = torch.randn(3, 10, 32)
    layer.balance.aux_scale = 0.1 / 3
    (layer(x) * 0).sum().backward()
    got = layer.router.weight.grad.clone()
    layer.zero_grad()
    layer.balance.aux_scale = 0.0
    probs = (x @ layer.router.weight.T).softmax(-1)
    loss = 0
    for p in probs:
        f = torch.bincount(p.topk(2, dim=-1).indices.flatten(), minlength=4) / (10 * 2)
        loss = loss + 0.1 * 4 * (f * p.mean(0)).sum() / 3
    loss.backward()
    torch.testing.assert_close(got, layer.router.weight.grad, atol=1e-7, rtol=1e-5)


def test_load_is_counted_once():
    layer = moe_layer()
    x = torch.randn(2, 10, 32, requires_grad=True)
    for recompute in (False, True):
        layer.balance.load = None
        if recompute:
            out = checkpoint(layer, x, use_reentrant=False)
        else:
            out = layer(x)
        out.sum().backward()
        assert layer.balance.load.sum() == 2 * 10 * 2
    layer.balance.load = None
    with torch.no_grad():
        layer(x)
    assert layer.balance.load is None  # evaluation does not train the balance


def test_biases_choose_but_do_not_weigh():
    layer = moe_layer(top_k=1)
    x = torch.randn(1, 10, 32)
    layer.norm_topk_prob = False
    layer.balance.bias[2] = 10.0
    out = layer(x)
    assert layer.balance.load.tolist() == [0, 0, 10, 0]
    weight = (x @ layer.router.weight.T).softmax(-1)[..., 2:3]
    hidden = F.silu(x @ layer.experts.w1[2].T) * (x @ layer.experts.w3[2].T)
    torch.testing.assert_close(out, weight * (hidden @ layer.experts.w2[2].T), atol=1e-5, rtol=1e-5)


def test_forced_balance_and_statistics():
    layer = moe_layer()
    x = torch.randn(2, 10, 32)
    layer.balance.force = True
    layer(x)
    assert layer.balance.load.tolist() == [10, 10, 10, 10]
    # the last row is a layer without experts
    worst, dead = load_statistics(torch.tensor([[10.0, 10, 10, 10], [40, 0, 0, 0], [0, 0, 0, 0]]))
    assert (worst.item(), dead.item()) == (4.0, 3)
    assert Balance(4).bias.dtype == torch.float32


def loads_of_a_step(flags, seed) -> dict:
    """What balance_experts reports on this rank after one step."""
    stages, layout = build(PROBLEM, flags, 8, 2, seed)
    parallel.forward_backward(stages, local_batch(global_batch(0, 8, False), layout), layout)
    return balance_experts(stages, layout, "none", 0.0)


PROBLEM = layouts.config("qwen3", **layouts.MOE)


@pytest.mark.parametrize(
    "flags", [dict(ep=2), dict(pp=2), dict(tp=2, ep=2), dict(tp=2, etp=2), dict(cp=2)], ids=str
)
def test_loads_are_those_of_one_process(flags):
    seed = clear_seed(PROBLEM, 8, False)
    model = Qwen3(PROBLEM)
    layouts.draw_weights(model, Layout(), seed)
    b = global_batch(0, 8, False)
    model(b.tokens, positions=b.positions)
    loads = torch.stack([block.moe.balance.load for block in model.blocks.values()])  # (layers, E)
    assert loads.sum(1).tolist() == [8 * layouts.T * PROBLEM.top_k] * PROBLEM.n_layers
    worst, dead = load_statistics(loads)
    for got in pool(2).run(loads_of_a_step, flags, seed):
        assert (got["moe_load_max_over_mean"], got["moe_dead_experts"]) == (worst, dead)


def biases_after(loads: list[float]) -> list[float]:
    """The balancing biases of the first layer with experts, after a step with these loads."""
    (stage,), layout = build(PROBLEM, {}, 8, 2, 0)
    moes = [block.moe for block in all_blocks(stage).values() if hasattr(block, "moe")]
    for moe in moes:
        moe.balance.bias.zero_()
        moe.balance.load = torch.tensor(loads)
    balance_experts([stage], layout, "bias", 0.1)
    return moes[0].balance.bias.tolist()


def test_biases_move_against_the_load_and_their_mean_stays():
    """Seven experts are below the mean load: up by 0.1; one is above: down by 0.1; the mean, 0.075,
    is taken away."""
    found = pool(1).run(biases_after, [80.0] + 7 * [0.0])[0]
    expected = pytest.approx([-0.175] + 7 * [0.025])
    assert found == expected, f"biases {found}, whose sum is {sum(found):.3g}"


@pytest.mark.slow
def test_check_parity_gives_one_process_no_expert_axis(tmp_path):
    """--ep is for the layout alone, and brings the ranks that it borrows."""
    recipe = [
        "train_qwen3.py",
        "--flavor",
        "debug_moe",
        "--model_args",
        MODEL + ",moe_ffn_dim=32",
        "--seq_len",
        32,
    ]
    stdout = run(
        launch(1, *recipe, "--check_parity", "--ep", 2, "--local_batch_size", 2, "--out", tmp_path)
    )
    assert "4 steps on layout (2 processes)" in stdout
    assert "check_parity: equal" in stdout


def test_compiled_experts_are_the_experts_with_one_graph_for_all_numbers_of_tokens():
    torch.manual_seed(0)
    torch._dynamo.reset()
    counters.clear()
    shapes = [(4, 24, 16), (4, 16, 24), (4, 24, 16)]
    stacks = []
    for shape in shapes:
        stacks.append(torch.randn(shape, dtype=torch.bfloat16).mul(0.3).requires_grad_())
    compiled = partial(
        compiled_experts,
        torch.compile(swiglu_experts, backend="aot_eager", fullgraph=True),
        swiglu_experts,
    )
    for n in (40, 7, 0, 33, 1, 2, 64):
        x = torch.randn(n, 16, dtype=torch.bfloat16)
        weight = torch.rand(n)
        counts = torch.bincount(torch.randint(0, 4, (n,)), minlength=4)
        results = []
        for function in (swiglu_experts, compiled):
            leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_(), *stacks]
            out = function(leaves[0].clone(), leaves[1].clone(), counts, *stacks)
            results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
        for ours, want in zip(*results, strict=True):
            torch.testing.assert_close(ours, want)
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


def graphs_by_step(name, problem, flags) -> list[tuple[int, int]]:
    """(graphs compiled so far, graph breaks so far) after each of four steps, on this rank."""
    torch._dynamo.reset()
    counters.clear()
    out = []
    with without_inductor():
        stages, layout = build(layouts.config(name, **problem), dict(compile=True) | flags, 4, 1)
        for step in range(4):
            parallel.forward_backward(
                stages, local_batch(global_batch(step, 4, False), layout), layout
            )
            with torch.no_grad():
                for p in (p for stage in stages for p in stage.parameters()):
                    p.sub_(p.grad, alpha=0.1)  # so that routing changes
                    p.grad = None
            if problem:
                balance_experts(stages, layout, "bias", 1e-2)
            out.append((counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())))
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, problem, flags, graphs",
    [
        ("llama3", {}, {}, 2),  # one for all blocks, and the loss
        # attention, spreading the tokens, experts for any number of tokens, bringing them back, the
        # loss
        ("qwen3", layouts.MOE, dict(ep=2, compute_dtype="bfloat16"), 5),
        ("qwen3", layouts.MOE, dict(ep=2, tp=2, compute_dtype="bfloat16"), 5),
        ("qwen3", layouts.MOE, dict(ep=2), 4),  # fp32
    ],
    ids=str,
)
def test_no_graph_breaks_and_no_recompilation(name, problem, flags, graphs):
    for steps in pool(2).run(graphs_by_step, name, problem, flags):
        assert steps == [(graphs, 0)] * 4
