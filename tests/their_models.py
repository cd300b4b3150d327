"""Small models of transformers, with weights of which none is without effect."""

import torch
import transformers
from torch import nn

TINY = dict(
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    intermediate_size=64,
    vocab_size=101,
    max_position_embeddings=64,
    rms_norm_eps=1e-5,
    bos_token_id=None,
    eos_token_id=None,
)


SCALED = dict(
    rope_type="llama3",
    rope_theta=5e5,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=16,
)


def random_model(kind: str, values: dict, std=0.2):
    """transformers' model of this kind and config; no weight is without effect."""
    torch.manual_seed(1)
    model = getattr(transformers, f"{kind}ForCausalLM")(
        getattr(transformers, f"{kind}Config")(**values)
    )
    for p in model.parameters():
        nn.init.normal_(p, std=std) if p.dim() > 1 else nn.init.uniform_(p, 0.5, 1.5)
    return model


DEEPSEEK = dict(
    hidden_size=64,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=4,
    n_shared_experts=1,
    n_routed_experts=8,
    routed_scaling_factor=2.5,
    kv_lora_rank=32,
    q_lora_rank=24,
    qk_rope_head_dim=16,
    qk_nope_head_dim=16,
    v_head_dim=24,
    n_group=4,
    topk_group=2,
    num_experts_per_tok=3,
    first_k_dense_replace=1,
    norm_topk_prob=True,
    vocab_size=101,
    max_position_embeddings=256,
    rms_norm_eps=1e-6,
    attn_implementation="eager",
)


YARN = dict(
    rope_type="yarn",
    rope_theta=10000.0,
    factor=8.0,
    beta_fast=32,
    beta_slow=1,
    original_max_position_embeddings=32,
    mscale=0.707,
    mscale_all_dim=0.707,
)
