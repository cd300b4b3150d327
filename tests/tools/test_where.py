"""--check_parity --where: no difference between equal layouts; otherwise the report names the
broken function."""

import io
import re
from contextlib import nullcontext
from functools import partial, wraps
from unittest import mock

import layouts
import pytest
import torch
import torch.distributed as dist
from mistakes import MUTANTS, NAMED
from pool import pool
from tables import as_parameters
from torch.distributed.tensor import Replicate

import distributed.experts
import parallel
from distributed.layout import AllGather, Layout
from models.deepseek import shift_targets
from models.layers import rotate
from models.llama3 import Attention, Block
from models.loss import linear_cross_entropy
from tools.parity.advice import hint_for_attention
from tools.parity.operations import describe_layout, seams_of_a_step
from tools.parity.where import describe_seam, first_difference_of, placements, which_ranks

LAYOUTS = layouts.layouts_of("layouts")
MOE = layouts.KINDS["qwen3_moe"]
MTP = layouts.KINDS["mtp"]


def step_with_seams(model_config, flags, n, local_batch_size, doc_mask=False, mutate=None) -> bytes:
    """On a rank of the pool. As bytes: thousands of shared tensors would need as many open files."""
    with (
        mutate() if mutate else nullcontext(),
        mock.patch.object(layouts, "n_steps", lambda config: 1),
    ):
        with seams_of_a_step() as seams:
            layouts.run_steps(model_config, flags, n, local_batch_size, doc_mask)
            seams.finish()
    buffer = io.BytesIO()
    torch.save(seams.found(), buffer)
    return buffer.getvalue()


def where(processes: int, flags: dict, problem: dict, mutate=None, edit=None) -> str:
    """The report: "no difference at N seams ..." or "first difference: ...". mutate: a mistake of the
    layout; edit: a change of the model, on one process as on the layout."""
    problem = dict(problem)
    n = problem.pop("n")
    b = problem.pop("b")
    doc = problem.pop("doc", False)
    config = layouts.config(**problem)
    one = pool(1).run(step_with_seams, config, {}, n, n, doc, edit)
    layout = pool(processes).run(step_with_seams, config, flags, n, b, doc, mutate or edit)

    def read(ranks):
        return [torch.load(io.BytesIO(rank), weights_only=True) for rank in ranks]

    return first_difference_of(read(one), read(layout))[0]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if i in (0, 3) else pytest.mark.slow)
        for i, name in enumerate(NAMED)
    ],
)
def test_where_names_the_function_that_is_broken(name):
    mutant, row = MUTANTS[name]
    text = where(*row, mutate=mutant)
    _, seam, function = NAMED[name]
    first = text.splitlines()[0]
    look = next(line for line in text.splitlines() if line.startswith("look at"))
    assert first.startswith("first difference: "), text
    assert seam in first, text
    assert function in look, text


# --------------------------------------------------- mistakes that no test of test_mutants.py makes


def mistake(owner, name):
    """Decorates what takes the place of owner.name, and gets the real one as its first argument:
    the result returns a context in which the mistake is there."""

    def decorate(wrong):
        return wraps(wrong)(
            lambda: mock.patch.object(owner, name, partial(wrong, getattr(owner, name)))
        )

    return decorate


@mistake(parallel, "natural_order")
def keys_in_rank_order(real, x, dim, cp):
    return x


@mistake(parallel, "init_weights")
def another_seed_on_each_rank(real, stage, layout, seed, *skip):
    return real(stage, layout, seed + layout.rank, *skip)


@mistake(distributed.experts, "gathered_moe")
def parts_not_summed(real, moe_forward, group, x):
    """Each tp rank keeps the output of its own part of the hidden width; the sum is missing."""
    out = moe_forward(AllGather.apply(x, 1, group))
    return out.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


@mistake(parallel, "inputs")
def targets_shifted_too_late(real, stage, batch, a, layout):
    """Shift after the sequence is cut: the last token of a rank's chunk does not know the next
    token."""
    found = real(stage, batch, a, layout)
    later = shift_targets(found["tokens"], found["labels"])
    return found | dict(zip(("next_tokens", "next_labels"), later, strict=True))


@mistake(parallel, "gathered_head_loss")
def head_gradient_of_own_tokens(real, h, weight, labels, denom, *, mesh, kernel=None):
    # without grad_placements=[Partial()]
    weight = weight.redistribute(placements=[Replicate()]).to_local()
    return linear_cross_entropy(
        h, weight, labels.chunk(mesh.size(), 1)[mesh.get_local_rank()], denom
    )


@mistake(parallel, "next_backward")
def gradients_of_the_last_micro_batch_only(real, model, is_last, layout):
    real(model, True, layout)
    for p in model.parameters():
        p.grad = None


MORE = [
    (
        keys_in_rank_order,
        (2, dict(cp=2), dict(n=4, b=2)),
        "forward of blocks.0.attn (attention)",
        "all_gather_attention",
    ),
    (
        keys_in_rank_order,
        (2, dict(cp=2, cp_method="alltoall"), dict(n=4, b=2)),
        "forward of blocks.0.attn (attention)",
        "all_to_all_attention",
    ),
    (
        another_seed_on_each_rank,
        (2, dict(tp=2), dict(n=4, b=2)),
        "initial value of tok_embeddings.weight (rank 1 of tp)",
        "init_weights",
    ),
    (
        parts_not_summed,
        (2, dict(tp=2, etp=2), dict(n=4, b=2, **MOE)),
        "forward of blocks.0.moe",
        "gathered_moe",
    ),
    (
        targets_shifted_too_late,
        (2, dict(cp=2), dict(n=4, b=2, **MTP)),
        "input next_tokens",
        "shift_targets",
    ),
    (
        head_gradient_of_own_tokens,
        (2, dict(tp=2, loss_parallel=False), dict(n=4, b=2)),
        "finished gradient of head.weight",
        "gathered_head_loss",
    ),
    (
        gradients_of_the_last_micro_batch_only,
        (2, {}, dict(n=8, b=2)),
        "finished gradient of tok_embeddings.weight",
        "next_backward",
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("planted, row, seam, function", MORE)
def test_where_names_other_mistakes(planted, row, seam, function):
    first, *rest = where(*row, mutate=planted).splitlines()
    assert first.startswith("first difference: "), first
    assert seam in first, first
    assert any(line.startswith("look at: ") and function in line for line in rest), rest


# ---------------------------------------------------------------- a model of one's own


def softmax_over_own_heads(self, x, cos, sin, attend):
    """A gate that is normalised over the heads, of which a tp rank has some."""
    q = self.wq(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
    k = self.wk(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
    v = self.wv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
    out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
    out = out * out.mean(-1, keepdim=True).softmax(1)
    return self.wo(out.transpose(1, 2).flatten(-2))


def mean_before_the_norm(self, h, cos, sin, attend):
    """A mean over the tokens, of which a rank has some."""
    h = h + self.attn(self.attn_norm(h), cos, sin, attend)
    h = h + 0.1 * h.mean(1, keepdim=True)
    return h + self.ffn(self.ffn_norm(h))


def mean_at_the_end(self, h, cos, sin, attend):
    h = h + self.attn(self.attn_norm(h), cos, sin, attend)
    h = h + self.ffn(self.ffn_norm(h))
    return h + 0.1 * h.mean(1, keepdim=True)


@pytest.mark.parametrize(
    "kind, forward, flags, seam, code",
    [
        (
            Attention,
            softmax_over_own_heads,
            dict(tp=2),
            "forward of blocks.0.attn (what it gives to blocks.0.attn.wo)",
            "the code before wo in Attention.forward (models/llama3.py)",
        ),
        (
            Block,
            mean_before_the_norm,
            dict(tp=2),
            "forward of blocks.0 (what it gives to blocks.0.ffn_norm)",
            "the code before ffn_norm in Block.forward (models/llama3.py)",
        ),
        (
            Block,
            mean_at_the_end,
            dict(cp=2),
            "forward of blocks.0: ",
            "Block.forward (models/llama3.py), after the last module that agrees; shard in parallel",
        ),
        (
            Block,
            mean_at_the_end,
            dict(tp=2),
            "forward of blocks.0: ",
            "Block.forward (models/llama3.py), after the last module that agrees",
        ),
    ],
)
def test_own_code_is_named_first(kind, forward, flags, seam, code):
    """And no axis that the layout does not have."""
    edit = partial(mock.patch.object, kind, "forward", forward)
    first, *rest = where(2, flags, dict(n=4, b=2), edit=edit).splitlines()
    assert first.startswith(f"first difference: {seam}"), first
    [look] = [line for line in rest if line.startswith("look at: ")]
    assert look.startswith(f"look at: {code}"), look
    assert ("shard in parallel" in look) == ("cp" in flags and "last module" in code)
    assert "TP_STYLES" not in look and "pipeline" not in look


# ---------------------------------------------------------------- layouts without a mistake


EVERY_20TH = dict(list(LAYOUTS.items())[::20])


@pytest.mark.parametrize(
    "row",
    [
        pytest.param((2, dict(ep=2), dict(n=4, b=1, **MOE)), id="ep"),
        pytest.param((2, dict(tp=2), dict(n=6, b=2)), id="tp", marks=pytest.mark.slow),
        pytest.param((4, dict(cp=2, tp=2), dict(n=4, b=2)), id="cp, tp", marks=pytest.mark.slow),
        *as_parameters(EVERY_20TH, pytest.mark.slow),
    ],
)
def test_equal_layouts_have_no_difference(row):
    text = where(*row)
    assert text.startswith("no difference at "), text
    assert not re.search("not compared:.* input", text), text
    assert int(re.search(r"at (\d+) seams", text)[1]) > 150, text


@pytest.mark.parametrize(
    "whole, local, cp, tp, found",
    [
        ((4, 16, 32), (4, 16, 32), 1, 1, [(None, None)]),
        ((4, 16, 32), (4, 8, 32), 2, 1, [(1, None)]),
        ((4, 16, 32), (4, 4, 32), 2, 2, [(1, 1)]),
        ((4, 8, 16, 8), (4, 4, 8, 8), 2, 2, [(2, 1)]),
        (
            (4, 16, 16),
            (4, 8, 16),
            2,
            2,
            [(None, 1), (1, None)],
        ),  # compare_pieces takes the better fit
        ((4, 16, 32), (4, 5, 32), 2, 2, []),
    ],
)
def test_a_part_is_placed_by_its_shape(whole, local, cp, tp, found):
    assert placements(whole, local, cp, tp, 16) == found


@pytest.mark.parametrize(
    "phase, name, call, words",
    [
        ("sequences", "", 0, "the sequences of the global batch"),
        ("count", "", 0, "count_tokens, the tokens of the global batch"),
        ("loss", "", 0, "loss"),
        ("norm", "", 0, "gradient norm"),
        ("initial", "norm.weight", 0, "initial value of norm.weight"),
        ("inputs", "tokens", 0, "input tokens"),
        ("forward", "blocks.0", 0, "forward of blocks.0"),
        ("forward", "blocks.0", 2, "forward of blocks.0 (call 3)"),
        (
            "forward",
            "blocks.0.ffn.w2 input",
            0,
            "forward of blocks.0.ffn (what it gives to blocks.0.ffn.w2)",
        ),
        ("forward", "blocks.0 input", 0, "forward of the model (what it gives to blocks.0)"),
        ("forward", "blocks.0.attn attention", 0, "forward of blocks.0.attn (attention)"),
        ("forward", "blocks.0.attn k", 0, "forward of blocks.0.attn (the keys after rotation)"),
        ("logits", "head", 0, "forward of head"),
        ("backward", "head", 0, "backward, gradient of the output of head"),
        (
            "backward",
            "blocks.0.attn attention",
            0,
            "backward of blocks.0.attn (gradient of attention)",
        ),
        ("backward", "blocks.0.attn v", 0, "backward of blocks.0.attn (gradient of the values)"),
        ("gradient", "norm.weight", 0, "finished gradient of norm.weight"),
        ("clipped", "norm.weight", 0, "clipped gradient of norm.weight"),
        ("updated", "norm.weight", 0, "norm.weight after the step"),
    ],
)
def test_a_seam_has_words(phase, name, call, words):
    assert describe_seam(phase, name, call) == words


def test_a_report_knows_the_attention_of_a_layout():
    stage = layouts.on_meta(layouts.config())
    assert describe_layout([stage], Layout())["attends"] == []
    stage.make_attend = partial(parallel.all_gather_attention, group=None)
    about = describe_layout([stage], Layout())
    assert hint_for_attention(about) == "all_gather_attention in parallel.py"


def test_ranks_are_named_by_their_axis():
    degrees = dict(pp=2, dp_replicate=1, dp_shard=1, cp=1, tp=2)
    assert which_ranks([1, 3], [0, 1, 2, 3], degrees) == " (rank 1 of tp)"
    assert which_ranks([2, 3], [0, 1, 2, 3], degrees) == " (rank 1 of pp)"
    # only the first stage holds the tensor
    assert which_ranks([0], [0, 1], degrees) == " (rank 0 of tp)"
    assert which_ranks([0, 1], [0, 1], degrees) == ""
    assert which_ranks([0, 3], [0, 1, 2, 3], degrees) == " (ranks 0, 3)"
