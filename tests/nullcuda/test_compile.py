"""--compile: everything is compiled in the first two steps, no function in one version per layer,
no graph is broken."""

import json

import pytest
from rows import run, slow

# model, processes, flags
COMPILED = [
    "llama3 1",
    "moe 1",
    slow("mtp 1"),
    slow("qwen3 1"),
    slow("deepseek 1"),
    "llama3 1 --ac op",
    slow("llama3 1 --ac full"),
    slow("llama3 1 --ac selective"),
    slow("llama3 1 --ac budget"),
    slow("moe 1 --ac op"),
    slow("moe 1 --ac full"),
    slow("mtp 1 --ac op"),
    slow("llama3 1 --doc_mask"),
    slow("mtp 1 --doc_mask"),
    slow("llama3 1 --float8 rowwise"),
    slow("llama3 1 --float8 tensorwise"),
    slow("llama3 1 --float8 rowwise --ac op"),
    slow("moe 1 --float8 rowwise"),
    slow("llama3 1 --optimizer muon"),
    slow("llama3 1 --global_batch_size 4"),
    slow("llama3 2"),
    slow("llama3 2 --tp 2"),
    slow("llama3 2 --tp 2 --ac op"),
    slow("llama3 2 --tp 2 --float8 rowwise"),
    slow("moe 2 --ep 2"),
    slow("llama3 2 --pp 2"),
    slow("grpo 1 --pack_tokens 256 --local_batch_size 64"),
    slow("grpo 2 --pack_tokens 256 --local_batch_size 64 --tp 2"),
]


@pytest.mark.parametrize("row", COMPILED)
def test_nothing_is_compiled_after_the_second_step(device, tmp_path, row):
    done = run(
        device, tmp_path, row, "--compile", "--steps", 4, compiles=True, log=False, timeout=400
    )
    for text in done.texts:
        told = []
        for line in text.splitlines():
            if line.startswith("compiles "):
                told.append(json.loads(line.removeprefix("compiles ")))
        assert [line["step"] for line in told] == [1, 2, 3, 4]
        assert told[0]["graphs"] > 0, told
        assert told[3]["graphs"] == told[1]["graphs"], told
        assert told[3]["versions"] <= 2, told  # one, or a second for sizes that vary
        assert told[3]["breaks"] == [], told
