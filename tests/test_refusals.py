"""Wrong command lines, against distributed/refusals.py: each rule of check_layout with its line, and what a user sees.

A row of RULES: what is asked for, words that the one line must hold, and what to change so that it is accepted: the cure that
the line itself names. `test_recipes.py` runs the command lines that are right.
"""
import importlib
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from layouts import Flags, build, config
from pool import pool
from programs import run_program

import train_llama3
from data import DataConfig, open_data
from distributed.checks import check_replicas
from distributed.layout import local_tensor
from distributed.pipeline import n_microbatches
from distributed.refusals import check_layout
from models.llama3 import Llama3Config
from support.config import parse_config

REPO = Path(__file__).parent.parent
MODEL = Llama3Config(n_layers=6, n_heads=8, n_kv_heads=4, head_dim=64, ffn_dim=512, max_seq_len=8192)
RECIPE = dict(seq_len=64, local_batch_size=4, global_batch_size=-1, device="cpu", world_size=1)
FIELDS = asdict(MODEL)


def check(**given):
    """check_layout with these flags, recipe values and fields of the model, on top of one process and MODEL."""
    recipe = RECIPE | {k: given.pop(k) for k in RECIPE if k in given}
    model = replace(MODEL, **{k: given.pop(k) for k in list(given) if k in FIELDS})
    on_cuda = given.pop("dry_run", None)  # a dry run takes GPUs for granted
    return check_layout(Flags(**given), model, **recipe, on_cuda=on_cuda)


def refusal(**given) -> str:
    with pytest.raises(ValueError) as error:
        check(**given)
    message = str(error.value)
    assert message and "\n" not in message
    return message


PP = dict(world_size=2, pp=2)
STAGES = "tok_embeddings,blocks.0,blocks.1,blocks.2;blocks.3,blocks.4,blocks.5,norm,head"
FOUR_STAGES = "tok_embeddings,blocks.0;blocks.1,blocks.2;blocks.3,blocks.4;blocks.5,norm,head"

RULES = [
    # the processes and the degrees
    (dict(world_size=4, dp_replicate=2, dp_shard=3), ["4 processes but pp*dp_replicate*dp_shard*cp*tp = 1*2*3*1*1 = 6",
     "leave out --dp_shard (it becomes 2)", "or start 6 processes"], dict(dp_shard=-1)),
    (dict(world_size=4, dp_replicate=2, dp_shard=3), ["start 6 processes"], dict(world_size=6)),
    (dict(world_size=6, tp=4), ["6 processes but", "= 1*1*1*4 = 4", "change a degree or start 4"], dict(world_size=4)),
    (dict(world_size=2, pp=2, cp=2), ["2 processes but", "= 2*1*2*1 = 4", "start 4 processes"], dict(world_size=4)),
    (dict(world_size=1, dp_shard=2), ["1 process but", "leave out --dp_shard (it becomes 1)"], dict(dp_shard=-1)),
    (dict(device="cuda"), ["torch finds 0 GPUs", "use --device cpu"], dict(device="cpu")),
    # kernels
    (dict(attention="cudnn"), ["--attention cudnn has no effect without a GPU", "leave it out"], dict(attention="auto")),
    (dict(float8="nvfp4"), ["--float8 nvfp4 needs a GPU", "on a CPU use --float8 mxfp8"], dict(float8="mxfp8")),
    (dict(float8="rowwise", compile=True), ["--float8 rowwise is emulated on CPU", "leave out --compile"], dict(compile=False)),
    (dict(float8="nvfp4", compile=True), ["--float8 nvfp4 cannot be compiled", "leave out --compile"],
     dict(float8="mxfp8", compile=False)),
    (dict(float8="nvfp4", world_size=2, tp=2), ["--float8 nvfp4 does not split matrices over --tp 2", "use mxfp8"],
     dict(float8="mxfp8")),
    (dict(float8="mxfp8", seq_len=63), ["--float8 mxfp8 needs a multiple of 32 tokens in a forward, not 4 x 63 / 1 = 252"],
     dict(seq_len=64)),
    (dict(float8="tensorwise", float8_experts=True), ["--float8_experts has no effect without --float8 rowwise or mxfp8"],
     dict(float8_experts=False)),
    (dict(float8_experts=True), ["--float8_experts has no effect without --float8 rowwise or mxfp8"],
     dict(float8_experts=False)),
    (dict(float8="mxfp8", float8_experts=True), ["this flavor has none; leave it out"], dict(float8_experts=False)),
    (dict(float8="rowwise", float8_all_gather=True), ["--float8_all_gather has no effect without --float8 tensorwise"],
     dict(float8_all_gather=False)),
    (dict(float8="tensorwise", float8_all_gather=True), ["--float8_all_gather has no effect without a GPU"],
     dict(float8_all_gather=False)),
    # batch
    (dict(local_batch_size=0), ["--local_batch_size 0 must be at least 1"], dict(local_batch_size=1)),
    (dict(global_batch_size=10), ["--global_batch_size 10 is not a multiple of --local_batch_size 4 x 1 data rank = 4",
     "use --global_batch_size 8"], dict(global_batch_size=8)),
    (dict(world_size=4, dp_replicate=2, global_batch_size=20), ["--local_batch_size 4 x 4 data ranks = 16",
     "use --global_batch_size 16"], dict(global_batch_size=16)),
    (dict(global_batch_size=3), ["use --global_batch_size 4"], dict(global_batch_size=4)),
    (dict(global_batch_size=0), ["--global_batch_size 0", "use --global_batch_size 4"], dict(global_batch_size=4)),
    # sequence
    (dict(seq_len=8193), ["--seq_len 8193 is longer than the model's max_seq_len 8192", "--model_args max_seq_len=8193"],
     dict(max_seq_len=8193)),
    (dict(seq_len=0), ["--seq_len 0", "at least 1"], dict(seq_len=1)),
    (dict(world_size=2, tp=2, seq_len=33), ["--seq_len 33 is not a multiple of tp = 2", "use --seq_len 32"], dict(seq_len=32)),
    (dict(world_size=2, cp=2, seq_len=30), ["--seq_len 30 is not a multiple of 2 x cp = 4", "use --seq_len 32"],
     dict(seq_len=32)),
    (dict(world_size=4, cp=2, tp=2, seq_len=30), ["--seq_len 30 is not a multiple of 2 x cp x tp = 8", "use --seq_len 32"],
     dict(seq_len=32)),
    (dict(world_size=4, cp=2, tp=2, seq_len=3), ["use --seq_len 8"], dict(seq_len=8)),
    (dict(world_size=4, tp=4, seq_len=255, max_seq_len=255), ["use --seq_len 252"], dict(seq_len=252)),  # 256 is nearer
    # tensor parallelism
    (dict(world_size=8, tp=8), ["--tp 8 does not divide n_kv_heads 4", "use 1, 2 or 4"], dict(world_size=4, tp=4)),
    (dict(world_size=3, tp=3, seq_len=66), ["--tp 3 does not divide n_heads 8, n_kv_heads 4, ffn_dim 512", "use 1, 2 or 4"],
     dict(world_size=2, tp=2)),
    (dict(world_size=4, tp=4, ffn_dim=514), ["--tp 4 does not divide ffn_dim 514", "use 1 or 2"], dict(world_size=2, tp=2)),
    (dict(world_size=4, tp=4, n_heads=6, n_kv_heads=2), ["n_heads 6, n_kv_heads 2", "use 1 or 2"], dict(world_size=2, tp=2)),
    (dict(world_size=2, tp=2, async_tp=True), ["--async_tp", "CUDA", "--compile", "leave it out"], dict(async_tp=False)),
    # context parallelism
    (dict(world_size=3, cp=3, cp_method="alltoall", seq_len=66), ["--cp_method alltoall", "cp 3", "8 heads",
     "use --cp_method allgather"], dict(cp_method="allgather")),
    (dict(world_size=6, cp=6, cp_method="alltoall", seq_len=60, n_heads=12), ["4 kv heads", "use --cp_method allgather"],
     dict(cp_method="allgather")),
    (dict(world_size=16, cp=4, tp=4, cp_method="alltoall"), ["the 2 heads of a tp rank", "use --cp_method allgather"],
     dict(cp_method="allgather")),
    # activation checkpointing, debugging
    (dict(ac="budget"), ["--ac budget needs --compile", "use --ac op"], dict(compile=True)),
    (dict(ac="budget"), ["add --compile or use --ac op"], dict(ac="op")),
    (dict(ac="selective", ac_every=0), ["--ac_every 0", "at least 1"], dict(ac_every=1)),
    (dict(ac="budget", compile=True, ac_budget=1.5), ["--ac_budget 1.5", "between 0 and 1"], dict(ac_budget=1.0)),
    (dict(flight_recorder=True), ["--flight_recorder", "NCCL", "leave it out"], dict(flight_recorder=False)),
    # pipeline: micro-batches
    (PP | dict(pp_microbatch_size=3), ["--pp_microbatch_size 3 does not divide --local_batch_size 4", "use 1, 2 or 4"],
     dict(pp_microbatch_size=2)),
    (PP | dict(pp_microbatch_size=3, local_batch_size=2**50), ["use 1, 2, 4", "2048 or 4096"], dict(pp_microbatch_size=2)),
    (PP | dict(pp_microbatch_size=0), ["--pp_microbatch_size 0"], dict(pp_microbatch_size=1)),
    (PP | dict(pp_microbatch_size=-1, pp_schedule="GPipe"), ["--pp_microbatch_size -1"], dict(pp_microbatch_size=1)),
    (PP | dict(local_batch_size=1, pp_schedule="ZBVZeroBubble"), ["--pp_schedule ZBVZeroBubble with --pp 2 needs at least 2"],
     dict(local_batch_size=2)),
    (PP | dict(local_batch_size=1), ["--pp_schedule 1F1B with --pp 2 needs at least 2 micro-batches, but there are 1",
     "use --local_batch_size 2"], dict(local_batch_size=2)),
    (PP | dict(pp_microbatch_size=4), ["use --local_batch_size 8 and --global_batch_size 8"], dict(local_batch_size=8)),
    (PP | dict(pp_schedule="DualPipeV", local_batch_size=3), ["--pp_schedule DualPipeV with --pp 2 needs at least 4",
     "use --local_batch_size 4"], dict(local_batch_size=4)),
    *[(PP | dict(pp_schedule=s, local_batch_size=5), [f"--pp_schedule {s}", "2 rounds of --pp 2 divide, not 5",
       "use --local_batch_size 4"], dict(local_batch_size=4)) for s in ("Interleaved1F1B", "InterleavedZeroBubble")],
    # pipeline: stages
    (dict(world_size=8, pp=8, local_batch_size=8), ["6 layers are too few for 8 pipeline stages", "or more layers"],
     dict(n_layers=8)),
    (dict(world_size=4, pp=4, pp_schedule="ZBVZeroBubble"), ["6 layers are too few for 8 pipeline stages", "smaller --pp"],
     dict(world_size=2, pp=2)),
    (PP | dict(n_layers=4, pp_first_stage_less_layers=9), ["4 layers are too few for 2 pipeline stages"],
     dict(pp_first_stage_less_layers=1)),
    (PP | dict(pp_layers_per_stage=3), ["--pp_layers_per_stage 3 makes 3 stages of 6 layers, no multiple of --pp 2"],
     dict(pp_layers_per_stage=4)),
    (PP | dict(pp_layers_per_stage=0), ["--pp_layers_per_stage 0"], dict(pp_layers_per_stage=4)),
    (PP | dict(pp_layers_per_stage=-1), ["--pp_layers_per_stage -1"], dict(pp_layers_per_stage=4)),
    (PP | dict(pp_layers_per_stage=2), ["4 stages over --pp 2 ranks", "--pp_schedule 1F1B needs exactly 1 per rank",
     "--pp_layers_per_stage"], dict(pp_layers_per_stage=4)),
    *[(PP | dict(pp_schedule=s, pp_stage_fqns=STAGES), ["2 stages over --pp 2 ranks", f"{s} needs exactly 2 per rank",
       "--pp_stage_fqns"], dict(pp_stage_fqns=FOUR_STAGES)) for s in ("ZBVZeroBubble", "DualPipeV")],
    (PP | dict(pp_schedule="ZBVZeroBubble", pp_layers_per_stage=2, n_layers=14), ["8 stages over --pp 2", "exactly 2"],
     dict(pp_layers_per_stage=4)),
    *[(PP | dict(pp_schedule=s, pp_stage_fqns=STAGES), ["2 stages over --pp 2 ranks", f"--pp_schedule {s} needs", "per rank"],
       dict(pp_stage_fqns=FOUR_STAGES)) for s in ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")],
    (PP | dict(pp_stage_fqns=STAGES.replace("blocks.3", "block.3")), ["--pp_stage_fqns: 'block.3' is no module",
     "use tok_embeddings, blocks.0 .. blocks.5, norm, head"], dict(pp_stage_fqns=STAGES)),
    (PP | dict(pp_stage_fqns=STAGES.replace("blocks.4,", "")), ["--pp_stage_fqns", "'blocks.4' is missing"],
     dict(pp_stage_fqns=STAGES)),
    (PP | dict(pp_stage_fqns=STAGES.replace(",head", "")), ["'head' is missing"], dict(pp_stage_fqns=STAGES)),
    (PP | dict(pp_stage_fqns=STAGES.replace("norm", "norm,norm")), ["'head' is missing"],
     dict(pp_stage_fqns=STAGES)),
    (PP | dict(pp_stage_fqns=STAGES + ",head"), ["'head' is missing"], dict(pp_stage_fqns=STAGES)),
    (PP | dict(pp_stage_fqns=STAGES.replace("blocks.0,blocks.1", "blocks.1,blocks.0")), ["in order", "'blocks.0'"],
     dict(pp_stage_fqns=STAGES)),
    (PP | dict(pp_schedule_csv="nowhere.csv"), ["--pp_schedule_csv nowhere.csv: No such file"], dict(pp_schedule_csv="")),
    # pipeline: what torch cannot do with it
    *[(PP | dict(pp_schedule=s, reshard_after_forward="always"), ["--reshard_after_forward always", f"--pp_schedule {s}",
       "use never"], dict(reshard_after_forward="never"))
      for s in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")],
    *[(PP | dict(pp_schedule=s, ac="full"), ["--ac full", f"--pp_schedule {s}", "use --ac none"], dict(ac="none"))
      for s in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")],
]


@pytest.mark.parametrize("given, words, cure", RULES, ids=lambda x: "-".join(f"{k}={v}" for k, v in x.items())[:70]
                         if isinstance(x, dict) else "")
def test_rule(given, words, cure, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    message = refusal(**given)
    for text in words:
        assert text in message
    check(**given | cure)


@pytest.mark.parametrize("given, words", [
    (dict(world_size=4, pp=4), ["is for 2 ranks", "not 4 and", "use --pp 2"]),
    (PP | dict(local_batch_size=3), ["2 micro-batches", "3"]),
    (PP | dict(local_batch_size=2, n_layers=1), ["1 layers are too few for 4 pipeline stages"]),
    (PP | dict(local_batch_size=2), []),
])
def test_csv_of_another_layout(given, words, tmp_path):
    """Two ranks, two stages each, two micro-batches."""
    rows = "0F0,0F1,2F0,2F1,2B0,2B1,0B0,0B1", "1F0,1F1,3F0,3F1,3B0,3B1,1B0,1B1"
    (tmp_path / "schedule.csv").write_text("\n".join(rows) + "\n")
    given = given | dict(pp_schedule_csv=str(tmp_path / "schedule.csv"))
    if words:
        message = refusal(**given)
        assert all(text in message for text in words)
    else:
        assert n_microbatches(check(**given)) == 2


@pytest.mark.parametrize("axis", ["pp", "dp_replicate", "dp_shard", "cp", "tp"])
@pytest.mark.parametrize("degree", [0, -1, -2])
def test_degrees_are_at_least_1(axis, degree):
    if (axis, degree) == ("dp_shard", -1):  # the one that may be: what is left
        assert check(dp_shard=-1, world_size=6, dp_replicate=2).dp_shard == 3
    else:
        assert f"--{axis} {degree} must be at least 1" in refusal(**{axis: degree})


@pytest.mark.parametrize("given, words", [
    (dict(tp=0, pp=-3, dp_shard=-2), ["--tp 0", "--pp -3", "--dp_shard -2"]),
    (dict(world_size=3, tp=3, global_batch_size=10, seq_len=8200, ac="budget", flight_recorder=True),
     ["--tp 3", "--global_batch_size 10", "max_seq_len 8192", "multiple of tp = 3", "--ac budget", "--flight_recorder"]),
    (PP | dict(pp_schedule="DualPipeV", local_batch_size=2, ac="op", reshard_after_forward="always", pp_stage_fqns=STAGES),
     ["at least 4 micro-batches", "--reshard_after_forward always", "--ac op", "exactly 2 per rank"]),
])
def test_violations_are_listed_together(given, words):
    message = refusal(**given)
    assert all(text in message for text in words) and message.count(";") >= len(words) - 1


@pytest.mark.parametrize("fields, words", [
    (dict(n_kv_heads=3), ["n_heads 8", "n_kv_heads 3"]),
    (dict(n_kv_heads=0), ["n_kv_heads 0"]),
    (dict(head_dim=7), ["head_dim 7"]),  # RoPE turns pairs
    (dict(n_layers=0), ["n_layers 0"]),
    (dict(dim=0), ["dim 0"]),
    (dict(ffn_dim=-4), ["ffn_dim -4"]),
])
def test_model_fields_that_make_no_model(fields, words):
    """--model_args may set any field. The config refuses them itself, so those of a Hugging Face folder are refused as well."""
    message = refusal(**fields)
    assert all(text in message for text in words)


@pytest.mark.parametrize("given, expected", [
    (dict(), dict(data_ranks=1, accumulation=1, global_batch_size=4, dp_shard=1)),
    (dict(world_size=8, dp_replicate=2, tp=2), dict(data_ranks=4, dp_shard=2, accumulation=1, global_batch_size=16)),
    (dict(world_size=8, cp=2, tp=2, global_batch_size=24), dict(data_ranks=2, dp_shard=2, accumulation=3)),
    (PP | dict(global_batch_size=12, pp_microbatch_size=2), dict(data_ranks=1, accumulation=3, n_microbatches=6)),
    (dict(world_size=4, cp=4, cp_method="alltoall", n_kv_heads=2), dict(cp=4)),  # fewer kv heads than ranks
    (dict(world_size=4, cp=4, cp_method="alltoall", n_kv_heads=1, n_heads=4), dict(cp=4)),
])
def test_layouts_that_are_fine(given, expected):
    layout = check(**given)
    found = {name: n_microbatches(layout) if name == "n_microbatches" else getattr(layout, name) for name in expected}
    assert found == expected


# ---------------------------------------------------------------- flags that would do nothing

# flags, words of the line, what gives them an effect; where that needs a GPU or another flavor: None
WITHOUT_EFFECT = [
    (dict(pp_schedule="ZBVZeroBubble"), ["--pp_schedule ZBVZeroBubble has no effect without --pp 2 or more; leave it out"], PP),
    (dict(pp_microbatch_size=7), ["--pp_microbatch_size 7 has no effect without --pp"], PP | dict(local_batch_size=14)),
    (dict(pp_stage_fqns="garbage"), ["--pp_stage_fqns garbage has no effect without --pp"], None),
    (dict(pp_schedule_csv="/nonexistent.csv"), ["--pp_schedule_csv /nonexistent.csv has no effect without --pp"], None),
    (dict(pp_layers_per_stage=3), ["--pp_layers_per_stage 3 has no effect without --pp"], PP | dict(n_layers=4)),
    (dict(pp_first_stage_less_layers=0, pp_last_stage_less_layers=0),
     ["--pp_first_stage_less_layers 0, --pp_last_stage_less_layers 0 have no effect", "leave them out"], PP),
    (PP | dict(pp_stage_fqns=STAGES, pp_layers_per_stage=3), ["--pp_layers_per_stage 3 has no effect with --pp_stage_fqns"],
     dict(pp_layers_per_stage=None)),
    (dict(cp_method="alltoall"), ["--cp_method alltoall has no effect without --cp 2 or more"], dict(cp=2, world_size=2)),
    (dict(loss_parallel=False), ["--no-loss_parallel has no effect without --tp 2 or more"], dict(tp=2, world_size=2)),
    (dict(float8_filter=["wq", "wk"]), ["--float8_filter wq,wk has no effect without --float8"], dict(float8="mxfp8")),
    (dict(float8_all_gather=True), ["--float8_all_gather has no effect without --float8 tensorwise"], None),
    (dict(machine="B200", nvlink_gb_s=3), ["--machine B200, --nvlink_gb_s 3 have no effect without --plan"], dict(plan=True)),
    (dict(network_gb_s=3, devices_per_node=4), ["--network_gb_s 3, --devices_per_node 4 have no effect"], dict(plan=True)),
    (dict(ac_every=3), ["--ac_every 3 has no effect without --ac selective"], dict(ac="selective")),
    (dict(ac_every=3, ac="full"), ["--ac_every 3 has no effect without --ac selective"], dict(ac="selective")),
    (dict(ac_budget=0.1), ["--ac_budget 0.1 has no effect without --ac budget"], dict(ac="budget", compile=True)),
    (dict(ep=2, etp=2), ["--ep 2, --etp 2 have no effect without experts, and this flavor has none"], None),
    (dict(async_tp=True), ["--async_tp has no effect without CUDA, --compile and --tp 2 or more"], None),
    (dict(attention="flash"), ["--attention flash has no effect without a GPU"], None),
    (dict(attention="flash", dry_run=True, compute_dtype="float32"), ["--attention flash has no effect in float32"],
     dict(compute_dtype="auto")),
    (dict(flight_recorder=True), ["--flight_recorder has no effect without NCCL"], dict(dry_run=True)),
    (dict(reduce_grads="always"), ["--reduce_grads always has no effect without --dp_shard or --cp 2 or more"],
     dict(dp_shard=2, world_size=2)),
    (PP | dict(dp_shard=2, world_size=4, reduce_grads="last"), ["--reduce_grads last has no effect with --pp"],
     dict(pp=1, dp_shard=4)),
    (dict(reshard_after_forward="never", compute_dtype="float32"), ["--reshard_after_forward never has no effect in one"],
     dict(compute_dtype="bfloat16")),
]


@pytest.mark.parametrize("given, words, cure", WITHOUT_EFFECT, ids=lambda x: "-".join(f"{k}={v}" for k, v in x.items())[:70]
                         if isinstance(x, dict) else "")
def test_flags_that_would_do_nothing(given, words, cure, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("RANK", raising=False)
    message = refusal(**given)
    for text in words:
        assert text in message
    if cure is not None:
        check(**given | cure)


@pytest.mark.parametrize("flags, words", [
    ("train_llama3 --pp_schedule ZBVZeroBubble --cp_method alltoall --machine B200 --ac_every 3 --export_dtype float16",
     ["--pp_schedule ZBVZeroBubble", "--cp_method alltoall", "--machine B200", "--ac_every 3", "--export_dtype float16"]),
    ("train_llama3 --reduce_grads always", ["--reduce_grads always has no effect without --dp_shard or --cp"]),
    ("train_llama3 --no-init_model_only", ["--no-init_model_only has no effect without --init_from"]),
    ("train_llama3 --exclude_from_loading head", ["--exclude_from_loading head has no effect without --init_from or a ch"]),
    ("train_llama3 --last_save_model_only --export_dtype bfloat16", ["--export_dtype bfloat16 has no effect without --exp"]),
    ("train_llama3 --load_only --keep_latest_k 2 --checkpoint_async thread",
     ["--checkpoint_async thread, --keep_latest_k 2 have no effect with --load_only"]),
    ("train_llama3 --stochastic_rounding", ["--stochastic_rounding", "--param_dtype bfloat16 and --optimizer adamw"]),
    ("train_llama3 --memory_snapshot --device cpu", ["--memory_snapshot has no effect without a GPU"]),
    ("train_llama3 --data SHARDS --cache_dir x", ["--cache_dir x has no effect with --data of token shards"]),
    ("train_llama3 --text_column x", ["--text_column x has no effect without --data of .jsonl or .parquet files"]),
    ("train_llama3 --data a=SHARDS:1,b=SHARDS:2,c=book.txt:1 --text_column x", ["--text_column x has no effect without"]),
    ("train_qwen3 --moe_balance aux --moe_aux_coef 1 --moe_bias_rate 1 --moe_force_balance --moe_load_per_layer",
     ["--moe_balance aux, --moe_bias_rate 1.0, --moe_aux_coef 1.0, --moe_force_balance, --moe_load_per_layer have no effect"]),
    ("train_qwen3 --flavor debug_moe --moe_aux_coef 1", ["--moe_aux_coef 1.0 has no effect without --moe_balance aux"]),
    ("train_qwen3 --flavor debug_moe --moe_balance aux --moe_bias_rate 1", ["--moe_bias_rate 1.0", "--moe_balance bias"]),
    ("train_deepseek --moe_balance none --moe_aux_coef 1", ["--moe_aux_coef 1.0 has no effect with --moe_balance none"]),
    ("train_deepseek --mtp_weight 1", ["--mtp_weight 1.0 has no effect without mtp_depth 1"]),
    ("train_llama3 --beta2 1", ["--beta1 0.9 and --beta2 1.0 must be below 1"]),
    ("grpo --beta1 1", ["--beta1 1.0 and --beta2 0.95 must be below 1"]),
    ("grpo --no-loss_parallel", ["--no-loss_parallel", "leave it out"]),
    ("grpo --pack_tokens 64 --local_batch_size 8", ["--local_batch_size 8 has no effect with --pack_tokens"]),
    ("grpo --flavor debug_moe --batch_invariant", ["--batch_invariant has no effect with experts"]),
    ("grpo --routing_replay", ["--routing_replay has no effect without experts, and this flavor has none"]),
    ("grpo --pp_schedule GPipe", ["unknown flag --pp_schedule"]),
    ("grpo --env_data tests/test_flags.py", [
        "--env_data tests/test_flags.py has no effect without --env dataset or --env gsm8k"]),
])
def test_recipes_refuse_flags_that_would_do_nothing(flags, words, tmp_path, capsys):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "index.json").touch()
    name, *argv = flags.replace("SHARDS", str(tmp_path / "shards")).split()
    line = refused_by(importlib.import_module(name), capsys, *argv, "--out", tmp_path / "run")
    assert all(text in line for text in words), line
    assert not (tmp_path / "run").exists()


def refused_by(recipe, capsys, *argv) -> str:
    """The line that refuses a command line, in this process: nothing is connected yet, so launch.run ends with status 2."""
    with pytest.raises((ValueError, SystemExit)) as error:
        cfg = parse_config(recipe.Config, [*map(str, argv)])
        recipe.main(cfg)
    assert not dist.is_initialized()
    if error.type is SystemExit:  # of the parser, which prints the line itself
        assert error.value.code == 2
    return capsys.readouterr().err if error.type is SystemExit else str(error.value)


@pytest.fixture
def refused(tmp_path, capsys):
    """refused(flag, value, ...): the line of a tiny run of train_llama3.py that ends before it trains anything."""

    def refused(*argv) -> str:
        tiny = ["--model_args", "n_layers=1,dim=8,ffn_dim=8", "--steps", 2, "--device", "cpu"]
        line = refused_by(train_llama3, capsys, *tiny, *argv, "--out", tmp_path / "run")
        assert not (tmp_path / "run" / "metrics.jsonl").exists()
        return line

    return refused


def test_global_batch_size(tmp_path, refused):
    assert "use --global_batch_size 8" in refused("--global_batch_size", 10, "--local_batch_size", 4)
    assert not (tmp_path / "run").exists()


def test_device_cuda_without_a_gpu(refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "use --device cpu" in refused("--device", "cuda")


@pytest.fixture(scope="module")
def shards(tmp_path_factory) -> Path:
    """A folder of token shards with a tokenizer of its own, made the way that --data FILE.txt makes it."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "text.txt").write_text("".join(f"line {i} of {i * i}\n" for i in range(3000)))
    return open_data(DataConfig(data=str(folder / "text.txt"), cache_dir=str(folder / "cache")), 32).folder


def test_truncated_shard(tmp_path, shards, refused):
    shutil.copytree(shards, tmp_path / "shards")
    shard = tmp_path / "shards" / "train-00000.npy"
    os.truncate(shard, shard.stat().st_size - 1)
    line = refused("--data", tmp_path / "shards")
    assert f"{shard} is truncated" in line and "make the shards again" in line


def test_empty_text(tmp_path, refused):
    (tmp_path / "empty.txt").touch()
    line = refused("--data", tmp_path / "empty.txt", "--cache_dir", tmp_path / "cache")
    assert "empty.txt is empty; give a file with text in it" in line


def test_folder_without_index(tmp_path, refused):
    (tmp_path / "folder").mkdir()
    line = refused("--data", tmp_path / "folder")
    assert "no index.json" in line and "python data.py prepare" in line


def test_tokenizer_with_more_ids_than_the_vocabulary(shards, refused):
    line = refused("--data", shards, "--model_args", "vocab_size=100")
    ids = line.split("has ")[1].split(" ids")[0]
    assert int(ids) > 100 and f"use --model_args vocab_size={ids}" in line


def test_nothing_to_validate_on_is_found_before_training(tmp_path, refused):
    """One JSON object is one document, and it is for training."""
    (tmp_path / "one.jsonl").write_text('{"text": "%s"}\n' % ("word " * 3000))
    line = refused("--data", tmp_path / "one.jsonl", "--cache_dir", tmp_path / "cache")
    assert "one.jsonl has no validation text; use --val_every 0" in line


@pytest.mark.parametrize("flag, value", [("steps", -3), ("val_batches", 0)])
def test_numbers_that_mean_nothing(flag, value, refused):
    assert f"--{flag} {value}" in refused(f"--{flag}", value)


# ---------------------------------------------------------------- as a process


def run(*argv, launch=(), timeout=120) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")} | {"CUDA_VISIBLE_DEVICES": ""}
    return run_program([sys.executable, *launch, "train_llama3.py", *argv], env=env, timeout=timeout, real=bool(launch))


def refused_as_a_process(tmp_path, *argv) -> str:
    """The same, as a user sees it: one line, and status 2."""
    done = run("--model_args", "n_layers=1,dim=8,ffn_dim=8", "--steps", 2, *argv, "--out", tmp_path / "run")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert "loss" not in done.stdout and not (tmp_path / "run" / "metrics.jsonl").exists()
    return done.stderr


def test_unknown_flag(tmp_path):
    assert "did you mean --steps?" in refused_as_a_process(tmp_path, "--stpes", 5)


def test_plain_python_is_told_the_torchrun_command(tmp_path):
    line = refused_as_a_process(tmp_path, "--tp", 2, "--model_args", "dim=8")
    assert "or start 2 processes: torchrun --nproc_per_node 2 train_llama3.py --model_args " in line
    assert line.rstrip().endswith(f"--model_args dim=8 --out {tmp_path / 'run'}")


@pytest.mark.slow
def test_one_line_from_all_ranks(tmp_path):
    """Under torchrun, which adds a page of its own: one rank speaks."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = run("--tp", 3, "--out", tmp_path / "run", launch=launch)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert done.returncode == 1 and len(lines) == 1, done.stderr
    assert "2 processes but pp*dp_replicate*cp*tp = 1*1*1*3 = 3" in lines[0]
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- copies that differ


def replicas_after(flags, change_rank):
    """The message of check_replicas when one rank's norm is a little off."""
    stages, layout = build(config(), flags, 4, 1)
    if layout.rank == change_rank:
        with torch.no_grad():
            local_tensor(stages[0].norm.weight)[0] += 1e-3
    try:
        check_replicas(stages, layout, seed=3)
    except RuntimeError as e:
        return str(e)


def test_a_rank_with_other_weights_is_named():
    assert pool(4).run(replicas_after, dict(dp_replicate=4), None) == [None] * 4
    for message in pool(4).run(replicas_after, dict(dp_replicate=4), 2):
        assert "norm.weight differs between ranks 0 and 2" in message
    assert "differs between ranks 2 and 3" in pool(4).run(replicas_after, dict(tp=2, dp_replicate=1), 3)[0]


@pytest.mark.parametrize("argv, words", [
    ("train_llama3.py --out s3://bucket/run", "--out s3://bucket/run: only folders are written"),
    ("train_llama3.py --export_hf gs://bucket/model", "to export to gs://bucket/model: only folders are written"),
    ("grpo.py --out s3:/bucket/run", "--out s3:/bucket/run: only folders are written"),
    ("data.py prepare --input book.txt --tokenizer t.json --out s3://bucket/tokens", "--out s3:/bucket/tokens: only folders"),
    ("data.py tokenizer --input book.txt --out gs://bucket/t.json", "--out gs:/bucket/t.json: only folders"),
    ("checkpoint.py to_hf run s3://bucket/model", "to export to s3://bucket/model: only folders are written"),
    ("checkpoint.py from_hf run s3://bucket/run", "to export to s3://bucket/run: only folders are written"),
    ("checkpoint.py source run s3://bucket/code", "to write to s3://bucket/code: only folders are written"),
    ("ablate.py REPO/train_llama3.py --vary lr=1e-3,3e-3 --out s3://bucket/study", "--out s3://bucket/study: only folders"),
    ("train_llama3.py --after_save rsync", "--after_save 'rsync' must have {} where the checkpoint's folder goes"),
    ("train_llama3.py --data table.csv", "make a .jsonl of it, python -c 'import csv, json, sys; "),
    ("train_llama3.py --data list.json", "make a .jsonl of it, python -c 'import json, sys; "),
    ("train_llama3.py --data org/corpus", "hf download org/corpus --repo-type dataset --local-dir corpus"),
])
def test_what_is_written_and_read_is_on_this_machine(tmp_path, argv, words):
    """A folder s3: would be made in place of the bucket, and gone with the machine."""
    for name in ("book.txt", "table.csv", "list.json"):
        (tmp_path / name).write_text('{"text": "x"}')
    file, *words_of = argv.replace("REPO", str(REPO)).split()
    done = run_program([sys.executable, REPO / file, *words_of], cwd=tmp_path)
    assert words in done.stderr and done.stderr.count("\n") == 1 and done.returncode == 2, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["book.txt", "list.json", "table.csv"]
