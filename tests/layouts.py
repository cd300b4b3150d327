"""What the parallel tests share: a tiny problem, the plain one-process answer, and the same steps
on a layout."""

import functools
import re
from ast import literal_eval
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Literal
from unittest import mock

import torch
import torch.distributed as dist
from pool import pool
from tables import read_table
from torch.distributed.tensor import DTensor

import distributed.initial
import parallel
from data import Batch
from distributed.checks import check_model
from distributed.experts import balance_experts, expert_parallel
from distributed.float8 import Float8Config, float8_linears
from distributed.launch import LaunchConfig
from distributed.layout import ExpertConfig, Layout, ParallelConfig, all_blocks, local_tensor
from distributed.pipeline import PipelineConfig, pipeline_stages
from distributed.refusals import check_layout
from forks.gpt_oss import GptOss, GptOssConfig
from forks.llama4 import Llama4, Llama4Config
from forks.olmo3 import Olmo3, Olmo3Config
from forks.qwen3_next import Qwen3Next, Qwen3NextConfig
from lora.lora import LoraConfig, lora_linears
from models.deepseek import DeepSeek, DeepSeekConfig
from models.llama3 import Llama3, Llama3Config
from models.loss import IGNORE
from models.qwen3 import Qwen3, Qwen3Config
from parallel import TP_STYLES
from rl.decoding import rollout
from storage.adapters import is_adapter
from storage.hf import load_hf, save_hf

LR = 1e-3
STEPS = 2
T = 16
SMALL = dict(
    dim=32,
    n_layers=4,
    n_heads=8,
    n_kv_heads=4,
    head_dim=8,
    ffn_dim=64,
    vocab_size=101,
    max_seq_len=64,
)


@dataclass(kw_only=True)
class Flags(ParallelConfig, ExpertConfig, LaunchConfig, PipelineConfig, Float8Config, LoraConfig):
    """The option groups that train_*.py inherit, but for those of data, checkpoints and metrics."""

    # when gradients are reduced, in place of what the memory decides
    reduce_grads: Literal["auto", "last", "always"] = "auto"


MOE = dict(n_experts=8, top_k=2, moe_ffn_dim=32)
SPARSE = {k: v for k, v in SMALL.items() if k != "ffn_dim"} | MOE
AUX_COEF = 0.02
BIAS_RATE = 1e-3
MODELS = {
    Llama3Config: Llama3,
    Qwen3Config: Qwen3,
    DeepSeekConfig: DeepSeek,
    GptOssConfig: GptOss,
    Llama4Config: Llama4,
    Olmo3Config: Olmo3,
    Qwen3NextConfig: Qwen3Next,
}
KINDS = {  # a word of layouts.txt -> fields of the model's config
    "llama3": {},
    "qwen3": dict(model="qwen3"),
    "qwen3_moe": dict(model="qwen3", **MOE),
    "deepseek": dict(model="deepseek"),
    "mtp": dict(model="deepseek", mtp_depth=1),
    "v2": dict(
        model="deepseek", score_func="softmax", norm_topk_prob=False, route_scale=2.0, q_lora_rank=0
    ),
}
MLA = dict(
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=8,
    qk_rope_head_dim=4,
    v_head_dim=8,
    moe_ffn_dim=32,
)


def fields_of(text: str, **words: dict) -> dict:
    """{name: value} of a text like "tp=2 ac=op mtp"; a word without = stands for the fields that
    `words` or KINDS give it."""
    found = {}
    for name, given, value in (word.partition("=") for word in text.split()):
        of_python = re.fullmatch(r"[-\d.e]+|True|False|None|[\[(].*[\])]", value)
        found |= (
            {name: literal_eval(value) if of_python else value} if given else (KINDS | words)[name]
        )
    return found


def layouts_of(section: str, **words: dict) -> dict[str, tuple[int, dict, dict]]:
    """{"layouts.txt:LINE": (processes, flags, batch and model)} of a section of layouts.txt."""
    found = {}
    for place, row in read_table("layouts.txt")[section].items():
        processes, flags, problem = row.split("|")
        found[place] = (int(processes), fields_of(flags, **words), fields_of(problem, **words))
    return found


def config(model="llama3", **changes):
    if model == "deepseek":
        small = {k: v for k, v in SMALL.items() if k not in ("n_kv_heads", "head_dim")}
        return DeepSeekConfig(**{**small, **MLA, **changes})
    if model == "gpt_oss":
        return GptOssConfig(**SPARSE | {"sliding_window": 5} | changes)
    if model == "llama4":
        return Llama4Config(
            **SMALL
            | MOE
            | {"top_k": 1, "moe_every": 2, "chunk_size": 5, "floor_scale": 3}
            | changes
        )
    if model == "qwen3_next":  # an attention behind three delta rules
        return Qwen3NextConfig(
            **SPARSE
            | dict(linear_k_dim=8, linear_v_dim=8, shared_ffn_dim=32)
            | changes
            | {"n_layers": 4}
        )
    if model == "olmo3":  # a layer that sees all tokens behind three with a window
        return Olmo3Config(**SMALL | {"sliding_window": 5} | changes | {"n_layers": 4})
    return {"llama3": Llama3Config, "qwen3": Qwen3Config}[model](**{**SMALL, **changes})


def on_meta(model_config):
    """A model without memory."""
    with torch.device("meta"):
        return MODELS[type(model_config)](model_config)


def random_tokens(*shape, vocab=101, seed=0):
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))


def balances(stages) -> dict:
    """Layer number -> the Balance of its experts."""
    return {
        i: block.moe.balance
        for s in stages
        for i, block in all_blocks(s).items()
        if hasattr(block, "moe")
    }


def n_steps(model_config) -> int:
    """STEPS; with experts one: after it a rounding may send a token to another expert, and nothing
    would be proven."""
    if getattr(model_config, "n_experts", 0):
        return 1
    return STEPS


def global_batch(step: int, n: int, doc_mask: bool) -> Batch:
    """(n, T) sequences with ragged masks: no two sequences have equally many valid tokens, one has
    none."""
    g = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, 101, (n, T), generator=g)
    labels = torch.randint(0, 101, (n, T), generator=g)
    for i in range(n):
        labels[i, : (3 * i + step) % T] = IGNORE
    labels[n - 1] = IGNORE
    positions = torch.arange(T).repeat(n, 1)
    doc_ids = None
    if doc_mask:
        doc_ids = (torch.rand(n, T, generator=g) < 0.2).long().cumsum(1)
        starts = torch.cat([torch.ones(n, 1, dtype=torch.bool), doc_ids.diff(dim=1) > 0], 1)
        positions = positions - torch.where(starts, positions, 0).cummax(1).values
    return Batch(tokens, labels, positions, doc_ids, n, hash="")


def lora_flags(flags: dict) -> dict:
    return {name: value for name, value in flags.items() if name.startswith("lora_")}


def initialised(model_config, cfg, seed: int):
    """A plain model with its initial weights, and with adapters if cfg asks for them."""
    model = MODELS[type(model_config)](model_config)
    if cfg.lora_rank:
        lora_linears(model, cfg)
    with drawn_adapters():
        draw_weights(model, Layout(), seed)
    return model


def draw_weights(stage, layout, seed: int) -> None:
    """The initial weights of the tests: as drawn for a run, but with routers that are sure of what
    they choose. With the usual 0.02 hundreds of choices would hang on the fourth digit."""
    usual = parallel.initial_values

    def with_sure_routers(stage):
        values = usual(stage)
        for fqn in values:
            if fqn.endswith("router.weight"):
                values[fqn] = (0.0, 0.5)
        return values

    with mock.patch.object(parallel, "initial_values", with_sure_routers):
        parallel.init_weights(stage, layout, seed)


def drawn_adapters():
    """B not at 0, where A's gradient would be 0 in the first step."""
    return mock.patch.object(distributed.initial, "ZERO", 0.02)


def reference(model_config, n: int, doc_mask=False, lora=None) -> list[dict]:
    """The steps of AdamW on one process in plain torch: no parallel.py, no FSDP, no chunked loss,
    torch's own clipping. Computed once for all layouts of a model."""
    return reference_of(
        tuple(asdict(model_config).items()),
        type(model_config),
        n,
        doc_mask,
        tuple((lora or {}).items()),
    )


@functools.cache
def reference_of(fields: tuple, kind, n: int, doc_mask: bool, lora: tuple) -> list[dict]:
    model_config = kind(**dict(fields))
    lora = dict(lora)
    model = initialised(model_config, Flags(**lora), clear_seed(model_config, n, doc_mask, lora))
    margins = watch_margins(model)
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(map(is_adapter, params)) if lora else len(params) == len(list(model.parameters()))
    for balance in balances([model]).values():
        balance.aux_scale = AUX_COEF / n
    optimizer = torch.optim.AdamW(params.values(), lr=LR)
    out = []
    for step in range(n_steps(model_config)):
        b = global_batch(step, n, doc_mask)
        logits = model(b.tokens, positions=b.positions, doc_ids=b.doc_ids).float()
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), b.labels.flatten(), ignore_index=IGNORE
        )
        # a term of the gradient only; test_deepseek.py checks it by itself
        if getattr(model, "mtp", None) is not None:
            for balance in balances([model]).values():
                balance.load = None
            model(b.tokens, b.labels, b.positions, b.doc_ids, (b.labels != IGNORE).sum()).backward()
        else:
            loss.backward()
        grads = {n: p.grad.clone() for n, p in params.items()}
        assert not [n for n, grad in grads.items() if is_adapter(n) and not grad.any()]
        norm = torch.nn.utils.clip_grad_norm_(params.values(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert step > 0 or min(margins, default=1) > 1e-4
        for balance in balances([model]).values():
            direction = torch.sign(balance.load.mean() - balance.load) * BIAS_RATE
            balance.bias += 0 if lora else direction - direction.mean()
            balance.load = None
        biases = {fqn: balance.bias.clone() for fqn, balance in balances([model]).items()}
        out.append({"loss": loss.item(), "norm": norm.item(), "grads": grads, "biases": biases})
    b = global_batch(99, n, doc_mask)
    with torch.no_grad():
        logits = model(b.tokens, positions=b.positions, doc_ids=b.doc_ids).float()
        val = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), b.labels.flatten(), ignore_index=IGNORE
        ).item()
    out.append(
        {"val": val, "weights": {n: p.detach().clone() for n, p in model.named_parameters()}}
    )
    return out


@functools.cache
def clear_seed_of(fields: tuple, kind, n: int, doc_mask: bool, lora: tuple) -> int:
    b = global_batch(0, n, doc_mask)
    for seed in range(3, 1000):
        model = initialised(kind(**dict(fields)), Flags(**dict(lora)), seed)
        margins = watch_margins(model)
        # with gradients: MTP is for training only
        model(b.tokens, b.labels, b.positions, b.doc_ids)
        if min(margins, default=1) > 1.2e-4:
            return seed


def clear_seed(model_config, n: int, doc_mask: bool, lora=None) -> int:
    """A seed whose first step routes clearly: routing is discrete, and a close call may go the
    other way in another layout."""
    return clear_seed_of(
        tuple(asdict(model_config).items()),
        type(model_config),
        n,
        doc_mask,
        tuple((lora or {}).items()),
    )


def watch_margins(model) -> list[float]:
    """Fills up with the distance between the last chosen and the first not chosen expert's score,
    of each call."""
    margins = []
    c = model.config
    for balance in balances([model]).values():

        def choose(scores, k, limit=lambda scores: scores, usual=balance.choose, bias=balance.bias):
            scores = scores.detach() + bias
            top = limit(scores).topk(k + 1, dim=-1).values
            # infinite where a token's groups hold no more than k
            margins.append((top[:, k - 1] - top[:, k]).min().item())
            # the auxiliary loss counts the best scores as well
            if c.__class__ is DeepSeekConfig and c.score_func == "sigmoid":
                top = (scores - bias).topk(k + 1, dim=-1).values
                margins.append((top[:, k - 1] - top[:, k]).min().item())
            if c.__class__ is DeepSeekConfig and c.top_k_groups < c.n_groups:
                grouped = scores.unflatten(-1, (c.n_groups, -1))
                if c.score_func == "sigmoid":
                    best = grouped.topk(2).values.sum(-1)
                else:
                    best = grouped.amax(-1)
                best = best.topk(c.top_k_groups + 1).values
                margins.append((best[:, -2] - best[:, -1]).min().item())
            return usual(scores - bias, k, limit)

        balance.choose = choose
    return margins


def full(t):
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def build(model_config, flags: dict, n: int, local_batch_size: int, seed=3):
    """(stages, layout) as a recipe builds them, in fp32 unless the flags say otherwise."""
    cfg = Flags(**{"compute_dtype": "float32", **flags})
    layout = check_layout(
        cfg,
        model_config,
        seq_len=T,
        local_batch_size=local_batch_size,
        global_batch_size=n,
        device="cpu",
    )
    if cfg.compute_dtype == "bfloat16":
        layout = replace(layout, compute_dtype=torch.bfloat16)
    layout = parallel.make_mesh(layout)
    model = on_meta(model_config)
    check_model(model, layout, TP_STYLES, cfg.ac, cfg.param_dtype)
    if cfg.pp > 1:
        stages = pipeline_stages(model, layout, cfg)
    else:
        stages = [model]
    for stage in stages:
        if cfg.float8 != "off":
            float8_linears(stage, layout, cfg)
        if cfg.tp > 1:
            parallel.tensor_parallel(stage, layout, cfg)
        if layout.has_experts:
            expert_parallel(stage, layout, aux_coef=AUX_COEF)
        if cfg.cp > 1:
            parallel.context_parallel(stage, layout, cfg)
        if cfg.lora_rank:
            lora_linears(stage, cfg)
        if cfg.ac not in ("none", "budget"):
            parallel.checkpoint_activations(stage, cfg)
        if cfg.compile:
            parallel.compile_blocks(stage, layout, cfg)
        parallel.shard(stage, layout, cfg)
        if cfg.reduce_grads != "auto":
            stage.reduces_always = cfg.reduce_grads == "always"
        draw_weights(stage, layout, seed)
    return stages, layout


def local_batch(b: Batch, layout) -> Batch:
    """This data rank's slice, (accumulation, local batch, T)."""
    size = layout.global_batch_size // layout.data_ranks

    def pick(x):
        if x is None:
            return None
        return x[layout.data_rank * size :][:size].unflatten(0, (layout.accumulation, -1))

    return replace(
        b,
        tokens=pick(b.tokens),
        labels=pick(b.labels),
        positions=pick(b.positions),
        doc_ids=pick(b.doc_ids),
    )


def train(
    model_config, flags: dict, n: int, local_batch_size: int, doc_mask=False, mutate=None, seed=None
) -> list[dict]:
    """The same steps through parallel.py on this rank's part of the layout. `mutate`: a context
    with a mistake in it; seed: of clear_seed, if it was asked already."""
    with mutate() if mutate else nullcontext():
        return run_steps(model_config, flags, n, local_batch_size, doc_mask, seed)


def run_steps(model_config, flags, n, local_batch_size, doc_mask, seed=None) -> list[dict]:
    seed = seed or clear_seed(model_config, n, doc_mask, lora_flags(flags))
    with drawn_adapters():
        stages, layout = build(model_config, flags, n, local_batch_size, seed)
    params = [(fqn, p) for s in stages for fqn, p in s.named_parameters()]
    trained = [(fqn, p) for fqn, p in params if p.requires_grad]
    # AdamW works number by number, so a rank may update its part alone. For whole DTensors torch
    # plans the placements of each operator anew on every mesh, six times as long as all other work
    # of a layout; test_optim.py and the recipes' tests do it.
    parts = [local_tensor(p.detach()) for _, p in trained]
    optimizer = torch.optim.AdamW(parts or [torch.zeros(1)], lr=LR)
    out = []
    for step in range(n_steps(model_config)):
        loss = parallel.forward_backward(
            stages, local_batch(global_batch(step, n, doc_mask), layout), layout
        )
        loss, _ = parallel.reduce_loss(loss, layout)
        grads = {fqn: full(torch.zeros_like(p) if p.grad is None else p.grad) for fqn, p in trained}
        assert all(p.grad is None for _, p in params if not p.requires_grad)
        norm = parallel.clip_grad_norm(stages, 0.5, layout)
        for part, (_, p) in zip(parts, trained):
            if p.grad is None:
                part.grad = None
            else:
                part.grad = local_tensor(p.grad)
            p.grad = None
        optimizer.step()
        if getattr(model_config, "n_experts", 0):
            balance_experts(stages, layout, "none" if flags.get("lora_rank") else "bias", BIAS_RATE)
        biases = {fqn: balance.bias.clone() for fqn, balance in balances(stages).items()}
        out.append({"loss": loss.item(), "norm": norm.item(), "grads": grads, "biases": biases})
    val, *_ = parallel.evaluate(
        stages, [local_batch(global_batch(99, n, doc_mask), layout)], layout
    )
    out.append({"val": val, "weights": {fqn: full(p) for fqn, p in params}})
    dist.barrier()
    return out


def first_difference(got: list[dict], want: list[dict]) -> str:
    """'' when a rank's steps equal the reference's within the tolerances of DESIGN, else what
    differs first, by fqn."""
    for step, (g, w) in enumerate(zip(got[:-1], want[:-1], strict=True)):
        found = []
        if abs(g["loss"] - w["loss"]) > 1e-5:
            found.append(f"loss {g['loss']} instead of {w['loss']}")
        off = {fqn: relative(grad, w["grads"][fqn]) for fqn, grad in g["grads"].items()}
        # later steps start from weights in which AdamW has amplified the rounding of the first
        if bad := [fqn for fqn in off if off[fqn] > (1e-4 if step == 0 else 5e-4)]:
            found.append(
                f"gradient of {bad[0]} off by {off[bad[0]]:.1e} ({len(bad)} of {len(off)} are)"
            )
        if abs(g["norm"] - w["norm"]) > 2e-5 * w["norm"]:
            # a gradient counted twice, or not at all, leaves its own square here
            extra = g["norm"] ** 2 - w["norm"] ** 2
            guilty = min(
                w["grads"], key=lambda fqn: abs(abs(extra) - w["grads"][fqn].norm().item() ** 2)
            )
            square = w["grads"][guilty].norm().item() ** 2
            # else no single parameter is to blame
            fits = not bad and abs(abs(extra) - square) < 0.01 * square
            found.append(
                f"grad norm {g['norm']} instead of {w['norm']}"
                + f", as if {guilty} were miscounted" * fits
            )
        found += [
            f"bias of blocks.{fqn}"
            for fqn, b in g["biases"].items()
            if not torch.equal(b, w["biases"][fqn])
        ][:1]
        if found:
            return f"step {step}: " + "; ".join(found)
        # in other batches a rounding may send a token to another expert: the step is the proof
        if w["biases"]:
            return ""
    if abs(got[-1]["val"] - want[-1]["val"]) > 2e-5:
        return f"validation loss {got[-1]['val']} instead of {want[-1]['val']}"
    for fqn, weight in got[-1]["weights"].items():
        # AdamW turns a near-zero gradient's rounding into a step of either sign: a few weights may
        # be off by that much
        error = (weight - want[-1]["weights"][fqn]).abs()
        if error.max() > 2 * LR * STEPS or error.mean() > 1e-6:
            return f"weight {fqn} off by up to {error.max():.1e}, {error.mean():.1e} on average"
    return ""


def relative(a, b) -> float:
    return ((a - b).norm() / b.norm().clamp(min=1e-8)).item()


def compare(processes: int, flags: dict, problem: dict, mutate=None) -> str:
    """'' or the first difference of any rank to the one-process reference. What is compiled runs
    without inductor."""
    problem = dict(problem)
    mutate = mutate or (without_inductor if "compile" in flags else None)
    n = problem.pop("n")
    b = problem.pop("b")
    doc = problem.pop("doc", False)
    # stages need blocks to share; elsewhere a block of each kind and its neighbour show as much
    if "pp" not in flags:
        problem = {"n_layers": 3 if problem.get("model") == "deepseek" else 2} | problem
    model_config = config(**problem)
    want = reference(model_config, n, doc, lora_flags(flags))
    seed = clear_seed(model_config, n, doc, lora_flags(flags))
    results = pool(processes).run(train, model_config, flags, n, b, doc, mutate, seed)
    differences = [d for got in results if (d := first_difference(got, want))]
    # every rank sees a wrong norm, and only the rank that holds the parameter why
    return next((d for d in differences if "gradient" in d), differences[0] if differences else "")


@contextmanager
def without_inductor():
    """Dynamo's and AOTAutograd's graphs, run op by op: what can break under FSDP and TP, without
    minutes of g++."""
    # a worker of the pool has the graphs of the tests before, and only so many of one function are
    # kept
    torch._dynamo.reset()
    with mock.patch.object(torch, "compile", partial(torch.compile, backend="aot_eager")):
        yield


def equals_transformers(ours, model, folder):
    """Our model, read from their files, has their logits and gradients; returns their model again,
    read from our files."""
    model.save_pretrained(folder / "theirs")
    load_hf(ours, folder / "theirs")
    tokens, labels = torch.randint(101, (2, 2, 40), generator=torch.Generator().manual_seed(1))
    want = model(tokens).logits
    far = (ours(tokens) - want).abs().max() / want.abs().max()
    assert far <= 2e-5, f"logits differ from those of transformers by {far:.1e} of the largest"
    model.zero_grad()
    torch.nn.functional.cross_entropy(want.flatten(0, 1), labels.flatten()).backward()
    ours(tokens, labels, loss_denom=labels.numel()).backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    names = ours.hf_keys()
    off = {fqn: relative(p.grad, stacked(grads, names[fqn])) for fqn, p in ours.named_parameters()}
    bad = [f"{fqn} by {error:.1e}" for fqn, error in off.items() if not error < 1e-4]
    said = f"{len(bad)} of {len(off)} gradients differ from those of transformers"
    assert bad == [], f"{said}: {', '.join(bad[:3])}"
    for fqn, p in ours.named_parameters():
        assert p.grad.any(), f"the gradient of {fqn} is 0"
    save_hf(ours, folder / "ours", dtype=torch.float32)
    again = type(model).from_pretrained(
        folder / "ours", attn_implementation="eager", dtype=torch.float32
    )
    torch.testing.assert_close(again(tokens).logits, want)
    return again


def drawn(model):
    """Weights that leave nothing out: all of them are random."""
    for i, p in enumerate(model.parameters()):
        torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(i))
    return model


def assert_samples_are_the_best_tokens(model):
    """Greedy samples with a cache are what whole forwards find best, beyond a window or chunk, from
    prompts of two lengths."""
    prompts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [11, 12]]
    samples = rollout(model, prompts, torch.zeros(2, 1, 20), 0.0, [], max_len=40)
    for prompt, sample in zip(prompts, samples, strict=True):
        with torch.no_grad():
            logprobs = model(torch.tensor([prompt + sample.ids]))[0].log_softmax(-1)
        best = logprobs[len(prompt) - 1 : -1].max(-1)
        assert best.indices.tolist() == sample.ids
        assert len(sample.ids) == 20
        torch.testing.assert_close(best.values, torch.tensor(sample.logprobs), rtol=1e-4, atol=1e-4)


def stacked(theirs: dict, names) -> torch.Tensor:
    """Our tensor from transformers' state dict, whether it keeps experts one by one or (5.x, in
    memory) stacked and fused."""
    if isinstance(names, str):
        return theirs[names]
    if names[0] in theirs:
        return torch.stack([theirs[n] for n in names])
    layer = names[0].split(".experts.")[0]
    which = names[0].split(".")[-2]
    if which == "down_proj":
        return theirs[f"{layer}.experts.down_proj"]
    gate, up = theirs[f"{layer}.experts.gate_up_proj"].chunk(2, dim=1)
    if which == "gate_proj":
        return gate
    return up
