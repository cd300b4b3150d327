"""--check_parity --certify: small versions of a layout and of each pair of its axes, compared with one process: parity.json."""
import os
import tempfile
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import torch

from distributed.layout import AXES
from support.certificate import BESIDE, NAME, axes_of, certified_code, parts_of
from support.files import json_bytes, write_file
from support.parity import (
    check_comparable,
    flags_of_halves,
    later_slack,
    model_config_of,
    print_comparison,
    read_records,
    relative,
    run_half,
    without_refused,
)

EVERY = (*AXES, "ep", "etp")


def layouts_of(axes: list[str]) -> list[tuple[str, ...]]:
    """All axes together, then each pair. ep borrows its ranks from another axis, and etp is tp: these come along."""
    found = []
    for chosen in (axes, *combinations(axes, 2)):
        chosen = {*chosen, *["tp"] * ("etp" in chosen)}
        lenders = [axis for axis in ("dp_shard", "cp", "tp") if axis in axes and not (axis == "tp" and "etp" in chosen)]
        if "ep" in chosen and not chosen & set(lenders):
            chosen |= set(lenders[:1])
        ordered = tuple(axis for axis in EVERY if axis in chosen)
        if ordered not in found:
            found.append(ordered)
    return found


def errors_of(one: list[dict], layout: list[dict]) -> dict[str, float]:
    """Of loss and gradients at the first step, and of the weights after it; relative."""
    def worst(kind, step):
        pairs = ((step[0][kind][fqn].float(), step[1][kind][fqn].float()) for fqn in step[0][kind])
        return max(relative(b, a) for a, b in pairs)

    first, second = list(zip(one, layout))[:2]
    loss = abs(first[0]["loss"] - first[1]["loss"]) / abs(first[0]["loss"])
    return {"loss": loss, "gradient": worst("gradient", first), "weight": worst("weight", second)}


def small_model(main, cfg) -> dict:
    """Flags of the recipe's debug flavor that has what the user's model has: experts, a module that predicts another token,
    a tied embedding. The user's own flavor, if it is a debug one."""
    wanted = parts_of(model_config_of(main, cfg))
    model = dict(flavor=cfg.flavor, model_args=cfg.model_args)
    if not cfg.flavor.startswith("debug"):
        debug = {name: parts_of(c) for name, c in main.__globals__["FLAVORS"].items() if name.startswith("debug")}
        untied = [name for name in wanted if name != "tie_embeddings"]
        model["flavor"] = next((name for name, parts in debug.items() if parts == untied), "debug")
        model["model_args"] += ",tie_embeddings=true" * ("tie_embeddings" in wanted)
    if parts_of(model_config_of(main, replace(cfg, **model))) != wanted:
        raise ValueError(f"--certify: no debug flavor has what {cfg.flavor} has ({', '.join(wanted)}): give --flavor debug and "
                         "--model_args")
    return model


def certify(main, cfg) -> int:
    """Compare one process with every layout of layouts_of, in which every axis has two ranks; returns the exit status.

    The model is the recipe's debug flavor, for all ranks share one machine. Writes <out>/parity.json if all are equal.
    """
    check_comparable(cfg)
    code, axes = certified_code(), axes_of(replace(cfg, dp_shard=2 if cfg.dp_shard == -1 else cfg.dp_shard), 0)
    small = {axis: 2 if axis in axes else 1 for axis in EVERY}
    small |= small_model(main, cfg) | dict(seq_len=min(cfg.seq_len, 128), local_batch_size=min(cfg.local_batch_size, 8))
    little = replace(cfg, **small)
    results, layouts = [], layouts_of(axes)
    with tempfile.TemporaryDirectory() as folder:
        halves = flags_of_halves(main, little, {axis: small[axis] for axis in AXES}, folder)
        model_config, one = model_config_of(main, little), small | halves["one process"]
        if status := run_half("one process", one):
            return status
        later = later_slack(cfg, has_experts=getattr(model_config, "n_experts", 0) > 0)
        for chosen in layouts:
            name = " x ".join(f"{axis} 2" for axis in chosen)
            degrees = {axis: 2 if axis in chosen else 1 for axis in EVERY}
            flags = small | halves["layout"] | degrees | {"out": os.path.join(folder, "_".join(chosen))}
            flags |= without_refused(little, flags, model_config)
            if status := run_half(name, flags):
                return status
            records = read_records(one["out"]), read_records(flags["out"])
            if status := print_comparison(*records, later):
                print(f"certify: not certified, because of {name}; --check_parity --where on that layout tells more")
                return status
            results.append({"layout": list(chosen), **errors_of(*records)})
    worst = {axis: max(r["gradient"] for r in results if axis in r["layout"]) for axis in axes}
    about = {"recipe": os.path.basename(main.__globals__["__file__"]), "torch": torch.__version__, "hashes": code,
             "worst_error": worst, "layouts": results, "parts": parts_of(model_config),
             "flags": {name: getattr(cfg, name) for name in BESIDE}}
    os.makedirs(cfg.out, exist_ok=True)
    write_file(Path(cfg.out, NAME), json_bytes(about))
    print(f"certify: {len(results)} layouts equal one process; worst relative error of a gradient: "
          + ", ".join(f"{axis} {error:.1e}" for axis, error in worst.items()) + f"\ncertify: {cfg.out}/{NAME}")
    return 0
