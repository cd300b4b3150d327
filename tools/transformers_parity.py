"""--check_parity --where --against FOLDER: the first module with another output or gradient than in transformers.

One process, fp32. The recipe's model and transformers' model are loaded from the same Hugging Face folder, and get the same
random tokens. Modules are paired by the model's own table of names, hf_keys(). Outputs are compared in the order in which
transformers computes: forward, loss, backward, the parameters' gradients.
"""
import math
import os
from collections import defaultdict
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed.agree import reason
from distributed.layout import AXES, ExpertConfig, named_tensors
from storage.hf import load_hf, read_hf_config
from support.config import override_fields
from tools.operations import Seams
from tools.parity import distance
from tools.stop_main import do_nothing, stop_main
from tools.where import HINTS_AGAINST, Seam, factor_of, kind_of, module_around, report_seams

BATCH, LENGTH = 3, 128  # of the random tokens: long enough to see a wrong rotation
# Relative, in fp32. Two correct implementations order sums differently, and raise theta to powers in different ways.
APART = dict(initial=0.0, forward=1e-4, logits=1e-4, loss=1e-5, backward=5e-4, gradient=5e-4)


def our_model(main, cfg, folder: str) -> nn.Module:
    """The recipe's model in fp32, with the config and the weights of the folder. --model_args change the config as usual."""
    skipped = dict.fromkeys(("check_layout", "open_data", "source_tokenizer"), do_nothing)
    (_, Model, usual, *_), _ = stop_main(main, replace(cfg), "claim_run", **skipped)  # the classes that the recipe passes
    config = override_fields(read_hf_config(folder, type(usual)), cfg.model_args, "--model_args")
    if getattr(config, "mtp_depth", 0):
        config = replace(config, mtp_depth=0)  # transformers has none
    with torch.device("meta"):
        model = Model(config)
    for p in model.parameters():
        p.data = p.data.float()
    model.to_empty(device="cpu")
    load_hf(model, folder)
    return model


def their_model(folder: str) -> nn.Module:
    """transformers' model of the folder, in fp32, without any network."""
    try:
        import transformers
    except ImportError:
        raise ValueError("--against compares with transformers, which is not installed: pip install transformers") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    except Exception as error:
        raise ValueError(f"transformers cannot open {folder}: {reason(error)}") from None


def watch_their_attention(model, seams: Seams):
    """Record inputs and output of transformers' attention: their models look up a function by name, so register ours."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    plain = ALL_ATTENTION_FUNCTIONS["sdpa"]

    def attend(module, query, key, value, *args, **kwargs):
        return seams.attend(lambda q, k, v: plain(module, q, k, v, *args, **kwargs), 0, query, key, value)

    AttentionInterface.register("nanotitan_seams", attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register("nanotitan_seams", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.config._attn_implementation = "nanotitan_seams"


def pair_modules(keys: dict) -> dict[str, str]:
    """{their module: ours} from hf_keys(): modules with a weight, and modules around them that hold the same weights."""
    inside_ours, inside_theirs = defaultdict(set), defaultdict(set)  # {module: their names of the weights inside}
    for ours, theirs in keys.items():
        for name in [theirs] if isinstance(theirs, str) else theirs:
            for parent in parents(ours):
                inside_ours[parent].add(name)
            for parent in parents(name):
                inside_theirs[parent].add(name)
    same = {frozenset(held): module for module, held in sorted(inside_ours.items(), reverse=True)}  # the outermost wins
    pairs = {module: same[frozenset(held)] for module, held in inside_theirs.items() if frozenset(held) in same}
    for ours, theirs in keys.items():
        if isinstance(theirs, list):  # theirs returns the weighted sum over experts, as the module around our experts does
            pairs[theirs[0].split(".experts.")[0] + ".experts"] = ours.rpartition(".experts.")[0]
    return pairs


def parents(name: str) -> list[str]:
    """blocks.0.attn.wq.weight -> blocks.0.attn.wq, blocks.0.attn, blocks.0, blocks"""
    pieces = name.split(".")
    return [".".join(pieces[:n]) for n in range(len(pieces) - 1, 0, -1)]


def ways_to_align(ours: Tensor, theirs: Tensor, name: str) -> list[tuple[Tensor, Tensor]]:
    """Pairs of equal shape: (B, T, ...) or (B * T, ...), heads before or after the sequence. The numbers of a query or key
    may have any order, because only products of queries and keys are used."""
    ways = []
    if ours.numel() == theirs.numel():
        longer_than_1 = [[size for size in x.shape if size != 1] for x in (ours, theirs)]
        if longer_than_1[0] == longer_than_1[1] or ours.shape[-1] == theirs.shape[-1] and 2 in (ours.dim(), theirs.dim()):
            ways.append((ours.reshape(theirs.shape), theirs))
        if ours.dim() == theirs.dim() == 4 and ours.transpose(1, 2).shape == theirs.shape:
            ways.append((ours.transpose(1, 2), theirs))
        if ours.shape == theirs.shape and name.endswith((" q", " k")):
            ways.append((ours.sort(-1).values, theirs.sort(-1).values))
    return ways


def by_seam(seams: Seams, known: dict | None = None) -> dict:
    """{(phase, our name, call): [tensors]} of all records. known: {their module: ours}; other modules are left out."""
    found = defaultdict(list)
    for phase, name, _, call, _, tensor in seams.records:
        module, _, part = name.partition(" ")
        module = module.partition("[")[0]
        if known is None or module in known:
            found[phase, (known[module] if known else module) + f" {part}" * bool(part), call].append(tensor)
    return dict(found)


def run_both(ours, theirs) -> tuple[dict, dict, dict]:
    """({(phase, our name, call): our tensors}, the same for theirs, {our name: theirs}), in the order of their execution."""
    g, vocab = torch.Generator().manual_seed(0), ours.config.vocab_size
    T = min(LENGTH, ours.config.max_seq_len)
    tokens, labels = (torch.randint(0, vocab, (BATCH, T), generator=g) for _ in range(2))
    a, b = Seams(notes_inputs=True), Seams(notes_inputs=True)
    a.watch(ours)
    a.watch_attention(ours)
    b.watch(theirs)
    watch_their_attention(theirs, b)
    theirs.zero_grad()
    loss = ours(tokens, labels=labels, loss_denom=labels.numel())
    with torch.no_grad():
        logits = ours(tokens)
    out = theirs(input_ids=tokens, use_cache=False).logits
    their_loss = F.cross_entropy(out.float().flatten(0, 1), labels.flatten())
    loss.backward()
    their_loss.backward()
    a.stop()
    b.stop()

    keys, head = ours.hf_keys(), theirs.get_output_embeddings()
    # the head returns the logits, a seam of their own
    pairs = {module: name for module, name in pair_modules(keys).items() if theirs.get_submodule(module) is not head}
    names = {ours: theirs for theirs, ours in sorted(pairs.items(), reverse=True)}  # the outermost wins
    mine = by_seam(a) | {("logits", "logits", 0): [logits], ("loss", "loss", 0): [loss.detach()]}
    other = by_seam(b, pairs) | {("logits", "logits", 0): [out.detach()], ("loss", "loss", 0): [their_loss.detach()]}
    their_tensors, our_tensors = named_tensors(theirs), named_tensors(ours)
    for fqn, name in keys.items():
        if isinstance(name, str) and name in their_tensors:
            names[fqn] = name
            for phase, take in ("initial", lambda p: p.detach()), ("gradient", lambda p: p.grad):
                if take(their_tensors[name]) is not None:
                    got = take(our_tensors[fqn])
                    other[phase, fqn, 0] = [take(their_tensors[name])]
                    mine[phase, fqn, 0] = [torch.zeros_like(our_tensors[fqn]) if got is None else got]
    order = list(APART)
    return mine, dict(sorted(other.items(), key=lambda item: order.index(item[0][0]))), names


def compare_with_transformers(ours, theirs) -> tuple[list[Seam], list[str], dict]:
    """(seams in order, names without counterpart or with another shape, {our name: theirs})."""
    mine, other, names = run_both(ours, theirs)
    seams, left_out = [], []
    called = {name for phase, name, _ in mine if phase == "forward"}
    for (phase, name, call), tensors in other.items():
        tolerance = APART[phase]
        if (phase, name, call) not in mine:
            if phase == "backward" and ("forward", name, call) in mine:
                seams.append(Seam(phase, name, call, math.inf, tolerance, note="no gradient arrives"))
            elif phase == "forward" and " " not in name and name not in called:
                seams.append(Seam(phase, name, call, math.inf, tolerance, note="never called here"))
            else:
                left_out.append(name)
            continue
        x = mine[phase, name, call][0]
        ways = [way for tensor in tensors for way in ways_to_align(x.float(), tensor.float(), name)]
        if not ways:
            left_out.append(name)
            continue
        error, (got, want) = min(((distance(*way, way[1]), way) for way in ways), key=lambda found: found[0])
        seams.append(Seam(phase, name, call, error, tolerance, factor=factor_of([(got, want)])))
    return seams, left_out, names


def hint_against(first: Seam) -> str:
    """The usual cause of a difference at the seam."""
    module, _, part = first.name.partition(" ")
    key = first.phase if first.phase != "forward" else "input" if first.note else part if part in HINTS_AGAINST else "forward"
    return HINTS_AGAINST[key].format(module=module, around=module_around(module))


def report_against(seams: list[Seam], left_out: list[str], names: dict, theirs: str) -> tuple[str, int]:
    """(the report, exit status)."""

    def look(first: Seam) -> str:
        module, _, part = first.name.partition(" ")
        module = module_around(module) if part == "input" else module
        return f"{hint_against(first)}; there it is {names.get(module, module)} of {theirs}"

    kinds = sorted(set(map(kind_of, left_out)))
    rest = [f"not compared, because the two have other shapes or parts there: {', '.join(kinds)}"] if kinds else []
    return report_seams(seams, f" from {theirs}", look, rest)


def check_against(main, cfg, folder: str) -> int:
    """--check_parity --where --against FOLDER of the running recipe; returns the exit status: 0 equal, 1 different."""
    if "RANK" in os.environ:
        raise ValueError("--against runs in one process: use python, not torchrun")
    experts = ("ep", "etp") if isinstance(cfg, ExpertConfig) else ()
    if axes := [f"--{axis} {getattr(cfg, axis)}" for axis in (*AXES, *experts) if getattr(cfg, axis) > 1]:
        raise ValueError(f"--against compares the model on one process with transformers'; leave {', '.join(axes)} out")
    if not os.path.isdir(folder):
        raise ValueError(f"--against {folder}: there is no such folder; give one of Hugging Face, with config.json")
    ours, theirs = our_model(main, cfg, folder), their_model(folder)
    text, status = report_against(*compare_with_transformers(ours, theirs), type(theirs).__name__)
    print(text, flush=True)
    return status
