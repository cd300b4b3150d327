"""The command line of checkpoint.py: ls, verify, diff, average, to_hf, from_hf."""

import logging
import math
import os
import shutil
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import torch

from corpus.beside import read_beside
from corpus.special import NoEnds
from corpus.tokenizer import tokenizer_and_beside
from distributed.agree import Failed, reason
from distributed.layout import named_tensors
from flags.config import Parser, usage_error
from flags.files import STEP_FOLDER, json_bytes, read_json, step_folders
from flags.progress import Progress
from storage.changes import changes, describe_changes
from storage.dcp import SavePlan, read_table, read_tensor, write_tensors
from storage.hf import HF_DTYPES, load_hf_model
from storage.hf_config import check_same_model, class_of, read_hf_config
from storage.hf_write import check_export, file_kinds, save_hf, say_lost, write_hf
from storage.manifest import Damaged, checksums, read_manifest, verify
from storage.model_card import card_of_step
from storage.newest import candidates, has_adapters, open_saved
from storage.peft import export_peft
from storage.run_tensors import model_tensors
from storage.saved import load_model
from storage.source_tokenizer import ids_of_folder
from storage.writer import commit_step


def ls(run: str) -> None:
    """Lists step folders by their manifests; compares the sizes of all files, but reads no bytes."""
    for path in candidates(run):
        name = os.path.basename(path)
        try:
            manifest = read_manifest(path)
            size = sum(size for size, _ in manifest["files"].values())
            layout = [f"{manifest['world_size']} rank(s)"]
            for axis, degree in manifest["layout"].items():
                layout.append(f"{axis} {degree}")
            status = "complete (bytes not read)"
            if manifest["model_only"]:
                status += ", only the weights"
            print(f"{name:13} {size / 1e6:10.1f} MB   {', '.join(layout):34} {status}")
        except Damaged as error:
            print(f"{name:13} {'?':>10} MB   {'':34} DAMAGED: {error}")


def verify_command(folder: str) -> int:
    """Returns 0 only if every byte of a step folder, or of all step folders of a run, is unchanged
    since the save."""
    of_run = []
    has_manifest = os.path.lexists(os.path.join(folder, "manifest.json"))
    if not has_manifest:
        of_run = [path for _, path in step_folders(folder)]
    name = os.path.basename(os.path.abspath(folder))
    is_step = os.path.isdir(folder) and STEP_FOLDER.fullmatch(name)
    if not of_run and not is_step and not has_manifest:
        what = "holds no checkpoint"
        if not os.path.isdir(folder):
            what = "is no folder"
        print(f"{folder} {what}; give a run folder, or one of its folders checkpoints/step-N")
        return 1
    status = 0
    for path in of_run or [folder]:
        try:
            files = verify(path)["files"]
            mb = sum(size for size, _ in files.values()) / 1e6
            print(f"{path} is good: {len(files)} files, {mb:.1f} MB", flush=True)
        except Damaged as error:
            print(f"{path} is DAMAGED: {error}", flush=True)
            status = 1
    return status


def to_hf(
    folder: str, out: str, dtype: str = "float32", max_shard_gb: float = 5.0, adapter: bool = False
) -> None:
    """Exports a step folder, or a run folder's newest good checkpoint, with two files in memory at
    a time. A LoRA run is merged in memory with the base weights; adapter: export only the adapters.

    The export is compared with transformers before the folder gets its name. Raises ValueError.
    """
    check_export(out)
    path, model, table = open_saved(folder)
    check_same_model(type(model), model.config)
    if adapter and not has_adapters(path):
        raise ValueError(f"--adapter: {folder} was trained without --lora_rank; leave it out")
    tokenizer_file = tokenizer_of_step(path)
    card = card_of_step(path, dtype, adapter)
    if adapter:
        beside = tokenizer_and_beside(tokenizer_file) if tokenizer_file else {}
        beside["README.md"] = card.encode()
        export_peft(out, path, table, model, beside)
        return
    if has_adapters(path):
        merged = load_model(path)[0]
        save_hf(
            merged,
            out,
            getattr(torch, dtype),
            max_shard_gb,
            tokenizer_file,
            check=compare_export,
            card=card,
        )
        return
    kinds = file_kinds(named_tensors(model), model, getattr(torch, dtype))

    def read(fqn):
        return read_tensor(f"model.{fqn}", path, table)

    without_place = [fqn for fqn in named_tensors(model) if fqn not in kinds]
    say_lost(out, [fqn for fqn in without_place if read(fqn).any()])
    write_hf(
        out,
        model.config,
        model.hf_keys(),
        kinds,
        lambda fqn: read(fqn).to(kinds[fqn][1]),
        max_shard_gb,
        tokenizer_file,
        check=compare_export,
        card=card,
    )


def tokenizer_of_step(path: str) -> str | None:
    file = os.path.join(path, "tokenizer.json")
    return file if os.path.isfile(file) else None


TOKENS = 24  # of the comparison with transformers
APART = 1e-3  # relative difference of logits in fp32 that two right implementations do not reach


def compare_export(folder: str) -> None:
    """Prints how far our logits of an export are from those of transformers, or why nothing was
    compared. Raises ValueError when they differ."""
    logging.disable(logging.WARNING)  # of libraries that transformers looks for
    try:
        print(f"checkpoint: {compare_logits(folder)}", flush=True)
    finally:
        logging.disable(logging.NOTSET)


@torch.no_grad()
def compare_logits(folder: str) -> str:
    """Loads an export with our code and with transformers, in fp32, and compares the logits of a few
    tokens. Returns how far they are apart, or why nothing was compared. Raises ValueError when they
    differ: then transformers computes something else under this model_type."""
    try:
        import transformers
    except ImportError:
        return "the export was not compared with transformers: pip install transformers"
    config = read_hf_config(folder)
    kind = config.to_hf()["model_type"]
    if kind not in transformers.CONFIG_MAPPING:
        return f"the export was not compared: transformers does not know model_type {kind!r}"
    with torch.device("meta"):
        n_params = sum(p.numel() for p in class_of(config)(config).parameters())
    n_bytes = 2 * 4 * n_params
    if n_bytes > memory_available():
        gb = f"{n_bytes / 1e9:.0f} GB"
        return f"the export was not compared with transformers: two copies take {gb} of memory"
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    tokens = torch.arange(TOKENS)[None] * (config.vocab_size // TOKENS)
    with Progress("comparing the export with transformers"):
        ours = load_hf_model(folder, dtype=torch.float32)[0](tokens).float()
        try:
            theirs = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, local_files_only=True
            )
        except Exception as error:
            raise ValueError(f"transformers cannot open the export: {reason(error)}") from None
        logits = theirs.eval()(tokens).logits.float()
    apart = ((ours - logits).norm() / logits.norm()).item()
    if not apart < APART:
        file = type(config).__module__.replace(".", "/") + ".py"
        raise ValueError(
            f"transformers computes other logits from this export, {apart:.2g} apart (relative): "
            f"{file} is no {kind} any more; let to_hf() of its config return another model_type"
        )
    return f"transformers computes the same logits from the export, within {apart:.1g} (relative)"


def memory_available() -> int:
    """Bytes of host memory that are free, or are freed without loss; where the system does not tell,
    half of the memory."""
    try:
        with open("/proc/meminfo") as file:
            (line,) = [line for line in file if line.startswith("MemAvailable")]
        return int(line.split()[1]) * 1024
    except OSError:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def write_run(
    out: str,
    model: torch.nn.Module,
    identity: dict,
    state: dict,
    tokenizer_file: str | None,
    generation: dict | None = None,
) -> None:
    """Writes a run folder with one checkpoint, of the weights of a plain model alone. generation:
    its generation_config.json, None: that beside the tokenizer. Raises RuntimeError if the folder
    could not be written."""
    began = time.perf_counter()
    step = state["step"]
    target = os.path.join(out, "checkpoints", f"step-{step}")
    folder = f"{target}.tmp-{uuid.uuid4().hex[:8]}"
    about = {"step": step, "model_only": True, "identity": identity, "state": state}
    contents = {"state.json": json_bytes(about), "config.json": json_bytes({}), "recipe.py": b""}
    if tokenizer_file:
        contents |= tokenizer_and_beside(tokenizer_file)
    if generation is not None:
        contents["generation_config.json"] = json_bytes(generation)
    try:
        os.makedirs(folder)
        with Progress(f"writing {target}"):
            names = write_tensors(model_tensors([model]), folder, None, SavePlan())
            listed = checksums(folder, names, sync=True)
        size = commit_step(
            folder, target, contents, listed, step=step, model_only=True, layout={}, world_size=1
        )
    except (Failed, OSError) as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise RuntimeError(f"{target} could not be saved: {error}") from None
    seconds = time.perf_counter() - began
    print(f"checkpoint: saved {target} ({size / 1e6:.1f} MB in {seconds:.2f} s)", flush=True)


def from_hf(folder: str, out: str) -> None:
    """Writes a Hugging Face folder as a run folder of ours with one checkpoint, of step 0, for
    --init_from and generate.py."""
    check_export(out)
    model, tokenizer_file = load_hf_model(folder)
    config: Any = model.config
    about = {
        "module": type(model).__module__,
        "class": type(model).__name__,
        **asdict(config),
    }
    generation = None
    if tokenizer_file:
        with suppress(NoEnds):  # no file of the folder names an end
            known = read_beside(folder, "generation_config.json")
            generation = known | ids_of_folder(folder).for_config()
    write_run(
        out,
        model,
        {"model": about, "data": {}, "optimizer": {}},
        # bos: texts begin as in the folder
        {"step": 0, "samples": 0, "tokens": 0, "bos": True},
        tokenizer_file,
        generation,
    )


def mean_of_steps(run: str, out: str, last: int = 0, steps: Iterable[int] = ()) -> tuple:
    """(a model with the mean, the run's identity, the state of the latest of these steps, the
    tokenizer.json or None).

    The mean is in fp32, of the newest `last` checkpoints or of `steps`. Reads one tensor at a time:
    memory holds the mean, 4 bytes per weight, and one tensor of one step. Raises ValueError, also
    if nothing can be written to `out`.
    """
    check_export(out)
    found = dict(step_folders(run))
    wanted = sorted({*steps} or [*found][:last], reverse=True)
    if len(wanted) < max(2, last) or not found.keys() >= {*wanted}:
        raise ValueError(
            f"{'--steps' if steps else '--last'} {steps or last}: {run} has checkpoints of the "
            f"steps {[*found]}; "
            "give two or more of these (training keeps --keep_latest_k)"
        )
    opened = [open_saved(found[step]) for step in wanted]
    newest, model, _ = opened[0]
    saved = read_json(newest, "state.json")
    for path, *_ in opened:
        if has_adapters(path):
            raise ValueError(
                f"{path} holds adapters, whose mean is no mean of their products; merge each with "
                "to_hf"
            )
        its_model = read_json(path, "state.json")["identity"]["model"]
        different = list(changes(its_model, saved["identity"]["model"]))
        if different:
            raise ValueError(
                f"{path} and {newest} hold different models: {describe_changes(different)}"
            )
    model.to_empty(device="cpu")
    tensors = named_tensors(model)
    with Progress(f"mean of {len(opened)} checkpoints", len(tensors), "tensors") as progress:
        for fqn, mean in tensors.items():
            total = torch.zeros(())
            for path, _, table in opened:
                total = total + read_tensor(f"model.{fqn}", path, table).float()
            mean.detach().copy_(total / len(opened))
            progress()
    state = saved["state"] | {"step": wanted[0], "mean_of_steps": wanted}
    return model, saved["identity"], state, tokenizer_of_step(newest)


def average(run: str, out: str, last: int = 0, steps: Iterable[int] = ()) -> None:
    """Writes the mean of the weights of several steps of a run as a run folder."""
    write_run(out, *mean_of_steps(run, out, last, steps))


def diff(a: str, b: str) -> int:
    """Compares two step folders, with one pair of tensors in memory at a time; by bits, so NaN
    equals NaN."""
    for folder in (a, b):
        if not os.path.isfile(os.path.join(folder, "manifest.json")):
            raise ValueError(f"{folder} is no step folder; give two folders RUN/checkpoints/step-N")
    in_a = read_table(a, verify(a)["files"])
    in_b = read_table(b, verify(b)["files"])
    differ = {}  # key: in what
    relative = {}
    keys = sorted(in_a.keys() | in_b.keys())
    with Progress("comparing", len(keys), "tensors") as progress:
        for key in keys:
            progress()
            kind = in_a.get(key)
            other = in_b.get(key)
            if other is None:
                differ[key] = f"only in {a}"
            elif kind is None:
                differ[key] = f"only in {b}"
            elif kind.size != other.size or kind.dtype != other.dtype:
                differ[key] = f"{tuple(kind.size)} {kind.dtype} / {tuple(other.size)} {other.dtype}"
            else:
                x = read_tensor(key, a, in_a).reshape(-1)
                y = read_tensor(key, b, in_b).reshape(-1)
                if torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
                    continue
                far = (x.double() - y.double()).abs()
                relative[key] = (far.norm() / x.double().norm().clamp(min=1e-300)).item()
                differ[key] = (
                    f"{int((far != 0).sum())} of {far.numel()} elements, by up to {far.max():.3g}, "
                    f"{relative[key]:.1e} relative"
                )
    old_state = read_json(a, "state.json")["state"]
    new_state = read_json(b, "state.json")["state"]
    for name, old, new in changes(old_state, new_state):
        print(f"state.json: {name} is {old} / {new}")
    most = ", most of all:" if differ else ""
    print(f"{len(differ)} of {len(keys)} tensors differ{most}")
    far = sorted(differ, key=lambda key: -relative.get(key, math.inf))  # other shapes first
    for key in far[:5]:
        print(f"  {key}: {differ[key]}")
    return int(bool(differ))


def step_list(text: str) -> list[int]:
    return [int(step) for step in text.split(",")]


def main(argv: list[str], about: str | None = None) -> int:
    parser = Parser(prog="python checkpoint.py", description=about)
    commands = parser.add_subparsers(metavar="ls|verify|diff|average|to_hf|from_hf", required=True)

    def add(function, name, **arguments):
        command = commands.add_parser(name)
        command.set_defaults(function=function)
        for argument, text in arguments.items():
            command.add_argument(argument, help=text)
        return command

    new = "the folder to write; it must be new"
    add(ls, "ls", run="a run folder")
    add(verify_command, "verify", folder="a run folder, or a step folder")
    add(diff, "diff", a="a step folder", b="another one")
    add(from_hf, "from_hf", folder="a Hugging Face folder", out=new)
    which = add(average, "average", run="a run folder", out=new).add_mutually_exclusive_group(
        required=True
    )
    which.add_argument(
        "--last", type=int, default=0, help="number of newest checkpoints to average"
    )
    which.add_argument(
        "--steps",
        type=step_list,
        default=(),
        help="these: 100,200,300",
    )
    command = add(to_hf, "to_hf", folder="a step folder, or a run folder", out=new)
    command.add_argument(
        "--dtype",
        choices=[str(d)[6:] for d in HF_DTYPES],
        default="float32",
        help="of the weights; checkpoints are in float32, and so is --export_hf of a run",
    )
    command.add_argument(
        "--adapter", action="store_true", help="of a LoRA run: its adapters alone, in peft's format"
    )
    command.add_argument(
        "--max_shard_gb", type=float, default=5.0, help="the most that a file may have, in GB"
    )
    arguments = vars(parser.parse_args(argv))
    try:
        return arguments.pop("function")(**arguments) or 0
    except (ValueError, RuntimeError, OSError) as error:  # OSError: a full disk
        usage_error(error)
