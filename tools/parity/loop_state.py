"""The state that a recipe keeps in the variables of its loop and of its modules: what
--check_parity names when a continued run is another run."""

import random
import sys
import zlib
from collections import deque
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from distributed.checks import bits_sum
from distributed.layout import local_tensor, pattern_of
from storage.provenance import file_of_module
from storage.unsaved import state_outside

# rooms and modules whose objects need no look
HOUSE = {"models", "flags", "distributed", "parallel", "training", "corpus", "data", "storage"}
HOUSE |= {"lora", "checkpoint", "sft", "rl", "generate", "tools"}
# The recipe hands this variable to Checkpoints.save, which adds to it: a continued run begins with
# what is in the checkpoint.
SAVED = "state"
DEPTH = 4  # of objects in objects


def digest(x, depth: int = DEPTH):
    """A value that is equal as long as x is: of numbers, texts, tensors, arrays, generators, of
    lists, dicts and sets of them, and of objects of the recipe's own classes. None for all else."""
    if depth == 0:
        return None
    if isinstance(x, bool | int | str):
        return x
    if isinstance(x, float):
        return repr(x)  # a NaN is equal to itself
    if isinstance(x, nn.Parameter):
        return None  # a weight, or a replaced one
    if isinstance(x, Tensor):
        if x.is_meta or not local_tensor(x).untyped_storage().nbytes():
            return ("tensor", tuple(x.shape))
        return ("tensor", tuple(x.shape), bits_sum(x.detach()))
    if isinstance(x, np.ndarray):
        return ("array", x.shape, zlib.crc32(np.ascontiguousarray(x).tobytes()))
    if isinstance(x, np.generic):
        return x.item()
    if isinstance(x, np.random.Generator):
        return ("generator", repr(x.bit_generator.state))
    if isinstance(x, random.Random):
        return ("generator", hash(x.getstate()))
    if isinstance(x, torch.Generator):
        return ("generator", bits_sum(x.get_state()))
    if isinstance(x, dict):
        return digest_items(x.items(), depth)
    if isinstance(x, list | tuple | deque):
        return digest_items(enumerate(x), depth)
    if isinstance(x, set | frozenset):
        return ("set", *sorted(map(repr, x)))
    if is_own_object(x):
        return digest_items(vars(x).items(), depth)
    return None


def digest_items(items, depth: int):
    """Digest of the plain values among (key, value); of how many there are, at least."""
    found = []
    n = 0
    for key, value in items:
        n += 1
        value = digest(value, depth - 1)
        if value is not None:
            found.append((repr(key) if isinstance(key, int | str) else "", value))
    return (n, *found)


def is_own_object(x) -> bool:
    """Whether x is an object of a class that the recipe, or a file beside it, declares, or one of
    torch's schedules of the learning rate. Objects of the house save what they need by themselves.
    """
    if isinstance(x, nn.Module | torch.optim.Optimizer | type) or callable(x):
        return False
    if not hasattr(x, "__dict__"):
        return False
    room = type(x).__module__
    if room in ("__main__", "torch.optim.lr_scheduler"):
        return True
    file = getattr(sys.modules.get(room), "__file__", None)
    return bool(file) and is_local(file) and room.split(".")[0] not in HOUSE


def is_local(file: str) -> bool:
    """Whether the file is no installed package."""
    return not {"site-packages", "dist-packages"} & set(Path(file).parts) and not file.startswith(
        sys.base_prefix
    )


def state_of_loop(stages) -> dict[str, int]:
    """{name in words: checksum} of the local variables of the recipe's main, of the global variables
    of all local modules, and of the attributes of the model that no checkpoint holds."""
    found = {}
    main = frame_of_main()
    if main is not None:
        for name, value in main.f_locals.items():
            if name != SAVED:
                found[f"{name}, a variable of {main.f_code.co_name}"] = digest(value)
    for module in [*sys.modules.values()]:
        file = file_of_module(module)
        if not file or not is_local(file) or "tools/parity" in file:
            continue
        for name, value in [*vars(module).items()]:
            if not name.startswith("__"):
                found[f"{name} of {Path(file).name}"] = digest(value)
    found |= state_outside(stages)
    for stage in stages:
        for fqn, p in stage.named_parameters():
            found[f"the gradient of {fqn}"] = None if p.grad is None else digest(p.grad)
    # equal texts, equal values; a checksum is small and safe to read again
    return {
        name: zlib.crc32(repr(value).encode()) for name, value in found.items() if value is not None
    }


def frame_of_main():
    """The frame of the recipe's function that called parallel.forward_backward."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_name != "<module>":
            return frame
        frame = frame.f_back
    return None


def lost_state(first: dict, later: dict, continued: dict) -> list[str]:
    """Names of what the run has changed between its first step and a later one, and what is another
    value, or missing, in a run that is continued before that later step.

    first, later: of a run that never stopped; continued: at the same step as later.
    """
    lost = []
    for name, value in later.items():
        if first.get(name) == value or continued.get(name) == value:
            continue
        # a local variable that the loop has not assigned yet is no state: nothing has read it
        if name not in continued and ", a variable of " in name:
            continue
        lost.append(pattern_of(name))
    others = [name for name in lost if not name.startswith("lr, ")]  # lr follows from others
    return sorted(set(others or lost))
