"""models/: the flavors' numbers, each kernel against a slow and obvious one, parity with
transformers, the chunked loss."""

import hashlib
import math
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from layouts import on_meta, random_tokens
from pieces import in_pieces
from saves import refuses
from torch import nn
from torch.nn.attention import SDPBackend, _cur_sdpa_kernel_backends
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import distributed.checks
import models.attention
import models.loss
import parallel
import train_llama3
from distributed.checks import check_model
from distributed.layout import AXES, Layout
from models import deepseek, flex_attention, llama3, qwen3
from models.attention import causal_attention, sdpa
from models.layers import RMSNorm, rope_frequencies, rotate
from models.llama3 import FLAVORS, Llama3, Llama3Config, scaled
from models.loss import IGNORE, linear_cross_entropy
from parallel import TP_STYLES
from rl.decoding import RowCache
from tools.reports.dryrun import Watch

TINY = dict(
    dim=32,
    n_layers=3,
    n_heads=4,
    n_kv_heads=2,
    head_dim=8,
    ffn_dim=64,
    vocab_size=101,
    max_seq_len=64,
)
SHORT_ROPE = dict(
    factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16
)


def tiny(**changes) -> Llama3:
    torch.manual_seed(0)
    model = Llama3(Llama3Config(**TINY | changes))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2) if p.dim() == 2 else torch.nn.init.uniform_(p, 0.5, 1.5)
    return model


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    "flavor, published, factor",
    [
        ("1B", 1_235_814_400, 32),
        ("3B", 3_212_749_824, 32),
        ("8B", 8_030_261_248, 8),
        ("70B", 70_553_706_496, 8),
        ("405B", 405_853_388_800, 8),
    ],
)
def test_flavors_are_the_published_3_1_and_3_2(flavor, published, factor):
    c = FLAVORS[flavor]
    assert sum(p.numel() for p in on_meta(c).parameters()) == published
    assert (c.rope_scaling, c.rope_theta, c.norm_eps) == (scaled(float(factor)), 500000.0, 1e-5)
    assert (c.max_seq_len, c.vocab_size, c.tie_embeddings) == (
        131072,
        128256,
        flavor in ("1B", "3B"),
    )


# MODELS.md: total and active parameters; DeepSeek's with the selection biases, which are buffers
# here
COUNTS = {
    **{
        f"qwen3 {size}": (n, n)
        for size, n in {
            "0.6B": 596_049_920,
            "1.7B": 1_720_574_976,
            "4B": 4_022_468_096,
            "8B": 8_190_735_360,
            "14B": 14_768_307_200,
            "32B": 32_762_123_264,
        }.items()
    },
    "qwen3 30B-A3B": (30_532_122_624, 3_353_032_704),
    "qwen3 235B-A22B": (235_093_634_560, 22_190_763_520),
    "deepseek 16B": (15_706_484_224, 2_661_150_208),
    "deepseek 236B": (235_741_434_880, 21_375_800_320),
    "deepseek 671B": (671_026_419_200, 37_552_297_472),
    "deepseek moonlight-16B": (15_960_110_208, 2_914_776_192),
}


@pytest.mark.parametrize("name", COUNTS)
def test_parameter_counts(name):
    module, flavor = name.split()
    model = on_meta({"qwen3": qwen3, "deepseek": deepseek}[module].FLAVORS[flavor])
    named = model.hf_keys()
    biases = sum(b.numel() for fqn, b in model.named_buffers() if fqn in named)
    assert (
        sum(p.numel() for p in model.parameters()) + biases,
        model.n_active_params() + biases,
    ) == COUNTS[name]


@pytest.mark.parametrize(
    "module, flavor",
    [
        (llama3, "debug"),
        (qwen3, "debug"),
        (qwen3, "debug_moe"),
        (deepseek, "debug"),
        (deepseek, "debug_mtp"),
    ],
)
def test_debug_flavors_can_be_split(module, flavor):
    c = module.FLAVORS[flavor]
    assert c.n_layers >= 6
    assert c.n_heads % 4 == c.n_kv_heads % 4 == c.ffn_dim % 4 == 0
    assert getattr(c, "n_experts", 0) % 8 == getattr(c, "moe_ffn_dim", 0) % 4 == 0


def test_debug_flavors_can_be_compared():
    dense, moe = (on_meta(qwen3.FLAVORS[name]).n_active_params() for name in ("debug", "debug_moe"))
    assert abs(moe / dense - 1) < 0.01
    assert replace(deepseek.FLAVORS["debug_mtp"], mtp_depth=0) == deepseek.FLAVORS["debug"]


def test_flops_per_token():
    # 8B: 6 x (all but the input embedding) + 12 x 32 layers x 32 heads x 128 x 8192
    assert (
        on_meta(FLAVORS["8B"]).flops_per_token(8192)
        == 6 * (8_030_261_248 - 128256 * 4096) + 12 * 32 * 32 * 128 * 8192
    )
    # 1B: the embedding is the head too, and a head is multiplied with: it stays, once
    assert (
        on_meta(FLAVORS["1B"]).flops_per_token(4096) == 6 * 1_235_814_400 + 12 * 16 * 32 * 64 * 4096
    )
    # Qwen3: the same of an own head, and of a tied one
    large = on_meta(qwen3.FLAVORS["8B"])
    matmuls = 6 * (8_190_735_360 - 151936 * 4096)
    assert large.flops_per_token(4096) == matmuls + 12 * 36 * 32 * 128 * 4096
    small = on_meta(qwen3.FLAVORS["0.6B"])
    assert small.flops_per_token(4096) == 6 * 596_049_920 + 12 * 28 * 16 * 128 * 4096
    # H K is not D: attention costs what its heads cost
    model = on_meta(Llama3Config(**TINY | dict(n_kv_heads=1, head_dim=24)))
    n = 3 * (32 * 96 + 2 * 32 * 24 + 96 * 32 + 3 * 32 * 64 + 2 * 32) + 32 + 101 * 32
    assert model.flops_per_token(64) == 6 * n + 12 * 3 * 4 * 24 * 64


@pytest.mark.parametrize(
    "flavor, changes",
    [
        (llama3.FLAVORS["debug"], dict(tie_embeddings=True)),
        (qwen3.FLAVORS["debug"], {}),
        (qwen3.FLAVORS["debug_moe"], {}),
        (deepseek.FLAVORS["debug_mtp"], {}),
        (deepseek.FLAVORS["debug"], dict(q_lora_rank=0, n_shared_experts=2, n_dense_layers=0)),
    ],
)
def test_initial_weights_are_those_of_earlier_versions(flavor, changes):
    """To the last bit: a repeated experiment starts where it did before models could say numbers of
    their own."""
    small = dict(dim=32, n_layers=3, n_heads=4, ffn_dim=64, vocab_size=1100)
    model = initialised(on_meta(replace(flavor, **small | changes)), seed=3)
    for fqn, p in model.named_parameters():
        if "norm" in fqn.split(".")[-2]:
            assert (p == 1).all()
            continue
        if p.dim() == 3:
            size = 1
        else:
            size = 1024
        draws = []
        for b in range(-(-len(p) // size)):
            seed = int.from_bytes(hashlib.sha256(f"3/{fqn}/{b}".encode()).digest()[:7], "little")
            draws.append(
                torch.randn(
                    min(size, len(p) - b * size),
                    *p.shape[1:],
                    generator=torch.Generator().manual_seed(seed),
                )
            )
        std = 0.02
        if fqn.endswith(("wo.weight", "w2.weight", "experts.w2")):
            std = 0.02 / math.sqrt(6)
        assert torch.equal(p, torch.cat(draws) * std), fqn
    for b in model.buffers():
        assert (b == 0).all()


def test_blocks_are_drawn_side_by_side(monkeypatch):
    """Two threads on two cores: each call waits until the other is there too. Four cores of two
    processes are two as well."""
    both = threading.Barrier(2, timeout=600)
    draw = parallel.draw_block
    monkeypatch.setattr(parallel, "draw_block", lambda *args: (both.wait(), draw(*args)))
    for cores, processes in ((2, 1), (4, 2)):
        monkeypatch.setattr(parallel, "usable_cores", lambda cores=cores: cores)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
        # 16 matrices of one block each
        initialised(on_meta(Llama3Config(**TINY | dict(n_layers=2))))


def test_what_goes_wrong_in_a_thread_is_raised(monkeypatch):
    monkeypatch.setattr(
        parallel, "draw_block", Mock(side_effect=MemoryError("no room for a block"))
    )
    with pytest.raises(MemoryError, match="no room for a block"):
        initialised(on_meta(FLAVORS["debug"]))


def initialised(model, seed=0):
    check_model(model, ALONE, TP_STYLES, "none", "float32")
    parallel.init_weights(model, ALONE, seed)
    return model


ALONE = Layout()


class RootMeanNorm(nn.Module):  # a norm of a fork's own
    def __init__(self, dim):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))


class Bare(nn.Module):
    def __init__(self, name, tensor, buffer=False):
        super().__init__()
        self.register_buffer(name, tensor) if buffer else self.register_parameter(
            name, nn.Parameter(tensor)
        )


CONFIGS = {
    Llama3: Llama3Config(),
    qwen3.Qwen3: qwen3.FLAVORS["debug_moe"],
    deepseek.DeepSeek: deepseek.FLAVORS["debug_mtp"],
}


def forked(constants=None, std=None, cls=Llama3, **parts) -> nn.Module:
    """A model on meta with more parts in its first block."""

    class Fork(cls):
        if constants is not None:

            def init_constants(self):
                return constants

        def init_std(self, fqn):
            return (std or {}).get(fqn, super().init_std(fqn))

    with torch.device("meta"):
        model = Fork(CONFIGS[cls])
        for name, make in parts.items():
            model.blocks["0"].add_module(name, make())
    return model


@pytest.mark.parametrize("cls", CONFIGS)
def test_a_forks_own_parameters_start_as_its_model_says(cls):
    norms = dict(
        layer=lambda: nn.LayerNorm(24),
        group=lambda: nn.GroupNorm(2, 24),
        own=lambda: RootMeanNorm(24),
        batch=lambda: nn.BatchNorm1d(24),
    )
    model = forked(
        {"blocks.*.gain.scale": 0.2, "blocks.0.zero.weight": 0, "*.slopes": 3},
        {"blocks.0.table.codes": 0.5},
        cls,
        **norms,
        gain=lambda: Bare("scale", torch.full((1,), 0.2)),
        zero=lambda: RootMeanNorm(24),
        linear=lambda: nn.Linear(24, 48),
        table=lambda: Bare("codes", torch.empty(3000, 4)),
        slopes=lambda: Bare("slopes", torch.ones(4), buffer=True),
    )
    got = initialised(model).blocks["0"]
    for name in norms:
        assert (getattr(got, name).weight == 1).all()
        assert (getattr(got, name).bias == 0).all()
    assert (got.batch.running_var == 1).all()
    assert (got.batch.running_mean == 0).all()
    assert got.batch.num_batches_tracked == 0
    assert got.gain.scale.tolist() == pytest.approx([0.2])
    assert (got.zero.weight == 0).all()
    assert (got.slopes.slopes == 3).all()
    assert (got.linear.bias == 0).all()
    assert abs(got.linear.weight.std() - 0.02) < 0.002
    assert abs(got.table.codes.std() - 0.5) < 0.02


@pytest.mark.parametrize("cls", CONFIGS)
@pytest.mark.parametrize(
    "part, message",
    [
        (
            lambda: Bare("scale", torch.full((1,), 0.2)),
            "blocks.0.part.scale has no initial value: .* init_std.* init_constants",
        ),
        # of no nn.Linear
        (lambda: Bare("weight", torch.empty(8, 8)), "blocks.0.part.weight has no initial value"),
        (
            lambda: Bare("temperature", torch.tensor(1.0)),
            "parameter blocks.0.part.temperature has no dimension",
        ),
        (
            lambda: Bare("slopes", torch.ones(4), buffer=True),
            "blocks.0.part.slopes has no initial value: compute it in forward",
        ),
        (lambda: nn.Conv1d(8, 8, 4), "blocks.0.part.weight has no initial value"),
    ],
    ids=["bare", "bare weight", "0-d", "buffer", "conv"],
)
def test_a_parameter_that_no_rule_covers_is_named(cls, part, message):
    model = forked(cls=cls, part=part)
    refuses(message, check_model, model, ALONE, TP_STYLES, "none", "float32")
    refuses(message, initialised, model)
    assert all(p.is_meta for p in model.parameters())  # no memory was taken


def test_a_pattern_of_init_constants_that_names_nothing():
    refuses(
        r"init_constants: pattern 'blocks.\*.gian' matches no parameter or buffer of Fork",
        check_model,
        forked({"blocks.*.gian": 0.2}),
        ALONE,
        TP_STYLES,
        "none",
        "float32",
    )


# flags, processes, processes of the host -> bytes per parameter and share of them that the host
# must hold
@pytest.mark.parametrize(
    "flags, world, local, per_parameter",
    [
        ({}, 1, 1, 16),
        ({"param_dtype": "bfloat16"}, 1, 1, 8),
        ({}, 8, 2, 16 / 4),
        ({"dp_replicate": 4}, 8, 2, 16),
        ({"tp": 4}, 8, 8, 16),
        ({"pp": 2, "tp": 2}, 4, 1, 4),
        ({"cpu_offload": True}, 2, 2, 16),
        ({"optimizer": "muon"}, 1, 1, 16),
    ],
    ids=str,
)
def test_what_cannot_fit_memory_is_refused_with_the_numbers(
    monkeypatch, flags, world, local, per_parameter
):
    """To the byte: what fits is not refused. Muon has one moment for its matrices, the experts'
    among them."""
    model = on_meta(qwen3.Qwen3Config(n_experts=4, top_k=2, moe_ffn_dim=32))
    cfg = train_llama3.Config(**flags)
    degrees = {a: max(getattr(cfg, a), 1) for a in AXES}
    degrees["dp_shard"] *= world // math.prod(degrees.values())
    layout = Layout(**degrees, global_batch_size=world)
    matrices = []
    for fqn, p in model.named_parameters():
        if p.dim() in (2, 3) and fqn.startswith("blocks."):
            matrices.append(p.numel())
    needs = sum(p.numel() for p in model.parameters()) * per_parameter - 4 * sum(matrices) * (
        cfg.optimizer == "muon"
    )
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local))
    monkeypatch.setattr(distributed.checks, "host_memory", lambda: needs + 1)
    given = (model, layout, TP_STYLES, cfg.ac, cfg.param_dtype, cfg.optimizer)
    check_model(*given)
    monkeypatch.setattr(distributed.checks, "host_memory", lambda: needs - 1)
    numbers = rf"at least {needs / 1e9:.1f} GB .*there are {(needs - 1) / 1e9:.1f} GB; .*--dp_shard"
    refuses(numbers, check_model, *given)
    if local == 2 and not cfg.cpu_offload:  # a GPU holds one process, however many a host has
        layout = replace(layout, device=torch.device("cuda"))
        given = (model, layout, *given[2:])
        gpu = SimpleNamespace(total_memory=needs // 2 + 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
        check_model(*given)
        gpu.total_memory = needs // 2 - 1
        refuses("each device would need .*--cpu_offload", check_model, *given)


def test_host_memory_is_that_of_the_tightest_control_group(monkeypatch):
    files = {
        "/proc/meminfo": "MemTotal: 1000 kB\nSwapTotal: 10 kB\nHugePages_Total: 0\n",
        "/proc/self/cgroup": "1:cpu:/a\n0::/job/x\n",
        "/sys/fs/cgroup/job/x/memory.max": "max",
        "/sys/fs/cgroup/job/memory.max": "500000",
    }

    def read_text(path):
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    assert distributed.checks.host_memory() == 500000 + 10 * 1024
    del files["/sys/fs/cgroup/job/memory.max"]
    assert distributed.checks.host_memory() == 1010 * 1024
    del files["/proc/meminfo"]
    assert distributed.checks.host_memory() == sys.maxsize


# ---------------------------------------------------------------- attention


@pytest.mark.slow
def test_attention_has_a_first_kernel_and_compiles_into_one_graph(monkeypatch):
    """cuDNN's kernel comes first while we attend, and torch's own order counts again afterwards."""

    def order():
        return _cur_sdpa_kernel_backends(with_priority=True)

    real = F.scaled_dot_product_attention
    before = order()
    seen = []
    q, k, v = (torch.randn(2, heads, 8, 16, requires_grad=True) for heads in (4, 2, 2))
    with monkeypatch.context() as patch:

        def watched(*a, **b):
            seen.append(order())
            return real(*a, **b)

        patch.setattr(F, "scaled_dot_product_attention", watched)
        out = sdpa(q, k, v, is_causal=True)
    assert seen[0][0] == SDPBackend.CUDNN_ATTENTION
    assert len(seen[0]) == 4
    assert order() == before
    compiled = torch.compile(sdpa, fullgraph=True)(q, k, v, is_causal=True)
    assert torch.equal(compiled, out)
    assert torch.equal(*(torch.autograd.grad(x.sum(), q)[0] for x in (compiled, out)))


def slow_attention(q, k, v, may_look, scale=None):
    """softmax(q k' scale) v, one query at a time. q (B, H, T, K); k, v (B, G, S, K); may_look(b, t,
    s)."""
    B, H, T, K = q.shape
    G = k.shape[1]
    S = k.shape[2]
    out = torch.zeros_like(q)
    for b in range(B):
        for h in range(H):
            g = h // (H // G)  # neighbouring query heads share a kv head
            for t in range(T):
                seen = [s for s in range(S) if may_look(b, t, s)]
                scores = torch.stack([q[b, h, t] @ k[b, g, s] for s in seen]) * (scale or K**-0.5)
                out[b, h, t] = scores.softmax(0) @ v[b, g, seen]
    return out


def random_qkv(H, G, T=11, S=11, B=2, K=6):
    g = torch.Generator().manual_seed(1)
    found = []
    for n, length in ((H, T), (G, S), (G, S)):
        found.append(torch.randn(B, n, length, K, generator=g, dtype=torch.float64))
    return found


DOC_IDS = torch.tensor([[0, 0, 0, 1, 1, 2, 2, 2, 2, 3, 4], [0] * 11])


@pytest.mark.parametrize("scale", [None, 0.3])
def test_a_sink_takes_weight_and_has_no_value(scale):
    q, k, v = random_qkv(4, 2)
    B, H, T, K = q.shape
    sinks = torch.tensor([-1.0, 0.0, 0.5, 2.0])
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    used = scale or 1 / math.sqrt(K)
    wanted = torch.zeros(B, H, T, v.shape[-1], dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            for t in range(T):
                keys = k[b, h // 2, : t + 1]
                share = (keys @ q[b, h, t] * used).exp()
                share = share / (share.sum() + sinks[h].exp())
                wanted[b, h, t] = share @ v[b, h // 2, : t + 1]
    found = sdpa(q, k, v, causal[None, None], scale=scale, sinks=sinks)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("H, G", [(4, 4), (6, 2), (4, 1)])
@pytest.mark.parametrize(
    "scale, doc_ids",
    [(None, None), (0.1, None), (0.3, DOC_IDS)],
    ids=["plain", "scaled", "documents"],
)
def test_causal_attention(H, G, scale, doc_ids):
    q, k, v = random_qkv(H, G)
    if doc_ids is None:
        same = torch.ones(2, 11, 11, dtype=torch.bool)
    else:
        same = doc_ids[:, :, None] == doc_ids[:, None, :]
    wanted = slow_attention(q, k, v, lambda b, t, s: s <= t and same[b, t, s], scale)
    torch.testing.assert_close(
        causal_attention(torch.arange(11)[None], doc_ids)(q, k, v, scale=scale), wanted
    )
    torch.testing.assert_close(sdpa(q, k, v, same.tril()[:, None], scale=scale), wanted)
    # context parallelism: a rank has the queries of some positions and the keys of all
    if doc_ids is not None:
        some = torch.tensor([2, 3, 8, 9])
        attend = causal_attention(some[None], doc_ids, some)
        torch.testing.assert_close(attend(q[:, :, some], k, v, scale=scale), wanted[:, :, some])


@pytest.mark.slow
def test_documents_of_many_lengths_are_all_compiled(monkeypatch):
    """As grpo.py --pack_tokens has them. After eight, torch would run the kernel uncompiled, and
    warn."""
    real = torch.compile
    # counts the same
    monkeypatch.setattr(
        torch, "compile", lambda f, options=None, **kw: real(f, backend="eager", **kw)
    )
    with torch._dynamo.config.patch(recompile_limit=8), warnings.catch_warnings():
        flex = flex_attention.compiled_flex_attention.__wrapped__()
        warnings.simplefilter("error")
        for T in range(16, 160, 16):
            flex(*torch.randn(3, 1, 2, T, 16))
    torch._dynamo.reset()


@pytest.mark.parametrize("sizes", [(2, 8, 4, 150, 32), (3, 4, 4, 64, 16), (1, 4, 1, 1, 16)])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_short_attention_in_bf16_on_a_cpu(monkeypatch, sizes, scale):
    """Result and gradient in plain products are about as near to the truth as those of torch's
    kernel; also where the values have much in common, so that the gradients of the weights nearly
    cancel."""
    B, H, G, T, K = sizes
    torch.manual_seed(0)
    shapes = [(B, H, T, K), (B, G, T, K), (B, G, T, K)]
    q, k, v = [torch.randn(shape, dtype=torch.bfloat16) for shape in shapes]
    in_common = 2 * torch.randn(1, G, 1, K, dtype=torch.bfloat16)
    grad = torch.randn(B, H, T, K, dtype=torch.bfloat16)
    for values in (v, v + in_common):
        qkv = [x.clone().requires_grad_() for x in (q, k, values)]
        exact = [x.float().requires_grad_() for x in (q, k, values)]
        out_truth = sdpa(*exact, is_causal=True, scale=scale)
        truth = [out_truth, *torch.autograd.grad(out_truth, exact, grad.float())]

        out = sdpa(*qkv, is_causal=True, scale=scale)
        assert type(out.grad_fn).__name__ == "CausalOnCPUBackward"
        plain = [out, *torch.autograd.grad(out, qkv, grad)]
        with monkeypatch.context() as patch:
            patch.setattr(models.attention, "SHORT_ON_CPU", 0)
            kernel_out = sdpa(*qkv, is_causal=True, scale=scale)
            assert type(kernel_out.grad_fn).__name__ != "CausalOnCPUBackward"
            kernel = [kernel_out, *torch.autograd.grad(kernel_out, qkv, grad)]

        for got, torchs, wanted in zip(plain, kernel, truth, strict=True):
            assert got.dtype == torch.bfloat16
            if T == 1:  # a single key has all the weight, whatever its score
                assert (got - wanted).abs().max() < 3e-2
            else:
                assert off(got, wanted) < 1e-2
                assert off(got, wanted) < 1.6 * off(torchs, wanted)


def test_row_cache_against_slow_attention():
    """The second row has two tokens and three columns of padding in the first forward; its next
    tokens overwrite these."""
    q, k, v = random_qkv(4, 2)
    wanted = slow_attention(q, k, v, lambda b, t, s: s <= t, 0.3)
    cache = RowCache(2, 11)
    for columns in [
        [range(5), [0, 1, 8, 9, 10]],
        [[5], [2]],
        [[6], [3]],
        [range(7, 11), range(4, 8)],
    ]:
        columns = torch.tensor([list(row) for row in columns])
        at = columns[1, :1] + torch.arange(columns.shape[1])
        cache.place(
            torch.stack([columns[0], at]), keys=[int(columns[0].max()) + 1, int(at.max()) + 1]
        )
        row = torch.arange(2)[:, None]
        out = cache.attend("0")(
            *(x.transpose(1, 2)[row, columns].transpose(1, 2) for x in (q, k, v)), scale=0.3
        )
        for b, t in (
            (b, t)
            for b in (0, 1)
            for t in range(out.shape[2])
            if columns[b, t] == (columns[0], at)[b][t]
        ):
            torch.testing.assert_close(out[b, :, t], wanted[b, :, columns[b, t]])
    with pytest.raises(IndexError):  # there is room for 11 tokens
        cache.place(torch.tensor([[11], [8]]), keys=[11, 9])
        cache.attend("0")(q[:, :, :1], k[:, :, :1], v[:, :, :1])


@pytest.mark.parametrize(
    "changes",
    [dict(rope_scaling=SHORT_ROPE), dict(tie_embeddings=True)],
    ids=["scaled_rope", "tied"],
)
def test_what_the_padding_holds_never_matters(changes):
    """test_generate.py compares padded rows with full forwards; here: their logits are the same
    bits whatever was padded."""
    model = tiny(**changes)
    tokens = random_tokens(2, 12)
    rows = [tokens[0].tolist(), tokens[1, :7].tolist()]
    logits = [in_pieces(model, rows, [1, 3], filler)[0] for filler in (0, 41)]
    for a, b in zip(*logits):
        assert torch.equal(a, b)
    with torch.no_grad():
        torch.testing.assert_close(logits[0][1], model(tokens[1:, :7])[0], atol=2e-5, rtol=1e-4)


# ---------------------------------------------------------------- RoPE


@pytest.mark.parametrize(
    "name, head_dim, factor", [("3.0", 128, None), ("3.1", 128, 8.0), ("3.2-1B", 64, 32.0)]
)
def test_rope_is_that_of_transformers(name, head_dim, factor):
    """To the bit: an angle is position x frequency, so at position 131,000 the last bit of a
    frequency is 0.01 radians."""
    if factor:
        scaling = scaled(factor)
    else:
        scaling = None
    parameters = dict(rope_theta=500000.0, rope_type="llama3" if factor else "default") | (
        scaling or {}
    )
    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            head_dim=head_dim,
            max_position_embeddings=131072,
            rope_parameters=parameters,
        )
    )
    ours = rope_frequencies(Llama3Config(head_dim=head_dim, rope_scaling=scaling), head_dim, "cpu")
    assert torch.equal(ours, theirs.inv_freq)
    if factor:  # all three branches of the rule are used: kept, interpolated, stretched
        plain = rope_frequencies(Llama3Config(head_dim=head_dim), head_dim, "cpu")
        ratio = plain / ours
        assert ratio[0] == 1
        assert abs(ratio[-1] - factor) < 1e-4
        assert ((ratio > 1.01) & (ratio < factor - 0.1)).any()

    positions = torch.tensor([[0, 1, 8191, 8192, 20000, 131071]])  # trained on 8192
    q, k = torch.randn(2, 1, 4, 6, head_dim, generator=torch.Generator().manual_seed(0))
    wanted = apply_rotary_pos_emb(q, k, *theirs(q, positions))
    angle = positions[:, None, :, None] * ours
    for x, y in zip((q, k), wanted):
        torch.testing.assert_close(rotate(x, angle.cos(), angle.sin()), y, atol=1e-6, rtol=0)


# ---------------------------------------------------------------- parity with transformers


def test_positions_may_be_given():
    """The same positions by default, for all rows, or row by row; only distances count."""
    model = tiny()
    tokens = random_tokens(2, 16)
    logits = model(tokens)
    assert torch.equal(model(tokens, positions=torch.arange(16)[None]), logits)
    assert torch.equal(model(tokens, positions=torch.arange(16).repeat(2, 1)), logits)
    torch.testing.assert_close(
        model(tokens, positions=torch.arange(16)[None] + 30), logits, atol=1e-4, rtol=0
    )


HF = dict(
    model_type="llama",
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=2,
    intermediate_size=96,
    vocab_size=1000,
    rms_norm_eps=1e-5,
    max_position_embeddings=131072,
)
WANTED = dict(
    dim=64,
    n_layers=2,
    n_heads=8,
    n_kv_heads=2,
    head_dim=8,
    ffn_dim=96,
    vocab_size=1000,
    max_seq_len=131072,
)


@pytest.mark.parametrize(
    "hf, changes",
    [
        (dict(rope_theta=5e5, rope_scaling=None), {}),  # Llama 3 as transformers 4 wrote it
        # 3.1
        (
            dict(rope_theta=5e5, rope_scaling=scaled(8.0) | {"rope_type": "llama3"}),
            dict(rope_scaling=scaled(8.0)),
        ),
        # the older key
        (
            dict(rope_theta=5e5, rope_scaling=scaled(8.0) | {"type": "llama3"}),
            dict(rope_scaling=scaled(8.0)),
        ),
        (dict(rope_parameters=dict(rope_theta=5e5, rope_type="default")), {}),  # transformers 5
        (
            dict(rope_parameters=scaled(32.0) | dict(rope_theta=5e5, rope_type="llama3")),
            dict(rope_scaling=scaled(32.0)),
        ),
        (
            dict(
                rope_parameters=dict(rope_theta=1.0),
                rope_theta=5e5,
                rope_scaling=scaled(8.0) | {"type": "llama3"},
            ),
            dict(rope_scaling=scaled(8.0)),
        ),  # both: transformers takes the older name
        (dict(rope_theta=10000), dict(rope_theta=10000.0)),  # an integer in JSON
        # its default
        (
            dict(rope_theta=5e5, model_type="mistral", num_key_value_heads=4),
            dict(n_kv_heads=4, sliding_window=4096),
        ),
        # not in use
        (dict(rope_theta=5e5, model_type="qwen2", sliding_window=131072), dict(qkv_bias=True)),
        ({}, dict(rope_theta=10000.0)),  # Llama 1: defaults of transformers
        (dict(rope_theta=5e5, head_dim=32), dict(head_dim=32)),
        (dict(rope_theta=5e5, head_dim=None, num_key_value_heads=None), dict(n_kv_heads=8)),
        (dict(rope_theta=5e5, tie_word_embeddings=True), dict(tie_embeddings=True)),
        (dict(rope_theta=5e5, rms_norm_eps=1e-6), dict(norm_eps=1e-6)),
        # null: left out
        (
            dict(
                rope_theta=5e5,
                tie_word_embeddings=None,
                partial_rotary_factor=None,
                rope_parameters=None,
            ),
            {},
        ),
    ],
)
def test_from_hf(hf, changes):
    got = Llama3Config.from_hf(HF | hf)
    wanted = Llama3Config(**WANTED | dict(rope_theta=5e5) | changes)
    assert repr(got) == repr(wanted)  # 10000 is not 10000.0 in the config.json of a run


# (fields of a Hugging Face config, what the refusal says)
REFUSED = [
    (dict(model_type="qwen3"), "model_type is 'qwen3'"),
    (dict(hidden_act="gelu"), "hidden_act is 'gelu'"),
    (dict(attention_bias=True), "attention_bias is True"),
    (dict(mlp_bias=True), "mlp_bias is True"),
    (dict(rope_scaling=dict(type="linear", factor=2.0)), "rope_type is 'linear'"),
    (dict(rope_scaling=dict(rope_type="yarn", factor=2.0)), "'yarn' lacks original_max"),
    (dict(model_type="qwen2", use_sliding_window=True), "use_sliding_window is True"),
    (dict(model_type="mistral", sliding_window=0), "sliding_window 0 must be at least 1"),
    (
        dict(rope_parameters=dict(rope_theta=1e4, rope_type="dynamic", factor=2.0)),
        "rope_type is 'dynamic'",
    ),
    (
        dict(rope_parameters=dict(rope_theta=1e4, rope_type="llama3", factor=2.0)),
        "lacks low_freq_factor, high_freq_factor",
    ),
    (
        dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=0.5)),
        "partial_rotary_factor is 0.5",
    ),
    (dict(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    (
        dict(rope_parameters=dict(full_attention=dict(rope_theta=1e4, rope_type="default"))),
        "rope scaling has full_attention",
    ),
    (
        dict(rope_parameters=scaled(8.0) | dict(rope_type="llama3", factor=None)),
        "rope scaling 'llama3' lacks factor$",
    ),
    (dict(hidden_act=None), "hidden_act is None; models/llama3.py has only 'silu'"),
    (dict(hidden_size=None, vocab_size=None), "no number for hidden_size, vocab_size"),
    (dict(model_type=None), "model_type is None"),
]


@pytest.mark.parametrize("hf, words", REFUSED, ids=str)
def test_from_hf_refuses_what_it_cannot_represent(hf, words):
    refuses(words, Llama3Config.from_hf, HF | hf)


# ---------------------------------------------------------------- documents and tied weights


def two_documents(first_seed: int):
    """(2, 20): a first document of 9 or 6 tokens by first_seed, then one that is always the same."""
    tokens = random_tokens(2, 20, seed=7)
    lengths = torch.tensor([9, 6])
    doc_ids = (torch.arange(20) >= lengths[:, None]).long()
    tokens = torch.where(doc_ids == 0, random_tokens(2, 20, seed=first_seed), tokens)
    return tokens, torch.arange(20) - doc_ids * lengths[:, None], doc_ids


def test_documents_do_not_leak():
    model = tiny()
    (a, positions, doc_ids), (b, _, _) = two_documents(1), two_documents(2)
    second = doc_ids == 1
    assert torch.equal(a[second], b[second])
    assert not torch.equal(a, b)
    with torch.no_grad():
        masked = [model(x, positions=positions, doc_ids=doc_ids) for x in (a, b)]
        open_ = [model(x) for x in (a, b)]
    assert torch.equal(masked[0][second], masked[1][second])  # the same bits
    assert not torch.equal(masked[0][~second], masked[1][~second])
    # without the mask every token changes
    assert (open_[0][second] - open_[1][second]).abs().amax(-1).min() > 1e-3
    for row, start in ((0, 9), (1, 6)):  # and a document is what it would be alone
        torch.testing.assert_close(
            masked[0][row, start:], model(a[row : row + 1, start:])[0], atol=1e-5, rtol=1e-4
        )


# ---------------------------------------------------------------- the chunked loss


def loss_problem(N=700, D=48, V=331, dtype=torch.float32):
    g = torch.Generator().manual_seed(5)
    h = torch.randn(N, D, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(V, D, generator=g) / 4).to(dtype).requires_grad_()
    labels = torch.randint(0, V, (N,), generator=g)
    labels[torch.rand(N, generator=g) < 0.2] = IGNORE
    return h, weight, labels


def plain_loss(h, weight, labels, denom):
    return (
        F.cross_entropy(F.linear(h, weight).float(), labels, ignore_index=IGNORE, reduction="sum")
        / denom
    )


def off(a, b) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("N", [256, 700, 1])  # chunks of 256: one; two and a rest; less than one
@pytest.mark.parametrize("denom", [37, torch.tensor(37), None])
def test_loss_equals_cross_entropy(monkeypatch, N, denom):
    monkeypatch.setitem(models.loss.CHUNK_ELEMENTS, "cpu", 1)
    h, weight, labels = loss_problem(N)
    labels[0] = 3
    expected = plain_loss(h, weight, labels, 1 if denom is None else denom)
    loss = linear_cross_entropy(h, weight, labels, denom)
    assert loss.dtype == torch.float32
    assert loss.dim() == 0
    assert abs(loss - expected) < 1e-6 * expected
    # times -3: the gradient that comes in scales those that go out
    for got, want in zip(*(torch.autograd.grad(x * -3, (h, weight)) for x in (loss, expected))):
        assert off(got, want) < 1e-5
        assert not got[(want == 0).all(1)].any()  # an ignored token has no gradient at all


@pytest.mark.parametrize(
    "device, V, N, chunks",
    [
        ("meta", 128256, 8192, [2048] * 4),  # as on a GPU, which takes up to 2,093 rows
        ("meta", 64128, 8192, [4096] * 2),  # --tp 2
        ("meta", 128256, 8300, [1792] * 4 + [1132]),
        ("meta", 4096, 2048, [2048]),
        ("cpu", 4096, 2048, [256] * 8),  # 4 MiB in fp32, which stay in a CPU's caches
        ("cpu", 331, 700, [700]),
        ("cpu", 2**20, 600, [256, 256, 88]),
    ],
)
def test_chunks_are_equal_and_fill_the_tiles_of_a_matmul(device, V, N, chunks):
    seen = []

    def kernel(h, weight, labels, all_reduce, vocab_start, out):
        seen.append(len(h))
        return h.new_zeros((), dtype=torch.float32)

    h, weight = torch.empty(N, 1, device=device), torch.empty(V, 1, device=device)
    linear_cross_entropy(h, weight, torch.empty(N, dtype=torch.int64, device=device), kernel=kernel)
    assert seen == chunks


# the head's gradient summed over chunks; from the gradient of all logits
@pytest.mark.parametrize("D", [48, 1500])
def test_gradients_of_several_chunks_are_exact(monkeypatch, D):
    # 3,000 rows as 4 chunks of 768
    monkeypatch.setitem(models.loss.CHUNK_ELEMENTS, "cpu", 331 * 1000)
    h, weight, labels = loss_problem(N=3000, D=D)
    exact = [x.detach().double().requires_grad_() for x in (h, weight)]
    want = torch.autograd.grad(
        F.cross_entropy(F.linear(*exact), labels, ignore_index=IGNORE, reduction="sum"), exact
    )
    got = torch.autograd.grad(linear_cross_entropy(h, weight, labels), (h, weight))
    assert max(map(off, got, want)) < 2e-6  # 1.0003e-6 on one kind of CPU


def test_loss_of_a_batch_of_sequences_and_without_gradients():
    h, weight, labels = loss_problem()
    whole = linear_cross_entropy(h, weight, labels, 5)
    assert torch.equal(
        linear_cross_entropy(h.view(7, 100, -1), weight, labels.view(7, 100), 5), whole
    )
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(h, weight, labels, 5), whole)
    want = torch.autograd.grad(plain_loss(h, weight, labels, 5), (h, weight))
    # a frozen head
    (dh,) = torch.autograd.grad(linear_cross_entropy(h, weight.detach(), labels, 5), h)
    (dw,) = torch.autograd.grad(linear_cross_entropy(h.detach(), weight, labels, 5), weight)
    assert off(dh, want[0]) < 1e-5
    assert off(dw, want[1]) < 1e-5


def test_loss_of_nothing_is_zero_and_of_huge_logits_finite():
    h, weight, labels = loss_problem()
    loss = linear_cross_entropy(h, weight, torch.full_like(labels, IGNORE), 1)
    assert loss == 0
    for g in torch.autograd.grad(loss, (h, weight)):
        assert not g.any()
    loss = linear_cross_entropy(h * 1e4, weight, labels, 1)
    expected = plain_loss(h * 1e4, weight, labels, 1)
    assert loss.isfinite()
    assert abs(loss - expected) < 1e-5 * expected
    for g in torch.autograd.grad(loss, (h, weight)):
        assert g.isfinite().all()


def test_loss_in_bf16_is_as_near_to_the_truth_as_the_plain_one(monkeypatch):
    monkeypatch.setitem(models.loss.CHUNK_ELEMENTS, "cpu", 1)
    h, weight, labels = loss_problem(N=3000, dtype=torch.bfloat16)
    exact = [x.detach().float().requires_grad_() for x in (h, weight)]
    truth = plain_loss(*exact, labels, 2400)
    want = torch.autograd.grad(truth, exact)
    loss = linear_cross_entropy(h, weight, labels, 2400)
    got = torch.autograd.grad(loss, (h, weight))
    plain = torch.autograd.grad(plain_loss(h, weight, labels, 2400), (h, weight))
    # the sum is fp32, the logits are not
    assert loss.dtype == torch.float32
    assert abs(loss - truth) < 1e-3 * truth
    for g, w, p, what in zip(got, want, plain, "hw"):
        assert g.dtype == torch.bfloat16, what
        assert off(g, w) < 0.005, what
        assert off(g, w) < 1.5 * off(p, w), what


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_vocab_parallel_loss(monkeypatch, dtype):
    """Two threads play two ranks with 166 and 165 of 331 rows; their all_reduce waits for both and
    then combines."""
    monkeypatch.setitem(models.loss.CHUNK_ELEMENTS, "cpu", 1)
    h, weight, labels = loss_problem(dtype=dtype)
    meeting = threading.Barrier(2, timeout=600)
    offered = [None, None]
    losses = [None, None]
    grads = [None, None]

    def rank(r):
        def all_reduce(x, op):
            offered[r] = x.clone()
            meeting.wait()
            both = torch.stack(offered)
            meeting.wait()
            if op == "max":
                return both.amax(0)
            return both.sum(0)

        own_h = h.detach().clone().requires_grad_()
        own_w = weight.detach()[r * 166 : (r + 1) * 166].clone().requires_grad_()
        losses[r] = linear_cross_entropy(own_h, own_w, labels, 500, all_reduce, r * 166)
        grads[r] = torch.autograd.grad(losses[r], (own_h, own_w))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(rank, range(2)))
    whole = linear_cross_entropy(h, weight, labels, 500)
    dh, dw = torch.autograd.grad(whole, (h, weight))
    if dtype == torch.float32:
        tolerance = 1e-5
    else:
        tolerance = 0.01
    assert torch.equal(*losses)
    assert abs(losses[0] - whole) < 1e-6 * whole
    # each rank has a summand of the gradient of h
    assert off(grads[0][0] + grads[1][0], dh) < tolerance
    assert off(torch.cat([grads[0][1], grads[1][1]]), dw) < tolerance


@pytest.mark.parametrize("N", [512, 700])  # whole chunks; and a rest, which is another shape
def test_compiled_loss(monkeypatch, N):
    monkeypatch.setitem(models.loss.CHUNK_ELEMENTS, "cpu", 1)
    h, weight, labels = loss_problem(N)
    kernel = torch.compile(models.loss.softmax_loss, backend="aot_eager", fullgraph=True)
    whole, compiled = (
        linear_cross_entropy(h, weight, labels, 9, **kw) for kw in ({}, {"kernel": kernel})
    )
    assert abs(whole - compiled) < 1e-6 * whole
    for got, want in zip(
        torch.autograd.grad(compiled, (h, weight)), torch.autograd.grad(whole, (h, weight))
    ):
        assert off(got, want) < 1e-6
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(h, weight, labels, 9, kernel=kernel), compiled)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_rotation_equal_torch(dtype):
    """Written by hand for few operators: against torch's own forms and what autograd makes of them,
    in fp64 and in dtype."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, grad, weight = drawn(2, 3, 5, 8), drawn(2, 3, 5, 8), drawn(8)
    angle = drawn(2, 1, 5, 4)

    def plain_rotate(x, interleave):
        a, b = (x[..., 0::2], x[..., 1::2]) if interleave else x.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    norm = RMSNorm(8, eps=1e-5, dtype=dtype)
    norm.weight.data.copy_(weight)
    exact = norm.weight.detach().double().requires_grad_()
    cases = [(lambda x: norm(x), lambda x: F.rms_norm(x, (8,), exact, 1e-5), norm.weight, exact)]
    for interleave in (False, True):
        ours = partial(
            rotate, cos=angle.cos().float(), sin=angle.sin().float(), interleave=interleave
        )
        cases.append((ours, partial(plain_rotate, interleave=interleave), None, None))

        def fused(x, ours=ours):  # the lines that the compiler sees
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.compiler, "is_compiling", lambda: True)
                return ours(x)

        cases.append((fused, partial(plain_rotate, interleave=interleave), None, None))
    for ours, plain, w, w_exact in cases:
        mine = x.to(dtype).requires_grad_()
        true = mine.detach().double().requires_grad_()
        got = ours(mine)
        want = plain(true)
        got.backward(grad.to(dtype)), want.backward(grad.to(dtype).double())
        pairs = [("output", got, want), ("gradient of x", mine.grad, true.grad)]
        name = "RMSNorm" if w is not None else "rotate"
        if w is not None:
            pairs.append(("gradient of weight", w.grad, w_exact.grad))
        for what, a, b in pairs:
            assert a.dtype == dtype
            error = off(a, b)
            limit = 1e-6 if dtype == torch.float32 else 6e-3
            assert error < limit, f"{name}: the {what} is off by {error:.1e} of its norm"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_needs_less_than_a_third_of_the_memory(dtype):
    """On the meta device, for sizes are all that counts here: chunks as on a GPU."""
    N = 16384
    V = 128256
    with torch.device("meta"):
        h = torch.empty(N, 256, dtype=dtype)
        weight = torch.empty(V, 256, dtype=dtype)
        labels = torch.empty(N, dtype=torch.int64)
    h.requires_grad_(), weight.requires_grad_()
    peaks = []
    for function in (plain_loss, linear_cross_entropy):
        with Watch() as memory:
            torch.autograd.grad(function(h, weight, labels, N), (h, weight))
        peaks.append(memory.peak)
    plain, chunked = peaks
    # it does hold the logits and their gradient in fp32: the measure is not blind
    assert plain > 2 * N * V * 4
    assert chunked < plain / 3
