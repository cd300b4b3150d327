"""Two commands of checkpoint.py: `average RUN OUT --last 3`, the mean of the weights of several
steps (see also forks/ema.py), and `diff STEP_FOLDER STEP_FOLDER`, what differs between two
checkpoints, tensor by tensor."""

import math
import os

import torch

from checkpoint import has_adapters, open_saved
from distributed.layout import named_tensors
from storage.changes import changes, describe_changes
from storage.dcp import read_table, read_tensor
from storage.hf import check_export
from storage.manifest import verify
from support.files import read_json, step_folders


def mean_of_steps(run: str, out: str, last=0, steps=()):
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
    saved, file = read_json(newest, "state.json"), os.path.join(newest, "tokenizer.json")
    for path, *_ in opened:
        if has_adapters(path):
            raise ValueError(
                f"{path} holds adapters, whose mean is no mean of their products; merge each with "
                "to_hf"
            )
        if different := [
            *changes(read_json(path, "state.json")["identity"]["model"], saved["identity"]["model"])
        ]:
            raise ValueError(
                f"{path} and {newest} hold different models: {describe_changes(different)}"
            )
    model.to_empty(device="cpu")
    for fqn, mean in named_tensors(model).items():
        key, total = f"model.{fqn}", 0
        for path, _, table in opened:
            total = total + read_tensor(key, path, table).float()
        mean.detach().copy_(total / len(opened))
    state = saved["state"] | {"step": wanted[0], "mean_of_steps": wanted}
    return model, saved["identity"], state, file if os.path.isfile(file) else None


def diff(a: str, b: str) -> int:
    """Compares two step folders, with one pair of tensors in memory at a time; by bits, so NaN
    equals NaN."""
    tables = [read_table(folder, verify(folder)["files"]) for folder in (a, b)]
    differ, relative, keys = {}, {}, sorted({key for table in tables for key in table})
    for key in keys:
        kinds = [table.get(key) for table in tables]
        if None in kinds:
            differ[key] = f"only in {a if kinds[0] else b}"
        elif kinds[0].size != kinds[1].size or kinds[0].dtype != kinds[1].dtype:
            differ[key] = " / ".join(f"{tuple(kind.size)} {kind.dtype}" for kind in kinds)
        else:
            x, y = (
                read_tensor(key, folder, table).reshape(-1) for folder, table in zip((a, b), tables)
            )
            if not torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
                far = (x.double() - y.double()).abs()
                relative[key] = (far.norm() / x.double().norm().clamp(min=1e-300)).item()
                differ[key] = (
                    f"{int((far != 0).sum())} of {far.numel()} elements, by up to {far.max():.3g}, "
                    f"{relative[key]:.1e} relative"
                )
    states = [read_json(folder, "state.json")["state"] for folder in (a, b)]
    for name, old, new in changes(*states):
        print(f"state.json: {name} is {old} / {new}")
    far = sorted(differ, key=lambda key: -relative.get(key, math.inf))  # other shapes first
    print(f"{len(differ)} of {len(keys)} tensors differ" + (", most of all:" if differ else ""))
    print("".join(f"  {key}: {differ[key]}\n" for key in far[:5]), end="")
    return int(bool(differ))
