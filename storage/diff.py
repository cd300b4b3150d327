"""python checkpoint.py diff: compares two step folders."""
import math

import torch

from storage.changes import changes
from storage.dcp import read_table, read_tensors
from storage.manifest import verify
from support.files import read_json


def diff(a: str, b: str) -> int:
    """Compares two step folders, with one pair of tensors in memory at a time; by bits, so NaN equals NaN."""
    try:
        tables = [read_table(folder, verify(folder)["files"]) for folder in (a, b)]
    except ValueError as error:
        raise ValueError(f"cannot compare: {error}") from None
    differ, relative, keys = {}, {}, sorted({key for table in tables for key in table.state_dict_metadata})
    for key in keys:
        kinds = [table.state_dict_metadata.get(key) for table in tables]
        if None in kinds:
            differ[key] = f"only in {a if kinds[0] else b}"
        elif kinds[0].size != kinds[1].size or kinds[0].properties.dtype != kinds[1].properties.dtype:
            differ[key] = " / ".join(f"{tuple(kind.size)} {kind.properties.dtype}" for kind in kinds)
        else:
            pair = [{key: torch.empty(kind.size, dtype=kind.properties.dtype)} for kind in kinds]
            for tensors, folder, table in zip(pair, (a, b), tables):
                read_tensors(tensors, folder, table)
            x, y = (tensors[key].reshape(-1) for tensors in pair)
            if not torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
                far = (x.double() - y.double()).abs()
                relative[key] = (far.norm() / x.double().norm().clamp(min=1e-300)).item()
                differ[key] = (f"{int((far != 0).sum())} of {far.numel()} elements, by up to {far.max():.3g}, "
                               f"{relative[key]:.1e} relative")
    states = [read_json(folder, "state.json")["state"] for folder in (a, b)]
    for name, old, new in changes(*states):
        print(f"state.json: {name} is {old} / {new}")
    far = sorted(differ, key=lambda key: -relative.get(key, math.inf))  # other shapes first
    print(f"{len(differ)} of {len(keys)} tensors differ" + (", most of all:" if differ else ""))
    print("".join(f"  {key}: {differ[key]}\n" for key in far[:5]), end="")
    return int(bool(differ))
