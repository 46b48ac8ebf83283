"""A made-up trace of agents and chats. Choices of the policy saw no sizes of it but 500 and 1,000 blocks.

Sessions arrive in a Poisson process, one every 25 s for three hours. Each is an agent or a chat, with equal chance,
behind one of twelve system prompts of 4 to 16 blocks, of which the n-th has a weight of 1/n. It begins with a text of
a log-normal number of blocks (median 4), and every turn adds one block and a geometric number of further ones (mean
2). An agent has 30 turns on average, a chat 8, both geometric; a session also ends when its prompt has 250 blocks.
Between turns pass 1 s and an exponential time (mean 8 s) for an agent, a log-normal time (median 60 s, sigma 1.2) for
a chat. After any turn of any session there may be a pause of half an hour to an hour and a half, with a chance of 1 in
50.
"""

from __future__ import annotations

import math
import random

from kvtier.simulate.trace import BLOCK_TOKENS, TracedRequest, by_arrival

_SEED = 2026
_SECONDS = 3 * 3600.0
_ARRIVAL_S = 25.0
_NUM_SYSTEM_PROMPTS = 12
_MAX_BLOCKS = 250
_AGENT_TURNS, _CHAT_TURNS = 30, 8
_PAUSE_CHANCE = 0.02


def held_out_trace() -> list[TracedRequest]:
    """The same trace every time, in the order of arrival. Every block is full."""
    chance = random.Random(_SEED)
    numbers = _Numbers()
    systems = [numbers.take(chance.randint(4, 16)) for _ in range(_NUM_SYSTEM_PROMPTS)]
    weights = [1 / (place + 1) for place in range(_NUM_SYSTEM_PROMPTS)]
    requests: list[TracedRequest] = []
    arrived_s, session = chance.expovariate(1 / _ARRIVAL_S), 0
    while arrived_s < _SECONDS:
        prompt = list(chance.choices(systems, weights)[0])
        prompt += numbers.take(max(1, round(chance.lognormvariate(math.log(4), 1.0))))
        requests += _session(chance, numbers, prompt, arrived_s, str(session))
        arrived_s += chance.expovariate(1 / _ARRIVAL_S)
        session += 1
    return by_arrival(requests)


class _Numbers:
    """Block numbers, each given out once."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> list[int]:
        self._next += count
        return list(range(self._next - count, self._next))


def _session(
    chance: random.Random, numbers: _Numbers, prompt: list[int], at_s: float, session: str
) -> list[TracedRequest]:
    is_agent = chance.random() < 0.5
    num_turns = _geometric(chance, _AGENT_TURNS if is_agent else _CHAT_TURNS)
    turns = []
    for _ in range(num_turns):
        del prompt[_MAX_BLOCKS:]
        turns.append(TracedRequest(at_s, len(prompt) * BLOCK_TOKENS, BLOCK_TOKENS, tuple(prompt), session))
        if len(prompt) == _MAX_BLOCKS:
            break
        prompt += numbers.take(_geometric(chance, 3))
        at_s += 1.0 + chance.expovariate(1 / 8.0) if is_agent else chance.lognormvariate(math.log(60), 1.2)
        if chance.random() < _PAUSE_CHANCE:
            at_s += chance.uniform(1800, 5400)
    return turns


def _geometric(chance: random.Random, mean: float) -> int:
    """One or more, with the mean `mean`."""
    return 1 + int(math.log(1 - chance.random()) / math.log(1 - 1 / mean))
