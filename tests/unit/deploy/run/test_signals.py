"""Waiting for signals: what a process that was stopped meanwhile hears is no signal."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from tests.support.waiting import LIMIT_S

_PROGRAM = """
import signal
from kvtier.deploy.run.signals import is_signalled
signals = (signal.SIGTERM, signal.SIGINT)
signal.pthread_sigmask(signal.SIG_BLOCK, signals)
print("waiting", flush=True)
while not is_signalled(signals):
    pass
print("signalled", flush=True)
"""


def test_a_process_that_was_stopped_for_a_while_goes_on_until_a_signal_comes() -> None:
    with subprocess.Popen([sys.executable, "-c", _PROGRAM], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
        for _ in range(2):
            process.send_signal(signal.SIGSTOP)
            time.sleep(0.6)
            process.send_signal(signal.SIGCONT)
            time.sleep(0.4)
        assert process.poll() is None
        process.terminate()
        assert process.stdout.readline() == "signalled\n"
        assert process.wait(LIMIT_S) == 0
