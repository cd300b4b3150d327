"""Refuses degrees of --ep and --etp that the experts do not fill. Only models with experts load this
file."""

from collections.abc import Iterator
from typing import Any

from distributed.agree import divisors
from distributed.layout import Layout


def expert_rows(layout: Layout, optimizer: str, c: Any) -> Iterator[tuple[Any, str]]:
    """optimizer: --optimizer; c: the model's config."""
    ep = layout.ep
    etp = layout.etp
    # ranks that ep may borrow
    lenders = layout.dp_shard * layout.cp
    named = "dp_shard x cp"
    if etp <= 1:
        lenders *= layout.tp
    if etp == 1:
        named += " x tp"
    ranks = f"{named} = {lenders}"
    yield etp not in (1, layout.tp), f"--etp {etp} must be 1 or --tp {layout.tp}"
    yield (
        etp > 1 and c.moe_ffn_dim % etp,
        f"--etp {etp} does not divide moe_ffn_dim {c.moe_ffn_dim}; use --etp 1",
    )
    yield (
        etp > 1 and optimizer == "muon",
        (
            f"--optimizer muon needs whole matrices, but --etp {etp} splits every expert; use "
            "--etp 1 or adamw"
        ),
    )
    yield (
        ep < 1 or c.n_experts % ep or lenders % ep,
        (
            f"--ep {ep} must divide n_experts {c.n_experts} and {ranks}; use "
            f"{divisors(c.n_experts, lenders)}"
        ),
    )
