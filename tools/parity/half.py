"""Run a recipe as python would, and record its steps: a half of --check_parity.

    python tools/parity/half.py FOLDER recipe.py --steps 3 ...
    python tools/parity/half.py --where FOLDER recipe.py --steps 2 ...   # every operation of a step: tools/parity/operations.py
    python tools/parity/half.py --runs FILE recipe.py --lr 1e-3 ...      # several runs, one after the other

The recipe needs no change: before its start, functions of parallel.py are replaced by functions
that record and then call the real ones.

FILE is JSON, a list of runs: {"record": FOLDER, "flags": [...] to append, "save_at": steps, "move":
[step folder, new place] before the start, or []}. Under torchrun the list has one run. Otherwise each
run is forked from this process, so that torch is imported once for all. A run prints into FOLDER.out
and FOLDER.err, and its exit status is in FOLDER.status.
"""

import importlib
import json
import os
import runpy
import sys
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

# imported before the first fork, because every recipe imports these modules
USUAL = ("parallel", "checkpoint", "data", "generate", "training.metrics", "training.optim")


def main() -> None:
    """Imitate `python recipe.py --flags`, and record."""
    mode = ""
    if sys.argv[1] in ("--where", "--runs"):
        mode = sys.argv.pop(1)
    where_to, recipe, *flags = sys.argv[1:]
    # as `python recipe.py` sets sys.path[0]
    sys.path[0] = os.path.dirname(os.path.realpath(recipe))
    # The house comes after the recipe's folder, because parallel is imported before a recipe can
    # extend sys.path itself; and before installed packages, because a package may be called
    # distributed.
    sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
    if mode == "--runs":
        run_several(json.loads(Path(where_to).read_text()), recipe, flags)
    else:
        run_recipe(recipe, flags, where_to, where=mode == "--where")


def run_recipe(
    recipe: str, flags: list[str], folder: str, where: bool = False, save_at: Collection[int] = ()
) -> None:
    """Run one recipe, and record into the folder. save_at: the steps after which --checkpoint_every
    may save."""
    import torch

    import distributed.initial
    import training.muon
    from tools.parity.operations import seams_of_a_step
    from tools.parity.steps import all_steps

    sys.argv = [recipe, *flags]
    # a weight of 0 hides gradients: LoRA's B at 0 makes the gradient of A 0
    distributed.initial.ZERO = 0.01
    training.muon.Muon.dtype = torch.float32
    with seams_of_a_step(folder) if where else all_steps(folder, save_at):
        runpy.run_path(os.path.abspath(recipe), run_name="__main__")


def run_several(runs: list[dict], recipe: str, flags: list[str]):
    """Run one after the other, until one fails."""
    # not at the top: the recipe's folder comes first in sys.path
    import torch

    from distributed.launcher import watch_launcher

    if "RANK" in os.environ:  # one of several processes, which begin and end together
        (run,) = runs
        return run_recipe(recipe, [*flags, *run["flags"]], run["record"], save_at=run["save_at"])
    for name in (*USUAL, "tools.parity.steps", "tools.parity.operations"):
        with suppress(ImportError):  # a fork may have modules of its own
            importlib.import_module(name)
    for run in runs:
        folder = run["record"]
        os.makedirs(os.path.dirname(folder), exist_ok=True)
        if run["move"] and os.path.isdir(run["move"][0]):
            os.makedirs(os.path.dirname(run["move"][1]))
            os.rename(*run["move"])
        child = os.fork()
        if child == 0:
            speak_into(folder)
            # A forked process makes its pool of threads at the first request. Two requests at once,
            # of this thread and of autograd's, would race, so make the pool now.
            torch.set_num_threads(torch.get_num_threads())
            watch_launcher()
            run_recipe(recipe, [*flags, *run["flags"]], folder, save_at=run["save_at"])
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        Path(f"{folder}.status").write_text(str(status))
        if status:
            break


def speak_into(folder: str) -> None:
    """Let this process write into files in place of the terminal."""
    for number, name in ((1, "out"), (2, "err")):
        file = os.open(f"{folder}.{name}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, number)
        os.close(file)


if __name__ == "__main__":
    main()
