"""The sequences of a step, one by one: for --replay, what each adds to the loss and to the gradient of
the step."""

import math
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

import models.loss
import parallel
from corpus.origins import Span, spans_of
from data import Batch, TokenData
from distributed.layout import Layout, local_tensor
from distributed.pipeline import tied_copy
from flags.progress import Progress
from models.loss import IGNORE, token_logprobs

CLOSER = 3  # sequences whose documents are computed alone, too


class Step(NamedTuple):
    """A step whose gradients are complete, before the update."""

    forward_backward: object  # of parallel.py
    stages: list
    batch: Batch
    layout: Layout
    total: Tensor  # tokens with a loss in the global batch, to divide each loss by
    whole: dict[int, Tensor]  # {id of a parameter: gradient of the step, this rank's part}


class Part(NamedTuple):
    """What a part of the batch adds to the step."""

    loss: float  # addend of the loss
    square: float  # squared norm of the part's gradient
    product: float  # inner product with the gradient of the step


@dataclass
class Sequence:
    """A sequence of the global batch, and the sequence's part in the step."""

    row: int  # in the global batch
    cursor: int  # number of the sequence in the whole run
    data: TokenData  # of the part of a mixture
    window: int  # number of its window in the part
    tokens: np.ndarray  # (T,)
    labels: np.ndarray  # (T,)
    part: Part = Part(0.0, 0.0, 0.0)
    losses: np.ndarray | None = None  # (T,) losses of the tokens, 0 without a label
    documents: dict[Span, Part] = field(default_factory=dict)  # of some sequences

    @property
    def norm(self) -> float:
        return math.sqrt(self.part.square)


def gradient_order(sequence: Sequence) -> tuple[bool, float]:
    """For sorting: NaN first, then the largest gradient."""
    return not math.isnan(sequence.part.square), -sequence.part.square


def compute_sequences(step: Step, data: TokenData) -> list[Sequence]:
    """All sequences of the global batch; of those with the largest gradients also the documents.
    data: of the run, perhaps a mixture. Every rank calls; rank 0 shows the progress."""
    n = step.batch.samples
    n_own = step.batch.tokens.shape[0] * step.batch.tokens.shape[1]
    first = step.batch.first - step.layout.data_rank * n_own
    sequences = []
    with Progress("replay", n, "sequences") as progress:
        for row in range(n):
            sequence = read_sequence(data, first + row, row)
            compute_alone(sequence, step)
            sequences.append(sequence)
            progress()
    with Progress("replay: documents of the sequences with the largest gradients"):
        for sequence in sorted(sequences, key=gradient_order)[:CLOSER]:
            compute_documents(sequence, step)
    return sequences


def read_sequence(data: TokenData, cursor: int, row: int) -> Sequence:
    """The sequence with this cursor. data: of the run, perhaps a mixture."""
    found = []

    def watched(part):
        real = part.windows

        def windows(split, numbers):
            found.append((part, int(numbers[0])))
            return real(split, numbers)

        return mock.patch.object(part, "windows", windows)

    with ExitStack() as stack:
        for part in data.parts if hasattr(data, "parts") else [data]:  # of a mixture
            stack.enter_context(watched(part))
        tokens, labels, *_ = data.sequences(np.array([cursor]))
    [(part, window)] = found
    return Sequence(row, cursor, part, window, tokens[0], labels[0])


def compute_alone(sequence: Sequence, step: Step) -> None:
    """Fill in what the sequence adds to the step, and the losses of its tokens."""
    batch = batch_of_copies(sequence, step)
    sequence.part, found = compute_part(batch, step)
    # the loss of a fork may be another sum
    want = sequence.part.loss * float(step.total)
    if not math.isfinite(want) or math.isclose(found.sum(), want, rel_tol=1e-2, abs_tol=1e-3):
        sequence.losses = found


def compute_documents(sequence: Sequence, step: Step) -> None:
    """Fill in what each document of the sequence adds to the step: the labels of the others have no
    loss then. Experts are not balanced meanwhile, for that loss belongs to the whole sequence."""
    spans = spans_of(sequence.data, sequence.window)
    if len(spans) == 1:
        sequence.documents = {spans[0]: sequence.part}
        return
    with ExitStack() as stack:
        for stage in step.stages:
            for module in stage.modules():
                if hasattr(module, "aux_scale"):
                    stack.enter_context(mock.patch.object(module, "aux_scale", 0.0))
        for span in spans:
            if (sequence.labels[span.start : span.end] == IGNORE).all():
                sequence.documents[span] = Part(0.0, 0.0, 0.0)
                continue
            batch = batch_of_copies(sequence, step)
            batch.labels[..., : span.start] = IGNORE
            batch.labels[..., span.end :] = IGNORE
            sequence.documents[span], _ = compute_part(batch, step)


def compute_part(batch: Batch, step: Step) -> tuple[Part, np.ndarray]:
    """(what one of the batch's copies adds to the step, the losses of its tokens).

    Every data rank computes the same sequence, a pipeline one copy for each place of the schedule,
    and the result is divided by the number of copies. So the recipe's own code computes the numbers,
    in every layout.
    """
    layout = step.layout
    copies = layout.data_ranks * batch.tokens.shape[0] * batch.tokens.shape[1]
    for stage in step.stages:
        for p in stage.parameters():
            p.grad = None
    counted = mock.patch.object(parallel, "count_tokens", lambda *_: (step.total, step.total))
    with counted, token_losses() as losses:
        loss, _ = parallel.reduce_loss(step.forward_backward(step.stages, batch, layout), layout)
    sums = torch.zeros(2, dtype=torch.float64, device=layout.device)  # square, product
    for p in trained(step.stages):
        part = local_tensor(p.grad)
        n = parallel.replicas(p.grad, layout)
        sums[0] += inner_product(part, part).to(layout.device) / n
        if id(p) in step.whole:
            sums[1] += inner_product(part, step.whole[id(p)]).to(layout.device) / n
    dist.all_reduce(sums)
    square, product = sums.tolist()
    found = join_token_losses(losses, batch.tokens.shape[2], layout)
    return Part(float(loss) / copies, square / copies**2, product / copies), found


def batch_of_copies(sequence: Sequence, step: Step) -> Batch:
    """A batch of one sequence; in a pipeline one copy for each place of the schedule."""
    batch = step.batch
    layout = step.layout
    arrays = sequence.data.arrays(sequence.data.windows("train", [sequence.window]))
    shape = batch.tokens.shape if layout.pp > 1 else (1, 1, batch.tokens.shape[2])
    tensors = []
    for array in arrays:
        if array is not None:
            array = torch.from_numpy(array.copy()).to(layout.device).expand(shape).contiguous()
        tensors.append(array)
    return Batch(*tensors, batch.samples, batch.hash, first=sequence.cursor)


def trained(stages: Iterable[nn.Module]) -> list[Tensor]:
    """The parameters with a gradient. A weight on two stages counts once."""
    copies = {id(tied_copy(stage)) for stage in stages if hasattr(stage, "n_stages")}
    found = []
    for stage in stages:
        for p in stage.parameters():
            if p.grad is not None and id(p) not in copies:
                found.append(p)
    return found


def inner_product(a: Tensor, b: Tensor) -> Tensor:
    """The sum of a * b in fp64, some million numbers at a time."""
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for x, y in zip(a.flatten().split(2**22), b.flatten().split(2**22), strict=True):
        total += torch.dot(x.double(), y.double())
    return total


# ---------------------------------------------------------------- the losses of its tokens


@contextmanager
def token_losses() -> Iterator[list[Tensor]]:
    """Yields a list. Each loss of a forward adds a tensor, a number per token."""
    found = []
    real = models.loss.LinearCrossEntropy

    def apply(h, weight, labels, all_reduce, vocab_start, *others):
        known = labels != IGNORE
        with torch.no_grad():
            words = torch.where(known, labels, 0)
            logprobs, _ = token_logprobs(h, weight, words, 1.0, all_reduce, vocab_start)
        found.append(torch.where(known, -logprobs, 0.0).double().cpu())
        return real.apply(h, weight, labels, all_reduce, vocab_start, *others)

    with mock.patch.object(models.loss, "LinearCrossEntropy", SimpleNamespace(apply=apply)):
        yield found


def join_token_losses(losses: list[Tensor], T: int, layout: Layout) -> np.ndarray:
    """(T,) losses of a sequence's tokens, from the parts of all ranks. losses: of token_losses; the
    first tensor belongs to the first micro-batch and the prediction of the next token."""
    sums = torch.zeros(2, T, dtype=torch.float64)
    if losses:
        places = torch.arange(T)
        if layout.cp > 1:
            places = parallel.sequence_index(T, layout.cp, layout.coordinate("cp"))
        if not layout.loss_parallel:
            places = places.chunk(layout.tp)[layout.rank % layout.tp]
        # the first of the micro-batch's copies
        sums[0, places] += losses[0][: len(places)]
        sums[1, places] += 1
    dist.all_reduce(sums)
    return (sums[0] / sums[1].clamp(min=1)).numpy()
