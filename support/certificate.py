"""parity.json: which code has been shown to train, on which axes, what one process trains.

--check_parity --certify writes it (support/certify.py); a run on several processes carries it, or says that it has none.
"""
import hashlib
import os
import sys
from pathlib import Path

from torch import nn

from support.files import read_json, write_file

NAME = "parity.json"
BESIDE = ("pp_schedule", "cp_method")  # flags of an axis that are other code: compared where the axis is in use


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


def axes_of(cfg, world_size: int) -> list[str]:
    """The axes of more than one rank on so many processes; --dp_shard -1 is what is left of them."""
    others = cfg.pp * cfg.dp_replicate * cfg.cp * cfg.tp
    sizes = {axis: getattr(cfg, axis) for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep", "etp")}
    sizes["dp_shard"] = world_size // max(others, 1) if cfg.dp_shard == -1 else cfg.dp_shard
    return [axis for axis, size in sizes.items() if size > 1]


def why_uncertified(certificate: dict, code: dict[str, str], cfg, axes: list[str]) -> str:
    """'' if this certificate is of this code and of these axes, else what it lacks."""
    known = certificate["hashes"]
    if changed := [file for file in {**known, **code} if known.get(file) != code.get(file)]:
        more = f" (and {len(changed) - 1} more)" * (len(changed) > 1)
        return f"{changed[0]}{more} is not as it was certified"
    if missing := [axis for axis in axes if axis not in certificate["worst_error"]]:
        return f"its certificate is without {', '.join(missing)}"
    beside = [f"--{name} {getattr(cfg, name)}" for name in BESIDE if name[:2] in axes
              and certificate["flags"].get(name) != getattr(cfg, name)]
    return f"its certificate is without {', '.join(beside)}" if beside else ""


def carry_certificate(cfg) -> None:
    """At the start of a run on several processes, on rank 0: find the certificate in --out or in the recipe's usual --out, and
    put it into --out; or say in one line what is not certified, and how it would be."""
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size == 1 or int(os.environ.get("RANK", 0)) != 0:
        return
    axes, reason = axes_of(cfg, world_size), "it has no certificate"
    for folder in dict.fromkeys([cfg.out, type(cfg)().out]):
        if not (path := Path(folder, NAME)).is_file():
            continue
        try:
            reason = why_uncertified(read_json(path), certified_code(), cfg, axes)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            reason = f"{path} cannot be read"
        if not reason:
            if folder != cfg.out:
                write_file(Path(cfg.out, NAME), path.read_bytes())
            return
    recipe = os.path.basename(sys.modules["__main__"].__file__)
    flags = " ".join(f"--{axis} {max(getattr(cfg, axis), 2)}" for axis in axes if axis != "dp_shard" or len(axes) == 1)
    print(f"parity: {recipe} is not certified on {', '.join(axes)}: {reason}; to compare it with one process: "
          f"python {recipe} --check_parity --certify {flags}", flush=True)


def carried_certificate(out: str) -> bytes | None:
    """The run's parity.json, for its checkpoints, if it is of the code that is running."""
    path = Path(out, NAME)
    try:
        return path.read_bytes() if read_json(path)["hashes"] == certified_code() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
