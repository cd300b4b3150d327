"""--check_parity --where --against FOLDER: the first module with another input or output than in
transformers.

One process, fp32. The recipe's model and transformers' model are loaded from the same Hugging Face
folder, and get the same random tokens. Modules are paired by the model's own table of names,
hf_keys(). Compared are, in this order, what each module is given and returns, and what attention's
kernel is given and returns, as transformers computes; the logits; the loss; and the parameters'
gradients, from the last to the first.
"""

import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import FunctionType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from distributed.agree import reason
from distributed.layout import AXES, mtp_depth_of, pattern_of
from flags.config import override_fields
from flags.progress import Progress
from models.layers import pair_up
from storage.hf import load_hf, read_hf_config
from tools.parity.compare import distance
from tools.parity.where import PARTS, Seam, factor_of, module_around, report_seams
from tools.reports.costs import tensors_in
from tools.reports.stop_main import do_nothing, stop_main

# of the random tokens: long enough to see a wrong rotation
BATCH = 3
LENGTH = 128
# Relative, in fp32. Two correct implementations order sums differently, and raise theta to powers
# in different ways.
APART = dict(forward=1e-4, logits=1e-4, loss=1e-5, gradient=5e-4)


def our_model(main: FunctionType, cfg: Any, folder: str) -> nn.Module:
    """The recipe's model in fp32, with the config and the weights of the folder. --model_args
    change the config as usual."""
    skipped = dict.fromkeys(("check_layout", "open_data", "source_tokenizer"), do_nothing)
    # the classes that the recipe passes
    (_, Model, usual, *_), _ = stop_main(main, replace(cfg), "claim_run", **skipped)
    config = override_fields(read_hf_config(folder, type(usual)), cfg.model_args, "--model_args")
    if mtp_depth_of(config):
        config = replace(config, mtp_depth=0)  # transformers has none
    with torch.device("meta"):
        model = Model(config).float()
    model.to_empty(device="cpu")
    load_hf(model, folder)
    return model


def their_model(folder: str) -> nn.Module:
    """transformers' model of the folder, in fp32, without any network."""
    try:
        import transformers
    except ImportError:
        raise ValueError(
            "--against compares with transformers, which is not installed: pip install transformers"
        ) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        ).eval()
    except Exception as error:
        raise ValueError(f"transformers cannot open {folder}: {reason(error)}") from None


def pair_modules(keys: dict) -> dict[str, str]:
    """{our module: theirs} from hf_keys(): modules with a weight, and modules around them that hold
    the same weights."""
    # {module: their names of the weights inside}
    inside_ours = defaultdict(set)
    inside_theirs = defaultdict(set)
    for ours, theirs in keys.items():
        names = [theirs] if isinstance(theirs, str) else theirs
        for name in names:
            for parent in parents(ours):
                inside_ours[parent].add(name)
            for parent in parents(name):
                inside_theirs[parent].add(name)
    outermost = {}
    for module, held in sorted(inside_theirs.items(), reverse=True):
        outermost[frozenset(held)] = module
    pairs = {}
    for module, held in inside_ours.items():
        if frozenset(held) in outermost:
            pairs[module] = outermost[frozenset(held)]
    # the module around our experts returns the weighted sum over experts; in DeepSeek with the
    # shared experts
    around = ".experts"
    if any(".shared_experts." in str(theirs) for theirs in keys.values()):
        around = ""
    for ours, theirs in keys.items():
        if isinstance(theirs, list):
            pairs[ours.rpartition(".experts.")[0]] = theirs[0].split(".experts.")[0] + around
            pairs.pop(ours.rpartition(".")[0], None)  # our experts: their rows are in another order
    return pairs


def parents(name: str) -> list[str]:
    """blocks.0.attn.wq.weight -> blocks.0.attn.wq, blocks.0.attn, blocks.0, blocks"""
    pieces = name.split(".")
    return [".".join(pieces[:n]) for n in range(len(pieces) - 1, 0, -1)]


@contextmanager
def our_attention(model: Any, note: Callable[..., None]) -> Iterator[None]:
    """Within: note(q, k, v, out) at every call of the `attend` that the model hands to its blocks."""
    if not hasattr(model, "make_attend"):  # a fork's
        yield
        return
    make = model.make_attend

    def make_noted(*args, **kwargs):
        attend = make(*args, **kwargs)

        def noted(q, k, v, *rest, **options):
            out = attend(q, k, v, *rest, **options)
            note(q, k, v, out.transpose(1, 2))  # (B, H, T, U) -> (B, T, H, U)
            return out

        return noted

    with mock.patch.object(model, "make_attend", make_noted):
        yield


@contextmanager
def their_attention(model: nn.Module, note: Callable[..., None]) -> Iterator[None]:
    """Within: note(q, k, v, out) at every call of a function of attention. transformers' models
    look their function up at each call, whichever it is (sdpa, eager, flash)."""
    from transformers.modeling_utils import AttentionInterface

    method = "get_interface"
    if not hasattr(AttentionInterface, method):
        method = "__getitem__"  # transformers 4, in which eager attention is not looked up
    look_up = getattr(AttentionInterface, method)

    def look_up_noted(interface, *args, **kwargs):
        attention = look_up(interface, *args, **kwargs)

        def noted(module, query, key, value, *rest, **options):
            out = attention(module, query, key, value, *rest, **options)
            note(query, key, value, out[0])  # (B, H, T, K), (B, G, T, K or U), (B, T, H, U)
            return out

        return noted

    with mock.patch.object(AttentionInterface, method, look_up_noted):
        yield


@torch.no_grad()
def forward_of(
    model: nn.Module, modules: dict[str, str], tokens: Tensor, watch_attention: Callable
) -> tuple[dict[str, Tensor], Tensor]:
    """({name, or name + " input": the first tensor, name + " q", " k", " v", " attention": what
    attention's kernel is given and returns}, logits). modules: {path in the model: name}."""
    found = {}
    names = {model.get_submodule(path): name for path, name in modules.items()}
    running = []  # names of the modules that run, the innermost last

    def note(module, values, what=""):
        tensors = tensors_in(values)
        if module in names and tensors and tensors[0].is_floating_point():
            found[names[module] + what] = tensors[0].clone()

    def note_input(module, args):
        note(module, args, " input")
        if module in names:
            running.append(names[module])

    def note_output(module, args, out):
        note(module, out)
        if module in names:
            running.pop()

    def note_attention(q, k, v, out):
        module = "attention"
        if running:
            module = running[-1]
        for part, tensor in zip((*PARTS, "attention"), (q, k, v, out), strict=True):
            found[f"{module} {part}"] = tensor.clone()

    before = register_module_forward_pre_hook(note_input)
    after = register_module_forward_hook(note_output)
    with before, after, watch_attention(model, note_attention):
        out = model(tokens)
    if not isinstance(out, Tensor):
        out = out.logits
    return found, out


def to_our_order(theirs: dict[str, Tensor], ours: dict[str, Tensor], P: int):
    """Rotated pairs are half-split in our queries and keys, and side by side in those of some
    models of transformers (DeepSeek-V2). Bring the last P numbers of their queries and keys into
    our order, if the queries are nearer then. The keys follow the queries, because attention uses
    only their products: two that are ordered in different ways are a mistake."""
    for name, q in list(theirs.items()):
        module, _, part = name.rpartition(" ")
        if part != "q" or name not in ours or ours[name].shape != q.shape:
            continue
        split = halves(q, P)
        if distance(ours[name], split, q) < distance(ours[name], q, q):
            theirs[name] = split
            theirs[f"{module} k"] = halves(theirs[f"{module} k"], P)


def halves(x: Tensor, P: int) -> Tensor:
    """(..., K), whose last P numbers are pairs side by side -> those half-split."""
    kept, rotated = x.split([x.shape[-1] - P, P], -1)
    return torch.cat([kept, pair_up(rotated, True).flatten(-2)], -1)


def compare(phase: str, name: str, got: Tensor | None, want: Tensor, lost: str = "") -> Seam:
    """lost: what to say if got is None. Of (B, T, D) and (B * T, D) the numbers are compared; nan:
    other numbers of numbers."""
    if got is None:
        return Seam(phase, name, 0, math.inf, APART[phase], note=lost)
    if got.numel() != want.numel():
        return Seam(phase, name, 0, math.nan, APART[phase])
    got = got.reshape(want.shape)
    error = distance(got, want, want)
    return Seam(phase, name, 0, error, APART[phase], factor=factor_of([(got, want)]))


def compare_with_transformers(ours, theirs) -> tuple[list[Seam], dict]:
    """(seams in order, {our module: theirs})."""
    g = torch.Generator().manual_seed(0)
    config = ours.config
    keys = ours.hf_keys()
    T = min(LENGTH, config.max_seq_len)
    tokens = torch.randint(0, config.vocab_size, (BATCH, T), generator=g)
    labels = torch.randint(0, config.vocab_size, (BATCH, T), generator=g)
    head = theirs.get_output_embeddings()  # returns the logits, a seam of their own
    pairs = pair_modules(keys)
    for name, path in list(pairs.items()):
        if theirs.get_submodule(path) is head:
            del pairs[name]
    our_modules, logits = forward_of(ours, {name: name for name in pairs}, tokens, our_attention)
    our_names = {path: name for name, path in pairs.items()}
    other, their_logits = forward_of(theirs, our_names, tokens, their_attention)
    rotated = config.head_dim
    if hasattr(config, "qk_rope_head_dim"):
        rotated = config.qk_rope_head_dim
    to_our_order(other, our_modules, rotated)
    seams = []
    for name, want in other.items():
        if name in our_modules or name in pairs:
            seams.append(compare("forward", name, our_modules.get(name), want, "never called here"))
    for name in sorted(our_modules.keys() ^ other.keys()):
        if part_of_attention(name):
            seams.append(Seam("forward", name, 0, math.nan, APART["forward"]))

    loss = ours(tokens, labels=labels, loss_denom=labels.numel())
    their_loss = F.cross_entropy(theirs(tokens).logits.flatten(0, 1), labels.flatten())
    loss.backward()
    their_loss.backward()
    seams += [
        compare("logits", "logits", logits, their_logits),
        compare("loss", "loss", loss.detach(), their_loss.detach()),
    ]
    their_parameters = dict(theirs.named_parameters())
    for fqn, p in reversed(list(ours.named_parameters())):
        name = keys.get(fqn)
        if isinstance(name, str) and name in their_parameters:
            want = their_parameters[name].grad
            seams.append(compare("gradient", fqn, p.grad, want, "no gradient arrives"))
    return seams, pairs


def part_of_attention(name: str) -> str:
    """The part that is named by forward_of's "module q", "module k", "module v" and "module
    attention"; "" for the name of a module or of its input."""
    part = name.rpartition(" ")[2]
    if part == name or part == "input":
        return ""
    return part


def set_apart_other_forms(seams: list[Seam]) -> tuple[list[Seam], list[str]]:
    """(the other seams, names of queries, keys and values that differ although attention's result
    does not). Such a model computes the same in another form: its queries hold the scale, say, or
    all positions are shifted."""
    equal = set()  # modules whose attention has an equal result
    for seam in seams:
        if part_of_attention(seam.name) == "attention" and not seam.differs:
            equal.add(seam.name.rpartition(" ")[0])
    rest = []
    other_forms = []
    for seam in seams:
        is_given = part_of_attention(seam.name) in PARTS
        was_compared = not math.isnan(seam.error)
        differs = is_given and was_compared and seam.differs
        if differs and seam.name.rpartition(" ")[0] in equal:
            other_forms.append(seam.name)
        else:
            rest.append(seam)
    return rest, other_forms


def report_against(seams: list[Seam], pairs: dict, theirs: str) -> tuple[str, int]:
    """(the report, exit status)."""
    seams, other_forms = set_apart_other_forms(seams)

    def look(first: Seam) -> str:
        module = first.name.removesuffix(" input").removesuffix(".weight")
        if part_of_attention(module):
            module = module.rpartition(" ")[0]
        elif module != first.name:
            # what the module is given, and the gradient, are the caller's work
            module = module_around(module)
        if module not in pairs:
            return "the model's forward"
        return f"the forward of {module}; there it is {pairs[module]} of {theirs}"

    text, status = report_seams(seams, f" from {theirs}", look)
    if other_forms:
        names = sorted({pattern_of(name) for name in other_forms})
        text += f"\nin another form, with the same result of attention: {', '.join(names)}"
    return text, status


def check_against(main: FunctionType, cfg: Any, folder: str) -> int:
    """--check_parity --where --against FOLDER of the running recipe; returns the exit status: 0
    equal, 1 different."""
    axes = []
    for axis in (*AXES, "ep", "etp"):
        if axis in vars(cfg) and vars(cfg)[axis] > 1:  # a dense model has no --ep
            axes.append(f"--{axis} {vars(cfg)[axis]}")
    if axes:
        raise ValueError(
            "--against compares the model on one process with transformers'; leave "
            f"{', '.join(axes)} out"
        )
    if not os.path.isdir(folder):
        from flags.hints import hub_hint

        raise ValueError(
            f"--against {folder} is no folder; give a folder of Hugging Face, or @{folder} for a "
            f"commit of that name{hub_hint(folder)}"
        )
    with Progress(f"comparing with {folder}"):
        ours = our_model(main, cfg, folder)
        theirs = their_model(folder)
        compared = compare_with_transformers(ours, theirs)
        text, status = report_against(*compared, type(theirs).__name__)
    print(text, flush=True)
    return status
