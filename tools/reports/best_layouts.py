"""--dry_run --best N: the fastest layouts of N devices, among the legal ones that fit. No fork, but
a report.

How long a step takes at least: the arithmetic and the pipeline's waiting at the device's peak, and
the bytes of the collectives over links at full speed. The layers wait for tp, cp and ep; FSDP's
traffic and the sum of gradients over copies run beside. Kernels are slower than the peak, so the
table is an order, not a prediction.

All legal layouts get an estimate by proportion, from the dry run of the plainest, FSDP over all
devices. The best are dry-run one after the other until ten fit, and the table has only numbers of
these dry runs. Where a layout would also fit with --reshard_after_forward never, that is dry-run
too, and has a row of its own.
"""

import math
import sys
from collections import Counter
from dataclasses import replace
from itertools import product
from types import FunctionType
from typing import Any

from distributed.layout import AXES, ExpertConfig, n_experts_of
from distributed.refusals import check_layout, plural
from flags.config import given_flags, spell_flag
from flags.progress import Progress
from tools.parity.halves import without_refused
from tools.reports.dryrun import Report, format_bytes, gathered_again, make_report, table
from tools.reports.schedule import bubble, simulate
from tools.reports.stop_main import stop_main
from training.peak_flops import peak_flops

# layouts in the table; dry runs; devices with fast links to each other
SHOWN = 10
MOST_RUNS = 30
NODE = 8
# GB (10^9 bytes) of a device; bytes/s in one direction inside of a node (NVLink), and to other
# nodes (400 Gbit/s)
MACHINES = {"H100": (80, 450e9, 50e9), "H200": (141, 450e9, 50e9), "B200": (192, 900e9, 50e9)}
STATE = ("parameters", "gradients", "optimizer")
BESIDE = ("fsdp", "efsdp", "dp_replicate")
WHAT_KEEPING_SAVES = (
    "--reshard_after_forward never keeps the gathered weights from forward to backward: the layout "
    "without\nthis flag in more memory, and without the all-gathers that it saves. They run beside "
    "the arithmetic,\nso the bound is lower only where it is theirs."
)


def legal_layouts(cfg: Any, n: int, model_config: Any, options: dict) -> list:
    """A Config for each legal layout of n devices with the same global batch. Degrees that the user
    gave are kept. options: of check_layout."""
    total = cfg.global_batch_size
    if total == -1:
        total = cfg.local_batch_size * n
    axes = ["pp", "dp_replicate", "cp", "tp"]
    if n_experts_of(model_config) > 0:
        axes.append("ep")
    axes = [axis for axis in axes if axis not in given_flags(cfg)]
    divisors = [d for d in range(1, n + 1) if n % d == 0]
    found = []
    for degrees in product(divisors, repeat=len(axes)):
        flags = dict(zip(axes, degrees))
        if n % (math.prod(degrees) // flags.get("ep", 1)):
            continue  # most end here
        c = replace(cfg, **flags)
        data_ranks, rest = divmod(n, c.pp * c.cp * c.tp)
        if rest or total % data_ranks or c.tp > NODE:
            continue
        # sequences of a data rank in a step; a pipeline takes all of them at once
        each = total // data_ranks
        fitting = [each]
        if c.pp == 1:
            fitting = [b for b in range(1, cfg.local_batch_size + 1) if each % b == 0]
        for local in fitting:
            sizes = dict(local_batch_size=local, global_batch_size=total)
            try:
                layout = check_layout(
                    c, model_config, **options | sizes, world_size=n, on_cuda=True
                )
            except ValueError:
                continue
            found.append(replace(c, dp_shard=layout.dp_shard, **sizes))
    return found


# ---------------------------------------------------- seconds of a step, {what takes them: seconds}
def least(parts: dict[str, float]) -> float:
    """Seconds of a step, in which the traffic of BESIDE runs beside everything else."""
    beside = sum(parts.get(name, 0) for name in BESIDE)
    return max(beside, sum(parts.values()) - beside)


def bound_of(parts: dict[str, float]) -> str:
    is_beside = least(parts) == sum(parts.get(name, 0) for name in BESIDE)
    return max((name for name in parts if (name in BESIDE) == is_beside), key=parts.get)


def ep_of(cfg: Any) -> int:
    """--ep; 1 for a recipe without experts."""
    if isinstance(cfg, ExpertConfig):
        return cfg.ep
    return 1


def seconds_per_byte(c: Any, machine: str) -> dict[str, float]:
    """{axis: seconds per byte of a gathered tensor}: each of n ranks receives (n - 1) / n of it."""
    data = c.dp_shard * c.cp
    ep = ep_of(c)
    spans = {  # axis: (ranks, devices from the first of its ranks to the last)
        "tp": (c.tp, c.tp),
        "cp": (c.cp, c.cp * c.tp),
        "ep": (ep, ep),
        "fsdp": (data, data * c.tp),
        "efsdp": (data * c.tp // ep, data * c.tp),
        "dp_replicate": (c.dp_replicate, c.dp_replicate * data * c.tp),
        "pp": (c.pp, c.pp * c.dp_replicate * data * c.tp),
    }
    _, inside, between = MACHINES[machine]
    seconds = {}
    for axis, (ranks, span) in spans.items():
        speed = inside
        if span > NODE:
            speed = between
        seconds[axis] = (1 - 1 / ranks) / speed
    return seconds


def measured(report, c: Any, machine: str) -> dict[str, float]:
    """The parts of a dry run."""
    compute = report.least_flops / peak_flops(machine)
    waits = bubble(simulate(report.rows, report.cost))
    parts = Counter({"arithmetic": compute * (1 - waits), "pipeline": compute * waits})
    cost = seconds_per_byte(c, machine)
    for rank in report.ranks:
        of_rank = Counter()
        for key, number in rank.step.items():
            if key[0] != "moved":
                continue
            _, _, axis, op, size = key
            times = {"all_reduce": 2, "send": 0}.get(op, 1)
            of_rank[axis] += number * size * times * cost.get(axis, 0)
        parts |= of_rank  # the slowest rank
    return dict(parts)


def estimated(c: Any, model_config: Any, plain, machine: str) -> tuple[float, dict[str, float]]:
    """(bytes, parts) of a layout. plain: dry run of FSDP over all devices, with one sequence each."""
    rank = plain.ranks[0]
    split = c.cp * c.tp * c.pp
    cost = seconds_per_byte(c, machine)
    sequences = c.global_batch_size // (c.dp_replicate * c.dp_shard)  # of a data rank
    at_once = c.local_batch_size
    times_gathered = sequences / at_once  # the weights of a layer, in a step
    if c.pp > 1:
        at_once = min(c.pp * c.pp_microbatch_size, sequences)
        times_gathered = 1
    state = sum(rank.step[name] for name in STATE) * c.dp_replicate
    # several micro-batches sum their gradients whole, before they are reduced, where there is room:
    # distributed.layout
    whole = 0.0
    if sequences > c.local_batch_size or c.pp > 1:
        whole = rank.step["gradients"] * plain.layout.world_size / (c.pp * c.tp)
    if c.pp == 1 and state + whole >= MACHINES[machine][0] * 1e9 / 2:
        whole = 0.0
    gathered = 0
    for key, number in rank.step.items():
        if key[0] == "moved" and key[2] in BESIDE:
            gathered += key[4] * number
    experts_of_token = 0
    if n_experts_of(model_config) > 0:
        experts_of_token = model_config.top_k
    # bytes of the layers' inputs, in bf16
    stream = 2 * sequences * c.seq_len * model_config.dim * model_config.n_layers / c.pp
    moved = {
        "tp": 8 * stream / c.cp,
        "cp": 2 * stream,
        "ep": 4 * stream / c.cp / c.tp * experts_of_token,
        "fsdp": gathered / (c.pp * c.tp * ep_of(c)) * times_gathered,
        "dp_replicate": 2 * state,
    }
    compute = plain.least_flops / peak_flops(machine) * sequences / split
    parts = {axis: size * cost[axis] for axis, size in moved.items()}
    parts |= {
        "arithmetic": compute,
        "pipeline": compute * (c.pp - 1) * c.pp_microbatch_size / sequences,
    }
    # gathered weights, and the loss
    other = rank.peak - sum(rank.step[name] for name in STATE) - rank.activations
    return state + whole + rank.activations * at_once / split + other, parts


def print_best(main: FunctionType, cfg: Any, n: int, machine: str) -> int:
    """Prints the table, and returns the exit status. Raises ValueError if no layout is legal, or
    none fits."""
    given, options = stop_main(main, replace(cfg), "check_layout")
    model_config = given[1]
    with Progress(f"legal layouts of {plural(n, 'device')}"):
        found = legal_layouts(cfg, n, model_config, options)
    limit = MACHINES[machine][0] * 1e9
    if not found:
        raise ValueError(
            f"--best {n}: no layout of {n} devices is legal with these flags; a dry run of one "
            "names the rule"
        )
    flags = dict.fromkeys((*AXES, "ep"), 1) | dict(
        dp_shard=n, local_batch_size=1, global_batch_size=n
    )
    print(
        f"{len(found)} legal layouts of {plural(n, 'device')}; estimated from a dry run of the plainest",
        file=sys.stderr,
        flush=True,
    )
    plain = make_report(main, replace(cfg, **without_refused(cfg, flags, model_config)))
    rows = []
    keeping = []
    peaks = []
    with Progress(f"estimates of {len(found)} layouts"):
        guesses = [(*estimated(c, model_config, plain, machine), c) for c in found]
    guesses.sort(
        key=lambda guess: (guess[0] > limit, least(guess[1]) if guess[0] <= limit else guess[0])
    )
    for i, (_, _, c) in enumerate(guesses[:MOST_RUNS], 1):
        report = make_report(main, c)
        parts = measured(report, c, machine)
        peak = max(rank.peak for rank in report.ranks)
        peaks.append(peak)
        cells = cells_of_layout(c, parts, peak)
        fit = "does not fit"
        if peak <= limit:
            rows.append((least(parts), peak, *cells, ""))
            fit = f"fit {len(rows)}"
        # as they come, not yet in order; the table on stdout is sorted
        print(f"dry run {i}, {fit}: {'  '.join(cells)}", file=sys.stderr, flush=True)
        if peak <= limit and may_keep_weights(c, report, peak, limit):
            kept = row_that_keeps_weights(main, c, report, machine)
            fit = "does not fit"
            if kept[1] <= limit:
                keeping.append(kept)
                fit = "fits too"
            print(f"dry run {i}, {fit}: {'  '.join(kept[2:])}", file=sys.stderr, flush=True)
        if len(rows) == SHOWN:
            break
    if not rows:
        raise ValueError(
            f"--best {n}: none of {len(found)} legal layouts fits a device of "
            f"{MACHINES[machine][0]} GB; of "
            f"{len(peaks)} dry runs the least takes {format_bytes(min(peaks))}; use --ac full or more "
            "devices"
        )
    print(
        f"{len(found)} legal layouts of {plural(n, 'device')}; the best that fit an "
        f"{machine}, for --global_batch_size "
        f"{found[0].global_batch_size}:\n"
    )
    head = ["a step", "arithmetic", "peak", "bound by", "flags", "saves"]
    print(table([head, *(row[2:] for row in sorted(rows + keeping))], right=False))
    if keeping:
        print(f"\n{WHAT_KEEPING_SAVES}")
    if n_experts_of(model_config) > 0 and not any("--ep" in flags for *_, flags, _ in rows):
        print(f"\n{explain_no_ep(guesses, max(row[0] for row in rows), limit)}")
    return 0


def may_keep_weights(c: Any, report: Report, peak: float, limit: float) -> bool:
    """Whether --reshard_after_forward never saves all-gathers of a layout, and may fit. What the
    backward gathers in one micro-batch is the most that is kept."""
    if "reshard_after_forward" in given_flags(c):
        return False
    number, size = gathered_again(report)
    return number > 0 and peak + size / report.n <= limit


def row_that_keeps_weights(main: FunctionType, c: Any, report: Report, machine: str) -> tuple:
    """The row of a layout with --reshard_after_forward never. report: of the layout without."""
    keeps = replace(c, reshard_after_forward="never")
    report_kept = make_report(main, keeps)
    parts = measured(report_kept, keeps, machine)
    peak = max(rank.peak for rank in report_kept.ranks)
    number, size = gathered_again(report)
    number_kept, size_kept = gathered_again(report_kept)
    saves = f"{number - number_kept:,} all-gathers, {format_bytes(size - size_kept)}"
    return least(parts), peak, *cells_of_layout(keeps, parts, peak), saves


def cells_of_layout(c: Any, parts: dict[str, float], peak: float) -> tuple[str, ...]:
    """The cells of a row: seconds of a step, share of the arithmetic, memory, bound, flags."""
    given = []
    degrees = {axis: getattr(c, axis) for axis in AXES} | {"ep": ep_of(c)}
    for name, degree in degrees.items():
        if degree > 1:
            given.append(spell_flag(name, degree))
    given.append(spell_flag("local_batch_size", c.local_batch_size))
    if c.reshard_after_forward == "never":
        given.append(spell_flag("reshard_after_forward", "never"))
    share = parts["arithmetic"] / least(parts)
    return (
        f"{least(parts):.3g} s",
        f"{share:.0%}",
        format_bytes(peak),
        bound_of(parts),
        " ".join(given),
    )


def explain_no_ep(guesses: list[tuple], slowest: float, limit: float) -> str:
    """Why no row has --ep. guesses: (bytes, parts, Config) of every legal layout, the best first;
    slowest: seconds of the last row."""
    of_experts = [guess for guess in guesses if ep_of(guess[2]) > 1]
    if not of_experts:
        return (
            "no row has --ep: none is legal with these flags; a dry run with --ep 2 names the rule"
        )
    size, parts, c = of_experts[0]
    which = f"the best of {len(of_experts)} such layouts, --ep {ep_of(c)}, is estimated at"
    if size > limit:
        return f"no row has --ep: {which} {format_bytes(size)} of memory, which does not fit"
    return (
        f"no row has --ep: {which} {least(parts):.3g} s, bound by {bound_of(parts)}, and the slowest "
        f"row takes {slowest:.3g} s; --ep 2 asks for layouts with experts split"
    )
