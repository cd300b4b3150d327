"""forks/normuon.py, polar_express.py and qk_clip.py: by their formulas, and on layouts (Muons:
test_optim.py has the table)."""

from functools import partial

import pytest
import torch
from guide import FLAGS, write_copy
from layouts import build, config, full, global_batch, local_batch, on_meta, relative
from muon import EXPERTS, OPTIONS, steps
from pool import pool
from runs import ENV, MLA, REPO, launch, run, train_lines
from saves import refuses
from torch.optim._muon import _zeropower_via_newtonschulz

from forks.normuon import NorMuon
from forks.polar_express import SCHEDULE, PolarExpress
from forks.qk_clip import QKClip
from parallel import evaluate, forward_backward


def test_normuon_is_the_formula(monkeypatch):
    """Of the authors' code, matrix by matrix, with the step size of match_rms_adamw: 0.2
    sqrt(longer side) lr."""
    monkeypatch.setattr("training.muon.AT_ONCE", 300)  # of the stack, two matrices at a time
    torch.manual_seed(0)
    begin = [torch.randn(shape) for shape in ((8, 24), (24, 8), (8, 24), (3, 8, 16))]
    params = [torch.nn.Parameter(t.clone()) for t in begin]
    state = {}
    optimizer = NorMuon(params, **OPTIONS)
    was = []
    for t in begin:
        if t.dim() == 3:
            was.extend(t)
        else:
            was.append(t)
    want = list(was)
    for _ in range(3):
        for p in params:
            # long rows and short rows
            p.grad = torch.randn(p.shape) * torch.linspace(0.1, 3, p.shape[-2])[:, None]
        for i, grad in enumerate(m for p in params for m in (p.grad if p.dim() == 3 else [p.grad])):
            momentum, squares = state.get(i, (torch.zeros_like(grad), torch.zeros(len(grad), 1)))
            momentum = 0.95 * momentum + 0.05 * grad
            o = _zeropower_via_newtonschulz(
                0.05 * grad + 0.95 * momentum, (3.4445, -4.775, 2.0315), 5, 1e-7
            ).float()
            squares = 0.95 * squares + 0.05 * (o**2).mean(1, keepdim=True)
            state[i] = momentum, squares
            rows = o / squares.sqrt()
            want[i] = (
                want[i] * (1 - 0.01 * 0.1)
                - 0.01 * 0.2 * max(o.shape) ** 0.5 * rows * o.norm() / rows.norm()
            )
        optimizer.step()
    found = []
    for p in params:
        if p.dim() == 3:
            found.extend(p)
        else:
            found.append(p)
    for a, b, c in zip(found, want, was, strict=True):
        assert relative(a.detach() - c, b - c) < 2e-3
    assert [optimizer.state[p]["row_squares"].shape for p in params[1:]] == [(24,), (8,), (3, 8)]


def test_polar_express_makes_singular_values_equal():
    x = torch.logspace(-3, 0, 1000, dtype=torch.float64)
    for a, b, c in SCHEDULE:
        x = a * x + b * x**3 + c * x**5
    assert (x - 1).abs().max() < 0.124 + 1e-3  # without the margin of SAFETY
    left, _, right = torch.linalg.svd(
        torch.randn(24, 16, generator=torch.Generator().manual_seed(0)), full_matrices=False
    )
    update = left @ torch.diag(torch.logspace(-2.5, 0, 16)) @ right
    optimizer = PolarExpress([torch.nn.Parameter(update)])
    orthogonalize = optimizer.orthogonalize
    group = optimizer.param_groups[0]
    for found in orthogonalize(update, group), orthogonalize(update.mT[None], group)[0].mT:
        assert ((left.mT @ found.float() @ right.mT).diagonal() - 1).abs().max() < 0.17


@pytest.mark.parametrize(
    "a, layout_a, b, layout_b, problem",
    [
        (2, {}, 1, {}, {}),
        (4, dict(tp=2), 2, dict(pp=2), {}),
        (4, dict(dp_replicate=2, ep=2), 1, {}, EXPERTS),
    ],
    ids=str,
)
def test_normuon_continues_on_another_layout(tmp_path, a, layout_a, b, layout_b, problem):
    whole = pool(1).run(steps, {}, 4, problem, NorMuon)[0]
    saved = {}
    for part in pool(a).run(steps, layout_a, 4, problem, NorMuon, tmp_path, 0, 2):
        for key, t in part.items():
            saved[key] = t
    for loaded, third in zip(
        *(pool(b).run(steps, layout_b, 4, problem, NorMuon, tmp_path, 2, last) for last in (2, 3))
    ):
        assert any("row_squares" in key for key in loaded)
        for key, t in loaded.items():
            assert torch.equal(t, saved[key])
            assert t.any()
        for key, t in third.items():
            assert relative(t, whole[key]) < 3e-3


LATENT = dict(model="deepseek", n_layers=3, n_dense_layers=2, mtp_depth=1)


def watched(attend, seen, q, k, v, scale):
    seen.append((q @ k.mT).max().item() * scale)
    return attend(q, k, v, scale=scale)


def clipped(flags, problem, tau, norm=1.0):
    """Weights and [largest logit, of each head] before and after a clip, of a model whose queries
    are large."""
    stages, layout = build(config(**LATENT | problem), flags, 4, 2)
    clip = QKClip(stages, layout, tau)
    batch = local_batch(global_batch(0, 4, True), layout)
    found = []
    names = ("wq.weight", "wq_b.weight", "wkv_b.weight")
    params = {}
    for stage in stages:
        for fqn, p in stage.named_parameters():
            if fqn.endswith(names):
                params[fqn] = p
    for fqn, p in params.items():
        p.detach().mul_(1 if "wkv_b" in fqn else 40)
    evaluate(stages, [batch], layout)
    assert clip.logits.isneginf().all()
    seen = []
    make = stages[0].make_attend
    stages[0].make_attend = lambda *args: partial(watched, make(*args), seen)
    for _ in range(2):
        before = {fqn: full(p) for fqn, p in params.items()}
        forward_backward(stages, batch, layout)
        parts = clip.logits.clone()
        found.append((before, parts, clip.step(torch.tensor(norm))["max_logit"].item()))
        assert flags or max(seen) == pytest.approx(found[-1][2])
        seen.clear()
    return found


def test_qk_clip_brings_the_largest_logit_of_each_head_to_tau():
    (before, logits, largest), (after, later, _) = pool(1).run(clipped, {}, {}, 1.2)[0]
    assert largest == logits.max()
    assert 0 < (logits[0] > 1.2).sum() < logits.shape[1]
    # a later layer also sees other activations
    torch.testing.assert_close(later[0], logits[0].clamp(max=1.2))
    (k, v), kv = (
        w["blocks.0.attn.wkv_b.weight"].unflatten(0, (-1, 16)).split(8, 1) for w in (before, after)
    )
    torch.testing.assert_close(kv, (k * (1.2 / logits[0]).clamp(max=1).sqrt()[:, None, None], v))
    refuses(
        "QKClip knows latent attention .* and blocks.0.attn is another",
        QKClip,
        [on_meta(config())],
        None,
    )
    # above all logits, and in a step that is skipped
    for kept, norm in ((2.0, 1.0), (1.2, float("inf"))):
        (before, *_), (after, *_) = pool(1).run(clipped, {}, {}, kept, norm)[0]
        for fqn in before:
            assert torch.equal(after[fqn], before[fqn])


@pytest.mark.parametrize(
    "processes, flags, problem",
    [
        (4, dict(tp=2), {}),
        (2, dict(cp=2), dict(q_lora_rank=0)),
        (2, dict(pp=2), {}),
        pytest.param(
            4,
            dict(dp_replicate=2, cp=2, ac="full", cp_method="alltoall"),
            {},
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_qk_clip_is_the_same_on_layouts(processes, flags, problem):
    (before, _, largest), (whole, *_) = pool(1).run(clipped, {}, problem, 1.1)[0]
    for fqn in whole:
        assert not torch.equal(whole[fqn], before[fqn])
    for (_, _, here), (after, *_) in pool(processes).run(clipped, flags, problem, 1.1):
        assert here == pytest.approx(largest)
        for fqn, weight in after.items():
            torch.testing.assert_close(weight, whole[fqn], msg=fqn)


# ---------------------------------------------------------------- by the lines of docs/fork_me.md
def call(folder, processes, *argv):
    return run(launch(processes, *argv), folder, env=ENV | {"PYTHONPATH": str(REPO)})


@pytest.mark.slow
def test_recipes_are_equal_on_layouts(tmp_path):
    write_copy(tmp_path / "muon.py", "Variants of Muon")
    write_copy(tmp_path / "clip.py", "A clip of attention logits", original="train_deepseek.py")
    flags = [*FLAGS[4:-2], "--steps", 2, "--log_every", 1, "--checkpoint_every", 0]
    muon = ["muon.py", *FLAGS[2:4], "--optimizer", "muon"]
    clip = ["clip.py", "--model_args", MLA, "--qk_clip", 0.01]
    for argv in [*muon, "--dp_shard", 2], [*clip, "--tp", 2, "--pp", 2]:
        assert "check_parity: equal" in call(tmp_path, 1, *argv, *flags, "--check_parity")
    call(tmp_path, 1, *clip, *flags, "--out", "run")
    for line in train_lines(tmp_path / "run"):
        assert line["max_logit"] > 0.01
