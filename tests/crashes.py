"""Workers of the pool that died: what they did ran again, see pool.py. A run says so at its end, and
fails above two. conftest.py loads this plugin."""

import pytest
from pool import CRASHED

MOST_CRASHES = 2
crashes = []  # of all pytest workers: (test, function whose worker died and which ran again)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown" and CRASHED:
        report.user_properties.append(("crashed", [*CRASHED]))
        CRASHED.clear()
    return report


def pytest_runtest_logreport(report):
    for name, value in report.user_properties:
        if name == "crashed" and report.when == "teardown":
            crashes.extend((report.nodeid, function) for function in value)


def pytest_sessionfinish(session):
    if len(crashes) > MOST_CRASHES:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    if crashes:
        terminalreporter.section("workers of the pool that died; what they did ran again")
        for test, function in crashes:
            terminalreporter.write_line(f"{test}: {function}")
        if len(crashes) > MOST_CRASHES:
            terminalreporter.write_line(f"more than {MOST_CRASHES}: this run has failed", red=True)
