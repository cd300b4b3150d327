"""Finds the step folders of a run and checks them: manifest.json lists the size and crc32 of every file in a step folder.

If a disk flips a bit in a tensor, the crc32 shows it; torch's distributed checkpoint loads the tensor without an error.
"""
import hashlib
import json
import os
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from distributed.agree import Failed
from support.files import STEP_FOLDER, fsync, hub_hint, json_bytes, read_json, step_folders, write_file

FORMAT_VERSION = 3
TABLE = "tensors.json"  # names, dtypes and shapes of all tensors, and the places of all shards
READ = (".json", ".jinja", ".py", ".distcp", ".safetensors", ".bin", ".model")  # an unlisted file of these kinds is refused
ADAPTER = "adapter_config.json"  # of peft, beside adapter_model.safetensors
ABOUT = ("state.json", "config.json")  # files of a step folder read at a start, before the tensors


class Damaged(ValueError):
    """A step folder has changed since the save. The message names the file and the change."""


def is_hf_folder(folder: str) -> bool:
    """Whether the folder holds weights in Hugging Face's format, or a PEFT adapter beside such weights. Pickled weights (.bin)
    count, too: a later reader refuses them with the reason."""
    weights = [f"{stem}{end}" for stem in ("model.safetensors", "pytorch_model.bin") for end in ("", ".index.json")]
    ours, *theirs = (os.path.lexists(os.path.join(folder, name)) for name in ("manifest.json", ADAPTER, *weights))
    return folder != "" and any(theirs) and not ours


# --- One step folder ---
def own_hash(manifest: dict) -> str:
    return hashlib.sha256(json_bytes({k: v for k, v in manifest.items() if k != "sha256"})).hexdigest()


def write_manifest(folder: str, files: dict[str, list], **about):
    """files: {name: [bytes, crc32]}, from checksums(). about: values shown by `checkpoint.py ls`."""
    manifest = dict(format_version=FORMAT_VERSION, **about, files=files)
    write_file(Path(folder, "manifest.json"), json_bytes(manifest | {"sha256": own_hash(manifest)}))


def read_manifest(folder: str, is_wanted=None) -> dict:
    """The manifest of a step folder. Raises Damaged if a file is missing, unlisted or of another size; reads no content.

    is_wanted: name -> whether to look for this file, and for no other: with a file per rank, looking takes long."""
    try:
        raw = Path(folder, "manifest.json").read_bytes()
        manifest = json.loads(raw)
        # Compare bytes, not only values: some flipped bits change the text of a JSON file but no value.
        if raw != json_bytes(manifest) or manifest["sha256"] != own_hash(manifest):
            raise Damaged("manifest.json is not as it was written")
        if manifest["format_version"] != FORMAT_VERSION:
            raise Damaged(f"it is of format {manifest['format_version']} and this code reads {FORMAT_VERSION}; with the code "
                          "that wrote it, python checkpoint.py to_hf exports its weights")
        named = STEP_FOLDER.fullmatch(os.path.basename(os.path.abspath(folder)))
        if named and int(named[1]) != manifest["step"]:
            raise Damaged(f"its manifest.json is that of step {manifest['step']}")
        files = {name: entry for name, entry in manifest["files"].items() if is_wanted is None or is_wanted(name)}
        for name in sorted(set(os.listdir(folder)) ^ {*files, "manifest.json"}) if is_wanted is None else ():
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


def saved_state(path: str) -> dict:
    """The `state` given to save(). Raises ValueError unless step, samples and tokens are numbers of a real run."""
    state = read_json(path, "state.json")["state"]
    numbers = [state.get(name, 0) for name in ("step", "samples", "tokens")] if isinstance(state, dict) else [-1]
    if not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise ValueError(f"{path}/state.json: {json.dumps(state)[:100]} is no place in a run")
    return state


class Progress:
    """Prints every few seconds how much of a long work is done. Call with the size of each finished part. unit: of `total`, as
    text, and how many make one; say: prints, on one rank."""

    def __init__(self, text: str, total: int, say, unit=("GB per rank", 1e9)):
        self.text, self.total, self.say, self.unit, self.done, self.said = text, total, say, unit, 0, time.perf_counter()

    def __call__(self, size: int):
        self.done += size
        if time.perf_counter() - self.said > 5:
            self.said, (name, scale) = time.perf_counter(), self.unit
            self.say(f"{self.text}: {min(self.done / self.total, 1):.0%} of {self.total / scale:,.4g} {name}")


def checksums(folder: str, names: list[str], progress=lambda n_bytes: None, sync=False) -> dict[str, list]:
    """{name: [bytes, crc32 in hex]}, four files at a time: zlib works without Python's lock.

    sync: also make the contents durable; the disk and the processor work side by side.
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
        list(synced)  # raises the errors of fsync
    return found


def check_files(folder: str, manifest: dict, names: list[str], progress=lambda n_bytes: None):
    """Reads the files `names` of a step folder. Raises Damaged if a single bit has changed."""
    try:
        found = checksums(folder, names, progress)
    except OSError as error:
        raise Damaged(f"{os.path.basename(error.filename or folder)}: {error.strerror}") from None
    for name, entry in found.items():
        if entry != manifest["files"][name]:
            raise Damaged(f"{name} has crc32 {entry[1]} instead of {manifest['files'][name][1]}")


def verify(folder: str) -> dict:
    """The manifest of a step folder, after a check of every byte of every file. Raises Damaged."""
    manifest = read_manifest(folder)
    check_files(folder, manifest, [*manifest["files"]])
    return manifest


# --- The best step folder of a run ---
def candidates(folder: str, step: int = -1) -> list[str]:
    """The step folders to try, newest first: all of a run folder, or only `step`; or `folder` itself, if a step folder."""
    if os.path.isfile(os.path.join(folder, "manifest.json")):
        return [folder]
    found = dict(step_folders(folder))
    if step >= 0 and step not in found:
        raise ValueError(f"{folder} has no checkpoint of step {step}; it has the steps {', '.join(map(str, found)) or 'none'}")
    if not found:
        what = "holds no checkpoint" if os.path.isdir(folder) else "is no folder"
        raise ValueError(f"{folder} {what}; give a run folder, or one of its folders checkpoints/step-N{hub_hint(folder)}")
    return [found[step]] if step >= 0 else list(found.values())



class Source(NamedTuple):
    """A checkpoint of ours to start from."""

    folder: str  # a run folder or a step folder
    step: int  # -1: the newest
    everything: bool  # load optimizer state, step and data cursor, too; else only the weights


def resume_source(out: str, cfg) -> Source | None:
    """The run folder `out`, if checkpoints exist there; else --init_from. None: no checkpoint of ours."""
    counts = (os.environ.get(name, "0") for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"))
    step = -1 if any(count != "0" for count in counts) else cfg.load_step  # after a restart: the newest, not the flag's
    if step >= 0 or step_folders(out):
        return Source(out, step, True)
    if cfg.init_from and not is_hf_folder(cfg.init_from):
        return Source(cfg.init_from, -1, not cfg.init_model_only)
    return None


def newest_good(folder: str, paths: list[str], check, say) -> tuple[str, dict]:
    """(path, manifest) of the first undamaged step folder in `paths`. check(path) returns the manifest or raises Damaged.

    Raises ValueError if all are damaged: a run that began again at step 0 would overwrite files that can still be rescued.
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


def newest_readable(folder: str, step: int = -1, names=(), say=lambda text: None) -> str:
    """The newest checkpoint with undamaged small files (`names`, or all but the tensors). Raises ValueError.

    At a start every rank calls this several times, so no other file is looked at: a tokenizer has megabytes, and a large run a
    file of tensors for each rank.
    """

    def is_wanted(name):
        return name in names if names else not name.startswith((TABLE, "__"))

    def check(path):
        manifest = read_manifest(path, is_wanted)
        check_files(path, manifest, [*filter(is_wanted, manifest["files"])])
        return manifest

    return newest_good(folder, candidates(folder, step), check, say)[0]
