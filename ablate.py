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
from support.files import check_local, read_json, sha256_file, write_file
from support.metrics import read_lines
from tools.stop_main import do_nothing, stop_main
from tools.study import check_units, folder_of, has_died, is_finished, next_runs, read_runs, report_study

HIGH = "reward|acc|pass_at_k|eval_greedy|score|exact_match|solved|per_second|mfu"  # parts of names of metrics, high is good
LOW = "loss|bits_per_byte|memory_gib|time_s"


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
    add("--best", choices=["low", "high"], help="whether low or high is good [default: known for our own metrics]")
    add("--at", choices=["end", "tokens", "seconds"], default="end", help="compare after the shortest run's tokens or seconds")
    add("--reach", type=float, metavar="X", help="compare how many tokens a run needs until its metric reaches X")
    add("--fit", action="store_true", help="fit L = E + A / N^a to variants of four sizes or more")
    add("--out", default="runs/ablate", help="folder of the study; again the same folder continues it [default: runs/ablate]")
    add("--jobs", type=int, default=0, help="runs at once [default: as many as GPUs or CPU cores allow]")
    add("--nproc", type=int, default=1, help="processes of each run, started by torchrun [default: 1]")
    add("--report", metavar="FOLDER", help="write the report of a study again, and run nothing")
    recipes = list(itertools.takewhile(lambda word: not word.startswith("-"), argv))
    args, common = parser.parse_known_args(argv[len(recipes):], argparse.Namespace(recipes=recipes))
    if not args.best and not re.search(f"{HIGH}|{LOW}", args.metric):
        raise ValueError(f"--metric {args.metric} is not known: say which values are good, --best low or --best high")
    args.best = args.best or ("high" if re.search(HIGH, args.metric) else "low")
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
    found = {}
    for recipe, (name, flags), *cell in itertools.product(args.recipes, named or [("", [])], *grid):
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
    if given := [word for word in variant["flags"] if re.match(r"--(seed|data_seed|out)(=|$)", word)]:
        raise ValueError(f"variant {name!r}: ablate.py sets {given[0].split('=')[0]} of every run; leave it out")

    output, world = io.StringIO(), {"RANK": "0", "WORLD_SIZE": str(args.nproc)} if args.nproc > 1 else {}
    try:
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(io.StringIO()):
            spec = importlib.util.spec_from_file_location("recipe", path)
            sys.modules["recipe"] = module = importlib.util.module_from_spec(spec)  # Config reads help texts from its source
            with mock.patch.object(sys, "path", [str(path.resolve().parent), *sys.path]):
                spec.loader.exec_module(module)
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
    texts = {key: vars(cfg).get(key) for key in ("val_every", "data", "val_data", "val_batches", "seq_len")}
    return texts | {"steps": cfg.steps, "val_every": texts["val_every"] or 0, "parameters": parameters, "seeded": seeded}


def sources_of(recipe: str) -> dict[str, str]:
    """{file: sha256} of the recipe and of all files of its checkout that training may import, and the version of torch. tools/
    has reports, which training never runs."""
    home, found, waiting = Path(recipe).parent, {"torch": torch.__version__}, [Path(recipe).stem]
    while waiting:
        file = waiting.pop().replace(".", "/") + ".py"
        if file not in found and not file.startswith("tools/") and (home / file).is_file():
            found[file] = sha256_file(home / file)
            for module, names in re.findall(r"^ *(?:from|import) ([\w.]+)(?: import (.*))?", (home / file).read_text(), re.M):
                waiting += [module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))]
    return found


def open_study(args, variants: dict) -> dict:
    """The study in --out, new or continued. Changes that would make the runs incomparable are refused."""
    check_local(args.out, "--out")
    lock_run(args.out)
    path = Path(args.out, "study.json")
    old = read_json(path) if path.exists() else {"variants": {}}
    for name in old["variants"].keys() & variants.keys():
        if any(old["variants"][name][key] != variants[name][key] for key in ("recipe", "flags")):
            raise ValueError(f"{args.out} has a variant {name!r} of another recipe or with other flags; use --out NEW")
    study = vars(args) | {"baseline": next(iter(variants)), "variants": variants, "looks": old.get("looks", [])}
    read_runs(study, args.out)  # refuses runs of other code
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
    lines = [line for line in (folder / "log.txt").read_text(errors="replace").splitlines() if line.strip()]
    return ([line for line in lines if line.startswith("error")] or lines or ["nothing printed"])[-1].strip()


def run_all(study: dict, args, todo: list[tuple], failed: dict, stopping: list) -> None:
    """Run each (variant, seed), --jobs at once, in this order, until all are done or a signal came. Updates `failed`, {run: the
    last line of its log}, also by the runs with all numbers that ended with an error, such as a full disk."""
    waiting, running, slots, began = list(todo), {}, list(range(args.jobs)), time.monotonic()  # a run's slot tells its GPUs
    try:
        while (waiting or running) and not stopping:
            while waiting and slots:
                name, seed = key = waiting.pop(0)
                slot, folder = slots.pop(0), folder_of(args.out, name, seed)
                gpus = range(slot * args.nproc, (slot + 1) * args.nproc) if args.gpus else None
                running[key] = start_run(study, name, seed, folder, gpus), folder, slot
            time.sleep(0.2)
            for key in [key for key, (process, *_) in running.items() if process.poll() is not None]:
                process, folder, slot = running.pop(key)
                slots.insert(0, slot)
                lines = list(read_lines(str(folder / "metrics.jsonl")))
                if process.returncode or not is_finished(lines, study["variants"][key[0]]):
                    failed[key] = last_line(folder)
                rest = len(waiting) + len(running)
                left = timedelta(seconds=round((time.monotonic() - began) / (len(todo) - rest) * rest))
                end = f"failed: {failed[key]}" if key in failed else "done"
                print(f"{key[0]}, seed {key[1]}: {end} ({rest} of {len(todo)} runs to go, about {left})", flush=True)
                known = sorted({key for line in lines for key, value in line.items() if isinstance(value, int | float)})
                if key not in failed and not has_died(lines, args.metric) and args.metric not in known:
                    raise ValueError(f"--metric {args.metric}: no run logs it; there are {', '.join(known)}")
    finally:
        for process, *_ in running.values():
            process.terminate()  # a recipe then finishes its step, saves and exits
        for process, *_ in running.values():
            process.wait()


def main(argv) -> int | None:
    args, common = parse(argv)
    if args.report:
        if not Path(args.report, "study.json").exists():
            raise ValueError(f"--report {args.report}: no study.json there; give the --out of a study")
        return report_study(args.report)
    args.gpus = torch.cuda.device_count()
    check_numbers(args)
    variants = variants_of(args, common)
    for name, variant in variants.items():
        variant |= check_variant(name, variant, args) | {"files": sources_of(variant["recipe"])}
    if args.fit and (sizes := len({variant["parameters"] for variant in variants.values()})) < 4:
        raise ValueError(f"--fit needs variants of four sizes or more, and there are {sizes}; see --vary model_args")
    check_units(args.metric, list(variants.values()))
    study, failed, stopping = open_study(args, variants), {}, []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, frame: stopping.append(number))
    while (todo := next_runs(study, args.out)) and not stopping:
        print(f"{args.out}: {len(todo)} runs, {args.jobs} at once", flush=True)
        run_all(study, args, todo, failed, stopping)
        study["failed"] = [[*run, line] for run, line in failed.items()]
        write_file(Path(args.out, "study.json"), json.dumps(study, indent=1).encode())
    if stopping:
        print(f"stopped by {signal.Signals(stopping[0]).name}; the same command continues")
        return 128 + stopping[0]
    report_study(args.out)
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
