"""Record all operations of the first step of a training run on every rank, as seams: the recording
half of --check_parity --where. (tools/parity/steps.py records all steps.)

A seam is a place with the same numbers in every layout: the inputs of the model, the output of
every module and what it is given, the inputs and the output of attention, the gradients, the loss, every
parameter's finished gradient, the norm, and the weights and buffers before and after the step. A
rank records its own part of each seam; tools/parity/where.py joins the parts.

Neither model nor recipe is changed: hooks are put on the modules when the step begins, after all
parallelisation, so they see exactly the tensors that the next module gets.
"""

import fnmatch
import hashlib
import inspect
import os
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from unittest import mock
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.pipelining.stage import _PipelineStageBase

import parallel
from distributed.layout import Layout, all_blocks, local_slice, local_tensor
from models.moe import Experts, in_forward
from tools.reports.costs import tensors_in


def sequence_keys(tokens: Tensor, labels: Tensor) -> list[str]:
    """A hash of each sequence of (..., T), to match sequences: each layout has them in another
    order, on other ranks."""
    # (B, 2, T)
    rows = torch.stack([tokens.flatten(0, -2), labels.flatten(0, -2)], 1).cpu().contiguous()
    return [hashlib.sha1(row.numpy().tobytes()).hexdigest() for row in rows]


class Seams:
    """The records of one process, in the order of execution: (phase, name, stage, call, rows,
    offset, tensor).

    rows: keys of the sequences in an activation; offset: place of a parameter's part in the whole.
    """

    def __init__(self):
        self.records = []
        self.rows = []
        self.about = {}
        self.micro = 0
        self.path = []  # of the modules that run
        self.calls = Counter()
        self.hooks = ExitStack()
        self.gradients_seen = set()
        self.outputs = WeakValueDictionary()  # {id: tensor} of recorded outputs that still exist

    def add(self, phase: str, name: str, tensor: Tensor, stage=0, call=0, rows=None, offset=None):
        value = local_tensor(tensor.detach())
        self.records.append(
            (phase, name, stage, call, rows, offset, value.to("cpu", copy=True).contiguous())
        )

    def note(self, name: str, tensor: Tensor, stage=0):
        """Record a tensor of the forward, and later its gradient."""
        call = self.calls[name, stage, self.micro]  # the number of earlier calls in the micro-batch
        self.calls[name, stage, self.micro] += 1
        self.add("forward", name, tensor, stage, call, self.rows[self.micro])
        self.outputs[id(tensor)] = tensor
        if tensor.requires_grad:
            tensor.register_hook(partial(self.note_gradient, name, stage, call, self.micro))

    def note_gradient(self, name, stage, call, micro, gradient):
        # the second half of a split backward comes here again
        if (name, stage, call, micro) not in self.gradients_seen:
            self.gradients_seen.add((name, stage, call, micro))
            self.add("backward", name, gradient, stage, call, self.rows[micro])

    def watch(self, model: nn.Module, stage=0):
        """Put hooks on all modules below the model, except on experts: the order of the rows that
        travel to experts depends on the layout."""
        for name, module in model.named_modules():
            if name and not isinstance(module, (Experts, nn.ModuleList, nn.ModuleDict)):
                # before the hooks of tensor_parallel: what the code around the module gives to it
                given = partial(self.enter, name, stage)
                self.hooks.callback(module.register_forward_pre_hook(given, prepend=True).remove)
                self.hooks.callback(
                    module.register_forward_hook(partial(self.leave, name, stage)).remove
                )

    def enter(self, name, stage, module, args):
        # not while activation checkpointing repeats a forward
        if in_forward() and torch.is_grad_enabled():
            self.path.append(name)
            for tensor in tensors_in(args)[:1]:
                self.note_input(f"{name} input", tensor, stage)

    def note_input(self, name: str, tensor: Tensor, stage: int):
        """Record what a module is given, unless it is the output of another, as it stands."""
        is_known = self.outputs.get(id(tensor)) is tensor
        call = self.calls[name, stage, self.micro]
        self.calls[name, stage, self.micro] += 1
        if tensor.is_floating_point() and not is_known:
            self.add("forward", name, tensor, stage, call, self.rows[self.micro])

    def leave(self, name, stage, module, args, out):
        if in_forward() and torch.is_grad_enabled():
            self.path.pop()
            found = tensors_in(out)
            for i, tensor in enumerate(found):
                if len(found) > 1:
                    self.note(f"{name}[{i}]", tensor, stage)
                else:
                    self.note(name, tensor, stage)

    def watch_attention(self, model, stage=0):
        """Record the inputs of attend (after rotation) and the output: the single seam of
        models/attention.py."""
        make = model.make_attend

        def recorded(*args, **kwargs):
            return partial(self.attend, make(*args, **kwargs), stage)

        self.hooks.enter_context(mock.patch.object(model, "make_attend", recorded))

    def attend(self, attend, stage, q, k, v, *rest, **options):
        """attend(q, k, v, ...), with records of inputs and output."""
        if not (in_forward() and torch.is_grad_enabled()):
            return attend(q, k, v, *rest, **options)
        name = self.path[-1] if self.path else "attention"
        for letter, x in zip("qkv", (q, k, v), strict=True):
            self.note(f"{name} {letter}", x, stage)
        out = attend(q, k, v, *rest, **options)
        self.note(f"{name} attention", tensors_in(out)[0], stage)
        return out

    def add_tensors(self, phase: str, stages, gradients=False):
        """Record the rank's part of every parameter and buffer, or of every gradient (zeros for a
        missing gradient), with the part's offset in the whole."""
        for stage in stages:
            tensors = dict(stage.named_parameters())
            if not gradients:
                tensors |= dict(stage.named_buffers())
            for fqn, tensor in tensors.items():
                value = tensor
                if gradients:
                    value = tensor.grad
                    if value is None:
                        value = torch.zeros_like(tensor)
                self.add(phase, fqn, value, stage.index, offset=local_slice(tensor)[1])

    def found(self) -> dict:
        return dict(records=self.records, rows=sum(self.rows, []), **self.about)


def describe_layout(stages, layout: Layout) -> dict:
    """Facts about a rank for the report: the layout, and the styles of the modules that
    tensor_parallel has split."""
    plan = {}
    if layout.tp > 1 and hasattr(stages[0], "tp_plan"):
        plan = stages[0].tp_plan()
    names = []
    classes = {}
    attends = []
    recomputes = False
    for stage in stages:
        for name, module in stage.named_modules():
            names.append(name)
            classes[name] = code_of(type(module))
        if hasattr(stage, "make_attend") and isinstance(stage.make_attend, partial):
            attends.append(stage.make_attend.func.__name__)
        for block in all_blocks(stage).values():
            recomputes = recomputes or isinstance(block.forward, partial)
    styles = {}
    for pattern, style in plan.items():
        styles |= dict.fromkeys(fnmatch.filter(names, pattern), style)
    return dict(
        rank=layout.rank,
        ep=layout.ep,
        etp=layout.etp,
        schedule=layout.schedule,
        reshards=layout.reshards,
        loss_parallel=layout.loss_parallel,
        degrees=layout.degrees,
        styles=styles,
        attends=attends,
        recomputes=recomputes,
        classes=classes,
    )


def code_of(kind: type) -> tuple[str, str]:
    """(name, file below the current folder) of a module's class; "" for the file of a class of torch.
    FSDP makes a class with the same name in front of ours."""
    for own in kind.__mro__:
        module = sys.modules[own.__module__]
        if not own.__module__.startswith("torch") and hasattr(module, "__file__"):
            return own.__name__, os.path.relpath(module.__file__ or "")
    return kind.__name__, ""


@contextmanager
def seams_of_a_step(folder: str = "") -> Iterator[Seams]:
    """Yield Seams into which parallel.forward_backward and clip_grad_norm write the first step.
    Enter after any change to parallel.py that the report shall show, and before a recipe imports
    from parallel. When the next step begins, a file FOLDER/seams-<rank>.pt is written: a recipe's
    process gives no sign before its end."""
    seams = Seams()
    state = {"stages": None}
    real = {
        name: getattr(parallel, name)
        for name in ("forward_backward", "inputs", "count_tokens", "clip_grad_norm")
    }
    forward_one_chunk = _PipelineStageBase.forward_one_chunk

    def forward_backward(stages, batch, layout):
        # the second step has begun: the weights have been updated, the biases of experts moved
        if state["stages"]:
            file = os.path.join(folder, f"seams-{layout.rank}.pt")
            if not os.path.exists(file):
                seams.finish()
                os.makedirs(folder, exist_ok=True)
                torch.save(seams.found(), file)
            return real["forward_backward"](stages, batch, layout)
        state["stages"] = stages
        seams.finish = partial(seams.add_tensors, "after", stages)
        seams.about = describe_layout(stages, layout) | {"seq_len": batch.tokens.shape[-1]}
        keys = sequence_keys(batch.tokens, batch.labels)
        size = layout.microbatch_size if layout.pp > 1 else batch.tokens.shape[1]
        if layout.pp == 1:
            stages[0].index = 0  # as a pipeline's stages have
        seams.rows = [keys[i : i + size] for i in range(0, len(keys), size)]
        seams.add_tensors("initial", stages)
        for stage in stages:
            seams.watch(stage, stage.index)
            if hasattr(stage, "make_attend"):
                seams.watch_attention(stage, stage.index)
        loss = real["forward_backward"](stages, batch, layout)
        seams.hooks.close()
        seams.add("loss", "loss", loss[0])
        return loss

    def inputs(stage, batch, a, layout):
        found = real["inputs"](stage, batch, a, layout)
        if state["stages"] and torch.is_grad_enabled() and "norm" not in state:
            seams.micro = a or 0
            rows = sum(seams.rows, []) if a is None else seams.rows[a]
            for name, x in found.items():
                seams.add("inputs", name, x, rows=rows)
        return found

    def count_tokens(labels, layout):
        total, of_rank = real["count_tokens"](labels, layout)
        if "norm" not in state:
            seams.add("count", "count_tokens", total)
        return total, of_rank

    def clip_grad_norm(*args, **kwargs):  # a fork's may take more
        if "norm" in state or not state["stages"]:
            return real["clip_grad_norm"](*args, **kwargs)
        stages = inspect.signature(real["clip_grad_norm"]).bind(*args, **kwargs).arguments["stages"]
        seams.add_tensors("gradient", stages, gradients=True)
        norm = state["norm"] = real["clip_grad_norm"](*args, **kwargs)
        seams.add("norm", "norm", norm)
        seams.add_tensors("clipped", stages, gradients=True)
        return norm

    def chunk(part, index, *args, **kwargs):
        seams.micro = index
        return forward_one_chunk(part, index, *args, **kwargs)

    ours = dict(
        forward_backward=forward_backward,
        inputs=inputs,
        count_tokens=count_tokens,
        clip_grad_norm=clip_grad_norm,
    )
    with (
        mock.patch.multiple(parallel, **ours),
        mock.patch.object(_PipelineStageBase, "forward_one_chunk", chunk),
    ):
        yield seams
