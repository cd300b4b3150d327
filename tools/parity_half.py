"""Run a recipe as python would, and record the gradients and weights of each step: one half of --check_parity.

    python tools/parity_half.py FOLDER recipe.py --steps 3 ...
    python tools/parity_half.py --where FOLDER recipe.py --steps 2 ...   # every operation of a step: tools/operations.py

The recipe needs no change: before its start, parallel.clip_grad_norm is replaced by a function that records and then calls
the real clip_grad_norm. At that moment a step's gradients are complete and not yet scaled.
"""
import functools
import inspect
import os
import runpy
import sys


def record_before(clip_grad_norm, folder: str):
    """Return clip_grad_norm, made to write FOLDER/<step>-<rank>.pt first, on one rank of each pipeline rank."""
    import torch  # not at the top: first sys.path[0] must be the recipe's folder
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.tensor import DTensor

    from distributed.checks import bits_sum
    from distributed.layout import named_tensors

    def whole(tensor):  # a collective: all ranks call it in the same order
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().cpu().clone()

    signature, n_steps = inspect.signature(clip_grad_norm), 0

    @functools.wraps(clip_grad_norm)
    def record_and_clip(*args, **kwargs):
        nonlocal n_steps
        given = signature.bind(*args, **kwargs).arguments
        stages, layout = given["stages"], given["layout"]
        named = [(fqn, p) for stage in stages for fqn, p in stage.named_parameters()]
        gradients = {fqn: whole(p.grad) for fqn, p in named if p.grad is not None}
        weights = {fqn: whole(p) for fqn, p in named}
        buffers = {fqn: t for stage in stages for fqn, t in named_tensors(stage).items() if not isinstance(t, nn.Parameter)}
        sums = {fqn: bits_sum(t) for fqn, t in buffers.items()}
        everyone = [sums] * layout.world_size
        if layout.world_size > 1:
            dist.all_gather_object(everyone, sums)
        uneven = [fqn for fqn, total in sums.items() if any(theirs.get(fqn, total) != total for theirs in everyone)]
        if layout.rank % (layout.world_size // layout.pp) == 0:
            os.makedirs(folder, exist_ok=True)
            trained = [fqn for fqn, p in named if p.requires_grad]
            step = dict(gradient=gradients, weight=weights, trained=trained, uneven=uneven)
            step["buffer"] = {fqn: t.detach().cpu().clone() for fqn, t in buffers.items()}
            torch.save(step, os.path.join(folder, f"{n_steps}-{layout.rank}.pt"))
        n_steps += 1
        return clip_grad_norm(*args, **kwargs)

    return record_and_clip


def main():
    """Imitate `python recipe.py --flags` with a parallel.clip_grad_norm that records."""
    where = sys.argv[1] == "--where"
    folder, recipe, *flags = sys.argv[2:] if where else sys.argv[1:]
    sys.argv = [recipe, *flags]
    house = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path[0] = os.path.dirname(os.path.realpath(recipe))  # as `python recipe.py` sets sys.path[0]
    # The house comes after the recipe's folder, because parallel is imported before a recipe can extend sys.path itself; and
    # before installed packages, because a package may be called distributed.
    sys.path.insert(1, house)
    import distributed.initial
    import parallel

    distributed.initial.ZERO = 0.01  # a weight of 0 hides the gradients behind: LoRA's B at 0 makes the gradient of A 0
    if where:
        from tools.operations import seams_of_a_step, write_seams

        with seams_of_a_step(functools.partial(write_seams, folder)):
            return runpy.run_path(os.path.abspath(recipe), run_name="__main__")
    parallel.clip_grad_norm = record_before(parallel.clip_grad_norm, folder)
    runpy.run_path(os.path.abspath(recipe), run_name="__main__")


if __name__ == "__main__":
    main()
