"""--explain: parameters and collectives of a layer in a layout too large for a laptop, against tools/explain.py."""
import importlib

import pytest
from dry import MOE, config, run

from tools.explain import count_block, explain, list_collectives


@pytest.mark.slow
def test_the_report_of_a_layout_no_laptop_has(tmp_path):
    """No data is read, no folder made; expected numbers were computed by hand: 8B, 8 x 128 devices."""
    out = tmp_path / "run"
    done = run("train_llama3.py", "--flavor", "8B", "--seq_len", 8192, "--local_batch_size", 1, "--dp_shard", 128, "--tp", 8,
               "--dry_run", "--explain", "--data", "/nowhere", "--out", out)
    assert done.returncode == 0, done.stderr
    assert not out.exists()
    assert "8,030,261,248 parameters | dp_shard 128 x tp 8 = 1,024 devices" in done.stdout
    assert "80 GB: fits, 141 GB: fits, 192 GB: fits" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    wo = next(line for line in lines if line[:1] == ["attn.wo.weight"])
    assert wo[1:4] == ["4096", "x", "4096"] and " ".join(wo[4:11]) == "tp: columns, fsdp: rows 32 x 512"
    # two per block and direction, each of 8192 x 4096 bf16
    assert ["forward", "tp", "all_gather", "2", "128", "MiB"] in [line[:6] for line in lines]
    assert ["backward", "tp", "reduce_scatter", "2", "128", "MiB"] in [line[:6] for line in lines]


def test_one_block_of_split_experts():
    """With --ep a block names neighbours for FSDP to gather early, among them blocks that --explain leaves out."""
    flags = dict(dp_shard=2, ep=2, model_args=MOE)
    _, name, parameters, step = count_block(importlib.import_module("train_qwen3").main, config("train_qwen3", flags))
    moved = {tuple(key): number for *key, number, _, _ in list_collectives(step)}
    assert name == "2" and [split for n, _, split, _ in parameters if n == "moe.experts.w1"] == ["ep: dim 0"]
    assert moved["forward", "ep", "all_to_all"] == 3 and moved["backward", "ep", "all_to_all"] == 2  # no counts go back
    assert moved["forward", "fsdp", "all_gather"] == moved["backward", "fsdp", "reduce_scatter"] == 1


def test_too_few_layers_are_refused_unless_there_is_a_page():
    cfg = config("train_llama3", dict(pp=4, dp_shard=1, local_batch_size=4))
    assert count_block(importlib.import_module("train_llama3").main, cfg) is None
    with pytest.raises(ValueError, match="three layers on a rank.*--html FILE"):
        explain(cfg, None)
