"""--check: would this command line train, and what does a step cost? ablate.py asks each variant
before the first run.

The recipe's own main runs up to connect(): it checks the flags, the layout and the data as every
start does. Nothing is built, nothing is written to --out, and an earlier run there is not looked at.
"""

import json
import tempfile
from dataclasses import replace
from types import FunctionType
from typing import Any

import torch

from distributed.layout import Layout
from tools.reports.stop_main import stop_main

# flags that ablate.py compares between runs; null if a recipe lacks the flag
COMPARED = ("steps", "val_every", "data", "val_data", "val_batches", "seq_len")


def check(main: FunctionType, cfg: Any) -> None:
    """Print one line of JSON. Errors of main, such as a ValueError for a wrong flag, are passed on."""
    found: dict[str, Any] = dict.fromkeys(COMPARED)
    for name in found.keys() & vars(cfg).keys():
        found[name] = getattr(cfg, name)
    # grpo.py has one seed for everything
    found["seeded"] = [name for name in ("seed", "data_seed") if hasattr(cfg, name)]
    layout, model = layout_and_model(main, cfg)
    found |= costs_of_step(layout, model, found["seq_len"])
    print(json.dumps(found), flush=True)


def check_in_new_folder(main: FunctionType, cfg: Any) -> None:
    """check() for grpo.py and its forks, whose main writes a tokenizer to --out before connect()."""
    with tempfile.TemporaryDirectory() as out:
        check(main, replace(cfg, out=out))


def layout_and_model(main: FunctionType, cfg: Any) -> tuple:
    """(layout, the model's shapes) of a command line; no model for a recipe without claim_run, such
    as grpo.py."""
    claims = []
    stand_ins = {}
    usual = main.__globals__.get("claim_run")
    if usual:

        def claim_run(cfg, Model, model_config, *more):
            claims.append((Model, model_config))
            return usual(cfg, Model, model_config, *more)

        stand_ins["claim_run"] = claim_run
    (layout, *_), _ = stop_main(main, replace(cfg), "connect", **stand_ins)
    if not claims:
        return layout, None
    Model, model_config = claims[0]
    with torch.device("meta"):
        return layout, Model(model_config)


def costs_of_step(layout: Layout, model: Any, seq_len: int) -> dict:
    """parameters: active, without the lookup table; flops and tokens: of one step. All None without
    a model."""
    if not hasattr(model, "flops_per_token"):
        return dict.fromkeys(("parameters", "all_parameters", "flops", "tokens"))
    tokens = layout.global_batch_size * seq_len
    return {
        "parameters": model.flops_per_token(0) // 6,
        "all_parameters": sum(p.numel() for p in model.parameters()),
        "flops": model.flops_per_token(seq_len) * tokens,
        "tokens": tokens,
    }
