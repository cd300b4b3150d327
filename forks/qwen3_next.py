"""Qwen3-Next 80B-A3B: models/qwen3.py's experts beside a shared one, and in three of four layers a gated delta rule in place
of attention, see forks/delta_rule.py.

B batch, T sequence (T/cp on this rank), D dim, H heads (H/tp), G key/value heads (G/tp), K head_dim, F moe_ffn_dim,
V vocab (V/tp), E experts (E/ep); of the delta rule: H key heads (H/tp), R value heads of each key head, N linear_k_dim,
U linear_v_dim. Under sequence parallelism the activations between attention and experts are (B, T/cp/tp, D).

Architecture: the config.json of Qwen/Qwen3-Next-80B-A3B-Instruct; the delta rule: arXiv:2412.06464. Comments explain each
difference from models/qwen3.py; all else is imported or an equal copy (tests/test_copies.py).
"""
import math
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from distributed.layout import local_tensor
from forks.delta_rule import GatherRows, OwnRows, ShortConv, cached_scan, make_scan
from models.attention import causal_attention
from models.hf_config import SHARED_FIELDS, SHARED_FIXED, YARN, check_sizes, config_from_hf, config_to_hf
from models.layers import RMSNorm, cos_and_sin, rotate
from models.loss import linear_cross_entropy
from models.moe import Balance, Experts, Router, apply_experts
from models.qwen3 import FeedForward
from parallel import TP_STYLES


@dataclass(kw_only=True)
class Qwen3NextConfig:
    dim: int = 192
    n_layers: int = 6
    n_heads: int = 8
    n_kv_heads: int = 4
    head_dim: int = 32
    vocab_size: int = 4096
    norm_eps: float = 1e-6
    rope_theta: float = 10000000.0
    rope_scaling: dict | None = None  # yarn, with the names of Hugging Face's config.json: YARN
    rope_share: float = 0.25  # of each head's numbers, the first ones, have a position
    tie_embeddings: bool = False
    max_seq_len: int = 262144
    n_experts: int = 8
    top_k: int = 2  # experts per token, beside the shared one
    moe_ffn_dim: int = 256
    shared_ffn_dim: int = 256
    norm_topk_prob: bool = True  # the weights of a token's experts are scaled to sum 1
    linear_k_heads: int = 4  # heads of the delta rule
    linear_v_heads: int = 8  # several heads of values share the keys of a head
    linear_k_dim: int = 32
    linear_v_dim: int = 32
    conv_size: int = 4  # tokens of the short convolution before the delta rule, the token itself included

    def __post_init__(self):
        check_sizes(self, "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "max_seq_len", "n_experts",
                    "moe_ffn_dim", "shared_ffn_dim", "linear_k_heads", "linear_v_heads", "linear_k_dim", "linear_v_dim",
                    "conv_size")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}, which they share")
        if self.linear_v_heads % self.linear_k_heads:
            raise ValueError(f"linear_v_heads {self.linear_v_heads} is not a multiple of linear_k_heads {self.linear_k_heads}")
        if self.rope_dim < 2 or self.rope_dim % 2:
            raise ValueError(f"rope_share {self.rope_share} of head_dim {self.head_dim} is {self.rope_dim}: RoPE turns pairs")
        if not 1 <= self.top_k <= self.n_experts:
            raise ValueError(f"top_k {self.top_k} must be between 1 and n_experts {self.n_experts}")

    @property
    def rope_dim(self) -> int:  # numbers of a head that RoPE turns
        return int(self.head_dim * self.rope_share)

    @classmethod
    def from_hf(cls, config_json: dict) -> "Qwen3NextConfig":
        """The config of a Hugging Face folder's config.json. Raises ValueError naming the field that we cannot represent.

        The tables of names are at the end of this file.
        """
        hf, kinds = dict(config_json), config_json.get("layer_types")
        if kinds and kinds != layer_types(len(kinds)) or hf.get("full_attention_interval", 4) != 4:
            raise ValueError("config.json: layer_types are not three of linear_attention and one of full_attention in turn, as "
                             "they are in forks/qwen3_next.py")
        share = hf.pop("partial_rotary_factor", None)
        for name in ("rope_parameters", "rope_scaling"):
            if hf.get(name):
                hf[name] = dict(hf[name])
                share = hf[name].pop("partial_rotary_factor", share)
        return replace(config_from_hf(cls, hf, HF_FIELDS, HF_FIXED, YARN), rope_share=0.25 if share is None else share)

    def to_hf(self) -> dict:
        """The inverse: a config.json for transformers."""
        kinds = layer_types(self.n_layers)
        return config_to_hf(self, HF_FIELDS, HF_FIXED) | dict(
            architectures=["Qwen3NextForCausalLM"], layer_types=kinds, partial_rotary_factor=self.rope_share)


def layer_types(n_layers: int) -> list[str]:
    """As config.json spells them."""
    return ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(n_layers)]


FLAVORS = {
    "debug": Qwen3NextConfig(),
    "80B-A3B": Qwen3NextConfig(
        dim=2048, n_layers=48, n_heads=16, n_kv_heads=2, head_dim=256, vocab_size=151936, n_experts=512, top_k=10,
        moe_ffn_dim=512, shared_ffn_dim=512, linear_k_heads=16, linear_v_heads=32, linear_k_dim=128, linear_v_dim=128),
}


class ZeroCentered(nn.Module):
    """RMSNorm that multiplies by 1 + weight: weight decay pulls the factor to 1."""

    def __init__(self, dim, eps):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))  # starts at 0, see init_constants

    def forward(self, x):
        r = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        return (x.float() * r * (1 + self.weight.float())).to(x.dtype)


# differs from qwen3: RoPE for a part of each head, and a gate for what a head has found
class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.n_heads * 2 * config.head_dim, bias=False)  # of each head query, then gate
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)
        self.q_norm = ZeroCentered(config.head_dim, config.norm_eps)
        self.k_norm = ZeroCentered(config.head_dim, config.norm_eps)

    def forward(self, x, cos, sin, attend):
        # -1 is the number of heads on this rank, H/tp: under tensor parallelism each rank computes some of the heads
        q, gate = self.wq(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)  # (B, T/cp, H/tp, K) each
        q = self.q_norm(q).transpose(1, 2)  # (B, H/tp, T/cp, K)
        k = self.k_norm(self.wk(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)  # (B, G/tp, T/cp, K)
        v = self.wv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, G/tp, T/cp, K)
        n = 2 * cos.shape[-1]
        q, k = (torch.cat([rotate(t[..., :n], cos, sin), t[..., n:]], -1) for t in (q, k))
        out = attend(q, k, v).transpose(1, 2) * torch.sigmoid(gate)  # (B, T/cp, H/tp, K)
        return self.wo(out.flatten(-2))  # (B, T/cp, D), summed over tp


class Decay(nn.Module):
    """How fast the state of each value head fades: the logarithm of its factor per token, from a (B, T/cp, H/tp, R)."""

    def __init__(self, n_heads):
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(n_heads))
        self.dt_bias = nn.Parameter(torch.empty(n_heads))

    def forward(self, a):
        A, bias = (local_tensor(p).float().view(a.shape[2:]) for p in (self.A_log, self.dt_bias))  # (H/tp, R)
        return -A.exp() * F.softplus(a.float() + bias)


class DeltaNet(nn.Module):
    """A gated delta rule with a short convolution before. The tokens meet in `scan` only, see forks/delta_rule.py."""

    def __init__(self, config):
        super().__init__()
        H, N, U = config.linear_k_heads, config.linear_k_dim, config.linear_v_dim
        R = config.linear_v_heads // H
        self.sizes = N, N, R * U, R * U  # of each key head: query, key, values, gates of the values
        self.R = R
        self.w_qkvz = nn.Linear(config.dim, H * sum(self.sizes), bias=False)
        self.w_ba = nn.Linear(config.dim, H * 2 * R, bias=False)
        self.conv = ShortConv(H, self.sizes[:3], config.conv_size)
        self.decay = Decay(H * R)
        self.out_norm = RMSNorm(U, eps=config.norm_eps)
        self.wo = nn.Linear(H * R * U, config.dim, bias=False)

    def forward(self, x, cos, sin, scan):
        qkv, z = self.w_qkvz(x).unflatten(-1, (-1, sum(self.sizes))).split([sum(self.sizes[:3]), self.sizes[3]], -1)
        b, a = self.w_ba(x).unflatten(-1, (-1, 2 * self.R)).chunk(2, -1)  # (B, T/cp, H/tp, R) each
        out = scan(torch.cat([qkv.float(), self.decay(a), b.float().sigmoid()], -1), self.conv(), self.sizes[0])
        out = self.out_norm(out.to(x.dtype).flatten(2, 3))  # (B, T/cp, H/tp * R, U)
        out = (out * F.silu(z.reshape(out.shape).float())).to(x.dtype)
        return self.wo(out.flatten(-2))  # (B, T/cp, D), summed over tp


class MoE(nn.Module):
    """softmax over all experts, then top-k, then (norm_topk_prob) weights that sum to 1."""

    def __init__(self, config):
        super().__init__()
        self.top_k, self.norm_topk_prob = config.top_k, config.norm_topk_prob
        self.router = Router(config.dim, config.n_experts)
        self.experts = Experts(config.n_experts, config.dim, config.moe_ffn_dim)
        self.balance = Balance(config.n_experts)

    def forward(self, x):
        B, D = x.shape[0], x.shape[-1]
        probs = self.router(x).softmax(-1).flatten(0, -2)  # (N, E)
        index = self.balance.choose(probs, self.top_k)  # (N, k)
        weight = probs.gather(1, index)
        if self.norm_topk_prob:
            weight = weight / weight.sum(-1, keepdim=True)
        flat = self.balance.add_loss(x.reshape(-1, D), probs, index, B)  # (N, D)
        return apply_experts(self.experts, flat, index, weight, self.balance.count(index)).view_as(x)


# differs from qwen3: two kinds of attention, experts in every block, and a shared one with a gate
class Block(nn.Module):
    def __init__(self, config, is_full: bool):
        super().__init__()
        self.attn_norm = ZeroCentered(config.dim, config.norm_eps)
        self.attn = Attention(config) if is_full else DeltaNet(config)
        self.ffn_norm = ZeroCentered(config.dim, config.norm_eps)
        self.moe = MoE(config)
        self.shared = FeedForward(config.dim, config.shared_ffn_dim)
        self.shared_gate = nn.Linear(config.dim, 1, bias=False)

    def forward(self, h, cos, sin, attend):
        h = h + self.attn(self.attn_norm(h), cos, sin, attend)
        x = self.ffn_norm(h)
        return h + self.moe(x) + torch.sigmoid(self.shared_gate(x)) * self.shared(x)


class Qwen3Next(nn.Module):
    """The whole model or a pipeline stage; in a stage the parts of other stages are None."""

    def __init__(self, config: Qwen3NextConfig):
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleDict({str(i): Block(config, i % 4 == 3) for i in range(config.n_layers)})
        self.norm = ZeroCentered(config.dim, config.norm_eps)
        # tied: forward takes the embedding's weight for the head as well
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        self.cp_group = None
        # parallel.py replaces these functions: context_parallel the first, tensor_parallel and compile the other two.
        self.make_attend, self.token_loss, self.logits = causal_attention, linear_cross_entropy, F.linear

    def forward(self, tokens, labels=None, positions=None, doc_ids=None, loss_denom=None, cache=None):
        """tokens (B, T) -> logits (B, T, V) in compute dtype; with labels (B, T): the scalar sum of token losses / loss_denom.

        positions (B, T) or (1, T), default 0..T-1; doc_ids (B, T) of the whole sequence: attention stays inside a
        document. cache: for generation, see rl/decoding.py. A later pipeline stage takes activations in place of tokens.
        """
        h = tokens if tokens.is_floating_point() else self.tok_embeddings(tokens)  # (B, T/cp, D)
        if positions is None:
            positions = torch.arange(h.shape[1], device=h.device)[None]
        cos, sin = cos_and_sin(self.config, self.config.rope_dim, positions)  # (B, 1, T/cp, rope_dim/2) fp32
        attend = self.make_attend(positions, doc_ids) if cache is None else None
        scan = make_scan(self.cp_group, doc_ids) if cache is None else None
        for i, block in self.blocks.items():
            if int(i) % 4 == 3:
                h = block(h, cos, sin, attend or cache.attend(i))
            else:
                h = block(h, cos, sin, scan or cached_scan(cache, i))
        if self.norm is None:
            return h  # the next pipeline stage goes on from here
        h = self.norm(h)
        weight = (self.head or self.tok_embeddings).weight  # (V/tp, D)
        if labels is None:
            return self.logits(h, weight)
        return self.token_loss(h, weight, labels, loss_denom)

    def __setattr__(self, name, value):
        """parallel.context_parallel sets make_attend, with the group of the cp ranks: the scan needs the group as well."""
        if name == "make_attend" and isinstance(value, partial):
            self.cp_group = value.keywords["group"]
        super().__setattr__(name, value)

    def init_std(self, fqn: str) -> float | None:
        """Standard deviation of a weight's initial values; None for an unknown name.

        Norms start at 1 and biases at 0, as distributed/initial.py says. Matrices that write into the residual stream are
        scaled down by sqrt(2 L), so the stream's variance does not grow with depth (GPT-2).
        """
        name = ".".join(fqn.split(".")[-2:])
        if name in ("wo.weight", "w2.weight", "experts.w2"):
            return 0.02 / math.sqrt(2 * self.config.n_layers)
        matrices = ("tok_embeddings", "wq", "wk", "wv", "w_qkvz", "w_ba", "w1", "w3", "router", "shared_gate", "head")
        if name == "conv.weight":
            return 0.5  # of conv_size numbers: the sum is as large as the input
        return 0.02 if name in ["experts.w1", "experts.w3", *(f"{matrix}.weight" for matrix in matrices)] else None

    def init_constants(self) -> dict[str, float]:
        norms = ("norm.weight", "blocks.*_norm.weight")
        return {"blocks.*.out_norm.weight": 1.0, "blocks.*.decay.A_log": 1.0} | dict.fromkeys(norms, 0.0)

    def n_active_params(self) -> int:
        """Parameters that a token uses: all but the experts not chosen."""
        c = self.config
        idle = c.n_layers * (c.n_experts - c.top_k) * 3 * c.dim * c.moe_ffn_dim
        return sum(p.numel() for p in self.parameters()) - idle

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward, PaLM's convention (arXiv:2204.02311, app. B): 6 N + 12 L H K T; N active, without lookups.
        A token of the delta rule reads a state of R * N * U numbers per head twice, and writes them once."""
        c = self.config
        n = self.n_active_params() - (0 if c.tie_embeddings else c.vocab_size * c.dim)
        full = c.n_layers // 4
        state = 18 * (c.n_layers - full) * c.linear_v_heads * c.linear_k_dim * c.linear_v_dim
        return 6 * n + 12 * full * c.n_heads * c.head_dim * seq_len + state

    def tp_plan(self) -> dict[str, str]:
        """fqn pattern -> style (a key of parallel.TP_STYLES). Between blocks, activations are sharded along the sequence."""
        plan = {
            "tok_embeddings": "vocab_embedding",
            "blocks.*.attn_norm": "sequence",
            "blocks.*.attn": "gather_sequence",
            "blocks.*.attn.wo": "rowwise",
            "blocks.*.attn.w_qkvz": "colwise",
            "blocks.*.attn.w_ba": "colwise",
            "blocks.*.attn.conv": "gather_rows",
            "blocks.*.attn.decay": "own_rows",
            "blocks.*.attn.out_norm": "head_norm",
            "blocks.*.ffn_norm": "sequence",
            "blocks.*.moe.router": "sequence_linear",  # the experts: distributed.experts.expert_parallel
            "blocks.*.shared": "gather_sequence",
            "blocks.*.shared.w1": "colwise",
            "blocks.*.shared.w3": "colwise",
            "blocks.*.shared.w2": "rowwise",
            "blocks.*.shared_gate": "sequence_linear",
            "norm": "sequence",
        }
        if self.config.n_layers > 3:  # the fourth has attention
            plan |= {f"blocks.*.attn.{name}": "colwise" for name in ("wq", "wk", "wv")}
            plan |= {f"blocks.*.attn.{name}": "head_norm" for name in ("q_norm", "k_norm")}
        return plan if self.config.tie_embeddings else plan | {"head": "vocab_head"}

    def hf_keys(self) -> dict[str, str | list[str]]:
        """fqn -> name in Hugging Face's files; for a stack of experts a list of names. The values are the same."""
        names = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
        if not self.config.tie_embeddings:
            names["head.weight"] = "lm_head.weight"
        attn = {
            "attn.wq": "self_attn.q_proj",
            "attn.wk": "self_attn.k_proj",
            "attn.wv": "self_attn.v_proj",
            "attn.wo": "self_attn.o_proj",
            "attn.q_norm": "self_attn.q_norm",
            "attn.k_norm": "self_attn.k_norm",
        }
        delta = {
            "attn.w_qkvz": "linear_attn.in_proj_qkvz",
            "attn.w_ba": "linear_attn.in_proj_ba",
            "attn.conv": "linear_attn.conv1d",
            "attn.out_norm": "linear_attn.norm",
            "attn.wo": "linear_attn.out_proj",
        }
        ffn = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
        block = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "moe.router": "mlp.gate"}
        block |= {"shared_gate": "mlp.shared_expert_gate"}
        block |= {f"shared.{ours}": f"mlp.shared_expert.{theirs}" for ours, theirs in ffn.items()}
        for i in range(self.config.n_layers):
            for ours, theirs in ffn.items():
                experts = [f"model.layers.{i}.mlp.experts.{e}.{theirs}.weight" for e in range(self.config.n_experts)]
                names[f"blocks.{i}.moe.experts.{ours}"] = experts
            table = block | (attn if i % 4 == 3 else delta)
            names |= {f"blocks.{i}.{ours}.weight": f"model.layers.{i}.{theirs}.weight" for ours, theirs in table.items()}
            for name in ("A_log", "dt_bias") if i % 4 != 3 else ():
                names[f"blocks.{i}.attn.decay.{name}"] = f"model.layers.{i}.linear_attn.{name}"
        return names

    def hf_optional(self) -> list[str]:
        """Optional names in Hugging Face's files: multi-token prediction."""
        return ["mtp.*"]


TP_STYLES |= {"own_rows": OwnRows, "gather_rows": GatherRows}

# Hugging Face's config.json; models/hf_config.py explains the tables.
HF_FIELDS = {name: entry for name, entry in SHARED_FIELDS.items() if name != "ffn_dim"} | dict(
    n_kv_heads=("num_key_value_heads", 2),
    head_dim=("head_dim", 256),
    max_seq_len=("max_position_embeddings", 32768),
    n_experts=("num_experts", None),
    top_k=("num_experts_per_tok", None),
    moe_ffn_dim=("moe_intermediate_size", None),
    shared_ffn_dim=("shared_expert_intermediate_size", None),
    norm_topk_prob=("norm_topk_prob", True),
    linear_k_heads=("linear_num_key_heads", None),
    linear_v_heads=("linear_num_value_heads", None),
    linear_k_dim=("linear_key_head_dim", None),
    linear_v_dim=("linear_value_head_dim", None),
    conv_size=("linear_conv_kernel_dim", 4),
)
HF_FIXED = dict(model_type=("qwen3_next",), decoder_sparse_step=(1,), mlp_only_layers=([], None)) | SHARED_FIXED
