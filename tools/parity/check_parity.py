"""--check_parity: train a few steps on one process and on a layout, and compare every gradient and
weight."""

import glob
import math
import os
import subprocess
import sys
import tempfile
from dataclasses import replace

import torch

from distributed.agree import brief
from distributed.layout import AXES
from distributed.refusals import collect_facts, runs_on_cuda
from flags.config import FROM_FILE, no_effect, spell, unmet_needs
from tools.reports.stop_main import stop_main
from training.metrics import read_lines

# RECORD: appended to --out, the folder of a half's gradients
STEPS = 3
RECORD = "_record"
# In fp32, from the first step on. Every mistake of tests/test_mutants.py is far above these
# tolerances. Updates get more room than gradients because AdamW divides a gradient by its own size:
# the rounding of a tiny gradient moves a weight as far as a large gradient does. Differences of
# updates are relative to the update, not to the weight, or a small learning rate would hide the
# optimizer.
LOSS_TOLERANCE = 1e-5
NORM_TOLERANCE = 2e-5
GRADIENT_TOLERANCE = 1e-4
WEIGHT_TOLERANCE = 5e-4
UPDATE_TOLERANCE = 0.01
# After the first update the weights differ by rounding, and the gradients by more: multiply the
# tolerances of step 1 by LATER. Muon makes small directions as large as the others; how other
# optimizers (OTHERS) answer to rounding is unknown. With experts there is no limit: because of
# rounding a router may send a token to another expert.
LATER = {"adamw": 10, "muon": 100}
OTHERS = 1000


def without_refused(cfg, flags: dict, model_config) -> dict:
    """The flags of a half, plus the default of every flag that these flags make ineffective, and so
    refused."""
    flags = {name: value for name, value in flags.items() if hasattr(cfg, name)}
    defaults = type(cfg)()
    while True:  # a default may make another flag ineffective
        half = replace(cfg, **flags)
        degrees = {axis: getattr(half, axis) for axis in AXES}
        unmet = unmet_needs(
            half, collect_facts(half, model_config, degrees, runs_on_cuda(half.device))
        )
        if not unmet:
            return flags
        flags |= {name: getattr(defaults, name) for name in unmet}


def flags_of_halves(main, cfg, folder: str) -> dict[str, dict]:
    """{name of a half: flags to append to the user's command}. ValueError if there is nothing to
    compare."""
    degrees = {axis: getattr(cfg, axis) for axis in AXES}
    if degrees["dp_shard"] == -1:
        # the experts use these ranks again
        degrees = degrees | {"dp_shard": vars(cfg).get("ep", 1)}
    # a copy: main writes the batch size into cfg
    (_, model_config), _ = stop_main(main, replace(cfg), "check_layout")
    if unused := no_effect(
        cfg, collect_facts(cfg, model_config, degrees, runs_on_cuda(cfg.device))
    ):
        raise ValueError("; ".join(unused))
    degrees = {axis: max(n, 1) for axis, n in degrees.items()}
    device = "cuda" if torch.cuda.device_count() >= math.prod(degrees.values()) else "cpu"
    both = dict(
        steps=STEPS,
        compute_dtype="float32",
        checkpoint_every=0,
        export_hf="",
        val_every=0,
        log_every=1,
        device=device,
    )
    # else both halves read the size from --config, and find a fitting local batch
    if "global_batch_size" not in FROM_FILE:
        local = cfg.local_batch_size * degrees["dp_replicate"] * degrees["dp_shard"]
        both["global_batch_size"] = local if cfg.global_batch_size == -1 else cfg.global_batch_size
    one = dict.fromkeys(degrees, 1) | dict(ep=1, etp=1, ac="none", compile=False, cpu_offload=False)
    halves = {
        name: without_refused(
            cfg, both | half | {"out": os.path.join(folder, name.replace(" ", "_"))}, model_config
        )
        for name, half in {"one process": one, "layout": degrees}.items()
    }
    if len({repr(replace(cfg, **half | {"out": ""})) for half in halves.values()}) == 1:
        raise ValueError(
            "--check_parity compares one process with a layout, and these flags ask for one "
            "process without "
            "anything to compare; add a layout like --tp 2, or --ac, --compile or --cpu_offload"
        )
    halves["one process"]["local_batch_size"] = choose_another_cut(
        cfg, both.get("global_batch_size", cfg.global_batch_size)
    )
    return halves


def choose_another_cut(cfg, n: int) -> int:
    """Sequences per forward of the one process, of n in the global batch: another number than on
    the layout, or mistakes that depend on the cut of a batch, such as a loss that is a mean over a
    micro-batch, would be equal on both sides. Also not a number with which the means on all cp and
    tp ranks add up to as much."""
    # on the layout, and on others
    here, other = (cfg.local_batch_size, cfg.pp_microbatch_size)[:: -1 if cfg.pp > 1 else 1]
    ranks = {1, cfg.cp, cfg.tp, cfg.cp * cfg.tp}
    for avoided in (
        {n // b * r for b in (here, other) for r in ranks},
        {n // here * r for r in ranks},
        {n // here},
    ):
        sizes = [size for size in range(1, n + 1) if n % size == 0 and n // size not in avoided]
        if sizes:
            return max((size for size in sizes if size <= cfg.local_batch_size), default=sizes[0])
    print(
        "check_parity: one sequence cannot be cut in another way, so a loss that depends on the "
        "cut is not noticed; "
        "give --global_batch_size 2 or more",
        flush=True,
    )
    return 1


def run_half(name: str, flags: dict, where: bool = False) -> int:
    """Run the current recipe again with these flags; return the exit status, after printing the
    error line of a failed run.
    where: record all operations of the first step (tools/parity/operations.py), not the gradients of all
    steps."""
    processes = math.prod(flags[axis] for axis in AXES)
    n = flags["steps"]
    print(
        f"check_parity: {n} step{'s' * (n > 1)} on {name} ({processes} "
        f"process{'es' * (processes > 1)}) ...",
        flush=True,
    )
    torchrun = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        if processes > 1
        else []
    )
    command = [
        sys.executable,
        *torchrun,
        os.path.join(os.path.dirname(os.path.abspath(__file__)), "half.py"),
    ]
    command += ["--where"] * where + [
        flags["out"] + RECORD,
        *sys.argv,
        "--no-check_parity",
        "--no-where",
        "--advice",
    ]
    # of a repeated flag the last value counts
    command += [f"--{flag}={spell(value)}" for flag, value in flags.items()]
    done = subprocess.run(command, capture_output=True, text=True)
    if not done.returncode:
        return 0
    lines = done.stderr.splitlines()
    errors = [line for line in lines if line.startswith("error")]
    is_refused = bool(errors) and errors[0].startswith("error: ")
    print("\n".join(errors[:1] if is_refused else errors or lines[-20:]), file=sys.stderr)
    # torchrun's own status is always 1
    return done.returncode if processes == 1 else 2 if is_refused else 1


def run_both_halves(main, cfg, read, where=False, **flags) -> tuple[int, list]:
    """Run the recipe on one process and on the layout. Returns (exit status of a failed run or 0,
    [read(out) of each half])."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name, half in flags_of_halves(main, cfg, folder).items():
            if status := run_half(name, half | flags, where):
                return status, []
            found.append(read(half["out"]))
        return 0, found


def check_parity(main, cfg) -> int:
    """Train STEPS steps of the running recipe on one process and on the layout, in fp32; compare;
    return the exit status.

    Works for any copy of a recipe: tools/parity/half.py runs the recipe twice, with flags appended,
    and records the arguments of parallel.clip_grad_norm.
    """
    status, halves = run_both_halves(main, cfg, read_records)
    if status:
        return status
    has_experts = any(".experts." in fqn for fqn in halves[0][0]["gradient"])
    return print_comparison(
        *halves, math.inf if has_experts else LATER.get(vars(cfg).get("optimizer", "adamw"), OTHERS)
    )


def read_parts(out: str, beginning: str, function: str) -> list[dict]:
    """The files with this beginning, in which the ranks of a half have recorded the calls of a
    function of parallel.py."""
    files = sorted(glob.glob(f"{glob.escape(out + RECORD)}/{beginning}-*"))
    if not files:
        raise RuntimeError(
            f"this recipe calls parallel.{function} nowhere, so there is nothing to compare"
        )
    return [torch.load(file, weights_only=True, mmap=True) for file in files]


def read_records(out: str) -> list[dict]:
    """Per step: loss, norm, tokens_hash, and by fqn, of all pipeline stages together, gradients,
    weights, and from step 2 on the update of the weights by the step before."""
    lines = [line for line in read_lines(os.path.join(out, "metrics.jsonl")) if "loss" in line]
    steps = []
    for n in range(STEPS):
        parts = read_parts(out, str(n), "clip_grad_norm")
        line = lines[n]
        step = {
            "loss": line["loss"],
            "norm": line["grad_norm"],
            "hash": line["tokens_hash"],
            "gradient": {},
            "weight": {},
            "buffer": {},
            "trained": set(),
            "uneven": set(),
        }
        for part in parts:
            step["uneven"] |= {
                fqn
                for fqn, t in part["buffer"].items()
                if not torch.equal(t, step["buffer"].get(fqn, t))
            }
            for kind, found in part.items():
                step[kind] |= found if isinstance(found, dict) else set(found)
        if steps:
            before = steps[-1]["weight"]
            step["update"] = {
                fqn: w.float() - before[fqn].float() for fqn, w in step["weight"].items()
            }
        steps.append(step)
    return steps


def distance(got: torch.Tensor, want: torch.Tensor, whole: torch.Tensor) -> float:
    """|got - want|, relative to the norm of the whole tensor, scaled to the size of the part."""
    if not got.is_floating_point():
        return (got != want).double().mean().item() if got.numel() else 0.0
    share = math.sqrt(got.numel() / max(whole.numel(), 1))
    error = (got.double() - want.double()).norm() / max(whole.double().norm().item() * share, 1e-12)
    return math.inf if error.isnan() else error.item()


def middle_distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """The median of |got - want|, relative to the root mean square."""
    return ((got - want).abs().median() / want.square().mean().sqrt().clamp(min=1e-30)).item()


def compare_tensors(
    what: str, a: dict, b: dict, tolerance: float, most=0.0
) -> tuple[dict, list[str]]:
    """({fqn: relative error} of the tensors that a and b have, [] or a sentence on the first error
    above the tolerance).
    most: weight of middle_distance, for mistakes that are small beside the whole, but in most
    elements."""
    errors = {fqn: distance(b[fqn].float(), a[fqn].float(), a[fqn]) for fqn in a if fqn in b}
    if most:
        errors = {
            fqn: max(e, most * middle_distance(b[fqn].float(), a[fqn].float()))
            for fqn, e in errors.items()
        }
    # a gradient in bf16 is the rounded fp32 gradient, and rounding may go up on one side and down
    # on the other
    room = {fqn: tolerance * (10 if a[fqn].dtype == torch.bfloat16 else 1) for fqn in errors}
    return errors, [
        f"{what} {fqn} by {e:.1e} (relative)" for fqn, e in errors.items() if not e <= room[fqn]
    ][:1]


def print_comparison(one: list[dict], layout: list[dict], later: float = 1) -> int:
    """Print the table; return 0 if all is within tolerance, else 1 after a line that names the
    first difference, or the weights without a comparison: a gradient that is 0 on both sides says
    nothing.

    later: factor of the tolerances of loss, norm and gradients after step 1. Infinite: compare only
    step 1 and the first
    update.
    """
    first = ""
    compared = set()
    room = UPDATE_TOLERANCE * (1 if later <= LATER["adamw"] else 10)
    # what an optimizer has changed, by step; step 3 sees the update from the gradients of step 2
    changes = (
        ("weight", WEIGHT_TOLERANCE),
        ("update", room),
        ("update", room * (min(later, 3) if later < math.inf else later)),
    )
    head = ["loss, 1 process", "layout", "norm, 1 process", "layout"]
    print(
        "step",
        *(f"{text:>16}" for text in head),
        " worst gradient / worst update by the step before (step 1: worst weight)",
    )
    for n, (a, b) in enumerate(zip(one, layout, strict=True), 1):
        problems = []
        worst = {}
        slack = 1 if n == 1 else later
        if a["hash"] != b["hash"]:
            problems.append("the tokens of the global batch")
        problems += [
            f"the buffer {fqn}, which is not equal on all ranks" for fqn in sorted(b["uneven"])[:1]
        ]
        if n < 3 or later < math.inf:
            problems += compare_tensors(
                "the buffer", a["buffer"], b["buffer"], 1e-4 * min(slack, 10)
            )[1]
        for kind, tolerance in (("gradient", slack * GRADIENT_TOLERANCE), changes[n - 1]):
            if missing := sorted(a[kind].keys() ^ b[kind].keys()):
                problems.append(f"the {kind} of {missing[0]}, which only one of the two has")
            # The first update comes from weights of equal bits, so rounding changes few elements.
            # Not of Muon's matmuls.
            most = (
                1000.0 if kind == "update" and n == 2 and later in (LATER["adamw"], OTHERS) else 0.0
            )
            errors, wrong = compare_tensors(f"the {kind} of", a[kind], b[kind], tolerance, most)
            worst[kind] = max(errors.items(), key=lambda item: item[1])
            problems += wrong
            if kind == "gradient" and slack < math.inf:
                compared |= {fqn for fqn in errors if a[kind][fqn].any() or b[kind][fqn].any()}
        if not abs(a["loss"] - b["loss"]) <= slack * LOSS_TOLERANCE * max(1.0, abs(a["loss"])):
            problems.append(f"the loss, {b['loss']} instead of {a['loss']}")
        if not abs(a["norm"] - b["norm"]) <= slack * NORM_TOLERANCE * abs(a["norm"]):
            problems.append(f"the gradient norm, {b['norm']} instead of {a['norm']}")
        first = first or (problems and f"step {n} differs first in {problems[0]}") or ""
        notes = " / ".join(f"{e:.1e} {fqn}" for fqn, e in worst.values())
        print(
            f"{n:>4} {a['loss']:>16.8f} {b['loss']:>16.8f} {a['norm']:>16.8f} {b['norm']:>16.8f}  "
            f"{notes}"
        )
    unseen = sorted((one[0]["trained"] | layout[0]["trained"]) - compared)
    if first:
        print(f"check_parity: NOT EQUAL: {first}")
    elif unseen:
        print(
            f"check_parity: NOT COMPARED: {brief(unseen)}, whose gradient is 0 or missing on both "
            "sides; the rest is equal. "
            "Do not train what is not used (requires_grad_(False)); behind a weight that is 0, "
            "others have no gradient yet"
        )
    else:
        print("check_parity: equal")
    return int(bool(first or unseen))
