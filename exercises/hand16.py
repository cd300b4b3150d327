"""Exercise 16, by hand: the loss of GRPO's tokens."""

import torch


def token_losses(lp, old, advantage, mask, low: float, high: float):
    """The loss of each token, (B, T): -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A) if mask
    is 1, and 0 if mask is 0.

    lp, old (B, T): log-probabilities of the tokens under the model in training and under the
    sampling model; any number, even infinite, if mask is 0. advantage (B, 1): A. mask (B, T): 1.0
    for tokens sampled by the model, 0.0 for all others.
    """
    sampled = mask > 0
    ratio = (torch.where(sampled, lp, 0.0) - torch.where(sampled, old, 0.0)).exp()
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    return torch.where(sampled, -objective, 0.0)
