"""The flags that report in place of training: --dry_run, --plan, --explain, --plot of a layout, --check_parity.

What they do is in dryrun.py, plan.py, explain.py, pictures.py, parity.py, where.py, against.py and certify.py:
imported only when asked for.
"""
import os
from dataclasses import dataclass
from typing import Literal

from distributed.layout import AXES
from support.config import Need, flag
from support.provenance import say_flags

PLAN = Need("without --plan", lambda c: c.plan)
PARITY = Need("without --check_parity", lambda c: c.check_parity)
EXPLAIN = Need("without --explain", lambda c: c.explain)
WHERE = Need("without --check_parity --where", lambda c: c.where)


@dataclass(kw_only=True)
class ReportConfig:
    dry_run: bool = False  # no device, no launcher: report memory, collectives, FLOPs and bubble of this layout
    plan: bool = False  # predict tokens/s and MFU of this layout on --machine, with the error of such predictions
    machine: Literal["H100", "H200", "B200"] = flag("H100", PLAN)  # the device, with its FLOP/s and bandwidths
    nvlink_gb_s: float = flag(0.0, PLAN)  # GB/s per device and direction inside a node; 0 = the machine's
    network_gb_s: float = flag(0.0, PLAN)  # GB/s per device and direction between nodes; 0 = the machine's
    devices_per_node: int = flag(0, PLAN)  # devices that NVLink connects; 0 = the machine's
    explain: bool = False  # one page on one block: how each parameter is placed, and what travels when, and why
    html: str = flag("", EXPLAIN)  # a file: what every rank holds and sends, as a web page to hover and step through
    check_parity: bool = False  # train 3 steps on one process and on this layout, in fp32, and compare; start it with python
    where: bool = flag(False, PARITY)  # of one step, name the first operation that differs: every activation and gradient
    against: str = flag("", WHERE)  # a Hugging Face folder: compare with transformers, module by module, in place of a layout
    certify: bool = flag(False, PARITY)  # compare a small version of the layout and each pair of its axes; write parity.json


def with_reports(main):
    """main, or what a flag asks for in its place: run(with_reports(main), cfg). A report ends with its exit status."""

    def main_or_report(cfg):
        plots_layout = cfg.plot and "RANK" not in os.environ and any(getattr(cfg, axis) > 1 for axis in AXES)
        if cfg.check_parity and (cfg.dry_run or cfg.plan or cfg.explain):
            raise ValueError("--check_parity trains, and --dry_run, --plan and --explain do not: ask for one after the other")
        if cfg.check_parity:
            raise SystemExit(parity_report(main, cfg))
        if cfg.dry_run or cfg.plan or cfg.explain or plots_layout:
            raise SystemExit(dry_run(main, cfg))
        say_flags(cfg)
        main(cfg)

    return main_or_report


def parity_report(main, cfg) -> int:
    """--check_parity, --where, --against and --certify of a recipe; returns the exit status: 0 equal, 1 different."""
    degrees = {axis: getattr(cfg, axis) for axis in AXES}
    if cfg.certify and cfg.where:
        raise ValueError("--certify compares whole runs and --where one step: ask for one after the other")
    if cfg.certify:
        from support.certify import certify

        return certify(main, cfg)
    if cfg.against and cfg.where:
        from support.against import check_against

        return check_against(main, cfg)
    if cfg.where:
        from support.where import check_where

        return check_where(main, cfg, degrees)
    from support.parity import check_parity

    return check_parity(main, cfg, degrees)


def dry_run(main, cfg) -> int:
    """--dry_run, --plan, --explain and --plot of a recipe; returns the exit status."""
    from support.dryrun import make_report, print_report
    from support.explain import count_block, explain
    from support.page import check_page, command_line, write_page
    from support.pictures import plot
    from support.plan import machine_of, print_plan

    if "RANK" in os.environ:
        raise ValueError("--dry_run, --plan, --explain and --plot run in one process: use python, not torchrun")
    if cfg.float8 != "off":
        raise ValueError(f"--float8 {cfg.float8} is not in the dry run, which would count bf16; leave it out")
    machine = machine_of(cfg)
    if cfg.html and cfg.explain:
        check_page(cfg.html)
    if cfg.dry_run or cfg.plan or cfg.plot or cfg.html and cfg.explain:
        report = make_report(main, cfg)
    if cfg.dry_run:
        print_report(cfg, report)
    if cfg.plan:
        print_plan(cfg, report, machine)
    if cfg.explain:
        counted = count_block(main, cfg)
        if counted or not cfg.html:
            explain(cfg, counted)
        if cfg.html:
            write_page(cfg, report, counted, command_line())
    if cfg.plot:
        plot(cfg, report)
    return 0
