"""Hugging Face's config.json, read and written (models/hf_convert.py) with two tables at the end of
each model's file.

fields: our field -> (their name, default). The default counts if the file lacks the field or says
    null. Default None: the file must have the field. A function as default computes the value from
    the other fields. If the default is True or False, null means False, as in transformers.
fixed: their name -> values that our model can represent. We write the first value, and assume it if
the file lacks the field.
"""

from typing import Any

# Fields of all models
SHARED_FIELDS = dict(
    dim=("hidden_size", None),
    n_layers=("num_hidden_layers", None),
    n_heads=("num_attention_heads", None),
    ffn_dim=("intermediate_size", None),
    vocab_size=("vocab_size", None),
    norm_eps=("rms_norm_eps", 1e-6),
    rope_theta=("rope_theta", 10000.0),
    tie_embeddings=("tie_word_embeddings", False),
)
SHARED_FIXED = dict(hidden_act=("silu",), attention_bias=(False,))
# type of RoPE scaling -> (required names, optional names)
_original = "original_max_position_embeddings"
YARN = dict(
    yarn=(
        ("factor", _original),
        ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"),
    )
)
STRETCHES = YARN | dict(llama3=(("factor", "low_freq_factor", "high_freq_factor", _original), ()))


def check_sizes(config: Any, *names: str, rotated: str = "head_dim") -> None:
    """Raise ValueError naming the fields of a model's config that are below 1 (None is no size),
    for heads that do not share out the kv heads evenly, and for an odd size of what RoPE rotates.
    """
    wrong = []
    for name in names:
        size = getattr(config, name)
        if size is not None and size < 1:
            wrong.append(f"{name} {size}")
    if wrong:
        raise ValueError(f"the model's {', '.join(wrong)} must be at least 1")
    if config.n_heads % config.n_kv_heads:
        raise ValueError(
            f"n_heads {config.n_heads} is not a multiple of n_kv_heads {config.n_kv_heads}, which "
            "they share"
        )
    size = getattr(config, rotated)
    if size % 2:
        raise ValueError(f"{rotated} {size} is odd, and RoPE turns pairs; use {size + 1}")
