"""Published training speeds against the predictions of --plan, and predictions for 8 to 4,096 GPUs.

    python benchmarks/scaling.py             # no GPU; a dry run per layout, a few minutes
    python benchmarks/scaling.py "8B" 70B    # only these of RUNS

Four constants are fitted to all rows at once: the share of the data sheet's FLOP/s that matmuls get, that of the bandwidths,
attention's share of the FLOP/s, and how much faster float8 makes the matmuls. The error that counts is that of a row which was
left out of the fit; --plan prints it with every prediction. The run fails when the rows no longer say what EFFICIENCY and its
neighbours in support/plan.py hold.
"""
import copy
import importlib
import math
import sys
from dataclasses import replace
from pathlib import Path

REPO = Path(__file__).parent.parent
sys.path[0] = str(REPO)  # in place of this folder, whose checkpoint.py is another

from support.dryrun import make_report
from support.plan import ATTENTION, BANDWIDTH, EFFICIENCY, MACHINES, MEAN_ERROR, WORST_ERROR, predict

# One dry run per entry; more data ranks move the same bytes per rank, so rows and predictions share them
RUNS = {
    "8B": dict(flavor="8B", seq_len=8192, local_batch_size=2, dp_shard=8, ac="op"),
    "8B 32k": dict(flavor="8B", seq_len=32768, local_batch_size=1, dp_shard=8, ac="full"),
    "8B 64k": dict(flavor="8B", seq_len=65536, local_batch_size=1, dp_shard=4, cp=2, ac="full"),
    "8B 128k": dict(flavor="8B", seq_len=131072, local_batch_size=1, dp_shard=2, cp=4, ac="full"),
    "8B 256k": dict(flavor="8B", seq_len=262144, local_batch_size=1, dp_shard=1, cp=8, ac="full",
                    model_args="max_seq_len=262144"),
    "8B tp 8": dict(flavor="8B", seq_len=8192, local_batch_size=12, dp_shard=8, tp=8, ac="op"),
    "70B": dict(flavor="70B", seq_len=8192, local_batch_size=16, dp_shard=32, tp=8, ac="full"),
    "405B 1F1B": dict(flavor="405B", seq_len=8192, local_batch_size=32, dp_shard=8, tp=8, pp=8, ac="full"),
    "405B": dict(flavor="405B", seq_len=8192, local_batch_size=32, dp_shard=8, tp=8, pp=8, ac="full",
                 pp_schedule="Interleaved1F1B"),
    "671B": dict(flavor="671B", seq_len=4096, local_batch_size=64, dp_shard=16, tp=4, pp=16, ep=64, ac="full"),
}
# torchtitan's tables (paper 2024-12, repository 2025-06), --compile, tokens/s per GPU:
# (run, dp_shard, float8, published); tp rows without async TP, but for 405B
ROWS = [
    ("8B", 8, False, 6667), ("8B", 128, False, 6514), ("8B", 8, True, 8532), ("8B", 128, True, 8380),
    ("8B 32k", 8, True, 3890), ("8B 64k", 4, True, 2540), ("8B 128k", 2, True, 1071), ("8B 256k", 1, True, 548),
    ("8B tp 8", 8, False, 4378), ("8B tp 8", 8, True, 5078),
    ("70B", 32, False, 597), ("70B", 32, True, 810),
    ("405B 1F1B", 8, True, 100), ("405B", 8, True, 128),
]
# Predictions for H100 in bf16: model -> data ranks
GROWTH = {"8B": (8, 64, 512, 4096), "70B": (4, 32, 128, 512), "405B": (8, 16, 64), "671B": (16, 64)}


def with_data_ranks(report, dp_shard: int):
    """The same layout with more or fewer data ranks: what a rank computes and moves stays, what spans nodes does not."""
    layout, old = copy.copy(report.layout), report.layout.dp_shard
    layout.degrees = layout.degrees | {"dp_shard": dp_shard}
    layout.world_size = layout.world_size * dp_shard // old
    layout.global_batch_size = layout.global_batch_size * dp_shard // old
    return replace(report, layout=layout)


def speed(report, cfg, constants, float8: bool) -> float:
    """Tokens per second and GPU."""
    *shares, gain = constants
    seconds = predict(report, MACHINES["H100"], *shares, gain if float8 else 1.0)["seconds"]
    return report.layout.global_batch_size * cfg.seq_len / report.layout.world_size / seconds


def fit(rows) -> list[float]:
    """The constants with the least mean square of log(predicted / published), by steps along one of them at a time."""
    loss = lambda c: sum(math.log(speed(report, cfg, c, float8) / published) ** 2 for report, cfg, float8, published in rows)  # noqa: E731
    best, step = [0.6, 0.5, 0.4, 1.4], 1.2
    lowest = loss(best)
    while step > 1.005:
        moved = False
        for i in range(len(best)):
            for factor in (step, 1 / step):
                tried = [*best[:i], best[i] * factor, *best[i + 1 :]]
                if max(tried[:3]) <= 1 and tried[3] >= 1 and (error := loss(tried)) < lowest:
                    best, lowest, moved = tried, error, True
        step = step if moved else math.sqrt(step)
    return best


def main():
    reports = {}
    for name in sys.argv[1:] or RUNS:
        flags = RUNS[name]
        recipe = "train_deepseek" if name == "671B" else "train_llama3"
        if not (REPO / f"{recipe}.py").exists():
            print(f"{name}: no {recipe}.py here, left out")
            continue
        module = importlib.import_module(recipe)
        cfg = module.Config(**flags)
        print(f"dry run of {name} ...", file=sys.stderr, flush=True)
        reports[name] = make_report(module.main, cfg), cfg
    chosen = [row for row in ROWS if row[0] in reports]
    rows = [(with_data_ranks(reports[name][0], dp), reports[name][1], float8, n) for name, dp, float8, n in chosen]
    constants, errors = fit(rows), []
    print("\n| layout | GPUs | dtype | published | predicted | error | error when left out of the fit |\n|" + " --- |" * 7)
    for i, (report, cfg, float8, published) in enumerate(rows):
        fitted = speed(report, cfg, constants, float8)
        errors.append(speed(report, cfg, fit(rows[:i] + rows[i + 1 :]), float8) / published - 1)
        dtype = "float8" if float8 else "bf16"
        print(f"| {chosen[i][0]}: {report.layout} | {report.layout.world_size} | {dtype} | {published:,} | {fitted:,.0f} | "
              f"{fitted / published - 1:+.0%} | {errors[-1]:+.0%} |")
    mean, worst = sum(map(abs, errors)) / len(errors), max(map(abs, errors))
    print(f"\nFitted: {constants[0]:.2f} of the FLOP/s, {constants[2]:.2f} in attention, {constants[1]:.2f} of the bandwidths, "
          f"float8 matmuls {constants[3]:.2f} x. Left out: {mean:.0%} off on average, {worst:.0%} at worst.")
    print("\n| model | layout | GPUs | tokens/s per GPU | MFU |\n|" + " --- |" * 5)
    for name, sizes in GROWTH.items():
        for dp in sizes if name in reports else ():
            report, cfg = with_data_ranks(reports[name][0], dp), reports[name][1]
            tokens = speed(report, cfg, constants, float8=False)
            mfu = tokens * report.flops_per_token / MACHINES["H100"].flops
            print(f"| {name} | {report.layout} | {report.layout.world_size:,} | {tokens:,.0f} | {mfu:.0%} |")
    now = [round(x, 2) for x in (*constants[:3], mean, worst)]
    kept = [EFFICIENCY, BANDWIDTH, ATTENTION, MEAN_ERROR, WORST_ERROR]
    if chosen == ROWS and now != kept:
        names = "EFFICIENCY, BANDWIDTH, ATTENTION, MEAN_ERROR, WORST_ERROR"
        raise SystemExit(f"support/plan.py has {names} = {kept}; the rows now say {now}")


if __name__ == "__main__":
    main()
