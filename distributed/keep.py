"""--ac op: which results of a block are kept for the backward, and which are computed again."""

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

# Results kept besides every other matmul, because computing or sending them again takes long: the
# ops by their names. From max on the results are small: the largest number of a tensor, for float8,
# and a router's scores, choice and order, so that kept results of experts belong to the tokens
# chosen in the recomputation.
KEPT = {
    "_c10d_functional::all_to_all_single",
    "_c10d_functional::reduce_scatter_tensor",
    # FlexAttention, plain and compiled: models.flex_attention.compiled_flex_attention
    "flex_attention",
    "inductor_compiled_code",
    *(
        f"aten::{name}"
        for name in (
            "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_cudnn_attention",
            "_scaled_mm",
            "_scaled_mm_v2",
            "_scaled_grouped_mm",
            "_scaled_grouped_mm_v2",
            "_grouped_mm",
            "max",
            "mm.dtype",
            "topk",
            "sort.stable",
        )
    ),
}
MATMUL = torch.ops.aten.mm.default


def is_to_host(op: Any, args: tuple, kwargs: dict | None) -> bool:
    """Whether op copies from the device: the sizes of an exchange of tokens, for which the host
    waits (distributed.experts.exchange_tokens)."""
    if op is not torch.ops.aten._to_copy.default or args[0].device.type == "cpu":
        return False
    device = (kwargs or {}).get("device")
    return device is not None and device.type == "cpu"


class PassKept(TorchDispatchMode):
    """Pass matmuls and the ops in KEPT to torch's mode of selective checkpointing, and run all
    other ops directly.

    torch's modes count all ops, and expect the same ops in the forward and in the recomputation.
    The numbers differ: the experts are an FSDP unit inside the checkpointed block. In the
    recomputation their weights may be gathered already, and FSDP's hooks then run fewer ops.
    """

    supports_higher_order_operators = True

    def __init__(self, mode: TorchDispatchMode):
        super().__init__()
        self.mode = mode

    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        is_passed = op is MATMUL or op.name() in KEPT or is_to_host(op, args, kwargs)
        if is_passed:
            return self.mode.__torch_dispatch__(op, types, args, kwargs)
        return op(*args, **(kwargs or {}))


def keep_contexts(is_compiled: bool) -> tuple:
    """The context_fn of torch.utils.checkpoint: a mode for the forward and one for the
    recomputation, new for every forward."""
    # seen in the forward, in the recomputation: both keep every second one
    matmuls = {False: 0, True: 0}

    def policy(ctx, op, *args, **kwargs):
        keep = op.name() in KEPT or is_to_host(op, args, kwargs)
        if op is MATMUL:
            # where tp cuts the sum, the result is a summand of (B, T, D), and the reduce-scatter's
            # small result is kept
            is_summand = any(cut.is_shard(0) for cut in getattr(args[1], "placements", ()))
            matmuls[ctx.is_recompute] += not is_summand
            keep = not is_summand and matmuls[ctx.is_recompute] % 2 == 0
        if keep:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    modes = create_selective_checkpoint_contexts(policy)
    # The compiler accepts torch's own modes only. A block compiled as a whole has no FSDP unit
    # inside.
    if is_compiled:
        return modes
    return tuple(map(PassKept, modes))
