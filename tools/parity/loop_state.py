"""The state that a recipe keeps in variables of its loop and of its modules. When a continued run
differs, --check_parity names the variables that no checkpoint holds."""

import random
import sys
import zlib
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

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
# a recipe's variable that is in every checkpoint: the recipe hands the dict to Checkpoints.save
SAVED = "state"
DEPTH = 4  # of objects in objects


def digest(x: Any, depth: int = DEPTH) -> Any:
    """A small value that changes whenever x changes. x may be a number, text, tensor, array or
    generator; a list, dict or set of these; or an object of a class of the recipe. None for any
    other x."""
    if depth == 0:
        return None
    if isinstance(x, bool | int | str):
        return x
    if isinstance(x, float):
        return repr(x)  # a NaN is equal to itself
    if isinstance(x, nn.Parameter):
        return None  # weights are compared by name
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


def digest_items(items: Iterable[tuple], depth: int) -> tuple:
    """Digest of the values among (key, value) that have a digest, and of the number of all."""
    found = []
    n = 0
    for key, value in items:
        n += 1
        value = digest(value, depth - 1)
        if value is not None:
            name = ""
            if isinstance(key, int | str):
                name = repr(key)
            found.append((name, value))
    return (n, *found)


def is_own_object(x: Any) -> bool:
    """Whether the class of x is declared in the recipe or in a file beside the recipe, or is one of
    torch's schedules of the learning rate. Our own classes save their state by themselves."""
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
    """Whether the file belongs to no installed package."""
    return not {"site-packages", "dist-packages"} & set(Path(file).parts) and not file.startswith(
        sys.base_prefix
    )


def state_of_loop(stages: list[nn.Module]) -> dict[str, int]:
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


def frame_of_main() -> FrameType | None:
    """The frame of the recipe's function that called parallel.forward_backward."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "__main__" and frame.f_code.co_name != "<module>":
            return frame
        frame = frame.f_back
    return None


def lost_state(first: dict, later: dict, continued: dict) -> list[str]:
    """Names of variables that changed between the first step of a run and a later step, and that
    have another value, or none, in a continued run.

    first, later: two steps of a run that never stopped. continued: the continued run, at the step of
    `later`.
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
