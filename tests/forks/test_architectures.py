"""The models of forks/: the numbers are those of transformers, and every layout is one process."""

import pytest
import torch
import transformers
from layouts import (
    assert_samples_are_the_best_tokens,
    compare,
    drawn,
    equals_transformers,
    layouts_of,
    on_meta,
)
from pool import pool
from safetensors.torch import load_file, save_file
from saves import refuses
from tables import as_parameters

from flags.config import override_fields
from forks import delta_rule, gpt_oss, llama4, olmo3, qwen3_next
from storage.hf import class_of, load_hf

pytestmark = pytest.mark.slow  # make test has no room for it

COMMON = dict(dim=32, n_heads=4, n_kv_heads=2, head_dim=16, vocab_size=101, max_seq_len=64)
YARN = dict(factor=4.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=16)
STRETCHED = dict(
    factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)
EXPERTS = COMMON | dict(n_experts=4, moe_ffn_dim=24)
OSS = EXPERTS | dict(n_layers=3, sliding_window=5, top_k=2, rope_scaling=YARN)
SCOUT = EXPERTS | dict(
    n_layers=4, ffn_dim=48, chunk_size=8, floor_scale=4, attn_scale=0.5, rope_scaling=STRETCHED
)
MAVERICK = SCOUT | dict(moe_every=2, qk_norm=False, rope_scaling=None, n_layers=6, nope_every=3)
OLMO = COMMON | dict(
    n_layers=5, ffn_dim=48, sliding_window=5, rope_scaling=YARN | dict(attention_factor=1.2)
)
NEXT = EXPERTS | dict(
    n_layers=5, top_k=2, shared_ffn_dim=24, linear_k_heads=2, linear_v_heads=4, linear_k_dim=8
)
CONFIGS = {
    "qwen3_next": qwen3_next.Qwen3NextConfig(**NEXT),
    "qwen3_next tied": qwen3_next.Qwen3NextConfig(
        **NEXT | dict(tie_embeddings=True, n_layers=4, rope_share=0.5, conv_size=3)
    ),
    "gpt_oss": gpt_oss.GptOssConfig(**OSS),
    "gpt_oss tied": gpt_oss.GptOssConfig(
        **OSS | dict(rope_scaling=None, tie_embeddings=True, n_layers=2, swiglu_limit=0.5)
    ),
    "llama4 scout": llama4.Llama4Config(**SCOUT),
    "llama4 maverick": llama4.Llama4Config(**MAVERICK),
    "llama4 tied": llama4.Llama4Config(
        **SCOUT | dict(temperature_tuning=False, tie_embeddings=True)
    ),
    "olmo3": olmo3.Olmo3Config(**OLMO),
    "olmo3 tied": olmo3.Olmo3Config(
        **OLMO | dict(rope_scaling=None, tie_embeddings=True, n_kv_heads=4)
    ),
}


def theirs(config):
    """transformers' model with weights that are all drawn: sinks and biases matter, and some
    activations are clamped."""
    their_config = transformers.AutoConfig.for_model(**config.to_hf(), attn_implementation="eager")
    return drawn(transformers.AutoModelForCausalLM.from_config(their_config).float())


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_gradients_equal_transformers_and_samples_whole_forwards(tmp_path, name):
    config = CONFIGS[name]
    assert_samples_are_the_best_tokens(drawn(class_of(config)(config)))
    again = equals_transformers(class_of(config)(config), theirs(config), tmp_path)
    assert config.from_hf(again.config.to_dict()) == config.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    "module, flavor, total, active",
    [
        (gpt_oss, "20B", 20.91, 3.61),
        (gpt_oss, "120B", 116.83, 5.13),
        (olmo3, "7B", 7.30, 7.30),
        (olmo3, "32B", 32.23, 32.23),
        (qwen3_next, "80B-A3B", 79.67, 3.56),
        (llama4, "Scout", 107.77, 16.14),
        (llama4, "Maverick", 400.71, 16.15),
    ],
)
def test_published_sizes(module, flavor, total, active):
    """Billions, of gpt-oss as in table 1 of arXiv:2508.10925, of Llama 4 as transformers counts its
    text part; active without the embedding, and with the head."""
    config = module.FLAVORS[flavor]
    model = on_meta(config)
    assert round(sum(p.numel() for p in model.parameters()) / 1e9, 2) == total
    if hasattr(model, "n_active_params"):
        assert round((model.n_active_params() - config.vocab_size * config.dim) / 1e9, 2) == active


LAYOUTS = layouts_of("forks")


@pytest.mark.parametrize("row", as_parameters(LAYOUTS))
@pytest.mark.parametrize("model", ["gpt_oss", "llama4", "olmo3", "qwen3_next"])
def test_layout_equals_one_process(model, row):
    """Of Llama 4, experts in every layer and in every second one take turns. OLMo 3 has no experts,
    and so no ep."""
    n, flags, problem = row
    number = list(LAYOUTS.values()).index(row)
    if model == "llama4":
        more = {"moe_every": 1 + number % 2}
    else:
        more = {}
    flags = {name: value for name, value in flags.items() if name != "ep" or model != "olmo3"}
    assert compare(n, flags, problem | more | {"model": model}) == ""


@pytest.mark.parametrize(
    "name, change, words",
    [
        ("gpt_oss", dict(layer_types=["full_attention"] * 3), "layer_types"),
        ("gpt_oss", dict(rope_scaling=YARN | dict(rope_type="yarn", truncate=True)), "truncate"),
        ("llama4 scout", dict(moe_layers=[1]), "moe_layers"),
        ("llama4 scout", dict(no_rope_layers=[1, 1, 1, 1]), "no_rope_layers"),
        ("llama4 scout", dict(num_experts_per_tok=2), "top_k 2"),
        ("llama4 scout", dict(model_type="llama4"), "model_type"),
        ("qwen3_next", dict(layer_types=["full_attention"] * 5), "layer_types"),
        ("olmo3", dict(layer_types=["full_attention"] * 5), "layer_types"),
        (
            "olmo3",
            dict(rope_parameters=dict.fromkeys(("full_attention", "sliding_attention"), YARN)),
            "parameters of sliding_att",
        ),
    ],
)
def test_what_a_fork_cannot_represent_is_refused(name, change, words):
    refuses(words, CONFIGS[name].from_hf, CONFIGS[name].to_hf() | change)


def test_a_field_that_a_fork_took_away_is_no_field():
    refuses(
        "'qkv_bias=1' is no field=value; .*fields are dim, ",
        override_fields,
        CONFIGS["olmo3"],
        "qkv_bias=1",
        "--flag",
    )


def test_delta_rule_in_chunks_is_the_recurrence(monkeypatch):
    """Token by token, in fp64. Documents end between chunks, inside a chunk, and twice in one
    chunk."""
    monkeypatch.setattr(delta_rule, "CHUNK", 4)
    B = 2
    T = 15
    H = 2
    R = 2
    N = 3
    U = 5
    g = torch.Generator().manual_seed(0)
    x = torch.randn(B, T, H, 2 * N + R * U + 2 * R, generator=g, dtype=torch.float64)
    x[..., -2 * R : -R], x[..., -R:] = -x[..., -2 * R : -R].abs(), x[..., -R:].sigmoid()
    weight = torch.randn(H, 2 * N + R * U, 3, generator=g, dtype=torch.float64)
    docs = torch.tensor([[0] * 4 + [1] * 5 + [2] + [3] * 5, [0] * 15])
    got = delta_rule.delta_scan(x, weight, N, docs)
    state = torch.zeros(B, H, R, N, U, dtype=torch.float64)
    for b, t in ((b, t) for b in range(B) for t in range(T)):
        state[b] *= t > 0 and docs[b, t] == docs[b, t - 1]
        seen = [s for s in range(max(0, t - 2), t + 1) if docs[b, s] == docs[b, t]]
        mixed = sum(x[b, s, :, : weight.shape[1]] * weight[..., 2 - (t - s)] for s in seen)
        q, k, v = torch.nn.functional.silu(mixed).split([N, N, R * U], -1)
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        state[b] *= x[b, t, :, -2 * R : -R, None, None].exp()
        error = v.view(H, R, U) - torch.einsum("hn,hrnu->hru", k, state[b])
        state[b] += torch.einsum("hn,hru->hrnu", k, error * x[b, t, :, -R:, None])
        torch.testing.assert_close(got[b, t], torch.einsum("hn,hrnu->hru", q * N**-0.5, state[b]))


# ---------------------------------------------------------------- the published files of gpt-oss


def in_mxfp4(folder, config) -> dict[str, torch.Tensor]:
    """Rewrites the experts of a folder with random blocks and scales, and returns what transformers
    makes of them."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    file = folder / "model.safetensors"
    g = torch.Generator().manual_seed(2)
    meant = {}
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
    config = gpt_oss.GptOssConfig(**OSS | dict(dim=64, moe_ffn_dim=32))
    theirs(config).save_pretrained(tmp_path)
    meant = in_mxfp4(tmp_path, config)
    ours = gpt_oss.GptOss(config)
    load_hf(ours, tmp_path)
    names = ours.hf_keys()
    weights = dict(ours.named_parameters())
    found = {names[fqn]: p for fqn, p in weights.items() if names[fqn] in meant}
    assert found.keys() == meant.keys()
    assert len(meant) == 6
    for name, p in found.items():
        assert torch.equal(p, meant[name]), name
    for shards in pool(2).run(read_shards, config, tmp_path):
        assert [fqn for fqn, p in weights.items() if not torch.equal(shards[fqn], p)] == []
    file = tmp_path / "model.safetensors"
    whole = load_file(file)
    name = "model.layers.0.mlp.experts.gate_up_proj_"
    # one line for what does not fit
    for part, change in (("blocks", lambda t: t[:, :-1]), ("scales", lambda t: t.float())):
        save_file(whole | {name + part: change(whole[name + part]).contiguous()}, file)
        refuses("gate_up_proj_blocks and .*_scales are", load_hf, gpt_oss.GptOss(config), tmp_path)
