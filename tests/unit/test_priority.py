"""A process that steps back does so among others of its session, and with its session."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_LOOK = """
import os
from pathlib import Path
from kvtier.priority import step_back
step_back(7)
own = Path("/proc/self/autogroup")
print(os.nice(0), *(own.read_text().split()[-1:] if own.exists() else ()))
"""


@pytest.mark.parametrize("leads_session", [True, False])
def test_a_leader_of_a_session_lowers_it(leads_session: bool) -> None:
    shared = Path("/proc/self/autogroup")
    before = shared.read_text() if shared.exists() else ""

    done = subprocess.run(
        [sys.executable, "-c", _LOOK], start_new_session=leads_session, stdout=subprocess.PIPE, text=True, check=True
    )

    niceness, *of_session = done.stdout.split()
    assert int(niceness) >= 7
    if leads_session and of_session:  # there may be no such file, or nothing in it
        assert of_session == ["7"]
    assert (shared.read_text() if shared.exists() else "") == before
