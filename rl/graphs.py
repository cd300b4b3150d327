"""One CUDA graph for one token of all rows: the forward and the draw, launched as one thing instead of some hundred kernels.

    cache, advance = replay_steps(model, cache, advance, fixed)    # advance(keys, *inputs) -> tuple of tensors

A graph is a list of kernels with the addresses that they read and write. So it reads its inputs from buffers of its own, the
keys and values from the memory that the cache has taken for good, and the weights where they are: nothing is copied, and what
an optimizer or a broadcast writes into the same memory is used by the next replay. What would make it wrong is memory that
moves. A rollout in place gathers or casts the weights anew, so it captures anew: once for each number of rows and bucket of
keys, which costs about three eager steps each. A rank that only samples (rl/generators.py) receives new weights in the memory
of the old ones, and keeps its graphs from step to step.
"""
import warnings
from functools import partial

import torch
from torch import Tensor


def replay_steps(model, cache, advance, fixed: tuple):
    """(cache, an advance that replays graphs). fixed: numbers that a graph holds, besides sizes and addresses.

    Where model.held is a dict, cache and graphs stay there for the next rollout of the same sizes, addresses and numbers.
    """
    held, fixed = getattr(model, "held", {}), (*fixed, cache.rows, cache.max_len, addresses(model))
    if held.get("fixed") == fixed:
        held["cache"].begin_again()
    else:
        held.clear()
        held.update(fixed=fixed, cache=cache, runs={})
    runs = held["runs"]

    def replay(keys: int, *inputs: Tensor):
        shape = len(inputs[0]), keys
        if shape not in runs:
            runs[shape] = captured(partial(advance, keys), inputs, runs)
        return runs[shape](*inputs) if runs[shape] else advance(keys, *inputs)

    return held["cache"], replay


def captured(step, inputs: list[Tensor], runs: dict):
    """run(*inputs) -> what step(*inputs) returns, replayed from a CUDA graph. None, and it is said why, where the step asks the
    device for a value, or does something else that cannot be captured. What lives only within a step is in memory that it
    shares with all of runs."""
    fixed, graph = [x.clone() for x in inputs], torch.cuda.CUDAGraph()
    here, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(here)
    with torch.cuda.stream(side):
        step(*fixed)  # the first time libraries choose kernels and take memory, which a graph cannot hold
        usual = torch.cuda.get_sync_debug_mode()
        try:
            torch.cuda.set_sync_debug_mode("error")  # a capture that fails is harder to leave than a line that waits
            step(*fixed)
            torch.cuda.set_sync_debug_mode(usual)
            # not torch.cuda.graph(), which gives all free memory back to the driver each time
            graph.capture_begin(next((run.pool for run in runs.values() if run), None), capture_error_mode="thread_local")
            try:
                outputs = step(*fixed)
            finally:
                graph.capture_end()
        except RuntimeError as error:
            reason = str(error).splitlines()[0]
            warnings.warn(f"no CUDA graph, new tokens are launched kernel by kernel: {reason}", stacklevel=2)
            return None
        finally:
            torch.cuda.set_sync_debug_mode(usual)
            here.wait_stream(side)

    def run(*inputs: Tensor) -> list[Tensor]:
        for buffer, x in zip(fixed, inputs, strict=True):
            buffer.copy_(x)
        graph.replay()
        return [x.clone() for x in outputs]  # the next replay writes over them

    run.pool = graph.pool()
    return run


def addresses(model) -> list[int]:
    """Addresses of the tensors that the graph reads; if one moves, capture again."""
    unknown = getattr(model, "unknown_ids", None)
    return [t.data_ptr() for t in (*model.parameters(), *model.buffers(), *([] if unknown is None else [unknown]))]
