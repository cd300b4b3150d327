"""--explain: what one layer holds and sends in a layout that no laptop has, against support/explain.py."""
import pytest
from dry import run


@pytest.mark.slow
def test_the_report_of_a_layout_no_laptop_has(tmp_path):
    """No data is read, no folder made; a layer's numbers by hand: 8B, 8 x 128 devices."""
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
