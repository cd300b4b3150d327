"""Reads the commands that a text publishes."""

import math
import re
import shlex

from distributed.layout import AXES


def commands_in(text: str) -> list[str]:
    found = []
    for line in text.replace("\\\n", "").splitlines():
        if re.match(r"\s*(python|torchrun) ", line):
            found.append(line.strip())
    return found


def split_command(command: str) -> tuple[int, str, list[str]]:
    """(processes, script, its arguments). Of more than four processes, only as many as the degrees
    need, or two."""
    program, *args = shlex.split(command)
    if program == "python":
        return 1, args[0], args[1:]
    processes = int(args.pop(args.index("--nproc_per_node") + 1))
    args.remove("--nproc_per_node")
    if processes > 4:
        processes = max(
            2,
            math.prod(
                int(args[args.index(f"--{axis}") + 1]) for axis in AXES if f"--{axis}" in args
            ),
        )
    return processes, args[0], args[1:]
