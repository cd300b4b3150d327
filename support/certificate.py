"""parity.json: which code has been shown to train, on which axes, what one process trains.

--check_parity --certify writes it (support/certify.py); a run on several processes carries it, or says that it has none.
"""
import hashlib
import os
import sys
from pathlib import Path

from torch import nn

from support.config import spell_flag
from support.files import read_json, write_file

NAME = "parity.json"
# Flags of an axis that are other code: compared where the axis is in use.
BESIDE = {"pp_schedule": "pp", "pp_schedule_csv": "pp", "cp_method": "cp", "loss_parallel": "tp", "async_tp": "tp"}
PARTS = ("n_experts", "mtp_depth", "tie_embeddings")  # fields of a model's config: a model that has it runs other code


def certified_code() -> dict[str, str]:
    """{file: sha256} of the running recipe, the file of each model class that it knows, what models/ and distributed/ hold of
    them, and parallel.py."""
    recipe, house = sys.modules["__main__"], Path(__file__).resolve().parent.parent
    models = [v.__module__ for v in vars(recipe).values() if isinstance(v, type) and issubclass(v, nn.Module)]
    names = [name for name in sys.modules if name == "parallel" or name.startswith(("models.", "distributed."))]
    found = {}
    for module in (recipe, *(sys.modules[name] for name in {*models, *names} if name in sys.modules)):
        path = Path(getattr(module, "__file__", None) or "").resolve()
        if path.is_file():
            name = str(path.relative_to(house)) if path.is_relative_to(house) else path.name
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return dict(sorted(found.items()))


def parts_of(model_config) -> list[str]:
    """What of PARTS this model has."""
    return [name for name in PARTS if getattr(model_config, name, 0)]


def axes_of(cfg, world_size: int) -> list[str]:
    """The axes of more than one rank on so many processes; --dp_shard -1 is what is left of them."""
    others = cfg.pp * cfg.dp_replicate * cfg.cp * cfg.tp
    sizes = {axis: getattr(cfg, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")}
    sizes["dp_shard"] = world_size // max(others, 1) if cfg.dp_shard == -1 else cfg.dp_shard
    return [axis for axis, size in sizes.items() if size > 1]


def why_uncertified(certificate: dict, code: dict[str, str], cfg, axes: list[str], parts: list[str]) -> str:
    """'' if this certificate is of this code, of these axes and of a model with these parts, else what it lacks."""
    known = certificate["hashes"]
    if changed := [file for file in {**known, **code} if known.get(file) != code.get(file)]:
        more = f" (and {len(changed) - 1} more)" * (len(changed) > 1)
        return f"{changed[0]}{more} is not as it was certified"
    if missing := [axis for axis in axes if axis not in certificate["worst_error"]]:
        return f"its certificate is without {', '.join(missing)}"
    if parts != certificate["parts"]:
        have, want = (" and ".join(names) or "none of them" for names in (certificate["parts"], parts))
        return f"its certificate is of a model with {have}, and this one has {want} (of {', '.join(PARTS)})"
    beside = [spell_flag(name, getattr(cfg, name)) for name, axis in BESIDE.items()
              if axis in axes and certificate["flags"].get(name) != getattr(cfg, name)]
    return f"its certificate is without {', '.join(beside)}" if beside else ""


def carry_certificate(cfg, model_config) -> None:
    """At the start of a run on several processes, on rank 0: find the certificate in --out or in the recipe's usual --out, and
    put it into --out; or say in one line what is not certified, and how it would be."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size == 1 or int(os.environ.get("RANK", 0)) != 0:
        return
    axes, usual, reason = axes_of(cfg, world_size), type(cfg)(), "it has no certificate"
    for folder in dict.fromkeys([cfg.out, usual.out]):
        if not (path := Path(folder, NAME)).is_file():
            continue
        try:
            reason = why_uncertified(read_json(path), certified_code(), cfg, axes, parts_of(model_config))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            reason = f"{path} cannot be read"
        if not reason:
            if folder != cfg.out:
                write_file(Path(cfg.out, NAME), path.read_bytes())
            return
    recipe = os.path.basename(sys.modules["__main__"].__file__)
    flags = [f"--{axis} {max(getattr(cfg, axis), 2)}" for axis in axes if axis != "dp_shard" or len(axes) == 1]
    flags += [spell_flag(name, getattr(cfg, name)) for name in ("flavor", "model_args", *BESIDE)
              if BESIDE.get(name) in (None, *axes) and getattr(cfg, name, None) != getattr(usual, name, None)]
    print(f"parity: {recipe} is not certified on {', '.join(axes)}: {reason}; to compare it with one process: "
          f"python {recipe} --check_parity --certify {' '.join(flags)}", flush=True)


def carried_certificate(out: str) -> bytes | None:
    """The run's parity.json, for its checkpoints, if it is of the code that is running. Which axes are certified is in it: the
    run may be on others, and has said so."""
    path = Path(out, NAME)
    try:
        return path.read_bytes() if read_json(path)["hashes"] == certified_code() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
