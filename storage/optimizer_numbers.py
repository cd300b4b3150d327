"""Saves an optimizer's changing numbers outside of the parameters' state: values in param_groups,
and attributes.

torch's optimizers have none. Others do (a step count per group in apex, timm and Prodigy; k,
weight_sum and lr_max in schedule-free optimizers), and a continued run needs these numbers as much
as the moments.
"""

import functools
import inspect
import json
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from distributed.checks import bits_sum
from distributed.layout import local_slice

# Keys of a group set again at every step
SET_ANEW = {"params", "lr", "initial_lr", "lr_share", "found_inf", "grad_scale"}
OTHER = "no number: "


@functools.cache
def names_of_torch() -> set[str]:
    """Attributes of every optimizer of torch. Asked at the first use, because the first optimizer
    of a process loads torch._dynamo: 0.6 s that --help and a mistyped flag must not pay."""
    return SET_ANEW | set(vars(torch.optim.AdamW([torch.zeros(1)], fused=True)))


def collect_values(optimizer: torch.optim.Optimizer) -> list[dict]:
    """[attributes, first group, second group, ...], as copies by freeze(), without values that need no checkpoint. A learning
    rate not set by set_lr belongs to the optimizer and stays in."""
    own = {}
    for name, x in vars(optimizer).items():
        if name not in names_of_torch():
            own[name] = freeze(x, (optimizer,))
    # what step() keeps in variables of its module
    around = inspect.getclosurevars(inspect.unwrap(type(optimizer).step))
    for name, x in {**around.globals, **around.nonlocals}.items():
        if isinstance(x, dict | list | Tensor | int | float):
            # no number: there is no place to restore a number to
            own[name] = freeze({"outside": x, 0: OTHER}, (optimizer,))
    parts = [own]
    for group in optimizer.param_groups:
        part = {}
        for name, x in group.items():
            own_lr = name == "lr" and "lr_share" not in group
            if own_lr or name not in SET_ANEW:
                part[name] = freeze(x, (optimizer,))
        parts.append(part)
    return parts


def freeze(x: Any, around: tuple) -> Any:
    """A copy that can be compared and restored: numbers and texts, in lists and dicts. For all else
    a text that begins with OTHER, equal as long as x is unchanged. around: the optimizer, and the
    objects around x, not searched again."""
    if isinstance(x, str | int | float | None):
        return x
    if isinstance(x, Tensor):
        if x.numel() == 1:
            return x.item()
        return f"{OTHER}{id(x)} {x._version}"  # torch counts the changes of a tensor
    if isinstance(x, list | tuple):
        return [freeze(value, around) for value in x]
    if isinstance(x, dict) and all(isinstance(key, str) for key in x):
        return {key: freeze(value, around) for key, value in x.items()}
    if any(x is other for other in around):
        return OTHER
    if isinstance(x, dict):
        inside = [*x.items()]
    elif isinstance(x, torch.Generator):
        inside = x.get_state().tolist()
    elif isinstance(x, torch.optim.Optimizer):
        state = {}  # an inner optimizer is saved if it shares the state of the outer
        if x.state is not around[0].state:
            state = dict(x.state)
        inside = [*collect_values(x), state]
    elif hasattr(x, "__dict__") and not isinstance(x, type):
        inside = vars(x)
    else:
        inside = repr(x)
    return OTHER + repr(freeze(inside, (*around, x)))


def state_names(optimizer: torch.optim.Optimizer) -> set[str]:
    found = set()
    for state in optimizer.state.values():
        if isinstance(state, dict):
            found.update(state)
    return found


def is_json(frozen: Any) -> bool:
    return OTHER not in json.dumps(frozen)


class OptimizerNumbers:
    """names: {id(parameter): fqn}. Build before the first step: values unchanged since then come
    from flags; none is saved."""

    def __init__(self, optimizers, names: dict[int, str]):
        self.optimizers = optimizers
        self.names = names
        self.first = [collect_values(optimizer) for optimizer in optimizers]
        # {optimizer: names of its state after the first step of this start}
        self.first_state = {}
        for optimizer in optimizers:
            optimizer.register_step_post_hook(self.note_first_state)

    def note_first_state(self, optimizer, *_) -> None:
        if optimizer not in self.first_state:
            self.first_state[optimizer] = state_names(optimizer)

    def late(self) -> list[str]:
        """Names of the state that an optimizer has made in a later step than the first: the step
        that creates state in a continued run does not make it."""
        found = set()
        for optimizer, names in self.first_state.items():
            found |= state_names(optimizer) - names
        return sorted(found)

    def changed(self) -> dict[str, list[dict]]:
        """{fqn: [changed attributes of the optimizer, changed values of the group]}. By fqn,
        because a pipeline stage may lack a group or an optimizer. Raises ValueError for values that
        no checkpoint can keep."""
        found = {}
        for optimizer, first in zip(self.optimizers, self.first, strict=True):
            kind = type(optimizer).__name__
            if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
                raise ValueError(
                    f"no checkpoint holds the scheduler of torch that counts the steps of {kind}: "
                    "use lr_at(step)"
                )
            parts = []
            for part, before in zip(collect_values(optimizer), first, strict=True):
                parts.append({name: x for name, x in part.items() if x != before.get(name)})
            # state of no parameter
            lost = [repr(key) for key in optimizer.state if not isinstance(key, Tensor)]
            for part in parts:
                lost += [name for name, x in part.items() if not is_json(x)]
            if lost:
                raise ValueError(
                    f"{kind} keeps {lost[0]} outside of self.state[p], lost to a checkpoint: "
                    "keep tensors there, "
                    "shaped like p or of one number; an inner optimizer shares the state"
                )
            attributes, *of_groups = parts
            for group, values in zip(optimizer.param_groups, of_groups, strict=True):
                if not attributes and not values:
                    continue
                for p in group["params"]:
                    found[self.names[id(p)]] = [attributes, values]
        return found


def find_copies(tensors: dict[str, Tensor], gather: Callable[[Any], list]) -> dict[str, Tensor]:
    """Tensors held by several ranks, which must stay equal: parameters of several pipeline stages,
    replicas of a part of a parameter, and all buffers."""
    own_names = sorted(
        fqn
        for fqn, t in tensors.items()
        if isinstance(t, nn.Parameter) and not fqn.startswith("blocks.")
    )
    elsewhere = set()  # parameters of the other pipeline stages
    for names in gather(own_names):
        if names != own_names:
            elsewhere.update(names)
    found = {}
    for fqn, t in tensors.items():
        is_buffer = not isinstance(t, nn.Parameter)
        if is_buffer or fqn in elsewhere or is_replicated(t):
            found[fqn] = t
    return found


def is_replicated(p: Tensor) -> bool:
    """Whether several ranks hold the same part of a parameter: copies of dp_replicate, or what tp
    does not split."""
    if not isinstance(p, DTensor):
        return False
    sizes = zip(p.placements, p.device_mesh.shape, strict=True)
    return any(placement.is_replicate() and size > 1 for placement, size in sizes)


def sum_copies(copies: dict[str, Tensor]) -> dict[tuple, int]:
    return {(fqn, local_slice(p)): bits_sum(p) for fqn, p in copies.items()}


def merge_numbers(ranks: list[tuple[dict, dict, list]]) -> dict:
    """The entries for state.json of changed() and late() on all ranks. Raises ValueError when the
    copies of a tensor differ between ranks: DCP would save any of them."""
    known = {}
    numbers = {}
    late = set()
    for changed, sums, names in ranks:
        numbers |= changed
        late |= set(names)
        for key, value in sums.items():
            if known.setdefault(key, value) != value:
                raise ValueError(
                    f"{key[0]} is not equal on all ranks that hold it, and a checkpoint holds one "
                    "copy: add up "
                    "each rank's part, keep a parameter on one pipeline stage (pp_stage in "
                    "docs/fork_me.md), and let no rank's own loss or gradient decide an update"
                )
    found = {"optimizer": numbers, "late": sorted(late)}
    return {name: value for name, value in found.items() if value}
