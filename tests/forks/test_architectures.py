"""forks/gpt_oss.py, llama4.py and olmo3.py: the numbers are those of transformers, and every layout is one process."""
import pytest
import torch
import transformers
from layouts import FORK_LAYOUTS, assert_samples_are_the_best_tokens, compare, drawn, equals_transformers, row_name
from pool import pool

from checkpoint import load_hf
from forks import gpt_oss, llama4, olmo3
from forks.gpt_oss import GptOss, GptOssConfig
from forks.llama4 import Llama4, Llama4Config
from forks.olmo3 import Olmo3Config
from storage.hf import class_of

pytestmark = pytest.mark.slow  # make test has no room for it

COMMON = dict(dim=32, n_heads=4, n_kv_heads=2, head_dim=16, vocab_size=101, max_seq_len=64)
YARN = dict(factor=4.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=16)
STRETCHED = dict(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
EXPERTS = COMMON | dict(n_experts=4, moe_ffn_dim=24)
OSS = EXPERTS | dict(n_layers=3, sliding_window=5, top_k=2, rope_scaling=YARN)
SCOUT = EXPERTS | dict(n_layers=4, ffn_dim=48, chunk_size=8, floor_scale=4, attn_scale=0.5, rope_scaling=STRETCHED)
MAVERICK = SCOUT | dict(moe_every=2, qk_norm=False, rope_scaling=None, n_layers=6, nope_every=3)
OLMO = COMMON | dict(n_layers=5, ffn_dim=48, sliding_window=5, rope_scaling=YARN | dict(attention_factor=1.2))
CONFIGS = {
    "gpt_oss": GptOssConfig(**OSS),
    "gpt_oss tied": GptOssConfig(**OSS | dict(rope_scaling=None, tie_embeddings=True, n_layers=2, swiglu_limit=0.5)),
    "llama4 scout": Llama4Config(**SCOUT),
    "llama4 maverick": Llama4Config(**MAVERICK),
    "llama4 tied": Llama4Config(**SCOUT | dict(temperature_tuning=False, tie_embeddings=True)),
    "olmo3": Olmo3Config(**OLMO),
    "olmo3 tied": Olmo3Config(**OLMO | dict(rope_scaling=None, tie_embeddings=True, n_kv_heads=4)),
}


def theirs(config):
    """transformers' model with weights that are all drawn: sinks and biases matter, and some activations are clamped."""
    name = config.to_hf()["architectures"][0].removesuffix("ForCausalLM")
    name = {"Llama4": "Llama4Text"}.get(name, name)
    their_config = getattr(transformers, f"{name}Config")(**config.to_hf(), attn_implementation="eager")
    return drawn(getattr(transformers, config.to_hf()["architectures"][0])(their_config).float())


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_equal_transformers(tmp_path, name):
    config = CONFIGS[name]
    again = equals_transformers(class_of(config)(config), theirs(config), tmp_path)
    assert config.from_hf(again.config.to_dict()) == config.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("module, flavor, total, active", [
    (gpt_oss, "20B", 20.91, 3.61), (gpt_oss, "120B", 116.83, 5.13), (olmo3, "7B", 7.30, 7.30), (olmo3, "32B", 32.23, 32.23)])
def test_published_sizes(module, flavor, total, active):
    """Billions, of gpt-oss as in table 1 of arXiv:2508.10925; active without the embedding, and with the head."""
    config = module.FLAVORS[flavor]
    with torch.device("meta"):
        model = class_of(config)(config)
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 2) == total
    if module is gpt_oss:
        assert round((model.n_active_params() - config.vocab_size * config.dim) / 1e9, 2) == active


@pytest.mark.parametrize("flavor, name", [("Scout", "16E"), ("Maverick", "128E")])
def test_sizes_are_those_of_transformers(flavor, name):
    """17 billion active parameters each, and 108 and 401 billion in all; the published 109 and 400 count the vision part."""
    config = llama4.FLAVORS[flavor]
    with torch.device("meta"):
        ours, other = Llama4(config), transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**config.to_hf()))
    total = sum(p.numel() for p in ours.parameters())
    assert total == sum(p.numel() for p in other.parameters()) == {"16E": 107769861120, "128E": 400711848960}[name]
    assert round(ours.n_active_params() / 1e9) == 17


@pytest.mark.parametrize("row", FORK_LAYOUTS, ids=row_name)
@pytest.mark.parametrize("model", ["gpt_oss", "llama4", "olmo3"])
def test_layout_equals_one_process(model, row):
    """Of Llama 4, experts in every layer and in every second one take turns. OLMo 3 has no experts, and so no ep."""
    n, flags, problem = row
    more = {"moe_every": 1 + FORK_LAYOUTS.index(row) % 2} if model == "llama4" else {}
    flags = {name: value for name, value in flags.items() if name != "ep" or model != "olmo3"}
    assert compare(n, flags, problem | more | {"model": model}) == ""


@pytest.mark.parametrize("name", ["gpt_oss", "llama4 scout", "llama4 maverick", "olmo3"])
def test_generation_with_a_cache_is_the_whole_forward(name):
    assert_samples_are_the_best_tokens(drawn(class_of(CONFIGS[name])(CONFIGS[name])))


@pytest.mark.parametrize("name, change, words", [
    ("gpt_oss", dict(layer_types=["full_attention"] * 3), "layer_types"),
    ("gpt_oss", dict(rope_scaling=YARN | dict(rope_type="yarn", truncate=True)), "truncate"),
    ("llama4 scout", dict(moe_layers=[1]), "moe_layers"),
    ("llama4 scout", dict(no_rope_layers=[1, 1, 1, 1]), "no_rope_layers"),
    ("llama4 scout", dict(num_experts_per_tok=2), "top_k 2"),
    ("llama4 scout", dict(model_type="llama4"), "model_type"),
    ("olmo3", dict(layer_types=["full_attention"] * 5), "layer_types"),
    ("olmo3", dict(rope_parameters=dict.fromkeys(("full_attention", "sliding_attention"), YARN)), "parameters of sliding_att"),
])
def test_what_a_fork_cannot_represent_is_refused(name, change, words):
    with pytest.raises(ValueError, match=words):
        CONFIGS[name].from_hf(CONFIGS[name].to_hf() | change)


# ---------------------------------------------------------------- the published files of gpt-oss


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
    config = GptOssConfig(**OSS | dict(dim=64, moe_ffn_dim=32))
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

    config = GptOssConfig(**OSS | dict(dim=64, moe_ffn_dim=32))
    theirs(config).save_pretrained(tmp_path)
    in_mxfp4(tmp_path, config)
    tensors, name = load_file(tmp_path / "model.safetensors"), f"model.layers.0.mlp.experts.gate_up_proj_{part}"
    tensors[name] = change(tensors[name]).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="gate_up_proj_blocks and .*_scales are"):
        load_hf(GptOss(config), tmp_path)
