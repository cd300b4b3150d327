"""The clock of the tests: what each test costs, in wall time and in CPU time of all processes that the test started.

conftest.py loads this plugin, so every pytest run ends with one line per test file. For the whole table, by file, by cause, and
the dearest tests, keep the measurements of one or more runs and print them:

    CLOCK=clock.jsonl make test
    python tests/clock.py clock.jsonl              # CPU and wall seconds by cause and by file, and the 40 dearest tests
"""
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest
from programs import counts

TICK = os.sysconf("SC_CLK_TCK")
CAUSES = {"null device": "runs on torch's CUDA build without a GPU", "compile": "compiles with Inductor, or traces with Dynamo",
          "start": "starts a Python of its own", "program": "runs a program in a fork that has torch imported",
          "layout": "runs a function on the pool of gloo workers", "here": "runs in the process of pytest"}


def cpu_seconds() -> float:
    """CPU seconds of this process and of all its descendants, dead or alive. Without /proc, of those that it waited for."""
    if not os.path.isdir("/proc/self"):
        return sum(os.times()[:4])
    children, used = defaultdict(list), {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path("/proc", pid, "stat").read_bytes().rsplit(b") ", 1)[1].split()
        except OSError:  # processes come and go
            continue
        children[int(fields[1])].append(int(pid))
        used[int(pid)] = sum(map(int, fields[11:15]))  # utime, stime, and those of the children that were waited for
    total, todo = 0, [os.getpid()]
    while todo:
        pid = todo.pop()
        total += used.get(pid, 0)
        todo += children[pid]
    return total / TICK


class CountedPopen(subprocess.Popen):
    """Popen that counts how many Pythons the tests start."""

    def __init__(self, args, *more, **options):
        words = args if isinstance(args, (list, tuple)) else [args]
        counts["start"] += any("python" in str(word) or "torchrun" in str(word) for word in words[:1])
        super().__init__(args, *more, **options)


def pytest_configure(config):
    subprocess.Popen = CountedPopen


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    counts.clear()
    item.began = time.monotonic(), cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        cause = ("null device" if item.get_closest_marker("nullcuda") else "compile" if "ompil" in item.nodeid else
                 next((name for name in CAUSES if counts[name]), "here"))
        wall, cpu = time.monotonic() - item.began[0], cpu_seconds() - item.began[1]
        report.user_properties.append(("clock", dict(wall=round(wall, 3), cpu=round(cpu, 2), cause=cause, **counts)))
    return report


def pytest_terminal_summary(terminalreporter, config):
    if hasattr(config, "workerinput"):  # of pytest-xdist: the process that started the workers has the reports of all
        return
    rows = [dict(test=report.nodeid) | dict(report.user_properties)["clock"]
            for reports in terminalreporter.stats.values() for report in reports
            if getattr(report, "when", "") == "teardown" and "clock" in dict(report.user_properties)]
    if name := os.environ.get("CLOCK"):
        with open(name, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    terminalreporter.section("seconds per file: CPU, wall")
    terminalreporter.write_line("\n".join(table(rows, lambda row: row["test"].split("::")[0].removeprefix("tests/"), "file")))


def table(rows, key, title) -> list[str]:
    """Lines of a table, the dearest group first."""
    groups = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    sums = {name: (sum(r["cpu"] for r in g), sum(r["wall"] for r in g), len(g)) for name, g in groups.items()}
    lines = [f"{cpu:8.1f} {wall:8.1f} {n:6}  {name}" for name, (cpu, wall, n) in sorted(sums.items(), key=lambda x: -x[1][0])]
    total = [sum(column) for column in zip(*sums.values())] or [0, 0, 0]
    return [f"{'cpu s':>8} {'wall s':>8} {'tests':>6}  {title}", *lines, f"{total[0]:8.1f} {total[1]:8.1f} {total[2]:6}  all"]


def main():
    rows = [json.loads(line) for file in sys.argv[1:] for line in Path(file).read_text().splitlines()]
    print("\n".join(table(rows, lambda row: f"{row['cause']}: {CAUSES[row['cause']]}", "cause")))
    print("\n".join(table(rows, lambda row: row["test"].split("::")[0], "file")))
    print("\n".join(table(sorted(rows, key=lambda row: -row["cpu"])[:40], lambda row: row["test"], "the 40 dearest tests")))
    print(f"Pythons started: {sum(row.get('start', 0) for row in rows)}, programs in forks: "
          f"{sum(row.get('program', 0) for row in rows)}, calls of the pool: {sum(row.get('layout', 0) for row in rows)}")


if __name__ == "__main__":
    main()
