"""What failed, waited or did not fit at an earlier commit, where only a GPU could have shown it."""

import json
import os
import subprocess
import sys
from base64 import b64decode
from collections import Counter
from pathlib import Path

import pytest
from build import environment
from rendezvous import CALL

HERE = Path(__file__).parent
REPO = HERE.parent.parent

# sides that every kind of --float8 can cut into its blocks, and more layers than the compiler's
# limit of 8 versions
WIDE = "n_layers=9,dim=256,n_heads=4,n_kv_heads=2,head_dim=64,ffn_dim=512"
DENSE = ("train_llama3.py", "--local_batch_size", 2, "--model_args", WIDE)


def test_float8_under_tp_sends_nothing_for_scales(device, tmp_path):
    """As many all-reduces as in bf16: torchao, given DTensors, sends 28 more per layer and step."""
    sent = []
    for kind in ("off", "rowwise"):
        sent.append(
            sum(
                "AllReduce" in line
                for line in device.run(
                    tmp_path / kind, *DENSE, "--tp", 2, "--float8", kind, nproc=2, no_waiting=True
                ).logs[0]
            )
        )
    assert sent[0] == sent[1]


@pytest.mark.slow
def test_float8_is_compiled_once_for_all_layers(device, tmp_path):
    """A function of its own in each linear made a version of its own for each block, and 9 are more
    than the compiler makes."""
    device.run(tmp_path, *DENSE, "--float8", "rowwise", "--compile")


@pytest.mark.slow
def test_document_masks_of_long_sequences_are_small(device, tmp_path):
    """create_block_mask alone took 10 GiB at 32k tokens. And the documents of every step are
    others: nothing compiles again."""
    device.run(
        tmp_path,
        "train_llama3.py",
        "--doc_mask",
        "--seq_len",
        32768,
        "--local_batch_size",
        1,
        "--model_args",
        "n_layers=1,dim=64,n_heads=1,n_kv_heads=1,head_dim=64,ffn_dim=64,max_seq_len=32768",
        "--steps",
        4,
        gib=4,
        no_waiting=True,
    )


KERNELS = """
import json
import torch
from answers import cudnn_attention
from models.attention import lower_right_mask, sdpa

cudnn_attention()
sdpa(*(torch.empty(1, 1, 64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)))  # as connect does

def kernel(T, S, H, G, K, mask=None, is_causal=False, U=None):
    q, k, v = (torch.empty(2, heads, n, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
               for heads, n, width in ((H, T, K), (G, S, K), (G, S, U or K)))
    node = sdpa(q, k, v, mask, is_causal).grad_fn
    while node and "ScaledDotProduct" not in node.name():
        node = next((next_node for next_node, _ in node.next_functions if next_node), None)
    return node.name().removeprefix("ScaledDotProduct").removesuffix("AttentionBackward0") if node else "Math"

seen = lambda T, S: torch.ones(2, 1, T, S, dtype=torch.bool, device="cuda")
print(json.dumps(dict(
    causal=kernel(64, 64, 8, 2, 64, is_causal=True), decode=kernel(1, 65, 8, 2, 64, seen(1, 65)),
    decode_bucket=kernel(1, 128, 8, 2, 64, seen(1, 128)), prefill=kernel(64, 128, 8, 2, 64, seen(64, 128)),
    absorbed=kernel(1, 128, 8, 1, 576, seen(1, 128)),
    lower_right=kernel(64, 128, 8, 2, 64, lower_right_mask(64, 128, torch.device("cuda"))),
    latent_right=kernel(64, 128, 8, 8, 192, lower_right_mask(64, 128, torch.device("cuda")), U=128),
    latent=kernel(64, 64, 8, 8, 192, is_causal=True, U=128))))
"""

REPLAYS = """
import json, sys, torch, warnings
from models.qwen3 import FLAVORS, Qwen3
from rl.decoding import rollout

model, replayed, known = Qwen3(FLAVORS["debug_moe"]).to("cuda", torch.bfloat16), [], torch.cuda.CUDAGraph.replay
torch.cuda.CUDAGraph.replay = lambda graph: replayed.append(id(graph)) or known(graph)
asks = lambda module, args, out: (out.sum().item(), out)[1]
sys.argv[1] == "asks" and model.norm.register_forward_hook(asks)
with warnings.catch_warnings(record=True) as said:
    rollout(model, [[1, 2, 3]] * 4, torch.rand(4, 2, 150), 1.0, [], max_len=200, rows=4)
print(json.dumps([len({*replayed}), len(replayed), sum("without CUDA graphs" in str(w.message) for w in said)]))
"""


SENDS = """
import json, torch
from types import SimpleNamespace as Of
from rl import nccl_engine

class Server:
    __init__ = lambda self, *args: None
    timeout, said, commit = 60, [], __init__
    call = lambda self, path, body=None, take=None: self.said.append((path, body)) or 2  # a world of two workers

nccl_engine.Server, nccl_engine.HTTPEngine.connect = Server, lambda self: (Server(), "0")
engine = object.__new__(nccl_engine.NCCLEngine)
engine.cfg, engine.trainer = Of(engine="", out="", init_timeout_s=60), Of(layout=Of(device=torch.device("cuda", 0)))
engine.server, _ = engine.connect()
engine.send("7", dict(a=torch.ones(3, 5), b=torch.ones(2, 7, dtype=torch.bfloat16)[1]))
print(json.dumps(Server.said))
"""


def program(text: str, *argv, log=""):
    env = (
        os.environ
        | environment()
        | {"PYTHONPATH": f"{REPO}:{HERE}"}
        | ({"NULLCUDA_LOG": str(log)} if log else {})
    )
    return json.loads(
        subprocess.check_output(
            [sys.executable, "-c", text, *argv], env=env, text=True
        ).splitlines()[-1]
    )


def test_a_token_is_one_cuda_graph(tmp_path):
    """Twice four samples, in two buckets of keys; each graph is compared once with launched
    kernels. A model that asks the device for a number has no graph, and it is said once."""
    assert program(REPLAYS, "experts", log=tmp_path / "log") == [2, 2 * 149 + 2, 0]
    # the host reads a token when its copy has arrived
    kinds = Counter(line.split()[0] for line in (tmp_path / "log.0").read_text().splitlines())
    assert kinds["sync_event"] == 2 * 150
    assert program(REPLAYS, "asks") == [
        0,
        0,
        1,
    ]


def test_a_token_of_compiled_blocks_is_half_as_many_launches(tmp_path):
    """Qwen3-1.7B at 64 rows, what grpo.py --compile captures: 15 launches per layer, seven of them
    products."""
    command = "benchmarks/decode.py --flavor 1.7B --rows 64 --null --new 3 --rounds 1 --compile"
    environ = os.environ | environment() | {"NULLCUDA_LOG": str(tmp_path / "log")}
    subprocess.check_call([sys.executable, *command.split()], cwd=REPO, env=environ)
    lines = (tmp_path / "log.0").read_text(errors="replace").splitlines()
    begin = [i for i, line in enumerate(lines) if line.startswith("capture ")]
    end = [i for i, line in enumerate(lines) if line.startswith("captured ")]
    assert len(begin) == len(end) == 1
    kinds = Counter(line.split()[0] for line in lines[begin[0] : end[0]])
    assert kinds["gemm"] == 28 * 7 + 1
    launches = kinds["kernel"] + kinds["triton"] + kinds["gemm"] + kinds["copy"] + kinds["memset"]
    assert 28 * 15 <= launches <= 450, kinds


def test_weights_go_to_the_workers_of_a_server(tmp_path):
    """Rank 0 of three joins as vLLM's workers do, with an all-reduce of one number, and broadcasts
    what was announced."""
    said = dict(program(SENDS, log=tmp_path / "log"))
    join = said["/init_weight_transfer_engine"]["init_info"]
    update = said["/update_weights"]["update_info"]
    assert (
        join["rank_offset"],
        join["world_size"],
        len(b64decode(join["nccl_unique_id_b64"])),
    ) == (1, 3, 128)
    assert update == {
        "names": ["a", "b"],
        "dtype_names": ["float32", "bfloat16"],
        "shapes": [[3, 5], [7]],
    }
    calls = [CALL.fullmatch(line) for line in (tmp_path / "log.0").read_text().splitlines()]
    assert [(c[1], c[3], c[4], c[6], c[7]) for c in calls if c] == [
        ("all_reduce", "3", "0", "1", "7"),
        ("broadcast", "3", "0", "15", "7"),
        ("broadcast", "3", "0", "7", "9"),
    ]


def test_attention_is_chosen_by_priority():
    """Masks, as rollouts have them, go to the efficient kernel, which needs no plan for each
    length, with or without groups."""
    masked = dict.fromkeys(("decode", "decode_bucket", "prefill", "absorbed"), "Efficient")
    right = dict(lower_right="Flash", latent_right="Flash")
    assert program(KERNELS) == masked | right | dict(causal="Cudnn", latent="Cudnn")
