"""Answers to exercise 6."""

HEAD = """
def vocab_parallel_loss(h, weight, labels, denom, *, mesh, loss=linear_cross_entropy, **options):
    group = mesh.get_group()
    # h as a DTensor, which knows by itself how to gather and how to add up the gradients
    whole = DTensor.from_local(h, mesh, [Shard(1)], run_check=False).redistribute(placements=[Replicate()])
    h = whole.to_local(grad_placements=[Partial()])

    def reduce(x, op):
        every = [torch.empty_like(x) for _ in range(mesh.size())]
        dist.all_gather(every, x.contiguous(), group=group)
        return torch.stack(every).amax(0) if op == "max" else torch.stack(every).sum(0)

    start = mesh.get_local_rank() * -(-weight.shape[0] // mesh.size())
    return loss(h, weight.to_local(), labels, denom, reduce, vocab_start=start, **options)
"""
BY_SUM = """
def vocab_parallel_loss(h, weight, labels, denom, *, mesh, loss=linear_cross_entropy, **options):
    def all_reduce(x, op):
        dist.all_reduce(x, {}op=dist.ReduceOp.{}, group=mesh.get_group())
        return x
    h = {}
    return loss(h, weight.to_local(), labels, denom, all_reduce{}, **options)
""".replace("{}op", "op").replace(
    "ReduceOp.{}", "ReduceOp.MAX if op == 'max' else dist.ReduceOp.SUM"
)
GATHER, START = "AllGather.apply(h, 1, mesh.get_group())", ", vocab_start=local_slice(weight)[1][0]"
LOSSES = """
def token_losses(logits, labels, vocab_start, group):
    # each rank's log-sum-exp, and of these the log-sum-exp: numbers of size tp, one after the other
    V, n = logits.shape[1], dist.get_world_size(group)
    own = logits.logsumexp(1)
    every = [torch.empty_like(own) for _ in range(n)]
    dist.all_gather(every, own, group=group)
    whole = torch.stack(every).logsumexp(0)
    one_hot = (labels[:, None] == vocab_start + torch.arange(V)).float()
    target = (logits * one_hot).sum(1)
    dist.all_reduce(target, group=group)
    valid = (labels != IGNORE).float()
    return (whole - target) * valid, ((logits - whole[:, None]).exp() - one_hot) * valid[:, None]
"""
BY_HAND = """
def token_losses(logits, labels, vocab_start, group):
    V = logits.shape[1]
    top = logits.amax(1)
    {max}
    exp = (logits - top[:, None]).exp()
    total = exp.sum(1)
    local = labels - vocab_start
    mine = (local >= 0) & (local < V)
    {target}
    both = torch.stack([total, target])
    dist.all_reduce(both, group=group)
    valid = labels != IGNORE
    loss = (both[0].log() + top - both[1]) * valid
    gradient = exp / both[0][:, None]
    gradient[mine, local[mine]] -= 1
    return loss, {gradient}
"""
USUAL = dict(
    max="dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)",
    gradient="gradient * valid[:, None]",
    target="target = torch.zeros_like(top)\n    target[mine] = logits[mine, local[mine]]",
)
RIGHT = [LOSSES + HEAD, BY_HAND.format(**USUAL) + BY_SUM.format(GATHER, START)]
WRONG = [  # answer, what the feedback must say
    (
        BY_HAND.format(**USUAL | dict(max="")),
        "each rank has subtracted the largest of its own logits",
    ),
    (
        BY_HAND.format(**USUAL | dict(max="top = torch.zeros_like(top)")),
        "exp(100) is infinite in fp32",
    ),
    (
        BY_HAND.format(
            **USUAL | dict(target="target = logits[torch.arange(len(labels)), local % V]")
        ),
        "It belongs to one rank, and the others add 0",
    ),
    (
        BY_HAND.format(**USUAL | dict(gradient="gradient")),
        "the token without a loss has a gradient",
    ),
    (
        """
def token_losses(logits, labels, vocab_start, group):
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, logits, group=group)
    whole = torch.cat(parts, 1).requires_grad_()
    losses = torch.nn.functional.cross_entropy(whole, labels, ignore_index=IGNORE, reduction="none")
    losses.sum().backward()
    return losses.detach(), whole.grad[:, vocab_start : vocab_start + logits.shape[1]]
""",
        "Three numbers per token are enough",
    ),
    (
        LOSSES.replace(
            "whole = torch.stack(every).logsumexp(0)",
            """parts = [torch.empty_like(logits) for _ in range(n)]
    dist.all_gather(parts, logits, group=group)
    whole = torch.stack([part.logsumexp(1) for part in parts]).logsumexp(0)""",
        ),
        "were logits gathered piece by piece?",
    ),
    (LOSSES.replace("(target, group=group)", "(target)"), "get its group"),
    (BY_HAND.format(**USUAL).replace("zeros_like(top)", "zeros(6)"), "of the group and of logits"),
    (BY_SUM.format(GATHER, ""), "does the loss know (vocab_start)?"),
    (BY_SUM.format("h", START), "gather h, and multiply with this rank's rows"),
    (
        BY_SUM.format("whole(h)", START).replace(
            "    h = whole",
            """
    def whole(h):
        parts = [torch.empty_like(h) for _ in range(mesh.size())]
        dist.all_gather(parts, h.detach().contiguous(), group=mesh.get_group())
        parts[mesh.get_local_rank()] = h
        return torch.cat(parts, 1)
    h = whole""",
        ),
        "does the gather of h have a backward that does",
    ),
]
