"""KV events of several engines of vLLM: each publishes on a port of its own.

The port in the file is the first engine's, and the next ones follow, as for vLLM's own data-parallel ranks.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import msgspec

_OPTION = re.compile(r"--kv[-_]events[-_]config")
_VLLMS_OWN = "tcp://*:5557"
_BOUND = re.compile(r"(tcp://.*(?:\*|::).*:)(\d{1,5})")
"""vLLM connects to other addresses: several engines may share those."""

_REPLAYED = re.compile(r"(tcp://.*:)(\d{1,5})")


def with_own_ports(arguments: Sequence[str], number: int) -> list[str]:
    """The arguments of engine `number`. A config that is wrong stays as it is, for vLLM to refuse."""
    moved = list(arguments)
    for index, argument in enumerate(arguments):
        option, _, value = argument.partition("=")
        if number and _OPTION.fullmatch(option):
            if value:
                moved[index] = f"{option}={_moved(value, number)}"
            elif index + 1 < len(moved):
                moved[index + 1] = _moved(moved[index + 1], number)
    return moved


def _moved(value: str, number: int) -> str:
    try:
        config = msgspec.json.decode(value, type=dict[str, object])
    except msgspec.DecodeError:
        return value
    config.setdefault("endpoint", _VLLMS_OWN)
    for name, pattern in (("endpoint", _BOUND), ("replay_endpoint", _REPLAYED)):
        match = pattern.fullmatch(str(config.get(name)))
        if match is not None:
            config[name] = f"{match[1]}{int(match[2]) + number}"
    return msgspec.json.encode(config).decode()
