"""--explain: a page on a single block: the placement of each parameter, and each collective with its phase and reason."""

from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from distributed.layout import local_tensor
from distributed.pipeline import n_microbatches
from tools.dryrun import DryWatch, add_scaled, dry_world, human, observe, size_of, table, totals
from tools.placement import shown_block

AGAIN = "the same weights again: they were freed after the forward"
TRAFFIC = {  # (axis, operation, phase): contents, places in the phase (see svg.timeline), reason
    ("fsdp", "all_gather", "forward"): ("weights", ["before"], "the weights, whole, before they are used"),
    ("fsdp", "all_gather", "backward"): ("weights again", ["before"], AGAIN),
    ("fsdp", "reduce_scatter", "backward"): (
        "gradients", ["after"], "the gradients: summed over data and cp ranks, each keeps its shard"),
    ("efsdp", "all_gather", "forward"): (
        "experts' weights", ["before"], "the weights of this rank's experts, whole, before they are used"),
    ("efsdp", "all_gather", "backward"): ("weights again", ["before"], AGAIN),
    ("efsdp", "reduce_scatter", "backward"): (
        "gradients", ["after"], "the experts' gradients: summed, each rank keeps its shard"),
    ("dp_replicate", "all_reduce", "backward"): (
        "gradients' parts", ["after"], "the shards of the gradients, summed over the copies of the model"),
    ("tp", "all_gather", "forward"): (
        "sequence", ["into attention", "into FFN"],
        "the sequence, whole, before attention and FFN: each rank has other heads and channels"),
    ("tp", "reduce_scatter", "forward"): (
        "partial sums", ["behind attention", "behind FFN"],
        "partial sums behind attention and FFN; each rank keeps its part of the sequence"),
    ("tp", "all_reduce", "forward"): ("loads", ["FFN"], "what ranks with parts of one sequence must agree on"),
    ("tp", "all_gather", "backward"): (
        "gradients", ["behind FFN", "behind attention"], "the mirror of the forward's reduce-scatter"),
    ("tp", "reduce_scatter", "backward"): (
        "gradients", ["into FFN", "into attention"], "the mirror of the forward's all-gather"),
    ("tp", "all_reduce", "backward"): (
        "norms' gradients", ["after"], "gradients of weights that every rank holds: each saw a part of the tokens or heads"),
    ("cp", "all_gather", "forward"): (
        "keys, values", ["attention"], "keys and values of the whole sequence, for this rank's queries"),
    ("cp", "reduce_scatter", "backward"): (
        "their gradients", ["attention"], "gradients of keys and values: every rank used them all"),
    ("cp", "all_reduce", "forward"): ("loads", ["FFN"], "what ranks with parts of one sequence must agree on"),
    ("cp", "all_to_all", "forward"): (
        "q, k, v, output", ["attention"], "q, k, v: parts of a sequence for whole sequences of fewer heads; the output: back"),
    ("cp", "all_to_all", "backward"): ("their gradients", ["attention"], "the mirror of the forward's"),
    ("ep", "all_to_all", "forward"): (
        "tokens", ["FFN"], "how many tokens come; the tokens to their experts; the results back"),
    ("ep", "all_to_all", "backward"): ("gradients", ["FFN"], "gradients of the results to the experts, and of the tokens back"),
    ("pp", "send", "step"): ("", [], "per micro-batch: activations to the next stage, gradients to the one before"),
    ("pp", "recv", "step"): ("", [], "per micro-batch: activations from the stage before, gradients from the next"),
    ("world", "all_reduce", "step"): (
        "", [], "numbers that all ranks need: tokens of the global batch, squares of the gradients"),
}


def describe_split(p) -> str:
    """Describe how a parameter is split: 'tp: rows, fsdp: rows'. Dims of tensors larger than matrices are named by number."""
    if not isinstance(p, DTensor):
        return "whole"
    names = {1: ["rows"], 2: ["rows", "columns"]}.get(p.dim(), [f"dim {d}" for d in range(p.dim())])
    axes = zip(p.device_mesh.mesh_dim_names, p.device_mesh.shape, p.placements, strict=True)
    # FSDP's axes stand first in the mesh but split last, so name them last
    said = [f"{a}: {'whole' if x.is_replicate() else names[x.dim]}" for a, size, x in axes if size > 1]
    return ", ".join(reversed(said)) or "whole"


def count_block(main, cfg):
    """(layout, name, parameters, step) of a block: run the first stage with three blocks and with two; a block costs the
    difference. parameters: [name, shape, how it is split, this device's part]; step: see dryrun.observe. Returns None if a
    rank has fewer than three layers."""
    steps = []
    for keep in (3, 2):
        with dry_world(main, cfg, 0) as (stages, optimizers, layout):
            blocks = max((stage.blocks for stage in stages), key=len)
            if len(blocks) < 3:
                return None
            name, block = shown_block(stages)
            for unused in list(blocks)[:-keep]:
                del blocks[unused]
            for module in (m for stage in stages for m in stage.modules() if isinstance(m, FSDPModule)):
                module.set_modules_to_forward_prefetch([])  # with --ep blocks name their neighbours, deleted above
                module.set_modules_to_backward_prefetch([])
            if not steps:
                params = [[n, p.shape, describe_split(p), local_tensor(p)] for n, p in block.named_parameters()]
            n = n_microbatches(layout) if cfg.pp_schedule_csv else 1
            steps.append(observe(stages, optimizers, layout, cfg.seq_len, n, DryWatch(layout)))
    return layout, name, params, add_scaled(steps[0], -1, steps[1])


def list_collectives(step) -> list[tuple]:
    """(phase, axis, operation, number, bytes, why) of all collectives of a step, in the order of the phases. Phases of
    different pipeline ranks overlap, so sends and receives have the phase "step"."""
    moved = {key[1:]: n for key, n in step.items() if key[0] == "moved" and n}
    found = []
    for p in ("forward", "recompute", "backward", "step"):
        here = {key: n for key, n in moved.items() if p == ("step" if key[1] in ("pp", "world") else key[0])}
        for (axis, op), (number, size) in totals(here).items():
            *_, why = TRAFFIC.get((axis, op, p), [""])
            found.append((p, axis, op, number, size, "the forward's, as its result was not kept" if p == "recompute" else why))
    return found


def explain(cfg, counted) -> None:
    """Print the counts of count_block."""
    if counted is None:
        raise ValueError("--explain needs three layers on a rank, to compare three with two of them; --html FILE shows the "
                         "whole step of fewer")
    layout, name, params, step = counted
    print(f"One block of {layout}: blocks.{name}, on the first device\n")
    shape = lambda s: " x ".join(map(str, s))  # noqa: E731
    lines = [["parameter", "whole", "split by", "on this device", ""]]
    lines += [[n, shape(whole), split, shape(p.shape), human(size_of([p]))] for n, whole, split, p in params]
    print(table(lines, right=False))
    size = f"{cfg.pp_microbatch_size if layout.pp > 1 else cfg.local_batch_size} x {cfg.seq_len}"
    print(f"\nWhat travels for it in one forward and backward of {size} tokens. Bytes in all: the largest tensor of each,\n"
          "added up; a rank sends and receives (n-1)/n of them over an axis of n ranks, and twice that in an all-reduce.\n")
    lines = [["phase", "axis", "operation", "number", "bytes in all", "why"]]
    lines += [[*key, number, human(size), why] for *key, number, size, why in list_collectives(step)]
    print(table(lines, right=False) if len(lines) > 1 else "Nothing: no axis has more than one rank.")
    if layout.pp > 1:
        print("\nBetween pipeline ranks only the activations behind a stage's last block travel, and their gradients back.")
    print(f"\nFLOPs: {sum(step['flops', f] for f in ('forward', 'backward', 'recompute')):.3g} on each device.")
