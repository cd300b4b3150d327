"""A checkpoint as a plain model in one process, to sample from."""

import torch
from torch import nn

from distributed.layout import named_tensors
from flags.files import read_json
from storage.dcp import read_tensors
from storage.newest import has_adapters, open_saved
from storage.run_tensors import model_tensors


def load_model(
    folder: str, device: str = "cpu", dtype: torch.dtype | None = None
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
        from storage.loading import fill_merged  # only adapters need the file

        fill_merged([model], path, table)
    else:
        read_tensors(model_tensors([model]), path, table)
    return model.eval(), read_json(path, "state.json")["state"]
