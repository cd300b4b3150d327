"""Converts Hugging Face's config.json to the Config of a model and back, with the tables that
models/hf_config.py explains. Only runs with a Hugging Face folder load this file."""

from typing import Any


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
