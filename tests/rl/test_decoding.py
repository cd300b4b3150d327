"""Decoding, against rl/decoding.py: shapes of a rollout, tools, and forks with attention of their
own."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from threading import Event
from types import MethodType

import pytest
import torch
from pieces import in_pieces
from policy import sharp_model

from models import deepseek
from models.layers import rotate
from models.llama3 import Llama3Config
from models.qwen3 import Qwen3Config
from rl import decoding

LONG = Llama3Config(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    ffn_dim=64,
    vocab_size=24,
    max_seq_len=512,
)
EXPERTS = Qwen3Config(
    dim=32,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    n_experts=4,
    top_k=2,
    moe_ffn_dim=32,
    vocab_size=24,
)
LATENT = replace(
    deepseek.FLAVORS["debug"], dim=32, n_layers=2, n_heads=4, ffn_dim=64, vocab_size=24
)
PROMPTS = [[1, 2, 3], [4] * 20, [5, 6], [7, 8, 9, 10], [11] * 7, [12, 13]]


def sample(model, new=40, group=3, seed=0, **options):
    noise = torch.rand(len(PROMPTS), group, new, generator=torch.Generator().manual_seed(seed))
    return decoding.rollout(
        model, PROMPTS, noise, 1.0, **{"eot": 0, "max_len": 400, "rows": 12} | options
    )


def tokens(samples):
    return [(s.ids, s.mask, s.truncated) for s in samples]


def shapes_of_new_tokens(monkeypatch) -> set:
    """A set, filled with (rows, keys) of every attention of a new token per row."""
    shapes, known = set(), decoding.sdpa

    def sdpa(q, k, *rest, **options):
        if q.shape[1] == k.shape[1]:  # heads with the same keys are queries of a single head
            shapes.add((q.shape[0], k.shape[2]))
        return known(q, k, *rest, **options)

    monkeypatch.setattr(decoding, "sdpa", sdpa)
    return shapes


def test_few_shapes_and_the_same_tokens(monkeypatch):
    """300 tokens have 5 numbers of keys for each number of rows, not 300, and the same tokens as
    without the rounding."""
    model = sharp_model(LONG)
    shapes = shapes_of_new_tokens(monkeypatch)
    of_any_length = lambda s: None if len(s.ids) == 13 * s.ids[0] else []  # noqa: E731  so that rows are refilled
    options = dict(new=300, eot=[], reply=of_any_length)
    bucketed = sample(model, **options)
    assert {keys for _, keys in shapes} == {*range(64, 321, 64)} and len(
        {len(s.ids) for s in bucketed}
    ) > 5
    assert len(shapes) <= 5 * len({rows for rows, _ in shapes})
    monkeypatch.setattr(decoding, "KEY_BUCKET", 1)
    assert tokens(sample(model, **options)) == tokens(bucketed) and len(shapes) > 290


def test_few_keys_are_read_for_samples_of_different_lengths(monkeypatch):
    """Without neighbours of about equal length all rows would read the keys of the longest: three
    times what is needed."""
    read, needed, known = [], [], decoding.sdpa

    def sdpa(q, k, v, mask, **options):
        if len(mask) == len(k) and mask.shape[2] == 1:  # a new token per row
            read.append(k.shape[0] * k.shape[2])
            needed.append(int((mask == 0).sum()))  # added to the score of a key that is seen
        return known(q, k, v, mask, **options)

    monkeypatch.setattr(decoding, "sdpa", sdpa)
    lengths = (
        (torch.randn(64, generator=torch.Generator().manual_seed(0)).exp() * 96)
        .clamp(1, 450)
        .tolist()
    )
    ends = lambda s: None if len(s.ids) >= lengths[s.index] else []  # noqa: E731
    decoding.rollout(
        sharp_model(LONG),
        [[1]] * 16,
        torch.rand(16, 4, 450),
        1.0,
        [],
        max_len=500,
        rows=16,
        reply=ends,
    )
    assert sum(read) < 2.2 * sum(needed)


@pytest.mark.parametrize("eot", [0, []], ids=["ends by itself", "ends at its room"])
@pytest.mark.parametrize("rows", [12, 100], ids=["refilled", "all at once"])
def test_the_next_forward_is_launched_before_the_last_tokens_are_read(monkeypatch, eot, rows):
    """As on a GPU, here on a CPU: the same samples, the same ends, and at most one forward of all
    rows more for each time that the rows change."""
    model = sharp_model(LONG)
    log = []

    def with_log(name, known):
        def logged(*args):
            log.append(name)
            return known(*args)

        return logged

    for name in ("next_logits", "read", "draw_ahead"):
        monkeypatch.setattr(decoding, name, with_log(name, getattr(decoding, name)))

    def sampled(max_len):
        log.clear()
        over = []
        samples = sample(
            model, new=90, eot=eot, rows=rows, max_len=max_len, ended=lambda *s: over.append(s)
        )
        assert sorted(s.index for s in samples) == sorted(index for index, *_ in over)
        ends = {index: (ids, truncated) for index, ids, truncated in over}
        return samples, ends, Counter(log)

    for max_len in (400, 64):  # with 64 some rows have no place left and others go on
        want, ends, usual = sampled(max_len)
        with monkeypatch.context() as changed:
            changed.setattr(decoding, "RUN_AHEAD", ("cpu",))
            got, ends_ahead, ahead = sampled(max_len)
        assert tokens(got) == tokens(want)
        assert ends_ahead == ends
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs))
        assert usual["draw_ahead"] == 0 < ahead["draw_ahead"]
        assert ahead["next_logits"] <= usual["next_logits"] + ahead["draw_ahead"]
    begin = log.index("draw_ahead")
    assert log[begin : begin + 6] == [
        "draw_ahead",
        *["next_logits"] * 2,
        "read",
        "next_logits",
        "read",
    ]


def test_rows_go_on_while_another_waits_for_its_reply():
    """The reply to one sample comes when another has 30 tokens more: without that the test would
    wait for ever, or be late."""
    model, went_on, late = sharp_model(LONG), Event(), []

    def answer():
        late.append(not went_on.wait(600))
        return [20, 21]

    def reply(s, in_thread=True):
        if s.index == 4 and len(s.ids) == 35:
            went_on.set()
        asked = s.index in (1, 2) and len(s.ids) == 5
        return (thread.submit(answer) if in_thread else [20, 21]) if asked else []

    with ThreadPoolExecutor(2) as thread:
        found = sample(model, reply=reply, eot=[])
    assert (
        late == [False, False]
        and found[1].ids[5:7] == [20, 21]
        and found[1].mask[4:8] == [1, 0, 0, 1]
    )
    assert tokens(found) == tokens(sample(model, reply=partial(reply, in_thread=False), eot=[]))


@pytest.mark.parametrize(
    "tool",
    [
        lambda ids: [20, 21, 22][: ids[-1] % 4] if ids[-1] in (5, 6, 7, 8) else [],
        lambda ids: [0, 0] if ids[-1] == 7 else [],
        lambda ids: [20, 7] if ids[-1] == 7 else [],
    ],
    ids=["answers of all lengths", "an end in an answer", "a question in an answer"],
)
@pytest.mark.parametrize("config", [LONG, EXPERTS, LATENT], ids=["llama3", "experts", "latents"])
def test_a_tool_is_asked_after_each_token_of_the_model(config, tool):
    """The tool's answer follows, ends no sample and asks nothing."""
    samples = sample(sharp_model(config), reply=lambda s: tool(s.ids))
    assert any(0.0 in s.mask for s in samples)
    for s in samples:
        answer = []
        for i, (token, mask) in enumerate(zip(s.ids, s.mask)):
            assert mask == (not answer) and (mask or token == answer.pop(0))
            answer = tool(s.ids[: i + 1]) if mask else answer
            assert i == len(s.ids) - 1 or token != 0 or not mask
        assert s.truncated == (token != 0 or not mask)
    assert len({len(s.ids) for s in samples}) > 3


def takes_time_and_batch(self, x, cos, sin, attend):
    B, T, _ = x.shape
    q, k, v = (
        w(x).view(B, T, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
    )
    return self.wo(
        attend(rotate(q, cos, sin), rotate(k, cos, -sin), v).transpose(1, 2).reshape(B, T, -1)
    )


def test_blocks_of_a_fork_decode_as_without_a_cache():
    """A block gets (R, 1, D); its log-probabilities equal the same block without a cache, token by
    token."""
    model = sharp_model(LONG)
    for block in model.blocks.values():
        block.attn.forward = MethodType(takes_time_and_batch, block.attn)
    samples = sample(model, new=9)
    for s, prompt in zip(samples[::3], PROMPTS):
        logits, _ = in_pieces(model, [prompt + s.ids], [1] * len(s.ids))
        wanted = (
            logits[0][len(prompt) - 1 : -1]
            .log_softmax(-1)
            .gather(-1, torch.tensor(s.ids)[:, None])[:, 0]
        )
        torch.testing.assert_close(torch.tensor(s.logprobs), wanted, atol=1e-5, rtol=0)


def test_top_k_and_top_p_keep_what_transformers_keeps():
    """300 draws of 200 logits, alone and together, and with ties at the last of the top_k."""
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    generator = torch.Generator().manual_seed(0)
    for i in range(300):
        logits = torch.randn(1, 200, generator=generator) * 2
        if i % 3 == 0:
            logits = logits.round()
        top_k, top_p = [(50, 0.95), (3, 0.78), (0, 0.9), (50, 1.0), (500, 0.5)][i % 5]
        theirs = logits.clone()
        if top_k:
            theirs = TopKLogitsWarper(top_k)(None, theirs)
        n_top_k = int(theirs.isfinite().sum())
        if top_p < 1:
            theirs = TopPLogitsWarper(top_p)(None, theirs)
        ours = decoding.truncate(logits, top_k, top_p)
        kept = [set(x.isfinite().nonzero()[:, 1].tolist()) for x in (ours, theirs)]
        if i % 3:
            assert kept[0] == kept[1]
        else:  # which of two equally likely tokens comes last is nobody's rule
            assert (
                ours[ours.isfinite()].sort().values.equal(theirs[theirs.isfinite()].sort().values)
            )
        assert len(kept[0]) <= n_top_k
    p = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    assert decoding.truncate(p, 3, 0.78).isfinite().sum() == 2
