"""OLMo 3 7B and 32B (Ai2): models/llama3.py with norms after attention and FFN, windows in three of four layers, and a norm of
queries and keys over all heads together.

B batch, T sequence (T/cp on this rank), D dim, H heads (H/tp), G key/value heads (G/tp), K head_dim, F ffn_dim (F/tp),
V vocab (V/tp). Under sequence parallelism the activations between attention and FFN are (B, T/cp/tp, D).

Architecture: Olmo 3, arXiv:2512.13961, and the config.json of allenai/Olmo-3-1025-7B and -1125-32B. Comments explain each
difference from models/llama3.py; all else is imported or an equal copy (tests/test_copies.py).
"""
import math
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from forks.norm_over_heads import NormOverHeads
from models.attention import causal_attention
from models.hf_config import SHARED_FIELDS, SHARED_FIXED, YARN, check_sizes, config_from_hf, config_to_hf
from models.layers import RMSNorm, cos_and_sin, rotate
from models.llama3 import FeedForward
from models.loss import linear_cross_entropy
from parallel import TP_STYLES


@dataclass(kw_only=True)
class Olmo3Config:
    dim: int = 192
    n_layers: int = 6
    n_heads: int = 8
    n_kv_heads: int = 4
    head_dim: int = 32
    ffn_dim: int = 512
    vocab_size: int = 4096
    norm_eps: float = 1e-6
    rope_theta: float = 500000.0
    rope_scaling: dict | None = None  # yarn, of the layers that see all tokens; names of Hugging Face's config.json: YARN
    tie_embeddings: bool = False
    max_seq_len: int = 65536
    sliding_window: int = 4096  # tokens that a query sees, its own included, in all layers but every fourth

    def __post_init__(self):
        check_sizes(self, "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "vocab_size", "max_seq_len",
                    "sliding_window")
        if self.n_heads % self.n_kv_heads:
            raise ValueError(f"n_heads {self.n_heads} is not a multiple of n_kv_heads {self.n_kv_heads}, which they share")
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd, and RoPE turns pairs; use {self.head_dim + 1}")

    @classmethod
    def from_hf(cls, config_json: dict) -> "Olmo3Config":
        """The config of a Hugging Face folder's config.json. Raises ValueError naming the field that we cannot represent.

        The tables of names are at the end of this file.
        """
        hf, kinds, ropes = dict(config_json), config_json.get("layer_types"), config_json.get("rope_parameters") or {}
        if kinds and kinds != layer_types(len(kinds)):
            raise ValueError("config.json: layer_types are not three of sliding_attention and one of full_attention in turn, "
                             "as they are in forks/olmo3.py")
        if "full_attention" in ropes:  # transformers 5 has a dict for each kind of layers
            full, sliding = (ropes.get(f"{kind}_attention") or {} for kind in ("full", "sliding"))
            if sliding.items() - {("rope_type", "default"), ("rope_theta", full.get("rope_theta"))}:
                raise ValueError(f"config.json: rope_parameters of sliding_attention are {sliding}; forks/olmo3.py stretches "
                                 "only full_attention, and has one rope_theta")
            hf |= dict(rope_parameters=full | (hf.pop("rope_scaling", None) or {}))
        return config_from_hf(cls, hf, HF_FIELDS, HF_FIXED, YARN)

    def to_hf(self) -> dict:
        """The inverse: a config.json for transformers, 4 and 5."""
        found = config_to_hf(self, HF_FIELDS, HF_FIXED)
        plain = dict(rope_type="default", rope_theta=self.rope_theta)
        ropes = dict(sliding_attention=plain, full_attention=plain | (found["rope_scaling"] or {}))
        kinds = layer_types(self.n_layers)
        return found | dict(architectures=["Olmo3ForCausalLM"], layer_types=kinds, rope_parameters=ropes)


def layer_types(n_layers: int) -> list[str]:
    """As config.json spells them."""
    return [("full_attention" if i % 4 == 3 else "sliding_attention") for i in range(n_layers)]


_yarn = dict(factor=8.0, original_max_position_embeddings=8192, beta_fast=32.0, beta_slow=1.0,
             attention_factor=1.2079441541679836)
_olmo3 = partial(Olmo3Config, vocab_size=100278, head_dim=128, rope_scaling=_yarn)
FLAVORS = {
    "debug": Olmo3Config(sliding_window=64),
    "7B": _olmo3(dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, ffn_dim=11008),
    "32B": _olmo3(dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, ffn_dim=27648),
}


# differs from llama3: the queries of all heads together have one norm, and so have the keys
class Attention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)
        self.q_norm = RMSNorm(config.n_heads * config.head_dim, eps=config.norm_eps)
        self.k_norm = RMSNorm(config.n_kv_heads * config.head_dim, eps=config.norm_eps)

    def forward(self, x, cos, sin, attend):
        # -1 is the number of heads on this rank, H/tp: under tensor parallelism each rank computes some of the heads
        q = self.q_norm(self.wq(x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H/tp, T/cp, K)
        k = self.k_norm(self.wk(x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, G/tp, T/cp, K)
        v = self.wv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, G/tp, T/cp, K)
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)  # (B, H/tp, T/cp, K)
        return self.wo(out.transpose(1, 2).flatten(-2))  # (B, T/cp, D), summed over tp


# differs from llama3: norms after attention and FFN, none before
class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attn = Attention(config)
        self.attn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = FeedForward(config.dim, config.ffn_dim)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)

    def forward(self, h, cos, sin, attend):
        h = h + self.attn_norm(self.attn(h, cos, sin, attend))
        return h + self.ffn_norm(self.ffn(h))


class Olmo3(nn.Module):
    """The whole model or a pipeline stage; in a stage the parts of other stages are None."""

    def __init__(self, config: Olmo3Config):
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        # tied: forward takes the embedding's weight for the head as well
        self.head = None if config.tie_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
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
        # two kinds of layers: three see the tokens of a window, without yarn, the fourth sees all tokens
        configs = replace(self.config, rope_scaling=None), self.config
        ropes = [cos_and_sin(config, config.head_dim, positions) for config in configs]  # (B, 1, T/cp, K/2) fp32
        reaches = torch.full_like(positions, self.config.sliding_window), None
        attends = [self.make_attend(positions, doc_ids, reach=reach) if cache is None else None for reach in reaches]
        for i, block in self.blocks.items():
            kind = int(i) % 4 == 3
            h = block(h, *ropes[kind], attends[kind] or cache.attend(i, reach=reaches[kind]))
        if self.norm is None:
            return h  # the next pipeline stage goes on from here
        h = self.norm(h)
        weight = (self.head or self.tok_embeddings).weight  # (V/tp, D)
        if labels is None:
            return self.logits(h, weight)
        return self.token_loss(h, weight, labels, loss_denom)

    def init_std(self, fqn: str) -> float | None:
        """Standard deviation of a weight's initial values; None for an unknown name.

        Norms start at 1 and biases at 0, as distributed/initial.py says. Matrices that write into the residual stream are
        scaled down by sqrt(2 L), so the stream's variance does not grow with depth (GPT-2).
        """
        name = ".".join(fqn.split(".")[-2:])
        if name in ("wo.weight", "w2.weight"):
            return 0.02 / math.sqrt(2 * self.config.n_layers)
        matrices = ("tok_embeddings", "wq", "wk", "wv", "w1", "w3", "head")
        return 0.02 if name in [f"{matrix}.weight" for matrix in matrices] else None

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward, PaLM's convention (arXiv:2204.02311, app. B): 6 N + 12 L H K T; N without the lookup table.
        Three of four layers see a window of T only."""
        c = self.config
        n = sum(p.numel() for p in self.parameters()) - (0 if c.tie_embeddings else c.vocab_size * c.dim)
        full = c.n_layers // 4
        seen = full * seq_len + (c.n_layers - full) * min(seq_len, c.sliding_window)  # keys, summed over the layers
        return 6 * n + 12 * c.n_heads * c.head_dim * seen

    def tp_plan(self) -> dict[str, str]:
        """fqn pattern -> style (a key of parallel.TP_STYLES). Between blocks, activations are sharded along the sequence."""
        plan = {
            "tok_embeddings": "vocab_embedding",
            "blocks.*.attn_norm": "sequence",
            "blocks.*.attn": "gather_sequence",
            "blocks.*.attn.wq": "colwise",
            "blocks.*.attn.wk": "colwise",
            "blocks.*.attn.wv": "colwise",
            "blocks.*.attn.q_norm": "norm_over_heads",
            "blocks.*.attn.k_norm": "norm_over_heads",
            "blocks.*.attn.wo": "rowwise",
            "blocks.*.ffn_norm": "sequence",
            "blocks.*.ffn": "gather_sequence",
            "blocks.*.ffn.w1": "colwise",
            "blocks.*.ffn.w3": "colwise",
            "blocks.*.ffn.w2": "rowwise",
            "norm": "sequence",
        }
        return plan if self.config.tie_embeddings else plan | {"head": "vocab_head"}

    def hf_keys(self) -> dict[str, str]:
        """fqn -> name in Hugging Face's files. Nothing is permuted: both sides rotate element i together with i + K/2."""
        names = {"tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight"}
        if not self.config.tie_embeddings:
            names["head.weight"] = "lm_head.weight"
        block = {
            "attn_norm": "post_attention_layernorm",
            "attn.wq": "self_attn.q_proj",
            "attn.wk": "self_attn.k_proj",
            "attn.wv": "self_attn.v_proj",
            "attn.wo": "self_attn.o_proj",
            "attn.q_norm": "self_attn.q_norm",
            "attn.k_norm": "self_attn.k_norm",
            "ffn_norm": "post_feedforward_layernorm",
            "ffn.w1": "mlp.gate_proj",
            "ffn.w2": "mlp.down_proj",
            "ffn.w3": "mlp.up_proj",
        }
        for i in range(self.config.n_layers):
            names |= {f"blocks.{i}.{ours}.weight": f"model.layers.{i}.{theirs}.weight" for ours, theirs in block.items()}
        return names


TP_STYLES["norm_over_heads"] = NormOverHeads

# Hugging Face's config.json; models/hf_config.py explains the tables.
HF_FIELDS = SHARED_FIELDS | dict(
    norm_eps=("rms_norm_eps", 1e-5),
    rope_theta=("rope_theta", 500000.0),
    n_kv_heads=("num_key_value_heads", lambda hf: hf["num_attention_heads"]),
    head_dim=("head_dim", lambda hf: hf["hidden_size"] // hf["num_attention_heads"]),
    max_seq_len=("max_position_embeddings", 2048),
    sliding_window=("sliding_window", 4096),
)
HF_FIXED = dict(model_type=("olmo3",)) | SHARED_FIXED
