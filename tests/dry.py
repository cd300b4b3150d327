"""Shared by tests of the dry run and the pictures: small configurations of a recipe, and their
reports."""

import importlib
import subprocess
import sys
import time
from contextlib import contextmanager

from programs import REPO, run_program

from tools.reports import dryrun
from tools.reports.dryrun import Watch

SMALL = "n_layers=5,dim=64,n_heads=4,n_kv_heads=2,head_dim=16,ffn_dim=128,vocab_size=512"
MOE = SMALL + ",n_experts=8,top_k=2,moe_ffn_dim=64"


class Settled(Watch):
    """Watch for gloo. Gloo's thread frees a collective's tensors after the collective has returned,
    as soon as the thread gets the interpreter's lock: without a pause, such tensors would sometimes
    be alive at a later peak."""

    def run(self, func, *args, **kwargs):
        out = super().run(func, *args, **kwargs)
        if func.namespace in ("c10d", "_c10d_functional"):
            time.sleep(0.005)
        return out


def config(recipe: str, flags: dict):
    small = dict(
        model_args=SMALL,
        seq_len=64,
        local_batch_size=4,
        compute_dtype="float32",
        device="cpu",
        steps=2,
    )
    return importlib.import_module(recipe).Config(**small | flags)


def recipe_of(flags: dict, model: dict) -> tuple[str, dict]:
    """(recipe, flags) of a small model of this kind, see layouts.txt."""
    if "n_experts" in model:
        return "train_qwen3", flags | dict(model_args=MOE, moe_force_balance=True)
    return "train_llama3", flags | dict(
        model_args=SMALL + ",tie_embeddings=true" * ("tie_embeddings" in model)
    )


def run(recipe: str, *argv) -> subprocess.CompletedProcess:
    command = [sys.executable, REPO / recipe, *map(str, argv)]
    return run_program(command, timeout=300)


def collectives_of(step: dict) -> dict:
    """{(axis, collective, ...): (number, bytes)} of what a step of a dry run counts."""
    moved = {}
    for key, number in step.items():
        if key[0] == "moved":
            moved[key[1:]] = number
    return dryrun.totals(moved)


def report_of(recipe="train_llama3", **flags):
    return dryrun.make_report(importlib.import_module(recipe).main, config(recipe, flags))


@contextmanager
def world(recipe="train_llama3", **flags):
    """The layout of a recipe in a world of fake processes, with its meshes."""
    flags = dict(local_batch_size=2, dp_shard=1) | flags
    main = importlib.import_module(recipe).main
    with dryrun.dry_world(main, config(recipe, flags), 0) as (_, _, layout):
        yield layout
