"""What a part has started ends with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kvtier.deploy.run.process_group import end_group
from tests.support.waiting import wait_until

_PROGRAM = """
import subprocess, sys, time
from multiprocessing import shared_memory
memory = shared_memory.SharedMemory(create=True, size=4096)
memory.buf[0] = 1
inner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(memory.name, inner.pid, flush=True)
time.sleep(600)
"""


def test_a_group_ends_with_its_shared_memory() -> None:
    command = [sys.executable, "-c", _PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        name, inner = process.stdout.readline().split()
        assert Path("/dev/shm", name).exists()

        end_group(process.pid, but=process.pid)
        assert process.poll() is None
        end_group(process.pid)
        process.wait()

    assert not Path("/dev/shm", name).exists()
    wait_until(lambda: not _runs(inner))


def _runs(pid: str) -> bool:
    try:
        return " Z " not in Path("/proc", pid, "stat").read_text()
    except OSError:
        return False
