"""Which variant is better, and by more than noise? Runs a recipe in several variants and seeds, and
compares them in pairs.

    python ablate.py train_llama3.py --vary optimizer=adamw,muon lr=1e-3,3e-3 --seeds 3 --steps 300
    python ablate.py train_llama3.py train_mine.py --seeds 4                  # a fork against the original
    python ablate.py --variant "old: train_llama3.py@v1.0" --variant "new: train_mine.py --alpha 0.1" --until 0.02
    python ablate.py train_llama3.py --vary optimizer=adamw,muon --tune lr=1e-3,3e-3,1e-2     # each at its own best rate
    python ablate.py --report runs/ablate                                     # the report again, without any run
    python ablate.py train_llama3.py --steps 300 --campaign runs/search       # many ideas, one error rate: begin,
    python ablate.py --campaign runs/search --candidate mine.py               # then a command for each; one line of JSON
    python ablate.py --watch runs/llama3 runs/mine                            # curves of runs in the terminal, while they train
    python ablate.py --watch runs/llama3 runs/mine --picture curves.png       # all their curves on one page

Seed i sets --seed and --data_seed of all variants: equal initial weights and equal batches, so that
the difference of two runs says more than two losses would. All flags not listed below go to every
run. Each run is a usual run folder, --out/VARIANT/seed-I. The same command again runs only the
missing runs. docs/ablations.md has worked examples.
"""

import flags.interrupt  # noqa: F401  Ctrl-C ends in one line, from here on

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import signal
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from distributed.refusals import refuse
from flags.config import Parser, check_range, usage_error
from flags.files import check_local, read_json, write_file
from storage.resume import lock_run
from tools.study.report import costs_of, markdown, report_study
from tools.study.runs import run_all
from tools.study.study import (
    APART,
    DEFAULTS,
    check_units,
    next_runs,
    noise_of,
    read_runs,
    read_study,
    winners_of,
)
from tools.study.variants import (
    at_size,
    candidates_of,
    check_variants,
    grid_of,
    has_flag,
    set_steps,
    variants_of,
)

# parts of names of metrics
HIGH_IS_GOOD = "reward|acc|pass_at_k|eval_greedy|score|exact_match|solved|per_second|mfu"
LOW_IS_GOOD = "loss|bits_per_byte|memory_gib|time_s"


# flags of a study that a campaign does not have
CAMPAIGN_HAS_NOT = (
    "vary",
    "baseline",
    "tune",
    "tune_seeds",
    "budget",
    "ladder",
    "until",
    "noise",
    "reach",
    "out",
    "only",
    "report",
    "watch",
    "picture",
)


# ---------------------------------------------------------------- the command line
def add_variant_flags(add: Callable) -> None:
    """What is compared. add: add_argument of a parser."""
    add(
        "--vary",
        nargs="+",
        default=[],
        metavar="FLAG=A,B",
        help="all combinations; values with commas are parted by ';'",
    )
    add(
        "--variant",
        action="append",
        default=[],
        metavar="'NAME: FLAGS'",
        help="one of several; also 'NAME: RECIPE FLAGS'",
    )
    add(
        "--baseline",
        metavar="NAME",
        help="the variant that the others are compared with [default: the first]",
    )
    add(
        "--tune",
        metavar="FLAG=A,B",
        help="first the best of these numbers for each variant, on other seeds",
    )
    add("--tune_seeds", type=int, default=2, help="runs of each value of --tune [default: 2]")
    add(
        "--budget",
        metavar="tokens=N",
        help="tokens=, flops= or seconds= of each run: sets --steps of each variant",
    )
    add(
        "--ladder",
        metavar="'SIZE;SIZE'",
        help="a study for each size, as in --model_args; and how the differences go on",
    )
    add(
        "--tokens_per_parameter",
        type=ratios_of,
        default=(20.0,),
        metavar="R,R",
        help="sets --steps of --ladder's sizes; several numbers: each size with each, so that the "
        "exponents of sizes and of tokens can be told apart [default: 20]",
    )
    add(
        "--ladder_to",
        type=float,
        metavar="N",
        help="parameters of the size to extrapolate to [default: 10 x the largest]",
    )


def add_study_flags(add: Callable) -> None:
    """How variants are compared, and where the runs are made. add: add_argument of a parser."""
    add(
        "--seeds",
        type=int,
        help="runs of each variant [default: 3], of --campaign --final [default: 10]",
    )
    add(
        "--until",
        type=float,
        metavar="D",
        help="add seeds until each interval excludes 0, or all differences as large as D",
    )
    add(
        "--max_seeds",
        type=int,
        help="the most that --until may take [default: 12], or a comparison of --campaign "
        "[default: as many as find a difference of the noise's size in 80 %% of cases]",
    )
    add(
        "--noise",
        metavar="STUDY",
        help="a finished study of the same recipe and size: the noise of its pairs counts, too",
    )
    add("--metric", default="val_loss", help="a key of metrics.jsonl [default: val_loss]")
    add(
        "--best",
        choices=["low", "high"],
        help="whether low or high is good [default: known for our own metrics]",
    )
    add(
        "--reach",
        type=float,
        metavar="X",
        help="compare how many tokens a run needs until its metric reaches X",
    )
    add(
        "--out",
        default="runs/ablate",
        help="folder of the study; again the same folder continues it [default: runs/ablate]",
    )
    add(
        "--jobs",
        type=int,
        default=0,
        help="runs at once [default: as many as GPUs or CPU cores allow]",
    )
    add(
        "--nproc",
        type=int,
        default=1,
        help="processes of each run, started by torchrun [default: 1]",
    )
    add(
        "--only",
        metavar="NAME/SEED",
        help="make this run alone, and no report: for many machines that share --out",
    )
    add(
        "--watch",
        nargs="+",
        default=[],
        metavar="RUN",
        help="draw the curves of these runs, or of a study, in the terminal while they train",
    )
    add(
        "--picture",
        metavar="FILE",
        help="with --watch: draw their curves once, on one page (.png, .svg or .pdf)",
    )
    add(
        "--report",
        "--collect",
        metavar="FOLDER",
        help="write the report of the finished runs of a study, and run nothing",
    )


def add_campaign_flags(add: Callable) -> None:
    """Many candidates, one after the other. add: add_argument of a parser."""
    add(
        "--campaign",
        metavar="FOLDER",
        help="a search with one error rate: RECIPE FLAGS begins it, then a command for each "
        "candidate, compared with the best so far; alone it goes on, or says where it stands",
    )
    add("--candidate", metavar="COPY.py", help="a changed copy of the best of --campaign")
    add(
        "--layouts",
        default="tp=2;dp_shard=2",
        metavar="'AXIS=N;AXIS=N'",
        help="layouts on which each candidate must pass --check_parity; '' for none "
        "[default: tp=2;dp_shard=2]",
    )
    add(
        "--final",
        metavar="TEXT",
        help="judge the last best of --campaign against its start, once, on seeds and a text that "
        "nothing was chosen by",
    )


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """(our flags and `recipes`, the words before the first flag; the flags for every run)."""
    parser = Parser(usage=argparse.SUPPRESS, description=__doc__)
    add_variant_flags(parser.add_argument)
    add_study_flags(parser.add_argument)
    add_campaign_flags(parser.add_argument)
    recipes = []
    for word in argv:
        if word.startswith("-"):
            break
        recipes.append(word)
    args, common = parser.parse_known_args(
        argv[len(recipes) :], argparse.Namespace(recipes=recipes)
    )
    if not args.best:
        args.best = good_direction(args.metric)
    if args.max_seeds is None and not args.campaign:
        args.max_seeds = 12
    if args.seeds is None:
        args.seeds = 3
        if args.final:
            args.seeds = 10
    return args, common


def check_campaign(args: argparse.Namespace) -> None:
    """Refuse flags of a study beside those of a campaign."""
    for name in ("campaign", "candidate", "final"):
        if getattr(args, name) == "":
            raise ValueError(f"--{name} needs a name")
    if not args.campaign:
        for name in ("candidate", "final"):
            if getattr(args, name):
                raise ValueError(f"--{name} has no effect without --campaign; leave it out")
        if args.layouts != "tp=2;dp_shard=2":
            raise ValueError("--layouts has no effect without --campaign; leave it out")
        return
    check_range(args, 1, math.inf, "nproc")
    check_range(args, 0, math.inf, "jobs")
    if args.max_seeds is not None:
        check_range(args, 3, APART - 2, "max_seeds")
    usual, _ = parse([])
    for name in CAMPAIGN_HAS_NOT:
        if getattr(args, name) != getattr(usual, name):
            raise ValueError(
                f"--campaign compares one candidate at a time with the best so far; leave out --{name}"
            )
    if args.seeds != usual.seeds and not args.final:
        raise ValueError(
            "--seeds: a campaign finds out how many each comparison needs; leave it out"
        )
    if args.final and (args.candidate or args.variant):
        raise ValueError("--final judges the last best; leave out --candidate and --variant")
    check_range(args, 2, APART - 1, "seeds")


def good_direction(metric: str) -> str:
    """Whether "low" or "high" is good. Raises ValueError for a metric that is not our own."""
    if re.search(HIGH_IS_GOOD, metric):
        return "high"
    if re.search(LOW_IS_GOOD, metric):
        return "low"
    raise ValueError(
        f"--metric {metric} is not known: say which values are good, --best low or --best high"
    )


def check_numbers(args: argparse.Namespace) -> None:
    """Refuse wrong values of our own flags, and fill in --jobs."""
    check_range(args, 1, math.inf, "nproc", "tune_seeds")
    check_range(args, 1, APART, "seeds", "max_seeds")
    check_range(args, 1, 1e300, "ladder_to")
    for name, needed, usual in (
        ("max_seeds", "until", 12),
        ("tune_seeds", "tune", 2),
        ("tokens_per_parameter", "ladder", (20.0,)),
        ("ladder_to", "ladder", None),
    ):
        value = getattr(args, name)
        if value != usual and not getattr(args, needed):
            if name == "tokens_per_parameter":
                typed = ",".join(f"{number:g}" for number in value)
            else:
                typed = f"{value:g}"
            raise ValueError(f"--{name} {typed} has no effect without --{needed}; leave it out")
    check_range(args, 0, math.inf, "jobs")
    own_noise = args.noise and os.path.realpath(args.noise) == os.path.realpath(args.out)
    refuse(
        [
            (
                not args.recipes and not args.variant,
                "the recipes come first: python ablate.py train_llama3.py --vary lr=1e-3,3e-3",
            ),
            (
                args.until is not None and not args.until > 0,
                f"--until {args.until} must be above 0",
            ),
            (
                args.until and args.max_seeds < max(args.seeds, 2),
                f"--max_seeds {args.max_seeds} must be --seeds {args.seeds} or more, and at least "
                "2",
            ),
            (
                args.noise and args.ladder or own_noise,
                "--noise is of one size and of another study: leave it out with --ladder, and "
                "give another folder than --out",
            ),
            (
                args.tune and not re.fullmatch(r"-*\w+=[-+.\deE,]*\d", args.tune),
                f"--tune {args.tune!r}: need FLAG=A,B of numbers",
            ),
            (
                args.budget
                and not re.fullmatch(r"(tokens|flops|seconds)=\d[\d.]*(e\d+)?", args.budget),
                f"--budget {args.budget!r}: need tokens=N, flops=N or seconds=N",
            ),
            (
                args.budget and args.ladder,
                "--ladder sets the tokens of each size by --tokens_per_parameter; leave --budget "
                "out",
            ),
        ]
    )
    fill_jobs(args)


def fill_jobs(args: argparse.Namespace) -> None:
    """As many runs at once as there are devices, unless --jobs says how many. Raises ValueError for
    more than there are GPUs."""
    gpus = max(args.jobs, 1) * args.nproc
    if args.gpus and gpus > args.gpus:
        raise ValueError(
            f"--jobs {args.jobs} x --nproc {args.nproc} needs {gpus} GPUs, and there are {args.gpus}"
        )
    if not args.jobs:
        devices = args.gpus or os.cpu_count() or 1
        args.jobs = max(1, devices // args.nproc)


def ratios_of(text: str) -> tuple[float, ...]:
    """ "5,20" -> (5.0, 20.0)"""
    found = tuple(float(word) for word in text.split(","))
    if min(found) <= 0 or len(set(found)) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r}: need different numbers above 0")
    return found


def check_all(args: argparse.Namespace, common: list[str]) -> dict[str, dict]:
    """{size: checked variants}; without --ladder a single size, "". With several numbers of
    --tokens_per_parameter a size is "SIZE@NUMBER". Prints what the runs cost."""
    variants = variants_of(args, common)
    if not args.ladder:
        check_size(args, "", variants)
        return {"": variants}
    sizes = {}
    points = []  # (parameters, tokens) of each study
    for size in args.ladder.replace(" ", "").split(";"):
        for ratio in args.tokens_per_parameter:
            name = size
            if len(args.tokens_per_parameter) > 1:
                name = f"{size}@{ratio:g}"
            if size:
                sizes[name] = at_size(variants, size)
                check_size(args, name, sizes[name], ratio)
                parameters = next(iter(sizes[name].values()))["parameters"]
                points.append((parameters, ratio * parameters))
    from tools.study.ladder import describe_design

    print(describe_design(points), flush=True)
    return sizes


def check_size(
    args: argparse.Namespace, size: str, variants: dict[str, dict], ratio: float = 0
) -> None:
    """Check the variants of one size, with every value of --tune, and set their steps. Prints what
    the runs cost. ratio: tokens per parameter, of --ladder."""
    check_variants(variants, args)
    of_variant = args.seeds
    if args.tune:
        tuned = args.tune.partition("=")[0].lstrip("-")
        for variant in variants.values():
            if has_flag(variant["flags"], tuned):
                raise ValueError(
                    f"--tune sets --{tuned} of every variant; leave it out of the other flags"
                )
        grid = grid_of("--tune", [args.tune])
        check_variants(candidates_of(variants, grid), args)
        of_variant += len(grid) * args.tune_seeds
    check_units(args.metric, list(variants.values()))
    unit, _, amount = (args.budget or "").partition("=")
    if args.ladder:  # all variants of a size get the baseline's tokens
        baseline = next(iter(variants.values()))
        tokens = ratio * (baseline["parameters"] or 0)
        set_steps(variants, "tokens", tokens)
    elif unit in ("tokens", "flops"):
        set_steps(variants, unit, float(amount))
    if unit != "seconds":  # the steps are known
        print(f"\n{size}\n{markdown(costs_of(variants))}".lstrip(), flush=True)
    counted = f"{len(variants) * of_variant} runs"
    if args.tune:
        counted += ", with --tune"
    print(counted, flush=True)


# ---------------------------------------------------------------- studies
def open_study(args: argparse.Namespace, folder: Path, variants: dict, **settings: Any) -> dict:
    """The study in a folder, new or continued. Changes that would make the runs incomparable are
    refused."""
    path = folder / "study.json"
    old = {"variants": {}}
    if path.exists():
        old = read_json(path)
    for name in old["variants"].keys() & variants.keys():
        same = old["nproc"] == args.nproc
        for key in ("recipe", "flags"):
            same = same and old["variants"][name][key] == variants[name][key]
        if not same:
            raise ValueError(
                f"{folder} has a variant {name!r} of another recipe, other flags or --nproc; use "
                "--out NEW"
            )
    study = DEFAULTS | vars(args)
    study |= {
        "baseline": next(iter(variants)),
        "variants": variants,
        "looks": old.get("looks", []),
        "noise": None,
        "comparisons": max(old.get("comparisons", 1), len(variants) - 1),
        "command": shlex.join(["python", *sys.argv]),
    }
    study |= settings
    read_runs(study, folder)  # refuses runs of other code
    folder.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(study, indent=1).encode())
    return study


def run_apart(
    args: argparse.Namespace, folder: Path, variants: dict, stopping: list, **settings: Any
) -> dict:
    """Run all variants with seeds that no comparison uses, and return the study."""
    study = open_study(
        args, folder, variants, first_seed=APART, until=None, max_seeds=0, **settings
    )
    runs = []
    for i in range(study["seeds"]):
        for name in variants:
            runs.append((name, APART + i))
    run_all(study, folder, runs, stopping)
    return study


def measure_seconds(args: argparse.Namespace, folder: Path, variants: dict, stopping: list) -> None:
    """Add to each variant the median "seconds" of a step, from a run of 12 steps."""
    short = ["--steps=12", "--val_every=0", "--checkpoint_every=0", "--log_every=1"]
    timed = candidates_of(variants, [("timing", short)])
    for variant in timed.values():
        variant["steps"] = 12
        variant["val_every"] = 0
    study = run_apart(args, folder, timed, stopping, seeds=1, metric="step_time_s")
    for (name, _), lines in read_runs(study, folder).items():
        seconds = [line["step_time_s"] for line in lines if "step_time_s" in line]
        variants[name.removesuffix(" timing")]["seconds"] = statistics.median(seconds or [0])


def tune(args: argparse.Namespace, folder: Path, variants: dict, stopping: list) -> list[str]:
    """Add the best flag of --tune to each variant, by runs with other seeds than the comparison's.
    Returns lines to report."""
    grid = grid_of("--tune", [args.tune])
    flags_of = dict(grid)
    candidates = candidates_of(variants, grid)
    study = run_apart(args, folder, candidates, stopping, seeds=args.tune_seeds)
    if stopping:
        return []
    best, said = winners_of(study, folder, list(variants), list(flags_of))
    for name, cell in best.items():
        variants[name]["flags"] = [*variants[name]["flags"], *flags_of[cell]]
    print("\n".join(said), flush=True)
    return said


def run_study(
    args: argparse.Namespace, size: str, sizes: int, variants: dict, stopping: list
) -> bool:
    """Make the missing runs of a study, and its report. Returns whether all runs ended well. sizes:
    how many intervals share an error of 5 % with those of this study: 1 without --ladder; with
    --ladder one for each size, and one for the extrapolation."""
    folder = Path(args.out, size)
    tuned = []
    noise = None
    unit, _, amount = (args.budget or "").partition("=")
    if unit == "seconds":
        measure_seconds(args, folder / "timing", variants, stopping)
        if not stopping:
            set_steps(variants, "seconds", float(amount))
            print(markdown(costs_of(variants)), flush=True)
    if args.noise:
        noise = noise_of(args.noise, args, next(iter(variants.values())))
    if args.tune and not stopping:
        tuned = tune(args, folder / "tuning", variants, stopping)
    if stopping:
        return False
    study = open_study(args, folder, variants, size=size, sizes=sizes, tuned=tuned, noise=noise)
    tried = set()
    while not stopping:
        todo = next_runs(study, folder, tried)
        if not todo:
            return report_study(folder)
        run_all(study, folder, todo, stopping)
        tried.update(todo)
        if args.only:  # not a run of this size: run_all() ends the program after the run of --only
            return True
    return False


def stop_signals() -> list[int]:
    """A list that gets the number of a signal that asks to stop."""
    stopping = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopping.append(number))
    return stopping


def run_campaign(args: argparse.Namespace, common: list[str]) -> int:
    """One command of a campaign. stdout gets one line of JSON; everything else goes to stderr.
    Returns the exit status, by the kind of answer."""
    from tools.study.campaign import STATUS, Stopped, answer, check_new

    check_local(args.campaign, "--campaign")
    check_new(args.campaign, args)
    fill_jobs(args)
    stopping = stop_signals()
    status = 0
    with contextlib.redirect_stdout(sys.stderr):
        try:
            lock_run(args.campaign)
        except ValueError as error:
            raise ValueError(str(error).replace("--out", "--campaign")) from None
        try:
            found = answer(args.campaign, args, common, stopping)
            status = STATUS[found["verdict"]]
        except Stopped:
            found = {"verdict": "stopped", "why": "the same command continues"}
            status = 128 + stopping[0]
    print(json.dumps({"campaign": args.campaign} | found), flush=True)
    return status


def main(argv: list[str]) -> int:
    args, common = parse(argv)
    check_campaign(args)
    if args.report:
        return int(not report_study(args.report))
    if args.watch or args.picture:
        from tools.reports.curves import show_runs

        return show_runs(args.watch, args.picture, [*args.recipes, *common])
    args.gpus = torch.cuda.device_count()
    if args.campaign:
        return run_campaign(args, common)
    check_numbers(args)
    if args.noise:
        read_study(args.noise)  # refuses a folder without a study
    check_local(args.out, "--out")
    sizes = check_all(args, common)
    if not args.only:
        lock_run(args.out)
    stopping = stop_signals()
    shares = len(sizes)
    if args.ladder:
        shares += 1
    status = 0
    for size, variants in sizes.items():
        ended_well = run_study(args, size, shares, variants, stopping)
        if stopping:
            print(f"stopped by {signal.Signals(stopping[0]).name}; the same command continues")
            return 128 + stopping[0]
        if not ended_well:
            status = 1
    if args.only:
        raise ValueError(
            f"--only {args.only} is no run of this study: need NAME/SEED, with a name of the "
            "table above"
        )
    if args.ladder:
        from tools.study.ladder import report_ladder

        report_ladder(args.out, list(sizes), args.ladder_to)
    return status


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (ValueError, OSError) as error:  # OSError: a full disk; the runs that ended are kept
        usage_error(error)
