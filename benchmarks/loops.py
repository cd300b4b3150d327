"""One training step each of our Llama, of transformers' LlamaForCausalLM and of torchtitan's model,
and how to time them.

Every variant lives in a process of its own, so that peak memory is its own; the processes take
turns, so that what else the machine does meets all of them alike. Used by train_cpu.py and
train.py.
"""

import importlib
import importlib.util
import multiprocessing
import os
import re
import statistics
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

REPO = Path(__file__).parent.parent
# Not torch, and none of our modules that import it: the parent only waits, and a child's peak
# memory starts with its parent's


@dataclass(kw_only=True)
class StepConfig:
    model_args: str = ""  # fields of Llama3Config: "n_layers=4,dim=512"
    seq_len: int = 256  # tokens per sequence
    local_batch_size: int = 4  # sequences per step
    # of matmuls and activations; weights and optimizer stay float32
    dtype: Literal["float32", "bfloat16"] = "float32"
    # activations recomputed: all systems; transformers has no op, and keeps all
    ac: Literal["none", "op", "full"] = "none"
    # matmuls, on a GPU
    float8: Literal["off", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = "off"
    flags: str = ""  # more flags of train_llama3.py, for ours: "--optimizer muon"
    # on a CPU count the operators of an eager step, and the bytes that they write
    counts: bool = True
    rounds: int = 9  # rounds that count; their order changes
    steps_per_round: int = 2  # steps per turn of a variant


def variants(compiled: bool, eager: bool = True, fsdp: bool = False) -> list[str]:
    """'system' or 'system, compiled'; ours first. fsdp: torchtitan with FSDP2 as well, see
    torchtitan()."""
    systems = ["ours"] + ["transformers"] * (importlib.util.find_spec("transformers") is not None)
    if importlib.util.find_spec("torchtitan") is not None:
        systems += ["torchtitan FSDP2"] * fsdp + ["torchtitan"]
    return [s for s in systems if eager] + [f"{s}, compiled" for s in systems if compiled]


def random_batch(cfg, device):
    """The same tokens for everyone; labels are the next tokens. (B, T) each."""
    import torch

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(
        llama_config(cfg).vocab_size, (cfg.local_batch_size, cfg.seq_len + 1), generator=generator
    ).to(device)
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def llama_config(cfg):
    from flags.config import override_fields
    from models.llama3 import Llama3Config

    return override_fields(Llama3Config(), cfg.model_args, "--model_args")


def ours(cfg, device, compiled):
    """(model, step) exactly as train_llama3.py makes them on one process; step() returns the loss,
    a 0-d tensor."""
    import torch

    import parallel
    import train_llama3
    from data import Batch
    from distributed.float8 import float8_linears, float8_scales
    from distributed.launch import connect
    from distributed.refusals import check_layout
    from flags.config import parse_config
    from models.llama3 import Llama3
    from parallel import make_mesh
    from training.optim import skip_if_not_finite

    shape = [
        "--seq_len",
        cfg.seq_len,
        "--local_batch_size",
        cfg.local_batch_size,
        "--compute_dtype",
        cfg.dtype,
        "--ac",
        cfg.ac,
    ]
    shape += ["--float8", cfg.float8] * (cfg.float8 != "off")
    recipe = parse_config(
        train_llama3.Config, [*map(str, shape), *["--compile"] * compiled, *cfg.flags.split()]
    )
    config = llama_config(cfg)
    layout = check_layout(
        recipe,
        config,
        seq_len=cfg.seq_len,
        local_batch_size=cfg.local_batch_size,
        global_batch_size=-1,
        device=device.type,
    )
    layout = make_mesh(connect(layout, recipe, device.type))
    with torch.device("meta"):
        model = Llama3(config)
    stages = [model]
    if recipe.float8 != "off":
        float8_linears(model, layout, recipe)
    if recipe.ac not in ("none", "budget"):
        parallel.checkpoint_activations(model, recipe)
    if recipe.compile:
        parallel.compile_blocks(model, layout, recipe)
    parallel.shard(model, layout, recipe)
    parallel.init_weights(model, layout, seed=0)
    optimizers = train_llama3.build_optimizers(stages, recipe)
    tokens, labels = random_batch(cfg, device)
    positions = torch.arange(cfg.seq_len, device=device).expand(cfg.local_batch_size, -1)
    batch = Batch(
        tokens[None], labels[None], positions[None], None, samples=cfg.local_batch_size, hash=""
    )

    def step():
        loss = parallel.forward_backward(stages, batch, layout)
        grad_norm = parallel.clip_grad_norm(stages, recipe.max_norm, layout)
        skip_if_not_finite(optimizers, grad_norm, on_host=recipe.cpu_offload)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if recipe.float8_all_gather:
            float8_scales(stages)
        return loss[0]

    return model, step


def plain_step(model, loss_of, cfg, device, autocast=True):
    """The loop that everybody writes: autocast where the dtype asks for it, clip, AdamW."""
    import torch

    options = {"fused": True} if device.type == "cuda" else {"foreach": True}
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, 3e-3, (0.9, 0.95), 1e-8, weight_decay=0.1, **options)
    tokens, labels = random_batch(cfg, device)

    def step():
        with torch.autocast(
            device.type, torch.bfloat16, enabled=autocast and cfg.dtype == "bfloat16"
        ):
            loss = loss_of(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params, 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def transformers(cfg, device, compiled):
    """As transformers' Trainer runs it with bf16, torch_compile and its default, fused AdamW."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **llama_config(cfg).to_hf() | {"use_cache": False}, attn_implementation="sdpa"
    )
    with device:
        model = LlamaForCausalLM(config).float().train()
    if cfg.ac == "full":
        model.gradient_checkpointing_enable()
    model.forward = torch.compile(model.forward) if compiled else model.forward
    return model, plain_step(
        model, lambda x, y: model(x, labels=y, shift_labels=y).loss, cfg, device
    )


def torchtitan(cfg, device, compiled, fsdp=False):
    """torchtitan 0.2.2 by its own functions, in the order of its Trainer: float8, recomputation,
    compiled blocks, loss.

    On one device its Trainer takes autocast; fsdp: as on several, FSDP2 with bf16 weights, here on
    a mesh of one. So its users' speed on one GPU is the better of the two. Its RoPE turns
    neighbours, which costs the same.
    """
    import torch
    import torch.distributed as dist
    from torchtitan.components.loss import build_cross_entropy_loss
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.activation_checkpoint import apply_ac
    from torchtitan.models.llama3.infra import parallelize
    from torchtitan.models.llama3.model.args import TransformerModelArgs
    from torchtitan.models.llama3.model.model import Transformer

    c = llama_config(cfg)
    job = JobConfig()
    if c.head_dim * c.n_heads != c.dim:
        raise ValueError(
            f"torchtitan needs n_heads x head_dim = dim, not {c.n_heads} x {c.head_dim} and {c.dim}"
        )
    job.compile.enable = compiled
    job.activation_checkpoint.mode = "selective" if cfg.ac == "op" else cfg.ac
    job.activation_checkpoint.selective_ac_option = "op"
    with torch.device("meta"):
        model = Transformer(
            TransformerModelArgs(
                dim=c.dim,
                n_layers=c.n_layers,
                n_heads=c.n_heads,
                n_kv_heads=c.n_kv_heads,
                vocab_size=c.vocab_size,
                multiple_of=c.ffn_dim,
                ffn_dim_multiplier=c.ffn_dim / int(8 * c.dim / 3),
                rope_theta=c.rope_theta,
                max_seq_len=cfg.seq_len,
            )
        )
    if cfg.float8 != "off":
        from torchtitan.components.quantization.float8 import Float8LinearConverter

        job.quantize.linear.float8.recipe_name = cfg.float8
        job.quantize.linear.float8.filter_fqns = ["output"]  # as in all its own configurations
        Float8LinearConverter(job, ParallelDims(1, 1, 1, 1, 1, 1, 1, world_size=1)).convert(model)
    if cfg.ac != "none":
        saved = parallelize._op_sac_save_list
        apply_ac(
            model, job.activation_checkpoint, model_compile_enabled=compiled, op_sac_save_list=saved
        )
    if compiled:
        parallelize.apply_compile(model, job.compile)
    if fsdp:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        mesh = dist.init_device_mesh("cuda", (1,), mesh_dim_names=("fsdp",))
        param_dtype = getattr(torch, cfg.dtype)
        parallelize.apply_fsdp(
            model, mesh, param_dtype=param_dtype, reduce_dtype=torch.float32, pp_enabled=False
        )
    model.to_empty(device=device)
    with torch.no_grad():
        model.init_weights()
    loss_fn = build_cross_entropy_loss(job)
    return model, plain_step(
        model, lambda x, y: loss_fn(model(x), y) / y.numel(), cfg, device, autocast=not fsdp
    )


def same_as_ours(model, cfg) -> None:
    """Our model with transformers' weights has its loss, so both do the same arithmetic."""
    import torch

    from models.llama3 import Llama3

    with torch.no_grad():
        plain = Llama3(llama_config(cfg)).to(device := model.device)
        theirs = model.state_dict()
        plain.load_state_dict({fqn: theirs[key] for fqn, key in plain.hf_keys().items()})
        tokens, labels = random_batch(cfg, device)
        mine = plain(tokens, labels=labels) / labels.numel()
        other = model(tokens, labels=labels, shift_labels=labels).loss
    assert abs(mine - other) < 1e-4 * other, (
        f"loss {mine.item()} here, {other.item()} in transformers"
    )


def peak_bytes(device) -> int:
    """Peak so far: allocated tensors on a GPU, resident memory on a CPU."""
    from training.metrics import peak_memory_gib

    status = Path("/proc/self/status")
    # getrusage starts with the peak of the process that started this one
    if device.type == "cpu" and status.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024
    return round(peak_memory_gib(device) * 2**30)


def count_ops(step) -> dict:
    """Operators of one step that write memory, and the bytes that they write; views write nothing."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_iter

    no_write = {
        "aten::_unsafe_view",
        "aten::empty.memory_format",
        "aten::empty_like",
        "aten::empty_strided",
        "aten::new_empty",
    }

    def size(x):
        return sum(
            t.numel() * t.element_size() for t in tree_iter(x) if isinstance(t, torch.Tensor)
        )  # noqa: E731

    counts = {"ops": 0, "bytes": 0}

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            schema = func._schema
            written = 0
            for i, arg in enumerate(schema.arguments):
                if arg.alias_info is not None and arg.alias_info.is_write:
                    written += size(args[i] if i < len(args) else (kwargs or {}).get(arg.name))
            results = out if isinstance(out, tuple) else (out,)
            for value, ret in zip(results, schema.returns):
                written += (
                    size(value) if ret.alias_info is None and func.name() not in no_write else 0
                )
            if written:
                counts["ops"] += 1
                counts["bytes"] += written
            return out

    with Count():
        step()
    return counts


def work(pipe, name, cfg, device_type):
    """A child's life: build, warm up, then a turn whenever the parent asks; at the end memory and
    counts."""
    import torch

    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device(device_type)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    system, _, compiled = name.partition(", ")
    build = {
        "ours": ours,
        "transformers": transformers,
        "torchtitan": torchtitan,
        "torchtitan FSDP2": partial(torchtitan, fsdp=True),
    }[system]
    clock = time.process_time if device_type == "cpu" else time.perf_counter
    wait = torch.cuda.synchronize if device_type == "cuda" else lambda: None
    # what is cached: the others need it
    give_back = torch.cuda.empty_cache if device_type == "cuda" else lambda: None
    begin = clock()
    try:
        modules = {
            "ours": "train_llama3",
            "transformers": "transformers.models.llama.modeling_llama",
            "torchtitan": "torchtitan.models.llama3",
        }
        # the first AdamW of a process imports it
        for module in (modules[system.split()[0]], "torch._dynamo"):
            importlib.import_module(module)
        before = peak_bytes(device)
        model, step = build(cfg, device, bool(compiled))
        for _ in range(2):  # the second has the optimizer's state
            step()
        wait()
        give_back()
        pipe.send({"first": clock() - begin})
        while pipe.recv() == "turn":
            if device_type == "cuda":
                step()  # takes the memory again, and wakes the GPU: not timed
                wait()
            begin = clock()
            for _ in range(cfg.steps_per_round):
                step()
            wait()
            took = clock() - begin
            give_back()
            pipe.send(took / cfg.steps_per_round)
        report = {
            "before": before,
            "peak": peak_bytes(device),
            "parameters": sum(p.numel() for p in model.parameters()),
        }
        if device_type == "cpu" and not compiled and cfg.counts:
            report |= count_ops(step)
            if system == "transformers":
                same_as_ours(model, cfg)
        pipe.send(report)
    except Exception as error:
        pipe.send(error)
        raise
    finally:
        sys.stdout.flush()
        os._exit(0)  # gloo's threads abort now and then in a normal exit


def measure(names: list[str], cfg_of, rounds: int, device_type: str) -> dict[str, dict]:
    """name -> its report with "times": seconds per step, one per round. cfg_of(name) is its
    StepConfig."""
    context = multiprocessing.get_context("spawn")
    pipes = {}
    processes = []
    reports = {}
    try:
        for name in names:
            pipes[name], theirs = context.Pipe()
            processes.append(
                context.Process(
                    target=work, args=(theirs, name.partition(": ")[0], cfg_of(name), device_type)
                )
            )
            processes[-1].start()
            theirs.close()
            print(f"{name} ...", file=sys.stderr, flush=True)
            reports[name] = answer(pipes[name], name) | {"times": []}
        for i in range(rounds + 1):  # the first does not count
            for name in names[i % len(names) :] + names[: i % len(names)]:
                pipes[name].send("turn")
                took = answer(pipes[name], name)
                reports[name]["times"] += [took] * (i > 0)
        for name in names:
            pipes[name].send("end")
            reports[name] |= answer(pipes[name], name)
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return reports


def answer(pipe, name):
    try:
        got = pipe.recv()
    except EOFError:
        got = RuntimeError("the process died")
    if isinstance(got, Exception):
        raise SystemExit(f"{name}: {type(got).__name__}: {got}")
    return got


def ratio_of(reports, name, base) -> float:
    """Median over rounds of base's time / name's time: how many times as fast as base, with each
    round's noise cancelled."""
    return statistics.median(
        b / a for a, b in zip(reports[name]["times"], reports[base]["times"], strict=True)
    )
