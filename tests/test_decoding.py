"""What a rollout costs, against rl/decoding.py: shapes; and that what saves them changes no token."""
import torch
from policy import sharp_model

from models.llama3 import Llama3Config
from rl import decoding

LONG = Llama3Config(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=64, vocab_size=24, max_seq_len=512)
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
        if q.shape[2] == 1:
            shapes.add((q.shape[0], k.shape[2]))
        return known(q, k, *rest, **options)

    monkeypatch.setattr(decoding, "sdpa", sdpa)
    return shapes


def test_few_shapes_and_the_same_tokens(monkeypatch):
    """300 tokens have 3 numbers of keys for each number of rows, and not 300; their tokens are those of attention over exactly
    the keys that are there."""
    model, shapes = sharp_model(LONG), shapes_of_new_tokens(monkeypatch)
    options = dict(new=300, eot=[], stop=lambda ids: len(ids) == 13 * ids[0])  # of any length, so that rows are refilled
    bucketed = sample(model, **options)
    assert {keys for _, keys in shapes} == {128, 256, 384} and len({len(s["ids"]) for s in bucketed}) > 5
    assert len(shapes) <= 3 * len({rows for rows, _ in shapes})
    shapes.clear()
    monkeypatch.setattr(decoding, "KEY_BUCKET", 1)
    assert tokens(sample(model, **options)) == tokens(bucketed) and len(shapes) > 290
