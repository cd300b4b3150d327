"""LoRA, against lora/lora.py: every layout trains the same adapters as one process, and nothing
else."""

import inspect
import textwrap
from functools import partial
from unittest import mock

import dry
import layouts
import pytest
import torch
from adapters import ALL, LORA, MLA
from collectives import count
from layouts import (
    MODELS,
    Flags,
    build,
    compare,
    config,
    full,
    global_batch,
    initialised,
    local_batch,
    on_meta,
)
from pool import pool
from saves import refuses
from tables import as_parameters

import distributed.checks
import distributed.experts
import lora.lora
import parallel
from distributed.cast import CastUnit
from distributed.checks import check_memory
from distributed.layout import Layout, local_tensor, reduces_always
from flags.config import override_fields
from lora.lora import check_lora, lora_counts, lora_linears
from models.llama3 import FLAVORS
from storage.adapters import is_adapter, lora_names
from storage.hf import save_hf

MOE, MTP = layouts.KINDS["qwen3_moe"], layouts.KINDS["mtp"]
WORDS = dict(LORA=LORA, ALL=ALL, MLA=MLA)  # in the rows of layouts.txt


def test_an_adapter_is_scaled_by_alpha_over_rank():
    """Measured at a linear, so that a wrong scale is not only a gradient norm in the sixth digit."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 6, bias=False))
    base = model[0].weight.detach().clone()
    lora.lora.add_adapters(model, ["0"], rank=4, alpha=6)
    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))
    adapter = x @ model[0].lora_a.weight.T @ model[0].lora_b.weight.T
    scale = (((model(x) - x @ base.T) * adapter).sum() / adapter.square().sum()).item()
    assert scale == pytest.approx(6 / 4, rel=1e-5), (
        f"B A x is added {scale:.4g} times, not lora_alpha / lora_rank = 6 / 4 times"
    )
    merged = (model[0].merged() - base) / (model[0].lora_b.weight @ model[0].lora_a.weight)
    assert merged.median().item() == pytest.approx(6 / 4, rel=1e-3), "the merged weight"


@pytest.mark.parametrize(
    "row",
    [
        *as_parameters(layouts.layouts_of("lora", **WORDS)),
        *as_parameters(layouts.layouts_of("lora, slow", **WORDS), pytest.mark.slow),
    ],
)
def test_layout_equals_one_process(row):
    assert compare(*row) == ""


def changed_forward(old: str, new: str):
    """Adapted.forward with a change in the source."""
    source = textwrap.dedent(inspect.getsource(lora.lora.Adapted.forward)).replace(
        "super()", "super(Adapted, self)"
    )
    assert source.count(old) == 1
    names = {}
    exec(source.replace(old, new), vars(lora.lora), names)
    return mock.patch.object(lora.lora.Adapted, "forward", names["forward"])


@pytest.mark.parametrize("grad, named", [("a_grad", "wq.lora_a"), ("b_grad", "wo.lora_b")])
def test_a_gradient_that_is_not_summed_over_tp_is_caught_and_named(grad, named):
    """Of A, where tp cuts the columns; of B, where tp cuts the rows."""
    mutant = partial(changed_forward, f"{grad} = Partial()", f"{grad} = Replicate()")
    assert f"gradient of blocks.0.attn.{named}.weight" in compare(
        2, LORA | dict(tp=2), dict(n=4, b=2), mutate=mutant
    )


# ----------------------------------------------------------- adapters are trained, and nothing else
@pytest.mark.parametrize(
    "problem, flags", [({}, ALL), (MOE, LORA), (MTP, MLA)], ids=["llama3", "qwen3", "deepseek"]
)
def test_adapters_add_scale_b_a_x(problem, flags):
    cfg, b = Flags(lora_alpha=6, **flags), global_batch(0, 4, False)
    model = initialised(config(**problem), cfg, 3)
    base = MODELS[type(model.config)](model.config)
    layouts.draw_weights(base, Layout(), 3)
    weights, adapters = (
        base.state_dict(),
        {n: p.detach() for n, p in model.named_parameters() if is_adapter(n)},
    )
    names = lora_names(base, cfg.lora_on)
    assert adapters.keys() == {f"{name}.lora_{x}.weight" for name in names for x in "ab"}
    for name in names:
        merged = (
            weights[f"{name}.weight"]
            + 6 / 4 * adapters[f"{name}.lora_b.weight"] @ adapters[f"{name}.lora_a.weight"]
        )
        weights[f"{name}.weight"].copy_(merged)
    with torch.no_grad():
        torch.testing.assert_close(model(b.tokens), base(b.tokens), rtol=0, atol=1e-5)


def two_steps(problem: dict, flags: dict) -> tuple:
    """Two steps from B = 0, as in a recipe: (gradients of the second step by fqn, difference of the
    first loss to the model without adapters, frozen parameters that moved, biases that moved,
    numbers of gradients and of optimizer state)."""
    stages, layout = build(config(**problem), flags, 4, 4 // max(1, flags.get("dp_shard", 1)))
    plain, _ = build(
        config(**problem),
        {k: v for k, v in flags.items() if "lora" not in k},
        4,
        layout.local_batch_size,
    )
    params = {fqn: p for s in stages for fqn, p in s.named_parameters()}
    frozen = {fqn: full(p) for fqn, p in params.items() if not p.requires_grad}
    optimizer = torch.optim.AdamW([p for p in params.values() if p.requires_grad], lr=layouts.LR)
    losses = []
    for s in (plain, stages):
        losses.append(
            parallel.reduce_loss(
                parallel.forward_backward(
                    s, local_batch(global_batch(0, 4, False), layout), layout
                ),
                layout,
            )
        )
    numbers = sum(local_tensor(p.grad).numel() for p in params.values() if p.grad is not None)
    optimizer.step()
    optimizer.zero_grad()
    if layout.has_experts:
        distributed.experts.balance_experts(stages, layout, "bias", 1e-2)
    parallel.forward_backward(stages, local_batch(global_batch(1, 4, False), layout), layout)
    optimizer.step()
    grads = {fqn: full(p.grad) for fqn, p in params.items() if p.grad is not None}
    state = sum(
        local_tensor(t).numel()
        for s in optimizer.state.values()
        for name, t in s.items()
        if name != "step"
    )
    moved = [fqn for fqn, before in frozen.items() if not torch.equal(before, full(params[fqn]))]
    biases = [n for s in stages for n, b in s.named_buffers() if b.any()]
    return grads, (losses[0][0] - losses[1][0]).abs().item(), moved, biases, numbers, state


@pytest.mark.parametrize(
    "processes, problem, flags",
    [(1, MOE, LORA), (1, MTP, MLA), (2, {}, ALL | dict(dp_shard=2))],
    ids=["qwen3", "deepseek", "fsdp"],
)
def test_every_adapter_learns_and_nothing_else_moves(processes, problem, flags):
    """Under FSDP, too, only adapters have gradients and optimizer state, shared between the ranks."""
    model = MODELS[type(config(**problem))](config(**problem))
    names = lora_names(model, Flags(**flags).lora_on)
    n = sum(
        Flags(**flags).lora_rank * (one.in_features + one.out_features)
        for one in map(model.get_submodule, names)
    )
    found = pool(processes).run(two_steps, problem, flags)
    for grads, difference, moved, biases, *_ in found:
        assert [
            fqn
            for fqn in (f"{name}.lora_{x}.weight" for name in names for x in "ab")
            if not grads[fqn].any()
        ] == []
        assert (difference, moved, biases, len(grads)) == (0, [], [], 2 * len(names))
    assert (sum(numbers for *_, numbers, _ in found), sum(state for *_, state in found)) == (
        n,
        2 * n,
    )


@pytest.mark.slow
def test_tp_sends_no_more_than_the_gradients_of_whole_adapters():
    plain, lora = (pool(2).run(count, dict(tp=2) | flags, 2, 2)[0] for flags in ({}, LORA))
    # A of wq, wk, wv, and B of wo; without the gradients of the norms, two per block and the last
    # norm
    assert lora["tp", "all_reduce"][0] - plain["tp", "all_reduce"][0] == 4 * 4 - (2 * 4 + 1)
    for op in ("all_gather", "reduce_scatter"):  # one less: no backward before the first adapter
        assert lora["tp", op][0] == plain["tp", op][0] - 1
    assert lora.keys() == plain.keys()


def dtypes_and_casts() -> tuple:
    """(dtypes of the frozen and of the trained parameters, requires_grad of the parameters with a
    cast copy, and at each block's backward whether later blocks still have casts)."""
    units, left = [], []
    made = CastUnit.__init__

    def watched(unit, *args):
        units.append(unit)
        return made(unit, *args)

    with mock.patch.object(CastUnit, "__init__", watched):
        stages, layout = build(config(), LORA | dict(compute_dtype="bfloat16"), 2, 2)
    for i, block in stages[0].blocks.items():
        block.attn.register_full_backward_pre_hook(
            lambda *args, i=int(i): left.append([u.is_cast for u in units[i + 1 : 4]])
        )
    parallel.forward_backward(stages, local_batch(global_batch(0, 2, False), layout), layout)
    kinds = []
    for trains in (False, True):
        kinds.append({p.dtype for p in stages[0].parameters() if p.requires_grad == trains})
    copied = set()
    for u in units:
        for c, p in zip(u.casts, u.params, strict=True):
            if c.data_ptr() != p.data_ptr():
                copied.add(c.requires_grad)
    return kinds, copied, left


def test_frozen_weights_are_kept_in_the_compute_dtype_and_never_copied():
    kinds, copied, left = pool(1).run(dtypes_and_casts)[0]
    assert kinds == [{torch.bfloat16}, {torch.float32}]
    assert copied == {True}
    # a block's casts are freed before the backward of the block below
    assert left == [[], [False], [False] * 2, [False] * 3]


def dtypes(flags: dict) -> list:
    """Dtypes of the frozen and of the trained parameters and of this rank's parts."""
    stages, layout = build(config(**MOE), flags, 4, 2)
    parallel.forward_backward(stages, local_batch(global_batch(0, 4, False), layout), layout)
    params = list(stages[0].parameters())
    found = []
    for trains in (False, True):
        found.append(
            {t.dtype for p in params if p.requires_grad == trains for t in (p, local_tensor(p))}
        )
    return found


@pytest.mark.parametrize(
    "flags", [pytest.param(dict(tp=2), marks=pytest.mark.slow), dict(tp=2, ep=2)], ids=str
)
def test_weights_that_tp_splits_get_their_dtype(flags):
    bf16 = dict(param_dtype="bfloat16", compute_dtype="bfloat16")
    assert pool(2).run(dtypes, flags | bf16) == [[set(), {torch.bfloat16}]] * 2
    assert (
        pool(2).run(dtypes, flags | LORA | dict(compute_dtype="bfloat16"))
        == [[{torch.bfloat16}, {torch.float32}]] * 2
    )


def test_flops_count_what_is_trained():
    c = config()
    model = MODELS[type(c)](c)
    cfg = Flags(lora_rank=4)
    matrices = sum(p.numel() for p in model.parameters()) - c.vocab_size * c.dim
    n = 4 * 4 * ((32 + 64) + 2 * (32 + 32) + (64 + 32))
    text, more = lora_counts(model, cfg)
    flops = model.flops_per_token(16) + more
    assert flops == 4 * matrices + 12 * 4 * 8 * 8 * 16 + 6 * n
    assert "4 wq, 4 wk, 4 wv, 4 wo" in text
    assert f"{n:,}" in text


@pytest.mark.slow
def test_a_dry_run_counts_what_is_trained(tmp_path):
    made = initialised(override_fields(FLAVORS["debug"], dry.SMALL, "--model_args"), Flags(), 3)
    save_hf(made, str(tmp_path / "base"), torch.float32)
    base = dict(
        recipe="finetune",
        model_args="",
        init_from=str(tmp_path / "base"),
        data="not opened",
        dp_shard=2,
    )
    plain, lora = dry.report_of(**base), dry.report_of(**base, lora_rank=4)
    sizes = []
    for report in (plain, lora):
        sizes.append(
            {key: report.ranks[0].step[key] for key in ("parameters", "gradients", "optimizer")}
        )
    n = 5 * 4 * ((64 + 64) + 2 * (64 + 32) + (64 + 64))  # of dry.SMALL
    steps = 4 * 5 * 8  # AdamW counts the steps of each parameter
    assert sizes[1] == dict(
        parameters=sizes[0]["parameters"] + 4 * n // 2,
        gradients=4 * n // 2,
        optimizer=8 * n // 2 + steps,
    )
    assert sizes[1]["gradients"] < sizes[0]["gradients"] / 10


@pytest.mark.parametrize(
    "flags, words",
    [
        (
            dict(lora_rank=4, lora_on=["wz"]),
            "--lora_on wz: only linears of the blocks get adapters",
        ),
        (dict(lora_rank=4, lora_on=["wq", "experts"]), "--lora_on experts: only linears"),
        (dict(lora_rank=4, lora_on=["head"]), "--lora_on head: only linears of the blocks"),
        (dict(lora_rank=4, lora_on=[]), "--lora_on : only linears"),
        (dict(lora_rank=4, lora_alpha=0), "--lora_alpha 0 must be above 0"),
    ],
)
def test_a_name_without_adapters_is_refused(flags, words):
    refuses(f"^{words}", check_lora, on_meta(config(**MOE)), Flags(**flags))


@pytest.mark.parametrize(
    "flags, GB, always", [({}, 8 * 4 * 4 / 8, True), (dict(lora_rank=16), 8 * 2 / 8, False)]
)
def test_memory_is_that_of_what_is_trained(flags, GB, always):
    """check_memory refuses what parameters, gradients and moments alone exceed; whole gradients of
    adapters fit anywhere."""
    # 8 GPUs of 24 GB with FSDP and 4 accumulation steps: a GPU holds an eighth of the frozen weights,
    # and all of them would be more than half of it
    layout = Layout(
        dp_shard=8, memory=int(24e9), global_batch_size=4 * 4 * 8, compute_dtype=torch.bfloat16
    )
    model, cfg = on_meta(FLAVORS["8B"]), Flags(param_dtype="float32", **flags)
    model.requires_grad_(not flags)  # as finetune.py does before check_model
    with mock.patch.object(distributed.checks, "host_memory", lambda: int(0.9e9 * GB)):
        said = refuses(
            r"would need at least [\d.]+ GB", check_memory, model, layout, "float32", "adamw"
        )
    assert float(said.split("at least ")[1].split()[0]) == pytest.approx(GB, rel=0.02)
    if flags:
        lora_linears(model, cfg)
    assert reduces_always(model, layout, cfg) == always
