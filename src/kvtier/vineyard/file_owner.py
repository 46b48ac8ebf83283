"""The owner of a temporary file in a folder that several hosts share: a name that shows whether the owner is dead."""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_names_in_use: set[str] = set()
"""The names of this process."""


def owner_name() -> str:
    """A name that no other owner has: this machine since its start, this process, and a random number.

    In use until `give_up_name`.
    """
    name = f"{_machine()}.{os.getpid()}.{_started_at(os.getpid())}.{secrets.token_hex(4)}"
    _names_in_use.add(name)
    return name


def give_up_name(owner: str) -> None:
    """Give up a name of this process. Further calls are harmless."""
    _names_in_use.discard(owner)


def is_surely_dead(owner: str) -> bool:
    """True if the owner was a process of this machine and has ended, or this process has given the name up.

    Nothing is known about other machines' processes.
    """
    try:
        machine, pid, started_at, _ = owner.split(".")
        if machine != _machine():
            return False
        if _started_at(int(pid)) != started_at:
            return True
        return int(pid) == os.getpid() and owner not in _names_in_use
    except ValueError:
        return False


def _machine() -> str:
    """This machine since its start, and the processes that see each other's numbers on it."""
    try:
        seen = _BOOT_ID.read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        seen = secrets.token_hex(16)  # no owner can be identified: age alone decides
    return hashlib.sha256(seen.encode()).hexdigest()[:12]


def _started_at(pid: int) -> str:
    """When the process began, in the kernel's ticks; empty if it does not exist."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return ""
    return after_name.split()[19]
