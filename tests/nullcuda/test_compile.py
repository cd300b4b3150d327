"""--compile: everything is compiled in the first two steps, no function in one version per layer, no graph is broken."""
import json

import pytest
from rows import rows, run

COMPILED = """
  llama3 1
  moe 1
- mtp 1
- qwen3 1
- deepseek 1
  llama3 1 --ac op
- llama3 1 --ac full
- llama3 1 --ac selective
- llama3 1 --ac budget
- moe 1 --ac op
- moe 1 --ac full
- mtp 1 --ac op
- llama3 1 --doc_mask
- mtp 1 --doc_mask
- llama3 1 --float8 rowwise
- llama3 1 --float8 tensorwise
- llama3 1 --float8 rowwise --ac op
- moe 1 --float8 rowwise
- llama3 1 --optimizer muon
- llama3 1 --global_batch_size 4
- llama3 2
- llama3 2 --tp 2
- llama3 2 --tp 2 --ac op
- llama3 2 --tp 2 --float8 rowwise
- moe 2 --ep 2
- llama3 2 --pp 2
- grpo 1 --pack_tokens 256 --local_batch_size 64
- grpo 2 --pack_tokens 256 --local_batch_size 64 --tp 2
"""


@pytest.mark.parametrize("row", rows(COMPILED))
def test_nothing_is_compiled_after_the_second_step(device, tmp_path, row):
    done = run(device, tmp_path, row, "--compile", "--steps", 4, compiles=True, log=False, timeout=400)
    for text in done.texts:
        told = [json.loads(line.removeprefix("compiles ")) for line in text.splitlines() if line.startswith("compiles ")]
        assert [line["step"] for line in told] == [1, 2, 3, 4]
        assert told[0]["graphs"] > 0 and told[3]["graphs"] == told[1]["graphs"], told
        assert told[3]["versions"] <= 2, told  # one, or a second for sizes that vary
        assert told[3]["breaks"] == [], told
