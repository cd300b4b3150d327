"""Answers to exercise 4."""

SPLIT = """
def split_weights(w1, w3, w2, rank, tp):
    n = w1.shape[0] // tp
    mine = slice(rank * n, (rank + 1) * n)
    return w1[mine], w3[mine], w2[:, mine]
"""
ADD = """
    t = {}.contiguous().clone()
    dist.all_reduce(t, group={})
    return t{}
"""
ENTER_BACKWARD = "def backward(ctx, grad):" + ADD.format("grad", "ctx.group", ", None")
LEAVE_FORWARD = "def forward(ctx, y, group):\n    ctx.group = group" + ADD.format("y", "group", "")
LEAVE_BACKWARD = "def backward(ctx, grad):\n    return grad.clone(), None"
FFN = """
def ffn(x, w1, w3, w2, group):
    both = F.linear(Enter.apply(x, group), torch.cat([w1, w3]))  # one matmul for both
    gate, up = both.chunk(2, -1)
    return Leave.apply((F.silu(gate) * up) @ w2.T, group)
"""


def answer(
    split=SPLIT, enter=ENTER_BACKWARD, leave=LEAVE_FORWARD, back=LEAVE_BACKWARD, ffn=FFN
) -> dict:
    return {
        "hand04.py": {
            "split_weights": split,
            "Enter.backward": enter,
            "Leave.forward": leave,
            "Leave.backward": back,
            "ffn": ffn,
        }
    }


RIGHT = [
    answer(),
    answer(
        ffn="""
def ffn(x, w1, w3, w2, group):
    # no class: torch's all_reduce for autograd adds up the ranks' gradients too, so each rank gives its share of the same loss
    from torch.distributed.nn.functional import all_reduce
    n = dist.get_world_size(group)
    class Share(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)
        @staticmethod
        def backward(ctx, grad):
            return grad / n
    total = all_reduce(x.clone(), group=group)
    whole = x.detach() + total - total.detach()  # the value of x, and the gradient of the sum
    summand = F.linear(F.silu(F.linear(whole, w1)) * F.linear(whole, w3), w2)
    return Share.apply(all_reduce(summand, group=group)) if n > 1 else summand
"""
    ),
]
WRONG = [  # answer, what the feedback must say
    (
        answer(
            ffn=FFN.replace(
                "    both",
                "    n = dist.get_world_size(group)\n    dist.all_gather([torch.empty_like(w1) "
                "for _ "
                "in "
                "range(n)], w1.detach(), group=group)\n    both",
            )
        ),
        "a matrix was gathered",
    ),
    (answer(leave=LEAVE_FORWARD.replace(", group=group", "")), "get its group"),
    (answer(enter=ENTER_BACKWARD.replace(", group=ctx.group", "")), "get its group"),
    (answer(split=SPLIT.replace("w1.shape[0] // tp", "16")), "and should give (12, 6)"),
    (answer(enter="def backward(ctx, grad):\n    return grad, None"), "missing an all-reduce"),
    (
        answer(back="def backward(ctx, grad):" + ADD.format("grad", "ctx.group", ", None")),
        "is 2 times what it should be",
    ),
    (answer(leave="def forward(ctx, y, group):\n    return y.clone()"), "is its own summand"),
    (answer(split=SPLIT.replace("w2[:, mine]", "w2.chunk(tp)[rank]")), "the columns of w2"),
    (answer(ffn=FFN.replace("Enter.apply(x, group)", "x")), "missing an all-reduce"),
]
