"""Each recipe runs on the null device, with each flag and pair of flags that takes another way there: two steps, status 0. Runs
with --compile are in test_compile.py. A row has several flags at once where they do not touch each other. What test_waiting.py,
test_order.py or test_failures.py run as well is not here."""
from pathlib import Path

import pytest
from rows import rows, run


@pytest.mark.parametrize("row", rows(Path(__file__).with_name("hopper.txt").read_text()))
def test_it_runs_on_hopper(device, tmp_path, row):
    run(device, tmp_path, row, log=False, timeout=200)


@pytest.mark.parametrize("row", rows(Path(__file__).with_name("blackwell.txt").read_text()))
def test_it_runs_on_blackwell(device, tmp_path, row):
    run(device, tmp_path, row, major=10, log=False, timeout=500)
