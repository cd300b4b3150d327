"""Answers to exercise 2."""

FILE = "distributed/layout.py"


def all_gather(
    forward="return torch.cat(parts, dim)",
    backward="return total.chunk(n, dim)[rank].contiguous(), None, None",
):
    """With a list of tensors in the forward, and an all-reduce in the backward."""
    return {
        "AllGather.forward": f"""
def forward(ctx, x, dim, group):
    ctx.dim, ctx.group, n = dim, group, dist.get_world_size(group)
    parts = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(n)]
    dist.all_gather(parts, x.contiguous(), group=group)
    {forward}
""",
        "AllGather.backward": f"""
def backward(ctx, grad):
    dim, n, rank = ctx.dim, dist.get_world_size(ctx.group), dist.get_rank(ctx.group)
    total = grad.contiguous().clone()
    dist.all_reduce(total, group=ctx.group)
    {backward}
""",
    }


def reduce_scatter(
    forward="return total.chunk(n, dim)[rank].contiguous()",
    backward="return torch.cat(parts, dim), None, None",
):
    return {
        "ReduceScatter.forward": f"""
def forward(ctx, x, dim, group):
    ctx.dim, ctx.group, n, rank = dim, group, dist.get_world_size(group), dist.get_rank(group)
    total = x.contiguous().clone()
    dist.all_reduce(total, group=group)
    {forward}
""",
        "ReduceScatter.backward": f"""
def backward(ctx, grad):
    dim, n = ctx.dim, dist.get_world_size(ctx.group)
    parts = [torch.empty_like(grad, memory_format=torch.contiguous_format) for _ in range(n)]
    dist.all_gather(parts, grad.contiguous(), group=ctx.group)
    {backward}
""",
    }


RIGHT = [
    {FILE: all_gather() | reduce_scatter()},
    {
        FILE: {
            "AllGather.forward": """
def forward(ctx, x, dim, group):
    # an all-gather is a sum in which every rank has its part at its place, and 0 elsewhere
    n, rank = dist.get_world_size(group), dist.get_rank(group)
    ctx.place = dim, rank * x.shape[dim], x.shape[dim], group
    shape = list(x.shape)
    shape[dim] *= n
    whole = x.new_zeros(shape)
    whole.narrow(dim, rank * x.shape[dim], x.shape[dim]).copy_(x)
    dist.all_reduce(whole, group=group)
    return whole
""",
            "AllGather.backward": """
def backward(ctx, grad):
    return ReduceScatter.apply(grad, ctx.place[0], ctx.place[3]), None, None
""",
        }
        | reduce_scatter()
    },
]
WRONG = [  # answer, what the feedback must say
    (
        {FILE: all_gather(backward="return grad.chunk(n, dim)[rank].contiguous(), None, None")},
        "who adds up their gradients?",
    ),
    (
        {FILE: all_gather(backward="return total.chunk(n, dim)[rank] / n, None, None")},
        "gradients are summed",
    ),
    ({FILE: all_gather(forward="return torch.cat(parts)")}, "dim come to the front"),
    (
        {FILE: reduce_scatter(forward="return x.chunk(n, dim)[rank].contiguous()")},
        "nothing is added up",
    ),
    (
        {FILE: reduce_scatter(backward="return torch.cat([grad] * n, dim), None, None")},
        "it repeats this rank's gradient",
    ),
    (
        {
            FILE: {
                name: source.replace("group=group", "group=dist.group.WORLD")
                .replace("get_world_size(group)", "get_world_size()")
                .replace("get_rank(group)", "get_rank()")
                for name, source in all_gather().items()
            }
        },
        "get its group",
    ),
    (
        {
            FILE: {
                name: source.replace("dist.get_world_size(group)", "2")
                for name, source in all_gather().items()
            }
        },
        "4 ranks",
    ),
    (
        {
            FILE: {
                name: source.replace(", group=ctx.group", "")
                for name, source in reduce_scatter().items()
            }
        },
        "get its group",
    ),
]
