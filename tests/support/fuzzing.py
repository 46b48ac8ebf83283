"""Seeded cases for the tests of hostile input: which seeds this run has, and ways to spoil bytes and values."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from typing import Any

from tests.support.examples import examples

SOAK_TIMES = 20

_WORDS = ("", "a", "1e999", "0x10", "\x1b[31m", "\u202e", "é" * 300, "../..", "/", "\0", "null", "true", "-1", "1:30")
_NUMBERS = (0, -1, 1, 2**31, 2**32, 2**63, 2**64, -(2**63), 10**9, 10**30, 0.5, -0.0, 1e300, 1e-300)


def seeds(count: int) -> range:
    """All of `count` seeds, or a tenth of them under `make test`."""
    return range(examples(count))


@contextlib.contextmanager
def told(seed: int, case: object) -> Iterator[None]:
    """Whatever fails inside says which case it was."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"seed {seed}: {repr(case)[:2000]}")
        raise


def spoiled_bytes(rng: random.Random, raw: bytes) -> bytes:
    """`raw` with one to four things wrong."""
    spoiled = bytearray(raw)
    for _ in range(rng.randrange(1, 5)):
        place = rng.randrange(len(spoiled) + 1)
        match rng.randrange(7):
            case 0 if spoiled:
                spoiled[place % len(spoiled)] ^= 1 << rng.randrange(8)
            case 1:
                del spoiled[place:]
            case 2:
                spoiled[place:place] = rng.randbytes(rng.randrange(1, 64))
            case 3:
                del spoiled[place : place + rng.randrange(1, 64)]
            case 4:
                spoiled[place : place + 8] = rng.choice((b"\xff" * 8, bytes(8), (1 << 62).to_bytes(8, "little")))
            case 5:
                spoiled[place:place] = spoiled[: rng.randrange(1, 256)]
            case _:
                spoiled[place:place] = rng.choice(_WORDS).encode()
    return bytes(spoiled)


def spoiled_value(rng: random.Random, value: Any) -> Any:
    """A JSON value like `value` with one thing in it changed, gone or added."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(sorted(value))
        changed = dict(value)
        match rng.randrange(4):
            case 0:
                del changed[name]
            case 1:
                changed[rng.choice(_WORDS)] = any_value(rng)
            case _:
                changed[name] = spoiled_value(rng, value[name])
        return changed
    if isinstance(value, list) and value and rng.random() < 0.8:
        place = rng.randrange(len(value))
        return [*value[:place], spoiled_value(rng, value[place]), *value[place + 1 :]]
    return any_value(rng)


def any_value(rng: random.Random, depth: int = 0) -> Any:
    match rng.randrange(8):
        case 0:
            return rng.choice(_WORDS)
        case 1 | 2:
            return rng.choice(_NUMBERS)
        case 3:
            return rng.choice((None, True, False))
        case 4:
            return "x" * rng.choice((1, 256, 5000))
        case 5 if depth < 3:
            return [any_value(rng, depth + 1) for _ in range(rng.randrange(4))]
        case 6 if depth < 3:
            return {rng.choice(_WORDS): any_value(rng, depth + 1) for _ in range(rng.randrange(4))}
    return rng.randrange(-5, 100)


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()
