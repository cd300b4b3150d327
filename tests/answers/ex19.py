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


def answer(*change) -> dict:
    return {"hand19.py": {"attend_blocks": ONLINE.replace(*change) if change else ONLINE}}


RIGHT = [answer()]
WRONG = [  # answer, what the feedback must say
    (answer("share = torch.where(own.isinf(), 0.0, (own - new).exp())", "share = (own - new).exp()"), "it holds nan"),
    (answer("torch.where(mask, q @ k.T / q.shape[1] ** 0.5, -torch.inf)", "q @ k.T / q.shape[1] ** 0.5"), "is ignored"),
    (answer(" / q.shape[1] ** 0.5", ""), "not divided by sqrt(K)"),
    (answer("out * (1 - share)", "out * 0"), "must be multiplied by exp(old largest - new largest)"),
    (answer("share = ", "share = 1.0  # "), "attention over the last block alone"),
    (answer("scores.logsumexp(1, keepdim=True)", "scores.exp().sum(1, keepdim=True).log()"), "exp()"),
    (answer("    for k, v, mask in blocks", "    k, v, mask = zip(*blocks)\n    for k, v, mask in [(torch.cat(k), "
                                            "torch.cat(v), "
            "torch.cat(mask, 1))]"), "forget the block"),
]
