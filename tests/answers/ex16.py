"""Answers to exercise 16."""


def losses(body: str):
    return f"\ndef token_losses(lp, old, advantage, mask, low, high):\n{body}"


def denominator(body: str):
    return f"\ndef loss_denominator(divisor, samples, max_new_tokens):\n{body}"


LOG_RATIO = "    ratio = (lp.masked_fill(mask == 0, 0) - old.masked_fill(mask == 0, 0)).exp()\n"
RIGHT = [
    # the loss by cases, without a min
    losses("""
    keep = mask.bool()
    ratio = torch.exp(lp.masked_fill(~keep, 0.0) - old.masked_fill(~keep, 0.0))
    too_far = ((advantage > 0) & (ratio > 1 + high)) | ((advantage < 0) & (ratio < 1 - low))
    bound = torch.where(advantage > 0, 1 + high, 1 - low)
    return -torch.where(too_far, bound, ratio) * advantage * mask
""")
    + denominator("""
    z = 0.0
    for s in samples:
        tokens = sum(s.mask)
        z += {"samples": tokens > 0, "max_new_tokens": (tokens > 0) * max_new_tokens}.get(divisor, tokens)
    return z
"""),
]
WRONG = [
    (
        losses(LOG_RATIO + "    return -ratio.clamp(1 - low, 1 + high) * advantage * mask\n"),
        "That is the clipped ratio alone",
    ),
    (
        losses(
            LOG_RATIO
            + "    return -torch.minimum(ratio, ratio.clamp(1 - low, 1 + high)) * advantage * mask\n"
        ),
        "That is the max of the two objectives -1.50 and -1.28",
    ),
    (
        losses(
            LOG_RATIO
            + "    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage) * mask\n"
            "    return loss / mask.sum(1, keepdim=True)\n"
        ),
        "a mean of means is another number",
    ),
    (
        losses(
            "    ratio = ((lp - old) * mask).sum(1, keepdim=True).div(mask.sum(1, "
            "keepdim=True)).exp()\n"
            "    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * "
            "advantage) * mask\n"
        ),
        "a ratio of sequences or of means",
    ),
    (
        losses(
            "    ratio = ((lp - old) * mask).exp()\n"
            "    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * "
            "advantage) * mask\n"
        ),
        "is nan when a token that was not sampled",
    ),
    (
        denominator(
            "    if divisor == 'tokens':\n        return sum(len(s.mask) for s in samples)\n"
            "    if divisor == 'samples':\n        return len(samples)\n"
            "    return len(samples) * max_new_tokens\n"
        ),
        "a sample without a trained token counts for nothing",
    ),
    (
        denominator(
            "    samples = [s for s in samples if any(s.mask)]\n"
            "    if divisor == 'samples':\n        return len(samples)\n"
            "    if divisor == 'max_new_tokens':\n        return len(samples) * max_new_tokens\n"
            "    return sum(sum(s.mask) for s in samples) / max(len(samples), 1)\n"
        ),
        "a mean cannot be added up over ranks",
    ),
]
