"""Flags that cannot work are refused here, before memory is taken. Each function yields rows
(broken, text): a condition, and one line with the values, the mistake, and the flags to type
instead. A new rule is a new row."""

import math
import os
import shlex
import sys
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

from distributed.agree import divisors
from distributed.float8 import Float8Config
from distributed.layout import (
    AXES,
    ExpertConfig,
    Layout,
    ParallelConfig,
    dtype_of_compute,
    mtp_depth_of,
    n_experts_of,
)
from flags.config import no_effect, own_rank

# Flags of any recipe; None means another default. The recipe's own --local_batch_size and --seq_len
# follow the same rule.
AT_LEAST_1 = (
    "init_timeout_s",
    "train_timeout_s",
    "ac_every",
    "pp_microbatch_size",
    "pp_layers_per_stage",
)


def refuse(rows: Iterable[tuple[Any, str]]) -> None:
    """Raise one ValueError with the texts of all broken rows."""
    texts = dict.fromkeys(text for broken, text in rows if broken)
    if texts:
        raise ValueError("; ".join(texts))


def check_layout(
    cfg: ParallelConfig,
    model_config: Any,
    *,
    seq_len: int,
    local_batch_size: int,
    global_batch_size: int,
    device="auto",
    world_size: int | None = None,
    on_cuda: bool | None = None,
) -> Layout:
    """Make the Layout of the flags. Raises ValueError with every violation: the values, and the
    flags to type instead.

    on_cuda: True in a dry run, without counting GPUs; None = as --device says, and GPUs are
    counted.
    """
    here = on_cuda is None
    if here:
        on_cuda = runs_on_cuda(device)
    degrees = check_degrees(cfg, world_size or int(os.environ.get("WORLD_SIZE", 1)))
    sizes = {name: getattr(cfg, name) for name in AT_LEAST_1 if hasattr(cfg, name)}
    sizes |= {"local_batch_size": local_batch_size, "seq_len": seq_len}
    # other rules divide
    refuse(
        (n is not None and n < 1, f"--{name} {n} must be at least 1") for name, n in sizes.items()
    )
    if global_batch_size == -1:
        global_batch_size = local_batch_size * degrees["dp_replicate"] * degrees["dp_shard"]
    expert_degrees = {}
    if isinstance(cfg, ExpertConfig):
        expert_degrees = {"ep": cfg.ep, "etp": cfg.etp}
    pipeline = {}
    if cfg.pp > 1:
        pipeline["microbatch_size"] = cfg.pp_microbatch_size
        pipeline["schedule"] = cfg.pp_schedule_csv or cfg.pp_schedule
    # not under a pipeline: every micro-batch would gather the weights again, and zero-bubble
    # gradients would be wrong
    reshards = {"always": True, "never": False, "default": degrees["pp"] == 1}
    layout = Layout(
        **degrees,
        **expert_degrees,
        local_batch_size=local_batch_size,
        global_batch_size=global_batch_size,
        **pipeline,
        offload=cfg.cpu_offload,
        loss_parallel=cfg.loss_parallel,
        rank=own_rank(),
        reshards=reshards[cfg.reshard_after_forward],
        mtp=mtp_depth_of(model_config) > 0,
        has_experts=n_experts_of(model_config) > 0,
    )
    # flags without effect first: such a flag from --config returns to its default, and the other
    # rules see the default
    facts = collect_facts(cfg, model_config, degrees, on_cuda)
    rows = [(True, text) for text in no_effect(cfg, facts)]
    rows += [
        *batch_rows(layout),
        *model_rows(layout, cfg, model_config, seq_len),
        *option_rows(cfg, on_cuda and here),
    ]
    if isinstance(cfg, Float8Config) and cfg.float8 != "off":  # grpo.py has no float8
        from distributed.float8_rules import float8_rows

        rows += float8_rows(cfg, on_cuda)
    if layout.has_experts:
        from distributed.expert_rules import expert_rows

        rows += expert_rows(layout, optimizer_of(cfg), model_config)
    if layout.pp > 1 and layout.accumulation:
        from distributed.pipeline_rules import pipeline_rows

        rows += pipeline_rows(layout, cfg, model_config)
    refuse(rows)
    return layout


def runs_on_cuda(device: str) -> bool:
    """Whether a run with --device `device` computes on GPUs."""
    return device == "cuda" or device == "auto" and torch.cuda.is_available()


def collect_facts(
    cfg: ParallelConfig, model_config: Any, degrees: dict[str, int], on_cuda: bool
) -> SimpleNamespace:
    """Values for Need in flags/config.py, to decide whether a flag has an effect: every flag and
    every field of the model by name; the resolved degrees, dp_shard too; world_size, on_cuda, and
    the dtype of the computation."""
    more = dict(
        # of a model without, they are no fields
        n_experts=n_experts_of(model_config),
        mtp_depth=mtp_depth_of(model_config),
        world_size=math.prod(degrees.values()),
        on_cuda=on_cuda,
        dtype=dtype_of_compute(cfg, on_cuda),
    )
    return SimpleNamespace(**vars(model_config) | vars(cfg) | degrees | more)


def check_degrees(cfg: ParallelConfig, world_size: int) -> dict[str, int]:
    """{axis: degree} with --dp_shard -1 filled in. Raises ValueError unless their product is the
    number of processes."""
    degrees = {axis: getattr(cfg, axis) for axis in AXES}
    refuse(
        (n < 1 and (a, n) != ("dp_shard", -1), f"--{a} {n} must be at least 1")
        for a, n in degrees.items()
    )
    left, rest = divmod(world_size, math.prod(n for a, n in degrees.items() if a != "dp_shard"))
    if degrees["dp_shard"] == -1 and not rest:
        degrees["dp_shard"] = left
    given = {a: n for a, n in degrees.items() if n != -1}
    product = math.prod(given.values())
    if rest:
        fix = "change a degree"
    else:
        fix = f"leave out --dp_shard (it becomes {left})"
    start = f"start {product} processes"
    # plain python; more than a node needs docs/cluster.md
    if "RANK" not in os.environ and product <= 16:
        start += f": torchrun --nproc_per_node {product} {shlex.join(sys.argv)}"
    numbers = f"{'*'.join(given)} = {'*'.join(map(str, given.values()))} = {product}"
    refuse(
        [
            (
                product != world_size,
                f"{plural(world_size, 'process')} but {numbers}; {fix} or {start}",
            )
        ]
    )
    return degrees


def plural(n: int, noun: str) -> str:
    if n == 1:
        return f"1 {noun}"
    if noun[-1] == "s":
        return f"{n} {noun}es"
    return f"{n} {noun}s"


def batch_rows(layout: Layout) -> Iterator[tuple[Any, str]]:
    n = layout.global_batch_size
    local = layout.local_batch_size
    ranks = layout.data_ranks
    forward = local * ranks  # sequences of one forward on all data ranks
    near = max(1, round(n / forward)) * forward
    yield (
        n < 1 or n % forward,
        (
            f"--global_batch_size {n} is not a multiple of --local_batch_size {local} x "
            f"{plural(ranks, 'data rank')} = {forward}; use --global_batch_size {near}"
        ),
    )


def model_rows(layout: Layout, cfg: Any, c: Any, seq_len: int) -> Iterator[tuple[Any, str]]:
    """What the model c and the sequence must be divisible by."""
    tp = layout.tp
    cp = layout.cp
    sizes = {}
    for name in ("n_heads", "n_kv_heads", "ffn_dim"):
        size = getattr(c, name, None)
        if size:
            sizes[name] = size
    if hasattr(c, "n_shared_experts") and c.n_shared_experts:
        sizes["n_shared_experts x moe_ffn_dim"] = c.n_shared_experts * c.moe_ffn_dim
    odd = [f"{name} {size}" for name, size in sizes.items() if size % tp]
    # cp cuts a sequence into 2*cp chunks, tp each rank's part into tp
    divisor = tp
    if cp > 1:
        divisor *= 2 * cp
    rule = " x ".join(["2", "cp"] * (cp > 1) + ["tp"] * (tp > 1)) + " = "
    near = max(1, min(round(seq_len / divisor), c.max_seq_len // divisor)) * divisor
    heads = c.n_heads // tp
    kv_heads = c.n_kv_heads // tp
    alltoall = cp > 1 and cfg.cp_method == "alltoall" and kv_heads > 0
    yield odd, f"--tp {tp} does not divide {', '.join(odd)}; use {divisors(*sizes.values())}"
    yield (
        seq_len > c.max_seq_len,
        (
            f"--seq_len {seq_len} is longer than the model's max_seq_len {c.max_seq_len}; use "
            f"--model_args max_seq_len={seq_len}"
        ),
    )
    yield (
        seq_len % divisor,
        f"--seq_len {seq_len} is not a multiple of {rule}{divisor}; use --seq_len {near}",
    )
    yield (
        alltoall and (heads % cp or kv_heads % cp and cp % kv_heads),
        (
            f"--cp_method alltoall needs cp {cp} to divide the {heads} heads of a tp rank, and to "
            "divide or be a multiple of its "
            f"{kv_heads} kv heads; use --cp_method allgather"
        ),
    )


def optimizer_of(cfg: Any) -> str:
    """--optimizer; adamw for a program that has no other."""
    if hasattr(cfg, "optimizer"):
        return cfg.optimizer
    return "adamw"


def option_rows(cfg: Any, count_gpus: bool) -> Iterator[tuple[Any, str]]:
    local_world = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    n_gpus = local_world
    if count_gpus:
        n_gpus = torch.cuda.device_count()
    # srun and others may show each process a GPU of its own; torchrun's processes see the same ones
    own = n_gpus == 1 and "TORCHELASTIC_RUN_ID" not in os.environ
    has_float8 = isinstance(cfg, Float8Config) and cfg.float8 != "off"
    uses_torchao = has_float8 or optimizer_of(cfg) == "adamw_sr"
    yield (
        local_world > n_gpus and not own,
        (
            f"{plural(local_world, 'process')} here, but torch finds {n_gpus} GPUs; use "
            "--device cpu or fewer processes"
        ),
    )
    yield (
        uses_torchao and find_spec("torchao") is None,
        ("--float8 and --optimizer adamw_sr need torchao: pip install torchao==0.18.0"),
    )
    yield (
        cfg.ac == "budget" and not cfg.compile,
        (
            "--ac budget needs --compile: the compiler chooses what to keep; add --compile or use "
            "--ac op"
        ),
    )
    yield not 0 <= cfg.ac_budget <= 1, f"--ac_budget {cfg.ac_budget} must be between 0 and 1"
