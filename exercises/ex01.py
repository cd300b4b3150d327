"""The check of exercise 1: ragged labels on a single process against F.cross_entropy, then on layouts."""
import hand01
import layouts
import torch
import torch.nn.functional as F
from feedback import Wrong, compare, on_ranks

import parallel
from distributed.layout import Layout
from models.llama3 import Llama3
from models.loss import IGNORE


def tokens_counted(cp: int, each: int = 1) -> tuple[float, float]:
    """count_tokens() on this process of 2. Data rank r has (r + 1) * each tokens with a loss; cp 2 leaves only data rank 0."""
    layout = Layout(dp_shard=2 // cp, cp=cp, global_batch_size=2 // cp, rank=torch.distributed.get_rank())
    labels = torch.full((1, 1, 4), IGNORE)
    labels[..., : each * (layout.data_rank + 1)] = 7
    return tuple(float(n) for n in parallel.count_tokens(labels, layout))


def check_accumulate():
    torch.manual_seed(0)
    model, b = Llama3(layouts.config()), layouts.global_batch(0, 4, False)
    logits = model(b.tokens).flatten(0, 1)
    want = F.cross_entropy(logits, b.labels.flatten(), ignore_index=IGNORE)
    want.backward()
    gradient = model.norm.weight.grad.clone()
    model.zero_grad()
    pairs = list(zip(b.tokens.split(1), b.labels.split(1)))
    counts = [(labels != IGNORE).sum().item() for _, labels in pairs]
    waiting = []  # per forward: no backward has run yet (right for the first forward only)
    handle = model.register_forward_pre_hook(lambda *_: waiting.append(model.norm.weight.grad is None))
    loss, norm = hand01.accumulate(model, pairs), model.norm.weight.grad
    handle.remove()
    if norm is None:
        raise Wrong("accumulate leaves no gradient in the parameters: who calls backward()?")
    if any(waiting[1:]):
        raise Wrong("accumulate runs the forward of a second micro-batch before the backward of the first: then the "
                    "activations of both are in memory, and to have those of one only is what micro-batches are for")
    if not abs(loss - want.item()) < 1e-5:
        raise Wrong(f"accumulate returns the loss {loss:.5f}, and F.cross_entropy of all {sum(counts)} tokens at once is "
                    f"{want.item():.5f}. The micro-batches have {counts} tokens: is yours a mean of means, or a sum of them?")
    factor = (norm.norm() / gradient.norm()).item()
    if not (norm - gradient).norm() < 1e-4 * gradient.norm():
        raise Wrong(f"the gradient of norm.weight after accumulate is {factor:.3g} times as long as that of one big batch. "
                    f"Each micro-batch's sum must be divided by the tokens of all, {sum(counts)}; they have {counts}")


def check_count_tokens():
    for cp, said, want in ((1, "2 data ranks with 1 and 2 tokens", [(3, 1), (3, 2)]),
                           (2, "cp 2: both processes have the same sequence, with 1 token", [(1, 1), (1, 1)])):
        got = on_ranks(2, tokens_counted, cp)
        if got != want:
            guess = next((text for values, text in (
                ([(3, 3), (3, 3)], "the second number is of this data rank alone"),
                ([(2, 1), (2, 1)], "the same tokens are counted once for each process that shares them"),
                ([(1, 1), (2, 2)], "nothing is added up over the ranks"),
                ([(2, 1), (4, 2)], "a rank's tokens times the number of ranks is a mean of means in disguise"),
            ) if got == values), "add up over all processes, and count no token twice")
            raise Wrong(f"count_tokens gives {got} on the two processes and should give {want} ({said}): {guess}")
    if (got := on_ranks(2, tokens_counted, 1, 0)) != [(1, 0), (1, 0)]:
        raise Wrong(f"count_tokens gives {got} where no label of the global batch has a loss, and should give (1, 0) on both: "
                    "the sums are divided by the first number, and 0 / 0 is nan")


def check():
    check_accumulate()
    check_count_tokens()
    for flags in ({}, dict(tp=2)):
        if difference := compare(2, flags, dict(n=4, b=1)):
            raise Wrong(f"on {flags or 'dp_shard 2'}, with accumulation: {difference}")
