"""Refuses --float8 where the device cannot compute it. Only runs with --float8 load this file."""

from collections.abc import Iterator
from typing import Any

import torch


def float8_rows(cfg: Any, on_cuda: bool) -> Iterator[tuple[Any, str]]:
    capability = (0, 0)
    if on_cuda:
        capability = torch.cuda.get_device_capability()
    yield (
        on_cuda and capability < (8, 9),
        (
            f"--float8 {cfg.float8} needs a GPU of capability 8.9 (H100: 9.0, B200: 10.0), and "
            f"this one has {capability[0]}."
            f"{capability[1]}; use --float8 off"
        ),
    )
    yield (
        not on_cuda and cfg.compile,
        f"--float8 {cfg.float8} is emulated on CPU and cannot be compiled; leave out --compile",
    )
