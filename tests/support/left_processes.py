"""Hooks for a `conftest.py`: a run of tests that leaves processes behind names them, fails, and ends them.

Whatever runs under pytest carries the run's mark (`tests/support/guardian.py`); processes of other runs do not count.
"""

from __future__ import annotations

import pytest

from tests.support.guardian import end_leftovers, is_guarded_here

LEFT_BEHIND = pytest.StashKey[list[str]]()
_ENDING_S = 20.0
"""The longest time for processes to end after the last test."""


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """After the workers of this run have ended."""
    if not is_guarded_here() or LEFT_BEHIND in session.config.stash:  # two files may have this hook
        return
    left = session.config.stash[LEFT_BEHIND] = end_leftovers(_ENDING_S)
    if left and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left := config.stash.get(LEFT_BEHIND, []):
        config.stash[LEFT_BEHIND] = []
        terminalreporter.section("processes that outlived the tests: they were killed, and the run failed", red=True)
        for one in left:
            terminalreporter.line(one)
