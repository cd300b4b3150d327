"""Count a training step while it runs: memory, FLOPs, and the collectives between ranks."""

import traceback
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

OPS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send", "recv")


def sdpa_flops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any, **kwargs: Any) -> int:
    # q k^T, and the probabilities times v; the mask saves nothing
    return 4 * q.shape[:3].numel() * k.shape[2] * q.shape[3]


FLOPS = {  # of operations that torch's flop_registry lacks, called as its functions are
    "_scaled_dot_product_flash_attention_for_cpu": sdpa_flops,
    "_scaled_dot_product_flash_attention_for_cpu_backward": lambda grad, *qkv, **kwargs: (
        2 * sdpa_flops(*qkv)
    ),
    # (N, in) x (E, in, out), or for the weights' gradient (in, N) x (N, out)
    "_grouped_mm": lambda x, w, *rest, **kwargs: 2 * x.numel() * w.shape[-1],
}


def tensors_in(tree: Any) -> list[torch.Tensor]:
    """The tensors in arguments or results: a tensor, or a tuple, list or dict with tensors."""
    if isinstance(tree, torch.Tensor):
        return [tree]
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        return []
    found = []
    for value in tree:
        found += tensors_in(value)
    return found


def unwatched(function: Callable) -> Callable:
    """Return the function, made to run outside of all dispatch modes: on real values, and counted
    by no Watch."""
    return _disable_current_modes()(function)


class Watch(TorchDispatchMode):
    """Counts every operation inside the context, on real or fake tensors:

    moved: {(phase, axis, op, bytes of the largest tensor involved): number of calls}
    flops: {phase: FLOPs of matmuls and attention}; the key "attention" has the FLOPs of attention
    in all phases;
           phases are forward, backward, recompute, update
    live, peak: bytes of the tensors made inside, now and at the worst moment
    """

    def __init__(self, layout=None):
        super().__init__()
        self.moved = Counter()
        self.flops = Counter()
        self.live = 0
        self.peak = 0
        self.sizes = {}  # storage -> bytes
        # phase of operations that autograd does not run: forward, backward (of a pipeline), update
        self.outside = "forward"
        # {name of a process group: axes}. Axes over the same ranks may share a group; an axis over
        # all ranks uses the world's.
        self.axes = {}
        if layout:
            self.name_groups(layout)

    def name_groups(self, layout) -> None:
        for mesh in (layout.expert_mesh, layout.full_mesh, layout.mesh):
            if mesh is None:
                continue
            for axis in mesh.mesh_dim_names:
                axes = self.axes.setdefault(mesh.get_group(axis).group_name, [])
                if mesh[axis].size() > 1:
                    axes.append(axis)
        if layout.world_size > 1:
            world = dist.group.WORLD.group_name
            if not self.axes.get(world):
                self.axes[world] = ["world"]

    def __enter__(self):
        # how FSDP frees a block's weights, and takes the memory again
        resize = torch.UntypedStorage.resize_

        def counted(storage, size):
            if storage._cdata in self.sizes:
                self.change(storage._cdata, size)
            return resize(storage, size)

        self.patches = ExitStack()
        self.patches.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", counted))
        # DTensor finds shapes by running operations on whole tensors: not work of the device, so
        # not counted
        unseen = unwatched(ShardingPropagator._propagate_tensor_meta_non_cached)
        self.patches.enter_context(
            mock.patch.object(ShardingPropagator, "_propagate_tensor_meta_non_cached", unseen)
        )
        return super().__enter__()

    def __exit__(self, *error):
        self.patches.close()
        return super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            # DTensor then runs the op and its collectives on local tensors, and each comes here
            # again
            return NotImplemented
        kwargs = kwargs or {}
        # Every second call is a question of autograd's, on which device a tensor is: no operation
        if func is torch.ops.prim.device.default:
            return self.device_of(args[0])
        out = self.run(func, *args, **kwargs)
        known = None  # storages of the arguments; most results are views of storages in self.sizes
        for storage in [t.untyped_storage() for t in tensors_in(out)]:
            key = storage._cdata
            if key in self.sizes:
                continue
            if known is None:
                known = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}
            if key not in known:
                self.change(key, storage.nbytes())
                weakref.finalize(storage, self.change, key, None)
        count = FLOPS.get(func._opname) or flop_registry.get(func._overloadpacket)
        flops = 0
        if count:
            flops = count(*args, **kwargs, out_val=out)
        self.flops[self.phase()] += flops
        self.flops["attention"] += flops * ("attention" in func._opname)
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func._opname.replace("_", "")  # _allgather_base_, all_gather_into_tensor
            for op in OPS:
                if op.replace("_", "") not in name:
                    continue
                self.count_collective(op, [*tree_iter((args, kwargs)), *tree_iter(out)])
        return out

    def count_collective(self, op: str, values: list):
        """values: all arguments and results of the call; the process group is among the values."""
        group = self.group_among(values)
        axes = self.axes.get(group, [group])
        if not axes:
            return  # a group of one rank: nothing travels
        # axes share the group: the call stack tells whether FSDP issued the call
        if len(axes) > 1 and op != "all_reduce":
            files = [frame.f_code.co_filename for frame, _ in traceback.walk_stack(None)]
            is_fsdp = any("_fully_shard" in file for file in files)
            axes_of_fsdp = ("dp_replicate", "dp_shard", "fsdp", "efsdp")
            axes = [axis for axis in axes if (axis in axes_of_fsdp) == is_fsdp] or axes
        size = max(t.numel() * t.element_size() for t in values if isinstance(t, torch.Tensor))
        self.moved[self.phase(), axes[-1], op, size] += 1

    def group_among(self, values: list) -> str | None:
        """The name of the process group of a call."""
        for value in reversed(values):
            if isinstance(value, str) and value in self.axes:
                return value
        for value in values:
            if isinstance(value, torch.ScriptObject) and value._type().name() == "ProcessGroup":
                return dist.ProcessGroup.unbox(value).group_name
        return None

    def run(self, func, *args, **kwargs):
        return func(*args, **kwargs)

    def device_of(self, tensor) -> torch.device:
        return torch.ops.prim.device.default(tensor)

    def change(self, key, size):
        """Note a storage's new size in bytes; None: the storage was freed."""
        self.live += (size or 0) - self.sizes.get(key, 0)
        self.peak = max(self.peak, self.live)
        if size is None:
            self.sizes.pop(key, None)
        else:
            self.sizes[key] = size

    def phase(self) -> str:
        if torch._C._current_graph_task_id() == -1:
            return self.outside
        if torch.is_grad_enabled():
            return "recompute"
        return "backward"

    def take_peak(self) -> int:
        """Return the peak since the last call, and start again."""
        peak = self.peak
        self.peak = self.live
        return peak


def totals(moved: dict) -> dict:
    """{(axis, op): [number, bytes]}"""
    counts = {}
    for (_, axis, op, size), n in moved.items():
        number, total = counts.get((axis, op), (0, 0))
        counts[axis, op] = [number + n, total + n * size]
    return counts
