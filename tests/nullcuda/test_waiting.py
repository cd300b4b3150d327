"""The host does not wait for the device between two log lines: it asks for nothing that would have
to be computed first."""

import re

import pytest
from rows import run, slow

WAITS = re.compile("sync_stream|sync_device|sync_event|copy_sync")

# model, processes, flags
NOTHING = [
    "llama3 1",
    "moe 1",
    "mtp 1",
    "llama3 1 --doc_mask",
    "llama3 1 --optimizer muon",
    "llama3 1 --float8 rowwise",
    "llama3 1 --global_batch_size 4",
    slow("llama3 1 --compile"),
    slow("llama3 1 --float8 tensorwise"),
    slow("moe 1 --ac op"),
    slow("moe 1 --moe_balance aux"),
    slow("mtp 1 --doc_mask"),
    "llama3 2",
    "llama3 2 --tp 2",
    slow("llama3 2 --cp 2"),
    slow("llama3 2 --cp 2 --cp_method alltoall"),
    slow("llama3 2 --pp 2"),
    slow("llama3 2 --dp_replicate 2"),
    slow("moe 2"),
    slow("mtp 2 --tp 2"),
    "moe 2 --tp 2 --etp 2",
    slow("llama3 2 --optimizer muon"),
    slow("llama3 2 --float8 tensorwise --float8_all_gather"),
]


def waits(log: list[str]) -> dict[int, int]:
    """Step -> how often the host waited, from its beginning to that of the next one."""
    found = {}
    step = 0
    for line in log:
        if line.startswith("mark step "):
            step = int(line.split()[2])
            found[step] = 0
        elif step and WAITS.match(line):
            found[step] += 1
    return found


@pytest.mark.parametrize("row", NOTHING)
def test_the_host_does_not_wait(device, tmp_path, row):
    """torch raises where it knows that the host waits; the device has seen all the calls."""
    for log in run(device, tmp_path, row, "--steps", 4, no_waiting=True, timeout=200).logs:
        per_step = waits(log)
        assert (per_step[2], per_step[3]) == (0, 0), per_step
        assert per_step[4] > 0  # the last step is logged: its loss is read


# (model, processes, flags; how often the host waits in a step)
KNOWN = [
    ("moe 2 --ep 2", 9),
    ("moe 2 --ep 2 --ac op", 9),
    slow("moe 2 --ep 2 --ac full", 18),
    slow("moe 2 --tp 2 --ep 2", 9),
    slow("mtp 2 --ep 2", 9),
    ("llama3 1 --cpu_offload", 87),
]


@pytest.mark.parametrize("row, times", KNOWN)
def test_the_host_waits_as_often_as_is_known(device, tmp_path, row, times):
    """With --ep the layer's exchange of tokens needs its sizes on the host: one wait per layer and
    forward. With --cpu_offload the gradient of each of 84 parameters has to arrive, and 3 more."""
    for log in run(device, tmp_path, row, "--steps", 4, timeout=200).logs:
        per_step = waits(log)
        assert (per_step[2], per_step[3]) == (times, times), per_step
