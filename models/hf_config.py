"""Hugging Face's config.json, read and written with two tables at the end of each model's file.

fields: our field -> (their name, default). The default counts if the file lacks the field or says null. Default None: the
    file must have the field. A function as default computes the value from the other fields. If the default is True or False,
    null means False, as in transformers.
fixed: their name -> values that our model can represent. We write the first value, and assume it if the file lacks the field.
"""
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


def check_sizes(config, *names: str) -> None:
    """Raise ValueError naming the fields of a model's config that are below 1."""
    if wrong := [f"{name} {getattr(config, name)}" for name in names if getattr(config, name) < 1]:
        raise ValueError(f"the model's {', '.join(wrong)} must be at least 1")


def config_from_hf(Config, config_json: dict, fields: dict, fixed: dict, stretch=("default", (), ())):
    """The Config for a config.json. Raises ValueError naming the field that the model cannot represent.

    stretch: (type of RoPE scaling that the model knows, required names, optional names). Default: the model knows no scaling.
    """
    file, (kind, needed, others) = f"{Config.__module__.replace('.', '/')}.py", stretch
    hf, scaling = gather_rope(config_json)
    for name, allowed in (fixed | dict(rope_type=("default", kind), partial_rotary_factor=(1.0, None))).items():
        found = hf.setdefault(name, None if name == "model_type" else allowed[0])
        if found not in allowed:
            values = " or ".join(dict.fromkeys(map(repr, allowed)))
            raise ValueError(f"config.json: {name} is {found!r}; {file} has only {values}")
    if odd := sorted(scaling.keys() - {*needed, *others}):
        raise ValueError(f"config.json: rope scaling has {', '.join(odd)}; {file} knows {', '.join(needed + others) or 'none'}")
    if hf["rope_type"] == kind and (missing := [name for name in needed if name not in scaling]):
        raise ValueError(f"config.json: rope scaling {kind!r} lacks {', '.join(missing)}")
    if missing := [theirs for theirs, default in fields.values() if default is None and hf.get(theirs) is None]:
        raise ValueError(f"config.json has no number for {', '.join(missing)}")
    values = {ours: value_of(hf, *entry) for ours, entry in fields.items()}
    return Config(**values, rope_scaling=scaling if hf["rope_type"] == kind != "default" else None)


def gather_rope(config_json: dict) -> tuple[dict, dict]:
    """(config.json with rope_type, rope_theta and partial_rotary_factor at the top level, the other numbers of RoPE)."""
    rope = config_json.get("rope_parameters") or config_json.get("rope_scaling") or {}  # transformers 5 / 4
    rope = {name: value for name, value in dict(rope).items() if value is not None}
    rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))
    hf = config_json | {name: rope.pop(name) for name in ("rope_type", "rope_theta", "partial_rotary_factor") if name in rope}
    return hf, rope


def value_of(hf: dict, theirs: str, default):
    """The value of a field. An integer becomes a float if the default is a float: JSON may say 10000 for 10000.0."""
    value = hf.get(theirs, default)
    if value is None:
        value = False if type(default) is bool else default
    if callable(value):
        value = value(hf)
    return float(value) if type(value) is int and type(default) is float else value


def config_to_hf(config, fields: dict, fixed: dict) -> dict:
    """The inverse, in the spelling of transformers 4 (5 reads it too). The model adds fields outside the tables."""
    found = {theirs: getattr(config, ours) for ours, (theirs, _) in fields.items()}
    return {name: allowed[0] for name, allowed in fixed.items()} | found
