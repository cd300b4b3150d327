"""Writes Hugging Face folders: save_hf, and write_hf for tensors that are read one by one. Each rank
writes some of the files."""

import json
import math
import os
import shutil
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from corpus.beside import files_beside
from corpus.special import SpecialIds
from corpus.tokenizer import load_tokenizer
from distributed.agree import brief, fail_together, gather, new_gloo_group, on_rank_0, rank_in
from distributed.layout import named_tensors, reshard
from flags.files import check_local, check_room, fsync, json_bytes, publish, write_file
from storage.hf_config import check_same_model
from storage.source_tokenizer import ids_of_folder

NO_IDS = SpecialIds(None, [], None)


def own_group(
    modules: list[nn.Module], group: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    """`group`, or a new group of all ranks if the model is sharded; None if this process holds the
    whole model."""
    if group is not None:
        return group
    for module in modules:
        for tensor in named_tensors(module).values():
            if hasattr(tensor, "placements"):
                return new_gloo_group("hugging face")
    return None


def check_export(folder: str) -> None:
    """Raises ValueError when no export can be written to the folder."""
    check_local(folder, "to export to")
    if os.path.lexists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise ValueError(
            f"{folder} is there already and not an empty folder; export to another, or remove it"
        )
    parent = Path(os.path.abspath(folder))
    while not os.path.lexists(parent):
        parent = parent.parent
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK):
        raise ValueError(f"{folder} cannot be made: {parent} is no folder to write to")


def check_export_of(Model: type, config: Any, folder: str, dtype: str) -> None:
    """Raises ValueError if hf_keys() does not name each tensor that an export writes, or if they do
    not fit on the disk: before a training, not after."""
    with torch.device("meta"):
        model = Model(config)
    n_bytes = sum(p.numel() for p in model.parameters()) * getattr(torch, dtype).itemsize
    try:
        check_room(folder, n_bytes)
    except OSError as error:
        raise ValueError(f"--export_hf {folder}: {error.strerror}; give another folder") from None
    kinds = file_kinds(named_tensors(model), model, torch.float32)
    if odd := sorted(kinds.keys() ^ model.hf_keys().keys()):
        raise ValueError(
            f"--export_hf: hf_keys() of {Model.__name__} and the model's parameters differ in "
            f"{brief(odd)}; add what is missing to hf_keys(), or leave out --export_hf"
        )


# --- Which rank writes which tensors to which file ---
class HFEntry(NamedTuple):
    """A tensor of a file to write."""

    fqn: str
    name: str
    expert: int | None  # index in the stack `fqn`
    dtype: torch.dtype
    size: int  # bytes


def plan_files(
    names: dict, everyone: list[dict], max_bytes: float
) -> list[tuple[list[int], int, list[HFEntry]]]:
    """Assigns the tensors to files and the files to ranks. everyone: {fqn: (shape, dtype)} of every
    rank.

    Returns of each file (ranks with the tensors, which gather together; the rank among them that
    writes; the tensors). Ranks with the same fqns, a pipeline stage, share the stage's files. A
    tensor of two stages (a tied embedding) is written by the first stage.
    """
    owner = {}  # fqn -> the lowest rank with the tensor
    stages = {}  # fqns of a pipeline stage -> the ranks with the stage
    for rank, kinds in enumerate(everyone):
        stages.setdefault(tuple(kinds), []).append(rank)
        for fqn in kinds:
            owner.setdefault(fqn, rank)
    if odd := sorted(owner.keys() ^ names.keys()):
        raise ValueError(f"hf_keys() and the model's parameters differ in {brief(odd)}")
    files = []
    for stage, ranks in stages.items():
        entries = []
        for fqn in stage:
            if owner[fqn] == ranks[0]:
                entries += list_entries(fqn, names[fqn], *everyone[ranks[0]][fqn])
        cut = cut_into_files(entries, max_bytes)
        # writers, far apart: one machine has one disk and network card
        n_writers = min(len(cut), len(ranks))
        for i, of_file in enumerate(cut):
            writer = ranks[i % n_writers * len(ranks) // n_writers]
            files.append((ranks, writer, of_file))
    return files


def list_entries(
    fqn: str, name: str | list[str], shape: tuple, dtype: torch.dtype
) -> list[HFEntry]:
    """The tensors that a parameter is in the files: one, or one for each expert of a stack."""
    if isinstance(name, str):
        return [HFEntry(fqn, name, None, dtype, math.prod(shape) * dtype.itemsize)]
    size = math.prod(shape) // len(name) * dtype.itemsize
    return [HFEntry(fqn, of_expert, i, dtype, size) for i, of_expert in enumerate(name)]


def cut_into_files(entries: list[HFEntry], max_bytes: float) -> list[list[HFEntry]]:
    """The entries in order, at most max_bytes in a file; a larger tensor has a file of its own."""
    files = []
    full = 0  # bytes of the last file
    for entry in entries:
        if not files or full + entry.size > max_bytes:
            files.append([])
            full = 0
        files[-1].append(entry)
        full += entry.size
    return files


def write_safetensors(path: str, entries: list[HFEntry], tensors: dict[str, Tensor]) -> None:
    """Writes a file of these entries. tensors: {fqn: whole tensor, or stack of experts}, in CPU
    memory."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    found = {}
    for e in entries:
        tensor = tensors[e.fqn]
        if e.expert is not None:
            tensor = tensor[e.expert]
        found[e.name] = tensor.contiguous()
        if e.dtype == torch.float16 and not tensor.isfinite().all():
            raise ValueError(f"{e.fqn} has numbers beyond float16's 65504; export it as bfloat16")
    # older versions of transformers refuse files without metadata
    try:
        save_file(found, path, {"format": "pt"})
    except SafetensorError as error:  # says neither the file nor that this is no fault of ours
        raise OSError(f"{path} could not be written: {error}") from None
    fsync(path)


def write_hf(
    folder: str,
    config: Any,
    names: dict,
    kinds: dict,
    whole,
    max_shard_gb: float,
    tokenizer_file: str | None = None,
    group: dist.ProcessGroup | None = None,
    quiet: bool = False,
    check: Callable[[str], None] | None = None,
    generation: dict | None = None,
    card: str = "",
) -> None:
    """Writes a Hugging Face folder; every rank of `group` calls. kinds: {fqn: (shape, dtype in the
    file)} of this rank. check: rank 0 calls it with the finished folder, before the folder gets its
    name; what it raises refuses the export. generation: generation_config.json, with the ids of
    config.json, too; None: from the tokenizer's folder. card: README.md; "": none.

    whole(fqn) gathers a tensor in the file's dtype; all ranks with the fqn call in the same order.
    A rank writes a file in the background while the next tensors are gathered, and so holds at most
    two files in CPU memory.
    """
    from flags.progress import Progress

    began = time.perf_counter()
    own_temporary = f"{os.path.abspath(folder)}.tmp-{uuid.uuid4().hex[:8]}"

    def make_temporary():
        check_export(folder)
        os.makedirs(own_temporary)
        return own_temporary

    temporary = on_rank_0(make_temporary, group)
    everyone = gather(kinds, group)
    rank = rank_in(group)

    def plan_and_ask():
        plan = plan_files(names, everyone, max_shard_gb * 1e9)
        if rank == 0:
            n_bytes = 0
            for _, _, entries in plan:
                n_bytes += sum(entry.size for entry in entries)
            check_room(folder, n_bytes)
        return plan

    writing = []  # this rank's files, under way

    def finish_files():
        for future in writing:
            future.result()

    try:
        plan = fail_together(plan_and_ask, group)
        files = name_files(plan)
        with (
            ThreadPoolExecutor(1) as pool,
            Progress(f"writing {folder}", len(kinds), "tensors") as progress,
        ):
            for title, (ranks, writer, entries) in files.items():
                if rank not in ranks:
                    continue
                tensors = {}
                for fqn in dict.fromkeys(e.fqn for e in entries):
                    tensor = whole(fqn)
                    if rank == writer:
                        tensors[fqn] = tensor.cpu()
                    del tensor  # before the next is gathered
                    progress()
                if rank == writer:
                    wait(writing[-1:])
                    path = os.path.join(temporary, title)
                    writing.append(pool.submit(write_safetensors, path, entries, tensors))
        fail_together(finish_files, group)
        written = {title: entries for title, (_, _, entries) in files.items()}
        size = on_rank_0(
            lambda: commit_export(
                temporary, folder, config, written, tokenizer_file, check, generation, card
            ),
            group,
        )
    finally:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # leftovers of a failure
    if rank == 0 and not quiet:
        seconds = time.perf_counter() - began
        of_weights = {str(dtype).removeprefix("torch.") for _, dtype in kinds.values()}
        print(
            f"checkpoint: exported {folder} in {' and '.join(sorted(of_weights))} ({len(files)} "
            f"files, {size / 1e6:.1f} MB in {seconds:.2f} s)",
            flush=True,
        )


def name_files(plan: list[tuple]) -> dict[str, tuple]:
    """{file name: (ranks, writer, entries)} of plan_files' result."""
    if len(plan) == 1:
        return {"model.safetensors": plan[0]}
    return {f"model-{i + 1:05}-of-{len(plan):05}.safetensors": file for i, file in enumerate(plan)}


def commit_export(
    temporary: str,
    folder: str,
    config: Any,
    entries: dict[str, list[HFEntry]],
    tokenizer_file: str | None,
    check: Callable[[str], None] | None = None,
    generation: dict | None = None,
    card: str = "",
) -> int:
    """Adds the other files, lets check() look, and renames the folder (rank 0). Returns the bytes of
    all tensors."""
    if unseen := sorted(entries.keys() - set(os.listdir(temporary))):
        raise OSError(
            f"rank 0 does not see {brief(unseen)}: {folder} must be on a file system that all "
            "machines share"
        )
    size = 0
    dtypes = []
    weight_map = {}
    for title, found in entries.items():
        for entry in found:
            size += entry.size
            dtypes.append(str(entry.dtype).removeprefix("torch."))
            weight_map[entry.name] = title
    extra = {}
    ids = NO_IDS
    if tokenizer_file:
        extra, ids = tokenizer_files(tokenizer_file, config.max_seq_len)
    sampling = generation
    if sampling is None:  # from the tokenizer's folder
        sampling = json.loads(extra.get("generation_config.json", b"{}")) | ids.for_config()
    # written even if null: a missing id would be 1 or 2 in transformers
    ends = {name: sampling.get(name) for name in NO_IDS.for_config()}
    most = max(dtypes, key=dtypes.count)
    extra["config.json"] = json_bytes(config.to_hf() | ends | {"torch_dtype": most})
    extra["generation_config.json"] = json_bytes(sampling | ends)
    if len(entries) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": weight_map}
        extra["model.safetensors.index.json"] = json_bytes(index)
    if card:
        extra["README.md"] = card.encode()
    for name, content in extra.items():
        write_file(Path(temporary, name), content)
    if check is not None:
        check(temporary)
    publish(temporary, folder)
    return size


def tokenizer_files(file: str, max_seq_len: int) -> tuple[dict[str, bytes], SpecialIds]:
    """({name: content} of the tokenizer's files, the ids that begin, end and pad a text)."""
    rules = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": max_seq_len}
    ids = NO_IDS
    try:
        of_folder = ids_of_folder(os.path.dirname(file))
        rules["eos_token"] = load_tokenizer(Path(file)).id_to_token(of_folder.ends[0])
        ids = of_folder
    except ValueError:
        pass  # no file of the folder names an end
    rules["clean_up_tokenization_spaces"] = False
    found = {"tokenizer_config.json": json_bytes(rules)}
    return found | files_beside(file) | {"tokenizer.json": Path(file).read_bytes()}, ids


# --- A model in memory ---
def file_kinds(tensors: dict[str, Tensor], module: Any, dtype: torch.dtype) -> dict[str, tuple]:
    """fqn -> (shape, dtype in the file): parameters in `dtype`, buffers unchanged, buffers without
    an HF name left out."""
    keys = module.hf_keys()
    kinds = {}
    for fqn, tensor in tensors.items():
        if isinstance(tensor, nn.Parameter):
            kinds[fqn] = (tuple(tensor.shape), dtype)
        elif fqn in keys:
            kinds[fqn] = (tuple(tensor.shape), tensor.dtype)
    return kinds


def say_lost(folder: str, fqns: list[str]) -> None:
    if fqns:
        print(
            f"checkpoint: {folder} has no place for {brief(fqns)}: without them that model is not "
            "quite this one",
            flush=True,
        )


@torch.no_grad()
def save_hf(
    model,
    folder: str,
    dtype: torch.dtype = torch.bfloat16,
    max_shard_gb: float = 5.0,
    tokenizer_file: str | None = None,
    group: dist.ProcessGroup | None = None,
    quiet: bool = False,
    check: Callable[[str], None] | None = None,
    generation: dict | None = None,
    card: str = "",
) -> None:
    """Writes a model as a Hugging Face folder for transformers: weights in `dtype`, buffers
    unchanged. If a linear layer has a method merged(), as with LoRA (lora/lora.py), the merged
    matrix is written.

    model: plain (call on one rank), or sharded by parallel.py, or the list of this rank's pipeline
    stages (call on all ranks). check, generation, card: see write_hf. Raises ValueError, the same on all
    ranks, and then leaves `folder` unchanged.
    """
    modules = model if isinstance(model, list) else [model]
    tensors = {}
    adapted = {}  # fqn of a weight -> the linear with the method merged()
    adapters = set()  # fqns of the parameters that merged() adds to the weight
    for module in modules:
        reshard(module)  # FSDP may still hold gathered weights older than the optimizer's last step
        for fqn, tensor in named_tensors(module).items():
            tensors.setdefault(fqn, tensor)
        for name, linear in module.named_modules():
            if hasattr(linear, "merged"):
                adapted[f"{name}.weight"] = linear
                adapters |= {
                    f"{name}.{part}" for part, _ in linear.named_parameters() if "." in part
                }
    for fqn in adapters:
        tensors.pop(fqn, None)
    group = own_group(modules, group)
    kinds = file_kinds(tensors, modules[0], dtype)
    # FSDP adds a class
    Model = next(c for c in type(modules[0]).__mro__ if not c.__module__.startswith("torch."))
    on_rank_0(lambda: check_same_model(Model, modules[0].config), group)
    own_lost = [fqn for fqn, t in tensors.items() if fqn not in kinds and t.any()]
    lost = sum(gather(own_lost, group), [])
    if rank_in(group) == 0 and not quiet:
        say_lost(folder, lost)

    def whole(fqn):
        of_file = kinds[fqn][1]
        if fqn in adapted:
            in_fp32 = adapted[fqn].merged(lambda p: gather_whole(p.detach(), torch.float32))
            return in_fp32.to(of_file)
        return gather_whole(tensors[fqn].detach(), of_file)

    write_hf(
        folder,
        modules[0].config,
        modules[0].hf_keys(),
        kinds,
        whole,
        max_shard_gb,
        tokenizer_file,
        group,
        quiet,
        check,
        generation,
        card,
    )


def gather_whole(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole tensor in `dtype`. A rank casts its part of a DTensor before the parts travel."""
    if not isinstance(tensor, DTensor):
        return tensor.to(dtype)
    local = DTensor.from_local(
        tensor.to_local().to(dtype),
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )
    return local.full_tensor()
