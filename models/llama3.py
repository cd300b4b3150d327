"""Llama 3, 3.1 and 3.2: a plain torch model in a single file; builds and runs on a laptop without
any process group.

Two families differ by a line each, so this file reads and writes their Hugging Face folders too:
Qwen 2 and 2.5 (a bias on queries, keys and values) and Mistral (a sliding window).

B batch, T sequence (T/cp on this rank), D dim, H heads (H/tp), G key/value heads (G/tp), K
head_dim, F ffn_dim (F/tp), V vocab (V/tp). Under sequence parallelism the activations between
attention and FFN are (B, T/cp/tp, D).

Architecture: The Llama 3 Herd of Models, arXiv:2407.21783. Numbers of the flavors: the config.json
of meta-llama's
Hugging Face repositories.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from models.attention import causal_attention
from models.hf_config import SHARED_FIELDS, SHARED_FIXED, STRETCHES, check_sizes
from models.layers import RMSNorm, cos_and_sin, rotate
from models.loss import linear_cross_entropy


@dataclass(kw_only=True)
class Llama3Config:
    dim: int = 192
    n_layers: int = 6
    n_heads: int = 8
    n_kv_heads: int = 4
    head_dim: int = 32
    ffn_dim: int = 512
    vocab_size: int = 4096
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    # as Llama 3.1, or yarn, with the names of Hugging Face's config.json: STRETCHES
    rope_scaling: dict | None = None
    tie_embeddings: bool = False
    max_seq_len: int = 8192
    qkv_bias: bool = False  # Qwen 2
    # tokens that a query sees, its own included; None: all (Mistral)
    sliding_window: int | None = None
    # not fields: no Llama has experts or multi-token prediction, and code for all models asks
    n_experts: ClassVar[int] = 0
    mtp_depth: ClassVar[int] = 0

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
            "sliding_window",
        )

    @classmethod
    def from_hf(cls, config_json: dict) -> "Llama3Config":
        """The config of a Hugging Face folder's config.json. Raises ValueError naming the field
        that we cannot represent.

        The tables of names are at the end of this file.
        """
        from models.hf_convert import config_from_hf  # only Hugging Face folders need it

        kind = config_json.get("model_type")
        window = None
        if kind == "mistral":
            window = config_json.get("sliding_window", 4096)  # transformers' default
        config = config_from_hf(
            cls,
            config_json,
            HF_FIELDS,
            HF_FIXED | dict(use_sliding_window=(False, None)),
            STRETCHES,
        )
        return replace(config, qkv_bias=kind == "qwen2", sliding_window=window)

    def to_hf(self) -> dict:
        """The inverse: a config.json for transformers."""
        from models.hf_convert import config_to_hf  # only Hugging Face folders need it

        if self.qkv_bias:
            kind = "qwen2"
        elif self.sliding_window:
            kind = "mistral"
        else:
            kind = "llama"
        found = dict(
            model_type=kind,
            architectures=[f"{kind.title()}ForCausalLM"],
            sliding_window=self.sliding_window,
        )
        return config_to_hf(self, HF_FIELDS, HF_FIXED) | found


def scaled(factor: float) -> dict:
    return dict(
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )


_3_1 = partial(
    Llama3Config,
    vocab_size=128256,
    head_dim=128,
    n_kv_heads=8,
    rope_scaling=scaled(8.0),
    max_seq_len=131072,
)
# Llama 3.2 stretches by 32, not by 8
_3_2 = partial(_3_1, tie_embeddings=True, rope_scaling=scaled(32.0))
FLAVORS = {
    "debug": Llama3Config(),
    "1B": _3_2(dim=2048, n_layers=16, n_heads=32, head_dim=64, ffn_dim=8192),
    "3B": _3_2(dim=3072, n_layers=28, n_heads=24, ffn_dim=8192),
    "8B": _3_1(dim=4096, n_layers=32, n_heads=32, ffn_dim=14336),
    "70B": _3_1(dim=8192, n_layers=80, n_heads=64, ffn_dim=28672),
    "405B": _3_1(dim=16384, n_layers=126, n_heads=128, ffn_dim=53248),
}


class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=config.qkv_bias)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=config.qkv_bias)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=config.qkv_bias)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)

    def forward(self, x, cos, sin, attend):
        # -1 is the number of heads on this rank, H/tp: under tensor parallelism each rank computes
        # some of the heads
        q = self.wq(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H/tp, T/cp, K)
        k = self.wk(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, G/tp, T/cp, K)
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


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = FeedForward(config.dim, config.ffn_dim)

    def forward(self, h, cos, sin, attend):
        h = h + self.attn(self.attn_norm(h), cos, sin, attend)
        return h + self.ffn(self.ffn_norm(h))


class Llama3(nn.Module):
    """The whole model or a pipeline stage; in a stage the parts of other stages are None."""

    def __init__(self, config: Llama3Config):
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
        window = {}
        if self.config.sliding_window:
            window = {"reach": torch.full_like(positions, self.config.sliding_window)}
        attend = None
        if cache is None:
            attend = self.make_attend(positions, doc_ids, **window)
        for i, block in self.blocks.items():
            if cache is not None:
                attend = cache.attend(i, **window)
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
        if name in ("wo.weight", "w2.weight"):
            return 0.02 / math.sqrt(2 * self.config.n_layers)
        matrices = ("tok_embeddings", "wq", "wk", "wv", "w1", "w3", "head")
        if name in [f"{matrix}.weight" for matrix in matrices]:
            return 0.02
        return None

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward, PaLM's convention (arXiv:2204.02311, app. B): 6 N + 12 L H K T; N
        without the lookup table."""
        c = self.config
        n = sum(p.numel() for p in self.parameters())
        if not c.tie_embeddings:
            n -= c.vocab_size * c.dim
        return 6 * n + 12 * c.n_layers * c.n_heads * c.head_dim * min(
            seq_len, c.sliding_window or seq_len
        )

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
            "blocks.*.attn.wo": "rowwise",
            "blocks.*.ffn_norm": "sequence",
            "blocks.*.ffn": "gather_sequence",
            "blocks.*.ffn.w1": "colwise",
            "blocks.*.ffn.w3": "colwise",
            "blocks.*.ffn.w2": "rowwise",
            "norm": "sequence",
        }
        if self.config.tie_embeddings:
            return plan
        return plan | {"head": "vocab_head"}

    def hf_keys(self) -> dict[str, str]:
        """fqn -> name in Hugging Face's files. Nothing is permuted: both sides rotate element i
        together with i + K/2."""
        names = {
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
            "ffn_norm": "post_attention_layernorm",
            "ffn.w1": "mlp.gate_proj",
            "ffn.w2": "mlp.down_proj",
            "ffn.w3": "mlp.up_proj",
        }
        for i in range(self.config.n_layers):
            names |= {
                f"blocks.{i}.{ours}.weight": f"model.layers.{i}.{theirs}.weight"
                for ours, theirs in block.items()
            }
            if self.config.qkv_bias:
                names |= {
                    f"blocks.{i}.attn.w{x}.bias": f"model.layers.{i}.self_attn.{x}_proj.bias"
                    for x in "qkv"
                }
        return names

    def hf_optional(self) -> list[str]:
        """Patterns of names that Hugging Face's files may lack, or have besides: none."""
        return []


# Hugging Face's config.json; models/hf_config.py explains the tables.
HF_FIELDS = SHARED_FIELDS | dict(
    n_kv_heads=("num_key_value_heads", lambda hf: hf["num_attention_heads"]),
    head_dim=("head_dim", lambda hf: hf["hidden_size"] // hf["num_attention_heads"]),
    max_seq_len=("max_position_embeddings", 2048),
)
HF_FIXED = dict(model_type=("llama", "mistral", "qwen2"), mlp_bias=(False,)) | SHARED_FIXED
