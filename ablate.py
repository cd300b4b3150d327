"""Which variant is better, and by more than noise? Runs a recipe in several variants and seeds, and compares them in pairs.

    python ablate.py train_llama3.py --vary optimizer=adamw,muon lr=1e-3,3e-3 --seeds 3 --steps 300
    python ablate.py train_llama3.py train_mine.py --seeds 4                  # a fork against the original
    python ablate.py train_llama3.py --variant "base:" --variant "deep: --model_args n_layers=12,dim=136" --until 0.02
    python ablate.py --report runs/ablate                                     # the report again, without any run

Seed i sets --seed and --data_seed of all variants: equal initial weights and equal batches, so that the difference of two runs
says more than two losses would. All flags not listed below go to every run. Each run is a usual run folder,
--out/VARIANT/seed-I. The same command again runs only the missing runs. docs/ablations.md has a worked example.
"""
import argparse
import contextlib
import ctypes
import difflib
import hashlib
import importlib.util
import io
import itertools
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch

from distributed.refusals import refuse
from storage.resume import lock_run
from support.config import Parser, check_range, parse_config, usage_error
from support.files import check_local, read_json, write_file
from support.metrics import read_lines
from tools.stop_main import do_nothing, stop_main
from tools.study import folder_of, is_finished, next_runs, report_study

OURS = ("seed", "data_seed", "out")  # flags of the recipes that a study sets itself


def parse(argv) -> tuple[argparse.Namespace, list[str]]:
    """(our flags and `recipes`, the words before the first flag; the flags for every run)."""
    parser = Parser(usage=argparse.SUPPRESS, description=__doc__)
    add = parser.add_argument
    add("--vary", nargs="+", default=[], metavar="FLAG=A,B", help="all combinations; values with commas are parted by ';'")
    add("--variant", action="append", default=[], metavar="'NAME: FLAGS'", help="one variant; may be given several times")
    add("--baseline", metavar="NAME", help="the variant that the others are compared with [default: the first]")
    add("--seeds", type=int, default=3, help="runs of each variant [default: 3]")
    add("--until", type=float, metavar="D", help="add seeds until each interval excludes 0, or all differences as large as D")
    add("--max_seeds", type=int, default=12, help="the most that --until may take [default: 12]")
    add("--metric", default="val_loss", help="a key of metrics.jsonl [default: val_loss]")
    add("--best", choices=["low", "high"], help="whether a low or a high metric is good [default: high for rewards, accuracies "
        "and speed, else low]")
    add("--at", choices=["end", "tokens", "seconds"], default="end",
        help="compare the last values, or those after as many tokens or seconds of training as the shortest run has")
    add("--reach", type=float, metavar="X", help="compare how many tokens a run needs until its metric reaches X")
    add("--fit", action="store_true", help="fit L = E + A / N^a to variants of four sizes or more")
    add("--out", default="runs/ablate", help="folder of the study; again the same folder continues it [default: runs/ablate]")
    add("--jobs", type=int, default=0, help="runs at once [default: as many as GPUs or CPU cores allow]")
    add("--nproc", type=int, default=1, help="processes of each run, started by torchrun [default: 1]")
    add("--report", metavar="FOLDER", help="write the report of a study again, and run nothing")
    recipes = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    args, common = parser.parse_known_args(argv[len(recipes):])
    args.recipes = recipes
    args.best = args.best or ("high" if re.search("reward|acc|per_second|mfu", args.metric) else "low")
    return args, common


# ---------------------------------------------------------------- variants
def variants_of(args, common: list[str]) -> dict[str, dict]:
    """{name: {"recipe", "flags"}}, the baseline first."""
    grid = []
    for item in args.vary:
        name, equals, values = item.partition("=")
        values = values.split(";" if ";" in values else ",")
        if not equals or "" in values:
            raise ValueError(f"--vary {item!r}: need FLAG=A,B")
        grid.append([(f"{name.lstrip('-')}={value}", f"--{name.lstrip('-')}={value}") for value in values])
    named = []
    for item in args.variant:
        name, colon, flags = item.partition(":")
        if not colon or not name.strip():
            raise ValueError(f"--variant {item!r}: need 'NAME: FLAGS', where FLAGS may be empty")
        named.append((name.strip(), shlex.split(flags)))
    named = named or [("", [])]
    found = {}
    for recipe, (name, flags), *cell in itertools.product(args.recipes, named, *grid):
        words = [Path(recipe).stem] * (len(args.recipes) > 1) + [name] * bool(name) + [text for text, _ in cell]
        full = " ".join(words) or Path(recipe).stem
        if any(folder_of("", full, 0) == folder_of("", other, 0) for other in found):
            raise ValueError(f"two variants are called {full!r}; give each a name of its own")
        found[full] = {"recipe": recipe, "flags": [*common, *flags, *(flag for _, flag in cell)]}
    if len(found) < 2:
        raise ValueError("one variant is nothing to compare: give --vary, two --variant, or a second recipe")
    if (first := args.baseline or next(iter(found))) not in found:
        raise ValueError(f"--baseline {first!r} is none of the variants: {', '.join(map(repr, found))}")
    return {first: found.pop(first)} | found


def check_variant(name: str, variant: dict, args) -> dict:
    """Check a variant's command line: {"steps", "val_every", "parameters", "seeded"}. Any mistake is a usage error, now.

    The recipe's main runs in this process until the model's shapes are known: it parses, checks the layout and opens the data.
    """
    path = Path(variant["recipe"])
    if not path.is_file():
        raise ValueError(f"{path} is no file; did you mean --{path}?" if "=" in path.name else f"recipe {path} is no file")
    if given := [flag for word in variant["flags"] for flag in OURS if re.match(rf"--{flag}(=|$)", word)]:
        raise ValueError(f"variant {name!r}: ablate.py sets --{given[0]} of every run; leave it out")

    output, world = io.StringIO(), {"RANK": "0", "WORLD_SIZE": str(args.nproc)} if args.nproc > 1 else {}
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()):
            module = load_recipe(path)
            cfg = parse_config(module.Config, [*variant["flags"], f"--out={folder_of(args.out, name, 0)}"])
            if args.metric.startswith("val_") and not vars(cfg).get("val_every"):
                raise ValueError(f"no validation, so no {args.metric}: give --val_every, or another --metric, such as loss")
            last = "check_model" if "check_model" in module.main.__globals__ else "connect"
            with mock.patch.dict(os.environ, world):
                skipped = dict.fromkeys(("connect", "make_mesh", "set_timeouts", "StopSignal"), do_nothing)
                (model, *_), _ = stop_main(module.main, cfg, last, **skipped)
    except (SystemExit, ValueError) as error:
        said = error if isinstance(error, ValueError) else output.getvalue().removeprefix("error: ").strip()
        raise ValueError(f"variant {name!r}: {said}") from None
    seeded = [flag for flag in ("seed", "data_seed") if hasattr(cfg, flag)]  # grpo.py has one seed for everything
    parameters = model.flops_per_token(0) // 6 if hasattr(model, "flops_per_token") else None
    return {"steps": cfg.steps, "val_every": vars(cfg).get("val_every", 0), "parameters": parameters, "seeded": seeded}


def load_recipe(path: Path):
    """A recipe as a module, in sys.modules under its own name: Config reads the help texts from the module's source."""
    name = f"recipe_{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        with mock.patch.object(sys, "path", [str(path.resolve().parent), *sys.path]):
            spec.loader.exec_module(module)
    return sys.modules[name]


def open_study(args, variants: dict) -> dict:
    """The study in --out, new or continued. Changes that would make the runs incomparable are refused."""
    check_local(args.out, "--out")
    lock_run(args.out)
    for variant in variants.values():
        variant["source"] = hashlib.sha256(Path(variant["recipe"]).read_bytes()).hexdigest()
    path = Path(args.out, "study.json")
    old = read_json(path)["variants"] if path.exists() else {}
    for name in old.keys() & variants.keys():
        for key, what in (("recipe", "recipe"), ("flags", "flags"), ("source", "source code")):
            if old[name][key] != variants[name][key]:
                raise ValueError(f"{args.out} has a variant {name!r} with other {what}; use --out NEW")
    settings = {key: getattr(args, key) for key in ("metric", "best", "at", "reach", "seeds", "until", "max_seeds", "fit")}
    study = settings | {"nproc": args.nproc, "baseline": next(iter(variants)), "variants": variants}
    write_file(path, json.dumps(study, indent=1).encode())
    return study


# ---------------------------------------------------------------- runs
def start_run(study: dict, name: str, seed: int, folder: Path, gpus: list[int] | None) -> subprocess.Popen:
    variant, env = study["variants"][name], dict(os.environ, OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"))
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(study["nproc"])]
    command = [sys.executable, *(torchrun if study["nproc"] > 1 else []), variant["recipe"], *variant["flags"]]
    command += [*(f"--{flag}={seed}" for flag in variant["seeded"]), f"--out={folder}"]
    if gpus is not None:
        mine = env.get("CUDA_VISIBLE_DEVICES", "").split(",")  # the user may have chosen some GPUs
        env["CUDA_VISIBLE_DEVICES"] = ",".join(mine[i] if len(mine) > i and mine[i] else str(i) for i in gpus)

    def end_with_parent():  # if the study is killed, its runs stop, save, and can be continued
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(1, signal.SIGTERM)

    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "log.txt", "a") as log:  # a new session: Ctrl-C reaches the run only through us
        return subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True, preexec_fn=end_with_parent)


def last_line(folder: Path) -> str:
    lines = (folder / "log.txt").read_text(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("error")]
    return (errors or [line for line in lines if line.strip()] or ["nothing printed"])[-1].strip()


def run_all(study: dict, args, todo: list[tuple], failed: dict, stopping: list) -> None:
    """Run each (variant, seed), --jobs at once, in this order, until all are done or a signal came. Fills in `failed`."""
    waiting, running, began = list(todo), {}, time.monotonic()
    slots = list(range(args.jobs))  # a run's slot tells its GPUs
    try:
        while (waiting or running) and not stopping:
            while waiting and slots:
                name, seed = key = waiting.pop(0)
                slot, folder = slots.pop(0), folder_of(args.out, name, seed)
                gpus = range(slot * args.nproc, (slot + 1) * args.nproc) if args.gpus else None
                running[key] = start_run(study, name, seed, folder, gpus), folder, slot
            time.sleep(0.2)
            for key, (process, folder, slot) in list(running.items()):
                if process.poll() is None:
                    continue
                del running[key]
                slots.insert(0, slot)
                lines = read_lines(str(folder / "metrics.jsonl"))
                if not is_finished(lines, study["variants"][key[0]]):
                    failed[key] = last_line(folder)
                rest = len(waiting) + len(running)
                left = timedelta(seconds=round((time.monotonic() - began) / (len(todo) - rest) * rest))
                end = f"failed: {failed[key]}" if key in failed else "done"
                print(f"{key[0]}, seed {key[1]}: {end} ({rest} of {len(todo)} runs to go, about {left})", flush=True)
                check_metric(study, lines, key in failed)
    finally:
        for process, *_ in running.values():
            process.terminate()  # a recipe then finishes its step, saves and exits
        for process, *_ in running.values():
            process.wait()


def check_metric(study: dict, lines: list[dict], has_failed: bool) -> None:
    """ValueError as soon as a finished run shows that no run logs --metric."""
    known = sorted({key for line in lines for key, value in line.items() if isinstance(value, int | float)})
    if not has_failed and study["metric"] not in known:
        near = difflib.get_close_matches(study["metric"], known, n=1)
        raise ValueError(f"--metric {study['metric']}: no run logs it; {f'did you mean {near[0]}? ' if near else ''}there are "
                         f"{', '.join(known)}")


def main(argv) -> int:
    args, common = parse(argv)
    if args.report:
        if not Path(args.report, "study.json").exists():
            raise ValueError(f"--report {args.report}: no study.json there; give the --out of a study")
        report_study(args.report)
        return 0
    args.gpus = torch.cuda.device_count()
    check_numbers(args)
    variants = variants_of(args, common)
    for name, variant in variants.items():
        variant |= check_variant(name, variant, args)
    if args.fit and (sizes := len({variant["parameters"] for variant in variants.values()})) < 4:
        raise ValueError(f"--fit needs variants of four sizes or more, and there are {sizes}; see --vary model_args")
    study, failed, stopping = open_study(args, variants), {}, []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopping.append(number))
    while (todo := next_runs(study, args.out, failed.keys())) and not stopping:
        print(f"{args.out}: {len(todo)} runs, {args.jobs} at once", flush=True)
        run_all(study, args, todo, failed, stopping)
    if stopping:
        print(f"stopped by {signal.Signals(stopping[0]).name}; the same command continues")
        return 128 + stopping[0]
    report_study(args.out, failed)
    return 1 if failed else 0


def check_numbers(args) -> None:
    """Refuse wrong values of our own flags, and fill in --jobs."""
    check_range(args, 1, math.inf, "seeds", "nproc")
    check_range(args, 0, math.inf, "jobs")
    needed = max(args.jobs, 1) * args.nproc
    refuse([
        (not args.recipes, "the recipes come first: python ablate.py train_llama3.py --vary lr=1e-3,3e-3"),
        (args.until is not None and not args.until > 0, f"--until {args.until} must be above 0"),
        (args.until and args.max_seeds < max(args.seeds, 2),
         f"--max_seeds {args.max_seeds} must be --seeds {args.seeds} or more, and at least 2"),
        (not args.until and args.max_seeds != 12, f"--max_seeds {args.max_seeds} has no effect without --until; leave it out"),
        (args.gpus and needed > args.gpus,
         f"--jobs {args.jobs} x --nproc {args.nproc} needs {needed} GPUs, and there are {args.gpus}")])
    args.jobs = args.jobs or max(1, (args.gpus or os.cpu_count() or 1) // args.nproc)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        usage_error(error)
