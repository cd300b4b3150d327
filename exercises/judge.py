"""The process that checks one submission. grading.py starts it; the student's code runs in its
workers only.

stdin: a JSON object {nonce, folder, only, clean, limit, memory, alone}. Argument: the number of an
open file. The verdict goes
there, one line: the nonce, then JSON. The nonce is known to this process and to the parent; nothing
else that is printed, and no exit status, is a verdict. The workers import the student's functions
from the folder `clean`; this process has imported the project's own modules before, computes what
is right with them, and compares.
"""

import contextlib
import importlib
import json
import os
import re
import resource
import shutil
import sys
import textwrap
import traceback
from pathlib import Path

import submission
from bugs import BUGS, check_all
from course import COURSE, HERE, HOUSE


def students_lines(text: str, clean: str, planted) -> str:
    """The error of a traceback, and the last line in the student's functions on the way to the
    error."""
    lines = text.strip().splitlines()
    error = next((line for line in reversed(lines) if line[:1].isalpha()), lines[-1])
    for i in reversed(range(len(lines) - 1)):
        if found := re.search(rf'File "{re.escape(clean)}/(\S+)", line (\d+), in (\S+)', lines[i]):
            file = found[1]
            line = int(found[2])
            function = found[3]
            for first, last, begin in planted.places.get(file, []):
                if first <= line <= last:
                    return f"{error}\n    {file}, line {line - first + begin}, in {function}\n    {lines[i + 1].strip()}"
    return error


def without_network() -> bool:
    """Leave the network, where the system allows it; only the loopback device, which gloo needs, is
    there afterwards."""
    if not sys.platform.startswith("linux"):
        return False
    import ctypes
    import fcntl
    import socket
    import struct

    libc = ctypes.CDLL(None, use_errno=True)
    user = os.getuid()
    group = os.getgid()
    # CLONE_NEWNET, for root; others need a user namespace as well
    if libc.unshare(0x40000000) != 0:
        if libc.unshare(0x40000000 | 0x10000000) != 0:
            return False
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        fcntl.ioctl(s, 0x8914, struct.pack("16sh14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP
    return True


def write(planted, clean: Path):
    """A folder that workers see before the project: the planted files, and the packages to which
    some of them belong."""
    for file in planted.files:
        if "/" in file and not (package := clean / file.split("/")[0]).exists():
            shutil.copytree(
                HOUSE / package.name, package, ignore=shutil.ignore_patterns("__pycache__")
            )
    for file, text in planted.files.items():
        (clean / file).write_text(text)


def file_of(module: str) -> str:
    return importlib.import_module(module).__file__


def run_check(state: dict, planted, work: dict) -> tuple[str, str]:
    """(verdict, message). Imports the project first, then lets the workers see the student's files."""
    import feedback
    import pool

    feedback.stuck_s = work["limit"] / 2
    pool.forkserver.set_forkserver_preload(
        ["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "layouts"]
    )
    check = (
        importlib.import_module(COURSE[state["exercise"]].name).check
        if "exercise" in state
        else (BUGS[state["bug"]].check if "bug" in state else check_all)
    )
    modules = [file.removesuffix(".py").replace("/", ".") for file in planted.files]
    for module in modules:
        importlib.import_module(module)
    # For the processes that this one starts: the first is a new interpreter and reads the variable,
    # the others are its copies and get this process's sys.path. This process has imported all that
    # it needs.
    os.environ["PYTHONPATH"] = os.pathsep.join([work["clean"], os.environ["PYTHONPATH"]])
    sys.path.insert(0, work["clean"])
    try:
        for module in modules:
            assert feedback.alone(file_of, module).startswith(work["clean"]), (
                f"the workers have another {module}"
            )
        check()
    except feedback.Wrong as e:
        lines = [
            line if line[:1] == " " else textwrap.fill(line, 106, break_on_hyphens=False)
            for line in str(e).splitlines()
        ]
        return "not yet", "\n".join(lines)  # an indented line is part of a table
    except Exception:
        return "error", "it ends with an error\n" + students_lines(
            traceback.format_exc(), work["clean"], planted
        )
    return "solved", ""


def verdict_on(work: dict) -> tuple[str, str]:
    folder = Path(work["folder"])
    try:
        state = submission.state_of(folder)
        planted = (
            submission.plant(state["exercise"], folder, work["only"])
            if "exercise" in state
            else submission.plant_repair(folder)
        )
    except submission.NotWritten as e:
        return "not yet", str(e)
    except (submission.Refused, ValueError) as e:
        return "refused", str(e)
    write(planted, Path(work["clean"]))
    return run_check(state, planted, work)


def main():
    fd = int(sys.argv[1])
    work = json.loads(sys.stdin.readline())
    os.set_inheritable(fd, False)  # no worker has this file
    sys.stdin.close()
    nonce = work.pop("nonce")
    alone = work["alone"] and without_network()
    if work["memory"]:
        with contextlib.suppress(ValueError, OSError):  # a system that knows no such limit
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**28, 2**28))
            # of each process
            resource.setrlimit(resource.RLIMIT_AS, (work["memory"], work["memory"]))
    verdict, message = verdict_on(work)
    os.write(
        fd, f"{nonce} {json.dumps(dict(verdict=verdict, message=message, alone=alone))}\n".encode()
    )
    os._exit(0)  # the parent ends the workers


if __name__ == "__main__":
    assert str(HERE) in sys.path
    main()
