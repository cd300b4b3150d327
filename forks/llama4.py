"""Llama 4 Scout and Maverick, the text part: models/qwen3.py's experts, beside a shared one, and
attention in chunks.

B batch, T sequence (T/cp on this rank), D dim, H heads (H/tp), G key/value heads (G/tp), K
head_dim, F ffn_dim (F/tp), V vocab (V/tp), E experts (E/ep). Under sequence parallelism the
activations between attention and FFN are (B, T/cp/tp, D).

Architecture and numbers of the flavors: ai.meta.com/blog/llama-4-multimodal-intelligence, and
text_config in the config.json of meta-llama/Llama-4-Scout-17B-16E and -Maverick-17B-128E. All else
is inherited from models/qwen3.py, the attention from models/llama3.py, or imported; comments
explain each difference.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models import qwen3
from models.hf_config import SHARED_FIELDS, SHARED_FIXED, STRETCHES, check_sizes
from models.layers import RMSNorm, cos_and_sin, rotate
from models.llama3 import Attention as Llama3Attention
from models.llama3 import FeedForward, scaled
from models.moe import Experts, apply_experts, combine, grouped_linear, spread
from models.qwen3 import Qwen3, Qwen3Config


@dataclass(kw_only=True)
class Llama4Config(Qwen3Config):
    # ffn_dim is of the layers without experts, rope_scaling as of Llama 3.1
    n_layers: int = 4
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    max_seq_len: int = 131072
    n_experts: int = 8
    top_k: int = 1  # experts per token, beside the shared one
    moe_ffn_dim: int = 256  # of each expert, and of the shared one
    moe_every: int = 1  # 2: every other layer has experts, the last one among them
    # every 4th layer has no RoPE and sees all tokens; the others see those of their chunk
    nope_every: int = 4
    chunk_size: int = 8192  # tokens of a chunk
    qk_norm: bool = True  # queries and keys with RoPE are normalised, without weights
    # in layers without RoPE queries grow with the logarithm of their position
    temperature_tuning: bool = True
    floor_scale: int = 8192  # in steps of so many positions
    attn_scale: float = 0.1  # and by this factor
    # Constants for the code of Qwen3 and Llama 3; a ClassVar is no field, so no config.json or flag
    # can set it.
    norm_topk_prob: ClassVar[bool] = False
    qkv_bias: ClassVar[bool] = False

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
            "n_experts",
            "moe_ffn_dim",
            "moe_every",
            "nope_every",
            "chunk_size",
            "floor_scale",
        )
        if self.top_k != 1:
            raise ValueError(
                f"top_k {self.top_k}: a token of Llama 4 has one expert beside the shared one; "
                "use top_k=1"
            )
        super().__post_init__()
        if self.moe_every > self.n_layers:
            raise ValueError(
                f"moe_every {self.moe_every} is more than n_layers {self.n_layers}: no layer "
                "would have experts"
            )

    def has_experts(self, layer: int) -> bool:
        return (layer + 1) % self.moe_every == 0

    def has_rope(self, layer: int) -> bool:
        return (layer + 1) % self.nope_every != 0

    def kinds_of_layers(self) -> dict[str, list]:
        """As config.json tells of them."""
        layers = range(self.n_layers)
        return dict(
            moe_layers=[i for i in layers if self.has_experts(i)],
            # 1 where there is RoPE: the name is theirs
            no_rope_layers=[int(self.has_rope(i)) for i in layers],
            layer_types=[("full_attention", "chunked_attention")[self.has_rope(i)] for i in layers],
        )

    @classmethod
    def from_hf(cls, config_json: dict) -> "Llama4Config":
        """The config of a Hugging Face folder's config.json. Raises ValueError naming the field
        that we cannot represent.

        The tables of names are at the end of this file.
        """
        from models.hf_convert import config_from_hf  # only Hugging Face folders need it

        tuning = config_json.get("attn_temperature_tuning")
        hf = dict(config_json)
        if tuning is not None:  # a published file says 4 for true
            hf["attn_temperature_tuning"] = bool(tuning)
        config = config_from_hf(cls, hf, HF_FIELDS, HF_FIXED, STRETCHES)
        for name, usual in config.kinds_of_layers().items():
            found = config_json.get(name)
            if found not in (None, [], usual):
                raise ValueError(
                    f"config.json: {name} is {found!r}; forks/llama4.py has only {usual}"
                )
        return config

    def to_hf(self) -> dict:
        """The inverse: a config.json for transformers."""
        from models.hf_convert import config_to_hf  # only Hugging Face folders need it

        rope = {"rope_type": "default"}
        if self.rope_scaling:
            rope = {"rope_type": "llama3", **self.rope_scaling}
        return (
            config_to_hf(self, HF_FIELDS, HF_FIXED)
            | self.kinds_of_layers()
            | dict(architectures=["Llama4ForCausalLM"], rope_scaling=rope)
        )


_llama4 = partial(
    Llama4Config,
    vocab_size=202048,
    dim=5120,
    n_layers=48,
    n_heads=40,
    n_kv_heads=8,
    head_dim=128,
    ffn_dim=16384,
    moe_ffn_dim=8192,
)
FLAVORS = {
    "debug": Llama4Config(),
    "Scout": _llama4(
        n_experts=16, rope_scaling=scaled(16.0) | {"high_freq_factor": 1.0}, max_seq_len=10485760
    ),
    "Maverick": _llama4(n_experts=128, moe_every=2, qk_norm=False, max_seq_len=1048576),
}


# differs from qwen3: Llama 3's attention, with RoPE in most layers only, of neighbours, and then a
# norm without weights
class Attention(Llama3Attention):
    def __init__(self, config, has_rope: bool):
        super().__init__(config)
        self.has_rope = has_rope
        self.qk_eps = config.norm_eps if config.qk_norm and has_rope else None

    def forward(self, x, cos, sin, attend):
        """cos, sin (B, 1, T/cp, K/2); without RoPE cos is the factor of queries, (B, 1, T/cp, 1),
        and sin None."""
        # -1 is the number of heads on this rank, H/tp: under tensor parallelism each rank computes
        # some of the heads
        q = self.wq(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, H/tp, T/cp, K)
        k = self.wk(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, G/tp, T/cp, K)
        v = self.wv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, G/tp, T/cp, K)
        if self.has_rope:
            q = rotate(q, cos, sin, interleave=True)
            k = rotate(k, cos, sin, interleave=True)
        else:
            q = (q * cos).to(q.dtype)
        if self.qk_eps is not None:
            q = F.rms_norm(q.float(), q.shape[-1:], eps=self.qk_eps).to(q.dtype)
            k = F.rms_norm(k.float(), k.shape[-1:], eps=self.qk_eps).to(k.dtype)
        out = attend(q, k, v)  # (B, H/tp, T/cp, K)
        return self.wo(out.transpose(1, 2).flatten(-2))  # (B, T/cp, D), summed over tp


class StackedExperts(Experts):
    """E SwiGLU feed-forward networks, in the shapes of the files: of gate_up the first F columns
    are the gate's."""

    def __init__(self, n_experts: int, dim: int, ffn_dim: int):
        nn.Module.__init__(self)
        self.gate_up = nn.Parameter(torch.empty(n_experts, dim, 2 * ffn_dim))
        self.down = nn.Parameter(torch.empty(n_experts, ffn_dim, dim))
        # parallel.compile_blocks compiles them
        self.compute = stacked_experts
        self.spread = spread
        self.combine = combine


def stacked_experts(x, weight, counts, gate_up, down, linear=grouped_linear) -> Tensor:
    """x (N, D) sorted by expert, weight (N,), counts (E,), gate_up (E, D, 2F), down (E, F, D) ->
    (N, D)."""
    gate, up = linear(x, gate_up.transpose(1, 2), counts).chunk(2, -1)
    hidden = F.silu(gate) * up * weight[:, None].to(gate.dtype)
    return linear(hidden, down.transpose(1, 2), counts)


# differs from qwen3: the sigmoid of the best expert's score is multiplied with what goes into it
class MoE(qwen3.MoE):
    """One expert per token."""

    def __init__(self, config):
        super().__init__(config)
        self.experts = StackedExperts(config.n_experts, config.dim, config.moe_ffn_dim)

    def forward(self, x):
        B = x.shape[0]
        D = x.shape[-1]
        scores = self.router(x).flatten(0, -2)  # (N, E)
        index = self.balance.choose(scores, self.top_k)  # (N, 1)
        weight = scores.gather(1, index).sigmoid()
        flat = self.balance.add_loss(x.reshape(-1, D), scores.softmax(-1), index, B)  # (N, D)
        flat = flat * weight.to(flat.dtype)
        return apply_experts(
            self.experts, flat, index, torch.ones_like(weight), self.balance.count(index)
        ).view_as(x)


# differs from qwen3: a shared expert; and both kinds of layers may be in one model
class Block(nn.Module):
    def __init__(self, config, layer: int):
        super().__init__()
        self.attn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.attn = Attention(config, config.has_rope(layer))
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        if config.has_experts(layer):
            self.moe = MoE(config)
            self.shared = FeedForward(config.dim, config.moe_ffn_dim)
        else:
            self.ffn = FeedForward(config.dim, config.ffn_dim)

    def forward(self, h, cos, sin, attend):
        h = h + self.attn(self.attn_norm(h), cos, sin, attend)
        x = self.ffn_norm(h)
        if hasattr(self, "moe"):
            return h + (self.moe(x) + self.shared(x))
        return h + self.ffn(x)


class Llama4(Qwen3):
    """The whole model or a pipeline stage; in a stage the parts of other stages are None."""

    def __init__(self, config: Llama4Config):
        super().__init__(config)
        # in place of Qwen3's
        self.blocks = nn.ModuleDict({str(i): Block(config, i) for i in range(config.n_layers)})

    def forward(
        self, tokens, labels=None, positions=None, doc_ids=None, loss_denom=None, cache=None
    ):
        """As Qwen3.forward, but the blocks are of two kinds."""
        h = tokens if tokens.is_floating_point() else self.tok_embeddings(tokens)  # (B, T/cp, D)
        if positions is None:
            positions = torch.arange(h.shape[1], device=h.device)[None]
        rope = cos_and_sin(self.config, self.config.head_dim, positions)  # (B, 1, T/cp, K/2) fp32
        # two kinds of layers: with RoPE in a chunk of tokens, and without it over all
        steps = ((positions[:, None, ..., None] + 1.0) / self.config.floor_scale).floor()
        tuning = self.config.attn_scale * self.config.temperature_tuning
        factor = (steps.log1p() * tuning + 1, None)  # factor (B, 1, T/cp, 1) fp32
        # tokens of its chunk up to a query (B or 1, T/cp)
        reach = positions % self.config.chunk_size + 1
        attends = cache is None and (
            self.make_attend(positions, doc_ids),
            self.make_attend(positions, doc_ids, reach=reach),
        )
        for i, block in self.blocks.items():
            in_chunk = self.config.has_rope(int(i))
            if attends:
                attend = attends[in_chunk]
            else:
                attend = cache.attend(i, reach=reach if in_chunk else None)
            cos, sin = rope if in_chunk else factor
            h = block(h, cos, sin, attend)
        if self.norm is None:
            return h  # the next pipeline stage goes on from here
        h = self.norm(h)
        weight = (self.head or self.tok_embeddings).weight  # (V/tp, D)
        if labels is None:
            return self.logits(h, weight)
        return self.token_loss(h, weight, labels, loss_denom)

    def init_std(self, fqn: str) -> float | None:
        """As in Qwen3, where the experts' matrices have other names."""
        return super().init_std(
            fqn.replace("experts.gate_up", "experts.w1").replace("experts.down", "experts.w2")
        )

    def n_active_params(self) -> int:
        """Parameters that a token uses: all but the experts not chosen."""
        c = self.config
        n_moe = sum(map(c.has_experts, range(c.n_layers)))
        return (
            sum(p.numel() for p in self.parameters())
            - n_moe * (c.n_experts - 1) * 3 * c.dim * c.moe_ffn_dim
        )

    def flops_per_token(self, seq_len: int) -> int:
        """As in Qwen3, without the keys before the chunk, which layers with RoPE do not see."""
        c = self.config
        # keys, summed over the layers
        unseen = sum(map(c.has_rope, range(c.n_layers))) * max(seq_len - c.chunk_size, 0)
        return super().flops_per_token(seq_len) - 12 * c.n_heads * c.head_dim * unseen

    def tp_plan(self) -> dict[str, str]:
        plan = super().tp_plan()
        # these norms have no weights
        del plan["blocks.*.attn.q_norm"], plan["blocks.*.attn.k_norm"]
        ffns = ["shared"]
        if self.config.moe_every > 1:
            ffns.append("ffn")
        for ffn in ffns:
            plan |= {f"blocks.*.{ffn}": "gather_sequence", f"blocks.*.{ffn}.w2": "rowwise"}
            plan |= {f"blocks.*.{ffn}.w1": "colwise", f"blocks.*.{ffn}.w3": "colwise"}
        return plan

    def hf_keys(self) -> dict[str, str]:
        """fqn -> name in Hugging Face's files. The numbers and the shapes are the same."""
        names = {
            "tok_embeddings.weight": "model.embed_tokens.weight",
            "norm.weight": "model.norm.weight",
        }
        if not self.config.tie_embeddings:
            names["head.weight"] = "lm_head.weight"
        block = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
        block |= {f"attn.w{x}": f"self_attn.{x}_proj" for x in "qkvo"}
        block = {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in block.items()}
        ffn = {
            "w1.weight": "gate_proj.weight",
            "w2.weight": "down_proj.weight",
            "w3.weight": "up_proj.weight",
        }
        dense = {f"ffn.{ours}": f"feed_forward.{theirs}" for ours, theirs in ffn.items()}
        sparse = {
            f"shared.{ours}": f"feed_forward.shared_expert.{theirs}" for ours, theirs in ffn.items()
        }
        sparse |= {"moe.router.weight": "feed_forward.router.weight"}
        sparse["moe.experts.gate_up"] = "feed_forward.experts.gate_up_proj"
        sparse["moe.experts.down"] = "feed_forward.experts.down_proj"
        for i in range(self.config.n_layers):
            table = block | (sparse if self.config.has_experts(i) else dense)
            for ours, theirs in table.items():
                names[f"blocks.{i}.{ours}"] = f"model.layers.{i}.{theirs}"
        return names


# Hugging Face's config.json; models/hf_config.py explains the tables.
HF_FIELDS = SHARED_FIELDS | dict(
    norm_eps=("rms_norm_eps", 1e-5),
    rope_theta=("rope_theta", 500000.0),
    n_kv_heads=("num_key_value_heads", 8),
    head_dim=("head_dim", 128),
    max_seq_len=("max_position_embeddings", 131072),
    ffn_dim=("intermediate_size_mlp", 16384),
    moe_ffn_dim=("intermediate_size", None),
    n_experts=("num_local_experts", None),
    top_k=("num_experts_per_tok", 1),
    moe_every=("interleave_moe_layer_step", 1),
    nope_every=("no_rope_layer_interval", 4),
    chunk_size=("attention_chunk_size", 8192),
    qk_norm=("use_qk_norm", True),
    temperature_tuning=("attn_temperature_tuning", True),
    floor_scale=("floor_scale", 8192),
    attn_scale=("attn_scale", 0.1),
)
HF_FIXED = SHARED_FIXED | dict(model_type=("llama4_text",))
