"""A step folder as a model: which one to read, whether it fits, its weights into a model of any
layout, and a run folder with the weights of a plain model."""

import importlib
import os
import re
import shutil
import sys
import time
import uuid
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from corpus.tokenizer import tokenizer_and_beside
from distributed.agree import (
    Failed,
    brief,
    fail_together,
    gather,
    holds_on_any_rank,
    new_gloo_group,
    on_rank_0,
    rank_in,
)
from distributed.layout import named_tensors
from flags import VERSION
from flags.files import json_bytes, matches, publish, read_json, write_file
from storage.dcp import SavePlan, read_table, read_tensors, write_tensors
from storage.manifest import (
    TABLE,
    Progress,
    check_files,
    checksums,
    read_manifest,
    verify,
    write_manifest,
)
from storage.newest import (
    Source,
    candidates,
    has_adapters,
    is_hf_folder,
    newest_good,
    newest_readable,
)
from storage.provenance import changed_code, local_code


# --- Any layout: each rank reads its part ---
def choose_step(folder: str, step: int, group, say) -> tuple[str, dict, list[str]]:
    """(path, manifest) of the newest undamaged step folder, or of `step`, and the newer step folders,
    which are damaged. One decision for all ranks; each rank checks a share of the files. say: prints
    a line on rank 0."""
    rank = rank_in(group)
    world_size = dist.get_world_size(group) if group else 1

    def check(path):
        manifest = on_rank_0(lambda: read_manifest(path), group)
        sizes = {name: size for name, (size, _) in manifest["files"].items()}
        share = sorted(sizes, key=sizes.get)[rank::world_size]
        n_bytes = sum(sizes[name] for name in share)
        progress = Progress(f"verifying {path}", n_bytes, say)
        fail_together(lambda: check_files(path, manifest, share, progress), group)
        return manifest

    paths = on_rank_0(lambda: candidates(folder, step), group)
    path, manifest = newest_good(folder, paths, check, say)
    listed = {*manifest["files"], "manifest.json"}
    # a note, leftovers of a file system
    unlisted = on_rank_0(lambda: sorted(set(os.listdir(path)) - listed), group)
    if unlisted:
        say(f"{path} has files that no save has written, and they are not read: {brief(unlisted)}")
    return path, manifest, paths[: paths.index(path)]


def split_twins(modules: list[nn.Module]) -> tuple[dict, dict]:
    """({fqn: parameter}, {fqn: its twin}) of this rank. A V-shaped pipeline has its first and last
    stage on one rank: with tied embeddings, two equal parameters of one name."""
    found = []
    for module in modules:
        for fqn, tensor in named_tensors(module).items():
            if isinstance(tensor, nn.Parameter):
                found.append((fqn, tensor))
    params = dict(reversed(found))  # the first of two with one name
    return params, {fqn: tensor for fqn, tensor in found if tensor is not params[fqn]}


def model_tensors(modules: list[nn.Module]) -> dict[str, Tensor]:
    """{"model.<fqn>": tensor} of the parameters and saved buffers of this rank."""
    found = {}
    for module in modules:
        found |= named_tensors(module)
    found |= split_twins(modules)[0]
    return {f"model.{fqn}": tensor.detach() for fqn, tensor in found.items()}


def check_excluded(patterns: list[str], modules: list[nn.Module], group) -> None:
    """Raises ValueError for a name in --exclude_from_loading that no parameter of the model has."""
    own = [fqn for module in modules for fqn in named_tensors(module)]
    known = set().union(*gather(own, group))
    for pattern in patterns:
        if pattern != "optimizer" and not any(matches([pattern], f"model.{fqn}") for fqn in known):
            raise ValueError(
                f"--exclude_from_loading {pattern}: no such parameter; the model has "
                f"{brief(sorted(known))}"
            )


def check_fit(tensors: dict[str, Tensor], there: dict, folder: str, same_dtype: bool, group):
    """Raises ValueError with all keys that are missing, unknown, or of another shape or dtype. DCP
    itself would ignore unknown keys, cast dtypes, and find a wrong shape after half of the model is
    overwritten."""
    wrong = {"missing": [], "shape": [], "dtype": []}
    for key, t in tensors.items():
        saved = there.get(key)
        if saved is None:
            wrong["missing"].append(key)
        elif saved.size != t.shape:
            wrong["shape"].append(f"{key} {tuple(saved.size)}, here {tuple(t.shape)}")
        elif same_dtype and key.startswith("model.") and saved.dtype != t.dtype:
            wrong["dtype"].append(f"{key} {saved.dtype}, here {t.dtype}")
    # a pipeline stage lacks the other stages' keys: unknown means absent on all ranks
    known = torch.tensor([key in tensors for key in there], dtype=torch.uint8)
    if group:
        dist.all_reduce(known, dist.ReduceOp.MAX, group)
    found = wrong
    if holds_on_any_rank(any(wrong.values()), group):
        found = {}
        for of_rank in gather(wrong, group):
            for what, texts in of_rank.items():
                found[what] = list(dict.fromkeys(found.get(what, []) + texts))
    found["unknown"] = [key for key, n in zip(there, known) if not n]
    problems = [f"{what}: {brief(texts)}" for what, texts in found.items() if texts]
    if problems:
        fix = ""
        if found["dtype"]:
            fix = "; give the --param_dtype that it was trained with"
        # such as experts, once AdamW's
        if any(key.startswith("optimizer.") for key in found["missing"]):
            fix += "; the optimizer has another state now: --exclude_from_loading optimizer starts it anew"
        raise ValueError(
            f"{folder} does not fit this model: {'; '.join(problems)}{fix}".replace("torch.", "")
        )


def load_weights(modules: list[nn.Module], folder: str, exclude=()) -> None:
    """Fills this rank's part of a model, sharded in any way, from a run, step or Hugging Face
    folder. Every rank calls.
    exclude: parameters to leave alone, as in --exclude_from_loading. Raises ValueError, the same on
    all ranks."""
    group = new_gloo_group("weights") if dist.is_initialized() else None
    say = partial(print_on_rank_0, group)
    excluded = list(exclude)
    if is_hf_folder(folder):
        from storage.hf import load_hf

        check_excluded(excluded, modules, group)
        load_hf(modules, folder, excluded, group)
        say(f"step 0, with the weights of {folder} (Hugging Face)")
        return
    if has_adapters(newest_readable(folder)):
        path, _, table = open_saved(folder)
        return fill_merged(modules, path, table)
    config = modules[0].config
    model = {
        "module": type(config).__module__,
        "class": type(config).__name__.removesuffix("Config"),
        **asdict(config),
    }
    from storage.changes import compare_start, describe_changes

    path, manifest, _ = choose_step(folder, -1, group, say)
    source = Source(folder, -1, everything=False)
    differ = on_rank_0(
        lambda: compare_start(path, source, False, {"model": model}, excluded, {}), group
    )
    table = fail_together(lambda: read_table(path, manifest["files"]), group)
    check_excluded(excluded, modules, group)
    tensors = {}
    for key, t in model_tensors(modules).items():
        if not matches(excluded, key):
            tensors[key] = t
    wanted = {}
    for key, saved in table.items():
        if key.startswith("model.") and not matches(excluded, key):
            wanted[key] = saved
    check_fit(tensors, wanted, path, False, group)
    fail_together(lambda: read_tensors(tensors, path, table), group)
    params, twins = split_twins(modules)
    for fqn, twin in twins.items():
        twin.detach().copy_(params[fqn].detach())
    changed = f"; {describe_changes(differ)}" if differ else ""
    written = f"written by {manifest['world_size']} rank(s)"
    say(f"step 0, with the weights of {path} ({written}){changed}")


def print_on_rank_0(group, text: str) -> None:
    if rank_in(group) == 0:
        print(f"checkpoint: {text}", flush=True)


def fill_merged(modules: list[nn.Module], path: str, table):
    """Fills a model, plain or this rank's part, from a step folder of a LoRA run: loads the frozen
    weights from the folder named in state.json, then adds the adapters. Raises ValueError."""
    from storage.adapters import add_adapters_of, base_of, check_base

    load_weights(modules, base_of(path))
    check_base(path, modules, new_gloo_group("base") if dist.is_initialized() else None)
    add_adapters_of(path, table, modules)


# --- One process: a model to sample from ---
def saved_model(path: str) -> tuple[type, object]:
    """(model class, config) of a step folder. Raises ValueError unless the class is in models/ or
    forks/."""
    try:
        fields = dict(read_json(path, "state.json")["identity"]["model"])
        module = fields.pop("module")
        name = fields.pop("class")
        # a file must not decide what is imported
        if not re.fullmatch(r"(models|forks)\.[A-Za-z_]\w*", module):
            raise ValueError(
                f"it is a {module}.{name}, and only those in models/ and forks/ are loaded"
            )
        module = importlib.import_module(module)
        config = getattr(module, f"{name}Config")(**fields)
        if not 0 < config.n_layers <= 10_000:
            raise ValueError(f"n_layers {config.n_layers} is absurd: 10,000 are the most")
        return getattr(module, name), config
    except (ImportError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(f"{path}/state.json does not describe a model: {error}") from None


def open_saved(folder: str) -> tuple[str, nn.Module, object]:
    """(path, model on meta, DCP's table) of a step folder, or of a run folder's newest good
    checkpoint. Raises ValueError.

    The table of a LoRA run has only the adapters.
    """
    say = partial(print, "checkpoint:", file=sys.stderr, flush=True)  # stdout is for sampled text
    path, manifest = newest_good(folder, candidates(folder), verify, say)
    Model, config = saved_model(path)
    code = {}  # what computes the model
    for file, text in local_code().items():
        if file.startswith(("models/", "forks/")):
            code[file] = text
    changed = changed_code(path, code)
    if changed:
        say(changed)
    with torch.device("meta"):  # takes memory only once, and in the wanted dtype
        model = Model(config)
    table = read_table(path, manifest["files"])
    there = {key for key in table if key.startswith("model.")}
    names = list(named_tensors(model))
    if has_adapters(path):
        from storage.adapters import lora_names, lora_of

        names = []
        for name in lora_names(model, lora_of(path)["on"]):
            names += [f"{name}.lora_a.weight", f"{name}.lora_b.weight"]
    odd = sorted(there ^ {f"model.{fqn}" for fqn in names})
    if odd:
        kind = f"{Model.__module__}.{Model.__name__}"
        raise ValueError(
            f"{path} does not fit {kind}: {len(odd)} odd tensors, the first is {odd[0]}"
        )
    return path, model, table


def load_model(
    folder: str, device="cpu", dtype: torch.dtype | None = None
) -> tuple[nn.Module, dict]:
    """(plain model on `device`, state) of a step folder, or of a run folder's newest good
    checkpoint. Raises ValueError.

    Adapters are merged with the base weights, read from the folder of the run's start.
    """
    path, model, table = open_saved(folder)
    for param in model.parameters():  # not the buffers: an expert's bias stays fp32
        param.data = param.data.to(dtype or param.dtype)
    model.to_empty(device=device)
    saved = {id(t) for t in named_tensors(model).values()}
    for buffer in model.buffers():
        assert id(buffer) in saved, (
            "a buffer that no checkpoint holds is empty now: compute it in forward"
        )
    if has_adapters(path):
        fill_merged([model], path, table)
    else:
        read_tensors(model_tensors([model]), path, table)
    return model.eval(), read_json(path, "state.json")["state"]


# --- Writing ---
def commit_step(folder: str, target: str, contents: dict[str, bytes], listed: dict, **about) -> int:
    """Completes a folder of tensors and renames it to `target`, a step folder. contents: {name:
    bytes} of the other files; listed: checksums() of the files that are there; about: values of the
    manifest. Returns the size in bytes."""
    for name, content in contents.items():
        write_file(Path(folder, name), content)
    files = listed | checksums(folder, [TABLE, *contents])
    write_manifest(folder, files, **about, version=VERSION, torch=torch.__version__)
    publish(folder, target)
    return sum(size for size, _ in files.values())


def write_run(
    out: str,
    model: nn.Module,
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
