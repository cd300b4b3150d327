"""The clock of the tests: what each test file costs, in wall time and in CPU time of all processes
that its tests started.

conftest.py loads this plugin, so every pytest run ends with one line per test file. The slowest
tests: pytest --durations 40.
"""

import os
import time
from collections import defaultdict
from pathlib import Path

import pytest

TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds() -> float:
    """CPU seconds of this process and of all its descendants, dead or alive. Without /proc, of
    those that it waited for."""
    if not os.path.isdir("/proc/self"):
        return sum(os.times()[:4])
    children = defaultdict(list)
    used = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            fields = Path("/proc", pid, "stat").read_bytes().rsplit(b") ", 1)[1].split()
        except OSError:  # processes come and go
            continue
        children[int(fields[1])].append(int(pid))
        # utime, stime, and those of the children that were waited for
        used[int(pid)] = sum(map(int, fields[11:15]))
    total = 0
    todo = [os.getpid()]
    while todo:
        pid = todo.pop()
        total += used.get(pid, 0)
        todo += children[pid]
    return total / TICK


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    item.began = cpu_seconds(), time.monotonic()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        report.user_properties.append(
            ("clock", (cpu_seconds() - item.began[0], time.monotonic() - item.began[1]))
        )
    return report


def pytest_terminal_summary(terminalreporter, config):
    # of pytest-xdist: the process that started the workers has the reports of all
    if hasattr(config, "workerinput"):
        return
    files = defaultdict(list)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if getattr(report, "when", "") == "teardown" and "clock" in dict(
                report.user_properties
            ):
                files[report.nodeid.split("::")[0].removeprefix("tests/")].append(
                    dict(report.user_properties)["clock"]
                )
    lines = [
        (sum(cpu for cpu, _ in tests), sum(wall for _, wall in tests), len(tests), name)
        for name, tests in files.items()
    ]
    terminalreporter.section("seconds per file: CPU, wall")
    for cpu, wall, n, name in sorted(lines, reverse=True):
        terminalreporter.write_line(f"{cpu:8.1f} {wall:8.1f} {n:6}  {name}")
