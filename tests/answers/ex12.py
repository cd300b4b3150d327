"""Answers to exercise 12."""


def answer(
    order="kind.argsort(stable=True)",
    undo="y[torch.argsort(order)]",
    home="received, sent",
    sizes="arriving.view(ep, -1).sum(0)",
    travel="AllToAll.apply",
    weights="weight[order]",
):
    return f"""
def exchange_tokens(experts, group, x, weight, counts, shared=None, parts=1):
    def plain(x, group, sent=None, received=None):
        out = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(out, x.detach(), received, sent, group=group)
        return out
    ep = dist.get_world_size(group)
    weights = [local_tensor(w) for w in (experts.w1, experts.w2, experts.w3)]
    arriving = AllToAll.apply(counts, group)
    sent, received = counts.view(ep, -1).sum(1).tolist(), arriving.view(ep, -1).sum(1).tolist()
    x = {travel}(x, group, sent, received)
    weight = AllToAll.apply(weight, group, sent, received)
    kind = torch.arange(len(counts) // ep).repeat(ep).repeat_interleave(arriving)
    order = {order}
    y = experts.compute(x[order], {weights}, {sizes}, *weights)
    return [{travel}({undo}, group, {home})]
"""


RIGHT = [
    answer(),
    # the pieces are cut and put together expert by expert, without a sort
    """
def exchange_tokens(experts, group, x, weight, counts, shared=None, parts=1):
    ep = dist.get_world_size(group)
    tables = [torch.empty_like(counts) for _ in range(ep)]
    dist.all_gather(tables, counts, group=group)
    table = torch.stack(tables).view(ep, ep, -1)  # sender, receiver, its expert
    mine = table[:, dist.get_rank(group)]  # sender, my expert
    sent, received = table[dist.get_rank(group)].sum(-1).tolist(), mine.sum(-1).tolist()
    x = AllToAll.apply(x, group, sent, received)
    weight = AllToAll.apply(weight, group, sent, received)
    # sender by sender, in each expert by expert
    pieces = x.split(mine.flatten().tolist())
    of_pieces = weight.split(mine.flatten().tolist())
    n = mine.shape[1]
    by_expert = torch.cat([pieces[sender * n + e] for e in range(n) for sender in range(ep)])
    weight = torch.cat([of_pieces[sender * n + e] for e in range(n) for sender in range(ep)])
    y = experts.compute(by_expert, weight, mine.sum(0), *(local_tensor(w) for w in (experts.w1, experts.w2, experts.w3)))
    back = y.split(mine.T.flatten().tolist())
    y = torch.cat([back[e * ep + sender] for sender in range(ep) for e in range(n)])
    return [AllToAll.apply(y, group, received, sent)]
""",
]
WRONG = [
    (
        answer(order="torch.arange(len(x))"),
        "A A B A B with the counts [3, 2]: they are in the order of arrival",
    ),
    (answer(weights="weight"), "but the weights of other rows"),
    (answer(undo="y"), "Rows travel home in the order in which they arrived: undo the sort first"),
    (answer(undo="y[order]"), "undo the sort first"),
    (answer(home="sent, received"), "On the way back a rank sends what it had received"),
    (
        answer(sizes="counts.view(ep, -1)[dist.get_rank(group)]"),
        "Of all senders together its experts have [3, 2] rows",
    ),
    (answer(travel="plain"), "the result is right, but x has no gradient"),
]
