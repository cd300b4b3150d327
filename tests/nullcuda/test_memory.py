"""Where the device's memory goes: what the caching allocator takes from the driver, and what is
copied on the device."""

import re

EIGHT_B = [
    "--flavor",
    "8B",
    "--seq_len",
    8192,
    "--local_batch_size",
    1,
    "--steps",
    3,
    "--log_every",
    3,
]


def kinds(lines) -> set[str]:
    return {line.split()[0] for line in lines}


def test_memory_grows_in_segments_unless_the_user_says_otherwise(device, tmp_path):
    """PYTORCH_ALLOC_CONF=expandable_segments:True: memory is mapped, and none of it lies idle in
    pieces that are too small."""
    done = device.run(tmp_path / "a", "train_llama3.py")
    assert "map" in kinds(done.logs[0])
    assert "malloc" not in kinds(done.logs[0])
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        done = device.run(tmp_path / name, "train_llama3.py", env={name: "max_split_size_mb:512"})
        assert "malloc" in kinds(done.logs[0])
        assert "map" not in kinds(done.logs[0])


def test_one_process_copies_no_weights_and_no_gradients(device, tmp_path):
    """distributed/cast.py: it casts, and nothing is copied from device to device but what a few
    elements take."""
    done = device.run(tmp_path, "train_llama3.py", "--steps", 3, "--log_every", 3)
    copied = []
    for line in done.step(3):
        if re.match("copy .*d2d", line):
            copied.append(int(line.split("bytes=")[1].split()[0]))
    assert sum(copied) < 1e5  # of 1.2e7 bytes of weights


def peak(done) -> float:
    """Largest GiB that were allocated at once until the end of the third step."""
    return float(
        re.search(r"memory after step 3: .*max_memory_allocated=([\d.]+)", done.texts[0])[1]
    )


def test_8b_fits_one_device_of_140_gib_without_recomputation(device, tmp_path):
    done = device.run(
        tmp_path, "train_llama3.py", *EIGHT_B, "--compile", empty_weights=True, memory=True, gib=140
    )
    assert peak(done) < 133
    assert not [
        line for line in done.step(3) if line.split()[0] in ("unmap", "free", "malloc", "map")
    ]
