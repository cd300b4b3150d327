"""Run a recipe of another commit as python would, with its own modules and today's recorder: one half
of --against RECIPE@COMMIT, and a step of --bisect.

    python tools/parity/version_half.py seams FOLDER TREE recipe.py --steps 2 ...        # every operation of a step
    python tools/parity/version_half.py gradients FOLDER TREE recipe.py --steps 3 ...    # the gradients of each step

TREE: the folder of the commit; recipe.py lies in it. FOLDER takes the records, and loaded.json: the
files of TREE that the run has imported.
"""

import importlib.util
import json
import os
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TODAY = str(HERE.parents[1])


def load_file(name: str, path: Path):
    """A file of today as a module of this name, whatever lies in the folders of sys.path."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def recorder():
    """Today's recorder, on top of the modules of the tree. Ends the process if it does not fit."""
    try:
        # today's recorder needs it, and an older tree has it elsewhere
        load_file("tools.reports.costs", HERE.parent / "reports" / "costs.py")
        return load_file("recorder_of_today", HERE / "operations.py")
    except (ImportError, AttributeError) as error:
        print(f"error: today's recorder does not fit: {error}", file=sys.stderr, flush=True)
        os._exit(2)
    finally:
        sys.modules.pop("tools.reports.costs", None)


def write_loaded(folder: str, tree: str):
    """FOLDER/loaded.json: the files of the tree that are imported now."""
    files = [getattr(module, "__file__", None) for module in list(sys.modules.values())]
    inside = [os.path.realpath(file) for file in files if file]
    names = {os.path.relpath(file, tree) for file in inside if file.startswith(tree + os.sep)}
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "loaded.json"), "w") as file:
        json.dump(sorted(names), file)


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
    record = recorder()
    try:
        import distributed.initial

        # a weight of 0 hides the gradients behind: LoRA's B at 0 makes the gradient of A 0
        distributed.initial.ZERO = 0.01
    except ImportError:  # an older tree
        pass
    end = os._exit

    def end_process(status):  # a recipe ends so, and calls nothing else before
        if os.environ.get("RANK", "0") == "0":
            write_loaded(folder, tree)
        end(status)

    os._exit = end_process
    of_kind = {"seams": record.seams_of_a_step, "gradients": record.gradients_of_all_steps}
    with of_kind[kind](folder):
        runpy.run_path(recipe, run_name="__main__")
    write_loaded(folder, tree)


if __name__ == "__main__":
    main()
