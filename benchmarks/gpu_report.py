"""What this machine's GPUs do with nanotitan: correctness, speed, memory, links. Under 20 minutes;
the report can be sent.

    make gpu-report
    python benchmarks/gpu_report.py --minutes 5              # the most valuable rows
    python benchmarks/gpu_report.py --only float8            # rows with this in their name, and those they are compared with
    python benchmarks/gpu_report.py --list                   # the rows for this machine, and what is skipped; runs nothing

Each row is a command that you could type, in a process of its own with a time limit; one that fails
ends nothing but itself. Rows come in the order of their value. A row begins only if its time limit
fits into what is left. Ctrl-C ends it early. The report is written anew after every row, to
<out>/report.md and <out>/report.json:

    version    1
    machine    gpus [{name, gib, capability}], torch, cuda, nccl, driver, python, packages, commit, cores, links
    began      UTC, ISO 8601;  seconds  so far;  budget  seconds;  size  flags of the model that most rows train
    rows       in their order, each with
        name, command, see (what to expect), base (the row it is compared with, or "")
        status     ok, failed, time limit, interrupted, skipped (cannot run here), not run (budget, or Ctrl-C)
        reason     one line: why it is not ok; "" if it is
        seconds    that it took
        metrics    of a training run, from its metrics.jsonl. Medians after step 5: tokens_per_second, mfu, step_time_s,
                   rollout_tokens_per_second, logprob_k3; memory_gib (peak), first_step_s (with compiling), loss (the last),
                   x_base (tokens per second, as a multiple of the base's), x_base_memory, x_base_loss. None of them is null.
        text       the lines of its output that hold what is asked: tables of benchmarks, parity
"""

import contextlib
import json
import os
import platform
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

REPO = Path(__file__).parent.parent
sys.path[0] = str(REPO)  # in benchmarks/ are files of the same names as the modules imported here

from flags.config import check_range, parse_config, usage_error
from flags.files import json_bytes, write_file
from training.metrics import read_lines


@dataclass(kw_only=True)
class Config:
    out: str = "runs/gpu_report"  # folder of the report, and of what its rows write
    minutes: float = 20  # everything ends within this time
    only: str = ""  # rows with this in their name, and those they are compared with
    list: bool = False  # print the rows, and run nothing

    def __post_init__(self):
        check_range(self, 0.1, 1e6, "minutes")


@dataclass
class Row:
    name: str
    command: str  # {out} becomes a folder of its own
    see: str  # what to expect
    limit: int  # seconds
    base: str = ""  # name of an earlier row
    gpus: int = 1
    gib: float = 0  # of each GPU
    capability: float = 0
    packages: tuple[str, ...] = ()  # one of them is needed
    status: str = ""
    reason: str = ""
    seconds: float = 0
    metrics: dict = field(default_factory=dict)
    text: str = ""


# ---------------------------------------------------------------- what is there
PROBE = """
import json, torch
gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else ""
print(json.dumps(dict(gpus=[dict(name=g.name, gib=round(g.total_memory / 2**30, 1), capability=g.major + g.minor / 10)
                            for g in gpus], torch=torch.__version__, cuda=torch.version.cuda, nccl=nccl)))
"""


def said(*command: str) -> str:
    """stdout of a command, or "" if there is none."""
    try:
        return subprocess.run(
            command, cwd=REPO, capture_output=True, text=True, timeout=60
        ).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def machine() -> dict:
    """Asked in a process of its own: this one takes no memory of a GPU."""
    answer = said(sys.executable, "-c", PROBE).splitlines()
    names = ("torchao", "transformers", "torchtitan", "triton", "numpy")
    return (json.loads(answer[-1]) if answer else {"gpus": []}) | {
        "driver": said(
            "nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"
        ).partition("\n")[0],
        "python": platform.python_version(),
        "packages": {d.name: d.version for d in metadata.distributions() if d.name in names},
        "commit": said("git", "rev-parse", "--short", "HEAD"),
        "cores": os.cpu_count(),
        "links": said("nvidia-smi", "topo", "-m"),
    }


# ---------------------------------------------------------------- the rows
def model_size(gib: float) -> str:
    """Flags of the largest of these models that trains without any way to save memory, with 16
    bytes per parameter."""
    # 1.1 B parameters: layers of the 8B model, whose head has a like share of the work
    if gib >= 36:
        return "--flavor 8B --model_args n_layers=4,vocab_size=32768 --seq_len 8192 --local_batch_size 1"
    if gib >= 14:
        return "--flavor 1B --model_args n_layers=8,vocab_size=32768 --seq_len 4096 --local_batch_size 1"
    return (
        "--flavor 1B --model_args n_layers=4,vocab_size=16384 --seq_len 2048 --local_batch_size 1"
    )


def rows_of(found: dict) -> list[Row]:
    """All rows, in the order of their value."""
    count = len(found["gpus"])
    n = max(2, 2 ** (count.bit_length() - 1))  # GPUs of the rows with several
    gib = min((gpu["gib"] for gpu in found["gpus"]), default=0)
    size = model_size(gib)
    brief = "--steps 20 --log_every 5 --val_every 0 --checkpoint_every 0 --out {out}"
    llama = "python train_llama3.py"
    many = f"torchrun --nproc_per_node {n} train_llama3.py {size} {brief} --compile"
    one = f"{llama} {size} {brief}"
    compiled = f"{llama} {size} {brief} --compile"
    exact = "--steps 10 --log_every 1 --val_every 0 --checkpoint_every 0 --compute_dtype float32 --out {out}"
    length = re.search(r"--seq_len \d+", size)[0]
    shape = "n_heads=32,n_kv_heads=8,dim=2048,n_layers=4,head_dim=64,ffn_dim=8192,vocab_size=32768"
    width = (
        "dim=4096,head_dim=128,ffn_dim=14336" if gib >= 36 else "dim=2048,head_dim=64,ffn_dim=8192"
    )
    parity = f"{llama} --check_parity --local_batch_size 2"
    equal = "check_parity: equal"
    layout = {4: "--tp 2 --cp 2"}.get(n, "--tp 2 --cp 2 --pp 2" if n >= 8 else "--dp_shard 2")
    experts = f"--model_args n_layers=2,vocab_size=32768 --seq_len 4096 --local_batch_size 1 --compile {brief}"
    qwen = f"torchrun --nproc_per_node {n} train_qwen3.py --flavor 30B-A3B {experts} --ep {n}"
    small = "logprob_k3 below 1e-3"
    grpo = "grpo.py --steps 12 --eval_every 0 --checkpoint_every 0 --sft_steps 20 --out {out}"
    end = f"--local_batch_size 1 --ac full --compile --lr 3e-4 {brief}"
    two = dict(gpus=2)
    ao = dict(packages=("torchao",))
    faster = "1.2 x or more"
    between = "memory between none and full"
    return [
        Row(
            "loss on the CPU", f"{llama} --device cpu {exact}", "the reference of the next row", 90
        ),
        Row("loss on the GPU", f"{llama} {exact}", "x_base_loss 1.0000", 60, "loss on the CPU"),
        Row("parity of --compile, --ac", f"{parity} --compile --ac full", equal, 150),
        Row(f"parity of {layout}", f"{parity} {layout}", equal, 150, **two),
        Row("eager", one, "loss falls", 90),
        Row("compile", compiled, "H100, H200: MFU of 55 % or more", 150, "eager"),
        Row(
            "float8 rowwise",
            f"{compiled} --float8 rowwise",
            faster,
            150,
            "compile",
            capability=8.9,
            **ao,
        ),
        Row(
            "float8 tensorwise",
            f"{compiled} --float8 tensorwise",
            faster,
            150,
            "compile",
            capability=8.9,
            **ao,
        ),
        Row(
            "all GPUs",
            many,
            "as many times the tokens/s of its base as there are GPUs",
            180,
            "compile",
            **two,
        ),
        Row(
            "links",
            f"torchrun --nproc_per_node {n} benchmarks/links.py",
            "near the data sheet's bandwidth",
            60,
            **two,
        ),
        Row("ac op", f"{compiled} --ac op", between, 150, "compile"),
        Row("ac full", f"{compiled} --ac full", "the least memory, 0.75-0.8 x", 150, "compile"),
        Row("tp", f"{many} --tp {n}", "below 1 x", 180, "all GPUs", **two),
        Row("async tp", f"{many} --tp {n} --async_tp", "above 1 x", 180, "tp", capability=9, **two),
        Row("cp", f"{many} --cp {n}", "near 1 x", 180, "all GPUs", **two),
        Row("experts", qwen, "loss falls", 180, gib=36, **two),
        Row(
            "experts in one part",
            qwen.replace("train_qwen3", "benchmarks/changed.py one_part train_qwen3"),
            "below 1 x: no expert computes while tokens travel",
            180,
            "experts",
            gib=36,
            **two,
        ),
        Row(
            "tokens once per rank",
            qwen.replace("train_qwen3", "benchmarks/changed.py once_per_rank train_qwen3"),
            "near 1 x between GPUs of one machine",
            180,
            "experts",
            gib=36,
            **two,
        ),
        Row(
            "NCCL's memory",
            many.replace("train_llama3", "benchmarks/changed.py nccl_memory train_llama3"),
            "above 1 x with NVLink SHARP, else it fails and says so",
            180,
            "all GPUs",
            capability=9,
            **two,
        ),
        Row(
            "float8 all-gather",
            f"{many} --float8 tensorwise --float8_all_gather",
            faster,
            180,
            "all GPUs",
            2,
            0,
            8.9,
            **ao,
        ),
        *(
            Row(f"parity of --{axis} 2", f"{parity} --{axis} 2", equal, 120, **two)
            for axis in ("tp", "cp", "pp")
        ),
        Row(
            "parity of --ep 2",
            "python train_qwen3.py --check_parity --flavor debug_moe --ep 2",
            equal,
            120,
            **two,
        ),
        Row(
            "against others",
            f"python benchmarks/train.py --rounds 3 {length} --local_batch_size 1 --model_args "
            f"{shape}",
            "torchtitan about 1 x, transformers at most 0.8 x; memory within 6 % of torchtitan's",
            300,
            gib=36,
            packages=("torchtitan", "transformers"),
        ),
        Row(
            "the whole 1B",
            f"{llama} --flavor 1B --seq_len 8192 {end}",
            "MFU as of ac full",
            180,
            gib=36,
        ),
        Row(
            "the whole 8B on 8",
            f"torchrun --nproc_per_node 8 train_llama3.py --flavor 8B --seq_len 8192 {end}",
            "MFU as of ac full",
            240,
            gpus=8,
            gib=36,
        ),
        Row(
            "grpo",
            f"python {grpo} --model_args dim=1024,n_layers=8,n_heads=16,head_dim=64,ffn_dim=2816",
            small,
            120,
        ),
        Row(
            "grpo, a rank samples",
            f"torchrun --nproc_per_node 2 {grpo} --gen_ranks 1 --async_steps 1",
            small,
            120,
            **two,
        ),
        Row("muon", f"{compiled} --optimizer muon --lr 6e-3", "0.9 x or more", 120, "compile"),
        Row(
            "bf16 parameters",
            f"{compiled} --param_dtype bfloat16 --optimizer adamw_sr",
            "half of it",
            120,
            "compile",
            **ao,
        ),
        Row("documents", f"{compiled} --doc_mask", "near 1 x", 150, "compile"),
        Row(
            "experts, one GPU",
            f"python train_qwen3.py --flavor 30B-A3B {experts}",
            "MFU above 25 %",
            150,
            gib=36,
        ),
        Row(
            "latent attention",
            f"python train_deepseek.py --flavor 16B {experts}",
            "MFU above 25 %",
            150,
            gib=36,
        ),
        Row(
            "long sequence",
            f"{compiled.replace(length, '--seq_len 32768')} --ac full",
            "fits",
            150,
            gib=36,
        ),
        Row(
            "parts of a step",
            f"python benchmarks/kernels.py --rounds 5 {length} --local_batch_size 1 --dtype "
            "bfloat16 "
            f"--loss_vocab 32768 --model_args n_layers=1,n_heads=32,n_kv_heads=8,{width} "
            "--matmul_size 8192",
            "60 %",
            120,
        ),
        Row(
            "checkpoints",
            f"torchrun --nproc_per_node {min(n, count)} benchmarks/checkpoint.py --flavor 1B "
            "--repeats 1 "
            "--model_args n_layers=1,vocab_size=8192 --folder {out}",
            "asynchronous: training waits for a small part",
            150,
        ),
        Row("ac selective", f"{compiled} --ac selective", between, 120, "compile"),
        Row("ac budget", f"{compiled} --ac budget", between, 150, "compile"),
        Row("CPU offload", f"{one} --cpu_offload", "less memory, much slower", 150, "eager"),
        Row(
            "profiler, snapshot",
            f"{one} --profile 5-6 --memory_snapshot",
            "files in trace/",
            120,
            "eager",
        ),
    ]


def why_not(row: Row, found: dict) -> str:
    """Why a row cannot run on this machine, or ""."""
    gpus = found["gpus"]
    installed = found["packages"]
    gib, capability = (min(gpu[key] for gpu in gpus) for key in ("gib", "capability"))
    cases = {
        f"needs {row.gpus} GPUs, here {'is' if len(gpus) == 1 else 'are'} {len(gpus)}": len(gpus)
        < row.gpus,
        f"needs {row.gib:.0f} GiB per GPU, here are {gib:.0f}": gib < row.gib,
        f"needs capability {row.capability:.1f}, this GPU has {capability:.1f}": capability
        < row.capability,
        f"needs a package: pip install {' or '.join(row.packages)}": row.packages
        and not set(row.packages) & installed.keys(),
    }
    return next((reason for reason, holds in cases.items() if holds), "")


# ---------------------------------------------------------------- one row
def folder_of(row: Row, out: Path) -> Path:
    return out / "rows" / re.sub(r"\W+", "-", row.name).strip("-")


def argv_of(row: Row) -> list[str]:
    first, *rest = shlex.split(row.command)
    torchrun = ["-m", "torch.distributed.run", "--standalone"] if first == "torchrun" else []
    return [sys.executable, *torchrun, *rest]


def end(process: subprocess.Popen) -> None:
    """SIGTERM, which torchrun passes on; then SIGKILL, after which the processes of a torchrun end
    by themselves."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(10)


def execute(row: Row, out: Path, limit: float) -> None:
    """Run the row's command; fill in what came of it."""
    folder = folder_of(row, out)
    folder.mkdir(parents=True)
    began = time.monotonic()
    printed = folder / "stdout"
    errors = folder / "stderr"
    # nothing was compiled before this report
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": f"{out.resolve()}/rows/cache"}
    with open(printed, "w") as stdout, open(errors, "w") as stderr:
        process = subprocess.Popen(
            argv_of(row),
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
            row.status = "ok" if status == 0 else "failed"
        except subprocess.TimeoutExpired:
            row.status = "time limit"
            row.reason = f"ended after {limit:.0f} s"
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would lose the report
            row.status = "interrupted"
            row.reason = "Ctrl-C"
        finally:
            if process.poll() is None:
                end(process)
            row.seconds = round(time.monotonic() - began, 1)
    if row.status == "failed":
        row.reason = f"status {status}: {last_error(errors.read_text(errors='replace') + printed.read_text(errors='replace'))}"
    row.metrics = numbers(list(read_lines(str(folder / "metrics.jsonl"))))
    row.text = telling_lines(printed.read_text(errors="replace"), is_training=bool(row.metrics))
    if traces := sorted(path.name for path in folder.glob("trace/*")):
        row.text = "\n".join([*row.text.splitlines(), f"trace/: {', '.join(traces)}"])
    for path in [*folder.glob("checkpoints"), *folder.glob("benchmark-*")]:
        shutil.rmtree(path)


def last_error(text: str) -> str:
    """The line that says what went wrong: our own, else the last exception, else the last line.
    torchrun adds a page."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("error")]
    raised = [
        line
        for line in lines
        if re.search(r"\w(Error|Exception): ", line) and "ChildFailed" not in line
    ]
    return (ours[:1] or raised[-1:] or lines[-1:] or ["no output"])[0][:400].replace("|", "/")


def telling_lines(text: str, is_training: bool) -> str:
    """Of a recipe what metrics.jsonl does not hold; of a benchmark everything."""
    lines = text.rstrip().splitlines()
    if is_training or "check_parity" in text:
        starts = ("check_parity: equal", "check_parity: NOT", "--float8", "float8")
        lines = [line for line in lines if line.startswith(starts)]
    return "\n".join(lines[-60:])


def numbers(lines: list[dict]) -> dict:
    """What the docstring promises of the lines of a metrics.jsonl."""
    train = [line for line in lines if "step_time_s" in line]
    if not train:
        return {}
    found = {}
    for key in (
        "tokens_per_second",
        "mfu",
        "step_time_s",
        "rollout_tokens_per_second",
        "logprob_k3",
    ):
        if values := [
            line[key] for line in train if line["step"] > 5 and line.get(key) is not None
        ]:
            found[key] = statistics.median(values)
    found |= {
        "memory_gib": max(line["memory_gib"] for line in train),
        "first_step_s": train[0]["step_time_s"],
    }
    return found | ({"loss": train[-1]["loss"]} if train[-1]["loss"] is not None else {})


def compare(row: Row, rows: list[Row]) -> None:
    """Adds the ratios to the base's metrics."""
    base = next((other.metrics for other in rows if other.name == row.base), {})
    for ratio, key in (
        ("x_base", "tokens_per_second"),
        ("x_base_memory", "memory_gib"),
        ("x_base_loss", "loss"),
    ):
        if base.get(key) and key in row.metrics:
            row.metrics[ratio] = row.metrics[key] / base[key]


# ---------------------------------------------------------------- all rows, and the report
def wanted_rows(rows: list[Row], only: str) -> list[Row]:
    names = {row.name for row in rows if only in row.name}
    # a base comes before the rows that are compared with it, and may have one itself
    for row in reversed(rows):
        names |= {row.base} if row.name in names else set()
    return [row for row in rows if row.name in names]


def run_rows(rows: list[Row], out: Path, seconds: float, write, clock=time.monotonic) -> None:
    """Each row in turn, as long as its limit fits into what is left of `seconds`; write() after
    each."""
    began = clock()
    for i, row in enumerate(rows, 1):
        left = seconds - (clock() - began)
        if any(other.status == "interrupted" for other in rows):
            row.status = "not run"
            row.reason = "interrupted"
        elif not row.status and row.limit > left:
            row.status, row.reason = (
                "not run",
                f"time: it may take {row.limit} s, {max(left, 0):.0f} s were left",
            )
        elif not row.status:
            print(f"[{i}/{len(rows)}] {row.name}, {left / 60:.1f} min left ...", flush=True)
            execute(row, out, row.limit)
            compare(row, rows)
            print(
                f"    {row.status}, {row.seconds:.0f} s  {row.reason or brief_line(row)}",
                flush=True,
            )
        write()


def brief_line(row: Row) -> str:
    texts = dict(
        tokens_per_second="{:,.0f} tokens/s",
        mfu="MFU {:.1%}",
        memory_gib="{:.1f} GiB",
        x_base="{:.2f} x " + row.base,
    )
    parts = [text.format(row.metrics[key]) for key, text in texts.items() if key in row.metrics]
    return "  ".join(parts) or row.text.rpartition("\n")[2]


def markdown(report: dict, rows: list[Row]) -> str:
    found = report["machine"]
    versions = {key: found[key] for key in ("torch", "cuda", "nccl", "driver", "python")} | found[
        "packages"
    ]
    lines = [
        f"# {len(found['gpus'])} x {found['gpus'][0]['name']}, {found['gpus'][0]['gib']} GiB",
        "",
        ", ".join(f"{name} {version or 'unknown'}" for name, version in versions.items())
        + f"; {found['cores']} cores; "
        f"nanotitan {found['commit'] or 'without git'}; {report['began']}, "
        f"{report['seconds'] / 60:.1f} of "
        f"{report['budget'] / 60:.0f} minutes",
        "",
        f"Most rows train `{report['size']}`, one after the other; speeds are medians after step "
        "5.",
        "",
        "| row | x base | tokens/s | MFU | peak GiB | x base | first step s | loss | to see |",
        "|" + " --- |" * 9,
    ]
    formats = dict(
        x_base=".3f",
        tokens_per_second=",.0f",
        mfu=".1%",
        memory_gib=".2f",
        x_base_memory=".2f",
        first_step_s=".1f",
        loss=".4f",
    )
    for row in (row for row in rows if row.metrics):
        m = row.metrics
        name = f"{row.name} (of {row.base})" if row.base else row.name
        cells = [format(m[key], spec) if key in m else "" for key, spec in formats.items()]
        more = ("x_base_loss", "rollout_tokens_per_second", "logprob_k3")
        seen = [row.see, *(f"{key} {m[key]:.5g}" for key in more if key in m)]
        lines.append(f"| {name} | {' | '.join(cells)} | {'; '.join(seen)} |")
    for row in (row for row in rows if row.text):
        lines += ["", f"**{row.name}** (to see: {row.see})", "", "```", row.text, "```"]
    lines += ["", "| not ok | why | seconds |", "| --- | --- | --- |"]
    lines += [
        f"| {row.name}: {row.status} | {row.reason} | {row.seconds:.0f} |"
        for row in rows
        if row.status != "ok"
    ]
    lines += ["", "```", *(f"# {row.name}\n{row.command}" for row in rows), "```"]
    lines += ["", "```", found["links"], "```"] if found["links"] else []
    return "\n".join(lines) + "\n"


def main(cfg: Config):
    began, found, out = time.monotonic(), machine(), Path(os.path.relpath(cfg.out, REPO))
    if not found["gpus"]:
        usage_error("a GPU report needs a GPU, and torch finds none here")
    rows = wanted_rows(rows_of(found), cfg.only)
    if not rows:
        usage_error(f"--only {cfg.only}: no row has this in its name; --list names them")
    for row in rows:
        row.command = row.command.replace("{out}", shlex.quote(str(folder_of(row, out))))
        if reason := why_not(row, found):
            row.status = "skipped"
            row.reason = reason
    os.chdir(REPO)  # the commands are those that a user types there
    if cfg.list:
        return print("\n".join(f"{row.name}: {row.reason or row.command}" for row in rows))
    report = dict(
        version=1,
        machine=found,
        began=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=0.0,
        budget=60 * cfg.minutes,
        size=model_size(min(gpu["gib"] for gpu in found["gpus"])),
    )
    if out.exists() and not (out / "report.json").exists():
        usage_error(
            f"--out {out} is there, and no report; give a folder that is not there, or one of a "
            "report to replace"
        )
    # of an earlier report: its runs would be continued
    shutil.rmtree(out / "rows", ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)

    def write():
        report["seconds"] = round(time.monotonic() - began, 1)
        write_file(
            out / "report.json", json_bytes(report | {"rows": [asdict(row) for row in rows]})
        )
        write_file(out / "report.md", markdown(report, rows).encode())

    signal.signal(signal.SIGTERM, signal.default_int_handler)
    write()
    run_rows(rows, out, 60 * cfg.minutes - (time.monotonic() - began), write)
    counts = {
        status: sum(row.status == status for row in rows)
        for status in dict.fromkeys(row.status for row in rows)
    }
    print(
        f"{', '.join(f'{n} {status}' for status, n in counts.items())} in "
        f"{report['seconds'] / 60:.1f} min: {out}/report.md, "
        f"{out}/report.json"
    )
    sys.exit(130 if "interrupted" in counts else int("failed" in counts or "time limit" in counts))


if __name__ == "__main__":
    try:
        main(parse_config(Config))
    except KeyboardInterrupt:  # before the first row
        sys.exit(130)
