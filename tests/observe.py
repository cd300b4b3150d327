"""Runs a program of the repository in this process and keeps what the run shows: weights,
gradients, batches, collectives, files, printed lines. tests/flags/test_flags.py compares such runs
for every flag."""

import contextlib
import copy
import dataclasses
import gc
import importlib
import importlib.machinery
import io
import math
import os
import re
import shutil
import signal
import threading
import types
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from dry import collectives_of
from programs import hold_port, port_of
from runs import column, having, json_lines

import distributed.launch
import generate
import models.attention
import parallel
import storage.writer
import storage.writer_process
import tools.parity.against
import tools.parity.check_parity
import tools.parity.where
from data import open_data
from distributed.layout import local_tensor
from distributed.stages import split_stages
from rl import rollouts
from rl.datasets import open_task
from rl.rewards import Payments
from tools.reports import dryrun
from tools.reports.options import ReportConfig, report_or_train
from tools.reports.stop_main import stop_main
from training import metrics

PROGRAMS = ["train_llama3", "train_qwen3", "train_deepseek", "finetune", "grpo", "generate"]
MAINS = {program: importlib.import_module(program).main for program in PROGRAMS}
SIZES = "n_layers=2,dim=16,n_heads=2,n_kv_heads=2,head_dim=8,ffn_dim=32"
MODEL = SIZES + ",vocab_size=4096"
PLACES = {}  # paths that runs share: "<run>", a finished run; test_flags.py has more
WANDB = types.ModuleType("wandb")  # stands for the package
WANDB.__spec__ = importlib.machinery.ModuleSpec("wandb", None)


@contextlib.contextmanager
def tidy():
    """Whatever a run changes in this process is undone."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    threads = torch.get_num_threads()
    budget = torch._functorch.config.activation_memory_budget
    state = torch.get_rng_state()
    environ = dict(os.environ)
    for name in ("RANK", "WORLD_SIZE"):
        os.environ.pop(name, None)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        for number, handler in handlers.items():
            signal.signal(number, handler)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)
        torch._functorch.config.activation_memory_budget = budget
        torch.set_rng_state(state)
        os.environ.clear()
        os.environ.update(environ)
        gc.enable()


def do_nothing(*args, **kwargs):
    return None


def wrap(owner, name, before=do_nothing, after=do_nothing):
    """A patch: before(*args) is called before owner.name(*args), after(result, *args) after it."""
    real = getattr(owner, name)

    def wrapped(*args, **kwargs):
        before(*args, **kwargs)
        result = real(*args, **kwargs)
        after(result, *args, **kwargs)
        return result

    return mock.patch.object(owner, name, wrapped)


def weights(stages) -> dict:
    found = {}
    for stage in stages:
        for fqn, p in stage.named_parameters():
            found[fqn] = local_tensor(p).detach().clone()
    return found


def nothing_seen(cfg) -> SimpleNamespace:
    """What a run has shown before it starts."""
    return SimpleNamespace(
        cfg=cfg,
        out=cfg.out,
        error="",
        wandb=WANDB.init,
        stages=[],
        init=None,
        batches=[],
        grads=[],
        evaluated=[],
        collected=[],
        timeouts=[],
        dtypes=set(),
        writers=set(),
        warming=False,
        rollouts=[],
        samples=[],
        losses=[],
        clips=[],
        tis=[],
        lrs=[],
        warm_up=[],
    )


def watch_forward(seen, stages, batch):
    seen.stages = stages
    if seen.init is None:
        seen.init = weights(stages)
    seen.batches.append(batch)
    seen.deterministic = torch.are_deterministic_algorithms_enabled()


def watch_process(seen, module) -> list:
    """Patches for what every program may do: connect, attend, collect garbage, wait, write."""

    def connected(result, layout, *args, **kwargs):
        seen.layout = layout

    def attends(q, *args, **kwargs):
        seen.dtypes.add(q.dtype)

    def collects(*args):
        seen.collected.append(args)

    def makes_group(*args, **kwargs):
        seen.timeouts.append(kwargs.get("timeout"))

    def sets_timeout(timeout, group):
        seen.timeouts.append(timeout)

    def writes(*args, **kwargs):
        seen.writers.add(threading.current_thread().name)

    def starts_writer():
        seen.writers.add("process")

    return [
        wrap(module, "connect", after=connected),
        wrap(models.attention, "sdpa", before=attends),
        # the true one takes longer than a run
        mock.patch.object(metrics.gc, "collect", collects),
        wrap(dist, "init_process_group", before=makes_group),
        wrap(dist.distributed_c10d, "_set_pg_timeout", before=sets_timeout),
        wrap(storage.writer.Writer, "write", before=writes),
        wrap(storage.writer_process, "writer_process", before=starts_writer),
    ]


def watch_clipping(seen, owner, poison: int):
    """The patch for clip_grad_norm: keeps gradients; that of step `poison` becomes NaN before."""

    def spoil(stages, *args):
        if len(seen.grads) + 1 == poison:
            local_tensor(next(stages[0].parameters()).grad).fill_(math.nan)

    def keep_grads(norm, stages, *args):
        if seen.warming:
            return
        grads = {}
        for stage in stages:
            for fqn, p in stage.named_parameters():
                if p.grad is not None:
                    grads[fqn] = local_tensor(p.grad).detach().clone()
        seen.grads.append(grads)

    return wrap(owner, "clip_grad_norm", before=spoil, after=keep_grads)


def watch_grpo(seen, module, drift: float) -> list:
    def samples(model, prompts, noise, temperature, *args, **kwargs):
        about = SimpleNamespace(prompts=prompts, noise=noise, temperature=temperature, **kwargs)
        seen.rollouts.append(about)

    def sampled(result, *args, **kwargs):
        for s in result:
            s.logprobs = [x * drift for x in s.logprobs]
        seen.samples.append(copy.deepcopy(result))

    def loses(trainer, loss, b, ref, lp, entropy):
        if not seen.warming:
            seen.losses.append((loss, lp))

    def clips(ratio, advantage, *bounds):
        seen.clips.append(bounds)

    def weighs(tokens, mu, *how):
        seen.tis.append(how)

    def trains_on(trainer, samples, loss=None, counted=None):
        seen.warming = loss is module.SUPERVISED
        if not seen.warming:
            watch_forward(seen, [trainer.model], copy.deepcopy(counted or samples))

    def steps_with(trainer, lr=None, update=True):
        if seen.warming:
            seen.warm_up.append(lr)
        else:
            seen.lrs.append(lr)

    return [
        wrap(rollouts, "rollout", samples, sampled),
        wrap(module.Trainer, "loss_of_tokens", loses),
        wrap(module, "clip", clips),
        wrap(module, "tis_weight", weighs),
        wrap(module.Trainer, "train_on", trains_on),
        wrap(module.Trainer, "optim_step", steps_with),
    ]


def watch_training(seen, module) -> list:
    real = parallel.evaluate

    def forward(stages, batch, layout):
        watch_forward(seen, stages, batch)

    def evaluate(stages, batches, layout):
        batches = list(batches)
        sequences = 0
        for batch in batches:
            sequences += batch.tokens.shape[:2].numel()
        seen.evaluated.append(sequences)
        return real(stages, batches, layout)

    return [
        wrap(parallel, "forward_backward", forward),
        mock.patch.object(parallel, "evaluate", evaluate),
        mock.patch.object(module, "print_sample", do_nothing),
    ]


def launch_variables(port: int) -> dict[str, str]:
    """The environment of the only rank that torchrun starts."""
    return dict(
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        MASTER_ADDR="localhost",
        MASTER_PORT=str(port),
    )


def observed(program: str, cfg, poison=0, launched=False, continues=False, drift=1.0):
    """What a whole run shows. poison: the step whose gradient becomes NaN; launched: as by
    torchrun; continues: its folder holds the checkpoints of <run>; drift: the generator's
    log-probabilities are off by this factor."""
    module = importlib.import_module(program)
    texts = io.StringIO()
    WANDB.init = mock.MagicMock()
    seen = nothing_seen(cfg)
    patches = watch_process(seen, module)
    if program == "grpo":
        patches.append(watch_clipping(seen, module, poison))
        patches += watch_grpo(seen, module, drift)
    else:
        patches.append(watch_clipping(seen, parallel, poison))
        patches += watch_training(seen, module)
    patches.append(contextlib.redirect_stdout(texts))
    if continues:
        shutil.copytree(PLACES["<run>"], cfg.out, dirs_exist_ok=True)
    with tidy(), contextlib.ExitStack() as stack:
        if launched:
            holder = stack.enter_context(hold_port())
            os.environ.update(launch_variables(port_of(holder)))
        for patch in patches:
            stack.enter_context(patch)
        try:
            MAINS[program](cfg)
        except (ValueError, RuntimeError) as error:
            seen.error = str(error)
        seen.final = weights(seen.stages)
    seen.printed = texts.getvalue()
    read_folder(seen)
    return seen


def read_folder(seen) -> None:
    """Adds what the run has left in its folder."""
    out = Path(seen.out)
    seen.log = []
    if (out / "metrics.jsonl").exists():
        seen.log = json_lines(out / "metrics.jsonl")
    seen.lines = having(seen.log, "loss")
    seen.files = []
    seen.saved = []
    for path in sorted(out.rglob("*")):
        file = str(path.relative_to(out))
        seen.files.append(file)
        if re.fullmatch(r"checkpoints/step-\d+", file):
            seen.saved.append(path.name)


def built(program: str, cfg):
    """Stages, optimizers and layout as the recipe's main makes them, before any step."""
    with tidy(), contextlib.redirect_stdout(io.StringIO()):

        def connect(layout, *args, **kwargs):
            return distributed.launch.connect(layout, cfg, "cpu", cfg.seed)

        stages, optimizers, layout = dryrun.build(MAINS[program], cfg, connect)
        budget = torch._functorch.config.activation_memory_budget
    return SimpleNamespace(model=stages[0], optimizer=optimizers[0], layout=layout, budget=budget)


def planned(program: str, cfg):
    """A dry run: what the ranks hold, compute and send."""
    cfg.dp_shard = max(cfg.dp_shard, 1)
    with tidy():
        report = dryrun.make_report(MAINS[program], cfg)
    first = report.ranks[0]
    moved = collectives_of(first.step)
    held = {}
    for stage in first.stages:
        for fqn, p in stage.named_parameters():
            held[fqn] = tuple(local_tensor(p).shape)

    def number(*key):
        return moved.get(key, (0, 0))[0]

    def size(*key):
        return moved.get(key, (0, 0))[1]

    return SimpleNamespace(
        report=report,
        first=report.rows[0][:2],
        recomputed=first.flops("recompute"),
        kept=first.activations,
        blocks=list(map(blocks_of, report.ranks)),
        held=held,
        schedule=type(getattr(first.stages[0], "schedule", None)).__name__,
        number=number,
        bytes=size,
    )


def blocks_of(rank) -> str:
    """The names of a rank's blocks, in one word."""
    names = ""
    for stage in rank.stages:
        names += "".join(stage.blocks)
    return names


def trains(cfg):
    print("trains")


def says_parity(main, cfg, through):
    print("parity of", cfg.flavor, "through", through)


def says_where(main, cfg, advice):
    print("every operation of", advice)


def says_against(main, cfg, folder):
    print("against", folder)


def fields_of(cfg, Config) -> dict:
    return {field.name: getattr(cfg, field.name) for field in dataclasses.fields(Config)}


def printed(program: str, cfg) -> str:
    """What a start prints until it trains or ends."""
    module = importlib.import_module(program)
    text = io.StringIO()
    cfg.dp_shard = max(cfg.dp_shard, 1)
    options = ReportConfig(**fields_of(cfg, ReportConfig))
    plain = module.Config(**fields_of(cfg, module.Config))
    main = trains
    if options.dry_run or options.explain or options.check:
        main = module.main
    with (
        tidy(),
        contextlib.redirect_stdout(text),
        mock.patch.object(tools.parity.check_parity, "check_parity", says_parity),
        mock.patch.object(tools.parity.where, "check_where", says_where),
        mock.patch.object(tools.parity.against, "check_against", says_against),
    ):
        report_or_train(main, plain, options)
    return text.getvalue()


def configured(program: str, cfg):
    """The model's config that main makes of the flags."""
    with tidy():
        return stop_main(MAINS[program], dataclasses.replace(cfg), "check_layout")[0][1]


def patience(program: str, cfg) -> list:
    """The timeouts of the groups in which GRPO's ranks wait for samples."""
    asked = []

    def group(world, seconds):
        asked.append(seconds)

    with mock.patch.object(rollouts, "patient_group", group):
        rollouts.lockstep(SimpleNamespace(ep=cfg.ep, tp=1), cfg.rollout_timeout_s)
    return asked


def paid(program: str, cfg) -> float:
    """For an answer with something before it."""
    return open_task(cfg).reward("7 times 7", "it is 49")


def payments(program: str, cfg) -> list:
    """Of two samples, or "late"."""
    payments = Payments(open_task(cfg), 2, dataclasses.replace(cfg, failed_reward=0.0))
    for i, completion in enumerate(("slow", "quick")):
        payments.add(i, ("", [completion], [False]))
    found = []
    for reward, failure, _ in payments.wait():
        if failure:
            found.append("late")
        else:
            found.append(reward)
    return found


def split(program: str, cfg) -> list:
    """The modules of each pipeline stage of a model of 10 layers."""
    return split_stages(cfg, cfg.pp, 10)


def opened(program: str, cfg):
    cfg.cache_dir = cfg.cache_dir or PLACES["<cache>"]
    return open_data(cfg, cfg.seq_len)


def written(program: str, cfg) -> str:
    """What generate.py prints."""
    text = io.StringIO()
    with (
        tidy(),
        mock.patch.object(generate, "parse_config", lambda Config, argv: cfg),
        contextlib.redirect_stdout(text),
    ):
        with contextlib.redirect_stderr(text), contextlib.suppress(SystemExit):
            generate.main([])
    return text.getvalue()


def is_matrix(fqn, w) -> bool:
    return w.dim() > 1


def follows(
    run, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, decays=is_matrix, only=""
) -> bool:
    """Whether the weights moved from first to last as AdamW moves them, by the gradients and rates
    that were seen."""
    for fqn, first in run.init.items():
        if only not in fqn:
            continue
        w = first.double()
        m = 0.0
        v = 0.0
        for t, (grads, line) in enumerate(zip(run.grads, run.lines, strict=True), 1):
            g = grads[fqn].double()
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            w = w - line["lr"] * weight_decay * w * decays(fqn, w)
            w = w - line["lr"] * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
        if (run.final[fqn].double() - w).abs().max() > 2e-6:
            return False
    return True


def rates(run) -> list[float]:
    return [round(line["lr"], 8) for line in run.lines]


def near(values, wanted) -> bool:
    if len(values) != len(wanted):
        return False
    return all(abs(a - b) <= 1e-4 * abs(b) for a, b in zip(values, wanted))


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def hashes(run) -> list[str]:
    return column(run.lines, "tokens_hash")


def steps(run) -> list[int]:
    return column(run.lines, "step")
