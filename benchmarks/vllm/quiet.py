"""Keeps other work out of measurements: waits until this process's children rest, and measures other programs' load."""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

_INTERVAL_S = 0.25
_IDLE_SHARE = 0.04
_PATIENCE_S = 60.0
_STRANGERS_SHARE = 0.05


def wait_until_quiet() -> float:
    """Wait until no descendant computes or writes. Returns the seconds."""
    started_at = time.monotonic()
    before = _work()
    while True:
        time.sleep(_INTERVAL_S)
        now = _work()
        cpu_s, written = now[0] - before[0], now[1] - before[1]
        if cpu_s <= _IDLE_SHARE * _INTERVAL_S and not written:
            return time.monotonic() - started_at
        if time.monotonic() - started_at > _PATIENCE_S:
            raise TimeoutError(f"the engines are never quiet: {cpu_s / _INTERVAL_S:.0%} of a core, {written} bytes")
        before = now


class OtherWork:
    """The share of the machine that other programs took during a measurement."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._others_s = 0.0

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        before, own_before = _machine_s(), _own_s()
        yield
        now, own_now = _machine_s(), _own_s()
        self._total_s += now[0] - before[0]
        self._others_s += max(0.0, now[1] - before[1] - (own_now - own_before))

    @property
    def share(self) -> float:
        """The share of all cores' time."""
        return self._others_s / self._total_s if self._total_s else 0.0

    def tell(self, say: Callable[[str], object]) -> None:
        say(f"other processes took {self.share:.0%} of the machine meanwhile")
        if self.share > _STRANGERS_SHARE:
            say("that is much: these numbers are worth little")


def _machine_s() -> tuple[float, float]:
    """Seconds of all cores so far, and the busy ones among them."""
    fields = [int(one) for one in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    ticks = os.sysconf("SC_CLK_TCK")
    return sum(fields) / ticks, (sum(fields) - fields[3] - fields[4]) / ticks


def _own_s() -> float:
    """This process and its descendants."""
    own = os.times()
    return own.user + own.system + _work()[0]


def _work() -> tuple[float, int]:
    """CPU seconds and bytes written so far."""
    cpu_s, written = 0.0, 0
    for pid in _descendants():
        with contextlib.suppress(OSError):  # it ended meanwhile
            fields = _stat(pid)
            cpu_s += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            for line in Path(f"/proc/{pid}/io").read_text().splitlines():
                if line.startswith("write_bytes"):
                    written += int(line.split()[1])
    return cpu_s, written


def _descendants() -> list[int]:
    children: defaultdict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                children[int(_stat(int(entry.name))[1])].append(int(entry.name))
    found = [os.getpid()]
    for pid in found:
        found += children[pid]
    return found[1:]


def _stat(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: its state, its parent, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
