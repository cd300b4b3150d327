"""Run a recipe of another commit as python would, with its own modules and today's recorder: one half
of --against RECIPE@COMMIT, and a step of --bisect.

    python tools/parity/version_half.py seams FOLDER TREE recipe.py --steps 2 ...        # every operation of a step
    python tools/parity/version_half.py gradients FOLDER TREE recipe.py --steps 4 ...    # the gradients of each step

TREE: the folder of the commit; recipe.py lies in it. FOLDER takes the records, and loaded.json: the
files of TREE that the run has imported. This file needs little of the tree, so that old commits can
be recorded.
"""

import importlib.util
import inspect
import itertools
import json
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

HERE = Path(__file__).resolve().parent
TODAY = str(HERE.parents[1])


def load_file(name: str, path: Path) -> ModuleType:
    """A file of today as a module of this name, whatever lies in the folders of sys.path."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def record_seams(folder: str) -> Any:
    """seams_of_a_step of today's tools/parity/operations.py, on top of the modules of the tree."""
    try:
        # an older tree has these functions in another file
        load_file("tools.reports.costs", HERE.parent / "reports" / "costs.py")
        return load_file("operations_of_today", HERE / "operations.py").seams_of_a_step(folder)
    finally:
        sys.modules.pop("tools.reports.costs", None)


def record_gradients(folder: str) -> Any:
    """A context: parallel.clip_grad_norm first writes FOLDER/<step>-<rank>.pt with gradients, not yet
    scaled, and weights, whole, on one rank of each pipeline rank; and with every rank's buffers. In
    the format of tools/parity/compare.py."""
    import torch
    from torch.distributed.tensor import DTensor

    import parallel
    from distributed.layout import named_tensors

    real = parallel.clip_grad_norm
    steps = itertools.count()

    def whole(tensor):  # a collective: all ranks call in the same order
        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
        return tensor.detach().cpu().clone()

    def record_and_clip(*args, **kwargs):
        given = inspect.signature(real).bind(*args, **kwargs).arguments
        layout = given["layout"]
        step = dict(gradient={}, weight={}, buffer={}, trained=[], sums={}, about={})
        for stage in given["stages"]:
            for fqn, tensor in named_tensors(stage).items():
                if not isinstance(tensor, torch.nn.Parameter):
                    step["buffer"][fqn] = whole(tensor)
                    continue
                step["weight"][fqn] = whole(tensor)
                if tensor.grad is not None:
                    step["gradient"][fqn] = whole(tensor.grad)
        if layout.rank % (layout.world_size // layout.pp):
            step |= dict(gradient={}, weight={})
        os.makedirs(folder, exist_ok=True)
        torch.save(step, os.path.join(folder, f"{next(steps)}-{layout.rank}.pt"))
        return real(*args, **kwargs)

    return mock.patch.object(parallel, "clip_grad_norm", record_and_clip)


RECORDERS = {"seams": record_seams, "gradients": record_gradients}


def write_loaded(folder: str, tree: str) -> None:
    """FOLDER/loaded.json: the files of the tree that are imported now."""
    names = set()
    for module in list(sys.modules.values()):
        if not hasattr(module, "__file__") or not module.__file__:
            continue
        file = os.path.realpath(module.__file__)
        if file.startswith(tree + os.sep):
            names.add(os.path.relpath(file, tree))
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "loaded.json"), "w") as file:
        json.dump(sorted(names), file)


@contextmanager
def loaded_at_end(folder: str, tree: str) -> Iterator[None]:
    """Write loaded.json when the recipe ends: with a call of os._exit, and nothing else before."""
    end = os._exit

    def end_process(status):
        if os.environ.get("RANK", "0") == "0":
            write_loaded(folder, tree)
        end(status)

    with mock.patch.object(os, "_exit", end_process):
        yield
        write_loaded(folder, tree)


def main() -> None:
    kind, folder, tree, recipe, *flags = sys.argv[1:]
    tree = os.path.realpath(tree)
    recipe = os.path.realpath(recipe)
    sys.argv = [recipe, *flags]
    # as `python recipe.py` sets sys.path[0], and none of today's files where the tree has its own
    if os.path.isfile(os.path.join(tree, "parallel.py")):
        sys.path[:] = [path for path in sys.path if os.path.realpath(path) != TODAY]
    sys.path[0] = os.path.dirname(recipe)
    sys.path.insert(1, tree)
    try:
        record = RECORDERS[kind](folder)
    except (ImportError, AttributeError) as error:
        print(f"error: today's recorder does not fit: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    try:
        import distributed.initial

        # a weight of 0 hides gradients: LoRA's B at 0 makes the gradient of A 0
        distributed.initial.ZERO = 0.01
    except ImportError:  # an older tree
        pass
    with loaded_at_end(folder, tree), record:
        runpy.run_path(recipe, run_name="__main__")


if __name__ == "__main__":
    main()
