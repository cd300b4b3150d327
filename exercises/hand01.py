"""Exercise 1, by hand: the gradients of a global batch too large for a single forward."""

from models.loss import IGNORE


def accumulate(model, microbatches) -> float:
    """Leave in every parameter's .grad the gradient of the mean loss over all microbatches, as if
    run as a single batch.

    model(tokens, labels, loss_denom=n) returns the sum of the token losses / n. microbatches: pairs
    (tokens, labels), each (b, T). A label IGNORE has no loss; the number of labels with a loss
    differs from pair to pair. Run forward and backward pair by pair: two pairs do not fit into
    memory at once. Gradients are added to what .grad holds, as backward() does. Returns the mean
    loss of all tokens with a loss.
    """
    n_tokens = sum((labels != IGNORE).sum() for _, labels in microbatches)
    total = 0.0
    for tokens, labels in microbatches:
        loss = model(tokens, labels, loss_denom=n_tokens)
        loss.backward()
        total += loss.item()
    return total
