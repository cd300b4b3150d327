"""Answers to exercise 3."""

SHARD = """
def shard_of(weight, rank, n):
    rows = weight.shape[0] // n
    return weight[rank * rows : (rank + 1) * rows].clone()
"""
FORWARD = """
def forward(ctx, x, shard, group):
    ctx.save_for_backward(x, shard)
    ctx.group = group
    return torch.nn.functional.linear(x, gathered(shard, group))
"""
BACKWARD = """
def backward(ctx, grad):
    x, shard = ctx.saved_tensors
    rank, n = dist.get_rank(ctx.group), dist.get_world_size(ctx.group)
    total = grad.T @ x
    dist.all_reduce(total, group=ctx.group)
    return grad @ gathered(shard, ctx.group), {}, None
"""


def answer(
    forward: str = FORWARD,
    backward: str = BACKWARD.format("total.chunk(n)[rank].clone()"),
    shard: str = SHARD,
) -> dict:
    return {
        "hand03.py": {
            "shard_of": shard,
            "ShardedLinear.forward": forward,
            "ShardedLinear.backward": backward,
        }
    }


RIGHT = [
    answer(),
    answer(
        """
def forward(ctx, x, shard, group):
    # as fully_shard does it: the weight's memory is given back, and filled again later
    whole = gathered(shard, group)
    ctx.kept = x, shard, whole, group
    y = x @ whole.T
    ctx.size = whole.untyped_storage().nbytes()
    whole.untyped_storage().resize_(0)
    return y
""",
        """
def backward(ctx, grad):
    x, shard, whole, group = ctx.kept
    whole.untyped_storage().resize_(ctx.size)
    whole.copy_(gathered(shard, group))
    dx = grad @ whole
    whole.untyped_storage().resize_(0)
    # each rank's rows by themselves: a reduce to their owner
    for rank, part in enumerate((grad.T @ x).chunk(dist.get_world_size(group))):
        part = part.clone()
        dist.reduce(part, dst=dist.get_global_rank(group, rank), group=group)
        if rank == dist.get_rank(group):
            mine = part
    return dx, mine, None
""",
    ),
]
WRONG = [  # answer, what the feedback must say
    (
        answer(
            """
def forward(ctx, x, shard, group):
    whole = gathered(shard, group)
    ctx.save_for_backward(x, shard, whole)
    ctx.group = group
    return x @ whole.T
""",
            BACKWARD.replace("x, shard = ctx", "x, shard, whole = ctx").format(
                "total.chunk(n)[rank].clone()"
            ),
        ),
        "between forward and backward 192 bytes are still in memory",
    ),
    (
        answer(
            FORWARD.replace(
                "    ctx.group = group",
                "    ctx.group, ctx.half = group, gathered(shard, group).half()",
            )
        ),
        "bytes are still in memory",
    ),
    (
        answer(
            FORWARD.replace(
                "    ctx.group = group",
                """    ctx.group = group
    ctx.parts = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(ctx.parts, shard, group=group)""",
            )
        ),
        "are still in memory",
    ),
    (
        answer(
            backward=BACKWARD.replace(", group=ctx.group)", ")").format(
                "total.chunk(n)[rank].clone()"
            )
        ),
        "get its group",
    ),
    (
        answer(backward=BACKWARD.format("total[4 * rank : 4 * rank + 4].clone()")),
        "are the sizes those of the group",
    ),
    (
        answer(backward=BACKWARD.format("(grad.T @ x).chunk(n)[rank].clone()")),
        "it saw this rank's tokens only",
    ),
    (
        answer(backward=BACKWARD.format("total.chunk(n)[rank] / n")),
        "the ranks' gradients are summed",
    ),
    (answer(backward=BACKWARD.format("total")), "leaves each rank its part?"),
    (
        answer(shard="def shard_of(weight, rank, n):\n    return weight.chunk(n)[rank]"),
        "lives as long as they do",
    ),
    (
        answer(shard="def shard_of(weight, rank, n):\n    return weight.chunk(n, 1)[rank].clone()"),
        "should give rows 0 .. 3",
    ),
]
