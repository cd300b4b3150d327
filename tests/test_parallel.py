"""The proof, against parallel.py: every layout trains the model that one process trains.

Each row of layouts.txt runs two AdamW steps through parallel.py on real gloo processes (with
experts one: layouts.n_steps), with ragged masks, and is compared with plain torch in one process
(layouts.reference): loss atol 1e-5, every gradient rel 1e-4, grad norm rtol 2e-5, the validation
loss, the weights. docs/parallelism.md draws its support matrix from this table.
"""

import math
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from unittest import mock

import dry
import layouts
import pytest
import torch
import torch.distributed as dist
from layouts import (
    KINDS,
    build,
    compare,
    config,
    full,
    global_batch,
    layouts_of,
    local_batch,
    reference,
    train,
)
from pool import pool
from runs import column
from tables import as_parameters
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import parallel
from distributed.keep import KEPT, keep_contexts
from distributed.layout import AXES, Layout, ParallelConfig, local_tensor, reduces_always
from distributed.tp_check import STYLES
from models import llama3, moe, qwen3
from models.layers import rotate
from tools.failure import failed_module

LAYOUTS = layouts_of("layouts")
MOE = KINDS["qwen3_moe"]
MTP = KINDS["mtp"]


def axes_of(row) -> list[str]:
    """Axes that have more than one rank."""
    processes, flags, _ = row
    degrees = {axis: flags.get(axis, 1) for axis in AXES} | {
        axis: flags.get(axis, 1) for axis in ("ep", "etp")
    }
    degrees["dp_shard"] = processes // math.prod(
        degrees[axis] for axis in AXES if axis != "dp_shard"
    )
    return [axis for axis in degrees if degrees[axis] > 1]


def shows(row) -> set[tuple]:
    """What a row is there for: its axis or its pairs of axes with this kind of model, its other
    flags, its model's fields."""
    _, flags, problem = row
    kind = problem.get("model", "llama3") + "_moe" * ("n_experts" in problem)
    axes = axes_of(row)
    if len(axes) == 1:
        alone = {(kind, axis) for axis in axes}
    else:
        alone = set()
    # a Qwen3 without experts is a Llama 3 with norms of heads, which meet all pairs of axes in the
    # rows with experts
    if kind != "qwen3":
        pairs = {(kind, *pair) for pair in combinations(axes, 2)}
    else:
        pairs = set()
    others = {item for item in flags.items() if item[0] not in (*AXES, "ep", "etp")}
    return (
        alone
        | pairs
        | others
        | {(kind, *item) for item in problem.items() if item[0] not in ("n", "b", "model")}
    )


def shown_by(rows: dict) -> set[tuple]:
    return set().union(*map(shows, rows.values()))


def covering(rows: dict) -> dict:
    """The quick ones: rows that together show all that the table shows. Rows on few processes come
    first, and a row stays if it shows something that the others do not."""
    kept = dict(sorted(rows.items(), key=lambda item: item[1][0]))
    for place, row in sorted(rows.items(), key=lambda item: -item[1][0]):
        others = {other: kept[other] for other in kept if other != place}
        if shows(row) <= shown_by(others):
            kept = others
    return kept


QUICK = covering(LAYOUTS)
SLOW = {place: row for place, row in LAYOUTS.items() if place not in QUICK}


def test_the_quick_layouts_have_every_axis_and_every_pair_of_axes_with_every_kind_of_model():
    shown = shown_by(QUICK)
    assert shown == shown_by(LAYOUTS)
    for kind in ("llama3", "qwen3", "qwen3_moe", "deepseek"):
        if kind in ("qwen3_moe", "deepseek"):
            axes = [*AXES, "ep", "etp"]
        else:
            axes = AXES
        # ep and etp borrow the ranks of another axis
        assert [axis for axis in AXES if (kind, axis) not in shown] == []
        if kind != "qwen3":
            pairs = map(set, combinations(axes, 2))
        else:
            pairs = ()
        assert [
            pair for pair in pairs if not any(pair == set(x[1:]) for x in shown if x[0] == kind)
        ] == []


@pytest.mark.parametrize(
    "row",
    [
        *as_parameters(QUICK),
        *as_parameters(layouts_of("compiled")),
        *as_parameters(SLOW, pytest.mark.slow),
        *as_parameters(layouts_of("compiled, slow"), pytest.mark.slow),
    ],
)
def test_layout_equals_one_process(row):
    assert compare(*row) == ""


@pytest.mark.parametrize(
    "processes, flags",
    [
        (2, {}),
        (4, dict(dp_replicate=2)),
        pytest.param(4, dict(tp=2), marks=pytest.mark.slow),
        (2, dict(cp=2)),
        (2, dict(pp=2)),
    ],
)
def test_bf16_compute_stays_near_fp32(processes, flags):
    """Parameters, sums over ranks and the optimizer in fp32, matmuls in bf16: loss within 4e-3,
    gradient norm within 2 %."""
    want = reference(config(), 8)
    for got in pool(processes).run(train, config(), flags | {"compute_dtype": "bfloat16"}, 8, 2):
        for g, w in zip(got[:-1], want[:-1], strict=True):
            assert abs(g["loss"] - w["loss"]) < 4e-3 * w["loss"]
            assert abs(g["norm"] - w["norm"]) < 2e-2 * w["norm"]
        for weight in got[-1]["weights"].values():
            assert weight.dtype == torch.float32
        # it did compute in bf16
        assert any(g["loss"] != w["loss"] for g, w in zip(got[:-1], want[:-1], strict=True))


@pytest.mark.slow
def test_two_runs_are_equal_to_the_last_bit():
    first, second = (
        pool(4).run(train, config(), dict(tp=2, deterministic=True), 8, 2)[0] for _ in range(2)
    )
    assert column(first[:-1], "loss") == column(second[:-1], "loss")
    for fqn, w in first[-1]["weights"].items():
        assert torch.equal(w, second[-1]["weights"][fqn])


def clipped(max_norm: float) -> tuple[float, float]:
    """(the norm that clip_grad_norm returns, the norm of what it leaves behind)"""
    stages, layout = build(config(), {}, 4, 2)
    parallel.forward_backward(stages, local_batch(global_batch(0, 4, False), layout), layout)
    norm = parallel.clip_grad_norm(stages, max_norm, layout)
    return norm.item(), torch.stack(
        [full(p.grad).norm() for p in stages[0].parameters()]
    ).norm().item()


@pytest.mark.parametrize("max_norm, is_scaled", [(0.0, False), (0.1, True), (1e9, False)])
def test_gradients_are_scaled_down_to_max_norm(max_norm, is_scaled):
    """0 means never."""
    norm, after = pool(1).run(clipped, max_norm)[0]
    assert norm > 0.2
    assert after == pytest.approx(max_norm if is_scaled else norm, rel=1e-5)


# ---------------------------------------------------------------- gradients between micro-batches


def gradients_between(problem: dict, flags: dict, n: int, b: int):
    """(bytes of whole gradients, bytes of sharded ones) of this rank ahead of each micro-batch, the
    loss, the gradients."""
    stages, layout = build(config(**problem), flags, n, b)
    groups = []
    for module in stages[0].modules():
        if isinstance(module, parallel.FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                groups.append(group)
    seen = []

    def look(*args):
        params = [p for g in groups for p in g.fsdp_params]
        partial_sums = [g._partial_reduce_output for g in groups]
        whole = [p.unsharded_accumulated_grad for p in params]
        whole += [p._unsharded_param.grad for p in params if hasattr(p, "_unsharded_param")]
        parts = [*partial_sums, *(p.sharded_param.grad for p in params)]
        seen.append(
            tuple(
                sum(local_tensor(t).nbytes for t in some if t is not None)
                for some in (whole, parts)
            )
        )

    stages[0].register_forward_pre_hook(look)
    loss = parallel.forward_backward(stages, local_batch(global_batch(0, n, False), layout), layout)
    loss, _ = parallel.reduce_loss(loss, layout)
    grads = {fqn: full(p.grad) for fqn, p in stages[0].named_parameters()}
    return seen, loss.item(), grads, sum(local_tensor(p).nbytes for p in stages[0].parameters())


@pytest.mark.parametrize(
    "processes, flags, problem",
    [
        (2, {}, {}),
        (2, dict(compute_dtype="bfloat16"), {}),
        *[
            pytest.param(4, flags, problem, marks=pytest.mark.slow)
            for flags, problem in ((dict(ep=2), MOE), (dict(dp_replicate=2), {}), (dict(tp=2), {}))
        ],
    ],
    ids=str,
)
def test_gradients_that_are_reduced_after_every_micro_batch_are_never_whole(
    processes, flags, problem
):
    n = 3 * processes // flags.get("tp", 1)
    always, last = (
        pool(processes).run(gradients_between, problem, flags | dict(reduce_grads=when), n, 1)
        for when in ("always", "last")
    )
    for a, z in zip(always, last, strict=True):
        held = a[3] + 4 * config(**problem).dim * 8  # FSDP pads what its ranks do not divide
        assert a[0][0] == z[0][0] == (0, 0)
        for whole, parts in a[0][1:]:
            assert whole == 0
            assert 0 < parts <= held
        # two ranks hold what each holds whole
        for whole, parts in z[0][1:]:
            assert whole >= 1.9 * a[3]
            assert parts == 0
        assert a[1] == z[1]
        for fqn in z[2]:
            assert layouts.relative(a[2][fqn], z[2][fqn]) < 1e-6


@pytest.mark.parametrize(
    "flavor, ranks, GB, flags, always",
    [
        ("8B", 8, 85, {}, True),
        ("8B", 8, 150, {}, False),
        ("8B", 1, 85, {}, False),
        ("70B", 64, 192, {}, True),
        ("8B", 8, 85, dict(param_dtype="bfloat16"), False),
        ("8B", 8, 0, {}, False),
        ("1B", 8, 85, {}, False),
    ],
    ids=str,
)
def test_gradients_are_kept_whole_where_they_fit(flavor, ranks, GB, flags, always):
    layout = Layout(dp_shard=ranks, global_batch_size=2 * ranks, memory=int(GB * 1e9))
    found = reduces_always(layouts.on_meta(llama3.FLAVORS[flavor]), layout, ParallelConfig(**flags))
    assert found == always == ("gradients reduced after each" in layout.step_text(8192, found))


@pytest.mark.parametrize(
    "degrees, GB",
    [
        # each rank holds 16 of 128 experts whole: 58 GB of states, beside 14 GB of gradients
        (dict(dp_shard=8, ep=8), 141),
        # two ranks share a quarter of every expert: 58 GB of states, beside 35 GB of gradients
        (dict(dp_shard=2, tp=4, etp=4), 160),
    ],
    ids=str,
)
def test_experts_are_shared_between_fewer_ranks_than_the_rest(degrees, GB):
    """30B-A3B on 8 ranks."""
    config = qwen3.FLAVORS["30B-A3B"]
    layout = Layout(**degrees, global_batch_size=16, memory=int(GB * 1e9))
    with torch.device("meta"):
        model = qwen3.Qwen3(config)
        for block in model.blocks.values():
            block.moe.experts = moe.Experts(
                config.n_experts // layout.ep, config.dim, config.moe_ffn_dim // layout.etp
            )
    assert reduces_always(model, layout, ParallelConfig())


@contextmanager
def watch_dtypes(seen: dict[str, set], off: dict[str, float]):
    """seen: what reaches attention, rotation, routers and the choice of experts, by dtype; off: how
    far each norm's output is
    from the same in fp32, in units of one rounding to the output's dtype."""
    from models import attention, deepseek, llama3, moe, qwen3

    def watched(real, **picks):
        """real, noting the dtypes of these arguments by number."""

        def run(*args, **kwargs):
            for name, numbers in picks.items():
                seen[name] |= {args[i].dtype for i in numbers}
            return real(*args, **kwargs)

        return run

    def choose(self, scores, *args, real=moe.Balance.choose):
        seen["scores"] |= {scores.dtype, self.bias.dtype}
        return real(self, scores, *args)

    def norm_forward(module, args, out):
        if isinstance(module, torch.nn.RMSNorm):
            x, weight, got = (local_tensor(t).detach() for t in (args[0], module.weight, out))
            seen["norms"] |= {x.dtype, weight.dtype, got.dtype}
            want = (
                x.double()
                / (x.double().square().mean(-1, keepdim=True) + module.eps).sqrt()
                * weight.double()
            )
            error = (
                (got.double() - want).abs()
                / want.abs().clamp(min=1e-30)
                / torch.finfo(got.dtype).eps
            )
            off["norms"] = max(off.get("norms", 0.0), error.max().item())

    hook = torch.nn.modules.module.register_module_forward_hook(norm_forward)
    rotate = watched(llama3.rotate, rotated=[0], angles=[1, 2])
    sdpa = watched(attention.sdpa, attention=[0, 1, 2])
    apply_experts = watched(moe.apply_experts, inputs=[1])
    add_loss = watched(moe.Balance.add_loss, weights=[1])
    places = [(m, "rotate", rotate) for m in (llama3, qwen3, deepseek)] + [
        (m, "sdpa", sdpa) for m in (attention, parallel)
    ]
    places += [(m, "apply_experts", apply_experts) for m in (qwen3, deepseek)]
    places += [(moe.Balance, "choose", choose), (moe.Balance, "add_loss", add_loss)]
    try:
        with ExitStack() as stack:
            for owner, name, value in places:
                stack.enter_context(mock.patch.object(owner, name, value))
            yield
    finally:
        hook.remove()


def dtypes_of_a_step(problem: dict, flags: dict) -> tuple[dict, dict, dict]:
    n = 8
    stages, layout = build(config(**problem), flags | {"compute_dtype": "bfloat16"}, n, 2)
    for stage in stages:
        # ones would hide their rounding
        for norm in (m for m in stage.modules() if isinstance(m, torch.nn.RMSNorm)):
            local_tensor(norm.weight.data).uniform_(0.5, 2.0)
    seen = defaultdict(set)
    off = {}
    with watch_dtypes(seen, off):
        parallel.forward_backward(stages, local_batch(global_batch(0, n, False), layout), layout)
    grads = set()
    for stage in stages:
        for p in stage.parameters():
            if p.grad is not None:
                grads.add(str(p.grad.dtype))
    return dict(seen), off, grads


BF16 = [
    (1, {}),
    (2, dict(tp=2)),
    (2, dict(cp=2)),
    (2, dict(cp=2, cp_method="alltoall")),
    (2, dict(pp=2)),
    (2, dict(cpu_offload=True)),
    (2, dict(ac="full")),
    (2, dict(ep=2)),
    (2, dict(tp=2, etp=2)),
]


@pytest.mark.parametrize(
    "processes, flags, kind",
    [
        pytest.param(
            processes,
            flags,
            kind,
            marks=[] if flags in ({}, {"pp": 2}) or kind == "llama3" else pytest.mark.slow,
        )
        for processes, flags in BF16
        for kind in KINDS
    ],
    ids=str,
)
def test_what_a_bf16_run_computes_in_fp32(kind, processes, flags):
    """docs/numerics.md: cos and sin, scores of the router and the weights of a token's experts are
    fp32 in bf16 runs, too."""
    experts = "n_experts" in KINDS[kind] or "deepseek" in KINDS[kind].values()
    if not experts and ("ep" in flags or "etp" in flags):
        pytest.skip("has no experts")
    bf16 = {torch.bfloat16}
    fp32 = {torch.float32}
    want = {"rotated": bf16, "angles": fp32, "attention": bf16, "norms": bf16}
    if experts:
        want |= {"scores": fp32, "inputs": bf16, "weights": fp32}
    for seen, off, grads in pool(processes).run(dtypes_of_a_step, KINDS[kind], flags):
        assert seen == want
        # one rounding at the end; rounding in between, too, would make it 1 to 2
        assert off["norms"] < 0.51
        assert grads == {"torch.float32"}


def own_part_of_attention(method: str, scale: float) -> float:
    """The largest difference from attention of one process."""
    g = torch.Generator().manual_seed(2)
    q = torch.randn(2, 4, 8, 6, generator=g)
    k = torch.randn(2, 2, 8, 6, generator=g)
    v = torch.randn(2, 2, 8, 6, generator=g)
    scores = q @ k.repeat_interleave(2, 1).mT * scale
    scores = scores.masked_fill(~torch.ones(8, 8, dtype=torch.bool).tril(), -torch.inf)
    wanted = scores.softmax(-1) @ v.repeat_interleave(2, 1)

    index = parallel.sequence_index(8, 2, dist.get_rank())
    attend = METHODS[method](index.expand(2, -1), group=dist.group.WORLD)
    found = attend(q[:, :, index], k[:, :, index], v[:, :, index], scale=scale)
    return (found - wanted[:, :, index]).abs().max().item()


METHODS = {"allgather": parallel.all_gather_attention, "alltoall": parallel.all_to_all_attention}


@pytest.mark.parametrize("method", METHODS)
def test_context_parallel_attention_takes_a_scale(method):
    """As DeepSeek's with yarn."""
    for difference in pool(2).run(own_part_of_attention, method, 0.9):
        assert difference < 1e-5


# ---------------------------------------------------------------- a fork with parameters of its own


class Gain(nn.Module):
    """What docs/fork_me.md advises: a bare parameter in a module of its own, so that tp_plan has a
    name to give a style to."""

    def __init__(self, *shape):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(*shape))

    def forward(self, x):
        return x * self.gain


class ForkAttention(llama3.Attention):
    def __init__(self, config):
        super().__init__(config)
        self.per_head, self.sharpness = Gain(config.n_heads, 1), Gain(1)

    def forward(self, x, cos, sin, attend):
        B, T, _ = x.shape
        q, k, v = (w(x).view(B, T, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        q = self.sharpness(self.per_head(q))  # (B, T/cp, H/tp, K)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
        return self.wo(out.transpose(1, 2).reshape(B, T, -1))


class ForkBlock(llama3.Block):
    def __init__(self, config):
        super().__init__(config)
        self.attn, self.residual = ForkAttention(config), Gain(config.dim)
        self.ffn_norm = nn.LayerNorm(config.dim)

    def forward(self, h, cos, sin, attend):
        h = h + self.residual(self.attn(self.attn_norm(h), cos, sin, attend))
        return h + self.ffn(self.ffn_norm(h))


@dataclass(kw_only=True)
class ForkConfig(llama3.Llama3Config):
    pass


class Fork(llama3.Llama3):
    def __init__(self, config):
        super().__init__(config)
        self.blocks = nn.ModuleDict({str(i): ForkBlock(config) for i in range(config.n_layers)})

    def init_constants(self):
        return {"*.residual.gain": 0.5, "*.sharpness.gain": 1.5, "*.per_head.gain": 0.8}

    def tp_plan(self):
        attn = {"blocks.*.attn.per_head": "head_norm", "blocks.*.attn.sharpness": "head_norm"}
        return super().tp_plan() | attn | {"blocks.*.residual": "sequence"}


layouts.MODELS[ForkConfig] = Fork


@pytest.mark.parametrize(
    "processes, flags",
    [
        (2, dict(tp=2)),
        (2, {}),
        pytest.param(2, dict(pp=2), marks=pytest.mark.slow),
        pytest.param(4, dict(tp=2, cp=2), marks=pytest.mark.slow),
        pytest.param(4, dict(tp=4), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_forks_own_parameters_under_every_layout(processes, flags):
    fork = ForkConfig(**layouts.SMALL)
    results = pool(processes).run(
        train, fork, flags, 4, 4 if "pp" in flags else 2 // (2 if flags == {} else 1)
    )
    want = reference(fork, 4)
    assert [layouts.first_difference(got, want) for got in results] == [""] * processes
    for name in ("residual", "attn.sharpness", "attn.per_head"):
        assert want[0]["grads"][f"blocks.1.{name}.gain"].abs().min() > 0


# ---------------------------------------------------------------- the mesh


def test_three_views_of_one_grid():
    """The example of make_mesh's docstring, and the same ranks as experts see them."""

    def groups(mesh, axis):
        return mesh.mesh.movedim(mesh.mesh_dim_names.index(axis), -1).flatten(0, -2).tolist()

    with dry.world(dp_shard=2, cp=2, tp=2) as dense:
        pass
    assert (
        groups(dense.mesh, "tp")
        == groups(dense.full_mesh, "tp")
        == [[0, 1], [2, 3], [4, 5], [6, 7]]
    )
    assert groups(dense.full_mesh, "cp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert groups(dense.mesh, "fsdp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert dense.expert_mesh is None
    with dry.world("train_qwen3", dp_shard=2, cp=2, tp=2, ep=4, model_args=dry.MOE) as moe:
        pass
    assert groups(moe.expert_mesh, "ep") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert groups(moe.expert_mesh, "efsdp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


# ---------------------------------------------------------------- what --ac op keeps


def step_with(flags: dict, problem: dict) -> tuple[dict[str, int], float]:
    """({op: how often it ran within the backward}, loss) of one step."""
    counts = defaultdict(int)

    # entered before the checkpoint's modes: it sees what they let through
    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if torch._C._current_graph_task_id() != -1:
                counts[op._opname if hasattr(op, "_opname") else str(op)] += 1
            return op(*args, **(kwargs or {}))

    stages, layout = build(
        config(**problem), flags, 4, 4 // (2 if "ep" in flags or "dp_replicate" in flags else 1)
    )
    with Count():
        loss = parallel.forward_backward(
            stages, local_batch(global_batch(0, 4, False), layout), layout
        )
    return dict(counts), parallel.reduce_loss(loss, layout)[0].item()


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


@pytest.mark.parametrize(
    "processes, flags, problem, kept",
    [
        # short attention in bf16 is plain products on a CPU, which are computed again
        (1, dict(compute_dtype="bfloat16"), MOE, ["_grouped_mm", "topk", "sort"]),
        (1, dict(compute_dtype="bfloat16"), MTP, ["_grouped_mm", "topk", "sort"]),
        (2, dict(ep=2), MOE, [ATTENTION, "_grouped_mm", "all_to_all_single", "topk", "sort"]),
        (2, dict(dp_replicate=2), MOE, [ATTENTION, "_grouped_mm", "topk", "sort"]),
        (2, dict(tp=2, etp=2), MOE, [ATTENTION, "_grouped_mm", "reduce_scatter_tensor"]),
        (2, dict(cp=2, cp_method="alltoall"), {}, [ATTENTION, "all_to_all_single"]),
    ],
    ids=str,
)
def test_ac_op_keeps_what_is_dear_to_compute_or_send_again(processes, flags, problem, kept):
    """Within the backward, these ops run as often as without checkpointing, where --ac full runs
    them again."""
    steps = {}
    for ac in ("none", "op", "full"):
        steps[ac] = pool(processes).run(step_with, flags | {"ac": ac}, problem)[0]
    (none, loss), (op, op_loss), (full, full_loss) = steps.values()
    for name in kept:
        assert none.get(name, 0) == op.get(name, 0) < full[name], name
    assert none["mm"] < op["mm"] < full["mm"]
    assert loss == op_loss == full_loss


def test_ac_op_keeps_float8_matmuls():
    x = torch.randn(16, 16).to(torch.float8_e4m3fn)
    one = torch.ones(())
    forward, recompute = keep_contexts(False)
    with forward:
        kept = torch._scaled_mm(x, x.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    with recompute:
        again = torch._scaled_mm(x, x.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    assert again.data_ptr() == kept.data_ptr()
    # of GPUs only
    assert {
        "aten::_scaled_mm_v2",
        "aten::_scaled_grouped_mm",
        "aten::_scaled_grouped_mm_v2",
    } <= KEPT
    assert "flex_attention" in KEPT


def where_it_fails(flags: dict) -> str:
    """A fork whose own style leaves a module as it is, with the shape of all heads."""
    plan = Fork.tp_plan
    styles = {"own": parallel.GatherSequence}

    def own(self):
        return plan(self) | {"blocks.*.attn.per_head": "own"}

    with mock.patch.object(Fork, "tp_plan", own), mock.patch.dict(parallel.TP_STYLES, styles):
        stages, layout = build(ForkConfig(**layouts.SMALL), flags, 4, 4)
        try:
            parallel.forward_backward(
                stages, local_batch(global_batch(0, 4, False), layout), layout
            )
        except RuntimeError as error:
            return failed_module(error)


def test_an_error_names_the_module_in_which_it_happened():
    """--check_parity shows this line of the layout's half."""
    name = " (in blocks.0.attn.per_head, a Gain)"
    hint = f'; under tp "blocks.*.attn.per_head" needs a style in tp_plan: {STYLES}'
    assert pool(2).run(where_it_fails, dict(tp=2)) == [name + hint] * 2
    assert pool(2).run(where_it_fails, dict(tp=2, ac="full")) == [name + hint] * 2
    assert pool(1).run(where_it_fails, {}) == [None]
    assert failed_module(ValueError("no model")) == ""
    model = nn.Identity()
    model.register_forward_pre_hook(mock.Mock(side_effect=RuntimeError("Tensor and DTensor")))
    with pytest.raises(RuntimeError) as found:
        model(1)
    assert 'a "head" is given to self.token_loss(..., kernel=YOURS), not called' in failed_module(
        found.value
    )


def where_a_style_is_wrong(flags: dict) -> str:
    """A matrix whose input is split is given the style of one whose input is whole."""
    plan = llama3.Llama3.tp_plan

    def wrong(self):
        return plan(self) | {"blocks.*.attn.wo": "colwise"}

    with mock.patch.object(llama3.Llama3, "tp_plan", wrong):
        stages, layout = build(config(), flags, 4, 4)
        try:
            parallel.forward_backward(
                stages, local_batch(global_batch(0, 4, False), layout), layout
            )
        except RuntimeError as error:
            return failed_module(error)


def test_an_error_of_shapes_under_tp_names_the_styles():
    for said in pool(2).run(where_a_style_is_wrong, dict(tp=2)):
        assert said.startswith(" (in blocks.0.attn.wo, a Linear); under tp the styles in tp_plan")
        assert said.endswith('one may be wrong: "blocks.*.attn.wo": "colwise"')
