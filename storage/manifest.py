"""Which step folders a run has, and whether they are whole: manifest.json lists the size and crc32 of every file in one.

A disk that flips a bit in a tensor is noticed here; torch's distributed checkpoint loads it without an error.
"""
import hashlib
import json
import os
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from distributed.agree import Failed
from support.files import STEP_FOLDER, fsync, hub_hint, json_bytes, read_json, step_folders, write_file

FORMAT_VERSION = 2
TABLE = "tensors.json"  # which tensors there are, and where their shards are
READ = (".json", ".jinja", ".py", ".distcp", ".safetensors", ".bin", ".model")  # what might be taken for a part of it
ABOUT = ("state.json", "config.json")  # what a start reads of a step folder before its tensors


class Damaged(ValueError):
    """A step folder is not as it was written; says which file and how."""


def is_hf_folder(folder: str) -> bool:
    """Whether it holds weights as Hugging Face keeps them. Pickled ones (.bin) count, too: reading them gives the reason why
    they are refused."""
    weights = [f"{stem}{end}" for stem in ("model.safetensors", "pytorch_model.bin") for end in ("", ".index.json")]
    ours, *theirs = (os.path.lexists(os.path.join(folder, name)) for name in ("manifest.json", *weights))
    return folder != "" and any(theirs) and not ours


# --- One step folder ---
def own_hash(manifest: dict) -> str:
    return hashlib.sha256(json_bytes({k: v for k, v in manifest.items() if k != "sha256"})).hexdigest()


def write_manifest(folder: str, files: dict[str, list], **about):
    """files: {name: [bytes, crc32]}, as checksums() returns it; about: what `checkpoint.py ls` shows."""
    manifest = dict(format_version=FORMAT_VERSION, **about, files=files)
    write_file(Path(folder, "manifest.json"), json_bytes(manifest | {"sha256": own_hash(manifest)}))


def read_manifest(folder: str) -> dict:
    """The manifest of a step folder whose files are all there, in their sizes, and no others. Raises Damaged."""
    try:
        raw = Path(folder, "manifest.json").read_bytes()
        manifest = json.loads(raw)
        # Bytes are compared, not only values: some flipped bits change the text of a JSON file and nothing that it says.
        if raw != json_bytes(manifest) or manifest["sha256"] != own_hash(manifest):
            raise Damaged("manifest.json is not as it was written")
        if manifest["format_version"] != FORMAT_VERSION:
            raise Damaged(f"it is of format {manifest['format_version']} and this code reads {FORMAT_VERSION}; with the code "
                          "that wrote it, python checkpoint.py to_hf exports its weights")
        named = STEP_FOLDER.fullmatch(os.path.basename(os.path.abspath(folder)))
        if named and int(named[1]) != manifest["step"]:
            raise Damaged(f"its manifest.json is that of step {manifest['step']}")
        files = manifest["files"]
        for name in sorted(set(os.listdir(folder)) ^ {*files, "manifest.json"}):
            if name in files or name.endswith(READ):
                raise Damaged(f"{name} is missing" if name in files else f"{name} is not in manifest.json")
        for name, (size, _) in files.items():
            path = os.path.join(folder, name)
            if os.path.islink(path) or not os.path.isfile(path) or os.path.getsize(path) != size:
                raise Damaged(f"{name} is not a plain file of {size} bytes")
    except OSError as error:
        raise Damaged(f"{os.path.basename(error.filename or folder)}: {error.strerror}") from None
    except Damaged:
        raise
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise Damaged("manifest.json is not as it was written") from None
    return manifest


def strangers(folder: str, manifest: dict) -> list[str]:
    """Files that somebody has put into a step folder, and that nobody reads: a note, or what a network file system leaves."""
    return sorted(set(os.listdir(folder)) - {*manifest["files"], "manifest.json"})


def saved_state(path: str) -> dict:
    """What save() was given. Raises ValueError where it is no place in a run."""
    state = read_json(path, "state.json")["state"]
    numbers = [state.get(name, 0) for name in ("step", "samples", "tokens")] if isinstance(state, dict) else [-1]
    if not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise ValueError(f"{path}/state.json: {json.dumps(state)[:100]} is no place in a run")
    return state


def checksums(folder: str, names: list[str], progress=lambda n_bytes: None, sync=False) -> dict[str, list]:
    """{name: [bytes, crc32 in hex]}, four files at a time: zlib lets go of Python's lock while it works.

    sync: also make their contents durable; the disk and the processor work side by side.
    """

    def checksum(name):
        size, crc, buffer = 0, 0, memoryview(bytearray(1 << 22))
        with open(os.path.join(folder, name), "rb", buffering=0) as f:
            while n := f.readinto(buffer):
                size, crc = size + n, zlib.crc32(buffer[:n], crc)
                progress(n)
        return [size, f"{crc:08x}"]

    with ThreadPoolExecutor(4) as pool, ThreadPoolExecutor(4) as disk:
        synced = disk.map(fsync, [os.path.join(folder, name) for name in names] if sync else [])
        found = dict(zip(names, pool.map(checksum, names)))
        list(synced)  # raises what went wrong there
    return found


def check_files(folder: str, manifest: dict, names: list[str], progress=lambda n_bytes: None):
    """Reads these files of a step folder; raises Damaged where a single bit is not as written."""
    try:
        found = checksums(folder, names, progress)
    except OSError as error:
        raise Damaged(f"{os.path.basename(error.filename or folder)}: {error.strerror}") from None
    for name, entry in found.items():
        if entry != manifest["files"][name]:
            raise Damaged(f"{name} has crc32 {entry[1]} instead of {manifest['files'][name][1]}")


def verify(folder: str) -> dict:
    """The manifest of a step folder in which every byte of every file is as written. Raises Damaged."""
    manifest = read_manifest(folder)
    check_files(folder, manifest, [*manifest["files"]])
    return manifest


# --- The best step folder of a run ---
def candidates(folder: str, step: int = -1) -> list[str]:
    """The step folders to try, best first: all of a run folder, or that of `step`; or the step folder that `folder` is."""
    if os.path.isfile(os.path.join(folder, "manifest.json")):
        return [folder]
    found = dict(step_folders(folder))
    if step >= 0 and step not in found:
        raise ValueError(f"{folder} has no checkpoint of step {step}; it has the steps {', '.join(map(str, found)) or 'none'}")
    if not found:
        what = "holds no checkpoint" if os.path.isdir(folder) else "is no folder"
        raise ValueError(f"{folder} {what}; give a run folder, or one of its folders checkpoints/step-N{hub_hint(folder)}")
    return [found[step]] if step >= 0 else list(found.values())


def restarted() -> bool:
    """torchrun or Slurm started this job again: same command line, but it must go on from its newest checkpoint."""
    return any(os.environ.get(name, "0") != "0" for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))


class Source(NamedTuple):
    """What a run starts from, where that is a checkpoint of ours."""

    folder: str  # a run folder or a step folder
    step: int  # -1: the newest
    everything: bool  # also the optimizer state, the step and the data cursor; else only the weights


def resume_source(out: str, cfg) -> Source | None:
    """The run folder `out` itself, once it has checkpoints; else --init_from. None: no checkpoint of ours."""
    step = -1 if restarted() else cfg.load_step
    if step >= 0 or step_folders(out):
        return Source(out, step, True)
    if cfg.init_from and not is_hf_folder(cfg.init_from):
        return Source(cfg.init_from, -1, not cfg.init_model_only)
    return None


def newest_good(folder: str, paths: list[str], check, say=lambda text: None) -> tuple[str, dict]:
    """(path, manifest) of the first of these step folders of `folder` that check(path) returns a manifest for.

    Raises ValueError where all are damaged: to begin again at step 0 would overwrite what may still be rescued.
    """
    damaged = {}
    for path in paths:
        try:
            return path, check(path)
        except (Damaged, Failed) as error:
            say(f"{path} is DAMAGED: {error}")
            damaged[os.path.basename(path)] = error
    names, (newest, why) = ", ".join([*damaged][:3]) + ", ..." * (len(damaged) > 3), next(iter(damaged.items()))
    raise ValueError(f"{folder} has no undamaged checkpoint among {names} ({newest}: {why}); nothing begins again at step 0 "
                     "over them: use --out NEW or another --load_step, or move them away")


def newest_readable(folder: str, step: int = -1, names=()) -> str:
    """The newest checkpoint whose small files (those of `names`, or all but the tensors) are as written. Raises ValueError.

    Every rank of a start calls it, several times, so it reads what is needed and no more: a tokenizer has megabytes.
    """

    def check(path):
        manifest = read_manifest(path)
        check_files(path, manifest, [name for name in manifest["files"] if
                                     (name in names if names else not name.startswith((TABLE, "__")))])
        return manifest

    return newest_good(folder, candidates(folder, step), check)[0]
