"""Writing files that survive a power cut, and reading files that anyone may have written."""

import errno
import hashlib
import json
import math
import os
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

# with fullmatch: a folder renamed to old-step-5 is not ours
STEP_FOLDER = re.compile(r"step-(0|[1-9]\d*)")


def json_bytes(value: Any) -> bytes:
    return (json.dumps(value, indent=1) + "\n").encode()


def read_json(*path: str | Path) -> Any:
    """Raises ValueError for a file that is no JSON."""
    file = Path(*path)
    try:
        return json.loads(file.read_bytes())
    except RecursionError:  # thousands of brackets
        raise ValueError(f"RecursionError in {file}") from None


def printable(text: str) -> str:
    """A stranger's text for a terminal: control characters, which could hide or change what is
    there, are written out."""
    # also what turns the direction of writing
    unseen = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]"
    return re.sub(unseen, lambda found: ascii(found[0])[1:-1], text)


def fsync(path: str) -> None:
    """Make a file's content durable, or a folder's names: a rename is on the disk only after fsync
    of the folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        raise OSError(error.errno, error.strerror, path) from None
    finally:
        os.close(descriptor)


def write_file(path: str | Path, content: bytes | memoryview | Iterable[bytes]) -> None:
    """Write the whole file or nothing: under another name, then fsync, then rename. content: bytes,
    or an iterator of bytes."""
    # containers of two machines may have equal pids
    temporary = Path(f"{path}.tmp-{socket.gethostname()}-{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            file.writelines([content] if isinstance(content, bytes | memoryview) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        # a write that fails does not know the name of its file, and the other name says nothing
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with suppress(OSError):
            temporary.unlink()


def check_writable(path: str, flag: str) -> None:
    """Raises ValueError if no file can be written at `path`, in a folder that exists. Asked before a
    long computation whose result goes there."""
    if os.path.isdir(path):
        raise ValueError(f"{flag} {path} is a folder; give the name of a file")
    probe = Path(f"{path}.tmp-{socket.gethostname()}-{os.getpid()}")
    try:
        probe.write_bytes(b"x" * 4096)  # a full disk still has room for a name
        probe.unlink()
    except OSError as error:
        with suppress(OSError):
            probe.unlink()
        raise ValueError(
            f"{flag} {path} cannot be written: {error.strerror}; give a file in another folder"
        ) from None


def free_bytes(path: str) -> float:
    """Bytes that are free where `path` is, or will be made. Infinity where the system does not say."""
    place = os.path.abspath(path)
    while not os.path.lexists(place):
        place = os.path.dirname(place)
    try:
        found = os.statvfs(place)
    except OSError:  # what is wrong there is told by the write itself
        return math.inf
    if not found.f_blocks:  # a file system without a size, as of some stores
        return math.inf
    return found.f_bavail * found.f_frsize


def check_room(path: str, n_bytes: int) -> None:
    """Raises OSError if so many bytes do not fit where `path` is: a write that cannot end would fill
    the disk for all others."""
    free = free_bytes(path)
    if n_bytes > free:
        sizes = f"it takes {n_bytes / 1e6:,.1f} MB, and {free / 1e6:,.1f} MB are free"
        raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {sizes}", path)


def publish(temporary: str, folder: str) -> None:
    """Rename a finished folder of synced files: after a power cut the folder exists as a whole, or
    not at all."""
    fsync(temporary)
    os.rename(temporary, folder)
    fsync(os.path.dirname(os.path.abspath(folder)))


def sha256_file(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# Most bytes that we read of a stranger's file. The largest published files have 9, 33 and 4 MB.
HF_LIMITS = {
    "model.safetensors.index.json": 1 << 26,
    "tokenizer.json": 1 << 26,
    "tokenizer_config.json": 1 << 24,
}
HF_LIMIT = 1 << 20


def hf_file(folder: str, name: str, limit: float = math.inf) -> str:
    """The real path of a file of the folder. Raises ValueError for a name or a link that leads out
    of the folder, or for a file above the limit.

    A link may lead to another file of the folder; in a Hugging Face cache,
    <repo>/snapshots/<revision>/, to <repo>/blobs.
    """
    if not re.fullmatch(r"\w[\w .+=-]*", name):
        raise ValueError(f"{folder}: {name!r} is not the name of a file in this folder")
    path = os.path.join(folder, name)
    home = os.path.realpath(folder)
    homes = [home]
    repo, parent = os.path.split(os.path.dirname(home))
    if parent == "snapshots":
        homes.append(os.path.join(repo, "blobs"))
    real = os.path.realpath(path)
    if os.path.dirname(real) not in homes:
        raise ValueError(
            f"{path} is a link that leads out of the folder, to {real}; put the file itself there"
        )
    if not os.path.isdir(folder):
        from flags.hints import hub_hint  # only mistakes need the file

        raise ValueError(f"{folder} is no folder{hub_hint(folder)}")
    if not os.path.lexists(real):
        raise ValueError(f"{path} is missing")
    if not os.path.isfile(real):
        raise ValueError(f"{path} is no plain file")
    if os.path.getsize(real) > limit:
        raise ValueError(
            f"{path} has {os.path.getsize(real):,} bytes, which is absurd: {limit:,} are the most"
        )
    return real


def check_local(path: str, flag: str) -> None:
    """Raise ValueError for the address of a store: only folders are written, and a folder named s3:
    would appear here."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", str(path)):
        raise ValueError(
            f"{flag} {path}: only folders are written; give a folder of this machine, and copy "
            "from there, such "
            "as each checkpoint with --after_save 'COMMAND {}': docs/cluster.md"
        )


def step_folders(run: str) -> list[tuple[int, str]]:
    """(step, path) of the checkpoints of a run folder, newest first."""
    root = os.path.join(run, "checkpoints")
    if not os.path.isdir(root):
        return []
    found = []
    for name in os.listdir(root):
        match = STEP_FOLDER.fullmatch(name)
        if match:
            found.append((int(match[1]), os.path.join(root, name)))
    return sorted(found, reverse=True)


def matches(patterns: list[str], key: str) -> bool:
    """Whether a pattern names the tensor of key "model.<fqn>" or "optimizer.<fqn>.<name>", or a
    module around the tensor."""
    if key.startswith("model."):
        fqn = key.removeprefix("model.")
    else:
        fqn = key.removeprefix("optimizer.").rpartition(".")[0]
    for pattern in patterns:
        if fnmatchcase(fqn, pattern) or fnmatchcase(fqn, f"{pattern}.*"):
            return True
    return False
