"""The names of parts in logs and in the runtime folder: short, safe in a path, unique."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from pathlib import Path

from kvtier.transport.address import UnixAddress, parse_address

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_MAX_CHARACTERS = 32  # of the 107 bytes that a socket's path may have


class RuntimeNames:
    def __init__(self, folder: Path, *, taken: Iterable[str] = ()) -> None:
        self._folder = folder
        self._taken = set(taken)

    def take(self, wanted: str) -> str:
        """`wanted` made safe; with a number if it is taken."""
        return self._take(_file_safe(wanted))

    def take_several(self, wanted: str, count: int) -> list[str]:
        """`wanted-0`, `wanted-1` and so on; without a number if there is only one."""
        safe = _file_safe(wanted)
        return [self._take(safe if count == 1 else f"{safe}-{number}") for number in range(count)]

    def socket(self, name: str) -> UnixAddress:
        """The address of the part `name`. Raises `ConfigError` if the runtime folder's path is too long for that."""
        return unix_address(self._folder / f"{name}.sock")

    def _take(self, safe: str) -> str:
        candidates = itertools.chain([safe], (f"{safe}-{number}" for number in itertools.count(2)))
        name = next(one for one in candidates if one not in self._taken)
        self._taken.add(name)
        return name


def _file_safe(text: str) -> str:
    return _UNSAFE.sub("-", text).strip("-.")[:_MAX_CHARACTERS].strip("-.") or "part"


def unix_address(path: Path) -> UnixAddress:
    """Raises `ConfigError` if the path is too long for a socket."""
    address = parse_address(f"unix:{path}")
    assert isinstance(address, UnixAddress)
    return address
