"""Answers to exercise 1."""
RIGHT = [
    {"hand01.py": {"accumulate": """
def accumulate(model, microbatches):
    import torch
    count = torch.stack([labels.ne(IGNORE).sum() for _, labels in microbatches]).sum()
    losses = []
    for tokens, labels in microbatches:
        part = model(tokens, labels, loss_denom=torch.ones(())) / count
        part.backward()
        losses.append(part.detach())
    return float(torch.stack(losses).sum())
"""}, "parallel.py": {"count_tokens": """
def count_tokens(labels, layout):
    mine = (labels != IGNORE).sum()
    share = mine.double() * layout.data_ranks / layout.world_size
    dist.all_reduce(share)
    return share.round().long().clamp(min=1), mine
"""}},
    {"hand01.py": {"accumulate": """
def accumulate(model, microbatches):
    n, total = sum(int((labels != IGNORE).sum()) for _, labels in microbatches), 0
    for tokens, labels in microbatches:
        loss = model(tokens, labels, loss_denom=1)
        (loss / n).backward()
        total += loss.item() / n
    return total
"""}, "parallel.py": {"count_tokens": """
def count_tokens(labels, layout):
    mine = labels.ne(IGNORE).sum()
    counts = [torch.empty_like(mine) for _ in range(layout.world_size)]
    dist.all_gather(counts, mine)
    return torch.stack(counts).sum().div(layout.world_size / layout.data_ranks).long().clamp(min=1), mine
"""}},
]
WRONG = [  # answer, what the feedback must say
    ({"hand01.py": {"accumulate": """
def accumulate(model, microbatches):
    total = 0.0
    for tokens, labels in microbatches:
        loss = model(tokens, labels, loss_denom=(labels != IGNORE).sum().clamp(min=1)) / len(microbatches)
        loss.backward()
        total += loss.item()
    return total
"""}}, "mean of means"),
    ({"hand01.py": {"accumulate": """
def accumulate(model, microbatches):
    n = sum((labels != IGNORE).sum() for _, labels in microbatches)
    return sum(model(tokens, labels, loss_denom=n).item() for tokens, labels in microbatches)
"""}}, "who calls backward()?"),
    ({"parallel.py": {"count_tokens": """
def count_tokens(labels, layout):
    mine = (labels != IGNORE).sum()
    total = mine.clone()
    dist.all_reduce(total)
    return total.clamp(min=1), mine
"""}}, "counted once for each process that shares them"),
    ({"parallel.py": {"count_tokens": """
def count_tokens(labels, layout):
    mine = (labels != IGNORE).sum()
    return mine * layout.data_ranks, mine
"""}}, "a mean of means in disguise"),
    ({"hand01.py": {"accumulate": """
def accumulate(model, microbatches):
    losses = [model(tokens, labels, loss_denom=1) for tokens, labels in microbatches]
    n = sum(int((labels != IGNORE).sum()) for _, labels in microbatches)
    (sum(losses) / n).backward()
    return sum(losses).item() / n
"""}}, "the activations of both are in memory"),
    ({"parallel.py": {"count_tokens": """
def count_tokens(labels, layout):
    mine = (labels != IGNORE).sum()
    total = mine.clone()
    dist.all_reduce(total)
    return total // (layout.world_size // layout.data_ranks), mine
"""}}, "0 / 0 is nan"),
]
