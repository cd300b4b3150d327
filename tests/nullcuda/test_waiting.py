"""The host does not wait for the device between two log lines: it asks for nothing that would have
to be computed first."""

import re
from pathlib import Path

import pytest
from rows import rows, run

WAITS = re.compile("sync_stream|sync_device|sync_event|copy_sync")

# A row, and how often its host waits in a step. Each number that is not 0 is known, and says what
# it is.
NOTHING = Path(__file__).with_name("waits_never.txt").read_text()


def waits(log: list[str]) -> dict[int, int]:
    """Step -> how often the host waited, from its beginning to that of the next one."""
    found, step = {}, 0
    for line in log:
        if line.startswith("mark step "):
            step = int(line.split()[2])
            found[step] = 0
        elif step and WAITS.match(line):
            found[step] += 1
    return found


@pytest.mark.parametrize("row", rows(NOTHING))
def test_the_host_does_not_wait(device, tmp_path, row):
    """torch raises where it knows that the host waits; the device has seen all the calls."""
    for log in run(device, tmp_path, row, "--steps", 4, no_waiting=True, timeout=200).logs:
        per_step = waits(log)
        assert (per_step[2], per_step[3]) == (0, 0), per_step
        assert per_step[4] > 0  # the last step is logged: its loss is read


KNOWN = Path(__file__).with_name("waits_sometimes.txt").read_text()


@pytest.mark.parametrize("row, times", rows(KNOWN))
def test_the_host_waits_as_often_as_is_known(device, tmp_path, row, times):
    """With --ep the layer's exchange of tokens needs its sizes on the host: one wait per layer and
    forward. With --cpu_offload the gradient of each of 84 parameters has to arrive, and 3 more."""
    for log in run(device, tmp_path, row, "--steps", 4, timeout=200).logs:
        per_step = waits(log)
        assert (per_step[2], per_step[3]) == (times, times), per_step
