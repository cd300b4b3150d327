"""Exercise 16, by hand: the loss of GRPO's tokens."""
import torch


def token_losses(lp, old, advantage, mask, low: float, high: float):
    """The loss of each token, (B, T): -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A), and 0 where mask is 0.

    lp, old (B, T): log-probabilities of the tokens under the model that is trained, and under the one that sampled them; where
    mask is 0 they may be any number, also infinite. advantage (B, 1). mask (B, T): 1.0 where the model sampled the token.
    """
    sampled = mask > 0
    ratio = (torch.where(sampled, lp, 0.0) - torch.where(sampled, old, 0.0)).exp()
    objective = torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)
    return torch.where(sampled, -objective, 0.0)
