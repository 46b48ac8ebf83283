"""Traces made up to be hard in one way each: scans, loops, popularity, shared prompts, and a change of traffic.

The same seed makes the same trace. Every block is full.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from kvtier.simulate.trace import BLOCK_TOKENS, TracedRequest


def synthetic_traces(num_requests: int = 2000) -> dict[str, list[TracedRequest]]:
    """The traces by name; each has about `num_requests`."""
    chats = list(_chats(num_requests, 1))
    loop = list(_loop(num_requests))
    return {
        "scan among chats": _merged(chats, _scan(num_requests // 2)),
        "loop": loop,
        "zipf": list(_zipf(num_requests, 2)),
        "chats": chats,
        "loop, then chats": loop[: num_requests // 2] + _later(chats[num_requests // 2 :], 100_000.0),
    }


def _request(at: float, hashes: list[int]) -> TracedRequest:
    return TracedRequest(at, len(hashes) * BLOCK_TOKENS, 100, tuple(hashes))


def _scan(count: int) -> Iterator[TracedRequest]:
    """Prompts that are never repeated."""
    for number in range(count):
        first = 10_000_000 + number * 40
        yield _request(number * 4.0 + 0.5, list(range(first, first + 40)))


def _loop(count: int, num_prompts: int = 60) -> Iterator[TracedRequest]:
    """The same prompts, one after the other."""
    for number in range(count):
        first = 20_000_000 + number % num_prompts * 40
        yield _request(number * 2.0, list(range(first, first + 40)))


def _zipf(count: int, seed: int, num_prompts: int = 1000) -> Iterator[TracedRequest]:
    """Prompts of unequal popularity, independent of what came before."""
    chance = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(num_prompts)]
    for number, prompt in enumerate(chance.choices(range(num_prompts), weights, k=count)):
        first = 30_000_000 + prompt * 20
        yield _request(number * 1.0, list(range(first, first + 20)))


def _chats(count: int, seed: int, num_open: int = 40) -> Iterator[TracedRequest]:
    """Chats that grow by a few blocks a turn behind one of three system prompts, and end after some turns."""
    chance = random.Random(seed)
    next_block = 40_000_000
    chats: list[list[int]] = []
    for number in range(count):
        if len(chats) < num_open:
            system = 39_000_000 + chance.randrange(3) * 8
            chats.append(list(range(system, system + 8)))
        chat = chance.choice(chats[-10:] if chance.random() < 0.7 else chats)
        grown = chance.randint(2, 12)
        chat.extend(range(next_block, next_block + grown))
        next_block += grown
        yield _request(number * 2.0, list(chat))
        if chance.random() < 0.08:
            chats.remove(chat)


def _later(requests: list[TracedRequest], by_s: float) -> list[TracedRequest]:
    return [
        TracedRequest(each.arrived_s + by_s, each.input_length, each.output_length, each.hashes, each.session)
        for each in requests
    ]


def _merged(one: list[TracedRequest], other: Iterator[TracedRequest]) -> list[TracedRequest]:
    return sorted([*one, *other], key=lambda request: request.arrived_s)
