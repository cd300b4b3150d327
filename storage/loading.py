"""Weights of a checkpoint into a run of any layout: which step folder, whether it fits, and the
tensors. Only runs that begin with saved weights load this file."""

import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distributed.agree import (
    brief,
    fail_together,
    gather,
    holds_on_any_rank,
    new_gloo_group,
    on_rank_0,
    rank_in,
)
from distributed.layout import named_tensors
from flags.files import matches, read_json, step_folders
from storage.dcp import read_table, read_tensors
from storage.manifest import check_files, read_manifest
from storage.newest import (
    Source,
    candidates,
    has_adapters,
    is_hf_folder,
    newest_good,
    newest_readable,
    open_saved,
)
from storage.optimizer_numbers import OptimizerNumbers, freeze, is_json
from storage.provenance import changed_code
from storage.run_tensors import RunTensors, model_tensors, split_twins
from storage.writer import set_aside


def choose_step(
    folder: str, step: int, group: dist.ProcessGroup | None, say: Callable[[str], None]
) -> tuple[str, dict, list[str]]:
    """(path, manifest) of the newest undamaged step folder, or of `step`, and the newer step folders,
    which are damaged. One decision for all ranks; each rank checks a share of the files. say: prints
    a line on rank 0."""
    from flags.progress import Progress

    rank = rank_in(group)
    world_size = dist.get_world_size(group) if group else 1

    def check(path):
        manifest = on_rank_0(lambda: read_manifest(path), group)
        sizes = {name: size for name, (size, _) in manifest["files"].items()}
        share = sorted(sizes, key=sizes.__getitem__)[rank::world_size]
        n_bytes = sum(sizes[name] for name in share)
        with Progress(f"verifying {path}", n_bytes, "GB per rank", 1e9) as progress:
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


def set_newer_aside(out: str, step: int, damaged: list[str], say: Callable[[str], None]) -> None:
    """Renames the step folders of a run that are newer than the step it continues."""
    for newer, path in step_folders(out):
        if newer > step:
            set_aside(path, "damaged" if path in damaged else "abandoned", say)


def check_excluded(
    patterns: list[str], modules: list[nn.Module], group: dist.ProcessGroup | None
) -> None:
    """Raises ValueError for a name in --exclude_from_loading that no parameter of the model has."""
    own = [fqn for module in modules for fqn in named_tensors(module)]
    known = set().union(*gather(own, group))
    for pattern in patterns:
        if pattern != "optimizer" and not any(matches([pattern], f"model.{fqn}") for fqn in known):
            raise ValueError(
                f"--exclude_from_loading {pattern}: no such parameter; the model has "
                f"{brief(sorted(known))}"
            )


def check_fit(
    tensors: dict[str, Tensor],
    there: dict,
    folder: str,
    same_dtype: bool,
    group: dist.ProcessGroup | None,
) -> None:
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


# --- The state of the optimizers ---
def create_optimizer_state(run: RunTensors, fqns: set[str]) -> None:
    """Lets torch create the state of these parameters, before tensors are read: a step with zero
    gradients and lr 0 changes no weight.

    Parameters outside of `fqns` get no state: excluded, or never had a gradient.
    """
    for fqn, param in [*run.params.items(), *run.twins.items()]:
        param.grad = None
        if fqn in fqns:
            param.grad = torch.zeros_like(param)
    for optimizer in run.optimizers:
        lrs = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * 0  # a float, or a tensor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for group, lr in zip(optimizer.param_groups, lrs):
            group["lr"] = lr


def create_late_state(run: RunTensors, table: dict, late: list[str]) -> None:
    """Creates state that the optimizer makes in a later step than its first. table: the tensors of
    the checkpoint; late: names of such state."""
    for key, saved in table.items():
        fqn, _, name = key.removeprefix("optimizer.").rpartition(".")
        if name not in late:
            continue
        for param in (run.params.get(fqn), run.twins.get(fqn)):
            if param is None or name in run.state_of(param):
                continue
            # a number of its own, or a tensor like the parameter
            like = torch.zeros((), device=param.device)
            if saved.size == param.shape:
                like = param
            owner = next(o for o in run.optimizers if param in o.state)
            owner.state[param][name] = torch.zeros_like(like.detach(), dtype=saved.dtype)


def fill_twins(run: RunTensors) -> None:
    """Copies weights and optimizer state, after tensors were read, from each parameter to the twin
    of the same name."""
    for fqn, twin in run.twins.items():
        twin.detach().copy_(run.params[fqn].detach())
        for name, t in run.state_of(twin).items():
            t.copy_(run.state_of(run.params[fqn])[name])


def restore_numbers(numbers: OptimizerNumbers, saved: dict[str, list[dict]]) -> None:
    """Restores the result of numbers.changed() on this rank's groups, and first values elsewhere:
    creating the state took a step."""
    for optimizer, first in zip(numbers.optimizers, numbers.first, strict=True):
        attributes = {}
        of_groups = []
        for group in optimizer.param_groups:
            saved_attributes, values = saved_of_group(numbers.names, saved, group)
            attributes = attributes or saved_attributes
            of_groups.append(values)
        targets = [vars(optimizer), *optimizer.param_groups]
        parts = [attributes, *of_groups]
        for target, before, new in zip(targets, first, parts, strict=True):
            for name, value in (before | new).items():
                if not is_json(value):
                    continue
                present = target.get(name)
                if isinstance(present, Tensor):
                    present.fill_(value)
                elif freeze(present, (optimizer,)) != value:
                    # a tuple stays a tuple
                    target[name] = json.loads(json.dumps(value))  # a copy


def saved_of_group(names: dict[int, str], saved: dict[str, list[dict]], group: dict) -> list[dict]:
    """[attributes of the optimizer, values of the group], found by any parameter of the group."""
    for p in group["params"]:
        fqn = names[id(p)]
        if fqn in saved:
            return saved[fqn]
    return [{}, {}]


def put_into_run(
    run: RunTensors,
    numbers: OptimizerNumbers,
    folder: str,
    manifest: dict,
    *,
    everything: bool,
    excluded: list[str],
    group: dist.ProcessGroup | None,
) -> None:
    """Reads the tensors of a step folder into a run. everything: the optimizer's, too. excluded:
    names of --exclude_from_loading. Raises ValueError, the same on all ranks, before a tensor is
    touched."""
    table = fail_together(lambda: read_table(folder, manifest["files"]), group)
    check_excluded(excluded, run.modules, group)
    with_optimizer = everything and "optimizer" not in excluded
    wanted = {}
    for key, saved in table.items():
        if matches(excluded, key):
            continue
        if with_optimizer or key.startswith("model."):
            wanted[key] = saved
    about = read_json(folder, "state.json")
    if with_optimizer:
        moments = {}
        fqns = set()
        for key, saved in wanted.items():
            if key.startswith("optimizer."):
                moments[key] = saved
                fqns.add(key.removeprefix("optimizer.").rpartition(".")[0])
        fail_together(lambda: create_optimizer_state(run, fqns), group)
        create_late_state(run, moments, about.get("late", []))
    tensors = {}
    for key, t in run.named(with_optimizer).items():
        if not matches(excluded, key):
            tensors[key] = t
    check_fit(tensors, wanted, folder, everything, group)
    fail_together(lambda: read_tensors(tensors, folder, table), group)
    fill_twins(run)
    if with_optimizer:
        restore_numbers(numbers, about.get("optimizer", {}))


def describe_load(
    folder: str,
    manifest: dict,
    everything: bool,
    differ: list[tuple],
    code: dict[str, str],
    excluded: list[str],
) -> list[str]:
    """One line on what a run starts from, and one on source files that have changed. code: the
    sources of the run. excluded: names of --exclude_from_loading."""
    from storage.changes import describe_changes

    changed = ""
    if not everything:
        what = "step 0, with the weights of"
    elif differ:
        what = "step 0, with the weights and the optimizer state of"
        if "optimizer" in excluded:
            what = "step 0, with the weights, and no optimizer state, of"
    else:
        what = "continuing from"
    if differ and not everything:
        changed = f"; {describe_changes(differ)}"
    lines = [f"{what} {folder} (written by {manifest['world_size']} rank(s)){changed}"]
    if code:
        text = changed_code(folder, code)
        if text:
            lines.append(text)
    return lines


def load_weights(modules: list[nn.Module], folder: str, exclude: Iterable[str] = ()) -> None:
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
        say(f"the weights of {folder} (Hugging Face)")
        return
    if has_adapters(newest_readable(folder)):
        path, _, table = open_saved(folder)
        return fill_merged(modules, path, table)
    config: Any = modules[0].config
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
    say(f"the weights of {path} ({written}){changed}")


def print_on_rank_0(group: dist.ProcessGroup | None, text: str) -> None:
    if rank_in(group) == 0:
        print(f"checkpoint: {text}", flush=True)


def fill_merged(modules: list[nn.Module], path: str, table: dict) -> None:
    """Fills a model, plain or this rank's part, from a step folder of a LoRA run: loads the frozen
    weights from the folder named in state.json, then adds the adapters. Raises ValueError."""
    from storage.adapters import add_adapters_of, base_of, check_base

    load_weights(modules, base_of(path))
    check_base(path, modules, new_gloo_group("base") if dist.is_initialized() else None)
    add_adapters_of(path, table, modules)
