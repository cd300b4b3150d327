"""Counting what really happens in a run: collectives with their bytes and axis, and live memory."""
import weakref

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter, tree_map_only

OPS = {
    "_allgather_base_": "all_gather", "all_gather_into_tensor": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter", "reduce_scatter_tensor": "reduce_scatter",
    "allreduce_": "all_reduce", "all_reduce": "all_reduce",
    "alltoall_base_": "all_to_all", "all_to_all_single": "all_to_all",
    "send": "send", "recv_": "recv",
}


class Collectives(TorchDispatchMode):
    """{(axis, op): [number, bytes of the largest tensor involved, summed]} of everything that runs inside the context."""

    def __init__(self, layout):
        super().__init__()
        self.counts = {}
        self.axes = {dist.group.WORLD.group_name: "world"}
        for mesh in (layout.axes, layout.mesh):  # an axis that spans all ranks has the world's group, and its name here
            self.axes |= {mesh.get_group(axis).group_name: axis for axis in mesh.mesh_dim_names if mesh[axis].size() > 1}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it dispatches again, with plain tensors and its collectives
        out = func(*args, **(kwargs or {}))
        name = func.name().split("::")[1].split(".")[0]
        if func.namespace in ("c10d", "_c10d_functional") and name in OPS:
            flat = [*tree_iter((args, kwargs)), *tree_iter(out)]
            group = next((a for a in reversed(flat) if isinstance(a, str) and a in self.axes), None)
            if group is None:
                objects = (a for a in flat if isinstance(a, torch.ScriptObject))
                group = next(dist.ProcessGroup.unbox(a).group_name for a in objects if is_group(a))
            entry = self.counts.setdefault((self.axes.get(group, group), OPS[name]), [0, 0])
            entry[0] += 1
            entry[1] += max(t.numel() * t.element_size() for t in flat if isinstance(t, torch.Tensor))
        return out


def is_group(obj) -> bool:
    try:
        return isinstance(dist.ProcessGroup.unbox(obj), dist.ProcessGroup)
    except RuntimeError:
        return False


class LiveMemory(TorchDispatchMode):
    """Bytes of tensors made inside the context that are alive now (`live`), and at the worst moment (`peak`)."""

    def __init__(self):
        super().__init__()
        self.live = self.peak = 0
        self.known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        before = {t.untyped_storage()._cdata for t in tree_iter((args, kwargs)) if isinstance(t, torch.Tensor)}
        tree_map_only(torch.Tensor, lambda t: self.add(t.untyped_storage(), before), out)
        return out

    def add(self, storage, before):
        key, size = storage._cdata, storage.nbytes()
        if key in self.known or key in before:
            return
        self.known.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.remove, key, size)

    def remove(self, key, size):
        self.known.discard(key)
        self.live -= size
