"""gpt-oss 20B and 120B (OpenAI): models/qwen3.py's experts with other attention, other experts and
another router.

B batch, T sequence (T/cp on this rank), D dim, H heads (H/tp), G key/value heads (G/tp), K
head_dim, F moe_ffn_dim, V vocab (V/tp), E experts (E/ep). Under sequence parallelism the
activations between attention and experts are (B, T/cp/tp, D).

Architecture: gpt-oss model card, arXiv:2508.10925, and the config.json of openai/gpt-oss-20b and
-120b. All else is inherited
from models/qwen3.py, the attention from models/llama3.py, or imported; comments explain each
difference.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn

from models import qwen3
from models.hf_config import SHARED_FIELDS, SHARED_FIXED, YARN, check_sizes
from models.layers import cos_and_sin, rotate
from models.llama3 import Attention as Llama3Attention
from models.moe import Experts, Router, apply_experts, combine, grouped_linear, spread
from models.qwen3 import Qwen3, Qwen3Config


@dataclass(kw_only=True)
class GptOssConfig(Qwen3Config):
    # rope_scaling is yarn: factor, original_max_position_embeddings, beta_fast, beta_slow
    norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    max_seq_len: int = 131072
    # tokens that every other layer, from the first on, looks back, the token itself included
    sliding_window: int = 128
    n_experts: int = 8
    top_k: int = 2  # experts per token
    moe_ffn_dim: int = 256
    swiglu_limit: float = 7.0  # activations inside the experts are clamped to it
    # Constants for the code of Qwen3 and Llama 3; a ClassVar is no field, so no config.json or flag
    # can set it.
    ffn_dim: ClassVar[None] = None  # all layers have experts
    norm_topk_prob: ClassVar[bool] = True  # a softmax over a token's experts: the weights' sum is 1
    qkv_bias: ClassVar[bool] = True

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
            "sliding_window",
            "n_experts",
            "moe_ffn_dim",
        )
        super().__post_init__()

    @classmethod
    def from_hf(cls, config_json: dict) -> "GptOssConfig":
        """The config of a Hugging Face folder's config.json. Raises ValueError naming the field
        that we cannot represent."""
        from models.hf_convert import config_from_hf  # only Hugging Face folders need it

        names = [name for name in ("rope_scaling", "rope_parameters") if config_json.get(name)]
        ropes = {name: dict(config_json[name]) for name in names} or {
            "rope_scaling": {"rope_type": "yarn", **_yarn}
        }
        for rope in ropes.values():
            if rope.get("rope_type", rope.get("type")) == "yarn" and rope.pop(
                "truncate", not names
            ):
                raise ValueError(
                    "config.json: rope scaling has truncate True; forks/gpt_oss.py has only False"
                )
        types = config_json.get("layer_types")
        if types and types != layer_types(len(types)):
            raise ValueError(
                "config.json: layer_types do not alternate from sliding_attention to "
                "full_attention, as they do "
                "in forks/gpt_oss.py"
            )
        return config_from_hf(cls, config_json | ropes, HF_FIELDS, HF_FIXED, YARN)

    def to_hf(self) -> dict:
        """The inverse: a config.json for transformers."""
        from models.hf_convert import config_to_hf  # only Hugging Face folders need it

        yarn = {"rope_type": "yarn", "truncate": False}
        # without a word it would be yarn
        rope = yarn | self.rope_scaling if self.rope_scaling else {"rope_type": "default"}
        return config_to_hf(self, HF_FIELDS, HF_FIXED) | dict(
            architectures=["GptOssForCausalLM"],
            layer_types=layer_types(self.n_layers),
            rope_scaling=rope,
        )


def layer_types(n_layers: int) -> list[str]:
    """As config.json spells them."""
    return [("sliding_attention", "full_attention")[i % 2] for i in range(n_layers)]


_yarn = dict(factor=32.0, beta_fast=32.0, beta_slow=1.0, original_max_position_embeddings=4096)
_gpt_oss = partial(
    GptOssConfig,
    vocab_size=201088,
    dim=2880,
    n_heads=64,
    n_kv_heads=8,
    head_dim=64,
    rope_scaling=_yarn,
    top_k=4,
    moe_ffn_dim=2880,
)
FLAVORS = {
    "debug": GptOssConfig(),
    "20B": _gpt_oss(n_layers=24, n_experts=32),
    "120B": _gpt_oss(n_layers=36, n_experts=128),
}


class Sinks(nn.Module):
    """A logit per head that takes part in the softmax and has no value: a query may look at
    nothing."""

    def __init__(self, n_heads):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads))

    def forward(self, q):
        """(H/tp,); q (B, T, H/tp, K) only says which heads this rank has: the style head_norm makes
        a DTensor of it."""
        return torch.zeros_like(q.flatten(0, -3)[0, :, 0]) + self.weight


# differs from qwen3: Llama 3's attention, without norms of queries and keys, but with sinks and
# biases
class Attention(Llama3Attention):
    def __init__(self, config):
        super().__init__(config)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim)
        self.sinks = Sinks(config.n_heads)

    def forward(self, x, cos, sin, attend):
        # -1 is the number of heads on this rank, H/tp: under tensor parallelism each rank computes
        # some of the heads
        q = self.wq(x).unflatten(-1, (-1, self.head_dim))  # (B, T/cp, H/tp, K)
        # (H/tp,), (B, H/tp, T/cp, K)
        sinks = self.sinks(q)
        q = q.transpose(1, 2)
        k = self.wk(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, G/tp, T/cp, K)
        v = self.wv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, G/tp, T/cp, K)
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v, sinks=sinks)  # (B, H/tp, T/cp, K)
        return self.wo(out.transpose(1, 2).flatten(-2))  # (B, T/cp, D), summed over tp


class BiasedRouter(Router):
    def __init__(self, dim, n_experts):
        super().__init__(dim, n_experts)
        self.bias = nn.Parameter(torch.empty(n_experts))

    def forward(self, x):
        return super().forward(x) + self.bias.float()  # (B, T/cp/tp, E) fp32


class BiasedExperts(Experts):
    """E feed-forward networks with biases, in the shapes of the files: gate and up projection in
    turn, column by column."""

    def __init__(self, config):
        nn.Module.__init__(self)
        E = config.n_experts
        D = config.dim
        F = config.moe_ffn_dim
        self.gate_up = nn.Parameter(torch.empty(E, D, 2 * F))
        self.gate_up_bias = nn.Parameter(torch.empty(E, 2 * F))
        self.down = nn.Parameter(torch.empty(E, F, D))
        self.down_bias = nn.Parameter(torch.empty(E, D))
        self.spread = spread
        self.combine = combine
        self.compute = lambda *args, **options: clamped_experts(
            *args, limit=config.swiglu_limit, **options
        )


def clamped_experts(
    x, weight, counts, gate_up, gate_up_bias, down, down_bias, limit, linear=grouped_linear
) -> Tensor:
    """x (N*k, D) sorted by expert, weight (N*k,), counts (E,) -> (N*k, D): SwiGLU with a clamp, a
    steeper sigmoid and one more up projection of 1 (model card, section 2.2), times the weight."""
    expert = torch.arange(len(counts), device=x.device).repeat_interleave(
        counts, output_size=len(x)
    )
    h = linear(x, gate_up.transpose(1, 2), counts) + gate_up_bias[expert]  # (N*k, 2F)
    gate = h[:, ::2].clamp(max=limit)
    up = h[:, 1::2].clamp(-limit, limit)
    weight = weight[:, None].to(h.dtype)
    hidden = (up + 1) * gate * torch.sigmoid(1.702 * gate) * weight
    return linear(hidden, down.transpose(1, 2), counts) + down_bias[expert] * weight


# differs from qwen3: softmax over the chosen experts only
class MoE(qwen3.MoE):
    """top-k, then softmax over these k."""

    def __init__(self, config):
        super().__init__(config)
        self.router = BiasedRouter(config.dim, config.n_experts)
        self.experts = BiasedExperts(config)

    def forward(self, x):
        scores = self.router(x).flatten(0, -2)  # (N, E)
        index = self.balance.choose(scores, self.top_k)  # (N, k)
        weight = scores.gather(1, index).softmax(-1)  # (N, k)
        weight = self.balance.add_loss(weight, scores.softmax(-1), index, len(x))
        return apply_experts(self.experts, x, index, weight, self.balance.count(index))


# differs from qwen3: the attention and the experts of this file
class Block(qwen3.Block):
    def __init__(self, config):
        super().__init__(config)
        self.attn, self.moe = Attention(config), MoE(config)


class GptOss(Qwen3):
    """The whole model or a pipeline stage; in a stage the parts of other stages are None."""

    def __init__(self, config: GptOssConfig):
        super().__init__(config)
        # in place of Qwen3's
        self.blocks = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})

    def forward(
        self, tokens, labels=None, positions=None, doc_ids=None, loss_denom=None, cache=None
    ):
        """As Qwen3.forward, but the blocks are of two kinds."""
        h = tokens if tokens.is_floating_point() else self.tok_embeddings(tokens)  # (B, T/cp, D)
        if positions is None:
            positions = torch.arange(h.shape[1], device=h.device)[None]
        # yarn does not round its limits here; (B, 1, T/cp, K/2) fp32
        cos, sin = cos_and_sin(self.config, self.config.head_dim, positions, truncate=False)
        # how many tokens back a query looks, itself included: in even layers few, in odd ones all
        # (B or 1, T/cp)
        reaches = torch.full_like(positions, self.config.sliding_window), positions + 1
        attends = [
            self.make_attend(positions, doc_ids, reach=reach) if cache is None else None
            for reach in reaches
        ]
        for i, block in self.blocks.items():
            kind = int(i) % 2
            h = block(h, cos, sin, attends[kind] or cache.attend(i, reach=reaches[kind]))
        if self.norm is None:
            return h  # the next pipeline stage goes on from here
        h = self.norm(h)
        weight = (self.head or self.tok_embeddings).weight  # (V/tp, D)
        if labels is None:
            return self.logits(h, weight)
        return self.token_loss(h, weight, labels, loss_denom)

    def init_std(self, fqn: str) -> float | None:
        """As in Qwen3, where the experts' matrices have other names."""
        if fqn.endswith("sinks.weight"):
            return 0.02
        return super().init_std(
            fqn.replace("experts.gate_up", "experts.w1").replace("experts.down", "experts.w2")
        )

    def n_active_params(self) -> int:
        """As in Qwen3, without the biases of the experts not chosen."""
        c = self.config
        return super().n_active_params() - c.n_layers * (c.n_experts - c.top_k) * (
            2 * c.moe_ffn_dim + c.dim
        )

    def flops_per_token(self, seq_len: int) -> int:
        """As in Qwen3, without the keys before the window, which half of the layers do not see."""
        c = self.config
        sliding = (self.config.n_layers + 1) // 2
        unseen = sliding * max(seq_len - c.sliding_window, 0)  # keys, summed over the layers
        return super().flops_per_token(seq_len) - 12 * c.n_heads * c.head_dim * unseen

    def tp_plan(self) -> dict[str, str]:
        plan = super().tp_plan() | {"blocks.*.attn.sinks": "head_norm"}
        del plan["blocks.*.attn.q_norm"], plan["blocks.*.attn.k_norm"]  # there are no such norms
        return plan

    @staticmethod
    def hf_tensors(folder: str):
        """The reader of Hugging Face's files: published experts have 4 bits."""
        from forks.mxfp4 import PackedTensors

        return PackedTensors(folder)

    def hf_keys(self) -> dict[str, str]:
        """fqn -> name in Hugging Face's files. The numbers and the shapes are the same."""
        names = {
            "tok_embeddings.weight": "model.embed_tokens.weight",
            "norm.weight": "model.norm.weight",
        }
        if not self.config.tie_embeddings:
            names["head.weight"] = "lm_head.weight"
        block = {
            "attn_norm.weight": "input_layernorm.weight",
            "ffn_norm.weight": "post_attention_layernorm.weight",
            "attn.sinks.weight": "self_attn.sinks",
        }
        for ours, theirs in dict(wq="q_proj", wk="k_proj", wv="v_proj", wo="o_proj").items():
            block |= {
                f"attn.{ours}.{kind}": f"self_attn.{theirs}.{kind}" for kind in ("weight", "bias")
            }
        block |= {f"moe.router.{kind}": f"mlp.router.{kind}" for kind in ("weight", "bias")}
        for ours, theirs in dict(gate_up="gate_up_proj", down="down_proj").items():
            block |= {
                f"moe.experts.{ours}{kind}": f"mlp.experts.{theirs}{kind}" for kind in ("", "_bias")
            }
        for i in range(self.config.n_layers):
            names |= {
                f"blocks.{i}.{ours}": f"model.layers.{i}.{theirs}" for ours, theirs in block.items()
            }
        return names


# Hugging Face's config.json; models/hf_config.py explains the tables.
HF_FIELDS = {name: entry for name, entry in SHARED_FIELDS.items() if name != "ffn_dim"} | dict(
    norm_eps=("rms_norm_eps", 1e-5),
    rope_theta=("rope_theta", 150000.0),
    n_kv_heads=("num_key_value_heads", 8),
    head_dim=("head_dim", 64),
    max_seq_len=("max_position_embeddings", 131072),
    sliding_window=("sliding_window", 128),
    n_experts=("num_local_experts", None),
    top_k=("num_experts_per_tok", 4),
    moe_ffn_dim=("intermediate_size", None),
    swiglu_limit=("swiglu_limit", 7.0),
)
HF_FIXED = SHARED_FIXED | dict(model_type=("gpt_oss",), attention_bias=(True,))
