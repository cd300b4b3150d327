"""Saves an optimizer's changing numbers outside of the parameters' state: values in param_groups, and attributes.

torch's optimizers have none. Others do (a step count per group in apex, timm and Prodigy; k, weight_sum and lr_max in
schedule-free optimizers), and a continued run needs these numbers as much as the moments.
"""
import copy
import json
from functools import partial
from types import FunctionType, MethodType

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from distributed.checks import bits_sum
from distributed.layout import local_slice

# Keys of a group set again at every step, and all keys of torch's optimizers
SET_ANEW = {"params", "lr", "initial_lr", "lr_share", "found_inf", "grad_scale"}
TORCHS = SET_ANEW | set(vars(torch.optim.AdamW([torch.zeros(1)], fused=True)))


def collect_values(optimizer) -> list[dict]:
    """[attributes, first group, second group, ...], without values that need no checkpoint. A learning rate not set by
    set_lr belongs to the optimizer and stays in."""
    functions = (FunctionType, MethodType, partial)
    groups = [(group, SET_ANEW - (set() if "lr_share" in group else {"lr"})) for group in optimizer.param_groups]
    return [{name: x for name, x in vars(optimizer).items() if name not in TORCHS and not isinstance(x, functions)},
            *({name: x for name, x in group.items() if name not in anew} for group, anew in groups)]


def snapshot(value, above=()) -> list:
    """A list for comparison: equal snapshots mean an unchanged value. Of a tensor with many numbers only the version counts.
    above: objects around the value, not searched again."""
    found = []
    for x in tree_leaves(value):
        if isinstance(x, torch.Generator):
            found.append(hash(x.get_state().numpy().tobytes()))
        elif hasattr(x, "__dict__") and not isinstance(x, Tensor | type) and x not in above:
            # an inner optimizer: shares the outer optimizer's state, or changed() refuses
            found.append(snapshot(collect_values(x) if isinstance(x, torch.optim.Optimizer) else vars(x), (*above, x)))
        else:
            found.append((id(x), x._version) if isinstance(x, Tensor) and x.numel() != 1 else as_number(x))
    return found


def as_number(x):
    return x.item() if isinstance(x, Tensor) and x.numel() == 1 else x


class OptimizerNumbers:
    """names: {id(parameter): fqn}. Build before the first step: values unchanged since then come from flags; none is saved."""

    def __init__(self, optimizers, names: dict[int, str]):
        self.optimizers, self.names = optimizers, names
        self.held = [collect_values(optimizer) for optimizer in optimizers]  # keeps tensors alive: a freed id could be reused
        self.first = [[{k: snapshot(v) for k, v in part.items()} for part in parts] for parts in self.held]
        self.values = [[{k: copy.deepcopy(as_number(v)) for k, v in part.items() if is_json(v)} for part in parts]
                       for parts in self.held]

    def changed(self) -> dict[str, list[dict]]:
        """{fqn: [changed attributes of the optimizer, changed values of the group]}. By fqn, because a pipeline stage may lack
        a group or an optimizer. Raises ValueError for values that no checkpoint can keep."""
        found = {}
        for optimizer, first in zip(self.optimizers, self.first, strict=True):
            parts, kind = [], type(optimizer).__name__
            if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
                raise ValueError(f"a scheduler of torch counts the steps of {kind}, and no checkpoint holds its count: let "
                                 "lr_at(step) give the learning rate, and set_lr set it")
            if lost := [key for key in optimizer.state if not isinstance(key, Tensor)]:
                raise ValueError(f"{kind} keeps {lost[0]!r} in its state, where a checkpoint looks for parameters only: keep "
                                 "it in param_groups, or in the state of each parameter")
            for name, inner in vars(optimizer).items():
                if isinstance(inner, torch.optim.Optimizer) and inner.state and inner.state is not optimizer.state:
                    raise ValueError(f"{kind} keeps {name}, a {type(inner).__name__} with a state of its "
                                     "own, which no checkpoint would hold: share it, self.state = inner.state")
            for part, before in zip(collect_values(optimizer), first, strict=True):
                new = {k: v for k, v in part.items() if snapshot(v) != before.get(k)}
                for name, value in new.items():
                    if not is_json(value):
                        raise ValueError(f"{kind} keeps {name}, a {type(value).__name__}, outside of "
                                         "self.state[p], where no checkpoint can split it over ranks: keep tensors in "
                                         "self.state[p], each shaped like p or of one number")
                parts.append({k: as_number(v) for k, v in new.items()})
            for group, part in zip(optimizer.param_groups, parts[1:], strict=True):
                if parts[0] or part:
                    found |= {self.names[id(p)]: [parts[0], part] for p in group["params"]}
        return found

    def restore(self, saved: dict[str, list[dict]]) -> None:
        """Restores changed()'s result on this rank's groups, and first values elsewhere: creating the state took a step."""
        for optimizer, values in zip(self.optimizers, self.values, strict=True):
            groups = [next((saved[n] for p in g["params"] if (n := self.names[id(p)]) in saved), [{}, {}])
                      for g in optimizer.param_groups]
            attributes = next((found[0] for found in groups if found[0]), {})
            for target, first, new in zip([vars(optimizer), *optimizer.param_groups], values,
                                          [attributes, *(found[1] for found in groups)], strict=True):
                for name, value in (first | new).items():
                    if isinstance(target.get(name), Tensor):
                        target[name].fill_(value)
                    else:
                        target[name] = copy.deepcopy(value)


def is_json(value) -> bool:
    try:
        json.dumps(as_number(value))
    except TypeError:
        return False
    return True


def find_copies(tensors: dict[str, Tensor], gather) -> dict[str, Tensor]:
    """Tensors held by several ranks, which must stay equal: parameters of several pipeline stages, and all buffers."""
    mine = sorted(fqn for fqn, t in tensors.items() if isinstance(t, nn.Parameter) and not fqn.startswith("blocks."))
    others = [names for names in gather(mine) if names != mine]
    return {fqn: t for fqn, t in tensors.items() if not isinstance(t, nn.Parameter) or any(fqn in names for names in others)}


def sum_copies(copies: dict[str, Tensor]) -> dict[tuple, int]:
    return {(fqn, local_slice(p)): bits_sum(p) for fqn, p in copies.items()}


def merge_numbers(ranks: list[tuple[dict, dict]]) -> dict:
    """The entry for state.json of changed() on all ranks. Raises ValueError when the copies of a tensor differ between ranks:
    DCP would save any of them."""
    known, numbers = {}, {}
    for changed, sums in ranks:
        numbers |= changed
        for key, value in sums.items():
            if known.setdefault(key, value) != value:
                raise ValueError(f"{key[0]} is not equal on all ranks that hold it, and a checkpoint holds one copy: none is "
                                 "written; add up what each rank has seen, or keep a parameter on one pipeline stage ("
                                 "pp_stage in docs/fork_me.md)")
    return {"optimizer": numbers} if numbers else {}
