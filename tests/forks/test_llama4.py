"""forks/llama4.py: the numbers are those of transformers, and every layout is one process."""
import pytest
import torch
from layouts import FORK_LAYOUTS, assert_samples_are_the_best_tokens, compare, drawn, equals_transformers, row_name

from forks.llama4 import FLAVORS, Llama4, Llama4Config

pytestmark = pytest.mark.slow  # make test has no room for it

STRETCHED = dict(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
SIZES = dict(dim=32, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=48, vocab_size=101, max_seq_len=64, chunk_size=8,
             n_experts=4, moe_ffn_dim=24, floor_scale=4, attn_scale=0.5, rope_scaling=STRETCHED)  # a chunk of 8 twice over
OTHER = SIZES | dict(moe_every=2, qk_norm=False, rope_scaling=None, n_layers=6, nope_every=3)


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


@pytest.mark.parametrize("row", FORK_LAYOUTS, ids=row_name)
def test_layout_of_llama4_equals_one_process(row):
    """Experts in every layer and in every second one take turns."""
    moe_every = 1 + FORK_LAYOUTS.index(row) % 2
    assert compare(row[0], row[1], row[2] | dict(model="llama4", moe_every=moe_every)) == ""


@pytest.mark.parametrize("sizes", [SIZES, OTHER], ids=["scout", "maverick"])
def test_generation_with_a_cache_is_the_whole_forward(sizes):
    assert_samples_are_the_best_tokens(drawn(Llama4(Llama4Config(**sizes))))


@pytest.mark.parametrize("change", [
    dict(moe_layers=[1]), dict(no_rope_layers=[1, 1, 1, 1]), dict(num_experts_per_tok=2), dict(model_type="llama4")])
def test_what_llama4_cannot_represent_is_refused(change):
    with pytest.raises(ValueError, match="top_k 2" if "num_experts_per_tok" in change else next(iter(change))):
        Llama4Config.from_hf(Llama4Config(**SIZES).to_hf() | change)
