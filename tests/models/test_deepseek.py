"""DeepSeek, against models/deepseek.py: transformers, the papers written out token by token, the
published counts, and files.

Its layouts are in test_parallel.py."""

import functools
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from layouts import config, equals_transformers, global_batch, on_meta, random_tokens
from pieces import in_pieces
from safetensors.torch import load_file, save_file
from saves import refuses
from their_models import DEEPSEEK, YARN

import grpo
from models.attention import causal_attention, sdpa
from models.deepseek import FLAVORS, DeepSeek, DeepSeekConfig, MoE
from models.layers import rope_frequencies
from models.loss import IGNORE
from rl.policy import model_of
from storage import hf


def normal(model, std=0.1, seed=0):
    """Weights that leave nothing out: norms off 1, biases off 0."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for n, t in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" not in n:
                t.normal_(1.0 if "norm" in n else 0.0, std, generator=g)
    return model


def tiny(**changes) -> DeepSeekConfig:
    return config("deepseek", **changes)


# ---------------------------------------------------------------- transformers

V2 = dict(norm_topk_prob=False, topk_method="greedy")
VARIANTS = {
    "v3": {},
    "v3_plain": dict(q_lora_rank=None, n_group=1, topk_group=1, norm_topk_prob=False),
    "v3_yarn": dict(rope_parameters=YARN),
    "v3_yarn_mscales": dict(rope_parameters=YARN | dict(mscale=1.0, mscale_all_dim=0.5)),
    "v3_half_tied": dict(rope_interleave=False, tie_word_embeddings=True),
    "v3_moonlight": dict(
        q_lora_rank=None,
        n_group=1,
        topk_group=1,
        n_shared_experts=2,
        rms_norm_eps=1e-5,
        rope_parameters=dict(rope_type="default", rope_theta=50000.0),
        routed_scaling_factor=2.446,
    ),
    "v2": V2
    | dict(topk_method="group_limited_greedy", routed_scaling_factor=16.0, rope_parameters=YARN),
    "v2_lite": V2
    | dict(
        q_lora_rank=None, n_group=1, topk_group=1, rope_parameters=YARN, routed_scaling_factor=1.0
    ),
}


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    """variant -> (transformers' model in fp32, the folder that it wrote)."""
    # not above: the pool's workers import this file, too, and would wait for it
    import transformers

    @functools.cache
    def make(variant):
        kind = f"Deepseek{variant[:2].upper()}"
        Config = getattr(transformers, f"{kind}Config")
        Model = getattr(transformers, f"{kind}ForCausalLM")
        model = normal(Model(Config(**DEEPSEEK | VARIANTS[variant])).float().eval())
        folder = str(tmp_path_factory.mktemp(variant))
        model.save_pretrained(folder)
        return model, folder

    return make


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_gradients_and_files_equal_transformers(theirs, variant, tmp_path):
    model, folder = theirs(variant)
    ours, _ = hf.load_hf_model(folder)
    again = equals_transformers(ours, model, tmp_path)
    assert again.config.architectures == [type(model).__name__]


def test_norms_of_the_latents_keep_their_eps(theirs, monkeypatch):
    """Moonlight's other norms have 1e-5. With it in these, the logits would not be those of
    transformers."""
    model, folder = theirs("v3_moonlight")
    tokens = random_tokens(2, 20, seed=1)
    with torch.no_grad():
        # a latent so small that eps matters
        model.model.layers[1].self_attn.kv_a_proj_with_mqa.weight.mul_(0.01)
        want = model(tokens).logits
        ours, _ = hf.load_hf_model(folder)
        ours.blocks["1"].attn.wkv_a.weight.mul_(0.01)
        torch.testing.assert_close(ours(tokens), want, atol=1e-5, rtol=1e-5)
        ours.blocks["1"].attn.kv_norm.eps = 1e-5
        assert (ours(tokens) - want).abs().max() > 1e-3
        model.model.layers[1].self_attn.kv_a_proj_with_mqa.weight.mul_(100)


PUBLISHED = dict(  # config.json of deepseek-ai/DeepSeek-V3, all that says something about the model
    architectures=["DeepseekV3ForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    aux_loss_alpha=0.001,
    ep_size=1,
    first_k_dense_replace=3,
    hidden_act="silu",
    hidden_size=7168,
    initializer_range=0.02,
    intermediate_size=18432,
    kv_lora_rank=512,
    max_position_embeddings=163840,
    model_type="deepseek_v3",
    moe_intermediate_size=2048,
    moe_layer_freq=1,
    n_group=8,
    n_routed_experts=256,
    n_shared_experts=1,
    norm_topk_prob=True,
    num_attention_heads=128,
    num_experts_per_tok=8,
    num_hidden_layers=61,
    num_key_value_heads=128,
    num_nextn_predict_layers=1,
    pretraining_tp=1,
    q_lora_rank=1536,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    rms_norm_eps=1e-6,
    rope_theta=10000,
    routed_scaling_factor=2.5,
    rope_scaling=dict(
        beta_fast=32,
        beta_slow=1,
        factor=40,
        mscale=1.0,
        mscale_all_dim=1.0,
        original_max_position_embeddings=4096,
        type="yarn",
    ),
    scoring_func="sigmoid",
    seq_aux=True,
    tie_word_embeddings=False,
    topk_group=4,
    topk_method="noaux_tc",
    use_cache=True,
    v_head_dim=128,
    vocab_size=129280,
    quantization_config=dict(quant_method="fp8", weight_block_size=[128, 128]),
)


def test_the_published_config_is_the_flavor():
    assert DeepSeekConfig.from_hf(PUBLISHED) == replace(FLAVORS["671B"], mtp_depth=1)
    for flavor, c in FLAVORS.items():
        assert DeepSeekConfig.from_hf(c.to_hf()) == c, flavor
    assert DeepSeekConfig.from_hf(PUBLISHED | dict(model_type="kimi_k2")) == DeepSeekConfig.from_hf(
        PUBLISHED
    )
    wrong = dict(
        model_type="qwen3",
        hidden_act="gelu",
        attention_bias=True,
        moe_layer_freq=2,
        topk_method="greedy",
        scoring_func="softmax",
        num_nextn_predict_layers=2,
    )
    for field, value in wrong.items():
        refuses(f"{field} is {value!r}", DeepSeekConfig.from_hf, PUBLISHED | {field: value})
    for change, words in (
        (dict(long_factor=2.0), "has long_factor"),
        (dict(factor=None), "'yarn' lacks factor"),
    ):
        scaling = PUBLISHED["rope_scaling"] | change
        refuses(
            f"rope scaling {words}", DeepSeekConfig.from_hf, PUBLISHED | {"rope_scaling": scaling}
        )
    refuses(
        "no number for kv_lora_rank",
        DeepSeekConfig.from_hf,
        {k: v for k, v in PUBLISHED.items() if k != "kv_lora_rank"},
    )


# ---------------------------------------------------------------- routing

V3_ROUTES = dict(n_experts=16, n_groups=4, top_k_groups=2, top_k=4, route_scale=2.5)
V2_ROUTES = dict(score_func="softmax", norm_topk_prob=False)
ROUTES = {
    "v3": V3_ROUTES,
    "v3_one_group": V3_ROUTES | dict(n_groups=1, top_k_groups=1),
    "v2_groups": V3_ROUTES | V2_ROUTES | dict(n_groups=8, top_k_groups=3, route_scale=16.0),
}


def test_group_scores_are_two_in_v3_and_one_in_v2():
    """Group 0 has the one best expert, group 1 the two best together."""
    scores = torch.tensor([[0.9, 0.1, 0.6, 0.5, 0.2, 0.2, 0.3, 0.1]])
    for changes, group in ({}, 1), (V2_ROUTES, 0):
        limited = MoE(tiny(top_k=1, top_k_groups=1, **changes)).best_groups(scores)
        assert limited.isfinite().nonzero()[:, 1].tolist() == [2 * group, 2 * group + 1]


# ---------------------------------------------------------------- balancing


@pytest.mark.parametrize("case", ROUTES)
def test_sequence_wise_loss_against_a_loop(case):
    """V3, eq. 17-20: per sequence, from the best scores without biases. V2, eq. 23-25, counts what
    was chosen."""
    c = tiny(**ROUTES[case])
    alpha = 0.07
    B = 3
    T = 13
    layer = normal(MoE(c), std=0.3)
    g = torch.Generator().manual_seed(2)
    layer.balance.bias.normal_(0, 0.3, generator=g).mul_(c.score_func == "sigmoid")
    x = torch.randn(B, T, c.dim, generator=g, requires_grad=True)
    layer.balance.aux_scale = alpha / B
    (layer(x) * 0).sum().backward()
    got = layer.router.weight.grad.clone(), x.grad.clone()
    layer.zero_grad()
    x.grad = None

    loss = 0.0
    E = c.n_experts
    k = c.top_k
    for sequence in x:
        f = [0.0] * E
        P = [0.0] * E
        for token in sequence:
            logits = layer.router.weight @ token
            if c.score_func == "sigmoid":
                s = logits.sigmoid()
            else:
                s = logits.softmax(0)
            best = (
                (s if c.score_func == "sigmoid" else layer.best_groups(s[None])[0])
                .topk(k)
                .indices.tolist()
            )
            for e in range(E):
                f[e] += E / (k * T) * (e in best)
                P[e] = P[e] + s[e] / s.sum() / T
        loss = loss + alpha * sum(f[e] * P[e] for e in range(E)) / B
    loss.backward()
    for ours, want in zip(got, (layer.router.weight.grad, x.grad)):
        torch.testing.assert_close(ours, want, atol=1e-8, rtol=1e-4)


# ---------------------------------------------------------------- counts


def test_counts_of_multi_token_prediction_and_flops():
    v3, lite, both = map(
        on_meta, (FLAVORS["671B"], FLAVORS["16B"], replace(FLAVORS["671B"], mtp_depth=1))
    )
    layer = sum(p.numel() for p in v3.blocks["60"].parameters())
    assert sum(p.numel() for p in both.mtp.parameters()) == layer + 2 * 7168 * 7168 + 3 * 7168
    # V2-Lite, by hand: matrices of attention, dense FFN, experts that one token meets, norms, head;
    # then attention over T
    attention = 2048 * 16 * 192 + 2048 * 576 + 512 * 16 * 256 + 16 * 128 * 2048
    norms = 27 * (2 * 2048 + 512) + 2048
    ffn = 3 * 2048 * 10944 + 26 * ((6 + 2) * 3 * 2048 * 1408 + 64 * 2048)
    matmuls = 27 * attention + norms + ffn + 102400 * 2048
    assert lite.flops_per_token(4096) == 6 * matmuls + 6 * 27 * 16 * (192 + 128) * 4096
    # MTP: its layer without the idle experts, its projection and norms, and the head once more
    idle = (256 - 8) * 3 * 7168 * 2048
    extra = layer - idle + 2 * 7168 * 7168 + 3 * 7168 + 129280 * 7168
    assert (
        both.flops_per_token(4096) - v3.flops_per_token(4096)
        == 6 * extra + 6 * 128 * (192 + 128) * 4096
    )


# ---------------------------------------------------------------- generation


@pytest.mark.parametrize(
    "changes", [{}, dict(q_lora_rank=0, **V2_ROUTES), dict(rope_interleave=False, mtp_depth=1)]
)
def test_the_cache_keeps_the_latent_and_gives_the_same_logits(changes):
    model = normal(DeepSeek(tiny(**changes)))
    c = model.config
    tokens = random_tokens(2, 24, seed=3)
    with torch.no_grad():
        want = model(tokens)
    logits, cache = in_pieces(model, tokens.tolist(), [1] * 15)
    torch.testing.assert_close(torch.stack(logits), want, atol=1e-5, rtol=1e-5)
    assert len(cache.kept) == c.n_layers
    for (latents,) in cache.kept.values():
        assert latents.untyped_storage().nbytes() == 4 * 2 * 24 * (
            c.kv_lora_rank + c.qk_rope_head_dim
        )
    # the second row is shorter
    logits, _ = in_pieces(model, [tokens[0].tolist(), tokens[1, :17].tolist()], [4, 4, 4])
    torch.testing.assert_close(logits[0], want[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits[1], want[1, :17], atol=1e-5, rtol=1e-5)


# ---------------------------------------------------------------- multi-token prediction


def mtp_losses(model, tokens, labels, doc_ids):
    """(sum of next-token losses, sum of the losses of the tokens after): arXiv:2412.19437, eq.
    21-25, a document at a time."""
    D = model.config.dim
    head = model.head.weight
    mtp = model.mtp
    embed = model.tok_embeddings.weight
    first = 0.0
    second = 0.0

    def rms(x, norm):
        return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight

    w_embed = mtp.eh_proj.weight[:, :D]
    w_h = mtp.eh_proj.weight[:, D:]
    for row, label, docs in zip(tokens, labels, doc_ids):
        for doc in docs.unique():
            # y[i] is token i+1, or IGNORE
            t = row[docs == doc]
            y = label[docs == doc]
            T = len(t)
            angle = torch.arange(T)[:, None] * rope_frequencies(
                model.config, model.config.qk_rope_head_dim, "cpu"
            )
            rope = [x[None, None] for x in (angle.cos(), angle.sin())]
            attend = causal_attention(torch.arange(T)[None])
            h = embed[t][None]
            for block in model.blocks.values():
                h = block(h, *rope, attend)
            h = rms(h, model.norm)[0]
            first = first + F.cross_entropy(h @ head.T, y, ignore_index=IGNORE, reduction="sum")
            if T < 2:
                continue
            # eq. 21, of 0 .. T-2
            mixed = rms(h[:-1], mtp.hnorm) @ w_h.T + rms(embed[t[1:]], mtp.enorm) @ w_embed.T
            # eq. 22
            out = rms(
                mtp.block(mixed[None], *(x[:, :, : T - 1] for x in rope), attend)[0], mtp.norm
            )
            # eq. 23-24: position i predicts token i+2, which is the label of position i+1
            for i in range(T - 1):
                if y[i + 1] != IGNORE:
                    second = second - (out[i] @ head.T).log_softmax(-1)[y[i + 1]]
    return first, second


@pytest.mark.parametrize("documents", [False, True])
def test_loss_and_gradients_of_multi_token_prediction(documents):
    model = normal(DeepSeek(tiny(n_layers=2, mtp_depth=1)))
    model.mtp_weight = 0.7
    b = global_batch(0, 4, documents)
    denom = (b.labels != IGNORE).sum()
    loss = model(b.tokens, b.labels, b.positions, b.doc_ids, denom)
    loss.backward()
    got = {fqn: p.grad.clone() for fqn, p in model.named_parameters()}
    model.zero_grad()
    if b.doc_ids is None:
        docs = torch.zeros_like(b.tokens)
    else:
        docs = b.doc_ids
    first, second = mtp_losses(model, b.tokens, b.labels, docs)
    # what is reported is the next token's
    torch.testing.assert_close(loss, first / denom, atol=1e-6, rtol=1e-6)
    assert second > 0.3 * first
    ((first + 0.7 * second) / denom).backward()
    for fqn, p in model.named_parameters():
        assert p.grad.norm() > 0, fqn
        assert (got[fqn] - p.grad).norm() <= 1e-4 * p.grad.norm(), fqn
    assert model.mtp.block.moe.balance.load.sum() > 0


# ---------------------------------------------------------------- files


def write(folder, c: DeepSeekConfig, tensors: dict, **changes):
    Path(folder).mkdir()
    save_file(tensors, Path(folder, "model.safetensors"))
    Path(folder, "config.json").write_text(json.dumps(c.to_hf() | changes))
    return str(folder)


def published_tensors(model) -> dict:
    """A model's tensors under the names of published files, experts one by one, contiguous."""
    state = dict([*model.named_parameters(), *model.named_buffers()])
    found = {}
    for fqn, names in model.hf_keys().items():
        if isinstance(names, str):
            parts = [state[fqn]]
        else:
            parts = state[fqn]
        found |= {
            n: t.detach().clone()
            for n, t in zip([names] if isinstance(names, str) else names, parts)
        }
    return found


def test_layers_of_multi_token_prediction_in_files(tmp_path, capsys):
    from transformers import DeepseekV3ForCausalLM

    model = normal(DeepSeek(tiny(mtp_depth=1)))
    c = model.config
    tensors = published_tensors(model)
    tokens = random_tokens(2, 9)
    with torch.no_grad():
        want = model(tokens)
    mtp = {n: t for n, t in tensors.items() if n.startswith("model.layers.4.")}
    assert {n.removeprefix("model.layers.4.") for n in mtp} > {
        "enorm.weight",
        "hnorm.weight",
        "eh_proj.weight",
        "shared_head.norm.weight",
        "self_attn.kv_a_proj_with_mqa.weight",
        "mlp.gate.e_score_correction_bias",
        "mlp.shared_experts.up_proj.weight",
        "mlp.experts.7.down_proj.weight",
    }
    copies = {}
    for n, m in (
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("shared_head.head.weight", "lm_head.weight"),
    ):
        copies[f"model.layers.4.{n}"] = tensors[m].clone()
    full = write(tmp_path / "full", c, tensors | copies)
    without = write(tmp_path / "without", c, {n: t for n, t in tensors.items() if n not in mtp})

    def said() -> str:
        (line,) = capsys.readouterr().out.splitlines()
        return line

    with_mtp, _ = hf.load_hf_model(full)
    assert (
        "without what the model lacks: model.layers.4.embed_tokens.weight, "
        "model.layers.4.shared_head.head.weight" in said()
    )
    for (fqn, a), b in zip(with_mtp.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b), fqn
    assert torch.equal(with_mtp.mtp.block.moe.balance.bias, model.mtp.block.moe.balance.bias)
    assert torch.equal(with_mtp(tokens), want)
    # reinforcement learning has no second prediction
    trained = model_of(grpo.Config(init_from=full), c.vocab_size)[1]
    assert c.mtp_depth == 1
    assert trained == replace(with_mtp.config, mtp_depth=0)
    splits = grpo.Config(init_from=full, tp=2)
    refuses("--tp 2: tp cannot split DeepSeek's rollouts", model_of, splits, c.vocab_size)
    for elsewhere in (dict(engine="vllm:1"), dict(gen_ranks=1)):
        model_of(replace(splits, **elsewhere), c.vocab_size)

    plain = normal(DeepSeek(replace(c, mtp_depth=0)), seed=5)
    assert hf.load_hf(plain, full) == []
    line = said()
    assert f"without what the model lacks: {min(mtp)}"[:40] in line
    assert "more" in line
    assert torch.equal(plain(tokens), want)

    fresh = normal(DeepSeek(c), seed=5)
    before = fresh.mtp.eh_proj.weight.clone()
    absent = hf.load_hf(fresh, without)
    assert "without what the files lack: mtp." in said()
    assert set(absent) == {fqn for fqn in fresh.hf_keys() if fqn.startswith("mtp.")}
    assert torch.equal(fresh(tokens), want)
    assert torch.equal(fresh.mtp.eh_proj.weight, before)

    # config.json says that there is a layer, and no file has it: not a model with an empty one
    dropped, _ = hf.load_hf_model(without)
    assert "without multi-token prediction: the files lack model.layers.4.*" in said()
    assert dropped.config.mtp_depth == 0
    assert dropped.mtp is None
    assert torch.equal(dropped(tokens), want)

    half = write(tmp_path / "half", c, {n: t for n, t in tensors.items() if "hnorm" not in n})
    refuses("missing: model.layers.4.hnorm.weight$", hf.load_hf_model, half)

    out = str(tmp_path / "out")
    hf.save_hf(model, out, torch.float32)
    saved = load_file(f"{out}/model.safetensors")
    assert saved.keys() == tensors.keys()
    for n, t in tensors.items():
        assert torch.equal(saved[n], t)
    assert json.loads(Path(out, "config.json").read_text())["num_nextn_predict_layers"] == 1
    opened = DeepseekV3ForCausalLM.from_pretrained(out).float()
    with torch.no_grad():
        torch.testing.assert_close(opened(tokens).logits, want, atol=1e-5, rtol=1e-5)


ODD = dict(
    dim=160,
    ffn_dim=200,
    moe_ffn_dim=136,
    q_lora_rank=144,
    kv_lora_rank=40,
    n_heads=4,
    qk_nope_head_dim=24,
    qk_rope_head_dim=8,
    v_head_dim=36,
    n_layers=2,
    mtp_depth=1,
)


def test_fp8_blocks_of_all_linear_weights(tmp_path):
    """Sizes that are no multiples of 128: the last block of rows and of columns is a part of one."""
    model = normal(DeepSeek(tiny(**ODD)))
    g = torch.Generator().manual_seed(4)
    files = {}
    want = {}
    n_quantised = 0
    n_edges = 0
    as_they_are = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "eh_proj.weight")
    for n, t in published_tensors(model).items():
        if t.dim() < 2 or n.endswith(as_they_are):
            files[n] = want[n] = t if n.endswith("bias") else t.bfloat16()
            continue
        rows, columns = t.shape
        codes = (torch.randn(t.shape, generator=g) * 60).to(torch.float8_e4m3fn)
        scale = torch.rand(math.ceil(rows / 128), math.ceil(columns / 128), generator=g) * 1e-3
        want[n] = (
            codes.float() * scale[torch.arange(rows)[:, None] // 128, torch.arange(columns) // 128]
        )
        files |= {n: codes, f"{n}_scale_inv": scale}
        n_quantised += 1
        n_edges += bool(rows % 128 or columns % 128)
    # attention, dense, routed and shared experts
    assert n_quantised == 3 * 5 + 3 + 2 * (8 + 1) * 3
    assert n_edges == n_quantised
    folder = write(
        tmp_path / "in", model.config, files, quantization_config=PUBLISHED["quantization_config"]
    )
    for dtype in (torch.float32, None):
        ours, _ = hf.load_hf_model(folder, dtype=dtype)
        for n, t in published_tensors(ours).items():
            if dtype or n.endswith("bias"):
                kind = torch.float32
            else:
                kind = torch.bfloat16
            assert t.dtype == kind, n
            assert torch.equal(t, want[n].to(kind)), n
    hf.save_hf(ours, str(tmp_path / "out"), torch.bfloat16)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    for n in saved:
        assert "scale_inv" not in n
    # the biases are compared with scores in their seventh digit: they stay fp32
    for n, t in want.items():
        assert torch.equal(saved[n], t if n.endswith("bias") else t.bfloat16()), n
    assert "quantization_config" not in json.loads(Path(tmp_path, "out", "config.json").read_text())


# ---------------------------------------------------------------- heads of two sizes


def test_the_kernel_gets_heads_of_one_size(monkeypatch):
    """Flash kernels take one size; beyond 256 there is none, and the generator's latents are
    compared as they are."""
    seen = []
    usual = F.scaled_dot_product_attention

    def watched(q, k, v, **o):
        seen.append(v.shape[-1])
        return usual(q, k, v, **o)

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    for K, U in ((192, 128), (128, 128), (576, 512)):
        out = sdpa(*(torch.randn(1, 2, 3, size) for size in (K, K, U)))
        assert out.shape[-1] == U
    assert seen == [192, 128, 512]
