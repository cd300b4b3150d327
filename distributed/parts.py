"""What a model's forward does with its parts, found out by a forward on the meta device, which computes no number."""
import copy
from contextlib import suppress

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

KNOWN = ("tok_embeddings", "blocks", "norm", "head", "mtp")  # those whose stage distributed/pipeline.py knows


def follow(model, run_block, tokens=None, **inputs) -> None:
    """Call forward of the model, which is changed by it. run_block(block's forward, ...) runs in place of each block."""
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
        self.owners = {(id(p), part) for part, p in named if part in self.places}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        at = "before the blocks" if not self.done else "behind them" if self.done == self.n_blocks else "between them"
        for x in tree_leaves((args, kwargs)) if func.__name__ != "__get__" else ():  # asking for a shape is no use
            for part, found in self.places.items():
                found |= {at} if (id(x), part) in self.owners else set()
        return func(*args, **(kwargs or {}))

    def skip(self, forward, h, *args, **kwargs):
        self.done += 1
        return h


def own_parts(model) -> dict[str, bool]:
    """Of a fork's model: each part with parameters that Llama3 does not have, and whether forward uses it before the blocks, so
    that it belongs to a pipeline's first stage, or behind them, to the last.

    Raises ValueError for a part that is used elsewhere, and for a forward that does not do without the parts of other stages.
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
    except Exception as error:  # of the model, whatever it is
        why = f" as far as forward could be followed, to {type(error).__name__}: {' '.join(str(error).split())}"
    for name, found in uses.places.items():
        if why or found not in ({"before the blocks"}, {"behind them"}):
            where = " and ".join(sorted(found)) or "nowhere"
            raise ValueError(f"--pp: {name} of {type(model).__name__} is used {where}{why}; a parameter must be on one stage: "
                             "use it before the blocks or behind them, or make it part of a block")
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
    """The blocks that return without a call of `attend`, which alone knows where a document ends."""
    def attend(*args, **kwargs):
        raise RuntimeError("attend is called")

    def run(forward, h, *args, **kwargs):
        name = next(names)
        with suppress(Exception):  # attend's, or of a block that cannot run without numbers: then nothing is known of it
            forward(h, *args, **kwargs)
            found.append(f"blocks.{name}")
        return h

    model, found = copy.deepcopy(model), []
    names, model.make_attend = iter(model.blocks), lambda *args, **kwargs: attend
    with suppress(Exception):
        follow(model, run, doc_ids=True)
    return found
