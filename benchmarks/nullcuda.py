"""What a training step asks of a GPU, counted without one (tests/nullcuda), and what that costs at
the least: a roofline.

    .venv-cuda/bin/python benchmarks/nullcuda.py                              # all rows; about a minute each on two CPU cores
    .venv-cuda/bin/python benchmarks/nullcuda.py --only "8B on 8" --repo ../before       # of another checkout, as a comparison
    .venv-cuda/bin/python benchmarks/nullcuda.py --layers 4          # of each model only four layers, of their real width

torchtitan 0.3.0 takes part where `import torchtitan` works, such as from a folder of PYTHONPATH with
what it needs beside torch. Counted is the fourth step, for bytes and FLOPs the third, of one rank;
the others are not there. Launches: kernels, matmuls, fills. Bytes:
what the kernels that are no matmul read and write, each tensor once per kernel; so caches, and
gathers that use a part of a tensor, are not in it. Matmuls and attention are FLOPs. AdamW is left
out, 28 bytes per parameter of this rank: on sharded parameters the counter does not see it.
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

REPO = Path(__file__).resolve().parent.parent
# in benchmarks/ are files of the same names as the modules imported
sys.path[:1] = [str(REPO / "tests/nullcuda"), str(REPO)]

import torch
from build import environment
from torch.utils import flop_counter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, register_flop_formula

LLAMA = "train_llama3.py --flavor 8B --compile"
CASES = {  # processes, GiB of a device, recipe and flags
    "8B on 8": (8, 80, LLAMA),
    "8B on 8, eager": (8, 80, "train_llama3.py --flavor 8B"),
    "8B on 8, --ac op": (8, 80, f"{LLAMA} --ac op"),
    "8B on 8, rowwise": (8, 80, f"{LLAMA} --float8 rowwise"),
    "8B on 8, tensorwise": (8, 80, f"{LLAMA} --float8 tensorwise"),
    "8B on 8, 4 micro-batches": (8, 80, f"{LLAMA} --ac op --global_batch_size 32"),
    "8B, tp 2 x dp 4": (8, 80, f"{LLAMA} --tp 2"),
    "8B on 1": (1, 140, f"{LLAMA} --ac full"),
    "8B on 1, eager": (1, 140, "train_llama3.py --flavor 8B --ac full"),
    "8B on 1, rowwise": (1, 140, f"{LLAMA} --ac full --float8 rowwise"),
    "Qwen3 30B-A3B on 8": (8, 140, "train_qwen3.py --flavor 30B-A3B --compile --ac op --ep 8"),
    "DeepSeek 16B on 8": (8, 80, "train_deepseek.py --flavor 16B --compile --ac op --ep 8"),
}
FIXED = (
    "--seq_len 8192 --local_batch_size 1 --steps 4 --log_every 0 --val_every 0 --checkpoint_every "
    "0 "
    "--device cuda"
).split()
# an H200; float8 is a guess
BYTES_PER_SECOND = 4.3e12
FLOPS = {"bf16": (700e12, 790e12), "float8": (1100e12, 1300e12)}


# ---------------------------------------------------------------- bytes and FLOPs of what runs
def with_equal_heads(count):
    """torch's count of attention, before 2.13 only for as many heads of keys as of queries: grouped
    heads multiply as much."""

    def counted(*shapes):
        heads = max(shape[1] for shape in shapes)
        return count(*((shape[0], heads, *shape[2:]) for shape in shapes))

    return counted


flop_counter.sdpa_flop_count, flop_counter.sdpa_backward_flop_count = map(
    with_equal_heads, (flop_counter.sdpa_flop_count, flop_counter.sdpa_backward_flop_count)
)
ATEN = torch.ops.aten
# older torch lacks the last
GROUPED = ("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2")


@register_flop_formula([getattr(ATEN, name) for name in GROUPED if hasattr(ATEN, name)])
def grouped_flops(a: tuple, b: tuple, *others, out_shape=None, **options) -> int:
    """The products of experts, for which torch has no formula. (N, K) x (E, K, M): every row is
    multiplied with the matrix of its expert. (K, N) x (N, M), the gradient of the matrices: every
    row counts once. Both are the same number."""
    assert len(a) == 2, (a, b)
    return 2 * a[0] * a[1] * b[-1]


def flex_flops(args) -> int:
    """Of a compiled FlexAttention with a causal mask, torchtitan's: two products, and five in the
    backward, as torch counts other attention."""
    heads = [  # (B, H, T, K), or (B, T, H, K) where a transposed view is read
        a for a in args if isinstance(a, torch.Tensor) and a.dim() == 4 and a.is_floating_point()
    ]
    products = 2
    if len(heads) > 4:  # not only queries, keys, values and the result: their gradients, too
        products = 5
    queries = max(heads, key=torch.Tensor.numel)
    T = max(queries.shape[1:3])
    return products * queries.numel() * T  # 2 FLOPs for half of the T * T pairs


def arguments_of(op, args, kwargs) -> dict:
    """The arguments of an operator by their names."""
    names = [a.name for a in op._schema.arguments]
    return dict(zip(names, args, strict=False)) | kwargs


def size(x) -> int:
    return sum(
        t.numel() * t.element_size()
        for t in tree_leaves(x)
        if isinstance(t, torch.Tensor) and t.is_cuda
    )


class Traffic(TorchDispatchMode):
    """Adds up what each operator reads and writes; what compiled code runs by itself is added by
    the kernels' own launches."""

    supports_higher_order_operators = True

    def __init__(self):
        super().__init__()
        self.bytes, self.flops, self.by_op = 0, 0, Counter()

    @classmethod
    def ignore_compile_internals(cls):  # else nothing would be compiled under this mode
        return True

    def add(self, name: str, n: int):
        self.bytes += n
        self.by_op[name] += n

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = op(*args, **kwargs)
        is_dtensor = any(t.__name__ == "DTensor" for t in types)
        packet = getattr(op, "overloadpacket", None)
        if packet in flop_registry:
            # products that are told a dtype or an output: only their factors have the shapes that
            # count
            plain = packet in (ATEN.mm, ATEN.addmm)
            factors = [a for a in args if isinstance(a, torch.Tensor) or not plain]
            if is_dtensor:  # this rank multiplies its parts
                factors = [getattr(a, "_local_tensor", a) for a in factors]
            flops = flop_registry[packet](*factors, **({} if plain else kwargs), out_val=out)
            if arguments_of(op, args, kwargs).get("is_causal"):
                flops //= 2  # a causal kernel leaves out the tiles above the diagonal
            self.flops += flops
        elif not is_dtensor and self.launches(op, packet) and "adamw" not in str(op):
            given = arguments_of(op, args, kwargs)
            written = [
                given.get(a.name)
                for a in op._schema.arguments
                if a.alias_info and a.alias_info.is_write
            ]
            known = {id(t) for t in tree_leaves(given)}
            new = [t for t in tree_leaves(out) if id(t) not in known]
            reads = {name: value for name, value in given.items() if name != "out"}
            # it returns the whole buffer, and writes this rank's part of it
            if "all_gather_copy_in" in str(op):
                reads = {}
                written = [args[0], args[0]]
                new = []
            total = size([reads, written, new])
            # the target is among the arguments, and is only written
            if (
                packet in (ATEN.copy_, ATEN._foreach_copy_)
                or "fill" in str(op)
                or "zero" in str(op)
            ):
                total -= size(written)
            self.add(str(op), total)
        return out

    def launches(self, op, packet) -> bool:
        free = (
            ATEN.empty,
            ATEN.empty_like,
            ATEN.empty_strided,
            ATEN.new_empty,
            ATEN.new_empty_strided,
            ATEN._unsafe_view,
            ATEN.detach,
            ATEN.split,
        )
        return (
            isinstance(op, torch._ops.OpOverload)
            and not op.is_view
            and packet not in free
            and "c10d" not in op.namespace
        )

    def watch_triton(self):
        from torch._inductor.runtime.triton_heuristics import CachingAutotuner

        run = CachingAutotuner.run

        def counted(tuner, *args, **kwargs):
            # a template: products are cuBLAS's here, so it is FlexAttention
            if tuner.fn.__name__.startswith("triton_tem"):
                self.flops += flex_flops(args)
                return run(tuner, *args, **kwargs)
            twice = [
                a
                for a, name in zip(args, tuner.fn.arg_names, strict=False)
                if name.startswith("in_out_ptr")
            ]
            self.add(f"triton {tuner.fn.__name__}", size([args, twice]))
            return run(tuner, *args, **kwargs)

        CachingAutotuner.run = counted
        return self


class Steps:
    """begin() and end() around each step: marks in the log, the third step's traffic, the
    allocator's peak."""

    def __init__(self):
        self.n, self.traffic, self.out = 0, Traffic().watch_triton(), {}

    def begin(self):
        self.n += 1
        torch.cuda.reset_peak_memory_stats()
        if self.n == 3:
            self.traffic.bytes = 0
            self.traffic.flops = 0
            self.traffic.by_op.clear()
            self.traffic.__enter__()

    def end(self):
        if self.n == 3:
            self.traffic.__exit__(None, None, None)
            self.out = dict(
                bytes=self.traffic.bytes,
                flops=self.traffic.flops,
                by_op=self.traffic.by_op.most_common(40),
            )
        self.out["peak"] = torch.cuda.max_memory_allocated()
        if path := os.environ.get("COUNT_OUT"):
            Path(path).write_text(json.dumps(self.out))


# --------------------------------------------- one case, in a process of its own on the null device
def run_ours(name: str, layers: int):
    import answers

    world, _, flags = CASES[name]
    steps = Steps()
    mark_parts = answers.mark_parts

    def marked(module, memory):
        from training.metrics import Metrics

        mark_parts(module, memory)
        start = Metrics.start_step
        end = Metrics.end_step

        def start_step(self, batches):
            steps.begin()
            return start(self, batches)

        def end_step(self, tokens):
            end(self, tokens)
            steps.end()

        Metrics.start_step = start_step
        Metrics.end_step = end_step

    answers.mark_parts = marked
    recipe, *flags = flags.split()
    flags += ["--model_args", f"n_layers={layers}"] * bool(layers)
    options = dict(world=world * (world > 1), empty_weights=True)
    answers.program([recipe, *flags, *FIXED, "--out", os.environ["COUNT_RUN"]], options)


def torchtitan_config(name: str, layers: int):
    """torchtitan's own configuration of the 8B model, with the flags of a case."""
    from torchtitan.components.quantization import Float8LinearConverter
    from torchtitan.config import CompileConfig
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
    from torchtitan.models.llama3 import config_registry, model_registry

    world, _, flags = CASES[name]
    config = config_registry.llama3_8b()
    config.compile = CompileConfig(enable="--compile" in flags)
    if "--float8 rowwise" in flags:
        # as in its own configurations
        float8 = Float8LinearConverter.Config(
            filter_fqns=["lm_head"], model_compile_enabled=config.compile.enable
        )
        config.model_spec = model_registry("8B", converters=[float8])
    model = config.model_spec.model
    model.layers = model.layers[: layers or len(model.layers)]
    config.activation_checkpoint = None
    if "--ac op" in flags:
        config.activation_checkpoint = SelectiveAC.Config()
    if "--ac full" in flags:
        config.activation_checkpoint = FullAC.Config()
    if "--tp 2" in flags:
        config.parallelism.tensor_parallel_degree = 2
    if "--global_batch_size" in flags:
        config.training.global_batch_size = 4 * world
    # its default, spmd_types, needs a newer torch than 2.13: fully_shard refuses plain tensors there
    config.parallelism.spmd_backend = "partial_dtensor"
    # the kernels are counted one by one
    config.training.disable_cuda_graphs = True
    config.training.steps = 4
    config.metrics.enable_tensorboard = False
    # only the first step is logged, which would wait for the device
    config.metrics.log_freq = 1000
    config.profiler.enable_profiling = False
    config.validator.enable = False
    config.dump_folder = os.environ["COUNT_RUN"]
    return config


def run_torchtitan(name: str, layers: int):
    """torchtitan 0.3.0 by its own Trainer, on one batch."""
    import answers
    import torch.distributed as dist
    from torch.testing._internal.distributed import fake_pg  # noqa: F401, registers the backend

    world = CASES[name][0]
    os.environ.update(RANK="0", WORLD_SIZE=str(world), LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    answers.cudnn_attention()
    torch.cuda.set_device(0)
    dist.distributed_c10d._store_based_barrier = lambda *args, **kwargs: None
    dist.init_process_group("cpu:fake,cuda:nccl", rank=0, world_size=world, store=dist.HashStore())
    # as in its init_distributed, which does nothing where there is a process group
    torch.autograd.set_multithreading_enabled(False)
    from torchtitan.trainer import Trainer

    class Nothing:
        """In place of the configuration of a tokenizer and of a dataset."""

        def build(self, **kwargs):
            return None

    config = torchtitan_config(name, layers)
    config.tokenizer = Nothing()
    config.dataloader = Nothing()
    trainer = Trainer(config)
    ids = torch.zeros(1, 8193, dtype=torch.int64)
    positions = torch.arange(8192)[None]

    def batches():
        while True:
            yield {"input": ids[:, :-1], "positions": positions}, ids[:, 1:]

    steps = Steps()
    data = trainer.batch_generator(batches())
    for step in range(1, 5):
        trainer.step = step
        answers.Log.mark(f"step {step}")
        steps.begin()
        trainer.train_step(data)
        steps.end()
        answers.Log.mark(f"end {step}")
    answers.Log.library.nullcuda_flush()
    os._exit(0)


# ---------------------------------------------------------------- the table
def count(system: str, name: str, repo: Path, layers: int) -> dict | None:
    """What a case did in its fourth step, and what its process found out itself; None: it failed."""
    with tempfile.TemporaryDirectory() as folder:
        files = dict(
            COUNT_OUT=f"{folder}/out", COUNT_RUN=f"{folder}/run", NULLCUDA_LOG=f"{folder}/log"
        )
        known = environment()
        settings = dict(
            NULLCUDA_GIB=str(CASES[name][1]), PYTORCH_ALLOC_CONF="expandable_segments:True"
        )
        # torchtitan brings dill, and kernels that were compiled with it load only with it
        if importlib.util.find_spec("dill"):
            settings["TORCHINDUCTOR_CACHE_DIR"] = known["TORCHINDUCTOR_CACHE_DIR"] + "-dill"
        command = [
            sys.executable,
            __file__,
            "--case",
            name,
            "--system",
            system,
            "--layers",
            str(layers),
        ]
        process = subprocess.run(
            command,
            cwd=repo,
            capture_output=True,
            text=True,
            env=os.environ | known | files | settings | dict(COUNT_REPO=str(repo)),
        )
        logs = [*Path(folder).glob("log*")]
        if process.returncode or not logs:
            print(
                f"{system}, {name}: {process.stdout[-300:]}{process.stderr[-1500:]}",
                file=sys.stderr,
            )
            return None
        lines = logs[0].read_text().splitlines()
        found = json.loads(Path(files["COUNT_OUT"]).read_text())
    step = [line.split() for line in lines[lines.index("mark step 4") : lines.index("mark end 4")]]
    kinds = Counter(words[0] for words in step)
    copies = Counter(
        word
        for words in step
        if words[0].startswith("copy")
        for word in words
        if word.startswith("kind=")
    )
    # attention of cuDNN, which has a stand-in
    found["launches"] = sum(kinds[k] for k in ("kernel", "triton", "gemm", "memset")) + sum(
        words[:2] == ["mark", "kernel"] for words in step
    )
    found |= {k: copies[f"kind={k}"] for k in ("d2d", "h2d", "d2h")}
    found["syncs"] = sum(
        kinds[k] for k in ("sync_stream", "sync_device", "sync_event", "copy_sync")
    )
    found |= dict(zip(("collectives", "beside"), collectives(step), strict=True))
    return found | {k: kinds[k] for k in ("free", "map", "malloc")}


def collectives(step: list[list[str]]) -> tuple[int, int]:
    """(collectives of more than a number or a table of counts, those with a matmul or attention
    between their start and the wait for them). Sends and receives in a group are one."""
    n = beside = i = 0
    while i < len(step):
        begin = i
        depth = step[i][:2] == ["nccl", "group_start"]
        while depth and step[i][:2] != ["nccl", "group_end"]:
            i += 1
        sizes = [
            dict(word.split("=") for word in words[2:])
            for words in step[begin : i + 1]
            if words[0] == "nccl"
        ]
        sizes = [size for size in sizes if size]  # not of the group's begin and end
        i += 1
        if sum(int(size["count"]) for size in sizes) < 100_000:
            continue
        event = next(
            words[-1]
            for words in step[i:]
            if words[0] == "record" and words[1] == f"stream={sizes[0]['stream']}"
        )
        meanwhile = step[
            i : next(
                (j for j in range(i, len(step)) if step[j] == ["wait", "stream=0", event]),
                len(step),
            )
        ]
        n += 1
        beside += any(
            words[0] == "gemm"
            or words[:2] == ["mark", "kernel"]
            or "GroupProblemShape" in " ".join(words)
            or "triton_tem" in " ".join(words)
            for words in meanwhile
        )  # GroupProblemShape: cutlass, for experts
    return n, beside


def roofline(found: dict, name: str) -> tuple[float, float]:
    """Least seconds of a step, (with the slower, with the faster matmuls): FLOPs and bytes one
    after the other."""
    kind = "float8" if "wise" in name else "bf16"
    return tuple(found["flops"] / rate + found["bytes"] / BYTES_PER_SECOND for rate in FLOPS[kind])


HEADER = (
    "| | x ours | least time | TFLOP | GB | launches | d2d | h2d | d2h | waits | frees | maps | "
    "peak GiB | collectives | "
    "beside matmuls |"
)


def row(system: str, name: str, found: dict, ours: dict | None) -> str:
    ms = [1000 * s for s in roofline(found, name)]
    ratio = sum(ms) / sum(1000 * s for s in roofline(ours, name)) if ours else 1
    cells = [
        f"{name}: {system}",
        f"{ratio:.2f}",
        f"{ms[1]:.0f}-{ms[0]:.0f} ms",
        f"{found['flops'] / 1e12:.0f}",
        f"{found['bytes'] / 1e9:,.0f}",
        f"{found['launches']:,}",
        found["d2d"],
        found["h2d"],
        found["d2h"],
        found["syncs"],
        found["free"],
        found["map"] + found["malloc"],
        f"{found['peak'] / 2**30:.1f}",
        found["collectives"],
        found["beside"],
    ]
    return "| " + " | ".join(map(str, cells)) + " |"


def main():
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument(
        "--only",
        default="",
        help="the case of this name, or else the cases with this in their name",
    )
    p.add_argument("--repo", type=Path, default=REPO, help="the checkout whose recipes run")
    p.add_argument("--systems", default="ours,torchtitan", help="who is counted")
    p.add_argument("--layers", type=int, default=0, help="of each model, 0: all")
    p.add_argument("--save", type=Path, help="write what was counted, as json")
    p.add_argument("--case", help=argparse.SUPPRESS)
    p.add_argument("--system", help=argparse.SUPPRESS)
    args = p.parse_args()
    if args.case:
        sys.path.insert(0, os.environ["COUNT_REPO"])
        return {"ours": run_ours, "torchtitan": run_torchtitan}[args.system](args.case, args.layers)
    print(HEADER + "\n|" + " --- |" * 15)
    saved = {}
    for name in (
        [args.only] if args.only in CASES else [name for name in CASES if args.only in name]
    ):
        for system in args.systems.split(","):
            # torchtitan 0.3.0 has no tensorwise scales
            theirs = "8B" in name and "tensorwise" not in name
            if system == "ours" or theirs:
                saved[f"{name}: {system}"] = found = count(
                    system, name, args.repo.resolve(), args.layers
                )
                if found:
                    print(row(system, name, found, saved.get(f"{name}: ours")), flush=True)
    if args.save:
        args.save.write_text(json.dumps(saved, indent=1))


if __name__ == "__main__":
    main()
