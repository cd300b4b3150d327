"""rl/graphs.py with torch's own capture: it is refused here what a GPU would refuse, which is to wait, and to copy from memory
that only the host can reach."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from build import environment

HERE = Path(__file__).parent
REPO = HERE.parent.parent

ROLLOUT = """
import json, sys, warnings
from dataclasses import replace
import torch
from models import deepseek, llama3, qwen3
from rl import decoding

kind, way = sys.argv[1:]
Model, flavor = {"llama3": (llama3.Llama3, llama3.FLAVORS["debug"]), "deepseek": (deepseek.DeepSeek, deepseek.FLAVORS["debug"]),
                 "moe": (qwen3.Qwen3, qwen3.FLAVORS["debug_moe"])}[kind]
model = Model(replace(flavor, n_layers=2)).to("cuda", torch.bfloat16)
model.held = {}
if way in ("asks", "waits"):
    known = model.blocks["1"].forward
    def forward(*args):
        float(args[0].sum()) if way == "asks" else torch.cuda.synchronize()
        return known(*args)
    model.blocks["1"].forward = forward
counts = []
with warnings.catch_warnings(record=True) as said:
    for _ in range(2):
        made, replayed = [], []
        real = torch.cuda.CUDAGraph.replay
        torch.cuda.CUDAGraph.replay = lambda graph: (replayed.append(1), real(graph))
        begin = torch.cuda.CUDAGraph.capture_begin
        torch.cuda.CUDAGraph.capture_begin = lambda graph, *args, **kwargs: (made.append(1), begin(graph, *args, **kwargs))[1]
        samples = decoding.rollout(model, [[1, 2, 3]] * 4, torch.rand(4, 2, 150), 1.0, [], max_len=200, rows=4,
                                   top_k=5 if way == "top_k" else 0)
        torch.cuda.CUDAGraph.replay, torch.cuda.CUDAGraph.capture_begin = real, begin
        assert [len(s["ids"]) for s in samples] == [150] * 8
        counts.append((len(made), len(replayed)))
print(json.dumps([counts, [str(w.message) for w in said if "CUDA graph" in str(w.message)]]))
"""


@pytest.mark.parametrize("kind, way", [("llama3", ""), ("moe", ""), ("deepseek", ""), ("llama3", "top_k"), ("llama3", "asks"),
                                       ("llama3", "waits")])
def test_a_rollout_is_captured(kind, way):
    """150 tokens in two buckets of keys and one number of rows, first four samples, then the others; a second rollout has the
    graphs of the first. A fork that asks the device for a value, or waits for it, decodes without, and it is said why."""
    env = os.environ | environment() | {"PYTHONPATH": f"{REPO}:{HERE}"}
    done = subprocess.run([sys.executable, "-c", ROLLOUT, kind, way], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts, said = json.loads(done.stdout.splitlines()[-1])
    if way in ("asks", "waits"):
        tried = 0 if way == "asks" else 2
        assert counts == [[tried, 0], [0, 0]] and said and all(s.startswith("no CUDA graph, new tokens are") for s in said)
    else:
        assert counts == [[2, 298], [0, 298]] and not said
