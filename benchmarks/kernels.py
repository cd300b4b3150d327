"""Where the time of a training step goes, how close each part comes to the device's limit, and two kernels beside torch's.

    python benchmarks/kernels.py                                        # CPU seconds, the debug flavor's shape, one thread
    python benchmarks/kernels.py --model_args "dim=192,n_experts=8,top_k=2,moe_ffn_dim=256"     # with experts (models/qwen3.py)
    python benchmarks/kernels.py --seq_len 8192 --local_batch_size 1 --dtype bfloat16 --matmul_size 8192 --loss_vocab 128256 \
        --model_args "dim=4096,n_layers=4,n_heads=32,n_kv_heads=8,head_dim=128,ffn_dim=14336"   # on a GPU: layers of the 8B

Each part runs alone, forward and backward, at the step's shapes; its share is its time x the number of layers / the time of
the step. What the parts leave over: residual additions, FSDP's copies, autograd, and what caches do to neighbours. The limit of
a part is the longer of its FLOPs at the rate of a large matmul and its bytes at the rate of a large copy, both measured here.
Then the chunked loss beside F.cross_entropy, with peak memory, and attention whose values are padded beside torch's own choice.
"""

import multiprocessing
import os
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

# in benchmarks/ are files of the same names as the modules imported here
sys.path[0] = str(Path(__file__).parent.parent)
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.nn.functional as F

from benchmarks import loops
from flags.config import override_fields, parse_config
from models.attention import sdpa
from models.layers import rotate
from models.llama3 import FeedForward
from models.loss import linear_cross_entropy
from models.qwen3 import MoE, Qwen3Config


@dataclass(kw_only=True)
class Config(loops.StepConfig):
    local_batch_size: int = 8  # sequences per step
    loss_vocab: int = 32768  # vocabulary of the comparison of losses
    matmul_size: int = 1024  # side of the square matmul whose rate is the limit; 8192 on a GPU


def timed(work: dict, rounds: int, device) -> dict[str, list[float]]:
    """name -> seconds of each round: CPU seconds of this process, or of the GPU from start to end.
    They take turns."""
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    times = {name: [] for name in work}
    names = list(work)
    for i in range(rounds + 1):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            wait()
            begin = clock()
            work[name]()
            wait()
            times[name] += [clock() - begin] * (i > 0)
    return times


def both_ways(function, *inputs):
    """A function that runs `function` forward and backward, with gradients of all inputs that can
    have some."""
    wanted = [x.requires_grad_() for x in inputs if x.is_floating_point()]
    grad = torch.ones_like(function(*inputs))  # the same memory every time
    return lambda: torch.autograd.grad(function(*inputs), wanted, grad)


def parts(cfg, c, device) -> dict:
    """name -> (work, how often a step does it, FLOPs, bytes read and written at least) of one
    training step."""
    B = cfg.local_batch_size
    T = cfg.seq_len
    D = c.dim
    H = c.n_heads
    G = c.n_kv_heads
    K = c.head_dim
    V = c.vocab_size
    dtype = getattr(torch, cfg.dtype)
    N = cfg.local_batch_size * cfg.seq_len
    L = c.n_layers
    new = lambda *shape, dtype=dtype: torch.randn(*shape, device=device).to(dtype)  # noqa: E731
    size = torch.finfo(dtype).bits // 8
    angle = torch.randn(1, 1, T, K // 2, device=device)
    cos, sin = angle.cos(), angle.sin()

    def norms_and_rope(x, w1, w2, q, k):
        norms = [F.rms_norm(x, (D,), w, c.norm_eps).sum() for w in (w1, w2)]
        return norms[0] + norms[1] + rotate(q, cos, sin).sum() + rotate(k, cos, sin).sum()

    def projections(x, wq, wk, wv, o, wo):
        return (
            F.linear(x, wq).sum()
            + F.linear(x, wk).sum()
            + F.linear(x, wv).sum()
            + F.linear(o, wo).sum()
        )

    q, k, v, x = new(B, H, T, K), new(B, G, T, K), new(B, G, T, K), new(B, T, D)
    w = [new(D), new(D)]
    projection = [
        new(B, T, D),
        new(H * K, D),
        new(G * K, D),
        new(G * K, D),
        new(B, T, H * K),
        new(D, H * K),
    ]
    head = new(V, D)
    labels = torch.randint(V, (N,), device=device)
    n_projection = 2 * H * K * D + 2 * G * K * D
    found = {
        # forward QK and PV, backward twice and a half of that; causal is half
        "attention": (
            both_ways(lambda q, k, v: sdpa(q, k, v, is_causal=True), q, k, v),
            L,
            3.5 * 2 * B * H * T * T * K,
            3 * size * (2 * q.numel() + 2 * k.numel()),
        ),
        "wq wk wv wo": (
            both_ways(projections, *projection),
            L,
            6 * N * n_projection,
            3 * size * (n_projection + 4 * x.numel()),
        ),
        "norms, rope": (
            both_ways(norms_and_rope, x, *w, q, k),
            L,
            0,
            5 * size * (2 * x.numel() + q.numel() + k.numel()),
        ),
        "loss": (
            both_ways(lambda h, w: linear_cross_entropy(h, w, labels), new(N, D), head),
            1,
            6 * N * V * D,
            3 * size * V * D + 5 * 4 * N * V,
        ),
    }
    if experts := getattr(c, "n_experts", 0):
        layer = MoE(c).to(device, dtype)
        for p in layer.parameters():
            torch.nn.init.normal_(p, std=0.1)
        ffn = layer
        n_read = experts * 3 * D * c.moe_ffn_dim
        n_used = c.top_k * 3 * D * c.moe_ffn_dim
    else:
        ffn = FeedForward(D, c.ffn_dim).to(device, dtype)
        n_read = n_used = 3 * D * c.ffn_dim
    weights = list(ffn.parameters())
    grad = torch.ones_like(x)

    def feed_forward():
        torch.autograd.grad(ffn(x), [x, *weights], grad)

    x.requires_grad_()
    inner = N * n_used // (3 * D)  # numbers of one activation inside
    found["experts" if experts else "w1 w2 w3, silu"] = (
        feed_forward,
        L,
        6 * N * n_used,
        3 * size * (n_read + 4 * inner),
    )
    return found


def adamw(params, device):
    """The recipe's clipping and optimizer step on parameters of these shapes."""
    params = [torch.randn_like(p, device=device).requires_grad_() for p in params]
    for p in params:
        p.grad = torch.randn_like(p)
    options = {"fused": True} if device.type == "cuda" else {"foreach": True}
    optimizer = torch.optim.AdamW(params, 1e-9, **options)

    def step():
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()

    return step, sum(p.numel() for p in params)


def limits(cfg, device) -> tuple[float, float]:
    """(FLOP/s of a large square matmul in the step's dtype, bytes/s read and written by a large
    copy)."""
    n = cfg.matmul_size
    dtype = getattr(torch, cfg.dtype)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    source = torch.zeros(64 * 2**20, device=device)
    target = torch.empty_like(source)
    times = timed(
        {"matmul": lambda: a @ b, "copy": lambda: target.copy_(source)}, cfg.rounds, device
    )
    return 2 * n**3 / statistics.median(
        times["matmul"]
    ), 2 * 4 * source.numel() / statistics.median(times["copy"])


def plain_loss(h, weight, labels):
    return F.cross_entropy(F.linear(h, weight).float(), labels, reduction="sum")


def loss_memory(pipe, kind, cfg, dim, device) -> None:
    """Bytes that the peak grows by in one forward and backward of the loss; in a process of its
    own."""
    function = {"chunked": linear_cross_entropy, "F.cross_entropy": plain_loss}[kind]
    dtype = getattr(torch, cfg.dtype)
    N = cfg.local_batch_size * cfg.seq_len
    V = cfg.loss_vocab
    h, weight = (
        torch.randn(N, dim, device=device).to(dtype),
        torch.randn(V, dim, device=device).to(dtype),
    )
    labels = torch.randint(64, (N,), device=device)
    few = both_ways(lambda h, w: function(h, w, labels[:8]), h[:8].clone(), weight[:64].clone())
    few()  # whatever torch sets up at the first call
    before = loops.peak_bytes(device)
    both_ways(lambda h, w: function(h, w, labels), h, weight)()
    pipe.send(loops.peak_bytes(device) - before)


def peak_of(target, *args) -> int:
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(theirs, *args))
    process.start()
    theirs.close()
    try:
        return mine.recv()
    finally:
        process.join()


def compare_losses(cfg, dim, device) -> None:
    dtype = getattr(torch, cfg.dtype)
    N = cfg.local_batch_size * cfg.seq_len
    V = cfg.loss_vocab
    h, weight = (
        torch.randn(N, dim, device=device).to(dtype),
        (0.05 * torch.randn(V, dim, device=device)).to(dtype),
    )
    labels = torch.randint(V, (N,), device=device)
    kinds = {"chunked": linear_cross_entropy, "F.cross_entropy": plain_loss}
    losses = [function(h, weight, labels) for function in kinds.values()]
    torch.testing.assert_close(*losses, rtol=1e-3, atol=0)
    work = {
        name: both_ways(lambda h, w, f=f: f(h, w, labels), h, weight) for name, f in kinds.items()
    }
    times = timed(work, cfg.rounds, device)
    print(
        f"\nLoss of {N} tokens over {V:,} words, dim {dim}, {cfg.dtype}, with its head's matmul\n"
        "| | seconds | x chunked | peak MiB |\n|" + " --- |" * 4
    )
    for name in kinds:
        peak = peak_of(loss_memory, name, cfg, dim, device)
        ratio = statistics.median(a / b for a, b in zip(times[name], times["chunked"]))
        print(
            f"| {name} | {statistics.median(times[name]):.3f} | {ratio:.2f} | {peak / 2**20:,.0f} |"
        )


def compare_padding(cfg, device) -> None:
    B = cfg.local_batch_size
    T = cfg.seq_len
    dtype = getattr(torch, cfg.dtype)
    print(
        f"\nAttention with values smaller than queries, {B} x {T} tokens, 8 heads, {cfg.dtype}\n"
        "| query dim | value dim | padded, seconds | as it is | x padded |\n|" + " --- |" * 5
    )
    for K, U in ((48, 32), (96, 64), (192, 128)):
        q, k, v = (torch.randn(B, 8, T, n, device=device).to(dtype) for n in (K, K, U))
        plain = partial(F.scaled_dot_product_attention, is_causal=True)
        times = timed(
            {
                "padded": both_ways(partial(sdpa, is_causal=True), q, k, v),
                "plain": both_ways(plain, q, k, v),
            },
            cfg.rounds,
            device,
        )
        ratio = statistics.median(b / a for a, b in zip(times["padded"], times["plain"]))
        padded, as_is = (statistics.median(times[name]) for name in ("padded", "plain"))
        print(f"| {K} | {U} | {padded:.4f} | {as_is:.4f} | {ratio:.2f} |")


def main(cfg: Config):
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    c = override_fields(Qwen3Config(), cfg.model_args, "--model_args")
    flops, bandwidth = limits(cfg, device)
    found = parts(cfg, c, device)
    is_moe = bool(c.n_experts)
    model, step = loops.ours(cfg, device, compiled=False) if not is_moe else (None, None)
    work = {name: run for name, (run, *_) in found.items()}
    if not is_moe:
        update, n = adamw(model.parameters(), device)
        work |= {"clip, AdamW": update, "step": step}
        found["clip, AdamW"] = (update, 1, 0, 4 * 9 * n)
    times = {
        name: statistics.median(took) for name, took in timed(work, cfg.rounds, device).items()
    }
    total = times.get("step") or sum(times[name] * found[name][1] for name in found)
    print(
        f"{device.type}, {cfg.dtype}: matmul of {cfg.matmul_size} at {flops / 1e9:,.0f} GFLOP/s, "
        "copy at "
        f"{bandwidth / 1e9:,.1f} GB/s; {cfg.local_batch_size} x {cfg.seq_len} tokens; "
        f"{cfg.rounds} rounds, medians"
    )
    print(
        "| part | seconds | times | share of the "
        + ("parts" if is_moe else "step")
        + " | of its limit |\n|"
        + " --- |" * 5
    )
    for name, (_, count, ops, size) in found.items():
        limit = max(ops / flops, size / bandwidth)
        print(
            f"| {name} | {times[name]:.4f} | {count} | {times[name] * count / total:.1%} | "
            f"{limit / times[name]:.0%} |"
        )
    if not is_moe:
        rest = 1 - sum(times[name] * count for name, (_, count, *_) in found.items()) / total
        print(f"| the rest | | | {rest:.1%} | |\n| step | {total:.4f} | 1 | 100% | |")
    compare_losses(cfg, c.dim, device)
    compare_padding(cfg, device)


if __name__ == "__main__":
    main(parse_config(Config))
