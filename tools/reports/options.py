"""Reports on a recipe in place of its training: --dry_run, --check_parity, --explain, and --plot of
a layout.

A recipe knows nothing of its reports. tools.run.run hands a command line over to
run_report when the command line has a flag that the recipe's Config does not have.
"""

import os
import shlex
import sys
from dataclasses import dataclass, fields
from types import FunctionType, SimpleNamespace
from typing import Any, Literal

from distributed.layout import AXES
from distributed.refusals import refuse
from flags.config import Need, default_of, flag, no_effect, own_rank, parse_config, say_flags
from flags.files import check_writable
from training.metrics import MetricsConfig

DRY_RUN = Need("without --dry_run", lambda c: c.dry_run)
PARITY = Need("without --check_parity", lambda c: c.check_parity)
EXPLAIN = Need("without --explain", lambda c: c.explain)
WHERE = Need("without --check_parity --where", lambda c: c.where)
BISECT = Need("without --check_parity --bisect", lambda c: c.bisect)


@dataclass(kw_only=True)
class PlotConfig:
    TITLE = "a picture"
    # draw the curves of the run, <out>/loss.png; of several processes, without torchrun: mesh and
    # schedule
    plot: bool = False


@dataclass(kw_only=True)
class PolicyReports(PlotConfig):
    TITLE = "in place of training"
    # train nothing: check flags, layout and data as a start does; print what a step costs, as JSON
    check: bool = False
    # two updates on the same samples, cut in several ways, and on a layout: one gradient?
    check_parity: bool = False


@dataclass(kw_only=True)
class GrpoReports(PlotConfig):
    TITLE = "in place of training"
    # train nothing: check flags, layout and data as a start does; print what a step costs, as JSON
    check: bool = False
    # two updates on the same samples, cut in several ways, and on a layout: one gradient?
    check_parity: bool = False
    dry_run: bool = False  # no device, no launcher: report the memory of an update and of a rollout


@dataclass(kw_only=True)
class ReportConfig(PlotConfig):
    TITLE = "in place of training"  # of the section of --help
    # train nothing: check flags, layout and data as a start does; print what a step costs, as JSON
    check: bool = False
    # no device, no launcher: report memory, collectives, FLOPs and bubble of the layout
    dry_run: bool = False
    # the device whose peak bounds the time of a step
    machine: Literal["H100", "H200", "B200"] = flag("H100", DRY_RUN)
    # in place of one layout: the ten fastest layouts of this many devices, by dry runs
    best: int = flag(0, DRY_RUN)
    # a page on one block: how each parameter is split, and which collectives run when, and why
    explain: bool = False
    # a file: a web page to hover and step through, with the tensors and sends of every rank
    html: str = flag("", EXPLAIN)
    # train 4 steps (or --steps) on one process and on the layout, in fp32, the last two also from a
    # checkpoint, and compare; start it with python
    check_parity: bool = False
    # save and continue on this layout, or on others, one after the other: "dp_shard=2;tp=2,cp=2"
    through: str = flag("", PARITY, bare="same")
    # in a single step, compare every activation and gradient, and name the first difference
    where: bool = flag(False, PARITY)
    # say which functions to look at
    advice: bool = flag(
        True, WHERE, Need("with --against FOLDER", lambda c: "@" in c.against or not c.against)
    )
    # in place of a layout: RECIPE@COMMIT, another commit of the recipe (@HEAD~5: of this recipe); or
    # a Hugging Face folder, for a comparison with transformers, module by module
    against: str = flag("", WHERE)
    # GOOD..BAD, two commits: name the commit between them that changed losses or gradients
    bisect: str = flag("", PARITY)
    # of --bisect: equal = up to rounding, bits = to the last bit
    expect: Literal["equal", "bits"] = flag("equal", BISECT)
    # a logged step of the run in --out: compute it again, and print which sequences, documents and
    # tokens had how much of the loss and of the gradient
    replay: int = 0


def with_report_flags(Config: type, Reports: type = ReportConfig) -> type:
    """Config with the flags of Reports after its own."""
    return dataclass(kw_only=True)(
        type("Config", (Config, Reports), {"__module__": Config.__module__})
    )


def run_report(main: FunctionType, Config: type, argv: list[str] | None = None) -> int:
    """Parse a command line with the flags of Config and of reports, report or train, and return the
    exit status."""
    # a program that trains in another way has no layouts to report on
    is_recipe = "open_data" in main.__globals__
    if not is_recipe and not issubclass(Config, MetricsConfig):
        main(parse_config(Config, argv))
        return 0
    Reports = PlotConfig
    report = train
    if is_recipe:
        Reports = ReportConfig
        report = report_or_train
    if trains_a_policy(main):
        # --dry_run is for the loop of grpo.py
        Reports = GrpoReports if "update_policy" in main.__globals__ else PolicyReports
        report = report_policy_or_train
    WithReports = with_report_flags(Config, Reports)
    given = vars(parse_config(WithReports, argv))
    options = Reports(**{field.name: given[field.name] for field in fields(Reports)})
    if is_recipe and given.get("replay"):
        return replay_alone(main, Config, WithReports, options, argv)
    cfg = Config(**{field.name: given[field.name] for field in fields(Config)})
    return report(main, cfg, options)


def trains_a_policy(main: FunctionType) -> bool:
    """Whether the recipe has a Trainer, as grpo.py and its forks have."""
    for x in main.__globals__.values():
        if isinstance(x, type) and hasattr(x, "train_on"):
            return True
    return False


def train(main: FunctionType, cfg: Any, options: PlotConfig) -> int:
    """Train, and draw the curves of the run if --plot asks for a picture. Returns the exit status."""
    say_flags(cfg)
    status = main(cfg) or 0
    if options.plot and own_rank() == 0:
        from tools.reports.curves import draw_runs, read_curves

        try:
            run = read_curves(cfg.out, cfg.out)
            print(draw_runs([run], f"{cfg.out}/loss.png"), flush=True)
        except OSError as error:  # the training is done, and must not look as if it had failed
            print(f"--plot: no {cfg.out}/loss.png: {error.strerror}", flush=True)
    return status


def report_policy_or_train(
    main: FunctionType, cfg: Any, options: PolicyReports | GrpoReports
) -> int:
    """The reports of a recipe with a grpo.Trainer."""
    asked = [name for name, value in vars(options).items() if value]
    reports = [name for name in asked if name != "plot"]
    if not reports:
        return train(main, cfg, options)
    name = reports[0]
    refuse(
        [
            (
                "RANK" in os.environ and not options.check,
                f"--{name} starts from one process: use python, not torchrun",
            ),
            (
                options.plot,
                f"--plot draws the curves of a run, and --{name} trains nothing: leave one out",
            ),
            (
                len(reports) > 1,
                f"--{' and --'.join(reports)} are reports of their own: ask for one after the other",
            ),
        ]
    )
    if options.check:
        from tools.reports.check import check_in_new_folder

        check_in_new_folder(main, cfg)
        return 0
    if options.check_parity:
        from tools.parity.policy import check_policy

        return check_policy(main, cfg)
    from tools.reports.dry_grpo import dry_run

    dry_run(main, cfg)
    return 0


def report_or_train(main: FunctionType, cfg: Any, options: ReportConfig) -> int:
    """Run the reports of the options, or train if there are none. Returns the exit status. Raises
    ValueError."""
    launched = "RANK" in os.environ
    in_folder = os.path.isdir(os.path.dirname(options.html) or ".")
    is_file = in_folder and not os.path.isdir(options.html)
    shows = options.dry_run or options.explain
    refuse(
        [
            *((True, text) for text in no_effect(options, SimpleNamespace(**vars(options)))),
            (
                launched and (options.check_parity or shows),
                "--check_parity, --dry_run and --explain start from one process: use python, not "
                "torchrun",
            ),
            (
                options.best and (options.explain or options.plot),
                "--best compares layouts, and --explain and --plot show one: ask for one after "
                "the other",
            ),
            (
                options.html and not is_file,
                f"--html {options.html}: need the name of a file, such as layout.html, in a "
                "folder that exists",
            ),
            (
                options.through and (options.where or options.bisect),
                "--through continues from checkpoints, and --where and --bisect save none: leave "
                "one out",
            ),
            (
                options.bisect and options.where,
                "--bisect names a commit, and --where an operation: leave one out; then --where "
                "--against @COMMIT~1",
            ),
            (
                options.check and (options.check_parity or shows or options.plot),
                "--check says whether this command line would train, and is no other report: ask "
                "for one after the other",
            ),
            (
                options.check_parity and shows,
                "--check_parity trains, and --dry_run and --explain do not: ask for one after the "
                "other",
            ),
        ]
    )
    if options.check:
        from tools.reports.check import check

        check(main, cfg)
        return 0
    if options.bisect:
        from tools.parity.bisection import bisect_commits

        return bisect_commits(cfg, options)
    if options.against and "@" in options.against:
        from tools.parity.versions import compare_versions, names_commit

        if names_commit(options.against):
            return compare_versions(cfg, options)
    if options.against:
        from tools.parity.against import check_against

        return check_against(main, cfg, options.against)
    if options.where:
        from tools.parity.where import check_where

        return check_where(main, cfg, options.advice)
    if options.check_parity:
        from tools.parity.check_parity import check_parity

        return check_parity(main, cfg, options.through)
    if shows or options.plot and not launched and any(getattr(cfg, axis) > 1 for axis in AXES):
        return report_layout(main, cfg, options)
    return train(main, cfg, options)


def replay_alone(
    main: FunctionType,
    Config: type,
    WithReports: type,
    options: ReportConfig,
    argv: list[str] | None,
) -> int:
    """--replay, and no other report; returns the exit status."""
    others = [
        f"--{field.name}"
        for field in fields(options)
        if field.name != "replay" and getattr(options, field.name) != default_of(field)
    ]
    if others:
        raise ValueError(f"--replay computes a step of a run again: leave {', '.join(others)} out")
    from tools.parity.replay import replay_step

    return replay_step(main, Config, WithReports, options, argv)


def make_folder(out: str) -> None:
    """The folder of the pictures of --plot, before they are computed. Raises ValueError."""
    try:
        os.makedirs(out, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out {out} cannot be made: {error.strerror}") from None
    check_writable(os.path.join(out, "mesh.svg"), "--plot:")


def report_layout(main: FunctionType, cfg: Any, options: ReportConfig) -> int:
    """--dry_run, --explain and --plot of a recipe; returns the exit status."""
    from flags.progress import Progress
    from tools.reports.best_layouts import print_best
    from tools.reports.dryrun import make_report, print_report
    from tools.reports.explain import count_block, explain
    from tools.reports.layout_plots import plot
    from tools.reports.page import write_page

    if cfg.float8 != "off":
        raise ValueError(
            f"--float8 {cfg.float8} is not in the dry run, which would count bf16; leave it out"
        )
    if options.html:
        check_writable(options.html, "--html")
    if options.plot:
        make_folder(cfg.out)
    if options.best:
        return print_best(main, cfg, options.best, options.machine)
    if options.dry_run or options.plot or options.html:
        found = make_report(main, cfg)
    if options.dry_run:
        print_report(cfg, found, options.machine)
    if options.explain:
        with Progress("one block, in two dry runs"):
            counted = count_block(main, cfg)
        if counted or not options.html:
            explain(cfg, counted)
        if options.html:
            command = shlex.join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]])
            with Progress(f"drawing {options.html}"):
                write_page(options.html, cfg, found, counted, command)
    if options.plot:
        with Progress("drawing"):
            plot(cfg, found)
    return 0
