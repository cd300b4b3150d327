"""The seams of one step of tests/layouts.py's problem, on the pool's workers: --check_parity --where without a command."""
import io
from contextlib import nullcontext
from unittest import mock

import layouts
import torch
from pool import pool

from tools.operations import seams_of_a_step
from tools.where import first_difference_of


def step_with_seams(model_config, flags, n, local_batch_size, doc_mask=False, mutate=None) -> bytes:
    """On a rank of the pool. As bytes: thousands of shared tensors would need as many open files."""
    with mutate() if mutate else nullcontext(), mock.patch.object(layouts, "n_steps", lambda config: 1):
        with seams_of_a_step() as seams:
            layouts.run_steps(model_config, flags, n, local_batch_size, doc_mask)
            seams.finish()
    buffer = io.BytesIO()
    torch.save(seams.found(), buffer)
    return buffer.getvalue()


def where(processes: int, flags: dict, problem: dict, mutate=None) -> str:
    """The report: "no difference at N seams ..." or "first difference: ..."."""
    problem = dict(problem)
    n, b, doc = problem.pop("n"), problem.pop("b"), problem.pop("doc", False)
    config = layouts.config(**problem)
    one = pool(1).run(step_with_seams, config, {}, n, n, doc)
    layout = pool(processes).run(step_with_seams, config, flags, n, b, doc, mutate)
    read = lambda ranks: [torch.load(io.BytesIO(rank), weights_only=True) for rank in ranks]  # noqa: E731
    return first_difference_of(read(one), read(layout))[0]
