"""The check of exercise 1: ragged labels on a single process against F.cross_entropy, then on
layouts."""

import hand01
import layouts
import torch
import torch.nn.functional as F
from feedback import Wrong, alone, compare, on_ranks

import parallel
from distributed.layout import Layout
from models.llama3 import Llama3
from models.loss import IGNORE

# processes, degrees, (first number, second number) on each process, the layout in words
COUNTED = [
    (2, dict(dp_shard=2), [(3, 1), (3, 2)], "2 data ranks with 1 and 2 tokens"),
    (2, dict(cp=2), [(1, 1), (1, 1)], "cp 2: both processes have the same sequence, with 1 token"),
    (2, dict(tp=2), [(1, 1), (1, 1)], "tp 2: both processes have the same sequence, with 1 token"),
    (2, dict(pp=2), [(1, 1), (1, 1)], "pp 2: both processes have the same sequence, with 1 token"),
    (
        4,
        dict(dp_replicate=2, dp_shard=2),
        [(10, n) for n in (1, 2, 3, 4)],
        "dp_replicate 2, dp_shard 2: 1 to 4 tokens",
    ),
    (
        4,
        dict(pp=2, dp_shard=2),
        [(3, 1), (3, 2)] * 2,
        "pp 2, dp_shard 2: data ranks with 1 and 2 tokens, on both stages",
    ),
]


def tokens_counted(degrees: dict, each: int = 1) -> tuple[float, float]:
    """count_tokens() on this process. Data rank r has (r + 1) * each tokens with a loss."""
    data_ranks = degrees.get("dp_replicate", 1) * degrees.get("dp_shard", 1)
    layout = parallel.make_mesh(
        Layout(**degrees, global_batch_size=data_ranks, rank=torch.distributed.get_rank())
    )
    labels = torch.full((1, 1, 8), IGNORE)
    labels[..., : each * (layout.data_rank + 1)] = 7
    return tuple(float(n) for n in parallel.count_tokens(labels, layout))


def accumulated() -> dict:
    """accumulate() on this process, over micro-batches of 2 sequences, once for each of two steps
    without zero_grad."""
    torch.manual_seed(0)
    model, b = Llama3(layouts.config()), layouts.global_batch(0, 4, False)
    pairs = list(zip(b.tokens.split(2), b.labels.split(2)))
    # per forward: sequences; no backward has run yet (right for the first forward only)
    sizes = []
    waiting = []

    def before(module, args, kwargs):
        sizes.append(len(args[0] if args else kwargs["tokens"]))
        waiting.append(model.norm.weight.grad is None)

    handle = model.register_forward_pre_hook(before, with_kwargs=True)
    loss = hand01.accumulate(model, pairs)
    handle.remove()
    first = None if model.norm.weight.grad is None else model.norm.weight.grad.clone()
    hand01.accumulate(model, pairs)
    return dict(
        loss=float(loss), gradient=first, again=model.norm.weight.grad, sizes=sizes, waiting=waiting
    )


def check_accumulate():
    torch.manual_seed(0)
    model = Llama3(layouts.config())
    b = layouts.global_batch(0, 4, False)
    logits = model(b.tokens).flatten(0, 1)
    want = F.cross_entropy(logits, b.labels.flatten(), ignore_index=IGNORE)
    want.backward()
    gradient = model.norm.weight.grad
    counts = [(labels != IGNORE).sum().item() for labels in b.labels.split(2)]
    got = alone(accumulated)
    loss = got["loss"]
    norm = got["gradient"]
    if norm is None:
        raise Wrong("accumulate leaves no gradient in the parameters: who calls backward()?")
    if max(got["sizes"]) > 2:
        raise Wrong(
            f"accumulate gives the model {max(got['sizes'])} sequences at once, and a micro-batch "
            "has 2: two of these "
            "do not fit into memory, which is why they came one by one"
        )
    if any(got["waiting"][1:]):
        raise Wrong(
            "accumulate runs the forward of a second micro-batch before the backward of the "
            "first: then the "
            "activations of both are in memory, and to have those of one only is what "
            "micro-batches are for"
        )
    if not abs(loss - want.item()) < 1e-5:
        raise Wrong(
            f"accumulate returns the loss {loss:.5f}, and F.cross_entropy of all {sum(counts)} "
            "tokens at once is "
            f"{want.item():.5f}. The micro-batches have {counts} tokens: is yours a mean of "
            "means, or a sum of them?"
        )
    factor = (norm.norm() / gradient.norm()).item()
    if not (norm - gradient).norm() < 1e-4 * gradient.norm():
        raise Wrong(
            f"the gradient of norm.weight after accumulate is {factor:.3g} times as long as that "
            "of one big batch. "
            f"Each micro-batch's sum must be divided by the tokens of all, {sum(counts)}; they "
            f"have {counts}"
        )
    if not (got["again"] - 2 * gradient).norm() < 1e-4 * gradient.norm():
        raise Wrong(
            "a second call of accumulate takes away the gradients of the first. It adds to what "
            ".grad holds, as "
            "backward() does: when to begin again is decided by the loop (optimizer.zero_grad)"
        )


def check_count_tokens():
    for processes, degrees, want, said in COUNTED:
        got = on_ranks(processes, tokens_counted, degrees)
        if got != want:
            first = want[0][0]
            mine = [n for _, n in want]
            copies = sum(mine) // first  # ranks that have the same tokens
            guess = next(
                (
                    text
                    for values, text in (
                        (
                            [(first, first)] * processes,
                            "the second number is of this data rank alone",
                        ),
                        (
                            [(copies * first, n) for n in mine],
                            "the same tokens are counted once for each process that shares them",
                        ),
                        ([(n, n) for n in mine], "nothing is added up over the ranks"),
                        (
                            [(n * processes // copies, n) for n in mine],
                            "a rank's tokens times the number of ranks is a mean of means "
                            "in disguise",
                        ),
                    )
                    if got == values
                ),
                "add up over all processes, and count no token twice",
            )
            raise Wrong(
                f"count_tokens gives {got} on {processes} processes and should give {want} "
                f"({said}): {guess}"
            )
    if (got := on_ranks(2, tokens_counted, dict(dp_shard=2), 0)) != [(1, 0), (1, 0)]:
        raise Wrong(
            f"count_tokens gives {got} where no label of the global batch has a loss, and should "
            "give (1, 0) on both: "
            "the sums are divided by the first number, and 0 / 0 is nan"
        )


def check():
    check_accumulate()
    check_count_tokens()
    for flags in ({}, dict(tp=2)):
        if difference := compare(2, flags, dict(n=4, b=1)):
            raise Wrong(f"on {flags or 'dp_shard 2'}, with accumulation: {difference}")
