"""Qwen3, dense and mixture-of-experts: Llama 3 with a norm on every query and key head, and experts
in place of the FFN.

B batch, T sequence (T/cp on this rank), D dim, H heads (H/tp), G key/value heads (G/tp), K
head_dim, F ffn_dim (F/tp), V vocab (V/tp), E experts (E/ep). Under sequence parallelism the
activations between attention and FFN are (B, T/cp/tp, D).

Architecture: Qwen3 Technical Report, arXiv:2505.09388. Numbers of the flavors: the config.json of
Qwen's Hugging Face
repositories. Comments explain each difference from models/llama3.py; all else is an equal copy
(tests/test_copies.py).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from models.attention import causal_attention
from models.hf_config import SHARED_FIELDS, SHARED_FIXED, YARN, check_sizes
from models.layers import RMSNorm, cos_and_sin, rotate
from models.loss import linear_cross_entropy
from models.moe import Balance, Experts, Router, apply_experts


@dataclass(kw_only=True)
class Qwen3Config:
    dim: int = 192
    n_layers: int = 6
    n_heads: int = 8
    n_kv_heads: int = 4
    head_dim: int = 32
    ffn_dim: int = 512
    vocab_size: int = 4096
    norm_eps: float = 1e-6
    rope_theta: float = 1000000.0
    rope_scaling: dict | None = None  # yarn, with the names of Hugging Face's config.json: YARN
    tie_embeddings: bool = False
    max_seq_len: int = 40960
    n_experts: int = 0  # 0: dense
    top_k: int = 8  # experts per token
    moe_ffn_dim: int = 768
    norm_topk_prob: bool = True  # the weights of a token's experts are scaled to sum 1
    mtp_depth: ClassVar[int] = 0  # no field: no Qwen3 has multi-token prediction

    def __post_init__(self):
        check_sizes(
            self,
            "dim",
            "n_layers",
            "n_heads",
            "n_kv_heads",
            "head_dim",
            "ffn_dim",
            "vocab_size",
            "max_seq_len",
        )
        if self.n_experts and not 1 <= self.top_k <= self.n_experts:
            raise ValueError(f"top_k {self.top_k} must be between 1 and n_experts {self.n_experts}")

    @classmethod
    def from_hf(cls, config_json: dict) -> "Qwen3Config":
        """The config of a Hugging Face folder's config.json. Raises ValueError naming the field
        that we cannot represent.

        The tables of names are at the end of this file.
        """
        from models.hf_convert import config_from_hf  # only Hugging Face folders need it

        # transformers 4 / 5
        experts = config_json.get("num_experts") or config_json.get("num_local_experts")
        fields = HF_FIELDS
        if config_json.get("model_type") == "qwen3_moe":
            fields = HF_FIELDS | HF_EXPERTS
        return config_from_hf(
            cls, config_json | {"num_experts": experts}, fields, HF_FIXED | HF_FIXED_EXPERTS, YARN
        )

    def to_hf(self) -> dict:
        """The inverse: a config.json for transformers."""
        from models.hf_convert import config_to_hf  # only Hugging Face folders need it

        name = "Qwen3ForCausalLM"
        experts = {}
        if self.n_experts:
            name = "Qwen3MoeForCausalLM"
            experts = config_to_hf(self, HF_EXPERTS, HF_FIXED_EXPERTS)
        return config_to_hf(self, HF_FIELDS, HF_FIXED) | experts | dict(architectures=[name])


# head_dim is 128 whatever dim / n_heads is
_qwen3 = partial(Qwen3Config, vocab_size=151936, head_dim=128, n_kv_heads=8)
_moe = partial(_qwen3, n_experts=128, top_k=8, n_kv_heads=4)
FLAVORS = {
    "debug": Qwen3Config(),
    # as many active parameters as debug
    "debug_moe": Qwen3Config(n_experts=8, top_k=2, moe_ffn_dim=256),
    "0.6B": _qwen3(dim=1024, n_layers=28, n_heads=16, ffn_dim=3072, tie_embeddings=True),
    "1.7B": _qwen3(dim=2048, n_layers=28, n_heads=16, ffn_dim=6144, tie_embeddings=True),
    "4B": _qwen3(dim=2560, n_layers=36, n_heads=32, ffn_dim=9728, tie_embeddings=True),
    "8B": _qwen3(dim=4096, n_layers=36, n_heads=32, ffn_dim=12288),
    "14B": _qwen3(dim=5120, n_layers=40, n_heads=40, ffn_dim=17408),
    "32B": _qwen3(dim=5120, n_layers=64, n_heads=64, ffn_dim=25600),
    "30B-A3B": _moe(dim=2048, n_layers=48, n_heads=32, ffn_dim=6144, moe_ffn_dim=768),
    "235B-A22B": _moe(dim=4096, n_layers=94, n_heads=64, ffn_dim=12288, moe_ffn_dim=1536),
}


# differs from llama3: every head's query and key is normalised, before RoPE
class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)
        self.q_norm = RMSNorm(config.head_dim, eps=config.norm_eps)
        self.k_norm = RMSNorm(config.head_dim, eps=config.norm_eps)

    def forward(self, x, cos, sin, attend):
        # -1 is the number of heads on this rank, H/tp: under tensor parallelism each rank computes
        # some of the heads
        # (B, H/tp, T/cp, K)
        q = self.q_norm(self.wq(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        # (B, G/tp, T/cp, K)
        k = self.k_norm(self.wk(x).unflatten(-1, (-1, self.head_dim))).transpose(1, 2)
        v = self.wv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, G/tp, T/cp, K)
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)  # (B, H/tp, T/cp, K)
        return self.wo(out.transpose(1, 2).flatten(-2))  # (B, T/cp, D), summed over tp


class FeedForward(nn.Module):
    """SwiGLU, arXiv:2002.05202: w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim, ffn_dim):
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # (B, T/cp, F/tp) inside


class MoE(nn.Module):
    """softmax over all experts, then top-k, then (norm_topk_prob) weights that sum to 1."""

    def __init__(self, config):
        super().__init__()
        self.top_k = config.top_k
        self.norm_topk_prob = config.norm_topk_prob
        self.router = Router(config.dim, config.n_experts)
        self.experts = Experts(config.n_experts, config.dim, config.moe_ffn_dim)
        self.balance = Balance(config.n_experts)

    def forward(self, x):
        probs = self.router(x).softmax(-1).flatten(0, -2)  # (N, E)
        index = self.balance.choose(probs, self.top_k)  # (N, k)
        weight = probs.gather(1, index)  # (N, k)
        if self.norm_topk_prob:
            weight = weight / weight.sum(-1, keepdim=True)
        weight = self.balance.add_loss(weight, probs, index, len(x))
        return apply_experts(self.experts, x, index, weight, self.balance.count(index))


# differs from llama3: experts in place of the FFN, where the flavor has them
class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        if config.n_experts:
            self.moe = MoE(config)
        else:
            self.ffn = FeedForward(config.dim, config.ffn_dim)

    def forward(self, h, cos, sin, attend):
        h = h + self.attn(self.attn_norm(h), cos, sin, attend)
        return h + (self.moe if hasattr(self, "moe") else self.ffn)(self.ffn_norm(h))


class Qwen3(nn.Module):
    """The whole model or a pipeline stage; in a stage the parts of other stages are None."""

    def __init__(self, config: Qwen3Config):
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        # tied: forward takes the embedding's weight for the head as well
        self.head = None
        if not config.tie_embeddings:
            self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        # parallel.py replaces these functions: context_parallel the first, tensor_parallel and
        # compile the other two.
        self.make_attend = causal_attention
        self.token_loss = linear_cross_entropy
        self.logits = F.linear

    def forward(
        self, tokens, labels=None, positions=None, doc_ids=None, loss_denom=None, cache=None
    ):
        """tokens (B, T) -> logits (B, T, V) in compute dtype; with labels (B, T): the scalar sum of
        token losses / loss_denom.

        positions (B, T) or (1, T), default 0..T-1; doc_ids (B, T) of the whole sequence: attention
        stays inside a document. cache: for generation, see rl/decoding.py. A later pipeline stage
        takes activations in place of tokens.
        """
        h = tokens  # (B, T/cp, D), of the stage before
        if not tokens.is_floating_point():
            h = self.tok_embeddings(tokens)
        if positions is None:
            positions = torch.arange(h.shape[1], device=h.device)[None]
        # (B, 1, T/cp, K/2) fp32
        cos, sin = cos_and_sin(self.config, self.config.head_dim, positions)
        attend = None
        if cache is None:
            attend = self.make_attend(positions, doc_ids)
        for i, block in self.blocks.items():
            if cache is not None:
                attend = cache.attend(i)
            h = block(h, cos, sin, attend)
        if self.norm is None:
            return h  # the next pipeline stage goes on from here
        h = self.norm(h)
        weight = (self.head or self.tok_embeddings).weight  # (V/tp, D)
        if labels is None:
            return self.logits(h, weight)
        return self.token_loss(h, weight, labels, loss_denom)

    def init_std(self, fqn: str) -> float | None:
        """Standard deviation of a weight's initial values; None for an unknown name.

        Norms start at 1 and biases at 0, as distributed/initial.py says. Matrices that write into
        the residual stream are scaled down by sqrt(2 L), so the stream's variance does not grow
        with depth (GPT-2).
        """
        name = ".".join(fqn.split(".")[-2:])
        if name in ("wo.weight", "w2.weight", "experts.w2"):
            return 0.02 / math.sqrt(2 * self.config.n_layers)
        matrices = ("tok_embeddings", "wq", "wk", "wv", "w1", "w3", "router", "head")
        if name in ["experts.w1", "experts.w3", *(f"{matrix}.weight" for matrix in matrices)]:
            return 0.02
        return None

    def n_active_params(self) -> int:
        """Parameters that a token uses: all but the experts not chosen."""
        c = self.config
        idle = 0
        if c.n_experts:
            idle = c.n_layers * (c.n_experts - c.top_k) * 3 * c.dim * c.moe_ffn_dim
        return sum(p.numel() for p in self.parameters()) - idle

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward, PaLM's convention (arXiv:2204.02311, app. B): 6 N + 12 L H K T; N
        active, without lookups."""
        c = self.config
        n = self.n_active_params()
        if not c.tie_embeddings:
            n -= c.vocab_size * c.dim
        return 6 * n + 12 * c.n_layers * c.n_heads * c.head_dim * seq_len

    def tp_plan(self) -> dict[str, str]:
        """fqn pattern -> style (a key of parallel.TP_STYLES). Between blocks, activations are
        sharded along the sequence."""
        plan = {
            "tok_embeddings": "vocab_embedding",
            "blocks.*.attn_norm": "sequence",
            "blocks.*.attn": "gather_sequence",
            "blocks.*.attn.wq": "colwise",
            "blocks.*.attn.wk": "colwise",
            "blocks.*.attn.wv": "colwise",
            "blocks.*.attn.q_norm": "head_norm",
            "blocks.*.attn.k_norm": "head_norm",
            "blocks.*.attn.wo": "rowwise",
            "blocks.*.ffn_norm": "sequence",
            "norm": "sequence",
        }
        if self.config.n_experts:
            # the experts: distributed.experts.expert_parallel
            plan["blocks.*.moe.router"] = "sequence_linear"
        else:
            plan |= {
                "blocks.*.ffn": "gather_sequence",
                "blocks.*.ffn.w1": "colwise",
                "blocks.*.ffn.w3": "colwise",
            }
            plan["blocks.*.ffn.w2"] = "rowwise"
        if self.config.tie_embeddings:
            return plan
        return plan | {"head": "vocab_head"}

    def hf_keys(self) -> dict[str, str | list[str]]:
        """fqn -> name in Hugging Face's files; for a stack of experts a list of names. The values
        are the same."""
        names: dict[str, str | list[str]] = {
            "tok_embeddings.weight": "model.embed_tokens.weight",
            "norm.weight": "model.norm.weight",
        }
        if not self.config.tie_embeddings:
            names["head.weight"] = "lm_head.weight"
        block = {
            "attn_norm": "input_layernorm",
            "attn.wq": "self_attn.q_proj",
            "attn.wk": "self_attn.k_proj",
            "attn.wv": "self_attn.v_proj",
            "attn.wo": "self_attn.o_proj",
            "attn.q_norm": "self_attn.q_norm",
            "attn.k_norm": "self_attn.k_norm",
            "ffn_norm": "post_attention_layernorm",
        }
        ffn = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
        if self.config.n_experts:
            block["moe.router"] = "mlp.gate"
        else:
            block |= {f"ffn.{ours}": f"mlp.{theirs}" for ours, theirs in ffn.items()}
        for i in range(self.config.n_layers):
            for ours, theirs in ffn.items() if self.config.n_experts else ():
                experts = [
                    f"model.layers.{i}.mlp.experts.{e}.{theirs}.weight"
                    for e in range(self.config.n_experts)
                ]
                names[f"blocks.{i}.moe.experts.{ours}"] = experts
            names |= {
                f"blocks.{i}.{ours}.weight": f"model.layers.{i}.{theirs}.weight"
                for ours, theirs in block.items()
            }
        return names

    def hf_optional(self) -> list[str]:
        """Patterns of names that Hugging Face's files may lack, or have besides: none."""
        return []


# Hugging Face's config.json; models/hf_config.py explains the tables.
HF_FIELDS = SHARED_FIELDS | dict(
    n_kv_heads=("num_key_value_heads", lambda hf: hf["num_attention_heads"]),
    head_dim=("head_dim", 128),
    max_seq_len=("max_position_embeddings", 32768),
)
HF_EXPERTS = dict(
    n_experts=("num_experts", None),
    top_k=("num_experts_per_tok", None),
    moe_ffn_dim=("moe_intermediate_size", None),
    norm_topk_prob=("norm_topk_prob", False),
)
HF_FIXED = dict(model_type=("qwen3", "qwen3_moe"), use_sliding_window=(False, None)) | SHARED_FIXED
# experts in every layer
HF_FIXED_EXPERTS = dict(
    model_type=("qwen3_moe", "qwen3"), decoder_sparse_step=(1,), mlp_only_layers=([], None)
)
