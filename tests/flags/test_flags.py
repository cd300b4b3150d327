"""What every flag does, against all programs: one row per flag, with a value, and what must change
when it is given.

A row runs its program with and without the flag and compares what was seen: numbers of the log,
weights, gradients, collectives, files, printed lines. The runs are small, in this process, and
shared between rows. Three things keep the table honest: a flag without a row fails
(test_every_flag_has_a_row), no row may hold where the flag is not given, and `make test-slow`
repeats every row with a Config that ignores the flag.

For a flag of your own add its row: @row("my_flag", value, flags that it needs) above a function of
(new, old) that asserts what is different in new. A row is known by its line: test_flags.py:412.
"""

import functools
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from elsewhere import ELSEWHERE
from observe import (
    MODEL,
    PLACES,
    PROGRAMS,
    SIZES,
    WANDB,
    built,
    configured,
    equal,
    follows,
    hashes,
    near,
    observed,
    opened,
    paid,
    patience,
    payments,
    planned,
    printed,
    rates,
    split,
    steps,
    written,
)
from programs import REPO
from runs import column, having
from safetensors.torch import load_file

import parallel
from data import DataConfig, open_data
from flags.config import option_groups
from storage.adapters import is_adapter
from tools.reports.options import with_report_flags

FOUR_LAYERS = SIZES.replace("n_layers=2", "n_layers=4")
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
        ("slow", "completion != 'slow' or time.sleep(3) or False"),
        ("threads", "quick.wait(4) if completion == 'slow' else quick.set() is not None"),
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
    folders = {}
    for name in ("shards", "cache", "other_cache", "run", "new", "new_rl", "page"):
        folders[name] = name
    PLACES.update({f"<{name}>": str(folder / file) for name, file in (files | folders).items()})
    shutil.copytree(
        open_data(DataConfig(data=PLACES["<text>"], cache_dir=PLACES["<cache>"]), 16).folder,
        folder / "shards",
    )
    tokenizer = json.loads(Path(PLACES["<shards>"], "tokenizer.json").read_text())
    tokenizer["model"]["merges"], known = [], set(column(tokenizer["added_tokens"], "id"))
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


def place(value):
    if value == "<tmp>":
        return tempfile.mkdtemp()
    if isinstance(value, str):
        return PLACES.get(value, value)
    return value


def config_class(program: str):
    Config = importlib.import_module(program).Config
    if program.startswith("train_"):
        return with_report_flags(Config)
    return Config


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
            if name in instead:
                return instead[name]
            return object.__getattribute__(self, name)

        cfg.__class__ = type("Config", (Config,), {"__getattribute__": read})
    return cfg


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


def every_weight(fqn, w) -> bool:
    return True


def is_vector(fqn, w) -> bool:
    return w.dim() == 1


def types_of(b) -> list[str]:
    return [type(module).__name__ for module in b.model.modules()]


def seconds(text: str) -> float:
    return float(re.search(r"at least (\S+) s", text)[1])


def exported(run) -> dict:
    path = Path(run.cfg.export_hf, "model.safetensors")
    if path.exists():
        return load_file(path)
    return {}


# ---------------------------------------------------------------- the table

ROWS = []
W1 = "blocks.0.moe.experts.w1"
LORA_B = "blocks.0.attn.wq.lora_b.weight"
ADAMW = dict(beta1=0.5, beta2=0.5, eps=0.1)  # far from the defaults


def adapted(run) -> set[str]:
    """The linears of the blocks beside which adapters have a gradient, if nothing else has one."""
    found = set()
    for fqn in run.grads[0]:
        if is_adapter(fqn):
            found.add(fqn.split(".")[-3])
        else:
            found.add(fqn)
    return found


def row(flag, value, run=observed, program="train_llama3", options=None, **also):
    """Above a function of (new, old): flag and value, beside the flags `also`, must make all of its
    asserts hold, of what is seen with the flag (new) and without it (old)."""

    def add(effect):
        ROWS.append(
            SimpleNamespace(
                flag=flag,
                value=value,
                effect=effect,
                line=f"test_flags.py:{effect.__code__.co_firstlineno}",
                run=run,
                program=program,
                also=also,
                options=options or {},
            )
        )

    return add


def holds(row, new, old) -> bool:
    """Whether the row finds its effect in new."""
    try:
        row.effect(new, old)
    except AssertionError:
        return False
    return True


# --- the mesh, and how it is used: parallel.py
@row("dp_replicate", 2, planned)
def _(new, old):
    assert new.number("dp_replicate", "all_reduce") > 0


@row("dp_shard", 2, planned)
def _(new, old):
    assert new.number("fsdp", "reduce_scatter") > 0


@row("tp", 2, planned)
def _(new, old):
    assert new.number("tp", "all_gather") > 0
    assert new.held["blocks.0.attn.wq.weight"] == (8, 16)


@row("pp", 2, planned)
def _(new, old):
    assert new.blocks == ["0", "1"]


@row("cp", 2, planned)
def _(new, old):
    assert new.number("cp", "all_gather") > 0


@row("ep", 2, planned, "train_qwen3", dp_shard=2)
def _(new, old):
    assert new.number("ep", "all_to_all") > 0


@row("etp", 2, planned, "train_qwen3", tp=2)
def _(new, old):
    assert (new.held[W1], old.held[W1]) == ((8, 8, 16), (4, 16, 16))


@row("reshard_after_forward", "never", planned, dp_shard=2)
def _(new, old):
    assert new.number("fsdp", "all_gather") < old.number("fsdp", "all_gather")


@row("cpu_offload", True, built)
def _(new, old):
    assert isinstance(new.model, parallel.FSDPModule)
    assert (
        type(new.model._get_fsdp_state()._fsdp_param_group.offload_policy).__name__
        == "CPUOffloadPolicy"
    )


@row("loss_parallel", False, planned, tp=2)
def _(new, old):
    assert new.bytes("tp", "all_gather") > old.bytes("tp", "all_gather")


@row("pp_schedule", "Interleaved1F1B", planned, pp=2, local_batch_size=4, model_args=FOUR_LAYERS)
def _(new, old):
    assert new.schedule == "ScheduleInterleaved1F1B"


@row("pp_schedule_csv", "<csv>", planned, pp=2)
def _(new, old):
    assert new.schedule == "_PipelineScheduleRuntime"
    assert new.first == [("F", 0, 0), ("F", 0, 1)]


@row("pp_microbatch_size", 2, planned, pp=2, local_batch_size=4)
def _(new, old):
    assert new.report.n == old.report.n // 2


@row("pp_layers_per_stage", 2, split, pp=2, pp_schedule="LoopedBFS")
def _(new, old):
    assert list(map(len, new)) == [2, 2, 2, 2, 2, 3]


@row("pp_first_stage_less_layers", 0, split, pp=2)
def _(new, old):
    assert list(map(len, new)) == [7, 6]


@row("pp_last_stage_less_layers", 3, split, pp=2)
def _(new, old):
    assert list(map(len, new)) == [7, 6]


@row(
    "pp_stage_fqns", "tok_embeddings;blocks.0,blocks.1,norm,head", planned, pp=2, local_batch_size=4
)
def _(new, old):
    assert new.blocks == ["", "01"]


@row("cp_method", "alltoall", planned, cp=2)
def _(new, old):
    assert new.number("cp", "all_to_all") > 0


@row("compute_dtype", "bfloat16")
def _(new, old):
    assert new.dtypes == {torch.bfloat16}


@row("param_dtype", "bfloat16")
def _(new, old):
    assert {w.dtype for w in new.final.values()} == {torch.bfloat16}


@row("reduce_dtype", "bfloat16", planned, dp_shard=2)
def _(new, old):
    assert 2 * new.bytes("fsdp", "reduce_scatter") == old.bytes("fsdp", "reduce_scatter")


@row("ac", "full", planned, seq_len=64, model_args=FOUR_LAYERS + ",vocab_size=32")
def _(new, old):
    assert new.recomputed > 0
    assert new.kept < 0.4 * old.kept


@row("ac_every", 1, planned, ac="selective")
def _(new, old):
    assert new.recomputed > 1.5 * old.recomputed > 0


@row("ac_budget", 0.25, built, ac="budget", compile=True)
def _(new, old):
    assert new.budget == 0.25


@row("compile", True, built)
def _(new, old):
    for b in new.model.blocks.values():
        assert hasattr(b.forward, "_torchdynamo_orig_callable")


@row("float8", "rowwise", built)
def _(new, old):
    assert types_of(new).count("Float8Linear") == 14


@row("float8_filter", ["wk", "ffn"], built, float8="rowwise")
def _(new, old):
    assert types_of(new).count("Float8Linear") == 6


@row("lora_rank", 2, program="finetune")
def _(new, old):
    assert adapted(new) == {"wq", "wk", "wv", "wo"}
    assert new.grads[0][LORA_B].shape == (16, 2)


@row("lora_alpha", 64.0, program="finetune", lora_rank=2, max_norm=0)
def _(new, old):
    assert near([new.grads[0][LORA_B].norm()], [2 * old.grads[0][LORA_B].norm()])


@row("lora_on", ["w1", "wo"], program="finetune", lora_rank=2)
def _(new, old):
    assert adapted(new) == {"w1", "wo"}


@row("lora_from", "nowhere", program="finetune", lora_rank=2)
def _(new, old):
    assert "--lora_from nowhere has no adapter_config.json: give the folder" in new.error


@row("init_from", "", program="finetune")
def _(new, old):
    assert "--init_from FOLDER --data" in new.error


@row("data", "", program="finetune")
def _(new, old):
    assert "--init_from FOLDER --data" in new.error


@row("doc_mask", False, program="finetune")
def _(new, old):
    assert new.batches[0].doc_ids is None
    assert old.batches[0].doc_ids is not None


@row("lr", 1e-3, program="finetune")
def _(new, old):
    assert near(rates(new)[:1], [1e-3])
    assert near(rates(old)[:1], [1e-5])


@row("deterministic", True)
def _(new, old):
    assert new.deterministic


@row("init_timeout_s", 77, options=dict(launched=True))
def _(new, old):
    assert {t.total_seconds() for t in new.timeouts[:4]} == {77}


@row("train_timeout_s", 78, options=dict(launched=True))
def _(new, old):
    assert {t.total_seconds() for t in new.timeouts[-3:]} == {78}


# --- modes
@row("dry_run", True, printed)
def _(new, old):
    assert "Peak" in new
    assert "trains" in old


@row("check", True, printed)
def _(new, old):
    assert '"tokens": ' in new
    assert "trains" in old


@row("explain", True, printed, model_args=SIZES.replace("n_layers=2", "n_layers=3"))
def _(new, old):
    assert "One block of" in new
    assert "trains" in old


@row("html", "<page>", printed, explain=True, model_args=SIZES.replace("n_layers=2", "n_layers=3"))
def _(new, old):
    assert "every rank holds" in new
    assert os.path.exists(PLACES["<page>"])


@row("check_parity", True, printed)
def _(new, old):
    assert "parity of" in new
    assert "trains" in old


@row("through", "tp=2", printed, check_parity=True)
def _(new, old):
    assert "through tp=2" in new
    assert "parity of" in old


@row("where", True, printed, check_parity=True)
def _(new, old):
    assert "every operation of" in new
    assert "parity of" in old


@row("against", "folder", printed, check_parity=True, where=True)
def _(new, old):
    assert "against folder" in new
    assert "every operation of" in old


@row("advice", False, printed, check_parity=True, where=True)
def _(new, old):
    assert "of False" in new
    assert "of True" in old


@row("best", 1, printed, dry_run=True)
def _(new, old):
    assert "legal layouts of 1 device;" in new
    assert "Peak" in old


@row("machine", "B200", printed, dry_run=True)
def _(new, old):
    assert seconds(new) < 0.5 * seconds(old)


# --- the recipe
@row("flavor", "1B", configured, model_args="")
def _(new, old):
    assert (new.n_kv_heads, new.max_seq_len, old.dim) == (8, 131072, 192)


@row("model_args", MODEL + ",rope_theta=7", configured)
def _(new, old):
    assert new.rope_theta == 7


@row("out", "<new>")
def _(new, old):
    assert new.out == PLACES["<new>"]
    assert "metrics.jsonl" in new.files


@row("steps", 6)
def _(new, old):
    assert steps(new) == [1, 2, 3, 4, 5, 6]


@row("seq_len", 32)
def _(new, old):
    assert new.batches[0].tokens.shape == (1, 2, 32)
    assert new.lines[0]["tokens"] == 64


@row("local_batch_size", 3)
def _(new, old):
    assert new.batches[0].tokens.shape == (1, 3, 16)


@row("global_batch_size", 6)
def _(new, old):
    assert new.batches[0].tokens.shape == (3, 2, 16)
    assert new.lines[1]["tokens"] == 192


@row("optimizer", "muon")
def _(new, old):
    assert not follows(new, only="blocks.0.ffn.w1")
    assert follows(new, only="tok_embeddings")


@row("optimizer", "muon", program="finetune", lora_rank=2)
def _(new, old):
    assert not follows(new, only=LORA_B)
    assert not torch.equal(new.final[LORA_B], new.init[LORA_B])


@row("lr", 0.01)
def _(new, old):
    assert near(rates(new), [0.01, 0.008682, 0.0055, 0.002318])
    assert follows(new)


@row("min_lr_ratio", 0.5)
def _(new, old):
    assert near(rates(new), [0.003, 0.0027803, 0.00225, 0.0017197])


@row("warmup_steps", 3)
def _(new, old):
    assert near(rates(new), [0.001, 0.002, 0.003, 0.00165])


@row("decay_ratio", 0.25)
def _(new, old):
    assert near(rates(new), [0.003, 0.003, 0.003, 0.00165])


@row("decay_type", "linear")
def _(new, old):
    assert near(rates(new), [0.003, 0.002325, 0.00165, 0.000975])


@row("decay_type", "sqrt")
def _(new, old):
    assert near(rates(new), [0.003, 0.00165, 0.00109081, 0.00066173])


@row("schedule_steps", 8)
def _(new, old):
    assert near(rates(new), [0.003, 0.00289723, 0.00260459, 0.00216664])


def moves_with(options: dict):
    """The effect of a flag of AdamW: the weights move by its formula with these options."""

    def effect(new, old):
        assert follows(new, **options)

    return effect


for name, value in (ADAMW | {"weight_decay": 2.0}).items():
    row(name, value)(moves_with({name: value}))


@row("wd_on", "all")
def _(new, old):
    assert follows(new, decays=every_weight)


@row("optimizer", "adamw_sr", built, param_dtype="bfloat16")
def _(new, old):
    assert getattr(new.optimizer, "bf16_stochastic_round", False)


@row("optimizer", "adamw_bf16_moments", built)
def _(new, old):
    assert type(new.optimizer).__name__ == "AdamWBf16Moments"


@row("max_norm", 0.01)
def _(new, old):
    assert abs(sum(g.square().sum() for g in new.grads[0].values()) ** 0.5 - 0.01) < 1e-5


@row("on_nan", "skip", options=dict(poison=2))
def _(new, old):
    assert "step skipped" in new.printed
    assert len(new.lines) == 4
    assert "step 2" in old.error


@row("seed", 1)
def _(new, old):
    assert not equal(new.init, old.init)
    assert hashes(new) == hashes(old)


@row("val_every", 3)
def _(new, old):
    assert column(having(new.log, "val_loss"), "step") == [3, 4]


@row("val_batches", 2, val_every=4)
def _(new, old):
    assert new.evaluated == [16]
    assert old.evaluated == [64]


@row("checkpoint_every", 2)
def _(new, old):
    assert new.saved == ["step-2", "step-4"]


@row("log_every", 3)
def _(new, old):
    assert steps(new) == [1, 3, 4]


@row("device", "cuda")
def _(new, old):
    assert (
        "torch finds 0 GPUs" in new.error
        if not torch.cuda.is_available()
        else new.layout.device.type == "cuda"
    )


# --- data.py
@row("data", "<text>", opened)
def _(new, old):
    assert Path(PLACES["<cache>"]) in new.folder.parents


@row("val_data", "<text>", opened)
def _(new, old):
    assert new.n_val_samples > 10 * old.n_val_samples
    assert new.fingerprint == old.fingerprint


@row("tokenizer", "<letters>", opened, data="<text>")
def _(new, old):
    assert new.vocab_size < old.vocab_size / 2


@row("cache_dir", "<other_cache>", opened, data="<text>")
def _(new, old):
    assert Path(PLACES["<other_cache>"]) in new.folder.parents


@row("doc_mask", True)
def _(new, old):
    assert new.batches[0].positions.max() < old.batches[0].positions.max() == 15
    assert new.lines[0]["loss"] != old.lines[0]["loss"]


@row("data_seed", 1)
def _(new, old):
    assert hashes(new) != hashes(old)
    assert equal(new.init, old.init)


# --- metrics.py
@row("tensorboard", True)
def _(new, old):
    assert any(file.startswith("tb/events") for file in new.files)


@row("wandb", "team")
def _(new, old):
    assert [call.kwargs["project"] for call in new.wandb.call_args_list] == ["team"]
    assert new.wandb().log.call_count == 4


@row("profile", "2-3")
def _(new, old):
    assert "trace/steps-2-3-rank-0.json.gz" in new.files


@row("gc_every", 2)
def _(new, old):
    assert new.collected.count((1,)) == 2


# --- checkpoint.py
@row("init_from", "<run>")
def _(new, old):
    assert equal(new.init, PLACES["run"].final)
    assert steps(new) == [1, 2, 3, 4]


@row("init_model_only", False, init_from="<run>")
def _(new, old):
    assert equal(new.init, old.init)
    assert steps(new) == [1, 2, 3, 4]
    assert equal(new.grads[0], old.grads[0])
    assert not equal(new.final, old.final)


@row("load_step", 1, options=dict(continues=True))
def _(new, old):
    assert steps(new) == [1, 2, 3, 4]
    assert len(new.batches) == 3
    assert len(old.batches) == 2


@row("exclude_from_loading", ["head"], init_from="<run>")
def _(new, old):
    assert [fqn for fqn, w in new.init.items() if not torch.equal(w, PLACES["run"].final[fqn])] == [
        "head.weight"
    ]


@row("checkpoint_async", "thread", checkpoint_every=2)
def _(new, old):
    assert len(new.writers) == 2
    assert len(old.writers) == 1


@row("checkpoint_async", "process", checkpoint_every=2)
def _(new, old):
    assert "process" in new.writers


@row("keep_latest_k", 2, checkpoint_every=1)
def _(new, old):
    assert new.saved == ["step-3", "step-4"]


@row("checkpoint_first_step", True, checkpoint_every=3)
def _(new, old):
    assert new.saved == ["step-1", "step-3", "step-4"]


@row("after_save", "touch {}.copied", checkpoint_every=2)
def _(new, old):
    assert [f for f in new.files if "copied" in f] == [
        "checkpoints/step-2.copied",
        "checkpoints/step-4.copied",
    ]


@row("load_only", True, checkpoint_every=2)
def _(new, old):
    assert new.saved == []
    assert old.saved == ["step-2", "step-4"]


@row("last_save_model_only", True, checkpoint_every=4)
def _(new, old):
    assert size(new, "step-4") < 0.5 * size(old, "step-4")


@row("export_hf", "<tmp>")
def _(new, old):
    assert "lm_head.weight" in exported(new)


@row("export_dtype", "bfloat16", export_hf="<tmp>")
def _(new, old):
    assert {t.dtype for t in exported(new).values()} == {torch.bfloat16}


# --- experts and multi-token prediction
@row("moe_balance", "none", program="train_qwen3")
def _(new, old):
    assert not biases(new).any()
    assert biases(old).any()


@row("moe_bias_rate", 0.5, program="train_qwen3")
def _(new, old):
    assert biases(new).abs().max() > 10 * biases(old).abs().max()


@row("moe_force_balance", True, program="train_qwen3")
def _(new, old):
    assert column(new.lines, "moe_load_max_over_mean") == [1] * 4


@row("moe_aux_coef", 5.0, program="train_qwen3", moe_balance="aux")
def _(new, old):
    assert router(new).norm() > 2 * router(old).norm()
    assert near(column(new.lines[:1], "loss"), [old.lines[0]["loss"]])


@row("moe_balance", "none", program="train_deepseek")
def _(new, old):
    zero = json.dumps(dict(moe_aux_coef=0.0))
    without = seen_once(observed, "train_deepseek", zero, "{}")
    # the loss balances also beside --moe_balance bias
    assert equal(new.grads[0], without.grads[0])
    assert not torch.equal(router(new), router(old))


@row("moe_aux_coef", 5.0, program="train_deepseek")
def _(new, old):
    assert router(new).norm() > 2 * router(old).norm()


@row("mtp_weight", 0.6, program="train_deepseek", max_norm=0)
def _(new, old):
    assert near(
        [new.grads[0]["mtp.eh_proj.weight"].norm()], [2 * old.grads[0]["mtp.eh_proj.weight"].norm()]
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


def rl(flag, value, run=observed, options=None, **also):
    return row(flag, value, run, "grpo", options, **also)


def advantages_by_hand(run, penalty=lambda s: 0.0, scale=lambda rewards: 1.0) -> bool:
    groups = [run.batches[0][i : i + 4] for i in range(0, 16, 4)]
    for group in groups:
        scores = torch.tensor([s.reward + penalty(s) for s in group], dtype=torch.float64)
        wanted = (scores - scores.mean()) / scale(scores)
        if not torch.allclose(
            wanted, torch.tensor([s.advantage for s in group], dtype=torch.float64), atol=1e-4
        ):
            return False
    return any(s.advantage for s in run.batches[0])


def tokens_of(run) -> list:
    return [s.ids for s in run.samples[0]]


def kept_samples(seen) -> int:
    return len(Path(seen.out, "samples.jsonl").read_text().splitlines())


@rl("flavor", "debug_moe", configured, model_args="")
def _(new, old):
    assert getattr(new, "n_experts", 0) == 8


@rl("model_args", SIZES + ",rope_theta=7", configured)
def _(new, old):
    assert new.rope_theta == 7


@rl("out", "<new_rl>")
def _(new, old):
    assert new.out == PLACES["<new_rl>"]
    assert "samples.jsonl" in new.files


@rl("env", "sum_digits", seq_len=64)
def _(new, old):
    assert (
        "Sum" in Path(new.out, "samples.jsonl").read_text()
        or new.rollouts[0].prompts != old.rollouts[0].prompts
    )


@rl("env_data", "<gsm8k>", env="gsm8k", seq_len=200, max_new_tokens=4)
def _(new, old):
    assert new.error == ""
    assert "times" in Path(new.out, "samples.jsonl").read_text()


SUMS = dict(env="dataset", env_data="<sums>", seq_len=24)


@rl("eval_data", "<sums2>", eval_every=2, **SUMS | dict(eval_n=-1))
def _(new, old):
    assert set(column(having(new.log, "eval_n"), "eval_n")) == {50}


@rl("reward", "number", paid, **SUMS)
def _(new, old):
    assert new == 1.0


@rl("prompt_template", "So {prompt} is", **SUMS)
def _(new, old):
    assert new.rollouts[0].prompts
    assert len(new.rollouts[0].prompts[0]) == len(old.rollouts[0].prompts[0]) + 6


BROKEN = dict(env="<broken>")


@rl("failed_reward", -1.0, **BROKEN)
def _(new, old):
    assert new.batches
    assert {s.reward for s in new.batches[0]} == {-1.0, 1.0}
    assert "no reward" in old.error


@rl("reward_timeout_s", 1.0, payments, env="<slow>")
def _(new, old):
    assert new == ["late", 1.0]
    assert old == [0.0, 1.0]


@rl("reward_threads", 2, payments, env="<threads>")
def _(new, old):
    assert new == [1.0, 0.0]
    assert old == [0.0, 0.0]


@rl("steps", 3)
def _(new, old):
    assert steps(new) == [1, 2, 3]


@rl("prompts_per_step", 6)
def _(new, old):
    assert len(new.batches[0]) == 24


@rl("group_size", 3)
def _(new, old):
    assert new.rollouts[0].noise.shape[1] == 3
    assert len(new.batches[0]) == 12


@rl("minibatches", 2)
def _(new, old):
    assert len(new.lrs) == 4
    assert [len(part) for part in new.batches] == [8] * 4


@rl("max_new_tokens", 4)
def _(new, old):
    assert max(map(len, tokens_of(new))) == 4
    assert max(map(len, tokens_of(old))) == 6


@rl("seq_len", 9)
def _(new, old):
    assert new.rollouts[0].max_len == 9


@rl("temperature", 0.5)
def _(new, old):
    assert new.rollouts[0].temperature == 0.5
    for line in new.lines:
        assert line["logprob_max_diff"] < 1e-4


@rl("loss", "gspo")
def _(new, old):
    assert {loss.objective.__name__ for loss, _ in new.losses} == {"sequence_objective"}
    assert new.clips[0] == (3e-4, 4e-4)


@rl("std_norm", True)
def _(new, old):
    assert advantages_by_hand(new, scale=lambda r: r.std(correction=0) + 1e-6)


@rl("clip_low", 0.05)
def _(new, old):
    assert new.clips[0] == (0.05, 0.2)


@rl("clip_high", 0.7)
def _(new, old):
    assert new.clips[0] == (0.2, 0.7)


@rl("tis", 2.0)
def _(new, old):
    assert new.tis[:1] == [(2.0, "token_truncate")]


@rl("tis_mode", "sequence_mask", tis=2.0)
def _(new, old):
    assert new.tis[:1] == [(2.0, "sequence_mask")]


@rl("kl_coef", 50.0)
def _(new, old):
    assert equal(new.grads[0], old.grads[0]) is False or not equal(new.grads[1], old.grads[1])


@rl("dynamic_sampling", 2, group_size=2)
def _(new, old):
    assert max(column(new.lines, "prompts_drawn")) > 4


@rl("overlong_tokens", 4)
def _(new, old):
    assert advantages_by_hand(new, lambda s: -max(len(s.ids) - 2, 0) / 4)


@rl("mask_truncated", True)
def _(new, old):
    assert any(s.truncated for s in new.batches[0])
    for s in new.batches[0]:
        if s.truncated:
            assert sum(s.mask) == 0


@rl("async_steps", 1)
def _(new, old):
    assert column(new.lines, "staleness") == [0, 1]


@rl("batch_invariant", True)
def _(new, old):
    for line in new.lines:
        assert line["logprob_max_diff"] == 0
    assert new.rollouts[0].batch_invariant


@rl("abort_k3", 1e-6, options=dict(drift=1.01))
def _(new, old):
    assert "is above --abort_k3 1e-06" in new.error


@rl("proof_share", 1.0, group_size=2)
def _(new, old):
    for line in new.lines:
        assert line["proven"] == 1
    assert any(line["proven"] < 1 for line in old.lines)


@rl("rollout_timeout_s", 99, patience, ep=2)
def _(new, old):
    assert new == [99]


@rl("control", "frozen")
def _(new, old):
    assert equal(new.init, new.final)


@rl("control", "random")
def _(new, old):
    assert {s.reward for s in new.batches[0]} == {0.0, 1.0}
    assert tokens_of(new) == tokens_of(old)


@rl("sft_steps", 5)
def _(new, old):
    assert len(new.warm_up) == 5


@rl("sft_loss", 100.0)
def _(new, old):
    assert len(new.warm_up) == 1


@rl("sft_lr", 0.02)
def _(new, old):
    assert near(new.warm_up, [0.002, 0.004])


@rl("lr", 0.01)
def _(new, old):
    assert near(new.lrs, [0.01, 0.0055])


@rl("min_lr_ratio", 0.5)
def _(new, old):
    assert near(new.lrs, [5e-4, 3.75e-4])


@rl("warmup_steps", 4)
def _(new, old):
    assert near(new.lrs, [1.25e-4, 1.375e-4])


for name, value in ADAMW.items():
    rl(name, value)(moves_with({name: value, "weight_decay": 0}))


@rl("weight_decay", 2.0)
def _(new, old):
    assert follows(new, weight_decay=2.0, decays=every_weight)


@rl("max_norm", 0.01)
def _(new, old):
    assert abs(sum(g.square().sum() for g in new.grads[0].values()) ** 0.5 - 0.01) < 1e-5


@rl("local_batch_size", 2)
def _(new, old):
    assert len(new.losses) > len(old.losses)
    assert {loss[1].shape[0] for loss in new.losses} <= {1, 2}


@rl("pack_tokens", 32, local_batch_size=64)
def _(new, old):
    assert {loss[1].shape[0] for loss in new.losses} == {1}
    assert hashes(new) == hashes(old)
    assert near(*(column(run.lines, "grad_norm") for run in (new, old)))
    assert 0 <= max(column(new.lines, "padding")) < min(column(old.lines, "padding")) < 1


@rl("rollout_rows", 8)
def _(new, old):
    assert new.rollouts[0].rows == 8


@rl("seed", 1)
def _(new, old):
    assert not equal(new.init, old.init)
    assert new.rollouts[0].prompts != old.rollouts[0].prompts


@rl("eval_every", 1)
def _(new, old):
    assert column(having(new.log, "eval_reward"), "step") == [0, 1, 2]


@rl("eval_n", 5, eval_every=2)
def _(new, old):
    assert set(column(having(new.log, "eval_reward"), "eval_n")) == {5}


@rl("eval_k", 3, eval_every=2)
def _(new, old):
    assert 3 in {rollout.noise.shape[1] for rollout in new.rollouts}


@rl("checkpoint_every", 1)
def _(new, old):
    assert new.saved == ["step-1", "step-2"]


@rl("log_every", 3, steps=4)
def _(new, old):
    assert new.printed.count("reward ") == old.printed.count("reward ") - 1


@rl("log_samples", 0, steps=4)
def _(new, old):
    assert kept_samples(new) == 0


@rl("log_samples", 99, log_every=2, steps=4)
def _(new, old):
    assert kept_samples(new) == 3 * 16
    assert kept_samples(old) == 3 * 4


@rl("device", "cuda")
def _(new, old):
    assert "torch finds 0 GPUs" in new.error


# --- generate.py


def text(flag, value, **also):
    return row(flag, value, written, "generate", **also)


GREEDY = dict(temperature=0.0)


@text("checkpoint", "nowhere")
def _(new, old):
    assert new.startswith("error: nowhere")


@text("prompt", "41 times")
def _(new, old):
    assert new.startswith("41 times")


@text("max_new_tokens", 3, **GREEDY)
def _(new, old):
    assert old.startswith(new.rstrip())
    assert len(new) < len(old)


@text("temperature", 0.0)
def _(new, old):
    assert new == written("generate", config("generate", dict(top_k=1))) != old


@text("top_k", 1)
def _(new, old):
    assert new == written("generate", config("generate", GREEDY))


@text("top_p", 1e-6)
def _(new, old):
    assert new == written("generate", config("generate", GREEDY))


@text("chat", True)
def _(new, old):
    assert "has no chat template" in new


@text("seed", 1)
def _(new, old):
    assert new != old


@text("device", "cuda")
def _(new, old):
    assert "torch finds no GPU here" in new or torch.cuda.is_available()


# ---------------------------------------------------------------- the tests


def name_of(row) -> str:
    return f"{row.line}-{row.program}-{row.flag}={row.value}"


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


def is_long(row) -> bool:
    return row.flag in LONG or (row.program == "grpo" and row.flag in LONG_RL)


def parameters() -> list:
    found = []
    for row in ROWS:
        if is_long(row):
            marks = [pytest.mark.slow]
        else:
            marks = []
        found.append(pytest.param(row, marks=marks, id=name_of(row)))
    return found


@pytest.mark.parametrize("row", parameters())
def test_a_flag_has_its_effect(row):
    if row.flag == "device" and torch.cuda.is_available():
        pytest.skip("the line that is expected is that of a machine without a GPU")
    old = seen(row, given=False)
    new = seen(row)
    try:
        row.effect(new, old)
    except AssertionError as failed:
        failed.add_note(
            f"{row.line}: {row.program} --{row.flag} {row.value} {getattr(new, 'error', '')}"
        )
        raise
    assert not holds(row, old, old), f"{row.line} holds without --{row.flag}: it tests nothing"


def owner_of(group) -> str:
    """The program whose rows test the flags of a group that the recipes do not share."""
    name = group.__module__
    if name == "corpus.tokenizer":
        return "generate"
    if name.startswith("rl."):
        return "grpo"
    return name


def flags_with_rows(group) -> set[str]:
    """The flags that rows give to a program which has this group. The groups and the three recipes,
    which are copies, are shared."""
    shared = group.__module__ not in ("grpo", "generate")
    found = set()
    for row in ROWS:
        by_a_recipe = row.program.startswith(("train_", "finetune"))
        if (shared and by_a_recipe) or row.program == owner_of(group):
            found.add(row.flag)
    return found


def test_every_flag_has_a_row():
    """Flags of one group are tested once: with train_llama3 where a recipe has them all, else with
    a program of their own."""
    elsewhere = set(" ".join(ELSEWHERE.values()).split())
    missing = []
    for program in PROGRAMS:
        for group, fields in option_groups(config_class(program)).items():
            known = flags_with_rows(group) | elsewhere
            for f in fields:
                if f.name not in known:
                    missing.append(f"--{f.name} ({group.__module__})")
    assert not missing, (
        f"without a test of their effect: {', '.join(dict.fromkeys(missing))}; add a row to ROWS "
        "in this file"
    )


def test_the_common_run_is_as_the_rows_take_it():
    """AdamW by hand, and the default schedule: what the rows' effects are differences to."""
    run = seen_once(observed, "train_llama3", "{}", "{}")
    assert follows(run)
    assert near(rates(run), [0.003, 0.00260459, 0.00165, 0.00069541])
    assert not follows(run, beta1=0.95, beta2=0.9)
    assert not follows(run, decays=is_vector)


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_program_that_ignores_the_flag_is_caught(row):
    ignored = seen(row, ignored=True)
    assert not holds(row, ignored, seen(row, given=False)), row.line
