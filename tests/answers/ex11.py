"""Answers to exercise 11."""


def answer(exchange: str, both: str = "a.add_(b); b.copy_(a)", group: str = 'layout.group("pp")'):
    """a: the first stage's gradient, b: the last one's, or None where another rank has it."""
    lines = "\n".join("    " + line for line in exchange.strip().splitlines())
    return f"""
def sum_tied_gradients(stages, layout):
    a = b = None
    for stage in stages:
        if stage.index == 0:
            a = local_tensor(stage.tok_embeddings.weight.grad)
        if tied_copy(stage) is not None:
            b = local_tensor(tied_copy(stage).grad)
    group = {group}
    ranks = dist.get_process_group_ranks(group)
    if a is not None and b is not None:
        {both}
        return
{lines}
"""


RIGHT = [
    # the last stage sends its part, the first one sends back the sum
    answer("""
if b is not None:
    dist.send(b.contiguous(), ranks[0], group)
    dist.recv(b, ranks[0], group)
elif a is not None:
    part = torch.zeros_like(a)
    dist.recv(part, ranks[-1], group)
    a += part
    dist.send(a.contiguous(), ranks[-1], group)
"""),
    # both directions, one after the other; the first stage begins
    answer(
        """
mine, peer = (a, ranks[-1]) if a is not None else (b, ranks[0])
if mine is None:
    return
theirs, own = torch.empty_like(mine), mine.clone()
steps = [lambda: dist.send(own, peer, group), lambda: dist.recv(theirs, peer, group)]
for step in steps if a is not None else reversed(steps):
    step()
torch.add(own, theirs, out=mine)
""",
        both="total = a + b; a.copy_(total); b.copy_(total)",
    ),
]
ONE_WAY = """
if b is not None:
    dist.send(b.contiguous(), ranks[0], group)
elif a is not None:
    part = torch.zeros_like(a)
    dist.recv(part, ranks[-1], group)
    a += part
"""
BOTH = "mine = a if a is not None else b\nif mine is not None:\n    dist.all_reduce(mine, group=group)\n"
WRONG = [
    (answer("pass"), "nothing has changed: each end has its own part"),
    (answer(ONE_WAY), "only the first stage has the sum"),
    (
        answer(
            ONE_WAY
            + """
    dist.send(a.contiguous(), ranks[-1], group)
if b is not None:
    part = torch.zeros_like(b)
    dist.recv(part, ranks[0], group)
    b += part
"""
        ),
        "received a sum to which its own part had been added already",
    ),
    (answer(BOTH + "    mine /= 2\n"), "it is the mean"),
    (answer(BOTH, group="dist.group.WORLD"), "the gradients of all pipelines are added up"),
    (answer(BOTH, both="a += b; b += a"), "a V schedule: rank 0 has the first and the last stage"),
]
