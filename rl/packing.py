"""From samples to the tensors of forwards: the samples of each data rank, and their layout in rows.

B rows of a forward, T tokens of a row (T/cp on this rank), L input tokens of a sample, S samples of
a forward

A row is one sample and its padding, and a forward has up to --local_batch_size rows of like
lengths. With --pack_tokens a forward is a single row of many samples: positions begin again with
each sample, and attention stays inside a sample (doc_ids). The plan depends only on the lengths of
the samples, so every rank computes the same plan, and nothing is sent.
"""

import heapq
import math
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import parallel
from distributed.layout import Layout
from rl.sample import Sample, n_read

# tokens: on a GPU the shortest T of a forward, see token_step()
GPU_TOKENS = 64


# --------------------------------------------------------------- which samples are in which forward
class Forward(NamedTuple):
    """A forward: rows of sample numbers, each row filled up to T tokens. A forward without rows, and
    a row without samples, feed a token that is not trained."""

    rows: list[list[int]]
    T: int


def longest_first(lengths: list[int]) -> list[int]:
    """Sample numbers, by length."""
    return sorted(range(len(lengths)), key=lambda i: -lengths[i])


def in_rows(
    lengths: list[int], size: int, ranks: int, fewest: int = 1
) -> list[list[list[list[int]]]]:
    """For each data rank its forwards, `fewest` or more: lists of rows, a row being a list of
    sample numbers, here of one. Like lengths go together. All ranks have equally many forwards,
    some empty: the collectives of a forward need all ranks."""
    order = longest_first(lengths)
    size = max(1, min(size, math.ceil(len(order) / (fewest * ranks))))
    n_forwards = max(fewest, math.ceil(len(order) / (size * ranks)))
    shares = []
    for rank in range(ranks):
        share = order[rank::ranks]
        forwards = []
        for k in range(n_forwards):
            forwards.append([[i] for i in share[size * k : size * (k + 1)]])
        shares.append(forwards)
    return shares


def fill_sequences(lengths: list[int], room: int, n: int) -> list[list[int]] | None:
    """The samples of n sequences of at most `room` tokens, the fullest sequence first; None if a
    sample does not fit. The longest remaining sample goes to the emptiest sequence, so all get
    about the same number of tokens."""
    sequences = [(0, k, []) for k in range(n)]  # a heap: (tokens, its number, samples)
    for i in longest_first(lengths):
        tokens, k, samples = sequences[0]
        # a single sample may be longer, such as an answer of the warm-up
        if tokens and tokens + lengths[i] > room:
            return None
        heapq.heapreplace(sequences, (tokens + lengths[i], k, [*samples, i]))
    return [samples for _, _, samples in sorted(sequences, reverse=True)]


def in_sequences(
    lengths: list[int], room: int, ranks: int, fewest: int = 1
) -> list[list[list[list[int]]]]:
    """The same with one row per forward: samples with at most `room` tokens together.

    If a sample does not fit, we try again with more sequences. The k-th forwards of all ranks have
    like lengths, because ranks wait for each other in every forward.
    """
    n = max(fewest * ranks, math.ceil(sum(lengths) / room))
    sequences = None
    while sequences is None:
        n = math.ceil(n / ranks) * ranks
        sequences = fill_sequences(lengths, room, n)
        n += 1 + n // 50
    shares = [[] for _ in range(ranks)]
    for turn, k in enumerate(range(0, len(sequences), ranks)):
        forwards = sequences[k : k + ranks]
        if turn % 2:  # the rank with the most tokens before has the fewest now
            forwards.reverse()
        for share, samples in zip(shares, forwards, strict=True):
            share.append([samples] if samples else [])
    return shares


def pieces(cfg: Any) -> int:
    """Tokens of a sequence come in multiples of this number: cp cuts two pieces per rank, tp one.
    cfg: flags or Layout."""
    if cfg.cp > 1:
        return 2 * cfg.cp * cfg.tp
    return cfg.tp


def token_step(tokens: int, layout: Layout) -> int:
    """The T of a forward with so many tokens in its longest row is a multiple of this number.

    On a GPU T takes few values, at most 16 up to 1,024 tokens and 8 more for each doubling: for
    every new shape cuDNN plans its attention again, for up to a second, forward and backward.
    """
    step = pieces(layout)
    if layout.device.type == "cuda":
        rounded = GPU_TOKENS
        while tokens > 16 * rounded:
            rounded *= 2
        step = math.lcm(step, rounded)
    return step


def row_number(n: int, size: int, layout: Layout) -> int:
    """The rows of a forward of n samples, at most `size`: on a GPU a power of two, or size, for the
    same reason as T. The rows added have no sample."""
    if layout.device.type == "cuda" and n:
        return min(2 ** (n - 1).bit_length(), size)
    return n


def row_length(rows: list[list[int]], lengths: list[int], cfg: Any, layout: Layout) -> int:
    """T of a forward of these rows of sample numbers: a multiple of token_step(). A packed row has
    one of sixteen lengths, because a GPU's kernel for documents is compiled for each length; with
    --compile only one length."""
    if cfg.batch_invariant:
        return cfg.seq_len
    tokens = 1
    if rows:
        tokens = max(sum(lengths[i] for i in row) for row in rows)
    step = token_step(tokens, layout)
    step *= max(math.ceil(cfg.pack_tokens / 16 / step), 1)
    rounded = math.ceil(tokens / step) * step
    # rows of one sample; packed, only the warm-up has so long a sample
    if tokens > cfg.pack_tokens:
        return rounded
    if cfg.compile:
        return cfg.pack_tokens
    return min(rounded, cfg.pack_tokens)


def plan_forwards(lengths: list[int], cfg: Any, layout: Layout) -> list[list[Forward]]:
    """For each data rank its forwards. In a pipeline all forwards have one shape, and each stage
    has one at a time."""
    if cfg.pack_tokens:
        shares = in_sequences(lengths, cfg.pack_tokens, layout.data_ranks, layout.pp)
    else:
        shares = in_rows(lengths, cfg.local_batch_size, layout.data_ranks, layout.pp)
    plan = []
    for share in shares:
        forwards = []
        for rows in share:
            T = row_length(rows, lengths, cfg, layout)
            if not cfg.pack_tokens:
                rows = pad_rows(rows, row_number(len(rows), cfg.local_batch_size, layout))
            forwards.append(Forward(rows, T))
        plan.append(forwards)
    if layout.pp > 1:
        return with_one_shape(plan)
    return plan


def with_one_shape(plan: list[list[Forward]]) -> list[list[Forward]]:
    """The same forwards, all with as many rows and tokens as the largest."""
    every = sum(plan, [])
    B = max(len(forward.rows) for forward in every)
    T = max(forward.T for forward in every)
    found = []
    for share in plan:
        found.append([Forward(pad_rows(forward.rows, B), T) for forward in share])
    return found


def pad_rows(rows: list[list[int]], B: int) -> list[list[int]]:
    """B rows: those, and rows without samples."""
    return rows + [[] for _ in range(B - len(rows))]


# ---------------------------------------------------------------- tensors of a forward
INTEGERS = ("tokens", "labels", "positions", "at")


def tensor_of(numbers: list, dtype: type = np.float32) -> Tensor:
    """A list as a tensor: by NumPy in a sixth of the time that torch.tensor() takes."""
    return torch.from_numpy(np.array(numbers, dtype))


def token_values(s: Sample, first: int) -> dict[str, Tensor]:
    """Inputs of a forward and of the loss for each input token of a sample, (L,) each. Label t is
    the token after input t.

    n: trained tokens of the sample. at: the label's number among all ids of the step's samples,
    with `first` ids before this
    sample; -1 for labels of the prompt. To add another value per token, add one line to `values`:
    a list or a tensor of L numbers, or one number for all tokens.
    """
    whole = tensor_of(s.prompt + s.ids, np.int64)  # (L + 1,)
    skip = [0.0] * (len(s.prompt) - 1)
    L = n_read(s)
    at = torch.full((L,), -1)
    at[len(skip) :] = torch.arange(first, first + len(s.ids))
    mask = tensor_of([*skip, *s.mask])
    sampled = mask
    if s.sampled is not None:
        sampled = tensor_of([*skip, *s.sampled])
    mu = tensor_of([*skip, *s.logprobs])
    old = mu
    if s.old is not None:
        old = tensor_of([*skip, *s.old])
    values: dict[str, Any] = dict(
        tokens=whole[:-1],
        labels=whole[1:],
        positions=torch.arange(L),
        at=at,
        mask=mask,
        sampled=sampled,
        mu=mu,
        old=old,
        n=max(sum(s.mask), 1.0),
        advantage=s.advantage,
    )
    tensors = {}
    for name, x in values.items():
        dtype = torch.long if name in INTEGERS else torch.float32
        if isinstance(x, int | float):
            tensors[name] = torch.full((L,), x, dtype=dtype)
            continue
        assert len(x) == L, f"a sample's {name} are not one per token: {s}"
        tensors[name] = torch.as_tensor(x, dtype=dtype)
    return tensors


def lay_out(
    rows: list[list[dict[str, Tensor]]], T: int, layout: Layout, fill: dict
) -> dict[str, Tensor]:
    """Each value as (B, T/cp) on the device; doc_ids stays (B, T) on every cp rank, because a query
    attends to keys of all cp ranks. fill: values of the padding on the right, if not 0."""
    index = None
    if layout.cp > 1:
        index = parallel.sequence_index(T, layout.cp, layout.coordinate("cp"))
    out = {}
    for name in rows[0][0]:
        padded = []
        for row in rows:
            x = torch.cat([values[name] for values in row])
            padded.append(torch.cat([x, x.new_full((T - len(x),), fill.get(name, 0))]))
        x = torch.stack(padded)  # (B, T)
        if index is not None and name != "doc_ids":
            x = x.index_select(1, index)  # (B, T/cp)
        out[name] = x.to(layout.device)
    return out


def forwards_of(
    samples: list[Sample], cfg: Any, layout: Layout
) -> Iterator[tuple[list[Sample], dict[str, Tensor]]]:
    """Yields (samples, tensors) of each forward of this data rank. segment: number of the token's
    sample in the forward."""
    plan = plan_forwards([n_read(s) for s in samples], cfg, layout)
    firsts = [0, *accumulate(len(s.ids) for s in samples)]
    # one input token, neither trained nor counted: for a row without samples
    idle = Sample(
        prompt=samples[0].prompt[:1],
        ids=samples[0].ids[:1],
        logprobs=[0.0],
        mask=[0.0],
        advantage=0.0,
    )
    # of a pipeline the last stage has the log-probabilities, and counts
    counts = layout.pp == 1 or layout.coordinate("pp") == layout.pp - 1
    for rows, T in plan[layout.data_rank]:
        values = []
        n_parts = 0
        for row in rows or [[]]:
            parts = [token_values(samples[i], firsts[i]) for i in row]
            parts = parts or [token_values(idle, -1)]
            for x in parts:
                x["segment"] = torch.full_like(x["tokens"], n_parts)
                if cfg.pack_tokens:
                    x["doc_ids"] = x["segment"]
                n_parts += 1
            values.append(parts)
        fill = {"at": -1, "n": 1.0, "segment": n_parts, "doc_ids": n_parts}
        b = lay_out(values, T, layout, fill)
        if not counts:
            for name in ("mask", "sampled"):
                b[name] = torch.zeros_like(b[name])
        yield [samples[i] for row in rows for i in row], b


def sum_of_samples(x: Tensor, segment: Tensor, layout: Layout) -> Tensor:
    """For each token (B, T/cp) the sum of x over its whole sample. segment: number of its sample in
    the forward. In fp64, so that the order of summands does not show."""
    # more than the number of samples
    sums = x.new_zeros(x.numel() * layout.cp + 1, dtype=torch.float64)
    sums.index_add_(0, segment.flatten(), x.flatten().double())
    if layout.cp > 1:
        dist.all_reduce(sums, group=layout.group("cp"))
    return sums[segment].float()
