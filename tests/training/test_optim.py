"""Optimizers, against training/optim.py: Muon equals torch's, on shards as on whole matrices; AdamW
that rounds by chance, or keeps its moments in bfloat16."""

from functools import partial
from unittest import mock

import pytest
import torch
from layouts import build, config, full, global_batch, local_batch, on_meta, relative
from muon import EXPERTS, OPTIONS, steps
from pool import pool
from saves import saver

import parallel
import train_qwen3
from distributed.layout import local_tensor
from distributed.refusals import check_layout
from forks.normuon import NorMuon
from forks.polar_express import PolarExpress
from training import muon as stacks
from training.muon import Muon
from training.optim import adamw, skip_if_not_finite


def test_equals_torch_on_plain_matrices():
    def train(kind):
        torch.manual_seed(0)
        params = []
        for shape in ((8, 24), (24, 8), (8, 24), (16, 16)):
            params.append(torch.nn.Parameter(torch.randn(shape)))
        optimizer = kind(params, **OPTIONS)
        for step in range(3):
            for i, p in enumerate(params):
                p.grad = torch.randn(
                    p.shape, generator=torch.Generator().manual_seed(10 * step + i)
                )
            optimizer.step()
        return params

    for ours, theirs in zip(train(Muon), train(torch.optim.Muon), strict=True):
        difference = (ours - theirs).abs().max().item()
        assert difference == 0, f"a matrix {tuple(ours.shape)} is not torch.optim.Muon's"


@pytest.mark.parametrize(
    "kind", [Muon, *(pytest.param(k, marks=pytest.mark.slow) for k in (NorMuon, PolarExpress))]
)
@pytest.mark.parametrize(
    "processes, flags, problem",
    [
        (2, {}, {}),
        (4, dict(dp_replicate=2), {}),
        (4, dict(tp=2), {}),
        (2, dict(pp=2), {}),
        # experts of ep, of FSDP, of both (with a copy); uneven shares (2, 2, 2, 0); fewer experts than
        # ranks
        pytest.param(4, dict(tp=2, ep=4, etp=1), EXPERTS, marks=pytest.mark.slow),
        (4, dict(dp_replicate=2, ep=2), EXPERTS),
        pytest.param(4, {}, EXPERTS, marks=pytest.mark.slow),
        pytest.param(4, {}, {}, marks=pytest.mark.slow),
        pytest.param(4, {}, EXPERTS | dict(n_experts=6), marks=pytest.mark.slow),
        pytest.param(4, dict(pp=2, ep=2), EXPERTS, marks=pytest.mark.slow),
        (4, {}, EXPERTS | dict(n_experts=2)),
    ],
    ids=str,
)
def test_sharded_equals_whole(kind, processes, flags, problem):
    whole = pool(1).run(steps, {}, processes, problem, kind)[0]
    for part in pool(processes).run(steps, flags, processes, problem, kind):
        # a matrix product of another batch may round its bf16 result otherwise: a few ulps
        for fqn, weight in part.items():
            # three steps move a weight by a quarter
            assert relative(weight, whole[fqn]) < 3e-3, fqn


@pytest.mark.parametrize("kind", [Muon, PolarExpress])
@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (3, 24, 40)], ids=str)
def test_fp32_of_the_proof_differs_from_bf16_by_its_rounding_only(monkeypatch, kind, shape):
    """--check_parity sets Muon.dtype: the same polynomial, near to float64's."""
    optimizer = kind([torch.zeros(2, 2)], **OPTIONS)
    update = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    results = {}
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        monkeypatch.setattr(Muon, "dtype", dtype)
        results[dtype] = optimizer.orthogonalize(update.clone(), optimizer.param_groups[0])
        assert results[dtype].dtype == dtype
    exact = results[torch.float64]
    assert relative(results[torch.float32].double(), exact) < 1e-5
    assert 1e-3 < relative(results[torch.bfloat16].double(), exact) < 0.2


def test_split_experts_are_refused():
    cfg = train_qwen3.Config(flavor="debug_moe", optimizer="muon", tp=2, etp=2)
    with pytest.raises(
        ValueError, match="^--optimizer muon needs whole matrices, but --etp 2 splits every expert"
    ):
        check_layout(
            cfg,
            train_qwen3.FLAVORS["debug_moe"],
            seq_len=64,
            local_batch_size=2,
            global_batch_size=-1,
            world_size=2,
        )


@pytest.mark.parametrize("at_once", [1 << 25, 1200])  # all at once, and two at a time of 8
def test_stacks_of_experts_equal_torch_expert_by_expert(monkeypatch, at_once):
    monkeypatch.setattr(stacks, "AT_ONCE", at_once)
    torch.manual_seed(0)
    begin = [torch.randn(shape) for shape in ((8, 16, 32), (8, 32, 16), (8, 16, 32), (3, 8, 8))]
    params, each = (
        [torch.nn.Parameter(t.clone()) for t in begin],
        [torch.nn.Parameter(m.clone()) for t in begin for m in t],
    )
    ours, theirs = Muon(params, **OPTIONS), torch.optim.Muon(each, **OPTIONS)
    for step in range(4):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i))
            p.grad[0] *= step > 1  # the first expert gets no token at first
        for matrix, grad in zip(each, [grad for p in params for grad in p.grad], strict=True):
            matrix.grad = grad.clone()
        ours.step()
        theirs.step()
    found = [matrix for p in params for matrix in p]
    assert len(found) == len(each) == 27
    for matrix, expected, was in zip(found, each, (m for t in begin for m in t), strict=True):
        assert (matrix - expected).abs().max() <= 1e-6 < 1e-2 < (matrix - was).abs().max()
    assert [list(ours.state[p]) for p in params] == [["momentum_buffer"]] * 4


def test_experts_and_matrices_of_blocks_are_muons():
    model = on_meta(config("qwen3", n_experts=8, top_k=2, moe_ffn_dim=32))
    muon = train_qwen3.build_optimizers([model], train_qwen3.Config(optimizer="muon"))[-1]
    mine = {p for group in muon.param_groups for p in group["params"]}
    assert mine == {
        p for fqn, p in model.named_parameters() if fqn.startswith("blocks.") and p.dim() > 1
    }


# ---------------------------------------------------------------- AdamW with fewer bits

MODEL = dict(dim=128, n_layers=2, head_dim=32, n_heads=4, n_kv_heads=4, ffn_dim=256, vocab_size=128)


def test_stochastic_rounding_keeps_small_updates():
    """A step of a thousandth of the weights is less than half of what bf16 can show: rounded to
    nearest, nothing would move."""

    def moved(kind):
        torch.manual_seed(0)
        p = torch.nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
        optimizer = adamw([{"params": [p], "weight_decay": 0.0}], 1e-3, (0.9, 0.95), 1e-8, kind)
        with mock.patch.object(torch, "compile", not_compiled):
            for _ in range(20):
                p.grad = torch.ones_like(p)
                optimizer.step()
        return 1 - p.float().mean().item()

    assert moved("adamw") == 0
    assert moved("adamw_sr") == pytest.approx(0.02, rel=0.1)


MOMENTS = ("exp_avg", "exp_avg_sq")


def adamw_steps(flags, n, kind="adamw_bf16_moments", out=None, first=0, last=4):
    """(weights and moments by name, bytes of the moments) after steps of AdamW with gradients that
    are the same in every layout: the sine of the weights. out: see steps() in tests/muon.py."""
    local_batch_size = 2 if flags.get("pp", 1) > 1 else 1
    stages, layout = build(config(**MODEL), flags, n, local_batch_size)
    named = [pair for s in stages for pair in s.named_parameters()]
    optimizer = adamw([{"params": [p for _, p in named]}], 1e-2, (0.9, 0.95), 1e-8, kind)
    parallel.forward_backward(stages, local_batch(global_batch(0, n, False), layout), layout)
    checkpoints = None
    if out:
        checkpoints = saver(stages, [optimizer], out)
    if first:
        checkpoints.load()
    for _ in range(first, last):
        for _, p in named:
            p.grad = p.detach().sin()
        optimizer.step()
    if out and not first:
        checkpoints.save(last, {}, last=True)
    found = {}
    size = 0
    for fqn, p in named:
        found[fqn] = full(p)
        for name in MOMENTS:
            moment = optimizer.state[p][name]
            found[f"{fqn} {name}"] = full(moment)
            size += local_tensor(moment).nbytes
    return found, size


def test_moments_in_bfloat16_take_half_of_the_memory_and_follow_adamw():
    found, size = pool(1).run(adamw_steps, {}, 4)[0]
    wanted, usual_size = pool(1).run(adamw_steps, {}, 4, "adamw")[0]
    first, _ = pool(1).run(adamw_steps, {}, 4, "adamw", None, 0, 1)[0]
    assert size * 2 == usual_size > 0
    for name, t in found.items():
        if name.endswith(MOMENTS):
            assert t.dtype == torch.bfloat16
            assert relative(t.float(), wanted[name]) < 5e-3
        else:
            assert t.dtype == torch.float32
            # the first step is that of moments which were never rounded
            assert 0 < relative(t - first[name], wanted[name] - first[name]) < 5e-3


@pytest.mark.parametrize("n, flags", [(2, {}), (2, dict(tp=2)), (2, dict(pp=2))], ids=str)
def test_moments_in_bfloat16_are_equal_on_every_layout(n, flags):
    whole = pool(1).run(adamw_steps, {}, n)[0][0]
    seen = set()
    for part, _ in pool(n).run(adamw_steps, flags, n):
        seen |= part.keys()
        for name, t in part.items():
            assert torch.equal(t, whole[name]), name
    assert seen == whole.keys()


def test_moments_in_bfloat16_come_back_on_another_layout(tmp_path):
    kind = "adamw_bf16_moments"
    through = pool(1).run(adamw_steps, {}, 2)[0][0]
    pool(2).run(adamw_steps, {}, 2, kind, str(tmp_path), 0, 2)
    for part, _ in pool(2).run(adamw_steps, dict(tp=2), 2, kind, str(tmp_path), 2, 4):
        for name, t in part.items():
            assert t.dtype == through[name].dtype
            assert torch.equal(t, through[name]), name


@pytest.mark.parametrize(
    "flags, words",
    [
        (dict(param_dtype="bfloat16"), "needs --param_dtype float32, not bfloat16"),
        (dict(beta2=0.999), "of at most 0.99"),
    ],
)
def test_what_moments_in_bfloat16_need(flags, words):
    with pytest.raises(ValueError, match=f"^--optimizer adamw_bf16_moments .*{words}"):
        train_qwen3.Config(optimizer="adamw_bf16_moments", **flags)


def rounded_copies(flags: dict) -> dict:
    torch.manual_seed(0)  # as connect does on every rank
    stages, layout = build(config(**MODEL), {**flags, "param_dtype": "bfloat16"}, 4, 2)
    optimizer = adamw(
        [{"params": list(stages[0].parameters())}], 3e-3, (0.9, 0.95), 1e-8, "adamw_sr"
    )
    with mock.patch.object(torch, "compile", not_compiled):
        for step in range(3):
            parallel.forward_backward(
                stages, local_batch(global_batch(step, 4, False), layout), layout
            )
            optimizer.step()
            optimizer.zero_grad()
    return {fqn: local_tensor(p.detach()).clone() for fqn, p in stages[0].named_parameters()}


def test_copies_are_rounded_alike():
    """Chance must be the same on ranks that hold the same weights, or they would drift apart."""
    first, second = pool(2).run(rounded_copies, dict(dp_replicate=2, dp_shard=1))
    for key in first:
        assert torch.equal(first[key], second[key])


# -------------------------------------------------------------- a step whose gradient is not finite


class Lion(torch.optim.Optimizer):
    """As somebody writes it into a copy of a recipe: it has never heard of found_inf."""

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.mul_(1 - group["lr"] * 0.1).sub_(m.lerp(p.grad, 0.1).sign() * group["lr"])
                    m.lerp_(p.grad, 0.01)


OPTIMIZERS = {
    "lion": partial(Lion, lr=1e-2),
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "sgd, no state": partial(torch.optim.SGD, lr=1e-2, weight_decay=0.1, fused=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-2, foreach=True),
    "adamw, fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "adamw, moments in bfloat16": partial(
        adamw, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, kind="adamw_bf16_moments"
    ),
    "adafactor": partial(torch.optim.Adafactor, lr=1e-2, weight_decay=0.1),
    "muon": partial(Muon, **OPTIONS),
    "normuon": partial(NorMuon, **OPTIONS),
    "torch's muon": partial(torch.optim.Muon, **OPTIONS),
    "torchao's": partial(adamw, lr=1e-2, betas=(0.9, 0.95), eps=1e-8, kind="adamw_sr"),
}


def make_optimizer(kind: str, params: list):
    if "muon" in kind:
        params = [p for p in params if p.dim() == 2]
    if kind in ("torchao's", "adamw, moments in bfloat16"):
        params = [{"params": params}]
    return OPTIMIZERS[kind](params)


def not_compiled(function, **options):
    """In place of torch.compile."""
    return function


def skipped(kind: str, flags: dict, n: int, bad: set, rank: int) -> list:
    """(weights, state) after each of four steps, of which `bad` have a NaN in one gradient of this
    rank."""
    local_batch_size = n // flags.get("dp_shard", 1)
    stages, layout = build(config(**MODEL), flags, n, local_batch_size)
    params = [p for s in stages for p in s.parameters()]
    optimizer = make_optimizer(kind, params)
    out = []
    with mock.patch.object(torch, "compile", not_compiled):
        for step in range(4):
            for i, p in enumerate(params):
                if step in bad:
                    moves = 0
                else:
                    moves = step
                p.grad = (p.detach() + moves + i).sin()
            if step in bad and layout.rank == rank:
                local_tensor(stages[0].blocks["1"].attn.wo.weight.grad)[1, 1] = float("nan")
            norm = parallel.clip_grad_norm(stages, 1.0, layout)
            assert norm.isfinite() == (step not in bad)
            skip_if_not_finite([optimizer], norm)
            optimizer.step()
            optimizer.zero_grad()
            state = {}
            for i, p in enumerate(params):
                for name, t in optimizer.state.get(p, {}).items():
                    if isinstance(t, torch.Tensor):
                        state[(i, name)] = t.clone()
                    else:
                        state[(i, name)] = t
            out.append(({i: p.detach().clone() for i, p in enumerate(params)}, state))
    return out


def same(a: dict, b: dict) -> bool:
    def equal(x, y):
        if isinstance(x, torch.Tensor):
            return torch.equal(local_tensor(x), local_tensor(y))
        return x == y

    if a.keys() != b.keys():
        return False
    return all(equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("kind", ["adamw, fused", "adamw, moments in bfloat16", "muon", "normuon"])
def test_the_device_skips_a_step_without_a_wait_of_the_host(kind):
    """A host that decides has read the norm, and removes the gradients."""
    weight = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = make_optimizer(kind, [weight])
    for norm in 1.0, float("inf"):
        weight.grad = torch.ones(4, 4)
        before = weight.detach().clone()
        skip_if_not_finite([optimizer], torch.tensor(norm))
        optimizer.step()
        assert weight.grad is not None
    assert torch.equal(weight, before)


LAYOUTS = [(1, {}), (2, dict(dp_shard=2)), (2, dict(tp=2))]


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_a_step_that_is_not_finite_changes_nothing(kind):
    """Weights, moments and step counters, whatever the optimizer knows of found_inf, and wherever
    the NaN is."""
    layouts = LAYOUTS[
        : {"lion": 3, "adamw, fused": 3, "muon": 2, "adamw, moments in bfloat16": 2}.get(kind, 1)
    ]
    for processes, flags in layouts:
        for told in pool(processes).run(skipped, kind, flags, 4, {2}, processes - 1):
            (weights, state), (after, state_after) = told[1], told[2]
            assert same(weights, after), flags
            assert same(state, state_after), flags
            assert not same(after, told[3][0])
            for p in map(local_tensor, told[3][0].values()):
                assert p.isfinite().all()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            k, marks=[] if k in ("lion", "sgd, fused", "adamw, fused") else pytest.mark.slow
        )
        for k in OPTIMIZERS
    ],
)
def test_a_first_step_that_is_not_finite_leaves_nothing_behind(kind):
    """Neither does it count as the first one, in which some optimizers fill their moments in
    another way."""
    begin, one = (
        pool(1).run(skipped, kind, {}, 4, {0, 1}, 0)[0],
        pool(1).run(skipped, kind, {}, 4, {0, 1, 3}, 0)[0],
    )
    assert same(begin[0][0], begin[1][0])
    assert same(begin[2][0], one[3][0])
    assert same(begin[2][1], one[3][1])
    for p in map(local_tensor, begin[3][0].values()):
        assert p.isfinite().all()
    states = [t for t in begin[2][1].values() if isinstance(t, torch.Tensor)]
    for t in states:
        assert local_tensor(t).isfinite().all()
