"""What cannot work is refused here, before memory is taken: each error says the values, and what to type instead."""
import fnmatch
import math
import os
import re
import shlex
import sys
from collections import Counter
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.layout import AXES, Layout, ParallelConfig, dtype_of_compute, local_slice, local_tensor
from distributed.pipeline import ONE_STAGE_PER_RANK, V_SHAPED, ZERO_BUBBLE, n_microbatches, read_csv, split_stages
from models.loss import IGNORE
from support.config import no_effect


def divisors(*numbers) -> str:
    """'1, 2, 4 or 8': what divides all of the numbers, for error messages."""
    g = math.gcd(*numbers)
    fits = [str(d) for d in range(1, g + 1) if g % d == 0]
    return " or ".join(filter(None, [", ".join(fits[:-1]), fits[-1]]))


def runs_on_cuda(device: str) -> bool:
    """Whether a run with this --device computes on GPUs here."""
    return device == "cuda" or device == "auto" and torch.cuda.is_available()


def facts(cfg: ParallelConfig, model_config, degrees: dict[str, int], on_cuda: bool) -> SimpleNamespace:
    """What decides whether a flag has an effect (Need in config.py): every flag and every field of the model by its name; the
    degrees as they are, dp_shard too; and world_size, on_cuda and dtype, in which the model computes."""
    more = dict(world_size=math.prod(degrees.values()), on_cuda=on_cuda, dtype=dtype_of_compute(cfg, on_cuda))
    return SimpleNamespace(**vars(model_config) | vars(cfg) | degrees | more)


def check_layout(
    cfg: ParallelConfig, model_config, *, seq_len, local_batch_size, global_batch_size, device="auto", world_size=None,
    on_cuda=None,
) -> Layout:
    """The Layout that the flags ask for. Raises ValueError with every violation: the values, and what to type instead.

    on_cuda: a dry run takes GPUs for granted; None = as --device says, and they are counted.
    """
    world_size = world_size or int(os.environ.get("WORLD_SIZE", 1))
    degrees = {axis: getattr(cfg, axis) for axis in AXES}
    errors = [f"--{a} {n} must be at least 1" for a, n in degrees.items() if n < 1 and (a, n) != ("dp_shard", -1)]
    if errors:
        raise ValueError("; ".join(errors))
    others = math.prod(n for a, n in degrees.items() if a != "dp_shard")
    if degrees["dp_shard"] == -1 and world_size % others == 0:
        degrees["dp_shard"] = world_size // others
    named = [a for a in AXES if degrees[a] != -1]
    product = math.prod(degrees[a] for a in named)
    if product != world_size:
        fix = f"leave out --dp_shard (it becomes {world_size // others})" if world_size % others == 0 else "change a degree"
        start = f"start {product} processes"
        if "RANK" not in os.environ and product <= 16:  # plain python; more than a node needs docs/cluster.md
            start += f": torchrun --nproc_per_node {product} {shlex.join(sys.argv)}"
        raise ValueError(
            f"{world_size} process{'es' * (world_size > 1)} but {'*'.join(named)} = {'*'.join(str(degrees[a]) for a in named)} "
            f"= {product}; {fix} or {start}"
        )

    tp, pp, cp = degrees["tp"], degrees["pp"], degrees["cp"]
    data_ranks = degrees["dp_replicate"] * degrees["dp_shard"]
    if local_batch_size < 1:
        raise ValueError(f"--local_batch_size {local_batch_size} must be at least 1")
    if global_batch_size == -1:
        global_batch_size = local_batch_size * data_ranks
    forward = local_batch_size * data_ranks
    if global_batch_size < 1 or global_batch_size % forward:
        near = max(1, round(global_batch_size / forward)) * forward
        errors.append(
            f"--global_batch_size {global_batch_size} is not a multiple of --local_batch_size {local_batch_size} x "
            f"{data_ranks} data rank{'s' * (data_ranks > 1)} = {forward}; use --global_batch_size {near}"
        )
    layout = Layout(cfg, degrees, world_size, local_batch_size, global_batch_size, rank=int(os.environ.get("RANK", 0)))
    layout.mtp = getattr(model_config, "mtp_depth", 0) > 0

    c = model_config
    sizes = {"n_heads": c.n_heads, "n_kv_heads": c.n_kv_heads, "ffn_dim": c.ffn_dim}
    if shared := getattr(c, "n_shared_experts", 0):
        sizes["n_shared_experts x moe_ffn_dim"] = shared * c.moe_ffn_dim
    if odd := [f"{name} {size}" for name, size in sizes.items() if size % tp]:
        errors.append(f"--tp {tp} does not divide {', '.join(odd)}; use {divisors(*sizes.values())}")
    if seq_len < 1:
        raise ValueError(f"--seq_len {seq_len} must be at least 1")
    if seq_len > c.max_seq_len:
        longer = f"--model_args max_seq_len={seq_len}"
        errors.append(f"--seq_len {seq_len} is longer than the model's max_seq_len {c.max_seq_len}; use {longer}")
    pieces = (2 * cp if cp > 1 else 1) * tp  # cp cuts a sequence into 2*cp chunks, tp each rank's part into tp
    if seq_len % pieces:
        rule = " x ".join(["2", "cp"] * (cp > 1) + ["tp"] * (tp > 1))
        near = max(1, min(round(seq_len / pieces), c.max_seq_len // pieces)) * pieces
        errors.append(f"--seq_len {seq_len} is not a multiple of {rule + ' = ' if rule else ''}{pieces}; use --seq_len {near}")
    heads, kv_heads = c.n_heads // tp, c.n_kv_heads // tp
    if cp > 1 and cfg.cp_method == "alltoall" and tp <= c.n_kv_heads and (heads % cp or (kv_heads % cp and cp % kv_heads)):
        errors.append(
            f"--cp_method alltoall needs cp {cp} to divide the {heads} heads of a tp rank, and to divide or be a multiple of "
            f"its {kv_heads} kv heads; use --cp_method allgather"
        )
    local_world, counts = int(os.environ.get("LOCAL_WORLD_SIZE", 1)), on_cuda is None
    if on_cuda is None:
        on_cuda = runs_on_cuda(device)
    if on_cuda and counts and local_world > torch.cuda.device_count():
        errors.append(
            f"{local_world} process{'es' * (local_world > 1)} here, but torch finds {torch.cuda.device_count()} GPUs; "
            "use --device cpu or fewer processes"
        )
    if min(cfg.init_timeout_s, cfg.train_timeout_s) < 1:
        errors.append(f"--init_timeout_s {cfg.init_timeout_s} and --train_timeout_s {cfg.train_timeout_s} must be at least 1")
    errors += no_effect(cfg, facts(cfg, model_config, degrees, on_cuda))
    if cfg.ac == "budget" and not cfg.compile:
        errors.append("--ac budget needs --compile: the compiler chooses what to keep; add --compile or use --ac op")
    if cfg.ac_every < 1 or not 0 <= cfg.ac_budget <= 1:
        errors.append(f"--ac_every {cfg.ac_every} must be at least 1 and --ac_budget {cfg.ac_budget} between 0 and 1")
    if cfg.optimizer_in_backward and (pp > 1 or layout.accumulation > 1 or cfg.cpu_offload):
        errors.append(
            f"--optimizer_in_backward needs one backward per step and gradients on the device, but --pp is {pp}, accumulation "
            f"{layout.accumulation}, --cpu_offload {cfg.cpu_offload}; leave it out"
        )
    if getattr(cfg, "float8", "off") != "off":  # grpo.py does not have it
        errors += float8_errors(layout, c, on_cuda, seq_len)
    errors += expert_errors(layout, c)
    if pp > 1 and layout.accumulation:
        errors += pipeline_errors(layout, c)
    if errors:
        raise ValueError("; ".join(dict.fromkeys(errors)))
    return layout


def float8_errors(layout: Layout, model_config, on_cuda: bool, seq_len: int) -> list[str]:
    cfg, errors = layout.cfg, []
    kind = cfg.float8
    block = {"mxfp8": 32, "nvfp4": 128}.get(kind, 1)
    sequences = cfg.pp_microbatch_size if layout.pp > 1 else layout.local_batch_size
    tokens = sequences * seq_len // layout.cp  # of one forward: the sum that is the weight's gradient is cut into blocks, too
    if on_cuda:
        major, minor = torch.cuda.get_device_capability()
        if (major, minor) < (8, 9):
            errors.append(f"--float8 {kind} needs a GPU with float8 matmuls (H100, L40 or newer); use --float8 off")
        elif block > 1 and major < 10:
            errors.append(f"--float8 {kind} needs a Blackwell GPU (capability 10.0; this one has {major}.{minor}); use rowwise")
    elif kind == "nvfp4" or cfg.float8_experts and kind != "mxfp8":
        wish = "--float8 nvfp4" if kind == "nvfp4" else f"--float8_experts with --float8 {kind}"
        errors.append(f"{wish} needs a GPU, for torchao has no emulation of it; on a CPU use --float8 mxfp8")
    elif cfg.compile:
        errors.append(f"--float8 {kind} is emulated on CPU, and the emulation cannot be compiled; leave out --compile")
    if block > 1 and layout.tp > 1:
        errors.append(f"--float8 {kind} does not split matrices over --tp {layout.tp}; use rowwise, or --tp 1")
    if tokens % block:
        now = f"{sequences} x {seq_len} / {layout.cp} = {tokens}"
        errors.append(f"--float8 {kind} needs a multiple of {block} tokens in a forward, not {now}; use another --seq_len")
    return errors


def expert_errors(layout: Layout, model_config) -> list[str]:
    ep, etp, n_experts = layout.cfg.ep, layout.cfg.etp, getattr(model_config, "n_experts", 0)
    if not n_experts:
        return []
    errors = []
    if etp not in (1, layout.tp):
        errors.append(f"--etp {etp} must be 1 or --tp {layout.tp}")
    if etp > 1 and model_config.moe_ffn_dim % etp:
        errors.append(f"--etp {etp} does not divide moe_ffn_dim {model_config.moe_ffn_dim}; use --etp 1")
    lenders = layout.dp_shard * layout.cp * (1 if etp > 1 else layout.tp)
    if ep < 1 or n_experts % ep or lenders % ep:
        ranks = f"dp_shard x cp{' x tp' if etp == 1 else ''} = {lenders}"
        errors.append(f"--ep {ep} must divide n_experts {n_experts} and {ranks}; use {divisors(n_experts, lenders)}")
    return errors


def pipeline_errors(layout: Layout, model_config) -> list[str]:
    cfg, pp, name = layout.cfg, layout.pp, layout.cfg.pp_schedule
    counts = {"pp_microbatch_size": cfg.pp_microbatch_size, "pp_layers_per_stage": cfg.pp_layers_per_stage}
    if wrong := [f"--{flag} {n} must be at least 1" for flag, n in counts.items() if n is not None and n < 1]:
        return wrong
    if layout.local_batch_size % cfg.pp_microbatch_size:
        return [f"--pp_microbatch_size {cfg.pp_microbatch_size} does not divide --local_batch_size {layout.local_batch_size}; "
                f"use {divisors(layout.local_batch_size)}"]
    errors, n, splits_backward = [], n_microbatches(layout), name in ZERO_BUBBLE
    if cfg.pp_schedule_csv:
        name, table = cfg.pp_schedule_csv, read_csv(cfg.pp_schedule_csv)
        splits_backward = bool(re.search(r"\dI\d", table))
        rows, last = len(table.splitlines()), max(map(int, re.findall(r"\d+F(\d+)", table)), default=-1)
        if rows != pp or last + 1 != n:
            fits = f"use --pp {rows} and --local_batch_size {(last + 1) * cfg.pp_microbatch_size}"
            return [f"--pp_schedule_csv {name} is for {rows} ranks and {last + 1} micro-batches, not {pp} and {n}; {fits}"]
    fewest = {"1F1B": pp, "DualPipeV": 2 * pp}.get(name, 1)
    if n < fewest:
        sequences = math.ceil(fewest * cfg.pp_microbatch_size / layout.accumulation)
        errors.append(
            f"--pp_schedule {name} with --pp {pp} needs at least {fewest} micro-batches, but there are {n} (local batch x "
            f"accumulation / micro-batch size); use --local_batch_size {sequences} and --global_batch_size "
            f"{sequences * layout.data_ranks * layout.accumulation}, or more"
        )
    if name in ("Interleaved1F1B", "InterleavedZeroBubble") and n % max(1, n // pp):
        sequences = pp * (n // pp) * cfg.pp_microbatch_size // layout.accumulation or cfg.pp_microbatch_size
        rule = f"a number of micro-batches that its {n // pp} rounds of --pp {pp} divide, not {n}"
        errors.append(f"--pp_schedule {name} needs {rule}; use --local_batch_size {sequences}")
    if splits_backward:
        if cfg.reshard_after_forward == "always":
            errors.append(
                f"--reshard_after_forward always gives wrong gradients with --pp_schedule {name}: its two half backwards would "
                "see resharded weights; use never"
            )
        if model_config.tie_embeddings and layout.mtp:
            errors.append(
                f"--pp_schedule {name} cannot halve the backward of a tied embedding with mtp_depth 1; use 1F1B"
            )
        if cfg.ac != "none":
            errors.append(f"--ac {cfg.ac} with --pp_schedule {name} recomputes each block many times; use --ac none or 1F1B")
        if torch.__version__ < "2.13":
            errors.append(f"--pp_schedule {name} fails in torch {torch.__version__}, needs 2.13; use 1F1B or Interleaved1F1B")
    try:
        split = split_stages(cfg, pp, model_config.n_layers)
    except ValueError as e:
        return errors + [str(e)]
    fewest, most = (1, 1) if name in ONE_STAGE_PER_RANK else (2, 2) if name in V_SHAPED else (2, model_config.n_layers)
    if not cfg.pp_schedule_csv and (len(split) % pp or not fewest <= len(split) // pp <= most):
        wanted = f"exactly {fewest}" if fewest == most else f"{fewest} or more"
        errors.append(
            f"{len(split)} stages over --pp {pp} ranks, but --pp_schedule {name} needs {wanted} per rank; change "
            "--pp_layers_per_stage or --pp_stage_fqns"
        )
    return errors


def check_replicas(stages, layout: Layout, **values) -> None:
    """All ranks that hold the same part of a parameter must hold the same numbers, and all ranks the same `values`.

    Raises RuntimeError naming the first difference and its rank. Runs once: a wrong seed or file on one node is found
    here and not a week later.
    """
    mine = {(name, 0): repr(value) for name, value in values.items()}
    for stage in stages:
        for fqn, p in stage.named_parameters():
            shape, offset = local_slice(p)
            total = 0
            for bits in local_tensor(p).detach().contiguous().view(torch.int16).flatten().split(2**24):
                places = torch.arange(1, bits.numel() + 1, device=bits.device)  # so that swapped numbers do not cancel
                total = total * 31 % 2**61 + (bits * places).sum().item()
            mine[fqn, (shape, offset)] = total
    everyone = [None] * layout.world_size
    dist.all_gather_object(everyone, mine)
    first = {}
    for rank, theirs in enumerate(everyone):
        for key, value in theirs.items():
            owner, expected = first.setdefault(key, (rank, value))
            if value != expected:
                raise RuntimeError(f"{key[0]} differs between ranks {owner} and {rank}: same seed, flags, files on every node?")


def check_tp_plan(model, styles) -> None:
    """Every pattern of the plan must name a module of the full model: a misspelt one would silently leave a layer unsharded."""
    names = [n for n, _ in model.named_modules()]
    for pattern, style in model.tp_plan().items():
        if style not in styles:
            raise ValueError(f"tp_plan: {pattern!r} asks for style {style!r}; parallel.TP_STYLES has {', '.join(styles)}")
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"tp_plan: pattern {pattern!r} matches no module of {type(model).__name__}")


NORMS = (nn.RMSNorm, nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def check_model(model, layout: Layout, styles) -> None:
    """What the full model says of itself must fit it, before memory is taken. Raises ValueError for a pattern of tp_plan or
    init_constants that names nothing, for a style that parallel.TP_STYLES does not have, for a parameter or buffer without an
    initial value, and for more than memory holds."""
    check_tp_plan(model, styles)
    names = [fqn for fqn, _ in [*model.named_parameters(), *model.named_buffers()]]
    for pattern in constants_of(model):
        if not fnmatch.filter(names, pattern):
            raise ValueError(f"init_constants: pattern {pattern!r} matches no parameter or buffer of {type(model).__name__}")
    initial_values(model)
    check_memory(model, layout)


def check_memory(model, layout: Layout) -> None:
    """Raise ValueError with the numbers where parameters, gradients and moments alone, shared evenly by all processes, exceed
    what a device or its host has. A lower bound: activations, buffers and an uneven split come on top."""
    cfg, GB = layout.cfg, 1e9
    size = getattr(torch, cfg.param_dtype).itemsize
    # per number; of an optimizer that is not known here nothing is assumed
    adamw = {"param": 2 * size, "bfloat16": 4, "8bit": 2, "fp8": 2, "4bit": 1}.get(getattr(cfg, "adamw_moments", ""), 0)
    total = Counter()
    for fqn, p in model.named_parameters():
        n, kind = p.numel() * layout.dp_replicate / layout.world_size, getattr(cfg, "optimizer", "")
        total["parameters"] += n * size
        total["gradients"] += 0 if cfg.optimizer_in_backward else n * size
        is_muons = kind == "muon" and p.dim() == 2 and fqn.startswith("blocks.")
        total["moments"] += n * (size if is_muons else adamw if kind in ("adamw", "muon") else 0)
    on_host = layout.device.type == "cpu" or cfg.cpu_offload
    sharers = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) if on_host else 1
    has = host_memory() if on_host else torch.cuda.get_device_properties(layout.device).total_memory
    if (needs := sum(total.values()) * sharers) > has:
        parts = " + ".join(f"{kind} {n * sharers / GB:.1f}" for kind, n in total.items() if n)
        where = f"the {sharers} process{'es' * (sharers > 1)} of a host" if on_host else "each device"
        less = ["more processes with --dp_shard, --tp or --pp"] + ["fewer --dp_replicate"] * (layout.dp_replicate > 1)
        less += ["--cpu_offload"] * (not on_host) + ["--adamw_moments 8bit"] * bool(total["moments"]) + ["a smaller --flavor"]
        raise ValueError(f"{where} would need at least {needs / GB:.1f} GB ({parts}), and there are {has / GB:.1f} GB; "
                         f"use {', '.join(less[:-1])} or {less[-1]}; --dry_run shows what a layout needs")


def host_memory() -> int:
    """Bytes that the processes of this host may use together: memory, or a control group's limit of it, and swap."""
    try:
        with open("/proc/meminfo") as f:
            sizes = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in f if line.split()[1].isdigit()}
        swap = sizes.get("SwapTotal", 0)
        limits = [sizes["MemTotal"] + swap]
        with open("/proc/self/cgroup") as f:
            groups = [line.rstrip("\n").split(":", 2)[1:] for line in f]
    except (OSError, KeyError):  # no Linux: nothing is refused
        return sys.maxsize
    for kind, path in groups:  # "" is version 2
        if kind == "" or "memory" in kind.split(","):
            root, name = ("/sys/fs/cgroup", "memory.max") if kind == "" else ("/sys/fs/cgroup/memory", "memory.limit_in_bytes")
            folders = path.strip("/").split("/")
            for depth in range(len(folders) + 1):
                try:
                    with open(os.path.join(root, *folders[:depth], name)) as f:
                        limits += [int(text) + swap] if (text := f.read().strip()).isdigit() else []  # else "max"
                except OSError:
                    pass  # a container sees its own folders only
    return min(limits)


def constants_of(model) -> dict[str, float]:
    return model.init_constants() if hasattr(model, "init_constants") else {}


def initial_values(stage) -> dict[str, tuple[float, float]]:
    """fqn -> (number, 0) for a parameter or buffer that starts as this number, (0, standard deviation) for one that is drawn.

    The first rule that knows it decides: the model's init_constants; a norm of any class starts at 1, a bias at 0; the model's
    init_std; the matrix of an nn.Linear or nn.Embedding gets 0.02. What no rule knows raises ValueError: the numbers that a
    constructor gave are lost on the meta device, and zeros or noise in their place would train as well, only worse.
    """
    values, constants, model = {}, constants_of(stage), type(stage).__name__
    for path, module in stage.named_modules():
        for name, t in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            fqn = f"{path}.{name}" if path else name
            number, std = usual_value(module, name, t), None
            number = next((value for pattern, value in constants.items() if fnmatch.fnmatch(fqn, pattern)), number)
            if not isinstance(t, nn.Parameter):
                if number is None:
                    raise ValueError(f"buffer {fqn} is empty on the meta device: compute it in forward, or add a number for it "
                                     f"to init_constants, in class {model}")
            elif t.dim() == 0:
                raise ValueError(f"parameter {fqn} has no dimension, and FSDP needs one: make it nn.Parameter(torch.empty(1))")
            elif number is None:
                usual = 0.02 if name == "weight" and isinstance(module, (nn.Linear, nn.Embedding)) else None
                std = given if (given := stage.init_std(fqn)) is not None else usual
                if std is None:
                    raise ValueError(f"parameter {fqn} has no initial value: add a standard deviation for it to init_std, or a "
                                     f"number to init_constants, in class {model}")
            values[fqn] = (0.0 if number is None else float(number), float(std or 0))
    return values


def usual_value(module: nn.Module, name: str, t: Tensor) -> float | None:
    """What every model agrees on: 0 for biases, 1 for norms (known by class, or by a class name such as MyNorm)."""
    if name.endswith("bias"):  # in_proj_bias too
        return 0.0
    if isinstance(module, NORMS) or "Norm" in type(module).__name__ and t.dim() == 1:  # a matrix in WeightNormLinear is drawn
        return {"weight": 1.0, "running_mean": 0.0, "running_var": 1.0, "num_batches_tracked": 0.0}.get(name)
    return None


def check_first_batch(batch, layout: Layout) -> None:
    """Raises RuntimeError if no token of a run's first batch has a loss: it could go on for ever at loss 0.0000. Later ones
    may be without, so nobody waits for the device to ask them."""
    n = (batch.labels != IGNORE).sum()
    dist.all_reduce(n)
    if not n:
        raise RuntimeError(f"no token of the first batch has a loss: all its labels are {IGNORE}; train on data with labels")
