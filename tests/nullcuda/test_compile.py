"""--compile: everything is compiled in the first two steps, no function in one version per layer,
no graph is broken."""

import json
from pathlib import Path

import pytest
from rows import rows, run

COMPILED = Path(__file__).with_name("compiled.txt").read_text()


@pytest.mark.parametrize("row", rows(COMPILED))
def test_nothing_is_compiled_after_the_second_step(device, tmp_path, row):
    done = run(
        device, tmp_path, row, "--compile", "--steps", 4, compiles=True, log=False, timeout=400
    )
    for text in done.texts:
        told = [
            json.loads(line.removeprefix("compiles "))
            for line in text.splitlines()
            if line.startswith("compiles ")
        ]
        assert [line["step"] for line in told] == [1, 2, 3, 4]
        assert told[0]["graphs"] > 0 and told[3]["graphs"] == told[1]["graphs"], told
        assert told[3]["versions"] <= 2, told  # one, or a second for sizes that vary
        assert told[3]["breaks"] == [], told
