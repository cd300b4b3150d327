"""Which variant is better, and by more than noise? Runs a recipe in several variants and seeds, and
compares them in pairs.

    python ablate.py train_llama3.py --vary optimizer=adamw,muon lr=1e-3,3e-3 --seeds 3 --steps 300
    python ablate.py train_llama3.py train_mine.py --seeds 4                  # a fork against the original
    python ablate.py --variant "old: train_llama3.py@v1.0" --variant "new: train_mine.py --alpha 0.1" --until 0.02
    python ablate.py train_llama3.py --vary optimizer=adamw,muon --tune lr=1e-3,3e-3,1e-2     # each at its own best rate
    python ablate.py --report runs/ablate                                     # the report again, without any run

Seed i sets --seed and --data_seed of all variants: equal initial weights and equal batches, so that
the difference of two runs says more than two losses would. All flags not listed below go to every
run. Each run is a usual run folder, --out/VARIANT/seed-I. The same command again runs only the
missing runs. docs/ablations.md has worked examples.
"""

import argparse
import ast
import contextlib
import gc
import importlib.util
import io
import itertools
import json
import math
import multiprocessing
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from unittest import mock

import torch

from distributed.refusals import refuse
from flags.config import Parser, check_range, usage_error
from flags.files import check_local, read_json, sha256_file, write_file
from storage.resume import lock_run
from tools.study.report import costs_of, markdown, report_study
from tools.study.runs import run_all
from tools.study.study import (
    APART,
    DEFAULTS,
    check_units,
    folder_of,
    locate,
    next_runs,
    noise_of,
    read_runs,
    read_study,
    winners_of,
)

# parts of names of metrics, high is good
HIGH = "reward|acc|pass_at_k|eval_greedy|score|exact_match|solved|per_second|mfu"


def parse(argv) -> tuple[argparse.Namespace, list[str]]:
    """(our flags and `recipes`, the words before the first flag; the flags for every run)."""
    parser = Parser(usage=argparse.SUPPRESS, description=__doc__)
    add = parser.add_argument
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
    add("--seeds", type=int, default=3, help="runs of each variant [default: 3]")
    add(
        "--until",
        type=float,
        metavar="D",
        help="add seeds until each interval excludes 0, or all differences as large as D",
    )
    add("--max_seeds", type=int, default=12, help="the most that --until may take [default: 12]")
    add(
        "--noise",
        metavar="STUDY",
        help="a finished study of the same recipe and size: the noise of its pairs counts, too",
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
        type=float,
        default=20,
        help="sets --steps of --ladder's sizes [default: 20]",
    )
    add(
        "--ladder_to",
        type=float,
        metavar="N",
        help="parameters of the size to extrapolate to [default: 10 x the largest]",
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
        "--report",
        "--collect",
        metavar="FOLDER",
        help="write the report of the finished runs of a study, and run nothing",
    )
    recipes = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    args, common = parser.parse_known_args(
        argv[len(recipes) :], argparse.Namespace(recipes=recipes)
    )
    if not args.best and not re.search(f"{HIGH}|loss|bits_per_byte|memory_gib|time_s", args.metric):
        raise ValueError(
            f"--metric {args.metric} is not known: say which values are good, --best low or "
            "--best high"
        )
    args.best = args.best or ("high" if re.search(HIGH, args.metric) else "low")
    return args, common


# ---------------------------------------------------------------- variants
def grid_of(flag: str, items: list[str]) -> list[tuple[str, list[str]]]:
    """[(name, flags)] of all combinations of FLAG=A,B; a single one without a name if there are no items."""
    grid = []
    for item in items:
        name, equals, values = item.partition("=")
        values = values.split(";" if ";" in values else ",")
        if not equals or "" in values:
            raise ValueError(f"{flag} {item!r}: need FLAG=A,B")
        grid.append([f"{name.lstrip('-')}={value}" for value in values])
    return [(" ".join(cell), [f"--{text}" for text in cell]) for cell in itertools.product(*grid)]


def variants_of(args, common: list[str]) -> dict[str, dict]:
    """{name: {"recipe", "flags"}}, the baseline first."""
    named = []
    found = {}
    for item in args.variant:
        name, colon, text = item.partition(":")
        words = shlex.split(text)
        own = words[:1] if words and not words[0].startswith("-") else []
        if not colon or not name.strip():
            raise ValueError(
                f"--variant {item!r}: need 'NAME: FLAGS' or 'NAME: RECIPE FLAGS', where FLAGS may "
                "be empty"
            )
        if not own and not args.recipes:
            raise ValueError(
                f"--variant {item!r} names no recipe: write one behind the name, or before all "
                "flags"
            )
        named += [(name.strip(), recipe, words[len(own) :]) for recipe in own or args.recipes]
    for (name, recipe, flags), (cell, more) in itertools.product(
        named or [("", recipe, []) for recipe in args.recipes], grid_of("--vary", args.vary)
    ):
        several = len(args.recipes) > 1 and recipe in args.recipes
        words = [recipe.rpartition("/")[2].replace(".py", "")] * several + [
            text for text in (name, cell) if text
        ]
        full = " ".join(words) or Path(recipe).stem
        if any(folder_of("", full, 0) == folder_of("", other, 0) for other in found):
            raise ValueError(f"two variants are called {full!r}; give each a name of its own")
        found[full] = {"recipe": recipe, "flags": [*common, *flags, *more]}
    if len(found) < 2 and not args.ladder:
        raise ValueError(
            "one variant is nothing to compare: give --vary, two --variant, or a second recipe"
        )
    if (first := args.baseline or next(iter(found))) not in found:
        raise ValueError(
            f"--baseline {first!r} is none of the variants: {', '.join(map(repr, found))}"
        )
    return {first: found.pop(first)} | found


def file_of(recipe: str, out: str) -> Path:
    """The file of a recipe. RECIPE@COMMIT is checked out, once, as a git worktree below the folder
    of the study."""
    path, at, commit = recipe.rpartition("@")
    if not at or Path(recipe).is_file():
        return Path(recipe)

    def git(*words) -> str:
        done = subprocess.run(
            ["git", "-C", str(Path(path).resolve().parent), *words], capture_output=True, text=True
        )
        if done.returncode:
            raise ValueError(f"recipe {recipe}: {done.stderr.strip().splitlines()[-1]}")
        return done.stdout.strip()

    sha = git("rev-parse", "--verify", f"{commit}^{{commit}}")
    below = git("rev-parse", "--show-prefix")
    tree = Path(out, "checkouts", sha[:12]).resolve()
    if not tree.exists():
        git("worktree", "add", "--detach", str(tree), sha)
    return tree / below / Path(path).name


def sources_of(recipe: Path) -> dict[str, str]:
    """{file: sha256} of the recipe and of all files of its checkout that training may import, and
    the version of torch. tools/ has reports, which training never runs."""
    found = {"torch": torch.__version__}
    waiting = [recipe.stem]
    while waiting:
        file = waiting.pop().replace(".", "/") + ".py"
        if (
            file not in found
            and not file.startswith("tools/")
            and (path := locate(recipe, file)).is_file()
        ):
            found[file] = sha256_file(path)
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    waiting += [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom) and node.module:
                    waiting += [node.module, *(f"{node.module}.{a.name}" for a in node.names)]
    return found


def check_variants(variants: dict[str, dict], args) -> None:
    """Check all command lines, and add to each variant: what check_variant returns, the recipe's
    "file", and "files", the sources of its training. One process for each recipe, because two
    checkouts have different modules of one name."""
    for name, variant in variants.items():
        variant["file"] = str(file_of(variant["recipe"], args.out))
        if given := [
            word.split("=")[0]
            for word in variant["flags"]
            if re.match(r"--(seed|data_seed|out)(=|$)", word)
        ]:
            raise ValueError(
                f"variant {name!r}: ablate.py sets {given[0]} of every run; leave it out"
            )
    for file in dict.fromkeys(variant["file"] for variant in variants.values()):
        if not os.path.isfile(file):
            raise ValueError(
                f"{file} is no file; did you mean --{file}?"
                if "=" in file
                else f"recipe {file} is no file"
            )
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork"), forget_modules) as process:
            for name, variant in variants.items():
                flags = [*variant["flags"], f"--out={folder_of(args.out, name, 0)}"]
                try:
                    if variant["file"] == file:
                        variant |= process.submit(
                            check_variant, file, flags, args.nproc, args.metric
                        ).result()
                        variant["files"] = sources_of(Path(file))
                except Exception as error:  # a recipe may have any
                    raise ValueError(
                        f"variant {name!r}: {error if isinstance(error, ValueError) else repr(error)}"
                    ) from None


def forget_modules() -> None:
    """Make this process import nanotitan's modules anew, from the checkout of the recipe."""
    # torch has registered classes of the modules that are forgotten, and must not lose them
    gc.disable()
    packages = {
        path.name for path in Path(__file__).parent.iterdir() if (path / "__init__.py").exists()
    }
    for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
        del sys.modules[name]


def check_variant(file: str, flags: list[str], nproc: int, metric: str) -> dict:
    """Check a command line: {"steps", "val_every", "parameters" ...}. Raises ValueError for any
    mistake in the command line.

    The recipe's main runs in this process until the model's shapes are known: it parses, checks the
    layout and opens the data.
    """
    sys.path.insert(0, str(Path(file).resolve().parent))
    import parallel
    from distributed import launch
    from flags.config import parse_config
    from tools.reports.stop_main import do_nothing, stop_main

    output = io.StringIO()
    world = {"RANK": "0", "WORLD_SIZE": str(nproc)} if nproc > 1 else {}
    launch.set_timeouts = launch.StopSignal = do_nothing
    launch.connect = parallel.make_mesh = lambda layout, *flags, **more: layout
    try:
        with (
            contextlib.redirect_stderr(output),
            contextlib.redirect_stdout(io.StringIO()),
            mock.patch.dict(os.environ, world),
        ):
            spec = importlib.util.spec_from_file_location("recipe", file)
            # Config reads help texts from its source
            sys.modules["recipe"] = module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            cfg = parse_config(module.Config, flags)
            if metric.startswith("val_") and not vars(cfg).get("val_every"):
                raise ValueError(
                    f"no validation, so no {metric}: give --val_every, or another --metric, such "
                    "as loss"
                )
            last = "check_model" if "check_model" in module.main.__globals__ else "connect"
            (model, layout, *_), _ = stop_main(module.main, cfg, last)
    except SystemExit:
        raise ValueError(output.getvalue().removeprefix("error: ").strip()) from None
    found = {
        key: vars(cfg).get(key)
        for key in ("steps", "val_every", "data", "val_data", "val_batches", "seq_len")
    }
    # grpo.py has one seed for everything
    found["seeded"] = [flag for flag in ("seed", "data_seed") if hasattr(cfg, flag)]
    found |= dict.fromkeys(("parameters", "all_parameters", "flops", "tokens"))
    # parameters: active, without the lookup table; flops and tokens: of a step
    if hasattr(model, "flops_per_token"):
        tokens = layout.global_batch_size * cfg.seq_len
        found |= {
            "parameters": model.flops_per_token(0) // 6,
            "all_parameters": sum(p.numel() for p in model.parameters()),
            "flops": model.flops_per_token(cfg.seq_len) * tokens,
            "tokens": tokens,
        }
    return found


def at_size(variants: dict, size: str) -> dict[str, dict]:
    """The variants with the --model_args `size` behind their own."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    found = {}
    parser.add_argument("--model_args", default="")
    for name, variant in variants.items():
        own, others = parser.parse_known_args(variant["flags"])
        if twice := set(re.findall(r"(\w+)=", own.model_args)) & set(re.findall(r"(\w+)=", size)):
            raise ValueError(
                f"variant {name!r}: --ladder sets {', '.join(sorted(twice))} of every size; leave "
                "it out"
            )
        found[name] = variant | {
            "flags": [*others, f"--model_args={','.join(filter(None, (own.model_args, size)))}"]
        }
    return found


def set_steps(variants: dict[str, dict], unit: str, amount: float) -> None:
    """Give each variant the --steps for an amount of "tokens", "flops" or "seconds", all keys of a
    variant: of one step."""
    for name, variant in variants.items():
        if any(re.match("--(schedule_)?steps(=|$)", word) for word in variant["flags"]):
            raise ValueError(
                f"variant {name!r}: --budget and --ladder set the steps; leave --steps and "
                "--schedule_steps out"
            )
        if not variant.get(unit):
            raise ValueError(
                f"variant {name!r}: the {unit} of a step of {variant['recipe']} are unknown; give "
                "--steps instead"
            )
        if not 0.5 < amount / variant[unit] < 1e12:
            raise ValueError(
                f"variant {name!r}: {amount:,.4g} {unit} are no number of steps of "
                f"{variant[unit]:,.4g} {unit}"
            )
        steps = round(amount / variant[unit])
        variant |= {"steps": steps, "flags": [*variant["flags"], f"--steps={steps}"]}


def candidates_of(variants: dict, grid: list[tuple]) -> dict[str, dict]:
    """All variants with all (name, flags) of a grid, as "VARIANT NAME"."""
    return {
        f"{name} {cell}".strip(): variant | {"flags": [*variant["flags"], *flags]}
        for name, variant in variants.items()
        for cell, flags in grid
    }


def check_all(args, common: list[str]) -> dict[str, dict]:
    """{size: checked variants}; without --ladder a single size, "". Prints what the runs cost."""
    sizes = {"": variants_of(args, common)}
    grid = grid_of("--tune", [args.tune] if args.tune else [])
    unit, _, amount = (args.budget or "").partition("=")
    if args.ladder:
        sizes = {
            size: at_size(sizes[""], size)
            for size in args.ladder.replace(" ", "").split(";")
            if size
        }
    for size, found in sizes.items():
        check_variants(found, args)
        if args.tune:
            tuned = "--" + args.tune.partition("=")[0].lstrip("-")
            if any(
                word.partition("=")[0] == tuned
                for variant in found.values()
                for word in variant["flags"]
            ):
                raise ValueError(
                    f"--tune sets {tuned} of every variant; leave it out of the other flags"
                )
            check_variants(candidates_of(found, grid), args)
        check_units(args.metric, list(found.values()))
        if args.ladder:  # all variants of a size get the baseline's tokens
            set_steps(
                found,
                "tokens",
                args.tokens_per_parameter * (next(iter(found.values()))["parameters"] or 0),
            )
        elif unit and unit != "seconds":
            set_steps(found, unit, float(amount))
        if unit != "seconds":
            print(f"\n{size}\n{markdown(costs_of(found))}".lstrip(), flush=True)
        print(
            f"{len(found) * (args.seeds + len(grid) * args.tune_seeds * bool(args.tune))} runs, "
            "with --tune",
            flush=True,
        )
    return sizes


# ---------------------------------------------------------------- studies
def open_study(args, folder: Path, variants: dict, **settings) -> dict:
    """The study in a folder, new or continued. Changes that would make the runs incomparable are
    refused."""
    path = folder / "study.json"
    old = read_json(path) if path.exists() else {"variants": {}}
    for name in old["variants"].keys() & variants.keys():
        if (
            any(old["variants"][name][key] != variants[name][key] for key in ("recipe", "flags"))
            or old["nproc"] != args.nproc
        ):
            raise ValueError(
                f"{folder} has a variant {name!r} of another recipe, other flags or --nproc; use "
                "--out NEW"
            )
    study = (
        DEFAULTS
        | vars(args)
        | {
            "baseline": next(iter(variants)),
            "variants": variants,
            "looks": old.get("looks", []),
            "noise": None,
            "comparisons": max(old.get("comparisons", 1), len(variants) - 1),
            "command": shlex.join(["python", *sys.argv]),
        }
        | settings
    )
    read_runs(study, folder)  # refuses runs of other code
    folder.mkdir(parents=True, exist_ok=True)
    write_file(path, json.dumps(study, indent=1).encode())
    return study


def run_apart(args, folder: Path, variants: dict, stopping: list, **settings) -> dict:
    """Run all variants with seeds that no comparison uses, and return the study."""
    study = open_study(
        args, folder, variants, first_seed=APART, until=None, max_seeds=0, **settings
    )
    run_all(
        study,
        folder,
        [(name, APART + i) for i in range(study["seeds"]) for name in variants],
        stopping,
    )
    return study


def measure_seconds(args, folder: Path, variants: dict, stopping: list) -> None:
    """Add to each variant the median "seconds" of a step, from a run of 12 steps."""
    short = ("timing", ["--steps=12", "--val_every=0", "--checkpoint_every=0", "--log_every=1"])
    timed = candidates_of(variants, [short])
    timed = {name: variant | {"steps": 12, "val_every": 0} for name, variant in timed.items()}
    study = run_apart(args, folder, timed, stopping, seeds=1, metric="step_time_s")
    for (name, _), lines in read_runs(study, folder).items():
        seconds = [line["step_time_s"] for line in lines if "step_time_s" in line]
        variants[name.removesuffix(" timing")]["seconds"] = statistics.median(seconds or [0])


def tune(args, folder: Path, variants: dict, stopping: list) -> list[str]:
    """Add the best flag of --tune to each variant, by runs with other seeds than the comparison's.
    Returns lines to report."""
    grid = dict(grid_of("--tune", [args.tune]))
    study = run_apart(
        args, folder, candidates_of(variants, list(grid.items())), stopping, seeds=args.tune_seeds
    )
    if stopping:
        return []
    best, said = winners_of(study, folder, list(variants), list(grid))
    for name, cell in best.items():
        variants[name]["flags"] = [*variants[name]["flags"], *grid[cell]]
    print("\n".join(said), flush=True)
    return said


def run_study(args, size: str, sizes: int, variants: dict, stopping: list) -> bool:
    """Make the missing runs of a study, and its report. Returns whether all runs ended well. sizes:
    intervals of a ladder that share the 5 %: one for each size, and one beyond."""
    folder = Path(args.out, size)
    tuned = []
    tried = set()
    if (args.budget or "").startswith("seconds"):
        measure_seconds(args, folder / "timing", variants, stopping)
        if not stopping:
            set_steps(variants, "seconds", float(args.budget.split("=")[1]))
            print(markdown(costs_of(variants)), flush=True)
    noise = noise_of(args.noise, args, next(iter(variants.values()))) if args.noise else None
    if args.tune and not stopping:
        tuned = tune(args, folder / "tuning", variants, stopping)
    if stopping:
        return False
    study = open_study(args, folder, variants, size=size, sizes=sizes, tuned=tuned, noise=noise)
    while (todo := next_runs(study, folder, tried)) and not stopping:
        run_all(study, folder, todo, stopping)
        tried |= {*todo}
        if args.only:  # another machine makes the rest
            return True
    return not stopping and report_study(folder)


def main(argv) -> int | None:
    args, common = parse(argv)
    if args.report:
        return 0 if report_study(args.report) else 1
    args.gpus = torch.cuda.device_count()
    check_numbers(args)
    if args.noise:
        read_study(args.noise)  # refuses a folder without a study
    check_local(args.out, "--out")
    sizes = check_all(args, common)
    stopping = []
    if not args.only:
        lock_run(args.out)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopping.append(number))
    shares = len(sizes) + bool(args.ladder)
    well = [
        run_study(args, size, shares, variants, stopping)
        for size, variants in sizes.items()
        if not stopping
    ]
    if stopping:
        print(f"stopped by {signal.Signals(stopping[0]).name}; the same command continues")
        return 128 + stopping[0]
    if args.only:
        raise ValueError(
            f"--only {args.only} is no run of this study: need NAME/SEED, with a name of the "
            "table above"
        )
    if args.ladder:
        from tools.study.ladder import report_ladder

        report_ladder(args.out, list(sizes), args.ladder_to)
    return 0 if all(well) else 1


def check_numbers(args) -> None:
    """Refuse wrong values of our own flags, and fill in --jobs."""
    check_range(args, 1, math.inf, "nproc", "tune_seeds")
    check_range(args, 1, APART, "seeds", "max_seeds")
    check_range(args, 1, 1e300, "ladder_to")
    for name, needed, usual in (
        ("max_seeds", "until", 12),
        ("tune_seeds", "tune", 2),
        ("tokens_per_parameter", "ladder", 20),
        ("ladder_to", "ladder", None),
    ):
        if getattr(args, name) != usual and not getattr(args, needed):
            raise ValueError(
                f"--{name} {getattr(args, name):g} has no effect without --{needed}; leave it out"
            )
    check_range(args, 0, math.inf, "jobs")
    needed = max(args.jobs, 1) * args.nproc
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
                args.noise
                and (args.ladder or os.path.realpath(args.noise) == os.path.realpath(args.out)),
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
            (
                args.gpus and needed > args.gpus,
                f"--jobs {args.jobs} x --nproc {args.nproc} needs {needed} GPUs, and there are "
                f"{args.gpus}",
            ),
        ]
    )
    args.jobs = args.jobs or max(1, (args.gpus or os.cpu_count() or 1) // args.nproc)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        usage_error(error)
