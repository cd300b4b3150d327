"""The pool of workers itself, see pool.py: a crash is run again, counted and reported."""

import os
import signal
from types import SimpleNamespace

import crashes
import pool
import pytest


def die_once(file):
    """The rank that finds the file removes it and dies."""
    try:
        os.remove(file)
    except FileNotFoundError:
        return "alive"
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow  # the pool starts anew
def test_a_crash_runs_again_and_is_counted(tmp_path):
    (tmp_path / "file").touch()
    assert pool.pool(2).run(die_once, tmp_path / "file") == ["alive", "alive"]
    (crash,) = pool.CRASHED
    pool.CRASHED.clear()
    assert crash.startswith("die_once")
    assert "-9" in crash


def test_the_third_crash_fails_the_session(monkeypatch):
    for n, status in ((2, 0), (3, 1)):
        monkeypatch.setattr(crashes, "crashes", [("test", "function")] * n)
        session = SimpleNamespace(exitstatus=0)
        crashes.pytest_sessionfinish(session)
        assert session.exitstatus == status
