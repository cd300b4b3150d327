"""The flags of tools/reports.py, which no recipe declares."""
from dataclasses import dataclass
from typing import Literal

from support.config import Need, flag

DRY_RUN = Need("without --dry_run", lambda c: c.dry_run)
PARITY = Need("without --check_parity", lambda c: c.check_parity)
EXPLAIN = Need("without --explain", lambda c: c.explain)
WHERE = Need("without --check_parity --where", lambda c: c.where)


@dataclass(kw_only=True)
class PlotConfig:
    TITLE = "a picture"
    plot: bool = False  # draw the curves of the run, <out>/loss.png; of several processes, without torchrun: mesh and schedule


@dataclass(kw_only=True)
class ReportConfig(PlotConfig):
    TITLE = "in place of training"  # of the section of --help
    dry_run: bool = False  # no device, no launcher: report memory, collectives, FLOPs and bubble of the layout
    machine: Literal["H100", "H200", "B200"] = flag("H100", DRY_RUN)  # the device whose peak bounds the time of a step
    explain: bool = False  # a page on one block: how each parameter is split, and which collectives run when, and why
    html: str = flag("", EXPLAIN)  # a file: a web page to hover and step through, with the tensors and sends of every rank
    check_parity: bool = False  # train 3 steps on one process and on the layout, in fp32, and compare; start it with python
    where: bool = flag(False, PARITY)  # in a single step, compare every activation and gradient, and name the first difference
    against: str = flag("", WHERE)  # a Hugging Face folder: compare with transformers, module by module, in place of a layout


def with_report_flags(Config, Reports=ReportConfig) -> type:
    """Config with the flags of Reports after its own."""
    return dataclass(kw_only=True)(type("Config", (Config, Reports), {"__module__": Config.__module__}))
