"""Experts: the grouped arithmetic against a loop, routing and parameters against transformers and the published counts."""
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config as HFConfig
from transformers import Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import models.moe
from models.moe import Balance, Experts, apply_experts, load_statistics
from models.qwen3 import FLAVORS, MoE, Qwen3, Qwen3Config

TINY = dict(dim=32, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=64, vocab_size=97, max_seq_len=64)
COUNTS = {  # MODELS.md: total, active
    "0.6B": (596_049_920, 596_049_920),
    "1.7B": (1_720_574_976, 1_720_574_976),
    "4B": (4_022_468_096, 4_022_468_096),
    "8B": (8_190_735_360, 8_190_735_360),
    "14B": (14_768_307_200, 14_768_307_200),
    "32B": (32_762_123_264, 32_762_123_264),
    "30B-A3B": (30_532_122_624, 3_353_032_704),
    "235B-A22B": (235_093_634_560, 22_190_763_520),
}


@pytest.mark.parametrize("flavor", COUNTS)
def test_parameter_counts(flavor):
    with torch.device("meta"):
        model = Qwen3(FLAVORS[flavor])
    assert (sum(p.numel() for p in model.parameters()), model.n_active_params()) == COUNTS[flavor]


def test_debug_flavors_can_be_split():
    for name in ("debug", "debug_moe"):
        c = FLAVORS[name]
        assert c.n_layers >= 6 and c.n_heads % 4 == 0 and c.n_kv_heads % 4 == 0 and c.n_experts % 8 == 0
    with torch.device("meta"):
        dense, moe = Qwen3(FLAVORS["debug"]), Qwen3(FLAVORS["debug_moe"])
    assert abs(moe.n_active_params() / dense.n_active_params() - 1) < 0.01  # comparable runs


def loop(experts, x, index, weight):
    """Token by token, expert by expert."""
    out = torch.zeros_like(x)
    for n in range(x.shape[0]):
        for e, w in zip(index[n].tolist(), weight[n], strict=True):
            hidden = F.silu(experts.w1[e] @ x[n]) * (experts.w3[e] @ x[n])
            out[n] = out[n] + w * (experts.w2[e] @ hidden)
    return out


@pytest.mark.parametrize("use_kernel", [True, False])
@pytest.mark.parametrize("used", [8, 3, 1])  # experts that get tokens at all
def test_grouped_equals_loop(use_kernel, used, monkeypatch):
    if not use_kernel:
        monkeypatch.setattr(models.moe, "grouped_mm", None)
    torch.manual_seed(0)
    experts = Experts(8, 16, 24)
    for p in experts.parameters():
        torch.nn.init.normal_(p, std=0.3)
    index = torch.stack([torch.randperm(used)[: min(2, used)] for _ in range(20)])
    x, weight = torch.randn(20, 16), torch.rand(index.shape)
    results = []
    for function in (lambda *a: apply_experts(*a, torch.bincount(index.flatten(), minlength=8)), loop):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_(), *experts.parameters()]
        out = function(experts, leaves[0], index, leaves[1])
        results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
    for ours, want in zip(*results, strict=True):
        torch.testing.assert_close(ours, want, atol=2e-5, rtol=1e-4)


def transformers_model(moe: bool, tied: bool, norm_topk_prob: bool):
    torch.manual_seed(0)
    common = dict(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=16, intermediate_size=64,
        vocab_size=97, max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=tied, attn_implementation="eager",
    )
    if moe:
        common |= dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=norm_topk_prob)
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**common)).float()
    return Qwen3ForCausalLM(HFConfig(**common)).float()


def stacked(theirs: dict, names) -> torch.Tensor:
    """Our tensor from transformers' state dict, whether it keeps experts one by one or (5.x, in memory) stacked and fused."""
    if isinstance(names, str):
        return theirs[names]
    if names[0] in theirs:
        return torch.stack([theirs[n] for n in names])
    layer, which = names[0].split(".experts.")[0], names[0].split(".")[-2]
    if which == "down_proj":
        return theirs[f"{layer}.experts.down_proj"]
    gate, up = theirs[f"{layer}.experts.gate_up_proj"].chunk(2, dim=1)
    return gate if which == "gate_proj" else up


KINDS = [(False, False, True), (False, True, True), (True, False, True), (True, False, False)]


@pytest.mark.parametrize("moe, tied, norm", KINDS)
def test_equals_transformers(moe, tied, norm):
    theirs = transformers_model(moe, tied, norm)
    config = Qwen3Config.from_hf(theirs.config.to_dict())
    assert (config.n_experts, config.tie_embeddings, config.head_dim) == (8 if moe else 0, tied, 16)
    ours = Qwen3(config)
    state = theirs.state_dict()
    with torch.no_grad():
        for fqn, p in ours.named_parameters():
            p.copy_(stacked(state, ours.hf_keys()[fqn]))
    tokens = torch.randint(0, 97, (2, 20), generator=torch.Generator().manual_seed(1))
    want = theirs(tokens).logits
    torch.testing.assert_close(ours(tokens), want, atol=1e-5, rtol=1e-5)

    F.cross_entropy(want.flatten(0, 1), tokens.flatten()).backward()
    ours(tokens, labels=tokens, loss_denom=tokens.numel()).backward()
    gradients = {n: p.grad for n, p in theirs.named_parameters()}
    for fqn, p in ours.named_parameters():
        grad = stacked(gradients, ours.hf_keys()[fqn])
        assert (p.grad - grad).norm() <= 1e-4 * grad.norm() + 1e-8, fqn


def test_from_hf_refuses_by_name():
    good = transformers_model(True, False, True).config.to_dict()
    wrong = dict(model_type="qwen2", use_sliding_window=True, mlp_only_layers=[1], attention_bias=True, hidden_act="gelu")
    for field, value in (wrong | {"decoder_sparse_step": 2}).items():
        with pytest.raises(ValueError, match=field):
            Qwen3Config.from_hf(good | {field: value})
    old = {k: v for k, v in good.items() if k not in ("rope_parameters", "num_local_experts")}
    assert Qwen3Config.from_hf(old | {"rope_theta": 5e6, "num_experts": 8}).rope_theta == 5e6


def moe_layer(top_k=2):
    torch.manual_seed(0)
    layer = MoE(Qwen3Config(**TINY, n_experts=4, top_k=top_k, moe_ffn_dim=16))
    for p in layer.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return layer


def test_auxiliary_loss_is_the_formula():
    """coef * E * mean over sequences of sum_e f_e P_e, written out, through a layer whose output is ignored."""
    layer, x = moe_layer(), torch.randn(3, 10, 32)
    layer.balance.aux_scale = 0.1 / 3
    (layer(x) * 0).sum().backward()
    got = layer.router.weight.grad.clone()
    layer.zero_grad()
    layer.balance.aux_scale = 0.0
    probs = (x @ layer.router.weight.T).softmax(-1)
    loss = 0
    for p in probs:
        f = torch.bincount(p.topk(2, dim=-1).indices.flatten(), minlength=4) / (10 * 2)
        loss = loss + 0.1 * 4 * (f * p.mean(0)).sum() / 3
    loss.backward()
    torch.testing.assert_close(got, layer.router.weight.grad, atol=1e-7, rtol=1e-5)


def test_load_is_counted_once():
    layer, x = moe_layer(), torch.randn(2, 10, 32, requires_grad=True)
    for recompute in (False, True):
        layer.balance.load = None
        out = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
        out.sum().backward()
        assert layer.balance.load.sum() == 2 * 10 * 2
    layer.balance.load = None
    with torch.no_grad():
        layer(x)
    assert layer.balance.load is None  # evaluation does not train the balance


def test_biases_choose_but_do_not_weigh():
    layer, x = moe_layer(top_k=1), torch.randn(1, 10, 32)
    layer.norm_topk_prob = False
    layer.balance.bias[2] = 10.0
    out = layer(x)
    assert layer.balance.load.tolist() == [0, 0, 10, 0]
    weight = (x @ layer.router.weight.T).softmax(-1)[..., 2:3]
    hidden = F.silu(x @ layer.experts.w1[2].T) * (x @ layer.experts.w3[2].T)
    torch.testing.assert_close(out, weight * (hidden @ layer.experts.w2[2].T), atol=1e-5, rtol=1e-5)


def test_forced_balance_and_statistics():
    layer, x = moe_layer(), torch.randn(2, 10, 32)
    layer.balance.force = True
    layer(x)
    assert layer.balance.load.tolist() == [10, 10, 10, 10]
    worst, dead = load_statistics(torch.tensor([[10.0, 10, 10, 10], [40, 0, 0, 0]]))
    assert (worst.item(), dead.item()) == (4.0, 3)
    assert Balance(4).bias.dtype == torch.float32
