"""The model to fine-tune: its config from --init_from, and its frozen weights under the adapters."""

import os
from functools import partial

import torch.distributed as dist
from torch import nn

from distributed.agree import brief, fail_together, on_rank_0
from flags.config import override_fields
from flags.files import step_folders
from lora.lora import ADAPTERS
from storage.adapters import check_base
from storage.hf import check_hf_config, class_of, load_hf, read_hf_config
from storage.loading import load_weights
from storage.newest import ABOUT, Source, is_hf_folder, newest_readable, saved_model


def read_model(out: str, init_from: str, model_args: str):
    """(class, config) of the model in --init_from, a Hugging Face folder or a run or step folder of
    ours, after --model_args. A run with checkpoints of its own knows the model even when
    --init_from is gone. Raises ValueError."""
    goes_on = step_folders(out) and not os.path.isdir(init_from)
    folder = init_from
    if goes_on:
        folder = out
    is_hf = is_hf_folder(folder)
    if is_hf:
        config = read_hf_config(folder)
    else:
        config = saved_model(newest_readable(folder, names=ABOUT))[1]
    config = override_fields(config, model_args, "--model_args")
    if is_hf:
        check_hf_config(config, folder)
    return class_of(config), config


def load_base(
    modules: list[nn.Module],
    init_from: str,
    own: Source | None,
    group: dist.ProcessGroup | None,
    lora_from: str = "",
) -> dict:
    """Fill the frozen weights of this rank's stages from --init_from. Returns folder and hash of
    the weights, for checkpoints. own: the run's own checkpoint, if the run goes on, whose hash the
    weights must have. lora_from: a new run begins with the adapters of this folder. Raises
    ValueError, the same on all ranks."""
    if is_hf_folder(init_from):
        folder = init_from
        absent = load_hf(modules, folder, ADAPTERS, group)
        if absent:
            raise ValueError(
                f"{folder} lacks {brief(absent)}, and LoRA would freeze random weights; use "
                "--model_args mtp_depth=0"
            )
    else:
        folder = on_rank_0(partial(newest_readable, init_from), group)
        load_weights(modules, folder, ADAPTERS)
    path = ""
    if own is not None:
        path = on_rank_0(partial(newest_readable, own.folder, own.step, ABOUT), group)
    found = check_base(path, modules, group)
    if not group or group.rank() == 0:
        print(f"checkpoint: the frozen weights are those of {folder}, hash {found}", flush=True)
    if lora_from and own is None:
        from storage.peft import fill_adapters

        about = fail_together(lambda: fill_adapters(lora_from, modules), group)
        if not group or group.rank() == 0:
            print(f"checkpoint: {about}", flush=True)
    return {"folder": os.path.abspath(folder), "hash": found}
