"""Reads Hugging Face folders: load_hf fills a model in any layout, and each rank reads only its slices.
storage/hf_config.py reads config.json and storage/hf_write.py writes folders; __all__ lists the names
that other rooms import from here."""

import math
import os
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from corpus.beside import read_hf_json
from corpus.tokenizer import check_hf_tokenizer
from distributed.agree import brief, fail_together, rank_in
from distributed.layout import local_slice, local_tensor, mtp_depth_of, named_tensors
from flags.files import hf_file, matches
from storage.hf_config import (
    HF_MODELS,
    check_hf_config,
    check_same_model,
    class_of,
    config_class,
    read_hf_config,
)
from storage.hf_files import open_safetensors
from storage.hf_write import own_group, save_hf
from storage.source_tokenizer import weights_folder

__all__ = [  # what other files import from here
    "HF_DTYPES",
    "HF_MODELS",
    "HFTensors",
    "check_hf_config",
    "check_same_model",
    "class_of",
    "config_class",
    "load_hf",
    "load_hf_model",
    "read_hf_config",
    "save_hf",
]
HF_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
# fp8 weights have one scale per 128 x 128 block, in a tensor <name>_scale_inv (arXiv:2412.19437,
# sec. 3.3.2)
FP8_BLOCK = 128
# the stacks of experts that transformers 5 writes
FUSED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up_proj|down_proj)")
INDEX = "model.safetensors.index.json"


# --- The files: tensors by name ---
class ExpertMatrix:
    """The matrix of one expert in a file that stacks all experts, (E, rows of an expert, columns).
    Has the methods of safetensors' handle of a tensor. The matrix is `rows` rows of the expert,
    beginning at row `first`: gate_proj and up_proj of an expert lie one below the other."""

    def __init__(self, stack, expert: int, first: int, rows: int):
        self.stack = stack
        self.expert = expert
        self.first = first
        self.rows = rows

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
        self.folder = folder
        self.open = cache(partial(open_safetensors, folder))
        self.where = self.find_files()  # {name: file}
        # {name: stack in the file, expert, first row, rows}, see split_experts
        self.experts = {}

    def find_files(self) -> dict[str, str]:
        """{name of a tensor: its file}, of the only file or of the index."""
        folder = self.folder
        if os.path.lexists(os.path.join(folder, "model.safetensors")):
            return dict.fromkeys(self.open("model.safetensors").keys(), "model.safetensors")
        path = os.path.join(folder, INDEX)
        if not os.path.lexists(path):
            raise ValueError(
                f"{folder} has neither model.safetensors nor {INDEX}; weights in .bin files are "
                "pickles, which "
                "can run any code, and are not read: save them again as safetensors, with "
                "transformers"
            )
        where = read_hf_json(folder, INDEX).get("weight_map")
        if not isinstance(where, dict) or not all(isinstance(file, str) for file in where.values()):
            raise ValueError(f"{path} has no weight_map of tensor names to file names")
        for file in sorted(set(where.values())):
            hf_file(folder, file)
        return where

    def split_experts(self) -> None:
        """Names each matrix of the experts that transformers 5 writes as stacks, gate_up_proj (E,
        2 F, D) and down_proj (E, D, F), as all other files do."""
        for name, file in [*self.where.items()]:
            match = FUSED_EXPERTS.fullmatch(name)
            if match is None:
                continue
            shape = self.handle(name).get_shape()
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

    def handle(self, name: str) -> Any:
        """safetensors' handle of a tensor: gives shape, dtype, and slices by indexing."""
        file = self.open(self.where[name])
        if name in self.experts:
            stack, *place = self.experts[name]
            return ExpertMatrix(file.get_slice(stack), *place)
        if name not in file.keys():
            raise ValueError(
                f"{self.folder}: the index says that {name} is in {self.where[name]}, but it is not"
            )
        return file.get_slice(name)

    def problem(self, name: str, shape: tuple) -> str:
        """The error if the tensor is not of `shape` or not readable; else ''."""
        handle = self.handle(name)
        found = tuple(handle.get_shape())
        dtype = handle.get_dtype()
        scale = f"{name}_scale_inv"
        has_scale = scale in self.where
        floats = HF_DTYPES.values()
        if found != shape:
            return f"{name} is {found} there, {shape} here"
        if dtype == "F8_E4M3" and has_scale:
            blocks = tuple(math.ceil(n / FP8_BLOCK) for n in shape)
            scales = tuple(self.handle(scale).get_shape())
            is_float = self.handle(scale).get_dtype() in floats
            if len(shape) == 2 and scales == blocks and is_float:
                return ""
            return f"{scale} is {scales} there, and should be {blocks} floats"
        if dtype not in floats or has_scale:
            return (
                f"{name} is {dtype}, which is no {' or '.join(floats)}, nor F8_E4M3 with a {scale}"
            )
        return ""

    def read(self, name: str, offset: tuple, shape: tuple) -> Tensor:
        """The part of a tensor at `offset`: in the file's dtype, or in fp32 if the file is
        quantised."""
        place = tuple(slice(first, first + n) for first, n in zip(offset, shape))
        part = self.handle(name)[place or ...]
        if f"{name}_scale_inv" not in self.where:
            return part
        blocks = []  # the part lies in these rows and columns of blocks
        for first, n in zip(offset, shape):
            blocks.append(slice(first // FP8_BLOCK, math.ceil((first + n) / FP8_BLOCK)))
        scale = self.handle(f"{name}_scale_inv")[tuple(blocks)].float()
        scale = scale.repeat_interleave(FP8_BLOCK, 0).repeat_interleave(FP8_BLOCK, 1)
        # a part may begin inside a block
        row = offset[0] % FP8_BLOCK
        column = offset[1] % FP8_BLOCK
        return part.float() * scale[row:, column:][: shape[0], : shape[1]]


def open_tensors(Model: type[nn.Module], folder: str) -> HFTensors:
    """The tensors of a folder; a model with a format of its own names the reader (hf_tensors in
    forks/gpt_oss.py). For a PEFT adapter: the tensors of the base, each merged with
    its adapter while it is read."""
    source = getattr(Model, "hf_tensors", HFTensors)(weights_folder(folder))
    source.split_experts()
    if source.folder != folder:
        from storage.peft import merge_adapters

        merge_adapters(source, folder)
    return source


# --- Names to tensors, each rank its slices ---
def match_names(
    module: Any, source: HFTensors, exclude: Iterable[str]
) -> tuple[set[str], list[str], list[str], str | None]:
    """Compares the names in the files with the model's. Returns (skipped, absent, extra, twin).
    skipped: fqns not to load, excluded or absent; absent: optional fqns missing in the files;
    extra: optional names missing in the model; twin: name of a head in the files of a model that
    ties head and embedding. Raises ValueError with the names missing in the files or unknown to the
    model."""
    excluded = list(exclude)
    optional = []  # patterns
    if hasattr(module, "hf_optional"):  # a model of one's own need not have the method
        optional = module.hf_optional()

    def may_differ(name):
        return any(fnmatchcase(name, pattern) for pattern in optional)

    names = {}  # fqn -> its names in the files
    known = set()
    absent = []
    for fqn, of_fqn in module.hf_keys().items():
        names[fqn] = [of_fqn] if isinstance(of_fqn, str) else of_fqn
        known.update(names[fqn])
        if may_differ(names[fqn][0]):
            absent.append(fqn)
    for fqn in absent:
        if any(name in source.where for name in names[fqn]):
            absent = []  # the files have a part of the optional tensors: what lacks is an error below
            break
    skipped = set(absent)
    missing = []
    for fqn, of_fqn in names.items():
        if matches(excluded, f"model.{fqn}"):
            skipped.add(fqn)
        if fqn not in skipped:
            missing += [name for name in of_fqn if name not in source.where]
    # A scale belongs to a weight; files of 2023 hold tables of rotary frequencies, not needed by
    # our models.
    others = []
    for name in source.where:
        if name.removesuffix("_scale_inv") in known or name.endswith(".rotary_emb.inv_freq"):
            continue
        others.append(name)
    twin = None
    if module.config.tie_embeddings and "lm_head.weight" in others:
        twin = "lm_head.weight"
    extra = []
    unknown = []
    for name in others:
        if may_differ(name):
            extra.append(name)
        elif name != twin:
            unknown.append(name)
    problems = []
    if missing:
        problems.append(f"missing: {brief(missing)}")
    if unknown:
        problems.append(f"unknown: {brief(unknown)}")
    if "lm_head.weight" in missing and "model.embed_tokens.weight" in source.where:
        problems.append(
            "the files have no head: if it is the embedding, as transformers takes it, write "
            '"tie_word_embeddings": true into config.json'
        )
    if problems:
        raise ValueError(
            f"{source.folder} does not fit {type(module).__name__}: {'; '.join(problems)}"
        )
    return skipped, absent, extra, twin


def plan_reads(
    modules: list[Any], source: HFTensors, exclude: Iterable[str] = ()
) -> tuple[list[tuple], list[str], list[str]]:
    """([(name, offset, tensor to fill)] of this rank, absent, extra: see match_names). Raises
    ValueError; fills nothing yet."""
    excluded = list(exclude)
    kind = type(modules[0]).__name__
    skipped, absent, extra, twin = match_names(modules[0], source, excluded)
    keys = modules[0].hf_keys()
    reads = []
    problems = []
    for fqn, tensor in [item for module in modules for item in named_tensors(module).items()]:
        if fqn not in keys:
            if isinstance(tensor, nn.Parameter) and not matches(excluded, f"model.{fqn}"):
                raise ValueError(f"hf_keys() of {kind} has no name for {fqn}")
            continue
        if fqn in skipped:
            continue
        local = local_tensor(tensor.detach())
        names = keys[fqn]
        shape = tuple(tensor.shape)
        offset = local_slice(tensor)[1]  # start of this rank's part in the whole tensor
        if isinstance(names, str):
            new = [(names, offset, local)]
        else:  # a stack of experts: only this rank's experts
            assert len(names) == shape[0], (
                f"{fqn} is a stack of {shape[0]}, but hf_keys() gives {len(names)} names"
            )
            new = [(names[offset[0] + i], offset[1:], part) for i, part in enumerate(local)]
            shape = shape[1:]
        of_fqn = [source.problem(name, shape) for name, _, _ in new]
        problems += dict.fromkeys(problem for problem in of_fqn if problem)
        reads += [read for read in new if read[2].numel()]
        if twin and fqn == "tok_embeddings.weight" and not problems:
            problem = compare_twin(source, twin, names, offset, shape, tuple(local.shape))
            if problem:
                problems.append(problem)
    if problems:
        raise ValueError(f"{source.folder} does not fit {kind}: {brief(problems)}")
    return reads, absent, extra


def compare_twin(
    source: HFTensors,
    twin: str,
    name: str,
    offset: tuple[int, ...],
    shape: tuple[int, ...],
    local_shape: tuple[int, ...],
) -> str:
    """The error if the files hold a head, `twin`, that is not the embedding `name`, on this rank's
    part; else ''."""
    problem = source.problem(twin, shape)
    if problem:
        return problem
    head = source.read(twin, offset, local_shape)
    if torch.equal(head, source.read(name, offset, local_shape)):
        return ""
    return f"{twin} is not equal to {name}, but this model ties the two"


@torch.no_grad()
def load_hf(
    model, folder: str, exclude: Iterable[str] = (), group: dist.ProcessGroup | None = None
) -> list[str]:
    """Fills a model, sharded in any way, from a Hugging Face folder; each rank reads only the
    rank's slices.

    model: plain, or sharded by parallel.py, or the list of this rank's pipeline stages. exclude:
    parameters to leave alone, as in --exclude_from_loading. Returns the optional fqns missing in
    the files (MTP layers): the parameters stay as they are. Raises ValueError, the same on all
    ranks, before a weight is touched.
    """
    from flags.progress import Progress

    modules = model if isinstance(model, list) else [model]
    excluded = list(exclude)
    group = own_group(modules, group)
    source = fail_together(lambda: open_tensors(type(modules[0]), folder), group)
    reads, absent, extra = fail_together(lambda: plan_reads(modules, source, excluded), group)

    def say(text):
        if rank_in(group) == 0:
            print(text, flush=True)

    def fill():
        n_bytes = sum(local.nbytes for *_, local in reads)
        with Progress(f"checkpoint: reading {folder}", n_bytes, "GB per rank", 1e9) as progress:
            for name, offset, local in reads:
                # casts, after any dequantisation
                local.copy_(source.read(name, offset, tuple(local.shape)))
                progress(local.nbytes)
        for module in modules:
            keys = module.hf_keys()  # once: 45,395 names in 671B
            for fqn, tensor in named_tensors(module).items():
                if fqn not in keys and not matches(excluded, f"model.{fqn}"):
                    # the balancing bias of experts, missing in some files, begins at 0
                    tensor.zero_()

    fail_together(fill, group)
    without = f"checkpoint: {folder} is loaded without what"
    if absent:
        say(f"{without} the files lack: {brief(absent)}")
    if extra:
        say(f"{without} the model lacks: {brief(extra)}")
    return absent


def load_hf_model(
    folder: str, device: str = "cpu", dtype: torch.dtype | None = None
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
    if mtp_depth_of(config) and not any(name.startswith(mtp) for name in source.where):
        config.mtp_depth = 0
        print(
            f"checkpoint: {folder} is loaded without multi-token prediction: the files lack {mtp}*",
            flush=True,
        )
    with torch.device("meta"):
        model = Model(config)
    # raises before memory is taken, if config.json claims more than the files hold
    reads, *_ = plan_reads([model], source)
    if dtype is None:
        of_files = {name: kind for kind, name in HF_DTYPES.items()}
        dtype = of_files.get(source.handle(reads[0][0]).get_dtype(), torch.bfloat16)
    for param in model.parameters():  # not the buffers: an expert's bias stays fp32
        param.data = param.data.to(dtype)
    model.to_empty(device=device)
    load_hf(model, folder)
    return model.eval(), tokenizer_file
