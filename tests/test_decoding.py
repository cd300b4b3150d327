"""What a rollout costs, against rl/decoding.py: shapes, operators, and waits for the device; and that what
saves them changes no token."""
from dataclasses import replace
from types import MethodType

import pytest
import torch
from pieces import in_pieces
from policy import sharp_model
from torch.utils._python_dispatch import TorchDispatchMode

from models import deepseek
from models.layers import rotate
from models.llama3 import Llama3Config
from models.qwen3 import Qwen3Config
from rl import decoding

LONG = Llama3Config(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=64, vocab_size=24, max_seq_len=512)
EXPERTS = Qwen3Config(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, n_experts=4, top_k=2, moe_ffn_dim=32,
                      vocab_size=24)
LATENT = replace(deepseek.FLAVORS["debug"], dim=32, n_layers=2, n_heads=4, ffn_dim=64, vocab_size=24)
PROMPTS = [[1, 2, 3], [4] * 20, [5, 6], [7, 8, 9, 10], [11] * 7, [12, 13]]


def sample(model, new=40, group=3, seed=0, **options):
    noise = torch.rand(len(PROMPTS), group, new, generator=torch.Generator().manual_seed(seed))
    return decoding.rollout(model, PROMPTS, noise, 1.0, **{"eot": 0, "max_len": 400, "rows": 12} | options)


def tokens(samples):
    return [(s["ids"], s["mask"], s["truncated"]) for s in samples]


def shapes_of_new_tokens(monkeypatch) -> set:
    """Fills with (rows, keys) of every attention of one new token per row."""
    shapes, known = set(), decoding.sdpa

    def sdpa(q, k, *rest, **options):
        if q.shape[1] == k.shape[1]:  # heads that share keys are queries of one head
            shapes.add((q.shape[0], k.shape[2]))
        return known(q, k, *rest, **options)

    monkeypatch.setattr(decoding, "sdpa", sdpa)
    return shapes


def test_few_shapes_and_the_same_tokens(monkeypatch):
    """300 tokens have 10 numbers of keys for each number of rows, on a GPU 3, and not 300; their tokens are those of attention
    over exactly the keys that are there."""
    model = sharp_model(LONG)
    shapes = shapes_of_new_tokens(monkeypatch)
    options = dict(new=300, eot=[], stop=lambda ids: len(ids) == 13 * ids[0])  # of any length, so that rows are refilled
    bucketed = sample(model, **options)
    assert {keys for _, keys in shapes} == {*range(32, 321, 32)} and len({len(s["ids"]) for s in bucketed}) > 5
    for bucket, few in ((128, 3), (1, 320)):
        assert len(shapes) <= 10 * len({rows for rows, _ in shapes})
        shapes.clear()
        monkeypatch.setitem(decoding.KEY_BUCKET, "cpu", bucket)
        assert tokens(sample(model, **options)) == tokens(bucketed) and len({keys for _, keys in shapes}) <= few
    assert len(shapes) > 290


class Reads(TorchDispatchMode):
    """Counts how often the host asks for what is in a tensor, which on a GPU waits until all work before is done."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.n = 0
        for name in ("tolist", "item", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__"):
            monkeypatch.setattr(torch.Tensor, name, self.counted(getattr(torch.Tensor, name)))

    def counted(self, known):
        def method(tensor, *args):
            self.n += 1
            return known(tensor, *args)

        return method

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.n += function in (torch.ops.aten.nonzero.default, torch.ops.aten.masked_select.default)
        self.n += function is torch.ops.aten.index.Tensor and any(i is not None and i.dtype == torch.bool for i in args[1])
        return function(*args, **kwargs or {})


WAYS = {
    "ends": {},
    "tool": dict(tool=lambda ids: [20, 21, 22][: ids[-1] % 4] if ids[-1] in (5, 6, 7, 8) else []),
    "tool that says the end": dict(tool=lambda ids: [0, 0] if ids[-1] == 7 else []),
    "stop": dict(stop=lambda ids: sum(ids[-3:]) % 41 == 40),
    "tool and stop": dict(tool=lambda ids: [7, 9] if ids[-1] == 7 else [], stop=lambda ids: ids[-2:] == [9, 3]),
}


@pytest.mark.parametrize("way", WAYS)
def test_one_read_for_eight_tokens(way, monkeypatch):
    """With a tool too, whose answers come after the device has gone on without them. The tokens are those of a host that looks
    at every token, and on_token hears each once, in order."""
    model, heard = sharp_model(LONG), {}
    at_every_token = sample(model, ahead=1, **WAYS[way])
    forwards, reads = [], Reads(monkeypatch)
    hook = model.register_forward_hook(lambda *_: forwards.append(1))
    with reads:
        samples = sample(model, on_token=lambda s, token: heard.setdefault(s, []).append(token), **WAYS[way])
    hook.remove()
    assert 0 < reads.n <= -(-len(forwards) // 8) and len(forwards) > 40
    assert tokens(samples) == tokens(at_every_token) and [heard[s] for s in range(18)] == [s["ids"] for s in samples]
    assert ("tool" in way) == any(0.0 in s["mask"] for s in samples)
    assert len({len(s["ids"]) for s in samples}) > 3


class Operators(TorchDispatchMode):
    """Counts the aten operators, views among them."""

    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.n += 1
        return function(*args, **kwargs or {})


def test_operators_per_token():
    """Of a model of this depth: its products alone are 197, and each takes two views."""
    model = sharp_model(Qwen3Config(dim=32, n_layers=28, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=64, vocab_size=24))
    counts = []
    for new in (17, 25):  # in one bucket of keys, and read alike
        with Operators() as operators:
            sample(model, new=new, eot=[], max_len=100, rows=18)
        counts.append(operators.n)
    per_token = (counts[1] - counts[0]) / 8
    assert 197 < per_token < 2600


def takes_time_and_batch(self, x, cos, sin, attend):
    B, T, _ = x.shape
    q, k, v = (w(x).view(B, T, -1, self.head_dim).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
    return self.wo(attend(rotate(q, cos, sin), rotate(k, cos, -sin), v).transpose(1, 2).reshape(B, T, -1))


@pytest.mark.parametrize("change", [True, False])
def test_blocks_decode_as_without_a_cache(change):
    """They get (R, 1, D), and their log-probabilities are those of the same blocks without a cache, token by token."""
    model = sharp_model(LONG)
    for block in model.blocks.values() if change else ():
        block.attn.forward = MethodType(takes_time_and_batch, block.attn)
    samples = sample(model, new=9)
    for s, prompt in zip(samples[::3], PROMPTS):
        logits, _ = in_pieces(model, [prompt + s["ids"]], [1] * len(s["ids"]))
        wanted = logits[0][len(prompt) - 1 : -1].log_softmax(-1).gather(-1, torch.tensor(s["ids"])[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(s["logprobs"]), wanted, atol=1e-5, rtol=0)
