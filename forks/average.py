"""The mean of the weights of several steps of a run: python checkpoint.py average RUN OUT --last 3. See also forks/ema.py."""
import os

import torch

from checkpoint import has_adapters, open_saved
from distributed.layout import named_tensors
from storage.changes import changes, describe_changes
from storage.dcp import read_tensors
from storage.hf import check_export
from support.files import read_json, step_folders


def mean_of_steps(run: str, out: str, last=0, steps=()):
    """(a model with the mean, the run's identity, the state of the latest of these steps, the tokenizer.json or None).

    The mean is in fp32, of the newest `last` checkpoints or of `steps`. Reads one tensor at a time: memory holds the mean, 4
    bytes per weight, and one tensor of one step. Raises ValueError, also if nothing can be written to `out`.
    """
    check_export(out)
    found = dict(step_folders(run))
    wanted = sorted({*steps} or [*found][:last], reverse=True)
    if len(wanted) < max(2, last) or not found.keys() >= {*wanted}:
        raise ValueError(f"{'--steps' if steps else '--last'} {steps or last}: {run} has checkpoints of the steps {[*found]}; "
                         "give two or more of these (training keeps --keep_latest_k)")
    opened = [open_saved(found[step]) for step in wanted]
    newest, model, _ = opened[0]
    saved, file = read_json(newest, "state.json"), os.path.join(newest, "tokenizer.json")
    for path, *_ in opened:
        if has_adapters(path):
            raise ValueError(f"{path} holds adapters, whose mean is no mean of their products; merge each with to_hf")
        if different := [*changes(read_json(path, "state.json")["identity"]["model"], saved["identity"]["model"])]:
            raise ValueError(f"{path} and {newest} hold different models: {describe_changes(different)}")
    model.to_empty(device="cpu")
    for fqn, mean in named_tensors(model).items():
        key, total = f"model.{fqn}", 0
        for path, _, table in opened:
            part = torch.empty(table[key].size, dtype=table[key].dtype)
            read_tensors({key: part}, path, table)
            total = total + part.float()
        mean.detach().copy_(total / len(opened))
    state = saved["state"] | {"step": wanted[0], "mean_of_steps": wanted}
    return model, saved["identity"], state, file if os.path.isfile(file) else None
