"""DeepSeek-V2 and V3: latent attention, many small experts beside shared ones, and multi-token
prediction.

B batch, T sequence (T/cp on this rank), D dim, H heads (H/tp), N qk_nope_head_dim, P
qk_rope_head_dim, K = N + P, U v_head_dim, R kv_lora_rank, Q q_lora_rank, F ffn_dim (F/tp), V vocab
(V/tp), E experts (E/ep). Under sequence parallelism the activations between attention and FFN, and
the latents of attention, have T/cp/tp tokens.

Architecture: DeepSeek-V2, arXiv:2405.04434 (attention: sec. 2.1), and V3, arXiv:2412.19437
(routing: sec. 2.1.2, multi-token
prediction: sec. 2.2). Numbers of the flavors: the config.json of DeepSeek's and Moonshot's Hugging
Face repositories. Comments
explain each difference from models/qwen3.py; all else is an equal copy (tests/test_copies.py).
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.attention import causal_attention
from models.hf_config import SHARED_FIELDS, SHARED_FIXED, YARN, check_sizes
from models.layers import RMSNorm, attention_factors, cos_and_sin, rotate, weight_of
from models.loss import IGNORE, linear_cross_entropy
from models.moe import Balance, Experts, Router, apply_experts

# of the two norms inside attention: as published, whatever norm_eps is (Moonlight's is 1e-5)
LATENT_EPS = 1e-6


@dataclass(kw_only=True)
class DeepSeekConfig:
    dim: int = 192
    n_layers: int = 6
    n_heads: int = 8
    ffn_dim: int = 512  # of the dense layers
    vocab_size: int = 4096
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None  # yarn, with the names of Hugging Face's config.json: YARN
    # RoPE turns neighbours (0, 1), (2, 3) ...; False: the two halves of a head
    rope_interleave: bool = True
    tie_embeddings: bool = False
    max_seq_len: int = 163840
    # queries come from a latent of this size; 0: directly from the activations
    q_lora_rank: int = 96
    # keys and values come from a latent of this size; generation caches it and the key's RoPE part
    kv_lora_rank: int = 64
    qk_nope_head_dim: int = 32  # part of a query or key head without position
    qk_rope_head_dim: int = 16  # part with RoPE; all heads share the key's
    v_head_dim: int = 32
    n_dense_layers: int = 1  # the first layers have a dense FFN
    n_experts: int = 8
    # experts for every token: a single FFN of n_shared_experts * moe_ffn_dim
    n_shared_experts: int = 1
    top_k: int = 2  # routed experts per token
    moe_ffn_dim: int = 160
    n_groups: int = 4  # experts are in groups (in the original training, a node each) ...
    top_k_groups: int = 2  # ... and a token's experts come from the best groups only
    # V3, V2; a group's score: sum of the best two, the best
    score_func: Literal["sigmoid", "softmax"] = "sigmoid"
    # the weights of a token's experts are scaled to sum 1, before route_scale
    norm_topk_prob: bool = True
    route_scale: float = 1.0
    mtp_depth: int = 0  # 1: an extra layer predicts the token after the next, in training only

    def __post_init__(self):
        check_sizes(
            self,
            "dim",
            "n_layers",
            "n_heads",
            "ffn_dim",
            "vocab_size",
            "max_seq_len",
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "n_experts",
            "moe_ffn_dim",
            "n_groups",
            "top_k_groups",
            rotated="qk_rope_head_dim",
        )
        if not 0 <= self.n_dense_layers < self.n_layers:
            raise ValueError(
                f"n_dense_layers {self.n_dense_layers} must be between 0 and n_layers - 1 = "
                f"{self.n_layers - 1}"
            )
        if min(self.q_lora_rank, self.n_shared_experts) < 0 or self.mtp_depth not in (0, 1):
            raise ValueError(
                f"q_lora_rank {self.q_lora_rank} and n_shared_experts {self.n_shared_experts} "
                f"must be 0 or more, mtp_depth {self.mtp_depth} 0 or 1"
            )
        per_group = self.n_experts // self.n_groups
        if self.n_experts % self.n_groups or (
            self.n_groups > 1 and self.score_func == "sigmoid" and per_group < 2
        ):
            raise ValueError(
                f"n_experts {self.n_experts} in n_groups {self.n_groups} makes no whole groups, "
                "of 2 or more with score_func sigmoid"
            )
        if (
            self.top_k_groups > self.n_groups
            or not 1 <= self.top_k <= self.top_k_groups * per_group
        ):
            raise ValueError(
                f"top_k {self.top_k} must be between 1 and the {self.top_k_groups * per_group} "
                f"experts of top_k_groups {self.top_k_groups} of n_groups {self.n_groups}"
            )

    @property
    def n_kv_heads(self) -> int:  # every head makes keys and values of its own from the latent
        return self.n_heads

    @property
    def head_dim(self) -> int:  # of queries and keys
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @classmethod
    def from_hf(cls, config_json: dict) -> "DeepSeekConfig":
        """The config of a Hugging Face folder's config.json. Raises ValueError naming the field
        that we cannot represent.

        The tables of names are at the end of this file.
        """
        from models.hf_convert import config_from_hf  # only Hugging Face folders need it

        is_v2 = config_json.get("model_type") == "deepseek_v2"
        # both names are in use
        mtp = config_json.get("num_nextn_predict_layers") or config_json.get("num_mtp_layers") or 0
        hf = config_json | {"num_nextn_predict_layers": mtp}
        if is_v2 and hf.get("topk_method", "greedy") in ("greedy", None):
            # greedy ignores the file's groups: all experts compete
            hf |= dict(n_group=1, topk_group=1)
        return config_from_hf(cls, hf, HF_FIELDS, HF_V2 if is_v2 else HF_V3, YARN)

    def to_hf(self) -> dict:
        """The inverse: a config.json for transformers."""
        from models.hf_convert import config_to_hf  # only Hugging Face folders need it

        is_v2 = self.score_func == "softmax"
        name = "DeepseekV3ForCausalLM"
        table = HF_V3
        if is_v2:
            name = "DeepseekV2ForCausalLM"
            table = HF_V2
        found = config_to_hf(self, HF_FIELDS, table) | dict(architectures=[name])
        found |= dict(num_key_value_heads=self.n_heads, q_lora_rank=self.q_lora_rank or None)
        if is_v2 and self.n_groups > 1:
            return found | dict(topk_method="group_limited_greedy")
        return found


def yarn(mscale: float) -> dict:
    return dict(
        factor=40,
        beta_fast=32,
        beta_slow=1,
        mscale=mscale,
        mscale_all_dim=mscale,
        original_max_position_embeddings=4096,
    )


_heads: dict[str, Any] = dict(
    kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
)
_v2 = partial(
    DeepSeekConfig,
    **_heads,
    vocab_size=102400,
    score_func="softmax",
    norm_topk_prob=False,
    n_shared_experts=2,
    top_k=6,
    rope_scaling=yarn(0.707),
)
_small: dict[str, Any] = dict(
    dim=2048,
    n_layers=27,
    n_heads=16,
    q_lora_rank=0,
    n_experts=64,
    moe_ffn_dim=1408,
    n_groups=1,
    top_k_groups=1,
)
FLAVORS = {
    "debug": DeepSeekConfig(),
    "debug_mtp": DeepSeekConfig(mtp_depth=1),
    "16B": _v2(**_small, ffn_dim=10944),  # V2-Lite
    "236B": _v2(
        dim=5120,
        n_layers=60,
        n_heads=128,
        q_lora_rank=1536,
        ffn_dim=12288,
        n_experts=160,
        moe_ffn_dim=1536,
        n_groups=8,
        top_k_groups=3,
        route_scale=16.0,
    ),  # V2; V2.5 has mscale 1
    "671B": DeepSeekConfig(
        **_heads,
        dim=7168,
        n_layers=61,
        n_heads=128,
        q_lora_rank=1536,
        ffn_dim=18432,
        vocab_size=129280,
        n_dense_layers=3,
        n_experts=256,
        top_k=8,
        moe_ffn_dim=2048,
        n_groups=8,
        top_k_groups=4,
        route_scale=2.5,
        rope_scaling=yarn(1.0),
    ),  # V3; trained with mtp_depth=1
    "moonlight-16B": DeepSeekConfig(
        **_heads,
        **_small,
        ffn_dim=11264,
        vocab_size=163840,
        norm_eps=1e-5,
        rope_theta=50000.0,
        max_seq_len=8192,
        n_shared_experts=2,
        top_k=6,
        route_scale=2.446,
    ),
}


# differs from qwen3: multi-head latent attention
class Attention(nn.Module):
    """All heads make keys and values from a shared latent of R numbers per token (c, normalised)
    and a shared rotated key of P numbers (k_rope): arXiv:2405.04434, eq. 9-19. TP shards the heads.
    Each tp rank computes the latents of T/cp/tp tokens, then gathers the others: R + P + Q numbers
    per token travel in place of D."""

    def __init__(self, config):
        super().__init__()
        self.dims = N, P, U, R = (
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
            config.kv_lora_rank,
        )
        H = config.n_heads
        Q = config.q_lora_rank
        if Q:
            self.wq_a = nn.Linear(config.dim, Q, bias=False)
            self.q_norm = RMSNorm(Q, eps=LATENT_EPS)
            self.wq_b = nn.Linear(Q, H * (N + P), bias=False)
        else:
            self.wq = nn.Linear(config.dim, H * (N + P), bias=False)
        self.wkv_a = nn.Linear(config.dim, R + P, bias=False)
        self.kv_norm = RMSNorm(R, eps=LATENT_EPS)
        # computes nothing; tp_plan gathers the key from all tp ranks here
        self.k_rope = nn.Identity()
        self.wkv_b = nn.Linear(R, H * (N + U), bias=False)
        self.wo = nn.Linear(H * U, config.dim, bias=False)
        self.interleave = config.rope_interleave
        self.scale = (N + P) ** -0.5 * attention_factors(config)[1]

    def forward(self, x, cos, sin, attend, attend_cached=None):
        N, P, U, R = self.dims
        # (B, T/cp, H/tp * K)
        if hasattr(self, "wq_a"):
            q = self.wq_b(self.q_norm(self.wq_a(x)))
        else:
            q = self.wq(x)
        B, T, _ = q.shape
        # (B, H/tp, T/cp, N), (B, H/tp, T/cp, P)
        q_nope, q_rope = q.view(B, T, -1, N + P).transpose(1, 2).split([N, P], -1)
        q_rope = rotate(q_rope, cos, sin, self.interleave)
        c, k_rope = self.wkv_a(x).split([R, P], -1)  # (B, T/cp/tp, R), (B, T/cp/tp, P)
        # k_rope (B, 1, T/cp, P)
        c = self.kv_norm(c)
        k_rope = rotate(self.k_rope(k_rope)[:, None], cos, sin, self.interleave)
        if attend_cached is None:
            # (B, H/tp, T/cp, N or U)
            k_nope, v = self.wkv_b(c).view(B, T, -1, N + U).transpose(1, 2).split([N, U], -1)
            # (B, H/tp, T/cp, K)
            k = torch.cat([k_nope, k_rope.expand(-1, k_nope.shape[1], -1, -1)], -1)
            # (B, H/tp, T/cp, U)
            out = attend(torch.cat([q_nope, q_rope], -1), k, v, scale=self.scale)
        else:
            # Generation keeps R + P numbers per token. q . (w_k c) = (q w_k) . c, so the keys of
            # the past are never made: all heads attend to the latents themselves (arXiv:2405.04434,
            # end of sec. 2.1.2), and w_v comes after.
            # (H, N, R), (H, U, R)
            w_k, w_v = weight_of(self.wkv_b).view(-1, N + U, R).split([N, U], 1)
            latent = torch.cat([c[:, None], k_rope], -1)  # (B, 1, T, R + P)
            q = torch.cat([q_nope @ w_k, q_rope], -1)  # (B, H, T, R + P)
            # (B, H, T, U)
            out = attend_cached(q, latent, None, scale=self.scale)[..., :R] @ w_v.transpose(1, 2)
        return self.wo(out.transpose(1, 2).reshape(B, T, -1))  # (B, T/cp, D), summed over tp


class FeedForward(nn.Module):
    """SwiGLU, arXiv:2002.05202: w2(silu(w1 x) * w3 x)."""

    def __init__(self, dim, ffn_dim):
        super().__init__()
        self.w1 = nn.Linear(dim, ffn_dim, bias=False)
        self.w2 = nn.Linear(ffn_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, ffn_dim, bias=False)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # (B, T/cp, F/tp) inside


# differs from qwen3: sigmoid or softmax, groups, and a scale
class MoE(nn.Module):
    """The routed experts: arXiv:2412.19437, eq. 12-16 (V3, sigmoid), arXiv:2405.04434, eq. 20-22
    (V2, softmax)."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.top_k = config.top_k
        self.router = Router(config.dim, config.n_experts)
        self.experts = Experts(config.n_experts, config.dim, config.moe_ffn_dim)
        self.balance = Balance(config.n_experts)

    def forward(self, x, shared=None):
        c = self.config
        logits = self.router(x).flatten(0, 1)  # (N, E), N the tokens here
        if c.score_func == "sigmoid":
            scores = logits.sigmoid()
        else:
            scores = logits.softmax(-1)
        index = self.balance.choose(scores, self.top_k, self.best_groups)  # (N, k)
        weight = scores.gather(1, index)  # (N, k)
        if c.norm_topk_prob:
            weight = weight / (weight.sum(-1, keepdim=True) + 1e-20)
        # for the balancing loss, V3, eq. 18-19: counts the best scores before biases and groups
        probs = scores / scores.sum(-1, keepdim=True)
        best = index
        if c.score_func == "sigmoid":
            best = scores.topk(self.top_k, -1).indices
        weight = self.balance.add_loss(weight * c.route_scale, probs, best, len(x))
        return apply_experts(self.experts, x, index, weight, self.balance.count(index), shared)

    def best_groups(self, scores: Tensor) -> Tensor:
        """scores (N, E) with -inf outside each token's top_k_groups groups."""
        c = self.config
        if c.top_k_groups == c.n_groups:
            return scores
        grouped = scores.unflatten(-1, (c.n_groups, -1))  # (N, groups, E / groups)
        # (N, groups)
        if c.score_func == "sigmoid":
            best = grouped.topk(2, -1).values.sum(-1)
        else:
            best = grouped.amax(-1)
        chosen = best.topk(c.top_k_groups, -1).indices
        outside = torch.ones_like(best, dtype=torch.bool).scatter(-1, chosen, False)
        return grouped.masked_fill(outside[..., None], -torch.inf).flatten(-2)


# differs from qwen3: the first layers are dense, the others have shared experts as well
class Block(nn.Module):
    def __init__(self, config, is_dense: bool):
        super().__init__()
        self.attn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, eps=config.norm_eps)
        if is_dense:
            self.ffn = FeedForward(config.dim, config.ffn_dim)
        else:
            self.moe = MoE(config)
            shared_dim = config.n_shared_experts * config.moe_ffn_dim
            self.shared = None
            if shared_dim:
                self.shared = FeedForward(config.dim, shared_dim)

    def forward(self, h, cos, sin, attend, attend_cached=None):
        h = h + self.attn(self.attn_norm(h), cos, sin, attend, attend_cached)
        x = self.ffn_norm(h)
        if hasattr(self, "ffn"):
            return h + self.ffn(x)
        return h + self.moe(x, self.shared)


class MTP(nn.Module):
    """Multi-token prediction, depth 1: from position i's output and the embedding of token i+1,
    predict token i+2.

    arXiv:2412.19437, eq. 21-23. As in the published weights, the projection takes the embedding
    first, then the output after the model's last norm.
    """

    def __init__(self, config):
        super().__init__()
        self.enorm = RMSNorm(config.dim, eps=config.norm_eps)
        self.hnorm = RMSNorm(config.dim, eps=config.norm_eps)
        self.eh_proj = nn.Linear(2 * config.dim, config.dim, bias=False)
        self.block = Block(config, is_dense=False)
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)

    def forward(self, h, embedded, cos, sin, attend):
        """h and embedded (B, T/cp/tp, D) -> (B, T/cp/tp, D), ready for the head."""
        return self.norm(
            self.block(
                self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(h)], -1)), cos, sin, attend
            )
        )


def shift_targets(
    tokens: Tensor, labels: Tensor, doc_ids: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """(tokens, labels) for MTP, (B, T) each: position i gets token i+1 and label i+1. Call before a
    sequence is split over ranks. The last position of a sequence or document has no label."""
    next_tokens = tokens.roll(-1, 1)
    next_labels = labels.roll(-1, 1)
    last = torch.zeros_like(labels, dtype=torch.bool)
    last[:, -1] = True
    if doc_ids is not None:
        last |= doc_ids != doc_ids.roll(-1, 1)
    return next_tokens, next_labels.masked_fill(last, IGNORE)


class DeepSeek(nn.Module):
    """The whole model or a pipeline stage; in a stage the parts of other stages are None."""

    def __init__(self, config: DeepSeekConfig):
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.blocks = nn.ModuleDict(
            {str(i): Block(config, i < config.n_dense_layers) for i in range(config.n_layers)}
        )
        self.norm = RMSNorm(config.dim, eps=config.norm_eps)
        # tied: forward takes the embedding's weight for the head as well
        self.head = None
        if not config.tie_embeddings:
            self.head = nn.Linear(config.dim, config.vocab_size, bias=False)
        self.mtp = None
        if config.mtp_depth:
            self.mtp = MTP(config)
        self.mtp_weight = 0.3  # weight of MTP's loss; the recipe's --mtp_weight
        # parallel.py replaces these functions: context_parallel the first, tensor_parallel and
        # compile the other two.
        self.make_attend = causal_attention
        self.token_loss = linear_cross_entropy
        self.logits = F.linear

    def forward(
        self,
        tokens,
        labels=None,
        positions=None,
        doc_ids=None,
        loss_denom=None,
        cache=None,
        next_tokens=None,
        next_labels=None,
    ):
        """tokens (B, T) -> logits (B, T, V) in compute dtype; with labels (B, T): the scalar sum of
        token losses / loss_denom.

        positions (B, T) or (1, T), default 0..T-1; doc_ids (B, T) of the whole sequence: attention
        stays inside a document. cache: for generation, see rl/decoding.py. A later pipeline stage
        takes activations in place of tokens. next_tokens, next_labels: from shift_targets; required
        for a pipeline stage or a part of a sequence, else made here. MTP's loss counts in the
        gradient, not in the returned value.
        """
        h = tokens  # (B, T/cp, D), of the stage before
        if not tokens.is_floating_point():
            h = self.tok_embeddings(tokens)
        if positions is None:
            positions = torch.arange(h.shape[1], device=h.device)[None]
        # (B, 1, T/cp, P/2) fp32
        cos, sin = cos_and_sin(self.config, self.config.qk_rope_head_dim, positions)
        attend = None
        if cache is None:
            attend = self.make_attend(positions, doc_ids)
        for i, block in self.blocks.items():
            attend_cached = None
            if cache is not None:
                attend_cached = cache.attend(i)
            h = block(h, cos, sin, attend, attend_cached)
        if self.norm is None:
            return h  # the next pipeline stage goes on from here
        h = self.norm(h)
        weight = (self.head or self.tok_embeddings).weight  # (V/tp, D)
        if labels is None:
            return self.logits(h, weight)
        loss = self.token_loss(h, weight, labels, loss_denom)
        if self.mtp is None or not torch.is_grad_enabled():
            return loss
        if next_tokens is None or next_labels is None:
            next_tokens, next_labels = shift_targets(tokens, labels, doc_ids)
        h = self.mtp(h, self.tok_embeddings(next_tokens), cos, sin, attend)
        mtp_loss = self.token_loss(h, weight, next_labels, loss_denom)
        # adds 0 to the value, and MTP's gradient
        return loss + self.mtp_weight * (mtp_loss - mtp_loss.detach())

    def init_std(self, fqn: str) -> float | None:
        """Standard deviation of a weight's initial values; None for an unknown name.

        Norms start at 1 and biases at 0, as distributed/initial.py says. Matrices that write into
        the residual stream are scaled down by sqrt(2 L), so the stream's variance does not grow
        with depth (GPT-2).
        """
        name = ".".join(fqn.split(".")[-2:])
        if name in ("wo.weight", "w2.weight", "experts.w2"):
            return 0.02 / math.sqrt(2 * self.config.n_layers)
        matrices = (
            "tok_embeddings",
            "wq",
            "wq_a",
            "wq_b",
            "wkv_a",
            "wkv_b",
            "w1",
            "w3",
            "router",
            "eh_proj",
            "head",
        )
        if name in ["experts.w1", "experts.w3", *(f"{matrix}.weight" for matrix in matrices)]:
            return 0.02
        return None

    def n_active_params(self) -> int:
        """Parameters that a token uses: all but the experts not chosen."""
        c = self.config
        n_sparse_layers = c.n_layers - c.n_dense_layers + c.mtp_depth
        expert = 3 * c.dim * c.moe_ffn_dim
        idle = n_sparse_layers * (c.n_experts - c.top_k) * expert
        return sum(p.numel() for p in self.parameters()) - idle

    def flops_per_token(self, seq_len: int) -> int:
        """Forward and backward, PaLM's convention (arXiv:2204.02311, app. B): 6 N + 6 L H (K + U)
        T; N active, without lookups.

        MTP counts as an extra layer and a second use of the head.
        """
        c = self.config
        embedding = self.config.vocab_size * self.config.dim
        n = self.n_active_params() + c.mtp_depth * embedding
        if not c.tie_embeddings:
            n -= embedding
        attention = (c.n_layers + c.mtp_depth) * c.n_heads * (c.head_dim + c.v_head_dim) * seq_len
        return 6 * n + 6 * attention

    def tp_plan(self) -> dict[str, str]:
        """fqn pattern -> style (a key of parallel.TP_STYLES). Between blocks, activations are
        sharded along the sequence."""
        c = self.config
        block = {
            "attn_norm": "sequence",
            "attn.wkv_a": "sequence_linear",
            "attn.kv_norm": "sequence",
            "attn.k_rope": "gather",
            "attn.wkv_b": "gather_colwise",
            "attn.wo": "rowwise",
            "ffn_norm": "sequence",
        }
        if c.q_lora_rank:
            block |= {
                "attn.wq_a": "sequence_linear",
                "attn.q_norm": "sequence",
                "attn.wq_b": "gather_colwise",
            }
        else:
            block["attn.wq"] = "gather_colwise"
        ffn = {"": "gather_sequence", ".w1": "colwise", ".w3": "colwise", ".w2": "rowwise"}
        dense = {}
        if c.n_dense_layers:
            dense = {f"ffn{name}": style for name, style in ffn.items()}
        # the experts: distributed.experts.expert_parallel
        sparse = {"moe.router": "sequence_linear"}
        if c.n_shared_experts:
            sparse |= {f"shared{name}": style for name, style in ffn.items()}
        plan = {"tok_embeddings": "vocab_embedding", "norm": "sequence"}
        plan |= {f"blocks.*.{name}": style for name, style in (block | dense | sparse).items()}
        if c.mtp_depth:
            plan |= {f"mtp.{name}": "sequence" for name in ("enorm", "hnorm", "norm")} | {
                "mtp.eh_proj": "sequence_linear"
            }
            plan |= {f"mtp.block.{name}": style for name, style in (block | sparse).items()}
        if c.tie_embeddings:
            return plan
        return plan | {"head": "vocab_head"}

    def hf_keys(self) -> dict[str, str | list[str]]:
        """fqn -> name in Hugging Face's files; for a stack of experts a list of names. MTP is the
        layer after the last."""
        c = self.config
        names: dict[str, str | list[str]] = {
            "tok_embeddings.weight": "model.embed_tokens.weight",
            "norm.weight": "model.norm.weight",
        }
        if not c.tie_embeddings:
            names["head.weight"] = "lm_head.weight"
        block = {
            "attn_norm": "input_layernorm",
            "attn.wkv_a": "self_attn.kv_a_proj_with_mqa",
            "attn.kv_norm": "self_attn.kv_a_layernorm",
            "attn.wkv_b": "self_attn.kv_b_proj",
            "attn.wo": "self_attn.o_proj",
            "ffn_norm": "post_attention_layernorm",
        }
        if c.q_lora_rank:
            block |= {"attn.wq_a": "self_attn.q_a_proj", "attn.wq_b": "self_attn.q_b_proj"}
            block["attn.q_norm"] = "self_attn.q_a_layernorm"
        else:
            block["attn.wq"] = "self_attn.q_proj"
        ffn = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
        dense = {f"ffn.{ours}": f"mlp.{theirs}" for ours, theirs in ffn.items()}
        sparse = {"moe.router": "mlp.gate"}
        if c.n_shared_experts:
            sparse |= {
                f"shared.{ours}": f"mlp.shared_experts.{theirs}" for ours, theirs in ffn.items()
            }
        for i in range(c.n_layers + c.mtp_depth):
            prefix = "mtp.block"
            if i < c.n_layers:
                prefix = f"blocks.{i}"
            layer = f"model.layers.{i}"
            table = block | (dense if i < c.n_dense_layers else sparse)
            names |= {
                f"{prefix}.{ours}.weight": f"{layer}.{theirs}.weight"
                for ours, theirs in table.items()
            }
            if i >= c.n_dense_layers:
                for ours, theirs in ffn.items():
                    experts = [
                        f"{layer}.mlp.experts.{e}.{theirs}.weight" for e in range(c.n_experts)
                    ]
                    names[f"{prefix}.moe.experts.{ours}"] = experts
                if c.score_func == "sigmoid":
                    names[f"{prefix}.moe.balance.bias"] = (
                        f"{layer}.mlp.gate.e_score_correction_bias"
                    )
        if c.mtp_depth:
            table = {
                "enorm": "enorm",
                "hnorm": "hnorm",
                "eh_proj": "eh_proj",
                "norm": "shared_head.norm",
            }
            names |= {
                f"mtp.{ours}.weight": f"model.layers.{c.n_layers}.{theirs}.weight"
                for ours, theirs in table.items()
            }
        return names

    def hf_optional(self) -> list[str]:
        """Optional names in Hugging Face's files: MTP's, with copies of the embedding and the head."""
        return [f"model.layers.{self.config.n_layers}.*"]


# Hugging Face's config.json; models/hf_config.py explains the tables.
HF_FIELDS = SHARED_FIELDS | dict(
    rope_interleave=("rope_interleave", True),
    max_seq_len=("max_position_embeddings", 163840),
    q_lora_rank=("q_lora_rank", 0),
    kv_lora_rank=("kv_lora_rank", None),
    qk_nope_head_dim=("qk_nope_head_dim", None),
    qk_rope_head_dim=("qk_rope_head_dim", None),
    v_head_dim=("v_head_dim", None),
    n_dense_layers=("first_k_dense_replace", None),
    n_experts=("n_routed_experts", None),
    n_shared_experts=("n_shared_experts", 0),
    top_k=("num_experts_per_tok", None),
    moe_ffn_dim=("moe_intermediate_size", None),
    n_groups=("n_group", 1),
    top_k_groups=("topk_group", 1),
    score_func=("scoring_func", None),
    norm_topk_prob=("norm_topk_prob", True),
    route_scale=("routed_scaling_factor", 1.0),
    mtp_depth=("num_nextn_predict_layers", 0),
)
HF_FIXED = SHARED_FIXED | dict(moe_layer_freq=(1,), num_nextn_predict_layers=(0, 1))
HF_V3 = (
    dict(
        model_type=("deepseek_v3", "kimi_k2"),
        topk_method=("noaux_tc", None),
        scoring_func=("sigmoid",),
    )
    | HF_FIXED
)
HF_V2 = (
    dict(
        model_type=("deepseek_v2",),
        topk_method=("greedy", "group_limited_greedy", None),
        scoring_func=("softmax",),
        rope_interleave=(True,),
        # True: V2's own code leaves out the scale, transformers the normalisation; no published V2 does
        norm_topk_prob=(False,),
    )
    | HF_FIXED
)
