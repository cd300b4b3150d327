"""Record the steps of a training run on every rank: the recording half of --check_parity.

At the end of a step's backward, where the recipe calls parallel.clip_grad_norm: gradients, weights
and buffers. In the forwards: the experts that every token chose. At the beginning of a step, where
the recipe calls parallel.forward_backward: the state that the recipe keeps outside of model and
optimizer. Neither model nor recipe is changed.
"""

import importlib
import inspect
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.pipelining.stage import _PipelineStageBase

import parallel
from distributed.checks import bits_sum
from distributed.layout import local_slice, named_tensors, whole_tensor
from models import moe
from tools.parity.loop_state import state_of_loop
from tools.parity.operations import sequence_keys
from tools.reports.stop_main import do_nothing


class Recorder:
    """The records of one process: a file FOLDER/<step>-<rank>.pt for each step, from 0."""

    def __init__(self, folder: str, save_at):
        self.folder = folder
        self.save_at = save_at
        self.step = 0
        self.stages = []
        self.state = {}  # of the loop, at the beginning of the step
        # experts: names of the layers, sequences of each micro-batch, the current one, and
        # (layer, call, keys of the sequences, scores and choices)
        self.layers = {}
        self.rows = []
        self.micro = 0
        self.choices = []
        self.fp32 = True
        self.rounds = False  # the model casts to bfloat16 or float16 by itself

    def begin(self, stages, batch, layout):
        self.stages = stages
        self.layout = layout
        self.state = state_of_loop(stages)
        self.layers = {}
        for stage in stages:
            for name, module in stage.named_modules():
                if isinstance(module, moe.Balance):
                    self.layers[module] = name
        keys = sequence_keys(batch.tokens, batch.labels)
        size = layout.microbatch_size if layout.pp > 1 else batch.tokens.shape[1]
        self.rows = [keys[i : i + size] for i in range(0, len(keys), size)]
        self.micro = 0
        self.choices = []
        self.fp32 = True
        for stage in stages:
            for p in stage.parameters():
                self.fp32 = self.fp32 and p.dtype == torch.float32

    def note_choice(self, balance, scores, index):
        """scores (N, E) with the bias, index (N, k): records (N, 2E), the scores and 1 at every
        chosen expert."""
        if balance not in self.layers:
            return
        if not (moe.in_forward() and torch.is_grad_enabled()):
            return  # validation, or a forward that is computed again
        scores = (scores + balance.bias).detach().float()
        chosen = torch.zeros_like(scores).scatter_(1, index, 1.0)
        both = torch.cat([scores, chosen], 1).cpu()
        self.choices.append((self.layers[balance], self.rows[self.micro], both))

    def end(self, stages, layout):
        """Write the file of a step: gradients, complete and not yet scaled, and weights, whole, on
        one rank of each pipeline rank; and of every rank buffers, checksums of its own parts of the
        weights, choices and state."""
        gradient = {}
        weight = {}
        trained = []
        buffer = {}
        sums = {}
        has_experts = False
        for stage in stages:
            for fqn, tensor in named_tensors(stage).items():
                if not isinstance(tensor, nn.Parameter):
                    buffer[fqn] = whole(tensor)
                    continue
                if tensor.grad is not None:
                    gradient[fqn] = whole(tensor.grad)
                weight[fqn] = whole(tensor)
                if tensor.requires_grad:
                    trained.append(fqn)
                sums[fqn, local_slice(tensor)] = bits_sum(tensor)
            for module in stage.modules():
                has_experts = has_experts or isinstance(module, moe.Experts)
        step = dict(buffer=buffer, sums=sums)
        if layout.rank % (layout.world_size // layout.pp) == 0:
            step |= dict(gradient=gradient, weight=weight, trained=trained)
        step["about"] = dict(
            rank=layout.rank,
            degrees=layout.degrees,
            choices=self.choices,
            state=self.state,
            rounds=self.rounds,
            has_experts=has_experts,
        )
        os.makedirs(self.folder, exist_ok=True)
        torch.save(step, os.path.join(self.folder, f"{self.step}-{layout.rank}.pt"))
        self.step += 1

    def finish(self):
        """Write the weights after the last step, or nothing before a first."""
        if not self.stages:
            return
        parameters = {}
        for stage in self.stages:
            for fqn, tensor in named_tensors(stage).items():
                if isinstance(tensor, nn.Parameter):
                    parameters[fqn] = tensor
        after = dict(weight={}, sums={})
        for fqn, p in parameters.items():
            after["weight"][fqn] = whole(p)
            after["sums"][fqn, local_slice(p)] = bits_sum(p)
        if self.layout.rank % (self.layout.world_size // self.layout.pp):
            after["weight"] = {}
        torch.save(after, os.path.join(self.folder, f"after-{self.layout.rank}.pt"))


def casts(loss: torch.Tensor) -> bool:
    """Whether the graph behind a loss has tensors in bfloat16 or float16, though parameters and
    loss are in float32."""
    seen = set()
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if any(about.dtype in (torch.bfloat16, torch.float16) for about in node._input_metadata):
            return True
        todo += [following for following, _ in node.next_functions]
    return False


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return whole_tensor(tensor).detach().cpu().clone()


@contextmanager
def all_steps(folder: str, save_at: Collection[int] = ()) -> Iterator[Recorder]:
    """Let the functions of parallel.py, as the recipe calls them, record into the folder. A fork's
    parallel.py may lack some of them. save_at: the steps with a checkpoint."""
    recorder = Recorder(folder, save_at)
    with ExitStack() as patches:
        for owner, name, wrap in (
            (parallel, "forward_backward", record_beginning),
            (parallel, "inputs", record_microbatch),
            (parallel, "clip_grad_norm", record_end),
            (_PipelineStageBase, "forward_one_chunk", record_chunk),
            (moe.Balance, "choose", record_choice),
            (torch.Tensor, "backward", record_casts),
            (find_module("checkpoint", "Checkpoints"), "save", save_some),
            (find_module("generate"), "print_sample", leave_out),
            (find_module("training.metrics", "Metrics"), "close", record_after),
        ):
            real = getattr(owner, name, None)
            if real is not None:
                ours = wraps(real)(wrap(real, recorder))
                patches.enter_context(mock.patch.object(owner, name, ours))
        yield recorder


def find_module(name: str, attribute: str = "") -> Any:
    """A module of the recipe's house, or an attribute of it; None if it cannot be imported."""
    try:
        module = importlib.import_module(name)
    except ImportError:
        return None
    if attribute:
        return getattr(module, attribute, None)
    return module


def record_beginning(real: Callable, recorder: Recorder) -> Callable:
    def forward_backward(stages, batch, layout, *args, **kwargs):
        recorder.begin(stages, batch, layout)
        return real(stages, batch, layout, *args, **kwargs)

    return forward_backward


def record_microbatch(real: Callable, recorder: Recorder) -> Callable:
    def inputs(stage, batch, a, layout):
        recorder.micro = a or 0
        return real(stage, batch, a, layout)

    return inputs


def record_chunk(real: Callable, recorder: Recorder) -> Callable:
    def forward_one_chunk(part, index, *args, **kwargs):
        recorder.micro = index
        return real(part, index, *args, **kwargs)

    return forward_one_chunk


def record_end(real: Callable, recorder: Recorder) -> Callable:
    def clip_grad_norm(*args, **kwargs):  # a fork's may take more
        given = inspect.signature(real).bind(*args, **kwargs).arguments
        recorder.end(given["stages"], given["layout"])
        return real(*args, **kwargs)

    return clip_grad_norm


def record_choice(real: Callable, recorder: Recorder) -> Callable:
    def choose(balance, scores, *args, **kwargs):
        index = real(balance, scores, *args, **kwargs)
        if not torch.compiler.is_compiling():
            recorder.note_choice(balance, scores, index)
        return index

    return choose


def record_casts(real: Callable, recorder: Recorder) -> Callable:
    def backward(loss, *args, **kwargs):
        if recorder.step == 0 and recorder.fp32 and not recorder.rounds:
            recorder.rounds = casts(loss)
        return real(loss, *args, **kwargs)

    return backward


def save_some(real: Callable, recorder: Recorder) -> Callable:
    """Saves only where a run is to be continued: nothing is compared with other checkpoints."""

    def save(checkpoints, step, state, *args, **kwargs):
        return step not in recorder.save_at or real(checkpoints, step, state, *args, **kwargs)

    return save


def record_after(real: Callable, recorder: Recorder) -> Callable:
    def close(metrics):
        recorder.finish()
        return real(metrics)

    return close


def leave_out(real: Callable, recorder: Recorder) -> Callable:
    return do_nothing
