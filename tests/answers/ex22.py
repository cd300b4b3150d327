"""Answers to exercise 22."""

ANSWER = """
def capacity_of(tokens, n_experts, top_k, factor):
    return -int(-factor * tokens * top_k // n_experts)

def places(scores, top_k, capacity):
    # one expert after the other: who has chosen it, in the order of the choices
    experts = scores.argsort(1, descending=True)[:, :top_k]
    wanted = experts.T.flatten()
    rows = torch.full_like(wanted, -1)
    for e in range(scores.shape[1]):
        mine = (wanted == e).nonzero()[:capacity, 0]
        rows[mine] = torch.arange(len(mine))
    return experts, rows.view(experts.T.shape).T

def moe(x, scores, top_k, capacity, compute):
    # with matrices of zeros and ones, as GShard does: dispatch (E, capacity, T)
    experts, rows = places(scores, top_k, capacity)
    dispatch = x.new_zeros(scores.shape[1], capacity, len(x))
    for t in range(len(x)):
        for e, row in zip(experts[t].tolist(), rows[t].tolist()):
            if row >= 0:
                dispatch[e, row, t] = 1
    results = compute(dispatch @ x)
    return torch.einsum("ect,te,ecd->td", dispatch, scores, results)
"""
RIGHT = [ANSWER]
WRONG = [  # answer, what the feedback must say
    (ANSWER.replace("-int(-factor", "int(factor"), "round up"),
    (ANSWER.replace("tokens * top_k //", "tokens //"), "each token makes top_k choices"),
    (ANSWER.replace("scores.argsort(1, descending=True)", "scores.argsort(1)"), "the best first"),
    (ANSWER.replace("[:capacity, 0]", "[:, 0]"), "-1 says dropped"),
    (ANSWER.replace(".T", ""), "First choices of all"),
    (
        ANSWER.replace("torch.arange(len(mine))", "torch.arange(len(mine)).flip(0)"),
        "count who has chosen",
    ),
    (ANSWER.replace("torch.arange(len(mine))", "0"), "overwrites the other"),
    (
        ANSWER.replace(
            "    results =",
            """
    scores = scores / (scores * dispatch.sum(1).T).sum(1, keepdim=True).clamp(min=1e-9)
    results =""",
        ),
        "add up to 1 again",
    ),
    (
        ANSWER.replace('te,ecd->td", dispatch, scores,', 'ecd->td", dispatch,'),
        "not multiplied by the scores",
    ),
    (
        ANSWER.replace("dispatch, scores, results)", "dispatch, scores, results) + x"),
        "the residual connection does that",
    ),
    (
        ANSWER.replace("dispatch, scores, results)", "dispatch, scores.detach(), results)"),
        "the gradient of scores is missing",
    ),
]
