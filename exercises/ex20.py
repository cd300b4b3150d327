"""The check of exercise 20: seconds against a ring simulated message by message, bytes against the
dry run, then the bound."""

import functools

import dry
import hand20
from feedback import Wrong, alone

from models.llama3 import Llama3, Llama3Config
from tools.reports import dryrun

RINGS = [
    (n, n_bytes, latency, bandwidth)
    for n in (3, 2, 8)
    for n_bytes, latency, bandwidth in (
        (24_000_000, 0.0, 5e10),
        (24, 5e-6, 5e10),
        (24_000, 5e-6, 4.5e11),
    )
]
# of dp_shard 4
MODELS = [dict(n_layers=4, dim=64), dict(n_layers=6, dim=32), dict(n_layers=5, dim=64)]
SMALL = dict(n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96, vocab_size=256)
BOUNDS = [  # FLOPs, ranks, bytes gathered, bytes reduced, peak, bandwidth
    (4.2e14, 8, 30_600_000_000, 32_100_000_000, 9.89e14, 4.5e11),
    (4.2e14, 8, 30_600_000_000, 32_100_000_000, 9.89e14, 5e10),
    (1e15, 2, 10**9, 10**9, 1e15, 1.25e9),
    (1e15, 64, 10**9, 10**9, 1e15, 1e9),
]


def simulated(collective: str, n: int, n_bytes: int, latency: float, bandwidth: float) -> float:
    """Send pieces round a ring until every rank has what the collective promises; the clock of the
    slowest rank."""
    clock = [0.0] * n
    for _ in range(2 if collective == "all_reduce" else 1):
        # gathered: which pieces; reduced: which summands of the piece that came last
        held = [{rank} for rank in range(n)]
        while any(len(pieces) < n for pieces in held):
            clock = [
                max(clock[rank], clock[rank - 1]) + latency + n_bytes / n / bandwidth
                for rank in range(n)
            ]
            held = [held[rank] | held[rank - 1] for rank in range(n)]
    return clock[0]


def predicted(name: str, *args):
    return getattr(hand20, name)(*args)


def check_seconds():
    for ring in RINGS:
        n, n_bytes, latency, bandwidth = ring
        for collective in ("all_gather", "reduce_scatter", "all_reduce"):
            got = alone(predicted, "seconds", collective, *ring)
            want = simulated(collective, *ring)
            if not abs(got - want) <= 1e-9 * want:
                whole = (n - 1) * (latency + n_bytes / bandwidth)
                guess = next(
                    (
                        text
                        for value, text in (
                            (
                                want / 2,
                                "an all-reduce goes round twice: a reduce-scatter, then an "
                                "all-gather",
                            ),
                            (2 * want, "these go round once; an all-reduce goes round twice"),
                            (whole, "a rank sends one piece of n in a step, not the whole"),
                            (want - (n - 1) * latency, "how many messages follow each other?"),
                            (
                                want * n / (n - 1),
                                "a rank need not send its own piece to itself: n - 1 steps",
                            ),
                        )
                        if abs(got - value) <= 1e-9 * value
                    ),
                    "n - 1 steps, or twice as many; each takes latency + piece / bandwidth",
                )
                raise Wrong(
                    f"seconds: {collective} of {n_bytes:,} bytes over {n} ranks, latency "
                    f"{latency:g}, bandwidth "
                    f"{bandwidth:g}: {got:.3g} s, and a ring needs {want:.3g}: {guess}"
                )


@functools.cache
def counted(**model) -> tuple[int, int]:
    """Bytes gathered and reduced by the recipe's own code, in a dry run."""
    args = ",".join(f"{name}={value}" for name, value in (SMALL | model).items())
    report = dry.report_of(
        model_args=args, dp_shard=4, compute_dtype="bfloat16", local_batch_size=1
    )
    found = dryrun.totals(
        {key[1:]: n for key, n in report.ranks[0].step.items() if key[0] == "moved"}
    )
    return found["fsdp", "all_gather"][1], found["fsdp", "reduce_scatter"][1]


def check_traffic():
    for model in MODELS:
        whole = Llama3(Llama3Config(**SMALL | model))
        block, embedding = (
            sum(p.numel() for p in part.parameters())
            for part in (whole.blocks["0"], whole.tok_embeddings)
        )
        rest = sum(p.numel() for p in whole.parameters()) - model["n_layers"] * block - embedding
        sizes = (model["n_layers"], block, embedding, rest)
        got = tuple(alone(predicted, "fsdp_traffic", *sizes))
        want = counted(**model)
        for mine, right, what in zip(got, want, ("gathered", "reduced"), strict=True):
            if mine != right:
                per_block = 2 * block if what == "gathered" else 4 * block
                raise Wrong(
                    f"fsdp_traffic{sizes}: {mine:,} bytes are {what}, and --dry_run counts "
                    f"{right:,}: "
                    f"{right - mine:+,}, which is {(right - mine) / per_block:+.2f} blocks. How "
                    "often is each "
                    "gathered, and in which dtype does it travel?"
                )


def check_bound():
    for case in BOUNDS:
        flops, n, gathered, reduced, peak, bandwidth = case
        arithmetic = flops / peak
        network = (n - 1) / n * (gathered + reduced) / bandwidth
        got, by = alone(predicted, "bound", *case)
        want = (max(arithmetic, network), "arithmetic" if arithmetic >= network else "network")
        if not abs(got - want[0]) <= 1e-9 * want[0] or by != want[1]:
            guess = (
                "the sum: they overlap, so the longer one counts"
                if abs(got - arithmetic - network) < 1e-9 * got
                else ("does a rank send (n - 1)/n of the bytes, and which of the two takes longer?")
            )
            raise Wrong(
                f"bound{case}: {got:.4g} s, bound by {by!r}, and should be {want[0]:.4g} s by "
                f"{want[1]!r} (arithmetic "
                f"{arithmetic:.4g} s, network {network:.4g} s): {guess}"
            )


def check():
    check_seconds()
    check_traffic()
    check_bound()
