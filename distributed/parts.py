"""Which part of a model is used where: found by following forward on the meta device, without computing a number."""
import copy
from contextlib import suppress

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

KNOWN = ("tok_embeddings", "blocks", "norm", "head", "mtp")  # parts with a fixed stage in distributed/pipeline.py


def follow(model, run_block, tokens=None, **inputs) -> None:
    """Call the model's forward with run_block(block's forward, ...) in place of each block. Changes the model."""
    for block in model.blocks.values():
        block.forward = lambda *args, forward=block.forward, **kwargs: run_block(forward, *args, **kwargs)
    ids = torch.zeros(1, 8, dtype=torch.int64, device="meta")
    model(ids if tokens is None else tokens, labels=ids, loss_denom=8, **{name: ids for name in inputs})


class Uses(TorchFunctionMode):
    """Notes in `places` when torch computes with the parameters of each part."""

    def __init__(self, model, parts):
        super().__init__()
        self.n_blocks, self.done, self.places = len(model.blocks), 0, {name: set() for name in parts}
        named = [(n.partition(".")[0], p) for n, p in model.named_parameters(remove_duplicate=False)]
        self.owners, self.views = {(id(p), part) for part, p in named if part in self.places}, []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        at = "before the blocks" if not self.done else "behind them" if self.done == self.n_blocks else "between them"
        result = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs)):
            for part in [part for part in self.places if (id(x), part) in self.owners]:
                if func.__name__ != "__get__":
                    self.places[part].add(at)
                elif isinstance(result, torch.Tensor) and result is not x:  # p.T; asking for a shape is no use
                    self.owners.add((id(result), part))
                    self.views.append(result)  # alive, so that no other tensor gets the id
        return result

    def skip(self, forward, h, *args, **kwargs):
        self.done += 1
        return h


def own_parts(model) -> dict[str, bool]:
    """{part of a fork's model that Llama3 lacks: True if forward uses the part before the blocks, so that the part belongs to
    the first pipeline stage; False if after the blocks, for the last stage}. Only parts with parameters count.

    Raises ValueError for a part used elsewhere, and for a forward that fails without the parts of other stages.
    """
    parts = [n for n, m in model.named_children() if n not in KNOWN and next(m.parameters(), None) is not None]
    parts += [n for n, _ in model.named_parameters(recurse=False)]
    if not parts:
        return {}
    whole, why = copy.deepcopy(model), ""
    uses = Uses(whole, parts)
    try:
        with uses:
            follow(whole, uses.skip)
    except Exception as error:  # any error of the model
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"
    for name, found in uses.places.items():
        if why:
            raise ValueError(f"--pp: the stage of {name} of {type(model).__name__} is found by following forward on tensors "
                             f"without numbers, and that failed: {why}; leave out what asks for a number, or make {name} part "
                             "of a block")
        if found not in ({"before the blocks"}, {"behind them"}):
            where = " and ".join(sorted(found)) or "nowhere"
            raise ValueError(f"--pp: {name} of {type(model).__name__} is used {where}; a "
                             "parameter must be on one stage: use it before the blocks or behind them, or make it part of a "
                             "block")
    is_before = {name: found == {"before the blocks"} for name, found in uses.places.items()}
    for is_first in (True, False):
        stage, h = copy.deepcopy(model), None if is_first else torch.zeros(1, 8, model.config.dim, device="meta")
        gone = ["norm", "head"] if is_first else ["tok_embeddings"] * (not model.config.tie_embeddings)
        gone += [name for name in parts if is_before[name] != is_first]
        for name in gone:
            setattr(stage, name, None)
        try:
            follow(stage, lambda forward, h, *args, **kwargs: h, h)
        except Exception as error:
            raise ValueError(f"--pp: forward of {type(model).__name__} fails on a stage where {', '.join(gone)} are None: "
                             f"{type(error).__name__}: {' '.join(str(error).split())}; it must do without, and what blocks "
                             "need must be part of them") from None
    return is_before


def blocks_without_attend(model) -> list[str]:
    """Names of the blocks that return without calling `attend`, the only function that knows where a document ends."""
    def attend(*args, **kwargs):
        raise RuntimeError("attend is called")

    def run(forward, h, *args, **kwargs):
        name = next(names)
        with suppress(Exception):  # attend was called, or the block cannot run without numbers
            forward(h, *args, **kwargs)
            found.append(f"blocks.{name}")
        return h

    model, found = copy.deepcopy(model), []
    names, model.make_attend = iter(model.blocks), lambda *args, **kwargs: attend
    with suppress(Exception):
        follow(model, run, doc_ids=True)
    return found
