"""Which kernels a step launches, and how many: what a few changed lines, or a new torch, can lose
without any wrong number."""

import re

import pytest

SHAPE = "dim=256,n_heads=4,n_kv_heads=2,head_dim=64,ffn_dim=512,n_layers="


def step_3(device, folder, *flags, layers=9, **options):
    """Names of what the third step of a run launches, one each."""
    argv = ("--steps", 3, "--log_every", 3, "--model_args", f"{SHAPE}{layers}", *flags)
    done = device.run(folder, "train_llama3.py", *argv, **options)
    found = []
    for line in done.step(3):
        if re.match("kernel|triton|gemm|memset|mark kernel", line):
            found.append(line)
    return found


def count(lines, *words) -> int:
    return sum(all(word in line for word in words) for line in lines)


@pytest.mark.parametrize("flags", [(), ("--compile",)], ids=["eager", "compiled"])
def test_attention_is_cudnn_s_kernel(device, tmp_path, flags):
    lines = step_3(device, tmp_path, *flags)
    ours = [line for line in lines if "cudnn" in line]
    assert count(ours, "cudnn_attention_backward") == 9, ours
    assert count(ours, "cudnn_attention") - 9 == 9, ours
    for line in lines:
        assert "flash" not in line


@pytest.mark.parametrize("flags", [(), ("--compile",)], ids=["eager", "compiled"])
@pytest.mark.parametrize("major, name", [(8, "flash"), (9, "cudnn"), (10, "cudnn"), (12, "flash")])
def test_the_kernel_of_attention_follows_the_device(device, tmp_path, flags, major, name):
    """Compute capability 8.0 is an A100, 9.0 an H100, 10.0 a B200, 12.0 an RTX PRO 6000."""
    lines = step_3(device, tmp_path, *flags, layers=6, major=major)
    other = {"flash": "cudnn", "cudnn": "flash"}[name]
    assert count(lines, name) >= 2 * 6
    assert count(lines, other) == 0


def test_norms_and_the_optimizer_are_one_kernel_each(device, tmp_path):
    lines = step_3(device, tmp_path)
    # F.rms_norm; as separate operators it would be six
    assert count(lines, "vectorized_layer_norm_kernel") == 2 * 9 + 1
    optimizer = count(lines, "FusedAdam")
    assert 1 <= optimizer <= 6, optimizer  # many of the 83 parameters per launch


@pytest.mark.parametrize("flags, most", [([], 80), (["--compile"], 65)])
def test_launches_per_layer(device, tmp_path, flags, most):
    """An upper bound of what one more layer launches: forward, backward, its part of clipping and
    of AdamW."""
    n = [len(step_3(device, tmp_path / str(layers), *flags, layers=layers)) for layers in (9, 13)]
    per_layer = (n[1] - n[0]) / 4
    print(f"{flags}: {n[0]} launches with 9 layers, {per_layer} per layer")
    assert per_layer <= most
