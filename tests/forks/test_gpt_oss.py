"""forks/gpt_oss.py: the numbers are those of transformers, and every layout is one process."""
import pytest
import torch
from layouts import FORK_LAYOUTS, assert_samples_are_the_best_tokens, compare, drawn, equals_transformers, row_name
from pool import pool

from checkpoint import load_hf
from forks.gpt_oss import FLAVORS, GptOss, GptOssConfig

pytestmark = pytest.mark.slow  # make test has no room for it

YARN = dict(factor=4.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=16)
SIZES = dict(dim=32, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16, vocab_size=101, max_seq_len=64, sliding_window=5,
             n_experts=4, top_k=2, moe_ffn_dim=24, rope_scaling=YARN)


def theirs(config: GptOssConfig):
    """transformers' model with weights that are all drawn: sinks and biases matter, and some activations are clamped."""
    from transformers import GptOssConfig as Theirs
    from transformers import GptOssForCausalLM

    return drawn(GptOssForCausalLM(Theirs(**config.to_hf(), attn_implementation="eager")).float())


@pytest.mark.parametrize("sizes", [SIZES, SIZES | dict(rope_scaling=None, tie_embeddings=True, n_layers=2, swiglu_limit=0.5)],
                         ids=["yarn", "tied"])
def test_logits_and_gradients_equal_transformers(tmp_path, sizes):
    config = GptOssConfig(**sizes)
    model = theirs(config)
    again = equals_transformers(GptOss(config), model, tmp_path)
    assert GptOssConfig.from_hf(again.config.to_dict()) == config


@pytest.mark.parametrize("flavor, total, active", [("20B", 20.91, 3.61), ("120B", 116.83, 5.13)])
def test_published_sizes(flavor, total, active):
    """Billions, as in table 1 of arXiv:2508.10925; active without the embedding, and with the head."""
    config = FLAVORS[flavor]
    with torch.device("meta"):
        model = GptOss(config)
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 2) == total
    assert round((model.n_active_params() - config.vocab_size * config.dim) / 1e9, 2) == active


@pytest.mark.parametrize("row", FORK_LAYOUTS, ids=row_name)
def test_layout_of_gpt_oss_equals_one_process(row):
    assert compare(row[0], row[1], row[2] | {"model": "gpt_oss"}) == ""


def in_mxfp4(folder, config) -> dict[str, torch.Tensor]:
    """Rewrites the experts of a folder with random blocks and scales, and returns what transformers makes of them."""
    from safetensors.torch import load_file, save_file
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    file, g, meant = folder / "model.safetensors", torch.Generator().manual_seed(2), {}
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith("_proj") and ".experts." in name]:
        E, n_in, n_out = tensors.pop(name).shape
        blocks = torch.randint(256, (E, n_out, n_in // 32, 16), generator=g).to(torch.uint8)
        scales = torch.randint(118, 128, (E, n_out, n_in // 32), generator=g).to(torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        meant[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    save_file(tensors, file)
    return meant


def read_shards(config, folder):
    """This rank's part of a model on two ranks, gathered."""
    from layouts import build, full

    stages, _ = build(config, dict(ep=2), 4, 2)
    load_hf(stages, folder)
    return {fqn: full(p) for fqn, p in stages[0].named_parameters()}


def test_published_experts_of_four_bits_are_read(tmp_path):
    config = GptOssConfig(**SIZES | dict(dim=64, moe_ffn_dim=32))
    theirs(config).save_pretrained(tmp_path)
    meant = in_mxfp4(tmp_path, config)
    ours = GptOss(config)
    load_hf(ours, tmp_path)
    names, weights = ours.hf_keys(), dict(ours.named_parameters())
    found = {names[fqn]: p for fqn, p in weights.items() if names[fqn] in meant}
    assert found.keys() == meant.keys() and len(meant) == 6
    for name, p in found.items():
        assert torch.equal(p, meant[name]), name
    for shards in pool(2).run(read_shards, config, tmp_path):
        assert [fqn for fqn, p in weights.items() if not torch.equal(shards[fqn], p)] == []


@pytest.mark.parametrize("part, change", [("blocks", lambda t: t[:, :-1]), ("scales", lambda t: t.float())])
def test_blocks_that_do_not_fit_are_one_line(tmp_path, part, change):
    from safetensors.torch import load_file, save_file

    config = GptOssConfig(**SIZES | dict(dim=64, moe_ffn_dim=32))
    theirs(config).save_pretrained(tmp_path)
    in_mxfp4(tmp_path, config)
    tensors, name = load_file(tmp_path / "model.safetensors"), f"model.layers.0.mlp.experts.gate_up_proj_{part}"
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="gate_up_proj_blocks and .*_scales are"):
        load_hf(GptOss(config), tmp_path)


def test_generation_with_a_cache_is_the_whole_forward():
    assert_samples_are_the_best_tokens(drawn(GptOss(GptOssConfig(**SIZES))))


def test_layer_types_that_do_not_alternate_are_refused():
    known = GptOssConfig(**SIZES).to_hf()
    with pytest.raises(ValueError, match="layer_types"):
        GptOssConfig.from_hf(known | {"layer_types": ["full_attention"] * 3})
    with pytest.raises(ValueError, match="truncate"):
        GptOssConfig.from_hf(known | {"rope_scaling": known["rope_scaling"] | {"truncate": True}})
