"""What a run of tests leaves running fails it, and is ended; what others run is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

from tests.support.guardian import MARK
from tests.support.serving import is_gone
from tests.support.waiting import LIMIT_S, wait_until

_ROOT = Path(__file__).parents[3]
_TEST = """
    import subprocess, sys
    from pathlib import Path

    def test_starts_a_process() -> None:
        command = [sys.executable, "-c", "import time; time.sleep(1000)", "left-by-a-test"]
        process = subprocess.Popen(command, {settings})
        Path({pid_file!r}).write_text(str(process.pid))
        process.returncode = 0  # nobody asks for it again
        {after}
"""

_IMPATIENT = """
from tests.support import left_processes
left_processes._ENDING_S = 0.2
"""


def _run(tmp_path: Path, settings: str, after: str = "pass") -> tuple[subprocess.CompletedProcess[str], int]:
    """A run of the tests with these hooks, of one test that starts a process. That one's id, too."""
    pid_file = tmp_path / "pid"
    text = textwrap.dedent(_TEST).format(settings=settings, after=after, pid_file=str(pid_file))
    (tmp_path / "test_one.py").write_text(text)
    (tmp_path / "conftest.py").write_text(f"{(_ROOT / 'tests' / 'conftest.py').read_text()}{_IMPATIENT}")
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    sampled\n    scaled\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != MARK} | {"PYTHONPATH": str(_ROOT)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    return done, int(pid_file.read_text())


def test_a_process_that_is_left_is_named_and_killed_and_the_run_fails(tmp_path: Path) -> None:
    done, pid = _run(tmp_path, "start_new_session=True")

    wait_until(lambda: is_gone(pid), "the process to end")
    assert done.returncode == 1, done.stdout
    assert "1 passed" in done.stdout
    assert "processes that outlived the tests" in done.stdout
    assert f"{pid}: {sys.executable} -c import time; time.sleep(1000) left-by-a-test" in done.stdout


def test_a_process_that_a_test_ends_is_none(tmp_path: Path) -> None:
    done, pid = _run(tmp_path, "", "process.returncode = None; process.kill(); process.wait()")

    assert is_gone(pid)
    assert done.returncode == 0, done.stdout
    assert "outlived" not in done.stdout


def test_a_process_without_the_mark_of_this_run_is_left_alone(tmp_path: Path) -> None:
    done, pid = _run(tmp_path, f"start_new_session=True, env={{{MARK!r}: 'of another run'}}")
    try:
        assert done.returncode == 0, done.stdout
        assert not is_gone(pid)
    finally:
        os.kill(pid, 9)
