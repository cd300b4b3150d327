"""What a training run changes and no checkpoint holds: attributes of modules and parameters, buffers
that are not persistent, and gradients carried from step to step. A run that is continued begins
without them, and so would be another run; at its first save it says so, one line each."""

from collections import deque
from typing import Any

from torch import Tensor, nn

from distributed.agree import brief
from distributed.checks import bits_sum
from distributed.layout import local_tensor, named_tensors, pattern_of

# the attributes that torch gives every module, and those that the house sets anew: in every step, or
# for another shape of the micro-batches
TORCHS = set(vars(nn.Module()))
SET_ANEW = {"is_last_backward", "places", "made_for"}


def fingerprint(x: Any) -> Any:
    """A value that is equal as long as x is: of numbers, tensors, and lists and dicts of them. None
    for all else, such as functions and modules, which are no state."""
    if isinstance(x, bool):
        return None
    if isinstance(x, int | float):
        return x
    if isinstance(x, Tensor):
        # without storage: a part of a weight that FSDP had gathered for a forward
        if x.is_meta or not local_tensor(x).untyped_storage().nbytes():
            return None
        return tuple(local_tensor(x).shape), bits_sum(x.detach())
    if isinstance(x, dict):
        return fingerprint(list(x.values()))
    if isinstance(x, list | tuple | deque):
        found = [fingerprint(value) for value in x]
        if found.count(None) < len(found):
            return len(found), *found
    return None


def attributes_of(owner: Any, name: str) -> dict[str, object]:
    """{name.attribute: fingerprint} of the plain values among the attributes of a module or a
    parameter."""
    private = "__" if isinstance(owner, nn.Module) else "_"  # a parameter's _names are DTensor's
    found = {}
    for attribute, value in vars(owner).items():
        if attribute in TORCHS or attribute in SET_ANEW or attribute.startswith(private):
            continue
        value = fingerprint(value)
        if value is not None:
            found[f"{name}.{attribute}" if name else attribute] = value
    return found


def state_outside(modules: list[nn.Module]) -> dict[str, object]:
    """{name: fingerprint} of the plain attributes of all modules and parameters, and of the buffers
    that no checkpoint holds."""
    found = {}
    for model in modules:
        saved = named_tensors(model)
        for name, module in model.named_modules():
            found |= attributes_of(module, name)
        for fqn, p in model.named_parameters():
            found |= attributes_of(p, fqn)
        for fqn, buffer in model.named_buffers():
            if fqn not in saved:
                found[fqn] = fingerprint(buffer)
    return found


class Unsaved:
    """Build before the first step. At a save, names() of every rank and then, on rank 0, sentences()
    of all ranks' names."""

    def __init__(self, modules: list[nn.Module]):
        self.modules = modules
        self.start = state_outside(modules)
        self.told = set()

    def names(self) -> tuple[list[str], list[str]]:
        """(names of what has changed since the start, names of the parameters with a gradient)."""
        now = state_outside(self.modules)
        changed = [name for name, value in now.items() if value != self.start.get(name)]
        carried = []
        for model in self.modules:
            carried += [fqn for fqn, p in model.named_parameters() if p.grad is not None]
        return changed, carried

    def sentences(self, ranks: list[tuple[list[str], list[str]]]) -> list[str]:
        """What the user is told, once: see names(), of all ranks."""
        changed = set()
        carried = set()
        for of_changed, of_carried in ranks:
            changed.update(map(pattern_of, of_changed))
            carried.update(map(pattern_of, of_carried))
        changed -= self.told
        found = []
        if changed:
            found.append(
                f"{brief(sorted(changed))} changed since the start, and no checkpoint holds that: "
                "where a step reads what an earlier step has left there, a continued run is "
                "another run; use self.register_buffer in a module, self.state[p] in an optimizer"
            )
        if carried and "gradients" not in self.told:
            found.append(
                f"a gradient of {brief(sorted(carried))} is carried over this save, and no "
                "checkpoint holds gradients: a continued run is another run; save after an update"
            )
            self.told.add("gradients")
        self.told |= changed
        return found
