"""Answers to exercise 19."""

ONLINE = """
def attend_blocks(q, blocks):
    # the logarithm of the sum in place of sum and largest score
    log_total, out = torch.full((len(q), 1), -torch.inf), 0.0
    for k, v, mask in blocks:
        scores = torch.where(mask, q @ k.T / q.shape[1] ** 0.5, -torch.inf)
        own = scores.logsumexp(1, keepdim=True)
        new = torch.logaddexp(log_total, own)
        share = torch.where(own.isinf(), 0.0, (own - new).exp())
        out = out * (1 - share) + share * (scores - torch.where(own.isinf(), 0.0, own)).exp() @ v
        log_total = new
    return out
"""
RIGHT = [ONLINE]
WRONG = [  # answer, what the feedback must say
    (
        ONLINE.replace(
            "share = torch.where(own.isinf(), 0.0, (own - new).exp())", "share = (own - new).exp()"
        ),
        "it holds nan",
    ),
    (
        ONLINE.replace(
            "torch.where(mask, q @ k.T / q.shape[1] ** 0.5, -torch.inf)",
            "q @ k.T / q.shape[1] ** 0.5",
        ),
        "is ignored",
    ),
    (ONLINE.replace(" / q.shape[1] ** 0.5", ""), "not divided by sqrt(K)"),
    (
        ONLINE.replace("out * (1 - share)", "out * 0"),
        "must be multiplied by exp(old largest - new largest)",
    ),
    (ONLINE.replace("share = ", "share = 1.0  # "), "attention over the last block alone"),
    (
        ONLINE.replace(
            "scores.logsumexp(1, keepdim=True)", "scores.exp().sum(1, keepdim=True).log()"
        ),
        "exp()",
    ),
    (
        ONLINE.replace(
            "    for k, v, mask in blocks",
            """
    k, v, mask = zip(*blocks)
    for k, v, mask in [(torch.cat(k), torch.cat(v), torch.cat(mask, 1))]""",
        ),
        "forget the block",
    ),
]
