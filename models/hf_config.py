"""Hugging Face's config.json, read and written with two tables at the end of each model's file.

fields: our field -> (their name, default). The default counts if the file lacks the field or says
null. Default None: the
    file must have the field. A function as default computes the value from the other fields. If the default is True or False,
    null means False, as in transformers.
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


def config_from_hf(
    Config: type, config_json: dict, fields: dict, fixed: dict, stretches: dict
) -> Any:
    """The Config for a config.json. Raises ValueError naming the field that the model cannot
    represent.

    stretches: type of RoPE scaling that the model knows -> (required names, optional names).
    """
    file = f"{Config.__module__.replace('.', '/')}.py"
    hf, scaling = gather_rope(config_json)
    fixed_rope = dict(rope_type=("default", *stretches), partial_rotary_factor=(1.0, None))
    for name, allowed in (fixed | fixed_rope).items():
        absent = allowed[0]
        if name == "model_type":
            absent = None
        found = hf.setdefault(name, absent)
        if found not in allowed:
            values = " or ".join(dict.fromkeys(map(repr, allowed)))
            raise ValueError(f"config.json: {name} is {found!r}; {file} has only {values}")
    needed, others = stretches.get(hf["rope_type"], ((), ()))
    odd = sorted(scaling.keys() - {*needed, *others})
    if odd:
        raise ValueError(
            f"config.json: rope scaling has {', '.join(odd)}; {file} knows "
            f"{', '.join(needed + others) or 'none'}"
        )
    missing = [name for name in needed if name not in scaling]
    if missing:
        raise ValueError(
            f"config.json: rope scaling {hf['rope_type']!r} lacks {', '.join(missing)}"
        )
    missing = []
    for theirs, default in fields.values():
        if default is None and hf.get(theirs) is None:
            missing.append(theirs)
    if missing:
        raise ValueError(f"config.json has no number for {', '.join(missing)}")
    values = {ours: value_of(hf, *entry) for ours, entry in fields.items()}
    if hf["rope_type"] not in stretches:
        scaling = None
    return Config(**values, rope_scaling=scaling)


def gather_rope(config_json: dict) -> tuple[dict, dict]:
    """(config.json with rope_type, rope_theta and partial_rotary_factor at the top level, the other
    numbers of RoPE)."""
    # transformers 4 / 5, which lets the older name win if a file has both
    rope = config_json.get("rope_scaling") or config_json.get("rope_parameters") or {}
    rope = {name: value for name, value in dict(rope).items() if value is not None}
    rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))
    hf = dict(config_json)
    for name in ("rope_type", "rope_theta", "partial_rotary_factor"):
        if name in rope:
            hf[name] = rope.pop(name)
    return hf, rope


def value_of(hf: dict, theirs: str, default: Any) -> Any:
    """The value of a field. An integer becomes a float if the default is a float: JSON may say
    10000 for 10000.0."""
    value = hf.get(theirs, default)
    if value is None:
        value = default
        if type(default) is bool:  # null is false
            value = False
    if callable(value):
        value = value(hf)
    if type(value) is int and type(default) is float:
        return float(value)
    return value


def config_to_hf(config: Any, fields: dict, fixed: dict) -> dict:
    """The inverse, in the spelling of transformers 4 (5 reads it too). The model adds fields
    outside the tables."""
    found = {theirs: getattr(config, ours) for ours, (theirs, _) in fields.items()}
    rope = config.rope_scaling
    if rope:
        kind = "yarn"
        if "low_freq_factor" in rope:
            kind = "llama3"
        rope = {"rope_type": kind, **rope}
    return {name: allowed[0] for name, allowed in fixed.items()} | found | dict(rope_scaling=rope)
