"""Run a recipe of another commit as python would, with its own modules and today's recorder: one half
of --against RECIPE@COMMIT, and a step of --bisect.

    python tools/parity/version_half.py seams FOLDER TREE recipe.py --steps 2 ...        # every operation of a step
    python tools/parity/version_half.py gradients FOLDER TREE recipe.py --steps 3 ...    # the gradients of each step

TREE: the folder of the commit; recipe.py lies in it. FOLDER takes the records, and loaded.json: the
files of TREE that the run has imported, and why the recorder of TREE was taken, if it was.
"""

import contextlib
import importlib.util
import json
import os
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TODAY = str(HERE.parents[1])
# what to record -> the context in tools/parity/operations.py
RECORDERS = {"seams": "seams_of_a_step", "gradients": "gradients_of_all_steps"}


def load_file(name: str, path: Path):
    """A file of today as a module of this name, whatever lies in the folders of sys.path."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def recorder(tree: str, name: str):
    """(the function `name` of today's recorder, on top of the modules of the tree; ""), or (that of
    the tree's own recorder, the reason) where today's needs functions that the tree does not have.
    Ends the process if neither fits."""
    try:
        # an older tree has these functions in another file
        load_file("tools.reports.costs", HERE.parent / "reports" / "costs.py")
        module = load_file("recorder_of_today", HERE / "operations.py")
        return getattr(module, name), ""
    except (ImportError, AttributeError) as error:
        reason = str(error)
    finally:
        sys.modules.pop("tools.reports.costs", None)
    for file in ("tools/parity/operations.py", "tools/operations.py"):
        path = Path(tree, file)
        if path.is_file():
            with contextlib.suppress(ImportError):
                module = load_file("recorder_of_the_tree", path)
                # earlier recorders have one of these alone, and other records
                if all(hasattr(module, known) for known in RECORDERS.values()):
                    return getattr(module, name), reason
    print(f"error: today's recorder does not fit: {reason}", file=sys.stderr, flush=True)
    os._exit(2)


def write_loaded(folder: str, tree: str, reason: str):
    """FOLDER/loaded.json: the files of the tree that are imported now; reason: of recorder()."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    inside = [os.path.realpath(file) for file in files if file]
    names = {os.path.relpath(file, tree) for file in inside if file.startswith(tree + os.sep)}
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "loaded.json"), "w") as file:
        json.dump({"files": sorted(names), "own_recorder": reason}, file)


def main():
    kind, folder, tree, recipe, *flags = sys.argv[1:]
    tree = os.path.realpath(tree)
    recipe = os.path.realpath(recipe)
    sys.argv = [recipe, *flags]
    # as `python recipe.py` sets sys.path[0], and none of today's files where the tree has its own
    if os.path.isfile(os.path.join(tree, "parallel.py")):
        sys.path[:] = [path for path in sys.path if os.path.realpath(path) != TODAY]
    sys.path[0] = os.path.dirname(recipe)
    sys.path.insert(1, tree)
    record, reason = recorder(tree, RECORDERS[kind])
    try:
        import distributed.initial

        # a weight of 0 hides the gradients behind: LoRA's B at 0 makes the gradient of A 0
        distributed.initial.ZERO = 0.01
    except ImportError:  # an older tree
        pass
    end = os._exit

    def end_process(status):  # a recipe ends so, and calls nothing else before
        if os.environ.get("RANK", "0") == "0":
            write_loaded(folder, tree, reason)
        end(status)

    os._exit = end_process
    with record(folder):
        runpy.run_path(recipe, run_name="__main__")
    write_loaded(folder, tree, reason)


if __name__ == "__main__":
    main()
