"""Exercise 1, by hand: the gradients of a global batch that is too large for one forward."""
from models.loss import IGNORE


def accumulate(model, microbatches) -> float:
    """Add up in every parameter's .grad the gradient of the mean loss of all microbatches, as if they were one batch.

    microbatches: pairs (tokens, labels), each (b, T). A label that is IGNORE has no loss, and the pairs have different numbers
    of them. model(tokens, labels, loss_denom=n) returns the sum of the token losses / n. Returns the mean loss of all tokens
    that have one. Each pair is run by itself, forward and backward: two of them do not fit into memory at once.
    """
    n_tokens = sum((labels != IGNORE).sum() for _, labels in microbatches)
    total = 0.0
    for tokens, labels in microbatches:
        loss = model(tokens, labels, loss_denom=n_tokens)
        loss.backward()
        total += loss.item()
    return total
