"""What every flag does, against all programs: one row per flag, with a value, and what must change
when it is given.

A row runs its program with and without the flag and compares what was seen: numbers of the log,
weights, gradients, collectives, files, printed lines. The runs are small, in this process, and
shared between rows. Three things keep the table
honest: a flag without a row fails (test_every_flag_has_a_row), no row may hold where the flag is
not given, and `make
test-slow` repeats every row with a Config that ignores the flag.

For a flag of your own add its row: row("my_flag", value, lambda new, old: what is different in new,
flags that it needs).
"""

import contextlib
import copy
import dataclasses
import functools
import gc
import importlib
import importlib.machinery
import io
import json
import math
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import types
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from programs import REPO, hold_port, port_of
from safetensors.torch import load_file
from test_flags_elsewhere import ELSEWHERE

import distributed.launch
import generate
import models.attention
import models.llama3
import parallel
import storage.writer
import tools.parity.against
import tools.parity.check_parity
import tools.parity.where
from data import DataConfig, open_data
from distributed.layout import local_tensor
from distributed.pipeline import split_stages
from flags.config import option_groups
from rl import rollouts
from rl.datasets import open_task
from rl.rewards import Payments
from storage.adapters import is_adapter
from tools.reports import dryrun
from tools.reports.options import ReportConfig, report_or_train, with_report_flags
from tools.reports.stop_main import stop_main
from training import metrics

PROGRAMS = ["train_llama3", "train_qwen3", "train_deepseek", "finetune", "grpo", "generate"]
MAINS = {program: importlib.import_module(program).main for program in PROGRAMS}
SIZES = "n_layers=2,dim=16,n_heads=2,n_kv_heads=2,head_dim=8,ffn_dim=32"
MODEL, FOUR_LAYERS = SIZES + ",vocab_size=4096", SIZES.replace("n_layers=2", "n_layers=4")
MLA = (
    "n_layers=2,dim=16,n_heads=2,ffn_dim=32,vocab_size=4096,q_lora_rank=8,kv_lora_rank=8,qk_nope_head_dim=8,"
    "qk_rope_head_dim=4,v_head_dim=8,moe_ffn_dim=16"
)
# What all runs have in common. A flag that is "not given" has this value, or else its default;
# names in angle brackets stand for paths, see places().
COMMON = dict(
    seq_len=16,
    local_batch_size=2,
    steps=4,
    warmup_steps=1,
    val_every=0,
    checkpoint_every=0,
    log_every=1,
    device="cpu",
    compute_dtype="float32",
    data="<shards>",
    out="<tmp>",
)
BASE = {
    "train_llama3": COMMON | dict(model_args=MODEL),
    "train_qwen3": COMMON | dict(model_args=MODEL + ",moe_ffn_dim=16", flavor="debug_moe"),
    "train_deepseek": COMMON | dict(model_args=MLA, flavor="debug_mtp"),
    "finetune": COMMON | dict(init_from="<run>"),
    "grpo": dict(
        env=str(REPO / "tests" / "env_counting.py"),
        model_args=SIZES,
        prompts_per_step=4,
        group_size=4,
        steps=2,
        max_new_tokens=6,
        seq_len=16,
        device="cpu",
        sft_steps=2,
        eval_n=4,
        eval_k=2,
        eval_every=0,
        out="<tmp>",
        local_batch_size=16,
        log_every=1,
        checkpoint_every=0,
        warmup_steps=1,
    ),
    "generate": dict(checkpoint="<run>", prompt="7 times", max_new_tokens=12, device="cpu"),
}
PLACES = {}  # what the names in angle brackets stand for
WANDB = types.ModuleType("wandb")  # stands for the package
WANDB.__spec__ = importlib.machinery.ModuleSpec("wandb", None)


@pytest.fixture(autouse=True, scope="module")
def places(tmp_path_factory):
    """A text, its shards, a schedule, another tokenizer, and a finished run to start from."""
    folder = tmp_path_factory.mktemp("flags")
    text = "".join(json.dumps({"text": f"{i} times {i} is {i * i}, "}) + "\n" for i in range(3000))
    (folder / "a.jsonl").write_text(text)
    (folder / "gsm8k.jsonl").write_text(text.replace('"text"', '"answer": "#### 3", "question"'))
    own = (
        "from tests.env_counting import *\nimport threading\nimport time\n\nquick = "
        "threading.Event()\n\n\n"
        "def reward(prompt, completion):\n    return "
    )
    for name, code in (
        ("broken", "1.0 if len(completion) % 2 else None"),
        ("slow", "completion != 'slow' or time.sleep(0.6) or False"),
        ("threads", "quick.wait(2) if completion == 'slow' else quick.set() is not None"),
    ):
        (folder / f"{name}.py").write_text(own + code + "\n")
    for name, begin in (("sums", 0), ("sums2", 50)):
        (folder / f"{name}.jsonl").write_text(
            "".join(
                json.dumps({"prompt": f"{i} times {i}", "answer": i * i}) + "\n"
                for i in range(begin, begin + 50)
            )
        )
    (folder / "order.csv").write_text("0F0,0F1,0B1,0B0\n1F0,1F1,1B1,1B0\n")
    files = dict(
        text="a.jsonl",
        csv="order.csv",
        gsm8k="gsm8k.jsonl",
        sums="sums.jsonl",
        sums2="sums2.jsonl",
        letters="letters.json",
        broken="broken.py",
        slow="slow.py",
        threads="threads.py",
    )
    folders = {
        name: name for name in ("shards", "cache", "other_cache", "run", "new", "new_rl", "page")
    }
    PLACES.update({f"<{name}>": str(folder / file) for name, file in (files | folders).items()})
    shutil.copytree(
        open_data(DataConfig(data=PLACES["<text>"], cache_dir=PLACES["<cache>"]), 16).folder,
        folder / "shards",
    )
    tokenizer = json.loads(Path(PLACES["<shards>"], "tokenizer.json").read_text())
    tokenizer["model"]["merges"], known = [], {entry["id"] for entry in tokenizer["added_tokens"]}
    tokenizer["model"]["vocab"] = {
        k: v for k, v in tokenizer["model"]["vocab"].items() if len(k) == 1 or v in known
    }
    (folder / "letters.json").write_text(json.dumps(tokenizer))
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch, mock.patch.dict(os.environ, OMP_NUM_THREADS="1"):
        # patch.dict would forget all modules that are imported until its end
        patch.setitem(sys.modules, "wandb", WANDB)
        made = observed(
            "train_llama3", config("train_llama3", dict(out="<run>", steps=2, checkpoint_every=1))
        )
        assert not made.error, made.error
        PLACES["run"] = made
        yield
    seen_once.cache_clear()


# --------------------------------------------------------------- running a program, and watching it


def place(value):
    return (
        tempfile.mkdtemp()
        if value == "<tmp>"
        else PLACES.get(value, value)
        if isinstance(value, str)
        else value
    )


def config_class(program: str):
    Config = importlib.import_module(program).Config
    return with_report_flags(Config) if program.startswith("train_") else Config


def config(program: str, flags: dict, ignored=""):
    """The Config of a program's run, whose field `ignored` reads as if the flag had not been given."""
    module, base = importlib.import_module(program), BASE[program]
    Config = config_class(program)
    values = {name: place(value) for name, value in (base | flags).items()}
    try:
        cfg = Config(**values)
    except ValueError:
        # without the row's flag another one may be refused: the run then fails, and is compared as
        # such
        with mock.patch.object(module.Config, "__post_init__", lambda cfg: None):
            cfg = Config(**values)
    if ignored:
        value = place(base.get(ignored, getattr(Config(), ignored)))
        # replace() makes an ordinary one again, with the value read
        instead = {ignored: value, "__class__": Config}

        def read(self, name):
            return instead[name] if name in instead else object.__getattribute__(self, name)  # noqa: E731

        cfg.__class__ = type("Config", (Config,), {"__getattribute__": read})
    return cfg


@contextlib.contextmanager
def tidy():
    """Whatever a run changes in this process is undone."""
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    threads, budget, state = (
        torch.get_num_threads(),
        torch._functorch.config.activation_memory_budget,
        torch.get_rng_state(),
    )
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


def wrap(owner, name, before=lambda *a, **k: None, after=lambda result, *a, **k: None):
    real = getattr(owner, name)

    def wrapped(*args, **kwargs):
        before(*args, **kwargs)
        result = real(*args, **kwargs)
        after(result, *args, **kwargs)
        return result

    return mock.patch.object(owner, name, wrapped)


def weights(stages) -> dict:
    return {
        fqn: local_tensor(p).detach().clone()
        for stage in stages
        for fqn, p in stage.named_parameters()
    }


def observed(program: str, cfg, poison=0, launched=False, continues=False, drift=1.0):
    """What a whole run shows. poison: the step whose gradient becomes NaN; launched: as by
    torchrun; continues: its folder holds the checkpoints of <run>; drift: the generator's
    log-probabilities are off by this factor."""
    module, texts = importlib.import_module(program), io.StringIO()
    WANDB.init = mock.MagicMock()
    seen = SimpleNamespace(
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
        lrs=[],
        warm_up=[],
    )

    def forward(stages, batch):
        seen.stages, seen.init = stages, weights(stages) if seen.init is None else seen.init
        seen.batches.append(batch)
        seen.deterministic = torch.are_deterministic_algorithms_enabled()

    def spoil(stages, *args):
        if len(seen.grads) + 1 == poison:
            local_tensor(next(stages[0].parameters()).grad).fill_(math.nan)

    def keep_grads(norm, stages, *args):
        named = [
            (fqn, p)
            for stage in stages
            for fqn, p in stage.named_parameters()
            if p.grad is not None
        ]
        if not seen.warming:
            seen.grads.append({fqn: local_tensor(p.grad).detach().clone() for fqn, p in named})

    def sampled(result, *args, **kwargs):
        for s in result:
            s["logprobs"] = [x * drift for x in s["logprobs"]]
        seen.samples.append(copy.deepcopy(result))

    def policy(trainer, samples, loss="", counted=None):
        seen.warming = loss == "sft"
        if not seen.warming:
            forward([trainer.model], copy.deepcopy(counted or samples))

    patches = [
        wrap(
            module if program == "grpo" else parallel,
            "clip_grad_norm",
            before=spoil,
            after=keep_grads,
        ),
        wrap(
            module, "connect", after=lambda result, layout, *a, **k: setattr(seen, "layout", layout)
        ),
        wrap(models.attention, "sdpa", before=lambda q, *a, **k: seen.dtypes.add(q.dtype)),
        # the true one takes longer than a run
        mock.patch.object(metrics.gc, "collect", lambda *a: seen.collected.append(a)),
        wrap(
            dist,
            "init_process_group",
            before=lambda *a, **k: seen.timeouts.append(k.get("timeout")),
        ),
        wrap(
            dist.distributed_c10d,
            "_set_pg_timeout",
            before=lambda timeout, group: seen.timeouts.append(timeout),
        ),
        wrap(
            storage.writer.Writer,
            "write",
            before=lambda *a, **k: seen.writers.add(threading.current_thread().name),
        ),
        wrap(storage.writer, "writer_process", before=lambda: seen.writers.add("process")),
    ]
    if program == "grpo":
        patches += [
            wrap(
                rollouts,
                "rollout",
                lambda model, prompts, noise, temperature, *a, **k: seen.rollouts.append(
                    SimpleNamespace(prompts=prompts, noise=noise, temperature=temperature, **k)
                ),
                sampled,
            ),
            wrap(
                module, "policy_loss", lambda *a: None if a[0] == "sft" else seen.losses.append(a)
            ),
            wrap(module.Trainer, "train_on", policy),
            wrap(
                module.Trainer,
                "optim_step",
                lambda trainer, lr=None, update=True: (
                    seen.warm_up if seen.warming else seen.lrs
                ).append(lr),
            ),
        ]
    else:
        real = parallel.evaluate

        def evaluate(stages, batches, layout):
            batches = list(batches)
            # sequences
            seen.evaluated.append(sum(batch.tokens.shape[:2].numel() for batch in batches))
            return real(stages, batches, layout)

        patches += [
            wrap(
                parallel, "forward_backward", lambda stages, batch, layout: forward(stages, batch)
            ),
            mock.patch.object(parallel, "evaluate", evaluate),
            mock.patch.object(module, "print_sample", lambda *a: None),
        ]
    if continues:
        shutil.copytree(PLACES["<run>"], cfg.out, dirs_exist_ok=True)
    with tidy(), contextlib.ExitStack() as stack:
        if launched:
            holder = stack.enter_context(hold_port())
            os.environ.update(
                RANK="0",
                WORLD_SIZE="1",
                LOCAL_RANK="0",
                MASTER_ADDR="localhost",
                MASTER_PORT=str(port_of(holder)),
            )
        for patch in [*patches, contextlib.redirect_stdout(texts)]:
            stack.enter_context(patch)
        try:
            MAINS[program](cfg)
        except (ValueError, RuntimeError) as error:
            seen.error = str(error)
        seen.final = weights(seen.stages)
    seen.printed, path = texts.getvalue(), Path(seen.out, "metrics.jsonl")
    seen.log = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    seen.lines = [line for line in seen.log if "loss" in line]
    seen.files = [str(path.relative_to(seen.out)) for path in sorted(Path(seen.out).rglob("*"))]
    seen.saved = [
        file.split("/")[1] for file in seen.files if re.fullmatch(r"checkpoints/step-\d+", file)
    ]
    return seen


def built(program: str, cfg):
    """Stages, optimizers and layout as the recipe's main makes them, before any step."""
    with tidy(), contextlib.redirect_stdout(io.StringIO()):

        def connect(layout, *args, **kwargs):
            return distributed.launch.connect(layout, cfg, "cpu", cfg.seed)  # noqa: E731

        stages, optimizers, layout = dryrun.build(MAINS[program], cfg, connect)
        budget = torch._functorch.config.activation_memory_budget
    return SimpleNamespace(model=stages[0], optimizer=optimizers[0], layout=layout, budget=budget)


def planned(program: str, cfg):
    """A dry run: what the ranks hold, compute and send."""
    cfg.dp_shard = max(cfg.dp_shard, 1)
    with tidy():
        report = dryrun.make_report(MAINS[program], cfg)
    first = report.ranks[0]
    moved = dryrun.totals({key[1:]: n for key, n in first.step.items() if key[0] == "moved"})
    return SimpleNamespace(
        report=report,
        first=report.rows[0][:2],
        recomputed=first.flops("recompute"),
        kept=first.activations,
        blocks=[
            "".join(name for stage in rank.stages for name in stage.blocks) for rank in report.ranks
        ],
        held={
            fqn: tuple(local_tensor(p).shape)
            for stage in first.stages
            for fqn, p in stage.named_parameters()
        },
        schedule=type(getattr(first.stages[0], "schedule", None)).__name__,
        number=lambda *key: moved.get(key, (0, 0))[0],
        bytes=lambda *key: moved.get(key, (0, 0))[1],
    )


def printed(program: str, cfg) -> str:
    """What a start prints until it trains or ends."""
    module, text = importlib.import_module(program), io.StringIO()
    cfg.dp_shard = max(cfg.dp_shard, 1)
    reports = [field.name for field in dataclasses.fields(ReportConfig)]
    options = ReportConfig(**{name: getattr(cfg, name) for name in reports})
    plain = module.Config(
        **{field.name: getattr(cfg, field.name) for field in dataclasses.fields(module.Config)}
    )
    main = module.main if options.dry_run or options.explain else lambda cfg: print("trains")
    with (
        tidy(),
        contextlib.redirect_stdout(text),
        mock.patch.object(
            tools.parity.check_parity,
            "check_parity",
            lambda main, cfg, through: print("parity of", cfg.flavor, "through", through),
        ),
        mock.patch.object(
            tools.parity.where,
            "check_where",
            lambda main, cfg, advice: print("every operation of", advice),
        ),
        mock.patch.object(
            tools.parity.against,
            "check_against",
            lambda main, cfg, folder: print("against", folder),
        ),
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
    with mock.patch.object(rollouts, "patient_group", lambda world, seconds: asked.append(seconds)):
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
    return ["late" if failure else reward for reward, failure, _ in payments.wait()]


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


@functools.cache
def seen_once(run, program: str, flags: str, options: str):
    return run(program, config(program, json.loads(flags)), **json.loads(options))


def seen(row, given=True, ignored=False):
    flags = row.also | ({row.flag: row.value} if given else {})
    if ignored:
        return row.run(row.program, config(row.program, flags, row.flag), **row.options)
    return seen_once(
        row.run, row.program, json.dumps(flags, sort_keys=True), json.dumps(row.options)
    )


# ---------------------------------------------------------------- what to look for


def follows(
    run,
    beta1=0.9,
    beta2=0.95,
    eps=1e-8,
    weight_decay=0.1,
    decays=lambda fqn, w: w.dim() > 1,
    only="",
) -> bool:
    """Whether the weights moved from first to last as AdamW moves them, by the gradients and rates
    that were seen."""
    for fqn, first in run.init.items():
        w, m, v = first.double(), 0.0, 0.0
        if only not in fqn:
            continue
        for t, (grads, line) in enumerate(zip(run.grads, run.lines, strict=True), 1):
            g = grads[fqn].double()
            m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
            w = w - line["lr"] * weight_decay * w * decays(fqn, w)
            w = w - line["lr"] * (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
        if (run.final[fqn].double() - w).abs().max() > 2e-6:
            return False
    return True


def rates(run) -> list[float]:
    return [round(line["lr"], 8) for line in run.lines]


def near(values, wanted) -> bool:
    return len(values) == len(wanted) and all(
        abs(a - b) <= 1e-4 * abs(b) for a, b in zip(values, wanted)
    )


def equal(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def hashes(run) -> list[str]:
    return [line["tokens_hash"] for line in run.lines]


def steps(run) -> list[int]:
    return [line["step"] for line in run.lines]


def types_of(b) -> list[str]:
    return [type(module).__name__ for module in b.model.modules()]


def seconds(text: str) -> float:
    return float(re.search(r"at least (\S+) s", text)[1])


def exported(run) -> dict:
    path = Path(run.cfg.export_hf, "model.safetensors")
    return load_file(path) if path.exists() else {}


# ---------------------------------------------------------------- the table

ROWS, W1, LORA_B = [], "blocks.0.moe.experts.w1", "blocks.0.attn.wq.lora_b.weight"
ADAMW = dict(beta1=0.5, beta2=0.5, eps=0.1)  # far from the defaults


def adapted(run) -> set[str]:
    """The linears of the blocks beside which adapters have a gradient, if nothing else has one."""
    return {fqn.split(".")[-3] if is_adapter(fqn) else fqn for fqn in run.grads[0]}


def row(flag, value, effect, run=observed, program="train_llama3", options=None, **also):
    """flag and value, beside the flags `also`, must make effect(new, old) true: of what is seen
    with it and without it."""
    ROWS.append(
        SimpleNamespace(
            flag=flag,
            value=value,
            effect=effect,
            run=run,
            program=program,
            also=also,
            options=options or {},
        )
    )


# --- the mesh, and how it is used: parallel.py
row("dp_replicate", 2, lambda new, old: new.number("dp_replicate", "all_reduce") > 0, planned)
row("dp_shard", 2, lambda new, old: new.number("fsdp", "reduce_scatter") > 0, planned)
row(
    "tp",
    2,
    lambda new, old: (
        new.number("tp", "all_gather") > 0 and new.held["blocks.0.attn.wq.weight"] == (8, 16)
    ),
    planned,
)
row("pp", 2, lambda new, old: new.blocks == ["0", "1"], planned)
row("cp", 2, lambda new, old: new.number("cp", "all_gather") > 0, planned)
row(
    "ep", 2, lambda new, old: new.number("ep", "all_to_all") > 0, planned, "train_qwen3", dp_shard=2
)
row(
    "etp",
    2,
    lambda new, old: (new.held[W1], old.held[W1]) == ((8, 8, 16), (4, 16, 16)),
    planned,
    "train_qwen3",
    tp=2,
)
row(
    "reshard_after_forward",
    "never",
    lambda new, old: new.number("fsdp", "all_gather") < old.number("fsdp", "all_gather"),
    planned,
    dp_shard=2,
)
row(
    "cpu_offload",
    True,
    lambda new, old: (
        isinstance(new.model, parallel.FSDPModule)
        and type(new.model._get_fsdp_state()._fsdp_param_group.offload_policy).__name__
        == "CPUOffloadPolicy"
    ),
    built,
)
row(
    "loss_parallel",
    False,
    lambda new, old: new.bytes("tp", "all_gather") > old.bytes("tp", "all_gather"),
    planned,
    tp=2,
)
row(
    "pp_schedule",
    "Interleaved1F1B",
    lambda new, old: new.schedule == "ScheduleInterleaved1F1B",
    planned,
    pp=2,
    local_batch_size=4,
    model_args=FOUR_LAYERS,
)
row(
    "pp_schedule_csv",
    "<csv>",
    lambda new, old: (
        new.schedule == "_PipelineScheduleRuntime" and new.first == [("F", 0, 0), ("F", 0, 1)]
    ),
    planned,
    pp=2,
)
row(
    "pp_microbatch_size",
    2,
    lambda new, old: new.report.n == old.report.n // 2,
    planned,
    pp=2,
    local_batch_size=4,
)
row(
    "pp_layers_per_stage",
    2,
    lambda new, old: list(map(len, new)) == [2, 2, 2, 2, 2, 3],
    split,
    pp=2,
    pp_schedule="LoopedBFS",
)
row("pp_first_stage_less_layers", 0, lambda new, old: list(map(len, new)) == [7, 6], split, pp=2)
row("pp_last_stage_less_layers", 3, lambda new, old: list(map(len, new)) == [7, 6], split, pp=2)
row(
    "pp_stage_fqns",
    "tok_embeddings;blocks.0,blocks.1,norm,head",
    lambda new, old: new.blocks == ["", "01"],
    planned,
    pp=2,
    local_batch_size=4,
)
row("cp_method", "alltoall", lambda new, old: new.number("cp", "all_to_all") > 0, planned, cp=2)
row("compute_dtype", "bfloat16", lambda new, old: new.dtypes == {torch.bfloat16})
row(
    "param_dtype",
    "bfloat16",
    lambda new, old: {w.dtype for w in new.final.values()} == {torch.bfloat16},
)
row(
    "reduce_dtype",
    "bfloat16",
    lambda new, old: 2 * new.bytes("fsdp", "reduce_scatter") == old.bytes("fsdp", "reduce_scatter"),
    planned,
    dp_shard=2,
)
row(
    "ac",
    "full",
    lambda new, old: new.recomputed > 0 and new.kept < 0.4 * old.kept,
    planned,
    seq_len=64,
    model_args=FOUR_LAYERS + ",vocab_size=32",
)
row(
    "ac_every",
    1,
    lambda new, old: new.recomputed > 1.5 * old.recomputed > 0,
    planned,
    ac="selective",
)
row("ac_budget", 0.25, lambda new, old: new.budget == 0.25, built, ac="budget", compile=True)
row(
    "compile",
    True,
    lambda new, old: all(
        hasattr(b.forward, "_torchdynamo_orig_callable") for b in new.model.blocks.values()
    ),
    built,
)
row("float8", "rowwise", lambda new, old: types_of(new).count("Float8Linear") == 14, built)
row(
    "float8_filter",
    ["wk", "ffn"],
    lambda new, old: types_of(new).count("Float8Linear") == 6,
    built,
    float8="rowwise",
)
row(
    "lora_rank",
    2,
    lambda new, old: (
        adapted(new) == {"wq", "wk", "wv", "wo"} and new.grads[0][LORA_B].shape == (16, 2)
    ),
    program="finetune",
)
row(
    "lora_alpha",
    64.0,
    lambda new, old: near([new.grads[0][LORA_B].norm()], [2 * old.grads[0][LORA_B].norm()]),
    program="finetune",
    lora_rank=2,
    max_norm=0,
)
row(
    "lora_on",
    ["w1", "wo"],
    lambda new, old: adapted(new) == {"w1", "wo"},
    program="finetune",
    lora_rank=2,
)
row("init_from", "", lambda new, old: "--init_from FOLDER --data" in new.error, program="finetune")
row("data", "", lambda new, old: "--init_from FOLDER --data" in new.error, program="finetune")
row(
    "doc_mask",
    False,
    lambda new, old: new.batches[0].doc_ids is None and old.batches[0].doc_ids is not None,
    program="finetune",
)
row(
    "lr",
    1e-3,
    lambda new, old: near(rates(new)[:1], [1e-3]) and near(rates(old)[:1], [1e-5]),
    program="finetune",
)
row("deterministic", True, lambda new, old: new.deterministic)
row(
    "init_timeout_s",
    77,
    lambda new, old: {t.total_seconds() for t in new.timeouts[:4]} == {77},
    options=dict(launched=True),
)
row(
    "train_timeout_s",
    78,
    lambda new, old: {t.total_seconds() for t in new.timeouts[-3:]} == {78},
    options=dict(launched=True),
)
# --- modes
row("dry_run", True, lambda new, old: "Peak" in new and "trains" in old, printed)
row(
    "explain",
    True,
    lambda new, old: "One block of" in new and "trains" in old,
    printed,
    model_args=SIZES.replace("n_layers=2", "n_layers=3"),
)
row(
    "html",
    "<page>",
    lambda new, old: "every rank holds" in new and os.path.exists(PLACES["<page>"]),
    printed,
    explain=True,
    model_args=SIZES.replace("n_layers=2", "n_layers=3"),
)
row("check_parity", True, lambda new, old: "parity of" in new and "trains" in old, printed)
row(
    "through",
    "tp=2",
    lambda new, old: "through tp=2" in new and "parity of" in old,
    printed,
    check_parity=True,
)
row(
    "where",
    True,
    lambda new, old: "every operation of" in new and "parity of" in old,
    printed,
    check_parity=True,
)
row(
    "against",
    "folder",
    lambda new, old: "against folder" in new and "every operation of" in old,
    printed,
    check_parity=True,
    where=True,
)
row(
    "advice",
    False,
    lambda new, old: "of False" in new and "of True" in old,
    printed,
    check_parity=True,
    where=True,
)
row(
    "best",
    1,
    lambda new, old: "legal layouts of 1 device;" in new and "Peak" in old,
    printed,
    dry_run=True,
)
row("machine", "B200", lambda new, old: seconds(new) < 0.5 * seconds(old), printed, dry_run=True)
# --- the recipe
row(
    "flavor",
    "1B",
    lambda new, old: (new.n_kv_heads, new.max_seq_len, old.dim) == (8, 131072, 192),
    configured,
    model_args="",
)
row("model_args", MODEL + ",rope_theta=7", lambda new, old: new.rope_theta == 7, configured)
row("out", "<new>", lambda new, old: new.out == PLACES["<new>"] and "metrics.jsonl" in new.files)
row("steps", 6, lambda new, old: steps(new) == [1, 2, 3, 4, 5, 6])
row(
    "seq_len",
    32,
    lambda new, old: new.batches[0].tokens.shape == (1, 2, 32) and new.lines[0]["tokens"] == 64,
)
row("local_batch_size", 3, lambda new, old: new.batches[0].tokens.shape == (1, 3, 16))
row(
    "global_batch_size",
    6,
    lambda new, old: new.batches[0].tokens.shape == (3, 2, 16) and new.lines[1]["tokens"] == 192,
)
row(
    "optimizer",
    "muon",
    lambda new, old: (
        not follows(new, only="blocks.0.ffn.w1") and follows(new, only="tok_embeddings")
    ),
)
row(
    "lr",
    0.01,
    lambda new, old: near(rates(new), [0.01, 0.008682, 0.0055, 0.002318]) and follows(new),
)
row("min_lr_ratio", 0.5, lambda new, old: near(rates(new), [0.003, 0.0027803, 0.00225, 0.0017197]))
row("warmup_steps", 3, lambda new, old: near(rates(new), [0.001, 0.002, 0.003, 0.00165]))
row("decay_ratio", 0.25, lambda new, old: near(rates(new), [0.003, 0.003, 0.003, 0.00165]))
row("decay_type", "linear", lambda new, old: near(rates(new), [0.003, 0.002325, 0.00165, 0.000975]))
row(
    "decay_type",
    "sqrt",
    lambda new, old: near(rates(new), [0.003, 0.00165, 0.00109081, 0.00066173]),
)
row(
    "schedule_steps",
    8,
    lambda new, old: near(rates(new), [0.003, 0.00289723, 0.00260459, 0.00216664]),
)
for name, value in (ADAMW | {"weight_decay": 2.0}).items():
    row(name, value, lambda new, old, given={name: value}: follows(new, **given))
row("wd_on", "all", lambda new, old: follows(new, decays=lambda fqn, w: True))
row(
    "optimizer",
    "adamw_sr",
    lambda new, old: getattr(new.optimizer, "bf16_stochastic_round", False),
    built,
    param_dtype="bfloat16",
)
row(
    "max_norm",
    0.01,
    lambda new, old: abs(sum(g.square().sum() for g in new.grads[0].values()) ** 0.5 - 0.01) < 1e-5,
)
row(
    "on_nan",
    "skip",
    lambda new, old: (
        "step skipped" in new.printed and len(new.lines) == 4 and "step 2" in old.error
    ),
    options=dict(poison=2),
)
row("seed", 1, lambda new, old: not equal(new.init, old.init) and hashes(new) == hashes(old))
row(
    "val_every",
    3,
    lambda new, old: [line["step"] for line in new.log if "val_loss" in line] == [3, 4],
)
row("val_batches", 2, lambda new, old: new.evaluated == [16] and old.evaluated == [64], val_every=4)
row("checkpoint_every", 2, lambda new, old: new.saved == ["step-2", "step-4"])
row("log_every", 3, lambda new, old: steps(new) == [1, 3, 4])
row(
    "device",
    "cuda",
    lambda new, old: (
        "torch finds 0 GPUs" in new.error
        if not torch.cuda.is_available()
        else new.layout.device.type == "cuda"
    ),
)
# --- data.py
row("data", "<text>", lambda new, old: Path(PLACES["<cache>"]) in new.folder.parents, opened)
row(
    "val_data",
    "<text>",
    lambda new, old: (
        new.n_val_samples > 10 * old.n_val_samples and new.fingerprint == old.fingerprint
    ),
    opened,
)
row(
    "tokenizer",
    "<letters>",
    lambda new, old: new.vocab_size < old.vocab_size / 2,
    opened,
    data="<text>",
)
row(
    "cache_dir",
    "<other_cache>",
    lambda new, old: Path(PLACES["<other_cache>"]) in new.folder.parents,
    opened,
    data="<text>",
)
row(
    "doc_mask",
    True,
    lambda new, old: (
        new.batches[0].positions.max() < old.batches[0].positions.max() == 15
        and new.lines[0]["loss"] != old.lines[0]["loss"]
    ),
)
row("data_seed", 1, lambda new, old: hashes(new) != hashes(old) and equal(new.init, old.init))
# --- metrics.py
row("tensorboard", True, lambda new, old: any(file.startswith("tb/events") for file in new.files))
row(
    "wandb",
    "team",
    lambda new, old: (
        [call.kwargs["project"] for call in new.wandb.call_args_list] == ["team"]
        and new.wandb().log.call_count == 4
    ),
)
row("profile", "2-3", lambda new, old: "trace/steps-2-3-rank-0.json.gz" in new.files)
row("gc_every", 2, lambda new, old: new.collected.count((1,)) == 2)
# --- checkpoint.py
row(
    "init_from",
    "<run>",
    lambda new, old: equal(new.init, PLACES["run"].final) and steps(new) == [1, 2, 3, 4],
)
# a new phase:
# other moments
row(
    "init_model_only",
    False,
    lambda new, old: (
        equal(new.init, old.init)
        and steps(new) == [1, 2, 3, 4]  # a new phase:
        and equal(new.grads[0], old.grads[0])
        and not equal(new.final, old.final)
    ),
    init_from="<run>",
)
row(
    "load_step",
    1,
    lambda new, old: steps(new) == [1, 2, 3, 4] and len(new.batches) == 3 and len(old.batches) == 2,
    options=dict(continues=True),
)
row(
    "exclude_from_loading",
    ["head"],
    lambda new, old: (
        [fqn for fqn, w in new.init.items() if not torch.equal(w, PLACES["run"].final[fqn])]
        == ["head.weight"]
    ),
    init_from="<run>",
)
row(
    "checkpoint_async",
    "thread",
    lambda new, old: len(new.writers) == 2 and len(old.writers) == 1,
    checkpoint_every=2,
)
row("checkpoint_async", "process", lambda new, old: "process" in new.writers, checkpoint_every=2)
row("keep_latest_k", 2, lambda new, old: new.saved == ["step-3", "step-4"], checkpoint_every=1)
row(
    "checkpoint_first_step",
    True,
    lambda new, old: new.saved == ["step-1", "step-3", "step-4"],
    checkpoint_every=3,
)
row(
    "after_save",
    "touch {}.copied",
    lambda new, old: (
        [f for f in new.files if "copied" in f]
        == ["checkpoints/step-2.copied", "checkpoints/step-4.copied"]
    ),
    checkpoint_every=2,
)
row(
    "load_only",
    True,
    lambda new, old: new.saved == [] and old.saved == ["step-2", "step-4"],
    checkpoint_every=2,
)
row(
    "last_save_model_only",
    True,
    lambda new, old: size(new, "step-4") < 0.5 * size(old, "step-4"),
    checkpoint_every=4,
)
row("export_hf", "<tmp>", lambda new, old: "lm_head.weight" in exported(new))
row(
    "export_dtype",
    "bfloat16",
    lambda new, old: {t.dtype for t in exported(new).values()} == {torch.bfloat16},
    export_hf="<tmp>",
)
# --- experts and multi-token prediction
row(
    "moe_balance",
    "none",
    lambda new, old: not biases(new).any() and biases(old).any(),
    program="train_qwen3",
)
row(
    "moe_bias_rate",
    0.5,
    lambda new, old: biases(new).abs().max() > 10 * biases(old).abs().max(),
    program="train_qwen3",
)
row(
    "moe_force_balance",
    True,
    lambda new, old: [line["moe_load_max_over_mean"] for line in new.lines] == [1] * 4,
    program="train_qwen3",
)
row(
    "moe_aux_coef",
    5.0,
    lambda new, old: (
        router(new).norm() > 2 * router(old).norm()
        and near([line["loss"] for line in new.lines[:1]], [old.lines[0]["loss"]])
    ),
    program="train_qwen3",
    moe_balance="aux",
)
row(
    "moe_aux_coef",
    5.0,
    lambda new, old: router(new).norm() > 2 * router(old).norm(),
    program="train_deepseek",
)
row(
    "mtp_weight",
    0.6,
    lambda new, old: near(
        [new.grads[0]["mtp.eh_proj.weight"].norm()], [2 * old.grads[0]["mtp.eh_proj.weight"].norm()]
    ),
    program="train_deepseek",
    max_norm=0,
)


def size(run, step: str) -> int:
    return sum(path.stat().st_size for path in Path(run.out, "checkpoints", step).glob("*.distcp"))


def biases(run) -> torch.Tensor:
    return torch.stack(
        [
            b
            for stage in run.stages
            for name, b in stage.named_buffers()
            if name.endswith("balance.bias")
        ]
    )


def router(run) -> torch.Tensor:
    """The first step's gradient of the routers."""
    return torch.cat([g.flatten() for fqn, g in run.grads[0].items() if "router" in fqn])


# --- grpo.py


def rl(flag, value, effect, run=observed, options=None, **also):
    row(flag, value, effect, run, "grpo", options, **also)


def advantages_by_hand(run, penalty=lambda s: 0.0, scale=lambda rewards: 1.0) -> bool:
    groups = [run.batches[0][i : i + 4] for i in range(0, 16, 4)]
    for group in groups:
        scores = torch.tensor([s["reward"] + penalty(s) for s in group], dtype=torch.float64)
        wanted = (scores - scores.mean()) / scale(scores)
        if not torch.allclose(
            wanted, torch.tensor([s["advantage"] for s in group], dtype=torch.float64), atol=1e-4
        ):
            return False
    return any(s["advantage"] for s in run.batches[0])


def tokens_of(run) -> list:
    return [s["ids"] for s in run.samples[0]]


def kept_samples(seen) -> int:
    return len(Path(seen.out, "samples.jsonl").read_text().splitlines())


rl(
    "flavor",
    "debug_moe",
    lambda new, old: getattr(new, "n_experts", 0) == 8,
    configured,
    model_args="",
)
rl("model_args", SIZES + ",rope_theta=7", lambda new, old: new.rope_theta == 7, configured)
rl(
    "out",
    "<new_rl>",
    lambda new, old: new.out == PLACES["<new_rl>"] and "samples.jsonl" in new.files,
)
rl(
    "env",
    "sum_digits",
    lambda new, old: (
        "Sum" in Path(new.out, "samples.jsonl").read_text()
        or new.rollouts[0].prompts != old.rollouts[0].prompts
    ),
    seq_len=64,
)
rl(
    "env_data",
    "<gsm8k>",
    lambda new, old: new.error == "" and "times" in Path(new.out, "samples.jsonl").read_text(),
    env="gsm8k",
    seq_len=200,
    max_new_tokens=4,
)
SUMS = dict(env="dataset", env_data="<sums>", seq_len=24)
rl(
    "eval_data",
    "<sums2>",
    lambda new, old: {line["eval_n"] for line in new.log if "eval_n" in line} == {50},
    eval_every=2,
    **SUMS | dict(eval_n=-1),
)
rl("reward", "number", lambda new, old: new == 1.0, paid, **SUMS)
rl(
    "prompt_template",
    "So {prompt} is",
    lambda new, old: (
        new.rollouts[0].prompts
        and len(new.rollouts[0].prompts[0]) == len(old.rollouts[0].prompts[0]) + 6
    ),
    **SUMS,
)
BROKEN = dict(env="<broken>")
rl(
    "failed_reward",
    -1.0,
    lambda new, old: (
        new.batches
        and {s["reward"] for s in new.batches[0]} == {-1.0, 1.0}
        and "no reward" in old.error
    ),
    **BROKEN,
)
rl(
    "reward_timeout_s",
    0.2,
    lambda new, old: new == ["late", 1.0] and old == [0.0, 1.0],
    payments,
    env="<slow>",
)
rl(
    "reward_threads",
    2,
    lambda new, old: new == [1.0, 0.0] and old == [0.0, 0.0],
    payments,
    env="<threads>",
)
rl("steps", 3, lambda new, old: steps(new) == [1, 2, 3])
rl("prompts_per_step", 6, lambda new, old: len(new.batches[0]) == 24)
rl(
    "group_size",
    3,
    lambda new, old: new.rollouts[0].noise.shape[1] == 3 and len(new.batches[0]) == 12,
)
rl(
    "minibatches",
    2,
    lambda new, old: len(new.lrs) == 4 and [len(part) for part in new.batches] == [8] * 4,
)
rl(
    "max_new_tokens",
    4,
    lambda new, old: max(map(len, tokens_of(new))) == 4 and max(map(len, tokens_of(old))) == 6,
)
rl("seq_len", 9, lambda new, old: new.rollouts[0].max_len == 9)
rl(
    "temperature",
    0.5,
    lambda new, old: (
        new.rollouts[0].temperature == 0.5
        and all(line["logprob_max_diff"] < 1e-4 for line in new.lines)
    ),
)
rl(
    "loss",
    "gspo",
    lambda new, old: (
        {loss[0] for loss in new.losses} == {"gspo"} and new.losses[0][7] == [3e-4, 4e-4]
    ),
)
rl(
    "std_norm",
    True,
    lambda new, old: advantages_by_hand(new, scale=lambda r: r.std(correction=0) + 1e-6),
)
rl("clip_low", 0.05, lambda new, old: new.losses[0][7] == [0.05, 0.2])
rl("clip_high", 0.7, lambda new, old: new.losses[0][7] == [0.2, 0.7])
rl("tis", 2.0, lambda new, old: new.losses[0][8] == (2.0, "token_truncate"))
rl(
    "tis_mode",
    "sequence_mask",
    lambda new, old: new.losses[0][8] == (2.0, "sequence_mask"),
    tis=2.0,
)
rl(
    "kl_coef",
    50.0,
    lambda new, old: (
        equal(new.grads[0], old.grads[0]) is False or not equal(new.grads[1], old.grads[1])
    ),
)
rl(
    "dynamic_sampling",
    2,
    lambda new, old: max(line["prompts_drawn"] for line in new.lines) > 4,
    group_size=2,
)
rl(
    "overlong_tokens",
    4,
    lambda new, old: advantages_by_hand(new, lambda s: -max(len(s["ids"]) - 2, 0) / 4),
)
rl(
    "mask_truncated",
    True,
    lambda new, old: (
        any(s["truncated"] for s in new.batches[0])
        and all(sum(s["mask"]) == 0 for s in new.batches[0] if s["truncated"])
    ),
)
rl("async_steps", 1, lambda new, old: [line["staleness"] for line in new.lines] == [0, 1])
rl(
    "batch_invariant",
    True,
    lambda new, old: (
        all(line["logprob_max_diff"] == 0 for line in new.lines) and new.rollouts[0].batch_invariant
    ),
)
rl(
    "abort_k3",
    1e-6,
    lambda new, old: "is above --abort_k3 1e-06" in new.error,
    options=dict(drift=1.01),
)
rl(
    "proof_share",
    1.0,
    lambda new, old: (
        all(line["proven"] == 1 for line in new.lines)
        and any(line["proven"] < 1 for line in old.lines)
    ),
    group_size=2,
)
rl("rollout_timeout_s", 99, lambda new, old: new == [99], patience, ep=2)
rl("control", "frozen", lambda new, old: equal(new.init, new.final))
rl(
    "control",
    "random",
    lambda new, old: (
        {s["reward"] for s in new.batches[0]} == {0.0, 1.0} and tokens_of(new) == tokens_of(old)
    ),
)
rl("sft_steps", 5, lambda new, old: len(new.warm_up) == 5)
rl("sft_loss", 100.0, lambda new, old: len(new.warm_up) == 1)
rl("sft_lr", 0.02, lambda new, old: near(new.warm_up, [0.002, 0.004]))
rl("lr", 0.01, lambda new, old: near(new.lrs, [0.01, 0.0055]))
rl("min_lr_ratio", 0.5, lambda new, old: near(new.lrs, [5e-4, 3.75e-4]))
rl("warmup_steps", 4, lambda new, old: near(new.lrs, [1.25e-4, 1.375e-4]))
for name, value in ADAMW.items():
    rl(name, value, lambda new, old, given={name: value}: follows(new, weight_decay=0, **given))
rl("weight_decay", 2.0, lambda new, old: follows(new, weight_decay=2.0, decays=lambda fqn, w: True))
rl(
    "max_norm",
    0.01,
    lambda new, old: abs(sum(g.square().sum() for g in new.grads[0].values()) ** 0.5 - 0.01) < 1e-5,
)
rl(
    "local_batch_size",
    2,
    lambda new, old: (
        len(new.losses) > len(old.losses) and {loss[1].shape[0] for loss in new.losses} <= {1, 2}
    ),
)
rl(
    "pack_tokens",
    32,
    lambda new, old: (
        {loss[1].shape[0] for loss in new.losses} == {1}
        and hashes(new) == hashes(old)
        and near(*([line["grad_norm"] for line in run.lines] for run in (new, old)))
        and 0
        <= max(line["padding"] for line in new.lines)
        < min(line["padding"] for line in old.lines)
        < 1
    ),
    local_batch_size=64,
)
rl("rollout_rows", 8, lambda new, old: new.rollouts[0].rows == 8)
rl(
    "seed",
    1,
    lambda new, old: (
        not equal(new.init, old.init) and new.rollouts[0].prompts != old.rollouts[0].prompts
    ),
)
rl(
    "eval_every",
    1,
    lambda new, old: [line["step"] for line in new.log if "eval_reward" in line] == [0, 1, 2],
)
rl(
    "eval_n",
    5,
    lambda new, old: {line["eval_n"] for line in new.log if "eval_reward" in line} == {5},
    eval_every=2,
)
rl(
    "eval_k",
    3,
    lambda new, old: 3 in {rollout.noise.shape[1] for rollout in new.rollouts},
    eval_every=2,
)
rl("checkpoint_every", 1, lambda new, old: new.saved == ["step-1", "step-2"])
rl(
    "log_every",
    3,
    lambda new, old: new.printed.count("reward ") == old.printed.count("reward ") - 1,
    steps=4,
)
rl("log_samples", 0, lambda new, old: kept_samples(new) == 0, steps=4)
rl(
    "log_samples",
    99,
    lambda new, old: kept_samples(new) == 3 * 16 and kept_samples(old) == 3 * 4,
    log_every=2,
    steps=4,
)
rl("device", "cuda", lambda new, old: "torch finds 0 GPUs" in new.error)


# --- generate.py


def text(flag, value, effect, **also):
    row(flag, value, effect, written, "generate", **also)


GREEDY = dict(temperature=0.0)
text("checkpoint", "nowhere", lambda new, old: new.startswith("error: nowhere"))
text("prompt", "41 times", lambda new, old: new.startswith("41 times"))
text(
    "max_new_tokens",
    3,
    lambda new, old: old.startswith(new.rstrip()) and len(new) < len(old),
    **GREEDY,
)
text(
    "temperature",
    0.0,
    lambda new, old: new == written("generate", config("generate", dict(top_k=1))) != old,
)
text("top_k", 1, lambda new, old: new == written("generate", config("generate", GREEDY)))
text("top_p", 1e-6, lambda new, old: new == written("generate", config("generate", GREEDY)))
text("chat", True, lambda new, old: "has no chat template" in new)
text("seed", 1, lambda new, old: new != old)
text(
    "device", "cuda", lambda new, old: "torch finds no GPU here" in new or torch.cuda.is_available()
)

# ---------------------------------------------------------------- the tests


def name_of(row) -> str:
    return f"{row.program}-{row.flag}={row.value}"


# rows that start processes of their own, or plan a layout: more than a second each
LONG = {
    "checkpoint_async",
    "pp_schedule",
    "pp_microbatch_size",
    "pp_stage_fqns",
    "ep",
    "etp",
    "dp_replicate",
    "keep_latest_k",
    "env_data",
}
# of grpo.py's rows, those whose flags the other recipes have as well: each is a run of its own
LONG_RL = {
    "beta1",
    "beta2",
    "eps",
    "weight_decay",
    "max_norm",
    "min_lr_ratio",
    "warmup_steps",
    "out",
    "log_every",
}


@pytest.mark.parametrize(
    "row",
    [
        pytest.param(
            r,
            marks=[pytest.mark.slow]
            * (r.flag in LONG or r.program == "grpo" and r.flag in LONG_RL),
        )
        for r in ROWS
    ],
    ids=name_of,
)
def test_a_flag_has_its_effect(row):
    if row.flag == "device" and torch.cuda.is_available():
        pytest.skip("the line that is expected is that of a machine without a GPU")
    old = seen(row, given=False)
    new = seen(row)
    assert row.effect(new, old), getattr(new, "error", "")
    assert not row.effect(old, old), "the row holds without the flag: it tests nothing"


def test_every_flag_has_a_row():
    """Flags of one group are tested once: with train_llama3 where a recipe has them all, else with
    a program of their own."""
    missing = []
    elsewhere = set(" ".join(ELSEWHERE.values()).split())
    for program in PROGRAMS:
        for group, fields in option_groups(config_class(program)).items():
            # the groups and the three recipes, which are copies
            shared = group.__module__ not in ("grpo", "generate")
            name = group.__module__
            owner = (
                "generate"
                if name == "corpus.tokenizer"
                else "grpo"
                if name.startswith("rl.")
                else name
            )
            tested = {
                r.flag
                for r in ROWS
                if shared and r.program.startswith(("train_", "finetune")) or r.program == owner
            }
            missing += [
                f"--{f.name} ({group.__module__})"
                for f in fields
                if f.name not in tested | elsewhere
            ]
    assert not missing, (
        f"without a test of their effect: {', '.join(dict.fromkeys(missing))}; add a row to ROWS "
        "in this file"
    )


def test_the_common_run_is_as_the_rows_take_it():
    """AdamW by hand, and the default schedule: what the rows' effects are differences to."""
    run = seen_once(observed, "train_llama3", "{}", "{}")
    assert follows(run) and near(rates(run), [0.003, 0.00260459, 0.00165, 0.00069541])
    assert not follows(run, beta1=0.95, beta2=0.9) and not follows(
        run, decays=lambda fqn, w: w.dim() == 1
    )


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_program_that_ignores_the_flag_is_caught(row):
    assert not row.effect(seen(row, ignored=True), seen(row, given=False))
