"""The mistakes of exercises/, each as a context manager that plants one inside the workers and mends
it, and what the tools must name."""

import ast
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from bugs import BUGS, planted_bug
from course import functions, source_of
from feedback import replaced
from programs import REPO

import parallel


def changed_functions(bug) -> dict:
    """{file: {function: its source with the mistake}}"""
    found = {}
    for file, text in planted_bug(bug).items():
        before = functions(Path(REPO, file).read_text())
        after = functions(text)
        found[file] = {
            name: source_of(text, name)
            for name in before
            if ast.dump(after[name]) != ast.dump(before[name])
        }
    return found


# Bugs 1 and 2 change a table and a method with super(), which nobody can swap in a running process.
class PlainStyle(torch.distributed.tensor.parallel.ParallelStyle):
    def _apply(self, module, mesh):
        return module


class Waiting(parallel.VocabEmbedding):
    def _apply(self, module, mesh):
        module = super(parallel.VocabEmbedding, self)._apply(module, mesh)
        module.register_forward_hook(
            lambda module, args, out: out.wait() if hasattr(out, "wait") else out
        )
        return module


BY_HAND = {
    "norm_without_all_reduce": partial(mock.patch.dict, "parallel.TP_STYLES", sequence=PlainStyle),
    "waiting_embedding": partial(mock.patch.dict, "parallel.TP_STYLES", vocab_embedding=Waiting),
}


# mutant -> (what the report of compare names; the seam, and the function or style, that
# test_where.py finds)
NAMED = {
    "norm_without_all_reduce": (
        "gradient of blocks.0.attn_norm.weight",
        "finished gradient of blocks.0.attn_norm.weight",
        "style 'sequence'",
    ),
    "waiting_embedding": (
        "gradient of tok_embeddings.weight",
        "gradient of the output of tok_embeddings",
        "style 'vocab_embedding'",
    ),
    "reshard_in_zero_bubble": (
        "gradient of blocks.",
        "finished gradient of blocks.",
        "check_layout (reshards) in distributed/refusals.py",
    ),
    "mean_of_means": (
        "gradient of tok_embeddings.weight",
        "tokens of the global batch",
        "look at: count_tokens",
    ),
    "masked_tokens_counted": (
        "gradient of tok_embeddings.weight",
        "tokens of the global batch",
        "look at: count_tokens",
    ),
    "tied_weight_counted_twice": (
        "tok_embeddings.weight were miscounted",
        "gradient norm",
        "look at: clip_grad_norm",
    ),
    "tied_gradient_not_exchanged": (
        "gradient of tok_embeddings.weight",
        "finished gradient of tok_embeddings.weight",
        "sum_tied_gradients",
    ),
    "positions_not_balanced": ("gradient of", "input positions", "look at: inputs in parallel.py"),
    "averaged_gradients": (
        "gradient of tok_embeddings.weight",
        "finished gradient of tok_embeddings.weight",
        "set_gradient_divide_factor",
    ),
    "experts_not_reduced_over_tp": (
        "gradient of blocks.0.moe.experts.w1",
        "finished gradient of blocks.0.moe.experts.w1",
        "expert_mesh in make_mesh",
    ),
    "weights_doubled_on_the_way": ("gradient of", "forward of blocks.0.moe", "AllToAll"),
    "balancing_loss_per_microbatch": (
        "gradient of",
        "gradient of the output of blocks.3.moe.router",
        "expert_parallel (aux_coef",
    ),
    "own_load_only": (
        "bias of blocks.0",
        "blocks.0.moe.balance.bias after the step",
        "balance_experts",
    ),
    "norm_of_own_stage": ("grad norm", "gradient norm", "look at: clip_grad_norm"),
    "norm_of_own_heads": (
        "gradient of",
        "forward of blocks.0.attn.q_norm",
        "style 'norm_over_heads'",
    ),
}


# name -> (the mutant, the first layout of the bug's check)
MUTANTS = {
    bug.mutant: (BY_HAND.get(bug.mutant) or partial(replaced, changed_functions(bug)), bug.rows[0])
    for bug in BUGS.values()
}
