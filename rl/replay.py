"""A token of all rows as one CUDA graph. Launched one by one, the kernels of a token keep the host
busy several times as long as the GPU (benchmarks/RESULTS.md).

A graph repeats its kernels on the memory of the capture: the weights, the cache of keys and values,
its inputs and its outputs.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flags.config import own_rank
from parallel import all_blocks

# of torch, about what capture() asks for
warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")

# a graph attends to a multiple of so many keys: more keys cost time in each token, and a new graph
# two tokens' time
KEYS = 128


class Replays:
    """Call it as `advance`: replays one graph for each number of rows and keys, or says once why it
    launches kernels.

    advance(keys, *inputs) -> outputs: a number of keys for each row, in ascending order; inputs and
    outputs are tensors. The outputs are overwritten by the next call. In a graph all rows attend to
    as many keys as the longest row: more is read where lengths differ much, and the kernels of rows
    of like lengths are not launched apart.

    within: makes the context in which a graph is captured, such as compiled_blocks().
    """

    def __init__(self, advance, within: Callable[[], Any] = nullcontext):
        self.advance = advance
        self.within = within
        self.graphs = {}
        self.pool = torch.cuda.graph_pool_handle()

    def __call__(self, keys: list[int], *inputs: Tensor):
        shape = len(keys), -(-keys[-1] // KEYS) * KEYS
        if self.graphs is not None and shape not in self.graphs:
            try:
                self.graphs[shape] = self.capture(
                    partial(self.advance, [shape[1]] * len(keys)), inputs
                )
            except RuntimeError as error:
                self.graphs = None
                if own_rank() == 0:
                    warnings.warn(
                        f"sampling without CUDA graphs: {str(error).splitlines()[0]}", stacklevel=2
                    )
        if self.graphs is None:
            return self.advance(keys, *inputs)
        fixed, graph, outputs = self.graphs[shape]
        for buffer, x in zip(fixed, inputs):
            buffer.copy_(x)
        graph.replay()
        return outputs

    def capture(self, step, inputs: tuple[Tensor, ...]):
        """(inputs, graph, outputs) of step. Raises RuntimeError if the host waits for the device in
        it, as for the number of rows of an expert, or if a replay gives something else."""
        fixed = [x.clone() for x in inputs]
        graph = torch.cuda.CUDAGraph()
        usual = torch.cuda.get_sync_debug_mode()
        # such a wait would break a capture in a way that is hard to leave
        torch.cuda.set_sync_debug_mode("error")
        try:
            launched = step(*fixed)  # the first time libraries choose kernels and take memory
        finally:
            torch.cuda.set_sync_debug_mode(usual)
        # thread_local: rewards and tools of other threads may use the GPU meanwhile
        with self.within():
            if self.within is not nullcontext:
                step(*fixed)  # the compiler asks the device how fast its kernels are
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                outputs = step(*fixed)
        graph.replay()
        # not to the last bit: a matrix product may add up in another order
        if (
            torch.stack([(a - b).abs() > 0.1 for a, b in zip(launched, outputs)]).any(0).sum()
            > len(outputs[0]) / 2
        ):
            raise RuntimeError("replayed tokens differ from launched ones")
        return fixed, graph, outputs


@contextmanager
def compiled_blocks(model: nn.Module) -> Iterator[None]:
    """Inside, each block is compiled up to its attention and from there on. Attention is not: its
    shapes, and so its kernels, change with the number of keys. All blocks share one compilation,
    and the second number of rows is the last that compiles.

    As in training, of a block with experts only attention's part is compiled.
    """
    parts = []
    for block in all_blocks(model).values():
        if hasattr(block, "moe"):
            parts.append(block.attn)
        else:
            parts.append(block)
    # what a flag has put in the place of the class's function: --ac, and --compile for training
    usual = [vars(part).get("forward") for part in parts]
    for part in parts:
        part.forward = partial(call_compiled, torch.compile(type(part).forward), part)
    try:
        with torch.compiler.set_stance("default"):
            yield
    finally:
        for part, forward in zip(parts, usual):
            del part.forward
            if forward is not None:
                part.forward = forward


def call_compiled(forward: Callable[..., Any], part: nn.Module, *inputs: Any) -> Any:
    """forward(part, *inputs), compiled but for the functions among the inputs: the attention."""
    given = []
    for x in inputs:
        if callable(x):
            x = torch.compiler.disable(x)
        given.append(x)
    return forward(part, *given)
