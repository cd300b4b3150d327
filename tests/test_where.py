"""--check_parity --where: no difference where layouts are equal, and the function that is broken where they are not."""
import re

import pytest
from layouts import row_name
from seams_of import where
from test_mutants import MUTANTS
from test_parallel import LAYOUTS, MOE

# What the report of each mutant of tests/test_mutants.py must say: the seam, and the function or style that the mutant breaks
NAMED = {
    "norm_without_all_reduce": ("finished gradient of blocks.0.attn_norm.weight", "style 'sequence'"),
    "waiting_embedding": ("gradient of the output of tok_embeddings", "style 'vocab_embedding'"),
    "reshard_in_zero_bubble": ("finished gradient of blocks.", "pipeline_rows in distributed/refusals.py"),
    "mean_of_means": ("tokens of the global batch", "look at: count_tokens"),
    "masked_tokens_counted": ("tokens of the global batch", "look at: count_tokens"),
    "tied_weight_counted_twice": ("gradient norm", "look at: clip_grad_norm"),
    "tied_gradient_not_exchanged": ("finished gradient of tok_embeddings.weight", "sum_tied_gradients"),
    "positions_not_balanced": ("input positions", "look at: inputs in parallel.py"),
    "averaged_gradients": ("finished gradient of tok_embeddings.weight", "set_gradient_divide_factor"),
    "experts_not_reduced_over_tp": ("finished gradient of blocks.0.moe.experts.w1", "expert_mesh in make_mesh"),
    "weights_doubled_on_the_way": ("forward of blocks.0.moe", "AllToAll"),
    "balancing_loss_per_microbatch": ("gradient of the output of blocks.3.moe.router", "expert_parallel (aux_coef"),
    "own_load_only": ("blocks.0.moe.balance.bias after the step", "balance_experts"),
    "norm_of_own_stage": ("gradient norm", "look at: clip_grad_norm"),
}


@pytest.mark.parametrize("mutant, row", [pytest.param(m, row, marks=[] if i in (0, 3, 11) else pytest.mark.slow)
                                         for i, (m, row, _) in enumerate(MUTANTS)], ids=[m[0].__name__ for m in MUTANTS])
def test_where_names_the_function_that_is_broken(mutant, row):
    text = where(*row, mutate=mutant)
    seam, function = NAMED[mutant.__name__]
    first, look = text.splitlines()[0], next(line for line in text.splitlines() if line.startswith("look at"))
    assert first.startswith("first difference: ") and seam in first and function in look, text


EQUAL = [(2, dict(tp=2), dict(n=6, b=2)), (4, dict(cp=2, tp=2), dict(n=4, b=2)), (2, dict(ep=2), dict(n=4, b=1, **MOE))]


@pytest.mark.parametrize("row", EQUAL + [pytest.param(row, marks=pytest.mark.slow) for row in LAYOUTS[::3]], ids=row_name)
def test_equal_layouts_have_no_difference(row):
    text = where(*row)
    assert text.startswith("no difference at ") and int(re.search(r"at (\d+) seams", text)[1]) > 150, text
