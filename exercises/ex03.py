"""The check of exercise 3: two processes, each with half of the rows and half of the tokens, against plain torch with all.
Also checks that no rank keeps the whole weight in memory between forward and backward."""
import time

import hand03
import torch
import torch.distributed as dist
from feedback import Wrong, on_ranks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

RANKS, N, IN, OUT = 2, 3, 6, 8  # N tokens per rank


def problem():
    """x of all ranks (RANKS * N, IN), weight (OUT, IN), gradient of the result (RANKS * N, OUT)."""
    g = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=g, dtype=torch.float64) for shape in ((RANKS * N, IN), (OUT, IN), (RANKS * N, OUT))]


class Memory(TorchDispatchMode):
    """Holds a weak reference to every tensor made inside the block."""

    def __init__(self):
        super().__init__()
        self.storages = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.storages += [StorageWeakRef(t.untyped_storage()) for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        return out

    def holds(self, n_bytes: int) -> bool:
        """Whether a storage of at least n_bytes is still alive. Waits up to a second: gloo's thread may free tensors late."""
        for _ in range(20):
            alive = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.storages]
            if not any(storage is not None and storage.nbytes() >= n_bytes for storage in alive):
                return False
            del alive
            time.sleep(0.05)
        return True


def on_a_rank():
    """(result, gradient of x, gradient of the shard, weight still whole after the forward?, after the backward?)."""
    rank, (x, weight, grad) = dist.get_rank(), problem()
    shard = hand03.shard_of(weight, rank, RANKS).requires_grad_()
    x, grad = x.chunk(RANKS)[rank].clone().requires_grad_(), grad.chunk(RANKS)[rank].clone()
    with Memory() as memory:
        y = hand03.ShardedLinear.apply(x, shard, dist.group.WORLD)
        between = memory.holds(weight.nbytes)
        y.backward(grad)
        after = memory.holds(weight.nbytes)
    return y.detach(), x.grad, shard.grad, between, after


def check_shards(weight):
    for rank in range(RANKS):
        mine, want = hand03.shard_of(weight, rank, RANKS), weight.chunk(RANKS)[rank]
        if mine.shape != want.shape or not torch.equal(mine, want):
            raise Wrong(f"shard_of gives rank {rank} of {RANKS} {tuple(mine.shape)} of a weight {tuple(weight.shape)}, and "
                        f"should give rows {rank * OUT // RANKS} .. {(rank + 1) * OUT // RANKS - 1}, {tuple(want.shape)}")
        if mine.untyped_storage().nbytes() > want.nbytes:
            raise Wrong(f"shard_of gives rank {rank} the right rows, but as a view: the memory of the whole weight, "
                        f"{mine.untyped_storage().nbytes()} bytes in place of {want.nbytes}, lives as long as they do")


def check():
    x, weight, grad = problem()
    check_shards(weight)
    try:
        got = on_ranks(RANKS, on_a_rank)
    except RuntimeError as e:
        if "invalid gradient" not in str(e):
            raise
        raise Wrong(f"ShardedLinear.backward: {str(e).strip().splitlines()[-1]}. forward has the arguments x, shard and "
                    "group, and the gradient of the shard has its rows only: which collective adds up, and leaves each rank "
                    "its part?") from None
    dw, dws = grad.T @ x, [g.T @ x_ for g, x_ in zip(grad.chunk(RANKS), x.chunk(RANKS))]
    for rank, (y, dx, d_shard, between, after) in enumerate(got):
        where = f"on rank {rank} of {RANKS}"
        right_y, right_dx = (x @ weight.T).chunk(RANKS)[rank], (grad @ weight).chunk(RANKS)[rank]
        if y.shape != right_y.shape or not torch.allclose(y, right_y):
            raise Wrong(f"ShardedLinear.forward {where}: the result {tuple(y.shape)} is not x @ weight.T "
                        f"{tuple(right_y.shape)} with the whole weight and this rank's tokens")
        if dx is None or not torch.allclose(dx, right_dx):
            raise Wrong(f"ShardedLinear.backward {where}: the gradient of x is not grad @ weight, with the whole weight. It "
                        "is not summed over ranks: each has tokens of its own")
        if d_shard is None:
            raise Wrong(f"ShardedLinear.backward {where}: the shard has no gradient")
        right = dw.chunk(RANKS)[rank]
        if not torch.allclose(d_shard, right):
            guess = next((text for value, text in (
                (dws[rank].chunk(RANKS)[rank], "it saw this rank's tokens only; who adds up those of the others?"),
                (right / RANKS, f"it is the mean over the ranks, 1/{RANKS} of it. The loss is divided by the tokens of all "
                                "ranks already, so the ranks' gradients are summed"),
                (dw.chunk(RANKS)[rank - 1], "it has rows of another rank"),
            ) if torch.allclose(d_shard, value)), "rows of the sum of all ranks' grad.T @ x are wanted")
            raise Wrong(f"ShardedLinear.backward {where}: the gradient of the shard is wrong: {guess}")
        if between or after:
            when = "between forward and backward" if between else "after the backward"
            raise Wrong(f"all numbers are right, but {when} the whole weight ({OUT} x {IN}) is still in memory {where}: every "
                        f"layer would keep its own, and nothing is saved. Between uses only the shard ({OUT // RANKS} x {IN}) "
                        "stays: what does ctx keep? The backward can gather again")
