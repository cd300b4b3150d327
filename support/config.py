"""Command line and config.json from dataclasses: one field is one flag, the comment behind it is its --help.

    @dataclass(kw_only=True)
    class Config(DataConfig, CheckpointConfig):     # inherits the option groups of the modules that it uses
        steps: int = 1000                           # optimizer steps   <- `--steps 20`, and the text that --help prints
        compile: bool = True                        # compile blocks    <- `--compile`, `--no-compile`, `--compile false`
    cfg = parse_config(Config)

Field types: int, float, str, bool, Literal[...], list[int], list[str] (comma separated) and `X | None` (the word none).
Every field has a default. A wrong command line ends with status 2 and exactly one line on stderr, from rank 0 only.

No flag is ignored. One that does something only beside others says so where it is declared, and is refused without them:

    PIPELINE = Need("without --pp 2 or more", lambda c: c.pp > 1)
        pp_schedule: Schedule = flag("1F1B", PIPELINE)  # order of the micro-batches' forwards and backwards

Only what somebody asked for is refused: never a default, and not the details of what is on by itself and was switched off
(`--val_batches 4 --val_every 0` says clearly enough that there is no validation).
"""
import argparse
import ast
import dataclasses
import difflib
import inspect
import io
import json
import math
import os
import re
import sys
import textwrap
import time
import tokenize
from collections.abc import Callable
from decimal import Decimal
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

from support.files import write_file

FROM_FILE = set()  # fields whose values came from --config when this process read its command line: checkpoint.keep_batch


def usage_error(message) -> NoReturn:
    """One line on stderr (all ranks see the same command line, so only rank 0 speaks), then exit status 2."""
    if os.environ.get("RANK", "0") == "0":
        print("error:", " ".join(str(message).splitlines()), file=sys.stderr, flush=True)
    else:
        time.sleep(5)  # torchrun ends all ranks when the first one ends: that must not be before rank 0 has spoken
    raise SystemExit(2)


class Need(NamedTuple):
    """What a flag needs to have an effect."""

    text: str  # completes the sentence "--flag value has no effect ...": "without --pp 2 or more", "with --init_from"
    met: Callable[[SimpleNamespace], Any]  # is given what refusals.facts() knows: all flags, all fields of the model, and more


GPU = Need("without a GPU", lambda c: c.on_cuda)


def flag(default, *needs: Need):
    """A field of a Config that has an effect only where all its needs are met: see no_effect."""
    metadata = {"needs": needs}
    if isinstance(default, list):
        return dataclasses.field(default_factory=lambda: list(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def needs_of(Config, name: str) -> tuple[Need, ...]:
    """As declared by the class itself or the nearest one that it inherits from: a new default keeps the needs."""
    fields = [vars(group).get("__dataclass_fields__", {}).get(name) for group in Config.__mro__]
    return next((field.metadata["needs"] for field in fields if field is not None and "needs" in field.metadata), ())


def unmet_needs(cfg, facts: SimpleNamespace) -> dict[str, Need]:
    """{field: its first need that is not met} of the fields that differ from their default."""
    given = [field.name for field in dataclasses.fields(cfg) if getattr(cfg, field.name) != default_of(field)]
    unmet = {name: [need for need in needs_of(type(cfg), name) if not need.met(facts)] for name in given}
    return {name: needs[0] for name, needs in unmet.items() if needs}


def no_effect(cfg, facts: SimpleNamespace) -> list[str]:
    """One sentence per need that is not met, with all the flags that were given for nothing.

    What nobody typed, because it came from --config, returns to its default instead, and rank 0 says so.
    """
    unmet = unmet_needs(cfg, facts)
    if (returned := {name: need for name, need in unmet.items() if name in FROM_FILE}) and os.environ.get("RANK", "0") == "0":
        print("--config: " + "; ".join(without_effect(cfg, returned, "back to the default")), flush=True)
    for field in dataclasses.fields(cfg):
        if field.name in returned:
            setattr(cfg, field.name, default_of(field))
            setattr(facts, field.name, default_of(field))
    return without_effect(cfg, unmet_needs(cfg, facts), "leave {them} out")


def without_effect(cfg, unmet: dict[str, Need], cure: str) -> list[str]:
    sentences = []
    for need in dict.fromkeys(unmet.values()):
        names = [spell_flag(name, getattr(cfg, name)) for name in unmet if unmet[name] == need]
        verb, them = ("has", "it") if len(names) == 1 else ("have", "them")
        sentences.append(f"{', '.join(names)} {verb} no effect {need.text}; {cure.format(them=them)}")
    return sentences


# How nanoGPT, nanochat, torchtitan, TRL, Hugging Face's Trainer and torchrun call it: what to type here. An answer counts
# only where the Config has the flag that it names first. name=value: a value of one of our own flags.
ELSEWHERE = {
    "dtype torch_dtype precision mixed_precision amp_dtype": "did you mean --compute_dtype?",
    "bf16 fp16 amp half": "use --compute_dtype bfloat16, which is the default on GPUs; there is no float16",
    "save_every save_steps save_interval save_freq ckpt_every checkpoint_interval": "did you mean --checkpoint_every?",
    "save_total_limit keep_last": "did you mean --keep_latest_k?",
    "eval_every eval_interval eval_steps val_interval eval_strategy validation_freq": "did you mean --val_every?",
    "eval_interval eval_steps": "did you mean --eval_every?",
    "eval_iters val_steps eval_batches": "did you mean --val_batches?",
    "log_interval logging_steps log_freq log_steps": "did you mean --log_every?",
    "max_iters max_steps num_iterations num_steps iters train_steps training_steps": "did you mean --steps?",
    "epochs num_epochs num_train_epochs": "--steps counts optimizer steps; an epoch has tokens / (global_batch_size x seq_len)",
    "grad_accum grad_accum_steps gradient_accumulation_steps accumulation_steps":
        "use --global_batch_size: what --local_batch_size on every data rank does not reach is accumulated",
    "total_batch_size": "--global_batch_size is the size of a step, in sequences (not tokens)",
    "batch_size device_batch_size micro_batch_size per_device_train_batch_size train_batch_size":
        "did you mean --local_batch_size? It is what one data rank runs at once; --global_batch_size is a whole step",
    "block_size context_length max_seq_len max_seq_length max_length sequence_length": "did you mean --seq_len?",
    "resume resume_from resume_from_checkpoint auto_resume": "nothing to type: the same --out continues where it stopped",
    "overwrite_output_dir force restart": "use --out NEW to begin anew, or delete the old folder",
    "out_dir output_dir save_dir dump_folder": "did you mean --out?",
    "learning_rate peak_lr max_lr": "did you mean --lr?",
    "min_lr lr_min": "did you mean --min_lr_ratio? It is a share of --lr",
    "warmup warmup_iters warmup_ratio lr_warmup_steps num_warmup_steps": "did you mean --warmup_steps?",
    "lr_decay_iters lr_decay_steps": "did you mean --schedule_steps?",
    "lr_scheduler_type lr_schedule decay_lr": "did you mean --decay_type?",
    "grad_clip clip_grad clip_grad_norm max_grad_norm gradient_clip_val": "did you mean --max_norm?",
    "adam_beta1": "did you mean --beta1?",
    "adam_beta2": "did you mean --beta2?",
    "adam_eps adam_epsilon": "did you mean --eps?",
    "optim optimizer_name": "did you mean --optimizer?",
    "n_layer n_layers num_layers depth n_head n_heads n_embd d_model hidden_size dim vocab_size rope_theta":
        "fields of the model are in --model_args: --model_args n_layers=4,dim=512",
    "dropout attention_dropout": "these models have no dropout; --model_args changes the fields that they have",
    "dataset dataset_path data_dir data_path train_data train_file input_bin": "did you mean --data?",
    "model model_name model_size model_type arch": "did you mean --flavor?",
    "model_name_or_path pretrained checkpoint_path load_from ckpt": "did you mean --init_from?",
    "gradient_checkpointing activation_checkpointing recompute": "did you mean --ac full?",
    "fsdp zero zero_stage zero3 deepspeed data_parallel_shard_degree": "did you mean --dp_shard?",
    "ddp dp dp_size data_parallel_size data_parallel_replicate_degree": "did you mean --dp_replicate?",
    "tp_size tensor_parallel tensor_parallel_size tensor_parallel_degree": "did you mean --tp?",
    "pp_size pipeline_parallel pipeline_parallel_size pipeline_parallel_degree": "did you mean --pp?",
    "cp_size context_parallel context_parallel_size context_parallel_degree": "did you mean --cp?",
    "ep_size expert_parallel expert_parallel_size expert_parallel_degree": "did you mean --ep?",
    "torch_compile": "did you mean --compile?",
    "use_wandb wandb_log wandb_project report_to": "did you mean --wandb PROJECT?",
    "no_cuda cpu use_cpu": "did you mean --device cpu?",
    "nproc_per_node nproc nnodes node_rank master_addr master_port rdzv_endpoint rdzv_backend standalone gpus num_gpus":
        "--device is cpu or cuda; how many processes run is for torchrun, before the script: torchrun --nproc_per_node 2 FILE",
    "start": "did you mean --prompt?",
    "max_tokens max_length length num_tokens": "did you mean --max_new_tokens?",
    "num_samples": "give --prompt several times, or another --seed",
    "num_generations rollouts n_samples": "did you mean --group_size?",
    "max_completion_length max_response_length": "did you mean --max_new_tokens?",
    "beta kl_beta": "did you mean --kl_coef?",
    "device=mps device=metal": "--device knows cpu and cuda: torch.distributed has no mps; use cpu",
    "device=gpu device=cuda:0 device=0": "--device cuda, and torchrun gives each process a GPU of its own",
}


def hint(name: str, flags) -> str:
    """What ELSEWHERE answers to somebody who types this, "" if nothing. flags: those that there are."""
    answers = [text for names, text in ELSEWHERE.items() if name in names.split()]
    return next((text for text in answers if re.search(r"--(\w+)", text)[1] in flags), "")


class Parser(argparse.ArgumentParser):
    """argparse with our manners: an error is one line without the usage, no abbreviations, help from rank 0 only."""

    def __init__(self, **kwargs):
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **kwargs)

    def error(self, message):
        usage_error(message.removeprefix("argument "))

    def print_help(self, file=None):
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)


def parse_config(Config, argv=None):
    """The Config that `argv` (default: sys.argv) spells. `--config FILE` is read first, wherever it stands; flags win."""
    kinds, helps, recipe = get_type_hints(Config), {}, sys.modules.get(Config.__module__)
    parser = Parser(usage=argparse.SUPPRESS, description=(recipe and recipe.__doc__ or "").strip())
    parser.add_argument("--config", metavar="FILE", help="config.json of a saved run to start from; other flags override it")
    for group, fields in option_groups(Config).items():
        title = f"{group.__module__}.{group.__name__}".removeprefix("__main__.")
        section, comments = parser.add_argument_group(title), trailing_comments(group)
        for field in fields:
            name, is_bool, default = field.name, kinds[field.name] is bool, spell(default_of(field)) or '""'
            helps[name] = comments.get(name, "")
            notes = [f"--no-{name} turns it off"] * is_bool + [f"no effect {need.text}" for need in needs_of(Config, name)]
            text = f"{helps[name]} [{'; '.join([f'default: {default}', *notes])}]"
            section.add_argument(f"--{name}", default=argparse.SUPPRESS, metavar=describe(kinds[name]),
                                 help=text.replace("%", "%%"), **({"nargs": "?", "const": "true"} if is_bool else {}))
            if is_bool:
                section.add_argument(f"--no-{name}", dest=name, action="store_const", const="false",
                                     default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    given, unknown = parser.parse_known_args(glue_values(sys.argv[1:] if argv is None else argv))
    if unknown and not unknown[0].startswith("-"):
        before = "config" if unknown[0].endswith(".json") else "checkpoint" if "checkpoint" in helps else None
        wish = f"did you mean --{before} {unknown[0]}? " if before else ""
        usage_error(f"unexpected argument {unknown[0]!r}; {wish}flags are written --name value, see --help")
    if unknown:
        flag, negated = unknown[0].split("=")[0], {f"no-{name}": "" for name in kinds if kinds[name] is bool}
        usage_error(f"unknown flag {flag}; {did_you_mean(flag, helps | negated, '--')}--help lists all flags")

    values = {} if given.config is None else read_config(given.config, helps, kinds)
    for name, text in vars(given).items():
        if name != "config":
            try:
                values[name] = parse_value(text, kinds[name])
            except (ValueError, KeyError):
                wish = hint(f"{name}={text.lower()}", helps)
                usage_error(f"--{name} {text!r}: need {describe(kinds[name])}" + (wish and f"; {wish}"))
    for field in dataclasses.fields(Config):  # a default of -1 has a meaning of its own; other counts are never negative
        value, least = values.get(field.name), min(default_of(field) or 0, 0) if unwrap(kinds[field.name])[0] is int else None
        if value is not None and least is not None and not least <= value < 2**63:
            usage_error(f"--{field.name} {value} must be {f'{least} or more' if value < least else 'below 2**63'}")
    try:
        cfg = Config(**values)
    except ValueError as error:  # from a __post_init__
        usage_error(error)
    FROM_FILE.clear()
    FROM_FILE.update(values.keys() - vars(given).keys())
    return cfg


def check_range(cfg, least: float, most: float, *names: str):
    """Raises ValueError for the first of these fields that is outside of [least, most]; None counts as inside."""
    for name in names:
        if (value := getattr(cfg, name)) is not None and not least <= value <= most:
            limits = f"{least:g} or more" if most == math.inf else f"between {least:g} and {most:g}"
            raise ValueError(f"--{name} {value} must be {limits}")


def glue_values(argv) -> list:
    """["--lr", "-1e-4"] -> ["--lr=-1e-4"]: argparse takes -1e-4 and -inf for flags, but ours all have two dashes."""
    glued = []
    for arg in argv:
        is_value = re.match(r"-[^-]", arg) and arg != "-h" and glued and re.fullmatch(r"--[\w-]+", glued[-1])
        glued[-1:] = [f"{glued[-1]}={arg}"] if is_value else [*glued[-1:], arg]
    return glued


def read_config(path, helps, kinds) -> dict:
    """Field values of a saved config.json; what does not fit the flags is a usage error."""
    try:
        with open(path, encoding="utf-8") as file:
            saved = json.load(file)
        if not isinstance(saved, dict):
            raise ValueError(f"a JSON {type(saved).__name__}")
    except (OSError, ValueError, RecursionError) as error:
        usage_error(f"--config {path!r}: {error}; need a config.json that a run has saved")
    saved.pop("_run", None)  # what save_config() tells about the run; not flags
    for name, value in saved.items():
        if name not in helps:
            usage_error(f"{path}: unknown key {name!r}; {did_you_mean(name, helps, '')}--help lists all names")
        try:
            saved[name] = parse_value(spell(value), kinds[name])
            same_type = isinstance(value, bool) == isinstance(saved[name], bool)  # True == 1 in Python
            if not same_type or saved[name] != value not in ("inf", "-inf"):
                raise ValueError
        except (ValueError, KeyError):
            usage_error(f"{path}: {name} = {json.dumps(value)}: need {describe(kinds[name])}")
    return saved


def save_config(cfg, path, run: dict):
    """Writes the flags and, under the reserved key "_run", what else identifies the run. --config reads it."""
    flags = dataclasses.asdict(cfg)
    flags |= {k: str(v) for k, v in flags.items() if isinstance(v, float) and math.isinf(v)}  # JSON has no Infinity
    write_file(path, json.dumps(flags | {"_run": run}, indent=2, allow_nan=False).encode())


def option_groups(Config) -> dict:
    """{class: its fields}, the recipe's own class first. A subclass may change a default; two groups may not share a name."""
    fields, owner = {field.name: field for field in dataclasses.fields(Config)}, {}
    for group in Config.__mro__:
        for name in inspect.get_annotations(group):
            if name in ("config", "help"):
                raise TypeError(f"{group.__qualname__}.{name}: --{name} is reserved, rename the field")
            if name in fields and not issubclass(owner.setdefault(name, group), group):
                raise TypeError(f"{owner[name].__qualname__} and {group.__qualname__} both declare --{name}: rename one field")
    return {group: [fields[name] for name in fields if owner[name] is group] for group in dict.fromkeys(owner.values())}


def trailing_comments(group) -> dict:
    """{field: the comment at the end of its line}; empty where the source is not at hand (python -c, zipped)."""
    try:
        source = textwrap.dedent(inspect.getsource(group))
        tokens = list(tokenize.generate_tokens(io.StringIO(source).readline))
        body = ast.parse(source).body[0].body
    except (OSError, TypeError, SyntaxError, tokenize.TokenError):
        return {}
    comments = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    return {node.target.id: comments.get(node.end_lineno, "") for node in body if isinstance(node, ast.AnnAssign)}


def default_of(field):
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def unwrap(kind):
    """(kind without None, whether None is allowed)"""
    inner = [k for k in get_args(kind) if k is not type(None)]
    return (inner[0], True) if type(None) in get_args(kind) else (kind, False)


def describe(kind) -> str:
    """What a flag of this kind takes, for --help and for error lines."""
    kind, optional = unwrap(kind)
    if get_origin(kind) is Literal:
        text = "|".join(map(str, get_args(kind)))
    elif get_origin(kind) is list:
        text = describe(get_args(kind)[0]) + ",..."
    else:
        text = {int: "integer", float: "number", str: "text", bool: "true|false"}[kind]
    return text + "|none" * optional


def parse_value(text: str, kind):
    """The value that `text` spells; ValueError or KeyError if it spells none."""
    kind, optional = unwrap(kind)
    if optional and text.lower() == "none":
        return None
    if get_origin(kind) is list:
        return [parse_value(item.strip(), get_args(kind)[0]) for item in text.split(",")] if text.strip() else []
    if get_origin(kind) is Literal:
        return {str(choice): choice for choice in get_args(kind)}[text]
    if kind is bool:
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
    if kind is int and re.fullmatch(r"\d+(\.\d+)?[eE]\+?\d{1,2}", text) and (value := Decimal(text)) == int(value):
        text = str(int(value))  # 1e3, 2.5e4
    value = kind(text)
    if value != value:  # NaN: no flag means anything by it, and two configs that hold it never compare equal
        raise ValueError
    return value


def spell(value) -> str:
    """The text that parse_value() turns back into `value`."""
    if isinstance(value, list):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def spell_flag(name: str, value) -> str:
    """As it is typed: --pp_schedule GPipe, --plan, --no-loss_parallel."""
    if isinstance(value, bool):
        return f"--{name}" if value else f"--no-{name}"
    return f"--{name} " + (spell(value) or '""')


def did_you_mean(name: str, helps: dict, dashes: str) -> str:
    """"did you mean --steps? " or "". Tries the name in our spelling, other projects' names, its words in a help text, then
    similar letters."""
    wanted = re.sub(r"\W", "_", name.lstrip("-").lower())
    if wanted not in helps and dashes and (answer := hint(wanted, helps)):
        return answer + ("; ", " ")[answer.endswith("?")]
    words = wanted.replace("_", " ").split()
    hits = {n: sum(len(word) > 2 and word in helps[n].lower() for word in words) for n in helps}
    found = [n for n in helps if n == wanted]
    found += sorted((n for n in helps if len(words) > 1 and " ".join(words) in helps[n].lower()), key=len)
    found += difflib.get_close_matches(wanted, helps, n=1) + [word for word in words if word in helps]
    found += sorted((n for n in helps if 2 * hits[n] > len(words)), key=hits.get, reverse=True)
    return f"did you mean {dashes}{found[0]}? " if found else ""


def override_fields(instance, text: str, flag: str):
    """A copy of a dataclass instance with the fields of "n_layers=4,dim=512" changed. ValueError for what does not fit."""
    kinds, changes = get_type_hints(type(instance)), {}
    for item in filter(None, text.split(",")):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals or name not in kinds:
            raise ValueError(f"{flag}: {item.strip()!r} is no field=value; {did_you_mean(name, dict.fromkeys(kinds, ''), '')}"
                             f"fields are {', '.join(kinds)}")
        try:
            changes[name] = parse_value(value, kinds[name])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{flag}: {name} needs {getattr(kinds[name], '__name__', kinds[name])}, not {value!r}") from None
    return dataclasses.replace(instance, **changes)
