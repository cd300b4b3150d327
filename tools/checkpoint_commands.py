"""The command line of checkpoint.py: ls, verify, diff, average, to_hf, from_hf."""

import os
from dataclasses import asdict

import torch

import checkpoint
from distributed.layout import named_tensors
from forks.checkpoints import diff, mean_of_steps
from forks.peft_folder import export_peft
from storage.dcp import read_tensor
from storage.hf import (
    HF_DTYPES,
    check_export,
    check_same_model,
    file_kinds,
    load_hf_model,
    save_hf,
    say_lost,
    write_hf,
)
from storage.manifest import Damaged, read_manifest, verify
from storage.newest import candidates
from support.config import Parser, usage_error
from support.files import step_folders


def ls(run: str):
    """Lists step folders by their manifests; compares the sizes of all files, but reads no bytes."""
    for path in candidates(run):
        name = os.path.basename(path)
        try:
            manifest = read_manifest(path)
            size = sum(size for size, _ in manifest["files"].values())
            layout = [
                f"{manifest['world_size']} rank(s)",
                *(f"{axis} {degree}" for axis, degree in manifest["layout"].items()),
            ]
            status = "complete (bytes not read)" + ", only the weights" * manifest["model_only"]
            print(f"{name:13} {size / 1e6:10.1f} MB   {', '.join(layout):34} {status}")
        except Damaged as error:
            print(f"{name:13} {'?':>10} MB   {'':34} DAMAGED: {error}")


def verify_command(folder: str) -> int:
    """Returns 0 only if every byte of a step folder, or of all step folders of a run, is unchanged
    since the save."""
    of_run = (
        [path for _, path in step_folders(folder)]
        if not os.path.lexists(os.path.join(folder, "manifest.json"))
        else []
    )
    if not of_run and os.path.isdir(os.path.join(folder, "checkpoints")):
        print(f"{folder} holds no checkpoint")
        return 1
    status = 0
    for path in of_run or [folder]:
        try:
            files = verify(path)["files"]
            print(
                f"{path} is good: {len(files)} files, "
                f"{sum(size for size, _ in files.values()) / 1e6:.1f} MB",
                flush=True,
            )
        except Damaged as error:
            print(f"{path} is DAMAGED: {error}", flush=True)
            status = 1
    return status


def to_hf(folder: str, out: str, dtype="bfloat16", max_shard_gb=5.0, adapter=False):
    """Exports a step folder, or a run folder's newest good checkpoint, with two files in memory at
    a time. A LoRA run is merged in memory with the base weights; adapter: export only the adapters.
    """
    check_export(out)
    path, model, table = checkpoint.open_saved(folder)
    check_same_model(type(model), model.config)
    if adapter and not checkpoint.has_adapters(path):
        raise ValueError(f"--adapter: {folder} was trained without --lora_rank; leave it out")
    file = os.path.join(path, "tokenizer.json")
    tokenizer_file = file if os.path.isfile(file) else None
    if adapter:
        return export_peft(
            out,
            path,
            table,
            model,
            checkpoint.tokenizer_and_beside(tokenizer_file) if tokenizer_file else {},
        )
    if checkpoint.has_adapters(path):
        return save_hf(
            checkpoint.load_model(path)[0], out, getattr(torch, dtype), max_shard_gb, tokenizer_file
        )
    kinds = file_kinds(named_tensors(model), model, getattr(torch, dtype))

    def read(fqn):
        return read_tensor(f"model.{fqn}", path, table)

    say_lost(out, [fqn for fqn in named_tensors(model) if fqn not in kinds and read(fqn).any()])
    write_hf(
        out,
        model.config,
        model.hf_keys(),
        kinds,
        lambda fqn: read(fqn).to(kinds[fqn][1]),
        max_shard_gb,
        tokenizer_file,
    )


def from_hf(folder: str, out: str):
    """Writes a Hugging Face folder as a run folder of ours with one checkpoint, of step 0, for
    --init_from and generate.py."""
    check_export(out)
    model, tokenizer_file = load_hf_model(folder)
    about = {
        "module": type(model).__module__,
        "class": type(model).__name__,
        **asdict(model.config),
    }
    write_run(
        out,
        model,
        {"model": about, "data": {}, "optimizer": {}},
        {"step": 0, "samples": 0, "tokens": 0},
        tokenizer_file,
    )


def write_run(out: str, model, identity: dict, state: dict, tokenizer_file: str | None):
    """Writes a run folder with one checkpoint, of the weights alone."""
    checkpoints = checkpoint.Checkpoints(
        checkpoint.CheckpointConfig(),
        out,
        modules=[model],
        optimizer=[],
        identity=identity,
        config={},
        source="",
        tokenizer_file=tokenizer_file,
    )
    checkpoints.save(state["step"], state, last=True, model_only=True)
    checkpoints.close()


def average(run: str, out: str, last=0, steps=()):
    """Writes the mean of the weights of several steps of a run as a run folder, see
    forks/checkpoints.py."""
    write_run(out, *mean_of_steps(run, out, last, steps))


def main(argv: list[str]) -> int:
    parser = Parser(prog="python checkpoint.py", description=checkpoint.__doc__)
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
        type=lambda text: [*map(int, text.split(","))],
        default=(),
        help="these: 100,200,300",
    )
    command = add(to_hf, "to_hf", folder="a step folder, or a run folder", out=new)
    command.add_argument(
        "--dtype",
        choices=[str(d)[6:] for d in HF_DTYPES],
        default="bfloat16",
        help="of the weights",
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
