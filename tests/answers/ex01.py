"""Answers to exercise 1."""

COUNT = """
def count_tokens(labels, layout):
    total = (labels != IGNORE).sum()
    mine = total.clone()
    for axis in ("dp_replicate", "dp_shard"):
        dist.all_reduce(total, group=layout.group(axis))
    return total.clamp(min=1), mine
"""
LOOP = """
def accumulate(model, microbatches):
    n = sum(int((labels != IGNORE).sum()) for _, labels in microbatches)
    total = 0
    for tokens, labels in microbatches:
        loss = model(tokens, labels, loss_denom=n)
        loss.backward()
        total += loss.item()
    return total
"""
ALL = """
def count_tokens(labels, layout):
    mine = (labels != IGNORE).sum()
    total = mine.clone()
    dist.all_reduce(total)
    return {}, mine
"""
RIGHT = [
    LOOP + COUNT,
    LOOP.replace("loss.item()", "float(loss.detach())")
    + """
def count_tokens(labels, layout):
    mine = (labels != IGNORE).sum()
    share = mine.double() * layout.data_ranks / layout.world_size
    dist.all_reduce(share)
    return share.round().long().clamp(min=1), mine
""",
]
WRONG = [  # answer, what the feedback must say
    (
        LOOP.replace("    total = 0\n", "    total = 0\n    model.zero_grad()\n"),
        "takes away the gradients of the first",
    ),
    (LOOP.replace("=n)", "=(labels != IGNORE).sum().clamp(min=1)) / len(microbatches)"), "mean"),
    (LOOP.replace("        loss.backward()\n", ""), "who calls backward()?"),
    (
        """
def accumulate(model, microbatches):
    losses = [model(tokens, labels, loss_denom=1) for tokens, labels in microbatches]
    n = sum(int((labels != IGNORE).sum()) for _, labels in microbatches)
    (sum(losses) / n).backward()
    return sum(losses).item() / n
""",
        "the activations of both are in memory",
    ),
    (
        LOOP.replace(
            "    for",
            """
    import torch
    microbatches = [[torch.cat(parts) for parts in zip(*microbatches)]]
    for""",
            1,
        ),
        "gives the model 4 sequences at once",
    ),
    (
        COUNT.replace('("dp_replicate", "dp_shard")', '("dp_shard",)'),
        "(dp_replicate 2, dp_shard 2: 1 to 4 tokens)",
    ),
    (ALL.format("(total // (layout.cp * layout.tp)).clamp(min=1)"), "(pp 2: both processes"),
    (ALL.format("total.clamp(min=1)"), "counted once for each process that shares them"),
    (ALL.format("mine * layout.data_ranks"), "a mean of means in disguise"),
    (ALL.format("total // (layout.world_size // layout.data_ranks)"), "0 / 0 is nan"),
]
