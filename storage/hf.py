"""Reads and writes Hugging Face folders: load_hf, save_hf and the checks before. checkpoint.py has
the command line."""

import importlib
import json
import math
import os
import re
import shutil
import sys
import time
import uuid
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import fields
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Literal, NamedTuple, get_args, get_origin, get_type_hints

import torch
from torch import Tensor, nn

from corpus.special import SpecialIds
from corpus.tokenizer import check_hf_tokenizer, files_beside, load_tokenizer, read_hf_json
from distributed.agree import (
    brief,
    fail_together,
    gather,
    new_gloo_group,
    on_rank_0,
    rank_in,
    reason,
)
from distributed.layout import local_slice, local_tensor, named_tensors, reshard
from flags.config import spell, unwrap
from flags.files import check_local, fsync, hf_file, json_bytes, matches, publish, write_file
from storage.manifest import Progress
from storage.source_tokenizer import ids_of_folder, weights_folder

HF_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# fp8 weights have one scale per 128 x 128 block, in a tensor <name>_scale_inv (arXiv:2412.19437,
# sec. 3.3.2)
FP8_BLOCK = 128
# the stacks of experts that transformers 5 writes
FUSED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")


def read_hf_config(folder: str, Config=None):
    """The model config of config.json. Config: the class; None: chosen by model_type. Raises
    ValueError."""
    folder = weights_folder(folder)
    found, path = read_hf_json(folder, "config.json"), os.path.join(folder, "config.json")
    if Config is None:
        kind = found.get("model_type")
        Config = config_class(kind) if isinstance(kind, str) else None
        if Config is None:
            raise ValueError(
                f"{path}: model_type is {kind!r}; there is a model for {', '.join(HF_MODELS)}, and "
                "another is read by the file of its name in forks/"
            )
    try:
        config = Config.from_hf(found)
    except Exception as error:  # any error: a value in the file is the cause
        raise ValueError(f"{path}: {reason(error).removeprefix('config.json: ')}") from None
    for name in (field.name for field in fields(Config)):
        value, (kind, optional) = getattr(config, name), unwrap(get_type_hints(Config)[name])
        if not has_type(value, kind) and not (optional and value is None):
            raise ValueError(
                f"{path}: {name} would be {str(value)[:40]!r}, not "
                f"{getattr(kind, '__name__', kind)}"
            )
    return config


def has_type(value, kind) -> bool:
    """Whether a value from a file has the annotated type of the config's field: strangers may have
    written anything."""
    if kind is int:
        return type(value) is int and 0 <= value < 2**31
    if kind is dict:
        return type(value) is dict and all(
            type(number) in (int, float) for number in value.values()
        )
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    return type(value) in ((int, float) if kind is float else (kind,))


def check_hf_config(model_config, folder: str):
    """Raises ValueError with every field of config.json that differs from the model's, and the
    flags to type instead."""
    theirs, module = read_hf_config(folder, type(model_config)), type(model_config).__module__
    flavors = sys.modules[module].FLAVORS

    def differing(config):
        # may differ; load_hf prints the missing layers
        names = [f.name for f in fields(config) if f.name != "mtp_depth"]
        return {
            name: getattr(theirs, name)
            for name in names
            if getattr(config, name) != getattr(theirs, name)
        }

    if differ := differing(model_config):
        text = "; ".join(
            f"{name} is {value} there, {getattr(model_config, name)} here"
            for name, value in differ.items()
        )
        nearest = min(flavors, key=lambda name: len(differing(flavors[name])))
        args = differing(flavors[nearest])
        spelt = ",".join(f"{name}={spell(value)}" for name, value in args.items())
        fix = (
            f'use --flavor {nearest} and --model_args "{spelt}"'
            if args
            else f"use --flavor {nearest} and no --model_args"
        )
        # a dict cannot be typed as --model_args
        if any(isinstance(value, dict) for value in args.values()):
            fix = f"add a flavor with its values to FLAVORS in {module.replace('.', '/')}.py"
        raise ValueError(f"{folder}/config.json is of another model: {text}; {fix}")


def open_safetensors(folder: str, file: str):
    from safetensors import SafetensorError, safe_open

    real = hf_file(folder, file)
    try:
        return safe_open(real, "pt")  # checks all sizes and offsets, and refuses absurd headers
    except (OSError, SafetensorError) as error:
        path = os.path.join(folder, file)
        raise ValueError(
            f"{path} is no safetensors file that can be read: {reason(error)}"
        ) from None


class ExpertMatrix:
    """A matrix in a stack of experts, like safetensors' handle of a tensor. first, rows: its rows
    among those of the expert."""

    def __init__(self, stack, expert: int, first: int, rows: int):
        self.stack, self.expert, self.first, self.rows = stack, expert, first, rows

    def get_shape(self) -> list[int]:
        return [self.rows, self.stack.get_shape()[2]]

    def get_dtype(self) -> str:
        return self.stack.get_dtype()

    def __getitem__(self, place: tuple[slice, slice]) -> Tensor:
        rows, columns = place
        rows = slice(self.first + rows.start, self.first + rows.stop)
        return self.stack[self.expert : self.expert + 1, rows, columns][0]


class HFTensors:
    """The tensors of a Hugging Face folder, by name. Files are mapped into memory: only the bytes
    of a slice are read."""

    def __init__(self, folder: str):
        self.folder, self.open, index = (
            folder,
            cache(partial(open_safetensors, folder)),
            "model.safetensors.index.json",
        )
        # {name: stack in the file, expert, first row, rows}, see split_experts
        self.experts = {}
        if os.path.lexists(os.path.join(folder, "model.safetensors")):
            self.where = dict.fromkeys(self.open("model.safetensors").keys(), "model.safetensors")
            return
        if not os.path.lexists(os.path.join(folder, index)):
            raise ValueError(
                f"{folder} has neither model.safetensors nor {index}; weights in .bin files are "
                "pickles, which "
                "can run any code, and are not read: save them again as safetensors, with "
                "transformers"
            )
        self.where = read_hf_json(folder, index).get("weight_map")
        if not isinstance(self.where, dict) or not all(
            isinstance(file, str) for file in self.where.values()
        ):
            raise ValueError(
                f"{os.path.join(folder, index)} has no weight_map of tensor names to file names"
            )
        for file in sorted(set(self.where.values())):
            hf_file(folder, file)

    def split_experts(self):
        """Names each matrix of the experts that transformers 5 writes as stacks, gate_up_proj (E,
        2 F, D) and down_proj (E, D, F), as all other files do."""
        for name, file in [*self.where.items()]:
            match = FUSED_EXPERTS.fullmatch(name)
            shape = self.handle(name).get_shape() if match else []
            # gpt-oss has stacks with a bias, and of another order
            if len(shape) != 3 or f"{name}_bias" in self.where:
                continue
            layer, kind = match.groups()
            parts = ["gate_proj", "up_proj"] if kind == "gate_up_proj" else [kind]
            rows = shape[1] // len(parts)
            for expert in range(shape[0]):
                for i, part in enumerate(parts):
                    matrix = f"{layer}.{expert}.{part}.weight"
                    self.where[matrix] = file
                    self.experts[matrix] = name, expert, i * rows, rows
            del self.where[name]

    def handle(self, name: str):
        """safetensors' handle of a tensor: gives shape, dtype, and slices by indexing."""
        if name in self.experts:
            stack, *place = self.experts[name]
            return ExpertMatrix(self.open(self.where[name]).get_slice(stack), *place)
        if name not in (file := self.open(self.where[name])).keys():
            raise ValueError(
                f"{self.folder}: the index says that {name} is in {self.where[name]}, but it is not"
            )
        return file.get_slice(name)

    def problem(self, name: str, shape: tuple) -> str:
        """The error if the tensor is not of `shape` or not readable; else ''."""
        found, dtype, scale = (
            tuple(self.handle(name).get_shape()),
            self.handle(name).get_dtype(),
            f"{name}_scale_inv",
        )
        if found != shape:
            return f"{name} is {found} there, {shape} here"
        if dtype == "F8_E4M3" and scale in self.where:
            blocks, scales = (
                tuple(math.ceil(n / FP8_BLOCK) for n in shape),
                tuple(self.handle(scale).get_shape()),
            )
            fits = (
                len(shape) == 2
                and scales == blocks
                and self.handle(scale).get_dtype() in HF_DTYPES.values()
            )
            return "" if fits else f"{scale} is {scales} there, and should be {blocks} floats"
        if dtype not in HF_DTYPES.values() or scale in self.where:
            return f"{name} is {dtype}, which is no {' or '.join(HF_DTYPES.values())}, nor F8_E4M3 with a {scale}"
        return ""

    def read(self, name: str, offset: tuple, shape: tuple) -> Tensor:
        """The part of a tensor at `offset`: in the file's dtype, or in fp32 if the file is
        quantised."""
        part = self.handle(name)[tuple(slice(o, o + n) for o, n in zip(offset, shape)) or ...]
        if f"{name}_scale_inv" not in self.where:
            return part
        rows, columns = (
            slice(o // FP8_BLOCK, math.ceil((o + n) / FP8_BLOCK)) for o, n in zip(offset, shape)
        )
        scale = self.handle(f"{name}_scale_inv")[rows, columns].float()
        scale = scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
        row, column = (o % FP8_BLOCK for o in offset)  # a part may begin inside a block
        return part.float() * scale[row:, column:][: shape[0], : shape[1]]


def open_tensors(Model: type[nn.Module], folder: str) -> HFTensors:
    """The tensors of a folder; a model with a format of its own names the reader (hf_tensors in
    forks/gpt_oss.py). Those of a PEFT adapter are its base's, merged with the adapters as they are
    read."""
    source = getattr(Model, "hf_tensors", HFTensors)(weights_folder(folder))
    source.split_experts()
    if source.folder != folder:
        from storage.peft import merge_adapters

        merge_adapters(source, folder, open_safetensors(folder, "adapter_model.safetensors"))
    return source


def own_group(modules: list[nn.Module], group):
    """`group`, or a new group of all ranks if the model is sharded; None if this process holds the
    whole model."""
    sharded = any(
        hasattr(t, "placements") for module in modules for t in named_tensors(module).values()
    )
    return new_gloo_group("hugging face") if group is None and sharded else group


# --- Import: names to tensors, each rank its slices ---
def match_names(
    module: nn.Module, source: HFTensors, exclude
) -> tuple[set[str], list[str], list[str], str | None]:
    """Compares the names in the files with the model's. Returns (skipped, absent, extra, twin).
    skipped: fqns not to load, excluded or absent; absent: optional fqns missing in the files;
    extra: optional names missing in the model; twin: name of a head in the files of a model that
    ties head and embedding. Raises ValueError with the names missing in the files or unknown to the
    model."""
    names = {
        fqn: [name] if isinstance(name, str) else name for fqn, name in module.hf_keys().items()
    }
    known, optional = (
        {name for group in names.values() for name in group},
        getattr(module, "hf_optional", list)(),
    )

    def may_differ(name):
        return any(fnmatchcase(name, pattern) for pattern in optional)

    mtp = [fqn for fqn, group in names.items() if may_differ(group[0])]
    # a part is an error below
    absent = [] if any(name in source.where for fqn in mtp for name in names[fqn]) else mtp
    skipped = {fqn for fqn in names if matches(list(exclude), f"model.{fqn}")} | set(absent)
    missing = [
        name
        for fqn, group in names.items()
        if fqn not in skipped
        for name in group
        if name not in source.where
    ]
    # A scale belongs to a weight; files of 2023 hold tables of rotary frequencies, not needed by
    # our models.
    others = [
        name
        for name in source.where
        if name.removesuffix("_scale_inv") not in known
        and not name.endswith(".rotary_emb.inv_freq")
    ]
    twin = "lm_head.weight" if module.config.tie_embeddings and "lm_head.weight" in others else None
    unknown = [name for name in others if name != twin and not may_differ(name)]
    if problems := [
        f"{what}: {brief(found)}"
        for what, found in (("missing", missing), ("unknown", unknown))
        if found
    ]:
        if "lm_head.weight" in missing and "model.embed_tokens.weight" in source.where:
            problems.append(
                "the files have no head: if it is the embedding, as transformers takes it, write "
                '"tie_word_embeddings": true into config.json'
            )
        raise ValueError(
            f"{source.folder} does not fit {type(module).__name__}: {'; '.join(problems)}"
        )
    return skipped, absent, [name for name in others if may_differ(name)], twin


def plan_reads(
    modules: list[nn.Module], source: HFTensors, exclude=()
) -> tuple[list[tuple], list[str], list[str]]:
    """([(name, offset, tensor to fill)] of this rank, absent, extra: see match_names). Raises
    ValueError; fills nothing yet."""
    (skipped, absent, extra, twin), keys = (
        match_names(modules[0], source, exclude),
        modules[0].hf_keys(),
    )
    reads, problems = [], []
    for fqn, tensor in [item for module in modules for item in named_tensors(module).items()]:
        if (
            fqn not in keys
            and isinstance(tensor, nn.Parameter)
            and not matches(list(exclude), f"model.{fqn}")
        ):
            raise ValueError(f"hf_keys() of {type(modules[0]).__name__} has no name for {fqn}")
        if fqn in skipped or fqn not in keys:
            continue
        local, names, shape = local_tensor(tensor.detach()), keys[fqn], tuple(tensor.shape)
        offset = local_slice(tensor)[1]  # start of this rank's part in the whole tensor
        if isinstance(names, str):
            new = [(names, offset, local)]
        else:  # a stack of experts: only this rank's experts
            assert len(names) == shape[0], (
                f"{fqn} is a stack of {shape[0]}, but hf_keys() gives {len(names)} names"
            )
            new, shape = (
                [(names[offset[0] + i], offset[1:], part) for i, part in enumerate(local)],
                shape[1:],
            )
        problems += dict.fromkeys(filter(None, (source.problem(name, shape) for name, _, _ in new)))
        reads += [read for read in new if read[2].numel()]
        if twin and fqn == "tok_embeddings.weight" and not problems:
            head = source.problem(twin, shape)
            if head or not torch.equal(
                *(source.read(name, offset, tuple(local.shape)) for name in (twin, names))
            ):
                problems.append(
                    head or f"{twin} is not equal to {names}, but this model ties the two"
                )
    if problems:
        raise ValueError(
            f"{source.folder} does not fit {type(modules[0]).__name__}: {brief(problems)}"
        )
    return reads, absent, extra


@torch.no_grad()
def load_hf(model, folder: str, exclude=(), group=None) -> list[str]:
    """Fills a model, sharded in any way, from a Hugging Face folder; each rank reads only the
    rank's slices.

    model: plain, or sharded by parallel.py, or the list of this rank's pipeline stages. exclude:
    parameters to leave alone,
    as in --exclude_from_loading. Returns the optional fqns missing in the files (MTP layers): the
    parameters stay as they are. Raises ValueError, the same on all ranks, before a weight is
    touched.
    """
    modules = model if isinstance(model, list) else [model]
    group = own_group(modules, group)
    source = fail_together(lambda: open_tensors(type(modules[0]), folder), group)
    reads, absent, extra = fail_together(lambda: plan_reads(modules, source, exclude), group)

    say = partial(print, flush=True) if rank_in(group) == 0 else lambda text: None

    def fill():
        progress = Progress(
            f"checkpoint: reading {folder}", sum(local.nbytes for *_, local in reads), say
        )
        for name, offset, local in reads:
            # casts, after any dequantisation
            local.copy_(source.read(name, offset, tuple(local.shape)))
            progress(local.nbytes)
        for module in modules:
            keys = module.hf_keys()  # once: 45,395 names in 671B
            for fqn, tensor in named_tensors(module).items():
                if fqn not in keys and not matches(list(exclude), f"model.{fqn}"):
                    # the balancing bias of experts, missing in some files, begins at 0
                    tensor.zero_()

    fail_together(fill, group)
    for names, what in ((absent, "the files lack"), (extra, "the model lacks")):
        if names:
            say(f"checkpoint: {folder} is loaded without what {what}: {brief(names)}")
    return absent


def class_of(config) -> type[nn.Module]:
    """The model's class of a config: Llama3 of a Llama3Config."""
    return getattr(
        sys.modules[type(config).__module__], type(config).__name__.removesuffix("Config")
    )


def load_hf_model(
    folder: str, device="cpu", dtype: torch.dtype | None = None
) -> tuple[nn.Module, str | None]:
    """(plain model on `device`, path of tokenizer.json or None). dtype None: the files' dtype,
    bfloat16 for fp8."""
    config = read_hf_config(folder)
    Model = class_of(config)
    source = open_tensors(Model, folder)
    if config.n_layers > len(source.where):
        raise ValueError(
            f"{folder}/config.json: {config.n_layers} layers, but the files hold "
            f"{len(source.where)} tensors"
        )
    tokenizer_file = check_hf_tokenizer(folder, config.vocab_size)
    # many files lack these layers, but keep the config of training
    mtp = f"model.layers.{config.n_layers}."
    if getattr(config, "mtp_depth", 0) and not any(name.startswith(mtp) for name in source.where):
        config.mtp_depth = 0
        print(
            f"checkpoint: {folder} is loaded without multi-token prediction: the files lack {mtp}*",
            flush=True,
        )
    with torch.device("meta"):
        model = Model(config)
    # raises before memory is taken, if config.json claims more than the files hold
    reads, *_ = plan_reads([model], source)
    of_files = {name: kind for kind, name in HF_DTYPES.items()}.get(
        source.handle(reads[0][0]).get_dtype(), torch.bfloat16
    )
    for param in model.parameters():  # not the buffers: an expert's bias stays fp32
        param.data = param.data.to(dtype or of_files)
    model.to_empty(device=device)
    load_hf(model, folder)
    return model.eval(), tokenizer_file


# --- Export: each rank writes some of the files ---
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
    # the lowest rank
    files, owner = (
        [],
        {fqn: rank for rank, kinds in reversed([*enumerate(everyone)]) for fqn in kinds},
    )
    if odd := sorted(owner.keys() ^ names.keys()):
        raise ValueError(f"hf_keys() and the model's parameters differ in {brief(odd)}")
    for stage in dict.fromkeys(map(tuple, everyone)):
        ranks, cut, full = (
            [rank for rank, kinds in enumerate(everyone) if tuple(kinds) == stage],
            [],
            0,
        )
        for fqn in (fqn for fqn in stage if owner[fqn] == ranks[0]):
            (shape, dtype), name = everyone[ranks[0]][fqn], names[fqn]
            experts = [(None, name)] if isinstance(name, str) else list(enumerate(name))
            size = math.prod(shape) // len(experts) * dtype.itemsize
            for expert, name in experts:
                if not cut or full + size > max_bytes:
                    cut.append([])
                    full = 0
                cut[-1].append(HFEntry(fqn, name, expert, dtype, size))
                full += size
        # writers, far apart: one machine has one disk and network card
        n = min(len(cut), len(ranks))
        files += [(ranks, ranks[i % n * len(ranks) // n], entries) for i, entries in enumerate(cut)]
    return files


def write_safetensors(path: str, entries: list[HFEntry], tensors: dict[str, Tensor]):
    """Writes a file of these entries. tensors: {fqn: whole tensor, or stack of experts}, in CPU
    memory."""
    from safetensors.torch import save_file

    found = {}
    for e in entries:
        found[e.name] = (
            tensors[e.fqn] if e.expert is None else tensors[e.fqn][e.expert]
        ).contiguous()
        if e.dtype == torch.float16 and not found[e.name].isfinite().all():
            raise ValueError(f"{e.fqn} has numbers beyond float16's 65504; export it as bfloat16")
    # older versions of transformers refuse files without metadata
    save_file(found, path, {"format": "pt"})
    fsync(path)


def check_export(folder: str):
    """Raises ValueError when no export can be written to the folder."""
    check_local(folder, "to export to")
    if os.path.lexists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise ValueError(
            f"{folder} is there already and not an empty folder; export to another, or remove it"
        )
    parent = next(
        path for path in Path(os.path.abspath(folder), "file").parents if os.path.lexists(path)
    )
    if not os.path.isdir(parent) or not os.access(parent, os.W_OK):
        raise ValueError(f"{folder} cannot be made: {parent} is no folder to write to")


def write_hf(
    folder: str,
    config,
    names: dict,
    kinds: dict,
    whole,
    max_shard_gb: float,
    tokenizer_file=None,
    group=None,
    quiet=False,
    check=None,
    generation: dict | None = None,
):
    """Writes a Hugging Face folder; every rank of `group` calls. kinds: {fqn: (shape, dtype in the
    file)} of this rank. check: rank 0 calls it with the finished folder, before the folder gets its
    name; what it raises refuses the export. generation: generation_config.json, with the ids of
    config.json, too; None: from the tokenizer's folder.

    whole(fqn) gathers a tensor in the file's dtype; all ranks with the fqn call in the same order.
    A rank writes a file in the background while the next tensors are gathered, and so holds at most
    two files in CPU memory.
    """
    began, temporary = time.perf_counter(), f"{os.path.abspath(folder)}.tmp-{uuid.uuid4().hex[:8]}"
    temporary = on_rank_0(
        lambda: check_export(folder) or os.makedirs(temporary) or temporary, group
    )
    everyone, rank, writing = gather(kinds, group), rank_in(group), []
    try:
        files = fail_together(lambda: plan_files(names, everyone, max_shard_gb * 1e9), group)
        titles = [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
        files = dict(zip(titles if len(files) > 1 else ["model.safetensors"], files))
        with ThreadPoolExecutor(1) as pool:
            for title, (ranks, writer, entries) in files.items():
                if rank not in ranks:
                    continue
                tensors = {}
                for fqn in dict.fromkeys(e.fqn for e in entries):
                    tensor = whole(fqn)
                    if rank == writer:
                        tensors[fqn] = tensor.cpu()
                    del tensor  # before the next is gathered
                if rank == writer:
                    wait(writing[-1:])
                    writing.append(
                        pool.submit(
                            write_safetensors, os.path.join(temporary, title), entries, tensors
                        )
                    )
        fail_together(lambda: [future.result() for future in writing], group)
        written = {title: entries for title, (_, _, entries) in files.items()}
        size = on_rank_0(
            lambda: commit_export(
                temporary, folder, config, written, tokenizer_file, check, generation
            ),
            group,
        )
    finally:
        if rank == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # leftovers of a failure
    if rank == 0 and not quiet:
        seconds = time.perf_counter() - began
        print(
            f"checkpoint: exported {folder} ({len(files)} files, {size / 1e6:.1f} MB in "
            f"{seconds:.2f} s)",
            flush=True,
        )


def commit_export(
    temporary: str,
    folder: str,
    config,
    entries: dict[str, list[HFEntry]],
    tokenizer_file: str | None,
    check=None,
    generation: dict | None = None,
) -> int:
    """Adds the other files, lets check() look, and renames the folder (rank 0). Returns the bytes of
    all tensors."""
    if unseen := sorted(entries.keys() - set(os.listdir(temporary))):
        raise OSError(
            f"rank 0 does not see {brief(unseen)}: {folder} must be on a file system that all "
            "machines share"
        )
    flat = [(title, e) for title, found in entries.items() for e in found]
    dtypes, size = [str(e.dtype)[6:] for _, e in flat], sum(e.size for _, e in flat)
    extra, ids = (
        tokenizer_files(tokenizer_file, config.max_seq_len) if tokenizer_file else ({}, NO_IDS)
    )
    sampling = generation
    if sampling is None:  # from the tokenizer's folder
        sampling = json.loads(extra.get("generation_config.json", b"{}")) | ids.for_config()
    # written even if null: a missing id would be 1 or 2 in transformers
    ends = {name: sampling.get(name) for name in NO_IDS.for_config()}
    extra["config.json"] = json_bytes(
        config.to_hf() | ends | dict(torch_dtype=max(dtypes, key=dtypes.count))
    )
    extra["generation_config.json"] = json_bytes(sampling | ends)
    if len(entries) > 1:
        index = dict(
            metadata=dict(total_size=size), weight_map={e.name: title for title, e in flat}
        )
        extra["model.safetensors.index.json"] = json_bytes(index)
    for name, content in extra.items():
        write_file(Path(temporary, name), content)
    if check is not None:
        check(temporary)
    publish(temporary, folder)
    return size


NO_IDS = SpecialIds(None, [], None)


def tokenizer_files(file: str, max_seq_len: int) -> tuple[dict[str, bytes], SpecialIds]:
    """({name: content} of the tokenizer's files, the ids that begin, end and pad a text)."""
    try:
        ids = ids_of_folder(os.path.dirname(file))
        end = {"eos_token": load_tokenizer(Path(file)).id_to_token(ids.ends[0])}
    except ValueError:
        ids, end = NO_IDS, {}
    rules = dict(tokenizer_class="PreTrainedTokenizerFast", model_max_length=max_seq_len, **end)
    found = {"tokenizer_config.json": json_bytes(rules | {"clean_up_tokenization_spaces": False})}
    return found | files_beside(file) | {"tokenizer.json": Path(file).read_bytes()}, ids


def file_kinds(
    tensors: dict[str, Tensor], module: nn.Module, dtype: torch.dtype
) -> dict[str, tuple]:
    """fqn -> (shape, dtype in the file): parameters in `dtype`, buffers unchanged, buffers without
    an HF name left out."""
    kinds = {
        fqn: (tuple(t.shape), dtype if isinstance(t, nn.Parameter) else t.dtype)
        for fqn, t in tensors.items()
    }
    keys = module.hf_keys()
    return {
        fqn: kind
        for fqn, kind in kinds.items()
        if fqn in keys or isinstance(tensors[fqn], nn.Parameter)
    }


def say_lost(folder: str, fqns: list[str]):
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
    dtype=torch.bfloat16,
    max_shard_gb=5.0,
    tokenizer_file: str | None = None,
    group=None,
    quiet=False,
    check=None,
    generation: dict | None = None,
):
    """Writes a model as a Hugging Face folder for transformers: weights in `dtype`, buffers
    unchanged. If a linear layer has a method merged(), as with LoRA (lora/lora.py), the merged
    matrix is written.

    model: plain (call on one rank), or sharded by parallel.py, or the list of this rank's pipeline
    stages (call on all
    ranks). check, generation: see write_hf. Raises ValueError, the same on all ranks, and then leaves `folder`
    unchanged.
    """
    modules, tensors, adapted, parts = model if isinstance(model, list) else [model], {}, {}, set()
    for module in modules:
        reshard(module)  # FSDP may still hold gathered weights older than the optimizer's last step
        tensors |= {
            fqn: tensor for fqn, tensor in named_tensors(module).items() if fqn not in tensors
        }
        for name, linear in module.named_modules():
            if hasattr(linear, "merged"):
                adapted[f"{name}.weight"] = linear
                parts |= {f"{name}.{part}" for part, _ in linear.named_parameters() if "." in part}
    tensors = {fqn: tensor for fqn, tensor in tensors.items() if fqn not in parts}
    group, kinds = own_group(modules, group), file_kinds(tensors, modules[0], dtype)
    # FSDP adds a class
    Model = next(c for c in type(modules[0]).__mro__ if not c.__module__.startswith("torch."))
    on_rank_0(lambda: check_same_model(Model, modules[0].config), group)
    lost = gather([fqn for fqn, t in tensors.items() if fqn not in kinds and t.any()], group)
    if rank_in(group) == 0 and not quiet:
        say_lost(folder, [fqn for part in lost for fqn in part])

    def whole(fqn):
        if fqn in adapted:
            return (
                adapted[fqn].merged(lambda p: gathered(p.detach(), torch.float32)).to(kinds[fqn][1])
            )
        return gathered(tensors[fqn].detach(), kinds[fqn][1])

    def gathered(tensor, dtype):
        if not hasattr(tensor, "placements"):
            return tensor.to(dtype)
        local, rest = (
            tensor.to_local().to(dtype),
            dict(run_check=False, shape=tensor.shape, stride=tensor.stride()),
        )
        return (
            type(tensor)
            .from_local(local, tensor.device_mesh, tensor.placements, **rest)
            .full_tensor()
        )

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
    )


# --- model_type: which of our models is it, and what will transformers open? ---
# All other differences between models are in the models' files: Config.from_hf and to_hf for
# config.json; hf_keys(), the table of fqn -> name in the files, or for a stack of experts (E, ...)
# a list of E names; hf_optional(), in some models, lists patterns of optional names (MTP);
# hf_tensors(), in some forks, is the reader of the files.
HF_MODELS = {
    "llama": "models.llama3",
    "mistral": "models.llama3",
    "qwen2": "models.llama3",
    "qwen3": "models.qwen3",
    "qwen3_moe": "models.qwen3",
    "deepseek_v2": "models.deepseek",
    "deepseek_v3": "models.deepseek",
    "kimi_k2": "models.deepseek",
}


def config_class(kind: str) -> type | None:
    """The config of our model for a model_type: of HF_MODELS, or of the file of that name in
    models/ or forks/, with or without "_text". None without such a file."""
    module = HF_MODELS.get(kind) or find_model_file(kind.removesuffix("_text"))
    if module is None:
        return None
    for value in vars(importlib.import_module(module)).values():
        if isinstance(value, type) and value.__module__ == module and hasattr(value, "from_hf"):
            return value
    return None


def find_model_file(name: str) -> str | None:
    """The module of a model's file in models/ or forks/. A stranger's config.json has the name, so
    only a plain name counts, and only a file that reads config.json is imported."""
    if not re.fullmatch(r"[a-z]\w*", name):
        return None
    for room in ("models", "forks"):
        file = Path(__file__).parents[1] / room / f"{name}.py"
        if file.is_file() and "def from_hf(" in file.read_text("utf-8"):
            return f"{room}.{name}"
    return None


def check_same_model(Model, config):
    """Raises ValueError where transformers would open an export of this class as the model of
    another class, or where config.json cannot tell all of the config."""
    own = f"{Model.__module__}.{Model.__name__}"
    if not hasattr(config, "to_hf") or not hasattr(Model, "hf_keys"):
        raise ValueError(f"{own} cannot be exported: it needs hf_keys(), and to_hf() of its config")
    kind = config.to_hf().get("model_type")
    Known = config_class(kind)
    if Known is None:
        return  # a model_type of its own
    rename = (
        f"transformers would open an export of {own} as {kind}; let to_hf() return another "
        "model_type"
    )
    if own != f"{Known.__module__}.{Known.__name__}".removesuffix("Config"):
        raise ValueError(rename)
    if Known.from_hf(config.to_hf()) != config:
        raise ValueError(f"{rename}, because config.json cannot tell all of {config}")
