"""Refuses a model with a parameter that --tp does not split. Only runs with --tp load this file."""

from torch import nn
from torch.distributed.tensor import DTensor

from distributed.layout import pattern_of

# Styles to suggest for a parameter without one
STYLES = (
    '"sequence" (a norm or gain of (B, T/tp, D)), "head_norm" (of (B, T, H/tp, K)), '
    '"sequence_linear" (a linear of T/tp '
    'tokens), "colwise" or "rowwise" (a linear that is split)'
)


def check_split(stage: nn.Module, plan: dict[str, str]) -> None:
    """Raise ValueError for the first parameter without a tp style. Every tp rank would train its
    own copy of the parameter, on its own tokens or heads. Not checked: experts, split by
    expert_parallel, and styles of a fork. plan: module -> style."""
    for fqn, p in stage.named_parameters():
        name = fqn.rpartition(".")[0]
        if isinstance(p, DTensor) or ".experts." in fqn:
            continue
        # "gather" and "gather_sequence" move activations only
        if plan.get(name) not in (None, "gather", "gather_sequence"):
            continue
        fix = (
            "put it into a small module of its own, see 'A bare parameter under tp' in "
            "docs/fork_me.md"
        )
        if name and not [*stage.get_submodule(name).children()]:
            fix = f'add "{pattern_of(name)}" to tp_plan: {STYLES}'
        raise ValueError(
            f"--tp: {fqn} has no style in tp_plan, so every tp rank would train a copy of its "
            f"own: {fix}"
        )
