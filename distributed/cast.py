"""Mixed precision without FSDP: a unit's weights are in the compute dtype only while the unit
computes.

FSDP casts weights when gathering, and gradients when summing over ranks. One process neither
gathers nor sums, nor does a rank whose experts no other rank has (--ep over all ranks), and FSDP
would copy every weight and every gradient several times. So here is the cast alone. The units are
FSDP's: on one process a block, the embedding, the rest; else the experts of a block.

    before the forward        weights are cast, and modules hold the casts in place of the parameters
    after the forward         the memory of the casts is freed; the graph still knows the tensors
    before the backward       weights are cast again, into the same tensors
    with each gradient        cast to --reduce_dtype and added to earlier micro-batches; after the last micro-batch, cast to the
                              parameter's dtype
    after the last gradient   the casts are freed. If frozen parameters have casts, the unit waits also for the gradient of its
                              input, computed with the casts; or, without such a gradient, for the end of the backward

Frozen weights in the compute dtype, as under LoRA, have no casts.

FSDP rounds at the same places in the same order: losses and gradients are equal to the last bit.
"""

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from distributed.layout import Layout, all_blocks, local_tensor


def cast_weights(stage, layout: Layout, reduce_dtype: torch.dtype) -> None:
    """Make the model compute in layout.compute_dtype and add up gradients in reduce_dtype. With
    layout.reshards a block's casts are freed between its forward and its backward."""
    taken = set()
    dtypes = {p.dtype for p in stage.parameters()} | {reduce_dtype}
    if dtypes == {layout.compute_dtype}:
        return
    blocks = list(all_blocks(stage).values())
    units = []
    # backward begins with the last
    roots = [(block, layout.reshards and block is not blocks[-1]) for block in blocks]
    if not stage.config.tie_embeddings:  # the loss reads a tied embedding as well
        roots.append((stage.tok_embeddings, layout.reshards))
    # the loss uses the head's weight directly, outside of the head's forward
    for root, frees in [*roots, (stage, False)]:
        modules = [m for m in root.modules() if m not in taken]
        taken.update(modules)
        units.append(CastUnit(root, modules, stage, layout.compute_dtype, reduce_dtype, frees))
    finish_backwards(stage, units)


def cast_experts(
    experts: list, stage: nn.Module, layout: Layout, reduce_dtype: torch.dtype
) -> None:
    """cast_weights for the experts of all blocks alone, where FSDP wraps the rest of the model."""
    held = {reduce_dtype}
    for each in experts:
        held |= {p.dtype for p in each.parameters()}
    if held == {layout.compute_dtype}:
        return
    units = []
    for each in experts:
        unit = CastUnit(each, [each], stage, layout.compute_dtype, reduce_dtype, layout.reshards)
        units.append(unit)
    finish_backwards(stage, units)


def finish_backwards(stage, units: list) -> None:
    """At the end of each backward free all casts, and give parameters their gradients that did not
    take part in it."""
    stage.is_last_backward = True  # parallel.next_backward changes it

    def after_backward() -> None:
        for unit in units:
            unit.free()
            for i, total in enumerate(unit.sums):
                # a parameter unused in the last micro-batch
                if total is not None and stage.is_last_backward:
                    unit.give_gradient(i)

    def after_forward(module, args, output) -> None:
        for t in tree_leaves(output):
            if torch.is_grad_enabled() and t.requires_grad:
                t.register_hook(
                    lambda grad: Variable._execution_engine.queue_callback(after_backward)
                )

    stage.register_forward_hook(after_forward)


class CastUnit:
    """The parameters of `modules`, cast around forward and backward of `root`. root gets two
    methods with the names and the meaning of FSDP's: unshard and reshard. Of a DTensor the cast is
    this rank's part, a plain tensor."""

    def __init__(
        self, root: nn.Module, modules: list[nn.Module], stage, dtype, reduce_dtype, frees: bool
    ):
        self.modules = modules
        self.stage = stage
        self.frees = frees
        self.dtype = dtype
        self.reduce_dtype = reduce_dtype
        self.params = []
        self.sums = []
        self.is_cast = False
        self.missing = 0
        root.unshard = self.unshard
        root.reshard = self.reshard
        root.register_forward_pre_hook(self.before_forward)
        root.register_forward_hook(self.after_forward)

    def make_casts(self) -> None:
        """At the first forward: before, the parameters may be moved to a device, and have no
        values."""
        self.places = [
            (m, name, p) for m in self.modules for name, p in m.named_parameters(recurse=False)
        ]
        self.params = list(dict.fromkeys(p for _, _, p in self.places))  # tied parameters once
        # a Tensor while a gradient waits for later micro-batches
        self.sums = [None] * len(self.params)
        # .to keeps the memory if the dtype is the same, and nothing is ever copied
        self.casts = [
            nn.Parameter(local_tensor(p.detach()).to(self.dtype), p.requires_grad)
            for p in self.params
        ]
        for i, cast in enumerate(self.casts):
            if cast.requires_grad:
                cast.register_post_accumulate_grad_hook(lambda cast, i=i: self.take_gradient(i))
        # .data hides the filling of the casts from autograd
        pairs = zip(self.casts, self.params, strict=True)
        self.copies = [(c.data, local_tensor(p.detach())) for c, p in pairs if c.dtype != p.dtype]
        self.frozen_casts = any(p.dtype != self.dtype and not p.requires_grad for p in self.params)

    @torch.no_grad()
    def unshard(self) -> None:
        if self.is_cast:
            return
        if not self.params:
            self.make_casts()
        for cast, _ in self.copies:
            cast.untyped_storage().resize_(cast.nbytes)
        if self.copies:
            casts, params = zip(*self.copies)
            torch._foreach_copy_(casts, params)
        self.is_cast = True
        self.hold(dict(zip(self.params, self.casts, strict=True)))

    def reshard(self) -> None:
        if self.is_cast:
            for cast, _ in self.copies:
                cast.untyped_storage().resize_(0)
            self.is_cast = False
            self.hold({p: p for p in self.params})

    def hold(self, tensors: dict) -> None:
        """Put these tensors in place of the modules' parameters."""
        for module, name, p in self.places:
            module._parameters[name] = tensors[p]

    def before_forward(self, module, args) -> None:
        self.unshard()
        for x in args[:1]:
            if self.frozen_casts and torch.is_grad_enabled() and x.requires_grad:
                x.register_hook(lambda grad: self.count_down())

    def after_forward(self, module, args, output) -> None:
        if self.frees:
            self.reshard()
        for t in tree_leaves(output):
            if torch.is_grad_enabled() and t.requires_grad:
                t.register_hook(self.before_backward)

    def before_backward(self, grad: Tensor) -> None:
        self.unshard()
        # the gradient of the input
        self.missing = sum(cast.requires_grad for cast in self.casts) + self.frozen_casts

    def free(self) -> None:
        if self.frees or self.stage.is_last_backward:
            self.reshard()

    def take_gradient(self, i: int) -> None:
        cast = self.casts[i]
        total = self.sums[i]
        if total is None:
            self.sums[i] = cast.grad.to(self.reduce_dtype)
        else:
            total.add_(cast.grad)
        cast.grad = None
        if self.stage.is_last_backward:
            self.give_gradient(i)
        self.count_down()

    def count_down(self) -> None:
        self.missing -= 1
        if not self.missing:
            self.free()

    def give_gradient(self, i: int) -> None:
        p = self.params[i]
        grad = self.sums[i].to(self.params[i].dtype)
        if isinstance(p, DTensor):
            grad = DTensor.from_local(
                grad, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
        if p.grad is None:
            p.grad = grad
        else:
            p.grad.add_(grad)
        self.sums[i] = None
