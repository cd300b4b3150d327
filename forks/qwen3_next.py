"""Qwen3-Next 80B-A3B: models/qwen3.py's experts beside a shared one, and in three of four layers a
gated delta rule in place of attention, see forks/delta_rule.py.

B batch, T sequence (T/cp on this rank), D dim, H heads (H/tp), G key/value heads (G/tp), K
head_dim, F moe_ffn_dim, V vocab (V/tp), E experts (E/ep); of the delta rule: H key heads (H/tp), R
value heads of each key head, N linear_k_dim, U linear_v_dim. Under sequence parallelism the
activations between attention and experts are (B, T/cp/tp, D).

Architecture: the config.json of Qwen/Qwen3-Next-80B-A3B-Instruct; the delta rule: arXiv:2412.06464.
All else is inherited from
models/qwen3.py or imported; comments explain each difference.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from distributed.layout import local_tensor
from forks.delta_rule import GatherRows, OwnRows, ShortConv, cached_scan, make_scan
from models import qwen3
from models.hf_config import SHARED_FIELDS, SHARED_FIXED, YARN, check_sizes
from models.layers import RMSNorm, cos_and_sin, rotate
from models.qwen3 import FeedForward, MoE, Qwen3, Qwen3Config
from parallel import TP_STYLES


@dataclass(kw_only=True)
class Qwen3NextConfig(Qwen3Config):
    rope_theta: float = 10000000.0
    rope_share: float = 0.25  # of each head's numbers, the first ones, have a position
    max_seq_len: int = 262144
    n_experts: int = 8
    top_k: int = 2  # experts per token, beside the shared one
    moe_ffn_dim: int = 256
    shared_ffn_dim: int = 256
    linear_k_heads: int = 4  # heads of the delta rule
    linear_v_heads: int = 8  # several heads of values share the keys of a head
    linear_k_dim: int = 32
    linear_v_dim: int = 32
    # tokens of the short convolution before the delta rule, the token itself included
    conv_size: int = 4
    # all layers have experts; a ClassVar is no field, so no config.json or flag can set it
    ffn_dim: ClassVar[None] = None

    def __post_init__(self):
        check_sizes(
            self,
            "dim",
            "n_layers",
            "n_heads",
            "n_kv_heads",
            "head_dim",
            "vocab_size",
            "max_seq_len",
            "n_experts",
            "moe_ffn_dim",
            "shared_ffn_dim",
            "linear_k_heads",
            "linear_v_heads",
            "linear_k_dim",
            "linear_v_dim",
            "conv_size",
        )
        if self.linear_v_heads % self.linear_k_heads:
            raise ValueError(
                f"linear_v_heads {self.linear_v_heads} is not a multiple of linear_k_heads "
                f"{self.linear_k_heads}"
            )
        if self.rope_dim < 2 or self.rope_dim % 2:
            raise ValueError(
                f"rope_share {self.rope_share} of head_dim {self.head_dim} is {self.rope_dim}: "
                "RoPE turns pairs"
            )
        if not 1 <= self.top_k <= self.n_experts:
            raise ValueError(f"top_k {self.top_k} must be between 1 and n_experts {self.n_experts}")

    @property
    def rope_dim(self) -> int:  # numbers of a head that RoPE turns
        return int(self.head_dim * self.rope_share)

    @classmethod
    def from_hf(cls, config_json: dict) -> "Qwen3NextConfig":
        """The config of a Hugging Face folder's config.json. Raises ValueError naming the field
        that we cannot represent.

        The tables of names are at the end of this file.
        """
        from models.hf_convert import config_from_hf  # only Hugging Face folders need it

        hf = dict(config_json)
        kinds = config_json.get("layer_types")
        if kinds and kinds != layer_types(len(kinds)) or hf.get("full_attention_interval", 4) != 4:
            raise ValueError(
                "config.json: layer_types are not three of linear_attention and one of "
                "full_attention in turn, as "
                "they are in forks/qwen3_next.py"
            )
        share = hf.pop("partial_rotary_factor", None)
        for name in ("rope_parameters", "rope_scaling"):
            if hf.get(name):
                hf[name] = dict(hf[name])
                share = hf[name].pop("partial_rotary_factor", share)
        return replace(
            config_from_hf(cls, hf, HF_FIELDS, HF_FIXED, YARN),
            rope_share=0.25 if share is None else share,
        )

    def to_hf(self) -> dict:
        """The inverse: a config.json for transformers."""
        from models.hf_convert import config_to_hf  # only Hugging Face folders need it

        kinds = layer_types(self.n_layers)
        return config_to_hf(self, HF_FIELDS, HF_FIXED) | dict(
            architectures=["Qwen3NextForCausalLM"],
            layer_types=kinds,
            partial_rotary_factor=self.rope_share,
        )


def layer_types(n_layers: int) -> list[str]:
    """As config.json spells them."""
    return ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(n_layers)]


FLAVORS = {
    "debug": Qwen3NextConfig(),
    "80B-A3B": Qwen3NextConfig(
        dim=2048,
        n_layers=48,
        n_heads=16,
        n_kv_heads=2,
        head_dim=256,
        vocab_size=151936,
        n_experts=512,
        top_k=10,
        moe_ffn_dim=512,
        shared_ffn_dim=512,
        linear_k_heads=16,
        linear_v_heads=32,
        linear_k_dim=128,
        linear_v_dim=128,
    ),
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
class Attention(qwen3.Attention):
    def __init__(self, config):
        super().__init__(config)
        # of each head query, then gate
        self.wq = nn.Linear(config.dim, config.n_heads * 2 * config.head_dim, bias=False)
        self.q_norm = ZeroCentered(config.head_dim, config.norm_eps)
        self.k_norm = ZeroCentered(config.head_dim, config.norm_eps)

    def forward(self, x, cos, sin, attend):
        # -1 is the number of heads on this rank, H/tp: under tensor parallelism each rank computes
        # some of the heads
        # (B, T/cp, H/tp, K) each
        q, gate = self.wq(x).unflatten(-1, (-1, 2 * self.head_dim)).chunk(2, -1)
        q = self.q_norm(q).transpose(1, 2)  # (B, H/tp, T/cp, K)
        # (B, G/tp, T/cp, K)
        k = self.k_norm(self.wk(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        v = self.wv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, G/tp, T/cp, K)
        n = 2 * cos.shape[-1]
        q, k = (torch.cat([rotate(t[..., :n], cos, sin), t[..., n:]], -1) for t in (q, k))
        out = attend(q, k, v).transpose(1, 2) * torch.sigmoid(gate)  # (B, T/cp, H/tp, K)
        return self.wo(out.flatten(-2))  # (B, T/cp, D), summed over tp


class Decay(nn.Module):
    """How fast the state of each value head fades: the logarithm of its factor per token, from a
    (B, T/cp, H/tp, R)."""

    def __init__(self, n_heads):
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(n_heads))
        self.dt_bias = nn.Parameter(torch.empty(n_heads))

    def forward(self, a):
        # (H/tp, R)
        A, bias = (local_tensor(p).float().view(a.shape[2:]) for p in (self.A_log, self.dt_bias))
        return -A.exp() * F.softplus(a.float() + bias)


class DeltaNet(nn.Module):
    """A gated delta rule with a short convolution before. The tokens meet in `scan` only, see
    forks/delta_rule.py."""

    def __init__(self, config):
        super().__init__()
        H = config.linear_k_heads
        N = config.linear_k_dim
        U = config.linear_v_dim
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
        qkv, z = (
            self.w_qkvz(x)
            .unflatten(-1, (-1, sum(self.sizes)))
            .split([sum(self.sizes[:3]), self.sizes[3]], -1)
        )
        b, a = self.w_ba(x).unflatten(-1, (-1, 2 * self.R)).chunk(2, -1)  # (B, T/cp, H/tp, R) each
        out = scan(
            torch.cat([qkv.float(), self.decay(a), b.float().sigmoid()], -1),
            self.conv(),
            self.sizes[0],
        )
        out = self.out_norm(out.to(x.dtype).flatten(2, 3))  # (B, T/cp, H/tp * R, U)
        out = (out * F.silu(z.reshape(out.shape).float())).to(x.dtype)
        return self.wo(out.flatten(-2))  # (B, T/cp, D), summed over tp


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


class Qwen3Next(Qwen3):
    """The whole model or a pipeline stage; in a stage the parts of other stages are None."""

    def __init__(self, config: Qwen3NextConfig):
        super().__init__(config)
        # in place of Qwen3's
        self.blocks = nn.ModuleDict(
            {str(i): Block(config, i % 4 == 3) for i in range(config.n_layers)}
        )
        self.norm = ZeroCentered(config.dim, config.norm_eps)
        self.cp_group = None

    def forward(
        self, tokens, labels=None, positions=None, doc_ids=None, loss_denom=None, cache=None
    ):
        """As Qwen3.forward, but the blocks are of two kinds."""
        h = tokens if tokens.is_floating_point() else self.tok_embeddings(tokens)  # (B, T/cp, D)
        if positions is None:
            positions = torch.arange(h.shape[1], device=h.device)[None]
        # (B, 1, T/cp, rope_dim/2) fp32
        cos, sin = cos_and_sin(self.config, self.config.rope_dim, positions)
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
        """parallel.context_parallel sets make_attend, with the group of the cp ranks: the scan
        needs the group as well."""
        if name == "make_attend" and isinstance(value, partial):
            self.cp_group = value.keywords["group"]
        super().__setattr__(name, value)

    def init_std(self, fqn: str) -> float | None:
        if fqn.endswith("conv.weight"):
            return 0.5  # of conv_size numbers: the sum is as large as the input
        return (
            0.02
            if fqn.endswith(("w_qkvz.weight", "w_ba.weight", "shared_gate.weight"))
            else super().init_std(fqn)
        )

    def init_constants(self) -> dict[str, float]:
        norms = ("norm.weight", "blocks.*_norm.weight")
        return {"blocks.*.out_norm.weight": 1.0, "blocks.*.decay.A_log": 1.0} | dict.fromkeys(
            norms, 0.0
        )

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward, PaLM's convention (arXiv:2204.02311, app. B): 6 N + 12 L H K T; N
        active, without lookups. A token of the delta rule reads a state of R * N * U numbers per
        head twice, and writes them once."""
        c = self.config
        n = self.n_active_params() - (0 if c.tie_embeddings else c.vocab_size * c.dim)
        full = c.n_layers // 4
        state = 18 * (c.n_layers - full) * c.linear_v_heads * c.linear_k_dim * c.linear_v_dim
        return 6 * n + 12 * full * c.n_heads * c.head_dim * seq_len + state

    def tp_plan(self) -> dict[str, str]:
        plan = super().tp_plan() | {
            "blocks.*.attn.w_qkvz": "colwise",
            "blocks.*.attn.w_ba": "colwise",
            "blocks.*.attn.conv": "gather_rows",
            "blocks.*.attn.decay": "own_rows",
            "blocks.*.attn.out_norm": "head_norm",
            "blocks.*.shared": "gather_sequence",
            "blocks.*.shared.w1": "colwise",
            "blocks.*.shared.w3": "colwise",
            "blocks.*.shared.w2": "rowwise",
            "blocks.*.shared_gate": "sequence_linear",
        }
        for name in ("wq", "wk", "wv", "q_norm", "k_norm") if self.config.n_layers < 4 else ():
            del plan[f"blocks.*.attn.{name}"]  # the fourth layer is the first with attention
        return plan

    def hf_keys(self) -> dict[str, str | list[str]]:
        names = super().hf_keys()
        ffn = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
        shared = {"shared_gate": "shared_expert_gate"} | {
            f"shared.{w}": f"shared_expert.{name}" for w, name in ffn.items()
        }
        delta = {
            "w_qkvz.weight": "in_proj_qkvz.weight",
            "w_ba.weight": "in_proj_ba.weight",
            "conv.weight": "conv1d.weight",
            "decay.A_log": "A_log",
            "decay.dt_bias": "dt_bias",
            "out_norm.weight": "norm.weight",
            "wo.weight": "out_proj.weight",
        }
        for i in range(self.config.n_layers):
            names |= {
                f"blocks.{i}.{ours}.weight": f"model.layers.{i}.mlp.{theirs}.weight"
                for ours, theirs in shared.items()
            }
            if i % 4 != 3:  # no attention
                for name in ("wq", "wk", "wv", "q_norm", "k_norm"):
                    del names[f"blocks.{i}.attn.{name}.weight"]
                names |= {
                    f"blocks.{i}.attn.{ours}": f"model.layers.{i}.linear_attn.{theirs}"
                    for ours, theirs in delta.items()
                }
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
HF_FIXED = (
    dict(model_type=("qwen3_next",), decoder_sparse_step=(1,), mlp_only_layers=([], None))
    | SHARED_FIXED
)
