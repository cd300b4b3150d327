"""Forward and backward of one MoE layer: the grouped matmul, a loop over experts, and transformers'
Qwen3-MoE layer.

    python benchmarks/moe.py
    python benchmarks/moe.py --tokens 8192 --dim 2048 --moe_ffn_dim 768 --n_experts 128 --top_k 8 --dtype bfloat16

All have the same weights and the same input, and their results and gradients are compared before
anything is timed. They take turns in one run, and their order changes with the round; only their
ratios mean something elsewhere. On a CPU the time is that of this process, all threads together, so
what else the machine does hardly shows.
"""

import platform
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal
from unittest import mock

import torch

# in benchmarks/ are files of the same names as the modules imported here
sys.path[0] = str(Path(__file__).parent.parent)

import models.moe
from flags.config import parse_config
from models.qwen3 import MoE, Qwen3Config


@dataclass(kw_only=True)
class Config:
    tokens: int = 2048  # tokens per call, as 8 sequences
    dim: int = 192  # width of the model
    moe_ffn_dim: int = 256  # hidden width of an expert
    n_experts: int = 8  # experts
    top_k: int = 2  # experts per token
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and activations
    rounds: int = 15  # rounds that count, after two that do not
    device: Literal["auto", "cpu", "cuda"] = "auto"  # auto = a GPU if there is one


def layers(cfg: Config, device) -> dict:
    """name -> (layer, its parameters in the order: router, gate and up, down), all with the same
    weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes = dict(n_experts=cfg.n_experts, top_k=cfg.top_k, moe_ffn_dim=cfg.moe_ffn_dim)
    ours = MoE(Qwen3Config(dim=cfg.dim, **sizes)).to(device)
    theirs = {}
    for kind in ("eager", "grouped_mm"):
        config = Qwen3MoeConfig(
            hidden_size=cfg.dim,
            num_experts=cfg.n_experts,
            num_experts_per_tok=cfg.top_k,
            moe_intermediate_size=cfg.moe_ffn_dim,
            norm_topk_prob=True,
        )
        config._experts_implementation = kind  # a whole model's from_pretrained would set it
        theirs[kind] = Qwen3MoeSparseMoeBlock(config).to(device)
    torch.manual_seed(0)
    for p in ours.parameters():
        torch.nn.init.normal_(p, std=0.1)
    with torch.no_grad():
        for block in theirs.values():
            block.gate.weight.copy_(ours.router.weight)
            block.experts.gate_up_proj.copy_(torch.cat([ours.experts.w1, ours.experts.w3], dim=1))
            block.experts.down_proj.copy_(ours.experts.w2)
    for layer in (ours, *theirs.values()):
        layer.to(getattr(torch, cfg.dtype))

    def looped(x):
        with mock.patch.object(models.moe, "grouped_mm", None):
            return ours(x)

    e = ours.experts
    mine = [ours.router.weight, e.w1, e.w3, e.w2]
    found = {"ours, grouped_mm": (ours, mine), "ours, loop over experts": (looped, mine)}
    for kind, block in theirs.items():
        found[f"transformers, {kind}"] = (
            block,
            [block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj],
        )
    return found


def step(layer, params, x, out_grad) -> list:
    """[output, gradients] of one forward and backward; the gradients of gate and up as one tensor."""
    out = layer(x)
    x_grad, router, *grads = torch.autograd.grad(out, [x, *params], out_grad)
    gate_up = grads[0] if len(grads) == 2 else torch.cat(grads[:2], dim=1)
    return [out.detach(), x_grad, router, gate_up, grads[-1]]


def seconds(work, device) -> float:
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    begin = clock()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - begin


def main(cfg: Config):
    device = torch.device(
        "cuda"
        if cfg.device == "auto" and torch.cuda.is_available()
        else cfg.device.replace("auto", "cpu")
    )
    found = layers(cfg, device)
    x = (
        torch.randn(8, cfg.tokens // 8, cfg.dim, device=device)
        .to(getattr(torch, cfg.dtype))
        .requires_grad_()
    )
    out_grad = torch.randn_like(x)
    work = {
        name: partial(step, layer, params, x, out_grad) for name, (layer, params) in found.items()
    }
    results = {name: run() for name, run in work.items()}
    want = results["ours, grouped_mm"]
    # bf16 scores send a token elsewhere now and then
    tolerance = 1e-4 if cfg.dtype == "float32" else 0.1
    for name, got in results.items():
        for what, a, b in zip(
            ("output", "input", "router", "gate_up", "down"), got, want, strict=True
        ):
            error = ((a - b).float().norm() / b.float().norm()).item()
            assert error < tolerance, f"{name}: {what} is off by {error:.1e}"

    times = {name: [] for name in work}
    names = list(work)
    for i in range(cfg.rounds + 2):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            took = seconds(work[name], device)
            if i >= 2:
                times[name].append(took)
    machine = f"{platform.machine()} CPU, threads: {torch.get_num_threads()}"
    machine = torch.cuda.get_device_name() if device.type == "cuda" else machine
    print(
        f"{machine}, torch {torch.__version__}, {cfg.dtype}: {cfg.tokens} tokens, dim {cfg.dim}, "
        "moe_ffn_dim "
        f"{cfg.moe_ffn_dim}, {cfg.n_experts} experts, top_k {cfg.top_k}; {cfg.rounds} rounds, "
        "outputs and gradients equal "
        f"within {tolerance}"
    )
    for name in names:
        ratios = {
            what: f(times[name]) / f(times[names[0]])
            for what, f in (("median", statistics.median), ("shortest", min))
        }
        print(
            f"{name:28}  {statistics.median(times[name]):.4f} s  "
            + "  ".join(f"{k} {v:.2f} x" for k, v in ratios.items())
        )


if __name__ == "__main__":
    main(parse_config(Config))
