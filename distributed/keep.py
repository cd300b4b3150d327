"""--ac op: which results of a block are kept for the backward, and which are computed again."""
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

# Results kept besides every other matmul, because computing or sending them again takes long. Older torch lacks some ops.
# From max on the results are small: the largest number of a tensor, for float8, and a router's scores, choice and order, so
# that kept results of experts belong to the tokens chosen in the recomputation.
KEPT = {
    "aten": (
        "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention", "_scaled_mm", "_scaled_mm_v2",
        "_scaled_grouped_mm", "_scaled_grouped_mm_v2", "_grouped_mm", "max", "mm.dtype", "topk", "sort.stable",
    ),
    "_c10d_functional": ("all_to_all_single", "reduce_scatter_tensor"),
    # FlexAttention, plain and compiled: see models.attention.compiled_flex_attention
    "higher_order": ("flex_attention", "inductor_compiled_code"),
}


class Only(TorchDispatchMode):
    """Pass the ops in `ops` to torch's mode of selective checkpointing, and run all other ops directly.

    torch's modes count all ops, and expect the same ops in the forward and in the recomputation. The numbers differ: the
    experts are an FSDP unit inside the checkpointed block. In the recomputation their weights may be gathered already, and
    FSDP's hooks then run fewer ops.
    """

    supports_higher_order_operators = True

    def __init__(self, ops: set, mode: TorchDispatchMode):
        super().__init__()
        self.ops, self.mode = ops, mode

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        return self.mode.__torch_dispatch__(op, types, args, kwargs) if op in self.ops else op(*args, **(kwargs or {}))


def find_op(space: str, name: str):
    """torch.ops.<space>.<name> or <name>.<overload>; None if the installed torch lacks the op. Ops of higher order have no
    overloads."""
    name, _, overload = name.partition(".")
    op = getattr(getattr(torch.ops, space), name, None)
    return getattr(op, overload or "default", op)


def keep_contexts(is_compiled: bool) -> tuple:
    """The context_fn of torch.utils.checkpoint: a mode for the forward and one for the recomputation, new for every forward."""
    kept = {found for space, names in KEPT.items() for name in names if (found := find_op(space, name)) is not None}
    mm = torch.ops.aten.mm.default
    matmuls = {False: 0, True: 0}  # seen in the forward, in the recomputation: both keep every second one

    def policy(ctx, op, *args, **kwargs):
        if op is mm:
            matmuls[ctx.is_recompute] += 1
            keep = matmuls[ctx.is_recompute] % 2 == 0
        else:
            keep = op in kept
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    modes = create_selective_checkpoint_contexts(policy)
    # The compiler accepts torch's own modes only. A block compiled as a whole has no FSDP unit inside.
    return modes if is_compiled else tuple(Only({mm, *kept}, mode) for mode in modes)
