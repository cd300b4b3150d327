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
from itertools import accumulate

import torch
from torch import Tensor

import parallel


# --------------------------------------------------------------- which samples are in which forward
def n_read(sample: dict) -> int:
    """Input tokens of a sample: all but the last."""
    return len(sample["prompt"]) + len(sample["ids"]) - 1


def in_rows(lengths: list[int], size: int, ranks: int, fewest=1) -> list[list[list[list[int]]]]:
    """For each data rank its forwards, `fewest` or more: lists of rows, a row being a list of
    sample numbers, here of one. Like lengths go together. All ranks have equally many forwards,
    some empty: the collectives of a forward need all ranks."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    size = max(1, min(size, math.ceil(len(order) / (fewest * ranks))))
    forwards = range(max(fewest, math.ceil(len(order) / (size * ranks))))
    shares = [order[rank::ranks] for rank in range(ranks)]
    return [[[[i] for i in share[size * k : size * (k + 1)]] for k in forwards] for share in shares]


def in_sequences(
    lengths: list[int], room: int, ranks: int, fewest=1
) -> list[list[list[list[int]]]]:
    """The same with one row per forward: samples with at most `room` tokens together.

    The longest remaining sample goes to the emptiest sequence, so all sequences get about the same
    number of tokens. If a sample does not fit, we try again with more sequences. The k-th forwards
    of all ranks have like lengths, because ranks wait for each other in every forward.
    """
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    n = max(fewest * ranks, math.ceil(sum(lengths) / room))
    while True:
        n = math.ceil(n / ranks) * ranks
        sequences = [(0, k, []) for k in range(n)]
        for i in order:
            tokens, k, samples = sequences[0]
            # a single sample may be longer, such as an answer of the warm-up
            if tokens and tokens + lengths[i] > room:
                break
            heapq.heapreplace(sequences, (tokens + lengths[i], k, [*samples, i]))
        else:
            break
        n += 1 + n // 50
    rows = [[samples] if samples else [] for _, _, samples in sorted(sequences, reverse=True)]
    turns = [rows[k : k + ranks] for k in range(0, n, ranks)]
    # the rank with the most tokens now has the fewest in the next forward
    turns[1::2] = [turn[::-1] for turn in turns[1::2]]
    return [list(share) for share in zip(*turns)]


def pieces(cfg) -> int:
    """Tokens of a sequence come in multiples of this number: cp cuts two pieces per rank, tp one.
    cfg: flags or Layout."""
    return (2 * cfg.cp if cfg.cp > 1 else 1) * cfg.tp


def row_length(rows: list[list[int]], lengths: list[int], cfg, layout) -> int:
    """T of a forward of these rows of sample numbers: a multiple of the pieces of cp and tp. A
    packed row has one of sixteen lengths, because a GPU's kernel for documents is compiled for each
    length; with --compile only one length."""
    if cfg.batch_invariant:
        return cfg.seq_len
    tokens, step = max((sum(lengths[i] for i in row) for row in rows), default=1), pieces(layout)
    step *= max(math.ceil(cfg.pack_tokens / 16 / step), 1)
    rounded = math.ceil(tokens / step) * step
    # rows of one sample; packed, only the warm-up has so long a sample
    if tokens > cfg.pack_tokens:
        return rounded
    return cfg.pack_tokens if cfg.compile else min(rounded, cfg.pack_tokens)


def plan_forwards(lengths: list[int], cfg, layout) -> list[list[tuple[list[list[int]], int]]]:
    """For each data rank its forwards: (rows of sample numbers, T). A forward without rows, and a
    row without samples, feed a token that is not trained. In a pipeline all forwards have one
    shape, and each stage has one at a time."""
    share_out, room = (
        (in_sequences, cfg.pack_tokens) if cfg.pack_tokens else (in_rows, cfg.local_batch_size)
    )
    shares = share_out(lengths, room, layout.data_ranks, layout.pp)
    plan = [[(rows, row_length(rows, lengths, cfg, layout)) for rows in share] for share in shares]
    if layout.pp > 1:
        B, T = map(max, zip(*((len(rows), T) for share in plan for rows, T in share)))
        plan = [[([*rows, *[[]] * (B - len(rows))], T) for rows, _ in share] for share in plan]
    return plan


# ---------------------------------------------------------------- tensors of a forward
def token_values(s: dict, first: int) -> dict[str, Tensor]:
    """Inputs of a forward and of the loss for each input token of a sample, (L,) each. Label t is
    the token after input t.

    n: trained tokens of the sample. at: the label's number among all ids of the step's samples,
    with `first` ids before this
    sample; -1 for labels of the prompt. To add another value per token, add one line to `values`.
    """
    whole, skip, L = s["prompt"] + s["ids"], [0.0] * (len(s["prompt"]) - 1), n_read(s)
    at = [-1] * len(skip) + list(range(first, first + len(s["ids"])))
    values = dict(tokens=whole[:-1], labels=whole[1:], positions=list(range(L)), at=at)
    values |= dict(
        mask=[*skip, *s["mask"]],
        sampled=[*skip, *s.get("sampled", s["mask"])],
        mu=[*skip, *s["logprobs"]],
    )
    values |= dict(
        old=[*skip, *s.get("old", s["logprobs"])],
        n=[max(sum(s["mask"]), 1.0)] * L,
        advantage=[s["advantage"]] * L,
    )
    assert {len(x) for x in values.values()} == {L}, f"a sample's values are not one per token: {s}"
    integers = ("tokens", "labels", "positions", "at")
    return {
        name: torch.tensor(x, dtype=torch.long if name in integers else torch.float32)
        for name, x in values.items()
    }


def lay_out(rows: list[list[dict[str, Tensor]]], T: int, layout, fill: dict) -> dict[str, Tensor]:
    """Each value as (B, T/cp) on the device; doc_ids stays (B, T) on every cp rank, because a query
    attends to keys of all cp ranks. fill: values of the padding on the right, if not 0."""

    def padded(name, row):
        x = torch.cat([values[name] for values in row])
        return torch.cat([x, x.new_full((T - len(x),), fill.get(name, 0))])

    out = {name: torch.stack([padded(name, row) for row in rows]) for name in rows[0][0]}
    if layout.cp > 1:
        index = parallel.sequence_index(T, layout.cp, layout.coordinate("cp"))
        out = {
            name: x if name == "doc_ids" else x.index_select(1, index) for name, x in out.items()
        }
    return {name: x.to(layout.device) for name, x in out.items()}


def forwards_of(samples: list[dict], cfg, layout):
    """Yields (samples, tensors) of each forward of this data rank. segment: number of the token's
    sample in the forward."""
    plan = plan_forwards(list(map(n_read, samples)), cfg, layout)
    firsts = [0, *accumulate(len(s["ids"]) for s in samples)]
    # one input token, neither trained nor counted: for a row without samples
    idle = dict(
        prompt=samples[0]["prompt"][:1],
        ids=samples[0]["ids"][:1],
        logprobs=[0.0],
        mask=[0.0],
        advantage=0.0,
    )
    for rows, T in plan[layout.data_rank]:
        values = [
            [token_values(samples[i], firsts[i]) for i in row] or [token_values(idle, -1)]
            for row in rows or [[]]
        ]
        parts = [x for row in values for x in row]
        for n, x in enumerate(parts):
            x["segment"] = torch.full_like(x["tokens"], n)
            if cfg.pack_tokens:
                x["doc_ids"] = x["segment"]
        fill = {"at": -1, "n": 1.0, "segment": len(parts), "doc_ids": len(parts)}
        b = lay_out(values, T, layout, fill)
        # the last stage has the log-probabilities, and counts
        if layout.pp > 1 and layout.coordinate("pp") < layout.pp - 1:
            b |= {name: torch.zeros_like(b[name]) for name in ("mask", "sampled")}
        yield [samples[i] for row in rows for i in row], b
