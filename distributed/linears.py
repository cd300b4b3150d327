"""Linears with another forward, on each rank's own part of the weight. Only runs with --float8 or
LoRA load this file."""

from functools import cache

from torch.distributed.tensor import DTensor, Partial, Placement, Shard


def beside_weight(x: DTensor, weight: DTensor) -> tuple[Placement, Placement]:
    """(placement of the gradient of x, placement of y) where each rank multiplies its own parts of
    x and of a linear's weight. They tell DTensor how to read this rank's part: Partial means that
    the ranks hold summands."""
    (cut,) = weight.placements
    # colwise: x (..., in) is whole, and every rank has a summand of its gradient
    if cut.is_shard(0):
        return Partial(), Shard(x.dim() - 1)
    # rowwise: x (..., in/tp), and y is a summand
    if cut.is_shard(1):
        return x.placements[0], Partial()
    # a whole weight on every rank, and tokens of its own
    return x.placements[0], x.placements[0]


@cache
def with_forward(kind: type, Forward: type) -> type:
    """A class of linears, `kind`, with the forward of `Forward`."""
    return type(kind.__name__, (Forward, kind), {})
