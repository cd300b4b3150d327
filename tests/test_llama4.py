"""forks/llama4.py: the numbers are those of transformers, and every layout is one process."""
import importlib

import pytest
import torch
from layouts import compare, equals_transformers, row_name

from forks.llama4 import FLAVORS, Llama4, Llama4Config
from rl.decoding import rollout
from support.config import parse_config

pytestmark = pytest.mark.slow  # make test has no room for it

recipe = importlib.import_module("forks.train_llama4")
STRETCHED = dict(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
SIZES = dict(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=48, vocab_size=101, max_seq_len=64, chunk_size=8,
             n_experts=4, moe_ffn_dim=24, floor_scale=4, attn_scale=0.5, rope_scaling=STRETCHED)  # a chunk of 8 twice over
OTHER = SIZES | dict(moe_every=2, qk_norm=False, rope_scaling=None, n_layers=6, nope_every=3)


def drawn(model):
    for i, p in enumerate(model.parameters()):
        torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(i))
    return model


@pytest.mark.parametrize("sizes", [SIZES, OTHER, SIZES | dict(temperature_tuning=False, tie_embeddings=True)],
                         ids=["scout", "maverick", "tied"])
def test_logits_and_gradients_equal_transformers(tmp_path, sizes):
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = Llama4Config(**sizes)
    model = drawn(Llama4ForCausalLM(Llama4TextConfig(**config.to_hf(), attn_implementation="eager")).float())
    again = equals_transformers(Llama4(config), model, tmp_path)
    assert Llama4Config.from_hf(again.config.to_dict()) == config


@pytest.mark.parametrize("flavor, name", [("Scout", "16E"), ("Maverick", "128E")])
def test_sizes_are_those_of_transformers(flavor, name):
    """17 billion active parameters each, and 108 and 401 billion in all; the published 109 and 400 count the vision part."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    config = FLAVORS[flavor]
    with torch.device("meta"):
        ours, theirs = Llama4(config), Llama4ForCausalLM(Llama4TextConfig(**config.to_hf()))
    total = sum(p.numel() for p in ours.parameters())
    assert total == sum(p.numel() for p in theirs.parameters()) == {"16E": 107769861120, "128E": 400711848960}[name]
    assert round(ours.n_active_params() / 1e9) == 17


LAYOUTS = [
    (1, {}, dict(n=4, b=2, doc=True)),
    (2, {}, dict(n=4, b=1, doc=True, moe_every=1)),
    (2, dict(tp=2), dict(n=4, b=2)),
    (2, dict(cp=2), dict(n=4, b=2)),
    (2, dict(cp=2, cp_method="alltoall"), dict(n=4, b=2, doc=True)),
    (2, dict(pp=2), dict(n=4, b=2)),
    (2, dict(ep=2), dict(n=4, b=2, moe_every=1)),
]
SLOW = [
    (4, dict(dp_replicate=2, dp_shard=2), dict(n=8, b=1)),
    (4, dict(tp=2, cp=2), dict(n=4, b=2, doc=True)),
    (4, dict(tp=2, cp=2, cp_method="alltoall"), dict(n=4, b=2)),
    (4, dict(tp=2, ep=2, ac="full"), dict(n=4, b=1)),
    (4, dict(ep=4, cp=2, ac="op"), dict(n=4, b=1, moe_every=1)),
    (4, dict(pp=2, tp=2, pp_schedule="Interleaved1F1B"), dict(n=4, b=2, doc=True)),
    (8, dict(pp=2, cp=2, ep=2, dp_shard=2), dict(n=8, b=2)),
]


@pytest.mark.parametrize("row", LAYOUTS, ids=row_name)
def test_layout_of_llama4_equals_one_process(row):
    assert compare(row[0], row[1], row[2] | {"model": "llama4"}) == ""


@pytest.mark.slow
@pytest.mark.parametrize("row", SLOW, ids=row_name)
def test_more_layouts_of_llama4_equal_one_process(row):
    assert compare(row[0], row[1], row[2] | {"model": "llama4"}) == ""


@pytest.mark.parametrize("sizes", [SIZES, OTHER], ids=["scout", "maverick"])
def test_generation_with_a_cache_is_the_whole_forward(sizes):
    """Greedy samples that cross the borders of chunks, from prompts of two lengths."""
    ours, prompts = drawn(Llama4(Llama4Config(**sizes))), [[1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 12]]
    samples = rollout(ours, prompts, torch.zeros(2, 1, 20), 0.0, [], max_len=40)
    for prompt, sample in zip(prompts, samples, strict=True):
        with torch.no_grad():
            logprobs = ours(torch.tensor([prompt + sample["ids"]]))[0].log_softmax(-1)
        best = logprobs[len(prompt) - 1 : -1].max(-1)
        assert best.indices.tolist() == sample["ids"] and len(sample["ids"]) == 20
        torch.testing.assert_close(best.values, torch.tensor(sample["logprobs"]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flags, words", [
    (["--etp", "2"], "--etp 2"), (["--float8", "rowwise_experts"], "--float8 rowwise_experts")])
def test_what_llama4_cannot_do_is_one_line(flags, words, capsys):
    with pytest.raises(SystemExit) as end:
        parse_config(recipe.Config, flags)
    assert end.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("change", [
    dict(moe_layers=[1]), dict(no_rope_layers=[1, 1, 1, 1]), dict(num_experts_per_tok=2), dict(model_type="llama4")])
def test_what_llama4_cannot_represent_is_refused(change):
    with pytest.raises(ValueError, match="top_k 2" if "num_experts_per_tok" in change else next(iter(change))):
        Llama4Config.from_hf(Llama4Config(**SIZES).to_hf() | change)
