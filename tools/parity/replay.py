"""--replay STEP: compute a step of a logged run again, and say which texts made the loss and the
gradient of the step.

No recording is needed: the data of a step are a function of the step, and the weights come from the
nearest checkpoint before. The recipe trains the steps in between as the run did, in a temporary
folder. In the step itself the sequences of the global batch are computed once more, one by one.

The recipe needs no change, as for --check_parity: functions of parallel.py, training/metrics.py and
data.py are replaced before the start.
"""

import hashlib
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from types import FunctionType, SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch.distributed as dist
from torch import Tensor, nn

import parallel
from corpus.origins import files_of_parts
from data import TokenData
from distributed.checks import reduce_hash
from distributed.launch import LaunchConfig
from distributed.layout import AXES, ExpertConfig, Layout, ParallelConfig, local_tensor
from distributed.pipeline import PipelineConfig
from flags.config import own_rank, parse_config, spell_flag
from flags.files import read_json, step_folders
from storage.changes import UNTOLD_FLAGS, changes
from storage.manifest import Damaged, read_manifest
from storage.resume import job_name
from tools.parity.replay_report import print_replay
from tools.parity.sequences import Step, compute_sequences, trained
from tools.reports.stop_main import Stopped, do_nothing
from training.metrics import Metrics, read_lines

# Flags of a layout that change the numbers beyond rounding
NUMBERS = {"compute_dtype", "param_dtype", "reduce_dtype"}
# Other flags that may be typed beside --replay: today's places of files
PLACES = {"out", "data", "tokenizer", "cache_dir", "init_from"}
# Flags about files of a run, with the value that writes nothing
QUIET = dict(
    load_only=True,
    load_step=-1,
    checkpoint_every=0,
    checkpoint_async="off",
    keep_latest_k=10,
    checkpoint_first_step=False,
    last_save_model_only=False,
    after_save="",
    export_hf="",
    export_dtype="float32",
    tensorboard=False,
    wandb="",
    profile="",
    memory_snapshot=False,
)


class Run(NamedTuple):
    """A logged run, and the step to compute again."""

    out: str
    step: int
    logged: dict[int, dict]  # {step: line of metrics.jsonl}
    flags: str  # the config.json of the start (command) with this step
    start: str  # the step folder to begin from; "" = step 0
    first: int  # the first step that is trained again
    identity: dict  # of model and data
    layout: str  # in words, as the step was trained
    world_size: int


# ---------------------------------------------------------------- the run, as it lies there


def open_run(out: str, step: int) -> Run:
    """Read all about a step from the folder of a run. Raises ValueError if the step cannot be
    computed again."""
    config = os.path.join(out, "config.json")
    if not os.path.isfile(config) or "_run" not in read_json(out, "config.json"):
        raise ValueError(
            f"--replay {step}: {out} is no run, for it has no config.json; --out names the folder "
            "of the run"
        )
    lines = read_lines(os.path.join(out, "metrics.jsonl"))
    logged = {line["step"]: line for line in lines if "loss" in line}
    saved = [(number, path) for number, path in sorted(step_folders(out)) if is_readable(path)]
    # One start trained all steps from a checkpoint to the next, and the later checkpoint holds the
    # flags of this start. After the last checkpoint the flags are those of config.json.
    after = next((path for number, path in saved if number >= step), "")
    folder = after or out
    flags = read_json(folder, "config.json")
    check_step(out, step, logged, flags)
    start, first = nearest_checkpoint(saved, step)
    run = read_json(out, "config.json")["_run"]
    world_size = run["world_size"]
    if after:
        world_size = read_manifest(after)["world_size"]
    identity = run
    if start or after:
        identity = read_json(start or after, "state.json")["identity"]
    words = words_of_layout(flags, world_size)
    path = os.path.join(folder, "config.json")
    return Run(out, step, logged, path, start, first, identity, words, world_size)


def check_step(out: str, step: int, logged: dict, flags: dict) -> None:
    """Raises ValueError for a step that the run has not trained."""
    if not logged:
        raise ValueError(f"--replay {step}: {out}/metrics.jsonl has no step; has the run trained?")
    last = max(logged)
    # A run that ended with a NaN ended before the next log line
    most = min(last + max(1, flags.get("log_every", 1)), flags["steps"])
    if step > most:
        raise ValueError(
            f"--replay {step}: {out}/metrics.jsonl ends with step {last}; give a step from 1 to "
            f"{most}"
        )


def nearest_checkpoint(saved: list[tuple[int, str]], step: int) -> tuple[str, int]:
    """(the newest complete step folder before the step, the first step to train again); ("", 1)
    without such a folder."""
    for number, path in reversed(saved):
        if number < step and not read_json(path, "state.json")["model_only"]:
            return path, number + 1
    return "", 1


def is_readable(path: str) -> bool:
    """Whether a step folder has an undamaged manifest. The files themselves are checked when they
    are loaded."""
    try:
        read_manifest(path)
    except Damaged:
        return False
    return True


def words_of_layout(flags: dict, world_size: int) -> str:
    """ "2 processes (--tp 2)", with all flags that decide about rounding."""
    others = [flags[axis] for axis in AXES if flags[axis] > 0]
    if flags["dp_shard"] == -1:
        flags = flags | {"dp_shard": world_size // math.prod(others)}
    usual = dict.fromkeys((*AXES, "ep", "etp"), 1)
    usual |= dict(local_batch_size=None, ac="none", compile=False)
    names = [name for name in usual if flags.get(name, usual[name]) != usual[name]]
    given = " ".join(spell_flag(name, flags[name]) for name in names)
    processes = "1 process"
    if world_size > 1:
        processes = f"{world_size} processes"
    if given:
        return f"{processes} ({given})"
    return processes


def computed_on(layout: Layout, cfg: Any) -> str:
    """words_of_layout of this process."""
    degrees = layout.degrees | dict(ep=layout.ep, etp=layout.etp)
    sizes = dict(local_batch_size=layout.local_batch_size, ac=cfg.ac, compile=cfg.compile)
    return words_of_layout(degrees | sizes, layout.world_size)


# ---------------------------------------------------------------- its flags


def flags_of_layout(Config: type) -> set[str]:
    """The flags of the layout, which may differ from the run's."""
    groups = (ParallelConfig, ExpertConfig, PipelineConfig, LaunchConfig)
    names = {field.name for group in groups for field in fields(group)}
    known = {field.name for field in fields(Config)}
    return (names | {"local_batch_size"}) & known - NUMBERS


def typed_names(Config: type, words: list[str]) -> set[str]:
    """The fields of Config that a command line names."""
    given = {word.split("=")[0] for word in words if word.startswith("--")}
    names = {field.name for field in fields(Config)}
    return {name for name in names if {f"--{name}", f"--no-{name}"} & given}


def run_flags(Config: type, WithReports: type, run: Run, argv: list[str] | None) -> Any:
    """The flags of the run, replaced by the typed ones. Raises ValueError for a typed flag that
    would not repeat the run."""
    words = sys.argv[1:] if argv is None else argv
    cfg = parse_config(WithReports, [f"--config={run.flags}", *words])
    cfg = Config(**{field.name: getattr(cfg, field.name) for field in fields(Config)})
    saved = read_json(os.path.dirname(run.flags), "config.json")
    typed = typed_names(Config, words)
    layout = flags_of_layout(Config)
    others = sorted(typed - layout - PLACES)
    in_vain = [name for name in others if name in UNTOLD_FLAGS or name in QUIET]
    if in_vain:
        given = ", ".join(f"--{name}" for name in in_vain)
        verb = "has"
        them = "it"
        if len(in_vain) > 1:
            verb = "have"
            them = "them"
        raise ValueError(
            f"{given} {verb} no effect with --replay, which writes nothing; leave {them} out"
        )
    for name in others:
        for _, old, new in changes(saved.get(name, "not set"), getattr(cfg, name)):
            raise ValueError(
                f"--{name} {new} is not what {run.out} was trained with, {old}; --replay repeats "
                "the run: leave it out"
            )
    check_processes(run, cfg, typed)
    return cfg


def check_processes(run: Run, cfg: Any, typed: set[str]) -> None:
    """Raises ValueError if the run's own layout does not fit the number of processes."""
    processes = int(os.environ.get("WORLD_SIZE", 1))
    degrees = [getattr(cfg, axis) for axis in AXES]
    fixed = math.prod(n for n in degrees if n > 0)
    fits = processes % fixed == 0 if -1 in degrees else processes == fixed
    if not fits and not typed & set(AXES):
        here = "1 process"
        verb = "is"
        if processes > 1:
            here = f"{processes} processes"
            verb = "are"
        layout = " ".join(f"--{axis} 1" for axis in AXES if getattr(cfg, axis) > 1)
        raise ValueError(
            f"{run.out} was trained on {run.layout}, and here {verb} "
            f"{here}; start torchrun --nproc_per_node {run.world_size} {sys.argv[0]} --out "
            f"{run.out} --replay {run.step}, or give a layout for {here}, such as {layout}"
        )


def quiet_flags(cfg: Any, run: Run, folder: str) -> Any:
    """The run's flags, to train in a temporary folder and keep nothing."""
    known = {field.name for field in fields(cfg)}
    values = {name: value for name, value in QUIET.items() if name in known}
    values["out"] = folder
    if run.start:  # the checkpoint has all weights, also those left out of the first ones
        values["exclude_from_loading"] = []
    return replace(cfg, **values)


@contextmanager
def temporary_run(run: Run) -> Iterator[str]:
    """The name of a temporary run folder, the same for all processes of a start. The only checkpoint
    in the folder is a link to the run's checkpoint."""
    # a folder left by a killed replay belongs to the same step
    what = f"{job_name()} {os.getuid()} {os.path.abspath(run.out)} {run.step} {run.start}"
    mark = hashlib.sha256(what.encode()).hexdigest()[:12]
    if "RANK" not in os.environ:
        mark = os.getpid()  # no other process has to find the folder
    folder = os.path.join(tempfile.gettempdir(), f"replay-{mark}")
    name = os.path.basename(run.start)
    os.makedirs(os.path.join(folder, "checkpoints"), exist_ok=True)
    if run.start:
        with suppress(FileExistsError):
            os.symlink(os.path.abspath(run.start), os.path.join(folder, "checkpoints", name))
    ended = False
    try:
        yield folder
        ended = True
    finally:
        # a rank that fails may be later than rank 0, and have made the folder again
        if own_rank("LOCAL_RANK") == 0 or not ended:
            shutil.rmtree(folder, ignore_errors=True)  # removes the link, not the checkpoint


# ---------------------------------------------------------------- the command


def replay_step(
    main: FunctionType, Config: type, WithReports: type, options: Any, argv: list[str] | None = None
) -> int:
    """--replay of the running recipe; returns the exit status. Raises ValueError."""
    words = sys.argv[1:] if argv is None else argv
    if any(word.split("=")[0] == "--config" for word in words):
        raise ValueError(
            "--replay reads the flags of the run in --out; leave --config out, and name the run by "
            "--out"
        )
    out = parse_config(WithReports, argv).out
    run = open_run(out, options.replay)
    cfg = run_flags(Config, WithReports, run, argv)
    begin = f"from {run.start}" if run.start else "from step 0, for no checkpoint is before it"
    n = run.step - run.first
    steps = "1 step before it is" if n == 1 else f"{n} steps before it are"
    if own_rank() == 0:
        print(
            f"replay: step {run.step} of {out}, with the flags of {run.flags}, {begin}; "
            f"{steps} trained again, and nothing is written to {out}",
            flush=True,
        )
    with temporary_run(run) as folder:
        with check_identity(main, run), stop_at(run, cfg):
            try:
                main(quiet_flags(cfg, run, folder))
            except Stopped:
                dist.barrier()  # rank 0 removes the folder
            except ValueError as error:
                raise ValueError(str(error).replace(folder, out)) from error
            else:
                raise RuntimeError(f"the recipe ended before step {run.step}")
    return 0


@contextmanager
def check_identity(main: FunctionType, run: Run) -> Iterator[None]:
    """While the recipe opens the data and claims the folder: raise ValueError if the run had another
    model or other data."""
    names = main.__globals__
    real = SimpleNamespace(open_data=names["open_data"], claim_run=names["claim_run"])

    def open_data(cfg, *args, **kwargs):
        data = real.open_data(cfg, *args, **kwargs)
        differ = [name for name, *_ in changes(run.identity["data"], data.fingerprint)]
        if differ:
            raise ValueError(
                f"--data {cfg.data} is not what {run.out} was trained on: {', '.join(differ)} "
                "differ; give the text of then by --data"
            )
        return data

    def claim_run(cfg, Model, model_config, *args, **kwargs):
        model = {"module": Model.__module__, "class": Model.__name__, **asdict(model_config)}
        for name, old, new in changes(run.identity["model"], model):
            # a field of today that is off changes nothing for a run of before
            if (old, new) in (("not set", "False"), ("not set", "None")):
                continue
            raise ValueError(
                f"{name} is {new} but {run.out} was trained with {old}: start the recipe of the run"
            )
        return real.claim_run(cfg, Model, model_config, *args, **kwargs)

    with mock.patch.dict(names, open_data=open_data, claim_run=claim_run):
        yield


@contextmanager
def stop_at(run: Run, cfg: Any) -> Iterator[None]:
    """While the recipe trains: compare each logged step with the run's log; at the step of the run
    examine the sequences, then raise Stopped."""
    state = SimpleNamespace(step=0, data=None)
    real = SimpleNamespace(
        forward_backward=parallel.forward_backward,
        start_step=Metrics.start_step,
        end_step=Metrics.end_step,
        log=Metrics.log,
        batches=TokenData.batches,
    )

    def batches(data, *args):
        state.data = data
        return real.batches(data, *args)

    def start_step(metrics, *args):
        state.step = metrics.step + 1
        return real.start_step(metrics, *args)

    def forward_backward(stages, batch, layout):
        loss = real.forward_backward(stages, batch, layout)
        if state.step == run.step:
            if state.data is None:
                raise RuntimeError("this recipe takes its batches from elsewhere than data.py")
            examine(run, cfg, real.forward_backward, stages, batch, layout, loss, state.data)
            raise Stopped
        return loss

    def end_step(metrics, *args):
        real.end_step(metrics, *args)
        if metrics.step == run.step:
            raise RuntimeError(
                "this recipe calls parallel.forward_backward nowhere, so there is no step to look "
                "into"
            )

    def log(metrics, step, *, loss, grad_norm, **others):
        real.log(metrics, step, loss=loss, grad_norm=grad_norm, **others)
        if own_rank() == 0 and computed_on(metrics.layout, cfg) == run.layout:
            text = compare_with_log(run, step, float(loss), float(grad_norm))
            if not text.endswith("to the bit"):
                print(f"replay: {text}", flush=True)

    def evaluate(*_):
        return math.nan, None, {}

    with (
        mock.patch.object(parallel, "forward_backward", forward_backward),
        # no validation: it changes nothing
        mock.patch.object(parallel, "evaluate", evaluate),
        mock.patch.object(Metrics, "log_val", do_nothing),
        mock.patch.object(TokenData, "batches", batches),
        mock.patch.multiple(Metrics, start_step=start_step, end_step=end_step, log=log),
    ):
        yield


def compare_with_log(run: Run, step: int, loss: float, norm: float, layout: str = "") -> str:
    """A sentence: are the loss and the gradient norm of a step as logged? layout: in words, if
    another than the run's."""
    line = run.logged.get(step)
    found = f"the loss of step {step} is {loss:.6g} and its gradient norm {norm:.6g}"
    if line is None:
        return f"{found}; metrics.jsonl has no line of it, so they are compared with nothing"
    want = line["loss"], line["grad_norm"]
    if want == (loss, norm):
        return f"{found}, as logged, to the bit"
    apart = []
    for name, got, was in zip(("loss", "norm"), (loss, norm), want, strict=True):
        # JSON has no NaN: the line has null
        if was == got:
            apart.append(f"{name} as logged")
        elif was is None or not math.isfinite(got):
            apart.append(f"{name} logged as {was}")
        else:
            apart.append(f"{name} logged as {was:.6g}, {abs(got - was) / abs(was or 1):.1e} apart")
    where = f"; it was logged on {run.layout}, and computed on {layout}" if layout else ""
    return f"{found}; {', '.join(apart)}{where}"


# ---------------------------------------------------------------- the step


def examine(
    run: Run,
    cfg: Any,
    forward_backward: Callable[..., Tensor],
    stages: list[nn.Module],
    batch: Any,
    layout: Layout,
    loss: Tensor,
    data: Any,
) -> None:
    """Compare the step with the log, compute each sequence alone, and print the report. Every rank
    calls. forward_backward: of parallel.py."""
    mean, _ = parallel.reduce_loss(loss, layout)
    norm = parallel.clip_grad_norm(stages, 0.0, layout)
    tokens_hash, _ = reduce_hash(batch.hash, layout)
    here = computed_on(layout, cfg)
    if layout.rank == 0:
        layout_text = "" if here == run.layout else here
        text = compare_with_log(run, run.step, float(mean), float(norm), layout_text)
        print(f"replay: {text}", flush=True)
        line = run.logged.get(run.step)
        if line and line["tokens_hash"] != tokens_hash:
            print("replay: the tokens of the step are not those that were logged", flush=True)
    total, _ = parallel.count_tokens(batch.labels, layout)
    whole = {id(p): local_tensor(p.grad).clone() for p in trained(stages)}
    step = Step(forward_backward, stages, batch, layout, total, whole)
    began = time.perf_counter()
    sequences = compute_sequences(step, data)
    if layout.rank == 0:
        facts = SimpleNamespace(
            loss=float(mean),
            square=float(norm) ** 2,
            tokens=int(total),
            seconds=time.perf_counter() - began,
        )
        print_replay(sequences, facts, files_of_parts(cfg.data, cfg.cache_dir))
