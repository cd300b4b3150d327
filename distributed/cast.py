"""Mixed precision on one process: a unit's weights in the compute dtype, for as long as it computes with them.

FSDP casts weights when it gathers them, and gradients when it sums them over ranks. One process has nothing to gather and
nothing to sum, and FSDP would copy every weight and every gradient once more. So here is the cast alone. A unit is what FSDP
would wrap: a block, the embedding, the rest.

    before its forward        its weights are cast, and its modules hold the casts in place of the parameters
    after its forward         the memory of the casts is freed; the graph still knows them
    before its backward       they are cast again, into the same tensors
    a gradient is there       it is cast to --reduce_dtype and added to that of earlier micro-batches; after the last of these,
                              cast to the parameter's dtype
    all of them are           the casts are freed. Where frozen parameters have casts, the gradient of the unit's input must be
                              there as well, for it is computed with these; or, if the input has none, the backward be over

Frozen weights that are kept in the compute dtype, as LoRA's are, have no casts; with --lora_nf4 theirs are unpacked.

FSDP rounds at the same places in the same order: losses and gradients equal those under FSDP to the last bit.
"""
import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils._pytree import tree_leaves

from distributed.layout import Layout, all_blocks
from distributed.nf4 import is_nf4, unpack_rows


def cast_weights(stage, layout: Layout, reshard: bool) -> None:
    """Let the model compute in layout.compute_dtype. reshard: free a block's casts between its forward and its backward."""
    cfg, taken = layout.cfg, set()
    dtypes = {getattr(torch, cfg.param_dtype), getattr(torch, cfg.reduce_dtype)}
    if dtypes == {layout.compute_dtype} and not getattr(cfg, "lora_nf4", False):
        return
    blocks, units = list(all_blocks(stage).values()), []
    roots = [(block, reshard and block is not blocks[-1]) for block in blocks]  # the backward begins with the last block
    if not stage.config.tie_embeddings:  # then the loss reads it as well
        roots.append((stage.tok_embeddings, reshard))
    for root, frees in [*roots, (stage, False)]:  # the loss uses the head's weight directly, outside of the head's forward
        modules = [m for m in root.modules() if m not in taken]
        taken.update(modules)
        units.append(CastUnit(root, modules, layout, frees, units if root is stage else []))


class CastUnit:
    """The parameters that `modules` hold, cast around forward and backward of `root`. root gets three methods with the names
    and the meaning that FSDP's modules have them with: unshard, reshard, set_reshard_after_forward. units: those whose backward
    is over with this one's: of the whole model's unit all, of others none."""

    def __init__(self, root: nn.Module, modules: list[nn.Module], layout: Layout, frees: bool, units: list):
        self.modules, self.layout, self.frees, self.units = modules, layout, frees, units
        self.params, self.sums, self.is_cast, self.missing = [], [], False, 0
        root.unshard, root.reshard, root.set_reshard_after_forward = self.unshard, self.reshard, self.set_reshard_after_forward
        root.register_forward_pre_hook(self.before_forward)
        root.register_forward_hook(self.after_forward)

    def set_reshard_after_forward(self, frees: bool, recurse: bool = False) -> None:
        self.frees = frees

    def make_casts(self) -> None:
        """At the first forward: before, the parameters may be moved to a device, and have no values."""
        self.places = [(m, name, p) for m in self.modules for name, p in m.named_parameters(recurse=False)]
        self.params = list(dict.fromkeys(p for _, _, p in self.places))  # a tied one once
        self.sums = [None] * len(self.params)  # a Tensor while a gradient waits for later micro-batches
        dtype = self.layout.compute_dtype
        # .to: the same memory where the dtype is the same; then nothing is ever copied
        casts = [p.packed.new_empty(p.shape, dtype=dtype) if is_nf4(p) else p.detach().to(dtype) for p in self.params]
        self.casts = [nn.Parameter(cast, p.requires_grad) for cast, p in zip(casts, self.params, strict=True)]
        for i, cast in enumerate(self.casts):
            if cast.requires_grad:
                cast.register_post_accumulate_grad_hook(lambda cast, i=i: self.take_gradient(i))
        # .data: filling the casts again is no change that autograd must know of
        pairs = [(cast.data, p.detach()) for cast, p in zip(self.casts, self.params, strict=True)]
        self.packed = [(cast, p) for cast, p in pairs if is_nf4(p)]
        self.copies = [(cast, p) for cast, p in pairs if not is_nf4(p) and cast.dtype != p.dtype]
        self.frozen_casts = bool(self.packed) or any(p.dtype != dtype and not p.requires_grad for p in self.params)

    @torch.no_grad()
    def unshard(self) -> None:
        if self.is_cast:
            return
        if not self.params:
            self.make_casts()
        for cast, _ in self.copies + self.packed:
            cast.untyped_storage().resize_(cast.nbytes)
        if self.copies:
            torch._foreach_copy_([cast for cast, _ in self.copies], [p for _, p in self.copies])
        for cast, p in self.packed:
            unpack_rows(p.packed, p.block, cast)
        self.is_cast = True
        self.hold(dict(zip(self.params, self.casts, strict=True)))

    def reshard(self) -> None:
        if self.is_cast:
            for cast, _ in self.copies + self.packed:
                cast.untyped_storage().resize_(0)
            self.is_cast = False
            self.hold({p: p for p in self.params})

    def hold(self, tensors: dict) -> None:
        """Let the modules have these tensors in place of their parameters."""
        for module, name, p in self.places:
            module._parameters[name] = tensors[p]

    def before_forward(self, module, args) -> None:
        self.unshard()
        for x in args[:1]:
            if self.frozen_casts and torch.is_grad_enabled() and x.requires_grad:
                x.register_hook(lambda grad: self.one_less())

    def after_forward(self, module, args, output) -> None:
        if self.frees:
            self.reshard()
        for t in tree_leaves(output):
            if torch.is_grad_enabled() and t.requires_grad:
                t.register_hook(self.before_backward)

    def before_backward(self, grad: Tensor) -> None:
        self.unshard()
        self.missing = sum(cast.requires_grad for cast in self.casts) + self.frozen_casts  # the gradient of the input
        if self.units:
            Variable._execution_engine.queue_callback(self.after_backward)

    def after_backward(self) -> None:
        for unit in self.units:
            unit.free()
            for i, total in enumerate(unit.sums):
                if total is not None and self.layout.is_last_backward:  # of parameters that the last micro-batch did not use
                    unit.give_gradient(i)

    def free(self) -> None:
        if self.frees or self.layout.is_last_backward:
            self.reshard()

    def take_gradient(self, i: int) -> None:
        cast, total = self.casts[i], self.sums[i]
        self.sums[i] = cast.grad.to(getattr(torch, self.layout.cfg.reduce_dtype)) if total is None else total.add_(cast.grad)
        cast.grad = None
        if self.layout.is_last_backward:
            self.give_gradient(i)
        self.one_less()

    def one_less(self) -> None:
        self.missing -= 1
        if not self.missing:
            self.free()

    def give_gradient(self, i: int) -> None:
        p, grad = self.params[i], self.sums[i].to(self.params[i].dtype)
        p.grad, self.sums[i] = grad if p.grad is None else p.grad.add_(grad), None
        for hook in (p._post_accumulate_grad_hooks or {}).values():  # --optimizer_in_backward
            hook(p)
