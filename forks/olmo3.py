"""OLMo 3 7B and 32B (Ai2): models/llama3.py with norms after attention and FFN, windows in three of
four layers, and a norm of queries and keys over all heads together.

B batch, T sequence (T/cp on this rank), D dim, H heads (H/tp), G key/value heads (G/tp), K
head_dim, F ffn_dim (F/tp), V vocab (V/tp). Under sequence parallelism the activations between
attention and FFN are (B, T/cp/tp, D).

Architecture: Olmo 3, arXiv:2512.13961, and the config.json of allenai/Olmo-3-1025-7B and -1125-32B.
All else is inherited
from models/llama3.py or imported; comments explain each difference.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch

from forks.norm_over_heads import NormOverHeads
from models import llama3
from models.hf_config import SHARED_FIXED, YARN
from models.layers import RMSNorm, cos_and_sin, rotate
from models.llama3 import Llama3, Llama3Config
from parallel import TP_STYLES


@dataclass(kw_only=True)
class Olmo3Config(Llama3Config):
    # rope_scaling is yarn, and only the layers that see all tokens are stretched
    norm_eps: float = 1e-6
    max_seq_len: int = 65536
    # OLMo 3 has no biases; a ClassVar is no field, so no config.json or flag can set it
    qkv_bias: ClassVar[bool] = False
    # tokens that a query sees, its own included, in all layers but every fourth
    sliding_window: int = 4096

    @classmethod
    def from_hf(cls, config_json: dict) -> "Olmo3Config":
        """The config of a Hugging Face folder's config.json. Raises ValueError naming the field
        that we cannot represent.

        The tables of names are at the end of this file.
        """
        from models.hf_convert import config_from_hf  # only Hugging Face folders need it

        hf = dict(config_json)
        kinds = config_json.get("layer_types")
        ropes = config_json.get("rope_parameters") or {}
        if kinds and kinds != layer_types(len(kinds)):
            raise ValueError(
                "config.json: layer_types are not three of sliding_attention and one of "
                "full_attention in turn, "
                "as they are in forks/olmo3.py"
            )
        if "full_attention" in ropes:  # transformers 5 has a dict for each kind of layers
            full, sliding = (ropes.get(f"{kind}_attention") or {} for kind in ("full", "sliding"))
            if sliding.items() - {("rope_type", "default"), ("rope_theta", full.get("rope_theta"))}:
                raise ValueError(
                    f"config.json: rope_parameters of sliding_attention are {sliding}; "
                    "forks/olmo3.py stretches "
                    "only full_attention, and has one rope_theta"
                )
            hf |= dict(rope_parameters=full | (hf.pop("rope_scaling", None) or {}))
        return config_from_hf(cls, hf, HF_FIELDS, HF_FIXED, YARN)

    def to_hf(self) -> dict:
        """The inverse: a config.json for transformers, 4 and 5."""
        from models.hf_convert import config_to_hf  # only Hugging Face folders need it

        found = config_to_hf(self, HF_FIELDS, HF_FIXED)
        plain = dict(rope_type="default", rope_theta=self.rope_theta)
        ropes = dict(sliding_attention=plain, full_attention=plain | (found["rope_scaling"] or {}))
        kinds = layer_types(self.n_layers)
        return found | dict(
            architectures=["Olmo3ForCausalLM"], layer_types=kinds, rope_parameters=ropes
        )


def layer_types(n_layers: int) -> list[str]:
    """As config.json spells them."""
    return [("full_attention" if i % 4 == 3 else "sliding_attention") for i in range(n_layers)]


_yarn = dict(
    factor=8.0,
    original_max_position_embeddings=8192,
    beta_fast=32.0,
    beta_slow=1.0,
    attention_factor=1.2079441541679836,
)
_olmo3 = partial(Olmo3Config, vocab_size=100278, head_dim=128, rope_scaling=_yarn)
FLAVORS = {
    "debug": Olmo3Config(sliding_window=64),
    "7B": _olmo3(dim=4096, n_layers=32, n_heads=32, n_kv_heads=32, ffn_dim=11008),
    "32B": _olmo3(dim=5120, n_layers=64, n_heads=40, n_kv_heads=8, ffn_dim=27648),
}


# differs from llama3: the queries of all heads together have one norm, and so have the keys
class Attention(llama3.Attention):
    def __init__(self, config):
        super().__init__(config)
        self.q_norm = RMSNorm(config.n_heads * config.head_dim, eps=config.norm_eps)
        self.k_norm = RMSNorm(config.n_kv_heads * config.head_dim, eps=config.norm_eps)

    def forward(self, x, cos, sin, attend):
        # -1 is the number of heads on this rank, H/tp: under tensor parallelism each rank computes
        # some of the heads
        # (B, H/tp, T/cp, K)
        q = self.q_norm(self.wq(x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        # (B, G/tp, T/cp, K)
        k = self.k_norm(self.wk(x)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        v = self.wv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, G/tp, T/cp, K)
        out = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)  # (B, H/tp, T/cp, K)
        return self.wo(out.transpose(1, 2).flatten(-2))  # (B, T/cp, D), summed over tp


# differs from llama3: the norms come after attention and FFN, not before
class Block(llama3.Block):
    def __init__(self, config):
        super().__init__(config)
        self.attn = Attention(config)

    def forward(self, h, cos, sin, attend):
        h = h + self.attn_norm(self.attn(h, cos, sin, attend))
        return h + self.ffn_norm(self.ffn(h))


class Olmo3(Llama3):
    """The whole model or a pipeline stage; in a stage the parts of other stages are None."""

    def __init__(self, config: Olmo3Config):
        super().__init__(config)
        # in place of Llama 3's
        self.blocks = torch.nn.ModuleDict({str(i): Block(config) for i in range(config.n_layers)})

    def forward(
        self, tokens, labels=None, positions=None, doc_ids=None, loss_denom=None, cache=None
    ):
        """As Llama3.forward, but the blocks are of two kinds."""
        h = tokens if tokens.is_floating_point() else self.tok_embeddings(tokens)  # (B, T/cp, D)
        if positions is None:
            positions = torch.arange(h.shape[1], device=h.device)[None]
        # two kinds of layers: three see the tokens of a window, without yarn, the fourth sees all
        # tokens
        configs = replace(self.config, rope_scaling=None), self.config
        # (B, 1, T/cp, K/2) fp32
        ropes = [cos_and_sin(config, config.head_dim, positions) for config in configs]
        reaches = torch.full_like(positions, self.config.sliding_window), None
        attends = [
            self.make_attend(positions, doc_ids, reach=reach) if cache is None else None
            for reach in reaches
        ]
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

    def flops_per_token(self, seq_len: int) -> int:
        """As in Llama 3 with a window in each layer, and the tokens before the window, seen by
        every fourth layer."""
        c = self.config
        full = self.config.n_layers // 4
        return super().flops_per_token(seq_len) + 12 * full * c.n_heads * c.head_dim * max(
            seq_len - c.sliding_window, 0
        )

    def tp_plan(self) -> dict[str, str]:
        norms = {
            "blocks.*.attn.q_norm": "norm_over_heads",
            "blocks.*.attn.k_norm": "norm_over_heads",
        }
        return super().tp_plan() | norms

    def hf_keys(self) -> dict[str, str]:
        names = super().hf_keys()
        norms = {
            "attn_norm": "post_attention_layernorm",
            "attn.q_norm": "self_attn.q_norm",
            "attn.k_norm": "self_attn.k_norm",
            "ffn_norm": "post_feedforward_layernorm",
        }
        for i in range(self.config.n_layers):
            names |= {
                f"blocks.{i}.{ours}.weight": f"model.layers.{i}.{theirs}.weight"
                for ours, theirs in norms.items()
            }
        return names


TP_STYLES["norm_over_heads"] = NormOverHeads

# Hugging Face's config.json; models/hf_config.py explains the tables.
HF_FIELDS = llama3.HF_FIELDS | dict(
    norm_eps=("rms_norm_eps", 1e-5),
    rope_theta=("rope_theta", 500000.0),
    sliding_window=("sliding_window", 4096),
)
HF_FIXED = dict(model_type=("olmo3",)) | SHARED_FIXED
