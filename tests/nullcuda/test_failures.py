"""What failed, waited or did not fit at an earlier commit, where only a GPU could have shown it."""
import pytest

# sides that every kind of --float8 can cut into its blocks, and more layers than the compiler's limit of 8 versions
WIDE = "n_layers=9,dim=256,n_heads=4,n_kv_heads=2,head_dim=64,ffn_dim=512"
EXPERTS = ("train_qwen3.py", "--flavor", "debug_moe", "--local_batch_size", 2, "--model_args", WIDE + ",moe_ffn_dim=128")
DENSE = ("train_llama3.py", "--local_batch_size", 2, "--model_args", WIDE)


@pytest.mark.parametrize("nproc, flags", [(1, ()), pytest.param(2, ("--ep", 2), marks=pytest.mark.slow)], ids=str)
def test_float8_experts_run_with_any_number_of_rows(device, tmp_path, nproc, flags):
    """torchao's kernels want multiples of 16 rows per expert, and it cannot pad them."""
    device.run(tmp_path, *EXPERTS, "--float8", "rowwise", "--float8_experts", *flags, nproc=nproc, no_waiting=nproc == 1)


@pytest.mark.parametrize("nproc", [1, 2])
def test_ac_op_runs_with_experts(device, tmp_path, nproc):
    device.run(tmp_path, *EXPERTS, "--ac", "op", *(("--ep", 2) if nproc == 2 else ()), nproc=nproc)


def test_float8_under_tp_sends_nothing_for_scales(device, tmp_path):
    """As many all-reduces as in bf16: torchao, given DTensors, sends 28 more per layer and step."""
    sent = [sum("AllReduce" in line for line in device.run(
        tmp_path / kind, *DENSE, "--tp", 2, "--float8", kind, nproc=2, no_waiting=True).logs[0]) for kind in ("off", "rowwise")]
    assert sent[0] == sent[1]


@pytest.mark.slow
def test_mxfp8_is_compiled_once_for_all_layers(device, tmp_path):
    """A function of its own in each linear made a version of its own for each block, and 9 are more than the compiler makes."""
    device.run(tmp_path, *DENSE, "--float8", "mxfp8", "--compile", major=10)


@pytest.mark.parametrize("flags, text", [
    ("--float8 nvfp4 --compile", "--float8 nvfp4 cannot be compiled"),
    ("--float8 nvfp4 --tp 2", "--float8 nvfp4 does not split matrices over --tp 2; use mxfp8"),
    ("--float8 mxfp8 --float8_experts", "needs two more packages: pip install nvidia-cutlass-dsl apache-tvm-ffi"),
])
def test_float8_that_cannot_run_is_refused_in_one_line(device, tmp_path, flags, text):
    recipe = EXPERTS if "experts" in flags else DENSE
    done = device.run(tmp_path, *recipe, *flags.split(), nproc=2 if "tp" in flags else 1, status=None, major=10, log=False)
    assert 0 not in done.statuses and text in done.texts[0].splitlines()[0], done.texts[0]
